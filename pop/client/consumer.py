"""The consuming half of the client: messages, how they are settled, and an iterator that keeps some of them at hand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import grpc.aio

from penstock.pop.client.calls import Backoff, Batched, call, error_of_call, error_of_status
from penstock.pop.errors import AlreadyAcked, ClientClosed, NodeUnavailable, Overloaded, PopError
from penstock.pop.proto import pop_pb2 as pb

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import PopServiceAsyncStub

# The standard library's, unlike the node's: it goes where the service that uses the client sends its own.
logger = logging.getLogger("pop.client")

SETTLE_COUNT_MAX = 4096
"""Handles of one call: a quarter of what a node takes, so that a call never holds its loop for long."""

EMPTY_S_MIN = 0.1
"""An empty answer that came faster than this is followed by a pause: a node that doesn't let polls wait isn't hammered."""

ANSWER_S_MAX = 0.2
"""A poll that is older waits for messages, and can be ended. A younger one may have been answered: ended now, it would lose
that answer, and the messages would come to nobody until their invisible time is over. So it is waited for."""

CLOSE_S = 2.0
"""How long a stream that is left waits for the node to have taken its last acknowledgements."""

USABLE = 0.9
"""Part of the invisible time in which a message may be handed to the loop. In the rest it could hardly be settled in time."""


class Message:
    """A message that was handed out to a group. It comes back as a new attempt unless it is acknowledged in time.

    `attempt` is 1 on first delivery; `stored_ms` and `visible_at_ms` (the deadline) are ms since 1970 by the node's clock.
    """

    __slots__ = (
        "_expires_s",
        "_settlements",
        "attempt",
        "body",
        "dead_letter",
        "group",
        "handle",
        "message_group",
        "message_id",
        "properties",
        "queue_offset",
        "stored_ms",
        "tag",
        "topic",
        "visible_at_ms",
    )

    def __init__(self, popped: pb.PoppedMessage, settlements: Settlements, expires_s: float) -> None:
        self.handle = popped.handle
        self.message_id = popped.message_id
        self.topic = popped.topic
        self.body = popped.body
        self.properties = dict(popped.properties)
        self.message_group = popped.message_group
        self.tag = popped.tag
        self.stored_ms = popped.stored_ms
        self.queue_offset = popped.queue_offset
        self.attempt = popped.attempt
        self.visible_at_ms = popped.visible_at_ms
        self.dead_letter = popped.dead_letter if popped.HasField("dead_letter") else None
        """Where it came from, if it was popped from `$dlq/GROUP`."""
        self.group = settlements.group
        self._settlements = settlements
        self._expires_s = expires_s

    def __repr__(self) -> str:
        return f"<Message {self.message_id} {self.topic!r}, {len(self.body)} bytes, attempt {self.attempt}>"

    def ack(self) -> asyncio.Future[None]:
        """Acknowledge: the message is done. Await it to know that this is durable.

        It is on its way without being awaited, so a loop that has no use for the outcome needn't wait a round trip for
        each message. Acks that come while one call is under way share the next.

        Raises:
            HandleExpired, AlreadyAcked, HandleReplaced, InvalidHandle: the node states why it isn't done.
            NodeUnavailable: the node didn't answer, in several tries.
        """
        return self._settlements.acks.submit(self.handle)

    async def nack(self, *, delay_ms: int = 0) -> None:
        """Return the message after `delay_ms` as a failed attempt. The group's retry back-off, if any, comes on top.

        Raises:
            StatusError, NodeUnavailable: as `ack`; InvalidInvisibleTime for a delay that the node doesn't allow.
        """
        await self._settlements.changes.submit(Change(self.handle, delay_ms))

    async def suspend(self, delay_ms: int = 0) -> None:
        """Return the message after `delay_ms`, and don't count this delivery as an attempt.

        Raises:
            StatusError, NodeUnavailable: as `nack`.
        """
        await self._settlements.changes.submit(Change(self.handle, delay_ms, suspend=True))

    async def give_up(self) -> None:
        """Put the message among the group's dead letters: it will never succeed.

        Raises:
            StatusError, NodeUnavailable: as `nack`.
        """
        await self._settlements.give_up(self.handle)

    async def extend(self, invisible_ms: int) -> None:
        """Keep the message for `invisible_ms` from now, longer or shorter than it had. It gets a new handle.

        Raises:
            StatusError, NodeUnavailable: as `nack`.
        """
        self.handle = await self._settlements.changes.submit(Change(self.handle, invisible_ms))


class Change(NamedTuple):
    """A wish to move the deadline of a delivery."""

    handle: str
    invisible_ms: int
    suspend: bool = False


class Settlements:
    """What one client tells the node about the messages of one group, gathered into few calls.

    Parameters:
        stub: the node.
        group: whose messages.
        timeout_s: for each wish, all tries together.
    """

    def __init__(self, stub: PopServiceAsyncStub, group: str, timeout_s: float) -> None:
        self.group = group
        self._stub = stub
        self._timeout_s = timeout_s
        self.acks: Batched[str, None] = Batched(self._ack, count_max=SETTLE_COUNT_MAX)
        self._unsure: set[str] = set()
        """Handles that a pop took along without an answer: they may be acknowledged."""
        self.changes: Batched[Change, str] = Batched(self._change, count_max=SETTLE_COUNT_MAX)

    async def _ack(self, handles: list[str]) -> list[PopError | None]:
        request = pb.AckRequest(group=self.group, handles=handles)
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._timeout_s
        backoff = Backoff()
        again = False
        while True:
            try:
                answer = await call(self._stub.Ack, request, max(give_up_s - loop.time(), 0.001))
                break
            except (NodeUnavailable, Overloaded):
                if loop.time() >= give_up_s:
                    raise
            again = True
            await asyncio.sleep(backoff.next_s())
        errors = [error_of_status(status) for status in answer.statuses]
        # On a second try, "acknowledged before" means: by the first one, whose answer was lost.
        unsure = self._unsure
        found: list[PopError | None] = [
            None if isinstance(error, AlreadyAcked) and (again or handle in unsure) else error
            for handle, error in zip(handles, errors, strict=True)
        ]
        unsure.difference_update(handles)
        return found

    def put_back(self, acks: list[tuple[str, asyncio.Future[None]]]) -> None:
        """Acknowledge by a call of their own what a pop took along (`acks.take`) that got no answer."""
        self._unsure.update(handle for handle, _ in acks)
        self.acks.put_back(acks)

    async def _change(self, changes: list[Change]) -> list[str | PopError]:
        # One try: a second one would find the first one's new handle, which was lost with its answer.
        wishes = [pb.InvisibleChange(handle=handle, invisible_ms=ms, suspend=suspend) for handle, ms, suspend in changes]
        request = pb.ChangeInvisibleRequest(group=self.group, changes=wishes)
        answer = await call(self._stub.ChangeInvisible, request, self._timeout_s)
        return [error_of_status(result.status) or result.handle for result in answer.results]

    async def give_up(self, handle: str) -> None:
        """Put a delivery among the dead letters."""
        answer = await call(self._stub.GiveUp, pb.AckRequest(group=self.group, handles=[handle]), self._timeout_s)
        error = error_of_status(answer.statuses[0])
        if error is not None:
            raise error

    def messages(self, popped: Iterable[pb.PoppedMessage], expires_s: float) -> list[Message]:
        """Return the messages of an answer to a pop."""
        return [Message(message, self, expires_s) for message in popped]

    async def give_back(self, messages: list[Message], within_s: float) -> None:
        """Return messages that nobody looked at, at once and without counting an attempt."""
        returned = [self.changes.submit(Change(message.handle, 0, suspend=True)) for message in messages]
        await self.changes.flush(within_s)
        # Errors are no matter: what can't be returned comes back when its invisible time is over.
        await asyncio.gather(*returned, return_exceptions=True)


class Consumer:
    """Messages of a group, as an asynchronous iterator. `Client.consume` makes it.

        async for message in client.consume("plant/#", group="billing"):
            await message.ack()

    It pops in the background, ahead of the loop, but only while there is room for a whole batch below `prefetch`. What was
    acknowledged when it pops goes with the same call. Several
    tasks may iterate over one consumer: each message goes to one of them. When the last of them leaves its loop, or
    leaves the `async with` around it, the consumer closes: it ends its poll and returns what nobody has looked at. While
    the node is away it waits; the messages continue when the node is back.
    """

    def __init__(
        self,
        stub: PopServiceAsyncStub,
        settlements: Settlements,
        request: pb.PopRequest,
        *,
        prefetch: int,
        timeout_s: float,
        close_s: float,
        on_close: Callable[[Consumer], None],
    ) -> None:
        self._stub = stub
        self._settlements = settlements
        self._request = request
        self._prefetch = prefetch
        self._timeout_s = timeout_s + request.wait_ms / 1000
        self._close_s = close_s
        self._on_close = on_close
        self._buffer: deque[Message] = deque()
        self._holders = 0
        self._poller: asyncio.Task[None] | None = None
        self._call: grpc.aio.UnaryUnaryCall[pb.PopRequest, pb.PopResponse] | None = None
        self._asked_s = 0.0
        self._closer: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._backoff = Backoff()
        self._ended = asyncio.Event()
        self._wake = asyncio.Event()
        """For the poller: there is room again, or the end."""
        self._arrived = asyncio.Event()
        """For the iterators: there are messages, or the end."""

    # --- iterating --------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncGenerator[Message, None]:
        # A generator of its own for each loop: Python closes it when the loop is left, however that happens.
        return self._iterate()

    async def _iterate(self) -> AsyncGenerator[Message, None]:
        self._hold()
        try:
            while (message := await self._next()) is not None:
                yield message
        finally:
            await self._let_go()

    async def __aenter__(self) -> Consumer:
        self._hold()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._let_go()

    def _hold(self) -> None:
        if self._ended.is_set():
            raise ClientClosed("this consumer was closed: call consume() again")
        self._holders += 1
        if self._poller is None:
            self._poller = asyncio.get_running_loop().create_task(self._poll())
            self._poller.add_done_callback(self._poller_ended)

    async def _let_go(self) -> None:
        self._holders -= 1
        if not self._holders:
            await self.aclose()

    async def _next(self) -> Message | None:
        """Return the next message; None when the consumer is closed. What expired while it waited here is left out."""
        loop = asyncio.get_running_loop()
        while True:
            while self._buffer:
                message = self._buffer.popleft()
                if self._has_room():
                    self._wake.set()
                if message._expires_s > loop.time():
                    return message
            if self._ended.is_set():
                return None
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()

    # --- polling ----------------------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return len(self._buffer) + self._request.messages_max <= self._prefetch

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._ended.is_set():
            if not self._has_room():
                self._wake.clear()
                await self._wake.wait()
                continue
            self._asked_s = loop.time()
            settlements = self._settlements
            acks = settlements.acks.take()
            request = self._request
            if acks:
                request = pb.PopRequest(acks=[handle for handle, _ in acks])
                request.MergeFrom(self._request)
            try:
                self._call = self._stub.Pop(request, timeout=self._timeout_s, wait_for_ready=True)
                answer = await self._call
            except grpc.aio.AioRpcError as error:
                settlements.put_back(acks)
                await self._survive(error_of_call(error))
                continue
            except asyncio.CancelledError:
                settlements.put_back(acks)
                if self._ended.is_set():
                    return  # it is aclose that ended the call
                raise
            self._backoff.reset()
            if acks:
                errors = [error_of_status(status) for status in answer.ack_statuses]
                settlements.acks.answer(acks, errors or [None] * len(acks))
            if answer.messages:
                expires_s = loop.time() + self._request.invisible_ms / 1000 * USABLE
                self._buffer.extend(settlements.messages(answer.messages, expires_s))
                self._arrived.set()
            elif not acks and loop.time() - self._asked_s < EMPTY_S_MIN:
                await self._pause(EMPTY_S_MIN)

    async def _survive(self, error: PopError) -> None:
        """Wait before the next try after an error that passes. Raises any other."""
        if not isinstance(error, NodeUnavailable | Overloaded):
            raise error
        wait_s = self._backoff.next_s()
        logger.warning("group %s: %s; asking again in %.2f s", self._settlements.group, error, wait_s)
        await self._pause(wait_s)

    async def _pause(self, wait_s: float) -> None:
        """Wait, but not beyond the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._ended.wait()

    def _poller_ended(self, poller: asyncio.Task[None]) -> None:
        if poller.cancelled():
            self._failure = ClientClosed("the event loop ended this consumer's poll")
        else:
            self._failure = poller.exception()
        self._arrived.set()

    # --- closing ----------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """End the poll, return what nobody has looked at, and send what was acknowledged. More than one call is harmless."""
        self._ended.set()
        if self._closer is None:
            self._closer = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closer)

    async def _close(self) -> None:
        self._wake.set()
        if self._poller is not None:
            young_s = self._asked_s + ANSWER_S_MAX - asyncio.get_running_loop().time()
            await asyncio.wait((self._poller,), timeout=max(young_s, 0))
            if self._call is not None:
                self._call.cancel()
            await asyncio.wait((self._poller,))
        unconsumed = list(self._buffer)
        self._buffer.clear()
        self._arrived.set()
        await self._settlements.give_back(unconsumed, self._close_s)
        await self._settlements.acks.flush(self._close_s)
        self._on_close(self)


