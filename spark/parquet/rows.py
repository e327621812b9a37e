"""The rows of one segment, decoded a block at a time. Only what other segments know is missing in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark import segments
from penstock.spark.parquet.chains import UNKNOWN, ClockMove, GroupVoid
from penstock.spark.parquet.properties import PropertyColumns, property_columns
from penstock.spark.parquet.settings import setting_rows
from penstock.spark.records import HANDING, POPPED, SETTLING, Array, Records, gather, handed_out, settled
from penstock.spark.segments import LogSegment
from penstock.store import record
from penstock.store.record import COPY_BYTES, HEADER_BYTES, Flag, Kind

ANSWERS = (Kind.QUEUE_DECLARED, Kind.POP_DEAD_LETTER)
"""Kinds of records that a pop may append between its checkpoint and the acknowledgement of the expired messages in it."""

_GROUP_RECORDS = (Kind.GROUP_CREATED, Kind.GROUP_CHANGED, Kind.GROUP_OFFSET_RESET, Kind.GROUP_DELETED)
_VOIDING = (Kind.GROUP_OFFSET_RESET, Kind.GROUP_DELETED)
_CANCELLING = (Kind.TIMER_CANCELLED, Kind.TRANSACTION_ROLLED_BACK)
_ROUTING = (Kind.TIMER_FIRED, Kind.TRANSACTION_COMMITTED)

_ORIGIN = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class MessageRows:
    """Messages of a block, or the copies in it."""

    position: Array
    copied_at: Array
    """Position of the copy, or `UNKNOWN` for messages that are no copies."""
    header: Array
    topic: Any
    properties: PropertyColumns
    body: Any

    def where(self, chosen: Array) -> MessageRows:
        """Return the rows that a mask selects."""
        mask = pa.array(chosen)
        properties = PropertyColumns(*(column.filter(mask) for column in self.properties))
        return MessageRows(
            self.position[chosen],
            self.copied_at[chosen],
            self.header[chosen],
            self.topic.filter(mask),
            properties,
            self.body.filter(mask),
        )


@dataclass(slots=True)
class SegmentRows:
    """The rows of a segment, in lists with an element per block."""

    anchor: int
    """Position of the last record before the segment that is not of `ANSWERS`, or `UNKNOWN`."""
    messages: list[MessageRows] = field(default_factory=list)
    begun: list[dict[str, Array]] = field(default_factory=list)
    """Columns of `records.handed_out`, by key, and `parent`."""
    begun_names: list[Any] = field(default_factory=list)
    """Group of each row of `begun`."""
    ended: list[dict[str, Array]] = field(default_factory=list)
    """Columns of `records.settled`, by position; `is_uncounted` of revivals; `anchor` and `flags` of the record."""
    ended_names: list[Any] = field(default_factory=list)
    reasons: list[Any] = field(default_factory=list)
    moves: list[ClockMove] = field(default_factory=list)
    voids: list[GroupVoid] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    damages: list[dict[str, Any]] = field(default_factory=list)
    discarded: list[Array] = field(default_factory=list)
    """Positions of messages that the segment recalls, replaces or rolls back."""
    routed: list[Array] = field(default_factory=list)
    """Positions of messages that the segment fires or commits."""


def read_segment(segment: LogSegment, anchor: int) -> SegmentRows:
    """Decode a segment, and verify all checksums, because the tables outlive the log.

    Raises:
        RecordCorrupt: a record is damaged.
        LogMissing: retention has removed the segment meanwhile.
    """
    rows = SegmentRows(anchor)
    for block in segments.blocks(segment.path, segment.base, segment.base, segment.stop):
        records = Records.of(block)
        records.verify()
        _read_block(records, rows)
    return rows


def message_records(records: Records) -> tuple[Records, Records, Array]:
    """Return the messages of a block, the messages in copies, and the positions of those copies.

    The position of a record that was copied is not that of `Records.position`: `origins` has it.
    """
    copies = records.of_kind(Kind.COPIED)
    copies = copies.where(copies.stop - copies.offsets >= COPY_BYTES + HEADER_BYTES)
    inner = copies.offsets + COPY_BYTES
    copied = Records(records.block, inner, gather(records.block.buffer, inner, record.HEADER_DTYPE))
    is_message = (copied.header["kind"] == Kind.MESSAGE) & (copied.stop == copies.stop)
    return records.of_kind(Kind.MESSAGE), copied.where(is_message), copies.position[is_message]


def origins(copied: Records) -> Array:
    """Return the first positions of records in copies."""
    fixed = copied.offsets - record.COPY_FIXED.size
    return gather(copied.block.buffer, fixed, _ORIGIN).astype(np.int64)


def _read_block(records: Records, rows: SegmentRows) -> None:
    messages, copied, copied_at = message_records(records)
    if len(messages):
        rows.messages.append(_messages(messages, messages.position, np.full(len(messages), UNKNOWN)))
    if len(copied):
        rows.messages.append(_messages(copied, origins(copied), copied_at))
    anchors = _anchors(records, rows)
    handing, settling = records.of_kind(*HANDING), records.of_kind(*SETTLING)
    _read_begun(handing, rows)
    _read_ended(settling, anchors[np.isin(records.header["kind"], SETTLING)], rows)
    for kind in (*_CANCELLING, *_ROUTING):
        of_kind = records.of_kind(kind)
        if len(of_kind):
            _, _, entry = of_kind.entries(kind)
            (rows.discarded if kind in _CANCELLING else rows.routed).append(entry["position"].astype(np.int64))
    _read_rare(records.of_kind(*_GROUP_RECORDS, Kind.CLOCK_STEPPED, Kind.DAMAGED), rows)


def _messages(records: Records, position: Array, copied_at: Array) -> MessageRows:
    return MessageRows(
        position,
        copied_at,
        records.header,
        records.texts(records.topic_from, records.props_from),
        property_columns(records.slices(records.props_from, records.body_from)),
        records.slices(records.body_from, records.stop),
    )


def _anchors(records: Records, rows: SegmentRows) -> Array:
    """Return, for each record, the position of the last record before it that is not of `ANSWERS`."""
    held = np.where(np.isin(records.header["kind"], ANSWERS), UNKNOWN, records.position)
    reached = np.maximum.accumulate(np.concatenate([[rows.anchor], held]))
    rows.anchor = int(reached[-1])
    return np.asarray(reached[:-1])


def _read_begun(handing: Records, rows: SegmentRows) -> None:
    begun = handed_out(handing)
    parent = np.full(len(begun["key"]), UNKNOWN)
    changes = settled(handing.of_kind(Kind.POP_INVISIBLE_CHANGED))
    parent[len(parent) - len(changes["key"]) :] = changes["key"]  # `handed_out` has the changes last, in the same order
    assert (begun["via"][parent == UNKNOWN] == POPPED).all()
    order = np.argsort(begun["key"], kind="stable")
    rows.begun.append({name: values[order] for name, values in {**begun, "parent": parent}.items()})
    owner = np.searchsorted(handing.position, begun["position"][order])
    rows.begun_names.append(handing.texts(handing.topic_from, handing.props_from).take(pa.array(owner)))


def _read_ended(settling: Records, anchors: Array, rows: SegmentRows) -> None:
    ended = settled(settling)
    order = np.argsort(ended["position"], kind="stable")
    ended = {name: values[order] for name, values in ended.items()}
    owner = np.searchsorted(settling.position, ended["position"])
    kinds, flags = settling.header["kind"], settling.header["flags"]
    is_uncounted = (kinds == Kind.POP_REVIVED) & ((flags & Flag.SUSPENDED) != 0)
    rows.ended.append({**ended, "is_uncounted": is_uncounted[owner], "anchor": anchors[owner], "flags": flags[owner]})
    rows.ended_names.append(settling.texts(settling.topic_from, settling.props_from).take(pa.array(owner)))
    rows.reasons.append(_reasons(settling).take(pa.array(owner)))


def _reasons(settling: Records) -> Any:
    """Return why the messages of each record are dead letters, null for other records."""
    is_dead = settling.header["kind"] == Kind.POP_DEAD_LETTER
    dead = settling.where(is_dead)
    if not len(dead):
        return pa.nulls(len(settling), pa.string())
    encoded = dead.texts(dead.props_from, dead.body_from).dictionary_encode()
    known = [orjson.loads(text).get("reason") if text else None for text in encoded.dictionary.to_pylist()]
    reasons = pa.array(known, pa.string()).take(encoded.indices)
    return reasons.take(pa.array(np.cumsum(is_dead) - 1, mask=~is_dead))


def _read_rare(records: Records, rows: SegmentRows) -> None:
    """Decode the kinds of which a log has few, one by one."""
    for offset, position in zip(records.offsets.tolist(), records.position.tolist(), strict=True):
        each = record.decode(records.block.buffer, offset, position=position, verify=False)
        if each.kind == Kind.CLOCK_STEPPED:
            begin_ms, _, step_ms = record.STEP_FIXED.unpack(each.fixed)
            rows.moves.append(ClockMove(position, begin_ms, each.store_ms, step_ms))
        elif each.kind == Kind.DAMAGED:
            rows.damages.append({"position": position, "until_position": position + each.size, "at_ms": each.store_ms})
        else:
            rows.settings += setting_rows(each)
            if each.kind in _VOIDING:
                rows.voids.append(GroupVoid(position, record.POP_FIXED.unpack(each.fixed)[0]))


def flag_columns(flags: Array) -> dict[str, Array]:
    """Return the columns of messages that their flags say."""
    return {
        "qos": (flags & Flag.QOS_MASK).astype(np.int32),
        "flags": flags.astype(np.int32),
        "retain": (flags & Flag.RETAIN) != 0,
        "delayed": (flags & Flag.DELAYED) != 0,
        "half": (flags & Flag.HALF) != 0,
    }


def replaced(messages: MessageRows) -> Array:
    """Return the positions of the delayed messages that these messages replace."""
    return np.asarray(pc.drop_null(messages.properties.replaces).to_numpy(zero_copy_only=False), dtype=np.int64)
