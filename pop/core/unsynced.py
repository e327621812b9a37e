"""Room for messages that were handed out and wait for the sync of their checkpoint: nobody may hold all of it.

A pop reads its messages when it hands them out, and keeps them until its checkpoint is durable. One commit may wake any number
of pops that wait. Without a bound their messages would all be read in one turn of the loop, and be in memory at once. So a
caller that has its share waits for a sync, and then the calls of different callers go on in turn. They go on in a later turn of
the loop: a disk may end several syncs within one, and whoever else waits for the loop must not wait for all that these allow.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from penstock.pop.core.scan import RESPONSE_BYTES

COUNTED_FROM: Final = 4_096
"""Bytes from which the messages of a pop count. Fewer take no more than the call itself, whose number is bounded."""

CALLER_PERCENT: Final = 25
"""Percent of the room that one caller may use."""


class Unsynced:
    """Counts bytes of messages by caller, and lets calls wait for room.

    A caller with less than its share may hand out one more batch, so it can have `RESPONSE_BYTES` more than its share. The
    caller None is the node itself, which is not counted.

    Parameters:
        when_durable: calls back when all that was stored is durable.
        call_soon: calls back in the next turn of the loop.
        all_max: bytes of all callers together.
    """

    def __init__(
        self,
        when_durable: Callable[[Callable[[], None]], None],
        call_soon: Callable[[Callable[[], None]], object],
        all_max: int,
    ) -> None:
        self._when_durable = when_durable
        self._call_soon = call_soon
        self._all_max = all_max
        self._each_max = all_max * CALLER_PERCENT // 100
        self._bytes: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}
        """Calls that wait for room, by caller. The caller whose turn is next comes first."""
        self._going_on = False
        self._is_called = False
        """Whether calls go on in the next turn."""
        self._held: set[Hashable] = set()
        """Callers that have no room, whatever they hold."""
        self.used = 0
        """Bytes that wait for their sync."""

    def fits(self, caller: Hashable | None) -> bool:
        """Return whether a caller may hand out messages now. Whoever has calls waiting may not, so that they come first."""
        return caller is None or (caller not in self._waiting and self._has_room(caller))

    def _has_room(self, caller: Hashable) -> bool:
        return caller not in self._held and self.used < self._all_max and self._bytes.get(caller, 0) < self._each_max

    def hold(self, caller: Hashable) -> None:
        """Give a caller no room until `release`."""
        self._held.add(caller)

    def release(self, caller: Hashable) -> None:
        """Give a caller room again as others have it."""
        self._held.discard(caller)
        self._go_on()

    def add(self, caller: Hashable | None, size: int) -> None:
        """Count messages that were just handed out, until they are durable."""
        if caller is not None and size >= COUNTED_FROM:
            self._count(caller, size)
            self._when_durable(partial(self._remove, caller, size))

    def when_room(self, caller: Hashable, go: Callable[[], None]) -> None:
        """Call `go` when a caller has room, after its other calls that wait. `go` may hand out one batch without asking."""
        self._waiting.setdefault(caller, deque()).append(go)
        self._go_on()

    @asynccontextmanager
    async def room(self, caller: Hashable) -> AsyncIterator[None]:
        """Wait until a caller has room, and keep room for a batch of messages within the context."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go() -> None:
            if not granted.done():  # The call may have been cancelled.
                self._count(caller, RESPONSE_BYTES)
                granted.set_result(None)

        self.when_room(caller, go)
        try:
            await granted
            yield
        finally:
            if granted.cancelled():
                self._forget(caller, go)
            else:
                self._remove(caller, RESPONSE_BYTES)

    def _forget(self, caller: Hashable, go: Callable[[], None]) -> None:
        """Let a call that was cancelled wait no longer. Its turn may have come meanwhile."""
        calls = self._waiting.get(caller)
        if calls is not None and go in calls:
            calls.remove(go)
            if not calls:
                del self._waiting[caller]

    def _count(self, caller: Hashable, size: int) -> None:
        self.used += size
        self._bytes[caller] = self._bytes.get(caller, 0) + size

    def _remove(self, caller: Hashable, size: int) -> None:
        self.used -= size
        self._bytes[caller] -= size
        if not self._bytes[caller]:
            del self._bytes[caller]
        if self._waiting and not self._is_called:
            self._is_called = True
            self._call_soon(self._go_on_later)

    def _go_on_later(self) -> None:
        self._is_called = False
        self._go_on()

    def _go_on(self) -> None:
        """Let calls that wait go on, one of each caller in turn, as far as there is room."""
        if self._going_on:
            return  # What a call does ends here as well, and the loop below goes on.
        self._going_on = True
        try:
            passed = 0
            while passed < len(self._waiting) and self.used < self._all_max:
                caller = next(iter(self._waiting))
                calls = self._waiting.pop(caller)
                if self._has_room(caller):
                    passed = 0
                    go = calls.popleft()
                    if calls:
                        self._waiting[caller] = calls
                    go()
                else:
                    passed += 1
                    self._waiting[caller] = calls
        finally:
            self._going_on = False
