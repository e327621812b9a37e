from __future__ import annotations

import struct
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store import bodies, record
from penstock.store.errors import RecordCorrupt
from penstock.store.log import recordscan
from penstock.store.log.recordscan import Read, find_valid, headers, valid_until, walk
from penstock.store.properties import Properties, decode_properties, encode_properties, tag_hash
from penstock.store.queues import lightqueue
from penstock.store.record import FIXED_BYTES, HEADER_BYTES, RECORD_BYTES_MAX, Kind, checksum, decode, encode, is_intact

NOW_MS = 1_700_000_000_000

LAYOUTS = [
    pytest.param(record.HEADER, record.HEADER_DTYPE, 24, id="header"),
    pytest.param(record.POP_FIXED, record.POP_FIXED_DTYPE, 16, id="pop fixed"),
    pytest.param(bodies.CHECKPOINT_ENTRY, bodies.CHECKPOINT_ENTRY_DTYPE, 24, id="checkpoint entry"),
    pytest.param(bodies.REFERENCE, bodies.REFERENCE_DTYPE, 12, id="reference"),
    pytest.param(bodies.CHANGE_ENTRY, bodies.CHANGE_ENTRY_DTYPE, 36, id="change entry"),
    pytest.param(bodies.TIMER_ENTRY, bodies.TIMER_ENTRY_DTYPE, 12, id="timer entry"),
    pytest.param(lightqueue.ENTRY, lightqueue.ENTRY_DTYPE, 16, id="light-queue entry"),
]

kinds = st.sampled_from(list(Kind))


@given(st.lists(st.binary(max_size=300), max_size=4), st.integers(0, 3))
def test_the_checksum_is_that_of_zlib_for_any_pieces_and_buffers(pieces: list[bytes], kind: int) -> None:
    whole, found = b"".join(pieces), 0
    for piece in pieces:
        found = checksum(
            (bytes, bytearray, memoryview, lambda each: memoryview(bytearray(b"." + each))[1:])[kind](piece), found
        )
    assert found == checksum(whole) == crc32(whole)


@given(st.integers(1, 2**40))
def test_a_back_off_is_encoded_as_the_next_power_of_two(wait_ms: int) -> None:
    assert wait_ms <= 2 ** bodies.backoff_code(wait_ms) <= 2 * wait_ms
    assert bodies.backoff_code(0) == 0


@st.composite
def records(draw: st.DrawFn) -> bytes:
    kind = draw(kinds)
    size = FIXED_BYTES[kind]
    return encode(
        kind,
        draw(st.binary(max_size=40)),
        draw(st.binary(max_size=80)),
        store_ms=draw(st.integers(0, 2**48 - 1)),
        fixed=draw(st.binary(min_size=size, max_size=size)),
        properties=draw(st.binary(max_size=40)),
        flags=draw(st.integers(0, 255)),
    )


RUN = [
    encode(Kind.MESSAGE, b"plant/1/temp", b"21.5", store_ms=NOW_MS, flags=1),
    encode(Kind.QUEUE_DECLARED, b"plant/#", store_ms=NOW_MS, fixed=record.QUEUE_FIXED.pack(1), properties=b'{"owner":"root"}'),
    encode(Kind.POP_ACK, b"billing", bodies.REFERENCE.pack(7, 0), store_ms=NOW_MS + 1, fixed=record.POP_FIXED.pack(1, 0, 0)),
    encode(Kind.MESSAGE, b"plant/2/temp", b"", store_ms=NOW_MS + 2),
]
"""A short run of records of several kinds."""


# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "dtype", "size"), LAYOUTS)
def test_struct_and_dtype_of_a_layout_read_the_same_fields(layout: struct.Struct, dtype: np.dtype[Any], size: int) -> None:
    assert layout.size == dtype.itemsize == size
    for seed in range(20):
        data = np.random.default_rng(seed).bytes(size)
        assert np.frombuffer(data, dtype)[0].item() == layout.unpack(data)


