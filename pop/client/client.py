"""An asyncio client of `penstock.pop.v1`.

async with Client("127.0.0.1:8081") as client:
    await client.send("plant/1/a/temperature", b"21.5")
    async for message in client.consume("plant/#", group="billing"):
        ...
        await message.ack()
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import grpc.aio

from penstock.pop.client.calls import PLAIN, Backoff, Batched, Security, call, channel_of, error_of_status
from penstock.pop.client.consumer import Consumer, Message, Settlements, StreamConsumer
from penstock.pop.client.requests import (
    OutgoingMessage,
    Popped,
    Sent,
    all_or_raise,
    pop_request,
    redrive_request,
    refused_of,
    reset_request,
    sent_of,
    settings_of,
    start_fields,
)
from penstock.pop.errors import (
    AlreadyCommitted,
    AlreadyRolledBack,
    ClientClosed,
    NodeUnavailable,
    Overloaded,
    PopError,
    StatusError,
)
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2_grpc import GroupServiceStub, PopServiceStub

if TYPE_CHECKING:
    from penstock.store.lightqueue import End, Start

__all__ = [
    "Client",
    "Consumer",
    "Message",
    "OutgoingMessage",
    "Popped",
    "Security",
    "Sent",
    "StreamConsumer",
    "Transaction",
    "settings_of",
]

Q = TypeVar("Q")
A = TypeVar("A")

SEND_COUNT_MAX = 4096
SEND_BYTES_MAX = 8 * 1024 * 1024
"""Bodies of one call that gathers single messages: a node takes 64 MiB, but should not have to at once."""


class Transaction:
    """Half of a transaction: stored, and delivered when it is committed. `Client.begin` makes it.

    Left as a context manager, it is committed, or rolled back where an exception leaves it.
    """

    def __init__(self, client: Client, sent: Sent) -> None:
        self._client = client
        self._ended = False
        self.message_id = sent.message_id
        self.handle = sent.transaction_handle

    async def commit(self) -> None:
        """Deliver the message; return when that is durable. Once committed, doing it again is harmless.

        Raises:
            AlreadyRolledBack, UnknownTransaction, InvalidHandle: the node states why it can't.
            NodeUnavailable: no answer came: commit again, or let the node ask.
        """
        self._ended = True
        with contextlib.suppress(AlreadyCommitted):
            await self._client.end_transaction(self.handle, commit=True)

    async def rollback(self) -> None:
        """Never deliver the message. Once rolled back, doing it again is harmless.

        Raises:
            AlreadyCommitted, UnknownTransaction, InvalidHandle, NodeUnavailable: as `commit`.
        """
        self._ended = True
        with contextlib.suppress(AlreadyRolledBack):
            await self._client.end_transaction(self.handle, commit=False)

    async def __aenter__(self) -> Transaction:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._ended:
            await (self.commit() if error is None else self.rollback())


Decide = Callable[[pb.Transaction], Awaitable[bool | None]]
"""Tells the outcome of a transaction: True to commit, False to roll back, None where it isn't known yet."""


