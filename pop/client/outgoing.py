"""Messages to publish, and what the node returns for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.pop.client.durations import Duration, milliseconds
from penstock.pop.proto import pop_pb2 as pb

BOTH_TIMES = "give deliver_at_ms or delay, not both"


class SendReceipt(NamedTuple):
    """Confirmation that a message is durable."""

    message_id: str
    """Position of the message in the log, as 16 hexadecimal digits."""
    recall_handle: str = ""
    """Handle that cancels a delayed message. Empty for other messages."""
    transaction_handle: str = ""
    """Handle that commits or rolls back a transaction. Empty for messages without one."""
    repeated: bool = False
    """Whether the node had the message before, with the same deduplication id. The receipt is that of the first message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessage:
    """A message to send.

    A duration is a number of seconds, or a timedelta.

    Parameters:
        topic: MQTT topic (MQTT 5.0, 4.7), without wildcards.
        body: Up to `pop.message_bytes_max` bytes (4 MiB by default).
        properties: Up to 128 pairs of text, each name and value up to 65,535 bytes of UTF-8.
        tag: Kind of the message, for groups that filter by tags.
        message_group: Groups in FIFO order get the messages of one message group in order, one at a time.
        deliver_at_ms: Delivery time in ms since 1970, by the node's clock. 0 or a time in the past: deliver at once.
        delay: Delay from when the node gets the message, instead of `deliver_at_ms`. No clock needs to be right.
        producer: Name of the service that decides on the transaction of which the message is half. The node delivers the
            message when the transaction is committed. Empty: the message has no transaction.

        deduplication_id: Chosen by the sender, up to 256 bytes of UTF-8. The node stores one message of a topic with this id,
            within `pop.deduplication` (10 minutes by default), and answers a repeated one with the first one's receipt.
            Empty: the message has none.
        deduplication_age: How long ago the message was sent first, at the most; 0 if it was never sent before. If the node
            has forgotten the ids of that time, it refuses the message, and does not store it twice.
        response_topic: Topic for the reply to this message (MQTT 5.0, 3.3.2.3.5). Empty: it has none.
        correlation_data: Names the message in its reply (MQTT 5.0, 3.3.2.3.6), up to 65,535 bytes.
        content_type: Describes the body, such as `application/json`.
        timer_key: Key of a delayed message, up to 255 bytes of UTF-8. If a message of the topic and key is pending, this one
            replaces it, in one step. Empty: the message has none.
        expire_after: Nobody gets the message after this time from when it was sent. 0: it never expires.

    Raises:
        ValueError: Both `deliver_at_ms` and `delay` are given.
    """

    topic: str
    body: bytes = b""
    properties: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""
    message_group: str = ""
    deliver_at_ms: int = 0
    delay: Duration = 0.0
    producer: str = ""
    deduplication_id: str = ""
    deduplication_age: Duration = 0.0
    response_topic: str = ""
    correlation_data: bytes = b""
    content_type: str = ""
    expire_after: Duration = 0.0
    timer_key: str = ""

    def __post_init__(self) -> None:
        if self.deliver_at_ms and self.delay:
            raise ValueError(BOTH_TIMES)

    def encoded(self) -> pb.Message:
        """Return the message as the protocol has it."""
        return encoded_message(
            self.topic,
            self.body,
            self.properties,
            self.tag,
            self.message_group,
            self.deliver_at_ms,
            self.delay,
            self.producer,
            self.deduplication_id,
            self.deduplication_age,
            self.response_topic,
            self.correlation_data,
            self.content_type,
            self.expire_after,
            self.timer_key,
        )


