"""The table of MQTT 3.1.1 packets as bytes, each with its decoded form or with the error that it causes.

The tests of decoding and encoding use it, and the fuzz tests start from its packets.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.gateway.protocol.connect import Connect, Will
from penstock.gateway.protocol.errors import ConnectRefused, MalformedPacket, MalformedTopic, ProtocolError, UnsupportedVersion
from penstock.gateway.protocol.packets import (
    CONNACK,
    CONNECT,
    DISCONNECT,
    NEVER_S,
    PINGREQ,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
)
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.protocol.subscribe import Subscribe, Unsubscribe

# --- what clients send, built field by field -------------------------------------------------------------------------


def field(value: bytes) -> bytes:
    """Return a field: a length of two bytes, and the value."""
    return len(value).to_bytes(2, "big") + value


def packet(header: int, body: bytes = b"") -> bytes:
    """Return a packet whose first byte is `header`."""
    length, left = b"", len(body)
    while left > 127:
        length, left = length + bytes((left % 128 + 128,)), left // 128
    return bytes((header,)) + length + bytes((left,)) + body


def connect(flags: int, *fields: bytes, name: bytes = b"MQTT", level: int = 4, keep_alive_s: int = 60) -> bytes:
    """Return a CONNECT with the given connect flags and the payload that `fields` make."""
    head = field(name) + bytes((level, flags)) + keep_alive_s.to_bytes(2, "big")
    return packet(0x10, head + b"".join(map(field, fields)))


def subscribe(packet_id: int, *filters: tuple[bytes, int], header: int = 0x82) -> bytes:
    """Return a SUBSCRIBE to pairs of filter and QoS."""
    return packet(header, packet_id.to_bytes(2, "big") + b"".join(field(name) + bytes((qos,)) for name, qos in filters))


def unsubscribe(packet_id: int, *filters: bytes, header: int = 0xA2) -> bytes:
    """Return an UNSUBSCRIBE."""
    return packet(header, packet_id.to_bytes(2, "big") + b"".join(map(field, filters)))


# --- valid packets ---------------------------------------------------------------------------------------------------


class Valid(NamedTuple):
    """A packet from a client, what `decode` returns for it, and what its parser (off the hot path) returns for that."""

    name: str
    data: bytes
    item: tuple[object, ...]
    parsed: Connect | Subscribe | Unsubscribe | None = None


def _connect(name: str, data: bytes, parsed: Connect) -> Valid:
    return Valid(name, data, (CONNECT, 0, data[2:]), parsed)


VALID = [
    # 3.1 CONNECT
    _connect("connect, least", connect(0x02, b""), Connect(4, "", True, 60, None, None, None)),
    _connect("connect, durable", connect(0x00, b"pump-7"), Connect(4, "pump-7", False, 60, None, None, None, NEVER_S)),
    _connect("connect, no keep alive", connect(0, b"a", keep_alive_s=0), Connect(4, "a", False, 0, None, None, None, NEVER_S)),
    _connect(
        "connect, keep alive of 65535 s",
        connect(0, b"a", keep_alive_s=65_535),
        Connect(4, "a", False, 65_535, None, None, None, NEVER_S),
    ),
    _connect("connect, user name", connect(0x82, b"a", b"eve"), Connect(4, "a", True, 60, None, "eve", None)),
    _connect("connect, password", connect(0xC2, b"a", b"eve", b"\0\xff"), Connect(4, "a", True, 60, None, "eve", b"\0\xff")),
    _connect("connect, empty password", connect(0xC2, b"a", b"", b""), Connect(4, "a", True, 60, None, "", b"")),
    _connect(
        "connect, will",
        connect(0x06, b"a", b"w/t", b"bye"),
        Connect(4, "a", True, 60, Will("w/t", b"bye", 0, False), None, None),
    ),
    _connect(
        "connect, empty will", connect(0x06, b"a", b"w", b""), Connect(4, "a", True, 60, Will("w", b"", 0, False), None, None)
    ),
    _connect(
        "connect, everything",
        connect(0xF6, "\u00fc".encode(), b"w", b"\0", b"eve", b"pw"),
        Connect(4, "\u00fc", True, 60, Will("w", b"\0", 2, True), "eve", b"pw"),
    ),
    _connect("connect, 3.1", connect(2, b"a", name=b"MQIsdp", level=3), Connect(3, "a", True, 60, None, None, None)),
    # 3.3 PUBLISH
    Valid("publish, QoS 0", packet(0x30, field(b"a/b") + b"hello"), (PUBLISH, 0, b"a/b", 0, b"hello")),
    Valid("publish, QoS 0, retain", packet(0x31, field(b"a") + b"x"), (PUBLISH, 1, b"a", 0, b"x")),
    Valid("publish, QoS 1", packet(0x32, field(b"a") + b"\0\x01x"), (PUBLISH, 2, b"a", 1, b"x")),
    Valid("publish, QoS 1, retain", packet(0x33, field(b"a") + b"\xff\xffx"), (PUBLISH, 3, b"a", 65_535, b"x")),
    Valid("publish, QoS 1, dup", packet(0x3A, field(b"a") + b"\1\0x"), (PUBLISH, 10, b"a", 256, b"x")),
    Valid("publish, QoS 2", packet(0x34, field(b"a") + b"\0\x02x"), (PUBLISH, 4, b"a", 2, b"x")),
    Valid("publish, QoS 2, dup, retain", packet(0x3D, field(b"a") + b"\0\x02x"), (PUBLISH, 13, b"a", 2, b"x")),
    Valid("publish, no body", packet(0x30, field(b"a")), (PUBLISH, 0, b"a", 0, b"")),
    Valid("publish, QoS 1, no body", packet(0x32, field(b"a") + b"\0\x07"), (PUBLISH, 2, b"a", 7, b"")),
    Valid("publish, one length byte, full", packet(0x30, field(b"a") + b"x" * 124), (PUBLISH, 0, b"a", 0, b"x" * 124)),
    Valid("publish, two length bytes", packet(0x30, field(b"a") + b"x" * 125), (PUBLISH, 0, b"a", 0, b"x" * 125)),
    Valid("publish, two length bytes, full", packet(0x30, field(b"a") + b"x" * 16_380), (PUBLISH, 0, b"a", 0, b"x" * 16_380)),
    Valid("publish, three length bytes", packet(0x30, field(b"a") + b"x" * 16_381), (PUBLISH, 0, b"a", 0, b"x" * 16_381)),
    Valid("publish, long topic", packet(0x32, field(b"t" * 300) + b"\0\1x"), (PUBLISH, 2, b"t" * 300, 1, b"x")),
    Valid("publish, topic that the store will refuse", packet(0x30, field(b"\xff#")), (PUBLISH, 0, b"\xff#", 0, b"")),
    Valid("publish, length in more bytes than it needs", b"\x30\x84\x80\x00\0\1ax", (PUBLISH, 0, b"a", 0, b"x")),
    # 3.4 to 3.7 acks
    Valid("puback", b"\x40\x02\0\x01", (PUBACK, 1)),
    Valid("pubrec", b"\x50\x02\x12\x34", (PUBREC, 0x1234)),
    Valid("pubrel", b"\x62\x02\xff\xff", (PUBREL, 65_535)),
    Valid("pubcomp", b"\x70\x02\1\0", (PUBCOMP, 256)),
    # 3.8 SUBSCRIBE, 3.10 UNSUBSCRIBE
    Valid("subscribe", b"\x82\x06\0\x0a\0\1a\2", (SUBSCRIBE, 2, b"\0\x0a\0\1a\2"), Subscribe(10, [("a", 2)])),
    Valid(
        "subscribe, several",
        subscribe(1, (b"a/+", 0), (b"#", 1), (b"$share/g/a/#", 1), (b"a/+", 2)),
        (SUBSCRIBE, 2, subscribe(1, (b"a/+", 0), (b"#", 1), (b"$share/g/a/#", 1), (b"a/+", 2))[2:]),
        Subscribe(1, [("a/+", 0), ("#", 1), ("$share/g/a/#", 1), ("a/+", 2)]),
    ),
    Valid("unsubscribe", b"\xa2\x05\0\x0a\0\1a", (UNSUBSCRIBE, 2, b"\0\x0a\0\1a"), Unsubscribe(10, ["a"])),
    Valid(
        "unsubscribe, several",
        unsubscribe(9, b"a", b"+/b/#"),
        (UNSUBSCRIBE, 2, unsubscribe(9, b"a", b"+/b/#")[2:]),
        Unsubscribe(9, ["a", "+/b/#"]),
    ),
    # 3.12, 3.14
    Valid("pingreq", b"\xc0\0", (PINGREQ, 0, b"")),
    Valid("disconnect", b"\xe0\0", (DISCONNECT, 0, b"")),
]

# --- packets that end the connection ----------------------------------------------------------------------------------


class Invalid(NamedTuple):
    """A packet from a client, and the error that it causes. `says` is a part of the error's message."""

    name: str
    data: bytes
    error: type[ProtocolError]
    says: str
    reason: ReasonCode = ReasonCode.MALFORMED_PACKET


