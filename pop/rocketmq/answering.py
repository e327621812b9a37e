"""The client that calls a method, and the status of a response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.pop.access.caller import CALLER
from penstock.pop.grpc.calls import Context
from penstock.pop.rocketmq.agents import Agent
from penstock.pop.rocketmq.clients import ConnectedClient, ConnectedClients
from penstock.pop.rocketmq.status import Code, code_of, detail_of
from penstock.pop.rocketmq.stubs import pb

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
        """Return the client that makes a call. A client id of two principals names two clients.

        Raises:
            Refused: As `ConnectedClients.heard_from`.
        """
        client_id = _metadata(context, CLIENT_ID_KEY)
        caller = CALLER.get()
        principal = caller.subject.user if caller is not None else ""
        client = self._clients.heard_from(f"{principal}:{client_id}" if principal and client_id else client_id, self._now_ms())
        client.rights = caller
        if client.agent is None:
            client.agent = Agent.of(_metadata(context, LANGUAGE_KEY), _metadata(context, VERSION_KEY))
        return client


def status(code: Code = Code.OK, detail: str = "") -> Any:
    """Return the status of a response."""
    return pb.Status(code=code, message=detail)


def status_of(error: Exception) -> Any:
    """Return the status that tells a client of an error. An unforeseen error is logged."""
    return status(code_of(error), detail_of(error))


def _metadata(context: Context, name: str) -> str:
    """Return a value of the call's metadata, or an empty string."""
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""
