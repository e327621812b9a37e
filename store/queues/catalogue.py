"""The catalogue of durable queues. It is in the index, and only queues in use are in memory.

So a million queues of silent devices cost no memory, and no time at a start. A queue is loaded when its filter, its id or a
message needs it, and there is one object for it as long as a route, a group or a backfill refers to it.

Rows of the index:

    key b"F" or b"W", filter         the queues of the filter, in sequence: id u32, start i64, offset of the open row u64,
    number
                                     of entries of the open row u8, these entries; b"W" if the filter has wildcards
    key b"N", queue id u32           JSON: filter, list of the owners, id of the account that is charged
    key b"L", queue id u32           the queue is being backfilled: position that it has reached, u64
    key b"Mqueues"                   next queue id, number of queues, number of plain queues: u32 each

Numbers in keys, and in the last two values, are big-endian. In the queues of a filter they are little-endian, as in entries. A
start is a time in ms, or an extreme value for `earliest` and `latest`. All queues of a filter are one row, so that one
lookup finds where the messages of a topic go, and which entries the queue of a silent device has. Owners are in a row of
their own, because there may be many, and each commit that adds entries writes the first row again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, takewhile
from struct import Struct
from weakref import ref

from penstock.store import topics
from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.index.rowformats import QUEUE_ROW
from penstock.store.queues.lightqueue import (
    ENTRY_BYTES,
    RESTORED,
    LightQueue,
    Start,
    delete_entries,
    name_key,
    name_of,
    name_row,
)

_ID = Struct(">I")
_POSITION = Struct(">Q")
_TOTALS_KEY = KeySpace.META + b"queues"
_TOTALS = Struct(">III")

_QUEUE_BYTES = QUEUE_ROW.size
_EARLIEST, _LATEST = -(2**63), 2**63 - 1
_ENDS: dict[int, Start] = {_EARLIEST: "earliest", _LATEST: "latest"}
_CODES: dict[Start, int] = {start: code for code, start in _ENDS.items()}

SWEEP_MIN = 1_024
"""Number of loaded queues from which on dead references are swept. Each sweep sets it to twice the number that is left."""

ROWS_AT_ONCE = 64
"""Rows that a walk over all filters reads at once. Between two reads it holds no iterator, so that others can write."""

PLAIN_MAX = 65_536
"""Maximum number of plain filters that are kept in memory as well. Most topics are none of them, which then needs no lookup."""

_NAME = bytes(KeySpace.NAME)
_WILDCARD = bytes(KeySpace.WILDCARD)


def _filter_key(topic_filter: str) -> bytes:
    return (_WILDCARD if topics.is_wildcard(topic_filter) else _NAME) + topic_filter.encode()


def _filling_key(queue_id: int) -> bytes:
    return KeySpace.BACKFILL + _ID.pack(queue_id)


def _is_plain(topic_filter: str) -> bool:
    return not topic_filter.startswith("$") and not topics.is_wildcard(topic_filter)


def _queue_row(queue: LightQueue) -> bytes:
    """Return the bytes of a queue in the row of its filter."""
    row = queue.open_row
    return QUEUE_ROW.pack(queue.id, _CODES.get(queue.start, queue.start), queue.open_offset, len(row) // ENTRY_BYTES) + row


def _queue_rows(row: bytes | None) -> dict[int, bytes]:
    """Return the bytes of each queue in the row of a filter, by queue id."""
    found = {}
    at = 0
    while row is not None and at < len(row):
        queue_id, _, _, count = QUEUE_ROW.unpack_from(row, at)
        stop = at + _QUEUE_BYTES + count * ENTRY_BYTES
        found[queue_id] = row[at:stop]
        at = stop
    return found


def without_entries(row: bytes) -> bytes:
    """Return the row of a filter with the same queues and offsets, but without the entries of open rows."""
    parts = []
    for part in _queue_rows(row).values():
        queue_id, start, offset, count = QUEUE_ROW.unpack_from(part)
        parts.append(QUEUE_ROW.pack(queue_id, start, offset + count, 0))
    return b"".join(parts)


def entries_of(row: bytes) -> bytes:
    """Return the entries of the open rows in the row of a filter."""
    return b"".join(part[_QUEUE_BYTES:] for part in _queue_rows(row).values())


def load_count_from(index: Index, queue_id: int, offset: int) -> int:
    """Return the number of entries of a durable queue from `offset` on, as the index has them; 0 if there is no such queue."""
    queue = Catalogue(index).get(queue_id)
    return queue.count_from(offset) if queue is not None else 0


class _Loaded(dict[int, ref[LightQueue]]):
    """Weak references to the loaded queues, by id.

    Dead references are swept now and then. A callback for each, as in `WeakValueDictionary`, would slow down every lookup.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sweep_at = 0

    def queue(self, queue_id: int) -> LightQueue | None:
        held = self.get(queue_id)
        return held() if held is not None else None

    def keep(self, queue: LightQueue) -> None:
        self[queue.id] = ref(queue)
        if len(self) >= self._sweep_at:
            for queue_id in [queue_id for queue_id, held in self.items() if held() is None]:
                del self[queue_id]
            self._sweep_at = max(2 * len(self), SWEEP_MIN)


