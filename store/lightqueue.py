"""Light queues: small indexes that let a million topics and wildcards read one log.

A queue is a topic filter with an integer id. Its entries point at records, 16 bytes each: position u64, size u32, aux u32
(little-endian). `aux` is the tag's hash in a queue of messages, and the attempt in a retry queue. They are in rows of some that
follow each other:

    key    b"Q", queue id u32 big-endian, offset of the first entry u64 big-endian
    value  entries

Such rows end at multiples of `ROW_ENTRIES`: a commit puts all that it has for a queue up to the last multiple as one row, so a
hot queue costs a put a batch, not one a message. What is behind the last multiple is the *open row*: less than `ROW_ENTRIES`
entries, in memory while the queue is loaded. That of a durable queue stands in the catalogue (`store.catalogue`), in the row by
which the queue is found, and is written again with each commit that adds to it. So one lookup finds a queue, where it ends and
its last entries, and of a queue that has no more than those, all. A million queues of ten entries have two rows each.

Rows begin at multiples of `ROW_ENTRIES` as well, so that an entry's row is found by its key. Where that isn't its row (in the
middle of a large batch; behind a snapshot, where the first row begins anywhere), a lookup seeks the last row at or before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain, repeat
from struct import Struct
from typing import Any, Literal

import numpy as np
import orjson

from penstock.store.commitlog import CommitLog
from penstock.store.errors import PositionUnknown, RecordCorrupt
from penstock.store.index import Batch, Index, KeySpace, after
from penstock.store.record import Flag, Record, decode_properties

ENTRY = Struct("<QII")
ENTRY_DTYPE = np.dtype([("position", "<u8"), ("size", "<u4"), ("aux", "<u4")])
ENTRY_BYTES = ENTRY.size
assert ENTRY_DTYPE.itemsize == ENTRY_BYTES

ROW_ENTRIES = 16
"""Rows begin and end at multiples of this. So an entry is written up to so many times: at most 256 bytes go into the index
where 16 would do. A device's last messages are mostly in one row."""

_ARRAY_MIN = 48
"""From so many entries on numpy makes them faster (measured)."""

UNCLEAR_MAX = 64
"""Entries that a search for a time goes back over, where they don't tell on which side of it they are."""

RESTORED = 0x4000_0000
"""Queue ids from here to `TRANSIENT` are of roots whose declaration was damaged. They follow from the filter, so that each
rebuild gives the same, and no record names another queue by them."""

TRANSIENT = 0x8000_0000
"""Queue ids from here on last as long as the process: no record declares them, and a start deletes their entries."""

_ENTRIES = bytes(KeySpace.ENTRIES)
_KEY = Struct(">cIQ")
_PREFIX = Struct(">cI")

End = Literal["earliest", "latest"]
"""One end of a queue: the oldest message that it still has, or what comes from now on."""

Start = End | int
"""Where a queue that is new begins: with all that the log still has, with what comes from now on, or with the messages that
were stored (delayed ones: that fired) at a time or after it, in ms since 1970 UTC."""

Watcher = Callable[["LightQueue", int, bytes], None]
"""Called after a commit with the queue, the offset of the first new entry, and the new entries."""


def queue_prefix(queue_id: int) -> bytes:
    """Return what all keys of a queue's entries start with."""
    return _PREFIX.pack(KeySpace.ENTRIES, queue_id)


