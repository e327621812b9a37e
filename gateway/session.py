"""A session: what the server knows of one client beyond its connection. MQTT 3.1.1, 4.1.

A session holds no messages. It holds a cursor for each subscription, and packet ids: which deliveries wait for their ack,
and which QoS 2 messages of the client were stored already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gateway.packets import PUBACK, PUBCOMP, PUBREC

if TYPE_CHECKING:
    from gateway.packets import Will
    from gateway.subscription import Subscription

PACKET_ID_MAX: Final = 65_535

AWAITED: Final = {1: PUBACK, 2: PUBREC}
"""The ack that a delivery waits for first, by its QoS. After PUBREC a QoS 2 delivery waits for PUBCOMP."""


class Session:
    """The session of one client id.

    Parameters:
        client_id: never empty.
        inflight_max: deliveries of QoS 1 and 2 that may wait for their ack.
        will: what is published when the connection ends without a DISCONNECT.
    """

    __slots__ = ("client_id", "inflight", "inflight_max", "last_packet_id", "received", "subscriptions", "will")

    def __init__(self, client_id: str, inflight_max: int, will: Will | None) -> None:
        self.client_id = client_id
        self.inflight_max = inflight_max
        self.will = will
        self.subscriptions: dict[str, Subscription] = {}
        self.inflight: dict[int, int] = {}
        """Packet ids of deliveries under way, with the type of the ack that each waits for."""
        self.received: set[int] = set()
        """Packet ids of QoS 2 messages that are stored and not released yet: a repetition is no new message [MQTT-4.3.3-2]."""
        self.last_packet_id = 0

    @property
    def room(self) -> int:
        """How many deliveries of QoS 1 and 2 may go out now."""
        return self.inflight_max - len(self.inflight)

    def take_packet_id(self, qos: int) -> int:
        """Return a packet id that is free [MQTT-2.3.1-4], and note what it waits for. There must be `room`."""
        inflight = self.inflight
        packet_id = self.last_packet_id
        while True:
            packet_id = packet_id + 1 if packet_id < PACKET_ID_MAX else 1
            if packet_id not in inflight:
                break
        self.last_packet_id = packet_id
        inflight[packet_id] = AWAITED[qos]
        return packet_id

    def acked(self, kind: int, packet_id: int) -> bool:
        """Note an ack of a delivery; return whether it was expected.

        A PUBREC keeps the packet id: it is free when the PUBCOMP has come (4.3.3).
        """
        if self.inflight.get(packet_id) != kind:
            return False
        if kind == PUBREC:
            self.inflight[packet_id] = PUBCOMP
        else:
            del self.inflight[packet_id]
        return True
