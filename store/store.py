"""The store: append records, apply them, commit them, wait until they are durable, and come back after a crash.

Everything that is kept besides the log is derived from it. A `Part` (POP, delayed messages, retained messages) says which
kinds of record it applies; the same `apply` runs when a record is appended and when recovery reads it again. Nothing else
changes a part's state.

All that is appended in one turn of the event loop is committed at its end: one write to the log, one WriteBatch to the
index, then those who watch a queue are told.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise, repeat
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import structlog

from penstock.store import record
from penstock.store.clock import Clock
from penstock.store.commitlog import Block, CommitLog
from penstock.store.copies import Copies
from penstock.store.errors import DataDirIncompatible, DiskFull, IndexDamaged, LogCorrupt, PositionUnknown, SnapshotInvalid
from penstock.store.groupcommit import GroupCommit
from penstock.store.index import Batch, Covered, Index
from penstock.store.lightqueue import ENTRY, ENTRY_BYTES, LightQueue, consecutive_entries
from penstock.store.options import StoreOptions
from penstock.store.part import Apply, Part
from penstock.store.queues import Queues, Route
from penstock.store.record import COPY_BYTES, FIXED_BYTES, HEADER_TAIL, SIZE_AND_CRC, Flag, Kind, Record, checksum, is_intact
from penstock.store.retention import Retention
from penstock.store.sliced import SlicedJob
from penstock.store.snapshot import DIRECTORY as SNAPSHOTS
from penstock.store.snapshot import restore, snapshots
from penstock.store.space import Level, Space
from penstock.store.syncing import SYNCS

logger = structlog.get_logger("store")

_BLOCK = 64
"""So many records of a run are put together with one call, at most."""

_MESSAGE = int(Kind.MESSAGE)
_UNROUTED = int(Flag.DELAYED | Flag.HALF)
"""Flags of a message that goes into its queues later, when another record says so."""
_OBSERVED = int(Flag.RETAIN | Flag.DELAYED | Flag.HALF | Flag.SESSION)
"""Flags that make a message interesting to a part, beyond its queues."""

REPLAY_BYTES = 4 * 1024 * 1024
"""Log that recovery applies between two index writes: bounds its memory."""

IDLE_SYNC_MS = 1000
"""What nobody waits for (QoS 0) is durable after about this time."""


class Recovery(NamedTuple):
    """What a start found."""

    torn_bytes: int
    replayed: int
    rebuilt: bool
    seconds: float


class Store:
    """The store of one data directory.

    Parameters:
        data_dir: exists, and no other process has it open (the node's lock file sees to that).
        options: see `StoreOptions`.
        clock: where store times come from.
    """

    def __init__(self, data_dir: Path, options: StoreOptions, clock: Clock) -> None:
        self.data_dir = data_dir
        self.options = options
        self.clock = clock
        self._opened_s = clock.monotonic_s()
        self.space = Space(data_dir, reserve_bytes=options.reserve_bytes, reserve_percent=options.reserve_percent)
        self.log = CommitLog(data_dir, segment_bytes=options.segment_bytes, space=self.space)
        self._rebuilt = False
        self.index, self._covered, self._torn_bytes = self._agree()
        self.index.on_damage = self._index_damaged
        self._recovered_until = self.log.written
        self.queues = Queues(self.log, self.index, options, self.append, self.now_ms)
        self.copies = Copies(self.log, self.index)
        self.retention = Retention(self)
        self.log.on_roll = self._rolled
        self.queues.first_position = lambda: max(self.log.start, self.retention.expires_before)
        self.parts: list[Part] = []
        self._applies: dict[int, list[Apply]] = {
            Kind.QUEUE_DECLARED: [self.queues.apply_declared],
            Kind.QUEUE_DROPPED: [self.queues.apply_dropped],
            Kind.QUEUE_BACKFILLED: [self.queues.apply_backfilled],
        }
        self.add_part(self.copies)
        self._last_ms = self._covered.store_ms if self._covered else 0
        self._turn_ms = 0
        self._commit_scheduled = False
        self._failure: OSError | None = None
        self._on_failure: Callable[[OSError], None] | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_async = options.flush == "async"
        self._group: GroupCommit | None = None
        self._flushed_at = 0
        self._flushing: asyncio.Future[None] | None = None
        self._marking: asyncio.Future[None] | None = None
        self._housekeeping: asyncio.TimerHandle | None = None
        self._next_flush_s = 0.0
        self._backfill_job: SlicedJob | None = None
        self._retention_job: SlicedJob | None = None
        self._unannounced: list[tuple[LightQueue, int, bytes]] = []
        self.replaying = True
        """True until `recover` has ended: parts don't act on time or wake anybody until then."""
        self.messages_stored = 0

    def add_part(self, part: Part) -> None:
        """Let `part` apply its kinds. Before `recover`."""
        self.parts.append(part)
        for kind, apply in part.applies().items():
            self._applies.setdefault(kind, []).append(apply)

    # --- recovery ---------------------------------------------------------------------------------------------------

    def recover(self) -> Recovery:
        """Bring index and parts to the state of the last whole record. To be called once, after `add_part`, before `start`.

        Raises:
            RecordCorrupt: a record before the tail is damaged.
            IndexDamaged: the index can't be read. A new store on this directory rebuilds it.

        The files are closed then.
        """
        try:
            return self._recover()
        except BaseException:
            self.abandon()
            raise

    def _recover(self) -> Recovery:
        covered = self._covered
        self._flushed_at = covered.position if covered else self.log.start
        self.queues.load()
        for part in self.parts:
            part.load(self.index)
        replayed = self._replay(self._flushed_at)
        self.replaying = False
        self.space.measure()
        return Recovery(self._torn_bytes, replayed, self._rebuilt, self.clock.monotonic_s() - self._opened_s)

    def _agree(self) -> tuple[Index, Covered | None, int]:
        """Find the end of the log, and start a new index where the old one is damaged or doesn't fit it."""
        index, covered, misfit = _open_index(self.data_dir)
        try:
            tail = self.log.recover(covered.durable if covered else 0)
        except BaseException:
            if index is not None:
                index.close()
            raise
        if covered is not None and not self.log.start <= covered.position <= tail.end:
            misfit = f"it covers the log up to {covered.position}, but that goes from {self.log.start} to {tail.end}"
        if index is None or misfit:
            logger.warning("index.rebuild", reason=misfit)
            if index is not None:
                index.close()
            Index.destroy(self.data_dir)
            index, covered = Index(self.data_dir), None
        if covered is None:
            self._rebuilt = self.log.end > 0
            if self.log.start:
                index, covered = self._begin_with_snapshot(index)
        return index, covered, tail.torn_bytes

    def _index_damaged(self, damage: IndexDamaged) -> None:
        """End, where a loop runs: what is read from the index from now on may lack rows."""
        if self._on_failure is not None:
            self._fail(damage)

    def _begin_with_snapshot(self, index: Index) -> tuple[Index, Covered]:
        """Give a new index what a snapshot knows of the part of the log that is gone."""
        for position in snapshots(self.data_dir):
            if not self.log.start <= position <= self.log.end:
                continue
            try:
                return index, restore(self.data_dir, position, index)
            except SnapshotInvalid as error:
                logger.error("snapshot.invalid", position=position, error=str(error))
                index.close()
                Index.destroy(self.data_dir)
                index = Index(self.data_dir)
        index.close()
        raise LogCorrupt(
            f"the log begins at position {self.log.start}, and no snapshot tells what was before: neither is the index usable, "
            f"nor does {self.data_dir / SNAPSHOTS} hold a whole snapshot from there on; restore that folder, or the index"
        )

    def _replay(self, position: int) -> int:
        """Apply what lies behind `position`: about 1 us a plain message, 4 us for any other record."""
        replayed = 0
        while position < self.log.written:
            block = self.log.block(position, REPLAY_BYTES)
            self._replay_block(block)
            replayed += len(block.offsets)
            position = block.end
            self._save(position)
        self._save(position)
        return replayed

    def _replay_block(self, block: Block) -> None:
        view, base = block.view, block.base
        unpack, route_of, dispatch = record.HEADER.unpack_from, self.queues.route_stored, self.queues.dispatch
        for at in block.offsets or (block.end - base,):
            if at + record.HEADER_BYTES <= len(view):
                size, crc, kind, flags, topic_len, props_len, store_ms = unpack(view, at)
                topic_stop = at + record.HEADER_BYTES + topic_len
                is_plain = kind == _MESSAGE and not props_len and not flags & _OBSERVED and topic_stop <= at + size
                if is_plain and checksum(view[at + record.CRC_FROM : at + size]) == crc:
                    self._last_ms = store_ms
                    dispatch(route_of(bytes(view[at + record.HEADER_BYTES : topic_stop])), base + at, size, 0)
                    continue
            self._replay_record(record.decode(view, at, position=base + at))

    def _replay_record(self, found: Record) -> None:
        self._last_ms = found.store_ms
        if found.kind == _MESSAGE and not found.flags & _UNROUTED:
            tag = record.decode_properties(found.properties).tag
            self.queues.dispatch(self.queues.route_stored(found.topic), found.position, found.size, record.tag_hash(tag))
        if found.kind != _MESSAGE or found.flags & _OBSERVED:
            self._apply(found)

    # --- appending --------------------------------------------------------------------------------------------------

    def append_message(self, route: Route, body: bytes, properties: bytes = b"", flags: int = 0, aux: int = 0) -> int:
        """Append a message and route it; return its position. It is readable after the commit at the end of this turn.

        The hot path: about 1.5 us. `flags` are `Flag`s, `aux` the hash of its tag, `properties` from `encode_properties`.

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
            tail = route.beginning + body  # as that of the message before it: saves 0.2 us
        size = 8 + len(tail)
        position = self.log.add(SIZE_AND_CRC.pack(size, checksum(tail)), tail, size)
        self.messages_stored += 1
        if not flags & _UNROUTED:
            self.queues.dispatch_run(route.queues, ENTRY.pack(position, size, aux))
        if flags & _OBSERVED:
            self._apply(Record(position, size, _MESSAGE, flags, self._turn_ms, b"", route.topic, properties, body))
        return position

    def append_runs(self, runs: Sequence[tuple[Route, Sequence[bytes], int]], size_max: int) -> bool:
        """Append messages without properties, and route them; as `append_message` does each, in a third of the time.

        Return False, and append nothing, where that can't be done for all of them alike: then each is to be appended by itself.

        Args:
            runs: messages of one topic and length each, given by route, bodies and flags; those may be a QoS and nothing else.
            size_max: the most that the records can take, in bytes.
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
                route = self.queues.route_stored(route.topic)
            if route.turn_ms != turn_ms or route.flags != flags:
                self._begin_route(route, flags)
            if route.queues != queues:
                queues = route.queues
                starts.append((total, queues))
            beginning, count = route.beginning, len(bodies)
            size = 8 + len(beginning) + len(bodies[0])
            if count == 1:  # one piece less saves 0.1 us
                tail = beginning + bodies[0]
                parts += (pack_head(size, checksum(tail)), tail)
            else:
                parts += _alike_records(size, beginning, bodies)
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
        """Note what a message of a topic without properties begins with in this turn."""
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
        """Append a record that changes state, and apply it; return its position. See `store.record` for the fields.

        Raises:
            DiskFull: `store.space` says that a record of this kind may not be appended now. Nothing has changed.
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
        """Return the time that a record appended now would carry: the clock's, but never before the last record's."""
        if self._commit_scheduled:
            return self._turn_ms
        return max(self.clock.now_ms(), self._last_ms)

    def read(self, position: int, size: int) -> bytes:
        """Return the bytes of the record that a queue entry names, from where it stands now.

        Raises:
            PositionUnknown: it is expired, or there never was one.
        """
        if position < self.log.start:
            return self.copies.read(position, size)
        return self.log.read(position, size)

    def read_ahead(self, position: int, size: int, until: int) -> bytes:
        """As `read`, with what stands behind the record as `CommitLog.read_ahead` returns it."""
        if position < self.log.start:
            return self.copies.read(position, size)
        return self.log.read_ahead(position, size, until)

    def is_expired(self, position: int) -> bool:
        """Return whether retention has given up the record that stood at `position`."""
        expires_before = self.retention.expires_before
        if position >= expires_before:
            return False
        copy = self.copies.where(position)
        return copy is None or copy < expires_before  # an old copy goes as well, unless somebody needed it when that began

    def read_intact(self, position: int, size: int) -> bytes | None:
        """As `read`; None where the record is expired, or isn't what was written, which is logged. About 0.6 us."""
        try:
            data = self.read(position, size)
        except PositionUnknown as error:
            if position >= self.log.start:
                logger.error("message.unreadable", position=position, why=str(error))
            return None
        if is_intact(data):
            return data
        logger.error("message.unreadable", position=position, why="its checksum does not hold; run `penstock repair`")
        return None

    def _apply(self, found: Record) -> None:
        for apply in self._applies.get(found.kind, ()):
            apply(found)

    def _begin_turn(self) -> None:
        self._turn_ms = self._last_ms = max(self.clock.now_ms(), self._last_ms)
        self._commit_scheduled = True
        if self._loop is not None:
            self._loop.call_soon(self.end_turn)

    # --- committing -------------------------------------------------------------------------------------------------

    def end_turn(self) -> None:
        """Commit what this turn has appended, and release who waits for what is durable by now.

        Scheduled by the first append. Whoever knows that no more comes in this turn calls it before.
        """
        self.release_durable()  # who is told now sends the next message while those of this turn are committed
        if self._commit_scheduled:
            self.commit()
        self.release_durable()

    def release_durable(self) -> None:
        """Release who waits for what is durable by now. For the course of a long turn: else the loop sees to it."""
        if self._group is not None:
            self._group.collect()

    def commit(self) -> None:
        """Write what this turn has appended, then its index changes, then tell who watches: for who reads it in this turn.

        Raises:
            OSError: log or index can't be written, and the store isn't started; if it is, `on_failure` is called. Nothing is
                committed any more: a later commit would go on from a state that is not on disk.
        """
        self._commit_scheduled = False
        if self._closed or self._failure is not None:
            return
        try:
            self.log.write()
            if self._group is not None:
                # The disk works while the index is written. Where that fails, the node ends, and who waits may still be told:
                # what they wait for is in the log, from which the index is made again.
                self._group.request()
            assert self.log.written == self.log.end, "the index must not be ahead of what it says it covers"
            fresh = self._unannounced + self._save(self.log.written)
            self._unannounced = []
        except (OSError, IndexDamaged) as error:
            self._fail(error)
            return
        if self._group is not None:
            self._group.advance()
        for queue, offset, entries in fresh:
            for watcher in tuple(queue.watchers):
                watcher(queue, offset, entries)

    def _rolled(self) -> None:
        """Save what was appended before a new segment, in the middle of a turn: its snapshot begins exactly there."""
        try:
            self._unannounced += self._save(self.log.end)
        except (OSError, IndexDamaged) as error:
            self._fail(error)
            raise
        self.retention.rolled(self.log.end, self._last_ms)

    def _fail(self, error: OSError | IndexDamaged) -> None:
        if self._failure is not None:
            return
        if isinstance(error, IndexDamaged):
            error = OSError(errno.EIO, str(error))
        self._failure = error
        if self._on_failure is None:
            raise error
        self._on_failure(error)

    def _save(self, position: int) -> list[tuple[LightQueue, int, bytes]]:
        batch = Batch()
        fresh = self.queues.save(batch)
        for part in self.parts:
            part.save(batch)
        batch.put_covered(Covered(position, self.durable_position, self._last_ms))
        self.index.write(batch)
        return fresh

    def when_durable(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the loop when all that was appended so far is durable (with `flush = "async"`: written)."""
        group = self._group
        assert group is not None, "the store is not started"
        if self._is_async:
            assert self._loop is not None
            self._loop.call_soon(self._call_if_written, callback)  # behind the commit, which was scheduled before
            return
        group.wait(callback)
        if not self._commit_scheduled:
            group.advance()

    async def durable(self) -> None:
        """Return when all that was appended so far is durable."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def release() -> None:
            if not done.done():  # its waiter may have been cancelled
                done.set_result(None)

        self.when_durable(release)
        await done

    def _call_if_written(self, callback: Callable[[], None]) -> None:
        if self._failure is None:
            callback()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[OSError], None]) -> None:
        """Begin group commit and housekeeping on `loop`.

        `on_failure` is called once, with the error of a failed sync or write: end then. Who waits is not answered any more.

        Raises:
            OSError: there can be no process that syncs, where `sync_in` asks for one.
        """
        self._loop = loop
        self._on_failure = on_failure
        self._group = GroupCommit(self.log, loop, self._fail, SYNCS[self.options.sync_in])
        self._next_flush_s = loop.time() + self.options.index_flush_ms / 1000
        self._retention_job = SlicedJob(loop, self.clock, self._retain)
        self._backfill_job = SlicedJob(loop, self.clock, self._fill, pause_s=0)
        self.queues.on_backfill = self._backfill_job.wake
        self._backfill_job.wake()
        if self._commit_scheduled:
            loop.call_soon(self.end_turn)
        self._keep_house()

    def _keep_house(self) -> None:
        """Once a second: look at the disk, mark how far it is durable, sync what nobody waits for, flush the index in time."""
        loop, group = self._loop, self._group
        assert loop is not None
        assert group is not None
        self._housekeeping = loop.call_later(IDLE_SYNC_MS / 1000, self._keep_house)
        self.measure_disk()
        if group.durable > self.log.marked and (self._marking is None or self._marking.done()):
            self._marking = loop.run_in_executor(None, self.log.mark, group.durable)
            self._marking.add_done_callback(self._ended)
        if self.log.written > group.durable:
            group.wait(_nothing)
            group.advance()
        self._keep_retention()
        if self.space.level is Level.EXHAUSTED:
            return  # a flush that fails would end the node, and nothing is appended that it must keep up with
        behind = group.durable - self._flushed_at
        is_time = loop.time() >= self._next_flush_s or behind >= self.options.index_flush_bytes
        if behind > 0 and is_time and (self._flushing is None or self._flushing.done()):
            self._next_flush_s = loop.time() + self.options.index_flush_ms / 1000
            self._flushed_at = group.durable
            self._flushing = loop.run_in_executor(None, self.index.flush)
            self._flushing.add_done_callback(self._ended)

    def _ended(self, work: asyncio.Future[None]) -> None:
        error = None if work.cancelled() else work.exception()
        if isinstance(error, OSError | IndexDamaged):
            self._fail(error)

    def measure_disk(self) -> None:
        """Look how much of the disk is free, and change `space.level`. Done once a second; here for a test that can't wait."""
        try:
            if self.space.was_refused and self.log.has_room():
                self.space.granted()
            self.space.measure()
        except OSError as error:
            self._fail(error)

    def _keep_retention(self) -> None:
        """See what is due to go, and let retention work for a slice; again after a pause while there is work."""
        assert self._retention_job is not None
        if self._closed or self._failure is not None or self._retention_job.is_scheduled:
            return
        try:
            with suppress(DiskFull):  # no room for a new segment: the space is told, and the open one goes on
                self.retention.begin_due()
        except (OSError, IndexDamaged) as error:
            self._fail(error)
            return
        self._retention_job.run()

    def _retain(self, until_s: float) -> bool:
        if self._closed or self._failure is not None:
            return False
        try:
            return self.retention.step(until_s)
        except (OSError, IndexDamaged) as error:
            self._fail(error)
            return False

    def _fill(self, until_s: float) -> bool:
        """Fill new queues by one slice a turn. What comes in between is read first, so that the slices end."""
        while self.log.end > self.log.written and self._failure is None:
            self.commit()  # who watches may append; a filling goes live on a log that is all written
        if self._closed or self._failure is not None:
            return False
        if not self._commit_scheduled:
            self._begin_turn()
        return self.queues.backfill()

    @property
    def durable_position(self) -> int:
        """Everything before this position is on disk."""
        return self._group.durable if self._group is not None else self._recovered_until

    def is_durable(self, position: int) -> bool:
        """Return whether everything before `position` is on disk. Without a loop, which would see to it, sync here and now."""
        if self._group is None:
            self.log.sync()
            return True
        if self._group.durable < position:
            self._group.wait(_nothing)
            self._group.advance()
        return self._group.durable >= position

    @property
    def syncs(self) -> int:
        """How many times the log was synced since the start."""
        return self._group.syncs if self._group is not None else 0

    async def close(self) -> None:
        """Commit, sync, flush the index, close the files. Everybody who waits is answered first.

        After a failure only the files are closed.

        Raises:
            OSError: what was written last can't be made durable. Nobody who waits for it is answered.
        """
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        self.retention.close()
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
        """Close the files, and write nothing: of a store that could not recover, or that has failed."""
        self._closed = True
        self.retention.close()
        self.index.close()
        self.log.abandon()

    async def _finish(self) -> None:
        if self._group is not None:
            self._group.finish()
        for work in (self._flushing, self._marking):
            if work is not None:
                await work
        self.log.write()  # what those who were answered have appended
        self._save(self.log.written)
        self.index.flush()


