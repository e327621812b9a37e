"""The summary of a reconciliation as tables for the terminal. This module needs no Spark."""

from __future__ import annotations

from datetime import UTC, datetime

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.spark.summary import DeliveryOutcome, Example, GroupSection, Summary

OUTCOME_TITLES = {
    DeliveryOutcome.ACKED_IN_TIME: "acked",
    DeliveryOutcome.ACKED_LATE: "late",
    DeliveryOutcome.REVIVED: "revived",
    DeliveryOutcome.NACKED: "nacked",
    DeliveryOutcome.RETURNED: "returned",
    DeliveryOutcome.DEAD_LETTERED: "dead",
    DeliveryOutcome.VOIDED: "voided",
    DeliveryOutcome.IN_FLIGHT: "in flight",
    DeliveryOutcome.LOST: "lost",
}

ALARMING = {DeliveryOutcome.ACKED_LATE: "yellow", DeliveryOutcome.DEAD_LETTERED: "yellow", DeliveryOutcome.LOST: "bold red"}
"""Styles of the outcomes whose count should be 0, for counts above 0."""

EXAMPLES_SHOWN_MAX = 5
"""Maximum number of examples of one kind on a terminal. `summary.json` has more."""


def show(summary: Summary, console: Console | None = None) -> None:
    """Print a summary on `console`, which is stdout if it is None."""
    console = console or Console()
    log, found = summary["log"], summary["totals"]
    console.print(
        f"Log {summary['data_dir']}: positions {log['start_position']:,} to {log['end_position']:,}, "
        f"stored from {_time(log['first_ms'])} to {_time(log['last_ms'])}. Outcomes as of {_time(summary['as_of_ms'])}, "
        f"with {summary['grace_ms']:,} ms of grace.",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    if log["torn_tail"]:
        console.print("The last record is incomplete and is not part of this report.")
    console.print(_outcomes_table(summary))
    console.print(_messages_table(summary["groups"]))
    console.print(_times_table(summary["groups"]))
    for name, examples in summary["examples"].items():
        if examples:
            console.print(_examples_table(name, examples))
    console.print(
        f"Conflicting deliveries: {found['conflicting']:,}. Duplicate acks: {found['duplicate_acks']:,}. "
        f"Extensions of the invisible time: {found['extensions']:,}. "
        f"Acks without a delivery: {found['orphan_acks']:,}. Other ends without a delivery: {found['orphan_others']:,}. "
        f"Ends of deliveries older than the log: {found['before_log']:,}.",
        soft_wrap=True,
        highlight=False,
    )
    console.print(_result_line(summary))


def _result_line(summary: Summary) -> Text:
    found = summary["totals"]
    if summary["ok"]:
        return Text(f"OK: all {found['deliveries']:,} deliveries are accounted for.", style="bold green")
    lost = found["outcomes"][DeliveryOutcome.LOST]
    return Text(f"NOT OK: {lost:,} deliveries are lost, {found['conflicting']:,} are conflicting.", style="bold red")


def _table(title: str, *columns: str) -> Table:
    """Return an empty table that fits 80 columns. The first column is text; the others are numbers, aligned to the right."""
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _group_cell(group: GroupSection) -> Text:
    return Text(f"{group['group']}\n  {group['filter'] or '?'}")


def _outcomes_table(summary: Summary) -> Table:
    table = _table("Deliveries by outcome", "group\n  filter", "all", *OUTCOME_TITLES.values())
    for group in summary["groups"]:
        table.add_row(_group_cell(group), f"{group['deliveries']:,}", *_outcome_cells(group["outcomes"]))
    found = summary["totals"]
    if len(summary["groups"]) > 1:
        table.add_section()
        table.add_row("all groups", f"{found['deliveries']:,}", *_outcome_cells(found["outcomes"]))
    return table


def _outcome_cells(outcomes: dict[str, int]) -> list[Text]:
    return [Text(f"{outcomes[each]:,}", style=ALARMING.get(each, "") if outcomes[each] else "dim") for each in OUTCOME_TITLES]


def _messages_table(groups: list[GroupSection]) -> Table:
    table = _table("Messages", "group\n  filter", "delivered", "acked", "oldest in\nflight, ms", "deliveries\nby attempt")
    for group in groups:
        oldest = group["oldest_in_flight_ms"]
        table.add_row(
            _group_cell(group),
            f"{group['messages']:,}",
            f"{group['messages_acked']:,}",
            "-" if oldest is None else f"{oldest:,}",
            ", ".join(f"{attempt}: {count:,}" for attempt, count in group["attempts"].items()),
        )
    return table


def _times_table(groups: list[GroupSection]) -> Table:
    table = _table("Times, ms", "group\n  filter", "", "p50", "p90", "p99", "max")
    for group in groups:
        cell = _group_cell(group)
        for title, spread in (("pop to ack", group["ack_latency_ms"]), ("deadline to revival", group["revive_lateness_ms"])):
            if spread is not None:
                p50, p90, p99, most = spread["p50"], spread["p90"], spread["p99"], spread["max"]
                table.add_row(cell, title, f"{p50:,}", f"{p90:,}", f"{p99:,}", f"{most:,}")
                cell = Text()
    return table


def _examples_table(name: str, examples: list[Example]) -> Table:
    table = _table(
        f"Worst deliveries: {name.replace('_', ' ')}",
        "topic\n  group",
        "message",
        "attempt",
        "popped",
        "deadline",
        "settled",
    )
    for each in examples[:EXAMPLES_SHOWN_MAX]:
        settled_ms = each["settled_ms"]
        table.add_row(
            Text(f"{each['topic'] or '?'}\n  {each['group']}"),
            str(each["message_position"]),
            str(each["attempt"]),
            _time(each["pop_ms"]).replace(" ", "\n"),
            _time(each["deadline_ms"]).replace(" ", "\n"),
            "-" if settled_ms is None else _time(settled_ms).replace(" ", "\n"),
        )
    return table


def _time(ms: int) -> str:
    """Return a time in UTC to the millisecond, or the number itself if no calendar has it."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")
    except (OverflowError, OSError, ValueError):
        return str(ms)
