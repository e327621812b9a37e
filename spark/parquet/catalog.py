"""The files of the tables: what is there, and whether it is what the log has."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.spark import segments
from penstock.spark.errors import TablesInvalid
from penstock.spark.parquet.files import BASE_KEY, DIRECTORY, STOP_KEY, reading, table_paths
from penstock.spark.parquet.rows import message_records
from penstock.spark.parquet.schema import DELIVERIES, ENDS, MESSAGES, START, TABLES
from penstock.spark.parquet.state import WriterState, load_state
from penstock.spark.parquet.writer import sealed_segments
from penstock.spark.records import HANDING, SETTLING, Array, Records, handed_out, settled
from penstock.spark.segments import LogSegment


class ParquetFile(NamedTuple):
    """A file of a table."""

    table: str
    path: Path
    base: int
    stop: int
    """Range of the log that its rows are from."""
    rows: int
    size: int
    """Bytes of the file."""


class TableSize(NamedTuple):
    """The extent of a table."""

    table: str
    files: int
    rows: int
    size: int
    start: int
    stop: int
    """Range of the log from the first file to the last one."""


class TablesCheck(NamedTuple):
    """What a verification has found."""

    problems: list[str]
    """A sentence for each thing that is wrong."""
    compared: int
    """Number of segments of the log that were compared."""
    unwritten: list[LogSegment]
    """Sealed segments that are not in the tables yet."""


def table_files(data_dir: Path) -> dict[str, list[ParquetFile]]:
    """Return the files of each table, by position, as their footers describe them.

    Raises:
        TablesInvalid: a file is damaged, or not one of these tables.
    """
    return {table.name: _files(data_dir / DIRECTORY, table.name) for table in TABLES}


def _files(directory: Path, table: str) -> list[ParquetFile]:
    return sorted(_described(directory, table), key=lambda each: each.base)


def _described(directory: Path, table: str) -> Iterator[ParquetFile]:
    for path in table_paths(directory, table):
        try:
            footer = pq.read_metadata(path)
            described = footer.metadata or {}
            base, stop = int(described[BASE_KEY]), int(described[STOP_KEY])
        except (pa.ArrowInvalid, OSError, KeyError, ValueError) as error:
            raise TablesInvalid(f"{path} is damaged, or no file of these tables ({error}). Move it away.") from error
        yield ParquetFile(table, path, base, stop, footer.num_rows, path.stat().st_size)


def table_sizes(data_dir: Path) -> list[TableSize]:
    """Return the extent of each table that has files, and of `start`. Raises TablesInvalid as `table_files` does."""
    with reading(data_dir / DIRECTORY):
        by_table = table_files(data_dir) | {START.name: _files(data_dir / DIRECTORY, START.name)}
    return [
        TableSize(
            name,
            len(files),
            sum(each.rows for each in files),
            sum(each.size for each in files),
            files[0].base,
            files[-1].stop,
        )
        for name, files in by_table.items()
        if files
    ]


def verify_tables(data_dir: Path) -> TablesCheck:
    """Compare the tables with each other, and with the segments that the log still has.

    Every row of `messages`, `deliveries` and `ends` must have its record, and every record its row. Segments before the first
    file are those whose files were deleted for their age.

    Raises:
        TablesInvalid: a file, or the state of the tables, is damaged.
        LogMissing: there is no log, or retention has removed a segment during the read.
        LogCorrupt, RecordCorrupt: the log is damaged.
    """
    with reading(data_dir / DIRECTORY):
        return _verified(data_dir)


def _verified(data_dir: Path) -> TablesCheck:
    state = load_state(data_dir / DIRECTORY)
    files = table_files(data_dir)
    _files(data_dir / DIRECTORY, START.name)  # must not be damaged either
    first = min((each[0].base for each in files.values() if each), default=state.position)
    problems = [problem for name, each in files.items() for problem in _gaps(name, each, state, first)]
    compared, unwritten = 0, []
    for segment in sealed_segments(data_dir):
        if segment.base >= state.position:
            unwritten.append(segment)
            continue
        compared += 1
        problems += _differences(segment, {name: _file_of(segment, listed) for name, listed in files.items()})
    return TablesCheck(problems, compared, unwritten)


def _gaps(table: str, files: list[ParquetFile], state: WriterState, first: int) -> Iterator[str]:
    """Yield a sentence for each covered range from position `first` on that no file of a table has."""
    written = [each for each in files if each.stop <= state.position]
    edges = [*((each.base, each.stop) for each in written)]
    for start, stop in state.covered.tolist():
        within = [(base, end) for base, end in edges if start <= base < stop]
        begin = max(start, min(first, stop))
        for (_, before), (after, _) in pairwise([(begin, begin), *within, (stop, stop)]):
            if before < after:
                yield f"{table} has no file for the positions from {before} to {after}."


def _file_of(segment: LogSegment, files: list[ParquetFile]) -> ParquetFile | None:
    """Return the file that has a segment, alone or among others."""
    at = bisect_right(files, segment.base, key=lambda each: each.base) - 1
    return files[at] if at >= 0 and segment.base < files[at].stop else None


def _differences(segment: LogSegment, files: dict[str, ParquetFile | None]) -> Iterator[str]:
    """Yield a sentence for each table that has other rows than a segment."""
    expected = _keys_of(segment)
    for name, column in ((MESSAGES.name, "position"), (DELIVERIES.name, "key"), (ENDS.name, "key")):
        file = files[name]
        if file is None:
            continue  # `_gaps` has said so
        found = np.sort(_rows_of(segment, file, column).to_numpy())
        if not np.array_equal(found, expected[name]):
            yield (
                f"{file.path} has {len(found)} rows of {name} for the positions from {segment.base} to {segment.stop}, and "
                f"the log has {len(expected[name])}: {len(np.setdiff1d(expected[name], found))} are missing, and "
                f"{len(np.setdiff1d(found, expected[name]))} are not in the log."
            )


def _rows_of(segment: LogSegment, file: ParquetFile, column: str) -> Any:
    """Return a column of the rows that a file has of a segment. At its ends, the file has no rows of other segments."""
    position, of_segment = pc.field("position"), pc.scalar(True)
    if file.table == MESSAGES.name:
        # A copy has a row unless the tables have its first place, which the log need not have any more.
        of_segment &= pc.field("copied_at").is_null()
    if file.base < segment.base:
        of_segment &= position >= segment.base
    if file.stop > segment.stop:
        of_segment &= position < segment.stop
    return pq.read_table(file.path, columns=[column], filters=of_segment, partitioning=None)[column]


def _keys_of(segment: LogSegment) -> dict[str, Array]:
    """Return what identifies the rows of a segment, sorted, by table."""
    keys: dict[str, list[Any]] = {MESSAGES.name: [], DELIVERIES.name: [], ENDS.name: []}
    for block in segments.blocks(segment.path, segment.base, segment.base, segment.stop):
        records = Records.of(block)
        messages, _, _ = message_records(records)
        keys[MESSAGES.name].append(messages.position)
        keys[DELIVERIES.name].append(handed_out(records.of_kind(*HANDING))["key"])
        keys[ENDS.name].append(settled(records.of_kind(*SETTLING))["key"])
    return {name: np.sort(np.concatenate(parts)) for name, parts in keys.items()}
