"""The retained messages: the last message of each topic that was published with RETAIN set. MQTT 5.0, 3.3.1.3.

Rows of the index:

    key b"R", topic                    value: position u64, size u32, when the message expires i64 (0: never), account u64
    key b"l", position u64 big-endian  value: as above, then the topic; a delayed message, retained when its time comes
    key b"e", when it expires u64 big-endian, topic    no value; a retained message that expires
    key b"n"                           value: number of retained messages, u64

`gateway.delivery.topic_lists` has the rows by which a filter with wildcards finds its topics. The bodies stay in the log.

The publisher of a retained message is charged for it (`store.space.ledger`) until the message is replaced or cleared, or has
expired. Each record names its publisher, so no other record need be read to know whom to charge, and none is missed if it is
damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

from penstock.gateway.delivery import topic_lists
from penstock.store import topics
from penstock.store.bodies import TIMER_ENTRY
from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.part import Apply
from penstock.store.properties import decode_properties
from penstock.store.queues.lightqueue import ENTRY
from penstock.store.record import Flag, Kind, Record
from penstock.store.space.accounts import Resource
from penstock.store.space.causer import Causer
from penstock.store.space.ledger import Ledger

_ROW = Struct("<QIqQ")
_COUNT = Struct("<Q")
_DUE = Struct(">cQ")

SCAN_ROWS: Final = 128
"""Rows without a match after which the search of a wildcard pauses. A pause ends the step of the subscription that searches, so
that other clients are served."""

PROPERTIES_REMEMBERED: Final = 8_192
"""Properties whose meaning is remembered: those of a device's messages are mostly the same each time."""

REMEMBERED_BYTES_MAX: Final = 512
"""Bytes of such properties at most."""

