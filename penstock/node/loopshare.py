"""The part of the event loop that requests of operators may take: long work in slices, and not all of the time."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Final

SLICE_S: Final = 0.0002
"""Seconds that a request works at a time. A message passes the loop a few times until it is acknowledged, and each time it may
have to wait for a slice. `python -m bench admin` shows what that adds."""

BURST_S: Final = 0.002
"""Seconds for which a request works in slices one after the other. A page takes less."""

WORK_S: Final = 0.0005
REST_S: Final = 0.001
"""Seconds that a longer request works, and rests, in turn. A process that never rests gets the processor late from the system,
and so do those that it exchanges messages with."""


class LoopShare:
    """What one request may take of the event loop: others have the loop whenever a slice is over."""

    def __init__(self) -> None:
        self._began_s = perf_counter()
        self._left_s = BURST_S
        """Seconds that the request may work until it rests."""

    async def rest(self) -> None:
        """Return at once, or later if this slice is over."""
        worked_s = perf_counter() - self._began_s
        if worked_s >= SLICE_S:
            self._left_s -= worked_s
            if self._left_s > 0:
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(REST_S)
                self._left_s = WORK_S
            self._began_s = perf_counter()
