"""Calls that go on, to be looked at again when access control changes or the caller's token ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.access.subject import Subject
from penstock.pop.access.caller import AccessDenied


class LiveCall:
    """A call that is being served.

    Parameters:
        check: raises AccessDenied if the caller may no longer do what it does.
        caller: returns who calls. Raises AccessDenied if nobody can tell.
    """

    __slots__ = ("caller", "check", "denied", "waiting")

    def __init__(self, check: Callable[[], object], caller: Callable[[], Subject]) -> None:
        self.check = check
        self.caller = caller
        self.denied: AccessDenied | None = None
        """Why the call ends, once it is known."""
        self.waiting: asyncio.Task[object] | None = None
        """The task that serves it, while it waits for the next response. It must not be cancelled while gRPC writes one."""

    def is_allowed(self) -> bool:
        """Return whether the call may go on."""
        return self.denied is None

    def look_again(self) -> None:
        """End the call if its caller may no longer do what it does."""
        try:
            self.check()
        except AccessDenied as error:
            self.end(error)

    def end(self, error: AccessDenied) -> None:
        """End the call with an error, unless it is ending."""
        if self.denied is None:
            self.denied = error
            if self.waiting is not None:
                self.waiting.cancel()


class LiveCalls:
    """The calls of a node that go on."""

    def __init__(self) -> None:
        self._calls: set[LiveCall] = set()

    async def run(self, call: LiveCall, response: Awaitable[Any], ends_s: float | None) -> Any:
        """Return the response of a call, unless its caller may no longer have it.

        Args:
            call: the call.
            response: what serves it.
            ends_s: seconds after which the call is looked at again; None for never.

        Raises:
            AccessDenied: the caller may no longer do what it does. The code that serves the call was cancelled.
        """
        with self._during(call, ends_s), _waiting(call):
            return await response

    async def serve(self, call: LiveCall, responses: AsyncGenerator[Any, None], ends_s: float | None) -> AsyncIterator[Any]:
        """Yield the responses of a stream as long as its caller may have them. Arguments and errors are those of `run`."""
        with self._during(call, ends_s):
            try:
                while call.is_allowed():
                    with _waiting(call):
                        response = await anext(responses, None)
                    if response is None:
                        return
                    yield response
            finally:
                await responses.aclose()
            if call.denied is not None:
                raise call.denied

    def check(self) -> None:
        """End the calls whose callers may no longer do what they do."""
        for call in tuple(self._calls):
            call.look_again()

    def end(self, applies: Callable[[Subject], bool], error: AccessDenied) -> int:
        """End the calls of the callers to whom `applies` applies; return how many there were."""
        found = [call for call in self._calls if call.denied is None and _is_by(call, applies)]
        for call in found:
            call.end(error)
        return len(found)

    @contextmanager
    def _during(self, call: LiveCall, ends_s: float | None) -> Iterator[None]:
        timer = asyncio.get_running_loop().call_later(ends_s, call.look_again) if ends_s is not None else None
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)
            if timer is not None:
                timer.cancel()


def _is_by(call: LiveCall, applies: Callable[[Subject], bool]) -> bool:
    try:
        return applies(call.caller())
    except AccessDenied:  # its caller proves no more who it is, and so ends by itself
        return False


@contextmanager
def _waiting(call: LiveCall) -> Iterator[None]:
    """Let the code within be cancelled if the caller may no longer do what it does. Raises AccessDenied then."""
    task = call.waiting = asyncio.current_task()
    try:
        yield
        if call.denied is not None:  # `asyncio.wait_for` may have kept the cancellation to itself
            if task is not None and task.cancelling():
                task.uncancel()
            raise call.denied
    except asyncio.CancelledError:
        if call.denied is None:
            raise
        assert task is not None
        task.uncancel()
        raise call.denied from None
    finally:
        call.waiting = None
