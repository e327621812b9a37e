"""The MQTT codec: bytes in, packets out, and back. No sockets, no state.

`decode` is the hot path. It cuts a whole receive buffer into packets: PUBLISH and the acks come out parsed, the others as
bodies for the parsers of `gateway.packets`. Clauses in brackets are those of MQTT 3.1.1.

The version is known after CONNECT, so another version is another `decode` beside this one, over the same framing, and the
connection holds the one that it speaks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from gateway.errors import ConnectRefused, MalformedPacket, PacketTooLarge, ProtocolError, UnsupportedVersion
from gateway.packets import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    MALFORMED,
    NAMES,
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
    no_packet_id,
)
from gateway.reasons import ConnectCode

REMAINING_BYTES_MAX: Final = 268_435_455
"""The most bytes that four length bytes can announce behind a fixed header (2.2.3)."""

PACKET_BYTES_MAX_MIN: Final = 129
"""The least value of `packet_bytes_max`: a packet with one length byte is never larger, so it needs no check."""

Packet: TypeAlias = tuple[Any, ...]
"""What `decode` makes of a packet, by the first item:

    (PUBLISH, flags, topic, packet_id, body)    flags: retain 1, QoS << 1, dup 8; packet_id 0 at QoS 0
    (PUBACK, packet_id)                         and PUBREC, PUBREL, PUBCOMP, UNSUBACK; never 0
    (type, flags, body)                         all others, to be parsed by `gateway.packets`
    (MALFORMED, error)                          last, where what follows the packets before it is no packet: `error` is a
                                                `ProtocolError`, and the connection has to close

A topic is bytes and not checked: the store's route does that once per topic, not once per message.
"""

# --- what a fixed header may be: one table lookup checks type, direction and flags -------------------------------------

_REFUSED: Final = 0
_PUBLISH_PLAIN: Final = 1
_PUBLISH_ACKED: Final = 2
_ACK: Final = 3
_EMPTY: Final = 4
_OTHER: Final = 5

_FLAGS: Final = {PUBREL: 2, SUBSCRIBE: 2, UNSUBSCRIBE: 2}
"""Flags of the fixed header that aren't 0 (Table 2.2). PUBLISH has flags of its own."""

_ACKS: Final = frozenset((PUBACK, PUBREC, PUBREL, PUBCOMP, UNSUBACK))
_EMPTIES: Final = frozenset((PINGREQ, PINGRESP, DISCONNECT))


def _shapes(kinds: Iterable[int]) -> bytes:
    """Return what `decode` has to do, by the first byte of a packet, where `kinds` are the types that may come."""
    shapes = bytearray(256)
    for kind in kinds:
        shapes[kind << 4 | _FLAGS.get(kind, 0)] = _ACK if kind in _ACKS else _EMPTY if kind in _EMPTIES else _OTHER
    for header in range(PUBLISH << 4, PUBLISH + 1 << 4):
        qos = header >> 1 & 3
        is_plain = qos == 0 and not header & 8  # [MQTT-3.3.1-2]
        shapes[header] = _PUBLISH_PLAIN if is_plain else _PUBLISH_ACKED if qos in (1, 2) else _REFUSED  # [MQTT-3.3.1-4]
    return bytes(shapes)


FROM_CLIENT: Final = _shapes(
    (CONNECT, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBSCRIBE, UNSUBSCRIBE, PINGREQ, DISCONNECT),
)
"""The packets that a server takes."""

FROM_SERVER: Final = _shapes((CONNACK, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, PINGRESP))
"""The packets that a client takes."""

# --- the hot path -----------------------------------------------------------------------------------------------------


