"""Backfilling: a new queue gets the entries of messages that the log already holds, in the order in which they were dispatched.

A backfill reads the log, not the root queues. A filter may span many roots, and only the log tells in which order messages of
different roots were dispatched: a delayed one when it fired, half of a transaction when that was committed. So a queue that is
rebuilt gets its old offsets. Headers are read in place, and each topic is matched once. A damaged record is left out,
because its damaged topic could put it into a wrong queue. If a backfill begins again after a restart, and the record has been
damaged since, what follows gets lower offsets than it had: see `Backfill.take_gap`.

A queue that starts at a time gets the messages that were dispatched at that time or later. A delayed message counts by when it
fired, half of a transaction by when it was committed.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.store import topics
from penstock.store.block import read_block, skip_damage
from penstock.store.commitlog import CommitLog
from penstock.store.errors import RecordUnreadable
from penstock.store.lightqueue import LightQueue
from penstock.store.properties import decode_properties, tag_hash
from penstock.store.record import CRC_FROM, HEADER, HEADER_BYTES, UNROUTED, Kind, Record, checksum, decode
from penstock.store.routing import Routing

SLICE_BYTES = 512 * 1024
"""Bytes of log that one slice reads, besides those that were appended since the last slice. That takes the loop a few ms."""

TOPICS_MAX = 20_000
"""Maximum number of topics whose match is remembered during a backfill."""

_MESSAGE = int(Kind.MESSAGE)
_DAMAGED = int(Kind.DAMAGED)
_ROUTING = (int(Kind.TIMER_FIRED), int(Kind.TRANSACTION_COMMITTED))
"""Kinds that route earlier messages."""


class Backfill:
    """The backfill of one queue.

    Parameters:
        log: is read.
        queue: gets the entries.
        position: where reading begins, or continues after a restart. A record begins there.
    """

    __slots__ = ("_counted", "_end", "_gap", "_log", "_matches", "_seen", "_since_ms", "began", "position", "queue")

    def __init__(self, log: CommitLog, queue: LightQueue, position: int) -> None:
        self._log = log
        self.queue = queue
        self.began = position
        """Position at which it was to begin, though the log may begin later by now."""
        self.position = max(position, log.start)
        self._matches: dict[bytes, bool] = {}
        self._seen = log.end
        self._since_ms = queue.start if isinstance(queue.start, int) else 0
        self._end: tuple[int, int] | None = None
        self._counted = 0
        self._gap: tuple[int, int] | None = None

    def take_gap(self) -> tuple[int, int] | None:
        """Return the first offset and position at which records were left out since the last call; None if none were.

        They are damaged, or a repair has set them aside. Whoever has got further than that in the queue may have got there
        while the records could be read.
        """
        gap, self._gap = self._gap, None
        return gap

    def ends_at(self, position: int, next_offset: int) -> None:
        """Note that the next offset of the queue once was `next_offset`, when all records before `position` had been read.

        If retention has dropped some of those records since, the entries that are left are counted first, so that each of them
        gets its old offset.
        """
        if self.began < self._log.start:
            self._end = (position, next_offset)

    def slice(self) -> Iterator[tuple[int, int, int]]:
        """Yield position, size and aux of each entry that the queue gets from the next slice of the log; advance past it."""
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
        # A slice also reads what was appended since the last one, or it would never catch up with a busy log.
        stop = min(self.position + SLICE_BYTES + log.written - self._seen, log.written, before)
        self._seen = log.end
        while self.position < stop:
            try:
                data, base, offsets, end = read_block(log, self.position, stop - self.position)
            except RecordUnreadable:
                self.position = self._skip(self.position)
                continue
            unpack = HEADER.unpack_from
            for at in offsets:
                size, crc, kind, flags, topic_len, props_len, store_ms = unpack(data, at)
                if checksum(data[at + CRC_FROM : at + size]) != crc:
                    end = self._skip(base + at)
                    break
                if store_ms < since_ms:
                    continue
                if kind == _MESSAGE and not flags & UNROUTED:
                    topic_stop = at + HEADER_BYTES + topic_len
                    if self._is_wanted(data[at + HEADER_BYTES : topic_stop]):
                        yield base + at, size, _tag_of(data[topic_stop : topic_stop + props_len])
                elif kind in _ROUTING:
                    yield from self._fired(decode(data, at, position=base + at))
                elif kind == _DAMAGED:
                    self._note_gap(base + at)
            # If no record begins before the end, the log was damaged after the start, which would have refused it.
            self.position = end if offsets else self._skip(self.position)

    def _skip(self, position: int) -> int:
        """Return where to continue after a damaged record."""
        self._note_gap(position)
        return skip_damage(self._log, position)

    def _note_gap(self, position: int) -> None:
        if self._gap is None and self._end is None:
            self._gap = self.queue.next_offset, position

    def _is_wanted(self, topic: bytes) -> bool:
        wanted = self._matches.get(topic)
        if wanted is None:
            if len(self._matches) >= TOPICS_MAX:
                self._matches.clear()
            wanted = self._matches[topic] = topics.matches(self.queue.filter, topic.decode())
        return wanted

    def _fired(self, fired: Record) -> Iterator[tuple[int, int, int]]:
        for position, size, topic, tag in Routing.from_record(fired).messages():
            if topic and self._is_wanted(topic.encode()):
                yield position, size, tag


def _tag_of(properties: bytes) -> int:
    return tag_hash(decode_properties(properties).tag) if properties else 0
