"""Messages of a group on a stream, for the lowest latency."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import grpc.aio

from penstock.pop.client.received import ReceivedMessage
from penstock.pop.client.statuses import error_of_call
from penstock.pop.errors import NodeUnavailable
from penstock.pop.proto import pop_pb2 as pb

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import PopServiceAsyncStub

logger = logging.getLogger("penstock.client")

CLOSE_S = 2.0
"""How long leaving a stream waits until the node has received the last acknowledgements."""


class StreamMessage(ReceivedMessage):
    """A message from `Client.stream`. Each method sends its request without waiting for an answer."""

    __slots__ = ("_stream",)

    def __init__(self, received: pb.PoppedMessage, stream: StreamConsumer) -> None:
        super().__init__(received)
        self._stream = stream

    def ack(self) -> None:
        """Acknowledge the message."""
        self._stream.ack(self.handle)

    def nack(self, *, delay_ms: int = 0) -> None:
        """Return the message after `delay_ms` as a failed attempt. The group's back-off, if any, is added to the delay."""
        self._stream.change(pb.InvisibleChange(handle=self.handle, invisible_ms=delay_ms))

    def suspend(self, delay_ms: int = 0) -> None:
        """Return the message after `delay_ms` without counting this delivery as an attempt."""
        self._stream.change(pb.InvisibleChange(handle=self.handle, invisible_ms=delay_ms, suspend=True))


class StreamConsumer:
    """Messages of a group as they come, on one gRPC stream from `Client.stream`.

        async with client.stream("plant/#", group="billing") as messages:
            async for message in messages:
                message.ack()

    Acknowledgements go out on the stream and nobody waits for them. If the node refuses one, the client logs that, and the
    message comes back. The iteration raises NodeUnavailable when the node goes away: open another stream then.
    """

    def __init__(self, stub: PopServiceAsyncStub, opening: pb.ConsumeOpen) -> None:
        self._stub = stub
        self._opening = opening
        self._call: grpc.aio.StreamStreamCall[pb.ConsumeRequest, pb.ConsumeResponse] | None = None
        self._unsent = pb.ConsumeRequest()
        self._flusher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StreamConsumer:
        # Without an iterator of requests, `write` sends them. The stubs do not know that form.
        self._call = self._stub.Consume(wait_for_ready=True)  # type: ignore[call-arg]
        try:
            await self._call.write(pb.ConsumeRequest(open=self._opening))
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        call = self._call
        assert call is not None
        if error is None and not call.done():
            # Send the last acknowledgements and wait for the node's answer, for a bounded time. A broken stream has no answer.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._flush()
                    await call.done_writing()
                    while isinstance(await call.read(), pb.ConsumeResponse):
                        pass
        call.cancel()

    def __aiter__(self) -> AsyncGenerator[StreamMessage, None]:
        return self._iterate()

    async def _iterate(self) -> AsyncGenerator[StreamMessage, None]:
        call = self._call
        assert call is not None, "enter the stream with `async with` first"
        while True:
            try:
                response = await call.read()
            except grpc.aio.AioRpcError as error:
                raise error_of_call(error) from error
            if not isinstance(response, pb.ConsumeResponse):
                await self._raise_status(call)
            for refused in response.refused:
                logger.warning("group %s: the node refused an acknowledgement: %s", self._opening.group, refused.status.detail)
            for received in response.messages:
                yield StreamMessage(received, self)

    async def _raise_status(self, call: grpc.aio.StreamStreamCall[pb.ConsumeRequest, pb.ConsumeResponse]) -> NoReturn:
        """Raise the reason why the node ended the stream."""
        code, detail = await call.code(), await call.details()
        if code is grpc.StatusCode.OK:
            raise NodeUnavailable("the node ended the stream: open another")
        metadata = grpc.aio.Metadata()
        raise error_of_call(grpc.aio.AioRpcError(code, metadata, metadata, detail, None))

    def ack(self, handle: str) -> None:
        """Acknowledge a delivery at the end of this turn of the loop, together with all other requests of the turn."""
        self._unsent.acks.append(handle)
        self._ensure_flusher()

    def change(self, change: pb.InvisibleChange) -> None:
        """Move the deadline of a delivery at the end of this turn of the loop, as `ack` does."""
        self._unsent.changes.append(change)
        self._ensure_flusher()

    def _ensure_flusher(self) -> None:
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.get_running_loop().create_task(self._flush())

    async def _flush(self) -> None:
        call = self._call
        assert call is not None
        while self._unsent.acks or self._unsent.changes:
            request, self._unsent = self._unsent, pb.ConsumeRequest()
            # A broken stream makes the iteration fail. Messages whose acknowledgement was lost come back at their deadline.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(request)
