"""The core of POP: groups, checkpoints, acknowledgements, revival, dead letters. It knows no network.

A pop takes visible messages, appends one checkpoint record for all of them and hands them out. Each is invisible to its
group until it is acknowledged, or until the invisible time is over: then it is revived into the group's retry queue as a
new attempt, or, after the last attempt, put among the dead letters. The body is never copied: entries point at it.

Every decision is a record, taken on one loop, so a message is either acknowledged or revived, never both. What the records
make of groups and checkpoints is in `pop.state`; here is what decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

import numpy as np
import orjson
import structlog

from pop.checkpoint import FROM_QUEUE, FROM_RETRY, Checkpoint
from pop.deadlines import Deadlines
from pop.errors import Overloaded, RequestInvalid
from pop.group import Group, check_group_name
from pop.handle import Delivery, Handles
from pop.options import PopOptions
from pop.poll import Poll, Taken
from pop.state import PopState
from store.errors import DiskFull
from store.lightqueue import LightQueue, Start, entries_array
from store.record import (
    CHANGE_ENTRY,
    CHECKPOINT_ENTRY_DTYPE,
    KIND_AT,
    POP_FIXED,
    REFERENCE,
    Flag,
    Kind,
)
from store.store import Store
from timer.options import TimerOptions

logger = structlog.get_logger("pop")

RESPONSE_BYTES = 3 * 1024 * 1024
"""A pop stops at this many bytes of records, after the first: gRPC clients refuse answers above 4 MiB by default."""

REFERENCES_MAX = 16_384
"""Deliveries that one record settles: 192 KiB, so that it fits into any segment, however many are due at an instant."""


class Outcome(Enum):
    """What came of an acknowledgement, or of a change of invisible time. The names are those of the API's codes."""

    OK = "done"
    INVALID_HANDLE = "this is not a handle that this node gave to this group"
    HANDLE_EXPIRED = "the invisible time was over: the message comes, or came, back as a new attempt"
    ALREADY_ACKED = "the delivery was acknowledged before"
    HANDLE_REPLACED = "a change of invisible time gave a newer handle: use that one"
    INVALID_INVISIBLE_TIME = "the invisible time must be at least 0 ms and at most pop.invisible_ms_max"


class Change(NamedTuple):
    """A wish to move the deadline of a delivery."""

    handle: str
    invisible_ms: int
    suspend: bool = False


