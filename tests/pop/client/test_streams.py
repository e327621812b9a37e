"""The stream of the asyncio client, against a real node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock import Client
from penstock.pop.errors import (
    GroupUnknown,
    RequestInvalid,
)
from penstock.pop.grpc.consumestream import POPPED_PER_TURN, ConsumeStream, StreamTerms
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2_grpc import PopServiceStub
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node, Parts
from tests.waiting import WAIT_S_MAX

OPTIONS = PopOptions(transaction_check_ms=100, transaction_checks_max=1_000)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    started = Node(tmp_path / "data", pop=OPTIONS)
    await started.start()
    yield started
    await started.stop()


async def test_a_stream_yields_messages_as_they_come_within_its_credits(node: Node, client: Client) -> None:
    async with client.stream(FILTER, group=GROUP, credits=3, batch=2) as messages:
        stream = aiter(messages)
        for number in range(10):
            await client.send(TOPIC, b"%d" % number)
        seen = [await anext(stream) for _ in range(3)]
        assert node.group().in_flight == 3
        await client.send(TOPIC, b"10")
        assert node.group().in_flight == 3, "the node has had its turns to deliver more"
        while len(seen) < 10:
            seen[len(seen) - 3].ack()
            seen.append(await anext(stream))
        for message in seen[7:]:
            message.ack()
    await node.until(lambda: node.group().in_flight == 0)
    assert [message.body for message in seen] == [b"%d" % number for number in range(10)]
    assert node.core.counters.acked == 10


@pytest.mark.parametrize("give_back", [True, False])
async def test_a_broken_stream_returns_messages_at_once_or_when_due(node: Node, client: Client, give_back: bool) -> None:
    await client.send(TOPIC, b"a")
    other = Client(node.target)
    async with other.stream(FILTER, group=GROUP, invisible=600.0, give_back=give_back) as messages:
        await anext(aiter(messages))
        await other._channel.close(None)  # The process ends without leaving the stream.
    if not give_back:
        node.advance(600_000)
    (again,) = await client.pop(FILTER, group=GROUP, wait=60.0)
    assert again.attempt == (1 if give_back else 2)
    await other.aclose()


async def test_nack_and_suspend_on_a_stream_free_a_credit(client: Client) -> None:
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


async def test_a_delivery_that_expires_frees_its_credit(node: Node, client: Client) -> None:
    await client.send(TOPIC, b"a")
    async with client.stream(FILTER, group=GROUP, credits=1, invisible=600.0) as messages:
        stream = aiter(messages)
        assert (await anext(stream)).attempt == 1
        node.advance(600_000)
        assert (await anext(stream)).attempt == 2


@pytest.mark.parametrize("credits", [1, 10])
async def test_deleting_a_group_ends_its_streams(client: Client, credits: int) -> None:
    await client.send(TOPIC, b"a")
    async with client.stream(FILTER, group=GROUP, credits=credits) as messages:
        stream = aiter(messages)
        await anext(stream)
        await client.groups.delete(GROUP)
        with pytest.raises(GroupUnknown, match="deleted"):
            await asyncio.wait_for(anext(stream), WAIT_S_MAX)


async def test_an_invalid_first_request_of_a_stream_is_refused(node: Node, client: Client) -> None:
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
            [pb.ConsumeRequest(open=opening), pb.ConsumeRequest(credits=-(2**30))],
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


async def test_a_stream_refuses_invalid_handles_and_stays_open(node: Node) -> None:
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


async def test_a_stream_with_many_credits_pops_in_portions_of_several_turns(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "data")
    parts.publish(*([b"x"] * (POPPED_PER_TURN * 3)))
    group = parts.group()
    parts.store.start(asyncio.get_running_loop(), lambda error: pytest.fail(str(error)))
    credits = POPPED_PER_TURN * 2 + 10
    stream = ConsumeStream(parts.core, parts.store.when_durable, parts.handles, group, StreamTerms(credits, 100, 60_000))
    stream.pop_more()
    seen = [group.in_flight]
    assert POPPED_PER_TURN <= seen[0] < POPPED_PER_TURN + 100
    async with asyncio.timeout(WAIT_S_MAX):
        while group.in_flight < credits:
            stream.pop_more()  # A call in between changes nothing: the next portion has its turn.
            assert group.in_flight == seen[-1]
            await asyncio.sleep(0)
            seen.append(group.in_flight)
    assert max(after - before for before, after in pairwise(seen)) < POPPED_PER_TURN + 100
    stream.end(give_back=True, is_broken=False)
    assert group.in_flight == 0
    await parts.store.close()
