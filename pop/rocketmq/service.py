"""`apache.rocketmq.v2.MessagingService`: what the official RocketMQ 5 clients call, served from the core of the native API.

Errors are in the status of an answer; the gRPC status stays OK. Whatever changes state is answered when it is durable.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import grpc.aio
import structlog

from penstock.pop.access.interceptor import CALLER
from penstock.pop.core.admin import GroupAdmin
from penstock.pop.core.checkpoint import FROM_QUEUE, Checkpoint
from penstock.pop.core.deadletters import DeadLetter
from penstock.pop.core.expression import ExpressionType
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.outcome import AckOutcome, InvisibleChange
from penstock.pop.core.poll import PopResult
from penstock.pop.core.popping import check_attempt_id
from penstock.pop.core.sender import Sender
from penstock.pop.core.settings import GroupSettings
from penstock.pop.core.transactions import HalfMessage, Transactions
from penstock.pop.errors import GroupUnknown
from penstock.pop.rocketmq import names
from penstock.pop.rocketmq.clients import Client, Clients, Stream, holder_of, lease_id
from penstock.pop.rocketmq.lite import LiteSubscriptions, too_many
from penstock.pop.rocketmq.messages import PRODUCER, message_of, properties_of, topic_and_body_of
from penstock.pop.rocketmq.routes import SHARED_QUEUE, endpoints_for, queue_of
from penstock.pop.rocketmq.settings import LITE_SUBSCRIPTIONS_MAX, expression_of, merged
from penstock.pop.rocketmq.status import (
    OF_OUTCOME,
    OF_RECALLED,
    Code,
    Refused,
    code_of,
    detail_of,
    of_ended,
    overall,
)
from penstock.pop.rocketmq.stubs import pb, service_pb
from penstock.store.errors import DiskFull
from penstock.store.lightqueue import Start
from penstock.store.options import HOUR_MS, HostPort, OptionInvalid
from penstock.store.record import decode
from penstock.timer.delayed import DelayedMessages

logger = structlog.get_logger("pop.rocketmq")

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

MESSAGES_PER_SEND_MAX = 1_000
HANDLES_MAX = 1_024

LEASE_MS = 3 * HOUR_MS
"""How long a delivery with `auto_renew` is out at most, while its client is there: as long as RocketMQ's proxy renews one."""

DEADLINE_MARGIN_MS = 200
"""A poll ends so long before the deadline of its call, which its client would take for an error."""

LITE_LOOK_MS = 500
"""How often a waiting poll of a lite consumer looks whether its lite topics have changed."""

TIDY_S = 1.0
"""How often clients that are gone are looked for."""

STALL_MS = 5_000
"""A node that has not looked for so long heard of nobody meanwhile, and that is not their fault."""


def _answered(response: Any) -> Callable[[Any], Any]:
    """Let a method return a response, or raise; an error becomes the status of a `response`."""

    def wrap(serve: Callable[[Any, Any, Client], Awaitable[Any]]) -> Callable[[Any, Any, Context], Awaitable[Any]]:
        async def call(self: MessagingService, request: Any, context: Context) -> Any:
            try:
                return await serve(self, request, self._client(context))
            except Exception as error:  # each is answered; code_of logs what nobody foresaw
                return response(status=_status(code_of(error), detail_of(error)))

        return call

    return wrap


