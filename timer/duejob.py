"""Does what is due of things that wait in rows of the index, such as sessions that end: at their time, and in short slices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.store.clock import Clock
from penstock.store.sliced import SlicedJob
from penstock.timer.alarm import Alarm
from penstock.timer.ticker import RETRY_MS


class DueJob:
    """Calls a function when something is due, a slice at a time, until nothing is due any more.

    Parameters:
        now_ms: returns the time, in ms since 1970.
        clock: measures the slices.
        work: does a slice of what is due, and returns whether more is due. Its argument is the time, in seconds of
            `clock.monotonic_s()`, at which it must return. What it leaves although it is due waits for `RETRY_MS`.
        first_due_ms: returns when the first thing is due of those that are due after a time, in ms since 1970; None if nothing
            is.
    """

    def __init__(
        self, now_ms: Callable[[], int], clock: Clock, work: Callable[[float], bool], first_due_ms: Callable[[int], int | None]
    ) -> None:
        self._now_ms = now_ms
        self._clock = clock
        self._work = work
        self._first_due_ms = first_due_ms
        self._alarm = Alarm(now_ms, self._fire, self._due_ms)
        self._job: SlicedJob | None = None
        self._worked_ms = 0
        """When the last slice began."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work on `loop` from now on, the first time at once."""
        self._job = SlicedJob(loop, self._clock, self._work_slice)
        self._job.wake()
        self._alarm.start(loop)

    def stop(self) -> None:
        """Work no more."""
        self._alarm.stop()
        if self._job is not None:
            self._job.stop()

    @property
    def is_scheduled(self) -> bool:
        """Whether the next slice is scheduled, because more is due."""
        return self._job is not None and self._job.is_scheduled

    def expect(self, due_ms: int) -> None:
        """Note that something has come that is due at `due_ms`, which may be before all else."""
        self._alarm.expect(due_ms)

    def run(self) -> None:
        """Do a slice now."""
        if self._job is not None:
            self._job.run()

    def _fire(self) -> bool:
        self.run()
        return False

    def _work_slice(self, until_s: float) -> bool:
        self._worked_ms = self._now_ms()
        if self._work(until_s):
            return True
        due_ms = self._due_ms()
        if due_ms is not None:
            self._alarm.expect(due_ms)
        return False

    def _due_ms(self) -> int | None:
        """Return when to work next; None if the next slice is scheduled already, or nothing waits."""
        if self._job is None or self._job.is_scheduled:
            return None
        due_ms = self._first_due_ms(0)
        if due_ms is None or due_ms > self._worked_ms:
            return due_ms
        later_ms = self._first_due_ms(self._worked_ms)
        again_ms = self._now_ms() + RETRY_MS
        return again_ms if later_ms is None else min(again_ms, later_ms)
