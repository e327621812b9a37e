"""Plugins of amqtt on a thread of their own."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final, get_type_hints

import structlog
from amqtt.contexts import Action
from amqtt.events import BrokerEvents
from amqtt.plugins.base import BasePlugin
from amqtt.plugins.manager import PluginManager
from amqtt.utils import import_string

from penstock.gateway.auth.client_session import ClientSession
from penstock.gateway.auth.http_failures import tell_failures
from penstock.gateway.auth.login import Answer, together
from penstock.gateway.auth.loop_thread import LoopThread
from penstock.gateway.auth.plugin_context import GatewayContext
from penstock.gateway.auth.questions import Question, Work
from penstock.gateway.auth.steady import Authenticating, steady

logger = structlog.get_logger("gateway")

NAMESPACE: Final = "amqtt.broker.plugins"
"""The entry points of the plugins that amqtt's older sections name."""


class PluginsUnavailable(OSError):
    """Raised when plugins can't be loaded. The message names the plugin and what was wrong."""


class PluginHost:
    """A thread with plugins. Everything that they do happens on it: their construction, questions, events, and their end.

    Parameters:
        name: of the thread.
        timeout_s: seconds within which the plugins must answer.
        niceness: of the thread.
    """

    def __init__(self, name: str, timeout_s: float, niceness: int = 0) -> None:
        self.thread = LoopThread(name, niceness)
        self._timeout_s = timeout_s
        self.plugins: list[Any] = []
        self.auth_plugins: list[Any] = []
        """Those that authenticate clients, if this host does."""
        self._steady: list[Authenticating] = []
        """What is asked in place of each of these."""
        self.topic_plugins: list[Any] = []
        """Those that decide about topics."""

    # --- on the thread ----------------------------------------------------------------------------------------------

    async def load(self, context: GatewayContext) -> None:
        """Construct the plugins that the configuration in a context names.

        Raises:
            PluginsUnavailable: a plugin can't be loaded, or refuses its options.
        """
        try:
            manager: PluginManager[Any] = PluginManager(NAMESPACE, context, self.thread.loop)
        except Exception as error:  # The errors of amqtt have no common base class, and a constructor may raise any.
            raise PluginsUnavailable(f"The plugins of mqtt.access can't be loaded: {_explain(error)}") from error
        self.plugins = manager.plugins
        for plugin in (*self.plugins, *manager._auth_plugins, *manager._topic_plugins):
            tell_failures(plugin)
        self._authenticate_by(manager._auth_plugins)
        self.topic_plugins = manager._topic_plugins if manager.is_topic_filtering_enabled() else []

    async def copy(self, plugins: Sequence[Any]) -> None:
        """Construct instances of the classes of other plugins, with the same options.

        Raises:
            PluginsUnavailable: a plugin can't be constructed.
        """
        for plugin in plugins:
            context = copy.copy(plugin.context)
            context.loop = self.thread.loop
            try:
                self.plugins.append(type(plugin)(context))
                tell_failures(self.plugins[-1])
            except Exception as error:  # A constructor may raise any error.
                raise PluginsUnavailable(f"The plugins of mqtt.access can't be loaded: {_explain(error)}") from error
        self._authenticate_by(self.plugins)

    def _authenticate_by(self, plugins: list[Any]) -> None:
        self.auth_plugins = plugins
        self._steady = [steady(plugin) for plugin in plugins]

    def handles(self, event: BrokerEvents) -> bool:
        """Return whether a plugin has a handler for an event."""
        return any(hasattr(plugin, f"on_{event}") for plugin in self.plugins)

    async def fire(self, event: BrokerEvents, **arguments: Any) -> None:
        """Tell all plugins of an event. What a plugin raises is logged."""
        handlers = [handler for plugin in self.plugins if (handler := getattr(plugin, f"on_{event}", None)) is not None]
        await _log_failures(str(event), [handler(**arguments) for handler in handlers])

    async def close(self) -> None:
        """Let all plugins release what they hold. What a plugin raises is logged."""
        await _log_failures("close", [plugin.close() for plugin in self.plugins if hasattr(plugin, "close")])

    async def authenticate(self, session: ClientSession) -> Answer:
        """Ask whether a client is who it says.

        A plugin that returns None doesn't count. One that fails gives no answer, which counts unless another one says no. There
        must be one that counts.
        """
        return _decided(await _all([plugin.authenticate(session=session) for plugin in self._steady]))

    async def topics(self, session: ClientSession, topics: list[str], action: str) -> list[Answer]:
        """Ask for each topic or filter whether a client may perform an action of amqtt on it.

        The rules for None and failures are those of `authenticate`.
        """
        if len(topics) == 1:
            return [await self._may(session, topics[0], Action(action))]
        return await asyncio.gather(*(self._may(session, topic, Action(action)) for topic in topics))

    async def _may(self, session: ClientSession, topic: str, action: Action) -> Answer:
        asked = [plugin.topic_filtering(session=session, topic=topic, action=action) for plugin in self.topic_plugins]
        return _decided(await _all(asked))

    # --- from the node's loop ---------------------------------------------------------------------------------------

    def ask(self, work: Work, question: Question) -> None:
        """Run work on the thread, and answer the question on the caller's loop.

        The answer is the result and an empty string, or None and the error. The work does not begin if the question is
        answered by then, because it has waited for too long.
        """
        home = asyncio.get_running_loop()
        self.thread.call(lambda: self.thread.begin(self._answer(work, question, home)))

    async def _answer(self, work: Work, question: Question, home: asyncio.AbstractEventLoop) -> None:
        if question.is_answered:  # The thread was blocked, and the node has given the question up.
            return
        found, error = None, ""
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await work()
        except TimeoutError:
            error = "timeout"
        except Exception as raised:  # A defect of a plugin concerns the request and ends nothing else.
            error = repr(raised)
        if not home.is_closed():
            home.call_soon_threadsafe(question.answer, found, error)

    def tell(self, event: BrokerEvents, **arguments: Any) -> None:
        """Tell all plugins of an event, some time from now."""
        self.thread.call(lambda: self.thread.begin(self.fire(event, **arguments)))


