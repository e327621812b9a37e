"""The columns of a block equal what `record.decode` returns for each record."""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")

import pyarrow as pa

from penstock.spark.parquet.schema import MESSAGES, RECORDS
from penstock.spark.records import CONTINUED, GIVEN_BACK, NACKED, POPPED, SETTLING, WAITING, Records, handed_out, settled
from penstock.spark.segments import RecordBlock
from penstock.spark.source.rows import arrow_schema, batch, message_columns, record_columns
from penstock.store import record
from penstock.store.bodies import CHANGE_ENTRY, CHECKPOINT_ENTRY, REFERENCE
from penstock.store.errors import RecordCorrupt
from penstock.store.log import recordscan
from penstock.store.record import FIXED_BYTES, POP_FIXED, Flag, Kind, Record
from tests.depth import DEPTH

BASE = 7_000_000_000

positions = st.integers(0, 2**62)
entries = st.tuples(
    positions, positions, st.integers(0, 2**26), st.integers(1, 2**16 - 1), st.integers(0, 1), st.integers(0, 255)
)
references = st.tuples(positions, st.integers(0, 2**20))
BODIES = {
    Kind.POP_CHECKPOINT: st.lists(entries.map(lambda entry: CHECKPOINT_ENTRY.pack(*entry)), max_size=5),
    Kind.POP_INVISIBLE_CHANGED: st.lists(
        st.tuples(references, entries).map(lambda both: CHANGE_ENTRY.pack(*both[0], *both[1])), max_size=5
    ),
    **{
        kind: st.lists(references.map(lambda reference: REFERENCE.pack(*reference)), max_size=5)
        for kind in (
            Kind.POP_ACK,
            Kind.POP_REVIVED,
            Kind.POP_DEAD_LETTER,
            Kind.GROUP_OFFSET_RESET,
            Kind.GROUP_DELETED,
        )
    },
}
POP_KINDS = [kind for kind in Kind if FIXED_BYTES[kind] == POP_FIXED.size and kind != Kind.EPOCH_BEGUN]


@st.composite
def encoded(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(Kind))
    body = b"".join(draw(BODIES[kind])) if kind in BODIES else draw(st.binary(max_size=40))
    fixed = draw(st.binary(min_size=FIXED_BYTES[kind], max_size=FIXED_BYTES[kind]))
    topic = draw(st.text(max_size=12))
    if kind in POP_KINDS:
        group_id = draw(st.integers(0, 5))
        fixed = POP_FIXED.pack(group_id, draw(st.integers(0, 9)), draw(st.integers(0, 2**45)))
        topic = f"group {group_id}"
    properties = b"" if kind in BODIES else draw(st.sampled_from([b"", b'{"filter":"a/#"}', b'{"tag":"t"}']))
    store_ms = draw(st.integers(0, 2**42))
    return record.encode(
        kind, topic.encode(), body, store_ms=store_ms, fixed=fixed, properties=properties, flags=draw(st.integers(0, 31))
    )


def load(data: bytes) -> tuple[Records, list[Record]]:
    offsets, _ = recordscan.walk(data)
    decoded = [record.decode(data, offset, position=BASE + offset) for offset in offsets]
    block = RecordBlock(f"{BASE:020d}.log", data, BASE, np.array(offsets, dtype=np.int64))
    return Records.of(block), decoded


logs = st.lists(encoded(), max_size=12).map(b"".join)


@settings(max_examples=12 * DEPTH)
@given(logs)
def test_handed_out_is_every_entry_that_begins_a_delivery(data: bytes) -> None:
    records, decoded = load(data)
    expected = set()
    for each in decoded:
        group_id, _, deadline_ms = POP_FIXED.unpack(each.fixed) if each.kind in POP_KINDS else (0, 0, 0)
        if each.kind == Kind.POP_CHECKPOINT:
            rows = [(entry, POPPED) for entry in CHECKPOINT_ENTRY.iter_unpack(each.body)]
        elif each.kind == Kind.POP_INVISIBLE_CHANGED:
            via = WAITING if each.flags & (Flag.RETURNED | Flag.SUSPENDED) else CONTINUED
            rows = [(entry[2:], via) for entry in CHANGE_ENTRY.iter_unpack(each.body)]
        else:
            continue
        for index, ((message, offset, size, attempt, source, backoff), via) in enumerate(rows):
            key = each.position + index
            return_ms = deadline_ms + (2 ** min(backoff, 40) if backoff else 0)
            head = (key, each.position, group_id, each.store_ms, deadline_ms, return_ms)
            expected.add((*head, message, offset, size, attempt, source, via))
    found = handed_out(records)
    assert set(zip(*(column.tolist() for column in found.values()), strict=True)) == expected


