"""The summary of a reconciliation: what `summary.json` contains, and how it is made from the tallies of the steps."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, TypedDict

REPORT = "penstock reconcile"
SCHEMA_VERSION = 2
"""Version of the summary and of the tables beside it."""


class Outcome(StrEnum):
    """What became of a delivery, or of a message in a group. Each has exactly one."""

    ACKED = "acked"
    ACKED_LATE = "acked_late"
    NACKED = "nacked"
    SUSPENDED = "suspended"
    RETURNED = "returned"
    REVIVED = "revived"
    DEAD_LETTERED = "dead_lettered"
    EXPIRED = "expired"
    IN_FLIGHT = "in_flight"
    WAITING = "waiting"
    LOST = "lost"
    CONFLICTING = "conflicting"
    VOIDED = "voided"
    UNKNOWN = "unknown"


MEANINGS = {
    Outcome.ACKED: "acknowledged before its deadline",
    Outcome.ACKED_LATE: "acknowledged after its deadline, which the node refuses: a defect, or a log from elsewhere",
    Outcome.NACKED: "its consumer returned the message as a failed attempt",
    Outcome.SUSPENDED: "its consumer returned the message without counting the attempt",
    Outcome.RETURNED: "its consumer had gone or could not take the message, so the node returned it",
    Outcome.REVIVED: "the deadline passed, and the message came back",
    Outcome.DEAD_LETTERED: "the message became a dead letter",
    Outcome.EXPIRED: "the message had expired before a consumer saw it, and the node acknowledged it",
    Outcome.IN_FLIGHT: "nothing ended it yet, and its time is not over",
    Outcome.WAITING: "the message came back and waits for its next delivery",
    Outcome.LOST: "nothing ended it, and deadline, back-off and grace (`--grace`) are over",
    Outcome.CONFLICTING: "it ended in two ways, or twice other than by acknowledgements",
    Outcome.VOIDED: "an operator reset or deleted its group, or the last member of a shared subscription left",
    Outcome.UNKNOWN: "records are damaged, missing, or of a version that wrote less",
}

OF_DELIVERIES = tuple(each for each in Outcome if each is not Outcome.WAITING)
OF_MESSAGES = (
    Outcome.ACKED,
    Outcome.ACKED_LATE,
    Outcome.DEAD_LETTERED,
    Outcome.EXPIRED,
    Outcome.IN_FLIGHT,
    Outcome.WAITING,
    Outcome.LOST,
    Outcome.CONFLICTING,
    Outcome.VOIDED,
    Outcome.UNKNOWN,
)

FINDINGS = (Outcome.ACKED_LATE, Outcome.LOST, Outcome.CONFLICTING)
"""Outcomes that must not be."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}

BEFORE_ZERO = -1
BUCKETS_MS = (
    BEFORE_ZERO,
    0,
    1,
    2,
    3,
    5,
    7,
    *(step * 10**power for power in range(9) for step in (10, 15, 20, 30, 50, 70)),
    10**10,
)
"""Where the buckets of `Counts` begin: six in each power of ten, which is what a plot can show. `BEFORE_ZERO` has all negative
times; a clock that was set back makes them."""

Counts = list[list[int]]
"""Counts of deliveries by time: [beginning of a bucket in ms, count], in order, without buckets that have none."""

Row = dict[str, Any]


class Quantiles(TypedDict):
    """Quantiles in ms. Below 1 s each is a value that occurs; above, it is rounded down to three digits."""

    p50: int
    p90: int
    p99: int
    max: int


class LogPart(TypedDict):
    """The part of the log that was read: positions and store times."""

    start_position: int
    """Where the log and its tables begin."""
    begin_position: int
    """Where the reading began."""
    end_position: int
    sealed_position: int
    """The last seal before the end, where the next run may begin."""
    first_ms: int
    last_ms: int
    torn_tail: bool
    """Whether an incomplete record follows the end. This is normal while the node writes."""


class DamagedRange(TypedDict):
    """A range of the log whose records are missing."""

    position: int
    until_position: int
    at_ms: int
    cause: str


class Totals(TypedDict):
    """Counts over all groups."""

    deliveries: int
    outcomes: dict[str, int]
    """Count of deliveries by `Outcome`, zeros included."""
    messages: int
    """Messages that were delivered, counted for each group."""
    message_outcomes: dict[str, int]
    ack_latency_counts: Counts
    revive_lateness_counts: Counts
    extensions: int
    """How often a consumer has changed the invisible time of a delivery and gone on."""
    duplicate_acks: int
    """Acknowledgements after the first one of a delivery."""
    orphans: int
    """Ends that match no delivery."""
    before: int
    """Ends of deliveries that began before what was read. They are no findings."""
    unknown: int
    """Ends of deliveries that began in a damaged range."""


