"""Pull consumers: they read from an offset that they name, and note how far they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from penstock import Client as PopClient
from penstock import OutgoingMessage, group_settings
from penstock.pop.options import PopOptions
from penstock.pop.rocketmq.status import Code
from penstock.pop.rocketmq.stubs import pb, service_pb
from tests.pop.rocketmq.calling import Caller, named, outgoing
from tests.pop.wiring import GROUP, TOPIC, Node
from tests.waiting import WAIT_S_MAX

POLICIES = pb.QueryOffsetPolicy
QUEUE = pb.MessageQueue(topic=named(TOPIC))


@pytest.fixture
async def caller(node: Node) -> AsyncIterator[Caller]:
    async with grpc.aio.insecure_channel(node.target) as channel:
        yield Caller(channel)


async def pull(
    caller: Caller, offset: int, count: int = 32, *, wait_ms: int = 0, tags: str = "*"
) -> tuple[int, list[Any], int]:
    """Return the code, the messages and the next offset of a pull."""
    request = service_pb.PullMessageRequest(group=named(GROUP), message_queue=QUEUE, offset=offset, batch_size=count)
    request.filter_expression.CopyFrom(pb.FilterExpression(type=pb.FilterType.TAG, expression=tags))
    request.long_polling_timeout.FromMilliseconds(wait_ms)
    code, messages, next_offset = 0, [], -1
    async for response in caller.stream("PullMessage", request):
        kind = response.WhichOneof("content")
        if kind == "status":
            code = response.status.code
        elif kind == "message":
            messages.append(response.message)
        else:
            next_offset = response.next_offset
    return code, messages, next_offset


async def noted(caller: Caller) -> int:
    answer = await caller.call("GetOffset", service_pb.GetOffsetRequest(group=named(GROUP), message_queue=QUEUE))
    assert answer.status.code == Code.OK
    return int(answer.offset)


async def note(caller: Caller, offset: int) -> int:
    request = service_pb.UpdateOffsetRequest(group=named(GROUP), message_queue=QUEUE, offset=offset)
    return int((await caller.call("UpdateOffset", request)).status.code)


async def query(caller: Caller, policy: int, timestamp_ms: int | None = None) -> Any:
    request = service_pb.QueryOffsetRequest(message_queue=QUEUE, query_offset_policy=policy)
    if timestamp_ms is not None:
        request.timestamp.FromMilliseconds(timestamp_ms)
    return await caller.call("QueryOffset", request)


def bodies(messages: list[Any]) -> list[bytes]:
    return [message.body for message in messages]


async def test_a_consumer_pulls_from_its_offset_on_and_notes_how_far_it_is(node: Node, caller: Caller) -> None:
    assert await noted(caller) == 0
    node.settle_queues()
    await caller.send(*(outgoing(str(number).encode()) for number in range(5)))
    code, messages, next_offset = await pull(caller, 0, 2)
    assert (code, bodies(messages), next_offset) == (Code.OK, [b"0", b"1"], 2)
    assert [message.system_properties.queue_offset for message in messages] == [0, 1]
    assert await pull(caller, 0, 2) == (code, messages, next_offset), "a pull takes nothing"
    assert await note(caller, next_offset) == Code.OK
    assert await noted(caller) == 2
    assert bodies((await pull(caller, 2))[1]) == [b"2", b"3", b"4"]
    assert await pull(caller, 5) == (Code.MESSAGE_NOT_FOUND, [], 5)
    code, popped = await caller.receive()
    assert (code, bodies(popped)) == (Code.OK, [b"2", b"3", b"4"]), "a pop begins at the offset that was noted"


async def test_a_noted_offset_survives_a_restart(tmp_path: Path) -> None:
    for offset in (0, 1):
        async with Node(tmp_path / "data") as node, grpc.aio.insecure_channel(node.target) as channel:
            caller = Caller(channel)
            assert await noted(caller) == offset
            node.settle_queues()
            await caller.send(outgoing())
            assert await note(caller, offset + 1) == Code.OK


async def test_a_pull_waits_for_a_message(node: Node, caller: Caller) -> None:
    await noted(caller)
    node.settle_queues()
    waiting = asyncio.create_task(pull(caller, 0, wait_ms=60_000))
    group = next(iter(node.core.groups))
    await node.until(lambda: len(group.queue.watchers) == 2)
    await caller.send(outgoing(b"now"))
    assert bodies((await asyncio.wait_for(waiting, WAIT_S_MAX))[1]) == [b"now"]
    assert len(group.queue.watchers) == 1
    node.core.groups.delete(GROUP)
    assert (await pull(caller, 0))[0] == Code.MESSAGE_NOT_FOUND, "the group is created again"


async def test_no_more_pulls_wait_than_the_option_says(tmp_path: Path) -> None:
    async with (
        Node(tmp_path / "data", pop=PopOptions(waiters_max=1)) as node,
        grpc.aio.insecure_channel(node.target) as channel,
    ):
        caller = Caller(channel)
        await noted(caller)
        waiting = asyncio.create_task(pull(caller, 0, wait_ms=60_000))
        group = next(iter(node.core.groups))
        await node.until(lambda: len(group.queue.watchers) == 2)
        assert (await pull(caller, 0))[0] == Code.TOO_MANY_REQUESTS
        waiting.cancel()
        await node.until(lambda: len(group.queue.watchers) == 1)
        assert (await pull(caller, 0))[0] == Code.MESSAGE_NOT_FOUND


async def test_offsets_are_found_by_both_ends_and_by_time(node: Node, caller: Caller) -> None:
    missing = await query(caller, POLICIES.END)
    assert (missing.status.code, "call GetOffset" in missing.status.message) == (Code.OFFSET_NOT_FOUND, True)
    await noted(caller)
    node.settle_queues()
    await caller.send(outgoing(b"0"), outgoing(b"1"))
    ends = [(await query(caller, policy)).offset for policy in (POLICIES.BEGINNING, POLICIES.END)]
    assert ends == [0, 2]
    now_ms = node.store.now_ms()
    assert [(await query(caller, POLICIES.TIMESTAMP, at_ms)).offset for at_ms in (0, now_ms + 1)] == [0, 2]
    assert (await query(caller, POLICIES.TIMESTAMP)).status.code == Code.BAD_REQUEST
    assert (await query(caller, 9)).status.code == Code.BAD_REQUEST


async def test_offsets_outside_of_the_queue_are_refused(node: Node, caller: Caller) -> None:
    await noted(caller)
    node.settle_queues()
    await caller.send(outgoing(b"0"))
    for offset in (-1, 2):
        assert (await pull(caller, offset))[0] == Code.ILLEGAL_OFFSET
        assert await note(caller, offset) == Code.ILLEGAL_OFFSET
    assert (await pull(caller, 0, 0))[0] == Code.BAD_REQUEST


async def test_a_pull_selects_by_its_expression_and_passes_over_the_others(node: Node, caller: Caller) -> None:
    await noted(caller)
    node.settle_queues()
    await caller.send(*(outgoing(str(number).encode(), tag="ab"[number % 2]) for number in range(600)))
    code, messages, next_offset = await pull(caller, 0, 2, tags="b")
    assert (code, bodies(messages), next_offset) == (Code.OK, [b"1", b"3"], 4)
    assert await pull(caller, 0, wait_ms=300, tags="c") == (Code.MESSAGE_NOT_FOUND, [], 600)
    async with PopClient(node.target) as client:
        await client.groups.update(GROUP, group_settings(paused=True))
    assert await pull(caller, 0) == (Code.MESSAGE_NOT_FOUND, [], 0), "a paused group gives nothing"


async def test_a_message_whose_time_to_live_has_passed_is_passed_over(node: Node, caller: Caller) -> None:
    await noted(caller)
    node.settle_queues()
    async with PopClient(node.target) as client:
        await client.send_batch(
            [OutgoingMessage(topic=TOPIC, body=b"short", expire_after=1.0), OutgoingMessage(topic=TOPIC, body=b"long")]
        )
    node.advance(5_000)
    code, messages, next_offset = await pull(caller, 0)
    assert (code, bodies(messages), next_offset) == (Code.OK, [b"long"], 2)
