"""TLS and plain text on the one port of the gRPC listener.

gRPC for Python serves either on a port, and takes no connection that somebody else has accepted. So each byte must pass through
a program that has looked at the first one. On the node's own event loop that would cost every call two more wake-ups of the
thread that does everything else. It is a process of its own (`frontchild`), which uses another core and never waits for the
interpreter of the node. A node without `pop.tls_optional` has no such process, and gRPC listens by itself.

The process forwards the bytes of TLS as they are, so gRPC has the keys, and sees certificates of clients. Its sockets to the
node are bound to a name that contains the address of the client: see `pop.access.caller.address_of`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import structlog

from penstock.store.options import HostPort

logger = structlog.get_logger("pop.front")

CHILD: Final = str(Path(__file__).with_name("frontchild.py"))

BACKLOG: Final = 1_024

BIND_TRIES: Final = 40
BIND_PAUSE_S: Final = 0.05
"""The process of a node that was killed keeps the port for a moment, until it notices."""


class Front:
    """Listens on one address for clients with TLS and clients without.

    Parameters:
        address: Where clients connect.
        connections_max: Maximum number of open connections. A further one is closed at once.
        silent_ms: Time in ms within which a new connection must send its first byte.
        inherited: Socket that listens already, in place of `address`. Its owner keeps it open while no node runs.
    """

    def __init__(self, address: HostPort, connections_max: int, silent_ms: int, inherited: socket.socket | None = None) -> None:
        self._address = address
        self._connections_max = connections_max
        self._silent_s = silent_ms / 1000
        self._token = secrets.token_hex(8)
        self._directory = tempfile.mkdtemp(prefix="penstock-")  # only the owner may enter it
        self._listener = inherited
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def inner(self, name: str) -> str:
        """Return the address at which gRPC must serve `plain` or `tls`."""
        return f"unix:{os.path.join(self._directory, name)}"

    async def start(self) -> int:
        """Open the port, and return its number. gRPC must serve the inner addresses already.

        Raises:
            OSError: Another process listens on the address, or the address is not one of this machine.
        """
        for left in reversed(range(BIND_TRIES)):
            if self._listener is not None:
                break
            try:
                self._listener = _listen(self._address)
                break
            except OSError:
                if not left or not self._address.port:
                    raise
                await asyncio.sleep(BIND_PAUSE_S)
        assert self._listener is not None
        self._start_child(self._listener)
        return int(self._listener.getsockname()[1])

    def accept_no_more(self) -> None:
        """Close the port. Connections that are open go on."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._control is not None:
            self._control.send(b"0")

    async def stop(self) -> None:
        """End all connections, and the process."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start_child(self, listener: socket.socket) -> None:
        self._control, other = socket.socketpair()
        with other:
            descriptors = (listener.fileno(), other.fileno())
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", CHILD, *map(str, descriptors)),
                    *(self._directory, self._token, str(self._connections_max), str(self._silent_s)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._child_ended)

    def _child_ended(self) -> None:
        """Start the process again. Its connections have ended, and clients make new ones."""
        assert self._control is not None
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        self._control = None
        logger.error("front.ended", status=self._process.wait(), effect="all gRPC connections have ended")
        if self._listener is not None:
            self._start_child(self._listener)


def _listen(address: HostPort) -> socket.socket:
    infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, bound = infos[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(bound)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
