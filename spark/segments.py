"""The files of a CommitLog, read beside a running node.

The node may be appending: the last segment is a file with a hole after its data, and its last record may be incomplete.
This module reads files with `pread` and never maps them, because the node truncates a segment when it seals it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from penstock.spark.errors import LogMissing, LogUnreadable
from penstock.store import record
from penstock.store.errors import LogCorrupt, RecordCorrupt
from penstock.store.files import SYSTEM_FILES
from penstock.store.log import recordscan
from penstock.store.log.segment import LOG_DIRECTORY, SUFFIX, segment_bases, segment_name
from penstock.store.log.syncmark import Mark, SyncMark

BLOCK_BYTES = 8 * 1024 * 1024
"""Bytes of the log that a reader holds at once, more only where one record is larger. This bounds a worker's memory."""

_SIZE_CRC = Struct("<II")

REMEDY = "Restore the file, or run `penstock repair`."


class LogSegment(NamedTuple):
    """One file of the log, and the positions of its records."""

    path: str
    base: int
    """Position of the file's first byte."""
    stop: int
    """Position after its last record."""


class RecordBlock(NamedTuple):
    """Whole records of a segment in one buffer."""

    path: str
    buffer: bytes
    position: int
    """Position of the buffer's first byte."""
    offsets: np.ndarray[Any, np.dtype[np.int64]]
    """Offset in the buffer at which each record starts."""


class LogTail(NamedTuple):
    """The end of the last segment."""

    end: int
    """Position after the last whole record."""
    last_ms: int | None
    """Store time of that record, or None if there is no record."""
    torn: bool
    """Whether an incomplete record follows: the node is writing it, or ended while it wrote it."""


class LogSurvey(NamedTuple):
    """The extent of a log at one moment. Readers that stop at `end` all see the same state of the log."""

    directory: Path
    segments: list[LogSegment]
    start: int
    end: int
    first_ms: int
    tail_ms: int | None
    """Store time of the last record, unless that was known to be durable."""
    torn: bool

    @property
    def last_ms(self) -> int:
        """Store time of the last record, 0 if there is none. This may follow the sizes of all records of a segment."""
        if self.tail_ms is not None:
            return self.tail_ms
        return next((_last_ms(each) for each in reversed(self.segments) if each.stop > each.base), 0)


def find(path: str | Path) -> Path:
    """Return the absolute path of the directory of the segments, given that directory or the data directory around it.

    Workers of a cluster have other working directories than the driver, so a relative path would mean another place there.

    Raises:
        LogMissing: neither holds a segment.
        LogUnreadable: the user of this process may not look.
    """
    absolute = Path(path).absolute()
    for directory in (absolute / LOG_DIRECTORY, absolute):
        try:
            names = os.listdir(directory)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            raise LogUnreadable(
                f"{directory} can't be read ({error.strerror}). Run as the user of the node, or let this user read it."
            ) from error
        if any(name.endswith(SUFFIX) for name in names):
            return directory
    raise LogMissing(f"{absolute} holds no CommitLog. Name a data directory, or its folder `{LOG_DIRECTORY}`.")


def survey(path: str | Path) -> LogSurvey:
    """List the segments of a log and find its end.

    It follows the sizes of all records of the last segment, and verifies those that were not known to be durable.

    Raises:
        LogMissing: the directory holds no log.
        LogCorrupt: bytes are missing between two segments, or before the first or after the last one, as far as the sync mark
            of the data directory tells; or a file isn't a segment.
        RecordCorrupt: a record of the last segment that was not known to be durable is damaged, and whole records follow it.
    """
    directory = find(path)
    durable = _mark(directory)
    bases = segment_bases(SYSTEM_FILES, directory)
    segments = _sealed(directory, bases)
    start = segments[0].base if segments else bases[-1]
    begin = _mark(directory)  # read after the files are listed, since retention writes it before it deletes any
    if begin is not None and begin.begin < start:
        raise LogCorrupt(
            f"The log begins at position {begin.begin}, but the files of the {start - begin.begin} bytes before position "
            f"{start} are missing. {REMEDY}"
        )
    last = _segment_path(directory, bases[-1])
    tail = find_tail(last, bases[-1], _known_in(last, bases[-1], durable))
    if _goes_on(directory, bases[-1], tail.end):
        return survey(path)
    if durable is not None and durable.position > tail.end:
        raise LogCorrupt(
            f"The log was durable up to position {durable.position}, but its files end at position {tail.end}: "
            f"{durable.position - tail.end} bytes are missing. {REMEDY}"
        )
    segments.append(LogSegment(last, bases[-1], tail.end))
    first_ms = _ms_at(segments[0], start) if tail.end > start else 0
    return LogSurvey(directory, segments, start, tail.end, first_ms, tail.last_ms, tail.torn)


