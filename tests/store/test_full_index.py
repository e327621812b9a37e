"""The index finds no room: a flush waits, a write waits for RocksDB, and neither is taken for a failed disk."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from penstock.store.files import File, Mode, SystemFile, SystemFiles, Usage
from penstock.store.index import index as store_index
from penstock.store.index.index import ROOM, Index
from penstock.store.options import GIB, MIB
from penstock.store.space.space import Level, Space
from tests.smalldisk import SmallDisk, small_tmpfs
from tests.store.wiring import open_store, publish


class Quota(SystemFiles):
    """Files for which the system reserves no more room while `error` is set."""

    error = 0

    def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o640) -> File:
        files = self

        class Limited(SystemFile):
            def allocate(self, offset: int, length: int, /) -> None:
                if files.error:
                    raise OSError(files.error, os.strerror(files.error))
                super().allocate(offset, length)

        return Limited(os.open(path, mode.value, permissions))


def put(index: Index, count: int, value: bytes = b"") -> None:
    for number in range(count):
        batch = index.batch()
        batch.put(b"Q%06d" % number, value or os.urandom(10_000))
        index.write(batch)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_flush_without_room_fails_before_rocksdb_notices_and_works_later(tmp_path: Path, error: int) -> None:
    files = Quota()
    index = Index(tmp_path, files=files)
    put(index, 10)
    files.error = error
    for _ in range(2):
        with pytest.raises(OSError, match=os.strerror(error)) as raised:
            index.flush()
        assert raised.value.errno == error
        put(index, 1, b"written all the same")
    assert not (index.path / ROOM).exists()
    files.error = 0
    index.flush()
    index.close()
    again = Index(tmp_path)
    assert again.get(b"Q000000") == b"written all the same"
    again.close()


def test_a_start_deletes_what_a_killed_flush_has_left(tmp_path: Path) -> None:
    Index(tmp_path).close()
    (tmp_path / "index" / ROOM).write_bytes(bytes(MIB))
    index = Index(tmp_path)
    assert not (index.path / ROOM).exists()
    index.close()


def surprised(tmp_path: Path, disk: SmallDisk, monkeypatch: pytest.MonkeyPatch, patience_s: float) -> Index:
    """Return an index whose RocksDB has found no room in a flush, although there was some when the flush asked."""
    index = Index(tmp_path, patience_s=patience_s)
    index.is_wary = True
    put(index, 50)
    disk.fill()
    with monkeypatch.context() as raced:
        raced.setattr(index, "_ask_for_room", lambda size: None)
        with pytest.raises(OSError, match="No space left") as raised:
            index.flush()
    assert raised.value.errno == errno.ENOSPC
    return index


@pytest.mark.slow
def test_a_write_waits_until_rocksdb_has_recovered_from_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_tmpfs(tmp_path / "index") as disk:
        index = surprised(tmp_path, disk, monkeypatch, 20)
        freed: list[OSError] = []

        def free(error: OSError) -> None:
            if not freed:
                disk.clear()
            freed.append(error)

        index.on_full = free
        put(index, 1, b"after")
        assert freed
        index.flush()
        index.close()
        again = Index(tmp_path)
        assert again.get(b"Q000000") == b"after"
        assert again.get(b"Q000049") is not None
        again.close()


def test_a_write_that_has_waited_too_long_fails_as_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_tmpfs(tmp_path / "index") as disk:
        index = surprised(tmp_path, disk, monkeypatch, 0.2)
        with pytest.raises(OSError, match="No space left") as raised:
            put(index, 1, b"after")
        assert raised.value.errno == errno.ENOSPC
        assert index.get(b"Q000049") is not None, "reads go on"
        index.close()


def test_rocksdb_begins_no_flush_by_itself_where_growth_is_heeded(tmp_path: Path) -> None:
    def own_flushes(is_heeded: bool) -> int:
        path = tmp_path / f"{is_heeded}"
        with small_tmpfs(path / "index", "64m") as disk:
            index = Index(path)
            if is_heeded:
                index.on_growth = lambda: index.flush() if index.is_flush_due() else None
            put(index, 600)
            index.close()
            log = (disk.path / "LOG").read_text()
        return log.count('"flush_reason": "Write Buffer Full"')

    assert own_flushes(is_heeded=False) > 0
    assert own_flushes(is_heeded=True) == 0


@pytest.mark.nightly
async def test_a_store_flushes_its_index_before_the_next_turn_if_that_would_be_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    store.start(asyncio.get_running_loop(), lambda error: None)
    housekeeping = store._housekeeping
    assert housekeeping is not None
    housekeeping.stop()
    monkeypatch.setattr(store.index, "_memtable_bytes", 4 * MIB)
    number, most = 0, 0
    while (held := store.index.figures().memtables) >= most and held < 4 * MIB:
        most = held
        for _ in range(100):
            number += 1
            publish(store, f"plant/{number}")
        store.commit()
        await asyncio.sleep(0)
    assert 3 * MIB <= most < 4 * MIB, "the flush began when it was due, and before RocksDB would have begun one"
    await store.close()


def test_want_of_descriptors_in_rocksdb_is_no_damage(tmp_path: Path) -> None:
    index = Index(tmp_path)
    text = "IO error: While open a file for random read: /data/index/000012.sst: Too many open files"
    error = index._error("read", Exception(text))
    assert isinstance(error, OSError)
    assert error.errno == errno.EMFILE
    assert not index.is_damaged
    index.close()


def test_a_flush_needs_free_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Few(SystemFiles):
        left = store_index.DESCRIPTORS_FREE

        def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o640) -> File:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
            return super().open(path, mode, permissions=permissions)

    files = Few()
    index = Index(tmp_path, files=files)
    put(index, 1)
    files.left = store_index.DESCRIPTORS_FREE - 1
    with pytest.raises(OSError, match="Too many open files"):
        index.flush()
    files.left = store_index.DESCRIPTORS_FREE
    index.flush()
    index.close()


def test_the_fuller_of_two_disks_decides_the_level(tmp_path: Path) -> None:
    class TwoDisks(SystemFiles):
        index = Usage(100 * GIB, 100 * GIB)

        def usage(self, path: Path) -> Usage:
            return self.index if path.name == "index" else Usage(100 * GIB, 100 * GIB)

    files = TwoDisks()
    space = Space(tmp_path, reserve_bytes=GIB, files=files)
    space.watch_index(tmp_path / "index")
    for free, level in [
        (2 * GIB, Level.OPEN),
        (GIB - 1, Level.READ_ONLY),
        (GIB // 4 - 1, Level.EXHAUSTED),
        (2 * GIB, Level.OPEN),
    ]:
        files.index = Usage(free, 100 * GIB)
        space.measure()
        assert space.level is level
        assert (str(tmp_path / "index") in space.why()) is (level is not Level.OPEN)
    space.refuse_index(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)))
    space.measure()
    assert space.level is Level.EXHAUSTED
    assert "Disk quota exceeded" in space.why()
    space.index_granted()
    space.measure()
    assert space.why() == "everything can be stored"
