"""Recovery of the tail of a log: finds the last valid record, clears a torn tail, and refuses damage."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from penstock.store.errors import LogCorrupt
from penstock.store.quarantine import QUARANTINE, quarantine
from penstock.store.record import checksum
from penstock.store.recordscan import find_valid, valid_until
from penstock.store.segment import Segment
from penstock.store.syncmark import FILE, Mark

logger = structlog.get_logger("store")


class Tail(NamedTuple):
    """What recovery found at the end of the log."""

    end: int
    """Position after the last valid record."""
    torn_bytes: int
    """Bytes after that position, up to the last one that wasn't zero, that were not a whole record. They are cleared now."""


def recover_tail(segment: Segment, mark: Mark | None) -> Tail:
    """Find the end of the last segment of a log, and clear a torn tail.

    The tail begins after the last valid record and after the sync mark (`store.syncmark`). If there are valid records in the
    tail, a power cut has left the pages of the last groups out of order. Such a tail is quarantined, and cleared too.

    Args:
        segment: the last segment, writable. It is read as a whole.
        mark: the sync mark; None if there is none.

    Raises:
        LogCorrupt: a damaged record is not in the tail, or some records that were durable are gone.
        OSError: the file can't be read or written.
    """
    stop = valid_until(segment.view, 0, segment.capacity)
    if mark is not None and segment.base + stop < mark.position:
        raise _lost(segment, stop, mark.position)
    torn_until = segment.data_end(stop)
    if torn_until > stop:
        if find_valid(segment.view, stop + 1, torn_until, segment.capacity) is not None:
            if mark is None or not mark.has_booted_since:
                raise _damaged(segment, stop)
            _quarantine(segment, stop, torn_until)
        segment.clear_from(stop)
    return Tail(segment.base + stop, torn_until - stop)


def verify_sealed(segment: Segment, offset: int) -> None:
    """Verify all records of a sealed segment from `offset` on. Raises LogCorrupt if one is damaged."""
    stop = valid_until(segment.view, offset, segment.capacity)
    if stop != segment.capacity:
        raise _damaged(segment, stop)


def _quarantine(segment: Segment, start: int, end: int) -> None:
    position, found = segment.base + start, segment.view[start:end]
    name = f"{position}-{end - start}-{checksum(found):08x}.bin"
    logger.warning("log.torn_out_of_order", position=position, bytes=end - start, copy=f"{QUARANTINE}/{name}")
    quarantine(segment.path, position, end - start, name)


def _damaged(segment: Segment, offset: int) -> LogCorrupt:
    return LogCorrupt(
        f"the record at position {segment.base + offset} (byte {offset} of segment {segment.path.name}) is damaged, and it is "
        f"not the tail of the log, so the node does not start; restore the file, or run `penstock repair`"
    )


def _lost(segment: Segment, offset: int, durable: int) -> LogCorrupt:
    return LogCorrupt(
        f"the log was durable up to position {durable}, but there is no valid record at position {segment.base + offset} (byte "
        f"{offset} of segment {segment.path.name}), so the node does not start; restore the file, or run `penstock repair`; "
        f"to accept the loss, delete the file {segment.path.parent.parent / FILE}"
    )
