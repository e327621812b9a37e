"""Transactions, for threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from penstock.pop.client import answers, requests
from penstock.pop.client.calls import SyncCalls
from penstock.pop.client.durations import Duration
from penstock.pop.client.outgoing import OutgoingMessage, SendReceipt
from penstock.pop.client.results import PendingTransaction
from penstock.pop.client.transactions import warn_of_open_outcome
from penstock.pop.errors import AlreadyCommitted, AlreadyRolledBack, NodeUnavailable

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import PopServiceStub


class SyncTransaction:
    """A transaction from `SyncClient.transactions.begin`. It is used like `Transaction`, also as a context manager."""

    def __init__(self, receipt: SendReceipt, calls: SyncTransactionCalls) -> None:
        self._calls = calls
        self._ended = False
        self.message_id = receipt.message_id
        """Position of the message in the log, as 16 hexadecimal digits."""
        self.handle = receipt.transaction_handle
        """Names the transaction to the node, for `SyncTransactionCalls.end`."""

    def commit(self) -> None:
        """Deliver the message, as `Transaction.commit`."""
        self._ended = True
        with contextlib.suppress(AlreadyCommitted):
            self._calls.end(self.handle, commit=True)

    def rollback(self) -> None:
        """Discard the message, as `Transaction.rollback`."""
        self._ended = True
        with contextlib.suppress(AlreadyRolledBack):
            self._calls.end(self.handle, commit=False)

    def __enter__(self) -> SyncTransaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._ended:
            return
        try:
            if error is None:
                self.commit()
            else:
                self.rollback()
        except NodeUnavailable as unanswered:
            warn_of_open_outcome(self.message_id, unanswered)


class SyncTransactionCalls:
    """The methods of `TransactionCalls` except `answer_checks`, for threads. Parameters, results and errors are the same."""

    def __init__(self, call: SyncCalls, stub: PopServiceStub, send: Callable[[OutgoingMessage], SendReceipt]) -> None:
        self._call = call
        self._stub = stub
        self._send = send

    def begin(
        self,
        topic: str,
        body: bytes = b"",
        *,
        producer: str,
        properties: Mapping[str, str] | None = None,
        tag: str = "",
        message_group: str = "",
    ) -> SyncTransaction:
        """Store a message that is delivered when the transaction is committed, as `TransactionCalls.begin`."""
        message = OutgoingMessage(
            topic=topic,
            body=body,
            properties=properties or {},
            tag=tag,
            message_group=message_group,
            producer=producer,
        )
        return SyncTransaction(self._send(message), self)

    def end(self, handle: str, *, commit: bool) -> None:
        """Commit or roll back, as `TransactionCalls.end`."""
        answer = self._call(self._stub.EndTransactions, requests.end_transaction(handle, commit))
        answers.only(answers.errors(answer.statuses))

    def pending(self, producer: str = "", *, after: str = "", limit: int = 1_000) -> list[PendingTransaction]:
        """Return pending transactions, as `TransactionCalls.pending`."""
        answer = self._call(self._stub.ListTransactions, requests.list_transactions(producer, after, limit))
        return answers.transactions(answer)

    def poll(self, producer: str, *, wait: Duration = 0.0) -> list[PendingTransaction]:
        """Return the transactions whose outcome the node wants to know, as `TransactionCalls.poll`."""
        request = requests.poll_transactions(producer, wait)
        return answers.transactions(self._call(self._stub.PollTransactions, request, request.wait_ms))
