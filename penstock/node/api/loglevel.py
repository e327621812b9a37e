"""The level of the node's own log over the admin API, until the process ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from penstock.node.api.operation import ApiCall, ApiRole, Operation
from penstock.node.config import Config, LogLevel
from penstock.node.logs import log_level, set_log_level


class LogLevelShown(msgspec.Struct, kw_only=True):
    """The level of the node's own log."""

    level: LogLevel
    configured: Annotated[LogLevel, msgspec.Meta(description="The option log.level, which holds again after a restart.")]


class LogLevelChange(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The level to set for the running process."""

    level: LogLevel


class LogLevelOperations:
    """Serves the level of the log.

    Parameters:
        config: of the node.
    """

    def __init__(self, config: Config) -> None:
        self._config = config

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        yield Operation("getLogLevel", "GET", "/log-level", ApiRole.VIEWER, "Say what the node logs.", self.show, LogLevelShown)
        yield Operation(
            "setLogLevel",
            "PUT",
            "/log-level",
            ApiRole.ADMIN,
            "Let the node log more or less, until its process ends.",
            self.change,
            LogLevelShown,
            body=LogLevelChange,
        )

    async def show(self, _call: ApiCall) -> LogLevelShown:
        """Return the level."""
        return LogLevelShown(level=log_level(), configured=self._config.log.level)

    async def change(self, call: ApiCall) -> LogLevelShown:
        """Set the level."""
        asked: LogLevelChange = call.body
        call.noted |= {"level": asked.level, "before": log_level()}
        set_log_level(asked.level)
        return await self.show(call)
