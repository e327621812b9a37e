"""The table of MQTT 5.0 packets as bytes, like `packet_cases` for 3.1.1."""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.gateway.protocol.connect import Connect, Will
from penstock.gateway.protocol.disconnect import Disconnect
from penstock.gateway.protocol.errors import ConnectRefused, MalformedPacket, ProtocolError
from penstock.gateway.protocol.packets import (
    AUTH,
    CONNECT,
    DISCONNECT,
    PINGREQ,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBLISH_WITH,
    PUBREC,
    PUBREL,
    SUBSCRIBE,
    UNSUBSCRIBE,
)
from penstock.gateway.protocol.properties import Property, PropertyValues
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.protocol.subscribe import Subscribe, Unsubscribe
from tests.gateway.packet_cases import field, packet

# --- what clients send, built field by field -------------------------------------------------------------------------


def properties(*pieces: bytes) -> bytes:
    """Return a property length, and properties of at most 127 bytes in all."""
    raw = b"".join(pieces)
    assert len(raw) < 128
    return bytes((len(raw),)) + raw


NONE = properties()


def connect_5(flags: int, *fields: bytes, about: bytes = NONE, will: bytes = NONE, keep_alive_s: int = 60) -> bytes:
    """Return a CONNECT with the given connect flags, properties and payload; `will` are the will's properties."""
    head = field(b"MQTT") + bytes((5, flags)) + keep_alive_s.to_bytes(2, "big") + about
    client_id, *rest = map(field, fields)
    return packet(0x10, head + client_id + (will if flags & 4 else b"") + b"".join(rest))


def publish_5(header: int, topic: bytes, packet_id: int, about: bytes, body: bytes = b"x") -> bytes:
    """Return a PUBLISH; at QoS 0 it has no packet id."""
    return packet(header, field(topic) + (packet_id.to_bytes(2, "big") if header & 6 else b"") + about + body)


def subscribe_5(packet_id: int, *filters: tuple[bytes, int], about: bytes = NONE) -> bytes:
    """Return a SUBSCRIBE to pairs of filter and options."""
    return packet(
        0x82, packet_id.to_bytes(2, "big") + about + b"".join(field(name) + bytes((options,)) for name, options in filters)
    )


def unsubscribe_5(packet_id: int, *filters: bytes, about: bytes = NONE) -> bytes:
    """Return an UNSUBSCRIBE."""
    return packet(0xA2, packet_id.to_bytes(2, "big") + about + b"".join(map(field, filters)))


# --- each property, as bytes and as its value ------------------------------------------------------------------------

SAMPLES: dict[Property, tuple[bytes, Any]] = {
    Property.PAYLOAD_FORMAT: (b"\x01\x01", 1),
    Property.MESSAGE_EXPIRY_S: (b"\x02\x00\x01\x51\x80", 86_400),
    Property.CONTENT_TYPE: (b"\x03\x00\x0aimage/jpeg", "image/jpeg"),
    Property.RESPONSE_TOPIC: (b"\x08\x00\x07answers", "answers"),
    Property.CORRELATION_DATA: (b"\x09\x00\x02\x00\xff", b"\x00\xff"),
    Property.SUBSCRIPTION_IDENTIFIER: (b"\x0b\xff\xff\xff\x7f", [268_435_455]),
    Property.SESSION_EXPIRY_S: (b"\x11\xff\xff\xff\xff", 0xFFFF_FFFF),
    Property.ASSIGNED_CLIENT_ID: (b"\x12\x00\x04auto", "auto"),
    Property.SERVER_KEEP_ALIVE_S: (b"\x13\x00\x3c", 60),
    Property.AUTHENTICATION_METHOD: (b"\x15\x00\x05SCRAM", "SCRAM"),
    Property.AUTHENTICATION_DATA: (b"\x16\x00\x01\x00", b"\x00"),
    Property.REQUEST_PROBLEM_INFORMATION: (b"\x17\x00", 0),
    Property.WILL_DELAY_S: (b"\x18\x00\x00\x00\x05", 5),
    Property.REQUEST_RESPONSE_INFORMATION: (b"\x19\x01", 1),
    Property.RESPONSE_INFORMATION: (b"\x1a\x00\x01r", "r"),
    Property.SERVER_REFERENCE: (b"\x1c\x00\x05other", "other"),
    Property.REASON_STRING: (b"\x1f\x00\x03why", "why"),
    Property.RECEIVE_MAXIMUM: (b"\x21\x00\x0a", 10),
    Property.TOPIC_ALIAS_MAXIMUM: (b"\x22\x00\x10", 16),
    Property.TOPIC_ALIAS: (b"\x23\x00\x07", 7),
    Property.MAXIMUM_QOS: (b"\x24\x01", 1),
    Property.RETAIN_AVAILABLE: (b"\x25\x00", 0),
    Property.USER_PROPERTY: (b"\x26\x00\x01a\x00\x01b", [("a", "b")]),
    Property.MAXIMUM_PACKET_SIZE: (b"\x27\x00\x00\x10\x00", 4096),
    Property.WILDCARD_SUBSCRIPTION_AVAILABLE: (b"\x28\x00", 0),
    Property.SUBSCRIPTION_IDENTIFIER_AVAILABLE: (b"\x29\x01", 1),
    Property.SHARED_SUBSCRIPTION_AVAILABLE: (b"\x2a\x00", 0),
}


