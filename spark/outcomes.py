"""The pairing of deliveries with what settled them, and the one outcome that each delivery gets."""

from __future__ import annotations

from enum import StrEnum

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from spark.explode import HANDED_OUT
from store.record import Kind


class Outcome(StrEnum):
    """What became of a delivery. Each has exactly one."""

    ACKED_IN_TIME = "acked_in_time"
    ACKED_LATE = "acked_late"
    """Acknowledged after its deadline. The node refuses that, so it tells of a defect or of a foreign log."""
    REVIVED = "revived"
    EXTENDED = "extended"
    """A change of invisible time ended it and began another delivery of the same message."""
    DEAD_LETTERED = "dead_lettered"
    IN_FLIGHT = "in_flight"
    """Nothing followed yet, and its deadline plus the grace is not over."""
    LOST = "lost"
    """Nothing followed, and deadline and grace are over."""


ACKED = (Outcome.ACKED_IN_TIME, Outcome.ACKED_LATE)

_END_OF_KIND = {
    Kind.POP_REVIVED: Outcome.REVIVED,
    Kind.POP_INVISIBLE_CHANGED: Outcome.EXTENDED,
    Kind.POP_DEAD_LETTER: Outcome.DEAD_LETTERED,
}

_KIND_BITS = 4
"""An end is packed as `at_ms << 4 | kind`, so that one `min` finds the earliest and its kind. 16 kinds, years up to 19,000."""


def pair(events: DataFrame) -> DataFrame:
    """Bring together all that the log says of each delivery: one groupBy, no join.

    Half of what an outer join of the two sides costs: only one shuffle, and every row of it is a few numbers.

    Args:
        events: the table `events` of the data source.

    Returns:
        One row per key. Where `pop_ms` is null nothing handed that delivery out: what ended it is an orphan.
    """
    begins = F.col("event") == HANDED_OUT
    packed_end = F.shiftleft("at_ms", _KIND_BITS).bitwiseOR(F.col("event").cast("bigint"))
    return events.groupBy("key").agg(
        F.max("group_id").alias("group_id"),
        F.max(F.when(begins, F.col("at_ms"))).alias("pop_ms"),
        F.max("deadline_ms").alias("deadline_ms"),
        F.max("message_position").alias("message_position"),
        F.max("attempt").alias("attempt"),
        F.max("source").alias("source"),
        F.min(F.when(~begins, packed_end)).alias("end"),
        _count(Kind.POP_ACK).alias("acks"),
        F.count(F.when(~F.col("event").isin(HANDED_OUT, int(Kind.POP_ACK)), 1)).cast("int").alias("other_ends"),
    )


def _count(kind: Kind) -> Column:
    return F.count(F.when(F.col("event") == int(kind), 1)).cast("int")


def classify(pairs: DataFrame, *, as_of_ms: int, grace_ms: int) -> DataFrame:
    """Give each delivery its outcome.

    Args:
        pairs: what `pair` returns.
        as_of_ms: the time at which a window is open or over.
        grace_ms: how long after its deadline a delivery may stay unsettled before it is lost.

    Returns:
        The columns of `pairs`, and: outcome (null for an orphan), settled_ms, duplicate_acks (acks after the first), and
        conflicting (ended in two ways, or twice in one that isn't an ack; its outcome is the earliest).
    """
    kind = F.col("end").bitwiseAND((1 << _KIND_BITS) - 1)
    settled_ms = F.shiftright("end", _KIND_BITS)
    outcome = F.when(F.col("pop_ms").isNull(), F.lit(None).cast("string"))
    outcome = outcome.when(
        kind == int(Kind.POP_ACK),
        F.when(settled_ms <= F.col("deadline_ms"), Outcome.ACKED_IN_TIME.value).otherwise(Outcome.ACKED_LATE.value),
    )
    for end_kind, name in _END_OF_KIND.items():
        outcome = outcome.when(kind == int(end_kind), name.value)
    is_open = F.col("deadline_ms") + grace_ms >= as_of_ms
    outcome = outcome.otherwise(F.when(is_open, Outcome.IN_FLIGHT.value).otherwise(Outcome.LOST.value))
    return pairs.select(
        "*",
        outcome.alias("outcome"),
        settled_ms.alias("settled_ms"),
        F.greatest(F.col("acks") - 1, F.lit(0)).alias("duplicate_acks"),
        (F.least(F.col("acks"), F.lit(1)) + F.col("other_ends") > 1).alias("conflicting"),
    )
