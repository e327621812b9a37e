"""The properties of MQTT 5.0 (2.2.2.2): one table says of each what it holds and where it may stand.

Properties that were parsed are a dict from `Property` to value. A user property's value is the list of all pairs in their
order, a subscription identifier's the list of all identifiers; every other property comes once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias

from penstock.gateway.protocol.errors import MalformedPacket, ProtocolError
from penstock.gateway.protocol.fields import (
    U16,
    U32,
    read_binary,
    read_byte,
    read_pair,
    read_string,
    read_u16,
    read_u32,
    read_varint,
    write_binary,
    write_pair,
    write_string,
    write_varint,
)
from penstock.gateway.protocol.packets import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    NAMES,
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

WILL: Final = 16
"""Not on the wire: stands for the will properties of a CONNECT where a packet type is asked for."""


class Property(IntEnum):
    """The identifiers of properties: MQTT 5.0, Table 2-4."""

    PAYLOAD_FORMAT = 0x01
    MESSAGE_EXPIRY_S = 0x02
    CONTENT_TYPE = 0x03
    RESPONSE_TOPIC = 0x08
    CORRELATION_DATA = 0x09
    SUBSCRIPTION_IDENTIFIER = 0x0B
    SESSION_EXPIRY_S = 0x11
    ASSIGNED_CLIENT_ID = 0x12
    SERVER_KEEP_ALIVE_S = 0x13
    AUTHENTICATION_METHOD = 0x15
    AUTHENTICATION_DATA = 0x16
    REQUEST_PROBLEM_INFORMATION = 0x17
    WILL_DELAY_S = 0x18
    REQUEST_RESPONSE_INFORMATION = 0x19
    RESPONSE_INFORMATION = 0x1A
    SERVER_REFERENCE = 0x1C
    REASON_STRING = 0x1F
    RECEIVE_MAXIMUM = 0x21
    TOPIC_ALIAS_MAXIMUM = 0x22
    TOPIC_ALIAS = 0x23
    MAXIMUM_QOS = 0x24
    RETAIN_AVAILABLE = 0x25
    USER_PROPERTY = 0x26
    MAXIMUM_PACKET_SIZE = 0x27
    WILDCARD_SUBSCRIPTION_AVAILABLE = 0x28
    SUBSCRIPTION_IDENTIFIER_AVAILABLE = 0x29
    SHARED_SUBSCRIPTION_AVAILABLE = 0x2A


Found: TypeAlias = dict[Property, Any]
"""Properties that were parsed, or are to be written."""


class Type(NamedTuple):
    """What a property holds, and how it is read and written."""

    read: Callable[[bytes, int, str], tuple[Any, int]]
    write: Callable[[Any], bytes]


_BYTE = Type(read_byte, lambda value: bytes((value,)))
_U16 = Type(read_u16, U16.pack)
_U32 = Type(read_u32, U32.pack)
_VARINT = Type(read_varint, write_varint)
_STRING = Type(read_string, write_string)
_BINARY = Type(read_binary, write_binary)
_PAIR = Type(read_pair, write_pair)


class Rule(NamedTuple):
    """A row of the table."""

    name: str
    type: Type
    packets: frozenset[int]
    repeats: frozenset[int] = frozenset()
    """The packets in which it may come more than once."""
    least: int = 0
    most: int | None = None
    """Bounds of its value, beyond those of its type. Outside of them it is a protocol error."""
    reason: ReasonCode = ReasonCode.PROTOCOL_ERROR
    """What a value outside of the bounds is answered with."""


_MESSAGE: Final = frozenset((PUBLISH, WILL))
_WITH_REASON: Final = frozenset((CONNACK, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, DISCONNECT, AUTH))
_ALL: Final = _WITH_REASON | _MESSAGE | {CONNECT, SUBSCRIBE, UNSUBSCRIBE}
_CONNECT: Final = frozenset((CONNECT,))
_CONNACK: Final = frozenset((CONNACK,))
_BOTH: Final = _CONNECT | _CONNACK

RULES: Final[dict[int, Rule]] = {
    Property.PAYLOAD_FORMAT: Rule("payload format indicator", _BYTE, _MESSAGE, most=1),  # 3.3.2.3.2
    Property.MESSAGE_EXPIRY_S: Rule("message expiry interval", _U32, _MESSAGE),
    Property.CONTENT_TYPE: Rule("content type", _STRING, _MESSAGE),  # [MQTT-3.3.2-19]
    Property.RESPONSE_TOPIC: Rule("response topic", _STRING, _MESSAGE),  # [MQTT-3.3.2-13]
    Property.CORRELATION_DATA: Rule("correlation data", _BINARY, _MESSAGE),
    Property.SUBSCRIPTION_IDENTIFIER: Rule(
        "subscription identifier", _VARINT, frozenset((PUBLISH, SUBSCRIBE)), frozenset((PUBLISH,)), least=1
    ),  # 3.8.2.1.2
    Property.SESSION_EXPIRY_S: Rule("session expiry interval", _U32, _BOTH | {DISCONNECT}),
    Property.ASSIGNED_CLIENT_ID: Rule("assigned client identifier", _STRING, _CONNACK),
    Property.SERVER_KEEP_ALIVE_S: Rule("server keep alive", _U16, _CONNACK),
    Property.AUTHENTICATION_METHOD: Rule("authentication method", _STRING, _BOTH | {AUTH}),
    Property.AUTHENTICATION_DATA: Rule("authentication data", _BINARY, _BOTH | {AUTH}),
    Property.REQUEST_PROBLEM_INFORMATION: Rule("request problem information", _BYTE, _CONNECT, most=1),  # 3.1.2.11.7
    Property.WILL_DELAY_S: Rule("will delay interval", _U32, frozenset((WILL,))),
    Property.REQUEST_RESPONSE_INFORMATION: Rule("request response information", _BYTE, _CONNECT, most=1),  # 3.1.2.11.6
    Property.RESPONSE_INFORMATION: Rule("response information", _STRING, _CONNACK),
    Property.SERVER_REFERENCE: Rule("server reference", _STRING, _CONNACK | {DISCONNECT}),
    Property.REASON_STRING: Rule("reason string", _STRING, _WITH_REASON),
    Property.RECEIVE_MAXIMUM: Rule("receive maximum", _U16, _BOTH, least=1),  # 3.1.2.11.3
    Property.TOPIC_ALIAS_MAXIMUM: Rule("topic alias maximum", _U16, _BOTH),
    Property.TOPIC_ALIAS: Rule(
        "topic alias", _U16, frozenset((PUBLISH,)), least=1, reason=ReasonCode.TOPIC_ALIAS_INVALID
    ),  # [MQTT-3.3.2-8]
    Property.MAXIMUM_QOS: Rule("maximum QoS", _BYTE, _CONNACK, most=1),
    Property.RETAIN_AVAILABLE: Rule("retain available", _BYTE, _CONNACK, most=1),
    Property.USER_PROPERTY: Rule("user property", _PAIR, _ALL, _ALL),
    Property.MAXIMUM_PACKET_SIZE: Rule("maximum packet size", _U32, _BOTH, least=1),  # 3.1.2.11.4
    Property.WILDCARD_SUBSCRIPTION_AVAILABLE: Rule("wildcard subscription available", _BYTE, _CONNACK, most=1),
    Property.SUBSCRIPTION_IDENTIFIER_AVAILABLE: Rule("subscription identifier available", _BYTE, _CONNACK, most=1),
    Property.SHARED_SUBSCRIPTION_AVAILABLE: Rule("shared subscription available", _BYTE, _CONNACK, most=1),
}
"""What holds for each property: MQTT 5.0, Table 2-4, and the section on each."""

_LISTED: Final = frozenset((Property.USER_PROPERTY, Property.SUBSCRIPTION_IDENTIFIER))


def read_properties(body: bytes, at: int, packet: int) -> tuple[Found, int]:
    """Read a property length and the properties behind it; return them and the offset behind them.

    Args:
        body: of a packet.
        at: where the property length stands.
        packet: the packet's type, or `WILL`.

    Raises:
        MalformedPacket: a property is unknown, doesn't belong into that packet, or is cut short (2.2.2.2).
        ProtocolError: a property comes twice, or has a value that is not allowed.
    """
    length, at = read_varint(body, at, "property length")  # 2.2.2.1
    stop = at + length
    if stop > len(body):
        raise MalformedPacket(f"{length} bytes of properties are announced, {len(body) - at} are left")
    return parse_properties(body[at:stop], packet), stop


def parse_properties(raw: bytes, packet: int) -> Found:
    """Return the properties in `raw`, which has nothing else. As `read_properties`."""
    found: Found = {}
    at, end = 0, len(raw)
    while at < end:
        identifier, at = read_varint(raw, at, "property identifier")
        rule = RULES.get(identifier)
        if rule is None:
            raise MalformedPacket(f"there is no property {identifier:#04x} (2.2.2.2)")
        if packet not in rule.packets:
            where = "a will" if packet == WILL else f"a {NAMES[packet]}"
            raise MalformedPacket(f"the {rule.name} doesn't belong into {where} (2.2.2.2)")
        value, at = rule.type.read(raw, at, rule.name)
        property = Property(identifier)
        if property in found and packet not in rule.repeats:
            raise ProtocolError(f"the {rule.name} comes more than once (2.2.2.2)")
        if (rule.least and value < rule.least) or (rule.most is not None and value > rule.most):
            bounds = f"{rule.least} or more" if rule.most is None else f"{rule.least} to {rule.most}"
            raise ProtocolError(f"the {rule.name} is {value}; use {bounds}", rule.reason)
        if property in _LISTED:
            found.setdefault(property, []).append(value)
        else:
            found[property] = value
    return found


def write_properties(properties: Mapping[Property, Any]) -> bytes:
    """Return a property length and the properties, in the order of the mapping."""
    parts: list[bytes] = []
    for property, value in properties.items():
        write = RULES[property].type.write
        for one in value if property in _LISTED else (value,):
            parts += (bytes((property,)), write(one))
    raw = b"".join(parts)
    return write_varint(len(raw)) + raw
