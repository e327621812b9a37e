"""Parsers of the packets off the hot path, from the bodies that `gateway.protocol.codec.decode` cuts out.

Clauses in brackets are those of MQTT 5.0; where MQTT 3.1.1 has one of another number, it stands behind it as 3.1.1:[...].
"""

from __future__ import annotations

from typing import Final

from penstock.gateway.protocol.errors import ConnectRefused, InvalidTopic, MalformedPacket, ProtocolError, UnsupportedVersion
from penstock.gateway.protocol.fields import read_binary, read_byte, read_string, read_u16
from penstock.gateway.protocol.packets import (
    CONNECT,
    DISCONNECT,
    NAMES,
    NEVER_S,
    NO_LOCAL,
    RECEIVE_MAXIMUM,
    SUBSCRIBE,
    UNSUBSCRIBE,
    V3_1,
    V3_1_1,
    V5_0,
    Connect,
    Disconnect,
    Subscribe,
    Unsubscribe,
    Will,
)
from penstock.gateway.protocol.properties import WILL, Found, Property, read_properties
from penstock.gateway.protocol.reasons import REASONS, ConnectCode, ReasonCode
from penstock.store.errors import TopicInvalid
from penstock.store.record import TOPIC_BYTES_MAX
from penstock.store.topics import LEVELS_MAX, check_filter, check_topic

CLIENT_ID_BYTES_MAX: Final = 1024
"""Default bound of a client id in bytes of UTF-8. A server must take 23 [MQTT-3.1.3-5]; it may take more."""

SHARE: Final = "$share/"

_PROPERTIES_AT: Final = 10
"""Where the properties of a CONNECT begin: behind the protocol's name and level, the flags and the keep alive."""

_PROTOCOLS: Final = {(b"MQIsdp", V3_1), (b"MQTT", V3_1_1), (b"MQTT", V5_0)}


def protocol_level(body: bytes) -> int:
    """Return the protocol level that the body of a CONNECT asks for: `V3_1`, `V3_1_1` or `V5_0`.

    Raises:
        UnsupportedVersion: it isn't served; answer with `encode_refusal`, then close.
        MalformedPacket: that is no CONNECT of any version; close without an answer.
    """
    name, at = read_binary(body, 0, "protocol name")
    level, at = read_byte(body, at, "protocol level")
    if (name, level) in _PROTOCOLS:
        return level
    if name not in (b"MQTT", b"MQIsdp"):
        raise MalformedPacket(f"a CONNECT has the protocol name {name[:16]!r}, not b'MQTT' [MQTT-3.1.2-1]")
    # [MQTT-3.1.2-2]; mosquitto's bridges set bit 7 on the level, and expect an answer in its format.
    is_v5 = name == b"MQTT" and level & 0x7F >= V5_0
    raise UnsupportedVersion(f"the client asks for protocol level {level}; use 4, MQTT 3.1.1, or 5, MQTT 5.0", is_v5=is_v5)


def parse_connect(
    body: bytes,
    *,
    client_id_bytes_max: int = CLIENT_ID_BYTES_MAX,
    topic_levels_max: int = LEVELS_MAX,
    topic_bytes_max: int = TOPIC_BYTES_MAX,
) -> Connect:
    """Parse the body of a CONNECT.

    Args:
        body: what follows the fixed header.
        client_id_bytes_max: the longest client id taken, in bytes of UTF-8, at least 23.
        topic_levels_max: the most levels of the will's topic, at least 1.
        topic_bytes_max: the most bytes of the will's topic, 1 to 65,535.

    Raises:
        UnsupportedVersion, ConnectRefused: answer with `encode_refusal`, then close.
        ProtocolError: any other; close, in MQTT 3.1.1 without an answer 3.1.1:[MQTT-3.1.4-1].
    """
    level = protocol_level(body)
    is_v5 = level == V5_0
    at = 2 + len(b"MQTT" if level != V3_1 else b"MQIsdp") + 1
    flags, at = read_byte(body, at, "connect flags")
    _check_connect_flags(flags, is_v5)
    keep_alive_s, at = read_u16(body, at, "keep alive")
    found: Found = {}
    if is_v5:
        found, at = read_properties(body, at, CONNECT)
        _check_authentication(found)
    client_id, at = read_string(body, at, "client id")  # [MQTT-3.1.3-3], [MQTT-3.1.3-4]
    will: Will | None = None
    if flags & 0x04:  # [MQTT-3.1.2-7] 3.1.1:[MQTT-3.1.2-9]
        about: Found = {}
        if is_v5:
            about, at = read_properties(body, at, WILL)
            check_response_topic(about)
        topic, at = read_binary(body, at, "will topic")
        message, at = read_binary(body, at, "will message")
        name = _topic(topic, topic_levels_max, topic_bytes_max)
        delay_s: int = about.pop(Property.WILL_DELAY_S, 0)
        will = Will(name, message, flags >> 3 & 3, bool(flags & 0x20), delay_s, about)
    username: str | None = None
    password: bytes | None = None
    if flags & 0x80:  # [MQTT-3.1.2-17] 3.1.1:[MQTT-3.1.2-19]
        username, at = read_string(body, at, "user name")  # [MQTT-3.1.3-12] 3.1.1:[MQTT-3.1.3-11]
    if flags & 0x40:  # [MQTT-3.1.2-19] 3.1.1:[MQTT-3.1.2-21]
        password, at = read_binary(body, at, "password")
    if at != len(body):  # [MQTT-3.1.2-16], [MQTT-3.1.2-18]: nothing that the flags don't announce
        raise MalformedPacket(f"a CONNECT has {len(body) - at} bytes behind its last field")
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
        found.get(Property.SESSION_EXPIRY_S, 0) if is_v5 or clean_start else NEVER_S,
        found.get(Property.RECEIVE_MAXIMUM, RECEIVE_MAXIMUM),
        found.get(Property.MAXIMUM_PACKET_SIZE),
        found.get(Property.TOPIC_ALIAS_MAXIMUM, 0),
        bool(found.get(Property.REQUEST_RESPONSE_INFORMATION, 0)),
        bool(found.get(Property.REQUEST_PROBLEM_INFORMATION, 1)),
        found.get(Property.USER_PROPERTY, []),
    )


