"""The registry of all light queues: declares, finds and drops them, and adds entries to them.

There is always one root queue per first level (`plant/#`), and one queue per declared filter. A durable queue is declared by a
record, so it exists again after a restart. A transient queue serves connections and ends with the process.

A durable queue that starts at `earliest`, or at a time, is backfilled once from the log (`store.queues.backfill`), in slices
between other work. It joins live routing in the turn in which the backfill has caught up, so that no message is skipped or
comes twice. A filter has one queue for each start that was requested: `earliest`, `latest`, or a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING
from zlib import crc32

import orjson
import structlog

from penstock.store import topics
from penstock.store.errors import QueueUnknown, TopicInvalid
from penstock.store.index.index import Batch, Index
from penstock.store.log.commitlog import CommitLog
from penstock.store.options import StoreOptions
from penstock.store.queues.backfill import Backfill, LogStretches
from penstock.store.queues.catalogue import Catalogue
from penstock.store.queues.lightqueue import ENTRY, RESTORED, TRANSIENT, LightQueue, Start, pinned_key
from penstock.store.queues.router import Route, Router
from penstock.store.queues.transientqueues import TransientQueues
from penstock.store.record import QUEUE_FIXED, Kind, Record
from penstock.store.space.accounts import NODE_ACCOUNT, Resource
from penstock.store.space.causer import NODE, Causer
from penstock.store.space.ledger import Ledger

if TYPE_CHECKING:
    from penstock.store.retention.copies import Copies

logger = structlog.get_logger("store")

INTERNAL = ("$retry/", "$dlq/")
"""Prefixes of filters that name internal queues, for retries and dead letters. No topic reaches them; see `append_to`."""

ROOT = "root"
"""Name of the owner of root queues."""


class Queues:
    """The light queues of a store.

    Parameters:
        log: holds the records.
        records: reads them, or their copies.
        index: holds the entries and the catalogue of durable queues.
        options: limits of topics and queues.
        append: appends a record to the store, as `append(kind, fixed, topic, body, properties)`.
        now_ms: returns the time that a record appended now would carry.
        ledger: is charged for each queue.
    """

    def __init__(
        self,
        log: CommitLog,
        records: Copies,
        index: Index,
        options: StoreOptions,
        append: Callable[..., int],
        now_ms: Callable[[], int],
        ledger: Ledger,
    ) -> None:
        self._log = log
        self._records = records
        self._index = index
        self._options = options
        self._append = append
        self._now_ms = now_ms
        self._ledger = ledger
        self._catalogue = Catalogue(index)
        self._transient = TransientQueues(index)
        self.router = Router(self, options)
        """The routes to these queues."""
        self._stretches = LogStretches(log)
        self._backfills: dict[int, Backfill] = {}
        """By queue id. That whose turn is next comes first."""
        self._causers: dict[int, Causer] = {}
        """Who is charged for each transient queue, by id."""
        self._attached: dict[int, set[str]] = {}
        """Names of the connections that are attached to a root queue, by id."""
        self.dirty: list[LightQueue] = []
        self.first_position: Callable[[], int] = lambda: log.start
        """Returns the position from which a queue that starts at `earliest` is backfilled."""
        self.on_backfill: Callable[[], None] = lambda: None
        """Called when a backfill begins. The owner then calls `backfill` until it returns False."""
        self.on_gap: Callable[[LightQueue, int, int], None] = lambda queue, offset, position: None
        """Called with a queue when a backfill has left out damaged records, and with what `Backfill.take_gap` returned."""

    def __len__(self) -> int:
        return self._catalogue.count + len(self._transient.by_id)

    def __iter__(self) -> Iterator[LightQueue]:
        """Yield all queues. This loads each of them, so it is for tools and tests."""
        yield from self._catalogue
        yield from self._transient.by_id.values()

    # --- entries: the hot path --------------------------------------------------------------------------------------

    def dispatch(self, route: Route, position: int, size: int, aux: int) -> None:
        """Add an entry for a message to each queue of its route. The entries can be read after the commit."""
        self.dispatch_run(route.queues, ENTRY.pack(position, size, aux))

    def dispatch_run(self, queues: tuple[LightQueue, ...], entries: bytes) -> None:
        """Add several entries, in order, to each queue of a route."""
        for queue in queues:
            pending = queue.pending
            if not pending:
                self.dirty.append(queue)
            pending += entries

    def append_to(self, queue: LightQueue, position: int, size: int, aux: int) -> None:
        """Add an entry to one queue, whatever the topic of the record is: for retries, dead letters and backfills."""
        if not queue.pending:
            self.dirty.append(queue)
        queue.pending += ENTRY.pack(position, size, aux)

    # --- declaring and dropping -------------------------------------------------------------------------------------

    def get(self, queue_id: int) -> LightQueue:
        """Return the queue with an id. Raises QueueUnknown."""
        queue = self._transient.by_id.get(queue_id) or self._catalogue.get(queue_id)
        if queue is None:
            raise QueueUnknown(f"no light queue has the id {queue_id}; it may have been dropped")
        return queue

    def named(self, topic: str) -> list[LightQueue]:
        """Return the live queues whose filter is a topic itself. Internal queues have no topic."""
        transient = self._transient.by_filter.get(topic)
        found = [transient] if transient is not None else []
        if self._catalogue.may_name(topic) and not topic.startswith("$"):
            found += [queue for queue in self._catalogue.named(topic) if queue.id not in self._backfills]
        return found

    def is_backfilling(self, queue: LightQueue) -> bool:
        """Return whether a queue is still being backfilled."""
        return queue.id in self._backfills

    def find(self, topic_filter: str, start: Start = "latest") -> LightQueue | None:
        """Return the durable queue of a filter and start, or None. Root queues and internal queues start at `latest`."""
        return self._catalogue.find(topic_filter, start)

    def filters(self, start: str, count: int, *, are_wildcards: bool) -> list[str]:
        """Return up to `count` filters with durable queues, with or without wildcards, from `start` on, in order.

        They are those of the last commit. None come if none follow.
        """
        return self._catalogue.filters(start, count, are_wildcards=are_wildcards)

    def all_of(self, topic_filter: str) -> list[LightQueue]:
        """Return the durable queues of a filter, one for each start, those that are being backfilled among them."""
        return self._catalogue.named(topic_filter)

    @property
    def transient(self) -> int:
        """Number of transient queues."""
        return len(self._transient.by_id)

    def declare(self, topic_filter: str, owner: str, start: Start = "latest", causer: Causer = NODE) -> LightQueue:
        """Return the durable queue of a filter and start; declare it if needed. It lasts until its last owner drops it.

        For the filter of a root this is the root queue, and for an internal name its only queue, whatever the start: those
        have all entries anyway.

        Args:
            topic_filter: an MQTT topic filter, or a name with a prefix of `INTERNAL`.
            owner: names who needs the queue, such as `group:billing`.
            start: where the queue begins: with everything that the log still has, with messages from the declaration on, or
                with messages that were stored at a time or later. A time in the future counts as "latest".
            causer: is charged for the queue if it is new.

        Raises:
            TopicInvalid: the filter violates MQTT 5.0, 4.7, or a limit of the options.
            LimitExceeded: `store.queues_max` queues exist, or the causer may have no more.
            DiskFull: the disk has no room for the declaration.
        """
        self._check_filter(topic_filter)
        level = topics.first_level(topic_filter)
        is_root = _is_root(topic_filter)
        if is_root and level not in self.router.roots:
            self.declare_root(level, causer)
        has_everything = is_root or topic_filter.startswith(INTERNAL)
        if has_everything or (isinstance(start, int) and start > self._now_ms()):
            start = "latest"
        return self._claim(topic_filter, owner, start, causer)

    def offset_of(self, queue: LightQueue, start: Start) -> int:
        """Return the offset at which a caller that declared `queue` with `start` begins to read it."""
        if start == "latest" or (isinstance(start, int) and start > self._now_ms()):
            return queue.next_offset
        if start == "earliest" or start == queue.start or queue.filter.startswith(INTERNAL):
            return 0
        return queue.offset_at(start, self._records)  # a root queue, which has older entries as well

    def declare_root(self, level: str, causer: Causer) -> None:
        """Declare the root queue of a first level.

        Raises:
            LimitExceeded: `store.queues_max` queues exist, or the causer may have no more.
            DiskFull: the disk has no room for the declaration.
        """
        # The limits of the options don't apply: a topic within them has a root, whose filter is a level and two bytes longer.
        self._claim(topics.check_filter(f"{level}/#"), ROOT, "latest", causer)

    def restore_root(self, level: str, account: int) -> None:
        """Restore the root of a message in the log, without a record.

        Either the root has ended since the message was stored, and the message is routed only now: it was delayed, or half of a
        transaction. Or `penstock repair` has quarantined the root's declaration.
        """
        self.restore(f"{level}/#", ROOT, account)

    def restore(self, topic_filter: str, owner: str, account: int) -> LightQueue:
        """Restore and return a root queue or an internal one whose declaration was damaged, without a record."""
        queue_id = RESTORED + crc32(topic_filter.encode()) % RESTORED
        while self._catalogue.get(queue_id) is not None:
            queue_id = RESTORED + (queue_id + 1) % RESTORED
        logger.info("queue.restored", filter=topic_filter, id=queue_id)
        queue = LightQueue(queue_id, topic_filter, self._index, owners=(owner,), account=account)
        self._add(queue)
        self._begin(queue, owner)
        return queue

    def _add(self, queue: LightQueue) -> None:
        """Add a new durable queue, and charge its account."""
        self._ledger.charge(queue.account, Resource.QUEUES)
        self._catalogue.add(queue)

    def _claim(self, topic_filter: str, owner: str, start: Start, causer: Causer) -> LightQueue:
        queue = self._catalogue.find(topic_filter, start)
        if queue is None or owner not in queue.owners:
            queue_id = queue.id if queue else self._catalogue.next_id
            row: dict[str, object] = {"owner": owner, "start": start}
            if queue is None:
                row["by"] = self._ledger.admit(causer, Resource.QUEUES, topic=topic_filter).row()
            if queue is None and start != "latest":
                since = 0 if start == "earliest" else self._log.position_at(start)
                row["from"] = max(self.first_position(), since)
            self._append(Kind.QUEUE_DECLARED, QUEUE_FIXED.pack(queue_id), topic_filter.encode(), b"", orjson.dumps(row))
            queue = self._catalogue.find(topic_filter, start)
            assert queue is not None, topic_filter
        return queue

    def drop(self, queue: LightQueue, owner: str) -> None:
        """Remove an owner of a queue. With the last owner the queue and its entries are deleted."""
        if queue.transient:
            if queue.owners == {owner}:
                self._transient.remove(queue)
                self._retire(queue)
                self._ledger.let_go(self._causers.pop(queue.id), Resource.QUEUES)
            queue.owners.discard(owner)
        elif owner in queue.owners:
            row = orjson.dumps({"owner": owner})
            self._append(Kind.QUEUE_DROPPED, QUEUE_FIXED.pack(queue.id), queue.filter.encode(), b"", row)

    def attach(self, topic_filter: str, owner: str, causer: Causer = NODE) -> LightQueue:
        """Return a queue for a connection: the root queue if the filter is a root's, else the transient queue of the filter.

        Args:
            topic_filter: a topic filter.
            owner: names the connection.
            causer: is charged for the queue if it is new.

        Raises:
            TopicInvalid, LimitExceeded: as `declare` does. TopicInvalid also for an internal name.
        """
        self._check_reached(topic_filter)
        root = self.router.roots.get(topics.first_level(topic_filter))
        if root is not None and root.queue.filter == topic_filter:
            self._attached.setdefault(root.queue.id, set()).add(owner)
            return root.queue
        queue = self._transient.by_filter.get(topic_filter)
        if queue is None:
            causer = self._ledger.admit(causer, Resource.QUEUES, topic=topic_filter)
            queue = self._transient.add(topic_filter)
            self._causers[queue.id] = causer
            self._ledger.hold(causer, Resource.QUEUES)
            self.router.add(queue)
        queue.owners.add(owner)
        return queue

    def detach(self, queue: LightQueue, owner: str) -> None:
        """Remove an owner of a queue that `attach` returned."""
        if queue.transient:
            self.drop(queue, owner)
        elif queue.id in self._attached:
            self._attached[queue.id].discard(owner)
            if not self._attached[queue.id]:
                del self._attached[queue.id]

    def _check_filter(self, topic_filter: str) -> None:
        options = self._options
        topics.check_filter(topic_filter, levels_max=options.topic_levels_max, bytes_max=options.topic_bytes_max)

    def _check_reached(self, topic_filter: str) -> None:
        self._check_filter(topic_filter)
        if topic_filter.startswith(INTERNAL):
            raise TopicInvalid(f"the filter {topic_filter[:64]!r} names an internal queue of the node; use another filter")

    # --- apply: live and in recovery --------------------------------------------------------------------------------

    def apply_declared(self, record: Record) -> None:
        """Apply QUEUE_DECLARED: create a queue, or add an owner to one that exists."""
        (queue_id,) = QUEUE_FIXED.unpack(record.fixed)
        row = orjson.loads(record.properties)
        account = self._ledger.enter(row.get("by"))
        self.claim(queue_id, record.topic.decode(), row["owner"], row["start"], row.get("from", 0), account)

    def prepare(self, topic_filter: str, causer: Causer = NODE) -> int:
        """Return the id with which a part may `claim` the queue of a filter that starts at `latest`.

        The causer is charged for the queue if it is new: the record of the part names the causer.

        Raises:
            TopicInvalid, LimitExceeded: as `declare` does. TopicInvalid also for an internal name.
        """
        self._check_reached(topic_filter)
        level = topics.first_level(topic_filter)
        if _is_root(topic_filter) and level not in self.router.roots:
            self.declare_root(level, causer)
        queue = self._catalogue.find(topic_filter, "latest")
        if queue is not None:
            return queue.id
        self._ledger.admit(causer, Resource.QUEUES, topic=topic_filter)
        return self._catalogue.next_id

    def claim(
        self,
        queue_id: int,
        topic_filter: str,
        owner: str,
        start: Start = "latest",
        position: int = 0,
        account: int = NODE_ACCOUNT,
    ) -> LightQueue:
        """Add an owner to a durable queue, which is created if needed, and return it. Parts call it when they apply a record.

        Args:
            queue_id: id of the queue if it is new.
            topic_filter, owner, start: as in `declare`.
            position: from which a new queue is backfilled, unless it starts at `latest`.
            account: is charged for a new queue.
        """
        queue = self._catalogue.get(queue_id) or self._catalogue.find(topic_filter, start)
        if queue is None:
            # The first declaration of a root is the node's own, unless `penstock repair` has quarantined that.
            first_owner = ROOT if _is_root(topic_filter) else owner
            queue = LightQueue(queue_id, topic_filter, self._index, start=start, owners=(first_owner,), account=account)
            self._add(queue)
            self._begin(queue, first_owner, position)
        queue.owners.add(owner)
        self._changed(queue)
        return queue

    def apply_dropped(self, record: Record) -> None:
        """Apply QUEUE_DROPPED: remove an owner, and with the last owner the queue."""
        (queue_id,) = QUEUE_FIXED.unpack(record.fixed)
        queue = self._catalogue.get(queue_id)
        if queue is not None:
            self.release(queue, orjson.loads(record.properties)["owner"])

    def release(self, queue: LightQueue, owner: str) -> None:
        """Remove an owner of a durable queue. Parts call it when they apply a record that ends the owner."""
        if owner not in queue.owners:
            return
        queue.owners.remove(owner)
        if queue.owners:
            self._changed(queue)
            return
        self._backfills.pop(queue.id, None)
        self._ledger.release(queue.account, Resource.QUEUES)
        self._catalogue.remove(queue)
        self._retire(queue)
        if _is_root(queue.filter):
            self.router.remove_root(queue)

    def is_unused_root(self, level: str) -> bool:
        """Return whether the root queue of a first level has no entries, and nobody needs those that it may get.

        That costs up to two seeks. Return False if there is no such root.
        """
        root = self.router.roots.get(level)
        if root is None or root.queue.pending or root.queue.id in self._attached:
            return False
        return not root.queue.has_entries() and root.queue.owners == {ROOT}

    def end_roots(self, levels: Iterable[str]) -> int:
        """End the root queues of first levels as far as they are still unused; return how many.

        Raises:
            DiskFull: the disk has no room for a record of it.
        """
        unused = [level for level in levels if self.is_unused_root(level)]
        try:
            for level in unused:
                self.drop(self.router.roots[level].queue, ROOT)
        finally:
            self.router.forget_ended()  # before anybody uses a route again
        return len(unused)

    def apply_backfilled(self, record: Record) -> None:
        """Apply QUEUE_BACKFILLED: tell a backfill that begins later than it once did at which offset it must end."""
        (queue_id,) = QUEUE_FIXED.unpack(record.fixed)
        backfill = self._backfills.get(queue_id)
        if backfill is not None:
            backfill.is_noted = True
            backfill.ends_at(record.position, orjson.loads(record.properties)["next_offset"])

    def open_rows(self) -> Iterator[tuple[int, bytes]]:
        """Yield id and open row of each queue that has one. Retention needs them. Callers may write meanwhile."""
        yield from self._catalogue.open_rows()
        for queue in list(self._transient.by_id.values()):
            yield queue.id, queue.open_row

    def drop_open_row(self, queue_id: int, open_row: bytes, pinned: Iterable[tuple[int, bytes]]) -> bool:
        """Delete the open row of a queue if it is still `open_row` and all rows before it are gone; return whether it did.

        Args:
            queue_id: of the queue.
            open_row: as `open_rows` yielded it.
            pinned: entries of it that stay, each with its number in the open row.
        """
        queue = self._transient.by_id.get(queue_id) or self._catalogue.get(queue_id)
        if queue is None or queue.open_row != open_row or queue.dense_offset() < queue.open_offset:
            return False
        batch = self._index.batch()
        for number, entries in pinned:
            batch.put(pinned_key(queue_id, queue.open_offset + number), entries)
        queue.begin_row()
        if not queue.transient:
            self._catalogue.save_open_row(batch, queue)
        self._index.write(batch)
        return True

    def _changed(self, queue: LightQueue) -> None:
        backfill = self._backfills.get(queue.id)
        self._catalogue.change(queue, backfill.position if backfill else None)

    def _begin(self, queue: LightQueue, owner: str, position: int = 0) -> None:
        """Start a new queue. It goes live at once, or after a backfill from `position` if it does not start at `latest`."""
        if owner == ROOT:
            self.router.add(queue)
            self.router.add_root(queue)
        elif queue.filter.startswith(INTERNAL):
            return
        elif queue.start == "latest":
            self.router.add(queue)
        else:
            self._backfill_from(queue, position)

    def _backfill_from(self, queue: LightQueue, position: int) -> None:
        self._backfills[queue.id] = Backfill(self._stretches, queue, position)
        self.on_backfill()

    def backfills_from_before(self, position: int) -> bool:
        """Return whether a backfill is running that began before `position`."""
        return any(backfill.began < position for backfill in self._backfills.values())

    def _retire(self, queue: LightQueue) -> None:
        """Add no more entries to a deleted queue, and write none of those that are pending."""
        if queue.pending:
            self.dirty.remove(queue)
        self.router.remove(queue)

    # --- backfilling ------------------------------------------------------------------------------------------------

    def backfill(self, is_over: Callable[[], bool] = lambda: False, applied: int | None = None) -> bool:
        """Do one slice of each backfill, as far as there is time. Return whether any backfill is left.

        Backfills that have come equally far are done together, because that costs little more than one of them. The caller
        must have committed everything, because a queue whose backfill has read the whole log goes live here.

        Args:
            is_over: returns whether the time is over. It is asked after each slice. Those backfills that got none come first
                the next time.
            applied: for a store that follows a leader, up to where the records were applied. Backfills go on up to there. A
                queue goes live when it has come there after the leader's record QUEUE_BACKFILLED. Those that wait for that
                record are not counted as left.
        """
        end = self._log.written if applied is None else applied
        assert self._log.end == end or applied is not None, "commit first"
        waiting = {queue_id: each for queue_id, each in self._backfills.items() if applied is None or each.may_go_on(end)}
        try:
            while waiting:
                position = next(iter(waiting.values())).position
                together = {queue_id: backfill for queue_id, backfill in waiting.items() if backfill.position == position}
                stop = min(max(backfill.reach(len(together)) for backfill in together.values()), end)
                for queue_id, backfill in together.items():
                    del waiting[queue_id]
                    self._do_slice(backfill, stop, end, is_following=applied is not None)
                    if queue_id in self._backfills:
                        self._backfills[queue_id] = self._backfills.pop(queue_id)  # comes last the next time
                if is_over():
                    break
        finally:
            self._stretches.forget()
        return any(applied is None or each.may_go_on(end) for each in self._backfills.values())

    def _do_slice(self, backfill: Backfill, stop: int, end: int, *, is_following: bool) -> None:
        queue = backfill.queue
        try:
            for position, size, aux in backfill.slice(stop):
                self.append_to(queue, position, size, aux)
        finally:
            self._changed(queue)  # its entries and how far it has come are saved together, whatever fails
        gap = backfill.take_gap()
        if gap is not None:
            self.on_gap(queue, *gap)
        if backfill.position == end and (backfill.is_noted or not is_following):
            if is_following:
                self._go_live(queue)
                return
            # Also the second time: a snapshot may have been taken meanwhile, and what was before it may go.
            row = orjson.dumps({"next_offset": queue.next_offset})
            self._append(Kind.QUEUE_BACKFILLED, QUEUE_FIXED.pack(queue.id), queue.filter.encode(), b"", row)
            self._go_live(queue)

    def _go_live(self, queue: LightQueue) -> None:
        del self._backfills[queue.id]
        self.router.add(queue)
        self._changed(queue)

    # --- the index --------------------------------------------------------------------------------------------------

    def save(self, batch: Batch) -> list[tuple[LightQueue, int, bytes]]:
        """Put the changes of this commit into `batch`. Return each queue with new entries: queue, first offset, entries."""
        fresh = []
        for queue in self.dirty:
            first = queue.committed_offset
            fresh.append((queue, first, queue.save(batch)))
            if queue.id < TRANSIENT:
                self._catalogue.save_open_row(batch, queue)
        self.dirty = []
        self._catalogue.save(batch)
        self._transient.save(batch)
        return fresh

    def load(self) -> None:
        """Load the durable queues of the index, and delete the entries that transient queues have left."""
        self._transient.load()
        wildcards, backfilled = self._catalogue.load()
        for queue in backfilled:
            position = self._catalogue.backfill_position(queue)
            assert position is not None, queue.filter
            self._backfill_from(queue, position)
        for queue in wildcards:
            if queue.id not in self._backfills:
                self.router.add(queue)
                if _is_root(queue.filter):
                    self.router.add_root(queue)


def _is_root(topic_filter: str) -> bool:
    level = topics.first_level(topic_filter)
    return topic_filter == f"{level}/#" and not topics.is_wildcard(level)