def end_of(path: str | Path, known: int = 0) -> int:
    """Return the position after the last whole record of a log.

    Args:
        path: as in `find`.
        known: a position up to which the records are known to be whole. What follows is read, and nothing else.

    Raises:
        LogMissing: the directory holds no log.
        RecordCorrupt: a record after `known` is damaged, and whole records follow it.
    """
    directory = find(path)
    durable = _mark(directory)
    base = segment_bases(SYSTEM_FILES, directory)[-1]
    last = _segment_path(directory, base)
    start = _known_in(last, base, durable)
    end = find_tail(last, base, max(start, known) if known <= base + os.stat(last).st_size else start).end
    return end_of(path, end) if _goes_on(directory, base, end) else end


def begin_of(path: str | Path) -> int:
    """Return the position at which a log begins. Raises LogMissing."""
    return segment_bases(SYSTEM_FILES, find(path))[0]


def _known_in(path: str, base: int, durable: Mark | None) -> int:
    """Return the position up to which the records of the last segment were known to be durable."""
    if durable is None or not base <= durable.position <= base + os.stat(path).st_size:
        return base
    return durable.position


def survey_until(path: str | Path, end: int) -> list[LogSegment]:
    """List the segments before `end`, the end of a record that an earlier `survey` found. It reads no record."""
    directory = find(path)
    bases = segment_bases(SYSTEM_FILES, directory)
    segments = _sealed(directory, bases)
    segments.append(LogSegment(_segment_path(directory, bases[-1]), bases[-1], max(end, bases[-1])))
    return [LogSegment(path, base, min(stop, end)) for path, base, stop in segments if base < end]


def cut(log: LogSurvey, end: int) -> LogSurvey | None:
    """Return the extent of a log when it ended at `end`, or None if no record of the last segment ends there."""
    last = log.segments[-1]
    if end == log.end:
        return log
    if end != last.base and not any(
        bool(np.any(block.offsets + block.position == end)) for block in blocks(last.path, last.base, last.base, last.stop)
    ):
        return None
    return log._replace(segments=[*log.segments[:-1], last._replace(stop=end)], end=end, tail_ms=None, torn=False)


def blocks(path: str, base: int, start: int, stop: int | None, *, block_bytes: int = BLOCK_BYTES) -> Iterator[RecordBlock]:
    """Yield the records of a segment from position `start` to `stop`, or without `stop` up to the last whole record.

    It follows the size fields and checks no checksum; `verify` does that. A node that starts after a kill cuts the end off the
    last segment, once it has written these records into a segment of their own. The reader goes on there.

    Raises:
        RecordCorrupt: no record ends exactly at `stop`, or the disk can't read a record.
        LogMissing: the file does not exist.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise LogMissing(f"{path} was removed during the read, by retention or an unfinished copy. Run again.") from error
    try:
        position, want = start, block_bytes
        while stop is None or position < stop:
            room = want if stop is None else min(want, stop - position)
            buffer, failure = _read(fd, room, position - base)
            offsets, end = recordscan.walk(buffer)
            if offsets:
                yield RecordBlock(path, buffer, position, np.array(offsets, dtype=np.int64))
                position, want = position + end, block_bytes
                continue
            if failure is not None:
                reason = f"the disk can't read it ({failure.strerror}). {REMEDY}"
                raise RecordCorrupt(position, reason, os.path.basename(path)) from failure
            if stop is not None and not buffer:
                moved_to = _base_at(Path(path).parent, position)
                if moved_to is not None and moved_to > base:
                    yield from blocks(
                        _segment_path(Path(path).parent, moved_to), moved_to, position, stop, block_bytes=block_bytes
                    )
                    return
            size = int.from_bytes(buffer[:4], "little") if len(buffer) >= record.HEADER_BYTES else 0
            longer = len(buffer) == room < size <= record.RECORD_BYTES_MAX
            if longer and (stop is None or position + size <= stop):
                want = size
                continue
            if stop is None:
                return
            raise RecordCorrupt(
                position,
                f"byte {position - base} of the file holds the size {size}, but records end at byte {stop - base}. {REMEDY}",
                os.path.basename(path),
            )
    finally:
        os.close(fd)


def _read(fd: int, size: int, offset: int) -> tuple[bytes, OSError | None]:
    """Return up to `size` bytes of a file, and the error of the disk that has ended them, if any."""
    data = b""
    try:
        while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
            data += more
    except OSError as error:
        return data, error
    return data, None


def find_tail(path: str, base: int, known: int | None = None) -> LogTail:
    """Find the end of the last segment: the first incomplete record that no whole record follows.

    Args:
        path: of the segment.
        base: position of its first byte.
        known: position of a record up to which all are known to be whole. They are not read, so `last_ms` is None if nothing
            follows.

    Raises:
        RecordCorrupt: whole records follow an incomplete one, so it was damaged after it was written.
    """
    end, last_ms = base if known is None else known, None
    torn: int | None = None
    for block in blocks(path, base, end, None):
        for offset in block.offsets.tolist():
            position = block.position + offset
            if not _intact(block.buffer, offset):
                torn = position if torn is None else torn
                continue
            # The node may be writing the block that is read, so an incomplete record may be whole a moment later.
            if torn is not None and not _intact_in_file(path, base, torn):
                reason = f"its checksum does not match, and whole records follow it. {REMEDY}"
                raise RecordCorrupt(torn, reason, os.path.basename(path))
            torn = None
            size, _, _, _, _, _, last_ms = record.HEADER.unpack_from(block.buffer, offset)
            end = position + size
    with open(path, "rb") as file:
        behind = os.pread(file.fileno(), 4, end - base)
    return LogTail(end, last_ms, any(behind))


def split(segment: LogSegment, partition_bytes: int, start: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield positions (start, stop) that split a segment between records into partitions of about `partition_bytes`.

    A partition has at least one record. Without `start`, the first one begins with the segment.
    """
    start = segment.base if start is None else start
    for block in blocks(*segment[:2], start, segment.stop):
        positions = block.offsets + block.position
        while (cut := int(np.searchsorted(positions, start + partition_bytes))) < len(positions):
            yield start, int(positions[cut])
            start = int(positions[cut])
    if start < segment.stop:
        yield start, segment.stop


