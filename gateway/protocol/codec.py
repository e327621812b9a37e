"""The MQTT codec: bytes in, packets out, and back. No sockets, no state.

`decode` is the hot path. It cuts a whole receive buffer into packets: PUBLISH and the acks come out parsed, the others as
bodies for `parsers`. PUBLISHes that differ in nothing but packet ids and bodies come out as one run: whoever sends
many at once mostly sends them to one topic, and what is the same for all is then done once. Clauses in brackets are those of
MQTT 5.0; where MQTT 3.1.1 has one of another number, it stands behind it as 3.1.1:[...].

Both versions share the framing; a PUBLISH has a branch of its own in each, so that neither pays for the other. In MQTT 5.0 it
has properties behind the topic: one length byte more where there are none, as in nearly every message. Where there are, they go
out unparsed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

from penstock.gateway.protocol.errors import ConnectRefused, MalformedPacket, PacketTooLarge, ProtocolError, UnsupportedVersion
from penstock.gateway.protocol.fields import U16, read_varint, write_varint
from penstock.gateway.protocol.packets import (
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
    PUBLISH_RUN,
    PUBLISH_WITH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    V5_0,
)
from penstock.gateway.protocol.parsers import check_reason, no_packet_id
from penstock.gateway.protocol.properties import Property, parse_properties, write_properties
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode

PACKET_BYTES_MAX_MIN: Final = 129
"""The least value of `packet_bytes_max`: a packet with one length byte is never larger, so it needs no check."""

Packet: TypeAlias = tuple[Any, ...]
"""What `decode` makes of a packet, by the first item:

    (PUBLISH, flags, topic, packet_id, body)    flags: retain 1, QoS << 1, dup 8; packet_id 0 at QoS 0
    (PUBLISH_WITH, flags, topic, packet_id, body, properties)
                                                MQTT 5.0: with properties as bytes, or with an empty topic
    (PUBLISH_RUN, flags, topic, packet_ids, bodies)
                                                two or more of the first kind, QoS 0 or 1, where runs are wanted; packet_ids
                                                is empty at QoS 0
    (PUBACK, packet_id)                         and PUBREC, PUBREL, PUBCOMP, and UNSUBACK of 3.1.1; never 0
    (PUBACK, packet_id, reason)                 MQTT 5.0: where the packet has a reason code
    (type, flags, body)                         all others, to be parsed by `parsers`
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
_PUBLISH_PLAIN_5: Final = 6
_PUBLISH_ACKED_5: Final = 7

_FLAGS: Final = {PUBREL: 2, SUBSCRIBE: 2, UNSUBSCRIBE: 2}
"""Flags of the fixed header that aren't 0 (Table 2.2). PUBLISH has flags of its own."""

_ACKS: Final = frozenset((PUBACK, PUBREC, PUBREL, PUBCOMP))


class Side(NamedTuple):
    """Which packets may come, from one side in one version."""

    shapes: bytes
    """What `decode` has to do, by the first byte of a packet."""
    is_v5: bool
    gaps: bytes
    """Of PUBLISHes that a run may consist of, by their first byte: 1 more than the bytes between topic and body. Others: 0."""


def _side(kinds: Iterable[int], empties: Iterable[int], acks: frozenset[int], is_v5: bool) -> Side:
    shapes = bytearray(256)
    for kind in kinds:
        shapes[kind << 4 | _FLAGS.get(kind, 0)] = _ACK if kind in acks else _EMPTY if kind in empties else _OTHER
    plain, acked = (_PUBLISH_PLAIN_5, _PUBLISH_ACKED_5) if is_v5 else (_PUBLISH_PLAIN, _PUBLISH_ACKED)
    for header in range(PUBLISH << 4, PUBLISH + 1 << 4):
        qos = header >> 1 & 3
        is_plain = qos == 0 and not header & 8  # [MQTT-3.3.1-2]
        shapes[header] = plain if is_plain else acked if qos in (1, 2) else _REFUSED  # [MQTT-3.3.1-4]
    gaps = bytearray(256)
    gaps[PUBLISH << 4] = 1 + is_v5
    gaps[PUBLISH << 4 | 1 << 1] = 3 + is_v5
    return Side(bytes(shapes), is_v5, bytes(gaps))