class GroupSection(TypedDict):
    """One consumer group."""

    group_id: int
    group: str
    filter: str | None
    """None if the record that created the group was not read."""
    deliveries: int
    outcomes: dict[str, int]
    messages: int
    message_outcomes: dict[str, int]
    extensions: int
    duplicate_acks: int
    orphans: int
    ack_latency_ms: Quantiles | None
    """From the pop to the acknowledgement."""
    ack_latency_counts: Counts
    revive_lateness_ms: Quantiles | None
    """From the deadline to the revival, the back-off included."""
    revive_lateness_counts: Counts
    attempts: dict[str, int]
    """Count of deliveries by attempt, from "1" up."""
    oldest_in_flight_ms: int | None
    """Age of the oldest delivery in flight."""
    oldest_waiting_ms: int | None
    """Time since the first delivery of the oldest message that waits for another."""


class Hour(TypedDict):
    """Deliveries that were popped in an hour."""

    hour_ms: int
    outcomes: dict[str, int]
    """Only outcomes that occur."""


class Example(TypedDict):
    """One delivery that an operator may want to examine."""

    delivery_id: int
    group_id: int
    group: str
    outcome: str
    message_position: int
    topic: str | None
    """None if the message was not read."""
    attempt: int
    popped_ms: int
    deadline_ms: int
    ended_ms: int | None


class ReportFilter(TypedDict):
    """What a report was narrowed to."""

    groups: list[str]
    """Names of groups; empty for all."""
    topics: list[str]
    """Topic filters; empty for all topics."""
    unread: int
    """Deliveries that are left out because their message was not read, so that nobody knows whether its topic matches."""


class NodeDifference(TypedDict):
    """A counter of a group in a running node that is not what the log says."""

    group_id: int
    group: str
    filter: str | None
    """None if the node does not know the group."""
    counter: str
    """`in_flight` (with waits for a back-off), `returned` (messages that came back and wait for their next delivery),
    `dead_letters` (the node has more than the log), or `exists` (1 or 0)."""
    node_min: int
    node_max: int
    """Bounds of the counter in the node, which does not always know of a message whether it came back. Else they are equal."""
    log: int


class NodeCheck(TypedDict):
    """The comparison with a running node."""

    node: str
    """Address of its admin listener."""
    position: int
    """Position at which both were compared: the node had counted all records before it, and the report ends there."""
    groups: int
    """Groups compared."""
    differing: int
    """Groups with a difference."""
    certain: bool
    """Whether a difference is a finding. It is none where records of the log are missing."""
    differences: list[NodeDifference]
    """At most 100."""


class Summary(TypedDict):
    """The content of `summary.json`."""

    report: str
    schema_version: int
    engine: str
    """What ran the SQL: "spark" or "duckdb"."""
    ok: bool
    """Whether nothing is wrong: no delivery has an outcome of `FINDINGS`, no end is an orphan, and the node does not differ."""
    complete: bool
    """Whether all outcomes are known, and the topics of all deliveries where the report has a filter by topic."""
    data_dir: str
    log: LogPart
    as_of_ms: int
    grace_ms: int
    filter: ReportFilter | None
    node: NodeCheck | None
    """None if the report was not compared with a node."""
    totals: Totals
    groups: list[GroupSection]
    hours: list[Hour]
    damages: list[DamagedRange]
    examples: dict[str, list[Example]]
    """The worst deliveries, by outcome."""


def group_sections(
    tallies: Iterable[Row],
    messages: Iterable[Row],
    strays: Iterable[Row],
    named: Iterable[Row],
    *,
    as_of_ms: int,
    is_unknown: bool,
) -> list[GroupSection]:
    """Return the sections of the groups that have deliveries, messages or strays, in the order of name and id.

    Args:
        tallies, messages, strays, named: the rows of the steps `tallies`, `message_tallies`, `stray_tallies`, `group_tallies`.
        as_of_ms: the time to which ages refer.
        is_unknown: whether it is not known what was open where the reading begins. The outcome of deliveries from before is
            unknown then.
    """
    parts: defaultdict[int, dict[str, list[Row]]] = defaultdict(lambda: {"tallies": [], "messages": [], "strays": []})
    names: dict[int, str] = {}
    for kind, rows in (("tallies", tallies), ("messages", messages), ("strays", strays)):
        for row in rows:
            parts[row["group_id"]][kind].append(row)
            names[row["group_id"]] = row["group_name"]
    by_id = {row["group_id"]: row for row in named}
    sections = [
        _section(group_id, names[group_id], by_id.get(group_id, {}), part, as_of_ms, is_unknown)
        for group_id, part in parts.items()
    ]
    return sorted(sections, key=lambda section: (section["group"], section["group_id"]))


_OF_LATENCY, _OF_LATENESS = (Outcome.ACKED, Outcome.ACKED_LATE), (Outcome.REVIVED,)


