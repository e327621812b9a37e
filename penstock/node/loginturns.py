"""Turns of the admin listener's logins: one password is hashed at a time, and the sources that wait take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LoginsCrowded(Exception):
    """Raised for a login that finds no place to wait, or has to give its place to one of another source."""


class LoginTurns:
    """Lets one login go on at a time.

    A source with many logins holds up one with a single login by one only. When all places are taken, the newest login of the
    source with the most gives way, so whoever floods is refused, and nobody else.

    Parameters:
        waiting_max: the maximum number of logins that wait.
    """

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._is_busy = False
        self._sources: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """The logins that wait, by source. The source whose turn is next comes first, and of its logins the oldest."""

    def __len__(self) -> int:
        """Return how many logins wait."""
        return sum(len(waiting) for waiting in self._sources.values())

    @asynccontextmanager
    async def turn(self, source: str) -> AsyncIterator[None]:
        """Let the code within run when it is the turn of a login of a source. Raises LoginsCrowded."""
        if self._is_busy:
            await self._wait(source)
        self._is_busy = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, source: str) -> None:
        if len(self) >= self._waiting_max:
            self._make_room(source)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sources.setdefault(source, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(source, turn)
            elif turn.exception() is None:
                self._pass_on()  # it was this one's turn
            raise

    def _forget(self, source: str, turn: asyncio.Future[None]) -> None:
        """Take the place of a login whose caller was cancelled away from it, unless others have done so."""
        waiting = self._sources.get(source)
        if waiting is not None and turn in waiting:
            waiting.remove(turn)
            if not waiting:
                del self._sources[source]

    def _make_room(self, source: str) -> None:
        """Refuse the newest login of the source with the most; raise LoginsCrowded if that is the one that comes now."""
        longest = max(self._sources, key=lambda each: len(self._sources[each]))
        if len(self._sources.get(source, ())) + 1 >= len(self._sources[longest]):
            raise LoginsCrowded
        turn = self._sources[longest].pop()
        if not turn.done():
            turn.set_exception(LoginsCrowded())

    def _pass_on(self) -> None:
        self._is_busy = False
        while self._sources and not self._is_busy:
            source, waiting = self._sources.popitem(last=False)
            turn = waiting.popleft()
            if waiting:
                self._sources[source] = waiting  # it comes last now
            if not turn.done():  # its caller may have been cancelled in this turn of the loop
                turn.set_result(None)
                self._is_busy = True
