"""The fanout of a light queue: it encodes each new batch once for all subscriptions that have the same delivery options."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.gateway.auth.permissions import topics_of
from penstock.gateway.delivery.encoding import EncodedBatch, encode_batch
from penstock.gateway.delivery.mqtttraces import MqttTraces
from penstock.gateway.transport.overtime import Overtime
from penstock.store.histogram import DURATION_BOUNDS_S, Histogram
from penstock.store.queues.lightqueue import ENTRY_BYTES, LightQueue
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.gateway.delivery.subscription import Subscription


AT_ONCE_MAX: Final = 64
"""Members to which a batch is delivered before the fanout looks whether the turn of the loop is over."""

WAITING_MAX: Final = 10_000
"""Maximum number of batches of all fanouts that wait for a later turn. The members of further ones fall behind."""


class _Waiting:
    """A batch that is still to be delivered to some of the members."""

    __slots__ = ("at", "batches", "began_s", "entries", "fresh_from", "members", "offset", "topics")

    def __init__(self, offset: int, entries: bytes, members: tuple[Subscription, ...], fresh_from: int, began_s: float) -> None:
        self.offset = offset
        self.entries = entries
        self.members = members
        self.fresh_from = fresh_from
        """Position of the first record that was written just now. A message that was delayed, for example, is older."""
        self.began_s = began_s
        """When the batch was committed, in monotonic seconds."""
        self.at = 0
        """The index of the member that is next."""
        self.batches: dict[int, EncodedBatch] = {}
        """The encoded batch, by the key of the members that can share it."""
        self.topics: frozenset[bytes] | None = None
        """The topics of the messages, once they are needed."""


class Fanout:
    """The subscriptions to one light queue.

    A commit may have many members to deliver to, in this queue and in others. When the turn of the loop is over, the rest waits
    for later turns. Each member gets the batches in their order: as long as one waits, those that come later wait, too.

    Parameters:
        fanouts: the fanouts to which this one belongs.
        queue: watched as long as there are subscriptions.
    """

    __slots__ = ("_fanouts", "_members", "_queue", "_waiting")

    def __init__(self, fanouts: Fanouts, queue: LightQueue) -> None:
        self._fanouts = fanouts
        self._queue = queue
        self._members: dict[Subscription, None] = {}
        self._waiting: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: Subscription) -> None:
        """Deliver to a subscription from now on, whenever it is live."""
        if not self._members:
            self._queue.watchers.append(self._deliver)
        self._members[member] = None

    def remove(self, member: Subscription) -> None:
        """Deliver to a subscription no longer."""
        self._members.pop(member, None)
        if not self._members and self._deliver in self._queue.watchers:
            self._queue.watchers.remove(self._deliver)

    def _deliver(self, queue: LightQueue, offset: int, entries: bytes) -> None:
        """Send a new batch to all members that are live. The hot path of delivery: see the row `fanout` of `bench mqtt`."""
        fanouts = self._fanouts
        batch = _Waiting(offset, entries, tuple(self._members), fanouts.store.fresh_from, fanouts.now_s())
        if self._waiting or fanouts.is_turn_over(min(len(batch.members), AT_ONCE_MAX)) or not self._go_on(batch):
            self._put_off(batch)

    def _put_off(self, batch: _Waiting) -> None:
        """Let a batch wait for a later turn, after those that wait already."""
        fanouts = self._fanouts
        if fanouts.waiting < WAITING_MAX:
            fanouts.waiting += 1
            if not self._waiting:
                fanouts.overtime.add(self._catch_up)
            self._waiting.append(batch)
            return
        for member in batch.members[batch.at :]:
            if member.live:
                member.fall_behind()
                member.outlet.pump_soon()

    def _catch_up(self) -> None:
        """Go on with the batches that wait."""
        waiting, fanouts = self._waiting, self._fanouts
        try:
            while waiting:
                if self._go_on(waiting[0]):
                    waiting.popleft()
                    fanouts.waiting -= 1
                if fanouts.overtime.is_over():
                    break
        finally:
            if waiting:
                fanouts.overtime.add(self._catch_up)

    def _go_on(self, batch: _Waiting) -> bool:
        """Deliver a batch to the next members, some at least, until the turn is over; return whether all have it."""
        members = batch.members
        while True:
            stop = min(batch.at + AT_ONCE_MAX, len(members))
            self._send(batch, stop)
            if batch.at >= len(members):
                self._fanouts.times.add(self._fanouts.now_s() - batch.began_s)
                return True
            if batch.at < stop or self._fanouts.is_turn_over(AT_ONCE_MAX):
                return False

    def _send(self, found: _Waiting, stop: int) -> None:
        """Deliver a batch to the members before an index; end after the first one that takes long if the turn is over."""
        offset, entries, batches = found.offset, found.entries, found.batches
        next_offset = offset + len(entries) // ENTRY_BYTES
        store, overtime = self._fanouts.store, self._fanouts.overtime
        for member in found.members[found.at : stop]:
            found.at += 1
            if not member.live:
                continue
            outlet = member.outlet
            if not outlet.writable:
                member.fall_behind()
                continue
            permissions = outlet.permissions
            if permissions is not None and not permissions.passes_all and not permissions.passes(self._topics(found)):
                self._read_on(member)  # The member decides about each message by itself.
                continue
            # A member that joined within this batch, or whose packets are its client's alone, reads from its cursor.
            if member.cursor != offset or member.is_own:
                is_skipped = member.cursor == offset and member.overlaps and member.skip(self._topics(found), next_offset)
                if not is_skipped and member.cursor < next_offset:  # It has not read the batch from its queue meanwhile.
                    self._read_on(member)
                if overtime.is_over():
                    return
                continue
            batch = batches.get(member.key)
            if batch is None:
                batch = batches[member.key] = encode_batch(
                    store, entries, member.options, verify_before=found.fresh_from, traces=self._fanouts.traces
                )
            if not member.deliver(batch, next_offset):
                self._read_on(member)

    def _topics(self, found: _Waiting) -> frozenset[bytes]:
        if found.topics is None:
            found.topics = frozenset(topics_of(self._fanouts.store, found.entries))
        return found.topics

    def _read_on(self, member: Subscription) -> None:
        """Let a member read from its cursor: now, or when it is its client's turn. A client has one turn for all of its
        subscriptions, so that many of them hold up no other client."""
        member.fall_behind()
        if self._fanouts.overtime.is_over():
            member.outlet.pump_soon()
        else:
            member.pump()


class Fanouts:
    """The fanouts of a node, one for each light queue that has subscriptions.

    Parameters:
        store: has the messages.
        overtime: bounds what is delivered in one turn of the loop.
        traces: finds the messages whose traces are sampled; None without tracing.
    """

    def __init__(self, store: Store, overtime: Overtime, traces: MqttTraces | None = None) -> None:
        self.store = store
        self.overtime = overtime
        self.traces = traces
        self.now_s = store.clock.monotonic_s
        self.times = Histogram(DURATION_BOUNDS_S)
        """How long it took from a commit until all live subscriptions of a queue had its messages."""
        self.waiting = 0
        """Number of batches that wait for a later turn."""
        self._by_queue: dict[int, Fanout] = {}
        self._sent = 0
        """Members to which was delivered in this turn since the time was last looked at."""
        self._turn = 0
        """The turn in which that was."""

    def __len__(self) -> int:
        """Return the number of light queues that have subscriptions."""
        return len(self._by_queue)

    def is_turn_over(self, members: int) -> bool:
        """Return whether delivering to so many more members has to wait for a later turn."""
        if self._turn != self.overtime.turn:  # Others may have used up its time, but few deliveries never wait.
            self._turn = self.overtime.turn
            self._sent = 0
        self._sent += members
        if self._sent <= AT_ONCE_MAX:
            return False
        is_over = self.overtime.is_over()
        self._sent = AT_ONCE_MAX if is_over else 0  # After the end of its time, each further batch looks, too.
        return is_over

    def add(self, queue: LightQueue, member: Subscription) -> None:
        """Deliver new batches of a light queue to a subscription."""
        fanout = self._by_queue.get(queue.id)
        if fanout is None:
            fanout = self._by_queue[queue.id] = Fanout(self, queue)
        fanout.add(member)

    def remove(self, queue: LightQueue, member: Subscription) -> None:
        """Deliver to a subscription no longer. Its queue's fanout ends with the last subscription."""
        fanout = self._by_queue[queue.id]
        fanout.remove(member)
        if not fanout:
            del self._by_queue[queue.id]
