"""A consume stream: messages are sent as they arrive, as far as the credits of the stream allow.

A delivery takes a credit until it is acknowledged on this stream, returned, or expired. While the stream has credits, it pops
visible messages at once, and sends them when their checkpoint is durable; meanwhile it pops more. The client asks for nothing,
so a message is on its way in the turn of the loop in which it was committed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

from penstock.pop.core.checkpoint import Checkpoint
from penstock.pop.core.core import PopCore
from penstock.pop.core.deliveries import AckOutcome, VisibilityChange
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.handle import Handles
from penstock.pop.core.polls import Poll
from penstock.pop.core.pops import PopResult
from penstock.pop.errors import PopError
from penstock.pop.grpc.responsebytes import StreamBytes

CREDITS_DEFAULT = 1024
CREDITS_MAX = 1_000_000

POPPED_PER_TURN = 4_096
"""Messages that a stream pops in one turn of the loop. Other tasks have their turns in between, and the first messages are
synced, sent and acknowledged while the stream pops the others."""

UNSENT_BYTES_MAX = 3 * 1024 * 1024
"""Bytes of messages and reports that a stream holds for a client that does not read them. From there on it pops no more, and
reads no more requests."""

STATED_STEP = 64 * 1024
"""Bytes by which what a stream keeps must change before it is counted anew."""

ENTRY_BYTES = 100
"""What an entry of a report counts at most, with its handle."""

RECOUNT_S = 0.5
"""Interval in which a stream without credits checks whether its deliveries have expired, or were ended by other calls."""


class AckReport(NamedTuple):
    """What came of the acknowledgements and changes of one request. It is durable.

    Parameters:
        acked: number of deliveries that were acknowledged on the stream so far.
        refused: handles of this request that were not acknowledged, with the reason.
        changed: outcome and new handle of each change, in order.
    """

    acked: int
    refused: list[tuple[str, AckOutcome]]
    changed: list[tuple[AckOutcome, str]]


class StreamTerms(NamedTuple):
    """The terms of a stream, which its first request gives.

    Parameters:
        credits: maximum number of deliveries that are open at a time.
        batch_max: messages popped at a time.
        invisible_ms: how long each message is invisible.
    """

    credits: int
    batch_max: int
    invisible_ms: int


class ConsumeStream:
    """One stream's consumption of a group.

    Parameters:
        core: hands out messages.
        when_durable: calls back when all that was stored is durable.
        handles: reads handles.
        group: that the stream consumes.
        terms: how many deliveries it gets, and for how long.
        caller: whose stream it is, see `Unsynced`.
        stream_bytes: is told how many bytes the stream keeps.
    """

    def __init__(
        self,
        core: PopCore,
        when_durable: Callable[[Callable[[], None]], None],
        handles: Handles,
        group: ConsumerGroup,
        terms: StreamTerms,
        *,
        caller: Hashable | None = None,
        stream_bytes: StreamBytes | None = None,
    ) -> None:
        self._core = core
        self._stream_bytes = stream_bytes
        self._stated = 0
        """Bytes that `stream_bytes` was told last."""
        self._unsynced = core.unsynced
        self._caller = caller
        self._polls = core.polls
        self._open_checkpoints = core.checkpoints
        self._when_durable = when_durable
        self._handles = handles
        self._group = group
        self._credits, self._batch_max, self._invisible_ms = terms
        self._checkpoints: dict[int, Checkpoint] = {}
        """Checkpoints of this stream, by position. `_recount` finds the deliveries that others have ended."""
        self._outstanding = 0
        """Number of deliveries that take a credit."""
        self._poll: Poll | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False
        self._continues = False
        """True while `pop_more` is scheduled to continue: in the next turn of the loop, or when its caller has room."""
        self._acked = 0
        self.failure: PopError | None = None
        """The error that ended the stream."""
        self.outbox: deque[PopResult | AckReport] = deque()
        """What is durable and must be sent."""
        self.wake = asyncio.Event()
        """Set when there is something to send, or the stream has failed."""
        self._unsent = 0
        """Bytes of messages and reports that are in the outbox, or will be when they are durable."""
        self._room = asyncio.Event()

    # --- popping ----------------------------------------------------------------------------------------------------

    def pop_more(self, *, granted: bool = False) -> None:
        """Pop as many messages as the credits allow; if none is visible, wait for the next.

        `granted` tells that the caller has been given room for one batch.
        """
        core, group, unsynced, caller = self._core, self._group, self._unsynced, self._caller
        left = POPPED_PER_TURN
        while not (self._ended or self._continues or self._is_full) and self._poll is None and self.failure is None:
            room = min(self._credits - self._outstanding, self._batch_max)
            if room <= 0:
                self._recount_later()
                return
            if caller is not None and not granted and not unsynced.fits(caller):
                self._continues = True
                unsynced.when_room(caller, partial(self._continue, granted=True))
                return
            granted = False
            try:
                result = core.popper.pop(group, room, self._invisible_ms) if not group.polls else None
            except PopError as error:
                self._fail(error)
                return
            if result is None:
                self._wait(room)
                return
            unsynced.add(caller, result.size)
            self._deliver(result)
            left -= result.checkpoint.count
            # Expired messages take no credits, so a backlog of them must not keep others from their turn either.
            if left <= 0 or not any(result.records):
                self._continues = True
                asyncio.get_running_loop().call_soon(self._continue)

    def _continue(self, *, granted: bool = False) -> None:
        self._continues = False
        self.pop_more(granted=granted)

    def _wait(self, room: int) -> None:
        poll = Poll(asyncio.get_running_loop().create_future(), room, self._invisible_ms, caller=self._caller)
        try:
            self._polls.add(poll, self._group)
        except PopError as error:
            self._fail(error)
            return
        self._poll = poll
        poll.future.add_done_callback(self._arrived)

    def _arrived(self, future: asyncio.Future[PopResult]) -> None:
        poll, self._poll = self._poll, None
        if poll is not None:
            self._polls.remove(poll, self._group)
        if future.cancelled():
            return
        error = future.exception()
        if isinstance(error, PopError):
            self._fail(error)
        elif error is not None:
            raise error
        elif self._ended:
            self._core.deliveries.requeue(future.result().checkpoint)
        else:
            self._deliver(future.result())
            self.pop_more()

    def _fail(self, error: PopError) -> None:
        self.failure = error
        self.wake.set()

    def _deliver(self, result: PopResult) -> None:
        if not any(result.records):
            return
        checkpoint = result.checkpoint
        self._checkpoints[checkpoint.position] = checkpoint
        self._outstanding += checkpoint.open.bit_count()
        self._change_unsent(result.size)
        self._when_durable(partial(self._put_durable, result))

    def _change_unsent(self, change: int) -> None:
        self._unsent += change
        if self._stream_bytes is not None and abs(self._unsent - self._stated) >= STATED_STEP:
            self._stated = self._unsent
            self._stream_bytes.resize(self._unsent)

    def _put_durable(self, item: PopResult | AckReport) -> None:
        if not self._ended:
            self.outbox.append(item)
            self.wake.set()
        elif isinstance(item, PopResult):
            self._core.deliveries.requeue(item.checkpoint)

    # --- sending ----------------------------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return self._unsent >= UNSENT_BYTES_MAX

    async def has_room(self) -> None:
        """Return when the stream has sent enough of what it holds, so that the next request may be read."""
        while self._is_full and not self._ended:
            self._room.clear()
            await self._room.wait()

    def sent(self) -> PopResult | AckReport:
        """Take the first item out of the outbox, and return it: it was sent."""
        item = self.outbox.popleft()
        was_full = self._is_full
        self._change_unsent(-_bytes_of(item))
        if was_full and not self._is_full:
            self._room.set()
            self.pop_more()
        return item

    # --- acknowledging ----------------------------------------------------------------------------------------------

    def grant(self, credits: int) -> None:
        """Add credits, or take them back if `credits` is negative."""
        self._credits = max(min(self._credits + credits, CREDITS_MAX), 0)
        self.pop_more()

    def ack(self, acks: list[str], changes: list[VisibilityChange]) -> None:
        """Acknowledge deliveries and change invisible times. The stream reports what came of it when it is durable."""
        outcomes = self._core.deliveries.ack(self._group.name, acks) if acks else []
        refused: list[tuple[str, AckOutcome]] = [
            (handle, outcome) for handle, outcome in zip(acks, outcomes, strict=True) if outcome is not AckOutcome.OK
        ]
        changed = self._core.deliveries.change_invisible(self._group.name, changes) if changes else []
        self._acked += len(acks) - len(refused)
        self._outstanding -= len(acks) - len(refused)
        for (outcome, handle), change in zip(changed, changes, strict=True):
            if outcome is not AckOutcome.OK:
                continue
            if change.returns:
                self._outstanding -= 1
                continue
            delivery = self._handles.read_deliveries([handle])[0]
            assert delivery is not None
            checkpoint = self._open_checkpoints.get(delivery.checkpoint)
            if checkpoint is not None:
                self._checkpoints[checkpoint.position] = checkpoint
        self._outstanding = max(self._outstanding, 0)
        if len(self._checkpoints) > 2 * self._outstanding + 64:
            self._recount()
        report = AckReport(self._acked, refused, changed)
        self._change_unsent(_bytes_of(report))
        self._when_durable(partial(self._put_durable, report))
        self.pop_more()

    def _recount_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RECOUNT_S, self._recount_and_pop)

    def _recount_and_pop(self) -> None:
        self._timer = None
        self._recount()
        self.pop_more()

    def _recount(self) -> None:
        self._checkpoints = {position: checkpoint for position, checkpoint in self._checkpoints.items() if checkpoint.open}
        self._outstanding = sum(checkpoint.open.bit_count() for checkpoint in self._checkpoints.values())

    # --- ending -----------------------------------------------------------------------------------------------------

    def end(self, *, give_back: bool, is_broken: bool) -> None:
        """Pop no more. Messages that were not sent are requeued; with `give_back`, so are those of all open deliveries.

        If the stream is broken, one of these may have ended the consumer.
        """
        self._ended = True
        self._room.set()
        if self._timer is not None:
            self._timer.cancel()
        poll, self._poll = self._poll, None
        if poll is not None:
            self._polls.remove(poll, self._group)
            if poll.future.done() and not poll.future.cancelled() and poll.future.exception() is None:
                self._core.deliveries.requeue(poll.future.result().checkpoint)
            poll.future.remove_done_callback(self._arrived)
        for item in self.outbox:
            if isinstance(item, PopResult):
                self._core.deliveries.requeue(item.checkpoint)
        if give_back:
            for checkpoint in self._checkpoints.values():
                self._core.deliveries.requeue(checkpoint, suspected=is_broken)
        self.outbox.clear()


def _bytes_of(item: PopResult | AckReport) -> int:
    if isinstance(item, PopResult):
        return item.size
    return ENTRY_BYTES * (1 + len(item.refused) + len(item.changed))
