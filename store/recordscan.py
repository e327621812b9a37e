"""Finds the records in a range of the log: follows their sizes, verifies their checksums, and searches after damage."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

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
)

SEARCH_BYTES = 1024 * 1024
"""Bytes that `find_valid` examines in one step. This bounds its memory."""

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


def find_valid(buffer: bytes | memoryview, offset: int, last: int, end: int) -> int | None:
    """Return the offset of the first valid record that starts from `offset` to `last` and ends before `end`, or None.

    This tells a damaged record from the torn tail of a log. It examines every byte, since the size field may be damaged.
    With numpy it first rules out bytes that can't be a header: a header has a known kind, a size within bounds, and a time
    of 48 bits.
    """
    last = min(last, end - HEADER_BYTES)
    for start in range(offset, last + 1, SEARCH_BYTES):
        count = min(SEARCH_BYTES, last + 1 - start)
        raw = np.frombuffer(buffer[start : start + count + HEADER_BYTES - 1], dtype=np.uint8)
        size_top, kind, time_top = raw[3 : 3 + count], raw[8 : 8 + count], raw[22 : 22 + count] | raw[23 : 23 + count]
        plausible = (size_top <= RECORD_BYTES_MAX >> 24) & (kind >= min(Kind)) & (kind <= max(Kind)) & (time_top == 0)
        for at in (np.flatnonzero(plausible) + start).tolist():
            size = int.from_bytes(buffer[at : at + 4], "little")
            if size and valid_until(buffer, at, min(at + size, end)) == at + size:
                return int(at)
    return None


def next_valid(buffer: bytes | memoryview, damaged: int, last: int, end: int) -> int | None:
    """Return the offset of the first valid record after the damaged one at `damaged`, or None. It starts at `last` at most.

    If the size field of the damaged record leads to a valid record, that is the one. A search could find bytes inside of
    its body that only look like a record, which a publisher may have put there. But if its checksum, which does not cover
    the size, says that it ends where the search finds a record, then only the size field is damaged, and the search is
    right.
    """
    found = find_valid(buffer, damaged + HEADER_BYTES, last, end)
    if damaged + HEADER_BYTES <= end:
        size, crc = SIZE_AND_CRC.unpack_from(buffer, damaged)
        if found is not None and checksum(buffer[damaged + CRC_FROM : found]) == crc:
            return found
        following = damaged + size
        plausible = HEADER_BYTES <= following - damaged <= RECORD_BYTES_MAX
        if plausible and following == end:
            return None  # the damaged record is the last one
        if plausible and find_valid(buffer, following, following, end) == following:
            return int(following)
    return found


def headers(buffer: bytes | memoryview, offsets: list[int]) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the headers at `offsets` of `buffer` as an array of `HEADER_DTYPE`, one row per record."""
    raw = np.frombuffer(buffer, dtype=np.uint8)
    rows = raw[np.asarray(offsets, dtype=np.int64)[:, None] + np.arange(HEADER_BYTES)]
    found: np.ndarray[Any, np.dtype[Any]] = rows.reshape(-1).view(HEADER_DTYPE)
    return found
