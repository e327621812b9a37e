"""The rows of the index that store sessions: their keys, and how a session is read from them and written to them.

The first byte of each key but the last is b"S":

    key b"Sc", client id                                 value: `StoredSession.row`
    key b"Ss", client id, 0, filter                      value: `StoredSubscription.row`; no client id or filter has a 0 in it
    key b"Sl", client id, 0, number u32                  value: `StoredDraining.row`
    key b"St", due ms u64, client id                     no value: when a session ends or its will is published; only of clients
                                                         that are away
    key b"Sp", account u64, due ms u64, client id        no value: the same, by the account of the client's source
    key b"So", client id                                 no value: the client is connected
    key b"Sh", position u64, client id                   no value: the oldest record that the session needs
    key b"Sa", position u64                              value: size of the SESSIONS_ACKED record at this position, u32; only of
                                                         those that a later one doesn't name as obsolete
    key b"Sq", queue id u32                              value: number of subscriptions that use the queue, u32
    key b"Msessions"                                     value: number of sessions, u32; end of the last damaged range of
                                                         the log, u64

Numbers are big-endian.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

from penstock.gateway.sessions.stored_session import SavedRows, StoredSession
from penstock.gateway.sessions.stored_subscription import StoredDraining, StoredSubscription
from penstock.store.index.index import Batch, Index, KeySpace

SESSION = KeySpace.SESSION + b"c"
SUBSCRIPTION = KeySpace.SESSION + b"s"
DRAINING = KeySpace.SESSION + b"l"
DUE = KeySpace.SESSION + b"t"
DUE_OF_SOURCE = KeySpace.SESSION + b"p"
CONNECTED = KeySpace.SESSION + b"o"
NEEDS = KeySpace.SESSION + b"h"
ACKED = KeySpace.SESSION + b"a"
USES = KeySpace.SESSION + b"q"
TOTALS_KEY = KeySpace.META + b"sessions"
TOTALS = Struct(">IQ")
U32 = Struct(">I")
U64 = Struct(">Q")


def load_session(index: Index, client_id: str, row: bytes) -> StoredSession:
    """Return the session that a row describes, with its subscriptions."""
    found = StoredSession.from_row(client_id, row)
    prefix = SUBSCRIPTION + client_id.encode() + b"\0"
    ones = (StoredSubscription.from_row(key[len(prefix) :].decode(), value) for key, value in index.rows(prefix))
    found.subscriptions = {one.filter: one for one in sorted(ones, key=lambda one: one.number)}
    draining = (StoredDraining.from_draining_row(value) for _, value in index.rows(DRAINING + client_id.encode() + b"\0"))
    found.draining = {one.number: one for one in draining}
    return found


def all_sessions(index: Index, start: str = "") -> Iterator[StoredSession]:
    """Yield all sessions of an index in the order of their client ids, beginning with `start`. For tools."""
    for key, row in index.rows(SESSION, start.encode()):
        yield load_session(index, key[len(SESSION) :].decode(), row)


def save_session(batch: Batch, stored: StoredSession) -> None:
    """Write the rows of a session that have changed since its last save."""
    client_id = stored.client_id.encode()
    for topic_filter in stored.changed_filters:
        key = SUBSCRIPTION + client_id + b"\0" + topic_filter.encode()
        one = stored.subscriptions.get(topic_filter)
        if one is not None:
            batch.put(key, one.row())
        else:
            batch.delete(key)
    stored.changed_filters.clear()
    for number in stored.changed_draining:
        key = DRAINING + client_id + b"\0" + U32.pack(number)
        if number in stored.draining:
            batch.put(key, stored.draining[number].row())
        else:
            batch.delete(key)
    stored.changed_draining.clear()
    before, now = stored.saved, stored.rows()
    if now.exists:
        batch.put(SESSION + client_id, stored.row())
    elif before.exists:
        batch.delete(SESSION + client_id)
    if before.connected != now.connected:
        if now.connected:
            batch.put(CONNECTED + client_id, b"")
        else:
            batch.delete(CONNECTED + client_id)
    for old, new in zip(_ordered_keys(before, client_id), _ordered_keys(now, client_id), strict=True):
        if old == new:
            continue
        if old is not None:
            batch.delete(old)
        if new is not None:
            batch.put(new, b"")
    stored.saved = now


def _ordered_keys(saved: SavedRows, client_id: bytes) -> tuple[bytes | None, bytes | None, bytes | None]:
    """Return the keys of the rows by which a session is found in order; None for those that it does not have."""
    due_ms, oldest = saved.due_ms, saved.oldest
    return (
        DUE + U64.pack(due_ms) + client_id if due_ms is not None else None,
        DUE_OF_SOURCE + U64.pack(saved.source) + U64.pack(due_ms) + client_id if due_ms is not None else None,
        NEEDS + U64.pack(oldest) + client_id if oldest is not None else None,
    )
