"""A fanout: all subscriptions to one light queue, served with each batch encoded once for all that have the same terms."""

from __future__ import annotations

from penstock.gateway.auth.access import topics_of
from penstock.gateway.delivery.encoding import Run, encode_run
from penstock.gateway.delivery.subscription import Subscription
from penstock.store.lightqueue import ENTRY_BYTES, LightQueue
from penstock.store.store import Store


class Fanout:
    """The subscriptions to one light queue.

    Parameters:
        store: where the messages are.
        queue: watched from the first subscription to the last.
    """

    __slots__ = ("_queue", "_store", "_subscriptions")

    def __init__(self, store: Store, queue: LightQueue) -> None:
        self._store = store
        self._queue = queue
        self._subscriptions: dict[Subscription, None] = {}

    def __len__(self) -> int:
        return len(self._subscriptions)

    def add(self, subscription: Subscription) -> None:
        """Let a subscription have what comes from now on."""
        if not self._subscriptions:
            self._queue.watchers.append(self._deliver)
        self._subscriptions[subscription] = None

    def remove(self, subscription: Subscription) -> None:
        """Let a subscription have no more."""
        self._subscriptions.pop(subscription, None)
        if not self._subscriptions and self._deliver in self._queue.watchers:
            self._queue.watchers.remove(self._deliver)

    def _deliver(self, queue: LightQueue, offset: int, entries: bytes) -> None:
        """Send a new batch to all that are live: about 1 us a message, and 0.5 us a subscription at QoS 0."""
        next_offset = offset + len(entries) // ENTRY_BYTES
        runs: dict[int, Run] = {}
        topics: frozenset[bytes] | None = None
        for subscription in tuple(self._subscriptions):
            if not subscription.live:
                continue
            connection = subscription.connection
            if not connection.writable:
                subscription.lag()
                continue
            if connection.guard is not None:
                if topics is None:
                    topics = frozenset(topics_of(self._store, entries))
                if not connection.guard.passes(topics):  # what it may have of these is found out one by one
                    subscription.lag()
                    subscription.pump()
                    continue
            # One that joined between this batch's beginning and its end, and one whose packets are its client's alone.
            if subscription.cursor != offset or subscription.is_own:
                subscription.lag()
                subscription.pump()
                continue
            run = runs.get(subscription.key)
            if run is None:
                run = runs[subscription.key] = encode_run(self._store, entries, subscription.terms)
            if not subscription.deliver(run, next_offset):
                subscription.lag()
                subscription.pump()