class Client:
    """A client of one node. To be made where an event loop runs; it may be shared by all tasks of that loop.

    Parameters:
        target: `HOST:PORT` of the node's gRPC listener.
        timeout_ms: how long a call may take, waiting for the node included. Afterwards it raises NodeUnavailable.
        close_ms: how long `aclose` waits for the answers to what was sent before it.
        security: TLS, and who calls; plain text and nobody by default.
    """

    def __init__(self, target: str, *, timeout_ms: int = 10_000, close_ms: int = 2_000, security: Security = PLAIN) -> None:
        asyncio.get_running_loop()  # gRPC would bind itself to a loop that never runs
        self._timeout_s = timeout_ms / 1000
        self._close_s = close_ms / 1000
        self._channel = channel_of(target, security)
        self._stub = PopServiceStub(self._channel)
        self._groups = GroupServiceStub(self._channel)
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
        return all_or_raise(await self._send([message.encoded() for message in messages]))

    async def _send(self, messages: list[pb.Message]) -> list[Sent | PopError]:
        answer = await call(self._stub.Send, pb.SendRequest(messages=messages), self._timeout_s)
        return [error_of_status(result.status) or sent_of(result) for result in answer.results]

    async def recall(self, recall_handle: str) -> None:
        """Cancel a delayed message that has not been delivered.

        Raises:
            AlreadyFired, AlreadyRecalled, UnknownMessage, InvalidHandle: the node states why it can't.
            NodeUnavailable: no answer came. It may have been cancelled.
        """
        answer = await self._call(self._stub.Recall, pb.RecallRequest(recall_handles=[recall_handle]))
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
        start: Start = "earliest",
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
            pop_request(topic_filter, group, batch, invisible_ms, wait_ms, start),
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
        start: Start = "earliest",
        attempt_id: str = "",
        acks: Iterable[str] = (),
    ) -> Popped[Message]:
        """Take up to `messages_max` messages by one call, and wait up to `wait_ms` for the first; an empty list is no error.

        0 for `messages_max` or `invisible_ms` leaves them to the node or the group. See `consume` for the arguments. With the
        `attempt_id` of an earlier call, whose answer may have been lost, it returns what that call got and is still out.

        `acks` are handles of the group's deliveries, mostly of the batch before: they are acknowledged first, by the same call,
        and that is durable when it returns. Which of them the node refused, and why, is in `refused` of what is returned:

            messages = await client.pop("plant/#", group="billing", acks=[message.handle for message in messages])

        Raises:
            RequestInvalid: the group's name, the filter, or a number is not allowed. Nothing was acknowledged.
            Overloaded, NodeUnavailable: as they say. Some of `acks` may be acknowledged: give them again.
        """
        self._check_open()
        request = pop_request(topic_filter, group, messages_max, invisible_ms, wait_ms, start, attempt_id, acks)
        timeout_s = self._timeout_s + max(wait_ms, 0) / 1000
        answer = await call(self._stub.Pop, request, timeout_s)
        refused = refused_of(request, answer)
        if request.acks and not answer.messages and wait_ms > 0:  # the node doesn't wait before it says what is acknowledged
            del request.acks[:]
            answer = await call(self._stub.Pop, request, timeout_s)
        return Popped(self._settlements_of(group).messages(answer.messages, 0), refused)

    async def ack(self, handles: Iterable[str], *, group: str) -> None:
        """Acknowledge many deliveries of a group; return when that is durable.

        Raises:
            BatchFailed: some could not be acknowledged, each with its reason; the others are.
        """
        self._check_open()
        all_or_raise(await self._settlements_of(group).acks.submit_all(handles))

    def stream(
        self,
        topic_filter: str,
        *,
        group: str,
        credits: int = 1024,
        batch: int = 0,
        invisible_ms: int = 0,
        start: Start = "earliest",
        give_back: bool = True,
    ) -> StreamConsumer:
        """Return an asynchronous context manager that yields messages as they come: the lowest latency, on a stream.

        Args:
            topic_filter, group, start: as for `consume`.
            credits: messages that may be out at a time; each that is settled makes room for another.
            batch: messages of one response at most; 0 for the node's default.
            invisible_ms: how long the node waits for the acknowledgement; 0 for the group's.
            give_back: when the stream ends, what is not settled comes back at once and uncounted.
        """
        self._check_open()
        opening = pb.ConsumeOpen(
            group=group,
            filter=topic_filter,
            credits=credits,
            batch_max=batch,
            invisible_ms=invisible_ms,
            **start_fields(start),
            give_back=give_back,
        )
        return StreamConsumer(self._stub, opening)

    async def give_up(self, handles: Iterable[str], *, group: str) -> None:
        """Put deliveries among the dead letters of their group: they will never succeed.

        Raises:
            BatchFailed: some could not be given up, each with its reason; the others are.
        """
        request = pb.AckRequest(group=group, handles=list(handles))
        answer = await self._call(self._stub.GiveUp, request)
        all_or_raise([error_of_status(status) for status in answer.statuses])

    # --- transactions -----------------------------------------------------------------------------------------------

    async def begin(
        self,
        topic: str,
        body: bytes = b"",
        *,
        producer: str,
        properties: Mapping[str, str] | None = None,
        tag: str = "",
        message_group: str = "",
    ) -> Transaction:
        """Store half of a transaction. It is delivered when it is committed.

            async with await client.begin("orders/7", body, producer="orders"):
                ...  # the database's own transaction

        Args:
            producer: name of the service: whom the node asks for the outcome (see `answer_checks`).
            topic, body, properties, tag, message_group: see `OutgoingMessage`.

        Raises:
            StatusError, NodeUnavailable: as `send`.
        """
        self._check_open()
        message = OutgoingMessage(
            topic=topic,
            body=body,
            properties=properties or {},
            tag=tag,
            message_group=message_group,
            producer=producer,
        )
        return Transaction(self, await self._sends.submit(message.encoded()))

    async def end_transaction(self, handle: str, *, commit: bool) -> None:
        """Commit or roll back by the handle of a half message.

        Raises:
            AlreadyCommitted, AlreadyRolledBack, UnknownTransaction, InvalidHandle: the node states why it can't.
            NodeUnavailable: no answer came.
        """
        request = pb.EndTransactionsRequest(ends=[pb.TransactionEnd(transaction_handle=handle, commit=commit)])
        answer = await self._call(self._stub.EndTransactions, request)
        error = error_of_status(answer.statuses[0])
        if error is not None:
            raise error

    async def transactions(self, producer: str = "", *, after: str = "", limit: int = 1_000) -> list[pb.Transaction]:
        """Return transactions that are pending, oldest first, behind the message id `after`."""
        request = pb.ListTransactionsRequest(producer=producer, transactions_max=limit, after_message_id=after)
        return list((await self._call(self._stub.ListTransactions, request)).transactions)

    async def answer_checks(self, producer: str, decide: Decide, *, wait_ms: int = 20_000) -> None:
        """Answer the node's questions for the outcome of half messages, until it is cancelled.

        Args:
            producer: whose.
            decide: looks into the producer's database. None leaves the question open: it comes again.
            wait_ms: how long one poll waits.
        """
        backoff = Backoff()
        request = pb.PollTransactionsRequest(producer=producer, wait_ms=wait_ms)
        while True:
            try:
                found = await self._call(self._stub.PollTransactions, request, wait_ms)
            except (NodeUnavailable, Overloaded):
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            for transaction in found.transactions:
                outcome = await decide(transaction)
                if outcome is not None:
                    # Ended meanwhile, or the node is away: then it asks again.
                    with contextlib.suppress(StatusError, NodeUnavailable):
                        await self.end_transaction(transaction.transaction_handle, commit=outcome)

    # --- groups -----------------------------------------------------------------------------------------------------

    async def create_group(
        self, group: str, topic_filter: str, *, start: Start = "earliest", settings: pb.GroupSettings | None = None
    ) -> pb.GroupDescription:
        """Create a group, with settings from `settings_of`; one that is there with the same settings is no error.

        Raises:
            GroupExists, RequestInvalid, Overloaded, NodeUnavailable: as they say.
        """
        request = pb.CreateGroupRequest(group=group, filter=topic_filter, settings=settings, **start_fields(start))
        return (await self._call(self._groups.CreateGroup, request)).groups[0]

    async def update_group(
        self, group: str, settings: pb.GroupSettings, *, topic_filter: str = ""
    ) -> list[pb.GroupDescription]:
        """Change what `settings` (from `settings_of`) gives, on one filter of the group or on all of them.

        Raises:
            GroupUnknown, GroupBusy, RequestInvalid, NodeUnavailable: as they say.
        """
        request = pb.UpdateGroupRequest(group=group, filter=topic_filter, settings=settings)
        return list((await self._call(self._groups.UpdateGroup, request)).groups)

    async def describe_groups(self, group: str = "", topic_filter: str = "") -> list[pb.GroupDescription]:
        """Return how a group stands, on one filter or on each; without a name all groups. Raises GroupUnknown."""
        request = pb.GroupRequest(group=group, filter=topic_filter)
        return list((await self._call(self._groups.DescribeGroups, request)).groups)

    async def delete_group(self, group: str, *, topic_filter: str = "") -> None:
        """Delete a group. Its handles are void; its dead letters go too, unless another group consumes them.

        Raises:
            GroupUnknown, NodeUnavailable: as they say.
        """
        await self._call(self._groups.DeleteGroup, pb.GroupRequest(group=group, filter=topic_filter))

    async def reset_group(
        self,
        group: str,
        *,
        topic_filter: str = "",
        end: End | None = None,
        time_ms: int | None = None,
        message_id: str | None = None,
    ) -> list[pb.GroupDescription]:
        """Let a group begin anew elsewhere: at one end, with what was stored from `time_ms` on, or at a message.

        Raises:
            GroupUnknown, GroupBusy, RequestInvalid, NodeUnavailable: as they say.
            ValueError: not exactly one place is given.
        """
        request = reset_request(group, topic_filter, end, time_ms, message_id)
        return list((await self._call(self._groups.ResetGroup, request)).groups)

    async def dead_letters(self, group: str, *, after: str = "", limit: int = 1_000) -> list[pb.DeadLetter]:
        """Return the dead letters of a group that were not sent back, behind the message id `after`."""
        request = pb.ListDeadLettersRequest(group=group, after_message_id=after, dead_letters_max=limit)
        return list((await self._call(self._groups.ListDeadLetters, request)).dead_letters)

    async def redrive(self, group: str, message_ids: Iterable[str] | None = None) -> int:
        """Send dead letters back to their group as new messages; return how many. None is all, up to 10,000."""
        return (await self._call(self._groups.Redrive, redrive_request(group, message_ids))).redriven

    # ----------------------------------------------------------------------------------------------------------------

    def _settlements_of(self, group: str) -> Settlements:
        settlements = self._settlements.get(group)
        if settlements is None:
            settlements = self._settlements[group] = Settlements(self._stub, group, self._timeout_s)
        return settlements

    async def _call(self, method: grpc.aio.UnaryUnaryMultiCallable[Q, A], request: Q, wait_ms: int = 0) -> A:
        """Return the answer to a request, with which the node may wait `wait_ms`. Raises as `call` does, or ClientClosed."""
        self._check_open()
        return await call(method, request, self._timeout_s + max(wait_ms, 0) / 1000)

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed("this client was closed: make a new one")
