"""A checkpoint: the deliveries of one pop, and which of them are still open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.pop.core.suspicion import ALONE, level_of, narrowed, together_max
from penstock.store.bodies import CHECKPOINT_ENTRY
from penstock.store.index.rowformats import CHECKPOINT_ROW, KEEPER_MARK
from penstock.store.record import LEVEL_MASK, SURVIVED, Flag

ATTEMPT_ID_BYTES_MAX = 255

ENTRY_BYTES = CHECKPOINT_ENTRY.size
_SOURCE_AT = ENTRY_BYTES - 2

FROM_QUEUE = 0
FROM_RETRY = 1

INDEX_BITS = 16
"""Bits of a delivery id that hold the index. A pop hands out at most 16,384 messages. The other 48 bits hold a position,
which suffices for 256 TiB of log."""
INDEX_MASK = (1 << INDEX_BITS) - 1


def delivery_id(checkpoint: int, index: int = 0) -> int:
    """Return the id of delivery `index` of the checkpoint at a position: a number below 2**64, and never 0.

    Consumers inside the node use ids, because they need no handles. The ids of a checkpoint's deliveries are consecutive.
    """
    return checkpoint << INDEX_BITS | index


def delivery_of(delivery: int) -> tuple[int, int]:
    """Return the position of the checkpoint and the index of the delivery with an id."""
    return delivery >> INDEX_BITS, delivery & INDEX_MASK


class Entry(NamedTuple):
    """One delivery: position and size of the message, its offset and source (`FROM_QUEUE`, `FROM_RETRY`), and the attempt."""

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
    """Return the last entry from a source, which is the one with the highest offset; None if there is none."""
    at = body[_SOURCE_AT::ENTRY_BYTES].rfind(source)
    return None if at < 0 else Entry(*CHECKPOINT_ENTRY.unpack_from(body, at * ENTRY_BYTES))


def indexes_of(bits: int) -> Iterator[int]:
    """Yield the indexes of the set bits, in order."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class Checkpoint:
    """The deliveries of one pop, or of one change of invisible time.

    Bit i of `open` is set while delivery i is neither acknowledged, nor replaced, nor revived, nor dead-lettered. The bits of
    `acked` and `replaced` say what happened to closed deliveries. A delivery without a bit was revived or dead-lettered.

    Parameters:
        position: of its record. Position and index name a delivery.
        group_id: of the group that popped.
        pop_ms: time of the pop, in ms since 1970.
        deadline_ms: when the invisible time is over, in ms since 1970.
        flags: `Flag.SUSPENDED` if the return of the messages doesn't count as an attempt; `Flag.RETURNED` if no consumer has
            the messages any more; and the level (`pop.core.suspicion`).
        body: the entries, `CHECKPOINT_ENTRY` each.
        attempt_id: of the call; empty if it gave none. Of deliveries that stay with a device, `KEEPER_MARK` and its keeper.
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
        "waits",
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
        self.waits = bool(flags & (Flag.SUSPENDED | Flag.RETURNED))
        """True if no consumer has the messages: they wait for a delay, or for the back-off after a failed attempt."""

    def entry(self, index: int) -> Entry:
        """Return delivery `index`."""
        return Entry(*CHECKPOINT_ENTRY.unpack_from(self.body, index * ENTRY_BYTES))

    def entries(self) -> Iterator[Entry]:
        """Yield all deliveries in order, whether open or closed."""
        return entries_of(self.body)

    def positions(self, mask: int) -> Iterator[int]:
        """Yield the positions of the messages of the deliveries in a bit set, in order."""
        if mask == (1 << self.count) - 1:
            return (entry[0] for entry in CHECKPOINT_ENTRY.iter_unpack(self.body))
        return (self.entry(index).position for index in indexes_of(mask))

    def open_indexes(self) -> Iterator[int]:
        """Yield the indexes of the open deliveries."""
        return indexes_of(self.open)

    @property
    def keeper(self) -> str:
        """Names the device with which the deliveries stay; empty if they return after their invisible time like any."""
        return self.attempt_id.removeprefix(KEEPER_MARK) if self.attempt_id.startswith(KEEPER_MARK) else ""

    @property
    def suspended(self) -> bool:
        """True if the return of the messages doesn't count as an attempt."""
        return bool(self.flags & Flag.SUSPENDED)

    @property
    def level(self) -> int:
        """How many messages may be out together with these: see `pop.core.suspicion`."""
        return self.flags & LEVEL_MASK

    @property
    def is_exclusive(self) -> bool:
        """True if the group hands out no other message at the level `ALONE` as long as a consumer has this one."""
        return self.level == ALONE and not self.flags & SURVIVED and not self.waits

    @property
    def _is_beside_others(self) -> bool:
        """True for one delivery of a pop that had several: the others are elsewhere."""
        return self.count == 1 and self.level > ALONE

    @property
    def blames_one(self) -> bool:
        """True if it is known which message was at fault when the invisible time is over.

        Either it is the only open one, or a consumer has returned all of them, or a device keeps them.
        """
        is_only = self.level == ALONE or (self.open.bit_count() == 1 and not self._is_beside_others)
        return is_only or bool(self.flags & Flag.RETURNED) or bool(self.keeper)

    @property
    def narrowed_level(self) -> int:
        """The level with which the open deliveries return if one of them is suspected."""
        return narrowed(self.level, together_max(self.level) if self._is_beside_others else self.open.bit_count())

    @property
    def flags_of_extension(self) -> int:
        """The flags of the deliveries with which a consumer extends these: their level, and whether the consumer lives on."""
        return ALONE | SURVIVED if self.level == ALONE else self.level or level_of(self.count)

    def without_entries(self) -> Checkpoint:
        """Return a copy that remembers what happened to each delivery, but not which message it was."""
        closed = Checkpoint(self.position, self.group_id, self.pop_ms, self.deadline_ms, self.flags, b"")
        closed.acked, closed.replaced = self.acked, self.replaced
        return closed

    def row(self) -> bytes:
        """Return the index row: fixed fields, attempt id, bit sets, entries."""
        size = (self.count + 7) // 8
        sets = b"".join(bits.to_bytes(size, "little") for bits in (self.open, self.acked, self.replaced))
        attempt_id = self.attempt_id.encode()
        head = CHECKPOINT_ROW.pack(self.group_id, self.pop_ms, self.deadline_ms, self.flags, self.count, len(attempt_id))
        return head + attempt_id + sets + self.body

    @classmethod
    def from_row(cls, position: int, row: bytes) -> Checkpoint:
        """Return the checkpoint that an index row describes."""
        group_id, pop_ms, deadline_ms, flags, count, id_len = CHECKPOINT_ROW.unpack_from(row)
        size = (count + 7) // 8
        sets_from = CHECKPOINT_ROW.size + id_len
        attempt_id = row[CHECKPOINT_ROW.size : sets_from].decode()
        checkpoint = cls(position, group_id, pop_ms, deadline_ms, flags, row[sets_from + 3 * size :], attempt_id)
        sets = [int.from_bytes(row[sets_from + i * size : sets_from + (i + 1) * size], "little") for i in range(3)]
        checkpoint.open, checkpoint.acked, checkpoint.replaced = sets
        return checkpoint
