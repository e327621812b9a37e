"""The CommitLog: every record once, in one order, on disk.

`add` gives a record its position and collects it; `write` puts all that was collected into the open segment with one
call; `sync` makes it durable and may run on another thread. What is written can be read; what isn't can't.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from store import record
from store.errors import LogCorrupt, PositionUnknown, RecordTooLarge
from store.segment import SUFFIX, Segment, segment_base, segment_name

DIRECTORY = "commitlog"
"""Folder of the segments inside a data directory."""

OPEN_MAPS_MAX = 64
"""Sealed segments that stay mapped for readers. A map costs address space and a descriptor, no memory of its own."""

_SIZE = Struct("<I")


class Tail(NamedTuple):
    """What recovery found at the end of the log."""

    end: int
    """Position behind the last valid record."""
    torn_bytes: int
    """Bytes behind it that were not a whole record, and are gone now."""


class CommitLog:
    """An append-only log of records in segments.

    Parameters:
        data_dir: the node's data directory; the segments lie in its folder `commitlog`.
        segment_bytes: capacity of a segment. No record may be larger.
    """

    def __init__(self, data_dir: Path, *, segment_bytes: int) -> None:
        self.directory = data_dir / DIRECTORY
        self.segment_bytes = segment_bytes
        self.directory.mkdir(parents=True, exist_ok=True)
        self._bases = sorted(segment_base(path) for path in self.directory.glob(f"*{SUFFIX}"))
        self._sealed: dict[int, Segment] = {}
        self._parts: list[bytes] = []
        self._directory_changed = False
        self.written = 0
        """Position up to which records are in their files, and readable."""
        self.end = 0
        """Position of the next record: `written` plus what `add` has collected."""
        if not self._bases:
            self._bases = [0]
            self._directory_changed = True
        self._check_chain()
        base = self._bases[-1]
        path = self.directory / segment_name(base)
        capacity = max(segment_bytes, path.stat().st_size if path.exists() else 0)
        self._open = Segment(path, capacity, writable=True)
        self._limit = base + capacity

    @property
    def start(self) -> int:
        """Position of the oldest record that the log still has."""
        return self._bases[0]

    def _check_chain(self) -> None:
        for base, following in zip(self._bases, self._bases[1:], strict=False):
            size = (self.directory / segment_name(base)).stat().st_size
            if base + size != following and size < following - base:
                raise LogCorrupt(
                    f"segment {segment_name(base)} has {size} bytes, but the next one starts {following - base} bytes "
                    f"after it: {following - base - size} bytes are missing; restore the file, or run `millrace repair`"
                )

    # --- recovery ---------------------------------------------------------------------------------------------------

    def recover(self, verified_until: int = 0) -> Tail:
        """Find the end of the log; clear a torn tail. To be called once, before anything is added.

        Records below `verified_until` are known to be durable and are not read again.

        Raises:
            LogCorrupt: a record is damaged that isn't in the tail of the last segment.
        """
        verified_until = max(verified_until, self.start)
        for base, following in zip(self._bases, self._bases[1:], strict=False):
            if following > verified_until:
                self._verify_sealed(base, following, max(verified_until - base, 0))
        segment = self._open
        if verified_until > segment.base + segment.capacity:
            verified_until = segment.base  # the index knows more than the log has: read it all
        stop = record.valid_until(segment.view, max(verified_until - segment.base, 0), segment.capacity)
        torn_bytes = segment.clear_from(stop)
        self.written = self.end = segment.base + stop
        return Tail(self.end, torn_bytes)

    def _verify_sealed(self, base: int, following: int, offset: int) -> None:
        segment = self._segment(base)
        size = following - base
        stop = record.valid_until(segment.view, offset, size)
        if stop != size:
            raise LogCorrupt(
                f"the record at position {base + stop} (byte {stop} of segment {segment.path.name}) is damaged, and "
                f"it is not the tail of the log: the node does not start on it; restore the file, or run `millrace repair`"
            )
        if segment.capacity > size:  # killed between opening the next segment and cutting this one
            os.truncate(segment.path, size)
            segment.capacity = size

    # --- writing ----------------------------------------------------------------------------------------------------

    def add(self, head: bytes, payload: bytes, size: int) -> int:
        """Collect a record of `size` bytes, given in two pieces; return its position.

        Raises:
            RecordTooLarge: it would not fit into a segment.
        """
        position = self.end
        end = position + size
        if end > self._limit:
            self._roll(size)
            end = position + size
        self._parts.append(head)
        self._parts.append(payload)
        self.end = end
        return position

    def write(self) -> int:
        """Write what was collected; return how many bytes. An OSError here means that the log can't go on."""
        if not self._parts:
            return 0
        data = b"".join(self._parts)
        self._parts.clear()
        self._open.write(data, self.written - self._open.base)
        self.written += len(data)
        return len(data)

    def _roll(self, size: int) -> None:
        if size > min(self.segment_bytes, record.RECORD_BYTES_MAX):
            raise RecordTooLarge(
                f"a record of {size} bytes does not fit into a segment of {self.segment_bytes} bytes; "
                f"raise store.segment_bytes or send less"
            )
        self.write()
        full, base = self._open, self.end
        # Durable before the next segment exists: only the last segment can have a torn tail.
        os.fdatasync(full.fd)
        self._open = Segment(self.directory / segment_name(base), self.segment_bytes, writable=True)
        self._limit = base + self.segment_bytes
        self._directory_changed = True
        full.cut(base - full.base)
        self._sealed[full.base] = full
        self._bases.append(base)

    def sync(self) -> None:
        """Make all that is written durable (fdatasync). Safe to call from another thread, one at a time.

        An OSError is final: after a failed sync the kernel may have dropped the data, so it must not be tried again.
        """
        directory_changed, self._directory_changed = self._directory_changed, False
        os.fdatasync(self._open.fd)
        if directory_changed:
            handle = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    # --- reading ----------------------------------------------------------------------------------------------------

    def read(self, position: int, size: int) -> bytes:
        """Return `size` bytes at `position`: a record, as a light-queue entry names it.

        Raises:
            PositionUnknown: that is before the start of the log or behind what is written.
        """
        if position + size > self.written:
            raise PositionUnknown(f"position {position} is behind the end of what is written, {self.written}")
        segment = self._open
        if position < segment.base:
            segment = self._segment_of(position)
        offset = position - segment.base
        return segment.map[offset : offset + size]

    def record(self, position: int, size: int = 0) -> record.Record:
        """Return the record at `position`; its size is looked up where 0 is given.

        Raises:
            PositionUnknown: nothing is there.
            RecordCorrupt: what is there is damaged.
        """
        size = size or _SIZE.unpack(self.read(position, _SIZE.size))[0]
        return record.decode(self.read(position, size), position=position)

    def scan(self, position: int, end: int | None = None) -> Iterator[record.Record]:
        """Yield the records from `position` up to `end`, by default to what is written now.

        Raises:
            RecordCorrupt: one of them is damaged; names its segment.
        """
        end = self.written if end is None else end
        while position < end:
            segment = self._open if position >= self._open.base else self._segment_of(position)
            view, base = segment.view, segment.base
            stop = min(end - base, segment.capacity)
            offset = position - base
            while offset < stop:
                found = record.decode(view, offset, position=base + offset)
                yield found
                offset += found.size
            position = base + offset

    def _segment_of(self, position: int) -> Segment:
        at = bisect_right(self._bases, position) - 1
        if at < 0:
            raise PositionUnknown(f"position {position} is before the oldest record, {self.start}")
        return self._segment(self._bases[at])

    def _segment(self, base: int) -> Segment:
        segment = self._sealed.get(base)
        if segment is None:
            path = self.directory / segment_name(base)
            segment = self._sealed[base] = Segment(path, path.stat().st_size, writable=False)
        if len(self._sealed) > OPEN_MAPS_MAX:
            self._close_oldest(keep=base)
        return segment

    def _close_oldest(self, keep: int) -> None:
        oldest = next(base for base in self._sealed if base != keep)
        self._sealed.pop(oldest).close()

    def close(self) -> None:
        """Write and sync what is left, cut nothing, close the files."""
        self.write()
        self.sync()
        for segment in (*self._sealed.values(), self._open):
            segment.close()
        self._sealed.clear()
