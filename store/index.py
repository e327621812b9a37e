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
"""What an index is renamed to before it is deleted, so that half of one is never opened."""

DAMAGED = "index.damaged"
"""A file with the reason why the next start rebuilds the index. Without it a node that meets a damaged block would do so at
each start."""

_SIGNS = ("Corruption", "No such file or directory", "Input/output error")
"""What RocksDB says where a file of it is damaged or gone. What passes isn't on this list: a full disk, no descriptors left."""

_SIGNS_AT_OPEN = (*_SIGNS, "Invalid argument")
"""The last: another version has made it, with options or column families that this one doesn't know."""

FORMAT = 9
"""Version of the key and value formats. Another one is not read: a start rebuilds the index."""

MEMTABLE_BYTES = 64 * 1024 * 1024
BLOCK_CACHE_BYTES = 256 * 1024 * 1024
"""Nearly all rows of a million queues of ten entries: reads of them at random, 84,000 a second with 192 MiB, are 101,000 with
this. RocksDB's "hyper clock" cache: a lookup takes no lock and moves nothing in a list."""

BLOCK_BYTES = 4 * 1024
"""What one cold read has to fetch, check and unpack."""

BLOOM_BITS = 10

FILES_MAX = 512
"""Files that are open. Each has its bloom filter and its index in memory, whole: about 2.5 MB for the 64 MB of a file, so that
an index of 1 GB takes 40 MB, and none more than 1.3 GB. Cut into pieces, of which the cache holds those in use, they would be
bounded by that; but then a lookup finds three blocks in the cache in place of one, and takes a third longer (and one that finds
nothing, as for the filter of a new topic, twice as long)."""

META_KEY = b"Mcovered"
"""Key of the row that says how far the index reflects the log."""
_META = Struct("<IQQq")
_VERSION = Struct("<I")


