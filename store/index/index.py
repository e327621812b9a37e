"""The index: one RocksDB (`store.index.rocksdb`) that holds state derived from the log.

All key spaces share one column family, and the first byte of a key tells them apart. This is deliberate. With the WAL off, a
manual flush of one of several column families leaves the others behind even if atomic flush is on, because RocksDB flushes only
the requested family. The recovered state would then not be a prefix of what was written. In one column family it always is:
memtables are flushed in order, and each WriteBatch is in one memtable together with the log position that it covers.

The index is disposable: if it is deleted, the next start rebuilds it from the log.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from struct import Struct
from struct import error as StructError
from time import monotonic, sleep
from typing import NamedTuple, TypeAlias

import structlog

from penstock.store.errors import DataDirIncompatible, IndexDamaged
from penstock.store.files import PASSING, SYSTEM_FILES, File, Files, Mode, read_file, replace_file, unlink_if_there
from penstock.store.index.rocksdb import (
    Cursor,
    Database,
    DatabaseFigures,
    IndexChanges,
    OpenDatabase,
    memtable_bytes,
    open_rocksdb,
)
from penstock.store.index.rowformats import FORMAT
from penstock.store.index.rowformats import KeySpace as KeySpace
from penstock.store.options import MIB

logger = structlog.get_logger("store")

DIRECTORY = "index"
DISCARDED = "index.discarded"
"""Name that an index gets before it is deleted, so that a half-deleted index is never opened."""

CHECKPOINT = "index.checkpoint"
"""Folder with a copy of the index for a backup. A start deletes what a killed node has left."""

DAMAGED = "index.damaged"
"""File with the reason why the next start must rebuild the index. Without it, each start would meet the damaged block again."""

_DISK_FAILED = "Input/output error"

_SIGNS = ("Corruption", "No such file or directory", _DISK_FAILED)
"""Words in RocksDB's errors that mean a damaged or missing file. Transient errors, such as a full disk, have none of them."""

_WRITING = re.compile(
    r"while (append|p?writ|fsync|fdatasync|sync_file_range|f?truncat|renam|clos\w+ file after|mkdir|open a file for append)",
    re.I,
)
"""What RocksDB does to a file when an error is one of writing. It says nothing of what the file held before."""

_PASSING_SIGNS = {
    "No space left on device": errno.ENOSPC,
    "Disk quota exceeded": errno.EDQUOT,
    "Too many open files in system": errno.ENFILE,
    "Too many open files": errno.EMFILE,
}
"""Words in RocksDB's errors that mean an error of `store.files.PASSING`."""

ROOM = "room"
"""Temporary file in the folder of the index, with which a flush asks whether there is room. RocksDB ignores it."""

ROOM_BYTES = 8 * MIB
"""Bytes that must be free for a flush besides what it writes: for the manifest, and for a compaction to begin."""

DESCRIPTORS_FREE = 8
"""Descriptors that must be free for a flush."""

GROWTH_DIVISOR = 16
"""How often a memtable calls `Index.on_growth` while it fills: so often that a flush can ask for room before it is full."""

PATIENCE_S = 30.0
"""Seconds for which a write waits until RocksDB has recovered from a flush that found no room. RocksDB tries every 5 s."""

RETRY_S = 0.05

_SIGNS_AT_OPEN = (*_SIGNS, "Invalid argument")
"""The last one means that another version has created the index, with options or column families that this version lacks."""

META_KEY = b"Mcovered"
"""Key of the row that says how far the index covers the log."""
_META = Struct("<IQQq")
_ADJUSTED_KEY = b"Madjusted"
_POSITION = Struct("<Q")
OWN_KEYS = (META_KEY, _ADJUSTED_KEY)
"""Keys of the rows that say something about this very index. They don't follow from the log, and no snapshot has them."""
_VERSION = Struct("<I")


class Covered(NamedTuple):
    """How far the index covers the log."""

    position: int
    """Everything before this position is applied."""
    durable: int
    """Everything before this position was durable when the row was written."""
    store_ms: int
    """When the last record before `position` was stored, in ms since 1970. The next record is not older."""


