"""The CommitLog's files, as a reader beside a running node sees them.

The node may be appending: the last segment is a file with a hole behind its data, and its last record may be half
written. Files are read with `pread`, never through a map, since the node cuts a segment to its size when it seals it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from penstock.spark.errors import LogMissing
from penstock.store import record
from penstock.store.errors import LogCorrupt, RecordCorrupt

DIRECTORY = "commitlog"
"""Folder of the segments inside a data directory."""

SUFFIX = ".log"
NAME_DIGITS = 20

BLOCK_BYTES = 8 * 1024 * 1024
"""Bytes of the log that a reader holds at once, more only where one record is larger. Bounds a worker's memory."""

_SIZE_CRC = Struct("<II")

REMEDY = "restore the file, or run `penstock repair`"


class Segment(NamedTuple):
    """One file of the log, and the positions that its records take."""

    path: str
    base: int
    """Position of the file's first byte."""
    stop: int
    """Position behind its last record."""


class Block(NamedTuple):
    """Some whole records of a segment, in one buffer."""

    path: str
    buffer: bytes
    position: int
    """Position of the buffer's first byte."""
    offsets: np.ndarray[Any, np.dtype[np.int64]]
    """Where in the buffer each record starts."""


class Tail(NamedTuple):
    """How the last segment ends."""

    end: int
    """Position behind the last whole record."""
    last_ms: int | None
    """When that record was stored, or None where there is none."""
    torn: bool
    """Something stands behind it that is not a whole record: the node is writing it, or died while it did."""


class Log(NamedTuple):
    """What a log held at the moment when it was surveyed. A reader that stops at `end` sees one state of it."""

    directory: Path
    segments: list[Segment]
    start: int
    end: int
    first_ms: int
    last_ms: int
    torn: bool


def find(path: str | Path) -> Path:
    """Return the directory of the segments, given that or the data directory that holds it.

    Raises:
        LogMissing: neither has a segment.
    """
    for directory in (Path(path) / DIRECTORY, Path(path)):
        if directory.is_dir() and any(directory.glob(f"*{SUFFIX}")):
            return directory
    raise LogMissing(f"{path} holds no CommitLog: name a data directory, or its folder `{DIRECTORY}`")


def survey(path: str | Path) -> Log:
    """List the log's segments and find its end. Reads the last segment whole, about 0.5 s for 256 MiB.

    Raises:
        LogMissing: there is no log.
        LogCorrupt: bytes are missing between two segments, or a file there isn't a segment.
        RecordCorrupt: a record of the last segment is damaged, and whole ones follow it.
    """
    directory = find(path)
    bases = _bases(directory)
    segments = _sealed(directory, bases)
    last = _segment_path(directory, bases[-1])
    tail = find_tail(last, bases[-1])
    segments.append(Segment(last, bases[-1], tail.end))
    last_ms = tail.last_ms
    if last_ms is None and len(segments) > 1:  # the node has just opened a segment
        last_ms = _last_ms(segments[-2])
    first_ms = _ms_at(segments[0], segments[0].base) if tail.end > bases[0] else 0
    return Log(directory, segments, bases[0], tail.end, first_ms, last_ms or 0, tail.torn)


def survey_until(path: str | Path, end: int) -> list[Segment]:
    """List the segments below `end`, which an earlier `survey` has found to be the end of a record. Reads no record."""
    directory = find(path)
    bases = _bases(directory)
    segments = _sealed(directory, bases)
    segments.append(Segment(_segment_path(directory, bases[-1]), bases[-1], max(end, bases[-1])))
    return [Segment(path, base, min(stop, end)) for path, base, stop in segments if base < end]


