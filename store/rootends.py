"""Ends the root queues of first levels that nobody needs any more, so that a publisher can't use up all queues for ever.

A root queue begins with the first message to a first level, or with its first subscriber. It ends after retention has deleted
its last entry, if no subscription and no group has it. The next message begins a new one. So does a delayed message of that
first level when it fires.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

import structlog

from penstock.store.queues import Queues
from penstock.store.sliced import Steps

logger = structlog.get_logger("store")

ROOTS_PER_STEP: Final = 64
"""Root queues that one step looks at."""

ROOTS_PER_END: Final = 1_024
"""Root queues that end together, because each time the whole cache of routes is looked at."""


def end_unused_roots(queues: Queues) -> Steps:
    """End all root queues without entries that nobody needs."""
    levels = iter(tuple(queues.router.roots))
    found: list[str] = []
    ended = 0
    while portion := list(islice(levels, ROOTS_PER_STEP)):
        found += [level for level in portion if queues.is_unused_root(level)]
        if len(found) >= ROOTS_PER_END:
            ended += queues.end_roots(found)
            found.clear()
        yield False
    ended += queues.end_roots(found)
    if ended:
        logger.info("queues.ended", roots=ended)
