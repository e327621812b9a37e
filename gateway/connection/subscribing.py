"""Subscribing: what a SUBSCRIBE adds to a session, what an UNSUBSCRIBE takes away, and what each is told.

Clauses in brackets are those of MQTT 5.0; where MQTT 3.1.1 has one of another number, it stands behind it as 3.1.1:[...].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.gateway.delivery.leaving import leave
from penstock.gateway.delivery.shared import SharedUnavailable
from penstock.gateway.delivery.subscription import Subscription, SubscriptionForbidden, find_overlaps
from penstock.gateway.protocol import codec
from penstock.gateway.protocol.packets import NO_LOCAL, QOS, RETAIN_HANDLING
from penstock.gateway.protocol.parsers import SHARE, parse_subscribe, parse_unsubscribe
from penstock.gateway.protocol.reasons import SUBACK_FAILURE, ReasonCode
from penstock.store.errors import DiskFull, LimitExceeded, StoreError, TopicInvalid

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection
    from penstock.gateway.sessions.session import Session


def subscribe(connection: Connection, body: bytes) -> bytes:
    """Add the subscriptions that a SUBSCRIBE wants; return the SUBACK.

    Raises:
        ProtocolError: the packet is malformed, or wants what no client may.
        Undecided: the plugins have to be asked before anything is added.
    """
    wish = parse_subscribe(body, is_v5=connection.is_v5)
    # What this turn has stored is no part of the subscription: committed now, it is read as retained or not at all.
    connection.store.commit()
    # A packet can hold a quarter of a million filters, all the same one. More than a session may have are not looked at.
    asked_max = connection.gateway.options.subscriptions_max
    asked = wish.filters[:asked_max]
    guard = connection.guard
    allowed = guard.may_subscribe([topic_filter for topic_filter, _ in asked]) if guard is not None else None
    granted = [
        _add(connection, topic_filter, options, wish.identifier)
        if allowed is None or allowed[topic_filter]
        else _refusal(connection, topic_filter, SubscriptionForbidden("the plugins don't allow it"))
        for topic_filter, options in asked
    ]
    more = ReasonCode.QUOTA_EXCEEDED if connection.is_v5 else SUBACK_FAILURE
    granted += [more] * (len(wish.filters) - len(granted))
    return codec.encode_suback(wish.packet_id, granted, connection.is_v5)


def _add(connection: Connection, topic_filter: str, options: int, identifier: int) -> int:
    """Add a subscription, in place of one to the same filter [MQTT-3.8.4-3]; return what the SUBACK says of it."""
    gateway, session = connection.gateway, connection.session
    subscriptions = session.subscriptions
    old = subscriptions.get(topic_filter)
    handling = (options & RETAIN_HANDLING) >> 4
    wants_retained = handling == 0 or (handling == 1 and old is None)  # [MQTT-3.3.1-9] to [MQTT-3.3.1-11]
    before = connection.store.log.end
    try:
        if old is None:
            _check_subscriptions(connection)
        if topic_filter.startswith(SHARE):  # no retained messages are sent (4.8.2)
            gateway.shared.subscribe(session, topic_filter, options, identifier).begin(connection)
            return options & QOS
        # A replaced one keeps its queue, and its place there: by now another queue may serve this filter.
        if session.lasts:
            queue = gateway.lifetimes.subscribe(session, topic_filter, options, identifier, before if wants_retained else None)
        else:
            queue = connection.store.queues.attach(topic_filter, session.owner) if old is None else old.queue
    except StoreError as error:
        return _refusal(connection, topic_filter, error)
    subscription = Subscription(session, topic_filter, queue, options, identifier)
    if session.lasts and session.stored is not None:
        subscription.stored = session.stored.subscriptions[topic_filter]
        subscription.cursor = subscription.stored.cursor
    if wants_retained:
        subscription.retained = gateway.retained.matching(topic_filter, before=before)
    if old is not None:
        old.rest()
        gateway.sys.unsubscribed(old)
        subscription.cursor = old.cursor  # nothing is missed while it is replaced
        subscription.number = old.number
        subscription.overlaps = old.overlaps
    else:
        session.subscribed += 1
        gateway.counters.subscriptions += 1
    subscriptions[topic_filter] = subscription
    session.no_local += bool(options & NO_LOCAL) - (old is not None and old.no_local)
    _compare(session, subscription)
    subscription.begin(connection)
    gateway.sys.subscribed(subscription, says_all=subscription.retained is not None)
    return options & QOS


def _refusal(connection: Connection, topic_filter: str, error: StoreError) -> int:
    """Count and log a filter that is refused; return what the SUBACK says of it."""
    connection.gateway.counters.subscriptions_refused += 1
    connection.gateway.logbook.note(
        "subscription.refused", client=connection.session.client_id, filter=topic_filter[:80], why=str(error)
    )
    if not connection.is_v5:
        return SUBACK_FAILURE
    if isinstance(error, SubscriptionForbidden):
        is_told = connection.gateway.options.access.denied_subscription == "not-authorized"
        return ReasonCode.NOT_AUTHORIZED if is_told else SUBACK_FAILURE
    if isinstance(error, SharedUnavailable):
        return ReasonCode.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED
    return ReasonCode.TOPIC_FILTER_INVALID if isinstance(error, TopicInvalid) else ReasonCode.QUOTA_EXCEEDED


def _compare(session: Session, changed: Subscription) -> None:
    """See which subscriptions match the same topics, now that one was added or removed."""
    session.subscriptions_changed()
    for subscription in find_overlaps(session, changed):
        if subscription is not changed:
            subscription.settle()


def _check_subscriptions(connection: Connection) -> None:
    """Raise LimitExceeded where the session may have no more subscriptions."""
    count = len(connection.session.subscriptions) + len(connection.session.leaving)
    if count >= connection.gateway.options.subscriptions_max:
        raise LimitExceeded(f"{count} subscriptions in one session: see mqtt.subscriptions_max")


def unsubscribe(connection: Connection, body: bytes) -> bytes:
    """End the subscriptions that an UNSUBSCRIBE names; return the UNSUBACK.

    Raises:
        ProtocolError: the packet is malformed.
    """
    wish = parse_unsubscribe(body, is_v5=connection.is_v5)
    codes: list[ReasonCode] = []
    for topic_filter in wish.filters:
        subscription = connection.session.subscriptions.get(topic_filter)
        codes.append(ReasonCode.NO_SUBSCRIPTION_EXISTED if subscription is None else ReasonCode.SUCCESS)
        if subscription is not None:
            _remove(connection, subscription)
    if connection.is_v5:
        return codec.encode_unsuback_5(wish.packet_id, codes)
    return codec.encode_unsuback(wish.packet_id)  # also where there was none 3.1.1:[MQTT-3.10.4-5]


def _remove(connection: Connection, subscription: Subscription) -> None:
    """End a subscription, but for what others rely on it for."""
    session = connection.session
    if subscription.overlaps:
        connection.store.commit()  # what this turn has stored came before
    leaving = leave(subscription)
    if subscription.stored is not None:
        connection.gateway.lifetimes.unsubscribe(session, subscription.filter, leaving)
    del session.subscriptions[subscription.filter]
    subscription.rest()
    session.no_local -= subscription.no_local
    if leaving is not None:
        session.leaving.append(leaving)
    connection.gateway.drop(subscription)
    _compare(session, subscription)
    if leaving is not None:
        leaving.begin(connection)
        _settle_all(session)
        for one in session.subscriptions.values():
            if one.live and leaving.holds_back(one):
                one.lag()


def let_go(connection: Connection) -> None:
    """Forget the subscriptions that have left."""
    session = connection.session
    for one in sorted(session.leaving, key=lambda one: one.number, reverse=True):  # older ones may wait for younger ones
        if not one.has_left:
            continue
        try:
            if one.stored is not None:
                connection.gateway.lifetimes.let_go(session, one)
        except DiskFull:  # the next time
            return
        session.leaving.remove(one)
        one.rest()
        one.release()
    if not session.leaving:
        _settle_all(session)


def _settle_all(session: Session) -> None:
    for subscription in session.subscriptions.values():
        subscription.settle()
