"""Waiting for a state that no event tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAIT_S_MAX = 60.0
"""Longer than anything takes on a machine with much else to do; less than what pytest-timeout allows a test."""


async def until(condition: Callable[[], object]) -> None:
    """Return when `condition()` holds, and let the loop run meanwhile.

    Raises:
        TimeoutError: the condition does not hold after `WAIT_S_MAX`.
    """
    async with asyncio.timeout(WAIT_S_MAX):
        while not condition():  # noqa: ASYNC110 - the node has no event for each state that a test may wait for
            await asyncio.sleep(0.001)
