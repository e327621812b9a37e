"""The fanout of a light queue: it encodes each new batch once for all subscriptions that have the same delivery options."""

from __future__ import annotations

from typing import Protocol

from penstock.gateway.delivery.encoding import EncodedBatch, encode_batch
from penstock.gateway.delivery.options import DeliveryOptions
from penstock.gateway.delivery.outlet import Outlet
from penstock.gateway.entry_topics import topics_of
from penstock.store.lightqueue import ENTRY_BYTES, LightQueue
from penstock.store.store import Store


class FanoutMember(Protocol):
    """A subscription, as the fanout of its queue sees it."""

    @property
    def outlet(self) -> Outlet:
        """Where its packets go."""

    @property
    def live(self) -> bool:
        """Whether it has caught up with its queue and takes new batches."""

    @property
    def cursor(self) -> int:
        """Offset of the next message that it sends."""

    @property
    def is_own(self) -> bool:
        """Whether its packets are its client's alone, so that none of them can be shared."""

    @property
    def key(self) -> int:
        """A number that is the same for all members whose packets are the same."""

    @property
    def options(self) -> DeliveryOptions:
        """How it gets its messages."""

    def deliver(self, batch: EncodedBatch, next_offset: int, /) -> bool:
        """Send a batch; return False, and send nothing, if it can't be sent as it is."""

    def fall_behind(self) -> None:
        """Stop being live."""

    def pump(self) -> None:
        """Send from the cursor what can be sent now."""


class Fanout:
    """The subscriptions to one light queue.

    Parameters:
        store: has the messages.
        queue: watched as long as there are subscriptions.
    """

    __slots__ = ("_members", "_queue", "_store")

    def __init__(self, store: Store, queue: LightQueue) -> None:
        self._store = store
        self._queue = queue
        self._members: dict[FanoutMember, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: FanoutMember) -> None:
        """Deliver to a subscription from now on, whenever it is live."""
        if not self._members:
            self._queue.watchers.append(self._deliver)
        self._members[member] = None

    def remove(self, member: FanoutMember) -> None:
        """Deliver to a subscription no longer."""
        self._members.pop(member, None)
        if not self._members and self._deliver in self._queue.watchers:
            self._queue.watchers.remove(self._deliver)

    def _deliver(self, queue: LightQueue, offset: int, entries: bytes) -> None:
        """Send a new batch to all members that are live. The hot path of delivery: see the row `fanout` of `bench mqtt`."""
        next_offset = offset + len(entries) // ENTRY_BYTES
        batches: dict[int, EncodedBatch] = {}
        topics: frozenset[bytes] | None = None
        for member in tuple(self._members):
            if not member.live:
                continue
            outlet = member.outlet
            if not outlet.writable:
                member.fall_behind()
                continue
            permissions = outlet.permissions
            if permissions is not None and not permissions.passes_all:
                if topics is None:
                    topics = frozenset(topics_of(self._store, entries))
                if not permissions.passes(topics):  # The member decides about each message by itself.
                    member.fall_behind()
                    member.pump()
                    continue
            # A member that joined within this batch, or whose packets are its client's alone, reads from its cursor.
            if member.cursor != offset or member.is_own:
                member.fall_behind()
                member.pump()
                continue
            batch = batches.get(member.key)
            if batch is None:
                batch = batches[member.key] = encode_batch(self._store, entries, member.options)
            if not member.deliver(batch, next_offset):
                member.fall_behind()
                member.pump()


class Fanouts:
    """The fanouts of a node, one for each light queue that has subscriptions.

    Parameters:
        store: has the messages.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_queue: dict[int, Fanout] = {}

    def __len__(self) -> int:
        """Return the number of light queues that have subscriptions."""
        return len(self._by_queue)

    def add(self, queue: LightQueue, member: FanoutMember) -> None:
        """Deliver new batches of a light queue to a subscription."""
        fanout = self._by_queue.get(queue.id)
        if fanout is None:
            fanout = self._by_queue[queue.id] = Fanout(self._store, queue)
        fanout.add(member)

    def remove(self, queue: LightQueue, member: FanoutMember) -> None:
        """Deliver to a subscription no longer. Its queue's fanout ends with the last subscription."""
        fanout = self._by_queue[queue.id]
        fanout.remove(member)
        if not fanout:
            del self._by_queue[queue.id]
