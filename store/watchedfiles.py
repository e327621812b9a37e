"""Files that are read again once somebody has replaced them, such as certificates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

WATCH_S: Final = 2.0
"""Interval in seconds in which the node looks whether certificates were replaced."""


class WatchedFiles:
    """Tells whether one of some files was replaced since it was read.

    Parameters:
        paths: of the files.

    Raises:
        OSError: a file is missing.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self.note_read()

    def note_read(self) -> None:
        """Note that the files are about to be read. Raises OSError if one is missing."""
        self._seen = self._look()

    def changed(self) -> bool:
        """Return whether a file was replaced since. A missing file does not count: it is about to appear."""
        try:
            return self._look() != self._seen
        except OSError:
            return False

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        """Return inode, size and time of change of each file."""
        stats = [Path(path).stat() for path in self._paths]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)
