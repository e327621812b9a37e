"""Commands to devices whose readings are unusual: Spark follows the log, compares, and publishes.

python examples/spark_commands.py penstock-data 127.0.0.1:8081

What is usual comes from the messages that the node has so far: the quartiles of each topic. The stream begins after them. A
reading that is far from the quartiles makes a command, to the topic of the reading below `commands/`. Each command is published
once, also if this is killed and started again.
"""

from __future__ import annotations

import sys

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from penstock.spark import messages, publishing
from penstock.spark.session import open_session

READINGS = "plant/#"
RANGES = 3
"""Distances of the quartiles from each other up to which a reading may be away from them."""

READINGS_MIN = 30
"""Readings of a topic from which on it is known what is usual."""


def value() -> Column:
    return F.col("body").cast("string").try_cast("double").alias("value")


def usual_values(history: DataFrame) -> DataFrame:
    """Return the first and the third quartile of the readings of each topic. Unlike a mean, odd readings hardly move them."""
    readings = history.where(F.col("topic").startswith("plant/")).select("topic", value())
    quartiles = (F.percentile("value", share).alias(name) for name, share in (("low", 0.25), ("high", 0.75)))
    return readings.groupBy("topic").agg(F.count("value").alias("count"), *quartiles).where(F.col("count") >= READINGS_MIN)


def commands(readings: DataFrame, usual: DataFrame) -> DataFrame:
    """Return a command for each reading that is far from what is usual.

    After a kill, the last batch is executed again, with quartiles that may have moved. Its commands are the same only because
    the quartiles are not in them.
    """
    room = RANGES * (F.col("high") - F.col("low"))
    far = (F.col("value") < F.col("low") - room) | (F.col("value") > F.col("high") + room)
    return (
        readings.select("topic", "position", value())
        .join(usual, "topic")
        .where(far)
        .select(
            F.concat(F.lit("commands/"), "topic").alias("topic"),
            F.to_json(F.struct(F.lit("check").alias("do"), "value", "position")).alias("body"),
        )
    )


def main(data_dir: str, target: str) -> None:
    spark = open_session(app_name="commands")
    usual = usual_values(messages(spark, data_dir)).cache()
    readings = spark.readStream.format("penstock").option("topic", READINGS).option("startingOffsets", "latest").load(data_dir)
    query = publishing(commands(readings, usual), "commands", target=target)
    print(f"{usual.count()} topics are known", flush=True)
    query.option("checkpointLocation", "commands-checkpoint").start().awaitTermination()


if __name__ == "__main__":
    main(*(sys.argv[1:] if len(sys.argv) == 3 else ["penstock-data", "127.0.0.1:8081"]))
