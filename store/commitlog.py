"""The CommitLog: every record once, in one order, on disk.

`add` gives a record its position and collects it; `write` puts all that was collected into the open segment with one
call; `sync` makes it durable and may run on another thread. What is written can be read; what isn't can't.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import structlog

from penstock.store.errors import DiskFull, LogCorrupt, PositionUnknown, RecordCorrupt, RecordTooLarge
from penstock.store.quarantine import QUARANTINE, quarantine
from penstock.store.record import (
    COPY_BYTES,
    HEADER_BYTES,
    RECORD_BYTES_MAX,
    Record,
    checksum,
    decode,
    find_valid,
    next_valid,
    store_ms_of,
    valid_until,
    walk,
)
from penstock.store.segment import SUFFIX, Segment, segment_base, segment_name, sync_directory
from penstock.store.space import Space
from penstock.store.syncmark import FILE, SyncMark

logger = structlog.get_logger("store")

DIRECTORY = "commitlog"
"""Folder of the segments inside a data directory."""

OPEN_MAPS_MAX = 64
"""Sealed segments that stay mapped for readers. A map costs address space and a descriptor, no memory of its own."""

ALLOCATE_BYTES = 4 * 1024 * 1024
"""Room on the disk that is taken ahead of the records, and so the bytes after which free space is looked at again."""

AHEAD_BYTES = 256 * 1024
"""Log that is read at once for records that stand side by side: a copy of it costs less than a read of each."""

_FULL = (errno.ENOSPC, errno.EDQUOT)

_SIZE = Struct("<I")


class Tail(NamedTuple):
    """What recovery found at the end of the log."""

    end: int
    """Position behind the last valid record."""
    torn_bytes: int
    """Bytes behind it, up to the last that wasn't zero, that were no whole record. They are gone now."""


class Block(NamedTuple):
    """Records that stand side by side."""

    view: memoryview
    """Of their segment."""
    base: int
    """Position of the segment."""
    offsets: list[int]
    """Where in `view` each record begins."""
    end: int
    """Position behind the last."""