def test_the_bytes_of_a_record_match_the_documented_table() -> None:
    data = encode(Kind.MESSAGE, b"a/b", b"body", store_ms=0x0102030405, properties=b"{}", flags=5)
    tail = bytes([1, 5, 3, 0, 2, 0, 0, 0, 5, 4, 3, 2, 1, 0, 0, 0]) + b"a/b" + b"{}" + b"body"
    assert data == (8 + len(tail)).to_bytes(4, "little") + crc32(tail).to_bytes(4, "little") + tail


def test_kinds_have_the_numbers_that_are_on_disk() -> None:
    assert [(kind.name, kind.value) for kind in Kind] == [
        ("MESSAGE", 1),
        ("QUEUE_DECLARED", 2),
        ("QUEUE_DROPPED", 3),
        ("POP_CHECKPOINT", 4),
        ("POP_ACK", 5),
        ("POP_INVISIBLE_CHANGED", 6),
        ("POP_REVIVED", 7),
        ("POP_DEAD_LETTER", 8),
        ("GROUP_CREATED", 9),
        ("GROUP_OFFSET_RESET", 10),
        ("TIMER_FIRED", 11),
        ("TIMER_CANCELLED", 12),
        ("SESSION_OPENED", 13),
        ("SESSION_CLOSED", 14),
        ("SESSION_OFFSETS", 15),
        ("RETAINED_CLEARED", 16),
        ("DAMAGED", 17),
        ("COPIED", 18),
        ("QUEUE_BACKFILLED", 19),
        ("GROUP_CHANGED", 20),
        ("GROUP_DELETED", 21),
        ("TRANSACTION_COMMITTED", 22),
        ("TRANSACTION_ROLLED_BACK", 23),
        ("TRANSACTION_CHECKED", 24),
        ("SNAPSHOT", 25),
        ("DEAD_LETTER_REDRIVEN", 26),
        ("SESSION_RESUMED", 27),
        ("SESSION_SUBSCRIBED", 28),
        ("SESSION_UNSUBSCRIBED", 29),
        ("CLOCK_STEPPED", 30),
        ("SESSIONS_ACKED", 31),
        ("SCHEDULE_PUT", 32),
        ("SCHEDULE_MOVED", 33),
        ("SCHEDULE_DELETED", 34),
        ("EPOCH_BEGUN", 35),
        ("DEAD_LETTER_PURGED", 36),
    ]


def test_flags_of_settling_records_have_the_bits_that_are_on_disk() -> None:
    assert (record.CONSUMED, record.EXPIRED) == (1, 2)
    assert (record.BY_OPERATOR, record.LAST_MEMBER_LEFT) == (1, 2)


# --- round trips ----------------------------------------------------------------------------------------------------


@given(
    kind=kinds,
    topic=st.binary(max_size=300),
    properties=st.binary(max_size=300),
    body=st.binary(max_size=300),
    flags=st.integers(0, 255),
    store_ms=st.integers(-(2**63), 2**63 - 1),
    before=st.binary(max_size=9),
    data=st.data(),
)
def test_a_record_comes_back_as_it_was_encoded(
    kind: Kind,
    topic: bytes,
    properties: bytes,
    body: bytes,
    flags: int,
    store_ms: int,
    before: bytes,
    data: st.DataObject,
) -> None:
    fixed = data.draw(st.binary(min_size=FIXED_BYTES[kind], max_size=FIXED_BYTES[kind]))
    encoded = encode(kind, topic, body, store_ms=store_ms, fixed=fixed, properties=properties, flags=flags)
    assert is_intact(encoded)
    found = decode(memoryview(before + encoded + b"\0\0"), len(before), position=77)
    assert found == (77, len(encoded), kind, flags, store_ms, fixed, topic, properties, body)