def sample(*which: Property) -> bytes:
    """Return the samples of some properties, one after the other."""
    return b"".join(SAMPLES[one][0] for one in which)


def meaning(*which: Property) -> PropertyValues:
    return {one: SAMPLES[one][1] for one in which}


# --- valid packets ---------------------------------------------------------------------------------------------------


class Valid(NamedTuple):
    """A packet from a client, what `decode` returns for it, and what its parser (off the hot path) returns for that."""

    name: str
    data: bytes
    item: tuple[object, ...]
    parsed: Connect | Subscribe | Unsubscribe | Disconnect | PropertyValues | None = None


def _connect(name: str, data: bytes, parsed: Connect) -> Valid:
    return Valid(name, data, (CONNECT, 0, data[2:] if data[1] < 128 else data[3:]), parsed)


def _publish(name: str, header: int, topic: bytes, packet_id: int, raw: bytes, found: PropertyValues) -> Valid:
    data = publish_5(header, topic, packet_id, properties(raw))
    return Valid(name, data, (PUBLISH_WITH, header & 15, topic, packet_id, b"x", raw), found)


def _subscribe(name: str, data: bytes, parsed: Subscribe) -> Valid:
    return Valid(name, data, (SUBSCRIBE, 2, data[2:]), parsed)


P = Property
_MESSAGE = (P.PAYLOAD_FORMAT, P.MESSAGE_EXPIRY_S, P.CONTENT_TYPE, P.RESPONSE_TOPIC, P.CORRELATION_DATA, P.USER_PROPERTY)
_CONNECTS = (
    P.SESSION_EXPIRY_S,
    P.RECEIVE_MAXIMUM,
    P.MAXIMUM_PACKET_SIZE,
    P.TOPIC_ALIAS_MAXIMUM,
    P.REQUEST_RESPONSE_INFORMATION,
    P.REQUEST_PROBLEM_INFORMATION,
    P.USER_PROPERTY,
)

