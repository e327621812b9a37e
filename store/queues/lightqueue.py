"""Light queues: small indexes that let consumers of a million topics and wildcards read one log.

A queue is a topic filter with an integer id. Its entries point at records and have 16 bytes each: position u64, size u32,
aux u32 (little-endian). `aux` is the hash of the tag in a queue of messages, and the attempt in a retry queue. A row of the
index holds several adjacent entries:

    key    b"Q", queue id u32 big-endian, offset of the first entry u64 big-endian
    value  entries

Such rows end at multiples of `ROW_ENTRIES`. A commit writes all new entries of a queue up to the last multiple as one row, so
that a hot queue costs one put per batch, not one per message. The entries after the last multiple are the *open row*: fewer
than `ROW_ENTRIES` entries, which are in memory while the queue is loaded. The open row of a durable queue is in the catalogue
(`store.queues.catalogue`), in the row by which the queue is found, and each commit that adds to it writes it again. So one
lookup finds a queue, its end and its last entries; for a short queue those are all entries. A million queues of ten entries
have two rows each.

Rows also begin at multiples of `ROW_ENTRIES`, so that the row of an entry is found by its key. That fails in the middle of
a large batch, and after a snapshot, where the first row begins anywhere. Then a lookup seeks the last row at or before the
entry.

Retention deletes the rows at the front of a queue (`store.retention.trimming`). The other rows have all offsets from the first
row on, so the queue is *dense* there. Of what is deleted, the entries whose record was carried forward are *pinned*. They move
to rows of their own, each with adjacent entries and without any other entry. Between those rows are holes:

    key    b"P", queue id u32 big-endian, offset of the first entry u64 big-endian
    value  entries
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain, repeat
from struct import Struct
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import orjson

from penstock.store.errors import PositionUnknown, RecordCorrupt
from penstock.store.index.index import Batch, Index, KeySpace, after
from penstock.store.index.rowformats import QUEUE_ENTRY, QUEUE_ENTRY_DTYPE
from penstock.store.properties import decode_properties
from penstock.store.record import Flag, Record

if TYPE_CHECKING:
    from penstock.store.retention.copies import Copies

ENTRY, ENTRY_DTYPE = QUEUE_ENTRY, QUEUE_ENTRY_DTYPE
ENTRY_BYTES = ENTRY.size
assert ENTRY_DTYPE.itemsize == ENTRY_BYTES

ROW_ENTRIES = 16
"""Rows begin and end at multiples of this. An entry is written up to this many times, so at most 256 bytes go into the index
instead of 16. In return the last messages of a device are mostly in one row."""

_ARRAY_MIN = 48
"""Number of entries from which on numpy makes them faster (see `python -m bench store --only append`)."""

LOST_MAX = 4_096
"""Maximum number of entries by which a queue that was built anew from a damaged log may be shorter, for whoever looks for a
message in it. If it has lost more, later messages come a second time."""

UNCLEAR_MAX = 64
"""Maximum number of unclear entries that a search for a time skips backwards: those that may be on either side of the time."""

RESTORED = 0x4000_0000
"""Queue ids from here up to `TRANSIENT` belong to roots and internal queues whose declaration was damaged. They are derived
from the filter, so that each rebuild gives the same id and no record names another queue by it."""

TRANSIENT = 0x8000_0000
"""Queue ids from here on belong to transient queues. No record declares those, and a start deletes their entries."""

_ENTRIES = bytes(KeySpace.ENTRIES)
_PINNED = bytes(KeySpace.PINNED)
_KEY = Struct(">cIQ")
_PREFIX = Struct(">cI")

End = Literal["earliest", "latest"]
"""One end of a queue: its oldest message, or the next message that it gets."""

Start = End | int
"""Where a new queue begins: with all messages that the log still has, with messages from now on, or with messages that were
stored (delayed ones: that fired) at a time or later, in ms since 1970 UTC."""

Watcher = Callable[["LightQueue", int, bytes], None]
"""Called after a commit with the queue, the offset of the first new entry, and the new entries."""


def queue_prefix(queue_id: int) -> bytes:
    """Return the prefix of all keys of a queue's entries, except the pinned ones."""
    return _PREFIX.pack(KeySpace.ENTRIES, queue_id)


def pinned_prefix(queue_id: int) -> bytes:
    """Return the prefix of all keys of a queue's pinned entries."""
    return _PREFIX.pack(KeySpace.PINNED, queue_id)


