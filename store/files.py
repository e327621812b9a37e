"""The file operations of the store, behind one interface: what each call does, and what is on disk after it.

The store, and POP for its secret, reach files only through a `Files` that they get when they are created. A node uses
`SYSTEM_FILES`. A simulation passes an object of its own, which can fail calls, lose what was not synced, and start again.

What a call promises about the disk, and nothing else does:

- The bytes of a file that `pwrite` wrote before `fdatasync` are durable when `fdatasync` returns, and so is the file's size.
  After a failed `fdatasync` nothing is known about them. A later call that succeeds proves nothing about them either: the
  kernel may have dropped the pages, or may keep them in memory as if they were on disk. `Mode.DURABLE` makes each `pwrite`
  durable.
- The names that `open` (of a new file), `rename`, `link`, `unlink` and `mkdir` changed in a directory are durable when a later
  `sync_directory` of that directory returns. Until then a power cut may undo them.
- `rename` replaces an existing file at once: whoever looks, also after a power cut, finds the old file or the new one. The
  bytes of the new one are those that were synced before.
- A killed process loses nothing that a call has done. A power cut may lose any part of what is not durable.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Protocol

WRITE_BYTES = 64 * 1024
"""Maximum number of bytes that one call writes. For larger writes Linux 6 allocates page cache in large pieces, which costs
several times as much per byte (see `python -m bench store --only append`)."""

STEP_BYTES = 4096
"""Bytes that are read at once to find what the disk can't read. Disks fail by sectors of at most this size."""

UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV, errno.ENOSYS)
"""Errors of file systems that can't allocate ahead. (glibc then writes a zero into each block, which has the same effect.)"""

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors that mean that the disk, or the quota of the node, has no room."""

SHORT = (errno.EMFILE, errno.ENFILE)
"""Errors that mean that the process, or the whole system, has no file descriptor left. They say nothing about the disk."""

PASSING = (*FULL, *SHORT)
"""Errors that pass: what they hinder waits, and is done when there is room, or a descriptor. None is a failed disk."""

SPARES = 4
"""Descriptors that `SystemFiles` keeps in reserve."""

LOST_FOUND = "lost+found"
"""Folder at the root of file systems such as ext4, where a data directory or a backup may be. Only root may read it."""

NO_BOOT_ID = bytes(36)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Mode(Enum):
    """How to open a file. The values are flags of the system's `open`."""

    READ = os.O_RDONLY
    """For reading. The file must exist."""
    WRITE = os.O_RDWR | os.O_CREAT
    """For reading and writing. A file that does not exist is created, empty."""
    NEW = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    """For reading and writing an empty file. The content of a file that exists is dropped."""
    DURABLE = os.O_RDWR | os.O_CREAT | os.O_DSYNC
    """As `WRITE`, and each `pwrite` is durable when it returns. One of up to a sector leaves the old bytes or the new ones."""


class Usage(NamedTuple):
    """Free and total bytes of a file system."""

    free: int
    """Bytes that processes without root's privileges can use."""
    total: int


class File(Protocol):
    """An open file. All methods raise OSError where the system does. It is closed with the last reference at the latest."""

    def pread(self, size: int, offset: int, /) -> bytes:
        """Return `size` bytes at `offset`; fewer at the end of the file, and before bytes that can't be read. A call for those
        raises EIO. Bytes never written are zeros."""

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int, /) -> int:
        """Write `data` at `offset`, extending the file if needed; return how many bytes were written, which may be fewer."""

    def fdatasync(self) -> None:
        """Make everything written so far durable. See the head of this module for a failure."""

    def truncate(self, size: int, /) -> None:
        """Cut the file to `size` bytes, or extend it with a hole. It is durable after the next `fdatasync`."""

    def allocate(self, offset: int, length: int, /) -> None:
        """Reserve room for `length` bytes, at least 1, at `offset`, extending the file if needed; a file system without
        such a call does nothing. ENOSPC or EDQUOT: there is no room, and nothing is reserved."""

    def size(self) -> int:
        """Return the number of bytes of the file."""

    def data_from(self, offset: int, /) -> tuple[int, int] | None:
        """Return begin and end of the first range at or after `offset` that may hold bytes other than zeros; None if only a
        hole follows. A file system that knows no holes names all of the rest."""

    def block_bytes(self) -> int:
        """Return the size of the pieces in which the system writes this file: no sync of one piece affects another."""

    def fileno(self) -> int:
        """Return the descriptor, for calls on another process. A simulated file has none and raises OSError."""

    def close(self) -> None:
        """Close the file. A second call does nothing."""


