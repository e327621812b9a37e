"""Recall: withdrawing delayed messages before they are delivered."""

from __future__ import annotations

from penstock.pop.access.auditedcall import NAMES_MAX, note_change, note_failed
from penstock.pop.access.caller import check_sender
from penstock.pop.core.handle import Handles
from penstock.pop.core.names import message_id
from penstock.pop.grpc.requests import check_count
from penstock.pop.grpc.status import RECALL_STATUS, with_status
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages, Recalled


class RecallMethods:
    """Serves `Recall`.

    Parameters:
        delayed: the delayed messages.
        handles: reads recall handles.
        store: tells when a recall is durable.
    """

    def __init__(self, delayed: DelayedMessages, handles: Handles, store: Store) -> None:
        self._delayed = delayed
        self._handles = handles
        self._store = store

    @with_status
    async def Recall(self, request: pb.RecallRequest) -> pb.RecallResponse:
        check_count("recall messages", request.recall_handles)
        for handle in request.recall_handles:  # before any of them is recalled
            named = self._handles.read_recall(handle)
            if named is not None:
                check_sender(self._store, named[0], self._delayed.size(named[0]))
        statuses: list[pb.Status] = []
        recalled: list[int] = []
        try:
            for handle in request.recall_handles:
                named = self._handles.read_recall(handle)
                if named is None:
                    statuses.append(pb.Status(code=pb.INVALID_HANDLE, detail="this is not a recall handle that this node gave"))
                    continue
                came_of_it = self._delayed.recall(*named)
                statuses.append(RECALL_STATUS[came_of_it])
                if came_of_it is Recalled.CANCELLED:
                    recalled.append(named[0])
        finally:
            if recalled:  # also if the disk is full before the last one
                note_change(recalled=len(recalled), messages=" ".join(map(message_id, recalled[:NAMES_MAX])))
        if statuses and not recalled:
            note_failed(statuses[0].detail)
        await self._store.durable()
        return pb.RecallResponse(statuses=statuses)
