"""Stored MQTT sessions over the admin API: a list, one session, and the end of a session."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec

from penstock.gateway.connection.clients import ClientRegistry
from penstock.gateway.sessions.lifecycle import SessionLifecycle
from penstock.gateway.sessions.stored_session import SessionHead, StoredSession
from penstock.gateway.sessions.wills import WillOutcome
from penstock.node.api.changes import DurableChanges
from penstock.node.api.clients import WillShown, will_shown
from penstock.node.api.operation import ApiCall, ApiError, ApiRole, Done, Operation, PageQuery, not_found
from penstock.node.api.pages import page_in_order
from penstock.node.api.subscriptions import queued_for, queued_while_away
from penstock.store.queues.queues import Queues


class SessionQuery(PageQuery, forbid_unknown_fields=True, kw_only=True):
    """The parameters of the list of sessions. A session is listed if all that are given fit."""

    prefix: Annotated[str, msgspec.Meta(description="With which the client id begins.")] = ""
    contains: Annotated[str, msgspec.Meta(description="A text in the client id or user name, in any case.")] = ""
    user: Annotated[str, msgspec.Meta(description="User name.")] = ""
    state: Annotated[Literal["all", "connected", "away"], msgspec.Meta(description="Whether the client is connected.")] = "all"


class SessionShown(msgspec.Struct, kw_only=True):
    """A stored session."""

    client_id: str
    user: Annotated[str, msgspec.Meta(description="User that owns the session; empty if nobody does.")]
    is_connected: bool
    expiry_ms: Annotated[int, msgspec.Meta(description="How long it lasts after its connection.")]
    ends_ms: Annotated[int, msgspec.Meta(description="When it ends; 0 while the client is connected.")]
    has_will: bool


class SessionList(msgspec.Struct):
    """A page of the stored sessions, in the order of the client ids. It may be short although there is a cursor."""

    items: list[SessionShown]
    next: str | None
    total: Annotated[int, msgspec.Meta(description="Stored sessions of the node, whether they are listed or not.")]


class SessionInDetail(SessionShown, kw_only=True):
    """A stored session in detail."""

    subscriptions: int
    queued: Annotated[int, msgspec.Meta(description="Messages that wait for the client, without those of shared filters.")]
    in_flight_out: Annotated[int, msgspec.Meta(description="Deliveries that the client has not acknowledged.")]
    in_flight_in: Annotated[int, msgspec.Meta(description="Messages at QoS 2 that the client has not released.")]
    will: WillShown | None
    will_due_ms: Annotated[int, msgspec.Meta(description="When the will is published; 0 while the client is connected.")]


class SessionOperations:
    """Serves the stored sessions.

    Parameters:
        clients: the connected clients.
        lifecycle: has the sessions, and ends them.
        queues: the light queues of the store.
        changes: waits until a session has ended durably.
    """

    def __init__(self, clients: ClientRegistry, lifecycle: SessionLifecycle, queues: Queues, changes: DurableChanges) -> None:
        self._clients = clients
        self._lifecycle = lifecycle
        self._sessions = lifecycle.sessions
        self._queues = queues
        self._changes = changes

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        yield Operation(
            "listSessions",
            "GET",
            "/sessions",
            ApiRole.VIEWER,
            "List the stored sessions, also those of clients that are away.",
            self.sessions,
            SessionList,
            query=SessionQuery,
        )
        yield Operation(
            "getSession",
            "GET",
            "/sessions/{client_id}",
            ApiRole.VIEWER,
            "Show a stored session in detail.",
            self.session,
            SessionInDetail,
        )
        yield Operation(
            "deleteSession",
            "DELETE",
            "/sessions/{client_id}",
            ApiRole.ADMIN,
            "End the session of a client that is away: its subscriptions and what waits for it. Its will is published.",
            self.delete,
            Done,
        )

    async def sessions(self, call: ApiCall) -> SessionList:
        """Return a page of the sessions."""
        query: SessionQuery = call.query
        text = query.contains.casefold()

        def row_of(client_id: str, head: SessionHead | None) -> SessionShown | None:
            if head is None or (query.user and head.user != query.user):
                return None
            if text and text not in client_id.casefold() and text not in head.user.casefold():
                return None
            is_connected = self._is_connected(client_id)
            if query.state != "all" and is_connected != (query.state == "connected"):
                return None
            return SessionShown(**_figures(head, is_connected=is_connected))

        page = await page_in_order(query, self._sessions.at_or_after, row_of, prefix=query.prefix)
        return SessionList(*page, len(self._sessions))

    async def session(self, call: ApiCall) -> SessionInDetail:
        """Return one session."""
        client_id = call.path["client_id"]
        stored = self._stored(client_id)
        connection = self._clients.get(client_id) if self._is_connected(client_id) else None
        session = connection.session if connection is not None else None
        figures = _figures(SessionHead.of(stored), is_connected=session is not None)
        details: dict[str, Any] = {
            "subscriptions": len(stored.subscriptions),
            "in_flight_out": len(session.inflight.slots if session is not None else stored.inflight),
            "in_flight_in": len(session.received if session is not None else stored.received),
            "will": will_shown(self._lifecycle.will_of(stored)),
            "will_due_ms": stored.will.due_ms if stored.will is not None else 0,
        }
        queued = await (queued_for(connection) if connection is not None else queued_while_away(self._queues, stored))
        return SessionInDetail(**figures, **details, queued=queued)

    async def delete(self, call: ApiCall) -> Done:
        """End the session of a client that is away."""
        client_id = call.path["client_id"]
        async with self._changes.durable():
            self._delete(call, client_id)
        return Done()

    def _delete(self, call: ApiCall, client_id: str) -> None:
        stored = self._stored(client_id)
        if self._is_connected(client_id):
            raise ApiError(
                HTTPStatus.CONFLICT,
                f"the client {client_id[:200]!r} is connected; disconnect it, then delete its session",
            )
        call.noted |= {"session_user": stored.user, "subscriptions": len(stored.subscriptions)}
        outcome = self._lifecycle.delete(client_id)
        if outcome is WillOutcome.UNDECIDED:
            raise ApiError(
                HTTPStatus.CONFLICT,
                f"nobody can tell yet whether the will of {client_id[:200]!r} may be published; ask again later",
            )
        if outcome is WillOutcome.NO_ROOM:
            raise ApiError(
                HTTPStatus.CONFLICT, f"the disk has no room for the will of {client_id[:200]!r}; make room, and ask again"
            )

    def _stored(self, client_id: str) -> StoredSession:
        stored = self._sessions.get(client_id)
        if stored is None:
            raise not_found("stored session", client_id)
        return stored

    def _is_connected(self, client_id: str) -> bool:
        connection = self._clients.get(client_id)
        return connection is not None and connection.connected


def _figures(head: SessionHead, *, is_connected: bool) -> dict[str, Any]:
    """Return the fields of a `SessionShown`."""
    return {
        "client_id": head.client_id,
        "user": head.user,
        "is_connected": is_connected,
        "expiry_ms": head.expiry_s * 1000,
        "ends_ms": head.ends_ms,
        "has_will": head.has_will,
    }
