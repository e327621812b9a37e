"""Bodies that are not what a handler takes make dead letters, whatever the acknowledgement policy says."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from faststream.middlewares import BaseMiddleware
from faststream.response import PublishCommand

from penstock.pop.client.message import Message
from penstock.pop.errors import PopError
from penstock.worker.codecs import undecodable
from penstock.worker.errors import Undecodable

logger = logging.getLogger("penstock.faststream")

VALIDATION_ERRORS = ("ValidationError", "RequestValidationError")
"""Names of the exceptions with which pydantic, msgspec, FastDepends and FastAPI say that arguments are not valid."""


class HandlerProgress:
    """How far the processing of one message has got. It is shared with the threads of plain functions."""

    __slots__ = ("began",)

    def __init__(self) -> None:
        self.began = False
        """True after the handler was called, so that what is raised is the handler's."""


PROGRESS: ContextVar[HandlerProgress] = ContextVar("penstock_handler_progress")


def noting_calls(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler that notes its calls in `PROGRESS`."""
    if inspect.iscoroutinefunction(handler):

        @functools.wraps(handler)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            _note_call()
            return await handler(*args, **kwargs)

        return call_async

    @functools.wraps(handler)
    def call(*args: Any, **kwargs: Any) -> Any:
        _note_call()
        return handler(*args, **kwargs)

    return call


def _note_call() -> None:
    progress = PROGRESS.get(None)
    if progress is not None:
        progress.began = True


class UndecodableBodies(BaseMiddleware[PublishCommand, Message | None]):
    """Makes a dead letter of a message whose body can't be decoded, or is not valid, before its handler was called."""

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool | None:
        if self.msg is not None and exc_val is not None and not self.msg.is_settled and _is_about_the_body(exc_val):
            error = exc_val if isinstance(exc_val, Undecodable) else undecodable(self.msg.body, exc_val)
            logger.error("message %s from %r becomes a dead letter: %s", self.msg.message_id, self.msg.topic, error)
            try:
                await self.msg.dead_letter(reason=str(error))
            except PopError as refused:
                logger.warning("message %s comes back at its deadline: %s", self.msg.message_id, refused)
        return False


def _is_about_the_body(error: BaseException) -> bool:
    if isinstance(error, Undecodable):
        return True
    progress = PROGRESS.get(None)
    names = {each.__name__ for each in type(error).__mro__}
    return progress is not None and not progress.began and not names.isdisjoint(VALIDATION_ERRORS)
