"""The plugins of amqtt, on threads and event loops of their own.

A plugin may be slow: it computes a password hash, asks a directory or a database over the network, or blocks. None of that may
delay messages, so no plugin runs on the node's loop. Questions go to the threads and answers come back; the loops share
nothing else.

Authentication runs apart from everything else, so that no number of logins holds up an answer about a topic. What holds for the
author of a plugin:

- All calls of one instance come on one thread, which has an event loop: its constructor, questions, events, `close`. While a
  call blocks, no other call of that instance runs.
- A plugin that doesn't authenticate has one instance. So have all that authenticate, on another thread, unless all of them can
  run in parallel: those of amqtt can, and others whose class has `runs_in_parallel = True`. Then each of several threads has
  its own instances, and what an instance keeps is its own.
- If a plugin both authenticates and decides about topics, all plugins run on one thread, as in amqtt.

A plugin gets what amqtt's broker (0.12) gives it: a context with its configuration, and a session with user name, password,
client id, address and TLS object. The rules of amqtt hold, too. Authentication: plugins that answer None don't count, at least
one must answer, and all that answer must say True. Topics: all must say True (amqtt.broker, `_authenticate` and
`_topic_filtering`). One thing is different: a plugin that raises, or that returns None about a topic, has not said no.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Final

import structlog
from amqtt.events import BrokerEvents
from amqtt.plugins.base import BaseAuthPlugin, BaseTopicPlugin

from penstock.gateway.auth.client_session import ClientSession
from penstock.gateway.auth.containment import use_containment
from penstock.gateway.auth.login import Answer
from penstock.gateway.auth.logins import threads_of
from penstock.gateway.auth.loop_thread import LOGIN_NICENESS
from penstock.gateway.auth.plugin_context import GatewayContext, Publish
from penstock.gateway.auth.plugin_host import PluginHost, class_of, typed
from penstock.gateway.auth.questions import Question, Work
from penstock.gateway.auth.steady import path_of
from penstock.gateway.options import AccessOptions

logger = structlog.get_logger("gateway")

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

PARALLEL: Final = frozenset(
    (
        "amqtt.plugins.authentication.AnonymousAuthPlugin",
        "amqtt.plugins.authentication.FileAuthPlugin",
        "amqtt.contrib.auth_db.plugin.UserAuthDBPlugin",
        "amqtt.contrib.cert.UserAuthCertPlugin",
        "amqtt.contrib.http.UserAuthHttpPlugin",
        "amqtt.contrib.jwt.UserAuthJwtPlugin",
        "amqtt.contrib.ldap.UserAuthLdapPlugin",
    )
)
"""The plugins of amqtt that authenticate. None of their instances keeps anything between two logins but connections."""

PASSWORDS: Final = frozenset(
    ("amqtt.plugins.authentication.AnonymousAuthPlugin", "amqtt.plugins.authentication.FileAuthPlugin")
)
"""Those of them that go by user name and password alone, and always say the same of these: they read their files once."""


class Plugins:
    """The plugins of a node.

    Parameters:
        options: the options of access control. They name plugins.
        publish: publishes the message of a plugin. It is called on a thread of the plugins.
    """

    def __init__(self, options: AccessOptions, publish: Publish) -> None:
        self._options = options
        self._publish = publish
        self._timeout_s = options.plugin_timeout_ms / 1000
        self._sessions: dict[str, ClientSession] = {}
        """The connected clients, by client id. The node's loop changes it."""
        self._main = PluginHost("penstock-plugins", self._timeout_s)
        """Has the plugins that decide about topics, or only handle events."""
        self._hosts = [self._main]
        self._events: frozenset[BrokerEvents] = frozenset()
        self.authenticating: list[PluginHost] = []
        """The threads with plugins that authenticate. All have the same ones."""
        self.only_passwords = False
        """Whether these go by user name and password alone, and always say the same of these."""
        self.filters_topics = False
        """Whether there are topic plugins."""

    # --- start and end ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the plugins and tell them that the broker starts.

        Raises:
            PluginsUnavailable: a plugin can't be loaded, or refuses its options.
        """
        try:
            self._main.thread.start()
            self.authenticating = [host for host in await self._load() if host.auth_plugins]
            used = {path for host in self.authenticating for path in _paths(map(type, host.auth_plugins))}
            self.only_passwords = used <= PASSWORDS
            self.filters_topics = bool(self._main.topic_plugins)
            self._note_events()
            for event in (BrokerEvents.PRE_START, BrokerEvents.POST_START):
                for host in self._hosts:
                    await host.thread.run(host.fire(event))
        except BaseException:
            for host in self._hosts:
                host.thread.end()
            raise
        names = dict.fromkeys(type(plugin).__name__ for host in self._hosts for plugin in host.plugins)
        logger.info("plugins.loaded", plugins=list(names), authentication_threads=len(self.authenticating))

    async def stop(self) -> None:
        """Tell the plugins that the broker stops, let them close, and end the threads. A plugin that blocks is not awaited."""
        results = await asyncio.gather(*map(self._close, self._hosts), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):  # No failure of a plugin may keep the node from stopping.
                logger.warning("plugins.close_failed", why=repr(result))
        for host in self._hosts:
            host.thread.end()
        await asyncio.gather(*(host.thread.ended() for host in self._hosts))

    async def _close(self, host: PluginHost) -> None:
        async with asyncio.timeout(self._timeout_s):
            for event in (BrokerEvents.PRE_SHUTDOWN, BrokerEvents.POST_SHUTDOWN):
                await host.thread.run(host.fire(event))
            await host.thread.run(host.close())

    async def _load(self) -> list[PluginHost]:
        """Load the plugins, and return the hosts that authenticate. Raises PluginsUnavailable."""
        options = self._options
        if options.older_plugins:
            return await self._load_older(options.older_plugins)
        classes, tables = await self._main.thread.run(_import(options.plugins or {}))
        auth = {path: each for path, each in classes.items() if _is_a(each, BaseAuthPlugin)}
        if any(_is_a(each, BaseTopicPlugin) for each in auth.values()):
            auth = {}
        await self._load_on(self._main, {"plugins": {path: table for path, table in tables.items() if path not in auth}})
        if not auth:
            return [self._main]
        hosts = self._add_hosts(threads_of(self._options) if _are_parallel(auth) else 1)
        for host in hosts:
            await self._load_on(host, {"plugins": {path: tables[path] for path in auth}})
        return hosts

    async def _load_older(self, tables: dict[str, Any]) -> list[PluginHost]:
        """Load the plugins of amqtt's older tables, which name some of those that are installed, but load all of them."""
        main = self._main
        await self._load_on(main, tables)
        decides_both = any(plugin in main.topic_plugins for plugin in main.auth_plugins)
        if decides_both or not main.auth_plugins or not _are_parallel(_paths(map(type, main.auth_plugins))):
            return [main]
        hosts = self._add_hosts(threads_of(self._options))
        for host in hosts:
            await host.thread.run(host.copy(main.auth_plugins))
        return hosts

    async def _load_on(self, host: PluginHost, config: dict[str, Any]) -> None:
        use_containment()
        await host.thread.run(host.load(GatewayContext(config, self._publish, self._sessions)))

    def _add_hosts(self, count: int) -> list[PluginHost]:
        hosts = [PluginHost(f"penstock-login-{number}", self._timeout_s, LOGIN_NICENESS) for number in range(count)]
        for host in hosts:
            host.thread.start()
        self._hosts += hosts
        return hosts

    def _note_events(self) -> None:
        handled = frozenset(event for event in BrokerEvents if any(host.handles(event) for host in self._hosts))
        self._events = handled & SERVED_EVENTS
        for event in sorted(handled - SERVED_EVENTS):
            logger.warning("plugins.event_not_served", of=str(event))

    # --- questions and events, from the node's loop -----------------------------------------------------------------

    def ask(self, work: Work, question: Question) -> None:
        """Run work on the thread of the plugins that decide about topics: see `PluginHost.ask`."""
        self._main.ask(work, question)

    async def topics(self, session: ClientSession, topics: list[str], action: str) -> list[Answer]:
        """Ask for each topic or filter whether a client may perform an action of amqtt on it. `ask` runs this."""
        return await self._main.topics(session, topics, action)

    def connected(self, session: ClientSession) -> None:
        """Tell the plugins that a client was accepted."""
        self._sessions[str(session.client_id)] = session
        self._tell(BrokerEvents.CLIENT_CONNECTED, session)

    def disconnected(self, session: ClientSession) -> None:
        """Tell the plugins that a client has left."""
        if self._sessions.get(str(session.client_id)) is session:
            del self._sessions[str(session.client_id)]
        self._tell(BrokerEvents.CLIENT_DISCONNECTED, session)

    def _tell(self, event: BrokerEvents, session: ClientSession) -> None:
        if event in self._events:
            for host in self._hosts:
                if host.handles(event):
                    host.tell(event, client_id=str(session.client_id), client_session=session)


async def _import(tables: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the classes of plugins, and their options as amqtt's reader expects them."""
    return {path: class_of(path) for path in tables}, typed(tables)


def _are_parallel(classes: Mapping[str, Any]) -> bool:
    """Return whether several instances of all these classes, by the path that names them, may authenticate at once."""
    return all(
        getattr(each, "runs_in_parallel", False) or path in PARALLEL or not PARALLEL.isdisjoint(_paths([each]))
        for path, each in classes.items()
    )


def _is_a(found: Any, base: type) -> bool:
    return isinstance(found, type) and issubclass(found, base)


def _paths(classes: Iterable[Any]) -> dict[str, Any]:
    return {path_of(each): each for each in classes}
