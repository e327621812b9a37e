"""No file descriptor is left: the store takes that for no failed disk, and goes on when there is one again."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from penstock.store.descriptors import INDEX_FILES_MAX, index_files_max, store_share
from penstock.store.errors import DiskFull
from penstock.store.files import SPARES, File, Mode, SystemFiles
from penstock.store.log.syncmark import SyncMark
from penstock.store.space.space import Level
from penstock.store.store import Store
from tests.store.wiring import bodies, close, durable_queue, open_store, publish


class FewFiles(SystemFiles):
    """Files of which no more can be opened while `is_short`."""

    is_short = False

    def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o640) -> File:
        if self.is_short:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return super().open(path, mode, permissions=permissions)


@contextmanager
def none_left() -> Iterator[None]:
    """Let this process open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def publish_until_full(store: Store, sent: list[str]) -> None:
    while True:
        publish(store, "plant/1", f"{len(sent)}")
        sent.append(f"{len(sent)}")


@pytest.mark.parametrize(("limit", "files"), [(512, 64), (1024, 128), (4096, 512), (1 << 20, INDEX_FILES_MAX)])
def test_rocksdb_may_keep_an_eighth_of_the_descriptors_open(limit: int, files: int) -> None:
    assert index_files_max(limit) == files
    assert files < store_share(limit) < limit


def test_spare_descriptors_serve_when_the_process_has_none_left(tmp_path: Path) -> None:
    files = SystemFiles()
    files.open(tmp_path / "first", Mode.WRITE).close()  # it also fills the reserve
    opened = []
    with none_left():
        files.sync_directory(tmp_path)
        files.sync_directory(tmp_path)
        opened += [files.open(tmp_path / str(number), Mode.WRITE) for number in range(SPARES)]
        with pytest.raises(OSError, match="Too many open files"):
            files.open(tmp_path / "more", Mode.WRITE)
    for file in opened:
        file.close()
    files.open(tmp_path / "first").close()
    with none_left():
        files.sync_directory(tmp_path)


def test_a_segment_that_gets_no_descriptor_is_begun_later(tmp_path: Path) -> None:
    files = FewFiles()
    store = open_store(tmp_path / "0", files=files, segment_bytes=1024)
    sent = ["first"]
    publish(store, "plant/1", "first")
    files.is_short = True
    with pytest.raises(DiskFull, match="too few file descriptors"):
        publish_until_full(store, sent)
    store.commit()
    store.measure_disk()
    assert store.space.level is Level.EXHAUSTED
    assert "Too many open files" in store.space.why()
    files.is_short = False
    store.measure_disk()
    publish(store, "plant/1", "after")
    store.commit()
    assert bodies(store, durable_queue(store, "plant/#")) == [*sent, "after"]
    close(store)


def test_a_sync_mark_that_can_not_be_opened_is_written_later(tmp_path: Path) -> None:
    files = FewFiles()
    mark = SyncMark(tmp_path, files=files)
    files.is_short = True
    mark.write(100)
    assert mark.position == 0
    files.is_short = False
    mark.write(100)
    assert mark.position == 100
    mark.close()


def test_a_sealed_segment_is_read_in_place_of_others_that_are_open(tmp_path: Path) -> None:
    class OneAtATime(SystemFiles):
        """Files that give a segment a descriptor only when no other one is open."""

        limits = False

        def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o640) -> File:
            if self.limits and store.log._chain._opened:
                raise OSError(errno.ENFILE, os.strerror(errno.ENFILE), str(path))
            return super().open(path, mode, permissions=permissions)

    files = OneAtATime()
    store = open_store(tmp_path / "0", files=files, segment_bytes=1024)
    sent = [str(number) for number in range(100)]
    for body in sent:
        publish(store, "plant/1", body)
    store.commit()
    queue = durable_queue(store, "plant/#")
    store.log._chain._opened.clear()
    files.limits = True
    assert bodies(store, queue) == sent
    files.limits = False
    close(store)
