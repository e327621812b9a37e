"""After an end that was not orderly, a start relies on nothing that may be in memory only."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.store.errors import DiskFull, LogCorrupt
from penstock.store.files import SYSTEM_FILES, File, Files, Mode, SystemFile, SystemFiles
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.logreader import read_log
from penstock.store.log.rewriting import FRESH_SUFFIX
from penstock.store.log.segment import LOG_DIRECTORY
from penstock.store.log.syncmark import FILE, Ending, Mark, SyncMark
from penstock.store.options import KIB
from penstock.store.record import Kind, encode
from penstock.store.recovery.repair import survey
from tests.depth import DEPTH
from tests.store.losing import LosingFiles

SEGMENT_BYTES = 64 * KIB


def opened(data_dir: Path, files: Files = SYSTEM_FILES) -> CommitLog:
    log = CommitLog(data_dir, segment_bytes=SEGMENT_BYTES, files=files)
    try:
        log.recover()
    except BaseException:
        log.abandon()
        raise
    return log


def append(log: CommitLog, number: int, size: int) -> None:
    data = encode(Kind.MESSAGE, b"a/b", b"%d:" % number + b"\x5a" * size, store_ms=1000 + number)
    log.add(data[:8], data[8:], len(data))
    log.write()


def numbers(log: CommitLog) -> list[int]:
    return [int(record.body.partition(b":")[0]) for record in log.scan(log.start)]


def mark_of(data_dir: Path) -> Mark:
    mark = SyncMark(data_dir).read()
    assert mark is not None
    return mark


@pytest.mark.slow
@settings(max_examples=20 * DEPTH)
@given(
    synced=st.lists(st.integers(0, 3000), max_size=30),
    marked=st.integers(0, 30),
    unsynced=st.lists(st.integers(0, 6000), min_size=1, max_size=8),
    after=st.lists(st.integers(0, 3000), max_size=5),
    notes=st.booleans(),
)
def test_what_is_durable_after_a_restart_survives_a_reboot(
    synced: list[int], marked: int, unsynced: list[int], after: list[int], notes: bool
) -> None:
    data_dir = Path(mkdtemp(prefix="penstock-anew-"))
    try:
        files = LosingFiles()
        log = opened(data_dir, files)
        for number, size in enumerate(synced):
            append(log, number, size)
            log.sync()
            if number == marked:
                log.mark(log.written)
        durable = log.written
        for number, size in enumerate(unsynced, len(synced)):
            append(log, number, size)
        files.fails = True
        with suppress(OSError):
            log.sync()  # a segment that was begun meanwhile has been synced already
        if notes:
            log.note_failure("Input/output error", durable)
        log.abandon()

        log = opened(data_dir, files)  # from the same memory
        found = numbers(log)
        assert found[: len(synced)] == list(range(len(synced)))
        for number, size in enumerate(after, len(found)):
            append(log, number, size)
        log.sync()
        everything = numbers(log)
        log.abandon()
        files.reboot()

        log = opened(data_dir, files)
        assert numbers(log) == everything
        log.close()
        assert survey(data_dir) == ([], 0)
        assert [int(record.body.partition(b":")[0]) for record in read_log(data_dir)] == everything
    finally:
        shutil.rmtree(data_dir)


def test_only_what_the_mark_does_not_prove_is_written_anew(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for number in range(30):
        append(log, number, 1000)
    log.sync()
    log.mark(log.written)
    marked = log.written
    append(log, 30, 1000)
    before = (tmp_path / LOG_DIRECTORY / "00000000000000000000.log").stat().st_ino
    log.abandon()
    log = opened(tmp_path)
    assert numbers(log) == list(range(31))
    bases = [base for base, _ in log.segments()]
    assert bases == [0, max(record.position for record in log.scan(0) if record.position <= marked - marked % 4096)]
    assert (tmp_path / LOG_DIRECTORY / "00000000000000000000.log").stat().st_ino == before
    log.close()
    log = opened(tmp_path)
    assert [base for base, _ in log.segments()] == bases, "the end was orderly"
    log.close()


def test_an_idle_node_that_is_killed_often_begins_no_segments(tmp_path: Path) -> None:
    for number in range(5):
        log = opened(tmp_path)
        if not number:
            append(log, number, 100)
        log.sync()
        log.abandon()
    assert len(list((tmp_path / LOG_DIRECTORY).iterdir())) == 1


@pytest.mark.parametrize("ending", list(Ending))
def test_the_mark_says_how_the_node_ended(tmp_path: Path, ending: Ending) -> None:
    log = opened(tmp_path)
    append(log, 0, 10)
    log.sync()
    if ending is Ending.FAILED:
        log.note_failure("fdatasync: \u00fc" * 100, log.written)
    if ending is Ending.ORDERLY:
        log.close()
    else:
        log.abandon()
    found = mark_of(tmp_path)
    assert (found.ending, found.begin) == (ending, 0)
    assert found.reason == ("fdatasync: \u00fc" * 100).encode()[: len(found.reason.encode())].decode()
    assert bool(found.reason) == (ending is Ending.FAILED)


class Killed(BaseException):
    pass


class KilledFiles(SystemFiles):
    """Files whose calls end the process after a number of them."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise Killed

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        if not path.name.endswith(FRESH_SUFFIX):  # a killed process doesn't tidy up
            self._count()
            super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)
        self._count()


