"""The sockets of gRPC's connections. gRPC shows nobody its sockets, and has no call that closes one connection."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Collection
from contextlib import suppress
from ipaddress import ip_address
from typing import Final
from urllib.parse import unquote

FILES_PER_TURN: Final = 128
"""Open files that are looked at in one turn of the loop. Each takes about 10 us."""


async def shut_down(peers: Collection[str], port: int) -> int:
    """Shut down connections of this process, and return how many there were.

    It looks at each open file of the process, some in each turn of the loop. A thread would wait for the interpreter's lock
    after each system call, and so take seconds just when the loop is busy with what the connections cost.

    Args:
        peers: their peers, as gRPC names them.
        port: of the listener, to tell them from connections of the same peers to other listeners; 0 if it has none.
    """
    wanted = {unquote(peer) for peer in peers}
    closed = 0
    for number, name in enumerate(os.listdir("/dev/fd"), 1):
        if number % FILES_PER_TURN == 0:
            await asyncio.sleep(0)
        with suppress(OSError):  # it was closed meanwhile, or is not connected
            own = os.dup(int(name))  # a descriptor of its own can't come to mean another file in between
            if not stat.S_ISSOCK(os.fstat(own).st_mode):
                os.close(own)
                continue
            with socket.socket(fileno=own) as connection:
                if connection.type == socket.SOCK_STREAM and peer_of(connection, port) in wanted:
                    connection.shutdown(socket.SHUT_RDWR)
                    closed += 1
    return closed


def peer_of(connection: socket.socket, port: int) -> str:
    """Return the peer of a connection as gRPC names it, without escapes; empty if it belongs to another listener.

    Raises:
        OSError: it is not connected.
    """
    address = connection.getpeername()
    if connection.family == socket.AF_UNIX:
        # Connections that come through `pop.front` have the address of their client in an abstract name.
        return "unix-abstract:" + address[1:].decode(errors="replace") if isinstance(address, bytes) else f"unix:{address}"
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or (port and connection.getsockname()[1] != port):
        return ""
    host, peer_port = address[:2]
    mapped = getattr(ip_address(host.partition("%")[0]), "ipv4_mapped", None)
    if connection.family == socket.AF_INET or mapped is not None:
        return f"ipv4:{mapped or host}:{peer_port}"
    return f"ipv6:[{host}]:{peer_port}"
