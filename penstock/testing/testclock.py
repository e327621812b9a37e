"""A clock that runs with the machine's, and that a test sets ahead."""

from __future__ import annotations

import time

from penstock.store.clock import SystemClock


class AdvancingClock(SystemClock):
    """The machine's clock, ahead by what the test says. All times are ahead alike, so the node sees no jump."""

    __slots__ = ("ahead_ns",)

    def __init__(self) -> None:
        self.ahead_ns = 0
        super().__init__(
            boot=bytes(36),
            boot_ns=lambda: time.monotonic_ns() + self.ahead_ns,
            wall_ns=lambda: time.time_ns() + self.ahead_ns,
            monotonic_s=lambda: time.monotonic() + self.ahead_ns / 1e9,
        )
