"""Blocks that the disk can't read: who meets one gets an error that names the place, and everything else can still be read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.store.errors import LogCorrupt, RecordUnreadable
from penstock.store.files import STEP_BYTES
from penstock.store.index.index import Index
from penstock.store.log.logreader import read_log
from penstock.store.log.segment import LOG_DIRECTORY
from penstock.store.options import KIB, StoreOptions
from penstock.store.record import Kind
from penstock.store.recovery.repair import QUARANTINE, repair, survey
from tests.pop.wiring import Parts
from tests.store.unreadable import UnreadableFiles

OPTIONS = StoreOptions(segment_bytes=64 * KIB)
NUMBER = 150
BODY_BYTES = 1500

Log = tuple[Path, list[tuple[int, int]]]


def bodies() -> list[bytes]:
    return [b"%d:" % number + bytes([number]) * BODY_BYTES for number in range(NUMBER)]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    """A data directory with several segments, and position and size of each message."""
    data_dir = tmp_path_factory.mktemp("whole") / "data"
    parts = Parts(data_dir, store=OPTIONS)
    parts.publish(*bodies())
    found = [(each.position, each.size) for each in parts.store.log.scan(0) if each.kind == Kind.MESSAGE]
    parts.close()
    return data_dir, found


def blocks(data_dir: Path) -> Iterator[tuple[str, int]]:
    """Yield name of the file and number of each block of the log that has data."""
    for path in sorted((data_dir / LOG_DIRECTORY).iterdir()):
        for block in range((len(path.read_bytes().rstrip(b"\0")) + STEP_BYTES - 1) // STEP_BYTES):
            yield path.name, block


def touched(log: Log, name: str, block: int) -> set[int]:
    """Return the numbers of the messages that have bytes in a block of a segment."""
    data_dir, found = log
    base = int(name.partition(".")[0])
    start = base + block * STEP_BYTES
    stop = min(start + STEP_BYTES, base + (data_dir / LOG_DIRECTORY / name).stat().st_size)
    return {at for at, (position, size) in enumerate(found) if position < stop and start < position + size}


def drained(parts: Parts, group: str, topic_filter: str) -> list[int]:
    numbers: list[int] = []
    while delivered := parts.pop(32, group=group, topic_filter=topic_filter):
        numbers += [int(delivery.body.partition(b":")[0]) for delivery in delivered]
        parts.ack(*(delivery.handle for delivery in delivered), group=group)
    return numbers


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_whichever_block_is_unreadable_readers_leave_out_its_messages_and_no_others(
    log: Log, tmp_path: Path, every: int
) -> None:
    data_dir, found = log
    shutil.copytree(data_dir, tmp_path / "data")
    files = UnreadableFiles()
    parts = Parts(tmp_path / "data", store=OPTIONS, files=files)
    for number, (name, block) in list(enumerate(blocks(data_dir)))[::every]:
        path = tmp_path / "data" / LOG_DIRECTORY / name
        files.fail(path, block)
        left = [at for at in range(NUMBER) if at not in touched(log, name, block)]
        assert drained(parts, f"root{number}", "plant/#") == left
        assert drained(parts, f"filled{number}", "+/1/temperature") == left, "a group whose queue is filled from the log"
        position, size = found[min(touched(log, name, block))] if len(left) < NUMBER else found[0]
        if len(left) < NUMBER:
            with pytest.raises(RecordUnreadable, match=rf"segment {name} .*Input/output error.*penstock repair"):
                parts.store.log.read(position, size)
            assert parts.store.read_intact(position, size) is None
        parts.store.retention.copy(position, size)
        files.heal(path)
        parts.groups.delete(f"root{number}")
        parts.groups.delete(f"filled{number}")
        parts.store.commit()
    parts.close()


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_whichever_block_is_unreadable_a_repair_saves_everything_else(log: Log, tmp_path: Path, every: int) -> None:
    data_dir, found = log
    last = max(path.name for path in (data_dir / LOG_DIRECTORY).iterdir())
    for number, (name, block) in enumerate(blocks(data_dir)):
        if number % (3 if name == last else 8 * every):
            continue
        copy, files = tmp_path / str(number), UnreadableFiles()
        shutil.copytree(data_dir, copy)
        files.fail(copy / LOG_DIRECTORY / name, block)
        if name == last:
            with pytest.raises(LogCorrupt, match=rf"segment {name} .*Input/output error.*penstock repair"):
                Parts(copy, store=OPTIONS, files=files)
        else:
            Index.destroy(copy)
            with pytest.raises(LogCorrupt, match="Input/output error"):
                Parts(copy, store=OPTIONS, files=files)
        (damage,) = survey(copy, files=files).damages
        lost = touched(log, name, block)
        start = int(name.partition(".")[0]) + block * STEP_BYTES
        assert damage.unreadable == min(STEP_BYTES, (copy / LOG_DIRECTORY / name).stat().st_size - block * STEP_BYTES)
        assert damage.position <= start
        assert damage.position + damage.length >= min(start + STEP_BYTES, found[-1][0] + found[-1][1])
        repair(copy, [damage], files=files)
        assert survey(copy, files=files).damages == []
        kept = (copy / QUARANTINE / damage.copy_name).read_bytes()
        whole = (data_dir / LOG_DIRECTORY / name).read_bytes()
        offset = damage.position - int(name.partition(".")[0])
        assert kept == b"".join(
            bytes([byte]) if (offset + at) // STEP_BYTES != block else b"\0"
            for at, byte in enumerate(whole[offset : offset + damage.length])
        )
        parts = Parts(copy, store=OPTIONS, files=files)
        assert drained(parts, "new", "plant/#") == [at for at in range(NUMBER) if at not in lost]
        parts.close()
        shutil.rmtree(copy)


def test_several_blocks_of_one_segment_are_repaired_together(log: Log, tmp_path: Path) -> None:
    data_dir, _ = log
    copy, files = tmp_path / "data", UnreadableFiles()
    shutil.copytree(data_dir, copy)
    name = min(path.name for path in (copy / LOG_DIRECTORY).iterdir())
    lost: set[int] = set()
    for block in (2, 3, 9):
        files.fail(copy / LOG_DIRECTORY / name, block)
        lost |= touched(log, name, block)
    damages = survey(copy, files=files).damages
    assert [damage.unreadable for damage in damages] == [2 * STEP_BYTES, STEP_BYTES]
    repair(copy, damages, files=files)
    parts = Parts(copy, store=OPTIONS, files=files)
    assert drained(parts, "new", "plant/#") == [at for at in range(NUMBER) if at not in lost]
    parts.close()


def test_an_unreadable_tail_is_not_taken_for_a_torn_one(log: Log, tmp_path: Path) -> None:
    data_dir, found = log
    copy, files = tmp_path / "data", UnreadableFiles()
    shutil.copytree(data_dir, copy)
    (copy / "synced").unlink()
    name = max(path.name for path in (copy / LOG_DIRECTORY).iterdir())
    position = found[-1][0] - int(name.partition(".")[0])
    files.fail(copy / LOG_DIRECTORY / name, position // STEP_BYTES)
    with pytest.raises(LogCorrupt, match="Input/output error"):
        Parts(copy, store=OPTIONS, files=files)
    findings = survey(copy, files=files)
    assert (len(findings.damages), findings.torn_bytes) == (1, 0)


def test_inspection_names_the_place_that_it_can_not_read(log: Log, tmp_path: Path) -> None:
    data_dir, _ = log
    files = UnreadableFiles()
    shutil.copytree(data_dir, tmp_path / "data")
    name, block = list(blocks(data_dir))[-2]
    files.fail(tmp_path / "data" / LOG_DIRECTORY / name, block)
    read = []
    with pytest.raises(RecordUnreadable, match=rf"segment {name} .*Input/output error"):
        read += list(read_log(tmp_path / "data", files=files))
    for number, path in enumerate(["synced", "secret"]):
        again = UnreadableFiles()
        again.fail(tmp_path / "data" / path, 0)
        if number:
            with pytest.raises(OSError, match=r"Input/output error.*secret"):
                Parts(tmp_path / "data", store=OPTIONS, files=again)
        else:
            Parts(tmp_path / "data", store=OPTIONS, files=again).close()


def test_a_repaired_segment_keeps_the_zeros_at_its_end(tmp_path: Path) -> None:
    files = UnreadableFiles()
    parts = Parts(tmp_path, store=OPTIONS, files=files)
    positions = parts.publish(*(b"%d:" % number + bytes(9000) for number in range(12)))
    parts.close()
    first = min((tmp_path / LOG_DIRECTORY).iterdir())
    files.fail(first, 3)
    repair(tmp_path, survey(tmp_path, files=files).damages, files=files)
    parts = Parts(tmp_path, store=OPTIONS, files=files)
    lost = {number for number, at in enumerate(positions) if at < 4 * STEP_BYTES and at + 9000 > 3 * STEP_BYTES}
    assert drained(parts, "new", "plant/#") == [number for number in range(12) if number not in lost]
    parts.close()


def test_a_block_of_what_the_next_segment_replaces_need_not_be_readable(log: Log, tmp_path: Path) -> None:
    """A start that was killed has written the tail to a new segment, and did not come to cut the old one."""
    data_dir, _ = log
    copy, files = tmp_path / "data", UnreadableFiles()
    shutil.copytree(data_dir, copy)
    name = min(path.name for path in (copy / LOG_DIRECTORY).iterdir())
    size = (copy / LOG_DIRECTORY / name).stat().st_size
    with (copy / LOG_DIRECTORY / name).open("r+b") as file:
        file.truncate(size + 4 * STEP_BYTES)
        file.seek(size)
        file.write(b"x" * 3 * STEP_BYTES)
    files.fail(copy / LOG_DIRECTORY / name, 2)
    files.fail(copy / LOG_DIRECTORY / name, size // STEP_BYTES + 1)
    repair(copy, survey(copy, files=files).damages, files=files)
    assert (copy / LOG_DIRECTORY / name).stat().st_size == size
    parts = Parts(copy, store=OPTIONS, files=files)
    lost = touched(log, name, 2)
    assert drained(parts, "new", "plant/#") == [at for at in range(NUMBER) if at not in lost]
    parts.close()
