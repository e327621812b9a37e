"""A subscription: a filter of one session, and a cursor into the filter's light queue.

A subscription that has caught up is *live*: it gets each batch from the queue's fanout, which encodes it once for all of
them. One that can't take a batch (its socket is full, or too many deliveries wait for their acks) leaves the shared path,
reads on from its cursor when it can take more, and is live again when it has caught up. So a slow consumer costs disk
reads, not memory. One whose client is away isn't there: its cursor is stored.

In a session that lasts, a delivery at QoS 2 is stored before it goes out: a client that has its packet id must never see the
message under another one [MQTT-4.3.3-2]. At QoS 1 cursors and packet ids are stored now and then; see `sessions.lifetimes`.

In MQTT 5.0, what is one client's alone leaves the shared path too, and only that: topic aliases, packets that are too large
for the client, its own messages where it wants none, and messages that several of its subscriptions match. Of those the
oldest of them sends one, at the highest QoS and with the identifiers of all [MQTT-3.3.4-2], [MQTT-3.3.4-4]; the others pass it
over. A client of MQTT 3.1.1 gets one for each subscription, as 3.1.1:[MQTT-3.3.5-1] allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from penstock.gateway.auth.access import topics_of
from penstock.gateway.delivery.encoding import SLOT, Run, Terms, encode_own, encode_run
from penstock.gateway.protocol.packets import NO_LOCAL, QOS, RETAIN_AS_PUBLISHED
from penstock.store import topics
from penstock.store.errors import DiskFull, StoreError
from penstock.store.lightqueue import ENTRY, ENTRY_BYTES, LightQueue, entries_array
from penstock.store.options import KIB, MIB

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection
    from penstock.gateway.sessions.session import Session
    from penstock.gateway.sessions.stored import StoredSubscription

PUMP_ENTRIES = 256
"""Entries that a lagging subscription reads in one step: bounds what is encoded ahead of a socket that fills up."""

PUMP_BYTES = 256 * KIB
"""Bytes of messages with which a step ends, for the same reason: 256 messages may be 256 MiB."""

PUMP_STEPS = 16
"""Steps of one subscription in one turn of the loop: about 4 ms of small messages. So one that lags by millions, with a client
that reads as fast as it is sent to, holds up nobody."""

PUMP_AHEAD = 8
"""Steps for which entries are read at once, from the second step on. Each read begins with a seek, and where a commit had many
entries for the queue it copies all of them."""

BATCH_COPY_BYTES_MAX = MIB
"""A larger batch with packet ids, of which each client needs a copy, is read by each in steps instead."""

WILDCARDS_COMPARED_MAX = 64
"""Wildcard filters of a session up to which each new filter is compared with them. Beyond, all are taken to overlap."""


class SubscriptionForbidden(StoreError):
    """Raised for a filter that a client may not have: the plugins say so, or the access file of POP."""


class Subscription:
    """What one session gets from one filter.

    Parameters:
        session: whose it is.
        topic_filter: a valid filter.
        queue: the filter's light queue.
        options: the subscription options granted (MQTT 5.0, 3.8.3.1): no delivery has a higher QoS.
        identifier: the subscription identifier, or 0.
    """

    __slots__ = (
        "_may_object",
        "connection",
        "cursor",
        "filter",
        "identifier",
        "is_own",
        "key",
        "live",
        "no_local",
        "number",
        "overlaps",
        "qos",
        "queue",
        "retained",
        "retained_after",
        "session",
        "stored",
        "terms",
    )

    is_shared = False

    connection: Connection
    """Where the packets go, once it has begun. Nothing goes out while the client is away."""

    def __init__(self, session: Session, topic_filter: str, queue: LightQueue, options: int, identifier: int) -> None:
        self.session = session
        self.filter = topic_filter
        self.queue = queue
        self.qos = options & QOS
        self.no_local = bool(options & NO_LOCAL)
        self.identifier = identifier
        self.number = session.subscribed
        self.cursor = queue.committed_offset
        self.retained: Iterator[bytes] | None = None
        """Entries of retained messages, which go out first (see `RetainedMessages.matching`)."""
        self.retained_after = b""
        """The topic of the last of them that is out, in a session that lasts."""
        self.stored: StoredSubscription | None = None
        """What is stored of it, in a session that lasts."""
        self.live = False
        self.overlaps = False
        """Another subscription of the session matches some of the same topics."""
        self.terms = Terms(self.qos, False, bool(options & RETAIN_AS_PUBLISHED), (identifier,) if identifier else ())
        self.key = self.terms.key
        self.is_own = False
        """Nothing of what it sends can be shared."""
        self._may_object = False

    def begin(self, connection: Connection) -> None:
        """Send to a connection from now on, in its version."""
        self.connection = connection
        is_v5 = connection.is_v5
        self.terms = self.terms._replace(is_v5=is_v5)
        self.key = self.terms.key
        self._may_object = is_v5 and (self.no_local or connection.packet_bytes_max is not None)
        self.settle()
        self.join()

    def join(self) -> None:
        """Be one of those whom the queue's batches are for."""
        self.connection.lagging[self] = None
        self.connection.gateway.fanout(self.queue).add(self)

    def rest(self) -> None:
        """Send nothing more, until it begins again."""
        self.live = False
        self.connection.lagging.pop(self, None)
        self.connection.gateway.leave_fanout(self)

    def release(self) -> None:
        """Give up what it holds in the store, if its session doesn't last. It rests."""
        if self.stored is None and not any(one.queue is self.queue and one is not self for one in self.session.leaving):
            self.connection.gateway.store.queues.detach(self.queue, self.session.owner)

    def settle(self) -> None:
        """See whether what it sends can be shared, where that has changed."""
        self.is_own = self.terms.is_v5 and (self._has_siblings or self.connection.aliases is not None)

    @property
    def end(self) -> int:
        """Up to which offset there is something for it."""
        return self.queue.committed_offset

    @property
    def _has_siblings(self) -> bool:
        """Whether other subscriptions of the session match some of the same topics, or may have until lately."""
        return self.overlaps or bool(self.session.leaving)

    def matches(self, topic: str) -> bool:
        """Return whether it gets the messages of a topic."""
        return topics.matches(self.filter, topic)

    # --- the shared path --------------------------------------------------------------------------------------------

    def deliver(self, run: Run, next_offset: int) -> bool:
        """Send a batch that begins at the cursor; return False, and send nothing, where there is no room for it."""
        if run.slots and (len(run.slots) > self.session.room or len(run.data) > BATCH_COPY_BYTES_MAX):
            return False
        if self._may_object and self._objects(run):
            return False
        cursor, self.cursor = self.cursor, next_offset
        if not self._send(run):
            self.cursor = cursor
            return False
        return True

    def _objects(self, run: Run) -> bool:
        """Return whether a run may have something in it that this client doesn't take."""
        packet_bytes_max = self.connection.packet_bytes_max
        if packet_bytes_max is not None and len(run.data) > packet_bytes_max:
            return True
        return self.no_local and self.session.client_id in run.publishers

    def _send(self, run: Run) -> bool:
        """Send a run; return False, and send nothing, where the disk has no room for what must be stored of it."""
        connection, session = self.connection, self.session
        if not run.slots:
            if session.lasts:
                connection.gateway.lifetimes.touch(session)
            if run.data:
                connection.send_publishes(run.data, run.messages)
            return True
        data = bytearray(run.data)
        fill, take = SLOT.pack_into, session.take_packet_id
        for slot in run.slots:
            fill(data, slot.offset, take(slot))
        if not session.lasts:
            connection.send_publishes(bytes(data), run.messages)
            return True
        if (self.qos == 1 and not self.overlaps) or all(slot.qos == 1 for slot in run.slots):
            connection.gateway.lifetimes.touch(session)
            connection.send_publishes(bytes(data), run.messages)
            return True
        try:
            connection.gateway.lifetimes.record(session)
        except DiskFull:
            for _ in run.slots:  # those that were given last
                session.inflight.popitem()
            if connection.aliases is not None:
                connection.aliases.forget()  # the client has not been told of those in this run
            return False
        connection.send_when_durable(bytes(data), run.messages)
        return True

    # --- from the cursor --------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what a subscription that isn't live can take now, a few steps of it; make it live when it has caught up.

        One that stops before that is always called again: when its socket has drained, when an ack has made room, or soon.
        """
        connection = self.connection
        needs_room = self.qos or self.overlaps
        ahead, ahead_from = b"", 0
        for step in range(PUMP_STEPS):
            room = min(self.session.room, PUMP_ENTRIES) if needs_room else PUMP_ENTRIES
            if not connection.writable or room <= 0:
                return
            if self.retained is not None:
                if not self._send_retained(self.retained, room):
                    return
                continue
            if self.session.leaving and any(one.holds_back(self) for one in self.session.leaving):
                return
            at = (self.cursor - ahead_from) * ENTRY_BYTES
            if at >= len(ahead):
                ahead_from, ahead = self.queue.read_from(self.cursor, room * PUMP_AHEAD if step else room)
                at = 0
            first = ahead_from + at // ENTRY_BYTES
            entries = self._within_cuts(first, ahead[at : at + room * ENTRY_BYTES])
            if not entries:
                self._caught_up()
                return
            entries = _portion(entries)
            admitted, passed = self._admit(entries)
            if not passed:
                return
            cursor, self.cursor = self.cursor, first + passed
            if not admitted:
                if self.session.lasts:
                    connection.gateway.lifetimes.touch(self.session)
            elif not self._send(self._encode(admitted, is_retained=False)):
                self.cursor = cursor
                return
        connection.pump_soon()

    def _within_cuts(self, first: int, entries: bytes) -> bytes:
        """Return the first of some entries: none on the two sides of a cut (see `Leaving`)."""
        for one in self.session.leaving:
            cut = one.cuts.get(self.number, 0)
            if first < cut:
                entries = entries[: (cut - first) * ENTRY_BYTES]
        return entries

    def _caught_up(self) -> None:
        """Be live from now on: there is nothing more to be read."""
        self.cursor = self.queue.committed_offset  # what lies between has expired
        self.live = True
        self.connection.lagging.pop(self, None)

    def _admit(self, entries: bytes) -> tuple[bytes, int]:
        """Return those of some entries that the client may have, and how many were looked at.

        Where it is none, the plugins are asked, and when they have answered the subscriptions that lag go on.
        """
        guard = self.connection.guard
        return (entries, len(entries) // ENTRY_BYTES) if guard is None else guard.admit(entries)

    def _encode(self, entries: bytes, *, is_retained: bool) -> Run:
        connection = self.connection
        if not self.is_own and not self._may_object:
            return encode_run(connection.store, entries, self.terms, retain=is_retained, verify=True)
        run, too_large = encode_own(
            connection.store,
            entries,
            self._alone if is_retained else self._together,
            packet_bytes_max=connection.packet_bytes_max or MIB * 256,
            aliases=connection.aliases,
            retain=is_retained,
        )
        connection.gateway.counters.deliveries_too_large += too_large
        return run

    def _alone(self, topic: bytes, publisher: str) -> Terms | None:
        return None if self.no_local and publisher == self.session.client_id else self.terms

    def _together(self, topic: bytes, publisher: str) -> Terms | None:
        """Return the terms of all subscriptions of this session that match, if this one sends for them."""
        if not self._has_siblings:
            return self._alone(topic, publisher)
        name = topic.decode()
        matching = self.session.matching(name)
        if not matching or matching[0] is not self or self._is_sent_by_leaving(name):
            return None
        return together(matching, publisher)

    def _is_sent_by_leaving(self, topic: str) -> bool:
        """Return whether an older subscription that has ended still sends the message of a topic in front of the cursor."""
        return any(one.number < self.number and one.sends_for(self, topic) for one in self.session.leaving)

    def _send_retained(self, retained: Iterator[bytes], room: int) -> bool:
        """Send the next of the retained messages, `room` at most; note when there are no more.

        Return False where that waits for the plugins.
        """
        entries = bytearray()
        body_bytes = 0
        for entry in islice(retained, room):
            if not entry:  # the search pauses
                break
            entries += entry
            body_bytes += ENTRY.unpack(entry)[1]
            if body_bytes >= PUMP_BYTES:
                break
        else:
            if len(entries) < room * ENTRY_BYTES:
                self.retained = None
        if not entries:
            if self.session.lasts:
                self.connection.gateway.lifetimes.touch(self.session)
            return True
        admitted, passed = self._admit(bytes(entries))
        after = self.retained_after
        if self.session.lasts and passed:
            last = bytes(entries[(passed - 1) * ENTRY_BYTES : passed * ENTRY_BYTES])
            self.retained_after = topics_of(self.connection.store, last)[0] or after
        if admitted and not self._send(self._encode(admitted, is_retained=True)):
            self.retained_after = after
            passed = 0
        left = entries[passed * ENTRY_BYTES :]
        if left:  # they come first the next time
            again = (bytes(left[at : at + ENTRY_BYTES]) for at in range(0, len(left), ENTRY_BYTES))
            self.retained = chain(again, retained)
        return passed > 0

    def lag(self) -> None:
        """Leave the shared path."""
        self.live = False
        self.connection.lagging[self] = None


def together(matching: tuple[Subscription, ...], publisher: str) -> Terms | None:
    """Return the terms of one message that several subscriptions of a session match; None where none of them wants it."""
    wanting = [one for one in matching if not (one.no_local and publisher == one.session.client_id)]
    if not wanting:
        return None
    return Terms(
        max(one.qos for one in wanting),
        wanting[0].terms.is_v5,
        any(one.terms.keeps_retain for one in wanting),
        tuple(one.identifier for one in wanting if one.identifier),
    )


def find_overlaps(session: Session, changed: Subscription) -> list[Subscription]:
    """Mark the subscriptions of a session that match topics of `changed`, which was added or removed; return those marked anew.

    Filters without wildcards are never two for one topic, so those with wildcards are compared with all, and others with them.
    After a removal marks may stay that hold no longer: they cost the shared path, and where there are few are found again.
    """
    everyone = tuple(one for one in session.subscriptions.values() if not one.is_shared)
    before = {one for one in everyone if one.overlaps}
    wildcards = [one for one in everyone if topics.is_wildcard(one.filter)]
    if len(wildcards) > WILDCARDS_COMPARED_MAX:
        for one in everyone:
            one.overlaps = True
    elif session.subscriptions.get(changed.filter) is changed:
        for one in everyone if topics.is_wildcard(changed.filter) else wildcards:
            if one is not changed and not (one.overlaps and changed.overlaps) and topics.overlap(one.filter, changed.filter):
                one.overlaps = changed.overlaps = True
    elif changed.overlaps and len(everyone) <= WILDCARDS_COMPARED_MAX:
        for one in everyone:
            others = everyone if topics.is_wildcard(one.filter) else wildcards
            one.overlaps = any(topics.overlap(other.filter, one.filter) for other in others if other is not one)
    return [one for one in everyone if one.overlaps != (one in before)]


def _portion(entries: bytes) -> bytes:
    """Return the first of some entries: up to the one with which their messages come to `PUMP_BYTES`."""
    message_bytes = np.cumsum(entries_array(entries)["size"], dtype=np.int64)
    count = int(np.searchsorted(message_bytes, PUMP_BYTES)) + 1
    return entries[: count * ENTRY_BYTES]
