"""Deduplication ids: a message that its sender repeats is stored once.

A sender that got no answer can't know whether its message is stored. If the message has a deduplication id, it may send the
message again: the node remembers the ids of the last messages of each topic, and responds to a repeated one with the first.

Ids are remembered for `pop.deduplication`, of a topic at most a fifth of `pop.deduplication_ids_max`, and of all topics at most
so many; the oldest is forgotten first. A sender that repeats a message says how long ago it sent it first.
If the node may have forgotten an id of that time, it refuses the message, because it can't tell whether the message is stored.

Rows of the index: key b"I", position u64 big-endian; value stored ms i64, flags u8, digest 8 bytes, bytes of the topic u16,
topic, id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

from penstock.pop.options import PopOptions
from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.part import Apply
from penstock.store.properties import deduplication_id_of
from penstock.store.record import Flag, Kind, Record
from penstock.store.store import Store

ID_BYTES_MAX = 256
"""Maximum size of a deduplication id."""

FORGOTTEN_AT_ONCE_MAX = 8
"""Maximum number of old ids that are forgotten for a new one: more than one, so that none stay, and few, so that a message
after a pause doesn't wait for all of them."""

_IDENTIFIED = int(Flag.IDENTIFIED)
_DIGEST_BYTES = 8
_KEY = Struct(">cQ")
_SENT = Struct(f"<QqB{_DIGEST_BYTES}s")
_ROW = Struct(f"<qB{_DIGEST_BYTES}sH")
_TOPIC_BYTES = Struct("<H")
_POSITION_BYTES = 8
_TIME_STOP = _POSITION_BYTES + 8
assert _ROW.size == _SENT.size - _POSITION_BYTES + _TOPIC_BYTES.size


def digest_of(body: bytes) -> bytes:
    """Return the digest of a body, which tells whether two bodies are the same."""
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()


class SentMessage(NamedTuple):
    """A message that was stored with a deduplication id."""

    position: int
    """Position of its record."""
    stored_ms: int
    """When it was stored, in ms since 1970."""
    flags: int
    """Flags of its record, which tell a delayed message and half of a transaction."""
    digest: bytes
    """The digest of its body."""


def _position_of(packed: bytes) -> int:
    """Return the position of a `SentMessage` that is packed."""
    return int.from_bytes(packed[:_POSITION_BYTES], "little")


def row_of(record: Record) -> bytes | None:
    """Return the value of the row that a record leads to; None if it has no deduplication id."""
    if not record.flags & Flag.IDENTIFIED:
        return None
    sent_id = deduplication_id_of(record.properties).encode()
    return _row(_SENT.pack(record.position, record.store_ms, record.flags, digest_of(record.body)), record.topic, sent_id)


def _row(packed: bytes, topic: bytes, sent_id: bytes) -> bytes:
    """Return the value of a row: what is packed of the message but for its position, the size of the topic, topic and id."""
    return packed[_POSITION_BYTES:] + _TOPIC_BYTES.pack(len(topic)) + topic + sent_id


