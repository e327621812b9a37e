"""Finds the records in a range of the log: follows their sizes, verifies their checksums, and searches after damage."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from penstock.store.errors import RecordUnreadable
from penstock.store.files import STEP_BYTES
from penstock.store.record import (
    CRC_FROM,
    FIXED_BYTES,
    HEADER,
    HEADER_BYTES,
    HEADER_DTYPE,
    RECORD_BYTES_MAX,
    SIZE_AND_CRC,
    Kind,
    checksum,
    size_of,
    store_ms_of,
)

SEARCH_BYTES = 1024 * 1024
"""Bytes that a search or a verification reads at once. This bounds its memory."""

_SIZE = struct.Struct("<I")


def walk(buffer: bytes | memoryview, offset: int = 0, end: int | None = None) -> tuple[list[int], int]:
    """Return the offsets of the whole records from `offset` to `end`, and the offset after the last one.

    It only follows the size fields; `valid_until` verifies checksums. It stops at the zeros after the last record of an open
    segment, at an impossible size, and at a record that `end` cuts off.
    """
    end = len(buffer) if end is None else end
    offsets: list[int] = []
    add = offsets.append
    unpack = _SIZE.unpack_from
    last = end - HEADER_BYTES
    while offset <= last:
        size = unpack(buffer, offset)[0]
        if size < HEADER_BYTES or size > RECORD_BYTES_MAX or offset + size > end:
            break
        add(offset)
        offset += size
    return offsets, offset


def valid_until(buffer: bytes | memoryview, offset: int = 0, end: int | None = None) -> int:
    """Return the offset after the last of the valid records that follow each other from `offset` on. It reads all bytes."""
    end = len(buffer) if end is None else end
    unpack = HEADER.unpack_from
    last = end - HEADER_BYTES
    while offset <= last:
        size, crc, kind, _, topic_len, props_len, _ = unpack(buffer, offset)
        stop = offset + size
        fields = HEADER_BYTES + FIXED_BYTES[kind] + topic_len + props_len
        if not fields <= size <= RECORD_BYTES_MAX or stop > end or checksum(buffer[offset + CRC_FROM : stop]) != crc:
            break
        offset = stop
    return offset


Read = Callable[[int, int], bytes]
"""Reads a range of a file, given its offset and size, as `Segment.read` does. It may raise RecordUnreadable."""


def valid_end(read: Read, offset: int, end: int) -> int:
    """Return what `valid_until` returns, for a file of which `end` bytes may be read. It holds one block or record at a time.

    Raises:
        RecordUnreadable: bytes of a record can't be read. The records before it may not be verified.
    """
    while offset < end:
        block = read(offset, min(SEARCH_BYTES, end - offset))
        length = valid_until(block)
        if not length:
            length = size_of(block) if len(block) >= HEADER_BYTES else 0
            is_longer = len(block) < length <= min(RECORD_BYTES_MAX, end - offset)
            if not is_longer or valid_until(read(offset, length)) != length:
                break
        offset += length
    return offset


def boundary_before(read: Read, limit: int, end: int) -> int:
    """Return the last offset up to `limit` at which a record begins or ends, if valid records go from 0 to `end`."""
    offset = 0
    while offset < min(limit, end):
        _, offsets, length = read_records(read, offset, end, SEARCH_BYTES)
        if offset + length > limit:
            return offset + max(at for at in offsets if offset + at <= limit)
        offset += length
    return offset


def readable_end(read: Read, offset: int, end: int, base: int) -> int:
    """Return what `valid_end` returns, but stop before a record that can't be read. The file begins at position `base`."""
    try:
        return valid_end(read, offset, end)
    except RecordUnreadable as error:
        return valid_end(read, offset, error.position - base)


def count_records(read: Read, offset: int, end: int) -> tuple[int, int]:
    """Return the number of the valid records from `offset` to `end`, and the store time of the last; 0 if there is none."""
    count = last_ms = 0
    while offset < end:
        block, offsets, length = read_records(read, offset, end, SEARCH_BYTES)
        assert offsets, offset
        count += len(offsets)
        last_ms = store_ms_of(block[offsets[-1] : offsets[-1] + HEADER_BYTES])
        offset += length
    return count, last_ms


def read_records(read: Read, offset: int, end: int, bytes_max: int) -> tuple[bytes, list[int], int]:
    """Read adjacent records from `offset` of a file, of which `end` bytes may be read.

    It reads about `bytes_max` bytes, but at least one record. Return the bytes read, the offset in them of each record, and the
    length of the records together. There are none where no record begins at `offset`. Nothing is verified.
    """
    data = read(offset, min(max(bytes_max, HEADER_BYTES), end - offset))
    offsets, length = walk(data)
    if not offsets and len(data) >= HEADER_BYTES and len(data) < size_of(data) <= min(RECORD_BYTES_MAX, end - offset):
        data = read(offset, size_of(data))
        offsets, length = walk(data)
    return data, offsets, length


