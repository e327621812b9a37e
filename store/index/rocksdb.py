"""RocksDB as the index uses it, accessed through rocksdict, and what the index needs of a database.

The simulation of `tests/simulation` passes an ordered map in place of RocksDB. What it must keep to: memtables are flushed in
order, so what a crash leaves is a prefix of the writes, and at least those that the last completed `flush` covered.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DBCompressionType,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from penstock.store.descriptors import descriptor_limit, index_files_max

MEMTABLE_BYTES = 64 * 1024 * 1024
"""Size at which RocksDB flushes a memtable by itself. After a flush that found no room, it goes on when as much is free."""

MEMTABLE_DIVISOR = 64
"""On a small disk, a memtable is no larger than the disk divided by this."""

MEMTABLE_BYTES_MIN = 1024 * 1024
BLOCK_CACHE_BYTES = 256 * 1024 * 1024
"""Size of the block cache. It holds nearly all rows of a million queues of ten entries (`python -m bench store --only queues`).
It is RocksDB's "hyper clock" cache, where a lookup takes no lock."""

BLOCK_CACHE_BYTES_MIN = 16 * 1024 * 1024
"""Size of the block cache of an index without files."""

CACHE_BYTES_PER_BYTE = 4
"""Bytes of the block cache for each byte of the files, which are compressed, up to `BLOCK_CACHE_BYTES`. After a compaction the
blocks of deleted files stay in the cache until others take their place. So a large cache beside a small index would fill with
blocks that nobody can read any more, and the node would grow for days (`python -m bench soak`)."""

BLOCK_BYTES = 4 * 1024
"""Size of a block, which is what a cold read must fetch, verify and decompress."""

BLOOM_BITS = 10


class IndexChanges(Protocol):
    """IndexChanges that are written together or not at all."""

    def put(self, key: bytes, value: bytes, /) -> None:
        """Set the value of a key."""

    def delete(self, key: bytes, /) -> None:
        """Delete a key, which need not exist."""

    def delete_range(self, begin: bytes, end: bytes, /) -> None:
        """Delete the keys from `begin` to before `end`."""

    def size_in_bytes(self) -> int:
        """Return about how many bytes the changes take."""
        ...


class Cursor(Protocol):
    """Walks the rows in key order, as they were when the cursor was created."""

    def seek(self, key: bytes, /) -> None:
        """Go to the first row at or after `key`."""

    def seek_for_prev(self, key: bytes, /) -> None:
        """Go to the last row at or before `key`."""

    def next(self) -> None:
        """Go to the next row."""

    def valid(self) -> bool:
        """Return whether the cursor is at a row. If it is not, `status` tells the end from an error."""
        ...

    def key(self) -> bytes:
        """Return the key of the row."""
        ...

    def value(self) -> bytes:
        """Return the value of the row."""
        ...

    def status(self) -> None:
        """Raise if the cursor has ended because the database could not read."""


class DatabaseFigures(NamedTuple):
    """What a database takes, in bytes, about how many rows it has, and whether compactions keep up."""

    memtables: int
    """Memory of rows that are not in a file yet, with those that are being written."""
    block_cache: int
    """Memory of the blocks that are cached, with the cache's own table."""
    block_cache_max: int
    """Memory that cached blocks may take at the moment. It follows the size of the files, up to `BLOCK_CACHE_BYTES`."""
    tables: int
    """Memory of the filters and indexes of the open files."""
    files: int
    """Size of the files that hold present rows. Deleted rows count until a compaction has passed them."""
    rows: int
    """Estimate of the number of rows."""
    pending_compaction: int
    """Bytes that compactions still have to rewrite. Above a bound, RocksDB slows writes down."""
    running: int
    """Number of compactions that run."""
    slowed_bytes_per_s: int
    """Rate to which RocksDB has slowed writes down, in bytes per second; 0 while it has not."""
    stopped: int
    """1 while RocksDB takes no writes, because compactions are too far behind; else 0."""
    errors: int
    """Number of errors in the background, such as failed writes."""


class Database(Protocol):
    """An ordered map on disk. Its methods raise whatever its library raises; the index tells damage from other errors.

    What is written is on disk after the next `flush`, or earlier, in the order of the writes.
    """

    def get(self, key: bytes, /) -> bytes | None:
        """Return the value of a key, or None."""
        ...

    def changes(self) -> IndexChanges:
        """Return an empty set of changes for `write`."""
        ...

    def write(self, changes: IndexChanges, /) -> None:
        """Apply changes atomically."""

    def flush(self) -> None:
        """Write everything to disk and wait for it. Another thread may call it."""

    def unflushed_bytes(self) -> int:
        """Return about how many bytes the next `flush` writes. Memory that only a cursor still holds does not count."""
        ...

    def cursor(self, until: bytes | None = None, /) -> Cursor:
        """Return a cursor over the rows as they are now; with `until`, over those before that key."""
        ...

    def checkpoint(self, path: Path, /) -> None:
        """Copy the database as it is now to a new folder, by hard links where they work. Another thread may call it."""

    def figures(self) -> DatabaseFigures:
        """Return what the database takes at the moment."""
        ...

    def close(self) -> None:
        """Flush and close the database."""


