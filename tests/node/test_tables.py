"""Tables of commands: nothing is cut, numbers are aligned to the right, and a narrow terminal gets blocks."""

from __future__ import annotations

import argparse
import io

import pytest

from penstock.cli import output
from penstock.cli.arguments import duration, instant, message_id, position
from penstock.cli.main import parse
from penstock.cli.output import print_rows, row_of
from penstock.pop.proto import pop_pb2 as pb

HANDLE = "h" * 300
COLUMNS = ("topic", "count", "handle")
CELLS = [["a/1", "5", HANDLE], ["Ж/温/3", "12,345", ""]]


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def printed(out: io.StringIO) -> list[str]:
    print_rows([{}], CELLS, COLUMNS, as_json=False, out=out)
    return out.getvalue().splitlines()


def test_a_table_in_a_pipe_has_a_line_for_each_row_whatever_its_length() -> None:
    assert printed(io.StringIO()) == [
        "topic    count  handle",
        f"a/1          5  {HANDLE}",
        "Ж/温/3  12,345  -",
    ]


def test_a_terminal_that_is_too_narrow_gets_a_block_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert printed(Terminal()) == [
        " topic  a/1",
        " count  5",
        f"handle  {HANDLE}",
        "",
        " topic  Ж/温/3",
        " count  12,345",
        "handle  -",
    ]
    monkeypatch.setenv("COLUMNS", "400")
    assert len(printed(Terminal())) == 3


def test_a_table_without_rows_is_its_head() -> None:
    out = io.StringIO()
    print_rows([], [], COLUMNS, as_json=False, out=out)
    assert out.getvalue() == f"topic{output.GAP}count{output.GAP}handle\n"


def test_a_number_of_64_bits_is_a_number_in_json() -> None:
    settings = pb.GroupSettings(invisible_ms=30_000, backoff=pb.Backoff(list_ms=[1, 2]))
    row = row_of(pb.GroupDescription(group="7", visible=3, oldest_ms=2**40, settings=settings), is_full=True)
    assert (row["group"], row["visible"], row["dead"], row["oldest_ms"]) == ("7", 3, 0, 2**40)
    assert (row["settings"]["invisible_ms"], row["settings"]["backoff"]["list_ms"]) == (30_000, [1, 2])


@pytest.mark.parametrize(
    ("text", "ms"),
    [("0", 0), ("500ms", 500), ("90s", 90_000), ("10min", 600_000), ("10m", 600_000), ("2h", 7_200_000)],
)
def test_a_time_has_a_unit(text: str, ms: int) -> None:
    assert duration(text) == ms


@pytest.mark.parametrize("text", ["", "1500", "-1s", "1.5h", "10 min", "min", "1w", "1e3"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as 10m"):
        duration(text)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["send", "a", "b", "--delay", "3651d"], "argument --delay: '3651d' is out of bounds: give 0 to 3650d."),
        (["send", "a", "b", "--delay", "9999999d"], "argument --delay: '9999999d' is too long: give at most 36600d."),
        (["send", "a", "b", "--delay", "-1s"], "argument --delay: '-1s' is no time: write a whole number"),
        (["pub", "a", "b", "--expiry", "-1s"], "argument --expiry: '-1s' is no time: write a whole number"),
        (
            ["schedule", "create", "s", "a", "--every", "10ms"],
            "argument --every: '10ms' is out of bounds: give 100ms to 3650d.",
        ),
    ],
)
def test_a_time_that_a_node_would_refuse_is_refused_by_its_flag(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert told in capsys.readouterr().err


def test_an_instant_is_iso_8601_or_ms() -> None:
    assert instant("1772323200000") == instant("2026-03-01") == instant("20260301") == 1772323200000


@pytest.mark.parametrize(("text", "at"), [("82", 82), ("0000000000000052", 82), ("0x52", 82), ("0X00000000000000fF", 255)])
def test_a_position_may_be_decimal_or_a_message_id(text: str, at: int) -> None:
    assert position(text) == at
    assert message_id(text) == f"{at:016x}"


@pytest.mark.parametrize("text", ["", "x", "-1", "0x", "52h", "000000000000005g"])
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no position"):
        position(text)
    assert message_id(text) == text, "the node says what is wrong with it"
