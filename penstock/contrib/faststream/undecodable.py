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
    """How far the processing of one message or batch has got. It is shared with the threads of plain functions.

    Parameters:
        can_split: It is a batch of several messages.
    """

    __slots__ = ("began", "can_split", "must_split")

    def __init__(self, *, can_split: bool = False) -> None:
        self.began = False
        """True after the handler was called, so that what is raised is the handler's."""
        self.can_split = can_split
        self.must_split = False
        """True after a body of the batch turned out to be not valid. Nothing settles the batch then."""


PROGRESS: ContextVar[HandlerProgress] = ContextVar("penstock_handler_progress")


def is_split() -> bool:
    """Return whether the batch that is being processed must be split, so that nothing may settle it as a whole."""
    progress = PROGRESS.get(None)
    return progress is not None and progress.must_split


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


class UndecodableBodies(BaseMiddleware[PublishCommand, Message | list[Message] | None]):
    """Makes a dead letter of a message whose body can't be decoded, or is not valid, before its handler was called.

    A batch with such a body must be split instead.
    """

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool | None:
        if self.msg is None or exc_val is None or not _is_about_the_body(exc_val):
            return False
        progress = PROGRESS.get(None)
        if progress is not None and progress.can_split:
            progress.must_split = True
            return True
        message = self.msg[0] if isinstance(self.msg, list) else self.msg
        if not message.is_settled:
            error = exc_val if isinstance(exc_val, Undecodable) else undecodable(message.body, exc_val)
            logger.error("message %s from %r becomes a dead letter: %s", message.message_id, message.topic, error)
            try:
                await message.dead_letter(reason=str(error))
            except PopError as refused:
                logger.warning("message %s comes back at its deadline: %s", message.message_id, refused)
        return False


def _is_about_the_body(error: BaseException) -> bool:
    if isinstance(error, Undecodable):
        return True
    progress = PROGRESS.get(None)
    names = {each.__name__ for each in type(error).__mro__}
    return progress is not None and not progress.began and not names.isdisjoint(VALIDATION_ERRORS)
