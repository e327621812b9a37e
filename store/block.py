"""Blocks of adjacent records, for callers that read long stretches of the log: replay and backfills."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from penstock.store.commitlog import CommitLog
from penstock.store.record import size_of
from penstock.store.recordscan import next_valid, walk

logger = structlog.get_logger("store")


class Block(NamedTuple):
    """Adjacent records of one segment."""

    view: memoryview
    """The whole segment."""
    base: int
    """Position of the segment."""
    offsets: list[int]
    """Offset in `view` at which each record begins."""
    end: int
    """Position after the last record."""


def read_block(log: CommitLog, position: int, bytes_max: int) -> Block:
    """Return adjacent records from `position` on, for callers that read many: about `bytes_max` bytes, at least one record.

    All are in one segment. The block is empty at `written`. Nothing is verified.
    """
    segment = log.segment_at(position)
    base = segment.base
    start = position - base
    stop = min(log.written - base, segment.capacity)
    offsets, end = walk(segment.view, start, min(start + bytes_max, stop))
    if not offsets and start < stop:
        offsets, end = walk(segment.view, start, min(start + size_of(segment.view, start), stop))
    return Block(segment.view, base, offsets, base + end)


def skip_damage(log: CommitLog, position: int) -> int:
    """Return where to continue after a damaged record at `position`, and log the damaged range.

    A start verifies only records that may not be durable yet. Later damage, or damage of old records, is found by readers.
    """
    segment = log.segment_at(position)
    stop = min(log.written - segment.base, segment.capacity)
    found = next_valid(segment.view, position - segment.base, stop, stop)
    following = segment.base + (stop if found is None else found)
    logger.error("log.damaged", segment=segment.path.name, position=position, bytes=following - position, do="penstock repair")
    return following
