"""One file of the CommitLog. It is written at its end, and sealed when it is full."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from penstock.store import descriptors
from penstock.store.errors import LogCorrupt, PositionUnknown, RecordUnreadable
from penstock.store.files import SHORT, STEP_BYTES, SYSTEM_FILES, Files, Mode, pread_direct, write_all

LOG_DIRECTORY = "commitlog"
"""Folder of the segments in a data directory."""

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
    but a signal that ends the process (SIGBUS) where a map is touched.

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


class SegmentChain:
    """The segments in the folder of a log. It opens sealed segments when they are read; the log itself has the open segment.

    Parameters:
        directory: the folder of the log, which exists.
        files: has the folder.

    Raises:
        LogCorrupt: bytes of a sealed segment are missing, or a file is not a segment.
        OSError: a file can't be read.
    """

    def __init__(self, directory: Path, *, files: Files = SYSTEM_FILES) -> None:
        self._directory = directory
        self._files = files
        self._opened: dict[int, Segment] = {}
        """Sealed segments that are open, by their positions."""
        self.bases = segment_bases(files, directory) or [0]
        """Positions of all segments. The last one is that of the open segment, whose file may not exist yet."""
        """Call `begin_at` before anything else."""

    def begin_at(self, begin: int | None, durable: int) -> list[str]:
        """Check that no file is missing. Delete the segments before `begin`, and return their names.

        Segments before `begin` are left over from a deletion that was interrupted.

        Args:
            begin: position at which the log begins, as the sync mark says; None if there is no mark.
            durable: position up to which the log was durable, as the sync mark says.

        Raises:
            LogCorrupt: a segment is missing, or bytes of a sealed one.
            OSError: a file can't be deleted.
        """
        if begin is not None:
            missing = missing_from(self._files, self._directory, begin, durable)
            if missing is not None:
                raise LogCorrupt(
                    f"the log begins at position {missing[0]}, but there is no segment before position {missing[1]} in "
                    f"{self._directory}, so {missing[1] - missing[0]} bytes are missing and the node does not start; restore "
                    f"the file {segment_name(missing[0])} and those after it, or run `penstock repair`"
                )
            if not segment_bases(self._files, self._directory):
                self.bases[:] = [begin]
        self._check()
        left_over = []
        while begin is not None and len(self.bases) > 1 and self.bases[1] <= begin:
            self._files.unlink(self.path(self.bases[0]))
            left_over.append(segment_name(self.bases.pop(0)))
        if left_over:
            self._files.sync_directory(self._directory)
        return left_over

    def _check(self) -> None:
        for base, following in pairwise(self.bases):
            size = self._files.size(self.path(base))
            if size < following - base:
                raise LogCorrupt(
                    f"segment {segment_name(base)} has {size} bytes, but the next one begins {following - base} bytes after "
                    f"its start, so {following - base - size} bytes are missing; restore the file, or run `penstock repair`"
                )

    def path(self, base: int) -> Path:
        """Return the path of the segment that begins at `base`."""
        return self._directory / segment_name(base)

    def sealed_at(self, position: int) -> Segment:
        """Return the sealed segment that has the record at `position`.

        Raises:
            PositionUnknown: the position is before the oldest segment.
            OSError: the file can't be opened.
        """
        at = bisect_right(self.bases, position) - 1
        if at < 0:
            raise PositionUnknown(f"position {position} is before the oldest record, {self.bases[0]}")
        base = self.bases[at]
        segment = self._opened.get(base)
        if segment is None:
            # It ends where the next one begins, even if its file was not cut.
            try:
                segment = Segment(self._files, self.path(base), self.bases[at + 1] - base, writable=False)
            except OSError as error:
                if error.errno not in SHORT or not self._opened:
                    raise
                self._opened.clear()  # no descriptor is left, and each of these has one
                segment = Segment(self._files, self.path(base), self.bases[at + 1] - base, writable=False)
            self._keep_open(segment)
        return segment

    def _keep_open(self, segment: Segment) -> None:
        self._opened[segment.base] = segment
        if len(self._opened) > descriptors.LOG_FILES_MAX:
            # The segment is not closed here, because a scan or a sync may be using it.
            del self._opened[next(iter(self._opened))]

    def append(self, base: int) -> None:
        """Add the file of a new open segment, which begins at `base`, and make its name durable. Raises OSError."""
        self.bases.append(base)
        self._files.sync_directory(self._directory)

    def seal(self, segment: Segment) -> None:
        """Cut the segment that was open until `append` to its real size, and keep it open. Raises OSError."""
        segment.cut(self.bases[-1] - segment.base)
        self._keep_open(segment)

    def cut_sealed(self, base: int, following: int) -> None:
        """Cut the file of a sealed segment to the position at which the next one begins. Raises OSError."""
        path = self.path(base)
        if self._files.size(path) > following - base:  # the node was killed after it began the next one and before it cut this
            file = self._files.open(path, Mode.WRITE)
            try:
                file.truncate(following - base)
            finally:
                file.close()

    def drop_before(self, position: int) -> int:
        """Delete the segments before `position`, where a segment must begin; return how many. Raises OSError.

        The oldest is deleted first, so that the log has no gap if the node is killed meanwhile. Readers that hold a deleted
        segment can go on reading it.
        """
        assert position in self.bases, position
        dropped = 0
        while self.bases[0] < position:
            self._files.unlink(self.path(self.bases[0]))
            self._opened.pop(self.bases.pop(0), None)
            dropped += 1
        self._files.sync_directory(self._directory)
        return dropped

    def drop_after(self, position: int) -> int:
        """Delete the segments that begin after `position`, the last one first; return where the one before them begins.

        That segment is the open one from now on. Raises OSError.
        """
        while self.bases[-1] > position:
            self._files.unlink(self.path(self.bases.pop()))
            self._opened.pop(self.bases[-1], None)
        self._files.sync_directory(self._directory)
        return self.bases[-1]

    def close(self) -> None:
        """Close the files of the sealed segments."""
        for segment in self._opened.values():
            segment.close()
        self._opened.clear()


def missing_from(files: Files, directory: Path, begin: int, durable: int) -> tuple[int, int] | None:
    """Return begin and end of the positions that the first segments of a log should have, if their files are not there.

    Args:
        files: has the folder.
        directory: the folder of the segments.
        begin: position at which the log begins, as the sync mark says.
        durable: position up to which the log was durable, as the sync mark says.
    """
    bases = segment_bases(files, directory)
    first = bases[0] if bases else durable
    return (begin, first) if begin < first else None
