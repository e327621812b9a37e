"""The retained messages: the last message of each topic that was published with RETAIN set. MQTT 5.0, 3.3.1.3.

Rows of the index:

    key b"R", topic                    value: position u64, size u32, when the message expires i64 (0: never)
    key b"l", position u64 big-endian  value: as above, then the topic; a delayed message, retained when its time comes
    key b"n"                           value: number of retained messages, u64

`gateway.delivery.topic_lists` has the rows by which a filter with wildcards finds its topics. The bodies stay in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from struct import Struct
from typing import Final

from penstock.gateway.delivery import topic_lists
from penstock.store import topics
from penstock.store.bodies import TIMER_ENTRY
from penstock.store.index import Batch, Index, KeySpace
from penstock.store.lightqueue import ENTRY
from penstock.store.part import Apply
from penstock.store.properties import decode_properties
from penstock.store.record import Flag, Kind, Record

_ROW = Struct("<QIq")
_COUNT = Struct("<Q")

SCAN_ROWS: Final = 128
"""Rows without a match after which the search of a wildcard pauses. A pause ends the step of the subscription that searches, so
that other clients are served."""


class RetainedMessages:
    """The retained messages of a node, by topic. A part of the store.

    Parameters:
        now_of: returns the present time for the message at a position, in ms since 1970, to judge whether it has expired.
    """

    def __init__(self, now_of: Callable[[int], int]) -> None:
        self._now_of = now_of
        self._index: Index | None = None
        self._changed: dict[bytes, bytes | None] = {}
        """Rows by topic that the next save writes; None to delete the row."""
        self._delayed: dict[int, bytes] = {}
        """Rows of delayed messages, with their topics, by position."""
        self._delayed_changed: dict[int, bytes | None] = {}
        """Those of them that the next save writes; None to delete the row."""
        self._count = 0

    def __len__(self) -> int:
        """Return the number of retained messages at the last commit. Expired ones count until a search finds them."""
        return self._count

    def matching(self, topic_filter: str, before: int, after: bytes = b"") -> Iterator[bytes]:
        """Yield a light-queue entry for each retained message whose topic a filter matches, in the order of the topics.

        The index is read step by step, so that a million messages take no memory. Only what was committed is found. After
        `SCAN_ROWS` rows without a match, `b""` is yielded, so that a search that finds little can let other clients go first.

        Args:
            topic_filter: a valid filter.
            before: the end of the log when the subscription began. Later messages come by the light queue.
            after: only topics after this one are searched.
        """
        assert self._index is not None, "the store has not recovered yet"
        if topics.is_wildcard(topic_filter):
            yield from self._search(self._index, topic_filter, before, after)
            return
        row = self._index.get(KeySpace.RETAINED + topic_filter.encode())
        if row is not None and not after:
            yield self._entry(topic_filter.encode(), row, before)

    def _search(self, index: Index, topic_filter: str, before: int, after: bytes) -> Iterator[bytes]:
        missed = 0
        for topic, row in topic_lists.candidates(index, topic_filter, after):
            found = b""
            if row is not None and topics.matches(topic_filter, topic.decode()):
                found = self._entry(topic, row, before)
            if found:
                missed = 0
                yield found
            else:
                missed += 1
                if missed == SCAN_ROWS:
                    missed = 0
                    yield b""

    def _entry(self, topic: bytes, row: bytes, before: int) -> bytes:
        """Return the entry of a row; empty if its message came later or has expired. An expired message's row is deleted."""
        position, size, expires_at_ms = _ROW.unpack(row)
        if expires_at_ms and expires_at_ms <= self._now_of(position):
            # No client can get this message any more, so no record needs to say that it is cleared.
            self._changed.setdefault(topic, None)
            return b""
        return ENTRY.pack(position, size, 0) if position < before else b""

    # --- part of the store ---------------------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return {
            Kind.MESSAGE: self._apply_message,
            Kind.TIMER_FIRED: self._apply_fired,
            Kind.TIMER_CANCELLED: self._apply_cancelled,
        }

    def _apply_message(self, record: Record) -> None:
        if not record.flags & Flag.RETAIN:
            return
        expires_at_ms = decode_properties(record.properties).expires_at_ms if record.properties else 0
        row = _ROW.pack(record.position, record.size if record.body else 0, expires_at_ms)
        if record.flags & Flag.DELAYED:
            self._delayed[record.position] = self._delayed_changed[record.position] = row + record.topic
        else:
            self._retain(record.topic, row)

    def _retain(self, topic: bytes, row: bytes) -> None:
        # A message without a body clears the topic and is not retained itself [MQTT-3.3.1-6], [MQTT-3.3.1-7].
        self._changed[topic] = row if _ROW.unpack(row)[1] else None

    def _apply_fired(self, record: Record) -> None:
        for position, _ in TIMER_ENTRY.iter_unpack(record.body) if self._delayed else ():
            found = self._take_delayed(position)
            if found is not None:
                self._retain(found[_ROW.size :], found[: _ROW.size])

    def _apply_cancelled(self, record: Record) -> None:
        for position, _ in TIMER_ENTRY.iter_unpack(record.body):
            self._take_delayed(position)

    def _take_delayed(self, position: int) -> bytes | None:
        """Remove a delayed message, because it was published or recalled; return its row."""
        found = self._delayed.pop(position, None)
        if found is not None:
            self._delayed_changed[position] = None
        return found

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        assert self._index is not None, "the store has not recovered yet"
        for key, row in self._index.rows(bytes(KeySpace.RETAINED)):
            position, size, expires_at_ms = _ROW.unpack(row)
            if position >= before:
                continue
            if expires_at_ms and expires_at_ms <= self._now_of(position):
                self._changed.setdefault(key[1:], None)  # as `_entry` does: nobody may ever search for this topic
            else:
                yield position, size

    def load(self, index: Index) -> None:
        self._index = index
        row = index.get(bytes(KeySpace.RETAINED_COUNT))
        self._count = _COUNT.unpack(row)[0] if row is not None else 0
        for key, row in index.rows(bytes(KeySpace.RETAINED_LATER)):
            self._delayed[int.from_bytes(key[1:], "big")] = row

    def save(self, batch: Batch) -> None:
        for position, row in self._delayed_changed.items():
            key = KeySpace.RETAINED_LATER + position.to_bytes(8, "big")
            if row is not None:
                batch.put(key, row)
            else:
                batch.delete(key)
        self._delayed_changed.clear()
        if self._changed:
            self._save_topics(batch)

    def _save_topics(self, batch: Batch) -> None:
        assert self._index is not None
        before = self._count
        for topic, row in self._changed.items():
            key = KeySpace.RETAINED + topic
            was_there = self._index.get(key) is not None
            if row is not None:
                batch.put(key, row)
            elif was_there:
                batch.delete(key)
            # The lists change only with the topics. So a device that retains its state every second costs one row.
            if (row is not None) != was_there:
                self._count += 1 if row is not None else -1
                for prefix in topic_lists.prefixes_of(topic):
                    if row is not None:
                        batch.put(prefix + topic, b"")
                    else:
                        batch.delete(prefix + topic)
        self._changed.clear()
        if self._count != before:
            batch.put(bytes(KeySpace.RETAINED_COUNT), _COUNT.pack(self._count))
