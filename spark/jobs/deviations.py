"""Readings that deviate from those before them.

python -m penstock.spark.jobs.deviations penstock-data --value '$.celsius' --sigmas 5
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from penstock.spark.jobs.script import check_bounds, run

ROUNDING = 1e-9
"""Differences from a mean up to this share of it are errors of rounding. They are no deviation where all values were equal."""


def number(path: str | None = None) -> Column:
    """Return the body, or a field of its JSON such as `$.celsius`, as a number. The column is null where there is none."""
    text = F.col("body").cast("string")
    value = (text if path is None else F.get_json_object(text, path)).try_cast("double")
    return F.when(F.abs(value) < float("inf"), value)


def deviations(messages: DataFrame, *, value_path: str | None = None, last: int = 20, sigmas: float = 4.0) -> DataFrame:
    """Return each reading with the mean of those before it, and whether it is further from it than some standard deviations.

    A device may publish several quantities, each to a topic of its own, so a reading is compared with those of its topic.

    Args:
        messages: rows of `penstock.spark.messages`, of which `topic`, `position`, `at_ms` and `body` are used.
        value_path: the field of a JSON body, such as `$.celsius`. By default the whole body is the number.
        last: number of readings with which each one is compared.
        sigmas: standard deviations from their mean beyond which a reading is unusual.

    Returns:
        Rows with `topic`, `position`, `time`, `value`, `mean`, `deviation` and `is_unusual`, which is null where there is no
        number, and for the first `last` readings.

    Raises:
        ReadOptionInvalid: `last` is below 2, or `sigmas` below 0.
    """
    check_bounds(2, last=last)
    check_bounds(0, sigmas=sigmas)
    # Messages without a number are a partition of their own, so that they are not among the last readings of others.
    before = Window.partitionBy("topic", F.isnull("value")).orderBy("at_ms", "position").rowsBetween(-last, -1)
    distance = F.abs(F.col("value") - F.col("mean"))
    is_unusual = distance > sigmas * F.col("deviation") + ROUNDING * F.abs("mean")
    return (
        messages.select("topic", "position", "at_ms", number(value_path).alias("value"))
        .withColumn("count", F.count("value").over(before))
        .withColumn("mean", F.avg("value").over(before))
        .withColumn("deviation", F.stddev("value").over(before))
        .withColumn("is_unusual", F.when(F.col("count") == last, is_unusual))
        .withColumn("time", F.timestamp_millis("at_ms"))
        .select("topic", "position", "time", "value", "mean", "deviation", "is_unusual")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how many readings are unusual, and the last of them."""
    parser = ArgumentParser("penstock.spark.jobs.deviations", description="Find readings that deviate from those before.")
    parser.add_argument("--value", metavar="PATH", help="Field of a JSON body, such as $.celsius (the whole body).")
    parser.add_argument("--last", type=int, default=20, help="Readings with which each one is compared (%(default)s).")
    parser.add_argument("--sigmas", type=float, default=4.0, help="Standard deviations that are usual (%(default)s).")
    return run(parser, _show, arguments)


def _show(messages: DataFrame, options: Namespace) -> None:
    readings = deviations(messages, value_path=options.value, last=options.last, sigmas=options.sigmas)
    readings.groupBy("is_unusual").count().show()
    readings.where("is_unusual").orderBy(F.desc("position")).show(truncate=False)


if __name__ == "__main__":
    sys.exit(main())
