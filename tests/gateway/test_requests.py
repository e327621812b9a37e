"""Requests of services: devices and workers reply by the response topics and correlation data of MQTT 5.0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from penstock import Client, GroupUnknown, InvalidTopic, ReceivedMessage, RequestTimedOut, SyncClient, Worker
from penstock.gateway.protocol.properties import Property
from tests.gateway.wire import Broker, Client5

COMMAND = "plant/1/valve"


async def serve(device: Client5, *, orders: int) -> None:
    """Reply to the next commands, the last one first."""
    commands = [await device.message_with() for _ in range(orders)]
    for message, about in reversed(commands):
        found = {Property.CORRELATION_DATA: about[Property.CORRELATION_DATA], Property.USER_PROPERTY: [("state", "done")]}
        assert await device.publish_with(about[Property.RESPONSE_TOPIC], b"did " + message.body, found, 1) == 0


@asynccontextmanager
async def device_of(broker: Broker) -> AsyncIterator[Client5]:
    device = await broker.connect_5("valve")
    await device.subscribe((COMMAND, 1))
    yield device


async def test_many_requests_wait_for_a_device_and_each_gets_its_reply(broker: Broker) -> None:
    async with device_of(broker) as device, Client(str(broker.node.grpc)) as client:
        serving = asyncio.create_task(serve(device, orders=20))
        replies = await asyncio.gather(*(client.request(COMMAND, b"%d" % number, timeout=15) for number in range(20)))
        assert [reply.body for reply in replies] == [b"did %d" % number for number in range(20)]
        assert replies[0].properties == {"state": "done"}
        await serving
        (group,) = await client.groups.describe()
        assert group.group.startswith("replies-")
    async with Client(str(broker.node.grpc)) as other:
        assert await other.groups.describe() == [], "the inbox went with its client"


async def test_threads_wait_for_replies(broker: Broker) -> None:
    async with device_of(broker) as device:
        serving = asyncio.create_task(serve(device, orders=1))

        def ask() -> ReceivedMessage:
            with SyncClient(str(broker.node.grpc)) as client:
                return client.request(COMMAND, b"close", timeout=120, content_type="text/plain")

        assert (await asyncio.to_thread(ask)).body == b"did close"
        await serving


async def test_a_request_without_a_reply_times_out_and_expires(broker: Broker) -> None:
    async with device_of(broker) as device, Client(str(broker.node.grpc)) as client:
        with pytest.raises(RequestTimedOut, match="no reply to the request on 'plant/1/valve' came within"):
            await client.request(COMMAND, b"open", timeout=0.2)
        _, about = await device.message_with()
        assert about[Property.MESSAGE_EXPIRY_S] == 1
        with pytest.raises(InvalidTopic):
            await client.request("plant/#", timeout=5)
        with pytest.raises(ValueError, match="more than 0"):
            await client.request(COMMAND, timeout=0)
        waiting = asyncio.create_task(client.request(COMMAND, timeout=60))
        await device.message_with()
        (group,) = await client.groups.describe()
        await client.groups.delete(group.group)
        with pytest.raises(GroupUnknown):
            await waiting
        serving = asyncio.create_task(serve(device, orders=1))
        assert (await client.request(COMMAND, b"again", timeout=15)).body == b"did again", "a new inbox was made"
        await serving


async def test_a_reply_comes_although_the_node_restarts(broker: Broker) -> None:
    broker.config = replace(broker.config, pop=replace(broker.config.pop, listen=broker.node.grpc))
    async with Client(str(broker.node.grpc), inbox="control-1") as client:
        async with device_of(broker) as device:
            asking = asyncio.create_task(client.request(COMMAND, b"open", timeout=120))
            _, about = await device.message_with()
        await broker.restart()
        device = await broker.connect_5("valve")
        found = {Property.CORRELATION_DATA: about[Property.CORRELATION_DATA]}
        assert await device.publish_with(about[Property.RESPONSE_TOPIC], b"done", found, 1) == 0
        assert about[Property.RESPONSE_TOPIC] == "replies/control-1"
        assert (await asking).body == b"done"


async def test_a_worker_replies_with_what_its_handler_returns(broker: Broker) -> None:
    worker = Worker(str(broker.node.grpc))

    @worker.consumer("questions/+", group="answering")
    async def answer(body: int) -> dict[str, int]:
        return {"twice": 2 * body}

    running = asyncio.create_task(worker.run(handle_signals=False))
    async with Client(str(broker.node.grpc)) as client:
        assert (await client.request("questions/1", b"21", timeout=15)).body == b'{"twice":42}'
        device = await broker.connect_5("curious")
        await device.subscribe(("answers", 1))
        about = {Property.RESPONSE_TOPIC: "answers", Property.CORRELATION_DATA: b"\0\1"}
        await device.publish_with("questions/2", b"4", about, 1)
        message, found = await device.message_with()
        assert (message.body, found[Property.CORRELATION_DATA]) == (b'{"twice":8}', b"\0\1")
    worker.stop()
    await running
