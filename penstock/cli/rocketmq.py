"""`penstock rocketmq`: the RocketMQ clients of a running node."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from penstock.cli.arguments import Commands, add_command, add_json, add_node, data_dir_of, message_id
from penstock.cli.commandparser import EXIT_FAILED
from penstock.cli.output import cells_of, print_line, print_rows
from penstock.node.controladdress import CLIENT_RECONNECT, CLIENT_THREADS, CLIENT_VERIFY, CLIENTS


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "rocketmq", "List the RocketMQ clients of a running node, and give one of them a command.")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    action = add_command(actions, "clients", "List RocketMQ clients that use the node.")
    add_json(action)
    _finish(action, _list)

    action = add_command(actions, "threads", "Print what the threads of a client do, as the client describes it.")
    _add_client(action)
    _finish(action, _threads)

    action = add_command(
        actions,
        "verify",
        "Give a message to the listener of a push consumer. Groups do not change. The exit status is 0 if it succeeds, else 1.",
    )
    _add_client(action)
    action.add_argument("message_id", type=message_id, help="Id of a stored message, as `penstock pop` prints it.")
    _finish(action, _verify)

    action = add_command(actions, "reconnect", "Tell a client to connect again, for example behind a load balancer.")
    _add_client(action)
    _finish(action, _reconnect)


def _add_client(action: argparse.ArgumentParser) -> None:
    action.add_argument("client", help="Id of the client, as `penstock rocketmq clients` prints it.")


def _finish(action: argparse.ArgumentParser, run: object) -> None:
    add_node(action, "data_dir")
    action.set_defaults(run=run)


def _list(options: argparse.Namespace) -> int:
    list_clients(data_dir_of(options), as_json=options.json)
    return 0


def _threads(options: argparse.Namespace) -> int:
    print_threads(data_dir_of(options), options.client)
    return 0


def _verify(options: argparse.Namespace) -> int:
    return 0 if verify(data_dir_of(options), options.client, options.message_id) else EXIT_FAILED


def _reconnect(options: argparse.Namespace) -> int:
    reconnect(data_dir_of(options), options.client)
    return 0


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
    from penstock.node.controlclient import Request

    with Request(data_dir, method, f"{path}?{urlencode(query)}" if query else path) as request:
        return request.line()
