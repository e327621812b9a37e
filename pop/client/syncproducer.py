"""A producer for threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any, TypeVar

from penstock.pop.client.batcher import CLOSED
from penstock.pop.client.client import Client
from penstock.pop.client.durations import Duration
from penstock.pop.client.outgoing import OutgoingMessage, SendReceipt
from penstock.pop.client.producer import Producer
from penstock.pop.client.security import Security
from penstock.pop.client.tracing import Tracing
from penstock.pop.errors import ClientClosed

A = TypeVar("A")

STOP_S = 30.0
"""Seconds that `close` waits for the thread."""


class BackgroundClient:
    """A `Client` with its event loop on a thread that ends with the process.

    Parameters:
        target, timeout, security, inbox, tracing: As for `Client`.
    """

    def __init__(
        self, target: str, *, timeout: Duration, security: Security, inbox: str, tracing: Tracing | None = None
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="penstock-client", daemon=True)
        self._thread.start()

        async def made() -> Client:
            return Client(target, timeout=timeout, security=security, inbox=inbox, tracing=tracing)

        self.client = self.run(made())
        """The client. Its methods must run on its loop: see `run` and `submit`."""

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def submit(self, work: Coroutine[Any, Any, A]) -> concurrent.futures.Future[A]:
        """Begin a coroutine on the client's loop; return the future of its result. Raises ClientClosed after `close`."""
        if self._closed:
            work.close()
            raise ClientClosed(CLOSED)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, A]) -> A:
        """Return the result of a coroutine on the client's loop. Cancel it if the waiting thread is interrupted."""
        running = self.submit(work)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def close(self) -> None:
        """Close the client, and end the thread. Closing twice does nothing."""
        if self._closed:
            return
        try:
            self.run(self.client.aclose())
        finally:
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)


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
