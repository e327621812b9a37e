"""Topics that begin with `$`: the figures of the node below `$SYS/`, and delayed messages."""

from __future__ import annotations

import pytest

from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.protocol.topics import parse_delayed
from penstock.store.accounts import Resource
from penstock.store.errors import LimitExceeded, TopicInvalid
from tests.clock import ManualClock
from tests.gateway.brokers import StartBroker
from tests.gateway.moving_time import pass_time
from tests.gateway.wire import Broker, Message

# --- $SYS -----------------------------------------------------------------------------------------------------------------


async def test_a_subscription_first_gets_all_values_that_it_matches(broker: Broker) -> None:
    client, watcher = await broker.connect("client"), await broker.connect_5("watcher")
    await client.subscribe(("a", 0), ("b", 0))
    await client.publish("a", b"x", 1, retain=True)
    assert (await client.message()).body == b"x"
    await watcher.subscribe_with(("$SYS/broker/clients/+", 0), identifier=5)
    got = await watcher.messages_with()
    values = {message.topic.removeprefix("$SYS/broker/"): message.body for message, _ in got}
    assert values == {
        "clients/connected": b"2",
        "clients/disconnected": b"0",
        "clients/total": b"2",
        "clients/expired": b"0",
    }
    assert all(message.retain and found == {Property.SUBSCRIPTION_IDENTIFIER: [5]} for message, found in got)
    await client.subscribe(("$SYS/#", 1))
    values = {message.topic.removeprefix("$SYS/broker/"): message.body for message in await client.messages()}
    assert values["retained messages/count"] == b"1"
    assert values["publish/messages/received"] == b"1"
    assert values["subscriptions/count"] == b"4"
    assert values["version"].startswith(b"Penstock")
    assert int(values["bytes/received"]) > 0


async def test_changed_values_are_published_every_interval_and_nothing_is_stored(broker: Broker) -> None:
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("$SYS/broker/clients/connected", 0), ("$SYS/broker/version", 0))
    assert len(await watcher.messages()) == 2
    pass_time(broker.node.gateway, 10)
    await watcher.messages()
    await broker.connect("another")
    pass_time(broker.node.gateway, 10)
    assert await watcher.messages() == [Message("$SYS/broker/clients/connected", b"2")]
    pass_time(broker.node.gateway, 10)
    assert await watcher.messages() == []
    await watcher.unsubscribe("$SYS/broker/clients/connected", "$SYS/broker/version")
    await broker.connect("third")
    pass_time(broker.node.gateway, 10)
    assert await watcher.messages() == []
    assert broker.stored() == []


async def test_they_can_be_switched_off(start_broker: StartBroker) -> None:
    broker = await start_broker(sys_interval_s=0)
    watcher = await broker.connect("watcher")
    assert await watcher.subscribe(("$SYS/#", 0)) == [0]
    pass_time(broker.node.gateway, 60)
    assert await watcher.messages() == []


async def test_other_filters_do_not_get_them_and_no_client_publishes_to_them(broker: Broker) -> None:
    """[MQTT-4.7.2-1]."""
    watcher = await broker.connect_5("watcher")
    await watcher.subscribe(("#", 0), ("+/broker/uptime", 0), ("$other/#", 0))
    pass_time(broker.node.gateway, 60)
    assert await watcher.publish_with("$SYS/broker/uptime", b"forged", qos=1) == ReasonCode.TOPIC_NAME_INVALID
    assert await watcher.messages() == []


# --- $delayed ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        (b"$delayed/5/a/b", (b"a/b", 6_000)),
        (b"$delayed/0/a", (b"a", 0)),
        (b"$delayed/60//", (b"/", 61_000)),
        (b"$delayed/007/a", (b"a", 8_000)),
    ],
)
def test_a_delayed_topic_names_its_delay_and_its_destination(topic: bytes, expected: tuple[bytes, int]) -> None:
    assert parse_delayed(topic, 1_000, 60_000) == expected


