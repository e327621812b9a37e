"""A `Sockets` without a node, for tests of transports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from penstock.gateway.transport.socket_transport import SocketTransport
from penstock.gateway.transport.sockets import Sockets

BUFFER_BYTES = 8192


class Recorder(asyncio.Protocol):
    """A protocol that records the calls that it gets.

    Parameters:
        react: called with each piece of data that arrives.
        stays: whether the connection stays open after the far end has closed its side.
    """

    def __init__(self, react: Callable[[Recorder, bytes], None] | None = None, *, stays: bool = False) -> None:
        self.react = react
        self.stays = stays
        self.received: list[bytes] = []
        self.said: list[str] = []
        self.error: Exception | None = None
        self.transport: SocketTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, SocketTransport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received.append(data)
        if self.react is not None:
            self.react(self, data)

    def eof_received(self) -> bool:
        self.said.append("eof")
        return self.stays

    def pause_writing(self) -> None:
        self.said.append("pause")

    def resume_writing(self) -> None:
        self.said.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.said.append("lost")
        self.error = exc


class Stage:
    """A `Sockets`, and the far ends of its connections."""

    def __init__(self) -> None:
        self.turns = 0
        self.look: Callable[[], None] = lambda: None
        self.sockets = Sockets(asyncio.get_running_loop(), lambda: self.look(), self._turned)
        self.far: list[socket.socket] = []

    def _turned(self) -> None:
        self.turns += 1

    def add(self, protocol: Recorder) -> socket.socket:
        """Add one end of a new connection; return the other end."""
        near, far = self.connect()
        self.sockets.add(near, protocol)
        return far

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a connection that is not in `Sockets` yet."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            far = socket.create_connection(listening.getsockname())
            near, _ = listening.accept()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        near.setblocking(False)
        far.setblocking(False)
        self.far.append(far)
        return near, far
