"""Every delivery, and every message of a group, gets exactly one outcome."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb", reason="the reconciliation needs the extra `tables`")

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from penstock.pop.core.groups import ResetTo
from penstock.spark.errors import (
    EngineMissing,
    JavaMissing,
    LogMissing,
    ReadOptionInvalid,
    ReconcileError,
    ReportDirInUse,
)
from penstock.spark.parquet.schema import MESSAGES
from penstock.spark.parquet.writer import ARROW_TYPES, backfill
from penstock.spark.reconciliation import tables as steps
from penstock.spark.reconciliation import terminal
from penstock.spark.reconciliation.command import choose, run, status_of
from penstock.spark.reconciliation.engines import DuckEngine, Row
from penstock.spark.reconciliation.reconcile import ReconcileOptions, check_out, reconcile
from penstock.spark.reconciliation.selection import choose_messages
from penstock.spark.reconciliation.summary import OF_DELIVERIES, Outcome, Summary
from penstock.spark.reconciliation.tables import REPORT_TABLES
from penstock.store import record
from penstock.store.errors import LogCorrupt, RecordCorrupt, StoreError
from penstock.store.properties import Properties
from penstock.store.record import POP_FIXED, STEP_FIXED, Flag, Kind
from penstock.store.topics import matches
from tests.depth import DEPTH
from tests.parquet.sealing import STORE, seal
from tests.pop.wiring import Parts
from tests.spark.log_writer import LogWriter
from tests.spark.logs import every_outcome, random_log
from tests.spark.model import Model
from tests.system.processes import ROOT

GRACE_MS = 60_000

Reconcile = Callable[..., Summary]


@pytest.fixture
def found(tmp_path: Path) -> Reconcile:
    """Reconcile a log that was saved in `tmp_path`; the report is in its folder `out`."""

    def reconciled(**options: Any) -> Summary:
        engine = DuckEngine(tmp_path / "spilled", threads=1)
        try:
            return reconcile(engine, tmp_path, tmp_path / "out", ReconcileOptions(**options))
        finally:
            engine.close()

    return reconciled


def counts(summary: Summary) -> dict[str, int]:
    """Return the outcomes of deliveries that occur."""
    return {name: count for name, count in summary["totals"]["outcomes"].items() if count}


def message_counts(summary: Summary) -> dict[str, int]:
    return {name: count for name, count in summary["totals"]["message_outcomes"].items() if count}


def rows_of(path: Path, key: str = "key") -> list[Row]:
    """Return the rows of a table of a report, by a column."""
    rows: list[Row] = pyarrow.dataset.dataset(path).to_table().sort_by(key).to_pylist()
    return rows


# --- outcomes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    """The report on `every_outcome`: its directory, and its summary."""
    path = tmp_path_factory.mktemp("every_outcome")
    half = record.encode(Kind.POP_ACK, b"pumps", b"", store_ms=999_999, fixed=POP_FIXED.pack(1, 1, 0))[:-1]
    every_outcome().save(path, hole_bytes=100_000, torn=half)
    engine = DuckEngine(path / "spilled", threads=1)
    summary = reconcile(engine, path, path / "out", ReconcileOptions(grace_ms=GRACE_MS))
    engine.close()
    return path / "out", summary


def test_every_outcome_is_distinguished(every: tuple[Path, Summary]) -> None:
    _, summary = every
    pumps, other = summary["groups"]
    expected = {
        Outcome.ACKED: 3,  # 0, the changed one, the retried one
        Outcome.ACKED_LATE: 2,
        Outcome.REVIVED: 2,
        Outcome.NACKED: 1,
        Outcome.SUSPENDED: 1,
        Outcome.DEAD_LETTERED: 1,
        Outcome.VOIDED: 2,  # neither lost nor open, though nobody acknowledges them any more
        Outcome.IN_FLIGHT: 1,  # 160,000 + 60,000 is behind the log's end
        Outcome.LOST: 1,
        Outcome.CONFLICTING: 1,
        Outcome.UNKNOWN: 1,  # it began before the log
    }
    assert {name: count for name, count in pumps["outcomes"].items() if count} == expected
    assert {name: count for name, count in other["outcomes"].items() if count} == {Outcome.IN_FLIGHT: 1}
    assert (pumps["group"], pumps["filter"], other["group"], other["filter"]) == ("pumps", "a/#", "pumps", "b/#")
    totals = summary["totals"]
    assert (totals["deliveries"], totals["messages"]) == (17, 14)
    assert (totals["extensions"], totals["duplicate_acks"]) == (1, 1)
    assert (totals["orphans"], totals["before"], totals["unknown"]) == (1, 1, 0)
    assert (summary["ok"], summary["complete"]) == (False, False)
    of_hour = {name: count for name, count in expected.items() if name != Outcome.UNKNOWN}
    assert summary["hours"] == [{"hour_ms": 0, "outcomes": {**of_hour, Outcome.IN_FLIGHT: 2}}]


def test_the_times_of_a_group_are_exact_where_they_are_short(every: tuple[Path, Summary]) -> None:
    pumps, other = every[1]["groups"]
    # Latencies: 100, 11,000 (from the pop, over the extension), 40, and late 30,100 twice.
    assert pumps["ack_latency_ms"] == {"p50": 11_000, "p90": 30_100, "p99": 30_100, "max": 30_100}
    assert pumps["revive_lateness_ms"] == {"p50": 5, "p90": 5, "p99": 5, "max": 5}
    assert other["ack_latency_ms"] is None
    assert pumps["attempts"] == {"1": 13, "2": 2}
    assert (pumps["oldest_in_flight_ms"], other["oldest_in_flight_ms"]) == (150_000, 1_000)


def test_the_worst_deliveries_are_shown_with_their_topic(every: tuple[Path, Summary]) -> None:
    examples = every[1]["examples"]
    assert [(each["topic"], each["deadline_ms"], each["ended_ms"]) for each in examples["lost"]] == [("a/7", 40_000, None)]
    assert [each["topic"] for each in examples["conflicting"]] == ["a/1"]
    assert [each["topic"] for each in examples["dead_lettered"]] == ["a/5"]
    assert [each["topic"] for each in examples["revived"]] == ["a/3", "a/4"]


def test_the_log_ends_before_a_record_that_is_half_written(every: tuple[Path, Summary]) -> None:
    log = every_outcome()
    assert every[1]["log"] == {
        "start_position": 5_000,
        "begin_position": 5_000,
        "end_position": log.end,
        "sealed_position": log.end - len(log.segments[-1]),
        "first_ms": 1_000,
        "last_ms": 200_000,
        "torn_tail": True,
    }
    assert every[1]["as_of_ms"] == 200_000


def test_the_report_reads_back(every: tuple[Path, Summary]) -> None:
    out, summary = every
    assert json.loads((out / "summary.json").read_text()) == summary
    by_outcome = Counter(row["outcome"] for row in rows_of(out / "outcomes") if row["stage"] != "waiting")
    assert by_outcome + Counter(acked=3, unknown=1) == counts(summary), "what was acknowledged in time is in the log's tables"
    by_message = Counter(row["outcome"] for row in rows_of(out / "message_outcomes", "message_position"))
    assert by_message == message_counts(summary), "group 1 was reset, so each of its messages has a row"
    assert rows_of(out / "strays")[0]["key"] == 17
    assert sorted(each.name for each in out.iterdir() if each.is_dir()) == sorted(steps.KEPT)


def test_an_earlier_time_shows_the_log_as_it_was_then(tmp_path: Path, found: Reconcile) -> None:
    every_outcome().save(tmp_path)
    earlier = found(as_of_ms=40_005)
    assert earlier["totals"]["deliveries"] == 13
    assert earlier["totals"]["outcomes"][Outcome.IN_FLIGHT] == 3  # 6, 7 and 8
    assert found(as_of_ms=10**9)["totals"]["outcomes"][Outcome.LOST] == 3


def test_nacks_and_extensions_make_no_deliveries_of_their_own(tmp_path: Path, found: Reconcile) -> None:
    """90 messages in 149 pops: 60 are nacked at first, 30 are extended twice, and one nacked message never comes back."""
    log = LogWriter(now_ms=1_000)
    messages = [log.message(f"a/{number}") for number in range(90)]
    first = log.checkpoint(1, "pumps", messages, deadline_ms=60_000)
    entries = [((first, index), messages[index]) for index in range(60)]
    nacked = log.change(1, "pumps", entries, deadline_ms=2_000, flags=Flag.RETURNED)
    extended = log.change(1, "pumps", [((first, index), messages[index]) for index in range(60, 90)], deadline_ms=90_000)
    extended = log.change(1, "pumps", [((extended, index), messages[60 + index]) for index in range(30)], deadline_ms=120_000)
    log.ack(1, "pumps", [(extended, index) for index in range(30)])
    log.now_ms = 2_000
    log.settle(Kind.POP_REVIVED, 1, "pumps", [(nacked, index) for index in range(59)])
    second = log.checkpoint(1, "pumps", messages[:58], deadline_ms=62_000, attempt=2)
    log.ack(1, "pumps", [(second, index) for index in range(58)])
    log.save(tmp_path)
    early, late = found(as_of_ms=3_000), found(as_of_ms=2_001 + GRACE_MS)
    for summary, of_last in ((early, {"waiting": 2}), (late, {"waiting": 1, "lost": 1})):
        assert counts(summary) == {"nacked": 60, "acked": 88}
        assert (summary["totals"]["deliveries"], summary["totals"]["extensions"]) == (148, 60)
        assert message_counts(summary) == {"acked": 88, **of_last}
    assert (early["ok"], late["ok"]) == (True, False), "a message that was nacked and never came back is lost"
    assert [each["message_position"] for each in late["examples"]["lost"]] == [messages[59]]


def test_a_back_off_that_is_raised_after_the_pop_is_waited_for(tmp_path: Path, found: Reconcile) -> None:
    log = LogWriter(now_ms=1_000)
    log.group(1, "pumps", "a/#")
    log.group(2, "fans", "a/#")
    messages = [log.message(f"a/{number}") for number in range(4)]
    log.now_ms = 10_000
    log.checkpoint(1, "pumps", messages[:1], deadline_ms=40_000)
    log.checkpoint(1, "pumps", messages[1:2], deadline_ms=40_000, attempt=3)
    log.checkpoint(2, "fans", messages[2:3], deadline_ms=40_000)
    log.now_ms = 20_000
    log.change_settings(1, "pumps", backoff={"min_ms": 600_000, "max_ms": 3_600_000, "factor": 2.0})
    log.now_ms = 45_000
    log.change_settings(2, "fans", backoff=[600_000])  # after the deadline, so it says nothing
    log.change_settings(1, "pumps")
    log.checkpoint(1, "pumps", messages[3:], deadline_ms=50_000)
    log.now_ms = 700_000
    log.message("a/last")
    log.save(tmp_path)

    def lost(as_of_ms: int) -> list[int]:
        found(as_of_ms=as_of_ms)
        return [row["message_position"] for row in rows_of(tmp_path / "out" / "outcomes") if row["outcome"] == "lost"]

    assert lost(40_000 + GRACE_MS + 1) == [messages[2]]
    assert lost(50_000 + GRACE_MS + 1) == [messages[2], messages[3]]
    assert lost(40_000 + 600_000 + GRACE_MS + 1) == [messages[0], messages[2], messages[3]]
    assert lost(40_000 + 2_400_000 + GRACE_MS) == [messages[0], messages[2], messages[3]]
    assert lost(40_000 + 2_400_000 + GRACE_MS + 1) == messages


def test_a_delivery_that_waits_for_its_back_off_is_not_lost(tmp_path: Path, found: Reconcile) -> None:
    log = LogWriter()
    messages = [log.message("a/1"), log.message("a/2")]
    log.checkpoint(1, "pumps", messages, deadline_ms=2_000, backoff_ms=500_000)  # noted as up to 2**19 ms
    log.save(tmp_path)
    for waited_ms, outcome in ((2**19 + GRACE_MS, "in_flight"), (2**19 + GRACE_MS + 1, "lost")):
        assert counts(found(as_of_ms=2_000 + waited_ms)) == {outcome: 2}


def test_a_step_of_the_clock_moves_the_deadlines_that_were_set_in_its_window(tmp_path: Path, found: Reconcile) -> None:
    log = LogWriter(now_ms=1_000)
    messages = [log.message(f"a/{number}") for number in range(4)]
    log.now_ms = 10_000
    before = log.checkpoint(1, "pumps", messages[:1], deadline_ms=70_000)
    log.now_ms = 20_000
    within = log.checkpoint(1, "pumps", messages[1:3], deadline_ms=80_000)
    passed = log.checkpoint(1, "pumps", messages[3:], deadline_ms=25_000)
    log.now_ms = 30_000
    log.add(Kind.CLOCK_STEPPED, fixed=STEP_FIXED.pack(15_000, within, 1_000_000))
    log.now_ms = 1_050_000
    log.ack(1, "pumps", [(before, 0), (within, 0), (passed, 0)])
    log.save(tmp_path)
    assert counts(found()) == {"acked": 1, "acked_late": 2, "in_flight": 1}


def test_what_may_have_ended_in_a_damaged_range_is_unknown_and_not_lost(tmp_path: Path, found: Reconcile) -> None:
    log = LogWriter(now_ms=1_000)
    messages = [log.message(f"a/{number}") for number in range(4)]
    first = log.checkpoint(1, "pumps", messages[:3], deadline_ms=2_000)
    log.ack(1, "pumps", [(first, 0)])
    damaged = log.add(Kind.DAMAGED, body=b"the acknowledgement of the second, and a pop")
    log.ack(1, "pumps", [(damaged + 3, 0)])
    second = log.checkpoint(1, "pumps", messages[3:], deadline_ms=2_000)
    log.save(tmp_path)
    summary = found(as_of_ms=2_000 + GRACE_MS + 1)
    assert counts(summary) == {"acked": 1, "unknown": 3, "lost": 1}
    assert (summary["totals"]["unknown"], summary["totals"]["orphans"]) == (1, 0)
    assert [each["position"] for each in summary["damages"]] == [damaged]
    assert [each["delivery_id"] for each in summary["examples"]["lost"]] == [second]


# --- a real node ------------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> Any:
    made = Parts(tmp_path, store=STORE)
    yield made
    made.close()


def of_group(summary: Summary, name: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the outcomes of the deliveries and of the messages of a group."""
    (group,) = [each for each in summary["groups"] if each["group"] == name]
    both = [group["outcomes"], group["message_outcomes"]]
    first, second = ({name: count for name, count in each.items() if count} for each in both)
    return first, second


