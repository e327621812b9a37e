"""Turns: many coroutines that become ready at once go on a few in each turn of the loop, so that they hold up nobody else."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets coroutines go on, in the order in which they ask.

    Parameters:
        per_turn: how many may go on in one turn of the loop.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    def __len__(self) -> int:
        """Return how many coroutines wait."""
        return len(self._waiting)

    async def wait(self) -> None:
        """Return in the first turn that has room for the caller, which may be this one."""
        loop = asyncio.get_running_loop()
        self._schedule(loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        waiting: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._begin, loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin a turn: let the first that wait go on."""
        self._is_scheduled = False
        self._left = self._per_turn
        while self._waiting and self._left:
            waiting = self._waiting.popleft()
            if not waiting.done():  # It may have been cancelled.
                waiting.set_result(None)
                self._left -= 1
        if self._left < self._per_turn:
            self._schedule(loop)
