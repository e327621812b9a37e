"""A consumption: messages as they come, on one stream, as far as its credits go.

A delivery takes a credit until it is settled: acknowledged on this stream, returned, or expired. While there are credits, what
is visible is taken at once, and written when it is durable; meanwhile the next is taken. Nothing is asked for, so a message is
on its way in the turn in which it was committed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import NamedTuple

from penstock.pop.core.checkpoint import Checkpoint
from penstock.pop.core.core import PopCore
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.outcome import AckOutcome, InvisibleChange
from penstock.pop.core.poll import Poll, PopResult
from penstock.pop.errors import PopError

CREDITS_DEFAULT = 1024
CREDITS_MAX = 1_000_000

TAKEN_PER_TURN = 4_096
"""Messages that a consumption takes in one turn of the loop, about 15 ms: others have their turns between, and what it took
first is synced, written and acknowledged while it takes the rest."""

RECOUNT_S = 0.5
"""How often a consumption without credits looks whether its deliveries expired, or were settled by other calls."""


class Acked(NamedTuple):
    """What came of the acks and changes of one request: durable now."""

    acked: int
    refused: list[tuple[str, AckOutcome]]
    changed: list[tuple[AckOutcome, str]]


class Consumption:
    """One stream's consumption of a group.

    Parameters:
        core: where messages come from.
        group: whose.
        credits: deliveries that may be out at a time.
        batch_max: messages taken at a time.
        invisible_ms: for how long each is invisible.
    """

    def __init__(self, core: PopCore, group: ConsumerGroup, *, credits: int, batch_max: int, invisible_ms: int) -> None:
        self._core = core
        self._group = group
        self._credits = credits
        self._batch_max = batch_max
        self._invisible_ms = invisible_ms
        self._out: dict[int, Checkpoint] = {}
        """What was handed out on this stream, by position; what is settled by others is found at the next recount."""
        self._outstanding = 0
        self._poll: Poll | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False
        self._goes_on = False
        """True while `pump` goes on in the next turn."""
        self._acked = 0
        self.failure: PopError | None = None
        """Why nothing comes any more."""
        self.outbox: deque[PopResult | Acked] = deque()
        """What is durable, and to be written."""
        self.wake = asyncio.Event()
        """Set when there is something to write, or it has failed."""

    # --- taking -----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Take what credits allow; wait for more where nothing is visible."""
        core, group = self._core, self._group
        left = TAKEN_PER_TURN
        while not self._ended and not self._goes_on and self._poll is None and self.failure is None:
            room = min(self._credits - self._outstanding, self._batch_max)
            if room <= 0:
                self._recount_later()
                return
            try:
                taken = core.pop(group, room, self._invisible_ms) if not group.polls else None
            except PopError as error:
                self._fail(error)
                return
            if taken is None:
                self._wait(room)
                return
            self._hand_over(taken)
            left -= taken.checkpoint.count
            # A backlog that has expired takes no credits: others have their turn before its rest, too.
            if left <= 0 or not any(taken.records):
                self._goes_on = True
                asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        self.pump()

    def _wait(self, room: int) -> None:
        poll = Poll(asyncio.get_running_loop().create_future(), room, self._invisible_ms)
        try:
            self._core.polls.add(poll, self._group)
        except PopError as error:
            self._fail(error)
            return
        self._poll = poll
        poll.future.add_done_callback(self._arrived)

    def _arrived(self, future: asyncio.Future[PopResult]) -> None:
        poll, self._poll = self._poll, None
        if poll is not None:
            self._core.polls.remove(poll, self._group)
        if future.cancelled():
            return
        error = future.exception()
        if isinstance(error, PopError):
            self._fail(error)
        elif error is not None:
            raise error
        elif self._ended:
            self._core.requeue(future.result().checkpoint)
        else:
            self._hand_over(future.result())
            self.pump()

    def _fail(self, error: PopError) -> None:
        self.failure = error
        self.wake.set()

    def _hand_over(self, taken: PopResult) -> None:
        if not any(taken.records):
            return
        checkpoint = taken.checkpoint
        self._out[checkpoint.position] = checkpoint
        self._outstanding += checkpoint.open.bit_count()
        self._core.store.when_durable(partial(self._durable, taken))

    def _durable(self, done: PopResult | Acked) -> None:
        if not self._ended:
            self.outbox.append(done)
            self.wake.set()
        elif isinstance(done, PopResult):
            self._core.requeue(done.checkpoint)

    # --- settling ---------------------------------------------------------------------------------------------------

    def grant(self, credits: int) -> None:
        """Add credits."""
        self._credits = min(self._credits + credits, CREDITS_MAX)
        self.pump()

    def settle(self, acks: list[str], changes: list[InvisibleChange]) -> None:
        """Acknowledge, and change invisible times; what came of it is written when it is durable."""
        outcomes = self._core.ack(self._group.name, acks) if acks else []
        refused: list[tuple[str, AckOutcome]] = [
            (handle, outcome) for handle, outcome in zip(acks, outcomes, strict=True) if outcome is not AckOutcome.OK
        ]
        changed = self._core.change_invisible(self._group.name, changes) if changes else []
        self._acked += len(acks) - len(refused)
        self._outstanding -= len(acks) - len(refused)
        for (outcome, handle), change in zip(changed, changes, strict=True):
            if outcome is not AckOutcome.OK:
                continue
            if change.invisible_ms == 0 or change.suspend:
                self._outstanding -= 1
                continue
            delivery = self._core.handles.read_deliveries([handle])[0]
            assert delivery is not None
            checkpoint = self._core.state.checkpoints.get(delivery.checkpoint)
            if checkpoint is not None:
                self._out[checkpoint.position] = checkpoint
        self._outstanding = max(self._outstanding, 0)
        if len(self._out) > 2 * self._outstanding + 64:
            self._recount()
        self._core.store.when_durable(partial(self._durable, Acked(self._acked, refused, changed)))
        self.pump()

    def _recount_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RECOUNT_S, self._recounted)

    def _recounted(self) -> None:
        self._timer = None
        self._recount()
        self.pump()

    def _recount(self) -> None:
        self._out = {position: checkpoint for position, checkpoint in self._out.items() if checkpoint.open}
        self._outstanding = sum(checkpoint.open.bit_count() for checkpoint in self._out.values())

    # --- ending -----------------------------------------------------------------------------------------------------

    def end(self, *, give_back: bool) -> None:
        """Take nothing any more. What was never written comes back at once; with `give_back`, so does all that is out."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        poll, self._poll = self._poll, None
        if poll is not None:
            self._core.polls.remove(poll, self._group)
            if poll.future.done() and not poll.future.cancelled() and poll.future.exception() is None:
                self._core.requeue(poll.future.result().checkpoint)
            poll.future.remove_done_callback(self._arrived)
        if give_back:
            for checkpoint in self._out.values():
                self._core.requeue(checkpoint)
        else:
            for done in self.outbox:
                if isinstance(done, PopResult):
                    self._core.requeue(done.checkpoint)
        self.outbox.clear()
