"""The log of a node for Spark: tables, source and sink, and the reconciliation of checkpoints with acknowledgements."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

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


def publish(
    rows: DataFrame, name: str, *, epoch: int = 0, first_sent: datetime | None = None, **options: str | int | bool
) -> None:
    """Publish the rows of a batch, each of them once; return when all of them are durable.

    Each row gets a deduplication id of `name`, `epoch`, its content, and its number among equal rows. So the batch may be
    published again, by Spark or by the caller: the node stores no row twice that it remembers, and refuses rows that it may
    have forgotten. The session may be any in which Spark finds the format `penstock`, also of Spark Connect.

    Args:
        rows: columns `topic` and `body`, and those of `OutgoingMessage` that it needs. Rows are published in no order.
        name: name of the query, up to 128 bytes. Two queries with one name would take each other's rows for repeated ones.
        epoch: number of the batch, which differs for each batch of the query and is the same when a batch is published again.
        first_sent: when the batch may have been published first, with a time zone. Give it when a job is tried again; without
            it, the caller says that this is the first try. A column `first_sent` says it for each row.
        options: options of the format, such as `target="127.0.0.1:8081"`.

    Raises:
        WriteOptionInvalid: an option, the name or the epoch is invalid.
        RowsInvalid: the columns can't be published.
        PySparkException: a task failed. Its message names the error of the row or of the call, and says what to do.
    """
    from penstock.spark.sink.publishing import publish as run

    run(rows, name, epoch=epoch, first_sent=first_sent, **options)


def publishing(rows: DataFrame, name: str, **options: str | int | bool) -> DataStreamWriter:
    """Return the writer of a stream that publishes each row once; the caller adds `checkpointLocation` and calls `start`.

        publishing(commands, "commands", target="127.0.0.1:8081").option("checkpointLocation", path).start()

    The number of each batch is its epoch, and the time of the batch, which the checkpoint keeps, is when it may have been
    published first. After a restart, Spark executes the last batch again: the node stores no row of it twice, or refuses it if
    its first try was too long ago.

    Args:
        rows: a stream with columns as for `publish`. The rows of a batch must be the same when it is executed again.
        name: name of the query, as for `publish`. A query that begins anew, without its checkpoint, needs a new name.
        options: options of the format, such as `target="127.0.0.1:8081"`.

    Raises:
        WriteOptionInvalid, RowsInvalid: as `publish`.
    """
    from penstock.spark.sink.publishing import publishing as writer

    return writer(rows, name, **options)
