"""Clocks that a test moves."""

from __future__ import annotations

import time

from penstock.store.clock import MS_NS, Instant, SystemClock

START_MS = 1_700_000_000_000
"""Time of day at which a `ManualClock` starts, in ms since 1970: 14 November 2023."""


class ManualClock:
    """A `penstock.store.clock.Clock` that stands still until the test moves it. Its time of day is always right.

    Parameters:
        now_ms: time of day at the start, in ms since 1970. The monotonic time starts at 0.
    """

    __slots__ = ("_monotonic_ms", "_now_ms", "boot")

    def __init__(self, now_ms: int = START_MS) -> None:
        self._now_ms = now_ms
        self._monotonic_ms = 0
        self.boot = bytes(36)
        """No boot, so that a start goes by the time of day."""

    def now_ms(self) -> int:
        """Return the time of day in ms since 1970."""
        return self._now_ms

    def monotonic_s(self) -> float:
        """Return the seconds by which the test has moved the clock forward."""
        return self._monotonic_ms / 1000

    def read(self) -> Instant:
        """Return the three times, which are always the same."""
        return Instant(self._now_ms * MS_NS, self._now_ms * MS_NS, self._now_ms * MS_NS)

    def slew(self, ns: int) -> None:
        """Do nothing: there is no difference to the time of day."""

    def step(self, ns: int) -> None:
        """Do nothing: only the test moves this clock."""

    def advance(self, ms: int) -> None:
        """Move both times forward by `ms`. A negative `ms` sets only the time of day back, as an operator can."""
        self._now_ms += ms
        self._monotonic_ms += max(ms, 0)


class AheadClock(SystemClock):
    """A clock that runs with the machine's, and that the test can set ahead: for tests of a node on a real loop."""

    __slots__ = ("ahead_ms", "wrong_ms")

    def __init__(self) -> None:
        self.ahead_ms = 0
        """Milliseconds by which all times are ahead of the machine's."""
        self.wrong_ms = 0
        """Milliseconds by which the time of day is ahead of that."""
        super().__init__(
            boot=bytes(36),
            boot_ns=lambda: time.monotonic_ns() + self.ahead_ms * MS_NS,
            wall_ns=lambda: time.time_ns() + (self.ahead_ms + self.wrong_ms) * MS_NS,
            monotonic_s=lambda: time.monotonic() + self.ahead_ms / 1000,
        )

    def advance(self, ms: int) -> None:
        """Set all times ahead by another `ms`, at least 0."""
        self.ahead_ms += ms

    def set_wall(self, ms: int) -> None:
        """Set only the time of day forward by `ms`, or back if it is negative."""
        self.wrong_ms += ms


class Machine:
    """A machine whose time since boot and whose time of day a test sets separately. It stands still until the test moves it.

    Parameters:
        now_ms: time of day at the start, in ms since 1970.
    """

    def __init__(self, now_ms: int = START_MS) -> None:
        self.boot_ns = 1_000_000 * MS_NS
        self.wall_ns = now_ms * MS_NS
        self._elapsed_ns = 0
        self._boots = 1

    def clock(self) -> SystemClock:
        """Return a clock of this machine, as a process that starts now gets it."""
        return SystemClock(
            boot=b"boot %031d" % self._boots,
            boot_ns=lambda: self.boot_ns,
            wall_ns=lambda: self.wall_ns,
            monotonic_s=lambda: self._elapsed_ns / 1e9,
        )

    def elapse(self, ms: float) -> None:
        """Let time pass."""
        ns = round(ms * MS_NS)
        self.boot_ns += ns
        self.wall_ns += ns
        self._elapsed_ns += ns

    def set_wall(self, ms: int) -> None:
        """Set the time of day forward by `ms`, or back if it is negative, as an operator or a time server can."""
        self.wall_ns += ms * MS_NS

    def reboot(self, ms: float = 60_000) -> None:
        """Boot the machine, which takes `ms` of true time."""
        self.elapse(ms)
        self.boot_ns = 1_000 * MS_NS
        self._boots += 1
