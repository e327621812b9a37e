"""The retained messages: the last message of each topic that was published with RETAIN set. MQTT 5.0, 3.3.1.3.

Rows of the index:

    key b"R", topic                    value: position u64, size u32, when the message expires i64 (0: never), account u64
    key b"l", position u64 big-endian  value: as above, then the topic; a delayed message, retained when its time comes
    key b"n"                           value: number of retained messages, u64

`gateway.delivery.topic_lists` has the rows by which a filter with wildcards finds its topics. The bodies stay in the log.

The publisher of a retained message is charged for it (`store.ledger`) until another one replaces or clears the message. A
message names its publisher only if the topic had none before, or another one. So a device that retains its state every second
adds nothing to its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from struct import Struct
from typing import Final, NamedTuple

from penstock.gateway.delivery import topic_lists
from penstock.store import topics
from penstock.store.accounts import Resource
from penstock.store.bodies import TIMER_ENTRY
from penstock.store.causer import Causer
from penstock.store.index import Batch, Index, KeySpace
from penstock.store.ledger import Ledger
from penstock.store.lightqueue import ENTRY
from penstock.store.part import Apply
from penstock.store.properties import NO_PROPERTIES, decode_properties
from penstock.store.record import Flag, Kind, Record, record_bytes

_ROW = Struct("<QIqQ")
_COUNT = Struct("<Q")

SCAN_ROWS: Final = 128
"""Rows without a match after which the search of a wildcard pauses. A pause ends the step of the subscription that searches, so
that other clients are served."""


class RetainedRow(NamedTuple):
    """A retained message: the value of its row."""

    position: int
    """Of its record in the log."""
    size: int
    """Size of that record in bytes; 0 of a message without a body, which clears its topic."""
    expires_at_ms: int
    """When it expires, in ms since 1970; 0 if it doesn't."""
    account: int
    """Id of the account that is charged for it."""


