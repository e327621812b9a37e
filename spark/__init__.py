"""The log of a node for Spark: tables, source and sink, and the reconciliation of checkpoints with acknowledgements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.spark.reconciliation.reconcile import ReconcileOptions
    from penstock.spark.reconciliation.summary import Summary


def messages(spark: SparkSession, path: str | Path, *, tail: bool = True) -> DataFrame:
    """Return all messages of a node as one DataFrame, up to the end that its log has now.

    Spark reads the Parquet tables of the sealed segments itself, so a query reads the columns and the row groups that it needs.
    What the tables don't have yet comes from the log, by the source `penstock`; its columns are in the reference of the tables.
    A message that is older than the tables, and that retention copies forward after their end, is there when they have it.

    Args:
        spark: any session of Spark 4, also of Spark Connect.
        path: the data directory of a node, which may be running, or its folder `commitlog`. Executors must see it under the
            same path.
        tail: whether to read the log after the tables. Executors need Penstock for it, and nothing of Penstock without it.

    Raises:
        penstock.spark.errors.LogMissing: the directory holds no log.
        penstock.store.errors.RecordCorrupt, penstock.store.errors.LogCorrupt: the log is damaged.
    """
    from penstock.spark.history import read_table
    from penstock.spark.parquet.schema import MESSAGES

    return read_table(spark, path, MESSAGES, tail=tail)


def deliveries(spark: SparkSession, path: str | Path, *, tail: bool = True) -> DataFrame:
    """Return the deliveries of all consumer groups, a row for each stage, as `messages` does."""
    from penstock.spark.history import read_table
    from penstock.spark.parquet.schema import DELIVERIES

    return read_table(spark, path, DELIVERIES, tail=tail)


def ends(spark: SparkSession, path: str | Path, *, tail: bool = True) -> DataFrame:
    """Return the ends of the deliveries, a row for each stage that has ended, as `messages` does."""
    from penstock.spark.history import read_table
    from penstock.spark.parquet.schema import ENDS

    return read_table(spark, path, ENDS, tail=tail)


def reconcile(spark: SparkSession, path: str | Path, out: str | Path, options: ReconcileOptions | None = None) -> Summary:
    """Reconcile the log of a node with a session of Spark, also of Spark Connect, and write the report to `out`.

    The executors need nothing of Penstock, but must see the data directory and `out` under the same paths as the caller.
    Temporary views of the session get the names of the tables and steps, and are dropped in the end. A session that has such
    views already is refused.

    Args:
        spark: any session of Spark 4.
        path: the data directory of a node, which may be running, or its folder `commitlog`.
        out: the directory of the report. An earlier report there is replaced.
        options: as of when, and from where on.

    Returns:
        The content of `summary.json`.

    Raises:
        As `penstock.spark.reconciliation.reconcile.reconcile`.
    """
    from penstock.spark.reconciliation.engines import SparkEngine
    from penstock.spark.reconciliation.reconcile import reconcile as run

    engine = SparkEngine(spark)
    try:
        return run(engine, path, out, options)
    finally:
        engine.close()
