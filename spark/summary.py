"""What a reconciliation found, as plain values: the content of `summary.json`. Needs no Spark."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple, TypedDict

SCHEMA_VERSION = 1
"""Raised when a name in the summary changes its meaning or goes away; new names may come without."""

REPORT = "penstock reconcile"
"""What `report` of a summary says: by this a directory is known to be an earlier report."""

QUANTILES = (0.5, 0.9, 0.99, 1.0)
"""p50, p90, p99 and max."""


class Outcome(StrEnum):
    """What became of a delivery. Each has exactly one."""

    ACKED_IN_TIME = "acked_in_time"
    ACKED_LATE = "acked_late"
    """Acknowledged after its deadline. The node refuses that, so it tells of a defect or of a foreign log."""
    REVIVED = "revived"
    EXTENDED = "extended"
    """A change of invisible time ended it and began another delivery of the same message."""
    DEAD_LETTERED = "dead_lettered"
    VOIDED = "voided"
    """An operator reset its group's offset, or deleted the group."""
    IN_FLIGHT = "in_flight"
    """Nothing followed yet, and its deadline plus back-off and grace is not over."""
    LOST = "lost"
    """Nothing followed, and deadline, back-off and grace are over."""


class Quantiles(TypedDict):
    """In ms. The p-th is the least value that at least that share of the values does not exceed, of rank exact to 0.01 %."""

    p50: int
    p90: int
    p99: int
    max: int


class LogRange(TypedDict):
    """What was read: positions from start to end, records stored from first_ms to last_ms."""

    start_position: int
    end_position: int
    first_ms: int
    last_ms: int
    torn_tail: bool
    """Bytes that are not a whole record stand behind the end. Normal while the node writes."""


class Totals(TypedDict):
    """Counts over all groups."""

    deliveries: int
    outcomes: dict[str, int]
    """By `Outcome`; every outcome is there."""
    conflicting: int
    """Deliveries that ended in two ways, or twice in one that isn't an ack. Must be 0."""
    duplicate_acks: int
    """Acks of a delivery after its first."""
    orphan_acks: int
    """Acks that match no delivery."""
    orphan_others: int
    """Revivals, changes and dead letters that match no delivery."""
    before_log: int
    """Ends of deliveries that began in a segment which is gone (retention). Nothing is wrong with them."""


class Group(TypedDict):
    """One POP group on one filter."""

    group_id: int
    group: str
    filter: str | None
    """None where the record that created the group is gone."""
    deliveries: int
    outcomes: dict[str, int]
    conflicting: int
    duplicate_acks: int
    messages: int
    """Distinct messages handed out. One that retention has copied forward counts again."""
    messages_acked: int
    """Of these, with at least one delivery acknowledged."""
    ack_latency_ms: Quantiles | None
    """From pop to ack, of deliveries acknowledged."""
    revive_lateness_ms: Quantiles | None
    """From deadline to revival. Negative for a message given back before its deadline."""
    attempts: dict[str, int]
    """Deliveries by attempt, from "1"."""
    oldest_in_flight_ms: int | None
    """Age of the oldest delivery in flight."""


class Example(TypedDict):
    """One delivery to look at."""

    key: int
    group_id: int
    group: str
    outcome: str
    message_position: int
    topic: str | None
    """None where the message is no longer in the log."""
    attempt: int
    pop_ms: int
    deadline_ms: int
    settled_ms: int | None


class Summary(TypedDict):
    """The content of `summary.json`."""

    report: str
    schema_version: int
    complete: bool
    """False while the tables beside it are being written."""
    ok: bool
    """Nothing is lost or conflicting."""
    data_dir: str
    log: LogRange
    as_of_ms: int
    grace_ms: int
    totals: Totals
    groups: list[Group]
    examples: dict[str, list[Example]]
    """The worst deliveries, under "lost", "conflicting", "dead_lettered" and "revived"."""


class CountRow(NamedTuple):
    """Deliveries of one group with one outcome and attempt."""

    group_id: int
    outcome: str
    attempt: int
    deliveries: int
    conflicting: int
    duplicate_acks: int
    first_pop_ms: int


