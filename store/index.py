"""The index: one RocksDB, accessed through rocksdict, that holds state derived from the log.

All key spaces share one column family, and the first byte of a key tells them apart. This is deliberate. With the WAL off, a
manual flush of one of several column families leaves the others behind even if atomic flush is on, because RocksDB flushes only
the requested family. The recovered state would then not be a prefix of what was written. In one column family it always is:
memtables are flushed in order, and each WriteBatch is in one memtable together with the log position that it covers.

The index is disposable: if it is deleted, the next start rebuilds it from the log.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from penstock.store.errors import DataDirIncompatible, IndexDamaged
from penstock.store.segment import sync_directory

DIRECTORY = "index"
DISCARDED = "index.discarded"
"""Name that an index gets before it is deleted, so that a half-deleted index is never opened."""

DAMAGED = "index.damaged"
"""File with the reason why the next start must rebuild the index. Without it, each start would meet the damaged block again."""

_SIGNS = ("Corruption", "No such file or directory", "Input/output error")
"""Words in RocksDB's errors that mean a damaged or missing file. Transient errors, such as a full disk, have none of them."""

_SIGNS_AT_OPEN = (*_SIGNS, "Invalid argument")
"""The last one means that another version has created the index, with options or column families that this version lacks."""

FORMAT = 9
"""Version of the key and value formats. A start rebuilds an index of any other version."""

MEMTABLE_BYTES = 64 * 1024 * 1024
BLOCK_CACHE_BYTES = 256 * 1024 * 1024
"""Size of the block cache. It holds nearly all rows of a million queues of ten entries (`python -m bench store --only queues`).
It is RocksDB's "hyper clock" cache, where a lookup takes no lock."""

BLOCK_BYTES = 4 * 1024
"""Size of a block, which is what a cold read must fetch, verify and decompress."""

BLOOM_BITS = 10

FILES_MAX = 512
"""Maximum number of open files. Each keeps its bloom filter and its index in memory: about 2.5 MB for a file of 64 MB. So an
index of 1 GB takes 40 MB, and no index more than 1.3 GB. Partitioned filters and indexes would be bounded by the block
cache, but then a lookup would need three cached blocks instead of one."""

META_KEY = b"Mcovered"
"""Key of the row that says how far the index covers the log."""
_META = Struct("<IQQq")
_VERSION = Struct("<I")


class KeySpace(bytes, Enum):
    """First byte of a key, which tells whose rows these are."""

    META = b"M"
    QUEUE = b"N"
    NAME = b"F"
    WILDCARD = b"W"
    BACKFILL = b"L"
    ENTRIES = b"Q"
    GROUP = b"G"
    CHECKPOINT = b"C"
    ORDER = b"O"
    DEAD = b"D"
    TRANSACTION = b"X"
    TIMER = b"T"
    RETAINED = b"R"
    RETAINED_LEVEL = b"r"
    RETAINED_LATER = b"l"
    RETAINED_COUNT = b"n"
    SESSION = b"S"
    COPY = b"V"


class Covered(NamedTuple):
    """How far the index covers the log."""

    position: int
    """Everything before this position is applied."""
    durable: int
    """Everything before this position was durable when the row was written."""
    store_ms: int
    """When the last record before `position` was stored, in ms since 1970. The next record is not older."""


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(MEMTABLE_BYTES)
    options.set_max_write_buffer_number(4)
    options.set_max_background_jobs(2)
    options.set_max_open_files(FILES_MAX)
    options.set_keep_log_file_num(2)
    options.set_compression_type(DBCompressionType.lz4())
    blocks = BlockBasedOptions()
    blocks.set_block_cache(Cache.new_hyper_clock_cache(BLOCK_CACHE_BYTES, BLOCK_BYTES))
    blocks.set_block_size(BLOCK_BYTES)
    blocks.set_bloom_filter(BLOOM_BITS, False)
    options.set_block_based_table_factory(blocks)
    return options


class Batch:
    """The index changes of one commit, which are written atomically."""

    __slots__ = ("_batch", "delete", "delete_range", "put")

    def __init__(self) -> None:
        self._batch = WriteBatch(raw_mode=True)
        self.put = self._batch.put
        self.delete = self._batch.delete
        self.delete_range = self._batch.delete_range

    def put_covered(self, covered: Covered) -> None:
        self._batch.put(META_KEY, _META.pack(FORMAT, *covered))

    @property
    def raw(self) -> WriteBatch:
        return self._batch


