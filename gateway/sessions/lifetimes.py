"""How long sessions last: they begin, are left, are gone on with and end, and wills are published. Each such decision is a
record, which `gateway.sessions.sessions` applies, so that it holds whatever becomes of the node.

While a client is connected its session runs ahead of what is stored. Net changes are recorded every `SAVE_S` where there are
any, and when the client leaves: a subscriber of a hot topic costs a record now and then, not one a message. After kill -9 it is
sent again what it had acknowledged since the last one, at QoS 1. What must not come twice, at QoS 2, is recorded at once.

Where a node was killed, the log says of some clients that they are connected. They left then, as far as anybody knows; that is
recorded in slices behind the start, so that a million of them don't hold it up, or when such a client is back.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import orjson
import structlog

from penstock.gateway.delivery.leaving import Leaving
from penstock.gateway.delivery.subscription import Subscription, find_overlaps
from penstock.gateway.protocol.errors import ConnectRefused
from penstock.gateway.protocol.message import to_stored
from penstock.gateway.protocol.packets import NO_LOCAL, QOS, Connect, Will
from penstock.gateway.protocol.parsers import SHARE
from penstock.gateway.protocol.properties import WILL, read_properties, write_properties
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode
from penstock.gateway.sessions.session import Session
from penstock.gateway.sessions.sessions import Sessions
from penstock.gateway.sessions.stored import Changes, StoredSession, StoredSubscription, changes_of
from penstock.store import topics
from penstock.store.errors import DiskFull, QueueUnknown, StoreError
from penstock.store.lightqueue import LightQueue
from penstock.store.record import Flag, Kind, decode, encode_properties

if TYPE_CHECKING:
    import asyncio

    from penstock.gateway.gateway import Gateway

logger = structlog.get_logger("gateway")

SAVE_S = 0.5
"""How far what is stored of a session may be behind what its client was sent, and has acknowledged, at QoS 0 and 1."""

SLICE_S = 0.002
"""Seconds of the loop that one slice takes, about."""

PAUSE_S = 0.008
"""Seconds between two slices: so sessions by the million take a fifth of the loop at most."""

OVERLAPS_COMPARED_MAX = 4096
"""Pairs of filters of one session that are compared when its client was lost. With more, all are taken to overlap: what comes
twice at QoS 0 is the lesser evil."""

FULL_RETRY_S = 5.0
"""Seconds after which what a full disk had no room for is tried again."""


class Lifetimes:
    """The beginnings and ends of all sessions.

    Parameters:
        gateway: whose they are.
        sessions: what is stored of them.
    """

    def __init__(self, gateway: Gateway, sessions: Sessions) -> None:
        self._gateway = gateway
        self._store = gateway.store
        self.sessions = sessions
        self._unsaved: dict[Session, None] = {}
        """Sessions that have got on since their last record, or may have."""
        self._unclosed: dict[str, bool] = {}
        """Clients that have left while the disk took no record that says so, and whether their wills are to be published."""
        self._saving: asyncio.TimerHandle | None = None
        self._working: asyncio.TimerHandle | None = None
        self._is_working = False
        self._lost_from: str | None = ""
        """The client up to which those who were connected when the node ended have been looked at; None when all were."""

    @property
    def away(self) -> int:
        """How many sessions are stored whose clients are not connected: counts those who are, 0.1 us each."""
        return len(self.sessions) - sum(one.session.stored is not None for one in self._gateway.clients.values())

    def start(self) -> None:
        """Begin with those whose clients were connected when the node ended without an end."""
        self._is_working = True
        self._working = self._gateway.loop.call_later(0, self._work)

    def stop(self) -> None:
        """Act by itself no more. The clients have left."""
        for timer in (self._saving, self._working):
            if timer is not None:
                timer.cancel()
        self._is_working = False

    # --- clients come -----------------------------------------------------------------------------------------------

    def check(self, client_id: str, wish: Connect, expiry_s: int) -> None:
        """Raise ConnectRefused where the disk has no room for what `open` has to record."""
        is_back = not wish.clean_start and self.sessions.get(client_id) is not None
        if is_back or expiry_s or wish.will is not None:
            try:
                self._store.space.check(Kind.SESSION_RESUMED if is_back else Kind.SESSION_OPENED)
            except DiskFull as error:
                raise _refusal(error) from error

    def open(self, client_id: str, wish: Connect, expiry_s: int, user: str = "") -> tuple[Session, bool]:
        """Return the session of a client that connects, and whether it was there before [MQTT-3.1.2-4], [MQTT-3.1.2-5].

        Raises:
            ConnectRefused: the disk has no room, or there are as many sessions as may be.
        """
        try:
            return self._open(client_id, wish, expiry_s, user)
        except DiskFull as error:
            raise _refusal(error) from error

    def _open(self, client_id: str, wish: Connect, expiry_s: int, user: str) -> tuple[Session, bool]:
        stored = self.sessions.get(client_id)
        if stored is not None and stored.connected:
            self._lose(stored)
            stored = self.sessions.get(client_id)
        if stored is not None:
            has_expired = stored.ends_ms <= self._store.now_ms()
            if wish.clean_start or has_expired:
                self._end(stored, has_expired=has_expired, at_once=True)
                stored = None
            elif stored.will is not None and stored.will.due_ms <= self._store.now_ms():
                self._publish_will(stored)
        is_present = stored is not None
        if not is_present:
            if not expiry_s and wish.will is None:
                return Session(client_id, 0, user=user), False
            self._make_room()
        self._record_connected(Kind.SESSION_RESUMED if is_present else Kind.SESSION_OPENED, client_id, expiry_s, wish.will)
        stored = self.sessions.get(client_id)
        assert stored is not None, client_id
        session = Session(client_id, 0, stored, user)
        session.expiry_s = expiry_s
        session.has_will = wish.will is not None
        session.lasts = is_present or expiry_s > 0
        if is_present:
            self._take_up(session, stored)
        return session, is_present

    def _make_room(self) -> None:
        """End the session that would end first where there are as many as may be."""
        limit = self._gateway.options.sessions_max
        if len(self.sessions) < limit:
            return
        self._store.commit()
        client_id = self.sessions.first_due()
        stored = self.sessions.get(client_id) if client_id is not None else None
        if stored is None:
            raise ConnectRefused(
                f"{len(self.sessions)} sessions are stored, which is the limit, and all their clients are connected: see "
                "mqtt.sessions_max",
                ConnectCode.SERVER_UNAVAILABLE,
                ReasonCode.QUOTA_EXCEEDED,
            )
        self._gateway.logbook.note("session.displaced", client=stored.client_id, limit=limit)
        self._end(stored, at_once=True)

    def _record_connected(self, kind: Kind, client_id: str, expiry_s: int, will: Will | None) -> None:
        row: dict[str, object] = {"expiry_s": expiry_s}
        body = b""
        if will is not None:
            row["will"] = {"topic": will.topic, "qos": will.qos, "retain": will.retain, "delay_s": will.delay_s}
            body = write_properties(will.properties) + will.body
        self._store.append(kind, topic=client_id.encode(), properties=orjson.dumps(row), body=body)

    def _take_up(self, session: Session, stored: StoredSession) -> None:
        """Give a session what is stored of it."""
        # What was shared at QoS 1 is with others by now.
        session.inflight.update(
            (packet_id, slot)
            for packet_id, slot in stored.inflight.items()
            if slot is None or not slot.delivery or slot.qos == 2
        )
        session.received.update(stored.received)
        session.last_packet_id = stored.last_packet_id
        session.subscribed = stored.subscribed
        for one in list(stored.subscriptions.values()):
            if one.filter.startswith(SHARE):
                self._gateway.shared.take_up(session, one)
                continue
            try:
                queue = self._store.queues.get(one.queue_id)
            except QueueUnknown as error:  # a log that was repaired may lack what declared it
                logger.error("subscription.lost", client=stored.client_id, filter=one.filter, why=str(error))
                continue
            subscription = Subscription(session, one.filter, queue, one.options, one.identifier)
            subscription.number = one.number
            subscription.cursor = one.cursor
            subscription.stored = one
            if one.retained_before is not None:
                subscription.retained_after = one.retained_after
                subscription.retained = self._gateway.retained.matching(
                    one.filter, before=one.retained_before, after=one.retained_after
                )
            session.subscriptions[one.filter] = subscription
            session.no_local += subscription.no_local
            find_overlaps(session, subscription)
        for left in stored.leaving.values():
            with suppress(QueueUnknown):  # said above, of what it was to send for
                queue = self._store.queues.get(left.queue_id)
                leaving = Leaving(session, left.filter, queue, left.number, left.cursor, left.stop, left.cuts)
                leaving.stored = left
                session.leaving.append(leaving)
        self._gateway.counters.subscriptions += len(session.subscriptions)

    # --- while they are there ---------------------------------------------------------------------------------------

    def subscribe(
        self,
        session: Session,
        topic_filter: str,
        options: int,
        identifier: int,
        retained_before: int | None,
        *,
        queue: LightQueue | None = None,
    ) -> LightQueue:
        """Record a subscription of a session that lasts, in place of one to the same filter; return its light queue.

        That is the filter's, or `queue`, which the sessions then claim.

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
            queue_id = queues.prepare(topic_filter)
            queue = queues.find(topic_filter)
            cursor = queue.next_offset if queue is not None else 0
            row |= {"number": session.subscribed, "queue": queue_id, "cursor": cursor}
        if retained_before is not None:
            row["retained"] = retained_before
        self._append(Kind.SESSION_SUBSCRIBED, stored, row)
        return queues.get(stored.subscriptions[topic_filter].queue_id)

    def unsubscribe(self, session: Session, topic_filter: str, leaving: Leaving | None) -> None:
        """Record that a subscription of a session that lasts is over, and what is left of it.

        What it has sent is delivered all the same.
        """
        stored = session.stored
        assert stored is not None, session.client_id
        with suppress(DiskFull):  # then only as long as the node runs
            self.record(session)
        row: dict[str, object] = {"filter": topic_filter}
        if leaving is not None:
            row |= {"stop": leaving.stop, "cuts": list(leaving.cuts.items())}
        self._append(Kind.SESSION_UNSUBSCRIBED, stored, row)
        if leaving is not None:
            leaving.stored = stored.leaving[leaving.number]

    def let_go(self, session: Session, leaving: Leaving) -> None:
        """Record that a subscription of a session that lasts has left."""
        assert session.stored is not None, session.client_id
        self._append(Kind.SESSION_UNSUBSCRIBED, session.stored, {"number": leaving.number})

    def pass_over(self, session: Session) -> None:
        """Pass over what waits for a client beyond `mqtt.session_queued_max`.

        The longest queues are cut to one length, each from its oldest message on: so a flood of one topic doesn't drive out
        what waits of others, and nothing has to be read.
        """
        limit = self._gateway.options.session_queued_max
        lagging = [one for one in session.subscriptions.values() if not one.live and not one.is_shared]
        lagging += [one for one in session.leaving if one.cursor < one.end]
        if sum(one.end - one.cursor for one in lagging) <= limit:
            return
        firsts = [max(one.cursor, one.queue.first_offset()) for one in lagging]  # what has expired doesn't wait
        waiting = [max(one.end - first, 0) for one, first in zip(lagging, firsts, strict=True)]
        length = _cut(waiting, limit)
        dropped = 0
        for one, count in zip(lagging, waiting, strict=True):
            if count > length:
                dropped += count - length
                one.cursor = one.end - length
        if dropped:
            self._gateway.counters.queued_dropped += dropped
            self._gateway.logbook.note("session.queued_dropped", client=session.client_id, messages=dropped)
            if session.lasts:
                self.touch(session)

    def touch(self, session: Session) -> None:
        """Note that a session that lasts has got on. About 0.1 us."""
        self._unsaved[session] = None
        if self._saving is None:
            self._saving = self._gateway.loop.call_later(SAVE_S, self._save)

    def record(self, session: Session, released: list[int] | None = None) -> None:
        """Record how far a session that lasts has got, where that has changed.

        Args:
            session: of a client that is connected.
            released: packet ids of QoS 2 messages whose PUBREL has come.

        Raises:
            DiskFull: nothing may be recorded now. Nothing has changed.
        """
        stored = session.stored
        assert stored is not None, session.client_id
        known = [packet_id for packet_id in released if packet_id in stored.received] if released else []
        changes = changes_of(session, stored, known)
        self._unsaved.pop(session, None)
        if changes is None:
            return
        body, properties = changes.encode()
        self._store.append(Kind.SESSION_OFFSETS, topic=stored.client_id.encode(), body=body, properties=properties)
        stored.inflight.update(changes.sent)  # the very objects, so that the next comparison is by identity

    def _save(self) -> None:
        """Record the sessions that have got on, a slice of them; again after a pause while there are more."""
        self._saving = None
        until = time.monotonic() + SLICE_S
        unsaved = self._unsaved
        wait_s = PAUSE_S
        while unsaved and time.monotonic() < until:
            session = next(iter(unsaved))
            try:
                self.record(session)
            except DiskFull:  # the space tells of it; they are delivered again if the node is killed meanwhile
                unsaved[session] = None
                wait_s = FULL_RETRY_S
                break
        if unsaved:
            self._saving = self._gateway.loop.call_later(wait_s, self._save)

    # --- clients go -------------------------------------------------------------------------------------------------

    def left(self, session: Session) -> None:
        """Keep the session of a client whose connection has ended, or end it. To be called once for each connection."""
        stored = session.stored
        self._unsaved.pop(session, None)
        if stored is None:
            return
        if session.lasts and session.expiry_s:
            with suppress(DiskFull):  # then what it has acknowledged since its last record comes again
                self.record(session)
        session.stored, session.lasts = None, False  # its connection lingers, and would keep it in memory
        try:
            self._close(stored, session.expiry_s, has_will=session.has_will)
        except DiskFull:
            self._unclosed[session.client_id] = session.has_will

    def _close(self, stored: StoredSession, expiry_s: int, *, has_will: bool) -> None:
        """Record that a client has left, and do what is due at once."""
        now_ms = self._store.now_ms()
        if not expiry_s and (not has_will or self._publish_will(stored)):
            self._append_ended(stored)
            return
        delay_s = min(stored.will.delay_s, expiry_s) if stored.will is not None else 0
        will_due_ms = now_ms + delay_s * 1000 if has_will else 0
        self._append(Kind.SESSION_CLOSED, stored, {"ends_ms": now_ms + expiry_s * 1000, "will_due_ms": will_due_ms})
        if stored.will is not None and stored.will.due_ms <= now_ms:
            self._publish_will(stored)

    def _lose(self, stored: StoredSession) -> None:
        """Record that a client left when the node ended without an end, or when the disk was too full to record it.

        What it got at QoS 0 since its last record isn't known: none of that comes twice [MQTT-4.3.1-1].
        """
        self._gateway.shared.lost(stored.inflight)
        cursors: list[tuple[int, int]] = []
        for one in _at_qos_0(stored):
            with suppress(QueueUnknown):  # said when its client is back
                end = self._store.queues.get(one.queue_id).next_offset
                if end != one.cursor:
                    cursors.append((one.number, end))
        if cursors and stored.expiry_s:
            body, properties = Changes(stored.last_packet_id, cursors, [], [], [], [], {}).encode()
            self._store.append(Kind.SESSION_OFFSETS, topic=stored.client_id.encode(), body=body, properties=properties)
        self._close(stored, stored.expiry_s, has_will=self._unclosed.pop(stored.client_id, stored.will is not None))

    # --- what no client waits for -----------------------------------------------------------------------------------

    def turn(self) -> None:
        """Do what is due. Called once a second."""
        if self._working is None:
            self._work()

    def _work(self) -> None:
        """Do a slice of what is to be done; again after a pause while there is more."""
        self._working = None
        if not self._is_working:
            return
        self._store.commit()  # the index is read
        until = time.monotonic() + SLICE_S
        wait_s = PAUSE_S
        try:
            is_done = self._work_until(until)
        except DiskFull:  # the space tells of it
            is_done, wait_s = False, FULL_RETRY_S
        if not is_done:
            self._working = self._gateway.loop.call_later(wait_s, self._work)

    def _work_until(self, until: float) -> bool:
        """Close the sessions of clients that are lost, then do what is due; return whether that was all."""
        sessions = self.sessions
        for client_id in tuple(self._unclosed):
            self._lose_one(client_id)
        if self._lost_from is not None:
            for client_id in sessions.connected(self._lost_from):
                if time.monotonic() >= until:
                    return False
                self._lose_one(client_id)
                self._lost_from = client_id
            self._lost_from = None
        now_ms = self._store.now_ms()
        for client_id in sessions.due(now_ms):
            if time.monotonic() >= until:
                return False
            stored = sessions.get(client_id)
            if stored is not None and not self._go_on(stored, now_ms):
                return True  # no room for a will: at another turn there may be
        return True

    def _lose_one(self, client_id: str) -> None:
        stored = self.sessions.get(client_id)
        if stored is not None and stored.connected and client_id not in self._gateway.clients:
            self._lose(stored)
        self._unclosed.pop(client_id, None)

    def _go_on(self, stored: StoredSession, now_ms: int) -> bool:
        """Do what is due in a session whose client is away; return False where the disk has no room for its will."""
        if stored.ends_ms <= now_ms:
            return self._end(stored, has_expired=True)
        return stored.will is None or stored.will.due_ms > now_ms or self._publish_will(stored)

    def _end(self, stored: StoredSession, *, has_expired: bool = False, at_once: bool = False) -> bool:
        """End a session. Its will, if it has one, is published now at the latest [MQTT-3.1.2-8].

        Return False where the disk has no room for that, and nothing has changed; `at_once`, the session ends without its will.
        """
        if stored.will is not None and not self._publish_will(stored):
            if not at_once:
                return False
            self._gateway.counters.wills_dropped += 1
            logger.warning("will.dropped", client=stored.client_id, why=self._store.space.why())
        self._gateway.counters.sessions_expired += has_expired and stored.expiry_s > 0
        self._append_ended(stored)
        return True

    def _append_ended(self, stored: StoredSession) -> None:
        """Record that a session is over."""
        inflight, filters = dict(stored.inflight), list(stored.subscriptions)
        self._append(Kind.SESSION_CLOSED, stored, {"ended": True})
        self._gateway.shared.ended(inflight, filters)

    def _publish_will(self, stored: StoredSession) -> bool:
        """Publish what a client left behind, once [MQTT-3.1.2-8]: the message's own record says that it is out.

        Return False where the disk has no room for it, and nothing has changed. A will that can't be published is given up.
        """
        store = self._store
        try:
            will = self._read_will(stored)
            if will is not None:
                no_local = any(one.options & NO_LOCAL for one in stored.subscriptions.values())
                publisher = stored.client_id if no_local else ""
                about = to_stored(will.properties, store.now_ms(), publisher=publisher, session=stored.client_id)
                flags = will.qos | Flag.SESSION | (Flag.RETAIN if will.retain else 0)
                store.append_message(store.queues.route(will.topic.encode()), will.body, encode_properties(about), flags)
                return True
        except DiskFull:
            return False
        except StoreError as error:
            logger.warning("will.refused", client=stored.client_id, why=str(error))
        if not stored.connected:
            self._append(Kind.SESSION_CLOSED, stored, {"ends_ms": stored.ends_ms, "will_due_ms": 0})
        return True

    def _read_will(self, stored: StoredSession) -> Will | None:
        """Return the will of a session; None where its record can't be read, which is logged."""
        assert stored.will is not None, stored.client_id
        position, size = stored.will.position, stored.will.size
        if position >= self._store.log.written:
            self._store.commit()
        data = self._store.read_intact(position, size)
        if data is None:
            return None
        record = decode(data, position=position, verify=False)
        row = orjson.loads(record.properties)["will"]
        properties, at = read_properties(record.body, 0, WILL)
        return Will(row["topic"], record.body[at:], row["qos"], row["retain"], row["delay_s"], properties)

    def _append(self, kind: Kind, stored: StoredSession, row: dict[str, object]) -> None:
        self._store.append(kind, topic=stored.client_id.encode(), properties=orjson.dumps(row))


def _at_qos_0(stored: StoredSession) -> list[StoredSubscription]:
    """Return the subscriptions of a session that send at QoS 0 only: not those that may send for one of a higher QoS."""
    ours = [one for one in stored.subscriptions.values() if not one.filter.startswith(SHARE)]
    low, high = [one for one in ours if not one.options & QOS], [one for one in ours if one.options & QOS]
    low += stored.leaving.values()  # they send for the others, at their QoS
    if len(low) * len(high) > OVERLAPS_COMPARED_MAX:
        return []
    return [one for one in low if not any(topics.overlap(one.filter, other.filter) for other in high)]


def _refusal(error: DiskFull) -> ConnectRefused:
    return ConnectRefused(str(error), ConnectCode.SERVER_UNAVAILABLE, ReasonCode.QUOTA_EXCEEDED)


def _cut(lengths: list[int], total: int) -> int:
    """Return the length to which the longest of some queues must be cut, so that all together have `total` messages at most."""
    left = total
    for number, length in enumerate(ordered := sorted(lengths)):
        share = left // (len(ordered) - number)
        if length > share:
            return share
        left -= length
    return ordered[-1] if ordered else 0
