"""Shared subscriptions of sessions that outlive the node, when it stops and when it is killed."""

from __future__ import annotations

from penstock.gateway.delivery.shared_subscriptions import CREATED
from penstock.gateway.protocol.encode import encode_acks
from penstock.gateway.protocol.packets import PUBACK, PUBCOMP, PUBREC, PUBREL
from penstock.gateway.protocol.properties import Property
from penstock.pop.core.settings import DEFAULTS
from tests.gateway.lasting_sessions import each_end, end_node, recorded
from tests.gateway.share_members import LASTS, SHARED, bodies, group_of, member, packet_ids, publish
from tests.gateway.wire import Broker, Client5
from tests.waiting import until


async def back(broker: Broker, client_id: str) -> Client5:
    client = await broker.connect_5(client_id, flags=0, about=LASTS)
    assert client.session_present
    return client


@each_end
async def test_messages_wait_for_the_first_member_that_returns(broker: Broker, end: str) -> None:
    for name in ("one", "two"):
        assert await (await member(broker, name, about=LASTS)).drained() == []
        broker.clients[-1].reset()
        await until(lambda name=name: name in broker.away())  # type: ignore[misc]
    await publish(broker, b"1", b"2")
    await end_node(broker, end)
    assert group_of(broker).settings == CREATED
    await publish(broker, b"3", b"4")
    one = await back(broker, "one")
    assert [(await one.message()).body for _ in range(4)] == [b"1", b"2", b"3", b"4"]
    two = await back(broker, "two")
    await publish(broker, b"5", b"6")
    assert [(await one.message()).body, (await two.message()).body] == [b"5", b"6"]


@each_end
async def test_identifiers_and_options_outlive_the_node(broker: Broker, end: str) -> None:
    one = await broker.connect_5("one", about=LASTS)
    assert await one.subscribe_with((SHARED, 1), identifier=5) == [1]
    assert await one.subscribe_with((SHARED, 0), identifier=7) == [0]
    await end_node(broker, end)
    one = await back(broker, "one")
    await publish(broker, b"x")
    ((message, found),) = [await one.message_with()]
    assert (message.qos, found[Property.SUBSCRIPTION_IDENTIFIER]) == (0, [7])


@each_end
async def test_unacknowledged_messages_of_qos_1_go_to_others_when_the_node_is_back(broker: Broker, end: str) -> None:
    one = await member(broker, "one", about=LASTS)
    await publish(broker, b"1", b"2")
    first = [await one.receive() for _ in range(2)]
    await one.send(encode_acks(PUBACK, packet_ids(first[:1])))
    await one.drained()
    await recorded(broker)
    await end_node(broker, end)
    two = await member(broker, "two")
    assert (await two.message()).body == b"2"
    await until(lambda: group_of(broker).in_flight == 0)
    one = await back(broker, "one")
    assert await one.drained() == await two.drained() == []


@each_end
async def test_a_qos_2_message_under_way_is_completed_to_its_client_alone(broker: Broker, end: str) -> None:
    """[MQTT-4.8.2-4]."""
    one = await member(broker, "one", 2, about=LASTS)
    await publish(broker, b"1", b"2", b"3", qos=2)
    first = [await one.receive() for _ in range(3)]
    ids = packet_ids(first)
    await one.send(encode_acks(PUBREC, ids[:1]))
    assert await one.receive() == (PUBREL, ids[0])
    await end_node(broker, end)
    two = await member(broker, "two", 2)
    assert await two.drained() == []
    one = await back(broker, "one")
    assert await one.receive() == (PUBREL, ids[0])
    assert [(packet[3], packet[4], packet[1] >> 3) for packet in [await one.receive(), await one.receive()]] == [
        (ids[1], b"2", 1),
        (ids[2], b"3", 1),
    ]
    await one.send(encode_acks(PUBCOMP, ids[:1]), encode_acks(PUBREC, ids[1:]))
    assert [await one.receive() for _ in range(2)] == [(PUBREL, ids[1]), (PUBREL, ids[2])]
    await until(lambda: group_of(broker).in_flight == 0)
    assert broker.node.pop.counters.acked == 2
    assert await two.drained() == []


@each_end
async def test_a_qos_2_message_under_way_ends_with_the_session(broker: Broker, end: str) -> None:
    """[MQTT-4.8.2-5]."""
    one = await member(broker, "one", 2, about=LASTS)
    await publish(broker, b"x", qos=2)
    assert (await one.receive())[4] == b"x"
    await end_node(broker, end)
    two = await member(broker, "two", 2)
    await broker.connect_5("one")  # A clean start ends the session.
    await until(lambda: group_of(broker).in_flight == 0)
    assert await two.drained() == []
    assert (group_of(broker).visible, group_of(broker).dead_letter_count) == (0, 0)


@each_end
async def test_a_group_of_devices_ends_with_the_last_session_that_has_it(broker: Broker, end: str) -> None:
    one, two = [await member(broker, name, about=LASTS) for name in ("one", "two")]
    await end_node(broker, end)
    one = await back(broker, "one")
    await one.unsubscribe(SHARED)
    assert group_of(broker).settings == CREATED
    await broker.connect_5("two")
    assert list(broker.node.pop.groups) == []
    assert two
    three = await member(broker, "three", about=LASTS)
    broker.node.pop.groups.get_or_create("g", "a/#")  # A service uses the group.
    await three.unsubscribe(SHARED)
    assert group_of(broker).settings == DEFAULTS


async def test_a_group_that_an_operator_deletes_is_recreated_when_a_member_returns(broker: Broker) -> None:
    one = await member(broker, "one", about=LASTS)
    one.reset()
    await until(lambda: "one" in broker.away())
    broker.node.pop.groups.delete("g")
    assert list(broker.node.pop.groups) == []
    one = await back(broker, "one")
    await publish(broker, b"x")
    assert await bodies(one) == [b"x"]
    await one.unsubscribe(SHARED)
    assert list(broker.node.pop.groups) == []
    broker.node.store.commit()
    assert not [queue.filter for queue in broker.node.store.queues if queue.filter.startswith("$")]
