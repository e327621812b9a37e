"""Reconciliation: every delivery that the log hands out is paired with what settled it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import orjson
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.spark import outcomes, report, segments
from penstock.spark.datasource import PART_BYTES
from penstock.spark.errors import LogMissing, OptionInvalid, ReconcileError, ReportDirInUse
from penstock.spark.segments import Log
from penstock.spark.session import open_session
from penstock.spark.summary import (
    REPORT,
    SCHEMA_VERSION,
    Example,
    GroupName,
    LogRange,
    Outcome,
    Summary,
    group_row,
    group_sections,
    is_ok,
    totals,
)
from penstock.store.errors import LogCorrupt, StoreError

GRACE_MS = 60_000
"""How long after deadline and back-off a delivery may stay unsettled: covers the tick and a burst of revivals."""

EXAMPLES_MAX = 20
"""Deliveries shown of each bad kind. Every one is in the table `deliveries/`."""

PARTS_PER_CORE = 4
"""With this many segments per core, a segment is a task of its own: then planning need not walk through the log."""

SUMMARY_FILE = "summary.json"
TABLES = ("deliveries", "groups", "orphans")

_EXAMPLE_ORDER = {
    "lost": ("deadline_ms", True),
    "conflicting": ("pop_ms", True),
    "dead_lettered": ("settled_ms", False),
    "revived": ("attempt", False),
}
"""Which examples are the worst: by this column, and whether ascending."""


class _Job(NamedTuple):
    """One reconciliation under way."""

    spark: SparkSession
    log: Log
    part_bytes: int
    as_of_ms: int
    grace_ms: int

    def read(self, table: str, *, verify: bool = True) -> DataFrame:
        """Return a table of the log as it was surveyed."""
        reader = self.spark.read.format("commitlog").option("table", table).option("end_position", self.log.end)
        return reader.option("part_bytes", self.part_bytes).option("verify", verify).load(str(self.log.directory))


@dataclass
class Reconciliation:
    """What a reconciliation found. Holds Spark's cache until `close`."""

    summary: Summary
    deliveries: DataFrame
    """key, group_id, group, message_position, attempt, source, pop_ms, deadline_ms, outcome, settled_ms, duplicate_acks,
    conflicting; one row per delivery."""
    orphans: DataFrame
    """key, group_id, group, end_kind, settled_ms, acks, other_ends, before_log; one row per key that was never handed out."""
    groups: DataFrame
    """The groups' sections of the summary, flat."""
    cached: DataFrame

    def write(self, out: str | Path) -> None:
        """Write the tables as Parquet and `summary.json` to the directory `out`, over an earlier report there.

        Raises:
            ReportDirInUse: `out` has files and isn't an earlier report.
        """
        directory = Path(out)
        check_out(directory)
        directory.mkdir(parents=True, exist_ok=True)
        _write_summary(directory, {**self.summary, "complete": False})
        for name in TABLES:
            table: DataFrame = getattr(self, name)
            table.write.mode("overwrite").parquet(str((directory / name).absolute()))
        _write_summary(directory, self.summary)

    def close(self) -> None:
        """Give back Spark's cache; the DataFrames are computed anew if they are used after that."""
        self.cached.unpersist()


