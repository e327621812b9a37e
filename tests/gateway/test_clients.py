"""The same small story told by real clients: what others wrote must understand what this node says."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import pytest

from tests.gateway.wire import ANSWER_S_MAX, Broker, Message, until


class RealClient(Protocol):
    """What the story needs of a client."""

    async def subscribe(self, *filters: tuple[str, int]) -> None:
        """Return when the SUBACK has come."""

    async def publish(self, topic: str, body: bytes, qos: int, *, retain: bool = False) -> None:
        """Return when the message is acknowledged as its QoS demands."""

    async def message(self) -> Message:
        """Return the next message."""


# --- paho-mqtt ----------------------------------------------------------------------------------------------------------


class Paho:
    """paho-mqtt, whose network loop runs on a thread of its own."""

    def __init__(self, mqtt: Any, broker: Broker, client_id: str, *, clean: bool = True) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._broker = broker
        version = mqtt.CallbackAPIVersion.VERSION2
        self.client = mqtt.Client(version, client_id, clean_session=clean, protocol=mqtt.MQTTv311)
        self.client.on_connect = lambda *_: self._tell(self._answers, "CONNACK")
        self.client.on_subscribe = lambda *_: self._tell(self._answers, "SUBACK")
        self.client.on_publish = lambda *_: self._tell(self._answers, "published")
        self.client.on_message = lambda _, __, found: self._tell(
            self._messages, Message(found.topic, found.payload, found.qos, found.retain)
        )

    def _tell(self, queue: asyncio.Queue[Any], item: object) -> None:
        self._loop.call_soon_threadsafe(queue.put_nowait, item)

    async def _answer(self, expected: str) -> None:
        assert await self._answers.get() == expected

    async def connect(self) -> None:
        self.client.connect_async(self._broker.node.mqtt.host, self._broker.node.mqtt.port)
        self.client.loop_start()
        await self._answer("CONNACK")

    async def subscribe(self, *filters: tuple[str, int]) -> None:
        self.client.subscribe(list(filters))
        await self._answer("SUBACK")

    async def publish(self, topic: str, body: bytes, qos: int, *, retain: bool = False) -> None:
        self.client.publish(topic, body, qos, retain)
        await self._answer("published")

    async def message(self) -> Message:
        return await self._messages.get()


@asynccontextmanager
async def paho(broker: Broker, client_id: str, *, clean: bool = True) -> AsyncIterator[RealClient]:
    mqtt = pytest.importorskip("paho.mqtt.client", reason="paho-mqtt is not installed")
    client = Paho(mqtt, broker, client_id, clean=clean)
    await client.connect()
    yield client
    client.client.disconnect()
    await asyncio.to_thread(client.client.loop_stop)


# --- aiomqtt ------------------------------------------------------------------------------------------------------------


class Aiomqtt:
    """aiomqtt: paho's protocol, on the event loop."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def subscribe(self, *filters: tuple[str, int]) -> None:
        await self._client.subscribe(list(filters))

    async def publish(self, topic: str, body: bytes, qos: int, *, retain: bool = False) -> None:
        await self._client.publish(topic, body, qos, retain)

    async def message(self) -> Message:
        found = await anext(self._client.messages)
        return Message(str(found.topic), found.payload, found.qos, found.retain)


@asynccontextmanager
async def aiomqtt(broker: Broker, client_id: str, *, clean: bool = True) -> AsyncIterator[RealClient]:
    module = pytest.importorskip("aiomqtt", reason="aiomqtt is not installed")
    version = module.ProtocolVersion.V311
    address = broker.node.mqtt
    options = {"identifier": client_id, "protocol": version, "clean_session": clean}
    async with module.Client(address.host, address.port, **options) as client:
        yield Aiomqtt(client)


# --- amqtt --------------------------------------------------------------------------------------------------------------


