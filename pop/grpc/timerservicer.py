"""The servicer of `penstock.pop.v1.TimerService`: pending delayed messages, by their handles or keys, and all of them."""

from __future__ import annotations

import asyncio
from typing import Final

from penstock.access.actions import SEND
from penstock.pop.access.auditedcall import note_change, note_failed
from penstock.pop.access.caller import CALLER, causer_of_call, check_permitted, check_sender
from penstock.pop.core.handle import Handles
from penstock.pop.core.sender import Refusal, Sender, SendRefused, message_id
from penstock.pop.grpc.requests import bounded
from penstock.pop.grpc.status import NO_RECALL_HANDLE, OK, RECALL_STATUS
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.properties import decode_properties
from penstock.store.record import decode
from penstock.store.space.causer import Causer
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages, Recalled
from penstock.timer.keys import TimerKeys
from penstock.timer.listing import ROWS_DEFAULT, ROWS_MAX, ListedTimer, TimerListing, TimerPage, TimerQuery

CANCELLED_AT_ONCE: Final = 64
"""Messages that `CancelTimers` cancels before other work has its turn: it reads the record of each."""

_UNREADABLE = pb.Status(
    code=pb.UNKNOWN_MESSAGE, detail="the record of the message is damaged: it is pending, and can be cancelled only"
)