@pytest.mark.parametrize("has_mark", [True, False])
def test_a_start_that_is_killed_anywhere_can_be_done_again(tmp_path: Path, has_mark: bool) -> None:
    log = opened(tmp_path / "whole")
    for number in range(30):
        append(log, number, 1000)
        if number == 20:
            log.sync()
            log.mark(log.written)
    log.abandon()
    if not has_mark:
        (tmp_path / "whole" / FILE).unlink()
    for calls in range(20):
        shutil.copytree(tmp_path / "whole", tmp_path / "left")
        files = KilledFiles(calls)
        with suppress(Killed):
            opened(tmp_path / "left", files).abandon()
        log = opened(tmp_path / "left")
        assert numbers(log) == list(range(30)), calls
        log.close()
        assert not list((tmp_path / "left" / LOG_DIRECTORY).glob(f"*{FRESH_SUFFIX}"))
        assert survey(tmp_path / "left") == ([], 0)
        shutil.rmtree(tmp_path / "left")
        if files.calls > 0:
            break
    else:
        raise AssertionError("more calls than expected")


def test_a_torn_tail_is_not_taken_along(tmp_path: Path) -> None:
    log = opened(tmp_path)
    append(log, 0, 1000)
    end = log.end
    append(log, 1, 1000)
    log.abandon()
    os.truncate(tmp_path / LOG_DIRECTORY / "00000000000000000000.log", end + 500)
    log = opened(tmp_path)
    assert numbers(log) == [0]
    append(log, 1, 10)
    log.close()
    log = opened(tmp_path)
    assert numbers(log) == [0, 1]
    log.close()


@pytest.mark.parametrize("ending", [Ending.FAILED, Ending.RUNNING])
def test_pages_that_are_missing_after_a_failure_are_no_damage_if_none_was_durable(tmp_path: Path, ending: Ending) -> None:
    log = opened(tmp_path)
    ends = []
    for number in range(4):
        append(log, number, 1000)
        ends.append(log.end)
    if ending is Ending.FAILED:
        log.note_failure("EIO", ends[0])
    log.abandon()
    with (tmp_path / LOG_DIRECTORY / "00000000000000000000.log").open("r+b") as file:
        file.seek(ends[1])
        file.write(bytes(ends[2] - ends[1]))
    if ending is Ending.FAILED:
        log = opened(tmp_path)
        assert numbers(log) == [0, 1]
        log.close()
    else:
        with pytest.raises(LogCorrupt, match="penstock repair"):
            opened(tmp_path)


def test_a_full_disk_is_named_and_changes_nothing(tmp_path: Path) -> None:
    class FullFile(SystemFile):
        def allocate(self, offset: int, length: int, /) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class FullFiles(SystemFiles):
        def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o640) -> File:
            file = super().open(path, mode, permissions=permissions)
            return FullFile(os.dup(file.fileno())) if path.suffix == FRESH_SUFFIX else file

    log = opened(tmp_path)
    append(log, 0, 1000)
    log.abandon()
    before = sorted(path.name for path in (tmp_path / LOG_DIRECTORY).iterdir())
    with pytest.raises(DiskFull, match=r"\d+ bytes must be written anew.*no room.*start again"):
        opened(tmp_path, FullFiles())
    assert sorted(path.name for path in (tmp_path / LOG_DIRECTORY).iterdir()) == before
    log = opened(tmp_path)
    assert numbers(log) == [0]
    log.close()


def test_a_node_does_not_run_while_the_mark_says_that_its_end_was_orderly(tmp_path: Path) -> None:
    class FullFile(SystemFile):
        def pwrite(self, data: bytes | bytearray | memoryview, offset: int, /) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class FullFiles(SystemFiles):
        def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o640) -> File:
            file = super().open(path, mode, permissions=permissions)
            return FullFile(os.dup(file.fileno())) if mode is Mode.DURABLE else file

    log = opened(tmp_path)
    append(log, 0, 1000)
    log.close()
    with pytest.raises(DiskFull, match="synced can't be written"):
        opened(tmp_path, FullFiles())
    assert mark_of(tmp_path).ending is Ending.ORDERLY
    log = opened(tmp_path)
    assert mark_of(tmp_path).ending is Ending.RUNNING
    log.close()