class CommitLog:
    """An append-only log of records in segments.

    Parameters:
        data_dir: the node's data directory; the segments lie in its folder `commitlog`.
        segment_bytes: capacity of a segment. No record may be larger.
        space: told when the disk has no room for the log, and to look whenever some was taken.
    """

    def __init__(self, data_dir: Path, *, segment_bytes: int, space: Space | None = None) -> None:
        self.directory = data_dir / DIRECTORY
        self.segment_bytes = segment_bytes
        self._space = space or Space(data_dir)
        self._mark = SyncMark(data_dir)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._bases = sorted(segment_base(path) for path in self.directory.glob(f"*{SUFFIX}"))
        self._sealed: dict[int, Segment] = {}
        self._parts: list[bytes] = []
        self._failure: OSError | None = None
        self._is_recovered = False
        self._refused_bytes = 0
        """Bytes of the last record that room was asked for."""
        self._record_bytes_max = min(segment_bytes, RECORD_BYTES_MAX) - COPY_BYTES
        """Whatever is stored can be copied forward."""
        self.on_roll: Callable[[], None] = lambda: None
        """Called when a new segment was begun at `end`, before anything is in it."""
        self.written = 0
        """Position up to which records are in their files, and readable."""
        self.end = 0
        """Position of the next record: `written` plus what `add` has collected."""
        if not self._bases:
            self._bases = [0]
        self._check_chain()
        base = self._bases[-1]
        path = self.directory / segment_name(base)
        capacity = max(segment_bytes, path.stat().st_size if path.exists() else 0)
        self._open = Segment(path, capacity, writable=True)
        self._limit = base
        """Position up to which the disk has set room aside: a record that ends before it can be added."""

    @property
    def start(self) -> int:
        """Position of the oldest record that the log still has."""
        return self._bases[0]

    def _check_chain(self) -> None:
        for base, following in pairwise(self._bases):
            size = (self.directory / segment_name(base)).stat().st_size
            if size < following - base:
                raise LogCorrupt(
                    f"segment {segment_name(base)} has {size} bytes, but the next one starts {following - base} bytes "
                    f"after it: {following - base - size} bytes are missing; restore the file, or run `penstock repair`"
                )

    # --- recovery ---------------------------------------------------------------------------------------------------

    def recover(self, verified_until: int = 0) -> Tail:
        """Find the end of the log; clear a torn tail. To be called once, before anything is added.

        The last segment is read whole, about 1.5 s for 256 MiB of small records. Of the sealed ones, what lies below
        `verified_until` is known to be durable and isn't read again. All that is found is durable afterwards: an earlier
        process may have been killed before it synced.

        The tail begins behind the last valid record, and behind the sync mark (`store.syncmark`). Where valid records stand in
        it, a power cut has left the pages of the last groups out of order: it is set aside and cleared like any other.

        Raises:
            LogCorrupt: a record is damaged that isn't the tail of the last segment, or some of what was durable is gone.
        """
        for at, (base, following) in enumerate(pairwise(self._bases)):
            if following > verified_until:
                self._verify_sealed(at, max(verified_until - base, 0))
            self._cut_sealed(base, following - base)
        segment = self._open
        stop = valid_until(segment.view, 0, segment.capacity)
        mark = self._mark.read()
        if mark is not None and segment.base + stop < mark.position:
            raise _lost(segment, stop, mark.position)
        torn_until = segment.data_end(stop)
        if torn_until > stop:
            if find_valid(segment.view, stop + 1, torn_until, segment.capacity) is not None:
                if mark is None or not mark.has_booted_since:
                    raise _damaged(segment, stop)
                self._quarantine(segment, stop, torn_until)
            segment.clear_from(stop)
        self.written = self.end = self._limit = segment.base + stop
        self.sync()
        sync_directory(self.directory)
        sync_directory(self.directory.parent)
        self._mark.write(self.end)
        self._is_recovered = True
        return Tail(self.end, torn_until - stop)

    def _quarantine(self, segment: Segment, start: int, end: int) -> None:
        position, found = segment.base + start, segment.view[start:end]
        name = f"{position}-{end - start}-{checksum(found):08x}.bin"
        logger.warning("log.torn_out_of_order", position=position, bytes=end - start, copy=f"{QUARANTINE}/{name}")
        quarantine(segment.path, position, end - start, name)

    def _verify_sealed(self, at: int, offset: int) -> None:
        segment = self._sealed_segment(at)
        stop = valid_until(segment.view, offset, segment.capacity)
        if stop != segment.capacity:
            raise _damaged(segment, stop)

    def _cut_sealed(self, base: int, size: int) -> None:
        path = self.directory / segment_name(base)
        if path.stat().st_size > size:  # killed between opening the next segment and cutting this one
            os.truncate(path, size)

    # --- writing ----------------------------------------------------------------------------------------------------

    def add(self, head: bytes, payload: bytes, size: int, spare: int = 0) -> int:
        """Collect a record of `size` bytes, given in two pieces; return its position.

        `spare` bytes of it don't count for the limit: a copy takes `COPY_BYTES` more than what it holds.

        Raises:
            RecordTooLarge: it would not fit into a segment, or is larger than any record may be.
            DiskFull: the disk has no room for it. Nothing was added, and the log goes on.
            OSError: the segment is full, and the next one can't be made.
        """
        position = self.end
        end = position + size
        if size - spare > self._record_bytes_max:
            raise RecordTooLarge(
                f"a record of {size} bytes is larger than {self._record_bytes_max}: that, and {COPY_BYTES} for when it is "
                f"copied forward, is the least of store.segment_bytes and {RECORD_BYTES_MAX}; send less"
            )
        if end > self._limit:
            self._make_room(size)
        self._parts.append(head)
        self._parts.append(payload)
        self.end = end
        return position

    def begin_run(self, size_max: int) -> list[bytes] | None:
        """Return the list to which the caller appends the pieces of records, in order, before it calls `end_run`.

        None, and nothing is done, where `size_max` bytes may need more room than the segment or the disk has: each record is to
        be added by itself then.

        Raises:
            OSError: the disk failed.
        """
        if size_max > self._record_bytes_max or (self.end + size_max > self._limit and not self._has_room_for(size_max)):
            return None
        return self._parts

    def _has_room_for(self, size: int) -> bool:
        if self.end + size > self._open.base + self._open.capacity:
            return False
        try:
            self._make_room(size)
        except DiskFull:
            return False
        return True

    def end_run(self, end: int) -> None:
        """Note where the records of a run end."""
        self.end = end

    def write(self) -> int:
        """Write what was collected; return how many bytes. An OSError is final: each later call raises it again."""
        if self._failure is not None:
            raise self._failure
        if not self._parts:
            return 0
        data = b"".join(self._parts)
        self._parts.clear()
        try:
            self._open.write(data, self.written - self._open.base)
        except OSError as error:
            self._failure = error
            raise
        self.written += len(data)
        return len(data)

    def has_room(self) -> bool:
        """Try to get room from the disk for what it had none for; return whether it gave that."""
        try:
            self._make_room(self._refused_bytes)
        except DiskFull:
            return False
        return True

    def _make_room(self, size: int) -> None:
        """Have the disk set room aside for `size` bytes, and a step more, before a record that needs them is there.

        So a full disk is noticed where nothing has been applied yet. A `write` that failed would be the node's end.
        """
        self._refused_bytes = size
        try:
            if self.end + size > self._open.base + self._open.capacity:
                self.roll(size)
            else:
                self._limit = self._allocate(self._open, max(self._limit, self.end), self.end + size)
        except OSError as error:
            self._failure = error  # who appends need not know: the commit of this turn ends the node
            raise
        self._space.measure(may_rise=False)

    def _allocate(self, segment: Segment, start: int, end: int) -> int:
        until = min(max(start, end) + ALLOCATE_BYTES, segment.base + segment.capacity)
        try:
            segment.allocate(start - segment.base, until - start)
        except OSError as error:
            if error.errno in _FULL:
                raise self._space.refuse(error) from error
            raise
        return until

    def roll(self, size: int = 0) -> None:
        """Seal the open segment, which must hold something, and begin the next one, with room for `size` bytes.

        Raises:
            DiskFull: the disk has no room for it. The open segment stays open.
            OSError: the disk failed.
        """
        self.write()
        full, base = self._open, self.end
        # Durable before the next segment exists: only the last segment can have a torn tail.
        self._fdatasync(full)
        self._open, self._limit = self._begin_segment(base, size)
        self._bases.append(base)
        sync_directory(self.directory)
        full.cut(base - full.base)
        self._keep_mapped(full)
        self.on_roll()

    def _begin_segment(self, base: int, size: int) -> tuple[Segment, int]:
        """Make the next segment, with room for a record of `size` bytes; without any, the last one stays the open one."""
        path = self.directory / segment_name(base)
        try:
            segment = Segment(path, self.segment_bytes, writable=True)
            return segment, self._allocate(segment, base, base + size)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno in _FULL:
                raise self._space.refuse(error) from error
            raise
        except DiskFull:
            path.unlink()
            raise

    def sync(self) -> None:
        """Make all that is written durable (fdatasync). Safe to call from another thread, one at a time.

        An OSError is final: after a failed sync the kernel may have dropped the data, and a second one would report success.
        """
        self._fdatasync(self._open)

    def fail(self, error: OSError) -> None:
        """Note that somebody else has failed to sync what was written: nothing is written or synced any more."""
        self._failure = error

    @property
    def open_segment(self) -> Segment:
        """The segment that is written to. Those before it are durable."""
        return self._open

    def _fdatasync(self, segment: Segment) -> None:
        # The argument keeps the segment, and its descriptor, while another thread may roll.
        if self._failure is not None:
            raise self._failure
        try:
            os.fdatasync(segment.fd)
        except OSError as error:
            self._failure = error
            raise

    # --- dropping ---------------------------------------------------------------------------------------------------

    def segments(self) -> list[tuple[int, int]]:
        """Return (position, position behind) of each segment, the open one last: it ends where it is written to."""
        return list(pairwise([*self._bases, self.written]))

    def stored_ms(self, position: int) -> int:
        """Return when the record at `position` was stored; where nothing is written there yet, 0."""
        if position + HEADER_BYTES > self.written:
            return 0
        return store_ms_of(self.read(position, HEADER_BYTES))

    def drop_before(self, position: int) -> int:
        """Delete the segments before `position`, at which one begins; return how many. They are gone for good.

        The oldest goes first, so that a log which is killed here has no gap. Who reads one of them now may read on.
        """
        assert position in self._bases, position
        dropped = 0
        while self._bases[0] < position:
            (self.directory / segment_name(self._bases[0])).unlink()
            self._sealed.pop(self._bases.pop(0), None)
            dropped += 1
        sync_directory(self.directory)
        return dropped

    # --- reading ----------------------------------------------------------------------------------------------------

    def read(self, position: int, size: int) -> bytes:
        """Return `size` bytes at `position`: a record, as a light-queue entry names it.

        Raises:
            PositionUnknown: that is before the start of the log, behind what is written, or not in one segment.
        """
        if position + size > self.written:
            raise PositionUnknown(f"position {position} is behind the end of what is written, {self.written}")
        segment = self._open
        if position < segment.base:
            segment = self._segment_of(position)
            if position + size > segment.base + segment.capacity:  # behind its end the map has no file: that is SIGBUS
                raise PositionUnknown(f"{size} bytes at position {position} reach beyond segment {segment.path.name}")
        offset = position - segment.base
        return segment.map[offset : offset + size]

    def read_ahead(self, position: int, size: int, until: int) -> bytes:
        """Return the bytes of the record at `position`, and those behind it up to `until`: `AHEAD_BYTES` of them at most.

        For who reads several records, and knows from `dense_until` that they are most of what stands there. Raises
        PositionUnknown as `read` does.
        """
        ahead = min(until - position, AHEAD_BYTES)
        if ahead > size:
            with suppress(PositionUnknown):  # the segment ends in between
                return self.read(position, ahead)
        return self.read(position, size)

    def record(self, position: int, size: int = 0) -> Record:
        """Return the record at `position`; its size is looked up where 0 is given.

        Raises:
            PositionUnknown: nothing is there.
            RecordCorrupt: what is there is damaged.
        """
        size = size or _SIZE.unpack(self.read(position, _SIZE.size))[0]
        return decode(self.read(position, size), position=position)

    def scan(self, position: int, end: int | None = None) -> Iterator[Record]:
        """Yield the records from `position` up to `end`, by default to what is written now.

        Raises:
            RecordCorrupt: one of them is damaged; names its segment.
        """
        end = self.written if end is None else end
        while position < end:
            segment = self._open if position >= self._open.base else self._segment_of(position)
            view, base = segment.view, segment.base
            stop = min(end - base, segment.capacity)
            offset = position - base
            while offset < stop:
                try:
                    found = decode(view, offset, position=base + offset)
                except RecordCorrupt as error:
                    raise RecordCorrupt(error.position, error.reason, segment.path.name) from None
                yield found
                offset += found.size
            position = base + offset

    def block(self, position: int, bytes_max: int) -> Block:
        """Return records from `position` on for a reader who looks at many: of one segment, about `bytes_max`, at least one.

        Empty at the end of what is written. About 0.1 us a record; nothing is verified.
        """
        segment = self._open if position >= self._open.base else self._segment_of(position)
        base = segment.base
        start = position - base
        stop = min(self.written - base, segment.capacity)
        offsets, end = walk(segment.view, start, min(start + bytes_max, stop))
        if not offsets and start < stop:
            offsets, end = walk(segment.view, start, min(start + _SIZE.unpack_from(segment.view, start)[0], stop))
        return Block(segment.view, base, offsets, base + end)

    def behind_damage(self, position: int) -> int:
        """Return where a reader goes on who found no valid record at `position`; the node's log names what is between.

        A start verifies what may not be durable yet. What is damaged later, or deep in the past, is found by who reads it.
        """
        segment = self._open if position >= self._open.base else self._segment_of(position)
        stop = min(self.written - segment.base, segment.capacity)
        found = next_valid(segment.view, position - segment.base, stop, stop)
        behind = segment.base + (stop if found is None else found)
        logger.error("log.damaged", segment=segment.path.name, position=position, bytes=behind - position, do="penstock repair")
        return behind

    def position_at(self, store_ms: int) -> int:
        """Return the base of a segment: all records stored at a time or after it, in ms since 1970 UTC, are from there on.

        Records before it are in that segment too. Who wants none of them looks at their times on the way; to find the first
        one here would take up to half a second, for a reader who goes by slices.
        """
        at = bisect_left(range(len(self._bases)), store_ms, key=self._first_ms)
        return self._bases[max(at - 1, 0)]

    def _first_ms(self, at: int) -> int:
        """Return the time of storing of a segment's first record; behind all times where it has none yet."""
        return self.stored_ms(self._bases[at]) or 2**63

    def _segment_of(self, position: int) -> Segment:
        at = bisect_right(self._bases, position) - 1
        if at < 0:
            raise PositionUnknown(f"position {position} is before the oldest record, {self.start}")
        return self._sealed_segment(at)

    def _sealed_segment(self, at: int) -> Segment:
        base = self._bases[at]
        segment = self._sealed.get(base)
        if segment is None:
            # It ends where the next begins, even where its file was not cut.
            size = self._bases[at + 1] - base
            segment = Segment(self.directory / segment_name(base), size, writable=False)
            self._keep_mapped(segment)
        return segment

    def _keep_mapped(self, segment: Segment) -> None:
        self._sealed[segment.base] = segment
        if len(self._sealed) > OPEN_MAPS_MAX:
            # Not closed here: a scan or a sync may be using it.
            del self._sealed[next(iter(self._sealed))]

    @property
    def marked(self) -> int:
        """Position up to which the sync mark says that all is durable."""
        return self._mark.position

    def mark(self, position: int) -> None:
        """Let the sync mark say that all before `position` is durable. Safe to call from another thread. Raises OSError."""
        self._mark.write(position)

    def close(self) -> None:
        """Write and sync what is left (unless that has failed before), cut nothing, close the files."""
        try:
            if self._failure is None:
                self.write()
                self.sync()
                if self._is_recovered:  # or the mark of what is there would be lost
                    self._mark.write(self.written)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files, and write nothing."""
        for segment in (*self._sealed.values(), self._open):
            segment.close()
        self._sealed.clear()


def dense_until(first: tuple[int, int], last: tuple[int, int], count: int) -> int:
    """Return the position behind the last of some records where they are most of what the log has between them; else 0.

    Each is given by position and size. The size of the first stands for that of the others.
    """
    until = last[0] + last[1]
    return until if 0 < until - first[0] <= count * 2 * first[1] else 0


def _damaged(segment: Segment, offset: int) -> LogCorrupt:
    return LogCorrupt(
        f"the record at position {segment.base + offset} (byte {offset} of segment {segment.path.name}) is damaged, and "
        f"it is not the tail of the log: the node does not start on it; restore the file, or run `penstock repair`"
    )


def _lost(segment: Segment, offset: int, durable: int) -> LogCorrupt:
    return LogCorrupt(
        f"the log was durable up to position {durable}, and no valid record is at position {segment.base + offset} (byte "
        f"{offset} of segment {segment.path.name}): the node does not start on it; restore the file, or run `penstock repair`; "
        f"to do without what was there, delete the file {segment.path.parent.parent / FILE}"
    )
