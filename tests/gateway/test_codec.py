from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.gateway.protocol.connect import Connect, parse_connect
from penstock.gateway.protocol.decode import PACKET_BYTES_MAX_MIN, count_packets, decode
from penstock.gateway.protocol.encode import (
    PINGRESP_BYTES,
    encode_acks,
    encode_connack,
    encode_publish,
    encode_publish_head,
    encode_refusal,
    encode_suback,
    encode_unsuback,
)
from penstock.gateway.protocol.errors import ConnectRefused, ProtocolError, UnsupportedVersion
from penstock.gateway.protocol.fields import REMAINING_BYTES_MAX, write_varint
from penstock.gateway.protocol.fixed_header import FROM_CLIENT, FROM_CLIENT_5, FROM_SERVER, Side, packet_bytes
from penstock.gateway.protocol.packets import (
    CONNECT,
    MALFORMED,
    PING_RUN,
    PUBACK,
    PUBACK_RUN,
    PUBCOMP,
    PUBLISH,
    PUBLISH_RUN,
    PUBREC,
    PUBREL,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    Packet,
)
from penstock.gateway.protocol.plain import PlainPublishes, cut_plain
from penstock.gateway.protocol.reasons import SUBACK_FAILURE, ConnectCode, ReasonCode
from penstock.gateway.protocol.runs import split_runs
from penstock.gateway.protocol.subscribe import Subscribe, Unsubscribe, parse_subscribe, parse_unsubscribe
from tests.gateway import packet_cases_5
from tests.gateway.packet_cases import INVALID, SERVER_ITEMS, VALID, Invalid, Valid, connect, packet, subscribe
from tests.gateway.packet_cases import field as topic_field

LIMIT = 1 << 20
TWO_BYTES_MAX = 3 + 16_383
"""The size of the largest packet whose remaining length has two bytes (1.5.5)."""
PUBLISHES = [case for case in VALID if case.item[0] == PUBLISH and "more bytes than it needs" not in case.name]
PARSERS: dict[int, Any] = {CONNECT: parse_connect, SUBSCRIBE: parse_subscribe, UNSUBSCRIBE: parse_unsubscribe}
PING = b"\xc0\0"


def parse(item: Packet) -> Connect | Subscribe | Unsubscribe | None:
    """Parse the body of an item; return None if its type has no parser. The error of a MALFORMED item is raised."""
    if item[0] == MALFORMED:
        raise item[1]
    return PARSERS[item[0]](item[2]) if item[0] in PARSERS else None


def in_pieces(pieces: list[bytes]) -> list[Packet]:
    """Decode a stream that comes in pieces, as a connection does, and return its packets."""
    packets: list[Packet] = []
    rest = b""
    for piece in pieces:
        rest += piece
        items, consumed = decode(rest, LIMIT)
        rest = rest[consumed:]
        packets += items
        if packets and packets[-1][0] == MALFORMED:
            break
    return packets


def comparable(packets: list[Packet]) -> list[Packet]:
    return [(MALFORMED, type(item[1]), str(item[1])) if item[0] == MALFORMED else item for item in packets]


# --- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", VALID, ids=lambda case: case.name)
def test_a_valid_packet_is_decoded(case: Valid) -> None:
    packets, consumed = decode(case.data, LIMIT)

    assert packets == [case.item]
    assert consumed == len(case.data) == packet_bytes(case.data)
    assert parse(packets[0]) == case.parsed


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_an_invalid_packet_is_refused_with_its_reason_and_after_what_came_before_it(case: Invalid) -> None:
    packets, consumed = decode(PING + case.data, LIMIT)

    assert packets[0] == (12, 0, b"")
    assert len(packets) == 2
    assert consumed == len(PING) if packets[1][0] == MALFORMED else consumed == len(PING + case.data)
    with pytest.raises(case.error) as refused:
        parse(packets[1])
    assert case.says in str(refused.value)
    assert refused.value.reason is case.reason