@pytest.mark.parametrize(
    ("topic", "error"),
    [
        (b"$delayed/", TopicInvalid),
        (b"$delayed/5", TopicInvalid),
        (b"$delayed/5/", TopicInvalid),
        (b"$delayed//a", TopicInvalid),
        (b"$delayed/-1/a", TopicInvalid),
        (b"$delayed/1.5/a", TopicInvalid),
        (b"$delayed/\xd9\xa1/a", TopicInvalid),
        (b"$delayed/61/a", LimitExceeded),
        (b"$delayed/" + b"9" * 4000 + b"/a", LimitExceeded),
    ],
)
def test_an_invalid_delayed_topic_is_refused(topic: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse_delayed(topic, 1_000, 60_000)


def at_time(broker: Broker) -> ManualClock:
    clock = ManualClock(broker.node.store.now_ms())
    broker.node.store.clock = clock
    return clock


def fire(broker: Broker) -> None:
    while broker.node.delayed.fire_due():
        pass
    broker.node.store.commit()


@pytest.mark.parametrize("version", [4, 5])
async def test_a_delayed_message_is_delivered_when_it_is_due_and_not_before(broker: Broker, version: int) -> None:
    clock = at_time(broker)
    client = await (broker.connect_5("client") if version == 5 else broker.connect("client"))
    await client.subscribe(("plant/#", 1))
    await client.publish("$delayed/30/plant/1", b"later", 1)
    await client.publish("plant/1", b"now", 1)
    assert await client.message() == Message("plant/1", b"now", 1)
    clock.advance(29_990)
    fire(broker)
    assert await client.messages() == []
    clock.advance(11)
    fire(broker)
    assert await client.message() == Message("plant/1", b"later", 1)
    assert await client.drained() == []


async def test_a_delayed_message_is_retained_when_it_is_due(broker: Broker) -> None:
    clock = at_time(broker)
    client = await broker.connect("client")
    await client.publish("$delayed/30/plant/1", b"later", 1, retain=True)
    await client.subscribe(("plant/1", 0))
    assert await client.messages() == []
    clock.advance(30_001)
    fire(broker)
    assert await client.messages() == [Message("plant/1", b"later")]
    again = await broker.connect("again")
    await again.subscribe(("plant/+", 0))
    assert await again.messages() == [Message("plant/1", b"later", retain=True)]


async def test_the_expiry_of_a_delayed_message_counts_from_its_due_time(broker: Broker) -> None:
    clock = at_time(broker)
    client = await broker.connect_5("client")
    await client.subscribe(("a", 1))
    await client.publish_with("$delayed/30/a", b"x", {Property.MESSAGE_EXPIRY_S: 10}, 1)
    clock.advance(30_001)
    fire(broker)
    assert await client.message_with() == (Message("a", b"x", 1), {Property.MESSAGE_EXPIRY_S: 10})


async def test_limits_of_delayed_messages_are_reported(start_broker: StartBroker) -> None:
    broker = await start_broker()
    broker.node.store.ledger.limit(Resource.DELAYED, 2, "timer.pending_max")
    client = await broker.connect_5("client")
    for _ in range(2):
        assert await client.publish_with("$delayed/30/a", b"x", qos=1) == 0
    assert await client.publish_with("$delayed/30/a", b"x", qos=1) == ReasonCode.QUOTA_EXCEEDED
    assert await client.publish_with("$delayed/30/a", b"x", qos=2) == ReasonCode.QUOTA_EXCEEDED
    assert await client.publish_with("$delayed/99999999999/a", b"x", qos=1) == ReasonCode.QUOTA_EXCEEDED
    old = await broker.connect("old")
    await old.send(encode_publish(b"$delayed/30/a", b"x", 1, packet_id=1))
    assert await old.ended() == []
    assert broker.closed(ReasonCode.QUOTA_EXCEEDED) == 1
