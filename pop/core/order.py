"""The order of a FIFO group: messages of a message group are in flight under one pop at a time, and are delivered in order.

The order knows a message group by its key, a 32-bit hash of its name. If two names have the same key, their messages are
ordered among each other too, which does no harm. A key is *locked* while messages of it are in flight or wait for their
back-off. A message that a scan finds while its key is locked is *parked*: it waits here, so that no later scan inspects it
again. A message that returns for another attempt is parked too, before all later messages of its key: where a pop took
several messages of one key, those after a failed one may return first. A key that is not locked and has a parked message is
*ready*.

A locked or parked message takes about 300 bytes of memory. `PARKED_MAX` bounds the number of parked messages.

Rows of the index: key b"O", group id u32 big-endian, position u64 big-endian; value locked u8, key u32, offset u64, size u32,
attempts u16, level u8 (`pop.core.suspicion`). Rows of earlier versions have no level, or neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from penstock.store.index.index import Batch, Index, KeySpace, after
from penstock.store.index.rowformats import ORDER_ROW, order_row
from penstock.store.properties import message_group_of
from penstock.store.record import properties_of, topic_of

PARKED_MAX = 100_000
"""Maximum number of parked messages of a group. At the limit, its pops scan no further until some of them were delivered."""

NO_KEY = 0
"""Key of a message that can't be read: it is in no message group."""

_KEY = Struct(">cIQ")
_PREFIX = Struct(">cI")


class Parked(NamedTuple):
    """A message that waits: its offset in the group's queue, its record, its key, and the attempts it had and its level."""

    offset: int
    position: int
    size: int
    key: int
    attempts: int = 0
    level: int = 0


def order_key(data: bytes) -> int:
    """Return the key of a message's message group, or of its topic if it names no group. `data` is the message's record."""
    properties = properties_of(data)
    if properties:
        name = message_group_of(properties)
        if name:
            return crc32(name.encode(), 1) or 1
    return crc32(topic_of(data)) or 1