@pytest.mark.parametrize("case", VALID, ids=lambda case: case.name)
def test_a_packet_that_is_cut_short_waits_for_the_rest(case: Valid) -> None:
    for cut in {0, 1, 2, 3, 4, 5, len(case.data) // 2, len(case.data) - 1}:
        if cut < len(case.data):
            assert decode(PING + case.data[:cut], LIMIT) == ([(12, 0, b"")], len(PING))


@pytest.mark.parametrize(("data", "item"), SERVER_ITEMS)
def test_a_client_decodes_what_a_server_sends(data: bytes, item: tuple[object, ...]) -> None:
    assert decode(data, LIMIT, FROM_SERVER) == ([item], len(data))


# --- framing ----------------------------------------------------------------------------------------------------------


def test_the_limit_holds_for_the_whole_packet_before_its_body_has_come() -> None:
    whole = packet(0x30, b"\0\1a" + b"x" * 997)
    limit = len(whole)

    assert decode(whole, limit)[0][0][0] == PUBLISH
    for data in (whole, whole[:3]):
        packets, consumed = decode(PING + data, limit - 1)
        assert packets[1][0] == MALFORMED
        assert packets[1][1].reason is ReasonCode.PACKET_TOO_LARGE
        assert f"A packet announces {limit} bytes. Send {limit - 1} at most" in str(packets[1][1])
        assert consumed == len(PING)


def test_a_packet_with_one_length_byte_is_within_the_least_limit() -> None:
    data = packet(0x30, b"\0\1a" + b"x" * 124)

    assert len(data) == PACKET_BYTES_MAX_MIN
    assert decode(data, PACKET_BYTES_MAX_MIN) == ([(PUBLISH, 0, b"a", 0, b"x" * 124)], len(data))


def test_a_first_byte_that_can_not_be_is_refused_before_the_rest_has_come() -> None:
    packets, _ = decode(b"GET ", LIMIT)

    assert packets[0][0] == MALFORMED


def test_the_size_of_a_packet_is_known_once_its_length_has_come() -> None:
    data = packet(0x30, b"\0\1a" + b"x" * 20_000)

    assert [packet_bytes(data[:cut]) for cut in range(6)] == [0, 0, 0, 0, len(data), len(data)]


def test_an_error_does_not_hold_the_packets_before_it() -> None:
    packets, _ = decode(PING + b"\0\0", LIMIT)

    assert packets[-1][1].__traceback__ is None


@pytest.mark.parametrize(
    ("length", "data"),
    [
        # MQTT 3.1.1, Table 2.4
        (0, b"\x00"),
        (127, b"\x7f"),
        (128, b"\x80\x01"),
        (16_383, b"\xff\x7f"),
        (16_384, b"\x80\x80\x01"),
        (2_097_151, b"\xff\xff\x7f"),
        (2_097_152, b"\x80\x80\x80\x01"),
        (REMAINING_BYTES_MAX, b"\xff\xff\xff\x7f"),
    ],
)
def test_a_remaining_length_takes_the_bytes_that_the_specification_gives(length: int, data: bytes) -> None:
    assert write_varint(length) == data
    assert packet_bytes(b"\x30" + data) == 1 + len(data) + length


# --- limits of a CONNECT ------------------------------------------------------------------------------------------------


def test_bounds_of_a_connect_can_be_set() -> None:
    body = connect(0x06, b"a" * 23, b"a/b/c", b"")[2:]

    assert parse_connect(body, client_id_bytes_max=23, topic_levels_max=3, topic_bytes_max=5).client_id == "a" * 23
    with pytest.raises(ConnectRefused, match="Use 22 at most"):
        parse_connect(body, client_id_bytes_max=22)
    with pytest.raises(ProtocolError, match="has 3 levels; use 2 at most"):
        parse_connect(body, topic_levels_max=2)
    with pytest.raises(ProtocolError, match="has 5 bytes; shorten it to 4 at most"):
        parse_connect(body, topic_bytes_max=4)


def test_a_deep_filter_is_left_to_the_suback() -> None:
    deep = b"/" * 1000

    assert parse_subscribe(subscribe(1, (deep, 1))[3:]) == Subscribe(1, [(deep.decode(), 1)])


# --- encoders -----------------------------------------------------------------------------------------------------------


def test_what_the_server_sends_is_as_in_the_specification() -> None:
    assert encode_connack(False, ConnectCode.ACCEPTED) == b"\x20\2\0\0"
    assert encode_connack(True, ConnectCode.ACCEPTED) == b"\x20\2\1\0"
    assert encode_connack(False, ConnectCode.NOT_AUTHORIZED) == b"\x20\2\0\5"
    assert encode_suback(1, [0, 2, SUBACK_FAILURE]) == b"\x90\5\0\1\0\2\x80"
    assert encode_suback(258, [1] * 200) == b"\x90\xca\1\1\2" + b"\1" * 200
    assert encode_unsuback(258) == b"\xb0\2\1\2"
    assert PINGRESP_BYTES == b"\xd0\0"


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (connect(2, b"a", name=b"MQIsdp", level=4), b"\x20\2\0\1"),  # 3.1.1:[MQTT-3.1.2-2]
        (connect(2, b"a", level=0x84), b"\x20\2\0\1"),
        (connect(0, b""), b"\x20\2\0\2"),  # 3.1.1:[MQTT-3.1.3-8]
    ],
)
def test_a_refused_connect_is_answered_in_the_format_of_its_version(data: bytes, answer: bytes) -> None:
    with pytest.raises(ConnectRefused) as refused:
        parse_connect(data[2:])

    assert encode_refusal(refused.value, 4) == answer


