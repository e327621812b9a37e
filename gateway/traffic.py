"""What passes the gateway, counted for the metrics: by type of packet, listener, version and reason, never by client."""

from __future__ import annotations

from typing import Final

from penstock.gateway.protocol.reasons import ReasonCode

TYPES: Final = 16
"""Types of packets that the four bits of a fixed header can name."""

VERSIONS: Final = {3: "3.1", 4: "3.1.1", 5: "5.0"}
"""Versions of MQTT by the protocol level in a CONNECT, without the high bit that a bridge sets."""

BY_CLIENT: Final = "client"
"""The reason under which `Traffic.closed` counts connections that the client ended."""


class Traffic:
    """Counts of packets and connections. All are plain integers; `penstock.node.metrics` reads them."""

    def __init__(self) -> None:
        self.packets_in = [0] * TYPES
        """Packets of accepted clients, by type. `GatewayCounters.publishes_in` counts PUBLISH."""
        self.packets_out = [0] * TYPES
        """Answers sent, by type. `GatewayCounters.publishes_out` counts PUBLISH."""
        self.accepted: dict[tuple[str, str], int] = {}
        """Clients accepted since the start, by listener and version."""
        self.connected: dict[tuple[str, str], int] = {}
        """Clients connected now, by listener and version."""
        self.closed: dict[tuple[str, str], int] = {}
        """Connections closed since the start, by listener and the server's reason, or `BY_CLIENT`."""
        self.held_off = 0
        """How often the server began to refuse a client, a user or a source because of what it had done."""

    def client_connected(self, listener: str, level: int) -> None:
        """Count a client that was accepted on a listener, with the protocol level of its CONNECT."""
        key = listener, _version(level)
        self.accepted[key] = self.accepted.get(key, 0) + 1
        self.connected[key] = self.connected.get(key, 0) + 1

    def client_disconnected(self, listener: str, level: int) -> None:
        """Count a client off that `client_connected` has counted."""
        self.connected[listener, _version(level)] -= 1

    def connection_closed(self, listener: str, reason: ReasonCode | None) -> None:
        """Count a connection that has closed; `reason` is None if the client ended it."""
        key = listener, BY_CLIENT if reason is None else reason.name.lower()
        self.closed[key] = self.closed.get(key, 0) + 1


def _version(level: int) -> str:
    return VERSIONS.get(level & 0x7F, "other")
