"""The deadlines of checkpoints, on the timer wheel.

Nearly every checkpoint is settled long before its deadline. The wheel has no cancel, so only what is due soon goes onto it,
where it is skipped in O(1) when it comes out settled. What is due later waits by the minute, from where a settled
checkpoint is removed at once: an invisible time of twelve hours costs no memory for what was acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.pop.core.checkpoint import Checkpoint
from penstock.timer.ticker import Ticker

NEAR_MS = 60_000

Item = Checkpoint | int
"""On the wheel: a checkpoint, or the number of a minute whose checkpoints are to be put onto it."""


class Deadlines:
    """Calls `expired` with the checkpoints whose time has come and that are still open.

    Parameters:
        now_ms: tells the time.
        expired: gets the checkpoints, in the order of their times.
        fire_max: how many at a time.
        tick_ms: the wheel's slot.
    """

    def __init__(
        self, now_ms: Callable[[], int], expired: Callable[[list[Checkpoint]], None], *, fire_max: int, tick_ms: int
    ) -> None:
        self._now_ms = now_ms
        self._expired = expired
        self._minutes: dict[int, dict[int, tuple[int, Checkpoint]]] = {}
        self._ticker: Ticker[Item] = Ticker(now_ms, self._fire, fire_max=fire_max, tick_ms=tick_ms, start_ms=0)

    def schedule(self, due_ms: int, checkpoint: Checkpoint) -> None:
        """Have `expired` called with `checkpoint` at `due_ms` (ms since 1970)."""
        if due_ms < self._now_ms() + NEAR_MS:
            self._ticker.schedule(due_ms, checkpoint)
            return
        number = due_ms // NEAR_MS
        minute = self._minutes.get(number)
        if minute is None:
            minute = self._minutes[number] = {}
            # A little ahead of its minute: whoever is due at its first ms is on the wheel by then.
            self._ticker.schedule(number * NEAR_MS - NEAR_MS // 2, number)
        minute[checkpoint.position] = (due_ms, checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint that was scheduled for its own deadline. One that is near is skipped when it comes out."""
        minute = self._minutes.get(checkpoint.deadline_ms // NEAR_MS)
        if minute is not None:
            minute.pop(checkpoint.position, None)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fire by itself from now on."""
        self._ticker.start(loop)

    def stop(self) -> None:
        """Fire nothing any more."""
        self._ticker.stop()

    def fire_due(self) -> bool:
        """Fire what is due now, one portion; return whether more may be due. For a clock that is moved by hand."""
        return self._ticker.fire_due()

    def _fire(self, items: list[Item]) -> None:
        expired = []
        for item in items:
            if isinstance(item, Checkpoint):
                if item.open:
                    expired.append(item)
                continue
            for due_ms, checkpoint in self._minutes.pop(item, {}).values():  # none where it comes again: the disk was full
                self._ticker.schedule(due_ms, checkpoint)
        if expired:
            self._expired(expired)
