"""Pairs every checkpoint in the log with its end, and writes the report.

A run makes its report in a hidden directory beside it, and removes those that killed runs have left.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.spark import segments
from penstock.spark.errors import ReadOptionInvalid, ReportDirInUse
from penstock.spark.parquet.files import DIRECTORY, reading
from penstock.spark.reconciliation import page
from penstock.spark.reconciliation import tables as steps
from penstock.spark.reconciliation.engines import Engine, Row
from penstock.spark.reconciliation.inputs import Inputs, prepare
from penstock.spark.reconciliation.nodecheck import NodeState, ReadState, compare, read_together
from penstock.spark.reconciliation.selection import register_narrowed, report_filter
from penstock.spark.reconciliation.summary import (
    REPORT,
    SCHEMA_VERSION,
    DamagedRange,
    Example,
    LogPart,
    NodeCheck,
    Outcome,
    Summary,
    Totals,
    group_sections,
    hours,
    is_ok,
    totals,
)
from penstock.spark.reconciliation.tables import PARAMETERS
from penstock.store.errors import TopicInvalid
from penstock.store.topics import check_filter

GRACE_MS = 60_000
"""How long a delivery may stay without an end after deadline and back-off. Covers the timer's tick and bursts of revivals."""

EXAMPLES_MAX = 20
"""Maximum number of examples of each outcome. The table `outcomes/` has all of them."""

SUMMARY_FILE, PAGE_FILE = "summary.json", "report.html"

