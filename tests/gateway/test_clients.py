"""MQTT 3.1.1 with mosquitto's commands as clients. tests/clients has the tests of client libraries."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.other_clients import command, printed, subscribed
from tests.gateway.wire import ANSWER_S_MAX, Broker
from tests.waiting import until

# --- mosquitto's commands ---------------------------------------------------------------------------------------------


async def mosquitto_pub(broker: Broker, topic: str, body: str, qos: int, *options: str) -> None:
    address = broker.node.mqtt
    arguments = ("-h", address.host, "-p", str(address.port), "-V", "311", "-t", topic, "-m", body, "-q", str(qos), *options)
    process = await asyncio.create_subprocess_exec(command("mosquitto_pub"), *arguments, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")


async def mosquitto_sub(broker: Broker, client_id: str, topic_filter: str, qos: int, count: int) -> asyncio.subprocess.Process:
    """Start a mosquitto_sub that ends after `count` messages."""
    address = broker.node.mqtt
    return await asyncio.create_subprocess_exec(
        *(command("mosquitto_sub"), "-h", address.host, "-p", str(address.port), "-V", "311", "-i", client_id),
        *("-t", topic_filter, "-q", str(qos), "-C", str(count), "-F", "%t %q %r %p"),
        stdout=asyncio.subprocess.PIPE,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_mosquitto_gets_what_mosquitto_publishes(broker: Broker, qos: int) -> None:
    async with asyncio.timeout(ANSWER_S_MAX):
        subscriber = await mosquitto_sub(broker, "sub", "plant/+", qos, 3)
        await subscribed(broker, "sub")
        for sent in (0, 1, 2):
            await mosquitto_pub(broker, f"plant/{sent}", "21.5", sent)
        assert await printed(subscriber) == [f"plant/{sent} {min(sent, qos)} 0 21.5" for sent in (0, 1, 2)]


async def test_mosquitto_gets_retained_messages_and_clears_them(broker: Broker) -> None:
    async with asyncio.timeout(ANSWER_S_MAX):
        for topic in ("state/1", "state/2", "state/3"):
            await mosquitto_pub(broker, topic, "on", 1, "--retain")
        await mosquitto_pub(broker, "state/2", "", 1, "--retain")
        subscriber = await mosquitto_sub(broker, "sub", "state/#", 1, 2)
        assert await printed(subscriber) == ["state/1 1 1 on", "state/3 1 1 on"]


async def test_mosquitto_publishes_a_will(broker: Broker) -> None:
    async with asyncio.timeout(ANSWER_S_MAX):
        subscriber = await mosquitto_sub(broker, "sub", "will/#", 1, 1)
        await subscribed(broker, "sub")
        address = broker.node.mqtt
        process = await asyncio.create_subprocess_exec(
            *(command("mosquitto_sub"), "-h", address.host, "-p", str(address.port), "-V", "311", "-t", "none"),
            *("-i", "dies", "--will-topic", "will/dies", "--will-payload", "gone", "--will-qos", "1"),
        )
        await until(lambda: "dies" in broker.node.gateway.clients)
        process.kill()
        await process.wait()
        assert await printed(subscriber) == ["will/dies 1 0 gone"]
