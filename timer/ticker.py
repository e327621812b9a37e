"""Drives a timer wheel on the event loop: one loop timer, armed for the earliest item, whatever is pending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.store.errors import DiskFull
from penstock.timer.wheel import TICK_MS, TimerWheel

T = TypeVar("T")

SLEEP_MS_MAX = 60_000
"""The loop timer is armed at most this far ahead, so that a clock that was set forward is noticed."""


HELD_MS = 1_000
"""How long what is due waits, where nothing may be stored that says so."""


class Ticker(Generic[T]):
    """A wheel with a hand that moves it.

    Parameters:
        now_ms: tells the time, in ms since 1970.
        fire: called with the items that are due, in due order. At most `fire_max` at a time: when more are due, other work
            runs in between, so a million at one instant delay nobody. Where it raises DiskFull, it gets the same items again
            after `HELD_MS`, and skips those that it is done with.
        start_ms: where the wheel starts; what is scheduled before that is late and fires first.
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._armed: asyncio.TimerHandle | asyncio.Handle | None = None
        self._armed_ms = 0

    def __len__(self) -> int:
        return len(self._wheel)

    def schedule(self, due_ms: int, item: T) -> None:
        """Have `fire` called with `item` at `due_ms`: never before it, and as a rule within a tick after it."""
        self._wheel.schedule(due_ms, item)
        if self._loop is not None and (self._armed is None or due_ms < self._armed_ms):
            self._arm(due_ms)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Move by itself from now on. Until then `fire_due` moves it."""
        self._loop = loop
        self._arm(self._now_ms())

    def stop(self) -> None:
        """Fire nothing any more by itself."""
        self._loop = None
        if self._armed is not None:
            self._armed.cancel()
            self._armed = None

    def fire_due(self) -> bool:
        """Fire what is due now, one portion of it. Return whether more may be due."""
        items = self._wheel.advance(self._now_ms(), self._fire_max)
        if items:
            try:
                self._fire(items)
            except DiskFull:
                # Nobody is told of each: the store has logged the level that makes them wait.
                for item in items:
                    self._wheel.schedule(self._now_ms() + HELD_MS, item)
        due_ms = self._wheel.next_due_ms()
        return due_ms is not None and due_ms <= self._now_ms()

    def _arm(self, due_ms: int) -> None:
        assert self._loop is not None
        if self._armed is not None:
            self._armed.cancel()
        wait_ms = min(max(due_ms - self._now_ms(), 0), SLEEP_MS_MAX)
        self._armed_ms = due_ms
        self._armed = self._loop.call_later(wait_ms / 1000, self._move)

    def _move(self) -> None:
        self._armed = None
        more = self.fire_due()
        # Whatever `fire` armed by scheduling: the wheel may hold something earlier.
        due_ms = self._wheel.next_due_ms()
        if self._loop is not None and due_ms is not None:
            # A millisecond is the clock's grain: due "now" is asked again in the next one, not in a hot loop.
            self._arm(due_ms if more else max(due_ms, self._now_ms() + 1))
