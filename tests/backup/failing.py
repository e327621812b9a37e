"""File operations that end at a chosen moment: by the death of the process, or with a full disk."""

from __future__ import annotations

import errno
from pathlib import Path

from penstock.backup.copying import SystemCopyFiles
from penstock.store.files import File, Mode


class Killed(BaseException):
    """Stands for the death of the process. Nothing may handle it."""


class FailingFiles(SystemCopyFiles):
    """The files of the operating system, whose changes end after some calls.

    Parameters:
        calls: number of changing calls that succeed.
        is_full: whether the disk is full then, so that files can still be deleted; else the process is dead.
    """

    def __init__(self, calls: int, *, is_full: bool = False) -> None:
        super().__init__()
        self.left = calls
        self._is_full = is_full

    @property
    def has_failed(self) -> bool:
        return self.left < 0

    def count(self, *, takes_room: bool = True) -> None:
        if self._is_full and not takes_room:
            return
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device") if self._is_full else Killed

    def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o640) -> File:
        file = super().open(path, mode, permissions=permissions) if mode is Mode.READ else None
        if file is None:
            self.count()
            file = super().open(path, mode, permissions=permissions)
        return _FailingFile(file, self)

    def rename(self, old: Path, new: Path) -> None:
        self.count()
        super().rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        self.count()
        super().link(old, new)

    def unlink(self, path: Path) -> None:
        self.count(takes_room=False)
        super().unlink(path)

    def mkdir(self, path: Path) -> None:
        self.count()
        super().mkdir(path)

    def rmtree(self, path: Path) -> None:
        for name in self.names(path):
            if self.is_directory(path / name):
                self.rmtree(path / name)
            else:
                self.unlink(path / name)
        self.count(takes_room=False)
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        self.count(takes_room=False)
        super().sync_directory(path)

    def clone(self, old: Path, new: Path, permissions: int) -> bool:
        return False


class _FailingFile:
    """An open file, half of whose last write reaches the disk."""

    def __init__(self, file: File, files: FailingFiles) -> None:
        self._file = file
        self._files = files
        self.pread = file.pread
        self.size = file.size
        self.data_from = file.data_from
        self.block_bytes = file.block_bytes
        self.fileno = file.fileno
        self.close = file.close

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int, /) -> int:
        try:
            self._files.count()
        except BaseException:
            self._file.pwrite(data[: len(data) // 2], offset)
            raise
        return self._file.pwrite(data, offset)

    def fdatasync(self) -> None:
        self._files.count(takes_room=False)
        self._file.fdatasync()

    def truncate(self, size: int, /) -> None:
        self._files.count()
        self._file.truncate(size)

    def allocate(self, offset: int, length: int, /) -> None:
        self._files.count()
        self._file.allocate(offset, length)
