"""An ordered map in place of RocksDB, with RocksDB's promise: what a crash leaves is a prefix of the writes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from pathlib import Path
from random import Random

from penstock.store.files import Files, read_file, replace_file
from penstock.store.index.rocksdb import Cursor, Database, DatabaseFigures, IndexChanges
from tests.simulation.disk import SimulatedFiles

NAME = "CURRENT"
"""File in the folder of a database that says which of `Databases` it is."""


class MapChanges:
    """Changes that are written together."""

    __slots__ = ("changes", "size")

    def __init__(self) -> None:
        self.changes: list[tuple[int, bytes, bytes]] = []
        self.size = 0

    def put(self, key: bytes, value: bytes, /) -> None:
        self.changes.append((0, key, value))
        self.size += len(key) + len(value)

    def delete(self, key: bytes, /) -> None:
        self.changes.append((1, key, b""))
        self.size += len(key)

    def delete_range(self, begin: bytes, end: bytes, /) -> None:
        self.changes.append((2, begin, end))
        self.size += len(begin) + len(end)

    def size_in_bytes(self) -> int:
        return self.size


class Rows:
    """Rows at one moment. They are copied before a change when a cursor looks at them."""

    __slots__ = ("is_shared", "keys", "values")

    def __init__(self, keys: list[bytes], values: dict[bytes, bytes]) -> None:
        self.keys = keys
        self.values = values
        self.is_shared = False

    def apply(self, changes: list[tuple[int, bytes, bytes]]) -> None:
        """Apply changes in their order."""
        keys, values = self.keys, self.values
        for what, key, value in changes:
            if what == 0:
                if key not in values:
                    keys.insert(bisect_left(keys, key), key)
                values[key] = value
            elif what == 1:
                if values.pop(key, None) is not None:
                    del keys[bisect_left(keys, key)]
            else:
                start, stop = bisect_left(keys, key), bisect_left(keys, value)
                for each in keys[start:stop]:
                    del values[each]
                del keys[start:stop]

    def copy(self) -> Rows:
        """Return the same rows, for changes."""
        return Rows(self.keys.copy(), self.values.copy())


class MapCursor:
    """A cursor over rows."""

    __slots__ = ("_at", "_keys", "_stop", "_values")

    def __init__(self, rows: Rows, until: bytes | None) -> None:
        self._keys = rows.keys
        self._values = rows.values
        self._stop = len(rows.keys) if until is None else bisect_left(rows.keys, until)
        self._at = -1

    def seek(self, key: bytes, /) -> None:
        self._at = bisect_left(self._keys, key)

    def seek_for_prev(self, key: bytes, /) -> None:
        self._at = bisect_right(self._keys, key) - 1

    def next(self) -> None:
        self._at += 1

    def valid(self) -> bool:
        return 0 <= self._at < self._stop

    def key(self) -> bytes:
        return self._keys[self._at]

    def value(self) -> bytes:
        return self._values[self._keys[self._at]]

    def status(self) -> None:
        """Do nothing: these rows can always be read."""


class Stored:
    """What the disk has of a database: the rows as of the last flush, and the writes since, of which a crash keeps a prefix."""

    __slots__ = ("is_frozen", "later", "later_bytes", "rows")

    def __init__(self, rows: Rows, *, is_frozen: bool = False) -> None:
        self.rows = rows
        self.is_frozen = is_frozen
        """Whether copies of its files exist, so that a process that opens it gets a copy of the rows."""
        self.later: list[list[tuple[int, bytes, bytes]]] = []
        self.later_bytes = 0

    def crash(self, random: Random) -> None:
        """Keep a prefix of what was not flushed: memtables are flushed in order, and nothing else is on disk."""
        kept = random.choice((0, 0, random.randint(0, len(self.later))))
        self.keep(kept)

    def keep(self, count: int) -> None:
        """Put the first `count` of the later writes on disk, and forget the others."""
        for changes in self.later[:count]:
            self.rows.apply(changes)
        self.later.clear()
        self.later_bytes = 0

    def flush(self) -> None:
        """Put everything on disk."""
        self.keep(len(self.later))


class OrderedMap:
    """An open database: a `penstock.store.index.rocksdb.Database`.

    Parameters:
        databases: have it.
        files: have the folders of checkpoints.
        stored: what the disk has of it.
        step: called before each write and flush, with its name. It raises ProcessDead when the process has ended, and the error
            of a disk that fails.
    """

    def __init__(self, databases: Databases, files: Files, stored: Stored, step: Callable[[str], None]) -> None:
        self._databases = databases
        self._files = files
        self._stored = stored
        self._step = step
        self._rows = stored.rows.copy()

    def get(self, key: bytes, /) -> bytes | None:
        return self._rows.values.get(key)

    def changes(self) -> MapChanges:
        return MapChanges()

    def write(self, changes: IndexChanges, /) -> None:
        assert isinstance(changes, MapChanges)
        self._step("db_write")
        if self._rows.is_shared:
            self._rows = self._rows.copy()
        self._rows.apply(changes.changes)
        self._stored.later.append(changes.changes)
        self._stored.later_bytes += changes.size

    def flush(self) -> None:
        self._step("db_flush")
        self._stored.flush()

    def unflushed_bytes(self) -> int:
        return self._stored.later_bytes

    def cursor(self, until: bytes | None = None, /) -> Cursor:
        self._rows.is_shared = True
        return MapCursor(self._rows, until)

    def checkpoint(self, path: Path, /) -> None:
        self.flush()
        self._databases.add(self._files, path, Rows(self._rows.keys.copy(), self._rows.values.copy()), is_frozen=True)

    def figures(self) -> DatabaseFigures:
        return DatabaseFigures(*(0 for _ in DatabaseFigures._fields))

    def close(self) -> None:
        self._step("db_close")
        self._stored.flush()


class Databases:
    """All databases that ever were on a disk. Each has a file that names it, so that it moves and goes with its folder."""

    def __init__(self) -> None:
        self._stored: list[Stored] = []

    def open(self, files: SimulatedFiles, path: Path, step: Callable[[str], None]) -> Database:
        """Open the database in a folder, or create one there. Raises OSError."""
        name = read_file(files, path / NAME) if files.exists(path / NAME) else b""
        stored = self._stored[int(name)] if name else None
        if stored is None:
            stored = self.add(files, path, Rows([], {}))
        elif stored.is_frozen:
            stored = self.add(files, path, stored.rows.copy())
        return OrderedMap(self, files, stored, step)

    def add(self, files: Files, path: Path, rows: Rows, *, is_frozen: bool = False) -> Stored:
        """Create a database in a folder. With `is_frozen`, a process that opens its files, or a copy of them, gets a copy."""
        number = len(self._stored)
        self._stored.append(Stored(rows, is_frozen=is_frozen))
        files.mkdir(path)
        replace_file(files, path / NAME, b"%d" % number)
        files.sync_directory(path.parent)
        return self._stored[number]

    def detach(self, files: Files, path: Path) -> None:
        """Give the copied folder of a database, if there is one, a database of its own with the same rows."""
        if files.exists(path / NAME):
            stored = self._stored[int(read_file(files, path / NAME))]
            self.add(files, path, stored.rows.copy())

    def crash(self, random: Random) -> None:
        """End the process that has a database open: each keeps a prefix of its writes."""
        for stored in self._stored:
            if stored.later:
                stored.crash(random)