class Catalogue:
    """The durable queues of an index.

    Parameters:
        index: holds the catalogue.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._loaded = _Loaded()
        self._unsaved: dict[str, dict[int, LightQueue | None]] = {}
        """Queues that the next save writes, by filter and id; None for deleted ones. They override the rows of the index."""
        self._renamed: dict[int, LightQueue] = {}
        """Queues that are new or whose owners have changed, by id. The next save writes their names as well."""
        self._fill_positions: dict[int, int | None] = {}
        """Positions of backfills that the next save writes, by queue id; None for those that have ended."""
        self._totals_changed = False
        self.next_id = 1
        self.count = 0
        self.plain = 0
        """Number of plain queues: those without wildcards that are not internal, which a topic finds by its own name."""
        self._plain_filters: set[str] | None = set()
        """Filters of the plain queues; None if there have been more than `PLAIN_MAX` since the start."""

    def get(self, queue_id: int) -> LightQueue | None:
        """Return the queue with an id, or None."""
        queue = self._loaded.queue(queue_id)
        if queue is not None:
            return queue
        name = self._index.get(name_key(queue_id))
        if name is None:
            return None
        return next((each for each in self.named(name_of(name)[0]) if each.id == queue_id), None)

    def may_name(self, topic: str) -> bool:
        """Return whether a topic may have plain queues, which `named` then returns; False if it surely has none."""
        return self._plain_filters is None or topic in self._plain_filters

    def find(self, topic_filter: str, start: Start) -> LightQueue | None:
        """Return the queue of a filter and start, or None."""
        if topic_filter not in self._unsaved:
            key = _filter_key(topic_filter)
            row = self._index.get(key)
            if row is None:
                return None
            queue = self._load(topic_filter, key, row)
            if queue.alone_at:
                return queue if queue.start == start else None
        return next((each for each in self.named(topic_filter) if each.start == start), None)

    def named(self, topic_filter: str) -> list[LightQueue]:
        """Return all queues of a filter, with one lookup."""
        key = _filter_key(topic_filter)
        row = self._index.get(key)
        unsaved = self._unsaved.get(topic_filter)
        if unsaved is None:
            return self._load_all(topic_filter, key, row) if row is not None else []
        saved = [self._load(topic_filter, b"", part) for queue_id, part in _queue_rows(row).items() if queue_id not in unsaved]
        return saved + [queue for queue in unsaved.values() if queue is not None]

    def _load_all(self, topic_filter: str, key: bytes, row: bytes) -> list[LightQueue]:
        first = self._load(topic_filter, key, row)
        return [first] if first.alone_at else [self._load(topic_filter, b"", part) for part in _queue_rows(row).values()]

    def _load(self, topic_filter: str, key: bytes, row: bytes) -> LightQueue:
        """Return the first queue of a filter's row: the loaded object or a new one. `key` is given for a whole row."""
        queue_id, code, offset, count = QUEUE_ROW.unpack_from(row)
        held = self._loaded.get(queue_id)
        queue = held() if held is not None else None
        if queue is None:
            stop = _QUEUE_BYTES + count * ENTRY_BYTES
            start = _ENDS.get(code, code)
            queue = LightQueue(queue_id, topic_filter, self._index, offset, row[_QUEUE_BYTES:stop], start, None)
            queue.alone_at = key if stop == len(row) else b""
            self._loaded.keep(queue)
        return queue

    def add(self, queue: LightQueue) -> None:
        """Add a new queue."""
        self._loaded.keep(queue)
        if queue.id < RESTORED:
            self.next_id = max(self.next_id, queue.id + 1)
        self.count += 1
        self._totals_changed = True
        self._renamed[queue.id] = queue
        self._note(queue)
        if _is_plain(queue.filter):
            self.plain += 1
            if self._plain_filters is not None:
                self._plain_filters.add(queue.filter)
                if len(self._plain_filters) > PLAIN_MAX:
                    self._plain_filters = None

    def change(self, queue: LightQueue, backfill_position: int | None = None) -> None:
        """Note that the owners of a queue or the position of its backfill have changed. None means no backfill."""
        if queue.start != "latest":
            self._fill_positions[queue.id] = backfill_position
        self._renamed[queue.id] = queue
        self._note(queue)

    def remove(self, queue: LightQueue) -> None:
        """Remove a queue and its entries."""
        self._loaded.pop(queue.id, None)
        self._renamed.pop(queue.id, None)
        if queue.start != "latest":
            self._fill_positions[queue.id] = None
        self.count -= 1
        self._totals_changed = True
        self._unsaved.setdefault(queue.filter, {})[queue.id] = None
        if _is_plain(queue.filter):
            self.plain -= 1
            if self._plain_filters is not None and not self.named(queue.filter):
                self._plain_filters.discard(queue.filter)

    def _note(self, queue: LightQueue) -> None:
        # This also keeps the queue alive, so that it isn't loaded again from a row that is out of date.
        self._unsaved.setdefault(queue.filter, {})[queue.id] = queue

    def backfill_position(self, queue: LightQueue) -> int | None:
        """Return the position of a queue's backfill at the last save, or None if it was not being backfilled."""
        row = self._index.get(_filling_key(queue.id))
        return None if row is None else int(_POSITION.unpack(row)[0])

    def __iter__(self) -> Iterator[LightQueue]:
        """Yield all queues: saved ones by id, then new ones. This loads each of them, so it is for tools and tests."""
        for key, _ in self._index.rows(bytes(KeySpace.QUEUE)):
            queue = self.get(_ID.unpack(key[1:])[0])
            if queue is not None:
                yield queue
        for queues in list(self._unsaved.values()):
            for queue in list(queues.values()):
                if queue is not None and self._index.get(name_key(queue.id)) is None:
                    yield queue

    def open_rows(self) -> Iterator[tuple[int, bytes]]:
        """Yield id and open row of each queue that has one, as saved. Callers may write meanwhile."""
        for prefix in (_NAME, _WILDCARD):
            start = b""
            while rows := list(islice(self._index.rows(prefix, start), ROWS_AT_ONCE)):
                for _, row in rows:
                    for queue_id, part in _queue_rows(row).items():
                        if len(part) > _QUEUE_BYTES:
                            yield queue_id, part[_QUEUE_BYTES:]
                start = rows[-1][0][1:] + b"\0"

    # --- the index --------------------------------------------------------------------------------------------------

    def filters(self, start: str, count: int, *, are_wildcards: bool) -> list[str]:
        """Return up to `count` filters that have queues, with or without wildcards, from `start` on, in order, as saved."""
        prefix = _WILDCARD if are_wildcards else _NAME
        return [key[1:].decode() for key, _ in islice(self._index.rows(prefix, start.encode()), count)]

    def load(self) -> tuple[list[LightQueue], list[LightQueue]]:
        """Read the totals. Return the queues whose filter has wildcards, and those that are being backfilled."""
        totals = self._index.get(_TOTALS_KEY)
        if totals is not None:
            self.next_id, self.count, self.plain = _TOTALS.unpack(totals)
        self._plain_filters = self._load_plain_filters() if self.plain <= PLAIN_MAX else None
        wildcards = [queue for key, row in self._index.rows(_WILDCARD) for queue in self._load_all(key[1:].decode(), key, row)]
        backfilled = [self._known(_ID.unpack(key[1:])[0]) for key, _ in self._index.rows(bytes(KeySpace.BACKFILL))]
        return wildcards, backfilled

    def _load_plain_filters(self) -> set[str]:
        """Read the filters of all plain queues, which are the names that don't begin with `$`."""
        before = takewhile(lambda row: row[0] < _NAME + b"$", self._index.rows(_NAME))
        return {key[1:].decode() for key, _ in chain(before, self._index.rows(_NAME, b"%"))}

    def _known(self, queue_id: int) -> LightQueue:
        queue = self.get(queue_id)
        assert queue is not None, queue_id
        return queue

    def save_open_row(self, batch: Batch, queue: LightQueue) -> None:
        """Put offset and open row of a queue into `batch`. If other queues share its row, `save` does that instead."""
        if queue.alone_at and queue.filter not in self._unsaved:
            batch.put(queue.alone_at, _queue_row(queue))
        else:
            self._note(queue)

    def save(self, batch: Batch) -> None:
        """Put all changes since the last save into `batch`."""
        for topic_filter, changes in self._unsaved.items():
            key = _filter_key(topic_filter)
            parts = _queue_rows(self._index.get(key))
            for queue_id, queue in changes.items():
                if queue is not None:
                    parts[queue_id] = _queue_row(queue)
                    continue
                parts.pop(queue_id, None)
                batch.delete(name_key(queue_id))
                delete_entries(batch, self._index, queue_id)
            if parts:
                batch.put(key, b"".join(parts.values()))
            else:
                batch.delete(key)
            for queue in map(self._loaded.queue, parts):
                if queue is not None:
                    queue.alone_at = key if len(parts) == 1 else b""
        for queue in self._renamed.values():
            batch.put(name_key(queue.id), name_row(queue))
        for queue_id, position in self._fill_positions.items():
            if position is None:
                batch.delete(_filling_key(queue_id))
            else:
                batch.put(_filling_key(queue_id), _POSITION.pack(position))
        if self._totals_changed:
            batch.put(_TOTALS_KEY, _TOTALS.pack(self.next_id, self.count, self.plain))
        self._unsaved.clear()
        self._renamed.clear()
        self._fill_positions.clear()
        self._totals_changed = False
