"""A message as the protocol has it, and as it is stored: the same one, so that MQTT, the native API and this see it alike.

user_properties            user properties
tag, keys, message_group   of the same names
delivery_timestamp         deliver_at_ms
born_host, born_timestamp  of the same names; of a message from MQTT, when it was stored
lite_topic                 the last levels of the topic
message_id                 position in the log, 16 hexadecimal digits: the clients' own ids are not kept
"""

from __future__ import annotations

import zlib
from hashlib import md5, sha1
from typing import Any

from penstock.pop.core.checkpoint import Entry
from penstock.pop.rocketmq.names import encode, lite_topic_of, topic_of_message
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import pb
from penstock.store.record import Flag, Properties, Record, decode_properties

PRODUCER = "rocketmq:"
"""What stands before the topic as the producer of a half message: who publishes to that topic there may tell its outcome."""

_GZIP_WINDOW = 31

_TYPE = pb.MessageType


def topic_and_body_of(message: Any, bytes_max: int) -> tuple[str, bytes]:
    """Return the topic of a message that is sent, and its body as it was before it was compressed.

    Raises:
        Refused: ILLEGAL_TOPIC, ILLEGAL_LITE_TOPIC, MESSAGE_CORRUPTED, MESSAGE_BODY_TOO_LARGE, or UNSUPPORTED for the encoding.
    """
    return topic_of_message(message), _body_of(message, bytes_max)


def properties_of(message: Any, topic: str) -> Properties:
    """Return the properties of a message that is sent; `producer` is set for half of a transaction.

    Raises:
        Refused: ILLEGAL_MESSAGE_TAG, ILLEGAL_MESSAGE_KEY, ILLEGAL_MESSAGE_GROUP, ILLEGAL_MESSAGE_PROPERTY_KEY,
            ILLEGAL_DELIVERY_TIME, MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, or UNSUPPORTED for the type.
    """
    system = message.system_properties
    _check_type(system)
    for name, value in message.user_properties.items():
        if not name or "\0" in name or "\0" in value:  # [MQTT-1.5.4-2]: it goes out over MQTT too
            raise Refused(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"the property {name[:40]!r} is empty, or has U+0000 in it")
    if system.HasField("tag") and (not system.tag.strip() or "|" in system.tag):
        raise Refused(Code.ILLEGAL_MESSAGE_TAG, f"the tag {system.tag[:40]!r} is blank, or has '|' in it")
    if not all(key.strip() for key in system.keys):
        raise Refused(Code.ILLEGAL_MESSAGE_KEY, "a key is blank")
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
    """Check that a message has what its type says, and nothing that only another type may have."""
    kind = system.message_type
    if kind not in (_TYPE.NORMAL, _TYPE.FIFO, _TYPE.DELAY, _TYPE.TRANSACTION, _TYPE.LITE):
        raise Refused(Code.UNSUPPORTED, f"messages of the type {kind} are not supported: send NORMAL, FIFO, DELAY, ...")
    if kind == _TYPE.FIFO and not system.message_group.strip():
        raise Refused(Code.ILLEGAL_MESSAGE_GROUP, "a FIFO message needs a message group that isn't blank")
    if kind == _TYPE.DELAY and _ms_of(system.delivery_timestamp) <= 0:
        raise Refused(Code.ILLEGAL_DELIVERY_TIME, "a delayed message needs a delivery timestamp, after 1970")
    if kind == _TYPE.LITE and not system.lite_topic:
        raise Refused(Code.ILLEGAL_LITE_TOPIC, "a lite message needs a lite topic")
    wrong = [
        name
        for name, allowed in (("message_group", _TYPE.FIFO), ("delivery_timestamp", _TYPE.DELAY), ("lite_topic", _TYPE.LITE))
        if system.HasField(name) and kind != allowed
    ]
    if wrong:
        raise Refused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, f"a message of the type {_TYPE.Name(kind)} can't have {', '.join(wrong)}"
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
        raise Refused(Code.MESSAGE_CORRUPTED, f"the body is not gzip: {error}") from error
    if len(unpacked) > bytes_max:
        raise Refused(Code.MESSAGE_BODY_TOO_LARGE, f"the body has more than {bytes_max} bytes when it is unpacked")
    if not unpacker.eof:
        raise Refused(Code.MESSAGE_CORRUPTED, "the body's gzip ends too early")
    return unpacked


def _check_digest(digest: Any, body: bytes) -> None:
    kinds = pb.DigestType
    if digest.type == kinds.CRC32:
        # The clients disagree on how it is written: in digits of base 16 or 10, with zeros before it or without.
        crc = zlib.crc32(body)
        fits = digest.checksum.lower().lstrip("0") in (f"{crc:x}", str(crc), "" if crc == 0 else None)
    elif digest.type in (kinds.MD5, kinds.SHA1):
        fits = digest.checksum.lower() == (md5 if digest.type == kinds.MD5 else sha1)(body).hexdigest()
    else:
        fits = True
    if not fits:
        raise Refused(Code.MESSAGE_CORRUPTED, "the body is not what its digest says")


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
    """Return a stored message as it goes over the wire.

    Args:
        record: the message.
        entry, handle, invisible_ms: of the delivery; left out for the half message that a producer is asked about.
        store_host: this node.
        lite_parent: the topic of which it is a lite topic's message; empty where it goes out under its own topic.
        dead_of: the filter by which a group got it before it was a dead letter; empty where it is none.
    """
    properties = decode_properties(record.properties)
    topic = record.topic.decode()
    message_id = f"{record.position:016x}"
    system = pb.SystemProperties(
        keys=properties.keys,
        message_id=message_id,
        # MD5: the one digest that the official clients spell alike.
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
        system.dead_letter_queue.CopyFrom(pb.DeadLetterQueue(topic=encode(dead_of), message_id=message_id))
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
