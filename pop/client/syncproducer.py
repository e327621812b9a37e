"""A producer for threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Mapping
from types import TracebackType

from penstock.pop.client.background import BackgroundClient
from penstock.pop.client.outgoing import OutgoingMessage, SendReceipt
from penstock.pop.client.producer import Producer


class SyncProducer:
    """A `Producer` for threads: `SyncClient.producer`. Many threads may share it.

    It is a `Producer` on a thread of its own. A method takes the arguments of the method of `Producer` with the same name, and
    raises the same errors.

    Parameters:
        background: The thread.
        producer: A producer of its client.
    """

    def __init__(self, background: BackgroundClient, producer: Producer) -> None:
        self._background = background
        self._producer = producer

    def __enter__(self) -> SyncProducer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def send(
        self,
        topic: str,
        body: bytes = b"",
        *,
        properties: Mapping[str, str] | None = None,
        tag: str = "",
        message_group: str = "",
        deduplication_id: str = "",
    ) -> SendReceipt:
        """Send a message; return when it is durable, as `Producer.send`."""
        return self._background.run(
            self._producer.send(
                topic,
                body,
                properties=properties,
                tag=tag,
                message_group=message_group,
                deduplication_id=deduplication_id,
            )
        )

    def post(self, message: OutgoingMessage) -> concurrent.futures.Future[SendReceipt]:
        """Take a message into the buffer, and wait while it is full; return the future of its receipt, as `Producer.post`."""
        receipt: concurrent.futures.Future[SendReceipt] = concurrent.futures.Future()

        def answered(answer: asyncio.Future[SendReceipt]) -> None:
            if answer.cancelled():
                receipt.cancel()
            elif (error := answer.exception()) is not None:
                receipt.set_exception(error)
            else:
                receipt.set_result(answer.result())

        async def posted() -> None:
            answer = await self._producer.post(message)
            answer.add_done_callback(answered)

        self._background.run(posted())
        return receipt

    def flush(self) -> None:
        """Return when all messages that were sent or posted before are answered, as `Producer.flush`."""
        self._background.run(self._producer.flush())

    def close(self) -> None:
        """Accept no more messages, and flush, as `Producer.aclose`."""
        self._background.run(self._producer.aclose())
