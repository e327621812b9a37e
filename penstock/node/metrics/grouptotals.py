"""Totals over all groups of a node, and figures of the groups that have metrics of their own."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from penstock.node.loopshare import LoopShare
from penstock.pop.core.checkpoint import Checkpoint
from penstock.pop.core.core import PopCore
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.groups import GroupSnapshot, snapshots
from penstock.store.store import Store

GROUPS_LABELLED_MAX = 200
"""Maximum number of groups with metrics of their own. More would burden the monitoring system. The totals count all groups."""

TOTALS: dict[str, Callable[[ConsumerGroup], int]] = {
    "visible": lambda group: group.count_visible(),
    "retries": lambda group: group.count_retries(),
    "in_flight": lambda group: group.in_flight,
    "delayed": lambda group: group.delayed,
    "parked": lambda group: group.order.parked if group.order is not None else 0,
    "dead": lambda group: group.dead_letter_count,
}
"""What is added up over all groups, under the names of the metrics of each group."""


@dataclass(slots=True)
class GroupTotals:
    """Sums over all groups.

    Parameters:
        groups: number of groups, each once for each of its filters.
        sums: by the names of `TOTALS`.
        labelled: snapshots of the groups that have metrics of their own. Groups of services come before those of shared
            subscriptions, which devices create.
    """

    groups: int = 0
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
    labelled: list[GroupSnapshot] = field(default_factory=list)


class GroupTotaller:
    """Adds up the groups, at once or in slices of the event loop.

    Parameters:
        pop: has the groups.
        store: has their messages.
    """

    def __init__(self, pop: PopCore, store: Store) -> None:
        self._pop = pop
        self._store = store
        self._ready: GroupTotals | None = None

    async def prepare(self) -> None:
        """Add up in slices, for the next `take`. There may be a million groups, and as many open checkpoints."""
        share = LoopShare()
        for found in self._steps():
            if found is not None:
                self._ready = found
            await share.rest()

    def take(self) -> GroupTotals:
        """Return what was prepared, or else add up at once."""
        found, self._ready = self._ready, None
        if found is None:
            found = next(totals for totals in self._steps() if totals is not None)
        return found

    def _steps(self) -> Generator[GroupTotals | None]:
        """Yield None after each step, and the totals at the end."""
        totals = GroupTotals()
        services, shared = list[ConsumerGroup](), list[ConsumerGroup]()
        for group in list(self._pop.groups):
            if not group.is_deleted:
                totals.groups += 1
                for name, count in TOTALS.items():
                    totals.sums[name] += count(group)
                first = shared if group.settings.is_temporary else services
                if len(first) < GROUPS_LABELLED_MAX:
                    first.append(group)
            yield None
        oldest: dict[int, Checkpoint] = {}
        for number, checkpoint in enumerate(list(self._pop.checkpoints.values())):
            oldest.setdefault(checkpoint.group_id, checkpoint)  # they are in the order of their pops
            if not number % 256:
                yield None
        for group in (services + shared)[:GROUPS_LABELLED_MAX]:
            of_group = {0: oldest[group.id]} if group.id in oldest else {}
            totals.labelled += snapshots([group], of_group, self._store)
            yield None
        yield totals
