"""Long polls: calls that wait for the first message of their groups."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Final

from penstock.pop.core.checkpoint import Checkpoint
from penstock.pop.core.counters import PopCounters
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.order import PARKED_MAX
from penstock.pop.core.poll import Poll, PopResult
from penstock.pop.core.popping import Popper
from penstock.pop.core.unsynced import Unsynced
from penstock.pop.errors import Overloaded
from penstock.pop.options import PopOptions
from penstock.store.space.space import Level, Space

NO_WAIT: Final = nullcontext()
"""In place of a wait for room."""


class LongPolls:
    """Lets calls wait for messages, and hands out what arrives: to the oldest poll of a group first.

    Parameters:
        popper: hands out messages.
        space: tells whether the disk is full.
        options: bounds.
        counters: counts refused polls.
        unsynced: room for what is handed out.
    """

    def __init__(self, popper: Popper, space: Space, options: PopOptions, counters: PopCounters, unsynced: Unsynced) -> None:
        self._popper = popper
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
        if wait_ms <= 0 or left_s <= 0 or not groups:
            return None
        poll = Poll(loop.create_future(), messages_max, invisible_ms, attempt_id, in_order_max, caller)
        self.add(poll, *groups)
        try:
            await asyncio.wait((poll.future,), timeout=left_s)
        except asyncio.CancelledError:
            if poll.future.done() and poll.future.exception() is None:
                self.requeue(poll.future.result().checkpoint)
            raise
        finally:
            self.remove(poll, *groups)
        return poll.future.result() if poll.future.done() else None

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

    def requeue(self, checkpoint: Checkpoint, *, suspected: bool = False) -> None:
        """Make the messages of open deliveries visible at once, because their consumer is gone or has never got them.

        This doesn't count as an attempt. `suspected` as for `Popper.requeue`.
        """
        group = self._popper.requeue(checkpoint, suspected=suspected)
        if group is not None:
            self.serve(group)

    def serve_all(self, groups: Iterable[ConsumerGroup]) -> None:
        """Serve the polls of many groups, for example because the disk has room again."""
        for group in groups:
            self.serve(group)

    def _may_scan_further(self, group: ConsumerGroup) -> bool:
        """Return whether another pop may find messages, though the last one found none."""
        if self._space.level is Level.EXHAUSTED:
            return False  # `serve_all` goes on when the disk has room again
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