VALID = [
    # 3.1 CONNECT
    _connect("connect, least", connect_5(0x02, b""), Connect(5, "", True, 60, None, None, None)),
    _connect("connect, without clean start or id", connect_5(0, b""), Connect(5, "", False, 60, None, None, None)),
    _connect("connect, password alone", connect_5(0x42, b"a", b"p"), Connect(5, "a", True, 60, None, None, b"p")),
    _connect(
        "connect, all properties",
        connect_5(0x02, b"a", about=properties(sample(*_CONNECTS))),
        Connect(5, "a", True, 60, None, None, None, 0xFFFF_FFFF, 10, 4096, 16, True, False, [("a", "b")]),
    ),
    _connect(
        "connect, will with properties",
        connect_5(0x2E, b"a", b"w", b"bye", will=properties(sample(P.WILL_DELAY_S, *_MESSAGE))),
        Connect(5, "a", True, 60, Will("w", b"bye", 1, True, 5, meaning(*_MESSAGE)), None, None),
    ),
    _connect(
        "connect, will without properties",
        connect_5(0xC6, b"a", b"w", b"", b"eve", b"pw"),
        Connect(5, "a", True, 60, Will("w", b"", 0, False), "eve", b"pw"),
    ),
    # 3.3 PUBLISH
    Valid("publish, QoS 0", publish_5(0x30, b"a/b", 0, NONE), (PUBLISH, 0, b"a/b", 0, b"x")),
    Valid("publish, QoS 1", publish_5(0x32, b"a", 7, NONE), (PUBLISH, 2, b"a", 7, b"x")),
    Valid("publish, QoS 2, dup, retain", publish_5(0x3D, b"a", 7, NONE), (PUBLISH, 13, b"a", 7, b"x")),
    Valid("publish, no body", publish_5(0x30, b"a", 0, NONE, b""), (PUBLISH, 0, b"a", 0, b"")),
    Valid("publish, QoS 1, no body", publish_5(0x32, b"a", 1, NONE, b""), (PUBLISH, 2, b"a", 1, b"")),
    Valid("publish, two length bytes", publish_5(0x30, b"a", 0, NONE, b"x" * 200), (PUBLISH, 0, b"a", 0, b"x" * 200)),
    _publish("publish, QoS 0, all properties", 0x30, b"a", 0, sample(*_MESSAGE), meaning(*_MESSAGE)),
    _publish("publish, QoS 1, all properties", 0x32, b"a", 9, sample(*_MESSAGE), meaning(*_MESSAGE)),
    _publish("publish, topic and alias", 0x30, b"a", 0, sample(P.TOPIC_ALIAS), meaning(P.TOPIC_ALIAS)),
    _publish("publish, alias alone", 0x34, b"", 3, sample(P.TOPIC_ALIAS), meaning(P.TOPIC_ALIAS)),
    _publish(
        "publish, user properties repeat and keep their order",
        0x30,
        b"a",
        0,
        b"\x26\0\1b\0\0\x26\0\1a\0\1x\x26\0\1b\0\0",
        {P.USER_PROPERTY: [("b", ""), ("a", "x"), ("b", "")]},
    ),
    Valid(
        "publish, 200 bytes of properties",
        packet(0x30, field(b"a") + b"\xc8\x01" + b"\x03\0\xc5" + b"t" * 197),
        (PUBLISH_WITH, 0, b"a", 0, b"", b"\x03\0\xc5" + b"t" * 197),
        {P.CONTENT_TYPE: "t" * 197},
    ),
    # 3.4 to 3.7 acks
    Valid("puback", b"\x40\2\0\1", (PUBACK, 1)),
    Valid("puback, success in full", b"\x40\3\0\1\0", (PUBACK, 1, 0)),
    Valid("puback, no subscribers", b"\x40\4\0\1\x10\0", (PUBACK, 1, 0x10)),
    Valid("pubrec, denied and why", packet(0x50, b"\0\1\x87" + properties(sample(P.REASON_STRING))), (PUBREC, 1, 0x87)),
    Valid("pubrel, unknown", b"\x62\3\0\1\x92", (PUBREL, 1, 0x92)),
    Valid("pubcomp", packet(0x70, b"\0\1\x92" + properties(sample(P.USER_PROPERTY))), (PUBCOMP, 1, 0x92)),
    # 3.8 SUBSCRIBE, 3.10 UNSUBSCRIBE
    _subscribe("subscribe", subscribe_5(10, (b"a", 2)), Subscribe(10, [("a", 2)])),
    _subscribe("subscribe, all options", subscribe_5(1, (b"a/#", 0x2E)), Subscribe(1, [("a/#", 0x2E)])),
    _subscribe(
        "subscribe, identifier",
        subscribe_5(1, (b"a", 0), (b"b", 1), about=properties(sample(P.SUBSCRIPTION_IDENTIFIER, P.USER_PROPERTY))),
        Subscribe(1, [("a", 0), ("b", 1)], 268_435_455),
    ),
    _subscribe("subscribe, shared", subscribe_5(1, (b"$share/g/a", 1)), Subscribe(1, [("$share/g/a", 1)])),
    Valid(
        "unsubscribe",
        unsubscribe_5(9, b"a", b"+/b", about=properties(sample(P.USER_PROPERTY))),
        (UNSUBSCRIBE, 2, unsubscribe_5(9, b"a", b"+/b", about=properties(sample(P.USER_PROPERTY)))[2:]),
        Unsubscribe(9, ["a", "+/b"]),
    ),
    # 3.12, 3.14, 3.15
    Valid("pingreq", b"\xc0\0", (PINGREQ, 0, b"")),
    Valid("disconnect", b"\xe0\0", (DISCONNECT, 0, b""), Disconnect(0)),
    Valid("disconnect, with will", b"\xe0\1\4", (DISCONNECT, 0, b"\4"), Disconnect(4)),
    Valid("disconnect, no properties", b"\xe0\2\0\0", (DISCONNECT, 0, b"\0\0"), Disconnect(0)),
    Valid(
        "disconnect, session expiry",
        packet(0xE0, b"\0" + properties(sample(P.SESSION_EXPIRY_S, P.REASON_STRING))),
        (DISCONNECT, 0, b"\0" + properties(sample(P.SESSION_EXPIRY_S, P.REASON_STRING))),
        Disconnect(0, 0xFFFF_FFFF),
    ),
    Valid("auth", b"\xf0\0", (AUTH, 0, b"")),
]

