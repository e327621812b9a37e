"""A message as FastStream sees it, and how it is made of one of the client's."""

from __future__ import annotations

import asyncio
import logging
import sys
from re import Pattern
from typing import Any

from faststream.exceptions import IgnoredException
from faststream.message import StreamMessage, decode_message

from penstock.contrib.faststream.undecodable import is_split
from penstock.pop.client.durations import Duration
from penstock.pop.client.message import Message, ack_together
from penstock.pop.errors import PopError

logger = logging.getLogger("penstock.faststream")

CORRELATION_ID = "correlation_id"
"""User property with FastStream's correlation id, where it differs from the correlation data of MQTT 5.0."""


class PenstockMessage(StreamMessage[Message]):
    """A message that a handler gets. The acknowledgement policy of the subscriber settles it, or the handler does."""

    async def ack(self) -> None:
        """Acknowledge the message. The acknowledgement leaves with the next call to the node, and this does not wait for it."""
        if not self.raw_message.is_settled:
            self.raw_message.ack().add_done_callback(_note_ack)
        await super().ack()

    async def nack(self, delay: Duration = 0.0) -> None:
        """Return the message as a failed attempt. The back-off of the group is added to `delay`, in seconds or as a timedelta.

        Raises:
            PopError: The node refused it, or did not answer. The message comes back at its deadline.
        """
        if not self.raw_message.is_settled:
            await self.raw_message.nack(delay=delay)
        await super().nack()

    async def reject(self, reason: str = "") -> None:
        """Make the message a dead letter of its group.

        Args:
            reason: Why; it is stored with the dead letter. By default the exception with which the handler failed.

        Raises:
            PopError: The node refused it, or did not answer. The message comes back at its deadline.
        """
        if not self.raw_message.is_settled:
            await self.raw_message.dead_letter(reason=reason or _failure())
        await super().reject()


class PenstockBatch(StreamMessage[list[Message]]):
    """A batch of messages that a handler gets. The acknowledgement policy of the subscriber settles it, or the handler does.

    `raw_message` has the messages, which a handler may settle one by one. What settles the batch settles the others.
    """

    async def ack(self) -> None:
        """Acknowledge the messages. This does not wait for the answer: the acknowledgements leave with the next call."""
        if left := self._unsettled():
            ack_together(left).add_done_callback(_note_acks)
        await super().ack()

    async def nack(self, delay: Duration = 0.0) -> None:
        """Return the messages as failed attempts. The back-off of the group is added to `delay`, in seconds or as a timedelta.

        Raises:
            PopError: The node refused it, or did not answer. Messages that did not go back come back at their deadline.
        """
        await asyncio.gather(*(message.nack(delay=delay) for message in self._unsettled()))
        await super().nack()

    async def reject(self, reason: str = "") -> None:
        """Make the messages dead letters of their group. The argument and the errors are those of `PenstockMessage.reject`."""
        why = reason or _failure()
        await asyncio.gather(*(message.dead_letter(reason=why) for message in self._unsettled()))
        await super().reject()

    def _unsettled(self) -> list[Message]:
        return [] if is_split() else [message for message in self.raw_message if not message.is_settled]


class PenstockParser:
    """Makes FastStream's messages of the client's.

    Parameters:
        path: Takes the parameters of a subscriber's address out of a topic; None if it has none.
    """

    def __init__(self, path: Pattern[str] | None = None) -> None:
        self._path = path

    async def parse_message(self, message: Message) -> PenstockMessage:
        """Return the message, which is not decoded yet."""
        headers = message.properties
        correlation_id = headers.pop(CORRELATION_ID, "") or text_of(message.correlation_data)
        found = self._path.match(message.topic) if self._path is not None else None
        return PenstockMessage(
            raw_message=message,
            body=message.body,
            headers=headers,
            reply_to=message.response_topic,
            path=found.groupdict() if found else {},
            content_type=message.content_type or None,
            correlation_id=correlation_id or None,
            message_id=message.message_id,
        )

    async def decode_message(self, message: StreamMessage[Any]) -> Any:
        """Return the decoded body: text or JSON by its content type. Without one, JSON if it is JSON, and else bytes."""
        return decode_message(message)


class PenstockBatchParser(PenstockParser):
    """Makes FastStream's batches of the client's messages."""

    async def parse_batch(self, messages: list[Message]) -> PenstockBatch:
        """Return the batch, which is not decoded yet. It has the headers and the names of its first message."""
        first = await self.parse_message(messages[0])
        return PenstockBatch(
            raw_message=messages,
            body=[message.body for message in messages],
            headers=first.headers,
            batch_headers=[message.properties for message in messages],
            content_type=first.content_type,
            correlation_id=first.correlation_id,
            message_id=first.message_id,
        )

    async def decode_batch(self, batch: StreamMessage[list[Message]]) -> list[Any]:
        """Return the decoded bodies, as `decode_message` does."""
        return [decode_message(await self.parse_message(message)) for message in batch.raw_message]


def text_of(correlation_data: bytes) -> str:
    """Return correlation data, which may be any bytes, as text."""
    try:
        return correlation_data.decode()
    except UnicodeDecodeError:
        return correlation_data.hex()


def _failure() -> str:
    """Return why a message is rejected: the exception that its handler raised, which is being handled now."""
    error = sys.exception()
    if error is None or isinstance(error, IgnoredException):
        return "the handler rejected the message"
    return f"{type(error).__name__}: {error}"


def _note_ack(acked: Any) -> None:
    error = None if acked.cancelled() else acked.exception()
    if isinstance(error, PopError):
        _warn(error)


def _note_acks(acked: Any) -> None:
    _note_ack(acked)
    if not acked.cancelled() and acked.exception() is None:
        for error in acked.result():
            if error is not None:
                _warn(error)


def _warn(error: BaseException) -> None:
    logger.warning("an acknowledgement came too late or failed, so the message comes again: %s", error)
