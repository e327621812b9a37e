"""The files of the tables under a process that is killed."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from penstock.spark.parquet.files import TableFiles


class Killed(Exception):
    """Stands for the end of the process."""


class KilledFiles(TableFiles):
    """Ends the writer at one operation, before or after it has its effect."""

    def __init__(self, at: int, *, is_done: bool) -> None:
        self.left = at
        self._is_done = is_done

    def _count(self) -> bool:
        """Return whether the operation is the one at which the writer ends."""
        self.left -= 1
        return self.left < 0

    def create(self, path: Path) -> IO[bytes]:
        ends = self._count()
        if ends and not self._is_done:
            raise Killed
        file = super().create(path)
        if ends:
            file.write(b"PAR1")
            file.close()
            raise Killed
        return file

    def sync(self, file: IO[bytes]) -> None:
        if self._count():
            raise Killed
        super().sync(file)

    def rename(self, old: Path, new: Path) -> None:
        ends = self._count()
        if not ends or self._is_done:
            super().rename(old, new)
        if ends:
            raise Killed

    def sync_directory(self, path: Path) -> None:
        if self._count():
            raise Killed
        super().sync_directory(path)

    def remove(self, path: Path) -> None:
        if self._count():
            raise Killed
        super().remove(path)
