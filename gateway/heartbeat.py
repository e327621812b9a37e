"""The gateway's heartbeat: one timer for everything that is done once a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

BEAT_S: Final = 1
"""Seconds between two beats. A keep alive that is over is noticed at most this long after its time."""


class Heartbeat:
    """Calls jobs once a second, in order.

    Parameters:
        now_s: returns the monotonic time in seconds.
        jobs: each is called with that time.
    """

    def __init__(self, now_s: Callable[[], float], jobs: Sequence[Callable[[float], None]]) -> None:
        self._now_s = now_s
        self._jobs = jobs
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Beat from now on, the first time at once."""
        self._loop = loop
        self._timer = None
        self._beat_on()

    def stop(self) -> None:
        """Beat no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def beat(self) -> None:
        """Call all jobs now."""
        now_s = self._now_s()
        for job in self._jobs:
            job(now_s)

    def _beat_on(self) -> None:
        self._timer = self._loop.call_later(BEAT_S - self._now_s() % BEAT_S, self._beat_on)
        self.beat()
