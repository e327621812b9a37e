"""Retention: old segments are dropped, and the records in them that somebody still needs are carried forward first.

A segment may be dropped when a snapshot at its end is durable (`store.snapshots.snapshotwriter`) and either all its records are
too old or the log is too large. Records before that position are *expired* from then on: no consumer gets them any more. Then
each part names the records that it still needs, and retention copies those to the end of the log, once. After that the segments
are deleted, and light queues lose the entries that point there.

All of that is done in slices between other work. The order makes it safe to be killed anywhere: copies are durable before
anything is deleted, and nobody needs what is deleted.

There is one job of each kind (`JobKind`), and the jobs take turns. So neither a snapshot nor the trimming of a million queues
delays the next deletion, however fast segments fill. `Blocker` lists what can delay it, and for how long.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from penstock.store.errors import DiskFull, PositionUnknown
from penstock.store.files import SYSTEM_FILES, Files
from penstock.store.options import MIB
from penstock.store.queues.latedispatches import Late
from penstock.store.record import COPY_FIXED, KIND_AT, Kind, is_intact
from penstock.store.retention.trimming import Trimming, end_unused_roots
from penstock.store.sliced import FULL_RETRY_S, Steps
from penstock.store.snapshots.snapshots import Snapshots

if TYPE_CHECKING:
    from penstock.store.store import Store

logger = structlog.get_logger("store")

SEGMENT_AGE_DIVISOR = 4
"""A segment is sealed when its first record has reached this part of `retention_ms`, so that a slow log expires too."""

UNSYNCED_BYTES_MAX = 8 * MIB
"""Bytes that are copied forward before the copies so far must be durable, because publishers share the disk."""

BLOCKED_RETRY_S = 60.0
"""Seconds after which retention tries again when `copied_bytes_max` has stopped it."""

OVERRUN_BYTES = 32 * MIB
"""Bytes that the log may have besides `retention_bytes`, its copies, the open segment and the distance of two snapshots.

