"""The core of POP: groups, checkpoints, acknowledgements, revival, dead letters. It knows no network.

A pop takes visible messages, appends one checkpoint record for all of them and hands them out. Each is invisible to its
group until it is acknowledged, or until the invisible time is over: then it is revived into the group's retry queue as a
new attempt, or, after the last attempt, put among the dead letters. The body is never copied: entries point at it.

Every decision is a record, taken on one loop, so a message is either acknowledged or revived, never both. What the records
make of groups and checkpoints is in `pop.core.state`; here is what decides.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

import orjson
import structlog

from penstock.pop.backoff import backoff_ms
from penstock.pop.core.checkpoint import ATTEMPT_ID_BYTES_MAX, INDEX_BITS, INDEX_MASK, Checkpoint, delivery_id, delivery_of
from penstock.pop.core.choice import Choice, choose
from penstock.pop.core.deadletters import Reason
from penstock.pop.core.deadlines import Deadlines
from penstock.pop.core.group import DEAD_LETTERS, Group, Latencies, check_group_name
from penstock.pop.core.handle import DELIVERY_DIGITS, Delivery, Handles
from penstock.pop.core.order import PARKED_MAX
from penstock.pop.core.poll import Poll, Taken
from penstock.pop.core.settings import DEFAULTS, GroupSettings
from penstock.pop.core.state import PopState
from penstock.pop.errors import GroupUnknown, Overloaded, RequestInvalid
from penstock.pop.options import PopOptions
from penstock.store.commitlog import dense_until
from penstock.store.errors import DiskFull, PositionUnknown
from penstock.store.lightqueue import Start
from penstock.store.record import (
    CHANGE_ENTRY,
    CRC_FROM,
    KIND_AT,
    POP_FIXED,
    PROPS_LEN_AT,
    REFERENCE,
    SIZE_AND_CRC,
    STORE_MS_AT,
    Flag,
    Kind,
    checksum,
    decode_properties,
    properties_of,
)
from penstock.store.space import Level
from penstock.store.store import Store
from penstock.timer.options import TimerOptions

logger = structlog.get_logger("pop")

_MESSAGE = int(Kind.MESSAGE)
_NO_PROPERTIES = bytes(STORE_MS_AT - PROPS_LEN_AT)

REFERENCES_MAX = 16_384
"""Deliveries that one record settles: 192 KiB, so that it fits into any segment, however many are due at an instant."""

TAKE_STEPS_MAX = 16
"""Batches of messages of which all have expired, or can't be read, that one call passes over before it answers with none."""


class Outcome(Enum):
    """What came of an acknowledgement, or of a change of invisible time. The names are those of the API's codes."""

    OK = "done"
    INVALID_HANDLE = "this is not a handle that this node gave to this group"
    HANDLE_EXPIRED = (
        "the delivery is over: its invisible time has passed, and the message comes, or came, back as a new attempt; "
        "or its group was reset or deleted"
    )
    ALREADY_ACKED = "the delivery was acknowledged before"
    HANDLE_REPLACED = "a change of invisible time gave a newer handle: use that one"
    INVALID_INVISIBLE_TIME = "the invisible time must be at least 0 ms and at most pop.invisible_ms_max"


class Change(NamedTuple):
    """A wish to move the deadline of a delivery."""

    handle: str
    invisible_ms: int
    suspend: bool = False


class Counters:
    """What POP has done since the start. Plain integers: `penstock.node.metrics` reads them."""

    __slots__ = (
        "acked",
        "dead_lettered",
        "expired",
        "handed_out",
        "refused",
        "revive_late_ms_max",
        "revive_lateness",
        "revived",
    )

    def __init__(self) -> None:
        self.handed_out = 0
        self.acked = 0
        self.revived = 0
        self.dead_lettered = 0
        self.expired = 0
        """Messages that nobody got because their time to live was over."""
        self.refused = 0
        self.revive_late_ms_max = 0
        self.revive_lateness = Latencies()