def test_a_report_on_a_node_equals_what_its_consumers_did(parts: Parts, found: Reconcile) -> None:
    groups = ("acks", "nacks", "suspends", "extends", "times out", "is late", "dead", "resets", "deletes", "is unused", "holds")
    for name in groups:
        parts.create(name, attempts_max=1 if name == "dead" else 3)
    parts.create("is given up", attempts_max=1)
    parts.create("expires", topic_filter="short/#")
    parts.publish(b"1", b"2", b"3", b"4")
    parts.publish(*[b"x"] * 12, topic="short/1", properties=Properties(expires_at_ms=parts.clock.now_ms() + 1_000))
    parts.publish(b"lasts", topic="short/1")
    handles = {name: [each.handle for each in parts.pop(1 if name == "dead" else 4, 10_000, group=name)] for name in groups}
    for handle in handles["acks"]:
        parts.ack(handle, group="acks")
    seal(parts)
    for handle in handles["nacks"]:
        parts.change(handle, 1_000, nack=True, group="nacks")
    (given_up,) = parts.pop(1, 10_000, group="is given up")
    parts.change(given_up.handle, 1_000, nack=True, group="is given up")
    for handle in handles["suspends"][:2]:
        parts.change(handle, 1_000, suspend=True, group="suspends")
    for handle in handles["suspends"][2:]:
        parts.ack(handle, group="suspends")
    extended = [parts.change(handle, 60_000, group="extends")[1] for handle in handles["extends"]]
    parts.groups.reset("resets", "", ResetTo("latest"))
    parts.groups.delete("deletes")
    parts.groups.delete("is unused", is_unused=True)
    parts.advance(2_000)
    short = parts.pop(20, 10_000, group="expires", topic_filter="short/#")
    assert [each.body for each in short] == [b"lasts"]
    parts.ack(short[0].handle, group="expires")
    again = parts.pop(4, 60_000, group="nacks")
    assert len(again) == 4
    parts.ack(again[0].handle, group="nacks")
    parts.advance(9_000)
    seal(parts)
    for handle in extended[:3]:
        parts.ack(handle, group="extends")
    parts.close()
    summary = found()
    assert of_group(summary, "acks") == ({"acked": 4}, {"acked": 4})
    assert of_group(summary, "nacks") == ({"acked": 1, "nacked": 4, "in_flight": 3}, {"acked": 1, "in_flight": 3})
    assert of_group(summary, "suspends") == ({"acked": 2, "suspended": 2}, {"acked": 2, "waiting": 2})
    assert of_group(summary, "extends") == ({"acked": 3, "in_flight": 1}, {"acked": 3, "in_flight": 1})
    assert of_group(summary, "times out") == ({"revived": 4}, {"waiting": 4})
    assert of_group(summary, "dead") == ({"dead_lettered": 1}, {"dead_lettered": 1})
    assert of_group(summary, "is given up") == ({"dead_lettered": 1}, {"dead_lettered": 1})
    for name in ("resets", "deletes", "is unused"):
        assert of_group(summary, name) == ({"voided": 4}, {"voided": 4})
    assert of_group(summary, "expires") == ({"acked": 1, "expired": 12}, {"acked": 1, "expired": 12})
    assert (summary["ok"], summary["complete"]) == (True, True)


