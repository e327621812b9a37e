"""The transient queues: those that serve connections and end with the process. `store.queues.catalogue` has the durable
ones."""

from __future__ import annotations

from penstock.store.index.index import Batch, Index
from penstock.store.queues.lightqueue import TRANSIENT, LightQueue, delete_entries, delete_transient_entries


class TransientQueues:
    """The transient queues of a store, one for each filter.

    Parameters:
        index: holds the entries.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self.by_filter: dict[str, LightQueue] = {}
        """The queues, by filter."""
        self.by_id: dict[int, LightQueue] = {}
        """The queues, by id."""
        self._next_id = TRANSIENT
        self._removed: list[int] = []
        """Ids of removed queues. The next save deletes their entries."""

    def add(self, topic_filter: str) -> LightQueue:
        """Create the queue of a filter, which has none."""
        queue = self.by_filter[topic_filter] = self.by_id[self._next_id] = LightQueue(self._next_id, topic_filter, self._index)
        self._next_id += 1
        return queue

    def remove(self, queue: LightQueue) -> None:
        """Remove a queue and its entries."""
        del self.by_filter[queue.filter]
        del self.by_id[queue.id]
        self._removed.append(queue.id)

    def save(self, batch: Batch) -> None:
        """Put the deletion of the entries of removed queues into `batch`."""
        for queue_id in self._removed:
            delete_entries(batch, self._index, queue_id)
        self._removed.clear()

    def load(self) -> None:
        """Delete the entries that the transient queues of earlier processes have left."""
        delete_transient_entries(self._index)
