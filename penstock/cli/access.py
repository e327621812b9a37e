"""`penstock access`: reloads, tests and enforces the access control of a running node."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.cli.apiclient import ApiClient, add_api, escaped
from penstock.cli.arguments import Commands, add_command, duration
from penstock.cli.listing import add_bounds, finish, pages_of, print_listing, rows_of
from penstock.cli.output import cells_of, print_line, print_rows, time_of

USER_COLUMNS: Final = ("user", "has_password", "is_principal", "roles")
RULE_LISTS: Final = ("actions", "users", "roles", "clients", "addresses", "topics", "groups")
"""Fields of a rule that are lists of names."""

_KINDS: Final = ("user", "client", "address")
_ACTIONS: Final = ("publish", "subscribe", "receive", "send", "pop", "consume", "admin", "read", "write")


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "access", "Reload, test and enforce the access control of a running node.")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    action = add_command(
        actions,
        "reload",
        "Read the access file, the password file and the keys again, if all are valid. Clients that may do less are stopped.",
    )
    _finish(action, _reload)

    action = add_command(
        actions,
        "test",
        "Say whether a user may do something, and which rule decides. The exit status is 0 if so, else 1.",
    )
    action.add_argument("user", help="User name; '' for a client without one.")
    action.add_argument("what", choices=_ACTIONS, metavar="WHAT", help=f"Action: {', '.join(_ACTIONS)}.")
    action.add_argument("name", help="Topic, topic filter, or name of a group.")
    action.add_argument("--client", default="", metavar="ID", help="Client id of MQTT.")
    action.add_argument("--address", default="", metavar="IP", help="IP address of the client.")
    action.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="ROLE",
        help="Role of a token or a certificate. May be repeated.",
    )
    action.add_argument(
        "--file", type=Path, metavar="FILE", help="Test this access file, without a node, instead of what is in force."
    )
    action.add_argument("--json", action="store_true", help="Print one JSON object per action.")
    _finish(action, _test)

    action = add_command(actions, "ban", "Refuse a user, a client id or an address, and disconnect whom it concerns.")
    _add_named(action)
    action.add_argument(
        "--for",
        dest="for_ms",
        type=_lasting,
        default=0,
        metavar="TIME",
        help="How long: 90s, 30m, 12h or 7d (for ever).",
    )
    action.add_argument("--why", default="", metavar="TEXT", help="A note, for `penstock access bans` and the audit log.")
    _finish(action, _ban)

    action = add_command(actions, "lift", "Lift a ban.")
    _add_named(action)
    _finish(action, _lift)

    action = add_command(actions, "bans", "Print all bans.")
    action.add_argument("--json", action="store_true", help="Print one JSON object per line.")
    _finish(action, _bans)

    action = add_command(actions, "users", "List the users that the password file and the access file name, with their roles.")
    action.add_argument("--contains", default="", metavar="TEXT", help="A text in the user name.")
    add_bounds(action, "user")
    finish(action, _users)

    action = add_command(actions, "rules", "List the rules in force. The first one that applies decides.")
    add_bounds(action, "number")
    finish(action, _rules)

    action = add_command(actions, "kick", "Disconnect clients. They may connect again.")
    _add_named(action)
    _finish(action, _kick)


def _lasting(text: str) -> int:
    """Return the milliseconds of a time that has a unit and is above 0: 0 would be for ever."""
    found = duration(text)
    if text.isdecimal() or not found:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0 with s, m, h or d, such as 12h.")
    return found


def _add_named(action: argparse.ArgumentParser) -> None:
    action.add_argument("kind", choices=_KINDS, metavar="KIND", help=f"What NAME is: {', '.join(_KINDS)}.")
    action.add_argument("name", metavar="NAME", help="User name, client id, or address or network such as 10.0.0.0/8.")


def _finish(action: argparse.ArgumentParser, run: object) -> None:
    add_api(action)
    action.set_defaults(run=run)


def _reload(options: argparse.Namespace) -> int:
    reload_access(ApiClient(options))
    return 0


def _test(options: argparse.Namespace) -> int:
    asked = RightAsked(options.user, options.what, options.name, options.client, options.address, tuple(options.role))
    return (
        0 if test_access(asked, ApiClient(options) if options.file is None else None, options.file, as_json=options.json) else 1
    )


def _ban(options: argparse.Namespace) -> int:
    ban(ApiClient(options), options.kind, options.name, options.for_ms, options.why)
    return 0


def _lift(options: argparse.Namespace) -> int:
    lift_ban(ApiClient(options), options.kind, options.name)
    return 0


def _bans(options: argparse.Namespace) -> int:
    print_bans(ApiClient(options), as_json=options.json)
    return 0


def _users(options: argparse.Namespace) -> int:
    rows = rows_of(pages_of(ApiClient(options), "/access/users", options, contains=options.contains))
    shown = rows if options.json else [_joined(row, ("roles",)) for row in rows]
    print_listing(shown, USER_COLUMNS, as_json=options.json)
    return 0


def _rules(options: argparse.Namespace) -> int:
    rows = rows_of(pages_of(ApiClient(options), "/access/rules", options))
    shown = rows if options.json else [_joined(row, RULE_LISTS) for row in rows]
    print_listing(shown, ("number", "source", "allows", *RULE_LISTS), as_json=options.json)
    return 0


def _joined(row: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a row whose lists of names are texts."""
    return {**row, **{name: ", ".join(row[name]) for name in names}}