# --- from a seal on ---------------------------------------------------------------------------------------------------


def test_a_run_from_any_seal_finds_what_the_whole_run_finds(tmp_path: Path, found: Reconcile) -> None:
    random_log(seed=3, deliveries=6_000).save(tmp_path)
    seals = [segment.stop for segment in backfill(tmp_path)]
    assert len(seals) > 2
    whole = found()
    outcomes = {row["key"]: row for row in rows_of(tmp_path / "out" / "outcomes")}
    assert whole["log"]["sealed_position"] == seals[-1]
    for seal_at in seals:
        table = max(path for path in (tmp_path / "tables" / "open").rglob("*.parquet") if int(path.stem) < seal_at)
        open_then = {row["key"] for row in pyarrow.dataset.dataset(table).to_table().to_pylist() if row["stage"] != "queued"}
        summary = found(since=seal_at)
        assert summary["log"]["begin_position"] == seal_at
        later = {row["key"]: row for row in rows_of(tmp_path / "out" / "outcomes")}
        assert later == {key: row for key, row in outcomes.items() if key in open_then or key >= seal_at}
        assert summary["totals"]["orphans"] <= whole["totals"]["orphans"]


def test_a_run_since_the_last_one_begins_at_its_last_seal(tmp_path: Path, found: Reconcile) -> None:
    log = every_outcome()
    log.save(tmp_path)
    with pytest.raises(ReadOptionInvalid, match="no report of an earlier run"):
        found(since="last")
    first = found()
    again = found(since="last")
    assert again["log"]["begin_position"] == first["log"]["sealed_position"] == log.end - len(log.segments[-1])
    assert again["totals"]["outcomes"][Outcome.LOST] == first["totals"]["outcomes"][Outcome.LOST] == 1, "it was open there"
    assert again["totals"]["orphans"] == 0


