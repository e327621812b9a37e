"""The catalogue: which durable queues exist. It is in the index; in memory are those that somebody uses.

A million queues of devices that are silent cost no memory and no time at a start. A queue is loaded when its filter, its id or
a message to it asks for it, about 20 us, and is one object as long as anybody holds it: a route, a group, a filling.

Rows of the index:

    key b"N", queue id u32 big-endian       JSON: filter, start, owners, and while it is filled, fill: the position it is at
    key b"F" or b"W", start, filter         queue id u32 big-endian; b"W" where the filter has wildcards, b"e" or b"l" the start
    key b"L", queue id u32 big-endian       nothing: the queue is being filled
    key b"Mqueues"                          next queue id u32, queues that exist u32 (big-endian)
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from weakref import WeakValueDictionary

import orjson

from store import topics
from store.index import Batch, Index, Space
from store.lightqueue import RESTORED, LightQueue, Start, delete_entries, load_next_offset

_ID_KEY = Struct(">cI")
_ID = Struct(">I")
_TOTALS_KEY = Space.META + b"queues"
_TOTALS = Struct(">II")

Name = tuple[str, Start]


def _name_key(topic_filter: str, start: Start) -> bytes:
    space = Space.WILDCARD if topics.is_wildcard(topic_filter) else Space.NAME
    return space + start[:1].encode() + topic_filter.encode()


def _is_plain(topic_filter: str) -> bool:
    return not topic_filter.startswith("$") and not topics.is_wildcard(topic_filter)


class Catalogue:
    """The durable queues of an index.

    Parameters:
        index: where they are.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._by_id: WeakValueDictionary[int, LightQueue] = WeakValueDictionary()
        self._by_name: WeakValueDictionary[Name, LightQueue] = WeakValueDictionary()
        self._changed: dict[int, LightQueue] = {}
        """What the next save writes. Holds the queues, so that none is loaded again from a row that is out of date."""
        self._removed: dict[int, Name] = {}
        self._removed_names: set[Name] = set()
        self._fill_positions: dict[int, int] = {}
        self._totals_changed = False
        self.next_id = 1
        self.count = 0
        self.plain = 0
        """Queues that a topic finds by its own name: neither wildcards nor internal. Without any, no topic is looked up."""

    def get(self, queue_id: int) -> LightQueue | None:
        """Return the queue with an id, or None."""
        queue = self._by_id.get(queue_id)
        if queue is not None or queue_id in self._removed:
            return queue
        data = self._index.get(_ID_KEY.pack(Space.QUEUE, queue_id))
        if data is None:
            return None
        row = orjson.loads(data)
        queue = LightQueue(queue_id, row["filter"], self._index, load_next_offset(self._index, queue_id), row["start"])
        queue.owners.update(row["owners"])
        if "fill" in row:
            self._fill_positions[queue_id] = row["fill"]
        self._by_id[queue_id] = self._by_name[queue.filter, queue.start] = queue
        return queue

    def find(self, topic_filter: str, start: Start) -> LightQueue | None:
        """Return the queue of a filter and start, or None: about 3 us where there is none."""
        name = (topic_filter, start)
        queue = self._by_name.get(name)
        if queue is not None or name in self._removed_names:
            return queue
        found = self._index.get(_name_key(topic_filter, start))
        return self.get(_ID.unpack(found)[0]) if found is not None else None

    def add(self, queue: LightQueue) -> None:
        """Note a queue that is new."""
        self._by_id[queue.id] = self._by_name[queue.filter, queue.start] = queue
        self._removed_names.discard((queue.filter, queue.start))
        if queue.id < RESTORED:
            self.next_id = max(self.next_id, queue.id + 1)
        self.count += 1
        self.plain += _is_plain(queue.filter)
        self._totals_changed = True
        self._changed[queue.id] = queue

    def change(self, queue: LightQueue, fill_position: int | None = None) -> None:
        """Note that a queue's owners have changed, or how far its filling is; None where it isn't filled (any more)."""
        self._changed[queue.id] = queue
        if fill_position is None:
            self._fill_positions.pop(queue.id, None)
        else:
            self._fill_positions[queue.id] = fill_position

    def remove(self, queue: LightQueue) -> None:
        """Note that a queue is gone, with its entries."""
        name = (queue.filter, queue.start)
        self._by_id.pop(queue.id, None)
        self._by_name.pop(name, None)
        self._changed.pop(queue.id, None)
        self._fill_positions.pop(queue.id, None)
        self._removed[queue.id] = name
        self._removed_names.add(name)
        self.count -= 1
        self.plain -= _is_plain(queue.filter)
        self._totals_changed = True

    def fill_position(self, queue: LightQueue) -> int | None:
        """Return how far a queue's filling is, or None where it isn't being filled."""
        return self._fill_positions.get(queue.id)

    def __iter__(self) -> Iterator[LightQueue]:
        """Yield all queues. Loads each: for tools and tests."""
        saved = {_ID.unpack(key[1:])[0] for key, _ in self._index.rows(bytes(Space.QUEUE))}
        for queue_id in sorted((saved | self._changed.keys()) - self._removed.keys()):
            queue = self.get(queue_id)
            if queue is not None:
                yield queue

    # --- the index --------------------------------------------------------------------------------------------------

    def load(self) -> tuple[list[LightQueue], list[LightQueue]]:
        """Read totals; return the queues whose filter is a wildcard, and those that are being filled."""
        totals = self._index.get(_TOTALS_KEY)
        if totals is not None:
            self.next_id, self.count = _TOTALS.unpack(totals)
        wildcards = [self._known(_ID.unpack(value)[0]) for _, value in self._index.rows(bytes(Space.WILDCARD))]
        filling = [self._known(_ID.unpack(key[1:])[0]) for key, _ in self._index.rows(bytes(Space.FILLING))]
        internal = sum(1 for _ in self._index.rows(_name_key("$", "latest")))
        self.plain = self.count - len(wildcards) - internal
        return wildcards, filling

    def _known(self, queue_id: int) -> LightQueue:
        queue = self.get(queue_id)
        assert queue is not None, queue_id
        return queue

    def save(self, batch: Batch) -> None:
        """Put what changed into `batch`; deletions first: recovery may find a name dropped and declared again in one batch."""
        for queue_id, name in self._removed.items():
            batch.delete(_ID_KEY.pack(Space.QUEUE, queue_id))
            batch.delete(_ID_KEY.pack(Space.FILLING, queue_id))
            batch.delete(_name_key(*name))
            delete_entries(batch, queue_id)
        for queue_id, queue in self._changed.items():
            row: dict[str, object] = {"filter": queue.filter, "start": queue.start, "owners": sorted(queue.owners)}
            position = self._fill_positions.get(queue_id)
            if position is None:
                batch.delete(_ID_KEY.pack(Space.FILLING, queue_id))
            else:
                row["fill"] = position
                batch.put(_ID_KEY.pack(Space.FILLING, queue_id), b"")
            batch.put(_ID_KEY.pack(Space.QUEUE, queue_id), orjson.dumps(row))
            batch.put(_name_key(queue.filter, queue.start), _ID.pack(queue_id))
        if self._totals_changed:
            batch.put(_TOTALS_KEY, _TOTALS.pack(self.next_id, self.count))
        self._removed.clear()
        self._removed_names.clear()
        self._changed.clear()
        self._totals_changed = False
