"""A message that ends each member of a shared subscription that gets it becomes a dead letter, and no other message does."""

from __future__ import annotations

import pytest

from penstock.gateway.delivery.share_settlements import LOST
from penstock.gateway.protocol.encode import encode_acks
from penstock.gateway.protocol.packets import PUBACK, PUBLISH, PUBLISH_WITH
from penstock.pop.core.deadletters import Reason
from penstock.pop.core.settings import ConsumerGroupSettings
from tests.gateway.lasting_sessions import leave
from tests.gateway.share_members import LASTS, expire_deliveries, group_of, member, publish
from tests.gateway.wire import Broker
from tests.waiting import until

BACKOFF_MS = 1_000
ATTEMPTS_MAX = 3
GOOD = [b"%d" % number for number in range(31)]


@pytest.fixture
async def group(broker: Broker) -> None:
    """A group whose messages have three attempts, and which stays when all members are gone."""
    settings = ConsumerGroupSettings(backoff=(BACKOFF_MS,), attempts_max=ATTEMPTS_MAX)
    broker.node.pop.groups.add("g", "a/#", "latest", settings)
    (await member(broker, "away", about=LASTS)).reset()
    await until(lambda: "away" in broker.away())


async def live(broker: Broker, name: str, got: set[bytes]) -> None:
    """Be a member that acknowledges one message after the other, until it gets the poison, or there is no more."""
    client = await member(broker, name)
    while packets := [packet for packet in await client.drained() if packet[0] in (PUBLISH, PUBLISH_WITH)]:
        for _, _, _, packet_id, body, *_ in packets:
            if body == b"poison":
                client.reset()
                await until(lambda: name not in broker.node.gateway.clients)
                return
            got.add(body)
            await client.send(encode_acks(PUBACK, [packet_id]))
    await leave(client)
    await until(lambda: name not in broker.node.gateway.clients)


@pytest.mark.usefixtures("group")
async def test_a_message_that_ends_its_consumers_is_the_only_dead_letter(broker: Broker) -> None:
    await publish(broker, *GOOD[:7], b"poison", *GOOD[7:])
    got: set[bytes] = set()
    lives = 0
    while group_of(broker).dead_letter_count == 0:
        lives += 1
        assert lives <= ATTEMPTS_MAX + 8
        await live(broker, f"life-{lives}", got)
        expire_deliveries(broker, BACKOFF_MS)
    await live(broker, "last", got)
    assert got == set(GOOD)
    assert (group_of(broker).visible, group_of(broker).in_flight, group_of(broker).dead_letter_count) == (0, 0, 1)
    (letter,) = broker.node.pop.dead_letters.list("g")
    assert (letter.reason, letter.attempts, letter.detail) == (Reason.ATTEMPTS_EXHAUSTED, ATTEMPTS_MAX, LOST)
    assert broker.node.pop.counters.uncounted > 0
    assert broker.node.gateway.counters.deliveries_untaken == 0


@pytest.mark.usefixtures("group")
async def test_members_that_leave_or_are_sent_away_are_not_lost(broker: Broker) -> None:
    await publish(broker, b"x")
    for number in range(ATTEMPTS_MAX + 4):
        name = f"member-{number}"
        client = await member(broker, name)
        assert (await client.receive())[4] == b"x"
        if number % 2:
            await leave(client)
        else:
            broker.node.gateway.disconnect("client", name)
        await until(lambda name=name: name not in broker.node.gateway.clients)  # type: ignore[misc]
    assert (broker.node.pop.counters.uncounted, group_of(broker).dead_letter_count) == (0, 0)
    assert (await (await member(broker, "last")).message()).body == b"x"