def _kick(options: argparse.Namespace) -> int:
    kick(ApiClient(options), options.kind, options.name)
    return 0


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


def reload_access(api: ApiClient) -> None:
    """Let a node read its files of access control again. Raises ControlRefused if one is invalid."""
    found = api.call("POST", "/access/reload")
    print_line(f"reloaded: {found['rules']} rules, {found['users']} users, {found['bans']} bans")


def test_access(asked: RightAsked, api: ApiClient | None, file: Path | None, *, as_json: bool) -> bool:
    """Print whether somebody may do something, and why; return whether all of it is allowed.

    Args:
        asked: see `RightAsked`.
        api: of a running node; None with a file.
        file: an access file to test instead of what is in force in the node; None for the node.
        as_json: print JSON, one object a line.

    Raises:
        AccessInvalid: the file is not valid.
    """
    from penstock.access.actions import TERMS
    from penstock.access.explain import explained
    from penstock.access.file import load_access_policy
    from penstock.access.subject import Subject

    policy = load_access_policy(file) if file is not None else None
    subject = Subject(asked.user, frozenset(asked.roles), asked.client, asked.address)
    is_allowed = True
    for action in TERMS[asked.what] if asked.what in ("read", "write") else (asked.what,):
        if policy is not None:
            found = explained(policy, subject, action, asked.name)
        else:
            assert api is not None
            query = {"user": asked.user, "client": asked.client, "address": asked.address, "role": ",".join(asked.roles)}
            found = api.call("GET", "/access/test", query | {"action": action, "name": asked.name})
        is_allowed = is_allowed and found["allowed"]
        if as_json:
            print_line(orjson.dumps({"action": action} | found).decode())
        else:
            print_line(f"{'allowed' if found['allowed'] else 'denied'}  {action}: {found['why']}")
    return is_allowed


def ban(api: ApiClient, kind: str, name: str, for_ms: int, why: str) -> None:
    """Ban a user, a client id or an address, and print until when."""
    found = api.call("POST", "/access/bans", body={"kind": kind, "name": name, "for_ms": for_ms, "why": why})
    print_line(f"banned {kind} {found['name']} {_until(found['until_ms'])}")


def lift_ban(api: ApiClient, kind: str, name: str) -> None:
    """Lift a ban."""
    print_line(f"lifted the ban of {kind} {api.call('DELETE', f'/access/bans/{kind}/{escaped(name)}')['name']}")


def print_bans(api: ApiClient, *, as_json: bool) -> None:
    """Print the bans of a node."""
    rows = list(api.rows("/access/bans"))
    shown = [row | {"since": time_of(row["since_ms"]), "until": time_of(row["until_ms"])} for row in rows]
    columns = ("kind", "name", "since", "until", "why")
    print_rows(rows, (cells_of(row, columns) for row in shown), columns, as_json=as_json, out=sys.stdout)


def kick(api: ApiClient, kind: str, name: str) -> None:
    """Disconnect clients and end calls, and print how many."""
    found = api.call("POST", "/access/kick", body={"kind": kind, "name": name})
    print_line(f"disconnected {found['clients']} clients of MQTT, ended {found['calls']} calls over gRPC")


def _until(until_ms: int) -> str:
    return f"until {time_of(until_ms)}" if until_ms else "until the ban is lifted"
