"""The subscriptions of one connected client: how they begin, are restored, are replaced and end."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

import structlog

from penstock.gateway.counters import GatewayCounters
from penstock.gateway.delivery.backlog import BacklogLimit
from penstock.gateway.delivery.draining import DrainingSubscription, drain
from penstock.gateway.delivery.encoding import DeliveryOptions, slot_topic
from penstock.gateway.delivery.fanout import Fanouts
from penstock.gateway.delivery.mqtttraces import MqttTraces
from penstock.gateway.delivery.overlaps import mark_overlaps
from penstock.gateway.delivery.retained_messages import RetainedMessages
from penstock.gateway.delivery.retained_replay import RetainedReplay
from penstock.gateway.delivery.share_filter import topics_of
from penstock.gateway.delivery.share_group import ShareGroup
from penstock.gateway.delivery.shared_subscription import SharedSubscription
from penstock.gateway.delivery.shared_subscriptions import SharedSubscriptions
from penstock.gateway.delivery.subscription import Subscription, combined_options
from penstock.gateway.delivery.system import SystemTopics
from penstock.gateway.protocol.packets import NO_LOCAL, RETAIN_HANDLING
from penstock.gateway.protocol.topics import SHARE
from penstock.gateway.sessions.inflight import Slot
from penstock.gateway.sessions.journal import SessionJournal
from penstock.gateway.sessions.session import Session
from penstock.gateway.sessions.stored_subscription import StoredSubscription
from penstock.store.errors import DiskFull, LimitExceeded, QueueUnknown, StoreError
from penstock.store.space.accounts import Resource
from penstock.store.space.causer import Causer
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.gateway.connection.outbox import Outbox


@dataclass(frozen=True, slots=True)
class DeliveryContext:
    """The parts of the node with which all subscriptions deliver messages."""

    store: Store
    """The store, which has the messages."""
    fanouts: Fanouts
    """The fanouts of all light queues that have live subscriptions."""
    journal: SessionJournal
    """Records how far the subscriptions of lasting sessions have got."""
    counters: GatewayCounters
    """The counters of the gateway."""
    traces: MqttTraces | None = None
    """Makes spans of deliveries; None without tracing."""
    sends_once: bool = False
    """Whether clients of MQTT 3.1.1, too, get one copy of a message that several subscriptions match (`mqtt.overlapping`)."""


logger = structlog.get_logger("gateway")

MATCHES_MAX: Final = 4096
"""Topics of which a client's matching subscriptions are remembered, if some of its subscriptions overlap."""


@dataclass(frozen=True, slots=True)
class Deliveries:
    """The parts of a node that deliver messages to clients."""

    context: DeliveryContext
    """What all subscriptions use."""
    retained: RetainedMessages
    """The retained messages, for new subscriptions."""
    shared: SharedSubscriptions
    """The shared subscriptions."""
    system: SystemTopics
    """The topics below `$SYS/`."""
    backlog: BacklogLimit
    """The limit on what waits for one client (`mqtt.session_queued_max`)."""
    subscriptions_max: int
    """Subscriptions that one session may have (`mqtt.subscriptions_max`)."""


