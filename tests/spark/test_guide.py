"""The examples in the guide of the tables run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyarrow", reason="the tables need the extra `tables`")

from penstock.spark.parquet.writer import backfill
from tests.spark.logs import every_outcome
from tests.system.processes import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/tables.md").read_text(), re.DOTALL)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    every_outcome().save(tmp_path / "penstock-data")
    list(backfill(tmp_path / "penstock-data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", [text for text in EXAMPLES if "spark." not in text])
def test_an_example_prints_what_the_tables_have(directory: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    pytest.importorskip(re.findall(r"import (\w+)", text)[0], reason="it is part of an extra")
    exec(text, {})
    printed = capsys.readouterr().out
    assert "a/1" in printed or "acked" in printed


def test_the_example_for_spark_prints_what_the_tables_have(
    directory: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = [text for text in EXAMPLES if "spark." in text]
    exec(text.replace("penstock-data", f"{directory}/penstock-data"), {"spark": spark})  # the JVM keeps its own directory
    assert "dead_lettered" in capsys.readouterr().out


def test_there_is_an_example_of_three_lines_for_each_library() -> None:
    assert {len([line for line in text.splitlines() if line and not line.startswith("import")]) for text in EXAMPLES} == {2}
    assert [re.findall(r"import (\w+)|(spark)\.", text)[0] for text in EXAMPLES] == [
        ("pandas", ""),
        ("duckdb", ""),
        ("", "spark"),
        ("pyarrow", ""),
    ]