class Batch:
    """The index changes of one commit, which are written atomically. `Index.batch` creates it.

    Parameters:
        changes: of the database of the index.
        is_repeatable: whether the batch can be written again after a failure, which uses up `changes`. This takes time.
    """

    __slots__ = ("_made", "delete", "delete_range", "put", "raw")

    def __init__(self, changes: IndexChanges, *, is_repeatable: bool = False) -> None:
        self.raw = changes
        self._made: list[tuple[str, tuple[bytes, ...]]] | None = [] if is_repeatable else None
        self.put: Callable[[bytes, bytes], None] = partial(self._make, "put") if is_repeatable else changes.put
        self.delete: Callable[[bytes], None] = partial(self._make, "delete") if is_repeatable else changes.delete
        self.delete_range: Callable[[bytes, bytes], None] = (
            partial(self._make, "delete_range") if is_repeatable else changes.delete_range
        )

    def _make(self, name: str, *arguments: bytes) -> None:
        assert self._made is not None
        self._made.append((name, arguments))
        getattr(self.raw, name)(*arguments)

    def repeat(self, changes: IndexChanges) -> bool:
        """Put the same changes into fresh ones; return False if the batch is not repeatable."""
        if self._made is None:
            return False
        self.raw = changes
        for name, arguments in self._made:
            getattr(changes, name)(*arguments)
        return True

    def put_covered(self, covered: Covered) -> None:
        self.put(META_KEY, _META.pack(FORMAT, *covered))

    def put_adjusted(self, position: int) -> None:
        """Note that the index may know more of the log before a position than the log itself: see `Index.adjusted`."""
        self.put(_ADJUSTED_KEY, _POSITION.pack(position))


Upgrade: TypeAlias = "Callable[[Index], None]"
"""Brings the rows of an index of format `FORMAT - 1` to the present one. A start may call it
again for rows that are new already."""


def keep_rows(index: Index) -> None:
    """Leave all rows as they are: an `Upgrade` where no rows have changed."""