def test_a_refused_connect_of_5_and_later_is_answered_in_the_format_of_5() -> None:
    assert encode_refusal(UnsupportedVersion("no", is_v5=False), 0) == b"\x20\2\0\1"
    assert encode_refusal(UnsupportedVersion("no", is_v5=True), 0, "no") == b"\x20\x08\0\x84\5\x1f\0\2no"  # [MQTT-3.1.2-2]
    assert encode_refusal(ConnectRefused("no", ConnectCode.NOT_AUTHORIZED), 4) == b"\x20\2\0\5"
    assert encode_refusal(ConnectRefused("no", ConnectCode.NOT_AUTHORIZED), 5, "no") == b"\x20\x08\0\x87\5\x1f\0\2no"
    assert encode_refusal(ProtocolError("no"), 4) == b""


@pytest.mark.parametrize("case", PUBLISHES, ids=lambda case: case.name)
def test_a_publish_is_encoded_as_it_was_decoded(case: Valid) -> None:
    _, flags, topic, packet_id, body = case.item
    assert isinstance(flags, int)
    assert isinstance(topic, bytes)
    assert isinstance(packet_id, int)
    assert isinstance(body, bytes)

    data = encode_publish(topic, body, flags >> 1 & 3, retain=bool(flags & 1), dup=bool(flags & 8), packet_id=packet_id)

    assert data == case.data
    assert data.startswith(encode_publish_head(topic, len(body), flags))


@given(st.sampled_from([PUBACK, PUBREC, PUBREL, PUBCOMP]), st.lists(st.integers(1, 65_535), max_size=100))
@example(PUBREL, list(range(1, 65_536)))
def test_acks_are_decoded_as_they_were_encoded(kind: int, packet_ids: list[int]) -> None:
    data = encode_acks(kind, packet_ids)

    assert decode(data, LIMIT) == ([(kind, packet_id) for packet_id in packet_ids], len(data))


def test_unsubacks_go_in_batches_as_well() -> None:
    assert encode_acks(UNSUBACK, [1, 2]) == encode_unsuback(1) + encode_unsuback(2)


@given(
    st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 2), st.booleans(), st.booleans(), st.integers(1, 65_535)
)
def test_any_publish_is_decoded_as_it_was_encoded(
    topic: bytes, body: bytes, qos: int, retain: bool, again: bool, packet_id: int
) -> None:
    dup = again and qos > 0
    packet_id = packet_id if qos else 0

    data = encode_publish(topic, body, qos, retain=retain, dup=dup, packet_id=packet_id)

    assert decode(data, LIMIT) == ([(PUBLISH, dup << 3 | qos << 1 | retain, topic, packet_id, body)], len(data))


# --- streams --------------------------------------------------------------------------------------------------------------

SHORT = [case for case in VALID if len(case.data) < 200]


