"""Subscribing: what a SUBSCRIBE adds to a session, what an UNSUBSCRIBE takes away, and what each is told.

Clauses in brackets are those of MQTT 5.0; where MQTT 3.1.1 has one of another number, it stands behind it as 3.1.1:[...].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.gateway.delivery.shared_subscriptions import SharedUnavailable
from penstock.gateway.delivery.subscription import SubscriptionForbidden
from penstock.gateway.protocol.encode import encode_suback, encode_unsuback, encode_unsuback_5
from penstock.gateway.protocol.packets import QOS
from penstock.gateway.protocol.reasons import SUBACK_FAILURE, ReasonCode
from penstock.gateway.protocol.subscribe import parse_subscribe, parse_unsubscribe
from penstock.store.errors import StoreError, TopicInvalid

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection


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
    guard = connection.permissions
    allowed = guard.may_subscribe([topic_filter for topic_filter, _ in asked]) if guard is not None else None
    granted = [
        _add(connection, topic_filter, options, wish.identifier)
        if allowed is None or allowed[topic_filter]
        else _refusal(connection, topic_filter, SubscriptionForbidden("the plugins don't allow it"))
        for topic_filter, options in asked
    ]
    more = ReasonCode.QUOTA_EXCEEDED if connection.is_v5 else SUBACK_FAILURE
    granted += [more] * (len(wish.filters) - len(granted))
    return encode_suback(wish.packet_id, granted, connection.is_v5)


def _add(connection: Connection, topic_filter: str, options: int, identifier: int) -> int:
    """Add a subscription; return what the SUBACK says of it."""
    try:
        connection.subscriptions.subscribe(topic_filter, options, identifier)
    except StoreError as error:
        return _refusal(connection, topic_filter, error)
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


def unsubscribe(connection: Connection, body: bytes) -> bytes:
    """End the subscriptions that an UNSUBSCRIBE names; return the UNSUBACK.

    Raises:
        ProtocolError: the packet is malformed.
    """
    wish = parse_unsubscribe(body, is_v5=connection.is_v5)
    end = connection.subscriptions.unsubscribe
    codes = [ReasonCode.SUCCESS if end(each) else ReasonCode.NO_SUBSCRIPTION_EXISTED for each in wish.filters]
    if connection.is_v5:
        return encode_unsuback_5(wish.packet_id, codes)
    return encode_unsuback(wish.packet_id)  # also where there was none 3.1.1:[MQTT-3.10.4-5]