def stated_packet_bytes_max(body: bytes) -> int | None:
    """Return the largest packet that a client of MQTT 5.0 takes, from the body of a CONNECT; None where that can't be told.

    For the answer to one that is refused, which has to keep to that, too.
    """
    try:
        found, _ = read_properties(body, _PROPERTIES_AT, CONNECT)
    except ProtocolError:  # it may be what the CONNECT is refused for
        return None
    most: int | None = found.get(Property.MAXIMUM_PACKET_SIZE)
    return most


def _check_connect_flags(flags: int, is_v5: bool) -> None:
    if flags & 0x01:
        raise MalformedPacket("a CONNECT has its reserved flag set [MQTT-3.1.2-3]")
    will_qos = flags >> 3 & 3
    if flags & 0x04:
        if will_qos == 3:
            raise MalformedPacket("a CONNECT has a will at QoS 3; use 0, 1 or 2 [MQTT-3.1.2-12] 3.1.1:[MQTT-3.1.2-14]")
    elif will_qos:
        raise MalformedPacket(f"a CONNECT without a will has the will QoS {will_qos} [MQTT-3.1.2-11] 3.1.1:[MQTT-3.1.2-13]")
    elif flags & 0x20:
        raise MalformedPacket("a CONNECT without a will has will retain set [MQTT-3.1.2-13] 3.1.1:[MQTT-3.1.2-15]")
    if flags & 0xC0 == 0x40 and not is_v5:  # MQTT 5.0 allows that (3.1.2.9)
        raise MalformedPacket("a CONNECT has a password without a user name 3.1.1:[MQTT-3.1.2-22]")


def _check_authentication(found: Found) -> None:
    if Property.AUTHENTICATION_METHOD in found:
        method = found[Property.AUTHENTICATION_METHOD]
        raise ConnectRefused(
            f"the authentication method {method[:64]!r} is not served; use a user name and a password (4.12)",
            ConnectCode.NOT_AUTHORIZED,
            ReasonCode.BAD_AUTHENTICATION_METHOD,
        )
    if Property.AUTHENTICATION_DATA in found:
        raise ProtocolError("a CONNECT has authentication data without a method (3.1.2.11.10)")


def _check_client_id(client_id: str, clean_start: bool, level: int, bytes_max: int) -> None:
    if not client_id and level != V5_0 and not (clean_start and level == V3_1_1):  # 3.1.1:[MQTT-3.1.3-7]
        raise ConnectRefused(
            "the client id is empty and clean session is 0, or the version is 3.1; name the client, or set clean session "
            "3.1.1:[MQTT-3.1.3-8]",
            ConnectCode.IDENTIFIER_REJECTED,
        )
    size = len(client_id.encode())
    if size > bytes_max:  # [MQTT-3.1.3-8] 3.1.1:[MQTT-3.1.3-9]
        raise ConnectRefused(f"the client id has {size} bytes; use {bytes_max} at most", ConnectCode.IDENTIFIER_REJECTED)


def check_response_topic(found: Found) -> None:
    """Raise ProtocolError where a response topic is none that one can publish to [MQTT-3.3.2-14]."""
    topic = found.get(Property.RESPONSE_TOPIC)
    if topic is not None and (not topic or "+" in topic or "#" in topic):
        raise ProtocolError(f"the response topic {topic[:64]!r} is empty or has a wildcard [MQTT-3.3.2-14]")


