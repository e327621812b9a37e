"""What a node has open, and what is queued for its next delivery there."""

from __future__ import annotations

from penstock.store.queues.lightqueue import ENTRY
from tests.pop.wiring import Parts


def open_in_node(parts: Parts) -> dict[int, tuple[int, int]]:
    """Return deadline and message of each open stage, by key."""
    return {
        checkpoint.position + index: (checkpoint.deadline_ms, checkpoint.entry(index).position)
        for checkpoint in parts.core.checkpoints.values()
        for index in checkpoint.open_indexes()
    }


def queued_in_node(parts: Parts) -> list[tuple[str, int]]:
    """Return group and message of all that came back, in order. Of FIFO groups, those that had an attempt or have a level."""
    found = []
    for group in parts.core.groups:
        _, retries = group.retry.read_from(group.retry_cursor, 1_000)
        found += [(group.name, position) for position, _, _ in ENTRY.iter_unpack(retries)]
        if group.order is not None:
            parked = group.order._parked.values()
            found += [(group.name, each.position) for each in parked if each.attempts or each.level]
    return sorted(found)
