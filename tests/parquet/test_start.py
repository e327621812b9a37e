"""The tables of a log that retention has trimmed begin with what was open there, as the snapshot at that position says it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

pytest.importorskip("duckdb", reason="the reconciliation needs the extra `tables`")

import pyarrow.parquet as pq

from penstock.cli.main import main
from penstock.spark.parquet.catalog import table_sizes, verify_tables
from penstock.spark.parquet.chains import FAR
from penstock.spark.parquet.expiry import drop_before
from penstock.spark.parquet.files import start_path
from penstock.spark.parquet.snapshot import open_state
from penstock.spark.parquet.state import load_state
from penstock.spark.reconciliation.command import status_of_summary
from penstock.spark.reconciliation.engines import DuckEngine
from penstock.spark.reconciliation.reconcile import ReconcileOptions, reconcile
from penstock.spark.reconciliation.summary import Summary
from penstock.store.index.rowformats import FORMAT
from penstock.store.properties import Properties
from penstock.store.record import HEADER_BYTES, Kind, encode
from penstock.store.snapshots.snapshotreader import snapshot_path
from penstock.store.snapshots.snapshotwriter import write_empty
from tests.parquet.openstate import open_in_node, queued_in_node
from tests.parquet.sealing import TRIMMED, make_durable, rows_of, seal, trim, write_tables
from tests.pop.wiring import Parts

LONG_MS = 10_000_000


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = Parts(tmp_path / "data", store=TRIMMED)
    yield made
    made.close()


@pytest.fixture
def found(parts: Parts, tmp_path: Path) -> Callable[..., Summary]:
    def reconciled(**options: Any) -> Summary:
        engine = DuckEngine(tmp_path / "spilled", threads=1)
        try:
            return reconcile(engine, parts.data_dir, tmp_path / "out", ReconcileOptions(**options))
        finally:
            engine.close()

    return reconciled


def of_groups(summary: Summary) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Return the outcomes of the deliveries and of the messages of each group, without zeros."""

    def counts(outcomes: dict[str, int]) -> dict[str, int]:
        return {name: count for name, count in outcomes.items() if count}

    return {each["group"]: (counts(each["outcomes"]), counts(each["message_outcomes"])) for each in summary["groups"]}


def make_busy(parts: Parts) -> dict[str, list[str]]:
    """Let groups have deliveries in each state; return the handles of those that are out, by group."""
    for name in ("holds", "nacks", "suspends", "times out", "redrives", "extends"):
        parts.create(name, backoff=(1_000,), attempts_max=1 if name == "redrives" else 3)
    parts.create("in order", fifo=True, backoff=())
    for press in "ab":
        parts.publish(*[b"x"] * 5, properties=Properties(message_group=press))
    handles = {name: [each.handle for each in parts.pop(10, LONG_MS, group=name)] for name in ("holds", "nacks", "suspends")}
    parts.ack(*handles["holds"][:2], group="holds")
    del handles["holds"][:2]
    for each in (handles["nacks"].pop(), handles["nacks"].pop()):
        parts.change(each, 40_000, nack=True, group="nacks")
    for each in (handles["suspends"].pop(), handles["suspends"].pop()):
        parts.change(each, 1_000, suspend=True, group="suspends")
    parts.pop(8, LONG_MS, group="extends")
    parts.pop(2, 1_000, group="extends")  # each comes back to be alone
    parts.pop(4, 1_000, group="times out")  # more than one, so it is uncounted
    (failed,) = parts.pop(1, LONG_MS, group="redrives")
    parts.core.deliveries.dead_letter("redrives", [failed.handle])
    parts.dead_letters.redrive("redrives")
    first, *_ = parts.pop(2, LONG_MS, group="in order")
    parts.change(first.handle, 0, nack=True, group="in order")
    parts.advance(1_000)
    parts.advance(1_000)  # after the back-off
    (alone,) = parts.pop(1, LONG_MS, group="extends")
    handles["extends"] = [parts.change(alone.handle, LONG_MS - 1, group="extends")[1]]
    handles["in order"] = [each.handle for each in parts.pop(1, LONG_MS, group="in order")]
    return handles


