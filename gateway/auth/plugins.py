"""The plugins of amqtt, on a thread and an event loop of their own.

A plugin may be slow: it computes a password hash, asks a directory or a database over the network, or blocks. None of that may
delay messages, so no plugin runs on the node's loop. Questions go to the thread and answers come back; the two loops share
nothing else.

A plugin gets what amqtt's broker (0.12) gives it: a context with its configuration, and a session with user name, password,
client id, address and TLS object. The rules of amqtt hold, too. Authentication: plugins that answer None don't count, at least
one must answer, and all that answer must say True. Topics: all must say True (amqtt.broker, `_authenticate` and
`_topic_filtering`). One thing is different: a plugin that raises, or that returns None about a topic, has not said no.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final, TypeAlias, get_type_hints

import structlog
from amqtt.broker import BrokerContext
from amqtt.contexts import Action
from amqtt.events import BrokerEvents
from amqtt.plugins.base import BasePlugin
from amqtt.plugins.manager import PluginManager
from amqtt.session import Session
from amqtt.utils import import_string

from penstock.gateway.auth.containment import use_containment
from penstock.gateway.auth.questions import Question, Work
from penstock.gateway.options import AccessOptions
from penstock.gateway.protocol.connect import Connect
from penstock.gateway.transport.peer import Peer

logger = structlog.get_logger("gateway")

NAMESPACE: Final = "amqtt.broker.plugins"
"""The entry points of the plugins that amqtt's older sections name."""

END_S: Final = 1.0
"""How long the node waits for the thread to end, in seconds. A blocked thread is a daemon, so it ends with the process."""

SERVED_EVENTS: Final = frozenset(
    (
        BrokerEvents.PRE_START,
        BrokerEvents.POST_START,
        BrokerEvents.PRE_SHUTDOWN,
        BrokerEvents.POST_SHUTDOWN,
        BrokerEvents.CLIENT_CONNECTED,
        BrokerEvents.CLIENT_DISCONNECTED,
    )
)
"""The events that plugins get. Events about messages are not among them, because a call per message would cost too much."""

Answer: TypeAlias = bool | str | None
"""Yes, no, the error of a plugin as text, or None if a plugin can't tell."""

Publish: TypeAlias = Callable[[str, bytes, int, bool], None]
"""Publishes the message of a plugin: topic, body, QoS, retain. It is called on the plugins' thread."""


class PluginsUnavailable(OSError):
    """Raised when plugins can't be loaded. The message names the plugin and what was wrong."""


class ClientSession(Session):  # type: ignore[misc] # amqtt ships no types
    """A client as a plugin sees it: the session of amqtt, without its costly queues and state machine."""

    def __init__(self, wish: Connect, client_id: str, peer: Peer) -> None:
        self.client_id = client_id
        self.remote_address = peer.host
        self.remote_port = peer.port
        self.ssl_object = peer.ssl_object
        self.username = wish.username if peer.username is None else peer.username
        # A plugin expects text. A password that is no text becomes one that nobody has.
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
    """What a plugin can do with the broker: publish, and look at the connected clients."""

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
        """Yield the connected clients."""
        yield from tuple(self._sessions.values())

    def get_session(self, client_id: str) -> ClientSession | None:
        """Return a connected client, or None."""
        return self._sessions.get(client_id)

    @property
    def retained_messages(self) -> dict[str, Any]:
        raise NotImplementedError("Penstock shows plugins no retained messages. Subscribe as a client to get them.")

    @property
    def subscriptions(self) -> dict[str, Any]:
        raise NotImplementedError("Penstock shows plugins no subscriptions.")

    async def add_subscription(self, client_id: str, topic: str | None, qos: int | None) -> None:
        raise NotImplementedError("Penstock lets only clients subscribe, not plugins.")


