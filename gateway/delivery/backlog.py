"""Bounds what waits for one client: the option `mqtt.session_queued_max`."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.gateway.counters import GatewayCounters
from penstock.gateway.delivery.subscription import Subscription
from penstock.gateway.logbook import Logbook
from penstock.gateway.sessions.journal import SessionJournal
from penstock.gateway.sessions.session import Session


class BacklogLimit:
    """The limit on the backlog of each client.

    Parameters:
        messages_max: messages that may wait for one client; 0 for no limit.
        counters: of the gateway.
        logbook: for events that clients cause.
        journal: records the progress of sessions.
    """

    def __init__(self, messages_max: int, counters: GatewayCounters, logbook: Logbook, journal: SessionJournal) -> None:
        self.messages_max = messages_max
        self._counters = counters
        self._logbook = logbook
        self._journal = journal

    def apply(self, session: Session, lagging: Sequence[Subscription]) -> None:
        """Skip what waits for a client beyond the limit.

        The longest queues are cut to one length, from their oldest messages on. So a flood of one topic doesn't displace what
        waits of other topics, and no message has to be read.

        Args:
            session: of the client.
            lagging: its subscriptions that are not live.
        """
        if sum(one.end - one.cursor for one in lagging) <= self.messages_max:
            return
        # Expired messages don't wait.
        waiting = [max(one.queue.count_from(one.cursor) - one.queue.count_from(one.end), 0) for one in lagging]
        length = common_length(waiting, self.messages_max)
        dropped = 0
        for one, count in zip(lagging, waiting, strict=True):
            if count > length:
                dropped += count - length
                one.cursor = one.queue.offset_after(one.cursor, count - length)
        if dropped:
            self._counters.queued_dropped += dropped
            self._logbook.note("session.queued_dropped", client=session.client_id, messages=dropped)
            if session.lasts:
                self._journal.mark(session)


def common_length(lengths: Sequence[int], total: int) -> int:
    """Return the length to which the longest queues must be cut, so that all queues together have `total` messages at most."""
    remaining = total
    for number, length in enumerate(ordered := sorted(lengths)):
        share = remaining // (len(ordered) - number)
        if length > share:
            return share
        remaining -= length
    return ordered[-1] if ordered else 0