@pytest.mark.parametrize(("since", "begin"), [("1970-01-01", 0), ("2200-01-01", 2), (5_001, 0), ("0", 0), (10**12, 2)])
def test_a_run_begins_at_the_last_seal_before_a_place(tmp_path: Path, found: Reconcile, since: str | int, begin: int) -> None:
    log = every_outcome()
    log.save(tmp_path)
    bases = [log.start + sum(map(len, log.segments[:count])) for count in range(3)]
    assert found(since=since)["log"]["begin_position"] == bases[begin]


def test_another_place_to_begin_is_refused(tmp_path: Path, found: Reconcile) -> None:
    every_outcome().save(tmp_path)
    with pytest.raises(ReadOptionInvalid, match="since is 'yesterday': give a position, a date as YYYY-MM-DD, or 'last'"):
        found(since="yesterday")


# --- a part of it -----------------------------------------------------------------------------------------------------


def test_a_report_of_some_groups_says_so(tmp_path: Path, found: Reconcile, capsys: pytest.CaptureFixture[str]) -> None:
    log = every_outcome()
    log.group(3, "fans", "c/#")
    log.checkpoint(3, "fans", [log.message("c/1")], deadline_ms=229_000)
    log.save(tmp_path)
    summary = found(groups=("fans",))
    assert [each["group"] for each in summary["groups"]] == ["fans"]
    assert (counts(summary), message_counts(summary)) == ({"in_flight": 1}, {"in_flight": 1})
    assert (summary["totals"]["orphans"], summary["totals"]["before"], summary["ok"]) == (0, 0, True)
    assert summary["filter"] == {"groups": ["fans"], "topics": [], "unread": 0}
    terminal.show(summary)
    assert "Only deliveries of the group fans." in capsys.readouterr().out
    assert "Only deliveries of the group fans" in (tmp_path / "out" / "report.html").read_text()
    with pytest.raises(ReadOptionInvalid, match=r"has no group 'pump'\. It has 'pumps' and others: name one of its groups"):
        found(groups=("fans", "pump"))
    with pytest.raises(ReadOptionInvalid, match=r"has no group 'x'\. It has 'fans', 'pumps': name one"):
        found(groups=("x",))


