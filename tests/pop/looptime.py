"""The time by which clients and workers measure deadlines: that of the event loop, which a test sets ahead."""

from __future__ import annotations

import asyncio
from typing import Any


class LoopTime:
    """The time of the running event loop. Timers that have started are not moved with it."""

    def __init__(self) -> None:
        loop: Any = asyncio.get_running_loop()
        self._ahead_s = 0.0
        machine_s = loop.time
        loop.time = lambda: machine_s() + self._ahead_s

    def advance(self, seconds: float) -> None:
        """Set the time ahead by `seconds`."""
        self._ahead_s += seconds
