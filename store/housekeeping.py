"""What the store does once a second: steer the clock, measure the disk, mark and sync the log, begin retention, flush."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import structlog

from penstock.store.errors import DiskFull, IndexDamaged
from penstock.store.files import PASSING
from penstock.store.log.groupcommit import GroupCommit
from penstock.store.sliced import SlicedJob
from penstock.store.space.space import Level

if TYPE_CHECKING:
    from penstock.store.store import Store

logger = structlog.get_logger("store")

INTERVAL_S = 1.0
"""Seconds between two turns. Also the interval of the background sync for writes that nobody awaits (QoS 0)."""


class Housekeeping:
    """The recurring work of a store on its event loop.

    Parameters:
        store: has the log, the index and the disk. One that follows a leader neither drops records nor steps the clock.
        loop: runs the turns.
        group: syncs the log.
        flushed_at: position up to which the index is on disk.
    """

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop, group: GroupCommit, flushed_at: int) -> None:
        self._store = store
        self._loop = loop
        self._log = store.log
        self._index = store.index
        self._space = store.space
        self._group = group
        self._retention = retention = store.retention
        self._flushed_at = flushed_at
        self._next_flush_s = loop.time() + store.options.index_flush_ms / 1000
        self._flushing: asyncio.Future[None] | None = None
        self._marking: asyncio.Future[None] | None = None
        self._filling: asyncio.Future[None] | None = None
        self._scheduled: asyncio.TimerHandle | None = None
        self._retention_job = SlicedJob(loop, store.clock, self._retain, is_urgent=lambda: retention.is_behind)
        retention.on_work = self._retention_job.wake

    def turn(self) -> None:
        """Do what is due, and schedule the next turn."""
        is_first = self._scheduled is None
        self._scheduled = self._loop.call_later(INTERVAL_S, self.turn)
        if self._store.is_running and not self._store.replaying:
            self._store.timekeeping.check()
        self._store.measure_disk()
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
        if self._store.is_running and self._index.is_flush_due():
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
            or unflushed >= self._store.options.index_flush_bytes
            or self._space.index_was_refused
        )
        if (unflushed > 0 and is_due) or self._index.is_flush_due():
            self._next_flush_s = self._loop.time() + self._store.options.index_flush_ms / 1000
            self._index.is_wary = True
            self._flushing = self._loop.run_in_executor(None, self._index.flush)
            self._flushing.add_done_callback(partial(self._flushed, durable))

    def _fill_ballast(self) -> None:
        """Restore the ballast on another thread, if it is missing or too small and there is room."""
        if self._space.index_was_refused or (self._filling is not None and not self._filling.done()):
            return  # RocksDB needs what is free
        if self._store.ballasts.are_due(self._log.end - self._log.start, self._space):
            self._filling = self._loop.run_in_executor(None, self._store.ballasts.fill)
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
            self._store.fail(error)

    # --- retention --------------------------------------------------------------------------------------------------

    def _retain(self, until_s: float) -> bool:
        """Do a slice of retention. What is due begins whatever else is under way, because a busy log always has a snapshot."""
        if not self._store.is_running:
            return False
        self._begin_retention()
        try:
            return self._retention.step(until_s) or self._begin_retention()
        except (OSError, IndexDamaged) as error:
            if isinstance(error, OSError) and error.errno in PASSING:
                logger.error("retention.postponed", error=str(error))  # it begins again in a later turn
            else:
                self._store.fail(error)
            return False

    def _begin_retention(self) -> bool:
        """Begin what is due, and return whether there was something."""
        try:
            with suppress(DiskFull):  # no room for a new segment: the space knows, and the open segment stays open
                return self._retention.begin_due() if not self._store.replaying else self._retention.begin_following()
        except (OSError, IndexDamaged) as error:
            self._store.fail(error)
        return False


def nothing() -> None:
    """Do nothing: the callback of a sync that nobody awaits."""
