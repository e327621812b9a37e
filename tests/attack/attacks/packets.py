"""Attacks with single packets: huge, malformed, and outside the agreed limits."""

from __future__ import annotations

from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.packets import PUBREC, SUBACK
from penstock.gateway.protocol.properties import Property, write_properties
from penstock.store.options import KIB, MIB
from tests.attack.attacks.attack import Attack, side_by_side
from tests.attack.link import Link, any_source, hello, logged_in
from tests.gateway.packet_cases import field, packet
from tests.gateway.packet_cases_5 import publish_5, subscribe_5
from tests.gateway.wire import CLEAN, PING

TOO_LARGE, QUOTA, ALIAS, RECEIVE_MAX, MALFORMED, PROTOCOL = "0x95", "0x97", "0x94", "0x93", "0x81", "0x82"

USER_PROPERTY = b"\x26\0\0\0\0"
"""The smallest user property."""


def varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found, value = found + bytes((value % 128 + 128,)), value // 128
    return found + bytes((value,))


def many_properties(count: int) -> bytes:
    raw = USER_PROPERTY * count
    return varint(len(raw)) + raw


class OnePacket(Attack):
    """An attack that sends one packet on each connection, and reads how the connection ends."""

    packet: bytes
    is_logged_in = True
    connections = 8

    async def run(self) -> None:
        await side_by_side(self.connections, self._send)

    async def _send(self, number: int) -> None:
        if self.is_logged_in:
            link = await logged_in(self.ground, f"{self.name}-{number}")
        else:
            link = await Link.dial(self.ground, source=any_source(self.random))
        try:
            await link.send(self.packet)
            self.saw[await link.ended()] += 1
        finally:
            link.close()


class HugeConnect(OnePacket):
    """A CONNECT full of user properties."""

    name = "huge-connect"
    summary = "CONNECTs of 850 KB with 170,000 user properties, without a login, from many sources"
    must_get = "packet too large (0x95)"
    is_logged_in = False

    async def prepare(self) -> None:
        head = field(b"MQTT") + bytes((5, CLEAN)) + b"\0\0"
        self.packet = packet(0x10, head + many_properties(170_000) + field(b"huge"))

    def problems(self) -> list[str]:
        return self.only(TOO_LARGE, "closed")


class FullConnect(OnePacket):
    """A CONNECT just below the limit in bytes."""

    name = "full-connect"
    summary = "CONNECTs of 130 KB with 26,000 user properties, without a login, from many sources"
    must_get = "quota exceeded (0x97)"
    is_logged_in = False

    async def prepare(self) -> None:
        head = field(b"MQTT") + bytes((5, CLEAN)) + b"\0\0"
        self.packet = packet(0x10, head + many_properties(26_000) + field(b"full"))

    def problems(self) -> list[str]:
        return self.only(QUOTA, "closed")


class HugePublish(OnePacket):
    """A PUBLISH full of user properties."""

    name = "huge-publish"
    summary = "PUBLISHes of 1 MB with 200,000 user properties"
    must_get = "quota exceeded (0x97)"

    async def prepare(self) -> None:
        self.packet = publish_5(0x32, b"mallory/x", 1, many_properties(200_000))

    def problems(self) -> list[str]:
        return self.only(QUOTA)


class HugeSubscribe(OnePacket):
    """A SUBSCRIBE with very many filters."""

    name = "huge-subscribe"
    summary = "SUBSCRIBEs with 120,000 filters"
    must_get = "quota exceeded (0x97)"

    async def prepare(self) -> None:
        self.packet = subscribe_5(1, *((b"f/%d" % number, 0) for number in range(110_000)))[: MIB - 8]
        entries = b"".join(field(b"%x" % number) + b"\0" for number in range(120_000))
        self.packet = packet(0x82, b"\0\1\0" + entries)

    def problems(self) -> list[str]:
        return self.only(QUOTA)


class Oversized(OnePacket):
    """A packet above the limit, of which more and more comes."""

    name = "oversized"
    summary = "PUBLISHes that claim 256 MB, with 4 MB of them"
    must_get = "packet too large (0x95)"
    connections = 4

    async def prepare(self) -> None:
        self.packet = b"\x32\xff\xff\xff\x7f" + field(b"mallory/x") + bytes(4 * MIB)

    def problems(self) -> list[str]:
        return self.only(TOO_LARGE, "closed")


