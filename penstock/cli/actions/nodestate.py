"""The state of a running node, as a reconciliation compares it with the log."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import orjson

from penstock.cli.actions.adminclient import AdminClient
from penstock.cli.actions.endpoint import Endpoint
from penstock.cli.actions.login import UserPassword
from penstock.spark.errors import NodeUnreadable

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
