"""An attack: what it does while it may, and what it must get for that."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from random import Random
from typing import Any, ClassVar

from tests.attack.ground import Ground
from tests.attack.link import Link

FAILURES = (OSError, EOFError, asyncio.IncompleteReadError, TimeoutError)
"""What a connection of an attacker may end with."""


class Attack(ABC):
    """One row of the report. It runs in a process of its own.

    Parameters:
        ground: of the node.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    must_get: ClassVar[str]
    """What the attacker must get, in words."""
    options: ClassVar[dict[str, str]] = {}
    """Options that the node has for this attack, besides the defaults: `ServedNode` explains them."""
    peak_mib: ClassVar[int] = 160
    """By how much the node's memory may grow while the attack lasts."""
    kept_mib: ClassVar[int] = 64
    """By how much the node's memory may be larger when the attack is over."""

    is_known: ClassVar[bool] = True
    """Whether the node has verified the password of mallory before the first window, so that her logins need no hash."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.saw: Counter[str] = Counter()
        """How often the attacker got what."""
        self.random = Random(self.name)
        self.links: list[Link] = []
        """Connections that end with the attack."""
        self.number = 0

    async def prepare(self) -> None:
        """Do what the attack needs once, before the first window."""
        return

    @abstractmethod
    async def run(self) -> None:
        """Attack until cancelled. It may be called again after that."""

    @abstractmethod
    def problems(self) -> list[str]:
        """Return what the attacker got that it must not get, or must get and did not."""

    async def close(self) -> None:
        """End what the attack holds open."""
        for link in self.links:
            link.close()
        self.links.clear()

    async def finish(self) -> None:
        """Wait for what `problems` needs, after the last window."""
        return

    # --- for the attacks ----------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def never(self, *what: str) -> list[str]:
        return [f"the attacker got {one!r} {self.saw[one]} times" for one in what if self.saw[one]]

    def once(self, *what: str) -> list[str]:
        """Return a problem if the attacker got none of these."""
        return [] if any(self.saw[one] for one in what) else [f"the attacker never got {' or '.join(what)}"]

    def only(self, *what: str) -> list[str]:
        """Return a problem if the attacker got anything but these, or nothing of these."""
        return self.once(*what) + self.never(*(one for one in self.saw if one not in what))


async def side_by_side(count: int, work: Any) -> None:
    """Run `work(number)` in so many tasks, again and again, until cancelled. A failed connection is part of an attack."""

    async def again(number: int) -> None:
        while True:
            try:
                await work(number)
            except FAILURES:
                await asyncio.sleep(0.01)

    await together(again(number) for number in range(count))


async def together(works: Any) -> None:
    """Run coroutines until all have ended, and cancel them with the caller."""
    tasks = [asyncio.create_task(_quiet(work)) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _quiet(work: Coroutine[Any, Any, None]) -> None:
    with suppress(*FAILURES):
        await work