class Garbage(Attack):
    """Random bytes on all listeners."""

    name = "garbage"
    summary = "random bytes, up to 64 KB, on the MQTT, TLS, WebSocket, PROXY, gRPC and admin listeners"
    must_get = "the end of the connection, over MQTT with malformed packet (0x81) or protocol error (0x82)"

    async def run(self) -> None:
        await side_by_side(12, self._send)

    async def _send(self, number: int) -> None:
        listener = ("mqtt", "tls", "ws", "wss", "pop", "admin")[number % 6]
        source = any_source(self.random) if number == 0 else ""
        link = await Link.dial(self.ground, listener, source=source)
        try:
            lead = hello(f"garbage-{number}") if listener in ("mqtt", "tls") and self.random.random() < 0.5 else b""
            await link.send(lead + self.random.randbytes(self.random.choice((1, 10, 1_000, 64 * KIB))))
            if link.writer.can_write_eof():
                link.writer.write_eof()
            self.saw[f"{listener} {await link.ended(12)}"] += 1
        finally:
            link.close()

    def problems(self) -> list[str]:
        return self.once("mqtt 0x81", "mqtt 0x82", "mqtt closed") + self.never(
            *(one for one in self.saw if one.endswith("open") and not one.startswith("tls"))
        )


class AliasAbuse(Attack):
    """Topic aliases that were never agreed."""

    name = "topic-alias"
    summary = "PUBLISHes with alias 0, above the maximum, and never set"
    must_get = "topic alias invalid (0x94) or protocol error (0x82)"

    async def run(self) -> None:
        await side_by_side(6, self._send)

    async def _send(self, number: int) -> None:
        link = await logged_in(self.ground, f"alias-{number}")
        try:
            alias = (0, 65, 65_535, 7)[number % 4]
            await link.send(
                publish_5(0x30, b"" if alias == 7 else b"mallory/a", 0, write_properties({Property.TOPIC_ALIAS: alias}))
            )
            self.saw[await link.ended()] += 1
        finally:
            link.close()

    def problems(self) -> list[str]:
        return self.only(ALIAS, PROTOCOL)


class ReceiveMaximum(Attack):
    """A publisher at QoS 2 that never releases."""

    name = "receive-maximum"
    summary = "QoS 2 PUBLISHes without a PUBREL beyond the receive maximum of 1000"
    must_get = "receive maximum exceeded (0x93)"

    async def run(self) -> None:
        await side_by_side(4, self._send)

    async def _send(self, number: int) -> None:
        link = await logged_in(self.ground, f"receive-{number}")
        try:
            await link.send(*(encode_publish(b"mallory/r", b"x", 2, packet_id=at, properties=b"\0") for at in range(1, 1_200)))
            self.saw[await link.ended()] += 1
        finally:
            link.close()

    def problems(self) -> list[str]:
        return self.only(RECEIVE_MAX)


class NeverAcks(Attack):
    """Subscribers that never acknowledge and ask for everything."""

    name = "never-acks"
    summary = "20 subscribers with a receive maximum of 65,535 never acknowledge what a publisher floods"
    must_get = "at most mqtt.inflight_max (1000) deliveries each"

    async def run(self) -> None:
        about = write_properties({Property.RECEIVE_MAXIMUM: 65_535})
        for number in range(20):
            link = await logged_in(self.ground, f"never-{number}", about=about)
            self.links.append(link)
            await link.send(subscribe_5(1, (b"mallory/n", 1)))
            await link.expect(SUBACK)
        publisher = await logged_in(self.ground, "never-publisher")
        self.links.append(publisher)
        one = encode_publish(b"mallory/n", bytes(200), 0, properties=b"\0")
        while True:
            await publisher.send(one * 50)
            for link in self.links[:20]:
                while found := await link.next(0.001):
                    self.saw["delivery" if found[0] == 3 or len(found) > 4 else "other"] += 1

    def problems(self) -> list[str]:
        return self.once("delivery")


class WrongAcks(Attack):
    """Acknowledgements of packets that were never sent."""

    name = "wrong-acks"
    summary = "floods of PUBACK, PUBREC, PUBREL and PUBCOMP for packet ids that are not in use"
    must_get = "packet identifier not found (0x92) for PUBREC and PUBREL"

    async def run(self) -> None:
        link = await logged_in(self.ground, "wrong-acks")
        self.links.append(link)
        burst = b"".join(encode_acks(kind, list(range(1, 100))) for kind in (4, PUBREC, 6, 7))
        while True:
            await link.send(burst)
            for _ in range(2 * 99):
                found = await link.next()
                if not found:
                    self.saw["closed"] += 1
                    return
                self.saw[f"0x{found[2]:02x}" if len(found) > 2 else "no reason"] += 1

    def problems(self) -> list[str]:
        return self.only("0x92")


class Pings(Attack):
    """MQTT pings without reading."""

    name = "pings-unread"
    summary = "8 clients send PINGREQs and never read"
    must_get = "no more reading from them"
    peak_mib = 32

    async def run(self) -> None:
        await side_by_side(8, self._send)

    async def _send(self, number: int) -> None:
        link = await logged_in(self.ground, f"pings-{number}")
        self.links.append(link)
        link.writer.transport.pause_reading()  # type: ignore[attr-defined]
        while True:
            await link.send(PING * 4_000)
            self.saw["pings"] += 4_000

    def problems(self) -> list[str]:
        return self.once("pings")
