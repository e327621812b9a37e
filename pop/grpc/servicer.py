"""The servicer of `penstock.pop.v1.PopService`, which pop.proto defines.

One response carries a whole batch, because a stream item for each message would cost more than everything else together. A
call that changes something is answered when the change is durable. A call that can't be served at all fails with a gRPC
status. If one message or handle of a batch is wrong, it has its own `Status`, and the others are served.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable

from penstock.pop.access.auditedcall import NAMES_MAX, note_change, note_failed
from penstock.pop.access.caller import causer_of_call, check_sender
from penstock.pop.core.core import PopCore
from penstock.pop.core.deliveries import AckOutcome, VisibilityChange
from penstock.pop.core.handle import Handles
from penstock.pop.core.pops import check_attempt_id
from penstock.pop.core.sender import Sender, message_id
from penstock.pop.core.transactions import Transactions
from penstock.pop.grpc.consume import Consumption
from penstock.pop.grpc.requests import bounded, check_count, start_of
from penstock.pop.grpc.sends import Sends
from penstock.pop.grpc.status import ACK_STATUS, NO_RECALL_HANDLE, RECALL_STATUS
from penstock.pop.grpc.transactions import TransactionMethods
from penstock.pop.grpc.wire import STATUS_OK, MessageEncoder, serialize, statuses
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages, Recalled


class PopServicer:
    """Has the methods of the service. They return messages of pop.proto, or the bytes of such messages.

    Parameters:
        core: groups, checkpoints and acknowledgements.
        store: has the messages.
        handles: makes and reads handles.
        delayed: delayed messages.
        transactions: half messages.
        sender: stores messages.
        options: bounds and defaults.
    """

    def __init__(
        self,
        core: PopCore,
        store: Store,
        handles: Handles,
        delayed: DelayedMessages,
        transactions: Transactions,
        sender: Sender,
        options: PopOptions,
    ) -> None:
        self.unsynced = core.unsynced
        """Room for messages that were handed out and wait for the sync of their checkpoint."""
        self._core = core
        self._groups = core.groups
        self._store = store
        self._handles = handles
        self._delayed = delayed
        self._options = options
        self._popped = MessageEncoder(core.dead_letters, handles)
        self._sends = Sends(store, sender, options.message_bytes_max)
        self._consumption = Consumption(core, store, handles, self._popped, options)
        self._transactions = TransactionMethods(transactions, handles, store, core.read, options.wait_ms_max)

    def Send(self, request: pb.SendRequest) -> Awaitable[bytes]:
        return self._sends.send(request)

    async def Pop(self, request: pb.PopRequest) -> bytes:
        core, options = self._core, self._options
        messages_max = bounded("messages_max", request.messages_max, options.messages_default)
        wait_ms = min(bounded("wait_ms", request.wait_ms, 0), options.wait_ms_max)
        start = start_of(request.start, request.start_at_ms)
        asked_ms = bounded("invisible_ms", request.invisible_ms, 0, options.invisible_ms_max)
        in_order_max = bounded("in_order_max", request.in_order_max, 1)
        attempt_id = check_attempt_id(request.attempt_id)
        acks = list(request.acks)
        check_count("acknowledge handles", acks)
        causer = causer_of_call()
        group = self._groups.get_or_create(request.group, request.filter, start, causer)
        outcomes = core.deliveries.ack(group.name, acks) if acks else []
        result = await core.polls.poll(
            (group,),
            min(messages_max, options.messages_max),
            asked_ms or group.invisible_ms,
            0 if acks else wait_ms,  # a call that waits would tell what came of its acks only with the next message
            attempt_id,
            in_order_max,
            causer,
        )
        if result is None and not acks:
            return b""
        try:
            await self._store.durable()
            messages = self._popped.encode(result) if result is not None else b""
        except BaseException:
            if result is not None:
                core.deliveries.requeue(result.checkpoint)  # the consumer went away, so it never saw the messages
            raise
        if outcomes.count(AckOutcome.OK) == len(acks):
            return messages
        # Protocol buffers merge messages whose bytes are joined.
        return messages + serialize(pb.PopResponse(ack_statuses=[ACK_STATUS[outcome] for outcome in outcomes]))

    def Consume(self, requests: AsyncIterator[pb.ConsumeRequest]) -> AsyncGenerator[bytes, None]:
        return self._consumption.consume(requests)

    async def Ack(self, request: pb.AckRequest) -> bytes:
        check_count("acknowledge handles", request.handles)
        outcomes = self._core.deliveries.ack(request.group, list(request.handles))
        await self._store.durable()
        if outcomes.count(AckOutcome.OK) == len(outcomes):
            return STATUS_OK * len(outcomes)
        return statuses([ACK_STATUS[outcome] for outcome in outcomes])

    async def DeadLetter(self, request: pb.AckRequest) -> bytes:
        check_count("dead-letter handles", request.handles)
        outcomes = self._core.deliveries.dead_letter(request.group, list(request.handles), request.reason)
        await self._store.durable()
        return statuses([ACK_STATUS[outcome] for outcome in outcomes])

    async def ChangeInvisible(self, request: pb.ChangeInvisibleRequest) -> pb.ChangeInvisibleResponse:
        check_count("change handles", request.changes)
        changes = [
            VisibilityChange(change.handle, change.invisible_ms, change.suspend, change.nack, change.reason)
            for change in request.changes
        ]
        outcomes = self._core.deliveries.change_invisible(request.group, changes)
        await self._store.durable()
        results = [pb.ChangeInvisibleResult(status=ACK_STATUS[outcome], handle=handle) for outcome, handle in outcomes]
        return pb.ChangeInvisibleResponse(results=results)

    async def Recall(self, request: pb.RecallRequest) -> pb.RecallResponse:
        check_count("recall messages", request.recall_handles)
        named = [self._handles.read_recall(handle) for handle in request.recall_handles]
        valid = [each for each in named if each is not None]
        for position, _ in valid:  # before any of them is recalled
            check_sender(self._store, position, self._delayed.size(position))
        outcomes = self._delayed.recall_all(valid)  # all of them or, if the disk is full, none
        recalled = [position for (position, _), outcome in zip(valid, outcomes, strict=True) if outcome is Recalled.CANCELLED]
        remaining = iter(outcomes)
        answers = [RECALL_STATUS[next(remaining)] if each is not None else NO_RECALL_HANDLE for each in named]
        if recalled:
            note_change(recalled=len(recalled), messages=" ".join(map(message_id, recalled[:NAMES_MAX])))
        elif answers:
            note_failed(answers[0].detail)
        await self._store.durable()
        return pb.RecallResponse(statuses=answers)

    def EndTransactions(self, request: pb.EndTransactionsRequest) -> Awaitable[bytes]:
        return self._transactions.end(request)

    def PollTransactions(self, request: pb.PollTransactionsRequest) -> Awaitable[pb.TransactionsResponse]:
        return self._transactions.poll(request)

    def ListTransactions(self, request: pb.ListTransactionsRequest) -> Awaitable[pb.TransactionsResponse]:
        return self._transactions.pending(request)
