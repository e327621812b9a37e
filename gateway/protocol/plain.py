"""Plain reads: PUBLISHes of one length to one topic, cut out of a read at equal distances without decoding each.

Most reads from devices are plain. `cut_plain` recognises them; everything else goes to `decode`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Final, TypeAlias

from penstock.gateway.protocol.encode import join_acks
from penstock.gateway.protocol.fixed_header import GAP_WITH_ID, Side
from penstock.gateway.protocol.packets import PUBACK

_PUBACK: Final = bytes((PUBACK << 4, 2))
_PUBACK_WITHOUT_ID: Final = _PUBACK + b"\0\0"
"""A PUBACK with the packet id 0, which is not allowed. In several PUBACKs in a row these bytes occur nowhere else, either."""
_BLOCK: Final = 64
"""The maximum number of packets that one call cuts."""
PLAIN_MAX: Final = 4096
"""The maximum number of packets in a plain read."""
_PUBLISH_BYTES_MIN: Final = 4
"""The size of the smallest PUBLISH."""

PlainPublishes: TypeAlias = tuple[int, bytes, bytes, Sequence[bytes], int]
"""QoS, topic, PUBACKs, bodies, and the number of bytes that the PUBLISHes take. At QoS 0 the PUBACKs are empty."""


def cut_plain(data: bytes, side: Side, packet_bytes_max: int) -> PlainPublishes | None:
    """Return the PUBLISHes in `data` if it is a plain read, else None.

    A plain read is one PUBLISH, or several of one length to one topic, at QoS 0 or 1 and without properties. The beginning of
    another such PUBLISH may follow. The caller gives a read that is not plain to `decode`; that read may also be malformed, or
    have a length field of more than two bytes, or more packets than are handled at once.
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
    if side.is_v5 and not topic:  # The PUBLISH has an alias.
        return None
    if stride == size:
        if side.is_v5 and data[body_from - 1]:  # It has properties.
            return None
        if gap < GAP_WITH_ID:
            return 0, topic, b"", (data[body_from:],), size
        packet_id = data[topic_stop : topic_stop + 2]
        return None if packet_id == b"\0\0" else (1, topic, _PUBACK + packet_id, (data[body_from:],), size)
    begin, count = data[:topic_stop], size // stride
    used = count * stride
    if count > PLAIN_MAX or not begin.startswith(data[used : used + topic_stop]):
        return None
    fields = _begins_and_bodies(data, count, (topic_stop, body_from, stride))
    # A slice with a stride has the same byte of every packet. No object per packet is made.
    if fields[::2].count(begin) != count or (side.is_v5 and data[body_from - 1 : used : stride].count(0) != count):
        return None
    if gap < GAP_WITH_ID:
        return 0, topic, b"", fields[1::2], used
    acks = join_acks(_PUBACK[0], data[topic_stop:used:stride], data[topic_stop + 1 : used : stride])
    return None if _PUBACK_WITHOUT_ID in acks else (1, topic, acks, fields[1::2], used)


def _begins_and_bodies(data: bytes, count: int, shape: tuple[int, int, int]) -> Sequence[bytes]:
    """Return the begin and the body of each of the first `count` packets of `data`, alternating.

    The begin is everything before the packet id. `shape` holds three offsets in a packet: the end of its begin, the
    start of its body, and its end.
    """
    if count <= _BLOCK:
        return _cutter(count, shape).unpack_from(data)
    blocks, rest = divmod(count, _BLOCK)
    edge = blocks * _BLOCK * shape[2]
    fields = chain.from_iterable(_cutter(_BLOCK, shape).iter_unpack(memoryview(data)[:edge]))
    return *fields, *_cutter(rest, shape).unpack_from(data, edge)


@lru_cache(maxsize=256)
def _cutter(count: int, shape: tuple[int, int, int]) -> struct.Struct:
    """Return a struct that unpacks begins and bodies of `count` packets with one call. `shape` as in `_begins_and_bodies`."""
    begin_stop, body_from, stop = shape
    return struct.Struct(f"{begin_stop}s{body_from - begin_stop}x{stop - body_from}s" * count)