class LightQueue:
    """One light queue. Only `Queues` writes it; whoever holds it may read and watch it.

    Parameters:
        queue_id: its number.
        topic_filter: what it is of.
        index: where its entries are.
        open_offset: the offset behind those of its entries that are in rows.
        open_row: the entries from there on, less than `ROW_ENTRIES`.
        start: where it began.
        owners: who needs it; None where that is to be looked up when somebody asks for it.
    """

    __slots__ = (
        "__weakref__",
        "_owners",
        "alone_at",
        "committed_offset",
        "filter",
        "id",
        "index",
        "open_offset",
        "open_row",
        "pending",
        "start",
        "watchers",
    )

    def __init__(
        self,
        queue_id: int,
        topic_filter: str,
        index: Index,
        open_offset: int = 0,
        open_row: bytes = b"",
        start: Start = "latest",
        owners: Iterable[str] | None = (),
    ) -> None:
        self.id = queue_id
        self.filter = topic_filter
        self.start: Start = start
        self.index = index
        self.watchers: list[Watcher] = []
        self.pending = bytearray()
        self.open_offset = open_offset
        self.open_row = open_row
        self.committed_offset = open_offset + len(open_row) // ENTRY_BYTES
        """Offset behind the last entry that can be read."""
        self.alone_at = b""
        """Key of the catalogue's row of its filter, where that has only this queue."""
        self._owners = None if owners is None else set(owners)

    @property
    def transient(self) -> bool:
        """True where the queue ends with the process."""
        return self.id >= TRANSIENT

    @property
    def owners(self) -> set[str]:
        """Who needs it. Looked up in the index when it is asked for first: few who find a queue do."""
        if self._owners is None:
            row = self.index.get(name_key(self.id))
            assert row is not None, self.id
            self._owners = set(name_of(row)[1])
        return self._owners

    @property
    def next_offset(self) -> int:
        """Offset of the next entry: behind those that a commit hasn't written yet, too."""
        return self.committed_offset + len(self.pending) // ENTRY_BYTES

    def begin_at(self, offset: int) -> None:
        """Let the first entry have `offset`. Before there is any."""
        assert not self.pending, self.filter
        self.committed_offset = offset
        self.begin_row()

    def begin_row(self) -> None:
        """Let the next entries begin a row: what the open one had is gone."""
        self.open_offset = self.committed_offset
        self.open_row = b""

    def save(self, batch: Batch) -> bytes:
        """Put the pending entries into `batch`, but for the open row; return them. They are readable when it is written."""
        entries = bytes(self.pending)
        self.pending.clear()
        row = self.open_row + entries if self.open_row else entries
        first = self.open_offset
        self.committed_offset = end = first + len(row) // ENTRY_BYTES
        border = end - end % ROW_ENTRIES
        if first < border:
            full = (border - first) * ENTRY_BYTES
            batch.put(entries_key(self.id, first), row[:full])
            self.open_offset, row = border, row[full:]
        self.open_row = row
        return entries

    def read(self, offset: int, count: int) -> bytes:
        """Return up to `count` entries from `offset` on, 16 bytes each; fewer at the end, none behind it.

        Where older entries are trimmed, the first that is returned has the offset `first_offset`: see `read_from`.
        """
        return self.read_from(offset, count)[1]

    def read_from(self, offset: int, count: int) -> tuple[int, bytes]:
        """Return up to `count` entries from `offset` on, and the offset of the first: a later one where entries are trimmed.

        The open row is in memory, and nothing is sought behind it: a seek there passes over the range deletions of all queues
        that were dropped lately. Another row is mostly found by its key, which costs half a seek, and no new iterator where
        something was written since.
        """
        wanted = count * ENTRY_BYTES
        if offset >= self.open_offset:
            skip = (offset - self.open_offset) * ENTRY_BYTES
            return offset, self.open_row[skip : skip + wanted] if count > 0 else b""
        if count <= 0:
            return offset, b""
        begin = offset
        skip = offset % ROW_ENTRIES * ENTRY_BYTES
        row = self.index.get(_KEY.pack(_ENTRIES, self.id, offset - offset % ROW_ENTRIES))
        part = row[skip : skip + wanted] if row else b""
        if len(part) == wanted:
            return begin, part
        offset += len(part) // ENTRY_BYTES
        found = bytearray(part)
        if offset < self.open_offset:
            for first, entries in self._rows_from(offset):
                if first > offset and not found:
                    begin = first
                skip = max(offset - first, 0) * ENTRY_BYTES
                found += entries[skip : skip + wanted - len(found)]
                if len(found) == wanted:
                    return begin, bytes(found)
        if not found:
            begin = self.open_offset
        return begin, bytes(found + self.open_row[: wanted - len(found)])

    def read_back(self, offset: int, count: int) -> bytes:
        """Return up to `count` entries that stand before `offset`, oldest first: the last of them is that of `offset - 1`.

        Behind the end, or at it, these are the newest entries. Who goes back through a queue asks next with the offset less
        the number of entries returned.
        """
        end = min(offset, self.committed_offset)
        start = max(end - count, self.first_offset())
        return self.read(start, end - start)

    def _rows_from(self, offset: int) -> Iterator[tuple[int, bytes]]:
        prefix = queue_prefix(self.id)
        for key, entries in self.index.rows_around(entries_key(self.id, offset), prefix):
            yield int.from_bytes(key[len(prefix) :], "big"), entries

    def first_offset(self) -> int:
        """Return the offset of the oldest entry that the queue has; `committed_offset` where it has none. A seek, at most."""
        if not self.open_offset:
            return 0
        row = self.index.first_at_or_after(entries_key(self.id, 0), queue_prefix(self.id))
        return self.open_offset if row is None else int.from_bytes(row[0][-8:], "big")

    def offset_at(self, store_ms: int, log: CommitLog) -> int:
        """Return the offset of the first entry whose record was stored at a time or later; `committed_offset` where none was.

        What the log no longer has counts as before. For queues of messages. They are in the order of storing but for delayed
        ones, which count by when they were due: they fired then, or soon after. After an outage that was longer than their
        delay, the offset may be among those that fired late. Half of a transaction counts by when it was committed.

        Args:
            store_ms: ms since 1970 UTC.
            log: where the records are.
        """

        def is_before(message: Record) -> bool | None:
            if message.flags & Flag.DELAYED:
                return max(message.store_ms, decode_properties(message.properties).deliver_at_ms) < store_ms
            if message.flags & Flag.HALF and message.store_ms < store_ms:
                return None
            return message.store_ms < store_ms

        return self._offset_behind(is_before, log)

    def offset_from(self, position: int, log: CommitLog) -> int:
        """Return the offset of the first entry that came into the queue when the log had reached `position`, or later.

        As `offset_at`, but by position: delayed messages and halves of transactions stand where they were dispatched.
        """

        def is_before(message: Record) -> bool | None:
            if message.position >= position:
                return False
            return None if message.flags & (Flag.DELAYED | Flag.HALF) else True

        return self._offset_behind(is_before, log)

    def _offset_behind(self, is_before: Callable[[Record], bool | None], log: CommitLog) -> int:
        """Return the offset behind the last entry of which `is_before` is true: all in front of that are, and none behind it.

        By bisection: about log2(n) records are looked at, 10 us each. Where it is None, or a message is damaged, the one in
        front of it decides, up to `UNCLEAR_MAX` of them. Those at the border count as behind it: twice is better than never.
        """
        low, high = self.first_offset(), self.committed_offset
        while low < high:
            at = (low + high) // 2
            last = max(low, at - UNCLEAR_MAX)
            while (found := self._judged(at, is_before, log)) is None and at > last:
                at -= 1
            if found is False or (found is None and at == low):
                high = at
            else:
                low = at + 1
        return low

    def _judged(self, offset: int, is_before: Callable[[Record], bool | None], log: CommitLog) -> bool | None:
        position, size, _ = ENTRY.unpack(self.read(offset, 1))
        try:
            return is_before(log.record(position, size))
        except PositionUnknown:
            return True  # expired
        except RecordCorrupt:
            return None


