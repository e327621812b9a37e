"""The state of POP: groups, and the checkpoints that are open. It is what the records made of it, and nothing else.

`PopCore` decides and appends records; only the `applies` here change anything, when a record is appended and when recovery
reads it again. So live traffic and recovery can't come to different ends.

Rows of the index: key b"G", group id u32 big-endian, value `Group.row`; key b"C", position of the checkpoint u64
big-endian, value `Checkpoint.row`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from struct import Struct

import numpy as np
import orjson
import structlog

from pop.checkpoint import FROM_RETRY, Checkpoint
from pop.damages import Damages
from pop.deadlines import Deadlines
from pop.group import Group
from store.commitlog import CommitLog
from store.errors import QueueUnknown
from store.index import Batch, Index, Space
from store.lightqueue import ENTRY, ENTRY_BYTES, LightQueue
from store.part import Apply
from store.queues import Queues
from store.record import CHANGE_ENTRY, CHECKPOINT_ENTRY_DTYPE, POP_FIXED, REFERENCE, Flag, Kind, Record

logger = structlog.get_logger("pop")

SETTLED_REMEMBERED = 50_000
"""Settled checkpoints whose handles still get the exact answer (acknowledged, replaced). Older ones hear "expired"."""

ENTRIES_PER_READ = 256
"""Entries of a retry queue that are read in one step where retention asks what is still needed."""

DAMAGES_ROW = 0
"""Where the index keeps the damaged ranges, among the groups: their ids begin at 1."""

_GROUP_KEY = Struct(">cI")
_CHECKPOINT_KEY = Struct(">cQ")


class PopState:
    """Groups and checkpoints. A part of the store.

    Parameters:
        log: where the messages are.
        queues: where groups read, and where what is revived goes.
        deadlines: gets each checkpoint that opens, and is told of each that is settled.
        arrived: called with a group when something that it can see was committed.
    """

    def __init__(self, log: CommitLog, queues: Queues, deadlines: Deadlines, arrived: Callable[[Group], None]) -> None:
        self._log = log
        self._queues = queues
        self._deadlines = deadlines
        self._arrived = arrived
        self.groups: dict[tuple[str, str], Group] = {}
        """By name and filter."""
        self.by_id: dict[int, Group] = {}
        self.next_id = 1
        self.checkpoints: dict[int, Checkpoint] = {}
        """Those with anything open, by position."""
        self.settled: OrderedDict[int, Checkpoint] = OrderedDict()
        """The last that were settled, without their entries."""
        self._groups_changed: set[int] = set()
        self._checkpoints_changed: set[int] = set()
        self._checkpoints_new: set[int] = set()
        self._damages = Damages()

    def applies(self) -> Mapping[Kind, Apply]:
        return {
            Kind.GROUP_CREATED: self._apply_created,
            Kind.POP_CHECKPOINT: self._apply_checkpoint,
            Kind.POP_ACK: self._apply_ack,
            Kind.POP_INVISIBLE_CHANGED: self._apply_changed,
            Kind.POP_REVIVED: self._apply_revived,
            Kind.POP_DEAD_LETTER: self._apply_dead_letter,
            Kind.DAMAGED: self._apply_damaged,
        }

    def _apply_created(self, record: Record) -> None:
        group_id, _, _ = POP_FIXED.unpack(record.fixed)
        row = orjson.loads(record.properties)
        for name, topic_filter in (("queue", row["filter"]), ("retry", f"$retry/{group_id}")):
            queue = self._queue(row[name], topic_filter)
            if queue is None:
                self._skip(record, "queue", row[name])
                self.next_id = max(self.next_id, group_id + 1)
                return
            row[name] = queue.id
        if self._damages:
            row["expected"] = row["cursor"]
            row["cursor"] = min(row["cursor"], self._queues.get(row["queue"]).next_offset)
        self._install(group_id, {"name": row["group"], "epoch": 0, "retry_cursor": 0, **row})
        self._groups_changed.add(group_id)

    def _install(self, group_id: int, row: dict[str, object]) -> None:
        name, topic_filter = str(row["name"]), str(row["filter"])
        queues = self._queues
        group = Group(group_id, name, topic_filter, queues.get(int(str(row["queue"]))), queues.get(int(str(row["retry"]))))
        group.cursor, group.retry_cursor = int(str(row["cursor"])), int(str(row["retry_cursor"]))
        group.epoch = int(str(row["epoch"]))
        group.expected = int(str(row.get("expected", group.cursor)))
        group.frozen = bool(row.get("frozen", False))
        self.by_id[group_id] = self.groups[name, topic_filter] = group
        self.next_id = max(self.next_id, group_id + 1)

        def arrived(_queue: LightQueue, _offset: int, _entries: bytes) -> None:
            self._arrived(group)

        group.queue.watchers.append(arrived)
        group.retry.watchers.append(arrived)

    def _apply_checkpoint(self, record: Record) -> None:
        group_id, _, deadline_ms = POP_FIXED.unpack(record.fixed)
        group = self._group_of(record)
        if group is None:
            return
        entries = np.frombuffer(record.body, dtype=CHECKPOINT_ENTRY_DTYPE)
        retries = entries["source"] == FROM_RETRY
        if self._damages:
            self._damages.advance(group, entries[~retries], entries[retries])
        else:
            if not retries.all():
                group.cursor = int(entries["offset"][~retries].max()) + 1
            if retries.any():
                group.retry_cursor = int(entries["offset"][retries].max()) + 1
        group.in_flight += len(entries)
        self._groups_changed.add(group_id)
        self._open(Checkpoint(record.position, group_id, record.store_ms, deadline_ms, record.flags, record.body))

    def _apply_changed(self, record: Record) -> None:
        group_id, _, deadline_ms = POP_FIXED.unpack(record.fixed)
        group = self._group_of(record)
        if group is None:
            return
        for position, index, *_ in CHANGE_ENTRY.iter_unpack(record.body):
            checkpoint = self._open_delivery(record, position, index)
            if checkpoint is None:
                group.in_flight += 1  # the new delivery is there, whatever became of the old one
                continue
            checkpoint.replaced |= 1 << index
            self._close(checkpoint, index)
        step = CHANGE_ENTRY.size
        body = b"".join(record.body[at + REFERENCE.size : at + step] for at in range(0, len(record.body), step))
        self._open(Checkpoint(record.position, group_id, record.store_ms, deadline_ms, record.flags, body))

    def _apply_ack(self, record: Record) -> None:
        group = self._group_of(record)
        if group is None:
            return
        for position, index in REFERENCE.iter_unpack(record.body):
            checkpoint = self._open_delivery(record, position, index)
            if checkpoint is None:
                continue
            checkpoint.acked |= 1 << index
            self._close(checkpoint, index)
            group.in_flight -= 1

    def _apply_revived(self, record: Record) -> None:
        group = self._group_of(record)
        if group is None:
            return
        uncounted = bool(record.flags & Flag.SUSPENDED)
        for position, index in REFERENCE.iter_unpack(record.body):
            checkpoint = self._open_delivery(record, position, index)
            if checkpoint is None:
                continue
            entry = checkpoint.entry(index)
            attempts = entry.attempt - 1 if uncounted or checkpoint.suspended else entry.attempt
            self._queues.append_to(group.retry, entry.position, entry.size, attempts)
            self._close(checkpoint, index)
            group.in_flight -= 1

    def _apply_dead_letter(self, record: Record) -> None:
        group = self._group_of(record)
        if group is None:
            return
        dead_letters = self._queues.find(f"$dlq/{group.name}")
        if dead_letters is None:
            self._skip(record, "queue", f"$dlq/{group.name}")  # they stay open, and end there when they expire again
            return
        for position, index in REFERENCE.iter_unpack(record.body):
            checkpoint = self._open_delivery(record, position, index)
            if checkpoint is None:
                continue
            entry = checkpoint.entry(index)
            self._queues.append_to(dead_letters, entry.position, entry.size, entry.attempt)
            self._close(checkpoint, index)
            group.in_flight -= 1

    # --- what `millrace repair` left: references to records that are gone ---------------------------------------------

    def _apply_damaged(self, record: Record) -> None:
        if not self._damages:
            for group in self.by_id.values():
                group.expected = group.cursor
            self._groups_changed.update(self.by_id)
        self._damages.add(record.position, record.position + record.size)

    def _group_of(self, record: Record) -> Group | None:
        """Return the group of a record; None, which is logged, where no record created it that can be read."""
        group_id = int(POP_FIXED.unpack(record.fixed)[0])
        group = self.by_id.get(group_id)
        if group is None:
            self._skip(record, "group", group_id)
            self.next_id = max(self.next_id, group_id + 1)
        return group

    def _open_delivery(self, record: Record, position: int, index: int) -> Checkpoint | None:
        """Return the checkpoint of a delivery that is open; None, which is logged, where damage has left none."""
        checkpoint = self.checkpoints.get(position)
        if checkpoint is not None and checkpoint.open >> index & 1:
            return checkpoint
        self._skip(record, "delivery", f"{position}:{index}")
        return None

    def _queue(self, queue_id: int, topic_filter: str) -> LightQueue | None:
        try:
            return self._queues.get(queue_id)
        except QueueUnknown:
            return self._queues.find(topic_filter)  # a root comes back with another id

    def _skip(self, record: Record, missing: str, name: object) -> None:
        # Live, every reference is to something that is there: only repair makes holes.
        assert self._damages, (record.position, missing, name)
        logger.warning("record.skipped", position=record.position, kind=Kind(record.kind).name, missing=missing, name=name)

    def _open(self, checkpoint: Checkpoint) -> None:
        self.checkpoints[checkpoint.position] = checkpoint
        self._checkpoints_changed.add(checkpoint.position)
        self._checkpoints_new.add(checkpoint.position)
        self._deadlines.schedule(checkpoint.deadline_ms, checkpoint)

    def _close(self, checkpoint: Checkpoint, index: int) -> None:
        """Settle one delivery; with the last one the checkpoint is done, and its timer is skipped."""
        bit = 1 << index
        assert checkpoint.open & bit, (checkpoint.position, index)
        checkpoint.open ^= bit
        self._checkpoints_changed.add(checkpoint.position)
        if not checkpoint.open:
            del self.checkpoints[checkpoint.position]
            self._deadlines.settled(checkpoint)
            self.settled[checkpoint.position] = checkpoint.without_entries()
            if len(self.settled) > SETTLED_REMEMBERED:
                self.settled.popitem(last=False)

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        """Yield what is handed out, what waits in retry queues, and the dead letters, which are kept for one more retention."""
        # All is noted before the first pause: what is open now may be settled or waiting for a retry when its turn comes.
        handed_out = [(checkpoint, checkpoint.open) for checkpoint in self.checkpoints.values()]
        retries = [(group.retry, group.retry_cursor) for group in self.by_id.values()]
        names = {group.name for group in self.by_id.values()}
        for checkpoint, open_bits in handed_out:
            for index, entry in enumerate(checkpoint.entries()):
                if open_bits >> index & 1 and entry.position < before:
                    yield entry.position, entry.size
        for queue, cursor in retries:
            yield from _entries_between(queue, cursor, 0, before)
        for name in names:
            dead_letters = self._queues.find(f"$dlq/{name}")
            if dead_letters is not None:
                yield from _entries_between(dead_letters, 0, self._log.start, before)

    def load(self, index: Index) -> None:
        for key, value in index.rows(bytes(Space.GROUP)):
            group_id, row = _GROUP_KEY.unpack(key)[1], orjson.loads(value)
            if group_id == DAMAGES_ROW:
                self._damages = Damages(row)
            else:
                self._install(group_id, row)
        for key, value in index.rows(bytes(Space.CHECKPOINT)):
            checkpoint = Checkpoint.from_row(_CHECKPOINT_KEY.unpack(key)[1], value)
            self._open(checkpoint)
            self.by_id[checkpoint.group_id].in_flight += checkpoint.open.bit_count()
        self._checkpoints_changed.clear()
        self._checkpoints_new.clear()

    def save(self, batch: Batch) -> None:
        if self._damages.changed:
            batch.put(_GROUP_KEY.pack(Space.GROUP, DAMAGES_ROW), self._damages.row())
        for group_id in self._groups_changed:
            batch.put(_GROUP_KEY.pack(Space.GROUP, group_id), self.by_id[group_id].row())
        for position in self._checkpoints_changed:
            checkpoint = self.checkpoints.get(position)
            if checkpoint is not None:
                batch.put(_CHECKPOINT_KEY.pack(Space.CHECKPOINT, position), checkpoint.row())
            elif position not in self._checkpoints_new:
                batch.delete(_CHECKPOINT_KEY.pack(Space.CHECKPOINT, position))
        self._groups_changed.clear()
        self._checkpoints_changed.clear()
        self._checkpoints_new.clear()


def _entries_between(queue: LightQueue, offset: int, first: int, before: int) -> Iterator[tuple[int, int]]:
    """Yield position and size of a queue's entries from `offset` on whose record stood at `first` or later, before `before`."""
    while True:
        found, entries = queue.read_from(offset, ENTRIES_PER_READ)
        if not entries:
            return
        for position, size, _ in ENTRY.iter_unpack(entries):
            if first <= position < before:
                yield position, size
        offset = found + len(entries) // ENTRY_BYTES