def test_a_stream_gives_the_same_packets_wherever_it_is_split() -> None:
    stream = b"".join(case.data for case in SHORT)
    expected = [case.item for case in SHORT]

    assert decode(stream, LIMIT) == (expected, len(stream))
    for cut in range(len(stream) + 1):
        assert in_pieces([stream[:cut], stream[cut:]]) == expected
    assert in_pieces([bytes((byte,)) for byte in stream]) == expected


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_a_fault_is_found_at_the_same_place_wherever_the_stream_is_split(case: Invalid) -> None:
    stream = PING + case.data
    expected = comparable(in_pieces([stream]))

    for cut in range(len(stream) + 1):
        assert comparable(in_pieces([stream[:cut], stream[cut:]])) == expected
    assert comparable(in_pieces([bytes((byte,)) for byte in stream])) == expected


CHUNKS = st.one_of(
    st.sampled_from([case.data for case in SHORT] + [case.data for case in INVALID]),
    st.binary(max_size=20),
    st.builds(packet, st.integers(0, 255), st.binary(max_size=12)),
)


@given(st.lists(CHUNKS, max_size=8).map(b"".join), st.lists(st.integers(0, 2000), max_size=10))
def test_any_bytes_in_any_pieces_give_packets_and_at_most_one_error_that_is_last(stream: bytes, cuts: list[int]) -> None:
    whole, consumed = decode(stream, LIMIT)

    assert 0 <= consumed <= len(stream)
    assert all(item[0] != MALFORMED for item in whole[:-1])
    for item in whole:
        with suppress(ProtocolError):  # Any other exception fails the test.
            parse(item)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:stop] for start, stop in pairwise(places)]
    assert comparable(in_pieces(pieces)) == comparable(whole)


# --- runs -----------------------------------------------------------------------------------------------------------------


def test_publishes_that_differ_in_packet_ids_and_bodies_are_one_run() -> None:
    bodies = [
        b"",
        b"x",
        b"x" * 200,
        b"x" * 20_000,
        b"y",
    ]  # The fourth body has a length field of three bytes, so it is in no run.
    packets = [encode_publish(b"a/b", body, 1, packet_id=number) for number, body in enumerate(bodies, 1)]
    other = encode_publish(b"a/c", b"x", 1, packet_id=9)
    stream = b"".join((*packets, other, PING, packets[0], packets[0][:-1]))

    assert decode(stream, LIMIT, runs=True) == (
        [
            (PUBLISH_RUN, 2, b"a/b", [1, 2, 3], bodies[:3]),
            (PUBLISH, 2, b"a/b", 4, bodies[3]),
            (PUBLISH, 2, b"a/b", 5, b"y"),
            (PUBLISH, 2, b"a/c", 9, b"x"),
            (12, 0, b""),
            (PUBLISH, 2, b"a/b", 1, b""),
        ],
        len(stream) - len(packets[0]) + 1,
    )


def test_a_run_at_qos_0_has_no_packet_ids() -> None:
    stream = encode_publish(b"a", b"1") + encode_publish(b"a", b"2")

    assert decode(stream, LIMIT, runs=True)[0] == [(PUBLISH_RUN, 0, b"a", [], [b"1", b"2"])]


@pytest.mark.parametrize("side", [FROM_CLIENT, FROM_CLIENT_5])
def test_pingreqs_in_a_row_are_a_run(side: Side) -> None:
    stream = PING * 1_000 + encode_acks(PUBACK, [7]) + PING + encode_acks(PUBACK, [8]) + PING * 2 + b"\xc0"

    assert decode(stream, LIMIT, side, runs=True) == (
        [(PING_RUN, 1_000), (PUBACK, 7), (12, 0, b""), (PUBACK, 8), (PING_RUN, 2)],
        len(stream) - 1,
    )
    assert len(decode(stream, LIMIT, side)[0]) == 1_005
    assert count_packets(decode(stream, LIMIT, side, runs=True)[0]) == 1_005


