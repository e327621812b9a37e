"""Attacks below MQTT: connections that are half open or slow, WebSocket frames, PROXY headers, HTTP."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress

from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import SUBACK
from penstock.store.options import KIB
from tests.attack.attacks.attack import FAILURES, Attack, side_by_side, together
from tests.attack.link import Link, hello, logged_in
from tests.fuzz.inputs import HANDSHAKE, frame
from tests.gateway.packet_cases_5 import subscribe_5
from tests.gateway.proxy_headers import INVALID

HALF_OPEN = 400
"""Connections at a time."""

CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(60)
"""The beginning of a TLS handshake."""


class HalfOpen(Attack):
    """Connections that say nothing, or the beginning of something, for as long as the node waits."""

    listener = "mqtt"
    beginning = b""
    more = b""
    """A byte of this follows each half second."""
    within_s = 16.0
    """When the node must have closed such a connection."""

    async def run(self) -> None:
        await together(self._wait() for _ in range(HALF_OPEN))

    async def prepare(self) -> None:
        """Begin the connections by which the node's patience is measured. They stay for the whole row."""
        self._patience = [asyncio.create_task(self._measure()) for _ in range(5)]

    async def _measure(self) -> None:
        try:
            async with asyncio.timeout(self.within_s):
                await self._stay("witness ")
        except TimeoutError:
            self.saw["witness open"] += 1
        except FAILURES:
            self.saw["witness closed"] += 1

    async def _wait(self) -> None:
        while True:
            await self._stay("")

    async def _stay(self, who: str) -> None:
        port = self.ground.ports[self.listener]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(self.beginning)
            trickle = asyncio.create_task(self._trickle(writer))
            try:
                with suppress(ConnectionError):
                    while await reader.read(4096):
                        pass
            finally:
                trickle.cancel()
            self.saw[f"{who}closed"] += 1
        finally:
            writer.transport.abort()

    async def _trickle(self, writer: asyncio.StreamWriter) -> None:
        for byte in self.more:
            await asyncio.sleep(0.5)
            writer.write(bytes((byte,)))

    async def finish(self) -> None:
        await asyncio.gather(*self._patience, return_exceptions=True)

    def problems(self) -> list[str]:
        found = self.never("witness open")
        return found if self.saw["witness closed"] == 5 else [*found, f"{5 - self.saw['witness closed']} were not closed"]


class HalfOpenTcp(HalfOpen):
    """TCP connections without a byte."""

    name = "half-open-tcp"
    summary = f"{HALF_OPEN} TCP connections that send nothing"
    must_get = "the end of the connection after mqtt.connect_timeout (10 s)"


class SlowConnect(HalfOpen):
    """A CONNECT byte by byte."""

    name = "slow-connect"
    summary = f"{HALF_OPEN} connections that send a byte of their CONNECT each half second"
    must_get = "the end of the connection after mqtt.connect_timeout (10 s)"
    beginning = hello("slow")[:4]
    more = hello("slow")[4:]


class HalfOpenTls(HalfOpen):
    """The beginning of a TLS handshake."""

    name = "half-open-tls"
    summary = f"{HALF_OPEN} connections that send a byte of a TLS handshake each half second"
    must_get = "the end of the connection after mqtt.connect_timeout (10 s)"
    listener = "tls"
    beginning = CLIENT_HELLO[:20]
    more = CLIENT_HELLO[20:]


class SlowUpgrade(HalfOpen):
    """A WebSocket request byte by byte."""

    name = "slow-upgrade"
    summary = f"{HALF_OPEN} connections that send a byte of a WebSocket request each half second"
    must_get = "the end of the connection after mqtt.connect_timeout (10 s)"
    listener = "ws"
    beginning = HANDSHAKE[:20]
    more = HANDSHAKE[20:]


class SlowAdmin(HalfOpen):
    """A request to the admin listener byte by byte."""

    name = "slow-admin"
    summary = f"{HALF_OPEN} connections that send a byte of a request to the admin listener each half second"
    must_get = "the end of the connection"
    listener = "admin"
    beginning = b"GET /metrics HTTP/1.1\r\n"
    more = b"Host: localhost\r\nX-Slow: " + b"x" * 200
    within_s = 40.0


class SlowGrpc(HalfOpen):
    """A connection to gRPC that says nothing."""

    name = "half-open-grpc"
    summary = f"{HALF_OPEN} connections to the gRPC listener that send the beginning of a TLS handshake"
    must_get = "the end of the connection after 10 s"
    listener = "pop"
    beginning = CLIENT_HELLO[:20]
    within_s = 20.0


