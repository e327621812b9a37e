"""MQTT clients that keep their side of a session across any number of connections, as MQTT 5.0 wants it (4.1, 4.4)."""

from __future__ import annotations

import asyncio
from random import Random

from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.fixed_header import FROM_SERVER, FROM_SERVER_5
from penstock.gateway.protocol.packets import (
    CONNACK,
    DISCONNECT,
    MALFORMED,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBLISH_WITH,
    PUBREC,
    PUBREL,
    SUBACK,
    Packet,
)
from penstock.gateway.protocol.properties import Property, write_properties
from tests.chaos.ledger import Key, Ledger, Received, body_of
from tests.gateway.packet_cases import connect, subscribe
from tests.gateway.packet_cases_5 import connect_5, subscribe_5

READ_BYTES = 65_536
PACKET_IDS = 40
"""Publishers use this many packet ids, so that they use each again and again."""

REASON_FAILED = 0x80


class Ended(Exception):
    """Raised when a connection has ended, for whatever reason. The device connects again."""


class Device:
    """One client id. `run` connects, talks, and connects again until it is cancelled.

    Parameters:
        client_id: of the session, which lasts.
        is_v5: whether the client speaks MQTT 5.0 rather than 3.1.1.
        random: decides when the device goes away.
        vanishing: probability that the device drops its connection after a read.
    """

    def __init__(self, client_id: str, ledger: Ledger, random: Random, *, is_v5: bool, vanishing: float = 0.0) -> None:
        self.client_id = client_id
        self.ledger = ledger
        self.random = random
        self.is_v5 = is_v5
        self.vanishing = vanishing
        self.away_s_max = 0.2
        self.pace_s = 0.0
        self.port = 0
        self.up = asyncio.Event()
        self.lives = 0
        self.has_session = False
        self.is_connected = False

    async def run(self) -> None:
        while True:
            await self.up.wait()
            try:
                await self._connect()
            except (OSError, Ended):
                await asyncio.sleep(0.02)

    async def _connect(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            await self._talk(reader, writer)
        finally:
            self.is_connected = False
            writer.transport.abort()
        if self.vanishing:
            await asyncio.sleep(self.random.uniform(0, self.away_s_max))

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client_id = self.client_id.encode()
        about = write_properties({Property.SESSION_EXPIRY_S: 3600})
        writer.write(connect_5(0, client_id, about=about) if self.is_v5 else connect(0, client_id))
        side, buffer = FROM_SERVER_5 if self.is_v5 else FROM_SERVER, b""
        reading = asyncio.ensure_future(reader.read(READ_BYTES))
        try:
            while True:
                await asyncio.wait((reading,), timeout=self.pace_s or None)
                if writer.transport.is_closing():
                    raise Ended  # the loop of uvloop refuses to write to it
                if reading.done():
                    data = reading.result()
                    if not data:
                        raise Ended
                    reading = asyncio.ensure_future(reader.read(READ_BYTES))
                    packets, used = decode(buffer + data, 1 << 20, side)
                    buffer = (buffer + data)[used:]
                    writer.write(b"".join(map(self._handle, packets)))
                if self.is_connected and not writer.transport.is_closing():
                    writer.write(self.publish())
                await writer.drain()
                if self.is_connected and self.random.random() < self.vanishing:
                    return
                if self.pace_s:
                    await asyncio.sleep(self.pace_s)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _handle(self, packet: Packet) -> bytes:
        """Return the answer to a packet."""
        if packet[0] == CONNACK:
            body = packet[2]
            if body[1]:  # the node is full or starting: another try may succeed
                raise Ended
            self.lives += 1
            return self.begin(session_present=bool(body[0] & 1))
        if packet[0] == MALFORMED:
            self.ledger.report("broken", f"{self.client_id} got malformed bytes: {packet[1]}")
            raise Ended
        if packet[0] == DISCONNECT:
            raise Ended
        return self.handle(packet)

    def begin(self, *, session_present: bool) -> bytes:
        """Return what the client sends first on a new connection."""
        raise NotImplementedError

    def handle(self, packet: Packet) -> bytes:
        """Return the answer to a packet other than CONNACK and DISCONNECT."""
        raise NotImplementedError

    def publish(self) -> bytes:
        """Return new packets that are not answers."""
        return b""

    def lost_session(self) -> None:
        if self.ledger.is_state_intact:
            self.ledger.report("lost", f"the session of {self.client_id} is gone")


class Publisher(Device):
    """A device that publishes numbered messages, and repeats what was not acknowledged.

    Parameters:
        qos: 1 or 2.
        topic: the topic of a number.
        window: maximum number of unacknowledged messages.
        body_bytes: bounds of the sizes of bodies.
        retain: whether the node retains the messages.
    """

    def __init__(
        self,
        client_id: str,
        ledger: Ledger,
        random: Random,
        *,
        is_v5: bool,
        qos: int,
        topic: str,
        topics: int = 3,
        window: int = 8,
        body_bytes: tuple[int, int] = (30, 400),
        retain: bool = False,
        vanishing: float = 0.003,
    ) -> None:
        super().__init__(client_id, ledger, random, is_v5=is_v5, vanishing=vanishing)
        self.qos = qos
        self.topic = topic
        self.topics = topics
        self.window = window
        self.body_bytes = body_bytes
        self.retain = retain
        self.is_publishing = True
        self.number = 0
        self.pace_s = 0.015
        self.under_way: dict[int, tuple[Key, bytes, bool]] = {}
        """Unsettled messages by packet id: name, body, and whether a PUBREC has come."""
        self._packet_id = 0

    def begin(self, *, session_present: bool) -> bytes:
        if self.has_session and not session_present:
            self.lost_session()
        self.has_session = True
        self.is_connected = True
        return b"".join(self._again(packet_id) for packet_id in self.under_way)

    def _again(self, packet_id: int) -> bytes:
        key, body, is_received = self.under_way[packet_id]
        if is_received:
            return encode_acks(PUBREL, [packet_id])
        self.ledger.sending_again(key)
        return self._encode(packet_id, key, body, dup=True)

    def _encode(self, packet_id: int, key: Key, body: bytes, *, dup: bool = False) -> bytes:
        return encode_publish(
            self._topic_of(key.number).encode(),
            body,
            self.qos,
            retain=self.retain,
            dup=dup,
            packet_id=packet_id,
            properties=b"\0" if self.is_v5 else b"",
        )

    def _topic_of(self, number: int) -> str:
        return f"{self.topic}/{number % self.topics}"

    def handle(self, packet: Packet) -> bytes:
        kind, packet_id = packet[0], packet[1]
        one = self.under_way.get(packet_id)
        if kind == PUBREC:
            if _reason(packet) >= REASON_FAILED:
                del self.under_way[packet_id]  # refused, such as for a full disk: it never counts as acknowledged
                return b""
            if one is not None:
                self.under_way[packet_id] = (one[0], one[1], True)
                self.ledger.acked(one[0])
            return encode_acks(PUBREL, [packet_id])
        if kind in (PUBACK, PUBCOMP) and one is not None:
            del self.under_way[packet_id]
            if _reason(packet) < REASON_FAILED:
                self.ledger.acked(one[0])
        return b""

    def publish(self) -> bytes:
        packets = []
        while self.is_publishing and len(self.under_way) < self.window:
            self._packet_id = self._packet_id % PACKET_IDS + 1
            if self._packet_id in self.under_way:
                continue
            key = Key(self.client_id, self.number)
            self.number += 1
            body = body_of(key, self.random.randint(*self.body_bytes))
            self.ledger.sending(key, self._topic_of(key.number), self.qos)
            self.under_way[self._packet_id] = (key, body, False)
            packets.append(self._encode(self._packet_id, key, body))
        return b"".join(packets)


class Subscriber(Device):
    """A device that subscribes in a lasting session and tells the ledger what it receives.

    Parameters:
        topic_filter: what it subscribes to.
        qos: of the subscription.
        received: where the ledger keeps what the session has received.
    """

    def __init__(
        self,
        client_id: str,
        ledger: Ledger,
        random: Random,
        *,
        is_v5: bool,
        qos: int,
        topic_filter: str,
        received: Received,
        vanishing: float = 0.003,
    ) -> None:
        super().__init__(client_id, ledger, random, is_v5=is_v5, vanishing=vanishing)
        self.qos = qos
        self.topic_filter = topic_filter
        self.received = received
        self.is_subscribed = False
        self._unreleased: set[int] = set()
        """Packet ids of QoS 2 messages that the node has not released."""

    def begin(self, *, session_present: bool) -> bytes:
        if self.is_subscribed and session_present:
            self.is_connected = True
            return b""
        if self.is_subscribed:
            self.lost_session()
        self._unreleased.clear()
        subscription = (self.topic_filter.encode(), self.qos)
        return subscribe_5(1, subscription) if self.is_v5 else subscribe(1, subscription)

    def handle(self, packet: Packet) -> bytes:
        kind = packet[0]
        if kind == SUBACK:
            if packet[2][-1] >= REASON_FAILED:
                raise Ended  # such as for a full disk: it tries again
            self.is_subscribed = self.is_connected = True
        elif kind in (PUBLISH, PUBLISH_WITH):
            return self._receive(packet[1], packet[2].decode(), packet[3], packet[4])
        elif kind == PUBREL:
            self._unreleased.discard(packet[1])
            return encode_acks(PUBCOMP, [packet[1]])
        return b""

    def _receive(self, flags: int, topic: str, packet_id: int, body: bytes) -> bytes:
        qos, dup = flags >> 1 & 3, bool(flags & 8)
        if qos == 2 and packet_id in self._unreleased:
            return encode_acks(PUBREC, [packet_id])
        self.ledger.delivered(self.received, topic, body, qos, dup=dup)
        if qos == 2:
            self._unreleased.add(packet_id)
        return encode_acks(PUBREC if qos == 2 else PUBACK, [packet_id]) if qos else b""


class Look(Device):
    """A new client that looks at the retained messages of a filter, in `bodies` by topic."""

    def __init__(self, client_id: str, ledger: Ledger, random: Random, *, topic_filter: str) -> None:
        super().__init__(client_id, ledger, random, is_v5=False)
        self.topic_filter = topic_filter
        self.bodies: dict[str, bytes] = {}

    def begin(self, *, session_present: bool) -> bytes:
        return subscribe(1, (self.topic_filter.encode(), 0))

    def handle(self, packet: Packet) -> bytes:
        if packet[0] == PUBLISH and packet[1] & 1:
            self.bodies[packet[2].decode()] = packet[4]
        return b""


def _reason(packet: Packet) -> int:
    return int(packet[2]) if len(packet) > 2 else 0
