"""A stream as a process that a test kills: `python -m tests.spark.streamcopy LOG ROWS CHECKPOINT`.

It copies position and body of the messages of a log into Parquet files, and says `open` when its session is open.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from penstock.spark.session import open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

BATCH_BYTES = 512 * 1024
"""Bytes of the log in a batch: two tasks, so that a kill finds one file of two."""


def copying(spark: SparkSession, log: str, rows: str, checkpoint: str, **options: object) -> DataStreamWriter:
    """Return the writer of a stream from a log into Parquet files."""
    stream = spark.readStream.format("penstock").schema("position bigint, body binary")
    for name, value in ({"maxBytesPerTrigger": BATCH_BYTES, "minPartitions": 2} | options).items():
        stream = stream.option(name, str(value))
    writer = stream.load(log).writeStream.format("parquet")
    return writer.option("path", rows).option("checkpointLocation", checkpoint)


def main() -> None:
    log, rows, checkpoint = sys.argv[1:]
    spark = open_session("local[2]", "penstock stream", is_brief=True)
    print("open", flush=True)
    copying(spark, log, rows, checkpoint).start().awaitTermination()


if __name__ == "__main__":
    main()
