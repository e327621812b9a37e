"""The decoder: bytes in, packets out. It knows no socket and keeps no state.

`decode` is the hot path. It cuts a whole receive buffer into packets. PUBLISHes and acks come out parsed; others come out as
bodies that `connect`, `subscribe` and `disconnect` parse. PUBLISHes that differ only in their packet ids and bodies come
out as one run (`runs`), because a client that sends many at once mostly sends them to one topic. Clauses in brackets are those
of MQTT 5.0. Where MQTT 3.1.1 has the same rule under another number, that number follows as 3.1.1:[...].

Both versions share the framing. Each has a branch of its own for PUBLISH, so that neither pays for the other. In MQTT 5.0
properties follow the topic: one length byte of 0 in nearly every message. If there are properties, they come out unparsed.
"""

from __future__ import annotations

from typing import Final

from penstock.gateway.protocol.errors import MalformedPacket, PacketIdMissing, PacketTooLarge, ProtocolError, check_reason
from penstock.gateway.protocol.fields import REMAINING_BYTES_MAX, read_varint
from penstock.gateway.protocol.fixed_header import (
    ACK,
    EMPTY,
    FROM_CLIENT,
    OTHER,
    PUBLISH_ACKED,
    PUBLISH_ACKED_5,
    PUBLISH_PLAIN,
    PUBLISH_PLAIN_5,
    Side,
    header_error,
    long_length,
)
from penstock.gateway.protocol.packets import (
    MALFORMED,
    NAMES,
    PING_RUN,
    PINGREQ,
    PUBACK,
    PUBACK_RUN,
    PUBLISH,
    PUBLISH_RUN,
    PUBLISH_WITH,
    Packet,
)
from penstock.gateway.protocol.properties import parse_properties
from penstock.gateway.protocol.runs import PUBACK_BEGIN, cut_pubacks, cut_run, end_of_pings

PACKET_BYTES_MAX_MIN: Final = 129
"""The least value of `packet_bytes_max`. A packet with a length field of one byte is never larger, so it needs no check."""

PING_HEADER: Final = PINGREQ << 4
PUBACK_HEADER: Final = PUBACK << 4

_NO_RUNS: Final = bytes(256)


