"""The index: one RocksDB, through rocksdict, that holds everything that can be derived from the log.

All key spaces share one column family and are told apart by the first byte of the key. That is deliberate: with the WAL
off, a manual flush of one column family of several leaves the others behind even where atomic flush is on (RocksDB
flushes only the family that was asked for), so what is recovered would not be a prefix of what was written. In one
column family it always is: memtables are flushed in order, and each WriteBatch is in one memtable, together with the log
position that it covers.

The index is disposable. Delete it and a start rebuilds it from the log.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from struct import Struct
from typing import NamedTuple, cast

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    Snapshot,
    WriteBatch,
    WriteOptions,
)

from store.errors import DataDirIncompatible
from store.segment import sync_directory

DIRECTORY = "index"
DISCARDED = "index.discarded"
"""What an index is renamed to before it is deleted, so that half of one is never opened."""

FORMAT = 5
"""Version of the key and value formats. Another one is not read: a start rebuilds the index."""

MEMTABLE_BYTES = 64 * 1024 * 1024
BLOCK_CACHE_BYTES = 64 * 1024 * 1024
BLOCK_BYTES = 16 * 1024
BLOOM_BITS = 10

META_KEY = b"Mcovered"
"""Key of the row that says how far the index reflects the log."""
_META = Struct("<IQQq")
_VERSION = Struct("<I")


class Space(bytes, Enum):
    """First byte of a key: which part's rows."""

    META = b"M"
    QUEUE = b"N"
    NAME = b"F"
    WILDCARD = b"W"
    FILLING = b"L"
    ENTRIES = b"Q"
    GROUP = b"G"
    CHECKPOINT = b"C"
    TIMER = b"T"
    RETAINED = b"R"
    RETAINED_LEVEL = b"r"
    RETAINED_LATER = b"l"
    RETAINED_COUNT = b"n"
    SESSION = b"S"
    COPY = b"V"


class Covered(NamedTuple):
    """How far the index reflects the log."""

    position: int
    """Everything before this position has been applied."""
    durable: int
    """Everything before this position was durable when this was written."""
    store_ms: int
    """Time of storing of the last record before `position`: the next one is not older."""


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(MEMTABLE_BYTES)
    options.set_max_write_buffer_number(4)
    options.set_max_background_jobs(2)
    options.set_max_open_files(512)
    options.set_keep_log_file_num(2)
    options.set_compression_type(DBCompressionType.lz4())
    blocks = BlockBasedOptions()
    blocks.set_block_cache(Cache(BLOCK_CACHE_BYTES))
    blocks.set_block_size(BLOCK_BYTES)
    blocks.set_bloom_filter(BLOOM_BITS, False)
    blocks.set_cache_index_and_filter_blocks(True)
    options.set_block_based_table_factory(blocks)
    return options


