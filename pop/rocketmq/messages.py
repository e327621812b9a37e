"""A message of the protocol as a stored message, and back. MQTT and the native API see the same stored message.

user_properties            user properties
tag, keys, message_group   fields of the same names
delivery_timestamp         deliver_at_ms
born_host, born_timestamp  fields of the same names; for a message from MQTT, the time at which it was stored
lite_topic                 the last levels of the topic
message_id                 position in the log, as 16 hexadecimal digits; the node does not keep the clients' own ids
"""

from __future__ import annotations

import zlib
from hashlib import md5, sha1
from typing import Any

from penstock.pop.core.checkpoint import Entry
from penstock.pop.core.names import message_id
from penstock.pop.rocketmq.names import encode, lite_topic_of, topic_of_message
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import pb
from penstock.store.properties import Properties, decode_properties
from penstock.store.record import Flag, Record

PRODUCER = "rocketmq:"
"""Prefix of the producer of a half message, before its topic. Each client that publishes to the topic may tell the outcome."""

_GZIP_WINDOW = 31

_TYPE = pb.MessageType


def topic_and_body_of(message: Any, bytes_max: int) -> tuple[str, bytes]:
    """Return the topic of a message from a client, and its uncompressed body.

    Raises:
        Refused: ILLEGAL_TOPIC, ILLEGAL_LITE_TOPIC, MESSAGE_CORRUPTED, MESSAGE_BODY_TOO_LARGE, or UNSUPPORTED for the encoding.
    """
    return topic_of_message(message), _body_of(message, bytes_max)


def properties_of(message: Any, topic: str) -> Properties:
    """Return the properties of a message from a client. `producer` is set if the message is half of a transaction.

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
    return Properties(
        sorted(message.user_properties.items()),
        system.tag,
        system.message_group,
        _ms_of(system.delivery_timestamp) if system.HasField("delivery_timestamp") else 0,
        producer=PRODUCER + topic if system.message_type == _TYPE.TRANSACTION else "",
        keys=list(system.keys),
        born_host=system.born_host,
        born_ms=max(_ms_of(system.born_timestamp), 0),
    )


def _check_type(system: Any) -> None:
    """Check that a message has the fields of its type, and no fields that only another type may have."""
    kind = system.message_type
    if kind not in (_TYPE.NORMAL, _TYPE.FIFO, _TYPE.DELAY, _TYPE.TRANSACTION, _TYPE.LITE):
        raise Refused(
            Code.UNSUPPORTED, f"the message type {kind} is not supported: use NORMAL, FIFO, DELAY, TRANSACTION or LITE"
        )
    if kind == _TYPE.FIFO and not system.message_group.strip():
        raise Refused(Code.ILLEGAL_MESSAGE_GROUP, "a FIFO message needs a message group, and the group is blank")
    if kind == _TYPE.DELAY and _ms_of(system.delivery_timestamp) <= 0:
        raise Refused(Code.ILLEGAL_DELIVERY_TIME, "a DELAY message needs a delivery timestamp after 1970")
    if kind == _TYPE.LITE and not system.lite_topic:
        raise Refused(Code.ILLEGAL_LITE_TOPIC, "a LITE message needs a lite topic")
    wrong = [
        name
        for name, allowed in (("message_group", _TYPE.FIFO), ("delivery_timestamp", _TYPE.DELAY), ("lite_topic", _TYPE.LITE))
        if system.HasField(name) and kind != allowed
    ]
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
    dead_of: str = "",
) -> Any:
    """Return a stored message as the protocol has it.

    Args:
        record: The stored message.
        entry, handle, invisible_ms: The delivery. They are left out for a half message in a question to its producer.
        store_host: Address of this node.
        lite_parent: Parent topic of the message's lite topic, or empty to name the message's own topic.
        dead_of: Filter by which a group got the message before it became a dead letter, or empty if it is no dead letter.
    """
    properties = decode_properties(record.properties)
    topic = record.topic.decode()
    own_id = message_id(record.position)
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
    system.born_timestamp.FromMilliseconds(properties.born_ms or record.store_ms)
    system.store_timestamp.FromMilliseconds(record.store_ms)
    if properties.tag:
        system.tag = properties.tag
    if properties.message_group:
        system.message_group = properties.message_group
    if properties.deliver_at_ms:
        system.delivery_timestamp.FromMilliseconds(properties.deliver_at_ms)
    if lite_parent:
        system.lite_topic = lite_topic_of(lite_parent, topic)
    if dead_of:
        system.dead_letter_queue.CopyFrom(pb.DeadLetterQueue(topic=encode(dead_of), message_id=own_id))
    if entry is not None:
        system.receipt_handle = handle
        system.queue_offset = entry.offset
        system.delivery_attempt = entry.attempt
        system.invisible_duration.FromMilliseconds(invisible_ms)
    return pb.Message(
        topic=pb.Resource(name=encode(lite_parent or topic)),
        user_properties=dict(properties.user),
        system_properties=system,
        body=record.body,
    )


def _type_of(flags: int, properties: Properties, lite_parent: str) -> Any:
    if flags & Flag.HALF:
        return _TYPE.TRANSACTION
    if flags & Flag.DELAYED:
        return _TYPE.DELAY
    if lite_parent:
        return _TYPE.LITE
    return _TYPE.FIFO if properties.message_group else _TYPE.NORMAL


def _ms_of(timestamp: Any) -> int:
    return int(timestamp.seconds) * 1000 + int(timestamp.nanos) // 1_000_000