def _section(group_id: int, name: str, named: Row, part: dict[str, list[Row]], as_of_ms: int, is_unknown: bool) -> GroupSection:
    tallies, messages, strays = part["tallies"], part["messages"], part["strays"]
    outcomes = {each.value: 0 for each in OF_DELIVERIES}
    message_outcomes = {each.value: 0 for each in OF_MESSAGES}
    attempts: defaultdict[int, int] = defaultdict(int)
    for row in tallies:
        outcomes[row["outcome"]] += row["deliveries"]
        attempts[row["attempt"]] += row["deliveries"]
    for row in messages:
        message_outcomes[row["outcome"]] += row["messages"]
    ends = {kind: sum(row["ends"] for row in strays if row["kind"] == kind) for kind in ("orphan", "before", "damaged")}
    outcomes[Outcome.UNKNOWN] += ends["damaged"] + (ends["before"] if is_unknown else 0)
    return GroupSection(
        group_id=group_id,
        group=name,
        filter=named.get("topic_filter"),
        deliveries=sum(outcomes.values()),
        outcomes=outcomes,
        messages=sum(message_outcomes.values()),
        message_outcomes=message_outcomes,
        extensions=named.get("extensions", 0),
        duplicate_acks=sum(row["duplicate_acks"] for row in tallies),
        orphans=ends["orphan"],
        ack_latency_ms=_quantiles(tallies, _OF_LATENCY),
        ack_latency_counts=_counts(tallies, _OF_LATENCY),
        revive_lateness_ms=_quantiles(tallies, _OF_LATENESS),
        revive_lateness_counts=_counts(tallies, _OF_LATENESS),
        attempts={str(attempt): attempts[attempt] for attempt in sorted(attempts)},
        oldest_in_flight_ms=_age(tallies, Outcome.IN_FLIGHT, as_of_ms),
        oldest_waiting_ms=_age(messages, Outcome.WAITING, as_of_ms),
    )


def _age(rows: list[Row], outcome: Outcome, as_of_ms: int) -> int | None:
    times = [row["first_popped_ms"] for row in rows if row["outcome"] == outcome and row["first_popped_ms"] is not None]
    return as_of_ms - min(times) if times else None


def _quantiles(tallies: list[Row], outcomes: Sequence[Outcome]) -> Quantiles | None:
    """Return the quantiles of the times of some outcomes, given as counts by bucket."""
    counts: defaultdict[int, int] = defaultdict(int)
    for row in tallies:
        if row["outcome"] in outcomes and row["bucket_ms"] is not None:
            counts[row["bucket_ms"]] += row["deliveries"]
    if not counts:
        return None
    total, seen, found = sum(counts.values()), 0, {}
    wanted = list(QUANTILES.items())
    for bucket_ms in sorted(counts):
        seen += counts[bucket_ms]
        while wanted and seen >= wanted[0][1] * total:
            found[wanted.pop(0)[0]] = bucket_ms
    return Quantiles(p50=found["p50"], p90=found["p90"], p99=found["p99"], max=found["max"])


def _counts(tallies: list[Row], outcomes: Sequence[Outcome]) -> Counts:
    """Return the times of some outcomes, given as counts by finer buckets."""
    rows = (row for row in tallies if row["outcome"] in outcomes and row["bucket_ms"] is not None)
    return _coarse((row["bucket_ms"], row["deliveries"]) for row in rows)


def _coarse(times: Iterable[Sequence[int]]) -> Counts:
    counts: defaultdict[int, int] = defaultdict(int)
    for time_ms, count in times:
        counts[BUCKETS_MS[max(bisect_right(BUCKETS_MS, time_ms) - 1, 0)]] += count
    return [[bucket_ms, counts[bucket_ms]] for bucket_ms in sorted(counts)]


def hours(tallies: Iterable[Row]) -> list[Hour]:
    """Return the outcomes of the deliveries of each hour, in order."""
    found: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in tallies:
        found[row["hour_ms"]][row["outcome"]] += row["deliveries"]
    return [Hour(hour_ms=hour_ms, outcomes=dict(found[hour_ms])) for hour_ms in sorted(found)]


def totals(groups: list[GroupSection], strays: Iterable[Row]) -> Totals:
    """Return the counts over all groups."""
    ends: defaultdict[str, int] = defaultdict(int)
    for row in strays:
        ends[row["kind"]] += row["ends"]
    return Totals(
        deliveries=sum(group["deliveries"] for group in groups),
        outcomes={each.value: sum(group["outcomes"][each] for group in groups) for each in OF_DELIVERIES},
        messages=sum(group["messages"] for group in groups),
        message_outcomes={each.value: sum(group["message_outcomes"][each] for group in groups) for each in OF_MESSAGES},
        ack_latency_counts=_coarse(times for group in groups for times in group["ack_latency_counts"]),
        revive_lateness_counts=_coarse(times for group in groups for times in group["revive_lateness_counts"]),
        extensions=sum(group["extensions"] for group in groups),
        duplicate_acks=sum(group["duplicate_acks"] for group in groups),
        orphans=ends["orphan"],
        before=ends["before"],
        unknown=ends["damaged"],
    )


def is_ok(found: Totals) -> bool:
    """Return whether no delivery, no message and no end is wrong."""
    wrong = sum(found["outcomes"][each] + found["message_outcomes"][each] for each in FINDINGS)
    return wrong == 0 and found["orphans"] == 0
