"""`penstock client`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from penstock.cli.actions.output import cells_of, print_line, print_rows
from penstock.node.controladdress import CLIENT_RECONNECT, CLIENT_THREADS, CLIENT_VERIFY, CLIENTS
from penstock.node.controlclient import Request

_COLUMNS = ("client", "type", "language", "version", "listens", "heard_ms_ago")


def list_clients(data_dir: Path, *, as_json: bool) -> None:
    """Print RocketMQ's clients that use the node on a data directory."""
    clients: list[dict[str, Any]] = _ask(data_dir, "GET", CLIENTS)["clients"]
    print_rows(clients, [cells_of(client, _COLUMNS) for client in clients], _COLUMNS, as_json=as_json, out=sys.stdout)


def print_threads(data_dir: Path, client: str) -> None:
    """Print what the threads of a client do. Raises ControlRefused if the client does not tell."""
    print_line(str(_ask(data_dir, "POST", CLIENT_THREADS, client=client)["threads"]))


def verify(data_dir: Path, client: str, message_id: str) -> bool:
    """Print and return whether the listener of a client succeeds with a message. Raises ControlRefused if it does not tell."""
    succeeds = bool(_ask(data_dir, "POST", CLIENT_VERIFY, client=client, message_id=message_id)["succeeds"])
    print("the listener succeeds" if succeeds else "the listener fails")
    return succeeds


def reconnect(data_dir: Path, client: str) -> None:
    """Tell a client to connect again. Raises ControlRefused if the client does not listen."""
    _ask(data_dir, "POST", CLIENT_RECONNECT, client=client)


def _ask(data_dir: Path, method: str, path: str, **query: str) -> dict[str, Any]:
    with Request(data_dir, method, f"{path}?{urlencode(query)}" if query else path) as request:
        return request.line()
