"""One file of the CommitLog. It is written at its end, and sealed when it is full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.store.errors import LogCorrupt, RecordUnreadable
from penstock.store.files import STEP_BYTES, Files, Mode, pread_direct, write_all

NAME_DIGITS = 20
SUFFIX = ".log"

SCAN_BYTES = 1024 * 1024
"""Bytes that a search for data reads at once."""


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


def segment_bases(files: Files, directory: Path) -> list[int]:
    """Return the positions of the segments in a directory, in order.

    Raises:
        LogCorrupt: a file with the suffix of segments has another name than `segment_name` makes.
        OSError: the directory can't be read.
    """
    return sorted(segment_base(directory / name) for name in files.names(directory) if name.endswith(SUFFIX))


class Segment:
    """One segment file.

    The open segment is extended with a hole to `capacity` bytes. Its data ends where a size field is 0. A sealed segment is cut
    to its real size. The file is closed by `close`, or when the last reference to the segment goes.

    The open segment has its file open twice. The kernel tells each open file of a failed write-back once. With one open file, a
    sync on another thread or in another process could take the news away from the sync of the node itself, which would then
    take a segment for durable that is not.

    The file is read with calls and not through a memory map, because a block that the disk can't read is an error of a call,
    but a signal that ends the process (SIGBUS) for who touches a map.

    Parameters:
        files: has the file.
        path: of the file.
        capacity: bytes that the file may hold, at least 1. Of a sealed segment it is the size.
        writable: whether to open the file for writing and extend it to `capacity`.
    """

    __slots__ = ("base", "capacity", "file", "path", "pread", "sync_file")

    def __init__(self, files: Files, path: Path, capacity: int, *, writable: bool) -> None:
        self.path = path
        self.base = segment_base(path)
        self.capacity = capacity
        self.file = files.open(path, Mode.WRITE if writable else Mode.READ)
        self.pread = self.file.pread
        """`File.pread` of the file, for the hot path."""
        self.sync_file = files.open(path, Mode.WRITE) if writable else self.file
        """For syncs on other threads and in other processes, which hear of a failed write-back apart from `file`."""
        if writable and self.file.size() < capacity:
            self.file.truncate(capacity)

    # --- reading ----------------------------------------------------------------------------------------------------

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes at `offset`. Raises RecordUnreadable."""
        try:
            data = self.pread(size, offset)
        except OSError:
            data = b""
        return data if len(data) == size else self._read_in_steps(offset, size)

    def _read_in_steps(self, offset: int, size: int) -> bytes:
        """Read again in small steps, to find what can't be read."""
        parts, stop = [], offset + size
        while offset < stop:
            length = min(STEP_BYTES - offset % STEP_BYTES, stop - offset)
            try:
                part = self.pread(length, offset)
            except OSError as error:
                try:
                    part = pread_direct(self.file, length, offset)
                except OSError:
                    reason = f"byte {offset} of the file can't be read ({error.strerror})"
                    raise RecordUnreadable(self.base + offset, reason, self.path.name) from error
            if not part:
                raise RecordUnreadable(self.base + offset, f"the file ends after {offset} bytes", self.path.name)
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def read_prefix(self, offset: int, size: int) -> bytes:
        """Return as many of `size` bytes at `offset` as can be read without a gap, which may be none."""
        try:
            return self.read(offset, size)
        except RecordUnreadable as error:
            stop = error.position - self.base
        return self.read(offset, stop - offset)

    def pieces(self, offset: int, stop: int) -> Iterator[tuple[int, int, bytes | None]]:
        """Yield begin, end and bytes of the pieces from `offset` to `stop` that may hold data; None for unreadable bytes.

        Unreadable pieces have at most `STEP_BYTES`. Holes are left out.
        """
        while offset < stop and (found := self.file.data_from(offset)) is not None:
            at, until = found[0], min(found[1], stop)
            while at < until:
                following = min(at + SCAN_BYTES, until)
                data = self.read_prefix(at, following - at)
                if data:
                    yield at, at + len(data), data
                    at += len(data)
                if at < following:
                    following = min(at - at % STEP_BYTES + STEP_BYTES, until)
                    yield at, following, None
                    at = following
            offset = found[1]

    def data_end(self, offset: int) -> int:
        """Return the offset after the last byte from `offset` on that isn't zero; `offset` when all of them are zero.

        Bytes that can't be read count as data.
        """
        last = offset
        for at, stop, data in self.pieces(offset, self.capacity):
            held = len(data.rstrip(b"\0")) if data is not None else stop - at
            last = at + held if held else last
        return last

    # --- writing ----------------------------------------------------------------------------------------------------

    def allocate(self, offset: int, length: int) -> None:
        """Make the file system reserve room for `length` bytes, at least 1, so that a `write` there finds room.

        A file system that can't reserve room does nothing; then a `write` may find the disk full.

        Raises:
            OSError: there is no room (ENOSPC, EDQUOT), or the disk fails.
        """
        self.file.allocate(offset, length)

    def write(self, data: bytes, offset: int) -> None:
        """Write all of `data` at `offset`, with as many calls as the kernel needs. Raises OSError (ENOSPC, EIO)."""
        write_all(self.file, data, offset)

    def cut(self, size: int) -> None:
        """Cut the file to `size` bytes, after the last sync of the open segment."""
        self.file.truncate(size)
        self.capacity = size
        self.sync_file = self.file  # a sealed segment needs one descriptor; a sync that is under way keeps the other

    def clear_from(self, offset: int) -> None:
        """Turn everything from `offset` on into a hole again.

        Recovery clears a torn tail this way, because the rest of an old record must not follow the next one.
        """
        self.file.truncate(offset)
        self.file.truncate(self.capacity)

    def close(self) -> None:
        """Close the file."""
        self.file.close()
        self.sync_file.close()
