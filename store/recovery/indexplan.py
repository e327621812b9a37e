"""What a repair of the log does with the index.

A repair keeps the index if it can be used. It knows more than the repaired log says, which is no harm: what it knows of damaged
records was true. An index that is built from the repaired log lacks what these said: sessions and groups, acknowledgements, and
entries of light queues. The queues would have fewer entries, so that the offsets which the log states elsewhere, as how far
sessions and groups have got, would be too high, and messages that are not damaged would be passed over. Three things must fit
the log nevertheless.

- Replay begins at the position that the index covers, so a record must begin there. If that position is inside of a damaged
  range, it becomes the beginning of the range, whose marker record is then applied.
- A start begins to verify where the index says that the log was durable, so a record must begin there too.
- The index must not cover more than the log has, or new records would get positions that the index knows already. Then the log
  is filled up to that position.

Rows may refer to damaged records. Readers leave those out, as they do with records that the disk can't read.

The index is deleted if it can't be used, where the next start can build it again: from the log, if that goes back to position
0, or from a snapshot in the log. So it is if nothing is damaged and it covers more than the log has, as after a power cut: then
a start would do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from penstock.store.errors import DataDirIncompatible, IndexDamaged, SnapshotInvalid
from penstock.store.files import SYSTEM_FILES, Files
from penstock.store.index.index import DIRECTORY, Covered, Index, KeySpace
from penstock.store.index.rocksdb import OpenDatabase, open_rocksdb
from penstock.store.queues.catalogue import entries_of
from penstock.store.queues.lightqueue import entries_array
from penstock.store.retention.copies import copy_in
from penstock.store.snapshots.snapshotreader import SnapshotReader
from penstock.store.snapshots.snapshotwriter import snapshots

Ranges = list[tuple[int, int]]
"""First position, and position after the last byte, of damaged ranges, in the order of the log."""


class Fate(Enum):
    """What becomes of the index."""

    KEPT = "kept"
    """It stays, with the same rows: it covers nothing from the first damaged range on."""
    ADJUSTED = "adjusted"
    """It stays, and it knows records that are damaged now."""
    REBUILT = "rebuilt"
    """It is deleted, and the next start builds it from the log, or from a snapshot and the log."""
    LOST = "lost"
    """There is none that can be used, and nothing to build it from. A node starts on the log only if it begins anew there."""


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """What a repair does with the index, and why."""

    fate: Fate
    begin: int
    """Position at which the log begins."""
    covered: int = 0
    """Position up to which the index covers the log; 0 if it can't be used."""
    snapshot: int | None = None
    """Position of the snapshot from which the next start builds the index; None if there is none."""
    reason: str = ""
    """Why the index can't be used; empty if it can."""
    outdated: tuple[int, ...] = ()
    """Positions of snapshots that know damaged records which the index will not know. The repair sets them aside, or the index
    would be another when it is built from one of them."""
    rows: tuple[tuple[str, int], ...] = ()
    """Rows that an adjusted index keeps, by `KeySpace` in lower case."""
    entries_lost: int = 0
    """Entries of queues in an adjusted index whose messages are damaged. Each queue has its own entry of a message."""


def plan_index(
    data_dir: Path,
    begin: int,
    ranges: Ranges,
    end: Callable[[], int],
    *,
    files: Files = SYSTEM_FILES,
    open_database: OpenDatabase = open_rocksdb,
) -> IndexPlan:
    """Return what a repair does with the index of a data directory that no process has open. Nothing is changed.

    Args:
        data_dir: of a node.
        begin: position at which the log begins after the repair.
        ranges: that are damaged.
        end: returns the position at which the log ends after the repair. It may take time.
        files, open_database: have the directory.

    Raises:
        OSError: a file can't be read.
    """
    planned = _plan(data_dir, begin, ranges, end, files, open_database)
    source = planned.snapshot or planned.begin
    if planned.fate in (Fate.KEPT, Fate.ADJUSTED):
        source = planned.covered
    unknown = next((start for start, stop in ranges if stop > source), None)
    if unknown is None:
        return planned
    return replace(planned, outdated=tuple(position for position in snapshots(data_dir, files) if position > unknown))


