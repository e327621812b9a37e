"""A listener: the server sockets of one address, and the connections that they accept.

A listener accepts by itself rather than through a server of the event loop. So it closes a connection that exceeds a limit, or
whose source is held off, before it reads a byte or works on a TLS handshake. It takes a PROXY header from the bare socket, and
gives each connection the TLS context of that moment.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from contextlib import suppress
from typing import Final, Protocol

from penstock.gateway.logbook import Logbook
from penstock.gateway.options import PLAIN_NAME, ListenerOptions
from penstock.gateway.transport.admission import Admission
from penstock.gateway.transport.certificates import certificates_of
from penstock.gateway.transport.descriptors import SocketShare
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.token_bucket import TokenBucket
from penstock.gateway.transport.unix_socket import UnixSocketFile
from penstock.store.options import KIB, HostPort
from penstock.store.space.causer import is_local
from penstock.store.watchedfiles import WatchedFiles

ACCEPTED_PER_TURN: Final = 32
"""The maximum number of connections that a listener accepts in one turn of the loop. So a burst of thousands does not delay
messages."""

EXHAUSTED_S: Final = 0.5
"""How long a listener pauses when the system has no more descriptors or memory for a connection."""

NOT_SENT_BYTES: Final = 128 * KIB
"""About how many bytes the kernel buffers per socket beyond those in flight.

Without this bound the kernel buffers up to 4 MB for each client that doesn't read, which no figure of the node's memory shows.
Bytes in flight are not bounded by it, so a long, fast line is still used in full. The row "slow" of `bench-mqtt` shows the
effect on the latency of the other clients.
"""

_EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Beginning(Protocol):
    """What takes the sockets that a listener has admitted."""

    def begin(self, end: socket.socket, peer: Peer, context: ssl.SSLContext | None) -> None:
        """Begin with an admitted socket. `context` is the TLS context of this moment, or None without TLS."""
        ...


class Listener:
    """One listener.

    Parameters:
        options: the protocol and the address.
        backlog: the maximum number of connections that the kernel queues for each address.
        admission: decides which connections may begin.
        beginning: takes admitted connections to where MQTT begins.
        logbook: events that clients cause are logged there.
        share: the descriptors that connections may have; None if they may have all.
    """

    def __init__(
        self,
        options: ListenerOptions,
        backlog: int,
        admission: Admission,
        beginning: Beginning,
        logbook: Logbook,
        share: SocketShare | None = None,
    ) -> None:
        self.options = options
        self.name = options.name
        self.admission = admission
        self._beginning = beginning
        self.certificates: WatchedFiles[ssl.SSLContext] | None = None
        """The certificates, if the listener speaks TLS and has started."""
        self.address = HostPort("", 0)
        """The address in use, once the listener has started. It has no meaning for a Unix socket."""
        self.is_local = options.kind == "unix"
        """Whether only this machine reaches the listener."""
        self.messages = TokenBucket(options.messages_per_s)
        """The messages that all clients of the listener together may publish."""
        self.bytes = TokenBucket(options.bytes_per_s)
        """The bytes that all clients of the listener together may send."""
        self.bytes_in = 0
        self.bytes_out = 0
        self._backlog = backlog
        self._logbook = logbook
        self._share = share
        self._loop: asyncio.AbstractEventLoop
        self._servers: list[socket.socket] = []
        self._unix = UnixSocketFile(options.socket, options.socket_mode) if options.kind == "unix" else None

    def __str__(self) -> str:
        return self.options.socket if self.options.kind == "unix" else str(self.address)

    async def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read the certificate and open the sockets.

        Raises:
            OSError: the certificate can't be used, or the address can't be listened on.
        """
        self._loop = loop
        if self.options.is_tls:
            self.certificates = certificates_of(self.options, self.name, "http/1.1" if self.options.is_websocket else "mqtt")
        try:
            self._servers = [self._unix.bind()] if self._unix is not None else await self._bind()
            for server in self._servers:
                server.setblocking(False)
                server.listen(self._backlog)
        except OSError as error:
            self.close()
            where = self.options.socket or self.options.listen
            hint = (
                "Choose another address with --mqtt HOST:PORT."
                if self.name == PLAIN_NAME
                else f"See mqtt.listeners, {self.name}."
            )
            raise OSError(error.errno, f"MQTT can't listen on {where}: {error.strerror or error}. {hint}") from error
        if self._unix is not None:
            self._unix.publish()
        for server in self._servers:
            loop.add_reader(server, self._accept, server)

    def close(self) -> None:
        """Stop accepting. Open connections stay."""
        for server in self._servers:
            with suppress(ValueError, OSError):  # The reader was never added, or is gone already.
                self._loop.remove_reader(server)
            server.close()
        self._servers.clear()
        if self._unix is not None:
            self._unix.remove()

    def closed(self, peer: Peer) -> None:
        """Stop counting the connection of a peer. A second call has no effect."""
        self.admission.closed(peer)

    async def _bind(self) -> list[socket.socket]:
        """Return a socket for each address of the host. Port 0 becomes the same free port for all."""
        host, port = self.options.listen.host, self.options.listen.port
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        servers: list[socket.socket] = []
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                server = socket.socket(family, kind, protocol)
                servers.append(server)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # Accepted sockets inherit it and the next one.
                if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_BYTES)
                if family == socket.AF_INET6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                server.bind((address[0], port, *address[2:]))
                port = server.getsockname()[1]
                self.is_local = all(is_local(each.getsockname()[0]) for each in servers)
        except OSError:
            for server in servers:
                server.close()
            raise
        self.address = HostPort(host, port)
        return servers

    def _accept(self, server: socket.socket) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                end, address = server.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(server, error)
                return
            host, port = ("", 0) if self._unix is not None else address[:2]
            self.take(end, host, port)

    def take(self, end: socket.socket, host: str, port: int) -> None:
        """Serve a client, or close its socket if it is not admitted.

        Args:
            end: a stream socket. It leads to the client, also where the client has connected elsewhere.
            host: the numeric address of the client; empty on a Unix socket.
            port: its port, or 0.
        """
        fitted = end if self._share is None else self._share.fit(end)
        if fitted is None:
            self.admission.note_refusal(host, "descriptors")
            return
        fitted.setblocking(False)
        peer = self.admission.admit(self, host, port)
        if peer is None:
            fitted.close()
        else:
            self._beginning.begin(fitted, peer, self.certificates.content if self.certificates is not None else None)

    def _pause(self, server: socket.socket, error: OSError) -> None:
        """Stop accepting for a while. The connection stays in the backlog, and would wake the loop again at once."""
        if error.errno not in _EXHAUSTED:
            raise error
        self._logbook.note("listener.exhausted", listener=self.name, why=error.strerror)
        loop = self._loop
        loop.remove_reader(server)
        loop.call_later(EXHAUSTED_S, lambda: server.fileno() < 0 or loop.add_reader(server, self._accept, server))