class LightQueue:
    """One light queue. Only `Queues` writes to it; everybody may read and watch it.

    Parameters:
        queue_id: id of the queue.
        topic_filter: selects its messages.
        index: holds its entries.
        open_offset: offset after the entries that are in complete rows.
        open_row: the entries from there on, fewer than `ROW_ENTRIES`.
        start: where the queue began.
        owners: names of its owners; None if they and the account are to be looked up when needed.
        account: id of the account that is charged for it (`store.space.ledger`).
    """

    __slots__ = (
        "__weakref__",
        "_account",
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
        account: int = 0,
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
        """Offset after the last entry that can be read."""
        self.alone_at = b""
        """Key of the catalogue's row of its filter, if this queue is the only one in that row; else empty."""
        self._owners = None if owners is None else set(owners)
        self._account = account

    @property
    def transient(self) -> bool:
        """Whether the queue ends with the process."""
        return self.id >= TRANSIENT

    @property
    def owners(self) -> set[str]:
        """Names of the owners. They are looked up in the index when first needed, which is rare."""
        if self._owners is None:
            self._owners, self._account = self._load_name()
        return self._owners

    @property
    def account(self) -> int:
        """Id of the account that is charged for it; 0 for that of the node. It is looked up in the same way."""
        if self._owners is None:
            self._owners, self._account = self._load_name()
        return self._account

    def _load_name(self) -> tuple[set[str], int]:
        row = self.index.get(name_key(self.id))
        assert row is not None, self.id
        _, owners, account = name_of(row)
        return set(owners), account

    @property
    def next_offset(self) -> int:
        """Offset of the next entry, counting entries that no commit has written yet."""
        return self.committed_offset + len(self.pending) // ENTRY_BYTES

    def position_at(self, offset: int) -> int | None:
        """Return the position of an entry, committed or not; None if it was trimmed, and after the end of the queue."""
        if offset < self.committed_offset:
            found, entry = self.read_from(offset, 1)
            return int(ENTRY.unpack(entry)[0]) if entry and found == offset else None
        at = (offset - self.committed_offset) * ENTRY_BYTES
        return int(ENTRY.unpack_from(self.pending, at)[0]) if at < len(self.pending) else None

    def offset_in_rebuilt(self, offset: int, position: int) -> int:
        """Return the present offset of a cursor from before the queue was built anew from a log with damaged records.

        Such a queue lacks the damaged messages, so what follows has lower offsets than it had.

        Args:
            offset: of the cursor, as it was.
            position: of the message there; 0 if the queue ended there.
        """
        end = min(offset, self.next_offset)
        if not position or self.position_at(offset) == position:
            return end
        for at in range(end - 1, max(end - LOST_MAX, 0) - 1, -1):
            there = self.position_at(at)
            if there == position:
                return at
            if there is None or there < position:
                return at + 1  # the message there is damaged itself
        return max(end - LOST_MAX, 0)

    def begin_at(self, offset: int) -> None:
        """Give the first entry the offset `offset`. The queue must not have any entry yet."""
        assert not self.pending, self.filter
        self.committed_offset = offset
        self.begin_row()

    def begin_row(self) -> None:
        """Make the next entry begin a row. The entries of the open row are dropped."""
        self.open_offset = self.committed_offset
        self.open_row = b""

    def save(self, batch: Batch) -> bytes:
        """Put the pending entries into `batch`, except the open row; return them. They can be read when it is written."""
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
        """Return up to `count` entries from `offset` on, 16 bytes each; none at the end of the queue or after it.

        If entries there have been trimmed, the first one returned has a later offset: see `read_from`.
        """
        return self.read_from(offset, count)[1]

    def read_from(self, offset: int, count: int) -> tuple[int, bytes]:
        """Return the offset of the first entry, and up to `count` entries with adjacent offsets.

        After trimming, the first offset may be later than `offset`, and there may be fewer entries than `count` although more
        follow. Only an empty answer means that the queue has no entry from `offset` on.

        The open row is in memory, and nothing is sought after it: a seek there would pass over the range deletions of all
        queues that were dropped lately. Other rows are mostly found by their keys, which is cheaper than a seek and needs
        no new iterator after a write.
        """
        wanted = count * ENTRY_BYTES
        if offset >= self.open_offset:
            skip = (offset - self.open_offset) * ENTRY_BYTES
            return offset, self.open_row[skip : skip + wanted] if count > 0 else b""
        if count <= 0:
            return offset, b""
        skip = offset % ROW_ENTRIES * ENTRY_BYTES
        row = self.index.get(_KEY.pack(_ENTRIES, self.id, offset - offset % ROW_ENTRIES))
        part = row[skip : skip + wanted] if row else b""
        if len(part) == wanted:
            return offset, part
        begin, found = self._read_dense(offset, part, wanted)
        if begin > offset:
            return self._read_pinned(offset, wanted) or (begin, found)
        return begin, found

    def _read_dense(self, offset: int, part: bytes, wanted: int) -> tuple[int, bytes]:
        """Return what `read_from` does, but without the pinned entries. `part` has the first entries, if any were found."""
        begin = offset
        offset += len(part) // ENTRY_BYTES
        found = bytearray(part)
        if offset < self.open_offset:
            for first, entries in self._rows_from(offset, queue_prefix(self.id)):
                if first > offset and not found:
                    begin = first
                skip = max(offset - first, 0) * ENTRY_BYTES
                found += entries[skip : skip + wanted - len(found)]
                if len(found) == wanted:
                    return begin, bytes(found)
        if not found:
            begin = self.open_offset
        return begin, bytes(found + self.open_row[: wanted - len(found)])

    def _read_pinned(self, offset: int, wanted: int) -> tuple[int, bytes] | None:
        """Return the first pinned entries from `offset` on, up to the next hole, with the offset of the first; or None."""
        begin, found = offset, bytearray()
        for first, entries in self._pinned_from(offset):
            if found and first != begin + len(found) // ENTRY_BYTES:
                break
            if not found:
                begin = first
            found += entries[: wanted - len(found)]
            if len(found) == wanted:
                break
        return (begin, bytes(found)) if found else None

    def _pinned_from(self, offset: int) -> Iterator[tuple[int, bytes]]:
        """Yield the pinned entries from `offset` on, as adjacent ones with the offset of the first."""
        for first, entries in self._rows_from(offset, pinned_prefix(self.id)):
            skip = max(offset - first, 0)
            if skip * ENTRY_BYTES < len(entries):
                yield first + skip, entries[skip * ENTRY_BYTES :]

    def _rows_from(self, offset: int, prefix: bytes) -> Iterator[tuple[int, bytes]]:
        for key, entries in self.index.rows_around(prefix + offset.to_bytes(8, "big"), prefix):
            yield int.from_bytes(key[len(prefix) :], "big"), entries

    def count_from(self, offset: int) -> int:
        """Return the number of entries from `offset` on. It costs at most one seek, and one row for each run of pinned ones."""
        if offset >= self.open_offset:
            return max(self.committed_offset - offset, 0)
        dense = self.dense_offset()
        count = self.committed_offset - max(offset, dense)
        if offset < dense:
            count += sum(len(entries) for _, entries in self._pinned_from(offset)) // ENTRY_BYTES
        return count

    def offset_after(self, offset: int, count: int) -> int:
        """Return the offset after the next `count` entries from `offset` on. The caller must know that there are so many."""
        dense = self.dense_offset()
        if offset < dense:
            for first, entries in self._pinned_from(offset):
                pinned = len(entries) // ENTRY_BYTES
                if count <= pinned:
                    return first + count
                count -= pinned
        return max(offset, dense) + count

    def first_offset(self) -> int:
        """Return the offset of the oldest entry; `committed_offset` if the queue has none. It costs at most two seeks."""
        if not self.open_offset:
            return 0
        row = self.index.first_at_or_after(pinned_key(self.id, 0), pinned_prefix(self.id))
        return self.dense_offset() if row is None else int.from_bytes(row[0][-8:], "big")

    def dense_offset(self) -> int:
        """Return the offset from which on no entry is missing, at most `committed_offset`. It costs at most one seek."""
        if not self.open_offset:
            return 0
        row = self.index.first_at_or_after(entries_key(self.id, 0), queue_prefix(self.id))
        return self.open_offset if row is None else int.from_bytes(row[0][-8:], "big")

    def has_entries(self) -> bool:
        """Return whether the queue has any entry that can be read. It costs up to two seeks."""
        if self.open_row or self.dense_offset() < self.committed_offset:
            return True
        prefix = pinned_prefix(self.id)
        return self.index.first_at_or_after(prefix, prefix) is not None

    def offset_at(self, store_ms: int, records: Copies) -> int:
        """Return the offset of the first message that was stored at a time or later; `committed_offset` if there is none.

        Expired messages count as earlier. Messages are in the order of storing except delayed ones, which count by their
        due time: they fired then or soon after. After an outage that was longer than their delay, the offset may be among
        those that fired late. Half of a transaction counts by when it was committed. This is for queues of messages only.

        Args:
            store_ms: the time, in ms since 1970 UTC.
            records: reads the records.
        """

        def is_before(message: Record) -> bool | None:
            if message.flags & Flag.DELAYED:
                return max(message.store_ms, decode_properties(message.properties).deliver_at_ms) < store_ms
            if message.flags & Flag.HALF and message.store_ms < store_ms:
                return None
            return message.store_ms < store_ms

        return self._offset_behind(is_before, records)

    def offset_from(self, position: int, records: Copies) -> int:
        """Return the offset of the first entry that was added when the log had reached `position`, or later.

        It works as `offset_at`, but by position: delayed messages and halves of transactions count by when they were
        dispatched.
        """

        def is_before(message: Record) -> bool | None:
            if message.position >= position:
                return False
            return None if message.flags & (Flag.DELAYED | Flag.HALF) else True

        return self._offset_behind(is_before, records)

    def _offset_behind(self, is_before: Callable[[Record], bool | None], records: Copies) -> int:
        """Return the offset after the last entry for which `is_before` is true. It must be true for all entries before that.

        This is a bisection, which reads about log2(n) records. If `is_before` returns None, or a message is damaged, the entry
        before it decides, up to `UNCLEAR_MAX` entries back. Unclear entries at the border count as after it, since
        delivering them twice is better than never.
        """
        low, high = self.first_offset(), self.committed_offset
        while low < high:
            at = (low + high) // 2
            last = max(low, at - UNCLEAR_MAX)
            while (found := self._judged(at, is_before, records)) is None and at > last:
                at -= 1
            if found is False or (found is None and at == low):
                high = at
            else:
                low = at + 1
        return low

    def _judged(self, offset: int, is_before: Callable[[Record], bool | None], records: Copies) -> bool | None:
        """Return whether the first entry from `offset` on is before what is sought; False if there is none."""
        entry = self.read(offset, 1)
        if not entry:
            return False  # only trimmed entries follow; older ones may be pinned
        position, size, _ = ENTRY.unpack(entry)
        try:
            return is_before(records.record(position, size))
        except RecordCorrupt:  # this includes what the disk can't read
            return None
        except PositionUnknown:
            return True  # expired


def entries_key(queue_id: int, offset: int) -> bytes:
    """Return the key of the row of a queue whose first entry has the given offset."""
    return _KEY.pack(_ENTRIES, queue_id, offset)


def pinned_key(queue_id: int, offset: int) -> bytes:
    """Return the key of the row of pinned entries of a queue whose first entry has the given offset."""
    return _KEY.pack(_PINNED, queue_id, offset)


def name_key(queue_id: int) -> bytes:
    """Return the key of the row that holds filter and owners of a durable queue."""
    return _PREFIX.pack(KeySpace.QUEUE, queue_id)


def name_row(queue: LightQueue) -> bytes:
    """Return the row that holds filter, owners and account of a queue, as JSON."""
    return orjson.dumps([queue.filter, sorted(queue.owners), queue.account])


def name_of(row: bytes) -> tuple[str, list[str], int]:
    """Return the filter, the owners and the account in a row that `name_row` made."""
    topic_filter, owners, account = orjson.loads(row)
    return topic_filter, owners, account


def delete_entries(batch: Batch, index: Index, queue_id: int) -> None:
    """Delete all entries of a queue with a range delete, and another one if it has pinned entries."""
    batch.delete_range(queue_prefix(queue_id), after(queue_prefix(queue_id)))
    pinned = pinned_prefix(queue_id)
    if index.first_at_or_after(pinned, pinned) is not None:  # only if needed, because range deletions slow down every lookup
        batch.delete_range(pinned, after(pinned))


def delete_transient_entries(index: Index) -> None:
    """Delete the entries that transient queues of an earlier process have left, with one range delete for each kind of row."""
    for prefix, space in ((queue_prefix(TRANSIENT), _ENTRIES), (pinned_prefix(TRANSIENT), _PINNED)):
        if index.first_at_or_after(prefix, space) is not None:  # only if needed, as above
            batch = index.batch()
            batch.delete_range(prefix, after(space))
            index.write(batch)


def consecutive_entries(position: int, sizes: list[int], counts: list[int]) -> tuple[bytes, int]:
    """Return the entries of adjacent records from `position` on, and the position at which the last record ends.

    `counts` says how many records have each of `sizes`, in order.
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
