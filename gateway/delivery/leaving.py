"""A subscription that its client has ended, and that others still rely on.

Of a message that several subscriptions of a client match, the oldest of them sends one, and the others pass it over (see
`subscription`). So when the oldest ends while its cursor is behind theirs, what lies between is still to come, for
those that remain [MQTT-3.3.4-2]. For the filter that ended nothing more is sent, though MQTT 5.0, 3.10.4 would allow it.

One that is leaving reads on from its cursor to where its queue ended at the UNSUBSCRIBE, and sends what the younger ones that
were there match, in their terms. They go on to pass over what stood in their queues by then, and send themselves what came
later; but not before it is done, for the messages of a topic keep their order [MQTT-4.6.0-6]. Where that is, its *cuts* say:
the end of each one's queue at that instant. So nothing is lost, and nothing comes twice. It has left when all of them are past
their cuts, or when none of them is there any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.gateway.delivery.subscription import Subscription, together
from penstock.store import topics
from penstock.store.lightqueue import ENTRY_BYTES, LightQueue

if TYPE_CHECKING:
    from penstock.gateway.delivery.encoding import Terms
    from penstock.gateway.sessions.session import Session


class Leaving(Subscription):
    """What is left of a subscription.

    Parameters:
        session, topic_filter, queue: as of the subscription.
        number: the subscription's.
        cursor: how far it has got.
        stop: where its queue ended when it did.
        cuts: by number, where the queues of the younger ones that match some of the same topics ended then.
    """

    __slots__ = ("cuts", "stop")

    def __init__(
        self, session: Session, topic_filter: str, queue: LightQueue, number: int, cursor: int, stop: int, cuts: dict[int, int]
    ) -> None:
        super().__init__(session, topic_filter, queue, 0, 0)
        self.number = number
        self.cursor = cursor
        self.stop = stop
        self.cuts = cuts
        self.overlaps = True

    @property
    def end(self) -> int:
        return self.stop

    @property
    def has_left(self) -> bool:
        """Whether nobody needs it any more."""
        session, cuts = self.session, self.cuts
        younger = [one for one in (*session.subscriptions.values(), *session.leaving) if one.number in cuts]
        return not younger or (self.cursor >= self.stop and all(one.live or one.cursor >= cuts[one.number] for one in younger))

    def join(self) -> None:
        if self.cursor < self.stop:
            self.connection.lagging[self] = None

    def rest(self) -> None:
        self.connection.lagging.pop(self, None)

    def release(self) -> None:
        if self.filter not in self.session.subscriptions:  # another one to the same filter has the same queue
            super().release()

    def settle(self) -> None:
        self.is_own = True

    def sends_for(self, one: Subscription, topic: str) -> bool:
        """Return whether it is the one that sends a message of a topic in front of a younger one's cursor."""
        return self.cuts.get(one.number, -1) >= one.cursor and self.matches(topic)

    def holds_back(self, one: Subscription) -> bool:
        """Return whether a younger one must wait at its cut."""
        return self.cursor < self.stop and one.cursor >= self.cuts.get(one.number, one.cursor + 1)

    def _within_cuts(self, first: int, entries: bytes) -> bytes:
        return super()._within_cuts(first, entries)[: max(self.stop - first, 0) * ENTRY_BYTES]

    def _caught_up(self) -> None:
        self.cursor = self.stop
        self.connection.lagging.pop(self, None)
        self.connection.pump_soon()  # those that it held back go on

    def _together(self, topic: bytes, publisher: str) -> Terms | None:
        name = topic.decode()
        matching = self.session.matching(name)
        if (matching and matching[0].number < self.number) or self._is_sent_by_leaving(name):
            return None
        younger = tuple(one for one in matching if one.number in self.cuts)
        return together(younger, publisher) if younger else None


def leave(subscription: Subscription) -> Leaving | None:
    """Return what is left of a subscription that ends; None where nobody relies on it.

    It is one of its session still, and what was appended is committed.
    """
    session = subscription.session
    if subscription.is_shared or not (subscription.overlaps and subscription.terms.is_v5):
        return None
    cuts: dict[int, int] = {}
    is_behind = subscription.cursor < subscription.end
    for one in (*session.subscriptions.values(), *session.leaving):
        if one.number > subscription.number and not one.is_shared and topics.overlap(one.filter, subscription.filter):
            cuts[one.number] = one.end
            is_behind = is_behind or one.cursor < one.end
    if not (cuts and is_behind):
        return None
    number, cursor, stop = subscription.number, subscription.cursor, subscription.end
    return Leaving(session, subscription.filter, subscription.queue, number, cursor, stop, cuts)
