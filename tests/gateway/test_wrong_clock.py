"""MQTT clients while the machine's time of day is wrong, and after a jump was confirmed."""

from __future__ import annotations

import pytest

from penstock.gateway.protocol.properties import Property
from penstock.store.options import DAY_MS, HOUR_MS, MINUTE_MS
from tests.clock import AheadClock
from tests.gateway.brokers import StartBroker
from tests.gateway.lasting_sessions import LASTS, begin, leave
from tests.gateway.moving_time import pass_time
from tests.gateway.wire import Broker, Message
from tests.waiting import until


@pytest.fixture
async def broker(start_broker: StartBroker) -> Broker:
    """A node whose time of day the test can set apart from the time that passes."""
    return await start_broker(clock=AheadClock())


def jump(broker: Broker, ms: int) -> None:
    """Set the time of day, and let the node notice."""
    assert isinstance(broker.clock, AheadClock)
    broker.clock.set_wall(ms)
    broker.node.store.timekeeping.check()
    assert not broker.node.store.timekeeping.is_confirmed


def confirm(broker: Broker) -> None:
    """Confirm the jump of the time of day, as an operator can."""
    store = broker.node.store
    store.timekeeping.accept(store.timekeeping.offset_ms)
    store.commit()
    assert store.timekeeping.is_confirmed


async def test_a_session_whose_client_left_in_the_window_ends_when_its_expiry_has_elapsed(broker: Broker) -> None:
    await leave(await begin(broker, "before", 5))
    assert isinstance(broker.clock, AheadClock)
    broker.clock.advance(MINUTE_MS // 2)
    broker.node.store.timekeeping.check()
    jump(broker, 30 * DAY_MS)
    await leave(await begin(broker, "within", 5))
    confirm(broker)
    pass_time(broker.node.gateway, 0)
    await until(lambda: len(broker.node.sessions) == 1)
    pass_time(broker.node.gateway, 58)
    assert (await broker.connect_5("within", flags=0, about=LASTS)).session_present
    assert not (await broker.connect_5("before", flags=0, about=LASTS)).session_present


async def test_a_held_session_ends_in_the_end(broker: Broker) -> None:
    jump(broker, HOUR_MS)
    await leave(await begin(broker, "within", 5))
    confirm(broker)
    for _ in range(3):
        pass_time(broker.node.gateway, 15)
        broker.node.store.commit()
        assert len(broker.node.sessions) == 1
    pass_time(broker.node.gateway, 20)
    await until(lambda: len(broker.node.sessions) == 0)


async def test_a_message_of_the_window_keeps_its_time_to_live(broker: Broker) -> None:
    reader = await begin(broker, "reader", 5)
    await reader.subscribe(("a", 1), ("kept", 1))
    await leave(reader)
    publisher = await broker.connect_5("publisher")
    jump(broker, 30 * DAY_MS)
    await publisher.publish_with("a", b"x", {Property.MESSAGE_EXPIRY_S: 50}, 1)
    await publisher.publish_with("kept", b"y", {Property.MESSAGE_EXPIRY_S: 50}, 1, retain=True)
    confirm(broker)
    pass_time(broker.node.gateway, 10)
    reader = await broker.connect_5("reader", flags=0, about=LASTS)
    assert reader.session_present
    message, about = await reader.message_with()
    assert message == Message("a", b"x", 1)
    assert about[Property.MESSAGE_EXPIRY_S] in (39, 40)
    assert (await reader.message()).topic == "kept"
    late = await broker.connect_5("late")
    await late.subscribe(("kept", 1))
    assert await late.message() == Message("kept", b"y", 1, retain=True)
    pass_time(broker.node.gateway, 45)
    later = await broker.connect_5("later")
    await later.subscribe(("kept", 1))
    assert await later.messages() == []


async def test_a_delayed_message_comes_after_its_delay_although_the_time_of_day_is_an_hour_back(broker: Broker) -> None:
    client = await broker.connect("client")
    await client.subscribe(("a", 1))
    jump(broker, -HOUR_MS)
    await client.publish("$delayed/10/a", b"x", 1)
    assert await client.messages() == []
    pass_time(broker.node.gateway, 9)
    while broker.node.delayed.fire_due():
        pass
    assert await client.messages() == []
    pass_time(broker.node.gateway, 1.5)
    while broker.node.delayed.fire_due():
        pass
    broker.node.store.commit()
    assert await client.message() == Message("a", b"x", 1)
