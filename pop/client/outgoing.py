"""Messages to publish, and what the node returns for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.pop.proto import pop_pb2 as pb


class SendReceipt(NamedTuple):
    """Confirmation that a message is durable."""

    message_id: str
    """Position of the message in the log, as 16 hexadecimal digits."""
    recall_handle: str = ""
    """Handle that cancels a delayed message. Empty for other messages."""
    transaction_handle: str = ""
    """Handle that commits or rolls back a transaction. Empty for messages without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessage:
    """A message to send.

    Parameters:
        topic: MQTT topic (MQTT 5.0, 4.7), without wildcards.
        body: Up to `pop.message_bytes_max` bytes (4 MiB by default).
        properties: Up to 128 pairs of text, each name and value up to 65,535 bytes of UTF-8.
        tag: Kind of the message, for groups that filter by tags.
        message_group: Groups in FIFO order get the messages of one message group in order, one at a time.
        deliver_at_ms: Delivery time in ms since 1970, by the node's clock. 0 or a time in the past: deliver at once.
        delay_ms: Delay in ms from when the node gets the message, instead of `deliver_at_ms`. No clock needs to be right.
        producer: Name of the service that decides on the transaction of which the message is half. The node delivers the
            message when the transaction is committed. Empty: the message has no transaction.

    Raises:
        ValueError: Both `deliver_at_ms` and `delay_ms` are given.
    """

    topic: str
    body: bytes = b""
    properties: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""
    message_group: str = ""
    deliver_at_ms: int = 0
    delay_ms: int = 0
    producer: str = ""

    def __post_init__(self) -> None:
        if self.deliver_at_ms and self.delay_ms:
            raise ValueError("give deliver_at_ms or delay_ms, not both")

    def encoded(self) -> pb.Message:
        """Return the message as the protocol has it."""
        return pb.Message(
            topic=self.topic,
            body=self.body,
            properties=self.properties,
            tag=self.tag,
            message_group=self.message_group,
            deliver_at_ms=self.deliver_at_ms,
            delay_ms=self.delay_ms,
            producer=self.producer,
        )
