"""A producer: sends messages in batches, in order, and again where that is safe."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from penstock.pop.client import answers
from penstock.pop.client.batcher import CLOSED, Batcher, runs_by_topic
from penstock.pop.client.durations import Duration, seconds
from penstock.pop.client.outgoing import OutgoingMessage, SendReceipt
from penstock.pop.client.retrydelays import RetryDelays
from penstock.pop.client.tracing import Tracing
from penstock.pop.errors import ClientClosed, NodeUnavailable, NotPermitted, Overloaded, PopError, SendOutcomeUnknown
from penstock.pop.proto import pop_pb2 as pb

logger = logging.getLogger("penstock.client")


class _Sending:
    """A message on its way.

    Parameters:
        message: as the protocol has it.
    """

    __slots__ = ("_began_s", "_began_time_s", "message", "size")

    def __init__(self, message: pb.Message) -> None:
        self.message = message
        self.size = message.ByteSize()
        self._began_s = 0.0
        self._began_time_s = 0.0

    @property
    def is_repeatable(self) -> bool:
        """Whether the node knows the message again if it gets it twice."""
        return bool(self.message.HasField("extras") and self.message.extras.deduplication_id)

    def age_s(self) -> float:
        """Return how long ago the message was sent first, in seconds. The first call returns 0."""
        now_s, now_time_s = time.monotonic(), time.time()
        if not self._began_s:
            self._began_s, self._began_time_s = now_s, now_time_s
        # The first clock stands still while a machine sleeps, and the second one may be set back. The longer time counts.
        return max(now_s - self._began_s, now_time_s - self._began_time_s, 0.0)


class Producer:
    """Sends messages in batches: `Client.producer`. All tasks of the event loop may share it.

        async with client.producer() as producer:
            for reading in readings:
                await producer.post(OutgoingMessage(topic="plant/1/temperature", body=reading))
        # Here all of them are durable.

    Messages leave in the order of the calls, one batch at a time. While a batch is under way, the next one gathers; `linger`
    lets it gather for longer. What is not answered yet is bounded in messages and bytes: at the bound, `send` and `post` wait.

    Each message gets a deduplication id unless it has one. So the producer sends a batch again when the node did not answer,
    and the node stores each message once. A message without an id, of a producer that is not `idempotent`, is never sent twice:
    if its outcome is unknown, its sender gets SendOutcomeUnknown.

    Parameters:
        send: Performs one call of `Send`. It gets a request and raises PopError.
        timeout: Timeout of one call, in seconds or as a timedelta, like all durations here.
        idempotent: Give each message without a deduplication id one.
        linger: How long a batch that is not full waits for more messages. 0: it leaves in the next turn of the loop.
        batch_max: Maximum number of messages in a batch, up to 10,000.
        batch_bytes_max: Maximum size of a batch in bytes. A larger message goes alone.
        buffer_max: Maximum number of messages that have no answer yet.
        buffer_bytes_max: Maximum number of bytes of these messages. A larger message waits until there is no other.
        retry_timeout: How long a message is sent again after its first try. It should be shorter than the node's
            `pop.deduplication`.
        tracing: Makes the span of each message, if there is one.

    Raises:
        TypeError, ValueError: A number or a duration is out of bounds.
    """

    def __init__(
        self,
        send: Callable[[pb.SendRequest], Awaitable[pb.SendResponse]],
        *,
        timeout: Duration,
        idempotent: bool = True,
        linger: Duration = 0.0,
        batch_max: int = 1_000,
        batch_bytes_max: int = 1024 * 1024,
        buffer_max: int = 10_000,
        buffer_bytes_max: int = 32 * 1024 * 1024,
        retry_timeout: Duration = 120.0,
        tracing: Tracing | None = None,
    ) -> None:
        if not 1 <= batch_max <= 10_000 or min(batch_bytes_max, buffer_max, buffer_bytes_max) < 1:
            raise ValueError(
                "batch_max must be from 1 to 10,000, batch_bytes_max, buffer_max and buffer_bytes_max at least 1, not "
                f"{batch_max}, {batch_bytes_max}, {buffer_max} and {buffer_bytes_max}"
            )
        self._send_request = send
        self._tracing = tracing
        self._timeout_s = seconds(timeout, "timeout")
        self._retry_s = seconds(retry_timeout, "retry_timeout")
        self._id_prefix = secrets.token_hex(8) if idempotent else ""
        self._id_number = 0
        self._buffer_max = buffer_max
        self._buffer_bytes_max = buffer_bytes_max
        self._batches: Batcher[_Sending, SendReceipt] = Batcher(
            self._send_batch,
            count_max=batch_max,
            size_max=batch_bytes_max,
            size_of=lambda sending: sending.size,
            linger_s=seconds(linger, "linger"),
        )
        self._unanswered = 0
        self._unanswered_bytes = 0
        self._waiting: deque[tuple[_Sending, asyncio.Future[None]]] = deque()
        """The messages that wait for room, in order."""
        self._answers: dict[asyncio.Future[SendReceipt], _Sending] = {}
        """The messages that have no answer yet, by the future of the answer."""
        self._first_failure: PopError | None = None
        """The first error of a posted message since the last flush."""
        self._failed = 0
        """Number of posted messages that failed since the last flush."""
        self._closed = False

    async def __aenter__(self) -> Producer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def unanswered(self) -> int:
        """Number of messages that have no answer yet."""
        return self._unanswered

    @property
    def unanswered_bytes(self) -> int:
        """Bytes of the messages that have no answer yet."""
        return self._unanswered_bytes

    async def send(
        self,
        topic: str,
        body: bytes = b"",
        *,
        properties: Mapping[str, str] | None = None,
        tag: str = "",
        message_group: str = "",
        deduplication_id: str = "",
    ) -> SendReceipt:
        """Send a message; return when it is durable. `OutgoingMessage` documents the arguments, and has more.

        Raises:
            SendOutcomeUnknown: The node did not answer, and the message may be stored. It has no deduplication id, or the time
                for further tries is over.
            StatusError: The node refused this message. The others of its batch are not concerned.
            Overloaded: The node refused the batch for `retry_timeout`. The message is not stored.
            ClientClosed: The producer or its client was closed.
        """
        message = OutgoingMessage(
            topic=topic,
            body=body,
            properties=properties or {},
            tag=tag,
            message_group=message_group,
            deduplication_id=deduplication_id,
        )
        return await (await self._accept(message))

    async def post(self, message: OutgoingMessage) -> asyncio.Future[SendReceipt]:
        """Take a message into the buffer; return the future of its receipt, which raises what `send` raises.

        This waits only while the buffer is full. Nobody need await the future: `flush` and the end of the `async with` block
        raise what went wrong.

        Raises:
            ClientClosed: The producer or its client was closed.
        """
        answer = await self._accept(message)
        answer.add_done_callback(self._note_failure)
        return answer

    def _note_failure(self, answer: asyncio.Future[SendReceipt]) -> None:
        error = None if answer.cancelled() else answer.exception()
        if isinstance(error, PopError):
            self._failed += 1
            self._first_failure = self._first_failure or error

    async def _accept(self, message: OutgoingMessage) -> asyncio.Future[SendReceipt]:
        if self._closed:
            raise ClientClosed(CLOSED)
        if self._id_prefix and not message.deduplication_id:
            self._id_number += 1
            message = replace(message, deduplication_id=f"{self._id_prefix}-{self._id_number}")
        sending = _Sending(message.encoded())
        if self._waiting or not self._has_room(sending):
            await self._wait_for_room(sending)
        else:
            self._take_room(sending)
        return self._submit(sending)

    async def flush(self) -> None:
        """Return when all messages that were sent or posted before are answered.

        Raises:
            What `send` raises: the first error of a posted message since the last flush. A note says how many failed.
        """
        self._batches.hurry()
        if self._answers:
            await asyncio.wait(list(self._answers))
        failure, failed = self._first_failure, self._failed
        self._first_failure, self._failed = None, 0
        if failure is not None:
            failure.add_note(f"{failed} of the posted messages failed; the future of each has its error")
            raise failure

    async def aclose(self) -> None:
        """Accept no more messages, and flush. Messages that wait for room fail. Closing twice does nothing.

        Raises as `flush` does.
        """
        self._refuse_more()
        await self.flush()

    def _refuse_more(self) -> None:
        self._closed = True
        while self._waiting:
            _, room = self._waiting.popleft()
            if not room.done():
                room.set_exception(ClientClosed(CLOSED))

    async def abort(self, within: Duration) -> None:
        """Accept no more messages, and fail those without an answer after `within`. For the client that closes."""
        self._refuse_more()
        await self._batches.close(seconds(within, "within"))

    # --- the buffer -------------------------------------------------------------------------------------------------

    def _has_room(self, sending: _Sending) -> bool:
        return self._unanswered == 0 or (
            self._unanswered < self._buffer_max and self._unanswered_bytes + sending.size <= self._buffer_bytes_max
        )

    def _take_room(self, sending: _Sending) -> None:
        self._unanswered += 1
        self._unanswered_bytes += sending.size

    async def _wait_for_room(self, sending: _Sending) -> None:
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((sending, room))
        self._batches.hurry()  # a buffer smaller than a batch never fills one
        try:
            await room
        except BaseException:
            if room.done() and not room.cancelled() and room.exception() is None:
                self._release(sending)  # the room came when the task was cancelled
            else:
                with suppress(ValueError):
                    self._waiting.remove((sending, room))
                self._give_room()  # a smaller message may be next
            raise

    def _submit(self, sending: _Sending) -> asyncio.Future[SendReceipt]:
        try:
            answer = self._batches.submit(sending)
        except ClientClosed:
            self._release(sending)
            raise
        self._answers[answer] = sending
        answer.add_done_callback(self._answered)
        if self._tracing is not None:  # The batch leaves in a later turn of the loop, so it has the context.
            answer.add_done_callback(self._tracing.begin_send(sending.message))
        return answer

    def _answered(self, answer: asyncio.Future[SendReceipt]) -> None:
        self._release(self._answers.pop(answer))

    def _release(self, sending: _Sending) -> None:
        self._unanswered -= 1
        self._unanswered_bytes -= sending.size
        self._give_room()

    def _give_room(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            sending, room = self._waiting.popleft()
            if not room.done():
                self._take_room(sending)
                room.set_result(None)

    # --- sending ----------------------------------------------------------------------------------------------------

    async def _send_batch(self, batch: list[_Sending]) -> list[SendReceipt | PopError]:
        found: dict[_Sending, SendReceipt | PopError] = {}
        left = batch
        delays = RetryDelays()
        while left:
            try:
                response = await self._send_request(pb.SendRequest(messages=[self._aged(sending) for sending in left]))
            except NodeUnavailable as error:
                again = [sending for sending in left if sending.is_repeatable and sending.age_s() < self._retry_s]
                unknown = set(left).difference(again)
                found.update((sending, _unknown(sending, error)) for sending in unknown)
                why: PopError = error
            except Overloaded as error:  # None of them is stored.
                again = [sending for sending in left if sending.age_s() < self._retry_s]
                found.update((sending, error) for sending in set(left).difference(again))
                why = error
            except NotPermitted as error:  # None of them is stored. The messages to other topics must not suffer.
                runs = runs_by_topic(left, lambda sending: sending.message.topic)
                if len(runs) == 1:
                    found.update((sending, error) for sending in left)
                    break
                for run in runs:
                    found.update(zip(run, await self._send_batch(run), strict=True))
                break
            except PopError as error:
                found.update((sending, error) for sending in left)
                break
            else:
                found.update(zip(left, answers.receipts(response), strict=True))
                break
            left = again
            if left:
                wait_s = delays.next_s()
                logger.warning("%s; the producer sends %d messages again in %.2f s", why, len(left), wait_s)
                await asyncio.sleep(wait_s)
        return [found[sending] for sending in batch]

    def _aged(self, sending: _Sending) -> pb.Message:
        age_s = sending.age_s()
        if age_s and sending.is_repeatable:
            # This call may reach the node at any time before its timeout.
            sending.message.extras.deduplication_age_ms = math.ceil((age_s + self._timeout_s) * 1000)
        return sending.message


def _unknown(sending: _Sending, error: NodeUnavailable) -> SendOutcomeUnknown:
    if sending.is_repeatable:
        return SendOutcomeUnknown(f"{error}; the message may be stored, and the time for further tries is over (retry_timeout)")
    return SendOutcomeUnknown(
        f"{error}; the message may be stored, and has no deduplication id with which it could be sent again"
    )
