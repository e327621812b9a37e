"""The gateway's counters: what it has done, and what passes it by type of packet, listener, version and reason."""

from __future__ import annotations

from typing import Final

from penstock.gateway.protocol.reasons import ReasonCode


class GatewayCounters:
    """What the gateway has done since its start. The fields are plain integers; `penstock.node.metrics` reads them."""

    __slots__ = (
        "closed_by_reason",
        "connections_accepted",
        "deliveries_acked",
        "deliveries_returned",
        "deliveries_too_large",
        "deliveries_untaken",
        "packets_in",
        "publishes_dropped",
        "publishes_in",
        "publishes_out",
        "publishes_refused",
        "queued_dropped",
        "sessions_expired",
        "subscriptions",
        "subscriptions_refused",
        "subscriptions_shared",
        "subscriptions_withdrawn",
        "wills_dropped",
    )

    def __init__(self) -> None:
        self.packets_in = 0
        """Packets of all types that accepted clients sent."""
        self.connections_accepted = 0
        """Clients that were accepted."""
        self.publishes_dropped = 0
        """Messages of QoS 0 that were dropped because the disk had no room for them."""
        self.publishes_in = 0
        """Messages that clients published and the store took."""
        self.publishes_out = 0
        """PUBLISH packets that were sent to clients."""
        self.publishes_refused = 0
        """Messages that were refused. An acknowledgement of MQTT 5.0 tells the client so; at QoS 0 no packet does, and neither
        does one of MQTT 3.1.1 when the plugins forbid the message."""
        self.deliveries_acked = 0
        """Deliveries at QoS 1 and 2 that a client has acknowledged."""
        self.deliveries_returned = 0
        """Deliveries of shared subscriptions that went back to the other members unacknowledged."""
        self.deliveries_too_large = 0
        """Messages that were not sent because they exceed the client's maximum packet size. Messages of shared subscriptions
        are not among them, because other members may get them."""
        self.deliveries_untaken = 0
        """Deliveries of shared subscriptions that ended as failed attempts because no member could take the message."""
        self.queued_dropped = 0
        """Messages that were dropped because more than `mqtt.session_queued_max` of them waited for one client."""
        self.sessions_expired = 0
        """Sessions that ended because their expiry interval had passed."""
        self.subscriptions = 0
        """Subscriptions of the clients that are connected now."""
        self.subscriptions_refused = 0
        """Topic filters of SUBSCRIBE packets that were refused."""
        self.subscriptions_shared = 0
        """Shared subscriptions among `subscriptions`."""
        self.subscriptions_withdrawn = 0
        """Subscriptions that ended because their clients may no longer have them."""
        self.wills_dropped = 0
        """Will messages that could not be published."""
        self.closed_by_reason: dict[ReasonCode, int] = {}
        """Connections that the server closed, by reason."""


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
