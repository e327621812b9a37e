"""Calls a function with one timer of the event loop, which is armed for the earliest thing that is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SLEEP_MS_MAX = 5_000
"""Maximum number of ms for which the loop timer is armed. Within it a step of the node's clock is noticed, and the end of a
suspend, which the loop's timers don't count. A clock that is slewed makes an item late by at most a tenth of it."""


class Alarm:
    """Calls a function when something is due.

    Parameters:
        now_ms: returns the time, in ms since 1970.
        fire_due: does a bounded part of what is due now, and returns whether more may be due. Other work runs between two
            calls.
        next_due_ms: returns when `fire_due` is to be called next, in ms since 1970; None if nothing is pending.
    """

    def __init__(self, now_ms: Callable[[], int], fire_due: Callable[[], bool], next_due_ms: Callable[[], int | None]) -> None:
        self._now_ms = now_ms
        self._fire_due = fire_due
        self._next_due_ms = next_due_ms
        self._loop: asyncio.AbstractEventLoop | None = None
        self._armed: asyncio.TimerHandle | asyncio.Handle | None = None
        self._armed_ms = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call the function on `loop` from now on."""
        self._loop = loop
        self._arm(self._now_ms())

    def stop(self) -> None:
        """Call the function no more."""
        self._loop = None
        if self._armed is not None:
            self._armed.cancel()
            self._armed = None

    def expect(self, due_ms: int) -> None:
        """Note that something has come that is due at `due_ms`, which may be before all else."""
        if self._loop is not None and (self._armed is None or due_ms < self._armed_ms):
            self._arm(due_ms)

    def fired(self) -> None:
        """Note that what was due has been dealt with, perhaps by a call of somebody else.

        If the clock jumps, the timer of the loop is armed for what has gone since.
        """
        if self._armed is not None and self._armed_ms <= self._now_ms():
            self._armed.cancel()
            self._armed = None
            due_ms = self._next_due_ms()
            if due_ms is not None:
                self._arm(due_ms)

    def _arm(self, due_ms: int) -> None:
        assert self._loop is not None
        if self._armed is not None:
            self._armed.cancel()
        wait_ms = min(max(due_ms - self._now_ms(), 0), SLEEP_MS_MAX)
        self._armed_ms = due_ms
        self._armed = self._loop.call_later(wait_ms / 1000, self._move)

    def _move(self) -> None:
        self._armed = None
        more = self._fire_due()
        # `fire_due` may have armed the timer, but something else may be due earlier.
        due_ms = self._next_due_ms()
        if self._loop is not None and due_ms is not None:
            # The clock counts whole milliseconds. What is due "now" waits for the next one, or this would be a busy loop.
            self._arm(due_ms if more else max(due_ms, self._now_ms() + 1))
