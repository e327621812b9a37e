"""Spark and DuckDB run the same SQL with the same result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")
pytest.importorskip("duckdb", reason="the reconciliation needs the extra `tables`")

import duckdb

from penstock.spark import reconcile
from penstock.spark.errors import ReadOptionInvalid
from penstock.spark.reconciliation import steps
from penstock.spark.reconciliation.engines import DuckEngine
from penstock.spark.reconciliation.reconcile import reconcile as reconcile_with
from penstock.spark.reconciliation.summary import Summary
from tests.spark.logs import every_outcome, random_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.log_writer import LogWriter


@pytest.mark.parametrize(
    "log",
    [
        pytest.param(random_log(seed=20, deliveries=4_000), id="random"),
        pytest.param(every_outcome(), id="every outcome", marks=pytest.mark.nightly),
    ],
)
def test_both_engines_write_equal_tables(spark: SparkSession, tmp_path: Path, log: LogWriter) -> None:
    data_dir = tmp_path / "it's [a] {log}*"
    log.save(data_dir)
    views = {table.name for table in spark.catalog.listTables()}
    by_spark = reconcile(spark, data_dir, tmp_path / "by spark")
    engine = DuckEngine(tmp_path / "spilled", threads=1)
    by_duckdb = reconcile_with(engine, data_dir, tmp_path / "by duckdb")
    engine.close()
    assert (by_spark["engine"], by_duckdb["engine"]) == ("spark", "duckdb")
    assert comparable(by_spark) == comparable(by_duckdb)
    for name in steps.KEPT:
        first, second = (duckdb.read_parquet(f"{tmp_path}/by {each}/{name}/*.parquet") for each in ("spark", "duckdb"))
        assert (len(first), len(first.except_(second)), len(second.except_(first))) == (len(second), 0, 0), name
    assert {table.name for table in spark.catalog.listTables()} == views


def test_a_session_that_has_a_view_of_such_a_name_keeps_it(spark: SparkSession, tmp_path: Path) -> None:
    every_outcome().save(tmp_path)
    spark.sql("SELECT 42 AS answer").createOrReplaceTempView("settings")
    try:
        with pytest.raises(ReadOptionInvalid, match="The session has a view named settings already"):
            reconcile(spark, tmp_path, tmp_path / "out")
        assert [row.answer for row in spark.table("settings").collect()] == [42]
        assert not (tmp_path / "out").exists()
    finally:
        spark.catalog.dropTempView("settings")


def comparable(summary: Summary) -> dict[str, object]:
    """Return a summary without what differs: the engine, and the order of the outcomes in an hour."""
    return {
        **summary,
        "engine": "",
        "hours": [(each["hour_ms"], sorted(each["outcomes"].items())) for each in summary["hours"]],
    }
