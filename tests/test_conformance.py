"""Each rule of MQTT in docs/conformance.md and each feature in docs/comparison.md names a test that exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.protocol.reasons import ReasonCode
from tests.gateway import packet_cases, packet_cases_5

ROOT = Path(__file__).parents[1]
GATEWAY = ROOT / "tests" / "gateway"

STATEMENTS_5 = """
    1.5.4:3 1.5.5:1 1.5.7:1 2.1.3:1 2.2.1:6 2.2.2:1 3.1.0:2 3.1.2:30 3.1.3:12 3.1.4:6 3.2.0:2 3.2.2:22 3.3.1:13 3.3.2:20
    3.3.4:10 3.4.2:3 3.5.2:3 3.6.1:1 3.6.2:3 3.7.2:3 3.8.1:1 3.8.3:5 3.8.4:8 3.9.2:2 3.9.3:2 3.10.1:1 3.10.3:2 3.10.4:6
    3.11.2:2 3.11.3:2 3.12.4:1 3.14.0:1 3.14.1:1 3.14.2:4 3.14.4:3 3.15.1:1 3.15.2:3 4.1.0:2 4.2:1 4.3.1:1 4.3.2:5
    4.3.3:13 4.4.0:2 4.5.0:2 4.6.0:6 4.7.0:1 4.7.1:2 4.7.2:1 4.7.3:4 4.8.2:6 4.9.0:3 4.12.0:7 4.12.1:2 4.13.1:1 4.13.2:1
    6.0.0:4
"""
"""The normative statements of MQTT 5.0 (Appendix B): how many each section has. They count from 1, those of 2.2.1 from 2."""

STATEMENTS_3 = """
    1.5.3:3 2.2.2:2 2.3.1:7 3.1.0:2 3.1.2:24 3.1.3:11 3.1.4:5 3.2.0:1 3.2.2:6 3.3.1:12 3.3.2:3 3.3.4:1 3.3.5:2 3.6.1:1
    3.8.1:1 3.8.3:4 3.8.4:6 3.9.3:2 3.10.1:1 3.10.3:2 3.10.4:6 3.12.4:1 3.14.1:1 3.14.4:3 4.1.0:2 4.2.0:1 4.3.1:1
    4.3.2:2 4.3.3:2 4.4.0:1 4.5.0:2 4.6.0:6 4.7.1:3 4.7.2:1 4.7.3:4 4.8.0:2 6.0.0:4
"""
"""Those of MQTT 3.1.1 (Appendix B)."""

TEST = re.compile(r"`([\w./]+\.py)::(test_\w+)`")
CASE = re.compile(r'`packet_cases(_5)?\.py` "([^"]+)"')
NO_TEST = re.compile(r"asks the client|does not apply: \w.+|never sent: \w.+")
RANGE = re.compile(r"(.+-)(\d+)\.\.(\d+)")
LINK = re.compile(r"\]\(\.\./(tests/[\w/]+\.py)\)")


def statements(listed: str) -> set[str]:
    counted = (section.split(":") for section in listed.split())
    found = {f"{section}-{number}" for section, count in counted for number in range(1, int(count) + 1)}
    return found - {"2.2.1-1"}


def rows(path: Path, columns: str) -> Iterator[list[str]]:
    """Give the cells of each row of the tables in a document whose head begins so."""
    is_table = False
    for line in path.read_text("utf-8").splitlines():
        if line.startswith(columns):
            is_table = True
        elif not line.startswith("|"):
            is_table = False
        elif is_table and not line.startswith("|-"):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


RULES = list(rows(ROOT / "docs" / "conformance.md", "| 5.0 | 3.1.1 |"))
REASONS = list(rows(ROOT / "docs" / "conformance.md", "| reason |"))


def numbers(cell: str) -> Iterator[str]:
    """Yield each number of a cell: 2.1.3-1..3 stands for three of them, - for none."""
    for number in cell.split():
        if found := RANGE.fullmatch(number):
            section, first, last = found.groups()
            yield from (f"{section}{each}" for each in range(int(first), int(last) + 1))
        elif number != "-":
            yield number


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the names of the functions in a file; none where there is no file."""
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def missing(proof: str) -> list[str]:
    """Return what a cell names that isn't there; the cell itself where it names nothing."""
    tests, cases = TEST.findall(proof), CASE.findall(proof)
    if not tests and not cases:
        return [] if NO_TEST.fullmatch(proof) else [proof]
    wrong = [
        f"{name}::{test}" for name, test in tests if not (GATEWAY / name).is_file() or test not in names_in(GATEWAY / name)
    ]
    for is_5, case in cases:
        table: Any = packet_cases_5 if is_5 else packet_cases
        if case not in {each.name for each in (*table.VALID, *table.INVALID)}:
            wrong.append(case)
    return wrong