class MessagingService:
    """Serves the protocol.

    Parameters:
        admin: groups, and the core that they are of.
        sending: stores what is sent.
        delayed: delayed messages.
        transactions: half messages.

    Raises:
        OptionInvalid: `pop.rocketmq_advertise` is no address.
    """

    def __init__(self, admin: GroupAdmin, sending: Sender, delayed: DelayedMessages, transactions: Transactions) -> None:
        self._admin = admin
        self._core = admin.core
        self._store = admin.core.store
        self._options = admin.core.options
        self._sending = sending
        self._delayed = delayed
        self._transactions = transactions
        self._advertised = _advertised(self._options.rocketmq_advertise)
        self._store_host = str(self._advertised or self._options.listen)
        self.clients = Clients()
        self._lite = LiteSubscriptions(admin, self.clients)
        self._tidying: asyncio.TimerHandle | None = None
        self._tidied_ms = 0
        transactions.on_check.append(self._ask)

    def start(self) -> None:
        """Look after clients from now on. Who had leases when the node ended has some time to come back."""
        self._tidied_ms = now_ms = self._store.now_ms()
        self._lite.start(now_ms)
        for checkpoint in self._core.state.checkpoints.values():
            holder = holder_of(checkpoint.attempt_id)
            if holder:
                with suppress(Refused):  # too many to look after: theirs come back when the invisible time is over
                    self.clients.seen(holder, now_ms)
        self._tidy()

    def stop(self) -> None:
        """End the streams, and look after nobody any more."""
        if self._tidying is not None:
            self._tidying.cancel()
            self._tidying = None
        self.clients.end_streams()

    def _tidy(self) -> None:
        self._tidying = asyncio.get_running_loop().call_later(TIDY_S, self._tidy)
        now_ms = self._store.now_ms()
        if now_ms - self._tidied_ms > STALL_MS:  # it was stopped, or its clock was set
            self.clients.forgive(now_ms - self._tidied_ms)
        self._tidied_ms = now_ms
        gone = self.clients.take_gone(now_ms)
        for client in gone.values():
            self._lite.left(client)
        self._lite.tidy(now_ms)
        if not gone:
            return
        for checkpoint in list(self._core.state.checkpoints.values()):
            holder = gone.get(holder_of(checkpoint.attempt_id))
            if holder is None:
                continue
            with suppress(DiskFull):
                self._return_lease(checkpoint, counts=not holder.is_done)
            if checkpoint.open:  # the disk has no room to note it: again when the client was silent for as long once more
                self.clients.seen(holder.id, now_ms)

    def _return_lease(self, checkpoint: Checkpoint, *, counts: bool) -> None:
        """Return what a client that is gone had. If it vanished that counts as an attempt: a message may have killed it."""
        if not counts:
            self._core.requeue(checkpoint)
            return
        group = self._core.state.groups_by_id[checkpoint.group_id]
        position, pop_ms = checkpoint.position, checkpoint.pop_ms
        handles = self._core.handles.deliveries(position, pop_ms, group.id, checkpoint.count)
        self._core.change_invisible(group.name, [InvisibleChange(handles[index], 0) for index in checkpoint.open_indexes()])

    def _client(self, context: Context) -> Client:
        """Return the client that calls. Another principal's is another one, whatever it calls itself."""
        client_id = _client_id(context)
        caller = CALLER.get()
        return self.clients.seen(f"{caller}:{client_id}" if caller and client_id else client_id, self._store.now_ms())

    # --- routes and clients -----------------------------------------------------------------------------------------

    @_answered(service_pb.QueryRouteResponse)
    async def QueryRoute(self, request: Any, _client: Client) -> Any:
        topic_filter = names.filter_of(request.topic)
        queue = queue_of(topic_filter, endpoints_for(request.endpoints, self._advertised))
        return service_pb.QueryRouteResponse(status=_status(), message_queues=[queue])

    @_answered(service_pb.QueryAssignmentResponse)
    async def QueryAssignment(self, request: Any, _client: Client) -> Any:
        topic_filter = names.filter_of(request.topic)
        group = self._core.state.groups.get((names.group_of(request.group), topic_filter))
        is_fifo = group is not None and group.settings.fifo
        endpoints = endpoints_for(request.endpoints, self._advertised)
        queue = queue_of(topic_filter, endpoints, 0 if is_fifo else SHARED_QUEUE)
        return service_pb.QueryAssignmentResponse(status=_status(), assignments=[pb.Assignment(message_queue=queue)])

    @_answered(service_pb.HeartbeatResponse)
    async def Heartbeat(self, request: Any, client: Client) -> Any:
        client.client_type = _client_type(request.client_type)
        if request.HasField("group"):
            names.group_of(request.group)
        return service_pb.HeartbeatResponse(status=_status())

    @_answered(service_pb.NotifyClientTerminationResponse)
    async def NotifyClientTermination(self, _request: Any, client: Client) -> Any:
        client.is_done = True
        return service_pb.NotifyClientTerminationResponse(status=_status())

    # --- sending ----------------------------------------------------------------------------------------------------

    @_answered(service_pb.SendMessageResponse)
    async def SendMessage(self, request: Any, client: Client) -> Any:
        if not 0 < len(request.messages) <= MESSAGES_PER_SEND_MAX:
            raise Refused(Code.BAD_REQUEST, f"send 1 to {MESSAGES_PER_SEND_MAX} messages a call, not {len(request.messages)}")
        entries = [self._send(message, client) for message in request.messages]
        await self._store.durable()
        codes = [Code(entry.status.code) for entry in entries]
        detail = next((entry.status.message for entry in entries if entry.status.code != Code.OK), "")
        return service_pb.SendMessageResponse(status=_status(overall(codes), detail), entries=entries)

    def _send(self, message: Any, client: Client) -> Any:
        try:
            topic, body = topic_and_body_of(message, self._options.message_bytes_max)
            properties = properties_of(message, topic)
            stored = self._sending.store(topic.encode(), body, properties)
        except Exception as error:  # one of a batch: the others go on
            return service_pb.SendResultEntry(status=_status(code_of(error), detail_of(error)))
        if properties.producer:
            self.clients.publishes(client, topic)
        return service_pb.SendResultEntry(
            status=_status(),
            message_id=f"{stored.position:016x}",
            transaction_id=stored.transaction_handle,
            offset=stored.position,
            recall_handle=stored.recall_handle,
        )

    @_answered(service_pb.RecallMessageResponse)
    async def RecallMessage(self, request: Any, _client: Client) -> Any:
        named = self._core.handles.read_recall(request.recall_handle)
        if named is None:
            raise Refused(Code.INVALID_RECEIPT_HANDLE, "this is not a recall handle that this node gave")
        code, detail = OF_RECALLED[self._delayed.recall(*named)]
        await self._store.durable()
        message_id = f"{named[0]:016x}" if code is Code.OK else ""
        return service_pb.RecallMessageResponse(status=_status(code, detail), message_id=message_id)

    @_answered(service_pb.EndTransactionResponse)
    async def EndTransaction(self, request: Any, _client: Client) -> Any:
        named = self._core.handles.read_half(request.transaction_id)
        if named is None:
            raise Refused(Code.INVALID_TRANSACTION_ID, "this is not a transaction id that this node gave")
        if request.resolution == pb.TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED:
            return service_pb.EndTransactionResponse(status=_status(detail="not known yet: the node asks again"))
        commit = request.resolution == pb.TransactionResolution.COMMIT
        ended = self._transactions.end(named[0], commit=commit)
        await self._store.durable()
        return service_pb.EndTransactionResponse(status=_status(of_ended(ended, commit=commit), ended.value))

    # --- receiving --------------------------------------------------------------------------------------------------

    async def ReceiveMessage(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        response = service_pb.ReceiveMessageResponse
        taken: PopResult | None = None
        written = False
        try:
            try:
                taken, lite_parent = await self._receive(request, context)
                await self._store.durable()
                messages = self._messages(taken, lite_parent) if taken is not None else []
            except Exception as error:  # each is answered; code_of logs what nobody foresaw
                yield response(status=_status(code_of(error), detail_of(error)))
                return
            if not messages:
                written = True
                yield response(status=_status(Code.MESSAGE_NOT_FOUND, "there is no message now"))
                return
            yield response(status=_status())
            for message in messages:
                yield response(message=message)
            written = True
            now = response()
            now.delivery_timestamp.FromNanoseconds(time.time_ns())
            yield now
        finally:
            if taken is not None and not written:
                self._core.requeue(taken.checkpoint)  # the consumer went away: it never saw them

    async def _receive(self, request: Any, context: Context) -> tuple[PopResult | None, str]:
        """Return what a call gets, and the parent topic where these are messages of lite topics."""
        client = self._client(context)
        name, topic_filter = names.group_of(request.group), names.filter_of(request.message_queue.topic)
        if request.batch_size <= 0:
            raise Refused(Code.BAD_REQUEST, f"batch_size is {request.batch_size}: ask for 1 message or more")
        count = min(request.batch_size, self._options.messages_max)
        wait_ms = self._wait_ms(request, context)
        attempt_id = check_attempt_id(request.attempt_id)
        if request.auto_renew:
            attempt_id = lease_id(client.id, attempt_id or os.urandom(8).hex())
        asked_ms = self._invisible_ms(request)
        wanted = expression_of(request.filter_expression)
        if (name, topic_filter) in client.lite or self._may_be_lite(client, name, topic_filter):
            invisible_ms = asked_ms or self._options.invisible_ms_default
            return await self._take_lite(client, name, topic_filter, count, invisible_ms, wait_ms, attempt_id), topic_filter
        group = self._group(name, topic_filter, "earliest", wanted)
        return await self._core.long_poll((group,), count, asked_ms or group.invisible_ms, wait_ms, attempt_id), ""

    def _group(self, name: str, topic_filter: str, start: Start, wanted: tuple[str, ExpressionType]) -> ConsumerGroup:
        """Return a group with the filter on delivery that its consumer wants.

        Where pops may create groups (`pop.groups_auto_create`), they say what these get; so the last consumer to ask for
        another expression decides, as in RocketMQ. Where they may not, only what the group is set to can be asked for.

        Raises:
            GroupUnknown, GroupInvalid, TopicInvalid, Overloaded, LimitExceeded: as `PopCore.group` raises them.
            Refused: ILLEGAL_FILTER_EXPRESSION.
        """
        group = self._core.state.groups.get((name, topic_filter))
        if group is None:
            if not self._options.groups_auto_create:
                return self._core.groups.get_or_create(name, topic_filter, start)
            settings = GroupSettings(expression=wanted[0], expression_type=wanted[1])
            return self._admin.create(name, topic_filter, start, settings)
        has = (group.settings.expression, group.settings.expression_type)
        if wanted == has or (wanted[0] == "*" and not self._options.groups_auto_create):
            return group
        if not self._options.groups_auto_create:
            raise Refused(
                Code.ILLEGAL_FILTER_EXPRESSION,
                f"the group {name[:80]!r} gets {has[0][:80]!r}: have it updated, or pop.groups_auto_create set",
            )
        self._admin.update(
            name, topic_filter, lambda settings: replace(settings, expression=wanted[0], expression_type=wanted[1])
        )
        return group

    def _wait_ms(self, request: Any, context: Context) -> int:
        wait_ms = request.long_polling_timeout.ToMilliseconds()
        if wait_ms < 0:
            raise Refused(Code.ILLEGAL_POLLING_TIME, f"long_polling_timeout is {wait_ms} ms: it can't be negative")
        left_s = context.time_remaining()
        if left_s is not None:
            wait_ms = min(wait_ms, max(int(left_s * 1000) - DEADLINE_MARGIN_MS, 0))
        return int(min(wait_ms, self._options.wait_ms_max))

    def _invisible_ms(self, request: Any) -> int:
        """Return for how long a call wants its messages; 0 where it leaves that to the group."""
        invisible_ms_max = self._options.invisible_ms_max
        if request.auto_renew:
            return min(LEASE_MS, invisible_ms_max)
        if not request.HasField("invisible_duration"):
            return 0
        invisible_ms = int(request.invisible_duration.ToMilliseconds())
        if not 0 < invisible_ms <= invisible_ms_max:
            raise Refused(
                Code.ILLEGAL_INVISIBLE_TIME, f"invisible_duration is {invisible_ms} ms: use 1 to {invisible_ms_max} ms"
            )
        return invisible_ms

    def _messages(self, taken: PopResult, lite_parent: str) -> list[Any]:
        checkpoint = taken.checkpoint
        group = self._core.state.groups_by_id.get(checkpoint.group_id)
        handles = self._core.handles.deliveries(checkpoint.position, checkpoint.pop_ms, checkpoint.group_id, checkpoint.count)
        invisible_ms = checkpoint.deadline_ms - checkpoint.pop_ms
        messages = []
        for handle, entry, data in zip(handles, checkpoint.entries(), taken.records, strict=True):
            if data is None:
                continue
            dead_of = ""
            if group is not None and group.dead_letters_of:
                letter = self._core.state.dead_letters.of_message(
                    group.queue.id, entry.position, entry.offset if entry.source == FROM_QUEUE else None
                )
                dead_of = self._origin_of(letter)
            messages.append(
                message_of(
                    decode(data, position=entry.position, verify=False),
                    entry=entry,
                    handle=handle,
                    invisible_ms=invisible_ms,
                    store_host=self._store_host,
                    lite_parent=lite_parent,
                    dead_of=dead_of,
                )
            )
        return messages

    def _origin_of(self, letter: DeadLetter | None) -> str:
        origin = None if letter is None else self._core.state.groups_by_id.get(letter.group_id)
        return "" if origin is None else origin.filter

    # --- settling ---------------------------------------------------------------------------------------------------

    @_answered(service_pb.AckMessageResponse)
    async def AckMessage(self, request: Any, _client: Client) -> Any:
        if not 0 < len(request.entries) <= HANDLES_MAX:
            raise Refused(Code.BAD_REQUEST, f"acknowledge 1 to {HANDLES_MAX} messages a call, not {len(request.entries)}")
        outcomes = self._core.ack(names.group_of(request.group), [entry.receipt_handle for entry in request.entries])
        await self._store.durable()
        entries = [
            service_pb.AckMessageResultEntry(
                message_id=entry.message_id,
                receipt_handle=entry.receipt_handle,
                status=_status(OF_OUTCOME[outcome], outcome.value),
            )
            for entry, outcome in zip(request.entries, outcomes, strict=True)
        ]
        code = overall([OF_OUTCOME[outcome] for outcome in outcomes])
        return service_pb.AckMessageResponse(status=_status(code, outcomes[0].value), entries=entries)

    @_answered(service_pb.ForwardMessageToDeadLetterQueueResponse)
    async def ForwardMessageToDeadLetterQueue(self, request: Any, _client: Client) -> Any:
        (outcome,) = self._core.dead_letter(names.group_of(request.group), [request.receipt_handle])
        await self._store.durable()
        # The official clients ask again until they hear OK. Where the delivery is over, the message is in other hands already.
        code = Code.INVALID_RECEIPT_HANDLE if outcome is AckOutcome.INVALID_HANDLE else Code.OK
        return service_pb.ForwardMessageToDeadLetterQueueResponse(status=_status(code, outcome.value))

    async def ChangeInvisibleDuration(self, request: Any, context: Context) -> Any:
        handle = request.receipt_handle  # given back where it can't be changed: a client goes on with what it gets
        try:
            self._client(context)
            change = InvisibleChange(handle, int(request.invisible_duration.ToMilliseconds()), request.suspend)
            ((outcome, handle),) = self._core.change_invisible(names.group_of(request.group), [change])
            await self._store.durable()
            status = _status(OF_OUTCOME[outcome], outcome.value)
        except Exception as error:  # each is answered; code_of logs what nobody foresaw
            status = _status(code_of(error), detail_of(error))
        return service_pb.ChangeInvisibleDurationResponse(status=status, receipt_handle=handle)

    # --- lite topics ------------------------------------------------------------------------------------------------

    @_answered(service_pb.SyncLiteSubscriptionResponse)
    async def SyncLiteSubscription(self, request: Any, client: Client) -> Any:
        actions = pb.LiteSubscriptionAction
        name, parent = names.group_of(request.group), names.filter_of(request.topic)
        if len(request.lite_topic_set) > LITE_SUBSCRIPTIONS_MAX:
            raise too_many()
        filters = dict.fromkeys(names.lite_filter_of(parent, lite_topic) for lite_topic in request.lite_topic_set)
        had = client.lite.get((name, parent), {})
        if request.action == actions.PARTIAL_ADD:
            has = had | filters
        elif request.action == actions.COMPLETE_ADD:
            has = filters
        elif request.action == actions.PARTIAL_REMOVE:
            has = {topic_filter: None for topic_filter in had if topic_filter not in filters}
        else:
            has = {}
        self._lite.sync(client, name, parent, has=has, named=filters, start=self._lite_start(request))
        await self._store.durable()
        return service_pb.SyncLiteSubscriptionResponse(status=_status())

    def _lite_start(self, request: Any) -> Start | None:
        """Return where the lite topics of a request are to be read from; None for where the group is."""
        option = request.offset_option
        kind = option.WhichOneof("offset_type") if request.HasField("offset_option") else None
        if kind is None or (kind == "policy" and option.policy == pb.OffsetOption.Policy.LAST):
            return None
        if kind == "policy":
            return "latest" if option.policy == pb.OffsetOption.Policy.MAX else "earliest"
        if kind == "timestamp" and option.timestamp > 0:
            return int(option.timestamp)
        raise Refused(Code.ILLEGAL_OFFSET, f"the offset option {kind} is not supported, or negative: use policy or timestamp")

    def _may_be_lite(self, client: Client, name: str, parent: str) -> bool:
        """Return whether a client that has said nothing of itself since the node started is a lite consumer of a group."""
        types = pb.ClientType
        if client.client_type:
            return client.client_type in (types.LITE_PUSH_CONSUMER, types.LITE_SIMPLE_CONSUMER)
        if (name, parent) in self._core.state.groups:
            return False
        return any(group.name == name and group.filter.startswith(f"{parent}/") for group in self._core)

    async def _take_lite(
        self, client: Client, name: str, parent: str, count: int, invisible_ms: int, wait_ms: int, attempt_id: str
    ) -> PopResult | None:
        """Take from whichever of a client's lite topics has something; they are asked in turn."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + wait_ms / 1000
        while True:
            groups = self._lite.groups(client, name, parent)
            left_ms = max(int((ends_s - loop.time()) * 1000), 0)
            if groups:
                client.turn = (client.turn + 1) % len(groups)
                groups = groups[client.turn :] + groups[: client.turn]
            try:
                taken = await self._core.long_poll(groups, count, invisible_ms, min(left_ms, LITE_LOOK_MS), attempt_id)
            except GroupUnknown:
                continue  # one was deleted: the others go on
            if taken is not None or left_ms <= 0:
                return taken
            if not groups:
                await asyncio.sleep(min(left_ms, LITE_LOOK_MS) / 1000)

    # --- telemetry --------------------------------------------------------------------------------------------------

    async def Telemetry(self, requests: AsyncIterator[Any], context: Context) -> AsyncGenerator[Any, None]:
        command = service_pb.TelemetryCommand
        try:
            client = self._client(context)
        except Refused as error:
            yield command(status=_status(error.code, str(error)))
            return
        stream = Stream()
        if client.stream is not None:
            client.stream.end()
        client.stream = stream
        reader = asyncio.create_task(self._read_telemetry(requests, client, stream))
        reader.add_done_callback(lambda _: stream.end())
        try:
            while True:
                while stream.commands:
                    yield stream.commands.popleft()
                if stream.ended:
                    break
                await stream.wake.wait()
                stream.wake.clear()
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            self.clients.hung_up(client, stream, self._store.now_ms())

    async def _read_telemetry(self, requests: AsyncIterator[Any], client: Client, stream: Stream) -> None:
        command = service_pb.TelemetryCommand
        async for request in requests:
            self.clients.seen(client.id, self._store.now_ms())
            # What else a client may say answers commands that this node doesn't give.
            if not request.HasField("settings") or not stream.has_room:
                continue
            try:
                stream.put(command(status=_status(), settings=self._settings(request.settings, client)))
            except Exception as error:  # each is answered; code_of logs what nobody foresaw
                stream.put(command(status=_status(code_of(error), detail_of(error))))
                return

    def _settings(self, settings: Any, client: Client) -> Any:
        client.client_type = _client_type(settings.client_type)
        if not settings.HasField("subscription"):
            for topic in [names.filter_of(topic) for topic in settings.publishing.topics]:
                self.clients.publishes(client, topic)
                self._ask_again(topic)
            return merged(settings, (), self._options)
        name = names.group_of(settings.subscription.group)
        groups = []
        for entry in settings.subscription.subscriptions:
            expression_of(entry.expression)
            group = self._core.state.groups.get((name, names.filter_of(entry.topic)))
            if group is not None:
                groups.append(group)
        return merged(settings, groups, self._options)

    def _ask(self, half: HalfMessage) -> bool:
        """Ask a producer for the outcome of a half message; return whether there is one to be asked."""
        if not half.producer.startswith(PRODUCER):
            return False
        client = self.clients.producer_of(half.producer.removeprefix(PRODUCER), half.checks)
        data = self._core.read(half.position, half.size)
        if client is None or client.stream is None or data is None:
            return False
        record = decode(data, position=half.position)
        system_ms = int(self._options.transaction_check_ms)
        message = message_of(record, store_host=self._store_host)
        message.system_properties.orphaned_transaction_recovery_duration.FromMilliseconds(system_ms)
        question = service_pb.RecoverOrphanedTransactionCommand(
            message=message, transaction_id=self._core.handles.half(half.position, record.store_ms)
        )
        client.stream.put(service_pb.TelemetryCommand(status=_status(), recover_orphaned_transaction_command=question))
        return True

    def _ask_again(self, topic: str) -> None:
        """Ask what nobody was there to be asked about, now that somebody is."""
        while (client := self.clients.producer_of(topic, 0)) is not None and client.stream is not None:
            asked = self._transactions.take(PRODUCER + topic, 1)
            if not asked or not self._ask(asked[0]):
                return

    # --- what this node doesn't do ----------------------------------------------------------------------------------

    @_answered(service_pb.UpdateOffsetResponse)
    async def UpdateOffset(self, _request: Any, _client: Client) -> Any:
        raise _pull_not_supported()

    @_answered(service_pb.GetOffsetResponse)
    async def GetOffset(self, _request: Any, _client: Client) -> Any:
        raise _pull_not_supported()

    @_answered(service_pb.QueryOffsetResponse)
    async def QueryOffset(self, _request: Any, _client: Client) -> Any:
        raise _pull_not_supported()

    async def PullMessage(self, _request: Any, _context: Context) -> AsyncGenerator[Any, None]:
        error = _pull_not_supported()
        yield service_pb.PullMessageResponse(status=_status(error.code, str(error)))


def _advertised(address: str) -> HostPort | None:
    try:
        return HostPort.parse(address) if address else None
    except OptionInvalid as error:
        raise OptionInvalid("pop.rocketmq_advertise", address, error.allowed) from error


def _status(code: Code = Code.OK, detail: str = "") -> Any:
    return pb.Status(code=code, message=detail)


def _client_id(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "x-mq-client-id":
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""


def _client_type(client_type: int) -> int:
    if client_type not in pb.ClientType.values() or not client_type:
        raise Refused(Code.UNRECOGNIZED_CLIENT_TYPE, f"the client type {client_type} is unknown")
    return client_type


def _pull_not_supported() -> Refused:
    return Refused(Code.NOT_IMPLEMENTED, "this node has no pull consumers: use a SimpleConsumer, and the admin API for offsets")
