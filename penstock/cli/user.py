"""`penstock user`: changes the password file of a node."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from penstock.access.errors import AccessInvalid
from penstock.cli.arguments import Commands, add_command
from penstock.cli.login import ask_password
from penstock.cli.output import print_line
from penstock.cli.standardstreams import standard_input


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
    if options.action == "list":
        list_users(options.file)
    elif options.action == "delete":
        delete_user(options.file, options.name)
    else:
        act = add_user if options.action == "add" else change_password
        act(options.file, options.name, from_stdin=options.stdin, source=options.source)
    return 0


def add_user(file: Path, name: str, *, from_stdin: bool, source: Path | None) -> None:
    """Add a user to a password file, which is created if there is none. The password is prompted for, unless a source is given.

    Raises:
        AccessInvalid: the user exists, name or password can't be used, or the file is not valid.
        OSError: the file can't be written.
    """
    from penstock.access.passwords import PasswordFile, check_user_name

    check_user_name(name)
    users = PasswordFile(file) if file.exists() else PasswordFile.empty(file)
    if name in users:
        raise AccessInvalid(f"the user {name!r} exists; `penstock user password` changes the password")
    users.add(name, _password(from_stdin, source))
    print_line(f"added {name} to {file}")


def change_password(file: Path, name: str, *, from_stdin: bool, source: Path | None) -> None:
    """Change the password of a user. Raises as `add_user`."""
    from penstock.access.passwords import PasswordFile

    users = PasswordFile(file)
    users.check_known(name)
    users.change(name, _password(from_stdin, source))
    print_line(f"changed the password of {name} in {file}")


def delete_user(file: Path, name: str) -> None:
    """Delete a user. Raises as `add_user`."""
    from penstock.access.passwords import PasswordFile

    PasswordFile(file).delete(name)
    print_line(f"deleted {name} from {file}")


def list_users(file: Path) -> None:
    """Print the names of all users, a name a line. Raises AccessInvalid."""
    from penstock.access.passwords import PasswordFile

    for name in PasswordFile(file).hashes:
        print_line(name)


def _password(from_stdin: bool, source: Path | None) -> str:
    """Return a password, which is never an argument of the command."""
    if source is not None:
        return source.read_text("utf-8").partition("\n")[0].rstrip("\r")
    if from_stdin:
        return standard_input().readline().rstrip("\r\n")
    if sys.stdin is None or not sys.stdin.isatty():
        raise AccessInvalid("there is no terminal to ask for the password; give --stdin or --from FILE")
    password = ask_password("Password: ")
    if ask_password("Again: ") != password:
        raise AccessInvalid("the two passwords differ")
    return password