def _plan(
    data_dir: Path, begin: int, ranges: Ranges, end: Callable[[], int], files: Files, open_database: OpenDatabase
) -> IndexPlan:
    covered, reason = _covered(data_dir, files, open_database)
    if covered is not None and covered.position < begin:
        reason = f"it covers the log up to {covered.position}, but the log begins at {begin}"
        covered = None
    if covered is not None and (not ranges or covered.position <= ranges[0][0]):
        if covered.position <= end():
            return IndexPlan(Fate.KEPT, begin, covered.position)
        reason = f"it covers the log up to {covered.position}, but the log ends at {end()}"
    snapshot = whole_snapshot(data_dir, begin, end, files) if begin else None
    can_be_built = begin == 0 or snapshot == begin
    if covered is not None and (ranges or not can_be_built):
        try:
            rows, entries_lost = _census(data_dir, ranges, files, open_database)
        except IndexDamaged as error:
            covered, reason = None, str(error)
        else:
            return IndexPlan(Fate.ADJUSTED, begin, covered.position, rows=rows, entries_lost=entries_lost)
    fate = Fate.REBUILT if can_be_built or snapshot is not None else Fate.LOST
    return IndexPlan(fate, begin, covered.position if covered else 0, snapshot, reason)


def adjust_index(
    data_dir: Path,
    position: int,
    first_damaged: int,
    *,
    known_before: int = 0,
    files: Files = SYSTEM_FILES,
    open_database: OpenDatabase = open_rocksdb,
) -> None:
    """Let the index cover the log up to `position`, and let a start verify all records from `first_damaged` on, durably.

    A start begins to verify where the index says that the log was durable. That may be inside of a damaged range too.

    Args:
        data_dir: no process may have it open.
        position: where a record begins after the repair.
        first_damaged: position of the first damaged range.
        known_before: position before which the index may know more than the repaired log says; 0 if it doesn't.
        files, open_database: have the directory.

    Raises:
        IndexDamaged, OSError: the index can't be read or written.
    """
    index = Index(data_dir, files=files, open_database=open_database)
    try:
        covered = index.covered()
        assert covered is not None
        adjusted = Covered(position, min(covered.durable, position, first_damaged), covered.store_ms)
        if adjusted != covered or known_before > index.adjusted():
            batch = index.batch()
            batch.put_covered(adjusted)
            if known_before:
                batch.put_adjusted(max(known_before, index.adjusted()))
            index.write(batch)
            index.flush()
    finally:
        index.close()


def whole_snapshot(data_dir: Path, begin: int, end: Callable[[], int], files: Files = SYSTEM_FILES) -> int | None:
    """Return the position of the oldest snapshot in the log that can be read to its end; None if there is none."""
    for position in snapshots(data_dir, files):
        if position >= begin and position <= end():
            try:
                for _ in SnapshotReader(data_dir, position, files).blocks():
                    pass
            except SnapshotInvalid:
                continue
            return position
    return None


def _covered(data_dir: Path, files: Files, open_database: OpenDatabase) -> tuple[Covered | None, str]:
    """Return how far the index covers the log; else why it can't be used."""
    if not files.names(data_dir / DIRECTORY):
        return None, "there is none"
    reason = Index.damage_of(data_dir, files)
    if reason:
        return None, reason
    try:
        index = Index(data_dir, read_only=True, files=files, open_database=open_database)
    except IndexDamaged as error:
        return None, str(error)
    try:
        covered = index.covered()
    except (DataDirIncompatible, IndexDamaged) as error:
        return None, str(error)
    finally:
        index.close()
    return covered, "" if covered is not None else "it is empty"


def _census(
    data_dir: Path, ranges: Ranges, files: Files, open_database: OpenDatabase
) -> tuple[tuple[tuple[str, int], ...], int]:
    """Read the whole index. Return the number of rows by key space, and the number of entries whose messages are damaged.

    Raises:
        IndexDamaged: a row can't be read.
    """
    counts: dict[bytes, int] = {}
    lost = 0
    index = Index(data_dir, read_only=True, files=files, open_database=open_database)
    try:
        for key, value in index.rows(b""):
            counts[key[:1]] = counts.get(key[:1], 0) + 1
            entries = _entries_in(key, value)
            if entries:
                positions = entries_array(entries)["position"]
                lost += sum(int(((positions >= start) & (positions < stop)).sum()) for start, stop in ranges)
            elif key[:1] == KeySpace.COPY:
                copy = copy_in(value)
                lost += any(start <= copy < stop for start, stop in ranges)
    finally:
        index.close()
    names = {bytes(space): space.name.lower() for space in KeySpace}
    return tuple(sorted((names.get(space, repr(space)), count) for space, count in counts.items())), lost


def _entries_in(key: bytes, value: bytes) -> bytes:
    """Return the entries of queues in a row."""
    if key[:1] == KeySpace.ENTRIES:
        return value
    return entries_of(value) if key[:1] in (KeySpace.NAME, KeySpace.WILDCARD) else b""
