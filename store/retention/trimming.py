"""Deletes the entries of light queues that point at records which retention has dropped.

A row goes when the log has none of the records that its entries point at. Those entries whose record was carried forward are
pinned: they stay, in rows of their own (see `store.queues.lightqueue`). In each queue, trimming ends at the first row with a
record that the log still has. All entries after that row were added when the log had that record, so there are no more of them
than the log has records that add entries.

So these entries stay: the pinned ones, those that were added since the oldest record of the log was appended, and in each queue
at most the rest of one row, which one commit has written. When a pinned record is no longer carried forward, the next pass over
the pinned rows deletes its entries.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final

import numpy as np
import structlog

from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.queues.lightqueue import ENTRY_BYTES, entries_array, entries_key, pinned_key, queue_prefix
from penstock.store.queues.queues import Queues
from penstock.store.retention.copies import Copies
from penstock.store.sliced import Steps

TRIM_ROWS = 64
"""Rows that one step looks at, at most."""

TRIM_ENTRIES = 4_096
"""Entries after which a step ends. A commit of many messages makes long rows."""

_PINNED = bytes(KeySpace.PINNED)
_ID_STOP = 5
"""Where the queue id ends in a key of entries. It begins after the first byte, and the offset follows."""


class Trimming:
    """Trims light queues.

    Parameters:
        index: where the entries are.
        queues: the light queues.
        copies: of the records that were carried forward.
        log_start: returns the position of the oldest record of the log.
    """

    def __init__(self, index: Index, queues: Queues, copies: Copies, log_start: Callable[[], int]) -> None:
        self._index = index
        self._queues = queues
        self._copies = copies
        self._log_start = log_start
        self.trimmed_entries = 0
        """Entries that were deleted since the start."""

    def steps(self) -> Steps:
        """Delete the entries whose records are all gone: the pinned ones, then those at the front of each queue."""
        yield from self._trim_pinned()
        queue_id = 0
        while queue_id < 2**32:
            row = self._index.first_at_or_after(entries_key(queue_id, 0), bytes(KeySpace.ENTRIES))
            if row is None:
                break
            queue_id = int.from_bytes(row[0][1:_ID_STOP], "big")
            if self._has_left_the_log(row[1]):
                yield from self._trim_queue(queue_id)
            queue_id += 1
            yield False
        for queue_id, open_row in self._queues.open_rows():
            if self._has_left_the_log(open_row):
                pinned = self._pinned(0, open_row)
                if self._queues.drop_open_row(queue_id, open_row, pinned):
                    self._count(open_row, pinned)
            yield False

    def _trim_pinned(self) -> Steps:
        """Delete the pinned entries whose copies have expired."""
        start = b""
        while rows := list(islice(self._index.rows(_PINNED, start), TRIM_ROWS)):
            batch = self._index.batch()
            for key, entries in rows:
                first = int.from_bytes(key[_ID_STOP:], "big")
                pinned = self._pinned(first, entries)
                if pinned != [(first, entries)]:
                    batch.delete(key)
                    _put_pinned(batch, int.from_bytes(key[1:_ID_STOP], "big"), pinned)
                    self._count(entries, pinned)
            self._index.write(batch)
            start = rows[-1][0][1:] + b"\0"
            yield False

    def _trim_queue(self, queue_id: int) -> Steps:
        """Delete the rows at the front of a queue whose records have left the log, except the open row."""
        prefix, start = queue_prefix(queue_id), b""
        has_more = True
        while has_more:
            gone: list[tuple[bytes, bytes]] = []
            taken, has_more = 0, False
            for key, entries in self._index.rows(prefix, start):
                has_more = len(gone) == TRIM_ROWS or taken >= TRIM_ENTRIES * ENTRY_BYTES
                if has_more or not self._has_left_the_log(entries):
                    break
                gone.append((key, entries))
                taken += len(entries)
            batch = self._index.batch()
            for key, entries in gone:
                pinned = self._pinned(int.from_bytes(key[_ID_STOP:], "big"), entries)
                batch.delete(key)
                _put_pinned(batch, queue_id, pinned)
                self._count(entries, pinned)
            self._index.write(batch)
            if has_more:
                start = gone[-1][0][len(prefix) :]
                yield False

    def _count(self, entries: bytes, pinned: list[tuple[int, bytes]]) -> None:
        self.trimmed_entries += (len(entries) - sum(len(each) for _, each in pinned)) // ENTRY_BYTES

    def _has_left_the_log(self, entries: bytes) -> bool:
        """Return whether the log has none of the records that the entries point at. They may have copies."""
        positions = entries_array(entries)["position"]
        return len(positions) > 0 and int(positions.max()) < self._log_start()

    def _pinned(self, first: int, entries: bytes) -> list[tuple[int, bytes]]:
        """Return the entries whose records have copies, as runs of adjacent ones with the offset of the first.

        Args:
            first: offset of the first entry.
            entries: point at records that have left the log.
        """
        positions = entries_array(entries)["position"]
        # Most rows have none, which one seek shows. All copies of what has left the log are saved.
        if not self._copies.any_between(int(positions.min()), int(positions.max())):
            return []
        copied = self._copies.readable(np.unique(positions).tolist())
        if not copied:
            return []
        kept = np.flatnonzero(np.isin(positions, list(copied)))
        runs = np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1)
        return [(first + int(run[0]), entries[int(run[0]) * ENTRY_BYTES : (int(run[-1]) + 1) * ENTRY_BYTES]) for run in runs]


def _put_pinned(batch: Batch, queue_id: int, pinned: list[tuple[int, bytes]]) -> None:
    for offset, entries in pinned:
        batch.put(pinned_key(queue_id, offset), entries)


logger = structlog.get_logger("store")

ROOTS_PER_STEP: Final = 64
"""Root queues that one step looks at."""

ROOTS_PER_END: Final = 1_024
"""Root queues that end together, because each time the whole cache of routes is looked at."""


def end_unused_roots(queues: Queues) -> Steps:
    """End all root queues without entries that nobody needs."""
    levels = iter(tuple(queues.router.roots))
    found: list[str] = []
    ended = 0
    while portion := list(islice(levels, ROOTS_PER_STEP)):
        found += [level for level in portion if queues.is_unused_root(level)]
        if len(found) >= ROOTS_PER_END:
            ended += queues.end_roots(found)
            found.clear()
        yield False
    ended += queues.end_roots(found)
    if ended:
        logger.info("queues.ended", roots=ended)
