"""Runs: PUBLISHes that follow each other and differ only in their packet ids and bodies; PUBACKs and PINGREQs in a row.

What is the same for all packets of a run is decoded, routed and encoded once. A run is one `Packet` of the type `PUBLISH_RUN`,
`PUBACK_RUN` or `PING_RUN`. A subscriber that gets many messages at once mostly acknowledges them at once. No client needs
several PINGREQs in a row: the run keeps a flood of them cheap.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from typing import Final

from penstock.gateway.protocol.packets import PUBACK, PUBACK_RUN, PUBLISH, PUBLISH_RUN, Packet

RUN_MAX: Final = 4096
"""The maximum number of PUBLISHes in a run, but for those that one call cuts."""

PUBACK_BEGIN: Final = b"\x40\x02"
"""The fixed header of a PUBACK without a reason code."""

_PUBACKS: Final = re.compile(rb"(?:\x40\x02..){1,512}", re.DOTALL)

_PINGS: Final = re.compile(rb"(?:\xc0\x00)+")

_ALIKE_MIN: Final = 8
"""`cut_run` cuts PUBLISHes of one length with one call only if the rest of the read has room for at least this many. For fewer
the call costs more than it saves."""


def cut_run(
    buffer: bytes, at: int, packet_bytes_max: int, first: Packet, last: int, field: bytes, gap: int
) -> tuple[Packet, int]:
    """Return the PUBLISH `first` and all PUBLISHes from `at` on that belong to its run, and the offset after them.

    A packet that is not in order ends the run, so that `decode` reports what is wrong with it. When two packets in a row have
    the same remaining length, one call cuts all further packets of that length.

    Args:
        buffer: as in `decode`.
        at: the offset after `first`.
        packet_bytes_max: as in `decode`.
        first: the item for a PUBLISH.
        last: the remaining length of `first`.
        field: the topic with its length field.
        gap: the number of bytes between `field` and the body: the packet id, and in MQTT 5.0 a property length of 0.
    """
    _, flags, topic, packet_id, body = first
    header = PUBLISH << 4 | flags
    has_properties = gap & 1
    packet_ids, bodies = [packet_id], [body]
    add, add_id = bodies.append, packet_ids.append
    width, end = len(field), len(buffer)
    while at + 1 < end and buffer[at] == header and len(bodies) < RUN_MAX:
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
        stride = stop - at
        if length == last and end - stop >= _ALIKE_MIN * stride:
            rest = memoryview(buffer)[stop : stop + RUN_MAX * stride]
            stop += stride * _cut_alike(buffer[at:topic_stop], flags, gap, rest, stride, packet_ids, bodies)
        last = length
        at = stop
    return (first if len(bodies) == 1 else (PUBLISH_RUN, flags, topic, packet_ids if flags else [], bodies)), at


def _cut_alike(
    begin: bytes, flags: int, gap: int, rest: memoryview, stride: int, packet_ids: list[int], bodies: list[bytes]
) -> int:
    """Cut PUBLISHes of `stride` bytes out of `rest` until one doesn't begin with `begin`, and return how many there are.

    `begin` is everything up to the end of the topic. The packet ids and bodies are added to the two lists.
    """
    none = b"\0" * (gap & 1)
    shape = f">{len(begin)}s{'H' if flags else '0s'}{len(none)}s{stride - len(begin) - gap}s"
    add, add_id = bodies.append, packet_ids.append
    before = len(bodies)
    for each, packet_id, properties, body in struct.iter_unpack(shape, rest[: len(rest) - len(rest) % stride]):
        if each != begin or properties != none or (flags and not packet_id):
            break
        add_id(packet_id)  # The caller ignores it at QoS 0.
        add(body)
    return len(bodies) - before


def cut_pubacks(buffer: bytes, at: int) -> tuple[Packet, int]:
    """Return the item for the PUBACKs without reason codes from `at` on, where there is one, and the offset after them.

    A packet id of 0 ends the run, so that `decode` reports it.
    """
    found = _PUBACKS.match(buffer, at)
    assert found is not None, "a PUBACK begins here"
    end = found.end()
    packet_ids = struct.unpack(f">{(end - at) // 2}H", found[0])[1::2]
    if 0 in packet_ids:
        packet_ids = packet_ids[: packet_ids.index(0)]
    item = (PUBACK_RUN, packet_ids) if len(packet_ids) > 1 else (PUBACK, packet_ids[0])
    return item, at + 4 * len(packet_ids)


def end_of_pings(buffer: bytes, at: int) -> int:
    """Return the offset after the PINGREQs from `at` on; `at` if there is none."""
    found = _PINGS.match(buffer, at)
    return found.end() if found else at


def split_runs(packets: Iterable[Packet]) -> list[Packet]:
    """Return the packets with each run of PUBLISHes split."""
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