def find_valid(read: Read, offset: int, last: int, end: int) -> int | None:
    """Return the offset of the first valid record that starts from `offset` to `last` and ends before `end`, or None.

    This tells a damaged record from the torn tail of a log. It examines every byte, since the size field may be damaged.
    With numpy it first rules out bytes that can't be a header: a header has a known kind, a size within bounds, and a time
    of 48 bits. A record with bytes that can't be read is not valid.
    """
    last = min(last, end - HEADER_BYTES)
    for start, found in _readable(read, offset, last + HEADER_BYTES):
        count = len(found) - HEADER_BYTES + 1
        if count < 1:
            continue
        raw = np.frombuffer(found, dtype=np.uint8)
        size_top, kind, time_top = raw[3 : 3 + count], raw[8 : 8 + count], raw[22 : 22 + count] | raw[23 : 23 + count]
        plausible = (size_top <= RECORD_BYTES_MAX >> 24) & (kind >= min(Kind)) & (kind <= max(Kind)) & (time_top == 0)
        for at in np.flatnonzero(plausible).tolist():
            size, _, kind_at, _, topic_len, props_len, _ = HEADER.unpack_from(found, at)
            fields = HEADER_BYTES + FIXED_BYTES[kind_at] + topic_len + props_len
            if fields <= size <= min(RECORD_BYTES_MAX, end - start - at):
                with suppress(RecordUnreadable):
                    data = found[at : at + size] if at + size <= len(found) else read(start + at, size)
                    if valid_until(data) == size:
                        return start + int(at)
    return None


def _readable(read: Read, offset: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield offset and bytes of blocks from `offset` to `stop`. Each overlaps the one before it by less than a header.

    Bytes that can't be read are left out.
    """
    for start in range(offset, stop - HEADER_BYTES + 1, SEARCH_BYTES):
        end = min(start + SEARCH_BYTES + HEADER_BYTES - 1, stop)
        try:
            yield start, read(start, end - start)
        except RecordUnreadable:
            yield from _readable_steps(read, start, end)


def _readable_steps(read: Read, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    found = b""
    at = start
    while at < end:
        following = min(at - at % STEP_BYTES + STEP_BYTES, end)
        try:
            found += read(at, following - at)
        except RecordUnreadable:
            if found:
                yield start, found
            found, start = b"", following
        at = following
    if found:
        yield start, found


def next_valid(read: Read, damaged: int, last: int, end: int) -> int | None:
    """Return the offset of the first valid record after the damaged one at `damaged`, or None. It starts at `last` at most.

    If the size field of the damaged record leads to a valid record, that is the one. A search could find bytes inside of
    its body that only look like a record, which a publisher may have put there. But if its checksum, which does not cover
    the size, says that it ends where the search finds a record, then only the size field is damaged, and the search is
    right. If it says so of the end of what the search finds, that is inside of the damaged record: it is a copy.
    """
    found = find_valid(read, damaged + HEADER_BYTES, last, end)
    try:
        size, crc = SIZE_AND_CRC.unpack(read(damaged, SIZE_AND_CRC.size)) if damaged + HEADER_BYTES <= end else (0, 0)
    except RecordUnreadable:
        return found
    if found is not None and found - damaged <= RECORD_BYTES_MAX:
        with suppress(RecordUnreadable):
            if checksum(read(damaged + CRC_FROM, found - damaged - CRC_FROM)) == crc:
                return found
            after = found + size_of(read(found, HEADER_BYTES))
            if checksum(read(damaged + CRC_FROM, after - damaged - CRC_FROM)) == crc:
                return after if after < last else None
    following = damaged + size
    if HEADER_BYTES <= size <= RECORD_BYTES_MAX:
        if following == end:
            return None  # the damaged record is the last one
        if find_valid(read, following, following, end) == following:
            return int(following)
    return found


def headers(buffer: bytes | memoryview, offsets: list[int]) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the headers at `offsets` of `buffer` as an array of `HEADER_DTYPE`, one row per record."""
    raw = np.frombuffer(buffer, dtype=np.uint8)
    rows = raw[np.asarray(offsets, dtype=np.int64)[:, None] + np.arange(HEADER_BYTES)]
    found: np.ndarray[Any, np.dtype[Any]] = rows.reshape(-1).view(HEADER_DTYPE)
    return found