def encoded_message(
    topic: str,
    body: bytes,
    properties: Mapping[str, str] | None = None,
    tag: str = "",
    message_group: str = "",
    deliver_at_ms: int = 0,
    delay: Duration = 0.0,
    producer: str = "",
    deduplication_id: str = "",
    deduplication_age: Duration = 0.0,
    response_topic: str = "",
    correlation_data: bytes = b"",
    content_type: str = "",
    expire_after: Duration = 0.0,
    timer_key: str = "",
) -> pb.Message:
    """Return a message as the protocol has it. The parameters are those of `OutgoingMessage`.

    A client that sends single messages makes no `OutgoingMessage` for each, and sets no field that has its default.

    Raises:
        ValueError: Both `deliver_at_ms` and `delay` are given, a number is too large, or a duration is out of bounds.
        TypeError: A parameter is of another type.
    """
    if body is None:
        raise TypeError("body is None: give bytes, or b'' for a message without a body")
    if deliver_at_ms and delay:
        raise ValueError(BOTH_TIMES)
    delay_ms = milliseconds(delay, "delay") if delay else 0
    age_ms = milliseconds(deduplication_age, "deduplication_age") if deduplication_age else 0
    expire_after_ms = milliseconds(expire_after, "expire_after") if expire_after else 0
    try:
        message = pb.Message(topic=topic, body=body)
        if properties:
            message.properties.update(properties)
        if tag or message_group or deliver_at_ms or delay_ms or producer:
            message.MergeFrom(
                pb.Message(
                    tag=tag, message_group=message_group, deliver_at_ms=deliver_at_ms, delay_ms=delay_ms, producer=producer
                )
            )
        if deduplication_id or response_topic or correlation_data or content_type or expire_after_ms or timer_key:
            message.extras.MergeFrom(
                pb.MessageExtras(
                    deduplication_id=deduplication_id,
                    deduplication_age_ms=age_ms,
                    response_topic=response_topic,
                    correlation_data=correlation_data,
                    content_type=content_type,
                    expire_after_ms=expire_after_ms,
                    timer_key=timer_key,
                )
            )
        return message
    except (TypeError, ValueError, AttributeError) as error:
        _explain(
            topic=topic,
            body=body,
            properties=properties or {},
            tag=tag,
            message_group=message_group,
            deliver_at_ms=deliver_at_ms,
            producer=producer,
            deduplication_id=deduplication_id,
            response_topic=response_topic,
            correlation_data=correlation_data,
            content_type=content_type,
            timer_key=timer_key,
        )
        raise TypeError(f"the message can't be sent: {error}") from error


def decoded_message(message: pb.Message) -> OutgoingMessage:
    """Return a message of the protocol as the one that was sent."""
    extras = message.extras
    return OutgoingMessage(
        topic=message.topic,
        body=message.body,
        properties=dict(message.properties),
        tag=message.tag,
        message_group=message.message_group,
        deliver_at_ms=message.deliver_at_ms,
        delay=message.delay_ms / 1000,
        producer=message.producer,
        deduplication_id=extras.deduplication_id,
        deduplication_age=extras.deduplication_age_ms / 1000,
        response_topic=extras.response_topic,
        correlation_data=extras.correlation_data,
        content_type=extras.content_type,
        expire_after=extras.expire_after_ms / 1000,
        timer_key=extras.timer_key,
    )


_BYTES, _TEXT, _NUMBER, _PAIRS = (bytes,), (str, bytes), (int,), (Mapping,)

_NAMES: dict[tuple[type, ...], str] = {
    _BYTES: "bytes",
    _TEXT: "text",
    _NUMBER: "an integer",
    _PAIRS: "a mapping of text to text",
}

_KINDS: dict[str, tuple[type, ...]] = {
    "body": _BYTES,
    "correlation_data": _BYTES,
    "properties": _PAIRS,
    "deliver_at_ms": _NUMBER,
}
"""The types of the fields of a message that are no text, by which an error says what is wrong."""


def _explain(**fields: object) -> None:
    """Raise an error about the first field of a message that the protocol can't have."""
    for name, value in fields.items():
        kind = _KINDS.get(name, _TEXT)
        if not isinstance(value, kind):
            hint = ": encode text to bytes, such as text.encode()" if kind is _BYTES and isinstance(value, str) else ""
            raise TypeError(f"{name} is {value!r:.80}, but must be {_NAMES[kind]}{hint}")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{name} is {value}, which is too large")
        if isinstance(value, Mapping):
            for key, text in value.items():
                if not (isinstance(key, str) and isinstance(text, str)):
                    raise TypeError(f"the property {key!r:.80} is {text!r:.80}: names and values must be text")
