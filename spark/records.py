"""Records as columns: numpy takes fields out of a block, and turns the arrays in bodies into rows.

No Python code runs per record. An element of an array in a body is an *entry*; `np.repeat` gives it the fields of its record.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view

from penstock.spark.segments import REMEDY, RecordBlock
from penstock.store import bodies, record
from penstock.store.errors import RecordCorrupt
from penstock.store.record import Flag, Kind

Array = np.ndarray[Any, np.dtype[Any]]

FIXED_BYTES = np.array(record.FIXED_BYTES, dtype=np.int64)

EXTENDED = int(Kind.POP_INVISIBLE_CHANGED)
NACKED = EXTENDED + 64
GIVEN_BACK = EXTENDED + 128
"""Events for the end of a delivery by a change of invisible time: its consumer goes on with it, or has returned the message, or
has returned it without counting the attempt."""

POPPED, CONTINUED, WAITING = 0, 1, 2
"""How a delivery began: by a pop, as the continuation of an extended one, or as the wait of a message that nobody has."""

HANDING = (Kind.POP_CHECKPOINT, Kind.POP_INVISIBLE_CHANGED)
"""Kinds whose entries begin a delivery."""

SETTLING = (
    Kind.POP_ACK,
    Kind.POP_INVISIBLE_CHANGED,
    Kind.POP_REVIVED,
    Kind.POP_DEAD_LETTER,
    Kind.GROUP_OFFSET_RESET,
    Kind.GROUP_DELETED,
)
"""Kinds whose entries end a delivery."""


BACKOFF_MAX = 40
"""Maximum of the field `backoff` of an entry, which stands for 35 years. The node never writes a larger value."""


def gather(buffer: bytes, offsets: Array, dtype: np.dtype[Any]) -> Array:
    """Return the values of `dtype` at `offsets` of `buffer`. The offsets need not be aligned."""
    if not len(offsets):
        return np.empty(0, dtype)
    windows = sliding_window_view(np.frombuffer(buffer, dtype=np.uint8), dtype.itemsize)
    return windows[offsets].view(dtype).reshape(-1)


def slices(buffer: bytes, starts: Array, stops: Array) -> Any:
    """Return `buffer[start:stop]` for each pair as an Arrow array of binary. The pairs must be in order and not overlap.

    One array covers the whole buffer without a copy; its elements are slice, gap, slice and so on. Arrow then takes every
    second element.
    """
    count = len(starts)
    if not count:
        return pa.array([], pa.binary())
    edges = np.empty(2 * count, dtype=np.int32)
    edges[0::2], edges[1::2] = starts, stops
    laid = pa.Array.from_buffers(pa.binary(), 2 * count - 1, [None, pa.py_buffer(edges), pa.py_buffer(buffer)])
    return laid.take(pa.array(np.arange(0, 2 * count, 2)))


@dataclass(frozen=True)
class Records:
    """Records of one block as columns. Offsets refer to the block's buffer."""

    block: RecordBlock
    offsets: Array
    header: Array
    """An array of `record.HEADER_DTYPE`, with one row per record."""

    @classmethod
    def of(cls, block: RecordBlock) -> Records:
        """Return all records of a block."""
        return cls(block, block.offsets, gather(block.buffer, block.offsets, record.HEADER_DTYPE))

    def where(self, chosen: Array) -> Records:
        """Return the records that a mask, or ascending indices, select."""
        return Records(self.block, self.offsets[chosen], self.header[chosen])

    def of_kind(self, *kinds: int) -> Records:
        """Return the records of these kinds."""
        return self.where(np.isin(self.header["kind"], kinds))

    def __len__(self) -> int:
        return len(self.offsets)

    @cached_property
    def position(self) -> Array:
        """Position of each record."""
        return np.asarray(self.offsets + self.block.position)

    @cached_property
    def topic_from(self) -> Array:
        return np.asarray(self.offsets + record.HEADER_BYTES + FIXED_BYTES[self.header["kind"]])

    @cached_property
    def props_from(self) -> Array:
        return np.asarray(self.topic_from + self.header["topic_len"])

    @cached_property
    def body_from(self) -> Array:
        """Offset of each body. Raises RecordCorrupt if a body would start after the end of its record."""
        starts = np.asarray(self.props_from + self.header["props_len"])
        self._refuse(starts > self.stop, "its fields exceed its size.")
        return starts

    @cached_property
    def stop(self) -> Array:
        return np.asarray(self.offsets + self.header["size"])

    @cached_property
    def pop(self) -> Array:
        """The fixed fields, `record.POP_FIXED_DTYPE`. All records must be of POP or GROUP kinds."""
        assert (FIXED_BYTES[self.header["kind"]] == record.POP_FIXED.size).all()
        self._refuse(self.topic_from > self.stop, "its fields exceed its size.")
        return gather(self.block.buffer, self.offsets + record.HEADER_BYTES, record.POP_FIXED_DTYPE)

    def verify(self) -> None:
        """Check the checksums of the records.

        Raises:
            RecordCorrupt: a checksum does not match.
        """
        buffer, checksum = self.block.buffer, record.checksum
        edges = zip((self.offsets + record.CRC_FROM).tolist(), self.stop.tolist(), strict=True)
        found = np.array([checksum(buffer[start:stop]) for start, stop in edges], np.uint32)
        wrong = found != self.header["crc"]
        self._refuse(wrong, "its checksum does not match.")

    def slices(self, starts: Array, stops: Array) -> Any:
        """Return parts of the records as an Arrow array of binary."""
        return slices(self.block.buffer, starts, stops)

    def texts(self, starts: Array, stops: Array) -> Any:
        """Return parts of the records as an Arrow array of strings. Bytes that are not UTF-8 become U+FFFD.

        The checksum covers them, so they are as they were written, and one record must not fail a query of all.
        """
        binary = self.slices(starts, stops)
        try:
            return binary.cast(pa.string())
        except pa.ArrowInvalid:
            return pa.array([text.decode(errors="replace") for text in binary.to_pylist()], pa.string())

    def entries(self, kind: Kind) -> tuple[Array, Array, Array]:
        """Return the entries in the bodies of the records. All records must be of `kind`.

        Returns:
            Three arrays with one element per entry: the index of its record, its index in that record, and its value, of
            `bodies.BODY_DTYPE`.

        Raises:
            RecordCorrupt: the size of a body is not a multiple of the size of an entry.
        """
        dtype = bodies.BODY_DTYPE[kind]
        lengths = self.stop - self.body_from
        self._refuse(lengths % dtype.itemsize != 0, f"its body is not a multiple of {dtype.itemsize} bytes.")
        counts = lengths // dtype.itemsize
        owner = np.repeat(np.arange(len(self)), counts)
        index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        values = gather(self.block.buffer, self.body_from[owner] + index * dtype.itemsize, dtype)
        return owner, index, values

    def _refuse(self, wrong: Array, reason: str) -> None:
        if wrong.any():
            raise self._corrupt(int(self.position[np.argmax(wrong)]), reason)

    def _corrupt(self, position: int, reason: str) -> RecordCorrupt:
        return RecordCorrupt(position, f"{reason} {REMEDY}", os.path.basename(self.block.path))


