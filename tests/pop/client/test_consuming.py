"""The consumer of the asyncio client, against a real node."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock import Client, OutgoingMessage
from penstock.pop.errors import (
    RequestInvalid,
)
from penstock.pop.options import PopOptions
from tests.pop.client.consuming import first_of, in_flight
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node


async def test_a_message_that_arrives_later_wakes_the_loop(node: Node, client: Client) -> None:
    task = asyncio.create_task(first_of(client, 2))
    await node.until(lambda: node.core.waiting == 1)
    await client.send(TOPIC, b"a")
    await node.until(lambda: node.core.counters.handed_out == 1 and node.core.waiting == 1)
    await client.send(TOPIC, b"b")
    assert [message.body for message in await task] == [b"a", b"b"]


async def test_a_consumer_pops_no_more_than_prefetch_allows(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(100)])
    got = []
    async with client.consume(FILTER, group=GROUP, batch=4, prefetch=8) as consumer:
        async for message in consumer:
            got.append(message.body)
            assert node.core.counters.handed_out <= len(got) + 8
            await message.ack()
            if len(got) == 100:
                break
    assert got == [b"%d" % n for n in range(100)]
    assert in_flight(node) == 0


async def test_a_consumer_stops_popping_while_its_loop_is_busy(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC)] * 50)
    async for _ in client.consume(FILTER, group=GROUP, batch=5, prefetch=10):
        # The loop has 1 message and 9 wait. Another batch would make that 14.
        await node.until(lambda: node.core.counters.handed_out == 10)
        await client.send(TOPIC)
        assert node.core.counters.handed_out == 10
        assert node.core.waiting == 0
        break


@pytest.mark.parametrize("way", ["break", "exception", "aclose", "client"])
async def test_leaving_the_loop_returns_unseen_messages_at_once_without_counting_an_attempt(node: Node, way: str) -> None:
    client = Client(node.target)
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(30)])
    consumer = client.consume(FILTER, group=GROUP, batch=10, prefetch=20)
    seen = []
    try:
        async for message in consumer:
            seen.append(message.body)
            message.ack()
            if len(seen) < 3:
                continue
            await node.until(lambda: node.core.counters.handed_out >= 20)
            if way == "break":
                break
            if way == "exception":
                raise LookupError
            await (consumer.aclose() if way == "aclose" else client.aclose())
    except LookupError:
        assert way == "exception"
    del consumer
    await node.until(lambda: in_flight(node) == 0 and node.core.waiting == 0)
    await client.aclose()
    assert seen == [b"0", b"1", b"2"]
    assert node.core.counters.acked == 3
    async with Client(node.target) as other:
        rest = await first_of(other, 27)
        assert sorted(int(message.body) for message in rest) == list(range(3, 30))
        assert {message.attempt for message in rest} == {1}


async def test_leaving_the_loop_ends_a_waiting_poll(node: Node, client: Client) -> None:
    async with client.consume(FILTER, group=GROUP):
        await node.until(lambda: node.core.waiting == 1)
    await node.until(lambda: node.core.waiting == 0)
    await client.send(TOPIC, b"a")
    assert [message.attempt for message in await client.pop(FILTER, group=GROUP)] == [1]


async def test_a_cancelled_task_leaves_the_loop_in_order(node: Node, client: Client) -> None:
    task = asyncio.create_task(first_of(client, 1))
    await node.until(lambda: node.core.waiting == 1)
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    await node.until(lambda: node.core.waiting == 0)


async def test_several_tasks_share_one_consumer(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(200)])
    got: list[bytes] = []

    async with client.consume(FILTER, group=GROUP, batch=10, prefetch=20) as consumer:

        async def work() -> None:
            async for message in consumer:
                got.append(message.body)
                await message.ack()

        workers = [asyncio.create_task(work()) for _ in range(5)]
        await node.until(lambda: node.core.counters.acked == 200)
        await consumer.aclose()
        await asyncio.gather(*workers)
    assert sorted(got) == sorted(b"%d" % n for n in range(200))


async def test_an_invalid_request_is_raised_in_the_loop_of_the_consumer(client: Client) -> None:
    for group, topic_filter in (("", FILTER), (GROUP, "a/#/b"), (GROUP, f"$dlq/{GROUP}")):
        consumer = client.consume(topic_filter, group=group)
        with pytest.raises(RequestInvalid):
            await anext(aiter(consumer))
    with pytest.raises(RequestInvalid):
        await client.pop(FILTER, group="a/b")


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": 9, "prefetch": 8}, {"invisible": 0}, {"wait": -1}])
async def test_numbers_out_of_bounds_are_refused_before_any_call(client: Client, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="use "):
        client.consume(FILTER, group=GROUP, **options)


async def test_dead_letters_can_be_consumed_by_another_group(tmp_path: Path) -> None:
    node = Node(tmp_path / "data", pop=PopOptions(attempts_max=1))
    await node.start()
    async with Client(node.target) as client:
        await client.send(TOPIC, b"poison")
        (message,) = await client.pop(FILTER, group=GROUP)
        await message.nack()
        async for dead in client.consume(f"$dlq/{GROUP}", group="operators"):
            assert dead.body == b"poison"
            await dead.ack()
            break
    await node.stop()
