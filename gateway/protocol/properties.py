"""The properties of MQTT 5.0 (2.2.2.2). One table states the type of each and the packets in which it may occur.

Parsed properties are a dict from `Property` to value. The value of the user property is the list of all pairs in their order,
the value of the subscription identifier the list of all identifiers. Every other property occurs once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias

from penstock.gateway.protocol.errors import MalformedPacket, ProtocolError, TooManyFields
from penstock.gateway.protocol.fields import (
    REMAINING_BYTES_MAX,
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
    WILL,
)
from penstock.gateway.protocol.reasons import ReasonCode


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


PropertyValues: TypeAlias = dict[Property, Any]
"""The properties of one packet or will, with their values."""


class PropertyType(NamedTuple):
    """How the value of a property is read and written."""

    read: Callable[[bytes, int, str], tuple[Any, int]]
    write: Callable[[Any], bytes]


_BYTE = PropertyType(read_byte, lambda value: bytes((value,)))
_U16 = PropertyType(read_u16, U16.pack)
_U32 = PropertyType(read_u32, U32.pack)
_VARINT = PropertyType(read_varint, write_varint)
_STRING = PropertyType(read_string, write_string)
_BINARY = PropertyType(read_binary, write_binary)
_PAIR = PropertyType(read_pair, write_pair)


class PropertyRule(NamedTuple):
    """One row of the table."""

    name: str
    type: PropertyType
    packets: frozenset[int]
    repeats: frozenset[int] = frozenset()
    """The packets in which the property may occur more than once."""
    least: int = 0
    most: int | None = None
    """The bounds of the value, inclusive. None stands for the bound of the type. A value outside is a protocol error."""
    reason: ReasonCode = ReasonCode.PROTOCOL_ERROR
    """The answer to a value outside of the bounds."""


_MESSAGE: Final = frozenset((PUBLISH, WILL))
_WITH_REASON: Final = frozenset((CONNACK, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, DISCONNECT, AUTH))
_ALL: Final = _WITH_REASON | _MESSAGE | {CONNECT, SUBSCRIBE, UNSUBSCRIBE}
_CONNECT: Final = frozenset((CONNECT,))
_CONNACK: Final = frozenset((CONNACK,))
_BOTH: Final = _CONNECT | _CONNACK

RULES: Final[dict[int, PropertyRule]] = {
    Property.PAYLOAD_FORMAT: PropertyRule("payload format indicator", _BYTE, _MESSAGE, most=1),  # 3.3.2.3.2
    Property.MESSAGE_EXPIRY_S: PropertyRule("message expiry interval", _U32, _MESSAGE),
    Property.CONTENT_TYPE: PropertyRule("content type", _STRING, _MESSAGE),  # [MQTT-3.3.2-19]
    Property.RESPONSE_TOPIC: PropertyRule("response topic", _STRING, _MESSAGE),  # [MQTT-3.3.2-13]
    Property.CORRELATION_DATA: PropertyRule("correlation data", _BINARY, _MESSAGE),
    Property.SUBSCRIPTION_IDENTIFIER: PropertyRule(
        "subscription identifier", _VARINT, frozenset((PUBLISH, SUBSCRIBE)), frozenset((PUBLISH,)), least=1
    ),  # 3.8.2.1.2
    Property.SESSION_EXPIRY_S: PropertyRule("session expiry interval", _U32, _BOTH | {DISCONNECT}),
    Property.ASSIGNED_CLIENT_ID: PropertyRule("assigned client identifier", _STRING, _CONNACK),
    Property.SERVER_KEEP_ALIVE_S: PropertyRule("server keep alive", _U16, _CONNACK),
    Property.AUTHENTICATION_METHOD: PropertyRule("authentication method", _STRING, _BOTH | {AUTH}),
    Property.AUTHENTICATION_DATA: PropertyRule("authentication data", _BINARY, _BOTH | {AUTH}),
    Property.REQUEST_PROBLEM_INFORMATION: PropertyRule("request problem information", _BYTE, _CONNECT, most=1),  # 3.1.2.11.7
    Property.WILL_DELAY_S: PropertyRule("will delay interval", _U32, frozenset((WILL,))),
    Property.REQUEST_RESPONSE_INFORMATION: PropertyRule("request response information", _BYTE, _CONNECT, most=1),  # 3.1.2.11.6
    Property.RESPONSE_INFORMATION: PropertyRule("response information", _STRING, _CONNACK),
    Property.SERVER_REFERENCE: PropertyRule("server reference", _STRING, _CONNACK | {DISCONNECT}),
    Property.REASON_STRING: PropertyRule("reason string", _STRING, _WITH_REASON),
    Property.RECEIVE_MAXIMUM: PropertyRule("receive maximum", _U16, _BOTH, least=1),  # 3.1.2.11.3
    Property.TOPIC_ALIAS_MAXIMUM: PropertyRule("topic alias maximum", _U16, _BOTH),
    Property.TOPIC_ALIAS: PropertyRule(
        "topic alias", _U16, frozenset((PUBLISH,)), least=1, reason=ReasonCode.TOPIC_ALIAS_INVALID
    ),  # [MQTT-3.3.2-8]
    Property.MAXIMUM_QOS: PropertyRule("maximum QoS", _BYTE, _CONNACK, most=1),
    Property.RETAIN_AVAILABLE: PropertyRule("retain available", _BYTE, _CONNACK, most=1),
    Property.USER_PROPERTY: PropertyRule("user property", _PAIR, _ALL, _ALL),
    Property.MAXIMUM_PACKET_SIZE: PropertyRule("maximum packet size", _U32, _BOTH, least=1),  # 3.1.2.11.4
    Property.WILDCARD_SUBSCRIPTION_AVAILABLE: PropertyRule("wildcard subscription available", _BYTE, _CONNACK, most=1),
    Property.SUBSCRIPTION_IDENTIFIER_AVAILABLE: PropertyRule("subscription identifier available", _BYTE, _CONNACK, most=1),
    Property.SHARED_SUBSCRIPTION_AVAILABLE: PropertyRule("shared subscription available", _BYTE, _CONNACK, most=1),
}
"""The rule for each property: MQTT 5.0, Table 2-4, and the section on each property."""

_LISTED: Final = frozenset((Property.USER_PROPERTY, Property.SUBSCRIPTION_IDENTIFIER))


def read_properties(
    body: bytes, at: int, packet: int, user_properties_max: int = REMAINING_BYTES_MAX
) -> tuple[PropertyValues, int]:
    """Read a property length and the properties after it. Return the properties and the offset after them.

    Args:
        body: the body of a packet.
        at: the offset of the property length.
        packet: the type of the packet, or `WILL`.
        user_properties_max: see `GatewayOptions.user_properties_max`.

    Raises:
        MalformedPacket: a property is unknown, must not occur in that packet, or is cut short (2.2.2.2).
        ProtocolError: a property occurs twice, or has a value that is not allowed.
        TooManyFields: there are more user properties.
    """
    length, at = read_varint(body, at, "property length")  # 2.2.2.1
    stop = at + length
    if stop > len(body):
        raise MalformedPacket(f"A packet announces {length} bytes of properties, but {len(body) - at} bytes are left.")
    return parse_properties(body[at:stop], packet, user_properties_max), stop


def parse_properties(raw: bytes, packet: int, user_properties_max: int = REMAINING_BYTES_MAX) -> PropertyValues:
    """Return the properties in `raw`, which must hold nothing else. It raises the same errors as `read_properties`."""
    values: PropertyValues = {}
    at, end = 0, len(raw)
    while at < end:
        identifier, at = read_varint(raw, at, "property identifier")
        rule = RULES.get(identifier)
        if rule is None:
            raise MalformedPacket(f"The property {identifier:#04x} does not exist (2.2.2.2).")
        if packet not in rule.packets:
            raise MalformedPacket(f"The {rule.name} must not occur in a {_name(packet)} (2.2.2.2).")
        value, at = rule.type.read(raw, at, rule.name)
        property = Property(identifier)
        if property in values and packet not in rule.repeats:
            raise ProtocolError(f"The {rule.name} occurs more than once (2.2.2.2).")
        if (rule.least and value < rule.least) or (rule.most is not None and value > rule.most):
            bounds = f"{rule.least} or more" if rule.most is None else f"{rule.least} to {rule.most}"
            raise ProtocolError(f"The {rule.name} is {value}. Use {bounds}.", rule.reason)
        if property in _LISTED:
            listed = values.setdefault(property, [])
            listed.append(value)
            if len(listed) > user_properties_max:
                what = "user properties" if property == Property.USER_PROPERTY else "subscription identifiers"
                raise TooManyFields(_name(packet), user_properties_max, what)
        else:
            values[property] = value
    topic = values.get(Property.RESPONSE_TOPIC)
    if topic is not None and (not topic or "+" in topic or "#" in topic):
        raise ProtocolError(f"The response topic {topic[:64]!r} is empty or has a wildcard [MQTT-3.3.2-14].")
    return values


def _name(packet: int) -> str:
    return "will" if packet == WILL else NAMES[packet]


def write_properties(properties: Mapping[Property, Any]) -> bytes:
    """Return a property length and the properties in the order of the mapping."""
    parts: list[bytes] = []
    for property, value in properties.items():
        write = RULES[property].type.write
        for one in value if property in _LISTED else (value,):
            parts += (bytes((property,)), write(one))
    raw = b"".join(parts)
    return write_varint(len(raw)) + raw
