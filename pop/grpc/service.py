"""The gRPC face of POP: `penstock.pop.v1`, defined in pop.proto.

One response carries a whole batch: a stream item per message would cost more than everything else together. Whatever
changes state is answered when it is durable. A call that can't be served at all fails with a gRPC status; what is wrong
with one message or handle of a batch is its own `Status`, and the others go on.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from itertools import islice
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
import structlog

from penstock.pop.core.checkpoint import FROM_QUEUE, Checkpoint
from penstock.pop.core.core import PopCore
from penstock.pop.core.deadletters import DeadLetter
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.outcome import AckOutcome, InvisibleChange
from penstock.pop.core.poll import PopResult
from penstock.pop.core.popping import check_attempt_id
from penstock.pop.core.scan import RESPONSE_BYTES
from penstock.pop.core.sending import Sending, SendRefused
from penstock.pop.core.transactions import Ended, Half, Transactions
from penstock.pop.errors import GroupBusy, GroupExists, GroupUnknown, Overloaded, PopError, RequestInvalid
from penstock.pop.grpc.stream import CREDITS_DEFAULT, CREDITS_MAX, Acked, Consumption
from penstock.pop.grpc.wire import SENT_PLAIN, STATUS_OK, popped_messages, sent, serialize, statuses
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.errors import DiskFull, LimitExceeded, RecordTooLarge, StoreError, TopicInvalid
from penstock.store.lightqueue import End, Start
from penstock.store.record import TOPIC_BYTES_MAX, Properties, decode, decode_properties
from penstock.timer.delayed import DelayedMessages, Recalled

logger = structlog.get_logger("pop.service")

MESSAGES_PER_SEND_MAX = 10_000
HANDLES_MAX = 16_384

TRANSACTIONS_DEFAULT = 32
TRANSACTIONS_MAX = 1_000
"""Of one answer."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

_MESSAGE_ID = re.compile(r"[0-9a-fA-F]{16}")

_OK = pb.Status(code=pb.OK)
_STATUS = {outcome: pb.Status(code=pb.Code.Value(outcome.name), detail=outcome.value) for outcome in AckOutcome}
_STATUS[AckOutcome.OK] = _OK
_RECALLED = {
    Recalled.CANCELLED: _OK,
    Recalled.ALREADY_FIRED: pb.Status(code=pb.ALREADY_FIRED, detail="the message was delivered before"),
    Recalled.ALREADY_CANCELLED: pb.Status(code=pb.ALREADY_RECALLED, detail="the message was recalled before"),
    Recalled.UNKNOWN: pb.Status(code=pb.UNKNOWN_MESSAGE, detail="the log holds no such delayed message"),
}
_ENDED = {ended: pb.Status(code=pb.Code.Value(ended.name), detail=ended.value) for ended in Ended}
_ENDED[Ended.OK] = _OK


