"""Repairs a CommitLog that a node refuses to start on. It quarantines damaged ranges; other records keep their positions.

A damaged range goes from the first byte that is not part of a valid record to the next valid record, or to the end of its
segment. Positions whose segments are missing, also at the beginning of the log, are damaged ranges too. A range is copied to
the folder `damaged`, and overwritten by records of kind `DAMAGED` with exactly its size. If a run is killed, at any point, a
second run completes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from penstock.store import record
from penstock.store.commitlog import DIRECTORY
from penstock.store.errors import LogCorrupt, PositionUnknown
from penstock.store.files import SYSTEM_FILES, File, Files, Mode, write_all
from penstock.store.index import Index
from penstock.store.quarantine import QUARANTINE, quarantine
from penstock.store.record import HEADER_BYTES, RECORD_BYTES_MAX, Kind, store_ms_of
from penstock.store.recordscan import count_records, next_valid, readable_end
from penstock.store.rewriting import copy_range, written_anew
from penstock.store.segment import Segment, segment_base, segment_bases, segment_name
from penstock.store.segmentchain import missing_from
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
    unreadable: int
    """Bytes of the range that the disk can't read. The copy has zeros in their place."""
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


def survey(data_dir: Path, *, files: Files = SYSTEM_FILES, on_read: Callable[[int], None] = lambda _: None) -> Findings:
    """Verify every record of the log of a data directory. No process may have it open. Nothing is changed.

    Args:
        data_dir: of a node.
        files: have that directory.
        on_read: called with the bytes of each segment that was read.

    Raises:
        PositionUnknown: there is no log.
        LogCorrupt: a file is not a segment, or a damaged range is too small to hold a record, which damage alone can't cause.
    """
    mark = SyncMark(data_dir, files=files).read()
    begin, durable = (mark.begin, mark.position) if mark else (0, 0)
    bases = segment_bases(files, data_dir / DIRECTORY)
    if not bases and begin == durable:
        raise PositionUnknown(f"{data_dir} holds no CommitLog; name the data directory of a node")
    while len(bases) > 1 and bases[1] <= begin:  # left over from a deletion that was interrupted
        bases.pop(0)
    damages: list[Damage] = []
    store_ms = 0
    missing = missing_from(files, data_dir / DIRECTORY, begin, durable) if mark else None
    if missing is not None:
        store_ms = _first_ms(files, data_dir / DIRECTORY / segment_name(bases[0])) if bases else 0
        length = missing[1] - missing[0]
        damages.append(Damage(missing[0], length, segment_name(missing[0]), length, 0, 0, store_ms))
    if not bases:
        return Findings(damages, 0)
    for base, following in pairwise(bases):
        found, store_ms = _survey_segment(files, data_dir / DIRECTORY / segment_name(base), following - base, store_ms)
        damages += found
        on_read(following - base)
    last = data_dir / DIRECTORY / segment_name(bases[-1])
    found, _ = _survey_segment(files, last, max(durable - bases[-1], 0), store_ms, is_last=True)
    on_read(max(durable - bases[-1], 0))
    is_torn = (
        found and not found[-1].records_behind and found[-1].position >= durable and not found[-1].unreadable
    )  # a start refuses what it can't read, since it may be a record that was acknowledged
    torn_bytes = found.pop().length if is_torn else 0
    damages += found
    for damage in damages:
        if damage.length < HEADER_BYTES:
            raise LogCorrupt(
                f"the {damage.length} bytes at position {damage.position} of segment {damage.segment} are no record, and too "
                f"few for one, so they can't be repaired in place; restore the file from a backup"
            )
    return Findings(damages, torn_bytes)


def _first_ms(files: Files, path: Path) -> int:
    """Return when the first record of a segment was stored, in ms since 1970; 0 if that can't be read."""
    file = files.open(path)
    try:
        head = file.pread(HEADER_BYTES, 0)
    except OSError:
        return 0
    finally:
        file.close()
    return store_ms_of(head) if len(head) == HEADER_BYTES else 0


