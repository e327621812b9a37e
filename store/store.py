"""The store: appends records, applies them, commits them, tells when they are durable, and recovers after a crash.

All state besides the log is derived from the log. A `Part` (POP, delayed messages, retained messages) says which kinds of
record it applies. The same `apply` runs when a record is appended and when recovery reads the record again. Nothing else
changes a part's state.

Records that are appended in one turn of the event loop are committed together at the end of the turn: one write to the log,
one WriteBatch to the index, then a call of each watcher of a queue that has new entries.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import structlog

from penstock.store.clock import SteerableClock
from penstock.store.clocksteps import ClockSteps
from penstock.store.errors import DiskFull, IndexAhead, IndexDamaged, PositionUnknown
from penstock.store.files import PASSING, SYSTEM_FILES, Files
from penstock.store.histogram import DURATION_BOUNDS_S, Histogram
from penstock.store.housekeeping import Housekeeping, nothing
from penstock.store.index.index import Covered, Index, Upgrade, keep_rows
from penstock.store.index.rocksdb import OpenDatabase, open_rocksdb
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.groupcommit import GroupCommit
from penstock.store.log.logepochs import LogEpochs
from penstock.store.log.syncing import SYNCS, MakeSync
from penstock.store.options import ClockOptions, StoreOptions
from penstock.store.part import Apply, Part
from penstock.store.queues.latedispatches import LateDispatches
from penstock.store.queues.lightqueue import ENTRY, ENTRY_BYTES, LightQueue, consecutive_entries
from penstock.store.queues.queues import Queues
from penstock.store.queues.router import Route
from penstock.store.record import (
    COPY_BYTES,
    FIXED_BYTES,
    HEADER_BYTES,
    HEADER_TAIL,
    KIND_AT,
    OBSERVED,
    SIZE_AND_CRC,
    STEP_FIXED,
    UNROUTED,
    Kind,
    Record,
    alike_records,
    checksum,
    is_intact,
    store_ms_of,
)
from penstock.store.recovery.recovery import Recovery, Replay, agree
from penstock.store.retention.copies import Copies
from penstock.store.retention.retention import Retention
from penstock.store.sliced import SlicedJob
from penstock.store.space.accounts import Resource
from penstock.store.space.ballast import Ballasts
from penstock.store.space.ledger import Ledger
from penstock.store.space.quotaoptions import QuotaOptions
from penstock.store.space.space import Space
from penstock.store.timekeeping import Timekeeping

logger = structlog.get_logger("store")

FOLLOW_BYTES = 256 * 1024
"""Bytes of log that a follower applies at a time. That takes the loop a few ms."""

_MESSAGE = int(Kind.MESSAGE)


@dataclass(frozen=True, slots=True)
class Platform:
    """What a store uses of the machine: the real files, disk and threads by default. A simulation passes its own."""

    files: Files = SYSTEM_FILES
    """Has the data directory."""
    open_database: OpenDatabase = open_rocksdb
    """Opens the database of the index."""
    make_sync: MakeSync | None = None
    """Creates the object that syncs the log; the one that `StoreOptions.sync_in` names if it is None."""
    executor: Executor | None = None
    """Makes snapshots durable, outside of the loop; a thread if it is None."""


THIS_PLATFORM = Platform()


class Store:
    """The store of one data directory.

    Parameters:
        data_dir: must exist, and no other process may have it open. The node's lock file ensures that.
        options: see `StoreOptions`.
        clock: gives records the time at which they are stored. The store steers it.
        clock_options: see `ClockOptions`.
        quotas: see `QuotaOptions`.
        platform: has the data directory.
        upgrade: brings an index of the format before to the present one.

    Raises:
        LogCorrupt: the log is damaged before its tail, or its beginning was dropped and nothing tells what it held.
        OSError: a file can't be opened, read or written.
    """

    __slots__ = (
        "_agreement",
        "_applies",
        "_backfill_job",
        "_closed",
        "_commit_scheduled",
        "_damaged_at",
        "_failure",
        "_group",
        "_housekeeping",
        "_is_async",
        "_is_called",
        "_last_ms",
        "_loop",
        "_make_sync",
        "_on_failure",
        "_opened_s",
        "_recovered_until",
        "_replay",
        "_turn_ms",
        "_unannounced",
        "ballasts",
        "before_commit",
        "clock",
        "copies",
        "data_dir",
        "epochs",
        "fresh_from",
        "index",
        "is_index_damaged",
        "late",
        "ledger",
        "log",
        "messages_stored",
        "on_replayed",
        "options",
        "parts",
        "queues",
        "replaying",
        "retention",
        "router",
        "space",
        "steps",
        "timekeeping",
    )
    # An object with more than 30 attributes and no slots makes each access slower (CPython 3.11 to 3.13).

    def __init__(
        self,
        data_dir: Path,
        options: StoreOptions,
        clock: SteerableClock,
        *,
        clock_options: ClockOptions | None = None,
        quotas: QuotaOptions | None = None,
        platform: Platform = THIS_PLATFORM,
        upgrade: Upgrade = keep_rows,
    ) -> None:
        self.data_dir = data_dir
        self.options = options
        self.clock = clock
        files = platform.files
        self._make_sync = platform.make_sync or SYNCS[options.sync_in]
        self.timekeeping = Timekeeping(
            clock, data_dir, clock_options or ClockOptions(), lambda: self.log.end, self._record_step, files=files
        )
        self._opened_s = clock.monotonic_s()
        self.space = Space(data_dir, reserve_bytes=options.reserve_bytes, reserve_percent=options.reserve_percent, files=files)
        self.log = CommitLog(data_dir, segment_bytes=options.segment_bytes, space=self.space, files=files)
        Index.remove_checkpoint(data_dir, files)  # of a killed backup
        self._agreement = agree(data_dir, self.log, files, platform.open_database, upgrade)
        self._damaged_at: int | None = None
        """Position of the first record of kind DAMAGED that recovery has replayed."""
        self.index = self._agreement.index
        self.index.on_damage = self._index_damaged
        self.space.watch_index(self.index.path)
        self.ballasts = Ballasts(data_dir, self.index.path, options.ballast_bytes, files=files)
        self.index.on_full = self.ballasts.release_for
        self._recovered_until = self.log.written
        self.fresh_from = self.log.written
        """Position of the first record of a commit, while that calls the watchers. Records before it may be damaged by now."""
        self.copies = Copies(self.log, self.index)
        self.late = LateDispatches(self.log, self.index)
        self.ledger = Ledger(self.index, quotas or QuotaOptions())
        self.ledger.limit(Resource.QUEUES, options.queues_max, "raise store.queues_max")
        self.queues = Queues(self.log, self.copies, self.index, options, self.append, self.now_ms, self.ledger)
        self.router = self.queues.router
        self.parts: list[Part] = []
        self.retention = Retention(self, files, platform.executor)
        self.log.on_roll = self._rolled
        self.queues.first_position = lambda: max(self.log.start, self.retention.expires_before)
        self._applies: dict[int, list[Apply]] = {
            Kind.QUEUE_DECLARED: [self.queues.apply_declared],
            Kind.QUEUE_DROPPED: [self.queues.apply_dropped],
            Kind.QUEUE_BACKFILLED: [self.queues.apply_backfilled],
        }
        self.add_part(self.copies)
        self.add_part(self.late)
        self.steps = ClockSteps()
        self.add_part(self.steps)
        self.epochs = LogEpochs()
        self.add_part(self.epochs)
        covered = self._agreement.covered
        self._last_ms = covered.store_ms if covered else 0
        self._turn_ms = 0
        self._commit_scheduled = False
        self._is_called = False
        """Whether the loop calls `end_turn` in its next turn."""
        self._failure: OSError | None = None
        self.is_index_damaged = False
        """Whether the store has failed because its index is damaged. A disk that also fails to write is another failure."""
        self._on_failure: Callable[[OSError], None] | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_async = options.flush == "async"
        self._group: GroupCommit | None = None
        self._housekeeping: Housekeeping | None = None
        self._backfill_job: SlicedJob | None = None
        self._unannounced: list[tuple[LightQueue, int, bytes]] = []
        self.on_replayed: Callable[[int], None] = lambda _: None
        """Called by `recover` with the position up to which records have been applied, each `REPLAY_BYTES`."""
        self.before_commit: Callable[[], None] = nothing
        """Called before the records of a turn are written. It may append more, which are written with them. It must not
        raise."""
        self.replaying = True
        """True until `catch_up` has ended. Until then parts start no timers and wake no consumers."""
        self._replay: Replay | None = None
        """Applies what the index does not cover; None before `load` and after `catch_up`."""
        self.messages_stored = 0

    def add_part(self, part: Part) -> None:
        """Register a part, whose `apply` functions then get the records of their kinds. Call it before `recover`."""
        self.parts.append(part)
        for kind, apply in part.applies().items():
            self._applies.setdefault(kind, []).append(apply)

    # --- recovery ---------------------------------------------------------------------------------------------------

    def recover(self) -> Recovery:
        """Bring the index and the parts to the state of the last whole record. Call it once, after `add_part`, before `start`.

        When it raises, the files are closed.

        Raises:
            LogCorrupt: a record before the tail is damaged.
            IndexDamaged: the index can't be read. A new store on this directory rebuilds it.
        """
        self.load()
        return self.catch_up()

    def load(self) -> None:
        """Read the state that the index has. Call it once, after `add_part`. A replica that follows a leader calls it alone.

        When it raises, the files are closed. Raises IndexDamaged.
        """
        try:
            self.ledger.load()
            self.queues.load()
            for part in self.parts:
                part.load(self.index)
        except BaseException:
            self.abandon()
            raise
        self._replay = Replay(
            self.log,
            self._covered_until(),
            self.queues,
            self.router,
            self._last_ms,
            apply=self._apply_replayed,
            save=self._save_replayed,
        )

    def catch_up(self) -> Recovery:
        """Apply all records that the index does not cover, after `load`. From now on this store appends by itself.

        When it raises, the files are closed.

        Raises:
            LogCorrupt: a record before the tail is damaged.
            IndexDamaged: the index can't be read. A new store on this directory rebuilds it.
        """
        try:
            return self._catch_up()
        except BaseException:
            self.abandon()
            raise

    def _catch_up(self) -> Recovery:
        replay = self._replay
        assert replay is not None, "load first"
        replay.step(self.log.written)  # also saves what the parts have found to change
        while replay.position < self.log.written:
            replay.step(self.log.written)
        self._replay = None
        self.fresh_from = self.log.written
        if self._agreement.rebuilt and self._damaged_at is not None:
            self.retention.set_snapshots_aside(self._damaged_at)
        self.replaying = False
        self.timekeeping.begin(self._last_ms)
        self.space.measure()
        agreement = self._agreement
        seconds = self.clock.monotonic_s() - self._opened_s
        return Recovery(agreement.torn_bytes, replay.replayed, agreement.rebuilt, agreement.skipped_bytes, seconds)

    def _apply_replayed(self, found: Record) -> None:
        self._last_ms = found.store_ms
        if found.kind == Kind.DAMAGED and self._damaged_at is None:
            self._damaged_at = found.position
        self._apply(found)

    def _save_replayed(self, position: int, last_ms: int) -> None:
        self._last_ms = last_ms
        self._save(position)
        if self._loop is not None and self.log.segment_at(position).base == position:
            self.retention.segment_begun(position, last_ms)  # a leader does that when it begins the segment
        self.on_replayed(position)

    @property
    def entries_from(self) -> int:
        """Position from which the light queues have the entries of all messages: where the log begins; after this start has
        built the index from a later snapshot, because of damage, where that was taken."""
        return self.log.start + self._agreement.skipped_bytes

    def _covered_until(self) -> int:
        covered = self._agreement.covered
        return covered.position if covered else self.log.start

    def fail_if_damaged(self, error: Exception) -> None:
        """End the node if `error`, of a call of the index on another thread, means that the index is damaged."""
        if isinstance(error, IndexDamaged):
            self._index_damaged(error)

    def _index_damaged(self, damage: IndexDamaged) -> None:
        """End the node if a loop runs, because later reads of the index may lack rows."""
        if self._on_failure is not None:
            self.fail(damage)

    # --- following --------------------------------------------------------------------------------------------------

    @property
    def applied(self) -> int:
        """Everything before this position is in the index. Of a store that appends by itself that is all it has written."""
        return self._replay.position if self._replay is not None else self.log.written

    def put(self, position: int, data: bytes) -> None:
        """Write whole records of the leader at the end of the log, and request a sync. Nothing is applied.

        Raises:
            DiskFull: the disk has no room. Nothing was written.
            OSError: the log can't be written, which `on_failure` is told of.
        """
        assert self._replay is not None, "only a store that follows a leader gets records from it"
        assert self._group is not None, "the store is not started"
        try:
            self.log.put(position, data)
        except OSError as error:
            self.fail(error)
            raise
        self._group.wait(nothing)
        self._group.advance()

    def begin_segment(self) -> None:
        """Begin a segment at the end of the log, as the leader has done there. Raises DiskFull, OSError."""
        if self.log.open_segment.base == self.log.end:
            return
        self.log.roll()
        if self.applied == self.log.end:
            self.retention.segment_begun(self.applied, self._last_ms)

    def apply_to(self, position: int, is_over: Callable[[], bool]) -> bool:
        """Apply what is committed, as far as it is durable here too. Return whether all of it is applied.

        What is not durable here could be lost by a crash, and the index must not be ahead of the log.

        Args:
            position: everything before it is committed. A record begins there.
            is_over: returns whether the time is over. It is asked after each block of `FOLLOW_BYTES`.

        Raises:
            LogCorrupt: a record is damaged.
            OSError, IndexDamaged: the index can't be written or read.
        """
        replay, until = self._replay, min(position, self.durable_position)
        assert replay is not None, "only a store that follows a leader is told what is committed"
        while replay.position < until:
            replay.step(until, FOLLOW_BYTES)
            if is_over():
                break
        if self._backfill_job is not None:
            self._backfill_job.wake()
        return replay.position >= position

    def cut_to(self, position: int) -> None:
        """Cut off what the leader does not have, durably. A record begins at `position`, or the log ends before it.

        Raises:
            IndexAhead: the index has applied some of it. The log is cut, but the store can't be used any more. The next one on
                this directory rebuilds its index.
            PositionUnknown: the log begins after `position`. Nothing was cut.
            DiskFull: the sync mark can't be written. Nothing was cut.
            OSError: the disk failed.
        """
        assert self._replay is not None, "only a store that follows a leader is cut"
        if position >= self.log.end:
            return
        self.log.cut_to(position)
        if self._group is not None:
            self._group.cut_to(position)
        if self.applied > position:
            raise IndexAhead(
                f"the log was cut at position {position}, but the index covers it up to {self.applied}; start again: that "
                "builds the index anew from the last snapshot"
            )

    # --- appending --------------------------------------------------------------------------------------------------

    def append_message(self, route: Route, body: bytes, properties: bytes = b"", flags: int = 0, aux: int = 0) -> int:
        """Append a message, route it, and return its position. It can be read after the commit at the end of this turn.

        This is a hot path: see the row `append` of `python -m bench store`.

        Args:
            route: of its topic, from `Router.route`.
            body: the payload.
            properties: from `encode_properties`.
            flags: of `Flag`, combined.
            aux: `tag_hash` of its tag; 0 for none.

        Raises:
            RecordTooLarge: topic, properties and body together do not fit into a segment.
            DiskFull: less than the reserve is free.
        """
        if self.space.level:
            self.space.check(Kind.MESSAGE)
        if not self._commit_scheduled:
            self._begin_turn()
        if properties:
            tail = (
                HEADER_TAIL.pack(_MESSAGE, flags, len(route.topic), len(properties), self._turn_ms)
                + route.topic
                + properties
                + body
            )
        else:
            if route.turn_ms != self._turn_ms or route.flags != flags:
                self._begin_route(route, flags)
            tail = route.beginning + body  # packed once for all messages of the route in this turn
        size = 8 + len(tail)
        position = self.log.add(SIZE_AND_CRC.pack(size, checksum(tail)), tail, size)
        self.messages_stored += 1
        if not flags & UNROUTED:
            self.queues.dispatch_run(route.queues, ENTRY.pack(position, size, aux))
        if flags & OBSERVED:
            self._apply(Record(position, size, _MESSAGE, flags, self._turn_ms, b"", route.topic, properties, body))
        return position

    def append_runs(self, runs: Sequence[tuple[Route, Sequence[bytes], int]], size_max: int) -> bool:
        """Append and route many messages without properties, faster than one by one with `append_message`.

        Return False, and append nothing, when the messages can't all be appended this way. The caller then appends each with
        `append_message`.

        Args:
            runs: each is a run of messages with one topic and one length, given by route, bodies and flags. The flags may hold
                a QoS and nothing else.
            size_max: upper bound of the bytes that all records together take.
        """
        if self.space.level:
            return False
        if not self._commit_scheduled:
            self._begin_turn()
        parts = self.log.begin_run(size_max)
        if parts is None:
            return False
        pack_head, turn_ms = SIZE_AND_CRC.pack, self._turn_ms
        sizes: list[int] = []
        counts: list[int] = []
        queues: tuple[LightQueue, ...] = ()
        starts: list[tuple[int, tuple[LightQueue, ...]]] = []
        total = 0
        for route, bodies, flags in runs:
            if route.version != route.root.version:
                route = self.router.route_stored(route.topic)
            if route.turn_ms != turn_ms or route.flags != flags:
                self._begin_route(route, flags)
            if route.queues != queues:
                queues = route.queues
                starts.append((total, queues))
            beginning, count = route.beginning, len(bodies)
            size = 8 + len(beginning) + len(bodies[0])
            if count == 1:
                tail = beginning + bodies[0]
                parts += (pack_head(size, checksum(tail)), tail)
            else:
                parts += alike_records(size, beginning, bodies)
            sizes.append(size)
            counts.append(count)
            total += count
        position = self.log.end
        entries, end = consecutive_entries(position, sizes, counts)
        self.log.end_run(end)
        self.messages_stored += total
        starts.append((total, ()))
        for (start, queues), (stop, _) in pairwise(starts):
            self.queues.dispatch_run(queues, entries[start * ENTRY_BYTES : stop * ENTRY_BYTES])
        return True

    def _begin_route(self, route: Route, flags: int) -> None:
        """Pack what each message of a route without properties begins with in this turn."""
        route.beginning = HEADER_TAIL.pack(_MESSAGE, flags, len(route.topic), 0, self._turn_ms) + route.topic
        route.turn_ms, route.flags = self._turn_ms, flags

    def append(
        self,
        kind: Kind,
        fixed: bytes = b"",
        topic: bytes = b"",
        body: bytes = b"",
        properties: bytes = b"",
        flags: int = 0,
    ) -> int:
        """Append a record that changes state, apply it, and return its position. See `store.record` for the fields,
        and `store.bodies` for the bodies.

        Raises:
            DiskFull: records of this kind may not be appended at the present level of `space`. Nothing has changed.
            RecordTooLarge: the record does not fit into a segment.
        """
        if self.space.level:
            self.space.check(kind, topic)
        if not self._commit_scheduled:
            self._begin_turn()
        assert len(fixed) == FIXED_BYTES[kind], kind
        tail = b"".join(
            (HEADER_TAIL.pack(kind, flags, len(topic), len(properties), self._turn_ms), fixed, topic, properties, body),
        )
        size = 8 + len(tail)
        spare = COPY_BYTES if kind is Kind.COPIED else 0
        position = self.log.add(SIZE_AND_CRC.pack(size, checksum(tail)), tail, size, spare)
        self._apply(Record(position, size, kind, flags, self._turn_ms, fixed, topic, properties, body))
        return position

    def now_ms(self) -> int:
        """Return the time that a record appended now would carry, in ms since 1970. It is never before the last record's."""
        if self._commit_scheduled:
            return self._turn_ms
        return max(self.clock.now_ms(), self._last_ms)

    def now_for(self, set_ms: int) -> int:
        """Return the present time for something that was set at `set_ms` to hold for a while, such as the expiry of a message.

        It is `now_ms`, unless `set_ms` was within the window of a jump of the time of day that was confirmed and stepped since.
        Then it is the time without that step, because what was set in the window has not got older by it.
        """
        now_ms = self.now_ms()
        return self.steps.now_for(set_ms, now_ms) if self.steps.known else now_ms

    def now_of(self, position: int) -> int:
        """Return the present time for what the message at `position` says about its time, such as when it expires."""
        if not self.steps.known:
            return self.now_ms()
        try:
            return self.now_for(store_ms_of(self.read(position, HEADER_BYTES)))
        except PositionUnknown:
            return self.now_ms()

    def _record_step(self, begin_ms: int, begin: int, step_ms: int) -> bool:
        """Append the record of a step right before the clock is stepped; return False if the disk has no room for it."""
        try:
            self.append(Kind.CLOCK_STEPPED, STEP_FIXED.pack(begin_ms, begin, step_ms))
        except DiskFull:
            return False
        return True

    def read(self, position: int, size: int) -> bytes:
        """Return the bytes of the record that a queue entry names: the record itself, or the copy that was carried forward.

        Raises:
            PositionUnknown: the record has expired, or there never was one.
        """
        if position < self.log.start:
            return self.copies.read(position, size)
        return self.log.read(position, size)

    def read_ahead(self, position: int, size: int, until: int) -> bytes:
        """Return the bytes of a record, and those after it up to `until`. See `CommitLog.read_ahead`."""
        if position < self.log.start:
            return self.copies.read(position, size)
        return self.log.read_ahead(position, size, until)

    def is_expired(self, position: int) -> bool:
        """Return whether the record that was stored at `position` has expired."""
        expires_before = self.retention.expires_before
        if position >= expires_before:
            return False
        copy = self.copies.where(position)
        return copy is None or copy < expires_before  # a copy expires too, unless a part named it again

    def read_intact(self, position: int, size: int) -> bytes | None:
        """Return the bytes of a record; None when it has expired or is damaged, also if a repair has mended the log since.

        Damage is logged.
        """
        try:
            data = self.read(position, size)
        except PositionUnknown as error:
            if position >= self.log.start:
                logger.error("message.unreadable", position=position, why=str(error))
            return None
        if not is_intact(data):
            logger.error("message.unreadable", position=position, why="its checksum does not match; run `penstock repair`")
            return None
        if data[KIND_AT] == Kind.DAMAGED:
            logger.error("message.unreadable", position=position, why="it was damaged, and `penstock repair` has set it aside")
            return None
        return data

    def _apply(self, found: Record) -> None:
        for apply in self._applies.get(found.kind, ()):
            apply(found)

    def _begin_turn(self) -> None:
        self._turn_ms = self._last_ms = max(self.clock.now_ms(), self._last_ms)
        self._commit_scheduled = True
        # A call for records that were committed early serves those of this turn as well. With more calls than one, each would
        # release a group and commit what its callbacks append, and the turn would grow long.
        if self._loop is not None and not self._is_called:
            self._is_called = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._is_called = False
        self.end_turn()

    # --- committing -------------------------------------------------------------------------------------------------

    def end_turn(self) -> None:
        """Commit the records of this turn, and call the callbacks of `when_durable` that are due.

        The first append of a turn schedules it. A caller that knows that no more records come in this turn calls it earlier.
        """
        self.release_durable()  # first, so that clients send their next messages while those of this turn are committed
        if self._commit_scheduled:
            self.commit()
        self.release_durable()

    def release_durable(self) -> None:
        """Call the callbacks of `when_durable` that are due. Only a long turn needs to call it; else the loop does."""
        if self._group is not None:
            self._group.collect()

    def commit(self) -> None:
        """Write the records of this turn and their index changes, then call the watchers. For callers that read in this turn.

        After a failure nothing is committed any more, since a later commit would build on a state that is not on disk.

        Raises:
            OSError: the log or the index can't be written, and the store is not started. When it is started, `on_failure` gets
                the error instead.
        """
        if self._closed or self._failure is not None or self._replay is not None:
            self._commit_scheduled = False
            return
        try:
            if self._commit_scheduled:
                self.before_commit()  # What it appends needs no other commit.
            self._commit_scheduled = False
            self.log.write()
            if self._group is not None:
                # The disk syncs while the index is written. If that write fails, the node ends, but callbacks may still run:
                # their records are in the log, from which the next start rebuilds the index.
                self._group.request()
            assert self.log.written == self.log.end, "the index must not be ahead of what it says it covers"
            fresh = self._unannounced + self._save(self.log.written)
            self._unannounced = []
        except (OSError, IndexDamaged) as error:
            self._commit_scheduled = False
            self.fail(error)
            return
        if self._group is not None:
            self._group.advance()
        for queue, offset, entries in fresh:
            for watcher in tuple(queue.watchers):
                watcher(queue, offset, entries)
        self.fresh_from = self.log.written

    def _rolled(self) -> None:
        """Save the index in the middle of a turn when a segment begins: its snapshot must cover exactly what is before it."""
        if self._replay is not None:
            return  # the index is behind
        try:
            self._unannounced += self._save(self.log.end)
        except (OSError, IndexDamaged) as error:
            self.fail(error)
            raise
        self.retention.segment_begun(self.log.end, self._last_ms)

    def fail(self, error: OSError | IndexDamaged) -> None:
        """End the node because of an error of log or index. The first error counts."""
        if self._failure is not None:
            return
        if isinstance(error, IndexDamaged):
            self.is_index_damaged = True
            error = OSError(errno.EIO, str(error))
        self._failure = error
        self.log.note_failure(str(error), self.durable_position)
        if self._on_failure is None:
            raise error
        self._on_failure(error)

    def _save(self, position: int) -> list[tuple[LightQueue, int, bytes]]:
        batch = self.index.batch()
        fresh = self.queues.save(batch)
        for part in self.parts:
            part.save(batch)
        self.ledger.save(batch)  # last, because the others may charge it even now
        batch.put_covered(Covered(position, self.durable_position, self._last_ms))
        self.index.write(batch)
        return fresh

    def when_durable(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the loop when all records appended so far are committed (with `flush = "async"`: written)."""
        group = self._group
        assert group is not None, "the store is not started"
        if self._is_async:
            assert self._loop is not None
            self._loop.call_soon(self._call_if_written, callback)  # runs after the commit, which is already scheduled
            return
        group.wait(callback)
        if not self._commit_scheduled:
            group.advance()

    async def durable(self) -> None:
        """Wait until all records appended so far are committed."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def release() -> None:
            if not done.done():  # the caller may have been cancelled
                done.set_result(None)

        self.when_durable(release)
        await done

    def _call_if_written(self, callback: Callable[[], None]) -> None:
        if self._failure is None:
            callback()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[OSError], None],
        on_durable: Callable[[], None] | None = None,
    ) -> None:
        """Begin group commit and housekeeping on `loop`. A replica does it after `load`, and others after `recover`.

        Args:
            loop: owns the store from now on.
            on_failure: called once, with the error of the first sync or write that fails. The node must end then. Callbacks of
                `when_durable` are not called any more.
            on_durable: called when more of the log is on disk, with replication. Then only `commit_to` says what is committed.

        Raises:
            OSError: the process that syncs the log can't be started (`StoreOptions.sync_in`).
        """
        self._loop = loop
        self._on_failure = on_failure
        self.retention.is_replicated = on_durable is not None
        self._group = GroupCommit(self.log, loop, self.fail, self._make_sync, self.clock.monotonic_s, on_durable)
        self._backfill_job = SlicedJob(loop, self.clock, self._backfill, pause_s=0)
        self.queues.on_backfill = self._backfill_job.wake
        self._backfill_job.wake()
        if self._commit_scheduled:
            self._is_called = True
            loop.call_soon(self._end_turn)
        self._housekeeping = Housekeeping(self, loop, self._group, self._covered_until())
        self.index.on_growth = self._housekeeping.index_has_grown
        self._housekeeping.turn()

    def measure_disk(self) -> None:
        """Measure how much of the disk is free, which may change `space.level`. Housekeeping does it once a second."""
        try:
            if self.space.was_refused and self.log.has_room():
                self.space.granted()
            self.space.measure()
        except OSError as error:
            self.fail(error)

    @property
    def is_running(self) -> bool:
        """Whether the store is open and nothing has failed."""
        return not self._closed and self._failure is None

    def _backfill(self, until_s: float) -> bool:
        """Do a slice of backfilling for each new queue that there is time for.

        What came in between is committed first, so that backfills end.
        """
        if self._replay is not None and self.is_running:
            is_left = self.queues.backfill(lambda: self.clock.monotonic_s() >= until_s, self._replay.position)
            self._save(self._replay.position)
            return is_left
        while self.log.end > self.log.written and self._failure is None:
            self.commit()  # a watcher may append, and a backfilled queue goes live only when all of the log is written
        if not self.is_running:
            return False
        if not self._commit_scheduled:
            self._begin_turn()
        return self.queues.backfill(lambda: self.clock.monotonic_s() >= until_s)

    @property
    def durable_position(self) -> int:
        """Everything before this position is on disk."""
        return self._group.durable if self._group is not None else self._recovered_until

    @property
    def committed_position(self) -> int:
        """Everything before this position is committed: on disk, and with replication on the disks of all replicas in sync."""
        return self._group.committed if self._group is not None else self._recovered_until

    def commit_to(self, position: int) -> None:
        """Take that everything before `position` is committed. Only the replication calls it (`on_durable` of `start`)."""
        assert self._group is not None, "the store is not started"
        self._group.commit_to(position)

    def is_committed(self, position: int) -> bool:
        """Return whether everything before `position` is committed. If not, begin a sync; without a loop, sync at once."""
        if self._group is None:
            self.log.sync()
            return True
        if self._group.committed < position:
            self._group.wait(nothing)
            self._group.advance()
        return self._group.committed >= position

    @property
    def syncs(self) -> int:
        """Number of syncs of the log since the start."""
        return self._group.syncs if self._group is not None else 0

    @property
    def sync_times(self) -> Histogram:
        """How long each sync of the log took."""
        return self._group.sync_times if self._group is not None else Histogram(DURATION_BOUNDS_S)

    @property
    def commit_times(self) -> Histogram:
        """How long each commit for which somebody waited took, from its write to the answers."""
        return self._group.commit_times if self._group is not None else Histogram(DURATION_BOUNDS_S)

    async def close(self) -> None:
        """Commit, sync, call all callbacks of `when_durable`, flush the index, and close the files.

        After a failure it only closes the files.

        Raises:
            OSError: the last records can't be made durable. The callbacks that wait for them are not called, and `on_failure`
                gets the error.
            IndexDamaged: RocksDB has found damage. `on_failure` gets it as an OSError.
        """
        try:
            await self._close()
        except (OSError, IndexDamaged) as error:
            self.fail(error)
            raise

    async def _close(self) -> None:
        if self._housekeeping is not None:
            self._housekeeping.stop()
        self.retention.close()
        self.timekeeping.close()
        try:
            self.commit()
            if self._failure is None:
                await self._finish()
        finally:
            self._closed = True
            if self._group is not None:
                self._group.stop()
            try:
                self.index.close()
            finally:
                if self._failure is None:
                    self.log.close()
                else:
                    self.log.abandon()

    def abandon(self) -> None:
        """Close the files without writing anything: for a store that could not recover or that has failed."""
        self._closed = True
        self.retention.close()
        self.timekeeping.abandon()
        self.index.close()
        self.log.abandon()

    async def _finish(self) -> None:
        if self._group is not None:
            self._group.finish()
        if self._housekeeping is not None:
            await self._housekeeping.finish()
        self.log.write()  # the callbacks may have appended more
        self._save(self.applied)
        try:
            self.index.flush()
        except OSError as error:
            if error.errno not in PASSING:
                raise
            logger.warning("index.unflushed", why=str(error))  # the next start replays more of the log
