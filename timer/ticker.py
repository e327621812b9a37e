"""Drives a timer wheel with one timer of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.store.errors import DiskFull
from penstock.timer.alarm import Alarm
from penstock.timer.wheel import TICK_MS, TimerWheel

T = TypeVar("T")

RETRY_MS = 1_000
"""Milliseconds after which items fire again when the disk was too full to record that they fired."""


class Ticker(Generic[T]):
    """Calls a function with the items of a timer wheel when they are due.

    Parameters:
        now_ms: returns the time, in ms since 1970.
        fire: called with the items that are due, in due order. When it raises DiskFull it gets the same items again after
            `RETRY_MS`, and must skip those that it has already dealt with.
        fire_max: maximum number of items of one call. When more are due, other work runs in between, so that a million items
            that are due at one instant delay nothing else for long.
        tick_ms: width of a slot of the wheel.
        start_ms: where the wheel starts, by default now. Items that are due before that are late and fire first.
    """

    def __init__(
        self,
        now_ms: Callable[[], int],
        fire: Callable[[list[T]], None],
        *,
        fire_max: int,
        tick_ms: int = TICK_MS,
        start_ms: int | None = None,
    ) -> None:
        self._now_ms = now_ms
        self._fire = fire
        self._fire_max = fire_max
        self._wheel: TimerWheel[T] = TimerWheel(now_ms() if start_ms is None else start_ms, tick_ms=tick_ms)
        self._alarm = Alarm(now_ms, self.fire_due, self._wheel.next_due_ms)

    def __len__(self) -> int:
        return len(self._wheel)

    def schedule(self, due_ms: int, item: T) -> None:
        """Call `fire` with `item` at `due_ms`: never earlier, and usually at most one tick later."""
        self._wheel.schedule(due_ms, item)
        self._alarm.expect(due_ms)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fire items on `loop` from now on. Before that, only `fire_due` fires them."""
        self._alarm.start(loop)

    def stop(self) -> None:
        """Fire no more items unless `fire_due` is called."""
        self._alarm.stop()

    def fire_due(self) -> bool:
        """Fire at most `fire_max` items that are due now. Return whether more may be due."""
        items = self._wheel.advance(self._now_ms(), self._fire_max)
        if items:
            try:
                self._fire(items)
            except DiskFull:
                # Single items are not logged, because the store has logged that the disk is full.
                for item in items:
                    self._wheel.schedule(self._now_ms() + RETRY_MS, item)
        due_ms = self._wheel.next_due_ms()
        self._alarm.fired()
        return due_ms is not None and due_ms <= self._now_ms()
