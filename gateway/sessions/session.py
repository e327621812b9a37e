"""The session of a connected client: what the server knows of the client beyond its connection. MQTT 5.0, 4.1.

A session holds no messages. It holds the client's packet ids: which deliveries wait for their acknowledgement, and which QoS 2
messages of the client are stored already. Its subscriptions are cursors (`gateway.delivery.client_subscriptions`). While the
client is away only the stored session exists (`gateway.sessions.stored_session`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from penstock.gateway.sessions.inflight import Inflight
from penstock.gateway.sessions.stored_session import StoredSession
from penstock.gateway.sessions.unrecorded import Unrecorded
from penstock.store.space.causer import NODE, Causer

if TYPE_CHECKING:
    from penstock.gateway.delivery.subscription import Subscription


NOTHING_UNRECORDED: Final = Unrecorded()
"""Stands in all sessions that don't last, and never changes: ten thousand idle connections need no objects for nothing."""


class Session:
    """The session of one client id.

    Parameters:
        client_id: never empty, once the client is accepted.
        inflight_max: deliveries of QoS 1 and 2 that may wait for their acknowledgement at once.
        stored: the stored session, if there is one.
        user: the client's user name where a certificate or a plugin vouches for one; otherwise empty.
        causer: who is charged for what the client creates.
    """

    __slots__ = (
        "causer",
        "client_id",
        "expiry_s",
        "has_will",
        "inflight",
        "lasts",
        "no_local",
        "received",
        "stored",
        "subscribed",
        "subscriptions",
        "unrecorded",
        "user",
    )

    def __init__(
        self, client_id: str, inflight_max: int, stored: StoredSession | None = None, user: str = "", causer: Causer = NODE
    ) -> None:
        self.client_id = client_id
        self.stored = stored
        self.user = user
        self.causer = causer
        self.lasts = False
        """Whether subscriptions and packet ids are stored. A session that doesn't last is stored for its will only, if at
        all."""
        self.has_will = False
        """Whether a will is stored that the server publishes if the connection ends without a DISCONNECT."""
        self.expiry_s = 0
        """Session expiry interval: seconds that the session lasts after its connection has ended."""
        self.subscriptions: Iterable[Subscription] = ()
        """The subscriptions whose progress is recorded, with those that are draining."""
        self.subscribed = 0
        """Number of subscriptions that the session ever had. The next one gets this number."""
        self.no_local = 0
        """Number of subscriptions that exclude the client's own messages (the option No Local)."""
        self.inflight = Inflight(inflight_max)
        self.unrecorded = NOTHING_UNRECORDED
        """In a session that lasts: what was sent and acknowledged since its last full record."""
        self.received: set[int] = set()
        """Packet ids of the client's QoS 2 messages that are stored and not yet released: a PUBLISH that repeats one of these
        ids is no new message [MQTT-4.3.3-10]."""

    @property
    def owner(self) -> str:
        """The name of this session among the owners of a transient queue, if the session doesn't last."""
        return f"session:{id(self)}"