class PopService:
    """Serves the API from a core. Its answers are messages of pop.proto, or their bytes.

    Parameters:
        core: groups, checkpoints, acknowledgements.
        delayed: delayed messages.
        transactions: half messages.
        sending: stores what is sent.
    """

    def __init__(self, core: PopCore, delayed: DelayedMessages, transactions: Transactions, sending: Sending) -> None:
        self._core = core
        self._transactions = transactions
        self._store = core.store
        self._delayed = delayed
        self._sending = sending

    # --- Send -------------------------------------------------------------------------------------------------------

    async def Send(self, request: pb.SendRequest, context: Context) -> bytes:
        if len(request.messages) > MESSAGES_PER_SEND_MAX:
            await refuse(
                context, RequestInvalid(f"send at most {MESSAGES_PER_SEND_MAX} messages a call, not {len(request.messages)}")
            )
        end = self._store.log.end
        route_of, append = self._store.queues.route, self._store.append_message
        bytes_max = self._core.options.message_bytes_max
        results: list[bytes] = []
        add = results.append
        for message in request.messages:
            try:
                if (
                    message.tag
                    or message.message_group
                    or message.deliver_at_ms
                    or message.producer
                    or message.properties
                    or len(message.body) + TOPIC_BYTES_MAX > bytes_max
                ):
                    add(sent(self._store_message(message)))
                else:  # the hot path: 3 us, all in all
                    add(SENT_PLAIN % append(route_of(message.topic.encode()), message.body, b"", 1))
            except SendRefused as error:
                add(sent(pb.SendResult(status=pb.Status(code=pb.Code.Value(error.refusal.name), detail=str(error)))))
            except TopicInvalid as error:
                add(sent(pb.SendResult(status=pb.Status(code=pb.INVALID_TOPIC, detail=str(error)))))
            except RecordTooLarge as error:
                add(sent(pb.SendResult(status=pb.Status(code=pb.MESSAGE_TOO_LARGE, detail=str(error)))))
            except LimitExceeded as error:
                add(sent(pb.SendResult(status=pb.Status(code=pb.TOO_MANY_QUEUES, detail=str(error)))))
            except DiskFull as error:
                # The whole call, so that it is sent again: where the disk got full in its midst, its first messages come twice.
                await refuse(context, error)
        if self._store.log.end > end:
            await self._store.durable()
        return b"".join(results)

    def _store_message(self, message: pb.Message) -> pb.SendResult:
        properties = Properties(
            list(message.properties.items()),
            message.tag,
            message.message_group,
            message.deliver_at_ms,
            producer=message.producer,
        )
        stored = self._sending.store(message.topic.encode(), message.body, properties)
        return pb.SendResult(
            status=_OK,
            message_id=message_id(stored.position),
            recall_handle=stored.recall_handle,
            transaction_handle=stored.transaction_handle,
        )

    # --- transactions -----------------------------------------------------------------------------------------------

    async def EndTransactions(self, request: pb.EndTransactionsRequest, context: Context) -> bytes:
        if len(request.ends) > HANDLES_MAX:
            await refuse(context, RequestInvalid(f"end at most {HANDLES_MAX} transactions a call, not {len(request.ends)}"))
        found = []
        for end in request.ends:
            named = self._core.handles.read_half(end.transaction_handle)
            if named is None:
                found.append(pb.Status(code=pb.INVALID_HANDLE, detail="this is not a transaction handle that this node gave"))
            else:
                try:
                    found.append(_ENDED[self._transactions.end(named[0], commit=end.commit)])
                except DiskFull as error:
                    await refuse(context, error)
        await self._store.durable()
        return statuses(found)

    async def PollTransactions(self, request: pb.PollTransactionsRequest, context: Context) -> pb.TransactionsResponse:
        try:
            if not request.producer:
                raise RequestInvalid("give the producer whose transactions are asked for")
            count = bounded("transactions_max", request.transactions_max, TRANSACTIONS_DEFAULT)
            wait_ms = min(bounded("wait_ms", request.wait_ms, 0), self._core.options.wait_ms_max)
            found = await self._transactions.poll(request.producer, min(count, TRANSACTIONS_MAX), wait_ms)
        except PopError as error:
            await refuse(context, error)
        return pb.TransactionsResponse(transactions=[self._transaction(half) for half in found])

    async def ListTransactions(self, request: pb.ListTransactionsRequest, context: Context) -> pb.TransactionsResponse:
        try:
            count = min(bounded("transactions_max", request.transactions_max, TRANSACTIONS_MAX), TRANSACTIONS_MAX)
            after = position_of(request.after_message_id) if request.after_message_id else -1
        except RequestInvalid as error:
            await refuse(context, error)
        wanted = (half for half in self._transactions if half.position > after and request.producer in ("", half.producer))
        return pb.TransactionsResponse(transactions=[self._transaction(half) for half in islice(wanted, count)])

    def _transaction(self, half: Half) -> pb.Transaction:
        """Return a half message as it goes over the wire: without the message where that can't be read any more."""
        found = pb.Transaction(
            message_id=message_id(half.position), producer=half.producer, checks=half.checks, next_check_ms=half.due_ms
        )
        data = self._core.read(half.position, half.size)
        if data is not None:
            record = decode(data, position=half.position)
            properties = decode_properties(record.properties)
            found.stored_ms = record.store_ms
            found.transaction_handle = self._core.handles.half(half.position, record.store_ms)
            found.message.CopyFrom(
                pb.Message(
                    topic=record.topic.decode(),
                    body=record.body,
                    properties=dict(properties.user),
                    message_group=properties.message_group,
                    tag=properties.tag,
                    producer=half.producer,
                )
            )
        return found

    # --- Pop --------------------------------------------------------------------------------------------------------

    async def Pop(self, request: pb.PopRequest, context: Context) -> bytes:
        core = self._core
        options = core.options
        try:
            messages_max = bounded("messages_max", request.messages_max, options.messages_default)
            wait_ms = min(bounded("wait_ms", request.wait_ms, 0), options.wait_ms_max)
            start = start_of(request.start, request.start_at_ms)
            asked_ms = bounded("invisible_ms", request.invisible_ms, 0, options.invisible_ms_max)
            attempt_id = check_attempt_id(request.attempt_id)
            acks = list(request.acks)
            if len(acks) > HANDLES_MAX:
                raise RequestInvalid(f"acknowledge at most {HANDLES_MAX} handles a call, not {len(acks)}")
            group = core.groups.get_or_create(request.group, request.filter, start)
            outcomes = core.ack(group.name, acks) if acks else []
            taken = await core.long_poll(
                (group,),
                min(messages_max, options.messages_max),
                asked_ms or group.invisible_ms,
                0 if acks else wait_ms,  # else who acknowledged would hear of it only with the next message
                attempt_id,
            )
        except (PopError, StoreError) as error:
            await refuse(context, error)
        if taken is None and not acks:
            return b""
        try:
            await self._store.durable()
            popped = self.popped(taken) if taken is not None else b""
        except BaseException:
            if taken is not None:
                core.requeue(taken.checkpoint)  # the consumer went away: it never saw them
            raise
        if outcomes.count(AckOutcome.OK) == len(acks):
            return popped
        # Protobuf merges messages whose bytes are joined.
        return popped + serialize(pb.PopResponse(ack_statuses=[_STATUS[outcome] for outcome in outcomes]))

    def popped(self, taken: PopResult) -> bytes:
        """Return the field `messages` of an answer."""
        checkpoint = taken.checkpoint
        group = self._core.state.groups_by_id.get(checkpoint.group_id)
        handles = self._core.handles.deliveries_joined(
            checkpoint.position, checkpoint.pop_ms, checkpoint.group_id, checkpoint.count
        )
        dead = self._dead(group, checkpoint) if group is not None and group.dead_letters_of else {}
        return popped_messages(checkpoint.body, taken.records, handles, checkpoint.deadline_ms, dead)

    def _dead(self, group: ConsumerGroup, checkpoint: Checkpoint) -> dict[int, pb.DeadLetter]:
        """Return what there is to tell of the messages of a checkpoint as dead letters, by index."""
        dead = {}
        for index, entry in enumerate(checkpoint.entries()):
            offset = entry.offset if entry.source == FROM_QUEUE else None
            letter = self._core.state.dead_letters.of_message(group.queue.id, entry.position, offset)
            if letter is not None:
                origin = self._core.state.groups_by_id.get(letter.group_id)
                dead[index] = dead_letter(letter, group.dead_letters_of, origin.filter if origin else "", "")
        return dead

    # --- Consume ----------------------------------------------------------------------------------------------------

    async def Consume(self, requests: AsyncIterator[pb.ConsumeRequest], context: Context) -> AsyncGenerator[bytes, None]:
        consumption: Consumption | None = None
        give_back = False
        reader: asyncio.Task[None] | None = None
        try:
            try:
                first = await anext(aiter(requests), None)
                if first is None or not first.HasField("open"):
                    raise RequestInvalid("the first request of a Consume stream must have 'open'")
                consumption = self._open(first.open)
                give_back = first.open.give_back
                _settle(consumption, first)
                consumption.pump()
                reader = asyncio.create_task(_read(requests, consumption))
                reader.add_done_callback(lambda _: consumption.wake.set())
                while not reader.done() and consumption.failure is None:
                    await consumption.wake.wait()
                    consumption.wake.clear()
                    while consumption.outbox:
                        data, count = self._joined(consumption.outbox)
                        yield data
                        for _ in range(count):
                            consumption.outbox.popleft()  # only now: what a broken stream didn't write comes back
                if consumption.failure is not None:
                    raise consumption.failure
                reader.result()
            except (PopError, StoreError) as error:
                await refuse(context, error)
            # The client has said all: what it acknowledged last is answered when it is durable.
            await self._store.durable()
            while consumption.outbox:
                done = consumption.outbox.popleft()
                if isinstance(done, Acked):
                    yield serialize(self._encoded(done))
                else:
                    self._core.requeue(done.checkpoint)
        finally:
            if reader is not None:
                reader.cancel()
            if consumption is not None:
                consumption.end(give_back=give_back)

    def _open(self, request: pb.ConsumeOpen) -> Consumption:
        options = self._core.options
        credits = bounded("credits", request.credits, CREDITS_DEFAULT, CREDITS_MAX)
        batch_max = bounded("batch_max", request.batch_max, options.messages_default)
        asked_ms = bounded("invisible_ms", request.invisible_ms, 0, options.invisible_ms_max)
        group = self._core.groups.get_or_create(request.group, request.filter, start_of(request.start, request.start_at_ms))
        return Consumption(
            self._core,
            group,
            credits=credits,
            batch_max=min(batch_max, options.messages_max),
            invisible_ms=asked_ms or group.invisible_ms,
        )

    def _joined(self, outbox: deque[PopResult | Acked]) -> tuple[bytes, int]:
        """Return what waits in one response, and how much of it: protobuf merges messages whose bytes are joined."""
        parts: list[bytes] = []
        size = 0
        for done in outbox:
            if parts and size > RESPONSE_BYTES // 2:
                break
            parts.append(serialize(self._encoded(done)))
            size += len(parts[-1])
        return b"".join(parts), len(parts)

    def _encoded(self, done: PopResult | Acked) -> bytes | pb.ConsumeResponse:
        if isinstance(done, PopResult):
            return self.popped(done)
        return pb.ConsumeResponse(
            acked=done.acked,
            refused=[pb.HandleStatus(handle=handle, status=_STATUS[outcome]) for handle, outcome in done.refused],
            changed=[pb.ChangeInvisibleResult(status=_STATUS[outcome], handle=handle) for outcome, handle in done.changed],
        )

    # --- Ack, ChangeInvisible, Recall -------------------------------------------------------------------------------

    async def Ack(self, request: pb.AckRequest, context: Context) -> bytes:
        if len(request.handles) > HANDLES_MAX:
            await refuse(
                context, RequestInvalid(f"acknowledge at most {HANDLES_MAX} handles a call, not {len(request.handles)}")
            )
        try:
            outcomes = self._core.ack(request.group, list(request.handles))
        except DiskFull as error:
            await refuse(context, error)
        await self._store.durable()
        if outcomes.count(AckOutcome.OK) == len(outcomes):
            return STATUS_OK * len(outcomes)
        return statuses([_STATUS[outcome] for outcome in outcomes])

    async def GiveUp(self, request: pb.AckRequest, context: Context) -> bytes:
        if len(request.handles) > HANDLES_MAX:
            await refuse(context, RequestInvalid(f"give up at most {HANDLES_MAX} handles a call, not {len(request.handles)}"))
        try:
            outcomes = self._core.dead_letter(request.group, list(request.handles))
        except DiskFull as error:
            await refuse(context, error)
        await self._store.durable()
        return statuses([_STATUS[outcome] for outcome in outcomes])

    async def ChangeInvisible(self, request: pb.ChangeInvisibleRequest, context: Context) -> pb.ChangeInvisibleResponse:
        if len(request.changes) > HANDLES_MAX:
            await refuse(context, RequestInvalid(f"change at most {HANDLES_MAX} handles a call, not {len(request.changes)}"))
        changes = [InvisibleChange(change.handle, change.invisible_ms, change.suspend) for change in request.changes]
        try:
            outcomes = self._core.change_invisible(request.group, changes)
        except DiskFull as error:
            await refuse(context, error)
        await self._store.durable()
        results = [pb.ChangeInvisibleResult(status=_STATUS[outcome], handle=handle) for outcome, handle in outcomes]
        return pb.ChangeInvisibleResponse(results=results)

    async def Recall(self, request: pb.RecallRequest, context: Context) -> pb.RecallResponse:
        if len(request.recall_handles) > HANDLES_MAX:
            await refuse(context, RequestInvalid(f"recall at most {HANDLES_MAX} messages a call"))
        statuses = []
        for handle in request.recall_handles:
            named = self._core.handles.read_recall(handle)
            if named is None:
                statuses.append(pb.Status(code=pb.INVALID_HANDLE, detail="this is not a recall handle that this node gave"))
            else:
                try:
                    statuses.append(_RECALLED[self._delayed.recall(*named)])
                except DiskFull as error:
                    await refuse(context, error)
        await self._store.durable()
        return pb.RecallResponse(statuses=statuses)


