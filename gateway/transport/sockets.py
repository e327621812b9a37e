"""Stream sockets: one loop reads everything that can be read in a turn of the event loop, so that the work after it is shared.

One epoll watches all sockets. To the event loop its descriptor is a reader like any other. So a message that comes alone in its
read costs little more than its system calls. On systems without epoll (not Linux) the loop's own transports serve.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from typing import Final

from penstock.gateway.transport.lingering import Lingering
from penstock.gateway.transport.socket_transport import READ_BYTES, SocketTransport
from penstock.gateway.transport.tls import Tls
from penstock.gateway.transport.tls_transport import TlsTransport

READY_MAX: Final = 256
"""The maximum number of sockets handled in a turn. The next turn handles the others."""

MID_TURN_SOCKETS: Final = 16
"""After this many sockets a turn calls `mid_turn`, so that acks go out before the turn ends. The rows of `bench-mqtt` with many
publishers show the gain."""

HAS_TURNS: Final = hasattr(select, "epoll")
"""Whether this system has what `Sockets` needs."""

_READ: Final = getattr(select, "EPOLLIN", 0)


class Sockets:
    """The sockets of a node, read in turns.

    Parameters:
        loop: the event loop.
        mid_turn: called several times in a turn, after some of the protocols got their bytes.
        end_turn: called after all of the protocols got their bytes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, mid_turn: Callable[[], None], end_turn: Callable[[], None]) -> None:
        self._loop = loop
        self._mid_turn = mid_turn
        self._end_turn = end_turn
        self._epoll = select.epoll()
        self._transports: dict[int, SocketTransport] = {}
        self._buffer = memoryview(bytearray(READ_BYTES))
        self.lingering = Lingering(loop)
        """The sockets on which the server has ended and the clients have not."""
        loop.add_reader(self._epoll.fileno(), self._turn)

    def add(self, end: socket.socket, protocol: asyncio.Protocol, tls: Tls | None = None) -> None:
        """Serve a connected, non-blocking socket. This calls `connection_made` at once.

        The protocol gets the calls of any asyncio protocol, and `data_received` at most once in a turn.

        Args:
            end: the socket.
            protocol: gets the bytes, decrypted if there is TLS.
            tls: the TLS of the connection after its handshake, or None.

        Raises:
            OSError: the other end has gone, or the system can't watch so many sockets. The caller closes the socket.
        """
        transport = (
            SocketTransport(self._loop, self, end, protocol)
            if tls is None
            else TlsTransport(self._loop, self, end, protocol, tls)
        )
        transport.watch()
        self._transports[end.fileno()] = transport
        protocol.connection_made(transport)
        transport.begin(self._buffer)

    def close(self) -> None:
        """Stop reading, and close the sockets that linger. The caller has closed all connections before."""
        self.lingering.close()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def watch(self, number: int, events: int, before: int) -> None:
        """Watch the socket with this descriptor for `events` in place of `before`. 0 takes it out of the epoll."""
        if not before:
            self._epoll.register(number, events)
        elif events:
            self._epoll.modify(number, events)
        else:
            self._epoll.unregister(number)

    def forget(self, number: int) -> None:
        """Forget a socket that is no longer watched, and that the caller closes or gives away."""
        del self._transports[number]

    def linger(self, end: socket.socket) -> None:
        """Take over a socket on which everything was sent, and close it once its client has closed its side."""
        self.lingering.add(end)

    def _turn(self) -> None:
        try:
            self._read()
        finally:
            self._end_turn()

    def _read(self) -> None:
        buffer, transports = self._buffer, self._transports
        for at, (number, events) in enumerate(self._epoll.poll(0, READY_MAX), 1):
            if not at % MID_TURN_SOCKETS:
                self._mid_turn()
            transport = transports.get(number)
            if transport is None:  # Another socket of this turn has ended it.
                continue
            try:
                if events != _READ:
                    transport.send_unsent()
                if not transport.reads:
                    continue
                try:
                    received = transport.receive_into(buffer, transport.read_bytes)
                except (BlockingIOError, InterruptedError):
                    continue
                except OSError as error:
                    transport.lose(error)
                    continue
                if received:
                    transport.data_received(buffer[:received].tobytes())
                else:
                    transport.end_of_stream()
            except Exception as error:
                transport.break_off(error)
