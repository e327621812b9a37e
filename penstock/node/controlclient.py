"""The command's side of the control socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from penstock.node.controladdress import SOCKET, address_of
from penstock.node.errors import ControlRefused, NodeNotRunning

TIMEOUT_S = 600.0
"""Seconds that a command waits for an answer. Before it holds its files, a node flushes its index."""


class _UnixConnection(HTTPConnection):
    def __init__(self, data_dir: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._data_dir = data_dir

    def connect(self) -> None:
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connecting.settimeout(self.timeout)
            with address_of(self._data_dir) as address:
                connecting.connect(address)
        except BaseException:
            connecting.close()
            raise
        self.sock = connecting


class Request:
    """A request on the control socket of a node, and its response. Its end closes the connection.

    Parameters:
        data_dir: of the node.
        method, path: as in `penstock.node.control.Routes`, or of the admin API.
        body: JSON; None for none.

    Raises:
        NodeNotRunning: no node listens there.
        ControlRefused: the node refuses, or ends before it answers.
        PermissionError: the node belongs to another user.
    """

    def __init__(self, data_dir: Path, method: str, path: str, body: bytes | None = None) -> None:
        self._data_dir = data_dir
        self._connection = _UnixConnection(data_dir)
        try:
            self._connection.connect()
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NodeNotRunning(
                f"no node listens on {data_dir / SOCKET}; start it, or give its data directory (--data-dir)"
            ) from error
        except PermissionError as error:
            raise PermissionError(
                f"{data_dir / SOCKET} belongs to another user; run this command as the node's user"
            ) from error
        try:
            self._response = self._send(method, path, body)
        except BaseException:
            self._connection.close()
            raise

    def _send(self, method: str, path: str, body: bytes | None) -> HTTPResponse:
        try:
            self._connection.request(method, path, body, {} if body is None else {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            if response.status != HTTPStatus.OK:
                raise ControlRefused(str(orjson.loads(response.read())["error"]))
        except (HTTPException, OSError, ValueError, KeyError) as error:
            raise ControlRefused(
                f"the node on {self._data_dir} gave no answer that can be read ({error!r}); look at its log"
            ) from error
        return response

    def line(self) -> dict[str, Any]:
        """Return the next line of the response, a JSON object. Raises ControlRefused if the node has ended the connection."""
        try:
            line = self._response.readline()
            found: dict[str, Any] = orjson.loads(line)
        except (HTTPException, OSError, ValueError) as error:
            raise ControlRefused(f"the node on {self._data_dir} has ended the connection; look at its log") from error
        return found

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the response until its end. Raises ControlRefused if the connection ends before."""
        while self._response.peek(1):
            yield self.line()

    def close(self) -> None:
        """Close the connection, which ends what the node does for it."""
        self._response.close()
        self._connection.close()

    def __enter__(self) -> Request:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