async def _read(requests: AsyncIterator[pb.ConsumeRequest], consumption: Consumption) -> None:
    async for request in requests:
        if request.HasField("open"):
            raise RequestInvalid("a Consume stream is opened once, by its first request")
        _settle(consumption, request)


def _settle(consumption: Consumption, request: pb.ConsumeRequest) -> None:
    if len(request.acks) > HANDLES_MAX or len(request.changes) > HANDLES_MAX:
        raise RequestInvalid(f"settle at most {HANDLES_MAX} handles a request")
    if request.credits:
        consumption.grant(bounded("credits", request.credits, 0, CREDITS_MAX))
    if request.acks or request.changes:
        changes = [InvisibleChange(change.handle, change.invisible_ms, change.suspend) for change in request.changes]
        consumption.settle(list(request.acks), changes)


def message_id(position: int) -> str:
    """Return the id of the message at a position: 16 hexadecimal digits."""
    return f"{position:016x}"


def position_of(message_id: str) -> int:
    """Return the position that a message's id names.

    Raises:
        RequestInvalid: that isn't an id.
    """
    if not _MESSAGE_ID.fullmatch(message_id):
        raise RequestInvalid(f"{message_id[:40]!r} is not a message's id: give 16 hexadecimal digits")
    return int(message_id, 16)


