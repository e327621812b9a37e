"""What a middleware knows of one call of a handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.pop.client.message import Message


@dataclass(slots=True)
class HandlerCall:
    """One call of a handler, as its middlewares see it.

    Parameters:
        messages: The messages: one, or those of the batch.
        bodies: Their decoded bodies, in order. A middleware may replace them.
        handler: Name of the handler.
        group: Name of the group.
    """

    messages: Sequence[Message]
    bodies: list[Any]
    handler: str
    group: str

    @property
    def message(self) -> Message:
        """The first message."""
        return self.messages[0]


CallNext = Callable[[HandlerCall], Awaitable[Any]]
"""Calls the next middleware, or the handler. Returns what the handler returns."""

Middleware = Callable[[HandlerCall, CallNext], Awaitable[Any]]
"""Surrounds each call of a handler: `async def middleware(call, call_next)`.

It awaits `call_next(call)`, possibly several times, or not at all: then the message counts as handled. What it raises has the
effect of the handler's exceptions."""


def check_middleware(middleware: Sequence[Middleware]) -> list[Middleware]:
    """Return middlewares as a list. Raises TypeError if one of them can't be called with a call of a handler."""
    for each in middleware:
        if isinstance(each, type):
            raise TypeError(f"the middleware {each.__name__} is a class: pass an instance, such as {each.__name__}()")
        if not callable(each):
            raise TypeError(f"the middleware {each!r:.80} can't be called: pass `async def middleware(call, call_next)`")
    return [*middleware]
