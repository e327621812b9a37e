"""Reconciliation: pairs every delivery in the log with the record that settled it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import orjson
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.spark import outcomes, report, segments
from penstock.spark.datasource import INT64_MAX, PARTITION_BYTES
from penstock.spark.errors import JavaMissing, LogMissing, ReadOptionInvalid, ReconcileError, ReportDirInUse
from penstock.spark.segments import LogSurvey
from penstock.spark.session import open_session
from penstock.spark.summary import (
    REPORT,
    SCHEMA_VERSION,
    DeliveryOutcome,
    Example,
    GroupName,
    LogRange,
    Summary,
    group_row,
    group_sections,
    is_ok,
    totals,
)
from penstock.store.errors import LogCorrupt, StoreError
from penstock.store.record import Kind

GRACE_MS = 60_000
"""How long a delivery may stay unsettled after its deadline and back-off. Covers the timer's tick and bursts of revivals."""

EXAMPLES_MAX = 20
"""Maximum number of examples of each bad outcome. The table `deliveries/` has all of them."""

SEGMENTS_PER_CORE = 4
"""From this many segments per core up, each segment is one task, so that planning does not read the whole log."""

SUMMARY_FILE = "summary.json"
TABLES = ("deliveries", "groups", "orphans")

_EXAMPLE_ORDER = {
    "lost": ("deadline_ms", True),
    "conflicting": ("pop_ms", True),
    "dead_lettered": ("settled_ms", False),
    "revived": ("attempt", False),
}
"""Column by which the worst examples come first, and whether it ascends."""


class _Job(NamedTuple):
    """The inputs of one reconciliation."""

    spark: SparkSession
    log: LogSurvey
    partition_bytes: int
    as_of_ms: int
    grace_ms: int

    def read(self, table: str, *, verify: bool = True) -> DataFrame:
        """Return a table of the log up to the surveyed end."""
        reader = self.spark.read.format("commitlog").option("table", table).option("end_position", self.log.end)
        return reader.option("partition_bytes", self.partition_bytes).option("verify", verify).load(str(self.log.directory))


@dataclass
class Reconciliation:
    """The result of a reconciliation. It occupies Spark's cache until `close`."""

    summary: Summary
    deliveries: DataFrame
    """key, group_id, group, message_position, attempt, source, pop_ms, deadline_ms, outcome, settled_ms, duplicate_acks,
    conflicting; one row per delivery."""
    orphans: DataFrame
    """key, group_id, group, end_kind, settled_ms, acks, other_ends, before_log; one row per key without a delivery."""
    groups: DataFrame
    """The sections of the groups in the summary, one flat row each."""
    cached: DataFrame

    def write(self, out: str | Path) -> None:
        """Write the tables as Parquet, and `summary.json`, to the directory `out`. An earlier report there is replaced.

        Raises:
            ReportDirInUse: `out` has files, and they aren't an earlier report.
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
        """Free Spark's cache. Spark computes the DataFrames again if they are used afterwards."""
        self.cached.unpersist()


def reconcile(
    spark: SparkSession, data_dir: str | Path, *, as_of_ms: int | None = None, grace_ms: int = GRACE_MS
) -> Reconciliation:
    """Reconcile the log of a node, which may be running. The result covers the log up to its end at the time of the call.

    The key of a pair is the position of the checkpoint plus the index of the entry. A settlement whose index is beyond the
    end of its checkpoint is therefore an orphan only if no other delivery has that sum as its key.

    Args:
        spark: a session from `open_session`, or any session passed to `datasource.register`.
        data_dir: the node's data directory, or its folder `commitlog`.
        as_of_ms: the time at which deadlines are judged, in ms since 1970 UTC. Records stored later are ignored. The default
            is the store time of the log's last record, because a stopped node revives nothing.
        grace_ms: how long a delivery may stay unsettled after its deadline and its group's back-off before it counts as lost.

    Raises:
        ReadOptionInvalid: `grace_ms` or `as_of_ms` is negative.
        LogMissing: the directory holds no log.
        LogCorrupt, RecordCorrupt: the log is damaged. The message names segment and position.
    """
    if grace_ms < 0 or (as_of_ms is not None and as_of_ms < 0):
        raise ReadOptionInvalid(f"grace_ms is {grace_ms} and as_of_ms is {as_of_ms}, but neither may be negative.")
    log = segments.survey(data_dir)
    as_of_ms = log.last_ms if as_of_ms is None else as_of_ms
    many = len(log.segments) >= SEGMENTS_PER_CORE * spark.sparkContext.defaultParallelism
    job = _Job(spark, log, 0 if many else PARTITION_BYTES, as_of_ms, grace_ms)
    with _log_errors():
        events = job.read("events").drop("position").where(F.col("at_ms") <= as_of_ms)
        events = outcomes.with_steps(events, _steps(job))
        pairs = outcomes.with_changed_backoff(outcomes.pair(events), _backoff_changes(job))
        pairs = outcomes.classify(pairs, as_of_ms=as_of_ms, grace_ms=grace_ms)
        # All aggregates and tables are computed from it. Spark puts what exceeds memory on local disks.
        cached = pairs.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            return _summarise(job, cached)
        except BaseException:
            cached.unpersist()
            raise


def _summarise(job: _Job, cached: DataFrame) -> Reconciliation:
    spark, log = job.spark, job.log
    deliveries, orphans = cached.where(outcomes.is_shown(cached)), cached.where(F.col("pop_ms").isNull())
    counts = outcomes.count(deliveries)
    names = _group_names(job)
    spreads, messages = outcomes.spread(deliveries), outcomes.count_messages(deliveries)
    groups = group_sections(counts, spreads, messages, names, outcomes.count_extensions(cached), as_of_ms=job.as_of_ms)
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


