"""Streams that are open, to be looked at again when access control changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from penstock.pop.access.caller import AccessDenied


class LiveCall:
    """A stream that is being served.

    Parameters:
        check: raises AccessDenied if the caller may no longer do what it does.
    """

    __slots__ = ("check", "denied", "waiting")

    def __init__(self, check: Callable[[], None]) -> None:
        self.check = check
        self.denied: AccessDenied | None = None
        """Why the stream ends, once it is known."""
        self.waiting: asyncio.Task[object] | None = None
        """The task that serves it, while it waits for the next response. It must not be cancelled while gRPC writes one."""

    def is_allowed(self) -> bool:
        """Return whether the stream may go on."""
        return self.denied is None

    def deny(self, error: AccessDenied) -> None:
        """End the stream."""
        if self.denied is None:
            self.denied = error
            if self.waiting is not None:
                self.waiting.cancel()


class LiveCalls:
    """The streams of a node."""

    def __init__(self) -> None:
        self._calls: set[LiveCall] = set()

    async def serve(self, call: LiveCall, responses: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
        """Yield the responses of a stream as long as its caller may have them.

        Raises:
            AccessDenied: the caller may no longer do what it does. The code that makes the responses was cancelled.
        """
        self._calls.add(call)
        try:
            while call.is_allowed():
                call.waiting = asyncio.current_task()
                try:
                    response = await anext(responses, None)
                except asyncio.CancelledError:
                    if call.is_allowed():
                        raise
                    assert call.waiting is not None
                    call.waiting.uncancel()
                    break
                finally:
                    call.waiting = None
                if response is None:
                    return
                yield response
        finally:
            self._calls.discard(call)
            await responses.aclose()
        if call.denied is not None:
            raise call.denied

    def check(self) -> None:
        """End the calls whose callers may no longer do what they do."""
        for call in tuple(self._calls):
            try:
                call.check()
            except AccessDenied as error:
                call.deny(error)
