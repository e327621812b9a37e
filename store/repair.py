"""Repairs a CommitLog that a node refuses to start on. It quarantines damaged ranges; other records keep their positions.

A damaged range goes from the first byte that is not part of a valid record to the next valid record, or to the end of its
segment. It is copied to the folder `damaged`, and overwritten by records of kind `DAMAGED` with exactly its size. If a run
is killed, at any point, a second run completes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from penstock.store import record
from penstock.store.commitlog import DIRECTORY
from penstock.store.errors import LogCorrupt, PositionUnknown
from penstock.store.index import Index
from penstock.store.quarantine import QUARANTINE, quarantine
from penstock.store.record import HEADER_BYTES, RECORD_BYTES_MAX, Kind, store_ms_of
from penstock.store.recordscan import next_valid, valid_until, walk
from penstock.store.segment import SUFFIX, Segment, segment_base, segment_name
from penstock.store.syncmark import SyncMark

__all__ = ["QUARANTINE", "Damage", "Findings", "repair", "survey"]


class Damage(NamedTuple):
    """A damaged range: a range of the log that holds no valid record."""

    position: int
    length: int
    segment: str
    """Name of the segment's file."""
    missing: int
    """Bytes at the end of the range that the file does not have."""
    records_behind: int
    """Number of valid records after the range, up to the next damaged range or the end of the segment."""
    store_ms: int
    """When the record before the range was stored, in ms since 1970; 0 if there is none."""

    @property
    def copy_name(self) -> str:
        """Name of the file in `QUARANTINE` that gets the bytes of the range."""
        return f"{self.position}-{self.length}.bin"


class Findings(NamedTuple):
    """What `survey` found."""

    damages: list[Damage]
    torn_bytes: int
    """Bytes after the last record of the log that are not a record. They are no damage, since the next start clears them."""


# --- looking --------------------------------------------------------------------------------------------------------


def survey(data_dir: Path) -> Findings:
    """Verify every record of the log of a data directory. No process may have it open. Nothing is changed.

    Raises:
        PositionUnknown: there is no log.
        LogCorrupt: a file is not a segment, or a damaged range is too small to hold a record, which damage alone can't cause.
    """
    bases = sorted(segment_base(path) for path in (data_dir / DIRECTORY).glob(f"*{SUFFIX}"))
    if not bases:
        raise PositionUnknown(f"{data_dir} holds no CommitLog; name the data directory of a node")
    damages: list[Damage] = []
    store_ms = 0
    for base, following in pairwise(bases):
        found, store_ms = _survey_segment(data_dir / DIRECTORY / segment_name(base), following - base, store_ms)
        damages += found
    last = data_dir / DIRECTORY / segment_name(bases[-1])
    mark = SyncMark(data_dir).read()
    durable = mark.position if mark else 0
    found, _ = _survey_segment(last, max(durable - bases[-1], 0), store_ms, is_last=True)
    is_torn = found and not found[-1].records_behind and found[-1].position >= durable
    torn_bytes = found.pop().length if is_torn else 0
    damages += found
    for damage in damages:
        if damage.length < HEADER_BYTES:
            raise LogCorrupt(
                f"the {damage.length} bytes at position {damage.position} of segment {damage.segment} are no record, and too "
                f"few for one, so they can't be repaired in place; restore the file from a backup"
            )
    return Findings(damages, torn_bytes)


def _survey_segment(path: Path, full: int, store_ms: int, *, is_last: bool = False) -> tuple[list[Damage], int]:
    """Return the damaged ranges of a segment and the store time of its last record.

    `full` is the offset at which the next segment begins. The last segment ends where its data ends, but not before `full`,
    which is then how much of it was durable.
    """
    size = path.stat().st_size if is_last else min(path.stat().st_size, full)
    if size == 0:
        whole = Damage(segment_base(path), full, path.name, full, 0, store_ms)
        return ([whole] if full else []), store_ms
    segment = Segment(path, size, writable=False)
    damages = []
    for start, stop, behind_until, before_ms in _ranges(segment, full, is_last, store_ms):
        if start < stop:
            behind = len(walk(segment.view, stop, behind_until)[0]) if stop < size else 0
            missing = max(stop - max(size, start), 0)
            damages.append(Damage(segment.base + start, stop - start, path.name, missing, behind, before_ms))
        store_ms = before_ms
    segment.close()
    return damages, store_ms


def _ranges(segment: Segment, full: int, is_last: bool, store_ms: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield start and end of each damaged range, the end of the valid records after it, and the store time before it.

    The last range is empty if the segment ends with a valid record.
    """
    view, size = segment.view, segment.capacity
    start, stop = 0, valid_until(view)
    while True:
        store_ms = _last_ms(view, start, stop) or store_ms
        end = max(segment.data_end(stop), full) if is_last else full
        if stop >= end:
            yield stop, stop, stop, store_ms
            return
        found = next_valid(view, stop, min(end, size), size)
        if found is None:
            yield stop, end, end, store_ms
            return
        behind_until = valid_until(view, found)
        yield stop, found, behind_until, store_ms
        start, stop = found, behind_until


def _last_ms(view: memoryview, start: int, stop: int) -> int:
    offsets, _ = walk(view, start, stop)
    return store_ms_of(view[offsets[-1] :]) if offsets else 0


# --- repairing ------------------------------------------------------------------------------------------------------


def repair(data_dir: Path, damages: list[Damage]) -> None:
    """Quarantine the damaged ranges and make the log readable again. Deletes the index, which the next start rebuilds.

    Nothing is overwritten before its copy is durable and the index, which knows the damaged records, is deleted.

    Args:
        data_dir: no process may have it open.
        damages: from `survey`. Nothing may have changed since.

    Raises:
        OSError: a file can't be written. The caller may run the repair again when the cause is removed.
    """
    if not damages:
        return
    for damage in damages:
        segment = data_dir / DIRECTORY / damage.segment
        quarantine(segment, damage.position, damage.length - damage.missing, damage.copy_name)
    Index.destroy(data_dir)
    for damage in damages:
        _fill(data_dir / DIRECTORY / damage.segment, damage)


def _fill(path: Path, damage: Damage) -> None:
    """Overwrite a range with records of kind DAMAGED. A file that is too short is extended."""
    with path.open("r+b") as file:
        file.seek(damage.position - segment_base(path))
        for size in _filler_sizes(damage.length):
            file.write(record.encode(Kind.DAMAGED, body=bytes(size - HEADER_BYTES), store_ms=damage.store_ms))
        file.flush()
        os.fsync(file.fileno())


def _filler_sizes(length: int) -> Iterator[int]:
    """Yield valid sizes of records that together have `length` bytes."""
    assert length >= HEADER_BYTES, length
    while length > RECORD_BYTES_MAX:
        yield RECORD_BYTES_MAX - HEADER_BYTES  # the rest always has room for a header
        length -= RECORD_BYTES_MAX - HEADER_BYTES
    yield length
