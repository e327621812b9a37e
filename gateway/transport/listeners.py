"""All listeners of a gateway."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from penstock.gateway.logbook import Logbook
from penstock.gateway.options import GatewayOptions, ListenerOptions
from penstock.gateway.transport.admission import Admission, HandshakeCount
from penstock.gateway.transport.descriptors import SocketShare
from penstock.gateway.transport.handshakes import Handshakes
from penstock.gateway.transport.listener import Listener
from penstock.gateway.transport.overtime import Overtime
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.sockets import Sockets
from penstock.gateway.transport.sources import Sources
from penstock.gateway.transport.websocket import WebSocket
from penstock.store.watchedfiles import WatchedFiles

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection


class Listeners:
    """All listeners of a gateway.

    Parameters:
        options: the options of the gateway. They name the listeners.
        sources: the sources of all connections.
        logbook: events that clients cause are logged there.
        now_ms: returns the monotonic time in ms.
        connect: returns the protocol that serves MQTT to a peer.
        strike: called for a peer that broke TLS.
        overtime: bounds what is handled in one turn of the loop.
        share: the descriptors that connections may have; None if they may have all.
    """

    def __init__(
        self,
        options: GatewayOptions,
        sources: Sources,
        logbook: Logbook,
        now_ms: Callable[[], int],
        connect: Callable[[Peer], Connection],
        strike: Callable[[Peer], None],
        overtime: Overtime,
        share: SocketShare | None = None,
    ) -> None:
        # Handshakes get half of the descriptors at most, so that they can't keep out clients that are done with theirs.
        handshakes_max = options.handshakes_max if share is None else min(options.handshakes_max, share.below // 2)
        self.handshakes = HandshakeCount(handshakes_max)

        first_bytes_max = min(options.connect_bytes_max, options.packet_bytes_max)

        def connect_websocket(peer: Peer) -> asyncio.Protocol:
            return WebSocket(
                connect(peer),
                peer.listener.options,
                options.packet_bytes_max,
                first_bytes_max,
                overtime,
                is_listener_local=peer.listener.is_local,
            )

        def listener_of(each: ListenerOptions) -> Listener:
            admission = Admission(each, self.handshakes, sources, logbook, now_ms)
            begin = connect_websocket if each.is_websocket else connect
            handshakes = Handshakes(each, options.tls_handshake_ms, self.handshakes, admission, begin, strike)
            self._handshakes.append(handshakes)
            return Listener(each, options.listen_backlog, admission, handshakes, logbook, share)

        self._handshakes: list[Handshakes] = []
        self._listeners = [listener_of(each) for each in options.all_listeners]

    def __iter__(self) -> Iterator[Listener]:
        return iter(self._listeners)

    def __getitem__(self, name: str) -> Listener:
        """Return a listener by its name. Raises KeyError."""
        found = next((listener for listener in self._listeners if listener.name == name), None)
        if found is None:
            raise KeyError(name)
        return found

    async def start(self, loop: asyncio.AbstractEventLoop, sockets: Sockets | None) -> None:
        """Open all listeners.

        Args:
            loop: the loop on which they accept.
            sockets: serves the connections; without it the loop's own transports do.

        Raises:
            OSError: a listener can't be opened. None is open then.
        """
        try:
            for handshakes in self._handshakes:
                handshakes.start(loop, sockets)
            for listener in self._listeners:
                await listener.start(loop)
        except BaseException:
            self.close()
            raise
        for certificates in self.certificates():
            certificates.watch(loop)

    def close(self) -> None:
        """Stop accepting. Open connections stay."""
        for listener in self._listeners:
            listener.close()
        for certificates in self.certificates():
            certificates.close()

    async def end_handshakes(self) -> None:
        """Close every socket that is still in its handshake."""
        for handshakes in self._handshakes:
            await handshakes.end_all()

    def certificates(self) -> Iterator[WatchedFiles[ssl.SSLContext]]:
        """Yield the certificates of the listeners that speak TLS and have started."""
        return (listener.certificates for listener in self._listeners if listener.certificates is not None)

    def reload(self) -> None:
        """Read all certificates again."""
        for certificates in self.certificates():
            certificates.reload()
