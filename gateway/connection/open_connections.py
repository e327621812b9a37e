"""All MQTT connections that are open, whether their CONNECT has come or not."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.gateway.auth.authorizer import Authorizer
from penstock.gateway.connection.backpressure import Backpressure
from penstock.gateway.connection.clients import ClientRegistry
from penstock.gateway.connection.keep_alive import KeepAliveWheel
from penstock.gateway.counters import Traffic
from penstock.gateway.protocol.reasons import ReasonCode

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection

CONNECTIONS_PER_CLIENT_MAX: Final = 2
"""Connections open per `mqtt.connections_max`. A connection between the two limits is told in its CONNACK that the node is
full."""


class OpenConnections(Collection["Connection"]):
    """The open connections. When one closes, it is removed from everything that knows it.

    Parameters:
        clients: the connections whose CONNECT was accepted.
        keep_alives: watches all of them for silence.
        backpressure: may wait to resume them.
        authorizer: keeps what the plugins have said about them.
        traffic: counts them.
        clients_max: see `GatewayOptions.connections_max`.
        connect_timeout_ms: see `GatewayOptions.connect_timeout_ms`.
    """

    def __init__(
        self,
        clients: ClientRegistry,
        keep_alives: KeepAliveWheel,
        backpressure: Backpressure,
        authorizer: Authorizer,
        traffic: Traffic,
        *,
        clients_max: int,
        connect_timeout_ms: int,
    ) -> None:
        self.clients = clients
        self.keep_alives = keep_alives
        self._backpressure = backpressure
        self._authorizer = authorizer
        self._traffic = traffic
        self._connections_max = clients_max * CONNECTIONS_PER_CLIENT_MAX
        self._connect_timeout_s = connect_timeout_ms / 1000
        self._connections: dict[Connection, None] = {}
        """In the order in which they came, so that a node that stops closes them in the same order in each run."""
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        """Connections in the order in which they came. Some may have sent their CONNECT by now."""
        self._emptied: asyncio.Future[None] | None = None

    def __contains__(self, connection: object) -> bool:
        return connection in self._connections

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._connections)

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: Connection) -> None:
        """Add a new connection, which must send its CONNECT in time; close it if too many are open."""
        self.keep_alives.watch_until(connection, connection.received_s + self._connect_timeout_s)
        self._connections[connection] = None
        self._oldest_waiting()
        self._waiting[connection] = None
        count = len(self._connections)
        if count > self._connections_max:
            connection.close(f"{count} connections are open: see mqtt.connections_max", ReasonCode.QUOTA_EXCEEDED)

    def shed(self) -> bool:
        """Close the connection that has waited longest for its CONNECT, to make room; return whether there is one."""
        oldest = self._oldest_waiting()
        if oldest is None:
            return False
        del self._waiting[oldest]
        oldest.drop("the node has no more file descriptors, and no CONNECT has come yet", ReasonCode.QUOTA_EXCEEDED)
        return True

    def _oldest_waiting(self) -> Connection | None:
        """Return the connection that has waited longest for its CONNECT, and forget those before it."""
        while self._waiting:
            oldest = next(iter(self._waiting))
            if not oldest.level:
                return oldest
            del self._waiting[oldest]
        return None

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has closed."""
        listener, client_id = connection.peer.listener, connection.session.client_id
        self._connections.pop(connection, None)
        self._waiting.pop(connection, None)
        listener.closed(connection.peer)
        self._backpressure.forget(connection)
        self._authorizer.left(connection)
        if client_id:
            self._traffic.client_disconnected(listener.name, connection.level)
        if connection.closed_for is None:
            self._traffic.connection_closed(listener.name, None)
        self.keep_alives.forget(connection)
        self.clients.leave(client_id, connection)
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
