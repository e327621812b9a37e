"""Light queues: small indexes that let a million topics and wildcards read one log.

A queue is a topic filter with an integer id. Its entries point at records; the entries of one commit are one row:

    key    b"Q", queue id u32 big-endian, offset of the first entry u64 big-endian
    value  entries of 16 bytes: position u64, size u32, aux u32 (little-endian); none in a row that only says where a queue is,
           whose entries are all before the log's start

`aux` is the tag's hash in a queue of messages, and the attempt in a retry queue. One row per queue and commit: a hot
queue costs one put a batch, not one a message. A lookup seeks to the last row at or before the offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any, Literal

import numpy as np

from store.index import Batch, Index, Space, after

ENTRY = Struct("<QII")
ENTRY_DTYPE = np.dtype([("position", "<u8"), ("size", "<u4"), ("aux", "<u4")])
ENTRY_BYTES = ENTRY.size
assert ENTRY_DTYPE.itemsize == ENTRY_BYTES

RESTORED = 0x4000_0000
"""Queue ids from here to `TRANSIENT` are of roots whose declaration was damaged. They follow from the filter, so that each
rebuild gives the same, and no record names another queue by them."""

TRANSIENT = 0x8000_0000
"""Queue ids from here on last as long as the process: no record declares them, and a start deletes their entries."""

_KEY = Struct(">cIQ")
_PREFIX = Struct(">cI")

Start = Literal["earliest", "latest"]
"""Where a queue that is new begins: with all that the log still has, or with what comes from now on."""

Watcher = Callable[["LightQueue", int, bytes], None]
"""Called after a commit with the queue, the offset of the first new entry, and the new entries."""


def queue_prefix(queue_id: int) -> bytes:
    """Return what all keys of a queue's entries start with."""
    return _PREFIX.pack(Space.ENTRIES, queue_id)


class LightQueue:
    """One light queue. Only `Queues` writes it; whoever holds it may read and watch it.

    `next_offset` counts entries that a commit hasn't written yet; readers see those below `committed_offset`.
    """

    __slots__ = (
        "__weakref__",
        "filter",
        "id",
        "index",
        "next_offset",
        "owners",
        "pending",
        "pending_from",
        "start",
        "watchers",
    )

    def __init__(self, queue_id: int, topic_filter: str, index: Index, next_offset: int, start: Start = "latest") -> None:
        self.id = queue_id
        self.filter = topic_filter
        self.start: Start = start
        self.index = index
        self.owners: set[str] = set()
        self.watchers: list[Watcher] = []
        self.next_offset = next_offset
        self.pending = bytearray()
        self.pending_from = next_offset

    @property
    def transient(self) -> bool:
        """True where the queue ends with the process."""
        return self.id >= TRANSIENT

    @property
    def committed_offset(self) -> int:
        """Offset behind the last entry that can be read."""
        return self.pending_from

    def begin_at(self, offset: int) -> None:
        """Let the first entry have `offset`. Before there is any."""
        assert not self.pending, self.filter
        self.next_offset = self.pending_from = offset

    def save(self, batch: Batch) -> bytes:
        """Put the pending entries into `batch`; return them. They are readable when the batch is written."""
        entries = bytes(self.pending)
        batch.put(entries_key(self.id, self.pending_from), entries)
        self.pending.clear()
        self.pending_from = self.next_offset
        return entries

    def read(self, offset: int, count: int) -> bytes:
        """Return up to `count` entries from `offset` on, 16 bytes each; fewer at the end, none behind it.

        Where older entries are trimmed, the first that is returned has the offset `first_offset`: see `read_from`.
        """
        return self.read_from(offset, count)[1]

    def read_from(self, offset: int, count: int) -> tuple[int, bytes]:
        """Return up to `count` entries from `offset` on, and the offset of the first: a later one where entries are trimmed."""
        if offset >= self.committed_offset or count <= 0:
            return offset, b""
        found = bytearray()
        begin, wanted = offset, count * ENTRY_BYTES
        for first, entries in self._rows_from(offset):
            if first > offset and not found:
                begin = first
            skip = max(offset - first, 0) * ENTRY_BYTES
            found += entries[skip : skip + wanted - len(found)]
            if len(found) == wanted:
                break
        return begin, bytes(found)

    def _rows_from(self, offset: int) -> Iterator[tuple[int, bytes]]:
        prefix = queue_prefix(self.id)
        for key, entries in self.index.rows_around(entries_key(self.id, offset), prefix):
            yield int.from_bytes(key[len(prefix) :], "big"), entries

    def first_offset(self) -> int:
        """Return the offset of the oldest entry that the queue still has; `committed_offset` where it has none."""
        for key, _ in self.index.rows(queue_prefix(self.id)):
            return int.from_bytes(key[-8:], "big")
        return self.committed_offset


def entries_key(queue_id: int, offset: int) -> bytes:
    """Return the key of the row of a queue whose first entry has an offset."""
    return _KEY.pack(Space.ENTRIES, queue_id, offset)


def next_offset_of(row: tuple[bytes, bytes] | None) -> int:
    """Return the offset behind the entries of a queue's last row; 0 where it has none."""
    return int.from_bytes(row[0][-8:], "big") + len(row[1]) // ENTRY_BYTES if row is not None else 0


def load_next_offset(index: Index, queue_id: int) -> int:
    """Return the offset behind a queue's last entry, from the index."""
    return next_offset_of(index.last_at_or_before(entries_key(queue_id, 2**64 - 1), queue_prefix(queue_id)))


def delete_entries(batch: Batch, queue_id: int) -> None:
    """Delete all entries of a queue, with one range delete."""
    batch.delete_range(queue_prefix(queue_id), after(queue_prefix(queue_id)))


def delete_transient_entries(batch: Batch) -> None:
    """Delete what the transient queues of an earlier process left, with one range delete."""
    batch.delete_range(queue_prefix(TRANSIENT), after(bytes(Space.ENTRIES)))


def entries_array(entries: bytes) -> np.ndarray[Any, np.dtype[Any]]:
    """Return entries as an array of `ENTRY_DTYPE`."""
    return np.frombuffer(entries, dtype=ENTRY_DTYPE)
