"""The files of the tables: names, and writing them so that each is complete or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import IO, NamedTuple

from penstock.spark.errors import TablesLocked
from penstock.spark.parquet.schema import OPEN, START

DIRECTORY = "tables"
"""Folder of the tables in a data directory."""

SUFFIX = ".parquet"
UNFINISHED = ".tmp"

BASE_KEY, STOP_KEY = b"penstock.base", b"penstock.stop"
"""Keys of a file's metadata: the range of the log that its rows are from."""

LOCK = "lock"


def start_path(directory: Path, position: int) -> Path:
    """Return the path of the file that says what was open at a position where the tables begin."""
    return directory / START.name / f"{position:020d}{SUFFIX}"


def table_path(directory: Path, table: str, base: int, first_ms: int) -> Path:
    """Return the path of the file of a table and a segment. The date is that of the segment's first record."""
    date = datetime.fromtimestamp(first_ms / 1000, UTC).date()
    return directory / table / f"date={date.isoformat()}" / f"{base:020d}{SUFFIX}"


class SegmentFiles(NamedTuple):
    """The files of a segment, which have the same name in each table."""

    base: int
    date: str
    directory: Path

    def path(self, table: str) -> Path:
        """Return the path of the file in a table."""
        return self.directory / table / self.date / f"{self.base:020d}{SUFFIX}"

    @property
    def start(self) -> Path:
        """Path of the file that says what was open before the segment. It exists only where the tables begin, and if it is
        known."""
        return start_path(self.directory, self.base)


def segment_files(directory: Path, stop: int) -> list[SegmentFiles]:
    """Return the segments of the tables in a directory up to a position, in order.

    They are those that have a file in `open`, the table that is written last.
    """
    found = [SegmentFiles(int(path.stem), path.parent.name, directory) for path in (directory / OPEN.name).glob(f"*/*{SUFFIX}")]
    return sorted(each for each in found if each.base < stop)


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
