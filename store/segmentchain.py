"""The segments of a log, in the order of their positions. All but the last are sealed."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

from penstock.store.errors import LogCorrupt, PositionUnknown
from penstock.store.files import SHORT, SYSTEM_FILES, Files, Mode
from penstock.store.segment import Segment, segment_bases, segment_name

OPEN_FILES_MAX = 64
"""Maximum number of sealed segments that stay open. Each costs a descriptor."""


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
        if len(self._opened) > OPEN_FILES_MAX:
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
