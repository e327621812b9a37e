from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.protocol.connect import parse_connect
from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.disconnect import parse_disconnect
from penstock.gateway.protocol.encode import (
    encode_ack,
    encode_connack_5,
    encode_disconnect,
    encode_publish,
    encode_suback,
    encode_unsuback_5,
)
from penstock.gateway.protocol.errors import ProtocolError
from penstock.gateway.protocol.fixed_header import FROM_CLIENT_5, FROM_SERVER_5
from penstock.gateway.protocol.packets import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    MALFORMED,
    NAMES,
    PUBACK,
    PUBLISH,
    PUBLISH_WITH,
    PUBREC,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    WILL,
    Packet,
)
from penstock.gateway.protocol.properties import RULES, Property, parse_properties, read_properties, write_properties
from penstock.gateway.protocol.reasons import REASONS, ReasonCode
from penstock.gateway.protocol.subscribe import parse_subscribe, parse_unsubscribe
from tests.gateway.packet_cases import packet
from tests.gateway.packet_cases_5 import INVALID, SAMPLES, VALID, Invalid, Valid, connect_5

LIMIT = 1 << 20
PING = b"\xc0\0"
PARSERS: dict[int, Any] = {
    CONNECT: parse_connect,
    SUBSCRIBE: lambda body: parse_subscribe(body, is_v5=True),
    UNSUBSCRIBE: lambda body: parse_unsubscribe(body, is_v5=True),
    DISCONNECT: parse_disconnect,
}


def parse(item: Packet) -> Any:
    """Parse the body of an item; return None if its type has no parser. The error of a MALFORMED item is raised."""
    if item[0] == MALFORMED:
        raise item[1]
    if item[0] == PUBLISH_WITH:
        return parse_properties(item[5], PUBLISH)
    return PARSERS[item[0]](item[2]) if item[0] in PARSERS else None


def in_pieces(pieces: list[bytes]) -> list[Packet]:
    """Decode a stream that comes in pieces, as a connection does, and return its packets."""
    packets: list[Packet] = []
    rest = b""
    for piece in pieces:
        rest += piece
        items, consumed = decode(rest, LIMIT, FROM_CLIENT_5)
        rest = rest[consumed:]
        packets += items
        if packets and packets[-1][0] == MALFORMED:
            break
    return packets


def comparable(packets: list[Packet]) -> list[Packet]:
    return [(MALFORMED, type(item[1]), str(item[1])) if item[0] == MALFORMED else item for item in packets]


# --- the tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", VALID, ids=lambda case: case.name)
def test_a_valid_packet_is_decoded(case: Valid) -> None:
    packets, consumed = decode(case.data, LIMIT, FROM_CLIENT_5)
    assert packets == [case.item]
    assert consumed == len(case.data)
    assert parse(packets[0]) == case.parsed


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_an_invalid_packet_is_refused_with_its_reason_and_after_what_came_before_it(case: Invalid) -> None:
    packets, _ = decode(PING + case.data, LIMIT, FROM_CLIENT_5)
    assert packets[0] == (12, 0, b"")
    assert len(packets) == 2
    with pytest.raises(case.error) as refused:
        parse(packets[1])
    assert case.says in str(refused.value)
    assert refused.value.reason is case.reason


@pytest.mark.parametrize("case", VALID, ids=lambda case: case.name)
def test_a_packet_that_is_cut_short_waits_for_the_rest(case: Valid) -> None:
    for cut in range(len(case.data)):
        assert decode(PING + case.data[:cut], LIMIT, FROM_CLIENT_5) == ([(12, 0, b"")], len(PING))


@pytest.mark.parametrize("property", Property)
def test_each_property_is_read_and_written_where_the_table_allows_it_and_refused_elsewhere(property: Property) -> None:
    raw, value = SAMPLES[property]
    for where in (*range(1, 16), WILL):
        if where in RULES[property].packets:
            assert parse_properties(raw, where) == {property: value}
            assert write_properties({property: value}) == bytes((len(raw),)) + raw
        else:
            with pytest.raises(ProtocolError, match="must not occur in"):
                parse_properties(raw, where)


@pytest.mark.parametrize("property", Property)
def test_each_property_comes_once_but_for_those_that_may_repeat(property: Property) -> None:
    raw, value = SAMPLES[property]
    for where in RULES[property].packets:
        if where in RULES[property].repeats:
            assert parse_properties(raw * 3, where) == {property: value * 3}
        else:
            with pytest.raises(ProtocolError, match="more than once"):
                parse_properties(raw * 2, where)


@pytest.mark.parametrize("property", Property)
def test_a_property_that_is_cut_short_is_malformed(property: Property) -> None:
    raw, _ = SAMPLES[property]
    where = min(RULES[property].packets)
    for cut in range(1, len(raw)):
        with pytest.raises(ProtocolError, match="The packet ends"):
            parse_properties(raw[:cut], where)


def test_the_tables_are_complete() -> None:
    assert set(RULES) == set(Property) == set(SAMPLES)
    assert set().union(*REASONS.values()) == set(ReasonCode)  # Each code belongs to at least one packet.


# --- what the server sends ------------------------------------------------------------------------------------------------