class SpreadRow(NamedTuple):
    """Times of one group, at `QUANTILES`."""

    group_id: int
    ack_latency_ms: list[int] | None
    revive_lateness_ms: list[int] | None


class MessagesRow(NamedTuple):
    """Distinct messages of one group."""

    group_id: int
    messages: int
    messages_acked: int


class GroupName(NamedTuple):
    """Who a group id is."""

    group: str
    filter: str | None


def group_sections(
    counts: Iterable[CountRow],
    spreads: Iterable[SpreadRow],
    messages: Iterable[MessagesRow],
    names: dict[int, GroupName],
    *,
    as_of_ms: int,
) -> list[Group]:
    """Return the sections of the groups that have deliveries, by name and id."""
    spread_of = {row.group_id: row for row in spreads}
    messages_of = {row.group_id: row for row in messages}
    rows_of: dict[int, list[CountRow]] = {}
    for row in counts:
        rows_of.setdefault(row.group_id, []).append(row)
    sections = [
        _group_section(group_id, rows, spread_of[group_id], messages_of[group_id], names, as_of_ms)
        for group_id, rows in rows_of.items()
    ]
    return sorted(sections, key=lambda section: (section["group"], section["group_id"]))


def _group_section(
    group_id: int,
    rows: list[CountRow],
    spread: SpreadRow,
    messages: MessagesRow,
    names: dict[int, GroupName],
    as_of_ms: int,
) -> Group:
    outcomes = {outcome.value: 0 for outcome in Outcome}
    attempts: dict[int, int] = {}
    for row in rows:
        outcomes[row.outcome] += row.deliveries
        attempts[row.attempt] = attempts.get(row.attempt, 0) + row.deliveries
    in_flight = [row.first_pop_ms for row in rows if row.outcome == Outcome.IN_FLIGHT]
    name = names.get(group_id, GroupName(f"group {group_id}", None))
    return Group(
        group_id=group_id,
        group=name.group,
        filter=name.filter,
        deliveries=sum(outcomes.values()),
        outcomes=outcomes,
        conflicting=sum(row.conflicting for row in rows),
        duplicate_acks=sum(row.duplicate_acks for row in rows),
        messages=messages.messages,
        messages_acked=messages.messages_acked,
        ack_latency_ms=_quantiles(spread.ack_latency_ms),
        revive_lateness_ms=_quantiles(spread.revive_lateness_ms),
        attempts={str(attempt): attempts[attempt] for attempt in sorted(attempts)},
        oldest_in_flight_ms=as_of_ms - min(in_flight) if in_flight else None,
    )


def _quantiles(values: list[int] | None) -> Quantiles | None:
    if not values:
        return None
    p50, p90, p99, most = values
    return Quantiles(p50=p50, p90=p90, p99=p99, max=most)


def totals(groups: list[Group], *, orphan_acks: int, orphan_others: int, before_log: int) -> Totals:
    """Return the counts over all groups."""
    return Totals(
        deliveries=sum(group["deliveries"] for group in groups),
        outcomes={each.value: sum(group["outcomes"][each] for group in groups) for each in Outcome},
        conflicting=sum(group["conflicting"] for group in groups),
        duplicate_acks=sum(group["duplicate_acks"] for group in groups),
        orphan_acks=orphan_acks,
        orphan_others=orphan_others,
        before_log=before_log,
    )


def is_ok(found: Totals) -> bool:
    """Return whether nothing is lost or conflicting."""
    return found["outcomes"][Outcome.LOST] == 0 and found["conflicting"] == 0


def group_row(group: Group) -> dict[str, Any]:
    """Return a group's section flat: one row of the table `groups/`. The histogram of attempts is JSON's business only."""
    row: dict[str, Any] = {name: value for name, value in group.items() if not isinstance(value, dict)}
    row |= group["outcomes"]
    for name, spread in (("ack_latency_ms", group["ack_latency_ms"]), ("revive_lateness_ms", group["revive_lateness_ms"])):
        row.pop(name, None)
        for quantile in ("p50", "p90", "p99", "max"):
            row[f"{name}_{quantile}"] = spread[quantile] if spread else None
    return row
