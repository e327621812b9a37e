"""Frames of the stream between replicas: every byte counts, however the network cuts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.errors import StreamBroken
from penstock.cluster.frames import HEADER, Frame, FrameKind, FrameReader, HelloPayload, WelcomePayload, encode_frame
from penstock.store.epochs import EpochTable

numbers = st.integers(0, 2**64 - 1)
frames = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    epoch=st.integers(0, 2**32 - 1),
    position=numbers,
    committed=numbers,
    stamp=numbers,
    payload=st.binary(max_size=300),
)


def sent(frame: Frame) -> bytes:
    kind, epoch, position, committed, stamp, payload = frame
    return encode_frame(kind, epoch, position, committed, stamp, payload) + payload


@given(st.lists(frames, max_size=5), st.data())
def test_frames_come_whole_however_they_are_cut(wanted: list[Frame], data: st.DataObject) -> None:
    stream, reader, found = b"".join(map(sent, wanted)), FrameReader(), list[Frame]()
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert found == wanted


@given(frames, st.data())
def test_a_bit_that_changes_is_noticed(frame: Frame, data: st.DataObject) -> None:
    stream = bytearray(sent(frame))
    at = data.draw(st.integers(4, len(stream) - 1))  # a size that changes may only make the frame longer
    stream[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(StreamBroken):
        list(FrameReader().feed(bytes(stream)))


def test_a_frame_that_is_larger_than_expected_is_refused_before_it_comes() -> None:
    head = encode_frame(FrameKind.HELLO, 1, 0, payload=bytes(65_537))
    with pytest.raises(StreamBroken, match="65537 bytes came, and at most 65536"):
        list(FrameReader().feed(head))
    assert len(head) == HEADER.size


def test_hello_and_welcome_are_read_as_they_were_written() -> None:
    table = EpochTable([(1, 0), (4, 99)])
    hello = HelloPayload("prod", 0xA, 0xB, table, "0.1.0")
    assert HelloPayload.decoded(hello.encoded()) == hello
    welcome = WelcomePayload(table, b"secret")
    assert WelcomePayload.decoded(welcome.encoded()) == welcome
    for broken in (b"", b"[]", b"{}", b'{"epochs": [[2, 1], [1, 2]], "secret": ""}'):
        with pytest.raises(StreamBroken):
            WelcomePayload.decoded(broken)
        with pytest.raises(StreamBroken):
            HelloPayload.decoded(broken)