def dead_letter(letter: DeadLetter, group: str, topic_filter: str, topic: str) -> pb.DeadLetter:
    """Return a dead letter as it goes over the wire."""
    return pb.DeadLetter(
        group=group,
        filter=topic_filter,
        attempts=letter.attempts,
        reason=pb.Reason.ValueType(letter.reason),
        failed_ms=letter.failed_ms,
        message_id=message_id(letter.position),
        topic=topic,
    )


def end_of(end: pb.Start.ValueType) -> End:
    """Return the end of a queue that a request names. Raises RequestInvalid where that is none."""
    if end not in (pb.EARLIEST, pb.LATEST):
        raise RequestInvalid(f"start is {end}: use EARLIEST (0) or LATEST (1)")
    return "latest" if end == pb.LATEST else "earliest"


def start_of(end: pb.Start.ValueType, at_ms: int) -> Start:
    """Return where a group begins: at a time, where one is given. Raises RequestInvalid where that can't be."""
    start = end_of(end)
    if at_ms and start == "latest":
        raise RequestInvalid("give start or start_at_ms, not both")
    return bounded("start_at_ms", at_ms, 0) or start


def bounded(name: str, value: int, default: int, maximum: int | None = None) -> int:
    """Return `value`, or `default` where it is 0. Raises RequestInvalid outside of 0 to `maximum`."""
    if value < 0:
        raise RequestInvalid(f"{name} is {value}: it can't be negative")
    if maximum is not None and value > maximum:
        raise RequestInvalid(f"{name} is {value}: the most that this node allows is {maximum}")
    return value or default


_REFUSALS: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (LimitExceeded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DiskFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (GroupUnknown, grpc.StatusCode.NOT_FOUND),
    (GroupExists, grpc.StatusCode.ALREADY_EXISTS),
    (GroupBusy, grpc.StatusCode.FAILED_PRECONDITION),
)


async def refuse(context: Context, error: Exception) -> NoReturn:
    """End the call with the gRPC status that fits `error`."""
    fitting = (code for kind, code in _REFUSALS if isinstance(error, kind))
    await context.abort(next(fitting, grpc.StatusCode.INVALID_ARGUMENT), str(error))
