"""Responses of the API: the frequent ones as bytes, without a protobuf object for each popped message.

Making and filling a protobuf object costs more than joining the fields by hand. The constants are the fields of pop.proto (the
tag of a field is its number << 3 | wire type). A test checks that protobuf writes the same bytes.
"""

from __future__ import annotations

from binascii import hexlify
from typing import Any

import numpy as np

from penstock.pop.core.deadletters import DeadLetter, DeadLetters
from penstock.pop.core.handle import DELIVERY_DIGITS, Handles
from penstock.pop.core.pops import PopResult
from penstock.pop.core.sender import message_id
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.encoding import CONTINUED, SMALL, VARINTS, text, varint
from penstock.store.bodies import CHECKPOINT_ENTRY
from penstock.store.properties import decode_properties
from penstock.store.record import CRC_FROM, HEADER, HEADER_BYTES, LARGE_BYTES, Record

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
_DEDUPLICATION_ID = b"\x6a"
_RESPONSE_TOPIC = b"\x72"
_CORRELATION_DATA = b"\x7a"
_CONTENT_TYPE = b"\x82\x01"
_INVISIBLE_MS = b"\x28"
_MESSAGES = b"\x0a"
"""Tag of the field `messages` of a PopResponse and a ConsumeResponse."""

assert DELIVERY_DIGITS < 128, "the length of a handle must fit into one byte"


def popped_messages(
    body: bytes, records: list[bytes | None], handles: bytes, deadline_ms: int, invisible_ms: int, dead: dict[int, Any]
) -> bytes:
    """Return the fields `messages` and `invisible_ms` of a PopResponse or a ConsumeResponse.

    This is on the hot path. Messages that have the sizes, properties and store time of the message before them are the fastest.

    Args:
        body: entries of the checkpoint.
        records: the record of each entry's message; an entry with None is left out.
        handles: the joined handles of the entries, `DELIVERY_DIGITS` each.
        deadline_ms: when the invisible time is over, in ms since 1970.
        invisible_ms: how long the messages are invisible.
        dead: the `pb.DeadLetter` of each message that is one, by index.
    """
    positions = bytearray(_POSITION_BYTES * len(records))  # big-endian: all positions are reversed at once, column by column
    for at in range(_POSITION_BYTES):
        positions[at::_POSITION_BYTES] = body[_POSITION_BYTES - 1 - at :: CHECKPOINT_ENTRY.size]
    ids = hexlify(positions)
    unpack, varints, continued = HEADER.unpack_from, VARINTS, CONTINUED
    tail = _VISIBLE_AT_MS + varint(deadline_ms)
    parts: list[bytes | memoryview] = []
    high, high_bytes = -1, b""
    last, begin, properties = _NO_SIZES, b"", b""
    """Sizes of the message before, the part of its record before the topic, and its properties. A message that has the same
    differs only in handle, id, topic, body and offset."""
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
        if (
            sizes != last
            or data[CRC_FROM:HEADER_BYTES] != begin
            or (properties and data[topic_stop:body_from] != properties)
            or index in dead
        ):
            _, _, _, _, topic_len, props_len, stored_ms = unpack(data)
            letter = text(_DEAD_LETTER, dead[index].SerializeToString()) if index in dead else b""
            last = _NO_SIZES if letter else sizes
            begin = data[CRC_FROM:HEADER_BYTES]
            topic_stop = HEADER_BYTES + topic_len
            body_from = topic_stop + props_len
            length = len(data) - body_from
            topic_head = _TOPIC + varint(topic_len)
            body_head = _BODY + varint(length) if length else b""
            stored = _STORED_MS + varint(stored_ms) + _QUEUE_OFFSET
            properties = data[topic_stop:body_from]
            if properties:
                stored = _properties(properties) + stored
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
            data[body_from:] if len(data) < LARGE_BYTES else memoryview(data)[body_from:],
            stored,
            offset_bytes,
            end,
        )
    parts.append(_INVISIBLE_MS + varint(invisible_ms))
    return b"".join(parts)


