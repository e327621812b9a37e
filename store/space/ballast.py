"""The ballast: a file that only takes room, so that there is some when the disk is full.

A node that runs survives a disk without a free byte, because it writes nothing that needs new room. A start needs some: RocksDB
writes a manifest, and the end of the log may have to be written anew. So the node keeps a file of zeros in its data directory,
and deletes it when a start, or RocksDB, finds no room. It creates the file again when there is room.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock

import structlog

from penstock.store.files import FULL, SYSTEM_FILES, Files, Mode, Usage, unlink_if_there
from penstock.store.index.index import DIRECTORY
from penstock.store.options import MIB
from penstock.store.space.space import FLOOR_DIVISOR, Space

logger = structlog.get_logger("store")

FILE = "ballast"

BASE_BYTES = 4 * MIB
"""Size of the ballast of an empty log. The bytes of the log come on top, since a start may have to write its end anew."""

LEAST_BYTES = MIB // 4
"""The least size by which the file grows."""

DISK_DIVISOR = 16
"""On a small disk, the ballast is no larger than the disk divided by this."""


class Ballast:
    """The ballast in one directory. The methods may be called on any thread.

    Parameters:
        directory: where the file is. It must exist when `fill` is called.
        bytes_max: see `StoreOptions.ballast_bytes`. 0 means no ballast.
        files: has the directory.
    """

    def __init__(self, directory: Path, bytes_max: int, *, files: Files = SYSTEM_FILES) -> None:
        self.path = directory / FILE
        self._bytes_max = bytes_max
        self._files = files
        self._lock = Lock()
        self._cannot = False
        """The file system can't allocate room ahead, so a ballast would take none."""
        self.bytes = self._size()
        """Size of the file; 0 without one."""

    def _size(self) -> int:
        try:
            return self._files.size(self.path)
        except FileNotFoundError:
            return 0

    def release(self) -> int:
        """Delete the file; return how many bytes that frees. Raises OSError."""
        with self._lock:
            freed, self.bytes = self.bytes, 0
            unlink_if_there(self._files, self.path)
        if freed:
            logger.warning("ballast.released", path=str(self.path), bytes=freed)
        return freed

    def missing(self, log_bytes: int, usage: Usage, reserve: int) -> int:
        """Return how many bytes `fill` should add: 0 if the file is large enough, or there is no room for it.

        The file never makes the level of the store worse (see `store.space`): it takes what is free above the bound of the
        present level. When less than the last bound is free, it takes half of that, because the next start may need it more.

        Args:
            log_bytes: size of the log. The file grows with it, by half of its size at least.
            usage, reserve: of the disk.
        """
        wanted = min(self._bytes_max, usage.total // DISK_DIVISOR, BASE_BYTES + log_bytes)
        lacking = wanted - self.bytes
        is_worth_it = wanted >= self.bytes * 3 // 2 or wanted == self._bytes_max
        if lacking <= 0 or not is_worth_it or self._cannot:
            return 0
        bound = next((bound for bound in (reserve, reserve // FLOOR_DIVISOR) if usage.free >= bound > 0), 0)
        room = usage.free - bound * 10 // 9 if bound else usage.free // 2
        if room >= lacking:
            return lacking
        return room if self.bytes * 2 < wanted and room >= LEAST_BYTES else 0

    def fill(self, size: int) -> None:
        """Make the file larger by `size` bytes. Where there is no room after all, nothing changes. Raises OSError."""
        with self._lock:
            file = self._files.open(self.path, Mode.WRITE)
            try:
                file.allocate(self.bytes, size)
                self._cannot = file.size() < self.bytes + size
                self.bytes = file.size()
            except OSError as error:
                file.truncate(self.bytes)
                if error.errno not in FULL:
                    raise
            finally:
                file.close()

    def limit(self) -> None:
        """Delete the file if it is larger than the option allows now. Raises OSError."""
        if self.bytes > self._bytes_max:
            self.release()


class Ballasts:
    """The ballast of a data directory, and that of the index where the index is on another disk.

    Parameters:
        data_dir: of the node.
        index_dir: the folder of the index, which exists.
        bytes_max: see `StoreOptions.ballast_bytes`.
        files: has the directories.
    """

    def __init__(self, data_dir: Path, index_dir: Path, bytes_max: int, *, files: Files = SYSTEM_FILES) -> None:
        self._data = Ballast(data_dir, bytes_max, files=files)
        self._index = Ballast(index_dir, bytes_max, files=files)
        self._due: list[tuple[Ballast, int]] = []
        self._bytes_max = bytes_max

    @property
    def bytes(self) -> int:
        """Size of both files."""
        return self._data.bytes + self._index.bytes

    def are_due(self, log_bytes: int, space: Space) -> bool:
        """Return whether `fill` has something to do, as of the last measurement of `space`."""
        self._due = []
        parts = [(self._data, space.usage, space.reserve)]
        # Disks of the same size are taken for one. If they are two, the index does without a ballast of its own.
        if space.index_usage is not None and space.index_usage.total != space.usage.total:
            parts.append((self._index, space.index_usage, space.index_reserve))
        for ballast, usage, reserve in parts:
            missing = ballast.missing(log_bytes, usage, reserve)
            if missing or ballast.bytes > self._bytes_max:
                self._due.append((ballast, missing))
        return bool(self._due)

    def fill(self) -> None:
        """Bring the files to the sizes that they should have. Raises OSError."""
        for ballast, missing in self._due:
            ballast.limit()
            if missing:
                ballast.fill(missing)

    def release_for(self, error: OSError) -> None:
        """Delete the files because RocksDB has found no room. Raises OSError."""
        if error.errno in FULL:
            self._data.release()
            self._index.release()


def release_ballast(data_dir: Path, *, files: Files = SYSTEM_FILES) -> int:
    """Delete the ballast of a data directory, for a start that finds no room; return the bytes that frees. Raises OSError."""
    return sum(Ballast(directory, 0, files=files).release() for directory in (data_dir, data_dir / DIRECTORY))
