"""What passes the gateway, counted for the metrics: by type of packet, by listener, by version, by reason. Never by client."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection
    from penstock.gateway.protocol.reasons import ReasonCode

TYPES = 16
"""Types of packets that four bits can name."""

VERSIONS = {3: "3.1", 4: "3.1.1", 5: "5.0"}
"""Versions of MQTT by the level in a CONNECT. Bits that a bridge sets above them are no part of it."""


class Traffic:
    """Plain integers: `penstock.node.metrics` reads them."""

    def __init__(self) -> None:
        self.packets_in = [0] * TYPES
        """Packets of accepted clients, by type. PUBLISH is counted by `GatewayCounters.publishes_in`."""
        self.packets_out = [0] * TYPES
        """Answers sent, by type. PUBLISH is counted by `GatewayCounters.publishes_out`."""
        self.accepted: dict[tuple[str, str], int] = {}
        """Clients accepted since the start, by listener and version."""
        self.connected: dict[tuple[str, str], int] = {}
        """Clients connected, by listener and version."""
        self.closed: dict[tuple[str, str], int] = {}
        """Connections closed by the node, by listener and reason; those that the client ended have the reason "client"."""
        self.held_off = 0
        """How often a source was held off."""

    def entered(self, connection: Connection) -> None:
        """Count a client that was accepted."""
        key = _key(connection)
        self.accepted[key] = self.accepted.get(key, 0) + 1
        self.connected[key] = self.connected.get(key, 0) + 1

    def refused(self, connection: Connection, reason: ReasonCode) -> None:
        """Count a connection that the node closes."""
        connection.peer.is_refused = True
        self._close(connection, reason.name.lower())

    def left(self, connection: Connection) -> None:
        """Count a connection off."""
        if connection.session.client_id:
            self.connected[_key(connection)] -= 1
        if not connection.peer.is_refused:
            self._close(connection, "client")

    def _close(self, connection: Connection, reason: str) -> None:
        key = connection.peer.listener.name, reason
        self.closed[key] = self.closed.get(key, 0) + 1


def _key(connection: Connection) -> tuple[str, str]:
    return connection.peer.listener.name, VERSIONS.get(connection.level & 0x7F, "other")
