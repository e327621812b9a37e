"""Retained messages: the last one of each topic that was published with RETAIN set. MQTT 5.0, 3.3.1.3.

Rows of the index:

    key b"R", topic                                     value: position u64, size u32, when it expires i64 (0: never)
    key b"r", level u8, hash of its text u32, topic     nothing: the topic has this text at this level, counted from 0
    key b"r", 255,      number of levels u32, topic     nothing: the topic has so many levels
    key b"l", position u64 big-endian                   one that is delayed, and retained when it fires: row and topic
    key b"n"                                            value: how many there are, u64

The body stays in the log. The rows in b"r" are for wildcards. A topic that `plant/+/x/+` matches begins with `plant/`, has `x`
at level 2, and has four levels: three lists, each in the order of the topics, and the search leaps from the one to the next of
what is in all of them. So it looks at about as many rows as the shortest list has, and not at every topic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from struct import Struct
from typing import Final
from zlib import crc32

from rocksdict import RdictIter

from penstock.store import topics
from penstock.store.index import Batch, Index, KeySpace
from penstock.store.lightqueue import ENTRY
from penstock.store.part import Apply
from penstock.store.record import TIMER_ENTRY, Flag, Kind, Record, decode_properties

_ROW = Struct("<QIq")
_LEVEL = Struct(">cBI")
_COUNT = Struct("<Q")

LEVELS_INDEXED: Final = 8
"""Levels of a topic that have rows of their own: bounds what a deep topic costs. Devices use fewer."""
_NUMBER_OF_LEVELS: Final = 255

SCAN_ROWS = 128
"""Rows without a match after which a wildcard's search pauses, about 0.5 ms. That ends a step of the subscription it is for."""


