"""The damaged ranges of a log that `penstock repair` has mended, and the cursors of groups after a repair.

Checkpoint records state offsets of the queue as it was. A rebuilt queue doesn't have the damaged messages, so it has fewer
entries. The stated offsets would be too high, and a group would miss messages. Therefore the cursor of a group follows the
messages themselves. Where this is impossible, the cursor stays behind: the group gets messages a second time, but misses none.
"""

from __future__ import annotations

from bisect import bisect_right

import orjson
import structlog

from penstock.pop.core.checkpoint import Entry
from penstock.pop.core.group import ConsumerGroup
from penstock.store.queues.lightqueue import LightQueue
from penstock.store.record import Kind, Record

logger = structlog.get_logger("pop")


class DamagedRanges:
    """The damaged ranges of the log, in its order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        """The position after the last byte of each range."""
        self.changed = False
        """True until `row` is called, because the index lacks the last ranges."""

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, end: int) -> None:
        """Add a range, which must be after all others."""
        self._starts.append(start)
        self._ends.append(end)
        self.changed = True

    def load(self, row: bytes) -> None:
        """Read the ranges that `row` returned."""
        ranges = orjson.loads(row)
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]

    def row(self) -> bytes:
        """Return the index row: pairs of the first position and the position after the last byte, as JSON."""
        self.changed = False
        return orjson.dumps(list(zip(self._starts, self._ends, strict=True)))

    def skip(self, record: Record, missing: str, name: object) -> None:
        """Log that a record, or a part of it, has no effect because something that it refers to is gone."""
        # Without a repair, every record refers to something that exists.
        assert self, (record.position, missing, name)
        logger.warning("record.skipped", position=record.position, kind=Kind(record.kind).name, missing=missing, name=name)

    def advance(self, group: ConsumerGroup, new: list[Entry], retries: list[Entry]) -> None:
        """Move the cursors of a group over the messages of a checkpoint: `new` and `retries` in the order of their queues."""
        group.retry_cursor = _cursor_after(group.retry, group.retry_cursor, retries)
        if not new:
            return
        if group.queue.start != "latest":
            self._advance_by_count(group, new)
        else:
            group.cursor = _cursor_after(group.queue, group.cursor, new)

    def _advance_by_count(self, group: ConsumerGroup, new: list[Entry]) -> None:
        """Move the cursor by the number of undamaged messages. The queue is filled after the replay, so it can't be read yet.

        An offset above the expected one means that a checkpoint is lost. An offset below it means that the node has started
        with the mended log since, and continued from the cursor of that time.
        """
        first, last = new[0].offset, new[-1].offset
        if first != group.expected:
            group.frozen = first > group.expected
        if not group.frozen:
            group.cursor += sum(not self.covers(entry.position) for entry in new)
        group.expected = last + 1

    def covers(self, position: int) -> bool:
        """Return whether a position is in one of the ranges."""
        at = bisect_right(self._starts, position) - 1
        return at >= 0 and position < self._ends[at]


def _cursor_after(queue: LightQueue, cursor: int, entries: list[Entry]) -> int:
    """Return the cursor after those of `entries` that follow it in the queue. Others were damaged, or came another way."""
    for entry in entries:
        if queue.position_at(cursor) == entry.position:
            cursor += 1
    return cursor
