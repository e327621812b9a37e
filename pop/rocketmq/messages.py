"""A message of the protocol as a stored message, and back. MQTT and the native API see the same stored message.

user_properties            user properties
tag, keys, message_group   fields of the same names
delivery_timestamp         deliver_at_ms
born_host, born_timestamp  fields of the same names; for a message from MQTT, the time at which it was stored
lite_topic                 the last levels of the topic
message_id                 sender_id; for a message from elsewhere, its position in the log, as 16 hexadecimal digits
trace_context              the user property traceparent, as MQTT clients send and get it
orphaned_transaction_recovery_duration   check_after_ms
priority                   priority
user property DELAY        deliver_at_ms, by the 18 levels of RocketMQ
"""

from __future__ import annotations

import zlib
from hashlib import md5, sha1
from typing import Any

from penstock.pop.core.checkpoint import Entry
from penstock.pop.core.sender import message_id
from penstock.pop.rocketmq.names import DEAD_LETTERS_THERE, encode, lite_topic_of, outside, topic_of_message
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import pb
from penstock.store.options import DAY_MS
from penstock.store.properties import Properties, decode_properties
from penstock.store.record import Flag, Record
from penstock.tracing.context import TRACEPARENT

TIMESTAMP_MS_MAX = 253_402_300_799_999
"""The latest time that the protocol can state, which is the end of the year 9999. A client may send later ones."""

PRODUCER = "rocketmq:"
"""Prefix of the producer of a half message, before its topic. Each client that publishes to the topic may tell the outcome."""

DELAY_LEVEL = "DELAY"
"""User property that delays a message by a level, as clients of older protocols do."""

DELAY_LEVELS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1_200, 1_800, 3_600, 7_200)
"""Delays of the levels 1 to 18, as RocketMQ's default `messageDelayLevel` has them."""

_GZIP_WINDOW = 31

_TYPE = pb.MessageType
_TYPES = (_TYPE.NORMAL, _TYPE.FIFO, _TYPE.DELAY, _TYPE.TRANSACTION, _TYPE.LITE, _TYPE.PRIORITY)
_ONLY_FOR = (
    ("message_group", _TYPE.FIFO),
    ("delivery_timestamp", _TYPE.DELAY),
    ("lite_topic", _TYPE.LITE),
    ("priority", _TYPE.PRIORITY),
)
"""Fields that only messages of one type may have."""


def topic_and_body_of(message: Any, bytes_max: int) -> tuple[str, bytes]:
    """Return the topic of a message from a client, and its uncompressed body.

    Raises:
        Refused: ILLEGAL_TOPIC, ILLEGAL_LITE_TOPIC, MESSAGE_CORRUPTED, MESSAGE_BODY_TOO_LARGE, or UNSUPPORTED for the encoding.
    """
    return topic_of_message(message), _body_of(message, bytes_max)


def properties_of(message: Any, topic: str, now_ms: int) -> Properties:
    """Return the properties of a message from a client. `producer` is set if the message is half of a transaction.

    Args:
        message: The message.
        topic: Its MQTT topic.
        now_ms: Present time in ms, from which the levels of the property DELAY count.

    Raises:
        Refused: ILLEGAL_MESSAGE_TAG, ILLEGAL_MESSAGE_KEY, ILLEGAL_MESSAGE_GROUP, ILLEGAL_MESSAGE_PROPERTY_KEY,
            ILLEGAL_DELIVERY_TIME, MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, or UNSUPPORTED for the type.
    """
    system = message.system_properties
    _check_type(system)
    for name, value in message.user_properties.items():
        if not name or "\0" in name or "\0" in value:  # [MQTT-1.5.4-2]: the property goes out over MQTT too.
            raise Refused(
                Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"the property {name[:40]!r} has an empty name, or U+0000 in it: remove it"
            )
    if system.HasField("tag") and (not system.tag.strip() or "|" in system.tag):
        raise Refused(Code.ILLEGAL_MESSAGE_TAG, f"the tag {system.tag[:40]!r} is blank, or has '|' in it: use another tag")
    if not all(key.strip() for key in system.keys):
        raise Refused(Code.ILLEGAL_MESSAGE_KEY, "a key is blank: remove it")
    user = dict(message.user_properties)
    if system.trace_context:
        user[TRACEPARENT] = system.trace_context
    if system.HasField("delivery_timestamp"):
        is_between = system.delivery_timestamp.nanos % 1_000_000 > 0  # rounded up, so that no message is early
        deliver_at_ms = _ms_of(system.delivery_timestamp) + is_between
    else:
        deliver_at_ms = _due_of_level(user.pop(DELAY_LEVEL, ""), system.message_type, now_ms)
    is_half = system.message_type == _TYPE.TRANSACTION
    return Properties(
        sorted(user.items()),
        system.tag,
        system.message_group,
        deliver_at_ms,
        producer=PRODUCER + topic if is_half else "",
        keys=[part for key in system.keys for part in key.split()],
        born_host=system.born_host,
        born_ms=max(_ms_of(system.born_timestamp), 0),
        sender_id=system.message_id,
        check_after_ms=_check_after_ms(system) if is_half else 0,
        priority=system.priority,
    )


