"""Repeats a failed call at once, before the node counts an attempt."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.pop.client.durations import Duration, seconds
from penstock.worker.context import CallNext, HandlerCall
from penstock.worker.errors import Reject, RetryLater


class RetryCalls:
    """A middleware that repeats a failed call in place. The message keeps its attempt, and is extended meanwhile.

    Use it for short disturbances. The back-off of the group is for longer ones.

    Parameters:
        times: How often a call is repeated, at least 1.
        delay: Time before the first repetition, in seconds or as a timedelta. Each further delay is twice as long.
        on: Exceptions after which a call is repeated. `Reject` and `RetryLater` never are.
    """

    def __init__(self, times: int = 2, *, delay: Duration = 0.1, on: tuple[type[Exception], ...] = (Exception,)) -> None:
        if times < 1:
            raise ValueError(f"times is {times}: use at least 1")
        self._times = times
        self._delay_s = seconds(delay, "delay")
        self._on = on

    async def __call__(self, call: HandlerCall, call_next: CallNext) -> Any:
        for number in range(self._times):
            try:
                return await call_next(call)
            except (Reject, RetryLater):
                raise
            except self._on:
                await asyncio.sleep(self._delay_s * 2**number)
        return await call_next(call)