def _event_of(each: Record) -> int:
    if each.kind == Kind.POP_INVISIBLE_CHANGED and each.flags & Flag.SUSPENDED:
        return GIVEN_BACK
    if each.kind == Kind.POP_INVISIBLE_CHANGED and each.flags & Flag.RETURNED:
        return NACKED
    return each.kind


@settings(max_examples=12 * DEPTH)
@given(logs)
def test_settled_is_every_reference_that_ends_a_delivery(data: bytes) -> None:
    records, decoded = load(data)
    expected = []
    for each in decoded:
        if each.kind in SETTLING:
            layout = CHANGE_ENTRY if each.kind == Kind.POP_INVISIBLE_CHANGED else REFERENCE
            group_id = POP_FIXED.unpack(each.fixed)[0]
            for checkpoint, index, *_ in layout.iter_unpack(each.body):
                expected.append((checkpoint + index, each.position, each.kind, _event_of(each), group_id, each.store_ms))
    found = settled(records)
    assert sorted(zip(*(column.tolist() for column in found.values()), strict=True)) == sorted(expected)


@settings(max_examples=12 * DEPTH)
@given(logs)
def test_the_table_of_records_holds_every_field(data: bytes) -> None:
    records, decoded = load(data)
    schema = arrow_schema(RECORDS, [column.name for column in RECORDS.columns])
    for row, each in zip(batch(record_columns(records), schema).to_pylist(), decoded, strict=True):
        fixed = POP_FIXED.unpack(each.fixed) if each.kind in POP_KINDS else (None, None, None)
        assert row == {
            "position": each.position,
            "size": each.size,
            "kind": Kind(each.kind).name,
            "flags": each.flags,
            "at_ms": each.store_ms,
            "time": datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=each.store_ms),
            "topic": each.topic.decode(),
            "group_id": fixed[0],
            "epoch": fixed[1],
            "deadline_ms": fixed[2],
            "properties": each.properties.decode(),
            "body": each.body,
        }


def test_a_body_that_is_no_array_of_entries_is_corrupt() -> None:
    good = record.encode(Kind.MESSAGE, b"t", b"x", store_ms=1)
    bad = record.encode(Kind.POP_ACK, b"g", b"x" * 13, store_ms=1, fixed=POP_FIXED.pack(1, 1, 0))
    records, _ = load(good + bad)
    with pytest.raises(RecordCorrupt, match=rf"position {BASE + len(good)} in segment .* not a multiple of 12 bytes"):
        settled(records)


def test_fields_longer_than_the_record_are_corrupt() -> None:
    data = bytearray(record.encode(Kind.POP_ACK, b"g", REFERENCE.pack(1, 2), store_ms=1, fixed=POP_FIXED.pack(1, 1, 0)))
    struct.pack_into("<H", data, 10, 500)
    block = RecordBlock("s.log", bytes(data), BASE, np.array([0], dtype=np.int64))
    with pytest.raises(RecordCorrupt, match="exceed its size"):
        settled(Records.of(block))


def test_bytes_that_are_not_utf_8_are_replaced_and_fail_no_query() -> None:
    records, _ = load(record.encode(Kind.MESSAGE, b"a/\xff\xfe", store_ms=1) + record.encode(Kind.MESSAGE, b"b", store_ms=1))
    columns = message_columns(records, records.position, pa.nulls(2, pa.int64()))
    assert batch(columns, arrow_schema(MESSAGES, ["topic"])).column("topic").to_pylist() == ["a/\ufffd\ufffd", "b"]
