"""The epochs of the log of one replica, as a part of its store.

Row of the index: key b"Mepochs"; value for each epoch number u64, position of its first record u64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from struct import Struct

from penstock.store.epochs import EpochTable
from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.part import Apply
from penstock.store.record import EPOCH_FIXED, Kind, Record

EPOCHS_REMEMBERED = 1_000
"""Epochs that are remembered. A replica that was away for more of them begins with a copy of another one's data."""

_KEY = KeySpace.META + b"epochs"
_ROW = Struct("<QQ")


class LogEpochs:
    """Knows the epochs of the records that were applied."""

    def __init__(self) -> None:
        self.table = EpochTable()
        self._is_changed = False

    def applies(self) -> Mapping[Kind, Apply]:
        return {Kind.EPOCH_BEGUN: self._apply_begun}

    def _apply_begun(self, record: Record) -> None:
        number, _ = EPOCH_FIXED.unpack(record.fixed)
        known = islice(self.table, max(len(self.table) + 1 - EPOCHS_REMEMBERED, 0), None)
        self.table = EpochTable(known).with_epoch(number, record.position)
        self._is_changed = True

    def load(self, index: Index) -> None:
        self.table = EpochTable(_ROW.iter_unpack(index.get(_KEY) or b""))

    def save(self, batch: Batch) -> None:
        if self._is_changed:
            batch.put(_KEY, b"".join(_ROW.pack(*epoch) for epoch in self.table))
            self._is_changed = False

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        """Yield nothing: the row of the index has all that is needed."""
        yield from ()
