"""The files of the operating system, as the store uses them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from penstock.store.files import (
    NO_BOOT_ID,
    SYSTEM_FILES,
    WRITE_BYTES,
    Mode,
    pread_direct,
    read_file,
    replace_file,
    unlink_if_there,
    write_all,
)

FILES = SYSTEM_FILES


def test_a_file_has_what_was_written_and_zeros_where_nothing_was(tmp_path: Path) -> None:
    file = FILES.open(tmp_path / "a", Mode.WRITE)
    assert file.pwrite(b"data", 10_000) == 4
    file.fdatasync()
    assert file.size() == 10_004
    assert file.pread(4, 9_998) == b"\0\0da"
    assert file.pread(100, 10_002) == b"ta"
    start, stop = file.data_from(0) or (-1, -1)
    assert start <= 10_000 < 10_004 <= stop
    file.truncate(2)
    assert (file.size(), file.data_from(2)) == (2, None)
    file.allocate(0, 8192)
    assert file.size() == 8192
    assert file.block_bytes() >= 512


def test_a_closed_file_can_not_be_used_and_may_be_closed_again(tmp_path: Path) -> None:
    file = FILES.open(tmp_path / "a", Mode.WRITE)
    file.close()
    file.close()
    for use in (lambda: file.pread(1, 0), lambda: file.pwrite(b"x", 0)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            use()


@pytest.mark.parametrize(("mode", "left"), [(Mode.WRITE, b"xld"), (Mode.NEW, b"x"), (Mode.DURABLE, b"xld")])
def test_a_mode_says_whether_the_old_bytes_stay(tmp_path: Path, mode: Mode, left: bytes) -> None:
    (tmp_path / "a").write_bytes(b"old")
    file = FILES.open(tmp_path / "a", mode)
    file.pwrite(b"x", 0)
    file.close()
    assert read_file(FILES, tmp_path / "a") == left


def test_only_an_existing_file_can_be_read(tmp_path: Path) -> None:
    for missing in (FILES.open, FILES.size, FILES.unlink):
        with pytest.raises(FileNotFoundError):
            missing(tmp_path / "a")
    assert not unlink_if_there(FILES, tmp_path / "a")
    assert not FILES.exists(tmp_path / "a")
    assert FILES.names(tmp_path / "a") == []


def test_names_can_be_made_replaced_and_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "x" / "y"
    FILES.mkdir(folder)
    FILES.mkdir(folder)
    for name in ("b", "a"):
        replace_file(FILES, folder / name, [name[:1].encode(), b"", name[1:].encode()])
    FILES.link(folder / "a", folder / "c")
    with pytest.raises(FileExistsError):
        FILES.link(folder / "a", folder / "b")
    FILES.rename(folder / "a", folder / "b")
    FILES.sync_directory(folder)
    assert FILES.names(folder) == ["b", "c"]
    assert read_file(FILES, folder / "b") == b"a"
    assert unlink_if_there(FILES, folder / "c")
    FILES.rmtree(tmp_path / "x")
    assert FILES.names(tmp_path) == []


def test_a_file_is_replaced_as_a_whole_with_the_permissions_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    (tmp_path / "secret.new").write_bytes(b"left by a process that was killed")
    replace_file(FILES, path, b"1", permissions=0o600)
    replace_file(FILES, path, b"22", permissions=0o600)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"22", 0o600)
    assert FILES.names(tmp_path) == ["secret"]


@pytest.mark.parametrize("size", [0, 1, WRITE_BYTES, WRITE_BYTES + 1, 3 * WRITE_BYTES + 5])
def test_all_bytes_are_written_whatever_their_number(tmp_path: Path, size: int) -> None:
    file = FILES.open(tmp_path / "a", Mode.NEW)
    data = bytes(index % 251 for index in range(size))
    write_all(file, data, 3)
    assert file.pread(size + 10, 3) == data


def test_the_usage_and_the_boot_are_plausible(tmp_path: Path) -> None:
    found = FILES.usage(tmp_path)
    assert 0 < found.free <= found.total
    assert len(FILES.boot_id()) == len(NO_BOOT_ID)
    assert FILES.boot_id() == FILES.boot_id()


def test_an_error_of_the_system_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Is a directory") as found:
        FILES.open(tmp_path, Mode.WRITE)
    assert found.value.errno == errno.EISDIR


@pytest.mark.parametrize(("offset", "size"), [(0, 10), (4090, 6), (8192, 4096), (9000, 500), (12_288, 100)])
def test_a_block_can_be_read_past_the_memory_of_the_system(tmp_path: Path, offset: int, size: int) -> None:
    file = FILES.open(tmp_path / "a", Mode.NEW)
    write_all(file, bytes(index % 251 for index in range(12_300)), 0)
    file.fdatasync()
    try:
        found = pread_direct(file, size, offset)
    except OSError as error:
        pytest.skip(f"the file system has no direct reads: {error}")
    assert found == file.pread(size, offset)