class Files(Protocol):
    """A file system. All methods raise OSError where the system does."""

    def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o600) -> File:
        """Open a file. `permissions` are those of a file that is created."""

    def names(self, directory: Path) -> list[str]:
        """Return the names in a directory, sorted; an empty list if there is no such directory."""

    def exists(self, path: Path) -> bool:
        """Return whether there is a file or directory."""

    def size(self, path: Path) -> int:
        """Return the number of bytes of a file. FileNotFoundError: there is none."""

    def links(self, path: Path) -> int:
        """Return how many names a file has. What has more than one must not be changed in place."""

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or directory another name on the same file system. A file that has the new name is replaced at once."""

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name on the same file system. FileExistsError: the new name is taken."""

    def unlink(self, path: Path) -> None:
        """Delete a name. FileNotFoundError: there is none. An open file can still be used."""

    def mkdir(self, path: Path) -> None:
        """Create a directory with its parents, unless it exists. Only its user may enter it."""

    def rmtree(self, path: Path) -> None:
        """Delete a directory with everything in it."""

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""

    def usage(self, path: Path) -> Usage:
        """Return the usage of the file system that `path` is on."""

    def boot_id(self) -> bytes:
        """Return the 36 bytes that tell this boot of the machine from all others; `NO_BOOT_ID` if the system has none."""


class SystemFile:
    """An open file of the operating system."""

    __slots__ = ("_fd", "pread")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # Bound here, because each record that is read costs one call (see the row `read` of `python -m bench store`).
        self.pread: Callable[[int, int], bytes] = partial(os.pread, fd)

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int, /) -> int:
        return os.pwrite(self._fd, data, offset)

    def fdatasync(self) -> None:
        os.fdatasync(self._fd)

    def truncate(self, size: int, /) -> None:
        os.ftruncate(self._fd, size)

    def allocate(self, offset: int, length: int, /) -> None:
        try:
            os.posix_fallocate(self._fd, offset, length)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def data_from(self, offset: int, /) -> tuple[int, int] | None:
        try:
            start = os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return None
            raise
        return start, os.lseek(self._fd, start, os.SEEK_HOLE)

    def block_bytes(self) -> int:
        return max(os.fstat(self._fd).st_blksize, os.sysconf("SC_PAGE_SIZE"))

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self.pread = _closed
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _closed(_size: int, _offset: int) -> bytes:
    raise OSError(errno.EBADF, os.strerror(errno.EBADF))