_TO_SERVER: Final = (CONNECT, *_ACKS, SUBSCRIBE, UNSUBSCRIBE, PINGREQ, DISCONNECT)
_TO_CLIENT: Final = (CONNACK, *_ACKS, SUBACK, UNSUBACK, PINGRESP)

FROM_CLIENT: Final = _side(_TO_SERVER, (PINGREQ, DISCONNECT), _ACKS, False)
"""The packets that a server takes in MQTT 3.1.1, and a first CONNECT of any version."""

FROM_SERVER: Final = _side(_TO_CLIENT, (PINGRESP,), _ACKS | {UNSUBACK}, False)
"""The packets that a client takes in MQTT 3.1.1."""

FROM_CLIENT_5: Final = _side((*_TO_SERVER, AUTH), (PINGREQ,), _ACKS, True)
"""The packets that a server takes in MQTT 5.0."""

FROM_SERVER_5: Final = _side((*_TO_CLIENT, AUTH, DISCONNECT), (PINGRESP,), _ACKS, True)
"""The packets that a client takes in MQTT 5.0."""

# --- the hot path -----------------------------------------------------------------------------------------------------


_NO_RUNS: Final = bytes(256)
_GAP_WITH_ID: Final = 3
"""From here on one of `Side.gaps` has room for a packet id."""
_PUBACK: Final = bytes((PUBACK << 4, 2))
_PUBACK_WITHOUT_ID: Final = _PUBACK + b"\0\0"
"""What no PUBACK is. Those that stand one behind the other have these bytes nowhere else, either."""
_BLOCK: Final = 64
"""So many packets are cut with one call, at most."""
_PUBLISH_BYTES_MIN: Final = 4
"""No PUBLISH has fewer bytes."""
_ALIKE_MIN: Final = 8
"""PUBLISHes of one length that must have room in a read for it to pay to cut them out at once."""


