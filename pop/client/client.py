"""The asyncio client of `penstock.pop.v1`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from types import TracebackType
from weakref import WeakSet

from penstock.pop.client import answers, requests
from penstock.pop.client.batcher import Batcher, runs_by_topic
from penstock.pop.client.calls import AsyncCalls, call
from penstock.pop.client.channel import async_channel
from penstock.pop.client.consumer import Consumer
from penstock.pop.client.deadletters import DeadLetterCalls
from penstock.pop.client.durations import Duration, positive_seconds, seconds
from penstock.pop.client.groups import GroupCalls
from penstock.pop.client.health import is_serving
from penstock.pop.client.message import Message
from penstock.pop.client.outgoing import OutgoingMessage, SendReceipt, encoded_message
from penstock.pop.client.producer import Producer
from penstock.pop.client.received import PoppedMessages, ReceivedMessage
from penstock.pop.client.requester import REPLY_INVISIBLE_S, Requester
from penstock.pop.client.requests import Start
from penstock.pop.client.schedules import ScheduleCalls
from penstock.pop.client.security import Security, node_of
from penstock.pop.client.settlements import Settlements
from penstock.pop.client.stream import StreamConsumer
from penstock.pop.client.timers import TimerCalls
from penstock.pop.client.tracing import Tracing, now_ns
from penstock.pop.client.transactions import Transaction, TransactionCalls
from penstock.pop.client.unreached import why_unanswered, why_unreachable
from penstock.pop.errors import NodeUnavailable, NotPermitted, PopError
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2_grpc import GroupServiceStub, PopServiceStub, ScheduleServiceStub, TimerServiceStub

SEND_COUNT_MAX = 4096
SEND_BYTES_MAX = 8 * 1024 * 1024
"""Bounds of one call that gathers single messages. A node accepts 64 MiB, but must not receive that much at once."""


class Client:
    """An asyncio client of one node. Create it in a running event loop; all tasks of that loop may share it.

        async with Client("127.0.0.1:8081") as client:
            await client.send("plant/1/a/temperature", b"21.5")
            async for message in client.consume("plant/#", group="billing"):
                ...
                await message.ack()

    Each method raises ClientClosed after `aclose`, NodeUnavailable if the node does not answer within the timeout,
    NotAuthenticated or NotPermitted if the node has an access file that does not allow the call, and Overloaded if a bound of
    the node is reached. The docstring of a method names its other errors.

    A duration is a number of seconds, or a timedelta. The node gets it in whole milliseconds, at least 1 unless it is 0.

    Parameters:
        target: `HOST:PORT` of the node's gRPC listener. None: that of `PENSTOCK_TARGET`, else of the current context, else
            `127.0.0.1:8081`.
        timeout: Timeout of one call, in seconds or as a timedelta, including the wait until the node can be reached.
        close_timeout: How long `aclose` waits for the answers to earlier requests, in seconds or as a timedelta.
        security: TLS and token. None: those of the environment, see `Security`.
        inbox: Name of the inbox to which replies to requests come, such as the name and number of a service. Two clients must
            not use one name at the same time. By default each client has an inbox of its own, and `aclose` deletes it.
        tracing: Makes spans of OpenTelemetry, and gives messages their trace context. None: nothing of this happens.

    Raises:
        TypeError, ValueError: The target is no address, a duration is none, the timeout is 0, or an argument has another type.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        timeout: Duration = 10.0,
        close_timeout: Duration = 2.0,
        security: Security | None = None,
        inbox: str = "",
        tracing: Tracing | None = None,
    ) -> None:
        asyncio.get_running_loop()  # Without a running loop, gRPC would bind itself to one that never runs.
        self._close_s = seconds(close_timeout, "close_timeout")
        self._tracing = tracing
        self._call = AsyncCalls(timeout)
        target, security = node_of(target, security)
        self._target = target
        self._channel = async_channel(target, security)
        self._call.why_unanswered = partial(why_unanswered, self._channel, target)
        self._stub = PopServiceStub(self._channel)
        group_stub = GroupServiceStub(self._channel)
        self._sends: Batcher[pb.Message, SendReceipt] = Batcher(
            self._send, count_max=SEND_COUNT_MAX, size_max=SEND_BYTES_MAX, size_of=pb.Message.ByteSize
        )
        self._settlements: dict[str, Settlements] = {}
        self._consumers: set[Consumer] = set()
        self._inbox = inbox
        self._requester: Requester | None = None
        self._producers: WeakSet[Producer] = WeakSet()
        self.groups = GroupCalls(self._call, group_stub)
        """Administration of groups."""
        self.dead_letters = DeadLetterCalls(self._call, group_stub)
        """Administration of dead letters."""
        self.schedules = ScheduleCalls(self._call, ScheduleServiceStub(self._channel))
        """Schedules."""
        self.timers = TimerCalls(self._call, TimerServiceStub(self._channel))
        """Pending delayed messages."""
        self.transactions = TransactionCalls(self._call, self._stub, self._send_one)
        """Transactions."""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all consumers, send waiting acknowledgements, and close the connection. Closing twice does nothing."""
        requester, self._requester = self._requester, None
        if requester is not None:
            await requester.aclose(self._close_s)
        self._call.closed = True
        await asyncio.gather(*(consumer.aclose() for consumer in list(self._consumers)))
        closing = [self._sends.close(self._close_s), *(producer.abort(self._close_s) for producer in self._producers)]
        for settlements in self._settlements.values():
            closing += [settlements.changes.close(self._close_s), settlements.acks.close(self._close_s)]
        await asyncio.gather(*closing)
        await self._channel.close(None)

    async def is_serving(self, timeout: Duration = 5.0) -> bool:  # noqa: ASYNC109 - no answer is an answer here
        """Return whether the node answers a health check within `timeout`, in seconds or as a timedelta, and takes calls."""
        self.check_open()
        return await is_serving(self._channel, seconds(timeout, "timeout"))

    async def check_reachable(self) -> None:
        """Check that the node can be reached now. Other calls wait for a node that can't.

        Raises:
            NodeUnavailable: It can't. The error says why, and what to do.
        """
        self.check_open()
        reason = await why_unreachable(self._channel, self._target)
        if reason:
            raise NodeUnavailable(reason)

    def check_open(self) -> None:
        """Raise ClientClosed if the client was closed."""
        self._call.check_open()

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
        delay: Duration = 0.0,
        deduplication_id: str = "",
        response_topic: str = "",
        correlation_data: bytes = b"",
        content_type: str = "",
        expire_after: Duration = 0.0,
        timer_key: str = "",
    ) -> SendReceipt:
        """Send a message; return when it is durable. `OutgoingMessage` documents the arguments.

        Messages that several tasks send at the same time share calls. The node stores messages in the order in which this
        method was called.

        Raises:
            InvalidTopic, InvalidProperty, InvalidDeliveryTime, MessageTooLarge: The message breaks a rule.
            DeduplicationIdReused: The topic got the deduplication id before, with another body.
            TooManyTimers, TooManyQueues: A bound of the node is reached.
            NodeUnavailable: The node did not answer. It may have stored the message. With a deduplication id, send it again
                as an `OutgoingMessage` with its age. `Producer` does so by itself.
        """
        return await self._send_encoded(
            encoded_message(
                topic,
                body,
                properties,
                tag,
                message_group,
                deliver_at_ms,
                delay,
                "",
                deduplication_id,
                0,
                response_topic,
                correlation_data,
                content_type,
                expire_after,
                timer_key,
            )
        )

    async def _send_one(self, message: OutgoingMessage) -> SendReceipt:
        return await self._send_encoded(message.encoded())

    async def _send_encoded(self, encoded: pb.Message) -> SendReceipt:
        self._call.check_open()
        if self._tracing is None:
            return await self._sends.submit(encoded)
        with self._tracing.sending([encoded]) as span:
            receipt = await self._sends.submit(encoded)
            self._tracing.sent(span, receipt)
            return receipt

    async def _send(self, messages: list[pb.Message]) -> list[SendReceipt | PopError]:
        try:
            return answers.receipts(await self._send_request(pb.SendRequest(messages=messages)))
        except NotPermitted as error:
            runs = runs_by_topic(messages, lambda message: message.topic)
            if len(runs) == 1:
                return [error] * len(messages)
        except PopError as error:
            return [error] * len(messages)
        # The node stores no message of a call if it doesn't permit one topic. The messages of other tasks must not suffer.
        return [result for run in runs for result in await self._send(run)]

    async def _send_request(self, request: pb.SendRequest) -> pb.SendResponse:
        return await call(self._stub.Send, request, self._call.timeout_s, self._call.why_unanswered)

    async def send_batch(self, messages: Iterable[OutgoingMessage]) -> list[SendReceipt]:
        """Send up to 10,000 messages and 64 MiB as one call; return a receipt for each when all are durable.

        Raises:
            BatchFailed: The node refused some messages. It stored the others, and their receipts are in `results`.
            RequestInvalid, Overloaded: The batch is too large.
            NodeUnavailable: The node did not answer. It may have stored any of the messages.
        """
        request = requests.send(messages)
        with self._tracing.sending(request.messages) if self._tracing is not None else nullcontext():
            return answers.all_or_raise(answers.receipts(await self._call(self._stub.Send, request)))

    def producer(
        self,
        *,
        idempotent: bool = True,
        linger: Duration = 0.0,
        batch_max: int = 1_000,
        batch_bytes_max: int = 1024 * 1024,
        buffer_max: int = 10_000,
        buffer_bytes_max: int = 32 * 1024 * 1024,
        retry_timeout: Duration = 120.0,
    ) -> Producer:
        """Return a producer, which sends in batches and again where that is safe. `Producer` documents the arguments."""
        self._call.check_open()
        producer = Producer(
            self._send_request,
            timeout=self._call.timeout_s,
            idempotent=idempotent,
            linger=linger,
            batch_max=batch_max,
            batch_bytes_max=batch_bytes_max,
            buffer_max=buffer_max,
            buffer_bytes_max=buffer_bytes_max,
            retry_timeout=retry_timeout,
            tracing=self._tracing,
        )
        self._producers.add(producer)
        return producer

    async def recall(self, recall_handle: str) -> None:
        """Cancel a delayed message before its delivery, by the handle from its receipt.

        Raises:
            AlreadyFired, AlreadyRecalled, UnknownMessage, InvalidHandle: The node refused.
            NodeUnavailable: The node did not answer. It may have cancelled the message.
        """
        answer = await self._call(self._stub.Recall, requests.recall(recall_handle))
        answers.only(answers.errors(answer.statuses))

    async def request(
        self,
        topic: str,
        body: bytes = b"",
        *,
        timeout: Duration,  # noqa: ASYNC109 - the error says what has timed out
        properties: Mapping[str, str] | None = None,
        content_type: str = "",
    ) -> ReceivedMessage:
        """Send a request, and return its reply: a command to a device, or a question to a service.

            reply = await client.request("plant/1/valve/set", b"open", timeout=5)

        The request has a response topic and correlation data (MQTT 5.0, 4.10). A device publishes the reply to that topic with
        that data, and a handler of a `Worker` returns it. Any number of requests may wait. A restart of the node loses neither
        requests nor replies, and each request is stored once.

        Args:
            topic: As in `OutgoingMessage`.
            body: As in `OutgoingMessage`.
            timeout: How long to wait for the reply, in seconds or as a timedelta. The request expires then, so that a device
                which was away does not get a command that nobody waits for.
            properties: As in `OutgoingMessage`.
            content_type: As in `OutgoingMessage`.

        Raises:
            TypeError, ValueError: `timeout` is no duration, or 0.
            RequestTimedOut: No reply came in time. The request may or may not have been handled.
            StatusError: The node refused the request.
            NotPermitted: This client may not consume its inbox (`replies/...`), or not publish to the topic.
        """
        self._call.check_open()
        timeout_s = positive_seconds(timeout, "timeout")
        if self._requester is None:
            self._requester = Requester(self._inbox, self.groups, self._send_one, self._consume_replies, self._call.timeout_s)
        message = OutgoingMessage(topic=topic, body=body, properties=properties or {}, content_type=content_type)
        return await self._requester.request(message, timeout_s)

    def _consume_replies(self, topic: str, group: str) -> Consumer:
        return self.consume(topic, group=group, invisible=REPLY_INVISIBLE_S, start="latest")

    @asynccontextmanager
    async def transaction(
        self,
        topic: str,
        body: bytes = b"",
        *,
        producer: str,
        properties: Mapping[str, str] | None = None,
        tag: str = "",
        message_group: str = "",
    ) -> AsyncIterator[Transaction]:
        """Return a context manager that delivers a message if its block succeeds.

            async with client.transaction("orders/7", body, producer="orders"):
                ...  # the transaction of the database

        The message is stored when the block begins. It is delivered at the end of the block, and discarded if an exception
        leaves the block. If the node does not answer then, the outcome is left to the node's question: a service must answer
        it with `transactions.answer_checks(producer, ...)`, which also covers a process that dies within the block.

        Raises as `TransactionCalls.begin` and, at the end of the block, as `Transaction.commit`, but not NodeUnavailable there.
        """
        async with await self.transactions.begin(
            topic, body, producer=producer, properties=properties, tag=tag, message_group=message_group
        ) as transaction:
            yield transaction

    # --- consuming --------------------------------------------------------------------------------------------------

    def consume(
        self,
        topic_filter: str,
        *,
        group: str,
        batch: int = 64,
        prefetch: int = 128,
        invisible: Duration = 60.0,
        wait: Duration = 20.0,
        start: Start = "earliest",
        in_order_max: int = 1,
        first_max: int = 0,
        fast_max: int = 0,
        ack_hold: Duration = 0.0,
    ) -> Consumer:
        """Return an asynchronous iterator over the messages of a group. It starts to pop when the iteration starts.

        Args:
            topic_filter: MQTT topic filter (MQTT 5.0, 4.7), or `$dlq/GROUP` for the dead letters of another group.
            group: Name of the group. All its consumers, on any machine, share the messages.
            batch: Maximum number of messages in one pop, at least 1.
            prefetch: Maximum number of messages that wait in the client, at least `batch` (or `fast_max` is). Their invisible
                time has started, so fewer wait where the loop is slow.
            invisible: Time from the pop in which the node waits for the acknowledgement, in seconds or as a timedelta, above 0.
            wait: How long one poll waits at the node for the first message, in seconds or as a timedelta.
            start: Where the group starts if this call creates it: `"earliest"` with all that the log has, `"latest"` with the
                messages stored from now on, or a time in ms since 1970.
            in_order_max: Maximum number of messages of one message group that a FIFO group hands out at once. With more than 1,
                use `Consumer.take`, and `suspend` the messages after a failed one.
            first_max: Maximum number of messages that wait until the loop has handled the first one. 0: `prefetch`.
            fast_max: Maximum number of messages that wait, in place of `prefetch`, if the loop takes them all within half a
                second. 0: `prefetch`.
            ack_hold: While there is a backlog, acknowledgements wait so long at most for the next pop to carry them, in seconds
                or as a timedelta. That costs the node less, and is for loops that do not await them. 0: they go out at once.

        Raises:
            TypeError, ValueError: A number or a duration is out of bounds.
        """
        self._call.check_open()
        if not 1 <= batch <= max(prefetch, fast_max):
            raise ValueError(
                f"batch is {batch}: use 1 to prefetch or fast_max, whichever is larger ({max(prefetch, fast_max)} here)"
            )
        positive_seconds(invisible, "invisible")
        consumer = Consumer(
            self._stub,
            self._settlements_of(group),
            requests.pop(topic_filter, group, batch, invisible, wait, start, in_order_max=in_order_max),
            prefetch=prefetch,
            timeout=self._call.timeout_s,
            close_timeout=self._close_s,
            on_close=self._consumers.discard,
            first_max=first_max,
            fast_max=fast_max,
            ack_hold=ack_hold,
        )
        self._consumers.add(consumer)
        return consumer

    async def pop(
        self,
        topic_filter: str,
        *,
        group: str,
        messages_max: int = 0,
        invisible: Duration = 0.0,
        wait: Duration = 0.0,
        start: Start = "earliest",
        attempt_id: str = "",
        acks: Iterable[str] = (),
        in_order_max: int = 1,
    ) -> PoppedMessages[Message]:
        """Return the next visible messages of a group, possibly none.

        One call may also acknowledge the messages of the call before, which saves a round trip:

            messages = await client.pop("plant/#", group="billing", acks=[message.handle for message in messages])

        Args:
            topic_filter: As for `consume`.
            group: As for `consume`.
            start: As for `consume`.
            messages_max: Maximum number of messages; 0 for 32.
            invisible: Time in which the node waits for the acknowledgement, in seconds or as a timedelta; 0 for the group's
                setting.
            wait: How long to wait for the first message, in seconds or as a timedelta; 0 to return at once.
            attempt_id: Chosen by the caller. A call with the id of an earlier call, whose answer may have been lost, returns
                the messages of that call that are still in flight.
            acks: Handles of the group to acknowledge first. That is durable when the call returns. `refused` of the result
                names the handles that the node did not acknowledge.
            in_order_max: Maximum number of messages of one message group that a FIFO group returns, in order. With more than 1
                the caller must process them in this order, and after a failed one `suspend` those that follow. The next ones
                of the message group come when all of them are acknowledged or returned. Other groups ignore it.

        Raises:
            RequestInvalid: The group's name, the filter or a number breaks a rule. No handle was acknowledged.
            Overloaded, NodeUnavailable: The call failed. Some handles may be acknowledged: pass them again.
            TypeError, ValueError: `invisible` or `wait` is no duration.
        """
        request = requests.pop(topic_filter, group, messages_max, invisible, wait, start, attempt_id, acks, in_order_max)
        began_ns = now_ns()
        answer = await self._call(self._stub.Pop, request, request.wait_ms)
        refused = answers.refused_acks(request, answer)
        if answers.must_pop_again(request, answer):
            request.ClearField("acks")
            answer = await self._call(self._stub.Pop, request, request.wait_ms)
        if self._tracing is not None:
            self._tracing.received(group, topic_filter, answer.messages, began_ns)
        settlements = self._settlements_of(group)
        return PoppedMessages((Message(received, settlements) for received in answer.messages), refused)

    async def ack(self, handles: Iterable[str], *, group: str) -> None:
        """Acknowledge many deliveries of a group; return when that is durable.

        Raises:
            BatchFailed: The node refused some handles. All others are acknowledged.
        """
        self._call.check_open()
        handles = requests.handle_list(handles)
        with self._settling("ack", group, handles):
            answers.all_or_raise(await self._settlements_of(group).acks.submit_all(handles))

    async def dead_letter(self, handles: Iterable[str], *, group: str, reason: str = "") -> None:
        """Make deliveries dead letters of their group, because no attempt will ever succeed.

        The reason is stored with the dead letters, up to 2,000 bytes.

        Raises:
            BatchFailed: The node refused some handles. All others are dead letters.
        """
        handles = requests.handle_list(handles)
        with self._settling("dead_letter", group, handles):
            answer = await self._call(self._stub.DeadLetter, requests.handles(group, handles, reason))
            answers.all_or_raise(answers.errors(answer.statuses))

    def _settling(self, operation: str, group: str, handles: list[str]) -> AbstractContextManager[None]:
        if self._tracing is None:
            return nullcontext()
        return self._tracing.settling(operation, group, count=len(handles))

    def stream(
        self,
        topic_filter: str,
        *,
        group: str,
        credits: int = 1024,
        batch: int = 0,
        invisible: Duration = 0.0,
        start: Start = "earliest",
        give_back: bool = True,
    ) -> StreamConsumer:
        """Return an asynchronous context manager that yields messages as they come, on a stream of the lowest latency.

        Args:
            topic_filter: As for `consume`.
            group: As for `consume`.
            start: As for `consume`.
            credits: Maximum number of messages in flight. Each settled message makes room for another. Where the loop is slow,
                the stream asks for fewer, and returns what the loop will not reach in time without counting an attempt.
            batch: Maximum number of messages in one response; 0 for the node's default.
            invisible: Time in which the node waits for the acknowledgement, in seconds or as a timedelta; 0 for the group's
                setting.
            give_back: Return unsettled messages at once and without counting the attempt when the stream ends.
        """
        self._call.check_open()
        opening = requests.consume(topic_filter, group, credits, batch, invisible, start, give_back)
        return StreamConsumer(self._stub, opening, self._settlements_of(group))

    def _settlements_of(self, group: str) -> Settlements:
        settlements = self._settlements.get(group)
        if settlements is None:
            settlements = self._settlements[group] = Settlements(self._stub, group, self._call.timeout_s, self._tracing)
        return settlements
