"""A peer: who is at the other end of a connection, as far as its transport tells."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

from penstock.gateway.transport.sources import source_of

if TYPE_CHECKING:
    from penstock.gateway.transport.listener import Listener

SAN_KINDS = ("URI", "email", "DNS")
"""The alternative names of a certificate that can be a user name. The first one counts, of whatever kind."""


class Peer:
    """The other end of one connection.

    Parameters:
        listener: where it came in.
        host: its numeric address; empty on a Unix socket. Behind a proxy what the proxy says.
        port: its port, 0 on a Unix socket.
    """

    __slots__ = ("counted", "host", "is_over_rate", "listener", "port", "source", "ssl_object", "username")

    def __init__(self, listener: Listener, host: str, port: int) -> None:
        self.listener = listener
        self.host = host
        self.port = port
        self.source = source_of(host)
        self.counted = False
        """Whether it counts as a connection of its listener and its source."""
        self.is_over_rate = False
        """Whether it is beyond `ListenerOptions.connections_per_s`, and to be told so."""
        self.username: str | None = None
        """The user name that its certificate gives it, where the listener takes it from there."""
        self.ssl_object: ssl.SSLObject | None = None

    def made(self, transport: asyncio.BaseTransport) -> None:
        """Take what a TLS handshake has shown."""
        options = self.listener.options
        if options.is_tls:
            self.ssl_object = transport.get_extra_info("ssl_object")
            if self.ssl_object is not None and options.username_from != "none":
                self.username = username_of(self.ssl_object.getpeercert() or {}, options.username_from)

    def __str__(self) -> str:
        if not self.host:
            return self.listener.options.socket
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def username_of(certificate: dict[str, Any], taken_from: str) -> str | None:
    """Return the user name in a certificate, as `ssl.SSLSocket.getpeercert` describes it; None if there is none.

    Args:
        certificate: empty where the client sent none.
        taken_from: "cn" or "san", see `ListenerOptions.username_from`.
    """
    if taken_from == "cn":
        names = [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    else:
        names = [value for kind, value in certificate.get("subjectAltName", ()) if kind in SAN_KINDS]
    # A name with U+0000 would read as another one to whatever is written in C.
    return names[0] if names and names[0] and "\0" not in names[0] else None
