"""Pending delayed messages over the admin API: listed in the order in which they are due, cancelled, and rescheduled.

The body of a delayed message is that of any other: `/messages/{message_id}/body`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Final

import msgspec

from penstock.node.api.changes import DurableChanges, causer_of, refusals
from penstock.node.api.messagereader import MessageRead, MessageReader
from penstock.node.api.operation import NUMBER_MAX, ApiCall, ApiError, ApiRole, Done, Operation, PageQuery, not_found
from penstock.pop.core.sender import Sender, message_id
from penstock.pop.grpc.requests import position_of
from penstock.pop.grpc.timerservicer import CANCELLED_AT_ONCE
from penstock.store.record import Flag
from penstock.store.space.causer import Causer
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages, Recalled
from penstock.timer.listing import ListedTimer, TimerListing, TimerQuery

_WHY_NOT_PENDING: Final = {
    Recalled.ALREADY_FIRED: "it was delivered before",
    Recalled.ALREADY_CANCELLED: "it was cancelled before",
}


class DelayedQuery(PageQuery, forbid_unknown_fields=True, kw_only=True):
    """Which pending delayed messages are meant, and which page of them. The first part must be the same for all pages."""

    filter: Annotated[str, msgspec.Meta(description="Their topics match this topic filter.")] = "#"
    key: Annotated[str, msgspec.Meta(description="They have this key; empty: with any key or none.")] = ""
    from_ms: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX, description="They are due at this time or later.")] = 0
    before_ms: Annotated[
        int, msgspec.Meta(ge=0, le=NUMBER_MAX, description="They are due before this time; 0 for no bound.")
    ] = 0
    user: Annotated[str, msgspec.Meta(description="This user has sent them; empty: anybody has.")] = ""
    client_id: Annotated[str, msgspec.Meta(description="This client has sent them; empty: anybody has.")] = ""

    def query(self) -> TimerQuery:
        """Return them as the listing of timers takes them."""
        return TimerQuery(self.filter or "#", self.key, self.from_ms, self.before_ms, self.user, self.client_id)


class DelayedShown(msgspec.Struct, kw_only=True):
    """A pending delayed message."""

    message_id: str
    topic: str
    key: str
    deliver_at_ms: int
    size_bytes: int
    user: str
    address: str
    client_id: str


class DelayedPage(msgspec.Struct, kw_only=True):
    """A page of delayed messages in the order in which they are due. It may have fewer than asked for although more follow."""

    items: list[DelayedShown]
    next: str | None
    pending: Annotated[int, msgspec.Meta(description="All that are pending, whatever the parameters say.")]
    due_minute: Annotated[int, msgspec.Meta(description="Those that are due within about a minute.")]
    due_hour: int
    due_day: int


class DelayedCancelled(msgspec.Struct):
    """How many messages of a page a call has cancelled, and what asks for those of the next page."""

    cancelled: int
    next: str | None


class DelayedTime(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """When a delayed message is to be delivered. Exactly one of the fields must be given."""

    deliver_at_ms: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)] | None = None
    delay_ms: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)] | None = None


class DelayedOperations:
    """Serves the delayed messages.

    Parameters:
        delayed: has them.
        listing: lists them.
        sender: reschedules them.
        reader: reads them.
        store: has the time.
        changes: waits until changes are durable.
    """

    def __init__(
        self,
        delayed: DelayedMessages,
        listing: TimerListing,
        sender: Sender,
        reader: MessageReader,
        store: Store,
        changes: DurableChanges,
    ) -> None:
        self._delayed = delayed
        self._listing = listing
        self._sender = sender
        self._reader = reader
        self._store = store
        self._changes = changes

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        path, one = "/delayed-messages", "/delayed-messages/{message_id}"
        yield Operation(
            "listDelayedMessages",
            "GET",
            path,
            ApiRole.VIEWER,
            "List pending delayed messages.",
            self.page,
            DelayedPage,
            DelayedQuery,
        )
        yield Operation(
            "getDelayedMessage", "GET", one, ApiRole.VIEWER, "Show a pending delayed message.", self.show, DelayedShown
        )
        yield Operation("cancelDelayedMessage", "DELETE", one, ApiRole.OPERATOR, "Cancel a delayed message.", self.cancel, Done)
        yield Operation(
            "rescheduleDelayedMessage",
            "POST",
            f"{one}/reschedule",
            ApiRole.OPERATOR,
            "Let a delayed message be delivered at another time: another message replaces it.",
            self.reschedule,
            DelayedShown,
            body=DelayedTime,
        )
        yield Operation(
            "cancelDelayedMessages",
            "POST",
            f"{path}/cancel",
            ApiRole.ADMIN,
            "Cancel the delayed messages of a page.",
            self.cancel_many,
            DelayedCancelled,
            body=DelayedQuery,
        )

    async def page(self, call: ApiCall) -> DelayedPage:
        """Return a page of delayed messages."""
        asked: DelayedQuery = call.query
        with refusals():
            page = await self._listing.page(asked.query(), asked.after, asked.limit)
        due = self._delayed.due_counts()
        return DelayedPage(
            items=[_listed(timer) for timer in page.timers],
            next=page.next_token or None,
            pending=len(self._delayed),
            due_minute=due.minute,
            due_hour=due.hour,
            due_day=due.day,
        )

    async def show(self, call: ApiCall) -> DelayedShown:
        """Return a pending delayed message."""
        return self._shown(await self._message(call))

    async def cancel(self, call: ApiCall) -> Done:
        """Cancel a delayed message."""
        message = await self._message(call)
        async with self._changes.durable():
            outcome = self._delayed.recall(message.position, 0)
            if outcome is not Recalled.CANCELLED:
                raise _not_pending(message, outcome)
        return Done()

    async def reschedule(self, call: ApiCall) -> DelayedShown:
        """Let a delayed message be delivered at another time."""
        asked: DelayedTime = call.body
        if (asked.deliver_at_ms is None) == (asked.delay_ms is None):
            raise ApiError(HTTPStatus.BAD_REQUEST, "give either deliver_at_ms or delay_ms")
        message = await self._message(call)
        async with self._changes.durable():
            due_ms = asked.deliver_at_ms
            if due_ms is None:
                due_ms = self._store.now_ms() + (asked.delay_ms or 0)
            stored = self._sender.reschedule(message.position, due_ms, causer_of(call.subject))
            if stored is None:
                raise _not_pending(message, self._delayed.recall(message.position, 0))
            call.noted |= {"replaced_by": message_id(stored.position), "due_ms": due_ms}
        replacing = await self._reader.read(stored.position)
        if replacing is None:
            raise not_found("delayed message", message_id(stored.position))
        return self._shown(replacing)

    async def cancel_many(self, call: ApiCall) -> DelayedCancelled:
        """Cancel the delayed messages of one page."""
        asked: DelayedQuery = call.body
        call.noted |= {"filter": asked.filter, "cancelled": 0}
        cancelled = 0
        async with self._changes.durable():
            page = await self._listing.page(asked.query(), asked.after, asked.limit)
            named = [(timer.position, timer.due_ms) for timer in page.timers]
            for begin in range(0, len(named), CANCELLED_AT_ONCE):
                outcomes = self._delayed.recall_all(named[begin : begin + CANCELLED_AT_ONCE])
                cancelled += outcomes.count(Recalled.CANCELLED)
                call.noted["cancelled"] = cancelled
                await asyncio.sleep(0)
        return DelayedCancelled(cancelled, page.next_token or None)

    async def _message(self, call: ApiCall) -> MessageRead:
        """Return the delayed message of a path, pending or not. Raises ApiError.

        A message that can't be read is not looked for, because that takes a search of all that are pending. `cancel_many` can
        cancel it.
        """
        with refusals():
            position = position_of(call.path["message_id"])
        message = await self._reader.read(position)
        if message is None or not message.flags & Flag.DELAYED:
            raise not_found("delayed message", call.path["message_id"])
        return message

    def _shown(self, message: MessageRead) -> DelayedShown:
        due_ms = self._delayed.due_ms(message.position)
        if due_ms is None:
            raise _not_pending(message, None)
        causer = Causer.from_row(message.properties.by)
        timer = ListedTimer(message.topic, due_ms, message.position, message.size, message.properties.timer_key, causer)
        return _listed(timer)


def _not_pending(message: MessageRead, outcome: Recalled | None) -> ApiError:
    why = _WHY_NOT_PENDING.get(outcome, "it was delivered or cancelled before") if outcome else "it was delivered or cancelled"
    return ApiError(HTTPStatus.CONFLICT, f"the message {message_id(message.position)} is not pending: {why}")


def _listed(timer: ListedTimer) -> DelayedShown:
    return DelayedShown(
        message_id=message_id(timer.position),
        topic=timer.topic,
        key=timer.key,
        deliver_at_ms=timer.due_ms,
        size_bytes=timer.size,
        user=timer.causer.user,
        address=timer.causer.source,
        client_id=timer.causer.client,
    )
