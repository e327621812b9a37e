"""Deliberate defects, which prove that the simulation finds such defects.

Each is a function that changes classes of the node while one process runs simulations with it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from penstock.gateway.connection.outbox import Outbox
from penstock.gateway.delivery.retained_messages import RetainedMessages
from penstock.gateway.sessions.stored_sessions import StoredSessions
from penstock.pop.core.checkpoint import Checkpoint
from penstock.pop.core.deliverychanges import DeliveryChanges
from penstock.pop.core.order import FifoOrder
from penstock.store.commitlog import CommitLog
from penstock.store.groupcommit import GroupCommit
from penstock.store.index import Batch, Covered
from penstock.store.record import Record
from penstock.store.recovery import Replay
from penstock.store.retention import Retention
from penstock.store.segment import Segment
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages
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
        patch.setattr(CommitLog, "_fdatasync", lambda log, segment: None)
        try:
            roll(log, size)
        finally:
            patch.setattr(CommitLog, "_fdatasync", sync)

    patch.setattr(CommitLog, "roll", roll_unsynced)


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
    """Recovery does not clear what follows the last whole record."""
    patch.setattr(Segment, "clear_from", lambda segment, offset: None)


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
    run, apply_ack = Replay.run, DeliveryChanges._apply_ack
    under_way: list[Replay] = []

    def run_noted(replay: Replay, position: int) -> int:
        under_way.append(replay)
        try:
            return run(replay, position)
        finally:
            under_way.pop()

    def apply_unless_replayed(changes: DeliveryChanges, record: Record) -> None:
        if not under_way:
            apply_ack(changes, record)

    patch.setattr(Replay, "run", run_noted)
    patch.setattr(DeliveryChanges, "_apply_ack", apply_unless_replayed)


def revive_what_has_ended(patch: Patch) -> None:
    """A deadline returns all messages of a checkpoint, also those that were acknowledged."""
    patch.setattr(Checkpoint, "open_indexes", lambda checkpoint: list(range(checkpoint.count)))


def fire_delayed_messages_again(patch: Patch) -> None:
    """The index keeps delayed messages that have fired."""

    def remove(delayed: DelayedMessages, position: int) -> None:
        delayed._pending.pop(position, None)
        delayed._added.pop(position, None)

    patch.setattr(DelayedMessages, "_remove", remove)


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


MUTATIONS: Final[dict[str, Callable[[Patch], None]]] = {
    mutation.__name__.replace("_", "-"): mutation
    for mutation in (
        acknowledge_before_the_sync,
        report_one_sync_for_two,
        ignore_failed_syncs,
        skip_directory_syncs,
        do_not_sync_a_full_segment,
        replay_in_reverse,
        let_the_index_be_ahead,
        drop_before_copies_are_durable,
        copy_nothing_forward,
        snapshot_without_the_last_turn,
        mark_what_is_not_durable,
        leave_the_torn_tail,
        forget_received_packet_ids,
        answer_before_the_record,
        send_before_the_packet_ids,
        lose_acknowledgements_in_a_replay,
        revive_what_has_ended,
        fire_delayed_messages_again,
        forget_the_order,
        forget_retained_messages,
    )
}
"""All mutations by name."""
