"""The log of a replica as its core sees it: its end, what of it is durable, and its epochs."""

from __future__ import annotations

from penstock.store.epochs import EpochTable
from penstock.store.log.block import read_block
from penstock.store.record import EPOCH_FIXED, KIND_AT, Kind, decode
from penstock.store.store import Store

SCAN_BYTES = 4 * 1024 * 1024
"""Bytes of log that a search for epochs reads at once."""

_EPOCH_BEGUN = int(Kind.EPOCH_BEGUN)


class ReplicaLog:
    """The log of a store. It satisfies `penstock.cluster.replica.Log`.

    Parameters:
        store: after `load`. What it has not applied yet is searched for epochs.

    Raises:
        RecordUnreadable: the disk can't read that.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._log = store.log
        self._unapplied = self._search(store.applied)

    def _search(self, position: int) -> EpochTable:
        table, log = self._store.epochs.table, self._log
        while position < log.written:
            block = read_block(log, position, SCAN_BYTES)
            for at in block.offsets:
                if block.data[at + KIND_AT] == _EPOCH_BEGUN:
                    found = decode(block.data, at, position=block.base + at)
                    table = table.with_epoch(EPOCH_FIXED.unpack(found.fixed)[0], found.position)
            if block.end == position:
                break  # nothing valid follows, which a replay will find
            position = block.end
        return table

    @property
    def end(self) -> int:
        """Position after the last record."""
        return self._log.written

    @property
    def durable(self) -> int:
        """Everything before this position is on disk."""
        return self._store.durable_position

    @property
    def epochs(self) -> EpochTable:
        """The epochs of the records, also of those that were not applied yet."""
        applied = self._store.epochs.table
        return self._unapplied if self._unapplied.last > applied.last else applied

    def begin(self, epoch: int, position: int) -> None:
        """Take that the records from a position on, where the log ends now, are of a later epoch."""
        self._unapplied = self.epochs.with_epoch(epoch, position)

    def cut_to(self, position: int) -> None:
        """Cut the log, durably. Raises what `Store.cut_to` raises."""
        self._unapplied = self.epochs.cut_to(position)
        self._store.cut_to(position)