def decode(buffer: bytes, packet_bytes_max: int, side: Side = FROM_CLIENT, runs: bool = False) -> tuple[list[Packet], int]:
    """Return all whole packets at the beginning of `buffer` as `Packet`s, and how many bytes they take.

    Costs 0.45 us per PUBLISH of 64 bytes at QoS 1, 0.1 to 0.3 us in a run, 0.25 us per ack.

    Args:
        buffer: received bytes that begin with a packet. `bytes`, so that what is cut out of it is too.
        packet_bytes_max: the largest packet taken, fixed header included; at least `PACKET_BYTES_MAX_MIN`.
        side: the packets that may come, `FROM_CLIENT_5` for one.
        runs: whether to put PUBLISHes together where they differ in packet ids and bodies only.
    """
    assert packet_bytes_max >= PACKET_BYTES_MAX_MIN, packet_bytes_max
    shapes, is_v5, gaps = side
    if not runs:
        gaps = _NO_RUNS
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
                if is_v5 and not buffer[start - 1]:
                    raise MalformedPacket(f"a remaining length of {length} is in more bytes than it needs [MQTT-1.5.5-1]")
                if start + length - at > packet_bytes_max:
                    raise PacketTooLarge(start + length - at, packet_bytes_max)
            stop = start + length
            shape = shapes[header]
            if stop > end:
                if not shape:  # say so now, rather than wait for the rest of a packet that never was one
                    raise _refused(header, is_v5)
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
                if length != 2 and (length < 2 or not is_v5):
                    raise MalformedPacket(f"a {NAMES[header >> 4]} has 2 bytes behind its fixed header, not {length}")
                packet_id = buffer[start] << 8 | buffer[start + 1]
                if not packet_id:
                    raise no_packet_id(header >> 4)
                if length == 2:
                    add((header >> 4, packet_id))
                else:
                    add(_ack_with(header >> 4, packet_id, buffer[start + 2 : stop]))
            elif shape == _PUBLISH_PLAIN:
                if length < 2:
                    raise _short(header, length)
                topic_from = start + 2
                topic_stop = topic_from + (buffer[start] << 8 | buffer[start + 1])
                if topic_stop > stop:
                    raise _short(header, length)
                add((PUBLISH, header & 15, buffer[topic_from:topic_stop], 0, buffer[topic_stop:stop]))
            elif shape == _PUBLISH_ACKED_5:
                if length < 5:
                    raise _short(header, length)
                topic_from = start + 2
                topic_stop = topic_from + (buffer[start] << 8 | buffer[start + 1])
                body_from = topic_stop + 3
                if body_from > stop:
                    raise _short(header, length)
                packet_id = buffer[topic_stop] << 8 | buffer[topic_stop + 1]
                if not packet_id:
                    raise no_packet_id(header >> 4)
                if buffer[topic_stop + 2] or topic_stop == topic_from:
                    add(_publish_with(buffer, header, buffer[topic_from:topic_stop], packet_id, topic_stop + 2, stop))
                else:
                    add((PUBLISH, header & 15, buffer[topic_from:topic_stop], packet_id, buffer[body_from:stop]))
            elif shape == _PUBLISH_PLAIN_5:
                if length < 3:
                    raise _short(header, length)
                topic_from = start + 2
                topic_stop = topic_from + (buffer[start] << 8 | buffer[start + 1])
                if topic_stop >= stop:
                    raise _short(header, length)
                if buffer[topic_stop] or topic_stop == topic_from:
                    add(_publish_with(buffer, header, buffer[topic_from:topic_stop], 0, topic_stop, stop))
                else:
                    add((PUBLISH, header & 15, buffer[topic_from:topic_stop], 0, buffer[topic_stop + 1 : stop]))
            elif shape == _OTHER or (shape == _EMPTY and not length):
                add((header >> 4, header & 15, buffer[start:stop]))
            else:
                raise _refused(header, is_v5) if not shape else _not_empty(header, length)
            if stop < last and buffer[stop] == header and (gap := gaps[header]) and packets[-1][0] == PUBLISH:
                field = buffer[start:topic_stop]
                if buffer.startswith(field, stop + start - at):
                    run, stop = _run(buffer, stop, packet_bytes_max, packets.pop(), length, field, gap - 1)
                    add(run)
            at = stop
    except ProtocolError as error:
        # Without its traceback: that refers to this frame, so to `packets`, and would keep all of it for the collector.
        add((MALFORMED, error.with_traceback(None)))
    return packets, at


def _run(buffer: bytes, at: int, packet_bytes_max: int, first: Packet, last: int, field: bytes, gap: int) -> tuple[Packet, int]:
    """Return `first`, a PUBLISH, and those from `at` on that are like it, as a run; and where what is not like it begins.

    What isn't in order ends a run: `decode` says what is wrong with it. Where one has the same remaining length as the one
    before it (`last`: that of `first`), all that follow and have it too are cut out at once: 0.1 us each in place of 0.3.
    `field` is the topic with its length; `gap` bytes are between it and the body: the packet id, and in MQTT 5.0 a property
    length of 0.
    """
    _, flags, topic, packet_id, body = first
    header = PUBLISH << 4 | flags
    has_properties = gap & 1
    packet_ids, bodies = [packet_id], [body]
    add, add_id = bodies.append, packet_ids.append
    width, end = len(field), len(buffer)
    while at + 1 < end and buffer[at] == header:
        length = buffer[at + 1]
        start = at + 2
        if length > 127:
            if start == end or not 0 < (more := buffer[start]) < 128:
                break
            length += (more << 7) - 128
            start += 1
            if start + length - at > packet_bytes_max:
                break
        stop = start + length
        topic_stop = start + width
        body_from = topic_stop + gap
        if stop > end or body_from > stop or buffer[start:topic_stop] != field or (has_properties and buffer[body_from - 1]):
            break
        if flags:
            packet_id = buffer[topic_stop] << 8 | buffer[topic_stop + 1]
            if not packet_id:
                break
            add_id(packet_id)
        add(buffer[body_from:stop])
        if length == last and end - stop >= _ALIKE_MIN * (stop - at):
            stop += (stop - at) * _cut_alike(
                buffer[at:topic_stop], flags, gap, memoryview(buffer)[stop:], stop - at, packet_ids, bodies
            )
        last = length
        at = stop
    return (first if len(bodies) == 1 else (PUBLISH_RUN, flags, topic, packet_ids if flags else [], bodies)), at