@given(
    st.builds(
        Properties,
        user=st.lists(st.tuples(st.text(), st.text()), max_size=5),
        tag=st.text(max_size=20),
        message_group=st.text(max_size=20),
        deliver_at_ms=st.integers(0, 2**53),
        expires_at_ms=st.integers(0, 2**53),
        payload_format=st.none() | st.integers(0, 1),
        content_type=st.none() | st.text(max_size=20),
        response_topic=st.none() | st.text(max_size=20),
        correlation_data=st.none() | st.binary(max_size=20),
        publisher=st.text(max_size=20),
        producer=st.text(max_size=20),
        keys=st.lists(st.text(max_size=20), max_size=3),
        born_host=st.text(max_size=20),
        born_ms=st.integers(0, 2**53),
        packet_id=st.integers(0, 65_535),
        check_after_ms=st.integers(0, 2**53),
        priority=st.integers(-(2**31), 2**31 - 1),
        replaces=st.none() | st.integers(0, 2**53),
        schedule=st.lists(st.integers(0, 2**53), max_size=4),
    )
)
def test_properties_come_back_in_order_with_repeated_names(properties: Properties) -> None:
    assert decode_properties(encode_properties(properties)) == properties


def test_a_message_without_properties_takes_no_bytes_for_them() -> None:
    assert encode_properties(Properties()) == b""


def test_unknown_parts_of_properties_of_a_later_version_are_ignored() -> None:
    assert decode_properties(b'{"tag":"a","colour":"red"}') == Properties(tag="a")


def test_only_the_missing_tag_hashes_to_zero() -> None:
    assert tag_hash("") == 0
    assert tag_hash("alarm") == crc32(b"alarm") != 0


# --- many records ---------------------------------------------------------------------------------------------------


@given(run=st.lists(records(), max_size=8), zeros=st.integers(0, 60))
def test_a_run_of_records_is_walked_to_its_end(run: list[bytes], zeros: int) -> None:
    buffer = b"".join(run) + bytes(zeros)
    offsets, stop = walk(buffer)
    assert [buffer[at : at + len(each)] for at, each in zip(offsets, run, strict=True)] == run
    assert stop == valid_until(buffer) == len(buffer) - zeros
    found = headers(buffer, offsets)
    assert found.dtype == record.HEADER_DTYPE
    assert [row.item() for row in found] == [record.HEADER.unpack_from(each) for each in run]


@given(run=st.lists(records(), min_size=1, max_size=4), data=st.data())
def test_a_record_cut_off_by_the_end_is_not_part_of_the_run(run: list[bytes], data: st.DataObject) -> None:
    buffer = b"".join(run)
    last = len(buffer) - len(run[-1])
    end = data.draw(st.integers(last, len(buffer) - 1))
    assert walk(buffer, 0, end) == (walk(buffer)[0][:-1], last)
    assert valid_until(buffer, 0, end) == last
    assert valid_until(buffer[:end]) == last


def test_a_walk_can_begin_at_any_record() -> None:
    buffer = b"".join(RUN)
    offsets, _ = walk(buffer)
    for at, offset in enumerate(offsets):
        assert walk(buffer, offset) == (offsets[at:], len(buffer))
        assert valid_until(buffer, offset) == len(buffer)


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, RECORD_BYTES_MAX + 1, 2**32 - 1])
def test_an_impossible_size_is_corruption(size: int) -> None:
    data = size.to_bytes(4, "little") + RUN[0][4:]
    assert walk(data) == ([], 0)
    assert valid_until(data) == 0
    with pytest.raises(RecordCorrupt, match=f"{size} bytes, which is impossible") as caught:
        decode(data, position=4711)
    assert caught.value.position == 4711


