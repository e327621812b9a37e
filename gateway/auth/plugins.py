"""amqtt's plugins, on a thread and an event loop of their own.

A plugin may take its time: a password hash is a tenth of a second of arithmetic, a directory or a database is a network away,
and a plugin that a user wrote may block. None of that may hold up messages, so nothing of it runs on the node's loop: questions
go to the thread, answers come back, and nothing is shared in between but these.

What a plugin is given is what amqtt's broker (0.12) gives it: a context with its configuration, and a session with user name,
password, client id, address and TLS object. Its rules hold too. Authentication: plugins that answer None don't count, at
least one must answer, and all that do must say True. Topics: all must say True (amqtt.broker, `_authenticate` and
`_topic_filtering`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple, get_type_hints

import structlog
from amqtt.broker import BrokerContext
from amqtt.contexts import Action
from amqtt.events import BrokerEvents
from amqtt.plugins.base import BasePlugin
from amqtt.plugins.manager import PluginManager
from amqtt.session import Session
from amqtt.utils import import_string

from penstock.gateway.options import AccessOptions
from penstock.gateway.protocol.connect import Connect
from penstock.gateway.transport.peer import Peer

logger = structlog.get_logger("gateway")

NAMESPACE = "amqtt.broker.plugins"
"""Entry points of the plugins that amqtt's older sections name."""

END_S = 1.0
"""How long the end of the thread is waited for. It is a daemon: one that a plugin blocks ends with the process."""

SERVED_EVENTS = frozenset(
    (
        BrokerEvents.PRE_START,
        BrokerEvents.POST_START,
        BrokerEvents.PRE_SHUTDOWN,
        BrokerEvents.POST_SHUTDOWN,
        BrokerEvents.CLIENT_CONNECTED,
        BrokerEvents.CLIENT_DISCONNECTED,
    )
)
"""What plugins are told. Not what happens to a message: a call per message is what this broker is there to avoid."""

Publish = Callable[[str, bytes, int, bool], None]
"""Publishes a message of a plugin: topic, body, QoS, retain. Called on the plugins' thread."""


class PluginsUnavailable(OSError):
    """Raised when plugins can't be loaded. It names the plugin and what was wrong."""


class ClientSession(Session):  # type: ignore[misc] # amqtt ships no types
    """A client as a plugin sees it: amqtt's session without its queues and its state machine, which take 23 KB and 0.7 ms."""

    def __init__(self, wish: Connect, client_id: str, peer: Peer) -> None:
        self.client_id = client_id
        self.remote_address = peer.host
        self.remote_port = peer.port
        self.ssl_object = peer.ssl_object
        self.username = wish.username if peer.username is None else peer.username
        # A password that is no text fits no plugin: it becomes one that nobody has.
        self.password = wish.password.decode(errors="surrogateescape") if wish.password is not None else None
        self.clean_session = wish.clean_start
        self.keep_alive = wish.keep_alive_s
        self.is_anonymous = False
        self.attributes: dict[str, Any] = {}
        will = wish.will
        self.will_flag = will is not None
        self.will_topic = will.topic if will else None
        self.will_message = will.body if will else None
        self.will_qos = will.qos if will else None
        self.will_retain = will.retain if will else None

    def __repr__(self) -> str:
        return f"ClientSession({self.client_id!r})"


class GatewayContext(BrokerContext):  # type: ignore[misc] # amqtt ships no types
    """What a plugin may do with the broker: publish."""

    def __init__(self, config: dict[str, Any], publish: Publish, sessions: dict[str, ClientSession]) -> None:
        super().__init__(None)
        self.config = config
        self._publish = publish
        self._sessions = sessions

    async def broadcast_message(self, topic: str, data: bytes, qos: int | None = None) -> None:
        """Publish a message."""
        self._publish(topic, bytes(data), qos or 0, False)

    async def retain_message(self, topic_name: str, data: bytes | bytearray, qos: int | None = None) -> None:
        """Publish a retained message."""
        self._publish(topic_name, bytes(data), qos or 0, True)

    @property
    def sessions(self) -> Iterator[ClientSession]:
        """Give the clients that are connected."""
        yield from tuple(self._sessions.values())

    def get_session(self, client_id: str) -> ClientSession | None:
        """Return a client that is connected."""
        return self._sessions.get(client_id)

    @property
    def retained_messages(self) -> dict[str, Any]:
        raise NotImplementedError("Penstock shows plugins no retained messages; subscribe as a client to get them")

    @property
    def subscriptions(self) -> dict[str, Any]:
        raise NotImplementedError("Penstock shows plugins no subscriptions")

    async def add_subscription(self, client_id: str, topic: str | None, qos: int | None) -> None:
        raise NotImplementedError("Penstock lets clients subscribe, not plugins")


