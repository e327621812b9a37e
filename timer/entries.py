"""Pending delayed messages in columns, in memory and as values of rows of the index.

A value is the CRC-32 of what follows (u32), the number of messages (u32), the number of topics (u32), the length of each topic
(u16), the topics, and then the rows of `PENDING_DTYPE`, transposed: first byte 0 of each row, then byte 1 of each, and so on.
Most of these columns of bytes hold the same byte many times, so they take little room where the index compresses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np

from penstock.store.record import checksum

Column = np.ndarray[Any, np.dtype[Any]]

PENDING_DTYPE = np.dtype(
    [("due", "<i8"), ("position", "<u8"), ("account", "<u8"), ("size", "<u4"), ("tag", "<u4"), ("topic", "<u4")]
)
"""When a message is due in ms since 1970, position of its record, account that is charged for it, size of its record, hash of
its tag, and the index of its topic."""

PENDING = Struct("<qQQIII")
"""One row of `PENDING_DTYPE`."""
assert PENDING.size == PENDING_DTYPE.itemsize

LANES = 64
"""Number of lanes. The messages of a topic are all in one lane, and the lanes take turns when more is due than fires at once.
So a topic with a million due messages makes only those topics wait that share its lane (stochastic fairness queueing, McKenney,
1990)."""

TOPICS_MANY = 4
"""Topics for each message from which on it is faster to sort the messages than to look at all topics."""

_CRC = Struct("<I")
_COUNTS = Struct("<II")


def joined(pieces: Sequence[Column]) -> Column:
    """Return the rows of several pieces in one array, which may be one of them.

    `np.concatenate` compares the fields of structured arrays by name, which takes longer than copying a few rows.
    """
    if len(pieces) == 1:
        return pieces[0]
    return np.frombuffer(bytearray().join([piece.data for piece in pieces]), dtype=PENDING_DTYPE)


class Entries:
    """Some pending messages.

    Parameters:
        rows: an array of `PENDING_DTYPE`.
        topics: what `topic` of the rows refers to.
    """

    __slots__ = ("rows", "topics")

    def __init__(self, rows: Column, topics: Sequence[bytes]) -> None:
        self.rows = rows
        self.topics = topics

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lanes(self) -> Column:
        """The lane of each message."""
        of_topics = np.array([checksum(topic) % LANES for topic in self.topics], dtype=np.intp)
        lanes: Column = of_topics[self.rows["topic"]]
        return lanes

    def taken(self, which: Column | slice) -> Entries:
        """Return some of the messages, by a mask, by indexes or by a slice, with their topics only."""
        rows = self.rows[which]
        if isinstance(which, slice):
            rows = rows.copy()
        if len(self.topics) > TOPICS_MANY * len(rows):
            used, rows["topic"] = np.unique(rows["topic"], return_inverse=True)
        else:
            is_used = np.zeros(len(self.topics), dtype=bool)
            is_used[rows["topic"]] = True
            rows["topic"] = (np.cumsum(is_used) - 1)[rows["topic"]]
            used = np.flatnonzero(is_used)
        return Entries(rows, [self.topics[at] for at in used.tolist()])

    def encoded(self) -> bytes:
        """Return the value of a row of the index."""
        lengths = np.array(list(map(len, self.topics)), dtype="<u2")
        columns = np.ascontiguousarray(self.rows).view(np.uint8).reshape(len(self), PENDING_DTYPE.itemsize)
        head = _COUNTS.pack(len(self), len(self.topics))
        value = b"".join((head, lengths.tobytes(), *self.topics, columns.T.tobytes()))
        return _CRC.pack(checksum(value)) + value

    @classmethod
    def decoded(cls, value: bytes) -> Entries:
        """Return what `encoded` has encoded. Raises ValueError if it has not, which the checksum tells."""
        if len(value) < _CRC.size + _COUNTS.size or _CRC.unpack_from(value)[0] != checksum(value[_CRC.size :]):
            raise ValueError(f"the checksum of {len(value)} bytes with delayed messages does not match")
        value = value[_CRC.size :]
        count, topics_n = _COUNTS.unpack_from(value)
        at = _COUNTS.size + 2 * topics_n
        lengths = np.frombuffer(value[_COUNTS.size : at], dtype="<u2").tolist()
        topics = []
        for length in lengths:
            topics.append(value[at : at + length])
            at += length
        columns = np.frombuffer(value, np.uint8, offset=at).reshape(PENDING_DTYPE.itemsize, count)
        rows = np.ascontiguousarray(columns.T).view(PENDING_DTYPE).reshape(count)
        return cls(rows, topics)

    @classmethod
    def together(cls, parts: Sequence[Entries]) -> Entries:
        """Return the messages of several parts in one, in order."""
        numbers: dict[bytes, int] = {}
        pieces = [np.empty(0, dtype=PENDING_DTYPE)]
        for part in parts:
            own = np.array([numbers.setdefault(topic, len(numbers)) for topic in part.topics], dtype="<u4")
            rows = part.rows.copy()
            rows["topic"] = own[rows["topic"]]
            pieces.append(rows)
        return cls(joined(pieces), list(numbers))


class Cursors:
    """How far each lane has fired: by due time, and then by position. What comes later in that order is pending."""

    __slots__ = ("dues", "positions")

    def __init__(self) -> None:
        self.dues = np.full(LANES, -1, dtype=np.int64)
        self.positions = np.zeros(LANES, dtype=np.uint64)

    def advance(self, fired: Entries, lanes: Column) -> None:
        """Note that messages have fired, which are in order."""
        self.dues[lanes] = fired.rows["due"]  # where a lane comes more than once, the last one counts
        self.positions[lanes] = fired.rows["position"]

    def are_ahead(self, entries: Entries) -> Column:
        """Return which of the messages have not fired."""
        lanes = entries.lanes
        dues, positions = self.dues[lanes], self.positions[lanes]
        rows = entries.rows
        is_ahead: Column = (rows["due"] > dues) | ((rows["due"] == dues) & (rows["position"] > positions))
        return is_ahead

    def is_ahead(self, topic: bytes, due_ms: int, position: int) -> bool:
        """Return whether a message has not fired."""
        lane = checksum(topic) % LANES
        return (due_ms, position) > (int(self.dues[lane]), int(self.positions[lane]))

    def encoded(self) -> bytes:
        return self.dues.astype("<i8").tobytes() + self.positions.astype("<u8").tobytes()

    def decode(self, value: bytes) -> None:
        self.dues = np.frombuffer(value, "<i8", LANES).copy()
        self.positions = np.frombuffer(value, "<u8", LANES, offset=LANES * 8).copy()
