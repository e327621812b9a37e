"""Compares two indexes that cover the same log: the stored one, and one that was built from the log anew.

Both must hold the same rows, with these exceptions, which follow from what an index is:

- What an index says of itself (`OWN_KEYS`), such as how far it covers the log, and how entries of light queues are divided into
  rows, which depends on when commits were made. So entries are compared one by one, with their offsets.
- Entries of messages that retention has dropped, or has carried forward, are not brought back where an index is built from a
  snapshot. In queues of messages only entries of records that the log still has are compared. Internal queues, for retries and
  dead letters, are part of a snapshot, so there entries of records that were carried forward are compared too.
- An index that is built from a later snapshot than the one where the log begins lacks the entries before it. They are not
  compared.
- Pinned entries, those of records that were carried forward, are checked by themselves: each must name such a record, of a
  topic that fits. That one is missing can't be seen.
- How many deduplication ids are remembered depends on options, and those may change. So their rows are checked by themselves:
  each must be the one of its record. That one is missing can't be seen, nor that one of a dropped record has changed.
- How delayed messages are divided into rows depends on time too. `timercomparison` compares them one by one.
- An expiry deletes the row of a late dispatch when it has carried the messages forward. So the stored index may lack such rows.
- Retained messages that expire are given up without a record. `expire_retained` does so in both
  indexes, as of the same time.
- Transient queues end with the process. A start has deleted them from both.

How pending delayed messages are divided into rows depends on when commits were made and on how far time has gone. So they are
compared one by one: those that have neither fired nor been recalled, day by day, with the memory of one day. Recalls are
compared too, but for those of messages that were due before the log begins: a running node forgets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from heapq import merge
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from penstock.node.parts import NodeParts
from penstock.pop.core.sentids import row_of
from penstock.store import topics
from penstock.store.errors import PositionUnknown, QueueUnknown, RecordCorrupt
from penstock.store.index.index import OWN_KEYS, Index, KeySpace
from penstock.store.properties import decode_properties, tag_hash
from penstock.store.queues.catalogue import without_entries
from penstock.store.queues.lightqueue import (
    ENTRY,
    ENTRY_BYTES,
    TRANSIENT,
    entries_key,
    name_key,
    name_of,
    pinned_key,
    pinned_prefix,
    queue_prefix,
)
from penstock.store.queues.queues import INTERNAL
from penstock.store.record import Kind
from penstock.store.store import Store
from penstock.timer.storedtimers import Described, StoredTimers

PARTS = (KeySpace.TIMER + b"s", KeySpace.TIMER + b"r")
"""Keys of rows that must be the same."""


Found = tuple[str, str | None, str | None]
"""What differs, and how it is in the stored and in the expected index; None if it is missing there."""


def compare_timers(stored: Index, expected: Index, began_ms: int) -> Iterator[Found]:
    """Yield the differences.

    Args:
        stored: the stored index.
        expected: one that was built anew.
        began_ms: when the first record of the log was stored. Earlier recalls are not compared.

    Raises:
        ValueError, struct.error: a row can't be decoded.
    """
    one, other = StoredTimers(stored), StoredTimers(expected)
    for day in sorted(one.days() | other.days()):
        yield from _compare_pending(one.pending(day), other.pending(day))
    recalled = [set(timers.recalled(began_ms)) for timers in (one, other)]
    for minute, position in sorted(recalled[0] ^ recalled[1]):
        sides = ["recalled" if (minute, position) in side else None for side in recalled]
        yield f"recall of the message at position {position}", sides[0], sides[1]
    if one.cursors.encoded() != other.cursors.encoded():
        yield "cursors of the lanes", one.cursors.encoded().hex(), other.cursors.encoded().hex()
    for key in PARTS:
        row, should_be = stored.get(key), expected.get(key)
        if row != should_be:
            yield repr(key), row.hex() if row is not None else None, should_be.hex() if should_be is not None else None
    for (width, bucket), (found, stated) in one.counts().items():
        if found != stated:
            yield f"counts of bucket {bucket} of width {width}", str(stated), str(found)
    for minute, (recalled_n, stated_n) in one.recalled_counts().items():
        if recalled_n != stated_n:
            yield f"count of recalled messages of minute {minute}", str(stated_n), str(recalled_n)


def _compare_pending(one: list[Described], other: list[Described]) -> Iterator[Found]:
    for message in sorted({*one} ^ {*other}):
        position, due_ms, account, size, tag, topic = message
        text = f"account {account}, size {size}, tag {tag}, topic {topic.decode(errors='replace')!r}"
        sides = (text, None) if message in one else (None, text)
        yield f"due at {due_ms} ms, position {position}", *sides
    for position in {message[0] for message in one if one.count(message) > 1} if len({*one}) < len(one) else ():
        yield f"position {position}", "twice", "once"


VALUE_BYTES = 48
"""Bytes of a value that a difference shows."""

_OFFSET = Struct(">Q")
_ID_STOP = 5

_KEYS: dict[KeySpace, tuple[Struct, str]] = {
    KeySpace.QUEUE: (Struct(">I"), "queue {}"),
    KeySpace.BACKFILL: (Struct(">I"), "queue {}"),
    KeySpace.GROUP: (Struct(">I"), "group {}"),
    KeySpace.CHECKPOINT: (Struct(">Q"), "checkpoint at position {}"),
    KeySpace.ORDER: (Struct(">IQ"), "group {}, position {}"),
    KeySpace.DEAD: (Struct(">IQI"), "queue {}, position {}, number {}"),
    KeySpace.REDRIVEN: (Struct(">IQ"), "group {}, position {}"),
    KeySpace.TRANSACTION: (Struct(">Q"), "transaction at position {}"),
    KeySpace.SENT_ID: (Struct(">Q"), "deduplication id of the message at position {}"),
    KeySpace.TIMER_KEY: (Struct(">Q"), "key of the message at position {}"),
    KeySpace.SCHEDULE: (Struct(">cQ"), "row {!r} of the schedule at position {}"),
    KeySpace.RETAINED_LATER: (Struct(">Q"), "position {}"),
    KeySpace.COPY: (Struct(">Q"), "record first stored at position {}"),
    KeySpace.DISPATCH: (Struct(">QQ"), "oldest message at position {}, dispatched by the record at position {}"),
    KeySpace.ENTRIES: (Struct(">IQ"), "queue {}, offset {}"),
    KeySpace.PINNED: (Struct(">IQ"), "queue {}, offset {}"),
}
"""What keys hold after their first byte. The keys of other key spaces are text, or are shown as bytes."""


class Difference(NamedTuple):
    """A row, or an entry of a light queue, in which two indexes differ."""

    space: str
    """Name of the key space."""
    key: str
    """The key, decoded."""
    stored: str | None
    """The value in the stored index; None if it lacks the row."""
    expected: str | None
    """The value that follows from the log; None if the row should not be there."""

    def __str__(self) -> str:
        if self.stored is None:
            return f"{self.key} is missing; it should be {self.expected}"
        if self.expected is None:
            return f"{self.key} should not be there; it is {self.stored}"
        return f"{self.key} is {self.stored}, but should be {self.expected}"


def compare(stored: Store, expected: Store, on_row: Callable[[int], None]) -> Iterator[Difference]:
    """Yield the differences of two indexes, with bounded memory, key space by key space.

    Args:
        stored: recovered from the stored index. `settle` was called for both.
        expected: recovered from an index that was built anew.
        on_row: called with the number of bytes of each row.

    Raises:
        IndexDamaged: a row can't be read.
    """
    others = (KeySpace.ENTRIES, KeySpace.PINNED, KeySpace.SENT_ID, KeySpace.TIMER)
    for space in KeySpace:
        if space not in others:
            yield from _compare_rows(stored.index, expected.index, space, on_row)
    yield from _check_sent_ids(stored, on_row)
    began_ms = stored.log.stored_ms(stored.log.start)
    for key, one, other in compare_timers(stored.index, expected.index, began_ms):
        yield Difference(KeySpace.TIMER.name.lower(), key, one, other)
    yield from _Entries(stored, expected, on_row).differences()


def stale_pinned(store: Store) -> int:
    """Return how many pinned entries name a record that nothing carries forward. `settle` deletes them.

    A kill between two steps of an expiry leaves such entries, so they are no difference; but a changed row looks the same.
    """
    stale = 0
    for _, entries in store.index.rows(bytes(KeySpace.PINNED)):
        positions = [position for position, _, _ in ENTRY.iter_unpack(entries)]
        carried = store.copies.readable(sorted(set(positions)))
        stale += sum(position not in carried for position in positions)
    return stale


def settle(store: Store) -> None:
    """Do what a recovered store would do in time: fill queues, and forget what refers to dropped records. It appends little."""
    store.commit()
    while store.queues.backfill():
        store.commit()
    store.commit()
    for _ in store.retention.forget_dropped():
        pass
    store.commit()


def expire_retained(parts: NodeParts, now_ms: int) -> None:
    """Give up the retained messages that have expired at `now_ms`, in ms since 1970, as a node does in time."""
    while parts.retained.end_expired(now_ms):
        parts.store.commit()
    parts.store.commit()


# --- rows ---------------------------------------------------------------------------------------------------------------


def _compare_rows(stored: Index, expected: Index, space: KeySpace, on_row: Callable[[int], None]) -> Iterator[Difference]:
    comparable = without_entries if space in (KeySpace.NAME, KeySpace.WILDCARD) else bytes
    prefix = bytes(space)
    for key, one, other in _side_by_side(_rows(stored, prefix), _rows(expected, prefix)):
        on_row(len(key) + max(len(one or b""), len(other or b"")))
        if one is None and space == KeySpace.DISPATCH:
            continue
        if one is None or other is None or comparable(one) != comparable(other):
            yield Difference(space.name.lower(), describe_key(key), _shown(one), _shown(other))


def _check_sent_ids(store: Store, on_row: Callable[[int], None]) -> Iterator[Difference]:
    form = _KEYS[KeySpace.SENT_ID][0]
    for key, value in store.index.rows(bytes(KeySpace.SENT_ID)):
        on_row(len(key) + len(value))
        expected = None
        if len(key) == 1 + form.size:
            (position,) = form.unpack(key[1:])
            if position < store.log.start:
                continue
            with suppress(PositionUnknown, RecordCorrupt):
                expected = row_of(store.log.record(position))
        if value != expected:
            yield Difference(KeySpace.SENT_ID.name.lower(), describe_key(key), _shown(value), _shown(expected))


def _rows(index: Index, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    return (row for row in index.rows(prefix) if row[0] not in OWN_KEYS)


def _side_by_side(
    stored: Iterator[tuple[bytes, bytes]], expected: Iterator[tuple[bytes, bytes]]
) -> Iterator[tuple[bytes, bytes | None, bytes | None]]:
    """Yield each key of either side in order, with the value of each side; None where that side lacks the key."""
    one, other = next(stored, None), next(expected, None)
    while one is not None or other is not None:
        if other is None or (one is not None and one[0] < other[0]):
            assert one is not None
            yield one[0], one[1], None
            one = next(stored, None)
        elif one is None or other[0] < one[0]:
            yield other[0], None, other[1]
            other = next(expected, None)
        else:
            yield one[0], one[1], other[1]
            one, other = next(stored, None), next(expected, None)


def describe_key(key: bytes) -> str:
    """Return a key as text for people."""
    try:
        space = KeySpace(key[:1])
    except ValueError:
        return key.hex()
    rest = key[1:]
    if space in _KEYS:
        form, text = _KEYS[space]
        try:
            return text.format(*form.unpack(rest))
        except StructError:
            return f"{rest.hex()} (of an unexpected length)"
    text = rest.decode("utf-8", "replace")
    return repr(text) if text.isprintable() else rest.hex()


def _shown(value: bytes | None) -> str | None:
    if value is None:
        return None
    return value.hex() if len(value) <= VALUE_BYTES else f"{value[:VALUE_BYTES].hex()}... ({len(value)} bytes)"


# --- entries of light queues --------------------------------------------------------------------------------------------

_Run = tuple[int, bytes]
"""Adjacent entries, with the offset of the first."""


class _Entries:
    """The entries of all light queues of two indexes."""

    def __init__(self, stored: Store, expected: Store, on_row: Callable[[int], None]) -> None:
        self._stored = stored
        self._expected = expected
        self._on_row = on_row
        self._start = expected.log.start
        self._entries_from = expected.entries_from

    def differences(self) -> Iterator[Difference]:
        for queue_id in merge_ids(_queue_ids(self._stored.index), _queue_ids(self._expected.index)):
            if queue_id < TRANSIENT:
                yield from self._compare_queue(queue_id)

    def _compare_queue(self, queue_id: int) -> Iterator[Difference]:
        row = self._expected.index.get(name_key(queue_id))
        topic_filter = name_of(row)[0] if row is not None else "which should not exist"
        is_internal = topic_filter.startswith(INTERNAL)
        runs = together(self._runs(self._stored, queue_id), self._runs(self._expected, queue_id))
        for first, one, other in runs:
            if one == other:
                continue
            for at in range(0, len(one or other or b""), ENTRY_BYTES):
                entries = [ENTRY.unpack_from(side, at) if side is not None else None for side in (one, other)]
                if entries[0] == entries[1] or not any(self._matters(entry, is_internal) for entry in entries):
                    continue
                key = f"queue {queue_id} ({topic_filter}), offset {first + at // ENTRY_BYTES}"
                yield Difference("entries", key, *map(_entry_shown, entries))
        yield from self._check_pinned(queue_id, topic_filter)

    def _matters(self, entry: tuple[int, int, int] | None, is_internal: bool) -> bool:
        """Return whether an entry must be in both indexes: see the head of this module."""
        if entry is None:
            return False
        return entry[0] >= self._entries_from or (is_internal and self._expected.copies.where(entry[0]) is not None)

    def _check_pinned(self, queue_id: int, topic_filter: str) -> Iterator[Difference]:
        """Yield the pinned entries of the stored index that don't name a record that was carried forward."""
        for key, entries in self._stored.index.rows(pinned_prefix(queue_id)):
            first = _OFFSET.unpack(key[_ID_STOP:])[0]
            for number, entry in enumerate(ENTRY.iter_unpack(entries)):
                if not self._is_carried(topic_filter, *entry):
                    text = f"queue {queue_id} ({topic_filter}), offset {first + number}"
                    yield Difference("pinned", text, _entry_shown(entry), None)

    def _is_carried(self, topic_filter: str, position: int, size: int, aux: int) -> bool:
        """Return whether an entry names a record that was carried forward, and that belongs to the queue of the filter."""
        if position >= self._start:
            return False
        try:
            record = self._expected.copies.record(position, size)
        except (PositionUnknown, RecordCorrupt):
            return self._has_damaged_copy(position)
        if topic_filter.startswith(INTERNAL):
            return True  # a snapshot has these, so they have been compared
        is_wanted = topics.matches(topic_filter, record.topic.decode())
        return is_wanted and aux == tag_hash(decode_properties(record.properties).tag)

    def _has_damaged_copy(self, position: int) -> bool:
        """Return whether a record was carried forward to a place that a repair of the log has set aside since."""
        place = self._expected.copies.where(position)
        try:
            return place is not None and self._expected.log.record(place).kind == Kind.DAMAGED
        except (PositionUnknown, RecordCorrupt):
            return True

    def _runs(self, store: Store, queue_id: int) -> Iterator[_Run]:
        """Yield all entries of a queue in order."""
        index = store.index
        kept = ((key, entries) for key, entries in index.rows(pinned_prefix(queue_id)))
        dense = ((key, entries) for key, entries in index.rows(queue_prefix(queue_id)))
        for key, entries in merge(kept, dense, key=lambda row: row[0][_ID_STOP:]):
            self._on_row(len(key) + len(entries))
            yield _OFFSET.unpack(key[_ID_STOP:])[0], entries
        try:
            queue = store.queues.get(queue_id)
        except QueueUnknown:
            return
        if queue.open_row:
            yield queue.open_offset, queue.open_row