class RetainedMessages:
    """The retained messages of a node, by topic. A part of the store.

    Parameters:
        now_of: returns the present time for the message at a position, in ms since 1970, to judge whether it has expired.
        ledger: is charged for each message.
    """

    def __init__(self, now_of: Callable[[int], int], ledger: Ledger) -> None:
        self._now_of = now_of
        self._ledger = ledger
        self._index: Index | None = None
        self._changed: dict[bytes, tuple[RetainedRow | None, bool]] = {}
        """What the next save writes, by topic: the row, or None to delete it; and whether the index has a row."""
        self._found: tuple[bytes, RetainedRow | None] | None = None
        """The topic that was looked up last in the index, and what was found. A message is admitted, and then applied."""
        self._delayed: dict[int, bytes] = {}
        """Rows of delayed messages, with their topics, by position."""
        self._delayed_changed: dict[int, bytes | None] = {}
        """Those of them that the next save writes; None to delete the row."""
        self._count = self._saved_count = 0

    def __len__(self) -> int:
        """Return the number of retained messages. Expired ones count until a search finds them."""
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

    def _entry(self, topic: bytes, data: bytes, before: int) -> bytes:
        """Return the entry of a row; empty if its message came later or has expired. An expired message's row is deleted."""
        row = RetainedRow(*_ROW.unpack(data))
        if row.expires_at_ms and row.expires_at_ms <= self._now_of(row.position):
            self._forget_expired(topic, row)
            return b""
        return ENTRY.pack(row.position, row.size, 0) if row.position < before else b""

    def admit(self, topic: bytes, body: bytes, causer: Causer, *, is_delayed: bool = False) -> list[str]:
        """Return what the properties of a message to be retained must have as `by`: nothing if its publisher is known.

        Callers call it before they store the message.

        Args:
            topic, body: of the message.
            causer: its publisher.
            is_delayed: it is retained later, besides the one that its topic has until then.

        Raises:
            LimitExceeded: `mqtt.retained_max` messages or `mqtt.retained_bytes_max` bytes are retained, or the causer may have
                no more.
        """
        ledger, name = self._ledger, topic.decode()
        causer = ledger.with_tenant(causer, name)
        row = self._row_of(topic) if not is_delayed else None
        size = record_bytes(topic, body) if body else 0
        if row is not None and (row.account == causer.account or not size):
            if size > row.size:
                ledger.admit(causer, Resource.RETAINED_BYTES, size - row.size, topic=name)
            return []
        if size:
            ledger.admit(causer, Resource.RETAINED, topic=name)
            ledger.admit(causer, Resource.RETAINED_BYTES, size, topic=name)
        return causer.row()

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
        about = decode_properties(record.properties) if record.properties else NO_PROPERTIES
        size = record.size if record.body else 0
        if record.flags & Flag.DELAYED:  # The publisher of a delayed message is charged from the beginning.
            row = RetainedRow(record.position, size, about.expires_at_ms, self._ledger.enter(about.by))
            self._charge(row)
            self._delayed[record.position] = self._delayed_changed[record.position] = _ROW.pack(*row) + record.topic
            return
        old = self._row_of(record.topic)
        account = old.account if old is not None and not about.by else self._ledger.enter(about.by)
        row = RetainedRow(record.position, size, about.expires_at_ms, account)
        self._charge(row)
        self._retain(record.topic, row)

    def _retain(self, topic: bytes, row: RetainedRow) -> None:
        """Put a message, which is charged, in the place of the one that its topic had.

        A message without a body clears the topic and is not retained itself [MQTT-3.3.1-6], [MQTT-3.3.1-7].
        """
        old, changed = self._row_of(topic), self._changed.get(topic)
        is_in_index = changed[1] if changed is not None else old is not None
        if old is not None:
            self._release(old)
        kept = row if row.size else None
        self._changed[topic] = kept, is_in_index
        self._count += (kept is not None) - (old is not None)

    def _row_of(self, topic: bytes) -> RetainedRow | None:
        """Return what is retained of a topic; None if nothing is."""
        changed = self._changed.get(topic)
        if changed is not None:
            return changed[0]
        if self._found is None or self._found[0] != topic:
            assert self._index is not None, "the store has not recovered yet"
            data = self._index.get(KeySpace.RETAINED + topic)
            self._found = topic, RetainedRow(*_ROW.unpack(data)) if data is not None else None
        return self._found[1]

    def _forget_expired(self, topic: bytes, row: RetainedRow) -> None:
        """Delete the row of a message that has expired, unless it was replaced since the last commit.

        No client can get this message any more, so no record needs to say that it is cleared.
        """
        if topic not in self._changed:
            self._release(row)
            self._changed[topic] = None, True
            self._count -= 1

    def _charge(self, row: RetainedRow, sign: int = 1) -> None:
        if row.size:
            self._ledger.charge(row.account, Resource.RETAINED, sign)
            self._ledger.charge(row.account, Resource.RETAINED_BYTES, sign * row.size)

    def _release(self, row: RetainedRow) -> None:
        self._charge(row, -1)

    def _apply_fired(self, record: Record) -> None:
        for position, _ in TIMER_ENTRY.iter_unpack(record.body) if self._delayed else ():
            found = self._take_delayed(position)
            if found is not None:
                self._retain(found[_ROW.size :], RetainedRow(*_ROW.unpack_from(found)))

    def _apply_cancelled(self, record: Record) -> None:
        for position, _ in TIMER_ENTRY.iter_unpack(record.body):
            found = self._take_delayed(position)
            if found is not None:
                self._release(RetainedRow(*_ROW.unpack_from(found)))

    def _take_delayed(self, position: int) -> bytes | None:
        """Remove a delayed message, because it was published or recalled; return its row."""
        found = self._delayed.pop(position, None)
        if found is not None:
            self._delayed_changed[position] = None
        return found

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        assert self._index is not None, "the store has not recovered yet"
        for key, data in self._index.rows(bytes(KeySpace.RETAINED)):
            row = RetainedRow(*_ROW.unpack(data))
            if row.position >= before:
                continue
            if row.expires_at_ms and row.expires_at_ms <= self._now_of(row.position):
                self._forget_expired(key[1:], row)  # as `_entry` does: nobody may ever search for this topic
            else:
                yield row.position, row.size

    def load(self, index: Index) -> None:
        self._index = index
        row = index.get(bytes(KeySpace.RETAINED_COUNT))
        self._count = self._saved_count = _COUNT.unpack(row)[0] if row is not None else 0
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
        for topic, (row, is_in_index) in self._changed.items():
            key = KeySpace.RETAINED + topic
            if row is not None:
                batch.put(key, _ROW.pack(*row))
            elif is_in_index:
                batch.delete(key)
            # The lists change only with the topics. So a device that retains its state every second costs one row.
            if (row is not None) != is_in_index:
                for prefix in topic_lists.prefixes_of(topic):
                    if row is not None:
                        batch.put(prefix + topic, b"")
                    else:
                        batch.delete(prefix + topic)
        self._changed.clear()
        self._found = None
        if self._count != self._saved_count:
            self._saved_count = self._count
            batch.put(bytes(KeySpace.RETAINED_COUNT), _COUNT.pack(self._count))
