from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.store import descriptors, record
from penstock.store.errors import LogCorrupt, PositionUnknown, RecordCorrupt, RecordTooLarge
from penstock.store.files import SYSTEM_FILES, File, Files, Mode, SystemFile, SystemFiles
from penstock.store.log import commitlog
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.segment import Segment, segment_base, segment_name
from penstock.store.log.tail import Tail
from penstock.store.record import COPY_BYTES, HEADER_BYTES, Kind, encode
from tests.depth import DEPTH
from tests.store.replicating import stretches

NOW_MS = 1_700_000_000_000
SEGMENT_BYTES = 256
RECORD_BYTES = 60
PER_SEGMENT = SEGMENT_BYTES // RECORD_BYTES
LARGEST = SEGMENT_BYTES - COPY_BYTES


def message(number: int, size: int = RECORD_BYTES) -> bytes:
    """Return a record of `size` bytes whose last byte is not zero, so that a test can count all of its bytes."""
    body = f"{number:08d}".encode().rjust(size - HEADER_BYTES - 1, b".")
    return encode(Kind.MESSAGE, b"t", body, store_ms=NOW_MS + number)


def add(log: CommitLog, data: bytes, spare: int = 0) -> int:
    return log.add(data[:8], data[8:], len(data), spare)


def append(log: CommitLog, count: int, first: int = 0) -> list[int]:
    positions = [add(log, message(number)) for number in range(first, first + count)]
    log.write()
    return positions


def opened(
    data_dir: Path, *, segment_bytes: int = SEGMENT_BYTES, verified_until: int = 0, files: Files = SYSTEM_FILES
) -> tuple[CommitLog, Tail]:
    log = CommitLog(data_dir, segment_bytes=segment_bytes, files=files)
    return log, log.recover(verified_until)


def numbers(log: CommitLog, position: int | None = None) -> list[int]:
    return [found.store_ms - NOW_MS for found in log.scan(log.start if position is None else position)]


def written(data_dir: Path, count: int) -> list[int]:
    """Write a log of `count` messages without a sync mark, and return their positions."""
    log, _ = opened(data_dir)
    positions = append(log, count)
    log.close()
    (data_dir / "synced").unlink()
    return positions


def segments(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "commitlog").iterdir())


def flip(path: Path, offset: int, mask: int = 0xFF) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


# --- append and read ------------------------------------------------------------------------------------------------


def test_an_empty_directory_is_an_empty_log(tmp_path: Path) -> None:
    log, tail = opened(tmp_path)
    assert tail == (0, 0)
    assert (log.start, log.written, log.end) == (0, 0, 0)
    assert list(log.scan(0)) == []
    log.close()


