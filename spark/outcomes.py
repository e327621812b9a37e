"""Pairs deliveries with their settlements, gives each delivery one outcome, and computes figures over all deliveries."""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from penstock.spark.records import EXTENDED, GIVEN_BACK, HANDED_OUT, NACKED, SETTLING, WAITING
from penstock.spark.summary import QUANTILES, CountRow, DeliveryOutcome, MessagesRow, SpreadRow
from penstock.store.record import Kind

ACKED = (DeliveryOutcome.ACKED_IN_TIME.value, DeliveryOutcome.ACKED_LATE.value)

QUANTILE_ACCURACY = 10_000
"""The rank of a quantile is exact to one part in this many."""

_OUTCOME_OF_EVENT = {
    int(Kind.POP_REVIVED): DeliveryOutcome.REVIVED,
    EXTENDED: DeliveryOutcome.EXTENDED,
    NACKED: DeliveryOutcome.NACKED,
    GIVEN_BACK: DeliveryOutcome.RETURNED,
    int(Kind.POP_DEAD_LETTER): DeliveryOutcome.DEAD_LETTERED,
    int(Kind.GROUP_OFFSET_RESET): DeliveryOutcome.VOIDED,
    int(Kind.GROUP_DELETED): DeliveryOutcome.VOIDED,
}

WAITS_MAX = 64
"""Attempts for which the waits of a back-off are computed. The node allows fewer."""

_EVENT_BITS = 8
"""An end is packed as `at_ms << 8 | event`, so that one `min` finds the earliest end and its event."""

_ENDS = {int(kind): kind.name for kind in SETTLING} | dict.fromkeys((NACKED, GIVEN_BACK), Kind.POP_INVISIBLE_CHANGED.name)
"""Names of the records that end deliveries, by event."""
assert max(_ENDS) < 1 << _EVENT_BITS


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


class BackoffChange(NamedTuple):
    """A back-off that a group got by a change of its settings."""

    group_id: int
    begin_ms: int
    """From when on it was in force."""
    end_ms: int
    """Until when."""
    waits_ms: list[int]
    """How long a message waits after each attempt has failed, from the first one on. The last wait holds for later attempts."""


def waits_of(backoff: object) -> list[int]:
    """Return the waits of a back-off as `pop.core.settings` writes it.

    It is a list of waits, or a rule with min_ms, max_ms and factor. Without one, the group has the back-off of the node, which
    the log does not say: then there are no waits.
    """
    if isinstance(backoff, list):
        return [int(wait_ms) for wait_ms in backoff]
    if not isinstance(backoff, dict):
        return []
    wait_ms, max_ms, factor = float(backoff["min_ms"]), int(backoff["max_ms"]), float(backoff.get("factor", 2.0))
    waits = [int(min(wait_ms, max_ms))]
    while 0 < wait_ms < max_ms and factor > 1 and len(waits) < WAITS_MAX:
        wait_ms *= factor
        waits.append(int(min(wait_ms, max_ms)))
    return waits


def with_changed_backoff(pairs: DataFrame, changes: list[BackoffChange]) -> DataFrame:
    """Give each delivery the time to return that the settings of its group allow which were in force before its deadline.

    The entry of a delivery says how long its message may wait by the settings at the pop. The node goes by those at the
    deadline.

    Args:
        pairs: what `pair` returns.
        changes: of all groups. Often there is none.
    """
    if not changes:
        return pairs
    schema = "group_id bigint, begin_ms bigint, end_ms bigint, waits_ms array<bigint>"
    of_change = F.struct("begin_ms", "end_ms", "waits_ms")
    history = (
        pairs.sparkSession.createDataFrame(changes, schema).groupBy("group_id").agg(F.collect_list(of_change).alias("changes"))
    )
    in_force = F.filter("changes", lambda each: (each.begin_ms <= F.col("deadline_ms")) & (each.end_ms > F.col("pop_ms")))
    waits_ms = F.transform(
        in_force, lambda each: F.element_at(each.waits_ms, F.least(F.col("attempt"), F.size(each.waits_ms)).cast("int"))
    )
    longest_ms = F.coalesce(F.array_max(waits_ms), F.lit(0))
    return (
        pairs.join(F.broadcast(history), "group_id", "left")
        .withColumn("return_ms", F.greatest("return_ms", F.col("deadline_ms") + longest_ms))
        .drop("changes")
    )