class FifoOrder:
    """The locked keys and the parked messages of a FIFO group."""

    __slots__ = ("_changed", "_keys", "_locked", "_parked", "_queues", "_saved", "ready")

    def __init__(self) -> None:
        self._locked: dict[int, int] = {}
        """Keys of the messages that are in flight or wait for their next attempt, by position."""
        self._keys: dict[int, int] = {}
        """How many messages lock each locked key."""
        self._parked: dict[int, Parked] = {}
        """The parked messages, by position."""
        self._queues: dict[int, deque[Parked]] = {}
        """The same messages by key, each key's in the order of the queue."""
        self.ready: dict[int, None] = {}
        """Keys that are ready, in the order in which they became so."""
        self._changed: set[int] = set()
        self._saved: set[int] = set()
        """Positions that have a row in the index."""

    @property
    def parked(self) -> int:
        """Number of parked messages."""
        return len(self._parked)

    @property
    def parked_again(self) -> int:
        """Number of parked messages that are known to have returned. One that was suspended may not be among them."""
        return sum(parked.attempts > 0 or parked.level > 0 for parked in self._parked.values())

    def parked_messages(self) -> list[tuple[int, int]]:
        """Return position and size of the parked messages."""
        return [(parked.position, parked.size) for parked in self._parked.values()]

    def knows(self, position: int) -> bool:
        """Return whether a message is parked or locks its key."""
        return position in self._locked or position in self._parked

    def is_free(self, key: int) -> bool:
        """Return whether a message that a scan finds may be handed out: its key is not locked, and has no parked message."""
        return key not in self._keys and key not in self._queues

    def waiting(self, key: int, count: int) -> list[Parked]:
        """Return up to `count` messages of a ready key that are to be handed out next, in order."""
        return list(islice(self._queues[key], count))

    def has_more(self, key: int, count: int) -> bool:
        """Return whether more than `count` messages of a key are parked."""
        return len(self._queues.get(key, ())) > count

    def park(self, parked: Parked) -> None:
        """Let a message wait for its turn, after the messages of its key that precede it in the group's queue."""
        queue = self._queues.setdefault(parked.key, deque())
        if queue and parked < queue[-1]:  # a redriven dead letter, or a message that returned
            queue = self._queues[parked.key] = deque(sorted((*queue, parked)))
        else:
            queue.append(parked)
        self._parked[parked.position] = parked
        self._changed.add(parked.position)
        if parked.key not in self._keys:
            self.ready[parked.key] = None

    def lock(self, position: int, key: int) -> None:
        """Note that a message was handed out. It locks its key until `unlock` or `put_back`."""
        parked = self._parked.pop(position, None)
        if parked is not None:
            key = parked.key
        if position in self._locked or key == NO_KEY:
            return
        if parked is not None:
            queue = self._queues[key]
            queue.remove(parked)
            if not queue:
                del self._queues[key]
        self.ready.pop(key, None)
        self._locked[position] = key
        self._keys[key] = self._keys.get(key, 0) + 1
        self._changed.add(position)

    def unlock(self, position: int) -> None:
        """Note that a message is acknowledged or dead-lettered. The next messages of its key may have their turn."""
        key = self._locked.pop(position, None)
        if key is None:
            return
        self._changed.add(position)
        self._release(key)

    def put_back(self, message: Parked) -> bool:
        """Note that a message that was handed out returns: it waits before all later messages of its key, which is known.

        Return False if the message locks no key, so that it waits for nothing.
        """
        key = self._locked.pop(message.position, None)
        if key is None:
            return False
        self._release(key)
        self.park(message._replace(key=key))
        return True

    def _release(self, key: int) -> None:
        left = self._keys[key] - 1
        if left:
            self._keys[key] = left
            return
        del self._keys[key]
        if key in self._queues:
            self.ready[key] = None

    def clear(self) -> None:
        """Forget all messages, because the group was reset."""
        self._changed |= self._locked.keys() | self._parked.keys()
        self._locked.clear()
        self._keys.clear()
        self._parked.clear()
        self._queues.clear()
        self.ready.clear()

    # --- the index --------------------------------------------------------------------------------------------------

    def save(self, batch: Batch, group_id: int) -> None:
        """Put all rows that changed since the last call into `batch`."""
        for position in self._changed:
            key = self._locked.get(position)
            parked = self._parked.get(position)
            if key is not None:
                batch.put(_KEY.pack(KeySpace.ORDER, group_id, position), ORDER_ROW.pack(1, key, 0, 0, 0, 0))
            elif parked is not None:
                batch.put(_KEY.pack(KeySpace.ORDER, group_id, position), _parked_row(parked))
            elif position in self._saved:
                batch.delete(_KEY.pack(KeySpace.ORDER, group_id, position))
                self._saved.discard(position)
                continue
            else:
                continue  # the message came and went within one commit
            self._saved.add(position)
        self._changed.clear()

    def load(self, index: Index, group_id: int) -> None:
        """Read the rows of a group."""
        for position, (is_locked, key, offset, size, attempts, level) in sorted(
            _rows(index, group_id), key=lambda row: row[1][2:]
        ):
            if is_locked:
                self.lock(position, key)
            else:
                self.park(Parked(offset, position, size, key, attempts, level))
            self._saved.add(position)
        self._changed.clear()


def _parked_row(parked: Parked) -> bytes:
    return ORDER_ROW.pack(0, parked.key, parked.offset, parked.size, parked.attempts, parked.level)


def _rows(index: Index, group_id: int) -> Iterator[tuple[int, tuple[int, int, int, int, int, int]]]:
    for key, value in index.rows(_PREFIX.pack(KeySpace.ORDER, group_id)):
        yield _KEY.unpack(key)[2], order_row(value)


def delete_order(batch: Batch, group_id: int) -> None:
    """Delete all rows of a deleted group, with one range delete."""
    prefix = _PREFIX.pack(KeySpace.ORDER, group_id)
    batch.delete_range(prefix, after(prefix))
