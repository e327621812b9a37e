"""CONNECT: what a client asks for when it connects, and its will (MQTT 5.0, 3.1).

Clauses in brackets are those of MQTT 5.0. Where MQTT 3.1.1 has the same rule under another number, that number follows as
3.1.1:[...].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from penstock.gateway.protocol.errors import ConnectRefused, MalformedPacket, MalformedTopic, ProtocolError, UnsupportedVersion
from penstock.gateway.protocol.fields import REMAINING_BYTES_MAX, read_binary, read_byte, read_string, read_u16
from penstock.gateway.protocol.fixed_header import long_length
from penstock.gateway.protocol.packets import CONNECT, NEVER_S, RECEIVE_MAXIMUM, V3_1, V3_1_1, V5_0, WILL
from penstock.gateway.protocol.properties import Property, PropertyValues, read_properties
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode
from penstock.gateway.protocol.topics import is_bridge_state
from penstock.store.errors import TopicInvalid
from penstock.store.record import TOPIC_BYTES_MAX
from penstock.store.topics import LEVELS_MAX, check_topic, excerpt

CLIENT_ID_BYTES_MAX: Final = 1024
"""Default bound of a client id, in bytes of UTF-8. A server must accept 23 bytes [MQTT-3.1.3-5]; it may accept more."""

_PROPERTIES_AT: Final = 10
"""The offset of the properties in the body of a CONNECT of MQTT 5.0: after protocol name, level, flags and keep alive."""

_PROTOCOLS: Final = {(b"MQIsdp", V3_1), (b"MQTT", V3_1_1), (b"MQTT", V5_0)}


@dataclass(frozen=True, slots=True)
class Will:
    """The message that the server publishes for a client when its connection ends without a DISCONNECT.

    Parameters:
        topic: a valid topic name.
        body: the message.
        qos: 0, 1 or 2.
        retain: whether the message is retained.
        delay_s: how long the server waits for the client to return before it publishes the message, in seconds.
        properties: the properties of MQTT 5.0 that belong to the message.
    """

    topic: str
    body: bytes
    qos: int
    retain: bool
    delay_s: int = 0
    properties: PropertyValues = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Connect:
    """A valid CONNECT. What only MQTT 5.0 can state has its default in the other versions.

    Parameters:
        level: the protocol level, `V3_1`, `V3_1_1` or `V5_0`.
        client_id: the client id; empty if the server has to assign one.
        clean_start: whether an old session is discarded. In MQTT 3.1.1 this is clean session.
        keep_alive_s: the keep alive in seconds; 0 means none.
        will: the will, or None. That of a bridge on its state (`is_bridge_state`) is None.
        username: the user name, or None.
        password: the password, or None.
        session_expiry_s: how long the session lasts after the connection, in seconds. In MQTT 3.1.1 it follows from clean
            session: 0 or `NEVER_S`.
        receive_max: the number of messages at QoS 1 and 2 that the client accepts before it acknowledges one.
        packet_bytes_max: the size of the largest packet that the client accepts, or None.
        topic_alias_max: the greatest topic alias that the client accepts.
        wants_response_information: whether the CONNACK may have response information.
        wants_problem_information: whether packets other than PUBLISH, CONNACK and DISCONNECT may have a reason string.
        user_properties: the user properties in their order.
        size: the bytes of the packet after its fixed header.
    """

    level: int
    client_id: str
    clean_start: bool
    keep_alive_s: int
    will: Will | None
    username: str | None
    password: bytes | None
    session_expiry_s: int = 0
    receive_max: int = RECEIVE_MAXIMUM
    packet_bytes_max: int | None = None
    topic_alias_max: int = 0
    wants_response_information: bool = False
    wants_problem_information: bool = True
    user_properties: list[tuple[str, str]] = field(default_factory=list)
    size: int = field(default=0, compare=False)


def protocol_level(body: bytes) -> int:
    """Return the protocol level that a CONNECT asks for: `V3_1`, `V3_1_1` or `V5_0`.

    Raises:
        UnsupportedVersion: the level isn't served; answer with `encode_refusal`, then close.
        MalformedPacket: the body is no CONNECT of any version; close without an answer.
    """
    name, at = read_binary(body, 0, "protocol name")
    level, at = read_byte(body, at, "protocol level")
    if (name, level) in _PROTOCOLS:
        return level
    if name not in (b"MQTT", b"MQIsdp"):
        raise MalformedPacket(f"A CONNECT has the protocol name {excerpt(name, 16)}. It must be 'MQTT' [MQTT-3.1.2-1].")
    # [MQTT-3.1.2-2]. Bridges of mosquitto set bit 7 of the level and expect an answer in the format of that level.
    is_v5 = name == b"MQTT" and level & 0x7F >= V5_0
    raise UnsupportedVersion(f"The client asks for protocol level {level}. Use 4, MQTT 3.1.1, or 5, MQTT 5.0.", is_v5=is_v5)


def level_of_too_large(data: bytes) -> int:
    """Return the protocol level of a CONNECT that is larger than allowed, from its first bytes; 0 if they don't tell.

    Args:
        data: what has come of the packet, fixed header included.
    """
    start, _ = long_length(data, 0, len(data))
    try:
        return protocol_level(data[start : start + _PROPERTIES_AT]) if start and data[0] == CONNECT << 4 else 0
    except ProtocolError:
        return 0


def parse_connect(
    body: bytes,
    *,
    client_id_bytes_max: int = CLIENT_ID_BYTES_MAX,
    topic_levels_max: int = LEVELS_MAX,
    topic_bytes_max: int = TOPIC_BYTES_MAX,
    user_properties_max: int = REMAINING_BYTES_MAX,
) -> Connect:
    """Parse the body of a CONNECT.

    Args:
        body: the packet without its fixed header.
        client_id_bytes_max: the longest client id accepted, in bytes of UTF-8, at least 23.
        topic_levels_max: the most levels of the will topic, at least 1.
        topic_bytes_max: the most bytes of the will topic, 1 to 65,535.
        user_properties_max: the most user properties of the CONNECT, and of its will.

    Raises:
        UnsupportedVersion, ConnectRefused: answer with `encode_refusal`, then close.
        ProtocolError: any other error; close, in MQTT 3.1.1 without an answer 3.1.1:[MQTT-3.1.4-1].
    """
    level = protocol_level(body)
    is_v5 = level == V5_0
    at = 2 + len(b"MQTT" if level != V3_1 else b"MQIsdp") + 1
    flags, at = read_byte(body, at, "connect flags")
    _check_connect_flags(flags, is_v5)
    keep_alive_s, at = read_u16(body, at, "keep alive")
    values: PropertyValues = {}
    if is_v5:
        values, at = read_properties(body, at, CONNECT, user_properties_max)
        _check_authentication(values)
    client_id, at = read_string(body, at, "client id")  # [MQTT-3.1.3-3], [MQTT-3.1.3-4]
    will: Will | None = None
    if flags & 0x04:  # [MQTT-3.1.2-7] 3.1.1:[MQTT-3.1.2-9]
        will_values: PropertyValues = {}
        if is_v5:
            will_values, at = read_properties(body, at, WILL, user_properties_max)
        topic, at = read_binary(body, at, "will topic")
        message, at = read_binary(body, at, "will message")
        name = _will_topic(topic, topic_levels_max, topic_bytes_max)
        delay_s: int = will_values.pop(Property.WILL_DELAY_S, 0)
        if not is_bridge_state(topic):
            will = Will(name, message, flags >> 3 & 3, bool(flags & 0x20), delay_s, will_values)
    username: str | None = None
    password: bytes | None = None
    if flags & 0x80:  # [MQTT-3.1.2-17] 3.1.1:[MQTT-3.1.2-19]
        username, at = read_string(body, at, "user name")  # [MQTT-3.1.3-12] 3.1.1:[MQTT-3.1.3-11]
    if flags & 0x40:  # [MQTT-3.1.2-19] 3.1.1:[MQTT-3.1.2-21]
        password, at = read_binary(body, at, "password")
    if at != len(body):  # [MQTT-3.1.2-16], [MQTT-3.1.2-18]: the flags announce every field there is.
        raise MalformedPacket(f"A CONNECT has {len(body) - at} bytes after its last field.")
    clean_start = bool(flags & 0x02)
    _check_client_id(client_id, clean_start, level, client_id_bytes_max)
    return Connect(
        level,
        client_id,
        clean_start,
        keep_alive_s,
        will,
        username,
        password,
        values.get(Property.SESSION_EXPIRY_S, 0) if is_v5 or clean_start else NEVER_S,
        values.get(Property.RECEIVE_MAXIMUM, RECEIVE_MAXIMUM),
        values.get(Property.MAXIMUM_PACKET_SIZE),
        values.get(Property.TOPIC_ALIAS_MAXIMUM, 0),
        bool(values.get(Property.REQUEST_RESPONSE_INFORMATION, 0)),
        bool(values.get(Property.REQUEST_PROBLEM_INFORMATION, 1)),
        values.get(Property.USER_PROPERTY, []),
        len(body),
    )


def stated_packet_bytes_max(body: bytes, user_properties_max: int) -> int | None:
    """Return the size of the largest packet that a client of MQTT 5.0 accepts, from the body of its CONNECT.

    The answer to a refused CONNECT must not exceed this size either. None means that the body doesn't tell.
    """
    try:
        values, _ = read_properties(body, _PROPERTIES_AT, CONNECT, user_properties_max)
    except ProtocolError:  # The properties may be the reason for which the CONNECT is refused.
        return None
    most: int | None = values.get(Property.MAXIMUM_PACKET_SIZE)
    return most


def _check_connect_flags(flags: int, is_v5: bool) -> None:
    if flags & 0x01:
        raise MalformedPacket("A CONNECT has its reserved flag set [MQTT-3.1.2-3].")
    will_qos = flags >> 3 & 3
    if flags & 0x04:
        if will_qos == 3:
            raise MalformedPacket("A CONNECT has a will at QoS 3. Use 0, 1 or 2 [MQTT-3.1.2-12] 3.1.1:[MQTT-3.1.2-14].")
    elif will_qos:
        raise MalformedPacket(f"A CONNECT without a will has the will QoS {will_qos} [MQTT-3.1.2-11] 3.1.1:[MQTT-3.1.2-13].")
    elif flags & 0x20:
        raise MalformedPacket("A CONNECT without a will has will retain set [MQTT-3.1.2-13] 3.1.1:[MQTT-3.1.2-15].")
    if flags & 0xC0 == 0x40 and not is_v5:  # MQTT 5.0 allows this (3.1.2.9).
        raise MalformedPacket("A CONNECT has a password without a user name 3.1.1:[MQTT-3.1.2-22].")


def _check_authentication(values: PropertyValues) -> None:
    if Property.AUTHENTICATION_METHOD in values:
        method = values[Property.AUTHENTICATION_METHOD]
        raise ConnectRefused(
            f"The authentication method {method[:64]!r} is not served. Use a user name and a password (4.12).",
            ConnectCode.NOT_AUTHORIZED,
            ReasonCode.BAD_AUTHENTICATION_METHOD,
        )
    if Property.AUTHENTICATION_DATA in values:
        raise ProtocolError("A CONNECT has authentication data without a method (3.1.2.11.10).")


def _check_client_id(client_id: str, clean_start: bool, level: int, bytes_max: int) -> None:
    if not client_id and level != V5_0 and not (clean_start and level == V3_1_1):  # 3.1.1:[MQTT-3.1.3-7]
        raise ConnectRefused(
            "The client id is empty, and clean session is 0 or the version is 3.1. Name the client, or set clean session "
            "3.1.1:[MQTT-3.1.3-8].",
            ConnectCode.IDENTIFIER_REJECTED,
        )
    size = len(client_id.encode())
    if size > bytes_max:  # [MQTT-3.1.3-8] 3.1.1:[MQTT-3.1.3-9]
        raise ConnectRefused(f"The client id has {size} bytes. Use {bytes_max} at most.", ConnectCode.IDENTIFIER_REJECTED)


def _will_topic(raw: bytes, levels_max: int, bytes_max: int) -> str:
    try:
        return check_topic(raw, levels_max=levels_max, bytes_max=bytes_max)  # [MQTT-3.1.3-11] 3.1.1:[MQTT-3.1.3-10]
    except TopicInvalid as error:
        raise MalformedTopic(str(error), ReasonCode.TOPIC_NAME_INVALID) from error