@pytest.mark.parametrize(("column", "expected"), [(0, STATEMENTS_5), (1, STATEMENTS_3)], ids=["5.0", "3.1.1"])
def test_every_normative_statement_is_in_the_table(column: int, expected: str) -> None:
    listed = [number for row in RULES for number in numbers(row[column])]
    assert set(listed) == statements(expected)
    assert len(listed) == len(set(listed)), "each once"


def test_every_reason_code_is_in_the_table() -> None:
    listed = [name for row in REASONS for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(listed) == sorted(ReasonCode.__members__)


@pytest.mark.parametrize("row", [*RULES, *REASONS], ids=lambda row: row[0] if row[0] != "-" else f"3.1.1 {row[1]}")
def test_what_the_table_names_is_there(row: list[str]) -> None:
    assert missing(row[-1]) == []


def test_what_is_never_sent_is_nowhere_in_the_gateway() -> None:
    source = "".join(path.read_text("utf-8") for path in sorted((ROOT / "gateway").rglob("*.py")) if path.name != "reasons.py")
    never = {name for row in REASONS if row[-1].startswith("never sent") for name in re.findall(r"`(\w+)`", row[0])}
    assert len(never) > 10
    found = {name for name in never if re.search(rf"ReasonCode\.{name}\b", source)}
    assert found == {"NORMAL_DISCONNECTION"}, "what stands for an end without a reason, too"


def test_clauses_that_code_and_tests_name_exist() -> None:
    named = re.compile(r"\[MQTT-(\d[\d.]*-\d+)\]")
    wrong = []
    for path in sorted([*(ROOT / "gateway").rglob("*.py"), *GATEWAY.glob("*.py"), *(ROOT / "tests" / "store").glob("*.py")]):
        known = statements(STATEMENTS_5) | statements(STATEMENTS_3)
        wrong += [f"{path.name}: {clause}" for clause in named.findall(path.read_text("utf-8")) if clause not in known]
    assert wrong == []


@pytest.mark.parametrize("columns", ["| | Penstock |", "| | tested by |"])
def test_every_feature_in_the_comparison_names_its_test(columns: str) -> None:
    features = list(rows(ROOT / "docs" / "comparison.md", columns))
    assert len(features) > 5
    without = [row[0] for row in features if not LINK.findall(row[-1])]
    assert without == []
    gone = [link for row in features for link in LINK.findall(row[-1]) if not names_in(ROOT / link)]
    assert gone == []


# --- and a table that lies is found ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "proof",
    [
        "",
        "yes",
        "asks nobody",
        "does not apply: ",
        "`test_connection.py::test_that_never_was`",
        "`test_nothing.py::test_a`",
        '`packet_cases.py` "connect, that never was"',
        '`packet_cases_5.py` "connect, 6.0"',
        "asks the client, `test_connection.py::test_that_never_was`",
    ],
)
def test_a_row_that_shows_nothing_is_found(proof: str) -> None:
    assert missing(proof) != []