class StreamConsumer:
    """Messages of a group as they come, on a stream. `Client.stream` makes it.

        async with client.stream("plant/#", group="billing") as messages:
            async for message in messages:
                message.ack()

    Acknowledgements go back on the stream, and aren't waited for; one that was refused is logged, for the message comes back.
    The iteration ends with NodeUnavailable where the node goes away: open another.
    """

    def __init__(self, stub: PopServiceAsyncStub, opening: pb.ConsumeOpen) -> None:
        self._stub = stub
        self._opening = opening
        self._call: grpc.aio.StreamStreamCall[pb.ConsumeRequest, pb.ConsumeResponse] | None = None
        self._settled = pb.ConsumeRequest()
        self._flusher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StreamConsumer:
        # Without an iterator of requests, `write` sends them: the stubs don't know that.
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
            # What was acknowledged is told to the node, and its answer awaited, for a bounded time.
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
        assert call is not None, "enter it as a context manager first"
        while True:
            try:
                response = await call.read()
            except grpc.aio.AioRpcError as error:
                raise error_of_call(error) from error
            if not isinstance(response, pb.ConsumeResponse):
                await self._raise_status(call)
            for refused in response.refused:
                logger.warning("group %s: an ack was refused: %s", self._opening.group, refused.status.detail)
            for popped in response.messages:
                yield StreamMessage(popped, self)

    async def _raise_status(self, call: grpc.aio.StreamStreamCall[pb.ConsumeRequest, pb.ConsumeResponse]) -> NoReturn:
        """Raise why the node ended the stream."""
        code, detail = await call.code(), await call.details()
        if code is grpc.StatusCode.OK:
            raise NodeUnavailable("the node has ended the stream: open another")
        metadata = grpc.aio.Metadata()
        raise error_of_call(grpc.aio.AioRpcError(code, metadata, metadata, detail, None))

    def settle(self, handle: str, change: Change | None = None) -> None:
        """Send an acknowledgement or a change at the end of this turn of the loop, with all that come in it."""
        if change is None:
            self._settled.acks.append(handle)
        else:
            self._settled.changes.append(
                pb.InvisibleChange(handle=handle, invisible_ms=change.invisible_ms, suspend=change.suspend)
            )
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.get_running_loop().create_task(self._flush())

    async def _flush(self) -> None:
        call = self._call
        assert call is not None
        while self._settled.acks or self._settled.changes:
            settled, self._settled = self._settled, pb.ConsumeRequest()
            # A stream that is broken fails the iteration; what was on its way comes back when its time is over.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(settled)


class StreamMessage:
    """A message of a stream. Fields as of `Message`; what it is told is on its way without being awaited."""

    __slots__ = ("_stream", "popped")

    def __init__(self, popped: pb.PoppedMessage, stream: StreamConsumer) -> None:
        self.popped = popped
        """All that the node tells."""
        self._stream = stream

    @property
    def topic(self) -> str:
        return self.popped.topic

    @property
    def body(self) -> bytes:
        return self.popped.body

    @property
    def attempt(self) -> int:
        return self.popped.attempt

    def ack(self) -> None:
        """Acknowledge."""
        self._stream.settle(self.popped.handle)

    def nack(self, *, delay_ms: int = 0) -> None:
        """Return it after `delay_ms` as a failed attempt."""
        self._stream.settle(self.popped.handle, Change(self.popped.handle, delay_ms))

    def suspend(self, delay_ms: int = 0) -> None:
        """Return it after `delay_ms`, and don't count this delivery as an attempt."""
        self._stream.settle(self.popped.handle, Change(self.popped.handle, delay_ms, suspend=True))
