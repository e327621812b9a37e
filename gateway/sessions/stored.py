"""What is stored of a session: all that its client finds again when it comes back, whatever became of the node meanwhile.

The rows of the index are written from this, and records change it (`sessions`). The session of a client that is
connected (`gateway.sessions.session`) runs ahead of it: what they differ in is written as one record now and then.
"""

from __future__ import annotations

from itertools import chain
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from penstock.gateway.delivery.encoding import Slot
from penstock.store.record import SESSION_COUNTS, SESSION_CURSOR, SESSION_PACKET_ID, SESSION_SLOT

if TYPE_CHECKING:
    from penstock.gateway.sessions.session import Session

_HEAD = Struct("<BIqIqQIHII")
"""Whether the client is connected, expiry_s, ends_ms; delay_s, due_ms, position and size of the will; last_packet_id,
subscribed, and how many packet ids of received messages follow. Behind those are the deliveries under way."""

_SUBSCRIPTION = Struct("<IIBIQBQ")
"""number, queue id, options, identifier, cursor; whether retained messages are to come, and those before which position. Behind
it stands the topic of the last of them that is out."""


class Changes(NamedTuple):
    """What a session has got on by: the contents of a SESSION_OFFSETS record."""

    last_packet_id: int
    cursors: list[tuple[int, int]]
    """Offsets, by number of the subscription."""
    done: list[int]
    """Packet ids of deliveries that are settled."""
    received: list[int]
    """Packet ids of deliveries whose PUBREC has come."""
    released: list[int]
    """Packet ids of QoS 2 messages of the client whose PUBREL has come."""
    sent: list[tuple[int, Slot | None]]
    retained: dict[int, bytes | None]
    """By number of the subscription: the topic of the last retained message that is out, None where no more are to come."""

    def encode(self) -> tuple[bytes, bytes]:
        """Return body and properties of the record."""
        last_packet_id, cursors, done, received, released, sent, retained = self
        counts = SESSION_COUNTS.pack(last_packet_id, len(cursors), len(done), len(received), len(released), len(sent))
        parts = [counts, *(SESSION_CURSOR.pack(number, offset) for number, offset in cursors)]
        parts += [SESSION_PACKET_ID.pack(packet_id) for ids in (done, received, released) for packet_id in ids]
        parts.append(_encode_slots(sent))
        if not retained:
            return b"".join(parts), b""
        topics = {str(number): topic.decode() if topic is not None else None for number, topic in retained.items()}
        return b"".join(parts), orjson.dumps({"retained": topics})

    def describe(self) -> dict[str, Any]:
        """Return it as a JSON object, for tools."""
        row = self._asdict()
        row["sent"] = [
            {"packet_id": packet_id, **({} if slot is None else {name: getattr(slot, name) for name in slot._fields[1:]})}
            for packet_id, slot in self.sent
        ]
        row["retained"] = {str(number): topic and topic.decode() for number, topic in self.retained.items()}
        return row

    @classmethod
    def decode(cls, body: bytes, properties: bytes) -> Changes:
        """Return what a record says."""
        last_packet_id, cursors, done, received, released, _ = SESSION_COUNTS.unpack_from(body)
        at = SESSION_COUNTS.size
        stop = at + cursors * SESSION_CURSOR.size
        offsets = list(SESSION_CURSOR.iter_unpack(body[at:stop]))
        lists: list[list[int]] = []
        for count in (done, received, released):
            at, stop = stop, stop + count * SESSION_PACKET_ID.size
            lists.append(_decode_ids(body[at:stop]))
        topics = orjson.loads(properties)["retained"] if properties else {}
        retained = {int(number): topic.encode() if topic is not None else None for number, topic in topics.items()}
        return cls(last_packet_id, offsets, lists[0], lists[1], lists[2], _decode_slots(body[stop:]), retained)


def _decode_ids(data: bytes) -> list[int]:
    return [packet_id for (packet_id,) in SESSION_PACKET_ID.iter_unpack(data)]


def _encode_slots(slots: list[tuple[int, Slot | None]]) -> bytes:
    pack = SESSION_SLOT.pack
    return b"".join(
        pack(packet_id, slot.qos, slot.position, slot.size, slot.delivery) if slot is not None else pack(packet_id, 0, 0, 0, 0)
        for packet_id, slot in slots
    )


def _decode_slots(data: bytes) -> list[tuple[int, Slot | None]]:
    return [
        (packet_id, Slot(0, qos, position, size, delivery) if qos else None)
        for packet_id, qos, position, size, delivery in SESSION_SLOT.iter_unpack(data)
    ]


