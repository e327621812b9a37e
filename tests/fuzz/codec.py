"""The properties of the codec that must hold for any bytes, whichever fuzzer generates them."""

from __future__ import annotations

from typing import Any

from penstock.gateway.protocol.connect import parse_connect
from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.disconnect import parse_disconnect
from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.errors import ProtocolError, check_reason
from penstock.gateway.protocol.fixed_header import FROM_CLIENT, FROM_CLIENT_5, FROM_SERVER, FROM_SERVER_5, Side, packet_bytes
from penstock.gateway.protocol.packets import (
    CONNACK,
    CONNECT,
    DISCONNECT,
    MALFORMED,
    PING_RUN,
    PINGREQ,
    PUBACK,
    PUBACK_RUN,
    PUBLISH,
    PUBLISH_WITH,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    Packet,
)
from penstock.gateway.protocol.plain import cut_plain
from penstock.gateway.protocol.properties import Property, parse_properties, read_properties, write_properties
from penstock.gateway.protocol.runs import split_runs
from penstock.gateway.protocol.subscribe import parse_subscribe, parse_unsubscribe
from penstock.gateway.transport.proxy import ProxyHeaderInvalid, client_of, header_bytes
from penstock.store.options import KIB

PACKET_BYTES_MAX = 64 * KIB

READERS: dict[int, Any] = {
    CONNECT: lambda body, is_v5: parse_connect(body),
    SUBSCRIBE: lambda body, is_v5: parse_subscribe(body, is_v5=is_v5),
    UNSUBSCRIBE: lambda body, is_v5: parse_unsubscribe(body, is_v5=is_v5),
    DISCONNECT: lambda body, is_v5: parse_disconnect(body),
}


def check_codec(data: bytes) -> None:
    """Decode and parse bytes in each version. Only ProtocolError may be raised, and decoded packets can be encoded again."""
    for side in (FROM_CLIENT, FROM_CLIENT_5, FROM_SERVER, FROM_SERVER_5):
        packets, used = decode(data, PACKET_BYTES_MAX, side)
        assert 0 <= used <= len(data)
        assert all(item[0] != MALFORMED for item in packets[:-1]), "nothing may follow a malformed packet"
        assert comparable(in_pieces(data, side)) == comparable(packets), "the result must not depend on how a stream is cut"
        in_runs, used_in_runs = decode(data, PACKET_BYTES_MAX, side, runs=True)
        assert (comparable(split_runs(in_runs)), used_in_runs) == (comparable(packets), used), (
            "runs must contain the same packets"
        )
        seen = cut_plain(data, side, PACKET_BYTES_MAX)
        if seen is not None:
            qos, topic, acks, bodies, size = seen
            ids = [item[3] for item in packets]
            whole = [(PUBLISH, qos << 1, topic, *each) for each in zip(ids, bodies, strict=True)]
            assert (packets, used) == (whole, size), "only plain PUBLISHes may be split as plain ones"
            assert acks == (encode_acks(PUBACK, ids) if qos else b""), "each message must be acknowledged by its packet id"
        if side in (FROM_CLIENT, FROM_CLIENT_5):
            for item in packets:
                _check_parser(item, side.is_v5)
    _check_header(data)


def _check_parser(item: Packet, is_v5: bool) -> None:
    kind = item[0]
    if kind == MALFORMED:
        assert isinstance(item[1], ProtocolError)
        assert str(item[1])
        return
    if kind == PUBLISH:
        _, flags, topic, packet_id, body = item
        properties = b"\0" if is_v5 else b""
        again = encode_publish(
            topic, body, flags >> 1 & 3, retain=bool(flags & 1), dup=bool(flags & 8), packet_id=packet_id, properties=properties
        )
        side = FROM_CLIENT_5 if is_v5 else FROM_CLIENT
        assert decode(again, len(again) + PACKET_BYTES_MAX, side) == ([item], len(again))
    try:
        if kind == PUBLISH_WITH:
            found = parse_properties(item[5], PUBLISH)
            assert read_properties(write_properties(found), 0, PUBLISH)[0] == found
        elif kind in READERS:
            READERS[kind](item[2], is_v5)
    except ProtocolError as error:
        if not str(error):
            raise AssertionError("the error doesn't say what was wrong") from error


def _check_header(data: bytes) -> None:
    try:
        size = header_bytes(data)
        if 0 < size <= len(data):
            client_of(data[:size])
    except ProxyHeaderInvalid as error:
        if not str(error):
            raise AssertionError("the error doesn't say what was wrong") from error


def in_pieces(data: bytes, side: Side) -> list[Packet]:
    """Decode a stream that comes in reads of 1, 2, 3... bytes, as a connection does, and return its packets."""
    packets: list[Packet] = []
    rest, at, size = b"", 0, 1
    while at < len(data):
        rest += data[at : at + size]
        at, size = at + size, size + 1
        items, used = decode(rest, PACKET_BYTES_MAX, side)
        rest = rest[used:]
        packets += items
        if items and items[-1][0] == MALFORMED:
            break
        assert not rest or packet_bytes(rest) == 0 or packet_bytes(rest) > len(rest), "a complete packet was left undecoded"
    return packets


def comparable(packets: list[Packet]) -> list[Packet]:
    """Return packets with runs split, and errors as text, without the topic: that of a packet that is too large may be cut."""
    found: list[Packet] = []
    for item in packets:
        if item[0] == PING_RUN:
            found += [(PINGREQ, 0, b"")] * item[1]
        elif item[0] == PUBACK_RUN:
            found += [(PUBACK, packet_id) for packet_id in item[1]]
        else:
            said = str(item[1]).partition(" It is a PUBLISH to ")[0] if item[0] == MALFORMED else ""
            found.append((MALFORMED, type(item[1]), said) if item[0] == MALFORMED else item)
    return found


def check_answers(data: bytes) -> None:
    """Check that all bytes from a node are packets of one version or the other. The last packet may be cut short."""
    problems = []
    for side in (FROM_SERVER, FROM_SERVER_5):
        packets, _ = decode(data, 1 << 28, side)
        try:
            for item in packets:
                _check_answer(item, side.is_v5)
            return
        except ProtocolError as error:
            problems.append(str(error))
    raise AssertionError(f"the node sent bytes that are not MQTT ({' / '.join(problems)}): {data[:400]!r}")


def _check_answer(item: Packet, is_v5: bool) -> None:
    kind = item[0]
    if kind == MALFORMED:
        raise item[1]
    if not is_v5:
        if kind == CONNACK and len(item[2]) != 2:
            raise ProtocolError("a CONNACK of MQTT 3.1.1 has two bytes")
    elif kind == PUBLISH_WITH:
        about = parse_properties(item[5], PUBLISH)
        if not item[2] and Property.TOPIC_ALIAS not in about:
            raise ProtocolError("a PUBLISH without a topic or an alias")
    elif kind == CONNACK:
        check_reason(kind, item[2][1])
        read_properties(item[2], 2, kind)
    elif kind in (SUBACK, UNSUBACK):
        _, at = read_properties(item[2], 2, kind)
        for reason in item[2][at:]:
            check_reason(kind, reason)
    elif kind == DISCONNECT and item[2]:
        check_reason(kind, item[2][0])
        if len(item[2]) > 1:
            read_properties(item[2], 1, kind)
