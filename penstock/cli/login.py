"""The login of a command with a user name. Its password is never an argument."""

from __future__ import annotations

import os
import sys
from getpass import getpass
from pathlib import Path
from typing import NamedTuple

from penstock.cli.standardstreams import standard_input

PASSWORD = "PENSTOCK_PASSWORD"
"""Environment variable with the password of the user that `--user` names."""


def ask_password(prompt: str) -> str:
    """Return a password that somebody types on the terminal. Raises ValueError at the end of the input."""
    try:
        return getpass(prompt)
    except EOFError:
        raise ValueError("No password was typed: the input of the terminal has ended. Run the command again.") from None


class UserPassword(NamedTuple):
    """A user name and its password."""

    user: str
    password: str


def login_of(user: str | None, source: Path | None) -> UserPassword | None:
    """Return the login of a command: the password is that of a file, of the environment, or typed in. None without a user.

    Raises:
        ValueError: there is a password without a user, or a user without a password.
        OSError: the file can't be read.
    """
    if user is None:
        if source is not None:
            raise ValueError("--password-file has a password and no user name: add --user NAME.")
        return None
    if not user:
        raise ValueError("--user is empty: name a user, or leave the option out to connect without a login.")
    if source is not None:
        text = standard_input().readline() if str(source) == "-" else source.read_text("utf-8").partition("\n")[0]
        password = text.rstrip("\r\n")
    elif PASSWORD in os.environ:
        password = os.environ[PASSWORD]
    elif sys.stdin is not None and sys.stdin.isatty():
        password = ask_password(f"Password of {user}: ")
    else:
        raise ValueError(f"no terminal to ask for the password of {user!r}; give --password-file FILE, or set {PASSWORD}")
    if not password:
        raise ValueError(f"the password of {user!r} is empty; no user of a node has an empty one")
    return UserPassword(user, password)
