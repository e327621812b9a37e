"""A subscriber whose handler takes one message a call."""

from __future__ import annotations

from re import Pattern
from typing import TYPE_CHECKING

from penstock.contrib.faststream.publisher import ReplyPublisher
from penstock.contrib.faststream.streammessage import PenstockParser
from penstock.contrib.faststream.subscriber import PenstockSubscriber
from penstock.pop.client.message import Message

if TYPE_CHECKING:
    from faststream._internal.endpoint.publisher import PublisherProto
    from faststream._internal.types import AsyncCallable
    from faststream.message import StreamMessage


class SingleSubscriber(PenstockSubscriber[Message]):
    """Calls its handler with one message, and answers those that ask for a reply."""

    def _parsing(self, path: Pattern[str] | None) -> tuple[AsyncCallable, AsyncCallable]:
        parser = PenstockParser(path)
        return parser.parse_message, parser.decode_message

    def joined(self, messages: list[Message]) -> Message:
        """Return the only message."""
        (message,) = messages
        return message

    def _first(self, msg: Message) -> Message:
        return msg

    def _make_response_publisher(self, message: StreamMessage[Message]) -> tuple[PublisherProto, ...]:
        return (ReplyPublisher(self._outer_config.producer, message.reply_to, message.raw_message),)
