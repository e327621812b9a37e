"""Deliberate defects, which prove that the simulation finds such defects.

Each is a function that changes classes of the node while one process runs simulations with it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from penstock.backup import backup
from penstock.backup.manifest import StoredFile
from penstock.backup.source import SourceFile
from penstock.gateway.connection.outbox import Outbox
from penstock.gateway.delivery.retained_messages import RetainedMessages
from penstock.gateway.delivery.share_settlements import ShareSettlements
from penstock.gateway.sessions.stored_sessions import StoredSessions
from penstock.node import parts
from penstock.pop.core.checkpoint import Checkpoint
from penstock.pop.core.order import FifoOrder
from penstock.pop.core.state import PopState
from penstock.pop.grpc.status import RECALL_STATUS
from penstock.pop.grpc.timerservicer import TimerServicer
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.errors import DiskFull
from penstock.store.files import Files
from penstock.store.index.index import Batch, Covered
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.groupcommit import GroupCommit
from penstock.store.log.segment import Segment
from penstock.store.queues.lightqueue import entries_array
from penstock.store.queues.queues import Queues
from penstock.store.record import Record
from penstock.store.recovery import repair as repairing
from penstock.store.recovery.recovery import REPLAY_BYTES, Replay
from penstock.store.retention.retention import Retention
from penstock.store.retention.trimming import Trimming
from penstock.store.snapshots.snapshotwriter import SnapshotWriter
from penstock.store.store import Store
from penstock.store.timekeeping import Timekeeping
from penstock.timer.buckets import TimerBuckets
from penstock.timer.keys import TimerKeys
from penstock.timer.schedules import Schedule, Schedules
from tests.simulation.disk import SimulatedFile, SimulatedFiles

Patch = pytest.MonkeyPatch


def acknowledge_before_the_sync(patch: Patch) -> None:
    """Callers that wait for durability go on at once."""

    def when_durable(store: Store, callback: Callable[[], None]) -> None:
        assert store._loop is not None
        store._loop.call_soon(callback)

    patch.setattr(Store, "when_durable", when_durable)


def report_one_sync_for_two(patch: Patch) -> None:
    """A sync that has ended counts for the requests that came after it began."""
    ended = GroupCommit._ended

    def too_many(commit: GroupCommit, error: OSError | None, served: int) -> None:
        ended(commit, error, len(commit._targets) or served)

    patch.setattr(GroupCommit, "_ended", too_many)


def skip_directory_syncs(patch: Patch) -> None:
    """No name of a file is made durable."""
    patch.setattr(SimulatedFiles, "sync_directory", lambda files, path: None)


def do_not_sync_a_full_segment(patch: Patch) -> None:
    """The next segment begins before the one that is full is durable."""
    sync, roll = CommitLog._fdatasync, CommitLog.roll

    def roll_unsynced(log: CommitLog, size: int = 0) -> None:
        patch.setattr(CommitLog, "_fdatasync", lambda log, file: None)
        try:
            roll(log, size)
        finally:
            patch.setattr(CommitLog, "_fdatasync", sync)

    patch.setattr(CommitLog, "roll", roll_unsynced)


def share_the_file_of_syncs(patch: Patch) -> None:
    """The process that syncs has the same open file as the node, so only one of them hears of a failed write-back."""
    begin = Segment.__init__

    def begin_shared(segment: Segment, files: Files, path: Path, capacity: int, *, writable: bool) -> None:
        begin(segment, files, path, capacity, writable=writable)
        if writable:
            segment.sync_file.close()
            segment.sync_file = segment.file

    patch.setattr(Segment, "__init__", begin_shared)


def replay_in_reverse(patch: Patch) -> None:
    """A replay applies the records of a block in reverse."""
    replay_block = Replay._replay_block

    def reversed_block(replay: Replay, block: Any) -> None:
        replay_block(replay, block._replace(offsets=block.offsets[::-1]))

    patch.setattr(Replay, "_replay_block", reversed_block)


def let_the_index_be_ahead(patch: Patch) -> None:
    """The row that says how far the index covers the log is one commit old."""
    put_covered = Batch.put_covered
    last: dict[str, Covered] = {}

    def put_old(batch: Batch, covered: Covered) -> None:
        before = last.get("covered", covered)
        put_covered(batch, before if before.position <= covered.position else covered)
        last["covered"] = covered

    patch.setattr(Batch, "put_covered", put_old)


def drop_before_copies_are_durable(patch: Patch) -> None:
    """Retention does not wait for its copies."""

    def no_sync(retention: Retention, position: int) -> Iterator[bool | None]:
        yield from ()

    patch.setattr(Retention, "_sync", no_sync)


def copy_nothing_forward(patch: Patch) -> None:
    """Retention copies nothing that somebody still needs."""
    patch.setattr(Retention, "copy", lambda retention, origin, size: None)


def snapshot_without_the_last_turn(patch: Patch) -> None:
    """The index is not saved before a snapshot begins."""
    patch.setattr(Store, "_rolled", lambda store: store.retention.segment_begun(store.log.end, store._last_ms))


def mark_what_is_not_durable(patch: Patch) -> None:
    """The sync mark names the end of what was written."""
    mark = CommitLog.mark
    patch.setattr(CommitLog, "mark", lambda log, position: mark(log, log.written))


def leave_the_torn_tail(patch: Patch) -> None:
    """Recovery keeps what follows the last whole record, in place and where it writes the end of the log anew."""
    write_anew = CommitLog._write_anew

    def write_all_anew(log: CommitLog, end: int, durable: int) -> None:
        old = log._open
        torn = old.read(end, old.data_end(end) - end)
        position = old.base + end
        write_anew(log, end, durable)
        log._open.write(torn, position - log._open.base)

    patch.setattr(Segment, "clear_from", lambda segment, offset: None)
    patch.setattr(CommitLog, "_write_anew", write_all_anew)


def forget_received_packet_ids(patch: Patch) -> None:
    """The node stores no packet ids of QoS 2 that it has received."""
    patch.setattr(StoredSessions, "_apply_message", lambda sessions, record: None)


def answer_before_the_record(patch: Patch) -> None:
    """PUBCOMP and SUBACK go out before their records are durable."""
    patch.setattr(Outbox, "send_when_recorded", lambda outbox, data: outbox.send(data))


def send_before_the_packet_ids(patch: Patch) -> None:
    """Deliveries at QoS 2 go out before their packet ids are durable."""
    patch.setattr(Outbox, "send_when_durable", lambda outbox, data, count: outbox.send_publishes(data, count))


def lose_acknowledgements_in_a_replay(patch: Patch) -> None:
    """A replay skips acknowledgements of POP."""
    step, apply_ack = Replay.step, PopState._apply_ack
    under_way: list[Replay] = []

    def step_noted(replay: Replay, until: int, bytes_max: int = REPLAY_BYTES) -> None:
        under_way.append(replay)
        try:
            step(replay, until, bytes_max)
        finally:
            under_way.pop()

    def apply_unless_replayed(state: PopState, record: Record) -> None:
        if not under_way:
            apply_ack(state, record)

    patch.setattr(Replay, "step", step_noted)
    patch.setattr(PopState, "_apply_ack", apply_unless_replayed)


def revive_what_has_ended(patch: Patch) -> None:
    """A deadline returns all messages of a checkpoint, also those that were acknowledged."""
    patch.setattr(Checkpoint, "open_indexes", lambda checkpoint: list(range(checkpoint.count)))


def fire_delayed_messages_again(patch: Patch) -> None:
    """The index does not get how far delayed messages have fired."""
    save = TimerBuckets.save

    def save_old(buckets: TimerBuckets, batch: Batch) -> None:
        buckets._are_cursors_changed = False
        save(buckets, batch)

    patch.setattr(TimerBuckets, "save", save_old)


def forget_the_order(patch: Patch) -> None:
    """The index does not get which message groups are busy."""
    patch.setattr(FifoOrder, "save", lambda order, batch, group_id: None)


def forget_retained_messages(patch: Patch) -> None:
    """The index does not get retained messages."""
    patch.setattr(RetainedMessages, "_save_topics", lambda retained, batch: retained._changed.clear())


def ignore_failed_syncs(patch: Patch) -> None:
    """A failed sync is taken for a good one."""
    fdatasync = SimulatedFile.fdatasync

    def ignoring(file: SimulatedFile) -> None:
        try:
            fdatasync(file)
        except OSError:
            return

    patch.setattr(SimulatedFile, "fdatasync", ignoring)


def trust_the_cache(patch: Patch) -> None:
    """A start takes what it can read for durable, whatever the last end was."""
    patch.setattr(CommitLog, "_write_anew", lambda log, end, durable: log._open.clear_from(end))


def leave_the_deletion_of_a_segment_unsynced(patch: Patch) -> None:
    """A segment that found no room is deleted, but not durably, and the one before goes on."""
    begin, sync = CommitLog._begin_segment, SimulatedFiles.sync_directory

    def begin_unsynced(log: CommitLog, base: int, size: int) -> Any:
        patch.setattr(SimulatedFiles, "sync_directory", lambda files, path: None)
        try:
            return begin(log, base, size)
        finally:
            patch.setattr(SimulatedFiles, "sync_directory", sync)

    patch.setattr(CommitLog, "_begin_segment", begin_unsynced)


def drop_before_the_begin_is_stored(patch: Patch) -> None:
    """Segments are deleted before anything says that the log begins after them."""
    patch.setattr(CommitLog, "drop_before", lambda log, position: log._chain.drop_before(position))


def snapshot_without_its_bytes(patch: Patch) -> None:
    """A snapshot gets its name before its bytes are durable."""
    finish, fdatasync = SnapshotWriter.finish, SimulatedFile.fdatasync

    def finish_unsynced(writer: SnapshotWriter) -> None:
        patch.setattr(SimulatedFile, "fdatasync", lambda file: None)
        try:
            finish(writer)
        finally:
            patch.setattr(SimulatedFile, "fdatasync", fdatasync)

    patch.setattr(SnapshotWriter, "finish", finish_unsynced)


def snapshot_without_its_name(patch: Patch) -> None:
    """A snapshot counts before its name is durable."""
    finish, sync = SnapshotWriter.finish, SimulatedFiles.sync_directory

    def finish_unsynced(writer: SnapshotWriter) -> None:
        patch.setattr(SimulatedFiles, "sync_directory", lambda files, path: None)
        try:
            finish(writer)
        finally:
            patch.setattr(SimulatedFiles, "sync_directory", sync)

    patch.setattr(SnapshotWriter, "finish", finish_unsynced)


def trim_what_the_log_still_has(patch: Patch) -> None:
    """Trimming goes on to entries whose records the log still has."""

    def has_left(trimming: Trimming, entries: bytes) -> bool:
        positions = entries_array(entries)["position"]
        return len(positions) > 0 and int(positions.max()) < trimming._log_start() + 1_000

    patch.setattr(Trimming, "_has_left_the_log", has_left)


def take_every_clock_for_right(patch: Patch) -> None:
    """A jump of the time of day is confirmed at once."""
    check = Timekeeping.check

    def check_and_confirm(timekeeping: Timekeeping) -> None:
        check(timekeeping)
        if timekeeping._jump is not None:
            timekeeping._confirm(timekeeping._clock.read(), why="a mutation")

    patch.setattr(Timekeeping, "check", check_and_confirm)


def forget_the_time_in_a_restart(patch: Patch) -> None:
    """A start takes the time of day."""

    def begin(timekeeping: Timekeeping, last_ms: int) -> None:
        found = timekeeping._clock.read()
        timekeeping._clock.step(found.wall_ns - found.now_ns)

    patch.setattr(Timekeeping, "begin", begin)


def keep_the_index_in_a_repair(patch: Patch) -> None:
    """A repair leaves the index as it is, whatever it knows of the records that are damaged."""
    patch.setattr(repairing, "Index", SimpleNamespace(destroy=lambda data_dir, files: None))
    patch.setattr(repairing, "adjust_index", lambda *args, **options: None)


def back_up_without_syncs(patch: Patch) -> None:
    """A backup replaces its manifest before its files are durable."""
    store, fdatasync = backup._Round.store, SimulatedFile.fdatasync

    def store_unsynced(run: backup._Round, sources: list[SourceFile]) -> list[StoredFile]:
        patch.setattr(SimulatedFile, "fdatasync", lambda file: None)
        try:
            return store(run, sources)
        finally:
            patch.setattr(SimulatedFile, "fdatasync", fdatasync)

    patch.setattr(backup._Round, "store", store_unsynced)


def back_up_into_a_folder_without_a_name(patch: Patch) -> None:
    """The name of a new directory for backups is not made durable."""
    patch.setattr(backup, "make_directory", lambda files, path: files.mkdir(path))


def delete_the_last_backup_first(patch: Patch) -> None:
    """A backup deletes the files of the one before when it begins."""
    patch.setattr(backup, "_delete_others", partial(_delete_all, backup._delete_others))


def _delete_all(delete: Callable[..., int], directory: Path, kept: set[str], files: Files) -> int:
    return delete(directory, set(), files)


def forget_what_members_have_acknowledged(patch: Patch) -> None:
    """The acknowledgements of the members of a shared subscription are not recorded."""
    patch.setattr(ShareSettlements, "acknowledge", lambda settlements, deliveries: None)


def forget_who_keeps_a_delivery(patch: Patch) -> None:
    """Deliveries at QoS 2 that were kept for a lost client stay with it, although its session does not know them."""
    patch.setattr(ShareSettlements, "return_unrecorded", lambda settlements, client_id, known: None)


def forget_which_occurrences_were_sent(patch: Patch) -> None:
    """The index does not get how far a schedule has got after it was put."""
    save = Schedules.save

    def save_only_put(schedules: Schedules, batch: Batch) -> None:
        schedules._changed &= schedules._put
        save(schedules, batch)

    patch.setattr(Schedules, "save", save_only_put)


def send_what_occurred_during_a_pause(patch: Patch) -> None:
    """A schedule that is resumed goes on where it was paused."""

    def resume(schedules: Schedules, schedule: Schedule) -> None:
        if schedule.state.is_paused:
            schedules._move(schedule, schedule.state._replace(is_paused=False))

    patch.setattr(Schedules, "resume", resume)


def pass_over_occurrences_without_room(patch: Patch) -> None:
    """An occurrence that finds the disk full is not sent later."""
    fire = Schedules._fire

    def fire_once(schedules: Schedules, ids: list[int]) -> None:
        try:
            fire(schedules, ids)
        except DiskFull:
            return

    patch.setattr(Schedules, "_fire", fire_once)


def forget_keys(patch: Patch) -> None:
    """The index does not get the keys of delayed messages."""
    patch.setattr(TimerKeys, "save", lambda keys, batch: keys._changed.clear())


def keep_what_was_replaced(patch: Patch) -> None:
    """A start does not cancel the delayed messages that others have replaced."""
    patch.setattr(parts, "cancel_replaced", lambda keys, delayed, space: None)


def answer_before_a_cancellation_is_stored(patch: Patch) -> None:
    """CancelTimer answers before its record is durable."""

    async def cancel(servicer: TimerServicer, request: pb.TimerName) -> pb.Status:
        named = servicer._named(request)
        return RECALL_STATUS[servicer._delayed.recall(*named)] if isinstance(named, tuple) else named

    patch.setattr(TimerServicer, "CancelTimer", cancel)


def fill_beyond_what_is_applied(patch: Patch) -> None:
    """A follower fills queues with what it has not applied yet."""
    backfill = Queues.backfill

    def backfill_all(queues: Queues, is_over: Callable[[], bool] = lambda: False, applied: int | None = None) -> bool:
        return backfill(queues, is_over, None if applied is None else queues._log.written)

    patch.setattr(Queues, "backfill", backfill_all)


MUTATIONS: Final[dict[str, Callable[[Patch], None]]] = {
    mutation.__name__.replace("_", "-"): mutation
    for mutation in (
        acknowledge_before_the_sync,
        report_one_sync_for_two,
        ignore_failed_syncs,
        skip_directory_syncs,
        do_not_sync_a_full_segment,
        share_the_file_of_syncs,
        replay_in_reverse,
        let_the_index_be_ahead,
        drop_before_copies_are_durable,
        copy_nothing_forward,
        snapshot_without_the_last_turn,
        mark_what_is_not_durable,
        forget_received_packet_ids,
        answer_before_the_record,
        send_before_the_packet_ids,
        lose_acknowledgements_in_a_replay,
        revive_what_has_ended,
        fire_delayed_messages_again,
        forget_the_order,
        forget_retained_messages,
        trust_the_cache,
        drop_before_the_begin_is_stored,
        snapshot_without_its_bytes,
        snapshot_without_its_name,
        trim_what_the_log_still_has,
        take_every_clock_for_right,
        forget_the_time_in_a_restart,
        keep_the_index_in_a_repair,
        back_up_without_syncs,
        back_up_into_a_folder_without_a_name,
        delete_the_last_backup_first,
        forget_what_members_have_acknowledged,
        leave_the_torn_tail,
        leave_the_deletion_of_a_segment_unsynced,
        forget_who_keeps_a_delivery,
        forget_which_occurrences_were_sent,
        send_what_occurred_during_a_pause,
        pass_over_occurrences_without_room,
        forget_keys,
        answer_before_a_cancellation_is_stored,
        keep_what_was_replaced,
        fill_beyond_what_is_applied,
    )
}
"""All mutations by name."""
