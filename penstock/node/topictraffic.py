"""The topics of live traffic, with rates: a sample of what is written to the log.

While somebody asks for the topics, the sample reads the newest part of the log a few times a second. So traffic costs nothing
on its way, and the sample costs nothing while nobody looks. The figures are complete if less is written than one look takes.
Otherwise each look begins at a random moment, so that it does not miss the devices that publish at a fixed moment of a second.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from math import exp
from random import uniform
from typing import Final

import structlog

from penstock.node.recordheads import read_heads
from penstock.store.errors import PositionUnknown
from penstock.store.record import HEADER, HEADER_BYTES, Kind
from penstock.store.store import Store

logger = structlog.get_logger("node")

TOPICS_MAX: Final = 10_000
"""Topics that are remembered. The one that was seen longest ago goes out for a further one."""

LOOK_S_MIN: Final = 0.1
LOOK_S_MAX: Final = 0.4
"""Bounds of the random time between two looks, in seconds."""

MEMORY_S: Final = 30.0
"""Seconds over which rates are averaged: what is older counts less, by a factor of e for each such time."""

IDLE_S: Final = 600.0
"""Seconds after the last question until the sample ends and everything is forgotten."""


@dataclass(slots=True)
class TopicTraffic:
    """What was seen of one topic. Older traffic weighs less: see `MEMORY_S`."""

    messages: float = 0.0
    bytes: float = 0.0
    weighed_s: float = 0.0
    """Monotonic seconds as of which the two figures are."""
    last_ms: int = 0
    """When the last message that was seen was stored, in ms since 1970."""

    def add(self, messages: float, size: float, now_s: float) -> None:
        """Add messages and their bytes."""
        weight = exp((self.weighed_s - now_s) / MEMORY_S)
        self.messages = self.messages * weight + messages
        self.bytes = self.bytes * weight + size
        self.weighed_s = now_s


class TrafficSample:
    """The topics of live traffic.

    Parameters:
        store: whose log is looked at.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._now_s = store.clock.monotonic_s
        self._timer: asyncio.TimerHandle | None = None
        self._asked_s = 0.0
        self._position = 0
        """Up to where the log was looked at."""
        self._began_s = self._looked_s = 0.0
        """Monotonic seconds of the beginning, and of the last look: nothing is known of what came after it."""
        self.topics: OrderedDict[str, TopicTraffic] = OrderedDict()
        """What was seen, by topic. That which was seen longest ago comes first."""
        self.since_ms = 0
        """When the sample began, in ms since 1970."""
        self.dropped = 0
        """Topics that went out because there were more than `TOPICS_MAX`."""
        self.share = 1.0
        """The part of the log that the last look has counted."""

    def ask(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin the sample if there is none, and keep it up for `IDLE_S` from now on."""
        self._asked_s = self._now_s()
        if self._timer is None:
            self.begin()
            self._timer = loop.call_later(uniform(LOOK_S_MIN, LOOK_S_MAX), self._look_on, loop)

    def stop(self) -> None:
        """End the sample."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.topics.clear()

    def begin(self) -> None:
        """Forget everything, and look at what is written from now on."""
        self._position = self._store.log.written
        self._began_s = self._looked_s = self._now_s()
        self.since_ms, self.dropped, self.share = self._store.now_ms(), 0, 1.0
        self.topics.clear()

    def _look_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._now_s() - self._asked_s > IDLE_S:
            self.stop()
            return
        self._timer = loop.call_later(uniform(LOOK_S_MIN, LOOK_S_MAX), self._look_on, loop)
        self.look()

    def look(self) -> None:
        """Count the messages at the beginning of what was written to the log since the last look."""
        log = self._store.log
        begin, end = max(self._position, log.start), log.written
        self._position, self._looked_s = end, self._now_s()
        if begin >= end:
            return
        counts: dict[bytes, tuple[int, int, int]] = {}
        try:
            length = self._count(begin, end, counts)
        except PositionUnknown as error:  # the next look is at other records
            logger.warning("traffic.unreadable", position=begin, why=str(error))
            return
        self.share = length / (end - begin)
        if length:
            self._add(counts, 1 / self.share)

    def _count(self, begin: int, end: int, counts: dict[bytes, tuple[int, int, int]]) -> int:
        """Count messages, bytes and the last store time by topic; return the length of the records that were counted.

        Raises:
            PositionUnknown: retention has just dropped the segment, or the disk can't read it.
        """
        data, offsets, length = read_heads(self._store.log, begin, end)
        for at in offsets:
            size, _, kind, _, topic_len, _, store_ms = HEADER.unpack_from(data, at)
            if kind == Kind.MESSAGE:
                at += HEADER_BYTES
                topic = data[at : at + topic_len]
                messages, total, _ = counts.get(topic, (0, 0, 0))
                counts[topic] = messages + 1, total + size, store_ms
        return length

    def _add(self, counts: dict[bytes, tuple[int, int, int]], factor: float) -> None:
        """Add what a look has counted; `factor` makes up for what it has not."""
        now_s, topics = self._now_s(), self.topics
        for topic, (messages, size, store_ms) in counts.items():
            name = topic.decode(errors="replace")  # nothing has verified the record
            seen = topics.get(name)
            if seen is None:
                seen = topics[name] = TopicTraffic(weighed_s=now_s)
            else:
                topics.move_to_end(name)
            seen.add(messages * factor, size * factor, now_s)
            seen.last_ms = store_ms
        while len(topics) > TOPICS_MAX:
            topics.popitem(last=False)
            self.dropped += 1

    def per_second(self, seen: TopicTraffic) -> float:
        """Return by what the figures of a topic are multiplied to be those of a second, as of the last look."""
        # In the beginning the sample is younger than what it averages over.
        span_s = MEMORY_S * (1 - exp((self._began_s - self._looked_s) / MEMORY_S))
        return exp((seen.weighed_s - self._looked_s) / MEMORY_S) / span_s if span_s > 0 else 0.0
