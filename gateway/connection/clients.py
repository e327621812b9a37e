"""The clients that are connected, by client id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from penstock.gateway.protocol.errors import ConnectRefused
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode
from penstock.store.sortednames import SortedNames

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection


class ClientRegistry(Mapping[str, "Connection"]):
    """The connection of each client id. A client id has one connection at most.

    Parameters:
        clients_max: see `GatewayOptions.connections_max`.
    """

    def __init__(self, clients_max: int) -> None:
        self._clients_max = clients_max
        self._clients: dict[str, Connection] = {}
        self._names = SortedNames()

    def __getitem__(self, client_id: str) -> Connection:
        return self._clients[client_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def at_or_after(self, start: str, count: int) -> list[str]:
        """Return up to `count` client ids from `start` on, in order. See `SortedNames.at_or_after`."""
        return self._names.at_or_after(start, count)

    def check_room(self, client_id: str) -> None:
        """Raise ConnectRefused if as many clients as allowed are connected. A takeover needs no room."""
        if len(self._clients) >= self._clients_max and client_id not in self._clients:
            raise ConnectRefused(
                f"{len(self._clients)} clients are connected, which is the limit: see mqtt.connections_max",
                ConnectCode.SERVER_UNAVAILABLE,
                ReasonCode.QUOTA_EXCEEDED,
            )

    def close_older(self, client_id: str) -> None:
        """Close the connection that has a client id now [MQTT-3.1.4-3] 3.1.1:[MQTT-3.1.4-2]."""
        older = self._clients.get(client_id)
        if older is not None:
            older.close("another connection took over its client id", ReasonCode.SESSION_TAKEN_OVER)

    def enter(self, client_id: str, connection: Connection) -> None:
        """Make a connection the one of a client id."""
        if client_id not in self._clients:
            self._names.add(client_id)
        self._clients[client_id] = connection

    def leave(self, client_id: str, connection: Connection) -> None:
        """Remove a connection that has ended, unless a newer one has its client id."""
        if self._clients.get(client_id) is connection:
            del self._clients[client_id]
            self._names.remove(client_id)
