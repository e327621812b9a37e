"""A disk that fails to write pages, and a kernel that keeps them in memory as if they were on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from penstock.store.files import STEP_BYTES, File, Mode, SystemFile, SystemFiles


class Pages:
    """The pages of one file whose content in memory is not on disk, with what the disk has in their place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dirty: dict[int, bytes] = {}
        """Pages that the next sync writes."""
        self.lost: dict[int, bytes] = {}
        """Pages that the kernel takes for written."""


class LosingFile(SystemFile):
    """A file whose next sync fails once if its `files` say so. Syncs after that one succeed."""

    __slots__ = ("_files", "_pages")

    def __init__(self, fd: int, files: LosingFiles, pages: Pages) -> None:
        super().__init__(fd)
        self._files = files
        self._pages = pages

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int, /) -> int:
        self._touch(offset, len(data))
        return super().pwrite(data, offset)

    def truncate(self, size: int, /) -> None:
        self._touch(size, 1)
        super().truncate(size)

    def _touch(self, offset: int, size: int) -> None:
        pages = self._pages
        for page in range(offset // STEP_BYTES, (offset + size - 1) // STEP_BYTES + 1):
            if page not in pages.dirty:
                now = self.pread(STEP_BYTES, page * STEP_BYTES).ljust(STEP_BYTES, b"\0")
                pages.dirty[page] = pages.lost.pop(page, now)

    def fdatasync(self) -> None:
        pages = self._pages
        if self._files.fails and pages.dirty and pages.path.suffix == ".log":
            self._files.fails = False
            pages.lost |= pages.dirty
            pages.dirty = {}
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        pages.dirty.clear()
        super().fdatasync()


class LosingFiles(SystemFiles):
    """The files of the operating system, with a disk that can fail to write the pages of a segment."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        """Whether the next sync of a segment fails, and leaves its pages in memory only."""
        self._pages: dict[int, Pages] = {}

    def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o640) -> File:
        fd = os.open(path, mode.value, permissions)
        inode = os.fstat(fd).st_ino
        if mode is Mode.NEW or inode not in self._pages:
            self._pages[inode] = Pages(path)
        return LosingFile(fd, self, self._pages[inode])

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        pages = self._pages.get(os.stat(new).st_ino)
        if pages is not None:
            pages.path = new

    def reboot(self) -> None:
        """Forget what is in memory only. No file may be open."""
        for inode, pages in self._pages.items():
            if pages.path.exists() and os.stat(pages.path).st_ino == inode:
                size = pages.path.stat().st_size
                with pages.path.open("r+b") as file:
                    for page, content in {**pages.dirty, **pages.lost}.items():
                        file.seek(page * STEP_BYTES)
                        file.write(content)
                os.truncate(pages.path, size)
        self._pages.clear()
