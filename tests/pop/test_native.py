"""The native API beyond pops: groups, dead letters, transactions, streams and the synchronous client, against a real node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock import Client, SyncClient, group_settings
from penstock.pop.backoff import Exponential
from penstock.pop.errors import (
    AlreadyAcked,
    AlreadyCommitted,
    AlreadyRolledBack,
    GroupBusy,
    GroupExists,
    GroupUnknown,
    InvalidHandle,
    NodeUnavailable,
    RequestInvalid,
)
from penstock.pop.grpc.consumestream import POPPED_PER_TURN, ConsumeStream
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2_grpc import PopServiceStub
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node, Parts

OPTIONS = PopOptions(transaction_check_ms=100, transaction_checks_max=1_000)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    started = Node(tmp_path / "data", pop=OPTIONS)
    await started.start()
    yield started
    await started.stop()


@pytest.fixture
async def client(node: Node) -> AsyncIterator[Client]:
    async with Client(node.target) as made:
        yield made


# --- groups ---------------------------------------------------------------------------------------------------------


async def test_a_group_begins_at_a_time_however_it_is_created(node: Node, client: Client) -> None:
    await client.send(TOPIC, b"before")
    since_ms = node.store.now_ms() + 1
    await node.until(lambda: node.store.now_ms() > since_ms)
    await client.send(TOPIC, b"after")
    await client.groups.create("created", FILTER, start=since_ms)
    for group in ("created", "popped"):
        (message,) = await client.pop(FILTER, group=group, wait_ms=5_000, start=since_ms)
        assert message.body == b"after"
    async with client.stream(FILTER, group="streamed", start=since_ms) as messages:
        assert (await anext(aiter(messages))).body == b"after"
    with pytest.raises(RequestInvalid, match="start_at_ms"):
        await client.pop(FILTER, group="never", start=-1)


async def test_a_group_is_created_described_changed_reset_paused_and_deleted(client: Client) -> None:
    settings = group_settings(attempts_max=3, backoff=Exponential(100, 1_000), fifo=True, tags="a || b", in_flight_max=9)
    made = await client.groups.create(GROUP, FILTER, settings=settings)
    assert (made.settings.attempts_max, made.settings.fifo, made.settings.expression) == (3, True, "a || b")
    assert made.settings.backoff.exponential.max_ms == 1_000
    assert (await client.groups.create(GROUP, FILTER, settings=settings)) == made
    with pytest.raises(GroupExists):
        await client.groups.create(GROUP, FILTER)
    (changed,) = await client.groups.update(GROUP, group_settings(backoff=(), attempts_max=0, sql="n > 1"))
    assert changed.settings.attempts_max == OPTIONS.attempts_max
    assert not changed.settings.backoff.HasField("exponential")
    assert (changed.settings.expression, changed.settings.expression_type) == ("n > 1", pb.SQL)
    await client.send(TOPIC, b"a", properties={"n": "2"})
    (message,) = await client.pop(FILTER, group=GROUP)
    with pytest.raises(GroupBusy):
        await client.groups.update(GROUP, group_settings(fifo=False))
    (reset,) = await client.groups.reset(GROUP, end="earliest")
    assert (reset.in_flight, reset.visible) == (0, 1)
    await client.groups.update(GROUP, group_settings(paused=True))
    assert await client.pop(FILTER, group=GROUP) == []
    await client.groups.update(GROUP, group_settings(paused=False))
    (again,) = await client.pop(FILTER, group=GROUP)
    assert (again.body, again.attempt, again.message_id) == (b"a", 1, message.message_id)
    await client.groups.reset(GROUP, message_id=message.message_id)
    assert len(await client.pop(FILTER, group=GROUP)) == 1
    await client.groups.reset(GROUP, time_ms=2**60)
    assert await client.pop(FILTER, group=GROUP) == []
    await client.groups.delete(GROUP)
    assert await client.groups.describe() == []
    with pytest.raises(GroupUnknown):
        await client.groups.describe(GROUP)


@pytest.mark.parametrize(
    "settings",
    [
        group_settings(attempts_max=-1),
        group_settings(invisible_ms=2**40),
        group_settings(sql="a ="),
        group_settings(tags="||"),
        group_settings(backoff=(-5,)),
        group_settings(backoff=Exponential(5, 1)),
    ],
)
async def test_bad_settings_are_refused_with_the_reason(client: Client, settings: pb.GroupSettings) -> None:
    with pytest.raises(RequestInvalid):
        await client.groups.create(GROUP, FILTER, settings=settings)
    assert await client.groups.describe() == []


async def test_a_poll_of_a_group_that_is_deleted_ends_with_a_reason(node: Node, client: Client) -> None:
    poll = asyncio.ensure_future(client.pop(FILTER, group=GROUP, wait_ms=30_000))
    await node.until(lambda: node.core.waiting == 1)
    await client.groups.delete(GROUP)
    with pytest.raises(GroupUnknown, match="deleted"):
        await asyncio.wait_for(poll, 5)


async def test_dead_letters_are_listed_popped_with_their_origin_and_sent_back(client: Client) -> None:
    await client.groups.create(GROUP, FILTER, settings=group_settings(attempts_max=1))
    sent = [await client.send(TOPIC, b"%d" % n) for n in range(3)]
    nacked, given_up, acked = await client.pop(FILTER, group=GROUP)
    await nacked.nack()
    await given_up.dead_letter()
    await acked.ack()
    (first,) = await client.pop(f"$dlq/{GROUP}", group="operators", messages_max=1, wait_ms=5_000)
    letters = await client.dead_letters.of_group(GROUP)
    assert [(x.message_id, x.topic, x.group, x.filter, x.attempts) for x in letters] == [
        (sent[n].message_id, TOPIC, GROUP, FILTER, 1) for n in (0, 1)
    ]
    assert {x.reason for x in letters} == {pb.ATTEMPTS_EXHAUSTED, pb.FORWARDED}
    assert first.origin is not None
    assert (first.origin.group, first.origin.attempts) == (GROUP, 1)
    assert first.origin.message_id == first.message_id
    assert await client.dead_letters.of_group(GROUP, after=sent[0].message_id) == letters[1:]
    assert await client.dead_letters.redrive(GROUP, [sent[1].message_id]) == 1
    assert await client.dead_letters.redrive(GROUP) == 1
    assert await client.dead_letters.redrive(GROUP) == 0
    back = await client.pop(FILTER, group=GROUP)
    assert sorted((message.body, message.attempt) for message in back) == [(b"0", 1), (b"1", 1)]
    with pytest.raises(RequestInvalid, match="id"):
        await client.dead_letters.redrive(GROUP, ["nonsense"])


# --- attempt ids ----------------------------------------------------------------------------------------------------


async def test_a_pop_whose_answer_was_lost_is_repeated_with_its_attempt_id(client: Client) -> None:
    for number in range(4):
        await client.send(TOPIC, b"%d" % number)
    lost = await client.pop(FILTER, group=GROUP, messages_max=2, attempt_id="one")
    again = await client.pop(FILTER, group=GROUP, messages_max=2, attempt_id="one")
    assert [message.handle for message in again] == [message.handle for message in lost]
    assert [message.attempt for message in again] == [1, 1]
    await client.ack([message.handle for message in again], group=GROUP)
    with pytest.raises(RequestInvalid, match="attempt_id"):
        await client.pop(FILTER, group=GROUP, attempt_id="x" * 256)


# --- transactions ---------------------------------------------------------------------------------------------------


async def test_a_transaction_is_seen_when_it_is_committed(client: Client) -> None:
    async with await client.transactions.begin(TOPIC, b"committed", producer="orders"):
        assert await client.pop(FILTER, group=GROUP) == []
    with pytest.raises(RuntimeError, match="the database failed"):
        async with await client.transactions.begin(TOPIC, b"rolled back", producer="orders"):
            raise RuntimeError("the database failed")
    assert [message.body for message in await client.pop(FILTER, group=GROUP)] == [b"committed"]
    assert await client.transactions.pending() == []


async def test_a_transaction_ends_one_way_only(client: Client) -> None:
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


async def test_a_producer_is_asked_for_the_outcome_it_never_told(node: Node, client: Client) -> None:
    kept = await client.transactions.begin(TOPIC, b"kept", producer="orders")
    await client.transactions.begin(TOPIC, b"dropped", producer="orders")
    asked = []

    async def decide(transaction: pb.Transaction) -> bool | None:
        asked.append(transaction.message.body)
        if len(asked) == 1:
            return None  # not known yet
        return transaction.message_id == kept.message_id

    answering = asyncio.ensure_future(client.transactions.answer_checks("orders", decide))
    messages = await client.pop(FILTER, group=GROUP, wait_ms=10_000)
    await node.until(lambda: len(node.transactions) == 0)
    answering.cancel()
    assert [message.body for message in messages] == [b"kept"]
    assert len(asked) == 3


async def test_half_a_transaction_with_a_delay_is_refused(node: Node) -> None:
    async with grpc.aio.insecure_channel(node.target) as channel:
        message = pb.Message(topic=TOPIC, producer="orders", deliver_at_ms=node.store.now_ms() + 60_000)
        answer = await PopServiceStub(channel).Send(pb.SendRequest(messages=[message]))
    assert answer.results[0].status.code == pb.INVALID_TRANSACTION


# --- streams --------------------------------------------------------------------------------------------------------


async def test_a_stream_gets_messages_as_they_come_within_its_credits(node: Node, client: Client) -> None:
    async with client.stream(FILTER, group=GROUP, credits=3, batch=2) as messages:
        stream = aiter(messages)
        for number in range(10):
            await client.send(TOPIC, b"%d" % number)
        seen = [await anext(stream) for _ in range(3)]
        assert node.group().in_flight == 3
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await node.until(lambda: node.group().in_flight > 3)
        while len(seen) < 10:
            seen[len(seen) - 3].ack()
            seen.append(await anext(stream))
        for message in seen[7:]:
            message.ack()
    await node.until(lambda: node.group().in_flight == 0)
    assert [message.body for message in seen] == [b"%d" % number for number in range(10)]
    assert node.core.counters.acked == 10


@pytest.mark.parametrize("give_back", [True, False])
async def test_a_broken_stream_gives_back_at_once_or_when_the_time_is_over(node: Node, client: Client, give_back: bool) -> None:
    await client.send(TOPIC, b"a")
    other = Client(node.target)
    async with other.stream(FILTER, group=GROUP, invisible_ms=2_000, give_back=give_back) as messages:
        await anext(aiter(messages))
        await other._channel.close(None)  # as if the process were gone
    (again,) = await client.pop(FILTER, group=GROUP, wait_ms=10_000)
    assert again.attempt == (1 if give_back else 2)
    await other.aclose()


async def test_a_stream_nacks_suspends_and_frees_their_credits(client: Client) -> None:
    await client.send(TOPIC, b"a")
    async with client.stream(FILTER, group=GROUP, credits=1) as messages:
        attempts = []
        async for message in messages:
            attempts.append(message.attempt)
            if len(attempts) == 1:
                message.nack()
            elif len(attempts) == 2:
                message.suspend()
            else:
                message.ack()
                break
    assert attempts == [1, 2, 2]


async def test_a_delivery_that_expires_frees_its_credit(client: Client) -> None:
    await client.send(TOPIC, b"a")
    async with client.stream(FILTER, group=GROUP, credits=1, invisible_ms=100) as messages:
        stream = aiter(messages)
        assert [(await anext(stream)).attempt for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("credits", [1, 10])
async def test_a_stream_of_a_group_that_is_deleted_ends_with_a_reason(client: Client, credits: int) -> None:
    await client.send(TOPIC, b"a")
    async with client.stream(FILTER, group=GROUP, credits=credits) as messages:
        stream = aiter(messages)
        await anext(stream)
        await client.groups.delete(GROUP)
        with pytest.raises(GroupUnknown, match="deleted"):
            await asyncio.wait_for(anext(stream), 5)


async def test_a_stream_that_opens_wrongly_is_refused(node: Node, client: Client) -> None:
    async with grpc.aio.insecure_channel(node.target) as channel:
        stub = PopServiceStub(channel)
        opening = pb.ConsumeOpen(group=GROUP, filter=FILTER)
        for requests in (
            [pb.ConsumeRequest()],
            [pb.ConsumeRequest(acks=["x"])],
            [pb.ConsumeRequest(open=opening)] * 2,
            [pb.ConsumeRequest(open=pb.ConsumeOpen(group="a/b", filter=FILTER))],
            [pb.ConsumeRequest(open=pb.ConsumeOpen(group=GROUP, filter="#/a"))],
            [pb.ConsumeRequest(open=pb.ConsumeOpen(group=GROUP, filter=FILTER, credits=-1))],
            [pb.ConsumeRequest(open=pb.ConsumeOpen(group=GROUP, filter=FILTER, credits=2**30))],
            [pb.ConsumeRequest(open=opening), pb.ConsumeRequest(credits=-1)],
        ):
            stream = stub.Consume(iter(requests))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stream:
                    pass
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, requests
    assert node.core.waiting == 0
    with pytest.raises(RequestInvalid):
        async with client.stream("#/a", group=GROUP) as messages:
            await anext(aiter(messages))


async def test_a_stream_refuses_bad_handles_and_goes_on(node: Node) -> None:
    node.publish(b"a")
    async with grpc.aio.insecure_channel(node.target) as channel:
        stream = PopServiceStub(channel).Consume()  # type: ignore[call-arg]
        await stream.write(pb.ConsumeRequest(open=pb.ConsumeOpen(group=GROUP, filter=FILTER)))
        first: Any = await stream.read()
        handle = first.messages[0].handle
        await stream.write(pb.ConsumeRequest(acks=["nonsense", handle, handle]))
        answer: Any = await stream.read()
        assert answer.acked == 1
        assert [(x.handle, x.status.code) for x in answer.refused] == [
            ("nonsense", pb.INVALID_HANDLE),
            (handle, pb.ALREADY_ACKED),
        ]
        await stream.write(pb.ConsumeRequest(changes=[pb.InvisibleChange(handle=handle, invisible_ms=-1)], acks=[handle[:-2]]))
        answer = await stream.read()
        assert [x.status.code for x in answer.changed] == [pb.ALREADY_ACKED]
        stream.cancel()
    await node.until(lambda: node.core.waiting == 0)


async def test_a_node_that_stops_ends_its_streams(tmp_path: Path) -> None:
    node = Node(tmp_path / "other")
    await node.start()
    async with Client(node.target) as client, client.stream(FILTER, group=GROUP) as messages:
        ending = asyncio.ensure_future(anext(aiter(messages)))
        await node.until(lambda: node.core.waiting == 1)
        await node.stop()
        with pytest.raises(NodeUnavailable):
            await asyncio.wait_for(ending, 5)


async def test_a_stream_with_many_credits_takes_what_they_allow_some_turns_long(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "data")
    parts.publish(*([b"x"] * (POPPED_PER_TURN * 3)))
    group = parts.group()
    parts.store.start(asyncio.get_running_loop(), lambda error: pytest.fail(str(error)))
    credits = POPPED_PER_TURN * 2 + 10
    stream = ConsumeStream(parts.core, group, credits=credits, batch_max=100, invisible_ms=60_000)
    stream.pop_more()
    seen = [group.in_flight]
    assert POPPED_PER_TURN <= seen[0] < POPPED_PER_TURN + 100
    async with asyncio.timeout(10):
        while group.in_flight < credits:
            stream.pop_more()  # whatever calls it meanwhile: the rest has its turn, and no other
            assert group.in_flight == seen[-1]
            await asyncio.sleep(0)
            seen.append(group.in_flight)
    assert max(after - before for before, after in pairwise(seen)) < POPPED_PER_TURN + 100
    stream.end(give_back=True)
    assert group.in_flight == 0
    await parts.store.close()


# --- the synchronous client -----------------------------------------------------------------------------------------


def use_synchronously(target: str) -> list[bytes]:
    """What a thread does with a node."""
    with SyncClient(target) as client:
        client.groups.create(GROUP, FILTER, settings=group_settings(attempts_max=2))
        client.send(TOPIC, b"1")
        delayed = client.send(TOPIC, b"never", delay_ms=60_000)
        client.recall(delayed.recall_handle)
        with client.transactions.begin(TOPIC, b"2", producer="orders"):
            assert len(client.transactions.pending("orders")) == 1
        try:
            with client.transactions.begin(TOPIC, b"never", producer="orders"):
                raise KeyError
        except KeyError:
            pass
        seen = []
        for message in client.consume(FILTER, group=GROUP, batch=2):
            seen.append(message.body)
            if message.attempt == 1:
                message.extend(60_000)
                message.nack()
            elif message.body == b"1":
                message.ack()
            else:
                message.dead_letter()
            if len(seen) == 4:
                break
        assert [letter.topic for letter in client.dead_letters.of_group(GROUP)] == [TOPIC]
        assert client.dead_letters.redrive(GROUP) == 1
        (message,) = client.pop(FILTER, group=GROUP, wait_ms=5_000, attempt_id="x")
        assert message.attempt == 1
        message.suspend()
        (message,) = client.pop(FILTER, group=GROUP, wait_ms=5_000)
        client.ack([message.handle], group=GROUP)
        with pytest.raises(AlreadyAcked):
            message.ack()
        client.send(TOPIC, b"3")
        (message,) = client.pop(FILTER, group=GROUP)
        popped = client.pop(FILTER, group=GROUP, wait_ms=20, acks=[message.handle, "x"])
        assert (list(popped), list(popped.refused)) == ([], ["x"])
        assert client.groups.describe(GROUP)[0].in_flight == 0
        client.groups.delete(GROUP)
        return seen


async def test_a_thread_uses_the_synchronous_client(node: Node) -> None:
    seen = await asyncio.to_thread(use_synchronously, node.target)
    assert sorted(seen) == [b"1", b"1", b"2", b"2"]


# --- health and reflection ------------------------------------------------------------------------------------------


async def test_the_listener_tells_its_health_and_its_services(node: Node) -> None:
    async with grpc.aio.insecure_channel(node.target) as channel:
        checks = health_pb2_grpc.HealthStub(channel)
        for name in ("", "penstock.pop.v1.PopService", "penstock.pop.v1.GroupService"):
            answer = await checks.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for answer in stub.ServerReflectionInfo(iter([asked])):
            names = {service.name for service in answer.list_services_response.service}
    assert {"penstock.pop.v1.PopService", "penstock.pop.v1.GroupService"} <= names
