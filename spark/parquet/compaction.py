"""Joins the small files of days that are over, once a day.

The merged files are made beside the tables. When they are durable, a file says which files they replace, and a process that was
killed in between is followed by one that completes it. Readers of Penstock count each row once at any time; others may see
rows twice while the files of a table change their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.spark.errors import TablesInUse, TablesInvalid
from penstock.spark.parquet.files import (
    COMPACTION,
    DIRECTORY,
    STOP_KEY,
    SUFFIX,
    Replacement,
    SegmentFiles,
    TableFiles,
    locked,
    merged_path,
    pending_replacement,
    remove_unfinished,
    replacement_path,
    replacing,
    segment_files,
    without_readers,
)
from penstock.spark.parquet.schema import OPEN, TABLES
from penstock.spark.parquet.state import load_state
from penstock.spark.parquet.writer import write_parquet

FILE_BYTES_MAX = 128 * 1024 * 1024
"""Bytes of all tables but `open` up to which segments share their files. Larger files gain nothing for those who read them."""

SMALL_BYTES_MAX = FILE_BYTES_MAX // 4
"""Bytes of a segment up to which it is small. Larger ones stay as they are, so that a day of them is not written twice."""

GROUP_ROWS_MAX = 1_000_000
GROUP_BYTES_MAX = 256 * 1024 * 1024
"""Decoded size up to which row groups are joined. The rows of one are in memory."""

DONE = "position"
"""File with the position before which all days have been looked at."""


class MergedSegments(NamedTuple):
    """Segments that share a file in each table now."""

    base: int
    stop: int
    segments: int
    """Number of the files of each table before."""


class _Small(NamedTuple):
    """A small segment, or some that share a file."""

    files: SegmentFiles
    stop: int
    size: int


def compact(data_dir: Path, files: TableFiles | None = None) -> Iterator[MergedSegments]:
    """Join the small files of each day that is over; yield the segments of each merged file when it is in its place.

    A day is over when the tables have a segment of a later one. Each file of `open` has the state after its last segment, so
    only the rows of that one stay. The rows of a row group are in memory.

    Args:
        data_dir: of the node.
        files: has the tables.

    Raises:
        TablesInUse: another process reads the tables. Run again; what is complete stays.
        TablesInvalid: a file, or the state of the tables, is damaged, or another process writes the tables.
        OSError: a file can't be written. Run again; what is complete stays.
    """
    files = files or TableFiles()
    directory = data_dir / DIRECTORY
    if not directory.is_dir():
        return
    with locked(directory):
        with without_readers(directory):
            complete(files, directory)
        _remove_merged(files, directory)
        begin, stop = _done_until(directory), load_state(directory).position
        segments = [each for each in segment_files(directory, stop) if each.base >= begin]
        over = _over(segments)
        for group in _groups(over):
            _merge(files, directory, group)
            yield MergedSegments(group[0].files.base, group[-1].stop, len(group))
        if over:
            with replacing(files, directory / COMPACTION / DONE) as file:
                file.write(str(segments[len(over)].base).encode())


def complete(files: TableFiles, directory: Path) -> None:
    """Complete what a process that was killed was replacing. The caller must hold `locked` and `without_readers`."""
    replacement = pending_replacement(directory)
    if replacement is not None:
        _replace(files, directory, replacement)


def _done_until(directory: Path) -> int:
    path = directory / COMPACTION / DONE
    try:
        return int(path.read_bytes())
    except FileNotFoundError:
        return 0
    except ValueError as error:
        raise TablesInvalid(f"{path} holds no position ({error}). Delete it.") from error


def _over(segments: list[SegmentFiles]) -> list[SegmentFiles]:
    """Return the segments without those at the end that are of one day, because more of that day may come."""
    count = len(segments)
    while count and segments[count - 1].date == segments[-1].date:
        count -= 1
    return segments[:count]


def _groups(segments: Iterable[SegmentFiles]) -> Iterator[list[_Small]]:
    """Yield the segments that are to share a file: small ones of a date, without a gap between them."""
    group: list[_Small] = []
    for each in segments:
        small = _small(each)
        if small is None or not _fits(group, small):
            if len(group) > 1:
                yield group
            group = []
        if small is not None:
            group.append(small)
    if len(group) > 1:
        yield group


def _fits(group: list[_Small], small: _Small) -> bool:
    return (
        bool(group)
        and group[-1].files.date == small.files.date
        and group[-1].stop == small.files.base  # after a gap, the state may have begun anew
        and sum(each.size for each in group) + small.size <= FILE_BYTES_MAX
    )


def _small(segment: SegmentFiles) -> _Small | None:
    """Return the description of a segment if it is small and all of its files are there."""
    try:
        size = sum(segment.path(table.name).stat().st_size for table in TABLES if table is not OPEN)
    except FileNotFoundError:  # `penstock tables verify` says so
        return None
    if size > SMALL_BYTES_MAX:
        return None
    path = segment.path(OPEN.name)
    try:
        return _Small(segment, int(pq.read_metadata(path).metadata[STOP_KEY]), size)
    except pa.ArrowInvalid as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> TablesInvalid:
    return TablesInvalid(f"{path} is damaged ({error}). Move it away.")


# --- one group ----------------------------------------------------------------------------------------------------------


def _merge(files: TableFiles, directory: Path, group: list[_Small]) -> None:
    """Make the merged files of a group, and put them in their places."""
    try:
        _write(files, directory, group)
    except OSError:
        _remove_merged(files, directory)  # the disk may be full
        raise
    replacement = Replacement(group[0].files.date, [each.files.base for each in group])
    try:
        with without_readers(directory):
            with replacing(files, replacement_path(directory)) as file:
                file.write(orjson.dumps(replacement._asdict()))
            _replace(files, directory, replacement)
    except TablesInUse:
        _remove_merged(files, directory)
        raise


def _write(files: TableFiles, directory: Path, group: list[_Small]) -> None:
    base, stop = group[0].files.base, group[-1].stop
    for table in TABLES:
        sources = group if table is not OPEN else group[-1:]
        paths = [each.files.path(table.name) for each in sources]
        with replacing(files, merged_path(directory, table.name, base)) as file:
            write_parquet(file, table, _row_groups(paths), base, stop)


def _row_groups(paths: list[Path]) -> Iterator[Any]:
    """Yield the rows of files, joined as far as the bounds of a row group allow it. Files without rows have one group, too."""
    held: list[Any] = []
    for rows in _rows(paths):
        count, size = sum(map(len, held)), sum(each.nbytes for each in held)
        if count and (count + len(rows) > GROUP_ROWS_MAX or size + rows.nbytes > GROUP_BYTES_MAX):
            yield pa.concat_tables(held)
            held = []
        if len(rows) or not held:
            held.append(rows)
    if held:
        yield pa.concat_tables(held)


def _rows(paths: list[Path]) -> Iterator[Any]:
    """Yield the row groups of files."""
    for path in paths:
        try:
            with pq.ParquetFile(path) as file:
                for number in range(file.num_row_groups):
                    yield file.read_row_group(number).replace_schema_metadata()
        except pa.ArrowInvalid as error:
            raise _damaged(path, error) from error


def _replace(files: TableFiles, directory: Path, replacement: Replacement) -> None:
    """Put merged files in the place of those of the segments. It may have been done in part before."""
    first, *others = replacement.names
    for table in TABLES:
        folder, merged = directory / table.name / replacement.date, merged_path(directory, table.name, replacement.bases[0])
        if merged.exists():
            files.rename(merged, folder / first)
        for path in [folder / name for name in others]:
            if path.exists():
                files.remove(path)
    for table in TABLES:  # at the end, so that rows are there twice for as short as possible
        files.sync_directory(directory / table.name / replacement.date)
        files.sync_directory(directory / COMPACTION / table.name)
    files.remove(replacement_path(directory))
    files.sync_directory(directory / COMPACTION)


def _remove_merged(files: TableFiles, directory: Path) -> None:
    """Delete merged files that replace nothing."""
    remove_unfinished(files, directory / COMPACTION)
    for path in sorted((directory / COMPACTION).rglob(f"*{SUFFIX}")):
        files.remove(path)
