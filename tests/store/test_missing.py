"""Files of the log that are missing, cut off or in each other's place: nobody goes on as if they were whole."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.cli.inspect_log import inspect_log
from penstock.cli.repair_log import repair_log
from penstock.store.errors import LogCorrupt
from penstock.store.files import SystemFiles
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.logreader import missing_beginning
from penstock.store.log.placing import MARKER, place
from penstock.store.log.segment import LOG_DIRECTORY, segment_name
from penstock.store.log.syncmark import FILE, Ending, SyncMark
from penstock.store.options import KIB, StoreOptions
from penstock.store.record import Kind
from penstock.store.recovery.repair import repair, survey
from penstock.store.snapshots.snapshotreader import DIRECTORY as SNAPSHOTS
from penstock.store.snapshots.snapshotreader import snapshot_path
from penstock.store.snapshots.snapshotwriter import give_own_names, misnamed, remove_other_snapshots, write_empty
from tests.clock import ManualClock
from tests.pop.wiring import Parts

OPTIONS = StoreOptions(segment_bytes=16 * KIB)
NUMBER = 100
SEGMENTS = 6

FAULTS = ("deleted", "half", "empty", "swapped")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A data directory with `SEGMENTS` segments whose node has stopped in order, and the positions of its messages."""
    data_dir = tmp_path_factory.mktemp("whole") / "data"
    clock = ManualClock()
    parts = Parts(data_dir, clock, store=OPTIONS)
    positions: list[int] = []
    for number in range(NUMBER):
        clock.advance(1000)
        positions += parts.publish(b"%0900d" % number)
    parts.close()
    assert len(names(data_dir)) == SEGMENTS
    return data_dir, positions


def names(data_dir: Path) -> list[str]:
    return sorted(path.name for path in (data_dir / LOG_DIRECTORY).iterdir())


