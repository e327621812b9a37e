"""The client of `penstock.pop.v1` for threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType

from penstock.pop.client import answers, requests
from penstock.pop.client.batcher import CLOSED
from penstock.pop.client.calls import SyncCalls
from penstock.pop.client.channel import sync_channel
from penstock.pop.client.deadletters import SyncDeadLetterCalls
from penstock.pop.client.durations import Duration, seconds
from penstock.pop.client.groups import SyncGroupCalls
from penstock.pop.client.health import is_serving_sync
from penstock.pop.client.outgoing import OutgoingMessage, SendReceipt
from penstock.pop.client.producer import Producer
from penstock.pop.client.received import PoppedMessages, ReceivedMessage
from penstock.pop.client.requests import Start
from penstock.pop.client.schedules import SyncScheduleCalls
from penstock.pop.client.security import Security, node_of
from penstock.pop.client.syncconsumer import SyncConsumer
from penstock.pop.client.syncmessage import SyncMessage, SyncSettlements
from penstock.pop.client.syncproducer import BackgroundClient, SyncProducer
from penstock.pop.client.synctransactions import SyncTransaction, SyncTransactionCalls
from penstock.pop.client.timers import SyncTimerCalls
from penstock.pop.client.tracing import Tracing, now_ns
from penstock.pop.client.unreached import why_unanswered_sync, why_unreachable_sync
from penstock.pop.errors import ClientClosed, NodeUnavailable
from penstock.pop.proto.pop_pb2_grpc import GroupServiceStub, PopServiceStub, ScheduleServiceStub, TimerServiceStub


class SyncClient:
    """A blocking client of one node. Many threads may share it.

        with SyncClient("127.0.0.1:8081") as client:
            client.send("plant/1/a/temperature", b"21.5")
            for message in client.consume("plant/#", group="billing"):
                message.ack()

    Each method is one call and returns when the node has answered. Nothing runs in the background, but for the thread of a
    `consume` that returns messages in time, and one for producers and requests. A method takes the arguments of the method of
    `Client` with the same name, and raises the same errors. Only `consume` has no `prefetch`.

    Parameters:
        target: `HOST:PORT` of the node's gRPC listener. None: that of `PENSTOCK_TARGET`, else of the current context, else
            `127.0.0.1:8081`.
        timeout: Timeout of one call, in seconds or as a timedelta, including the wait until the node can be reached.
        security: TLS and token. None: those of the environment, see `Security`.
        inbox: As for `Client`.
        tracing: Makes spans of OpenTelemetry, and gives messages their trace context. None: nothing of this happens.

    Raises:
        TypeError, ValueError: The target is no address, the timeout is no duration, or 0, or an argument has another type.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        timeout: Duration = 10.0,
        security: Security | None = None,
        inbox: str = "",
        tracing: Tracing | None = None,
    ) -> None:
        target, security = node_of(target, security)
        self._target, self._timeout, self._security, self._inbox = target, timeout, security, inbox
        self._tracing = tracing
        self._lock = threading.Lock()
        self._background: BackgroundClient | None = None
        """Serves producers and requests. Made under the lock, for the first of them."""
        self._channel = sync_channel(target, security)
        self._call = SyncCalls(timeout, security.metadata)
        self._call.why_unanswered = partial(why_unanswered_sync, self._channel, target)
        self._stub = PopServiceStub(self._channel)
        group_stub = GroupServiceStub(self._channel)
        self.groups = SyncGroupCalls(self._call, group_stub)
        """Administration of groups."""
        self.dead_letters = SyncDeadLetterCalls(self._call, group_stub)
        """Administration of dead letters."""
        self.schedules = SyncScheduleCalls(self._call, ScheduleServiceStub(self._channel))
        """Schedules."""
        self.timers = SyncTimerCalls(self._call, TimerServiceStub(self._channel))
        """Pending delayed messages."""
        self.transactions = SyncTransactionCalls(self._call, self._stub, self._send_one)
        """Transactions."""

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Closing twice does nothing."""
        with self._lock:
            self._call.closed = True
            background, self._background = self._background, None
        if background is not None:
            background.close()
        self._channel.close()

    def is_serving(self, timeout: Duration = 5.0) -> bool:
        """Return whether the node answers a health check within `timeout`, and takes calls, as `Client.is_serving`."""
        self.check_open()
        return is_serving_sync(self._channel, seconds(timeout, "timeout"))

    def check_reachable(self) -> None:
        """Check that the node can be reached now. Other calls wait for a node that can't.

        Raises:
            NodeUnavailable: It can't. The error says why, and what to do.
        """
        self.check_open()
        reason = why_unreachable_sync(self._channel, self._target)
        if reason:
            raise NodeUnavailable(reason)

    def check_open(self) -> None:
        """Raise ClientClosed if the client was closed."""
        self._call.check_open()

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(
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
        """Send a message; return when it is durable, as `Client.send`."""
        message = OutgoingMessage(
            topic=topic,
            body=body,
            properties=properties or {},
            tag=tag,
            message_group=message_group,
            deliver_at_ms=deliver_at_ms,
            delay=delay,
            deduplication_id=deduplication_id,
            response_topic=response_topic,
            correlation_data=correlation_data,
            content_type=content_type,
            expire_after=expire_after,
            timer_key=timer_key,
        )
        return self._send_one(message)

    def _send_one(self, message: OutgoingMessage) -> SendReceipt:
        request = requests.send([message])
        if self._tracing is None:
            return answers.only(answers.receipts(self._call(self._stub.Send, request)))
        with self._tracing.sending(request.messages) as span:
            receipt = answers.only(answers.receipts(self._call(self._stub.Send, request)))
            self._tracing.sent(span, receipt)
            return receipt

    def send_batch(self, messages: Iterable[OutgoingMessage]) -> list[SendReceipt]:
        """Send up to 10,000 messages and 64 MiB as one call, as `Client.send_batch`."""
        request = requests.send(messages)
        with self._tracing.sending(request.messages) if self._tracing is not None else nullcontext():
            return answers.all_or_raise(answers.receipts(self._call(self._stub.Send, request)))

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
    ) -> SyncProducer:
        """Return a producer on a thread of its own. `Producer` documents the arguments."""
        background = self._in_background()

        async def made() -> Producer:
            return background.client.producer(
                idempotent=idempotent,
                linger=linger,
                batch_max=batch_max,
                batch_bytes_max=batch_bytes_max,
                buffer_max=buffer_max,
                buffer_bytes_max=buffer_bytes_max,
                retry_timeout=retry_timeout,
            )

        return SyncProducer(background, background.run(made()))

    def _in_background(self) -> BackgroundClient:
        with self._lock:
            if self._call.closed:
                raise ClientClosed(CLOSED)
            if self._background is None:
                self._background = BackgroundClient(
                    self._target,
                    timeout=self._timeout,
                    security=self._security,
                    inbox=self._inbox,
                    tracing=self._tracing,
                )
            return self._background

    def recall(self, recall_handle: str) -> None:
        """Cancel a delayed message before its delivery, as `Client.recall`."""
        answers.only(answers.errors(self._call(self._stub.Recall, requests.recall(recall_handle)).statuses))

    def request(
        self,
        topic: str,
        body: bytes = b"",
        *,
        timeout: Duration,
        properties: Mapping[str, str] | None = None,
        content_type: str = "",
    ) -> ReceivedMessage:
        """Send a request, and return its reply, as `Client.request`. Many threads may wait for replies at the same time."""
        background = self._in_background()
        return background.run(
            background.client.request(topic, body, timeout=timeout, properties=properties, content_type=content_type)
        )

    @contextmanager
    def transaction(
        self,
        topic: str,
        body: bytes = b"",
        *,
        producer: str,
        properties: Mapping[str, str] | None = None,
        tag: str = "",
        message_group: str = "",
    ) -> Iterator[SyncTransaction]:
        """Return a context manager that delivers a message if its block succeeds, as `Client.transaction`."""
        with self.transactions.begin(
            topic, body, producer=producer, properties=properties, tag=tag, message_group=message_group
        ) as transaction:
            yield transaction

    # --- consuming --------------------------------------------------------------------------------------------------

    def pop(
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
    ) -> PoppedMessages[SyncMessage]:
        """Return the next visible messages of a group, possibly none, as `Client.pop`."""
        request = requests.pop(topic_filter, group, messages_max, invisible, wait, start, attempt_id, acks, in_order_max)
        began_ns = now_ns()
        answer = self._call(self._stub.Pop, request, request.wait_ms)
        refused = answers.refused_acks(request, answer)
        if answers.must_pop_again(request, answer):
            request.ClearField("acks")
            answer = self._call(self._stub.Pop, request, request.wait_ms)
        if self._tracing is not None:
            self._tracing.received(group, topic_filter, answer.messages, began_ns)
        settlements = SyncSettlements(self._call, self._stub, group, self._tracing)
        return PoppedMessages((SyncMessage(received, settlements) for received in answer.messages), refused)

    def consume(
        self,
        topic_filter: str,
        *,
        group: str,
        batch: int = 64,
        invisible: Duration = 0.0,
        wait: Duration = 20.0,
        start: Start = "earliest",
    ) -> Iterator[SyncMessage]:
        """Return an iterator over messages without end, one pop at a time. While the node is away, it waits for it.

        A pop asks for as many messages as the loop takes within half the invisible time, at most `batch`. A thread returns the
        messages that the loop will not reach in time. When the iteration stops, the rest of the batch is returned. Neither
        counts an attempt. 0 for `invisible` takes the group's setting.

        Raises:
            TypeError, ValueError: A number or a duration is out of bounds.
        """
        if batch < 1:
            raise ValueError(f"batch is {batch}: use at least 1")
        request = requests.pop(topic_filter, group, batch, invisible, wait, start)
        return SyncConsumer(self._call, self._stub, request, self._tracing).messages()

    def ack(self, handles: Iterable[str], *, group: str) -> None:
        """Acknowledge deliveries; return when that is durable, as `Client.ack`."""
        handles = requests.handle_list(handles)
        with self._settling("ack", group, handles):
            answers.all_or_raise(SyncSettlements(self._call, self._stub, group).ack(handles))

    def dead_letter(self, handles: Iterable[str], *, group: str, reason: str = "") -> None:
        """Make deliveries dead letters of their group, as `Client.dead_letter`."""
        handles = requests.handle_list(handles)
        with self._settling("dead_letter", group, handles):
            answers.all_or_raise(SyncSettlements(self._call, self._stub, group).dead_letter(handles, reason))

    def _settling(self, operation: str, group: str, handles: list[str]) -> AbstractContextManager[None]:
        if self._tracing is None:
            return nullcontext()
        return self._tracing.settling(operation, group, count=len(handles))