class Counters:
    """What POP has done since the start. Plain integers: `millrace.metrics` reads them."""

    __slots__ = ("acked", "dead_lettered", "handed_out", "refused", "revive_late_ms_max", "revived")

    def __init__(self) -> None:
        self.handed_out = 0
        self.acked = 0
        self.revived = 0
        self.dead_lettered = 0
        self.refused = 0
        self.revive_late_ms_max = 0


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
        self.state = PopState(store.log, store.queues, self._deadlines, self._arrived)

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

        Raises:
            GroupInvalid, TopicInvalid: no group may be called like that; the filter breaks MQTT 5.0, 4.7.
            Overloaded, LimitExceeded: `pop.groups_max` or `store.queues_max` is reached.
        """
        group = self.state.groups.get((name, topic_filter))
        return group if group is not None else self._create(name, topic_filter, start)

    def _create(self, name: str, topic_filter: str, start: Start) -> Group:
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
        self._append(Kind.GROUP_CREATED, group_id, name, properties=orjson.dumps(row))
        return self.state.groups[name, topic_filter]

    def _append(
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
        group = self.state.by_id.get(group_id)
        fixed = POP_FIXED.pack(group_id, group.epoch if group else 0, deadline_ms)
        return self.store.append(kind, fixed, name.encode(), body, properties, flags)

    # --- pop --------------------------------------------------------------------------------------------------------

    def take(self, group: Group, messages_max: int, invisible_ms: int) -> Taken | None:
        """Hand out up to `messages_max` visible messages of a group for `invisible_ms`; None where there are none.

        None, too, where the disk has no room to note who got them: they wait, as they do for a consumer.

        Nothing may be answered before `Store.when_durable`: until then a crash could undo the checkpoint.
        """
        room = min(messages_max, self.options.in_flight_max - group.in_flight)
        if room <= 0 or group.visible <= 0:
            return None
        body = self._choose(group, room)
        if not body:
            return None
        deadline_ms = self.store.now_ms() + invisible_ms
        try:
            position = self._append(Kind.POP_CHECKPOINT, group.id, group.name, body, deadline_ms=deadline_ms)
        except DiskFull:
            return None
        checkpoint = self.state.checkpoints[position]
        self.counters.handed_out += checkpoint.count
        records = [self._read(entry.position, entry.size) for entry in checkpoint.entries()]
        if None in records:
            self._bury(group, checkpoint, [index for index, data in enumerate(records) if data is None])
        return Taken(checkpoint, records)

    def _append_references(self, kind: Kind, group: Group, references: list[bytes], flags: int = 0) -> None:
        for at in range(0, len(references), REFERENCES_MAX):
            self._append(kind, group.id, group.name, b"".join(references[at : at + REFERENCES_MAX]), flags=flags)

    def _choose(self, group: Group, room: int) -> bytes:
        """Return the entries of the next messages: new ones and retries in turn, so that neither waits for the other."""
        new, retries = group.visible_new, group.visible_retries
        retries_first = group.retry_turn
        if new > 0 and retries > 0:
            share = room // 2 + (room % 2 if group.retry_turn else 0)
            retries = min(retries, max(share, room - new))
            group.retry_turn = not group.retry_turn
        retries = min(retries, room)
        taken = [self._fresh(group, room - retries), _checkpoint_entries(group.retry, group.retry_cursor, retries, FROM_RETRY)]
        if retries_first:
            taken.reverse()  # large messages fill an answer with what comes first: that, too, is in turn
        entries = np.concatenate(taken)
        if not len(entries):
            return b""
        fitting = int(np.searchsorted(np.cumsum(entries["size"], dtype=np.int64), RESPONSE_BYTES, side="right"))
        return entries[: max(fitting, 1)].tobytes()

    def _fresh(self, group: Group, count: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """Return up to `count` messages that were never handed out. What retention has given up is passed over for good."""
        while True:
            entries = _checkpoint_entries(group.queue, group.cursor, count, FROM_QUEUE)
            expired = entries["position"] < self.store.retention.expires_before
            if not expired.any():
                return entries
            gone = [bool(old) and self.store.is_expired(int(at)) for old, at in zip(expired, entries["position"], strict=True)]
            if not all(gone):
                return np.delete(entries, np.flatnonzero(gone))
            group.cursor = int(entries["offset"][-1]) + 1

    def _read(self, position: int, size: int) -> bytes | None:
        data = self.store.read_intact(position, size)
        # Of another kind is what repair has put in the place of a message.
        return data if data is not None and data[KIND_AT] == Kind.MESSAGE else None

    def _bury(self, group: Group, checkpoint: Checkpoint, indexes: Iterable[int]) -> None:
        """Put deliveries whose record is gone among the dead letters: one that can't be read must not stop the others."""
        references = [REFERENCE.pack(checkpoint.position, index) for index in indexes]
        logger.error("message.unreadable", group=group.name, filter=group.filter, checkpoint=checkpoint.position)
        try:
            self._dead_letters(group)
            self._append_references(Kind.POP_DEAD_LETTER, group, references)
        except DiskFull:
            return  # they stay open, and are found unreadable again when their time is over
        self.counters.dead_lettered += len(references)

    # --- long polls -------------------------------------------------------------------------------------------------

    async def pop(self, group: Group, messages_max: int, invisible_ms: int, wait_ms: int) -> Taken | None:
        """As `take`, but wait up to `wait_ms` for the first message. A call that is cancelled takes nothing.

        Raises:
            Overloaded: `pop.waiters_max` calls wait already.
        """
        taken = self.take(group, messages_max, invisible_ms) if not group.polls else None
        if taken is not None or wait_ms <= 0:
            return taken
        if self.waiting >= self.options.waiters_max:
            self.counters.refused += 1
            raise Overloaded(f"{self.waiting} pops are waiting on this node, which is the limit: see pop.waiters_max")
        poll = Poll(asyncio.get_running_loop().create_future(), messages_max, invisible_ms)
        group.polls.append(poll)
        self.waiting += 1
        try:
            await asyncio.wait((poll.future,), timeout=wait_ms / 1000)
        except asyncio.CancelledError:
            if poll.future.done():
                self.release(poll.future.result().checkpoint)
            raise
        finally:
            self.waiting -= 1
            if not poll.future.done():
                group.polls.remove(poll)
        return poll.future.result() if poll.future.done() else None

    def _arrived(self, group: Group) -> None:
        if group.polls:
            self.serve(group)

    def serve(self, group: Group) -> None:
        """Give what is visible to the polls that wait, oldest first."""
        while group.polls and group.visible > 0:
            poll = group.polls[0]
            taken = self.take(group, poll.messages_max, poll.invisible_ms)
            if taken is None:
                return  # the in-flight limit
            group.polls.popleft()
            poll.future.set_result(taken)

    def release(self, checkpoint: Checkpoint) -> None:
        """Return what is open of a checkpoint that never reached its consumer: visible at once, and not an attempt."""
        group = self.state.by_id[checkpoint.group_id]
        references = [REFERENCE.pack(checkpoint.position, index) for index in checkpoint.open_indexes()]
        try:
            self._append_references(Kind.POP_REVIVED, group, references, Flag.SUSPENDED)
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
        for group_id, references in chosen.items():
            self._append_references(Kind.POP_ACK, self.state.by_id[group_id], references)
            self.counters.acked += len(references)
            self.serve(self.state.by_id[group_id])
        return outcomes

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
        entries = []
        for delivery in deliveries:
            entry = self.state.checkpoints[delivery.checkpoint].entry(delivery.index)
            entries.append(CHANGE_ENTRY.pack(delivery.checkpoint, delivery.index, *entry))
        position = self._append(
            Kind.POP_INVISIBLE_CHANGED,
            group_id,
            self.state.by_id[group_id].name,
            b"".join(entries),
            deadline_ms=self.store.now_ms() + invisible_ms,
            flags=Flag.SUSPENDED if suspend else 0,
        )
        checkpoint = self.state.checkpoints[position]
        return self.handles.deliveries(position, checkpoint.pop_ms, group_id, checkpoint.count)

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

    # --- deadlines --------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Revive by itself from now on; first what became due while nobody ran."""
        self._deadlines.start(loop)
        self.store.space.on_relief.append(self._serve_all)

    def _serve_all(self) -> None:
        for group in self:
            self.serve(group)

    def stop(self) -> None:
        """Revive nothing any more."""
        self._deadlines.stop()

    def fire_due(self) -> bool:
        """Revive what is due now, one portion; return whether more may be due. For a clock that is moved by hand."""
        return self._deadlines.fire_due()

    def backoff_ms(self, attempt: int) -> int:
        """Return how long after its deadline a message whose attempt `attempt` failed becomes visible again."""
        backoff = self.options.retry_backoff_ms
        return backoff[min(attempt, len(backoff)) - 1] if backoff else 0

    def _expire(self, checkpoints: list[Checkpoint]) -> None:
        now_ms = self.store.now_ms()
        revived: dict[int, list[bytes]] = {}
        dead: dict[int, list[bytes]] = {}
        room = self._expire_max
        for checkpoint in checkpoints:
            if room <= 0:  # of deliveries, each of which costs: the rest is due still, and next
                self._deadlines.schedule(checkpoint.deadline_ms, checkpoint)
                continue
            room -= checkpoint.open.bit_count()
            again_ms = 0
            for index in checkpoint.open_indexes():
                attempt = checkpoint.entry(index).attempt
                counts = not checkpoint.suspended
                due_ms = checkpoint.deadline_ms + (self.backoff_ms(attempt) if counts else 0)
                if due_ms > now_ms:
                    again_ms = min(again_ms or due_ms, due_ms)
                    continue
                ended = dead if counts and attempt >= self.options.attempts_max else revived
                ended.setdefault(checkpoint.group_id, []).append(REFERENCE.pack(checkpoint.position, index))
                self.counters.revive_late_ms_max = max(self.counters.revive_late_ms_max, now_ms - due_ms)
            if again_ms:
                self._deadlines.schedule(again_ms, checkpoint)
        for group_id, references in revived.items():
            self._append_references(Kind.POP_REVIVED, self.state.by_id[group_id], references)
            self.counters.revived += len(references)
        for group_id, references in dead.items():
            group = self.state.by_id[group_id]
            self._dead_letters(group)
            self._append_references(Kind.POP_DEAD_LETTER, group, references)
            self.counters.dead_lettered += len(references)
            self.serve(group)  # there is room again below the in-flight limit

    def _dead_letters(self, group: Group) -> LightQueue:
        return self.store.queues.declare(f"$dlq/{group.name}", f"group:{group.id}")


def _checkpoint_entries(queue: LightQueue, offset: int, count: int, source: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """Return checkpoint entries for the next `count` entries of a queue from `offset` on."""
    offset, found = queue.read_from(offset, count)
    entries = entries_array(found)
    chosen = np.zeros(len(entries), dtype=CHECKPOINT_ENTRY_DTYPE)
    chosen["position"], chosen["size"] = entries["position"], entries["size"]
    chosen["offset"] = np.arange(offset, offset + len(entries))
    chosen["attempt"] = entries["aux"] + 1 if source == FROM_RETRY else 1
    chosen["source"] = source
    return chosen


def _check_dead_letters(name: str, topic_filter: str) -> None:
    """Raise RequestInvalid or GroupInvalid unless the group `name` may pop `topic_filter`, which starts with '$'."""
    if not topic_filter.startswith("$dlq/"):
        raise RequestInvalid(f"the filter {topic_filter[:80]!r} can't be popped: of '$' topics only $dlq/GROUP can")
    if check_group_name(topic_filter.removeprefix("$dlq/")) == name:
        raise RequestInvalid(f"the group {name!r} can't pop its own dead letters: what fails again would come back for ever")
