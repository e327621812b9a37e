"""What both clients get from a pop: the fields of a message, and the list of messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from penstock.pop.client.results import DeadLetter
from penstock.pop.errors import StatusError
from penstock.pop.proto import pop_pb2 as pb

M = TypeVar("M")


class ReceivedMessage:
    """The fields of a message that the node delivered to a group."""

    __slots__ = ("_received", "handle")

    def __init__(self, received: pb.PoppedMessage) -> None:
        self._received = received
        self.handle = received.handle
        """Names this delivery to the node. Moving the deadline of the delivery replaces the handle."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.message_id} {self.topic!r}, {len(self.body)} bytes, attempt {self.attempt}>"

    @property
    def message_id(self) -> str:
        """Position of the message in the log, as 16 hexadecimal digits."""
        return self._received.message_id

    @property
    def topic(self) -> str:
        """MQTT topic to which the message was published."""
        return self._received.topic

    @property
    def body(self) -> bytes:
        """Body of the message."""
        return self._received.body

    @property
    def properties(self) -> dict[str, str]:
        """User properties, as a new dict."""
        return dict(self._received.properties)

    @property
    def tag(self) -> str:
        """Tag of the message, or an empty string."""
        return self._received.tag

    @property
    def message_group(self) -> str:
        """Message group of the message, or an empty string."""
        return self._received.message_group

    @property
    def deduplication_id(self) -> str:
        """Deduplication id of the message, or an empty string."""
        return self._received.deduplication_id

    @property
    def response_topic(self) -> str:
        """Topic to which the publisher wants the reply (MQTT 5.0, 3.3.2.3.5), or an empty string."""
        return self._received.response_topic

    @property
    def correlation_data(self) -> bytes:
        """What a reply must contain, so that the publisher knows its request (MQTT 5.0, 3.3.2.3.6), or no bytes."""
        return self._received.correlation_data

    @property
    def content_type(self) -> str:
        """Description of the body by its publisher (MQTT 5.0, 3.3.2.3.9), or an empty string."""
        return self._received.content_type

    @property
    def stored_ms(self) -> int:
        """When the node stored the message, in ms since 1970 by the node's clock."""
        return self._received.stored_ms

    @property
    def queue_offset(self) -> int:
        """Number of the message in the queue from which it was delivered."""
        return self._received.queue_offset

    @property
    def attempt(self) -> int:
        """Number of this delivery attempt; 1 for the first."""
        return self._received.attempt

    @property
    def visible_at_ms(self) -> int:
        """Deadline of this delivery, in ms since 1970 by the node's clock. After it the message comes back as a new attempt."""
        return self._received.visible_at_ms

    @property
    def origin(self) -> DeadLetter | None:
        """For a message from `$dlq/GROUP`: the group and filter from which it came, and why. None for other messages."""
        return self._received.dead_letter if self._received.HasField("dead_letter") else None


class PoppedMessages(list[M]):
    """The messages that a pop returned, as a list.

    Parameters:
        messages: The messages.
        refused: The handles of the pop's `acks` that the node did not acknowledge, each with the reason. All other handles are
            acknowledged, and that is durable.
    """

    def __init__(self, messages: Iterable[M], refused: Mapping[str, StatusError]) -> None:
        super().__init__(messages)
        self.refused = refused
