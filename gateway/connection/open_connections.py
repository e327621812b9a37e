"""All MQTT connections that are open, whether their CONNECT has come or not."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Final, TypeVar

from penstock.gateway.connection.clients import Closable
from penstock.gateway.protocol.reasons import ReasonCode

CONNECTIONS_PER_CLIENT_MAX: Final = 2
"""Connections open per `mqtt.connections_max`. A connection between the two limits is told in its CONNACK that the node is
full."""

C = TypeVar("C", bound=Closable)


class OpenConnections(Collection[C]):
    """The open connections.

    Parameters:
        clients_max: see `GatewayOptions.connections_max`.
    """

    def __init__(self, clients_max: int) -> None:
        self._connections_max = clients_max * CONNECTIONS_PER_CLIENT_MAX
        self._connections: set[C] = set()
        self._emptied: asyncio.Future[None] | None = None

    def __contains__(self, connection: object) -> bool:
        return connection in self._connections

    def __iter__(self) -> Iterator[C]:
        return iter(self._connections)

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: C) -> None:
        """Add a new connection; close it if too many are open."""
        self._connections.add(connection)
        count = len(self._connections)
        if count > self._connections_max:
            connection.close(f"{count} connections are open: see mqtt.connections_max", ReasonCode.QUOTA_EXCEEDED)

    def remove(self, connection: C) -> None:
        """Remove a connection that has closed."""
        self._connections.discard(connection)
        if self._emptied is not None and not self._connections and not self._emptied.done():
            self._emptied.set_result(None)

    def close_all(self) -> None:
        """Close all connections: the node shuts down."""
        for connection in tuple(self._connections):
            connection.close("", ReasonCode.SERVER_SHUTTING_DOWN)

    async def wait_closed(self, timeout_s: float) -> None:
        """Return when no connection is open, or after `timeout_s` seconds."""
        if self._connections:
            self._emptied = asyncio.get_running_loop().create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._emptied
