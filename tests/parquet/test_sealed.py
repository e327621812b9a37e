"""A node has its sealed segments written as tables, whatever happens to the process that writes them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="the tables need the extra `tables`")

import pyarrow.parquet as pq
from structlog.testing import capture_logs

from penstock.node import tablesoptions
from penstock.node.errors import ConfigError
from penstock.node.tablesoptions import TablesOptions, are_on
from penstock.node.tablewriting import RETRY_S, TableWriting
from penstock.spark.parquet import state, writerchild
from penstock.spark.parquet.catalog import table_files, verify_tables
from penstock.spark.parquet.expiry import drop_before
from penstock.spark.parquet.files import locked, reading
from penstock.spark.parquet.reach import NOTHING, STATE_FILE, written_until
from penstock.spark.parquet.writer import backfill
from penstock.store.options import DAY_MS, HOUR_MS, KIB, MINUTE_MS
from penstock.store.retention.retention import Blocker
from penstock.store.space.space import Level
from penstock.store.store import Store
from penstock.store.timekeeping import Timekeeping
from tests.backup.wiring import make_backup_beside, restore
from tests.clock import START_MS, ManualClock
from tests.gateway.wire import Broker
from tests.spark.log_writer import LogWriter
from tests.store.wiring import publish
from tests.waiting import until

SEGMENT_BYTES = 16 * KIB

HANGING = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
"""A child that writes nothing and does not end."""

STOPPED = """
import sys, time
from penstock.spark.parquet import writerchild
from penstock.spark.parquet.files import TableFiles

left = 8  # the first segment has five files and the state, the second has two files
rename = TableFiles.rename

def stop(self, old, new):
    global left
    left -= 1
    if left < 0:
        time.sleep(600)
    rename(self, old, new)

TableFiles.rename = stop
sys.exit(writerchild.main(sys.argv[1:]))
"""

Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start a node with small segments that writes tables. Its clock stands still until the test moves it."""
    brokers: list[Broker] = []

    async def start(command: list[str] | None = None, **options: Any) -> Broker:
        tables = TablesOptions(**{"enabled": "on"} | options.pop("tables", {}))
        options = {"clock": ManualClock(), "tables": tables, "segment_bytes": SEGMENT_BYTES} | options
        broker = Broker(tmp_path / "data", options)
        if command is not None:
            tables_of(broker).command = command
        brokers.append(await broker.start())
        return broker

    yield start
    for broker in brokers:
        await broker.stop()


def tables_of(broker: Broker) -> TableWriting:
    tables = broker.node.tables
    assert tables is not None
    return tables


def fill(broker: Broker, segments: int) -> None:
    """Publish until so many segments are sealed."""
    store = broker.node.store
    goal = len(store.log.segments()) + segments
    while len(store.log.segments()) < goal:
        publish(store, "plant/1", "x" * 2_000)
        store.commit()


async def written(broker: Broker) -> None:
    """Return when the tables have all sealed segments."""
    await until(lambda: tables_of(broker).position == broker.node.store.log.open_segment.base and tables_of(broker).pid is None)


def damages(data_dir: Path) -> list[tuple[int, int, str]]:
    return [
        (row["position"], row["until_position"], row["cause"])
        for file in table_files(data_dir)["damages"]
        for row in pq.ParquetFile(file.path).read().to_pylist()
    ]


def samples(broker: Broker) -> dict[str, float]:
    found = [sample for family in broker.node.registry.collect() for sample in family.samples]
    return {sample.name: sample.value for sample in found if sample.name.startswith("penstock_tables_")}


async def test_sealed_segments_become_tables_and_a_quiet_node_seals(start: Start) -> None:
    broker = await start(tables={"seal_ms": 15 * MINUTE_MS}, retention_ms=0)
    data_dir, log = broker.config.data_dir, broker.node.store.log
    fill(broker, 2)
    assert tables_of(broker).lag_segments == 2
    await written(broker)
    assert verify_tables(data_dir) == ([], 2, [])
    assert samples(broker)["penstock_tables_lag_bytes"] == 0
    base = log.open_segment.base
    broker.clock.advance(15 * MINUTE_MS + 1)
    publish(broker.node.store, "plant/2", "later")
    await until(lambda: log.open_segment.base > base)
    assert (data_dir / "commitlog" / f"{base:020d}.log").stat().st_size == log.open_segment.base - base  # as any other
    await written(broker)
    broker.clock.advance(60 * MINUTE_MS)  # nothing is left to seal
    await broker.restart()
    assert verify_tables(data_dir) == ([], 3, [])
    assert tables_of(broker).position == broker.node.store.log.open_segment.base == broker.node.store.log.end