class Amqtt:
    """amqtt's MQTTClient, which has its own implementation of the protocol."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def subscribe(self, *filters: tuple[str, int]) -> None:
        assert await self._client.subscribe(list(filters)) == [qos for _, qos in filters]

    async def publish(self, topic: str, body: bytes, qos: int, *, retain: bool = False) -> None:
        await self._client.publish(topic, body, qos, retain)

    async def message(self) -> Message:
        found = await self._client.deliver_message()
        return Message(found.topic, bytes(found.data), found.qos, found.publish_packet.retain_flag)


@asynccontextmanager
async def amqtt(broker: Broker, client_id: str, *, clean: bool = True) -> AsyncIterator[RealClient]:
    module = pytest.importorskip("amqtt.client", reason="amqtt is not installed")
    client = module.MQTTClient(client_id, config={"auto_reconnect": False})
    await client.connect(f"mqtt://{broker.node.mqtt}/", cleansession=clean)
    yield Amqtt(client)
    await client.disconnect()


# --- the story ----------------------------------------------------------------------------------------------------------

LIBRARIES = [paho, aiomqtt, amqtt]


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_client_gets_what_it_publishes_at_each_qos(broker: Broker, library: Any) -> None:
    async with asyncio.timeout(ANSWER_S_MAX), library(broker, "pump") as client:
        await client.subscribe(("plant/1", 0), ("plant/2", 1), ("plant/3", 2))
        for topic, granted in (("plant/1", 0), ("plant/2", 1), ("plant/3", 2)):
            for qos in (0, 1, 2):
                body = f"{topic} at {qos}".encode()
                await client.publish(topic, body, qos)
                assert await client.message() == Message(topic, body, min(qos, granted))
    assert len(broker.stored()) == 9


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_client_gets_what_a_wildcard_matches_from_another_client(broker: Broker, library: Any) -> None:
    async with (
        asyncio.timeout(ANSWER_S_MAX),
        library(broker, "subscriber") as subscriber,
        library(broker, "publisher") as publisher,
    ):
        await subscriber.subscribe(("plant/+/temperature", 1), ("alarm/#", 2))
        for topic in ("plant/1/temperature", "plant/1/pressure", "alarm", "alarm/fire/2", "plant/temperature"):
            await publisher.publish(topic, b"21.5", 2)
        assert [await subscriber.message() for _ in range(3)] == [
            Message("plant/1/temperature", b"21.5", 1),
            Message("alarm", b"21.5", 2),
            Message("alarm/fire/2", b"21.5", 2),
        ]


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_client_gets_retained_messages(broker: Broker, library: Any) -> None:
    async with asyncio.timeout(ANSWER_S_MAX):
        async with library(broker, "publisher") as publisher:
            for topic, body in (("state/1", b"on"), ("state/2", b"off"), ("state/1", b""), ("state/3", b"on")):
                await publisher.publish(topic, body, 1, retain=True)
        async with library(broker, "subscriber") as subscriber:
            await subscriber.subscribe(("state/+", 1))
            assert [await subscriber.message() for _ in range(2)] == [
                Message("state/2", b"off", 1, retain=True),
                Message("state/3", b"on", 1, retain=True),
            ]


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_client_goes_on_with_its_session_when_the_node_was_killed(broker: Broker, library: Any) -> None:
    async with asyncio.timeout(ANSWER_S_MAX):
        async with library(broker, "goes-on", clean=False) as client:
            await client.subscribe(("a/#", 2))
            await client.publish("a/b", b"before", 2)
            assert await client.message() == Message("a/b", b"before", 2)
        await until(lambda: "goes-on" in broker.away())
        await broker.kill()
        other = await broker.connect("other")
        for qos in (1, 2):
            await other.publish("a/c", b"while it was away", qos)
        async with library(broker, "goes-on", clean=False) as client:
            for qos in (1, 2):
                assert await client.message() == Message("a/c", b"while it was away", qos)
            await client.publish("a/b", b"after", 2)
            assert await client.message() == Message("a/b", b"after", 2)


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_client_sends_and_gets_a_large_message(broker: Broker, library: Any) -> None:
    body = bytes(range(256)) * 2000
    async with asyncio.timeout(ANSWER_S_MAX), library(broker, "pump") as client:
        await client.subscribe(("a", 1))
        await client.publish("a", body, 1)
        assert await client.message() == Message("a", body, 1)


# --- mosquitto's commands -----------------------------------------------------------------------------------------------


def command(name: str) -> str:
    """Return the path of one of mosquitto's commands; skip the test where it isn't there."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (apt-get install mosquitto-clients)")
    return path


async def mosquitto_pub(broker: Broker, topic: str, body: str, qos: int, *options: str) -> None:
    address = broker.node.mqtt
    arguments = ("-h", address.host, "-p", str(address.port), "-V", "311", "-t", topic, "-m", body, "-q", str(qos), *options)
    process = await asyncio.create_subprocess_exec(command("mosquitto_pub"), *arguments, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")


async def mosquitto_sub(broker: Broker, client_id: str, topic_filter: str, qos: int, count: int) -> asyncio.subprocess.Process:
    """Return a mosquitto_sub that ends after `count` messages."""
    address = broker.node.mqtt
    return await asyncio.create_subprocess_exec(
        *(command("mosquitto_sub"), "-h", address.host, "-p", str(address.port), "-V", "311", "-i", client_id),
        *("-t", topic_filter, "-q", str(qos), "-C", str(count), "-F", "%t %q %r %p"),
        stdout=asyncio.subprocess.PIPE,
    )


async def subscribed(broker: Broker, client_id: str) -> None:
    """Return when the node has a subscription of a client's, which must not end before that."""
    clients = broker.node.gateway.clients
    await until(lambda: client_id in clients and bool(clients[client_id].session.subscriptions))


async def printed(process: asyncio.subprocess.Process) -> list[str]:
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().splitlines()


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
