"""The SESSIONS_ACKED records: what the clients of many sessions have acknowledged since the last full record of each.

Nothing in a stored session changes by them. They are read when the node was killed: the next node adds what they say to the
sessions of the clients that were connected (`gateway.sessions.lifecycle`). So a commit with the acknowledgements of a thousand
clients writes one record of some bytes for each, and no row of the index but one that says where the record is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.gateway.sessions.unrecorded import Advance
from penstock.store.bodies import SESSIONS_ACKED_HEAD, SESSIONS_ACKED_NONE, SESSIONS_ACKED_WIDTHS
from penstock.store.record import decode


class LogReading(Protocol):
    """The store, as far as these records are read from it."""

    def read_intact(self, position: int, size: int, /) -> bytes | None:
        """Return the bytes of a record; None when it is gone or damaged."""


class AckedEntry(NamedTuple):
    """One entry: see `store.bodies`."""

    key: int
    """Position of the session's last SESSION_OFFSETS or SESSION_OPENED record."""
    first: int
    """Packet id of the first delivery of that record that is not complete; 0 if all are."""
    number: int | None
    """Number of a subscription."""
    floor: int
    """Offset in its queue before which all deliveries since that record are complete."""


class Acked(NamedTuple):
    """The contents of a SESSIONS_ACKED record."""

    obsolete_from: int
    obsolete_before: int
    """Earlier SESSIONS_ACKED records between these positions are obsolete."""
    entries: list[AckedEntry]

    def describe(self) -> dict[str, Any]:
        """Return the contents as a JSON object, for tools."""
        return {
            "obsolete_from": self.obsolete_from,
            "obsolete_before": self.obsolete_before,
            "entries": [entry._asdict() for entry in self.entries],
        }


class AckedColumns:
    """Entries of a record that is being made, column by column."""

    __slots__ = ("_firsts", "_floors", "_keys", "_numbers")

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._firsts: list[int] = []
        self._numbers: list[int] = []
        self._floors: list[int] = []

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: int, advance: Advance) -> None:
        """Add the entries of one session."""
        for number, floor in advance.floors.items() or ((SESSIONS_ACKED_NONE, 0),):
            self._keys.append(key)
            self._firsts.append(advance.first)
            self._numbers.append(number)
            self._floors.append(floor)

    def encode(self, obsolete_from: int, obsolete_before: int) -> bytes:
        """Return the body of the record. There must be an entry."""
        columns = map(_encode_column, (self._keys, self._firsts, self._numbers, self._floors))
        return SESSIONS_ACKED_HEAD.pack(obsolete_from, obsolete_before, len(self)) + b"".join(columns)


def decode_acked(body: bytes) -> Acked:
    """Return the contents of a SESSIONS_ACKED record."""
    obsolete_from, obsolete_before, count = SESSIONS_ACKED_HEAD.unpack_from(body)
    at = SESSIONS_ACKED_HEAD.size
    columns: list[list[int]] = []
    for _ in AckedEntry._fields:
        low_width, width = SESSIONS_ACKED_WIDTHS[body[at] >> 4], SESSIONS_ACKED_WIDTHS[body[at] & 15]
        at += 1 + low_width
        column = np.full(count, int.from_bytes(body[at - low_width : at], "little"), dtype=np.uint64)
        if width:
            column += np.frombuffer(body, dtype=f"<u{width}", count=count, offset=at)
            at += width * count
        columns.append(column.tolist())
    entries = [
        AckedEntry(key, first, number if number != SESSIONS_ACKED_NONE else None, floor)
        for key, first, number, floor in zip(*columns, strict=True)
    ]
    return Acked(obsolete_from, obsolete_before, entries)


def _encode_column(numbers: Sequence[int]) -> bytes:
    low, high = min(numbers), max(numbers)
    low_at, at = _width_of(low), _width_of(high - low)
    head = bytes((low_at << 4 | at,)) + low.to_bytes(SESSIONS_ACKED_WIDTHS[low_at], "little")
    if not at:
        return head
    column: NDArray[np.uint64] = np.array(numbers, dtype=np.uint64) - np.uint64(low)
    return head + column.astype(f"<u{SESSIONS_ACKED_WIDTHS[at]}").tobytes()


def _width_of(number: int) -> int:
    """Return the index of the smallest of `SESSIONS_ACKED_WIDTHS` that a number fits into."""
    return bisect_left(SESSIONS_ACKED_WIDTHS, (number.bit_length() + 7) // 8)


def add_up(store: LogReading, records: Iterator[tuple[int, int]]) -> dict[int, Advance]:
    """Return what records say together, by key: see `AckedEntry`. A record that can't be read is left out, and logged.

    Args:
        store: has the records.
        records: position and size of each, in the order of the log.
    """
    found: dict[int, Advance] = {}
    for position, size in records:
        data = store.read_intact(position, size)
        if data is None:
            continue
        for key, first, number, floor in decode_acked(decode(data, position=position, verify=False).body).entries:
            earlier = found.get(key)
            floors = earlier.floors if earlier is not None else {}
            if number is not None:
                floors[number] = floor
            found[key] = Advance(first, floors)
    return found