class TimerServicer:
    """Has the methods of the service. A call that changes something is answered when the change is durable.

    Parameters:
        delayed: the delayed messages.
        keys: knows the pending message of each key.
        listing: lists the pending messages.
        sender: reschedules messages.
        handles: makes and reads recall handles.
        store: has the messages.
    """

    def __init__(
        self,
        delayed: DelayedMessages,
        keys: TimerKeys,
        listing: TimerListing,
        sender: Sender,
        handles: Handles,
        store: Store,
    ) -> None:
        self._delayed = delayed
        self._keys = keys
        self._listing = listing
        self._sender = sender
        self._handles = handles
        self._store = store

    async def FindTimer(self, request: pb.TimerName) -> pb.Timer:
        named = self._named(request)
        return self._described(*named) if isinstance(named, tuple) else pb.Timer(status=named)

    async def CancelTimer(self, request: pb.TimerName) -> pb.Status:
        named = self._named(request)
        if not isinstance(named, tuple):
            note_failed(named.detail)
            return named
        recalled = self._delayed.recall(*named)
        if recalled is Recalled.CANCELLED:
            note_change(message=message_id(named[0]))
        else:
            note_failed(RECALL_STATUS[recalled].detail)
        await self._store.durable()
        return RECALL_STATUS[recalled]

    async def RescheduleTimer(self, request: pb.RescheduleTimerRequest) -> pb.Timer:
        named = self._named(request.name)
        if not isinstance(named, tuple):
            note_failed(named.detail)
            return pb.Timer(status=named)
        due_ms = request.deliver_at_ms
        if request.delay_ms:
            if due_ms or request.delay_ms < 0:
                detail = f"delay_ms is {request.delay_ms} and deliver_at_ms is {due_ms}: give one of them, and at least 0"
                raise SendRefused(Refusal.INVALID_DELIVERY_TIME, detail)
            due_ms = self._store.now_ms() + request.delay_ms
        stored = self._sender.reschedule(named[0], due_ms, causer_of_call())
        # The answer says what this call did, so it is made before the new message fires or another call ends it.
        timer = self._described(stored.position, due_ms) if stored else pb.Timer(status=self._ended(*named))
        if stored:
            note_change(message=message_id(named[0]), replaced_by=message_id(stored.position), due_ms=timer.deliver_at_ms)
        else:
            note_failed(timer.status.detail)
        await self._store.durable()
        return timer

    async def ListTimers(self, request: pb.ListTimersRequest) -> pb.ListTimersResponse:
        page = await self._page(request)
        return pb.ListTimersResponse(timers=map(self._timer, page.timers), next_page_token=page.next_token)

    async def CancelTimers(self, request: pb.ListTimersRequest) -> pb.CancelTimersResponse:
        page = await self._page(request)
        cancelled = 0
        named = [(timer.position, timer.due_ms) for timer in page.timers]
        try:
            for begin in range(0, len(named), CANCELLED_AT_ONCE):
                outcomes = self._delayed.recall_all(named[begin : begin + CANCELLED_AT_ONCE])
                cancelled += outcomes.count(Recalled.CANCELLED)
                await asyncio.sleep(0)
        finally:  # also if the caller does not wait, or the disk is full
            if cancelled:
                note_change(messages=cancelled)
        await self._store.durable()
        return pb.CancelTimersResponse(cancelled=cancelled, next_page_token=page.next_token)

    async def _page(self, request: pb.ListTimersRequest) -> TimerPage:
        query = TimerQuery(
            request.filter or "#", request.key, request.from_ms, request.before_ms, request.user, request.client_id
        )
        count = min(bounded("timers_max", request.timers_max, ROWS_DEFAULT), ROWS_MAX)
        rights = CALLER.get()
        return await self._listing.page(
            query, request.page_token, count, lambda topic: rights is None or rights.may(SEND, topic)
        )

    async def CountTimers(self, _request: pb.CountTimersRequest) -> pb.TimerCounts:
        pending, due = len(self._delayed), self._delayed.due_counts()
        return pb.TimerCounts(
            pending=pending,
            due_minute=due.minute,
            due_hour=due.hour,
            due_day=due.day,
            next_ms=await self._listing.next_due_ms() or 0,
        )

    def _named(self, name: pb.TimerName) -> tuple[int, int] | pb.Status:
        """Return position and due time of a message to whose topic the caller may send, or what is wrong with its name."""
        if name.recall_handle:
            named = self._handles.read_recall(name.recall_handle)
            if named is None:
                return NO_RECALL_HANDLE
            check_sender(self._store, named[0], self._delayed.size(named[0]))
            return named
        check_permitted(SEND, name.topic)
        position = self._keys.find(name.topic.encode(), name.key) if name.key else None
        due_ms = self._delayed.due_ms(position) if position is not None else None
        if position is None or due_ms is None:
            detail = f"no message with the key {name.key[:40]!r} of the topic {name.topic[:80]!r} is pending"
            return pb.Status(code=pb.UNKNOWN_MESSAGE, detail=detail)
        return position, due_ms

    def _ended(self, position: int, due_ms: int) -> pb.Status:
        """Return why a message can't be shown or moved. Nothing is cancelled: it is not pending, or its record is damaged."""
        if self._delayed.due_ms(position) is not None:
            return _UNREADABLE
        return RECALL_STATUS[self._delayed.recall(position, due_ms)]

    def _described(self, position: int, due_ms: int) -> pb.Timer:
        self._store.commit()  # the message may have been stored in this turn
        size, pending_ms = self._delayed.size(position), self._delayed.due_ms(position)
        if size is None or pending_ms is None:
            return pb.Timer(status=self._ended(position, due_ms))
        data = self._store.read_intact(position, size)
        if data is None:
            return pb.Timer(status=_UNREADABLE)
        record = decode(data, position=position, verify=False)
        properties = decode_properties(record.properties)
        topic, causer = record.topic.decode(), Causer.from_row(properties.by)
        return self._timer(ListedTimer(topic, pending_ms, position, size, properties.timer_key, causer))

    def _timer(self, listed: ListedTimer) -> pb.Timer:
        return pb.Timer(
            status=OK,
            recall_handle=self._handles.recall(listed.position, listed.due_ms),
            message_id=message_id(listed.position),
            topic=listed.topic,
            key=listed.key,
            deliver_at_ms=listed.due_ms,
            size=listed.size,
            user=listed.causer.user,
            source=listed.causer.source,
            client_id=listed.causer.client,
        )