OpenDatabase = Callable[[Path, bool], Database]
"""Opens the database in a folder, which is created if need be; read-only if the second argument is true."""


def memtable_bytes(total: int) -> int:
    """Return the size of a memtable on a disk with `total` bytes."""
    return max(min(MEMTABLE_BYTES, total // MEMTABLE_DIVISOR), MEMTABLE_BYTES_MIN)


def _options(path: Path, cache: Cache) -> Options:
    disk = os.statvfs(path if path.exists() else path.parent)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(memtable_bytes(disk.f_blocks * disk.f_frsize))
    options.set_max_write_buffer_number(4)
    options.set_max_background_jobs(2)
    options.set_max_open_files(index_files_max(descriptor_limit()))
    options.set_keep_log_file_num(2)
    options.set_compression_type(DBCompressionType.lz4())
    blocks = BlockBasedOptions()
    blocks.set_block_cache(cache)
    blocks.set_block_size(BLOCK_BYTES)
    blocks.set_bloom_filter(BLOOM_BITS, False)
    options.set_block_based_table_factory(blocks)
    return options


_FIGURES = (
    "rocksdb.size-all-mem-tables",
    "rocksdb.block-cache-usage",
    "rocksdb.block-cache-capacity",
    "rocksdb.estimate-table-readers-mem",
    "rocksdb.live-sst-files-size",
    "rocksdb.estimate-num-keys",
    "rocksdb.estimate-pending-compaction-bytes",
    "rocksdb.num-running-compactions",
    "rocksdb.actual-delayed-write-rate",
    "rocksdb.is-write-stopped",
    "rocksdb.background-errors",
)
"""RocksDB's names of the `DatabaseFigures`."""


class RocksDB:
    """The RocksDB in a folder. Its write-ahead log is off, because the log of the store serves as one.

    Parameters:
        path: the folder.
        read_only: open an existing database, also beside the process that writes it.
    """

    __slots__ = ("_cache", "_db", "_write_options", "get")

    def __init__(self, path: Path, read_only: bool) -> None:
        access = AccessType.read_only(False) if read_only else AccessType.read_write()
        self._cache = Cache.new_hyper_clock_cache(BLOCK_CACHE_BYTES, BLOCK_BYTES)
        options = _options(path, self._cache)
        # Without explicit families, rocksdict would use the options saved in the database, and a block cache of 8 MiB.
        families = {"default": options}
        self._db = Rdict(str(path), options, column_families=families, access_type=access)
        self._write_options = WriteOptions()
        self._write_options.disable_wal = True  # type: ignore[method-assign, assignment] # its stub takes the setter for a method
        self.get: Callable[[bytes], bytes | None] = self._db.get
        self._fit_cache()

    def changes(self) -> IndexChanges:
        return WriteBatch(raw_mode=True)

    def write(self, changes: IndexChanges) -> None:
        assert isinstance(changes, WriteBatch)
        self._db.write(changes, self._write_options)

    def flush(self) -> None:
        self._db.flush(True)
        self._fit_cache()

    def _fit_cache(self) -> None:
        """Give the block cache the size that the files need. RocksDB drops blocks beyond that as others come."""
        files = self._db.property_int_value("rocksdb.live-sst-files-size") or 0
        self._cache.set_capacity(min(BLOCK_CACHE_BYTES_MIN + CACHE_BYTES_PER_BYTE * files, BLOCK_CACHE_BYTES))

    def unflushed_bytes(self) -> int:
        return self._db.property_int_value("rocksdb.cur-size-all-mem-tables") or 0

    def cursor(self, until: bytes | None = None) -> Cursor:
        # `Rdict.items` won't do: at a damaged block it ends as if there were no more rows. The iterators of rocksdict's
        # `Snapshot` won't do either: they see later writes.
        if until is None:
            return self._db.iter()
        options = ReadOptions()
        options.set_iterate_upper_bound(until)
        return BoundedCursor(self._db.iter(options), options)

    def checkpoint(self, path: Path) -> None:
        Checkpoint(self._db).create_checkpoint(str(path))

    def figures(self) -> DatabaseFigures:
        return DatabaseFigures(*(self._db.property_int_value(name) or 0 for name in _FIGURES))

    def close(self) -> None:
        self._db.close()


class BoundedCursor:
    """A cursor that ends at a key.

    Parameters:
        rows: the iterator.
        options: hold the key at which it ends. rocksdict does not keep them, and RocksDB would go on with freed memory.
    """

    __slots__ = ("_options", "key", "next", "seek", "seek_for_prev", "status", "valid", "value")

    def __init__(self, rows: RdictIter, options: ReadOptions) -> None:
        self._options = options
        self.seek = rows.seek
        self.seek_for_prev = rows.seek_for_prev
        self.next = rows.next
        self.valid = rows.valid
        self.key = rows.key
        self.value = rows.value
        self.status = rows.status


def open_rocksdb(path: Path, read_only: bool) -> Database:
    """Return the RocksDB in a folder. Raises what rocksdict raises."""
    return RocksDB(path, read_only)
