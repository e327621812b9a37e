"""All light queues, and the way from a topic to the queues that its messages belong to.

There is one root queue per first level (`plant/#`), always, and one per filter that somebody has declared. A durable queue
is declared by a record, so it is there again after a restart; a transient one serves a connection and ends with the process.

A durable queue that starts at `earliest`, or at a time, is filled once, from the log (`store.filling`), in slices between other
work. It joins live routing in the turn in which the filling has caught up: nothing is skipped and nothing comes twice. A filter
has a queue for each start that is asked for: one with all that was, one with what came since, one from a time on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from zlib import crc32

import orjson
import structlog

from penstock.store import topics
from penstock.store.backfill import Backfill
from penstock.store.catalogue import Catalogue
from penstock.store.commitlog import CommitLog
from penstock.store.errors import LimitExceeded, QueueUnknown, TopicInvalid
from penstock.store.index import Batch, Index, KeySpace
from penstock.store.lightqueue import (
    ENTRY,
    RESTORED,
    TRANSIENT,
    LightQueue,
    Start,
    delete_entries,
    delete_transient_entries,
    entries_key,
)
from penstock.store.options import StoreOptions
from penstock.store.record import QUEUE_FIXED, Kind, Record

logger = structlog.get_logger("store")

INTERNAL = ("$retry/", "$dlq/")
"""Filters that begin like this name queues that no topic reaches: retries and dead letters. Entries come by `append_to`."""

EVICTED_SHARE = 128
"""Of the route cache, one part in so many goes when it is full. One route at a time, each search for the oldest would walk over
what the dict has left of those before it: that was half of what a new topic cost."""

OUTDATED = -1
"""Version of a route that is no longer valid, whatever its root's is."""

ROOT = "root"
"""Owner of the root queues."""


class Root:
    """What the topics of one first level have in common: their root queue, and the version of their routes."""

    __slots__ = ("queue", "version")

    def __init__(self, queue: LightQueue) -> None:
        self.queue = queue
        self.version = 0


class Route:
    """Where the messages of one topic go. Valid while `version` is its root's.

    `beginning` is what the last record began with behind its checksum, topic included, where that had no properties, and
    `flags` and `turn_ms` are what stood in it. The next one mostly begins so too.
    """

    __slots__ = ("beginning", "flags", "name", "queues", "root", "topic", "turn_ms", "version")

    def __init__(self, topic: bytes, name: str, root: Root, queues: tuple[LightQueue, ...]) -> None:
        self.topic = topic
        self.name = name
        self.root = root
        self.queues = queues
        self.version = root.version
        self.beginning = b""
        self.flags = 0
        self.turn_ms = -1


