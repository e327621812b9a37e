"""Applying the records that create, configure, reset and delete groups."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from penstock.pop.core.checkpoint import CheckpointTable
from penstock.pop.core.damages import DamagedRanges
from penstock.pop.core.deadletters import DEAD_LETTERS, DeadLetterTable
from penstock.pop.core.group import ConsumerGroup, GroupTable
from penstock.pop.core.settings import ConsumerGroupSettings
from penstock.pop.options import PopOptions
from penstock.store.bodies import REFERENCE
from penstock.store.errors import QueueUnknown
from penstock.store.part import Apply
from penstock.store.queues.lightqueue import LightQueue
from penstock.store.queues.queues import Queues
from penstock.store.record import POP_FIXED, Kind, Record
from penstock.store.space.accounts import Resource
from penstock.store.space.ledger import Ledger


class GroupChanges:
    """Applies the records of groups.

    Parameters:
        groups: changed by the records.
        checkpoints: changed by the records: a reset or a deletion closes all deliveries of the group.
        dead_letters: the dead letters of a deleted group are deleted.
        damages: the damaged ranges of the log.
        queues: the light queues that groups read.
        options: what applies to a group where nothing was set for it.
        ledger: is charged for each group.
    """

    def __init__(
        self,
        groups: GroupTable,
        checkpoints: CheckpointTable,
        dead_letters: DeadLetterTable,
        damages: DamagedRanges,
        queues: Queues,
        options: PopOptions,
        ledger: Ledger,
    ) -> None:
        self._groups = groups
        self._checkpoints = checkpoints
        self._dead_letters = dead_letters
        self._damages = damages
        self._queues = queues
        self._options = options
        self._ledger = ledger

    def applies(self) -> Mapping[Kind, Apply]:
        """Return what applies each kind of record."""
        return {
            Kind.GROUP_CREATED: self._apply_created,
            Kind.GROUP_CHANGED: self._apply_changed,
            Kind.GROUP_OFFSET_RESET: self._apply_reset,
            Kind.GROUP_DELETED: self._apply_deleted,
        }

    def _apply_created(self, record: Record) -> None:
        group_id, _, _ = POP_FIXED.unpack(record.fixed)
        row = orjson.loads(record.properties)
        queue = self._queue(row["queue"], row["filter"])
        if queue is None:
            self._damages.skip(record, "queue", row["queue"])
            self._groups.reserve_id(group_id)
            return
        row["account"] = self._ledger.enter(row.pop("by", None))
        retries = f"$retry/{group_id}"
        retry = self._queue(row["retry"], retries)
        if retry is None:
            assert self._damages, record.position  # without a repair, every queue was declared
            retry = self._queues.restore(retries, f"group:{group_id}", row["account"])
        row["queue"], row["retry"] = queue.id, retry.id
        if self._damages:
            self._remove_replaced(row["group"], row["filter"])
            row["expected"] = row["cursor"]
            row["cursor"] = min(row["cursor"], self._queues.get(row["queue"]).next_offset)
        self._ledger.charge(row["account"], Resource.GROUPS)
        self._groups.add(group_id, {"name": row["group"], "epoch": 0, "retry_cursor": 0, **row})
        self._groups.changed.add(group_id)

    def _apply_changed(self, record: Record) -> None:
        group = self._groups.of_record(record)
        if group is not None:
            was_fifo = group.order is not None
            group.configure(ConsumerGroupSettings.from_row(orjson.loads(record.properties)["settings"]), self._options)
            if was_fifo and group.order is None:
                self._groups.orders_deleted.add(group.id)
            self._groups.changed.add(group.id)

    def _apply_reset(self, record: Record) -> None:
        """Reset a group. The first record of a reset states the cursors; each record closes the deliveries that it names."""
        group = self._groups.of_record(record)
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
        self._groups.changed.add(group.id)

    def _apply_deleted(self, record: Record) -> None:
        group = self._groups.of_record(record)
        if group is None:
            return
        self._close_named(record, group)
        if group.in_flight:
            return  # another record follows with the rest; if a crash prevented it, the group still exists
        self._remove(group)

    def _remove_replaced(self, name: str, topic_filter: str) -> None:
        """Remove the group that has the name and filter of a new one: the record of its deletion was damaged."""
        group = self._groups.by_name.get((name, topic_filter))
        if group is not None:
            for checkpoint in [each for each in self._checkpoints.open.values() if each.group_id == group.id]:
                self._checkpoints.close(checkpoint, checkpoint.open)
            self._remove(group)

    def _remove(self, group: ConsumerGroup) -> None:
        self._groups.remove(group)
        self._ledger.release(group.account, Resource.GROUPS)
        owner = f"group:{group.id}"
        dead_letters = self._queues.find(DEAD_LETTERS + group.name)
        if dead_letters is not None and dead_letters.owners <= {owner}:
            self._dead_letters.delete_queue(dead_letters.id)
        for queue in (group.queue, group.retry, dead_letters):
            if queue is not None:
                self._queues.release(queue, owner)  # in the same record, so that a crash leaves no queue without an owner

    def _close_named(self, record: Record, group: ConsumerGroup) -> None:
        for position, index in REFERENCE.iter_unpack(record.body):
            checkpoint = self._checkpoints.open_delivery(record, position, index)
            if checkpoint is not None:
                self._checkpoints.close(checkpoint, 1 << index)
                group.in_flight -= 1

    def _queue(self, queue_id: int, topic_filter: str) -> LightQueue | None:
        try:
            return self._queues.get(queue_id)
        except QueueUnknown:
            return self._queues.find(topic_filter)  # the queue of a root gets another id after a repair
