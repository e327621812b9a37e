"""The segments of a log, in the order of their positions. All but the last are sealed."""

from __future__ import annotations

import os
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

from penstock.store.errors import LogCorrupt, PositionUnknown
from penstock.store.segment import SUFFIX, Segment, segment_base, segment_name, sync_directory

OPEN_MAPS_MAX = 64
"""Maximum number of sealed segments that stay mapped. A map costs address space and a descriptor, but no memory of its own."""


class SegmentChain:
    """The segments in the folder of a log. It maps sealed segments when they are read; the log itself has the open segment.

    Parameters:
        directory: the folder of the log, which exists.

    Raises:
        LogCorrupt: bytes of a sealed segment are missing, or a file is not a segment.
        OSError: a file can't be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mapped: dict[int, Segment] = {}
        """Sealed segments that are mapped, by their positions."""
        self.bases = sorted(segment_base(path) for path in directory.glob(f"*{SUFFIX}")) or [0]
        """Positions of all segments. The last one is that of the open segment, whose file may not exist yet."""
        self._check()

    def _check(self) -> None:
        for base, following in pairwise(self.bases):
            size = self.path(base).stat().st_size
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
        segment = self._mapped.get(base)
        if segment is None:
            # It ends where the next one begins, even if its file was not cut.
            segment = Segment(self.path(base), self.bases[at + 1] - base, writable=False)
            self._keep_mapped(segment)
        return segment

    def _keep_mapped(self, segment: Segment) -> None:
        self._mapped[segment.base] = segment
        if len(self._mapped) > OPEN_MAPS_MAX:
            # The segment is not closed here, because a scan or a sync may be using it.
            del self._mapped[next(iter(self._mapped))]

    def append(self, base: int) -> None:
        """Add the file of a new open segment, which begins at `base`, and make its name durable. Raises OSError."""
        self.bases.append(base)
        sync_directory(self._directory)

    def seal(self, segment: Segment) -> None:
        """Cut the segment that was open until `append` to its real size, and keep it mapped. Raises OSError."""
        segment.cut(self.bases[-1] - segment.base)
        self._keep_mapped(segment)

    def cut_sealed(self, base: int, following: int) -> None:
        """Cut the file of a sealed segment to the position at which the next one begins. Raises OSError."""
        path = self.path(base)
        if path.stat().st_size > following - base:  # the node was killed after it began the next segment and before it cut this
            os.truncate(path, following - base)

    def drop_before(self, position: int) -> int:
        """Delete the segments before `position`, where a segment must begin; return how many. Raises OSError.

        The oldest is deleted first, so that the log has no gap if the node is killed meanwhile. Readers that hold a view of a
        deleted segment can go on reading it.
        """
        assert position in self.bases, position
        dropped = 0
        while self.bases[0] < position:
            self.path(self.bases[0]).unlink()
            self._mapped.pop(self.bases.pop(0), None)
            dropped += 1
        sync_directory(self._directory)
        return dropped

    def close(self) -> None:
        """Close the files of the mapped segments."""
        for segment in self._mapped.values():
            segment.close()
        self._mapped.clear()
