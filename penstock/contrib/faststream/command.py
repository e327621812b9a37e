"""What FastStream publishes: the command of a publication, and a handler's response with options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

from faststream.response.publish_type import PublishType
from faststream.response.response import BatchPublishCommand, PublishCommand, Response

from penstock.contrib.faststream.streammessage import CORRELATION_ID, text_of
from penstock.pop.client.durations import Duration, seconds
from penstock.pop.client.outgoing import OutgoingMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """Options of a publication that only Penstock has. `OutgoingMessage` documents them.

    Raises:
        ValueError: Both `deliver_at` and `delay` are given, or `deliver_at` has no time zone.
    """

    tag: str = ""
    message_group: str = ""
    deliver_at: datetime | None = None
    delay: Duration = 0.0
    deduplication_id: str = ""
    expire_after: Duration = 0.0

    def __post_init__(self) -> None:
        if self.deliver_at is not None and self.delay:
            raise ValueError("give deliver_at or delay, not both")
        if self.deliver_at is not None and self.deliver_at.tzinfo is None:
            raise ValueError(f"deliver_at is {self.deliver_at}, which has no time zone: use for example datetime.now(UTC)")

    def or_else(self, others: SendOptions) -> SendOptions:
        """Return these options, and those of `others` that are not given here."""
        taken = {each.name: getattr(others, each.name) for each in fields(self) if not getattr(self, each.name)}
        if self.deliver_at is not None or self.delay:
            taken.pop("deliver_at", None)
            taken.pop("delay", None)
        return replace(self, **taken)


class PenstockResponse(Response):
    """What a handler returns, with options for the publication of it.

    Parameters:
        body: The result.
        headers: User properties of the message.
        correlation_id: By default that of the message that was handled.
        tag: As for `PenstockBroker.publish`.
        message_group: As for `PenstockBroker.publish`.
        deliver_at: As for `PenstockBroker.publish`.
        delay: As for `PenstockBroker.publish`.
        deduplication_id: As for `PenstockBroker.publish`.
        expire_after: As for `PenstockBroker.publish`.
    """

    def __init__(
        self,
        body: Any,
        *,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        tag: str = "",
        message_group: str = "",
        deliver_at: datetime | None = None,
        delay: Duration = 0.0,
        deduplication_id: str = "",
        expire_after: Duration = 0.0,
    ) -> None:
        super().__init__(body, headers=headers, correlation_id=correlation_id)
        self.options = SendOptions(
            tag=tag,
            message_group=message_group,
            deliver_at=deliver_at,
            delay=delay,
            deduplication_id=deduplication_id,
            expire_after=expire_after,
        )

    def as_publish_command(self) -> PenstockPublishCommand:
        """Return the publication of the response, without its topic."""
        return PenstockPublishCommand(
            self.body,
            headers=self.headers,
            correlation_id=self.correlation_id,
            options=self.options,
            _publish_type=PublishType.PUBLISH,
        )


class PenstockPublishCommand(BatchPublishCommand):
    """The publication of a message, or of several."""

    def __init__(
        self,
        message: Any,
        /,
        *messages: Any,
        topic: str = "",
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
        options: SendOptions | None = None,
        timeout: Duration | None = None,
        _publish_type: PublishType,
    ) -> None:
        super().__init__(
            message,
            *messages,
            destination=topic,
            headers=headers,
            correlation_id=correlation_id,
            reply_to=reply_to,
            _publish_type=_publish_type,
        )
        self.options = options or SendOptions()
        self.timeout = seconds(timeout, "timeout") if timeout is not None else None
        """How long a request waits for its reply, in seconds."""
        self.correlation_data: bytes | None = None
        """Correlation data of a reply, which must be exactly that of the request. None: the correlation id is it."""

    @classmethod
    def from_cmd(cls, cmd: PublishCommand, *, batch: bool = False) -> PenstockPublishCommand:
        """Return the command as one of this class, which it is already unless a handler returned a plain response."""
        if isinstance(cmd, cls):
            return cmd
        body, others = cls._parse_bodies(cmd.body, batch=batch)
        return cls(
            body,
            *others,
            topic=cmd.destination,
            headers=cmd.headers,
            correlation_id=cmd.correlation_id,
            reply_to=cmd.reply_to,
            _publish_type=cmd.publish_type,
        )

    def properties(self) -> dict[str, str]:
        """Return the user properties of the message."""
        return {name: str(value) for name, value in self.headers.items()}

    def outgoing(self, body: bytes, content_type: str | None) -> OutgoingMessage:
        """Return the message to send, with an encoded body."""
        options = self.options
        properties: Mapping[str, str] = self.properties()
        correlation_data = self.correlation_data
        if correlation_data is None:
            correlation_data = (self.correlation_id or "").encode()
        elif self.correlation_id and self.correlation_id != text_of(correlation_data):
            properties = {**properties, CORRELATION_ID: self.correlation_id}
        return OutgoingMessage(
            topic=self.destination,
            body=body,
            properties=properties,
            tag=options.tag,
            message_group=options.message_group,
            deliver_at_ms=round(options.deliver_at.timestamp() * 1000) if options.deliver_at is not None else 0,
            delay=options.delay,
            deduplication_id=options.deduplication_id,
            response_topic=self.reply_to,
            correlation_data=correlation_data,
            content_type=content_type or "",
            expire_after=options.expire_after,
        )
