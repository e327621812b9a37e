"""Copying files with their checksums."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backup.backup import SYSTEM_COPY_FILES
from penstock.backup.copying import CHUNK_BYTES, Copier, Pace
from penstock.backup.errors import BackupFailed
from penstock.store.record import checksum
from tests.backup.failing import FailingFiles
from tests.backup.wiring import Readings

DATA = bytes(range(256)) * (CHUNK_BYTES // 128) + b"end"
"""Two chunks and a bit."""


class PlainFiles(FailingFiles):
    """A file system that can't share blocks."""

    def __init__(self) -> None:
        super().__init__(10**9)


@pytest.fixture(params=["shared blocks where possible", "copied"])
def copier(request: pytest.FixtureRequest) -> Copier:
    files = PlainFiles() if request.param == "copied" else SYSTEM_COPY_FILES
    return Copier(files, Readings(), Pace())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old"
    path.write_bytes(DATA)
    return path


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, len(DATA)])
def test_a_copy_has_the_beginning_of_a_file_and_its_checksum(copier: Copier, old: Path, tmp_path: Path, size: int) -> None:
    assert copier.copy(old, tmp_path / "new", size) == checksum(DATA[:size])
    assert (tmp_path / "new").read_bytes() == DATA[:size]
    assert copier.checksum_of(old, size) == checksum(DATA[:size])
    assert old.read_bytes() == DATA


def test_a_file_that_is_too_short_is_an_error(copier: Copier, old: Path, tmp_path: Path) -> None:
    with pytest.raises(BackupFailed, match=f"has {len(DATA)} bytes, but {len(DATA) + 1} were expected"):
        copier.checksum_of(old, len(DATA) + 1)


def test_a_copy_has_the_permissions_that_are_asked_for(copier: Copier, old: Path, tmp_path: Path) -> None:
    copier.copy(old, tmp_path / "new", 10, permissions=0o600)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


def test_a_whole_file_may_be_linked_and_the_beginning_of_one_is_copied(copier: Copier, old: Path, tmp_path: Path) -> None:
    assert copier.copy(old, tmp_path / "whole", len(DATA), may_link=True) == checksum(DATA)
    assert (tmp_path / "whole").samefile(old)
    copier.copy(old, tmp_path / "part", 10, may_link=True)
    assert not (tmp_path / "part").samefile(old)


def test_where_links_do_not_work_the_file_is_copied(old: Path, tmp_path: Path) -> None:
    class Linkless(PlainFiles):
        def link(self, old: Path, new: Path) -> None:
            raise PermissionError(1, "Operation not permitted")

    Copier(Linkless(), Readings(), Pace()).copy(old, tmp_path / "new", len(DATA), may_link=True)
    assert not (tmp_path / "new").samefile(old)
    assert (tmp_path / "new").read_bytes() == DATA


def test_the_meter_is_told_of_all_bytes(old: Path, tmp_path: Path) -> None:
    meter = Readings()
    Copier(PlainFiles(), meter, Pace()).copy(old, tmp_path / "new", len(DATA))
    assert meter.advanced == len(DATA)


def test_a_pace_bounds_the_rate_and_a_pause_earns_no_burst() -> None:
    now_s = 0.0
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now_s
        slept.append(seconds)
        now_s += seconds

    pace = Pace(100.0, monotonic_s=lambda: now_s, sleep=sleep)
    for _ in range(5):
        pace.wait(50)
    assert slept == [0.5] * 4
    now_s += 60
    pace.wait(50)
    pace.wait(50)
    assert slept == [0.5] * 5


def test_without_a_bound_nobody_waits() -> None:
    pace = Pace(sleep=lambda _: pytest.fail("slept"))
    for _ in range(5):
        pace.wait(2**40)
