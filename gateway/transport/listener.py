"""Listeners: sockets that accept, and what stands between a socket and its connection.

Every listener accepts by itself, not by the loop's server: so a connection that is too many, or from a source that is held
off, is closed before a byte of it is read or a TLS handshake is worked on; a PROXY header is taken from the bare socket; and
each connection gets the TLS context of that moment. It costs 12 us a connection more (measured, of 28).
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from penstock.gateway.options import PLAIN_NAME, ListenerOptions
from penstock.gateway.token_bucket import TokenBucket
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.proxy import ProxyHeaderInvalid, client_of, read_header
from penstock.gateway.transport.sockets import Sockets
from penstock.gateway.transport.sources import source_of
from penstock.gateway.transport.tls import Certificates, Tls
from penstock.gateway.transport.websocket import WebSocket
from penstock.store.options import KIB, HostPort

if TYPE_CHECKING:
    from penstock.gateway.gateway import Gateway

logger = structlog.get_logger("gateway")

ACCEPTED_PER_TURN = 64
"""Connections that a listener accepts in one turn of the loop: about 2 ms. A burst of thousands delays nobody's messages."""

EXHAUSTED_S = 0.5
"""How long a listener rests when the system has no more descriptors or memory for a connection."""

NOT_SENT_BYTES = 128 * KIB
"""Bytes that the kernel takes of a socket ahead of what is on its way, roughly. Without this bound it takes 4 MB for each
client that doesn't read, which no count of the node's memory shows: with a hundred of them p99 of the others' latency was worse
by a third (measured). What is on its way is not bounded by it, so a line that is long and fast is used to the full."""

WATCH_S = 2.0
"""How often the files of certificates are looked at."""

