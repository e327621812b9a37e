"""The summary on a terminal."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("rich")

from rich.console import Console

from penstock.spark import report
from penstock.spark.summary import (
    CountRow,
    DeliveryOutcome,
    Example,
    GroupName,
    LogRange,
    MessagesRow,
    SpreadRow,
    Summary,
    group_row,
    group_sections,
    is_ok,
    totals,
)

NAMES = {1: GroupName("pumps", "a/#"), 2: GroupName("[red]valves", None)}


def a_summary(lost: int) -> Summary:
    groups = group_sections(
        [
            CountRow(1, DeliveryOutcome.ACKED_IN_TIME, 1, 1_200, 0, 3, 5_000),
            CountRow(1, DeliveryOutcome.ACKED_IN_TIME, 2, 34, 0, 0, 6_000),
            CountRow(2, DeliveryOutcome.IN_FLIGHT, 1, 7, 0, 0, 8_000),
            *([CountRow(1, DeliveryOutcome.LOST, 1, lost, 0, 0, 7_000)] if lost else []),
        ],
        [SpreadRow(1, [10, 20, 30, 4_000], None), SpreadRow(2, None, [-5, 1, 2, 3])],
        [MessagesRow(1, 1_210, 1_205), MessagesRow(2, 7, 0)],
        NAMES,
        {1: 5},
        as_of_ms=10_000,
    )
    found = totals(groups, orphan_acks=4, orphan_others=0, before_log=2)
    example = Example(
        key=1,
        group_id=1,
        group="pumps",
        outcome="lost",
        message_position=77,
        topic=None,
        attempt=1,
        pop_ms=7_000,
        deadline_ms=8_000,
        settled_ms=None,
    )
    return Summary(
        report="penstock reconcile",
        schema_version=2,
        complete=True,
        ok=is_ok(found),
        data_dir="data",
        log=LogRange(start_position=0, end_position=1_000_000, first_ms=0, last_ms=10_000, torn_tail=True),
        as_of_ms=10_000,
        grace_ms=60_000,
        totals=found,
        groups=groups,
        examples={"lost": [example] * min(lost, 20)},
    )


def shown(summary: Summary) -> str:
    out = io.StringIO()
    report.show(summary, Console(file=out, width=80))
    return out.getvalue()


def test_a_reconciliation_without_loss_says_so() -> None:
    text = shown(a_summary(lost=0))
    assert "OK: all 1,241 deliveries are accounted for" in text
    assert "1: 1,200, 2: 34" in text
    assert "1,205" in text
    assert "Acks without a delivery: 4." in text
    assert "Extensions of the invisible time: 5." in " ".join(text.split())
    assert "incomplete" in text


def test_the_report_ends_with_the_losses() -> None:
    text = shown(a_summary(lost=3))
    assert text.rstrip().endswith("NOT OK: 3 deliveries are lost, 0 are conflicting.")
    assert text.count("77") == 3


def test_a_name_is_never_taken_for_markup() -> None:
    assert "[red]valves" in shown(a_summary(lost=0))


def test_sections_hold_what_the_rows_said() -> None:
    valves, pumps = a_summary(lost=3)["groups"]
    assert pumps["outcomes"][DeliveryOutcome.ACKED_IN_TIME] == 1_234
    assert pumps["attempts"] == {"1": 1_203, "2": 34}
    assert pumps["oldest_in_flight_ms"] is None
    assert valves["oldest_in_flight_ms"] == 2_000
    assert valves["revive_lateness_ms"] == {"p50": -5, "p90": 1, "p99": 2, "max": 3}


def test_a_flat_row_has_the_same_columns_for_every_group() -> None:
    first, second = map(group_row, a_summary(lost=3)["groups"])
    assert first.keys() == second.keys()
    assert (second["lost"], second["ack_latency_ms_max"], second["revive_lateness_ms_p50"]) == (3, 4_000, None)