def reconcile(
    spark: SparkSession, data_dir: str | Path, *, as_of_ms: int | None = None, grace_ms: int = GRACE_MS
) -> Reconciliation:
    """Reconcile the log of a stopped or a running node, as it stands now.

    Deliveries and what settled them are paired by position of the checkpoint plus index. A reference whose index is
    behind the end of its checkpoint is therefore an orphan only if that sum is no other delivery's.

    Args:
        spark: a session from `open_session`, or one that `datasource.register` was called for.
        data_dir: the node's data directory, or its folder `commitlog`.
        as_of_ms: the time, ms since 1970 UTC, at which a delivery's window is open or over; what was stored later is left
            out. Default: the time of the log's last record, since a stopped node revives nothing.
        grace_ms: how long after its deadline, and its group's back-off, a delivery may stay unsettled before it counts as lost.

    Raises:
        OptionInvalid: `grace_ms` or `as_of_ms` is negative.
        LogMissing: there is no log.
        LogCorrupt, RecordCorrupt: the log is damaged. The message names segment and position.
    """
    if grace_ms < 0 or (as_of_ms is not None and as_of_ms < 0):
        raise OptionInvalid(f"grace_ms={grace_ms} and as_of_ms={as_of_ms} must not be negative")
    log = segments.survey(data_dir)
    as_of_ms = log.last_ms if as_of_ms is None else as_of_ms
    many = len(log.segments) >= PARTS_PER_CORE * spark.sparkContext.defaultParallelism
    job = _Job(spark, log, 0 if many else PART_BYTES, as_of_ms, grace_ms)
    with _log_errors():
        events = job.read("events").drop("position").where(F.col("at_ms") <= as_of_ms)
        pairs = outcomes.classify(outcomes.pair(events), as_of_ms=as_of_ms, grace_ms=grace_ms)
        # Aggregates and tables are all made of it. What does not fit into memory goes to local disks.
        cached = pairs.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            return _summarise(job, cached)
        except BaseException:
            cached.unpersist()
            raise


def _summarise(job: _Job, cached: DataFrame) -> Reconciliation:
    spark, log = job.spark, job.log
    is_delivery = F.col("pop_ms").isNotNull()
    deliveries, orphans = cached.where(is_delivery), cached.where(~is_delivery)
    counts = outcomes.count(deliveries)
    names = _group_names(job)
    spreads, messages = outcomes.spread(deliveries), outcomes.count_messages(deliveries)
    groups = group_sections(counts, spreads, messages, names, as_of_ms=job.as_of_ms)
    acks, others, before_log = outcomes.count_orphans(orphans, log.start)
    found = totals(groups, orphan_acks=acks, orphan_others=others, before_log=before_log)
    bad = {**found["outcomes"], "conflicting": found["conflicting"]}
    summary = Summary(
        report=REPORT,
        schema_version=SCHEMA_VERSION,
        complete=True,
        ok=is_ok(found),
        data_dir=str(log.directory),
        log=LogRange(
            start_position=log.start,
            end_position=log.end,
            first_ms=log.first_ms,
            last_ms=log.last_ms,
            torn_tail=log.torn,
        ),
        as_of_ms=job.as_of_ms,
        grace_ms=job.grace_ms,
        totals=found,
        groups=groups,
        examples={name: _examples(deliveries, name, names, log) if bad[name] else [] for name in _EXAMPLE_ORDER},
    )
    named = spark.createDataFrame([(key, name.group) for key, name in names.items()], "group_id bigint, group string")
    return Reconciliation(
        summary,
        _deliveries_table(deliveries, named),
        _orphans_table(orphans, named, log.start),
        spark.createDataFrame([group_row(group) for group in groups], _GROUPS_SCHEMA),
        cached,
    )


def _group_names(job: _Job) -> dict[int, GroupName]:
    """Return who each group id is. Records of it were verified by the scan for events."""
    named = job.read("groups", verify=False).groupBy("group_id").agg(F.first("group"), F.max("filter")).collect()
    return {group_id: GroupName(group, filter_) for group_id, group, filter_ in named}


def _examples(deliveries: DataFrame, name: str, names: dict[int, GroupName], log: Log) -> list[Example]:
    column, ascending = _EXAMPLE_ORDER[name]
    wanted = F.col("conflicting") if name == "conflicting" else F.col("outcome") == name
    rows = deliveries.where(wanted).orderBy(column, "key", ascending=[ascending, True]).limit(EXAMPLES_MAX).collect()
    return [
        Example(
            key=row.key,
            group_id=row.group_id,
            group=names[row.group_id].group,
            outcome=row.outcome,
            message_position=row.message_position,
            topic=segments.topic_at(log.segments, row.message_position),
            attempt=row.attempt,
            pop_ms=row.pop_ms,
            deadline_ms=row.deadline_ms,
            settled_ms=row.settled_ms,
        )
        for row in rows
    ]


