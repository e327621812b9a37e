"""Polls: calls that wait for the first message of their groups, and the room that they have for messages.

A pop reads its messages when it hands them out, and has them in memory until its checkpoint is durable. One commit may wake any
number of polls. Without a bound their messages would all be read in one turn of the loop, and be in memory at once. So a caller
that has its share waits for a sync, and then the calls of different callers go on in turn. They go on in a later turn of the
loop: a disk may end several syncs within one, and no other work of the loop must wait for all that these allow.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.pop.core.order import PARKED_MAX
from penstock.pop.core.selection import RESPONSE_BYTES
from penstock.pop.errors import Overloaded
from penstock.store.space.space import Level, Space

if TYPE_CHECKING:
    from penstock.pop.core.deliveries import GroupDeliveries
    from penstock.pop.core.group import ConsumerGroup
    from penstock.pop.core.pops import Popper, PopResult
    from penstock.pop.core.records import PopCounters
    from penstock.pop.options import PopOptions

COUNTED_FROM: Final = 4_096
"""Bytes from which the messages of a pop count. Fewer take no more than the call itself, whose number is bounded."""

CALLER_PERCENT: Final = 25
"""Percent of the room that one caller may use."""

NO_WAIT: Final = nullcontext()
"""In place of a wait for room."""


class Poll:
    """A call that waits for the first message of its groups.

    Parameters:
        future: gets the result.
        messages_max: how many messages the call wants at most.
        invisible_ms: how long the messages are invisible then.
        attempt_id: of the call; empty if it gave none.
        in_order_max: how many messages of one message group the call wants at most from a FIFO group.
        caller: whose call it is, see `Unsynced`.
    """

    __slots__ = ("attempt_id", "caller", "future", "in_order_max", "invisible_ms", "messages_max")

    def __init__(
        self,
        future: asyncio.Future[PopResult],
        messages_max: int,
        invisible_ms: int,
        attempt_id: str = "",
        in_order_max: int = 1,
        caller: Hashable | None = None,
    ) -> None:
        self.caller = caller
        self.future = future
        self.messages_max = messages_max
        self.invisible_ms = invisible_ms
        self.attempt_id = attempt_id
        self.in_order_max = in_order_max


class LongPolls:
    """Lets calls wait for messages, and hands out what arrives: to the oldest poll of a group first.

    Parameters:
        popper: hands out messages.
        deliveries: takes back what a cancelled poll has got.
        space: tells whether the disk is full.
        options: bounds.
        counters: counts refused polls.
        unsynced: room for what is handed out.
    """

    def __init__(
        self,
        popper: Popper,
        deliveries: GroupDeliveries,
        space: Space,
        options: PopOptions,
        counters: PopCounters,
        unsynced: Unsynced,
    ) -> None:
        self._popper = popper
        self._deliveries = deliveries
        self._unsynced = unsynced
        self._space = space
        self._options = options
        self._counters = counters
        self._loop: asyncio.AbstractEventLoop | None = None
        self.waiting = 0
        """Number of polls that wait. A poll of several groups counts once."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let groups that scan their queue go on by themselves from now on."""
        self._loop = loop

    def stop(self) -> None:
        """Scan no further."""
        self._loop = None

    async def poll(
        self,
        groups: Sequence[ConsumerGroup],
        messages_max: int,
        invisible_ms: int,
        wait_ms: int,
        attempt_id: str = "",
        in_order_max: int = 1,
        caller: Hashable | None = None,
    ) -> PopResult | None:
        """Pop from the first of `groups` that has messages; wait up to `wait_ms` for the first message.

        Messages that have expired, or can't be read, are passed over, in as many turns of the loop as it takes. A call that is
        cancelled takes no messages. `caller` is whose call it is: one that has much that is not synced yet waits for a sync
        first.

        Raises:
            Overloaded: too many polls are waiting already.
            GroupUnknown: one of the groups was deleted.
        """
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + wait_ms / 1000
        in_turn = groups if len(groups) == 1 else sorted(groups, key=lambda group: attempt_id not in group.attempt_ids)
        goes_on = True
        while goes_on:
            goes_on = False
            for group in in_turn:
                if group.polls and attempt_id not in group.attempt_ids:
                    continue
                result = await self._pop(group, messages_max, invisible_ms, attempt_id, in_order_max, caller)
                if result is not None and any(result.records):
                    return result
                # For a poll that waits, `add` lets the group scan further.
                goes_on = goes_on or result is not None or (wait_ms <= 0 and self._may_scan_further(group))
            goes_on = goes_on and (wait_ms <= 0 or loop.time() < ends_s)
            if goes_on:
                await asyncio.sleep(0)
        left_s = ends_s - loop.time()
        if wait_ms <= 0 or left_s <= 0 or not groups or self._popper.is_draining:
            return None
        poll = Poll(loop.create_future(), messages_max, invisible_ms, attempt_id, in_order_max, caller)
        self.add(poll, *groups)
        try:
            await asyncio.wait((poll.future,), timeout=left_s)
        except asyncio.CancelledError:
            if poll.future.done() and not poll.future.cancelled() and poll.future.exception() is None:
                self._deliveries.requeue(poll.future.result().checkpoint)
            raise
        finally:
            self.remove(poll, *groups)
        return poll.future.result() if poll.future.done() and not poll.future.cancelled() else None

    async def _pop(
        self,
        group: ConsumerGroup,
        messages_max: int,
        invisible_ms: int,
        attempt_id: str,
        in_order_max: int,
        caller: Hashable | None,
    ) -> PopResult | None:
        """Pop when the caller has room for what it gets."""
        unsynced = self._unsynced
        async with NO_WAIT if caller is None or unsynced.fits(caller) else unsynced.room(caller):
            result = self._popper.pop(group, messages_max, invisible_ms, attempt_id, in_order_max)
            if result is not None:
                unsynced.add(caller, result.size)
        return result

    def add(self, poll: Poll, *groups: ConsumerGroup) -> None:
        """Let a poll wait for messages of one or more groups; its future gets the result.

        The caller must `remove` the poll in any case, also when it has its result.

        Raises:
            Overloaded: too many polls are waiting already.
        """
        if self.waiting >= self._options.waiters_max:
            self._counters.refused += 1
            raise Overloaded(f"{self.waiting} pops are waiting on this node, which is the limit: use fewer clients")
        self.waiting += 1
        for group in groups:
            group.polls.append(poll)
            self._scan_further(group)

    def remove(self, poll: Poll, *groups: ConsumerGroup) -> None:
        """Let a poll wait no longer. `groups` must be those that it was added to."""
        self.waiting -= 1
        if len(groups) == 1 and poll.future.done():
            return  # `serve` has removed it from its only group
        for group in groups:
            with suppress(ValueError):
                group.polls.remove(poll)

    def drain(self, groups: Iterable[ConsumerGroup]) -> None:
        """Hand out nothing more, and answer all polls that wait: the node is about to stop."""
        self._popper.is_draining = True
        for group in groups:
            for poll in group.polls:
                poll.future.cancel()
            group.polls.clear()

    def serve(self, group: ConsumerGroup) -> None:
        """Hand out the visible messages of a group to its polls, oldest first. They may have to wait for room."""
        if not group.waits_for_room:
            self._serve(group, None)

    def _serve(self, group: ConsumerGroup, granted: Hashable | None) -> None:
        """Serve the polls of a group. One of the caller `granted` may have its batch without asking for room."""
        group.waits_for_room = False
        unsynced = self._unsynced
        while group.polls and group.visible > 0:
            poll = group.polls[0]
            if poll.future.done():  # another of its groups has served it in this turn of the loop
                group.polls.popleft()
                continue
            caller = poll.caller
            if caller is not None and caller != granted and not unsynced.fits(caller):
                group.waits_for_room = True
                unsynced.when_room(caller, partial(self._serve, group, caller))
                return
            granted = None
            result = self._popper.pop(group, poll.messages_max, poll.invisible_ms, poll.attempt_id, poll.in_order_max)
            if result is None:
                self._scan_further(group)
                return
            if not any(result.records):  # All of them have expired, or can't be read.
                self._serve_soon(group)
                return
            group.polls.popleft()
            unsynced.add(caller, result.size)
            poll.future.set_result(result)

    def _may_scan_further(self, group: ConsumerGroup) -> bool:
        """Return whether another pop may find messages, though the last one found none."""
        if self._space.level is Level.EXHAUSTED:
            return False  # the core serves all groups when the disk has room again
        if not group.is_selective or group.settings.paused or group.room <= 0:
            return False
        is_full = group.order is not None and group.order.parked >= PARKED_MAX
        return not is_full and group.scanned < group.queue.committed_offset

    def _scan_further(self, group: ConsumerGroup) -> None:
        """Let a group with waiting polls scan further in a later turn of the loop: the work of one scan is bounded."""
        if group.polls and self._may_scan_further(group):
            self._serve_soon(group)

    def _serve_soon(self, group: ConsumerGroup) -> None:
        """Serve the polls of a group in the next turn of the loop."""
        if self._loop is not None and not group.serve_scheduled:
            group.serve_scheduled = True
            self._loop.call_soon(self._serve_again, group)

    def _serve_again(self, group: ConsumerGroup) -> None:
        group.serve_scheduled = False
        if self._loop is not None:
            self.serve(group)


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
