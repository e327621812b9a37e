"""Tells what has become of a message in each group that gets it, as far as the state of the groups says."""

from __future__ import annotations

import asyncio
from struct import Struct
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from penstock.node.api.messagereader import MessageRead
from penstock.node.api.pages import LOOKED_AT_ONCE
from penstock.pop.core.checkpoint import ENTRY_BYTES, Checkpoint
from penstock.pop.core.core import PopCore
from penstock.pop.core.group import ConsumerGroup
from penstock.store.queues.lightqueue import LightQueue, entries_array
from penstock.store.record import Flag
from penstock.store.store import Store
from penstock.store.topics import matches

GROUPS_SHOWN: Final = 100
"""Groups that one answer shows. The search for a message in a queue reads about 20 records."""

RETRIES_LOOKED_AT: Final = 4_096
"""Entries of a retry queue among which a message is sought, newest last."""

DISPATCHES_LOOKED_AT: Final = 1_024
"""Entries of a queue among which a delayed message is sought, from its due time on."""

_POSITION = Struct("<Q")


class DeliveryState(msgspec.Struct, kw_only=True):
    """What has become of a message in one group."""

    group: str
    filter: str
    state: Annotated[
        Literal["waiting", "parked", "retry", "open", "delayed", "dead_letter", "passed", "unknown"],
        msgspec.Meta(
            description="waiting: not handed out yet. parked: it waits for its message group. retry: it waits to be handed out "
            "again. open: a consumer has it. delayed: nobody has it until `until_ms`. dead_letter: its group has given up. "
            "passed: the group has acknowledged or skipped it. unknown: the group began after it, or the state does not tell."
        ),
    ]
    offset: Annotated[int | None, msgspec.Meta(description="In the queue of the filter; null if it is not known.")] = None
    before: Annotated[int | None, msgspec.Meta(description="Messages of the queue that come before a waiting one.")] = None
    attempt: Annotated[int | None, msgspec.Meta(description="Number of the open delivery, from 1.")] = None
    until_ms: Annotated[int | None, msgspec.Meta(description="When the invisible time of the open delivery is over.")] = None


class _Open(NamedTuple):
    """An open delivery."""

    checkpoint: Checkpoint
    place: int
    """Index of the delivery in the checkpoint."""


class DeliveryStates:
    """Finds the deliveries of a message.

    Parameters:
        core: has the groups and their deliveries.
        store: has the queues.
    """

    def __init__(self, core: PopCore, store: Store) -> None:
        self._core = core
        self._store = store

    async def of(self, message: MessageRead) -> tuple[list[DeliveryState], bool]:
        """Return the states of a message in the groups whose filters match its topic, and whether there are more groups."""
        self._store.commit()
        groups: list[ConsumerGroup] = []
        for number, group in enumerate(list(self._core.groups)):
            if matches(group.filter, message.topic):
                groups.append(group)
            if len(groups) > GROUPS_SHOWN:
                break
            if number % (4 * LOOKED_AT_ONCE) == 0:
                await asyncio.sleep(0)
        is_open = await self._open_deliveries(message.position, {group.id for group in groups[:GROUPS_SHOWN]})
        states: list[DeliveryState] = []
        for group in groups[:GROUPS_SHOWN]:
            if not group.is_deleted:
                states.append(self._state(group, message, is_open.get(group.id)))
            await asyncio.sleep(0)
        return states, len(groups) > GROUPS_SHOWN

    async def _open_deliveries(self, position: int, group_ids: set[int]) -> dict[int, _Open]:
        """Return the open delivery of a message in each group that has one, by the id of the group."""
        packed = _POSITION.pack(position)
        deliveries: dict[int, _Open] = {}
        for number, checkpoint in enumerate(tuple(self._core.checkpoints.values())):
            if checkpoint.group_id in group_ids and packed in checkpoint.body:
                index = _index_of(checkpoint, packed)
                if index is not None:
                    deliveries[checkpoint.group_id] = _Open(checkpoint, index)
            if number % (8 * LOOKED_AT_ONCE) == 0:
                await asyncio.sleep(0)
        return deliveries

    def _state(self, group: ConsumerGroup, message: MessageRead, delivery: _Open | None) -> DeliveryState:
        position = message.position
        state = DeliveryState(group=group.name, filter=group.filter, state="unknown")
        if delivery is not None and delivery.checkpoint.open >> delivery.place & 1:
            entry = delivery.checkpoint.entry(delivery.place)
            state.state = "delayed" if delivery.checkpoint.waits else "open"
            state.offset, state.attempt, state.until_ms = entry.offset, entry.attempt, delivery.checkpoint.deadline_ms
            return state
        letter = self._core.dead_letters.find(group.name, position)
        if letter is not None and letter.group_id == group.id:
            state.state, state.attempt = "dead_letter", letter.attempts
        elif group.order is not None and group.order.knows(position):
            state.state = "parked"
        elif _offset_of(group.retry, group.retry_cursor, RETRIES_LOOKED_AT, position) is not None:
            state.state = "retry"
        elif not self._store.queues.is_backfilling(group.queue):
            state.offset = self._offset(group.queue, message)
            if state.offset is None:
                return state
            state.state = "passed"
            if state.offset >= group.cursor:
                state.state, state.before = "waiting", state.offset - group.cursor
        return state

    def _offset(self, queue: LightQueue, message: MessageRead) -> int | None:
        """Return the offset of a message in a queue; None if it was not found."""
        if message.flags & Flag.DELAYED:
            first = queue.offset_at(message.properties.deliver_at_ms, self._store.copies)
            return _offset_of(queue, first, DISPATCHES_LOOKED_AT, message.position)
        first = queue.offset_from(message.position, self._store.copies)
        count = DISPATCHES_LOOKED_AT if message.flags & Flag.HALF else 1
        return _offset_of(queue, first, count, message.position)


def _index_of(checkpoint: Checkpoint, packed: bytes) -> int | None:
    """Return the index of the open delivery of a message in a checkpoint; None if it has none."""
    at = checkpoint.body.find(packed)
    while at >= 0:
        index, beyond = divmod(at, ENTRY_BYTES)
        if not beyond and checkpoint.open >> index & 1:
            return index
        at = checkpoint.body.find(packed, at + 1)
    return None


def _offset_of(queue: LightQueue, offset: int, count: int, position: int) -> int | None:
    """Return the offset of the entry of a message among `count` entries of a queue; None if it is not among them."""
    end = offset + count
    while offset < end:
        offset, entries = queue.read_from(offset, min(end - offset, 1_024))
        rows = entries_array(entries)
        at = (rows["position"] == position).nonzero()[0]
        if len(at):
            return offset + int(at[0])
        if not len(rows):
            return None
        offset += len(rows)
    return None
