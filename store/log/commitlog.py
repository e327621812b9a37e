"""The CommitLog holds every record once, in one order, on disk.

`add` gives a record its position and collects it. `write` puts all collected records into the open segment with one call.
`sync` makes them durable, and may run on another thread. Only records that are written can be read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from struct import Struct
from threading import Thread

import structlog

from penstock.store.errors import DiskFull, LogCorrupt, PositionUnknown, RecordCorrupt, RecordTooLarge, RecordUnreadable
from penstock.store.files import FULL, PASSING, SYSTEM_FILES, File, Files, unlink_if_there
from penstock.store.log.placing import check_places
from penstock.store.log.recordscan import boundary_before, find_valid, read_records, valid_end
from penstock.store.log.rewriting import copy_range, remove_fresh, written_anew
from penstock.store.log.segment import LOG_DIRECTORY, SCAN_BYTES, Segment, SegmentChain
from penstock.store.log.syncmark import Ending, Mark, SyncMark
from penstock.store.log.tail import Tail, recover_tail, verify_sealed
from penstock.store.record import (
    COPY_BYTES,
    HEADER_BYTES,
    RECORD_BYTES_MAX,
    Record,
    decode,
    store_ms_of,
)
from penstock.store.space.space import Space

ALLOCATE_BYTES = 4 * 1024 * 1024
"""Bytes of disk that are reserved ahead of the records. Free space is measured again each time."""

AHEAD_BYTES = 256 * 1024
"""Maximum number of bytes that are read at once for adjacent records. One large copy costs less than a read of each record."""

GUESSED_BYTES = 512
"""Bytes that are read of a record whose size is not known. If it has more, it is read again."""

NOTE_S = 1.0
"""Seconds that the end of a failed node waits for the note about its failure."""

UNREADABLE_MS = 2**62
"""Time of a segment of which the disk can read no record. It is after all others, so that the segment is not taken for old."""

logger = structlog.get_logger("store")

_SIZE = Struct("<I")


class CommitLog:
    """An append-only log of records in segments.

    Parameters:
        data_dir: the node's data directory. The segments are in its folder `commitlog`.
        segment_bytes: capacity of a segment. No record may be larger.
        files: has the files of the data directory.
        space: is told when the disk has no room for the log, and measures free space whenever the log has reserved some.

    Raises:
        LogCorrupt: bytes of a segment are missing.
        OSError: a file can't be opened or created.
    """

    def __init__(self, data_dir: Path, *, segment_bytes: int, space: Space | None = None, files: Files = SYSTEM_FILES) -> None:
        self.directory = data_dir / LOG_DIRECTORY
        self.segment_bytes = segment_bytes
        self._files = files
        self._space = space or Space(data_dir, files=files)
        self._mark = SyncMark(data_dir, files=files)
        files.mkdir(self.directory)
        remove_fresh(files, self.directory)
        self._chain = SegmentChain(self.directory, files=files)
        self._found = self._find_mark()
        """The sync mark of the last process; None if there is none."""
        left_over = self._chain.begin_at(self._found and self._found.begin, self._found.position if self._found else 0)
        if left_over:
            logger.info("log.left_over", segments=left_over, begin=self._chain.bases[0])
        self._bases = self._chain.bases
        self._parts: list[bytes] = []
        self._failure: OSError | None = None
        self._is_recovered = False
        self._refused_bytes = 0
        """Size of the last record for which the log requested room."""
        self._record_bytes_max = min(segment_bytes, RECORD_BYTES_MAX) - COPY_BYTES
        """It leaves room for the header of a copy, so that every record can be carried forward."""
        self.on_roll: Callable[[], None] = lambda: None
        """Called when a new segment begins at `end`, before it has any record."""
        self.on_write: Callable[[int, bytes], None] | None = None
        """Called with position and bytes of what was just written, which are whole records of one segment."""
        self.written = 0
        """Position up to which records are in their files and can be read."""
        self.end = 0
        """Position of the next record: `written` plus the bytes that `add` has collected."""
        base = self._bases[-1]
        path = self._chain.path(base)
        capacity = max(segment_bytes, files.size(path) if files.exists(path) else 0)
        self._open = Segment(files, path, capacity, writable=True)
        self._limit = base
        """Position up to which the disk has reserved room. A record that ends before it can be added."""

    @property
    def start(self) -> int:
        """Position of the oldest record that the log still has."""
        return self._bases[0]

    # --- recovery ---------------------------------------------------------------------------------------------------

    def _find_mark(self) -> Mark | None:
        mark = self._mark.read()
        if mark is None and self._files.exists(self._chain.path(self._chain.bases[0])):
            logger.warning(
                "syncmark.missing",
                file=str(self._mark.path),
                why=self._mark.problem or "there is no such file",
                effect="nothing tells what was durable and where the log began, so the last segment is written anew",
            )
        return mark

    def recover(self, verified_until: int = 0) -> Tail:
        """Find the end of the log, and clear a torn tail. The caller calls it once, before it adds anything.

        The last segment is read as a whole: see `recover_tail`. Sealed segments below `verified_until` are known to be durable
        and are not read again. All records that are found are durable afterwards. If the last process did not end in order,
        nobody knows which of its last records are on disk, even if they can be read: see `_write_anew`.

        Raises:
            LogCorrupt: a damaged record is not in the tail of the last segment, or some records that were durable are gone.
            DiskFull: there is no room to write the last records anew. Nothing has changed.
            OSError: a file can't be read or written.
        """
        check_places(self._files, self.directory)
        for base, following in pairwise(self._bases):
            if following > verified_until:
                verify_sealed(self._chain.sealed_at(base), max(verified_until - base, 0))
            self._chain.cut_sealed(base, following)
        tail = recover_tail(self._files, self._open, self._found)
        mark, base = self._found, self._open.base
        durable = max(mark.position, base) if mark is not None else base
        if (mark is None or mark.ending is not Ending.ORDERLY) and (tail.end > durable or tail.torn_bytes):
            self._write_anew(tail.end - base, max(mark.position - base, 0) if mark is not None else 0)
        elif tail.torn_bytes:
            self._open.clear_from(tail.end - base)
        self.written = self.end = self._limit = tail.end
        self.sync()
        self._files.sync_directory(self.directory)
        self._files.sync_directory(self.directory.parent)
        if not self._mark.write(self.end, begin=self.start):  # it may say that the last end was orderly, which ends now
            raise DiskFull(f"the file {self._mark.path} can't be written; free space or file descriptors, and start again")
        self._is_recovered = True
        return tail

    def _write_anew(self, end: int, durable: int) -> None:
        """Write what may not be on disk to new blocks: the last segment from before `durable` to `end`, which are offsets.

        When the kernel fails to write a page, it keeps the page as if it were on disk. So neither what can be read nor a sync
        that succeeds proves anything about records that an earlier process has written, but the sync of a new file does. The
        page at `durable` was written again after it had been durable. So the copy begins with the last record that begins
        before that page. It becomes a segment, and the old one ends there. Killed at any point, the next start does it again.
        """
        old, block = self._open, self._open.file.block_bytes()
        start = boundary_before(old.read, durable - durable % block, end)
        position = old.base + start
        path = self._chain.path(position)
        try:
            with written_anew(self._files, path) as file:
                if end > start:
                    file.allocate(0, end - start)
                copy_range(old, file, start, end, start)
                if valid_end(partial(_read_all, file), 0, end - start) != end - start:
                    raise LogCorrupt(f"segment {old.path.name} changed while it was read; check the disk and start again")
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise DiskFull(
                f"the last end of the node was not orderly, so {end - start} bytes must be written anew, and the disk "
                f"has no room for them; free at least as much in the file system of {self.directory} and start again"
            ) from error
        why = self._found.reason or self._found.ending.name.lower() if self._found is not None else "no sync mark"
        logger.info("log.written_anew", position=position, bytes=end - start, last_end=why)
        if start:
            self._bases.append(position)
            self._chain.cut_sealed(old.base, position)
        old.close()
        self._open = Segment(self._files, path, max(self.segment_bytes, end - start), writable=True)

    # --- writing ----------------------------------------------------------------------------------------------------

    def add(self, head: bytes, payload: bytes, size: int, spare: int = 0) -> int:
        """Collect a record that is given in two pieces; return its position.

        Args:
            head: size and checksum.
            payload: the rest of the record.
            size: of the whole record.
            spare: bytes that don't count for the limit, because a copy takes `COPY_BYTES` more than the record that it holds.

        Raises:
            RecordTooLarge: the record would not fit into a segment, or is larger than any record may be.
            DiskFull: the disk has no room. Nothing was added, and the log can still be used.
            OSError: the segment is full, and the next one can't be created.
        """
        position = self.end
        end = position + size
        if size - spare > self._record_bytes_max:
            raise RecordTooLarge(
                f"the record has {size} bytes, but at most {self._record_bytes_max} are allowed: the smaller of "
                f"store.segment_bytes and {RECORD_BYTES_MAX}, less {COPY_BYTES} for carrying it forward; send a smaller message"
            )
        if end > self._limit:
            self._make_room(size)
        self._parts.append(head)
        self._parts.append(payload)
        self.end = end
        return position

    def begin_run(self, size_max: int) -> list[bytes] | None:
        """Return the list to which the caller appends the pieces of many records, in order, before it calls `end_run`.

        Return None when the segment or the disk may not have room for `size_max` bytes. The caller then adds each record by
        itself.

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
        """Note the position at which the records of a run end."""
        self.end = end

    def write(self) -> int:
        """Write the collected records; return the number of bytes. An OSError is final: each later call raises it again."""
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
        position = self.written
        self.written += len(data)
        if self.on_write is not None:
            self.on_write(position, data)
        return len(data)

    def has_room(self) -> bool:
        """Request again the room that the disk has refused last; return whether the disk grants it now."""
        try:
            self._make_room(self._refused_bytes)
        except DiskFull:
            return False
        return True

    def _make_room(self, size: int) -> None:
        """Reserve room on the disk for `size` bytes and `ALLOCATE_BYTES` more, before a record needs it.

        So a full disk is noticed before any record is applied. A failed `write` would end the node.
        """
        self._refused_bytes = size
        try:
            if self.end + size > self._open.base + self._open.capacity:
                self.roll(size)
            else:
                self._limit = self._allocate(self._open, max(self._limit, self.end), self.end + size)
        except OSError as error:
            self._failure = error  # also remembered, so that the commit of this turn ends the node
            raise
        self._space.measure(may_rise=False)

    def _allocate(self, segment: Segment, start: int, end: int) -> int:
        until = min(max(start, end) + ALLOCATE_BYTES, segment.base + segment.capacity)
        try:
            segment.allocate(start - segment.base, until - start)
        except OSError as error:
            if error.errno in FULL:
                raise self._space.refuse(error) from error
            raise
        return until

    def roll(self, size: int = 0) -> None:
        """Seal the open segment, which must hold a record, and begin the next one with room for `size` bytes.

        Raises:
            DiskFull: the disk has no room for the next segment. The open one stays open.
            OSError: the disk failed.
        """
        self.write()
        full, base = self._open, self.end
        # It must be durable before the next segment exists, so that only the last segment can have a torn tail. A requested
        # sync may have heard of a failure that it has not reported yet, so this one asks by a file of its own.
        self._fdatasync(full.file)
        self._open, self._limit = self._begin_segment(base, size)
        self._chain.append(base)
        self._chain.seal(full)
        self.on_roll()

    def _begin_segment(self, base: int, size: int) -> tuple[Segment, int]:
        """Create the next segment with room for a record of `size` bytes. If that fails, its file is deleted again, durably:
        the open segment goes on, and a power cut that brought the file back would take its later records for damage."""
        path = self._chain.path(base)
        try:
            segment = Segment(self._files, path, max(self.segment_bytes, size), writable=True)
            return segment, self._allocate(segment, base, base + size)
        except (OSError, DiskFull) as error:
            if unlink_if_there(self._files, path):
                self._files.sync_directory(self.directory)
            if isinstance(error, OSError) and error.errno in PASSING:
                raise self._space.refuse(error) from error
            raise

    def sync(self) -> None:
        """Make all written records durable (fdatasync). Another thread may call it, but only one at a time.

        An OSError is final: after a failed sync the kernel may have dropped the data, and a second sync would report success.
        """
        self._fdatasync(self._open.sync_file)

    def fail(self, error: OSError) -> None:
        """Note that another process has failed to sync the log. Nothing is written or synced any more."""
        self._failure = error

    @property
    def open_segment(self) -> Segment:
        """The segment to which records are written. Earlier segments are durable."""
        return self._open

    def _fdatasync(self, file: File) -> None:
        # The argument keeps the file and its descriptor alive when `roll` runs on another thread meanwhile.
        if self._failure is not None:
            raise self._failure
        try:
            file.fdatasync()
        except OSError as error:
            self._failure = error
            raise

    # --- replicas ---------------------------------------------------------------------------------------------------

    def put(self, position: int, data: bytes) -> None:
        """Write whole records that another replica of the log has stored at `position`, which must be where this one ends.

        They are not verified. A segment begins with them where the open one has no room; `roll` begins one anywhere.

        Raises:
            DiskFull: the disk has no room. Nothing was written, and the log can still be used.
            OSError: the disk failed.
        """
        assert position == self.end == self.written, (position, self.end, self.written)
        if position + len(data) > self._limit:
            self._make_room(len(data))
        self._parts.append(data)
        self.end += len(data)
        self.write()

    def cut_to(self, position: int) -> None:
        """Cut off everything from `position` on, where a record begins. Everything that is left is durable afterwards.

        If the process is killed meanwhile, the log has anything between all of what it had and what is left.

        Raises:
            PositionUnknown: the log begins after `position`.
            DiskFull: the sync mark can't be written. Nothing was cut.
            OSError: the disk failed.
        """
        assert self.end == self.written, "the records of a turn must be written"
        if self._failure is not None:
            raise self._failure
        if position >= self.end:
            return
        if position < self.start:
            raise PositionUnknown(f"the log begins at position {self.start}, so it can't be cut at {position}")
        if not self._mark.write(min(self._mark.position, position)):  # or a start would miss records that were durable
            raise DiskFull(f"the file {self._mark.path} can't be written, so nothing is cut; free space or descriptors")
        if self._open.base > position:
            # The open segment is not closed here, because a sync on another thread may be using it.
            base = self._chain.drop_after(position)
            path = self._chain.path(base)
            self._open = Segment(self._files, path, max(self.segment_bytes, self._files.size(path)), writable=True)
        self._open.clear_from(position - self._open.base)
        self.written = self.end = self._limit = position
        self.sync()

    # --- dropping ---------------------------------------------------------------------------------------------------

    def segments(self) -> list[tuple[int, int]]:
        """Return begin and end position of each segment in order. The open segment ends at `written`."""
        return list(pairwise([*self._bases, self.written]))

    def stored_ms(self, position: int) -> int:
        """Return when the record at `position` was stored, in ms since 1970; 0 if none is written there yet.

        Where the disk can't read it, the next record that it can read in the same segment counts, or else `UNREADABLE_MS`.
        """
        if position + HEADER_BYTES > self.written:
            return 0
        try:
            return store_ms_of(self.read(position, HEADER_BYTES))
        except RecordUnreadable as error:
            logger.error("record.unreadable", position=position, error=str(error))
        segment = self.segment_at(position)
        stop = min(self.written - segment.base, segment.capacity)
        found = find_valid(segment.read, position - segment.base, stop, stop)
        return store_ms_of(segment.read(found, HEADER_BYTES)) if found is not None else UNREADABLE_MS

    def drop_before(self, position: int) -> int:
        """Delete the segments before `position`, where a segment must begin; return how many. See `SegmentChain`.

        The sync mark says durably that the log begins there before any file goes.

        Raises:
            DiskFull: the mark can't be written. Nothing was deleted.
            OSError: the disk failed.
        """
        if not self._mark.write(self._mark.position, begin=position):
            raise DiskFull(f"the file {self._mark.path} can't be written, so no segment is deleted; free space or descriptors")
        return self._chain.drop_before(position)

    # --- reading ----------------------------------------------------------------------------------------------------

    def read(self, position: int, size: int) -> bytes:
        """Return `size` bytes at `position`: the record that a light-queue entry names.

        Raises:
            PositionUnknown: the range is before the start of the log, after `written`, or not within one segment.
            RecordUnreadable: the disk can't read it. This is a PositionUnknown and a RecordCorrupt too.
        """
        if position + size > self.written:
            raise PositionUnknown(f"position {position} is after the last written record, which ends at {self.written}")
        segment = self._open
        if position < segment.base:
            segment = self._chain.sealed_at(position)
            if position + size > segment.base + segment.capacity:
                raise PositionUnknown(f"{size} bytes at position {position} reach beyond segment {segment.path.name}")
        try:
            data = segment.pread(size, position - segment.base)
        except OSError:
            data = b""
        return data if len(data) == size else segment.read(position - segment.base, size)

    def read_ahead(self, position: int, size: int, until: int) -> bytes:
        """Return the bytes of the record at `position` and the bytes after it up to `until`, at most `AHEAD_BYTES` in all.

        This is for callers that read several records and know from `dense_until` that those make up most of the bytes. Raises
        PositionUnknown as `read` does.
        """
        ahead = min(until - position, AHEAD_BYTES)
        if ahead > size:
            with suppress(PositionUnknown):  # the segment ends before `until`, or the disk can't read it all
                return self.read(position, ahead)
        return self.read(position, size)

    def record(self, position: int, size: int = 0) -> Record:
        """Return the record at `position`. With `size` 0, its size is read from the record.

        Raises:
            PositionUnknown: no record is there.
            RecordCorrupt: the record is damaged.
        """
        if not size:
            with suppress(PositionUnknown):  # the log or the segment ends before
                data = self.read(position, GUESSED_BYTES)
                if _SIZE.unpack_from(data)[0] <= GUESSED_BYTES:
                    return decode(data, position=position)
            size = _SIZE.unpack(self.read(position, _SIZE.size))[0]
        return decode(self.read(position, size), position=position)

    def scan(self, position: int, end: int | None = None) -> Iterator[Record]:
        """Yield the records from `position` to `end`, by default to `written` as it is now.

        Raises:
            RecordCorrupt: a record is damaged. The error names its segment.
        """
        end = self.written if end is None else end
        while position < end:
            segment = self.segment_at(position)
            base = segment.base
            stop = min(end - base, segment.capacity)
            offset = position - base
            while offset < stop:
                data, offsets, length = read_records(segment.read, offset, stop, SCAN_BYTES)
                for at in offsets or (0,):
                    try:
                        found = decode(data, at, position=base + offset + at)
                    except RecordCorrupt as error:
                        raise RecordCorrupt(error.position, error.reason, segment.path.name) from None
                    yield found
                offset += length
            position = base + offset

    def segment_at(self, position: int) -> Segment:
        """Return the segment that has the record at `position`. Raises PositionUnknown."""
        return self._open if position >= self._open.base else self._chain.sealed_at(position)

    def position_at(self, store_ms: int) -> int:
        """Return the position of a segment such that no earlier segment has a record stored at `store_ms` or later.

        That segment may begin with earlier records. Callers that don't want those check the times as they read, because finding
        the first wanted record here would hold up the loop. `store_ms` is in ms since 1970 UTC.
        """
        at = bisect_left(self._bases, store_ms, key=self._first_ms)
        return self._bases[max(at - 1, 0)]

    def _first_ms(self, base: int) -> int:
        """Return when the first record of a segment was stored; a time after all others if it has none yet."""
        return self.stored_ms(base) or 2**63

    @property
    def marked(self) -> int:
        """Position up to which the sync mark says that the log is durable."""
        return self._mark.position

    def mark(self, position: int) -> None:
        """Write to the sync mark that everything before `position` is durable. Another thread may call it. Raises OSError."""
        self._mark.write(position)

    def note_failure(self, reason: str, durable: int) -> None:
        """Write to the sync mark that the node ends because of a failure, as far as the disk lets it within a second.

        Without this note the next start loses nothing either, because it trusts nothing above the mark. But it refuses a log in
        which pages are missing, and asks for a repair, since it can't tell them from damage (`store.log.tail`).

        Args:
            reason: the error.
            durable: everything before this position is durable.
        """
        if not self._is_recovered:
            return

        def note() -> None:
            with suppress(OSError):
                self._mark.write(durable, ending=Ending.FAILED, reason=reason)

        writer = Thread(target=note, name="penstock-note", daemon=True)  # a disk that fails may also keep a call waiting
        writer.start()
        writer.join(NOTE_S)

    def close(self) -> None:
        """Write and sync the collected records, unless that has failed before, and close the files. Raises OSError."""
        try:
            if self._failure is None:
                self.write()
                self.sync()
                if self._is_recovered:  # otherwise the existing mark would be overwritten
                    self._mark.write(self.written, ending=Ending.ORDERLY)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files without writing anything."""
        self._mark.close()
        self._chain.close()
        self._open.close()


def _read_all(file: File, offset: int, size: int) -> bytes:
    return file.pread(size, offset)


def dense_until(first: tuple[int, int], last: tuple[int, int], count: int) -> int:
    """Return the end position of the last of some records if they make up most of the log between them; else 0.

    Args:
        first, last: position and size of the first and the last record.
        count: number of records. All are taken to have the size of the first.
    """
    until = last[0] + last[1]
    return until if 0 < until - first[0] <= count * 2 * first[1] else 0