def pair(events: DataFrame) -> DataFrame:
    """Collect all events of each delivery in one row, with one groupBy and no join.

    An outer join of beginnings and ends would need two shuffles. This needs one, of rows that are a few numbers.

    Args:
        events: the table `events` of the data source.

    Returns:
        One row per key. If `pop_ms` is null, the log has no beginning of the delivery, and its end is an orphan.
    """
    begins = F.col("event") == HANDED_OUT
    packed_end = F.shiftleft("at_ms", _EVENT_BITS).bitwiseOR(F.col("event").cast("bigint"))
    is_ack = F.col("event") == int(Kind.POP_ACK)
    return events.groupBy("key").agg(
        F.max("group_id").alias("group_id"),
        F.max(F.when(begins, F.col("at_ms"))).alias("pop_ms"),
        F.max("deadline_ms").alias("deadline_ms"),
        F.max("return_ms").alias("return_ms"),
        F.max("message_position").alias("message_position"),
        F.max("attempt").alias("attempt"),
        F.max("source").alias("source"),
        F.max("via").alias("via"),
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
    event = F.col("end").bitwiseAND((1 << _EVENT_BITS) - 1)
    settled_ms = F.shiftright("end", _EVENT_BITS)
    acked = F.when(settled_ms <= F.col("deadline_ms"), ACKED[0]).otherwise(ACKED[1])
    is_open = F.col("return_ms") + grace_ms >= as_of_ms
    unsettled = F.when(is_open, DeliveryOutcome.IN_FLIGHT.value).otherwise(DeliveryOutcome.LOST.value)
    outcome = F.when(F.col("pop_ms").isNull(), F.lit(None).cast("string")).when(event == int(Kind.POP_ACK), acked)
    for of_event, found in _OUTCOME_OF_EVENT.items():
        outcome = outcome.when(event == of_event, found.value)
    return pairs.select(
        *(name for name in pairs.columns if name not in ("end", "return_ms")),
        outcome.otherwise(unsettled).alias("outcome"),
        _name_of(event).alias("end_kind"),
        settled_ms.alias("settled_ms"),
        F.greatest(F.col("acks") - 1, F.lit(0)).alias("duplicate_acks"),
        (F.least(F.col("acks"), F.lit(1)) + F.col("other_ends") > 1).alias("conflicting"),
    )


def _name_of(event: Column) -> Column:
    name = F.lit(None).cast("string")
    for of_event, record_name in _ENDS.items():
        name = F.when(event == of_event, record_name).otherwise(name)
    return name


def is_shown(pairs: DataFrame) -> Column:
    """Return whether a row of `classify` is a delivery of its own.

    One that was extended goes on in the row that continues it. A message that its consumer returned is with nobody, so its wait
    is none either. Each is shown all the same if something is wrong with it.
    """
    is_part = (pairs.via == WAITING) | (pairs.outcome == DeliveryOutcome.EXTENDED.value)
    return pairs.pop_ms.isNotNull() & (~is_part | pairs.conflicting | (pairs.outcome == DeliveryOutcome.LOST.value))


def count_extensions(pairs: DataFrame) -> dict[int, int]:
    """Count, by group, how often a consumer has extended the invisible time of a delivery."""
    extended = pairs.where(pairs.outcome == DeliveryOutcome.EXTENDED.value)
    return {row["group_id"]: row["count"] for row in extended.groupBy("group_id").count().collect()}


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