class HandshakeFlood(Attack):
    """Whole TLS handshakes."""

    name = "tls-handshakes"
    summary = "16 connections at a time complete a TLS handshake, and leave"
    must_get = "handshakes"

    async def prepare(self) -> None:
        self._context = self.ground.context()

    async def run(self) -> None:
        await side_by_side(16, self._shake)

    async def _shake(self, _: int) -> None:
        try:
            _reader, writer = await asyncio.open_connection(
                "127.0.0.1", self.ground.ports["tls"], ssl=self._context, server_hostname="localhost"
            )
        except ssl.SSLError:
            self.saw["refused"] += 1
            return
        self.saw["handshake"] += 1
        writer.transport.abort()

    def problems(self) -> list[str]:
        return self.once("handshake")


class WebSocketPings(Attack):
    """WebSocket pings without reading, before a login."""

    name = "websocket-pings"
    summary = "8 WebSockets without a login send pings of 125 bytes and never read the pongs"
    must_get = "the end of the connection, or no more reading"
    peak_mib = 32
    is_logged_in = False

    async def run(self) -> None:
        await side_by_side(8, self._send)

    async def _send(self, number: int) -> None:
        if self.is_logged_in:
            link = await logged_in(self.ground, f"ws-pings-{number}", "ws")
        else:
            link = await Link.dial(self.ground, "ws")
        self.links.append(link)
        link.writer.transport.pause_reading()  # type: ignore[attr-defined]
        burst = frame(0x89, bytes(125)) * 500
        while True:
            await link.send(burst)
            self.saw["pings"] += 500

    def problems(self) -> list[str]:
        return self.once("pings")


class WebSocketPingsLoggedIn(WebSocketPings):
    """The same after a login."""

    name = "websocket-pings-logged-in"
    summary = "8 WebSockets with a login send pings of 125 bytes and never read the pongs"
    is_logged_in = True


class ProxyLies(Attack):
    """PROXY headers that are not valid, that claim more than comes, or come where none is expected."""

    name = "proxy-lies"
    summary = "PROXY headers that are malformed, too long, endless, or on a listener that expects none"
    must_get = "the end of the connection"

    async def run(self) -> None:
        await side_by_side(12, self._send)

    async def _send(self, number: int) -> None:
        headers = [*INVALID.values(), b"PROXY TCP4 127.0.0.1 127.0.0.1 1 1\r\n" * 2]
        listener = "mqtt" if number % 3 == 0 else "proxied"
        link = await Link.dial(self.ground, listener)
        try:
            header = b"PROXY TCP4 127.0.0.1 127.0.0.1 1 1\r\n" if listener == "mqtt" else self.random.choice(headers)
            await link.send(header + hello("liar"))
            link.writer.write_eof()
            self.saw[await link.ended(12)] += 1
        finally:
            link.close()

    def problems(self) -> list[str]:
        return self.never("0x00", "open") + self.once("closed")


class ClosePath(Attack):
    """Clients that break a rule while bytes of theirs are unread: each must read why the node closes."""

    name = "close-path"
    summary = "subscribers break the receive maximum with 200 KB more behind it: they must read all deliveries and the reason"
    must_get = "receive maximum exceeded (0x93), after every delivery that was due"

    async def run(self) -> None:
        await side_by_side(6, self._break)

    async def _break(self, number: int) -> None:
        listener = ("mqtt", "tls")[number % 2]
        link = await logged_in(self.ground, f"close-{number}", listener)
        try:
            topic = b"mallory/close/%d" % number
            await link.send(subscribe_5(1, (topic, 0)))
            await link.expect(SUBACK)
            # Much of what is due must still be on the node's side when it closes: a reset would destroy that.
            link.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * KIB)
            link.writer.transport.pause_reading()  # type: ignore[attr-defined]
            # Yet all of it must fit into the bytes that the node has under way to one client: it leaves the rest in the queue.
            due = [encode_publish(topic, b"%d" % at + bytes(2 * KIB), 0, properties=b"\0") for at in range(50)]
            link.writer.write(b"".join(due))
            await asyncio.sleep(0.3)  # What comes in one read with the error is not due before the node closes.
            burst = (
                *(encode_publish(b"mallory/r", b"x", 2, packet_id=at, properties=b"\0") for at in range(1, 1_002)),
                *(encode_publish(topic, bytes(1_000), 0, properties=b"\0") for _ in range(200)),
            )
            link.writer.write(b"".join(burst))
            await asyncio.sleep(0.3)
            link.writer.transport.resume_reading()  # type: ignore[attr-defined]
            deliveries, last = 0, ""
            while found := await link.next():
                deliveries += found[0] in (3, 16) or (len(found) > 4 and found[4] != b"x")
                last = f"0x{found[2][0]:02x}" if found[0] == 14 else last
            self.saw[f"{last or 'closed without a reason'}"] += 1
            self.saw["every delivery" if deliveries >= 50 else f"{deliveries} deliveries of 50"] += 1
        finally:
            link.close()

    def problems(self) -> list[str]:
        return self.only("0x93", "every delivery")
