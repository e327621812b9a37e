"""Messages that some members of a shared subscription can't take: another member gets them, or they stay for the group."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog.testing

from penstock import Client as PopClient
from penstock.gateway.delivery import share_group
from penstock.gateway.protocol.encode import encode_acks
from penstock.gateway.protocol.packets import PUBACK, PUBREL
from penstock.gateway.protocol.properties import Property
from penstock.pop.core.checkpoint import delivery_id
from penstock.pop.core.deadletters import Reason
from penstock.pop.core.settings import ConsumerGroupSettings
from penstock.store.record import Kind
from tests.gateway.brokers import StartBroker
from tests.gateway.logins import plugins
from tests.gateway.scripted_plugins import Script
from tests.gateway.share_members import LASTS, SHARED, bodies, expire_deliveries, group_of, member, packet_ids, publish
from tests.gateway.wire import Broker, Client5
from tests.waiting import until

SMALL = {Property.MAXIMUM_PACKET_SIZE: 200}
BACKOFF_MS = 1_000
BIG = bytes(1_000)


def create_group(broker: Broker, **settings: Any) -> None:
    """Create the group of `SHARED` before its first member subscribes."""
    broker.node.pop.groups.add("g", "a/#", "latest", ConsumerGroupSettings(backoff=(BACKOFF_MS,), **settings))


def untaken(broker: Broker) -> int:
    return broker.node.gateway.counters.deliveries_untaken


async def busy_member(broker: Broker) -> tuple[Client5, list[int]]:
    """Connect a member that takes messages of any size, one at a time; return it and the packet id of the first one."""
    client = await member(broker, "busy", about={Property.RECEIVE_MAXIMUM: 1})
    await publish(broker, b"first")
    return client, packet_ids([await client.receive()])


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_message_too_large_for_one_member_goes_to_another(broker: Broker, qos: int) -> None:  # 3.1.2.11.4
    small = await member(broker, "small", qos, about=SMALL | LASTS)
    other = await member(broker, "other", qos, about=LASTS)
    sent = [b"%d " % n + BIG * (n // 2 % 2) for n in range(20)]
    publisher = await broker.connect_5("publisher")
    for body in sent:
        await publisher.publish("a/b", body, qos)
    await until(lambda: broker.node.gateway.counters.publishes_out == 20)
    smalls, others = [[message.body for message in await client.messages()] for client in (small, other)]
    assert sorted(smalls + others) == sorted(sent)
    assert len(smalls) > 3
    assert max(map(len, smalls)) < 200
    counters = broker.node.gateway.counters
    assert (untaken(broker), counters.deliveries_too_large, group_of(broker).dead_letter_count) == (0, 0, 0)


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_message_that_no_member_can_take_stays_for_a_service(broker: Broker, qos: int) -> None:
    create_group(broker)
    small = await member(broker, "small", qos, about=SMALL)
    publisher = await broker.connect_5("publisher")
    for body in (BIG, b"x", BIG):
        await publisher.publish("a/b", body, qos)
    await until(lambda: untaken(broker) == 2)
    assert await bodies(small) == [b"x"]
    assert group_of(broker).delayed == 2
    async with PopClient(str(broker.node.grpc)) as service:
        waiting = asyncio.create_task(service.pop("a/#", group="g", wait=50.0))
        await until(lambda: len(group_of(broker).polls) == 2)
        expire_deliveries(broker, BACKOFF_MS)  # Once more to the member, which waited first, and then to the service.
        await until(lambda: waiting.done() or untaken(broker) == 4)
        expire_deliveries(broker, BACKOFF_MS)
        messages = await waiting
        assert [(message.body, message.attempt) for message in messages] == [(BIG, 3), (BIG, 3)]
        for message in messages:
            await message.ack()


async def test_a_message_that_no_member_can_take_becomes_a_dead_letter_that_says_so(broker: Broker) -> None:
    create_group(broker, attempts_max=2)
    await member(broker, "small", about=SMALL)
    with structlog.testing.capture_logs() as logs:
        await publish(broker, BIG, BIG, BIG)
        await until(lambda: untaken(broker) == 3)
        assert (group_of(broker).in_flight, group_of(broker).dead_letter_count) == (3, 0)
        expire_deliveries(broker, BACKOFF_MS)
        await until(lambda: group_of(broker).dead_letter_count == 3)
    assert (group_of(broker).in_flight, untaken(broker), broker.node.pop.counters.acked) == (0, 6, 0)
    for letter in broker.node.pop.dead_letters.list("g"):
        assert (letter.reason, letter.attempts, letter.detail) == (Reason.ATTEMPTS_EXHAUSTED, 2, share_group.UNTAKEN)
    lines = [line for line in logs if line["event"] == "shared.untaken"]
    assert [(line["group"], line["filter"], line["topic"], line["members"]) for line in lines] == [("g", "a/#", "a/b", 1)]


async def test_a_message_waits_for_the_member_that_can_take_it(broker: Broker) -> None:
    busy, first = await busy_member(broker)
    small = await member(broker, "small", about=SMALL)
    await publish(broker, BIG, b"x")
    assert await bodies(small) == [b"x"]
    assert (await busy.drained(), untaken(broker), group_of(broker).in_flight) == ([], 0, 3)
    await busy.send(encode_acks(PUBACK, first))
    assert (await busy.message()).body == BIG
    assert broker.node.pop.counters.handed_out == 3


async def test_a_message_fails_when_the_member_that_could_take_it_leaves(broker: Broker) -> None:
    create_group(broker)
    busy, _ = await busy_member(broker)
    await member(broker, "small", about=SMALL)
    await publish(broker, BIG)
    await until(lambda: group_of(broker).in_flight == 2)
    assert untaken(broker) == 0
    busy.reset()
    await until(lambda: untaken(broker) == 1)
    last = await member(broker, "last")
    expire_deliveries(broker, BACKOFF_MS)
    assert (await last.message()).body == BIG


async def test_a_message_that_waits_for_long_is_left_to_other_consumers_uncounted(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_group, "KEPT_S_MAX", 0.0)
    await busy_member(broker)
    small = await member(broker, "small", about=SMALL)
    await publish(broker, BIG)
    await until(lambda: broker.node.gateway.counters.deliveries_returned >= 3)
    await small.unsubscribe(SHARED)
    async with PopClient(str(broker.node.grpc)) as service:
        (message,) = await service.pop("a/#", group="g", wait=50.0)
        assert (message.body, message.attempt) == (BIG, 1)
        await message.ack()
    assert untaken(broker) == 0


async def test_few_messages_wait_for_a_busy_member_and_the_others_stay_visible(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_group, "TAKE_MAX", 4)
    busy, first = await busy_member(broker)
    await member(broker, "small", about=SMALL)
    await publish(broker, *(b"%d " % n + BIG for n in range(10)))
    await until(lambda: group_of(broker).in_flight + group_of(broker).visible == 11)
    assert group_of(broker).in_flight == 1 + 4
    await busy.send(encode_acks(PUBACK, first))
    got = [await busy.message() for _ in range(10)]
    assert sorted(message.body for message in got) == [b"%d " % n + BIG for n in range(10)]
    assert untaken(broker) == 0


async def test_a_message_that_no_connected_member_can_take_waits_for_an_absent_one(broker: Broker) -> None:
    create_group(broker)
    (await member(broker, "away", 2, about=LASTS)).reset()
    await until(lambda: "away" in broker.away())
    await member(broker, "small", 2, about=SMALL | LASTS)
    await publish(broker, BIG, qos=2)
    await until(lambda: untaken(broker) == 1)
    away = await broker.connect_5("away", flags=0, about=LASTS)
    expire_deliveries(broker, BACKOFF_MS)
    message = await away.message()
    assert (message.body, message.qos) == (BIG, 2)


async def test_a_message_goes_to_a_member_whose_second_subscribe_makes_room(broker: Broker) -> None:
    busy, _ = await busy_member(broker)
    await member(broker, "small", about=SMALL)
    await publish(broker, BIG)
    await until(lambda: group_of(broker).in_flight == 2)
    assert await busy.subscribe((SHARED, 0)) == [0]  # At QoS 0 it has room.
    assert (await busy.message()).body == BIG
    assert untaken(broker) == 0


async def test_members_that_have_left_do_not_count_as_asked(broker: Broker) -> None:
    busy, first = await busy_member(broker)
    gone = await member(broker, "gone", about=SMALL)
    await publish(broker, BIG)
    await until(lambda: group_of(broker).in_flight == 2)
    gone.reset()
    await until(lambda: "gone" not in broker.node.gateway.clients)
    small = await member(broker, "small", about=SMALL)  # It is offered the message, and can't take it either.
    assert (await small.drained(), untaken(broker)) == ([], 0)
    await busy.send(encode_acks(PUBACK, first))
    assert (await busy.message()).body == BIG


async def redrive_expired(broker: Broker) -> None:
    """Redrive a dead letter of the group of `SHARED` whose time to live has passed."""
    create_group(broker)
    publisher = await broker.connect_5("publisher")
    await publisher.publish_with("a/b", b"poison", {Property.MESSAGE_EXPIRY_S: 60}, 2)
    pop = broker.node.pop
    taken = pop.popper.pop(group_of(broker), 1, 10_000)
    assert taken is not None
    assert pop.deliveries.settle(Kind.POP_DEAD_LETTER, [delivery_id(taken.checkpoint.position)]) == 1
    broker.clock.advance(61_000)
    assert pop.dead_letters.redrive("g") == 1


@pytest.mark.parametrize("about", [{}, {Property.TOPIC_ALIAS_MAXIMUM: 1}])
async def test_a_redriven_message_does_not_expire(broker: Broker, about: dict[Property, int]) -> None:
    await redrive_expired(broker)
    one = await member(broker, "one", 2, about=LASTS | about)
    (sent,) = await one.messages_with()  # and the connection ends before the client acknowledges it
    one.reset()
    await until(lambda: "one" in broker.away())
    one = await broker.connect_5("one", flags=0, about=LASTS | about)
    for message, properties in (sent, await one.message_with()):
        assert (message.body, message.qos, Property.MESSAGE_EXPIRY_S in properties) == (b"poison", 2, False)
    await until(lambda: group_of(broker).in_flight == 0)
    assert broker.node.pop.counters.expired == 0


@pytest.mark.parametrize("why", ["too large", "forbidden"])
async def test_a_qos_2_delivery_that_cannot_go_out_again_becomes_a_dead_letter(
    start_broker: StartBroker, script: Script, why: str
) -> None:  # [MQTT-4.8.2-4], [MQTT-4.8.2-5]
    broker = await start_broker(access=plugins("Topics"))
    one = await member(broker, "one", 2, about=LASTS)
    await publish(broker, BIG, qos=2)
    (packet_id,) = packet_ids([await one.receive()])
    one.reset()
    await until(lambda: "one" in broker.away())
    other = await member(broker, "other", 2)
    script.topics["receive", "a/b"] = why != "forbidden"
    one = await broker.connect_5("one", flags=0, about=LASTS | SMALL if why == "too large" else LASTS)
    assert await one.receive() == (PUBREL, packet_id)
    await until(lambda: group_of(broker).dead_letter_count == 1)
    assert await other.drained() == []
    (letter,) = broker.node.pop.dead_letters.list("g")
    assert ("Maximum Packet Size" if why == "too large" else "may not receive") in letter.detail
    assert broker.node.pop.counters.acked == 0
