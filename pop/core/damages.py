"""Where a group stands in a log that `penstock repair` has mended.

Checkpoint records state offsets of the queue as it was. Without the damaged messages a rebuilt queue has fewer entries, so
those offsets would be too high, and a group would skip messages. Here the cursor follows the messages themselves. Where that
can't be told, it stays behind: the group gets messages a second time, and misses none.
"""

from __future__ import annotations

from bisect import bisect_right

import orjson

from penstock.pop.core.checkpoint import Entry
from penstock.pop.core.group import ConsumerGroup
from penstock.store.lightqueue import ENTRY, ENTRY_BYTES, LightQueue


class Damages:
    """The damaged ranges of the log, in its order: `ranges` are pairs of first position and position behind the last byte."""

    def __init__(self, ranges: list[list[int]] | None = None) -> None:
        self._starts = [start for start, _ in ranges or ()]
        self._ends = [end for _, end in ranges or ()]
        self.changed = False
        """True until `row` is called: the index doesn't have the last ranges."""

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, end: int) -> None:
        """Add a range, which is behind all that are known."""
        self._starts.append(start)
        self._ends.append(end)
        self.changed = True

    def row(self) -> bytes:
        """Return the index row."""
        self.changed = False
        return orjson.dumps(list(zip(self._starts, self._ends, strict=True)))

    def advance(self, group: ConsumerGroup, fresh: list[Entry], retries: list[Entry]) -> None:
        """Move the cursors of a group over what a checkpoint handed out, each in the order of its queue."""
        group.retry_cursor = _behind(group.retry, group.retry_cursor, retries)
        if not fresh:
            return
        if group.queue.start != "latest":
            self._count(group, fresh)
        else:
            group.cursor = _behind(group.queue, group.cursor, fresh)

    def _count(self, group: ConsumerGroup, fresh: list[Entry]) -> None:
        """Count the messages that are left: such a queue is filled after the replay, so they can't be looked up in it.

        An offset above the expected one tells that a checkpoint is lost, and one below that a node has started on a mended log
        since, and gone on from the cursor of then.
        """
        first, last = fresh[0].offset, fresh[-1].offset
        if first != group.expected:
            group.frozen = first > group.expected
        if not group.frozen:
            group.cursor += sum(not self._covers(entry.position) for entry in fresh)
        group.expected = last + 1

    def _covers(self, position: int) -> bool:
        at = bisect_right(self._starts, position) - 1
        return at >= 0 and position < self._ends[at]


def _behind(queue: LightQueue, cursor: int, entries: list[Entry]) -> int:
    """Return the cursor behind those of `entries` that follow it in the queue; others were damaged, or came another way."""
    for entry in entries:
        if _position_at(queue, cursor) == entry.position:
            cursor += 1
    return cursor


def _position_at(queue: LightQueue, offset: int) -> int | None:
    """Return the position of an entry, committed or not; None behind the end."""
    if offset < queue.committed_offset:
        return int(ENTRY.unpack(queue.read(offset, 1))[0])
    at = (offset - queue.committed_offset) * ENTRY_BYTES
    return int(ENTRY.unpack_from(queue.pending, at)[0]) if at < len(queue.pending) else None
