"""Repairs a CommitLog that a node refuses to start on. It quarantines damaged ranges; other records keep their positions.

A damaged range goes from the first byte that is not part of a valid record to the next valid record, or to the end of its
segment. Positions whose segments are missing, also at the beginning of the log, are damaged ranges too. A range is copied to
the folder `damaged`, and overwritten by records of kind `DAMAGED` with exactly its size. If a run is killed, at any point, a
second run completes it. `store.recovery.indexplan` says what becomes of the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from errno import ENOSPC
from functools import cache, partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from penstock.store import record
from penstock.store.errors import DiskFull, LogCorrupt, PositionUnknown
from penstock.store.files import SYSTEM_FILES, File, Files, Mode, write_all
from penstock.store.index.index import Index
from penstock.store.index.rocksdb import OpenDatabase, open_rocksdb
from penstock.store.log.placing import place
from penstock.store.log.quarantine import QUARANTINE, quarantine, set_aside
from penstock.store.log.recordscan import count_records, next_valid, readable_end
from penstock.store.log.rewriting import copy_range, written_anew
from penstock.store.log.segment import LOG_DIRECTORY, Segment, missing_from, segment_base, segment_bases, segment_name
from penstock.store.log.syncmark import Ending, SyncMark
from penstock.store.options import KIB
from penstock.store.record import HEADER_BYTES, RECORD_BYTES_MAX, Kind, store_ms_of
from penstock.store.recovery.indexplan import Fate, IndexPlan, adjust_index, plan_index, whole_snapshot
from penstock.store.snapshots.snapshotreader import snapshot_path
from penstock.store.snapshots.snapshotwriter import write_empty
from penstock.store.space.ballast import FILE as BALLAST

ROOM_BYTES = 64 * KIB
"""Bytes that must be free besides the copies: for markers, names, and blocks that are not filled."""

__all__ = ["QUARANTINE", "Damage", "Findings", "plan", "put_in_places", "repair", "survey"]


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
    bases = _bases(data_dir, files)
    if not bases and begin == durable:
        raise PositionUnknown(f"{data_dir} holds no CommitLog; name the data directory of a node")
    damages: list[Damage] = []
    store_ms = 0
    missing = missing_from(files, data_dir / LOG_DIRECTORY, begin, durable) if mark else None
    if missing is not None:
        store_ms = _first_ms(files, data_dir / LOG_DIRECTORY / segment_name(bases[0])) if bases else 0
        length = missing[1] - missing[0]
        damages.append(Damage(missing[0], length, segment_name(missing[0]), length, 0, 0, store_ms))
    if not bases:
        return Findings(damages, 0)
    for base, following in pairwise(bases):
        found, store_ms = _survey_segment(files, data_dir / LOG_DIRECTORY / segment_name(base), following - base, store_ms)
        damages += found
        on_read(following - base)
    last = data_dir / LOG_DIRECTORY / segment_name(bases[-1])
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


def put_in_places(data_dir: Path, *, files: Files = SYSTEM_FILES) -> dict[int, int]:
    """Put segments that are in each other's place back; return what `misplaced` does. Deletes the index if it can be rebuilt.

    No start succeeds on such a log, so an index that can't be rebuilt is right: it has only seen the segments in their places.

    Raises:
        LogCorrupt: as `misplaced`. Nothing has changed.
        OSError: a file can't be renamed. The next call goes on.
    """
    begin = min(_bases(data_dir, files), default=0)
    if not begin or whole_snapshot(data_dir, begin, lambda: begin, files) == begin:
        Index.destroy(data_dir, files)
    return place(files, data_dir / LOG_DIRECTORY)


def plan(
    data_dir: Path, damages: list[Damage], *, files: Files = SYSTEM_FILES, open_database: OpenDatabase = open_rocksdb
) -> IndexPlan:
    """Return what `repair` does with the index. Nothing is changed.

    Args:
        data_dir: no process may have it open.
        damages: from `survey`. Nothing may have changed since.
        files, open_database: have the directory.

    Raises:
        OSError: a file can't be read.
    """
    ranges = [(damage.position, damage.position + damage.length) for damage in damages]
    begin = min([*_bases(data_dir, files)[:1], *(start for start, _ in ranges[:1])], default=0)
    end = cache(partial(_end_after, data_dir, damages, files))
    return plan_index(data_dir, begin, ranges, end, files=files, open_database=open_database)


def repair(
    data_dir: Path,
    damages: list[Damage],
    *,
    files: Files = SYSTEM_FILES,
    open_database: OpenDatabase = open_rocksdb,
    forget_beginning: bool = False,
) -> IndexPlan:
    """Quarantine the damaged ranges and make the log readable again. Return what became of the index.

    The index is deleted only if it can't be used, where the next start can build it again. Nothing is overwritten before its
    copy is durable and the index fits the repaired log.

    Args:
        data_dir: no process may have it open.
        damages: from `survey`. Nothing may have changed since.
        files, open_database: have the directory.
        forget_beginning: let the log begin anew if nothing tells what it held before it begins (`Fate.LOST`). All sessions,
            groups, subscriptions and so on that were created before are lost then.

    Raises:
        LogCorrupt: nothing tells what the log held before it begins, and `forget_beginning` is not set. Nothing was changed.
        DiskFull: there is too little room for the copies. Nothing was changed.
        IndexDamaged: the index can't be adjusted. The caller may run the repair again, which then does without it.
        OSError: a file can't be written. The caller may run the repair again when the cause is removed.
    """
    planned = plan(data_dir, damages, files=files, open_database=open_database)
    if planned.fate is Fate.LOST and not forget_beginning:
        raise LogCorrupt(
            f"the log begins at position {planned.begin}, and nothing tells what was before: the index can't be used "
            f"({planned.reason}), and no snapshot is whole. Restore the index or the snapshots from a backup. Or run `penstock "
            f"repair` with --forget-beginning: the node then starts with the records that the log still has, but without the "
            f"sessions, subscriptions, groups, retained and delayed messages, open deliveries and dead letters from before "
            f"that position"
        )
    end = _end_after(data_dir, damages, files) if planned.fate is Fate.ADJUSTED else 0
    fillings = [*damages, *_up_to_covered(data_dir, planned, end, files)]
    _require_room(data_dir, fillings, files)
    for damage in fillings:
        segment = data_dir / LOG_DIRECTORY / damage.segment
        quarantine(files, segment, damage.position, damage.length - damage.missing, damage.copy_name)
    if planned.fate in (Fate.KEPT, Fate.ADJUSTED):
        if fillings:
            boundary = _boundary(planned.covered, damages, fillings)
            known_before = max(each.position + each.length for each in fillings) if planned.fate is Fate.ADJUSTED else 0
            adjust_index(
                data_dir,
                boundary,
                fillings[0].position,
                known_before=known_before,
                files=files,
                open_database=open_database,
            )
    else:
        Index.destroy(data_dir, files)
    for position in planned.outdated:
        set_aside(files, data_dir, snapshot_path(data_dir, position))
    # The last range first: as long as one is left, a second run knows that the index is to be kept.
    for path, in_segment in reversed(list(_by_segment(data_dir, fillings))):
        if _must_be_anew(path, in_segment, files):
            _fill_anew(files, path, in_segment)
            continue
        for damage in reversed(in_segment):
            _fill(files, path, damage)
    if planned.fate is Fate.LOST:
        _forget_beginning(data_dir, files)
    return planned


def _by_segment(data_dir: Path, damages: list[Damage]) -> Iterator[tuple[Path, list[Damage]]]:
    for name, group in groupby(damages, key=lambda damage: damage.segment):
        yield data_dir / LOG_DIRECTORY / name, list(group)


def _must_be_anew(path: Path, damages: list[Damage], files: Files) -> bool:
    """Return whether a segment must be written to a new file: it has blocks that can't be read, or a backup has linked it."""
    return any(damage.unreadable for damage in damages) or (files.exists(path) and files.links(path) > 1)


