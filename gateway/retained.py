"""Retained messages: the last one of each topic that was published with RETAIN set. MQTT 3.1.1, 3.3.1.3.

Rows of the index: key b"R", topic; value position u64, size u32 of the message's record. The body stays in the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from struct import Struct

from store import topics
from store.index import Batch, Index, Space
from store.lightqueue import ENTRY
from store.part import Apply
from store.record import Flag, Kind, Record

_ROW = Struct("<QI")
_COUNT = Struct("<Q")
_COUNT_KEY = Space.META + b"retained"
"""How many there are: to be told without counting. Changes with the rows, in the same batch."""

SCAN_ROWS = 128
"""Rows without a match after which a wildcard's search pauses, about 0.2 ms. That ends a step of the subscription it is for."""


class RetainedMessages:
    """Which message is retained for which topic. A part of the store."""

    def __init__(self) -> None:
        self._index: Index | None = None
        self._changed: dict[bytes, bytes | None] = {}
        self._count = 0

    def __len__(self) -> int:
        """How many messages are retained, as of the last commit."""
        return self._count

    def matching(self, topic_filter: str, before: int) -> Iterator[bytes]:
        """Yield a light-queue entry for each retained message whose topic a filter matches, in the order of the topics.

        Reads as it goes, so a million of them take no memory. Only what was committed is seen. Yields nothing (`b""`) after
        `SCAN_ROWS` rows without a match, so that a search that finds little can let others go first.

        Args:
            topic_filter: a valid filter.
            before: the end of the log when the subscription began. A message from there on comes by the light queue.
        """
        assert self._index is not None, "the store has not recovered yet"
        if not topics.is_wildcard(topic_filter):
            row = self._index.get(Space.RETAINED + topic_filter.encode())
            if row is not None and _ROW.unpack(row)[0] < before:
                yield ENTRY.pack(*_ROW.unpack(row), 0)
            return
        literal = _literal_prefix(topic_filter).encode()
        missed = 0
        for key, row in self._index.rows(Space.RETAINED + literal):
            position, size = _ROW.unpack(row)
            if position < before and topics.matches(topic_filter, key[1:].decode()):
                missed = 0
                yield ENTRY.pack(position, size, 0)
            else:
                missed += 1
                if missed == SCAN_ROWS:
                    missed = 0
                    yield b""

    def applies(self) -> Mapping[Kind, Apply]:
        return {Kind.MESSAGE: self._apply_message}

    def _apply_message(self, record: Record) -> None:
        if record.flags & Flag.RETAIN:
            # A message without a body clears, and is not retained itself [MQTT-3.3.1-10], [MQTT-3.3.1-11].
            self._changed[record.topic] = _ROW.pack(record.position, record.size) if record.body else None

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        assert self._index is not None, "the store has not recovered yet"
        for _, row in self._index.rows(bytes(Space.RETAINED)):
            position, size = _ROW.unpack(row)
            if position < before:
                yield position, size

    def load(self, index: Index) -> None:
        self._index = index
        row = index.get(_COUNT_KEY)
        # An index of before there was a count: about a second for a million, once.
        self._count = _COUNT.unpack(row)[0] if row is not None else sum(1 for _ in index.rows(Space.RETAINED))

    def save(self, batch: Batch) -> None:
        if not self._changed:
            return
        assert self._index is not None, "the store has not recovered yet"
        for topic, row in self._changed.items():
            was_there = self._index.get(Space.RETAINED + topic) is not None
            self._count += (row is not None) - was_there
            if row is None:
                batch.delete(Space.RETAINED + topic)
            else:
                batch.put(Space.RETAINED + topic, row)
        batch.put(_COUNT_KEY, _COUNT.pack(self._count))
        self._changed.clear()


def _literal_prefix(topic_filter: str) -> str:
    """Return what every topic that a wildcard filter matches begins with: `a/b` for `a/b/#`, which matches `a/b` too."""
    literal: list[str] = []
    for level in topic_filter.split("/"):
        if level == "#":
            return "/".join(literal)
        if level == "+":
            return "/".join([*literal, ""]) if literal else ""
        literal.append(level)
    return "/".join(literal)