def parse_subscribe(body: bytes, *, is_v5: bool = False) -> Subscribe:
    """Parse the body of a SUBSCRIBE. It holds as many filters as fit into a packet.

    How deep a filter may be is a limit of the server's, not of the protocol's: whoever subscribes checks it, and refuses that
    filter in the SUBACK.

    Raises:
        ProtocolError: the connection has to close.
    """
    packet_id, at = _packet_id(body, SUBSCRIBE)
    found: Found = {}
    if is_v5:
        found, at = read_properties(body, at, SUBSCRIBE)
    filters: list[tuple[str, int]] = []
    end = len(body)
    while at < end:
        filter, at = _filter(body, at)  # [MQTT-3.8.3-1]
        options, at = read_byte(body, at, "subscription options")
        _check_options(filter, options, is_v5)
        filters.append((filter, options))
    if not filters:
        raise ProtocolError("a SUBSCRIBE has no topic filter; send at least one [MQTT-3.8.3-2] 3.1.1:[MQTT-3.8.3-3]")
    return Subscribe(packet_id, filters, found.get(Property.SUBSCRIPTION_IDENTIFIER, [0])[0])


def _check_options(filter: str, options: int, is_v5: bool) -> None:
    if options > (0x3F if is_v5 else 2):
        raise MalformedPacket(
            f"a SUBSCRIBE has the options {options:#04x}, of which reserved bits are set [MQTT-3.8.3-5] 3.1.1:[MQTT-3-8.3-4]"
        )
    if options & 3 == 3:
        raise ProtocolError("a SUBSCRIBE asks for QoS 3; use 0, 1 or 2 (3.8.3.1)")
    if options >> 4 == 3:
        raise ProtocolError("a SUBSCRIBE asks for retain handling 3; use 0, 1 or 2 (3.8.3.1)")
    if options & NO_LOCAL and filter.startswith(SHARE):
        raise ProtocolError("a shared subscription asks for no local [MQTT-3.8.3-4]")


def parse_unsubscribe(body: bytes, *, is_v5: bool = False) -> Unsubscribe:
    """Parse the body of an UNSUBSCRIBE. It holds as many filters as fit into a packet.

    Raises:
        ProtocolError: the connection has to close.
    """
    packet_id, at = _packet_id(body, UNSUBSCRIBE)
    if is_v5:
        _, at = read_properties(body, at, UNSUBSCRIBE)
    filters: list[str] = []
    end = len(body)
    while at < end:
        filter, at = _filter(body, at)  # [MQTT-3.10.3-1]
        filters.append(filter)
    if not filters:
        raise ProtocolError("an UNSUBSCRIBE has no topic filter; send at least one [MQTT-3.10.3-2]")
    return Unsubscribe(packet_id, filters)


def parse_disconnect(body: bytes) -> Disconnect:
    """Parse the body of a DISCONNECT of MQTT 5.0 from a client (3.14.2); in MQTT 3.1.1 it is empty.

    Raises:
        ProtocolError: the connection has to close with its reason, and the will is published.
    """
    if not body:
        return Disconnect(ReasonCode.NORMAL_DISCONNECTION)
    reason, at = body[0], 1
    check_reason(DISCONNECT, reason)
    found: Found = {}
    if at < len(body):  # 3.14.2.2.1
        found, at = read_properties(body, at, DISCONNECT)
    if at != len(body):
        raise MalformedPacket(f"a DISCONNECT has {len(body) - at} bytes behind its properties")
    if Property.SERVER_REFERENCE in found:
        raise ProtocolError("a client's DISCONNECT has a server reference (3.14.2.2.5)")
    return Disconnect(reason, found.get(Property.SESSION_EXPIRY_S))


def check_reason(kind: int, reason: int) -> None:
    """Raise ProtocolError where a packet of type `kind` can't have a reason code [MQTT-3.4.2-1] [MQTT-3.14.2-1]."""
    if reason not in REASONS[kind]:
        raise ProtocolError(f"a {NAMES[kind]} has the reason code {reason:#04x}, which it can't have (2.4)")


def _topic(raw: bytes, levels_max: int, bytes_max: int) -> str:
    try:
        return check_topic(raw, levels_max=levels_max, bytes_max=bytes_max)  # [MQTT-3.1.3-11] 3.1.1:[MQTT-3.1.3-10]
    except TopicInvalid as error:
        raise InvalidTopic(str(error), ReasonCode.TOPIC_NAME_INVALID) from error


def _filter(body: bytes, at: int) -> tuple[str, int]:
    text, at = read_string(body, at, "topic filter")
    try:
        check_filter(text, levels_max=TOPIC_BYTES_MAX + 1)  # [MQTT-4.7.1-1], [MQTT-4.7.1-2], [MQTT-4.7.3-1]
    except TopicInvalid as error:
        raise InvalidTopic(str(error), ReasonCode.TOPIC_FILTER_INVALID) from error
    return text, at


def _packet_id(body: bytes, kind: int) -> tuple[int, int]:
    packet_id, at = read_u16(body, 0, "packet id")
    if not packet_id:
        raise no_packet_id(kind)
    return packet_id, at


def no_packet_id(kind: int) -> ProtocolError:
    """Return the error of a packet of type `kind` that must carry a packet id and carries 0."""
    return ProtocolError(f"a {NAMES[kind]} has the packet id 0; use 1 to 65535 [MQTT-2.2.1-3] 3.1.1:[MQTT-2.3.1-1]")
