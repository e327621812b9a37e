"""What the store does once a second: steer the clock, measure the disk, mark and sync the log, begin retention, flush."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import structlog

from penstock.store.clock import Clock
from penstock.store.errors import DiskFull, IndexDamaged
from penstock.store.files import PASSING
from penstock.store.index.index import Index
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.groupcommit import GroupCommit
from penstock.store.options import StoreOptions
from penstock.store.retention.retention import Retention
from penstock.store.sliced import SlicedJob
from penstock.store.space.ballast import Ballasts
from penstock.store.space.space import Level, Space
from penstock.store.timekeeping import Timekeeping

logger = structlog.get_logger("store")

INTERVAL_S = 1.0
"""Seconds between two turns. Also the interval of the background sync for writes that nobody awaits (QoS 0)."""


class Housekeeping:
    """The recurring work of a store on its event loop.

    Parameters:
        loop: runs the turns.
        clock: measures the slices of retention.
        options: when the index is flushed.
        log, index, space, group, retention, timekeeping: of the store.
        flushed_at: position up to which the index is on disk.
        is_running: tells whether the store is open and nothing has failed. Only then does retention work.
        is_leading: tells whether the store appends records by itself. One that follows a leader drops and steps nothing.
        fail: called with an error that must end the node.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        options: StoreOptions,
        *,
        log: CommitLog,
        index: Index,
        space: Space,
        ballasts: Ballasts,
        group: GroupCommit,
        retention: Retention,
        timekeeping: Timekeeping,
        flushed_at: int,
        is_running: Callable[[], bool],
        is_leading: Callable[[], bool],
        fail: Callable[[OSError | IndexDamaged], None],
    ) -> None:
        self._loop = loop
        self._options = options
        self._log = log
        self._index = index
        self._space = space
        self._ballasts = ballasts
        self._group = group
        self._retention = retention
        self._timekeeping = timekeeping
        self._flushed_at = flushed_at
        self._is_running = is_running
        self._is_leading = is_leading
        self._fail = fail
        self._next_flush_s = loop.time() + options.index_flush_ms / 1000
        self._flushing: asyncio.Future[None] | None = None
        self._marking: asyncio.Future[None] | None = None
        self._filling: asyncio.Future[None] | None = None
        self._scheduled: asyncio.TimerHandle | None = None
        self._retention_job = SlicedJob(loop, clock, self._retain, is_urgent=lambda: retention.is_behind)
        retention.on_work = self._retention_job.wake

    def turn(self) -> None:
        """Do what is due, and schedule the next turn."""
        is_first = self._scheduled is None
        self._scheduled = self._loop.call_later(INTERVAL_S, self.turn)
        if self._is_running() and self._is_leading():
            self._timekeeping.check()
        self.measure_disk()
        self._mark()
        self._sync()
        self._retention_job.run()
        self._flush()
        if not is_first:  # the start comes first
            self._fill_ballast()

    def stop(self) -> None:
        """Begin no more work."""
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._retention_job.stop()

    async def finish(self) -> None:
        """Wait for what other threads do at the moment.

        Raises:
            OSError, IndexDamaged: it fails. A want of room for the index is no failure: the next start replays more.
        """
        for work in (self._flushing, self._marking, self._filling):
            if work is not None:
                try:
                    await work
                except OSError as error:
                    if error.errno not in PASSING:
                        raise

    def measure_disk(self) -> None:
        """Measure how much of the disk is free, which may change `Space.level`."""
        measure_disk(self._space, self._log, self._fail)

    def _mark(self) -> None:
        if self._group.durable > self._log.marked and (self._marking is None or self._marking.done()):
            self._marking = self._loop.run_in_executor(None, self._log.mark, self._group.durable)
            self._marking.add_done_callback(self._ended)

    def _sync(self) -> None:
        if self._log.written > self._group.durable:
            self._group.wait(nothing)
            self._group.advance()

    def index_has_grown(self) -> None:
        """Begin a flush of the index if RocksDB would soon begin one by itself, which may be sooner than the next turn."""
        if self._is_running() and self._index.is_flush_due():
            self._flush()

    def _flush(self) -> None:
        """Flush the index when it is time, on another thread."""
        if self._flushing is not None and not self._flushing.done():
            return
        self._index.is_wary = self._space.level is not Level.OPEN
        if self._space.level is Level.EXHAUSTED and not self._space.index_was_refused:
            return  # nothing is appended that the index must keep up with, and the room that is left is for ends of work
        durable = self._group.durable
        unflushed = durable - self._flushed_at
        is_due = (
            self._loop.time() >= self._next_flush_s
            or unflushed >= self._options.index_flush_bytes
            or self._space.index_was_refused
        )
        if (unflushed > 0 and is_due) or self._index.is_flush_due():
            self._next_flush_s = self._loop.time() + self._options.index_flush_ms / 1000
            self._index.is_wary = True
            self._flushing = self._loop.run_in_executor(None, self._index.flush)
            self._flushing.add_done_callback(partial(self._flushed, durable))

    def _fill_ballast(self) -> None:
        """Restore the ballast on another thread, if it is missing or too small and there is room."""
        if self._space.index_was_refused or (self._filling is not None and not self._filling.done()):
            return  # RocksDB needs what is free
        if self._ballasts.are_due(self._log.end - self._log.start, self._space):
            self._filling = self._loop.run_in_executor(None, self._ballasts.fill)
            self._filling.add_done_callback(self._ended)

    def _flushed(self, position: int, work: asyncio.Future[None]) -> None:
        """Note the outcome of a flush of what was durable up to a position."""
        error = None if work.cancelled() else work.exception()
        if isinstance(error, OSError) and error.errno in PASSING:
            self._space.refuse_index(error)
        elif error is not None:
            self._ended(work)
        elif not work.cancelled():
            self._flushed_at = position
            self._space.index_granted()

    def _ended(self, work: asyncio.Future[None]) -> None:
        error = None if work.cancelled() else work.exception()
        if isinstance(error, OSError | IndexDamaged):
            self._fail(error)

    # --- retention --------------------------------------------------------------------------------------------------

    def _retain(self, until_s: float) -> bool:
        """Do a slice of retention. What is due begins whatever else is under way, because a busy log always has a snapshot."""
        if not self._is_running():
            return False
        self._begin_retention()
        try:
            return self._retention.step(until_s) or self._begin_retention()
        except (OSError, IndexDamaged) as error:
            if isinstance(error, OSError) and error.errno in PASSING:
                logger.error("retention.postponed", error=str(error))  # it begins again in a later turn
            else:
                self._fail(error)
            return False

    def _begin_retention(self) -> bool:
        """Begin what is due, and return whether there was something."""
        try:
            with suppress(DiskFull):  # no room for a new segment: the space knows, and the open segment stays open
                return self._retention.begin_due() if self._is_leading() else self._retention.begin_following()
        except (OSError, IndexDamaged) as error:
            self._fail(error)
        return False


def measure_disk(space: Space, log: CommitLog, fail: Callable[[OSError], None]) -> None:
    """Measure how much of the disk is free, which may change `space.level`. Call `fail` where the system can't tell."""
    try:
        if space.was_refused and log.has_room():
            space.granted()
        space.measure()
    except OSError as error:
        fail(error)


def nothing() -> None:
    """Do nothing: the callback of a sync that nobody awaits."""
