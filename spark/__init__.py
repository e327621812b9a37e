"""The CommitLog as a Spark data source and as Parquet tables, and the reconciliation of checkpoints with acknowledgements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.reconciliation.reconcile import ReconcileOptions
    from penstock.spark.reconciliation.summary import Summary


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