class Queues:
    """The light queues of a store.

    Parameters:
        log: where the records are.
        options: bounds of topics and queues.
        append: appends a record to the store: `append(kind, fixed, topic, body, properties)`.
        now_ms: tells the time that a record appended now would carry.
    """

    def __init__(
        self, log: CommitLog, index: Index, options: StoreOptions, append: Callable[..., int], now_ms: Callable[[], int]
    ) -> None:
        self._log = log
        self._index = index
        self._options = options
        self._append = append
        self._now_ms = now_ms
        self._catalogue = Catalogue(index)
        self._trie: topics.FilterTrie[list[int]] = topics.FilterTrie()
        """Ids of the queues whose filters have wildcards, by filter. Others are looked up by the topic itself."""
        self._transient: dict[str, LightQueue] = {}
        self._transient_by_id: dict[int, LightQueue] = {}
        self._roots: dict[str, Root] = {}
        self._backfills: dict[int, Backfill] = {}
        self.routes: dict[bytes, Route] = {}
        """The cache of `route`, by topic. A route in it may be outdated; its topic is one that `route` takes."""
        self._next_transient_id = TRANSIENT
        self._transient_removed: list[int] = []
        self.dirty: list[LightQueue] = []
        self.first_position: Callable[[], int] = lambda: log.start
        """Returns where a queue begins that wants all that there is."""
        self.on_backfill: Callable[[], None] = lambda: None
        """Called when a filling begins: the owner then calls `fill` until it returns False."""

    def __len__(self) -> int:
        return self._catalogue.count + len(self._transient)

    def __iter__(self) -> Iterator[LightQueue]:
        """Yield all queues. Loads each: for tools and tests."""
        yield from self._catalogue
        yield from self._transient.values()

    # --- routing: the hot path --------------------------------------------------------------------------------------

    def route(self, topic: bytes) -> Route:
        """Return the route of a topic, from the cache where it is still valid: about 0.1 us, else 5 us.

        Raises:
            TopicInvalid: that isn't a topic one can publish to.
            LimitExceeded: its first level is new, and `store.queues_max` queues exist.
        """
        route = self.routes.get(topic)
        if route is not None and route.version == route.root.version:
            return route
        options = self._options
        name = topics.check_topic(topic, levels_max=options.topic_levels_max, bytes_max=options.topic_bytes_max)
        if name.startswith("$"):
            raise TopicInvalid(f"the topic {name[:64]!r} begins with '$': such topics belong to the node; publish to another")
        return self._resolve(topic, name)

    def route_stored(self, topic: bytes) -> Route:
        """Return the route of a topic that stands in the log: bounds that were lowered since don't hold for it."""
        route = self.routes.get(topic)
        if route is not None and route.version == route.root.version:
            return route
        name = topic.decode()
        level = topics.first_level(name)
        if level not in self._roots:
            self._restore_root(level)
        return self._resolve(topic, name)

    def _resolve(self, topic: bytes, name: str) -> Route:
        level = topics.first_level(name)
        root = self._roots.get(level) or self._declare_root(level)
        queues = tuple(self._matching(name))
        self._forget(topic)
        if len(self.routes) >= self._options.route_cache_max:
            for oldest in list(islice(self.routes, max(self._options.route_cache_max // EVICTED_SHARE, 1))):
                self._forget(oldest)
        route = self.routes[topic] = Route(topic, name, root, queues)
        return route

    def _matching(self, name: str) -> Iterator[LightQueue]:
        for ids in self._trie.match(name):
            yield from map(self.get, ids)
        if name in self._transient:
            yield self._transient[name]
        if self._catalogue.may_name(name) and not name.startswith("$"):
            yield from (queue for queue in self._catalogue.named(name) if queue.id not in self._backfills)

    def _forget(self, topic: bytes) -> None:
        """Take a route out of the cache, and tell those who keep it that it is no longer kept up to date."""
        route = self.routes.pop(topic, None)
        if route is not None:
            route.version = OUTDATED

    def dispatch(self, route: Route, position: int, size: int, aux: int) -> None:
        """Add an entry for a message to each queue of its route. The entries are readable after the commit."""
        self.dispatch_run(route.queues, ENTRY.pack(position, size, aux))

    def dispatch_run(self, queues: tuple[LightQueue, ...], entries: bytes) -> None:
        """Add entries to each of the queues of a route, one behind the other, as `dispatch` does one."""
        for queue in queues:
            pending = queue.pending
            if not pending:
                self.dirty.append(queue)
            pending += entries

    def append_to(self, queue: LightQueue, position: int, size: int, aux: int) -> None:
        """Add an entry to one queue, whatever the record's topic is: retries and dead letters come this way."""
        if not queue.pending:
            self.dirty.append(queue)
        queue.pending += ENTRY.pack(position, size, aux)

    # --- declaring and dropping -------------------------------------------------------------------------------------

    def get(self, queue_id: int) -> LightQueue:
        """Return the queue with an id. Raises QueueUnknown."""
        queue = self._transient_by_id.get(queue_id) or self._catalogue.get(queue_id)
        if queue is None:
            raise QueueUnknown(f"no light queue has the id {queue_id}")
        return queue

    def is_backfilling(self, queue: LightQueue) -> bool:
        """Return whether a queue doesn't have all yet that the log had before it."""
        return queue.id in self._backfills

    def find(self, topic_filter: str, start: Start = "latest") -> LightQueue | None:
        """Return the durable queue of a filter and start, or None. Roots and internal queues start at `latest`."""
        return self._catalogue.find(topic_filter, start)

    def declare(self, topic_filter: str, owner: str, start: Start = "latest") -> LightQueue:
        """Return the durable queue of a filter and start; declare it if it isn't there. It lasts until its last owner drops it.

        A root's filter has the root queue, whatever the start, and an internal name its one queue: they have everything anyway.

        Args:
            topic_filter: an MQTT topic filter, or a name that begins as `INTERNAL` says.
            owner: who needs it, such as `group:billing`.
            start: where the queue begins: with all that the log still has, with what came since the first who asked, or with
                what was stored at or after a time; a time that has not come yet is "latest".

        Raises:
            TopicInvalid: the filter breaks MQTT 5.0, 4.7, or a bound of the options.
            LimitExceeded: `store.queues_max` queues exist.
        """
        self._check_filter(topic_filter)
        level = topics.first_level(topic_filter)
        is_root = _is_root(topic_filter)
        if is_root and level not in self._roots:
            self._declare_root(level)
        has_everything = is_root or topic_filter.startswith(INTERNAL)
        if has_everything or (isinstance(start, int) and start > self._now_ms()):
            start = "latest"
        return self._claim(topic_filter, owner, start)

    def offset_of(self, queue: LightQueue, start: Start) -> int:
        """Return the offset at which one who asked `declare` for `start` begins to read the queue that it returned."""
        if start == "latest" or (isinstance(start, int) and start > self._now_ms()):
            return queue.next_offset
        if start == "earliest" or start == queue.start or queue.filter.startswith(INTERNAL):
            return 0
        return queue.offset_at(start, self._log)  # a root, which has more

    def _declare_root(self, level: str) -> Root:
        # Not held to the options: a topic within their bounds has a root, though that has a level and two bytes more.
        self._claim(topics.check_filter(f"{level}/#"), ROOT, "latest")
        return self._roots[level]

    def _restore_root(self, level: str) -> None:
        """Bring back the root of a message whose declaration `penstock repair` has set aside; no record is appended."""
        topic_filter = f"{level}/#"
        queue_id = RESTORED + crc32(topic_filter.encode()) % RESTORED
        while self._catalogue.get(queue_id) is not None:
            queue_id = RESTORED + (queue_id + 1) % RESTORED
        logger.warning("queue.restored", filter=topic_filter, id=queue_id)
        queue = LightQueue(queue_id, topic_filter, self._index)
        self._catalogue.add(queue)
        queue.owners.add(ROOT)
        self._begin(queue, ROOT)

    def _claim(self, topic_filter: str, owner: str, start: Start) -> LightQueue:
        queue = self._catalogue.find(topic_filter, start)
        if queue is None or owner not in queue.owners:
            queue_id = queue.id if queue else self._new_id()
            row: dict[str, object] = {"owner": owner, "start": start}
            if queue is None and start != "latest":
                since = 0 if start == "earliest" else self._log.position_at(start)
                row["from"] = max(self.first_position(), since)
            self._append(Kind.QUEUE_DECLARED, QUEUE_FIXED.pack(queue_id), topic_filter.encode(), b"", orjson.dumps(row))
            queue = self._catalogue.find(topic_filter, start)
            assert queue is not None, topic_filter
        return queue

    def drop(self, queue: LightQueue, owner: str) -> None:
        """Give up an owner's claim. With the last claim the queue and its entries go."""
        if queue.transient:
            if queue.owners == {owner}:
                del self._transient[queue.filter]
                del self._transient_by_id[queue.id]
                self._transient_removed.append(queue.id)
                self._retire(queue)
            queue.owners.discard(owner)
        elif owner in queue.owners:
            row = orjson.dumps({"owner": owner})
            self._append(Kind.QUEUE_DROPPED, QUEUE_FIXED.pack(queue.id), queue.filter.encode(), b"", row)

    def attach(self, topic_filter: str, owner: str) -> LightQueue:
        """Return a queue for a connection: the root queue if the filter is a root's, else the filter's transient queue.

        Raises:
            TopicInvalid, LimitExceeded: as `declare` does; TopicInvalid also for an internal name, which no topic reaches.
        """
        self._check_reached(topic_filter)
        root = self._roots.get(topics.first_level(topic_filter))
        if root is not None and root.queue.filter == topic_filter:
            return root.queue
        queue = self._transient.get(topic_filter)
        if queue is None:
            self._check_room()
            queue = self._transient[topic_filter] = LightQueue(self._next_transient_id, topic_filter, self._index)
            self._transient_by_id[queue.id] = queue
            self._next_transient_id += 1
            self._go_live(queue)
        queue.owners.add(owner)
        return queue

    def detach(self, queue: LightQueue, owner: str) -> None:
        """Give up what `attach` returned."""
        if queue.transient:
            self.drop(queue, owner)

    def _check_filter(self, topic_filter: str) -> None:
        options = self._options
        topics.check_filter(topic_filter, levels_max=options.topic_levels_max, bytes_max=options.topic_bytes_max)

    def _check_reached(self, topic_filter: str) -> None:
        self._check_filter(topic_filter)
        if topic_filter.startswith(INTERNAL):
            raise TopicInvalid(f"the filter {topic_filter[:64]!r} names a queue of the node's own; no topic reaches it")

    def _check_room(self) -> None:
        if len(self) >= self._options.queues_max:
            raise LimitExceeded(f"{len(self)} light queues exist, which is the limit: see store.queues_max")

    def _new_id(self) -> int:
        self._check_room()
        return self._catalogue.next_id

    # --- apply: live and in recovery --------------------------------------------------------------------------------

    def apply_declared(self, record: Record) -> None:
        """Apply QUEUE_DECLARED: a new queue, or one more owner of an old one."""
        (queue_id,) = QUEUE_FIXED.unpack(record.fixed)
        row = orjson.loads(record.properties)
        self.claim(queue_id, record.topic.decode(), row["owner"], row["start"], row.get("from", 0))

    def prepare(self, topic_filter: str) -> int:
        """Return the id with which a part may `claim` the queue of a filter that has what comes from now on.

        Raises:
            TopicInvalid, LimitExceeded: as `declare` does; TopicInvalid also for an internal name, which no topic reaches.
        """
        self._check_reached(topic_filter)
        level = topics.first_level(topic_filter)
        if _is_root(topic_filter) and level not in self._roots:
            self._declare_root(level)
        queue = self._catalogue.find(topic_filter, "latest")
        return queue.id if queue is not None else self._new_id()

    def claim(self, queue_id: int, topic_filter: str, owner: str, start: Start = "latest", position: int = 0) -> LightQueue:
        """Return a durable queue, of which somebody is an owner from now on: for a part, when it applies a record that says so.

        Args:
            queue_id: of a queue that is new.
            topic_filter, owner, start: as in `declare`.
            position: from where on a new queue is filled, unless it starts at `latest`.
        """
        queue = self._catalogue.get(queue_id) or self._catalogue.find(topic_filter, start)
        if queue is None:
            queue = LightQueue(queue_id, topic_filter, self._index, start=start)
            self._catalogue.add(queue)
            # The first declaration of a root is the root's own, unless repair has set that aside.
            first_owner = ROOT if _is_root(topic_filter) else owner
            queue.owners.add(first_owner)
            self._begin(queue, first_owner, position)
        queue.owners.add(owner)
        self._changed(queue)
        return queue

    def apply_dropped(self, record: Record) -> None:
        """Apply QUEUE_DROPPED: one owner less, and with the last the queue is gone."""
        (queue_id,) = QUEUE_FIXED.unpack(record.fixed)
        queue = self._catalogue.get(queue_id)
        if queue is not None:
            self.release(queue, orjson.loads(record.properties)["owner"])

    def release(self, queue: LightQueue, owner: str) -> None:
        """Take away an owner's claim on a durable queue: for a part, when it applies a record that ends the owner."""
        if owner not in queue.owners:
            return
        queue.owners.remove(owner)
        if queue.owners:
            self._changed(queue)
            return
        self._backfills.pop(queue.id, None)
        self._catalogue.remove(queue)
        self._retire(queue)

    def apply_backfilled(self, record: Record) -> None:
        """Apply QUEUE_BACKFILLED: a filling that begins later than it once did learns at which offset it must end."""
        (queue_id,) = QUEUE_FIXED.unpack(record.fixed)
        filling = self._backfills.get(queue_id)
        if filling is not None:
            filling.ends_at(record.position, orjson.loads(record.properties)["next_offset"])

    def open_rows(self) -> Iterator[tuple[int, bytes]]:
        """Yield id and open row of each queue that has one: for retention. Others may write in between."""
        yield from self._catalogue.open_rows()
        for queue in list(self._transient.values()):
            yield queue.id, queue.open_row

    def drop_open_row(self, queue_id: int, open_row: bytes) -> bool:
        """Delete the open row of a queue, if it is still `open_row` and there is no other; return whether it is deleted."""
        queue = self._transient_by_id.get(queue_id) or self._catalogue.get(queue_id)
        if queue is None or queue.open_row != open_row or queue.first_offset() < queue.open_offset:
            return False
        queue.begin_row()
        if not queue.transient:
            batch = Batch()
            self._catalogue.save_open_row(batch, queue)
            self._index.write(batch)
        return True

    def _changed(self, queue: LightQueue) -> None:
        filling = self._backfills.get(queue.id)
        self._catalogue.change(queue, filling.position if filling else None)

    def _begin(self, queue: LightQueue, owner: str, position: int = 0) -> None:
        """Start a new queue: roots and internal queues at once, others by filling from `position` where they want what was."""
        if owner == ROOT:
            self._go_live(queue)
            self._roots[topics.first_level(queue.filter)] = Root(queue)
        elif queue.filter.startswith(INTERNAL):
            return
        elif queue.start == "latest":
            self._go_live(queue)
        else:
            self._backfill_from(queue, position)

    def _backfill_from(self, queue: LightQueue, position: int) -> None:
        self._backfills[queue.id] = Backfill(self._log, queue, position)
        self.on_backfill()

    def backfills_from_before(self, position: int) -> bool:
        """Return whether a queue is being filled that began to read before `position`."""
        return any(filling.began < position for filling in self._backfills.values())

    def _go_live(self, queue: LightQueue) -> None:
        if topics.is_wildcard(queue.filter):
            sharing = self._trie.get(queue.filter)
            if sharing is None:
                self._trie.insert(queue.filter, [queue.id])
            else:
                sharing.append(queue.id)
        self._outdate(queue.filter)

    def _retire(self, queue: LightQueue) -> None:
        """Take a queue that is gone out of routing."""
        if queue.pending:
            self.dirty.remove(queue)
        sharing = self._trie.get(queue.filter)
        if sharing is not None and queue.id in sharing:
            sharing.remove(queue.id)
            if not sharing:
                self._trie.remove(queue.filter)
        self._outdate(queue.filter)

    def _outdate(self, topic_filter: str) -> None:
        """Make the cached routes that a filter may concern be resolved again."""
        if not topics.is_wildcard(topic_filter):
            self._forget(topic_filter.encode())
            return
        level = topics.first_level(topic_filter)
        if level in ("+", "#"):
            for root in self._roots.values():
                root.version += 1
        elif level in self._roots:
            self._roots[level].version += 1

    # --- filling ----------------------------------------------------------------------------------------------------

    def backfill(self) -> bool:
        """Do one slice for each queue that is being filled. Return whether any is left.

        To be called with nothing uncommitted: a filling that has read all that is written goes live here and now.
        """
        end = self._log.written
        assert self._log.end == end, "commit first"
        for queue_id, filling in list(self._backfills.items()):
            for position, size, aux in filling.slice():
                self.append_to(filling.queue, position, size, aux)
            if filling.position == end:
                if not filling.is_noted:
                    row = orjson.dumps({"next_offset": filling.queue.next_offset})
                    self._append(Kind.QUEUE_BACKFILLED, QUEUE_FIXED.pack(queue_id), filling.queue.filter.encode(), b"", row)
                del self._backfills[queue_id]
                self._go_live(filling.queue)
            self._changed(filling.queue)
        return bool(self._backfills)

    # --- the index --------------------------------------------------------------------------------------------------

    def save(self, batch: Batch) -> list[tuple[LightQueue, int, bytes]]:
        """Put what this commit changed into `batch`; return each queue that has new entries, with the entries."""
        fresh = []
        for queue in self.dirty:
            first = queue.committed_offset
            fresh.append((queue, first, queue.save(batch)))
            if queue.id < TRANSIENT:
                self._catalogue.save_open_row(batch, queue)
        self.dirty = []
        self._catalogue.save(batch)
        for queue_id in self._transient_removed:
            delete_entries(batch, queue_id)
        self._transient_removed.clear()
        return fresh

    def load(self) -> None:
        """Begin with the durable queues of the index, and delete what transient ones left."""
        if self._index.first_at_or_after(entries_key(TRANSIENT, 0), bytes(KeySpace.ENTRIES)) is not None:
            batch = Batch()  # only then: each lookup asks the range deletions first
            delete_transient_entries(batch)
            self._index.write(batch)
        wildcards, filling = self._catalogue.load()
        for queue in filling:
            position = self._catalogue.backfill_position(queue)
            assert position is not None, queue.filter
            self._backfill_from(queue, position)
        for queue in wildcards:
            if queue.id not in self._backfills:
                self._go_live(queue)
                if _is_root(queue.filter):
                    self._roots[topics.first_level(queue.filter)] = Root(queue)


def _is_root(topic_filter: str) -> bool:
    level = topics.first_level(topic_filter)
    return topic_filter == f"{level}/#" and not topics.is_wildcard(level)
