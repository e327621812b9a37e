"""Transactions of clients, against a real node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from penstock import Client, PendingTransaction
from penstock.pop.errors import (
    AlreadyCommitted,
    AlreadyRolledBack,
    InvalidHandle,
    NodeUnavailable,
)
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2_grpc import PopServiceStub
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node

OPTIONS = PopOptions(transaction_check_ms=100, transaction_checks_max=1_000)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    started = Node(tmp_path / "data", pop=OPTIONS)
    await started.start()
    yield started
    await started.stop()


async def test_a_message_of_a_transaction_is_delivered_after_the_commit(client: Client) -> None:
    async with await client.transactions.begin(TOPIC, b"committed", producer="orders"):
        assert await client.pop(FILTER, group=GROUP) == []
    with pytest.raises(RuntimeError, match="the database failed"):
        async with await client.transactions.begin(TOPIC, b"rolled back", producer="orders"):
            raise RuntimeError("the database failed")
    assert [message.body for message in await client.pop(FILTER, group=GROUP)] == [b"committed"]
    assert await client.transactions.pending() == []


async def test_a_transaction_ends_once(client: Client) -> None:
    transaction = await client.transactions.begin(TOPIC, b"a", producer="orders")
    (pending,) = await client.transactions.pending("orders")
    assert (pending.message_id, pending.message.body) == (transaction.message_id, b"a")
    assert await client.transactions.pending("others") == []
    await transaction.commit()
    await transaction.commit()
    with pytest.raises(AlreadyCommitted):
        await transaction.rollback()
    other = await client.transactions.begin(TOPIC, b"b", producer="orders")
    await other.rollback()
    await other.rollback()
    with pytest.raises(AlreadyRolledBack):
        await other.commit()
    for forged in ("", "zz", transaction.handle[:-1] + "0g", transaction.handle + "00"):
        with pytest.raises(InvalidHandle):
            await client.transactions.end(forged, commit=True)


async def test_a_producer_is_asked_for_a_missing_outcome(node: Node, client: Client) -> None:
    kept = await client.transactions.begin(TOPIC, b"kept", producer="orders")
    await client.transactions.begin(TOPIC, b"dropped", producer="orders")
    asked = []

    async def decide(transaction: PendingTransaction) -> bool | None:
        asked.append(transaction.message.body)
        if len(asked) == 1:
            return None  # The outcome is open.
        return transaction.message_id == kept.message_id

    answering = asyncio.ensure_future(client.transactions.answer_checks("orders", decide))
    messages = await client.pop(FILTER, group=GROUP, wait=60.0)
    await node.until(lambda: len(node.transactions) == 0)
    answering.cancel()
    assert [message.body for message in messages] == [b"kept"]
    assert len(asked) == 3


async def test_a_block_that_gets_no_answer_leaves_its_outcome_to_the_node(node: Node, client: Client) -> None:
    async def lost(*_: object, **__: object) -> None:
        raise NodeUnavailable("the answer was lost")

    async with client.transaction(TOPIC, b"kept", producer="orders") as transaction:
        transaction.commit = lost  # type: ignore[method-assign]

    async def fail() -> None:
        async with client.transaction(TOPIC, b"dropped", producer="orders") as dropped:
            dropped.rollback = lost  # type: ignore[method-assign]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert len(await client.transactions.pending("orders")) == 2

    async def decide(pending: PendingTransaction) -> bool:
        return pending.message_id == transaction.message_id

    answering = asyncio.ensure_future(client.transactions.answer_checks("orders", decide))
    messages = await client.pop(FILTER, group=GROUP, wait=60.0)
    await node.until(lambda: len(node.transactions) == 0)
    answering.cancel()
    assert [message.body for message in messages] == [b"kept"]


async def test_half_a_transaction_with_a_delay_is_refused(node: Node) -> None:
    async with grpc.aio.insecure_channel(node.target) as channel:
        message = pb.Message(topic=TOPIC, producer="orders", deliver_at_ms=node.store.now_ms() + 60_000)
        answer = await PopServiceStub(channel).Send(pb.SendRequest(messages=[message]))
    assert answer.results[0].status.code == pb.INVALID_TRANSACTION
