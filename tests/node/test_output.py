"""How commands print rows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.output import print_row, print_rows


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
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_what_would_fit(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


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
