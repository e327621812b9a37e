"""The state of POP: groups, checkpoints and dead letters, as the records of the log have made them.

The parts of `PopCore` decide and append records. Only applying a record changes the state: when the record is appended, and
when recovery reads it again. Therefore recovery always comes to the same state. (`forget` and `forget_redriven` have no
records; they follow retention.) `PopState.applies` says which method applies which kind of record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from penstock.pop.core.checkpoint import (
    FROM_QUEUE,
    FROM_RETRY,
    Checkpoint,
    CheckpointTable,
    Entry,
    entries_of,
    last_of,
    runs_of,
)
from penstock.pop.core.damages import DamagedRanges
from penstock.pop.core.deadletters import DEAD_LETTERS, DeadLetter, DeadLetterTable, Reason
from penstock.pop.core.group import ConsumerGroup, GroupTable
from penstock.pop.core.order import NO_KEY, Parked
from penstock.pop.core.settings import ConsumerGroupSettings
from penstock.pop.core.suspicion import returned
from penstock.store.bodies import CHANGE_ENTRY, REFERENCE, TIMER_ENTRY
from penstock.store.clocksteps import step_of
from penstock.store.errors import QueueUnknown
from penstock.store.index.rowformats import KEEPER_MARK
from penstock.store.part import Apply
from penstock.store.queues.lightqueue import ENTRY, ENTRY_BYTES
from penstock.store.record import LEVEL_MASK, POP_FIXED, Flag, Kind, Record
from penstock.store.space.accounts import Resource

if TYPE_CHECKING:
    from penstock.pop.core.deadlines import Deadlines
    from penstock.pop.options import PopOptions
    from penstock.store.index.index import Batch, Index
    from penstock.store.queues.lightqueue import LightQueue
    from penstock.store.store import Store

logger = structlog.get_logger("pop")

ENTRIES_PER_READ = 256
"""Entries of a retry queue that `live` reads in one step."""


class PopState:
    """Groups, checkpoints and dead letters. It is a part of the store.

    Parameters:
        store: has the messages, the light queues of groups and dead letters, and the ledger that is charged for groups.
        deadlines: gets each checkpoint that opens, and forgets each that closes.
        arrived: called with a group when messages that are visible to it were committed.
        options: what applies to a group where nothing was set for it.
    """

    def __init__(
        self, store: Store, deadlines: Deadlines, arrived: Callable[[ConsumerGroup], None], options: PopOptions
    ) -> None:
        self._store = store
        self._options = options
        self._damages = DamagedRanges()
        self.groups = GroupTable(store.queues, self._damages, arrived, options)
        self.checkpoints = CheckpointTable(deadlines, self.groups.by_id, self._damages)
        self.dead_letters = DeadLetterTable()
        store.queues.on_gap = self._groups_go_back

    @property
    def mended(self) -> int:
        """Number of known damaged ranges of the log. Checkpoint records that state a cursor state this number with it."""
        return len(self._damages)

    def forget(self, letter: DeadLetter) -> None:
        """Forget a dead letter whose message retention has dropped.

        No record says so. After the next start the dead letter may be known again, until retention passes it once more.
        """
        if self.dead_letters.get(letter.key) is None:
            return  # it was redriven meanwhile
        self.dead_letters.remove(letter.key)
        group = self.groups.by_id.get(letter.group_id)
        if group is not None:
            group.dead_letter_count -= 1
            self.groups.changed.add(group.id)

    def forget_redriven(self, group: ConsumerGroup, position: int) -> None:
        """Forget that a group has got a message back from its dead letters, because retention has dropped the message."""
        if not group.is_deleted:
            group.redriven.remove(position)
            self.groups.changed.add(group.id)

    # --- the part of the store --------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return {
            Kind.GROUP_CREATED: self._apply_group_created,
            Kind.GROUP_CHANGED: self._apply_group_changed,
            Kind.GROUP_OFFSET_RESET: self._apply_group_reset,
            Kind.GROUP_DELETED: self._apply_group_deleted,
            Kind.POP_CHECKPOINT: self._apply_checkpoint,
            Kind.POP_ACK: self._apply_ack,
            Kind.POP_INVISIBLE_CHANGED: self._apply_invisible_changed,
            Kind.POP_REVIVED: self._apply_revived,
            Kind.POP_DEAD_LETTER: self._apply_dead_letter,
            Kind.DEAD_LETTER_REDRIVEN: self._apply_redriven,
            Kind.DEAD_LETTER_PURGED: self._apply_purged,
            Kind.DAMAGED: self._apply_damaged,
            Kind.CLOCK_STEPPED: self._apply_stepped,
        }

    def _apply_stepped(self, record: Record) -> None:
        self.checkpoints.move_deadlines(step_of(record))

    def _apply_damaged(self, record: Record) -> None:
        if not self._damages:
            for group in self.groups.by_id.values():
                group.expected = group.cursor
            self.groups.changed.update(self.groups.by_id)
        self._damages.add(record.position, record.position + record.size)

    def _groups_go_back(self, queue: LightQueue, offset: int, position: int) -> None:
        """Let the groups of a queue that have got further than `offset` go back there: later messages have lower offsets now.

        They get messages again, but miss none. No record says so. After the next start they may go back once more. If the
        damage was known when the log was replayed, their cursors take it into account already (`pop.core.damages`).
        """
        if self._damages.covers(position):
            return
        for group in self.groups.by_id.values():
            if group.queue is queue and group.cursor > offset:
                logger.warning(
                    "group.set_back",
                    group=group.name,
                    filter=group.filter,
                    offset=offset,
                    was=group.cursor,
                    why="the log has been damaged there since the group read it; it gets what follows a second time",
                )
                group.cursor = group.scanned = group.expected = offset
                group.ahead = (0, b"")
                group.set_back += 1
                self.groups.changed.add(group.id)

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        """Yield the messages that groups still need: in flight, parked, waiting for a retry, or dead letters.

        Dead letters are kept for one more retention period. If a message was older than that when it failed, the dead letter
        lives as long as a message that was published then.
        """
        # All of this is read before the first pause: a message in flight may be in the retry queue when its turn comes.
        in_flight = [(checkpoint, checkpoint.open) for checkpoint in self.checkpoints.open.values()]
        retries = [(group.retry, group.retry_cursor) for group in self.groups.by_id.values()]
        orders = [group.order for group in self.groups.by_id.values() if group.order is not None]
        parked = [message for order in orders for message in order.parked_messages()]
        names = {group.name for group in self.groups.by_id.values()}
        yield from (message for message in parked if message[0] < before)
        for checkpoint, open_bits in in_flight:
            for index, entry in enumerate(checkpoint.entries()):
                if open_bits >> index & 1 and entry.position < before:
                    yield entry.position, entry.size
        for queue, cursor in retries:
            yield from _entries_between(queue, cursor, 0, before)
        for name in names:
            dead_letters = self._store.queues.find(DEAD_LETTERS + name)
            if dead_letters is not None:
                yield from _entries_between(dead_letters, 0, self._store.log.start, before)
        stays_from_ms = self._store.log.stored_ms(before)
        for letter in self.dead_letters.before(self._store.log.start) if stays_from_ms else ():
            if letter.failed_ms >= stays_from_ms:
                yield letter.position, letter.size

    def load(self, index: Index) -> None:
        self.dead_letters.load(index)
        self.groups.load(index)
        self.checkpoints.load(index)

    def save(self, batch: Batch) -> None:
        self.groups.save(batch)
        self.dead_letters.save(batch)
        self.checkpoints.save(batch)

    # --- records of groups ------------------------------------------------------------------------------------------

    def _apply_group_created(self, record: Record) -> None:
        group_id, _, _ = POP_FIXED.unpack(record.fixed)
        row = orjson.loads(record.properties)
        queue = self._queue_of(row["queue"], row["filter"])
        if queue is None:
            self._damages.skip(record, "queue", row["queue"])
            self.groups.reserve_id(group_id)
            return
        row["account"] = self._store.ledger.enter(row.pop("by", None))
        retries = f"$retry/{group_id}"
        retry = self._queue_of(row["retry"], retries)
        if retry is None:
            assert self._damages, record.position  # without a repair, every queue was declared
            retry = self._store.queues.restore(retries, f"group:{group_id}", row["account"])
        row["queue"], row["retry"] = queue.id, retry.id
        if self._damages:
            self._remove_replaced(row["group"], row["filter"])
            row["expected"] = row["cursor"]
            row["cursor"] = min(row["cursor"], self._store.queues.get(row["queue"]).next_offset)
        self._store.ledger.charge(row["account"], Resource.GROUPS)
        self.groups.add(group_id, {"name": row["group"], "epoch": 0, "retry_cursor": 0, **row})
        self.groups.changed.add(group_id)

    def _apply_group_changed(self, record: Record) -> None:
        group = self.groups.of_record(record)
        if group is not None:
            was_fifo = group.order is not None
            group.configure(ConsumerGroupSettings.from_row(orjson.loads(record.properties)["settings"]), self._options)
            if was_fifo and group.order is None:
                self.groups.orders_deleted.add(group.id)
            self.groups.changed.add(group.id)

    def _apply_group_reset(self, record: Record) -> None:
        """Reset a group. The first record of a reset states the cursors; each record closes the deliveries that it names."""
        group = self.groups.of_record(record)
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
            group.redriven.clear()
        self._close_named(record, group)
        self.groups.changed.add(group.id)

    def _apply_group_deleted(self, record: Record) -> None:
        group = self.groups.of_record(record)
        if group is None:
            return
        self._close_named(record, group)
        if group.in_flight:
            return  # another record follows with the rest; if a crash prevented it, the group still exists
        self._remove_group(group)

    def _remove_replaced(self, name: str, topic_filter: str) -> None:
        """Remove the group that has the name and filter of a new one: the record of its deletion was damaged."""
        group = self.groups.by_name.get((name, topic_filter))
        if group is not None:
            for checkpoint in tuple(self.checkpoints.open.values()):
                if checkpoint.group_id == group.id:
                    self.checkpoints.close(checkpoint, checkpoint.open)
            self._remove_group(group)

    def _remove_group(self, group: ConsumerGroup) -> None:
        self.groups.remove(group)
        self._store.ledger.release(group.account, Resource.GROUPS)
        owner = f"group:{group.id}"
        dead_letters = self._store.queues.find(DEAD_LETTERS + group.name)
        if dead_letters is not None and dead_letters.owners <= {owner}:
            self.dead_letters.delete_queue(dead_letters.id)
        for queue in (group.queue, group.retry, dead_letters):
            if queue is not None:
                self._store.queues.release(queue, owner)  # in the same record, so that a crash leaves no queue without an owner

    def _close_named(self, record: Record, group: ConsumerGroup) -> None:
        for position, index in REFERENCE.iter_unpack(record.body):
            checkpoint = self.checkpoints.open_delivery(record, position, index)
            if checkpoint is not None:
                self.checkpoints.close(checkpoint, 1 << index)
                group.in_flight -= 1

    def _queue_of(self, queue_id: int, topic_filter: str) -> LightQueue | None:
        try:
            return self._store.queues.get(queue_id)
        except QueueUnknown:
            return self._store.queues.find(topic_filter)  # the queue of a root gets another id after a repair

    # --- records of deliveries --------------------------------------------------------------------------------------

    def _apply_checkpoint(self, record: Record) -> None:
        group_id, _, deadline_ms = POP_FIXED.unpack(record.fixed)
        group = self.groups.of_record(record)
        if group is None:
            return
        stated = orjson.loads(record.properties) if record.properties else {}
        if self._damages or "cursor" in stated:
            self._apply_entries(group, list(entries_of(record.body)), stated)
        else:
            new, retry = last_of(record.body, FROM_QUEUE), last_of(record.body, FROM_RETRY)
            if new is not None:
                group.cursor = new.offset + 1
            if retry is not None:
                group.retry_cursor = retry.offset + 1
        group.scanned = max(group.scanned, group.cursor)
        self.groups.changed.add(group_id)
        if not record.body:
            return
        attempt_id = stated.get("attempt_id", "")
        checkpoint = Checkpoint(record.position, group_id, record.store_ms, deadline_ms, record.flags, record.body, attempt_id)
        group.in_flight += checkpoint.count
        self.checkpoints.add(checkpoint)
        if attempt_id:
            group.attempt_ids[attempt_id] = record.position

    def _apply_entries(self, group: ConsumerGroup, entries: list[Entry], stated: dict[str, Any]) -> None:
        """Move the cursors of a group whose record states them: a selective group, or any group after a repair."""
        new = [entry for entry in entries if entry.source != FROM_RETRY]
        retries = [entry for entry in entries if entry.source == FROM_RETRY]
        if self._damages:
            # A record from before the repair doesn't move the cursor, because nobody knows how many of the skipped messages
            # are gone. A record from after the repair takes it into account.
            is_stated = stated.get("mended", 0) == len(self._damages) and "cursor" in stated
            if is_stated:
                group.cursor = group.expected = stated["cursor"]
                group.frozen = False
            self._damages.advance(group, [] if is_stated or group.is_selective else new, retries)
        else:
            group.cursor = stated["cursor"]
            if retries:
                # Earlier versions put all messages of FIFO groups that returned into the retry queue.
                group.retry_cursor = min(retries[-1].offset + 1, group.retry.next_offset)
        order = group.order
        if order is not None:
            for offset, position, size, key in stated.get("parked", ()):
                order.park(Parked(offset, position, size, key))
            for entry, key in zip(entries, stated.get("keys", ()), strict=False):
                order.lock(entry.position, key)

    def _apply_invisible_changed(self, record: Record) -> None:
        group_id, _, deadline_ms = POP_FIXED.unpack(record.fixed)
        group = self.groups.of_record(record)
        if group is None:
            return
        for position, index, *_ in CHANGE_ENTRY.iter_unpack(record.body):
            checkpoint = self.checkpoints.open_delivery(record, position, index)
            if checkpoint is None:
                group.in_flight += 1  # the new delivery exists, whatever happened to the old one
                continue
            checkpoint.replaced |= 1 << index
            self.checkpoints.close(checkpoint, 1 << index)
        step = CHANGE_ENTRY.size
        body = b"".join(record.body[at + REFERENCE.size : at + step] for at in range(0, len(record.body), step))
        keeper = KEEPER_MARK + orjson.loads(record.properties)["keeper"] if record.properties else ""
        self.checkpoints.add(Checkpoint(record.position, group_id, record.store_ms, deadline_ms, record.flags, body, keeper))

    def _apply_ack(self, record: Record) -> None:
        group = self.groups.of_record(record)
        if group is None:
            return
        checkpoints = self.checkpoints
        for position, indexes in runs_of(record.body):
            checkpoint, mask = checkpoints.open.get(position), indexes.mask()
            if checkpoint is None or checkpoint.open & mask != mask:
                self._damages.skip(record, "delivery", position)  # deliveries that are open are acknowledged all the same
                if checkpoint is None:
                    continue
                mask &= checkpoint.open
                if not mask:
                    continue
            checkpoint.acked |= mask
            if group.order is not None:
                self.groups.changed.add(group.id)
                for message in checkpoint.positions(mask):
                    group.order.unlock(message)
            checkpoints.close(checkpoint, mask)
            group.in_flight -= mask.bit_count()

    def _apply_revived(self, record: Record) -> None:
        group = self.groups.of_record(record)
        if group is None:
            return
        uncounted, level = bool(record.flags & Flag.SUSPENDED), record.flags & LEVEL_MASK
        for position, index in REFERENCE.iter_unpack(record.body):
            checkpoint = self.checkpoints.open_delivery(record, position, index)
            if checkpoint is None:
                continue
            entry = checkpoint.entry(index)
            attempts = entry.attempt - 1 if uncounted or checkpoint.suspended else entry.attempt
            offset = entry.offset if entry.source == FROM_QUEUE else 0
            if group.order is None or not group.order.put_back(
                Parked(offset, entry.position, entry.size, NO_KEY, attempts, level)
            ):
                self._store.queues.append_to(group.retry, entry.position, entry.size, returned(attempts, level))
            self.checkpoints.close(checkpoint, 1 << index)
            group.in_flight -= 1
        if group.order is not None:
            self.groups.changed.add(group.id)

    def _apply_dead_letter(self, record: Record) -> None:
        group = self.groups.of_record(record)
        if group is None:
            return
        dead_letters = DEAD_LETTERS + group.name
        queue = self._store.queues.find(dead_letters)
        if queue is None:
            assert self._damages, record.position  # without a repair, every queue was declared
            queue = self._store.queues.restore(dead_letters, f"group:{group.id}", group.account)
        row = orjson.loads(record.properties) if record.properties else {}
        reason, detail = row.get("reason", Reason.ATTEMPTS_EXHAUSTED.name.lower()), row.get("detail", "")
        for position, index in REFERENCE.iter_unpack(record.body):
            checkpoint = self.checkpoints.open_delivery(record, position, index)
            if checkpoint is None:
                continue
            entry = checkpoint.entry(index)
            offset = queue.next_offset
            self._store.queues.append_to(queue, entry.position, entry.size, entry.attempt)
            letter = DeadLetter(
                queue.id,
                entry.position,
                group.id,
                offset,
                entry.size,
                entry.attempt,
                Reason[reason.upper()],
                record.store_ms,
                detail,
            )
            self.dead_letters.add(letter)
            group.dead_letter_count += 1
            if group.order is not None:
                group.order.unlock(entry.position)
            self.checkpoints.close(checkpoint, 1 << index)
            group.in_flight -= 1
        self.groups.changed.add(group.id)

    def _apply_redriven(self, record: Record) -> None:
        group = self.groups.of_record(record)
        queue = self._store.queues.find(DEAD_LETTERS + group.name) if group is not None else None
        if group is None or queue is None:
            return
        keys = orjson.loads(record.properties)["keys"] if record.properties else []
        for number, (position, size) in enumerate(TIMER_ENTRY.iter_unpack(record.body)):
            self.dead_letters.remove((queue.id, position, group.id))
            group.dead_letter_count -= 1
            group.redriven.add(position)
            key = keys[number] if keys else NO_KEY
            if group.order is not None and key != NO_KEY:
                # The message goes before all parked messages of its message group, but not beside one that is in flight.
                group.order.park(Parked(0, position, size, key))
            else:
                self._store.queues.append_to(group.retry, position, size, 0)
        self.groups.changed.add(group.id)

    def _apply_purged(self, record: Record) -> None:
        group = self.groups.of_record(record)
        queue = self._store.queues.find(DEAD_LETTERS + group.name) if group is not None else None
        if group is None or queue is None:
            return
        for position, _ in TIMER_ENTRY.iter_unpack(record.body):
            self.dead_letters.remove((queue.id, position, group.id))
            group.dead_letter_count -= 1
        self.groups.changed.add(group.id)


def _entries_between(queue: LightQueue, offset: int, first: int, before: int) -> Iterator[tuple[int, int]]:
    """Yield position and size of a queue's entries from `offset` on whose position is at least `first` and below `before`."""
    while True:
        first_offset, entries = queue.read_from(offset, ENTRIES_PER_READ)
        if not entries:
            return
        for position, size, _ in ENTRY.iter_unpack(entries):
            if first <= position < before:
                yield position, size
        offset = first_offset + len(entries) // ENTRY_BYTES
