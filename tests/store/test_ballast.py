"""The ballast: how large it is, when it is restored, and that it goes when room is needed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.store.files import File, Mode, SystemFile, SystemFiles, Usage
from penstock.store.options import GIB, MIB
from penstock.store.space.ballast import BASE_BYTES, Ballast, Ballasts, release_ballast
from penstock.store.space.space import Space
from tests.store.wiring import close, open_store

LARGE = Usage(50 * GIB, 100 * GIB)


class NoRoom(SystemFiles):
    """Files for which the system has room for `left` bytes at a time."""

    left = 0

    def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o640) -> File:
        files = self

        class Limited(SystemFile):
            def allocate(self, offset: int, length: int, /) -> None:
                super().allocate(offset, min(length, files.left) or 1)
                if length > files.left:
                    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        return Limited(os.open(path, mode.value, permissions))


@pytest.mark.parametrize(
    ("log_bytes", "usage", "reserve", "missing"),
    [
        (0, LARGE, GIB, BASE_BYTES),
        (10 * MIB, LARGE, GIB, 10 * MIB + BASE_BYTES),
        (GIB, LARGE, GIB, 96 * MIB),
        (GIB, Usage(300 * MIB, 320 * MIB), 0, 20 * MIB),
        (GIB, Usage(GIB, 100 * GIB), GIB, 0),
        (GIB, Usage(GIB * 10 // 9 + 97 * MIB, 100 * GIB), GIB, 96 * MIB),
        (GIB, Usage(GIB - 1, 100 * GIB), GIB, 96 * MIB),
        (GIB, Usage(300 * MIB, 100 * GIB), GIB, 300 * MIB - 256 * MIB * 10 // 9),
        (GIB, Usage(256 * MIB - 1, 100 * GIB), GIB, 96 * MIB),
        (GIB, Usage(90 * MIB, 100 * GIB), GIB, 45 * MIB),
        (GIB, Usage(MIB // 4, 100 * GIB), GIB, 0),
        (GIB, Usage(MIB, 100 * GIB), 0, MIB // 2),
    ],
)
def test_it_is_as_large_as_the_log_and_never_makes_the_level_worse(
    tmp_path: Path, log_bytes: int, usage: Usage, reserve: int, missing: int
) -> None:
    ballast = Ballast(tmp_path, 96 * MIB)
    assert ballast.missing(log_bytes, usage, reserve) == missing


def test_it_grows_with_the_log_by_half_at_least_and_keeps_its_size_across_starts(tmp_path: Path) -> None:
    sizes = [4, 4, 6, 6, 10, 16, 16]
    for log_bytes, size in zip([0, 100, 2 * MIB, 4 * MIB, 6 * MIB, GIB, 2 * GIB], (each * MIB for each in sizes), strict=True):
        ballast = Ballast(tmp_path, 16 * MIB)
        missing = ballast.missing(log_bytes, LARGE, GIB)
        if missing:
            ballast.fill(missing)
        assert ballast.bytes == size == ballast.path.stat().st_size
        assert ballast.path.stat().st_blocks * 512 >= size, "a hole would keep no room"


def test_a_fill_that_finds_no_room_changes_nothing(tmp_path: Path) -> None:
    files = NoRoom()
    ballast = Ballast(tmp_path, 8 * MIB, files=files)
    files.left = 2 * MIB
    ballast.fill(MIB)
    ballast.fill(4 * MIB)
    assert ballast.bytes == MIB == ballast.path.stat().st_size


def test_an_option_that_was_lowered_makes_it_smaller(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    space = Space(tmp_path)
    space.measure()
    for bytes_max in (2 * MIB, MIB, 0):
        ballasts = Ballasts(tmp_path, tmp_path / "index", bytes_max)
        while ballasts.are_due(GIB, space):
            ballasts.fill()
        assert ballasts.bytes == bytes_max
    assert not (tmp_path / "ballast").exists()


def test_a_start_that_finds_no_room_releases_those_of_log_and_index(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    for directory in (tmp_path, tmp_path / "index"):
        Ballast(directory, MIB).fill(MIB)
    assert release_ballast(tmp_path) == 2 * MIB
    assert release_ballast(tmp_path) == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["index"]


@pytest.mark.parametrize(("error", "stays"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EMFILE, True)])
def test_a_full_disk_in_rocksdb_releases_it(tmp_path: Path, error: int, stays: bool) -> None:
    store = open_store(tmp_path / "0")
    Ballast(tmp_path / "0", MIB).fill(MIB)
    store.index.on_full(OSError(error, os.strerror(error)))
    assert (tmp_path / "0" / "ballast").exists() is stays
    close(store)
