"""Totals over all groups of a node, and the groups that have metrics of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from penstock.pop.core.core import PopCore
from penstock.pop.core.group import ConsumerGroup

GROUPS_LABELLED_MAX = 200
"""Maximum number of groups with metrics of their own. More would burden the monitoring system. The totals count all groups."""

SLICE_S = 0.002
"""Seconds of the event loop that a scrape takes at a time to add up the groups, of which there may be a million."""

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
        labelled: groups that have metrics of their own. Groups of services come before those of shared subscriptions, which
            devices create.
    """

    groups: int = 0
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
    labelled: list[ConsumerGroup] = field(default_factory=list)


class GroupTotaller:
    """Adds up the groups, at once or in slices of the event loop.

    Parameters:
        pop: has the groups.
    """

    def __init__(self, pop: PopCore) -> None:
        self._pop = pop
        self._ready: GroupTotals | None = None

    async def prepare(self) -> None:
        """Add up in slices, for the next `take`."""
        steps = self._steps()
        until_s = time.monotonic() + SLICE_S
        for found in steps:
            if found is not None:
                self._ready = found
            elif time.monotonic() >= until_s:
                await asyncio.sleep(0)
                until_s = time.monotonic() + SLICE_S

    def take(self) -> GroupTotals:
        """Return what was prepared, or else add up at once."""
        found, self._ready = self._ready, None
        if found is None:
            found = next(totals for totals in self._steps() if totals is not None)
        return found

    def _steps(self) -> Generator[GroupTotals | None]:
        """Yield None after each group, and the totals at the end."""
        totals, shared = GroupTotals(), list[ConsumerGroup]()
        for group in list(self._pop.groups):
            if not group.is_deleted:
                totals.groups += 1
                for name, count in TOTALS.items():
                    totals.sums[name] += count(group)
                first = shared if group.settings.is_temporary else totals.labelled
                if len(first) < GROUPS_LABELLED_MAX:
                    first.append(group)
            yield None
        totals.labelled += shared[: GROUPS_LABELLED_MAX - len(totals.labelled)]
        yield totals
