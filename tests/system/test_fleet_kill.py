"""Devices that disconnect at random and a node that is killed at random: sessions continue, no message is lost or doubled."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.fixed_header import FROM_SERVER, FROM_SERVER_5
from penstock.gateway.protocol.packets import CONNACK, PUBACK, PUBCOMP, PUBLISH, PUBLISH_WITH, PUBREC, PUBREL, SUBACK, Packet
from penstock.gateway.protocol.properties import Property, write_properties
from tests.gateway.packet_cases import connect, subscribe
from tests.gateway.packet_cases_5 import connect_5, subscribe_5
from tests.system.processes import NodeProcess

pytestmark = pytest.mark.nightly

DEVICES = int(os.environ.get("PENSTOCK_FLEET_DEVICES", "60"))
KILLS = int(os.environ.get("PENSTOCK_FLEET_KILLS", "3"))
"""Defaults. `make nightly` takes more of both."""

DEVICES_PER_GROUP = 4
"""Number of devices that get each message."""

WINDOW = 8
VANISHING = 0.02
"""Probability that a device disconnects after a read."""

END_S = 60 + DEVICES / 5
"""Seconds that a test waits for the last messages."""


@dataclass
class Fleet:
    """The devices, and where the node is."""

    seed: int
    port: int = 0
    up: asyncio.Event = field(default_factory=asyncio.Event)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all devices are subscribed. Then they publish."""
    publishing: bool = True
    over: bool = False
    settled: int = 0
    """Messages whose publisher has received the final acknowledgement."""

    def __post_init__(self) -> None:
        self.devices = [Device(number, self) for number in range(DEVICES)]

    def missing(self) -> int:
        """Return the number of missing acknowledgements and deliveries."""
        sent = {group: set[tuple[int, int]]() for group in range(DEVICES)}
        for device in self.devices:
            for number, (group, _) in device.sent.items():
                sent[group].add((device.number, number))
        return sum(len(one.under_way) + len(sent[one.group] - one.got.keys()) for one in self.devices)


