"""A session: what the server knows of one client beyond its connection. MQTT 5.0, 4.1.

A session holds no messages. It holds a cursor for each subscription, and packet ids: which deliveries wait for their ack,
and which QoS 2 messages of the client were stored already. This is that of a client that is connected. What is left of it
while the client is away is `gateway.sessions.stored`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.gateway.protocol.packets import PUBACK, PUBCOMP, PUBREC

if TYPE_CHECKING:
    from penstock.gateway.delivery.encoding import Slot
    from penstock.gateway.delivery.leaving import Leaving
    from penstock.gateway.delivery.subscription import Subscription
    from penstock.gateway.sessions.stored import StoredSession

PACKET_ID_MAX: Final = 65_535

AWAITED: Final = {1: PUBACK, 2: PUBREC}
"""The ack that a delivery waits for first, by its QoS. After PUBREC a QoS 2 delivery waits for PUBCOMP."""

MATCHES_MAX: Final = 4096
"""Topics of which a session remembers which of its subscriptions match them, where some overlap."""


class Session:
    """The session of one client id.

    Parameters:
        client_id: never empty.
        inflight_max: deliveries of QoS 1 and 2 that may wait for their ack.
        stored: what is stored of it, where that is anything.
        user: its client's name, where a certificate or a plugin vouches for one.
    """

    __slots__ = (
        "_matches",
        "client_id",
        "expiry_s",
        "has_will",
        "inflight",
        "inflight_max",
        "last_packet_id",
        "lasts",
        "leaving",
        "no_local",
        "received",
        "stored",
        "subscribed",
        "subscriptions",
        "user",
    )

    def __init__(self, client_id: str, inflight_max: int, stored: StoredSession | None = None, user: str = "") -> None:
        self.client_id = client_id
        self.inflight_max = inflight_max
        self.stored = stored
        self.user = user
        self.lasts = False
        """Its subscriptions and packet ids are stored. Else it is stored for its will only, if at all."""
        self.has_will = False
        """A will is stored, to be published when the connection ends without a DISCONNECT."""
        self.expiry_s = 0
        """Seconds that it lasts when its connection has ended."""
        self.subscriptions: dict[str, Subscription] = {}
        self.leaving: list[Leaving] = []
        """Subscriptions that have ended, and still send what those that remain rely on them for."""
        self.subscribed = 0
        """Subscriptions that it ever had: numbers them."""
        self.no_local = 0
        """How many of its subscriptions want no messages of its own."""
        self.inflight: dict[int, Slot | None] = {}
        """Packet ids of deliveries under way, in the order of sending; None where a PUBREC has come, and a PUBCOMP is to."""
        self.received: set[int] = set()
        """Packet ids of QoS 2 messages that are stored and not released yet: a repetition is no new message [MQTT-4.3.3-10]."""
        self.last_packet_id = 0
        self._matches: dict[str, tuple[Subscription, ...]] = {}

    @property
    def owner(self) -> str:
        """What a session that doesn't last is called among the owners of a transient queue."""
        return f"session:{id(self)}"

    @property
    def room(self) -> int:
        """How many deliveries of QoS 1 and 2 may go out now; none or less where too many are under way."""
        return self.inflight_max - len(self.inflight)

    def take_packet_id(self, slot: Slot) -> int:
        """Return a packet id that is free [MQTT-2.2.1-3], and note its delivery. There must be `room`."""
        inflight = self.inflight
        packet_id = self.last_packet_id
        while True:
            packet_id = packet_id + 1 if packet_id < PACKET_ID_MAX else 1
            if packet_id not in inflight:
                break
        self.last_packet_id = packet_id
        inflight[packet_id] = slot
        return packet_id

    def acked(self, kind: int, packet_id: int, *, is_refused: bool = False) -> bool:
        """Note an ack of a delivery; return whether it was expected.

        A PUBREC keeps the packet id: it is free when the PUBCOMP has come (4.3.3), or at once if it refuses the message.
        """
        if packet_id not in self.inflight:
            return False
        slot = self.inflight[packet_id]
        if kind != (PUBCOMP if slot is None else AWAITED[slot.qos]):
            return False
        if kind == PUBREC and not is_refused:
            self.inflight[packet_id] = None
        else:
            del self.inflight[packet_id]
        return True

    # --- subscriptions that match the same topics -------------------------------------------------------------------

    def subscriptions_changed(self) -> None:
        """To be called when a subscription was added, replaced or removed."""
        self._matches.clear()

    def matching(self, topic: str) -> tuple[Subscription, ...]:
        """Return the subscriptions that match a topic, the oldest first."""
        found = self._matches.get(topic)
        if found is None:
            if len(self._matches) >= MATCHES_MAX:
                self._matches.clear()
            found = tuple(
                sorted(
                    (one for one in self.subscriptions.values() if one.matches(topic)),
                    key=lambda one: one.number,
                )
            )
            self._matches[topic] = found
        return found
