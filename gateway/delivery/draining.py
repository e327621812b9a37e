"""A subscription that its client has ended, and that still sends for others.

If several subscriptions of a client match a message, the oldest sends it once and the others skip it (see
`delivery.subscription`). When the oldest ends while its cursor is behind theirs, the messages in between must still be sent for
those that remain [MQTT-3.3.4-2]. Nothing more is sent for the filter that ended, though MQTT 5.0, 3.10.4 would allow it.

A draining subscription reads on from its cursor to where its queue ended at the UNSUBSCRIBE. It sends what the younger
subscriptions match that existed then, with their options. The younger ones continue to skip what was in their queues then, and
send themselves what came later; but not before the draining one is done, because the messages of a topic keep their order
[MQTT-4.6.0-6]. The *cuts* name the border: the offset at which each younger one's queue ended at that moment. So nothing is
lost, and nothing is sent twice. The draining subscription is drained when all younger ones are past their cuts, or none of them
exists any more.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from penstock.gateway.delivery.encoding import DeliveryOptions
from penstock.gateway.delivery.subscription import Subscription, combined_options
from penstock.store import topics
from penstock.store.queues.lightqueue import ENTRY_BYTES, LightQueue

if TYPE_CHECKING:
    from penstock.gateway.delivery.client_subscriptions import ClientSubscriptions


class DrainingSubscription(Subscription):
    """A subscription that has ended and still sends for younger ones.

    Parameters:
        subscriber, topic_filter, queue, number: of the subscription that ended.
        cursor: offset of the next message that it had to send.
        end: offset at which its queue ended then.
        cuts: by number of a younger subscription that matches some of the same topics: the offset at which that one's queue
            ended then.
    """

    __slots__ = ("_end", "cuts")

    def __init__(
        self,
        subscriber: ClientSubscriptions,
        topic_filter: str,
        queue: LightQueue,
        number: int,
        cursor: int,
        end: int,
        cuts: dict[int, int],
    ) -> None:
        super().__init__(subscriber, topic_filter, queue, 0, 0)
        self.number = number
        self.cursor = cursor
        self._end = end
        self.cuts = cuts
        self.overlaps = True

    @property
    def end(self) -> int:
        return self._end

    def is_drained(self, others: Collection[Subscription]) -> bool:
        """Return whether none of the other subscriptions of the session needs it any more."""
        cuts = self.cuts
        younger = [one for one in others if one.number in cuts]
        return not younger or (self.cursor >= self._end and all(one.cursor >= cuts[one.number] for one in younger))

    def start(self) -> None:
        self.update_is_own()
        if self.cursor < self._end:
            self.outlet.lagging[self] = None

    def stop(self) -> None:
        self.outlet.lagging.pop(self, None)

    def release(self) -> None:
        if self.filter not in self.subscriber.by_filter:  # A new subscription to the same filter has the same queue.
            super().release()

    def update_is_own(self) -> None:
        self.is_own = True

    def sends_for(self, one: Subscription, topic: str) -> bool:
        """Return whether it sends the message of this topic that is at the cursor of a younger subscription."""
        return self.cuts.get(one.number, -1) >= one.cursor and self.matches(topic)

    def blocks(self, one: Subscription) -> bool:
        """Return whether a younger subscription must wait at its cut."""
        return self.cursor < self._end and one.cursor >= self.cuts.get(one.number, one.cursor + 1)

    def _up_to_cut(self, first: int, entries: bytes) -> bytes:
        return super()._up_to_cut(first, entries)[: max(self._end - first, 0) * ENTRY_BYTES]

    def _catch_up(self) -> None:
        self.cursor = self._end
        self.outlet.lagging.pop(self, None)
        self.outlet.pump_soon()  # The subscriptions that it has blocked go on.

    def _options_with_siblings(self, topic: bytes, publisher: str) -> DeliveryOptions | None:
        name = topic.decode()
        matching = self.subscriber.matching(name)
        if (matching and matching[0].number < self.number) or self._is_sent_by_predecessor(name):
            return None
        younger = tuple(one for one in matching if one.number in self.cuts)
        return combined_options(younger, publisher) if younger else None


def drain(subscription: Subscription, others: Collection[Subscription]) -> DrainingSubscription | None:
    """Return what a subscription that ends becomes if others rely on it; None if none does.

    What was appended so far must be committed.

    Args:
        subscription: the one that ends; the session still has it.
        others: the other subscriptions of the session, with those that are draining.
    """
    if subscription.is_shared or not (subscription.overlaps and subscription.combines):
        return None
    cuts: dict[int, int] = {}
    is_behind = subscription.cursor < subscription.end
    for one in others:
        if one.number > subscription.number and not one.is_shared and topics.overlap(one.filter, subscription.filter):
            cuts[one.number] = one.end
            is_behind = is_behind or one.cursor < one.end
    if not (cuts and is_behind):
        return None
    number, cursor, end = subscription.number, subscription.cursor, subscription.end
    found = DrainingSubscription(subscription.subscriber, subscription.filter, subscription.queue, number, cursor, end, cuts)
    found.maybe_sent = subscription.maybe_sent
    return found
