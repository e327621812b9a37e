"""Bounds how many messages a second the handlers get."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.worker.context import CallNext, HandlerCall


class LimitRate:
    """A middleware that lets calls wait so that no more messages a second are handled than a limit. It holds for one process.

    What waits is extended like what is handled, and counts as slow handling: the worker takes fewer messages ahead.

    Parameters:
        per_second: Maximum number of messages a second, above 0.
        burst: Messages that may be handled at once after a pause, at least 1.
    """

    def __init__(self, per_second: float, *, burst: int = 1) -> None:
        if per_second <= 0 or burst < 1:
            raise ValueError(f"per_second must be above 0 and burst at least 1: they are {per_second} and {burst}")
        self._interval_s = 1 / per_second
        self._burst_s = (burst - 1) * self._interval_s
        self._free_s = 0.0
        """When the next message may be handled, if no burst is allowed."""

    async def __call__(self, call: HandlerCall, call_next: CallNext) -> Any:
        now_s = asyncio.get_running_loop().time()
        begins_s = max(self._free_s, now_s - self._burst_s)
        self._free_s = begins_s + self._interval_s * len(call.messages)
        if begins_s > now_s:
            await asyncio.sleep(begins_s - now_s)
        return await call_next(call)
