"""An iterator over the messages of a group that pops ahead of its loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc.aio

from penstock.pop.client import answers
from penstock.pop.client.durations import Duration, seconds
from penstock.pop.client.message import Message
from penstock.pop.client.requests import attempt_ids
from penstock.pop.client.retrydelays import RetryDelays
from penstock.pop.client.settlements import AckItem, Settlements, by_item, handles_of
from penstock.pop.client.statuses import error_of_call
from penstock.pop.client.tracing import now_ns
from penstock.pop.client.unseen import SurplusWatch, UnseenMessages
from penstock.pop.errors import ClientClosed, NodeUnavailable, Overloaded, PopError
from penstock.pop.proto import pop_pb2 as pb

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import PopServiceAsyncStub

# The standard library's logger, unlike the node's: the application decides where its messages go.
logger = logging.getLogger("penstock.client")

EMPTY_S_MIN = 0.1
"""If an empty answer comes faster than this, the consumer pauses as long before it polls again. A node may not let polls wait
(`PopOptions.wait_ms_max = 0`), and must not be flooded with polls then."""

ANSWER_S_MAX = 0.2
"""A poll older than this waits for messages, and closing cancels it. It waits for a younger one, which is answered soon."""


class Consumer:
    """Messages of a group, as an asynchronous iterator from `Client.consume`.

        async for message in client.consume("plant/#", group="billing"):
            await message.ack()

    The consumer pops in the background, ahead of the loop. Each pop carries the acknowledgements that wait. The consumer
    measures how long the loop handles a message, and keeps as many messages ready as the loop takes within half the invisible
    time, at most `prefetch`. Messages that the loop will not reach in time are returned to the node, which counts no attempt.

    Several tasks may iterate over one consumer: each message goes to one of them. When the last task leaves its loop, or leaves
    the `async with` around it, the consumer closes: it ends its poll and returns the messages that no task has seen. While the
    node is away the consumer waits, and continues when the node is back.
    """

    def __init__(
        self,
        stub: PopServiceAsyncStub,
        settlements: Settlements,
        request: pb.PopRequest,
        *,
        prefetch: int,
        timeout: Duration,
        close_timeout: Duration,
        on_close: Callable[[Consumer], None],
        first_max: int = 0,
        fast_max: int = 0,
        ack_hold: Duration = 0.0,
    ) -> None:
        self._stub = stub
        self._settlements = settlements
        self._request = request
        self._timeout_s = seconds(timeout, "timeout") + request.wait_ms / 1000
        self._close_s = seconds(close_timeout, "close_timeout")
        self._on_close = on_close
        self._unseen: UnseenMessages[Message | list[Message]] = UnseenMessages(
            prefetch, request.invisible_ms / 1000, first_max, fast_max
        )
        """Messages; or lists of messages of one message group, in their order, where a pop may have several of a group."""
        self._surplus = SurplusWatch(
            self._unseen, settlements.group, lambda unseen: settlements.return_unseen(_handles(unseen))
        )
        self._is_in_order = request.in_order_max > 1
        self._batch = request.messages_max
        self._iterators = 0
        self._idle = 0
        """Number of tasks that wait for a message."""
        self._poller: asyncio.Task[None] | None = None
        self._poll_call: grpc.aio.UnaryUnaryCall[pb.PopRequest, pb.PopResponse] | None = None
        self._polled_s = 0.0
        self._attempts = attempt_ids()
        request.attempt_id = next(self._attempts)
        self._closer: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._delays = RetryDelays()
        self._wait_ms = request.wait_ms
        self._hold_s = seconds(ack_hold, "ack_hold")
        self._has_backlog = False
        """Whether the last answer had messages, so that the next pop will come soon."""
        self.problem = ""
        """Why the last poll failed; empty if it succeeded. The consumer goes on trying."""
        self.was_answered = False
        """Whether the node has answered a poll."""
        self._is_cut_short = False
        """Whether a poll was cancelled that the node may have answered."""
        self._closing = asyncio.Event()
        self._wake = asyncio.Event()
        """Wakes the poller: the buffer has room again, or the consumer closes."""
        self._arrived = asyncio.Event()
        """Wakes the iterators: there are messages, or the consumer closes."""

    @property
    def returned(self) -> int:
        """Number of messages that the loop would not have reached in time. They went back without counting an attempt."""
        return self._unseen.returned

    @property
    def expired(self) -> int:
        """Number of messages that expired before the loop saw them, because something blocked the event loop."""
        return self._unseen.expired

    # --- iterating --------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncGenerator[Message, None]:
        # Each loop gets a generator of its own. Python closes it when the loop ends, in whatever way.
        return self._iterate()

    async def _iterate(self) -> AsyncGenerator[Message, None]:
        self._enter()
        time_s = asyncio.get_running_loop().time
        try:
            while (run := await self._next(1)) is not None:
                began_s = time_s()
                for message in run:
                    yield message
                self._unseen.handled(time_s() - began_s)
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
        self._unseen.takers = self._iterators
        if self._poller is None:
            self._poller = asyncio.get_running_loop().create_task(self._poll())
            self._poller.add_done_callback(self._poller_ended)

    async def _leave(self) -> None:
        self._iterators -= 1
        self._unseen.takers = max(self._iterators, 1)
        if not self._iterators:
            await self.aclose()

    async def take(self, count: int = 1) -> list[Message] | None:
        """Return up to `count` messages as soon as there are any; None when the consumer is closed.

        If the consumer pops several messages of a message group, the list has messages of one message group only, in their
        order, and `count` does not bound it. The caller must be within `async with consumer`, and call `handled` afterwards.

        Raises:
            PopError: The consumer can't go on: the group was deleted, or the node refuses the call.
            RuntimeError: The caller is not within `async with consumer`.
        """
        if not self._iterators and self._poller is None:
            raise RuntimeError("take messages within `async with consumer`: before that the consumer does not receive any")
        return self.take_now(count) or await self._next(count)

    def take_now(self, count: int = 1) -> list[Message]:
        """Return what `take` returns if it need not wait, or an empty list."""
        found = self._unseen.take_all(asyncio.get_running_loop().time(), 1 if self._is_in_order else count)
        if found and not self._wake.is_set() and self._room() > 0:
            self._wake.set()
        return found[0] if self._is_in_order and found else found  # type: ignore[return-value]  # of one kind each

    def handled(self, handling: Duration, takers: int) -> None:
        """Note how long a task needed for what `take` returned, as a duration, and how many tasks take messages."""
        self._unseen.takers = takers
        self._unseen.handled(handling if isinstance(handling, float) else seconds(handling, "handling"))

    async def _next(self, count: int) -> list[Message] | None:
        """Return the next messages, or None when the consumer is closed."""
        while True:
            if found := self.take_now(count):
                return found
            if self._unseen:
                self._surplus.return_surplus()  # It is too late for the first message.
                continue
            if self._closing.is_set():
                return None
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            self._idle += 1
            self._wake.set()
            try:
                await self._arrived.wait()
            finally:
                self._idle -= 1

    # --- polling ----------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """Return how many messages the next pop asks for. 0: it waits until a batch has room, or the loop has taken all."""
        room = self._unseen.room(asyncio.get_running_loop().time())
        if self._idle and not self._unseen:
            return min(max(room, self._idle), self._batch)
        wanted = min(self._batch, max((room + len(self._unseen)) // 2, 1))
        return min(room, self._batch) if room >= wanted else 0

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._closing.is_set():
            room = self._room()
            if room == 0:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._polled_s = loop.time()
            began_ns = now_ns()
            settlements = self._settlements
            acks = settlements.acks.take()
            request = self._request
            request.messages_max = room
            request.wait_ms = 0 if self.problem else self._wait_ms  # After a failure, an answer soon says that all is well.
            if acks:
                request = pb.PopRequest(acks=handles_of(ack for ack, _ in acks))
                request.MergeFrom(self._request)
            if self._has_backlog and self._hold_s:
                settlements.acks.hold(self._hold_s)
            try:
                # The first poll says at once that the node is away. Those after it wait for the node, to be back when it is.
                self._poll_call = self._stub.Pop(request, timeout=self._timeout_s, wait_for_ready=bool(self.problem))
                answer = await self._poll_call
            except grpc.aio.AioRpcError as error:
                settlements.acks.release()
                settlements.put_back(acks)
                await self._wait_after(error_of_call(error))
                continue
            except asyncio.CancelledError:
                settlements.put_back(acks)
                if self._closing.is_set():
                    self._is_cut_short = not self.problem
                    return  # `aclose` cancelled the call.
                raise
            self._delays.reset()
            if self.problem:
                logger.info("group %s: the node answers again", settlements.group)
            self.problem = ""
            self.was_answered = True
            if acks:
                settlements.acks.answer(acks, _answers(acks, answer.ack_statuses))
            self._has_backlog = bool(answer.messages)
            if not answer.messages:
                settlements.acks.release()  # The next pop may wait for messages.
            if answer.messages:
                self._request.attempt_id = next(self._attempts)
                if settlements.tracing is not None:
                    settlements.tracing.received(settlements.group, self._request.filter, answer.messages, began_ns)
                now_s = loop.time()
                self._unseen.invisible_s = answer.invisible_ms / 1000
                self._unseen.add(self._received(answer.messages, now_s + self._unseen.invisible_s), now_s)
                self._arrived.set()
                self._surplus.begin()
            elif not acks and loop.time() - self._polled_s < EMPTY_S_MIN:
                await self._pause(EMPTY_S_MIN)

    def _received(self, received: Iterable[pb.PoppedMessage], deadline: float) -> Sequence[Message | list[Message]]:
        settlements = self._settlements
        messages = [Message(each, settlements, deadline) for each in received]
        if not self._is_in_order:
            return messages
        runs: dict[tuple[str, str], list[Message]] = {}
        for message in messages:
            key = (message.message_group, "" if message.message_group else message.topic)
            runs.setdefault(key, []).append(message)
        return list(runs.values())

    async def _wait_after(self, error: PopError) -> None:
        """Wait before the next try if an error is temporary. Raises any other error."""
        if not isinstance(error, NodeUnavailable | Overloaded):
            raise error
        self.problem = str(error)
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
        self._surplus.stop()
        if self._poller is not None:
            remaining_s = self._polled_s + ANSWER_S_MAX - asyncio.get_running_loop().time()
            await asyncio.wait((self._poller,), timeout=max(remaining_s, 0))
            if self._poll_call is not None:
                self._poll_call.cancel()
            await asyncio.wait((self._poller,))
        unseen = _handles(self._unseen.clear())
        self._arrived.set()
        if self._is_cut_short:
            unseen += await self._answered_meanwhile()
        await self._settlements.give_back(unseen, self._close_s)
        await self._settlements.acks.flush(self._close_s)
        self._on_close(self)

    async def _answered_meanwhile(self) -> list[str]:
        """Return the handles of the messages that a poll had got when it was cancelled; or of one that is visible now."""
        self._request.wait_ms, self._request.messages_max = 0, 1
        try:
            answer = await self._stub.Pop(self._request, timeout=self._close_s)
        except grpc.aio.AioRpcError:
            return []  # What the poll may have got comes back when its invisible time is over.
        return [message.handle for message in answer.messages]


def _answers(acks: list[tuple[AckItem, asyncio.Future[Any]]], statuses: Sequence[pb.Status]) -> list[Any]:
    """Return the answer for each item of a pop's acknowledgements. No statuses: all are acknowledged."""
    items = [ack for ack, _ in acks]
    if statuses:
        return by_item(items, answers.errors(statuses))
    return [None if isinstance(ack, str) else [None] * len(ack) for ack in items]


def _handles(unseen: Iterable[Message | list[Message]]) -> list[str]:
    return [message.handle for each in unseen for message in (each if isinstance(each, list) else (each,))]