async def test_a_backup_leaves_the_tables_out_and_they_are_made_again(start: Start, tmp_path: Path) -> None:
    broker = await start(HANGING)
    fill(broker, 2)
    await broker.node.store.durable()
    broker.node.store.log.mark(broker.node.store.durable_position)
    assert len(list(backfill(broker.config.data_dir))) == 2
    await make_backup_beside(broker.node, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "restored")
    assert not (tmp_path / "restored" / "tables").exists()
    assert len(list(backfill(tmp_path / "restored"))) == 2
    assert verify_tables(tmp_path / "restored").problems == []


async def test_a_child_that_is_killed_leaves_no_gap_and_no_double(start: Start) -> None:
    broker = await start([sys.executable, "-c", STOPPED])
    tables, data_dir = tables_of(broker), broker.config.data_dir
    fill(broker, 3)
    _, (second, _), *_ = broker.node.store.log.segments()
    await until(lambda: len(list((data_dir / "tables").rglob("0*.parquet"))) == 7)
    assert tables.position == second
    pid = tables.pid
    assert pid is not None
    tables.command = TableWriting(broker.node.store, data_dir, TablesOptions(), broker.clock).command
    with capture_logs() as lines:
        os.kill(pid, signal.SIGKILL)
        await until(lambda: tables.failures)
    (failed,) = (line for line in lines if line["event"] == "tables.failed")
    assert failed["error"] == "the process that writes the tables has ended with status -9"
    tables.check()
    assert tables.pid is None  # it is too soon
    broker.clock.advance(int(RETRY_S * 1000))
    await written(broker)
    assert verify_tables(data_dir) == ([], 3, [])
    assert list((data_dir / "tables").rglob("*.tmp")) == []
    assert samples(broker)["penstock_tables_failures_total"] == 1


async def test_retention_waits_for_the_tables_until_they_are_too_far_behind(start: Start) -> None:
    lag_bytes_max = 6 * SEGMENT_BYTES
    broker = await start(HANGING, tables={"lag_bytes_max": lag_bytes_max}, retention_bytes=SEGMENT_BYTES)
    tables, store = tables_of(broker), broker.node.store
    retention, log = store.retention, store.log
    for _ in range(5):
        fill(broker, 1)
        await until(lambda: log.open_segment.base in retention.snapshots)
    await until(lambda: retention.blocked_by is Blocker.TABLES)
    assert (log.start, tables.dropped_bytes) == (0, 0)
    assert tables.lag_bytes == log.open_segment.base
    while log.open_segment.base - lag_bytes_max < 2 * SEGMENT_BYTES:
        fill(broker, 1)
        await until(lambda: log.open_segment.base in retention.snapshots)
    await until(lambda: log.start > 0 and not retention.busy)
    assert tables.lag_bytes < lag_bytes_max + SEGMENT_BYTES  # as segments go whole
    await until(lambda: tables.dropped_bytes)
    assert samples(broker)["penstock_tables_dropped_bytes_total"] == log.start
    dropped = log.start
    list(backfill(broker.config.data_dir))
    assert damages(broker.config.data_dir) == [(0, dropped, "dropped")]


async def test_a_node_that_stops_ends_the_child_and_the_next_one_goes_on(start: Start) -> None:
    broker = await start(HANGING)
    fill(broker, 1)
    await until(lambda: tables_of(broker).pid)
    stopped = tables_of(broker)
    pid = stopped.pid
    assert pid is not None
    await broker.restart()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert (stopped.pid, stopped.failures) == (None, 0)
    await written(broker)
    assert verify_tables(broker.config.data_dir) == ([], 1, [])


def has_failed(tables: TableWriting, times: int) -> bool:
    return tables.failures == times


