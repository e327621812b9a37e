"""Clients whose node is not there, or that are closed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock import Client, OutgoingMessage
from penstock.pop.errors import (
    BatchFailed,
    ClientClosed,
    NodeUnavailable,
)
from tests.pop.client.consuming import first_of, in_flight
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.waiting import WAIT_S_MAX, until

LONG_MS = 50_000


async def test_messages_continue_when_the_node_is_back(tmp_path: Path) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    got = []
    async with Client(node.target) as client:
        await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(10)])
        async for message in client.consume(FILTER, group=GROUP, batch=2, prefetch=4):
            got.append(message.body)
            if len(got) == 3:
                port = node.port
                await node.stop()
                node = Node(tmp_path / "data")
                ack = message.ack()  # The ack is on its way while no node listens.
                await node.start(port)
                await ack
            else:
                await message.ack()
            if len(got) == 10:
                await client.send(TOPIC, b"after")
            if len(got) == 11:
                break
    assert sorted(got) == sorted([*(b"%d" % n for n in range(10)), b"after"])
    assert in_flight(node) == 0
    await node.stop()


async def test_a_stream_goes_on_when_the_node_is_back(tmp_path: Path) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    seen: dict[bytes, int] = {}
    async with Client(node.target) as client, client.stream(FILTER, group=GROUP) as messages:
        await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(10)])
        async for message in messages:
            seen[message.body] = max(seen.get(message.body, 0), message.attempt)
            if len(seen) == 3:
                port = node.port
                await node.stop()
                node = Node(tmp_path / "data")
                await node.start(port)
                await client.send(TOPIC, b"after")
            message.ack()
            if len(seen) == 11:
                break
    assert set(seen) == {*(b"%d" % n for n in range(10)), b"after"}
    assert set(seen.values()) == {1}, "nothing that was not seen has cost an attempt"
    await node.stop()


async def test_a_stream_that_is_left_while_the_node_is_away_ends_at_once(tmp_path: Path) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    async with (
        asyncio.timeout(WAIT_S_MAX),
        Client(node.target, close_timeout=0.1) as client,
        client.stream(FILTER, group=GROUP),
    ):
        await node.until(lambda: node.core.waiting == 1)
        await node.stop()


async def test_a_client_waits_for_a_node_that_starts_later(tmp_path: Path) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    port = node.port
    await node.stop()
    async with Client(f"127.0.0.1:{port}") as client:
        sending = asyncio.create_task(client.send(TOPIC, b"early"))
        consuming = asyncio.create_task(first_of(client, 1))
        node = Node(tmp_path / "data")
        await node.start(port)
        assert (await sending).message_id
        assert [message.body for message in await consuming] == [b"early"]
    await node.stop()


async def test_consumers_say_that_the_node_is_away_and_go_on_when_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    port = node.port
    await node.stop()
    async with Client(f"127.0.0.1:{port}") as client:

        async def streamed() -> bytes:
            async with client.stream(FILTER, group="streamed") as messages:
                async for message in messages:
                    message.ack()
                    return message.body
            raise AssertionError("the stream ended")

        streaming = asyncio.create_task(streamed())
        consuming = asyncio.create_task(first_of(client, 1))
        await until(lambda: "the stream opens again" in caplog.text and "the consumer polls again" in caplog.text)
        node = Node(tmp_path / "data")
        await node.start(port)
        await client.send(TOPIC, b"x")
        assert await streaming == b"x"
        assert [message.body for message in await consuming] == [b"x"]
    await node.stop()


async def test_a_stream_that_waits_for_its_node_can_be_cancelled() -> None:
    async with Client("127.0.0.1:1", close_timeout=0.1) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), client.stream(FILTER, group=GROUP):
                raise AssertionError("there is no node")


async def test_without_a_node_calls_fail_and_closing_returns() -> None:
    async with Client("127.0.0.1:1", timeout=0.1, close_timeout=0.1) as client, asyncio.timeout(WAIT_S_MAX):
        for call in (
            client.send(TOPIC),
            client.recall("00"),
            client.pop(FILTER, group=GROUP),
            client.send_batch([OutgoingMessage(topic=TOPIC)]),
        ):
            with pytest.raises(NodeUnavailable):
                await call
        with pytest.raises(BatchFailed, match="did not answer"):
            await client.ack(["00"], group=GROUP)
        consumer = client.consume(FILTER, group=GROUP)
        async with consumer:
            pass


async def test_calls_of_a_closed_client_raise(node: Node) -> None:
    async with Client(node.target) as client:
        await client.send(TOPIC)
        (message,) = await client.pop(FILTER, group=GROUP)
        consumer = client.consume(FILTER, group=GROUP)
    await client.aclose()
    for call in (client.send(TOPIC), client.pop(FILTER, group=GROUP), client.recall(""), client.ack([], group=GROUP)):
        with pytest.raises(ClientClosed):
            await call
    with pytest.raises(ClientClosed):
        await message.ack()
    with pytest.raises(ClientClosed):
        await message.extend(0.001)
    with pytest.raises(ClientClosed):
        client.consume(FILTER, group=GROUP)
    with pytest.raises(ClientClosed):
        await anext(aiter(consumer))


def test_a_client_needs_a_running_loop() -> None:
    with pytest.raises(RuntimeError, match="loop"):
        Client("127.0.0.1:1")
