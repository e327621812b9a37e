"""The numeric addresses that an address to listen on stands for."""

from __future__ import annotations

import socket
from ipaddress import ip_address

from penstock.store.options import HostPort


def resolved(listen: HostPort) -> tuple[str, ...]:
    """Return the numeric addresses of a host, each once. It may ask a name server. Raises OSError."""
    try:
        ip_address(listen.host)
    except ValueError:
        found = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return tuple(dict.fromkeys(str(address[0]) for *_, address in found))
    return (listen.host,)
