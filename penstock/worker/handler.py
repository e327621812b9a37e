"""A handler: a function of the application, and how it is called with a message."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from penstock.pop.client.message import Message
from penstock.pop.client.received import ReceivedMessage
from penstock.worker.codecs import Codec, codec_of, decoded
from penstock.worker.errors import HandlerInvalid

BODY = "body"
MESSAGE = "message"

_ONLY_BODY = (BODY,)


@dataclass(frozen=True, slots=True)
class Handler:
    """A function that handles messages.

    Parameters:
        function: The function.
        name: Its name, for the log.
        is_async: Whether it is a coroutine function. Others run in threads.
        takes: For each positional argument, `"body"` or `"message"`.
        codec: Decodes the body; None if no argument takes it.
        batch: Whether it takes lists, of up to so many messages; 0 if it takes one message.
        settles: Whether it settles its messages itself. Those that it has not settled when it returns come back at their
            deadline, unless something else settles them until then. Otherwise the worker acknowledges these.
    """

    function: Callable[..., Any]
    name: str
    is_async: bool
    takes: tuple[str, ...]
    codec: Codec | None
    batch: int
    settles: bool = False

    def body_of(self, message: Message) -> Any:
        """Return the decoded body of a message; None if the handler takes no body. Raises Undecodable."""
        return None if self.codec is None else decoded(self.codec, message.body)

    def bodies_of(self, messages: Sequence[Message]) -> list[Any]:
        """Return the decoded bodies of messages, as `body_of` does. Raises what the codec raises."""
        codec = self.codec
        if codec is None:
            return [None] * len(messages)
        return [codec(message.body) for message in messages]

    def arguments(self, messages: Sequence[Message], bodies: Sequence[Any]) -> list[Any]:
        """Return the arguments of a call."""
        if self.takes == _ONLY_BODY:  # The most frequent case, without a loop.
            return [list(bodies) if self.batch else bodies[0]]
        if self.batch:
            return [list(bodies) if each == BODY else list(messages) for each in self.takes]
        return [bodies[0] if each == BODY else messages[0] for each in self.takes]


def handler_of(function: Callable[..., Any], *, batch: int = 0, codec: Codec | None = None) -> Handler:
    """Return the handler that a function is.

    An argument that is annotated with `Message` gets the message; the other one gets the body. With `batch`, the annotations
    are `list[Message]` and `list[BODY]`.

    Raises:
        HandlerInvalid: The function takes no argument, or too many, or its annotations make no sense.
    """
    name = getattr(function, "__qualname__", repr(function))
    if codec is not None and not callable(codec):
        raise HandlerInvalid(f"the codec of {name} is {codec!r:.80}: give a function that takes bytes and returns the body")
    if not callable(function) or inspect.isclass(function):
        raise HandlerInvalid(f"{name} is no function: decorate a function or a coroutine function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise HandlerInvalid(f"{name} is a generator: a handler returns, and does not yield")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(function).parameters.values())
    required = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_POSITIONAL]
    taken = [each for each in required if each.kind in positional]
    if len(taken) != len(required) or not 1 <= len(taken) <= 2:
        raise HandlerInvalid(
            f"{name} must take one argument (the body or the message) or two (both), and not {len(required)}; "
            "further arguments need defaults"
        )
    hints = _hints(function, name)
    takes: list[str] = []
    found: Codec | None = None
    for parameter in taken:
        annotation = hints.get(parameter.name)
        if batch:
            annotation = _item_of(annotation, parameter.name, name)
        if isinstance(annotation, type) and issubclass(annotation, ReceivedMessage):
            takes.append(MESSAGE)
        else:
            takes.append(BODY)
            found = codec or codec_of(annotation)
    if len(takes) != len(set(takes)):
        raise HandlerInvalid(f"{name} takes two arguments of one kind: annotate the one that is the message with Message")
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    return Handler(function, name, inspect.iscoroutinefunction(called), tuple(takes), found, batch)


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
    except NameError as error:
        raise HandlerInvalid(
            f"an annotation of {name} names nothing that its module knows ({error}): import the type outside of "
            "`if TYPE_CHECKING`"
        ) from error


def _item_of(annotation: Any, argument: str, name: str) -> Any:
    if annotation is None or annotation is list:
        return None
    if get_origin(annotation) is not list:
        raise HandlerInvalid(f"{name} takes batches, so annotate {argument} with list[...], not with {annotation!r}")
    return get_args(annotation)[0]
