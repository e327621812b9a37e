"""Messages that get into queues after they were stored: delayed ones that fired, and half messages that were committed.

Such a message lives as long as one that is published when it is dispatched, though its record may be in a segment that goes
sooner. So an expiry carries it forward if the record that dispatched it stays. It does so once: the copy is after that record,
and so is everything that can drop the copy.

A row for each record that dispatches messages tells an expiry what it must look at. The record itself names the messages, so a
million of them cost no memory, and few rows. Rows of the index: key b"E", first position of the oldest message u64, position of
the record u64, both big-endian; value size of the record u32.

TIMER_FIRED and TRANSACTION_COMMITTED are the kinds of such records. The body has position and size of each message
(`store.bodies.TIMER_ENTRY`). The properties are JSON, so that a replay can route the messages when their own records are gone:

    topics  the topics. An empty one stands for messages whose records could not be read, and which are not routed.
    topic   for each message, the index of its topic. It is left out when there is one topic.
    tag     for each message, the hash of its tag. It is left out when no message has a tag.

TIMER_FIRED has some more, which `timer.delayed` defines. Delayed messages fire by the thousand, so `Routing` works on columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import orjson
import structlog

from penstock.store.bodies import TIMER_ENTRY_DTYPE
from penstock.store.errors import PositionUnknown, RecordCorrupt
from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.log.commitlog import CommitLog
from penstock.store.part import Apply
from penstock.store.queues.lightqueue import ENTRY_DTYPE, LightQueue
from penstock.store.queues.router import Route
from penstock.store.record import Kind, Record
from penstock.store.sliced import Steps

Column = np.ndarray[Any, np.dtype[Any]]

DispatchRun = Callable[[tuple[LightQueue, ...], bytes], None]

_AS_ARRAYS = orjson.OPT_SERIALIZE_NUMPY


class Routing(NamedTuple):
    """The messages that a record routes, in columns."""

    entries: Column
    """Entries for light queues (`store.queues.lightqueue.ENTRY_DTYPE`): position, size and tag hash of each message."""
    topics: Sequence[str]
    """The topics, each once."""
    topic: Column
    """For each message, the index of its topic (intp)."""

    @classmethod
    def of(cls, messages: Sequence[tuple[int, int, int]], topics: Sequence[str]) -> Routing:
        """Return the routing of messages that are given one by one.

        Args:
            messages: position, size and tag hash of each.
            topics: the topic of each.
        """
        numbers = {topic: number for number, topic in enumerate(dict.fromkeys(topics))}
        indexes = np.fromiter(map(numbers.__getitem__, topics), np.intp, len(topics))
        return cls(np.array(messages, dtype=ENTRY_DTYPE), list(numbers), indexes)

    @classmethod
    def from_record(cls, record: Record) -> Routing:
        """Return what a record of kind TIMER_FIRED or TRANSACTION_COMMITTED routes."""
        return cls.from_properties(record.body, orjson.loads(record.properties))

    @classmethod
    def from_properties(cls, body: bytes, about: Mapping[str, Any]) -> Routing:
        """Return what a record with a body and with properties that are decoded routes."""
        named = np.frombuffer(body, dtype=TIMER_ENTRY_DTYPE)
        entries = np.zeros(len(named), dtype=ENTRY_DTYPE)
        entries["position"], entries["size"], entries["aux"] = named["position"], named["size"], about.get("tag", 0)
        indexes = np.zeros(len(named), dtype=np.intp)
        indexes[:] = about.get("topic", 0)
        return cls(entries, about["topics"], indexes)

    def body(self) -> bytes:
        """Return the body of the record."""
        named = np.empty(len(self.entries), dtype=TIMER_ENTRY_DTYPE)
        named["position"], named["size"] = self.entries["position"], self.entries["size"]
        return named.tobytes()

    def properties(self, **more: object) -> bytes:
        """Return the properties of the record, with `more` of them."""
        about: dict[str, object] = {"topics": self.topics}
        if len(self.topics) > 1:
            about["topic"] = self.topic
        if self.entries["aux"].any():
            about["tag"] = np.ascontiguousarray(self.entries["aux"])
        return orjson.dumps(about | more, option=_AS_ARRAYS)

    def messages(self) -> Iterator[tuple[int, int, str, int]]:
        """Yield position, size, topic and tag hash of each message."""
        topics = self.topics
        for (position, size, tag), topic in zip(self.entries.tolist(), self.topic.tolist(), strict=True):
            yield position, size, topics[topic], tag

    def dispatch(self, dispatch_run: DispatchRun, route_of: Callable[[bytes], Route]) -> int:
        """Add the entries to the queues of their topics. Each queue gets its entries in the order of the record.

        Args:
            dispatch_run: `Queues.dispatch_run`. The entries can be read after the commit.
            route_of: returns the route of a topic that is in the log.

        Returns:
            The number of messages that were routed.
        """
        if len(self.topics) == 1:
            if not self.topics[0]:
                return 0
            dispatch_run(route_of(self.topics[0].encode()).queues, self.entries.tobytes())
            return len(self.entries)
        # Most topics lead to the same queues, so the messages are sorted by sets of queues and not by topics.
        classes: dict[tuple[LightQueue, ...], int] = {(): 0}
        class_of = np.zeros(len(self.topics), dtype=np.intp)
        of_topics = np.bincount(self.topic, minlength=len(self.topics)).tolist()
        routed = 0
        for number, (name, count) in enumerate(zip(self.topics, of_topics, strict=True)):
            if name and count:
                class_of[number] = classes.setdefault(route_of(name.encode()).queues, len(classes))
                routed += count
        of_messages = class_of[self.topic]
        order = np.argsort(of_messages, kind="stable")
        stops = np.cumsum(np.bincount(of_messages, minlength=len(classes))).tolist()
        parts: dict[LightQueue, list[Column]] = {}
        start = 0
        for queues, stop in zip(classes, stops, strict=True):
            for queue in queues if stop > start else ():
                parts.setdefault(queue, []).append(order[start:stop])
            start = stop
        for queue, found in parts.items():
            places = found[0] if len(found) == 1 else np.sort(np.concatenate(found))
            dispatch_run((queue,), self.entries[places].tobytes())
        return routed


logger = structlog.get_logger("store")

_KEY = Struct(">cQQ")
_ROW = Struct("<I")
_PREFIX = bytes(KeySpace.DISPATCH)

ROWS_AT_ONCE = 64
"""Rows that a walk reads at once. Between two reads it holds no iterator, which would keep deleted rows."""

KINDS = (Kind.TIMER_FIRED, Kind.TRANSACTION_COMMITTED)
"""The kinds of records that dispatch earlier messages."""

Late = tuple[int, int, int]
"""First position and size of a record, and the position from which on a copy of it is late enough."""


class LateDispatches:
    """The records of the log that have dispatched earlier messages. It is a part of the store.

    Parameters:
        log: has the records.
        index: has a row for each of them.
    """

    def __init__(self, log: CommitLog, index: Index) -> None:
        self._log = log
        self._index = index
        self._changed: dict[bytes, bytes | None] = {}

    def expiring(self, before: int) -> Iterator[Late | None]:
        """Yield the messages that would go with what is before `before`, though they were dispatched after that.

        A record is read when its oldest message goes. All its messages from earlier segments are yielded then, because an
        expiry would have to copy each of them before it reaches the record. No later expiry reads the record again. None is a
        pause, in which other work may run.
        """
        for rows in self._rows_before(before):
            for key, value in rows:
                position = _KEY.unpack(key)[2]
                if position >= before:
                    yield from self._messages_of(position, _ROW.unpack(value)[0])
                    self._changed[key] = None
            yield None

    def _messages_of(self, position: int, size: int) -> Iterator[Late]:
        """Yield the messages that a record has dispatched, except those that are in its own segment."""
        try:
            record = self._log.record(position, size)
        except (PositionUnknown, RecordCorrupt) as error:
            logger.error("record.unreadable", position=position, error=str(error))
            return
        if record.kind not in KINDS:
            return  # `penstock repair` has put a record of kind DAMAGED in its place
        base = self._log.segment_at(position).base
        for message, message_size, topic, _ in Routing.from_record(record).messages():
            if message < base and topic:
                yield message, message_size, base

    def forget_before(self, position: int) -> Steps:
        """Forget the records before `position`, where the log begins."""
        for rows in self._rows_before(position):
            batch = self._index.batch()
            for key, _ in rows:
                if _KEY.unpack(key)[2] < position:
                    batch.delete(key)
            self._index.write(batch)
            yield False

    def _rows_before(self, position: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield the saved rows of records whose oldest message is before `position`, some at a time."""
        start = b""
        while rows := list(islice(self._index.rows(_PREFIX, start), ROWS_AT_ONCE)):
            found = [row for row in rows if _KEY.unpack(row[0])[1] < position]
            if found:
                yield found
            if len(found) < len(rows):
                return
            start = rows[-1][0][1:] + b"\0"

    # --- the part ---------------------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return dict.fromkeys(KINDS, self._apply)

    def _apply(self, record: Record) -> None:
        positions = np.frombuffer(record.body, dtype=TIMER_ENTRY_DTYPE)["position"]
        if len(positions):
            key = _KEY.pack(KeySpace.DISPATCH, int(positions.min()), record.position)
            self._changed[key] = _ROW.pack(record.size)

    def load(self, index: Index) -> None:
        """Do nothing: the rows are read when an expiry needs them."""

    def save(self, batch: Batch) -> None:
        for key, row in self._changed.items():
            if row is None:
                batch.delete(key)
            else:
                batch.put(key, row)
        self._changed.clear()

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        """Yield nothing: `expiring` names the messages before consumers miss them, and this would be too late."""
        yield from ()
