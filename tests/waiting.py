"""Waiting for a state that no event tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PROCESS_S = 240.0
"""Time after which a process that a test started has to be done. A loaded machine with a slow disk takes a minute for what
otherwise takes two seconds, so only a process that hangs takes as long. It is less than what pytest-timeout allows a test."""

WAIT_S_MAX = 120.0
"""Longer than anything takes on a machine with much else to do; less than what pytest-timeout allows a test."""


async def until(condition: Callable[[], object]) -> None:
    """Return when `condition()` holds, and let the loop run meanwhile.

    Raises:
        TimeoutError: the condition does not hold after `WAIT_S_MAX`.
    """
    async with asyncio.timeout(WAIT_S_MAX):
        while not condition():  # noqa: ASYNC110 - the node has no event for each state that a test may wait for
            await asyncio.sleep(0.001)
