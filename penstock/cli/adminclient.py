"""The command's side of the admin listener."""

from __future__ import annotations

import base64
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Any

import orjson

from penstock.cli.endpoint import ADMIN, Endpoint, why_unconnected
from penstock.cli.login import UserPassword

if TYPE_CHECKING:
    pass


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
        host, port = self._node.address.host, self._node.address.port
        connection = (
            HTTPSConnection(host, port, timeout=ANSWER_S, context=self._context)
            if self._context is not None
            else HTTPConnection(host, port, timeout=ANSWER_S)
        )
        try:
            headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            status, answer = response.status, response.read()
        except HTTPException as error:
            raise ConnectionError(why_unconnected(self._node, ADMIN, None)) from error
        except OSError as error:
            raise ConnectionError(why_unconnected(self._node, ADMIN, error)) from error
        finally:
            connection.close()
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.MISDIRECTED_REQUEST):
            raise PermissionError(
                f"The admin listener on {self._node.address} refuses the request: {_why(answer)}. Set PENSTOCK_TOKEN, or give "
                "--user NAME."
            )
        return status, answer


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