def topic_at(segments: list[LogSegment], position: int) -> str | None:
    """Return the topic of the message at `position`, or None if the log no longer has it."""
    segment = next((each for each in segments if each.base <= position < each.stop), None)
    if segment is None:
        return None
    with open(segment.path, "rb") as file:
        head = os.pread(file.fileno(), record.HEADER_BYTES + record.TOPIC_BYTES_MAX, position - segment.base)
    if len(head) < record.HEADER_BYTES:
        return None
    _, _, kind, _, topic_len, _, _ = record.HEADER.unpack_from(head)
    if kind != record.Kind.MESSAGE:
        return None
    return head[record.HEADER_BYTES : record.HEADER_BYTES + topic_len].decode(errors="replace")


def is_record(segment: LogSegment, position: int) -> bool:
    """Return whether a whole record begins at a position of a segment."""
    try:
        for block in blocks(segment.path, segment.base, position, segment.stop, block_bytes=record.HEADER_BYTES):
            return _intact(block.buffer, 0)
    except RecordCorrupt:  # its size can't be
        pass
    return False


def first_ms(segment: LogSegment) -> int | None:
    """Return the store time of the first record of a segment, or None if the segment is empty."""
    return _ms_at(segment, segment.base) if segment.stop > segment.base else None


def _goes_on(directory: Path, base: int, end: int) -> bool:
    """Return whether the node has begun another segment where the last one ends, since the files were listed.

    A start after a kill does so in the middle of the last segment: it writes the end of that anew, and then cuts the old file.
    """
    return end > base and os.path.exists(_segment_path(directory, end))


def _base_at(directory: Path, position: int) -> int | None:
    """Return the position of the segment that has a record now; None if there is no such segment."""
    return max((base for base in segment_bases(SYSTEM_FILES, directory) if base <= position), default=None)


def _mark(directory: Path) -> Mark | None:
    return SyncMark(directory.parent).read() if directory.name == LOG_DIRECTORY else None


def _segment_path(directory: Path, base: int) -> str:
    return str(directory / segment_name(base))


def _sealed(directory: Path, bases: list[int]) -> list[LogSegment]:
    """Return all segments but the last, as far as retention has left them.

    A sealed segment ends where the next one begins, even before it is truncated.
    """
    segments: list[LogSegment] = []
    for base, following in pairwise(bases):
        path = _segment_path(directory, base)
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:  # retention has deleted it since the files were listed, and those before it
            segments.clear()
            continue
        if base + size < following:
            raise LogCorrupt(
                f"Segment {os.path.basename(path)} has {size} bytes, but the next one starts at position {following}: "
                f"{following - base - size} bytes from position {base + size} on are missing. {REMEDY}"
            )
        segments.append(LogSegment(path, base, following))
    return segments


def _intact(buffer: bytes, offset: int) -> bool:
    size, crc = _SIZE_CRC.unpack_from(buffer, offset)
    return bool(record.checksum(memoryview(buffer)[offset + record.CRC_FROM : offset + size]) == crc)


def _intact_in_file(path: str, base: int, position: int) -> bool:
    for block in blocks(path, base, position, None, block_bytes=record.HEADER_BYTES):
        return _intact(block.buffer, 0)
    return False


def _ms_at(segment: LogSegment, position: int) -> int:
    with open(segment.path, "rb") as file:
        header = os.pread(file.fileno(), record.HEADER_BYTES, position - segment.base)
    return int(record.HEADER.unpack(header)[6])


def _last_ms(segment: LogSegment) -> int:
    last_ms = 0
    for block in blocks(segment.path, segment.base, segment.base, segment.stop):
        last_ms = record.HEADER.unpack_from(block.buffer, int(block.offsets[-1]))[6]
    return last_ms