_EXAMPLE_ORDER = {
    Outcome.LOST: "deadline_ms, key",
    Outcome.CONFLICTING: "popped_ms, key",
    Outcome.ACKED_LATE: "ended_ms DESC, key",
    Outcome.DEAD_LETTERED: "ended_ms DESC, key",
    Outcome.REVIVED: "attempt DESC, key",
    Outcome.UNKNOWN: "popped_ms, key",
}
"""How the worst examples of each outcome come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileOptions:
    """What a reconciliation is asked.

    Parameters:
        as_of_ms: the time at which deadlines are judged, in ms since 1970 UTC; at least 0. Records stored later are ignored.
            None is the store time of the log's last record, because a stopped node revives nothing.
        grace_ms: how long a delivery may stay without an end after its deadline and its group's back-off before it is lost;
            at least 0.
        since: where to begin: a position, a date as YYYY-MM-DD, or "last", the last seal that the report before in the same
            directory has read. What was open there is known. None is the beginning of the tables, or of the log.
        groups: names of groups. The report has only their deliveries; empty for those of all groups.
        topics: MQTT topic filters. The report has only deliveries of messages whose topic matches one of them; empty for all.
    """

    as_of_ms: int | None = None
    grace_ms: int = GRACE_MS
    since: str | int | None = None
    groups: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.grace_ms < 0 or (self.as_of_ms is not None and self.as_of_ms < 0):
            raise ReadOptionInvalid(f"grace_ms is {self.grace_ms} and as_of_ms is {self.as_of_ms}: neither may be negative.")
        for topic_filter in self.topics:
            try:
                check_filter(topic_filter)
            except TopicInvalid as error:
                raise ReadOptionInvalid(f"A topic of the reconciliation is not valid: {error}.") from error


def reconcile(
    engine: Engine,
    data_dir: str | Path,
    out: str | Path,
    options: ReconcileOptions | None = None,
    began: Callable[[str], None] = lambda what: None,
    read_state: ReadState | None = None,
) -> Summary:
    """Reconcile the log of a node, which may be running, up to its end at the time of the call.

    A report is never there in part: it is made beside `out`, and takes the place of an earlier one in the end. A run that was
    killed leaves a hidden directory beside `out`, which the next run removes.

    Args:
        engine: what runs the SQL. It is not closed.
        data_dir: the node's data directory, or its folder `commitlog`.
        out: the directory of the report: `summary.json`, `report.html`, and the tables of `steps.KEPT`. An earlier report is
            replaced. Spark's executors must see it and the data directory under the same paths.
        options: what to ask.
        began: called with the name of each step when it begins.
        read_state: asks the running node for its state. The report ends at the position of its counters then, and has the
            comparison with them. Deadlines are judged at `as_of_ms`, or at the last record if that is later.

    Raises:
        ReadOptionInvalid: an option is invalid, or the log has no group of a name.
        NodeUnreadable: the node does not answer, or it writes another log.
        ReportDirInUse: `out` has files, and they aren't an earlier report.
        LogMissing: the directory holds no log.
        LogCorrupt, RecordCorrupt: the log is damaged. The message names segment and position.
        TablesInvalid: the tables of the log are damaged, or of another log.
    """
    options = options or ReconcileOptions()
    check_options(options, has_node=read_state is not None)
    target = Path(out).absolute()
    before = _earlier_report(target)
    with scratch_beside(target) as scratch, reading(segments.find(data_dir).parent / DIRECTORY):
        began("read the end of the log")
        state, log = (None, segments.survey(data_dir)) if read_state is None else read_together(read_state, data_dir)
        inputs = prepare(log, scratch, options.since, before.get("log", {}).get("sealed_position"))
        as_of_ms = inputs.range.last_ms if options.as_of_ms is None else options.as_of_ms
        if state is not None:
            as_of_ms = max(as_of_ms, inputs.range.last_ms)  # the store's clock may be ahead, and the node has counted it all
        _register(engine, inputs, as_of_ms, options, scratch)
        report = scratch / "report"
        report.mkdir()
        for step in steps.load():
            began(step.name.replace("_", " "))
            if step.is_view:
                engine.view(step.name, step.sql)
            else:
                engine.materialise(step.name, step.sql, report / step.name if step.name in steps.KEPT else None)
        began("summarise")
        summary = _summarise(engine, inputs, str(Path(data_dir).absolute()), as_of_ms, options, state)
        (report / SUMMARY_FILE).write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
        (report / PAGE_FILE).write_text(page.render(summary), encoding="utf-8")
        _replace(report, target, scratch)
        return summary


def check_options(options: ReconcileOptions, *, has_node: bool) -> None:
    """Refuse options that contradict each other.

    Raises:
        ReadOptionInvalid: the report is to be compared with a node, and has a filter by topic.
    """
    if has_node and options.topics:
        raise ReadOptionInvalid("A node counts by group and not by topic: leave out --check or --topic.")


def _register(engine: Engine, inputs: Inputs, as_of_ms: int, options: ReconcileOptions, scratch: Path) -> None:
    if options.groups or options.topics:
        register_narrowed(engine, inputs, options.groups, options.topics, scratch)
    else:
        for each in inputs.tables:
            engine.register(each.table, each.name, each.files)
    # Where a snapshot says what is open, nothing else is open that began before.
    known_at = max(inputs.known, default=-1)
    damages = [row["until_position"] for row in inputs.damages if row["at_ms"] <= as_of_ms]
    values = {
        "begin_position": inputs.range.begin,
        "damaged_until": max((position for position in damages if position > known_at), default=-1),
        "as_of_ms": as_of_ms,
        "grace_ms": options.grace_ms,
    }
    path = scratch / "parameters.parquet"
    pq.write_table(pa.table({column.name: pa.array([values[column.name]]) for column in PARAMETERS.columns}), path)
    engine.register(PARAMETERS, PARAMETERS.name, [path])


def _summarise(
    engine: Engine, inputs: Inputs, data_dir: str, as_of_ms: int, options: ReconcileOptions, state: NodeState | None
) -> Summary:
    def rows(name: str) -> list[Row]:
        return engine.rows(f"SELECT * FROM {name}")

    tallies = engine.rows(
        f"SELECT group_id, group_name, outcome, attempt, bucket_ms, CAST(sum(deliveries) AS BIGINT) AS deliveries, "
        f"CAST(sum(duplicate_acks) AS BIGINT) AS duplicate_acks, min(first_popped_ms) AS first_popped_ms FROM {steps.TALLIES} "
        f"GROUP BY group_id, group_name, outcome, attempt, bucket_ms"
    )
    by_hour = engine.rows(
        f"SELECT hour_ms, outcome, CAST(sum(deliveries) AS BIGINT) AS deliveries FROM {steps.TALLIES} GROUP BY hour_ms, outcome"
    )
    strays = rows(steps.STRAY_TALLIES)
    log = inputs.range
    # At a seal the table `open` says what was open. At the beginning of a log that retention has trimmed, only a snapshot does.
    is_unknown = log.begin == log.start > 0 and log.begin not in inputs.known
    groups = group_sections(
        tallies,
        rows(steps.MESSAGE_TALLIES),
        strays,
        rows(steps.GROUP_TALLIES),
        as_of_ms=as_of_ms,
        is_unknown=is_unknown,
    )
    found = totals(groups, strays)
    unknown = found["outcomes"][Outcome.UNKNOWN] + found["message_outcomes"][Outcome.UNKNOWN]
    narrowed = report_filter(engine, options.groups, options.topics) if options.groups or options.topics else None
    unknown += narrowed["unread"] if narrowed is not None else 0
    check = _check(engine, inputs, options, state, is_certain=not (is_unknown or inputs.damages)) if state is not None else None
    differing = check["differing"] if check is not None else 0
    is_certain = check is None or check["certain"]
    return Summary(
        report=REPORT,
        schema_version=SCHEMA_VERSION,
        engine=engine.name,
        ok=is_ok(found) and not (differing and is_certain),
        complete=unknown == 0 and not (differing and not is_certain),
        data_dir=data_dir,
        log=LogPart(
            start_position=log.start,
            begin_position=log.begin,
            end_position=log.end,
            sealed_position=log.sealed,
            first_ms=log.first_ms,
            last_ms=log.last_ms,
            torn_tail=log.torn,
        ),
        as_of_ms=as_of_ms,
        grace_ms=options.grace_ms,
        filter=narrowed,
        node=check,
        totals=found,
        groups=groups,
        hours=hours(by_hour),
        damages=[
            DamagedRange(position=row["position"], until_position=row["until_position"], at_ms=row["at_ms"], cause=row["cause"])
            for row in inputs.damages
            if row["until_position"] > log.begin
        ],
        examples=_examples(engine, found),
    )


def _check(engine: Engine, inputs: Inputs, options: ReconcileOptions, state: NodeState, *, is_certain: bool) -> NodeCheck:
    standing = engine.rows(f"SELECT * FROM {steps.STANDING}")
    is_whole = inputs.range.begin == 0
    return compare(state, standing, options.groups, is_whole=is_whole, is_certain=is_certain)


def _examples(engine: Engine, found: Totals) -> dict[str, list[Example]]:
    """Return the worst deliveries of some outcomes. Waits of returned messages are there if they are lost."""
    examples: dict[str, list[Example]] = {outcome.value: [] for outcome in _EXAMPLE_ORDER}
    wanted = [
        f"SELECT * FROM (SELECT * FROM remarkable WHERE outcome = '{outcome}' "
        f"ORDER BY {order} LIMIT {EXAMPLES_MAX}) {outcome}_ones"
        for outcome, order in _EXAMPLE_ORDER.items()
        if found["outcomes"][outcome] or found["message_outcomes"].get(outcome)
    ]
    if not wanted:
        return examples
    rows = engine.rows(" UNION ALL ".join(wanted))
    positions = ", ".join(sorted({str(row["message_position"]) for row in rows}))
    named = engine.rows(f"SELECT position, topic FROM messages WHERE position IN ({positions})") if rows else []
    topics = {row["position"]: row["topic"] for row in named}
    for row in rows:
        example = Example(
            delivery_id=row["delivery_id"],
            group_id=row["group_id"],
            group=row["group_name"],
            outcome=row["outcome"],
            message_position=row["message_position"],
            topic=topics.get(row["message_position"]),
            attempt=row["attempt"],
            popped_ms=row["popped_ms"],
            deadline_ms=row["deadline_ms"],
            ended_ms=row["ended_ms"],
        )
        examples[row["outcome"]].append(example)
    return examples


def check_out(directory: Path) -> None:
    """Check that a report may be written to a directory.

    Raises:
        ReportDirInUse: it has files, and they aren't an earlier report.
    """
    _earlier_report(directory)


def _earlier_report(directory: Path) -> dict[str, Any]:
    """Return the summary of the report in a directory, empty if it has no files or does not exist."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return {}
    try:
        earlier = orjson.loads((directory / SUMMARY_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise ReportDirInUse(f"{directory} is not empty, and it holds no earlier report. Name another directory.") from error
    if not isinstance(earlier, dict) or earlier.get("report") != REPORT:
        raise ReportDirInUse(f"{directory / SUMMARY_FILE} was not written by `penstock reconcile`. Name another directory.")
    return earlier


def _replace(report: Path, target: Path, scratch: Path) -> None:
    """Put a report in the place of an earlier one."""
    if target.exists():
        os.rename(target, scratch / "earlier")
    os.rename(report, target)


LOCK = "reconcile.lock"
"""File that a run locks as long as it lasts. The kernel releases the lock of a process that was killed."""


@contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """Make a hidden directory beside `target`, and remove it in the end. Those of runs that were killed are removed first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    scratch, descriptor = _locked_directory(target)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(descriptor)


def _locked_directory(target: Path) -> tuple[Path, int]:
    """Return a new directory, and the descriptor of its locked file."""
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        descriptor = os.open(scratch / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # A file system without locks has none for the next run either, which then removes nothing.
            flock(descriptor, LOCK_EX)
        if (scratch / LOCK).exists():
            return scratch, descriptor
        os.close(descriptor)  # Another run has taken the file before the lock, and removed the directory.


def _remove_abandoned(target: Path) -> None:
    """Remove the directories beside `target` whose file nobody locks. One without such a file is somebody else's."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[a-z0-9_]+")
    for directory in target.parent.iterdir():
        if pattern.fullmatch(directory.name):
            with suppress(OSError):  # The run goes on, has just ended, or is another user's.
                _remove_unlocked(directory)


def _remove_unlocked(directory: Path) -> None:
    """Remove a directory of a run that was killed. Raises OSError if it is none."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
        shutil.rmtree(directory)
    finally:
        os.close(descriptor)
