"""The files of the tables: names, and writing them so that each is complete or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path
from typing import IO, NamedTuple

import orjson

from penstock.spark.errors import TablesInUse, TablesInvalid, TablesLocked
from penstock.spark.parquet.schema import OPEN, START

DIRECTORY = "tables"
"""Folder of the tables in a data directory."""

SUFFIX = ".parquet"
UNFINISHED = ".tmp"

BASE_KEY, STOP_KEY = b"penstock.base", b"penstock.stop"
"""Keys of a file's metadata: the range of the log that its rows are from."""

LOCK = "lock"

COMPACTION = "compaction"
"""Folder of the merged files until they replace those of the segments, and of the files that say how far that is."""

REPLACEMENT = "replacement.json"


def start_path(directory: Path, position: int) -> Path:
    """Return the path of the file that says what was open at a position where the tables begin."""
    return directory / START.name / f"{position:020d}{SUFFIX}"


def table_path(directory: Path, table: str, base: int, first_ms: int) -> Path:
    """Return the path of the file of a table and a segment. The date is that of the segment's first record."""
    date = datetime.fromtimestamp(first_ms / 1000, UTC).date()
    return directory / table / f"date={date.isoformat()}" / f"{base:020d}{SUFFIX}"


def merged_path(directory: Path, table: str, base: int) -> Path:
    """Return the path of a merged file of a table before it replaces the file of its first segment."""
    return directory / COMPACTION / table / f"{base:020d}{SUFFIX}"


class Replacement(NamedTuple):
    """Neighbouring segments of a date whose files are being replaced by one file per table.

    In each table, the merged file takes the place of the first segment's, and the files of the other segments are deleted.
    While the merged file is still at `merged_path`, it counts instead of all of them.
    """

    date: str
    bases: list[int]

    @property
    def names(self) -> list[str]:
        """Names of the files, which are the same in each table."""
        return [f"{base:020d}{SUFFIX}" for base in self.bases]


def replacement_path(directory: Path) -> Path:
    """Return the path of the file that says which files are being replaced."""
    return directory / COMPACTION / REPLACEMENT


def pending_replacement(directory: Path) -> Replacement | None:
    """Return what is being replaced in the tables in a directory, or was when a process was killed.

    Raises:
        TablesInvalid: the file that says it is damaged.
    """
    path = replacement_path(directory)
    try:
        described = orjson.loads(path.read_bytes())
        return Replacement(described["date"], described["bases"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise TablesInvalid(
            f"{path} is damaged ({error}). Delete {directory}, and run `penstock tables backfill` to make the tables of what "
            f"the log still has."
        ) from error


def table_paths(directory: Path, table: str) -> list[Path]:
    """Return the files of a table, by name. A file that is being replaced is not among them; the merged one is."""
    paths = sorted((directory / table).rglob(f"*{SUFFIX}"), key=lambda path: path.name)
    replacement = pending_replacement(directory)
    if replacement is None:
        return paths
    first, *others = replacement.names
    merged = merged_path(directory, table, replacement.bases[0])
    kept = [path for path in paths if path.name not in others]
    return [merged if path.name == first and merged.exists() else path for path in kept]


class SegmentFiles(NamedTuple):
    """The files of a segment, or of several that share a file. They have the same name in each table."""

    base: int
    date: str
    directory: Path
    is_replaced: bool = False
    """Whether these are the files of several segments, some of which may not have replaced those of each segment yet."""

    def path(self, table: str) -> Path:
        """Return the path of the file in a table."""
        merged = merged_path(self.directory, table, self.base)
        if self.is_replaced and merged.exists():
            return merged
        return self.directory / table / self.date / f"{self.base:020d}{SUFFIX}"

    @property
    def start(self) -> Path:
        """Path of the file that says what was open before the segment. It exists only where the tables begin, and if it is
        known."""
        return start_path(self.directory, self.base)


def segment_files(directory: Path, stop: int) -> list[SegmentFiles]:
    """Return the segments of the tables in a directory up to a position, in order.

    They are those that have a file in `open`, the table that is written last. Segments that share a file count as one.
    """
    replacement = pending_replacement(directory)
    first, *others = replacement.bases if replacement is not None else [None]
    bases = [(int(path.stem), path.parent.name) for path in (directory / OPEN.name).glob(f"*/*{SUFFIX}")]
    return sorted(
        SegmentFiles(base, date, directory, base == first) for base, date in bases if base < stop and base not in others
    )


class TableFiles:
    """What the writer does to files. Tests let each operation fail, to see what a kill leaves."""

    def make_directory(self, path: Path) -> None:
        """Create a directory if it does not exist, with all above it, and make the new names durable.

        Like the log, the tables have bodies of messages, so only their owner may read directories and files.
        """
        if not path.is_dir():
            self.make_directory(path.parent)
            path.mkdir(mode=0o700, exist_ok=True)
            self.sync_directory(path.parent)

    def create(self, path: Path) -> IO[bytes]:
        """Create a file, or empty it."""
        return open(path, "wb", opener=_open_private)

    def sync(self, file: IO[bytes]) -> None:
        """Make the content of a file durable."""
        file.flush()
        os.fsync(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file. One of the new name is replaced."""
        old.rename(new)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        path.unlink()


class TransientFiles(TableFiles):
    """Files for one query, which need not outlive a crash."""

    def sync(self, file: IO[bytes]) -> None:
        file.flush()

    def sync_directory(self, path: Path) -> None:
        pass


def _open_private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


@contextmanager
def replacing(files: TableFiles, path: Path) -> Iterator[IO[bytes]]:
    """Open a new file under another name, which gets its own name at the end if the caller has written it without an error."""
    files.make_directory(path.parent)
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    with files.create(unfinished) as file:
        yield file
        files.sync(file)
    files.rename(unfinished, path)
    files.sync_directory(path.parent)


def remove_unfinished(files: TableFiles, directory: Path) -> None:
    """Delete what a writer that was killed has left."""
    for path in sorted(directory.rglob(f".*{UNFINISHED}")):
        files.remove(path)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other writers of the tables away.

    Raises:
        TablesLocked: another process writes the tables.
    """
    with open(directory / LOCK, "wb", opener=_open_private) as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            raise TablesLocked(f"Another process is writing {directory}. Wait until it has ended.") from None
        yield


@contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Keep the files of the tables from being replaced or deleted. New ones may come. It waits for what is being replaced."""
    if not directory.is_dir():
        yield
        return
    with _opened(directory) as descriptor:
        flock(descriptor, LOCK_SH)
        yield


@contextmanager
def without_readers(directory: Path) -> Iterator[None]:
    """Keep readers of the tables away. The caller must be the writer.

    Raises:
        TablesInUse: another process reads the tables.
    """
    with _opened(directory) as descriptor:
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            raise TablesInUse(f"Another process is reading {directory}. Wait until it has ended.") from None
        yield


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """Open the directory, to lock it: a reader may not be allowed to create a file in it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