def _cut_alike(
    begin: bytes, flags: int, gap: int, rest: memoryview, stride: int, packet_ids: list[int], bodies: list[bytes]
) -> int:
    """Add the packet ids and bodies of the PUBLISHes at the beginning of `rest` that begin with `begin`, which ends with the
    topic, so that each has `stride` bytes; return how many they are.
    """
    none = b"\0" * (gap & 1)
    shape = f">{len(begin)}s{'H' if flags else '0s'}{len(none)}s{stride - len(begin) - gap}s"
    add, add_id = bodies.append, packet_ids.append
    before = len(bodies)
    for each, packet_id, properties, body in struct.iter_unpack(shape, rest[: len(rest) - len(rest) % stride]):
        if each != begin or properties != none or (flags and not packet_id):
            break
        add_id(packet_id)  # of no meaning at QoS 0
        add(body)
    return len(bodies) - before


Plain: TypeAlias = tuple[int, bytes, bytes, Sequence[bytes], int]
"""PUBLISHes of the kind that runs consist of: QoS, topic, PUBACKs (none at QoS 0), bodies, and how many bytes they take."""


def plain(data: bytes, side: Side, packet_bytes_max: int) -> Plain | None:
    """Return what `data` is where it is PUBLISHes of one length that could be a run, or one of that kind; else None.

    Behind them may be the beginning of another one that is like them. About 0.5 us for one, and 1 us and 0.06 us for each of
    several: a third of what `decode` costs for it. None may also mean that `decode` has to say what is wrong with it, or that
    its length is in more than two bytes.
    """
    size = len(data)
    if size <= _PUBLISH_BYTES_MIN:
        return None
    length, start = data[1], 2
    if length > 127:
        if not 0 < data[2] < 128:
            return None
        length, start = length - 128 | data[2] << 7, 3
        if start + length > packet_bytes_max:
            return None
    stride = start + length
    gap = side.gaps[data[0]]
    topic_stop = start + 2 + (data[start] << 8 | data[start + 1])
    body_from = topic_stop + gap - 1
    if stride > size or not gap or body_from > stride:
        return None
    topic = data[start + 2 : topic_stop]
    if side.is_v5 and not topic:  # but an alias
        return None
    if stride == size:
        if side.is_v5 and data[body_from - 1]:  # properties
            return None
        if gap < _GAP_WITH_ID:
            return 0, topic, b"", (data[body_from:],), size
        packet_id = data[topic_stop : topic_stop + 2]
        return None if packet_id == b"\0\0" else (1, topic, _PUBACK + packet_id, (data[body_from:],), size)
    begin, count = data[:topic_stop], size // stride
    used = count * stride
    if not begin.startswith(data[used : used + topic_stop]):
        return None
    fields = _begins_and_bodies(data, count, (topic_stop, body_from, stride))
    # What each has at one place is a slice with a stride: no object for each.
    if fields[::2].count(begin) != count or (side.is_v5 and data[body_from - 1 : used : stride].count(0) != count):
        return None
    if gap < _GAP_WITH_ID:
        return 0, topic, b"", fields[1::2], used
    acks = _acks(_PUBACK[0], data[topic_stop:used:stride], data[topic_stop + 1 : used : stride])
    return None if _PUBACK_WITHOUT_ID in acks else (1, topic, acks, fields[1::2], used)


