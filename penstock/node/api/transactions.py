"""Pending transactions over the admin API: stored messages that nobody gets before their producer commits them."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Final

import msgspec

from penstock.node.api.changes import DurableChanges, refusals
from penstock.node.api.messagereader import MessageReader
from penstock.node.api.operation import ApiCall, ApiError, ApiRole, Done, Operation, PageQuery, not_found
from penstock.pop.core.sender import message_id
from penstock.pop.core.transactions import EndOutcome, HalfMessage, Transactions
from penstock.pop.grpc.requests import position_of
from penstock.store.store import Store

TRANSACTIONS_AT_ONCE: Final = 32
"""Transactions of a page that are described in one slice. The record of each is read."""


class TransactionPageQuery(PageQuery, forbid_unknown_fields=True, kw_only=True):
    """The parameters of a listing of transactions."""

    producer: Annotated[str, msgspec.Meta(description="Which has begun them; empty for any.")] = ""


class TransactionShown(msgspec.Struct, kw_only=True):
    """A pending transaction. Its message is at `/messages/{message_id}`."""

    message_id: str
    topic: Annotated[str, msgspec.Meta(description="Empty if the message can't be read any more.")]
    producer: str
    stored_ms: Annotated[int, msgspec.Meta(description="When the message was stored; 0 if it can't be read any more.")]
    size_bytes: int
    checks: Annotated[int, msgspec.Meta(description="How often the producer was asked for the outcome.")]
    next_check_ms: int
    user: str
    address: str


class TransactionPage(msgspec.Struct):
    """A page of transactions, oldest first."""

    items: list[TransactionShown]
    next: str | None


class TransactionOperations:
    """Serves the transactions.

    Parameters:
        transactions: of the node.
        reader: reads the topics of their messages.
        store: has the messages.
        changes: waits until changes are durable.
    """

    def __init__(self, transactions: Transactions, reader: MessageReader, store: Store, changes: DurableChanges) -> None:
        self._transactions = transactions
        self._reader = reader
        self._store = store
        self._changes = changes

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        one = "/transactions/{message_id}"
        yield Operation(
            "listTransactions",
            "GET",
            "/transactions",
            ApiRole.VIEWER,
            "List pending transactions.",
            self.page,
            TransactionPage,
            TransactionPageQuery,
        )
        yield Operation(
            "commitTransaction",
            "POST",
            f"{one}/commit",
            ApiRole.ADMIN,
            "Deliver the message of a transaction, in place of its producer.",
            self.commit,
            Done,
        )
        yield Operation(
            "rollBackTransaction",
            "POST",
            f"{one}/rollback",
            ApiRole.ADMIN,
            "Discard the message of a transaction, in place of its producer.",
            self.roll_back,
            Done,
        )

    async def page(self, call: ApiCall) -> TransactionPage:
        """Return a page of transactions."""
        asked: TransactionPageQuery = call.query
        with refusals():
            after = position_of(asked.after) if asked.after else -1
        pending = list(self._transactions)  # in the order of their positions
        items: list[TransactionShown] = []
        for number, half in enumerate(pending[bisect_right(pending, after, key=lambda half: half.position) :]):
            if asked.producer in ("", half.producer):
                if len(items) == asked.limit:
                    return TransactionPage(items, items[-1].message_id)
                items.append(self._shown(half))
            if number % TRANSACTIONS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return TransactionPage(items, None)

    async def commit(self, call: ApiCall) -> Done:
        """Commit a transaction."""
        return await self._end(call, commit=True)

    async def roll_back(self, call: ApiCall) -> Done:
        """Roll a transaction back."""
        return await self._end(call, commit=False)

    async def _end(self, call: ApiCall, *, commit: bool) -> Done:
        async with self._changes.durable():
            outcome = self._transactions.end(position_of(call.path["message_id"]), commit=commit)
        if outcome is EndOutcome.UNKNOWN_TRANSACTION:
            raise not_found("pending transaction", call.path["message_id"])
        if outcome is not EndOutcome.OK:
            raise ApiError(HTTPStatus.CONFLICT, outcome.value)
        return Done()

    def _shown(self, half: HalfMessage) -> TransactionShown:
        causer = self._store.ledger.causer_of(half.account)
        topic, store_ms = self._reader.head_at(half.position, half.size)
        return TransactionShown(
            message_id=message_id(half.position),
            topic=topic,
            producer=half.producer,
            stored_ms=store_ms,
            size_bytes=half.size,
            checks=half.checks,
            next_check_ms=half.due_ms,
            user=causer.user,
            address=causer.source,
        )