class ClientSubscriptions:
    """The subscriptions of one connected client.

    Parameters:
        session: of the client.
        outlet: where packets go.
        deliveries: the parts of the node that deliver messages.
    """

    __slots__ = ("_deliveries", "_matches", "by_filter", "context", "draining", "is_curtailed", "outlet", "session")

    def __init__(self, session: Session, outlet: Outbox, deliveries: Deliveries) -> None:
        self.session = session
        self.outlet = outlet
        self.context = deliveries.context
        self._deliveries = deliveries
        self.by_filter: dict[str, Subscription] = {}
        """The subscriptions by filter, the oldest first."""
        self.draining: list[DrainingSubscription] = []
        """Subscriptions that have ended and still send for those that remain."""
        self._matches: dict[str, tuple[Subscription, ...]] = {}
        self.is_curtailed = False
        """Whether subscriptions were withdrawn."""
        session.subscriptions = self

    def __iter__(self) -> Iterator[Subscription]:
        """Yield all subscriptions, with those that are draining."""
        return chain(self.by_filter.values(), self.draining)

    def __len__(self) -> int:
        """Return the number of subscriptions, with those that are draining."""
        return len(self.by_filter) + len(self.draining)

    def matching(self, topic: str) -> tuple[Subscription, ...]:
        """Return the subscriptions that match a topic, the oldest first. Shared ones are not among them."""
        found = self._matches.get(topic)
        if found is None:
            if len(self._matches) >= MATCHES_MAX:
                self._matches.clear()
            found = tuple(sorted((one for one in self.by_filter.values() if one.matches(topic)), key=lambda one: one.number))
            self._matches[topic] = found
        return found

    def redelivery_options(self, slot: Slot) -> DeliveryOptions:
        """Return the options with which a delivery of an earlier connection is sent again."""
        found: DeliveryOptions | None
        is_v5 = self.outlet.is_v5
        if slot.delivery:
            shared_filter = self._deliveries.shared.filter_of(slot.delivery)
            subscription = self.by_filter.get(shared_filter) if shared_filter is not None else None
            found = subscription.options if subscription is not None else None
        else:
            matching = self.matching(slot_topic(self.context.store, slot).decode()) if is_v5 else ()
            found = combined_options(matching, "")
        return found or DeliveryOptions(2, is_v5)

    def lasting(self, slot: Slot) -> Container[int]:
        """Return the positions of messages that don't expire, as far as a delivery of an earlier connection is concerned."""
        return self._deliveries.shared.redriven_with(slot.delivery) if slot.delivery else ()

    # --- SUBSCRIBE --------------------------------------------------------------------------------------------------

    def subscribe(self, topic_filter: str, granted: int, identifier: int) -> None:
        """Add a subscription, in place of one to the same filter [MQTT-3.8.4-3].

        What was appended so far must be committed: it is sent as retained messages or not at all.

        Args:
            topic_filter: as the client sent it, with `$share/` and the share name if it is shared.
            granted: the subscription options granted (MQTT 5.0, 3.8.3.1).
            identifier: the subscription identifier, or 0.

        Raises:
            LimitExceeded: the session has `mqtt.subscriptions_max` subscriptions, or the client may have no more of something.
            TopicInvalid: no queue can have this filter.
            DiskFull: the disk has no room for the record of the subscription.
            SharedUnavailable: shared subscriptions are switched off.
        """
        old = self.by_filter.get(topic_filter)
        if old is None and len(self) >= self._deliveries.subscriptions_max:
            raise LimitExceeded(
                f"The session has {len(self)} subscriptions, which is the limit. Raise mqtt.subscriptions_max to allow more."
            )
        session, ledger = self.session, self.context.store.ledger
        causer = session.causer
        if old is None:
            causer = ledger.admit(causer, Resource.SUBSCRIPTIONS, topic=topics_of(topic_filter))
        if topic_filter.startswith(SHARE):  # Shared subscriptions get no retained messages (4.8.2).
            self._subscribe_shared(topic_filter, granted, identifier, old, causer)
        else:
            self._subscribe_alone(topic_filter, granted, identifier, old, causer)
        if old is None and not session.lasts:
            ledger.hold(causer, Resource.SUBSCRIPTIONS)

    def _subscribe_alone(
        self, topic_filter: str, granted: int, identifier: int, old: Subscription | None, causer: Causer
    ) -> None:
        session, context = self.session, self.context
        handling = (granted & RETAIN_HANDLING) >> 4
        wants_retained = handling == 0 or (handling == 1 and old is None)  # [MQTT-3.3.1-9] to [MQTT-3.3.1-11]
        before = context.store.log.end
        # A replaced subscription keeps its queue and its place there: another queue may serve this filter by now.
        if session.lasts:
            retained_before = before if wants_retained else None
            queue = context.journal.record_subscription(
                session, topic_filter, granted, identifier, retained_before, causer=causer
            )
        else:
            queue = context.store.queues.attach(topic_filter, session.owner, causer) if old is None else old.queue
        subscription = Subscription(self, topic_filter, queue, granted, identifier)
        if session.lasts and session.stored is not None:
            subscription.stored = session.stored.subscriptions[topic_filter]
            subscription.cursor = subscription.stored.cursor
        if wants_retained:
            subscription.retained = RetainedReplay(self._deliveries.retained.matching(topic_filter, before=before))
        if old is not None:
            old.stop()
            self._deliveries.system.remove(old)
            subscription.cursor = old.cursor  # So no message is missed while the subscription is replaced.
            subscription.number = old.number
            subscription.maybe_sent = old.maybe_sent
            subscription.overlaps = old.overlaps
        else:
            session.subscribed += 1
            context.counters.subscriptions += 1
        self.by_filter[topic_filter] = subscription
        session.no_local += bool(granted & NO_LOCAL) - (old is not None and old.no_local)
        self._find_overlaps(subscription)
        subscription.start()
        self._deliveries.system.add(subscription, sends_all=subscription.retained is not None)

    def _subscribe_shared(
        self, topic_filter: str, granted: int, identifier: int, old: Subscription | None, causer: Causer
    ) -> None:
        session, shared = self.session, self._deliveries.shared
        shared.check_enabled()
        group = shared.group_for(topic_filter, causer)
        try:
            if session.lasts:
                self.context.journal.record_subscription(
                    session, topic_filter, granted, identifier, None, causer=causer, queue=group.group.retry
                )
        except StoreError:
            shared.forget_unused(group)
            raise
        subscription = SharedSubscription(self, topic_filter, group, granted, identifier)
        if session.stored is not None and session.lasts:
            subscription.stored = session.stored.subscriptions[topic_filter]
            subscription.cursor = subscription.stored.cursor
        if old is not None:
            old.stop()
            subscription.number = old.number
            self.by_filter[topic_filter] = subscription
            group.join(subscription)
            old.release()
        else:
            session.subscribed += 1
            self.context.counters.subscriptions += 1
            self._add_shared(subscription, group)
        subscription.start()

    def _add_shared(self, subscription: SharedSubscription, group: ShareGroup) -> None:
        self.by_filter[subscription.filter] = subscription
        group.join(subscription)
        self.context.counters.subscriptions_shared += 1

    # --- UNSUBSCRIBE ------------------------------------------------------------------------------------------------

    def unsubscribe(self, topic_filter: str, *, is_withdrawn: bool = False) -> bool:
        """End a subscription, except for what others rely on it for; return whether there was one.

        `is_withdrawn` says whether the server ends it. Raises DiskFull.
        """
        subscription = self.by_filter.get(topic_filter)
        if subscription is None:
            return False
        session = self.session
        if subscription.overlaps:
            self.context.store.commit()  # What this turn has appended came before the UNSUBSCRIBE.
        draining = drain(subscription, tuple(self))
        if subscription.stored is not None:
            self.context.journal.record_unsubscription(session, topic_filter, draining, is_withdrawn=is_withdrawn)
        del self.by_filter[topic_filter]
        subscription.stop()
        session.no_local -= subscription.no_local
        if draining is not None:
            self.draining.append(draining)
        self._forget(subscription)
        self._find_overlaps(subscription)
        if draining is not None:
            draining.start()
            self._update_all()
            for one in self.by_filter.values():
                if one.live and draining.blocks(one):
                    one.fall_behind()
        return True

    def withdraw(self, filters: Iterable[str]) -> None:
        """End subscriptions that the client may no longer have. What was under way for them alone does not go out again.

        If the disk has no room for the record, a stored subscription gets nothing, and stays stored until the client returns.
        """
        for topic_filter in filters:
            logger.warning("subscription.withdrawn", client=self.session.client_id, filter=topic_filter[:80])
            self.context.counters.subscriptions_withdrawn += 1
            try:
                self.unsubscribe(topic_filter, is_withdrawn=True)
            except DiskFull:
                subscription = self.by_filter.pop(topic_filter)
                subscription.stop()
                self._forget(subscription)
                self._find_overlaps(subscription)
            self.is_curtailed = True

    def is_wanted(self, slot: Slot) -> bool:
        """Return whether a delivery of an earlier connection is still for a subscription that the client may have."""
        if not self.is_curtailed:
            return True
        if slot.delivery:
            return self._deliveries.shared.filter_of(slot.delivery) in self.by_filter
        return bool(self.matching(slot_topic(self.context.store, slot).decode()))

    def release_drained(self) -> None:
        """Forget the draining subscriptions that are drained."""
        for one in sorted(self.draining, key=lambda one: one.number, reverse=True):  # Older ones may wait for younger ones.
            if not one.is_drained(tuple(self)):
                continue
            try:
                if one.stored is not None:
                    self.context.journal.record_drained(self.session, one.number)
            except DiskFull:  # The next call tries again.
                return
            self.draining.remove(one)
            one.stop()
            one.release()
        if not self.draining:
            self._update_all()

    def _forget(self, subscription: Subscription) -> None:
        """Give up what a subscription that has stopped holds on the node, and in the store if its session doesn't last."""
        counters = self.context.counters
        counters.subscriptions -= 1
        counters.subscriptions_shared -= subscription.is_shared
        if subscription.stored is None:
            ledger = self.context.store.ledger
            causer = ledger.with_tenant(self.session.causer, topics_of(subscription.filter))
            ledger.let_go(causer, Resource.SUBSCRIPTIONS)
        self._deliveries.system.remove(subscription)
        subscription.release()

    def _find_overlaps(self, changed: Subscription) -> None:
        """Find which subscriptions match the same topics, after one was added or removed."""
        self._matches.clear()
        for subscription in mark_overlaps(self.by_filter, changed):
            if subscription is not changed:
                subscription.update_is_own()

    def _update_all(self) -> None:
        for subscription in self.by_filter.values():
            subscription.update_is_own()

    # --- the beginning and the end of the connection ----------------------------------------------------------------

    def restore(self) -> None:
        """Restore the subscriptions of a session that existed before, and start them."""
        stored = self.session.stored
        assert stored is not None, self.session.client_id
        for one in list(stored.subscriptions.values()):
            if one.filter.startswith(SHARE):
                self._restore_shared(one)
            else:
                self._restore_alone(one)
        for one in stored.draining.values():
            with suppress(QueueUnknown):  # It was logged above, for the subscriptions that it was to send for.
                queue = self.context.store.queues.get(one.queue_id)
                draining = DrainingSubscription(self, one.filter, queue, one.number, one.cursor, one.stop, one.cuts)
                draining.stored = one
                draining.maybe_sent = one.maybe_sent
                self.draining.append(draining)
        self.context.counters.subscriptions += len(self.by_filter)
        for subscription in self.by_filter.values():
            subscription.start()
            self._deliveries.system.add(subscription, sends_all=False)
        for draining in self.draining:
            draining.start()

    def _restore_alone(self, one: StoredSubscription) -> None:
        try:
            queue = self.context.store.queues.get(one.queue_id)
        except QueueUnknown as error:  # A log that was repaired may lack the record that declared the queue.
            logger.error("subscription.lost", client=self.session.client_id, filter=one.filter, why=str(error))
            return
        subscription = Subscription(self, one.filter, queue, one.options, one.identifier)
        subscription.number, subscription.cursor, subscription.stored = one.number, one.cursor, one
        subscription.maybe_sent = one.maybe_sent
        if one.retained_before is not None:
            after = one.retained_after
            found = self._deliveries.retained.matching(one.filter, before=one.retained_before, after=after)
            subscription.retained = RetainedReplay(found, after)
        self.by_filter[one.filter] = subscription
        self.session.no_local += subscription.no_local
        mark_overlaps(self.by_filter, subscription)

    def _restore_shared(self, one: StoredSubscription) -> None:
        try:
            group = self._deliveries.shared.group_for(one.filter, self.session.causer)
        except StoreError as error:
            logger.error("subscription.lost", client=self.session.client_id, filter=one.filter[:80], why=str(error))
            return
        subscription = SharedSubscription(self, one.filter, group, one.options, one.identifier)
        subscription.number, subscription.cursor, subscription.stored = one.number, one.cursor, one
        self._add_shared(subscription, group)

    def stop(self, *, is_lost: bool) -> None:
        """Send nothing more, because the connection has ended. `close` comes after the session's last record.

        `is_lost` says whether the client has gone without a word.
        """
        for subscription in self.by_filter.values():
            subscription.stop()
            self._forget(subscription)
        self._deliveries.shared.leave(self.session, is_lost=is_lost)

    def close(self) -> None:
        """Forget all subscriptions. Nothing refers to the outlet afterwards, so its memory is freed at once."""
        self.by_filter.clear()
        self._matches.clear()
        while self.draining:
            draining = self.draining.pop()
            draining.stop()
            draining.release()
        self.session.subscriptions = ()
        del self.outlet

    def limit_backlog(self) -> None:
        """Apply `mqtt.session_queued_max`."""
        lagging: list[Subscription] = [one for one in self.by_filter.values() if not one.live and not one.is_shared]
        lagging += [one for one in self.draining if one.cursor < one.end]
        self._deliveries.backlog.apply(self.session, lagging)
