"""Reads the delayed messages of an index that nobody changes, for tools."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.store.index.index import Index
from penstock.store.options import MINUTE_MS
from penstock.timer.buckets import (
    BUCKET_KEY,
    CHUNK,
    CHUNK_KEY,
    COUNT_VALUE,
    COUNTS,
    CURSORS,
    FRESH,
    FRESH_KEY,
    MINUTE_KEY,
    RECALLED,
    RECALLED_COUNTS,
    RECALLED_KEY,
    WIDTHS_MS,
    counts_of,
)
from penstock.timer.entries import Column, Cursors, Entries

DAY_MS = 24 * 60 * MINUTE_MS

Described = tuple[int, int, int, int, int, bytes]
"""A pending message: position, due time in ms since 1970, account, size, tag hash and topic."""


class StoredTimers:
    """The delayed messages of an index.

    Parameters:
        index: is only read. All methods raise ValueError or struct.error where it has rows that can't be decoded.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self.cursors = Cursors()
        row = index.get(CURSORS)
        if row is not None:
            self.cursors.decode(row)

    def days(self) -> set[int]:
        """Return the numbers of the days, since 1970, in which messages may be due."""
        found: set[int] = set()
        for _, entries in self._rows(FRESH):
            found.update(np.unique(entries.rows["due"] // DAY_MS).tolist())
        for key, _ in self._index.rows(CHUNK):
            _, width, bucket, _ = CHUNK_KEY.unpack(key)
            begin_ms = bucket * WIDTHS_MS[width]
            found.update(range(begin_ms // DAY_MS, (begin_ms + WIDTHS_MS[width] - 1) // DAY_MS + 1))
        return found

    def pending(self, day: int) -> list[Described]:
        """Return the messages that are due in a day and have neither fired nor been recalled, in order of position."""
        begin_ms, end_ms = day * DAY_MS, (day + 1) * DAY_MS
        recalled = np.array([position for _, position in self.recalled(begin_ms, end_ms)], dtype=np.uint64)
        found: list[Described] = []
        for entries in self._between(begin_ms, end_ms):
            rows = entries.rows
            is_pending = (rows["due"] >= begin_ms) & (rows["due"] < end_ms) & self.cursors.are_ahead(entries)
            is_pending &= ~np.isin(rows["position"], recalled)
            for due_ms, position, account, size, tag, topic in rows[is_pending].tolist():
                found.append((position, due_ms, account, size, tag, entries.topics[topic]))
        return sorted(found)

    def recalled(self, begin_ms: int, end_ms: int = 2**32 * MINUTE_MS) -> Iterator[tuple[int, int]]:
        """Yield minute and position of recalled messages that were due from one time to before another."""
        for key, value in self._index.rows(RECALLED, MINUTE_KEY.pack(RECALLED, begin_ms // MINUTE_MS)[len(RECALLED) :]):
            _, minute, position = RECALLED_KEY.unpack(key)
            if value:
                raise ValueError(f"the row of the recalled message at position {position} has a value")
            if minute * MINUTE_MS >= end_ms:
                return
            yield minute, position

    def counts(self) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
        """Return how many messages are in the rows of each bucket and in its parts, and how many the index says, by bucket."""
        found: dict[tuple[int, int], Column] = {}
        for key, entries in self._rows(CHUNK):
            _, width, bucket, _ = CHUNK_KEY.unpack(key)
            counts = counts_of(entries, width, bucket)
            found[width, bucket] = found[width, bucket] + counts if (width, bucket) in found else counts
        stated: dict[tuple[int, int], list[int]] = {}
        for key, value in self._index.rows(COUNTS):
            _, width, bucket = BUCKET_KEY.unpack(key)
            stated[width, bucket] = np.frombuffer(value, "<u4").tolist()
        return {
            bucket: (found[bucket].tolist() if bucket in found else [], stated.get(bucket, []))
            for bucket in found.keys() | stated.keys()
        }

    def recalled_counts(self) -> dict[int, tuple[int, int]]:
        """Return how many of the messages in the rows of buckets were recalled, and how many the index says, by minute.

        Only minutes in which no message has fired count: rows of the others may be gone.
        """
        first = int(self.cursors.dues.max()) // MINUTE_MS + 1
        found: dict[int, int] = {}
        last, recalled = (0, -1), np.empty(0, dtype=np.uint64)
        for key, entries in self._rows(CHUNK):
            _, width, bucket, _ = CHUNK_KEY.unpack(key)
            if (width, bucket) != last:
                last, begin_ms = (width, bucket), bucket * WIDTHS_MS[width]
                positions = [position for _, position in self.recalled(begin_ms, begin_ms + WIDTHS_MS[width])]
                recalled = np.array(positions, dtype=np.uint64)
            dues = entries.rows["due"][np.isin(entries.rows["position"], recalled)]
            for minute in (dues // MINUTE_MS).tolist():
                found[minute] = found.get(minute, 0) + 1
        stated: dict[int, int] = {}
        for key, value in self._index.rows(RECALLED_COUNTS):
            _, minute = MINUTE_KEY.unpack(key)
            (stated[minute],) = COUNT_VALUE.unpack(value)
        return {
            minute: (found.get(minute, 0), stated.get(minute, 0)) for minute in found.keys() | stated.keys() if minute >= first
        }

    def _between(self, begin_ms: int, end_ms: int) -> Iterator[Entries]:
        for key, entries in self._rows(FRESH):
            FRESH_KEY.unpack(key)
            yield entries
        for width, width_ms in enumerate(WIDTHS_MS):
            start = BUCKET_KEY.pack(CHUNK, width, begin_ms // width_ms)
            stop = BUCKET_KEY.pack(CHUNK, width, (end_ms - 1) // width_ms + 1)
            for key, value in self._index.rows(start[: len(CHUNK) + 1], start[len(CHUNK) + 1 :]):
                if key >= stop:
                    break
                yield Entries.decoded(value)

    def _rows(self, prefix: bytes) -> Iterator[tuple[bytes, Entries]]:
        for key, value in self._index.rows(prefix):
            yield key, Entries.decoded(value)
