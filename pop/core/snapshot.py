"""Snapshots of groups: their backlogs and ages, as an operator sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.pop.core.checkpoint import Checkpoint
from penstock.pop.core.group import ConsumerGroup
from penstock.store.errors import PositionUnknown
from penstock.store.queues.lightqueue import ENTRY
from penstock.store.record import HEADER_BYTES, store_ms_of
from penstock.store.store import Store


class GroupSnapshot(NamedTuple):
    """Snapshot of a group's backlog.

    Parameters:
        group: that is described.
        visible: number of messages that a pop can get now; an upper bound for a selective group.
        retries: how many of the visible messages are retries.
        in_flight: number of messages that were handed out and not acknowledged.
        delayed: how many messages in flight wait for a delay or their back-off, so that no consumer has them.
        parked: number of messages that wait for their message group.
        dead: number of dead letters.
        oldest_ms: age of the oldest message that was not handed out, in ms; None if there is none.
        oldest_in_flight_ms: age of the oldest open delivery, in ms; None if there is none.
    """

    group: ConsumerGroup
    visible: int
    retries: int
    in_flight: int
    delayed: int
    parked: int
    dead: int
    oldest_ms: int | None
    oldest_in_flight_ms: int | None


def snapshots(groups: Iterable[ConsumerGroup], checkpoints: Mapping[int, Checkpoint], store: Store) -> list[GroupSnapshot]:
    """Return a snapshot of each group. This visits all open checkpoints of the node, and reads two records for each group.

    Args:
        groups: that are described.
        checkpoints: all checkpoints with open deliveries, in the order of their positions.
        store: has the messages.
    """
    now_ms = store.now_ms()
    oldest_pop_ms: dict[int, int] = {}
    for checkpoint in checkpoints.values():
        oldest_pop_ms.setdefault(checkpoint.group_id, checkpoint.pop_ms)  # checkpoints are in the order of their pops
    return [
        GroupSnapshot(
            group,
            visible=group.count_visible(),
            retries=group.count_retries(),
            in_flight=group.in_flight,
            delayed=group.delayed,
            parked=group.order.parked if group.order is not None else 0,
            dead=group.dead_letter_count,
            oldest_ms=_oldest_ms(group, store, now_ms),
            oldest_in_flight_ms=now_ms - oldest_pop_ms[group.id] if group.id in oldest_pop_ms else None,
        )
        for group in groups
    ]


def _oldest_ms(group: ConsumerGroup, store: Store, now_ms: int) -> int | None:
    waiting = (group.queue.read(group.scanned, 1), group.retry.read(group.retry_cursor, 1))
    ages = [now_ms - _stored_ms(store, ENTRY.unpack(entry)[0]) for entry in waiting if entry]
    return max(ages, default=None)


def _stored_ms(store: Store, position: int) -> int:
    try:
        return store_ms_of(store.read(position, HEADER_BYTES))
    except PositionUnknown:
        return 0  # retention has dropped the message, so it is older than every other
