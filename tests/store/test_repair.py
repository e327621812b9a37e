"""Repair of a damaged log: which bytes it sets aside, which messages remain, and that a node starts afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.store.errors import DiskFull, LogCorrupt, PositionUnknown
from penstock.store.files import SystemFiles, Usage
from penstock.store.index.index import DAMAGED, DISCARDED
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.segment import LOG_DIRECTORY
from penstock.store.options import KIB, StoreOptions
from penstock.store.record import COPY_FIXED, HEADER_BYTES, Kind, Record, encode
from penstock.store.recovery.repair import QUARANTINE, ROOM_BYTES, _filler_sizes, repair, survey
from tests.pop.wiring import Parts
from tests.store.repair_child import KILLED

ROOT = Path(__file__).parents[2]
NEW_GROUP = "auditors"
FILTERS = ("plant/#", "plant/+/temperature")
OPTIONS = StoreOptions(segment_bytes=64 * KIB)


def _write_log(data_dir: Path) -> None:
    """Write messages, two groups, checkpoints, acks, changed deadlines and revivals."""
    parts = Parts(data_dir, store=OPTIONS)
    parts.publish(b"0", b"1")
    for topic_filter in FILTERS:
        first, second = parts.pop(2, 1000, topic_filter=topic_filter)
        parts.ack(first.handle)
        parts.change(second.handle, 2000)
    parts.publish(b"2", b"3")
    parts.advance(5000)
    for topic_filter in FILTERS:
        for delivery in parts.pop(2, 10_000, topic_filter=topic_filter):
            parts.ack(delivery.handle)
    parts.publish(b"4")
    parts.close()


def _records(data_dir: Path) -> list[Record]:
    log = CommitLog(data_dir, segment_bytes=OPTIONS.segment_bytes)
    log.recover()
    records = list(log.scan(0))
    log.close()
    return records


def _flip(data_dir: Path, position: int) -> None:
    path = max(path for path in (data_dir / LOG_DIRECTORY).iterdir() if int(path.stem) <= position)
    with path.open("r+b") as file:
        file.seek(position - int(path.stem))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x41]))


def _drain(parts: Parts, group: str, topic_filter: str = FILTERS[0]) -> list[int]:
    found: list[int] = []
    while delivered := parts.pop(group=group, topic_filter=topic_filter):
        found += [delivery.position for delivery in delivered]
        parts.ack(*(delivery.handle for delivery in delivered), group=group)
    return found


@pytest.mark.parametrize(("first", "at"), [(0, 1), (1, 8), (2, 21), (3, 26)], ids=["size", "kind", "time", "behind the header"])
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.nightly)])
def test_intact_messages_can_be_popped_whichever_record_is_damaged(tmp_path: Path, first: int, at: int, every: int) -> None:
    _write_log(tmp_path / "whole")
    records = _records(tmp_path / "whole")
    for number, damaged in list(enumerate(records))[first % every :: every]:
        data_dir = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", data_dir)
        shutil.rmtree(data_dir / "index")
        _flip(data_dir, damaged.position + at)
        with pytest.raises(LogCorrupt, match=rf"position {damaged.position} "):
            _records(data_dir)
        findings = survey(data_dir)
        assert [(found.position, found.length) for found in findings.damages] == [(damaged.position, damaged.size)]
        assert findings.damages[0].records_behind == len(records) - number - 1
        repair(data_dir, findings.damages)
        copy = data_dir / QUARANTINE / f"{damaged.position}-{damaged.size}.bin"
        assert copy.stat().st_size == damaged.size
        assert [record.position for record in _records(data_dir)] == [record.position for record in records]
        assert survey(data_dir).damages == []
        intact = [r for r in records if r.kind == Kind.MESSAGE and r.position != damaged.position]
        parts = Parts(data_dir, store=OPTIONS)
        assert _drain(parts, NEW_GROUP) == [record.position for record in intact], Kind(damaged.kind)
        parts.advance(600_000)
        # An existing group may get messages twice, but it misses none that it has not acknowledged.
        unacknowledged = {record.position for record in intact if record.body == b"4"}
        for topic_filter in FILTERS:
            assert unacknowledged <= set(_drain(parts, "billing", topic_filter)), (topic_filter, Kind(damaged.kind))
        parts.close()
        again = Parts(data_dir, store=OPTIONS)
        assert _drain(again, NEW_GROUP) == []
        again.close()
        shutil.rmtree(data_dir)


def test_a_missing_segment_is_filled_and_positions_stay_the_same(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, segment_bytes=KIB)
    positions = []
    for number in range(40):
        data = encode(Kind.MESSAGE, b"a/b", b"%0100d" % number, store_ms=1000 + number)
        positions.append(log.add(data, b"", len(data)))
        log.write()
    log.close()
    paths = sorted((tmp_path / LOG_DIRECTORY).iterdir())
    start, stop = int(paths[1].stem), int(paths[2].stem)
    paths[1].unlink()
    (damage,) = survey(tmp_path).damages
    assert (damage.position, damage.length, damage.missing) == (start, stop - start, stop - start)
    repair(tmp_path, [damage])
    after = _records(tmp_path)
    left = [position for position in positions if not start <= position < stop]
    assert [record.position for record in after if record.kind == Kind.MESSAGE] == left
    assert [record.store_ms for record in after] == sorted(record.store_ms for record in after)
    assert not list((tmp_path / QUARANTINE).glob("*"))


def test_a_record_inside_a_damaged_body_does_not_count_as_a_record(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, segment_bytes=KIB)
    inner = encode(Kind.POP_ACK, b"g", bytes(12), store_ms=1, fixed=bytes(16))
    for body in (inner * 2, b"behind"):
        data = encode(Kind.MESSAGE, b"a/b", body, store_ms=1)
        log.add(data, b"", len(data))
    log.close()
    _flip(tmp_path, HEADER_BYTES)
    (damage,) = survey(tmp_path).damages
    assert damage.length == HEADER_BYTES + 3 + 2 * len(inner)


def test_a_record_inside_a_copy_of_another_size_does_not_count_as_a_record(tmp_path: Path) -> None:
    """The checksum does not cover the size, so it tells where the copy ends. Its content would else be a second message."""
    log = CommitLog(tmp_path, segment_bytes=KIB)
    inner = encode(Kind.MESSAGE, b"a/b", b"copied", store_ms=1)
    copy = encode(Kind.COPIED, b"", inner, store_ms=2, fixed=COPY_FIXED.pack(7))
    for data in (copy, encode(Kind.MESSAGE, b"a/b", b"behind", store_ms=2)):
        log.add(data, b"", len(data))
    log.close()
    _flip(tmp_path, 0)
    assert [damage.length for damage in survey(tmp_path).damages] == [len(copy)]


def test_a_damaged_last_record_is_a_torn_tail_unless_it_is_known_to_have_been_durable(tmp_path: Path) -> None:
    _write_log(tmp_path)
    last = _records(tmp_path)[-1]
    _flip(tmp_path, last.position + 9)
    assert [damage.position for damage in survey(tmp_path).damages] == [last.position]
    (tmp_path / "synced").unlink()
    assert survey(tmp_path) == ([], last.size)


def test_a_durable_range_that_was_cut_off_is_filled(tmp_path: Path) -> None:
    _write_log(tmp_path)
    records = _records(tmp_path)
    cut = records[-3].position + 5
    (segment,) = (tmp_path / LOG_DIRECTORY).iterdir()
    os.truncate(segment, cut)
    (damage,) = survey(tmp_path).damages
    end = records[-1].position + records[-1].size
    assert damage[:4] == (records[-3].position, end - records[-3].position, segment.name, end - cut)
    with pytest.raises(LogCorrupt, match=rf"durable up to position .*position {records[-3].position} "):
        _records(tmp_path)
    repair(tmp_path, [damage])
    after = _records(tmp_path)
    assert after[:-1] == records[:-3]
    assert (after[-1].kind, after[-1].position + after[-1].size) == (Kind.DAMAGED, end)


def test_a_second_run_keeps_the_first_copy(tmp_path: Path) -> None:
    _write_log(tmp_path / "data")
    victim = _records(tmp_path / "data")[3]
    _flip(tmp_path / "data", victim.position + 9)
    damages = survey(tmp_path / "data").damages
    copy = tmp_path / "data" / QUARANTINE / damages[0].copy_name
    copy.parent.mkdir()
    copy.write_bytes(b"of the first run, which was killed")
    repair(tmp_path / "data", damages)
    assert copy.read_bytes() == b"of the first run, which was killed"
    assert _records(tmp_path / "data")[3].kind == Kind.DAMAGED


def _tree(data_dir: Path) -> dict[str, bytes]:
    """Return the files of a data directory by name, without those that differ from run to run."""
    kept = (path for path in data_dir.rglob("*") if path.is_file() and path.suffix != ".partial")
    return {str(path.relative_to(data_dir)): path.read_bytes() for path in kept}


@pytest.fixture
def repair_in_child() -> Iterator[Callable[[Path, int], tuple[int, int]]]:
    """Repair a directory in a process that is killed at a step, or not at step -1. Return its status and number of steps."""
    command = [sys.executable, "-m", "tests.store.repair_child"]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as forking:
        stdin, stdout = forking.stdin, forking.stdout
        assert stdin is not None
        assert stdout is not None

        def run(data_dir: Path, step: int) -> tuple[int, int]:
            print(step, data_dir, file=stdin, flush=True)
            status, steps = map(int, stdout.readline().split())
            return status, steps

        yield run


@pytest.mark.parametrize(
    ("index", "every"),
    [
        ("kept", 9),
        pytest.param("kept", 1, marks=pytest.mark.nightly),
        pytest.param("unusable", 1, marks=pytest.mark.nightly),
    ],
)
def test_the_next_repair_completes_one_that_was_killed_at_any_step(
    tmp_path: Path, index: str, every: int, repair_in_child: Callable[[Path, int], tuple[int, int]]
) -> None:
    _write_log(tmp_path / "damaged")
    records = _records(tmp_path / "damaged")
    for victim in (records[2], records[-4]):
        _flip(tmp_path / "damaged", victim.position + 9)
    if index == "unusable":
        (tmp_path / "damaged" / DAMAGED).write_text("a block is damaged\n")
    shutil.copytree(tmp_path / "damaged", tmp_path / "repaired")
    status, steps = repair_in_child(tmp_path / "repaired", -1)
    assert status == 0
    assert steps > 15
    wanted = _tree(tmp_path / "repaired")
    after = _records(tmp_path / "repaired")
    assert any(name.startswith("index/") for name in wanted) == (index == "kept")
    for step in range(0, steps, every):
        data_dir = tmp_path / str(step)
        shutil.copytree(tmp_path / "damaged", data_dir)
        assert repair_in_child(data_dir, step) == (KILLED, 0)
        repair(data_dir, survey(data_dir).damages)
        found = _tree(data_dir)
        assert any(name.startswith("index/") for name in found) == (index == "kept"), step
        assert _without_index(found) == _without_index(wanted), step
        assert _records(data_dir) == after
        parts = Parts(data_dir, store=OPTIONS)
        assert parts.recovery.rebuilt == (index == "unusable")
        parts.close()
        assert not (data_dir / DISCARDED).exists(), "a start must delete the rest of the old index"
        shutil.rmtree(data_dir)


def _without_index(tree: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in tree.items() if not name.startswith(("index/", DISCARDED))}


@pytest.mark.parametrize("written", [1, 10, 24, 30])
def test_a_partly_filled_range_is_filled(tmp_path: Path, written: int) -> None:
    _write_log(tmp_path)
    records = _records(tmp_path)
    victim = records[3]
    (segment,) = (tmp_path / LOG_DIRECTORY).iterdir()
    _flip(tmp_path, victim.position + 9)
    before = segment.read_bytes()
    repair(tmp_path, survey(tmp_path).damages)
    wanted, cut = segment.read_bytes(), victim.position + written
    segment.write_bytes(wanted[:cut] + before[cut:])
    repair(tmp_path, survey(tmp_path).damages)
    assert segment.read_bytes() == wanted
    assert (tmp_path / QUARANTINE / f"{victim.position}-{victim.size}.bin").read_bytes() == (
        before[victim.position : victim.position + victim.size]
    )


def test_repairing_a_directory_without_a_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PositionUnknown, match="holds no CommitLog"):
        survey(tmp_path)


@pytest.mark.parametrize("length", [24, 25, 64 << 20, (64 << 20) + 1, (64 << 20) + 23, 200 << 20])
def test_fillers_have_sizes_that_records_may_have(length: int) -> None:
    sizes = list(_filler_sizes(length))
    assert sum(sizes) == length
    assert all(HEADER_BYTES <= size <= 64 << 20 for size in sizes)


def test_a_segment_that_a_backup_has_linked_is_repaired_in_a_new_file(tmp_path: Path) -> None:
    _write_log(tmp_path / "data")
    damaged = _records(tmp_path / "data")[1]
    _flip(tmp_path / "data", damaged.position + 8)
    segment = next((tmp_path / "data" / "commitlog").iterdir())
    (tmp_path / "linked").hardlink_to(segment)
    before = (tmp_path / "linked").read_bytes()

    repair(tmp_path / "data", survey(tmp_path / "data").damages)

    assert survey(tmp_path / "data").damages == []
    assert (tmp_path / "linked").read_bytes() == before
    assert not (tmp_path / "linked").samefile(segment)


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_repair_without_room_for_its_copies_changes_nothing_and_says_how_much_is_missing(
    tmp_path: Path, is_linked: bool
) -> None:
    data_dir = tmp_path / "data"
    _write_log(data_dir)
    damaged = _records(data_dir)[3]
    _flip(data_dir, damaged.position + 9)
    (segment,) = (data_dir / LOG_DIRECTORY).iterdir()
    allocated = segment.stat().st_blocks * 512
    if is_linked:
        os.link(segment, tmp_path / "backup")
    free = 0

    class FewBytes(SystemFiles):
        def usage(self, path: Path) -> Usage:
            return Usage(free, 2**40)

    damages, before = survey(data_dir).damages, _tree(data_dir)
    with pytest.raises(DiskFull, match=r"free at least \d+ bytes there") as raised:
        repair(data_dir, damages, files=FewBytes())
    assert f"copies {damaged.size} bytes" in str(raised.value)
    written = int(str(raised.value).partition("up to ")[2].split()[0])  # allocated pages that nothing has written are no data
    assert (damaged.position < written <= allocated) if is_linked else written == 0
    assert _tree(data_dir) == before
    free = damaged.size + written + ROOM_BYTES
    repair(data_dir, damages, files=FewBytes())
    assert survey(data_dir).damages == []