class Index:
    """The index of a data directory.

    Parameters:
        data_dir: the node's data directory. The database is in its folder `index`.
        read_only: open an existing index, also beside a running node. Nothing can be written.
        open_database: opens the database.
        patience_s: for how long a write waits while RocksDB finds no room.
        files: has the data directory.

    Raises:
        IndexDamaged: RocksDB can't open the index because it is damaged.
        OSError: RocksDB can't open it for another reason, such as a full disk.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        read_only: bool = False,
        files: Files = SYSTEM_FILES,
        open_database: OpenDatabase = open_rocksdb,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.path = data_dir / DIRECTORY
        self._files = files
        self._marker = None if read_only else data_dir / DAMAGED
        self.is_damaged = False
        """Whether a read or a write has found damage. The process must end then, and the next start rebuilds the index."""
        self.on_damage: Callable[[IndexDamaged], None] = lambda _: None
        """Called with the error when damage is found, before the error is raised."""
        self.on_full: Callable[[OSError], None] = lambda _: None
        """Called, on any thread and maybe many times, when RocksDB has found no room or no descriptor. It may free some."""
        self.on_growth: Callable[[], None] = lambda: None
        """Called after each `memtable_bytes` / `GROWTH_DIVISOR` that were written. It may begin a flush."""
        self._grown_bytes = 0
        self._patience_s = patience_s
        self.is_wary = False
        """Whether batches are kept until they are written. The caller sets it before a flush and while the disk is nearly full,
        because RocksDB may then begin to refuse writes at any moment."""
        if not read_only:
            with suppress(FileNotFoundError, NotADirectoryError):  # the index is new
                unlink_if_there(files, self.path / ROOM)
        try:
            self._db: Database = open_database(self.path, read_only)
        except Exception as error:  # rocksdict raises no narrower class for errors of RocksDB
            raise self._error("opened", error, _SIGNS_AT_OPEN) from error
        self._memtable_bytes = memtable_bytes(files.usage(self.path).total)
        self._cursor: Cursor | None = None
        self._get = self._db.get

    def batch(self) -> Batch:
        """Return a batch without changes."""
        return Batch(self._db.changes(), is_repeatable=self.is_wary)

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None. Raises IndexDamaged, as all methods that read do."""
        try:
            return self._get(key)
        except Exception as error:  # as above
            raise self._error("read", error) from error

    def _error(
        self, verb: str, error: Exception, signs: tuple[str, ...] = _SIGNS, *, tell: bool = True
    ) -> IndexDamaged | OSError:
        """Return the error to raise for an error of RocksDB. If it means damage, tell the next start and `on_damage`.

        When the disk fails to write or sync an open index, the next start rebuilds it too, but the error is that of the disk.

        Args:
            verb: what failed, as a past participle for the message.
            error: from rocksdict.
            signs: words in errors that mean damage.
            tell: whether to call `on_damage`. Other threads must not.
        """
        text = str(error)
        for sign, number in _PASSING_SIGNS.items():
            if sign in text:
                return OSError(number, f"the index can't be {verb}: {text}", str(self.path))
        if not any(sign in text for sign in signs):
            return OSError(errno.EIO, f"the index can't be {verb}: {text}", str(self.path))
        is_unwritten = signs is _SIGNS and _DISK_FAILED in text and _WRITING.search(text) is not None
        damage = IndexDamaged(f"the index {self.path} is damaged and can't be {verb}: {text}; the next start rebuilds it")
        self._note_damage(damage, tell=tell and not is_unwritten)
        return OSError(errno.EIO, f"the index can't be {verb}: {text}", str(self.path)) if is_unwritten else damage

    def _note_damage(self, damage: IndexDamaged, *, tell: bool) -> None:
        if self._marker is not None and not self.is_damaged:
            self.is_damaged = True
            with suppress(OSError):  # the disk is full; the next start then meets the damage itself
                replace_file(self._files, self._marker, f"{damage}\n".encode())
            if tell:
                self.on_damage(damage)

    def wrong(self, key: bytes, error: ValueError) -> IndexDamaged:
        """Return the error to raise for a row whose value is not what was put there, and tell the next start and `on_damage`.

        RocksDB has found no fault with the row: the part that it belongs to has.
        """
        damage = IndexDamaged(f"the index {self.path} is damaged in the row {key.hex()}: {error}; the next start rebuilds it")
        self._note_damage(damage, tell=True)
        return damage

    def covered(self) -> Covered | None:
        """Return how far the index covers the log; None if the index is new.

        Raises:
            DataDirIncompatible: another version wrote the index. It may be deleted, since a start rebuilds it.
        """
        row = self.get(META_KEY)
        if row is None:
            return None
        (version,) = _VERSION.unpack_from(row)
        if version != FORMAT:
            raise DataDirIncompatible(f"{self.path} has format {version}, but this version reads {FORMAT}; delete that folder")
        _, position, durable, store_ms = _META.unpack(row)
        return Covered(position, durable, store_ms)

    def upgrade(self, upgrade: Upgrade) -> bool:
        """Bring an index of the version before to this one, durably. Return False if the index is of another version, or new.

        Args:
            upgrade: changes the rows. A crash may interrupt it, and the next start calls it again.

        Raises:
            IndexDamaged: it has rows that can't be decoded.
        """
        row = self.get(META_KEY)
        if row is None or _VERSION.unpack_from(row)[0] != FORMAT - 1:
            return False
        try:
            upgrade(self)
        except (ValueError, StructError) as error:
            raise IndexDamaged(f"the index {self.path} has rows that can't be upgraded: {error}") from error
        batch = self.batch()
        batch.put_covered(Covered(*_META.unpack(row)[1:]))
        self.write(batch)
        self.flush()
        return True

    def adjusted(self) -> int:
        """Return the position before which the index may know more than the log says, because a repair of the log kept it; 0 if
        there was no such repair."""
        row = self.get(_ADJUSTED_KEY)
        return int(_POSITION.unpack(row)[0]) if row is not None else 0

    def write(self, batch: Batch) -> None:
        """Apply a batch. It is on disk after the next `flush`.

        A batch needs no room on the disk. But RocksDB refuses all writes after a flush that found none, until it has recovered.
        The changes of a batch are no longer in memory, and readers would miss them, so this method waits for up to
        `PATIENCE_S` if `is_wary` was set. `flush` makes this rare, since it asks for room before RocksDB begins.

        Raises:
            OSError: RocksDB refuses the write.
            IndexDamaged: a file is damaged.
        """
        self._cursor = None
        self._grown_bytes += batch.raw.size_in_bytes()
        try:
            self._db.write(batch.raw)
        except Exception as error:  # as above
            self._write_later(batch, self._error("written", error))
        if self._grown_bytes >= self._memtable_bytes // GROWTH_DIVISOR:
            self._grown_bytes = 0
            self.on_growth()

    def _write_later(self, batch: Batch, error: OSError | IndexDamaged) -> None:
        """Apply a batch when RocksDB accepts it. `error` is why it does not yet."""
        give_up_s = monotonic() + self._patience_s
        while isinstance(error, OSError) and error.errno in PASSING and monotonic() < give_up_s:
            self.on_full(error)
            sleep(RETRY_S)
            if not batch.repeat(self._db.changes()):
                break
            try:
                self._db.write(batch.raw)
            except Exception as again:  # as above
                error = self._error("written", again)
            else:
                return
        raise error

    def is_flush_due(self) -> bool:
        """Return whether so much is unflushed that RocksDB would soon flush by itself, without asking whether there is room."""
        return self._db.unflushed_bytes() >= self._memtable_bytes * 3 // 4

    def flush(self) -> None:
        """Write the memtable to disk and wait for it. It releases the GIL and is meant for another thread.

        Raises:
            OSError: the memtable can't be written. With an errno of `store.files.PASSING` there is no room or no descriptor for
                it now, nothing is lost, and the caller flushes again later.
            IndexDamaged: a file is damaged.
        """
        self._ask_for_room(self._db.unflushed_bytes() + min(ROOM_BYTES, self._memtable_bytes))
        try:
            self._db.flush()
        except Exception as error:  # as above
            raised = self._error("flushed", error, tell=False)
            if isinstance(raised, OSError) and raised.errno in PASSING:
                self.on_full(raised)
            raise raised from error

    def _ask_for_room(self, size: int) -> None:
        """Raise OSError if the disk of the index, or a quota, has no room for `size` bytes, or if too few descriptors are left.

        RocksDB must not find that out: it would then refuse writes too, and after an error other than ENOSPC for ever.
        """
        path = self.path / ROOM
        asked: list[File] = []
        try:
            asked.append(self._files.open(path, Mode.NEW))
            asked[0].allocate(0, size)
            while len(asked) < DESCRIPTORS_FREE:
                asked.append(self._files.open(path))
        except FileNotFoundError:
            return  # the folder is gone, and RocksDB says so
        except OSError as error:
            raise OSError(error.errno, f"the index can't be written: {error.strerror}", str(self.path)) from error
        finally:
            for file in asked:
                file.close()
            unlink_if_there(self._files, path)

    def rows(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows whose keys start with `prefix`, in key order, from key `prefix + start` on."""
        cursor = self._db.cursor(after(prefix))
        cursor.seek(prefix + start)
        while cursor.valid():
            yield cursor.key(), cursor.value()
            cursor.next()
        self.check(cursor)

    def cursor(self) -> Cursor:
        """Return an iterator over all rows as they are now, for callers that seek keys themselves.

        It has no bounds. When it is not valid, the caller must call `check` to tell the end from damage.
        """
        return self._db.cursor()

    def figures(self) -> DatabaseFigures:
        """Return what the index takes in memory and on disk."""
        return self._db.figures()

    def last_at_or_before(self, key: bytes, prefix: bytes) -> tuple[bytes, bytes] | None:
        """Return the row with the greatest key up to `key`, if that key starts with `prefix`; else None."""
        return _row_at(self._at_or_before(key), prefix, self.check)

    def first_at_or_after(self, key: bytes, prefix: bytes) -> tuple[bytes, bytes] | None:
        """Return the row with the least key from `key` on, if that key starts with `prefix`; else None."""
        cursor = self._iterator()
        cursor.seek(key)
        return _row_at(cursor, prefix, self.check)

    def view(self) -> IndexView:
        """Return the index as it is now, whatever is written later. It must be released before the index is closed."""
        return IndexView(self._db.cursor(), self._db.cursor(), self.check)

    def rows_around(self, key: bytes, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows with a prefix, from the last row at or before `key` on, or else from the first row.

        It costs a seek. The caller must finish or drop the iterator before it reads anything else.
        """
        cursor = self._at_or_before(key)
        if not cursor.valid() or not cursor.key().startswith(prefix):
            cursor.seek(prefix)
        while cursor.valid():
            found = cursor.key()
            if not found.startswith(prefix):
                return
            yield found, cursor.value()
            cursor.next()
        self.check(cursor)

    def _at_or_before(self, key: bytes) -> Cursor:
        # A new iterator costs several times a seek, and an old one does not see later writes. So one iterator serves all reads
        # between two writes.
        cursor = self._iterator()
        cursor.seek_for_prev(key)
        return cursor

    def _iterator(self) -> Cursor:
        if self._cursor is None:
            self._cursor = self._db.cursor()
        return self._cursor

    def check(self, cursor: Cursor) -> None:
        """Raise IndexDamaged if a cursor has ended because RocksDB could not read, which must not look like an empty queue."""
        try:
            cursor.status()
        except Exception as error:  # as above
            raise self._error("read", error) from error

    def checkpoint(self) -> Path:
        """Make a copy of the index as it is now in the folder `CHECKPOINT`, and return its path. For another thread.

        The files of the copy are hard links where the file system has them. The copy of an earlier call is replaced. rocksdict
        keeps the interpreter while it makes the links, so the caller flushes first, which leaves little else to do.

        Raises:
            OSError: the copy can't be made, for example on a full disk.
            IndexDamaged: a file is damaged. `on_damage` is not called.
        """
        path = self.path.with_name(CHECKPOINT)
        self.remove_checkpoint(path.parent, self._files)
        try:
            self._db.checkpoint(path)
        except Exception as error:  # as above
            raise self._error("copied", error, tell=False) from error
        return path

    @staticmethod
    def remove_checkpoint(data_dir: Path, files: Files = SYSTEM_FILES) -> None:
        """Delete the copy that `checkpoint` has made, if there is one. Raises OSError."""
        if files.exists(data_dir / CHECKPOINT):
            files.rmtree(data_dir / CHECKPOINT)

    def close(self) -> None:
        """Flush and close the index.

        Raises:
            OSError, IndexDamaged: it fails, but not for damage that was found before, nor for want of room or descriptors. The
                next start then replays what was not flushed.
        """
        self._cursor = None
        try:
            self._db.close()
        except Exception as error:  # as above
            was_damaged = self.is_damaged
            raised = self._error("closed", error)
            del self._db, self._get  # RocksDB stays open while it has data that it could not flush
            if isinstance(raised, OSError) and raised.errno in PASSING:
                logger.warning("index.unflushed", why=str(raised))
            elif not was_damaged:
                raise raised from None

    @staticmethod
    def destroy(data_dir: Path, files: Files = SYSTEM_FILES) -> None:
        """Delete the index of a data directory that no process has open. Raises OSError.

        The rename is made durable first, because an index that came back after a power cut would not fit the log any more.
        """
        path, discarded = data_dir / DIRECTORY, data_dir / DISCARDED
        if files.exists(discarded):  # an earlier deletion was killed, maybe before the name was durable
            files.sync_directory(data_dir)
            files.rmtree(discarded)
        if files.exists(path):
            files.rename(path, discarded)
            files.sync_directory(data_dir)
        unlink_if_there(files, data_dir / DAMAGED)
        if files.exists(discarded):
            files.rmtree(discarded)

    @staticmethod
    def damage_of(data_dir: Path, files: Files = SYSTEM_FILES) -> str:
        """Return why the index must be rebuilt, as an earlier process has noted; empty if none has. Raises OSError."""
        marker = data_dir / DAMAGED
        try:
            reason = read_file(files, marker).decode(errors="replace").strip()
        except FileNotFoundError:
            return ""
        except OSError as error:
            reason = f"an earlier process found it damaged, and its note can't be read: {error}"
        return reason or "an earlier process found it damaged"


class IndexView:
    """An index as it was at one moment.

    It uses cursors, which never see later writes.

    Parameters:
        scan, lookup: iterators that were created with no write between them.
        check: raises if an iterator has ended because RocksDB could not read.
    """

    def __init__(self, scan: Cursor, lookup: Cursor, check: Callable[[Cursor], None]) -> None:
        self._scan = scan
        self._lookup = lookup
        self._check = check

    def rows(self, start: bytes, until: bytes = b"\xff" * 64) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows from key `start` to before key `until`, in key order. Only one such iteration may run at a time."""
        return self._rows(self._scan, start, until)

    def rows_of(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows whose keys start with `prefix`, in key order. The caller must finish it before the next lookup."""
        return self._rows(self._lookup, prefix, after(prefix))

    def _rows(self, cursor: Cursor, start: bytes, until: bytes) -> Iterator[tuple[bytes, bytes]]:
        cursor.seek(start)
        while cursor.valid():
            key = cursor.key()
            if key >= until:
                return
            yield key, cursor.value()
            cursor.next()
        self._check(cursor)


def _row_at(cursor: Cursor, prefix: bytes, check: Callable[[Cursor], None]) -> tuple[bytes, bytes] | None:
    """Return the row at which a cursor is, if its key starts with `prefix`; else None."""
    if not cursor.valid():
        check(cursor)
        return None
    found = cursor.key()
    return (found, cursor.value()) if found.startswith(prefix) else None


def after(prefix: bytes) -> bytes:
    """Return the first key after all keys that start with `prefix`."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\xff" * 64
