"""The control packets of MQTT: their numbers, and the ones off the hot path, parsed from what `gateway.codec.decode` cuts out.

Clauses in brackets are those of MQTT 3.1.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gateway.errors import ConnectRefused, InvalidTopic, MalformedPacket, ProtocolError, UnsupportedVersion
from gateway.reasons import ConnectCode, ReasonCode
from store.errors import TopicInvalid
from store.record import TOPIC_BYTES_MAX
from store.topics import LEVELS_MAX, check_filter, check_topic

MALFORMED: Final = 0
"""Not on the wire: the type of the item that `gateway.codec.decode` puts last where the bytes are no packet."""

# MQTT 3.1.1, 2.2.1. Plain ints, because the hot path compares them for each packet.
CONNECT: Final = 1
CONNACK: Final = 2
PUBLISH: Final = 3
PUBACK: Final = 4
PUBREC: Final = 5
PUBREL: Final = 6
PUBCOMP: Final = 7
SUBSCRIBE: Final = 8
SUBACK: Final = 9
UNSUBSCRIBE: Final = 10
UNSUBACK: Final = 11
PINGREQ: Final = 12
PINGRESP: Final = 13
DISCONNECT: Final = 14
AUTH: Final = 15
"""MQTT 5.0 only."""

NAMES: Final = (
    "reserved type 0",
    "CONNECT",
    "CONNACK",
    "PUBLISH",
    "PUBACK",
    "PUBREC",
    "PUBREL",
    "PUBCOMP",
    "SUBSCRIBE",
    "SUBACK",
    "UNSUBSCRIBE",
    "UNSUBACK",
    "PINGREQ",
    "PINGRESP",
    "DISCONNECT",
    "reserved type 15",
)
"""Of the types in MQTT 3.1.1, by number."""

V3_1_1: Final = 4
"""Protocol level of MQTT 3.1.1 in a CONNECT."""
V5_0: Final = 5
"""Protocol level of MQTT 5.0 in a CONNECT."""

CLIENT_ID_BYTES_MAX: Final = 1024
"""Default bound of a client id in bytes of UTF-8. A server must take 23 [MQTT-3.1.3-5]; it may take more."""


@dataclass(frozen=True, slots=True)
class Will:
    """The message that a client leaves behind, to be published when its connection ends without a DISCONNECT."""

    topic: str
    body: bytes
    qos: int
    retain: bool


@dataclass(frozen=True, slots=True)
class Connect:
    """A CONNECT that is valid. `client_id` is empty where the server has to assign one; `keep_alive_s` 0 is none."""

    level: int
    client_id: str
    clean_session: bool
    keep_alive_s: int
    will: Will | None
    username: str | None
    password: bytes | None


@dataclass(frozen=True, slots=True)
class Subscribe:
    """A SUBSCRIBE: filters with the QoS asked for, in the order in which the SUBACK answers them; at least one."""

    packet_id: int
    filters: list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """An UNSUBSCRIBE: at least one filter."""

    packet_id: int
    filters: list[str]


# --- parsers ----------------------------------------------------------------------------------------------------------


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
        ProtocolError: any other; close without an answer [MQTT-3.1.4-1].
    """
    name, at = _binary(body, 0, "protocol name")
    level, at = _byte(body, at, "protocol level")
    _check_version(name, level)
    flags, at = _byte(body, at, "connect flags")
    _check_connect_flags(flags)
    keep_alive_s, at = _u16(body, at, "keep alive")
    client_id, at = _string(body, at, "client id")  # [MQTT-3.1.3-3], [MQTT-3.1.3-4]
    will: Will | None = None
    if flags & 0x04:  # [MQTT-3.1.2-9]
        topic, at = _binary(body, at, "will topic")
        message, at = _binary(body, at, "will message")
        will = Will(_topic(topic, topic_levels_max, topic_bytes_max), message, flags >> 3 & 3, bool(flags & 0x20))
    username: str | None = None
    password: bytes | None = None
    if flags & 0x80:  # [MQTT-3.1.2-19]
        username, at = _string(body, at, "user name")  # [MQTT-3.1.3-11]
    if flags & 0x40:  # [MQTT-3.1.2-21]
        password, at = _binary(body, at, "password")
    if at != len(body):  # [MQTT-3.1.2-11], [MQTT-3.1.2-18], [MQTT-3.1.2-20]: nothing that the flags don't announce
        raise MalformedPacket(f"a CONNECT has {len(body) - at} bytes behind its last field")
    clean_session = bool(flags & 0x02)
    _check_client_id(client_id, clean_session, client_id_bytes_max)
    return Connect(level, client_id, clean_session, keep_alive_s, will, username, password)


def _check_version(name: bytes, level: int) -> None:
    if name == b"MQIsdp" and level & 0x7F == 3:
        raise UnsupportedVersion("the client speaks MQTT 3.1; use 3.1.1", is_v5=False)
    if name != b"MQTT":  # [MQTT-3.1.2-1]
        raise MalformedPacket(f"a CONNECT has the protocol name {name[:16]!r}, not b'MQTT' [MQTT-3.1.2-1]")
    if level != V3_1_1:  # [MQTT-3.1.2-2]; mosquitto's bridges set bit 7 on the level, and expect an answer in its format
        is_v5 = level & 0x7F >= V5_0
        raise UnsupportedVersion(f"the client asks for protocol level {level}; use 4, MQTT 3.1.1", is_v5=is_v5)


