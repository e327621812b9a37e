"""Retention: old segments go, and what somebody still needs of them is carried forward first.

A segment may go when a snapshot at its end is durable (`store.snapshot`) and all its records are too old, or the log is too
large. What is before that position is *expired* from then on: no consumer is given it any more. Then each part names the
records that it still needs, which are copied to the end of the log, once; the segments are deleted; and light queues lose the
entries that point there.

All of that is done in slices between other work, and the order makes it safe to be killed anywhere: copies are durable before
anything is deleted, and what is deleted is needed by nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

import structlog

from penstock.store.errors import DiskFull, PositionUnknown
from penstock.store.index import Batch, KeySpace
from penstock.store.lightqueue import ENTRY_BYTES, entries_array, entries_key, queue_prefix
from penstock.store.options import MIB
from penstock.store.record import COPY_FIXED, Kind, is_intact
from penstock.store.sliced import FULL_RETRY_S
from penstock.store.snapshot import SnapshotWriter, remove_other_snapshots, snapshot_path, snapshots

if TYPE_CHECKING:
    from penstock.store.store import Store

logger = structlog.get_logger("store")

SEGMENT_AGE_DIVISOR = 4
"""A segment is sealed when its first record has reached this part of `retention_ms`, so that a slow log expires too."""

SNAPSHOT_SPACING = 4
"""Bytes of log between two snapshots, per byte of a snapshot: they take a quarter of what the log takes, at most."""

UNSYNCED_BYTES_MAX = 8 * MIB
"""Bytes that are copied forward before the copies so far must be durable: publishers share the disk."""

TRIM_ROWS = 64
"""Rows of one queue that are deleted before others may go on."""

BLOCKED_RETRY_S = 60.0
"""Seconds after which retention tries again, where `copied_bytes_max` has stopped it."""

Job = Generator[bool | None]
"""Work in small steps. A step yields True when the next one must wait for something else, so that the slice ends."""


class Retention:
    """The retention of a store.

    Parameters:
        store: its log, index, parts and options.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: deque[Job] = deque()
        self._writer: SnapshotWriter | None = None
        self._thread = ThreadPoolExecutor(1, "penstock-snapshot")
        remove_other_snapshots(store.data_dir, {base for base, _ in store.log.segments()})
        self._snapshots = snapshots(store.data_dir)
        """Position of each, and when the last record before it was stored."""
        self._last_snapshot = max(self._snapshots, default=store.log.start)
        self._snapshot_bytes = (
            snapshot_path(store.data_dir, self._last_snapshot).stat().st_size if self._last_snapshot in self._snapshots else 0
        )
        self._retry_s = 0.0
        self.expires_before = store.log.start
        """Records before this position are expired, unless there is a copy of them."""
        self.on_dropped: list[Callable[[], Iterator[None]]] = []
        """Called when segments were dropped and queues are trimmed: what a part must do then, in steps of microseconds."""
        self.copied_bytes = 0
        self.dropped_segments = 0
        self.dropped_bytes = 0
        self.trimmed_entries = 0
        self.blocked = False
        """True while `copied_bytes_max` keeps segments from being dropped."""

    @property
    def enabled(self) -> bool:
        """Whether anything ever expires."""
        return bool(self._store.options.retention_ms or self._store.options.retention_bytes)

    @property
    def busy(self) -> bool:
        """Whether anything is left to do for `step`."""
        return bool(self._jobs)

    # --- what calls it ----------------------------------------------------------------------------------------------

    def rolled(self, position: int, store_ms: int) -> None:
        """Take a snapshot at `position`, where a segment begins, unless one is under way. The index is saved up to there."""
        log_bytes = position - self._last_snapshot
        if not self.enabled or self._writer is not None or log_bytes < SNAPSHOT_SPACING * self._snapshot_bytes:
            return
        try:
            self._writer = SnapshotWriter(self._store.data_dir, self._store.index, position, store_ms)
        except OSError as error:
            _snapshot_failed(position, error)
            return
        self._jobs.append(self._snapshot(self._writer, store_ms))

    def begin_due(self) -> None:
        """Begin what is due. To be called about once a second, with nothing uncommitted."""
        if not self.enabled or self._jobs:
            return
        log, options = self._store.log, self._store.options
        base, end = log.segments()[-1]
        age_ms = self._store.now_ms() - log.stored_ms(base) if end > base else 0
        if options.retention_ms and log.end == end and age_ms > options.retention_ms // SEGMENT_AGE_DIVISOR:
            log.roll()
        boundary = self._boundary()
        if boundary is not None and self._store.clock.monotonic_s() >= self._retry_s:
            self._jobs.append(self._expire(boundary))

    def step(self, until_s: float) -> bool:
        """Work until the clock's monotonic time is `until_s`; return whether more work is left."""
        clock = self._store.clock
        if self._store.log.end > self._store.log.written:
            self._store.commit()  # parts also read what they need from light queues
        while self._jobs:
            try:
                for must_wait in self._jobs[0]:
                    if must_wait or clock.monotonic_s() >= until_s:
                        return True
            except DiskFull:  # the store logs that the disk is full; nothing was dropped
                self._retry_s = clock.monotonic_s() + FULL_RETRY_S
            self._jobs.popleft()
        return False

    def close(self) -> None:
        """Give up what is under way: the next start begins it again."""
        self._thread.shutdown()
        for job in self._jobs:
            job.close()
        self._jobs.clear()
        if self._writer is not None:  # its job had not begun
            self._writer.close()
            self._writer = None

    # --- snapshots --------------------------------------------------------------------------------------------------

    def _snapshot(self, writer: SnapshotWriter, store_ms: int) -> Job:
        try:
            yield from writer.slices()
            finished = self._thread.submit(writer.finish)
            while not finished.done():
                yield True
            finished.result()
            self._snapshots[writer.position] = store_ms
            self._last_snapshot, self._snapshot_bytes = writer.position, writer.bytes
        except OSError as error:
            _snapshot_failed(writer.position, error)
        finally:
            writer.close()
            self._writer = None

    # --- what is to go ----------------------------------------------------------------------------------------------

    def _boundary(self) -> int | None:
        """Return the position before which everything is to go; None where nothing is."""
        log, options = self._store.log, self._store.options
        expired_ms = self._store.now_ms() - options.retention_ms
        boundary = None
        for position, stored_ms in self._snapshots.items():
            if position <= log.start:
                continue
            is_old = options.retention_ms and stored_ms <= expired_ms
            before = boundary or log.start
            is_large = options.retention_bytes and log.written - before > options.retention_bytes
            if not (is_old or is_large):
                break
            boundary = position
        return boundary

    def _expire(self, boundary: int) -> Job:
        """Carry forward what is needed from before `boundary`, then delete that part of the log."""
        store = self._store
        self.expires_before = boundary
        while store.queues.backfills_from_before(boundary):
            yield True
        for part in store.parts:
            for origin, size in part.live(boundary):
                if not self._carry(origin, size, boundary):
                    return
                if store.log.end - store.durable_position > UNSYNCED_BYTES_MAX:
                    yield from self._sync(store.log.end)
                yield False
        yield from self._sync(store.log.end)
        freed = boundary - store.log.start
        self.dropped_segments += store.log.drop_before(boundary)
        self.dropped_bytes += freed
        for position in [position for position in self._snapshots if position < boundary]:
            snapshot_path(store.data_dir, position).unlink()
            del self._snapshots[position]
        self.blocked = False
        logger.info("log.expired", before=boundary, freed_bytes=freed, pinned_bytes=store.copies.pinned_bytes)
        yield from store.copies.forget_before(boundary)
        yield from self._trim()
        for job in self.on_dropped:
            yield from job()

    def _carry(self, origin: int, size: int, boundary: int) -> bool:
        """Copy a record that is needed and stands before `boundary`. Return False where `copied_bytes_max` forbids it."""
        store = self._store
        copy = store.copies.where(origin)
        if copy is not None and copy >= boundary:
            return True
        if copy is None and store.copies.pinned_bytes + size > store.options.copied_bytes_max:
            if not self.blocked:
                logger.error(
                    "retention.blocked",
                    pinned_bytes=store.copies.pinned_bytes,
                    why="records that are still needed would take more than store.copied_bytes_max: raise it, or let consumers "
                    "catch up; until then no segment is dropped",
                )
            self.blocked = True
            self._retry_s = store.clock.monotonic_s() + BLOCKED_RETRY_S
            return False
        self.copy(origin, size)
        return True

    def carry_if_expiring(self, origin: int, size: int) -> None:
        """Carry a record forward now if it would expire within half of the retention: what it is for has only just begun."""
        store = self._store
        half_ms = store.options.retention_ms // 2
        at = store.copies.where(origin) or origin
        if at < self.expires_before or (half_ms and store.now_ms() - store.log.stored_ms(at) > half_ms):
            self.copy(origin, size)

    def copy(self, origin: int, size: int) -> None:
        """Append a copy of a record. One that can't be read is left out, which is logged: nobody could read it before."""
        try:
            data = self._store.read(origin, size)
        except PositionUnknown as error:
            logger.error("record.unreadable", position=origin, error=str(error))
            return
        if not is_intact(data):
            logger.error("record.unreadable", position=origin, error="its checksum does not hold")
            return
        self._store.append(Kind.COPIED, COPY_FIXED.pack(origin), body=data)
        self.copied_bytes += size

    def _sync(self, position: int) -> Job:
        """Wait until everything before `position` is durable."""
        if position > self._store.durable_position:
            self._store.commit()
            while not self._store.is_durable(position):
                yield True

    # --- light queues -----------------------------------------------------------------------------------------------

    def _trim(self) -> Job:
        """Delete the entries of light queues that point at what is gone: about 6 us a queue, and 3 us a row that goes."""
        queue_id = 0
        while queue_id < 2**32:
            row = self._store.index.first_at_or_after(entries_key(queue_id, 0), bytes(KeySpace.ENTRIES))
            if row is None:
                break
            queue_id = int.from_bytes(row[0][1:5], "big")
            if self._is_gone(row[1]):
                yield from self._trim_queue(queue_id)
            queue_id += 1
            yield False
        queues = self._store.queues
        for queue_id, open_row in queues.open_rows():
            if self._is_gone(open_row) and queues.drop_open_row(queue_id, open_row):
                self.trimmed_entries += len(open_row) // ENTRY_BYTES
            yield False

    def _trim_queue(self, queue_id: int) -> Job:
        """Delete the rows at the front of a queue whose entries are all gone, but for the open one."""
        index, prefix = self._store.index, queue_prefix(queue_id)
        start = b""
        while True:
            gone: list[bytes] = []
            for key, entries in islice(index.rows(prefix, start), TRIM_ROWS):
                if not self._is_gone(entries):
                    break
                gone.append(key)
                self.trimmed_entries += len(entries) // ENTRY_BYTES
            batch = Batch()
            for key in gone:
                batch.delete(key)
            index.write(batch)
            if len(gone) < TRIM_ROWS:
                return
            start = gone[-1][len(prefix) :]
            yield False

    def _is_gone(self, entries: bytes) -> bool:
        """Return whether none of the entries' records can be read any more."""
        found = entries_array(entries)["position"]
        if not len(found) or int(found.max()) >= self._store.log.start:
            return False
        copies = self._store.copies
        return not (copies.pinned_bytes and copies.any_between(int(found.min()), int(found.max())))


def _snapshot_failed(position: int, error: OSError) -> None:
    # The log has everything still; the next segment tries again.
    logger.error("snapshot.failed", position=position, error=str(error))