async def test_a_child_that_fails_is_started_again_after_longer_and_longer(start: Start) -> None:
    broker = await start([sys.executable, "-I", "-S", "-c", "import sys; print('no room'); sys.exit(1)"])
    tables = tables_of(broker)
    with capture_logs() as lines:
        fill(broker, 1)
        for failures, backoff_s in enumerate((RETRY_S, 2 * RETRY_S, 4 * RETRY_S), 1):
            await until(partial(has_failed, tables, failures))
            tables.check()
            assert tables.pid is None  # it is too soon
            broker.clock.advance(int(backoff_s * 1000))
            tables.check()
        await until(lambda: tables.failures == 4)
        tables.command = [str(broker.config.data_dir / "none")]
        broker.clock.advance(int(8 * RETRY_S * 1000))
        tables.check()
    failed = [line for line in lines if line["event"] == "tables.failed"]
    assert [line["retry_s"] for line in failed] == [RETRY_S * 2**number for number in range(5)]
    assert failed[0]["error"] == "the process that writes the tables has ended with status 1: no room"
    assert "No such file" in failed[4]["error"]


async def test_rows_that_are_too_old_are_looked_for_once_an_hour(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-I", "-S", "-c", "import sys; print(*sys.argv[2:]); sys.exit(1)"]
    broker = await start(command, tables={"retention_ms": DAY_MS})
    tables = tables_of(broker)
    tables.check()
    assert tables.pid is None  # there are no tables
    tables.position = 0
    with capture_logs() as lines:
        tables.check()
        await until(partial(has_failed, tables, 1))
    assert lines[0]["error"].endswith(f" 0 {START_MS - DAY_MS}")
    broker.clock.advance(HOUR_MS - 1)
    tables.check()
    assert tables.pid is None
    broker.clock.advance(1)
    with monkeypatch.context() as patch:
        patch.setattr(Timekeeping, "is_confirmed", False)
        tables.check()
        assert tables.pid is None
    tables.check()
    assert tables.pid is not None


async def test_what_a_replica_may_lose_is_not_written(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = await start(HANGING)
    tables, log = tables_of(broker), broker.node.store.log
    with monkeypatch.context() as patch:
        patch.setattr(Store, "committed_position", 0)
        fill(broker, 1)
        await until(lambda: log.marked >= log.open_segment.base)
        tables.check()
        assert tables.pid is None
    await until(lambda: tables.pid)


async def test_nothing_is_written_while_the_disk_is_nearly_full(start: Start) -> None:
    broker = await start(HANGING)
    tables, space = tables_of(broker), broker.node.store.space
    fill(broker, 1)
    await until(lambda: tables.pid)
    assert tables.needed_from() == NOTHING
    space.refuse(OSError("full"))
    assert space.level is Level.EXHAUSTED
    tables.check()
    await until(lambda: tables.pid is None)
    assert tables.needed_from() == broker.node.store.log.end
    tables.check()
    assert (tables.pid, tables.failures) == (None, 0)
    space.granted()


# --- whether tables are written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("enabled", "is_installed", "is_on"),
    [("auto", True, True), ("auto", False, False), ("on", True, True), ("off", True, False)],
)
def test_tables_are_on_where_pyarrow_is(monkeypatch: pytest.MonkeyPatch, enabled: Any, is_installed: bool, is_on: bool) -> None:
    monkeypatch.setattr(tablesoptions, "find_spec", lambda _: object() if is_installed else None)
    with capture_logs() as lines:
        assert are_on(TablesOptions(enabled=enabled)) is is_on
    assert [line["event"] for line in lines] == ([] if is_on else ["tables.off"])


def test_a_node_that_must_write_tables_needs_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tablesoptions, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"but pyarrow is not installed: run pip install '\.\[tables\]'"):
        are_on(TablesOptions(enabled="on"))


async def test_a_node_without_tables_starts_nothing_and_shows_no_figures(start: Start) -> None:
    broker = await start(tables={"enabled": "off"})
    assert broker.node.tables is None
    assert samples(broker) == {}
    assert broker.node.store.retention.needed_from() == broker.node.store.log.end


# --- the child --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """Run the program of the child in this process, and return its status and its lines."""
    monkeypatch.setattr(writerchild, "_give_way", lambda: None)

    def run(*arguments: object) -> tuple[int, list[str]]:
        status = writerchild.main([*map(str, arguments)])
        return status, capsys.readouterr().out.splitlines()

    return run


