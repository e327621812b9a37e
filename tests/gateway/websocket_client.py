"""A WebSocket client for tests that must see each frame."""

from __future__ import annotations

import asyncio
from typing import Any

from websockets.client import ClientProtocol
from websockets.frames import OP_BINARY
from websockets.http11 import Response
from websockets.typing import Origin, Subprotocol
from websockets.uri import parse_uri

from penstock.gateway.options import ListenerOptions
from penstock.store.options import KIB
from tests.gateway.packet_cases import connect
from tests.gateway.wire import ANSWER_S_MAX, CLEAN, FREE, WILL, Broker

CONNACK = b"\x20\2\0\0"
WS = ListenerOptions(name="ws", kind="ws", listen=FREE)
"""The listener to which `dial` connects."""


class WebSocketClient:
    """The client's end of a WebSocket, frame by frame: the library's client state machine on a plain socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: ClientProtocol) -> None:
        self.reader = reader
        self.writer = writer
        self.frames = frames

    async def send(self) -> None:
        """Send the bytes that the state machine has ready."""
        self.writer.write(b"".join(self.frames.data_to_send()))
        await self.writer.drain()

    async def events(self) -> list[Any]:
        """Return the next events, or an empty list at the end of the connection."""
        async with asyncio.timeout(ANSWER_S_MAX):
            while not (events := self.frames.events_received()):
                try:
                    data = await self.reader.read(KIB)
                except ConnectionResetError:
                    data = b""
                if not data:
                    return []
                self.frames.receive_data(data)
        return events

    async def packets(self, *payloads: bytes, expected: bytes) -> None:
        """Send each payload as a frame, and check that the server sends the expected MQTT bytes, however it cuts them."""
        for payload in payloads:
            self.frames.send_binary(payload)
        await self.send()
        got = b""
        while len(got) < len(expected):
            events = await self.events()
            assert events, f"the server closed the connection after {got!r}"
            got += b"".join(event.data for event in events if event.opcode is OP_BINARY)
        assert got == expected

    async def close_code(self) -> int | None:
        """Wait for the end of the connection, and return the close code that the server sent."""
        while await self.events():
            pass
        return self.frames.close_rcvd.code if self.frames.close_rcvd is not None else None


async def dial(
    broker: Broker,
    path: str = "/mqtt",
    *,
    protocols: tuple[str, ...] = ("mqtt",),
    origin: str | None = None,
    host: str | None = None,
) -> tuple[WebSocketClient, Response]:
    """Open a WebSocket, and return it with the server's response to the handshake."""
    address = broker.listener("ws").address
    frames = ClientProtocol(
        parse_uri(f"ws://{address}{path}"),
        origin=Origin(origin) if origin else None,
        subprotocols=[Subprotocol(name) for name in protocols] or None,
        max_size=None,
    )
    client = WebSocketClient(*await asyncio.open_connection(address.host, address.port), frames)
    request = frames.connect()
    if host is not None:
        del request.headers["Host"]
        request.headers["Host"] = host
    frames.send_request(request)
    await client.send()
    (response,) = await client.events()
    return client, response


async def connected(broker: Broker, client_id: bytes, opened: list[WebSocketClient], flags: int = CLEAN) -> WebSocketClient:
    client, _ = await dial(broker)
    opened.append(client)
    fields = (b"will", b"gone") if flags & WILL else ()
    await client.packets(connect(flags, client_id, *fields), expected=CONNACK)
    return client