# --- packets that end the connection ----------------------------------------------------------------------------------


class Invalid(NamedTuple):
    """A packet from a client, and the error that it causes. `says` is a part of the error's message."""

    name: str
    data: bytes
    error: type[ProtocolError]
    says: str
    reason: ReasonCode = ReasonCode.MALFORMED_PACKET


_PROTOCOL = ReasonCode.PROTOCOL_ERROR


def _bad_connect(name: str, raw: bytes, error: type[ProtocolError], says: str, reason: ReasonCode) -> Invalid:
    return Invalid(f"connect, {name}", connect_5(2, b"a", about=properties(raw)), error, says, reason)


def _bad_publish(name: str, raw: bytes, error: type[ProtocolError], says: str, reason: ReasonCode) -> Invalid:
    return Invalid(f"publish, {name}", publish_5(0x30, b"a", 0, properties(raw)), error, says, reason)


_MALFORMED = ReasonCode.MALFORMED_PACKET

INVALID = [
    # 1.5.5, 2.1
    Invalid("length in more bytes than it needs", b"\x30\x85\x00\0\1a\0x", MalformedPacket, "[MQTT-1.5.5-1]"),
    Invalid("reserved type 0", b"\0\0", MalformedPacket, "has type 0"),
    Invalid("auth, flags", b"\xf1\0", MalformedPacket, "[MQTT-2.1.3-1]"),
    *(
        Invalid(f"type {header >> 4} from a client", bytes((header, 2, 0, 1)), ProtocolError, "side that", _PROTOCOL)
        for header in (0x20, 0x90, 0xB0, 0xD0)
    ),
    # 2.2.2 properties, in any packet
    _bad_connect("unknown property", b"\x04\0", MalformedPacket, "The property 0x04 does not exist", _MALFORMED),
    _bad_connect("property identifier in two bytes", b"\x91\0\0\0\0\0", MalformedPacket, "[MQTT-1.5.5-1]", _MALFORMED),
    _bad_connect("property cut short", b"\x11\0\0\0", MalformedPacket, "ends within its session expiry", _MALFORMED),
    Invalid(
        "connect, properties longer than the packet",
        packet(0x10, b"\0\4MQTT\5\2\0\x3c\x0a\x11"),
        MalformedPacket,
        "announces 10 bytes of properties, but 1 bytes are left",
    ),
    Invalid("connect, no properties", packet(0x10, b"\0\4MQTT\5\2\0\x3c"), MalformedPacket, "ends within its property length"),
    Invalid(
        "connect, property length of five bytes",
        packet(0x10, b"\0\4MQTT\5\2\0\x3c\xff\xff\xff\xff\x7f"),
        MalformedPacket,
        "fourth byte",
    ),
    *(
        _bad_connect(f"{one.name.lower()} twice", sample(one, one), ProtocolError, "more than once", _PROTOCOL)
        for one in _CONNECTS
        if one != P.USER_PROPERTY
    ),
    *(
        _bad_connect(f"{one.name.lower()} in it", sample(one), MalformedPacket, "must not occur in a CONNECT", _MALFORMED)
        for one in (P.TOPIC_ALIAS, P.MESSAGE_EXPIRY_S, P.WILL_DELAY_S, P.REASON_STRING, P.SERVER_KEEP_ALIVE_S)
    ),
    # 3.1 CONNECT
    _bad_connect("receive maximum 0", b"\x21\0\0", ProtocolError, "receive maximum is 0", _PROTOCOL),
    _bad_connect("maximum packet size 0", b"\x27\0\0\0\0", ProtocolError, "maximum packet size is 0", _PROTOCOL),
    _bad_connect("request problem information 2", b"\x17\2", ProtocolError, "Use 0 to 1", _PROTOCOL),
    _bad_connect("request response information 2", b"\x19\2", ProtocolError, "Use 0 to 1", _PROTOCOL),
    _bad_connect(
        "authentication method",
        sample(P.AUTHENTICATION_METHOD),
        ConnectRefused,
        "'SCRAM' is not served",
        ReasonCode.BAD_AUTHENTICATION_METHOD,
    ),
    _bad_connect("authentication data alone", sample(P.AUTHENTICATION_DATA), ProtocolError, "without a method", _PROTOCOL),
    _bad_connect("user property not UTF-8", b"\x26\0\1\xff\0\0", MalformedPacket, "[MQTT-1.5.4-1]", _MALFORMED),
    _bad_connect("user property with U+0000", b"\x26\0\1a\0\1\0", MalformedPacket, "[MQTT-1.5.4-2]", _MALFORMED),
    Invalid("connect, reserved flag", connect_5(3, b"a"), MalformedPacket, "[MQTT-3.1.2-3]"),
    Invalid("connect, will at QoS 3", connect_5(0x1E, b"a", b"w", b""), MalformedPacket, "[MQTT-3.1.2-12]"),
    Invalid("connect, will QoS without will", connect_5(0x0A, b"a"), MalformedPacket, "[MQTT-3.1.2-11]"),
    Invalid("connect, will retain without will", connect_5(0x22, b"a"), MalformedPacket, "[MQTT-3.1.2-13]"),
    Invalid(
        "connect, will with a topic alias",
        connect_5(6, b"a", b"w", b"", will=properties(sample(P.TOPIC_ALIAS))),
        MalformedPacket,
        "must not occur in a will",
    ),
    Invalid(
        "connect, will with a wildcard to answer to",
        connect_5(6, b"a", b"w", b"", will=properties(b"\x08\0\1#")),
        ProtocolError,
        "[MQTT-3.3.2-14]",
        _PROTOCOL,
    ),
    # 3.3 PUBLISH
    Invalid("publish, QoS 3", publish_5(0x36, b"a", 1, NONE), MalformedPacket, "[MQTT-3.3.1-4]"),
    Invalid("publish, QoS 0, dup", publish_5(0x38, b"a", 0, NONE), MalformedPacket, "[MQTT-3.3.1-2]"),
    Invalid("publish, QoS 1, id 0", publish_5(0x32, b"a", 0, NONE), ProtocolError, "[MQTT-2.2.1-3]", _PROTOCOL),
    Invalid("publish, no property length", b"\x30\3\0\1a", MalformedPacket, "ends within its fields"),
    Invalid("publish, QoS 1, no property length", b"\x32\5\0\1a\0\1", MalformedPacket, "ends within its fields"),
    Invalid("publish, properties longer than the packet", b"\x30\5\0\1a\2x", MalformedPacket, "2 bytes of properties"),
    Invalid("publish, property length without end", b"\x30\5\0\1a\x80\x80", MalformedPacket, "property length"),
    Invalid("publish, property length of five bytes", b"\x30\x08\0\1a\xff\xff\xff\xff\x7f", MalformedPacket, "fourth byte"),
    _bad_publish("unknown property", b"\x7f", MalformedPacket, "The property 0x7f does not exist", _MALFORMED),
    _bad_publish("session expiry", sample(P.SESSION_EXPIRY_S), MalformedPacket, "must not occur in a PUBLISH", _MALFORMED),
    *(
        _bad_publish(f"{one.name.lower()} twice", sample(one, one), ProtocolError, "more than once", _PROTOCOL)
        for one in (*_MESSAGE, P.TOPIC_ALIAS)
        if one != P.USER_PROPERTY
    ),
    _bad_publish("alias 0", b"\x23\0\0", ProtocolError, "topic alias is 0", ReasonCode.TOPIC_ALIAS_INVALID),
    _bad_publish("payload format 2", b"\1\2", ProtocolError, "payload format indicator is 2", _PROTOCOL),
    _bad_publish("content type not UTF-8", b"\3\0\1\xff", MalformedPacket, "[MQTT-1.5.4-1]", _MALFORMED),
    _bad_publish("response topic not UTF-8", b"\x08\0\1\xff", MalformedPacket, "[MQTT-1.5.4-1]", _MALFORMED),
    # 3.4 to 3.7 acks
    Invalid("puback, empty", b"\x40\0", MalformedPacket, "2 bytes after its fixed header, not 0"),
    Invalid("puback, short", b"\x40\1\1", MalformedPacket, "not 1"),
    Invalid("puback, id 0", b"\x40\3\0\0\0", ProtocolError, "PUBACK has the packet id 0", _PROTOCOL),
    Invalid("puback, reason of a PUBREL", b"\x40\3\0\1\x92", ProtocolError, "reason code 0x92", _PROTOCOL),
    Invalid("pubrel, reason of a PUBACK", b"\x62\3\0\1\x10", ProtocolError, "reason code 0x10", _PROTOCOL),
    Invalid("puback, unknown reason", b"\x40\3\0\1\x7f", ProtocolError, "reason code 0x7f", _PROTOCOL),
    Invalid("puback, bytes behind the properties", b"\x40\5\0\1\0\0\0", MalformedPacket, "announces 0 bytes"),
    Invalid(
        "puback, reason string twice",
        packet(0x40, b"\0\1\0" + properties(sample(P.REASON_STRING, P.REASON_STRING))),
        ProtocolError,
        "more than once",
        _PROTOCOL,
    ),
    Invalid(
        "pubcomp, content type", packet(0x70, b"\0\1\0" + properties(sample(P.CONTENT_TYPE))), MalformedPacket, "a PUBCOMP"
    ),
    # 3.8 SUBSCRIBE, 3.10 UNSUBSCRIBE
    Invalid("subscribe, id 0", subscribe_5(0, (b"a", 0)), ProtocolError, "[MQTT-2.2.1-3]", _PROTOCOL),
    Invalid("subscribe, nothing", subscribe_5(1), ProtocolError, "[MQTT-3.8.3-2]", _PROTOCOL),
    Invalid("subscribe, QoS 3", subscribe_5(1, (b"a", 3)), ProtocolError, "QoS 3", _PROTOCOL),
    Invalid("subscribe, retain handling 3", subscribe_5(1, (b"a", 0x30)), ProtocolError, "retain handling 3", _PROTOCOL),
    Invalid("subscribe, reserved bit 6", subscribe_5(1, (b"a", 0x40)), MalformedPacket, "[MQTT-3.8.3-5]"),
    Invalid("subscribe, reserved bit 7", subscribe_5(1, (b"a", 0x80)), MalformedPacket, "[MQTT-3.8.3-5]"),
    Invalid("subscribe, shared and no local", subscribe_5(1, (b"$share/g/a", 4)), ProtocolError, "[MQTT-3.8.3-4]", _PROTOCOL),
    Invalid(
        "subscribe, identifier 0",
        subscribe_5(1, (b"a", 0), about=properties(b"\x0b\0")),
        ProtocolError,
        "identifier is 0",
        _PROTOCOL,
    ),
    Invalid(
        "subscribe, two identifiers",
        subscribe_5(1, (b"a", 0), about=properties(b"\x0b\1\x0b\2")),
        ProtocolError,
        "more than once",
        _PROTOCOL,
    ),
    Invalid("subscribe, no properties", b"\x82\2\0\1", MalformedPacket, "ends within its property length"),
    Invalid("unsubscribe, nothing", unsubscribe_5(1), ProtocolError, "[MQTT-3.10.3-2]", _PROTOCOL),
    Invalid(
        "unsubscribe, identifier",
        unsubscribe_5(1, b"a", about=properties(b"\x0b\1")),
        MalformedPacket,
        "must not occur in a UNSUBSCRIBE",
    ),
    # 3.12, 3.14
    Invalid("pingreq, body", b"\xc0\1\0", MalformedPacket, "must end after its fixed header"),
    Invalid("disconnect, unknown reason", b"\xe0\1\1", ProtocolError, "reason code 0x01", _PROTOCOL),
    Invalid("disconnect, bytes behind the properties", b"\xe0\3\0\0\0", MalformedPacket, "after its properties"),
    Invalid(
        "disconnect, server reference",
        packet(0xE0, b"\0" + properties(sample(P.SERVER_REFERENCE))),
        ProtocolError,
        "server reference",
        _PROTOCOL,
    ),
]
