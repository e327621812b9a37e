"""The sockets of the admin listener: a few connections at a time, of which the oldest makes way for a new one."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Container
from contextlib import suppress
from typing import Final

from penstock.node.adminconnection import AdminConnection
from penstock.store.space.causer import is_local

ACCEPTED_PER_TURN: Final = 8
"""Maximum number of connections accepted in one turn of the loop."""

BACKLOG: Final = 1024
"""Maximum number of connections that wait to be accepted. They take no descriptors, and the system may allow fewer."""

PAUSE_S: Final = 0.5
"""Seconds for which the listener pauses when the system has no more descriptors or memory for a connection."""

STALLED_S: Final = 30.0
"""Seconds after which the system ends a connection whose client takes nothing of what is sent, with and without TLS."""

BUSY_S: Final = 30.0
"""Seconds for which a connection with a request under way makes way for no other one."""

HANDSHAKE_S: Final = 10.0
"""Seconds that a TLS handshake may take."""

_EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class AdminSockets:
    """Accepts the connections of an HTTP server.

    aiohttp bounds no number of connections. Here a new connection beyond the bound closes the oldest one, so that idle sockets
    keep no probe out. A client with a connection that it uses again opens another one. A connection that takes nothing of an
    answer for `STALLED_S` is closed, too.

    Parameters:
        make: makes the protocol of each connection.
        connections_max: the maximum number of open connections.
        context: returns the TLS context of this moment; None without TLS.
        streams: connections that make way for no other one. There are fewer than `connections_max`.
    """

    def __init__(
        self,
        make: Callable[[], AdminConnection],
        connections_max: int,
        context: Callable[[], ssl.SSLContext | None] = lambda: None,
        streams: Container[AdminConnection] = (),
    ) -> None:
        self._make = make
        self._streams = streams
        self._context = context
        self._connections_max = connections_max
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._open: dict[AdminConnection, float] = {}
        """The connections, the oldest first, and since when they are open. Some may have ended."""
        self._beginning: dict[socket.socket, None] = {}
        """The connections in their handshake, the oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Those that begin connections: the loop itself keeps none of them alive."""
        self.is_local = True
        """Whether only this machine reaches the listener."""
        self.closed_early = 0
        """Number of connections that made way for others."""

    async def start(self, host: str, port: int) -> int:
        """Listen on all addresses of a host, and return the port. Raises OSError."""
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                listening = socket.socket(family, kind, protocol)
                self._listening.append(listening)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind((address[0], port, *address[2:]))
                self.is_local = self.is_local and is_local(listening.getsockname()[0])
                port = listening.getsockname()[1]  # port 0 becomes the same free port for all addresses
                listening.setblocking(False)
                listening.listen(BACKLOG)
        except OSError:
            self.close()
            raise
        for listening in self._listening:
            self._loop.add_reader(listening, self._accept, listening)
        return port

    def close(self) -> None:
        """Stop accepting. Open connections stay; the server closes them."""
        for listening in self._listening:
            with suppress(ValueError, OSError):  # the reader was never added
                self._loop.remove_reader(listening)
            listening.close()
        self._listening.clear()
        for end in tuple(self._beginning):
            self._end_handshake(end)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                end, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._loop.remove_reader(listening)  # the connection stays in the backlog, and would wake the loop at once
                self._loop.call_later(PAUSE_S, self._resume, listening)
                return
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(STALLED_S * 1000))
            if self._has_room():
                self._beginning[end] = None
                task = self._loop.create_task(self._begin(end))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self.closed_early += 1
                end.close()

    def _resume(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening, self._accept, listening)

    def _has_room(self) -> bool:
        """Return whether one more connection may begin, after the oldest one is closed where it must be.

        Half of the connections may be in their handshake, so that handshakes that never end close no others. A connection whose
        request is under way makes way last, and not before it has been open for `BUSY_S`.
        """
        self._open = {connection: since_s for connection, since_s in self._open.items() if not connection.has_ended}
        if len(self._open) + len(self._beginning) < self._connections_max:
            return True
        if self._open and len(self._beginning) < max(self._connections_max // 2, 1):
            oldest = self._oldest_to_close()
            if oldest is None:
                return False
            del self._open[oldest]
            oldest.abort()
        else:
            self._end_handshake(next(iter(self._beginning)))
        self.closed_early += 1
        return True

    def _oldest_to_close(self) -> AdminConnection | None:
        """Return the oldest connection that is not being served, or else the oldest that has been open for long, or None."""
        idle = next((connection for connection in self._open if not connection.is_served), None)
        if idle is not None:
            return idle
        oldest = next((handler for handler in self._open if handler not in self._streams), None)
        return oldest if oldest is not None and self._loop.time() - self._open[oldest] > BUSY_S else None

    def _end_handshake(self, end: socket.socket) -> None:
        """Let a handshake fail. Cancelling its task is no way: the descriptor may then be closed here and by uvloop."""
        del self._beginning[end]
        with suppress(OSError):  # the client has gone already
            end.shutdown(socket.SHUT_RDWR)

    async def _begin(self, end: socket.socket) -> None:
        try:
            context = self._context()
            connection = self._make()
            await self._loop.connect_accepted_socket(
                lambda: connection, end, ssl=context, ssl_handshake_timeout=HANDSHAKE_S if context is not None else None
            )
        except OSError:  # the client has gone already, or speaks no TLS that the listener accepts
            end.close()
        except BaseException:
            end.close()
            raise
        else:
            self._open[connection] = self._loop.time()
        finally:
            self._beginning.pop(end, None)