def _open_index(data_dir: Path) -> tuple[Index | None, Covered | None, str]:
    """Return the index and how far it covers the log; without an index, why it must be rebuilt."""
    reason = Index.damage_of(data_dir)
    if reason:
        return None, None, reason
    try:
        index = Index(data_dir)
    except IndexDamaged as error:
        return None, None, str(error)
    try:
        return index, index.covered(), ""
    except (DataDirIncompatible, IndexDamaged) as error:
        index.close()
        return None, None, str(error)


def _alike_records(size: int, beginning: bytes, bodies: Sequence[bytes]) -> list[bytes]:
    """Return records of `size` bytes, which differ in their bodies only: one behind the other, in a few pieces.

    About 0.12 us for one of 64 bytes.
    """
    crc, shape = checksum(beginning), (len(beginning), len(bodies[0]))
    pieces = []
    for at in range(0, len(bodies), _BLOCK):
        some = bodies[at : at + _BLOCK]
        fields = [size, 0, beginning, b""] * len(some)
        fields[1::4] = map(checksum, some, repeat(crc))
        fields[3::4] = some
        pieces.append(_packer(len(some), shape).pack(*fields))
    return pieces


@lru_cache(maxsize=256)
def _packer(count: int, shape: tuple[int, int]) -> Struct:
    """Return what packs `count` records, each given by its size, its checksum, and two pieces of these lengths."""
    return Struct("<" + "II{}s{}s".format(*shape) * count)


def _nothing() -> None:
    """For a sync that nobody waits for."""
