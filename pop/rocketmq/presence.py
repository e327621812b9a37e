"""Which clients are there: heartbeats, announced ends, and what the node does when a client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.pop.rocketmq.answering import status
from penstock.pop.rocketmq.clients import ConnectedClient, ConnectedClients
from penstock.pop.rocketmq.expressions import Expressions
from penstock.pop.rocketmq.leases import Leases
from penstock.pop.rocketmq.lite import LiteSubscriptions
from penstock.pop.rocketmq.names import group_of
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import pb, service_pb

CHECK_S = 1.0
"""Interval at which the node looks for clients that are gone."""

STALL_MS = 5_000
"""If the last check is longer ago than this, the node was stopped or its clock was set. Clients are excused for that time."""


class Presence:
    """Notes the signs of life of clients, and cleans up after clients that are gone.

    Parameters:
        clients: The clients that use the node.
        leases: Deliveries to return from clients that are gone.
        lite: Subscriptions to end of clients that are gone.
        expressions: Forgets what clients that are gone asked for.
        now_ms: Returns the current time in ms.
    """

    def __init__(
        self,
        clients: ConnectedClients,
        leases: Leases,
        lite: LiteSubscriptions,
        expressions: Expressions,
        now_ms: Callable[[], int],
    ) -> None:
        self._clients = clients
        self._leases = leases
        self._lite = lite
        self._expressions = expressions
        self._now_ms = now_ms
        self._timer: asyncio.TimerHandle | None = None
        self._checked_ms = 0

    async def Heartbeat(self, request: Any, client: ConnectedClient) -> Any:
        client.client_type = check_client_type(request.client_type)
        if request.HasField("group"):
            group_of(request.group)
        return service_pb.HeartbeatResponse(status=status())

    async def NotifyClientTermination(self, client: ConnectedClient) -> Any:
        client.is_terminated = True
        return service_pb.NotifyClientTerminationResponse(status=status())

    def start(self) -> None:
        """Start to check. Clients that held leases or lite topics when the node ended get some time to call again."""
        self._checked_ms = now_ms = self._now_ms()
        self._lite.restore(now_ms)
        for holder in self._leases.holders():
            with suppress(Refused):  # Above the limit of clients, deliveries come back when their invisible time ends.
                self._clients.heard_from(holder, now_ms)
        self._check()

    def stop(self) -> None:
        """Stop checking, and end all Telemetry streams."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._clients.end_streams()

    def _check(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)
        now_ms = self._now_ms()
        if now_ms - self._checked_ms > STALL_MS:
            self._clients.excuse(now_ms - self._checked_ms)
        self._checked_ms = now_ms
        gone = self._clients.remove_gone(now_ms)
        for client in gone.values():
            self._lite.client_gone(client)
            self._expressions.client_gone(client)
        self._lite.end_expired(now_ms)
        if gone:
            for holder in self._leases.return_from(gone):
                self._clients.heard_from(holder.id, now_ms)  # The next try follows when the client was silent once more.


def check_client_type(client_type: int) -> int:
    """Return a client's type if it is known. Raises Refused with UNRECOGNIZED_CLIENT_TYPE."""
    if client_type not in pb.ClientType.values() or not client_type:
        raise Refused(Code.UNRECOGNIZED_CLIENT_TYPE, f"the client type {client_type} is unknown: use a type of ClientType")
    return client_type
