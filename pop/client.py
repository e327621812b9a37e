"""An asyncio client of `millrace.pop.v1`.

async with Client("127.0.0.1:8081") as client:
    await client.send("plant/1/a/temperature", b"21.5")
    async for message in client.consume("plant/#", group="billing"):
        ...
        await message.ack()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, NamedTuple, TypeVar

import grpc.aio

from pop import pop_pb2 as pb
from pop.calls import CHANNEL_OPTIONS, Batched, call, error_of_status
from pop.consumer import Consumer, Message, Settlements
from pop.errors import BatchFailed, ClientClosed, PopError
from pop.pop_pb2_grpc import PopServiceStub

__all__ = ["Client", "Consumer", "Message", "OutgoingMessage", "Sent"]

SEND_COUNT_MAX = 4096
SEND_BYTES_MAX = 8 * 1024 * 1024
"""Bodies of one call that gathers single messages: a node takes 64 MiB, but should not have to at once."""

A = TypeVar("A")


class Sent(NamedTuple):
    """What came of a message that was sent: it is durable.

    `message_id` is its position in the log, 16 hexadecimal digits. `recall_handle` is empty unless it is delayed.
    """

    message_id: str
    recall_handle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessage:
    """A message to be sent.

    Parameters:
        topic: MQTT topic, without wildcards.
        body: anything; with topic and properties at most `pop.message_bytes_max` of the node (4 MiB by default).
        properties: up to 128 pairs of text, each up to 65,535 bytes.
        tag: what kind of message it is, for filters.
        message_group: messages of one group are in order for groups of consumers that ask for it.
        deliver_at_ms: ms since 1970, by the node's clock; 0, or what is past, is at once.
        delay_ms: instead of `deliver_at_ms`, ms from now by this machine's clock.

    Raises:
        ValueError: both `deliver_at_ms` and `delay_ms` are given.
    """

    topic: str
    body: bytes = b""
    properties: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""
    message_group: str = ""
    deliver_at_ms: int = 0
    delay_ms: int = 0

    def __post_init__(self) -> None:
        if self.deliver_at_ms and self.delay_ms:
            raise ValueError("give deliver_at_ms or delay_ms, not both")

    def encoded(self) -> pb.Message:
        """Return the message as it goes over the wire."""
        deliver_at_ms = self.deliver_at_ms if not self.delay_ms else time.time_ns() // 1_000_000 + self.delay_ms
        return pb.Message(
            topic=self.topic,
            body=self.body,
            properties=self.properties,
            tag=self.tag,
            message_group=self.message_group,
            deliver_at_ms=deliver_at_ms,
        )


class Client:
    """A client of one node. To be made where an event loop runs; it may be shared by all tasks of that loop.

    Parameters:
        target: `HOST:PORT` of the node's gRPC listener.
        timeout_ms: how long a call may take, waiting for the node included. Afterwards it raises NodeUnavailable.
        close_ms: how long `aclose` waits for the answers to what was sent before it.
    """

    def __init__(self, target: str, *, timeout_ms: int = 10_000, close_ms: int = 2_000) -> None:
        asyncio.get_running_loop()  # gRPC would bind itself to a loop that never runs
        self._timeout_s = timeout_ms / 1000
        self._close_s = close_ms / 1000
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub = PopServiceStub(self._channel)
        self._sends: Batched[pb.Message, Sent] = Batched(
            self._send, count_max=SEND_COUNT_MAX, bytes_max=SEND_BYTES_MAX, size_of=pb.Message.ByteSize
        )
        self._settlements: dict[str, Settlements] = {}
        self._consumers: set[Consumer] = set()
        self._closed = False

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End all consumers, send what was acknowledged, close the connection. More than one call is harmless."""
        self._closed = True
        await asyncio.gather(*(consumer.aclose() for consumer in list(self._consumers)))
        closing = [self._sends.close(self._close_s)]
        for settlements in self._settlements.values():
            closing += [settlements.changes.close(self._close_s), settlements.acks.close(self._close_s)]
        await asyncio.gather(*closing)
        await self._channel.close(None)

    # --- sending ----------------------------------------------------------------------------------------------------

    async def send(
        self,
        topic: str,
        body: bytes = b"",
        *,
        properties: Mapping[str, str] | None = None,
        tag: str = "",
        message_group: str = "",
        deliver_at_ms: int = 0,
        delay_ms: int = 0,
    ) -> Sent:
        """Send a message; return when it is durable. See `OutgoingMessage` for the arguments.

        What several tasks send at the same time shares calls. Order within a task, and among tasks, is that of the calls
        of this method.

        Raises:
            StatusError: one of its subclasses says why the node refused it.
            NodeUnavailable: no answer came. The message may have been stored: send it again if twice is better than never.
            ValueError: both `deliver_at_ms` and `delay_ms` are given.
        """
        message = OutgoingMessage(
            topic=topic,
            body=body,
            properties=properties or {},
            tag=tag,
            message_group=message_group,
            deliver_at_ms=deliver_at_ms,
            delay_ms=delay_ms,
        )
        self._check_open()
        return await self._sends.submit(message.encoded())

    async def send_batch(self, messages: Iterable[OutgoingMessage]) -> list[Sent]:
        """Send up to 10,000 messages, of up to 64 MiB, as one call; return when all are durable, with what came of each.

        Raises:
            BatchFailed: the node refused some of them; the others are durable, and in its `results`.
            RequestInvalid, Overloaded: the batch is too large.
            NodeUnavailable: no answer came. Any of them may have been stored.
        """
        self._check_open()
        return _all_or_raise(await self._send([message.encoded() for message in messages]))

    async def _send(self, messages: list[pb.Message]) -> list[Sent | PopError]:
        answer = await call(self._stub.Send, pb.SendRequest(messages=messages), self._timeout_s)
        return [error_of_status(result.status) or Sent(result.message_id, result.recall_handle) for result in answer.results]

    async def recall(self, recall_handle: str) -> None:
        """Cancel a delayed message that has not been delivered.

        Raises:
            AlreadyFired, AlreadyRecalled, UnknownMessage, InvalidHandle: the node states why it can't.
            NodeUnavailable: no answer came. It may have been cancelled.
        """
        self._check_open()
        answer = await call(self._stub.Recall, pb.RecallRequest(recall_handles=[recall_handle]), self._timeout_s)
        error = error_of_status(answer.statuses[0])
        if error is not None:
            raise error

    # --- consuming --------------------------------------------------------------------------------------------------

    def consume(
        self,
        topic_filter: str,
        *,
        group: str,
        batch: int = 64,
        prefetch: int = 128,
        invisible_ms: int = 60_000,
        wait_ms: int = 20_000,
        start: Literal["earliest", "latest"] = "earliest",
    ) -> Consumer:
        """Return an iterator over the messages of `group` on `topic_filter`. It begins to pop when its loop begins.

        Args:
            topic_filter: MQTT topic filter, or `$dlq/GROUP` for the dead letters of another group.
            group: name of the service. Its consumers, wherever they run, share the messages.
            batch: messages of one pop, at least 1.
            prefetch: messages that may wait here for the loop, at least `batch`. Their invisible time runs already.
            invisible_ms: how long the node waits for the acknowledgement, from the pop on.
            wait_ms: how long one poll waits for the first message before it asks anew.
            start: where a group begins that is new: "earliest" with all that the log has, "latest" with what comes now.

        Raises:
            ValueError: a number is out of bounds.
        """
        self._check_open()
        if not 1 <= batch <= prefetch or invisible_ms < 1 or wait_ms < 0:
            raise ValueError(
                f"batch must be at least 1 and at most prefetch, invisible_ms at least 1, wait_ms at least 0; "
                f"not {batch}, {prefetch}, {invisible_ms}, {wait_ms}"
            )
        consumer = Consumer(
            self._stub,
            self._settlements_of(group),
            _pop_request(topic_filter, group, batch, invisible_ms, wait_ms, start),
            prefetch=prefetch,
            timeout_s=self._timeout_s,
            close_s=self._close_s,
            on_close=self._consumers.discard,
        )
        self._consumers.add(consumer)
        return consumer

    async def pop(
        self,
        topic_filter: str,
        *,
        group: str,
        messages_max: int = 0,
        invisible_ms: int = 0,
        wait_ms: int = 0,
        start: Literal["earliest", "latest"] = "earliest",
    ) -> list[Message]:
        """Take up to `messages_max` messages by one call, and wait up to `wait_ms` for the first; an empty list is no error.

        0 for `messages_max` or `invisible_ms` leaves them to the node. See `consume` for the arguments.

        Raises:
            RequestInvalid: the group's name, the filter, or a number is not allowed.
            Overloaded, NodeUnavailable: as they say.
        """
        self._check_open()
        request = _pop_request(topic_filter, group, messages_max, invisible_ms, wait_ms, start)
        answer = await call(self._stub.Pop, request, self._timeout_s + max(wait_ms, 0) / 1000)
        return self._settlements_of(group).messages(answer.messages, 0)

    async def ack(self, handles: Iterable[str], *, group: str) -> None:
        """Acknowledge many deliveries of a group; return when that is durable.

        Raises:
            BatchFailed: some could not be acknowledged, each with its reason; the others are.
        """
        self._check_open()
        _all_or_raise(await self._settlements_of(group).acks.submit_all(handles))

    # ----------------------------------------------------------------------------------------------------------------

    def _settlements_of(self, group: str) -> Settlements:
        settlements = self._settlements.get(group)
        if settlements is None:
            settlements = self._settlements[group] = Settlements(self._stub, group, self._timeout_s)
        return settlements

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed("this client was closed: make a new one")


def _pop_request(
    topic_filter: str, group: str, messages_max: int, invisible_ms: int, wait_ms: int, start: Literal["earliest", "latest"]
) -> pb.PopRequest:
    return pb.PopRequest(
        group=group,
        filter=topic_filter,
        messages_max=messages_max,
        invisible_ms=invisible_ms,
        wait_ms=wait_ms,
        start=pb.LATEST if start == "latest" else pb.EARLIEST,
    )


def _all_or_raise(answers: list[A | PopError]) -> list[A]:
    """Return the answers of a batch. Raises BatchFailed where one of them is an error."""
    results = [None if isinstance(answer, PopError) else answer for answer in answers]
    errors = {place: answer for place, answer in enumerate(answers) if isinstance(answer, PopError)}
    if errors:
        raise BatchFailed(errors, results)
    return [answer for answer in answers if not isinstance(answer, PopError)]
