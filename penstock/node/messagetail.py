"""Follows the log: finds the messages of a topic filter that are committed from now on."""

from __future__ import annotations

from typing import Final

import structlog

from penstock.node.recordheads import read_heads
from penstock.store.errors import PositionUnknown
from penstock.store.options import MIB
from penstock.store.record import HEADER, HEADER_BYTES, Kind
from penstock.store.store import Store
from penstock.store.topics import matches

logger = structlog.get_logger("node")

BEHIND_BYTES_MAX: Final = 1 * MIB
"""Bytes of the log that a tail may be behind. Beyond this it goes on at the newest record."""

TOPICS_MAX: Final = 4096
"""Topics for which a tail remembers whether the filter matches. All are forgotten at this number."""


class MessageTail:
    """Finds messages piece by piece, so that clients pay nothing on their way, and a slow reader holds up nobody.

    Parameters:
        store: whose log is followed, from its present end.
        topic_filter: a valid topic filter.
    """

    def __init__(self, store: Store, topic_filter: str) -> None:
        self._store = store
        self._filter = topic_filter
        self._position = store.committed_position
        self._matches: dict[bytes, bool] = {}
        self.skipped_bytes = 0
        """Bytes of the log that nobody has looked at, because the tail was too far behind, or could not read them any more."""

    @property
    def is_at_end(self) -> bool:
        """Whether there is nothing left to look at now."""
        return self._position >= self._store.committed_position

    def look(self) -> list[int]:
        """Return the positions of the messages in the next piece of the log, and go on to the one after it."""
        log, end = self._store.log, self._store.committed_position
        begin = max(self._position, log.start)
        self.skipped_bytes += begin - self._position  # retention was faster
        self._position = begin
        if begin >= end:
            return []
        if end - begin > BEHIND_BYTES_MAX:
            return self._skip(begin, end)
        try:
            data, offsets, length = read_heads(log, begin, end)
        except PositionUnknown as error:
            logger.warning("tail.unreadable", position=begin, why=str(error))
            return self._skip(begin, end)
        if not length:  # the log is damaged there: `penstock verify` says more
            return self._skip(begin, end)
        self._position = begin + length
        positions = []
        for at in offsets:
            _, _, kind, _, topic_len, _, _ = HEADER.unpack_from(data, at)
            if kind == Kind.MESSAGE and self._is_wanted(data[at + HEADER_BYTES : at + HEADER_BYTES + topic_len]):
                positions.append(begin + at)
        return positions

    def _skip(self, begin: int, end: int) -> list[int]:
        self.skipped_bytes += end - begin
        self._position = end
        return []

    def _is_wanted(self, topic: bytes) -> bool:
        is_wanted = self._matches.get(topic)
        if is_wanted is None:
            if len(self._matches) >= TOPICS_MAX:
                self._matches.clear()
            is_wanted = self._matches[topic] = matches(self._filter, topic.decode(errors="replace"))
        return is_wanted
