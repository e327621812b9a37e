"""Plugins that answer as a test scripts them. They run on the plugins' thread; the test writes the script on its own thread."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from amqtt.contexts import Action
from amqtt.events import BrokerEvents
from amqtt.plugins.base import BaseAuthPlugin, BasePlugin, BaseTopicPlugin

from tests.waiting import WAIT_S_MAX

BROKEN = "broken"
"""An answer that makes the plugin raise an error."""

POLL_S = 0.001


@dataclass
class Script:
    """The answers of the plugins, and a record of the questions."""

    users: dict[str | None, Any] = field(default_factory=dict)
    """The answers to authentication, by user name. Other users are authenticated."""
    topics: dict[tuple[str, str], Any] = field(default_factory=dict)
    """The answers by action and topic. Everything else is allowed."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """The questions in order: action and topic, or "connect" and client id."""
    sessions: list[Any] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)
    may_answer: threading.Event = field(default_factory=threading.Event)
    blocks: bool = False
    """Whether a waiting plugin blocks its thread, as a bad plugin does."""
    only_logins: bool = False
    """Whether only authentication waits."""
    built: list[tuple[int, int]] = field(default_factory=list)
    """The instances of `Blocker` and the threads that constructed them."""
    calls: list[tuple[int, int]] = field(default_factory=list)
    """The instances of `Blocker` that were asked, and the threads on which they were."""
    topic_threads: set[int] = field(default_factory=set)
    """The threads on which `Topics` was asked."""

    async def wait(self, *, is_login: bool = False) -> None:
        if self.only_logins and not is_login:
            return
        if self.blocks:
            self.may_answer.wait(WAIT_S_MAX)
        while not self.may_answer.is_set():  # noqa: ASYNC110 - set on another thread
            await asyncio.sleep(POLL_S)

    def times_asked(self, action: str, topic: str) -> int:
        return self.asked.count((action, topic))


script = Script()


def new_script() -> Script:
    """Reset the script for the next test, and return it."""
    global script
    script = Script()
    script.may_answer.set()
    return script


def say(answer: Any) -> Any:
    if answer == BROKEN:
        raise RuntimeError("the plugin is broken")
    return answer


class Users(BaseAuthPlugin):  # type: ignore[misc]
    async def authenticate(self, *, session: Any) -> bool | None:
        script.asked.append(("connect", session.client_id))
        script.sessions.append(session)
        await script.wait()
        return say(script.users.get(session.username, True))

    async def on_broker_client_connected(self, *, client_id: str, client_session: Any) -> None:
        script.told.append(("connected", client_id))

    async def on_broker_client_disconnected(self, *, client_id: str, client_session: Any) -> None:
        script.told.append(("disconnected", client_id))


class Blocker(BaseAuthPlugin):  # type: ignore[misc]
    """Only authenticates, so that it may run apart from the plugins that decide about topics."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        script.built.append((id(self), threading.get_ident()))

    async def authenticate(self, *, session: Any) -> bool | None:
        script.asked.append(("connect", session.client_id))
        script.calls.append((id(self), threading.get_ident()))
        await script.wait(is_login=True)
        return say(script.users.get(session.username, True))


class Renamer(BaseAuthPlugin):  # type: ignore[misc]
    """Changes what is known of a client when it authenticates."""

    async def authenticate(self, *, session: Any) -> bool | None:
        script.asked.append(("connect", session.client_id))
        session.attributes["role"] = f"of {session.username}"
        session.username = f"renamed {session.username}"
        return True


class ParallelBlocker(Blocker):
    """May have several instances, on as many threads."""

    runs_in_parallel = True


class Both(BaseAuthPlugin, BaseTopicPlugin):  # type: ignore[misc]
    """Keeps what it learns about a client when it authenticates, and decides about topics by it."""

    runs_in_parallel = True

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.users: dict[str, str] = {}

    async def authenticate(self, *, session: Any) -> bool | None:
        self.users[session.client_id] = session.username
        return True

    async def topic_filtering(
        self, *, session: Any = None, topic: str | None = None, action: Action | None = None
    ) -> bool | None:
        return topic == f"of/{self.users[session.client_id]}"


class MoreUsers(BaseAuthPlugin):  # type: ignore[misc]
    async def authenticate(self, *, session: Any) -> bool | None:
        return say(script.users.get(f"{session.username} again", None))


class Topics(BaseTopicPlugin):  # type: ignore[misc]
    async def topic_filtering(
        self, *, session: Any = None, topic: str | None = None, action: Action | None = None
    ) -> bool | None:
        script.asked.append((str(action), str(topic)))
        script.topic_threads.add(threading.get_ident())
        await script.wait()
        return say(script.topics.get((str(action), str(topic)), True))


class MoreTopics(BaseTopicPlugin):  # type: ignore[misc]
    async def topic_filtering(
        self, *, session: Any = None, topic: str | None = None, action: Action | None = None
    ) -> bool | None:
        return say(script.topics.get((str(action), f"{topic} again"), True))


class Sleeper(BaseTopicPlugin):  # type: ignore[misc]
    async def topic_filtering(
        self, *, session: Any = None, topic: str | None = None, action: Action | None = None
    ) -> bool | None:
        time.sleep(0.02)  # noqa: ASYNC251 - what a careless plugin does
        return True


class Herald(BasePlugin):  # type: ignore[misc]
    async def on_broker_post_start(self) -> None:
        await self.context.retain_message("news", b"started", 1)

    async def on_broker_client_connected(self, *, client_id: str, client_session: Any) -> None:
        known = [session.client_id for session in self.context.sessions]
        assert self.context.get_session(client_id) is client_session
        await self.context.broadcast_message("arrivals", ",".join(known).encode())

    async def on_broker_message_received(self, *, client_id: str, message: Any) -> None:
        raise AssertionError("the node must not tell plugins of messages")


class Choosy(BaseAuthPlugin):  # type: ignore[misc]
    @dataclass
    class Config:
        secret: str
        """An option without a default."""

    async def authenticate(self, *, session: Any) -> bool | None:
        return bool(session.password == self.config.secret)


assert BrokerEvents.CLIENT_CONNECTED == "broker_client_connected"
