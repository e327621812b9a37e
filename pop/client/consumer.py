"""An iterator over the messages of a group that pops ahead of its loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import TYPE_CHECKING

import grpc.aio

from penstock.pop.client import answers
from penstock.pop.client.message import Message
from penstock.pop.client.retrydelays import RetryDelays
from penstock.pop.client.settlements import Settlements
from penstock.pop.client.statuses import error_of_call
from penstock.pop.errors import ClientClosed, NodeUnavailable, Overloaded, PopError
from penstock.pop.proto import pop_pb2 as pb

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import PopServiceAsyncStub

# The standard library's logger, unlike the node's: the application decides where its messages go.
logger = logging.getLogger("penstock.client")

EMPTY_S_MIN = 0.1
"""If an empty answer comes faster than this, the consumer pauses as long before it polls again. A node may not let polls wait
(`pop.wait_ms_max = 0`), and must not be flooded with polls then."""

ANSWER_S_MAX = 0.2
"""A poll older than this waits for messages and can be cancelled. The node may have answered a younger one already. Cancelling
that one would lose its messages until their invisible time ends, so closing waits for it."""

USABLE = 0.9
"""Part of the invisible time in which the consumer may give a message to the loop. After it the loop could hardly settle the
message before the deadline."""


class Consumer:
    """Messages of a group, as an asynchronous iterator from `Client.consume`.

        async for message in client.consume("plant/#", group="billing"):
            await message.ack()

    The consumer pops in the background, ahead of the loop, whenever a whole batch fits below `prefetch`. Each pop carries the
    acknowledgements that wait. Several tasks may iterate over one consumer: each message goes to one of them. When the last
    task leaves its loop, or leaves the `async with` around it, the consumer closes: it ends its poll and returns the messages
    that no task has seen. While the node is away the consumer waits, and continues when the node is back.
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
        self._iterators = 0
        self._poller: asyncio.Task[None] | None = None
        self._poll_call: grpc.aio.UnaryUnaryCall[pb.PopRequest, pb.PopResponse] | None = None
        self._polled_s = 0.0
        self._closer: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._delays = RetryDelays()
        self._closing = asyncio.Event()
        self._wake = asyncio.Event()
        """Wakes the poller: the buffer has room again, or the consumer closes."""
        self._arrived = asyncio.Event()
        """Wakes the iterators: there are messages, or the consumer closes."""

    # --- iterating --------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncGenerator[Message, None]:
        # Each loop gets a generator of its own. Python closes it when the loop ends, in whatever way.
        return self._iterate()

    async def _iterate(self) -> AsyncGenerator[Message, None]:
        self._enter()
        try:
            while (message := await self._next()) is not None:
                yield message
        finally:
            await self._leave()

    async def __aenter__(self) -> Consumer:
        self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._leave()

    def _enter(self) -> None:
        if self._closing.is_set():
            raise ClientClosed("this consumer was closed: call consume() again")
        self._iterators += 1
        if self._poller is None:
            self._poller = asyncio.get_running_loop().create_task(self._poll())
            self._poller.add_done_callback(self._poller_ended)

    async def _leave(self) -> None:
        self._iterators -= 1
        if not self._iterators:
            await self.aclose()

    async def _next(self) -> Message | None:
        """Return the next message, or None when the consumer is closed. Skips messages that expired in the buffer."""
        loop = asyncio.get_running_loop()
        while True:
            while self._buffer:
                message = self._buffer.popleft()
                if self._has_room():
                    self._wake.set()
                if message._usable_until_s > loop.time():
                    return message
            if self._closing.is_set():
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
        while not self._closing.is_set():
            if not self._has_room():
                self._wake.clear()
                await self._wake.wait()
                continue
            self._polled_s = loop.time()
            settlements = self._settlements
            acks = settlements.acks.take()
            request = self._request
            if acks:
                request = pb.PopRequest(acks=[handle for handle, _ in acks])
                request.MergeFrom(self._request)
            try:
                self._poll_call = self._stub.Pop(request, timeout=self._timeout_s, wait_for_ready=True)
                answer = await self._poll_call
            except grpc.aio.AioRpcError as error:
                settlements.put_back(acks)
                await self._wait_after(error_of_call(error))
                continue
            except asyncio.CancelledError:
                settlements.put_back(acks)
                if self._closing.is_set():
                    return  # `aclose` cancelled the call.
                raise
            self._delays.reset()
            if acks:
                settlements.acks.answer(acks, answers.errors(answer.ack_statuses) or [None] * len(acks))
            if answer.messages:
                usable_until_s = loop.time() + self._request.invisible_ms / 1000 * USABLE
                self._buffer.extend(Message(received, settlements, usable_until_s) for received in answer.messages)
                self._arrived.set()
            elif not acks and loop.time() - self._polled_s < EMPTY_S_MIN:
                await self._pause(EMPTY_S_MIN)

    async def _wait_after(self, error: PopError) -> None:
        """Wait before the next try if an error is temporary. Raises any other error."""
        if not isinstance(error, NodeUnavailable | Overloaded):
            raise error
        wait_s = self._delays.next_s()
        logger.warning("group %s: %s; the consumer polls again in %.2f s", self._settlements.group, error, wait_s)
        await self._pause(wait_s)

    async def _pause(self, wait_s: float) -> None:
        """Wait for `wait_s` seconds, or until the consumer closes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._closing.wait()

    def _poller_ended(self, poller: asyncio.Task[None]) -> None:
        if poller.cancelled():
            self._failure = ClientClosed("the event loop cancelled this consumer's poll")
        else:
            self._failure = poller.exception()
        self._arrived.set()

    # --- closing ----------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """End the poll, return the messages that no task has seen, and send waiting acknowledgements.

        Closing a closed consumer does nothing.
        """
        self._closing.set()
        if self._closer is None:
            self._closer = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closer)

    async def _close(self) -> None:
        self._wake.set()
        if self._poller is not None:
            remaining_s = self._polled_s + ANSWER_S_MAX - asyncio.get_running_loop().time()
            await asyncio.wait((self._poller,), timeout=max(remaining_s, 0))
            if self._poll_call is not None:
                self._poll_call.cancel()
            await asyncio.wait((self._poller,))
        unseen = [message.handle for message in self._buffer]
        self._buffer.clear()
        self._arrived.set()
        await self._settlements.give_back(unseen, self._close_s)
        await self._settlements.acks.flush(self._close_s)
        self._on_close(self)
