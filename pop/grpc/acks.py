"""Ack, DeadLetter, ChangeInvisible: ending deliveries, or moving their deadlines."""

from __future__ import annotations

from penstock.pop.core.core import PopCore
from penstock.pop.core.deliveries import AckOutcome, VisibilityChange
from penstock.pop.grpc.requests import check_count
from penstock.pop.grpc.status import ACK_STATUS
from penstock.pop.grpc.wire import STATUS_OK, statuses
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.store import Store


class AckMethods:
    """Serves `Ack`, `DeadLetter` and `ChangeInvisible`.

    Parameters:
        core: has the deliveries.
        store: tells when a change is durable.
    """

    def __init__(self, core: PopCore, store: Store) -> None:
        self._core = core
        self._store = store

    async def Ack(self, request: pb.AckRequest) -> bytes:
        check_count("acknowledge handles", request.handles)
        outcomes = self._core.deliveries.ack(request.group, list(request.handles))
        await self._store.durable()
        if outcomes.count(AckOutcome.OK) == len(outcomes):
            return STATUS_OK * len(outcomes)
        return statuses([ACK_STATUS[outcome] for outcome in outcomes])

    async def DeadLetter(self, request: pb.AckRequest) -> bytes:
        check_count("dead-letter handles", request.handles)
        outcomes = self._core.deliveries.dead_letter(request.group, list(request.handles), request.reason)
        await self._store.durable()
        return statuses([ACK_STATUS[outcome] for outcome in outcomes])

    async def ChangeInvisible(self, request: pb.ChangeInvisibleRequest) -> pb.ChangeInvisibleResponse:
        check_count("change handles", request.changes)
        changes = [
            VisibilityChange(change.handle, change.invisible_ms, change.suspend, change.nack, change.reason)
            for change in request.changes
        ]
        outcomes = self._core.deliveries.change_invisible(request.group, changes)
        await self._store.durable()
        results = [pb.ChangeInvisibleResult(status=ACK_STATUS[outcome], handle=handle) for outcome, handle in outcomes]
        return pb.ChangeInvisibleResponse(results=results)
