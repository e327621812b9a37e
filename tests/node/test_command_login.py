"""How commands such as `penstock pub` find the password of a user. It is never an argument."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from penstock.cli import login
from penstock.cli.login import PASSWORD, login_of


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD, raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("of stdin\nmore"))


class Terminal(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_password_is_the_first_line_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, "of the environment")
    (tmp_path / "password").write_text("of the file\r\nmore\n")
    assert login_of("ann", tmp_path / "password") == ("ann", "of the file")
    assert login_of("ann", Path("-")) == ("ann", "of stdin")


def test_without_a_file_it_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, "of the environment")
    assert login_of("ann", None) == ("ann", "of the environment")
    assert login_of(None, None) is None, "without a user there is no login"


def test_without_either_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(login, "getpass", lambda prompt: f"answer to {prompt}")
    assert login_of("ann", None) == ("ann", "answer to Password of ann: ")


def test_the_end_of_the_input_is_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(_prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(login, "getpass", ends)
    with pytest.raises(ValueError, match="No password was typed"):
        login_of("ann", None)


@pytest.mark.parametrize(
    ("user", "has_file", "message"),
    [
        ("ann", False, "no terminal to ask for the password of 'ann'; give --password-file FILE, or set PENSTOCK_PASSWORD"),
        (None, True, "add --user NAME"),
        ("", True, "--user is empty"),
        ("ann", True, "the password of 'ann' is empty"),
    ],
)
def test_a_login_that_is_not_whole_is_refused(tmp_path: Path, user: str | None, has_file: bool, message: str) -> None:
    file = tmp_path / "password"
    file.write_text("\nmore")
    with pytest.raises(ValueError, match=message):
        login_of(user, file if has_file else None)
