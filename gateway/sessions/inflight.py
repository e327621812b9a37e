"""The deliveries of one session that wait for an acknowledgement, by packet id. MQTT 5.0, 4.3 and 4.9."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from penstock.gateway.protocol.packets import PUBACK, PUBCOMP, PUBREC

PACKET_ID_MAX: Final = 65_535

AWAITED: Final = {1: PUBACK, 2: PUBREC}
"""The acknowledgement that a delivery waits for first, by its QoS. After the PUBREC a delivery at QoS 2 waits for PUBCOMP."""


class Slot(NamedTuple):
    """The place of one packet id in an encoded batch, and the record that its packet was made of.

    The session keeps the slot until the delivery is acknowledged, so that the message can be sent again.
    """

    offset: int
    """Offset of the packet id in the bytes of the batch."""
    qos: int
    """QoS of the packet, 1 or 2."""
    position: int
    """Position of the message's record in the log."""
    size: int
    """Size of that record, in bytes."""
    delivery: int = 0
    """In a shared subscription: the id that POP gave the delivery (`pop.core.checkpoint.delivery_id`); otherwise 0."""


class Inflight:
    """The deliveries under way of one session, by packet id.

    Parameters:
        maximum: deliveries of QoS 1 and 2 that may wait for their acknowledgement at once.
    """

    __slots__ = ("last_packet_id", "maximum", "slots")

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.last_packet_id = 0
        """The packet id that was assigned last."""
        self.slots: dict[int, Slot | None] = {}
        """The deliveries in the order of sending; None for one whose PUBREC has come and whose PUBCOMP has not."""

    @property
    def room(self) -> int:
        """How many more deliveries may go out now. It is negative if the client's window has shrunk below what is out."""
        return self.maximum - len(self.slots)

    def assign(self, slot: Slot) -> int:
        """Assign a free packet id to a delivery and return it [MQTT-2.2.1-3]. There must be `room`."""
        slots = self.slots
        packet_id = self.last_packet_id
        while True:
            packet_id = packet_id + 1 if packet_id < PACKET_ID_MAX else 1
            if packet_id not in slots:
                break
        self.last_packet_id = packet_id
        slots[packet_id] = slot
        return packet_id

    def assign_run(self, batch: Sequence[Slot]) -> Sequence[int]:
        """Assign a packet id to each delivery of a batch, and return them: see `assign`. There must be `room` for all."""
        first = self.last_packet_id + 1
        packet_ids = range(first, first + len(batch))
        if packet_ids.stop > PACKET_ID_MAX + 1 or not self.slots.keys().isdisjoint(packet_ids):
            return [self.assign(slot) for slot in batch]
        self.slots.update(zip(packet_ids, batch, strict=True))
        self.last_packet_id = packet_ids.stop - 1
        return packet_ids

    def acknowledge_run(self, packet_ids: Iterable[int]) -> tuple[int, list[int]]:
        """Apply PUBACKs of the client; return how many were expected, and the shared deliveries among these."""
        slots = self.slots
        expected = 0
        deliveries = []
        for packet_id in packet_ids:
            slot = slots.get(packet_id)
            if slot is not None and slot.qos == 1:
                del slots[packet_id]
                expected += 1
                if slot.delivery:
                    deliveries.append(slot.delivery)
        return expected, deliveries

    def acknowledge(self, kind: int, packet_id: int, *, is_refused: bool = False) -> bool:
        """Apply an acknowledgement of the client; return whether it was expected.

        A PUBREC keeps its packet id in use until the PUBCOMP comes (4.3.3). A PUBREC that refuses the message frees it at once.

        Args:
            kind: PUBACK, PUBREC or PUBCOMP.
            packet_id: as in the packet.
            is_refused: the packet's reason code is a failure.
        """
        slots = self.slots
        if packet_id not in slots:
            return False
        slot = slots[packet_id]
        if kind != (PUBCOMP if slot is None else AWAITED[slot.qos]):
            return False
        if kind == PUBREC and not is_refused:
            slots[packet_id] = None
        else:
            del slots[packet_id]
        return True
