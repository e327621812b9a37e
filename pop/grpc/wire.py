"""The hot messages of the API, as bytes: what protobuf would write, without an object for each message.

A protobuf object costs 2 us to make and to fill; the fields of a popped message joined by hand cost 1 us, all in all. The
numbers are the fields' of pop.proto (a field's tag is its number << 3 | wire type), and a test holds them to what protobuf
itself writes.
"""

from __future__ import annotations

from binascii import hexlify
from typing import Any

from penstock.pop.core.handle import DELIVERY_DIGITS
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.encoding import CONTINUED, SMALL, VARINTS, text, varint
from penstock.store.record import CHECKPOINT_ENTRY, CRC_FROM, HEADER, HEADER_BYTES, decode_properties

_POSITION_BYTES = 8

_HANDLE = b"\x0a" + bytes([DELIVERY_DIGITS])
_MESSAGE_ID = b"\x12\x10"
_NO_SIZES = (0, 0, 0)
_NAMED_BYTES = len(_HANDLE) + DELIVERY_DIGITS + len(_MESSAGE_ID) + 16
_TOPIC = b"\x1a"
_BODY = b"\x22"
_PROPERTY = b"\x2a"
_MESSAGE_GROUP = b"\x32"
_TAG = b"\x3a"
_STORED_MS = b"\x40"
_QUEUE_OFFSET = b"\x48"
_ATTEMPT = b"\x50"
_VISIBLE_AT_MS = b"\x58"
_DEAD_LETTER = b"\x62"
_MESSAGES = b"\x0a"
"""Of a PopResponse, and of a ConsumeResponse."""

assert DELIVERY_DIGITS < 128, "its length must fit into one byte"


def popped_messages(body: bytes, records: list[bytes | None], handles: bytes, deadline_ms: int, dead: dict[int, Any]) -> bytes:
    """Return the field `messages` of a PopResponse. The hot path: 0.6 us a message that is as long as the one before it
    and of its millisecond, 1.5 us others.

    Args:
        body: entries of the checkpoint.
        records: of each entry; None is left out.
        handles: of the entries, one behind the other, `DELIVERY_DIGITS` each.
        deadline_ms: when the invisible time is over.
        dead: `pb.DeadLetter` by index, of those that are one.
    """
    positions = bytearray(_POSITION_BYTES * len(records))  # big-endian: the columns are turned round, all at once
    for at in range(_POSITION_BYTES):
        positions[at::_POSITION_BYTES] = body[_POSITION_BYTES - 1 - at :: CHECKPOINT_ENTRY.size]
    ids = hexlify(positions)
    unpack, varints, continued = HEADER.unpack_from, VARINTS, CONTINUED
    tail = _VISIBLE_AT_MS + varint(deadline_ms)
    parts: list[bytes] = []
    high, high_bytes = -1, b""
    last, begin = _NO_SIZES, b""
    """What makes a message like the one before it: its sizes, and what its record has in front of the topic. Then no more than
    handle, id, topic, body and offset are its own."""
    front = topic_head = body_head = stored = end = b""
    topic_stop = body_from = 0
    for index, (data, entry) in enumerate(zip(records, CHECKPOINT_ENTRY.iter_unpack(body), strict=True)):
        if data is None:
            continue
        _, offset, _, attempt, _, _ = entry
        if offset < SMALL:
            offset_bytes = varints[offset]
        else:
            if offset >> 14 != high:
                high = offset >> 14
                high_bytes = varint(high)
            offset_bytes = continued[offset & SMALL - 1] + high_bytes
        sizes = (len(data), attempt, len(offset_bytes))
        if sizes != last or data[CRC_FROM:HEADER_BYTES] != begin or index in dead:
            _, _, _, _, topic_len, props_len, stored_ms = unpack(data)
            letter = text(_DEAD_LETTER, dead[index].SerializeToString()) if index in dead else b""
            last = _NO_SIZES if letter or props_len else sizes
            begin = data[CRC_FROM:HEADER_BYTES]
            topic_stop = HEADER_BYTES + topic_len
            body_from = topic_stop + props_len
            length = len(data) - body_from
            topic_head = _TOPIC + varint(topic_len)
            body_head = _BODY + varint(length) if length else b""
            stored = _STORED_MS + varint(stored_ms) + _QUEUE_OFFSET
            if props_len:
                stored = _properties(data[topic_stop:body_from]) + stored
            end = _ATTEMPT + varint(attempt) + tail + letter
            length += topic_len + len(topic_head) + len(body_head) + len(stored) + len(offset_bytes) + len(end)
            front = _MESSAGES + varint(_NAMED_BYTES + length) + _HANDLE
        parts += (
            front,
            handles[DELIVERY_DIGITS * index : DELIVERY_DIGITS * index + DELIVERY_DIGITS],
            _MESSAGE_ID,
            ids[16 * index : 16 * index + 16],
            topic_head,
            data[HEADER_BYTES:topic_stop],
            body_head,
            data[body_from:],
            stored,
            offset_bytes,
            end,
        )
    return b"".join(parts)


def _properties(encoded: bytes) -> bytes:
    properties = decode_properties(encoded)
    parts = []
    for name, value in properties.user:
        entry = text(b"\x0a", name.encode()) + text(b"\x12", value.encode())
        parts.append(_PROPERTY + varint(len(entry)) + entry)
    parts.append(text(_MESSAGE_GROUP, properties.message_group.encode()))
    parts.append(text(_TAG, properties.tag.encode()))
    return b"".join(parts)


SENT_PLAIN = b"\x0a\x14\x0a\x00\x12\x10%016x"
"""An entry of a SendResponse for a message that was stored and has no handles, to be completed by its position."""


def sent(result: pb.SendResult) -> bytes:
    """Return an entry of a SendResponse."""
    return text(_MESSAGES, result.SerializeToString())


STATUS_OK = b"\x0a\x00"
"""An entry of `statuses` that says OK: a message of its defaults is empty."""


def statuses(found: list[pb.Status]) -> bytes:
    """Return an AckResponse, or whatever else has the statuses in its field 1."""
    return b"".join([STATUS_OK if not status.code else text(_MESSAGES, status.SerializeToString()) for status in found])


def serialize(response: Any) -> bytes:
    """Return a response as it goes out: what was written by hand as it is, other messages by protobuf."""
    return response if isinstance(response, bytes) else bytes(response.SerializeToString())
