"""Reads the heads of adjacent records in small pieces of the log, for samples and tails of live traffic.

A piece holds the event loop for a millisecond or two, whatever is in the log. `penstock.store.log.block` reads whole records,
of which one may have 64 MiB.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.store.log.commitlog import CommitLog
from penstock.store.log.recordscan import walk
from penstock.store.options import KIB
from penstock.store.record import HEADER_BYTES, RECORD_BYTES_MAX, size_of

RECORDS_MAX: Final = 500
"""Records of one piece, which take the loop a millisecond or two where each has a topic of its own."""

PIECE_BYTES: Final = 128 * KIB
"""Bytes of one piece. The header of a record and the longest topic fit."""


class RecordHeads(NamedTuple):
    """Adjacent records of the log. Nothing has verified them."""

    data: bytes
    offsets: list[int]
    """Where each record begins in `data`. A record that is larger than a piece is alone, and its end is missing."""
    length: int
    """Bytes of the records together, missing ones included."""


def read_heads(log: CommitLog, begin: int, end: int) -> RecordHeads:
    """Return the records from `begin`, where a record begins, as far as one piece goes, but not beyond `end`.

    There are none, and the length is 0, where the log is damaged.

    Raises:
        PositionUnknown: retention has dropped the segment, or the disk can't read it.
    """
    segment = log.segment_at(begin)
    start, stop = begin - segment.base, min(end - segment.base, segment.capacity)
    data = segment.read(start, min(PIECE_BYTES, stop - start))
    offsets, length = walk(data)
    if not offsets and len(data) >= HEADER_BYTES and len(data) < size_of(data) <= min(RECORD_BYTES_MAX, stop - start):
        return RecordHeads(data, [0], size_of(data))
    if len(offsets) > RECORDS_MAX:
        length = offsets[RECORDS_MAX]
        del offsets[RECORDS_MAX:]
    return RecordHeads(data, offsets, length)
