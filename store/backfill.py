"""A filling: a new queue reads what the log had before it, in the order in which it was dispatched.

The log is read, not the root queues: a filter may span many of them, and only the log tells in which order messages of
different roots went out: a delayed one where it fired, half a transaction where that was committed. So a queue that is
rebuilt has the offsets that it had. Headers are looked at in place, and each topic is matched once: about 0.8 us a record, of
which a third is its checksum. A damaged record is left out: by its topic it could come into a queue that isn't its own.

A queue that begins at a time takes what was dispatched at that time or later: a delayed message counts by when it fired, half
a transaction by when it was committed.
"""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from penstock.store import topics
from penstock.store.commitlog import CommitLog
from penstock.store.lightqueue import LightQueue
from penstock.store.record import (
    CRC_FROM,
    HEADER,
    HEADER_BYTES,
    TIMER_ENTRY,
    UNROUTED,
    Kind,
    Record,
    checksum,
    decode,
    decode_properties,
    tag_hash,
)

SLICE_BYTES = 512 * 1024
"""Bytes of log by which one slice gets on, besides those that came since the last one: about 3 ms of the loop."""

TOPICS_MAX = 20_000
"""Topics whose match is remembered while a queue is filled."""

_MESSAGE = int(Kind.MESSAGE)
_ROUTING = (int(Kind.TIMER_FIRED), int(Kind.TRANSACTION_COMMITTED))
"""Kinds that route messages which were stored before."""


class Backfill:
    """The filling of one queue.

    Parameters:
        log: what it reads.
        queue: what it fills.
        position: where it goes on; a record begins there.
    """

    __slots__ = ("_counted", "_end", "_log", "_matches", "_seen", "_since_ms", "began", "is_noted", "position", "queue")

    def __init__(self, log: CommitLog, queue: LightQueue, position: int) -> None:
        self._log = log
        self.queue = queue
        self.began = position
        """Where it was to begin, though the log may begin later by now."""
        self.position = max(position, log.start)
        self._matches: dict[bytes, bool] = {}
        self._seen = log.end
        self._since_ms = queue.start if isinstance(queue.start, int) else 0
        self._end: tuple[int, int] | None = None
        self.is_noted = False
        """True where the log says already at which offset it ends."""
        self._counted = 0

    def ends_at(self, position: int, next_offset: int) -> None:
        """Note that this filling once had the queue at `next_offset` when it had read all before `position`.

        If the log has lost some of that since, what is left is counted first, so that each entry gets the offset that it had.
        """
        self.is_noted = True
        if self.began < self._log.start:
            self._end = (position, next_offset)

    def slice(self) -> Iterator[tuple[int, int, int]]:
        """Yield (position, size, aux) of the entries that the next slice of the log gives the queue; move on behind it."""
        if self._end is None:
            yield from self._read()
            return
        stop, next_offset = self._end
        self._counted += sum(1 for _ in self._read(stop))
        if self.position >= stop:
            self._end = None
            self.position = self._log.start
            self.queue.begin_at(next_offset - self._counted)

    def _read(self, before: int = 2**63) -> Iterator[tuple[int, int, int]]:
        log, since_ms = self._log, self._since_ms
        # What came since the last slice is read on top, or a busy log would never be caught up with.
        stop = min(self.position + SLICE_BYTES + log.written - self._seen, log.written, before)
        self._seen = log.end
        while self.position < stop:
            view, base, offsets, end = log.block(self.position, stop - self.position)
            unpack = HEADER.unpack_from
            for at in offsets:
                size, crc, kind, flags, topic_len, props_len, store_ms = unpack(view, at)
                if checksum(view[at + CRC_FROM : at + size]) != crc:
                    end = log.behind_damage(base + at)
                    break
                if store_ms < since_ms:
                    continue
                if kind == _MESSAGE and not flags & UNROUTED:
                    topic_stop = at + HEADER_BYTES + topic_len
                    if self._is_wanted(bytes(view[at + HEADER_BYTES : topic_stop])):
                        yield base + at, size, _tag_of(bytes(view[topic_stop : topic_stop + props_len]))
                elif kind in _ROUTING:
                    yield from self._fired(decode(view, at, position=base + at))
            # Where no record begins before the end, it was damaged since the start: that would have refused it.
            self.position = end if offsets else log.behind_damage(self.position)

    def _is_wanted(self, topic: bytes) -> bool:
        wanted = self._matches.get(topic)
        if wanted is None:
            if len(self._matches) >= TOPICS_MAX:
                self._matches.clear()
            wanted = self._matches[topic] = topics.matches(self.queue.filter, topic.decode())
        return wanted

    def _fired(self, fired: Record) -> Iterator[tuple[int, int, int]]:
        routes = orjson.loads(fired.properties)
        for (position, size), (topic, tag) in zip(TIMER_ENTRY.iter_unpack(fired.body), routes, strict=True):
            if topic and self._is_wanted(topic.encode()):
                yield position, size, tag


def _tag_of(properties: bytes) -> int:
    return tag_hash(decode_properties(properties).tag) if properties else 0
