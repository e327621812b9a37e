"""EndTransactions, PollTransactions, ListTransactions: the transactions of producers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from penstock.pop.access.caller import check_sender, may_send_now
from penstock.pop.core.handle import Handles
from penstock.pop.core.sender import message_id
from penstock.pop.core.transactions import HalfMessage, Transactions
from penstock.pop.errors import RequestInvalid
from penstock.pop.grpc.requests import bounded, check_count, position_of
from penstock.pop.grpc.status import END_STATUS
from penstock.pop.grpc.wire import statuses
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.properties import decode_properties
from penstock.store.record import decode
from penstock.store.store import Store

TRANSACTIONS_DEFAULT = 32
TRANSACTIONS_MAX = 1_000
"""Maximum number of transactions in one response."""


class TransactionMethods:
    """Serves EndTransactions, PollTransactions and ListTransactions.

    Parameters:
        transactions: the pending transactions.
        handles: reads and makes the handles of half messages.
        store: tells when a decision is durable.
        read: returns the record of a message, or None if it can't be read.
        wait_ms_max: longest time that a poll waits.
    """

    def __init__(
        self,
        transactions: Transactions,
        handles: Handles,
        store: Store,
        read: Callable[[int, int], bytes | None],
        wait_ms_max: int,
    ) -> None:
        self._transactions = transactions
        self._handles = handles
        self._store = store
        self._read = read
        self._wait_ms_max = wait_ms_max

    async def end(self, request: pb.EndTransactionsRequest) -> bytes:
        """Commit half messages, or roll them back."""
        check_count("end transactions", request.ends)
        for end in request.ends:  # before any of them ends
            named = self._handles.read_half(end.transaction_handle)
            half = self._transactions.get(named[0]) if named is not None else None
            if half is not None:
                check_sender(self._store, half.position, half.size)
        ended = []
        for end in request.ends:
            named = self._handles.read_half(end.transaction_handle)
            if named is None:
                ended.append(pb.Status(code=pb.INVALID_HANDLE, detail="this is not a transaction handle that this node gave"))
            else:
                ended.append(END_STATUS[self._transactions.end(named[0], commit=end.commit)])
        await self._store.durable()
        return statuses(ended)

    async def poll(self, request: pb.PollTransactionsRequest) -> pb.TransactionsResponse:
        """Return half messages about whose outcome the node asks their producer."""
        if not request.producer:
            raise RequestInvalid("give the producer whose transactions you poll for")
        count = bounded("transactions_max", request.transactions_max, TRANSACTIONS_DEFAULT)
        wait_ms = min(bounded("wait_ms", request.wait_ms, 0), self._wait_ms_max)
        halves = await self._transactions.poll(request.producer, min(count, TRANSACTIONS_MAX), wait_ms, self._may_end)
        return self._response(halves)

    async def pending(self, request: pb.ListTransactionsRequest) -> pb.TransactionsResponse:
        """Return half messages that are pending."""
        count = min(bounded("transactions_max", request.transactions_max, TRANSACTIONS_MAX), TRANSACTIONS_MAX)
        after = position_of(request.after_message_id) if request.after_message_id else -1
        wanted = (half for half in self._transactions if half.position > after and request.producer in ("", half.producer))
        return self._response(list(islice(wanted, count)))

    def _may_end(self, half: HalfMessage) -> bool:
        """Return whether the caller may see a half message, and decide about it."""
        return may_send_now(self._store, half.position, half.size)

    def _response(self, halves: list[HalfMessage]) -> pb.TransactionsResponse:
        return pb.TransactionsResponse(transactions=[self._transaction(half) for half in halves])

    def _transaction(self, half: HalfMessage) -> pb.Transaction:
        """Return a pending transaction; without its message if that can't be read any more."""
        transaction = pb.Transaction(
            message_id=message_id(half.position), producer=half.producer, checks=half.checks, next_check_ms=half.due_ms
        )
        data = self._read(half.position, half.size)
        if data is not None:
            record = decode(data, position=half.position)
            properties = decode_properties(record.properties)
            transaction.stored_ms = record.store_ms
            transaction.transaction_handle = self._handles.half(half.position, record.store_ms)
            transaction.message.CopyFrom(
                pb.Message(
                    topic=record.topic.decode(),
                    body=record.body,
                    properties=dict(properties.user),
                    message_group=properties.message_group,
                    tag=properties.tag,
                    producer=half.producer,
                )
            )
        return transaction
