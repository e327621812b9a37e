"""Pending delayed messages: `Client.timers` and `SyncClient.timers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.pop.client import answers
from penstock.pop.client.calls import AsyncCalls, SyncCalls
from penstock.pop.client.durations import Duration, milliseconds
from penstock.pop.client.outgoing import BOTH_TIMES
from penstock.pop.client.results import Timer, TimerCounts, TimersPage
from penstock.pop.proto import pop_pb2 as pb

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import TimerServiceAsyncStub, TimerServiceStub


def _name(recall_handle: str, topic: str, key: str) -> pb.TimerName:
    if bool(recall_handle) == bool(topic and key):
        raise ValueError("give a recall handle, or a topic and a key")
    return pb.TimerName(recall_handle=recall_handle, topic=topic, key=key)


def _change(recall_handle: str, topic: str, key: str, deliver_at_ms: int, delay: Duration) -> pb.RescheduleTimerRequest:
    if deliver_at_ms and delay:
        raise ValueError(BOTH_TIMES)
    name = _name(recall_handle, topic, key)
    return pb.RescheduleTimerRequest(name=name, deliver_at_ms=deliver_at_ms, delay_ms=milliseconds(delay, "delay"))


def _found(timer: Timer) -> Timer:
    answers.only(answers.errors([timer.status]))
    return timer


def _listing(
    filter: str, key: str, from_ms: int, before_ms: int, user: str, client_id: str, limit: int = 0, page_token: str = ""
) -> pb.ListTimersRequest:
    return pb.ListTimersRequest(
        filter=filter,
        key=key,
        from_ms=from_ms,
        before_ms=before_ms,
        user=user,
        client_id=client_id,
        timers_max=limit,
        page_token=page_token,
    )


def _limited(limit: int) -> int:
    if limit < 1:
        raise ValueError(f"limit is {limit}, but must be at least 1")
    return limit


def _next_page(request: pb.ListTimersRequest, page: TimersPage, found: list[Timer]) -> pb.ListTimersRequest | None:
    """Note what a page has. Return the request for the next one; None if there is none, or enough are found."""
    found += page.timers
    missing = request.timers_max - len(page.timers)
    if not page.next_page_token or missing <= 0:
        return None
    following = pb.ListTimersRequest()
    following.CopyFrom(request)
    following.timers_max, following.page_token = missing, page.next_page_token
    return following


class TimerCalls:
    """Finds, lists, cancels and reschedules delayed messages that are pending.

    A message is named by its recall handle, or by its topic and the key that its sender gave it. The caller needs the right to
    send to the topic. All methods raise NodeUnavailable, NotAuthenticated and NotPermitted; UnknownMessage if no message of the
    key is pending; and for a handle AlreadyFired, AlreadyRecalled, UnknownMessage and InvalidHandle.
    """

    def __init__(self, call: AsyncCalls, stub: TimerServiceAsyncStub) -> None:
        self._call = call
        self._stub = stub

    async def find(self, recall_handle: str = "", *, topic: str = "", key: str = "") -> Timer:
        """Return a pending message: its handle, id, topic, key and delivery time."""
        return _found(await self._call(self._stub.FindTimer, _name(recall_handle, topic, key)))

    async def cancel(self, recall_handle: str = "", *, topic: str = "", key: str = "") -> None:
        """Cancel a pending message, which is then never delivered."""
        status = await self._call(self._stub.CancelTimer, _name(recall_handle, topic, key))
        answers.only(answers.errors([status]))

    async def reschedule(
        self, recall_handle: str = "", *, topic: str = "", key: str = "", deliver_at_ms: int = 0, delay: Duration = 0.0
    ) -> Timer:
        """Let a pending message be delivered at another time, in one step; return it with its new handle and id.

        Args:
            recall_handle: Names the message, unless `topic` and `key` do.
            topic: See above.
            key: See above.
            deliver_at_ms: Delivery time in ms since 1970. A time in the past: deliver at once.
            delay: Delay from when the node gets the call, in seconds or as a timedelta, instead of `deliver_at_ms`.

        Raises:
            RequestInvalid: The time is negative or too far away, or the message would expire before.
            TypeError, ValueError: The delay is no duration, or both are given.
        """
        request = _change(recall_handle, topic, key, deliver_at_ms, delay)
        return _found(await self._call(self._stub.RescheduleTimer, request))

    async def list(
        self,
        filter: str = "#",
        *,
        key: str = "",
        from_ms: int = 0,
        before_ms: int = 0,
        user: str = "",
        client_id: str = "",
        limit: int = 1_000,
        page_token: str = "",
    ) -> TimersPage:
        """Return the pending messages to whose topics the caller may send, in order of delivery time.

        All pages of a listing together have every message once that is pending as long as the listing lasts.

            page = await client.timers.list("orders/#")
            while page.next_page_token:
                page = await client.timers.list("orders/#", page_token=page.next_page_token)

        Args:
            filter: MQTT topic filter that their topics match.
            key: Only those with this key.
            from_ms: Only those that are delivered at this time or later, in ms since 1970.
            before_ms: Only those that are delivered before this time; 0 for no bound.
            user: Only those that this user has sent.
            client_id: Only those that the client with this id has sent over MQTT.
            limit: Maximum number of messages, at least 1.
            page_token: `next_page_token` of the page before. The other arguments but `limit` must be the same as for that page.

        Returns:
            TimersPage: `timers`, and `next_page_token`, which is empty if no messages follow.

        Raises:
            RequestInvalid: The filter, a time or the token is not valid.
            ValueError: `limit` is less than 1.
        """
        found: list[Timer] = []
        request: pb.ListTimersRequest | None = _listing(
            filter, key, from_ms, before_ms, user, client_id, _limited(limit), page_token
        )
        while request is not None:
            page = await self._call(self._stub.ListTimers, request)
            request = _next_page(request, page, found)
        return TimersPage(timers=found, next_page_token=page.next_page_token)

    async def cancel_all(
        self, filter: str, *, key: str = "", from_ms: int = 0, before_ms: int = 0, user: str = "", client_id: str = ""
    ) -> int:
        """Cancel all pending messages that a listing with these arguments has; return how many were cancelled.

            await client.timers.cancel_all("#", user="eve")

        What fires meanwhile is not cancelled. If the call fails, some messages may have been cancelled: call it again.

        Args:
            filter: As for `list`, and so are the others.
            key: See above.
            from_ms: See above.
            before_ms: See above.
            user: See above.
            client_id: See above.

        Raises:
            RequestInvalid: The filter or a time is not valid.
        """
        request, cancelled = _listing(filter, key, from_ms, before_ms, user, client_id), 0
        while True:
            page = await self._call(self._stub.CancelTimers, request)
            cancelled += page.cancelled
            if not page.next_page_token:
                return cancelled
            request.page_token = page.next_page_token

    async def count(self) -> TimerCounts:
        """Return how many messages are pending, how many of them are due soon, and when the next one is delivered.

        The caller needs the right to administer all groups.
        """
        return await self._call(self._stub.CountTimers, pb.CountTimersRequest())


class SyncTimerCalls:
    """The methods of `TimerCalls`, for threads. Parameters, results and errors are the same."""

    def __init__(self, call: SyncCalls, stub: TimerServiceStub) -> None:
        self._call = call
        self._stub = stub

    def find(self, recall_handle: str = "", *, topic: str = "", key: str = "") -> Timer:
        """Return a pending message, as `TimerCalls.find`."""
        return _found(self._call(self._stub.FindTimer, _name(recall_handle, topic, key)))

    def cancel(self, recall_handle: str = "", *, topic: str = "", key: str = "") -> None:
        """Cancel a pending message, as `TimerCalls.cancel`."""
        answers.only(answers.errors([self._call(self._stub.CancelTimer, _name(recall_handle, topic, key))]))

    def reschedule(
        self, recall_handle: str = "", *, topic: str = "", key: str = "", deliver_at_ms: int = 0, delay: Duration = 0.0
    ) -> Timer:
        """Let a pending message be delivered at another time, as `TimerCalls.reschedule`."""
        request = _change(recall_handle, topic, key, deliver_at_ms, delay)
        return _found(self._call(self._stub.RescheduleTimer, request))

    def list(
        self,
        filter: str = "#",
        *,
        key: str = "",
        from_ms: int = 0,
        before_ms: int = 0,
        user: str = "",
        client_id: str = "",
        limit: int = 1_000,
        page_token: str = "",
    ) -> TimersPage:
        """Return pending messages in order of delivery time, as `TimerCalls.list`."""
        found: list[Timer] = []
        request: pb.ListTimersRequest | None = _listing(
            filter, key, from_ms, before_ms, user, client_id, _limited(limit), page_token
        )
        while request is not None:
            page = self._call(self._stub.ListTimers, request)
            request = _next_page(request, page, found)
        return TimersPage(timers=found, next_page_token=page.next_page_token)

    def cancel_all(
        self, filter: str, *, key: str = "", from_ms: int = 0, before_ms: int = 0, user: str = "", client_id: str = ""
    ) -> int:
        """Cancel all messages of a listing, as `TimerCalls.cancel_all`."""
        request, cancelled = _listing(filter, key, from_ms, before_ms, user, client_id), 0
        while True:
            page = self._call(self._stub.CancelTimers, request)
            cancelled += page.cancelled
            if not page.next_page_token:
                return cancelled
            request.page_token = page.next_page_token

    def count(self) -> TimerCounts:
        """Return how many messages are pending and due soon, as `TimerCalls.count`."""
        return self._call(self._stub.CountTimers, pb.CountTimersRequest())
