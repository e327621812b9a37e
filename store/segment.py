"""One file of the CommitLog. It is written at its end, read through a memory map, and sealed when it is full."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.store.errors import LogCorrupt

NAME_DIGITS = 20
SUFFIX = ".log"

UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV, errno.ENOSYS)
"""Errors of file systems that can't allocate ahead. (glibc then writes a zero into each block, which has the same effect.)"""

WRITE_BYTES = 64 * 1024
"""Maximum number of bytes that one call writes. For larger writes Linux 6 allocates page cache in large pieces, which costs
several times as much per byte (see `python -m bench store --only append`)."""

SCAN_BYTES = 1024 * 1024
"""Bytes that the search for a torn tail examines in one step."""


def sync_directory(path: Path) -> None:
    """Make the list of files in the directory `path` durable: a synced file can still lose its name. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def segment_name(base: int) -> str:
    """Return the file name of the segment whose first byte is at position `base` of the log."""
    return f"{base:0{NAME_DIGITS}d}{SUFFIX}"


def segment_base(path: Path) -> int:
    """Return the position that the file name of a segment states.

    Raises:
        LogCorrupt: `segment_name` does not make such names.
    """
    stem = path.name.removesuffix(SUFFIX)
    if len(stem) != NAME_DIGITS or not stem.isdigit():
        raise LogCorrupt(f"{path} is not a segment, whose name has {NAME_DIGITS} digits and {SUFFIX}; move the file away")
    return int(stem)


class Segment:
    """One segment file.

    The open segment is extended with a hole to `capacity` bytes, so that one map serves all readers while the file fills. Its
    data ends where a size field is 0. A sealed segment is cut to its real size. The descriptor and the map are released by
    `close`, or when the last reference to the segment goes.

    Parameters:
        path: of the file.
        capacity: bytes that the file may hold, at least 1. Of a sealed segment it is the size.
        writable: whether to open the file for writing and extend it to `capacity`.
    """

    __slots__ = ("base", "capacity", "fd", "map", "path", "view")

    def __init__(self, path: Path, capacity: int, *, writable: bool) -> None:
        self.fd = -1  # `__del__` needs it when the file can't be opened
        self.path = path
        self.base = segment_base(path)
        self.capacity = capacity
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY, 0o640)
        if writable and os.fstat(self.fd).st_size < capacity:
            os.ftruncate(self.fd, capacity)
        self.map = mmap.mmap(self.fd, capacity, prot=mmap.PROT_READ)
        self.view = memoryview(self.map)

    def allocate(self, offset: int, length: int) -> None:
        """Make the file system reserve room for `length` bytes, at least 1, so that a `write` there finds room.

        A file system that can't reserve room does nothing; then a `write` may find the disk full.

        Raises:
            OSError: there is no room (ENOSPC, EDQUOT), or the disk fails.
        """
        try:
            os.posix_fallocate(self.fd, offset, length)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise

    def write(self, data: bytes, offset: int) -> None:
        """Write all of `data` at `offset`, with as many calls as the kernel needs. Raises OSError (ENOSPC, EIO)."""
        written = os.pwrite(self.fd, data, offset) if len(data) <= WRITE_BYTES else 0
        while written < len(data):
            written += os.pwrite(self.fd, memoryview(data)[written : written + WRITE_BYTES], offset + written)

    def cut(self, size: int) -> None:
        """Cut the file to `size` bytes. The map stays valid below `size`."""
        os.ftruncate(self.fd, size)
        self.capacity = size

    def data_end(self, offset: int) -> int:
        """Return the offset after the last byte from `offset` on that isn't zero; `offset` when all of them are zero."""
        last = offset
        for start, stop in self._extents(offset):
            for at in range(start, stop, SCAN_BYTES):
                held = len(self.map[at : min(at + SCAN_BYTES, stop)].rstrip(b"\0"))
                last = at + held if held else last
        return last

    def clear_from(self, offset: int) -> None:
        """Turn everything from `offset` on into a hole again.

        Recovery clears a torn tail this way, because the rest of an old record must not follow the next one.
        """
        os.ftruncate(self.fd, offset)
        os.ftruncate(self.fd, self.capacity)

    def _extents(self, offset: int) -> Iterator[tuple[int, int]]:
        """Yield start and end of each range from `offset` on that has data. The hole of an open segment needs no reading."""
        while True:
            try:
                start = os.lseek(self.fd, offset, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    return
                raise
            offset = os.lseek(self.fd, start, os.SEEK_HOLE)
            yield start, offset

    def close(self) -> None:
        """Close the file. The map is released with the last reference to this segment or to a view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()
