"""Messages and bytes by the first levels of the topic, day by day.

python -m penstock.spark.jobs.traffic penstock-data --levels 2
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from penstock.spark.jobs.script import check_bounds, run
from penstock.store.record import HEADER_BYTES

DAY_MS = 24 * 3_600_000


def prefix(levels: int) -> Column:
    """Return the first levels of the topic, or the whole topic if it has fewer."""
    return F.substring_index("topic", "/", levels)


def message_bytes() -> Column:
    """Return the size of the record of a message without its properties: the header, the topic and the body."""
    return F.lit(HEADER_BYTES) + F.octet_length("topic") + F.octet_length("body")


def traffic(messages: DataFrame, *, levels: int = 1) -> DataFrame:
    """Return the messages and their bytes by prefix of the topic and day in UTC, with the growth of the bytes.

    Args:
        messages: rows of `penstock.spark.messages`, of which `topic`, `at_ms` and `body` are used.
        levels: number of levels of the topic that are the prefix.

    Returns:
        Rows with `prefix`, `day`, `messages`, `bytes` (see `message_bytes`) and `growth`: 0.1 is a tenth more than on the day
        before. It is null for a day after one without messages.

    Raises:
        ReadOptionInvalid: `levels` is below 1.
    """
    check_bounds(1, levels=levels)
    days = Window.partitionBy("prefix").orderBy("day")
    follows = F.lag("day").over(days) == F.date_sub("day", 1)
    day = F.date_from_unix_date(F.floor(F.col("at_ms") / DAY_MS).cast("int"))
    return (
        messages.groupBy(prefix(levels).alias("prefix"), day.alias("day"))
        .agg(F.count("*").alias("messages"), F.sum(message_bytes()).alias("bytes"))
        .withColumn("growth", F.when(follows, F.col("bytes") / F.lag("bytes").over(days) - 1))
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the traffic of each day."""
    parser = ArgumentParser("penstock.spark.jobs.traffic", description="Show messages and bytes by topic, day by day.")
    parser.add_argument("--levels", type=int, default=1, help="Levels of the topic that are the prefix (%(default)s).")
    return run(parser, _show, arguments)


def _show(messages: DataFrame, options: Namespace) -> None:
    traffic(messages, levels=options.levels).orderBy(F.desc("day"), F.desc("bytes")).show(truncate=False)


if __name__ == "__main__":
    sys.exit(main())
