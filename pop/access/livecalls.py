"""Streams that are open, to be looked at again when access control changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.pop.access.caller import AccessDenied


class LiveCall:
    """A stream that is being served.

    Parameters:
        check: raises AccessDenied if the caller may no longer do what it does.
    """

    __slots__ = ("check", "denied", "task")

    def __init__(self, check: Callable[[], None]) -> None:
        self.check = check
        self.denied: AccessDenied | None = None
        """Why the stream ends, once it is known."""
        self.task: asyncio.Task[object] | None = None


class LiveCalls:
    """The streams of a node."""

    def __init__(self) -> None:
        self._calls: set[LiveCall] = set()

    @contextmanager
    def during(self, call: LiveCall) -> Iterator[None]:
        """Watch a call while it is served within this context.

        Raises:
            AccessDenied: the caller may no longer do what it does. The code within the context is cancelled.
        """
        call.task = asyncio.current_task()
        self._calls.add(call)
        try:
            yield
        except asyncio.CancelledError:
            if call.denied is None:
                raise
            assert call.task is not None
            call.task.uncancel()
            raise call.denied from None
        finally:
            self._calls.discard(call)

    def check(self) -> None:
        """End the calls whose callers may no longer do what they do."""
        for call in tuple(self._calls):
            try:
                call.check()
            except AccessDenied as error:
                if call.denied is None and call.task is not None:
                    call.denied = error
                    call.task.cancel()
