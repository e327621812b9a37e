"""A subscriber whose handler takes a batch of messages a call."""

from __future__ import annotations

import asyncio
from re import Pattern
from typing import TYPE_CHECKING

from faststream.exceptions import IgnoredException
from faststream.response import ensure_response

from penstock.contrib.faststream.streammessage import PenstockBatchParser
from penstock.contrib.faststream.subscriber import PenstockSubscriber
from penstock.contrib.faststream.undecodable import HandlerProgress
from penstock.pop.client.message import Message

if TYPE_CHECKING:
    from faststream._internal.endpoint.publisher import PublisherProto
    from faststream._internal.types import AsyncCallable
    from faststream.message import StreamMessage
    from faststream.response import Response


class BatchSubscriber(PenstockSubscriber[list[Message]]):
    """Calls its handler with the messages that wait, up to `batch` of them. They have no replies."""

    def _parsing(self, path: Pattern[str] | None) -> tuple[AsyncCallable, AsyncCallable]:
        parser = PenstockBatchParser()
        return parser.parse_batch, parser.decode_batch

    def joined(self, messages: list[Message]) -> list[Message]:
        """Return the messages."""
        return messages

    def _first(self, msg: list[Message]) -> Message:
        return msg[0]

    def _make_response_publisher(self, message: StreamMessage[list[Message]]) -> tuple[PublisherProto, ...]:
        return ()

    async def process_message(self, msg: list[Message]) -> Response:
        """Run the middlewares and the handler for a batch. Raises what they raise.

        The handler gets no batch with a body that it can't take. Such a batch is halved until that body is alone, which makes a
        dead letter of its message, and the handler gets the others.
        """
        response, failure = ensure_response(None), None
        waiting = [msg]
        while waiting:
            some = waiting.pop()
            progress = HandlerProgress(can_split=len(some) > 1)
            try:
                response = await self._process(some, progress)
            except IgnoredException:
                raise
            except Exception as error:
                failure = failure or error
            if progress.must_split:
                half = len(some) // 2
                waiting += [some[half:], some[:half]]
            elif self.consuming.fifo and any(each.went_back or not each.is_settled for each in some):
                await _give_back([each for others in reversed(waiting) for each in others])
                break
        if failure is not None:
            raise failure
        return response


async def _give_back(messages: list[Message]) -> None:
    """Return messages that wait for a failed one before them. One that can't be returned comes back at its deadline."""
    returned = (message.suspend() for message in messages if not message.is_settled)
    await asyncio.gather(*returned, return_exceptions=True)
