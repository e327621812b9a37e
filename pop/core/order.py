"""The order of a FIFO group: never two messages of one message group in flight, and each group's messages in turn.

A message group is known by its key, a 32-bit hash of its name. Two names with one key are only ordered more than they had to.
A key is *busy* while a message of it is held: in flight, or on its way back. A message that a pop finds while its key is busy
is *parked*: it waits here, so that no pop looks at it again until its turn has come. A key that isn't busy and has
something parked is *ready*.

Memory: about 300 bytes for each message held or parked. `PARKED_MAX` bounds the parked ones.

Rows of the index: key b"O", group id u32 big-endian, position u64 big-endian; value held u8, key u32, offset u64, size u32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from penstock.store.index import Batch, Index, Space, after
from penstock.store.record import decode_properties, properties_of, topic_of

PARKED_MAX = 100_000
"""Messages of one group that may be parked. At the limit its pops look no further into the queue until some had their turn."""

NO_KEY = 0
"""Of a message that can't be read: it is in no message group."""

_KEY = Struct(">cIQ")
_PREFIX = Struct(">cI")
_ROW = Struct("<BIQI")


class Parked(NamedTuple):
    """A message that waits for its turn: where it stands in the group's queue, and its record."""

    offset: int
    position: int
    size: int
    key: int


def order_key(data: bytes) -> int:
    """Return the key of a message's message group, or of its topic where it names none. `data` is its record."""
    properties = properties_of(data)
    if properties:
        name = decode_properties(properties).message_group
        if name:
            return crc32(name.encode(), 1) or 1
    return crc32(topic_of(data)) or 1


class Order:
    """Which messages of a FIFO group are held, and which are parked behind them."""

    __slots__ = ("_busy", "_changed", "_held", "_parked", "_queues", "_saved", "ready")

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        """Keys of the messages that are in flight or on their way back, by position."""
        self._busy: set[int] = set()
        self._parked: dict[int, Parked] = {}
        """By position."""
        self._queues: dict[int, deque[Parked]] = {}
        """The same by key, each in order."""
        self.ready: dict[int, None] = {}
        """Keys, in the order in which they became ready."""
        self._changed: set[int] = set()
        self._saved: set[int] = set()
        """Positions that have a row in the index."""

    @property
    def parked(self) -> int:
        """How many are parked."""
        return len(self._parked)

    @property
    def held(self) -> int:
        """How many are held."""
        return len(self._held)

    def waiting(self) -> list[tuple[int, int]]:
        """Return position and size of what is parked."""
        return [(parked.position, parked.size) for parked in self._parked.values()]

    def knows(self, position: int) -> bool:
        """Return whether a message is held or parked."""
        return position in self._held or position in self._parked

    def is_free(self, key: int) -> bool:
        """Return whether a message that is found now may go at once: none of its key is held, none is parked before it."""
        return key not in self._busy and key not in self._queues

    def first(self, key: int) -> Parked:
        """Return the message of a ready key whose turn it is."""
        return self._queues[key][0]

    def park(self, parked: Parked) -> None:
        """Let a message wait for its turn: behind those of its key that stand before it in the group's queue."""
        queue = self._queues.setdefault(parked.key, deque())
        if queue and parked < queue[-1]:  # a dead letter that was sent back
            queue = self._queues[parked.key] = deque(sorted((*queue, parked)))
        else:
            queue.append(parked)
        self._parked[parked.position] = parked
        self._changed.add(parked.position)
        if parked.key not in self._busy:
            self.ready[parked.key] = None

    def hold(self, position: int, key: int) -> None:
        """Note that a message was handed out; it is held until `free`."""
        if position in self._held or key == NO_KEY:
            return
        parked = self._parked.pop(position, None)
        if parked is not None:
            queue = self._queues[key]
            queue.remove(parked)
            if not queue:
                del self._queues[key]
        self.ready.pop(key, None)
        self._held[position] = key
        self._busy.add(key)
        self._changed.add(position)

    def free(self, position: int) -> None:
        """Note that a message is done: the next of its key has its turn."""
        key = self._held.pop(position, None)
        if key is None:
            return
        self._changed.add(position)
        self._busy.discard(key)
        if key in self._queues:
            self.ready[key] = None

    def clear(self) -> None:
        """Forget all: the group begins anew elsewhere."""
        self._changed |= self._held.keys() | self._parked.keys()
        self._held.clear()
        self._busy.clear()
        self._parked.clear()
        self._queues.clear()
        self.ready.clear()

    # --- the index --------------------------------------------------------------------------------------------------

    def save(self, batch: Batch, group_id: int) -> None:
        """Put all rows that changed since the last call into `batch`."""
        for position in self._changed:
            key = self._held.get(position)
            parked = self._parked.get(position)
            if key is not None:
                batch.put(_KEY.pack(Space.ORDER, group_id, position), _ROW.pack(1, key, 0, 0))
            elif parked is not None:
                batch.put(_KEY.pack(Space.ORDER, group_id, position), _ROW.pack(0, parked.key, parked.offset, parked.size))
            elif position in self._saved:
                batch.delete(_KEY.pack(Space.ORDER, group_id, position))
                self._saved.discard(position)
                continue
            else:
                continue  # it came and went in one commit
            self._saved.add(position)
        self._changed.clear()

    def load(self, index: Index, group_id: int) -> None:
        """Read the rows of a group."""
        for position, (held, key, offset, size) in sorted(_rows(index, group_id), key=lambda row: row[1][2:]):
            if held:
                self.hold(position, key)
            else:
                self.park(Parked(offset, position, size, key))
            self._saved.add(position)
        self._changed.clear()


def _rows(index: Index, group_id: int) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    for key, value in index.rows(_PREFIX.pack(Space.ORDER, group_id)):
        yield _KEY.unpack(key)[2], _ROW.unpack(value)


def delete_order(batch: Batch, group_id: int) -> None:
    """Delete all rows of a group that is gone, with one range delete."""
    prefix = _PREFIX.pack(Space.ORDER, group_id)
    batch.delete_range(prefix, after(prefix))