def test_the_start_of_a_trimmed_log_is_what_the_node_has_open(parts: Parts) -> None:
    make_busy(parts)
    start = trim(parts)
    expected, queued = open_in_node(parts), queued_in_node(parts)
    (redriven,) = [each for each in queued if each[0] == "redrives"]
    state, reason = open_state(parts.data_dir, start)
    assert state is not None, reason
    stages = {row["key"]: row for row in state.open}
    assert {key: (row["deadline_ms"], row["message_position"]) for key, row in stages.items()} == expected
    names = state.group_names
    back = [(names[row["group_id"]], row["message_position"]) for row in state.queued]
    assert sorted(back) == [each for each in queued if each != redriven], "a redriven dead letter did not come back"
    seal(parts)
    write_tables(parts)
    rows = pq.read_table(start_path(parts.data_dir / "tables", start)).to_pylist()
    by_stage: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_stage.setdefault(row["stage"], []).append(row)
    assert {name: len(each) for name, each in by_stage.items()} == {
        "popped": 8 + 8 + 8 + 8 + 2,
        "extended": 1,
        "waiting": 2,
        "queued": len(back),
    }
    assert {row["group_name"] for row in by_stage["waiting"]} == {"nacks"}
    assert [row["popped_ms"] for row in (*by_stage["extended"], *by_stage["waiting"])] == [None] * 3
    assert {row["attempt"] for row in by_stage["queued"]} == {1}
    assert verify_tables(parts.data_dir).problems == []
    assert [each.table for each in table_sizes(parts.data_dir)][-1] == "start"
    assert write_tables(parts) == []


@pytest.mark.parametrize("has_tables", [True, False])
def test_a_report_on_a_trimmed_log_knows_what_was_open_at_its_start(
    parts: Parts, found: Callable[..., Summary], has_tables: bool
) -> None:
    handles = make_busy(parts)
    start = trim(parts)
    if has_tables:
        seal(parts)
        assert write_tables(parts)[0].base == start
    for name in ("holds", "suspends"):
        parts.ack(*handles[name][1:], group=name)
    parts.ack(*handles["extends"], group="extends")
    parts.advance(40_000)
    again = parts.pop(1, LONG_MS, group="times out")
    parts.ack(again[0].handle, group="times out")
    summary = found()
    assert of_groups(summary) == {
        "holds": ({"acked": 7, "in_flight": 1}, {"acked": 7, "in_flight": 1}),
        "nacks": ({"in_flight": 8}, {"in_flight": 8, "waiting": 2}),
        "suspends": ({"acked": 7, "in_flight": 1}, {"acked": 7, "in_flight": 1, "waiting": 2}),
        "extends": ({"acked": 1, "in_flight": 8}, {"acked": 1, "in_flight": 8, "waiting": 1}),
        "times out": ({"acked": 1}, {"acked": 1, "waiting": 4}),
        "in order": ({"in_flight": 2}, {"in_flight": 2}),
    }
    assert (status_of_summary(summary), summary["totals"]["before"]) == (0, 0)
    if has_tables:
        later = found(as_of_ms=parts.clock.now_ms() + 2 * LONG_MS)["totals"]["outcomes"]
        assert (later["lost"], later["unknown"]) == (len(open_in_node(parts)), 0)


def of_another_format(path: Path) -> None:
    properties = orjson.dumps({"format": FORMAT + 1, "position": int(path.stem), "store_ms": 1})
    path.write_bytes(encode(Kind.SNAPSHOT, properties=properties, store_ms=1))


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)


def without_its_end(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b'{"rows"') - HEADER_BYTES])


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "there is no snapshot at position": Path.unlink,
    "is damaged at byte": damaged,
    "should have -1; it is incomplete": without_its_end,
    f"has format {FORMAT + 1}, but": of_another_format,
    "is empty, because a repair": lambda path: write_empty(path.parents[1], int(path.stem), 1),
}


