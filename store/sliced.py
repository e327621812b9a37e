"""Background work in short slices, so that a long job never holds up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator

from penstock.store.clock import Clock
from penstock.store.errors import DiskFull

SLICE_S = 0.002
"""Seconds of the event loop that one slice takes, about."""

PAUSE_S = 0.008
"""Seconds between two slices. With `SLICE_S` this limits a job to a fifth of the loop."""

URGENT_SLICE_S_MAX = 0.02
"""Seconds that one slice of a job that falls behind takes at most, because everybody else waits meanwhile."""

FULL_RETRY_S = 5.0
"""Seconds after which a job tries again when the disk was full."""

Steps = Generator[bool | None]
"""Work in short steps. A step yields True when the next one must wait for something else, so that the slice ends."""


class SlicedJob:
    """Runs a function on the event loop again and again, a slice at a time, until it has no work left.

    When the function raises `DiskFull`, it is called again after `FULL_RETRY_S`. Any other error goes to the caller of `run`
    or to the loop, and the job rests until the next `wake` or `run`.

    Parameters:
        loop: runs the slices.
        clock: measures them.
        work: does one slice of the work and returns whether more is left. Its argument is the time, in seconds of
            `clock.monotonic_s()`, at which it must return.
        pause_s: seconds between two slices. 0 means the next turn of the loop.
        is_urgent: returns whether the job falls behind. While it does, there is no pause, and a slice lasts as long as what the
            loop has done since the last one, up to `URGENT_SLICE_S_MAX`. So those who make the work get half of the loop.
    """

    __slots__ = ("_clock", "_ended_s", "_is_stopped", "_is_urgent", "_loop", "_pause_s", "_scheduled", "_work")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        work: Callable[[float], bool],
        *,
        pause_s: float = PAUSE_S,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._work = work
        self._pause_s = pause_s
        self._is_urgent = is_urgent
        self._scheduled: asyncio.Handle | None = None
        self._is_stopped = False
        self._ended_s = clock.monotonic_s()
        """When the last slice has ended."""

    @property
    def is_scheduled(self) -> bool:
        """Whether a slice is scheduled, be it after a pause or after `FULL_RETRY_S`."""
        return self._scheduled is not None

    def wake(self, delay_s: float = 0.0) -> None:
        """Schedule the next slice `delay_s` seconds from now. Does nothing when one is scheduled or the job is stopped."""
        if self._scheduled is None and not self._is_stopped:
            self._schedule(delay_s)

    def run(self) -> None:
        """Run a slice now. Does nothing when one is scheduled or the job is stopped."""
        if self._scheduled is None and not self._is_stopped:
            self._run_slice()

    def stop(self) -> None:
        """Run no more slices."""
        self._is_stopped = True
        self._cancel()

    def _run_slice(self) -> None:
        self._scheduled = None
        began_s = self._clock.monotonic_s()
        slice_s = min(max(SLICE_S, began_s - self._ended_s), URGENT_SLICE_S_MAX) if self._is_urgent() else SLICE_S
        try:
            has_more = self._work(began_s + slice_s)
            pause_s = 0.0 if self._is_urgent() else self._pause_s
        except DiskFull:  # the store logs that the disk is full
            has_more, pause_s = True, FULL_RETRY_S
        self._ended_s = self._clock.monotonic_s()
        if has_more and not self._is_stopped:
            self._cancel()  # the work itself may have called `wake`
            self._schedule(pause_s)

    def _schedule(self, delay_s: float) -> None:
        loop = self._loop
        self._scheduled = loop.call_later(delay_s, self._run_slice) if delay_s else loop.call_soon(self._run_slice)

    def _cancel(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
