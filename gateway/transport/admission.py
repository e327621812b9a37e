"""Admission: which accepted sockets of a listener may become connections, and how many are open."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address
from typing import Final

from penstock.gateway.logbook import Logbook
from penstock.gateway.options import ListenerOptions
from penstock.gateway.transport.peer import Peer, PeerListener
from penstock.gateway.transport.proxy import UNKNOWN
from penstock.gateway.transport.sources import Sources
from penstock.gateway.transport.token_bucket import TokenBucket
from penstock.gateway.transport.turns import Turns
from penstock.store.space.causer import is_local, plain_address, plain_network, source_of

HANDSHAKES_PER_TURN: Final = 16
"""Steps of handshakes, of all listeners, in one turn of the loop. A fleet that comes back at once sends hundreds at a time, and
each takes 0.2 ms with the begin of MQTT, or more in TLS."""


class HandshakeCount:
    """The number of connections of all listeners that are in a TLS handshake or send a PROXY header, and their turns.

    Parameters:
        open_max: the maximum of that number.
    """

    __slots__ = ("open", "open_max", "turns")

    def __init__(self, open_max: int) -> None:
        self.open = 0
        self.open_max = open_max
        self.turns = Turns(HANDSHAKES_PER_TURN)


class Admission:
    """The limits of one listener on its connections.

    Parameters:
        options: the options of the listener.
        handshakes: the handshakes of all listeners.
        sources: the sources of all connections.
        logbook: refusals are logged there.
        now_ms: returns the monotonic time in ms.
    """

    def __init__(
        self,
        options: ListenerOptions,
        handshakes: HandshakeCount,
        sources: Sources,
        logbook: Logbook,
        now_ms: Callable[[], int],
    ) -> None:
        self._options = options
        self._handshakes = handshakes
        self._sources = sources
        self._logbook = logbook
        self._now_ms = now_ms
        self._trusted = [plain_network(network) for network in options.proxy_from]
        self._rate = TokenBucket(options.connections_per_s)
        self._told = TokenBucket(options.connections_per_s)
        """Connections beyond the rate whose CONNECT the server answers with a refusal. There are as many again."""
        self.open = 0
        """Open connections, including those in their handshake."""
        self.refused: dict[str, int] = {}
        """The number of sockets closed before MQTT began, by reason."""

    def admit(self, listener: PeerListener, host: str, port: int) -> Peer | None:
        """Count a new connection and return its peer, or None if the caller has to close the socket.

        Behind a proxy the source of the connection is not known yet: `admit_client` follows.

        Args:
            listener: the listener that accepted the socket.
            host: the numeric address at the other end; empty on a Unix socket.
            port: the port at the other end; 0 on a Unix socket.
        """
        has_handshake = self._options.is_tls or bool(self._trusted)
        now_ms = self._now_ms()
        is_over_rate = bool(self._rate.wait_ms(1, now_ms))
        why = ""
        if self.open >= self._options.connections_max:
            why = "listener_connections"
        elif is_over_rate and (has_handshake or self._told.wait_ms(1, now_ms)):
            why = "connection_rate"
        elif has_handshake and self._handshakes.open >= self._handshakes.open_max:
            why = "handshakes"
        elif self._trusted and not self._is_trusted(host):
            why = "untrusted_proxy"
        elif not self._trusted:
            why = self._sources.refusal(source_of(host), now_ms)
        if why:
            self.note_refusal(host, why)
            return None
        peer = Peer(listener, host, port)
        peer.is_over_rate = is_over_rate
        if is_over_rate:
            self._told.spend(1)
            self.note_refusal(host, "connection_rate")
        else:
            self._rate.spend(1)
        peer.counted = True
        self.open += 1
        if not self._trusted:
            self._sources.opened(peer.source)
        return peer

    def _is_trusted(self, host: str) -> bool:
        """Return whether a PROXY header may come from an address. On a Unix socket the rights of its file decide."""
        address = ip_address(plain_address(host.partition("%")[0])) if host else None
        return address is None or any(address in network for network in self._trusted)

    def admit_client(self, peer: Peer, client: tuple[str, int] | None) -> str:
        """Count the source of a connection that came through a proxy; return why it is refused, or an empty string.

        `client` is what `client_of` returns. A client without an address counts as the proxy, but is not local.
        """
        if client == UNKNOWN:
            peer.is_local = False
        elif client is not None:
            is_of_proxy = is_local(client[0]) and not is_local(peer.host)  # a loopback address of the proxy's machine
            peer.host, peer.port = client
            if not is_of_proxy:
                peer.source = source_of(peer.host)
            peer.is_local = peer.is_local and is_local(peer.host)
        why = self._sources.refusal(peer.source, self._now_ms())
        if why:
            peer.source = ""  # The source doesn't count a connection that it is refused.
        self._sources.opened(peer.source)
        return why

    def note_refusal(self, host: str, why: str, error: str = "") -> None:
        """Count and log a refusal. `why` is a word for the metrics; `error` says more."""
        self.refused[why] = self.refused.get(why, 0) + 1
        details = {"why": error} if error else {}
        self._logbook.note("connection.refused", listener=self._options.name, host=host, reason=why, **details)

    def closed(self, peer: Peer) -> None:
        """Stop counting a connection. A second call has no effect."""
        if peer.counted:
            peer.counted = False
            self.open -= 1
            self._sources.closed(peer.source)
