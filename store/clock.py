"""The clock of the node: store, timers and gateway get the same one, and tests pass one that they move themselves."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time of day, and measures how long something takes."""

    def now_ms(self) -> int:
        """Return the time of day in milliseconds since 1970-01-01 UTC. It never goes backwards."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary moment. Only differences mean something: use it for timeouts and pauses."""
        ...


class SystemClock:
    """The machine's clock.

    When the machine's time of day is set back, `now_ms` returns the last value until the machine has caught up with it.
    """

    __slots__ = ("_last_ms",)

    def __init__(self) -> None:
        self._last_ms = 0

    def now_ms(self) -> int:
        now = time.time_ns() // 1_000_000
        if now < self._last_ms:
            return self._last_ms
        self._last_ms = now
        return now

    monotonic_s = staticmethod(time.monotonic)  # the gateway asks at each read, so this saves a Python call
