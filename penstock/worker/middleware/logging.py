"""Logs each call of a handler."""

from __future__ import annotations

import logging
import time
from typing import Any

from penstock.worker.context import CallNext, HandlerCall


class LogCalls:
    """A middleware that logs each call: its handler, topic, attempt, duration, and whether it failed.

    Parameters:
        logger: Gets the lines. By default `penstock.worker.calls`.
        level: Level of calls that succeed. Those that fail have WARNING.
    """

    def __init__(self, logger: logging.Logger | None = None, *, level: int = logging.INFO) -> None:
        self._logger = logger or logging.getLogger("penstock.worker.calls")
        self._level = level

    async def __call__(self, call: HandlerCall, call_next: CallNext) -> Any:
        began_s = time.monotonic()
        message = call.message
        what = f"{call.handler} of {len(call.messages)} from {message.topic!r}, attempt {message.attempt}"
        try:
            result = await call_next(call)
        except Exception as error:
            elapsed_ms = (time.monotonic() - began_s) * 1000
            self._logger.warning("%s failed after %.1f ms: %s: %s", what, elapsed_ms, type(error).__name__, error)
            raise
        self._logger.log(self._level, "%s took %.1f ms", what, (time.monotonic() - began_s) * 1000)
        return result