class Index:
    """The RocksDB of a data directory.

    Parameters:
        data_dir: the node's data directory. The database is in its folder `index`.
        read_only: open an existing index, also beside a running node. Nothing can be written.

    Raises:
        IndexDamaged: RocksDB can't open the index because it is damaged.
        OSError: RocksDB can't open it for another reason, such as a full disk.
    """

    def __init__(self, data_dir: Path, *, read_only: bool = False) -> None:
        self.path = data_dir / DIRECTORY
        self._marker = None if read_only else data_dir / DAMAGED
        self.is_damaged = False
        """Whether a read or a write has found damage. The process must end then, and the next start rebuilds the index."""
        self.on_damage: Callable[[IndexDamaged], None] = lambda _: None
        """Called with the error when damage is found, before the error is raised."""
        access = AccessType.read_only(False) if read_only else AccessType.read_write()
        options = _options()
        # Without explicit families, rocksdict would use the options saved in the database, and a block cache of 8 MiB.
        families = {"default": options}
        try:
            self._db = Rdict(str(self.path), options, column_families=families, access_type=access)
        except Exception as error:  # rocksdict raises no narrower class for errors of RocksDB
            raise self._error("opened", error, _SIGNS_AT_OPEN) from error
        self._write_options = WriteOptions()
        self._write_options.disable_wal = True  # type: ignore[method-assign, assignment] # its stub takes the setter for a method
        self._cursor: RdictIter | None = None
        self._get = self._db.get

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None. Raises IndexDamaged, as all methods that read do."""
        try:
            found: bytes | None = self._get(key)
        except Exception as error:  # as above
            raise self._error("read", error) from error
        return found

    def _error(
        self, verb: str, error: Exception, signs: tuple[str, ...] = _SIGNS, *, tell: bool = True
    ) -> IndexDamaged | OSError:
        """Return the error to raise for an error of RocksDB. If it means damage, tell the next start and `on_damage`.

        Args:
            verb: what failed, as a past participle for the message.
            error: from rocksdict.
            signs: words in errors that mean damage.
            tell: whether to call `on_damage`. Other threads must not.
        """
        text = str(error)
        if not any(sign in text for sign in signs):
            return OSError(errno.EIO, f"the index can't be {verb}: {text}", str(self.path))
        damage = IndexDamaged(f"the index {self.path} is damaged and can't be {verb}: {text}; the next start rebuilds it")
        if self._marker is not None and not self.is_damaged:
            self.is_damaged = True
            with suppress(OSError):  # the disk is full; the next start then meets the damage itself
                self._marker.write_text(f"{damage}\n")
                sync_directory(self._marker.parent)
            if tell:
                self.on_damage(damage)
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

    def write(self, batch: Batch) -> None:
        """Apply a batch. It is on disk after the next `flush`.

        Raises:
            OSError: RocksDB refuses the write, as it does after a failed flush or compaction.
            IndexDamaged: a file is damaged.
        """
        self._cursor = None
        try:
            self._db.write(batch.raw, self._write_options)
        except Exception as error:  # as above
            raise self._error("written", error) from error

    def flush(self) -> None:
        """Write the memtable to disk and wait for it. It releases the GIL and is meant for another thread.

        Raises:
            OSError: the memtable can't be written, for example on a full disk. RocksDB then accepts no more writes.
            IndexDamaged: a file is damaged.
        """
        try:
            self._db.flush(True)
        except Exception as error:  # as above
            raise self._error("flushed", error, tell=False) from error

    def rows(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows whose keys start with `prefix`, in key order, from key `prefix + start` on."""
        options = ReadOptions()
        options.set_iterate_upper_bound(after(prefix))
        # `Rdict.items` won't do: at a damaged block it ends as if there were no more rows.
        cursor = self._db.iter(options)
        cursor.seek(prefix + start)
        while cursor.valid():
            yield cursor.key(), cursor.value()
            cursor.next()
        self.check(cursor)

    def cursor(self) -> RdictIter:
        """Return an iterator over all rows as they are now, for callers that seek keys themselves.

        It has no bounds. When it is not valid, the caller must call `check` to tell the end from damage.
        """
        return self._db.iter()

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
        return IndexView(self._db.iter(), self._db.iter(), self.check)

    def rows_around(self, key: bytes, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows with a prefix, from the last row at or before `key` on, or else from the first row.

        It costs a seek. The caller must finish or drop the iterator before it reads anything else.
        """
        cursor = self._at_or_before(key)
        if not cursor.valid() or not cursor.key().startswith(prefix):
            cursor.seek(prefix)
        while cursor.valid():
            found: bytes = cursor.key()
            if not found.startswith(prefix):
                return
            yield found, cursor.value()
            cursor.next()
        self.check(cursor)

    def _at_or_before(self, key: bytes) -> RdictIter:
        # A new iterator costs several times a seek, and an old one does not see later writes. So one iterator serves all reads
        # between two writes.
        cursor = self._iterator()
        cursor.seek_for_prev(key)
        return cursor

    def _iterator(self) -> RdictIter:
        if self._cursor is None:
            self._cursor = self._db.iter()
        return self._cursor

    def check(self, cursor: RdictIter) -> None:
        """Raise IndexDamaged if a cursor has ended because RocksDB could not read, which must not look like an empty queue."""
        try:
            cursor.status()
        except Exception as error:  # as above
            raise self._error("read", error) from error

    def close(self) -> None:
        """Flush and close the index. Raises OSError or IndexDamaged, but not for damage that was found before."""
        self._cursor = None
        try:
            self._db.close()
        except Exception as error:  # as above
            was_damaged = self.is_damaged
            damage = self._error("closed", error)
            del self._db, self._get  # RocksDB stays open while it has data that it could not flush
            if not was_damaged:
                raise damage from None

    @staticmethod
    def destroy(data_dir: Path) -> None:
        """Delete the index of a data directory that no process has open. Raises OSError.

        The rename is made durable first, because an index that came back after a power cut would not fit the log any more.
        """
        path, discarded = data_dir / DIRECTORY, data_dir / DISCARDED
        if discarded.exists():  # an earlier deletion was killed
            shutil.rmtree(discarded)
        if path.exists():
            path.rename(discarded)
            sync_directory(data_dir)
        (data_dir / DAMAGED).unlink(missing_ok=True)
        if discarded.exists():
            shutil.rmtree(discarded)

    @staticmethod
    def damage_of(data_dir: Path) -> str:
        """Return why the index must be rebuilt, as an earlier process has noted; empty if none has. Raises OSError."""
        marker = data_dir / DAMAGED
        return (marker.read_text().strip() or "an earlier process found it damaged") if marker.exists() else ""


class IndexView:
    """An index as it was at one moment.

    It uses iterators, which never see later writes. The iterators of rocksdict's `Snapshot` do.

    Parameters:
        scan, lookup: iterators that were created with no write between them.
        check: raises if an iterator has ended because RocksDB could not read.
    """

    def __init__(self, scan: RdictIter, lookup: RdictIter, check: Callable[[RdictIter], None]) -> None:
        self._scan = scan
        self._lookup = lookup
        self._check = check

    def rows(self, start: bytes, until: bytes = b"\xff" * 64) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows from key `start` to before key `until`, in key order. Only one such iteration may run at a time."""
        return self._rows(self._scan, start, until)

    def rows_of(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows whose keys start with `prefix`, in key order. The caller must finish it before the next lookup."""
        return self._rows(self._lookup, prefix, after(prefix))

    def _rows(self, cursor: RdictIter, start: bytes, until: bytes) -> Iterator[tuple[bytes, bytes]]:
        cursor.seek(start)
        while cursor.valid():
            key: bytes = cursor.key()
            if key >= until:
                return
            yield key, cursor.value()
            cursor.next()
        self._check(cursor)


def _row_at(cursor: RdictIter, prefix: bytes, check: Callable[[RdictIter], None]) -> tuple[bytes, bytes] | None:
    """Return the row at which a cursor is, if its key starts with `prefix`; else None."""
    if not cursor.valid():
        check(cursor)
        return None
    found: bytes = cursor.key()
    return (found, cursor.value()) if found.startswith(prefix) else None


def after(prefix: bytes) -> bytes:
    """Return the first key after all keys that start with `prefix`."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\xff" * 64
