"""Files that have each other's names: finds the segments among them by their times, and gives all files their own names.

Records don't hold their positions, so all records of a segment are valid in a wrong place too. But store times never decrease
along a log, which tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from penstock.store.errors import LogCorrupt, RecordUnreadable
from penstock.store.files import Files, Mode
from penstock.store.log.recordscan import read_records
from penstock.store.log.segment import Segment, segment_bases, segment_name
from penstock.store.record import HEADER_BYTES, KIND_AT, Kind, is_intact, store_ms_of

SUFFIX = ".placing"
"""Suffix of the second name that a file gets, its own one, before any file is replaced."""

MARKER = "placing"
"""File in a folder that is there while its files are replaced. A start refuses a log that has it."""


def first_times(files: Files, directory: Path) -> dict[int, int]:
    """Return when the first record of each segment was stored, by the segment's position, in ms since 1970.

    Segments whose first record is missing or damaged, or was put there by a repair, are left out.
    """
    times = {}
    for base in segment_bases(files, directory):
        path = directory / segment_name(base)
        size = files.size(path)
        if size < HEADER_BYTES:
            continue
        segment = Segment(files, path, size, writable=False)
        try:
            data, offsets, _ = read_records(segment.read, 0, size, HEADER_BYTES)
        except RecordUnreadable:
            continue
        finally:
            segment.close()
        if offsets and is_intact(data) and data[KIND_AT] != Kind.DAMAGED:
            times[base] = store_ms_of(data)
    return times


def check_places(files: Files, directory: Path) -> None:
    """Raise LogCorrupt if a segment begins with an older record than a segment before it, or if `place` was interrupted."""
    if files.exists(directory / MARKER):
        raise LogCorrupt(
            f"`penstock repair` was interrupted while it put the segments in {directory} in their places; run it again"
        )
    for (base, stored_ms), (following, following_ms) in pairwise(first_times(files, directory).items()):
        if following_ms < stored_ms:
            raise LogCorrupt(
                f"segment {segment_name(following)} begins with a record that is older than the first one of segment "
                f"{segment_name(base)}, so files are in each other's place and the node does not start; run "
                f"`penstock repair`, or restore them from a backup"
            )


def misplaced(files: Files, directory: Path) -> dict[int, int]:
    """Return the position at which each segment belongs that is in a wrong place, by the position that its name states.

    Raises:
        LogCorrupt: segments are in wrong places, and their times and sizes don't tell the right ones.
    """
    times = first_times(files, directory)
    bases = list(times)
    ordered = sorted(bases, key=times.__getitem__)
    moves = {base: target for base, target in zip(ordered, bases, strict=True) if base != target}
    every = segment_bases(files, directory)
    ends = dict(pairwise(every))
    for base, target in moves.items():
        is_unclear = sum(times[base] == other for other in times.values()) > 1
        is_short = target in ends and files.size(directory / segment_name(base)) < ends[target] - target
        if is_unclear or is_short:
            raise LogCorrupt(
                f"segments in {directory} are in each other's place, among them {segment_name(base)}, and their times and "
                f"sizes don't tell where they belong; restore them from a backup"
            )
    return moves


def place(files: Files, directory: Path) -> dict[int, int]:
    """Put the segments in their places; return what `misplaced` does. A second call completes one that was killed anywhere.

    Raises:
        LogCorrupt: as `misplaced`. Nothing has changed.
        OSError: a file can't be renamed.
    """
    moves = {} if files.exists(directory / MARKER) else misplaced(files, directory)
    exchange(files, directory, {segment_name(base): segment_name(target) for base, target in moves.items()})
    return moves


def exchange(files: Files, directory: Path, moves: Mapping[str, str]) -> None:
    """Rename files of a folder that have each other's names, durably. A later call completes one that was killed anywhere.

    Args:
        files: has the folder.
        directory: the folder.
        moves: the new name of each file by its present one; the present names are the new ones in another order. It may be
            empty, and is not looked at if a call that was killed had begun to replace files.

    Raises:
        OSError: a file can't be renamed.
    """
    if not files.exists(directory / MARKER):
        for name in files.names(directory):
            if name.endswith(SUFFIX):  # a call was killed before it replaced anything
                files.unlink(directory / name)
        if not moves:
            return
        assert set(moves) == set(moves.values()), moves
        for name, own in moves.items():
            files.link(directory / name, directory / f"{own}{SUFFIX}")
        files.sync_directory(directory)
        files.open(directory / MARKER, Mode.NEW).close()
        files.sync_directory(directory)
    for name in files.names(directory):
        if name.endswith(SUFFIX):
            files.rename(directory / name, directory / name.removesuffix(SUFFIX))
    files.sync_directory(directory)
    files.unlink(directory / MARKER)
    files.sync_directory(directory)
