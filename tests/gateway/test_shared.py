"""Shared subscriptions, by the clauses of MQTT 5.0, 4.8.2, and as POP groups."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from amqtt.contexts import Action
from amqtt.plugins.base import BaseTopicPlugin

from penstock import Client as PopClient
from penstock.gateway.delivery.share_filter import group_of_share
from penstock.gateway.delivery.share_group import ASKED_MAX, REFUSERS_MAX
from penstock.gateway.delivery.shared_subscription import SharedSubscription
from penstock.gateway.delivery.shared_subscriptions import CREATED
from penstock.gateway.protocol.encode import encode_ack, encode_acks, encode_publish
from penstock.gateway.protocol.packets import NO_LOCAL, PUBACK, PUBCOMP, PUBREC, PUBREL, RETAIN_AS_PUBLISHED
from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import SUBACK_FAILURE, ReasonCode
from penstock.pop.core.deadletters import Reason
from penstock.pop.core.settings import DEFAULTS, ConsumerGroupSettings
from penstock.store.errors import TopicInvalid
from penstock.store.record import CONSUMED, EXPIRED, LAST_MEMBER_LEFT, Kind
from penstock.store.space.accounts import Resource
from tests.clock import AheadClock
from tests.depth import DEPTH
from tests.gateway.brokers import StartBroker
from tests.gateway.logins import plugins
from tests.gateway.other_clients import paho, properties_of, run_mosquitto
from tests.gateway.scripted_plugins import Script
from tests.gateway.share_members import LASTS, SHARED, bodies, expire_deliveries, group_of, member, packet_ids, publish
from tests.gateway.wire import ANSWER_S_MAX, Broker, Client, Client5, Message
from tests.waiting import until

UNSUBSCRIBE = b"\xa2\x11\0\1\0\0\x0c" + SHARED.encode()

# --- each message to one ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_each_message_goes_to_one_member_and_each_member_gets_as_many(broker: Broker, qos: int) -> None:
    members: list[Client] = [await member(broker, "one", qos), await member(broker, "two", qos), await broker.connect("three")]
    assert await members[2].subscribe((SHARED, qos)) == [qos]  # This is a client of 3.1.1.
    await publish(broker, *(b"%d" % n for n in range(30)), qos=qos)
    got = []
    for client in members:
        mine = [await client.message() for _ in range(10)]
        assert mine == sorted(mine, key=lambda message: int(message.body))
        assert {message.qos for message in mine} == {qos}
        assert await client.drained() == []
        got += [int(message.body) for message in mine]
    assert sorted(got) == list(range(30))
    await until(lambda: group_of(broker).in_flight == 0)
    assert broker.node.pop.counters.acked == 30


@pytest.mark.parametrize("qos", [0, 1])
async def test_an_uneven_rest_is_dealt_evenly_in_the_long_run(broker: Broker, qos: int) -> None:
    members = [await member(broker, f"member-{n}", qos) for n in range(3)]
    publisher = await broker.connect("publisher")
    for _ in range(30):
        await publisher.send(*(encode_publish(b"a/b", b"x") for _ in range(10)))
        await publisher.drained()
    counts = [len(await client.drained()) for client in members]
    assert sum(counts) == 300
    assert max(counts) - min(counts) <= 1


async def test_a_burst_is_dealt_out_evenly_and_each_part_is_in_order(broker: Broker) -> None:
    members = [await member(broker, f"member-{n}") for n in range(4)]
    publisher = await broker.connect("publisher")
    await publisher.send(*(encode_publish(b"a/b", b"%d" % n, 1, packet_id=1 + n) for n in range(400)))
    for client in members:
        got = [int((await client.message()).body) for _ in range(100)]
        assert got == sorted(got)
        assert await client.drained() == []


async def test_the_granted_qos_of_each_member_holds(broker: Broker) -> None:  # [MQTT-4.8.2-3]
    members = [await member(broker, f"member-{n}", n) for n in range(3)]
    await publish(broker, b"0", b"1", b"2", qos=2)
    assert [(await client.message()).qos for client in members] == [0, 1, 2]
    await publish(broker, b"3", b"4", b"5", qos=1)
    assert [(await client.message()).qos for client in members] == [0, 1, 1]


async def test_each_pair_of_name_and_filter_is_a_group_of_its_own(broker: Broker) -> None:
    names = ("$share/g/a/+", "$share/g/a/b", "$share/h/a/b")
    clients = [await member(broker, f"client-{n}", 1, name) for n, name in enumerate(names)]
    both = await broker.connect("both")
    assert await both.subscribe(*((name, 1) for name in names)) == [1, 1, 1]
    await publish(broker, b"1", b"2")
    got = Counter([body for client in (*clients, both) for body in await bodies(client)])
    assert got == {b"1": 3, b"2": 3}
    assert sorted(Counter((group.name, group.filter) for group in broker.node.pop.groups)) == [
        ("g", "a/+"),
        ("g", "a/b"),
        ("h", "a/b"),
    ]


async def test_a_shared_and_a_plain_subscription_of_one_client_deliver_both(broker: Broker) -> None:
    client = await broker.connect_5("client")
    assert await client.subscribe_with((SHARED, 1), identifier=7) == [1]
    assert await client.subscribe_with(("a/#", 0), ("a/b", 1), identifier=8) == [0, 1]
    await publish(broker, b"x")
    got = await client.messages_with()
    assert sorted(found[Property.SUBSCRIPTION_IDENTIFIER] for _, found in got) == [[7], [8, 8]]


async def test_messages_wait_for_the_first_member_with_room(broker: Broker) -> None:
    narrow = {Property.RECEIVE_MAXIMUM: 2}
    one, two = [await member(broker, name, about=narrow) for name in ("one", "two")]
    await publish(broker, *(b"%d" % n for n in range(8)))
    ones, twos = [await client.drained() for client in (one, two)]
    assert len(ones) == len(twos) == 2
    await two.send(encode_acks(PUBACK, packet_ids(twos)))
    assert await bodies(two) == [b"4", b"5"]
    assert await one.drained() == []
    assert group_of(broker).in_flight == 4


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_member_that_does_not_read_keeps_nothing_from_the_others(start_broker: StartBroker, qos: int) -> None:
    broker = await start_broker(send_buffer_bytes=16 * 1024)
    slow, fast = [await member(broker, name, qos) for name in ("slow", "fast")]
    broker.limit_send_buffer("slow")
    slow.stop_reading()
    publisher = await broker.connect("publisher")
    got = 0
    for first in range(0, 200, 10):
        await publisher.send(*(encode_publish(b"a/b", b"%d " % n + bytes(16 * 1024)) for n in range(first, first + 10)))
        await publisher.drained()
        await until(lambda: group_of(broker).visible == 0)
        taken = await fast.drained()
        got += len(taken)
    assert got > 150
    assert broker.unsent_bytes("slow") < 512 * 1024
    slow.go_on_reading()
    assert got + len(await slow.drained()) == 200


async def test_messages_wait_while_all_members_are_away(broker: Broker) -> None:
    one = await member(broker, "one", about=LASTS)
    one.reset()
    await until(lambda: "one" in broker.away())
    await publish(broker, b"1", b"2")
    assert group_of(broker).visible == 2
    one = await broker.connect_5("one", flags=0, about=LASTS)
    assert one.session_present
    assert [message.body for message in (await one.message(), await one.message())] == [b"1", b"2"]


async def test_one_message_checks_the_room_of_few_members_however_many_wait(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [await member(broker, f"member-{n}") for n in range(200)]
    asked = 0
    room: Callable[[SharedSubscription], int] = SharedSubscription.__dict__["room"].fget

    def counted(subscription: SharedSubscription) -> int:
        nonlocal asked
        asked += 1
        return room(subscription)

    monkeypatch.setattr(SharedSubscription, "room", property(counted))
    await publish(broker, b"x")
    await until(lambda: group_of(broker).in_flight == 1)
    assert asked <= 2 * ASKED_MAX + 1
    got = [await bodies(client) for client in members[:3]]
    assert got == [[b"x"], [], []]


# --- QoS 1: a connection that ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("about", [{}, LASTS], ids=["clean", "lasting"])
async def test_unacknowledged_messages_of_a_lost_connection_go_to_another_member_at_once(
    broker: Broker, about: dict[Property, int]
) -> None:
    one = await member(broker, "one", about=about)
    await publish(broker, b"1", b"2", b"3")
    first = await one.drained()
    assert len(first) == 3
    await one.send(encode_acks(PUBACK, [first[1][3]]))
    await one.drained()
    two = await member(broker, "two")
    one.reset()
    for body in (b"1", b"3"):  # one after the other, because one of them may have ended the client
        got = await two.receive()
        assert (got[4], got[1] >> 3) == (body, 0), "to this client the message is new, so DUP is not set"
        await two.send(encode_acks(PUBACK, packet_ids([got])))
    await until(lambda: group_of(broker).in_flight == 0)
    assert broker.node.gateway.counters.deliveries_returned == 2
    if about:
        one = await broker.connect_5("one", flags=0, about=about)
        assert one.session_present
        assert await one.drained() == []


async def test_a_member_that_does_not_acknowledge_in_time_loses_the_message(start_broker: StartBroker) -> None:
    broker = await start_broker(share_ack_timeout_ms=60_000, inflight_max=1, clock=AheadClock())
    one = await member(broker, "one")
    await publish(broker, b"x")
    (packet,) = await one.drained()
    two = await member(broker, "two")
    expire_deliveries(broker, 60_000)
    assert (await two.message()).body == b"x"
    await until(lambda: group_of(broker).in_flight == 0)
    assert broker.node.pop.counters.revived == 1
    # The late PUBACK is accepted and frees the packet id, so there is room for one message again.
    two.reset()
    await until(lambda: len(broker.node.gateway.clients) <= 2)
    await one.send(encode_acks(PUBACK, packet_ids([packet])))
    await publish(broker, b"y")
    assert (await one.message()).body == b"y"
    await until(lambda: broker.node.pop.counters.acked == 2)


async def test_deliveries_under_way_at_an_unsubscribe_are_completed(broker: Broker) -> None:  # [MQTT-3.10.4-3]
    one, two = [await member(broker, name) for name in ("one", "two")]
    await publish(broker, b"1", b"2", b"3")
    first = await one.drained()
    await one.unsubscribe(SHARED)
    await publish(broker, b"4")
    await one.send(encode_acks(PUBACK, packet_ids(first)))
    assert await one.drained() == []
    assert await bodies(two) == [b"2", b"4"]
    assert group_of(broker).in_flight == 2


# --- QoS 2 --------------------------------------------------------------------------------------------------------------


async def test_a_qos_2_message_under_way_is_completed_to_its_client_alone(broker: Broker) -> None:  # [MQTT-4.8.2-4]
    one = await member(broker, "one", 2, about=LASTS)
    await publish(broker, b"x", qos=2)
    packet = await one.receive()
    assert packet[1] >> 1 & 3 == 2
    two = await member(broker, "two", 2)
    one.reset()
    await until(lambda: "one" in broker.away())
    assert await two.drained() == []
    assert group_of(broker).in_flight == 1
    one = await broker.connect_5("one", flags=0, about=LASTS)
    again = await one.receive()
    assert (again[3], again[4], again[1] >> 3) == (packet[3], b"x", 1)  # The packet has the flag DUP.
    await one.send(encode_acks(PUBREC, [packet[3]]))
    assert await one.receive() == (PUBREL, packet[3])
    assert group_of(broker).in_flight == 0  # The client has the message.
    one.reset()
    await until(lambda: "one" in broker.away())
    one = await broker.connect_5("one", flags=0, about=LASTS)
    assert await one.receive() == (PUBREL, packet[3])
    await one.send(encode_acks(PUBCOMP, [packet[3]]))
    assert await one.drained() == await two.drained() == []


async def test_a_qos_2_message_stays_with_its_client_beyond_the_ack_timeout(
    start_broker: StartBroker,
) -> None:  # [MQTT-4.8.2-4]
    broker = await start_broker(share_ack_timeout_ms=60_000, inflight_max=2, clock=AheadClock())
    one = await member(broker, "one", 2, about=LASTS)
    await publish(broker, b"2", qos=2)
    await publish(broker, b"1", qos=1)
    assert [(await one.receive())[4] for _ in range(2)] == [b"2", b"1"]
    two = await member(broker, "two", 2)
    expire_deliveries(broker, 60_000)
    assert (await two.message()).body == b"1"  # Its ack timeout has passed. The other message was delivered before it.
    assert await two.drained() == []
    assert group_of(broker).in_flight == 1
    one.reset()
    one = await broker.connect_5("one", flags=0, about=LASTS)
    assert (await one.message()).body == b"2"
    await until(lambda: group_of(broker).in_flight == 0)


@pytest.mark.parametrize("about", [{}, LASTS], ids=["clean", "lasting"])
async def test_a_qos_2_message_under_way_ends_with_the_session(broker: Broker, about: dict[Property, int]) -> None:
    one = await member(broker, "one", 2, about=about)
    two = await member(broker, "two", 2)
    await publish(broker, b"x", qos=2)
    assert (await one.receive())[4] == b"x"
    one.reset()
    if about:
        await until(lambda: "one" in broker.away())
        await broker.connect_5("one")  # A clean start ends the session.
    await until(lambda: group_of(broker).in_flight == 0)
    assert await two.drained() == []  # [MQTT-4.8.2-5]
    assert (group_of(broker).visible, group_of(broker).dead_letter_count) == (0, 0)


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("qos", "kind"), [(1, PUBACK), (2, PUBREC)])
async def test_a_refused_message_becomes_a_dead_letter_and_goes_to_no_other_member(
    broker: Broker, qos: int, kind: int
) -> None:  # [MQTT-4.8.2-6]
    one, two = [await member(broker, name, qos) for name in ("one", "two")]
    await publish(broker, b"x", qos=qos)
    (packet,) = await one.drained()
    await one.send(encode_ack(kind, packet[3], ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR))
    await until(lambda: group_of(broker).dead_letter_count == 1)
    assert await one.drained() == await two.drained() == []
    assert group_of(broker).in_flight == 0
    (letter,) = broker.node.pop.dead_letters.list("g")
    assert (letter.reason, letter.attempts) == (Reason.FORWARDED, 1)


# --- subscribing --------------------------------------------------------------------------------------------------------


async def test_an_invalid_share_name_is_refused_without_harm_to_other_filters(broker: Broker) -> None:
    client, older = await broker.connect_5("five"), await broker.connect("four")
    for name in (
        "$share//a",  # [MQTT-4.8.2-1]
        "$share/",
        "$share/g",  # [MQTT-4.8.2-2]
        "$share/g/",
        "$share/+/a",
        "$share/#",
        "$share/g/$SYS/#",
        "$share/g/$share/h/a",
        "$share/g/$dlq/h",
        "$share/a$b/a",
        "$share/ g/a",
        "$share/" + "g" * 256 + "/a",
    ):
        assert await client.subscribe((name, 1), ("b", 1)) == [ReasonCode.TOPIC_FILTER_INVALID, 1], name
        assert await older.subscribe((name, 1), ("b", 1)) == [SUBACK_FAILURE, 1], name
    assert list(broker.node.pop.groups) == []


async def test_no_local_is_a_protocol_error(broker: Broker) -> None:  # [MQTT-3.8.3-4]
    client = await broker.connect_5("client")
    with pytest.raises(AssertionError, match="closed before"):
        await client.subscribe((SHARED, NO_LOCAL))
    assert broker.closed(ReasonCode.PROTOCOL_ERROR) == 1


async def test_retained_messages_are_not_sent_and_retain_as_published_holds(broker: Broker) -> None:  # 3.3.1.3
    publisher = await broker.connect_5("publisher")
    await publisher.publish("a/b", b"old", 1, retain=True)
    client = await broker.connect_5("client")
    assert await client.subscribe_with((SHARED, 1 | RETAIN_AS_PUBLISHED), identifier=3) == [1]
    assert await client.drained() == []
    await publisher.publish("a/b", b"new", 1, retain=True)
    await publisher.publish("a/b", b"plain", 1)
    got = await client.messages_with()
    assert [message for message, _ in got] == [Message("a/b", b"new", 1, retain=True), Message("a/b", b"plain", 1)]
    assert [found[Property.SUBSCRIPTION_IDENTIFIER] for _, found in got] == [[3], [3]]


async def test_a_second_subscribe_replaces_the_first_and_loses_nothing(broker: Broker) -> None:
    client = await broker.connect_5("client", about={Property.RECEIVE_MAXIMUM: 1})
    assert await client.subscribe_with((SHARED, 1), identifier=1) == [1]
    await publish(broker, b"1", b"2")
    (first,) = await client.drained()
    assert await client.subscribe_with((SHARED, 0), identifier=2) == [0]
    assert [
        (message.body, message.qos, found[Property.SUBSCRIPTION_IDENTIFIER]) for message, found in await client.messages_with()
    ] == [(b"2", 0, [2])]
    await client.send(encode_acks(PUBACK, packet_ids([first])))
    await until(lambda: group_of(broker).in_flight == 0)
    assert broker.node.gateway.counters.subscriptions_shared == 1


async def test_they_can_be_switched_off(start_broker: StartBroker) -> None:
    broker = await start_broker(shared_max=0)
    client = await broker.connect_5("five")
    assert client.limits[Property.SHARED_SUBSCRIPTION_AVAILABLE] == 0
    assert await client.subscribe((SHARED, 1)) == [ReasonCode.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED]
    assert await (await broker.connect("four")).subscribe((SHARED, 1)) == [SUBACK_FAILURE]


async def test_the_limit_of_shared_filters_is_reported(start_broker: StartBroker) -> None:
    broker = await start_broker(shared_max=2, subscriptions_max=3)
    client = await broker.connect_5("client")
    names = ("$share/1/a", "$share/2/a", "$share/3/a", "b", "c", "$share/1/a")
    codes = [code for name in names for code in await client.subscribe((name, 1))]
    assert codes == [1, 1, ReasonCode.QUOTA_EXCEEDED, 1, ReasonCode.QUOTA_EXCEEDED, 1]


async def test_the_limit_of_groups_holds_for_devices_too(broker: Broker) -> None:
    broker.node.store.ledger.limit(Resource.GROUPS, 1, "raise pop.groups_max")
    client = await broker.connect_5("client")
    assert await client.subscribe(("$share/1/a", 1), ("$share/2/a", 1)) == [1, ReasonCode.QUOTA_EXCEEDED]
    await client.unsubscribe("$share/1/a")
    assert await client.subscribe(("$share/2/a", 1)) == [1]


async def test_members_get_their_messages_at_the_limit_of_waiting_pops(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    core = broker.node.pop
    monkeypatch.setattr(core.polls, "_options", replace(broker.node.config.pop, waiters_max=1))
    async with PopClient(str(broker.node.grpc)) as client:
        waiting = asyncio.create_task(client.pop("b", group="others", wait=50.0))
        await until(lambda: core.waiting == 1)
        one = await member(broker, "one")
        await publish(broker, b"x")
        assert (await one.message()).body == b"x"
        await publish(broker, b"y", topic="b")
        assert [message.body for message in await waiting] == [b"y"]


async def test_each_member_has_topic_aliases_of_its_own(start_broker: StartBroker) -> None:
    broker = await start_broker(sent_topic_alias_max=64)
    members = [await member(broker, name, about={Property.TOPIC_ALIAS_MAXIMUM: 4}) for name in ("one", "two")]
    await publish(broker, *(b"%d" % n for n in range(4)))
    for client in members:
        assert [(message.topic, found[Property.TOPIC_ALIAS]) for message, found in await client.messages_with()] == [
            ("a/b", 1),
            ("", 1),
        ]


# --- the group ----------------------------------------------------------------------------------------------------------


async def test_a_group_created_for_devices_is_marked_and_ends_with_the_last_of_them(broker: Broker) -> None:
    one, two = [await member(broker, name) for name in ("one", "two")]
    assert group_of(broker).settings == CREATED
    async with PopClient(str(broker.node.grpc)) as client:
        (told,) = await client.groups.describe()
        assert (told.group, told.filter, told.settings.shared) == ("g", "a/#", True)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "group", "list", "--target", str(broker.node.grpc)), stdout=asyncio.subprocess.PIPE
    )
    listed = (await process.communicate())[0].decode().splitlines()
    assert listed[1].split()[:3] == ["g", "a/#", "shared"]
    await one.unsubscribe(SHARED)
    assert len(list(broker.node.pop.groups)) == 1
    two.reset()
    await until(lambda: not list(broker.node.pop.groups))
    await until(lambda: set(broker.held_resources().values()) <= {0, 1})
    assert len(broker.node.gateway.shared) == broker.node.gateway.counters.subscriptions_shared == 0


@pytest.mark.parametrize(
    ("leaving", "qos", "answer"), [(b"\xe0\0", 1, PUBACK), (UNSUBSCRIBE, 2, PUBREC)], ids=["disconnect", "unsubscribe"]
)
async def test_what_comes_together_with_the_end_of_the_last_member_is_acknowledged_before_the_group_ends(
    broker: Broker, leaving: bytes, qos: int, answer: int
) -> None:
    one = await member(broker, "one", qos)
    await publish(broker, b"1", b"2", qos=qos)
    ids = packet_ids(await one.drained())
    assert len(ids) == 2
    await one.send(encode_acks(answer, ids) + leaving)
    await until(lambda: not list(broker.node.pop.groups))
    # The group is gone before the record of its end is written.
    await until(lambda: Kind.GROUP_DELETED in [record.kind for record in broker.node.store.log.scan(0)])
    kinds = [record.kind for record in broker.node.store.log.scan(0)]
    assert Kind.POP_ACK in kinds
    assert kinds.index(Kind.POP_ACK) < kinds.index(Kind.GROUP_DELETED)
    flags = {record.kind: record.flags for record in broker.node.store.log.scan(0)}
    assert (flags[Kind.POP_ACK], flags[Kind.GROUP_DELETED]) == (CONSUMED, LAST_MEMBER_LEFT)


async def test_an_existing_group_is_joined_and_stays(broker: Broker) -> None:
    settings = ConsumerGroupSettings(attempts_max=3)
    await publish(broker, b"old")
    broker.node.pop.groups.create("g", "a/#", "earliest", settings)
    one = await member(broker, "one")
    assert (await one.message()).body == b"old"
    await one.unsubscribe(SHARED)
    assert group_of(broker).settings == settings


@pytest.mark.parametrize("by", ["consuming", "creating"])
async def test_a_group_that_a_service_uses_outlasts_the_devices(broker: Broker, by: str) -> None:
    one = await member(broker, "one")
    async with PopClient(str(broker.node.grpc)) as client:
        if by == "consuming":
            assert await client.pop("a/#", group="g", wait=0.0) == []
        else:
            await client.groups.create("g", "a/#")
        one.reset()
        await until(lambda: not broker.node.gateway.clients)
        assert group_of(broker).settings == DEFAULTS
        await publish(broker, b"x")
        (message,) = await client.pop("a/#", group="g", wait=1.0)
        await message.ack()


async def test_a_group_that_an_operator_deletes_is_recreated_for_its_members(broker: Broker) -> None:
    one = await member(broker, "one")
    await publish(broker, b"1")
    assert await bodies(one) == [b"1"]
    broker.node.pop.groups.delete("g")
    assert group_of(broker).settings == CREATED
    await publish(broker, b"2", b"3")
    got = await one.drained()
    assert [packet[4] for packet in got] == [b"2", b"3"]
    await one.send(encode_acks(PUBACK, [1, *packet_ids(got)]))  # The acknowledgement for the deleted group is accepted.
    await until(lambda: group_of(broker).in_flight == 0)


async def test_a_paused_group_delivers_after_it_is_resumed(broker: Broker) -> None:
    one = await member(broker, "one")
    broker.node.pop.groups.pause("g")
    await publish(broker, b"x")
    assert await one.drained() == []
    broker.node.pop.groups.resume("g")
    assert (await one.message()).body == b"x"


async def test_members_of_a_fifo_group_get_a_topic_one_message_at_a_time(broker: Broker) -> None:
    broker.node.pop.groups.create("g", "a/#", "latest", ConsumerGroupSettings(fifo=True))
    members = [await member(broker, name) for name in ("one", "two")]
    publisher = await broker.connect("publisher")
    for n in range(20):
        await publisher.publish(f"a/{n % 2}", b"%d" % n, 1)
    got: dict[str, list[int]] = {"a/0": [], "a/1": []}
    for _ in range(10):
        packets = [(client, packet) for client in members for packet in await client.drained()]
        assert len(packets) == 2
        for client, packet in packets:
            got[packet[2].decode()].append(int(packet[4]))
            await client.send(encode_acks(PUBACK, [packet[3]]))
        await until(lambda: group_of(broker).in_flight == 2 or len(got["a/1"]) == 10)
    assert got == {"a/0": list(range(0, 20, 2)), "a/1": list(range(1, 20, 2))}


async def test_a_group_of_devices_left_by_a_crash_ends_at_the_next_start(broker: Broker) -> None:
    broker.node.pop.groups.add("g", "a/#", "latest", CREATED)  # As if the node had been killed after the sessions ended.
    broker.node.pop.groups.add("operators", "a/#", "latest", DEFAULTS)
    await broker.restart()
    assert [group.name for group in broker.node.pop.groups] == ["operators"]


async def test_devices_and_a_service_share_one_load(broker: Broker) -> None:
    count = 150
    devices = [await member(broker, name, 1, "$share/workers/a/#") for name in ("one", "two")]
    got: Counter[bytes] = Counter()
    by_whom: Counter[str] = Counter()

    async def device(client: Client5, name: str) -> None:
        while True:
            got[(await client.message()).body] += 1
            by_whom[name] += 1

    async def service(client: PopClient) -> None:
        async for message in client.consume("a/#", group="workers"):
            got[message.body] += 1
            by_whom["service"] += 1
            await message.ack()

    async with PopClient(str(broker.node.grpc)) as client:
        tasks = [asyncio.create_task(device(each, f"device-{n}")) for n, each in enumerate(devices)]
        tasks.append(asyncio.create_task(service(client)))
        await until(lambda: len(group_of(broker, "workers").polls) == 2)
        publisher = await broker.connect("publisher")
        for n in range(count):
            await publisher.publish("a/b", b"%d" % n, 1)
        await until(lambda: len(got) == count)
        await until(lambda: group_of(broker, "workers").in_flight == 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert set(got.values()) == {1}
    assert by_whom.keys() == {"device-0", "device-1", "service"}


async def test_members_that_vanish_lose_nothing(start_broker: StartBroker) -> None:
    """Members end their connections with messages unacknowledged, while a client publishes."""
    broker = await start_broker(clock=AheadClock())
    count, members_count = 800 * DEPTH, 4
    chance = random.Random(1)
    got: set[bytes] = set()

    async def sharing(number: int) -> None:
        life = 0
        while len(got) < count:
            life += 1
            client = await member(broker, f"member-{number}-{life}", about={Property.RECEIVE_MAXIMUM: 50})
            for _ in range(chance.randrange(1, 200)):
                packet = await client.receive()
                if chance.random() < 0.02:
                    break  # The member vanishes; this message and later ones are unacknowledged.
                got.add(packet[4])
                await client.send(encode_acks(PUBACK, [packet[3]]))
            client.reset()

    settings = ConsumerGroupSettings(backoff=(1,))  # A message that its member had alone when it vanished waits for so long.
    broker.node.pop.groups.add("g", "a/#", "latest", settings)
    (await member(broker, "away", about=LASTS)).reset()  # So the group exists even when all members have vanished.
    await until(lambda: "away" in broker.away())
    tasks = [asyncio.create_task(sharing(number)) for number in range(members_count)]
    publisher = await broker.connect("publisher")
    for first in range(0, count, 50):
        await publisher.send(*(encode_publish(b"a/b", b"%d" % n, 1, packet_id=1 + n) for n in range(first, first + 50)))
        for _ in range(50):
            await publisher.expect(PUBACK)
    try:
        await until(lambda: len(got) == count)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert got == {b"%d" % n for n in range(count)}
    assert broker.node.gateway.counters.deliveries_returned > 0
    assert group_of(broker).dead_letter_count == 0


def test_a_shared_filter_is_split_into_name_and_filter() -> None:
    assert group_of_share("$share/g/a/+/#") == ("g", "a/+/#")
    assert group_of_share("$share/g//a") == ("g", "/a")
    with pytest.raises(TopicInvalid, match=r"MQTT-4\.8\.2-2"):
        group_of_share("$share/g")


# --- who may have what --------------------------------------------------------------------------------------------------


class Jail(BaseTopicPlugin):  # type: ignore[misc]
    """Forbids messages of `a/secret` to clients whose name begins with "jailed"."""

    async def topic_filtering(
        self, *, session: Any = None, topic: str | None = None, action: Action | None = None
    ) -> bool | None:
        return not (action == Action.RECEIVE and topic == "a/secret" and session.client_id.startswith("jailed"))


JAIL = "tests.gateway.test_shared.Jail"


async def test_the_plugins_decide_about_the_filter_without_the_share_name(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics"))
    script.topics["subscribe", "secret/#"] = False
    client = await broker.connect_5("five")
    assert await client.subscribe(("$share/g/secret/#", 1), (SHARED, 1)) == [ReasonCode.NOT_AUTHORIZED, 1]
    older = await broker.connect("four")
    assert await older.subscribe(("$share/g/secret/#", 1), (SHARED, 1)) == [SUBACK_FAILURE, 1]
    assert [group.filter for group in broker.node.pop.groups] == ["a/#"]


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_message_forbidden_to_one_member_goes_to_another(start_broker: StartBroker, qos: int) -> None:
    broker = await start_broker(access=plugins(JAIL))
    jailed = [await member(broker, f"jailed-{n}", qos) for n in range(3)]
    free = await member(broker, "free", qos)
    publisher = await broker.connect_5("publisher")
    for n in range(20):
        await publisher.publish("a/secret" if n % 2 else "a/b", b"%d" % n, qos)
    await until(lambda: broker.node.gateway.counters.publishes_out == 20)
    got: dict[str, list[Message]] = {}
    for client, name in [*((each, "jailed") for each in jailed), (free, "free")]:
        got.setdefault(name, []).extend(await client.messages())
    assert sorted(int(message.body) for messages in got.values() for message in messages) == list(range(20))
    assert all(message.topic == "a/b" for message in got["jailed"])
    assert len(got["jailed"]) > 3


async def test_a_message_forbidden_to_all_members_becomes_a_dead_letter(start_broker: StartBroker) -> None:
    broker = await start_broker(access=plugins(JAIL))
    broker.node.pop.groups.create("g", "a/#", "latest", ConsumerGroupSettings(attempts_max=3, backoff=(1_000,)))
    jailed = [await member(broker, f"jailed-{n}") for n in range(3)]
    await publish(broker, b"x", topic="a/secret")
    for attempt in (1, 2, 3):
        await until(lambda attempt=attempt: broker.node.gateway.counters.deliveries_untaken == attempt)  # type: ignore[misc]
        expire_deliveries(broker, 1_000)
    assert group_of(broker).dead_letter_count == 1
    assert broker.node.pop.counters.handed_out == 3  # Each attempt hands the message out once: no loop.
    assert [await client.drained() for client in jailed] == [[], [], []]
    await publish(broker, b"y")
    await until(lambda: broker.node.gateway.counters.publishes_out >= 1)  # Now the plugins have answered.
    got = [await client.drained() for client in jailed]
    # A second member may have got the message as well, if the ping took long enough.
    assert {packet[4] for packets in got for packet in packets} == {b"y"}


async def test_a_forbidden_message_is_offered_to_few_members_however_many_there_are(start_broker: StartBroker) -> None:
    broker = await start_broker(access=plugins(JAIL))
    for n in range(3 * REFUSERS_MAX):
        await member(broker, f"jailed-{n}")
    await publish(broker, b"x", topic="a/secret")
    await until(lambda: group_of(broker).in_flight == 1)
    await until(lambda: broker.node.gateway.authorizer.questions.outcomes.get(("receive", "denied"), 0) >= REFUSERS_MAX)
    await publish(broker, b"y")
    await until(lambda: broker.node.gateway.counters.publishes_out == 1)
    assert broker.node.gateway.authorizer.questions.outcomes["receive", "denied"] == REFUSERS_MAX
    assert group_of(broker).in_flight == 2


async def test_messages_that_wait_for_the_plugins_are_sent_in_order_after_the_answer(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    publisher = await broker.connect_5("publisher")
    for topic in ("a/1", "a/2"):
        await publisher.publish(topic, b"so that publishing is decided", 1)
    one = await member(broker, "one", about={Property.RECEIVE_MAXIMUM: 2})
    script.may_answer.clear()
    for n in range(6):
        await publisher.publish(f"a/{1 + n % 2}", b"%d" % n, 1)
    await until(lambda: script.times_asked("receive", "a/1") == 1)
    assert await one.drained() == []
    script.may_answer.set()
    assert [(await one.message()).body for _ in range(6)] == [b"%d" % n for n in range(6)]
    await until(lambda: group_of(broker).in_flight == 0)


@pytest.mark.parametrize("about", [{}, {Property.TOPIC_ALIAS_MAXIMUM: 1}])
@pytest.mark.parametrize("qos", [0, 1])
async def test_a_message_that_expires_while_it_waits_for_the_plugins_is_acknowledged_as_expired(
    start_broker: StartBroker, script: Script, qos: int, about: dict[Property, int]
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    publisher = await broker.connect_5("publisher")
    await publisher.publish("a/1", b"so that publishing is decided", 1)
    one = await member(broker, "one", qos, about=about)
    script.may_answer.clear()
    await publisher.publish_with("a/1", b"short", {Property.MESSAGE_EXPIRY_S: 5}, 1)
    await publisher.publish("a/1", b"lasting", 1)
    await until(lambda: ("receive", "a/1") in script.asked and group_of(broker).in_flight == 1)
    broker.clock.advance(6_000)
    script.may_answer.set()
    assert (await one.message()).body == b"lasting"
    records = broker.node.store.log.scan
    await until(lambda: len([each for each in records(0) if each.kind == Kind.POP_ACK]) == 2)
    assert sorted(each.flags for each in records(0) if each.kind == Kind.POP_ACK) == [CONSUMED, EXPIRED]
    assert broker.node.pop.counters.expired == 1


@pytest.mark.parametrize("leaves", ["at once", "when they have answered"])
async def test_messages_that_wait_for_the_plugins_go_to_another_member_if_theirs_leaves(
    start_broker: StartBroker, script: Script, leaves: str
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    publisher = await broker.connect_5("publisher")
    await publisher.publish("a/1", b"so that publishing is decided", 1)
    one = await member(broker, "one", about=LASTS)
    script.may_answer.clear()
    await publisher.publish("a/1", b"x", 1)
    await until(lambda: ("receive", "a/1") in script.asked)
    assert group_of(broker).in_flight == 1
    if leaves == "at once":
        one.reset()
        await until(lambda: group_of(broker).in_flight == 0)
        script.may_answer.set()
    else:
        script.may_answer.set()
        one.reset()
    assert (await (await member(broker, "two")).message()).body == b"x"


# --- as others speak it -------------------------------------------------------------------------------------------------


async def test_paho_shares(broker: Broker) -> None:
    async with asyncio.timeout(ANSWER_S_MAX), paho(broker, "one") as one, paho(broker, "two") as two:
        for client in (one, two):
            client.client.subscribe(SHARED, qos=1, properties=properties_of("SUBSCRIBE", SubscriptionIdentifier=9))
            assert [reason.value for reason in await client.of("subscribe")] == [1]
        await publish(broker, *(b"%d" % n for n in range(10)))
        for client, first in ((one, 0), (two, 1)):
            got = [await client.of("message") for _ in range(5)]
            assert [message.payload for message in got] == [b"%d" % n for n in range(first, 10, 2)]
            assert got[0].properties.SubscriptionIdentifier == [9]
        await until(lambda: group_of(broker).in_flight == 0)


@pytest.mark.parametrize("version", ["V311", "V5"])
async def test_aiomqtt_shares(broker: Broker, version: str) -> None:
    aiomqtt = pytest.importorskip("aiomqtt", reason="aiomqtt is not installed")
    address, protocol = broker.node.mqtt, aiomqtt.ProtocolVersion[version]
    async with (
        asyncio.timeout(ANSWER_S_MAX),
        aiomqtt.Client(address.host, address.port, identifier="one", protocol=protocol) as one,
        aiomqtt.Client(address.host, address.port, identifier="two", protocol=protocol) as two,
    ):
        for client in (one, two):
            await client.subscribe(SHARED, qos=2)
        await publish(broker, *(b"%d" % n for n in range(10)), qos=2)
        for client, first in ((one, 0), (two, 1)):
            messages = aiter(client.messages)
            assert [(await anext(messages)).payload for _ in range(5)] == [b"%d" % n for n in range(first, 10, 2)]


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["311", "5"])
async def test_mosquittos_clients_share(broker: Broker, version: str) -> None:
    address = broker.node.mqtt
    where = ("-h", address.host, "-p", str(address.port), "-V", version, "-q", "1", "-C", "5", "-W", "20")
    running = [asyncio.create_task(run_mosquitto("mosquitto_sub", *where, "-i", name, "-t", SHARED)) for name in ("one", "two")]
    await until(lambda: broker.node.gateway.counters.subscriptions_shared == 2 or any(task.done() for task in running))
    await publish(broker, *(b"%d" % n for n in range(10)))
    got = [output.split() for output in await asyncio.gather(*running)]
    assert sorted(got) == [[b"0", b"2", b"4", b"6", b"8"], [b"1", b"3", b"5", b"7", b"9"]]
