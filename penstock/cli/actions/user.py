"""`penstock user`."""

from __future__ import annotations

import sys
from getpass import getpass
from pathlib import Path

from penstock.access.errors import AccessInvalid
from penstock.access.passwords import PasswordFile, check_user_name
from penstock.cli.actions.output import print_line


def add_user(file: Path, name: str, *, from_stdin: bool, source: Path | None) -> None:
    """Add a user to a password file, which is created if there is none. The password is prompted for, unless a source is given.

    Raises:
        AccessInvalid: the user exists, name or password can't be used, or the file is not valid.
        OSError: the file can't be written.
    """
    check_user_name(name)
    users = PasswordFile(file) if file.exists() else PasswordFile.empty(file)
    if name in users:
        raise AccessInvalid(f"the user {name!r} exists; `penstock user password` changes the password")
    users.add(name, _password(from_stdin, source))
    print_line(f"added {name} to {file}")


def change_password(file: Path, name: str, *, from_stdin: bool, source: Path | None) -> None:
    """Change the password of a user. Raises as `add_user`."""
    users = PasswordFile(file)
    users.check_known(name)
    users.change(name, _password(from_stdin, source))
    print_line(f"changed the password of {name} in {file}")


def delete_user(file: Path, name: str) -> None:
    """Delete a user. Raises as `add_user`."""
    PasswordFile(file).delete(name)
    print_line(f"deleted {name} from {file}")


def list_users(file: Path) -> None:
    """Print the names of all users, a name a line. Raises AccessInvalid."""
    for name in PasswordFile(file).hashes:
        print_line(name)


def _password(from_stdin: bool, source: Path | None) -> str:
    """Return a password, which is never an argument of the command."""
    if source is not None:
        return source.read_text("utf-8").partition("\n")[0].rstrip("\r")
    if from_stdin:
        return sys.stdin.readline().rstrip("\r\n")
    if not sys.stdin.isatty():
        raise AccessInvalid("there is no terminal to ask for the password; give --stdin or --from FILE")
    password = getpass("Password: ")
    if getpass("Again: ") != password:
        raise AccessInvalid("the two passwords differ")
    return password
