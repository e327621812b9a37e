"""Copies files with their checksums, at a bounded rate, and makes the copies durable."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.backup.errors import BackupFailed
from penstock.store.files import File, Files, Mode, SystemFiles, write_all
from penstock.store.record import checksum

CHUNK_BYTES = 1024 * 1024

SYNC_BYTES = 8 * 1024 * 1024
"""Bytes that are written before the next sync. A large sync would hold up those of the node on the same disk."""

_FICLONE = 0x40049409
_CANNOT_CLONE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ETXTBSY, errno.EPERM)
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES)


class Identity(NamedTuple):
    """What tells a file that was not changed. Two files with the same identity have the same content."""

    size: int
    inode: int
    mtime_ns: int


class CopyFiles(Files, Protocol):
    """The file operations that backups need besides those of the store."""

    def identity(self, path: Path) -> Identity:
        """Return the identity of a file. Raises OSError."""

    def is_directory(self, path: Path) -> bool:
        """Return whether a name is that of a directory."""

    def clone(self, old: Path, new: Path, permissions: int) -> bool:
        """Make a new file that shares the blocks of another one until either is written. Return False, and leave no file,
        where the file system can't. Raises OSError."""


class SystemCopyFiles(SystemFiles):
    """The files of the operating system."""

    def identity(self, path: Path) -> Identity:
        found = path.stat()
        return Identity(found.st_size, found.st_ino, found.st_mtime_ns)

    def is_directory(self, path: Path) -> bool:
        return path.is_dir() and not path.is_symlink()

    def clone(self, old: Path, new: Path, permissions: int) -> bool:
        source = os.open(old, os.O_RDONLY)
        try:
            target = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, permissions)
            try:
                fcntl.ioctl(target, _FICLONE, source)
            except OSError as error:
                os.unlink(new)
                if error.errno not in _CANNOT_CLONE:
                    raise
                return False
            finally:
                os.close(target)
        finally:
            os.close(source)
        return True


class CopyMeter(Protocol):
    """Shows how far a command has got."""

    def expect(self, size: int, what: str) -> None:
        """Begin a step that processes `size` bytes; 0 if nobody knows."""

    def advance(self, size: int) -> None:
        """Note that `size` more bytes are processed."""


class Pace:
    """Bounds the rate of a copy.

    Parameters:
        bytes_per_s: the bound; 0 for none.
        monotonic_s, sleep: measure and pass the time.
    """

    def __init__(
        self,
        bytes_per_s: float = 0,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._monotonic_s = monotonic_s
        self._sleep = sleep
        self._free_s = monotonic_s()
        """Time at which the next bytes may be read."""

    def wait(self, size: int) -> None:
        """Wait until `size` more bytes are within the bound. A pause of the caller earns no burst."""
        if self._bytes_per_s:
            now_s = self._monotonic_s()
            if self._free_s > now_s:
                self._sleep(self._free_s - now_s)
            self._free_s = max(self._free_s, now_s) + size / self._bytes_per_s


class _Target(NamedTuple):
    """The new file of a copy."""

    file: File
    path: Path


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in an error of a call that knows a descriptor only."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class Copier:
    """Copies files, and reads their checksums.

    Parameters:
        files: have sources and copies.
        meter: is told of each piece.
        pace: bounds the rate.
    """

    def __init__(self, files: CopyFiles, meter: CopyMeter, pace: Pace) -> None:
        self._files = files
        self._meter = meter
        self._pace = pace

    def checksum_of(self, path: Path, size: int) -> int:
        """Return the checksum of the first `size` bytes of a file. Raises BackupFailed if it has fewer, and OSError."""
        return self._process(path, size, None)

    def copy(self, old: Path, new: Path, size: int, *, permissions: int = 0o600, may_link: bool = False) -> int:
        """Copy the first `size` bytes of a file to a new one, which is durable then; return their checksum.

        The copy shares the blocks of the old file where the file system can do that. With `may_link`, it is a hard link if
        possible. The caller must sync the directory.

        Raises:
            BackupFailed: the file has fewer bytes.
            OSError: a file can't be read or written.
        """
        files = self._files
        if may_link and files.size(old) == size and self._link(old, new):
            return self.checksum_of(new, size)
        if files.clone(old, new, permissions):
            file = files.open(new, Mode.WRITE)
            try:
                file.truncate(size)
                file.fdatasync()
            finally:
                file.close()
            return self.checksum_of(new, size)
        file = files.open(new, Mode.NEW, permissions=permissions)
        try:
            found = self._process(old, size, _Target(file, new))
            with _naming(new):
                file.fdatasync()
            with suppress(OSError):  # the copy need not stay in the memory that the node could use
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            file.close()
        return found

    def _link(self, old: Path, new: Path) -> bool:
        try:
            self._files.link(old, new)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            return False
        return True

    def _process(self, path: Path, size: int, target: _Target | None) -> int:
        found = at = unsynced = 0
        source = self._files.open(path)
        try:
            while at < size:
                wanted = min(CHUNK_BYTES, size - at)
                self._pace.wait(wanted)
                with _naming(path):
                    data = source.pread(wanted, at)
                if not data:
                    raise BackupFailed(
                        f"{path} has {at} bytes, but {size} were expected; it was changed meanwhile, so try again"
                    )
                found = checksum(data, found)
                if target is not None:
                    with _naming(target.path):
                        write_all(target.file, data, at)
                        unsynced += len(data)
                        if unsynced >= SYNC_BYTES:
                            target.file.fdatasync()
                            unsynced = 0
                at += len(data)
                self._meter.advance(len(data))
        finally:
            source.close()
        return found
