"""Transactions: a message that is stored first, and delivered when its producer commits it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from penstock.pop.client import answers, requests
from penstock.pop.client.calls import AsyncCalls
from penstock.pop.client.durations import Duration
from penstock.pop.client.outgoing import OutgoingMessage, SendReceipt
from penstock.pop.client.results import PendingTransaction
from penstock.pop.client.retrydelays import RetryDelays
from penstock.pop.errors import AlreadyCommitted, AlreadyRolledBack, NodeUnavailable, Overloaded, StatusError

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import PopServiceAsyncStub

logger = logging.getLogger("penstock.client")

TransactionChecker = Callable[[PendingTransaction], Awaitable[bool | None]]
"""Tells the outcome of a transaction: True to commit, False to roll back, None if the outcome is not known yet."""


class Transaction:
    """A transaction from `Client.transactions.begin`. Its message is stored, and delivered when it is committed.

    As a context manager it commits at the end of the block, or rolls back if an exception leaves the block. If the node doesn't
    answer that, the outcome is left to the node's question, so `TransactionCalls.answer_checks` must run somewhere.
    """

    def __init__(self, receipt: SendReceipt, calls: TransactionCalls) -> None:
        self._calls = calls
        self._ended = False
        self.message_id = receipt.message_id
        """Position of the message in the log, as 16 hexadecimal digits."""
        self.handle = receipt.transaction_handle
        """Names the transaction to the node, for `TransactionCalls.end`."""

    async def commit(self) -> None:
        """Deliver the message; return when that is durable. Committing a committed transaction does nothing.

        Raises:
            AlreadyRolledBack, UnknownTransaction, InvalidHandle: The node refused to commit.
            NodeUnavailable: The node did not answer. Commit again, or let the node ask for the outcome.
        """
        self._ended = True
        with contextlib.suppress(AlreadyCommitted):
            await self._calls.end(self.handle, commit=True)

    async def rollback(self) -> None:
        """Discard the message; return when that is durable. Rolling back a rolled-back transaction does nothing.

        Raises:
            AlreadyCommitted, UnknownTransaction, InvalidHandle, NodeUnavailable: As for `commit`.
        """
        self._ended = True
        with contextlib.suppress(AlreadyRolledBack):
            await self._calls.end(self.handle, commit=False)

    async def __aenter__(self) -> Transaction:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ended:
            return
        try:
            await (self.commit() if error is None else self.rollback())
        except NodeUnavailable as unanswered:
            warn_of_open_outcome(self.message_id, unanswered)


def warn_of_open_outcome(message_id: str, unanswered: NodeUnavailable) -> None:
    """Log that the node must ask for the outcome of a transaction, because it did not answer at the end of its block."""
    logger.warning("transaction %s: %s; the node will ask for the outcome (answer_checks)", message_id, unanswered)


class TransactionCalls:
    """Begins, ends and lists transactions, and answers the node's questions for their outcome: `Client.transactions`."""

    def __init__(
        self, call: AsyncCalls, stub: PopServiceAsyncStub, send: Callable[[OutgoingMessage], Awaitable[SendReceipt]]
    ) -> None:
        self._call = call
        self._stub = stub
        self._send = send

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
        """Store a message that is delivered when the transaction is committed.

            async with await client.transactions.begin("orders/7", body, producer="orders"):
                ...  # the transaction of the database

        Args:
            topic: As in `OutgoingMessage`.
            body: As in `OutgoingMessage`.
            producer: Name of the service that the node asks for the outcome if it hears none (see `answer_checks`).
            properties: As in `OutgoingMessage`.
            tag: As in `OutgoingMessage`.
            message_group: As in `OutgoingMessage`.

        Raises:
            TooManyTransactions: 100,000 transactions are pending, or a quota is reached.
            StatusError, NodeUnavailable: As for `Client.send`.
        """
        message = OutgoingMessage(
            topic=topic,
            body=body,
            properties=properties or {},
            tag=tag,
            message_group=message_group,
            producer=producer,
        )
        return Transaction(await self._send(message), self)

    async def end(self, handle: str, *, commit: bool) -> None:
        """Commit a transaction or roll it back, by the handle of its message.

        Raises:
            AlreadyCommitted, AlreadyRolledBack, UnknownTransaction, InvalidHandle: The node refused.
            NodeUnavailable: The node did not answer.
        """
        answer = await self._call(self._stub.EndTransactions, requests.end_transaction(handle, commit))
        answers.only(answers.errors(answer.statuses))

    async def pending(self, producer: str = "", *, after: str = "", limit: int = 1_000) -> list[PendingTransaction]:
        """Return pending transactions, oldest first.

        Args:
            producer: Name of their service; empty for all services.
            after: Message id of the last transaction of the page before.
            limit: Maximum number of transactions, 1 to 1,000.
        """
        answer = await self._call(self._stub.ListTransactions, requests.list_transactions(producer, after, limit))
        return answers.transactions(answer)

    async def poll(self, producer: str, *, wait: Duration = 0.0) -> list[PendingTransaction]:
        """Return the transactions of a producer whose outcome the node wants to know.

        Args:
            producer: Name of the service.
            wait: How long to wait for the first of them, in seconds or as a timedelta.
        """
        request = requests.poll_transactions(producer, wait)
        answer = await self._call(self._stub.PollTransactions, request, request.wait_ms)
        return answers.transactions(answer)

    async def answer_checks(self, producer: str, decide: TransactionChecker, *, wait: Duration = 20.0) -> None:
        """Answer the node's questions for the outcome of a producer's transactions, until the task is cancelled.

        Args:
            producer: Name of the service.
            decide: Looks the outcome up, usually in the service's database.
            wait: How long one poll waits for a question, in seconds or as a timedelta.
        """
        delays = RetryDelays()
        while True:
            try:
                found = await self.poll(producer, wait=wait)
            except (NodeUnavailable, Overloaded):
                await asyncio.sleep(delays.next_s())
                continue
            delays.reset()
            for transaction in found:
                outcome = await decide(transaction)
                if outcome is not None:
                    # If the transaction ended meanwhile, there is nothing to do. If the node is away, it asks again.
                    with contextlib.suppress(StatusError, NodeUnavailable):
                        await self.end(transaction.transaction_handle, commit=outcome)
