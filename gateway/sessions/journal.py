"""Records what happens in the sessions of connected clients: subscriptions, and how far deliveries have got.

A session is ahead of its stored form while its client is connected. The journal makes two kinds of records of that.

- A full record has all net changes of one session. The journal makes it every `SAVE_S`, and when the client leaves. So a
  subscriber of a hot topic costs a full record now and then, and not one a message. Changes at QoS 2 must survive, so they are
  recorded at once.
- A record of acknowledgements has what the clients of all sessions have acknowledged since the full records. The journal adds
  it to every commit, and makes a commit for it after `ACKS_SAVE_S`. After kill -9 a client gets again what it had not
  acknowledged, and what it acknowledged since that commit.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

import orjson

from penstock.gateway.sessions.acked import AckedColumns
from penstock.gateway.sessions.changes import Changes
from penstock.gateway.sessions.inflight import Slot
from penstock.gateway.sessions.session import Session
from penstock.gateway.sessions.stored_session import StoredSession
from penstock.store.clock import Clock
from penstock.store.errors import DiskFull
from penstock.store.queues.lightqueue import LightQueue
from penstock.store.record import Kind
from penstock.store.sliced import SlicedJob
from penstock.store.space.causer import NODE, Causer
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.gateway.delivery.draining import DrainingSubscription

SAVE_S: Final = 0.5
"""Interval, in seconds, of full records of changes that may be lost in a crash: those at QoS 0 and 1."""

ACKS_SAVE_S: Final = 0.02
"""Seconds after which acknowledgements are recorded if no commit has recorded them before."""

ACKS_MAX: Final = 512
"""Acknowledgements of one session that may wait for a commit, if the client's window is not larger. With more of them, the turn
in which they come ends with a commit. So a client that reads a backlog at full speed gets few messages again after a kill."""

SESSIONS_MAX: Final = 8_192
"""Sessions in one record of acknowledgements: bounds the size of the record."""


class SessionJournal:
    """The journal of a node's sessions.

    Parameters:
        store: takes the records.
        clock: measures the slices of background work.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._job: SlicedJob
        self._acks_job: SlicedJob
        self._unsaved: dict[Session, int] = {}
        """Sessions that have changed since their last full record, or may have, each with the end of the log at that time."""
        self._acked: dict[Session, None] = {}
        """Sessions whose clients have acknowledged something since their last record of either kind, or may have."""
        self._needed_before = 0
        """The SESSIONS_ACKED records before this position are needed for the sessions of lost clients."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Record changes from now on."""
        self._job = SlicedJob(loop, self._clock, self._save_slice)
        self._acks_job = SlicedJob(loop, self._clock, self._save_acks)
        self._needed_before = self._store.log.end
        self._store.before_commit = self._record_acks

    def stop(self) -> None:
        """Record nothing more on a timer. All clients have left."""
        self._job.stop()
        self._acks_job.stop()

    def lost_are_closed(self) -> None:
        """Let go of the records that were needed for the clients that were connected when the last node was killed."""
        self._needed_before = 0

    # --- progress ---------------------------------------------------------------------------------------------------

    def mark(self, session: Session) -> None:
        """Have the changes of a session that lasts recorded within `SAVE_S`. Cheap enough for every batch."""
        unsaved = self._unsaved
        if session not in unsaved:
            if not unsaved:  # Otherwise the job is scheduled already.
                self._job.wake(SAVE_S)
            unsaved[session] = self._store.log.end

    def mark_acked(self, session: Session) -> None:
        """Have the acknowledgements of a session that lasts recorded with the next commit, within `ACKS_SAVE_S`."""
        self.mark(session)
        acked = self._acked
        if not acked:
            self._acks_job.wake(ACKS_SAVE_S)
        acked[session] = None
        inflight = session.inflight
        if session.unrecorded.unsaid(len(inflight.slots)) > max(inflight.maximum, ACKS_MAX):
            self._record_acks()

    def forget(self, session: Session) -> None:
        """Record nothing more of a session on the timer or with a commit: its client has left."""
        self._unsaved.pop(session, None)
        self._acked.pop(session, None)

    def save(self, session: Session, released: list[int] | None = None) -> None:
        """Record the changes of a session that lasts, if there are any.

        Args:
            session: of a connected client.
            released: packet ids of QoS 2 messages whose PUBREL has come.

        Raises:
            DiskFull: nothing may be recorded now. Nothing has changed.
        """
        stored = session.stored
        assert stored is not None, session.client_id
        known = [packet_id for packet_id in released if packet_id in stored.received] if released else []
        changes = changes_of(session, stored, known)
        if changes is not None:
            body, properties = changes.encode()
            self._store.append(Kind.SESSION_OFFSETS, topic=stored.client_id.encode(), body=body, properties=properties)
            stored.inflight.update(changes.sent)  # The very objects, because the next comparison is by identity.
            session.unrecorded.reset(session.inflight.slots)
        self._unsaved.pop(session, None)
        self._acked.pop(session, None)

    def _save_acks(self, _: float) -> bool:
        """Record acknowledgements that no commit has recorded; return False, because nothing is left."""
        self._store.space.check(Kind.SESSIONS_ACKED)
        self._record_acks()
        return False

    def _record_acks(self) -> None:
        """Record what clients have acknowledged since the last commit. The hot path of acknowledgements at QoS 1."""
        while self._acked:
            try:
                self._store.space.check(Kind.SESSIONS_ACKED)
                self._record_some_acks()
            except DiskFull:  # If the node is killed meanwhile, clients get these deliveries again.
                self._acks_job.wake(ACKS_SAVE_S)
                return

    def _record_some_acks(self) -> None:
        """Record the acknowledgements of up to `SESSIONS_MAX` sessions. Raises DiskFull."""
        acked, columns = self._acked, AckedColumns()
        sessions = list(islice(acked, SESSIONS_MAX))
        try:
            for session in sessions:
                stored, unrecorded, inflight = session.stored, session.unrecorded, session.inflight
                assert stored is not None, session.client_id
                advance = unrecorded.advance(inflight.slots, stored.inflight, inflight.maximum)
                if advance is None:
                    self.save(session)
                elif advance.floors or advance.first != unrecorded.said:
                    unrecorded.said = advance.first
                    columns.add(stored.recorded_at, advance)
            if columns:
                obsolete_before = next(iter(self._unsaved.values()), self._store.log.end)
                self._store.append(Kind.SESSIONS_ACKED, body=columns.encode(self._needed_before, obsolete_before))
        except DiskFull:
            for session in sessions:  # What `advance` has returned is lost, so only a full record can make up for it.
                session.unrecorded.lose()
            raise
        for session in sessions:
            acked.pop(session, None)

    def _save_slice(self, until_s: float) -> bool:
        """Record sessions that have changed until a monotonic time; return whether there are more."""
        clock, unsaved = self._clock, self._unsaved
        while unsaved and clock.monotonic_s() < until_s:
            self.save(next(iter(unsaved)))
        return bool(unsaved)

    # --- subscriptions ----------------------------------------------------------------------------------------------

    def record_subscription(
        self,
        session: Session,
        topic_filter: str,
        options: int,
        identifier: int,
        retained_before: int | None,
        *,
        causer: Causer = NODE,
        queue: LightQueue | None = None,
    ) -> LightQueue:
        """Record a subscription of a session that lasts, in place of one to the same filter; return its light queue.

        Args:
            session: of a connected client.
            topic_filter: as the client sent it.
            options: the subscription options granted (MQTT 5.0, 3.8.3.1).
            identifier: the subscription identifier, or 0.
            retained_before: the position before which retained messages are stored that the client gets; None if it gets none.
            causer: is charged for the subscription and, if that is new, for its light queue.
            queue: the light queue that the subscription uses; by default the queue of the filter.

        Raises:
            TopicInvalid, LimitExceeded, DiskFull: as `Queues.prepare` and `Store.append` do.
        """
        stored, queues = session.stored, self._store.queues
        assert stored is not None, session.client_id
        old = stored.subscriptions.get(topic_filter)
        row: dict[str, object] = {"filter": topic_filter, "options": options, "identifier": identifier}
        if old is not None:
            row |= {"number": old.number, "queue": old.queue_id, "cursor": old.cursor}
        elif queue is not None:
            row |= {"number": session.subscribed, "queue": queue.id, "cursor": 0}
        else:
            queue_id = queues.prepare(topic_filter, causer)
            queue = queues.find(topic_filter)
            cursor = queue.next_offset if queue is not None else 0
            row |= {"number": session.subscribed, "queue": queue_id, "cursor": cursor}
        if old is None:
            row["by"] = causer.row()
        if retained_before is not None:
            row["retained"] = retained_before
        self._append(Kind.SESSION_SUBSCRIBED, stored, row)
        return queues.get(stored.subscriptions[topic_filter].queue_id)

    def record_unsubscription(
        self, session: Session, topic_filter: str, draining: DrainingSubscription | None, *, is_withdrawn: bool
    ) -> None:
        """Record that a subscription of a session that lasts has ended, and what it still sends for others.

        The progress is recorded first, because deliveries that are under way still count. `is_withdrawn` says whether the
        server has ended it. Raises DiskFull.
        """
        stored = session.stored
        assert stored is not None, session.client_id
        with suppress(DiskFull):  # Then the progress is known only as long as the node runs.
            self.save(session)
        row: dict[str, object] = {"filter": topic_filter}
        if draining is not None:
            row |= {"stop": draining.end, "cuts": list(draining.cuts.items())}
        if is_withdrawn:
            row["withdrawn"] = True
        self._append(Kind.SESSION_UNSUBSCRIBED, stored, row)
        if draining is not None:
            draining.stored = stored.draining[draining.number]

    def record_drained(self, session: Session, number: int) -> None:
        """Record that the draining subscription with this number has sent everything. Raises DiskFull."""
        assert session.stored is not None, session.client_id
        self._append(Kind.SESSION_UNSUBSCRIBED, session.stored, {"number": number})

    def _append(self, kind: Kind, stored: StoredSession, row: dict[str, object]) -> None:
        self._store.append(kind, topic=stored.client_id.encode(), properties=orjson.dumps(row))


