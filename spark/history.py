"""One DataFrame over the Parquet tables of a log and over the log after them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.spark import segments
from penstock.spark.parquet.files import DIRECTORY, segment_files
from penstock.spark.parquet.reach import written_until
from penstock.spark.parquet.schema import ParquetTable
from penstock.spark.reconciliation.engines import escaped

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_table(spark: SparkSession, path: str | Path, table: ParquetTable, *, tail: bool) -> DataFrame:
    """Return the rows of a table, up to the end that the log has now.

    A Python source can't return a scan of Parquet, so this is a function: Spark itself reads the files, with the columns and
    the rows that the query wants, and the source `penstock` reads the log after them. The position between the two is taken
    once, here.

    Args:
        spark: any session of Spark 4.
        path: the data directory of a node, or its folder `commitlog`.
        table: one of the tables with files that the source reads, too.
        tail: whether the log after the last file is read.

    Raises:
        LogMissing: the directory holds no log.
    """
    directory = segments.find(path)
    data_dir = directory.parent
    begin, end = segments.begin_of(directory), segments.end_of(directory)
    cut = written_until(data_dir)
    files = [part.path(table.name) for part in segment_files(data_dir / DIRECTORY, cut)]
    history = read_files(spark, table, files)
    if not tail or cut >= end:
        return history
    columns = ", ".join(f"`{column.name}` {column.type}" for column in table.columns)
    source = spark.read.format("penstock").schema(columns).option("table", table.name).option("until", end)
    # Without files, the messages that retention has copied forward are rows, too: they are before the beginning of the log.
    recent = source.option("from", cut if files and cut >= begin else 0).load(str(directory))
    return history.unionByName(recent) if files else recent


def read_files(spark: SparkSession, table: ParquetTable, files: Sequence[Path]) -> DataFrame:
    """Return the rows of some files of a table. With its schema, Spark need not look into a file first."""
    schema = ", ".join(f"`{column.name}` {column.type}" for column in table.columns)
    if not files:
        return spark.createDataFrame([], schema)
    # No columns are made from the names of folders.
    reader = spark.read.schema(schema).option("recursiveFileLookup", "true")
    return reader.parquet(*map(escaped, files))