def _survey_segment(files: Files, path: Path, full: int, store_ms: int, *, is_last: bool = False) -> tuple[list[Damage], int]:
    """Return the damaged ranges of a segment and the store time of its last record.

    `full` is the offset at which the next segment begins. The last segment ends where its data ends, but not before `full`,
    which is then how much of it was durable.
    """
    size = files.size(path) if is_last else min(files.size(path), full)
    if size == 0:
        whole = Damage(segment_base(path), full, path.name, full, 0, 0, store_ms)
        return ([whole] if full else []), store_ms
    segment = Segment(files, path, size, writable=False)
    damages = []
    for start, stop, behind_until, before_ms in _ranges(segment, full, is_last, store_ms):
        if start < stop:
            behind = count_records(segment.read, stop, behind_until)[0] if stop < size else 0
            missing = max(stop - max(size, start), 0)
            unreadable = sum(until - at for at, until, data in segment.pieces(start, min(stop, size)) if data is None)
            damages.append(Damage(segment.base + start, stop - start, path.name, missing, unreadable, behind, before_ms))
        store_ms = before_ms
    segment.close()
    return damages, store_ms


def _ranges(segment: Segment, full: int, is_last: bool, store_ms: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield start and end of each damaged range, the end of the valid records after it, and the store time before it.

    The last range is empty if the segment ends with a valid record. A record with bytes that can't be read is damaged.
    """
    read, base, size = segment.read, segment.base, segment.capacity
    start, stop = 0, readable_end(read, 0, size, base)
    while True:
        store_ms = count_records(read, start, stop)[1] or store_ms
        end = max(segment.data_end(stop), full) if is_last else full
        if stop >= end:
            yield stop, stop, stop, store_ms
            return
        found = next_valid(read, stop, min(end, size), size)
        if found is None:
            yield stop, end, end, store_ms
            return
        behind_until = readable_end(read, found, size, base)
        yield stop, found, behind_until, store_ms
        start, stop = found, behind_until


# --- repairing ------------------------------------------------------------------------------------------------------


def repair(data_dir: Path, damages: list[Damage], *, files: Files = SYSTEM_FILES) -> None:
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
        quarantine(files, segment, damage.position, damage.length - damage.missing, damage.copy_name)
    Index.destroy(data_dir, files)
    for name, group in groupby(damages, key=lambda damage: damage.segment):
        in_segment = list(group)
        path = data_dir / DIRECTORY / name
        if any(damage.unreadable for damage in in_segment) or (files.exists(path) and files.links(path) > 1):
            _fill_anew(files, path, in_segment)
            continue
        for damage in in_segment:
            _fill(files, path, damage)


def _fill(files: Files, path: Path, damage: Damage) -> None:
    """Overwrite a range with records of kind DAMAGED. A file that is too short is extended."""
    file = files.open(path, Mode.WRITE)
    try:
        _write_fillers(file, damage, damage.position - segment_base(path))
        file.fdatasync()
    finally:
        file.close()


def _fill_anew(files: Files, path: Path, damages: list[Damage]) -> None:
    """Write a segment with records of kind DAMAGED in the place of some ranges to a new file, which then replaces the old one.

    The system may have to read a block before it writes a part of it, so blocks that can't be read can't be written in place.
    Neither may a file that a backup has linked.
    """
    base, size = segment_base(path), files.size(path)
    with written_anew(files, path) as target:
        source = Segment(files, path, size, writable=False)
        copied = 0
        for damage in damages:
            start = damage.position - base
            copy_range(source, target, copied, start, 0)
            _write_fillers(target, damage, start)
            copied = start + damage.length
        copy_range(source, target, copied, max(source.data_end(copied), copied), 0)
        if target.size() < size:
            target.truncate(size)  # the rest is zeros, which may belong to the last record
        source.close()


def _write_fillers(file: File, damage: Damage, offset: int) -> None:
    """Write records of kind DAMAGED. After the end of the file their bodies, which are zeros, are a hole."""
    had, fillers = file.size(), dict[int, bytes]()
    for size in _filler_sizes(damage.length):
        if size not in fillers:
            fillers[size] = record.encode(Kind.DAMAGED, body=bytes(size - HEADER_BYTES), store_ms=damage.store_ms)
        write_all(file, fillers[size][: max(had - offset, HEADER_BYTES)], offset)
        offset += size
    if file.size() < offset:
        file.truncate(offset)


def _filler_sizes(length: int) -> Iterator[int]:
    """Yield valid sizes of records that together have `length` bytes."""
    assert length >= HEADER_BYTES, length
    while length > RECORD_BYTES_MAX:
        yield RECORD_BYTES_MAX - HEADER_BYTES  # the rest always has room for a header
        length -= RECORD_BYTES_MAX - HEADER_BYTES
    yield length
