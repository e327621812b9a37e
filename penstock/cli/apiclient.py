"""The command's side of the admin API: over the admin listener of a node, or the control socket in its data directory."""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import orjson

from penstock.cli.arguments import add_node, data_dir_of, endpoint, login, node_settings
from penstock.node.controlclient import Request
from penstock.node.errors import ControlRefused, NodeNotRunning

PREFIX = "/api/v1"

ROWS_MAX: Final = 1_000
"""Rows that one request asks for at most."""


def add_api(command: argparse.ArgumentParser) -> None:
    """Add the arguments that name the node whose API a command calls.

    A command that names a data directory, by its flag, its variable or a context, or that names no node at all, acts as the
    user of the node on this machine. One that names an admin listener acts as whoever the token or the password says.
    """
    add_node(command, "admin", "data_dir")


def is_remote(options: argparse.Namespace) -> bool:
    """Return whether the options of `add_api` name an admin listener, and no data directory. Raises SettingInvalid."""
    settings = node_settings(options, "admin")
    has_directory = options.data_dir is not None or settings.is_given("data_dir")
    return options.admin is not None or (settings.is_given("admin") and not has_directory)


class ApiClient:
    """Calls the admin API of a node.

    Parameters:
        options: of a command that `add_api` has given its arguments.

    Raises:
        ValueError, OSError: as `Endpoint.context` raises them.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._data_dir: Path | None = None
        if is_remote(options):
            from penstock.cli.adminclient import AdminClient

            self._listener = AdminClient(endpoint(options, "admin"), login(options, "admin"))
        else:
            self._data_dir = data_dir_of(options)

    def get(self, path: str, **query: object) -> Any:
        """Return what the node answers to a question. Raises as `call`."""
        return self.call("GET", path, query)

    def rows(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield all rows of a listing. Raises as `pages`."""
        for page in self.pages(path, **query):
            yield from page["items"]

    def pages(self, path: str, *, limit: int | None = None, after: str = "", **query: object) -> Iterator[dict[str, Any]]:
        """Yield the pages of a listing.

        Args:
            path: below `/api/v1`.
            limit: the maximum number of rows; None for all.
            after: `next` of a page, to begin after it.
            query: parameters besides. Those that are empty are left out.

        Raises:
            ControlRefused, ConnectionError, PermissionError, NodeNotRunning: as `call`. The text tells whether rows have come.
        """
        come = 0
        next_after: str | None = after
        while next_after is not None and (limit is None or come < limit):
            asked = ROWS_MAX if limit is None else min(limit - come, ROWS_MAX)
            try:
                page = self.get(path, limit=asked, after=next_after, **query)
            except (ControlRefused, ConnectionError, PermissionError, NodeNotRunning) as error:
                if not come:
                    raise
                raise type(error)(f"the listing ends early, after {come} rows: {error}") from error
            yield page
            come += len(page["items"])
            next_after = page["next"]

    def call(self, method: str, path: str, query: Mapping[str, object] | None = None, body: object = None) -> Any:
        """Return what the node answers.

        Args:
            method: of HTTP.
            path: below `/api/v1`; `escaped` makes a part of it.
            query: parameters. Those that are empty are left out.
            body: what orjson can encode; None for none.

        Raises:
            ControlRefused: the node refuses. The text says why.
            ConnectionError, PermissionError, NodeNotRunning: as `AdminClient` and `Request`.
        """
        target = _target(path, query)
        data = orjson.dumps(body) if body is not None else None
        if self._data_dir is not None:
            with _on_socket(self._data_dir, method, target, data) as request:
                return request.line()
        return _decoded(path, *self._listener.request(method, target, data))

    def stream(self, path: str, **query: object) -> Generator[Any]:
        """Yield the lines of a stream until the node ends it. Raises as `call`."""
        target = _target(path, query)
        if self._data_dir is not None:
            with _on_socket(self._data_dir, "GET", target) as request:
                yield from request.lines()
            return
        for status, line in self._listener.lines(target):
            yield _decoded(path, status, line)


def _target(path: str, query: Mapping[str, object] | None) -> str:
    given = {name: value for name, value in (query or {}).items() if value not in (None, "", [])}
    return PREFIX + path + (f"?{urlencode(given, doseq=True)}" if given else "")


def _on_socket(data_dir: Path, method: str, target: str, body: bytes | None = None) -> Request:
    """Return a request on the control socket. Raises as `Request`; these commands can also reach a node elsewhere."""
    try:
        return Request(data_dir, method, target, body)
    except NodeNotRunning as error:
        raise NodeNotRunning(f"{error}, or the address of its admin listener (--admin)") from error


def _decoded(path: str, status: int, answer: bytes) -> Any:
    """Return what an answer of the admin listener says. Raises ControlRefused if it says that the node refuses."""
    try:
        decoded = orjson.loads(answer)
    except orjson.JSONDecodeError:
        raise ControlRefused(
            f"the server that answers {path} is no Penstock node: give --admin the node's admin.listen"
        ) from None
    if status != HTTPStatus.OK:
        raise ControlRefused(str(decoded.get("error", answer)) if isinstance(decoded, dict) else str(answer))
    return decoded


def escaped(name: str) -> str:
    """Return a name as a part of a path. Raises ValueError for none, which would make the path one of something else."""
    if not name:
        raise ValueError("the name is empty, as that of a variable of the shell that is not set; give one")
    return quote(name, safe="")
