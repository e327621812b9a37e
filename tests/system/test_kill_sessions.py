"""kill -9 under a stream of deliveries at QoS 1: a client gets again what was under way, with DUP, and little that it
acknowledged."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import pytest

from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.packets import CONNACK, DUP, PUBACK, PUBLISH, SUBACK
from penstock.gateway.protocol.properties import Property, write_properties
from penstock.gateway.sessions.journal import ACKS_MAX
from penstock.gateway.sessions.lifecycle import SENT_ENTRIES, SENT_WINDOWS
from tests.gateway.packet_cases import connect
from tests.gateway.packet_cases_5 import connect_5, subscribe_5
from tests.gateway.wire import ANSWER_S_MAX, Client, Client5
from tests.system.processes import NodeProcess

pytestmark = pytest.mark.nightly

KILLS = int(os.environ.get("PENSTOCK_KILL_ROUNDS", "5"))
PUBLISH_WINDOW = 200
DELIVERIES_MIN = 3_000
"""Deliveries before a kill, at least."""


@dataclass
class Received:
    """What a subscriber has received and acknowledged."""

    numbers: set[int] = field(default_factory=set)
    again: int = 0
    """Deliveries of messages that it has had before, since the last start of the node."""
    without_dup: list[int] = field(default_factory=list)
    """Numbers of those that had no DUP."""
    dups: list[int] = field(default_factory=list)
    """Numbers of messages with DUP that it has not had before."""

    def note(self, number: int, *, is_dup: bool) -> None:
        if number in self.numbers:
            self.again += 1
            if not is_dup:
                self.without_dup.append(number)
        elif is_dup:
            self.dups.append(number)
        self.numbers.add(number)

    def check(self, window: int) -> None:
        """Check what came since the last start of the node."""
        assert self.again <= window + max(window, ACKS_MAX), "more came again than what was under way and one commit"
        assert not self.without_dup, "messages came again without DUP"
        self.again = 0
        self.dups.clear()


async def subscriber_of(node: NodeProcess, window: int, *, is_back: bool) -> Client5:
    """Connect the subscriber, whose session lasts."""
    client = Client5(*await asyncio.open_connection("127.0.0.1", node.port("mqtt")))
    about = write_properties({Property.SESSION_EXPIRY_S: 600, Property.RECEIVE_MAXIMUM: window})
    await client.send(connect_5(0, b"subscriber", about=about, keep_alive_s=0))
    connack = await client.receive()
    assert connack[0] == CONNACK
    if not is_back:
        await client.send(subscribe_5(1, (b"kill/#", 1)))
        await client.expect(SUBACK)
    return client


async def receive_until_killed(client: Client, received: Received) -> None:
    """Acknowledge each delivery at once, until the connection ends."""
    with suppress(ConnectionError):
        while packet := await client.receive():
            if packet[0] == PUBLISH:
                received.note(int(packet[4]), is_dup=bool(packet[1] & DUP))
                client.writer.write(encode_acks(PUBACK, [packet[3]]))


async def publish_until_killed(node: NodeProcess, first: int, acked: set[int]) -> int:
    """Publish numbered messages at QoS 1 until the connection ends, and note which were acknowledged; return the next
    number."""
    client = Client(*await asyncio.open_connection("127.0.0.1", node.port("mqtt")))
    await client.send(connect(2, b"publisher", keep_alive_s=0))
    assert (await client.receive())[0] == CONNACK
    number, waiting = first, dict[int, int]()
    with suppress(ConnectionError):
        while True:
            while len(waiting) < PUBLISH_WINDOW:
                packet_id = 1 + number % 60_000
                client.writer.write(encode_publish(b"kill/%d" % (number % 7), b"%d" % number, 1, packet_id=packet_id))
                waiting[packet_id] = number
                number += 1
            packet = await client.receive()
            if not packet:
                break
            acked.add(waiting.pop(packet[1]))
    return number


async def reach(received: Received, count: int) -> None:
    async with asyncio.timeout(ANSWER_S_MAX):
        while len(received.numbers) < count:  # noqa: ASYNC110 - filled by a task
            await asyncio.sleep(0.001)


@pytest.mark.timeout(60 + 15 * KILLS)
@pytest.mark.parametrize("window", [100, 1000])
async def test_a_subscriber_gets_little_again_of_a_stream(node: NodeProcess, window: int) -> None:
    chance = Random(window)
    received, acked = Received(), set[int]()
    number = 0
    for kill in range(KILLS):
        node.start()
        client = await subscriber_of(node, window, is_back=kill > 0)
        receiving = asyncio.create_task(receive_until_killed(client, received))
        publishing = asyncio.create_task(publish_until_killed(node, number, acked))
        await reach(received, len(received.numbers) + chance.randrange(DELIVERIES_MIN, 2 * DELIVERIES_MIN))
        node.kill()
        before, number = number, await publishing
        await receiving
        assert not [each for each in received.dups if each >= before], "DUP, though the message is newer than the kill"
        received.check(window)
    node.start()
    client = await subscriber_of(node, window, is_back=True)
    receiving = asyncio.create_task(receive_until_killed(client, received))
    async with asyncio.timeout(ANSWER_S_MAX):
        while not acked <= received.numbers:  # noqa: ASYNC110 - filled by a task
            await asyncio.sleep(0.001)
    node.kill()
    await receiving


@pytest.mark.timeout(120)
@pytest.mark.parametrize("window", [100, 1000])
async def test_a_subscriber_that_reads_a_backlog_gets_little_again(node: NodeProcess, window: int) -> None:
    """No commit of a publisher records the acknowledgements here."""
    messages, acked, received = 16_000, set[int](), Received()
    node.start()
    await (await subscriber_of(node, window, is_back=False)).send(bytes.fromhex("e000"))
    publishing = asyncio.create_task(publish_until_killed(node, 0, acked))
    async with asyncio.timeout(ANSWER_S_MAX * 3):
        while len(acked) < messages:  # noqa: ASYNC110 - filled by a task
            await asyncio.sleep(0.001)
    node.kill()
    await publishing
    for _ in range(2):
        node.start()
        receiving = asyncio.create_task(receive_until_killed(await subscriber_of(node, window, is_back=True), received))
        await reach(received, len(received.numbers) + DELIVERIES_MIN * 2)
        node.kill()
        await receiving
        assert len(received.dups) <= SENT_WINDOWS * window + SENT_ENTRIES, "DUP, though the message can't have been sent"
        received.check(window)
    node.start()
    receiving = asyncio.create_task(receive_until_killed(await subscriber_of(node, window, is_back=True), received))
    async with asyncio.timeout(ANSWER_S_MAX):
        while not acked <= received.numbers:  # noqa: ASYNC110 - filled by a task
            await asyncio.sleep(0.001)
    node.kill()
    await receiving