def decode(
    buffer: bytes,
    packet_bytes_max: int,
    side: Side = FROM_CLIENT,
    runs: bool = False,
    user_properties_max: int = REMAINING_BYTES_MAX,
    until: int = REMAINING_BYTES_MAX,
) -> tuple[list[Packet], int]:
    """Return all complete packets at the beginning of `buffer`, and the number of bytes that they take.

    No error is raised for malformed bytes: the last item is then `(MALFORMED, error)`.

    Args:
        buffer: received bytes that begin with a packet. They must be `bytes`, so that slices of them are `bytes`, too.
        packet_bytes_max: the size of the largest packet accepted, fixed header included; at least `PACKET_BYTES_MAX_MIN`.
        side: the packets that may come, for example `FROM_CLIENT_5`.
        runs: whether to return PUBLISHes that differ only in packet ids and bodies as one item, and PUBACKs or PINGREQs in a
            row.
        user_properties_max: the most user properties of an ack. Those of other packets are not parsed here.
        until: the offset from which on no further packet begins. The run that has begun before goes on.
    """
    assert packet_bytes_max >= PACKET_BYTES_MAX_MIN, packet_bytes_max
    shapes, is_v5, gaps = side
    if not runs:
        gaps = _NO_RUNS
    packets: list[Packet] = []
    add = packets.append
    end = len(buffer)
    last = min(end - 2, until - 1)
    at = 0
    try:
        while at <= last:
            header = buffer[at]
            length = buffer[at + 1]
            start = at + 2
            if length > 127:
                if start < end and (more := buffer[start]) < 128:  # Two bytes, up to 16,383: no call is needed.
                    length += (more << 7) - 128
                    start += 1
                else:
                    start, length = long_length(buffer, at, end)
                    if not start:
                        break
                if is_v5 and not buffer[start - 1]:
                    raise MalformedPacket(f"A remaining length of {length} has more bytes than it needs [MQTT-1.5.5-1].")
                if start + length - at > packet_bytes_max:
                    raise PacketTooLarge(start + length - at, packet_bytes_max, _topic(buffer, header, start))
            stop = start + length
            shape = shapes[header]
            if stop > end:
                if not shape:  # Refuse these bytes now rather than wait for the rest of something that is no packet.
                    raise header_error(header, is_v5)
                break
            if shape == PUBLISH_ACKED:
                if length < 4:
                    raise _short(header, length)
                topic_from = start + 2
                topic_stop = topic_from + (buffer[start] << 8 | buffer[start + 1])
                body_from = topic_stop + 2
                if body_from > stop:
                    raise _short(header, length)
                packet_id = buffer[topic_stop] << 8 | buffer[topic_stop + 1]
                if not packet_id:
                    raise PacketIdMissing(header >> 4)
                add((PUBLISH, header & 15, buffer[topic_from:topic_stop], packet_id, buffer[body_from:stop]))
            elif shape == ACK:
                if length != 2 and (length < 2 or not is_v5):
                    raise MalformedPacket(f"A {NAMES[header >> 4]} has 2 bytes after its fixed header, not {length}.")
                packet_id = buffer[start] << 8 | buffer[start + 1]
                if not packet_id:
                    raise PacketIdMissing(header >> 4)
                if length == 2:
                    if runs and header == PUBACK_HEADER and buffer.startswith(PUBACK_BEGIN, stop) and at + 4 == stop <= end - 4:
                        run, stop = cut_pubacks(buffer, at)
                        add(run)
                    else:
                        add((header >> 4, packet_id))
                else:
                    add(_ack_with(header >> 4, packet_id, buffer[start + 2 : stop], user_properties_max))
            elif shape == PUBLISH_PLAIN:
                if length < 2:
                    raise _short(header, length)
                topic_from = start + 2
                topic_stop = topic_from + (buffer[start] << 8 | buffer[start + 1])
                if topic_stop > stop:
                    raise _short(header, length)
                add((PUBLISH, header & 15, buffer[topic_from:topic_stop], 0, buffer[topic_stop:stop]))
            elif shape == PUBLISH_ACKED_5:
                if length < 5:
                    raise _short(header, length)
                topic_from = start + 2
                topic_stop = topic_from + (buffer[start] << 8 | buffer[start + 1])
                body_from = topic_stop + 3
                if body_from > stop:
                    raise _short(header, length)
                packet_id = buffer[topic_stop] << 8 | buffer[topic_stop + 1]
                if not packet_id:
                    raise PacketIdMissing(header >> 4)
                if buffer[topic_stop + 2] or topic_stop == topic_from:
                    add(_publish_with(buffer, header, buffer[topic_from:topic_stop], packet_id, topic_stop + 2, stop))
                else:
                    add((PUBLISH, header & 15, buffer[topic_from:topic_stop], packet_id, buffer[body_from:stop]))
            elif shape == PUBLISH_PLAIN_5:
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
            elif shape == OTHER or (shape == EMPTY and not length):
                add((header >> 4, header & 15, buffer[start:stop]))
                if runs and header == PING_HEADER and (after := end_of_pings(buffer, stop)) > stop:
                    packets[-1] = (PING_RUN, 1 + (after - stop) // 2)
                    stop = after
            else:
                raise header_error(header, is_v5) if not shape else _not_empty(header, length)
            if stop < end - 2 and buffer[stop] == header and (gap := gaps[header]) and packets[-1][0] == PUBLISH:
                field = buffer[start:topic_stop]
                if buffer.startswith(field, stop + start - at):
                    run, stop = cut_run(buffer, stop, packet_bytes_max, packets.pop(), length, field, gap - 1)
                    add(run)
            at = stop
    except ProtocolError as error:
        # The traceback refers to this frame and so to `packets`. With it, only the garbage collector would free them.
        add((MALFORMED, error.with_traceback(None)))
    return packets, at


def count_packets(packets: list[Packet]) -> int:
    """Return the number of packets that `decode` has returned, counting each of a run."""
    count = 0
    for packet in packets:
        kind = packet[0]
        if kind == PUBLISH_RUN:
            count += len(packet[4])
        else:
            count += len(packet[1]) if kind == PUBACK_RUN else packet[1] if kind == PING_RUN else 1
    return count


def _publish_with(buffer: bytes, header: int, topic: bytes, packet_id: int, at: int, stop: int) -> Packet:
    """Return the item for a PUBLISH with its property length at `at` (MQTT 5.0, 3.3.2.3)."""
    length, start = buffer[at], at + 1
    if length > 127:
        length, start = read_varint(buffer[at : min(at + 4, stop)], 0, "property length")
        start += at
    if start + length > stop:
        raise MalformedPacket(f"A PUBLISH announces {length} bytes of properties, but {stop - start} bytes are left.")
    properties = buffer[start : start + length]
    return (PUBLISH_WITH, header & 15, topic, packet_id, buffer[start + length : stop], properties)


def _ack_with(kind: int, packet_id: int, rest: bytes, user_properties_max: int) -> Packet:
    """Return the item for an ack that has a reason code after its packet id (MQTT 5.0, 3.4.2.1)."""
    reason = rest[0]
    check_reason(kind, reason)
    if len(rest) > 1:
        length, at = read_varint(rest, 1, "property length")
        if at + length != len(rest):
            raise MalformedPacket(f"A {NAMES[kind]} announces {length} bytes of properties, but has {len(rest) - at}.")
        parse_properties(rest[at:], kind, user_properties_max)
    return (kind, packet_id, reason)


def _topic(buffer: bytes, header: int, start: int) -> bytes:
    """Return what has come of the topic of a PUBLISH whose body begins at `start`; empty for any other packet."""
    if header >> 4 != PUBLISH:
        return b""
    size = int.from_bytes(buffer[start : start + 2], "big")
    return buffer[start + 2 : start + 2 + size]


def _short(header: int, length: int) -> MalformedPacket:
    return MalformedPacket(f"A {NAMES[header >> 4]} ends within its fields. Its remaining length is {length} [MQTT-3.3.2-1].")


def _not_empty(header: int, length: int) -> MalformedPacket:
    return MalformedPacket(f"A {NAMES[header >> 4]} must end after its fixed header, but {length} bytes follow.")
