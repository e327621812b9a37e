"""The writer goes on where it stopped, whatever stopped it, and its chains are those of a simple model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow", reason="the tables need the extra `tables`")

import pyarrow.parquet as pq

from penstock.spark.errors import LogMissing, TablesInvalid
from penstock.spark.parquet.catalog import table_files, table_sizes, verify_tables
from penstock.spark.parquet.chains import FAR, STAGE_DTYPE, UNKNOWN, ClockMove, chained
from penstock.spark.parquet.files import locked
from penstock.spark.parquet.schema import TABLES
from penstock.spark.parquet.state import extended, is_within, load_state
from penstock.spark.parquet.writer import backfill
from penstock.spark.records import EXTENDED, POPPED
from penstock.store.errors import RecordCorrupt
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import COPY_FIXED, STEP_FIXED, Kind, encode
from tests.depth import DEPTH
from tests.parquet.killedfiles import Killed, KilledFiles
from tests.spark.log_writer import LogWriter

GROUP = "pumps"


def log_of_chains(start: int = 0) -> LogWriter:
    """A log of four segments, the last of which is not sealed, with a delivery that is changed in each."""
    log = LogWriter(start=start, now_ms=86_400_000)
    log.group(1, GROUP, "a/#")
    messages = [log.message(f"a/{number}") for number in range(4)]
    key = log.checkpoint(1, GROUP, messages, deadline_ms=86_500_000)
    log.ack(1, GROUP, [(key, 1)])
    for _ in range(2):
        log.now_ms += 50_000_000
        log.roll()
        log.message("a/5")
        key = log.change(1, GROUP, [((key, 0), messages[0])], deadline_ms=log.now_ms + 60_000_000)
    log.roll()
    log.message("a/6")
    return log


def contents(data_dir: Path) -> dict[str, Any]:
    """Return the rows of each file below the tables, by its path."""
    directory = data_dir / "tables"
    return {str(path.relative_to(directory)): pq.ParquetFile(path).read() for path in sorted(directory.rglob("*.parquet"))}


def column(data_dir: Path, table: str, name: str) -> list[Any]:
    return [value for each in table_files(data_dir)[table] for value in pq.ParquetFile(each.path).read()[name].to_pylist()]


KILL_EVERY = 11 if DEPTH == 1 else 1
"""From how many operations on the writer is killed at one, in a log of its own."""


@pytest.mark.parametrize("is_done", [False, True])
def test_a_writer_that_is_killed_at_any_operation_goes_on_without_a_gap_or_a_double(tmp_path: Path, is_done: bool) -> None:
    log_of_chains().save(tmp_path / "whole")
    assert len(list(backfill(tmp_path / "whole"))) == 3
    expected = contents(tmp_path / "whole")
    operations = int(is_done)
    while True:
        data_dir = tmp_path / f"killed at {operations}"
        log_of_chains().save(data_dir)
        files = KilledFiles(operations, is_done=is_done)
        try:
            list(backfill(data_dir, files))
        except Killed:
            left = contents(data_dir)  # what has its name is complete
            assert all(rows.equals(expected[name]) for name, rows in left.items())
        else:
            break
        list(backfill(data_dir))
        found = contents(data_dir)
        assert found.keys() == expected.keys()
        assert all(rows.equals(expected[name]) for name, rows in found.items())
        assert list((data_dir / "tables").rglob("*.tmp")) == []
        operations += KILL_EVERY
    assert operations > 60


def test_a_writer_that_is_killed_before_its_first_state_begins_again(tmp_path: Path) -> None:
    log_of_chains().save(tmp_path)
    (first, *_) = backfill(tmp_path)
    for path in (tmp_path / "tables").rglob("*"):
        if path.name == "state.npz" or (path.suffix == ".parquet" and int(path.stem) > first.base):
            path.unlink()
    assert len(list(backfill(tmp_path))) == 3


def test_segments_that_are_written_as_they_are_sealed_give_the_same_tables(tmp_path: Path) -> None:
    log = log_of_chains()
    log.save(tmp_path / "whole")
    list(backfill(tmp_path / "whole"))
    segments = log.segments
    for count in range(2, len(segments) + 1):
        directory = tmp_path / "grown"
        for path in (directory / "commitlog").glob("*"):
            path.unlink()
        if (directory / "commitlog").is_dir():
            (directory / "commitlog").rmdir()
        log.segments = segments[:count]
        log.save(directory)
        assert len(list(backfill(directory))) == 1
    assert contents(directory).keys() == contents(tmp_path / "whole").keys()
    assert all(rows.equals(contents(tmp_path / "whole")[name]) for name, rows in contents(directory).items())


def test_the_stages_of_a_delivery_have_one_id_across_segments(tmp_path: Path) -> None:
    log_of_chains().save(tmp_path)
    list(backfill(tmp_path))
    first, *_ = column(tmp_path, "deliveries", "key")
    ids, begun = column(tmp_path, "deliveries", "delivery_id"), column(tmp_path, "deliveries", "stage")
    stages = [each for each in zip(ids, begun, strict=True) if each[0] == first]
    assert stages == [(first, "popped"), (first, "extended"), (first, "extended")]
    assert column(tmp_path, "ends", "delivery_id") == [first + 1, first, first]
    assert len(load_state(tmp_path / "tables").open) == 3
    dates = sorted(path.name for path in (tmp_path / "tables" / "ends").iterdir())
    assert dates == ["date=1970-01-02", "date=1970-01-03"]


def test_a_log_whose_beginning_is_gone_says_so(tmp_path: Path) -> None:
    """Retention has dropped 5,000 bytes, and copied one message of them."""
    log = LogWriter(start=5_000, now_ms=1_000)
    old = encode(Kind.MESSAGE, b"a/1", b"kept", store_ms=7, properties=encode_properties(Properties(tag="t")))
    copy = log.add(Kind.COPIED, body=old, fixed=COPY_FIXED.pack(4_000))
    log.add(Kind.COPIED, body=old, fixed=COPY_FIXED.pack(4_000))
    log.group(1, GROUP, "a/#")
    log.ack(1, GROUP, [(3_000, 1)])
    log.settle(Kind.POP_REVIVED, 1, GROUP, [(3_000, 2)])
    message = log.message("a/2")
    log.roll()
    log.add(Kind.COPIED, body=old, fixed=COPY_FIXED.pack(4_000))
    log.add(Kind.COPIED, body=encode(Kind.MESSAGE, b"a/2", b"21.5", store_ms=1_000), fixed=COPY_FIXED.pack(message))
    log.add(Kind.COPIED, body=encode(Kind.SCHEDULE_PUT, b"nightly", store_ms=7), fixed=COPY_FIXED.pack(4_500))
    log.add(Kind.DAMAGED, body=bytes(76))
    log.roll()
    log.save(tmp_path)
    list(backfill(tmp_path))
    assert column(tmp_path, "messages", "position") == [message, 4_000]
    assert column(tmp_path, "messages", "copied_at") == [None, copy]
    assert (column(tmp_path, "messages", "at_ms"), column(tmp_path, "messages", "tag")) == ([1_000, 7], [None, "t"])
    assert column(tmp_path, "messages", "body") == [b"21.5", b"kept"]
    assert column(tmp_path, "ends", "delivery_id") == [3_001, 3_002]
    assert column(tmp_path, "ends", "cause") == ["acked", "unrecorded"]
    for name in ("stage", "popped_ms", "deadline_ms", "message_position", "attempt"):
        assert column(tmp_path, "ends", name) == [None, None]
    damaged = log.end - 100
    assert column(tmp_path, "damages", "cause") == ["dropped", "damaged"]
    assert column(tmp_path, "damages", "position") == [0, damaged]
    assert column(tmp_path, "damages", "until_position") == [5_000, log.end]
    assert verify_tables(tmp_path).problems == []


def test_retention_that_was_faster_than_the_writer_leaves_a_gap_that_is_told(tmp_path: Path) -> None:
    log = log_of_chains()
    first, second, *rest = (bytes(each) for each in log.segments)
    log.segments = [bytearray(first), bytearray(second)]
    log.save(tmp_path)
    list(backfill(tmp_path))
    for path in (tmp_path / "commitlog").iterdir():
        path.unlink()
    (tmp_path / "commitlog").rmdir()
    log.segments, log.start = [bytearray(each) for each in rest], len(first) + len(second)
    log.save(tmp_path)
    list(backfill(tmp_path))
    assert column(tmp_path, "damages", "position") == [len(first)]
    assert column(tmp_path, "damages", "until_position") == [log.start]
    assert verify_tables(tmp_path).problems == []


def test_retention_may_leave_only_the_segment_that_is_not_sealed(tmp_path: Path) -> None:
    log_of_chains().save(tmp_path)
    list(backfill(tmp_path))
    *sealed, _ = sorted((tmp_path / "commitlog").iterdir())
    for path in sealed:
        path.unlink()
    assert list(backfill(tmp_path)) == []
    assert verify_tables(tmp_path) == ([], 0, [])


def test_properties_that_the_node_does_not_write_cost_one_message_its_columns(tmp_path: Path) -> None:
    log = LogWriter()
    known = encode_properties(Properties(tag="red", user=[("a", "b\n")]))
    for properties in (known, b"{broken", b"[1]", b"", b'{"tag": 5}', b'{"later": {"x": 1}, "tag": "blue"}', known):
        log.add(Kind.MESSAGE, "a", properties=properties)
    log.roll()
    log.save(tmp_path)
    list(backfill(tmp_path))
    assert column(tmp_path, "messages", "tag") == ["red", None, None, None, None, "blue", "red"]
    assert column(tmp_path, "messages", "user_values") == [["b\n"], *[None] * 5, ["b\n"]]


def test_a_step_of_the_clock_moves_the_deadlines_that_were_set_before_it(tmp_path: Path) -> None:
    log = LogWriter(now_ms=10_000)
    log.group(1, GROUP, "a/#")
    messages = [log.message("a") for _ in range(4)]
    before = log.checkpoint(1, GROUP, messages[:3], deadline_ms=40_000)
    log.ack(1, GROUP, [(before, 0)])
    log.roll()
    log.now_ms = 20_000
    log.add(Kind.CLOCK_STEPPED, fixed=STEP_FIXED.pack(9_000, 0, 3_600_000))
    log.now_ms = 3_620_000
    after = log.checkpoint(1, GROUP, messages[3:], deadline_ms=3_650_000)
    log.ack(1, GROUP, [(before, 1), (after, 0)])
    log.roll()
    log.now_ms = 3_640_000
    log.settle(Kind.POP_REVIVED, 1, GROUP, [(before, 2)])
    log.roll()
    log.save(tmp_path)
    list(backfill(tmp_path))
    assert column(tmp_path, "ends", "deadline_ms") == [40_000, 3_640_000, 3_650_000, 3_640_000]
    assert column(tmp_path, "ends", "cause")[-1] == "timed_out"


@pytest.mark.parametrize("is_sealed_between", [False, True])
def test_an_end_after_another_one_is_repeated_where_the_segment_says_so(tmp_path: Path, is_sealed_between: bool) -> None:
    log = LogWriter()
    log.group(1, GROUP, "a/#")
    key = log.checkpoint(1, GROUP, [log.message("a") for _ in range(3)], deadline_ms=40_000)
    log.ack(1, GROUP, [(key, 1), (key, 0), (key, 1)])
    if is_sealed_between:
        log.roll()
    log.settle(Kind.POP_REVIVED, 1, GROUP, [(key, 0), (key, 2)])
    log.ack(1, GROUP, [(key, 2), (9_000, 0)])
    log.ack(1, GROUP, [(9_000, 0)])
    log.roll()
    log.save(tmp_path)
    list(backfill(tmp_path))
    repeated = [False, False, True, not is_sealed_between, False, True, False, False]
    assert column(tmp_path, "ends", "repeated") == repeated
    unknown = [(is_sealed_between and index == 3) or index > 5 for index in range(8)]
    assert [stage is None for stage in column(tmp_path, "ends", "stage")] == unknown


# --- what is refused ----------------------------------------------------------------------------------------------------


def test_damage_stops_the_writer_at_its_segment(tmp_path: Path) -> None:
    log = log_of_chains()
    log.segments[1][40] ^= 1
    log.save(tmp_path)
    with pytest.raises(RecordCorrupt, match="checksum"):
        list(backfill(tmp_path))
    assert [each.files for each in table_sizes(tmp_path)] == [1] * len(TABLES)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("state.npz", None, "its file state.npz is missing"),
        ("state.npz", b"x" * 600, "is damaged"),
        ("state.npz", b"", "is damaged"),
    ],
)
def test_tables_without_their_state_are_not_continued(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    log_of_chains().save(tmp_path)
    list(backfill(tmp_path))
    path = tmp_path / "tables" / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(TablesInvalid, match=reason):
        list(backfill(tmp_path))


def test_tables_of_another_log_are_not_continued(tmp_path: Path) -> None:
    log_of_chains().save(tmp_path)
    list(backfill(tmp_path))
    for path in (tmp_path / "commitlog").iterdir():
        path.unlink()
    (tmp_path / "commitlog").rmdir()
    other = LogWriter()
    other.message("a/1")
    other.roll()
    other.save(tmp_path)
    with pytest.raises(TablesInvalid, match="where no segment of this log begins"):
        list(backfill(tmp_path))


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    log_of_chains().save(tmp_path)
    (tmp_path / "tables").mkdir()
    with locked(tmp_path / "tables"), pytest.raises(TablesInvalid, match="Another process"):
        list(backfill(tmp_path))


def test_a_directory_without_a_log_gets_no_tables(tmp_path: Path) -> None:
    with pytest.raises(LogMissing):
        list(backfill(tmp_path))
    assert list(tmp_path.iterdir()) == []


# --- verify -------------------------------------------------------------------------------------------------------------


def test_a_missing_file_and_other_rows_are_found(tmp_path: Path) -> None:
    log_of_chains().save(tmp_path)
    list(backfill(tmp_path))
    files = table_files(tmp_path)
    missing, other = files["ends"][1], files["messages"][0]
    missing.path.unlink()
    rows = pq.ParquetFile(other.path).read()
    pq.write_table(rows.slice(1), other.path)
    problems = verify_tables(tmp_path).problems
    assert problems[0] == f"ends has no file for the positions from {missing.base} to {missing.stop}."
    assert "has 3 rows of messages" in problems[1]
    assert "the log has 4: 1 are missing, and 0 are not in the log." in problems[1]
    assert len(problems) == 2


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    log_of_chains().save(tmp_path)
    list(backfill(tmp_path))
    path = table_files(tmp_path)["ends"][0].path
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TablesInvalid, match=path.name):
        table_sizes(tmp_path)


# --- chains and ranges --------------------------------------------------------------------------------------------------


def no_rows(names: str) -> dict[str, Any]:
    return {name: np.empty(0, np.int64) for name in names.split()}


BEGUN = "key position group_id pop_ms deadline_ms return_ms message_position attempt source via parent"


@settings(max_examples=10 * DEPTH)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40), st.integers(0, 40))
def test_chains_are_those_of_a_model_that_follows_each_record(actions: list[tuple[int, int]], cut: int) -> None:
    """Each action pops (0, 1), changes (2) or ends (3) one delivery, or does so with one that is unknown."""
    ids: dict[int, int] = {}
    open_keys: list[int] = []
    expected_ends = []
    rows: list[tuple[str, int, int]] = []  # of two segments that are cut at an action
    for number, (action, which) in enumerate(actions):
        key = 1_000 + 100 * number
        if action < 2:
            ids[key] = key
            open_keys.append(key)
            rows.append(("pop", key, UNKNOWN))
            continue
        old = open_keys.pop(which % len(open_keys)) if open_keys and which else which + 1
        expected_ends.append((old, ids.get(old, old)))
        if action == 2:
            ids[key] = ids.get(old, old)
            open_keys.append(key)
            rows.append(("change", key, old))
        else:
            rows.append(("end", key, old))
    open_stages, ends = np.empty(0, STAGE_DTYPE), []
    begun_ids: dict[int, int] = {}
    for part in (rows[:cut], rows[cut:]):
        begins = [row for row in part if row[0] != "end"]
        keys = np.array([key for _, key, _ in begins], np.int64)
        begun = no_rows(BEGUN) | {
            "key": keys,
            "parent": np.array([old for _, _, old in begins], np.int64),
            "via": np.array([POPPED if name == "pop" else 1 for name, _, _ in begins], np.int64),
            **dict.fromkeys(set(BEGUN.split()) - {"key", "parent", "via"}, keys),
        }
        over = [row for row in part if row[0] != "pop"]
        ended = {
            "key": np.array([old for _, _, old in over], np.int64),
            "position": np.array([key for _, key, _ in over], np.int64),
            "event": np.full(len(over), EXTENDED),
        }
        found = chained(open_stages, begun, ended, [])
        begun_ids.update(zip(found.begun["key"].tolist(), found.begun["delivery_id"].tolist(), strict=True))
        ends += list(zip(found.ended["key"].tolist(), found.ended["delivery_id"].tolist(), strict=True))
        open_stages = found.open
    assert begun_ids == ids
    assert ends == expected_ends
    assert open_stages["key"].tolist() == sorted(open_keys)


def test_a_step_moves_nothing_that_ended_before_it() -> None:
    begun = dict.fromkeys(BEGUN.split(), np.array([10, 20]))
    begun |= {"deadline_ms": np.array([500, 500]), "via": np.zeros(2, np.int64), "parent": np.full(2, UNKNOWN)}
    ended = {"key": np.array([10]), "position": np.array([30])}
    found = chained(np.empty(0, STAGE_DTYPE), begun, ended, [ClockMove(40, 0, 100, 7)])
    assert (found.ended["deadline_ms"].tolist(), found.open["deadline_ms"].tolist()) == ([500], [507])
    assert found.open["position"].max() < FAR


@given(st.lists(st.integers(1, 5), max_size=8), st.lists(st.integers(-3, 50), max_size=8))
def test_a_position_is_within_the_ranges_that_hold_it(lengths: list[int], positions: list[int]) -> None:
    """Lengths of parts of the log, every second of which is in the ranges."""
    ranges, edge, inside = np.empty((0, 2), np.int64), 0, set[int]()
    for number, length in enumerate(lengths):
        if number % 2 == 0:
            ranges = extended(ranges, edge, edge + length)
            inside.update(range(edge, edge + length))
        edge += length
    assert is_within(ranges, np.array(positions, np.int64)).tolist() == [position in inside for position in positions]
