"""SUBSCRIBE and UNSUBSCRIBE: what a client asks for, and what it is told.

Clauses in brackets are those of MQTT 5.0. Where MQTT 3.1.1 has a clause of another number, it follows as 3.1.1:[...].
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeAlias

from penstock.gateway.auth.permissions import Permissions
from penstock.gateway.counters import GatewayCounters
from penstock.gateway.delivery.client_subscriptions import ClientSubscriptions
from penstock.gateway.delivery.shared_subscriptions import SharedUnavailable
from penstock.gateway.delivery.subscription import SubscriptionForbidden
from penstock.gateway.logbook import Logbook
from penstock.gateway.options import GatewayOptions
from penstock.gateway.protocol.encode import encode_suback, encode_unsuback, encode_unsuback_5
from penstock.gateway.protocol.packets import QOS
from penstock.gateway.protocol.reasons import SUBACK_FAILURE, ReasonCode
from penstock.gateway.protocol.subscribe import parse_subscribe, parse_unsubscribe
from penstock.gateway.protocol.topics import check_asked
from penstock.store.errors import StoreError, TopicInvalid
from penstock.store.store import Store

Answering: TypeAlias = Generator[None, None, bytes]
"""A SUBSCRIBE or UNSUBSCRIBE that is handled in steps, because it may have thousands of filters. It returns the answer."""


class Subscribing:
    """Answers the SUBSCRIBEs and UNSUBSCRIBEs of all connections.

    Parameters:
        store: what was published before a SUBSCRIBE is committed before it.
        counters: count filters that are refused.
        logbook: names them.
        options: see `GatewayOptions`.
    """

    def __init__(self, store: Store, counters: GatewayCounters, logbook: Logbook, options: GatewayOptions) -> None:
        self._store = store
        self._counters = counters
        self._logbook = logbook
        self._options = options

    def subscribe(self, subscriptions: ClientSubscriptions, permissions: Permissions | None, body: bytes) -> Answering:
        """Add the subscriptions that a SUBSCRIBE asks for, one in each step; return the SUBACK.

        Args:
            subscriptions: of the client.
            permissions: what the client may do with topics, if rules or plugins decide that.
            body: of the SUBSCRIBE.

        Raises:
            ProtocolError: the packet is malformed, or asks for what no client may have.
            AuthorizationPending: the plugins have to be asked before anything is added.
        """
        is_v5 = subscriptions.outlet.is_v5
        request = parse_subscribe(
            body,
            is_v5=is_v5,
            filters_max=self._options.packet_filters_max,
            user_properties_max=self._options.user_properties_max,
        )
        # What this turn has stored came before the subscription: once it is committed, it is sent as retained or not at all.
        self._store.commit()
        asked = request.filters[: self._options.subscriptions_max]
        invalid = _invalid(topic_filter for topic_filter, _ in asked)
        allowed = None
        if permissions is not None:
            allowed = permissions.may_subscribe([topic_filter for topic_filter, _ in asked if topic_filter not in invalid])
        granted = []
        for topic_filter, options in asked:
            try:
                if topic_filter in invalid:
                    raise invalid[topic_filter]
                if allowed is not None and not allowed[topic_filter]:
                    raise SubscriptionForbidden("the rules (access.file) or the plugins don't allow the subscription")
                subscriptions.subscribe(topic_filter, options, request.identifier)
                granted.append(options & QOS)
            except StoreError as error:
                self._counters.subscriptions_refused += 1
                client_id = subscriptions.session.client_id
                self._logbook.note("subscription.refused", client=client_id, filter=topic_filter[:80], why=str(error))
                granted.append(self._reason(error) if is_v5 else SUBACK_FAILURE)
            yield
        beyond = ReasonCode.QUOTA_EXCEEDED if is_v5 else SUBACK_FAILURE
        granted += [beyond] * (len(request.filters) - len(granted))
        return encode_suback(request.packet_id, granted, is_v5)

    @staticmethod
    def _reason(error: StoreError) -> int:
        """Return the reason code of MQTT 5.0 for a filter that was refused."""
        if isinstance(error, SubscriptionForbidden):
            return ReasonCode.NOT_AUTHORIZED
        if isinstance(error, SharedUnavailable):
            return ReasonCode.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED
        return ReasonCode.TOPIC_FILTER_INVALID if isinstance(error, TopicInvalid) else ReasonCode.QUOTA_EXCEEDED

    def unsubscribe(self, subscriptions: ClientSubscriptions, body: bytes) -> Answering:
        """End the subscriptions that an UNSUBSCRIBE names, one in each step; return the UNSUBACK.

        Raises:
            ProtocolError: the packet is malformed.
            DiskFull: the disk has no room for the record of it.
        """
        is_v5 = subscriptions.outlet.is_v5
        request = parse_unsubscribe(
            body,
            is_v5=is_v5,
            filters_max=self._options.packet_filters_max,
            user_properties_max=self._options.user_properties_max,
        )
        invalid = _invalid(request.filters)
        codes = []
        for topic_filter in request.filters:
            if topic_filter in invalid:
                codes.append(ReasonCode.TOPIC_FILTER_INVALID)
            else:
                had = subscriptions.unsubscribe(topic_filter)
                codes.append(ReasonCode.SUCCESS if had else ReasonCode.NO_SUBSCRIPTION_EXISTED)
            yield
        if not is_v5:
            return encode_unsuback(request.packet_id)  # also if there was no subscription 3.1.1:[MQTT-3.10.4-5]
        return encode_unsuback_5(request.packet_id, codes)


def _invalid(filters: Iterable[str]) -> dict[str, TopicInvalid]:
    """Return the filters that nobody can subscribe to, with the reasons."""
    found = {}
    for topic_filter in filters:
        try:
            check_asked(topic_filter)
        except TopicInvalid as error:
            found[topic_filter] = error.with_traceback(None)
    return found