_PROTOCOL_ERROR = ReasonCode.PROTOCOL_ERROR
_BAD_ID = ReasonCode.CLIENT_IDENTIFIER_NOT_VALID
_BAD_VERSION = ReasonCode.UNSUPPORTED_PROTOCOL_VERSION
_BAD_TOPIC = ReasonCode.TOPIC_NAME_INVALID

INVALID = [
    # 2.2 the fixed header
    Invalid("reserved type 0", b"\0\0", MalformedPacket, "has type 0"),
    Invalid("reserved type 15", b"\xf0\0", MalformedPacket, "has type 15"),
    Invalid("five length bytes", b"\x30\x80\x80\x80\x80\x01", MalformedPacket, "fourth byte"),
    Invalid("larger than the limit", b"\x30\xff\xff\xff\x7f", ProtocolError, "268435460 bytes", ReasonCode.PACKET_TOO_LARGE),
    Invalid("an HTTP request", b"GET / HTTP/1.1\r\n\r\n", MalformedPacket, "PUBACK has the flags 0b0111"),
    *(
        Invalid(f"flags {header & 15:#x} on type {header >> 4}", bytes((header, 2, 0, 1)), MalformedPacket, "[MQTT-2.2.2-2]")
        for header in (0x11, 0x41, 0x48, 0x52, 0x60, 0x61, 0x66, 0x71, 0x80, 0x83, 0xA0, 0xA6, 0xC1, 0xE1)
    ),
    *(
        Invalid(f"type {header >> 4} from a client", bytes((header, 2, 0, 1)), ProtocolError, "side that", _PROTOCOL_ERROR)
        for header in (0x20, 0x90, 0xB0, 0xD0)
    ),
    # 3.1 CONNECT
    Invalid("connect, other protocol", connect(2, b"a", name=b"AMQP"), MalformedPacket, "[MQTT-3.1.2-1]"),
    Invalid("connect, lower case", connect(2, b"a", name=b"mqtt"), MalformedPacket, "[MQTT-3.1.2-1]"),
    Invalid("connect, 3.1 as 3.1.1", connect(2, b"a", name=b"MQIsdp"), UnsupportedVersion, "level 4", _BAD_VERSION),
    Invalid("connect, 3.1 without id", connect(2, b"", name=b"MQIsdp", level=3), ConnectRefused, "the version is 3.1", _BAD_ID),
    Invalid("connect, level 3", connect(2, b"a", level=3), UnsupportedVersion, "level 3", _BAD_VERSION),
    Invalid("connect, level 4 of a bridge", connect(2, b"a", level=0x84), UnsupportedVersion, "level 132", _BAD_VERSION),
    Invalid("connect, 6.0", connect(2, b"a", level=6), UnsupportedVersion, "level 6", _BAD_VERSION),
    Invalid("connect, reserved flag", connect(0x03, b"a"), MalformedPacket, "[MQTT-3.1.2-3]"),
    Invalid("connect, will at QoS 3", connect(0x1E, b"a", b"w", b""), MalformedPacket, "[MQTT-3.1.2-14]"),
    Invalid("connect, will QoS without will", connect(0x0A, b"a"), MalformedPacket, "[MQTT-3.1.2-13]"),
    Invalid("connect, will retain without will", connect(0x22, b"a"), MalformedPacket, "[MQTT-3.1.2-15]"),
    Invalid("connect, password without user name", connect(0x42, b"a", b"p"), MalformedPacket, "[MQTT-3.1.2-22]"),
    Invalid("connect, durable without id", connect(0x00, b""), ConnectRefused, "[MQTT-3.1.3-8]", _BAD_ID),
    Invalid("connect, long id", connect(0x02, b"a" * 1025), ConnectRefused, "1025 bytes", _BAD_ID),
    Invalid("connect, id not UTF-8", connect(0x02, b"a\xff"), MalformedPacket, "client id is not UTF-8 from byte 1"),
    Invalid("connect, id with a surrogate", connect(0x02, b"\xed\xa0\x80"), MalformedPacket, "[MQTT-1.5.3-1]"),
    Invalid("connect, id with U+0000", connect(0x02, b"a\0"), MalformedPacket, "[MQTT-1.5.3-2]"),
    Invalid("connect, user name not UTF-8", connect(0x82, b"a", b"\x80"), MalformedPacket, "user name is not UTF-8"),
    Invalid("connect, will topic not UTF-8", connect(0x06, b"a", b"\xff", b""), MalformedTopic, "not UTF-8", _BAD_TOPIC),
    Invalid("connect, will topic with wildcard", connect(0x06, b"a", b"a/#", b""), MalformedTopic, "wildcard", _BAD_TOPIC),
    Invalid("connect, empty will topic", connect(0x06, b"a", b"", b""), MalformedTopic, "empty", _BAD_TOPIC),
    Invalid("connect, no client id", connect(0x02), MalformedPacket, "ends within its client id"),
    Invalid("connect, no will message", connect(0x06, b"a", b"w"), MalformedPacket, "ends within its will message"),
    Invalid("connect, no user name", connect(0x82, b"a"), MalformedPacket, "ends within its user name"),
    Invalid("connect, no password", connect(0xC2, b"a", b"u"), MalformedPacket, "ends within its password"),
    Invalid("connect, user name without flag", connect(0x02, b"a", b"u"), MalformedPacket, "3 bytes after its last field"),
    Invalid(
        "connect, cut in a field", packet(0x10, connect(2, b"abc")[2:-1]), MalformedPacket, "announces 3 bytes; 2 are left"
    ),
    Invalid("connect, empty", b"\x10\0", MalformedPacket, "ends within its protocol name"),
    Invalid("connect, only a name", packet(0x10, field(b"MQTT")), MalformedPacket, "ends before its protocol level"),
    Invalid("connect, no flags", packet(0x10, field(b"MQTT") + b"\4"), MalformedPacket, "ends before its connect flags"),
    Invalid("connect, no keep alive", packet(0x10, field(b"MQTT") + b"\4\2\0"), MalformedPacket, "ends within its keep alive"),
    # 3.3 PUBLISH
    Invalid("publish, QoS 3", packet(0x36, field(b"a") + b"\0\1"), MalformedPacket, "[MQTT-3.3.1-4]"),
    Invalid("publish, QoS 3, dup", packet(0x3E, field(b"a") + b"\0\1"), MalformedPacket, "[MQTT-3.3.1-4]"),
    Invalid("publish, QoS 0, dup", packet(0x38, field(b"a")), MalformedPacket, "[MQTT-3.3.1-2]"),
    Invalid("publish, QoS 0, dup, retain", packet(0x39, field(b"a")), MalformedPacket, "[MQTT-3.3.1-2]"),
    Invalid("publish, QoS 1, id 0", packet(0x32, field(b"a") + b"\0\0x"), ProtocolError, "[MQTT-2.3.1-1]", _PROTOCOL_ERROR),
    Invalid("publish, QoS 2, id 0", packet(0x34, field(b"a") + b"\0\0x"), ProtocolError, "[MQTT-2.3.1-1]", _PROTOCOL_ERROR),
    Invalid("publish, empty", b"\x30\0", MalformedPacket, "ends within its fields"),
    Invalid("publish, half of a topic length", b"\x30\1\0", MalformedPacket, "ends within its fields"),
    Invalid("publish, half of a topic length, then more", b"\x30\1\0\x30\3\0\1a", MalformedPacket, "ends within its fields"),
    Invalid("publish, topic longer than the packet", b"\x30\4\0\3ab\x30\3\0\1a", MalformedPacket, "ends within its fields"),
    Invalid("publish, QoS 1, empty", b"\x32\0\x32\0", MalformedPacket, "ends within its fields"),
    Invalid("publish, QoS 1, no id", packet(0x32, field(b"a")), MalformedPacket, "ends within its fields"),
    Invalid(
        "publish, QoS 1, half of an id", packet(0x32, field(b"ab") + b"\1") + b"\xc0\0", MalformedPacket, "ends within its"
    ),
    Invalid("publish, QoS 1, topic longer than the packet", b"\x32\4\xff\xffab", MalformedPacket, "ends within its fields"),
    # 3.4 to 3.7 acks
    Invalid("puback, empty", b"\x40\0", MalformedPacket, "2 bytes after its fixed header, not 0"),
    Invalid("puback, short", b"\x40\1\1", MalformedPacket, "not 1"),
    Invalid("puback, as in 5.0", b"\x40\3\0\1\0", MalformedPacket, "not 3"),
    Invalid("pubrec, id 0", b"\x50\2\0\0", ProtocolError, "PUBREC has the packet id 0", _PROTOCOL_ERROR),
    Invalid("pubrel, id 0", b"\x62\2\0\0", ProtocolError, "PUBREL has the packet id 0", _PROTOCOL_ERROR),
    # 3.8 SUBSCRIBE
    Invalid("subscribe, id 0", subscribe(0, (b"a", 0)), ProtocolError, "[MQTT-2.3.1-1]", _PROTOCOL_ERROR),
    Invalid("subscribe, nothing", subscribe(1), ProtocolError, "[MQTT-3.8.3-3]", _PROTOCOL_ERROR),
    Invalid("subscribe, empty", b"\x82\0", MalformedPacket, "ends within its packet id"),
    Invalid("subscribe, QoS 3", subscribe(1, (b"a", 3)), MalformedPacket, "[MQTT-3-8.3-4]"),
    Invalid("subscribe, reserved bits", subscribe(1, (b"a", 0), (b"b", 0x04)), MalformedPacket, "[MQTT-3-8.3-4]"),
    Invalid("subscribe, no QoS", packet(0x82, b"\0\1" + field(b"a")), MalformedPacket, "ends before its subscription options"),
    Invalid("subscribe, cut filter", b"\x82\5\0\1\0\2a", MalformedPacket, "ends within its topic filter"),
    Invalid(
        "subscribe, trailing byte", packet(0x82, b"\0\1" + field(b"a") + b"\0\0"), MalformedPacket, "ends within its topic"
    ),
    Invalid("subscribe, filter not UTF-8", subscribe(1, (b"\xfe", 0)), MalformedPacket, "[MQTT-1.5.3-1]"),
    Invalid("subscribe, filter with U+0000", subscribe(1, (b"a\0", 0)), MalformedPacket, "[MQTT-1.5.3-2]"),
    # 3.10 UNSUBSCRIBE
    Invalid("unsubscribe, id 0", unsubscribe(0, b"a"), ProtocolError, "[MQTT-2.3.1-1]", _PROTOCOL_ERROR),
    Invalid("unsubscribe, nothing", unsubscribe(1), ProtocolError, "[MQTT-3.10.3-2]", _PROTOCOL_ERROR),
    Invalid("unsubscribe, filter not UTF-8", unsubscribe(1, b"\xff"), MalformedPacket, "[MQTT-1.5.3-1]"),
    Invalid(
        "unsubscribe, trailing byte", packet(0xA2, b"\0\1" + field(b"a") + b"\0"), MalformedPacket, "ends within its topic"
    ),
    # 3.12, 3.14
    Invalid("pingreq, body", b"\xc0\1\0", MalformedPacket, "must end after its fixed header"),
    Invalid("disconnect, body", b"\xe0\2\0\0", MalformedPacket, "must end after its fixed header"),
]

# --- what the server sends ---------------------------------------------------------------------------------------------

SERVER_ITEMS: list[tuple[bytes, tuple[object, ...]]] = [
    (b"\x20\2\0\0", (CONNACK, 0, b"\0\0")),
    (b"\x20\2\1\0", (CONNACK, 0, b"\1\0")),
    (b"\x90\5\0\1\0\2\x80", (SUBACK, 0, b"\0\1\0\2\x80")),
    (b"\xb0\2\0\1", (UNSUBACK, 1)),
    (b"\xd0\0", (PINGRESP, 0, b"")),
    (b"\x62\2\0\1", (PUBREL, 1)),
]
"""Packets as bytes, with what `decode` returns for them on the client's side."""
