"""Overtime: what is too long for one turn of the loop goes on in later turns, beside the work for everybody else."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

TURN_S: Final = 0.005
"""Seconds of long work in one turn of the loop, about. A client that sends few packets at a time waits for twice this, at most:
for the long work of the turn in which its packets come, and for the overtime before it."""

SLICE_S_MIN: Final = 0.0005
"""Seconds that each piece of work may take in a turn, at least, however many others wait. Shorter ones would cost more than
they give: each slice ends with an answer to its client."""


class Overtime:
    """Bounds the long work of a turn: the many packets of one read, or the many deliveries of one commit.

    Whoever has long work does it step by step and looks at `is_over` in between. When the turn is over, the rest is added here
    and goes on in the next turn. All that has been added takes turns, and shares each of them in equal slices: otherwise few
    clients with much work would hold up all that waits behind them by a turn each.

    Parameters:
        now_s: returns the monotonic time in seconds.
    """

    __slots__ = ("_is_scheduled", "_loop", "_now_s", "_until_s", "_waiting", "put_off", "turn")

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._loop: asyncio.AbstractEventLoop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False
        self._until_s = 0.0
        """When this turn's share ends, or that of the work at hand, in monotonic seconds; 0 as long as the turn has had no
        long work."""
        self.turn = 0
        """The number of turns so far that had long work."""
        self.put_off = 0
        """How often work had to wait for a later turn."""

    def __len__(self) -> int:
        """Return how many pieces of work wait."""
        return len(self._waiting)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Go on with what is added, on this loop."""
        self._loop = loop

    def is_over(self) -> bool:
        """Return whether the rest of long work must be added here. The first call of a turn of the loop begins its share."""
        now_s = self._now_s()
        if not self._until_s:
            self._until_s = now_s + TURN_S
            self._loop.call_soon(self._end_turn)
        return now_s >= self._until_s

    def _end_turn(self) -> None:
        self._until_s = 0.0
        self.turn += 1

    def add(self, work: Callable[[], None]) -> None:
        """Call a function in the next turn that has time for it. It may look at `is_over` and add itself again."""
        self.put_off += 1
        self._waiting.append(work)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        count = len(self._waiting)
        slice_s = max(TURN_S / count, SLICE_S_MIN)
        now_s = self._now_s()
        end_s = now_s + TURN_S
        try:
            for _ in range(count):
                self._until_s = min(now_s + slice_s, end_s)
                self._waiting.popleft()()
                now_s = self._now_s()
                if now_s >= end_s:
                    break
        finally:
            self._end_turn()
            if self._waiting:
                self._schedule()
