"""The sessions that outlive their connections, and the wills of all: a part of the store.

A session is its records and its rows. While its client is away nothing of it is in memory, so a million of them cost disk only,
and a start reads none. One is read when its client connects, and when something is due that no client waits for: it ends, or
its will is published.

Rows of the index; the first byte of each key is b"S":

    key b"Sc", client id                                 value: `StoredSession.row`
    key b"Ss", client id, 0, filter                      value: `StoredSubscription.row`; no client id or filter has a 0 in it
    key b"Sl", client id, 0, number u32                  value: `StoredLeaving.row`
    key b"St", due ms u64, client id                     nothing: then it ends, or its will is published; clients that are away
    key b"So", client id                                 nothing: its client is connected
    key b"Sh", position u64, client id                   nothing: the oldest record that it needs
    key b"Sq", queue id u32                              value: subscriptions of the queue, u32
    key b"Msessions"                                     value: how many sessions there are, u32; whether the log is mended, u8

Numbers are big-endian. All sessions together are one owner of a light queue, since what a thousand devices subscribe to would
else have a thousand owners in one row: the counts tell when the last subscription is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from struct import Struct
from typing import Any, Final
from weakref import WeakValueDictionary

import orjson

from penstock.gateway.sessions.stored import Changes, StoredLeaving, StoredSession, StoredSubscription, StoredWill
from penstock.store.index import Batch, Index, KeySpace
from penstock.store.part import Apply
from penstock.store.queues import Queues
from penstock.store.record import Flag, Kind, Record, decode_properties

OWNER: Final = "sessions"
"""What the sessions are called among the owners of a light queue."""

_SESSION = KeySpace.SESSION + b"c"
_SUBSCRIPTION = KeySpace.SESSION + b"s"
_LEAVING = KeySpace.SESSION + b"l"
_DUE = KeySpace.SESSION + b"t"
_CONNECTED = KeySpace.SESSION + b"o"
_HOLDS = KeySpace.SESSION + b"h"
_USES = KeySpace.SESSION + b"q"
_TOTALS_KEY = KeySpace.META + b"sessions"
_TOTALS = Struct(">I?")
_U32 = Struct(">I")
_U64 = Struct(">Q")


class Sessions:
    """The sessions of a store.

    Parameters:
        queues: of that store.
    """

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._index: Index | None = None
        self._loaded: WeakValueDictionary[str, StoredSession] = WeakValueDictionary()
        self._changed: dict[str, StoredSession] = {}
        """What the next save writes. Goes before what the index says."""
        self._uses: dict[int, int] = {}
        """Subscriptions of queues, where that number has changed."""
        self._count = 0
        self._is_mended = False
        """`penstock repair` has set messages aside: light queues have less than what cursors in the log count."""
        self._saved_totals = b""

    def __len__(self) -> int:
        """Return how many there are, with those of clients that are connected."""
        return self._count

    def get(self, client_id: str) -> StoredSession | None:
        """Return the session of a client, or None: about 3 us where there is none, else 50 us."""
        found = self._find(client_id)
        return None if found is None or found.gone else found

    def due(self, now_ms: int) -> Iterator[str]:
        """Yield the clients whose sessions have something due, in due order, as of the last commit."""
        for key, _ in self._rows(_DUE):
            if _U64.unpack_from(key, len(_DUE))[0] > now_ms:
                return
            yield key[len(_DUE) + _U64.size :].decode()

    def connected(self, start: str = "") -> Iterator[str]:
        """Yield the clients that are connected as far as the log knows, those behind `start`, as of the last commit."""
        for key, _ in self._rows(_CONNECTED, start.encode() + b"\0" if start else b""):
            yield key[len(_CONNECTED) :].decode()

    def first_due(self) -> str | None:
        """Return the client whose session has something due before all others, or None where none is away."""
        return next(self.due(2**63), None)

    def _rows(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        assert self._index is not None, "the store has not recovered yet"
        return self._index.rows(prefix, start)

    # --- what is loaded ---------------------------------------------------------------------------------------------

    def _find(self, client_id: str) -> StoredSession | None:
        found = self._loaded.get(client_id)
        if found is None:
            assert self._index is not None, "the store has not recovered yet"
            row = self._index.get(_SESSION + client_id.encode())
            if row is None:
                return None
            found = load_session(self._index, client_id, row)
            self._loaded[client_id] = found
        return found

    def _change(self, record: Record) -> StoredSession | None:
        """Return the session that a record changes; None where it is not there: a record before it was damaged."""
        found = self.get(record.topic.decode())
        if found is not None:
            self._changed[found.client_id] = found
        return found

    # --- the part ---------------------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return {
            Kind.SESSION_OPENED: self._apply_opened,
            Kind.SESSION_RESUMED: self._apply_resumed,
            Kind.SESSION_CLOSED: self._apply_closed,
            Kind.SESSION_SUBSCRIBED: self._apply_subscribed,
            Kind.SESSION_UNSUBSCRIBED: self._apply_unsubscribed,
            Kind.SESSION_OFFSETS: self._apply_offsets,
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
        stored.begin()
        self._changed[client_id] = stored
        self._count += 1
        self._connect(stored, record)

    def _apply_resumed(self, record: Record) -> None:
        stored = self._change(record)
        if stored is None:
            self._apply_opened(record)
            return
        stored.connected = True
        stored.ends_ms = 0
        self._connect(stored, record)

    def _connect(self, stored: StoredSession, record: Record) -> None:
        row = orjson.loads(record.properties)
        stored.expiry_s = row["expiry_s"]
        will = row.get("will")
        stored.will = StoredWill(will["delay_s"], 0, record.position, record.size) if will is not None else None

    def _apply_closed(self, record: Record) -> None:
        stored = self._change(record)
        if stored is None:
            return
        row = orjson.loads(record.properties)
        if row.get("ended"):
            self._end(stored)
            return
        stored.connected = False
        stored.ends_ms = row["ends_ms"]
        due_ms = row["will_due_ms"]
        stored.will = stored.will._replace(due_ms=due_ms) if stored.will is not None and due_ms else None

    def _end(self, stored: StoredSession) -> None:
        for one in chain(stored.subscriptions.values(), stored.leaving.values()):
            self._release(one.queue_id)
        stored.begin()
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
            queue_id = self._claim(row["queue"], topic_filter)
            one = StoredSubscription(topic_filter, number, queue_id, 0, 0, row["cursor"])
            stored.subscriptions[topic_filter] = one
            stored.subscribed = max(stored.subscribed, number + 1)
        # One to the same filter goes on from where the old one is: what that has sent and not recorded yet isn't lost.
        one.options, one.identifier = row["options"], row["identifier"]
        one.retained_before, one.retained_after = row.get("retained"), b""
        stored.changed_filters.add(topic_filter)
        if self._is_mended:
            self._clamp(stored, one)

    def _apply_unsubscribed(self, record: Record) -> None:
        stored = self._change(record)
        if stored is None:
            return
        row: dict[str, Any] = orjson.loads(record.properties)
        if "number" in row:
            left = stored.leaving.pop(row["number"], None)
            if left is not None:
                stored.changed_leaving.add(left.number)
                self._release(left.queue_id)
            return
        one = stored.subscriptions.pop(row["filter"], None)
        if one is None:
            return
        stored.changed_filters.add(one.filter)
        if "stop" in row:
            stored.leaving[one.number] = StoredLeaving(one, row["stop"], dict(row["cuts"]))
            stored.changed_leaving.add(one.number)
        else:
            self._release(one.queue_id)

    def _apply_offsets(self, record: Record) -> None:
        stored = self._change(record)
        if stored is None:
            return
        stored.apply(Changes.decode(record.body, record.properties))
        if self._is_mended:
            for one in stored.subscriptions.values():
                self._clamp(stored, one)

    def _clamp(self, stored: StoredSession, one: StoredSubscription) -> None:
        """Take a cursor back to the end of its queue, as that was when the record was written: the next message comes there."""
        end = self._queues.get(one.queue_id).next_offset
        if one.cursor > end:
            one.cursor = end
            stored.changed_filters.add(one.filter)

    def _apply_damaged(self, _: Record) -> None:
        self._is_mended = True

    def _apply_message(self, record: Record) -> None:
        if not record.flags & Flag.SESSION:
            return
        properties = decode_properties(record.properties)
        stored = self.get(properties.session)
        if stored is None:
            return
        self._changed[stored.client_id] = stored
        if properties.packet_id:
            stored.received.add(properties.packet_id)
        else:
            stored.will = None

    # --- light queues -----------------------------------------------------------------------------------------------

    def _claim(self, queue_id: int, topic_filter: str) -> int:
        uses = self._uses_of(queue_id)
        if not uses:
            queue_id = self._queues.claim(queue_id, topic_filter, OWNER).id  # another one in a log that was repaired
            uses = self._uses_of(queue_id)
        self._uses[queue_id] = uses + 1
        return queue_id

    def _release(self, queue_id: int) -> None:
        uses = self._uses[queue_id] = self._uses_of(queue_id) - 1
        if not uses:
            self._queues.release(self._queues.get(queue_id), OWNER)

    def _uses_of(self, queue_id: int) -> int:
        uses = self._uses.get(queue_id)
        if uses is None:
            assert self._index is not None, "the store has not recovered yet"
            row = self._index.get(_USES + _U32.pack(queue_id))
            uses = _U32.unpack(row)[0] if row is not None else 0
        return uses

    # --- the index --------------------------------------------------------------------------------------------------

    def load(self, index: Index) -> None:
        self._index = index
        row = index.get(_TOTALS_KEY)
        if row is not None:
            self._saved_totals = row
            self._count, self._is_mended = _TOTALS.unpack(row)

    def save(self, batch: Batch) -> None:
        for stored in self._changed.values():
            _save_session(batch, stored)
        self._changed.clear()
        for queue_id, uses in self._uses.items():
            key = _USES + _U32.pack(queue_id)
            if uses:
                batch.put(key, _U32.pack(uses))
            else:
                batch.delete(key)
        self._uses.clear()
        totals = _TOTALS.pack(self._count, self._is_mended)
        if totals != self._saved_totals:
            self._saved_totals = totals
            batch.put(_TOTALS_KEY, totals)

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        for key, _ in self._rows(_HOLDS):
            if _U64.unpack_from(key, len(_HOLDS))[0] >= before:
                return
            stored = self.get(key[len(_HOLDS) + _U64.size :].decode())
            for position, size in stored.needed() if stored is not None else ():
                if position < before:
                    yield position, size


def load_session(index: Index, client_id: str, row: bytes) -> StoredSession:
    """Return the session of a row, with its subscriptions."""
    found = StoredSession.from_row(client_id, row)
    prefix = _SUBSCRIPTION + client_id.encode() + b"\0"
    ones = (StoredSubscription.from_row(key[len(prefix) :].decode(), value) for key, value in index.rows(prefix))
    found.subscriptions = {one.filter: one for one in sorted(ones, key=lambda one: one.number)}
    left = (StoredLeaving.from_leaving_row(value) for _, value in index.rows(_LEAVING + client_id.encode() + b"\0"))
    found.leaving = {one.number: one for one in left}
    return found


def stored_sessions(index: Index, start: str = "") -> Iterator[StoredSession]:
    """Yield all sessions of an index, from a client id on: for tools."""
    for key, row in index.rows(_SESSION, start.encode()):
        yield load_session(index, key[len(_SESSION) :].decode(), row)


def _save_session(batch: Batch, stored: StoredSession) -> None:
    client_id = stored.client_id.encode()
    for topic_filter in stored.changed_filters:
        key = _SUBSCRIPTION + client_id + b"\0" + topic_filter.encode()
        one = stored.subscriptions.get(topic_filter)
        if one is not None:
            batch.put(key, one.row())
        else:
            batch.delete(key)
    stored.changed_filters.clear()
    for number in stored.changed_leaving:
        key = _LEAVING + client_id + b"\0" + _U32.pack(number)
        if number in stored.leaving:
            batch.put(key, stored.leaving[number].row())
        else:
            batch.delete(key)
    stored.changed_leaving.clear()
    before, now = stored.saved, stored.rows()
    if now.exists:
        batch.put(_SESSION + client_id, stored.row())
    elif before.exists:
        batch.delete(_SESSION + client_id)
    if before.connected != now.connected:
        if now.connected:
            batch.put(_CONNECTED + client_id, b"")
        else:
            batch.delete(_CONNECTED + client_id)
    for prefix, old, new in ((_DUE, before.due_ms, now.due_ms), (_HOLDS, before.oldest, now.oldest)):
        if old == new:
            continue
        if old is not None:
            batch.delete(prefix + _U64.pack(old) + client_id)
        if new is not None:
            batch.put(prefix + _U64.pack(new) + client_id, b"")
    stored.saved = now