def test_fields_longer_than_the_record_are_corruption_even_with_a_correct_checksum() -> None:
    header = record.HEADER.pack(HEADER_BYTES + 2, 0, Kind.MESSAGE, 0, 2, 1, NOW_MS)[record.CRC_FROM :] + b"ab"
    data = struct.pack("<II", HEADER_BYTES + 2, crc32(header)) + header
    assert valid_until(data) == 0
    with pytest.raises(RecordCorrupt, match="impossible"):
        decode(data)


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_change_of_any_byte_of_a_run_is_detected(mask: int) -> None:
    whole = b"".join(RUN)
    offsets, _ = walk(whole)
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= mask
        index = sum(offset <= at for offset in offsets) - 1
        offset, size = offsets[index], len(RUN[index])
        assert not is_intact(bytes(damaged[offset : offset + size])), at
        assert valid_until(bytes(damaged)) == offset, at
        with pytest.raises(RecordCorrupt, match="position 900"):
            decode(memoryview(damaged), offset, position=900)


@given(run=st.lists(records(), min_size=1, max_size=5), data=st.data())
def test_a_run_is_valid_up_to_the_record_that_was_damaged(run: list[bytes], data: st.DataObject) -> None:
    buffer = bytearray(b"".join(run))
    index = data.draw(st.integers(0, len(run) - 1))
    offset = sum(map(len, run[:index]))
    at = offset + data.draw(st.integers(0, len(run[index]) - 1))
    buffer[at] ^= data.draw(st.integers(1, 255))
    assert valid_until(bytes(buffer)) == offset


def test_without_verification_a_wrong_checksum_is_accepted() -> None:
    damaged = bytearray(RUN[0])
    damaged[-1] ^= 1
    assert decode(bytes(damaged), verify=False).body == b"21.4"


@pytest.mark.parametrize("cut", range(len(RUN[0])))
def test_an_incomplete_record_is_not_intact(cut: int) -> None:
    assert not is_intact(RUN[0][:cut])
    with pytest.raises(RecordCorrupt):
        decode(RUN[0][:cut])


def reader(buffer: bytes) -> Read:
    return lambda offset, size: buffer[offset : offset + size]


# --- the next record after damage -----------------------------------------------------------------------------------


@given(before=st.binary(max_size=200), following=records(), zeros=st.integers(0, 30))
def test_a_search_finds_a_valid_record_after_any_bytes(before: bytes, following: bytes, zeros: int) -> None:
    buffer = before + following + bytes(zeros)
    found = find_valid(reader(buffer), 0, len(buffer), len(buffer))
    assert found is not None
    assert found <= len(before)
    assert valid_until(buffer, found) > found


@given(st.binary(max_size=400))
def test_a_search_finds_nothing_in_garbage(garbage: bytes) -> None:
    assert find_valid(reader(garbage), 0, len(garbage), len(garbage)) is None


def test_a_search_stays_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordscan, "SEARCH_BYTES", 7)  # many steps, and records that cross their boundaries
    buffer = b"\xee" * 50 + RUN[0] + RUN[3]
    assert find_valid(reader(buffer), 0, len(buffer), len(buffer)) == 50
    assert find_valid(reader(buffer), 51, len(buffer), len(buffer)) == 50 + len(RUN[0])
    assert find_valid(reader(buffer), 0, 49, len(buffer)) is None
    assert find_valid(reader(buffer), 0, len(buffer), 50 + len(RUN[0]) - 1) is None


def test_a_search_finds_a_record_after_a_mebibyte_of_garbage() -> None:
    garbage = np.random.default_rng(1).bytes(1024 * 1024)
    buffer = garbage + RUN[0]
    assert find_valid(reader(buffer), 0, len(buffer), len(buffer)) == len(garbage)


@given(
    topic=st.binary(max_size=40), properties=st.binary(max_size=40), body=st.binary(max_size=40), ms=st.integers(0, 2**48 - 1)
)
def test_the_fields_of_a_message_can_be_split_out_of_its_record(topic: bytes, properties: bytes, body: bytes, ms: int) -> None:
    data = record.encode(Kind.MESSAGE, topic, body, store_ms=ms, properties=properties)
    assert record.split(data) == (topic, properties, body)
    assert record.topic_of(data) == topic
    assert record.properties_of(data) == properties
    assert record.store_ms_of(data) == ms
    assert record.size_of(b"??" + data, 2) == len(data)
