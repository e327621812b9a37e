"""The rows of a log by its tables and its tail, and by a stream: as a module that a test runs with a Python of its own.

`python -m tests.spark.rows MASTER LOG DIRECTORY` prints them as JSON, with the path from which a worker imports Penstock.
`--history` leaves out what needs Penstock on the workers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.spark import deliveries, ends, messages
from penstock.spark.session import open_session
from tests.spark.streamcopy import copying

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def rows(frame: DataFrame) -> list[str]:
    """Return the rows of a frame as JSON, in an order that is always the same."""
    return sorted(row.json for row in frame.selectExpr("to_json(struct(*)) AS json").collect())


def rows_of_tables(spark: SparkSession, log: Path, *, tail: bool = True) -> dict[str, list[str]]:
    return {read.__name__: rows(read(spark, log, tail=tail)) for read in (messages, deliveries, ends)}


def rows_of_stream(spark: SparkSession, log: Path, directory: Path) -> list[str]:
    """Return the rows of a stream that reads what is available now."""
    copied, checkpoint = str(directory / "rows"), str(directory / "checkpoint")
    copying(spark, str(log), copied, checkpoint).trigger(availableNow=True).start().awaitTermination()
    return rows(spark.read.schema("position bigint, body binary").parquet(copied))


def main() -> None:
    master, log, directory, *options = sys.argv[1:]
    spark = open_session(master)
    found: dict[str, object] = {**rows_of_tables(spark, Path(log), tail="--history" not in options)}
    if "--history" not in options:
        found["stream"] = rows_of_stream(spark, Path(log), Path(directory))
    if master.startswith("spark:") and "--history" not in options:
        found["imported_from"] = spark.sparkContext.range(1).map(lambda _: __import__("penstock").__file__).first()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