@pytest.mark.parametrize("reason", UNREADABLE)
def test_without_a_snapshot_the_outcome_of_what_was_open_is_unknown(
    parts: Parts, found: Callable[..., Summary], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts.create()
    parts.publish(b"1", b"2")
    first, _ = parts.pop(2, LONG_MS)
    start = trim(parts)
    seal(parts)
    parts.ack(first.handle)
    make_durable(parts)
    UNREADABLE[reason](snapshot_path(parts.data_dir, start))
    stale = start_path(parts.data_dir / "tables", start)  # of a writer that was killed while there was a snapshot
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert main(["tables", "backfill", "--data-dir", str(parts.data_dir)]) == 0
    assert re.search(rf"What was open at position {start} is unknown: .*{reason}", capsys.readouterr().out)
    assert not stale.exists()
    if reason != "there is no snapshot at position":
        return
    summary = found()
    assert of_groups(summary) == {"billing": ({"unknown": 1}, {})}
    assert (status_of_summary(summary), summary["totals"]["before"]) == (6, 1)


def test_after_a_gap_the_tables_go_on_with_what_the_snapshot_says(parts: Parts, found: Callable[..., Summary]) -> None:
    names = ("ends in the gap", "stays", "ends later", "extends", "is popped in it", "comes back in it", "is queued before")
    for name in names:
        parts.create(name, backoff=())
    parts.publish(b"1")
    handles = {
        name: parts.pop(1, LONG_MS, group=name)[0].handle for name in names if "popped" not in name and "back" not in name
    }
    handles["extends"] = parts.change(handles["extends"], LONG_MS, group="extends")[1]
    parts.change(handles["is queued before"], 0, nack=True, group="is queued before")
    parts.settle()
    seal(parts)
    write_tables(parts)
    first_popped_ms = parts.clock.now_ms()
    parts.advance(1_000)
    parts.ack(handles["ends in the gap"], group="ends in the gap")
    handles["is popped in it"] = parts.pop(1, LONG_MS, group="is popped in it")[0].handle
    (back,) = parts.pop(1, LONG_MS, group="comes back in it")
    parts.change(back.handle, 0, nack=True, group="comes back in it")
    parts.settle()
    trim(parts)
    parts.advance(1_000)
    start = trim(parts)
    gap = load_state(parts.data_dir / "tables").position
    assert gap < start
    for name in ("ends later", "extends"):
        parts.ack(handles[name], group=name)
    seal(parts)
    write_tables(parts)
    assert [(row["position"], row["until_position"]) for row in rows_of(parts.data_dir, "damages")] == [(gap, start)]
    ends = {row["group_name"]: row for row in rows_of(parts.data_dir, "ends") if row["position"] > start}
    assert {name: (row["stage"], row["popped_ms"]) for name, row in ends.items()} == {
        "ends later": ("popped", first_popped_ms),
        "extends": ("extended", first_popped_ms),
    }
    assert verify_tables(parts.data_dir).problems == []
    parts.ack(handles["is popped in it"], group="is popped in it")
    summary = found()
    expected = {
        "ends in the gap": ({"unknown": 1}, {"unknown": 1}),
        "stays": ({"in_flight": 1}, {"in_flight": 1}),
        "ends later": ({"acked": 1}, {"acked": 1}),
        "extends": ({"acked": 1}, {"acked": 1}),
        "is popped in it": ({"acked": 1}, {"acked": 1}),
        "comes back in it": ({}, {"waiting": 1}),
        "is queued before": ({"nacked": 1}, {"waiting": 1}),
    }
    assert of_groups(summary) == expected
    assert status_of_summary(summary) == 6
    after_gap = found(since=start)
    assert after_gap["log"]["begin_position"] == start
    del expected["ends in the gap"]
    expected["is queued before"] = ({}, {"waiting": 1})
    assert of_groups(after_gap) == expected
    assert status_of_summary(after_gap) == 0
    outcomes = found(as_of_ms=parts.clock.now_ms() + 2 * LONG_MS)["totals"]["outcomes"]
    assert (outcomes["lost"], outcomes["unknown"]) == (1, 1)


def test_what_was_open_where_old_tables_were_dropped_stays_known(parts: Parts, found: Callable[..., Summary]) -> None:
    parts.create()
    parts.publish(b"1", b"2")
    _, late = parts.pop(2, LONG_MS)
    start = trim(parts)
    for _ in range(2):
        parts.advance(10_000)
        seal(parts)
    *_, dropped, _ = [each.stop for each in write_tables(parts)]
    tables = parts.data_dir / "tables"
    assert start_path(tables, start).exists()
    assert drop_before(parts.data_dir, parts.clock.now_ms()) >= 1
    assert [path.name for path in (tables / "start").iterdir()] == [start_path(tables, dropped).name]
    parts.ack(late.handle)
    assert verify_tables(parts.data_dir).problems == []
    summary = found()
    assert summary["log"]["start_position"] == dropped
    assert of_groups(summary) == {"billing": ({"acked": 1, "in_flight": 1}, {"acked": 1, "in_flight": 1})}
    assert status_of_summary(summary) == 0
    drop_before(parts.data_dir, FAR)
    assert len(list((tables / "start").iterdir())) == 1
