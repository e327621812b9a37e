"""Deliberate defects of the node, each with faults under which rounds must fail. They prove that the ledger sees.

Those that change classes of the node alone come from the simulation (`tests.simulation.mutations`). The others change what the
simulation replaces: real files, real disks, the clock, commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pytest

from penstock.backup.source import Source, SourceFile
from penstock.gateway.connection.incoming_acks import IncomingAcks
from penstock.store import store
from penstock.store.log import recordscan
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.groupcommit import GroupCommit
from penstock.store.recovery import repair
from penstock.store.space.space import Space
from penstock.store.store import Store
from penstock.store.timekeeping import Timekeeping
from tests.simulation import mutations as simulated

Patch = pytest.MonkeyPatch

DROPPED_ONE_IN = 40


def acknowledge_without_append(patch: Patch) -> None:
    """One in `DROPPED_ONE_IN` messages is acknowledged and not stored."""
    append_message = Store.append_message
    count = 0

    def append_most(one: Store, *message: Any) -> int:
        nonlocal count
        count += 1
        return append_message(one, *message) if count % DROPPED_ONE_IN else one.log.end

    patch.setattr(Store, "append_message", append_most)
    patch.setattr(Store, "append_runs", lambda *_: False)  # Each message comes one by one.


def take_failed_syncs_for_good_ones(patch: Patch) -> None:
    """A sync that failed counts as one that succeeded."""
    ended = GroupCommit._ended
    patch.setattr(GroupCommit, "_ended", lambda commit, error, served: ended(commit, None, served))


def trust_the_page_cache(patch: Patch) -> None:
    """A start relies on what it can read, and doesn't write it to new blocks."""
    patch.setattr(CommitLog, "_write_anew", lambda log, end, durable: None)


def trust_the_sync_mark_of_nobody(patch: Patch) -> None:
    """A start takes everything that it can read up to the first bad record for all that there was."""
    patch.setattr(CommitLog, "_find_mark", lambda log: None)


def trust_the_time_of_day(patch: Patch) -> None:
    """A jump of the time of day counts at once."""
    check = Timekeeping.check

    def check_at_once(one: Timekeeping) -> None:
        check(one)
        if one._jump is not None:
            one._confirm(one._clock.read(), why="mutation")

    patch.setattr(Timekeeping, "check", check_at_once)


def give_up_on_a_full_disk(patch: Patch) -> None:
    """A full disk is taken for a failed one."""

    def refuse(space: Space, error: OSError) -> Exception:
        return error

    patch.setattr(Space, "refuse", refuse)


def repair_too_much(patch: Patch) -> None:
    """A repair sets the whole record after a damaged one aside, too."""
    next_valid = recordscan.next_valid

    def one_after(read: Any, start: int, end: int, size: int) -> int | None:
        found = next_valid(read, start, end, size)
        return found if found is None else next_valid(read, found + 1, end, size)

    patch.setattr(repair, "next_valid", one_after)


def back_up_less(patch: Patch) -> None:
    """A backup lacks the last page of the open segment."""
    files = Source.files

    def fewer(source: Source) -> Iterator[SourceFile]:
        for one in files(source):
            is_open = one.path.endswith(".log") and not one.is_immutable
            yield replace(one, size=max(one.size - 4096, 0)) if is_open else one

    patch.setattr(Source, "files", fewer)


def deliver_what_is_damaged(patch: Patch) -> None:
    """Nobody verifies a record before it is delivered."""
    patch.setattr(store, "is_intact", lambda data, at=0, size=None: True)


def complete_before_the_record(patch: Patch) -> None:
    """PUBREL and PUBCOMP go out before the records of what they answer are durable."""
    when_durable = Store.when_durable

    def when_durable_or_at_once(one: Store, callback: Callable[[], None]) -> None:
        function = getattr(getattr(callback, "func", None), "__func__", None)
        if function is IncomingAcks._answer:
            callback()
        else:
            when_durable(one, callback)

    patch.setattr(Store, "when_durable", when_durable_or_at_once)


class Mutation(NamedTuple):
    """A deliberate defect."""

    apply: Callable[[Patch], None]
    faults: str
    """Names of the faults under which it must be found."""


MUTATIONS: Final[dict[str, Mutation]] = {
    mutation.apply.__name__.replace("_", "-"): mutation
    for mutation in (
        Mutation(acknowledge_without_append, "stop-node"),
        Mutation(take_failed_syncs_for_good_ones, "failed-write,failed-flush"),
        Mutation(trust_the_page_cache, "failed-write,kill-power-cut"),
        Mutation(trust_the_sync_mark_of_nobody, "flipped-log,truncated-log"),
        Mutation(trust_the_time_of_day, "clock-month-forward"),
        Mutation(give_up_on_a_full_disk, "full-tmpfs"),
        Mutation(repair_too_much, "flipped-log"),
        Mutation(back_up_less, "kill-backup"),
        Mutation(deliver_what_is_damaged, "flipped-log"),
        Mutation(simulated.acknowledge_before_the_sync, "power-cut"),
        Mutation(simulated.report_one_sync_for_two, "power-cut"),
        Mutation(simulated.mark_what_is_not_durable, "power-cut"),
        Mutation(simulated.leave_the_torn_tail, "power-cut"),
        Mutation(simulated.replay_in_reverse, "kill-node"),
        Mutation(simulated.let_the_index_be_ahead, "kill-node"),
        Mutation(simulated.forget_received_packet_ids, "kill-node"),
        Mutation(complete_before_the_record, "power-cut"),
        Mutation(simulated.send_before_the_packet_ids, "kill-node,power-cut"),
        Mutation(simulated.lose_acknowledgements_in_a_replay, "kill-node"),
        Mutation(simulated.revive_what_has_ended, "stop-node"),
        Mutation(simulated.fire_delayed_messages_again, "kill-node"),
        Mutation(simulated.forget_the_order, "kill-node"),
        Mutation(simulated.forget_retained_messages, "kill-node"),
        Mutation(simulated.copy_nothing_forward, "missing-snapshot"),
        Mutation(simulated.snapshot_without_the_last_turn, "flipped-snapshot"),
    )
}
"""All defects by name."""


def mutate(name: str) -> None:
    """Give this process a defect, for as long as it lives."""
    MUTATIONS[name].apply(pytest.MonkeyPatch())
