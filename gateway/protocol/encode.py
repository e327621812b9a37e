"""The encoders: what a server sends as bytes. Tests and clients encode their PUBLISHes and acks with them, too.

Clauses in brackets are those of MQTT 5.0. Where MQTT 3.1.1 has the same rule under another number, that number follows as
3.1.1:[...].
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from penstock.gateway.protocol.errors import ConnectRefused, ProtocolError, UnsupportedVersion
from penstock.gateway.protocol.fields import U16, write_varint
from penstock.gateway.protocol.fixed_header import FLAGS
from penstock.gateway.protocol.packets import CONNACK, DISCONNECT, PINGRESP, PUBLISH, SUBACK, UNSUBACK, V5_0
from penstock.gateway.protocol.properties import Property, write_properties
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode

PINGRESP_BYTES: Final = bytes((PINGRESP << 4, 0))

_HEAD: Final = struct.Struct(">BBH")
"""Type and flags, a length of one byte, and the first field: the packet id of an ack, or the topic length of a PUBLISH."""

_ACKS_JOINED_MAX: Final = 16
"""Up to this many acks, packing them one by one is faster than filling a template."""


def encode_connack(session_present: bool, code: ConnectCode) -> bytes:
    """Return a CONNACK of MQTT 3.1.1 (3.2)."""
    assert not (session_present and code), code  # 3.1.1:[MQTT-3.2.2-4]
    return bytes((CONNACK << 4, 2, session_present, code))


def encode_connack_5(session_present: bool, reason: ReasonCode, properties: Mapping[Property, Any]) -> bytes:
    """Return a CONNACK of MQTT 5.0 (3.2)."""
    assert not (session_present and reason), reason  # [MQTT-3.2.2-6]
    return _packet(CONNACK << 4, bytes((session_present, reason)) + write_properties(properties))


def encode_refusal(error: ProtocolError, level: int, why: str = "") -> bytes:
    """Return the CONNACK that answers a refused CONNECT, in the format of the version that the client asked for.

    In MQTT 5.0 `why` becomes the reason string, unless it is empty. In MQTT 3.1.1 only a `ConnectRefused` has an answer; for
    any other error the result is empty 3.1.1:[MQTT-3.1.4-1].
    """
    if level == V5_0 or (isinstance(error, UnsupportedVersion) and error.is_v5):
        return encode_connack_5(False, error.reason, {Property.REASON_STRING: why} if why else {})
    return encode_connack(False, error.code) if isinstance(error, ConnectRefused) else b""


def encode_disconnect(reason: ReasonCode, why: str = "") -> bytes:
    """Return a DISCONNECT of MQTT 5.0 (3.14). `why` becomes its reason string, unless it is empty."""
    if not why:
        return bytes((DISCONNECT << 4, 1, reason))
    return _packet(DISCONNECT << 4, bytes((reason,)) + write_properties({Property.REASON_STRING: why}))


def encode_ack(kind: int, packet_id: int, reason: ReasonCode, why: str = "") -> bytes:
    """Return an ack of MQTT 5.0 with a reason code. `why` becomes its reason string, unless it is empty."""
    properties = write_properties({Property.REASON_STRING: why}) if why else b""
    return _packet(kind << 4 | FLAGS.get(kind, 0), U16.pack(packet_id) + bytes((reason,)) + properties)


def encode_ack_with(kind: int, packet_id: int, name: str, value: str) -> bytes:
    """Return an ack of MQTT 5.0 that reports success, with a user property. If `value` is empty, the ack has none."""
    if not value:
        return encode_acks(kind, [packet_id])
    properties = write_properties({Property.USER_PROPERTY: [(name, value)]})
    return _packet(kind << 4 | FLAGS.get(kind, 0), U16.pack(packet_id) + bytes((ReasonCode.SUCCESS,)) + properties)


def _packet(header: int, body: bytes) -> bytes:
    return bytes((header,)) + write_varint(len(body)) + body


def encode_acks(kind: int, packet_ids: Sequence[int]) -> bytes:
    """Return one ack of type `kind` (PUBACK, PUBREC, PUBREL, PUBCOMP, UNSUBACK) for each packet id, in the same order."""
    header = kind << 4 | FLAGS.get(kind, 0)
    count = len(packet_ids)
    if count == 1:
        return _HEAD.pack(header, 2, packet_ids[0])
    if count <= _ACKS_JOINED_MAX:
        pack = _HEAD.pack
        return b"".join([pack(header, 2, packet_id) for packet_id in packet_ids])
    ids = struct.pack(f">{count}H", *packet_ids)
    return join_acks(header, ids[0::2], ids[1::2])


def join_acks(header: int, high: bytes, low: bytes) -> bytes:
    """Return one ack for each packet id, given all high bytes and all low bytes. No object per ack is made."""
    acks = bytearray(bytes((header, 2, 0, 0)) * len(high))
    acks[2::4] = high
    acks[3::4] = low
    return bytes(acks)


def encode_suback(packet_id: int, codes: Iterable[int], is_v5: bool = False) -> bytes:
    """Return a SUBACK with one code per filter, in the order of the SUBSCRIBE [MQTT-3.8.4-6] 3.1.1:[MQTT-3.9.3-2]."""
    return _packet(SUBACK << 4, U16.pack(packet_id) + b"\0" * is_v5 + bytes(codes))


def encode_unsuback(packet_id: int) -> bytes:
    """Return an UNSUBACK of MQTT 3.1.1 (3.11)."""
    return _HEAD.pack(UNSUBACK << 4, 2, packet_id)


def encode_unsuback_5(packet_id: int, codes: Iterable[int]) -> bytes:
    """Return an UNSUBACK of MQTT 5.0 with one code per filter, in the order of the UNSUBSCRIBE [MQTT-3.11.3-1]."""
    return _packet(UNSUBACK << 4, U16.pack(packet_id) + b"\0" + bytes(codes))


def encode_publish(
    topic: bytes,
    body: bytes,
    qos: int = 0,
    *,
    retain: bool = False,
    dup: bool = False,
    packet_id: int = 0,
    properties: bytes = b"",
) -> bytes:
    """Return a PUBLISH.

    Args:
        topic: a valid topic name, at most 65,535 bytes.
        body: the message. Topic and body together have at most `fields.REMAINING_BYTES_MAX` - 4 bytes.
        qos: 0, 1 or 2.
        retain: whether the message is a retained one that answers a new subscription [MQTT-3.3.1-8].
        dup: whether the packet was sent before; never at QoS 0 [MQTT-3.3.1-2].
        packet_id: 1 to 65,535 at QoS 1 and 2, 0 at QoS 0 [MQTT-2.2.1-2] 3.1.1:[MQTT-2.3.1-5].
        properties: in MQTT 5.0 the result of `write_properties`, at least one byte; in MQTT 3.1.1 empty.
    """
    assert 0 <= qos <= 2, qos
    assert bool(qos) == bool(packet_id), (qos, packet_id)
    assert qos or not dup
    head = encode_publish_head(topic, len(properties) + len(body), dup << 3 | qos << 1 | retain)
    return b"".join((head, U16.pack(packet_id) if qos else b"", properties, body))


def encode_publish_head(topic: bytes, body_bytes: int, flags: int) -> bytes:
    """Return a PUBLISH up to the end of its topic.

    At QoS 1 and 2 the packet id follows. Subscribers that get the same message under different packet ids share all the rest.

    Args:
        topic: as in `encode_publish`.
        body_bytes: the length of the body, plus in MQTT 5.0 the length of the properties.
        flags: as in `Packet`.
    """
    length = 2 + len(topic) + (2 if flags & 6 else 0) + body_bytes
    if length < 128:
        return _HEAD.pack(PUBLISH << 4 | flags, length, len(topic)) + topic
    return bytes((PUBLISH << 4 | flags,)) + write_varint(length) + U16.pack(len(topic)) + topic
