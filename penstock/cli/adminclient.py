"""The command's side of the admin listener."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar

import orjson

from penstock.cli.endpoint import ADMIN, Endpoint, why_unconnected
from penstock.cli.login import UserPassword

T = TypeVar("T")

ANSWER_S = 10.0
"""Seconds for a connection, and for each part of an answer."""


class AdminClient:
    """Reads from the admin listener of a node, with a connection for each request, so that it may restart in between.

    Parameters:
        node: its admin listener.
        login: user name and password; None for the token of the endpoint, or for nothing.

    Raises:
        ValueError, OSError: as `Endpoint.context` raises them.
    """

    def __init__(self, node: Endpoint, login: UserPassword | None) -> None:
        self._node = node
        self._context = node.context() if node.has_tls else None
        self._headers = {}
        if login is not None:
            credentials = base64.b64encode(":".join(login).encode()).decode()
            self._headers["Authorization"] = f"Basic {credentials}"
        elif node.token:
            self._headers["Authorization"] = f"Bearer {node.token}"

    def get(self, path: str) -> tuple[int, bytes]:
        """Return what `request` does for a GET."""
        return self.request("GET", path)

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Return the status and the body of an answer. `body` is JSON.

        Raises:
            ConnectionError: no admin listener answers.
            PermissionError: the node does not show this to whoever asks.
        """
        connection, response = self._open(method, path, body)
        with closing(connection):
            return response.status, self._read(response.read)

    def lines(self, path: str) -> Iterator[tuple[int, bytes]]:
        """Yield the status, and a line, for each line of an answer that goes on. Raises as `request`."""
        connection, response = self._open("GET", path, None)
        with closing(connection):
            while line := self._read(response.readline):
                yield response.status, line

    def _open(self, method: str, path: str, body: bytes | None) -> tuple[HTTPConnection, HTTPResponse]:
        """Send a request, and return the connection with the beginning of the answer. Raises as `request`."""
        host, port = self._node.address.host, self._node.address.port
        connection = (
            HTTPSConnection(host, port, timeout=ANSWER_S, context=self._context)
            if self._context is not None
            else HTTPConnection(host, port, timeout=ANSWER_S)
        )
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        try:
            self._read(lambda: connection.request(method, path, body, headers))
            response = self._read(connection.getresponse)
            if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.MISDIRECTED_REQUEST):
                why, remedy = _why(self._read(response.read)), self._remedy(response.status)
                raise PermissionError(f"The admin listener on {self._node.address} refuses the request: {why}.{remedy}")
        except BaseException:
            connection.close()
            raise
        return connection, response

    def _remedy(self, status: int) -> str:
        """Return what to do about a refusal, after a space. Only the reason itself says it for a host that is not known."""
        if status == HTTPStatus.FORBIDDEN:
            return " Give --token-file FILE or --user NAME of somebody who may do this."
        if status != HTTPStatus.UNAUTHORIZED:
            return ""
        if not self._headers:
            return " Give --token-file FILE or --user NAME."
        return " Check the token or the password: it is that of a flag, a variable (PENSTOCK_...) or the context."

    def _read(self, step: Callable[[], T]) -> T:
        """Return the result of a step that uses the connection. Raises ConnectionError if nobody answers as HTTP does."""
        try:
            return step()
        except HTTPException as error:
            raise ConnectionError(why_unconnected(self._node, ADMIN, None)) from error
        except OSError as error:
            raise ConnectionError(why_unconnected(self._node, ADMIN, error)) from error


def _why(body: bytes) -> str:
    """Return the reason that an answer states."""
    try:
        return str(orjson.loads(body)["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "it gives no reason"


PATH = "/api/v1/state"


def state_reader(node: Endpoint, login: UserPassword | None) -> Callable[[], dict[str, Any]]:
    """Return a function that reads the state of a node.

    It raises NodeUnreadable if the node does not answer, or does not show its state to whoever asks.

    Args:
        node: its admin listener.
        login: see `AdminClient`.

    Raises:
        ValueError, OSError: as `Endpoint.context` raises them.
    """
    from penstock.spark.errors import NodeUnreadable

    client = AdminClient(node, login)

    def read() -> dict[str, Any]:
        try:
            status, body = client.get(PATH)
        except (ConnectionError, PermissionError) as error:
            raise NodeUnreadable(str(error)) from error
        try:
            state = orjson.loads(body)
        except orjson.JSONDecodeError:
            state = None
        if status != HTTPStatus.OK or not isinstance(state, dict) or "listen" not in state:
            raise NodeUnreadable(
                f"The HTTP server on {node.address} is no Penstock node: give --admin the node's admin.listen."
            )
        return state

    return read
