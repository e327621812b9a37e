"""The summary of a reconciliation as tables for the terminal."""

from __future__ import annotations

from datetime import UTC, datetime

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.spark.reconciliation.nodecheck import difference_words, headline
from penstock.spark.reconciliation.selection import filter_words
from penstock.spark.reconciliation.summary import (
    FINDINGS,
    OF_DELIVERIES,
    OF_MESSAGES,
    Example,
    GroupSection,
    NodeCheck,
    Outcome,
    Summary,
)

_TITLES = {
    Outcome.ACKED_LATE: "late",
    Outcome.DEAD_LETTERED: "dead",
    Outcome.IN_FLIGHT: "in flight",
}

_ALARMING = {**dict.fromkeys(FINDINGS, "bold red"), Outcome.DEAD_LETTERED: "yellow", Outcome.UNKNOWN: "yellow"}
"""Styles of the outcomes whose count should be 0, for counts above 0."""

DIFFERENCES_SHOWN_MAX = 10
"""Maximum number of differences from a node on a terminal. `summary.json` has more."""

EXAMPLES_SHOWN_MAX = 5
"""Maximum number of examples of one kind on a terminal. `summary.json` has more."""


def show(summary: Summary, console: Console | None = None) -> None:
    """Print a summary on `console`, which is stdout if it is None."""
    console = console or Console()
    log, found = summary["log"], summary["totals"]
    _print(
        console,
        f"Log {summary['data_dir']}: positions {log['begin_position']:,} to {log['end_position']:,}, "
        f"stored from {_time(log['first_ms'])} to {_time(log['last_ms'])}. Outcomes as of {_time(summary['as_of_ms'])}, "
        f"with {summary['grace_ms']:,} ms of grace, by {_ENGINES[summary['engine']]}.",
    )
    if summary["filter"] is not None:
        _print(console, f"{filter_words(summary['filter'])}.")
    if log["torn_tail"]:
        _print(console, "The last record is incomplete and is not part of this report.")
    for damage in summary["damages"]:
        what = "are damaged" if damage["cause"] == "damaged" else "were dropped by retention before they were in the tables"
        _print(console, f"Records are missing: positions {damage['position']:,} to {damage['until_position']:,} {what}.")
    console.print(_outcomes_table(summary, "Deliveries by outcome", "deliveries", "outcomes", OF_DELIVERIES))
    console.print(_outcomes_table(summary, "Messages by outcome", "messages", "message_outcomes", OF_MESSAGES))
    console.print(_attempts_table(summary["groups"]))
    console.print(_times_table(summary["groups"]))
    for name, examples in summary["examples"].items():
        if examples:
            console.print(_examples_table(name, examples))
    _print(
        console,
        f"Duplicate acks: {found['duplicate_acks']:,}. Extensions of the invisible time: {found['extensions']:,}. "
        f"Ends without a delivery: {found['orphans']:,}. Ends of deliveries older than what was read: {found['before']:,}. "
        f"Ends of deliveries that began in a damaged range: {found['unknown']:,}.",
    )
    _print_check(console, summary["node"])
    console.print(_result_line(summary))


_ENGINES = {"spark": "Apache Spark", "duckdb": "DuckDB"}


def _print(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _print_check(console: Console, check: NodeCheck | None) -> None:
    if check is None:
        return
    _print(console, f"Node {check['node']} at position {check['position']:,}: {headline(check)}.")
    for each in check["differences"][:DIFFERENCES_SHOWN_MAX]:
        _print(console, f"  {each['group']}: {difference_words(each)}")
    if (more := len(check["differences"]) - DIFFERENCES_SHOWN_MAX) > 0:
        _print(console, f"  and {more:,} more differences, which summary.json names")


def _result_line(summary: Summary) -> Text:
    found = summary["totals"]
    if not summary["ok"]:
        wrong = {each: max(found["outcomes"][each], found["message_outcomes"][each]) for each in FINDINGS}
        counts = [f"{count:,} {_title(each)}" for each, count in wrong.items() if count]
        counts += [f"{found['orphans']:,} ends without a delivery"] if found["orphans"] else []
        counts += [headline(check)] if (check := summary["node"]) and check["differing"] and check["certain"] else []
        return Text(f"NOT OK: {', '.join(counts)}.", style="bold red")
    if not summary["complete"]:
        return Text("Nothing is wrong with what is known, but some outcomes are unknown.", style="bold yellow")
    return Text(f"OK: all {found['deliveries']:,} deliveries are accounted for.", style="bold green")


def _title(outcome: Outcome) -> str:
    return _TITLES.get(outcome, outcome.value)


def _table(title: str, *columns: str) -> Table:
    """Return an empty table that fits 80 columns. The first column is text; the others are numbers, aligned to the right."""
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _group_cell(group: GroupSection) -> Text:
    return Text(f"{group['group']}\n  {group['filter'] or '?'}")


def _outcomes_table(summary: Summary, title: str, all_name: str, name: str, outcomes: tuple[Outcome, ...]) -> Table:
    """Return the table of one kind of outcomes, without those that no group has, except the findings."""
    groups, totals = [dict(group) for group in summary["groups"]], dict(summary["totals"])
    shown = [each for each in outcomes if each in (Outcome.ACKED, *FINDINGS) or _counts(totals, name)[each]]
    table = _table(title, "group\n  filter", "all", *map(_title, shown))
    for group, row in zip(summary["groups"], groups, strict=True):
        table.add_row(_group_cell(group), f"{row[all_name]:,}", *_cells(_counts(row, name), shown))
    if len(groups) > 1:
        table.add_section()
        table.add_row("all groups", f"{totals[all_name]:,}", *_cells(_counts(totals, name), shown))
    return table


def _counts(row: dict[str, object], name: str) -> dict[str, int]:
    found = row[name]
    assert isinstance(found, dict)
    return found


def _cells(counts: dict[str, int], shown: list[Outcome]) -> list[Text]:
    return [Text(f"{counts[each]:,}", style=_ALARMING.get(each, "") if counts[each] else "dim") for each in shown]


def _attempts_table(groups: list[GroupSection]) -> Table:
    table = _table("Attempts", "group\n  filter", "oldest in\nflight, ms", "oldest\nwaiting, ms", "deliveries\nby attempt")
    for group in groups:
        ages = (group["oldest_in_flight_ms"], group["oldest_waiting_ms"])
        table.add_row(
            _group_cell(group),
            *("-" if age is None else f"{age:,}" for age in ages),
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
        "ended",
    )
    for each in examples[:EXAMPLES_SHOWN_MAX]:
        ended_ms = each["ended_ms"]
        table.add_row(
            Text(f"{each['topic'] or '?'}\n  {each['group']}"),
            str(each["message_position"]),
            str(each["attempt"]),
            _time(each["popped_ms"]).replace(" ", "\n"),
            _time(each["deadline_ms"]).replace(" ", "\n"),
            "-" if ended_ms is None else _time(ended_ms).replace(" ", "\n"),
        )
    return table


def _time(ms: int) -> str:
    """Return a time in UTC to the millisecond, or the number itself if no calendar has it."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")
    except (OverflowError, OSError, ValueError):
        return str(ms)
