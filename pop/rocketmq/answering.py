"""How a method answers: which client calls it, and how an error becomes the status of its response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

import grpc.aio

from penstock.pop.access.caller import CALLER, note_call
from penstock.pop.access.refusals import CallRefused
from penstock.pop.rocketmq.agents import Agent
from penstock.pop.rocketmq.clients import ConnectedClient, ConnectedClients
from penstock.pop.rocketmq.status import Code, code_of, detail_of
from penstock.pop.rocketmq.stubs import pb

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

CLIENT_ID_KEY = "x-mq-client-id"
LANGUAGE_KEY = "x-mq-language"
VERSION_KEY = "x-mq-client-version"


class Callers:
    """Finds the client that makes a call.

    Parameters:
        clients: The clients that use the node.
        now_ms: Returns the current time in ms.
    """

    def __init__(self, clients: ConnectedClients, now_ms: Callable[[], int]) -> None:
        self._clients = clients
        self._now_ms = now_ms

    def of(self, context: Context) -> ConnectedClient:
        """Return the client that makes a call, and note the call. A client id of two principals names two clients.

        Raises:
            Refused: As `ConnectedClients.heard_from`.
        """
        note_call(context)
        client_id = _metadata(context, CLIENT_ID_KEY)
        caller = CALLER.get()
        principal = caller.subject.user if caller is not None else ""
        client = self._clients.heard_from(f"{principal}:{client_id}" if principal and client_id else client_id, self._now_ms())
        client.rights = caller
        if client.agent is None:
            client.agent = Agent.of(_metadata(context, LANGUAGE_KEY), _metadata(context, VERSION_KEY))
        return client


class HasCallers(Protocol):
    """A part of the service whose methods know their callers."""

    callers: Callers


def status(code: Code = Code.OK, detail: str = "") -> Any:
    """Return the status of a response."""
    return pb.Status(code=code, message=detail)


def status_of(error: Exception) -> Any:
    """Return the status that tells a client of an error. An unforeseen error is logged."""
    return status(code_of(error), detail_of(error))


def answered(response: Any, *echoed: str) -> Callable[[Any], Any]:
    """Make a gRPC method of a method that takes a request and its client, and returns a response or raises.

    Args:
        response: Class of the response. An error becomes the status of an empty one.
        echoed: Fields of the request that such a response repeats.
    """

    def wrap(
        serve: Callable[[Any, Any, ConnectedClient], Awaitable[Any]],
    ) -> Callable[[HasCallers, Any, Context], Awaitable[Any]]:
        async def method(self: HasCallers, request: Any, context: Context) -> Any:
            try:
                return await serve(self, request, self.callers.of(context))
            except Exception as error:  # The response states each error. `code_of` logs an unforeseen one.
                refused = response(status=status_of(error), **{field: getattr(request, field) for field in echoed})
                raise CallRefused(response=refused) from error

        return method

    return wrap


def _metadata(context: Context, name: str) -> str:
    """Return a value of the call's metadata, or an empty string."""
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""