def _due_of_level(level: str, kind: int, now_ms: int) -> int:
    """Return when a message with the property DELAY is due, in ms since 1970; 0 without it, and for level 0."""
    if not level or level == "0":
        return 0
    if kind != _TYPE.NORMAL:
        raise Refused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"a message of the type {_TYPE.Name(kind)} may not have the property {DELAY_LEVEL}: only NORMAL messages may",
        )
    if not level.isascii() or not level.isdecimal() or not 0 < int(level[:9]) <= len(DELAY_LEVELS_S):
        raise Refused(
            Code.ILLEGAL_DELIVERY_TIME,
            f"the property {DELAY_LEVEL} is {level[:40]!r}: use a level from 0 to {len(DELAY_LEVELS_S)}, or a DELAY message",
        )
    return now_ms + 1_000 * DELAY_LEVELS_S[int(level) - 1]


def _check_after_ms(system: Any) -> int:
    if not system.HasField("orphaned_transaction_recovery_duration"):
        return 0
    after_ms = int(system.orphaned_transaction_recovery_duration.ToMilliseconds())
    if not 0 <= after_ms <= DAY_MS:
        raise Refused(
            Code.BAD_REQUEST,
            f"orphaned_transaction_recovery_duration is {after_ms} ms: use 0 to {DAY_MS} ms",
        )
    return after_ms


def _check_type(system: Any) -> None:
    """Check that a message has the fields of its type, and no fields that only another type may have."""
    kind = system.message_type
    if kind not in _TYPES:
        raise Refused(Code.UNSUPPORTED, f"the message type {kind} is not supported: use {', '.join(map(_TYPE.Name, _TYPES))}")
    if kind == _TYPE.FIFO and not system.message_group.strip():
        raise Refused(Code.ILLEGAL_MESSAGE_GROUP, "a FIFO message needs a message group, and the group is blank")
    if kind == _TYPE.DELAY and _ms_of(system.delivery_timestamp) <= 0:
        raise Refused(Code.ILLEGAL_DELIVERY_TIME, "a DELAY message needs a delivery timestamp after 1970")
    if kind == _TYPE.PRIORITY and system.priority < 0:
        raise Refused(Code.BAD_REQUEST, f"the priority is {system.priority}: use 0 or more")
    if kind == _TYPE.LITE and not system.lite_topic:
        raise Refused(Code.ILLEGAL_LITE_TOPIC, "a LITE message needs a lite topic")
    wrong = [name for name, allowed in _ONLY_FOR if system.HasField(name) and kind != allowed]
    if wrong:
        raise Refused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"a message of the type {_TYPE.Name(kind)} may not have {', '.join(wrong)}",
        )


def _body_of(message: Any, bytes_max: int) -> bytes:
    system = message.system_properties
    _check_digest(system.body_digest, message.body)
    if system.body_encoding in (pb.Encoding.ENCODING_UNSPECIFIED, pb.Encoding.IDENTITY):
        body: bytes = message.body
        return body
    if system.body_encoding != pb.Encoding.GZIP:
        raise Refused(Code.UNSUPPORTED, f"the body encoding {system.body_encoding} is not supported: use IDENTITY or GZIP")
    unpacker = zlib.decompressobj(_GZIP_WINDOW)
    try:
        unpacked = unpacker.decompress(message.body, bytes_max + 1)
    except zlib.error as error:
        raise Refused(Code.MESSAGE_CORRUPTED, f"the body has the encoding GZIP, but is not gzip: {error}") from error
    if len(unpacked) > bytes_max:
        raise Refused(
            Code.MESSAGE_BODY_TOO_LARGE, f"the uncompressed body has more than {bytes_max} bytes: see pop.message_bytes_max"
        )
    if not unpacker.eof:
        raise Refused(Code.MESSAGE_CORRUPTED, "the gzip data of the body is cut off")
    return unpacked


