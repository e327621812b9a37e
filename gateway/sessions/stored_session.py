"""The stored form of a session: all that the client finds again when it returns, even if the node was killed meanwhile.

Records change a stored session (`gateway.sessions.stored_sessions`), and the rows of the index are written from it. The session
of a connected client (`gateway.sessions.session`) is ahead of its stored form. The journal records the differences at
intervals.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from penstock.gateway.sessions.changes import Changes, decode_slots, encode_slots
from penstock.gateway.sessions.inflight import Slot
from penstock.gateway.sessions.stored_subscription import StoredDraining, StoredSubscription
from penstock.store.space.accounts import NODE_ACCOUNT

_HEAD = Struct("<BIHQqQQIqQIHIII")
"""CONNECTED and CURTAILED, expiry_s, window, recorded_at, ends_ms, account and source; delay_s, due_ms, position and
size of the will; last_packet_id, subscribed, the number of received messages, and the bytes of the user name. The user name
follows, the packet ids and positions of the received messages, and then the deliveries under way."""

CONNECTED, CURTAILED = 1, 2

_RECEIVED = Struct("<HQ")
"""Packet id and position of a received message."""


class StoredWill(NamedTuple):
    """Where a will is stored: in the record with which its connection began."""

    delay_s: int
    due_ms: int
    """When the server publishes the will, in ms since 1970; 0 while the client is connected."""
    position: int
    """Position of the record in the log."""
    size: int
    """Size of the record, in bytes."""


class StoredSession:
    """A session as its records describe it.

    Parameters:
        client_id: of its client.
    """

    __slots__ = (
        "__weakref__",
        "account",
        "changed_draining",
        "changed_filters",
        "client_id",
        "connected",
        "curtailed",
        "draining",
        "ends_ms",
        "expiry_s",
        "gone",
        "inflight",
        "last_packet_id",
        "received",
        "recorded_at",
        "saved",
        "source",
        "subscribed",
        "subscriptions",
        "user",
        "will",
        "window",
    )

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.gone = False
        """Whether the session has ended. The next save removes its rows."""
        self.saved: SavedRows = NO_ROWS
        """The rows that the index has of this session."""
        self.changed_filters: set[str] = set()
        """Filters whose subscription was added, removed or moved on since the last save."""
        self.changed_draining: set[int] = set()
        """Numbers of draining subscriptions that were added, removed or moved on since the last save."""
        self.subscriptions: dict[str, StoredSubscription] = {}
        """The subscriptions by filter, the oldest first."""
        self.draining: dict[int, StoredDraining] = {}
        """Subscriptions that have ended and still send for others, by number."""
        self.reset()

    def reset(self) -> None:
        """Make this a new session of the client, without anything of an earlier one."""
        self.gone = False
        self.connected = True
        """Whether the client is connected, as far as the log knows."""
        self.curtailed = False
        """Whether the server has ended subscriptions, and the client has added none since. The client must subscribe again, so
        it is told that it has no session."""
        self.user = ""
        """The user that owns the session; empty if nothing vouched for a user name."""
        self.expiry_s = 0
        """Seconds that the session lasts after its connection has ended."""
        self.window = 0
        """How many deliveries may wait for their acknowledgement at once, on the connection that began last."""
        self.recorded_at = 0
        """Position of the last SESSION_OFFSETS record, or of SESSION_OPENED if there is none: SESSIONS_ACKED records name
        it."""
        self.ends_ms = 0
        """When the session ends, in ms since 1970; 0 while the client is connected."""
        self.account = NODE_ACCOUNT
        """Id of the account that is charged for the session (`store.space.ledger`)."""
        self.source = NODE_ACCOUNT
        """Id of the account of the source from which the client has connected last."""
        self.will: StoredWill | None = None
        self.last_packet_id = 0
        """The packet id that was assigned last."""
        self.subscribed = 0
        """Number of subscriptions that the session ever had."""
        self.received: dict[int, int] = {}
        """Positions of the client's QoS 2 messages that are not yet released, by packet id."""
        self.inflight: dict[int, Slot | None] = {}
        """The deliveries under way: see `gateway.sessions.inflight.Inflight`."""
        self.changed_filters.update(self.subscriptions)
        self.subscriptions.clear()
        self.changed_draining.update(self.draining)
        self.draining.clear()

    @property
    def due_ms(self) -> int | None:
        """When the session ends or its will is published, whichever comes first; None while the client is connected."""
        if self.connected or self.gone:
            return None
        return self.ends_ms if self.will is None else min(self.ends_ms, self.will.due_ms)

    @property
    def oldest(self) -> int | None:
        """Position of the oldest record that the session needs; None if it needs none."""
        positions = [slot.position for slot in self.inflight.values() if slot is not None]
        if self.will is not None:
            positions.append(self.will.position)
        return min(positions, default=None)

    def needed(self) -> list[tuple[int, int]]:
        """Return position and size of each record that the session needs."""
        found = [(slot.position, slot.size) for slot in self.inflight.values() if slot is not None]
        return found if self.will is None else [*found, (self.will.position, self.will.size)]

    def apply(self, changes: Changes) -> None:
        """Apply the net changes that a record describes."""
        self.last_packet_id = changes.last_packet_id
        inflight = self.inflight
        for packet_id in changes.done:
            inflight.pop(packet_id, None)
        for packet_id in changes.received:
            inflight[packet_id] = None
        inflight.update(changes.sent)
        for packet_id in changes.released:
            self.received.pop(packet_id, None)
        if changes.cursors or changes.retained or changes.maybe_sent:
            by_number = {one.number: one for one in self.subscriptions.values()}
            for number, offset, _ in changes.cursors:
                if number in self.draining:
                    self.draining[number].cursor = offset
                    self.changed_draining.add(number)
                elif number in by_number:
                    by_number[number].cursor = offset
                    self.changed_filters.add(by_number[number].filter)
            for number, offset in changes.maybe_sent.items():
                if number in self.draining:
                    self.draining[number].maybe_sent = offset
                    self.changed_draining.add(number)
                elif number in by_number:
                    by_number[number].maybe_sent = offset
                    self.changed_filters.add(by_number[number].filter)
            for number, topic in changes.retained.items():
                if number in by_number:
                    one = by_number[number]
                    one.retained_before = None if topic is None else one.retained_before
                    one.retained_after = topic or b""
                    self.changed_filters.add(one.filter)

    # --- the row of the session -------------------------------------------------------------------------------------

    def row(self) -> bytes:
        """Return the value of the session's row: everything but the subscriptions."""
        will = self.will or NO_WILL
        received = sorted(self.received.items())
        user = self.user.encode()
        head = _HEAD.pack(
            self.connected * CONNECTED | self.curtailed * CURTAILED,
            self.expiry_s,
            self.window,
            self.recorded_at,
            self.ends_ms,
            self.account,
            self.source,
            *will,
            self.last_packet_id,
            self.subscribed,
            len(received),
            len(user),
        )
        ids = b"".join(_RECEIVED.pack(*one) for one in received)
        return head + user + ids + encode_slots(list(self.inflight.items()))

    @classmethod
    def from_row(cls, client_id: str, row: bytes) -> StoredSession:
        """Return the session that a row describes, without its subscriptions."""
        found = cls(client_id)
        flags, found.expiry_s, found.window, found.recorded_at, *rest = _HEAD.unpack_from(row)
        found.ends_ms, found.account, found.source, *will, found.last_packet_id, found.subscribed, received, user_bytes = rest
        found.connected, found.curtailed = bool(flags & CONNECTED), bool(flags & CURTAILED)
        stored_will = StoredWill(*will)
        found.will = stored_will if stored_will.size else None
        at = _HEAD.size + user_bytes
        found.user = row[_HEAD.size : at].decode()
        stop = at + received * _RECEIVED.size
        found.received = dict(_RECEIVED.iter_unpack(row[at:stop]))
        found.inflight = dict(decode_slots(row[stop:]))
        found.saved = found.rows()
        return found

    def rows(self) -> SavedRows:
        """Return which rows the index must have of this session, besides those of its subscriptions."""
        return NO_ROWS if self.gone else SavedRows(True, self.connected, self.due_ms, self.oldest, self.source)


class SessionHead(NamedTuple):
    """What a listing shows of a session: a small part of its row, because a search looks at many."""

    client_id: str
    user: str
    expiry_s: int
    ends_ms: int
    has_will: bool

    @classmethod
    def of(cls, stored: StoredSession) -> SessionHead:
        """Return the head of a session that is loaded."""
        return cls(stored.client_id, stored.user, stored.expiry_s, stored.ends_ms, stored.will is not None)

    @classmethod
    def from_row(cls, client_id: str, row: bytes) -> SessionHead:
        """Return the head of the session that a row describes."""
        _, expiry_s, _, _, ends_ms, *_, will_bytes, _, _, _, user_bytes = _HEAD.unpack_from(row)
        return cls(client_id, row[_HEAD.size : _HEAD.size + user_bytes].decode(), expiry_s, ends_ms, will_bytes > 0)


class SavedRows(NamedTuple):
    """Which rows the index has of a session: see `gateway.sessions.rows`."""

    exists: bool
    connected: bool
    due_ms: int | None
    oldest: int | None
    source: int


NO_ROWS = SavedRows(False, False, None, None, NODE_ACCOUNT)
NO_WILL = StoredWill(0, 0, 0, 0)
