"""Time, as a thing that is handed in: tests move it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time of day."""

    def now_ms(self) -> int:
        """Return ms since 1970 UTC."""
        ...


class SystemClock:
    """The machine's clock, held still where it is set back: no time that it tells is before one that it told."""

    __slots__ = ("_last_ms",)

    def __init__(self) -> None:
        self._last_ms = 0

    def now_ms(self) -> int:
        now = time.time_ns() // 1_000_000
        if now < self._last_ms:
            return self._last_ms
        self._last_ms = now
        return now


class ManualClock:
    """A clock that a test moves."""

    __slots__ = ("_now_ms",)

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, ms: int) -> None:
        """Move the clock forward (or, with a negative `ms`, back)."""
        self._now_ms += ms