class Verdict(NamedTuple):
    """Whether a client may connect, and as what."""

    authenticated: bool
    will_allowed: bool


class Plugins:
    """The plugins of a node.

    Parameters:
        options: see `AccessOptions`; one of its tables is given.
        publish: publishes what a plugin sends; called on the plugins' thread.
    """

    def __init__(self, options: AccessOptions, publish: Publish) -> None:
        self._options = options
        self._publish = publish
        self._sessions: dict[str, ClientSession] = {}
        """Clients that are connected. Only the plugins' thread touches it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._manager: PluginManager[Any]
        self._events: frozenset[BrokerEvents] = frozenset()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="penstock-plugins", daemon=True)
        self.authenticates = False
        """Whether there are authentication plugins."""
        self.filters_topics = False
        """Whether there are topic plugins."""

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def start(self) -> None:
        """Load the plugins and tell them that the broker starts.

        Raises:
            PluginsUnavailable: one can't be loaded, or doesn't take its options.
        """
        self._thread.start()
        try:
            await self._there(self._load())
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    async def stop(self) -> None:
        """Tell the plugins that it is over, let them close, end the thread. One that blocks it is not waited for."""
        try:
            async with asyncio.timeout(self._options.plugin_timeout_ms / 1000):
                await self._there(self._close())
        except Exception as error:  # whatever a plugin does at its end must not keep the node from its own
            logger.warning("plugins.close_failed", why=repr(error))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, END_S)

    async def _there(self, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _load(self) -> None:
        options = self._options
        config: dict[str, Any]
        if options.plugins is not None:
            config = {"plugins": {path: _typed(path, table) for path, table in options.plugins.items()}}
        else:
            config = {"auth": options.auth, "topic-check": options.topic_check}
            config = {name: table for name, table in config.items() if table is not None}
        context = GatewayContext(config, self._publish, self._sessions)
        try:
            self._manager = PluginManager(NAMESPACE, context, self._loop)
        except Exception as error:  # amqtt's own errors have no common base, and a plugin's constructor may raise any
            raise PluginsUnavailable(f"the plugins of mqtt.access can't be loaded: {_explain(error)}") from error
        self.authenticates = bool(self._manager._auth_plugins)
        self.filters_topics = self._manager.is_topic_filtering_enabled() and bool(self._manager._topic_plugins)
        handled = [event for event in BrokerEvents if any(hasattr(plugin, f"on_{event}") for plugin in self._manager.plugins)]
        self._events = frozenset(handled) & SERVED_EVENTS
        for event in handled:
            if event not in SERVED_EVENTS:
                logger.warning("plugins.event_not_served", of=str(event))
        await self._manager.fire_event(BrokerEvents.PRE_START, wait=True)
        await self._manager.fire_event(BrokerEvents.POST_START, wait=True)
        logger.info("plugins.loaded", plugins=[type(plugin).__name__ for plugin in self._manager.plugins])

    async def _close(self) -> None:
        await self._manager.fire_event(BrokerEvents.PRE_SHUTDOWN, wait=True)
        await self._manager.fire_event(BrokerEvents.POST_SHUTDOWN, wait=True)
        await self._manager.close()

    # --- questions, from the node's loop ----------------------------------------------------------------------------

    def ask(self, question: Coroutine[Any, Any, Any], answer: Callable[[Any, str], None]) -> None:
        """Have a question answered: one of those below. `answer` is called on this loop's thread.

        It gets the answer and an empty string, or None and what went wrong.
        """
        loop = asyncio.get_running_loop()
        self._loop.call_soon_threadsafe(self._begin, question, answer, loop)

    def _begin(
        self, question: Coroutine[Any, Any, Any], answer: Callable[[Any, str], None], home: asyncio.AbstractEventLoop
    ) -> None:
        task = self._loop.create_task(self._answer(question, answer, home))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, question: Coroutine[Any, Any, Any], answer: Callable[[Any, str], None], home: asyncio.AbstractEventLoop
    ) -> None:
        found, error = None, ""
        try:
            async with asyncio.timeout(self._options.plugin_timeout_ms / 1000):
                found = await question
        except TimeoutError:
            error = "timeout"
        except Exception as raised:  # a plugin's defect denies, and ends nothing
            error = repr(raised)
        if not home.is_closed():
            home.call_soon_threadsafe(answer, found, error)

    async def connect(self, session: ClientSession, *, is_known: bool) -> Verdict:
        """Return whether a client is who it says (`is_known`: its certificate has shown that), and may have its will."""
        authenticated = is_known
        if not is_known:
            answers = (await self._manager.map_plugin_auth(session=session)).values()
            counted = [answer for answer in answers if answer is not None]
            authenticated = bool(counted) and all(counted)
        will_allowed = True
        if authenticated and session.will_topic is not None and self.filters_topics:
            will_allowed = await self._may(session, session.will_topic, Action.PUBLISH)
        return Verdict(authenticated, will_allowed)

    async def topics(self, session: ClientSession, topics: list[str], action: str) -> list[bool | str]:
        """Return for each topic, or filter, whether a client may do something with it, or what went wrong.

        `action` is one of amqtt's.
        """
        asked = (self._may(session, topic, Action(action)) for topic in topics)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer if isinstance(answer, bool) else repr(answer) for answer in answers]

    async def _may(self, session: ClientSession, topic: str, action: Action) -> bool:
        answers = await self._manager.map_plugin_topic(session=session, topic=topic, action=action)
        return all(answers.values())

    # --- events -----------------------------------------------------------------------------------------------------

    def connected(self, session: ClientSession) -> None:
        """Tell the plugins of a client that was accepted."""
        if BrokerEvents.CLIENT_CONNECTED in self._events or BrokerEvents.CLIENT_DISCONNECTED in self._events:
            self._loop.call_soon_threadsafe(self._tell, BrokerEvents.CLIENT_CONNECTED, session)

    def disconnected(self, session: ClientSession) -> None:
        """Tell the plugins of a client that has left."""
        if BrokerEvents.CLIENT_CONNECTED in self._events or BrokerEvents.CLIENT_DISCONNECTED in self._events:
            self._loop.call_soon_threadsafe(self._tell, BrokerEvents.CLIENT_DISCONNECTED, session)

    def _tell(self, event: BrokerEvents, session: ClientSession) -> None:
        client_id = str(session.client_id)
        if event is BrokerEvents.CLIENT_CONNECTED:
            self._sessions[client_id] = session
        elif self._sessions.get(client_id) is session:
            del self._sessions[client_id]
        task = self._loop.create_task(self._manager.fire_event(event, client_id=client_id, client_session=session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _typed(path: str, table: Any) -> Any:
    """Return the options of a plugin with names in place of the enumerations that amqtt's reader won't take as text."""
    if not isinstance(table, dict):
        return table
    try:
        config = getattr(import_string(path), "Config", None)
    except ImportError:
        return table  # amqtt says it better
    if not (isinstance(config, type) and is_dataclass(config) and issubclass(import_string(path), BasePlugin)):
        return table
    hints = get_type_hints(config)
    typed = dict(table)
    for declared in fields(config):
        hint, value = hints[declared.name], table.get(declared.name)
        if isinstance(hint, type) and issubclass(hint, Enum) and isinstance(value, str):
            typed[declared.name] = hint(value)
    return typed


def _explain(error: BaseException) -> str:
    """Return what an error and its causes say: amqtt's own errors often name a class only."""
    said: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        said.append(str(cause) or type(cause).__name__)
        cause = cause.__cause__
    return ": ".join(dict.fromkeys(said))


logging.getLogger("amqtt").setLevel(logging.WARNING)
