"""The clock of the node: store, timers and gateway get the same one, and tests pass one that they move themselves.

The node's time is not the machine's time of day. It goes on by the time since the machine booted, which nobody can set, and
`store.timekeeping` steers it towards the time of day. So a time of day that is set wrong, by an operator or by a broken time
server, neither stops the node's time nor moves it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from penstock.store.files import SYSTEM_FILES

MS_NS = 1_000_000
"""Nanoseconds of a millisecond."""

SLEW_DIVISOR = 10
"""While the node's time is slewed, it runs faster or slower by one part in this many."""

READ_NS_MAX = 50_000
"""Nanoseconds within which the boot time and the time of day should be read. If a read takes longer, it is repeated."""

READS_MAX = 4
"""Maximum number of such reads. After that the last one counts."""


class Instant(NamedTuple):
    """Three times at one instant, in nanoseconds."""

    boot_ns: int
    """Since the machine booted, the time in which it was suspended included. It only goes forward."""
    wall_ns: int
    """The machine's time of day, since 1970. It can be set to anything at any time."""
    now_ns: int
    """The node's time, since 1970."""


class Clock(Protocol):
    """Tells the node's time, and measures how long something takes."""

    def now_ms(self) -> int:
        """Return the node's time in milliseconds since 1970-01-01 UTC. It never goes backwards, and never stands still."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary moment. Only differences mean something: use it for timeouts and pauses."""
        ...


class SteerableClock(Clock, Protocol):
    """A clock that `store.timekeeping` steers."""

    @property
    def boot(self) -> bytes:
        """Identifies this boot of the machine; zeros if the machine can't tell."""
        ...

    def read(self) -> Instant:
        """Return the node's time, the machine's time of day and the time since boot at one instant."""
        ...

    def slew(self, ns: int) -> None:
        """Run at most a tenth faster or slower until the node's time has moved by `ns`. This replaces an earlier slew."""
        ...

    def step(self, ns: int) -> None:
        """Move the node's time by `ns` at once, and end a slew. `ns` may be negative only before anybody has used the time."""
        ...


def _boottime() -> Callable[[], int]:
    """Return the function that tells the nanoseconds since the machine booted."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)
    return time.monotonic_ns  # not Linux: where the machine can be suspended, this may not count it


class SystemClock:
    """The machine's clock. It begins with the time of day, and follows it only as `slew` and `step` say.

    Parameters:
        boot: identifies this boot of the machine.
        boot_ns: returns the nanoseconds since the machine booted.
        wall_ns: returns the time of day in nanoseconds since 1970.
        monotonic_s: returns monotonic seconds.
    """

    __slots__ = ("_ahead_ns", "_boot_ns", "_since_ns", "_slew_ns", "_wall_ns", "boot", "monotonic_s")

    monotonic_s: Callable[[], float]  # an attribute, because the gateway asks at each read, and this saves a Python call

    def __init__(
        self,
        *,
        boot: bytes | None = None,
        boot_ns: Callable[[], int] | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.boot = SYSTEM_FILES.boot_id() if boot is None else boot
        self._boot_ns = boot_ns or _boottime()
        self._wall_ns = wall_ns
        self.monotonic_s = monotonic_s
        self._ahead_ns = 0
        """By how much the node's time was ahead of the boot time when the slew began."""
        self._slew_ns = 0
        self._since_ns = 0
        """Boot time at which the slew began."""
        found = self.read()
        self._ahead_ns = found.wall_ns - found.boot_ns

    def now_ms(self) -> int:
        """Return the node's time in milliseconds since 1970. The store asks at least once a turn, so this is arithmetic."""
        boot_ns = self._boot_ns()
        if self._slew_ns:
            boot_ns += self._slewed(boot_ns)
        return (boot_ns + self._ahead_ns) // MS_NS

    def _slewed(self, boot_ns: int) -> int:
        """Return by how much the slew has moved the time until `boot_ns`. It ends by itself, however late the next check is."""
        moved = (boot_ns - self._since_ns) // SLEW_DIVISOR
        return min(moved, self._slew_ns) if self._slew_ns > 0 else -min(moved, -self._slew_ns)

    def read(self) -> Instant:
        """Return the three times at one instant."""
        for _ in range(READS_MAX):
            boot_ns = self._boot_ns()
            wall_ns = self._wall_ns()
            if self._boot_ns() - boot_ns <= READ_NS_MAX:
                break
        return Instant(boot_ns, wall_ns, boot_ns + self._ahead_ns + (self._slewed(boot_ns) if self._slew_ns else 0))

    def slew(self, ns: int) -> None:
        """Run at most a tenth faster or slower until the time has moved by `ns`."""
        boot_ns = self._boot_ns()
        if self._slew_ns:
            self._ahead_ns += self._slewed(boot_ns)
        self._slew_ns, self._since_ns = ns, boot_ns

    def step(self, ns: int) -> None:
        """Move the time by `ns` at once."""
        self.slew(0)
        self._ahead_ns += ns