def test_what_the_server_sends_is_as_in_the_specification() -> None:
    assert encode_connack_5(True, ReasonCode.SUCCESS, {}) == b"\x20\3\1\0\0"
    assert encode_connack_5(False, ReasonCode.BANNED, {Property.REASON_STRING: "no"}) == b"\x20\x08\0\x8a\5\x1f\0\2no"
    assert encode_disconnect(ReasonCode.SERVER_SHUTTING_DOWN) == b"\xe0\1\x8b"
    assert encode_disconnect(ReasonCode.QUOTA_EXCEEDED, "no") == b"\xe0\7\x97\5\x1f\0\2no"
    assert encode_ack(PUBACK, 258, ReasonCode.NOT_AUTHORIZED) == b"\x40\3\1\2\x87"
    assert encode_ack(PUBREC, 1, ReasonCode.QUOTA_EXCEEDED, "no") == b"\x50\x09\0\1\x97\5\x1f\0\2no"
    assert encode_suback(1, [0, 0x87], True) == b"\x90\5\0\1\0\0\x87"
    assert encode_unsuback_5(1, [0, 0x11]) == b"\xb0\5\0\1\0\0\x11"


@pytest.mark.parametrize(
    ("data", "item"),
    [
        (encode_connack_5(False, ReasonCode.SUCCESS, {}), (CONNACK, 0, b"\0\0\0")),
        (encode_suback(1, [2], True), (SUBACK, 0, b"\0\1\0\2")),
        (encode_unsuback_5(1, [0]), (UNSUBACK, 0, b"\0\1\0\0")),
        (encode_ack(PUBREC, 7, ReasonCode.QUOTA_EXCEEDED, "full"), (PUBREC, 7, 0x97)),
        (encode_disconnect(ReasonCode.QUOTA_EXCEEDED, ""), (DISCONNECT, 0, b"\x97")),
        (b"\xf0\0", (AUTH, 0, b"")),
    ],
)
def test_a_client_decodes_what_a_server_sends(data: bytes, item: tuple[object, ...]) -> None:
    assert decode(data, LIMIT, FROM_SERVER_5) == ([item], len(data))


@pytest.mark.parametrize(
    "case", [case for case in VALID if case.item[0] in (PUBLISH, PUBLISH_WITH)], ids=lambda case: case.name
)
def test_a_publish_is_encoded_as_it_was_decoded(case: Valid) -> None:
    _, flags, topic, packet_id, body, *rest = case.item
    assert isinstance(flags, int)
    assert isinstance(topic, bytes)
    assert isinstance(packet_id, int)
    assert isinstance(body, bytes)
    found = parse_properties(rest[0], PUBLISH) if rest else {}  # type: ignore[arg-type]
    raw = write_properties(found)
    qos = flags >> 1 & 3
    assert case.data == encode_publish(
        topic, body, qos, retain=bool(flags & 1), dup=bool(flags & 8), packet_id=packet_id, properties=raw
    )


# --- streams --------------------------------------------------------------------------------------------------------------


def test_a_stream_gives_the_same_packets_wherever_it_is_split() -> None:
    stream = b"".join(case.data for case in VALID)
    expected = [case.item for case in VALID]
    assert decode(stream, LIMIT, FROM_CLIENT_5) == (expected, len(stream))
    for cut in range(0, len(stream) + 1, 3):
        assert in_pieces([stream[:cut], stream[cut:]]) == expected
    assert in_pieces([bytes((byte,)) for byte in stream]) == expected


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_a_fault_is_found_at_the_same_place_wherever_the_stream_is_split(case: Invalid) -> None:
    stream = PING + case.data
    expected = comparable(in_pieces([stream]))
    for cut in range(len(stream) + 1):
        assert comparable(in_pieces([stream[:cut], stream[cut:]])) == expected


CHUNKS = st.one_of(
    st.sampled_from([case.data for case in VALID] + [case.data for case in INVALID]),
    st.binary(max_size=20),
    st.builds(packet, st.integers(0, 255), st.binary(max_size=12)),
)


@given(st.lists(CHUNKS, max_size=8).map(b"".join), st.lists(st.integers(0, 2000), max_size=10))
def test_any_bytes_in_any_pieces_give_packets_and_at_most_one_error_that_is_last(stream: bytes, cuts: list[int]) -> None:
    whole, consumed = decode(stream, LIMIT, FROM_CLIENT_5)
    assert 0 <= consumed <= len(stream)
    assert all(item[0] != MALFORMED for item in whole[:-1])
    for item in whole:
        with suppress(ProtocolError):  # Any other exception fails the test.
            parse(item)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:stop] for start, stop in pairwise(places)]
    assert comparable(in_pieces(pieces)) == comparable(whole)


@given(st.binary(max_size=60), st.sampled_from(sorted(NAMES.index(name) for name in NAMES[1:])))
def test_any_properties_are_read_or_refused(raw: bytes, where: int) -> None:
    with suppress(ProtocolError):  # Any other exception fails the test.
        found, at = read_properties(raw, 0, where)
        assert at <= len(raw)
        assert read_properties(write_properties(found), 0, where)[0] == found


@given(st.binary(max_size=60), st.sampled_from([*PARSERS.values()]), st.booleans())
def test_any_body_is_parsed_or_refused(body: bytes, parser: Any, begins_well: bool) -> None:
    if begins_well:
        body = (connect_5(0x06, b"a", b"w", b"")[2:13] if parser is parse_connect else b"\0\1\0") + body
    with suppress(ProtocolError):  # Any other exception fails the test.
        parser(body)
