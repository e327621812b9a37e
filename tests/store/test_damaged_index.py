"""A damaged index: a start rebuilds it, and damage that a start misses is reported once and never read as an empty queue."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from penstock.store.errors import IndexDamaged
from penstock.store.index import rocksdb as rocksdb_module
from penstock.store.index.index import DAMAGED, Index
from penstock.store.queues.lightqueue import LightQueue
from penstock.store.store import Store
from tests.gateway.wire import Broker
from tests.store.wiring import Contents, close, contents, fill, open_store, publish

ROUNDS, PER_ROUND = 2, 200


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Contents]:
    """The directory of a stopped node whose index has several SST files, and the contents of its queues."""
    data_dir = tmp_path_factory.mktemp("index") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rocksdb_module, "BLOCK_BYTES", 512)  # many blocks, most of which a start does not read
        store = open_store(data_dir, segment_bytes=1 << 20)
    for topic_filter in ("plant/+", "+/1", "office/#"):
        store.queues.declare(topic_filter, "session:1", "earliest")
    for _ in range(ROUNDS):
        for number in range(PER_ROUND):
            publish(store, f"{('plant', 'office')[number % 2]}/{number % 5}", "x" * 50)
            store.commit()
            publish(store, f"rooms{number}/1", "x")  # with few entries each, so that there are many rows
        fill(store)
        store.index.flush()
    found = contents(store)
    close(store)
    assert len(list((data_dir / "index").glob("*.sst"))) > 1
    return data_dir, found


def copy_of(whole: tuple[Path, Contents], tmp_path: Path) -> Path:
    data_dir = tmp_path / "data"
    shutil.rmtree(data_dir, ignore_errors=True)
    shutil.copytree(whole[0], data_dir)
    return data_dir


def opened(data_dir: Path) -> Store:
    """Open a store as a node does: once more if the first attempt meets damage."""
    try:
        return open_store(data_dir, segment_bytes=1 << 20)
    except IndexDamaged:
        assert (data_dir / DAMAGED).exists()
    store = open_store(data_dir, segment_bytes=1 << 20)
    assert not (data_dir / DAMAGED).exists()
    return store


def read(store: Store) -> Contents | None:
    """Return what the queues hold; if a read meets damage, close the store and return None."""
    try:
        fill(store)
        return contents(store)
    except (IndexDamaged, OSError):
        assert store.index.is_damaged
    store.abandon()
    return None


def check(data_dir: Path, wanted: Contents) -> None:
    """Start twice on a directory, and read everything; each time one read may meet damage that the next start repairs."""
    for _ in range(2):
        store = opened(data_dir)
        found = read(store)
        if found is None:  # The running node met damage: it ends, and the next start rebuilds the index.
            store = opened(data_dir)
            found = read(store)
        assert found == wanted
        close(store)
    assert not (data_dir / DAMAGED).exists()


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    os.truncate(path, 0)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def garble(path: Path) -> None:
    path.write_bytes(Random(path.name).randbytes(path.stat().st_size))


DAMAGES = (delete, empty, halve, garble)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.nightly) for first in range(1, len(DAMAGES)))])
def test_a_start_recovers_everything_whichever_index_file_is_damaged(
    whole: tuple[Path, Contents], tmp_path: Path, first: int
) -> None:
    """The damage is another one from file to file."""
    names = sorted(path.name for path in (whole[0] / "index").iterdir())
    assert {re.split(r"[-.]", name)[0 if "-" in name else -1] for name in names} >= {"MANIFEST", "CURRENT", "sst", "OPTIONS"}
    for number, name in enumerate(names, first):
        data_dir = copy_of(whole, tmp_path)
        DAMAGES[number % len(DAMAGES)](data_dir / "index" / name)
        check(data_dir, whole[1])


@pytest.mark.parametrize("parts", [1, pytest.param(6, marks=pytest.mark.nightly)])
def test_a_start_recovers_everything_whichever_byte_is_flipped(
    whole: tuple[Path, Contents], tmp_path: Path, parts: int
) -> None:
    flipped = 0
    for path in sorted((whole[0] / "index").iterdir()):
        size = path.stat().st_size
        if path.name.startswith(("LOG", "OPTIONS")):
            continue
        for offset in range(size // parts // 2, size, max(size // parts, 1)):
            data_dir = copy_of(whole, tmp_path)
            damaged = data_dir / "index" / path.name
            data = bytearray(damaged.read_bytes())
            data[offset] ^= 0x5A
            damaged.write_bytes(data)
            check(data_dir, whole[1])
            flipped += 1
    assert flipped > 3 * parts


def started_on_hidden_damage(whole: tuple[Path, Contents], tmp_path: Path) -> Store:
    """Return a store whose index has damaged blocks that the start did not read."""
    for percent in range(5, 95, 5):
        data_dir = copy_of(whole, tmp_path)
        flip_a_block(data_dir, percent)
        store = None
        with suppress(IndexDamaged):
            store = open_store(data_dir, segment_bytes=1 << 20)
        if store is None:
            continue
        if any(_is_unreadable(queue) for queue in store.queues):
            (data_dir / DAMAGED).unlink()
            store.index.is_damaged = False
            return store
        store.abandon()
    raise AssertionError("every start met the damage, or no block was damaged")


def _is_unreadable(queue: LightQueue) -> bool:
    try:
        queue.read(0, 10_000)
    except IndexDamaged:
        return True
    return False


def flip_a_block(data_dir: Path, percent: int = 50) -> None:
    """Damage one block of each larger SST file, at the given percentage of its length."""
    large = [path for path in (data_dir / "index").glob("*.sst") if path.stat().st_size > 4_000]
    assert large
    for path in large:
        data = bytearray(path.read_bytes())
        data[len(data) * percent // 100] ^= 0xFF
        path.write_bytes(data)


def test_reading_rows_raises_at_a_damaged_block_instead_of_ending_early(whole: tuple[Path, Contents], tmp_path: Path) -> None:
    data_dir = copy_of(whole, tmp_path)
    before = Index(data_dir, read_only=True)
    count = sum(1 for _ in before.rows(b""))
    assert count > ROUNDS * PER_ROUND
    before.close()
    flip_a_block(data_dir)
    index = Index(data_dir)
    told: list[IndexDamaged] = []
    index.on_damage = told.append
    with pytest.raises(IndexDamaged, match=r"block checksum mismatch.*the next start rebuilds it"):
        list(index.rows(b""))
    assert len(told) == 1
    assert index.is_damaged
    assert "block checksum mismatch" in Index.damage_of(data_dir)
    index.close()


def test_a_read_only_index_does_not_mark_damage(whole: tuple[Path, Contents], tmp_path: Path) -> None:
    data_dir = copy_of(whole, tmp_path)
    flip_a_block(data_dir)
    index = Index(data_dir, read_only=True)
    with pytest.raises(IndexDamaged):
        list(index.rows(b""))
    index.close()
    assert Index.damage_of(data_dir) == ""


async def test_damage_found_by_a_running_store_ends_it_once_and_the_next_start_rebuilds_the_index(
    whole: tuple[Path, Contents], tmp_path: Path
) -> None:
    store = started_on_hidden_damage(whole, tmp_path)
    data_dir = store.data_dir
    failures: list[OSError] = []
    store.start(asyncio.get_running_loop(), failures.append)
    for _ in range(2):
        with pytest.raises(IndexDamaged):
            contents(store)
    assert [failure.errno for failure in failures] == [errno.EIO]
    assert "damaged" in str(failures[0])
    assert store.is_index_damaged
    end = store.log.written
    publish(store, "plant/1", "not committed any more")
    store.commit()
    assert store.log.written == end
    await store.close()
    check(data_dir, whole[1])


@pytest.mark.parametrize("error", ["No space left on device", "Too many open files", "Permission denied"])
def test_errors_other_than_damage_do_not_delete_the_index(
    whole: tuple[Path, Contents], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    data_dir = copy_of(whole, tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise Exception(f"IO error: {error}: While open a file for appending: /x/index/000012.sst")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.store.index.rocksdb.Rdict", refuse)
        with pytest.raises(OSError, match=f"can't be opened: .*{error}"):
            open_store(data_dir)
    assert Index.damage_of(data_dir) == ""
    check(data_dir, whole[1])


@pytest.mark.parametrize(
    ("doing", "is_damage"),
    [
        ("While fsync: /data/rsync/index/000012.sst", False),
        ("While fdatasync: /data/index/MANIFEST-000004", False),
        ("While appending to file: /data/index/000012.sst", False),
        ("While closing file after writing: /data/index/000012.sst", False),
        ("While renaming a file to /data/index/CURRENT: /data/index/000013.dbtmp", False),
        ("While pread offset 8192 len 4096: /data/rsync/index/000012.sst", True),
        ("While open a file for random read: /data/index/000012.sst", True),
    ],
)
def test_a_disk_that_fails_to_write_the_index_is_told_from_damage_and_the_next_start_rebuilds_in_both_cases(
    tmp_path: Path, doing: str, is_damage: bool
) -> None:
    index = Index(tmp_path)
    told: list[IndexDamaged] = []
    index.on_damage = told.append
    error = index._error("flushed", Exception(f"IO error: {doing}: Input/output error"))
    assert isinstance(error, IndexDamaged) == is_damage == bool(told)
    assert is_damage or (isinstance(error, OSError) and error.errno == errno.EIO)
    assert "Input/output error" in Index.damage_of(tmp_path)
    index.close()


async def test_a_store_that_fails_to_write_its_log_has_not_failed_because_of_its_index(
    whole: tuple[Path, Contents], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(copy_of(whole, tmp_path), segment_bytes=1 << 20)
    failures: list[OSError] = []
    store.start(asyncio.get_running_loop(), failures.append)
    store.index._error("flushed", Exception("Corruption: block checksum mismatch"), tell=False)  # of a flush that still runs

    def fail() -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(store.log, "write", fail)
    publish(store, "plant/1", "not written")
    store.commit()
    assert [failure.errno for failure in failures] == [errno.EROFS]
    assert not store.is_index_damaged
    await store.close()


@pytest.mark.parametrize("left", ["mark and index", "mark and discarded", "mark only"])
def test_a_killed_rebuild_starts_again(whole: tuple[Path, Contents], tmp_path: Path, left: str) -> None:
    data_dir = copy_of(whole, tmp_path)
    (data_dir / DAMAGED).write_text("an earlier process met a damaged block\n")
    if left == "mark and discarded":
        (data_dir / "index").rename(data_dir / "index.discarded")
    elif left == "mark only":
        shutil.rmtree(data_dir / "index")
    check(data_dir, whole[1])
    assert not (data_dir / "index.discarded").exists()


async def test_a_node_recovers_everything_from_an_index_with_every_block_damaged(tmp_path: Path) -> None:
    broker = await Broker(tmp_path / "data", {}).start()
    client = await broker.connect("publisher")
    for number in range(200):
        await client.publish(f"plant/{number}", b"kept", 1, retain=True)
    await broker.stop()
    for path in (tmp_path / "data" / "index").glob("*.sst"):
        data = bytearray(path.read_bytes())
        for offset in range(100, len(data), 200):
            data[offset] ^= 0xFF
        path.write_bytes(data)
    broker = await Broker(tmp_path / "data", {}).start()
    client = await broker.connect("subscriber")
    assert await client.subscribe(("plant/+", 1)) == [1]
    assert {(await client.message()).topic for _ in range(200)} == {f"plant/{number}" for number in range(200)}
    await broker.stop()
