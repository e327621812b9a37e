"""How commands print rows."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock import __version__
from penstock.cli.main import build_parser, main, parse
from penstock.cli.output import body_fields, print_row, print_rows
from penstock.cli.version import version_text


def test_a_table_shows_brackets_of_user_data_as_they_are() -> None:
    out = io.StringIO()
    print_rows([{}], [["[red]pump[/red]", "[spark]"]], ("topic", "body"), as_json=False, out=out)
    assert "[red]pump[/red]  [spark]" in out.getvalue()


def test_json_is_one_object_a_line() -> None:
    out = io.StringIO()
    print_rows([{"topic": "a"}, {"topic": "[b]"}], [], ("topic",), as_json=True, out=out)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [{"topic": "a"}, {"topic": "[b]"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pub", "a", "b", "--mqtt", "nowhere"], "'nowhere' must be HOST:PORT"),
        (["sub", "a", "--count", "9" * 5000], "is too large: the largest number is 9223372036854775807"),
        (["inspect", "log", "--from", "9" * 30], "is too large"),
        (["inspect", "log", "--from", "0x" + "f" * 16], "is too large"),
        (["inspect", "log", "--since", "9" * 30], "is too large"),
        (["sub", "a", "--count", "-1"], "'-1' is not a whole number from 0 up"),
        (["inspect", "log", "--kind", "letter"], "'letter' is not a kind of record. The kinds are message,"),
        (["group", "create", "g", "a", "--backoff", "soon"], "'soon' is not a back-off"),
        (["pub", "a\udcff", "b"], "argument topic: b'a\\xff' is not UTF-8"),
        (["pub", "a", "b", "--property", "unit=\udcff"], "argument --property: b'\\xff' is not UTF-8"),
        (["inspect", "quotas", "--resource", "x"], "'x' is not a resource. The resources are"),
        (["pub", "a", "b", "--never"], "unrecognized arguments: --never"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_what_would_fit(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert message in first
    command = first.partition(":")[0]
    assert second == f"Try '{command} --help'."
    assert command.startswith(f"penstock {arguments[0]}")


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the commands that have no commands of their own."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield parser
    for action in nested:
        for command in action.choices.values():
            yield from commands(command)


def values(action: argparse.Action) -> list[str]:
    """Return an argument with a value that its type takes, as words of a command line."""
    name = list(action.option_strings[:1])
    if action.nargs == 0:
        return name
    if action.choices:
        return [*name, str(next(iter(action.choices)))]
    convert: Any = action.type or str
    for text in ("x", "7", "7s", "127.0.0.1:7"):
        with suppress(argparse.ArgumentTypeError):
            convert(text)
            return [*name, text]
    raise AssertionError(f"no value for {action.dest}")


def test_every_command_takes_only_what_it_requires() -> None:
    for command in commands(build_parser()):
        words = command.prog.split()[1:]
        alone = {action.dest for group in command._mutually_exclusive_groups for action in group._group_actions}
        for group in command._mutually_exclusive_groups:
            words += values(group._group_actions[-1]) if group.required else []
        for action in command._actions:
            if action.dest not in alone and (action.required if action.option_strings else action.nargs not in ("?", "*")):
                words += values(action)
        assert parse(words).run is not None, "a default may not be of another type than its values"


def test_a_command_that_was_removed_says_what_replaces_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recall", "x"]) == 2
    assert capsys.readouterr().err == "penstock: there is no command 'recall'. Say penstock timer cancel.\n"


def test_a_body_that_is_no_text_is_base64() -> None:
    assert body_fields("é".encode()) == {"body": "é"}
    assert body_fields(b"bin\xff\0") == {"body": "Ymlu/wA=", "encoding": "base64"}
    assert body_fields(b"\xff", "x") == {"x": "/w==", "x_encoding": "base64"}


def test_the_version_of_a_checkout_names_its_commit(tmp_path: Path) -> None:
    assert version_text(tmp_path) == f"penstock {__version__}"
    (tmp_path / ".git").mkdir()
    (tmp_path / "pyproject.toml").touch()
    assert version_text(tmp_path) == f"penstock {__version__} (checkout of an unknown commit)"
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / ".git" / "packed-refs").write_text("# pack-refs\n0123456789abcdef refs/heads/main\n")
    assert version_text(tmp_path) == f"penstock {__version__} (checkout 0123456, perhaps modified)"


SPOOFED = "a\x1b[2J\u202eb"


def test_a_table_and_a_row_show_what_can_not_be_seen_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    print_rows([{}], [[SPOOFED]], ("topic",), as_json=False, out=out)
    assert "a\\u001b[2J\\u202eb" in out.getvalue()
    print_row({"topic": SPOOFED, "body": "two\nlines\x1b"}, as_json=False)
    assert capsys.readouterr().out == "a\\u001b[2J\\u202eb  two\nlines\\u001b\n"


def test_json_has_escapes_with_the_same_values(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    print_rows([{"topic": SPOOFED}], [], ("topic",), as_json=True, out=out)
    print_row({"topic": SPOOFED}, as_json=True)
    for written in (out.getvalue(), capsys.readouterr().out):
        assert "\u202e" not in written
        assert json.loads(written) == {"topic": SPOOFED}


def test_an_error_of_a_command_is_shown_with_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["user", "list", "--file", f"nowhere{SPOOFED}"]) == 1
    assert "nowherea\\u001b[2J\\u202eb" in capsys.readouterr().err


def test_an_error_of_the_system_says_what_it_is_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pub", "a", "x", "--user", "ann", "--password-file", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == f"penstock pub: {tmp_path}/none can't be used: No such file or directory.\n"


def test_a_defect_is_one_line_unless_somebody_wants_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise AttributeError("'NoneType' object has no attribute 'x'")

    monkeypatch.delenv("PENSTOCK_TRACEBACK", raising=False)
    monkeypatch.setattr("penstock.cli.user.list_users", fails)
    assert main(["user", "list", "--file", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "defect of Penstock (AttributeError: 'NoneType' object has no attribute 'x')" in told
    assert told.count("\n") == 1
    monkeypatch.setenv("PENSTOCK_TRACEBACK", "1")
    with pytest.raises(AttributeError):
        main(["user", "list", "--file", str(tmp_path)])
