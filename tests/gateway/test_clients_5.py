"""MQTT 5.0 with clients of other projects, which must understand what this node sends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.moving_time import pass_time
from tests.gateway.other_clients import Paho, command, paho, printed, properties_of, subscribed
from tests.gateway.wire import ANSWER_S_MAX, Broker, Message
from tests.waiting import until

# --- paho-mqtt --------------------------------------------------------------------------------------------------------


async def test_paho_gets_all_properties_that_paho_sends(broker: Broker) -> None:
    async with asyncio.timeout(ANSWER_S_MAX), paho(broker, "pump") as client:
        client.client.subscribe("plant/#", qos=2, properties=properties_of("SUBSCRIBE", SubscriptionIdentifier=9))
        assert [reason.value for reason in await client.of("subscribe")] == [2]
        about = properties_of(
            "PUBLISH",
            PayloadFormatIndicator=1,
            MessageExpiryInterval=100,
            ContentType="text/plain",
            ResponseTopic="answers",
            CorrelationData=b"\x07",
            UserProperty=[("b", "1"), ("a", "2"), ("b", "3")],
        )
        for qos in (0, 1, 2):
            client.client.publish("plant/1", b"21.5", qos, properties=about)
            message = await client.of("message")
            assert (message.topic, message.payload, message.qos) == ("plant/1", b"21.5", qos)
            got = message.properties
            assert got.UserProperty == [("b", "1"), ("a", "2"), ("b", "3")]
            assert (got.ContentType, got.ResponseTopic, got.CorrelationData) == ("text/plain", "answers", b"\x07")
            assert (got.PayloadFormatIndicator, got.MessageExpiryInterval) == (1, 100)
            assert got.SubscriptionIdentifier == [9]


async def test_paho_understands_refusals(broker: Broker) -> None:
    async with asyncio.timeout(ANSWER_S_MAX), paho(broker, "pump") as client:
        client.client.subscribe([("$share/g", 1), ("a", 1)])
        assert [reason.value for reason in await client.of("subscribe")] == [0x8F, 1]
        client.client.publish("$SYS/x", b"x", 1)
        reason, about = await client.of("publish")
        assert reason.value == 0x90
        assert "only the node may use" in about.ReasonString
        client.client.unsubscribe(["a", "never"])
        assert [reason.value for reason in await client.of("unsubscribe")] == [0, 0x11]


async def test_paho_resumes_its_session(broker: Broker) -> None:
    lasts = properties_of("CONNECT", SessionExpiryInterval=60)
    async with asyncio.timeout(ANSWER_S_MAX):
        async with paho(broker, "pump", clean_start=True, properties=lasts) as client:
            client.client.subscribe("a", 1)
            await client.of("subscribe")
        await until(lambda: "pump" in broker.away())
        other = await broker.connect("other")
        await other.publish("a", b"while it was away", 1)
        module = pytest.importorskip("paho.mqtt.client")
        again = Paho(module, broker, "pump")
        flags, _, _ = await again.connect(clean_start=False, properties=lasts)
        assert flags.session_present
        assert (await again.of("message")).payload == b"while it was away"
        again.client.disconnect()
        await asyncio.to_thread(again.client.loop_stop)


async def test_paho_learns_that_it_was_taken_over(broker: Broker) -> None:
    async with asyncio.timeout(ANSWER_S_MAX), paho(broker, "pump") as client:
        client.client.reconnect_delay_set(60, 120)
        await broker.connect_5("pump")
        assert (await client.of("disconnect")).value == 0x8E


async def test_paho_is_told_its_assigned_id_and_the_limits(broker: Broker) -> None:
    module = pytest.importorskip("paho.mqtt.client")
    async with asyncio.timeout(ANSWER_S_MAX):
        client = Paho(module, broker, "")
        _, _, about = await client.connect()
        assert about.AssignedClientIdentifier in broker.node.gateway.clients
        assert (about.ReceiveMaximum, about.TopicAliasMaximum) == (1000, 64)
        client.client.disconnect()
        await asyncio.to_thread(client.client.loop_stop)


# --- aiomqtt ----------------------------------------------------------------------------------------------------------


async def test_aiomqtt_sends_a_request_and_gets_the_response(broker: Broker) -> None:
    module = pytest.importorskip("aiomqtt", reason="aiomqtt is not installed")
    address = broker.node.mqtt

    def client(name: str) -> Any:
        return module.Client(address.host, address.port, identifier=name, protocol=module.ProtocolVersion.V5)

    async with asyncio.timeout(ANSWER_S_MAX), client("asker") as asker, client("service") as service:
        await service.subscribe("requests", qos=1)
        await asker.subscribe("answers/#", qos=1)
        about = properties_of("PUBLISH", ResponseTopic="answers/1", CorrelationData=b"\x01")
        await asker.publish("requests", b"?", qos=2, properties=about)
        request = await anext(service.messages)
        await service.publish(
            request.properties.ResponseTopic,
            b"!",
            qos=1,
            properties=properties_of("PUBLISH", CorrelationData=request.properties.CorrelationData),
        )
        answer = await anext(asker.messages)
        assert (str(answer.topic), answer.payload, answer.properties.CorrelationData) == ("answers/1", b"!", b"\x01")


# --- mosquitto's commands ---------------------------------------------------------------------------------------------


async def mosquitto_sub(broker: Broker, client_id: str, count: int, *options: str) -> asyncio.subprocess.Process:
    """Start a mosquitto_sub with MQTT 5.0 that ends after `count` messages."""
    address = broker.node.mqtt
    return await asyncio.create_subprocess_exec(
        *(command("mosquitto_sub"), "-h", address.host, "-p", str(address.port), "-V", "5", "-i", client_id),
        *("-C", str(count), "-W", "15", *options),
        stdout=asyncio.subprocess.PIPE,
    )


async def mosquitto_pub(broker: Broker, *options: str) -> None:
    address = broker.node.mqtt
    process = await asyncio.create_subprocess_exec(
        *(command("mosquitto_pub"), "-h", address.host, "-p", str(address.port), "-V", "5", *options),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")


@pytest.mark.parametrize("qos", ["0", "1", "2"])
async def test_mosquitto_gets_the_properties_that_mosquitto_sends(broker: Broker, qos: str) -> None:
    async with asyncio.timeout(ANSWER_S_MAX):
        form = ("-t", "plant/+", "-q", qos, "-F", "%t %q %p %C %D %E %F %R %P")
        subscriber = await mosquitto_sub(broker, "sub", 1, *form)
        await subscribed(broker, "sub")
        await mosquitto_pub(
            broker,
            *("-t", "plant/1", "-m", "21.5", "-q", qos),
            *("-D", "publish", "content-type", "text/plain"),
            *("-D", "publish", "correlation-data", "c7"),
            *("-D", "publish", "message-expiry-interval", "100"),
            *("-D", "publish", "payload-format-indicator", "1"),
            *("-D", "publish", "response-topic", "answers"),
            *("-D", "publish", "user-property", "unit", "C"),
        )
        assert await printed(subscriber) == [f"plant/1 {qos} 21.5 text/plain c7 100 1 answers unit:C"]


async def test_mosquitto_keeps_the_retain_flag_as_published(broker: Broker) -> None:
    async with asyncio.timeout(ANSWER_S_MAX):
        await mosquitto_pub(broker, "-t", "state/1", "-m", "old", "-q", "1", "--retain")
        options = ("-t", "state/#", "-q", "1", "--retain-as-published", "-F", "%t %r %p")
        subscriber = await mosquitto_sub(broker, "sub", 2, *options)
        await subscribed(broker, "sub")
        await mosquitto_pub(broker, "-t", "state/1", "-m", "new", "-q", "1", "--retain")
        assert await printed(subscriber) == ["state/1 1 old", "state/1 1 new"]


async def test_mosquitto_resumes_its_session_and_uses_topic_aliases(broker: Broker) -> None:
    async with asyncio.timeout(ANSWER_S_MAX):
        session = ("-c", "-x", "60")
        form = ("-t", "a/#", "-q", "1", "-F", "%t %p")
        first = await mosquitto_sub(broker, "sub", 1, *session, *form)
        await subscribed(broker, "sub")
        await mosquitto_pub(broker, "-t", "a/1", "-m", "1", "-q", "1", "-D", "publish", "topic-alias", "3")
        assert await printed(first) == ["a/1 1"]
        await until(lambda: "sub" in broker.away())
        await broker.kill()
        for n in ("2", "3"):
            await mosquitto_pub(broker, "-t", "a/1", "-m", n, "-q", "1")
        assert await printed(await mosquitto_sub(broker, "sub", 2, *session, *form)) == ["a/1 2", "a/1 3"]


async def test_mosquitto_publishes_a_will_after_its_delay(broker: Broker) -> None:
    async with asyncio.timeout(ANSWER_S_MAX):
        watcher = await broker.connect("watcher")
        await watcher.subscribe(("will/#", 1))
        address = broker.node.mqtt
        process = await asyncio.create_subprocess_exec(
            *(command("mosquitto_sub"), "-h", address.host, "-p", str(address.port), "-V", "5", "-t", "none", "-i", "dies"),
            *("--will-topic", "will/dies", "--will-payload", "gone", "--will-qos", "1"),
            *("-D", "will", "will-delay-interval", "60", "-D", "connect", "session-expiry-interval", "600"),
        )
        await until(lambda: "dies" in broker.node.gateway.clients)
        process.kill()
        await process.wait()
        await until(lambda: "dies" in broker.away())
        assert broker.stored() == []
        pass_time(broker.node.gateway, 61)
        assert await watcher.message() == Message("will/dies", b"gone", 1)
