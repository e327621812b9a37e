"""Where commands reach a node: the control socket in its data directory, and the paths that it serves.

Commands import this module. The server's, `penstock.node.control`, takes aiohttp along.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET = "control.sock"
"""Name of the socket in the data directory."""

ADDRESS_BYTES_MAX = 107
"""Maximum length of the path of a Unix socket on Linux."""

HOLD = "/v1/hold"
"""POST takes a hold of log and index, and the response goes on until it ends. GET with `?id=` answers 200 while it lasts."""

CLOCK = "/v1/clock"
"""GET answers with the state of the node's clock. POST with `?offset_ms=` confirms the jump to the time of day that is ahead
by that."""

CLUSTER_MOVE = "/v1/cluster/move"
"""POST with `?to=` makes a node that leads hand over to that replica and follow. Without `to` it chooses one."""

CLIENTS = "/v1/clients"
"""GET answers with RocketMQ's clients that use the node."""

CLIENT_THREADS = "/v1/clients/threads"
"""POST with `?client=` answers with what the threads of that client do."""

CLIENT_VERIFY = "/v1/clients/verify"
"""POST with `?client=&message_id=` answers whether that client's listener succeeds with the message."""

CLIENT_RECONNECT = "/v1/clients/reconnect"
"""POST with `?client=` tells that client to connect again."""


@contextmanager
def address_of(data_dir: Path) -> Iterator[str]:
    """Return an address of the control socket of a data directory, valid within the context. Raises OSError.

    A path that is too long for an address leads through a descriptor of the directory instead.
    """
    path = str(data_dir / SOCKET)
    if len(os.fsencode(path)) <= ADDRESS_BYTES_MAX:
        yield path
        return
    handle = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET}"
    finally:
        os.close(handle)