class Device:
    """A device with a client library that keeps its side of the session, as MQTT wants it to (4.1)."""

    def __init__(self, number: int, fleet: Fleet) -> None:
        self.number = number
        self.fleet = fleet
        self.random = Random(fleet.seed * 10_000 + number)
        self.group = number // DEVICES_PER_GROUP
        self.is_v5 = bool(number % 2)
        self.subscribed = False
        self.under_way: dict[int, tuple[int, bool]] = {}
        """Messages that aren't settled, by packet id: their number, and whether a PUBREC has come."""
        self.sent: dict[int, tuple[int, int]] = {}
        """Group and QoS of each message, by number."""
        self.got: Counter[tuple[int, int]] = Counter()
        """Number of deliveries of each message, by publisher and number."""
        self.order: dict[tuple[int, int], list[int]] = {}
        """Numbers of a publisher's messages at one QoS, in the order of their first deliveries."""
        self.received: set[int] = set()
        """Packet ids of received QoS 2 messages that are not released."""
        self.packet_id = 0
        self.lives = 0

    async def run(self) -> None:
        """Connect, and reconnect after each end, until the test is over."""
        while not self.fleet.over:
            await self.fleet.up.wait()
            try:
                await self.connect()
            except OSError:  # the node was killed
                await asyncio.sleep(0)

    async def connect(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.fleet.port)
        try:
            await self.talk(reader, writer)
        finally:
            writer.transport.abort()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client_id = b"device-%d" % self.number
        about = write_properties({Property.SESSION_EXPIRY_S: 3600})
        writer.write(connect_5(0, client_id, about=about) if self.is_v5 else connect(0, client_id))
        side, buffer = FROM_SERVER_5 if self.is_v5 else FROM_SERVER, b""
        while not self.fleet.over:
            data = await reader.read(65536)
            if not data:
                raise ConnectionResetError
            packets, used = decode(buffer + data, 1 << 20, side)
            buffer = (buffer + data)[used:]
            answers = b"".join(map(self.handle, packets))
            if self.subscribed:
                await self.fleet.complete.wait()
                answers += self.publish() if self.fleet.publishing else b""
            writer.write(answers)
            await writer.drain()
            if self.random.random() < VANISHING and self.fleet.publishing:
                return

    def handle(self, packet: Packet) -> bytes:
        """Handle a packet as a client must, and return the answer."""
        kind = packet[0]
        if kind == CONNACK:
            return self.begin(bool(packet[2][0]))
        if kind == SUBACK:
            self.subscribed = True
        elif kind in (PUBLISH, PUBLISH_WITH):
            return self.receive(packet[1] >> 1 & 3, packet[3], packet[4])
        elif kind == PUBREL:
            self.received.discard(packet[1])
            return encode_acks(PUBCOMP, [packet[1]])
        elif kind == PUBREC:
            if packet[1] in self.under_way:
                self.under_way[packet[1]] = (self.under_way[packet[1]][0], True)
            return encode_acks(PUBREL, [packet[1]])
        elif kind in (PUBACK, PUBCOMP) and packet[1] in self.under_way:
            del self.under_way[packet[1]]
            self.fleet.settled += 1
        return b""

    def begin(self, session_present: bool) -> bytes:
        """Send unacknowledged packets again, in order [MQTT-4.4.0-1]."""
        self.lives += 1
        if self.subscribed:
            assert session_present, f"the session of device {self.number} is lost"
            return b"".join(self.again(packet_id) for packet_id in self.under_way)
        filters = (b"fleet/%d/#" % self.group, 2)
        return subscribe_5(1, filters) if self.is_v5 else subscribe(1, filters)

    def again(self, packet_id: int) -> bytes:
        number, is_received = self.under_way[packet_id]
        return encode_acks(PUBREL, [packet_id]) if is_received else self.encode(packet_id, number, dup=True)

    def encode(self, packet_id: int, number: int, *, dup: bool = False) -> bytes:
        group, qos = self.sent[number]
        topic, body = b"fleet/%d/%d" % (group, self.number), b"%d %d %d" % (self.number, number, qos)
        return encode_publish(topic, body, qos, dup=dup, packet_id=packet_id, properties=b"\0" if self.is_v5 else b"")

    def publish(self) -> bytes:
        """Fill the window with new messages."""
        packets = []
        while len(self.under_way) < WINDOW:
            self.packet_id = self.packet_id % 40 + 1  # so that packet ids are used again and again
            if self.packet_id in self.under_way:
                continue
            number = len(self.sent)
            self.sent[number] = (self.random.randrange(-(-DEVICES // DEVICES_PER_GROUP)), self.random.randrange(1, 3))
            self.under_way[self.packet_id] = (number, False)
            packets.append(self.encode(self.packet_id, number))
        return b"".join(packets)

    def receive(self, qos: int, packet_id: int, body: bytes) -> bytes:
        publisher, number, published = map(int, body.split())
        assert qos == published, "the subscription's QoS is the higher one"
        if qos == 2 and packet_id in self.received:
            return encode_acks(PUBREC, [packet_id])
        message = publisher, number
        self.got[message] += 1
        if self.got[message] == 1:
            self.order.setdefault((publisher, qos), []).append(number)
        if qos == 2:
            self.received.add(packet_id)
        return encode_acks(PUBREC if qos == 2 else PUBACK, [packet_id])


@pytest.mark.timeout(120 + DEVICES + 20 * KILLS)
async def test_a_fleet_loses_nothing_and_gets_nothing_twice_at_qos_2_while_the_node_is_killed(node: NodeProcess) -> None:
    random = Random(17)
    fleet = Fleet(seed=random.randrange(1000))
    start(node, fleet)
    async with asyncio.TaskGroup() as tasks:
        for device in fleet.devices:
            tasks.create_task(device.run())
        await reached(lambda: all(device.subscribed for device in fleet.devices), "not all are subscribed")
        fleet.complete.set()
        for _ in range(KILLS):
            wanted = fleet.settled + random.randrange(DEVICES * 5, DEVICES * 25)
            await reached(lambda wanted=wanted: fleet.settled >= wanted, "publishing stands still")
            fleet.up.clear()
            node.kill()
            start(node, fleet)
        fleet.publishing = False
        try:
            await reached(lambda: not fleet.missing(), "something never came")
        finally:
            fleet.over = True
            fleet.up.set()
            node.stop()
    judge(fleet)


def start(node: NodeProcess, fleet: Fleet) -> None:
    fleet.port = node.start().port("mqtt")
    fleet.up.set()


async def reached(is_true, why: str) -> None:  # type: ignore[no-untyped-def]
    """Let the fleet run until a condition is true."""
    try:
        async with asyncio.timeout(END_S):
            while not is_true():  # noqa: ASYNC110 - it follows from what sixty devices have got
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(why) from None


def judge(fleet: Fleet) -> None:
    qos_of = {(device.number, number): qos for device in fleet.devices for number, (_, qos) in device.sent.items()}
    assert fleet.settled == len(qos_of), "each message is settled once"
    for device in fleet.devices:
        twice = [message for message, count in device.got.items() if count > 1 and qos_of[message] == 2]
        assert not twice, f"device {device.number} got messages of QoS 2 twice: {twice[:5]}"
        foreign = [message for message in device.got if fleet.devices[message[0]].sent[message[1]][0] != device.group]
        assert not foreign, f"device {device.number} got what it didn't subscribe to: {foreign[:5]}"
        for (publisher, qos), numbers in device.order.items():
            assert numbers == sorted(numbers), f"out of order: device {publisher} to {device.number} at QoS {qos}"
    assert max(device.lives for device in fleet.devices) > KILLS, "nobody vanished"
