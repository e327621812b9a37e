"""What TIMER_FIRED and TRANSACTION_COMMITTED records say of the messages that they route: position, size, topic and tag.

The body has position and size of each message (`store.bodies.TIMER_ENTRY`). The properties are JSON, so that a replay can route
the messages when their own records are gone:

    topics  the topics. An empty one stands for messages whose records could not be read, and which are not routed.
    topic   for each message, the index of its topic. It is left out when there is one topic.
    tag     for each message, the hash of its tag. It is left out when no message has a tag.

TIMER_FIRED has some more, which `timer.delayed` defines. Delayed messages fire by the thousand, so the functions here work on
columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from penstock.store.bodies import TIMER_ENTRY_DTYPE
from penstock.store.lightqueue import ENTRY_DTYPE, LightQueue
from penstock.store.record import Record
from penstock.store.router import Route

Column = np.ndarray[Any, np.dtype[Any]]

DispatchRun = Callable[[tuple[LightQueue, ...], bytes], None]

_AS_ARRAYS = orjson.OPT_SERIALIZE_NUMPY


class Routing(NamedTuple):
    """The messages that a record routes, in columns."""

    entries: Column
    """Entries for light queues (`store.lightqueue.ENTRY_DTYPE`): position, size and tag hash of each message."""
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
