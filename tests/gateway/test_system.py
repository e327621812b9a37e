"""Topics that begin with `$`: the figures of the node below `$SYS/`, and delayed messages."""

from __future__ import annotations

from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import ReasonCode
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


async def test_a_new_subscription_does_not_get_its_first_values_twice(broker: Broker) -> None:
    """A turn that came after the SUBACK used to publish all of them again, as the first one or the first for long."""
    early = await broker.connect("early")
    await early.subscribe(("$SYS/broker/version", 0))
    pass_time(broker.node.gateway, 1)
    assert len(await early.messages()) == 1
    await early.unsubscribe("$SYS/broker/version")
    pass_time(broker.node.gateway, 15)
    await early.subscribe(("$SYS/broker/version", 0))
    pass_time(broker.node.gateway, 1)
    assert [message.retain for message in await early.messages()] == [True]


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
