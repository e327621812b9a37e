"""The net changes of a session between two of its records: the contents of a SESSION_OFFSETS record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from penstock.gateway.sessions.inflight import Slot
from penstock.store.bodies import SESSION_COUNTS, SESSION_CURSOR, SESSION_PACKET_ID, SESSION_SLOT


class Changes(NamedTuple):
    """What has changed in a session since its last record."""

    last_packet_id: int
    cursors: list[tuple[int, int, int]]
    """Number of a subscription, its new offset, and the position of the message that it has not got yet; 0 if there is none."""
    done: list[int]
    """Packet ids of deliveries that are complete."""
    received: list[int]
    """Packet ids of deliveries whose PUBREC has come."""
    released: list[int]
    """Packet ids of the client's QoS 2 messages whose PUBREL has come."""
    sent: list[tuple[int, Slot | None]]
    """New deliveries: pairs of packet id and slot, which is None if the PUBREC has come."""
    retained: dict[int, bytes | None]
    """By number of a subscription: the topic of the last retained message that was sent, or None if no more are to be sent."""
    maybe_sent: Mapping[int, int] = {}
    """By number of a subscription: the offset before which messages may have been sent by a node that was killed."""

    def encode(self) -> tuple[bytes, bytes]:
        """Return the body and the properties of the record."""
        last_packet_id, cursors, done, received, released, sent, retained, maybe_sent = self
        counts = SESSION_COUNTS.pack(last_packet_id, len(cursors), len(done), len(received), len(released), len(sent))
        parts = [counts, *(SESSION_CURSOR.pack(*cursor) for cursor in cursors)]
        parts += [SESSION_PACKET_ID.pack(packet_id) for ids in (done, received, released) for packet_id in ids]
        parts.append(encode_slots(sent))
        properties: dict[str, Any] = {}
        if retained:
            topics = {str(number): topic.decode() if topic is not None else None for number, topic in retained.items()}
            properties["retained"] = topics
        if maybe_sent:
            properties["maybe_sent"] = {str(number): offset for number, offset in maybe_sent.items()}
        return b"".join(parts), orjson.dumps(properties) if properties else b""

    def describe(self) -> dict[str, Any]:
        """Return the changes as a JSON object, for tools."""
        row = self._asdict()
        row["sent"] = [
            {"packet_id": packet_id, **({} if slot is None else {name: getattr(slot, name) for name in slot._fields[1:]})}
            for packet_id, slot in self.sent
        ]
        row["retained"] = {str(number): topic and topic.decode() for number, topic in self.retained.items()}
        row["maybe_sent"] = {str(number): offset for number, offset in self.maybe_sent.items()}
        return row

    @classmethod
    def decode(cls, body: bytes, properties: bytes) -> Changes:
        """Return the changes that a record describes."""
        last_packet_id, cursors, done, received, released, _ = SESSION_COUNTS.unpack_from(body)
        at = SESSION_COUNTS.size
        stop = at + cursors * SESSION_CURSOR.size
        offsets = list(SESSION_CURSOR.iter_unpack(body[at:stop]))
        lists: list[list[int]] = []
        for count in (done, received, released):
            at, stop = stop, stop + count * SESSION_PACKET_ID.size
            lists.append(decode_packet_ids(body[at:stop]))
        row = orjson.loads(properties) if properties else {}
        topics = row.get("retained", {})
        retained = {int(number): topic.encode() if topic is not None else None for number, topic in topics.items()}
        maybe_sent = {int(number): offset for number, offset in row.get("maybe_sent", {}).items()}
        return cls(last_packet_id, offsets, lists[0], lists[1], lists[2], decode_slots(body[stop:]), retained, maybe_sent)


def decode_packet_ids(data: bytes) -> list[int]:
    """Return the packet ids that are packed in `data`."""
    return [packet_id for (packet_id,) in SESSION_PACKET_ID.iter_unpack(data)]


def encode_slots(slots: list[tuple[int, Slot | None]]) -> bytes:
    """Return pairs of packet id and slot, packed. A QoS of 0 stands for a delivery whose PUBREC has come."""
    pack = SESSION_SLOT.pack
    return b"".join(
        pack(packet_id, slot.qos, slot.position, slot.size, slot.delivery) if slot is not None else pack(packet_id, 0, 0, 0, 0)
        for packet_id, slot in slots
    )


def decode_slots(data: bytes) -> list[tuple[int, Slot | None]]:
    """Return the pairs that `encode_slots` has packed."""
    return [
        (packet_id, Slot(0, qos, position, size, delivery) if qos else None)
        for packet_id, qos, position, size, delivery in SESSION_SLOT.iter_unpack(data)
    ]