def drained(parts: Parts) -> list[int]:
    found: list[int] = []
    while delivered := parts.pop(32, group="new"):
        found += [delivery.position for delivery in delivered]
        parts.ack(*(delivery.handle for delivery in delivered), group="new")
    return found


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("every", [SEGMENTS - 1, pytest.param(1, marks=pytest.mark.nightly)])
def test_no_start_goes_on_without_a_part_of_the_log(
    whole: tuple[Path, list[int]], tmp_path: Path, fault: str, every: int
) -> None:
    """`make test` takes the first and the last segment away, `make nightly` takes each."""
    data_dir, positions = whole
    for number, name in list(enumerate(names(data_dir)))[::every]:
        copy = tmp_path / str(number)
        shutil.copytree(data_dir, copy)
        path = copy / LOG_DIRECTORY / name
        size = min(path.stat().st_size, positions[-1] + 900 - int(path.stem))
        kept = {"deleted": 0, "half": size // 2, "empty": 0, "swapped": 0}[fault]
        if fault == "deleted":
            path.unlink()
        elif fault == "swapped":
            other = copy / LOG_DIRECTORY / names(data_dir)[number - 1]
            path.rename(tmp_path / "aside")
            other.rename(path)
            (tmp_path / "aside").rename(other)
        else:
            os.truncate(path, kept)
        with pytest.raises(LogCorrupt, match=r"restore|missing"):
            Parts(copy, store=OPTIONS)
        assert survey(copy).damages or fault == "swapped"
        if fault != "swapped":
            damages = survey(copy).damages
            repair(copy, damages)
            assert survey(copy) == ([], 0)
            parts = Parts(copy, store=OPTIONS)
            lost = range(int(path.stem) + kept, int(path.stem) + size)
            left = [at for at in positions if at not in lost and not at < lost.start < at + 900]
            assert drained(parts) == left
            assert parts.publish(b"after")[0] > positions[-1]
            parts.close()
        shutil.rmtree(copy)


def test_what_is_missing_at_the_beginning_is_named_by_everybody(
    whole: tuple[Path, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole[0], tmp_path / "data")
    first, second, third, *_ = names(tmp_path / "data")
    end = int(third.partition(".")[0])
    for name in (first, second):
        (tmp_path / "data" / LOG_DIRECTORY / name).unlink()
    with pytest.raises(LogCorrupt, match=rf"begins at position 0, but .* before position {end} .*{first}.*penstock repair"):
        Parts(tmp_path / "data", store=OPTIONS)
    (damage,) = survey(tmp_path / "data").damages
    assert (damage.position, damage.length, damage.missing, damage.segment) == (0, end, end, first)
    assert missing_beginning(tmp_path / "data") == (0, end)
    inspect_log(tmp_path / "data", kinds=[], topic_filter="", position=0, since_ms=0, until_ms=0, limit=1, as_json=False)
    assert f"{end} bytes before position {end} are missing" in capsys.readouterr().err
    segments = pytest.importorskip("penstock.spark.segments")
    with pytest.raises(LogCorrupt, match=f"The log begins at position 0, but .*{end}"):
        segments.survey(tmp_path / "data")
    repair(tmp_path / "data", [damage])
    assert missing_beginning(tmp_path / "data") is None
    assert segments.survey(tmp_path / "data").start == 0
    assert (tmp_path / "data" / LOG_DIRECTORY / first).stat().st_blocks * 512 < end, "zeros are a hole"


def test_a_log_without_any_file_is_refused_and_can_be_filled(whole: tuple[Path, list[int]], tmp_path: Path) -> None:
    data_dir, positions = whole
    shutil.copytree(data_dir, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / LOG_DIRECTORY)
    with pytest.raises(LogCorrupt, match="begins at position 0, but"):
        Parts(tmp_path / "data", store=OPTIONS)
    damages = survey(tmp_path / "data").damages
    repair(tmp_path / "data", damages)
    parts = Parts(tmp_path / "data", store=OPTIONS)
    assert drained(parts) == []
    assert parts.publish(b"after")[0] > positions[-1]
    parts.close()


def test_a_missing_last_segment_is_named_by_spark_too(whole: tuple[Path, list[int]], tmp_path: Path) -> None:
    segments = pytest.importorskip("penstock.spark.segments")
    shutil.copytree(whole[0], tmp_path / "data")
    (tmp_path / "data" / LOG_DIRECTORY / names(whole[0])[-1]).unlink()
    with pytest.raises(LogCorrupt, match="The log was durable up to position"):
        segments.survey(tmp_path / "data")


def test_segments_that_a_killed_deletion_has_left_are_deleted(whole: tuple[Path, list[int]], tmp_path: Path) -> None:
    data_dir, _ = whole
    bases = [int(name.partition(".")[0]) for name in names(data_dir)]
    for kept in range(3):
        copy = tmp_path / str(kept)
        shutil.copytree(data_dir, copy)
        mark = SyncMark(copy)
        found = mark.read()
        assert found is not None
        mark.write(found.position, begin=bases[2], ending=Ending.ORDERLY)
        mark.close()
        for base in bases[:kept]:
            (copy / LOG_DIRECTORY / segment_name(base)).unlink()
        assert survey(copy).damages == []
        assert missing_beginning(copy) is None
        log = CommitLog(copy, segment_bytes=OPTIONS.segment_bytes)
        log.recover()
        assert [base for base, _ in log.segments()] == bases[2:]
        assert names(copy) == names(data_dir)[2:]
        log.close()


def test_the_mark_says_where_the_log_begins_before_a_file_goes(whole: tuple[Path, list[int]], tmp_path: Path) -> None:
    shutil.copytree(whole[0], tmp_path / "data")
    log = CommitLog(tmp_path / "data", segment_bytes=OPTIONS.segment_bytes)
    log.recover()
    third = log.segments()[2][0]
    seen: list[int] = []
    drop = log._chain.drop_before

    def dropped(position: int) -> int:
        mark = SyncMark(tmp_path / "data").read()
        seen.append(mark.begin if mark is not None else -1)
        return drop(position)

    log._chain.drop_before = dropped  # type: ignore[method-assign]
    assert log.drop_before(third) == 2
    assert seen == [third]
    log.close()
    log = CommitLog(tmp_path / "data", segment_bytes=OPTIONS.segment_bytes)
    log.recover()
    assert log.start == third
    log.close()


@pytest.mark.parametrize("state", ["missing", "damaged", "old"])
def test_without_a_mark_a_start_goes_on_with_what_there_is(
    whole: tuple[Path, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    data_dir, positions = whole
    shutil.copytree(data_dir, tmp_path / "data")
    if state == "missing":
        (tmp_path / "data" / FILE).unlink()
    else:
        (tmp_path / "data" / FILE).write_bytes(bytes(512 if state == "damaged" else 48))
    parts = Parts(tmp_path / "data", store=OPTIONS)
    assert drained(parts) == positions
    assert [each.kind for each in parts.store.log.scan(0)].count(Kind.MESSAGE) == NUMBER
    parts.close()
    assert "syncmark.missing" in capsys.readouterr().out
    mark = SyncMark(tmp_path / "data").read()
    assert mark is not None
    assert mark.ending is Ending.ORDERLY


class Killed(BaseException):
    pass


class KilledFiles(SystemFiles):
    """Files whose calls that change names end the process after a number of them."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise Killed

    def link(self, old: Path, new: Path) -> None:
        self._count()
        super().link(old, new)

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)


@pytest.mark.parametrize("order", [(1, 0), (0, 3, 2, 1), (2, 0, 1), (0, 1, 2, 4, 3)], ids=str)
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_repair_puts_segments_back_and_may_be_killed_meanwhile(
    whole: tuple[Path, list[int]], tmp_path: Path, order: tuple[int, ...], every: int
) -> None:
    data_dir, positions = whole
    files_of = names(data_dir)
    before = {name: (data_dir / LOG_DIRECTORY / name).read_bytes() for name in files_of}
    for calls in range(len(order) % every, 30, every):
        copy = tmp_path / str(calls)
        shutil.copytree(data_dir, copy)
        for to, source in enumerate(order):
            (copy / LOG_DIRECTORY / files_of[to]).write_bytes(before[files_of[source]])
        with pytest.raises(LogCorrupt, match="penstock repair"):
            Parts(copy, store=OPTIONS)
        killed = KilledFiles(calls)
        with suppress(Killed):
            place(killed, copy / LOG_DIRECTORY)
        if killed.calls < 0 and (copy / LOG_DIRECTORY / MARKER).exists():
            with pytest.raises(LogCorrupt, match="penstock repair"):
                Parts(copy, store=OPTIONS)
        repair_log(copy, dry_run=False, as_json=False)
        assert repair_log(copy, dry_run=True, as_json=False) is False
        if calls % 5 == len(order) % every:
            parts = Parts(copy, store=OPTIONS)
            assert drained(parts) == positions
            parts.close()
        assert {name: (copy / LOG_DIRECTORY / name).read_bytes() for name in files_of[:-1]} == {
            name: before[name] for name in files_of[:-1]
        }
        shutil.rmtree(copy)
        if killed.calls >= 0:
            break
    else:
        raise AssertionError("more calls than expected")


@pytest.mark.parametrize("order", [(1, 0), (2, 0, 1), (1, None), (None, 0, 1), (1, 0, None)], ids=str)
def test_snapshots_get_their_own_names_back_also_from_a_start_that_was_killed(
    tmp_path: Path, order: tuple[int | None, ...]
) -> None:
    """`None` stands for a file that can't be read."""
    made = tmp_path / "made"
    for number in range(1, len(order) + 1):
        write_empty(made, number * 1000, 5)
    own = [snapshot_path(made, number * 1000).name for number in range(1, len(order) + 1)]
    whole = {name: (made / SNAPSHOTS / name).read_bytes() for name in own}
    for calls in range(30):
        copy = tmp_path / str(calls)
        (copy / SNAPSHOTS).mkdir(parents=True)
        for name, source in zip(own, order, strict=True):
            (copy / SNAPSHOTS / name).write_bytes(b"damaged" if source is None else whole[own[source]])
        killed = KilledFiles(calls)
        with suppress(Killed):
            give_own_names(copy, killed)
        remove_other_snapshots(copy, [number * 1000 for number in range(1, len(order) + 1)])
        give_own_names(copy)
        assert misnamed(copy) == {}
        for source in set(order) - {None}:
            assert source is not None
            assert (copy / SNAPSHOTS / own[source]).read_bytes() == whole[own[source]]
        kept = [path.read_bytes() for path in copy.rglob("*") if path.is_file()]
        assert len(kept) == len(order)
        assert kept.count(b"damaged") == order.count(None)
        shutil.rmtree(copy)
        if killed.calls >= 0:
            break
    else:
        raise AssertionError("more calls than expected")