@pytest.mark.parametrize("side", [FROM_CLIENT, FROM_CLIENT_5])
def test_pubacks_in_a_row_are_a_run(side: Side) -> None:
    stream = (
        encode_acks(PUBACK, range(1, 601)) + PING + encode_acks(PUBACK, [8]) + encode_acks(PUBREC, [9, 10]) + b"\x40\x02\x00"
    )

    assert decode(stream, LIMIT, side, runs=True) == (
        [
            (PUBACK_RUN, tuple(range(1, 513))),
            (PUBACK_RUN, tuple(range(513, 601))),
            (12, 0, b""),
            (PUBACK, 8),
            (PUBREC, 9),
            (PUBREC, 10),
        ],
        len(stream) - 3,
    )
    assert len(decode(stream, LIMIT, side)[0]) == 604
    assert count_packets(decode(stream, LIMIT, side, runs=True)[0]) == 604


@pytest.mark.parametrize("kind", [b"\x40", b"\xc0", b"\x30"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_remaining_length_of_more_bytes_than_it_needs_is_no_matter_for_a_run(kind: bytes, place: int) -> None:
    body = {b"\x40": b"\0\7", b"\xc0": b"", b"\x30": b"\0\1ax"}[kind]
    packets = [kind + bytes((len(body),)) + body] * 12
    packets[place] = kind + bytes((len(body) | 0x80, 0)) + body  # MQTT 3.1.1 allows it
    stream = b"".join(packets)
    in_runs, used = decode(stream, LIMIT, FROM_CLIENT, runs=True)
    one_by_one = decode(stream, LIMIT, FROM_CLIENT)
    assert (count_packets(in_runs), used) == (len(one_by_one[0]), one_by_one[1]) == (12, len(stream))


@pytest.mark.parametrize("ids", [[7], [7, 8]])
@pytest.mark.parametrize("wrong", [b"\x40\x02\0\0", b"\x40\x03\0\1\xff"])
def test_what_is_wrong_behind_pubacks_in_a_row_is_reported(ids: list[int], wrong: bytes) -> None:
    stream = encode_acks(PUBACK, ids) + wrong + encode_acks(PUBACK, [9])
    packets, used = decode(stream, LIMIT, FROM_CLIENT_5, runs=True)
    alone = decode(stream, LIMIT, FROM_CLIENT_5)[0]

    assert packets[0] == ((PUBACK, 7) if len(ids) == 1 else (PUBACK_RUN, (7, 8)))
    assert packets[1][0] == alone[-1][0] == MALFORMED
    assert str(packets[1][1]) == str(alone[-1][1])
    assert used == 4 * len(ids)


@pytest.mark.parametrize("wrong", [b"\xc1\0", b"\xc0\1x"])
def test_what_is_wrong_behind_a_run_of_pingreqs_is_reported(wrong: bytes) -> None:
    packets, used = decode(PING * 9 + wrong, LIMIT, runs=True)

    assert ([item[0] for item in packets], used) == ([PING_RUN, MALFORMED], 18)


@pytest.mark.parametrize("flags", [{"qos": 2}, {"qos": 1, "dup": True}, {"retain": True}])
def test_what_needs_more_than_to_be_stored_is_never_in_a_run(flags: Any) -> None:
    stream = b"".join(encode_publish(b"a", b"1", packet_id=number if "qos" in flags else 0, **flags) for number in (1, 2))

    assert [item[0] for item in decode(stream, LIMIT, runs=True)[0]] == [PUBLISH, PUBLISH]


def _stream(is_v5: bool) -> st.SearchStrategy[bytes]:
    """Generate streams of PUBLISHes that are alike or nearly alike, some of them cut or with one wrong byte."""
    plain_publish = st.builds(
        lambda topic, body, number, properties: encode_publish(
            topic, body, number > 0, packet_id=number, properties=properties if is_v5 else b""
        ),
        st.sampled_from([b"a", b"b", b"a/b"]),
        st.one_of(st.binary(max_size=8), st.sampled_from([b"x" * 118, b"x" * 119, b"x" * 120, b"x" * 130, b"x" * 20_000])),
        st.sampled_from([0, 0, 1, 2, 65_535]),
        st.sampled_from([b"\0", b"\0", b"\0", b"\2\x01\0"]),
    )
    wrong = st.builds(
        lambda data, at, byte: data[: at % len(data)] + bytes((byte,)) + data[at % len(data) + 1 :],
        plain_publish,
        st.integers(0, 12),
        st.integers(0, 255),
    )
    alike = st.builds(lambda data, count: data * count, plain_publish, st.integers(8, 30))
    return st.lists(st.one_of(plain_publish, plain_publish, alike, wrong), max_size=12).map(b"".join)


@given(st.sampled_from([FROM_CLIENT, FROM_CLIENT_5]).flatmap(lambda side: st.tuples(st.just(side), _stream(side.is_v5))))
def test_runs_taken_apart_are_what_is_there_without_them(case: tuple[Side, bytes]) -> None:
    side, stream = case
    for limit in (LIMIT, PACKET_BYTES_MAX_MIN):
        singly, consumed = decode(stream, limit, side)
        in_runs, consumed_in_runs = decode(stream, limit, side, runs=True)

        assert comparable(split_runs(in_runs)) == comparable(singly)
        assert consumed_in_runs == consumed


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("side", [FROM_CLIENT, FROM_CLIENT_5], ids=["3.1.1", "5.0"])
def test_one_that_differs_in_any_byte_is_told_from_those_around_it(side: Side, qos: int) -> None:
    properties = b"\0" if side.is_v5 else b""
    alike = encode_publish(b"a/b", b"12345", qos, packet_id=qos, properties=properties)
    for at in range(len(alike)):
        for byte in (0, 1, 2, 5, 0x30, 0x32, 127, 128, 255):
            other = alike[:at] + bytes((byte,)) + alike[at + 1 :]
            stream = alike * 12 + other + alike * 12
            singly, consumed = decode(stream, LIMIT, side)
            in_runs, consumed_in_runs = decode(stream, LIMIT, side, runs=True)

            assert comparable(split_runs(in_runs)) == comparable(singly), (at, byte)
            assert consumed_in_runs == consumed


# --- plain reads ----------------------------------------------------------------------------------------------------------


def expected_plain(data: bytes, side: Side) -> PlainPublishes | None:
    """Return the expected result of `cut_plain`, derived from that of `decode`, for a read whose lengths are minimal."""
    packets, used = decode(data, LIMIT, side)
    if {packet[0] for packet in packets} != {PUBLISH} or packets[0][1] not in (0, 2):
        return None
    _, flags, topic, _, body = packets[0]
    stride = used // len(packets)
    begin = data[: stride - len(body) - (2 if flags else 0) - side.is_v5]
    is_alike = {(*packet[:3], len(packet[4])) for packet in packets} == {(PUBLISH, flags, topic, len(body))}
    if not is_alike or stride > TWO_BYTES_MAX or not begin.startswith(data[used : used + len(begin)]) or len(data) < 5:
        return None
    acks = encode_acks(PUBACK, [packet[3] for packet in packets]) if flags else b""
    return flags >> 1, topic, acks, tuple(packet[4] for packet in packets), used


@pytest.mark.parametrize(
    ("side", "data"),
    [
        *((FROM_CLIENT, case.data) for case in VALID),
        *((FROM_CLIENT, case.data) for case in INVALID),
        *((FROM_CLIENT_5, case.data) for case in packet_cases_5.VALID),
        *((FROM_CLIENT_5, case.data) for case in packet_cases_5.INVALID),
    ],
)
def test_a_plain_packet_is_told_from_all_others(side: Side, data: bytes) -> None:
    has_long_length = (
        len(data) > 4 and data[1] > 127 and data[2] > 127
    )  # Or its length field is too long, which `decode` reports.
    assert cut_plain(data, side, LIMIT) == (None if has_long_length or data[1:3] == b"\x80\0" else expected_plain(data, side))


@given(
    st.sampled_from([FROM_CLIENT, FROM_CLIENT_5]),
    st.binary(max_size=40).map(lambda topic: topic or b"t"),
    st.integers(0, 1),
    st.integers(0, 2),
    st.integers(0, 400) | st.sampled_from([16_300, 16_330, 16_340, 16_350, 16_383, 20_000]),
    st.binary(max_size=3),
    st.binary(max_size=3),
)
def test_any_publish_by_itself_is_what_decode_makes_of_it(
    side: Side, topic: bytes, qos: int, packet_id: int, length: int, about: bytes, more: bytes
) -> None:
    body = topic_field(topic) + packet_id.to_bytes(2, "big") * qos + about + bytes(length)
    for data in (packet(0x30 | qos << 1, body), packet(0x30 | qos << 1, body) + more):
        expected = expected_plain(data, side)
        assert cut_plain(data, side, LIMIT) == expected
    data = packet(0x30 | qos << 1, body)
    if len(data) > PACKET_BYTES_MAX_MIN:
        assert cut_plain(data, side, len(data)) == expected_plain(data, side)
        assert cut_plain(data, side, len(data) - 1) is None


@given(st.binary(max_size=200), st.sampled_from([FROM_CLIENT, FROM_CLIENT_5]))
def test_bytes_that_are_no_publish_are_never_taken_for_one(data: bytes, side: Side) -> None:
    assert cut_plain(data, side, LIMIT) in (None, expected_plain(data, side))


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("side", [FROM_CLIENT, FROM_CLIENT_5], ids=["3.1.1", "5.0"])
@pytest.mark.parametrize("size", [0, 1, 100, 200, 16_000])
@pytest.mark.parametrize("count", [1, 2, 3, 64, 65, 128])
def test_a_read_of_publishes_of_one_length_is_seen_with_any_beginning_of_another_one(
    side: Side, qos: int, size: int, count: int
) -> None:
    bodies = tuple(bytes((number,)) * size for number in range(1, count + 2))
    properties = b"\0" if side.is_v5 else b""
    packets = [
        encode_publish(b"a/b", body, qos, packet_id=number * qos, properties=properties)
        for number, body in enumerate(bodies, 1)
    ]
    whole = b"".join(packets[:count])
    acks = encode_acks(PUBACK, range(1, count + 1)) if qos else b""
    for more in {*range(min(20, len(packets[-1]))), len(packets[-1]) - 1}:
        data = whole + packets[-1][:more]
        assert cut_plain(data, side, LIMIT) == (qos, b"a/b", acks, bodies[:count], len(whole)) == expected_plain(data, side)
    assert cut_plain(whole + b"\xc0\0", side, LIMIT) is None


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("side", [FROM_CLIENT, FROM_CLIENT_5], ids=["3.1.1", "5.0"])
def test_a_read_in_which_any_byte_is_of_another_packet_is_not_taken_for_one_of_those(side: Side, qos: int) -> None:
    properties = b"\0" if side.is_v5 else b""
    one = encode_publish(b"a/b", b"12345", qos, packet_id=qos, properties=properties)
    for at in range(len(one)):
        for byte in (0, 1, 2, 5, 0x30, 0x32, 127, 128, 255):
            other = one[:at] + bytes((byte,)) + one[at + 1 :]
            for data in (other + one * 3, one * 3 + other, one + other + one):
                assert cut_plain(data, side, LIMIT) in (None, expected_plain(data, side)), (at, byte)
                if other == one:
                    assert cut_plain(data, side, LIMIT) is not None


@given(st.sampled_from([FROM_CLIENT, FROM_CLIENT_5]).flatmap(lambda side: st.tuples(st.just(side), _stream(side.is_v5))))
def test_what_is_taken_for_a_read_of_those_is_what_decode_makes_of_it(case: tuple[Side, bytes]) -> None:
    side, data = case
    for cut in (len(data), len(data) - 3):
        assert cut_plain(data[:cut], side, LIMIT) in (None, expected_plain(data[:cut], side))


def test_a_read_of_larger_packets_than_are_taken_is_left_to_decode() -> None:
    data = encode_publish(b"a", b"x" * 200) * 2
    assert cut_plain(data, FROM_CLIENT, len(data) // 2) is not None
    assert cut_plain(data, FROM_CLIENT, len(data) // 2 - 1) is None


@given(st.binary(max_size=60), st.sampled_from([parse_connect, parse_subscribe, parse_unsubscribe]), st.booleans())
def test_any_body_is_parsed_or_refused(body: bytes, parser: Any, begins_well: bool) -> None:
    if begins_well:
        body = (b"\0\4MQTT\4" if parser is parse_connect else b"\0\1\0\1a") + body
    with suppress(ProtocolError):  # Any other exception fails the test.
        parser(body)