class PopCore:
    """POP over a store. Its `state` is a part of that store.

    Parameters:
        store: where the messages and all records of POP are.
        handles: makes and reads handles.
        options: see `PopOptions`.
        timer: see `TimerOptions`: the deadlines are on a wheel.
    """

    def __init__(self, store: Store, handles: Handles, options: PopOptions, timer: TimerOptions) -> None:
        self.store = store
        self.handles = handles
        self.options = options
        self.counters = Counters()
        self.waiting = 0
        self._deadlines = Deadlines(store.now_ms, self._expire, fire_max=timer.fire_max, tick_ms=timer.tick_ms)
        self._expire_max = timer.fire_max
        self.state = PopState(store.log, store.queues, self._deadlines, self._arrived, options)
        store.retention.on_dropped.append(self._forget_dropped)
        self._loop: asyncio.AbstractEventLoop | None = None

    def __iter__(self) -> Iterator[Group]:
        """Yield all groups, once for each of their filters."""
        return iter(self.state.by_id.values())

    @property
    def checkpoints_open(self) -> int:
        """How many checkpoints are not settled."""
        return len(self.state.checkpoints)

    # --- groups -----------------------------------------------------------------------------------------------------

    def group(self, name: str, topic_filter: str, start: Start = "earliest") -> Group:
        """Return the group `name` on `topic_filter`; create it where it is new, to begin at `start`.

        One that a shared or a lite subscription has made outlasts that from now on: somebody else counts on it.

        Raises:
            GroupUnknown: it is new, and `pop.groups_auto_create` is off.
            GroupInvalid, TopicInvalid: no group may be called like that; the filter breaks MQTT 5.0, 4.7.
            Overloaded, LimitExceeded: `pop.groups_max` or `store.queues_max` is reached.
        """
        group = self.state.groups.get((name, topic_filter))
        if group is not None:
            if group.settings.is_temporary:
                with suppress(DiskFull):  # the next call tries again
                    self.configure(group, replace(group.settings, shared=False, lite_ends_ms=None))
            return group
        self.check_may_create(name, topic_filter)
        return self.create(name, topic_filter, start, DEFAULTS)

    def check_may_create(self, name: str, topic_filter: str) -> None:
        """Raise GroupUnknown where consumers don't create groups: `pop.groups_auto_create` is off."""
        if not self.options.groups_auto_create:
            raise GroupUnknown(
                f"there is no group {name[:80]!r} on {topic_filter[:80]!r}: create it first, or set pop.groups_auto_create"
            )

    def create(self, name: str, topic_filter: str, start: Start, settings: GroupSettings) -> Group:
        """Create a group that doesn't exist. Its settings must have been checked."""
        check_group_name(name)
        if topic_filter.startswith("$"):
            _check_dead_letters(name, topic_filter)
        if len(self.state.by_id) >= self.options.groups_max:
            raise Overloaded(f"{len(self.state.by_id)} groups exist, which is the limit: see pop.groups_max")
        group_id = self.state.next_id
        queues = self.store.queues
        queue = queues.declare(topic_filter, f"group:{group_id}", start)
        retry = queues.declare(f"$retry/{group_id}", f"group:{group_id}")
        row = {
            "group": name,
            "filter": topic_filter,
            "queue": queue.id,
            "retry": retry.id,
            "cursor": queues.offset_of(queue, start),
        }
        if settings != DEFAULTS:
            row["settings"] = settings.row()
        self.append(Kind.GROUP_CREATED, group_id, name, properties=orjson.dumps(row))
        return self.state.groups[name, topic_filter]

    def configure(self, group: Group, settings: GroupSettings) -> None:
        """Give a group other settings, which must have been checked. Raises DiskFull."""
        self.append(Kind.GROUP_CHANGED, group.id, group.name, properties=orjson.dumps({"settings": settings.row()}))

    def append(
        self,
        kind: Kind,
        group_id: int,
        name: str,
        body: bytes = b"",
        *,
        deadline_ms: int = 0,
        flags: int = 0,
        properties: bytes = b"",
    ) -> int:
        """Append a record of a group."""
        group = self.state.by_id.get(group_id)
        fixed = POP_FIXED.pack(group_id, group.epoch if group else 0, deadline_ms)
        return self.store.append(kind, fixed, name.encode(), body, properties, flags)

    # --- pop --------------------------------------------------------------------------------------------------------

    def take(self, group: Group, messages_max: int, invisible_ms: int, attempt_id: str = "") -> Taken | None:
        """Hand out up to `messages_max` visible messages of a group for `invisible_ms`; None where there are none.

        None, too, where the disk has no room to note who got them: they wait, as they do for a consumer.

        A call with the attempt id of an earlier one gets what that one got, as far as it is still out: for whoever doesn't know
        whether the answer was lost. Nothing may be answered before `Store.when_durable`: until then a crash could undo the
        checkpoint.

        Raises:
            GroupUnknown: the group was deleted.
        """
        if group.gone:
            raise GroupUnknown(f"the group {group.name!r} on {group.filter!r} was deleted")
        if attempt_id:
            again = self._again(group, attempt_id)
            if again is not None:
                return again
        taken = None
        for _ in range(TAKE_STEPS_MAX):
            taken = self._take(group, messages_max, invisible_ms, attempt_id)
            if taken is None or any(taken.records):
                break
        return taken

    def _take(self, group: Group, messages_max: int, invisible_ms: int, attempt_id: str) -> Taken | None:
        """Hand out messages once. No record is left of those that nobody can get any more."""
        room = min(messages_max, group.in_flight_max - group.in_flight)
        if room <= 0 or group.visible <= 0 or group.settings.paused:
            return None
        choice = choose(group, room, self.state, self.store, self.read)
        noted = choice.noted
        if not choice.entries:
            try:
                if choice.must_note:
                    self.append(Kind.POP_CHECKPOINT, group.id, group.name, properties=orjson.dumps(noted))
            except DiskFull:
                return None
            group.scanned = max(group.scanned, choice.scanned)
            return None
        if attempt_id:
            noted["attempt_id"] = attempt_id
        deadline_ms = self.store.now_ms() + invisible_ms
        properties = orjson.dumps(noted) if noted else b""
        try:
            position = self.append(
                Kind.POP_CHECKPOINT, group.id, group.name, choice.body(), deadline_ms=deadline_ms, properties=properties
            )
        except DiskFull:
            return None
        checkpoint = self.state.checkpoints[position]
        self.counters.handed_out += checkpoint.count
        records = self._records(choice)
        if None in records:
            self._bury(group, checkpoint, [index for index, data in enumerate(records) if data is None])
        self._pass_over_expired(group, checkpoint, records)
        return Taken(checkpoint, records)

    def _records(self, choice: Choice) -> list[bytes | None]:
        """Return the records of what was chosen. The hot path: 0.5 us each, of which the checksum is a half."""
        known, unpack, entries = choice.records, SIZE_AND_CRC.unpack_from, choice.entries
        records: list[bytes | None] = []
        until = 0
        if len(entries) > 1:
            (first, _, size, *_), (last, _, last_size, *_) = entries[0], entries[-1]
            until = dense_until((first, size), (last, last_size), len(entries))
        block, base = b"", 0
        for position, _, size, _, _, _ in entries:
            if position in known:
                records.append(known[position])
                continue
            at = position - base
            if at < 0 or at + size > len(block):
                try:
                    block, base, at = self.store.read_ahead(position, size, until), position, 0
                except PositionUnknown:
                    records.append(None)
                    continue
            data = block[at : at + size]
            stated, crc = unpack(data)
            is_message = stated == size and data[KIND_AT] == _MESSAGE and checksum(data[CRC_FROM:]) == crc
            records.append(data if is_message else None)
        return records

    def _pass_over_expired(self, group: Group, checkpoint: Checkpoint, records: list[bytes | None]) -> None:
        """Settle the messages whose time to live (MQTT 5.0, 3.3.2.3.3) is over, and take their records out of `records`.

        Dead letters keep: somebody is to see them.
        """
        now_ms = self.store.now_ms()
        expired = [
            at
            for at, data in enumerate(records)
            if data is not None and data[PROPS_LEN_AT:STORE_MS_AT] != _NO_PROPERTIES and 0 < _expires_at_ms(data) <= now_ms
        ]
        if not expired or group.filter.startswith(DEAD_LETTERS):
            return
        for index in expired:
            records[index] = None
        try:
            self.append_references(Kind.POP_ACK, group, [REFERENCE.pack(checkpoint.position, index) for index in expired])
        except DiskFull:
            return  # they stay out, and are found expired again when their invisible time is over
        self.counters.expired += len(expired)

    def _again(self, group: Group, attempt_id: str) -> Taken | None:
        """Return what is still out of what an earlier call with this attempt id took."""
        checkpoint = self.state.checkpoints.get(group.attempt_ids.get(attempt_id, -1))
        if checkpoint is None or checkpoint.deadline_ms <= self.store.now_ms():
            return None
        open_indexes = set(checkpoint.open_indexes())
        records = [
            self.read(entry.position, entry.size) if index in open_indexes else None
            for index, entry in enumerate(checkpoint.entries())
        ]
        return Taken(checkpoint, records)

    def append_references(
        self, kind: Kind, group: Group, references: list[bytes], *, flags: int = 0, properties: bytes = b""
    ) -> None:
        """Append records of a group that settle deliveries: as many as they need. The first has the properties."""
        for at in range(0, max(len(references), 1), REFERENCES_MAX):
            body = b"".join(references[at : at + REFERENCES_MAX])
            self.append(kind, group.id, group.name, body, flags=flags, properties=properties)
            properties = b"" if kind is Kind.GROUP_OFFSET_RESET else properties

    def read(self, position: int, size: int) -> bytes | None:
        """Return the record of a message; None where it can't be read any more."""
        data = self.store.read_intact(position, size)
        # Of another kind is what repair has put in the place of a message.
        return data if data is not None and data[KIND_AT] == Kind.MESSAGE else None

    def _bury(self, group: Group, checkpoint: Checkpoint, indexes: Iterable[int]) -> None:
        """Put deliveries whose record is gone among the dead letters: one that can't be read must not stop the others."""
        references = [REFERENCE.pack(checkpoint.position, index) for index in indexes]
        logger.error("message.unreadable", group=group.name, filter=group.filter, checkpoint=checkpoint.position)
        try:
            self._append_dead_letters(group, references, Reason.UNREADABLE)
        except DiskFull:
            return  # they stay open, and are found unreadable again when their time is over

    def _append_dead_letters(self, group: Group, references: list[bytes], reason: Reason) -> None:
        self.store.queues.declare(DEAD_LETTERS + group.name, f"group:{group.id}")
        properties = orjson.dumps({"reason": reason.name.lower()})
        self.append_references(Kind.POP_DEAD_LETTER, group, references, properties=properties)
        self.counters.dead_lettered += len(references)

    # --- long polls -------------------------------------------------------------------------------------------------

    async def pop(self, group: Group, messages_max: int, invisible_ms: int, wait_ms: int, attempt_id: str = "") -> Taken | None:
        """As `take`, but wait up to `wait_ms` for the first message. A call that is cancelled takes nothing.

        Raises:
            Overloaded: `pop.waiters_max` calls wait already.
            GroupUnknown: the group was deleted.
        """
        return await self.pop_any((group,), messages_max, invisible_ms, wait_ms, attempt_id)

    async def pop_any(
        self, groups: Sequence[Group], messages_max: int, invisible_ms: int, wait_ms: int, attempt_id: str = ""
    ) -> Taken | None:
        """As `pop`, from the first of several groups that has something; they count as one waiting pop.

        Raises:
            Overloaded, GroupUnknown: as `pop` raises them; the latter for any of the groups.
        """
        in_turn = groups if len(groups) == 1 else sorted(groups, key=lambda group: attempt_id not in group.attempt_ids)
        for group in in_turn:
            if not group.polls or attempt_id in group.attempt_ids:
                taken = self.take(group, messages_max, invisible_ms, attempt_id)
                while taken is None and wait_ms <= 0 and self._may_look_on(group):
                    await asyncio.sleep(0)
                    taken = self.take(group, messages_max, invisible_ms, attempt_id)
                if taken is not None:
                    return taken
        if wait_ms <= 0 or not groups:
            return None
        poll = Poll(asyncio.get_running_loop().create_future(), messages_max, invisible_ms, attempt_id)
        self.enlist(poll, *groups)
        try:
            await asyncio.wait((poll.future,), timeout=wait_ms / 1000)
        except asyncio.CancelledError:
            if poll.future.done() and poll.future.exception() is None:
                self.release(poll.future.result().checkpoint)
            raise
        finally:
            self.withdraw(poll, *groups)
        return poll.future.result() if poll.future.done() else None

    def enlist(self, poll: Poll, *groups: Group) -> None:
        """Let a poll wait: its future gets what is taken for it, from one of the groups. `withdraw` it, whatever came.

        Raises:
            Overloaded: `pop.waiters_max` polls wait already.
        """
        if self.waiting >= self.options.waiters_max:
            self.counters.refused += 1
            raise Overloaded(f"{self.waiting} pops are waiting on this node, which is the limit: see pop.waiters_max")
        self.waiting += 1
        for group in groups:
            group.polls.append(poll)
            self._look_on(group)

    def withdraw(self, poll: Poll, *groups: Group) -> None:
        """Let a poll wait no longer, in the groups in which it was enlisted."""
        self.waiting -= 1
        if len(groups) == 1 and poll.future.done():
            return  # who served it has taken it out
        for group in groups:
            with suppress(ValueError):
                group.polls.remove(poll)

    def _arrived(self, group: Group) -> None:
        if group.polls:
            self.serve(group)

    def serve(self, group: Group) -> None:
        """Give what is visible to the polls that wait, oldest first."""
        while group.polls and group.visible > 0:
            poll = group.polls[0]
            if poll.future.done():  # another of its groups has served it in this turn
                group.polls.popleft()
                continue
            taken = self.take(group, poll.messages_max, poll.invisible_ms, poll.attempt_id)
            if taken is None:
                self._look_on(group)
                return
            group.polls.popleft()
            poll.future.set_result(taken)

    def _may_look_on(self, group: Group) -> bool:
        """Return whether another `take` may find something, though the last has found nothing."""
        if self.store.space.level is Level.EXHAUSTED:
            return False  # `_serve_all` goes on when there is room
        if not group.looks or group.settings.paused or group.in_flight >= group.in_flight_max:
            return False
        is_full = group.order is not None and group.order.parked >= PARKED_MAX
        return not is_full and group.scanned < group.queue.committed_offset

    def _look_on(self, group: Group) -> None:
        """Let a group with polls that wait look further, in a later turn: one look is bounded."""
        if self._loop is not None and group.polls and not group.looking and self._may_look_on(group):
            group.looking = True
            self._loop.call_soon(self._look_again, group)

    def _look_again(self, group: Group) -> None:
        group.looking = False
        if self._loop is not None:
            self.serve(group)

    def release(self, checkpoint: Checkpoint) -> None:
        """Return what is open of a checkpoint that never reached its consumer: visible at once, and not an attempt."""
        references = [REFERENCE.pack(checkpoint.position, index) for index in checkpoint.open_indexes()]
        if not references:
            return
        group = self.state.by_id[checkpoint.group_id]
        try:
            self.append_references(Kind.POP_REVIVED, group, references, flags=Flag.SUSPENDED)
        except DiskFull:
            return  # they come back when their invisible time is over
        self.counters.revived += len(references)

    # --- ack and change ---------------------------------------------------------------------------------------------

    def ack(self, name: str, handles: list[str]) -> list[Outcome]:
        """Acknowledge deliveries of the group `name`; return an outcome for each handle, in order.

        Nothing may be answered before `Store.when_durable`.

        Raises:
            DiskFull: not all could be noted. Try again with all: those that were noted are told as acknowledged.
        """
        if self._ack_at_once(name, handles):
            return [Outcome.OK] * len(handles)
        outcomes, chosen = self._settled(name, handles)
        for group_id, references in chosen.items():
            self.append_references(Kind.POP_ACK, self.state.by_id[group_id], references)
            self.counters.acked += len(references)
            group = self.state.by_id[group_id]
            for reference in references:
                position = REFERENCE.unpack(reference)[0]
                checkpoint = self.state.checkpoints.get(position) or self.state.settled.get(position)
                if checkpoint is not None:
                    group.latency.add(self.store.now_ms() - checkpoint.pop_ms, 1)
            self.serve(group)
        return outcomes

    def _ack_at_once(self, name: str, handles: list[str]) -> bool:
        """Acknowledge what is as it should be: genuine, of one group, open, each once. Return False for all else, undone.

        About 0.2 us a handle, where `_settled` takes 1.5.
        """
        if len(handles) > REFERENCES_MAX or set(map(len, handles)) != {DELIVERY_DIGITS}:
            return False
        runs = self.handles.read_joined("".join(handles))
        if runs is None or len({run.checkpoint for run in runs}) != len(runs):  # a checkpoint in two places
            return False
        group = self.state.by_id.get(runs[0].group_id)
        if group is None or group.name != name:
            return False
        now_ms = self.store.now_ms()
        for position, pop_ms, group_id, indexes in runs:
            checkpoint, mask = self.state.checkpoints.get(position), indexes.mask()
            if checkpoint is None or checkpoint.pop_ms != pop_ms or group_id != group.id or now_ms >= checkpoint.deadline_ms:
                return False
            if checkpoint.open & mask != mask or mask.bit_count() != indexes.number:
                return False
        body = b"".join([run.indexes.references(run.checkpoint) for run in runs])
        self.append(Kind.POP_ACK, group.id, group.name, body)
        for run in runs:
            group.latency.add(now_ms - run.pop_ms, run.indexes.number)
        self.counters.acked += len(handles)
        self.serve(group)
        return True

    def give_up(self, name: str, handles: list[str]) -> list[Outcome]:
        """Put deliveries of the group `name` among its dead letters: their consumer knows that it will never succeed.

        Return an outcome for each handle, in order. Nothing may be answered before `Store.when_durable`.

        Raises:
            DiskFull: not all could be noted.
        """
        outcomes, chosen = self._settled(name, handles)
        for group_id, references in chosen.items():
            group = self.state.by_id[group_id]
            self._append_dead_letters(group, references, Reason.FORWARDED)
            self.serve(group)
        return outcomes

    def _settled(self, name: str, handles: list[str]) -> tuple[list[Outcome], dict[int, list[bytes]]]:
        """Judge handles; return the outcomes, and what may be settled by group."""
        outcomes = []
        chosen: dict[int, list[bytes]] = {}
        taken: set[tuple[int, int]] = set()
        for delivery in self.handles.read_deliveries(handles):
            outcome = self._judge(name, delivery, taken)
            outcomes.append(outcome)
            if outcome is Outcome.OK:
                assert delivery is not None
                taken.add((delivery.checkpoint, delivery.index))
                chosen.setdefault(delivery.group_id, []).append(REFERENCE.pack(delivery.checkpoint, delivery.index))
        return outcomes, chosen

    def change_invisible(self, name: str, changes: list[Change]) -> list[tuple[Outcome, str]]:
        """Move the deadline of deliveries to `invisible_ms` from now; return the outcome and the new handle of each.

        0 returns a message at once (nack). The old handle is void. On an error the old handle is returned.

        Raises:
            DiskFull: not all could be noted.
        """
        outcomes: list[tuple[Outcome, str]] = []
        chosen: dict[tuple[int, int, bool], list[tuple[int, Delivery]]] = {}
        taken: set[tuple[int, int]] = set()
        named = self.handles.read_deliveries([change.handle for change in changes])
        for at, (change, delivery) in enumerate(zip(changes, named, strict=True)):
            outcome = self._judge(name, delivery, taken)
            if outcome is Outcome.OK and not 0 <= change.invisible_ms <= self.options.invisible_ms_max:
                outcome = Outcome.INVALID_INVISIBLE_TIME
            outcomes.append((outcome, change.handle))
            if outcome is Outcome.OK:
                assert delivery is not None
                taken.add((delivery.checkpoint, delivery.index))
                key = (delivery.group_id, change.invisible_ms, change.suspend)
                chosen.setdefault(key, []).append((at, delivery))
        for (group_id, invisible_ms, suspend), deliveries in chosen.items():
            fresh = self._replace(group_id, invisible_ms, suspend, [delivery for _, delivery in deliveries])
            for (at, _), handle in zip(deliveries, fresh, strict=True):
                outcomes[at] = (Outcome.OK, handle)
        return outcomes

    def _replace(self, group_id: int, invisible_ms: int, suspend: bool, deliveries: list[Delivery]) -> list[str]:
        named = [(delivery.checkpoint, delivery.index) for delivery in deliveries]
        checkpoint = self._move(group_id, invisible_ms, suspend, named)
        return self.handles.deliveries(checkpoint.position, checkpoint.pop_ms, group_id, checkpoint.count)

    def _move(self, group_id: int, invisible_ms: int, suspend: bool, deliveries: list[tuple[int, int]]) -> Checkpoint:
        """Move the deadline of open deliveries; return the checkpoint that has them now, in order."""
        entries = []
        for position, index in deliveries:
            entries.append(CHANGE_ENTRY.pack(position, index, *self.state.checkpoints[position].entry(index)))
        position = self.append(
            Kind.POP_INVISIBLE_CHANGED,
            group_id,
            self.state.by_id[group_id].name,
            b"".join(entries),
            deadline_ms=self.store.now_ms() + invisible_ms,
            flags=Flag.SUSPENDED if suspend else 0,
        )
        return self.state.checkpoints[position]

    def _judge(self, name: str, delivery: Delivery | None, taken: set[tuple[int, int]]) -> Outcome:
        """Decide whether a delivery may still be settled by the group `name`; `taken` are those of the same call."""
        if delivery is None:
            return Outcome.INVALID_HANDLE
        group = self.state.by_id.get(delivery.group_id)
        if group is None or group.name != name:
            return Outcome.INVALID_HANDLE
        position, bit = delivery.checkpoint, 1 << delivery.index
        checkpoint = self.state.checkpoints.get(position) or self.state.settled.get(position)
        if checkpoint is None or checkpoint.pop_ms != delivery.pop_ms:
            return Outcome.HANDLE_EXPIRED
        if checkpoint.acked & bit or (position, delivery.index) in taken:
            return Outcome.ALREADY_ACKED
        if checkpoint.replaced & bit:
            return Outcome.HANDLE_REPLACED
        if not checkpoint.open & bit or self.store.now_ms() >= checkpoint.deadline_ms:
            return Outcome.HANDLE_EXPIRED
        return Outcome.OK

    # --- consumers inside the node, which hold ids and no handles -----------------------------------------------------

    def settle(self, kind: Kind, deliveries: Iterable[int]) -> int:
        """Settle deliveries by their ids (`pop.core.checkpoint.delivery_id`), about 1 us each; return how many were open.

        POP_ACK acknowledges them, POP_DEAD_LETTER gives them up, POP_REVIVED gives them back: visible at once, and not an
        attempt. One that is over is let pass.

        Raises:
            DiskFull: not all could be noted. Try again with all.
        """
        now_ms, checkpoints, pack = self.store.now_ms(), self.state.checkpoints, REFERENCE.pack
        chosen: dict[int, list[bytes]] = {}
        last, open_bits = -1, 0
        references: list[bytes] = []
        for delivery in dict.fromkeys(deliveries):
            position, index = delivery >> INDEX_BITS, delivery & INDEX_MASK
            if position != last:
                last = position
                checkpoint = checkpoints.get(position)
                open_bits = 0
                if checkpoint is not None and now_ms < checkpoint.deadline_ms:
                    open_bits = checkpoint.open
                    references = chosen.setdefault(checkpoint.group_id, [])
            if open_bits >> index & 1:
                references.append(pack(position, index))
        for group_id, references in chosen.items():
            group = self.state.by_id[group_id]
            if not references:
                continue
            if kind is Kind.POP_DEAD_LETTER:
                self._append_dead_letters(group, references, Reason.FORWARDED)
            elif kind is Kind.POP_REVIVED:
                self.append_references(kind, group, references, flags=Flag.SUSPENDED)
                self.counters.revived += len(references)
            else:
                assert kind is Kind.POP_ACK, kind
                for position, count in Counter(REFERENCE.unpack(reference)[0] for reference in references).items():
                    group.latency.add(now_ms - checkpoints[position].pop_ms, count)
                self.append_references(kind, group, references)
                self.counters.acked += len(references)
            self.serve(group)
        return sum(map(len, chosen.values()))

    def is_open(self, delivery: int) -> bool:
        """Return whether a delivery, by its id, may still be settled."""
        position, index = delivery_of(delivery)
        checkpoint = self.state.checkpoints.get(position)
        return checkpoint is not None and bool(checkpoint.open >> index & 1) and self.store.now_ms() < checkpoint.deadline_ms

    def hold(self, group: Group, deliveries: list[int], invisible_ms: int) -> list[int]:
        """Move the deadline of deliveries of a group to `invisible_ms` from now, however long; return their new ids.

        Those that are over keep theirs.

        Raises:
            DiskFull: it could not be noted; the old ids hold.
        """
        checkpoints = self.state.checkpoints
        moved = {}
        for delivery in deliveries:
            position, index = delivery_of(delivery)
            checkpoint = checkpoints.get(position)
            if checkpoint is not None and checkpoint.open >> index & 1:
                moved[delivery] = position, index
        if not moved:
            return deliveries
        first = delivery_id(self._move(group.id, invisible_ms, False, list(moved.values())).position)
        fresh = dict(zip(moved, range(first, first + len(moved)), strict=True))
        return [fresh.get(delivery, delivery) for delivery in deliveries]

    def _forget_dropped(self) -> Iterator[None]:
        """Give up the dead letters whose messages are gone: about 5 us each."""
        for letter in self.state.dead_letters.before(self.store.log.start):
            if self.store.is_expired(letter.position):
                self.state.forget(letter)
            yield

    # --- deadlines --------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Revive by itself from now on; first what became due while nobody ran."""
        self._loop = loop
        self._deadlines.start(loop)
        self.store.space.on_relief.append(self._serve_all)

    def _serve_all(self) -> None:
        for group in self:
            self.serve(group)

    def stop(self) -> None:
        """Revive nothing any more."""
        self._loop = None
        self._deadlines.stop()

    def fire_due(self) -> bool:
        """Revive what is due now, one portion; return whether more may be due. For a clock that is moved by hand."""
        return self._deadlines.fire_due()

    def _expire(self, checkpoints: list[Checkpoint]) -> None:
        now_ms = self.store.now_ms()
        revived: dict[int, list[bytes]] = {}
        dead: dict[int, list[bytes]] = {}
        later: list[tuple[int, Checkpoint]] = []
        late_ms: list[int] = []
        room = self._expire_max
        for checkpoint in checkpoints:
            group = self.state.by_id[checkpoint.group_id]
            if room <= 0:  # of deliveries, each of which costs: the rest is due still, and next
                later.append((checkpoint.deadline_ms, checkpoint))
                continue
            room -= checkpoint.open.bit_count()
            again_ms = 0
            for index in checkpoint.open_indexes():
                attempt = checkpoint.entry(index).attempt
                counts = not checkpoint.suspended
                is_last = counts and attempt >= group.attempts_max
                due_ms = checkpoint.deadline_ms
                if counts and not is_last:
                    due_ms += backoff_ms(group.backoff, attempt)
                if due_ms > now_ms:
                    again_ms = min(again_ms or due_ms, due_ms)
                    continue
                ended = dead if is_last else revived
                ended.setdefault(checkpoint.group_id, []).append(REFERENCE.pack(checkpoint.position, index))
                late_ms.append(now_ms - due_ms)
            if again_ms:
                later.append((again_ms, checkpoint))
        for group_id, references in revived.items():
            self.append_references(Kind.POP_REVIVED, self.state.by_id[group_id], references)
            self.counters.revived += len(references)
        for group_id, references in dead.items():
            group = self.state.by_id[group_id]
            self._append_dead_letters(group, references, Reason.ATTEMPTS_EXHAUSTED)
            self.serve(group)  # there is room again below the in-flight limit
        # Only now: where the disk is full, all of them come again by themselves.
        for due_ms, checkpoint in later:
            self._deadlines.schedule(due_ms, checkpoint)
        self.counters.revive_late_ms_max = max(self.counters.revive_late_ms_max, 0, *late_ms)
        for each_ms in late_ms:
            self.counters.revive_lateness.add(each_ms, 1)


def check_attempt_id(attempt_id: str) -> str:
    """Return an attempt id if a pop may have it: it stands in the checkpoint's record. Raises RequestInvalid."""
    if len(attempt_id.encode()) > ATTEMPT_ID_BYTES_MAX:
        raise RequestInvalid(f"attempt_id has more than {ATTEMPT_ID_BYTES_MAX} bytes")
    return attempt_id


def _expires_at_ms(data: bytes) -> int:
    """Return when the message of a record expires, in ms since 1970; 0 for never. The properties only: a body may be large."""
    properties = properties_of(data)
    return decode_properties(properties).expires_at_ms if b'"expires_at_ms"' in properties else 0


def _check_dead_letters(name: str, topic_filter: str) -> None:
    """Raise RequestInvalid or GroupInvalid unless the group `name` may pop `topic_filter`, which starts with '$'."""
    if not topic_filter.startswith(DEAD_LETTERS):
        raise RequestInvalid(f"the filter {topic_filter[:80]!r} can't be popped: of '$' topics only $dlq/GROUP can")
    if check_group_name(topic_filter.removeprefix(DEAD_LETTERS)) == name:
        raise RequestInvalid(f"the group {name!r} can't pop its own dead letters: what fails again would come back for ever")
