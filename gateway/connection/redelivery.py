"""The deliveries that an earlier connection of a session left unacknowledged: they go out again [MQTT-4.4.0-1]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.gateway.delivery.client_subscriptions import ClientSubscriptions
from penstock.gateway.delivery.encoding import encode_redelivery
from penstock.gateway.delivery.share_settlements import ShareSettlements
from penstock.gateway.protocol.encode import encode_acks
from penstock.gateway.protocol.packets import PUBREL
from penstock.gateway.sessions.inflight import Slot
from penstock.store.queues.lightqueue import ENTRY
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.gateway.connection.outbox import Outbox

NOT_SENT_AGAIN: Final = (
    "a member of the shared subscription was sent this message at QoS 2 and has not acknowledged it, and the member {}"
)
"""Why a message that must go to no other member is a dead letter."""


class Redelivery:
    """Sends unacknowledged deliveries once more, in their order, before anything else is delivered.

    In a session that lasts, what belongs to QoS 2 waits until everything recorded so far is durable, and what follows it waits
    too. The connection before may have ended before its own packets could go out, and after a crash the node would not know
    their packet ids or the PUBREC.

    Parameters:
        store: has the messages.
        settlements: gives up what cannot go out again.
        subscriptions: of the client; the `inflight` of its session is what goes out again.
        outlet: where the packets go.
    """

    __slots__ = ("_outlet", "_packet_ids", "_settlements", "_store", "_subscriptions")

    def __init__(self, store: Store, settlements: ShareSettlements, subscriptions: ClientSubscriptions, outlet: Outbox) -> None:
        self._store = store
        self._settlements = settlements
        self._subscriptions = subscriptions
        self._outlet = outlet
        self._packet_ids = list(reversed(subscriptions.session.inflight.slots))
        """The packet ids that are still to be sent; the next one is last."""

    def send(self) -> bool:
        """Send as many as there is room for; return whether all have been sent."""
        outlet, inflight, waiting = self._outlet, self._subscriptions.session.inflight, self._packet_ids
        slots = inflight.slots
        permissions, packet_bytes_max = outlet.permissions, outlet.packet_bytes_max
        lasts = self._subscriptions.session.lasts
        while waiting:
            if not outlet.writable or len(slots) - len(waiting) >= inflight.maximum:
                return False
            packet_id = waiting.pop()
            slot = slots.get(packet_id)
            if slot is None:
                if packet_id in slots:
                    self._release(packet_id)
                continue
            if not self._subscriptions.is_wanted(slot):
                self._give_up(packet_id, slot, "may not have the subscription any more")
                continue
            if permissions is not None:  # what the client may receive may have changed
                admitted, decided = permissions.admit(ENTRY.pack(slot.position, slot.size, 0))
                if not decided:  # the outlet is pumped when the plugins have answered
                    waiting.append(packet_id)
                    return False
                if not admitted:
                    self._give_up(packet_id, slot, "may not receive the message any more")
                    continue
            options, lasting = self._subscriptions.redelivery_options(slot), self._subscriptions.lasting(slot)
            data = encode_redelivery(self._store, slot, packet_id, options, lasting=lasting)
            if data is None:
                self._give_up(packet_id, slot)
            elif len(data) > (packet_bytes_max or len(data)):
                self._give_up(packet_id, slot, "has a Maximum Packet Size below it now")
            else:
                send = outlet.send_when_durable if lasts and slot.qos == 2 else outlet.send_publishes
                send(data, 1)
        return True

    def _release(self, packet_id: int) -> None:
        """Send a PUBREL."""
        answer = encode_acks(PUBREL, [packet_id])
        if self._subscriptions.session.lasts:
            self._outlet.send_when_durable(answer, 0)
        else:
            self._outlet.send(answer)

    def _give_up(self, packet_id: int, slot: Slot, why: str = "") -> None:
        """Free the packet id of a delivery that cannot go out again; `why` is empty if its message is gone.

        At QoS 2 the client may have the message, and would take the next one with this packet id for the same. So it gets a
        PUBREL, which a client answers whether it has the message or not, and the PUBCOMP frees the packet id.
        """
        slots = self._subscriptions.session.inflight.slots
        if slot.qos == 2:
            slots[packet_id] = None
            self._release(packet_id)
        else:
            del slots[packet_id]
        if slot.delivery and why:  # no other member of the group gets it [MQTT-4.8.2-4]
            self._settlements.dead_letter([slot.delivery], NOT_SENT_AGAIN.format(why))
        elif slot.delivery:
            self._settlements.acknowledge([slot.delivery])