EXPIRED_PER_CALL: Final = 256
"""Expired messages that one call of `end_expired` looks at."""


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
        self._changed: dict[bytes, tuple[RetainedRow | None, RetainedRow | None]] = {}
        """What the next save writes, by topic: the row, or None to delete it; and the row that the index has, or None."""
        self._found: tuple[bytes, RetainedRow | None] | None = None
        """The topic that was looked up last in the index, and what was found. A message is admitted, and then applied."""
        self._delayed: dict[int, bytes] = {}
        """Rows of delayed messages, with their topics, by position."""
        self._delayed_changed: dict[int, bytes | None] = {}
        """Those of them that the next save writes; None to delete the row."""
        self._count = self._saved_count = 0
        self._expired_from = b""
        """Where `end_expired` goes on: from this key on, without its first byte."""
        self.on_expiring: Callable[[int], None] = lambda expires_at_ms: None
        """Called with the time at which a message expires, in ms since 1970, when it is retained."""

    def __len__(self) -> int:
        """Return the number of retained messages. Expired ones count until a search or `end_expired` finds them."""
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

    def get(self, topic: str) -> RetainedRow | None:
        """Return what is retained of a topic; None if nothing is, or if it has expired."""
        row = self._row_of(topic.encode())
        return row if row is not None and not self._has_expired(row) else None

    def listed(self, topic_filter: str, after: str) -> Iterator[tuple[str, RetainedRow | None]]:
        """Yield the topics after one that a filter matches, in their order, with what is retained, as of the last commit.

        A topic without a row does not match after all, or its message has expired. Without a topic, the search goes on.
        """
        assert self._index is not None, "the store has not recovered yet"
        if not topics.is_wildcard(topic_filter):
            data = self._index.get(KeySpace.RETAINED + topic_filter.encode())
            if data is not None and after < topic_filter:
                yield topic_filter, self._unexpired(data)
            return
        for topic, data in topic_lists.candidates(self._index, topic_filter, after.encode()):
            name = topic.decode() if data is not None else ""
            yield name, self._unexpired(data) if data is not None and topics.matches(topic_filter, name) else None

    def _unexpired(self, data: bytes) -> RetainedRow | None:
        row = RetainedRow(*_ROW.unpack(data))
        return row if not self._has_expired(row) else None

    def _has_expired(self, row: RetainedRow) -> bool:
        return bool(row.expires_at_ms) and row.expires_at_ms <= self._now_of(row.position)

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
        if self._has_expired(row):
            self._forget_expired(topic, row)
            return b""
        return ENTRY.pack(row.position, row.size, 0) if row.position < before else b""

    def admit(self, topic: bytes, size: int, causer: Causer, *, is_delayed: bool = False) -> None:
        """Check that a message may be retained. Callers call it before they store the message.

        Args:
            topic: of the message.
            size: of its record in bytes. A message without a body, which clears its topic, needs no room.
            causer: its publisher, as the record names it.
            is_delayed: it is retained later, besides the one that its topic has until then.

        Raises:
            LimitExceeded: `mqtt.retained_max` messages, or as many bytes as they may have, are retained, or the causer may have
                no more.
        """
        ledger, name = self._ledger, topic.decode()
        row = self._row_of(topic) if not is_delayed else None
        replaced = row.size if row is not None else 0
        if row is None or row.account != causer.account:
            ledger.admit(causer, Resource.RETAINED, topic=name, spare=row is not None)
            ledger.admit(causer, Resource.RETAINED_BYTES, size, topic=name, spare=replaced)
        elif size > replaced:
            ledger.admit(causer, Resource.RETAINED_BYTES, size - replaced, topic=name)

    def end_expired(self, now_ms: int) -> bool:
        """Give up some messages that have expired at a time, in ms since 1970; return whether there may be more.

        Nobody need ever search for their topics, and their publishers must not be charged for what no client can get.
        """
        assert self._index is not None, "the store has not recovered yet"
        for looks, (key, _) in enumerate(self._index.rows(bytes(KeySpace.RETAINED_DUE), self._expired_from), 1):
            (_, due_ms), topic = _DUE.unpack_from(key), key[_DUE.size :]
            if due_ms > now_ms:
                break
            row = self._row_of(topic)
            if row is not None and row.expires_at_ms == due_ms <= self._now_of(row.position):
                self._forget_expired(topic, row)
            if looks == EXPIRED_PER_CALL:
                self._expired_from = key[1:] + b"\0"
                return True
        self._expired_from = b""
        return False

    def first_due_ms(self, after_ms: int) -> int | None:
        """Return when the first message expires after a time, in ms since 1970, as of the last commit; None if none does."""
        assert self._index is not None, "the store has not recovered yet"
        start = _DUE.pack(KeySpace.RETAINED_DUE, after_ms + 1)
        key = next((key for key, _ in self._index.rows(start[:1], start[1:])), None)
        return _DUE.unpack_from(key)[1] if key is not None else None

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
        expires_at_ms, by = _terms_of(record.properties)
        row = RetainedRow(record.position, record.size if record.body else 0, expires_at_ms, self._ledger.enter(by))
        if record.flags & Flag.DELAYED:  # The publisher of a delayed message is charged from the beginning.
            self._charge(row)
            self._delayed[record.position] = self._delayed_changed[record.position] = _ROW.pack(*row) + record.topic
            return
        old = self._row_of(record.topic)
        if old is not None and row.size and row.account == old.account:
            if row.size != old.size:  # Mostly nothing changes: a device retains its state every second.
                self._ledger.charge(row.account, Resource.RETAINED_BYTES, row.size - old.size)
        else:
            self._charge(row)
            if old is not None:
                self._release(old)
        self._put(record.topic, row, old)

    def _put(self, topic: bytes, row: RetainedRow, old: RetainedRow | None) -> None:
        """Put a message, which is charged, in the place of the one that its topic had.

        A message without a body clears the topic and is not retained itself [MQTT-3.3.1-6], [MQTT-3.3.1-7].
        """
        changed = self._changed.get(topic)
        kept = row if row.size else None
        self._changed[topic] = kept, changed[1] if changed is not None else old
        self._count += (kept is not None) - (old is not None)
        if row.expires_at_ms:
            self.on_expiring(row.expires_at_ms)

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
        """Delete the row of a message that has expired, unless it was replaced since the caller has read that row.

        No client can get this message any more, so no record needs to say that it is cleared.
        """
        if topic not in self._changed and self._row_of(topic) == row:
            self._release(row)
            self._changed[topic] = None, row
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
                topic = found[_ROW.size :]
                old = self._row_of(topic)
                if old is not None:
                    self._release(old)
                self._put(topic, RetainedRow(*_ROW.unpack_from(found)), old)

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
            if self._has_expired(row):
                self._forget_expired(key[1:], row)  # as `_entry` does: nobody may ever search for this topic
            else:
                yield row.position, row.size

    def load(self, index: Index) -> None:
        self._index = index
        row = index.get(bytes(KeySpace.RETAINED_COUNT))
        self._count = self._saved_count = _COUNT.unpack(row)[0] if row is not None else 0
        if row is not None and not self._count:
            self._saved_count = -1  # an earlier version has left a row that says 0; the next save deletes it
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
        if self._count != self._saved_count:
            self._save_count(batch)

    def _save_topics(self, batch: Batch) -> None:
        for topic, (row, old) in self._changed.items():
            key = KeySpace.RETAINED + topic
            if row is not None:
                batch.put(key, _ROW.pack(*row))
            elif old is not None:
                batch.delete(key)
            due_ms, old_due_ms = row.expires_at_ms if row else 0, old.expires_at_ms if old else 0
            if due_ms != old_due_ms:
                if old_due_ms:
                    batch.delete(_DUE.pack(KeySpace.RETAINED_DUE, old_due_ms) + topic)
                if due_ms:
                    batch.put(_DUE.pack(KeySpace.RETAINED_DUE, due_ms) + topic, b"")
            # The lists change only with the topics. So a device that retains its state every second costs one row.
            if (row is None) != (old is None):
                for prefix in topic_lists.prefixes_of(topic):
                    if row is not None:
                        batch.put(prefix + topic, b"")
                    else:
                        batch.delete(prefix + topic)
        self._changed.clear()
        self._found = None

    def _save_count(self, batch: Batch) -> None:
        self._saved_count = self._count
        if self._count:
            batch.put(bytes(KeySpace.RETAINED_COUNT), _COUNT.pack(self._count))
        else:
            batch.delete(bytes(KeySpace.RETAINED_COUNT))  # a new index, which may never see the messages, has no row


def _terms_of(properties: bytes) -> tuple[int, tuple[str, ...]]:
    """Return when the message with these properties expires, and who is charged for it."""
    return _remembered_terms(properties) if len(properties) <= REMEMBERED_BYTES_MAX else _read_terms(properties)


def _read_terms(properties: bytes) -> tuple[int, tuple[str, ...]]:
    about = decode_properties(properties)
    return about.expires_at_ms, tuple(about.by)


_remembered_terms = lru_cache(PROPERTIES_REMEMBERED)(_read_terms)
