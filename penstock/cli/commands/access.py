"""`penstock access`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from penstock.cli.commands.arguments import Commands, add_command, add_data_dir, duration

_KINDS: Final = ("user", "client", "address")
_ACTIONS: Final = ("publish", "subscribe", "receive", "send", "pop", "consume", "admin", "read", "write")


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "access", "Reload, test and enforce the access control of a running node.")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    action = add_command(
        actions,
        "reload",
        "Read the access file, the password file and the keys again. Clients that may no longer do what they do are stopped. "
        "If a file is not valid, nothing changes.",
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
        help="How long: 90s, 30min, 12h or 7d (for ever).",
    )
    action.add_argument("--why", default="", metavar="TEXT", help="A note, for `penstock access bans` and the audit log.")
    _finish(action, _ban)

    action = add_command(actions, "lift", "Lift a ban.")
    _add_named(action)
    _finish(action, _lift)

    action = add_command(actions, "bans", "Print all bans.")
    action.add_argument("--json", action="store_true", help="Print one JSON object per line.")
    _finish(action, _bans)

    action = add_command(actions, "kick", "Disconnect clients. They may connect again.")
    _add_named(action)
    _finish(action, _kick)


def _lasting(text: str) -> int:
    """Return the milliseconds of a time that has a unit and is above 0: 0 would be for ever."""
    found = duration(text)
    if text.isdecimal() or not found:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0 with s, min, h or d, such as 12h.")
    return found


def _add_named(action: argparse.ArgumentParser) -> None:
    action.add_argument("kind", choices=_KINDS, metavar="KIND", help=f"What NAME is: {', '.join(_KINDS)}.")
    action.add_argument("name", metavar="NAME", help="User name, client id, or address or network such as 10.0.0.0/8.")


def _finish(action: argparse.ArgumentParser, run: object) -> None:
    add_data_dir(action)
    action.set_defaults(run=run)


def _reload(options: argparse.Namespace) -> int:
    from penstock.cli.actions.access import reload_access

    reload_access(options.data_dir)
    return 0


def _test(options: argparse.Namespace) -> int:
    from penstock.cli.actions.access import RightAsked, test_access

    asked = RightAsked(options.user, options.what, options.name, options.client, options.address, tuple(options.role))
    return 0 if test_access(asked, options.data_dir, options.file, as_json=options.json) else 1


def _ban(options: argparse.Namespace) -> int:
    from penstock.cli.actions.access import ban

    ban(options.data_dir, options.kind, options.name, options.for_ms, options.why)
    return 0


def _lift(options: argparse.Namespace) -> int:
    from penstock.cli.actions.access import lift_ban

    lift_ban(options.data_dir, options.kind, options.name)
    return 0


def _bans(options: argparse.Namespace) -> int:
    from penstock.cli.actions.access import print_bans

    print_bans(options.data_dir, as_json=options.json)
    return 0


def _kick(options: argparse.Namespace) -> int:
    from penstock.cli.actions.access import kick

    kick(options.data_dir, options.kind, options.name)
    return 0
