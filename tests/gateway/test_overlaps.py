"""`mqtt.overlapping = "once"`: a client of MQTT 3.1.1 gets one copy of a message that several of its subscriptions match."""

from __future__ import annotations

import pytest

from penstock.gateway.delivery import encoding, fanout
from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.packets import PUBACK, PUBLISH
from penstock.gateway.protocol.properties import Property
from penstock.store.options import KIB
from tests.gateway.brokers import StartBroker
from tests.gateway.lasting_sessions import begin, leave, recorded, resume
from tests.gateway.packet_cases import unsubscribe
from tests.gateway.wire import Broker, Client, Message, message_of


@pytest.fixture
async def broker(start_broker: StartBroker) -> Broker:
    return await start_broker(overlapping="once")


async def test_one_copy_comes_at_the_highest_qos_of_the_subscriptions_that_match(broker: Broker) -> None:
    """3.1.1:[MQTT-3.3.5-1]."""
    client, publisher = await broker.connect("client"), await broker.connect("publisher")
    assert await client.subscribe(("a/#", 0), ("a/+", 2), ("a/b", 1), ("other", 2)) == [0, 2, 1, 2]
    messages = [Message("a/b", b"%d" % number, 2) for number in range(20)]
    for message in messages:
        await publisher.publish(message.topic, message.body, 2)
    await publisher.publish("a", b"x", 2)
    assert await client.messages() == [*messages, Message("a", b"x", 0)]


async def test_clients_of_5_get_the_same_copy_with_either_value(broker: Broker) -> None:
    client = await broker.connect_5("client")
    await client.subscribe_with(("a/#", 0), identifier=1)
    await client.subscribe_with(("a/b", 1), identifier=2)
    await client.publish("a/b", b"x", 1)
    assert await client.messages_with() == [(Message("a/b", b"x", 1), {Property.SUBSCRIPTION_IDENTIFIER: [1, 2]})]


async def test_subscriptions_that_no_longer_overlap_go_on_by_themselves(broker: Broker) -> None:
    client, publisher = await broker.connect("client"), await broker.connect("publisher")
    await client.subscribe(("a/+", 2), ("a/b", 1))
    await client.unsubscribe("a/+")
    await publisher.publish("a/b", b"x", 2)
    assert await client.messages() == [Message("a/b", b"x", 1)]
    (left,) = broker.connection("client").subscriptions.by_filter.values()
    assert not left.is_own


async def test_a_message_that_waits_for_a_client_comes_once(broker: Broker) -> None:
    client, publisher = await begin(broker, "client", 4), await broker.connect("publisher")
    await client.subscribe(("a/#", 1), ("a/b", 1))
    await leave(client)
    await publisher.publish("a/b", b"x", 1)
    again = await resume(broker, "client", 4)
    assert await again.messages() == [Message("a/b", b"x", 1)]


async def test_a_message_that_was_not_acknowledged_comes_once_after_a_kill(broker: Broker) -> None:
    client, publisher = await begin(broker, "client", 4), await broker.connect("publisher")
    await client.subscribe(("a/#", 0), ("a/b", 1))
    await recorded(broker)
    await publisher.publish("a/b", b"x", 1)
    assert message_of(await client.receive()) == Message("a/b", b"x", 1)
    await broker.kill()
    again = await resume(broker, "client", 4)
    assert await again.messages() == [Message("a/b", b"x", 1)]


async def test_what_a_subscription_has_left_comes_once_when_it_ends(start_broker: StartBroker) -> None:
    """The oldest is behind the others, which have skipped what it was to send."""
    broker = await start_broker(overlapping="once", send_buffer_bytes=16 * KIB)
    client, publisher = await broker.connect("client"), await broker.connect("publisher")
    await client.subscribe(("a/#", 1), ("a/b", 1))
    broker.limit_send_buffer("client")
    bodies = [b"%08d" % number + bytes(4 * KIB) for number in range(200)]
    await publisher.send(*(encode_publish(b"a/b", body, 1, packet_id=number) for number, body in enumerate(bodies, 1)))
    for _ in bodies:
        await publisher.expect(PUBACK)
    await client.send(unsubscribe(2, b"a/#"))
    assert await take_all(broker, client) == bodies


async def take_all(broker: Broker, client: Client) -> list[bytes]:
    """Acknowledge all messages that the client still gets; return their bodies."""
    connection = broker.connection("client")
    got: list[bytes] = []
    while True:
        packets = [packet for packet in await client.drained() if packet[0] == PUBLISH]
        if not packets and not connection.outbox.lagging and not connection.session.inflight.slots:
            return got
        got += [packet[4] for packet in packets]
        await client.send(encode_acks(PUBACK, [packet[3] for packet in packets]))


@pytest.mark.parametrize(("overlapping", "encoded"), [("each", 2), ("once", 0)])
async def test_only_the_option_takes_a_client_from_the_shared_path(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, overlapping: str, encoded: int
) -> None:
    broker = await start_broker(overlapping=overlapping)
    client, publisher = await broker.connect("client"), await broker.connect("publisher")
    await client.subscribe(("a/#", 0), ("a/b", 0))
    calls: list[object] = []

    def counted(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        return encoding.encode_batch(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fanout, "encode_batch", counted)
    await publisher.publish("a/b", b"x", 1)
    assert len(await client.messages()) == max(encoded, 1)
    assert len(calls) == encoded