def _begins_and_bodies(data: bytes, count: int, shape: tuple[int, int, int]) -> Sequence[bytes]:
    """Return of each of `count` packets at the beginning of `data` what goes before its packet id, and its body, in turn.

    `shape` is where the former ends in a packet, where the latter begins, and where that ends.
    """
    if count <= _BLOCK:
        return _cutter(count, shape).unpack_from(data)
    blocks, rest = divmod(count, _BLOCK)
    edge = blocks * _BLOCK * shape[2]
    fields = chain.from_iterable(_cutter(_BLOCK, shape).iter_unpack(memoryview(data)[:edge]))
    return *fields, *_cutter(rest, shape).unpack_from(data, edge)


@lru_cache(maxsize=256)
def _cutter(count: int, shape: tuple[int, int, int]) -> struct.Struct:
    """Return what cuts `count` packets as `_begins_and_bodies` does: one call for all of them."""
    begin_stop, body_from, stop = shape
    return struct.Struct(f"{begin_stop}s{body_from - begin_stop}x{stop - body_from}s" * count)


def count(packets: Iterable[Packet]) -> int:
    """Return how many packets there are, each PUBLISH of a run by itself."""
    found = 0
    for packet in packets:
        found += len(packet[4]) if packet[0] == PUBLISH_RUN else 1
    return found


def apart(packets: Iterable[Packet]) -> list[Packet]:
    """Return packets with each PUBLISH of a run by itself."""
    each_by_itself: list[Packet] = []
    for packet in packets:
        if packet[0] == PUBLISH_RUN:
            _, flags, topic, packet_ids, bodies = packet
            each_by_itself += [
                (PUBLISH, flags, topic, packet_id, body)
                for packet_id, body in zip(packet_ids or [0] * len(bodies), bodies, strict=True)
            ]
        else:
            each_by_itself.append(packet)
    return each_by_itself


def _publish_with(buffer: bytes, header: int, topic: bytes, packet_id: int, at: int, stop: int) -> Packet:
    """Return the item of a PUBLISH whose property length stands at `at` (MQTT 5.0, 3.3.2.3)."""
    length, start = read_varint(buffer[at : min(at + 4, stop)], 0, "property length")
    start += at
    if start + length > stop:
        raise MalformedPacket(f"a PUBLISH announces {length} bytes of properties, and has {stop - start} left")
    properties = buffer[start : start + length]
    return (PUBLISH_WITH, header & 15, topic, packet_id, buffer[start + length : stop], properties)


