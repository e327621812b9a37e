"""Acks, nacks and new deadlines with the asyncio client, against a real node."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from penstock import Client, OutgoingMessage
from penstock.pop.client.message import ack_together
from penstock.pop.errors import (
    AlreadyAcked,
    BatchFailed,
    HandleExpired,
    HandleReplaced,
    InvalidHandle,
    InvalidInvisibleTime,
)
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.record import Kind
from tests.pop.client.consuming import in_flight
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node

LONG_MS = 50_000


async def test_acks_of_one_turn_go_out_in_one_call(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC)] * 500)
    messages = await client.pop(FILTER, group=GROUP, messages_max=500)
    position = node.store.log.end
    await asyncio.gather(*(message.ack() for message in messages))
    record = node.store.log.record(position)
    assert len(record.body) == 500 * 12  # The record has 500 references.
    assert node.store.log.end == position + record.size


async def test_an_ack_that_is_not_awaited_is_sent_before_the_client_closes(node: Node) -> None:
    async with Client(node.target) as client:
        await client.send(TOPIC)
        async for message in client.consume(FILTER, group=GROUP):
            message.ack()
            break
    assert in_flight(node) == 0
    assert node.core.counters.acked == 1


async def test_each_ack_has_an_outcome_of_its_own(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC)] * 3)
    a, b, c = await client.pop(FILTER, group=GROUP)
    await c.extend(0.001)
    await node.until(lambda: node.core.counters.revived == 1)
    outcomes = await asyncio.gather(a.ack(), a.ack(), b.ack(), c.ack(), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), AlreadyAcked, type(None), HandleExpired]
    with pytest.raises(AlreadyAcked, match="before"):
        await a.ack()


async def test_messages_that_are_acknowledged_together_have_each_an_outcome(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC)] * 4)
    a, b, c, d = await client.pop(FILTER, group=GROUP)
    await b.ack()
    await c.nack()
    position = node.store.log.end
    (outcomes, single) = await asyncio.gather(ack_together([a, b, c]), d.ack())
    assert [type(outcome) for outcome in outcomes] == [type(None), AlreadyAcked, HandleReplaced]
    assert single is None
    assert len(node.store.log.record(position).body) == 2 * 12  # One call carried both.
    assert all(message.is_settled for message in (a, b, c, d))


async def test_acks_wait_for_the_next_pop_while_there_is_a_backlog_and_no_longer(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(6)])
    position = node.store.log.end
    consumer = client.consume(FILTER, group=GROUP, batch=2, prefetch=2, wait=60.0, ack_hold=60.0)
    async with consumer:
        for _ in range(3):
            messages = await consumer.take(2)
            assert messages is not None
            await ack_together(messages)  # The next pop carries them, and the last one need not wait for a message.
    kinds = [record.kind for record in node.store.log.scan(position)]
    assert kinds.count(Kind.POP_ACK) == 3
    assert in_flight(node) == 0


async def test_many_handles_are_acknowledged_at_once(client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC)] * 10)
    handles = [message.handle for message in await client.pop(FILTER, group=GROUP)]
    await client.ack(handles[:5], group=GROUP)
    with pytest.raises(BatchFailed) as raised:
        await client.ack(handles, group=GROUP)
    assert {type(error) for error in raised.value.errors.values()} == {AlreadyAcked}
    assert list(raised.value.errors) == [0, 1, 2, 3, 4]
    await client.ack([], group=GROUP)


async def test_a_pop_acknowledges_the_batch_before_and_names_refused_handles(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(4)])
    first = await client.pop(FILTER, group=GROUP, messages_max=2)
    handles = [message.handle for message in first]
    second = await client.pop(FILTER, group=GROUP, messages_max=1, acks=handles)
    assert ([message.body for message in second], second.refused) == ([b"2"], {})
    third = await client.pop(FILTER, group=GROUP, acks=[second[0].handle, "x", handles[0]])
    assert [message.body for message in third] == [b"3"]
    assert {handle: type(error) for handle, error in third.refused.items()} == {"x": InvalidHandle, handles[0]: AlreadyAcked}
    assert in_flight(node) == 1


async def test_a_pop_with_acks_waits_for_messages_once_the_acks_are_durable(node: Node, client: Client) -> None:
    await client.send(TOPIC, b"a")
    (message,) = await client.pop(FILTER, group=GROUP)
    waiting = asyncio.create_task(client.pop(FILTER, group=GROUP, wait=LONG_MS / 1000, acks=[message.handle, "x"]))
    await node.until(lambda: node.core.waiting == 1)
    assert in_flight(node) == 0
    await client.send(TOPIC, b"b")
    popped = await waiting
    assert ([message.body for message in popped], list(popped.refused)) == ([b"b"], ["x"])


async def test_a_consumer_acknowledges_with_the_pop_of_its_next_batch(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(100)])
    left = 100
    async for message in client.consume(FILTER, group=GROUP, batch=10, prefetch=10):
        acked = message.ack()
        left -= 1
        if not left:
            break
    await acked
    settled = [record for record in node.store.log.scan(0) if record.kind in (Kind.POP_CHECKPOINT, Kind.POP_ACK)]
    assert [record.kind for record in settled] == [Kind.POP_CHECKPOINT, Kind.POP_ACK] * 10
    # Each ack except the last is directly before the next checkpoint: both are of one turn of the node's loop.
    pairs = zip(settled[1:-1:2], settled[2::2], strict=True)
    assert all(ack.position + ack.size == checkpoint.position for ack, checkpoint in pairs)
    assert in_flight(node) == 0


async def test_acks_of_a_pop_without_an_answer_are_sent_again_and_may_have_succeeded(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(3)])
    done, undone, wrong = await client.pop(FILTER, group=GROUP)
    acks = [done.ack(), undone.ack(), wrong.ack()]
    settlements = done._settlements
    taken = settlements.acks.take()
    assert [handle for handle, _ in taken] == [done.handle, undone.handle, wrong.handle]
    await wrong.nack()
    await client._stub.Ack(pb.AckRequest(group=GROUP, handles=[done.handle]))  # This is what the pop did whose answer was lost.
    settlements.put_back(taken)
    outcomes = await asyncio.gather(*acks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), type(None), HandleReplaced]
    with pytest.raises(BatchFailed):
        await client.ack([done.handle], group=GROUP)  # No answer was lost for this call.


async def test_a_nack_returns_the_message_as_a_failed_attempt(client: Client) -> None:
    await client.send(TOPIC, b"a")
    attempts = []
    async for message in client.consume(FILTER, group=GROUP):
        attempts.append(message.attempt)
        if message.attempt == 3:
            await message.ack()
            break
        await message.nack(delay=0.01 if message.attempt == 2 else 0.0)
        with pytest.raises(HandleReplaced):
            await message.ack()
    assert attempts == [1, 2, 3]


async def test_a_suspended_message_comes_back_without_a_counted_attempt(client: Client) -> None:
    await client.send(TOPIC, b"a")
    seen = 0
    async for message in client.consume(FILTER, group=GROUP):
        assert message.attempt == 1
        seen += 1
        if seen == 4:
            break
        await message.suspend(timedelta(milliseconds=seen))
    assert seen == 4


async def test_an_extended_message_is_acknowledged_after_its_first_deadline(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=body) for body in (b"kept", b"let go")])
    kept, let_go = await client.pop(FILTER, group=GROUP, invisible=60.0)
    old = kept.handle
    await kept.extend(3_600)
    assert kept.handle != old
    node.advance(60_000)
    (again,) = await client.pop(FILTER, group=GROUP, wait=LONG_MS / 1000)
    assert again.body == b"let go"
    await kept.ack()
    with pytest.raises(HandleExpired):
        await let_go.ack()
    with pytest.raises(InvalidInvisibleTime):
        await again.extend(timedelta(days=400))
    with pytest.raises(ValueError, match="invisible is -1 seconds: use 0 or more"):
        await again.extend(-1)
    await again.ack()
    assert in_flight(node) == 0
