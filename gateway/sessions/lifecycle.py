"""The life cycle of sessions: they begin, are resumed, are left by their clients, and end.

Each of these decisions is a record, which `gateway.sessions.stored_sessions` applies, so the decision survives a crash.

After the node was killed, the log says of some clients that they are connected. For all that the node knows, these clients left
when it was killed. The next node records that in slices after its start, so that a million such clients don't hold up the
start; or earlier, when such a client returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, Final

import orjson
import structlog

from penstock.gateway.counters import GatewayCounters
from penstock.gateway.logbook import Logbook
from penstock.gateway.options import GatewayOptions
from penstock.gateway.protocol.connect import Connect, Will
from penstock.gateway.protocol.errors import ConnectRefused
from penstock.gateway.protocol.packets import QOS
from penstock.gateway.protocol.properties import write_properties
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode
from penstock.gateway.protocol.topics import SHARE
from penstock.gateway.sessions.acked import add_up
from penstock.gateway.sessions.changes import Changes
from penstock.gateway.sessions.journal import SessionJournal
from penstock.gateway.sessions.session import Session
from penstock.gateway.sessions.stored_session import StoredSession
from penstock.gateway.sessions.stored_sessions import StoredSessions
from penstock.gateway.sessions.stored_subscription import StoredSubscription
from penstock.gateway.sessions.unrecorded import Advance, Unrecorded
from penstock.gateway.sessions.wills import Author, WillOutcome, Wills
from penstock.store import topics
from penstock.store.errors import DiskFull, LimitExceeded, QueueUnknown, StoreError
from penstock.store.record import Kind
from penstock.store.space.accounts import Resource
from penstock.store.space.causer import Causer
from penstock.store.store import Store
from penstock.timer.duejob import DueJob
from penstock.timer.ticker import RETRY_MS

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection
    from penstock.gateway.delivery.shared_subscriptions import SharedSubscriptions

logger = structlog.get_logger("gateway")

OVERLAPS_COMPARED_MAX: Final = 4096
"""Pairs of filters of one session that are compared when its client was lost. If there are more, all are taken to overlap: to
send a message of QoS 0 twice is the lesser evil."""


SENT_WINDOWS: Final = 4
"""Windows of a client after its last recorded acknowledgement in which messages may have been sent: one that was under way, and
what the journal lets the client acknowledge, and the node send for it, before it makes a record."""

SENT_ENTRIES: Final = 4_096
"""Messages after that which may have been sent too, because those at QoS 0 take no room of a window."""

SOURCES_TRIED: Final = 64
"""Sources with many sessions that are looked at for one whose client is away."""

UNDECIDED_MS: Final = 1_000
"""Milliseconds until a will is looked at again of which nobody can tell whether it may be published."""

WINDOW_UNKNOWN: Final = 65_535
"""The window of a session whose records don't tell it."""