def _deliveries_table(deliveries: DataFrame, named: DataFrame) -> DataFrame:
    return deliveries.join(F.broadcast(named), "group_id", "left").select(
        "key",
        "group_id",
        "group",
        "message_position",
        "attempt",
        "source",
        "pop_ms",
        "deadline_ms",
        "outcome",
        "settled_ms",
        "duplicate_acks",
        "conflicting",
    )


def _orphans_table(orphans: DataFrame, named: DataFrame, log_start: int) -> DataFrame:
    return orphans.join(F.broadcast(named), "group_id", "left").select(
        "key",
        "group_id",
        "group",
        "end_kind",
        "settled_ms",
        "acks",
        "other_ends",
        (F.col("key") < log_start).alias("before_log"),
    )


_GROUPS_SCHEMA = ", ".join(
    (
        "group_id bigint, group string, filter string, deliveries bigint, conflicting bigint, duplicate_acks bigint",
        "messages bigint, messages_acked bigint, oldest_in_flight_ms bigint",
        *(f"{outcome.value} bigint" for outcome in Outcome),
        *(f"ack_latency_ms_{each} bigint, revive_lateness_ms_{each} bigint" for each in ("p50", "p90", "p99", "max")),
    )
)


@contextmanager
def _log_errors() -> Iterator[None]:
    """Raise what a worker found wrong with the log as the error that it is: Spark hands over its traceback as text."""
    try:
        yield
    except PySparkException as error:
        found = re.search(r"\b(RecordCorrupt|LogCorrupt|LogMissing): (.+)", str(error))
        if found is None:
            raise
        raise (LogMissing if found[1] == "LogMissing" else LogCorrupt)(found[2]) from error


def check_out(directory: Path) -> None:
    """Refuse a directory that a report must not be written to.

    Raises:
        ReportDirInUse: it has files, and isn't an earlier report.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    try:
        earlier = orjson.loads((directory / SUMMARY_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise ReportDirInUse(f"{directory} is not empty, and not an earlier report: name another directory") from error
    if not isinstance(earlier, dict) or earlier.get("report") != REPORT:
        raise ReportDirInUse(f"{directory / SUMMARY_FILE} is not one of ours: name another directory")


def _write_summary(directory: Path, summary: object) -> None:
    """Replace the summary in one step, so that no reader sees half of it."""
    part = directory / f".{SUMMARY_FILE}.part"
    part.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    os.replace(part, directory / SUMMARY_FILE)


def run(
    data_dir: str | Path,
    out: str | Path | None = None,
    master: str = "local[*]",
    json: bool = False,
    as_of_ms: int | None = None,
    grace_ms: int = GRACE_MS,
) -> int:
    """Reconcile a log, write the report to `out` if that is given, and print it: what `penstock reconcile` does.

    With `json` stdout gets the summary and nothing else. Errors go to stderr.

    Returns:
        The exit status: 0, 1 where something is lost or conflicting, 2 where no reconciliation could be made (no log, a
        damaged log, no Java, a directory in use, a wrong option).
    """
    try:
        if out is not None:
            check_out(Path(out))
        segments.find(data_dir)
        already_open = SparkSession.getActiveSession() is not None
        spark = open_session(master, "penstock reconcile")
        try:
            found = reconcile(spark, data_dir, as_of_ms=as_of_ms, grace_ms=grace_ms)
            if out is not None:
                found.write(out)
        finally:
            if not already_open:
                spark.stop()
    except (ReconcileError, StoreError) as error:
        print(f"penstock reconcile: {error}", file=sys.stderr)
        return 2
    if json:
        sys.stdout.write(orjson.dumps(found.summary, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        report.show(found.summary)
    return 0 if found.summary["ok"] else 1