def _require_room(data_dir: Path, damages: list[Damage], files: Files) -> None:
    """Raise DiskFull unless there is room for the copies of damaged ranges, and for a segment that is written anew."""
    copied = largest = 0
    for path, in_segment in _by_segment(data_dir, damages):
        for damage in in_segment:
            if damage.missing < damage.length and not files.exists(data_dir / QUARANTINE / damage.copy_name):
                start = damage.position - segment_base(path)
                copied += _data_bytes(path, start, start + damage.length - damage.missing, files)
        if _must_be_anew(path, in_segment, files):
            largest = max(largest, _data_bytes(path, 0, files.size(path), files))  # one after another, and the old one goes
    needed, free = copied + largest + ROOM_BYTES, files.usage(data_dir).free
    if damages and needed > free:
        raise DiskFull(
            f"the repair copies {copied} bytes to {data_dir / QUARANTINE} and writes segments of up to {largest} bytes anew, "
            f"which needs {needed} bytes, but the file system of {data_dir} has {free} free; free at least {needed - free} "
            f"bytes there, for example by deleting the file {BALLAST}, which a start makes anew, and run it again. Nothing was "
            "changed"
        )


def _data_bytes(path: Path, start: int, stop: int, files: Files) -> int:
    """Return how many bytes of a range of a file are not in a hole."""
    file, found = files.open(path), 0
    try:
        while start < stop and (data := file.data_from(start)) is not None:
            found += max(min(data[1], stop) - data[0], 0)
            start = data[1]
    finally:
        file.close()
    return found


