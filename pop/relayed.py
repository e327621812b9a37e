"""How gRPC serves callers whose connections another replica relays.

gRPC for Python takes no connection that somebody else has accepted. So it listens on Unix sockets in the data directory as
well, which only the node's own user may reach. The node connects there for each caller, from a name that contains the caller's
address: see `pop.access.caller.address_of`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

TLS = "relayed-tls.sock"
PLAIN = "relayed.sock"


class RelayedCallers:
    """The Unix sockets for callers that are relayed.

    Parameters:
        directory: gets the sockets. It must be private.
        has_tls, has_plain: what the listener speaks.

    Raises:
        OSError: the directory can't be opened.
    """

    def __init__(self, directory: Path, *, has_tls: bool, has_plain: bool) -> None:
        self._directory = directory
        self._has_tls, self._has_plain = has_tls, has_plain
        self._handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self._token = secrets.token_hex(8)
        self._connections = 0

    def address(self, name: str) -> str:
        """Return the address at which gRPC must serve `TLS` or `PLAIN`."""
        return f"unix:{self._path(name)}"

    def _path(self, name: str) -> str:
        return f"/proc/self/fd/{self._handle}/{name}"  # that of the directory may be too long for an address

    async def connect(self, host: str, port: int, *, begins_tls: bool) -> socket.socket:
        """Return a connection for a caller. Raises OSError.

        Args:
            host, port: the address of the caller.
            begins_tls: whether the caller's first byte is that of a TLS handshake. It matters where both are served.
        """
        self._connections += 1
        inner = socket.socket(socket.AF_UNIX)
        try:
            inner.setblocking(False)
            inner.bind(f"\0penstock-{self._token}.{self._connections}:{host}:{port}")
            is_tls = self._has_tls and (begins_tls or not self._has_plain)
            await asyncio.get_running_loop().sock_connect(inner, self._path(TLS if is_tls else PLAIN))
        except BaseException:
            inner.close()
            raise
        return inner

    def close(self) -> None:
        """Remove the sockets. Connections that are open go on."""
        for name in (TLS, PLAIN):
            with suppress(FileNotFoundError):
                (self._directory / name).unlink()
        os.close(self._handle)