class StoredWill(NamedTuple):
    """Where a will is: in the record with which its connection began."""

    delay_s: int
    due_ms: int
    """When it is to be published, ms since 1970; 0 while the client is connected."""
    position: int
    size: int


class StoredSubscription:
    """A subscription, and how far it has got."""

    __slots__ = ("cursor", "filter", "identifier", "number", "options", "queue_id", "retained_after", "retained_before")

    def __init__(self, topic_filter: str, number: int, queue_id: int, options: int, identifier: int, cursor: int) -> None:
        self.filter = topic_filter
        self.number = number
        self.queue_id = queue_id
        self.options = options
        self.identifier = identifier
        self.cursor = cursor
        self.retained_before: int | None = None
        """Where retained messages are still to come: those that stand before this position."""
        self.retained_after = b""
        """The topic of the last of them that is out."""

    def row(self) -> bytes:
        """Return the value of its row."""
        before = self.retained_before
        head = (self.number, self.queue_id, self.options, self.identifier, self.cursor, before is not None, before or 0)
        return _SUBSCRIPTION.pack(*head) + self.retained_after

    @classmethod
    def from_row(cls, topic_filter: str, row: bytes) -> StoredSubscription:
        """Return the subscription of a row."""
        number, queue_id, options, identifier, cursor, has_retained, before = _SUBSCRIPTION.unpack_from(row)
        found = cls(topic_filter, number, queue_id, options, identifier, cursor)
        if has_retained:
            found.retained_before, found.retained_after = before, row[_SUBSCRIPTION.size :]
        return found


class StoredLeaving(StoredSubscription):
    """What is left of a subscription that has ended: see `gateway.delivery.leaving`."""

    __slots__ = ("cuts", "stop")

    def __init__(self, one: StoredSubscription, stop: int, cuts: dict[int, int]) -> None:
        super().__init__(one.filter, one.number, one.queue_id, 0, 0, one.cursor)
        self.stop = stop
        self.cuts = cuts

    def row(self) -> bytes:
        return super().row() + orjson.dumps({"filter": self.filter, "stop": self.stop, "cuts": list(self.cuts.items())})

    @classmethod
    def from_leaving_row(cls, row: bytes) -> StoredLeaving:
        """Return that of a row."""
        more = orjson.loads(row[_SUBSCRIPTION.size :])
        return cls(StoredSubscription.from_row(more["filter"], row), more["stop"], dict(more["cuts"]))


