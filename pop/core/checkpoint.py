"""A checkpoint: the messages that one pop handed out, and which of them are still open."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from penstock.store.record import CHECKPOINT_ENTRY, Flag

ATTEMPT_ID_BYTES_MAX = 255

ENTRY_BYTES = CHECKPOINT_ENTRY.size
_SOURCE_AT = ENTRY_BYTES - 2

FROM_QUEUE = 0
FROM_RETRY = 1

_ROW = Struct("<IQqBIB")

INDEX_BITS = 16
"""Of a delivery's id, for its index. No pop hands out more than 16,384 messages; 2**48 bytes of log are 256 TiB."""
INDEX_MASK = (1 << INDEX_BITS) - 1


def delivery_id(checkpoint: int, index: int = 0) -> int:
    """Return the id of delivery `index` of the checkpoint at a position: one number below 2**64, and never 0.

    For consumers inside the node, which need no handle. The ids of a checkpoint's deliveries follow one another.
    """
    return checkpoint << INDEX_BITS | index


def delivery_of(delivery: int) -> tuple[int, int]:
    """Return checkpoint and index of the delivery with an id."""
    return delivery >> INDEX_BITS, delivery & INDEX_MASK


class Entry(NamedTuple):
    """One delivery: the message, where it came from, and which attempt this is."""

    position: int
    offset: int
    size: int
    attempt: int
    source: int
    backoff: int = 0


assert CHECKPOINT_ENTRY.pack(*Entry(0, 0, 0, 0, 0xAB))[_SOURCE_AT] == 0xAB


def entries_of(body: bytes) -> Iterator[Entry]:
    """Yield the entries of a checkpoint's record, in order."""
    return map(Entry._make, CHECKPOINT_ENTRY.iter_unpack(body))


def last_of(body: bytes, source: int) -> Entry | None:
    """Return the last entry that came from a source, whose entries are in the order of its queue; None where none did."""
    at = body[_SOURCE_AT::ENTRY_BYTES].rfind(source)
    return None if at < 0 else Entry(*CHECKPOINT_ENTRY.unpack_from(body, at * ENTRY_BYTES))


def indexes_of(bits: int) -> Iterator[int]:
    """Yield the places of the bits that are set, in order."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class Checkpoint:
    """What one pop (or one change of invisible time) handed out.

    Bit i of `open` is set while delivery i is neither acknowledged, nor replaced, nor revived, nor dead. Bits of `acked` and
    `replaced` say what became of the others; a bit in neither was revived or is a dead letter.

    Parameters:
        position: of its record; with an index it names a delivery.
        group_id: whose messages.
        pop_ms: when.
        deadline_ms: when the invisible time is over.
        flags: `Flag.SUSPENDED` where the return of the messages doesn't count as an attempt.
        body: the entries, `CHECKPOINT_ENTRY` each.
        attempt_id: of the call, where it gave one.
    """

    __slots__ = (
        "acked",
        "attempt_id",
        "body",
        "count",
        "deadline_ms",
        "flags",
        "group_id",
        "open",
        "pop_ms",
        "position",
        "replaced",
    )

    def __init__(
        self,
        position: int,
        group_id: int,
        pop_ms: int,
        deadline_ms: int,
        flags: int,
        body: bytes,
        attempt_id: str = "",
    ) -> None:
        self.position = position
        self.group_id = group_id
        self.pop_ms = pop_ms
        self.deadline_ms = deadline_ms
        self.flags = flags
        self.body = body
        self.count = len(body) // ENTRY_BYTES
        self.open = (1 << self.count) - 1
        self.acked = 0
        self.replaced = 0
        self.attempt_id = attempt_id

    def entry(self, index: int) -> Entry:
        """Return delivery `index`."""
        return Entry(*CHECKPOINT_ENTRY.unpack_from(self.body, index * ENTRY_BYTES))

    def entries(self) -> Iterator[Entry]:
        """Yield all deliveries, settled or not, in order."""
        return entries_of(self.body)

    def open_indexes(self) -> Iterator[int]:
        """Yield the indexes of the deliveries that are open."""
        return indexes_of(self.open)

    @property
    def suspended(self) -> bool:
        """True where coming back doesn't count as an attempt."""
        return bool(self.flags & Flag.SUSPENDED)

    def without_entries(self) -> Checkpoint:
        """Return what is worth remembering of a settled checkpoint: what became of each delivery, not which message it was."""
        settled = Checkpoint(self.position, self.group_id, self.pop_ms, self.deadline_ms, self.flags, b"")
        settled.acked, settled.replaced = self.acked, self.replaced
        return settled

    def row(self) -> bytes:
        """Return the index row: fixed fields, attempt id, the bit sets, the entries."""
        size = (self.count + 7) // 8
        sets = b"".join(bits.to_bytes(size, "little") for bits in (self.open, self.acked, self.replaced))
        attempt_id = self.attempt_id.encode()
        head = _ROW.pack(self.group_id, self.pop_ms, self.deadline_ms, self.flags, self.count, len(attempt_id))
        return head + attempt_id + sets + self.body

    @classmethod
    def from_row(cls, position: int, row: bytes) -> Checkpoint:
        """Return the checkpoint that `row` made the row of."""
        group_id, pop_ms, deadline_ms, flags, count, id_len = _ROW.unpack_from(row)
        size = (count + 7) // 8
        sets_from = _ROW.size + id_len
        attempt_id = row[_ROW.size : sets_from].decode()
        checkpoint = cls(position, group_id, pop_ms, deadline_ms, flags, row[sets_from + 3 * size :], attempt_id)
        sets = [int.from_bytes(row[sets_from + i * size : sets_from + (i + 1) * size], "little") for i in range(3)]
        checkpoint.open, checkpoint.acked, checkpoint.replaced = sets
        return checkpoint