def test_a_report_of_some_topics_has_the_deliveries_of_their_messages(tmp_path: Path, found: Reconcile) -> None:
    every_outcome().save(tmp_path)
    summary = found(topics=("a/1", "a/3", "+/7/#"), grace_ms=GRACE_MS)
    assert counts(summary) == {"acked": 1, "revived": 1, "lost": 1, "conflicting": 1}
    assert message_counts(summary) == {"acked": 1, "lost": 1, "conflicting": 1}
    totals = summary["totals"]
    assert (totals["orphans"], totals["before"], totals["duplicate_acks"]) == (0, 0, 0), "they have no topic"
    later = found(topics=("a/3",), since="last")
    assert counts(later) == {"acked": 1}, "its message is in a segment before the first one that is read"
    assert later["filter"] == {"groups": [], "topics": ["a/3"], "unread": 0}
    assert found(topics=("nothing/#",))["totals"]["deliveries"] == 0


def test_a_delivery_whose_message_was_not_read_may_have_the_topic(
    tmp_path: Path, found: Reconcile, capsys: pytest.CaptureFixture[str]
) -> None:
    log = LogWriter(now_ms=1_000)
    message = log.message("a/1")
    log.checkpoint(1, "pumps", [message, 999_999], deadline_ms=2_000)
    log.checkpoint(2, "fans", [999_999], deadline_ms=2_000)
    log.save(tmp_path)
    summary = found(topics=("a/#",), groups=("pumps",))
    assert (counts(summary), summary["ok"], summary["complete"]) == ({"in_flight": 1}, True, False)
    terminal.show(summary)
    words = (
        "Only deliveries of the group pumps, of messages whose topic matches a/#, without those whose topic was not read: 1."
    )
    assert words in capsys.readouterr().out