Child = Callable[..., tuple[int, list[str]]]


def log_of_days(data_dir: Path, days: int, per_day: int = 1) -> list[int]:
    """Write a log of sealed segments for each day, and return where they begin and the last one ends."""
    log = LogWriter(now_ms=DAY_MS)
    bases = [log.end]
    for _ in range(days):
        for _ in range(per_day):
            log.message("a/1")
            log.roll()
            bases.append(log.end)
        log.now_ms += DAY_MS
    log.message("a/2")
    log.save(data_dir)
    return bases


def test_the_child_writes_up_to_a_position_and_says_how_far_it_is(tmp_path: Path, child: Child) -> None:
    bases = log_of_days(tmp_path, 3)
    assert written_until(tmp_path) == NOTHING
    assert child(tmp_path, bases[2], 0) == (0, [str(bases[1]), str(bases[2]), str(bases[2])])
    assert child(tmp_path, bases[3], 0) == (0, [str(bases[3])] * 2)
    assert child(tmp_path, bases[3], 0) == (0, [str(bases[3])])
    assert written_until(tmp_path) == state.load_state(tmp_path / "tables").position == bases[3]
    assert STATE_FILE == state.FILE


def test_the_child_joins_the_files_of_a_day_that_is_over_unless_they_are_read(tmp_path: Path, child: Child) -> None:
    bases = log_of_days(tmp_path, 3, per_day=2)
    assert child(tmp_path, bases[3], 0)[0] == 0
    assert [file.base for file in table_files(tmp_path)["messages"]] == [0, bases[2]]
    with reading(tmp_path / "tables"):
        assert child(tmp_path, bases[5], 100 * DAY_MS) == (0, [str(bases[4]), str(bases[5]), str(bases[5])])
    assert [file.base for file in table_files(tmp_path)["messages"]] == [0, *bases[2:5]]
    assert child(tmp_path, bases[5], 0) == (0, [str(bases[5])])
    assert [file.base for file in table_files(tmp_path)["messages"]] == [0, bases[2], bases[4]]
    assert verify_tables(tmp_path).problems == []


def test_the_child_of_a_node_that_was_killed_makes_the_next_one_wait(tmp_path: Path, child: Child) -> None:
    log_of_days(tmp_path, 1)
    (tmp_path / "tables").mkdir()
    with locked(tmp_path / "tables"):
        status, (line,) = child(tmp_path, 10_000, 0)
    assert (status, line.partition(".")[0]) == (writerchild.EXIT_AGAIN, f"Another process is writing {tmp_path / 'tables'}")


def test_the_child_tells_its_error(tmp_path: Path, child: Child) -> None:
    log_of_days(tmp_path, 1)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "state.npz").write_bytes(b"x" * 600)
    status, (line,) = child(tmp_path, 10_000, 0)
    assert status == writerchild.EXIT_FAILED
    assert line.startswith(f"TablesInvalid: {tmp_path}/tables/state.npz is damaged")


def test_files_go_when_all_rows_of_their_segment_are_too_old(tmp_path: Path, child: Child) -> None:
    bases = log_of_days(tmp_path, 4)
    assert child(tmp_path, bases[4], 2 * DAY_MS)[0] == 0  # of the second day, at its beginning
    assert [file.base for file in table_files(tmp_path)["messages"]] == bases[1:4]
    assert {len(files) for files in table_files(tmp_path).values()} == {3}
    assert sorted(path.name for path in (tmp_path / "tables" / "messages").iterdir())[0] == "date=1970-01-03"
    assert verify_tables(tmp_path).problems == []
    assert drop_before(tmp_path, 2 * DAY_MS) == 0
    table_files(tmp_path)["ends"][0].path.unlink()  # as a kill leaves it
    assert len(verify_tables(tmp_path).problems) == 1
    assert drop_before(tmp_path, 2 * DAY_MS + 1) == 1
    assert verify_tables(tmp_path).problems == []
    assert drop_before(tmp_path, 100 * DAY_MS) == 2
    assert not any(table_files(tmp_path).values())
    assert verify_tables(tmp_path).problems == []
    assert list(backfill(tmp_path)) == []
