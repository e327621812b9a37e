"""A process that publishes the lines of files as a stream of Spark, and ends when all are published.

python -m tests.spark.publishingstream TARGET DIRECTORY CHECKPOINT
"""

from __future__ import annotations

import sys

from pyspark.sql import functions as F

from penstock.spark import publishing
from penstock.spark.session import open_session


def main(target: str, directory: str, checkpoint: str) -> None:
    spark = open_session("local[2]", "publishing", is_brief=True)
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(directory)
    # The time is part of each row, so a batch that was executed again with another time would be stored twice.
    rows = lines.select(
        F.concat(F.lit("lines/"), F.length("value")).alias("topic"),
        F.col("value").alias("body"),
        F.create_map(F.lit("at"), F.current_timestamp().cast("string")).alias("properties"),
    )
    stream = publishing(rows, "lines", target=target)
    stream.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