def handed_out(records: Records) -> dict[str, Array]:
    """Return one row per delivery that begins in `records`.

    Columns: key (position of the record plus index), position, group_id, pop_ms, deadline_ms, return_ms (time by which the
    message returns: the deadline plus the back-off), message_position, queue_offset, message_bytes, attempt, source (0 for the
    group's filter, 1 for its retry queue), via (`POPPED`, `CONTINUED` or `WAITING`).
    """
    return _stack([_handed_out_by(records.of_kind(kind), kind) for kind in HANDING])


def _handed_out_by(records: Records, kind: Kind) -> dict[str, Array]:
    owner, index, entry = records.entries(kind)
    position = records.position[owner]
    deadline_ms = records.pop["deadline_ms"][owner]
    return {
        "key": position + index,
        "position": position,
        "group_id": records.pop["group_id"][owner].astype(np.int64),
        "pop_ms": records.header["store_ms"][owner],
        "deadline_ms": deadline_ms,
        "return_ms": return_ms(deadline_ms, entry["backoff"]),
        "message_position": entry["position"].astype(np.int64),
        "queue_offset": entry["offset"].astype(np.int64),
        "message_bytes": entry["size"].astype(np.int32),
        "attempt": entry["attempt"].astype(np.int32),
        "source": entry["source"].astype(np.int32),
        "via": _via(records, kind)[owner],
    }


def return_ms(deadline_ms: Array, backoff: Array) -> Array:
    """Return the times by which messages are back, given the fields `backoff` of their entries."""
    wait_ms = np.where(backoff > 0, np.int64(1) << np.minimum(backoff, BACKOFF_MAX).astype(np.int64), 0)
    return np.asarray(deadline_ms + wait_ms)


def _via(records: Records, kind: Kind) -> Array:
    """Return how the deliveries of each record began."""
    if kind != Kind.POP_INVISIBLE_CHANGED:
        return np.full(len(records), POPPED, dtype=np.int32)
    is_returned = (records.header["flags"] & (Flag.RETURNED | Flag.SUSPENDED)) != 0
    return np.where(is_returned, WAITING, CONTINUED).astype(np.int32)


def _event(records: Records, kind: Kind) -> Array:
    """Return the event for the deliveries that each record ends."""
    if kind != Kind.POP_INVISIBLE_CHANGED:
        return np.full(len(records), kind, dtype=np.int32)
    flags = records.header["flags"]
    counted = np.where(flags & Flag.RETURNED, NACKED, EXTENDED)
    return np.where(flags & Flag.SUSPENDED, GIVEN_BACK, counted).astype(np.int32)


def settled(records: Records) -> dict[str, Array]:
    """Return one row per delivery that ends in `records`.

    Columns: key (of the delivery: position of its checkpoint plus index), position (of the record that ends it), kind, event
    (the kind, `NACKED` or `GIVEN_BACK`), group_id, at_ms.
    """
    return _stack([_settled_by(records.of_kind(kind), kind) for kind in SETTLING])


def _settled_by(records: Records, kind: Kind) -> dict[str, Array]:
    owner, _, entry = records.entries(kind)
    return {
        "key": (entry["checkpoint"] + entry["index"]).astype(np.int64),
        "position": records.position[owner],
        "kind": np.full(len(owner), kind, dtype=np.int32),
        "event": _event(records, kind)[owner],
        "group_id": records.pop["group_id"][owner].astype(np.int64),
        "at_ms": records.header["store_ms"][owner],
    }


def _stack(tables: list[dict[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
