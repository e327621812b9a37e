"""Devices that have been silent for longer than usual.

python -m penstock.spark.jobs.silences penstock-data --device-level 3 --times 3
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from penstock.spark.jobs.script import check_bounds, moment_ms, run

USUAL_SHARE = 0.9
"""Share of the pauses of a device that are no longer than its usual interval. Neither bursts nor rare outages change it."""

PAUSES_MIN = 5
"""Pauses from which on the usual interval of a device is known."""


def device(level: int | None = None) -> Column:
    """Return the level of the topic that names the device, null in topics without that level. None takes the whole topic."""
    return F.col("topic") if level is None else F.get(F.split("topic", "/"), F.lit(level - 1))


def silences(
    messages: DataFrame, *, device_level: int | None = None, times: float = 3.0, at_ms: int | None = None
) -> DataFrame:
    """Return for each device how long it has been silent, and whether that is longer than some times its usual interval.

    Args:
        messages: rows of `penstock.spark.messages`, of which `topic` and `at_ms` are used.
        device_level: the level of the topic that names the device, from 1. By default each topic is a device.
        times: usual intervals after which a device is silent.
        at_ms: the time of the question, in ms since 1970. By default it is that of the last message of any device.

    Returns:
        Rows with `device`, `last_time`, `usual_ms`, `silent_ms` and `is_silent`, which is null if there are too few messages to
        know the usual interval.

    Raises:
        ReadOptionInvalid: `device_level` is below 1, or `times` below 0.
    """
    check_bounds(1, device_level=device_level)
    check_bounds(0, times=times)
    devices = Window.partitionBy(F.lit(0))  # all of them, which are few beside the messages
    until = F.max("last_ms").over(devices) if at_ms is None else F.lit(at_ms)
    pause = F.col("at_ms") - F.lag("at_ms").over(Window.partitionBy("device").orderBy("at_ms"))
    is_known = (F.col("pauses") >= PAUSES_MIN) & (F.col("usual_ms") > 0)
    return (
        messages.where(F.lit(True) if at_ms is None else F.col("at_ms") <= at_ms)
        .select(device(device_level).alias("device"), "at_ms")
        .where("device IS NOT NULL")
        .withColumn("pause_ms", pause)
        .groupBy("device")
        .agg(
            F.max("at_ms").alias("last_ms"),
            F.count("pause_ms").alias("pauses"),
            F.percentile_approx("pause_ms", USUAL_SHARE).alias("usual_ms"),
        )
        .withColumn("silent_ms", until - F.col("last_ms"))
        .withColumn("is_silent", F.when(is_known, F.col("silent_ms") > times * F.col("usual_ms")))
        .select("device", F.timestamp_millis("last_ms").alias("last_time"), "usual_ms", "silent_ms", "is_silent")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how many devices are silent, and which."""
    parser = ArgumentParser("penstock.spark.jobs.silences", description="Find devices that are silent for longer than usual.")
    parser.add_argument("--device-level", type=int, help="Level of the topic that names the device, from 1 (the whole topic).")
    parser.add_argument(
        "--times", type=float, default=3.0, help="Usual intervals after which a device is silent (%(default)s)."
    )
    parser.add_argument("--at", type=moment_ms, help="Time of the question, in ISO 8601 (that of the last message).")
    return run(parser, _show, arguments)


def _show(messages: DataFrame, options: Namespace) -> None:
    devices = silences(messages, device_level=options.device_level, times=options.times, at_ms=options.at)
    devices.groupBy("is_silent").count().show()
    devices.where("is_silent").orderBy(F.desc("silent_ms")).show(truncate=False)


if __name__ == "__main__":
    sys.exit(main())