def _steps(job: _Job) -> list[tuple[int, int, int]]:
    """Return the steps of the node's clock: begin and end of the window before each, and by how much the clock was moved."""
    found = job.read("steps", verify=False).where(F.col("end_ms") <= job.as_of_ms).orderBy("end_ms").collect()
    return [(row.begin_ms, row.end_ms, row.step_ms) for row in found]


def _backoff_changes(job: _Job) -> list[outcomes.BackoffChange]:
    """Return the back-offs that groups got after they were created, in the order of time."""
    changed = job.read("records", verify=False).where(
        (F.col("kind") == Kind.GROUP_CHANGED.name) & (F.col("store_ms") <= job.as_of_ms)
    )
    rows = changed.select("group_id", "store_ms", "position", "properties").orderBy("position").collect()
    ends_ms: dict[int, int] = {}
    found = []
    for row in reversed(rows):
        waits_ms = outcomes.waits_of(orjson.loads(row.properties or b"{}").get("settings", {}).get("backoff"))
        end_ms = ends_ms.get(row.group_id, INT64_MAX)
        ends_ms[row.group_id] = row.store_ms
        if waits_ms:
            found.append(outcomes.BackoffChange(row.group_id, row.store_ms, end_ms, waits_ms))
    return found[::-1]


def _group_names(job: _Job) -> dict[int, GroupName]:
    """Return the name and filter of each group id. The scan for events has verified the records."""
    named = job.read("groups", verify=False).groupBy("group_id").agg(F.first("group"), F.max("filter")).collect()
    return {group_id: GroupName(group, filter_) for group_id, group, filter_ in named}


def _examples(deliveries: DataFrame, name: str, names: dict[int, GroupName], log: LogSurvey) -> list[Example]:
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
        "group_id bigint, group string, filter string, deliveries bigint, conflicting bigint, extensions bigint",
        "duplicate_acks bigint, messages bigint, messages_acked bigint, oldest_in_flight_ms bigint",
        *(f"{outcome.value} bigint" for outcome in DeliveryOutcome),
        *(f"ack_latency_ms_{each} bigint, revive_lateness_ms_{each} bigint" for each in ("p50", "p90", "p99", "max")),
    )
)


@contextmanager
def _log_errors() -> Iterator[None]:
    """Raise an error of the log again as its own class. Spark passes the traceback of a worker as text."""
    try:
        yield
    except PySparkException as error:
        found = re.search(r"\b(RecordCorrupt|LogCorrupt|LogMissing): (.+)", str(error))
        if found is None:
            raise
        raise (LogMissing if found[1] == "LogMissing" else LogCorrupt)(found[2]) from error


def check_out(directory: Path) -> None:
    """Check that a report may be written to a directory.

    Raises:
        ReportDirInUse: it has files, and they aren't an earlier report.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    try:
        earlier = orjson.loads((directory / SUMMARY_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise ReportDirInUse(f"{directory} is not empty, and it holds no earlier report. Name another directory.") from error
    if not isinstance(earlier, dict) or earlier.get("report") != REPORT:
        raise ReportDirInUse(f"{directory / SUMMARY_FILE} was not written by `penstock reconcile`. Name another directory.")


def _write_summary(directory: Path, summary: object) -> None:
    """Replace the summary atomically, so that no reader sees a partial file."""
    part = directory / f".{SUMMARY_FILE}.part"
    part.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    os.replace(part, directory / SUMMARY_FILE)


STATUSES: dict[type[Exception], int] = {LogMissing: 3, StoreError: 4, JavaMissing: 5}
"""Exit statuses for reasons why there is no reconciliation: no log, a damaged log, no Java. For others it is 2: wrong usage,
such as a directory in use or an invalid option."""


def status_of(error: ReconcileError | StoreError) -> int:
    """Return the exit status for an error."""
    return next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 2)


class StageDisplay(Protocol):
    """Shows within its context what a command does at the moment."""

    def begin(self, what: str, /) -> None:
        """End the present stage, and begin another."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class _Silent:
    """Shows nothing."""

    def begin(self, what: str, /) -> None:
        pass


def run(
    data_dir: str | Path,
    out: str | Path | None = None,
    master: str = "local[*]",
    json: bool = False,
    as_of_ms: int | None = None,
    grace_ms: int = GRACE_MS,
    stages: StageDisplay | None = None,
) -> int:
    """Reconcile a log, write the report to `out` if it is given, and print it. This is the command `penstock reconcile`.

    With `json`, the command prints only the summary. Errors go to stderr. `stages` shows what it does at the moment.

    Returns:
        The exit status: 0 if all is well, 1 if a delivery is lost or conflicting, or one of `STATUSES`.
    """
    try:
        if out is not None:
            check_out(Path(out))
        segments.find(data_dir)
        already_open = SparkSession.getActiveSession() is not None
        with stages or nullcontext(_Silent()) as shown:
            shown.begin("start Spark")
            spark = open_session(master, "penstock reconcile")
            try:
                shown.begin("pair all deliveries with what settled them")
                found = reconcile(spark, data_dir, as_of_ms=as_of_ms, grace_ms=grace_ms)
                if out is not None:
                    shown.begin(f"write the tables to {out}")
                    found.write(out)
                shown.begin("stop Spark")
            finally:
                if not already_open:
                    spark.stop()
    except (ReconcileError, StoreError) as error:
        print(f"penstock reconcile: {error}", file=sys.stderr)
        return status_of(error)
    if json:
        sys.stdout.write(orjson.dumps(found.summary, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        report.show(found.summary)
    return 0 if found.summary["ok"] else 1
