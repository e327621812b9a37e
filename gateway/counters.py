"""The gateway's counters."""

from __future__ import annotations

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
