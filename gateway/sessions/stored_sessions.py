"""The sessions that outlive their connections, and the wills of all sessions: a part of the store.

While a client is away nothing of its session is in memory. So a million sessions cost disk space only, and a start reads none
of them. The store reads a session when its client connects, when the session ends, and when its will is due.

All sessions together are one owner of a light queue. If each were an owner of its own, a queue that a thousand devices
subscribe to would have a row with a thousand names. A count of subscriptions tells when no session uses the queue any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice, takewhile
from typing import Any, Final
from weakref import WeakValueDictionary

import orjson

from penstock.gateway.sessions import rows
from penstock.gateway.sessions.changes import Changes
from penstock.gateway.sessions.stored_session import SessionHead, StoredSession, StoredWill
from penstock.gateway.sessions.stored_subscription import StoredDraining, StoredSubscription
from penstock.store.bodies import SESSIONS_ACKED_HEAD
from penstock.store.index.index import Batch, Index
from penstock.store.part import Apply
from penstock.store.properties import decode_properties
from penstock.store.queues.queues import Queues
from penstock.store.record import Flag, Kind, Record
from penstock.store.space.accounts import NODE_ACCOUNT, Resource
from penstock.store.space.ledger import Ledger

OWNER: Final = "sessions"
"""The name of all sessions together among the owners of a light queue."""


class StoredSessions:
    """The stored sessions.

    Parameters:
        queues: the light queues of the store.
        ledger: is charged for each session and each subscription.
    """

    def __init__(self, queues: Queues, ledger: Ledger) -> None:
        self._queues = queues
        self._ledger = ledger
        self._index: Index | None = None
        self._loaded: WeakValueDictionary[str, StoredSession] = WeakValueDictionary()
        self._changed: dict[str, StoredSession] = {}
        """Sessions that the next save writes. They take precedence over their rows in the index."""
        self._uses: dict[int, int] = {}
        """Number of subscriptions by queue id, for the queues where it has changed since the last save."""
        self._acked: dict[int, int] = {}
        """Size of each SESSIONS_ACKED record that is not obsolete, by position, in the order of the log."""
        self._acked_changed: set[int] = set()
        """Positions of those that were added or became obsolete since the last save."""
        self._count = 0
        self._damaged_before = 0
        """End of the last range of the log that `penstock repair` has set aside; 0 if there is none."""
        self.has_replayed_damage = False
        """Whether this start has replayed a record that a repair has put in the place of damaged ones."""
        self._saved_totals = b""

    def __len__(self) -> int:
        """Return the number of stored sessions, those of connected clients included."""
        return self._count

    def get(self, client_id: str) -> StoredSession | None:
        """Return the session of a client, or None if none is stored."""
        found = self._find(client_id)
        return None if found is None or found.gone else found

    def at_or_after(self, start: str, count: int) -> list[tuple[str, SessionHead | None]]:
        """Return up to `count` client ids with stored sessions from one on, in order, as of the last commit, with their heads.

        None in place of a head says that the session has ended since. Only an empty answer means that none follow.
        """
        listed: list[tuple[str, SessionHead | None]] = []
        for key, row in islice(self._rows(rows.SESSION, start.encode()), count):
            client_id = key[len(rows.SESSION) :].decode()
            loaded = self._loaded.get(client_id)
            if loaded is None:
                listed.append((client_id, SessionHead.from_row(client_id, row)))
            else:
                listed.append((client_id, SessionHead.of(loaded) if not loaded.gone else None))
        return listed

    def subscription(self, client_id: str, topic_filter: str) -> StoredSubscription | None:
        """Return the stored subscription of a client to a filter, without loading the session; None if there is none."""
        session = self._loaded.get(client_id)
        if session is not None:
            return session.subscriptions.get(topic_filter)
        assert self._index is not None, "the store has not recovered yet"
        row = self._index.get(rows.SUBSCRIPTION + client_id.encode() + b"\0" + topic_filter.encode())
        return StoredSubscription.from_row(topic_filter, row) if row is not None else None

    def subscriptions_of(self, queue_id: int) -> int:
        """Return how many stored subscriptions use a light queue."""
        return self._uses_of(queue_id)

    def received(self, stored: StoredSession) -> list[int]:
        """Return the packet ids of a client's QoS 2 messages that are not yet released.

        The record that released a message may have been in a range of the log that was damaged. A packet id from before such
        a range is left out: the client's next message with it would otherwise be acknowledged as a repetition, and not be
        stored. If the client repeats the message itself, it is stored twice, which is the lesser evil.
        """
        return [packet_id for packet_id, position in stored.received.items() if position >= self._damaged_before]

    def acked_records(self) -> Iterator[tuple[int, int]]:
        """Yield position and size of the SESSIONS_ACKED records that are not obsolete, in the order of the log."""
        yield from self._acked.items()

    def due(self, now_ms: int) -> Iterator[str]:
        """Yield the client ids whose session or will is due, in due order, as of the last commit."""
        for key, _ in self._rows(rows.DUE):
            if rows.U64.unpack_from(key, len(rows.DUE))[0] > now_ms:
                return
            yield key[len(rows.DUE) + rows.U64.size :].decode()

    def connected(self, start: str = "") -> Iterator[str]:
        """Yield the ids after `start` of clients that are connected as far as the log knows, as of the last commit."""
        for key, _ in self._rows(rows.CONNECTED, start.encode() + b"\0" if start else b""):
            yield key[len(rows.CONNECTED) :].decode()

    def first_due_ms(self, after_ms: int) -> int | None:
        """Return when the first session or will is due after a time, in ms since 1970, as of the last commit; or None."""
        key = next((key for key, _ in self._rows(rows.DUE, rows.U64.pack(after_ms + 1))), None)
        return rows.U64.unpack_from(key, len(rows.DUE))[0] if key is not None else None

    def first_due(self) -> str | None:
        """Return the client id whose session or will is due before all others, or None if no session's client is away."""
        return next(self.due(2**63), None)

    def first_due_of(self, source: int) -> str | None:
        """Return the same of the clients that have last connected from a source, whose account is given."""
        prefix = rows.DUE_OF_SOURCE + rows.U64.pack(source)
        key = next((key for key, _ in self._rows(prefix)), None)
        return key[len(prefix) + rows.U64.size :].decode() if key is not None else None

    def _rows(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        assert self._index is not None, "the store has not recovered yet"
        return self._index.rows(prefix, start)

    # --- loaded sessions --------------------------------------------------------------------------------------------

    def _find(self, client_id: str) -> StoredSession | None:
        found = self._loaded.get(client_id)
        if found is None:
            assert self._index is not None, "the store has not recovered yet"
            row = self._index.get(rows.SESSION + client_id.encode())
            if row is None:
                return None
            found = rows.load_session(self._index, client_id, row)
            self._loaded[client_id] = found
        return found

    def _change(self, record: Record) -> StoredSession | None:
        """Return the session that a record changes; None if there is none because an earlier record was damaged."""
        found = self.get(record.topic.decode())
        if found is not None:
            self._changed[found.client_id] = found
        return found

    # --- part of the store ---------------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return {
            Kind.SESSION_OPENED: self._apply_opened,
            Kind.SESSION_RESUMED: self._apply_resumed,
            Kind.SESSION_CLOSED: self._apply_closed,
            Kind.SESSION_SUBSCRIBED: self._apply_subscribed,
            Kind.SESSION_UNSUBSCRIBED: self._apply_unsubscribed,
            Kind.SESSION_OFFSETS: self._apply_offsets,
            Kind.SESSIONS_ACKED: self._apply_acked,
            Kind.MESSAGE: self._apply_message,
            Kind.DAMAGED: self._apply_damaged,
        }

    def _apply_opened(self, record: Record) -> None:
        client_id = record.topic.decode()
        stored = self._find(client_id)
        if stored is None:
            stored = self._loaded[client_id] = StoredSession(client_id)
        elif not stored.gone:
            self._end(stored)
        stored.reset()
        stored.recorded_at = record.position
        self._changed[client_id] = stored
        self._count += 1
        self._ledger.charge(NODE_ACCOUNT, Resource.SESSIONS)
        self._connect(stored, record)

    def _apply_resumed(self, record: Record) -> None:
        stored = self._change(record)
        if stored is None:
            self._apply_opened(record)
            return
        stored.connected = True
        stored.ends_ms = 0
        if self._connect(stored, record).get("afresh"):
            stored.received.clear()

    def _connect(self, stored: StoredSession, record: Record) -> dict[str, Any]:
        """Apply what a CONNECT says, and return the properties of its record."""
        row: dict[str, Any] = orjson.loads(record.properties)
        account = self._ledger.enter(row.get("by"))
        if account != stored.account:
            self._ledger.release(stored.account, Resource.SESSIONS)
            self._ledger.charge(account, Resource.SESSIONS)
        stored.account, stored.source = account, self._ledger.source_account(account)
        stored.expiry_s = row["expiry_s"]
        stored.window = row.get("window", 0)
        stored.user = row.get("user", stored.user)
        will = row.get("will")
        stored.will = StoredWill(will["delay_s"], 0, record.position, record.size) if will is not None else None
        return row

    def _apply_closed(self, record: Record) -> None:
        stored = self._change(record)
        if stored is None:
            return
        row = orjson.loads(record.properties)
        if row.get("ended"):
            self._end(stored)
            return
        stored.connected = False
        self._apply_sent(stored, row)
        stored.ends_ms = row["ends_ms"]
        due_ms = row["will_due_ms"]
        stored.will = stored.will._replace(due_ms=due_ms) if stored.will is not None and due_ms else None

    def _apply_sent(self, stored: StoredSession, row: dict[str, Any]) -> None:
        """Apply how far a client was sent messages, which SESSION_CLOSED has if the disk had no room for SESSION_OFFSETS."""
        cursors = row.get("cursors", [])
        maybe_sent = {int(number): offset for number, offset in row.get("maybe_sent", {}).items()}
        if cursors or maybe_sent:
            self._apply_changes(stored, Changes(stored.last_packet_id, cursors, [], [], [], [], {}, maybe_sent))

    def _end(self, stored: StoredSession) -> None:
        for one in chain(stored.subscriptions.values(), stored.draining.values()):
            self._end_subscription(one)
        self._ledger.release(stored.account, Resource.SESSIONS)
        stored.reset()
        stored.gone = True
        self._count -= 1

    def _apply_subscribed(self, record: Record) -> None:
        stored = self._change(record)
        if stored is None:
            return
        row: dict[str, Any] = orjson.loads(record.properties)
        topic_filter, number = row["filter"], row["number"]
        one = stored.subscriptions.get(topic_filter)
        if one is None:
            account = self._ledger.enter(row.get("by"))
            self._ledger.charge(account, Resource.SUBSCRIPTIONS)
            queue_id = self._use_queue(row["queue"], topic_filter, account)
            one = StoredSubscription(topic_filter, number, queue_id, 0, 0, row["cursor"], account)
            stored.subscriptions[topic_filter] = one
            stored.subscribed = max(stored.subscribed, number + 1)
            stored.curtailed = False
        # A subscription to the same filter keeps the old cursor: deliveries that are not yet recorded must not get lost.
        one.options, one.identifier = row["options"], row["identifier"]
        one.retained_before, one.retained_after = row.get("retained"), b""
        stored.changed_filters.add(topic_filter)
        if self._damaged_before:
            self._clamp(stored, one)

    def _apply_unsubscribed(self, record: Record) -> None:
        stored = self._change(record)
        if stored is None:
            return
        row: dict[str, Any] = orjson.loads(record.properties)
        if "number" in row:
            ended = stored.draining.pop(row["number"], None)
            if ended is not None:
                stored.changed_draining.add(ended.number)
                self._end_subscription(ended)
            return
        one = stored.subscriptions.pop(row["filter"], None)
        if one is None:
            return
        stored.curtailed |= row.get("withdrawn", False)
        stored.changed_filters.add(one.filter)
        if "stop" in row:
            stored.draining[one.number] = StoredDraining(one, row["stop"], dict(row["cuts"]))
            stored.changed_draining.add(one.number)
        else:
            self._end_subscription(one)

    def _apply_offsets(self, record: Record) -> None:
        stored = self._change(record)
        if stored is None:
            return
        self._apply_changes(stored, Changes.decode(record.body, record.properties))
        stored.recorded_at = record.position

    def _apply_changes(self, stored: StoredSession, changes: Changes) -> None:
        if self._damaged_before and changes.cursors:
            changes = changes._replace(cursors=self._present(stored, changes.cursors))
        stored.apply(changes)
        if self._damaged_before:
            for one in stored.subscriptions.values():
                self._clamp(stored, one)

    def _present(self, stored: StoredSession, cursors: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Return cursors with the present offsets of their messages: see `LightQueue.offset_in_rebuilt`."""
        queues = {one.number: one.queue_id for one in chain(stored.subscriptions.values(), stored.draining.values())}
        return [
            (number, self._queues.get(queues[number]).offset_in_rebuilt(offset, position), position)
            for number, offset, position in cursors
            if number in queues
        ]

    def _apply_acked(self, record: Record) -> None:
        obsolete_from, obsolete_before, _ = SESSIONS_ACKED_HEAD.unpack_from(record.body)
        for position in tuple(takewhile(lambda position: position < obsolete_before, self._acked)):
            if position >= obsolete_from:
                del self._acked[position]
                self._acked_changed.add(position)
        self._acked[record.position] = record.size
        self._acked_changed.add(record.position)

    def _clamp(self, stored: StoredSession, one: StoredSubscription) -> None:
        """Move a cursor back to the end of its queue as of this record: the next message gets that offset.

        Messages that were set aside have no offset, so a cursor in the log may exceed the end.
        """
        end = self._queues.get(one.queue_id).next_offset
        if one.cursor > end:
            one.cursor = end
            stored.changed_filters.add(one.filter)

    def _apply_damaged(self, record: Record) -> None:
        self._damaged_before = record.position + record.size
        self.has_replayed_damage = True

    def _apply_message(self, record: Record) -> None:
        if not record.flags & Flag.SESSION:
            return
        properties = decode_properties(record.properties)
        stored = self.get(properties.session)
        if stored is None:
            return
        self._changed[stored.client_id] = stored
        if properties.packet_id:
            stored.received[properties.packet_id] = record.position
        else:
            stored.will = None

    # --- light queues -----------------------------------------------------------------------------------------------

    def _use_queue(self, queue_id: int, topic_filter: str, account: int) -> int:
        uses = self._uses_of(queue_id)
        if not uses:
            queue = self._queues.claim(queue_id, topic_filter, OWNER, account=account)
            queue_id = queue.id  # another id if the log was repaired
            uses = self._uses_of(queue_id)
        self._uses[queue_id] = uses + 1
        return queue_id

    def _end_subscription(self, one: StoredSubscription) -> None:
        self._ledger.release(one.account, Resource.SUBSCRIPTIONS)
        queue_id = one.queue_id
        uses = self._uses[queue_id] = self._uses_of(queue_id) - 1
        if not uses:
            self._queues.release(self._queues.get(queue_id), OWNER)

    def _uses_of(self, queue_id: int) -> int:
        uses = self._uses.get(queue_id)
        if uses is None:
            assert self._index is not None, "the store has not recovered yet"
            row = self._index.get(rows.USES + rows.U32.pack(queue_id))
            uses = rows.U32.unpack(row)[0] if row is not None else 0
        return uses

    # --- the index --------------------------------------------------------------------------------------------------

    def load(self, index: Index) -> None:
        self._index = index
        for key, size in index.rows(rows.ACKED):
            self._acked[rows.U64.unpack_from(key, len(rows.ACKED))[0]] = rows.U32.unpack(size)[0]
        row = index.get(rows.TOTALS_KEY)
        if row is not None:
            self._saved_totals = row
            self._count, self._damaged_before = rows.TOTALS.unpack(row)

    def save(self, batch: Batch) -> None:
        for stored in self._changed.values():
            rows.save_session(batch, stored)
        self._changed.clear()
        for position in self._acked_changed:
            key = rows.ACKED + rows.U64.pack(position)
            if position in self._acked:
                batch.put(key, rows.U32.pack(self._acked[position]))
            else:
                batch.delete(key)
        self._acked_changed.clear()
        for queue_id, uses in self._uses.items():
            key = rows.USES + rows.U32.pack(queue_id)
            if uses:
                batch.put(key, rows.U32.pack(uses))
            else:
                batch.delete(key)
        self._uses.clear()
        totals = rows.TOTALS.pack(self._count, self._damaged_before)
        if totals != self._saved_totals:
            self._saved_totals = totals
            batch.put(rows.TOTALS_KEY, totals)

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        for key, _ in self._rows(rows.NEEDS):
            if rows.U64.unpack_from(key, len(rows.NEEDS))[0] >= before:
                return
            stored = self.get(key[len(rows.NEEDS) + rows.U64.size :].decode())
            for position, size in stored.needed() if stored is not None else ():
                if position < before:
                    yield position, size
