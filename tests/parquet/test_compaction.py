"""The small files of a day that is over become one of each table, with the same rows for all who read them."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="the tables need the extra `tables`")

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.cli.main import main
from penstock.spark.errors import TablesInUse, TablesInvalid
from penstock.spark.parquet import compaction
from penstock.spark.parquet.catalog import table_files, table_sizes, verify_tables
from penstock.spark.parquet.chains import FAR
from penstock.spark.parquet.compaction import compact
from penstock.spark.parquet.expiry import drop_before
from penstock.spark.parquet.files import reading, replacement_path, segment_files, start_path
from penstock.spark.parquet.schema import OPEN, TABLES
from penstock.spark.parquet.story import Story, read_story
from penstock.spark.parquet.writer import backfill
from penstock.spark.reconciliation.engines import DuckEngine
from penstock.spark.reconciliation.reconcile import ReconcileOptions, reconcile
from penstock.spark.reconciliation.summary import Summary
from penstock.store.options import DAY_MS
from penstock.store.record import Kind, encode
from tests.depth import DEPTH
from tests.parquet.killedfiles import Killed, KilledFiles
from tests.spark.log_writer import LogWriter
from tests.spark.logs import random_log

GROUP = "pumps"


def log_of_days(days: int, segments: int = 3) -> LogWriter:
    """A log of sealed segments of each day. One of two messages that a segment pops is acknowledged in the next one."""
    log = LogWriter(now_ms=DAY_MS)
    key = log.group(1, GROUP, "a/#")
    for number in range(days * segments):
        log.now_ms = (1 + number // segments) * DAY_MS + number
        log.ack(1, GROUP, [(key, 0)] if number else [])
        key = log.checkpoint(1, GROUP, [log.message("a/1"), log.message("a/2")], deadline_ms=100 * DAY_MS)
        log.roll()
    return log


def end_day(log: LogWriter) -> None:
    """Seal a segment of a later day."""
    log.now_ms = (log.now_ms // DAY_MS + 2) * DAY_MS
    for _ in range(2):
        log.roll()
        log.message("a/9")


def save(log: LogWriter, data_dir: Path) -> None:
    """Write a log, in the place of an earlier one."""
    shutil.rmtree(data_dir / "commitlog", ignore_errors=True)
    log.save(data_dir)


def rows_of(data_dir: Path) -> dict[str, Any]:
    """Return the rows of each table as readers of Penstock find them: of `open`, the last state."""
    parts = segment_files(data_dir / "tables", FAR)
    return {
        table.name: pa.concat_tables(
            pq.ParquetFile(each.path(table.name)).read().replace_schema_metadata()
            for each in (parts if table is not OPEN else parts[-1:])
        )
        for table in TABLES
    }


def is_same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(rows.equals(expected[name]) for name, rows in found.items())


def ranges(data_dir: Path) -> list[tuple[int, int]]:
    """Return the ranges of the files, which are the same in each table."""
    (found,) = {tuple((each.base, each.stop) for each in files) for files in table_files(data_dir).values()}
    return list(found)


def reconciled(data_dir: Path, since: int | None = None) -> Summary:
    engine = DuckEngine(data_dir / "spilled", threads=1)
    try:
        return reconcile(engine, data_dir, data_dir / "out", ReconcileOptions(since=since))
    finally:
        engine.close()


def outcomes(data_dir: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(data_dir / "out" / "outcomes").to_pylist()
    return sorted(rows, key=lambda row: (row["key"], row["outcome"]))


def stories(data_dir: Path, positions: list[int]) -> list[Story]:
    return [read_story(data_dir, each, data_dir / f"scratch-{each}") for each in positions]


def test_all_who_read_the_tables_find_the_same_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = random_log(seed=3, deliveries=4_500)
    end_day(log)
    save(log, tmp_path)
    segments = list(backfill(tmp_path))
    day, last = segments[:-1], segments[-1]
    assert len(day) > 2
    before = rows_of(tmp_path)
    positions = before["messages"]["position"].to_pylist()[:: len(before["messages"]) // 6]
    report, told = reconciled(tmp_path), stories(tmp_path, positions)
    found = outcomes(tmp_path)
    state = pq.read_table(segment_files(tmp_path / "tables", last.base)[-1].path(OPEN.name)).replace_schema_metadata()
    monkeypatch.setattr(compaction, "GROUP_ROWS_MAX", 500)

    assert list(compact(tmp_path)) == [(day[0].base, day[-1].stop, len(day))]

    assert ranges(tmp_path) == [(day[0].base, day[-1].stop), (last.base, last.stop)]
    assert is_same(rows_of(tmp_path), before)
    merged = segment_files(tmp_path / "tables", last.base)[0]
    assert pq.read_table(merged.path(OPEN.name)).replace_schema_metadata().equals(state)
    assert pq.read_metadata(merged.path("messages")).num_row_groups > 2
    assert verify_tables(tmp_path) == ([], len(segments), [])
    assert stories(tmp_path, positions) == told
    assert reconciled(tmp_path) == report
    assert outcomes(tmp_path) == found
    within = reconciled(tmp_path, since=day[-1].base)
    assert (within["log"]["begin_position"], within["totals"], outcomes(tmp_path)) == (0, report["totals"], found)
    assert list(compact(tmp_path)) == []


def test_days_are_joined_when_a_later_one_has_a_segment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = log_of_days(2)
    save(log, tmp_path)
    assert list(compact(tmp_path)) == []  # there are no tables
    stops = [segment.stop for segment in backfill(tmp_path)]
    assert list(compact(tmp_path)) == [(0, stops[2], 3)]
    assert list(compact(tmp_path)) == []
    end_day(log)
    save(log, tmp_path)
    assert len(list(backfill(tmp_path))) == 1
    assert main(["tables", "compact", "--json", "--data-dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"base": stops[2], "stop": stops[5], "segments": 3}
    assert verify_tables(tmp_path).problems == []
    del log.segments[:2]
    log.start = stops[1]
    save(log, tmp_path)  # retention has dropped what the first file has, but for its last segment
    assert verify_tables(tmp_path).problems == []


def test_files_and_row_groups_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of_days(1, segments=12)
    end_day(log)
    big = bytes(range(256)) * 40
    for number in (5, 6):
        for _ in range(3):
            log.segments[number] += encode(Kind.MESSAGE, b"a/1", big, store_ms=DAY_MS + number)
    save(log, tmp_path)
    stops = [segment.stop for segment in backfill(tmp_path)]
    sizes = [
        sum(each.path(table.name).stat().st_size for table in TABLES if table is not OPEN)
        for each in segment_files(tmp_path / "tables", FAR)
    ]
    assert len(sizes) == 13
    segment_files(tmp_path / "tables", FAR)[10].path("ends").unlink()
    monkeypatch.setattr(compaction, "SMALL_BYTES_MAX", max(sizes[:5]))
    monkeypatch.setattr(compaction, "FILE_BYTES_MAX", sum(sizes[:3]))
    assert [each.segments for each in compact(tmp_path)] == [3, 2, 3]
    assert verify_tables(tmp_path).problems == [f"ends has no file for the positions from {stops[9]} to {stops[10]}."]


def test_segments_on_both_sides_of_a_gap_share_no_file(tmp_path: Path) -> None:
    log = log_of_days(1, segments=6)
    end_day(log)
    segments = log.segments
    log.segments = segments[:3]  # the last one is not sealed yet
    save(log, tmp_path)
    (_, second) = backfill(tmp_path)
    log.start, log.segments = sum(map(len, segments[:3])), segments[3:]
    save(log, tmp_path)
    fourth, *_, last = backfill(tmp_path)
    assert list(compact(tmp_path)) == [(0, second.stop, 2), (fourth.base, last.base, 3)]
    assert verify_tables(tmp_path).problems == []


# --- kills and other processes ------------------------------------------------------------------------------------------

KILL_EVERY = 11 if DEPTH == 1 else 1
"""From how many operations on the process is killed at one."""


@pytest.mark.parametrize("is_done", [False, True])
def test_a_kill_at_any_operation_leaves_each_row_once_and_the_next_run_completes_it(tmp_path: Path, is_done: bool) -> None:
    log = log_of_days(2, segments=2)
    save(log, tmp_path / "before")
    stops = [segment.stop for segment in backfill(tmp_path / "before")]
    expected = rows_of(tmp_path / "before")
    operations = int(is_done)
    while True:
        data_dir = tmp_path / f"killed at {operations}"
        shutil.copytree(tmp_path / "before", data_dir)
        try:
            list(compact(data_dir, KilledFiles(operations, is_done=is_done)))
        except Killed:
            assert is_same(rows_of(data_dir), expected)
            assert verify_tables(data_dir) == ([], 4, [])
        else:
            break
        if operations % 2:
            assert drop_before(data_dir, 1) == 0  # completes it, too
        list(compact(data_dir))
        assert is_same(rows_of(data_dir), expected)
        assert ranges(data_dir) == [(0, stops[1]), (stops[1], stops[2]), (stops[2], stops[3])]
        left = [path for path in (data_dir / "tables" / "compaction").rglob("*") if path.is_file()]
        assert [path.name for path in left] == ["position"]
        operations += KILL_EVERY
    assert operations >= 65


def test_nothing_is_replaced_or_deleted_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(log_of_days(2), tmp_path)
    stops = [segment.stop for segment in backfill(tmp_path)]
    before, directory = ranges(tmp_path), tmp_path / "tables"
    with reading(directory):
        for clean in (lambda: drop_before(tmp_path, FAR), lambda: list(compact(tmp_path))):
            with pytest.raises(TablesInUse, match="Another process is reading"):
                clean()
    write = compaction._write
    with ExitStack() as stack:

        def write_and_read(*arguments: Any) -> None:
            write(*arguments)
            stack.enter_context(reading(directory))

        monkeypatch.setattr(compaction, "_write", write_and_read)
        with pytest.raises(TablesInUse):
            list(compact(tmp_path))
    assert ranges(tmp_path) == before
    assert [path for path in (directory / "compaction").rglob("*") if path.is_file()] == []
    monkeypatch.undo()
    assert main(["tables", "compact", "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"0 to {stops[2]}: the files of 3 segments became one of each table.\n"


def test_a_merged_file_is_deleted_when_all_of_its_rows_are_too_old(tmp_path: Path) -> None:
    save(log_of_days(2), tmp_path)
    stops = [segment.stop for segment in backfill(tmp_path)]
    list(compact(tmp_path))
    state = pq.read_table(segment_files(tmp_path / "tables", 1)[0].path(OPEN.name))
    assert drop_before(tmp_path, DAY_MS + 2) == 0
    assert drop_before(tmp_path, DAY_MS + 3) == 1
    assert pq.read_table(start_path(tmp_path / "tables", stops[2])).equals(state)
    assert ranges(tmp_path)[0] == (stops[2], stops[3])
    assert verify_tables(tmp_path).problems == []
    assert reconciled(tmp_path)["log"]["begin_position"] == stops[2]


# --- what is damaged ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["messages", "open"])
def test_a_damaged_file_is_named_and_stays(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(log_of_days(2), tmp_path)
    list(backfill(tmp_path))
    path = segment_files(tmp_path / "tables", FAR)[1].path(name)
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["tables", "compact", "--data-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"penstock tables: {path} is damaged (")
    assert len(segment_files(tmp_path / "tables", FAR)) == 6


def test_a_damaged_note_of_the_compaction_is_refused(tmp_path: Path) -> None:
    save(log_of_days(2), tmp_path)
    list(backfill(tmp_path))
    list(compact(tmp_path))
    position = tmp_path / "tables" / "compaction" / "position"
    position.write_bytes(b"")
    with pytest.raises(TablesInvalid, match=r"position holds no position .* Delete it"):
        list(compact(tmp_path))
    position.unlink()
    replacement_path(tmp_path / "tables").write_bytes(b"{}")
    with pytest.raises(TablesInvalid, match=r"replacement\.json is damaged .* run `penstock tables backfill`"):
        table_sizes(tmp_path)
