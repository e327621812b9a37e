"""A report of Spark that contradicts what clients saw is noticed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.ledger import Key, Ledger, body_of
from tests.chaos.reconciling import compare

pytestmark = pytest.mark.nightly

LATER_MS = 2**62


@pytest.fixture
def ledger() -> Ledger:
    """A group has got two messages, and acknowledged the first one."""
    ledger = Ledger()
    group = ledger.group("g", lambda topic: True)
    for number in range(2):
        key = Key("w", number)
        ledger.sending(key, "t")
        ledger.acked(key)
        ledger.popped(group, "t", body_of(key, 40), f"{number * 100:016x}", 1, now_ms=LATER_MS)
    ledger.asking(group, f"{0:016x}", 1)
    ledger.settled(group, f"{0:016x}", 1)
    return ledger


def report(*deliveries: tuple[int, int, str], messages: int = 2, **bad: int) -> dict[str, Any]:
    outcomes = {name: bad.get(name, 0) for name in ("lost", "acked_late", "conflicting")}
    totals = {"outcomes": outcomes, "message_outcomes": {"lost": bad.get("lost_messages", 0)}, "orphans": bad.get("orphans", 0)}
    return {
        "summary": {"totals": totals},
        "deliveries": [("g", position, attempt, outcome) for position, attempt, outcome in deliveries],
        "messages": [("w", number) for number in range(messages)],
    }


def problems(ledger: Ledger) -> list[str]:
    return [problem.what for problem in ledger.problems]


def test_a_report_that_agrees_is_no_problem(ledger: Ledger) -> None:
    compare(ledger, report((0, 1, "acked"), (100, 1, "in_flight")))
    assert problems(ledger) == []


def test_one_of_several_deliveries_of_an_attempt_is_enough(ledger: Ledger) -> None:
    compare(ledger, report((0, 1, "extended"), (0, 1, "acked"), (100, 1, "revived")))
    assert problems(ledger) == []


@pytest.mark.parametrize("name", ["lost", "acked_late", "conflicting", "lost_messages", "orphans"])
def test_what_spark_counts_as_bad_is_a_problem(ledger: Ledger, name: str) -> None:
    compare(ledger, report((0, 1, "acked"), (100, 1, "in_flight"), **{name: 3}))
    assert len(problems(ledger)) == 1
    assert "Spark counts 3 deliveries as" in problems(ledger)[0]


def test_an_acknowledgement_and_a_delivery_and_a_message_that_spark_lacks_are_noticed(ledger: Ledger) -> None:
    compare(ledger, report((0, 1, "revived"), messages=1))
    assert problems(ledger) == [
        "1 acknowledged messages are missing in Spark's table of records: w-1",
        f"{0:016x}, attempt 1, of group g was acknowledged; Spark says revived",
        f"Spark has no delivery of {100:016x}, attempt 1, of group g",
    ]


def test_an_acknowledgement_that_nobody_sent_is_noticed(ledger: Ledger) -> None:
    compare(ledger, report((0, 1, "acked"), (100, 1, "acked")))
    assert problems(ledger) == [f"nobody acknowledged {100:016x}, attempt 1, of group g; Spark says acked"]


def test_deliveries_that_retention_has_dropped_are_not_missed(ledger: Ledger) -> None:
    ledger.log_start = 200
    compare(ledger, report(messages=0))
    assert problems(ledger) == []


def test_what_damage_has_destroyed_is_not_compared(ledger: Ledger) -> None:
    ledger.may_repeat = True
    compare(ledger, report(orphans=1))
    assert problems(ledger) == []