TOPICS = ("a", "a/", "/a", "/", "a/b", "a/b/c", "a//c", "a/B", "$SYS/b", "$", "a/$b", "a'b/c", "a_/%", "ä/b", "a/+b")


@pytest.mark.parametrize(
    "topic_filter",
    [
        "/",
        "$",
        "a'b/c",
        "a_/%",
        "ä/b",
        "#",
        "+",
        "+/#",
        "+/+",
        "a/#",
        "a/+",
        "a/+/#",
        "a/+/c",
        "/+",
        "+/b/#",
        "$SYS/#",
        "$SYS/+",
        "a/b/#",
    ],
)
def test_the_sql_matches_as_a_subscription_does(tmp_path: Path, topic_filter: str) -> None:
    path = tmp_path / "messages.parquet"
    pq.write_table(pa.table({"position": range(len(TOPICS)), "topic": TOPICS}), path)
    engine = DuckEngine(tmp_path / "spilled", threads=1)
    engine.register(MESSAGES, "every_messages", [path])
    choose_messages(engine, ["x/y", topic_filter], tmp_path)
    chosen = {TOPICS[row["position"]] for row in engine.rows("SELECT position FROM chosen_messages")}
    engine.close()
    assert chosen == {topic for topic in TOPICS if matches(topic_filter, topic)}


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_directory_with_other_files_is_not_written_to(tmp_path: Path, found: Reconcile) -> None:
    every_outcome().save(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("do not lose")
    with pytest.raises(ReportDirInUse, match="holds no earlier report"):
        found()
    (out / "summary.json").write_text('{"report": "something else"}')
    with pytest.raises(ReportDirInUse, match="was not written by"):
        check_out(out)
    assert (out / "thesis.txt").read_text() == "do not lose"


def test_a_run_that_fails_leaves_the_report_before(tmp_path: Path) -> None:
    class Broken(DuckEngine):
        def materialise(self, name: str, sql: str, directory: Path | None) -> None:
            if name == steps.TALLIES:
                raise OSError("no space left on device")
            super().materialise(name, sql, directory)

    every_outcome().save(tmp_path)
    summary = reconcile(DuckEngine(tmp_path / "spilled"), tmp_path, tmp_path / "out")
    with pytest.raises(OSError, match="no space"):
        reconcile(Broken(tmp_path / "spilled"), tmp_path, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    assert len(rows_of(tmp_path / "out" / "outcomes")) == 13
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")], "what was half made is gone"


HOLDS = """
import sys
from pathlib import Path
from penstock.spark.reconciliation.reconcile import scratch_beside

with scratch_beside(Path(sys.argv[1])) as scratch:
    print(scratch, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_run_leaves_is_removed_by_the_next_one(tmp_path: Path, found: Reconcile) -> None:
    every_outcome().save(tmp_path)
    own = tmp_path / ".out.settings"
    own.mkdir()
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout is not None
        scratch = Path(other.stdout.readline().strip())
        found()
        assert scratch.is_dir(), "the other run goes on"
        other.kill()
    found()
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == [own.name]
    assert (tmp_path / "out" / "summary.json").exists()


class Recorder:
    """Notes the stages of a command."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self, what: str) -> None:
        self.seen.append(what)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.begin("end")


def test_a_log_without_deliveries_is_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LogWriter().save(tmp_path, hole_bytes=4_096)
    stages = Recorder()
    assert run(tmp_path, engine="duckdb", json=True, stages=stages) == 0
    expected = ["start DuckDB", "read the end of the log", *(step.name.replace("_", " ") for step in steps.load())]
    assert stages.seen == [*expected, "summarise", "stop DuckDB", "end"]
    printed = json.loads(capsys.readouterr().out)
    assert (printed["ok"], printed["complete"], printed["groups"]) == (True, True, [])


def test_a_negative_grace_is_refused() -> None:
    with pytest.raises(ReadOptionInvalid, match="grace_ms is -1"):
        ReconcileOptions(grace_ms=-1)


def test_damage_in_the_middle_of_the_log_is_an_error(tmp_path: Path, found: Reconcile) -> None:
    directory = every_outcome().save(tmp_path)
    segment = sorted(directory.iterdir())[1]
    data = bytearray(segment.read_bytes())
    data[60] ^= 1
    segment.write_bytes(data)
    with pytest.raises(RecordCorrupt, match=rf"record at position {int(segment.stem)} in segment {segment.name} is corrupt"):
        found()


@pytest.mark.parametrize(("acked", "extra", "status"), [(2, [], 0), (1, [], 1), (2, [(9_000_000, 0)], 1)])
def test_run_prints_nothing_but_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], acked: int, extra: Sequence[tuple[int, int]], status: int
) -> None:
    log = LogWriter()
    messages = [log.message("a/1"), log.message("a/2")]
    checkpoint = log.checkpoint(1, "pumps", messages, deadline_ms=2_000)
    log.ack(1, "pumps", [*((checkpoint, index) for index in range(acked)), *extra])
    log.save(tmp_path)
    out = tmp_path / "out"
    assert run(tmp_path, out, engine="duckdb", json=True, options=ReconcileOptions(as_of_ms=100_000)) == status
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "summary.json").read_text())
    assert (printed["totals"]["outcomes"]["lost"], printed["totals"]["orphans"]) == (2 - acked, len(extra))


