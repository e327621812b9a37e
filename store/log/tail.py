"""Recovery of the tail of a log: finds the last valid record, sets aside what may matter, and refuses damage."""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

import structlog

from penstock.store.errors import LogCorrupt, RecordUnreadable
from penstock.store.files import Files
from penstock.store.log.quarantine import QUARANTINE, quarantine
from penstock.store.log.recordscan import find_valid, valid_end
from penstock.store.log.segment import SCAN_BYTES, Segment
from penstock.store.log.syncmark import Mark

logger = structlog.get_logger("store")


class Tail(NamedTuple):
    """What recovery found at the end of the log."""

    end: int
    """Position after the last valid record."""
    torn_bytes: int
    """Bytes after that position, up to the last one that wasn't zero, that are not a whole record. The caller clears them."""


def recover_tail(files: Files, segment: Segment, mark: Mark | None) -> Tail:
    """Find the end of the last segment of a log.

    A torn tail begins after the last valid record and after the sync mark (`store.log.syncmark`). If there are valid records in
    it, a power cut or a failed disk has left the pages of the last groups out of order. Such a tail is quarantined.

    Args:
        files: has the data directory.
        segment: the last segment. It is read as a whole.
        mark: the sync mark; None if there is none.

    Raises:
        LogCorrupt: a damaged record is not in the tail, or some records that were durable are gone.
        OSError: the file can't be read or written.
    """
    try:
        return _recover_tail(files, segment, mark)
    except RecordUnreadable as error:
        raise _unreadable(error) from error


def _recover_tail(files: Files, segment: Segment, mark: Mark | None) -> Tail:
    stop = valid_end(segment.read, 0, segment.capacity)
    if mark is not None and segment.base + stop < mark.position:
        raise _lost(segment, stop, mark.position)
    torn_until = segment.data_end(stop)
    if torn_until > stop:
        for _, _, data in segment.pieces(stop, torn_until):
            if data is None:
                segment.read(stop, torn_until - stop)
        if find_valid(segment.read, stop + 1, torn_until, segment.capacity) is not None:
            if mark is None or not mark.may_lack_pages(files.boot_id()):
                raise _damaged(segment, stop)
            _quarantine(files, segment, stop, torn_until)
    return Tail(segment.base + stop, torn_until - stop)


def verify_sealed(segment: Segment, offset: int) -> None:
    """Verify all records of a sealed segment from `offset` on. Raises LogCorrupt if one is damaged or can't be read."""
    try:
        stop = valid_end(segment.read, offset, segment.capacity)
    except RecordUnreadable as error:
        raise _unreadable(error) from error
    if stop != segment.capacity:
        raise _damaged(segment, stop)


def _quarantine(files: Files, segment: Segment, start: int, end: int) -> None:
    position, crc = segment.base + start, 0
    for at in range(start, end, SCAN_BYTES):
        crc = crc32(segment.read(at, min(SCAN_BYTES, end - at)), crc)
    name = f"{position}-{end - start}-{crc:08x}.bin"
    logger.warning("log.torn_out_of_order", position=position, bytes=end - start, copy=f"{QUARANTINE}/{name}")
    quarantine(files, segment.path, position, end - start, name)


def _unreadable(error: RecordUnreadable) -> LogCorrupt:
    return LogCorrupt(f"the node does not start: {error}")


def _damaged(segment: Segment, offset: int) -> LogCorrupt:
    return LogCorrupt(
        f"the record at position {segment.base + offset} (byte {offset} of segment {segment.path.name}) is damaged, and it is "
        f"not the tail of the log, so the node does not start; restore the file, or run `penstock repair`"
    )


def _lost(segment: Segment, offset: int, durable: int) -> LogCorrupt:
    return LogCorrupt(
        f"the log was durable up to position {durable}, but there is no valid record at position {segment.base + offset} (byte "
        f"{offset} of segment {segment.path.name}), so the node does not start; restore the file, or run `penstock repair`"
    )
