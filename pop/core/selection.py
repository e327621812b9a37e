"""Selecting the messages that a pop hands out.

Most groups take the next messages of their queue. A group with a filter on delivery, or a FIFO group, is selective: it inspects
each message of its queue. An entry whose tag has an unwanted hash is skipped without reading the message. Other messages are
read, and then selected, skipped, or parked behind their message group. No message is inspected twice: the group has come as far
as `ConsumerGroup.scanned`, and parked messages have their turn later without another scan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from penstock.pop.core.checkpoint import FROM_QUEUE, FROM_RETRY
from penstock.pop.core.order import NO_KEY, PARKED_MAX, FifoOrder, Parked, order_key
from penstock.pop.core.settings import backoff_ms
from penstock.pop.core.suspicion import ALONE, attempts_and_level, lowest, together_max
from penstock.store.bodies import CHECKPOINT_ENTRY, backoff_code
from penstock.store.errors import PositionUnknown
from penstock.store.log.commitlog import dense_until
from penstock.store.properties import message_group_of
from penstock.store.queues.lightqueue import ENTRY, ENTRY_BYTES, entries_array
from penstock.store.record import KIND_AT, Kind, is_intact, properties_of

if TYPE_CHECKING:
    from penstock.pop.core.deadletters import DeadLetterTable
    from penstock.pop.core.group import ConsumerGroup
    from penstock.pop.core.state import PopState
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

PASSED_MAX = 4096
"""Entries that a group may skip before a record must say so. It bounds what the group inspects again after a crash."""

READ_AHEAD = 256
"""Entries of its queue that a group reads at a time, even if it takes fewer: finding the first entry costs most of a read."""

Entries: TypeAlias = list[tuple[int, int, int, int, int, int]]
"""Position, offset, size, attempt, source and back-off, as in `pop.core.checkpoint.Entry`. Plain tuples, because each pop makes
some."""

Read = Callable[[int, int], bytes | None]


@dataclass(slots=True)
class Selection:
    """The messages that a pop selected.

    Parameters:
        entries: of the checkpoint; empty if there are none.
        properties: of the checkpoint record.
        must_append: a record must be written even without entries.
        scanned: offset up to which the group has inspected its queue.
        records: records that were read on the way, by position.
        level: the lowest level of the messages (`pop.core.suspicion`).
    """

    entries: Entries
    properties: dict[str, Any] = field(default_factory=dict)
    must_append: bool = False
    scanned: int = 0
    records: dict[int, bytes | None] = field(default_factory=dict)
    level: int = 0

    def body(self) -> bytes:
        """Return the entries as the body of a checkpoint record."""
        return b"".join(starmap(CHECKPOINT_ENTRY.pack, self.entries))


def select(group: ConsumerGroup, room: int, state: PopState, store: Store, read: Read, in_order_max: int = 1) -> Selection:
    """Select up to `room` messages for a group: new messages and retries in turn, so that neither waits for the other.

    `read` returns the record of a message, or None if it can't be read. `in_order_max` is how many messages of one message
    group a FIFO group may select.
    """
    new, retries = group.visible_new, group.visible_retries
    retries_first = group.retry_turn
    if new > 0 and retries > 0:
        share = room // 2 + (room % 2 if group.retry_turn else 0)
        retries = min(retries, max(share, room - new))
        group.retry_turn = not group.retry_turn
    retries = min(retries, room)
    back, level = _retries(group, retries)
    if level and new > 0 and not retries_first:
        back, level = [], 0  # It is the turn of new messages, and only few may be out with these.
    if group.is_selective:
        scan = Scan(group, state.dead_letters, store, read, in_order_max)
        return _select_by_scan(group, scan, state.mended, back, level, 0 if level else room - len(back), retries_first)
    fresh = [] if level else _new(group, room - len(back), store)
    if not level and len(back) < min(group.visible_retries, room - len(fresh)):  # there are fewer new messages than was thought
        more, level_of_more = _retries(group, min(group.visible_retries, room - len(fresh)))
        if not (fresh and level_of_more):
            back, level = more, level_of_more
    entries = _fitting(group, back, fresh, retries_first)
    if not state.mended:
        return Selection(entries, level=level)
    # The group may have passed messages that retention has dropped. Without a cursor the gap would pass for a lost checkpoint.
    passed = max((offset + 1 for _, offset, _, _, source, _ in entries if source == FROM_QUEUE), default=group.scanned)
    return Selection(entries, {"cursor": passed, "mended": state.mended}, level=level)


def _fitting(group: ConsumerGroup, back: Entries, new: Entries, retries_first: bool) -> Entries:
    """Return the entries that fit into one response. If large messages fill it, new messages and retries are first in turn."""
    entries = back + new if retries_first else new + back
    if group.backoff:
        attempts = {attempt for _, _, _, attempt, _, _ in entries}
        codes = {attempt: backoff_code(backoff_ms(group.backoff, attempt)) for attempt in attempts}
        entries = [(*entry[:5], codes[entry[3]]) for entry in entries]
    left = RESPONSE_BYTES
    for count, entry in enumerate(entries):
        left -= entry[2]
        if left < 0:
            return entries[: max(count, 1)]
    return entries


def _new(group: ConsumerGroup, count: int, store: Store) -> Entries:
    """Return up to `count` messages that were never handed out. The group skips messages that retention has dropped.

    The group skips a backlog of dropped messages in steps of `SCAN_ENTRIES`, and only until retention has trimmed the queue.
    """
    entries: Entries = []
    end, offset, step = group.queue.committed_offset, group.scanned, count
    while len(entries) < count and offset < end:
        first, packed = _read(group, offset, step)
        read = [
            (position, at, size, 1, FROM_QUEUE, 0) for at, (position, size, _) in enumerate(ENTRY.iter_unpack(packed), first)
        ]
        expires_before = store.retention.expires_before
        if not read:
            offset = end  # all that is left was trimmed
        else:
            offset = read[-1][1] + 1
            if min(read)[0] < expires_before:
                step = SCAN_ENTRIES
                if max(read)[0] < expires_before and not store.copies.any_between(min(read)[0], max(read)[0]):
                    read = []
                read = [entry for entry in read if entry[0] >= expires_before or not store.is_expired(entry[0])]
            entries += read[: count - len(entries)]
        if not entries:
            group.scanned = offset
    return entries


def _read(group: ConsumerGroup, offset: int, count: int) -> tuple[int, bytes]:
    """Read `count` entries of a group's queue from `offset` on, as `LightQueue.read_from` does. It keeps what follows."""
    first, ahead = group.ahead
    at = (offset - first) * ENTRY_BYTES
    if not 0 <= at <= len(ahead) - count * ENTRY_BYTES:
        first, ahead = group.queue.read_from(offset, max(count, READ_AHEAD))
        at = max(offset - first, 0) * ENTRY_BYTES
    entries = ahead[at : at + count * ENTRY_BYTES]
    group.ahead = (first, ahead) if at + len(entries) < len(ahead) else (0, b"")
    return first + at // ENTRY_BYTES, entries