def decode(buffer: bytes, packet_bytes_max: int, shapes: bytes = FROM_CLIENT) -> tuple[list[Packet], int]:
    """Return all whole packets at the beginning of `buffer` as `Packet`s, and how many bytes they take.

    Costs 0.45 us per PUBLISH of 64 bytes at QoS 1, 0.25 us per ack.

    Args:
        buffer: received bytes that begin with a packet. `bytes`, so that what is cut out of it is too.
        packet_bytes_max: the largest packet taken, fixed header included; at least `PACKET_BYTES_MAX_MIN`.
        shapes: the packets that may come, `FROM_CLIENT` or `FROM_SERVER`.
    """
    assert packet_bytes_max >= PACKET_BYTES_MAX_MIN, packet_bytes_max
    packets: list[Packet] = []
    add = packets.append
    end = len(buffer)
    last = end - 2
    at = 0
    try:
        while at <= last:
            header = buffer[at]
            length = buffer[at + 1]
            start = at + 2
            if length > 127:
                if start < end and (more := buffer[start]) < 128:  # two bytes: up to 16,383, in place of a call
                    length += (more << 7) - 128
                    start += 1
                else:
                    start, length = _long_length(buffer, at, end)
                    if not start:
                        break
                if start + length - at > packet_bytes_max:
                    raise PacketTooLarge(start + length - at, packet_bytes_max)
            stop = start + length
            shape = shapes[header]
            if stop > end:
                if not shape:  # say so now, rather than wait for the rest of a packet that never was one
                    raise _refused(header)
                break
            if shape == _PUBLISH_ACKED:
                if length < 4:
                    raise _short(header, length)
                topic_from = start + 2
                topic_stop = topic_from + (buffer[start] << 8 | buffer[start + 1])
                body_from = topic_stop + 2
                if body_from > stop:
                    raise _short(header, length)
                packet_id = buffer[topic_stop] << 8 | buffer[topic_stop + 1]
                if not packet_id:
                    raise no_packet_id(header >> 4)
                add((PUBLISH, header & 15, buffer[topic_from:topic_stop], packet_id, buffer[body_from:stop]))
            elif shape == _ACK:
                if length != 2:
                    raise MalformedPacket(f"a {NAMES[header >> 4]} has 2 bytes behind its fixed header, not {length}")
                packet_id = buffer[start] << 8 | buffer[start + 1]
                if not packet_id:
                    raise no_packet_id(header >> 4)
                add((header >> 4, packet_id))
            elif shape == _PUBLISH_PLAIN:
                if length < 2:
                    raise _short(header, length)
                topic_from = start + 2
                topic_stop = topic_from + (buffer[start] << 8 | buffer[start + 1])
                if topic_stop > stop:
                    raise _short(header, length)
                add((PUBLISH, header & 15, buffer[topic_from:topic_stop], 0, buffer[topic_stop:stop]))
            elif shape == _OTHER or (shape == _EMPTY and not length):
                add((header >> 4, header & 15, buffer[start:stop]))
            else:
                raise _refused(header) if not shape else _not_empty(header, length)
            at = stop
    except ProtocolError as error:
        # Without its traceback: that refers to this frame, so to `packets`, and would keep all of it for the collector.
        add((MALFORMED, error.with_traceback(None)))
    return packets, at


def packet_bytes(buffer: bytes) -> int:
    """Return the size of the packet at the beginning of `buffer`, fixed header included; 0 if too little has come to tell.

    For a packet that comes in many reads: a connection collects until it has this many bytes, and decodes once. `buffer` is
    what `decode` left, so the size is within `packet_bytes_max`.
    """
    if len(buffer) < 2:
        return 0
    if buffer[1] < 128:
        return 2 + buffer[1]
    start, length = _long_length(buffer, 0, len(buffer))
    return start + length


def _long_length(buffer: bytes, at: int, end: int) -> tuple[int, int]:
    """Return where the body of the packet at `at` starts and how long it is, for a length of two to four bytes (2.2.3).

    Both are 0 while the length is incomplete.
    """
    length = buffer[at + 1] & 127
    for more in range(1, 4):
        place = at + 1 + more
        if place == end:
            return 0, 0
        byte = buffer[place]
        length |= (byte & 127) << 7 * more
        if byte < 128:
            return place + 1, length
    raise MalformedPacket("a remaining length goes on past its fourth byte (2.2.3)")


def _refused(header: int) -> ProtocolError:
    """Return what is wrong with the first byte of a packet."""
    kind, flags = header >> 4, header & 15
    name = NAMES[kind]
    if kind == PUBLISH:
        if flags & 6 == 6:
            return MalformedPacket("a PUBLISH has QoS 3; use 0, 1 or 2 [MQTT-3.3.1-4]")
        return MalformedPacket("a PUBLISH at QoS 0 has DUP set; it can't be sent twice [MQTT-3.3.1-2]")
    if kind in (0, AUTH):
        return MalformedPacket(f"a packet of {name} came; MQTT 3.1.1 has no such packet (2.2.1)")
    if flags != _FLAGS.get(kind, 0):
        expected = _FLAGS.get(kind, 0)  # [MQTT-3.6.1-1], [MQTT-3.8.1-1], [MQTT-3.10.1-1], [MQTT-3.14.1-1]
        return MalformedPacket(f"a {name} has the flags {flags:#06b} in its fixed header, not {expected:#06b} [MQTT-2.2.2-2]")
    return ProtocolError(f"a {name} came from the side that doesn't send it (2.2.1)")


def _short(header: int, length: int) -> MalformedPacket:
    return MalformedPacket(f"a {NAMES[header >> 4]} ends within its fields; its remaining length is {length} [MQTT-3.3.2-1]")


def _not_empty(header: int, length: int) -> MalformedPacket:
    return MalformedPacket(f"a {NAMES[header >> 4]} has nothing behind its fixed header, not {length} bytes")