class StoredSession:
    """A session as the records made it.

    Parameters:
        client_id: its client's.
    """

    __slots__ = (
        "__weakref__",
        "changed_filters",
        "changed_leaving",
        "client_id",
        "connected",
        "ends_ms",
        "expiry_s",
        "gone",
        "inflight",
        "last_packet_id",
        "leaving",
        "received",
        "saved",
        "subscribed",
        "subscriptions",
        "will",
    )

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.gone = False
        self.saved: SavedRows = NO_ROWS
        """The rows of it that the index has."""
        self.changed_filters: set[str] = set()
        """Subscriptions that were added, removed or moved since the last save."""
        self.changed_leaving: set[int] = set()
        """The same of `leaving`."""
        self.subscriptions: dict[str, StoredSubscription] = {}
        self.leaving: dict[int, StoredLeaving] = {}
        """What is left of subscriptions that have ended, by number."""
        self.begin()

    def begin(self) -> None:
        """Be new: without anything of an earlier session of this client."""
        self.gone = False
        self.connected = True
        self.expiry_s = 0
        """How long it lasts without its client."""
        self.ends_ms = 0
        """When it ends, ms since 1970; 0 while its client is connected."""
        self.will: StoredWill | None = None
        self.last_packet_id = 0
        self.subscribed = 0
        """Subscriptions that it ever had."""
        self.received: set[int] = set()
        self.inflight: dict[int, Slot | None] = {}
        self.changed_filters.update(self.subscriptions)
        self.subscriptions.clear()
        self.changed_leaving.update(self.leaving)
        self.leaving.clear()

    @property
    def due_ms(self) -> int | None:
        """When something is to happen to it: it ends, or its will is published. None while its client is connected."""
        if self.connected or self.gone:
            return None
        return self.ends_ms if self.will is None else min(self.ends_ms, self.will.due_ms)

    @property
    def oldest(self) -> int | None:
        """Position of the oldest record that it needs; None where it needs none."""
        positions = [slot.position for slot in self.inflight.values() if slot is not None]
        if self.will is not None:
            positions.append(self.will.position)
        return min(positions, default=None)

    def needed(self) -> list[tuple[int, int]]:
        """Return position and size of the records that it needs."""
        found = [(slot.position, slot.size) for slot in self.inflight.values() if slot is not None]
        return found if self.will is None else [*found, (self.will.position, self.will.size)]

    def apply(self, changes: Changes) -> None:
        """Get on."""
        self.last_packet_id = changes.last_packet_id
        inflight = self.inflight
        for packet_id in changes.done:
            inflight.pop(packet_id, None)
        for packet_id in changes.received:
            inflight[packet_id] = None
        inflight.update(changes.sent)
        self.received.difference_update(changes.released)
        if changes.cursors or changes.retained:
            by_number = {one.number: one for one in self.subscriptions.values()}
            for number, offset in changes.cursors:
                if number in self.leaving:
                    self.leaving[number].cursor = offset
                    self.changed_leaving.add(number)
                elif number in by_number:
                    by_number[number].cursor = offset
                    self.changed_filters.add(by_number[number].filter)
            for number, topic in changes.retained.items():
                if number in by_number:
                    one = by_number[number]
                    one.retained_before = None if topic is None else one.retained_before
                    one.retained_after = topic or b""
                    self.changed_filters.add(one.filter)

    # --- its row ----------------------------------------------------------------------------------------------------

    def row(self) -> bytes:
        """Return the value of its row: all but the subscriptions."""
        will = self.will or NO_WILL
        received = sorted(self.received)
        head = _HEAD.pack(
            self.connected,
            self.expiry_s,
            self.ends_ms,
            *will,
            self.last_packet_id,
            self.subscribed,
            len(received),
        )
        ids = b"".join(map(SESSION_PACKET_ID.pack, received))
        return head + ids + _encode_slots(list(self.inflight.items()))

    @classmethod
    def from_row(cls, client_id: str, row: bytes) -> StoredSession:
        """Return the session of a row, without its subscriptions."""
        found = cls(client_id)
        connected, found.expiry_s, found.ends_ms, *will, found.last_packet_id, found.subscribed, received = _HEAD.unpack_from(
            row
        )
        found.connected = bool(connected)
        stored_will = StoredWill(*will)
        found.will = stored_will if stored_will.size else None
        stop = _HEAD.size + received * SESSION_PACKET_ID.size
        found.received = set(_decode_ids(row[_HEAD.size : stop]))
        found.inflight = dict(_decode_slots(row[stop:]))
        found.saved = found.rows()
        return found

    def rows(self) -> SavedRows:
        """Return which rows of the index follow from it, besides its own and those of its subscriptions."""
        return NO_ROWS if self.gone else SavedRows(True, self.connected, self.due_ms, self.oldest)


class SavedRows(NamedTuple):
    """Which rows the index has of a session: see `sessions`."""

    exists: bool
    connected: bool
    due_ms: int | None
    oldest: int | None


NO_ROWS = SavedRows(False, False, None, None)
NO_WILL = StoredWill(0, 0, 0, 0)


def changes_of(session: Session, stored: StoredSession, released: list[int]) -> Changes | None:
    """Return what a session has got on by since the last record, and the PUBRELs that are to be recorded; None for nothing.

    About 50 ns for each delivery under way and each subscription, and 1 us: so it is done for many messages at once.
    """
    saved, inflight = stored.inflight, session.inflight
    done = [packet_id for packet_id in saved if packet_id not in inflight]
    received: list[int] = []
    sent: list[tuple[int, Slot | None]] = []
    for packet_id, slot in inflight.items():
        if packet_id not in saved:
            sent.append((packet_id, slot))
        elif saved[packet_id] is not slot:
            if slot is None:
                received.append(packet_id)
            else:  # settled, and given again
                done.append(packet_id)
                sent.append((packet_id, slot))
    cursors: list[tuple[int, int]] = []
    retained: dict[int, bytes | None] = {}
    for one in chain(session.subscriptions.values(), session.leaving):
        kept = one.stored
        if kept is None:
            continue
        if one.cursor != kept.cursor:
            cursors.append((kept.number, one.cursor))
        if kept.retained_before is not None and (one.retained is None or one.retained_after != kept.retained_after):
            retained[kept.number] = one.retained_after if one.retained is not None else None
    if not (done or received or released or sent or cursors or retained):
        return None
    return Changes(session.last_packet_id, cursors, done, received, released, sent, retained)
