"""How commands print rows."""

from __future__ import annotations

import io
import json

import pytest

from penstock.cli.actions.output import print_rows
from penstock.cli.main import main


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