class SessionLifecycle:
    """Begins and ends the sessions of a node.

    Parameters:
        store: takes the records.
        sessions: the stored sessions, a part of that store.
        clients: the connected clients by client id.
        wills: publishes the wills of clients that have gone.
        shared: takes the shared deliveries that a client leaves behind.
        counters: of the gateway.
        logbook: for events that clients cause.
        options: see `GatewayOptions`.
    """

    def __init__(
        self,
        store: Store,
        sessions: StoredSessions,
        clients: Mapping[str, Connection],
        wills: Wills,
        shared: SharedSubscriptions,
        counters: GatewayCounters,
        logbook: Logbook,
        options: GatewayOptions,
    ) -> None:
        store.ledger.limit(Resource.SESSIONS, options.sessions_max, "raise mqtt.sessions_max")
        self._store = store
        self._ledger = store.ledger
        self.sessions = sessions
        self.journal = SessionJournal(store, store.clock)
        """Records the progress of the sessions of connected clients."""
        self._wills = wills
        self._clients = clients
        self._shared = shared
        self._counters = counters
        self._logbook = logbook
        self._clock = store.clock
        self._options = options
        self._job = DueJob(store.now_ms, store.clock, self._work_slice, sessions.first_due_ms)
        self._unclosed: dict[str, bool] = {}
        """Clients that left while the disk had no room for the record of it, and whether their wills are to be published."""
        self._held: dict[str, int] = {}
        """Sessions that look due, but whose clients left in the window of a step of the clock; and when they really are due."""
        self._lost_from: str | None = ""
        """The clients that were connected when the last node was killed are closed up to this client id; None if all are."""
        self._advances: dict[int, Advance] | None = None
        """What the SESSIONS_ACKED records say, while it is needed: see `acked.add_up`."""

    @property
    def away(self) -> int:
        """Number of stored sessions whose clients are not connected. The count looks at every connected client."""
        return len(self.sessions) - sum(one.session.stored is not None for one in self._clients.values())

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the background work, first of all for the clients that were connected when the last node was killed."""
        self._job.start(loop)

    def stop(self) -> None:
        """Stop the background work. All clients have left."""
        self._job.stop()

    # --- a client connects ------------------------------------------------------------------------------------------

    def check_room(self, client_id: str, connect: Connect, expiry_s: int) -> None:
        """Raise ConnectRefused if the disk has no room for what `open` has to record."""
        is_back = not connect.clean_start and self.sessions.get(client_id) is not None
        if is_back or expiry_s or connect.will is not None:
            try:
                self._store.space.check(Kind.SESSION_RESUMED if is_back else Kind.SESSION_OPENED)
            except DiskFull as error:
                raise _refusal(error) from error

    def claim(self, client_id: str, user: str) -> StoredSession | None:
        """Return the stored session of a client id if a user may resume it, or None.

        Raises:
            ConnectRefused: the session, or that of the connected client, is another user's.
        """
        client, stored = self._clients.get(client_id), self.sessions.get(client_id)
        if stored is not None and client is None and self._has_expired(stored):
            stored = None
        owner = client.session.user if client is not None else stored.user if stored is not None else ""
        if _is_others(owner, user):
            raise ConnectRefused("The session of the client id belongs to another user.", ConnectCode.IDENTIFIER_REJECTED)
        return stored

    def _has_expired(self, stored: StoredSession) -> bool:
        return not stored.connected and stored.ends_ms <= self._now_for(stored)

    def open(
        self,
        client_id: str,
        connect: Connect,
        expiry_s: int,
        user: str = "",
        source: str = "",
        author: Author | None = None,
        *,
        is_afresh: bool = False,
    ) -> tuple[Session, bool]:
        """Return the session of a client that connects, and whether it existed before [MQTT-3.1.2-4], [MQTT-3.1.2-5].

        The subscriptions of a session that existed before are restored by `ClientSubscriptions.restore`.

        Args:
            client_id: never empty.
            connect: the CONNECT.
            expiry_s: the session expiry interval granted, in seconds.
            user: the client's user name if something vouches for it; otherwise empty. A session of another user ends.
            source: where the client connects from: see `source_of`.
            author: who leaves the will of the CONNECT, if it has one; None to go by user and client id alone.
            is_afresh: whether the client is told that it has no session, because some of its subscriptions have ended. The
                client then uses the packet ids of its messages under way for others (3.1.1: 4.4; [MQTT-3.2.2-5]).

        Raises:
            ConnectRefused: the disk has no room; or the client's user or source has too many sessions; or `mqtt.sessions_max`
                sessions are stored and none may be ended; or nobody can tell yet whether the will of a session that has to end
                may be published.
        """
        try:
            causer = self._ledger.with_tenant(Causer.of(user, source, client_id))
            return self._open(client_id, connect, expiry_s, user, causer, author, is_afresh=is_afresh)
        except DiskFull as error:
            raise _refusal(error) from error

    def _open(
        self,
        client_id: str,
        connect: Connect,
        expiry_s: int,
        user: str,
        causer: Causer,
        author: Author | None,
        *,
        is_afresh: bool,
    ) -> tuple[Session, bool]:
        window = min(connect.receive_max, self._options.inflight_max)
        stored = self.sessions.get(client_id)
        if stored is not None and stored.connected:
            self._close_lost(stored)
            stored = self.sessions.get(client_id)
        if stored is not None:
            self._held.pop(client_id, None)
            now_ms = self._now_for(stored)
            has_expired = stored.ends_ms <= now_ms
            if connect.clean_start or has_expired or _is_others(stored.user, user):
                self._end(stored, has_expired=has_expired, at_once=True)
                stored = None
            elif stored.will is not None and stored.will.due_ms <= now_ms:
                self._publish_at_once(stored)
        is_present = stored is not None
        if not is_present:
            if not expiry_s and connect.will is None:
                return Session(client_id, window, user=user, causer=causer), False
            self._make_room(causer)
        kind = Kind.SESSION_RESUMED if is_present else Kind.SESSION_OPENED
        self._record_connected(kind, client_id, expiry_s, window, connect.will, user, causer, author, is_afresh=is_afresh)
        stored = self.sessions.get(client_id)
        assert stored is not None, client_id
        session = Session(client_id, window, stored, user, causer)
        session.expiry_s = expiry_s
        session.has_will = connect.will is not None
        session.lasts = is_present or expiry_s > 0
        if is_present:
            _restore_packet_ids(session, stored, self.sessions.received(stored))
        if session.lasts:
            session.unrecorded = Unrecorded()
            session.unrecorded.reset(session.inflight.slots)
        return session, is_present

    def _publish_at_once(self, stored: StoredSession) -> None:
        """Publish a will that another one will replace. Raises ConnectRefused if nobody can tell yet whether it may be."""
        if self._wills.publish(stored) is WillOutcome.UNDECIDED:
            raise _undecided()

    def _make_room(self, causer: Causer) -> None:
        """Make sure that a causer may have one more session.

        If as many sessions are stored as may be, one ends: see `_displaceable`. Raises ConnectRefused.
        """
        limit = self._options.sessions_max
        is_full = len(self.sessions) >= limit
        try:
            self._ledger.admit(causer, Resource.SESSIONS, spare=max(len(self.sessions) - limit + 1, 0))
        except LimitExceeded as error:
            raise _refusal(error) from error
        if not is_full:
            return
        self._store.commit()
        stored = self._displaceable(causer)
        if stored is None:
            raise ConnectRefused(
                f"{len(self.sessions)} sessions are stored, which is the limit, and all their clients are connected, or belong "
                "to somebody with no more sessions than this client's user or source. Raise mqtt.sessions_max to allow more.",
                ConnectCode.SERVER_UNAVAILABLE,
                ReasonCode.QUOTA_EXCEEDED,
            )
        self._logbook.note("session.displaced", client=stored.client_id, limit=limit)
        self._end(stored, at_once=True)

    def _displaceable(self, causer: Causer) -> StoredSession | None:
        """Return the session that ends for a new one of a causer; None if there is none.

        Of the source with the most sessions it is the one that would end first of those whose clients are away. It belongs to
        the causer's own user or source, or to one with more sessions. So whoever floods the node displaces nobody else, though
        all clients of the flood may be connected.
        """
        sources = islice(self._ledger.largest_sources(Resource.SESSIONS), SOURCES_TRIED)
        for client_id in chain(map(self.sessions.first_due_of, sources), (self.sessions.first_due(),)):
            stored = self.sessions.get(client_id) if client_id is not None else None
            if stored is not None and self._may_displace(causer, stored):
                return stored
        return None

    def _may_displace(self, causer: Causer, stored: StoredSession) -> bool:
        ledger, own = self._ledger, causer.chain()[:1]
        other = ledger.outermost(stored.account)
        if not own or own[0].account == other:
            return True
        return ledger.held_by(other, Resource.SESSIONS) > ledger.held_by(own[0].account, Resource.SESSIONS)

    def _record_connected(
        self,
        kind: Kind,
        client_id: str,
        expiry_s: int,
        window: int,
        will: Will | None,
        user: str,
        causer: Causer,
        author: Author | None,
        *,
        is_afresh: bool,
    ) -> None:
        row: dict[str, object] = {"expiry_s": expiry_s, "window": window, "by": causer.row()}
        if is_afresh and kind is Kind.SESSION_RESUMED:
            row["afresh"] = True
        if user:
            row["user"] = user
        body = b""
        if will is not None:
            stated = {"topic": will.topic, "qos": will.qos, "retain": will.retain, "delay_s": will.delay_s}
            of = author.row() if author is not None else {}
            row["will"] = {**stated, "of": of} if of else stated
            body = write_properties(will.properties) + will.body
        self._store.append(kind, topic=client_id.encode(), properties=orjson.dumps(row), body=body)

    # --- a client leaves --------------------------------------------------------------------------------------------

    def leave(self, session: Session) -> None:
        """Keep the session of a client whose connection has ended, or end it. The gateway calls this once per connection."""
        stored = session.stored
        self.journal.forget(session)
        if stored is None:
            return
        sent: dict[str, object] = {}
        if session.lasts and session.expiry_s:
            try:
                self.journal.save(session)
            except DiskFull:  # The client gets again what it has acknowledged since its last record.
                sent = _sent_by(session, stored)
        session.stored, session.lasts = None, False  # The connection lingers, and would keep the stored session in memory.
        try:
            self._close(stored, session.expiry_s, has_will=session.has_will, sent=sent)
        except DiskFull:
            self._unclosed[session.client_id] = session.has_will
            self._job.expect(self._store.now_ms() + RETRY_MS)

    def _close(self, stored: StoredSession, expiry_s: int, *, has_will: bool, sent: Mapping[str, object] | None = None) -> None:
        """Record that a client has left, and do what is due at once.

        Args:
            stored: the session.
            expiry_s: seconds that the session lasts from now on.
            has_will: whether its will is to be published.
            sent: what the record has besides, if the progress of the session could not be recorded: see `_sent_by`.
        """
        now_ms = self._store.now_ms()
        if not expiry_s and (not has_will or self._wills.publish(stored) is WillOutcome.ENDED):
            self._record_end(stored)
            return
        delay_s = min(stored.will.delay_s, expiry_s) if stored.will is not None else 0
        will_due_ms = now_ms + delay_s * 1000 if has_will else 0
        ends_ms = now_ms + expiry_s * 1000
        self._record_closed(stored, {"ends_ms": ends_ms, "will_due_ms": will_due_ms, **(sent or {})})
        self._job.expect(min(ends_ms, will_due_ms or ends_ms))
        if stored.will is not None and stored.will.due_ms <= now_ms:
            self._wills.publish(stored)

    def _close_lost(self, stored: StoredSession) -> None:
        """Record that a client left when the node was killed, or when the disk had no room for the record.

        What the client acknowledged since the session's last full record counts, as far as it was recorded (`Advance`). So a
        delivery or a message of that session is in one of these states:

        - a delivery before `Advance.first`, or a message before a floor: complete;
        - any other delivery of a shared subscription at QoS 1, or one at QoS 2 that no record has: returned to the group;
        - any other delivery: goes out again with DUP [MQTT-3.3.1-1];
        - a message after the cursor at QoS 0: may have been sent, and never comes again [MQTT-4.3.1-1];
        - a message after the cursor at QoS 1 or 2, up to `maybe_sent`: goes out with DUP, as it may have been sent.
        """
        advance, done, floors = self._advance_of(stored), [], {}
        if advance is not None:
            done = list(takewhile(lambda packet_id: packet_id != advance.first, stored.inflight))
            if not self.sessions.has_replayed_damage:  # else the floors may be offsets of queues as they were
                floors = advance.floors
        complete = set(done)
        self._shared.return_unacknowledged({each: slot for each, slot in stored.inflight.items() if each not in complete})
        self._shared.return_unrecorded(stored.client_id, stored.inflight)
        changes = self._changes_of_lost(stored, done, floors)
        if changes is not None and stored.expiry_s:
            body, properties = changes.encode()
            self._store.append(Kind.SESSION_OFFSETS, topic=stored.client_id.encode(), body=body, properties=properties)
        self._close(stored, stored.expiry_s, has_will=self._unclosed.pop(stored.client_id, stored.will is not None))

    def _advance_of(self, stored: StoredSession) -> Advance | None:
        """Return what is recorded of acknowledgements since the last full record of a session; None if nothing is."""
        if self._advances is None:
            self._store.commit()  # The records are read from the log.
            self._advances = add_up(self._store, self.sessions.acked_records())
        return self._advances.get(stored.recorded_at)

    def _changes_of_lost(self, stored: StoredSession, done: list[int], floors: Mapping[int, int]) -> Changes | None:
        """Return what to record of a session whose client was lost; None if nothing changes.

        Args:
            stored: the session.
            done: packet ids of deliveries that are complete.
            floors: by number of a subscription: the offset before which all deliveries are complete.
        """
        at_qos_0 = {one.number for one in _at_qos_0(stored)}
        cursors: list[tuple[int, int, int]] = []
        maybe_sent: dict[int, int] = {}
        for one in chain(stored.subscriptions.values(), stored.draining.values()):
            if one.filter.startswith(SHARE):
                continue
            with suppress(QueueUnknown):  # It is logged when the client returns.
                queue = self._store.queues.get(one.queue_id)
                end = queue.next_offset
                cursor = end if one.number in at_qos_0 else max(one.cursor, floors.get(one.number, 0))
                if cursor != one.cursor:
                    cursors.append((one.number, cursor, queue.position_at(cursor) or 0))
                sent = min(end, cursor + (stored.window or WINDOW_UNKNOWN) * SENT_WINDOWS + SENT_ENTRIES)
                if max(cursor, one.maybe_sent) < sent:
                    maybe_sent[one.number] = sent
        if not (cursors or done or maybe_sent):
            return None
        return Changes(stored.last_packet_id, cursors, done, [], [], [], {}, maybe_sent)

    # --- what operators see and do ----------------------------------------------------------------------------------

    def will_of(self, stored: StoredSession) -> Will | None:
        """Return the will of a session; None if it has none, or if its record can't be read."""
        left = self._wills.read(stored) if stored.will is not None else None
        return left[0] if left is not None else None

    def delete(self, client_id: str) -> WillOutcome:
        """End the stored session of a client that is not connected; return what came of its will.

        Unless the will has ended, nothing has changed. Raises DiskFull.
        """
        stored = self.sessions.get(client_id)
        if stored is not None and stored.connected:
            self._close_lost(stored)
            stored = self.sessions.get(client_id)
        self._unclosed.pop(client_id, None)
        return self._end(stored) if stored is not None else WillOutcome.ENDED

    # --- background work --------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Do what is due now. Nobody need call this, unless the disk has room again or a test has moved the clock."""
        self._job.run()

    def _work_slice(self, until_s: float) -> bool:
        """Close the sessions of lost clients, then do what is due, until a monotonic time; return whether there is more."""
        self._store.commit()  # The work reads the index, which is as of the last commit.
        sessions, clock = self.sessions, self._clock
        for client_id in tuple(self._unclosed):
            self._close_if_lost(client_id)
        if self._lost_from is not None:
            for client_id in sessions.connected(self._lost_from):
                if clock.monotonic_s() >= until_s:
                    return True
                self._close_if_lost(client_id)
                self._lost_from = client_id
            self._lost_from = None
            self.journal.lost_are_closed()
        self._advances = None
        now_ms = self._store.now_ms()
        for client_id in sessions.due(now_ms):
            if clock.monotonic_s() >= until_s:
                return True
            if self._held and self._held.get(client_id, 0) > now_ms:
                continue
            stored = sessions.get(client_id)
            if stored is not None and self._do_due(stored, now_ms) is WillOutcome.NO_ROOM:
                return False  # The job tries again.
        return False

    def _now_for(self, stored: StoredSession) -> int:
        """Return the present time for what is due of a session, which counts from when its client left: see `Store.now_for`."""
        return self._store.now_for(stored.ends_ms - stored.expiry_s * 1000)

    def _close_if_lost(self, client_id: str) -> None:
        stored = self.sessions.get(client_id)
        if stored is not None and stored.connected and client_id not in self._clients:
            self._close_lost(stored)
        self._unclosed.pop(client_id, None)

    def _do_due(self, stored: StoredSession, now_ms: int) -> WillOutcome:
        """End a session or publish its will, whichever is due; return what came of the will, if it has one."""
        present_ms = self._now_for(stored)
        if stored.ends_ms <= present_ms:
            outcome = self._end(stored, has_expired=True)
        elif stored.will is None or stored.will.due_ms > present_ms:
            self._held[stored.client_id] = now_ms + (stored.due_ms or 0) - present_ms
            return WillOutcome.ENDED
        else:
            outcome = self._wills.publish(stored)
        if outcome is WillOutcome.UNDECIDED:
            self._held[stored.client_id] = now_ms + UNDECIDED_MS
        return outcome

    def _end(self, stored: StoredSession, *, has_expired: bool = False, at_once: bool = False) -> WillOutcome:
        """End a session. Its will, if it has one, is published now at the latest [MQTT-3.1.2-8].

        Return what came of the will. If that has not ended, nothing has changed. With `at_once` the session ends without its
        will if the disk has no room.

        Raises:
            ConnectRefused: with `at_once`, nobody can tell yet whether the will may be published. Nothing has changed.
        """
        outcome = self._wills.publish(stored) if stored.will is not None else WillOutcome.ENDED
        if outcome is not WillOutcome.ENDED:
            if not at_once:
                return outcome
            if outcome is WillOutcome.UNDECIDED:
                raise _undecided()
            self._counters.wills_dropped += 1
            logger.warning("will.dropped", client=stored.client_id, why=self._store.space.why())
        self._counters.sessions_expired += has_expired and stored.expiry_s > 0
        self._record_end(stored)
        return WillOutcome.ENDED

    def _record_end(self, stored: StoredSession) -> None:
        self._held.pop(stored.client_id, None)
        inflight, filters = dict(stored.inflight), list(stored.subscriptions)
        self._record_closed(stored, {"ended": True})
        self._shared.discard(inflight, filters)

    def _record_closed(self, stored: StoredSession, row: dict[str, object]) -> None:
        self._store.append(Kind.SESSION_CLOSED, topic=stored.client_id.encode(), properties=orjson.dumps(row))


