"""Messages of a group on a stream, for the lowest latency."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import grpc.aio

from penstock.pop.client.durations import Duration, milliseconds
from penstock.pop.client.received import ReceivedMessage
from penstock.pop.client.requests import nack_of
from penstock.pop.client.retrydelays import RetryDelays
from penstock.pop.client.statuses import UNREACHED, error_of_call
from penstock.pop.client.tracing import now_ns
from penstock.pop.client.unseen import SurplusWatch, UnseenMessages
from penstock.pop.errors import NodeUnavailable, PopError
from penstock.pop.proto import pop_pb2 as pb

if TYPE_CHECKING:
    from penstock.pop.client.settlements import Settlements
    from penstock.pop.proto.pop_pb2_grpc import PopServiceAsyncStub

Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.ConsumeRequest, pb.ConsumeResponse]"

logger = logging.getLogger("penstock.client")

CLOSE_S = 2.0
"""How long leaving a stream waits until the node has received the last acknowledgements."""


OPEN_S = 10.0
"""How long a stream that opens again waits for the node at a time. Between two such times it says in the log that it waits."""

STEADY_S = 10.0
"""A stream that was open for so long was no failed try: if it breaks, the first delay before the next try is short again."""

LOST_STATUS = "Internal error from Core"
"""What gRPC says, now and then, when the other side ends a call while the first request is written: the status is lost. Another
try learns it."""

CREDITS_DEFAULT = 1024
"""Credits of a stream that does not name them, as at the node."""


class StreamMessage(ReceivedMessage):
    """A message from `Client.stream`. Each method sends its request without waiting for an answer."""

    __slots__ = ("_stream",)

    def __init__(self, received: pb.PoppedMessage, stream: StreamConsumer) -> None:
        super().__init__(received)
        self._stream = stream

    def ack(self) -> None:
        """Acknowledge the message."""
        self._stream.note(self, "ack")
        self._stream.ack(self.handle)

    def nack(self, *, delay: Duration = 0.0, reason: str = "") -> None:
        """Return the message as a failed attempt after `delay`, as `Message.nack`.

        Raises:
            TypeError, ValueError: The delay is no duration.
        """
        change = nack_of(self.handle, milliseconds(delay, "delay"), reason)
        self._stream.note(self, "nack")
        self._stream.change(change)

    def suspend(self, delay: Duration = 0.0) -> None:
        """Return the message after `delay`, as `nack`, without counting this delivery as an attempt. Raises as `nack`."""
        change = pb.InvisibleChange(handle=self.handle, invisible_ms=milliseconds(delay, "delay"), suspend=True)
        self._stream.note(self, "suspend")
        self._stream.change(change)


class StreamConsumer:
    """Messages of a group as they come, on one gRPC stream from `Client.stream`.

        async with client.stream("plant/#", group="billing") as messages:
            async for message in messages:
                message.ack()

    Acknowledgements go out on the stream and nobody waits for them. If the node refuses one, the client logs that, and the
    message comes back. While the node is away the stream waits. Then it opens again, and the iteration goes on. Messages that
    the application had not seen go back, which counts no attempt.

    The stream measures how long the loop handles a message. Messages that the loop will not reach within their invisible time
    are returned to the node, which counts no attempt, and the stream takes back credits until the loop is fast enough.
    """

    def __init__(self, stub: PopServiceAsyncStub, opening: pb.ConsumeOpen, settlements: Settlements) -> None:
        self._stub = stub
        self._opening = opening
        self._settlements = settlements
        self._credits_max = self._credits = opening.credits or CREDITS_DEFAULT
        self._call: Call | None = None
        self._unsent = pb.ConsumeRequest()
        self._flusher: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._unseen: UnseenMessages[StreamMessage] = UnseenMessages(self._credits_max, opening.invisible_ms / 1000)
        self._surplus = SurplusWatch(self._unseen, opening.group, self._give_back)
        self._taken = 0
        """Number of messages that the application has and did not settle."""
        self._failure: PopError | None = None
        self._closing = False
        """Whether the application has left the stream."""
        self._arrived = asyncio.Event()

    @property
    def returned(self) -> int:
        """Number of messages that the loop would not have reached in time. They went back without counting an attempt."""
        return self._unseen.returned

    @property
    def expired(self) -> int:
        """Number of messages that expired before the loop saw them, because something blocked the event loop."""
        return self._unseen.expired

    async def __aenter__(self) -> StreamConsumer:
        try:
            call = await self._open(wait=False)
        except NodeUnavailable as error:
            call = await self._open_when_possible(error, RetryDelays())
        self._reader = asyncio.get_running_loop().create_task(self._read(call))
        return self

    async def _open(self, *, wait: bool) -> Call:
        """Open a stream on the node; if that can't be reached now, wait for `OPEN_S` at most. Raises PopError."""
        # Without an iterator of requests, `write` sends them. The stubs do not know that form.
        self._call = call = self._stub.Consume(wait_for_ready=wait)  # type: ignore[call-arg]
        try:
            async with asyncio.timeout(OPEN_S):
                await call.write(pb.ConsumeRequest(open=self._opening))
        except TimeoutError:
            call.cancel()
            raise NodeUnavailable(UNREACHED) from None
        except asyncio.CancelledError:
            call.cancel()
            raise
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL and error.details() == LOST_STATUS:
                raise NodeUnavailable("the node ended the stream before it had the request") from error
            raise error_of_call(error) from error
        except asyncio.InvalidStateError:  # The call has ended before the write.
            await self._raise_status(call)
        return call

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing = True
        call, reader = self._call, self._reader
        assert call is not None
        assert reader is not None
        self._surplus.stop()
        give_back = self._opening.give_back
        if (error is None or self._unsent.changes or not give_back) and not call.done():
            # Send the last acknowledgements and wait for the node's answer, for a bounded time. A broken stream has no answer.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._flush()
                    await call.done_writing()
                    await asyncio.wait((reader,))
        call.cancel()
        reader.cancel()
        await asyncio.wait((reader,))
        if self._call is not None:
            self._call.cancel()  # It may be a newer one.
        unseen = self._unseen.clear()  # Now nothing can arrive any more: the node sends until it hears that the client closes.
        if unseen and not give_back:
            await self._settlements.give_back([message.handle for message in unseen], CLOSE_S)

    def __aiter__(self) -> AsyncGenerator[StreamMessage, None]:
        return self._iterate()

    async def _iterate(self) -> AsyncGenerator[StreamMessage, None]:
        assert self._call is not None, "enter the stream with `async with` first"
        time_s = asyncio.get_running_loop().time
        while True:
            if self._failure is not None:
                raise self._failure
            message = self._unseen.take(time_s())
            if message is None:
                if self._unseen:
                    self._surplus.return_surplus()  # It is too late for the first message.
                    continue
                self._arrived.clear()
                await self._arrived.wait()
                continue
            self._taken += 1
            began_s = time_s()
            yield message
            self._unseen.handled(time_s() - began_s)
            if self._credits < self._credits_max:
                self._restore_credits(time_s())

    # --- receiving --------------------------------------------------------------------------------------------------

    async def _read(self, call: Call) -> None:
        loop = asyncio.get_running_loop()
        delays = RetryDelays()
        try:
            while True:
                began_s = loop.time()
                try:
                    await self._receive(call)
                except NodeUnavailable as error:
                    if self._closing:
                        raise
                    if loop.time() - began_s > STEADY_S:
                        delays.reset()
                    call = await self._open_again(error, delays)
        except PopError as error:
            self._failure = error
        except asyncio.CancelledError:
            self._failure = NodeUnavailable("the stream was closed: open another")
            raise
        finally:
            self._surplus.stop()
            self._arrived.set()

    async def _receive(self, call: Call) -> NoReturn:
        """Take what the node sends, until the stream ends. Raises PopError."""
        loop, group = asyncio.get_running_loop(), self._opening.group
        while True:
            try:
                response = await call.read()
            except grpc.aio.AioRpcError as error:
                raise error_of_call(error) from error
            if not isinstance(response, pb.ConsumeResponse):
                await self._raise_status(call)
            for refused in response.refused:
                logger.warning("group %s: the node refused an acknowledgement: %s", group, refused.status.detail)
            if response.messages:
                if self._settlements.tracing is not None:
                    self._settlements.tracing.received(group, self._opening.filter, response.messages, now_ns())
                self._unseen.invisible_s = response.invisible_ms / 1000
                self._unseen.add([StreamMessage(received, self) for received in response.messages], loop.time())
                self._arrived.set()
                self._surplus.begin()

    async def _open_again(self, error: NodeUnavailable, delays: RetryDelays) -> Call:
        """Open another stream after one has broken, when the node is back. Raises PopError if the node refuses that."""
        unseen = self._unseen.clear()  # The node may have given them to others by the time that the loop would see them.
        call = await self._open_when_possible(error, delays)
        self._credits = self._credits_max
        self._unsent.credits = 0  # The new stream begins with all credits.
        self._ensure_flusher()
        if unseen:  # A node that was killed still counts them as handed out.
            await self._settlements.give_back([message.handle for message in unseen], CLOSE_S)
        return call

    async def _open_when_possible(self, error: NodeUnavailable, delays: RetryDelays) -> Call:
        """Open a stream when the node is back. Raises PopError if the node refuses that."""
        while True:
            wait_s = delays.next_s()
            logger.warning("group %s: %s; the stream opens again in %.2f s", self._opening.group, error, wait_s)
            await asyncio.sleep(wait_s)
            try:
                return await self._open(wait=True)
            except NodeUnavailable as again:
                error = again

    async def _raise_status(self, call: Call) -> NoReturn:
        """Raise the reason why the node ended the stream."""
        code, detail = await call.code(), await call.details()
        if code is grpc.StatusCode.OK:
            raise NodeUnavailable("the node ended the stream: open another")
        metadata = grpc.aio.Metadata()
        raise error_of_call(grpc.aio.AioRpcError(code, metadata, metadata, detail, None))

    def _give_back(self, surplus: list[StreamMessage]) -> None:
        """Return messages that the loop will not see in time, and let the node send fewer."""
        # The credits go first, so that the node does not send the same messages again.
        self._set_credits(asyncio.get_running_loop().time())
        for message in surplus:
            self._unsent.changes.append(pb.InvisibleChange(handle=message.handle, suspend=True))
        self._ensure_flusher()

    def _set_credits(self, now_s: float) -> None:
        wanted = self._taken + len(self._unseen) + max(self._unseen.room(now_s), 0)
        wanted = min(max(wanted, 1), self._credits_max)
        self._unsent.credits += wanted - self._credits
        self._credits = wanted

    def _restore_credits(self, now_s: float) -> None:
        """Ask for more messages if the loop has become faster."""
        wanted = self._taken + len(self._unseen) + self._unseen.room(now_s)
        if wanted >= min(2 * self._credits, self._credits_max):
            self._set_credits(now_s)
            self._ensure_flusher()

    # --- settling ---------------------------------------------------------------------------------------------------

    def note(self, message: StreamMessage, operation: str) -> None:
        """Make the span of a settlement, if the client makes spans. It has no length, because nobody waits for the answer."""
        if self._settlements.tracing is not None:
            with self._settlements.tracing.settling(operation, self._opening.group, message):
                pass

    def ack(self, handle: str) -> None:
        """Acknowledge a delivery at the end of this turn of the loop, together with all other requests of the turn."""
        self._taken -= 1
        self._unsent.acks.append(handle)
        self._ensure_flusher()

    def change(self, change: pb.InvisibleChange) -> None:
        """Move the deadline of a delivery at the end of this turn of the loop, as `ack` does."""
        self._taken -= 1
        self._unsent.changes.append(change)
        self._ensure_flusher()

    def _ensure_flusher(self) -> None:
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.get_running_loop().create_task(self._flush())

    async def _flush(self) -> None:
        call = self._call
        assert call is not None
        while self._unsent.acks or self._unsent.changes or self._unsent.credits:
            if call.done():
                return  # What waits goes out on the next stream.
            request, self._unsent = self._unsent, pb.ConsumeRequest()
            # Messages whose acknowledgement is lost with the stream come back.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(request)
