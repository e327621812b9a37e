"""Commands to devices whose readings are unusual: Spark follows the log, compares, and publishes.

python examples/spark_commands.py penstock-data 127.0.0.1:8081

What is usual comes from the messages that the node has so far: mean and standard deviation of each topic. The stream begins
after them. A reading that is far from the mean makes a command, to the topic of the reading below `commands/`. Each command is
published once, also if this is killed and started again.
"""

from __future__ import annotations

import sys

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from penstock.spark import messages, publishing
from penstock.spark.session import open_session

READINGS = "plant/#"
SIGMAS = 4
READINGS_MIN = 30
"""Readings of a topic from which on it is known what is usual."""


def value() -> Column:
    return F.col("body").cast("string").try_cast("double").alias("value")


def usual_values(history: DataFrame) -> DataFrame:
    """Return mean and standard deviation of the readings of each topic."""
    readings = history.where(F.col("topic").startswith("plant/")).select("topic", value())
    figures = F.count("value").alias("count"), F.avg("value").alias("mean"), F.stddev("value").alias("sigma")
    return readings.groupBy("topic").agg(*figures).where(F.col("count") >= READINGS_MIN)


def commands(readings: DataFrame, usual: DataFrame) -> DataFrame:
    """Return a command for each reading that is far from what is usual."""
    far = F.abs(F.col("value") - F.col("mean")) > SIGMAS * F.col("sigma")
    return (
        readings.select("topic", "position", value())
        .join(usual, "topic")
        .where(far)
        .select(
            F.concat(F.lit("commands/"), "topic").alias("topic"),
            F.to_json(F.struct(F.lit("check").alias("do"), "value", "mean", "position")).alias("body"),
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
