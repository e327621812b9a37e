"""The result of a reconciliation as plain values: the content of `summary.json`. This module needs no Spark."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple, TypedDict

SCHEMA_VERSION = 2
"""Version of the summary. It rises when a name is removed or changes its meaning, and not when a name is added."""

REPORT = "penstock reconcile"
"""Value of `report` in a summary, by which an earlier report is recognised."""

QUANTILES = (0.5, 0.9, 0.99, 1.0)
"""p50, p90, p99 and max."""


class DeliveryOutcome(StrEnum):
    """The outcome of a delivery. Each delivery has exactly one."""

    ACKED_IN_TIME = "acked_in_time"
    ACKED_LATE = "acked_late"
    """Acknowledged after its deadline. The node refuses such acks, so this outcome points to a defect or to a foreign log."""
    REVIVED = "revived"
    NACKED = "nacked"
    """Its consumer returned the message as a failed attempt."""
    RETURNED = "returned"
    """Its consumer returned the message without counting the attempt."""
    EXTENDED = "extended"
    """Its consumer changed its invisible time. That does not end a delivery, so this is only the outcome of one that has ended
    in another way as well, and is conflicting."""
    DEAD_LETTERED = "dead_lettered"
    VOIDED = "voided"
    """Ended because an operator reset the group's offset, or deleted the group."""
    IN_FLIGHT = "in_flight"
    """Not settled, and the time of deadline, back-off and grace is not over."""
    LOST = "lost"
    """Not settled, although the time of deadline, back-off and grace is over."""


class Quantiles(TypedDict):
    """Quantiles in ms. The rank of each is exact to 0.01 %."""

    p50: int
    p90: int
    p99: int
    max: int


class LogRange(TypedDict):
    """Range of the log that was read: positions and store times."""

    start_position: int
    end_position: int
    first_ms: int
    last_ms: int
    torn_tail: bool
    """Whether an incomplete record follows the end. This is normal while the node writes."""


class Totals(TypedDict):
    """Counts over all groups."""

    deliveries: int
    outcomes: dict[str, int]
    """Count of each `DeliveryOutcome`, zeros included."""
    conflicting: int
    """Deliveries that ended in two ways, or twice in a way that isn't an ack. Must be 0."""
    extensions: int
    """How often a consumer has changed the invisible time of a delivery and gone on."""
    duplicate_acks: int
    """Acks after the first ack of a delivery."""
    orphan_acks: int
    """Acks that match no delivery."""
    orphan_others: int
    """Revivals, changes of invisible time and dead letters that match no delivery."""
    before_log: int
    """Ends of deliveries whose beginning retention has deleted. These are no findings."""


class GroupSection(TypedDict):
    """One POP group on one filter."""

    group_id: int
    group: str
    filter: str | None
    """None if retention has deleted the record that created the group."""
    deliveries: int
    outcomes: dict[str, int]
    conflicting: int
    extensions: int
    duplicate_acks: int
    messages: int
    """Distinct messages delivered. A message that retention has copied forward counts again."""
    messages_acked: int
    """Messages with at least one acknowledged delivery."""
    ack_latency_ms: Quantiles | None
    """Time from pop to ack of acknowledged deliveries; of extended ones, from the last extension."""
    revive_lateness_ms: Quantiles | None
    """Time from deadline to revival. It is negative for a message that its consumer returned before the deadline."""
    attempts: dict[str, int]
    """Count of deliveries by attempt, from "1" up."""
    oldest_in_flight_ms: int | None
    """Age of the oldest delivery in flight."""


class Example(TypedDict):
    """One delivery that an operator may want to examine."""

    key: int
    group_id: int
    group: str
    outcome: str
    message_position: int
    topic: str | None
    """None if the message is no longer in the log."""
    attempt: int
    pop_ms: int
    deadline_ms: int
    settled_ms: int | None


class Summary(TypedDict):
    """The content of `summary.json`."""

    report: str
    schema_version: int
    complete: bool
    """False while the tables of the report are being written."""
    ok: bool
    """Whether no delivery is lost or conflicting."""
    data_dir: str
    log: LogRange
    as_of_ms: int
    grace_ms: int
    totals: Totals
    groups: list[GroupSection]
    examples: dict[str, list[Example]]
    """The worst deliveries, by "lost", "conflicting", "dead_lettered" and "revived"."""


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
    """Name and filter of a group."""

    group: str
    filter: str | None


def group_sections(
    counts: Iterable[CountRow],
    spreads: Iterable[SpreadRow],
    messages: Iterable[MessagesRow],
    names: dict[int, GroupName],
    extensions: dict[int, int],
    *,
    as_of_ms: int,
) -> list[GroupSection]:
    """Return the sections of the groups that have deliveries, in the order of name and id."""
    spread_of = {row.group_id: row for row in spreads}
    messages_of = {row.group_id: row for row in messages}
    rows_of: dict[int, list[CountRow]] = {}
    for row in counts:
        rows_of.setdefault(row.group_id, []).append(row)
    sections = [
        _group_section(group_id, rows, spread_of[group_id], messages_of[group_id], names, extensions.get(group_id, 0), as_of_ms)
        for group_id, rows in rows_of.items()
    ]
    return sorted(sections, key=lambda section: (section["group"], section["group_id"]))


def _group_section(
    group_id: int,
    rows: list[CountRow],
    spread: SpreadRow,
    messages: MessagesRow,
    names: dict[int, GroupName],
    extensions: int,
    as_of_ms: int,
) -> GroupSection:
    outcomes = {outcome.value: 0 for outcome in DeliveryOutcome}
    attempts: dict[int, int] = {}
    for row in rows:
        outcomes[row.outcome] += row.deliveries
        attempts[row.attempt] = attempts.get(row.attempt, 0) + row.deliveries
    in_flight = [row.first_pop_ms for row in rows if row.outcome == DeliveryOutcome.IN_FLIGHT]
    name = names.get(group_id, GroupName(f"group {group_id}", None))
    return GroupSection(
        group_id=group_id,
        group=name.group,
        filter=name.filter,
        deliveries=sum(outcomes.values()),
        outcomes=outcomes,
        conflicting=sum(row.conflicting for row in rows),
        extensions=extensions,
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


def totals(groups: list[GroupSection], *, orphan_acks: int, orphan_others: int, before_log: int) -> Totals:
    """Return the counts over all groups."""
    return Totals(
        deliveries=sum(group["deliveries"] for group in groups),
        outcomes={each.value: sum(group["outcomes"][each] for group in groups) for each in DeliveryOutcome},
        conflicting=sum(group["conflicting"] for group in groups),
        extensions=sum(group["extensions"] for group in groups),
        duplicate_acks=sum(group["duplicate_acks"] for group in groups),
        orphan_acks=orphan_acks,
        orphan_others=orphan_others,
        before_log=before_log,
    )


def is_ok(found: Totals) -> bool:
    """Return whether no delivery is lost or conflicting."""
    return found["outcomes"][DeliveryOutcome.LOST] == 0 and found["conflicting"] == 0


def group_row(group: GroupSection) -> dict[str, Any]:
    """Return a group's section as a flat row of the table `groups/`. The histogram of attempts exists only in the JSON."""
    row: dict[str, Any] = {name: value for name, value in group.items() if not isinstance(value, dict)}
    row |= group["outcomes"]
    for name, spread in (("ack_latency_ms", group["ack_latency_ms"]), ("revive_lateness_ms", group["revive_lateness_ms"])):
        row.pop(name, None)
        for quantile in ("p50", "p90", "p99", "max"):
            row[f"{name}_{quantile}"] = spread[quantile] if spread else None
    return row
