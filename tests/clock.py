"""A clock that a test moves."""

from __future__ import annotations

from penstock.store.clock import SystemClock

START_MS = 1_700_000_000_000
"""Time of day at which a `ManualClock` starts, in ms since 1970: 14 November 2023."""


class ManualClock:
    """A `penstock.store.clock.Clock` that stands still until the test moves it.

    Parameters:
        now_ms: time of day at the start, in ms since 1970. The monotonic time starts at 0.
    """

    __slots__ = ("_monotonic_ms", "_now_ms")

    def __init__(self, now_ms: int = START_MS) -> None:
        self._now_ms = now_ms
        self._monotonic_ms = 0

    def now_ms(self) -> int:
        """Return the time of day in ms since 1970."""
        return self._now_ms

    def monotonic_s(self) -> float:
        """Return the seconds by which the test has moved the clock forward."""
        return self._monotonic_ms / 1000

    def advance(self, ms: int) -> None:
        """Move both times forward by `ms`. A negative `ms` sets only the time of day back, as an operator can."""
        self._now_ms += ms
        self._monotonic_ms += max(ms, 0)


class AheadClock:
    """A `Clock` that runs with the machine's, and that the test can set ahead: for tests of a node on a real loop."""

    __slots__ = ("_clock", "ahead_ms")

    def __init__(self) -> None:
        self._clock = SystemClock()
        self.ahead_ms = 0
        """Milliseconds by which both times are ahead of the machine's."""

    def now_ms(self) -> int:
        """Return the time of day in ms since 1970."""
        return self._clock.now_ms() + self.ahead_ms

    def monotonic_s(self) -> float:
        """Return the machine's monotonic seconds, and those by which this clock is ahead."""
        return self._clock.monotonic_s() + self.ahead_ms / 1000

    def advance(self, ms: int) -> None:
        """Set both times ahead by another `ms`, at least 0."""
        self.ahead_ms += ms