def blocks(path: str, base: int, start: int, stop: int | None, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Yield the records of a segment from position `start` to `stop`; without `stop`, as far as they are whole.

    Follows the size fields only: whether a checksum holds is asked by `verify`.

    Raises:
        RecordCorrupt: with `stop`, where no record ends exactly there.
        LogMissing: the file is gone.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise LogMissing(f"{path} was removed while the log was read (retention, or a copy under way): run again") from error
    try:
        position, want = start, block_bytes
        while stop is None or position < stop:
            room = want if stop is None else min(want, stop - position)
            buffer = os.pread(fd, room, position - base)
            offsets, end = record.walk(buffer)
            if offsets:
                yield Block(path, buffer, position, np.array(offsets, dtype=np.int64))
                position, want = position + end, block_bytes
                continue
            size = int.from_bytes(buffer[:4], "little") if len(buffer) >= record.HEADER_BYTES else 0
            longer = len(buffer) == room < size <= record.RECORD_BYTES_MAX
            if longer and (stop is None or position + size <= stop):
                want = size
                continue
            if stop is None:
                return
            raise RecordCorrupt(
                position,
                f"byte {position - base} of the file holds the size {size}, but records go on to byte {stop - base}; {REMEDY}",
                os.path.basename(path),
            )
    finally:
        os.close(fd)


def verify(block: Block, offsets: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Check the checksums of the records at `offsets` of a block, about 0.3 us each and 1 GB/s.

    Raises:
        RecordCorrupt: one does not hold.
    """
    for offset in offsets.tolist():
        if not _intact(block.buffer, offset):
            raise RecordCorrupt(block.position + offset, f"its checksum does not hold; {REMEDY}", os.path.basename(block.path))


def find_tail(path: str, base: int) -> Tail:
    """Find the end of the last segment: the first record that is not whole, if nothing whole follows it.

    Raises:
        RecordCorrupt: whole records follow it, so it was written and then damaged.
    """
    end, last_ms = base, None
    torn: int | None = None
    for block in blocks(path, base, base, None):
        for offset in block.offsets.tolist():
            position = block.position + offset
            if not _intact(block.buffer, offset):
                torn = position if torn is None else torn
                continue
            # A block is read while the node writes it, so what was half there may be whole a moment later.
            if torn is not None and not _intact_in_file(path, base, torn):
                reason = f"its checksum does not hold, and whole records follow it; {REMEDY}"
                raise RecordCorrupt(torn, reason, os.path.basename(path))
            torn = None
            size, _, _, _, _, _, last_ms = record.HEADER.unpack_from(block.buffer, offset)
            end = position + size
    with open(path, "rb") as file:
        behind = os.pread(file.fileno(), 4, end - base)
    return Tail(end, last_ms, any(behind))


def split(segment: Segment, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the positions (start, stop) of parts of a segment, each of `part_bytes` or little more, cut between records."""
    start = segment.base
    for block in blocks(*segment[:2], segment.base, segment.stop):
        positions = block.offsets + block.position
        while (cut := int(np.searchsorted(positions, start + part_bytes))) < len(positions):
            yield start, int(positions[cut])
            start = int(positions[cut])
    if start < segment.stop:
        yield start, segment.stop


def topic_at(segments: list[Segment], position: int) -> str | None:
    """Return the topic of the message at `position`, or None where the log no longer has it."""
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


def first_ms(segment: Segment) -> int | None:
    """Return when the first record of a segment was stored, or None where it has none."""
    return _ms_at(segment, segment.base) if segment.stop > segment.base else None


def _bases(directory: Path) -> list[int]:
    bases = []
    for path in directory.glob(f"*{SUFFIX}"):
        digits = path.name.removesuffix(SUFFIX)
        if len(digits) != NAME_DIGITS or not digits.isdigit():
            raise LogCorrupt(f"{path} is not a segment: its name must be {NAME_DIGITS} digits and {SUFFIX}; move the file away")
        bases.append(int(digits))
    return sorted(bases)


def _segment_path(directory: Path, base: int) -> str:
    return str(directory / f"{base:0{NAME_DIGITS}d}{SUFFIX}")


def _sealed(directory: Path, bases: list[int]) -> list[Segment]:
    """Return all segments but the last. A sealed one ends where the next begins, also while its hole is still there."""
    segments = []
    for base, following in pairwise(bases):
        path = _segment_path(directory, base)
        size = os.stat(path).st_size
        if base + size < following:
            raise LogCorrupt(
                f"segment {os.path.basename(path)} has {size} bytes, but the next one starts at position {following}: "
                f"{following - base - size} bytes from position {base + size} on are missing; {REMEDY}"
            )
        segments.append(Segment(path, base, following))
    return segments


def _intact(buffer: bytes, offset: int) -> bool:
    size, crc = _SIZE_CRC.unpack_from(buffer, offset)
    return bool(record.checksum(memoryview(buffer)[offset + record.CRC_FROM : offset + size]) == crc)


def _intact_in_file(path: str, base: int, position: int) -> bool:
    for block in blocks(path, base, position, None, block_bytes=record.HEADER_BYTES):
        return _intact(block.buffer, 0)
    return False


def _ms_at(segment: Segment, position: int) -> int:
    with open(segment.path, "rb") as file:
        header = os.pread(file.fileno(), record.HEADER_BYTES, position - segment.base)
    return int(record.HEADER.unpack(header)[6])


def _last_ms(segment: Segment) -> int:
    last_ms = 0
    for block in blocks(segment.path, segment.base, segment.base, segment.stop):
        last_ms = record.HEADER.unpack_from(block.buffer, int(block.offsets[-1]))[6]
    return last_ms
