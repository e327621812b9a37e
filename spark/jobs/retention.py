"""A plan of the retention: for how long a disk keeps the log, and how much of it some days take.

python -m penstock.spark.jobs.retention penstock-data --disk-gb 100 --days 7
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from penstock.spark.jobs.script import check_bounds, run
from penstock.spark.jobs.traffic import DAY_MS, message_bytes, prefix

DAYS_MIN = 0.001
"""Shortest time for which a retention is planned: a minute and a half. For the options, 0 is no limit."""

WHOLE_LOG = "#"
"""Prefix of the row for all messages."""


def retention_plan(messages: DataFrame, *, levels: int = 1, disk_bytes: int, days: float) -> DataFrame:
    """Return how many days of the log fit on a disk, and how many bytes some days take: for all messages and by prefix.

    A node has one retention for its whole log. The row `#` has the values for its options `store.retention` and
    `store.retention_bytes`. That of a prefix has them for a node that stores nothing else.

    A log holds more than messages, such as deliveries and acknowledgements. So its size is the distance of the first message
    from the last one, and each prefix has its share of it by `traffic.message_bytes`. Copies of older records are not in it.

    Args:
        messages: all rows of `penstock.spark.messages`, of which `topic`, `position`, `at_ms` and `body` are used.
        levels: number of levels of the topic that are the prefix.
        disk_bytes: bytes of disk for the log.
        days: days for which records are to be kept.

    Returns:
        Rows with `prefix`, `share`, `bytes_per_day`, the `days` that fit on the disk, as `retention_ms`, too, and the
        `retention_bytes` of the wanted days. These are null if all messages have one time, so that no rate is known.

    Raises:
        ReadOptionInvalid: `levels` or `disk_bytes` is below 1, or `days` is below `DAYS_MIN`.
    """
    check_bounds(1, levels=levels, disk_bytes=disk_bytes)
    check_bounds(DAYS_MIN, days=days)
    log = Window.partitionBy(F.lit(0))  # all prefixes, which are few beside the messages
    first, last = F.min("first").over(log), F.max("last").over(log)
    log_days = F.nullif((last.at_ms - first.at_ms) / DAY_MS, F.lit(0))
    bytes_per_day = F.ceil(F.col("share") * (last.position - first.position) / log_days)
    return (
        messages.withColumn("prefix", prefix(levels))
        .withColumn("place", F.struct("position", "at_ms"))
        .rollup("prefix")
        .agg(F.sum(message_bytes()).alias("bytes"), F.min("place").alias("first"), F.max("place").alias("last"))
        .withColumn("share", F.col("bytes") / F.max("bytes").over(log))
        .select(F.coalesce("prefix", F.lit(WHOLE_LOG)).alias("prefix"), "share", bytes_per_day.alias("bytes_per_day"))
        .withColumn("days", disk_bytes / F.col("bytes_per_day"))
        .withColumn("retention_ms", F.ceil(F.col("days") * DAY_MS))
        .withColumn("retention_bytes", F.ceil(days * F.col("bytes_per_day")))
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan."""
    parser = ArgumentParser("penstock.spark.jobs.retention", description="Plan the retention by the traffic of the log.")
    parser.add_argument("--levels", type=int, default=1, help="Levels of the topic that are the prefix (%(default)s).")
    parser.add_argument("--disk-gb", type=float, default=100.0, help="Disk for the log, in GB of 10^9 bytes (%(default)s).")
    parser.add_argument("--days", type=float, default=3.0, help="Days for which records are to be kept (%(default)s).")
    return run(parser, _show, arguments)


def _show(messages: DataFrame, options: Namespace) -> None:
    plan = retention_plan(messages, levels=options.levels, disk_bytes=round(options.disk_gb * 1e9), days=options.days)
    plan.orderBy(F.desc("share"), "prefix").show(truncate=False)


if __name__ == "__main__":
    sys.exit(main())