async def _log_failures(what: str, asked: list[Coroutine[Any, Any, None]]) -> None:
    for result in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(result, BaseException):
            logger.warning("plugins.event_failed", of=what, why=repr(result))


def _decided(answers: list[Answer]) -> Answer:
    """Return what plugins say together, without those that have no opinion: amqtt documents None so, also for topics."""
    counted = [answer for answer in answers if answer is not None]
    return together(counted) if counted else False


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


def class_of(path: str) -> Any:
    """Return the class of a plugin, or None if there is none at this path. amqtt reports the error better."""
    try:
        return import_string(path)
    except ImportError:
        return None


def typed(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of plugins with text converted to enumerations, because amqtt's reader does not convert it."""
    return {path: _typed(class_of(path), table) for path, table in tables.items()}


def _typed(plugin: Any, table: Any) -> Any:
    config = getattr(plugin, "Config", None)
    if not (isinstance(table, dict) and isinstance(config, type) and is_dataclass(config) and issubclass(plugin, BasePlugin)):
        return table
    hints = get_type_hints(config)
    converted = dict(table)
    for declared in fields(config):
        hint, value = hints[declared.name], table.get(declared.name)
        if isinstance(hint, type) and issubclass(hint, Enum) and isinstance(value, str):
            converted[declared.name] = hint(value)
    return converted


def _explain(error: BaseException) -> str:
    """Return the messages of an error and its causes. The errors of amqtt often name only a class."""
    said: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        said.append(str(cause) or type(cause).__name__)
        cause = cause.__cause__
    return ": ".join(dict.fromkeys(said))


logging.getLogger("amqtt").setLevel(logging.WARNING)