def _ack_with(kind: int, packet_id: int, rest: bytes) -> Packet:
    """Return the item of an ack that goes on behind its packet id (MQTT 5.0, 3.4.2.1)."""
    reason = rest[0]
    check_reason(kind, reason)
    if len(rest) > 1:
        length, at = read_varint(rest, 1, "property length")
        if at + length != len(rest):
            raise MalformedPacket(f"a {NAMES[kind]} announces {length} bytes of properties, and has {len(rest) - at}")
        parse_properties(rest[at:], kind)
    return (kind, packet_id, reason)


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
    """Return where the body of the packet at `at` starts and how long it is, for a length of two to four bytes (1.5.5).

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
    raise MalformedPacket("a remaining length goes on past its fourth byte (1.5.5)")


def _refused(header: int, is_v5: bool) -> ProtocolError:
    """Return what is wrong with the first byte of a packet."""
    kind, flags = header >> 4, header & 15
    name = NAMES[kind]
    if kind == PUBLISH:
        if flags & 6 == 6:
            return MalformedPacket("a PUBLISH has QoS 3; use 0, 1 or 2 [MQTT-3.3.1-4]")
        return MalformedPacket("a PUBLISH at QoS 0 has DUP set; it can't be sent twice [MQTT-3.3.1-2]")
    if not kind or (kind == AUTH and not is_v5):
        return MalformedPacket(f"a packet of type {kind} came; there is no such packet (2.1.2)")
    if flags != _FLAGS.get(kind, 0):
        expected = _FLAGS.get(kind, 0)  # [MQTT-3.6.1-1], [MQTT-3.8.1-1], [MQTT-3.10.1-1], [MQTT-3.14.1-1]
        wrong = f"a {name} has the flags {flags:#06b} in its fixed header, not {expected:#06b}"
        return MalformedPacket(f"{wrong} [MQTT-2.1.3-1] 3.1.1:[MQTT-2.2.2-2]")
    return ProtocolError(f"a {name} came from the side that doesn't send it (2.1.2)")


def _short(header: int, length: int) -> MalformedPacket:
    return MalformedPacket(f"a {NAMES[header >> 4]} ends within its fields; its remaining length is {length} [MQTT-3.3.2-1]")


def _not_empty(header: int, length: int) -> MalformedPacket:
    return MalformedPacket(f"a {NAMES[header >> 4]} has nothing behind its fixed header, not {length} bytes")


# --- encoders ---------------------------------------------------------------------------------------------------------

PINGRESP_BYTES: Final = bytes((PINGRESP << 4, 0))

_HEAD: Final = struct.Struct(">BBH")
"""Type and flags, a length of one byte, and the first field: the packet id of an ack, the topic's length of a PUBLISH."""

_ACKS_JOINED_MAX: Final = 16
"""Up to so many acks, packing one by one is faster than filling a template (measured)."""


def encode_connack(session_present: bool, code: ConnectCode) -> bytes:
    """Return a CONNACK of MQTT 3.1.1 (3.2)."""
    assert not (session_present and code), code  # 3.1.1:[MQTT-3.2.2-4]
    return bytes((CONNACK << 4, 2, session_present, code))


def encode_connack_5(session_present: bool, reason: ReasonCode, properties: Mapping[Property, Any]) -> bytes:
    """Return a CONNACK of MQTT 5.0 (3.2)."""
    assert not (session_present and reason), reason  # [MQTT-3.2.2-6]
    return _packet(CONNACK << 4, bytes((session_present, reason)) + write_properties(properties))


def encode_refusal(error: ProtocolError, level: int, why: str = "") -> bytes:
    """Return the CONNACK that answers a refused CONNECT, in the format of the version that the client asked for. MQTT 5.0 has
    a reason string for it, unless `why` is empty.

    In MQTT 3.1.1 only a `ConnectRefused` has an answer; for any other error nothing is returned 3.1.1:[MQTT-3.1.4-1].
    """
    if level == V5_0 or (isinstance(error, UnsupportedVersion) and error.is_v5):
        return encode_connack_5(False, error.reason, {Property.REASON_STRING: why} if why else {})
    return encode_connack(False, error.code) if isinstance(error, ConnectRefused) else b""


def encode_disconnect(reason: ReasonCode, why: str = "") -> bytes:
    """Return a DISCONNECT of MQTT 5.0 (3.14), with a reason string unless it is empty."""
    if not why:
        return bytes((DISCONNECT << 4, 1, reason))
    return _packet(DISCONNECT << 4, bytes((reason,)) + write_properties({Property.REASON_STRING: why}))


def encode_ack(kind: int, packet_id: int, reason: ReasonCode, why: str = "") -> bytes:
    """Return an ack of MQTT 5.0 that says more than success, with a reason string unless it is empty."""
    properties = write_properties({Property.REASON_STRING: why}) if why else b""
    return _packet(kind << 4 | _FLAGS.get(kind, 0), U16.pack(packet_id) + bytes((reason,)) + properties)


