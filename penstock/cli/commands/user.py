"""`penstock user`."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.commands.arguments import Commands, add_command


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "user",
        "Change the password file of a node, which reads it on `penstock access reload`.",
    )
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in (
        ("add", "Add a user. The command creates the file if there is none."),
        ("password", "Change the password of a user."),
        ("delete", "Delete a user."),
        ("list", "Print the names of all users."),
    ):
        action = add_command(actions, name, summary)
        if name != "list":
            action.add_argument("name", metavar="NAME", help="User name.")
        if name in ("add", "password"):
            # A password among the arguments would be seen by everybody on the machine who lists processes.
            sources = action.add_mutually_exclusive_group()
            sources.add_argument("--stdin", action="store_true", help="Read the password from the first line of stdin.")
            sources.add_argument(
                "--from", dest="source", type=Path, metavar="FILE", help="Read the password from the first line of this file."
            )
        action.add_argument("--file", type=Path, default=Path("passwords"), metavar="FILE", help="Password file (%(default)s).")
        action.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.cli.actions.user import add_user, change_password, delete_user, list_users

    if options.action == "list":
        list_users(options.file)
    elif options.action == "delete":
        delete_user(options.file, options.name)
    else:
        act = add_user if options.action == "add" else change_password
        act(options.file, options.name, from_stdin=options.stdin, source=options.source)
    return 0
