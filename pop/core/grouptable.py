"""The groups, and their rows in the index.

Rows of the index: key b"G", group id u32 big-endian, value `ConsumerGroup.row`; and those of `pop.core.order` and
`pop.core.redriven`.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any

import orjson

from penstock.pop.core.damages import DamagedRanges
from penstock.pop.core.deadletters import RedrivenMessages, delete_redriven
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.order import delete_order
from penstock.pop.core.settings import ConsumerGroupSettings
from penstock.pop.options import PopOptions
from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.queues.lightqueue import LightQueue
from penstock.store.queues.queues import Queues
from penstock.store.record import POP_FIXED, Record

DAMAGES_ROW = 0
"""Group id whose row holds the damaged ranges. The ids of groups begin at 1."""

_GROUP_KEY = Struct(">cI")


class GroupTable:
    """All groups. Only applying a record changes it.

    Parameters:
        queues: the light queues that groups read.
        damages: the damaged ranges of the log.
        arrived: called with a group when messages that are visible to it were committed.
        options: what applies to a group where nothing was set for it.
    """

    def __init__(
        self, queues: Queues, damages: DamagedRanges, arrived: Callable[[ConsumerGroup], None], options: PopOptions
    ) -> None:
        self._queues = queues
        self._damages = damages
        self._arrived = arrived
        self._options = options
        self.by_name: dict[tuple[str, str], ConsumerGroup] = {}
        """Groups by name and filter."""
        self.by_id: dict[int, ConsumerGroup] = {}
        self.next_id = 1
        self.changed: set[int] = set()
        """Ids of the groups whose rows must be written."""
        self.orders_deleted: set[int] = set()
        """Ids of the groups whose order rows must be deleted."""
        self._deleted: list[int] = []
        self._index: Index | None = None

    def add(self, group_id: int, row: dict[str, Any]) -> ConsumerGroup:
        """Add the group that an index row describes."""
        name, topic_filter = row["name"], row["filter"]
        queue, retry = self._queues.get(row["queue"]), self._queues.get(row["retry"])
        settings = ConsumerGroupSettings.from_row(row.get("settings", {}))
        assert self._index is not None
        redriven = RedrivenMessages(group_id, self._index)
        group = ConsumerGroup(group_id, name, topic_filter, queue, retry, settings, self._options, redriven, row["account"])
        group.cursor = group.scanned = row["cursor"]
        group.retry_cursor = row["retry_cursor"]
        group.epoch = row["epoch"]
        group.expected = row.get("expected", group.cursor)
        group.frozen = row.get("frozen", False)
        group.dead_letter_count = row.get("dead", 0)
        self.by_id[group_id] = self.by_name[name, topic_filter] = group
        self.reserve_id(group_id)

        def arrived(_queue: LightQueue, _offset: int, _entries: bytes) -> None:
            self._arrived(group)

        group.watcher = arrived
        group.queue.watchers.append(arrived)
        group.retry.watchers.append(arrived)
        return group

    def reserve_id(self, group_id: int) -> None:
        """Never give this id to a new group."""
        self.next_id = max(self.next_id, group_id + 1)

    def remove(self, group: ConsumerGroup) -> None:
        """Remove a deleted group."""
        group.is_deleted = True
        del self.by_id[group.id]
        del self.by_name[group.name, group.filter]
        assert group.watcher is not None
        group.queue.watchers.remove(group.watcher)
        group.retry.watchers.remove(group.watcher)
        self.changed.discard(group.id)
        self._deleted.append(group.id)
        self.orders_deleted.add(group.id)

    def of_record(self, record: Record) -> ConsumerGroup | None:
        """Return the group of a record. Return None, and log it, if damage has destroyed the record that created the group."""
        group_id = int(POP_FIXED.unpack(record.fixed)[0])
        group = self.by_id.get(group_id)
        if group is None:
            self._damages.skip(record, "group", group_id)
            self.reserve_id(group_id)
        return group

    def load(self, index: Index) -> None:
        """Read all rows, also that of the damaged ranges."""
        self._index = index
        for key, value in index.rows(bytes(KeySpace.GROUP)):
            group_id = _GROUP_KEY.unpack(key)[1]
            if group_id == DAMAGES_ROW:
                self._damages.load(value)
            else:
                group = self.add(group_id, orjson.loads(value))
                if group.order is not None:
                    group.order.load(index, group_id)

    def save(self, batch: Batch) -> None:
        """Put all rows that changed since the last call into `batch`."""
        if self._damages.changed:
            batch.put(_GROUP_KEY.pack(KeySpace.GROUP, DAMAGES_ROW), self._damages.row())
        for group_id in self._deleted:
            batch.delete(_GROUP_KEY.pack(KeySpace.GROUP, group_id))
            delete_redriven(batch, group_id)
        for group_id in self.orders_deleted:
            delete_order(batch, group_id)
        for group_id in self.changed:
            group = self.by_id[group_id]
            batch.put(_GROUP_KEY.pack(KeySpace.GROUP, group_id), group.row())
            group.redriven.save(batch)
            if group.order is not None:
                group.order.save(batch, group_id)
        self._deleted.clear()
        self.orders_deleted.clear()
        self.changed.clear()
