"""Pairs deliveries with their settlements, gives each delivery one outcome, and computes figures over all deliveries."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from penstock.spark.records import HANDED_OUT
from penstock.spark.summary import QUANTILES, CountRow, DeliveryOutcome, MessagesRow, SpreadRow
from penstock.store.record import Kind

ACKED = (DeliveryOutcome.ACKED_IN_TIME.value, DeliveryOutcome.ACKED_LATE.value)

QUANTILE_ACCURACY = 10_000
"""The rank of a quantile is exact to one part in this many."""

_OUTCOME_OF_KIND = {
    Kind.POP_REVIVED: DeliveryOutcome.REVIVED,
    Kind.POP_INVISIBLE_CHANGED: DeliveryOutcome.EXTENDED,
    Kind.POP_DEAD_LETTER: DeliveryOutcome.DEAD_LETTERED,
    Kind.GROUP_OFFSET_RESET: DeliveryOutcome.VOIDED,
    Kind.GROUP_DELETED: DeliveryOutcome.VOIDED,
}

_KIND_BITS = 5
"""An end is packed as `at_ms << 5 | kind`, so that one `min` finds the earliest end and its kind."""

_ENDS = (Kind.POP_ACK, *_OUTCOME_OF_KIND)
assert max(_ENDS) < 1 << _KIND_BITS


def with_steps(events: DataFrame, steps: list[tuple[int, int, int]]) -> DataFrame:
    """Move the deadlines that the node has moved when its clock was stepped (`store.clocksteps`).

    Args:
        events: the table `events` of the data source.
        steps: begin and end of the window before each step, and the step, in ms. Nearly always there is none.
    """
    for begin_ms, end_ms, step_ms in steps:
        is_moved = F.col("at_ms").between(begin_ms, end_ms) & (F.col("deadline_ms") > end_ms)
        moved_ms = F.when(is_moved, F.lit(step_ms)).otherwise(F.lit(0))
        return_ms, deadline_ms = F.col("return_ms") + moved_ms, F.col("deadline_ms") + moved_ms
        events = events.withColumns({"return_ms": return_ms, "deadline_ms": deadline_ms})
    return events


def pair(events: DataFrame) -> DataFrame:
    """Collect all events of each delivery in one row, with one groupBy and no join.

    An outer join of beginnings and ends would need two shuffles. This needs one, of rows that are a few numbers.

    Args:
        events: the table `events` of the data source.

    Returns:
        One row per key. If `pop_ms` is null, the log has no beginning of the delivery, and its end is an orphan.
    """
    begins = F.col("event") == HANDED_OUT
    packed_end = F.shiftleft("at_ms", _KIND_BITS).bitwiseOR(F.col("event").cast("bigint"))
    is_ack = F.col("event") == int(Kind.POP_ACK)
    return events.groupBy("key").agg(
        F.max("group_id").alias("group_id"),
        F.max(F.when(begins, F.col("at_ms"))).alias("pop_ms"),
        F.max("deadline_ms").alias("deadline_ms"),
        F.max("return_ms").alias("return_ms"),
        F.max("message_position").alias("message_position"),
        F.max("attempt").alias("attempt"),
        F.max("source").alias("source"),
        F.min(F.when(~begins, packed_end)).alias("end"),
        F.count(F.when(is_ack, 1)).cast("int").alias("acks"),
        F.count(F.when(~begins & ~is_ack, 1)).cast("int").alias("other_ends"),
    )


def classify(pairs: DataFrame, *, as_of_ms: int, grace_ms: int) -> DataFrame:
    """Give each delivery its outcome.

    Args:
        pairs: what `pair` returns.
        as_of_ms: the time at which deadlines are judged.
        grace_ms: how long a delivery may stay unsettled after its deadline and back-off before it is lost.

    Returns:
        The columns of `pairs` except `end` and `return_ms`, and: outcome (null for an orphan), end_kind, settled_ms,
        duplicate_acks (acks after the first), and conflicting (whether the delivery ended in two ways, or twice in a way
        that isn't an ack). The outcome of a conflicting delivery is its earliest end; of two ends in the same ms, the ack.
    """
    kind = F.col("end").bitwiseAND((1 << _KIND_BITS) - 1)
    settled_ms = F.shiftright("end", _KIND_BITS)
    acked = F.when(settled_ms <= F.col("deadline_ms"), ACKED[0]).otherwise(ACKED[1])
    is_open = F.col("return_ms") + grace_ms >= as_of_ms
    unsettled = F.when(is_open, DeliveryOutcome.IN_FLIGHT.value).otherwise(DeliveryOutcome.LOST.value)
    outcome = F.when(F.col("pop_ms").isNull(), F.lit(None).cast("string")).when(kind == int(Kind.POP_ACK), acked)
    for end_kind, name in _OUTCOME_OF_KIND.items():
        outcome = outcome.when(kind == int(end_kind), name.value)
    return pairs.select(
        *(name for name in pairs.columns if name not in ("end", "return_ms")),
        outcome.otherwise(unsettled).alias("outcome"),
        _name_of(kind).alias("end_kind"),
        settled_ms.alias("settled_ms"),
        F.greatest(F.col("acks") - 1, F.lit(0)).alias("duplicate_acks"),
        (F.least(F.col("acks"), F.lit(1)) + F.col("other_ends") > 1).alias("conflicting"),
    )


def _name_of(kind: Column) -> Column:
    name = F.lit(None).cast("string")
    for end_kind in _ENDS:
        name = F.when(kind == int(end_kind), end_kind.name).otherwise(name)
    return name


def count(deliveries: DataFrame) -> list[CountRow]:
    """Count deliveries by group, outcome and attempt."""
    rows = deliveries.groupBy("group_id", "outcome", "attempt").agg(
        F.count("*"),
        F.sum(F.col("conflicting").cast("bigint")),
        F.sum("duplicate_acks"),
        F.min("pop_ms"),
    )
    return [CountRow(*row) for row in rows.collect()]


def spread(deliveries: DataFrame) -> list[SpreadRow]:
    """Return the quantiles of ack latency and revive lateness by group."""
    latency = F.when(F.col("outcome").isin(*ACKED), F.col("settled_ms") - F.col("pop_ms"))
    lateness = F.when(F.col("outcome") == DeliveryOutcome.REVIVED.value, F.col("settled_ms") - F.col("deadline_ms"))
    rows = deliveries.groupBy("group_id").agg(
        F.percentile_approx(latency, list(QUANTILES), QUANTILE_ACCURACY),
        F.percentile_approx(lateness, list(QUANTILES), QUANTILE_ACCURACY),
    )
    return [SpreadRow(*row) for row in rows.collect()]


def count_messages(deliveries: DataFrame) -> list[MessagesRow]:
    """Count the distinct messages of each group, and how many of them were acknowledged."""
    acked = F.max(F.col("outcome").isin(*ACKED).cast("int"))
    messages = deliveries.groupBy("group_id", "message_position").agg(acked.alias("acked"))
    rows = messages.groupBy("group_id").agg(F.count("*"), F.sum("acked"))
    return [MessagesRow(*row) for row in rows.collect()]


def count_orphans(orphans: DataFrame, log_start: int) -> tuple[int, int, int]:
    """Count the ends without a delivery: acks, other ends, and ends of deliveries from before the log's first segment."""
    before = F.col("key") < log_start
    row = orphans.agg(
        F.sum(F.when(~before, F.col("acks"))),
        F.sum(F.when(~before, F.col("other_ends"))),
        F.sum(F.when(before, F.col("acks") + F.col("other_ends"))),
    ).collect()[0]
    acks, others, before_log = (int(value or 0) for value in row)
    return acks, others, before_log
