"""The deadlines of checkpoints, on a timer wheel.

Nearly every checkpoint is closed long before its deadline, and must take no memory then. An item can't be removed from the
wheel. So the wheel has no checkpoints but times: the milliseconds at which some are due, and for those that are due in more
than a minute, the minutes. The checkpoints of each time are kept beside the wheel, from where a closed one is removed at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from penstock.pop.core.checkpoint import Checkpoint
from penstock.store.errors import DiskFull
from penstock.timer.ticker import Ticker

NEAR_MS = 60_000


class _Minute(NamedTuple):
    """An item of the wheel: a minute whose checkpoints must be put among those that are due soon."""

    number: int


Item = _Minute | int
"""An item of the wheel. A number is a time at which checkpoints are due, in ms since 1970."""


class Deadlines:
    """Calls `expired` with the checkpoints whose deadline has passed and that are still open.

    Parameters:
        now_ms: tells the time, in ms since 1970.
        expired: called with checkpoints in the order of their deadlines.
        fire_max: maximum number of checkpoints in one call.
        tick_ms: resolution of the wheel.
    """

    def __init__(
        self, now_ms: Callable[[], int], expired: Callable[[list[Checkpoint]], None], *, fire_max: int, tick_ms: int
    ) -> None:
        self._now_ms = now_ms
        self._expired = expired
        self._fire_max = fire_max
        self._near: dict[int, dict[int, Checkpoint]] = {}
        """Checkpoints by the time at which they are due, and then by position."""
        self._minutes: dict[int, dict[int, tuple[int, Checkpoint]]] = {}
        self._ticker: Ticker[Item] = Ticker(now_ms, self._fire, fire_max=fire_max, tick_ms=tick_ms, start_ms=0)

    def schedule(self, due_ms: int, checkpoint: Checkpoint) -> None:
        """Call `expired` with `checkpoint` at `due_ms` (ms since 1970)."""
        if due_ms < self._now_ms() + NEAR_MS:
            self._put(due_ms, checkpoint)
            return
        number = due_ms // NEAR_MS
        minute = self._minutes.get(number)
        if minute is None:
            minute = self._minutes[number] = {}
            # This is half a minute early, so that checkpoints which are due in its first ms are on the wheel in time.
            self._ticker.schedule(number * NEAR_MS - NEAR_MS // 2, _Minute(number))
        minute[checkpoint.position] = (due_ms, checkpoint)

    def _put(self, due_ms: int, checkpoint: Checkpoint) -> None:
        at = self._near.get(due_ms)
        if at is None:
            at = self._near[due_ms] = {}
            self._ticker.schedule(due_ms, due_ms)
        at[checkpoint.position] = checkpoint

    def forget(self, checkpoint: Checkpoint) -> None:
        """Forget a closed checkpoint that was scheduled for its deadline."""
        due_ms = checkpoint.deadline_ms
        for at in (self._near.get(due_ms), self._minutes.get(due_ms // NEAR_MS)):
            if at is not None:
                at.pop(checkpoint.position, None)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call `expired` by itself from now on."""
        self._ticker.start(loop)

    def stop(self) -> None:
        """Stop calling `expired`."""
        self._ticker.stop()

    def fire_due(self) -> bool:
        """Fire one portion of what is due now, and return whether more may be due. Tests that move the clock call this."""
        return self._ticker.fire_due()

    def _fire(self, items: list[Item]) -> None:
        taken: list[tuple[int, Checkpoint]] = []
        for item in items:
            if isinstance(item, _Minute):
                # There is none, if the minute comes out again because the disk was full.
                for due_ms, checkpoint in self._minutes.pop(item.number, {}).values():
                    self._put(due_ms, checkpoint)
            else:
                self._take(item, taken)
        try:
            expired = [checkpoint for _, checkpoint in taken if checkpoint.open]
            if expired:
                self._expired(expired)
        except DiskFull:  # the wheel returns the times again
            for due_ms, checkpoint in taken:
                self._near.setdefault(due_ms, {})[checkpoint.position] = checkpoint
            raise

    def _take(self, due_ms: int, taken: list[tuple[int, Checkpoint]]) -> None:
        """Move the checkpoints that are due at a time to `taken`, as far as there is room."""
        at = self._near.get(due_ms, {})
        for position in tuple(islice(at, self._fire_max - len(taken))):
            taken.append((due_ms, at.pop(position)))
        if at:
            self._ticker.schedule(due_ms, due_ms)  # the wheel returns it in the next turn
        else:
            self._near.pop(due_ms, None)
