"""The core of POP: groups, checkpoints, acknowledgements, revival and dead letters. It knows no network.

A pop hands out visible messages and appends one checkpoint record for all of them. The messages are invisible to their group
until they are acknowledged, or until their invisible time is over. Then a message is revived into the group's retry queue as
a new attempt, or, after the last attempt, becomes a dead letter. Bodies are never copied: queue entries point at messages.

Every decision is a record, and all decisions are made on one event loop, so a message is either acknowledged or revived, never
both. `PopState` is what the records made of groups and checkpoints. The parts that decide are composed here, and callers name
them: `core.popper.pop`, `core.polls.poll`, `core.deliveries.ack`, `core.groups.create`, `core.dead_letters.redrive`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from penstock.pop.core.checkpoint import Checkpoint
from penstock.pop.core.deadletters import DeadLetters
from penstock.pop.core.deadlines import Deadlines
from penstock.pop.core.deliveries import GroupDeliveries
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.groups import Groups
from penstock.pop.core.handle import Handles
from penstock.pop.core.polls import LongPolls, Unsynced
from penstock.pop.core.pops import Popper
from penstock.pop.core.poptraces import PopTraces
from penstock.pop.core.records import GroupRecords
from penstock.pop.core.state import PopState
from penstock.pop.options import PopOptions
from penstock.store.part import Part
from penstock.store.store import Store
from penstock.timer.options import TimerOptions

UNSYNCED_PARTS: Final = 4
"""Which part of the bytes of all responses messages may take that wait for the sync of their checkpoint."""


def _call_soon(callback: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(callback)


class PopCore:
    """POP over a store. The caller must add `part` to the store before the store recovers.

    Parameters:
        store: has the messages and all records of POP.
        handles: makes and reads handles.
        options: see `PopOptions`.
        timer: see `TimerOptions`. The deadlines of deliveries are on a timer wheel.
        traces: makes spans of deliveries; None without tracing.
    """

    def __init__(
        self, store: Store, handles: Handles, options: PopOptions, timer: TimerOptions, traces: PopTraces | None = None
    ) -> None:
        self._store = store
        self._deadlines = Deadlines(store.now_ms, self._revive, fire_max=timer.fire_max, tick_ms=timer.tick_ms)
        self._state = state = PopState(store, self._deadlines, self._serve, options)
        store.retention.on_dropped.append(self._forget_dropped)
        self.part: Part = state
        """What the records made of groups and checkpoints, as a part of the store."""
        self.checkpoints: Mapping[int, Checkpoint] = state.checkpoints.open
        """Checkpoints with open deliveries, by position."""
        records = GroupRecords(store, state, traces)
        self.counters = records.counters
        self.groups = Groups(store, state, records, self._serve, options)
        self.dead_letters = DeadLetters(store, state, records, self._serve)
        self.deliveries = GroupDeliveries(
            state, records, handles, self._serve, store.now_ms, options.invisible_ms_max, timer.fire_max
        )
        self.popper = Popper(store, state, records, traces)
        self.unsynced = Unsynced(store.when_durable, _call_soon, options.responses_bytes_max // UNSYNCED_PARTS)
        """Room for messages that were handed out and wait for the sync of their checkpoint."""
        self.polls = LongPolls(self.popper, self.deliveries, store.space, options, self.counters, self.unsynced)

    @property
    def waiting(self) -> int:
        """Number of polls that wait for messages."""
        return self.polls.waiting

    @property
    def checkpoints_open(self) -> int:
        """Number of checkpoints with open deliveries."""
        return len(self.checkpoints)

    @property
    def checkpoints_remembered(self) -> int:
        """Number of closed checkpoints that are still in memory, so that late calls get an exact answer."""
        return len(self._state.checkpoints.closed)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Revive messages by itself from now on; first those that became due while the node was down."""
        self.polls.start(loop)
        self._deadlines.start(loop)
        self._store.space.on_relief.append(self._serve_all)

    def stop(self) -> None:
        """Stop reviving messages."""
        self.polls.stop()
        self._deadlines.stop()

    def fire_due(self) -> bool:
        """Revive one portion of what is due now, and return whether more may be due. Tests that move the clock call this."""
        return self._deadlines.fire_due()

    def read(self, position: int, size: int) -> bytes | None:
        """Return the record of a message; None if it can't be read any more."""
        return self._store.read_intact(position, size)

    def _serve(self, group: ConsumerGroup) -> None:
        if group.polls:
            self.polls.serve(group)

    def _serve_all(self) -> None:
        for group in self.groups:
            self._serve(group)

    def _revive(self, checkpoints: list[Checkpoint]) -> None:
        self.deliveries.revive(checkpoints)

    def _forget_dropped(self) -> Iterator[None]:
        """Forget the dead letters, and the redriven ones, whose messages retention has dropped.

        Yields after each, so that the work can be sliced.
        """
        for letter in self._state.dead_letters.before(self._store.log.start):
            if self._store.is_expired(letter.position):
                self._state.forget(letter)
            yield
        for group in tuple(self.groups):
            for position in group.redriven.before(self._store.log.start):
                if self._store.is_expired(position):
                    self._state.forget_redriven(group, position)
                yield