def entries_key(queue_id: int, offset: int) -> bytes:
    """Return the key of the row of a queue whose first entry has an offset."""
    return _KEY.pack(_ENTRIES, queue_id, offset)


def name_key(queue_id: int) -> bytes:
    """Return the key of the row that has a durable queue's filter and owners."""
    return _PREFIX.pack(KeySpace.QUEUE, queue_id)


def name_row(queue: LightQueue) -> bytes:
    """Return that row of a queue: JSON, filter and owners."""
    return orjson.dumps([queue.filter, sorted(queue.owners)])


def name_of(row: bytes) -> tuple[str, list[str]]:
    """Return the filter and the owners of such a row."""
    topic_filter, owners = orjson.loads(row)
    return topic_filter, owners


def delete_entries(batch: Batch, queue_id: int) -> None:
    """Delete all entries of a queue, with one range delete."""
    batch.delete_range(queue_prefix(queue_id), after(queue_prefix(queue_id)))


def delete_transient_entries(batch: Batch) -> None:
    """Delete what the transient queues of an earlier process left, with one range delete."""
    batch.delete_range(queue_prefix(TRANSIENT), after(bytes(KeySpace.ENTRIES)))


def consecutive_entries(position: int, sizes: list[int], counts: list[int]) -> tuple[bytes, int]:
    """Return the entries of records that stand one behind the other from `position` on, and where the last one ends.

    Each of `sizes` is that of as many of them as `counts` says. 0.01 us a record where they are many.
    """
    total = sum(counts)
    if total < _ARRAY_MIN:
        singly = [*chain.from_iterable(map(repeat, sizes, counts))]
        *positions, end = accumulate(singly, initial=position)
        return b"".join(map(ENTRY.pack, positions, singly, repeat(0))), end
    entries = np.empty((total, 2), "<u8")  # size and aux, which is 0, are one number
    if len(sizes) == 1:
        size, end = sizes[0], position + sizes[0] * total
        entries[:, 0] = np.arange(position, end, size, dtype="<u8")
        entries[:, 1] = size
    else:
        each = np.repeat(np.array(sizes, "<u8"), counts)
        ends = position + np.cumsum(each)
        end = int(ends[-1])
        entries[:, 0] = ends - each
        entries[:, 1] = each
    return entries.tobytes(), end


def entries_array(entries: bytes) -> np.ndarray[Any, np.dtype[Any]]:
    """Return entries as an array of `ENTRY_DTYPE`."""
    return np.frombuffer(entries, dtype=ENTRY_DTYPE)