def _packet(header: int, body: bytes) -> bytes:
    return bytes((header,)) + write_varint(len(body)) + body


def encode_acks(kind: int, packet_ids: Sequence[int]) -> bytes:
    """Return one ack of type `kind` (PUBACK, PUBREC, PUBREL, PUBCOMP, UNSUBACK) for each packet id, in their order.

    Costs 0.02 us per ack in a batch of hundreds, 0.2 us for one alone.
    """
    header = kind << 4 | _FLAGS.get(kind, 0)
    count = len(packet_ids)
    if count == 1:
        return _HEAD.pack(header, 2, packet_ids[0])
    if count <= _ACKS_JOINED_MAX:
        pack = _HEAD.pack
        return b"".join([pack(header, 2, packet_id) for packet_id in packet_ids])
    ids = struct.pack(f">{count}H", *packet_ids)
    return _acks(header, ids[0::2], ids[1::2])


def _acks(header: int, high: bytes, low: bytes) -> bytes:
    """Return acks by the high and the low bytes of their packet ids: no object is made for each."""
    acks = bytearray(bytes((header, 2, 0, 0)) * len(high))
    acks[2::4] = high
    acks[3::4] = low
    return bytes(acks)


def encode_suback(packet_id: int, codes: Iterable[int], is_v5: bool = False) -> bytes:
    """Return a SUBACK: for each filter, in the order of the SUBSCRIBE, what came of it [MQTT-3.8.4-6] 3.1.1:[MQTT-3.9.3-2]."""
    return _packet(SUBACK << 4, U16.pack(packet_id) + b"\0" * is_v5 + bytes(codes))


def encode_unsuback(packet_id: int) -> bytes:
    """Return an UNSUBACK of MQTT 3.1.1 (3.11)."""
    return _HEAD.pack(UNSUBACK << 4, 2, packet_id)


def encode_unsuback_5(packet_id: int, codes: Iterable[int]) -> bytes:
    """Return an UNSUBACK of MQTT 5.0: for each filter, in the order of the UNSUBSCRIBE, what came of it [MQTT-3.11.3-1]."""
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
        body: the message; with the topic at most `gateway.protocol.fields.REMAINING_BYTES_MAX` less 4.
        qos: 0, 1 or 2.
        retain: whether it answers a new subscription [MQTT-3.3.1-8].
        dup: whether it was sent before; never at QoS 0 [MQTT-3.3.1-2].
        packet_id: 1 to 65,535 at QoS 1 and 2, 0 at QoS 0 [MQTT-2.2.1-2] 3.1.1:[MQTT-2.3.1-5].
        properties: in MQTT 5.0 what `write_properties` returns, at least one byte; in MQTT 3.1.1 nothing.
    """
    assert 0 <= qos <= 2, qos
    assert bool(qos) == bool(packet_id), (qos, packet_id)
    assert qos or not dup
    head = encode_publish_head(topic, len(properties) + len(body), dup << 3 | qos << 1 | retain)
    return b"".join((head, U16.pack(packet_id) if qos else b"", properties, body))


def encode_publish_head(topic: bytes, body_bytes: int, flags: int) -> bytes:
    """Return a PUBLISH up to where its packet id stands (QoS 1 and 2) or what follows that (QoS 0).

    So subscribers who get one message under packet ids of their own share everything else of it.

    Args:
        topic: as in `encode_publish`.
        body_bytes: the length of the body, and in MQTT 5.0 of the properties.
        flags: as `decode` returns them.
    """
    length = 2 + len(topic) + (2 if flags & 6 else 0) + body_bytes
    if length < 128:
        return _HEAD.pack(PUBLISH << 4 | flags, length, len(topic)) + topic
    return bytes((PUBLISH << 4 | flags,)) + write_varint(length) + U16.pack(len(topic)) + topic
