"""Checkpoints: the deliveries of each pop, which of them are still open, and their rows in the index.

Rows of the index: key b"C", position of the checkpoint u64 big-endian, value `Checkpoint.row`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from penstock.pop.core.suspicion import ALONE, level_of, narrowed, together_max
from penstock.store.bodies import CHECKPOINT_ENTRY, REFERENCE
from penstock.store.index.index import Batch, Index
from penstock.store.index.rowformats import CHECKPOINT_ROW, KEEPER_MARK, KeySpace
from penstock.store.recent import RecentIds
from penstock.store.record import LEVEL_MASK, SURVIVED, Flag, Record

if TYPE_CHECKING:
    from penstock.pop.core.damages import DamagedRanges
    from penstock.pop.core.deadlines import Deadlines
    from penstock.pop.core.group import ConsumerGroup
    from penstock.store.clocksteps import ClockStep

ATTEMPT_ID_BYTES_MAX = 255

ENTRY_BYTES = CHECKPOINT_ENTRY.size
_SOURCE_AT = ENTRY_BYTES - 2

FROM_QUEUE = 0
FROM_RETRY = 1

INDEX_BITS = 16
"""Bits of a delivery id that hold the index. A pop hands out at most 16,384 messages. The other 48 bits hold a position,
which suffices for 256 TiB of log."""
INDEX_MASK = (1 << INDEX_BITS) - 1

CLOSED_REMEMBERED = 50_000
"""Closed checkpoints that are remembered, so that their handles get an exact answer (acknowledged, replaced). The handles of
older ones get the answer "expired"."""

_CHECKPOINT_KEY = Struct(">cQ")


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


# --- indexes of deliveries --------------------------------------------------------------------------------------------
# The indexes that are acknowledged together are usually all of a checkpoint, and in order. Two rows of bytes hold them, the low
# bytes and the high ones. Handles and references have the same bytes as columns, so whole columns are sliced and compared, and
# no integer is made for a single index. (numpy can do the same, but its fixed costs exceed all the work on a batch of 32.)

REFERENCE_BYTES = REFERENCE.size
_POSITION_BYTES = 8
assert REFERENCE.pack(0x0102030405060708, 0x0A0B) == bytes((8, 7, 6, 5, 4, 3, 2, 1, 0x0B, 0x0A, 0, 0))

# The numbers from 0 to 65,535 as two rows of bytes: bits 0 to 7 of each, and bits 8 to 15 of each.
_LOW = bytes(range(256)) * 256
_HIGH = b"".join(bytes((high,)) * 256 for high in range(256))


class Indexes(NamedTuple):
    """One or more indexes from 0 to 65,535: bits 0 to 7 of each, and bits 8 to 15 of each."""

    low: bytes
    high: bytes

    @classmethod
    def below(cls, count: int) -> Indexes:
        """Return 0 to `count` - 1."""
        return cls(_LOW[:count], _HIGH[:count])

    @property
    def number(self) -> int:
        """Number of indexes."""
        return len(self.low)

    def each(self) -> range | list[int]:
        """Return the indexes as integers; as a range if they are consecutive."""
        low, high = self
        first = low[0] | high[0] << 8
        stop = first + len(low)
        if low == _LOW[first:stop] and high == _HIGH[first:stop]:
            return range(first, stop)
        return [below | above << 8 for below, above in zip(low, high, strict=True)]

    def mask(self) -> int:
        """Return the indexes as a bit set. If an index occurs twice, the set has fewer bits than `number`."""
        each = self.each()
        if isinstance(each, range):
            return ((1 << len(each)) - 1) << each.start
        bits = bytearray((max(each) >> 3) + 1)
        for index in each:
            bits[index >> 3] |= 1 << (index & 7)
        return int.from_bytes(bits, "little")

    def references(self, checkpoint: int) -> bytes:
        """Return references to these deliveries of the checkpoint at a position, `REFERENCE` each."""
        body = bytearray(REFERENCE.pack(checkpoint, 0) * len(self.low))
        body[_POSITION_BYTES::REFERENCE_BYTES] = self.low
        body[_POSITION_BYTES + 1 :: REFERENCE_BYTES] = self.high
        return bytes(body)


def runs_of(references: bytes) -> list[tuple[int, Indexes]]:
    """Return position and indexes for each run of references to the same checkpoint."""
    runs = []
    at, end = 0, len(references)
    while at < end:
        position = references[at : at + _POSITION_BYTES]
        stop = at + REFERENCE_BYTES
        while references.startswith(position, stop):
            stop += REFERENCE_BYTES
        low = references[at + _POSITION_BYTES : stop : REFERENCE_BYTES]
        high = references[at + _POSITION_BYTES + 1 : stop : REFERENCE_BYTES]
        runs.append((int.from_bytes(position, "little"), Indexes(low, high)))
        at = stop
    return runs


class CheckpointTable:
    """The open checkpoints, and the last closed ones. Only applying a record changes it.

    Parameters:
        deadlines: gets each checkpoint that opens, and forgets each that closes.
        groups: by id.
        damages: the damaged ranges of the log.
    """

    def __init__(self, deadlines: Deadlines, groups: Mapping[int, ConsumerGroup], damages: DamagedRanges) -> None:
        self.deadlines = deadlines
        self._groups = groups
        self._damages = damages
        self.open: dict[int, Checkpoint] = {}
        """Checkpoints with open deliveries, by position."""
        self.closed: RecentIds[int, Checkpoint] = RecentIds(CLOSED_REMEMBERED)
        """The last checkpoints that were closed, without their entries."""
        self.by_keeper: dict[str, set[int]] = {}
        """Positions of the open checkpoints whose deliveries stay with devices, by keeper."""
        self._changed: set[int] = set()
        self._new: set[int] = set()
        """Positions of the checkpoints that have no row yet."""

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a new checkpoint."""
        self.open[checkpoint.position] = checkpoint
        self._changed.add(checkpoint.position)
        self._new.add(checkpoint.position)
        self.deadlines.schedule(checkpoint.deadline_ms, checkpoint)
        if checkpoint.waits:
            self._groups[checkpoint.group_id].delayed += checkpoint.open.bit_count()
        elif checkpoint.is_exclusive:
            self._groups[checkpoint.group_id].alone += 1
        if checkpoint.keeper:
            self.by_keeper.setdefault(checkpoint.keeper, set()).add(checkpoint.position)

    def open_delivery(self, record: Record, position: int, index: int) -> Checkpoint | None:
        """Return the checkpoint of a delivery that a record ends. Return None, and log it, if damage has destroyed it."""
        checkpoint = self.open.get(position)
        if checkpoint is not None and checkpoint.open >> index & 1:
            return checkpoint
        self._damages.skip(record, "delivery", f"{position}:{index}")
        return None

    def close(self, checkpoint: Checkpoint, mask: int) -> None:
        """Close the deliveries of a bit set. The checkpoint closes with its last delivery, and its deadline is forgotten."""
        assert checkpoint.open & mask == mask, (checkpoint.position, mask)
        checkpoint.open ^= mask
        self._changed.add(checkpoint.position)
        if checkpoint.waits:
            self._groups[checkpoint.group_id].delayed -= mask.bit_count()
        if not checkpoint.open:
            del self.open[checkpoint.position]
            if checkpoint.keeper:
                positions = self.by_keeper[checkpoint.keeper]
                positions.discard(checkpoint.position)
                if not positions:
                    del self.by_keeper[checkpoint.keeper]
            elif checkpoint.attempt_id:
                attempt_ids = self._groups[checkpoint.group_id].attempt_ids
                if attempt_ids.get(checkpoint.attempt_id) == checkpoint.position:
                    del attempt_ids[checkpoint.attempt_id]
            if checkpoint.is_exclusive:
                self._groups[checkpoint.group_id].alone -= 1
            self.deadlines.forget(checkpoint)
            self.closed.add(checkpoint.position, checkpoint.without_entries())

    def let_wait(self, checkpoint: Checkpoint) -> None:
        """Note that the open deliveries of a checkpoint wait for their back-off: their consumer's time is over.

        No record says so. After the next start their deadline passes again, and this is called again.
        """
        if not checkpoint.waits:
            group = self._groups[checkpoint.group_id]
            group.delayed += checkpoint.open.bit_count()
            group.alone -= checkpoint.is_exclusive
            checkpoint.waits = True

    def move_deadlines(self, step: ClockStep) -> None:
        """Move the deadlines that were set in the window of a step of the clock: their invisible times are not over sooner."""
        for checkpoint in self.open.values():
            if step.covers(checkpoint.pop_ms) and checkpoint.deadline_ms > step.end_ms:
                self.deadlines.forget(checkpoint)
                checkpoint.deadline_ms += step.step_ms
                self.deadlines.schedule(checkpoint.deadline_ms, checkpoint)
                self._changed.add(checkpoint.position)

    def load(self, index: Index) -> None:
        """Read all rows. The groups must have been loaded before."""
        for key, value in index.rows(bytes(KeySpace.CHECKPOINT)):
            checkpoint = Checkpoint.from_row(_CHECKPOINT_KEY.unpack(key)[1], value)
            self.add(checkpoint)
            group = self._groups[checkpoint.group_id]
            group.in_flight += checkpoint.open.bit_count()
            if checkpoint.attempt_id and not checkpoint.keeper:
                group.attempt_ids[checkpoint.attempt_id] = checkpoint.position
        self._changed.clear()
        self._new.clear()

    def save(self, batch: Batch) -> None:
        """Put all rows that changed since the last call into `batch`."""
        for position in self._changed:
            checkpoint = self.open.get(position)
            if checkpoint is not None:
                batch.put(_CHECKPOINT_KEY.pack(KeySpace.CHECKPOINT, position), checkpoint.row())
            elif position not in self._new:
                batch.delete(_CHECKPOINT_KEY.pack(KeySpace.CHECKPOINT, position))
        self._changed.clear()
        self._new.clear()