def test_what_is_unknown_has_a_status_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = LogWriter(start=5_000)
    log.ack(1, "pumps", [(17, 0)])
    log.save(tmp_path)
    assert run(tmp_path, engine="duckdb") == 6
    assert "Nothing is wrong with what is known, but some outcomes are unknown." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ReadOptionInvalid("x"), 2),
        (ReportDirInUse("x"), 2),
        (LogMissing("x"), 3),
        (LogCorrupt("x"), 4),
        (RecordCorrupt(1, "x"), 4),
        (JavaMissing("x"), 5),
        (EngineMissing("x"), 5),
    ],
)
def test_the_exit_status_tells_the_reasons_apart(error: ReconcileError | StoreError, status: int) -> None:
    assert status_of(error) == status


def test_run_without_a_log_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, tmp_path / "out") == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "holds no CommitLog" in captured.err
    assert not (tmp_path / "out").exists()


def test_where_there_is_no_java_duckdb_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose("auto", "local[*]") == "duckdb"
    pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")
    for master in ("local[*]", "local[2]", "spark://host:7077"):
        with pytest.raises(JavaMissing, match="There is no `java` on PATH"):
            choose("spark", master)
    with pytest.raises(ReadOptionInvalid, match="The master spark://host:7077 is for Spark"):
        choose("duckdb", "spark://host:7077")


