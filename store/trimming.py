"""Deletes the entries of light queues that point at records which retention has dropped."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from penstock.store.index import Batch, Index, KeySpace
from penstock.store.lightqueue import ENTRY_BYTES, entries_array, entries_key, queue_prefix
from penstock.store.queues import Queues
from penstock.store.sliced import Steps

TRIM_ROWS = 64
"""Rows of one queue that are deleted in one step."""


class Trimming:
    """Trims light queues.

    Parameters:
        index: where the entries are.
        queues: the light queues.
        any_readable: tells whether any record between two positions, both included, can still be read.
    """

    def __init__(self, index: Index, queues: Queues, any_readable: Callable[[int, int], bool]) -> None:
        self._index = index
        self._queues = queues
        self._any_readable = any_readable
        self.trimmed_entries = 0
        """Entries that were deleted since the start."""

    def steps(self) -> Steps:
        """Delete the rows at the front of each queue whose records are all gone."""
        queue_id = 0
        while queue_id < 2**32:
            row = self._index.first_at_or_after(entries_key(queue_id, 0), bytes(KeySpace.ENTRIES))
            if row is None:
                break
            queue_id = int.from_bytes(row[0][1:5], "big")
            if self._is_gone(row[1]):
                yield from self._trim_queue(queue_id)
            queue_id += 1
            yield False
        for queue_id, open_row in self._queues.open_rows():
            if self._is_gone(open_row) and self._queues.drop_open_row(queue_id, open_row):
                self.trimmed_entries += len(open_row) // ENTRY_BYTES
            yield False

    def _trim_queue(self, queue_id: int) -> Steps:
        """Delete the rows at the front of a queue whose entries are all gone, except the open row."""
        index, prefix = self._index, queue_prefix(queue_id)
        start = b""
        while True:
            gone: list[bytes] = []
            for key, entries in islice(index.rows(prefix, start), TRIM_ROWS):
                if not self._is_gone(entries):
                    break
                gone.append(key)
                self.trimmed_entries += len(entries) // ENTRY_BYTES
            batch = Batch()
            for key in gone:
                batch.delete(key)
            index.write(batch)
            if len(gone) < TRIM_ROWS:
                return
            start = gone[-1][len(prefix) :]
            yield False

    def _is_gone(self, entries: bytes) -> bool:
        """Return whether none of the records that the entries point at can be read any more."""
        found = entries_array(entries)["position"]
        return len(found) > 0 and not self._any_readable(int(found.min()), int(found.max()))
