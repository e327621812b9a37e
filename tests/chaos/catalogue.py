"""All faults, by name, and which of them go into a round."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.chaos.faults import clocks, commands, disks, files, limits, processes
from tests.chaos.faults.fault import Fault

MODULES = (processes, commands, disks, files, limits, clocks)

FAULTS: dict[str, type[Fault]] = {
    one.name: one
    for module in MODULES
    for one in vars(module).values()
    if isinstance(one, type) and issubclass(one, Fault) and one.__module__ == module.__name__ and hasattr(one, "name")
}

FAULTS_PER_ROUND_MAX = 15

SAME = 0.6
"""Probability that a fault which follows another in a round is of the same kind as the first one."""


class FaultUnknown(Exception):
    """Raised when no fault has a name that the user gave."""


def chosen(names: str) -> list[type[Fault]]:
    """Return the faults that a list such as `kill-node,power-cut` names; `all` names all, and `kill-*` those that begin so.

    Raises:
        FaultUnknown: no fault has the name.
    """
    found: list[type[Fault]] = []
    for name in names.split(","):
        head = name.strip().removesuffix("*")
        matching = [
            fault
            for each, fault in FAULTS.items()
            if name.strip() in ("all", each) or (head != name.strip() and each.startswith(head))
        ]
        if not matching:
            raise FaultUnknown(f"there is no fault {name!r}; the faults are {', '.join(FAULTS)}")
        found += [fault for fault in matching if fault not in found]
    return found


def plan(faults: Sequence[type[Fault]], number: int, seed: str, most: int = FAULTS_PER_ROUND_MAX) -> list[type[Fault]]:
    """Return up to `most` faults of a round. Each fault begins every n-th round; others that need the same follow it."""
    first = faults[number % len(faults)]
    if first.is_last:
        return [first]
    random = Random(f"plan {seed}")
    alike = [one for one in faults if _needs(one) == _needs(first) and not one.is_last]
    followed = [first if random.random() < SAME else random.choice(alike) for _ in range(min(first.per_round, most) - 1)]
    return [first, *followed]


def _needs(fault: type[Fault]) -> tuple[str, str, str]:
    return fault.on, fault.store_options, fault.log