_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Listener:
    """One listener.

    Parameters:
        gateway: whom the connections belong to.
        options: what is spoken, and where.
    """

    def __init__(self, gateway: Gateway, options: ListenerOptions) -> None:
        self._gateway = gateway
        self.options = options
        self.name = options.name
        self.certificates: Certificates | None = None
        """Of one that speaks TLS, once it has started."""
        self.address = HostPort("", 0)
        """Where it really listens, once it has started; of no meaning to a Unix socket."""
        self.is_local = options.kind == "unix"
        """Whether only this machine reaches it."""
        self._trusted = [ip_network(network) for network in options.proxy_from]
        self._rate = TokenBucket(options.connections_per_s)
        self._told = TokenBucket(options.connections_per_s)
        """Connections beyond the rate that are told so: as many again."""
        self.messages = TokenBucket(options.messages_per_s)
        self.bytes = TokenBucket(options.bytes_per_s)
        self._servers: list[socket.socket] = []
        self._socket_file: tuple[int, int] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self.open = 0
        """Connections open, those in their handshake included."""
        self.bytes_in = 0
        self.bytes_out = 0
        self.refused: dict[str, int] = {}
        """Connections closed before they were any, by reason."""

    def __str__(self) -> str:
        return self.options.socket if self.options.kind == "unix" else str(self.address)

    # --- the sockets ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the certificate and open the sockets.

        Raises:
            OSError: the certificate can't be used, or the address can't be listened on.
        """
        if self.options.is_tls:
            self.certificates = Certificates(self.options)
        loop, backlog = self._gateway.loop, self._gateway.options.listen_backlog
        try:
            self._servers = [self._bind_unix()] if self.options.kind == "unix" else await self._bind()
            for server in self._servers:
                server.setblocking(False)
                server.listen(backlog)
        except OSError as error:
            self.close()
            where = self.options.socket or self.options.listen
            hint = (
                "choose another address with --mqtt HOST:PORT"
                if self.name == PLAIN_NAME
                else f"see mqtt.listeners, {self.name}"
            )
            raise OSError(error.errno, f"MQTT can't listen on {where}: {error.strerror or error}; {hint}") from error
        if self.options.kind == "unix":
            self._publish_unix()
        for server in self._servers:
            loop.add_reader(server, self._accept, server)

    async def _bind(self) -> list[socket.socket]:
        """Return a socket for each address of the host. Port 0 is the same free one for all."""
        host, port = self.options.listen.host, self.options.listen.port
        found = await self._gateway.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        servers: list[socket.socket] = []
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                server = socket.socket(family, kind, protocol)
                servers.append(server)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is accepted has it too, and the next
                if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_BYTES)
                if family == socket.AF_INET6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                server.bind((address[0], port, *address[2:]))
                port = server.getsockname()[1]
                self.is_local = all(ip_address(each.getsockname()[0].partition("%")[0]).is_loopback for each in servers)
        except OSError:
            for server in servers:
                server.close()
            raise
        self.address = HostPort(host, port)
        return servers

    def _bind_unix(self) -> socket.socket:
        """Return a socket with a file of its own beside the one that is wanted: nobody finds it before it has its mode."""
        path = Path(self.options.socket)
        if path.exists() or path.is_symlink():
            _check_stale(path)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.unlink(missing_ok=True)
        server = socket.socket(socket.AF_UNIX)
        try:
            server.bind(str(beside))
            beside.chmod(self.options.socket_mode)
        except OSError:
            server.close()
            beside.unlink(missing_ok=True)
            raise
        return server

    def _publish_unix(self) -> None:
        """Give the socket's file its name, in place of a stale one."""
        path = Path(self.options.socket)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        found = beside.stat()
        self._socket_file = found.st_dev, found.st_ino
        beside.rename(path)

    def close(self) -> None:
        """Accept nothing more. Connections stay."""
        for server in self._servers:
            with suppress(ValueError, OSError):
                self._gateway.loop.remove_reader(server)
            server.close()
        self._servers.clear()
        if self._socket_file is not None:
            path = Path(self.options.socket)
            with suppress(FileNotFoundError):
                found = path.stat()
                if (found.st_dev, found.st_ino) == self._socket_file:  # another node may have taken its place
                    path.unlink()
            self._socket_file = None

    async def end_handshakes(self) -> None:
        """End what is not a connection yet."""
        handshakes = tuple(self._handshakes)
        for task in handshakes:
            task.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)

    # --- accepting --------------------------------------------------------------------------------------------------

    def _accept(self, server: socket.socket) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                end, address = server.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._rest(server, error)
                return
            end.setblocking(False)
            self._admit(end, address)

    def _rest(self, server: socket.socket, error: OSError) -> None:
        """Accept nothing for a while: the connection stays in the backlog, and would wake the loop at once again."""
        if error.errno not in _EXHAUSTED:
            raise error
        self._gateway.logbook.note("listener.exhausted", listener=self.name, why=error.strerror)
        loop = self._gateway.loop
        loop.remove_reader(server)
        loop.call_later(EXHAUSTED_S, lambda: server.fileno() < 0 or loop.add_reader(server, self._accept, server))

    def _admit(self, end: socket.socket, address: Any) -> None:
        """Begin with a connection, or close it."""
        host, port = ("", 0) if self.options.kind == "unix" else (address[0], address[1])
        gateway = self._gateway
        has_handshake = self.certificates is not None or bool(self._trusted)
        now_ms = gateway.now_ms()
        is_over_rate = bool(self._rate.wait_ms(1, now_ms))
        why = ""
        if self.open >= self.options.connections_max:
            why = "listener_connections"
        elif is_over_rate and (has_handshake or self._told.wait_ms(1, now_ms)):
            why = "connection_rate"
        elif has_handshake and gateway.handshakes >= gateway.options.handshakes_max:
            why = "handshakes"
        elif self._trusted and not any(ip_address(host.partition("%")[0]) in network for network in self._trusted):
            why = "untrusted_proxy"
        elif not self._trusted:
            why = gateway.sources.refusal(source_of(host), now_ms)
        if why:
            end.close()
            self._note_refusal(host, why)
            return
        peer = Peer(self, host, port)
        peer.is_over_rate = is_over_rate
        if is_over_rate:
            self._told.spend(1)
            self._note_refusal(host, "connection_rate")
        else:
            self._rate.spend(1)
        peer.counted = True
        self.open += 1
        if not self._trusted:
            gateway.sources.opened(peer.source)
        if gateway.sockets is not None and not has_handshake:
            self._begin(gateway.sockets, end, peer)
            return
        gateway.handshakes += has_handshake
        task = gateway.loop.create_task(self._connect(end, peer))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    def _begin(self, sockets: Sockets, end: socket.socket, peer: Peer, tls: Tls | None = None) -> None:
        """Let MQTT begin on a socket, which may be gone."""
        try:
            sockets.add(end, self._protocol(peer), tls)
        except OSError as error:
            end.close()
            self.closed(peer)
            self._note_refusal(peer.host, "handshake_lost", str(error))

    async def _connect(self, end: socket.socket, peer: Peer) -> None:
        """Bring a socket to where MQTT begins."""
        gateway, context = self._gateway, self.certificates.context if self.certificates else None
        limit_s = gateway.options.tls_handshake_ms / 1000
        why, error_text = "", ""
        try:
            if self._trusted:
                why = await self._find_client(end, peer, limit_s)
            if not why and gateway.sockets is not None:
                tls = Tls(context) if context is not None else None
                if tls is not None:
                    async with asyncio.timeout(limit_s):
                        await tls.shake_hands(gateway.loop, end)
                self._begin(gateway.sockets, end, peer, tls)
            elif not why:
                await gateway.loop.connect_accepted_socket(
                    lambda: self._protocol(peer), end, ssl=context, ssl_handshake_timeout=limit_s if context else None
                )
        except asyncio.CancelledError:
            end.close()
            raise
        except ProxyHeaderInvalid as error:
            why, error_text = "proxy_header", str(error)
        except TimeoutError:
            why = "handshake_timeout"
        except (ssl.SSLError, OSError) as error:  # the client's doing, or it has gone
            is_tls = isinstance(error, ssl.SSLError)
            why, error_text = "tls" if is_tls else "handshake_lost", str(getattr(error, "reason", "") or error)
            if is_tls:
                gateway.strike(peer)
        finally:
            gateway.handshakes -= context is not None or bool(self._trusted)
            if why:
                end.close()
                self.closed(peer)
                self._note_refusal(peer.host, why, error_text)

    async def _find_client(self, end: socket.socket, peer: Peer, limit_s: float) -> str:
        """Take the PROXY header; return why its client is refused, or nothing."""
        gateway = self._gateway
        async with asyncio.timeout(limit_s):
            client = client_of(await read_header(gateway.loop, end))
        if client is not None:
            peer.host, peer.port = client
            peer.source = source_of(peer.host)
        why = gateway.sources.refusal(peer.source, gateway.now_ms())
        if why:
            peer.source = ""  # it isn't counted there
        gateway.sources.opened(peer.source)
        return why

    def _protocol(self, peer: Peer) -> asyncio.Protocol:
        connection = self._gateway.connect(peer)
        if self.options.is_websocket:
            return WebSocket(connection, self.options, self._gateway.options.packet_bytes_max)
        return connection

    def _note_refusal(self, host: str, why: str, error: str = "") -> None:
        self.refused[why] = self.refused.get(why, 0) + 1
        details = {"why": error} if error else {}
        self._gateway.logbook.note("connection.refused", listener=self.name, host=host, reason=why, **details)

    def closed(self, peer: Peer) -> None:
        """Count a connection off, once."""
        if peer.counted:
            peer.counted = False
            self.open -= 1
            self._gateway.sources.closed(peer.source)