# --- against a model in plain Python ----------------------------------------------------------------------------------


FILTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "groups": {"groups": ("g3", "g1")},
    "topics": {"topics": ("s/1/#", "+/2", "s/3", "t/#")},
    "both": {"groups": ("g2",), "topics": ("#",)},
}


@pytest.mark.parametrize(
    ("seed", "narrowed"), [*((seed, "all") for seed in range(2 * DEPTH)), (0, "groups"), (0, "topics"), (1, "both")]
)
def test_a_random_log_agrees_with_the_model(tmp_path: Path, found: Reconcile, seed: int, narrowed: str) -> None:
    log, only = random_log(seed, deliveries=4_000), FILTERS[narrowed]
    log.save(tmp_path, hole_bytes=1_000_000)
    groups, topics = only.get("groups"), only.get("topics")
    model = Model(
        log.records(),
        as_of_ms=log.now_ms,
        grace_ms=GRACE_MS,
        groups=groups and {int(name[1:]) for name in groups},
        has_topic=topics and (lambda topic: any(matches(each, topic) for each in topics)),
    )
    summary = found(**only)
    rows = rows_of(tmp_path / "out" / "outcomes")
    assert {row["key"]: row["outcome"] for row in rows} == {
        key: outcome for key, outcome in model.outcomes.items() if outcome is not Outcome.ACKED
    }
    assert summary["totals"]["outcomes"][Outcome.ACKED] == Counter(model.outcomes.values())[Outcome.ACKED]
    assert {row["key"] for row in rows if row["stage"] == "waiting"} == model.waits
    expected = set(OF_DELIVERIES) - {Outcome.RETURNED, Outcome.EXPIRED, Outcome.UNKNOWN}
    assert topics or set(model.outcomes.values()) >= expected, "the log must have each outcome"
    messages = Counter(
        {(each["group_id"], name): n for each in summary["groups"] for name, n in each["message_outcomes"].items()}
    )
    assert +messages == Counter((group_id, outcome.value) for (group_id, _), outcome in model.messages.items())
    totals = summary["totals"]
    found_counts = (totals["extensions"], totals["duplicate_acks"], totals["orphans"])
    assert found_counts == (model.extensions, model.duplicates, model.orphans)
    for group in summary["groups"]:
        group_id = group["group_id"]
        assert group["attempts"] == {str(n): count for (of, n), count in sorted(model.attempts.items()) if of == group_id}
        latencies = sorted(model.latencies[group_id])
        times = group["ack_latency_ms"]
        assert times is not None
        for quantile, value in ((0.5, times["p50"]), (0.9, times["p90"]), (0.99, times["p99"]), (1.0, times["max"])):
            exact = latencies[math.ceil(quantile * len(latencies)) - 1]
            assert value <= exact <= value * 1.01


# --- the SQL ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", steps.load(), ids=lambda step: step.name)
def test_the_sql_keeps_to_what_both_engines_mean_the_same_by(step: steps.SqlStep) -> None:
    sql = re.sub(r"--.*", "", step.sql)
    for forbidden in (r"/", r"`", r'"', r"(?i)\bqualify\b", r"(?i)\bstruct", r"(?i)\bdate", r"(?i)\bapprox", r"(?i)\bover\b"):
        assert not re.search(forbidden, sql), forbidden
    for counted in re.finditer(r"(?i)\b(count|sum)\(", sql):
        assert sql[: counted.start()].endswith("CAST("), "sums and counts have another type in each engine"
    is_cached = not step.is_view and step.name not in steps.KEPT
    assert not (is_cached and re.search(r"(?i)\bwith\b", sql)), "Spark does not find a query with WITH in its cache"


def test_the_tables_of_a_report_are_those_of_the_reference(every: tuple[Path, Summary]) -> None:
    assert [table.name for table in REPORT_TABLES] == list(steps.KEPT)
    for table in REPORT_TABLES:
        schema = pyarrow.dataset.dataset(every[0] / table.name).schema
        assert {name: str(kind) for name, kind in zip(schema.names, schema.types, strict=True)} == {
            column.name: str(ARROW_TYPES[column.type]) for column in table.columns
        }
