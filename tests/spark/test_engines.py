"""Spark and DuckDB run the same SQL with the same result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")
pytest.importorskip("duckdb", reason="the reconciliation needs the extra `tables`")

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.spark import reconcile
from penstock.spark.errors import ReadOptionInvalid
from penstock.spark.parquet.schema import MESSAGES
from penstock.spark.parquet.writer import ARROW_TYPES
from penstock.spark.reconciliation import tables as steps
from penstock.spark.reconciliation.engines import DuckEngine, SparkEngine
from penstock.spark.reconciliation.reconcile import ReconcileOptions
from penstock.spark.reconciliation.reconcile import reconcile as reconcile_with
from penstock.spark.reconciliation.selection import choose_messages
from penstock.spark.reconciliation.summary import Summary
from penstock.store.topics import matches
from tests.spark.logs import every_outcome, random_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.log_writer import LogWriter


NARROWED = ReconcileOptions(groups=("g1", "g4"), topics=("s/1/#", "+/2", "s/+", "$SYS/#"))


@pytest.mark.parametrize(
    ("log", "options"),
    [
        pytest.param(random_log(seed=20, deliveries=4_000), ReconcileOptions(), id="random"),
        pytest.param(random_log(seed=21, deliveries=1_000), NARROWED, id="narrowed", marks=pytest.mark.nightly),
        pytest.param(every_outcome(), ReconcileOptions(), id="every outcome", marks=pytest.mark.nightly),
    ],
)
def test_both_engines_write_equal_tables(
    spark: SparkSession, tmp_path: Path, log: LogWriter, options: ReconcileOptions
) -> None:
    data_dir = tmp_path / "it's [a] {log}*"
    log.save(data_dir)
    views = {table.name for table in spark.catalog.listTables()}
    by_spark = reconcile(spark, data_dir, tmp_path / "by spark", options)
    engine = DuckEngine(tmp_path / "spilled", threads=1)
    by_duckdb = reconcile_with(engine, data_dir, tmp_path / "by duckdb", options)
    engine.close()
    assert (by_spark["engine"], by_duckdb["engine"]) == ("spark", "duckdb")
    assert comparable(by_spark) == comparable(by_duckdb)
    for name in steps.KEPT:
        first, second = (duckdb.read_parquet(f"{tmp_path}/by {each}/{name}/*.parquet") for each in ("spark", "duckdb"))
        assert (len(first), len(first.except_(second)), len(second.except_(first))) == (len(second), 0, 0), name
    assert {table.name for table in spark.catalog.listTables()} == views


def test_both_engines_match_the_same_topics(spark: SparkSession, tmp_path: Path) -> None:
    topics = ["a", "a/", "/a", "a/b", "a/b/c", "a//c", "$SYS/b", "a'b/c", "ä\\/b", "b/a"]
    path = tmp_path / "messages.parquet"
    columns = {column.name: pa.nulls(len(topics), ARROW_TYPES[column.type]) for column in MESSAGES.columns}
    pq.write_table(pa.table({**columns, "position": pa.array(range(len(topics))), "topic": topics}), path)
    filters = ["+", "a/+/#", "+/b", "$SYS/#", "a'b/c", "ä\\/b"]
    wanted = [at for at, topic in enumerate(topics) if any(matches(each, topic) for each in filters)]
    for engine in (SparkEngine(spark), DuckEngine(tmp_path / "spilled", threads=1)):
        engine.register(MESSAGES, "every_messages", [path])
        choose_messages(engine, filters, tmp_path)
        assert sorted(row["position"] for row in engine.rows("SELECT position FROM chosen_messages")) == wanted
        engine.close()


@pytest.mark.nightly
def test_both_engines_compare_with_a_node_alike(spark: SparkSession, tmp_path: Path) -> None:
    every_outcome().save(tmp_path)
    end = every_outcome().end
    state = {"listen": {"admin": "127.0.0.1:8080"}, "log": {"appended": end, "end": end}, "groups": []}
    engines = (SparkEngine(spark), DuckEngine(tmp_path / "spilled", threads=1))
    first, second = (reconcile_with(each, tmp_path, tmp_path / each.name, read_state=lambda: state)["node"] for each in engines)
    assert first == second
    assert first is not None
    assert first["differing"] == 2
    for engine in engines:
        engine.close()


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
