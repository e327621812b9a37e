"""Subscriptions over the admin API: those of a client, and the clients that have a filter."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated

import msgspec

from penstock.gateway.connection.clients import ClientRegistry
from penstock.gateway.connection.connection import Connection
from penstock.gateway.delivery.subscription import Subscription
from penstock.gateway.protocol.packets import NO_LOCAL, QOS, RETAIN_AS_PUBLISHED
from penstock.gateway.protocol.topics import SHARE
from penstock.gateway.sessions.stored_session import StoredSession
from penstock.gateway.sessions.stored_sessions import StoredSessions
from penstock.gateway.sessions.stored_subscription import StoredSubscription
from penstock.node.api.operation import ApiCall, ApiError, ApiRole, Operation, PageQuery, not_found
from penstock.node.api.pages import in_slices, page_by_name, page_in_order
from penstock.store.errors import QueueUnknown, TopicInvalid
from penstock.store.queues.queues import Queues
from penstock.store.topics import check_filter


class SubscriptionShown(msgspec.Struct, kw_only=True):
    """A subscription."""

    filter: Annotated[str, msgspec.Meta(description="As the client sent it, with `$share/` and a name if it is shared.")]
    qos: int
    no_local: bool
    retain_as_published: bool
    identifier: Annotated[int, msgspec.Meta(description="Subscription identifier; 0 for none.")]
    queued: Annotated[
        int,
        msgspec.Meta(description="Messages that wait for the client. Those of shared filters wait for a group."),
    ]


class SubscriptionList(msgspec.Struct):
    """A page of the subscriptions of a client, in the order of the filters."""

    items: list[SubscriptionShown]
    next: str | None


class SubscriberQuery(PageQuery, forbid_unknown_fields=True, kw_only=True):
    """The parameters of a listing of subscribers."""

    filter: Annotated[
        str, msgspec.Meta(description="The filter, exactly as clients have subscribed to it, with `$share/` if it is shared.")
    ]


class Subscriber(msgspec.Struct, kw_only=True):
    """A client that has a filter."""

    client_id: str
    is_connected: bool
    subscription: SubscriptionShown


class SubscriberList(msgspec.Struct):
    """A page of the clients that have a filter, in the order of their ids. It may be short although there is a cursor."""

    items: list[Subscriber]
    next: str | None


class SubscriptionOperations:
    """Serves subscriptions.

    Parameters:
        clients: the connected clients.
        sessions: the stored sessions.
        queues: the light queues of the store.
    """

    def __init__(self, clients: ClientRegistry, sessions: StoredSessions, queues: Queues) -> None:
        self._clients = clients
        self._sessions = sessions
        self._queues = queues

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        yield Operation(
            "listClientSubscriptions",
            "GET",
            "/clients/{client_id}/subscriptions",
            ApiRole.VIEWER,
            "List the subscriptions of a client, which may be away if its session is stored.",
            self.of_client,
            SubscriptionList,
            query=PageQuery,
        )
        yield Operation(
            "listSubscribers",
            "GET",
            "/subscriptions",
            ApiRole.VIEWER,
            "List the clients that have subscribed to a filter, whether they are connected or away.",
            self.subscribers,
            SubscriberList,
            query=SubscriberQuery,
        )

    async def of_client(self, call: ApiCall) -> SubscriptionList:
        """List the subscriptions of a client."""
        client_id = call.path["client_id"]
        connection = self._clients.get(client_id)
        if connection is not None and connection.connected:
            page, cursor = await page_by_name(connection.subscriptions.by_filter, call.query)
            return SubscriptionList(await in_slices(live_subscription(one) for _, one in page), cursor)
        stored = self._sessions.get(client_id)
        if stored is None:
            raise not_found("connected client or stored session", client_id)
        subscriptions, cursor = await page_by_name(stored.subscriptions, call.query)
        return SubscriptionList(await in_slices(self._absent(one) for _, one in subscriptions), cursor)

    async def subscribers(self, call: ApiCall) -> SubscriberList:
        """List the clients that have a filter."""
        query: SubscriberQuery = call.query
        check_subscribed(query.filter)
        has_stored = self._has_stored(query.filter)

        def read(start: str, count: int) -> list[tuple[str, None]]:
            ids = [self._clients.at_or_after(start, count)]
            if has_stored:
                ids.append([client_id for client_id, _ in self._sessions.at_or_after(start, count)])
            lasts = [each[-1] for each in ids if each]
            return [(each, None) for each in sorted({*ids[0], *ids[-1]}) if each <= min(lasts)]

        def row_of(client_id: str, _: None) -> Subscriber | None:
            return self._subscriber(client_id, query.filter)

        return SubscriberList(*await page_in_order(query, read, row_of))

    def _subscriber(self, client_id: str, topic_filter: str) -> Subscriber | None:
        connection = self._clients.get(client_id)
        if connection is not None and connection.connected:
            live = connection.subscriptions.by_filter.get(topic_filter)
            shown = live_subscription(live) if live is not None else None
        else:
            stored = self._sessions.subscription(client_id, topic_filter)
            shown = self._absent(stored) if stored is not None else None
        if shown is None:
            return None
        is_connected = connection is not None and connection.connected
        return Subscriber(client_id=client_id, is_connected=is_connected, subscription=shown)

    def _has_stored(self, topic_filter: str) -> bool:
        """Return whether stored sessions may have a filter; if none can, they need not be looked at."""
        if topic_filter.startswith(SHARE):
            return True
        queue = self._queues.find(topic_filter)
        return queue is not None and self._sessions.subscriptions_of(queue.id) > 0

    def _absent(self, one: StoredSubscription) -> SubscriptionShown:
        return SubscriptionShown(
            filter=one.filter,
            qos=one.options & QOS,
            no_local=bool(one.options & NO_LOCAL),
            retain_as_published=bool(one.options & RETAIN_AS_PUBLISHED),
            identifier=one.identifier,
            queued=stored_backlog(self._queues, one),
        )


def check_subscribed(topic_filter: str) -> None:
    """Raise ApiError if no client can have subscribed to a filter."""
    shared = topic_filter.removeprefix(SHARE)
    try:
        check_filter(shared.partition("/")[2] if shared != topic_filter else topic_filter)
    except TopicInvalid as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from error


def backlog(one: Subscription) -> int:
    """Return how many messages wait for a connected client because of one subscription."""
    return 0 if one.live or one.is_shared else one.queue.count_from(one.cursor)


def stored_backlog(queues: Queues, one: StoredSubscription) -> int:
    """Return how many messages wait for a client that is away because of one subscription."""
    if one.filter.startswith(SHARE):
        return 0
    try:
        return queues.get(one.queue_id).count_from(one.cursor)
    except QueueUnknown:  # a log that was repaired may lack the record that declared the queue
        return 0


async def queued_for(connection: Connection) -> int:
    """Return how many messages wait for a connected client."""
    return sum(await in_slices(backlog(one) for one in list(connection.subscriptions.by_filter.values())))


async def queued_while_away(queues: Queues, stored: StoredSession) -> int:
    """Return how many messages wait for a client that is away."""
    return sum(await in_slices(stored_backlog(queues, one) for one in list(stored.subscriptions.values())))


def live_subscription(one: Subscription) -> SubscriptionShown:
    """Return what is shown of a subscription of a connected client."""
    return SubscriptionShown(
        filter=one.filter,
        qos=one.qos,
        no_local=one.no_local,
        retain_as_published=one.options.keeps_retain,
        identifier=one.identifier,
        queued=backlog(one),
    )