def _check_connect_flags(flags: int) -> None:
    if flags & 0x01:
        raise MalformedPacket("a CONNECT has its reserved flag set [MQTT-3.1.2-3]")
    will_qos = flags >> 3 & 3
    if flags & 0x04:
        if will_qos == 3:
            raise MalformedPacket("a CONNECT has a will at QoS 3; use 0, 1 or 2 [MQTT-3.1.2-14]")
    elif will_qos:
        raise MalformedPacket(f"a CONNECT without a will has the will QoS {will_qos} [MQTT-3.1.2-13]")
    elif flags & 0x20:
        raise MalformedPacket("a CONNECT without a will has will retain set [MQTT-3.1.2-15]")
    if flags & 0xC0 == 0x40:
        raise MalformedPacket("a CONNECT has a password without a user name [MQTT-3.1.2-22]")


def _check_client_id(client_id: str, clean_session: bool, bytes_max: int) -> None:
    if not client_id and not clean_session:  # [MQTT-3.1.3-7]
        raise ConnectRefused(
            "the client id is empty and clean session is 0; name the client, or set clean session [MQTT-3.1.3-8]",
            ConnectCode.IDENTIFIER_REJECTED,
        )
    size = len(client_id.encode())
    if size > bytes_max:  # [MQTT-3.1.3-9]
        raise ConnectRefused(f"the client id has {size} bytes; use {bytes_max} at most", ConnectCode.IDENTIFIER_REJECTED)


def parse_subscribe(body: bytes) -> Subscribe:
    """Parse the body of a SUBSCRIBE. It holds as many filters as fit into a packet.

    How deep a filter may be is a limit of the server's, not of the protocol's: whoever subscribes checks it, and refuses that
    filter in the SUBACK.

    Raises:
        ProtocolError: the connection has to close.
    """
    packet_id, at = _packet_id(body, SUBSCRIBE)
    filters: list[tuple[str, int]] = []
    end = len(body)
    while at < end:
        filter, at = _filter(body, at)  # [MQTT-3.8.3-1]
        qos, at = _byte(body, at, "requested QoS")
        if qos > 2:
            raise MalformedPacket(f"a SUBSCRIBE asks for QoS {qos}; use 0, 1 or 2 [MQTT-3-8.3-4]")
        filters.append((filter, qos))
    if not filters:
        raise ProtocolError("a SUBSCRIBE has no topic filter; send at least one [MQTT-3.8.3-3]")
    return Subscribe(packet_id, filters)


def parse_unsubscribe(body: bytes) -> Unsubscribe:
    """Parse the body of an UNSUBSCRIBE. It holds as many filters as fit into a packet.

    Raises:
        ProtocolError: the connection has to close.
    """
    packet_id, at = _packet_id(body, UNSUBSCRIBE)
    filters: list[str] = []
    end = len(body)
    while at < end:
        filter, at = _filter(body, at)  # [MQTT-3.10.3-1]
        filters.append(filter)
    if not filters:
        raise ProtocolError("an UNSUBSCRIBE has no topic filter; send at least one [MQTT-3.10.3-2]")
    return Unsubscribe(packet_id, filters)


# --- fields: each returns its value and the offset behind it ------------------------------------------------------------


def _byte(body: bytes, at: int, what: str) -> tuple[int, int]:
    if at >= len(body):
        raise MalformedPacket(f"the packet ends before its {what}")
    return body[at], at + 1


def _u16(body: bytes, at: int, what: str) -> tuple[int, int]:
    if at + 2 > len(body):
        raise MalformedPacket(f"the packet ends within its {what}")
    return body[at] << 8 | body[at + 1], at + 2


def _binary(body: bytes, at: int, what: str) -> tuple[bytes, int]:
    length, at = _u16(body, at, what)
    stop = at + length
    if stop > len(body):
        raise MalformedPacket(f"the packet ends within its {what}: {length} bytes are announced, {len(body) - at} are left")
    return body[at:stop], stop


def _string(body: bytes, at: int, what: str) -> tuple[str, int]:
    raw, at = _binary(body, at, what)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise MalformedPacket(f"the {what} is not UTF-8 from byte {error.start} on [MQTT-1.5.3-1]") from error
    if "\0" in text:
        raise MalformedPacket(f"the {what} has U+0000 in it [MQTT-1.5.3-2]")
    return text, at


def _topic(raw: bytes, levels_max: int, bytes_max: int) -> str:
    try:
        return check_topic(raw, levels_max=levels_max, bytes_max=bytes_max)  # [MQTT-3.1.3-10]
    except TopicInvalid as error:
        raise InvalidTopic(str(error), ReasonCode.TOPIC_NAME_INVALID) from error


def _filter(body: bytes, at: int) -> tuple[str, int]:
    text, at = _string(body, at, "topic filter")
    try:
        return check_filter(text, levels_max=TOPIC_BYTES_MAX + 1), at  # [MQTT-4.7.1-2], [MQTT-4.7.1-3], [MQTT-4.7.3-1]
    except TopicInvalid as error:
        raise InvalidTopic(str(error), ReasonCode.TOPIC_FILTER_INVALID) from error


def _packet_id(body: bytes, kind: int) -> tuple[int, int]:
    packet_id, at = _u16(body, 0, "packet id")
    if not packet_id:
        raise no_packet_id(kind)
    return packet_id, at


def no_packet_id(kind: int) -> ProtocolError:
    """Return the error of a packet of type `kind` that must carry a packet id and carries 0."""
    return ProtocolError(f"a {NAMES[kind]} has the packet id 0; use 1 to 65535 [MQTT-2.3.1-1]")
