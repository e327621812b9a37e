"""A small file system of its own, for tests that fill a disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted file system of a few MiB.

    Parameters:
        path: where it is mounted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self, left: int = 0) -> None:
        """Take all free bytes except `left`."""
        with self._filler.open("ab") as file:
            self._allocate(file.fileno(), self.free() - left)

    def _allocate(self, fd: int, size: int) -> None:
        at = os.fstat(fd).st_size
        while size >= 4096:  # what is free is an estimate: the file's own metadata takes some
            try:
                os.posix_fallocate(fd, at, size)
            except OSError:
                size //= 2
            else:
                at, size = at + size, min(size, self.free())

    def free(self) -> int:
        """Return the number of free bytes."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def clear(self) -> None:
        """Give back what `fill` has taken."""
        self._filler.unlink()


@contextmanager
def small_tmpfs(path: Path, size: str = "64m") -> Iterator[SmallDisk]:
    """Mount a tmpfs. Only root can; the test is skipped for others."""
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, capture_output=True)


@contextmanager
def small_ext4(path: Path, image: Path, size: int = 64 * 1024 * 1024) -> Iterator[SmallDisk]:
    """Mount an ext4 from an image file. Only root can, with loop devices; the test is skipped for others."""
    path.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(size)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mkfs.ext4 does not work here: {error}")
    _mount("-o", "loop", str(image), str(path))
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, capture_output=True)


def _mount(*arguments: str) -> None:
    if os.geteuid():
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run(["mount", *arguments], check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