def test_records_come_back_by_position_and_in_order(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    positions = append(log, 20)
    assert numbers(log) == list(range(20))
    assert [found.position for found in log.scan(0)] == positions
    for number, position in enumerate(positions):
        assert log.read(position, RECORD_BYTES) == message(number)
        assert log.record(position) == record.decode(message(number), position=position)
        assert log.record(position, RECORD_BYTES).store_ms == NOW_MS + number
    assert numbers(log, positions[7]) == list(range(7, 20))
    assert [found.position for found in log.scan(positions[2], positions[9])] == positions[2:9]
    log.close()


def test_an_added_record_has_a_position_at_once_and_can_be_read_after_the_write(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    append(log, 1)
    position = add(log, message(1))
    assert (position, log.written, log.end) == (RECORD_BYTES, RECORD_BYTES, 2 * RECORD_BYTES)
    for reach in (1, RECORD_BYTES):
        with pytest.raises(PositionUnknown, match=f"position {position} is after the last written record"):
            log.read(position, reach)
    with pytest.raises(PositionUnknown):
        log.read(position - 1, 2)
    assert numbers(log) == [0]
    assert log.write() == RECORD_BYTES
    assert log.write() == 0
    assert numbers(log) == [0, 1]
    log.close()


@settings(max_examples=10 * DEPTH)
@given(sizes=st.lists(st.integers(HEADER_BYTES + 9, LARGEST), max_size=30), data=st.data())
def test_any_sizes_in_any_batches_survive_a_restart(
    sizes: list[int], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data_dir = tmp_path_factory.mktemp("log")
    log, _ = opened(data_dir)
    positions = []
    for number, size in enumerate(sizes):
        positions.append(add(log, message(number, size)))
        if data.draw(st.booleans()):
            log.write()
        if data.draw(st.integers(0, 9)) == 0:
            log.close()
            log, tail = opened(data_dir)
            assert tail == (positions[-1] + size, 0)
    log.write()
    assert [(found.position, found.size) for found in log.scan(0)] == list(zip(positions, sizes, strict=True))
    log.close()


def test_a_position_outside_of_the_log_is_unknown(tmp_path: Path) -> None:
    written(tmp_path, 3 * PER_SEGMENT)
    segments(tmp_path)[0].unlink()
    log, _ = opened(tmp_path)
    assert log.start == PER_SEGMENT * RECORD_BYTES
    assert numbers(log) == list(range(PER_SEGMENT, 3 * PER_SEGMENT))
    with pytest.raises(PositionUnknown, match=f"before the oldest record, {log.start}"):
        log.read(log.start - 1, RECORD_BYTES)
    with pytest.raises(PositionUnknown):
        log.record(log.written)
    log.close()


def test_a_read_never_reaches_beyond_the_end_of_a_sealed_segment(tmp_path: Path) -> None:
    log, _ = opened(tmp_path, segment_bytes=4 * 4096)
    for number in range(4):
        add(log, message(number, 7000))
    log.write()
    with pytest.raises(PositionUnknown, match=r"reach beyond segment 0+\.log"):
        log.read(7000, 9000)  # The last page was cut off the file; touching it would raise SIGBUS.
    log.close()


def test_reading_a_record_that_was_damaged_after_the_start_is_an_error(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    positions = append(log, 2 * PER_SEGMENT)
    flip(segments(tmp_path)[0], positions[1] + 30)
    with pytest.raises(RecordCorrupt, match="checksum"):
        log.record(positions[1])
    with pytest.raises(RecordCorrupt, match=f"position {positions[1]} in segment {segments(tmp_path)[0].name}"):
        list(log.scan(0))
    log.close()


# --- segments -------------------------------------------------------------------------------------------------------


def test_the_position_at_a_time_precedes_all_records_stored_then_or_later(tmp_path: Path) -> None:
    log, _ = opened(tmp_path, segment_bytes=200)
    assert log.position_at(5) == 0
    for store_ms in (10, 10, 10, 20, 20, 30, 30, 30, 30, 30, 50):
        add(log, encode(Kind.MESSAGE, b"t", b"x" * 30, store_ms=store_ms))
    log.write()
    found = [(each.position, each.store_ms) for each in log.scan(0)]
    bases = [int(path.stem) for path in segments(tmp_path)]
    assert len(bases) > 3
    for store_ms in (0, 9, 10, 11, 20, 25, 30, 31, 50, 51):
        position = log.position_at(store_ms)
        assert position in bases
        assert [at for at, each in found if each >= store_ms and at < position] == []
        following = [base for base in bases if base > position][:1]
        assert not following or dict(found)[following[0]] >= store_ms, "a later segment would also do"
    log.close()


def test_segments_are_named_by_position_and_cut_to_their_size(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    append(log, 3 * PER_SEGMENT + 1)
    bases = [at * PER_SEGMENT * RECORD_BYTES for at in range(4)]
    assert [path.name for path in segments(tmp_path)] == [f"{base:020d}.log" for base in bases]
    assert [segment_base(path) for path in segments(tmp_path)] == bases
    sizes = [path.stat().st_size for path in segments(tmp_path)]
    assert sizes == [PER_SEGMENT * RECORD_BYTES] * 3 + [SEGMENT_BYTES]
    log.close()


def test_a_copy_of_the_largest_record_may_fill_a_segment_to_the_last_byte(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    for number in range(3):
        assert add(log, message(number, SEGMENT_BYTES), COPY_BYTES) == number * SEGMENT_BYTES
    log.close()
    log, tail = opened(tmp_path)
    assert tail == (3 * SEGMENT_BYTES, 0)
    append(log, 1, first=3)
    assert numbers(log) == [0, 1, 2, 3]
    log.close()


def test_a_record_larger_than_a_segment_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    append(log, 1)
    with pytest.raises(RecordTooLarge, match=f"{LARGEST + 1} bytes, but at most {LARGEST} are allowed.*store.segment_bytes"):
        add(log, message(1, LARGEST + 1))
    assert log.end == log.written == RECORD_BYTES
    append(log, 1, first=1)
    assert numbers(log) == [0, 1]
    log.close()


def test_a_record_above_the_maximum_size_is_refused_even_if_the_segment_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commitlog, "RECORD_BYTES_MAX", 100)
    log, _ = opened(tmp_path)
    with pytest.raises(RecordTooLarge, match="69 bytes, but at most 68 are allowed"):
        add(log, message(0, 69))
    assert add(log, message(0, 68)) == 0
    log.close()


def test_a_smaller_segment_size_applies_from_the_next_segment_on(tmp_path: Path) -> None:
    log, _ = opened(tmp_path, segment_bytes=4096)
    append(log, 10)
    log.close()
    log, _ = opened(tmp_path, segment_bytes=SEGMENT_BYTES)
    append(log, 90, first=10)
    assert numbers(log) == list(range(100))
    assert segments(tmp_path)[1].name == segment_name(4096 // RECORD_BYTES * RECORD_BYTES)
    log.close()
    assert all(path.stat().st_size <= SEGMENT_BYTES for path in segments(tmp_path)[1:])


def test_the_error_names_a_file_that_is_not_a_segment(tmp_path: Path) -> None:
    written(tmp_path, 1)
    (tmp_path / "commitlog" / "copy of 7.log").touch()
    with pytest.raises(LogCorrupt, match=r"copy of 7\.log is not a segment"):
        CommitLog(tmp_path, segment_bytes=SEGMENT_BYTES)


def test_the_number_of_open_segments_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "LOG_FILES_MAX", 3)
    log, _ = opened(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    positions = append(log, 30 * PER_SEGMENT)
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    for number in (*range(len(positions)), *range(0, len(positions), 7)):
        assert log.read(positions[number], RECORD_BYTES) == message(number)
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    log.close()


def test_a_scan_continues_while_reads_close_its_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "LOG_FILES_MAX", 2)
    log, _ = opened(tmp_path)
    positions = append(log, 10 * PER_SEGMENT)
    for found in log.scan(0):
        for position in positions[::PER_SEGMENT]:
            assert log.record(position).position == position
        assert found.position in positions
    log.close()


# --- failing writes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 7, 59])
def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, bytes(data)[:most], offset))
    log, _ = opened(tmp_path)
    append(log, 2 * PER_SEGMENT)
    assert numbers(log) == list(range(2 * PER_SEGMENT))
    log.close()
    log, tail = opened(tmp_path)
    assert tail == (2 * PER_SEGMENT * RECORD_BYTES, 0)
    log.close()


def test_a_failed_write_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = opened(tmp_path)
    append(log, 1)
    pwrite = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if len(data) <= 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, bytes(data)[:-10], offset)

    monkeypatch.setattr(os, "pwrite", full)
    add(log, message(1))
    with pytest.raises(OSError, match="No space"):
        log.write()
    monkeypatch.undo()
    add(log, message(2))
    for again in (log.write, log.sync):  # anything written now would not be at its position
        with pytest.raises(OSError, match="No space"):
            again()
    assert numbers(log) == [0]
    log.close()
    log, tail = opened(tmp_path)
    assert tail == (RECORD_BYTES, RECORD_BYTES - 10)
    log.close()


def test_a_failed_sync_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = opened(tmp_path)
    append(log, 1)

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(OSError, match="Input/output"):
        log.sync()
    monkeypatch.undo()
    for again in (log.sync, log.write):
        with pytest.raises(OSError, match="Input/output"):
            again()
    log.close()


class OneNews(SystemFiles):
    """Files whose write-back fails once. As in Linux, each open file hears of it once, whichever asks first."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0

    def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o640) -> File:
        files = self

        class Told(SystemFile):
            heard = files.failures

            def fdatasync(self) -> None:
                if self.heard < files.failures:
                    self.heard = files.failures
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                super().fdatasync()

        return Told(os.open(path, mode.value, permissions))


def test_no_segment_begins_after_a_failure_that_only_another_process_has_heard_of(tmp_path: Path) -> None:
    files = OneNews()
    log, _ = opened(tmp_path, files=files)
    append(log, 2)
    files.failures = 1
    with pytest.raises(OSError, match="Input/output error"):
        log.open_segment.sync_file.fdatasync()  # as the process that syncs does; its answer is on the way
    with pytest.raises(OSError, match="Input/output error"):
        log.roll()
    assert len(segments(tmp_path)) == 1
    log.abandon()


def test_a_sealed_segment_has_one_descriptor(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    append(log, 2)
    sealed = log.open_segment
    log.roll()
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    assert held.count(str(sealed.path)) == 1
    assert held.count(str(log.open_segment.path)) == 2
    log.close()


def test_a_segment_is_durable_before_the_next_one_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = opened(tmp_path)
    existing: list[list[str]] = []
    fdatasync = os.fdatasync

    def seen(fd: int) -> None:
        existing.append([path.name for path in segments(tmp_path)])
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", seen)
    append(log, PER_SEGMENT + 1)
    assert existing == [[segment_name(0)]]
    assert len(segments(tmp_path)) == 2
    log.close()


# --- recovery: the tail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", range(RECORD_BYTES))
def test_a_last_record_that_was_written_in_part_is_dropped(tmp_path: Path, kept: int) -> None:
    positions = written(tmp_path, PER_SEGMENT + 2)
    os.truncate(segments(tmp_path)[-1], RECORD_BYTES + kept)
    remains = len(message(PER_SEGMENT + 1)[:kept].rstrip(b"\0"))
    log, tail = opened(tmp_path)
    assert tail == (positions[-1], remains)
    append(log, 2 * PER_SEGMENT, first=PER_SEGMENT + 1)
    log.close()
    log, tail = opened(tmp_path)
    assert tail.torn_bytes == 0
    assert numbers(log) == list(range(3 * PER_SEGMENT + 1))
    log.close()


@pytest.mark.parametrize("at", range(RECORD_BYTES))
def test_a_last_record_that_was_garbled_is_dropped(tmp_path: Path, at: int) -> None:
    positions = written(tmp_path, 3)
    flip(segments(tmp_path)[-1], positions[-1] + at)
    log, tail = opened(tmp_path)
    assert tail == (positions[-1], RECORD_BYTES)
    append(log, 1, first=2)
    assert numbers(log) == [0, 1, 2]
    log.close()


@pytest.mark.parametrize("garbage", [b"\xff" * 100, b"\0" * 30 + b"x", message(9)[:-1], b"\x18" + bytes(23) + b"\x01"])
def test_garbage_after_the_last_record_is_cleared(tmp_path: Path, garbage: bytes) -> None:
    written(tmp_path, 2)
    path = segments(tmp_path)[-1]
    with path.open("r+b") as file:
        file.seek(2 * RECORD_BYTES)
        file.write(garbage)
    log, tail = opened(tmp_path)
    assert tail == (2 * RECORD_BYTES, len(garbage))
    assert path.read_bytes()[2 * RECORD_BYTES :] == bytes(SEGMENT_BYTES - 2 * RECORD_BYTES)
    log.close()


def test_a_torn_tail_of_several_extents_is_counted_to_its_last_byte(tmp_path: Path) -> None:
    segment_bytes = 1024 * 1024
    log, _ = opened(tmp_path, segment_bytes=segment_bytes)
    append(log, 2)
    log.close()
    with segments(tmp_path)[0].open("r+b") as file:
        for at in (5000, 300_000, 900_000):
            file.seek(at)
            file.write(b"scrap")
    log, tail = opened(tmp_path, segment_bytes=segment_bytes)
    assert tail == (2 * RECORD_BYTES, 900_005 - 2 * RECORD_BYTES)
    assert segments(tmp_path)[0].read_bytes().rstrip(b"\0") == message(0) + message(1)
    log.close()


def test_a_start_continues_with_an_empty_next_segment(tmp_path: Path) -> None:
    written(tmp_path, PER_SEGMENT)
    base = PER_SEGMENT * RECORD_BYTES
    (tmp_path / "commitlog" / segment_name(base)).touch()  # killed after creating the file, before extending it
    log, tail = opened(tmp_path)
    assert tail == (base, 0)
    append(log, 1, first=PER_SEGMENT)
    assert numbers(log) == list(range(PER_SEGMENT + 1))
    log.close()


def test_recovery_makes_all_that_it_finds_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = opened(tmp_path)
    append(log, 2)  # written, but not synced, as a killed process leaves it
    synced: list[str] = []
    fdatasync, fsync = os.fdatasync, os.fsync

    def seen_data(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fdatasync(fd)

    def seen(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fdatasync", seen_data)
    monkeypatch.setattr(os, "fsync", seen)
    again, tail = opened(tmp_path)
    assert tail.end == 2 * RECORD_BYTES
    path, folder = segments(tmp_path)[0], str(tmp_path / "commitlog")
    assert synced == [str(path.with_suffix(".fresh")), folder, str(path), folder, str(tmp_path)]
    monkeypatch.undo()
    again.close()
    log.close()


# --- recovery: damage before the tail -------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(RECORD_BYTES))
def test_a_damaged_record_in_a_sealed_segment_prevents_the_start(tmp_path: Path, at: int) -> None:
    positions = written(tmp_path, 3 * PER_SEGMENT)
    damaged = PER_SEGMENT + 2
    path = segments(tmp_path)[1]
    flip(path, positions[damaged] - segment_base(path) + at)
    log = CommitLog(tmp_path, segment_bytes=SEGMENT_BYTES)
    with pytest.raises(LogCorrupt, match=f"position {positions[damaged]} .byte {2 * RECORD_BYTES} of segment {path.name}"):
        log.recover()
    log.close()


@pytest.mark.parametrize("at", range(RECORD_BYTES))
def test_a_damaged_record_followed_by_valid_ones_is_not_a_torn_tail(tmp_path: Path, at: int) -> None:
    positions = written(tmp_path, 3)
    path = segments(tmp_path)[-1]
    flip(path, positions[1] + at)
    before = path.read_bytes()
    log = CommitLog(tmp_path, segment_bytes=SEGMENT_BYTES)
    with pytest.raises(LogCorrupt, match=f"position {positions[1]} .*segment {path.name}"):
        log.recover()
    assert path.read_bytes() == before, "a refused start must not truncate the log"
    log.close()


def test_recovery_does_not_read_sealed_segments_that_are_known_to_be_durable(tmp_path: Path) -> None:
    positions = written(tmp_path, 3 * PER_SEGMENT)
    flip(segments(tmp_path)[0], positions[0] + 30)
    log, tail = opened(tmp_path, verified_until=positions[1])
    assert tail.end == positions[-1] + RECORD_BYTES
    log.close()


@pytest.mark.parametrize("which", [1, 2])
def test_a_missing_segment_prevents_the_start(tmp_path: Path, which: int) -> None:
    written(tmp_path, 4 * PER_SEGMENT)
    before, missing = segments(tmp_path)[which - 1 : which + 1]
    missing.unlink()
    with pytest.raises(LogCorrupt, match=f"segment {before.name} .*{PER_SEGMENT * RECORD_BYTES} bytes are missing"):
        CommitLog(tmp_path, segment_bytes=SEGMENT_BYTES)


def test_a_sealed_segment_that_is_too_short_prevents_the_start(tmp_path: Path) -> None:
    written(tmp_path, 2 * PER_SEGMENT)
    os.truncate(segments(tmp_path)[0], PER_SEGMENT * RECORD_BYTES - 1)
    with pytest.raises(LogCorrupt, match="1 bytes are missing"):
        CommitLog(tmp_path, segment_bytes=SEGMENT_BYTES)


@pytest.mark.parametrize("verified", [False, True])
def test_a_start_cuts_a_sealed_segment_that_a_killed_process_left_at_full_size(tmp_path: Path, verified: bool) -> None:
    positions = written(tmp_path, 2 * PER_SEGMENT)
    path = segments(tmp_path)[0]
    os.truncate(path, SEGMENT_BYTES)
    log, _ = opened(tmp_path, verified_until=positions[-1] if verified else 0)
    assert path.stat().st_size == PER_SEGMENT * RECORD_BYTES
    assert numbers(log) == list(range(2 * PER_SEGMENT))
    log.close()


def test_a_log_killed_before_it_cuts_a_sealed_segment_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = opened(tmp_path)
    append(log, PER_SEGMENT)

    def killed(segment: Segment, size: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Segment, "cut", killed)
    with pytest.raises(KeyboardInterrupt):
        append(log, 1, first=PER_SEGMENT)
    assert [path.stat().st_size for path in segments(tmp_path)] == [SEGMENT_BYTES, SEGMENT_BYTES]
    again, tail = opened(tmp_path)
    assert tail == (PER_SEGMENT * RECORD_BYTES, 0)
    append(again, 1, first=PER_SEGMENT)
    assert numbers(again) == list(range(PER_SEGMENT + 1))
    again.close()


# --- replicas -------------------------------------------------------------------------------------------------------


def test_a_replica_has_the_same_records_at_the_same_positions(tmp_path: Path) -> None:
    leader, _ = opened(tmp_path / "leader")
    append(leader, 3 * PER_SEGMENT + 1)
    follower, _ = opened(tmp_path / "follower")
    for position, data, begins_segment in stretches(leader, 0, 2):
        if begins_segment and position:
            follower.roll()
        follower.put(position, data)
    assert numbers(follower) == numbers(leader)
    assert follower.segments() == leader.segments()
    for log in (leader, follower):
        log.close()
    for one, other in zip(segments(tmp_path / "leader"), segments(tmp_path / "follower"), strict=True):
        assert one.read_bytes().rstrip(b"\0") == other.read_bytes().rstrip(b"\0")


def test_a_replica_with_small_segments_holds_records_that_are_larger(tmp_path: Path) -> None:
    follower, _ = opened(tmp_path)
    data = message(7, 4 * SEGMENT_BYTES)
    follower.put(0, message(6))
    follower.put(RECORD_BYTES, data)
    assert numbers(follower) == [6, 7]
    follower.close()
    follower, _ = opened(tmp_path)
    assert numbers(follower) == [6, 7]
    follower.close()


@settings(max_examples=10 * DEPTH)
@given(data=st.data())
def test_a_log_that_is_cut_anywhere_goes_on_from_there(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    data_dir = tmp_path_factory.mktemp("log")
    log, _ = opened(data_dir)
    model: list[tuple[int, int]] = []
    for number in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 2 * PER_SEGMENT))):
            size = data.draw(st.integers(HEADER_BYTES + 9, LARGEST))
            model.append((add(log, message(number, size)), number))
            log.write()
        is_marked = data.draw(st.booleans())
        if model and is_marked:
            log.mark(data.draw(st.integers(0, log.written)))
        if model:
            kept = data.draw(st.integers(0, len(model)))
            position = model[kept][0] if kept < len(model) else log.end
            log.cut_to(position)
            del model[kept:]
            assert log.written == log.end == position
        if data.draw(st.booleans()):
            if data.draw(st.booleans()):
                log.close()
            else:
                log.abandon()
            log, _ = opened(data_dir)
        assert [(found.position, found.store_ms - NOW_MS) for found in log.scan(0)] == model
    log.close()


def test_a_log_can_t_be_cut_before_its_beginning(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    append(log, 3 * PER_SEGMENT)
    log.sync()
    log.drop_before(log.segments()[1][0])
    with pytest.raises(PositionUnknown, match="the log begins at position 240, so it can't be cut at 60"):
        log.cut_to(RECORD_BYTES)
    assert len(numbers(log)) == 2 * PER_SEGMENT
    log.cut_to(log.start)
    assert (numbers(log), log.end) == ([], log.start)
    log.close()
    log, _ = opened(tmp_path)
    assert (log.start, log.end) == (4 * RECORD_BYTES, 4 * RECORD_BYTES)
    log.close()


class Killed(Exception):
    """Raised where a process is killed."""


class MortalFiles(SystemFiles):
    """Files of a process that is killed after some calls."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise Killed

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)

    def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o600) -> File:
        self._count()
        return super().open(path, mode, permissions=permissions)


def test_a_cut_that_is_killed_anywhere_leaves_a_log_that_can_be_cut_again(tmp_path: Path) -> None:
    position = 2 * RECORD_BYTES
    for calls in range(100):
        data_dir = tmp_path / str(calls)
        files = MortalFiles(10_000)
        log, _ = opened(data_dir, files=files)
        append(log, 4 * PER_SEGMENT)
        log.sync()
        log.mark(log.written)
        files.calls = calls
        try:
            log.cut_to(position)
        except Killed:
            log.abandon()
            log, _ = opened(data_dir)
            count = len(numbers(log))
            assert numbers(log) == list(range(count))
            assert count >= 2
            log.cut_to(position)
            assert numbers(log) == [0, 1]
            append(log, 1, first=99)
            assert numbers(log) == [0, 1, 99]
            log.close()
        else:
            log.close()
            assert calls > 4, "it was killed at some calls"
            return
    raise AssertionError("a cut takes fewer than 100 calls")
