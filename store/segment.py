"""One file of the CommitLog: written at its end, read through a memory map, sealed when full."""

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
"""What file systems answer that can't allocate ahead. (glibc then writes a zero into each block, which is as good.)"""

WRITE_BYTES = 64 * 1024
"""What one call writes. Linux 6 takes page cache for larger ones in large pieces, which cost two to four times as much a byte
(measured: 400 kB in one call 1.3 ms, in seven 0.4 ms)."""

SCAN_BYTES = 1024 * 1024
"""Bytes that the search for a torn tail looks at in one step."""


def sync_directory(path: Path) -> None:
    """Make it durable which files `path` has: a file that was synced can still lose its name. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def segment_name(base: int) -> str:
    """Return the file name of the segment whose first byte lies at position `base` of the log."""
    return f"{base:0{NAME_DIGITS}d}{SUFFIX}"


def segment_base(path: Path) -> int:
    """Return the position that a segment's file name states.

    Raises:
        LogCorrupt: the name isn't one that `segment_name` makes.
    """
    stem = path.name.removesuffix(SUFFIX)
    if len(stem) != NAME_DIGITS or not stem.isdigit():
        raise LogCorrupt(f"{path} is not a segment: its name must be {NAME_DIGITS} digits and {SUFFIX}; move the file away")
    return int(stem)


class Segment:
    """One segment file.

    The open segment is extended with a hole up to `capacity` bytes, so that one map serves all readers while the file
    fills: a size field of 0 is where its data ends. A sealed segment is cut to its real size. Its descriptor and map are
    released when `close` is called, or when the last who uses it lets go.

    Parameters:
        path: the file.
        capacity: bytes that the file may hold, at least 1; of a sealed segment, its size.
        writable: open it for writing, and extend it to `capacity`.
    """

    __slots__ = ("base", "capacity", "fd", "map", "path", "view")

    def __init__(self, path: Path, capacity: int, *, writable: bool) -> None:
        self.fd = -1  # for __del__, where the file can't be opened
        self.path = path
        self.base = segment_base(path)
        self.capacity = capacity
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY, 0o640)
        if writable and os.fstat(self.fd).st_size < capacity:
            os.ftruncate(self.fd, capacity)
        self.map = mmap.mmap(self.fd, capacity, prot=mmap.PROT_READ)
        self.view = memoryview(self.map)

    def allocate(self, offset: int, length: int) -> None:
        """Have the file system set room aside: a `write` there does not fail for want of it. About 30 us for 4 MiB.

        Where the file system knows no such thing, nothing happens: a `write` finds out then. `length` is at least 1.

        Raises:
            OSError: there is no room (ENOSPC, EDQUOT), or the disk fails.
        """
        try:
            os.posix_fallocate(self.fd, offset, length)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise

    def write(self, data: bytes, offset: int) -> None:
        """Write all of `data` at `offset`, however often the kernel takes only a part. Raises OSError (ENOSPC, EIO)."""
        written = os.pwrite(self.fd, data, offset) if len(data) <= WRITE_BYTES else 0
        while written < len(data):
            written += os.pwrite(self.fd, memoryview(data)[written : written + WRITE_BYTES], offset + written)

    def cut(self, size: int) -> None:
        """Cut the file to `size` bytes. The map stays valid below that."""
        os.ftruncate(self.fd, size)
        self.capacity = size

    def data_end(self, offset: int) -> int:
        """Return the offset behind the last byte that isn't zero; `offset` where there is none behind it."""
        last = offset
        for start, stop in self._extents(offset):
            for at in range(start, stop, SCAN_BYTES):
                held = len(self.map[at : min(at + SCAN_BYTES, stop)].rstrip(b"\0"))
                last = at + held if held else last
        return last

    def clear_from(self, offset: int) -> None:
        """Turn everything behind `offset` into a hole again.

        That is what recovery does with a torn tail: the next record must not be followed by what is left of an old one.
        """
        os.ftruncate(self.fd, offset)
        os.ftruncate(self.fd, self.capacity)

    def _extents(self, offset: int) -> Iterator[tuple[int, int]]:
        """Yield where the file has data behind `offset`: an open segment is mostly hole, which needs no reading."""
        while True:
            try:
                start = os.lseek(self.fd, offset, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but hole from here on
                    return
                raise
            offset = os.lseek(self.fd, start, os.SEEK_HOLE)
            yield start, offset

    def close(self) -> None:
        """Close the file. The map goes with the last reader that holds this segment or a view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()
