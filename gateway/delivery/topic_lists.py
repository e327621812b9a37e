"""Finds the topics of retained messages that a filter with wildcards matches.

Rows of the index, without values:

    key b"r", level u8, hash of its text u32, topic     the topic has this text at this level, counted from 0
    key b"r", 255,      number of levels u32, topic     the topic has this number of levels

Each prefix of these keys is a list of topics in their order. A topic that `plant/+/x/+` matches begins with `plant/`, has `x`
at level 2, and has four levels. The search looks for topics that are in all lists of a filter, and leaps from one list to the
next. So it reads about as many rows as the shortest list has, and not those of all topics.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final
from zlib import crc32

from penstock.store.index.index import Index, KeySpace

_LEVEL = Struct(">cBI")

LEVELS_INDEXED: Final = 8
"""Levels of a topic that have rows of their own. The bound limits what a deep topic costs; devices use fewer levels."""
_NUMBER_OF_LEVELS: Final = 255


def candidates(index: Index, topic_filter: str, after: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield the topics that are in all lists of a wildcard filter, in ascending order, with the rows of their messages.

    The caller matches each topic against the filter, because two texts of a level may have the same hash. None in place of a
    row stands for a leap that found no such topic.

    Args:
        index: of the store.
        topic_filter: a valid filter with wildcards.
        after: only topics after this one are searched.
    """
    start = _literal_prefix(topic_filter).encode()
    prefixes = _lists_of(topic_filter)
    if not prefixes:
        if start and not start.endswith(b"/"):  # `a/#` matches `a` as well as what begins with `a/`.
            if after < start:
                yield start, index.get(KeySpace.RETAINED + start)
            start += b"/"
        behind = after[len(start) :] + b"\0" if after.startswith(start) and after else b""
        for key, row in index.rows(KeySpace.RETAINED + start, behind):
            yield key[1:], row
        return
    lists = [_TopicList(index, prefix, start) for prefix in prefixes]
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


class _TopicList:
    """One list of topics, in their order.

    Parameters:
        index: of the store, as of now.
        prefix: with which the keys of the list begin.
        start: with which all topics of the search begin.
    """

    __slots__ = ("_begin", "_check", "_cursor", "_prefix", "_topic")

    def __init__(self, index: Index, prefix: bytes, start: bytes) -> None:
        self._prefix = prefix
        self._begin = prefix + start
        self._cursor = index.cursor()
        self._check = index.check
        self._topic: bytes | None = None

    def at_or_after(self, topic: bytes) -> bytes | None:
        """Return the first topic of the list that is not before `topic`. The argument must not decrease from call to call."""
        cursor = self._cursor
        if self._topic is not None and self._topic < topic:
            cursor.next()  # Much faster than a seek, and often enough.
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
        key = cursor.key()
        self._topic = key[len(self._prefix) :] if key.startswith(self._begin) else None


def prefixes_of(topic: bytes) -> Iterator[bytes]:
    """Yield the prefixes of the lists that have a topic."""
    levels = topic.split(b"/")
    yield _LEVEL.pack(KeySpace.RETAINED_LEVEL, _NUMBER_OF_LEVELS, len(levels))
    for number, text in enumerate(levels[:LEVELS_INDEXED]):
        yield _LEVEL.pack(KeySpace.RETAINED_LEVEL, number, crc32(text))


def _lists_of(topic_filter: str) -> list[bytes]:
    """Return the prefixes of the lists that have all topics that a wildcard filter matches; none to read all topics.

    The levels before the first wildcard need no list, because the matching topics begin with them.
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
    """Return the text with which all topics that a wildcard filter matches begin: `a/b` for `a/b/#`, which matches `a/b`."""
    literal: list[str] = []
    for level in topic_filter.split("/"):
        if level == "#":
            return "/".join(literal)
        if level == "+":
            return "/".join([*literal, ""]) if literal else ""
        literal.append(level)
    return "/".join(literal)
