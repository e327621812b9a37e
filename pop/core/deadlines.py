"""The deadlines of checkpoints, on a timer wheel.

Nearly every checkpoint is closed long before its deadline. An item can't be removed from the wheel, so only checkpoints that
are due within a minute are on it; one that is closed is skipped when it comes out. The others are kept by the minute in which
they are due, from where a closed checkpoint is removed at once. Therefore acknowledged messages take no memory, even if their
invisible time is twelve hours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.pop.core.checkpoint import Checkpoint
from penstock.timer.ticker import Ticker

NEAR_MS = 60_000

Item = Checkpoint | int
"""An item of the wheel: a checkpoint, or the number of a minute whose checkpoints must be put onto the wheel."""


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
        self._minutes: dict[int, dict[int, tuple[int, Checkpoint]]] = {}
        self._ticker: Ticker[Item] = Ticker(now_ms, self._fire, fire_max=fire_max, tick_ms=tick_ms, start_ms=0)

    def schedule(self, due_ms: int, checkpoint: Checkpoint) -> None:
        """Call `expired` with `checkpoint` at `due_ms` (ms since 1970)."""
        if due_ms < self._now_ms() + NEAR_MS:
            self._ticker.schedule(due_ms, checkpoint)
            return
        number = due_ms // NEAR_MS
        minute = self._minutes.get(number)
        if minute is None:
            minute = self._minutes[number] = {}
            # This is half a minute early, so that checkpoints which are due in its first ms are on the wheel in time.
            self._ticker.schedule(number * NEAR_MS - NEAR_MS // 2, number)
        minute[checkpoint.position] = (due_ms, checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Forget a closed checkpoint that was scheduled for its deadline. On the wheel, it is skipped."""
        minute = self._minutes.get(checkpoint.deadline_ms // NEAR_MS)
        if minute is not None:
            minute.pop(checkpoint.position, None)

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
        expired = []
        for item in items:
            if isinstance(item, Checkpoint):
                if item.open:
                    expired.append(item)
                continue
            for due_ms, checkpoint in self._minutes.pop(
                item, {}
            ).values():  # nothing, if the minute comes out again because the disk was full
                self._ticker.schedule(due_ms, checkpoint)
        if expired:
            self._expired(expired)
