"""A subscription: a filter of one session, and a cursor into the filter's light queue.

A subscription that has caught up is *live*: it gets each batch from the queue's fanout, which encodes the batch once for all of
them. A subscription leaves this shared path if it can't take a batch, because the client's socket is full or too many
deliveries wait for acknowledgement. It then reads from its cursor when it can send more, and is live again when it has caught
up. So a slow consumer costs disk reads, and no memory. While the client is away the subscription exists as a stored cursor
only.

In a session that lasts, a delivery at QoS 2 is recorded before it is sent: a client that knows its packet id must never get the
message under another one [MQTT-4.3.3-2]. At QoS 1 the journal records what was sent at intervals, and acknowledgements with
every commit (`sessions.journal`).

In MQTT 5.0 a subscription also leaves the shared path for packets that are its client's alone: those with topic aliases, those
that may be too large for the client, the client's own messages where it excludes them, and messages that several of its
subscriptions match. Of those subscriptions the oldest sends the message once, at the highest QoS and with the identifiers of
all [MQTT-3.3.4-2], [MQTT-3.3.4-4], and the others skip it. A client of MQTT 3.1.1 gets the message once for each subscription,
as 3.1.1:[MQTT-3.3.5-1] allows, unless `mqtt.overlapping` says "once".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.gateway.auth.permissions import topics_of
from penstock.gateway.delivery.encoding import EVERY_POSITION, DeliveryOptions, EncodedBatch, encode_batch, encode_for_client
from penstock.gateway.delivery.retained_replay import RetainedReplay
from penstock.gateway.protocol.packets import NO_LOCAL, QOS, RETAIN_AS_PUBLISHED
from penstock.gateway.sessions.stored_subscription import StoredSubscription
from penstock.gateway.sessions.unrecorded import NOT_QUEUED
from penstock.store import topics
from penstock.store.errors import DiskFull, StoreError
from penstock.store.options import KIB, MIB
from penstock.store.queues.lightqueue import ENTRY_BYTES, LightQueue, entries_array

if TYPE_CHECKING:
    from penstock.gateway.delivery.client_subscriptions import ClientSubscriptions

PUMP_ENTRIES: Final = 256
"""Entries that a lagging subscription reads in one step: bounds what is encoded ahead of a socket that fills up."""

PUMP_BYTES: Final = 256 * KIB
"""Bytes of messages after which a step ends, for the same reason: 256 messages may be 256 MiB."""

PUMP_STEPS: Final = 16
"""Steps of one subscription in one turn of the loop. A subscription that lags by millions of messages, and whose client reads
as fast as the node sends, must not hold up other clients."""

PUMP_AHEAD: Final = 8
"""Steps for which entries are read at once, from the second step on. Each read begins with a seek, and copies all entries of a
commit that had many for the queue."""

BATCH_COPY_BYTES_MAX: Final = MIB
"""Largest batch with packet ids that is delivered as a whole, in bytes. Each client needs a copy, so subscriptions read a
larger batch in steps."""

PACKET_BYTES_UNLIMITED: Final = 256 * MIB
"""More than the largest packet that MQTT can encode: stands for no maximum packet size."""


class SubscriptionForbidden(StoreError):
    """Raised for a filter that a client may not have, because the plugins or the access file of POP forbid it."""


class Subscription:
    """What one client gets from one filter.

    Parameters:
        subscriber: the client.
        topic_filter: a valid filter.
        queue: the filter's light queue.
        granted: the subscription options granted (MQTT 5.0, 3.8.3.1). No delivery has a higher QoS than these name.
        identifier: the subscription identifier, or 0.
    """

    __slots__ = (
        "_may_reject",
        "context",
        "cursor",
        "filter",
        "identifier",
        "is_own",
        "key",
        "live",
        "maybe_sent",
        "no_local",
        "number",
        "options",
        "outlet",
        "overlaps",
        "qos",
        "queue",
        "retained",
        "session",
        "stored",
        "subscriber",
    )

    is_shared = False

    def __init__(
        self, subscriber: ClientSubscriptions, topic_filter: str, queue: LightQueue, granted: int, identifier: int
    ) -> None:
        self.subscriber = subscriber
        self.session = subscriber.session
        self.outlet = subscriber.outlet
        self.context = subscriber.context
        self.filter = topic_filter
        self.queue = queue
        self.qos = granted & QOS
        self.no_local = bool(granted & NO_LOCAL)
        """Whether the client's own messages are excluded."""
        self.identifier = identifier
        self.number = self.session.subscribed
        """The number of the subscription in its session. Older ones have lower numbers."""
        self.cursor = queue.committed_offset
        """Offset of the next message in the light queue."""
        self.maybe_sent = 0
        """Offset before which a node that was killed may have sent messages: they go out with DUP."""
        self.retained: RetainedReplay | None = None
        """The retained messages, which are sent first; None if no more are to be sent."""
        self.stored: StoredSubscription | None = None
        """In a session that lasts: the stored subscription."""
        self.live = False
        """Whether it has caught up with its queue and takes batches from the fanout."""
        self.overlaps = False
        """Whether another subscription of the session matches some of the same topics."""
        is_v5 = self.outlet.is_v5
        keeps_retain = bool(granted & RETAIN_AS_PUBLISHED)
        self.options = DeliveryOptions(self.qos, is_v5, keeps_retain, (identifier,) if identifier else ())
        self.key = self.options.key
        self.is_own = False
        """Whether its packets are its client's alone, so that none of them can be shared."""
        self._may_reject = is_v5 and (self.no_local or self.outlet.packet_bytes_max is not None)
        """Whether some batches of the fanout may be wrong for this client."""

    # --- beginning and end ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to send. The subscription lags until it has caught up with its queue."""
        self.update_is_own()
        self.outlet.lagging[self] = None
        self.context.fanouts.add(self.queue, self)

    def stop(self) -> None:
        """Send nothing more."""
        self.live = False
        self.outlet.lagging.pop(self, None)
        self.context.fanouts.remove(self.queue, self)

    def release(self) -> None:
        """Give up the light queue after `stop`, unless the session lasts or a draining subscription reads the queue."""
        if self.stored is None and not any(one.queue is self.queue for one in self.subscriber.draining):
            self.context.store.queues.detach(self.queue, self.session.owner)

    def update_is_own(self) -> None:
        """Decide anew whether packets can be shared, after `overlaps` or the draining subscriptions have changed."""
        self.is_own = self.combines and (self._has_siblings or self.outlet.aliases is not None)

    @property
    def combines(self) -> bool:
        """Whether a message that several subscriptions of the client match is sent once for all of them."""
        return self.options.is_v5 or self.context.sends_once

    @property
    def end(self) -> int:
        """Offset up to which there are messages for it."""
        return self.queue.committed_offset

    @property
    def has_retained(self) -> bool:
        """Whether retained messages are still to be sent."""
        return self.retained is not None

    @property
    def retained_after(self) -> bytes:
        """In a session that lasts: the topic of the last retained message that was sent; empty if no more are to be sent."""
        return self.retained.after if self.retained is not None else b""

    @property
    def _has_siblings(self) -> bool:
        """Whether other subscriptions of the session match some of the same topics, or may have done so until lately."""
        return self.overlaps or bool(self.subscriber.draining)

    def matches(self, topic: str) -> bool:
        """Return whether it gets the messages of a topic."""
        return topics.matches(self.filter, topic)

    # --- the shared path --------------------------------------------------------------------------------------------

    def deliver(self, batch: EncodedBatch, next_offset: int) -> bool:
        """Send a batch that begins at the cursor; return False, and send nothing, if it can't be sent as it is."""
        if batch.slots and (len(batch.slots) > self.session.inflight.room or len(batch.data) > BATCH_COPY_BYTES_MAX):
            return False
        if self._may_reject and self._rejects(batch):
            return False
        cursor, self.cursor = self.cursor, next_offset
        if not self._send(batch, cursor):
            self.cursor = cursor
            return False
        if batch.traced:
            self._trace(batch)
        return True

    def _trace(self, batch: EncodedBatch) -> None:
        """Make the spans of a batch that was sent."""
        traces = self.context.traces
        assert traces is not None, "only tracing finds messages to trace"
        traces.delivered(batch.traced, self.session.client_id, self.filter)

    def skip(self, topics: frozenset[bytes], next_offset: int) -> bool:
        """Go past a batch that begins at the cursor if older subscriptions of the client send all of it; return whether it has.

        Args:
            topics: of the messages in the batch.
            next_offset: of the message after the batch.
        """
        subscriber = self.subscriber
        if subscriber.draining or any(self in subscriber.matching(topic.decode())[:1] for topic in topics):
            return False
        self.cursor = next_offset
        if self.session.lasts:
            self.context.journal.mark(self.session)
        return True

    def fall_behind(self) -> None:
        """Leave the shared path, and read from the cursor when the outlet pumps."""
        self.live = False
        self.outlet.lagging[self] = None

    def _rejects(self, batch: EncodedBatch) -> bool:
        """Return whether a batch may have a message that this client must not get, or a packet too large for the client."""
        packet_bytes_max = self.outlet.packet_bytes_max
        if packet_bytes_max is not None and len(batch.data) > packet_bytes_max:
            return True
        return self.no_local and self.session.client_id in batch.publishers

    def _send(self, batch: EncodedBatch, first: int, *, is_recorded_first: bool = False) -> bool:
        """Send a batch; return False, and send nothing, if the disk has no room for what must be recorded first.

        Args:
            batch: the packets.
            first: offset of the first message, with the cursor after the last one; or `NOT_QUEUED` for messages of other
                origin.
            is_recorded_first: record deliveries before they are sent whatever their QoS is, as those at QoS 2 are.
        """
        session = self.session
        if not batch.slots:
            if session.lasts:
                self.context.journal.mark(session)
            if batch.data:
                self.outlet.send_publishes(batch.data, batch.messages)
            return True
        inflight = session.inflight
        before = inflight.last_packet_id
        data = batch.filled(inflight.assign_run(batch.slots))
        if not session.lasts:
            self.outlet.send_publishes(data, batch.messages)
            return True
        if not is_recorded_first and ((self.qos == 1 and not self.overlaps) or all(slot.qos == 1 for slot in batch.slots)):
            number = self.number if first != NOT_QUEUED else NOT_QUEUED
            session.unrecorded.add(number, first, self.cursor, before, inflight.last_packet_id, len(batch.slots))
            self.context.journal.mark(session)
            self.outlet.send_publishes(data, batch.messages)
            return True
        try:
            self.context.journal.save(session)
        except DiskFull:
            for _ in batch.slots:  # These packet ids were assigned last.
                inflight.slots.popitem()
            if self.outlet.aliases is not None:
                self.outlet.aliases.clear()  # The client has not been told of the aliases in this batch.
            return False
        self.outlet.send_when_durable(data, batch.messages)
        return True

    # --- from the cursor --------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send, in a few steps, what a lagging subscription can send now. Make it live when it has caught up.

        Each step ends in one of these states. In all but the first, the outlet pumps the subscription again.

        - caught up: nothing is left between cursor and end, and the subscription is live;
        - no room in the socket or in the window: pumped when the socket has drained, or with an acknowledgement;
        - no room on the disk for what is acknowledged: pumped when the disk has room;
        - an older subscription, which is draining, sends first: pumped after it. Retained messages go first, too, and stop for
          the reasons above;
        - undecided: pumped when the plugins have answered;
        - sent, or nothing of it may be received: the next step, and after `PUMP_STEPS` of them a later turn.
        """
        outlet = self.outlet
        if self.context.store.space.level and self._is_unrecorded():
            return
        needs_room = self.qos or self.overlaps
        ahead, ahead_from = b"", 0
        for step in range(PUMP_STEPS):
            room = min(self.session.inflight.room, PUMP_ENTRIES) if needs_room else PUMP_ENTRIES
            if not outlet.writable or room <= 0:
                return
            if self.retained is not None:
                if not self._send_retained(self.retained, room):
                    return
                continue
            draining = self.subscriber.draining
            if draining and any(one.blocks(self) for one in draining):
                return
            if self.cursor >= self.end:
                self._catch_up()
                return
            at = (self.cursor - ahead_from) * ENTRY_BYTES
            if at >= len(ahead):
                ahead_from, ahead = self.queue.read_from(self.cursor, room * PUMP_AHEAD if step else room)
                at = 0
            first = ahead_from + at // ENTRY_BYTES
            entries = self._up_to_cut(first, ahead[at : at + room * ENTRY_BYTES])
            is_repeated = first < self.maybe_sent
            if is_repeated:
                entries = entries[: (self.maybe_sent - first) * ENTRY_BYTES]
            if not entries:
                self._catch_up()
                return
            entries = _portion(entries)
            admitted, decided = self._admit(entries)
            if not decided:
                return
            cursor, self.cursor = self.cursor, first + decided
            if not admitted:
                if self.session.lasts:
                    self.context.journal.mark(self.session)
                continue
            batch = self._encode(admitted, is_retained=False, is_repeated=is_repeated)
            if not self._send(batch, first):
                self.cursor = cursor
                return
            if batch.traced:
                self._trace(batch)
        outlet.pump_soon()

    def _is_unrecorded(self) -> bool:
        """Return whether the disk has no room to record what the client has acknowledged, and that is a window by now.

        More must not go out: if the node were killed, the next one would not know how far it got (`SENT_WINDOWS`).
        """
        session = self.session
        return session.lasts and session.unrecorded.unsaid(len(session.inflight.slots)) > session.inflight.maximum

    def _up_to_cut(self, first: int, entries: bytes) -> bytes:
        """Return the first entries, up to the next cut, so that no step has entries on both sides of one.

        Args:
            first: offset of the first entry.
            entries: of the light queue.
        """
        for one in self.subscriber.draining:
            cut = one.cuts.get(self.number, 0)
            if first < cut:
                entries = entries[: (cut - first) * ENTRY_BYTES]
        return entries

    def _catch_up(self) -> None:
        """Be live from now on: there is nothing more to read."""
        self.cursor = self.queue.committed_offset  # Entries before that have expired.
        self.live = True
        self.outlet.lagging.pop(self, None)

    def _admit(self, entries: bytes) -> tuple[bytes, int]:
        """Return those entries that the client may receive, and the number of entries that are decided.

        If that is none, the plugins are asked, and the outlet pumps the subscription when they have answered.
        """
        permissions = self.outlet.permissions
        return (entries, len(entries) // ENTRY_BYTES) if permissions is None else permissions.admit(entries)

    def _encode(self, entries: bytes, *, is_retained: bool, is_repeated: bool) -> EncodedBatch:
        context, outlet = self.context, self.outlet
        if not self.is_own and not self._may_reject:
            return encode_batch(
                context.store,
                entries,
                self.options,
                retain=is_retained,
                dup=is_repeated,
                verify_before=EVERY_POSITION,
                traces=context.traces,
            )
        batch = encode_for_client(
            context.store,
            entries,
            self._options_alone if is_retained else self._options_with_siblings,
            packet_bytes_max=outlet.packet_bytes_max or PACKET_BYTES_UNLIMITED,
            aliases=outlet.aliases,
            retain=is_retained,
            dup=is_repeated,
            traces=context.traces,
        )
        context.counters.deliveries_too_large += len(batch.too_large)  # They count as sent [MQTT-3.1.2-25].
        return batch

    def _options_alone(self, topic: bytes, publisher: str) -> DeliveryOptions | None:
        return None if self.no_local and publisher == self.session.client_id else self.options

    def _options_with_siblings(self, topic: bytes, publisher: str) -> DeliveryOptions | None:
        """Return the combined options of all subscriptions that match, if this is the one that sends the message."""
        if not self._has_siblings:
            return self._options_alone(topic, publisher)
        name = topic.decode()
        matching = self.subscriber.matching(name)
        if not matching or matching[0] is not self or self._is_sent_by_predecessor(name):
            return None
        return combined_options(matching, publisher)

    def _is_sent_by_predecessor(self, topic: str) -> bool:
        """Return whether an older subscription that is draining sends the message of a topic that is at the cursor."""
        return any(one.number < self.number and one.sends_for(self, topic) for one in self.subscriber.draining)

    # --- retained messages ------------------------------------------------------------------------------------------

    def _send_retained(self, retained: RetainedReplay, room: int) -> bool:
        """Send the next retained messages, `room` at most; note when there are no more.

        How far they have got is recorded before they are sent, because no offset can tell it after a kill. Return False if the
        plugins must be asked first, or the disk has no room for what must be recorded.
        """
        entries = retained.read(room, PUMP_BYTES)
        admitted, decided = self._admit(entries) if entries else (b"", 0)
        if retained.is_exhausted and decided * ENTRY_BYTES == len(entries):
            self.retained = None
        if not entries:
            if self.session.lasts:
                self.context.journal.mark(self.session)
            return True
        after = retained.after
        if self.session.lasts and decided:
            last = entries[(decided - 1) * ENTRY_BYTES : decided * ENTRY_BYTES]
            retained.after = topics_of(self.context.store, last)[0] or after
        batch = self._encode(admitted, is_retained=True, is_repeated=False) if admitted else None
        if batch is not None and not self._send(batch, NOT_QUEUED, is_recorded_first=True):
            retained.after = after
            decided = 0
        if decided * ENTRY_BYTES < len(entries):
            retained.put_back(entries[decided * ENTRY_BYTES :])
            self.retained = retained
        return decided > 0


def combined_options(matching: tuple[Subscription, ...], publisher: str) -> DeliveryOptions | None:
    """Return the options of one message that several subscriptions of a session match; None if none of them wants it."""
    wanting = [one for one in matching if not (one.no_local and publisher == one.session.client_id)]
    if not wanting:
        return None
    return DeliveryOptions(
        max(one.qos for one in wanting),
        wanting[0].options.is_v5,
        any(one.options.keeps_retain for one in wanting),
        tuple(one.identifier for one in wanting if one.identifier),
    )


def _portion(entries: bytes) -> bytes:
    """Return the first entries, up to the one with which their messages reach `PUMP_BYTES`."""
    message_bytes = np.cumsum(entries_array(entries)["size"], dtype=np.int64)
    count = int(np.searchsorted(message_bytes, PUMP_BYTES)) + 1
    return entries[: count * ENTRY_BYTES]
