"""Copies of records that were carried forward because some part still needed them when their segment was dropped.

A copy is a COPIED record whose body is the whole old record. The position that the old record had first stays its id, so queue
entries, handles and timers need no change. A lookup leads from that position to the copy.

Rows of the index: key b"V", first position u64 big-endian; value position of the copy u64, size of the old record u32.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from struct import Struct

from penstock.store.errors import PositionUnknown
from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.log.commitlog import CommitLog
from penstock.store.part import Apply
from penstock.store.record import COPY_BYTES, COPY_FIXED, Kind, Record, decode

_KEY = Struct(">cQ")
_ROW = Struct("<QI")
_TOTAL_KEY = KeySpace.META + b"copied"
_TOTAL = Struct("<Q")

ROWS_AT_ONCE = 64
"""Rows that a walk over all copies reads at once. Between two reads it holds no iterator, which would keep deleted rows."""


def copy_in(value: bytes) -> int:
    """Return the position of the copy that a row of the index names."""
    return int(_ROW.unpack(value)[0])


class Copies:
    """Finds the copies of records that were carried forward. It is a part of the store.

    Parameters:
        log: holds the copies.
        index: holds their positions.
    """

    def __init__(self, log: CommitLog, index: Index) -> None:
        self._log = log
        self._index = index
        self._changed: dict[int, bytes | None] = {}
        self.pinned_bytes = 0
        """Bytes of all copies that are kept, which is what outlives retention."""

    def where(self, origin: int) -> int | None:
        """Return the position of the latest copy of a record, or None if it was never copied."""
        row = self._row(origin)
        return int(_ROW.unpack(row)[0]) if row is not None else None

    def read(self, origin: int, size: int) -> bytes:
        """Return the bytes of the record that was first stored at `origin`.

        Raises:
            PositionUnknown: the record has no copy.
        """
        copy = self.where(origin)
        if copy is None:
            raise PositionUnknown(f"position {origin} is before the oldest record of the log, which is at {self._log.start}")
        return self._log.read(copy + COPY_BYTES, size)

    def record(self, position: int, size: int = 0) -> Record:
        """Return the record that was first stored at `position`: from the log, or else its copy. `size` is its size if known.

        Raises:
            PositionUnknown: the record has expired, or there never was one.
            RecordCorrupt: the record is damaged.
        """
        if position >= self._log.start:
            return self._log.record(position, size)
        row = self._row(position)
        return decode(self.read(position, size or (_ROW.unpack(row)[1] if row is not None else 0)), position=position)

    def any_between(self, first: int, last: int) -> bool:
        """Return whether a record first stored from `first` to `last`, both included, has a copy. Sees saved copies only."""
        row = self._index.last_at_or_before(_KEY.pack(KeySpace.COPY, last), bytes(KeySpace.COPY))
        return row is not None and int(_KEY.unpack(row[0])[1]) >= first

    def readable(self, origins: Sequence[int]) -> set[int]:
        """Return those of `origins`, positions in ascending order, whose records have a copy that the log still has.

        It costs a seek for each copy that it finds, and one more, however many positions are given.
        """
        if not self.pinned_bytes:
            return set()
        start, changed = self._log.start, self._changed
        found = set()
        at = 0
        while at < len(origins):
            row = self._index.first_at_or_after(_KEY.pack(KeySpace.COPY, origins[at]), bytes(KeySpace.COPY))
            if row is None:
                break
            origin = int(_KEY.unpack(row[0])[1])
            at = bisect_left(origins, origin, at)
            if at < len(origins) and origins[at] == origin:
                if _ROW.unpack(row[1])[0] >= start:
                    found.add(origin)
                at += 1
        for origin in changed.keys() & set(origins) if changed else ():
            row_now = changed[origin]
            if row_now is not None and _ROW.unpack(row_now)[0] >= start:
                found.add(origin)
            else:
                found.discard(origin)
        return found

    def forget_before(self, position: int) -> Iterator[None]:
        """Forget the copies that lie before `position`, one row a step. Records still needed have later copies by now."""
        start = b""
        while keys := [key for key, _ in islice(self._index.rows(bytes(KeySpace.COPY), start), ROWS_AT_ONCE)]:
            for key in keys:
                origin = int(_KEY.unpack(key)[1])
                row = self._row(origin)  # read again, since the record may have been copied once more meanwhile
                if row is not None and _ROW.unpack(row)[0] < position:
                    self.pinned_bytes -= _ROW.unpack(row)[1]
                    self._changed[origin] = None
                yield
            start = keys[-1][1:] + b"\0"

    def _row(self, origin: int) -> bytes | None:
        if origin in self._changed:
            return self._changed[origin]
        return self._index.get(_KEY.pack(KeySpace.COPY, origin))

    # --- the part ---------------------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return {Kind.COPIED: self._apply_copied}

    def _apply_copied(self, record: Record) -> None:
        (origin,) = COPY_FIXED.unpack(record.fixed)
        if self._row(origin) is None:
            self.pinned_bytes += len(record.body)
        self._changed[origin] = _ROW.pack(record.position, len(record.body))

    def load(self, index: Index) -> None:
        total = index.get(_TOTAL_KEY)
        self.pinned_bytes = _TOTAL.unpack(total)[0] if total is not None else 0

    def save(self, batch: Batch) -> None:
        if not self._changed:
            return
        for origin, row in self._changed.items():
            if row is None:
                batch.delete(_KEY.pack(KeySpace.COPY, origin))
            else:
                batch.put(_KEY.pack(KeySpace.COPY, origin), row)
        batch.put(_TOTAL_KEY, _TOTAL.pack(self.pinned_bytes))
        self._changed.clear()

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        """Yield nothing: the part that needs a record names it, and thereby keeps its copy."""
        yield from ()