class SystemFiles:
    """The files of the operating system.

    The process keeps `SPARES` descriptors in reserve. When it has none left, `open` and `sync_directory` use one of these, and
    the next call that finds a free one restores the reserve. So the store goes on while a part that takes descriptors without
    bounds has to stop.
    """

    _spares: ClassVar[list[int]] = []
    """The reserve, one for all objects of the process: what each kept for itself would stay open."""

    def __init__(self) -> None:
        self._boot_id = b""

    def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o600) -> File:
        return SystemFile(self._open(path, mode.value, permissions))

    def _open(self, path: Path, flags: int, permissions: int = 0) -> int:
        try:
            fd = os.open(path, flags, permissions)
        except OSError as error:
            if error.errno not in SHORT or not self._release_spare():
                raise
            return os.open(path, flags, permissions)
        with suppress(OSError):  # none is free at the moment
            while len(self._spares) < SPARES:
                self._spares.append(os.open(os.devnull, os.O_RDONLY))
        return fd

    def _release_spare(self) -> bool:
        try:
            os.close(self._spares.pop())
        except IndexError:  # all are in use
            return False
        return True

    def names(self, directory: Path) -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []

    def exists(self, path: Path) -> bool:
        return path.exists()

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def links(self, path: Path) -> int:
        return path.stat().st_nlink

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def rmtree(self, path: Path) -> None:
        shutil.rmtree(path)

    def sync_directory(self, path: Path) -> None:
        handle = self._open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def usage(self, path: Path) -> Usage:
        found = os.statvfs(path)
        return Usage(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    def boot_id(self) -> bytes:
        if not self._boot_id:  # it stays the same as long as this process lives
            try:
                self._boot_id = _BOOT_ID.read_bytes().strip()[:36].ljust(36, b"\0")
            except FileNotFoundError:  # not Linux
                self._boot_id = NO_BOOT_ID
        return self._boot_id


SYSTEM_FILES: Final[Files] = SystemFiles()
"""The files of the operating system, for all who are not told otherwise."""


def write_all(file: File, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, with as many calls as the system needs. Raises OSError (ENOSPC, EIO)."""
    written = file.pwrite(data, offset) if len(data) <= WRITE_BYTES else 0
    while written < len(data):
        written += file.pwrite(memoryview(data)[written : written + WRITE_BYTES], offset + written)


def pread_direct(file: File, size: int, offset: int) -> bytes:
    """Return what `File.pread` does for bytes of one block of `STEP_BYTES`, but from the disk and not from memory.

    The system reads several blocks at once. When the disk fails one of them, none of the others can be read from memory.

    Raises:
        OSError: the disk can't read the block, or the file has no descriptor, or its file system no such reads.
    """
    start = offset - offset % STEP_BYTES
    fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, STEP_BYTES) as block:  # memory that is aligned as such reads need it
            count = os.preadv(fd, [block], start)
            return block[offset - start : min(offset - start + size, count)]
    finally:
        os.close(fd)


def read_file(files: Files, path: Path) -> bytes:
    """Return all bytes of a small file. Raises OSError, which names the file; FileNotFoundError if there is none."""
    file = files.open(path)
    try:
        data = file.pread(file.size(), 0)
        while more := file.pread(file.size() - len(data), len(data)):
            data += more
        return data
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        file.close()


def replace_file(files: Files, path: Path, data: bytes | Sequence[bytes], *, permissions: int = 0o600) -> None:
    """Create a file, or replace it, so that at any moment the old file or the whole new one is there, and make it durable.

    A file `<name>.new` may stay behind after a kill; the next call replaces it.

    Args:
        files: has it.
        path: of the file.
        data: its content, or pieces of it: a thread that writes much leaves the interpreter to others after each.
        permissions: of the file.

    Raises:
        OSError: the file can't be written. The old one, if any, is untouched.
    """
    fresh = path.with_name(f"{path.name}.new")
    file = files.open(fresh, Mode.NEW, permissions=permissions)
    try:
        offset = 0
        for piece in (data,) if isinstance(data, bytes) else data:
            write_all(file, piece, offset)
            offset += len(piece)
        file.fdatasync()
    finally:
        file.close()
    files.rename(fresh, path)
    files.sync_directory(path.parent)


def make_directory(files: Files, path: Path) -> None:
    """Create a directory with its parents, unless it exists, and make its name, and those of new parents, durable.

    Where the parent may not be read, it can't be synced, and the name is as durable as the file system makes it.

    Raises:
        OSError: it can't be created.
    """
    path = path.resolve()
    new = [path]
    while not files.exists(new[-1].parent):
        new.append(new[-1].parent)
    files.mkdir(path)
    for each in new:
        with suppress(PermissionError):
            files.sync_directory(each.parent)


def unlink_if_there(files: Files, path: Path) -> bool:
    """Delete a file, unless there is none; return whether there was one. Raises OSError."""
    try:
        files.unlink(path)
    except FileNotFoundError:
        return False
    return True
