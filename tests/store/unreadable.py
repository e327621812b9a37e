"""A disk with blocks that it can't read: files whose reads fail as the kernel fails them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from penstock.store.files import STEP_BYTES, File, Mode, SystemFile, SystemFiles


class UnreadableFile(SystemFile):
    """A file of which some blocks can't be read. A read that begins before one ends there; one that begins in it fails.

    Parameters:
        fd: descriptor of the file.
        blocks: numbers of the blocks. The test may change them.
    """

    __slots__ = ("_blocks", "_genuine")

    def __init__(self, fd: int, blocks: set[int]) -> None:
        super().__init__(fd)
        self._blocks = blocks
        self._genuine = self.pread
        self.pread = self._pread

    def fileno(self) -> int:
        raise OSError(errno.EBADF, "a simulated file has no descriptor")

    def _pread(self, size: int, offset: int) -> bytes:
        last = max(offset + size - 1, offset) // STEP_BYTES
        bad = [block for block in self._blocks if offset // STEP_BYTES <= block <= last]
        if not bad or not size:
            return self._genuine(size, offset)
        readable = min(bad) * STEP_BYTES - offset
        if readable <= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._genuine(readable, offset)


class UnreadableFiles(SystemFiles):
    """The files of the operating system, of which some blocks of 4 KiB can't be read. A new file has none of those."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, set[int]] = {}
        """Numbers of the blocks, by inode."""

    def fail(self, path: Path, block: int) -> None:
        """Let a block of a file be unreadable from now on."""
        self._blocks.setdefault(path.stat().st_ino, set()).add(block)

    def heal(self, path: Path) -> None:
        """Let all blocks of a file be readable again."""
        self._blocks[path.stat().st_ino].clear()

    def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o640) -> File:
        fd = os.open(path, mode.value, permissions)
        blocks = self._blocks.setdefault(os.fstat(fd).st_ino, set())
        if mode is Mode.NEW:
            blocks.clear()
        return UnreadableFile(fd, blocks)
