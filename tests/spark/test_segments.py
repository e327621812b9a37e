"""The files of a log, read beside a running node."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("pyarrow", reason="Spark's part needs the extra `spark`")

from penstock.spark import segments
from penstock.spark.errors import LogMissing, LogUnreadable
from penstock.store import record
from penstock.store.errors import LogCorrupt, RecordCorrupt
from penstock.store.log import recordscan
from penstock.store.record import Kind
from tests.spark.log_writer import LogWriter


def three_segments() -> LogWriter:
    log = LogWriter(start=4_096)
    for number in range(30):
        if number in (10, 20):
            log.roll()
        log.now_ms = 1_000 + number
        log.message(f"sensors/{number}/temp")
    return log


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def test_a_log_is_found_by_its_data_directory_and_by_its_own(tmp_path: Path) -> None:
    directory = three_segments().save(tmp_path)
    assert segments.find(tmp_path) == segments.find(directory) == directory


def test_a_directory_without_a_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LogMissing, match="holds no CommitLog"):
        segments.survey(tmp_path)


def test_a_directory_that_the_user_may_not_read_is_not_one_without_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "listdir", refused)  # the tests may run as root, whom no mode of a directory stops
    with pytest.raises(LogUnreadable, match=r"commitlog can't be read \(Permission denied\). Run as the user of the node"):
        segments.find(tmp_path)


@pytest.mark.parametrize("hole_bytes", [0, 3, 100_000])
@pytest.mark.parametrize("torn_bytes", [0, 3, 20, 40])
def test_the_log_ends_behind_its_last_whole_record(tmp_path: Path, hole_bytes: int, torn_bytes: int) -> None:
    log = three_segments()
    torn = record.encode(Kind.MESSAGE, b"sensors/30/temp", b"22.0", store_ms=9_999)[:torn_bytes]
    log.save(tmp_path, hole_bytes=hole_bytes, torn=torn)
    found = segments.survey(tmp_path)
    assert (found.start, found.end, found.first_ms, found.last_ms) == (4_096, log.end, 1_000, 1_029)
    assert found.torn == (torn_bytes > 0)
    assert [segment.stop - segment.base for segment in found.segments] == [len(each) for each in log.segments]


def test_a_log_that_goes_on_in_an_empty_segment_ends_with_the_one_before(tmp_path: Path) -> None:
    log = three_segments()
    log.roll()
    log.save(tmp_path, hole_bytes=4_096)
    found = segments.survey(tmp_path)
    assert (found.end, found.last_ms, found.torn) == (log.end, 1_029, False)


def test_an_empty_log_has_no_times(tmp_path: Path) -> None:
    LogWriter().save(tmp_path, hole_bytes=4_096)
    found = segments.survey(tmp_path)
    assert (found.start, found.end, found.first_ms, found.last_ms) == (0, 0, 0, 0)


def test_damage_before_the_tail_of_the_last_segment_is_an_error(tmp_path: Path) -> None:
    log = three_segments()
    directory = log.save(tmp_path, hole_bytes=4_096)
    last = sorted(directory.iterdir())[-1]
    flip(last, 30)
    with pytest.raises(RecordCorrupt, match=rf"position {int(last.stem)} in segment {last.name}.*checksum"):
        segments.survey(tmp_path)


def test_missing_bytes_between_segments_are_an_error(tmp_path: Path) -> None:
    directory = three_segments().save(tmp_path)
    first = min(directory.iterdir())
    first.write_bytes(first.read_bytes()[:-7])
    with pytest.raises(LogCorrupt, match=rf"{first.name}.*7 bytes from position"):
        segments.survey(tmp_path)


def test_a_foreign_file_among_the_segments_is_an_error(tmp_path: Path) -> None:
    directory = three_segments().save(tmp_path)
    (directory / "notes.log").write_text("mine")
    with pytest.raises(LogCorrupt, match=r"notes\.log is not a segment"):
        segments.survey(tmp_path)


def test_a_size_that_cannot_be_is_an_error_where_records_should_go_on(tmp_path: Path) -> None:
    log = three_segments()
    directory = log.save(tmp_path)
    first = min(directory.iterdir())
    at = recordscan.walk(first.read_bytes())[0][4]
    data = bytearray(first.read_bytes())
    data[at : at + 4] = (7).to_bytes(4, "little")
    first.write_bytes(data)
    segment = segments.survey(tmp_path).segments[0]
    with pytest.raises(RecordCorrupt, match=rf"position {4_096 + at} in segment {first.name}.*size 7"):
        list(segments.blocks(*segment[:2], segment.base, segment.stop))


@pytest.mark.parametrize("block_bytes", [24, 60, 200, 10_000])
def test_blocks_of_any_size_hold_every_record_once(tmp_path: Path, block_bytes: int) -> None:
    log = three_segments()
    log.save(tmp_path)
    found = [
        block.position + offset
        for segment in segments.survey(tmp_path).segments
        for block in segments.blocks(*segment[:2], segment.base, segment.stop, block_bytes=block_bytes)
        for offset in block.offsets.tolist()
    ]
    assert found == [each.position for each in log.records()]


@pytest.mark.parametrize("partition_bytes", [1, 100, 10_000])
def test_partitions_are_split_between_records_and_cover_the_log(tmp_path: Path, partition_bytes: int) -> None:
    log = three_segments()
    log.save(tmp_path)
    starts = {each.position for each in log.records()}
    for segment in segments.survey(tmp_path).segments:
        parts = list(segments.split(segment, partition_bytes))
        assert [start for start, _ in parts] == [segment.base, *(stop for _, stop in parts[:-1])]
        assert parts[-1][1] == segment.stop
        assert starts.issuperset(start for start, _ in parts)
        assert all(stop - start >= partition_bytes for start, stop in parts[:-1])


def test_a_survey_beside_a_writer_sees_only_whole_records(tmp_path: Path) -> None:
    """A writer writes each record in two pieces, while the test surveys the log again and again."""
    log = three_segments()
    path = max(log.save(tmp_path, hole_bytes=1_000_000).iterdir())
    parts = [record.encode(Kind.MESSAGE, b"live", bytes(1_000), store_ms=2_000 + number) for number in range(400)]
    ends = {log.end + len(parts[0]) * number for number in range(len(parts) + 1)}

    def write() -> None:
        with path.open("r+b", buffering=0) as file:
            offset = log.end - int(path.stem)
            for part in parts:
                os.pwrite(file.fileno(), part[:500], offset)
                os.pwrite(file.fileno(), part[500:], offset + 500)
                offset += len(part)

    writer = Thread(target=write)
    writer.start()
    found = [segments.survey(tmp_path).end]
    while writer.is_alive():
        found.append(segments.survey(tmp_path).end)
    writer.join()
    found.append(segments.survey(tmp_path).end)
    assert found == sorted(found)
    assert ends.issuperset(found)
    assert found[-1] == max(ends)


def test_a_survey_goes_on_where_a_start_of_the_node_has_cut_the_last_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = three_segments()
    last = max(log.save(tmp_path).iterdir())
    cut = list(log.records())[25].position
    find_tail = segments.find_tail

    def cutting(path: str, base: int, known: int | None = None) -> segments.LogTail:
        if path == str(last):
            content = last.read_bytes()
            (last.parent / f"{cut:020d}.log").write_bytes(content[cut - int(last.stem) :])
            last.write_bytes(content[: cut - int(last.stem)])
        return find_tail(path, base, known)

    content = last.read_bytes()
    for is_survey in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(segments, "find_tail", cutting)
            assert (segments.survey(tmp_path).end if is_survey else segments.end_of(tmp_path)) == log.end
        (last.parent / f"{cut:020d}.log").unlink()
        last.write_bytes(content)


def test_a_survey_leaves_out_what_retention_deletes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = three_segments()
    first, second, _ = sorted(log.save(tmp_path).iterdir())
    stat = os.stat

    def deleting(path: str, **more: object) -> os.stat_result:
        if path == str(second):
            first.unlink()
            second.unlink()
        return stat(path, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", deleting)
    found = segments.survey(tmp_path)
    assert (found.start, found.end, len(found.segments)) == (log.end - len(log.segments[2]), log.end, 1)


def test_an_earlier_end_hides_what_came_after_it(tmp_path: Path) -> None:
    log = three_segments()
    log.save(tmp_path)
    ends = [each.position for each in log.records()]
    found = segments.survey_until(tmp_path, ends[15])
    assert [segment.stop for segment in found] == [4_096 + len(log.segments[0]), ends[15]]


def test_a_topic_is_read_by_position_while_the_log_has_it(tmp_path: Path) -> None:
    log = three_segments()
    log.save(tmp_path)
    found = segments.survey(tmp_path).segments
    positions = [each.position for each in log.records()]
    assert segments.topic_at(found, positions[12]) == "sensors/12/temp"
    assert segments.topic_at(found, 0) is None


@pytest.mark.parametrize("number", [3, 13, 29])
def test_a_record_that_the_disk_can_not_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    log = three_segments()
    log.save(tmp_path, hole_bytes=5_000)
    whole = segments.survey(tmp_path)
    segment = whole.segments[number // 10]
    data = Path(segment.path).read_bytes()
    bad = recordscan.walk(data)[0][number % 10] + 5
    pread = os.pread

    def failing(fd: int, size: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}") != segment.path or not offset <= bad < offset + size:
            return pread(fd, size, offset)
        if bad == offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, bad - offset, offset)  # as the kernel: the bytes before, and the error with the next call

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(RecordCorrupt, match=rf"{segment.base + bad - 5} in segment .*can't read it \(Input/output error\)"):
        list(segments.blocks(segment.path, segment.base, segment.base, segment.stop))
    if number == 29:
        with pytest.raises(RecordCorrupt, match="Input/output error"):
            segments.survey(tmp_path)
