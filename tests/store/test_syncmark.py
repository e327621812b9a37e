"""The sync mark, and a start after a power cut that has left any state of the pages written since the last sync."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.store.errors import LogCorrupt
from penstock.store.files import SYSTEM_FILES, SystemFiles
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.quarantine import QUARANTINE
from penstock.store.log.syncmark import FILE, Ending, Mark, SyncMark
from penstock.store.options import KIB
from penstock.store.record import Kind, encode
from penstock.store.recovery.repair import repair, survey
from tests.depth import DEPTH

PAGE = 4 * KIB
SEGMENT_BYTES = 64 * KIB


def opened(data_dir: Path) -> CommitLog:
    log = CommitLog(data_dir, segment_bytes=SEGMENT_BYTES)
    log.recover()
    return log


def append(log: CommitLog, number: int, size: int) -> None:
    data = encode(Kind.MESSAGE, b"a/b", b"%d:" % number + b"\x5a" * size, store_ms=1000 + number)
    log.add(data[:8], data[8:], len(data))


def numbers(log: CommitLog) -> list[int]:
    return [int(record.body.partition(b":")[0]) for record in log.scan(0)]


@pytest.fixture
def reboots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each read of the boot id return a new one."""
    boots = iter(range(1_000_000))
    monkeypatch.setattr(SystemFiles, "boot_id", lambda _: b"%036d" % next(boots))


def test_a_mark_is_read_as_it_was_written(tmp_path: Path) -> None:
    mark = SyncMark(tmp_path)
    assert mark.read() is None
    for position in (0, 5, 2**63):
        mark.write(position)
        assert mark.read() == Mark(position, 0, SYSTEM_FILES.boot_id(), Ending.RUNNING, "")
        assert mark.position == position
    found = mark.read()
    assert found is not None
    assert not found.has_booted_since(SYSTEM_FILES.boot_id())


def test_a_damaged_mark_counts_as_missing(tmp_path: Path) -> None:
    SyncMark(tmp_path).write(77)
    data = (tmp_path / FILE).read_bytes()
    for at in range(len(data)):
        (tmp_path / FILE).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert SyncMark(tmp_path).read() is None
        (tmp_path / FILE).write_bytes(data[:at])
        assert SyncMark(tmp_path).read() is None


@pytest.mark.parametrize(
    ("boot", "since"),
    [(SYSTEM_FILES.boot_id(), False), (b"x" * 36, True), (bytes(36), False)],
    ids=["same boot", "another boot", "boot unknown"],
)
def test_a_power_cut_is_assumed_only_if_the_machine_has_booted_since(boot: bytes, since: bool) -> None:
    mark = Mark(0, 0, boot, Ending.RUNNING, "")
    assert mark.has_booted_since(SYSTEM_FILES.boot_id()) is since


@pytest.mark.usefixtures("reboots")
@settings(max_examples=25 * DEPTH)
@given(
    synced=st.lists(st.integers(0, 3000), max_size=8),
    unsynced=st.lists(st.integers(0, 6000), min_size=1, max_size=6),
    lost=st.integers(0, 2**16 - 1),
    old_mark=st.booleans(),
)
def test_a_start_has_all_synced_records_whichever_unsynced_pages_are_lost(
    synced: list[int], unsynced: list[int], lost: int, old_mark: bool
) -> None:
    data_dir = Path(mkdtemp(prefix="penstock-power-"))
    try:
        log = opened(data_dir)
        for number, size in enumerate(synced):
            append(log, number, size)
        log.write()
        log.sync()
        if not old_mark:
            log.mark(log.written)
        durable, mark = log.written, (data_dir / FILE).read_bytes()
        path = data_dir / "commitlog" / ("0" * 20 + ".log")
        before = path.read_bytes()
        for number, size in enumerate(unsynced, len(synced)):
            append(log, number, size)
            log.write()
        written = log.written
        after = bytearray(path.read_bytes())
        log.close()

        # A lost page has its contents as of the last sync.
        pages = range(durable // PAGE, (written + PAGE - 1) // PAGE)
        for bit, page in enumerate(pages):
            if lost >> bit & 1:
                after[page * PAGE : (page + 1) * PAGE] = before[page * PAGE : (page + 1) * PAGE]
        path.write_bytes(after)
        (data_dir / FILE).write_bytes(mark)

        log = opened(data_dir)
        found = numbers(log)
        assert found == list(range(len(found)))
        assert len(found) >= len(synced)
        if not lost:
            assert len(found) == len(synced) + len(unsynced)
        append(log, len(found), 100)
        log.close()
        log = opened(data_dir)
        assert numbers(log) == [*found, len(found)]
        log.close()
    finally:
        shutil.rmtree(data_dir)


def torn_in_the_middle(data_dir: Path, marked: int) -> tuple[int, bytes]:
    """Leave ten records of 100 bytes with the fifth one lost; the mark says that the first `marked` records were durable."""
    log = opened(data_dir)
    ends = []
    for number in range(10):
        append(log, number, 100)
        ends.append(log.end)
    log.write()
    log.mark(ends[marked - 1])
    mark = (data_dir / FILE).read_bytes()
    log.close()
    path = data_dir / "commitlog" / ("0" * 20 + ".log")
    data = path.read_bytes()
    path.write_bytes(data[: ends[3]] + bytes(ends[4] - ends[3]) + data[ends[4] :])
    (data_dir / FILE).write_bytes(mark)
    return ends[3], path.read_bytes()[ends[3] : ends[9]]


@pytest.mark.usefixtures("reboots")
def test_records_after_a_hole_are_set_aside_before_they_are_cut_off(tmp_path: Path) -> None:
    position, cut = torn_in_the_middle(tmp_path, 4)
    log = opened(tmp_path)
    assert numbers(log) == [0, 1, 2, 3]
    log.close()
    (copy,) = (tmp_path / QUARANTINE).iterdir()
    assert copy.name.startswith(f"{position}-{len(cut)}-")
    assert copy.read_bytes() == cut


@pytest.mark.usefixtures("reboots")
def test_a_durable_record_is_never_cut_off(tmp_path: Path) -> None:
    position, _ = torn_in_the_middle(tmp_path, 5)
    with pytest.raises(LogCorrupt, match=rf"there is no valid record at position {position} .*penstock repair"):
        opened(tmp_path)
    repair(tmp_path, survey(tmp_path).damages)
    log = opened(tmp_path)
    assert [record.kind == Kind.MESSAGE for record in log.scan(0)] == [number != 4 for number in range(10)]
    log.close()


def test_a_hole_is_damage_if_the_machine_has_not_booted_since(tmp_path: Path) -> None:
    position, _ = torn_in_the_middle(tmp_path, 4)
    with pytest.raises(LogCorrupt, match=rf"record at position {position} "):
        opened(tmp_path)


@pytest.mark.usefixtures("reboots")
def test_a_hole_is_damage_if_there_is_no_mark(tmp_path: Path) -> None:
    torn_in_the_middle(tmp_path, 4)
    (tmp_path / FILE).unlink()
    with pytest.raises(LogCorrupt, match="penstock repair"):
        opened(tmp_path)
