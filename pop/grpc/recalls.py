"""Recall: withdrawing delayed messages before they are delivered."""

from __future__ import annotations

from penstock.pop.access.auditedcall import NAMES_MAX, note_change, note_failed
from penstock.pop.access.caller import check_sender
from penstock.pop.core.handle import Handles
from penstock.pop.core.sender import message_id
from penstock.pop.grpc.requests import check_count
from penstock.pop.grpc.status import RECALL_STATUS
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages, Recalled

_INVALID = pb.Status(code=pb.INVALID_HANDLE, detail="this is not a recall handle that this node gave")


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

    async def Recall(self, request: pb.RecallRequest) -> pb.RecallResponse:
        check_count("recall messages", request.recall_handles)
        named = [self._handles.read_recall(handle) for handle in request.recall_handles]
        known = [each for each in named if each is not None]
        for position, _ in known:  # before any of them is recalled
            check_sender(self._store, position, self._delayed.size(position))
        outcomes = self._delayed.recall_all(known)  # all of them or, if the disk is full, none
        recalled = [position for (position, _), outcome in zip(known, outcomes, strict=True) if outcome is Recalled.CANCELLED]
        of_known = iter(outcomes)
        statuses = [RECALL_STATUS[next(of_known)] if each is not None else _INVALID for each in named]
        if recalled:
            note_change(recalled=len(recalled), messages=" ".join(map(message_id, recalled[:NAMES_MAX])))
        elif statuses:
            note_failed(statuses[0].detail)
        await self._store.durable()
        return pb.RecallResponse(statuses=statuses)
