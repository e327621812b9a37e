"""`penstock access`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson

from penstock.access.actions import TERMS
from penstock.access.explain import explained
from penstock.access.file import load_access_policy
from penstock.access.subject import Subject
from penstock.cli.actions.output import cells_of, print_line, print_rows, time_of
from penstock.node.controladdress import ACCESS_BANS, ACCESS_KICK, ACCESS_RELOAD, ACCESS_TEST
from penstock.node.controlclient import Request


@dataclass(frozen=True, slots=True)
class RightAsked:
    """What is tested.

    Parameters:
        user: user name, or empty.
        what: an action, `read` or `write`.
        name: topic, filter or group.
        client, address: of the client, or empty.
        roles: that a token or a certificate states.
    """

    user: str
    what: str
    name: str
    client: str
    address: str
    roles: tuple[str, ...]


def reload_access(data_dir: Path) -> None:
    """Let the node of a data directory read its files of access control again. Raises ControlRefused if one is invalid."""
    found = _ask(data_dir, "POST", ACCESS_RELOAD, {})
    print_line(f"reloaded: {found['rules']} rules, {found['users']} users, {found['bans']} bans")


def test_access(asked: RightAsked, data_dir: Path, file: Path | None, *, as_json: bool) -> bool:
    """Print whether somebody may do something, and why; return whether all of it is allowed.

    Args:
        asked: see `RightAsked`.
        data_dir: of a running node.
        file: an access file to test instead of what is in force in the node; None for the node.
        as_json: print JSON, one object a line.

    Raises:
        AccessInvalid: the file is not valid.
    """
    policy = load_access_policy(file) if file is not None else None
    subject = Subject(asked.user, frozenset(asked.roles), asked.client, asked.address)
    is_allowed = True
    for action in TERMS[asked.what] if asked.what in ("read", "write") else (asked.what,):
        if policy is not None:
            found = explained(policy, subject, action, asked.name)
        else:
            query = {"user": asked.user, "client": asked.client, "address": asked.address, "role": asked.roles}
            found = _ask(data_dir, "GET", ACCESS_TEST, query | {"action": action, "name": asked.name})
        is_allowed = is_allowed and found["allowed"]
        if as_json:
            print_line(orjson.dumps({"action": action} | found).decode())
        else:
            print_line(f"{'allowed' if found['allowed'] else 'denied'}  {action}: {found['why']}")
    return is_allowed


def ban(data_dir: Path, kind: str, name: str, for_ms: int, why: str) -> None:
    """Ban a user, a client id or an address, and print until when."""
    found = _ask(data_dir, "POST", ACCESS_BANS, {kind: name, "for_ms": for_ms, "why": why})
    print_line(f"banned {kind} {found['name']} {_until(found['until_ms'])}")


def lift_ban(data_dir: Path, kind: str, name: str) -> None:
    """Lift a ban."""
    print_line(f"lifted the ban of {kind} {_ask(data_dir, 'DELETE', ACCESS_BANS, {kind: name})['name']}")


def print_bans(data_dir: Path, *, as_json: bool) -> None:
    """Print the bans of a node."""
    rows = _ask(data_dir, "GET", ACCESS_BANS, {})["bans"]
    shown = [row | {"since": time_of(row["since_ms"]), "until": time_of(row["until_ms"])} for row in rows]
    columns = ("kind", "name", "since", "until", "why")
    print_rows(rows, (cells_of(row, columns) for row in shown), columns, as_json=as_json, out=sys.stdout)


def kick(data_dir: Path, kind: str, name: str) -> None:
    """Disconnect clients and end calls, and print how many."""
    found = _ask(data_dir, "POST", ACCESS_KICK, {kind: name})
    print_line(f"disconnected {found['clients']} clients of MQTT, ended {found['calls']} calls over gRPC")


def _until(until_ms: int) -> str:
    return f"until {time_of(until_ms)}" if until_ms else "until the ban is lifted"


def _ask(data_dir: Path, method: str, path: str, query: Mapping[str, Any]) -> dict[str, Any]:
    with Request(data_dir, method, f"{path}?{urlencode(query, doseq=True)}") as request:
        return request.line()