class KeySpace(bytes, Enum):
    """First byte of a key: which part's rows."""

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

    Raises:
        IndexDamaged: RocksDB can't open what is there.
        OSError: RocksDB can't open it for another reason, such as a full disk.
    """

    def __init__(self, data_dir: Path, *, read_only: bool = False) -> None:
        self.path = data_dir / DIRECTORY
        self._marker = None if read_only else data_dir / DAMAGED
        self.is_damaged = False
        """True once a read or a write has found damage. This process must end, and the next start rebuilds the index."""
        self.on_damage: Callable[[IndexDamaged], None] = lambda _: None
        """Called where damage is found, before it is raised."""
        access = AccessType.read_only(False) if read_only else AccessType.read_write()
        options = _options()
        # Named, or rocksdict would open what is there with the options that were saved with it, and a block cache of 8 MiB.
        families = {"default": options}
        try:
            self._db = Rdict(str(self.path), options, column_families=families, access_type=access)
        except Exception as error:  # rocksdict has no narrower class for what RocksDB reports
            raise self._error("opened", error, _SIGNS_AT_OPEN) from error
        self._write_options = WriteOptions()
        self._write_options.disable_wal = True  # type: ignore[method-assign, assignment] # its stub takes the setter for a method
        self._cursor: RdictIter | None = None
        self._get = self._db.get

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None. Raises IndexDamaged, as all that reads does."""
        try:
            found: bytes | None = self._get(key)
        except Exception as error:  # as above
            raise self._error("read", error) from error
        return found

    def _error(
        self, verb: str, error: Exception, signs: tuple[str, ...] = _SIGNS, *, tell: bool = True
    ) -> IndexDamaged | OSError:
        """Return what to raise for what RocksDB reports; where that is damage, let the next start know.

        Without `tell`, as on another thread, `on_damage` is not called.
        """
        text = str(error)
        if not any(sign in text for sign in signs):
            return OSError(errno.EIO, f"the index can't be {verb}: {text}", str(self.path))
        damage = IndexDamaged(f"the index {self.path} is damaged, it can't be {verb}: {text}; the next start rebuilds it")
        if self._marker is not None and not self.is_damaged:
            self.is_damaged = True
            with suppress(OSError):  # a full disk: then the next start meets the damage by itself, and tries again
                self._marker.write_text(f"{damage}\n")
                sync_directory(self._marker.parent)
            if tell:
                self.on_damage(damage)
        return damage

    def covered(self) -> Covered | None:
        """Return how far the index reflects the log; None where it is new.

        Raises:
            DataDirIncompatible: another version wrote it. It can be deleted: a start rebuilds it.
        """
        row = self.get(META_KEY)
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
            IndexDamaged: it has failed because a file is damaged.
        """
        self._cursor = None
        try:
            self._db.write(batch.raw, self._write_options)
        except Exception as error:  # as above
            raise self._error("written", error) from error

    def flush(self) -> None:
        """Write the memtable to disk and wait. Releases the GIL: meant for another thread.

        Raises:
            OSError: it can't be written, as on a full disk. RocksDB takes no more writes then.
            IndexDamaged: a file is damaged.
        """
        try:
            self._db.flush(True)
        except Exception as error:  # as above
            raise self._error("flushed", error, tell=False) from error

    def rows(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows whose key starts with `prefix`, in key order, from key `prefix + start` on."""
        options = ReadOptions()
        options.set_iterate_upper_bound(after(prefix))
        # Not `Rdict.items`: at a damaged block that ends as if there were no more rows.
        cursor = self._db.iter(options)
        cursor.seek(prefix + start)
        while cursor.valid():
            yield cursor.key(), cursor.value()
            cursor.next()
        self.check(cursor)

    def cursor(self) -> RdictIter:
        """Return an iterator over all rows as they are now, to be sought to a key by whoever leaps.

        It has no bounds. Where it is not valid, `check` tells whether that is the end.
        """
        return self._db.iter()

    def last_at_or_before(self, key: bytes, prefix: bytes) -> tuple[bytes, bytes] | None:
        """Return the row with the greatest key that isn't above `key`, if it starts with `prefix`."""
        return _row_at(self._at_or_before(key), prefix, self.check)

    def first_at_or_after(self, key: bytes, prefix: bytes) -> tuple[bytes, bytes] | None:
        """Return the row with the least key that isn't below `key`, if it starts with `prefix`."""
        cursor = self._iterator()
        cursor.seek(key)
        return _row_at(cursor, prefix, self.check)

    def view(self) -> IndexView:
        """Return the index as it is now, whatever is written later. To be let go before the index is closed."""
        return IndexView(self._db.iter(), self._db.iter(), self.check)

    def rows_around(self, key: bytes, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows of the queue that `prefix` is of, from the last one at or before `key` on, or else from the first.

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
        self.check(cursor)

    def _at_or_before(self, key: bytes) -> RdictIter:
        # A new iterator costs four times a seek, and an old one does not see what was written since: one serves all reads
        # between two writes.
        cursor = self._iterator()
        cursor.seek_for_prev(key)
        return cursor

    def _iterator(self) -> RdictIter:
        if self._cursor is None:
            self._cursor = self._db.iter()
        return self._cursor

    def check(self, cursor: RdictIter) -> None:
        """Raise IndexDamaged where a cursor ended because RocksDB could not read: that must not pass for an empty queue."""
        try:
            cursor.status()
        except Exception as error:  # as above
            raise self._error("read", error) from error

    def close(self) -> None:
        """Flush and close. Raises OSError, or IndexDamaged, unless that is what was found before."""
        self._cursor = None
        try:
            self._db.close()
        except Exception as error:  # as above
            was_damaged = self.is_damaged
            damage = self._error("closed", error)
            del self._db, self._get  # what it could not flush keeps it open
            if not was_damaged:
                raise damage from None

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
        (data_dir / DAMAGED).unlink(missing_ok=True)
        if discarded.exists():
            shutil.rmtree(discarded)

    @staticmethod
    def damage_of(data_dir: Path) -> str:
        """Return why an earlier process found that the index must be rebuilt; empty where none did. Raises OSError."""
        marker = data_dir / DAMAGED
        return (marker.read_text().strip() or "an earlier process found it damaged") if marker.exists() else ""


class IndexView:
    """An index as it was at one moment.

    Iterators, not rocksdict's `Snapshot`: what that gives to iterate with sees later writes. An iterator never does.

    Parameters:
        scan, lookup: iterators that were made with no write between them.
        check: raises where an iterator ended because RocksDB could not read.
    """

    def __init__(self, scan: RdictIter, lookup: RdictIter, check: Callable[[RdictIter], None]) -> None:
        self._scan = scan
        self._lookup = lookup
        self._check = check

    def rows(self, start: bytes, until: bytes = b"\xff" * 64) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows from key `start` to before key `until`, in key order. One at a time; the other methods may go on."""
        return self._rows(self._scan, start, until)

    def rows_of(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows whose key starts with `prefix`, in key order. To be used up before anything else is looked up."""
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
    """Return the row that a cursor is at, if its key starts with `prefix`."""
    if not cursor.valid():
        check(cursor)
        return None
    found: bytes = cursor.key()
    return (found, cursor.value()) if found.startswith(prefix) else None


def after(prefix: bytes) -> bytes:
    """Return the first key behind all keys that start with `prefix`."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\xff" * 64
