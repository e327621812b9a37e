"""Scanning: how a selective group finds its next messages.

A group with a filter on delivery, or a FIFO group, inspects each message of its queue. An entry whose tag has an unwanted hash
is skipped without reading the message. Other messages are read, and then selected, skipped, or parked behind their message
group. No message is inspected twice: `ConsumerGroup.scanned` is how far the group has come, and parked messages have their
turn later without another scan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from penstock.pop.core.deadletters import DeadLetterTable
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.order import NO_KEY, PARKED_MAX, FifoOrder, Parked, order_key
from penstock.pop.core.suspicion import ALONE, lowest, together_max
from penstock.store.errors import PositionUnknown
from penstock.store.log.commitlog import dense_until
from penstock.store.properties import message_group_of
from penstock.store.queues.lightqueue import entries_array
from penstock.store.record import KIND_AT, Kind, is_intact, properties_of
from penstock.store.store import Store

RESPONSE_BYTES = 3 * 1024 * 1024
"""A pop ends at this many bytes of records, after its first message: gRPC clients refuse responses above 4 MiB by default."""

SCAN_READS_MAX = 1024
"""Messages that one pop reads to find what its group wants, so that other work of the loop has its turn. The next scan
continues there."""

SCAN_ENTRIES_MAX = 65_536
"""Entries that one pop skips by the hash of their tag alone."""

SCAN_ENTRIES = 2048
"""Entries that a scan reads from the queue in one step."""


class Found(NamedTuple):
    """A message that a scan found."""

    position: int
    offset: int
    size: int
    key: int
    was_parked: bool
    attempts: int = 0


class Scan:
    """One scan of a group's queue: from where the last one ended, until it has found enough or has cost enough.

    Parameters:
        group: whose queue.
        dead_letters: tells which messages of a `$dlq/` queue are still dead letters.
        store: tells which messages retention has dropped.
        read: returns the record of a message, or None if it can't be read.
        in_order_max: how many messages of one message group it finds at most, in a FIFO group.
    """

    def __init__(
        self,
        group: ConsumerGroup,
        dead_letters: DeadLetterTable,
        store: Store,
        read: Callable[[int, int], bytes | None],
        in_order_max: int = 1,
    ) -> None:
        self._group = group
        self._dead_letters = dead_letters
        self._store = store
        self._read = read
        self._in_order_max = in_order_max
        self._found_keys: dict[int, int] = {}
        """How many messages of each key may still be found. The keys are locked as soon as the messages are handed out."""
        self.found: list[Found] = []
        self.parked: list[Parked] = []
        self.level = 0
        """The lowest level of what it has found, which bounds how much it finds: see `pop.core.suspicion`."""
        self.records: dict[int, bytes | None] = {}
        """Records that were read, by position."""
        self.offset = group.scanned
        """Offset of the first entry that was not inspected."""
        self._inspected = 0
        self._block, self._block_at = b"", 0
        """Bytes of the log that were read ahead, and their position."""
        self._last_key: tuple[bytes, int] = (b"", NO_KEY)
        """Properties and key of the last message that names its message group."""

    def run(self, room: int) -> None:
        """Find up to `room` messages."""
        order = self._group.order
        if order is not None:
            room = self._find_ready(order, room)
        bytes_left = RESPONSE_BYTES - sum(found.size for found in self.found)
        for offset, position, size, until in self._candidates(room):
            if len(self.found) >= room or bytes_left <= 0 or self._inspected >= SCAN_READS_MAX:
                return
            if order is not None and order.parked + len(self.parked) >= PARKED_MAX:
                return
            self.offset = offset + 1
            self._inspected += 1
            if self._is_wanted(position, size, offset, until) and self._find_or_park(order, position, size, offset):
                bytes_left -= size

    def _find_ready(self, order: FifoOrder, room: int) -> int:
        """Find parked messages of the ready keys: the next ones of each key, in order. Return how many to find in all."""
        for key in order.ready:
            if len(self.found) >= room:
                break
            taken: list[Parked] = []
            for each in order.waiting(key, min(self._in_order_max, room - len(self.found))):
                bound = self._bound(each.level, room)
                if len(self.found) + len(taken) >= bound:
                    break
                room, self.level = bound, lowest(self.level, each.level)
                taken.append(each)
            if taken:
                # What the scan finds of this key comes after all parked messages of the key.
                self._found_keys[key] = 0 if order.has_more(key, len(taken)) else self._in_order_max - len(taken)
                self.found += [Found(each.position, each.offset, each.size, key, True, each.attempts) for each in taken]
        return room

    def _bound(self, level: int, room: int) -> int:
        """Return how many messages a pop with a message of a level may have; 0 if the message has to wait."""
        if not level:
            return room
        return 0 if level == ALONE and self._group.alone else min(room, together_max(level))

    def _candidates(self, room: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield offset, position and size of the entries that the hash of their tag doesn't exclude; skip the others.

        Last comes up to where the log may be read ahead, for as many messages as there is room.
        """
        queue, expression = self._group.queue, self._group.expression
        hashes = None if expression is None or expression.hashes is None else list(expression.hashes)
        passed = 0
        while self.offset < queue.committed_offset and passed < SCAN_ENTRIES_MAX:
            first, found = queue.read_from(self.offset, SCAN_ENTRIES)
            entries = entries_array(found)
            if not len(entries):
                self.offset = queue.committed_offset  # all that is left was trimmed
                return
            wanted = np.arange(len(entries)) if hashes is None else np.flatnonzero(np.isin(entries["aux"], hashes))
            positions, sizes = entries["position"][wanted].tolist(), entries["size"][wanted].tolist()
            for number, (at, position, size) in enumerate(zip(wanted.tolist(), positions, sizes, strict=True)):
                if number % room == 0:
                    last = min(number + room, len(positions)) - 1
                    until = dense_until((position, size), (positions[last], sizes[last]), last - number + 1)
                yield first + at, position, size, until
            self.offset = first + len(entries)
            passed += len(entries)

    def _record(self, position: int, size: int, until: int) -> bytes | None:
        """Return the record of a message, or None if it can't be read. What follows it up to `until` is read with it."""
        at = position - self._block_at
        if at < 0 or at + size > len(self._block):
            if until <= position + size:
                return self._read(position, size)
            try:
                self._block, self._block_at, at = self._store.read_ahead(position, size, until), position, 0
            except PositionUnknown:
                return self._read(position, size)
        data = self._block[at : at + size]
        if is_intact(data, 0, size) and data[KIND_AT] == Kind.MESSAGE:
            return data
        return self._read(position, size)  # It says what is wrong.

    def _key_of(self, data: bytes) -> int:
        properties, key = self._last_key
        found = properties_of(data)
        if not found or found != properties:
            key = order_key(data)
            if found and message_group_of(found):
                self._last_key = (found, key)
        return key

    def _is_wanted(self, position: int, size: int, offset: int, until: int) -> bool:
        group = self._group
        if group.dead_letters_of and self._dead_letters.of_message(group.queue.id, position, offset) is None:
            return False  # an operator has redriven it
        if position < self._store.retention.expires_before and self._store.is_expired(position):
            return False  # retention has dropped it
        data = self.records[position] = self._record(position, size, until)
        # A message that can't be read is handed out, and the pop dead-letters it.
        return data is None or group.expression is None or group.expression.matches(data)

    def _find_or_park(self, order: FifoOrder | None, position: int, size: int, offset: int) -> bool:
        """Add a wanted message to `found` and return True; or park it, if its message group is busy, and return False."""
        key = NO_KEY
        if order is not None:
            if order.knows(position):
                return False  # after a repair of the log, a queue is scanned again
            data = self.records[position]
            key = self._key_of(data) if data is not None else NO_KEY
            if key != NO_KEY:
                left = self._found_keys.get(key)
                if left is None:
                    left = self._in_order_max if order.is_free(key) else 0
                if left == 0:
                    self.parked.append(Parked(offset, position, size, key))
                    # Nothing after it may overtake it, whatever becomes free.
                    self._found_keys[key] = 0
                    return False
                self._found_keys[key] = left - 1
        self.found.append(Found(position, offset, size, key, False))
        return True