def _check_stale(path: Path) -> None:
    """Raise OSError unless a path is a socket on which nobody listens."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise FileExistsError(errno.EEXIST, "there is a file of that name, which is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except BlockingIOError:
            pass  # its backlog is full: somebody is there
    raise OSError(errno.EADDRINUSE, "another process listens there")


class Listeners:
    """All listeners of a gateway.

    Parameters:
        gateway: its options say which there are.
    """

    def __init__(self, gateway: Gateway) -> None:
        options = gateway.options
        plain = [ListenerOptions(name=PLAIN_NAME, listen=options.listen)] if options.plain == "on" else []
        self._gateway = gateway
        self._listeners = [Listener(gateway, each) for each in (*plain, *options.listeners)]
        self._watching: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[Listener]:
        return iter(self._listeners)

    def __getitem__(self, name: str) -> Listener:
        return next(listener for listener in self._listeners if listener.name == name)

    async def start(self) -> None:
        """Open all. Raises OSError, and leaves none open."""
        try:
            for listener in self._listeners:
                await listener.start()
        except BaseException:
            self.close()
            raise
        if any(listener.certificates is not None for listener in self._listeners):
            self._watch()

    def close(self) -> None:
        """Accept nothing more."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        for listener in self._listeners:
            listener.close()

    async def end_handshakes(self) -> None:
        """End what is not a connection yet."""
        for listener in self._listeners:
            await listener.end_handshakes()

    def _watch(self) -> None:
        self._watching = self._gateway.loop.call_later(WATCH_S, self._watch)
        self.reload(changed_only=True)

    def reload(self, *, changed_only: bool = False) -> None:
        """Read certificates again, all or those whose files were replaced. A bad one is logged, and the one before it stays."""
        for listener in self._listeners:
            certificates = listener.certificates
            if certificates is None or (changed_only and not certificates.changed()):
                continue
            try:
                certificates.reload()
            except OSError as error:
                logger.error("tls.reload_failed", listener=listener.name, why=str(error))
            else:
                logger.info("tls.reloaded", listener=listener.name, certificate=listener.options.certificate)