A fast disk takes as many in the time of the syncs that an expiry waits for: one of a snapshot, one of the copies. With more,
the log says so: `Blocker.WORK`."""

TELL_AGAIN_S = 60.0
"""Seconds after which the log names the same `Blocker` again, if it has ended meanwhile."""


class JobKind(Enum):
    """The kinds of work that retention does. There is at most one job of each, so none queues behind others."""

    SNAPSHOT = auto()
    EXPIRY = auto()
    TRIMMING = auto()


class Blocker(StrEnum):
    """What can keep segments that must go, and until when."""

    COPIES = "copies"
    """More records are still needed than `copied_bytes_max` allows to copy. It lasts until fewer are needed."""
    BACKUP = "backup"
    """A backup copies the segments: for `penstock.node.holding.HOLD_S_MAX` at most, and until the disk is nearly full."""
    FOLLOWER = "follower"
    """A replica gets the snapshot at the beginning of the log: as long as it acknowledges what it gets, and for
    `penstock.cluster.followers.HOLD_S` more."""
    TABLES = "tables"
    """The Parquet tables don't have the segments yet: for `TablesOptions.lag_bytes_max` of the log at most, and until the
    disk is nearly full."""
    BACKFILL = "backfill"
    """A new queue gets the entries of messages in the segments. It reads the log once. Queues that are declared meanwhile begin
    after what goes."""
    DISK = "disk"
    """The disk has no room for the copies. It is tried again each `FULL_RETRY_S`."""
    WORK = "work"
    """Snapshots and copies take longer than segments take to fill, and the log is `OVERRUN_BYTES` too large by now."""

    @property
    def why(self) -> str:
        """A sentence that says what keeps the segments, and what an operator may do."""
        return _WHY[self]


_WHY = {
    Blocker.COPIES: "the records that are still needed would take more than 16 GiB; let consumers "
    "catch up, and delete groups, dead letters and delayed messages that nobody needs",
    Blocker.BACKUP: "a backup copies the segments; they go when it has ended",
    Blocker.FOLLOWER: "a replica gets the snapshot where the log begins; the segments go when it has it",
    Blocker.TABLES: "the Parquet tables don't have the segments yet; they go when the tables have them, or when the tables are "
    "4 GiB behind; if the log says tables.failed, mend what it names",
    Blocker.BACKFILL: "a new queue is filled with messages from the segments; they go when it is full",
    Blocker.DISK: "the disk has no room for copies of the records that are still needed; free or add space",
    Blocker.WORK: "snapshots of the index and copies of needed records take longer than segments take to fill; raise "
    "store.segment_bytes and store.retention_bytes, or publish less; if the log says snapshot.failed, look at the disk",
}


class Retention:
    """The retention of a store.

    Parameters:
        store: has the log, its index, and the parts that name the records that they need. While the store's time is not
            confirmed, nothing expires by age.
        files: has the data directory.
        executor: makes snapshots durable, outside of the loop; a thread if it is None.
    """

    def __init__(self, store: Store, files: Files = SYSTEM_FILES, executor: Executor | None = None) -> None:
        self._store = store
        self._options = store.options
        self._clock = store.clock
        self._log = log = store.log
        self._queues = store.queues
        self._copies = store.copies
        self._jobs: dict[JobKind, Steps] = {}
        """The work under way. The job that comes first gets the next step."""
        self._is_waiting = False
        """Whether all jobs had to wait when `step` ended."""
        self._must_trim = False
        """Whether segments were dropped since the trimming under way has begun."""
        self._awaits_backfill = False
        self._awaits_tables = False
        """Whether two segments or more must go that the tables need. One is in their work every now and then."""
        self._snapshots = Snapshots(store.data_dir, log, store.index, files=files, executor=executor)
        self._trimming = Trimming(store.index, store.queues, store.copies, lambda: log.start)
        self._expiring_before: int | None = None
        """Position before which the expiry among the jobs drops everything; None if there is none."""
        self._leader_start = 0
        """Where the leader's log begins, of a store that follows one."""
        self._needed = 0
        """What must be applied before this log may begin there too: the leader's copies are before this position."""
        self._retry_s = 0.0
        self._refused: Blocker | None = None
        """Why the last expiry has dropped nothing."""
        self.expires_before = log.start
        """Records before this position are expired, unless there is a copy of them."""
        self.on_dropped: list[Callable[[], Iterator[None]]] = []
        """Called when segments were dropped and queues are trimmed. A part returns what it must do then, in short steps."""
        self.copied_bytes = 0
        self.dropped_segments = 0
        self.dropped_bytes = 0
        self.on_work: Callable[[], None] = lambda: None
        """Called when there is work for `step` that must not wait for the next turn of housekeeping."""
        self.blocked_by: Blocker | None = None
        """What keeps segments that must go."""
        self._quiet_until_s: dict[Blocker, float] = {}
        """From when on the log may name each of them again."""
        self.is_replicated = False
        """Whether snapshots are taken also where nothing expires: a replica whose log is cut rebuilds its index from one."""
        self.holds: set[Blocker] = set()
        """Who copies segments or snapshots, which must stay meanwhile. Each takes its own name out again."""
        self.needed_from: Callable[[], int] = lambda: log.end
        """Returns the position from which the Parquet tables need the log. Segments after it stay."""
        self.seal_ms = 0
        """Age of its first record at which the open segment is sealed for the Parquet tables; 0 for no such age."""
        self.is_held_back = False
        """Whether segments should have been dropped while somebody held them."""

    @property
    def enabled(self) -> bool:
        """Whether anything ever expires."""
        return bool(self._options.retention_ms or self._options.retention_bytes)

    @property
    def is_held(self) -> bool:
        """Whether segments and snapshots must stay, because somebody copies them."""
        return bool(self.holds)

    @property
    def busy(self) -> bool:
        """Whether `step` has work to do."""
        return bool(self._jobs)

    @property
    def is_behind(self) -> bool:
        """Whether segments fill faster than they go, so that `step` should be called without a pause.

        The log is larger than it should be, or the expiry under way takes so long that two more segments must go after those
        that it drops.
        """
        if not self._jobs or self._is_waiting or self.blocked_by not in (None, Blocker.WORK):
            return False
        return self._overrun() > 0 or self._is_more_due()

    def _overrun(self) -> int:
        """Return how many bytes the log has besides `retention_bytes`, copies, the open segment and a distance of snapshots."""
        options, log = self._options, self._log
        if not options.retention_bytes:
            return 0
        size_max = options.retention_bytes + self._copies.pinned_bytes + options.segment_bytes + self._snapshots.spacing
        return max(log.written - log.start - size_max, 0)

    def _is_more_due(self) -> bool:
        """Return whether two more segments must go after those that the expiry under way drops."""
        expiring = self._expiring_before
        return expiring is not None and sum(expiring < position for position in self._due()) > 1

    def set_snapshots_aside(self, after: int) -> None:
        """Set the snapshots after a position aside, as `Snapshots.set_aside` does."""
        self._snapshots.set_aside(after)

    @property
    def snapshots(self) -> list[int]:
        """Positions of the snapshots that are complete, in order."""
        return sorted(self._snapshots.complete)

    @property
    def trimmed_entries(self) -> int:
        """Entries of light queues that were deleted since the start."""
        return self._trimming.trimmed_entries

    # --- called by the store ----------------------------------------------------------------------------------------

    def segment_begun(self, position: int, store_ms: int) -> None:
        """Begin a snapshot at `position`, where a segment begins. The index is saved exactly up to there.

        `store_ms` is when the last record before it was stored.
        """
        steps = self._snapshots.begin(position, store_ms) if self.enabled or self.is_replicated else None
        if steps is not None:
            self._jobs[JobKind.SNAPSHOT] = steps
            self.on_work()

    def begin_due(self) -> bool:
        """Begin what is due, and return whether there was something. The caller calls it before and after each slice of `step`.

        Raises:
            DiskFull: there is no room for a new segment.
        """
        if not self.enabled and not self.seal_ms:
            return False
        log = self._log
        base, end = log.segments()[-1]
        age_ms = self._age_ms(log.stored_ms(base)) if end > base else 0
        ages_ms = (self._options.retention_ms // SEGMENT_AGE_DIVISOR, self.seal_ms)
        if log.end == end and any(0 < age_max_ms < age_ms for age_max_ms in ages_ms):
            log.roll()
        due, needed_from = list(self._due()), self.needed_from()
        self._awaits_tables = sum(position > needed_from for position in due) > 1
        return self._begin_expiry(max((position for position in due if position <= needed_from), default=None))

    def _begin_expiry(self, boundary: int | None, *, is_following: bool = False) -> bool:
        """Begin to drop everything before `boundary`, if nothing is in the way. Return whether it has begun."""
        self.is_held_back = self.is_held and boundary is not None
        if boundary is None:
            self._refused = None
        self._tell(self._blocker(boundary))
        may_try = boundary is not None and not self.is_held and self._clock.monotonic_s() >= self._retry_s
        if not may_try or JobKind.EXPIRY in self._jobs:
            return False
        assert boundary is not None
        self._expiring_before = boundary
        self._jobs[JobKind.EXPIRY] = self._expire(boundary, is_following)
        return True

    def _blocker(self, boundary: int | None) -> Blocker | None:
        """Return what keeps segments, where those before `boundary` must go."""
        if boundary is not None and self.holds:
            return min(self.holds)
        if self._refused is not None:
            return self._refused
        if self._awaits_tables:
            return Blocker.TABLES
        if self._awaits_backfill and self._is_more_due():
            return Blocker.BACKFILL
        return Blocker.WORK if self._overrun() > OVERRUN_BYTES else None

    def _tell(self, blocker: Blocker | None) -> None:
        """Note what keeps segments, and log it when it begins."""
        is_new = blocker is not self.blocked_by
        self.blocked_by = blocker
        now_s = self._clock.monotonic_s()
        if blocker is None or not is_new or now_s < self._quiet_until_s.get(blocker, now_s):
            return
        self._quiet_until_s[blocker] = now_s + TELL_AGAIN_S
        log_bytes, pinned_bytes = self._log.written - self._log.start, self._copies.pinned_bytes
        logger.warning(
            "retention.blocked", reason=blocker.value, log_bytes=log_bytes, pinned_bytes=pinned_bytes, why=blocker.why
        )

    def follow(self, start: int, needed: int) -> None:
        """Take where the leader's log begins, and up to where this one must be applied before it may begin there too."""
        if start > self._leader_start:
            self._leader_start, self._needed = start, needed

    def begin_following(self) -> bool:
        """Begin to drop what the leader has dropped, and return whether there was something. See `begin_due`.

        A follower drops up to the last of its own snapshots, which it needs no less than a leader does.
        """
        if self._store.applied < self._needed:
            return False
        start, until = self._log.start, min(self._leader_start, self.needed_from())
        boundary = max((each for each in self._snapshots.complete if start < each <= until), default=None)
        return self._begin_expiry(boundary, is_following=True)

    def step(self, until_s: float) -> bool:
        """Work until the clock's monotonic time is `until_s`, or until all jobs must wait; return whether more work is left."""
        clock, jobs = self._clock, self._jobs
        if self._log.end > self._log.written:
            self._store.commit()  # parts also read what they need from light queues
        waiting = 0
        while waiting < len(jobs):
            waiting = waiting + 1 if self._advance(next(iter(jobs))) else 0
            if clock.monotonic_s() >= until_s:
                break
        self._is_waiting = waiting >= len(jobs)
        return bool(jobs)

    def _advance(self, kind: JobKind) -> bool:
        """Do a step of a job, and return whether the next one must wait. The other jobs come first then."""
        job = self._jobs.pop(kind)
        try:
            must_wait = next(job)
        except StopIteration:
            return False
        except DiskFull:  # the store logs that the disk is full; nothing was dropped
            self._refuse(Blocker.DISK, FULL_RETRY_S)
            return False
        self._jobs[kind] = job
        return bool(must_wait)

    def _refuse(self, blocker: Blocker, retry_s: float) -> None:
        """Try no expiry for some seconds."""
        self._refused = blocker
        self._tell(blocker)
        self._retry_s = self._clock.monotonic_s() + retry_s

    def close(self) -> None:
        """Stop the work under way. The next start begins it again."""
        self._snapshots.wait()
        for job in self._jobs.values():
            job.close()
        self._jobs.clear()
        self._snapshots.close()

    # --- expiry -----------------------------------------------------------------------------------------------------

    def _due(self) -> Iterator[int]:
        """Yield the positions, in order, before which everything must go."""
        log, options = self._log, self._options
        may_be_old = options.retention_ms and self._store.timekeeping.is_confirmed
        before, size_max = log.start, options.retention_bytes + self._copies.pinned_bytes  # or these would be copied for ever
        for position, stored_ms in self._snapshots.complete.items():
            if position <= log.start:
                continue
            is_old = may_be_old and self._age_ms(stored_ms) >= options.retention_ms
            is_large = options.retention_bytes and log.written - before > size_max
            if not (is_old or is_large):
                break
            yield position
            before = position

    def _age_ms(self, stored_ms: int) -> int:
        """Return the age of a record that was stored at `stored_ms`. A step of the clock does not count for records that were
        stored while the jump was unconfirmed."""
        return self._store.now_for(stored_ms) - stored_ms

    def _expire(self, boundary: int, is_following: bool) -> Steps:
        """Carry forward the records before `boundary` that somebody needs, then delete that part of the log.

        On a follower the leader has carried them forward already, and ends what it uses no more.
        """
        try:
            yield from self._drop(boundary, is_following)
        finally:
            self._expiring_before = None
            self._awaits_backfill = False

    def _drop(self, boundary: int, is_following: bool) -> Steps:
        log = self._log
        yield from self._snapshots.verify(boundary)
        if boundary not in self._snapshots.complete:
            return  # begins again with a snapshot before or after it
        if not is_following:
            if not (yield from self._carry_all(self._store.late.expiring(boundary))):
                return
            self._store.commit()  # consumers must find the copies from now on
        self.expires_before = boundary
        while self._queues.backfills_from_before(boundary):
            self._awaits_backfill = True
            yield True
        self._awaits_backfill = False
        if not is_following:
            if not (yield from self._carry_all(self._needed_by_parts(boundary))):
                return
            yield from self._sync(log.end)
        if self.is_held:
            return  # begins again when the hold has ended, and finds the copies made
        freed = boundary - log.start
        self.dropped_segments += log.drop_before(boundary)
        self.dropped_bytes += freed
        self._snapshots.drop_before(boundary)
        self._refused = None
        logger.info("log.expired", before=boundary, freed_bytes=freed, pinned_bytes=self._copies.pinned_bytes)
        yield from self._forget_copies()
        self._must_trim = True
        if JobKind.TRIMMING not in self._jobs:
            self._jobs[JobKind.TRIMMING] = self._trim(is_following)

    def _trim(self, is_following: bool) -> Steps:
        """Trim queues until no segment has been dropped meanwhile."""
        while self._must_trim:
            self._must_trim = False
            yield from self._trimming.steps()
            if not is_following:
                yield from end_unused_roots(self._queues)

    def _needed_by_parts(self, boundary: int) -> Iterator[Late]:
        """Yield what the parts need of the records before `boundary`. A copy after that is enough."""
        for part in self._store.parts:
            for origin, size in part.live(boundary):
                yield origin, size, boundary

    def _carry_all(self, needed: Iterator[Late | None]) -> Generator[bool | None, None, bool]:
        """Carry records forward. Return False where `copied_bytes_max` forbids it. The last copies may not be committed yet."""
        store, log = self._store, self._log
        for record in needed:
            if record is not None and not self._carry(*record):
                return False
            if log.end - store.committed_position > UNSYNCED_BYTES_MAX:
                yield from self._sync(log.end)
            yield False
        return True

    def forget_dropped(self) -> Steps:
        """Delete what refers to records that were dropped and have no copy. After a kill, the next expiry does what is left."""
        yield from self._forget_copies()
        yield from self._trimming.steps()

    def _forget_copies(self) -> Steps:
        """Forget the copies that were dropped, and let the parts forget what they know of dropped records."""
        yield from self._copies.forget_before(self._log.start)
        yield from self._store.late.forget_before(self._log.start)
        for dropped in self.on_dropped:
            yield from dropped()

    def _carry(self, origin: int, size: int, place_min: int) -> bool:
        """Copy a record unless a copy is at `place_min` or after it. Return False where `copied_bytes_max` forbids it."""
        copies = self._copies
        copy = copies.where(origin)
        if copy is not None and copy >= place_min:
            return True
        if copy is None and copies.pinned_bytes + size > self._options.copied_bytes_max:
            self._refuse(Blocker.COPIES, BLOCKED_RETRY_S)
            return False
        self.copy(origin, size)
        return True

    def carry_if_expiring(self, origin: int, size: int) -> None:
        """Carry a record forward now if the expiry under way would drop it: its consumers are only just getting it.

        A later expiry finds it by the record that dispatches it (`store.queues.latedispatches`).
        """
        boundary = self._dropping_before
        if origin < boundary and (self._copies.where(origin) or origin) < boundary:
            self.copy(origin, size)

    def carry_expiring(self, entries: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Do what `carry_if_expiring` does for many entries of `store.queues.lightqueue.ENTRY_DTYPE`."""
        boundary = self._dropping_before
        if boundary:
            for position, size, _ in entries[entries["position"] < boundary].tolist():
                self.carry_if_expiring(position, size)

    @property
    def _dropping_before(self) -> int:
        """Position before which an expiry that has not ended in a deletion drops everything; 0 if there is none."""
        boundary = max(self._expiring_before or 0, self.expires_before)
        return boundary if boundary > self._log.start else 0

    def copy(self, origin: int, size: int) -> None:
        """Append a copy of a record. A record that can't be read is logged and left out: nobody could read it before either."""
        try:
            data = self._store.read(origin, size)
        except PositionUnknown as error:
            logger.error("record.unreadable", position=origin, error=str(error))
            return
        if not is_intact(data) or data[KIND_AT] == Kind.DAMAGED:
            logger.error(
                "record.unreadable", position=origin, error="its checksum does not match, or a repair has set it aside"
            )
            return
        self._store.append(Kind.COPIED, COPY_FIXED.pack(origin), body=data)
        self.copied_bytes += size

    def _sync(self, position: int) -> Steps:
        """Wait until everything before `position` is committed."""
        if position > self._store.committed_position:
            self._store.commit()
            while not self._store.is_committed(position):
                yield True