def _retries(group: ConsumerGroup, count: int) -> tuple[Entries, int]:
    """Return the next messages of the retry queue, up to `count` or as many as may be out together, and their lowest level."""
    entries: Entries = []
    lowest_level = 0
    offset = max(group.retry_cursor, group.retry_scanned)
    while len(entries) < count:
        first, packed = group.retry.read_from(offset, count - len(entries))
        if not packed:
            if not entries:
                # What is left was trimmed, because it can't be read. The cursor stays, since it is what the log says.
                group.retry_scanned = max(offset, first)
            break
        for at, (position, size, aux) in enumerate(ENTRY.iter_unpack(packed), first):
            attempts, level = attempts_and_level(aux)
            if level:
                count = 0 if level == ALONE and group.alone else min(count, together_max(level))
            if len(entries) >= count:
                return entries, lowest_level
            lowest_level = lowest(lowest_level, level)
            entries.append((position, at, size, attempts + 1, FROM_RETRY, 0))
        offset = entries[-1][1] + 1
    return entries, lowest_level


def _select_by_scan(
    group: ConsumerGroup, scan: Scan, mended: int, back: Entries, level: int, room: int, retries_first: bool
) -> Selection:
    """Select the messages that a scan finds, and the retries `back`, whose lowest level is `level`."""
    if room > 0:
        scan.run(room)
    if scan.level:
        back = []  # Only few may be out with what the scan has selected.
    if not scan.selected and not back:
        # It was the turn of new messages, but none is wanted or free. Perhaps they wait for a message in the retry queue.
        back, level = _retries(group, min(group.visible_retries, room))
    new: Entries = [
        (message.position, message.offset, message.size, message.attempts + 1, FROM_QUEUE, 0) for message in scan.selected
    ]
    selected = _fitting(group, back, new, retries_first)
    positions = {position for position, _, _, _, source, _ in selected if source == FROM_QUEUE}
    left_over = [message for message in scan.selected if message.position not in positions and not message.was_parked]
    scanned = scan.offset
    if left_over and group.order is None:
        scanned = left_over[0].offset  # the next scan begins with it
    properties: dict[str, Any] = {"cursor": scanned}
    if mended:
        properties["mended"] = mended
    if group.order is not None:
        # The record names the selected messages before the parked ones, so all messages of a key keep the order of the queue.
        scan.parked.extend(Parked(message.offset, message.position, message.size, message.key) for message in left_over)
        keys = {message.position: message.key for message in scan.selected}
        properties["keys"] = [keys.get(entry[0], NO_KEY) for entry in selected]
        if scan.parked:
            properties["parked"] = [list(parked[:4]) for parked in sorted(scan.parked)]  # none of them had an attempt
    must_append = bool(scan.parked) or scanned - group.cursor >= PASSED_MAX
    return Selection(selected, properties, must_append, scanned, scan.records, lowest(level, scan.level))


