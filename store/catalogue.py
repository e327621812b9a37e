"""The catalogue: which durable queues exist. It is in the index; in memory are those that somebody uses.

A million queues of devices that are silent cost no memory and no time at a start. A queue is loaded when its filter, its id or
a message to it asks for it, about 10 us, and is one object as long as anybody holds it: a route, a group, a filling.

Rows of the index:

    key b"F" or b"W", filter         JSON, a list of the filter's queues: [id, start, owners], and while it is filled the
                                     position it is at; b"W" where the filter has wildcards
    key b"N", queue id u32           the filter
    key b"L", queue id u32           nothing: the queue is being filled
    key b"Mqueues"                   next queue id, queues that exist, those of them that are plain: u32 each

Numbers are big-endian. All queues of a filter are one row, so one lookup finds where the messages of a topic go.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, takewhile
from struct import Struct
from typing import Any
from weakref import ref

import orjson

from store import topics
from store.index import Batch, Index, Space
from store.lightqueue import RESTORED, LightQueue, Start, delete_entries

_ID_KEY = Struct(">cI")
_ID = Struct(">I")
_TOTALS_KEY = Space.META + b"queues"
_TOTALS = Struct(">III")


PLAIN_MAX = 65_536
"""Plain filters that are kept in memory as well, 0.1 KiB each: most topics are none of them, and need no lookup to know it."""

_NAME = bytes(Space.NAME)
_WILDCARD = bytes(Space.WILDCARD)


def _name_key(topic_filter: str) -> bytes:
    return (_WILDCARD if topics.is_wildcard(topic_filter) else _NAME) + topic_filter.encode()


def _is_plain(topic_filter: str) -> bool:
    return not topic_filter.startswith("$") and not topics.is_wildcard(topic_filter)


class _Loaded(dict[int, ref[LightQueue]]):
    """The queues that somebody holds, by id. A `WeakValueDictionary` costs 0.7 us more for one that is held for a moment."""

    def queue(self, queue_id: int) -> LightQueue | None:
        held = self.get(queue_id)
        return held() if held is not None else None

    def keep(self, queue: LightQueue) -> LightQueue:
        self[queue.id] = reference = _Reference(queue, self._forget)
        reference.id = queue.id
        return queue

    def _forget(self, reference: ref[LightQueue]) -> None:
        assert isinstance(reference, _Reference)
        if self.get(reference.id) is reference:
            del self[reference.id]


class _Reference(ref[LightQueue]):
    """Knows the id of a queue that is gone."""

    __slots__ = ("id",)
    id: int


class Catalogue:
    """The durable queues of an index.

    Parameters:
        index: where they are.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._loaded = _Loaded()
        self._unsaved: dict[str, dict[int, LightQueue | None]] = {}
        """What the next save writes, by filter and id; None where the queue is gone. Goes before what the index says."""
        self._fill_positions: dict[int, int] = {}
        self._totals_changed = False
        self.next_id = 1
        self.count = 0
        self.plain = 0
        """Queues that a topic finds by its own name: neither wildcards nor internal."""
        self._plain_filters: set[str] | None = set()
        """Their filters; None while there are more than `PLAIN_MAX`, or have been since the start."""

    def get(self, queue_id: int) -> LightQueue | None:
        """Return the queue with an id, or None."""
        queue = self._loaded.queue(queue_id)
        if queue is not None:
            return queue
        name = self._index.get(_ID_KEY.pack(Space.QUEUE, queue_id))
        if name is None:
            return None
        return next((each for each in self.named(name.decode()) if each.id == queue_id), None)

    def loaded(self, queue_id: int) -> LightQueue | None:
        """Return the queue with an id where somebody holds it, or None."""
        return self._loaded.queue(queue_id)

    def may_name(self, topic: str) -> bool:
        """Return whether `named` is to be asked for the plain queues of a topic: False where there are surely none."""
        return self._plain_filters is None or topic in self._plain_filters

    def find(self, topic_filter: str, start: Start) -> LightQueue | None:
        """Return the queue of a filter and start, or None: about 3 us where there is none."""
        if topic_filter in self._unsaved:
            return next((each for each in self.named(topic_filter) if each.start == start), None)
        row = self._index.get(_name_key(topic_filter))
        for fields in orjson.loads(row) if row is not None else ():
            if fields[1] == start:
                return self._load(topic_filter, fields)
        return None

    def named(self, topic_filter: str) -> list[LightQueue]:
        """Return all queues of a filter, by one lookup."""
        row = self._index.get(_name_key(topic_filter))
        unsaved = self._unsaved.get(topic_filter)
        if unsaved is None:
            return [self._load(topic_filter, fields) for fields in orjson.loads(row)] if row is not None else []
        saved = orjson.loads(row) if row is not None else []
        kept = [self._load(topic_filter, fields) for fields in saved if fields[0] not in unsaved]
        return kept + [queue for queue in unsaved.values() if queue is not None]

    def _load(self, topic_filter: str, fields: list[Any]) -> LightQueue:
        queue_id = fields[0]
        queue = self._loaded.queue(queue_id)
        if queue is None:
            queue = self._loaded.keep(LightQueue(queue_id, topic_filter, self._index, None, fields[1]))
            queue.owners.update(fields[2])
            if len(fields) > 3:
                self._fill_positions[queue_id] = fields[3]
        return queue

    def add(self, queue: LightQueue) -> None:
        """Note a queue that is new."""
        self._loaded.keep(queue)
        if queue.id < RESTORED:
            self.next_id = max(self.next_id, queue.id + 1)
        self.count += 1
        self._totals_changed = True
        self._note(queue)
        if _is_plain(queue.filter):
            self.plain += 1
            if self._plain_filters is not None:
                self._plain_filters.add(queue.filter)
                if len(self._plain_filters) > PLAIN_MAX:
                    self._plain_filters = None

    def change(self, queue: LightQueue, fill_position: int | None = None) -> None:
        """Note that a queue's owners have changed, or how far its filling is; None where it isn't filled (any more)."""
        if fill_position is None:
            self._fill_positions.pop(queue.id, None)
        else:
            self._fill_positions[queue.id] = fill_position
        self._note(queue)

    def remove(self, queue: LightQueue) -> None:
        """Note that a queue is gone, with its entries."""
        self._loaded.pop(queue.id, None)
        self._fill_positions.pop(queue.id, None)
        self.count -= 1
        self._totals_changed = True
        self._unsaved.setdefault(queue.filter, {})[queue.id] = None
        if _is_plain(queue.filter):
            self.plain -= 1
            if self._plain_filters is not None and not self.named(queue.filter):
                self._plain_filters.discard(queue.filter)

    def _note(self, queue: LightQueue) -> None:
        # Holds the queue, so that it isn't loaded again from a row that is out of date.
        self._unsaved.setdefault(queue.filter, {})[queue.id] = queue

    def fill_position(self, queue: LightQueue) -> int | None:
        """Return how far a queue's filling is, or None where it isn't being filled."""
        return self._fill_positions.get(queue.id)

    def __iter__(self) -> Iterator[LightQueue]:
        """Yield all queues: those that are saved by their ids, then new ones. Loads each: for tools and tests."""
        for key, _ in self._index.rows(bytes(Space.QUEUE)):
            queue = self.get(_ID.unpack(key[1:])[0])
            if queue is not None:
                yield queue
        for queues in list(self._unsaved.values()):
            for queue in list(queues.values()):
                if queue is not None and self._index.get(_ID_KEY.pack(Space.QUEUE, queue.id)) is None:
                    yield queue

    # --- the index --------------------------------------------------------------------------------------------------

    def load(self) -> tuple[list[LightQueue], list[LightQueue]]:
        """Read totals; return the queues whose filter is a wildcard, and those that are being filled."""
        totals = self._index.get(_TOTALS_KEY)
        if totals is not None:
            self.next_id, self.count, self.plain = _TOTALS.unpack(totals)
        self._plain_filters = self._load_plain_filters() if self.plain <= PLAIN_MAX else None
        wildcards = [
            self._load(key[1:].decode(), fields)
            for key, row in self._index.rows(bytes(Space.WILDCARD))
            for fields in orjson.loads(row)
        ]
        filling = [self._known(_ID.unpack(key[1:])[0]) for key, _ in self._index.rows(bytes(Space.FILLING))]
        return wildcards, filling

    def _load_plain_filters(self) -> set[str]:
        """Read the filters between those that are internal: all names that don't begin with `$`."""
        before = takewhile(lambda row: row[0] < _NAME + b"$", self._index.rows(_NAME))
        return {key[1:].decode() for key, _ in chain(before, self._index.rows(_NAME, b"%"))}

    def _known(self, queue_id: int) -> LightQueue:
        queue = self.get(queue_id)
        assert queue is not None, queue_id
        return queue

    def save(self, batch: Batch) -> None:
        """Put what changed into `batch`."""
        for topic_filter, changes in self._unsaved.items():
            key = _name_key(topic_filter)
            row = self._index.get(key)
            saved = {fields[0]: fields for fields in orjson.loads(row)} if row is not None else {}
            for queue_id, queue in changes.items():
                old = saved.pop(queue_id, None)
                was_filled = old is not None and len(old) > 3
                if queue is not None:
                    saved[queue_id] = self._save_queue(batch, queue, was_filled)
                    continue
                batch.delete(_ID_KEY.pack(Space.QUEUE, queue_id))
                if was_filled:
                    batch.delete(_ID_KEY.pack(Space.FILLING, queue_id))
                delete_entries(batch, queue_id)
            if saved:
                batch.put(key, orjson.dumps(list(saved.values())))
            else:
                batch.delete(key)
        if self._totals_changed:
            batch.put(_TOTALS_KEY, _TOTALS.pack(self.next_id, self.count, self.plain))
        self._unsaved.clear()
        self._totals_changed = False

    def _save_queue(self, batch: Batch, queue: LightQueue, was_filled: bool) -> list[object]:
        """Put what is kept of a queue besides its filter's row; return its fields of that."""
        fields: list[object] = [queue.id, queue.start, sorted(queue.owners)]
        position = self._fill_positions.get(queue.id)
        batch.put(_ID_KEY.pack(Space.QUEUE, queue.id), queue.filter.encode())
        if position is not None:
            fields.append(position)
            batch.put(_ID_KEY.pack(Space.FILLING, queue.id), b"")
        elif was_filled:
            batch.delete(_ID_KEY.pack(Space.FILLING, queue.id))
        return fields
