"""Every delivery gets exactly one outcome."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")

import pyarrow.parquet
from pyspark.sql import SparkSession

from penstock.pop.backoff import Exponential
from penstock.spark import outcomes
from penstock.spark.errors import JavaMissing, LogMissing, ReadOptionInvalid, ReconcileError, ReportDirInUse
from penstock.spark.reconcile import Reconciliation, reconcile, run, status_of
from penstock.spark.summary import DeliveryOutcome
from penstock.store import record
from penstock.store.bodies import CHANGE_ENTRY, CHECKPOINT_ENTRY, REFERENCE
from penstock.store.errors import LogCorrupt, RecordCorrupt, StoreError
from penstock.store.record import POP_FIXED, STEP_FIXED, Flag, Kind, Record
from tests.depth import DEPTH
from tests.spark.log_writer import LogWriter

GRACE_MS = 60_000
RANDOM_DELIVERIES = 8_000 * DEPTH
"""How many deliveries the random log has."""
NO_OUTCOMES = {outcome.value: 0 for outcome in DeliveryOutcome}


def every_outcome() -> LogWriter:
    """A log in three segments with each outcome, in group 1 of "pumps"; group 2 has one delivery, and it is in flight.

    Times in ms: pops at 10,000 with a deadline of 40,000 and the log's last record at 200,000.
    """
    log = LogWriter(start=5_000, now_ms=1_000)
    log.group(1, "pumps", "a/#")
    log.group(2, "pumps", "b/#")
    messages = [log.message(f"a/{number}") for number in range(13)]
    log.now_ms = 10_000
    first = log.checkpoint(1, "pumps", messages, deadline_ms=40_000)
    log.now_ms = 10_100
    log.ack(1, "pumps", [(first, 0)])
    log.now_ms = 10_300
    log.ack(1, "pumps", [(first, 1), (first, 0)])  # the second is a duplicate
    log.roll()
    log.now_ms = 20_000
    changed = log.change(1, "pumps", [((first, 2), messages[2])], deadline_ms=90_000)
    log.now_ms = 21_000
    log.ack(1, "pumps", [(changed, 0)])
    nacked = log.change(1, "pumps", [((first, 11), messages[11])], deadline_ms=30_000, flags=Flag.RETURNED)
    returned = log.change(1, "pumps", [((first, 12), messages[12])], deadline_ms=30_000, flags=Flag.RETURNED | Flag.SUSPENDED)
    log.now_ms = 30_000
    log.settle(Kind.POP_REVIVED, 1, "pumps", [(nacked, 0), (returned, 0)])
    log.now_ms = 40_005
    log.settle(Kind.POP_REVIVED, 1, "pumps", [(first, 3), (first, 4)])
    log.settle(Kind.POP_DEAD_LETTER, 1, "pumps", [(first, 5)])
    log.settle(Kind.GROUP_OFFSET_RESET, 1, "pumps", [(first, 9)])
    log.settle(Kind.GROUP_DELETED, 1, "pumps", [(first, 10)])
    log.now_ms = 40_100
    log.ack(1, "pumps", [(first, 6)])  # late
    log.settle(Kind.POP_REVIVED, 1, "pumps", [(first, 1)])  # conflicts with its ack; `first, 7` is lost
    log.ack(1, "pumps", [(first, 8), (first + 9_000_000, 0), (17, 0)])  # late, an orphan, and one from before the log
    log.roll()
    log.now_ms = 50_000
    retried = log.checkpoint(1, "pumps", [messages[3], messages[4]], deadline_ms=160_000, attempt=2)
    log.now_ms = 50_040
    log.ack(1, "pumps", [(retried, 0)])
    log.now_ms = 199_000
    log.checkpoint(2, "pumps", [messages[0]], deadline_ms=229_000)
    log.now_ms = 200_000
    log.message("a/last")
    return log


@pytest.mark.nightly
def test_nacks_and_extensions_make_no_deliveries_of_their_own(spark: SparkSession, tmp_path: Path) -> None:
    """90 messages in 150 pops: 60 are nacked at first, 30 are extended twice, and one nacked message never comes back."""
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
    second = log.checkpoint(1, "pumps", messages[:59], deadline_ms=62_000, attempt=2)
    log.ack(1, "pumps", [(second, index) for index in range(59)])
    log.save(tmp_path)

    def totals(as_of_ms: int) -> tuple[int, int, dict[str, int]]:
        found = reconcile(spark, tmp_path, as_of_ms=as_of_ms).summary["totals"]
        return found["deliveries"], found["extensions"], {name: count for name, count in found["outcomes"].items() if count}

    assert totals(3_000) == (149, 60, {"nacked": 60, "acked_in_time": 89})
    lost = {"nacked": 60, "acked_in_time": 89, "lost": 1}
    assert totals(2_001 + GRACE_MS) == (150, 60, lost), "a message that was nacked and never came back is lost"


@pytest.mark.nightly
def test_a_back_off_that_is_raised_after_the_pop_is_waited_for(spark: SparkSession, tmp_path: Path) -> None:
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
        found = reconcile(spark, tmp_path, as_of_ms=as_of_ms)
        return sorted(row.message_position for row in found.deliveries.where("outcome = 'lost'").collect())

    assert lost(40_000 + GRACE_MS + 1) == [messages[2]]
    assert lost(50_000 + GRACE_MS + 1) == [messages[2], messages[3]]
    assert lost(40_000 + 600_000 + GRACE_MS + 1) == [messages[0], messages[2], messages[3]]
    assert lost(40_000 + 2_400_000 + GRACE_MS) == [messages[0], messages[2], messages[3]]
    assert lost(40_000 + 2_400_000 + GRACE_MS + 1) == messages


@pytest.mark.parametrize(
    ("backoff", "waits_ms"),
    [
        (None, []),
        ([], []),
        ([5, 10], [5, 10]),
        ({"min_ms": 100, "max_ms": 350, "factor": 2.0}, [100, 200, 350]),
        ({"min_ms": 100, "max_ms": 100}, [100]),
        ({"min_ms": 100, "max_ms": 500, "factor": 1.0}, [100]),
        ({"min_ms": 0, "max_ms": 500, "factor": 2.0}, [0]),
    ],
)
def test_the_waits_of_a_back_off_are_those_of_the_node(backoff: object, waits_ms: list[int]) -> None:
    assert outcomes.waits_of(backoff) == waits_ms
    if isinstance(backoff, dict):
        rule = Exponential(**backoff)
        assert [rule.wait_ms(attempt) for attempt in range(1, len(waits_ms) + 1)] == waits_ms


@pytest.mark.nightly
def test_a_step_of_the_clock_moves_the_deadlines_that_were_set_in_its_window(spark: SparkSession, tmp_path: Path) -> None:
    log = LogWriter(now_ms=1_000)
    log.group(1, "pumps", "a/#")
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
    result = reconcile(spark, tmp_path, grace_ms=GRACE_MS)
    (pumps,) = result.summary["groups"]
    assert pumps["outcomes"] == {
        **NO_OUTCOMES,
        DeliveryOutcome.ACKED_IN_TIME.value: 1,
        DeliveryOutcome.ACKED_LATE.value: 2,
        DeliveryOutcome.IN_FLIGHT.value: 1,
    }
    assert result.summary["ok"]
    result.close()


@pytest.fixture(scope="module")
def found(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reconciliation]:
    path = tmp_path_factory.mktemp("every_outcome")
    half = record.encode(Kind.POP_ACK, b"pumps", b"", store_ms=999_999, fixed=POP_FIXED.pack(1, 1, 0))[:-1]
    every_outcome().save(path, hole_bytes=100_000, torn=half)
    result = reconcile(spark, path, grace_ms=GRACE_MS)
    yield result
    result.close()


def test_every_outcome_is_distinguished(found: Reconciliation) -> None:
    pumps, other = found.summary["groups"]
    expected = {
        DeliveryOutcome.ACKED_IN_TIME.value: 4,  # 0, 1, the changed one, the retried one
        DeliveryOutcome.ACKED_LATE.value: 2,
        DeliveryOutcome.REVIVED.value: 2,
        DeliveryOutcome.NACKED.value: 1,
        DeliveryOutcome.RETURNED.value: 1,
        DeliveryOutcome.EXTENDED.value: 0,  # it goes on in the changed one
        DeliveryOutcome.DEAD_LETTERED.value: 1,
        DeliveryOutcome.VOIDED.value: 2,  # neither lost nor open, though nobody acknowledges them any more
        DeliveryOutcome.IN_FLIGHT.value: 1,  # 160,000 + 60,000 is behind the log's end
        DeliveryOutcome.LOST.value: 1,
    }
    assert pumps["outcomes"] == expected
    assert other["outcomes"] == {**NO_OUTCOMES, DeliveryOutcome.IN_FLIGHT.value: 1}
    assert (pumps["group"], pumps["filter"], other["group"], other["filter"]) == ("pumps", "a/#", "pumps", "b/#")
    assert found.summary["totals"] == {
        "deliveries": 16,
        "outcomes": {**expected, DeliveryOutcome.IN_FLIGHT.value: 2},
        "conflicting": 1,
        "extensions": 1,
        "duplicate_acks": 1,
        "orphan_acks": 1,
        "orphan_others": 0,
        "before_log": 1,
    }
    assert not found.summary["ok"]


def test_the_times_of_a_group_are_exact_where_it_is_small(found: Reconciliation) -> None:
    pumps, other = found.summary["groups"]
    # Latencies: 100, 300, 1,000 (from the change), 40, and late 30,100 twice.
    assert pumps["ack_latency_ms"] == {"p50": 300, "p90": 30_100, "p99": 30_100, "max": 30_100}
    assert pumps["revive_lateness_ms"] == {"p50": 5, "p90": 5, "p99": 5, "max": 5}
    assert other["ack_latency_ms"] is None
    assert pumps["attempts"] == {"1": 13, "2": 2}
    assert (pumps["messages"], pumps["messages_acked"]) == (13, 6)
    assert (pumps["oldest_in_flight_ms"], other["oldest_in_flight_ms"]) == (150_000, 1_000)


def test_the_worst_deliveries_are_shown_with_their_topic(found: Reconciliation) -> None:
    examples = found.summary["examples"]
    assert [(each["topic"], each["deadline_ms"], each["settled_ms"]) for each in examples["lost"]] == [("a/7", 40_000, None)]
    assert [(each["topic"], each["outcome"]) for each in examples["conflicting"]] == [("a/1", "acked_in_time")]
    assert [each["topic"] for each in examples["dead_lettered"]] == ["a/5"]
    assert [each["topic"] for each in examples["revived"]] == ["a/3", "a/4"]


def test_the_log_ends_before_a_record_that_is_half_written(found: Reconciliation) -> None:
    assert found.summary["log"] == {
        "start_position": 5_000,
        "end_position": every_outcome().end,
        "first_ms": 1_000,
        "last_ms": 200_000,
        "torn_tail": True,
    }
    assert found.summary["as_of_ms"] == 200_000


@pytest.mark.nightly
def test_an_earlier_time_shows_the_log_as_it_was_then(spark: SparkSession, tmp_path: Path) -> None:
    every_outcome().save(tmp_path)
    earlier = reconcile(spark, tmp_path, as_of_ms=40_005)
    later = reconcile(spark, tmp_path, as_of_ms=10**9)
    assert earlier.summary["totals"]["deliveries"] == 13
    assert earlier.summary["totals"]["outcomes"][DeliveryOutcome.IN_FLIGHT] == 3  # 6, 7 and 8
    assert later.summary["totals"]["outcomes"][DeliveryOutcome.LOST] == 3
    earlier.close()
    later.close()


@pytest.mark.nightly
def test_a_delivery_that_waits_for_its_back_off_is_not_lost(spark: SparkSession, tmp_path: Path) -> None:
    log = LogWriter()
    messages = [log.message("a/1"), log.message("a/2")]
    log.checkpoint(1, "pumps", messages, deadline_ms=2_000, backoff_ms=500_000)  # noted as up to 2**19 ms
    log.save(tmp_path)
    for waited_ms, lost in ((500_000, 0), (2**19 + GRACE_MS, 0), (2**19 + GRACE_MS + 1, 2)):
        result = reconcile(spark, tmp_path, as_of_ms=2_000 + waited_ms, grace_ms=GRACE_MS)
        found = result.summary["totals"]["outcomes"]
        assert (found[DeliveryOutcome.IN_FLIGHT], found[DeliveryOutcome.LOST]) == (2 - lost, lost), waited_ms
        result.close()


def rows_of(path: Path, key: str) -> list[dict[str, Any]]:
    """Return the rows of a table of a report, by a column."""
    return sorted(pyarrow.parquet.read_table(path).to_pylist(), key=lambda row: row[key])


@pytest.mark.nightly
def test_the_report_reads_back(found: Reconciliation, tmp_path: Path) -> None:
    out = tmp_path / "report"
    out.mkdir()
    (out / "summary.json").write_text('{"report": "penstock reconcile"}')
    found.write(out)  # over an earlier report
    assert json.loads((out / "summary.json").read_text()) == found.summary
    deliveries = rows_of(out / "deliveries", "key")
    by_outcome = Counter(row["outcome"] for row in deliveries)
    assert by_outcome == {name: count for name, count in found.summary["totals"]["outcomes"].items() if count}
    assert [row["attempt"] for row in deliveries if row["conflicting"]] == [1]
    groups = rows_of(out / "groups", "group_id")
    assert [(row["filter"], row["lost"], row["ack_latency_ms_p50"], row["messages_acked"]) for row in groups] == [
        ("a/#", 1, 300, 6),
        ("b/#", 0, None, 0),
    ]
    orphans = rows_of(out / "orphans", "key")
    assert (orphans[0]["key"], orphans[0]["end_kind"], orphans[0]["acks"]) == (17, "POP_ACK", 1)
    assert [row["before_log"] for row in orphans] == [True, False]


def test_a_directory_with_other_files_is_not_written_to(found: Reconciliation, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("do not lose")
    with pytest.raises(ReportDirInUse, match="holds no earlier report"):
        found.write(out)
    (out / "summary.json").write_text('{"report": "something else"}')
    with pytest.raises(ReportDirInUse, match="was not written by"):
        found.write(out)
    assert (out / "thesis.txt").read_text() == "do not lose"


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


@pytest.mark.nightly
def test_a_log_without_deliveries_is_in_order(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LogWriter().save(tmp_path, hole_bytes=4_096)
    stages = Recorder()
    assert run(tmp_path, master="local[2]", json=True, stages=stages) == 0
    assert [each.split()[0] for each in stages.seen] == ["start", "pair", "stop", "end"]
    printed = json.loads(capsys.readouterr().out)
    assert (printed["ok"], printed["groups"]) == (True, [])


def test_a_negative_grace_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ReadOptionInvalid, match="grace_ms is -1"):
        reconcile(spark, tmp_path, grace_ms=-1)


@pytest.mark.nightly
def test_damage_in_the_middle_of_the_log_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    directory = every_outcome().save(tmp_path)
    segment = sorted(directory.iterdir())[1]
    data = bytearray(segment.read_bytes())
    data[60] ^= 1
    segment.write_bytes(data)
    with pytest.raises(LogCorrupt, match=rf"record at position {int(segment.stem)} in segment {segment.name} is corrupt"):
        reconcile(spark, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("acked", "status"), [(2, 0), (1, 1)])
def test_run_prints_nothing_but_the_summary(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], acked: int, status: int
) -> None:
    log = LogWriter()
    messages = [log.message("a/1"), log.message("a/2")]
    checkpoint = log.checkpoint(1, "pumps", messages, deadline_ms=2_000)
    log.ack(1, "pumps", [(checkpoint, index) for index in range(acked)])
    log.save(tmp_path)
    out = tmp_path / "out"
    stages = Recorder()
    assert run(tmp_path, out, "local[2]", json=True, as_of_ms=100_000, stages=stages) == status
    assert [each.split()[0] for each in stages.seen] == ["start", "pair", "write", "stop", "end"]
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "summary.json").read_text())
    assert printed["totals"]["outcomes"]["lost"] == 2 - acked


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ReadOptionInvalid("x"), 2),
        (ReportDirInUse("x"), 2),
        (LogMissing("x"), 3),
        (LogCorrupt("x"), 4),
        (RecordCorrupt(1, "x"), 4),
        (JavaMissing("x"), 5),
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


# --- a large random log against a model in plain Python -------------------------------------------------------------


def random_log(seed: int, deliveries: int) -> LogWriter:
    """Return a log in which anything may follow a delivery, even what a node never writes."""
    rng = random.Random(seed)
    log = LogWriter()
    open_: list[tuple[int, tuple[int, int], int]] = []
    handed = 0
    while handed < deliveries:
        log.now_ms += rng.randrange(max(10_000_000 // deliveries, 200))
        if len(log.segments[-1]) > 100_000:
            log.roll()
        group_id = rng.randrange(1, 5)
        messages = [log.message(f"s/{rng.randrange(50)}") for _ in range(rng.randrange(1, 33))]
        attempt = rng.choice((1, 1, 1, 2, 3))
        deadline_ms = log.now_ms + rng.choice((1_000, 30_000))
        checkpoint = log.checkpoint(group_id, f"g{group_id}", messages, deadline_ms=deadline_ms, attempt=attempt)
        open_ += [(group_id, (checkpoint, index), message) for index, message in enumerate(messages)]
        handed += len(messages)
        rng.shuffle(open_)
        for _ in range(rng.randrange(3)):
            count = min(len(open_), rng.randrange(1, 30))
            settling, open_ = open_[:count], open_[count:]
            open_ += [each for each in settling if rng.random() < 0.02]  # settled twice
            of_group = [each for each in settling if each[0] == group_id]
            references = [reference for _, reference, _ in of_group]
            if rng.random() < 0.01:
                references.append((rng.randrange(log.end), 12_345_678))
            kind = rng.choice((Kind.POP_ACK, *SETTLING))
            if kind == Kind.POP_INVISIBLE_CHANGED:
                entries = [(reference, message) for _, reference, message in of_group]
                flags = rng.choice((0, 0, Flag.RETURNED, Flag.RETURNED | Flag.SUSPENDED))
                changed = log.change(group_id, f"g{group_id}", entries, deadline_ms=log.now_ms + 5_000, flags=flags)
                open_ += [(group_id, (changed, index), each[2]) for index, each in enumerate(of_group)]
                handed += len(of_group)
            else:
                log.settle(kind, group_id, f"g{group_id}", references)
    return log


SETTLING = (
    Kind.POP_ACK,
    Kind.POP_REVIVED,
    Kind.POP_DEAD_LETTER,
    Kind.GROUP_OFFSET_RESET,
    Kind.POP_INVISIBLE_CHANGED,
)


class Model:
    """Return the same reconciliation, computed with dictionaries record by record."""

    def __init__(self, records: Iterator[Record], as_of_ms: int) -> None:
        self.begun: dict[int, tuple[int, int, int, int, int]] = {}
        self.waiting: set[int] = set()
        self.ended: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for each in records:
            if each.kind in (Kind.POP_CHECKPOINT, Kind.POP_INVISIBLE_CHANGED):
                self._begin(each)
            if each.kind in SETTLING:
                layout = CHANGE_ENTRY if each.kind == Kind.POP_INVISIBLE_CHANGED else REFERENCE
                for checkpoint, index, *_ in layout.iter_unpack(each.body):
                    event = 300 if each.flags & Flag.SUSPENDED else 200 if each.flags & Flag.RETURNED else int(each.kind)
                    self.ended[checkpoint + index].append((each.store_ms, event))
        self.outcomes: Counter[tuple[int, str]] = Counter()
        self.latencies: dict[int, list[int]] = defaultdict(list)
        self.acked: dict[int, set[int]] = defaultdict(set)
        self.conflicting = self.duplicates = self.extensions = 0
        self.shown: list[int] = []
        for key in self.begun:
            self._judge(key, as_of_ms)
        self.orphans = Counter(
            kind == Kind.POP_ACK for key, ends in self.ended.items() if key not in self.begun for _, kind in ends
        )

    def _begin(self, each: Record) -> None:
        group_id, _, deadline_ms = POP_FIXED.unpack(each.fixed)
        layout, skip = (CHECKPOINT_ENTRY, 0) if each.kind == Kind.POP_CHECKPOINT else (CHANGE_ENTRY, 2)
        for index, entry in enumerate(layout.iter_unpack(each.body)):
            message, _, _, attempt, _, _ = entry[skip:]
            self.begun[each.position + index] = (group_id, each.store_ms, deadline_ms, message, attempt)
            if skip and each.flags & Flag.RETURNED:
                self.waiting.add(each.position + index)

    def _judge(self, key: int, as_of_ms: int) -> None:
        group_id, pop_ms, deadline_ms, message, _ = self.begun[key]
        ends = self.ended.get(key, [])
        acks = sum(kind == Kind.POP_ACK for _, kind in ends)
        self.duplicates += max(acks - 1, 0)
        is_conflicting = min(acks, 1) + len(ends) - acks > 1
        self.conflicting += is_conflicting
        if not ends:
            outcome = DeliveryOutcome.IN_FLIGHT if as_of_ms <= deadline_ms + GRACE_MS else DeliveryOutcome.LOST
        else:
            at_ms, kind = min(ends)
            outcome = {
                Kind.POP_ACK: DeliveryOutcome.ACKED_IN_TIME if at_ms <= deadline_ms else DeliveryOutcome.ACKED_LATE,
                Kind.POP_REVIVED: DeliveryOutcome.REVIVED,
                Kind.POP_DEAD_LETTER: DeliveryOutcome.DEAD_LETTERED,
                Kind.GROUP_OFFSET_RESET: DeliveryOutcome.VOIDED,
                Kind.POP_INVISIBLE_CHANGED: DeliveryOutcome.EXTENDED,
                200: DeliveryOutcome.NACKED,
                300: DeliveryOutcome.RETURNED,
            }[kind]
        self.extensions += outcome is DeliveryOutcome.EXTENDED
        is_part = key in self.waiting or outcome is DeliveryOutcome.EXTENDED
        if is_part and not is_conflicting and outcome is not DeliveryOutcome.LOST:
            return
        self.shown.append(key)
        if outcome in (DeliveryOutcome.ACKED_IN_TIME, DeliveryOutcome.ACKED_LATE):
            self.latencies[group_id].append(min(ends)[0] - pop_ms)
            self.acked[group_id].add(message)
        self.outcomes[group_id, outcome.value] += 1


@pytest.mark.nightly
def test_a_large_random_log_agrees_with_the_model(spark: SparkSession, tmp_path: Path) -> None:
    log = random_log(seed=20, deliveries=RANDOM_DELIVERIES)
    log.save(tmp_path, hole_bytes=1_000_000)
    result = reconcile(spark, tmp_path, grace_ms=GRACE_MS)
    summary, model = result.summary, Model(log.records(), log.now_ms)
    totals = summary["totals"]
    assert totals["deliveries"] == len(model.shown)
    assert totals["extensions"] == model.extensions > 0
    assert all(totals["outcomes"].values()), "the random log must have every outcome"
    assert (totals["conflicting"], totals["duplicate_acks"]) == (model.conflicting, model.duplicates)
    assert (totals["orphan_acks"], totals["orphan_others"]) == (model.orphans[True], model.orphans[False])
    for group in summary["groups"]:
        group_id = group["group_id"]
        assert group["group"] == f"g{group_id}"
        assert group["outcomes"] == {name: model.outcomes[group_id, name] for name in NO_OUTCOMES}
        assert group["messages_acked"] == len(model.acked[group_id])
        shown = [begun for key in model.shown if (begun := model.begun[key])[0] == group_id]
        assert group["messages"] == len({begun[3] for begun in shown})
        attempts = Counter(str(begun[4]) for begun in shown)
        assert group["attempts"] == dict(attempts)
        latencies = sorted(model.latencies[group_id])
        found = group["ack_latency_ms"]
        assert found is not None
        assert found["max"] == latencies[-1]
        for quantile, value in ((0.5, found["p50"]), (0.9, found["p90"]), (0.99, found["p99"])):
            rank, off = math.ceil(quantile * len(latencies)) - 1, math.ceil(len(latencies) / 10_000) + 1
            assert latencies[max(rank - off, 0)] <= value <= latencies[min(rank + off, len(latencies) - 1)]
    result.close()