class ScannedMessage(NamedTuple):
    """A message that a scan has selected."""

    position: int
    offset: int
    size: int
    key: int
    was_parked: bool
    attempts: int = 0


class Scan:
    """One scan of a group's queue: from where the last one ended, until it has selected enough or has cost enough.

    Parameters:
        group: whose queue.
        dead_letters: tells which messages of a `$dlq/` queue are still dead letters.
        store: tells which messages retention has dropped.
        read: returns the record of a message, or None if it can't be read.
        in_order_max: how many messages of one message group it selects at most, in a FIFO group.
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
        self._key_room: dict[int, int] = {}
        """How many messages of each key may still be selected. The keys are locked as soon as the messages are handed out."""
        self.selected: list[ScannedMessage] = []
        self.parked: list[Parked] = []
        self.level = 0
        """The lowest level of what it has selected, which bounds how much it selects: see `pop.core.suspicion`."""
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
        """Select up to `room` messages."""
        order = self._group.order
        if order is not None:
            room = self._select_ready(order, room)
        bytes_left = RESPONSE_BYTES - sum(message.size for message in self.selected)
        for offset, position, size, until in self._candidates(room):
            if len(self.selected) >= room or bytes_left <= 0 or self._inspected >= SCAN_READS_MAX:
                return
            if order is not None and order.parked + len(self.parked) >= PARKED_MAX:
                return
            self.offset = offset + 1
            self._inspected += 1
            if self._is_wanted(position, size, offset, until) and self._select_or_park(order, position, size, offset):
                bytes_left -= size

    def _select_ready(self, order: FifoOrder, room: int) -> int:
        """Select parked messages of the ready keys: the next ones of each key, in order. Return how many to select in all."""
        for key in order.ready:
            if len(self.selected) >= room:
                break
            next_ones: list[Parked] = []
            for parked in order.waiting(key, min(self._in_order_max, room - len(self.selected))):
                bound = self._bound(parked.level, room)
                if len(self.selected) + len(next_ones) >= bound:
                    break
                room, self.level = bound, lowest(self.level, parked.level)
                next_ones.append(parked)
            if next_ones:
                # What the scan selects of this key comes after all parked messages of the key.
                self._key_room[key] = 0 if order.has_more(key, len(next_ones)) else self._in_order_max - len(next_ones)
                self.selected += [
                    ScannedMessage(each.position, each.offset, each.size, key, True, each.attempts) for each in next_ones
                ]
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
            first, packed = queue.read_from(self.offset, SCAN_ENTRIES)
            entries = entries_array(packed)
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
        own = properties_of(data)
        if not own or own != properties:
            key = order_key(data)
            if own and message_group_of(own):
                self._last_key = (own, key)
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

    def _select_or_park(self, order: FifoOrder | None, position: int, size: int, offset: int) -> bool:
        """Select a wanted message and return True; or park it, if its message group is busy, and return False."""
        key = NO_KEY
        if order is not None:
            if order.knows(position):
                return False  # after a repair of the log, a queue is scanned again
            data = self.records[position]
            key = self._key_of(data) if data is not None else NO_KEY
            if key != NO_KEY:
                left = self._key_room.get(key)
                if left is None:
                    left = self._in_order_max if order.is_free(key) else 0
                if left == 0:
                    self.parked.append(Parked(offset, position, size, key))
                    # Nothing after it may overtake it, whatever becomes free.
                    self._key_room[key] = 0
                    return False
                self._key_room[key] = left - 1
        self.selected.append(ScannedMessage(position, offset, size, key, False))
        return True
