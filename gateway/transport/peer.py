"""A peer: the other end of a connection, as far as the transport knows it."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final, Protocol

from penstock.gateway.options import ListenerOptions
from penstock.gateway.transport.token_bucket import TokenBucket
from penstock.store.space.causer import is_local, source_of

SAN_KINDS: Final = ("URI", "email", "DNS")
"""The kinds of alternative names in a certificate that can be a user name. The first name of any of them counts."""


class PeerListener(Protocol):
    """The listener of a peer, as far as connections know it."""

    options: ListenerOptions
    name: str
    is_local: bool
    """Whether only this machine reaches the listener."""
    messages: TokenBucket
    """The messages that all clients of the listener together may publish."""
    bytes: TokenBucket
    """The bytes that all clients of the listener together may send."""
    bytes_in: int
    bytes_out: int

    def closed(self, peer: Peer) -> None:
        """Stop counting the connection of a peer. A second call has no effect."""
        ...


class Peer:
    """The other end of one connection.

    Parameters:
        listener: the listener that accepted the connection.
        host: the numeric address, or empty on a Unix socket. Behind a proxy it is the address that the proxy states.
        port: the port, or 0 on a Unix socket.
    """

    __slots__ = (
        "counted",
        "host",
        "is_local",
        "is_over_rate",
        "listener",
        "port",
        "roles",
        "source",
        "ssl_object",
        "username",
    )

    def __init__(self, listener: PeerListener, host: str, port: int) -> None:
        self.listener = listener
        self.host = host
        self.port = port
        self.source = source_of(host)
        self.is_local = listener.is_local and is_local(host)
        """Whether the client is on this machine. Behind a proxy that goes by the address that the proxy states."""
        self.counted = False
        """Whether the listener and the source count the connection."""
        self.is_over_rate = False
        """Whether the connection exceeds `ListenerOptions.connections_per_s`, so that the server refuses its CONNECT."""
        self.username: str | None = None
        """The user name from the client's certificate, if the listener takes user names from certificates."""
        self.roles: frozenset[str] = frozenset()
        """The roles from the client's certificate, if the listener takes roles from certificates."""
        self.ssl_object: ssl.SSLObject | None = None

    def made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what the TLS handshake has found out about the client."""
        options = self.listener.options
        if options.is_tls:
            self.ssl_object = transport.get_extra_info("ssl_object")
            if self.ssl_object is not None and options.username_from != "none":
                certificate = self.ssl_object.getpeercert() or {}
                self.username = username_of(certificate, options.username_from)
                self.roles = roles_of(certificate, options.roles_from)

    def __str__(self) -> str:
        if not self.host:
            return self.listener.options.socket
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def roles_of(certificate: dict[str, Any], taken_from: str) -> frozenset[str]:
    """Return the roles in a certificate. The arguments are those of `username_of`; roles are taken from "ou" or "none"."""
    if taken_from == "none":
        return frozenset()
    units = [value for part in certificate.get("subject", ()) for kind, value in part if kind == "organizationalUnitName"]
    return frozenset(unit for unit in units if unit and "\0" not in unit)


def username_of(certificate: dict[str, Any], taken_from: str) -> str | None:
    """Return the user name in a certificate, or None if it has none.

    Args:
        certificate: the certificate as `ssl.SSLSocket.getpeercert` describes it; empty if the client sent none.
        taken_from: "cn" or "san", see `ListenerOptions.username_from`.
    """
    if taken_from == "cn":
        names = [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    else:
        names = [value for kind, value in certificate.get("subjectAltName", ()) if kind in SAN_KINDS]
    # Code in C would read a name with U+0000 as another, shorter name.
    return names[0] if names and names[0] and "\0" not in names[0] else None
