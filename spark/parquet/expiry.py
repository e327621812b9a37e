"""Deletes the files of the tables whose rows are too old."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.spark.errors import TablesInvalid
from penstock.spark.parquet.compaction import complete
from penstock.spark.parquet.files import DIRECTORY, STOP_KEY, SUFFIX, TableFiles, locked, start_path, without_readers
from penstock.spark.parquet.schema import OPEN, START, TABLES


def drop_before(data_dir: Path, before_ms: int, files: TableFiles | None = None) -> int:
    """Delete the files of the oldest segments as long as all of their rows are older; return how many files of each table.

    What was open where the tables begin then is in the last file of `open` that goes. It becomes a file of `start`, if that of
    the beginning before is known. A kill in between leaves a part of the files of one segment, which the next call deletes.

    Args:
        data_dir: of the node.
        before_ms: in ms since 1970. A file with a row of this time or later stays, and so do those after it.
        files: has the tables.

    Raises:
        TablesInUse: another process reads the tables.
        TablesInvalid: a file is damaged, or another process writes the tables.
        OSError: a file can't be read or deleted.
    """
    files = files or TableFiles()
    directory = data_dir / DIRECTORY
    dropped = 0
    with locked(directory), without_readers(directory):
        complete(files, directory)
        for date in sorted({path.name for table in TABLES for path in (directory / table.name).glob("date=*")}):
            folders = [folder for table in TABLES if (folder := directory / table.name / date).is_dir()]
            for name in sorted({path.name for folder in folders for path in folder.glob(f"*{SUFFIX}")}):
                paths = [path for folder in folders if (path := folder / name).exists()]
                if max(map(_newest_ms, paths)) >= before_ms:
                    return dropped
                _begin_after(files, directory, date, name)
                for path in paths:
                    if path.exists():
                        files.remove(path)
                dropped += 1
            for folder in folders:
                if not any(folder.iterdir()):
                    folder.rmdir()
    return dropped


def _begin_after(files: TableFiles, directory: Path, date: str, name: str) -> None:
    """Let what was open after a segment be what was open where the tables begin, if the state before it is known."""
    base, last = int(Path(name).stem), directory / OPEN.name / date / name
    is_known = base == 0 or start_path(directory, base).exists()
    if is_known and last.exists():
        described = pq.read_metadata(last).metadata
        start = start_path(directory, int(described[STOP_KEY]))
        files.make_directory(start.parent)
        files.rename(last, start)
        files.sync_directory(start.parent)
        files.sync_directory(last.parent)
    for path in sorted((directory / START.name).glob(f"*{SUFFIX}")):
        if int(path.stem) <= base:
            files.remove(path)


def _newest_ms(path: Path) -> int:
    """Return the time of the newest row of a file, as its footer says; 0 if it has no rows."""
    try:
        footer = pq.read_metadata(path)
        return max((_newest_of(footer.row_group(number)) for number in range(footer.num_row_groups)), default=0)
    except pa.ArrowInvalid as error:
        raise TablesInvalid(f"{path} is damaged ({error}). Move it away.") from error


def _newest_of(group: Any) -> int:
    columns = [group.column(number) for number in range(group.num_columns)]
    found = [column.statistics for column in columns if column.path_in_schema == "at_ms"]
    return max((int(each.max) for each in found if each is not None and each.has_min_max), default=0)