class Plugins:
    """The plugins of a node.

    Parameters:
        options: the options of access control. At least one of the tables of plugins is not None.
        publish: publishes the message of a plugin. It is called on the plugins' thread.
    """

    def __init__(self, options: AccessOptions, publish: Publish) -> None:
        self._options = options
        self._publish = publish
        self._sessions: dict[str, ClientSession] = {}
        """The connected clients, by client id. Only the plugins' thread uses it."""
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
            PluginsUnavailable: a plugin can't be loaded, or refuses its options.
        """
        self._thread.start()
        try:
            await self._there(self._load())
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    async def stop(self) -> None:
        """Tell the plugins that the broker stops, let them close, and end the thread. A plugin that blocks is not awaited."""
        try:
            async with asyncio.timeout(self._options.plugin_timeout_ms / 1000):
                await self._there(self._close())
        except Exception as error:  # No failure of a plugin may keep the node from stopping.
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
        use_containment()
        try:
            self._manager = PluginManager(NAMESPACE, context, self._loop)
        except Exception as error:  # The errors of amqtt have no common base class, and a constructor may raise any.
            raise PluginsUnavailable(f"The plugins of mqtt.access can't be loaded: {_explain(error)}") from error
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

    def ask(self, work: Work, question: Question) -> None:
        """Run one of the coroutines below on the plugins' thread, and answer the question on the caller's loop.

        The answer is the result and an empty string, or None and the error. The work does not begin if the question is
        answered by then, because it has waited for too long.
        """
        self._loop.call_soon_threadsafe(self._begin, work, question, asyncio.get_running_loop())

    def _begin(self, work: Work, question: Question, home: asyncio.AbstractEventLoop) -> None:
        task = self._loop.create_task(self._answer(work, question, home))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, work: Work, question: Question, home: asyncio.AbstractEventLoop) -> None:
        if question.is_answered:  # The thread was blocked, and the node has given the question up.
            return
        found, error = None, ""
        try:
            async with asyncio.timeout(self._options.plugin_timeout_ms / 1000):
                found = await work()
        except TimeoutError:
            error = "timeout"
        except Exception as raised:  # A defect of a plugin concerns the request and ends nothing else.
            error = repr(raised)
        if not home.is_closed():
            home.call_soon_threadsafe(question.answer, found, error)

    async def authenticate(self, session: ClientSession) -> Answer:
        """Ask whether a client is who it says.

        A plugin that returns None doesn't count. One that fails gives no answer, which counts unless another one says no.
        """
        answers = await _all([plugin.authenticate(session=session) for plugin in self._manager._auth_plugins])
        counted = [answer for answer in answers if answer is not None]
        return _together(counted) if counted else False

    async def topics(self, session: ClientSession, topics: list[str], action: str) -> list[Answer]:
        """Ask for each topic or filter whether a client may perform an action of amqtt on it."""
        if len(topics) == 1:
            return [await self._may(session, topics[0], Action(action))]
        return await asyncio.gather(*(self._may(session, topic, Action(action)) for topic in topics))

    async def _may(self, session: ClientSession, topic: str, action: Action) -> Answer:
        plugins = self._manager._topic_plugins
        return _together(
            await _all([plugin.topic_filtering(session=session, topic=topic, action=action) for plugin in plugins])
        )

    # --- events -----------------------------------------------------------------------------------------------------

    def connected(self, session: ClientSession) -> None:
        """Tell the plugins that a client was accepted."""
        if BrokerEvents.CLIENT_CONNECTED in self._events or BrokerEvents.CLIENT_DISCONNECTED in self._events:
            self._loop.call_soon_threadsafe(self._tell, BrokerEvents.CLIENT_CONNECTED, session)

    def disconnected(self, session: ClientSession) -> None:
        """Tell the plugins that a client has left."""
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


async def _all(asked: list[Coroutine[Any, Any, Any]]) -> list[Answer]:
    """Return the answers of all plugins, and what some of them raised as text."""
    if len(asked) == 1:
        try:
            answers: list[Any] = [await asked[0]]
        except Exception as raised:  # A defect of a plugin concerns the request and ends nothing else.
            answers = [raised]
    else:
        answers = await asyncio.gather(*asked, return_exceptions=True)
    return [
        repr(answer) if isinstance(answer, BaseException) else None if answer is None else bool(answer) for answer in answers
    ]


def _together(answers: Sequence[Answer]) -> Answer:
    """Return the answer of several plugins: yes if all say yes, no if one says no, otherwise why there is none."""
    if False in answers:
        return False
    return next((answer for answer in answers if answer is not True), True)


def _typed(path: str, table: Any) -> Any:
    """Return the options of a plugin with text converted to enumerations, because amqtt's reader does not convert it."""
    if not isinstance(table, dict):
        return table
    try:
        config = getattr(import_string(path), "Config", None)
    except ImportError:
        return table  # amqtt reports this error better.
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
    """Return the messages of an error and its causes. The errors of amqtt often name only a class."""
    said: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        said.append(str(cause) or type(cause).__name__)
        cause = cause.__cause__
    return ": ".join(dict.fromkeys(said))


logging.getLogger("amqtt").setLevel(logging.WARNING)