def _bases(data_dir: Path, files: Files) -> list[int]:
    """Return the positions of the segments, without those that an interrupted deletion has left."""
    mark, bases = SyncMark(data_dir, files=files).read(), segment_bases(files, data_dir / LOG_DIRECTORY)
    while mark is not None and len(bases) > 1 and bases[1] <= mark.begin:
        bases.pop(0)
    return bases


def _end_after(data_dir: Path, damages: list[Damage], files: Files) -> int:
    """Return the position at which the log ends when its damaged ranges are filled."""
    filled = max((damage.position + damage.length for damage in damages), default=0)
    base = max(segment_bases(files, data_dir / LOG_DIRECTORY), default=0)
    path, begin = data_dir / LOG_DIRECTORY / segment_name(base), max(filled, base)
    size = files.size(path) if files.exists(path) else 0
    if base + size <= begin:
        return begin
    segment = Segment(files, path, size, writable=False)
    try:
        return base + readable_end(segment.read, begin - base, size, base)
    finally:
        segment.close()


def _up_to_covered(data_dir: Path, planned: IndexPlan, end: int, files: Files) -> list[Damage]:
    """Return the range after the end of the log that an adjusted index covers already, if there is one."""
    if planned.fate is not Fate.ADJUSTED or planned.covered <= end:
        return []
    length = max(planned.covered - end, HEADER_BYTES)
    base = max(base for base in [*segment_bases(files, data_dir / LOG_DIRECTORY), planned.begin] if base <= end)
    path = data_dir / LOG_DIRECTORY / segment_name(base)
    size = base + files.size(path) if files.exists(path) else base
    return [Damage(end, length, path.name, max(end + length - max(size, end), 0), 0, 0, 0)]


def _boundary(covered: int, damages: list[Damage], fillings: list[Damage]) -> int:
    """Return the position that an adjusted index is to cover: a record begins there when the log is filled."""
    for damage in damages:
        if damage.position < covered < damage.position + damage.length:
            return damage.position
    return max(covered, *(damage.position + damage.length for damage in fillings[len(damages) :]), 0)


def _forget_beginning(data_dir: Path, files: Files) -> None:
    """Let the log begin with a record of kind DAMAGED, and an empty snapshot tell that nothing was before it.

    The record tells every reader of the log that later records may refer to what is lost.
    """
    mark = SyncMark(data_dir, files=files)
    found = mark.read()
    first = _bases(data_dir, files)[0]
    begin, path = first - HEADER_BYTES, data_dir / LOG_DIRECTORY / segment_name(first - HEADER_BYTES)
    store_ms = _first_ms(files, data_dir / LOG_DIRECTORY / segment_name(first))
    write_empty(data_dir, begin, store_ms, files)
    with written_anew(files, path) as file:
        write_all(file, record.encode(Kind.DAMAGED, store_ms=store_ms), 0)
    if found is not None:
        # What was not known to be durable before is not known to be so now.
        ending = Ending.FAILED if found.may_lack_pages(files.boot_id()) else found.ending
        if not mark.write(found.position, begin=begin, ending=ending, reason=found.reason):
            raise OSError(ENOSPC, "the sync mark can't be written; free space and run the repair again", str(mark.path))
        mark.close()


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
    Neither may a file that a backup has linked. What is behind the beginning of the next segment stays behind: a start that was
    killed has written it anew there, and did not come to cut this file.
    """
    base = segment_base(path)
    following = (each for each in segment_bases(files, path.parent) if each > base)
    size = min(files.size(path), next(following, base + files.size(path)) - base)
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