class RetainedMessages:
    """Which message is retained for which topic. A part of the store.

    Parameters:
        now_ms: tells the time, in ms since 1970, for messages that expire.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._index: Index | None = None
        self._changed: dict[bytes, bytes | None] = {}
        self._later: dict[int, bytes] = {}
        self._later_changed: dict[int, bytes | None] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return how many there were at the last commit, with those that have expired and that nobody came upon."""
        return self._count

    def matching(self, topic_filter: str, before: int, after: bytes = b"") -> Iterator[bytes]:
        """Yield a light-queue entry for each retained message whose topic a filter matches, in the order of the topics.

        Reads as it goes, so a million of them take no memory. Only what was committed is seen. Yields nothing (`b""`) after
        `SCAN_ROWS` rows without a match, so that a search that finds little can let others go first.

        Args:
            topic_filter: a valid filter.
            before: the end of the log when the subscription began. A message from there on comes by the light queue.
            after: only topics behind this one.
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
        for topic, row in self._candidates(index, topic_filter, after):
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

    def _candidates(self, index: Index, topic_filter: str, after: bytes) -> Iterator[tuple[bytes, bytes | None]]:
        """Yield the topics that are in all lists of a wildcard filter, ascending, those behind `after`, with their rows.

        None in place of a row is for a leap in vain.
        """
        start = _literal_prefix(topic_filter).encode()
        prefixes = _lists_of(topic_filter)
        if not prefixes:
            if start and not start.endswith(b"/"):  # `a/#` matches `a`, and else what begins with `a/`
                if after < start:
                    yield start, index.get(KeySpace.RETAINED + start)
                start += b"/"
            behind = after[len(start) :] + b"\0" if after.startswith(start) and after else b""
            for key, row in index.rows(KeySpace.RETAINED + start, behind):
                yield key[1:], row
            return
        lists = [_Postings(index, prefix, start) for prefix in prefixes]
        topic, agreed, at = after + b"\0" if after else start, 0, 0
        while (found := lists[at].at_or_after(topic)) is not None:
            agreed = agreed + 1 if found == topic else 1
            topic = found
            if agreed == len(lists):
                yield topic, index.get(KeySpace.RETAINED + topic)
                topic, agreed = topic + b"\0", 0
            else:
                yield topic, None
            at = (at + 1) % len(lists)

    def _entry(self, topic: bytes, row: bytes, before: int) -> bytes:
        """Return the entry of a row; nothing where its message came later, or has expired: then the row goes too."""
        position, size, expires_at_ms = _ROW.unpack(row)
        if expires_at_ms and expires_at_ms <= self._now_ms():
            # A message that nobody can get any more is as good as cleared: no record needs to say so.
            self._changed.setdefault(topic, None)
            return b""
        return ENTRY.pack(position, size, 0) if position < before else b""

    # --- the part ---------------------------------------------------------------------------------------------------

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
            self._later[record.position] = self._later_changed[record.position] = row + record.topic
        else:
            self._retain(record.topic, row)

    def _retain(self, topic: bytes, row: bytes) -> None:
        # A message without a body clears, and is not retained itself [MQTT-3.3.1-6], [MQTT-3.3.1-7].
        self._changed[topic] = row if _ROW.unpack(row)[1] else None

    def _apply_fired(self, record: Record) -> None:
        for position, _ in TIMER_ENTRY.iter_unpack(record.body) if self._later else ():
            found = self._forget(position)
            if found is not None:
                self._retain(found[_ROW.size :], found[: _ROW.size])

    def _apply_cancelled(self, record: Record) -> None:
        for position, _ in TIMER_ENTRY.iter_unpack(record.body):
            self._forget(position)

    def _forget(self, position: int) -> bytes | None:
        found = self._later.pop(position, None)
        if found is not None:
            self._later_changed[position] = None
        return found

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        assert self._index is not None, "the store has not recovered yet"
        for _, row in self._index.rows(bytes(KeySpace.RETAINED)):
            position, size, _ = _ROW.unpack(row)
            if position < before:
                yield position, size

    def load(self, index: Index) -> None:
        self._index = index
        row = index.get(bytes(KeySpace.RETAINED_COUNT))
        self._count = _COUNT.unpack(row)[0] if row is not None else 0
        for key, row in index.rows(bytes(KeySpace.RETAINED_LATER)):
            self._later[int.from_bytes(key[1:], "big")] = row

    def save(self, batch: Batch) -> None:
        for position, row in self._later_changed.items():
            key = KeySpace.RETAINED_LATER + position.to_bytes(8, "big")
            if row is not None:
                batch.put(key, row)
            else:
                batch.delete(key)
        self._later_changed.clear()
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
            # The lists change with the topics only: a device that retains its state every second costs one row.
            if (row is not None) != was_there:
                self._count += 1 if row is not None else -1
                for prefix in _prefixes_of(topic):
                    if row is not None:
                        batch.put(prefix + topic, b"")
                    else:
                        batch.delete(prefix + topic)
        self._changed.clear()
        if self._count != before:
            batch.put(bytes(KeySpace.RETAINED_COUNT), _COUNT.pack(self._count))


class _Postings:
    """One list of topics, in order.

    Parameters:
        index: the index, as it is now.
        prefix: what the keys of the list begin with.
        start: what all topics looked for begin with.
    """

    __slots__ = ("_begin", "_check", "_cursor", "_prefix", "_topic")

    def __init__(self, index: Index, prefix: bytes, start: bytes) -> None:
        self._prefix = prefix
        self._begin = prefix + start
        self._cursor: RdictIter = index.cursor()
        self._check = index.check
        self._topic: bytes | None = None

    def at_or_after(self, topic: bytes) -> bytes | None:
        """Return the first topic of the list that isn't before `topic`, which must not decrease from call to call."""
        cursor = self._cursor
        if self._topic is not None and self._topic < topic:
            cursor.next()  # four times as fast as to seek, and often enough
            self._read()
        if self._topic is None or self._topic < topic:
            cursor.seek(self._prefix + topic)
            self._read()
        return self._topic

    def _read(self) -> None:
        cursor = self._cursor
        if not cursor.valid():
            self._check(cursor)
            self._topic = None
            return
        key: bytes = cursor.key()
        self._topic = key[len(self._prefix) :] if key.startswith(self._begin) else None


def _prefixes_of(topic: bytes) -> Iterator[bytes]:
    """Yield what the keys of a topic's rows in the lists begin with."""
    levels = topic.split(b"/")
    yield _LEVEL.pack(KeySpace.RETAINED_LEVEL, _NUMBER_OF_LEVELS, len(levels))
    for number, text in enumerate(levels[:LEVELS_INDEXED]):
        yield _LEVEL.pack(KeySpace.RETAINED_LEVEL, number, crc32(text))


def _lists_of(topic_filter: str) -> list[bytes]:
    """Return the prefixes of the lists in which all topics are that a wildcard filter matches; none to read all topics.

    What stands before the first wildcard needs no list: it is what the topics begin with.
    """
    levels = topic_filter.split("/")
    first_wildcard = next(number for number, text in enumerate(levels) if text in ("+", "#"))
    lists = [
        _LEVEL.pack(KeySpace.RETAINED_LEVEL, number, crc32(text.encode()))
        for number, text in enumerate(levels[:LEVELS_INDEXED])
        if number > first_wildcard and text not in ("+", "#")
    ]
    if not lists and levels[-1] != "#":
        lists.append(_LEVEL.pack(KeySpace.RETAINED_LEVEL, _NUMBER_OF_LEVELS, len(levels)))
    return lists


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
