"""Blocks of adjacent records, for callers that read long stretches of the log: replay and backfills."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from penstock.store.log.commitlog import CommitLog
from penstock.store.log.recordscan import next_valid, read_records
from penstock.store.record import HEADER_BYTES

logger = structlog.get_logger("store")


class Block(NamedTuple):
    """Adjacent records of one segment."""

    data: bytes
    """The records, and perhaps a part of the next one."""
    base: int
    """Position of the first byte of `data`."""
    offsets: list[int]
    """Offset in `data` at which each record begins."""
    end: int
    """Position after the last record."""


def read_block(log: CommitLog, position: int, bytes_max: int, until: int | None = None) -> Block:
    """Return adjacent records from `position` on, for callers that read many: about `bytes_max` bytes, at least one record.

    It ends at `until`, where a record must begin, as if nothing were written after it.

    All are in one segment. The block is empty at `written`, and where no record begins at `position`. Nothing is verified.

    Raises:
        RecordUnreadable: the first record can't be read. Others only end the block.
    """
    segment = log.segment_at(position)
    start = position - segment.base
    stop = min((log.written if until is None else until) - segment.base, segment.capacity)
    data, offsets, length = read_records(segment.read_prefix, start, stop, bytes_max)
    if not offsets and start + len(data) < stop:
        segment.read(start, min(max(bytes_max, HEADER_BYTES), stop - start))  # raises where the disk has ended the record
    return Block(data, position, offsets, position + length)


def skip_damage(log: CommitLog, position: int) -> int:
    """Return where to continue after a damaged record at `position`, and log the damaged range.

    A start verifies only records that may not be durable yet. Later damage, or damage of old records, is found by readers.
    """
    segment = log.segment_at(position)
    stop = min(log.written - segment.base, segment.capacity)
    found = next_valid(segment.read, position - segment.base, stop, stop)
    following = segment.base + (stop if found is None else found)
    logger.error("log.damaged", segment=segment.path.name, position=position, bytes=following - position, do="penstock repair")
    return following