def changes_of(session: Session, stored: StoredSession, released: list[int]) -> Changes | None:
    """Return what has changed in a session since its last record; None if nothing has.

    The function looks at each delivery under way and at each subscription, so callers run it once for many messages.

    Args:
        session: of a connected client.
        stored: its stored session, as of the last record.
        released: packet ids whose PUBREL is to be recorded.
    """
    saved, slots = stored.inflight, session.inflight.slots
    done = [packet_id for packet_id in saved if packet_id not in slots]
    received: list[int] = []
    sent: list[tuple[int, Slot | None]] = []
    for packet_id, slot in slots.items():
        if packet_id not in saved:
            sent.append((packet_id, slot))
        elif saved[packet_id] is not slot:
            if slot is None:
                received.append(packet_id)
            else:  # The delivery is complete, and the packet id was assigned again.
                done.append(packet_id)
                sent.append((packet_id, slot))
    cursors: list[tuple[int, int, int]] = []
    retained: dict[int, bytes | None] = {}
    for one in session.subscriptions:
        kept = one.stored
        if kept is None:
            continue
        if one.cursor != kept.cursor:
            cursors.append((kept.number, one.cursor, one.queue.position_at(one.cursor) or 0))
        if kept.retained_before is not None and (not one.has_retained or one.retained_after != kept.retained_after):
            retained[kept.number] = one.retained_after if one.has_retained else None
    if not (done or received or released or sent or cursors or retained):
        return None
    return Changes(session.inflight.last_packet_id, cursors, done, received, released, sent, retained)