def _queue_ids(index: Index) -> Iterator[int]:
    """Yield the ids of all queues that have a name or entries, in order."""
    return merge_ids(
        *(
            _ids_of(index, prefix, first_key)
            for prefix, first_key in (
                (KeySpace.QUEUE, name_key),
                (KeySpace.ENTRIES, lambda queue_id: entries_key(queue_id, 0)),
                (KeySpace.PINNED, lambda queue_id: pinned_key(queue_id, 0)),
            )
        )
    )


def _ids_of(index: Index, space: KeySpace, first_key: Callable[[int], bytes]) -> Iterator[int]:
    queue_id = 0
    while queue_id < 2**32:
        row = index.first_at_or_after(first_key(queue_id), bytes(space))
        if row is None:
            return
        queue_id = int.from_bytes(row[0][1:_ID_STOP], "big")
        yield queue_id
        queue_id += 1


def merge_ids(*sides: Iterator[int]) -> Iterator[int]:
    """Yield the numbers of several ascending sequences in order, each once."""
    last = None
    for number in merge(*sides):
        if number != last:
            yield number
        last = number


def together(stored: Iterator[_Run], expected: Iterator[_Run]) -> Iterator[tuple[int, bytes | None, bytes | None]]:
    """Yield the entries of two sides in pieces of the same offsets. A side is None where it lacks the entries."""
    one, other = next(stored, None), next(expected, None)
    while one is not None or other is not None:
        if other is None or (one is not None and _end_of(one) <= other[0]):
            assert one is not None
            yield one[0], one[1], None
            one = next(stored, None)
        elif one is None or _end_of(other) <= one[0]:
            yield other[0], None, other[1]
            other = next(expected, None)
        elif one[0] < other[0]:
            before, one = _split(one, other[0])
            yield before[0], before[1], None
        elif other[0] < one[0]:
            before, other = _split(other, one[0])
            yield before[0], None, before[1]
        else:
            end = min(_end_of(one), _end_of(other))
            (first, ours), rest = _split(one, end)
            (_, theirs), other_rest = _split(other, end)
            yield first, ours, theirs
            one = rest if rest[1] else next(stored, None)
            other = other_rest if other_rest[1] else next(expected, None)


def _end_of(run: _Run) -> int:
    return run[0] + len(run[1]) // ENTRY_BYTES


def _split(run: _Run, offset: int) -> tuple[_Run, _Run]:
    at = (offset - run[0]) * ENTRY_BYTES
    return (run[0], run[1][:at]), (offset, run[1][at:])


def _entry_shown(entry: tuple[int, int, int] | None) -> str | None:
    return None if entry is None else "position {}, size {}, aux {}".format(*entry)
