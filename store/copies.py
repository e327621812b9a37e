"""Copies: records that somebody still needs, carried forward before the segment that held them was dropped.

A copy is a COPIED record whose body is the whole old record. Everybody goes on naming it by the position that it had first,
which is its id: entries, handles and timers stay as they are, and a look-up leads to where it is now.

Rows of the index: key b"V", first position u64 big-endian; value position of the copy u64, size of the old record u32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from struct import Struct

from penstock.store.commitlog import CommitLog
from penstock.store.errors import PositionUnknown
from penstock.store.index import Batch, Index, KeySpace
from penstock.store.part import Apply
from penstock.store.record import COPY_BYTES, COPY_FIXED, Kind, Record

_KEY = Struct(">cQ")
_ROW = Struct("<QI")
_TOTAL_KEY = KeySpace.META + b"copied"
_TOTAL = Struct("<Q")


class Copies:
    """Where the records are that were copied forward. A part of the store.

    Parameters:
        log: holds them.
        index: has their rows.
    """

    def __init__(self, log: CommitLog, index: Index) -> None:
        self._log = log
        self._index = index
        self._changed: dict[int, bytes | None] = {}
        self.pinned_bytes = 0
        """Bytes of all copies that are kept: what outlives retention."""

    def where(self, origin: int) -> int | None:
        """Return the position of the latest copy of a record; None where it was never copied. About 3 us."""
        row = self._row(origin)
        return int(_ROW.unpack(row)[0]) if row is not None else None

    def read(self, origin: int, size: int) -> bytes:
        """Return the bytes of a record that stood at `origin` first.

        Raises:
            PositionUnknown: there is no copy of it.
        """
        copy = self.where(origin)
        if copy is None:
            raise PositionUnknown(f"position {origin} is before the oldest record, {self._log.start}")
        return self._log.read(copy + COPY_BYTES, size)

    def any_between(self, first: int, last: int) -> bool:
        """Return whether there is a copy of a record that stood at `first`, at `last` or between. Sees what was saved."""
        row = self._index.last_at_or_before(_KEY.pack(KeySpace.COPY, last), bytes(KeySpace.COPY))
        return row is not None and int(_KEY.unpack(row[0])[1]) >= first

    def forget_before(self, position: int) -> Iterator[None]:
        """Give up the copies that lie before `position`, and pause after each row: who needed one has a later one by now."""
        for key, _ in self._index.rows(bytes(KeySpace.COPY)):
            origin = int(_KEY.unpack(key)[1])
            row = self._row(origin)  # as it is now: it may have been copied once more since the iteration began
            if row is not None and _ROW.unpack(row)[0] < position:
                self.pinned_bytes -= _ROW.unpack(row)[1]
                self._changed[origin] = None
            yield

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
        """Yield nothing: a copy is kept by who needs the record."""
        yield from ()