class SentIds:
    """The deduplication ids of the last messages. It is a part of the store.

    Parameters:
        store: has the messages.
        options: how many ids are remembered, and for how long.
    """

    def __init__(self, store: Store, options: PopOptions) -> None:
        self._store = store
        self.window_ms = options.deduplication_ms
        """How long an id is remembered, in ms."""
        self._topic_max = options.deduplication_topic_ids_max
        self._all_max = options.deduplication_ids_max
        self._topics: dict[bytes, OrderedDict[bytes, bytes]] = {}
        """The `SentMessage` of each id as bytes, by topic; the oldest first."""
        self._order: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()
        """Topic and id of each message, by its position; the oldest first."""
        self._changed: set[int] = set()
        self.repeated = 0
        """Number of repeated messages since the start that were answered with the first one."""

    def __len__(self) -> int:
        """Return how many ids are remembered."""
        return len(self._order)

    def find(self, topic: bytes, sent_id: str) -> SentMessage | None:
        """Return the message of a topic that was sent with an id, if the id is remembered."""
        window = self._topics.get(topic)
        packed = window.get(sent_id.encode()) if window is not None else None
        if packed is None:
            return None
        message = SentMessage(*_SENT.unpack(packed))
        return None if self._is_over(message.stored_ms, self._store.now_ms()) else message

    def remembers(self, topic: bytes, age_ms: int) -> bool:
        """Return whether all ids that a topic got in the last `age_ms` are remembered."""
        if age_ms >= self.window_ms:
            return False
        window = self._topics.get(topic)
        if window is not None and len(window) >= self._topic_max and self._is_young(next(iter(window.values())), age_ms):
            return False
        if len(self._order) < self._all_max:
            return True
        first_topic, first_id = next(iter(self._order.values()))
        return not self._is_young(self._topics[first_topic][first_id], age_ms)

    def _is_young(self, packed: bytes, age_ms: int) -> bool:
        """Return whether a message is not older than `age_ms`. Then one that was forgotten for it may be as young."""
        stored_ms: int = _SENT.unpack(packed)[1]
        return self._store.steps.now_for(stored_ms, self._store.now_ms()) - stored_ms <= age_ms

    def _is_over(self, stored_ms: int, now_ms: int) -> bool:
        return self._store.steps.now_for(stored_ms, now_ms) - stored_ms >= self.window_ms

    # --- the part of the store --------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return {Kind.MESSAGE: self._apply_message}

    def _apply_message(self, record: Record) -> None:
        if not record.flags & _IDENTIFIED:
            return
        topic, sent_id = record.topic, deduplication_id_of(record.properties).encode()
        window = self._topics.get(topic)
        if window is not None and sent_id in window:
            self._forget(_position_of(window[sent_id]))
        packed = _SENT.pack(record.position, record.store_ms, record.flags, digest_of(record.body))
        window = self._add(record.position, topic, sent_id, packed)
        while len(window) > self._topic_max:
            self._forget(_position_of(next(iter(window.values()))))
        order, topics = self._order, self._topics
        for _ in range(FORGOTTEN_AT_ONCE_MAX):
            position = next(iter(order))
            oldest_topic, oldest_id = order[position]
            stored_ms = int.from_bytes(topics[oldest_topic][oldest_id][_POSITION_BYTES:_TIME_STOP], "little")
            if len(order) <= self._all_max and not self._is_over(stored_ms, record.store_ms):
                break
            self._forget(position)

    def _add(self, position: int, topic: bytes, sent_id: bytes, packed: bytes) -> OrderedDict[bytes, bytes]:
        """Remember a message; return those of its topic."""
        window = self._topics.get(topic)
        if window is None:
            window = self._topics[topic] = OrderedDict()
        window[sent_id] = packed
        self._order[position] = (topic, sent_id)
        self._changed.add(position)
        return window

    def _forget(self, position: int) -> None:
        topic, sent_id = self._order.pop(position)
        window = self._topics[topic]
        del window[sent_id]
        if not window:
            del self._topics[topic]
        self._changed.add(position)

    def load(self, index: Index) -> None:
        for key, value in index.rows(bytes(KeySpace.SENT_ID)):
            _, position = _KEY.unpack(key)
            stored_ms, flags, digest, topic_bytes = _ROW.unpack_from(value)
            topic_stop = _ROW.size + topic_bytes
            packed = _SENT.pack(position, stored_ms, flags, digest)
            self._add(position, value[_ROW.size : topic_stop], value[topic_stop:], packed)
        self._changed.clear()

    def save(self, batch: Batch) -> None:
        for position in self._changed:
            key = _KEY.pack(KeySpace.SENT_ID, position)
            topic_and_id = self._order.get(position)
            if topic_and_id is None:
                batch.delete(key)
                continue
            topic, sent_id = topic_and_id
            batch.put(key, _row(self._topics[topic][sent_id], topic, sent_id))
        self._changed.clear()

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        """Yield nothing: the rows of the index have all that is needed."""
        yield from ()