# --- encoders ---------------------------------------------------------------------------------------------------------

PINGRESP_BYTES: Final = bytes((PINGRESP << 4, 0))

_HEAD: Final = struct.Struct(">BBH")
"""Type and flags, a length of one byte, and the first field: the packet id of an ack, the topic's length of a PUBLISH."""
_U16: Final = struct.Struct(">H")

_ACKS_JOINED_MAX: Final = 16
"""Up to so many acks, packing one by one is faster than filling a template (measured)."""


def encode_connack(session_present: bool, code: ConnectCode) -> bytes:
    """Return a CONNACK of MQTT 3.1.1 (3.2)."""
    assert not (session_present and code), code  # [MQTT-3.2.2-4]
    return bytes((CONNACK << 4, 2, session_present, code))


def encode_refusal(error: ConnectRefused) -> bytes:
    """Return the CONNACK that answers a refused CONNECT, in the format of the version that the client asked for."""
    if isinstance(error, UnsupportedVersion) and error.is_v5:
        return bytes((CONNACK << 4, 3, 0, error.reason, 0))  # MQTT 5.0, 3.2.2: flags, reason code, no properties
    return encode_connack(False, error.code)


def encode_acks(kind: int, packet_ids: list[int]) -> bytes:
    """Return one ack of type `kind` (PUBACK, PUBREC, PUBREL, PUBCOMP, UNSUBACK) for each packet id, in their order.

    Costs 0.02 us per ack in a batch of hundreds, 0.4 us for one alone.
    """
    header = kind << 4 | _FLAGS.get(kind, 0)
    count = len(packet_ids)
    if count <= _ACKS_JOINED_MAX:
        pack = _HEAD.pack
        return b"".join([pack(header, 2, packet_id) for packet_id in packet_ids])
    ids = struct.pack(f">{count}H", *packet_ids)
    acks = bytearray(bytes((header, 2, 0, 0)) * count)
    acks[2::4] = ids[0::2]
    acks[3::4] = ids[1::2]
    return bytes(acks)


def encode_suback(packet_id: int, codes: Iterable[int]) -> bytes:
    """Return a SUBACK: for each filter, in the order of the SUBSCRIBE, the QoS granted or `SUBACK_FAILURE` [MQTT-3.9.3-2]."""
    body = _U16.pack(packet_id) + bytes(codes)
    return bytes((SUBACK << 4,)) + encode_length(len(body)) + body


def encode_unsuback(packet_id: int) -> bytes:
    """Return an UNSUBACK of MQTT 3.1.1 (3.11)."""
    return _HEAD.pack(UNSUBACK << 4, 2, packet_id)


def encode_publish(
    topic: bytes, body: bytes, qos: int = 0, *, retain: bool = False, dup: bool = False, packet_id: int = 0
) -> bytes:
    """Return a PUBLISH.

    Args:
        topic: a valid topic name, at most 65,535 bytes.
        body: the message; with the topic at most `REMAINING_BYTES_MAX` less 4.
        qos: 0, 1 or 2.
        retain: whether it answers a new subscription [MQTT-3.3.1-8].
        dup: whether it was sent before; never at QoS 0 [MQTT-3.3.1-2].
        packet_id: 1 to 65,535 at QoS 1 and 2, 0 at QoS 0 [MQTT-2.3.1-5].
    """
    assert 0 <= qos <= 2, qos
    assert bool(qos) == bool(packet_id), (qos, packet_id)
    assert qos or not dup
    head = encode_publish_head(topic, len(body), dup << 3 | qos << 1 | retain)
    return head + _U16.pack(packet_id) + body if qos else head + body


def encode_publish_head(topic: bytes, body_bytes: int, flags: int) -> bytes:
    """Return a PUBLISH up to where its packet id stands (QoS 1 and 2) or its body (QoS 0).

    So subscribers who get one message under packet ids of their own share everything else of it.

    Args:
        topic: as in `encode_publish`.
        body_bytes: the length of the body.
        flags: as `decode` returns them.
    """
    length = 2 + len(topic) + (2 if flags & 6 else 0) + body_bytes
    if length < 128:
        return _HEAD.pack(PUBLISH << 4 | flags, length, len(topic)) + topic
    return bytes((PUBLISH << 4 | flags,)) + encode_length(length) + _U16.pack(len(topic)) + topic


def encode_length(length: int) -> bytes:
    """Return a remaining length (2.2.3) of at most `REMAINING_BYTES_MAX`, in one to four bytes."""
    assert length <= REMAINING_BYTES_MAX, length
    digits = bytearray()
    while length > 127:
        digits.append(length & 127 | 128)
        length >>= 7
    digits.append(length)
    return bytes(digits)
