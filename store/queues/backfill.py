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
from typing import NamedTuple

from penstock.store import topics
from penstock.store.errors import RecordUnreadable
from penstock.store.log.block import read_block, skip_damage
from penstock.store.log.commitlog import CommitLog
from penstock.store.properties import decode_properties, tag_hash
from penstock.store.queues.latedispatches import Routing
from penstock.store.queues.lightqueue import LightQueue
from penstock.store.record import CRC_FROM, HEADER, HEADER_BYTES, UNROUTED, Kind, checksum, decode

SLICE_BYTES = 512 * 1024
"""Bytes of log that one slice reads, besides those that were appended since the last slice. That takes the loop a few ms.
Backfills that read together share them."""

SLICE_BYTES_MIN = 32 * 1024
"""Bytes that a slice reads at least, however many backfills read together."""

TOPICS_MAX = 20_000
"""Maximum number of topics whose match is remembered during a backfill."""

_ANY_TIME_MS = 2**63
"""Time of a record that can't be read. No queue begins later."""

_MESSAGE = int(Kind.MESSAGE)
_DAMAGED = int(Kind.DAMAGED)
_ROUTING = (int(Kind.TIMER_FIRED), int(Kind.TRANSACTION_COMMITTED))
"""Kinds that route earlier messages."""


class Stretch(NamedTuple):
    """What backfills need of a stretch of the log."""

    messages: list[tuple[int, int, int, int, bytes | None]]
    """In the order of dispatch: time in ms since 1970, position, size, aux and topic. A topic of None stands for a record that
    is damaged, or that a repair has set aside."""
    end: int
    """Position at which the next stretch begins."""


class LogStretches:
    """Reads stretches of a log, once for all backfills that read the same one.

    A rebuilt index has a backfill for each queue, and all of them read the log from its start. To read, check and decode a
    record costs several times what it costs to match its topic.
    """

    __slots__ = ("_last", "log")

    def __init__(self, log: CommitLog) -> None:
        self.log = log
        self._last: tuple[int, int, Stretch] | None = None

    def read(self, start: int, stop: int) -> Stretch:
        """Return the stretch that begins at `start` and ends at `stop` or after it. A record begins at `start`."""
        if self._last is None or self._last[:2] != (start, stop):
            self._last = None  # frees it first
            self._last = start, stop, self._stretch(start, stop)
        return self._last[2]

    def forget(self) -> None:
        """Free the memory of the stretch that was read last."""
        self._last = None

    def _stretch(self, position: int, stop: int) -> Stretch:
        log = self.log
        messages: list[tuple[int, int, int, int, bytes | None]] = []
        while position < stop:
            try:
                data, base, offsets, end = read_block(log, position, stop - position)
            except RecordUnreadable:
                position = self._skip(position, messages)
                continue
            unpack = HEADER.unpack_from
            for at in offsets:
                size, crc, kind, flags, topic_len, props_len, store_ms = unpack(data, at)
                if checksum(data[at + CRC_FROM : at + size]) != crc:
                    end = self._skip(base + at, messages)
                    break
                if kind == _MESSAGE and not flags & UNROUTED:
                    topic_at = at + HEADER_BYTES
                    topic_stop = topic_at + topic_len
                    tag = _tag_of(data[topic_stop : topic_stop + props_len])
                    messages.append((store_ms, base + at, size, tag, data[topic_at:topic_stop]))
                elif kind in _ROUTING:
                    fired = Routing.from_record(decode(data, at, position=base + at)).messages()
                    messages += [(store_ms, at, size, tag, topic.encode()) for at, size, topic, tag in fired if topic]
                elif kind == _DAMAGED:
                    messages.append((store_ms, base + at, size, 0, None))
            # If no record begins before the end, the log was damaged after the start, which would have refused it.
            position = end if offsets else self._skip(position, messages)
        return Stretch(messages, position)

    def _skip(self, position: int, messages: list[tuple[int, int, int, int, bytes | None]]) -> int:
        """Note a damaged record, and return where to continue after it."""
        messages.append((_ANY_TIME_MS, position, 0, 0, None))
        return skip_damage(self.log, position)


class Backfill:
    """The backfill of one queue.

    Parameters:
        stretches: of the log, which is read.
        queue: gets the entries.
        position: where reading begins, or continues after a restart. A record begins there.
    """

    __slots__ = (
        "_counted",
        "_end",
        "_gap",
        "_matches",
        "_seen",
        "_since_ms",
        "_stretches",
        "began",
        "is_noted",
        "position",
        "queue",
    )

    def __init__(self, stretches: LogStretches, queue: LightQueue, position: int) -> None:
        log = stretches.log
        self._stretches = stretches
        self.queue = queue
        self.began = position
        """Position at which it was to begin, though the log may begin later by now."""
        self.position = max(position, log.start)
        self.is_noted = False
        """Whether a record says that this backfill has ended once, on the leader or before a restart."""
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

    def may_go_on(self, end: int) -> bool:
        """Return whether there is something to do up to `end`, for a follower, on which only a record ends a backfill."""
        return self.position < end or self.is_noted

    def ends_at(self, position: int, next_offset: int) -> None:
        """Note that the next offset of the queue once was `next_offset`, when all records before `position` had been read.

        If retention has dropped some of those records since, the entries that are left are counted first, so that each of them
        gets its old offset.
        """
        if self.began < self._stretches.log.start:
            self._end = (position, next_offset)

    def reach(self, sharing: int = 1) -> int:
        """Return the position up to which the next slice should read.

        Args:
            sharing: backfills that read the same slice, so that all of them together take the loop a few ms.
        """
        log = self._stretches.log
        length = min(max(SLICE_BYTES // sharing, SLICE_BYTES_MIN), SLICE_BYTES)
        # A slice also reads what was appended since the last one, or it would never catch up with a busy log.
        return min(self.position + length + log.written - self._seen, log.written)

    def slice(self, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield position, size and aux of each entry that the queue gets from the log up to `stop`; advance past them."""
        if self._end is None:
            yield from self._read(stop)
            return
        end, next_offset = self._end
        self._counted += sum(1 for _ in self._read(min(stop, end)))
        if self.position >= end:
            self._end = None
            self.position = self._stretches.log.start
            self.queue.begin_at(next_offset - self._counted)

    def _read(self, stop: int) -> Iterator[tuple[int, int, int]]:
        self._seen = self._stretches.log.end
        if self.position >= stop:
            return
        since_ms = self._since_ms
        messages, end = self._stretches.read(self.position, stop)
        for store_ms, position, size, tag, topic in messages:
            if store_ms < since_ms:
                continue
            if topic is None:
                if self._gap is None and self._end is None:
                    self._gap = self.queue.next_offset, position
            elif self._is_wanted(topic):
                yield position, size, tag
        self.position = end

    def _is_wanted(self, topic: bytes) -> bool:
        wanted = self._matches.get(topic)
        if wanted is None:
            if len(self._matches) >= TOPICS_MAX:
                self._matches.clear()
            wanted = self._matches[topic] = topics.matches(self.queue.filter, topic.decode())
        return wanted


def _tag_of(properties: bytes) -> int:
    return tag_hash(decode_properties(properties).tag) if properties else 0
