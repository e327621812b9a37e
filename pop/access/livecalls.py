"""Calls that go on, to be looked at again when access control changes or the caller's token ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc.aio

from penstock.access.rights import Rights
from penstock.access.subject import Subject
from penstock.pop.access.caller import AccessDenied


class LiveCall:
    """A call that is being served.

    Parameters:
        context: what gRPC knows of the call.
        needs: the actions that the call needs, each with the topic, filter or group that it is about.
    """

    __slots__ = ("context", "denied", "needs", "rights", "waiting")

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], needs: Iterable[tuple[str, str]] = ()) -> None:
        self.context = context
        self.needs: dict[tuple[str, str], None] = dict.fromkeys(needs)
        self.rights: Rights | None = None
        """What the caller may do since access control has changed; None if it has not, or where access is not restricted."""
        self.denied: AccessDenied | None = None
        """Why the call ends, once it is known."""
        self.waiting: asyncio.Task[object] | None = None
        """The task that serves it, while it waits. It must not be cancelled while gRPC writes a response."""

    def end(self, error: AccessDenied) -> None:
        """End the call with an error, unless it is ending."""
        if self.denied is None:
            self.denied = error
            if self.waiting is not None:
                self.waiting.cancel()

    def check_allowed(self) -> None:
        """Check that the call may go on. Raises AccessDenied."""
        if self.denied is not None:
            raise self.denied

    def while_allowed(self, write: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
        """Return a function that writes a response of the call, unless the caller may no longer have it."""

        async def written(response: Any) -> None:
            self.check_allowed()
            task, self.waiting = self.waiting, None
            try:
                await write(response)
            finally:
                self.waiting = task
            self.check_allowed()

        return written


class LiveCalls:
    """The calls of a node that go on.

    Parameters:
        check: raises AccessDenied if the caller of a call may no longer do what it does.
        caller_of: returns who makes a call. Raises AccessDenied if nobody can tell.
    """

    def __init__(self, check: Callable[[LiveCall], object], caller_of: Callable[[LiveCall], Subject]) -> None:
        self._check = check
        self._caller_of = caller_of
        self._calls: set[LiveCall] = set()

    async def run(self, call: LiveCall, response: Awaitable[Any], ends_s: float | None) -> Any:
        """Return the response of a call, unless its caller may no longer have it.

        Args:
            call: the call.
            response: the work of serving it.
            ends_s: seconds after which the call is looked at again; None for never.

        Raises:
            AccessDenied: the caller may no longer do what it does. The code that serves the call was cancelled.
        """
        timer = asyncio.get_running_loop().call_later(ends_s, self._look_again, call) if ends_s is not None else None
        task = call.waiting = asyncio.current_task()
        self._calls.add(call)
        try:
            value = await response
            call.check_allowed()  # `asyncio.wait_for` may have kept the cancellation to itself
            return value
        except asyncio.CancelledError:
            if call.denied is None:
                raise
            raise call.denied from None
        finally:
            call.waiting = None
            if call.denied is not None and task is not None and task.cancelling():
                task.uncancel()
            self._calls.discard(call)
            if timer is not None:
                timer.cancel()

    def check(self) -> None:
        """End the calls whose callers may no longer do what they do."""
        for call in tuple(self._calls):
            self._look_again(call)

    def end(self, applies: Callable[[Subject], bool], error: AccessDenied) -> int:
        """End the calls of the callers to whom `applies` applies; return how many there were."""
        calls = [call for call in self._calls if call.denied is None and self._is_by(call, applies)]
        for call in calls:
            call.end(error)
        return len(calls)

    def _look_again(self, call: LiveCall) -> None:
        try:
            self._check(call)
        except AccessDenied as error:
            call.end(error)

    def _is_by(self, call: LiveCall, applies: Callable[[Subject], bool]) -> bool:
        try:
            return applies(self._caller_of(call))
        except AccessDenied:  # its caller proves no more who it is, and so ends by itself
            return False