def _sent_by(session: Session, stored: StoredSession) -> dict[str, object]:
    """Return how far a client was sent messages, for the record of its end while the disk has no room for a full record.

    What it was sent at QoS 1 comes again with DUP [MQTT-3.3.1-1]. At QoS 0 nothing comes again [MQTT-4.3.1-1].
    """
    at_qos_0 = {one.number for one in _at_qos_0(stored)}
    cursors: list[tuple[int, int, int]] = []
    maybe_sent: dict[str, int] = {}
    for one in session.subscriptions:
        kept = one.stored
        if kept is None or one.cursor <= kept.cursor:
            continue
        if kept.number in at_qos_0:
            cursors.append((kept.number, one.cursor, one.queue.position_at(one.cursor) or 0))
        else:
            maybe_sent[str(kept.number)] = max(one.cursor, kept.maybe_sent)
    return {name: found for name, found in (("cursors", cursors), ("maybe_sent", maybe_sent)) if found}


def _restore_packet_ids(session: Session, stored: StoredSession, received: list[int]) -> None:
    # Shared deliveries of QoS 1 were returned to their group when the client left.
    session.inflight.slots.update(
        (packet_id, slot) for packet_id, slot in stored.inflight.items() if slot is None or not slot.delivery or slot.qos == 2
    )
    session.inflight.last_packet_id = stored.last_packet_id
    session.received.update(received)
    session.subscribed = stored.subscribed


def _at_qos_0(stored: StoredSession) -> list[StoredSubscription]:
    """Return the subscriptions that send at QoS 0 only. One that may send for another of a higher QoS is not among them."""
    ours = [one for one in stored.subscriptions.values() if not one.filter.startswith(SHARE)]
    low, high = [one for one in ours if not one.options & QOS], [one for one in ours if one.options & QOS]
    low += stored.draining.values()  # They send for the others, at the QoS of these.
    if len(low) * len(high) > OVERLAPS_COMPARED_MAX:
        return []
    return [one for one in low if not any(topics.overlap(one.filter, other.filter) for other in high)]


def _is_others(owner: str, user: str) -> bool:
    """Return whether a session belongs to somebody else than this user. What no user owns is open to everybody."""
    return owner not in ("", user)


def _undecided() -> ConnectRefused:
    return ConnectRefused(
        "Nobody can tell yet whether the will of an earlier session may be published. The client may try again.",
        ConnectCode.SERVER_UNAVAILABLE,
        ReasonCode.SERVER_BUSY,
    )


def _refusal(error: StoreError) -> ConnectRefused:
    return ConnectRefused(str(error), ConnectCode.SERVER_UNAVAILABLE, ReasonCode.QUOTA_EXCEEDED)