def _properties(encoded: bytes) -> bytes:
    properties = decode_properties(encoded)
    parts = []
    for name, value in properties.user:
        entry = text(b"\x0a", name.encode()) + text(b"\x12", value.encode())
        parts.append(_PROPERTY + varint(len(entry)) + entry)
    parts.append(text(_MESSAGE_GROUP, properties.message_group.encode()))
    parts.append(text(_TAG, properties.tag.encode()))
    parts.append(text(_DEDUPLICATION_ID, properties.deduplication_id.encode()))
    parts.append(text(_RESPONSE_TOPIC, (properties.response_topic or "").encode()))
    parts.append(text(_CORRELATION_DATA, properties.correlation_data or b""))
    parts.append(text(_CONTENT_TYPE, (properties.content_type or "").encode()))
    return b"".join(parts)


class MessageEncoder:
    """Makes the fields of responses that popped messages take.

    Parameters:
        dead_letters: tells where dead letters came from.
        handles: makes the handles of deliveries.
    """

    def __init__(self, dead_letters: DeadLetters, handles: Handles) -> None:
        self._dead_letters = dead_letters
        self._handles = handles

    def encode(self, result: PopResult) -> bytes:
        """Return the fields `messages` and `invisible_ms` of a PopResponse or a ConsumeResponse."""
        checkpoint = result.checkpoint
        handles = self._handles.deliveries_joined(checkpoint.position, checkpoint.pop_ms, checkpoint.group_id, checkpoint.count)
        origins = self._dead_letters.origins(checkpoint)
        dead = {index: dead_letter(letter, group, origin, "") for index, (letter, group, origin) in origins.items()}
        deadline_ms = checkpoint.deadline_ms
        return popped_messages(checkpoint.body, result.records, handles, deadline_ms, deadline_ms - checkpoint.pop_ms, dead)


def dead_letter(letter: DeadLetter, group: str, topic_filter: str, topic: str) -> pb.DeadLetter:
    """Return a dead letter as a message of the API."""
    return pb.DeadLetter(
        group=group,
        filter=topic_filter,
        attempts=letter.attempts,
        reason=pb.Reason.ValueType(letter.reason),
        failed_ms=letter.failed_ms,
        message_id=message_id(letter.position),
        topic=topic,
        detail=letter.detail,
    )


def stored_message(record: Record) -> pb.PoppedMessage:
    """Return a message as the log has it, without a handle and what else comes of a pop."""
    properties = decode_properties(record.properties)
    return pb.PoppedMessage(
        topic=record.topic.decode(errors="replace"),
        body=record.body,
        properties=dict(properties.user),
        message_group=properties.message_group,
        tag=properties.tag,
        stored_ms=record.store_ms,
        deduplication_id=properties.deduplication_id,
        response_topic=properties.response_topic or "",
        correlation_data=properties.correlation_data or b"",
        content_type=properties.content_type or "",
    )


SENT_PLAIN = b"\x0a\x14\x0a\x00\x12\x10%016x"
"""Entry of a SendResponse for a stored message without handles, to be formatted with the position of the message."""


def sent_plain(positions: list[int]) -> bytes:
    """Return the entries of a SendResponse for stored messages without handles."""
    entry = SENT_PLAIN % 0
    entries = np.frombuffer(entry * len(positions), np.uint8).reshape(-1, len(entry)).copy()
    entries[:, -16:] = np.frombuffer(hexlify(np.array(positions, ">u8").tobytes()), np.uint8).reshape(-1, 16)
    return entries.tobytes()


def sent(result: pb.SendResult) -> bytes:
    """Return an entry of a SendResponse."""
    return text(_MESSAGES, result.SerializeToString())


STATUS_OK = b"\x0a\x00"
"""Entry of `statuses` for the status OK. A protobuf message with default values is empty."""


def statuses(entries: list[pb.Status]) -> bytes:
    """Return an AckResponse, or another response that has statuses in its field 1."""
    return b"".join([STATUS_OK if not status.code else text(_MESSAGES, status.SerializeToString()) for status in entries])


def serialize(response: Any) -> bytes:
    """Return the bytes of a response: bytes that were written by hand as they are, and messages as protobuf writes them."""
    return response if isinstance(response, bytes) else bytes(response.SerializeToString())