class Batch:
    """The index changes of one commit, written as one."""

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
        data_dir: the node's data directory; the database lies in its folder `index`.
        read_only: open what is there, beside a live node; nothing can be written.
    """

    def __init__(self, data_dir: Path, *, read_only: bool = False) -> None:
        self.path = data_dir / DIRECTORY
        access = AccessType.read_only(False) if read_only else AccessType.read_write()
        self._db = Rdict(str(self.path), _options(), access_type=access)
        self._write_options = WriteOptions()
        self._write_options.disable_wal = True  # type: ignore[method-assign, assignment] # its stub takes the setter for a method
        self._cursor: RdictIter | None = None
        self.get = self._db.get

    def covered(self) -> Covered | None:
        """Return how far the index reflects the log; None where it is new.

        Raises:
            DataDirIncompatible: another version wrote it. It can be deleted: a start rebuilds it.
        """
        row = self._db.get(META_KEY)
        if row is None:
            return None
        (version,) = _VERSION.unpack_from(row)
        if version != FORMAT:
            raise DataDirIncompatible(f"{self.path} has format {version}, this version reads {FORMAT}: delete that folder")
        _, position, durable, store_ms = _META.unpack(row)
        return Covered(position, durable, store_ms)

    def write(self, batch: Batch) -> None:
        """Apply a batch. It is on disk once a `flush` that began later has ended.

        Raises:
            OSError: RocksDB refuses, as it does once a flush or a compaction of its own has failed.
        """
        self._cursor = None
        try:
            self._db.write(batch.raw, self._write_options)
        except Exception as error:  # rocksdict has no narrower class for what RocksDB reports
            raise OSError(errno.EIO, f"the index can't be written: {error}", str(self.path)) from error

    def flush(self) -> None:
        """Write the memtable to disk and wait. Releases the GIL: meant for another thread."""
        self._db.flush(True)

    def rows(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows whose key starts with `prefix`, in key order, from key `prefix + start` on."""
        options = ReadOptions()
        options.set_iterate_upper_bound(after(prefix))
        # In raw mode keys and values are bytes, which the stub doesn't know.
        yield from cast(Iterator[tuple[bytes, bytes]], self._db.items(from_key=prefix + start, read_opt=options))

    def cursor(self) -> RdictIter:
        """Return an iterator over all rows as they are now, to be sought to a key by whoever leaps. It has no bounds."""
        return self._db.iter()

    def last_at_or_before(self, key: bytes, prefix: bytes) -> tuple[bytes, bytes] | None:
        """Return the row with the greatest key that isn't above `key`, if it starts with `prefix`."""
        return _row_at(self._at_or_before(key), prefix)

    def first_at_or_after(self, key: bytes, prefix: bytes) -> tuple[bytes, bytes] | None:
        """Return the row with the least key that isn't below `key`, if it starts with `prefix`."""
        cursor = self._iterator()
        cursor.seek(key)
        return _row_at(cursor, prefix)

    def view(self) -> IndexView:
        """Return the index as it is now, whatever is written later. To be let go before the index is closed."""
        return IndexView(self._db.snapshot())

    def rows_around(self, key: bytes, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows whose key starts with `prefix`, from the last one at or before `key` on, or else from the first.

        Costs a seek. To be used up, or left, before anything else is read.
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
        cursor.status()

    def _at_or_before(self, key: bytes) -> RdictIter:
        # A new iterator costs four times a seek, and an old one does not see what was written since: one serves all reads
        # between two writes. Where it is not valid, `status` raises if that is because RocksDB could not read: a block that
        # is damaged must not pass for a queue that is empty.
        cursor = self._iterator()
        cursor.seek_for_prev(key)
        return cursor

    def _iterator(self) -> RdictIter:
        if self._cursor is None:
            self._cursor = self._db.iter()
        return self._cursor

    def close(self) -> None:
        self._cursor = None
        self._db.close()

    @staticmethod
    def destroy(data_dir: Path) -> None:
        """Delete the index of a data directory that no process has open. Raises OSError.

        The rename is durable first: an index that came back after a power cut would not belong to what the log holds by then.
        """
        path, discarded = data_dir / DIRECTORY, data_dir / DISCARDED
        if discarded.exists():  # killed in between, the last time
            shutil.rmtree(discarded)
        if path.exists():
            path.rename(discarded)
            sync_directory(data_dir)
            shutil.rmtree(discarded)


class IndexView:
    """An index as it was at one moment.

    Parameters:
        snapshot: RocksDB's.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._cursor = snapshot.iter()

    def rows(self, start: bytes, until: bytes = b"\xff" * 64) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows from key `start` to before key `until`, in key order."""
        cursor = self._snapshot.iter()
        cursor.seek(start)
        while cursor.valid():
            key: bytes = cursor.key()
            if key >= until:
                return
            yield key, cursor.value()
            cursor.next()
        cursor.status()

    def last_at_or_before(self, key: bytes, prefix: bytes) -> tuple[bytes, bytes] | None:
        """Return the row with the greatest key that isn't above `key`, if it starts with `prefix`."""
        self._cursor.seek_for_prev(key)
        return _row_at(self._cursor, prefix)


def _row_at(cursor: RdictIter, prefix: bytes) -> tuple[bytes, bytes] | None:
    """Return the row that an iterator is at, if its key starts with `prefix`."""
    if not cursor.valid():
        cursor.status()
        return None
    found: bytes = cursor.key()
    return (found, cursor.value()) if found.startswith(prefix) else None


def after(prefix: bytes) -> bytes:
    """Return the first key behind all keys that start with `prefix`."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\xff" * 64
