"""The state of POP: groups, and the checkpoints that are open. It is what the records made of it, and nothing else.

`PopCore` decides and appends records; only the `applies` here change anything, when a record is appended and when recovery
reads it again. So live traffic and recovery can't come to different ends. (`forget` has no record: it follows retention.)

Rows of the index: key b"G", group id u32 big-endian, value `Group.row`; key b"C", position of the checkpoint u64
big-endian, value `Checkpoint.row`; and those of `pop.core.order` and `pop.core.deadletters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from struct import Struct
from typing import Any

import orjson
import structlog

from penstock.pop.core.checkpoint import FROM_QUEUE, FROM_RETRY, Checkpoint, Entry, entries_of, indexes_of, last_of
from penstock.pop.core.damages import Damages
from penstock.pop.core.deadletters import DeadLetter, DeadLetters, Reason
from penstock.pop.core.deadlines import Deadlines
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.indexes import runs_of
from penstock.pop.core.order import NO_KEY, Parked, delete_order
from penstock.pop.core.settings import GroupSettings
from penstock.pop.options import PopOptions
from penstock.store.commitlog import CommitLog
from penstock.store.errors import QueueUnknown
from penstock.store.index import Batch, Index, KeySpace
from penstock.store.lightqueue import ENTRY, ENTRY_BYTES, LightQueue
from penstock.store.part import Apply
from penstock.store.queues import Queues
from penstock.store.recent import RecentIds
from penstock.store.record import (
    CHANGE_ENTRY,
    POP_FIXED,
    REFERENCE,
    TIMER_ENTRY,
    Flag,
    Kind,
    Record,
)

logger = structlog.get_logger("pop")

CLOSED_REMEMBERED = 50_000
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
        options: what holds for a group where nothing was set for it.
    """

    def __init__(
        self,
        log: CommitLog,
        queues: Queues,
        deadlines: Deadlines,
        arrived: Callable[[ConsumerGroup], None],
        options: PopOptions,
    ) -> None:
        self._log = log
        self._queues = queues
        self._options = options
        self._deadlines = deadlines
        self._arrived = arrived
        self.groups: dict[tuple[str, str], ConsumerGroup] = {}
        """By name and filter."""
        self.groups_by_id: dict[int, ConsumerGroup] = {}
        self.next_id = 1
        self.checkpoints: dict[int, Checkpoint] = {}
        """Those with anything open, by position."""
        self.closed: RecentIds[int, Checkpoint] = RecentIds(CLOSED_REMEMBERED)
        """The last that were settled, without their entries."""
        self._groups_changed: set[int] = set()
        self._checkpoints_changed: set[int] = set()
        self._checkpoints_new: set[int] = set()
        self._groups_deleted: list[int] = []
        self._orders_deleted: set[int] = set()
        self._dead_letters_deleted: set[int] = set()
        """Ids of the `$dlq/` queues that go."""
        self._damages = Damages()
        self.dead_letters = DeadLetters()

    def applies(self) -> Mapping[Kind, Apply]:
        return {
            Kind.GROUP_CREATED: self._apply_created,
            Kind.GROUP_CHANGED: self._apply_settings,
            Kind.GROUP_OFFSET_RESET: self._apply_reset,
            Kind.GROUP_DELETED: self._apply_deleted,
            Kind.POP_CHECKPOINT: self._apply_checkpoint,
            Kind.POP_ACK: self._apply_ack,
            Kind.POP_INVISIBLE_CHANGED: self._apply_changed,
            Kind.POP_REVIVED: self._apply_revived,
            Kind.POP_DEAD_LETTER: self._apply_dead_letter,
            Kind.DEAD_LETTER_REDRIVEN: self._apply_redriven,
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

    def _install(self, group_id: int, row: dict[str, Any]) -> ConsumerGroup:
        name, topic_filter = row["name"], row["filter"]
        queue, retry = self._queues.get(row["queue"]), self._queues.get(row["retry"])
        settings = GroupSettings.from_row(row.get("settings", {}))
        group = ConsumerGroup(group_id, name, topic_filter, queue, retry, settings, self._options)
        group.cursor = group.scanned = row["cursor"]
        group.retry_cursor = row["retry_cursor"]
        group.epoch = row["epoch"]
        group.expected = row.get("expected", group.cursor)
        group.frozen = row.get("frozen", False)
        group.dead_letter_count = row.get("dead", 0)
        self.groups_by_id[group_id] = self.groups[name, topic_filter] = group
        self.next_id = max(self.next_id, group_id + 1)

        def arrived(_queue: LightQueue, _offset: int, _entries: bytes) -> None:
            self._arrived(group)

        group.watcher = arrived
        group.queue.watchers.append(arrived)
        group.retry.watchers.append(arrived)
        return group

    def _apply_settings(self, record: Record) -> None:
        group = self._group_of(record)
        if group is not None:
            was_fifo = group.order is not None
            group.configure(GroupSettings.from_row(orjson.loads(record.properties)["settings"]), self._options)
            if was_fifo and group.order is None:
                self._orders_deleted.add(group.id)
            self._groups_changed.add(group.id)

    def _apply_reset(self, record: Record) -> None:
        """Begin elsewhere. The first record of a reset tells where; each settles the deliveries that it names."""
        group = self._group_of(record)
        if group is None:
            return
        if record.properties:
            row = orjson.loads(record.properties)
            group.cursor = group.scanned = group.expected = row["cursor"]
            if self._damages:
                group.cursor = group.scanned = min(group.cursor, group.queue.next_offset)
            group.retry_cursor = min(row["retry_cursor"], group.retry.next_offset)
            group.frozen = False
            group.epoch += 1
            if group.order is not None:
                group.order.clear()
        self._settle_all(record, group)
        self._groups_changed.add(group.id)

    def _apply_deleted(self, record: Record) -> None:
        group = self._group_of(record)
        if group is None:
            return
        self._settle_all(record, group)
        if group.in_flight:
            return  # another record with the rest follows; if a crash cut it off, the group is still there
        group.is_deleted = True
        del self.groups_by_id[group.id]
        del self.groups[group.name, group.filter]
        assert group.watcher is not None
        group.queue.watchers.remove(group.watcher)
        group.retry.watchers.remove(group.watcher)
        self._groups_changed.discard(group.id)
        self._groups_deleted.append(group.id)
        self._orders_deleted.add(group.id)
        owner = f"group:{group.id}"
        dead_letters = self._queues.find(f"$dlq/{group.name}")
        if dead_letters is not None and dead_letters.owners <= {owner}:
            self._dead_letters_deleted.add(dead_letters.id)
        for queue in (group.queue, group.retry, dead_letters):
            if queue is not None:
                self._queues.release(queue, owner)  # by this very record: a crash leaves no queue that nobody needs

    def _settle_all(self, record: Record, group: ConsumerGroup) -> None:
        for position, index in REFERENCE.iter_unpack(record.body):
            checkpoint = self._open_delivery(record, position, index)
            if checkpoint is not None:
                self._close(checkpoint, 1 << index)
                group.in_flight -= 1

    def _apply_checkpoint(self, record: Record) -> None:
        group_id, _, deadline_ms = POP_FIXED.unpack(record.fixed)
        group = self._group_of(record)
        if group is None:
            return
        noted = orjson.loads(record.properties) if record.properties else {}
        if self._damages or "cursor" in noted:
            self._apply_entries(group, list(entries_of(record.body)), noted)
        else:
            fresh, retry = last_of(record.body, FROM_QUEUE), last_of(record.body, FROM_RETRY)
            if fresh is not None:
                group.cursor = fresh.offset + 1
            if retry is not None:
                group.retry_cursor = retry.offset + 1
        group.scanned = max(group.scanned, group.cursor)
        self._groups_changed.add(group_id)
        if not record.body:
            return
        attempt_id = noted.get("attempt_id", "")
        checkpoint = Checkpoint(record.position, group_id, record.store_ms, deadline_ms, record.flags, record.body, attempt_id)
        group.in_flight += checkpoint.count
        self._open(checkpoint)
        if attempt_id:
            group.attempt_ids[attempt_id] = record.position

    def _apply_entries(self, group: ConsumerGroup, entries: list[Entry], noted: dict[str, Any]) -> None:
        """Move the cursors of a group that looks at each message, whose record says how far it has looked; or behind damage."""
        fresh = [entry for entry in entries if entry.source != FROM_RETRY]
        retries = [entry for entry in entries if entry.source == FROM_RETRY]
        if self._damages:
            # How many of the messages that were passed over are gone can't be told: a record from before the damage was
            # mended doesn't move the cursor. One from after it knows of the damage.
            if noted.get("mended", 0) == len(self._damages) and "cursor" in noted:
                group.cursor = noted["cursor"]
            self._damages.advance(group, [] if "cursor" in noted else fresh, retries)
        else:
            group.cursor = noted["cursor"]
            if retries:
                group.retry_cursor = retries[-1].offset + 1
        order = group.order
        if order is not None:
            for offset, position, size, key in noted.get("parked", ()):
                order.park(Parked(offset, position, size, key))
            for entry, key in zip(entries, noted.get("keys", ()), strict=False):
                order.lock(entry.position, key)

    @property
    def mended(self) -> int:
        """How many damaged ranges of the log are known: what a group that looks at each message notes beside its cursor."""
        return len(self._damages)

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
            self._close(checkpoint, 1 << index)
        step = CHANGE_ENTRY.size
        body = b"".join(record.body[at + REFERENCE.size : at + step] for at in range(0, len(record.body), step))
        self._open(Checkpoint(record.position, group_id, record.store_ms, deadline_ms, record.flags, body))

    def _apply_ack(self, record: Record) -> None:
        group = self._group_of(record)
        if group is None:
            return
        for position, indexes in runs_of(record.body):
            checkpoint, mask = self.checkpoints.get(position), indexes.mask()
            if checkpoint is None or checkpoint.open & mask != mask:
                self._skip(record, "delivery", position)  # what is open of it is settled all the same
                if checkpoint is None:
                    continue
                mask &= checkpoint.open
                if not mask:
                    continue
            checkpoint.acked |= mask
            if group.order is not None:
                self._groups_changed.add(group.id)
                for index in indexes_of(mask):
                    group.order.unlock(checkpoint.entry(index).position)
            self._close(checkpoint, mask)
            group.in_flight -= mask.bit_count()

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
            self._close(checkpoint, 1 << index)
            group.in_flight -= 1

    def _apply_dead_letter(self, record: Record) -> None:
        group = self._group_of(record)
        if group is None:
            return
        dead_letters = self._queues.find(f"$dlq/{group.name}")
        if dead_letters is None:
            self._skip(record, "queue", f"$dlq/{group.name}")  # they stay open, and end there when they expire again
            return
        reason = orjson.loads(record.properties)["reason"] if record.properties else Reason.ATTEMPTS_EXHAUSTED.name.lower()
        for position, index in REFERENCE.iter_unpack(record.body):
            checkpoint = self._open_delivery(record, position, index)
            if checkpoint is None:
                continue
            entry = checkpoint.entry(index)
            offset = dead_letters.next_offset
            self._queues.append_to(dead_letters, entry.position, entry.size, entry.attempt)
            letter = DeadLetter(
                dead_letters.id,
                entry.position,
                group.id,
                offset,
                entry.size,
                entry.attempt,
                Reason[reason.upper()],
                record.store_ms,
            )
            self.dead_letters.add(letter)
            group.dead_letter_count += 1
            if group.order is not None:
                group.order.unlock(entry.position)
            self._close(checkpoint, 1 << index)
            group.in_flight -= 1
        self._groups_changed.add(group.id)

    def _apply_redriven(self, record: Record) -> None:
        group = self._group_of(record)
        dead_letters = self._queues.find(f"$dlq/{group.name}") if group is not None else None
        if group is None or dead_letters is None:
            return
        keys = orjson.loads(record.properties)["keys"] if record.properties else []
        for number, (position, size) in enumerate(TIMER_ENTRY.iter_unpack(record.body)):
            self.dead_letters.remove((dead_letters.id, position, group.id))
            group.dead_letter_count -= 1
            key = keys[number] if keys else NO_KEY
            if group.order is not None and key != NO_KEY:
                # Before all that its message group has waiting, but not beside what that has in flight.
                group.order.park(Parked(0, position, size, key))
            else:
                self._queues.append_to(group.retry, position, size, 0)
        self._groups_changed.add(group.id)

    def forget(self, letter: DeadLetter) -> None:
        """Give up what is told of a dead letter whose message retention has dropped. No record says so: the next start may know
        it again, until retention comes by."""
        if self.dead_letters.get(letter.key) is None:
            return  # it was sent back meanwhile
        self.dead_letters.remove(letter.key)
        group = self.groups_by_id.get(letter.group_id)
        if group is not None:
            group.dead_letter_count -= 1
            self._groups_changed.add(group.id)

    # --- what `penstock repair` left: references to records that are gone ---------------------------------------------

    def _apply_damaged(self, record: Record) -> None:
        if not self._damages:
            for group in self.groups_by_id.values():
                group.expected = group.cursor
            self._groups_changed.update(self.groups_by_id)
        self._damages.add(record.position, record.position + record.size)

    def _group_of(self, record: Record) -> ConsumerGroup | None:
        """Return the group of a record; None, which is logged, where no record created it that can be read."""
        group_id = int(POP_FIXED.unpack(record.fixed)[0])
        group = self.groups_by_id.get(group_id)
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

    def _close(self, checkpoint: Checkpoint, mask: int) -> None:
        """Settle deliveries; with the last one the checkpoint is done, and its timer is skipped."""
        assert checkpoint.open & mask == mask, (checkpoint.position, mask)
        checkpoint.open ^= mask
        self._checkpoints_changed.add(checkpoint.position)
        if not checkpoint.open:
            del self.checkpoints[checkpoint.position]
            if checkpoint.attempt_id:
                attempt_ids = self.groups_by_id[checkpoint.group_id].attempt_ids
                if attempt_ids.get(checkpoint.attempt_id) == checkpoint.position:
                    del attempt_ids[checkpoint.attempt_id]
            self._deadlines.forget(checkpoint)
            self.closed.add(checkpoint.position, checkpoint.without_entries())

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        """Yield what is handed out, parked, or waits for a retry, and dead letters, which are kept for one more retention."""
        # All is noted before the first pause: what is open now may be settled or waiting for a retry when its turn comes.
        handed_out = [(checkpoint, checkpoint.open) for checkpoint in self.checkpoints.values()]
        retries = [(group.retry, group.retry_cursor) for group in self.groups_by_id.values()]
        orders = [group.order for group in self.groups_by_id.values() if group.order is not None]
        parked = [found for order in orders for found in order.parked_messages()]
        names = {group.name for group in self.groups_by_id.values()}
        yield from (found for found in parked if found[0] < before)
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
        self.dead_letters.load(index)
        for key, value in index.rows(bytes(KeySpace.GROUP)):
            group_id, row = _GROUP_KEY.unpack(key)[1], orjson.loads(value)
            if group_id == DAMAGES_ROW:
                self._damages = Damages(row)
            else:
                group = self._install(group_id, row)
                if group.order is not None:
                    group.order.load(index, group_id)
        for key, value in index.rows(bytes(KeySpace.CHECKPOINT)):
            checkpoint = Checkpoint.from_row(_CHECKPOINT_KEY.unpack(key)[1], value)
            self._open(checkpoint)
            group = self.groups_by_id[checkpoint.group_id]
            group.in_flight += checkpoint.open.bit_count()
            if checkpoint.attempt_id:
                group.attempt_ids[checkpoint.attempt_id] = checkpoint.position
        self._checkpoints_changed.clear()
        self._checkpoints_new.clear()

    def save(self, batch: Batch) -> None:
        if self._damages.changed:
            batch.put(_GROUP_KEY.pack(KeySpace.GROUP, DAMAGES_ROW), self._damages.row())
        for group_id in self._groups_deleted:
            batch.delete(_GROUP_KEY.pack(KeySpace.GROUP, group_id))
        for group_id in self._orders_deleted:
            delete_order(batch, group_id)
        for group_id in self._groups_changed:
            group = self.groups_by_id[group_id]
            batch.put(_GROUP_KEY.pack(KeySpace.GROUP, group_id), group.row())
            if group.order is not None:
                group.order.save(batch, group_id)
        self.dead_letters.save(batch)
        for queue_id in self._dead_letters_deleted:
            self.dead_letters.delete_queue(batch, queue_id)
        self._groups_deleted.clear()
        self._orders_deleted.clear()
        self._dead_letters_deleted.clear()
        for position in self._checkpoints_changed:
            checkpoint = self.checkpoints.get(position)
            if checkpoint is not None:
                batch.put(_CHECKPOINT_KEY.pack(KeySpace.CHECKPOINT, position), checkpoint.row())
            elif position not in self._checkpoints_new:
                batch.delete(_CHECKPOINT_KEY.pack(KeySpace.CHECKPOINT, position))
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
