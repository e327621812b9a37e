"""The attacker's end of a connection: any bytes, over TCP, TLS, WebSocket, or TCP after a PROXY header."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from random import Random

from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.fixed_header import FROM_SERVER, FROM_SERVER_5
from penstock.gateway.protocol.packets import CONNACK, DISCONNECT, Packet
from penstock.store.options import KIB, MIB
from tests.attack.ground import MALLORY, MALLORY_PASSWORD, Ground
from tests.fuzz.inputs import HANDSHAKE, frame
from tests.gateway.packet_cases_5 import connect_5
from tests.gateway.wire import CLEAN

WITH_LOGIN = 0xC0
"""Flags of a CONNECT with a user name and a password."""

ANSWER_S_MAX = 20.0

NO_LINGER = struct.pack("ii", 1, 0)


class Link:
    """One connection to the node.

    Parameters:
        is_v5: whether the node's packets are of MQTT 5.0.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_v5: bool = True) -> None:
        self.reader = reader
        self.writer = writer
        self.side = FROM_SERVER_5 if is_v5 else FROM_SERVER
        self._packets: list[Packet] = []
        self._rest = b""

    @classmethod
    async def dial(cls, ground: Ground, listener: str = "mqtt", *, source: str = "", is_v5: bool = True) -> Link:
        """Open a connection. With `source`, a PROXY header on the listener `proxied` states that address."""
        name = "proxied" if source else listener
        context = ground.context() if name in ("tls", "wss") else None
        async with asyncio.timeout(ANSWER_S_MAX):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", ground.ports[name], ssl=context, server_hostname="localhost" if context else None, limit=MIB
            )
        link = cls(reader, writer, is_v5=is_v5)
        if source:
            writer.write(b"PROXY TCP4 %s 192.0.2.1 4000 1883\r\n" % source.encode())
        if name in ("ws", "wss"):
            writer.write(HANDSHAKE)
            async with asyncio.timeout(ANSWER_S_MAX):
                await reader.readuntil(b"\r\n\r\n")
        return link

    async def send(self, *packets: bytes) -> None:
        """Send packets in one write, and wait until there is room for more."""
        self.writer.write(b"".join(packets))
        await self.writer.drain()

    async def next(self, within_s: float = ANSWER_S_MAX) -> Packet:
        """Return the next packet, or `()` at the end of the connection or when nothing came for so long."""
        with suppress(ConnectionError, TimeoutError, OSError):
            async with asyncio.timeout(within_s):
                while not self._packets:
                    data = await self.reader.read(64 * KIB)
                    if not data:
                        return ()
                    packets, used = decode(self._rest + data, 64 * MIB, self.side)
                    self._rest = (self._rest + data)[used:]
                    self._packets = packets[::-1]
                return self._packets.pop()
        return ()

    async def expect(self, *kinds: int) -> Packet:
        """Return the next packet of some types, or `()` at the end."""
        while (found := await self.next()) and found[0] not in kinds:
            pass
        return found

    async def ended(self, within_s: float = ANSWER_S_MAX) -> str:
        """Read to the end of the connection; return how it ended: `0x95` for a DISCONNECT or CONNACK, `closed`, `open`."""
        last = "closed"
        try:
            async with asyncio.timeout(within_s):
                while found := await self.next(within_s):
                    last = reason_of(found) or last
                if last == "closed" and not self.reader.at_eof() and self.reader.exception() is None:
                    return "open"
        except TimeoutError:
            return "open"
        return last

    def reset(self) -> None:
        """End the connection with RST."""
        end = self.writer.get_extra_info("socket")
        if end is not None:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.transport.abort()


def reason_of(found: Packet) -> str:
    """Return the reason of a CONNACK or DISCONNECT as text, or an empty string for another packet."""
    if found[0] == CONNACK:
        return f"0x{found[2][1]:02x}"
    if found[0] == DISCONNECT:
        return f"0x{found[2][0]:02x}" if found[2] else "0x00"
    return ""


def any_source(random: Random) -> str:
    """Return an address of the network for benchmarks (RFC 2544): there are 131,072."""
    return f"198.{random.randrange(18, 20)}.{random.randrange(256)}.{random.randrange(1, 255)}"


def hello(
    client_id: str, user: str = MALLORY, password: str = MALLORY_PASSWORD, *, about: bytes = b"\0", flags: int = CLEAN
) -> bytes:
    """Return a CONNECT of MQTT 5.0 with a login."""
    return connect_5(flags | WITH_LOGIN, client_id.encode(), user.encode(), password.encode(), about=about, keep_alive_s=0)


async def logged_in(
    ground: Ground, client_id: str, listener: str = "mqtt", *, about: bytes = b"\0", flags: int = CLEAN
) -> Link:
    """Return the connection of a client that the node has accepted as the user mallory.

    Raises:
        ConnectionRefusedError: the node did not accept it.
    """
    link = await Link.dial(ground, listener)
    said = hello(client_id, about=about, flags=flags)
    await link.send(frame(0x82, said) if listener in ("ws", "wss") else said)
    if listener in ("ws", "wss"):
        async with asyncio.timeout(ANSWER_S_MAX):
            await link.reader.read(KIB)
        return link
    answer = await link.expect(CONNACK)
    if not answer or answer[2][1]:
        link.close()
        raise ConnectionRefusedError(f"the login was refused: {answer}")
    return link