def _check_digest(digest: Any, body: bytes) -> None:
    kinds = pb.DigestType
    if digest.type == kinds.CRC32:
        # Clients write the checksum in base 16 or 10, with or without leading zeros.
        crc = zlib.crc32(body)
        fits = digest.checksum.lower().lstrip("0") in (f"{crc:x}", str(crc), "" if crc == 0 else None)
    elif digest.type in (kinds.MD5, kinds.SHA1):
        fits = digest.checksum.lower() == (md5 if digest.type == kinds.MD5 else sha1)(body).hexdigest()
    else:
        fits = True
    if not fits:
        raise Refused(Code.MESSAGE_CORRUPTED, "the body does not match its digest")


def message_of(
    record: Record,
    *,
    entry: Entry | None = None,
    handle: str = "",
    invisible_ms: int = 0,
    store_host: str = "",
    lite_parent: str = "",
    namespace: str = "",
    dead_letters_of: str = "",
) -> Any:
    """Return a stored message as the protocol has it.

    Args:
        record: The stored message.
        entry, handle, invisible_ms: The delivery. They are left out for a half message in a question to its producer.
        store_host: Address of this node.
        lite_parent: Parent topic of the message's lite topic, or empty to name the message's own topic.
        namespace: Namespace in which the consumer asked for the message.
        dead_letters_of: Group whose dead letter the message is, as the consumer named the group's topic of dead letters.
    """
    properties = decode_properties(record.properties)
    topic = record.topic.decode()
    own_id = id_of(record.position, properties)
    system = pb.SystemProperties(
        keys=properties.keys,
        message_id=own_id,
        # MD5 is the only digest that all official clients write in the same way.
        body_digest=pb.Digest(type=pb.DigestType.MD5, checksum=md5(record.body).hexdigest().upper()),
        body_encoding=pb.Encoding.IDENTITY,
        message_type=_type_of(record.flags, properties, lite_parent),
        born_host=properties.born_host,
        store_host=store_host,
    )
    system.born_timestamp.FromMilliseconds(min(properties.born_ms or record.store_ms, TIMESTAMP_MS_MAX))
    system.store_timestamp.FromMilliseconds(record.store_ms)
    if properties.tag:
        system.tag = properties.tag
    if properties.message_group:
        system.message_group = properties.message_group
    if properties.deliver_at_ms:
        system.delivery_timestamp.FromMilliseconds(properties.deliver_at_ms)
    if lite_parent:
        system.lite_topic = lite_topic_of(lite_parent, topic)
    if properties.priority:
        system.priority = properties.priority
    user = dict(properties.user)
    if TRACEPARENT in user:
        system.trace_context = user[TRACEPARENT]
    if properties.check_after_ms:
        system.orphaned_transaction_recovery_duration.FromMilliseconds(properties.check_after_ms)
    own_topic = encode(outside(topic, namespace))
    shown_topic = encode(outside(lite_parent, namespace)) or own_topic
    if dead_letters_of:
        shown_topic = DEAD_LETTERS_THERE + dead_letters_of
        system.dead_letter_queue.CopyFrom(pb.DeadLetterQueue(topic=own_topic, message_id=own_id))
    if entry is not None:
        system.receipt_handle = handle
        system.queue_offset = entry.offset
        system.delivery_attempt = entry.attempt
        system.invisible_duration.FromMilliseconds(invisible_ms)
    return pb.Message(
        topic=pb.Resource(resource_namespace=namespace, name=shown_topic),
        user_properties=user,
        system_properties=system,
        body=record.body,
    )


def id_of(position: int, properties: Properties) -> str:
    """Return the id of a message: the one that its sender gave it, as all copies of one message have, or that of the log."""
    return properties.sender_id or message_id(position)


def _type_of(flags: int, properties: Properties, lite_parent: str) -> Any:
    if flags & Flag.HALF:
        return _TYPE.TRANSACTION
    if flags & Flag.DELAYED:
        return _TYPE.DELAY
    if lite_parent:
        return _TYPE.LITE
    if properties.priority:
        return _TYPE.PRIORITY
    return _TYPE.FIFO if properties.message_group else _TYPE.NORMAL


def _ms_of(timestamp: Any) -> int:
    return min(int(timestamp.seconds) * 1000 + int(timestamp.nanos) // 1_000_000, TIMESTAMP_MS_MAX)
