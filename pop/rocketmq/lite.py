"""Lite subscriptions: which clients have subscribed to which lite topics, each a group's filter below a parent topic.

The settings of a lite topic's group name its subscribers, so subscriptions survive restarts of the node. A client that
continues to poll gets its messages, whether it has synchronised its lite topics again or not. A group that a lite subscription
created ends when it has no subscribers. It ends as soon as nothing of it is in flight if the last client unsubscribed. If that
client ended or fell silent, the group ends after `PopOptions.lite_idle_ms`: the client may return, and then continues
where it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from penstock.pop.access.auditedcall import note_change
from penstock.pop.access.caller import causer_of_call
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.groups import Groups, ResetTo
from penstock.pop.core.settings import LITE_CLIENTS_MAX, ConsumerGroupSettings
from penstock.pop.rocketmq.clients import ConnectedClient, ConnectedClients
from penstock.pop.rocketmq.settings import LITE_SUBSCRIPTIONS_MAX
from penstock.pop.rocketmq.status import Code, Refused
from penstock.store.errors import DiskFull
from penstock.store.queues.lightqueue import Start

ENDED_PER_CHECK_MAX = 200
"""Maximum number of subscriptions of clients that are gone, and of groups without subscribers, that one check ends."""


class LiteSubscriptions:
    """The lite subscriptions of a node.

    Parameters:
        groups: Creates, configures, resets and deletes groups.
        clients: The clients that use the node. This object keeps their `lite`.
        now_ms: Returns the current time in ms.
        now_for: Returns the current time in ms for what was set at a time: see `Store.now_for`.
        idle_ms: Time in ms after which a group without subscribers ends (`PopOptions.lite_idle_ms`).
    """

    def __init__(
        self,
        groups: Groups,
        clients: ConnectedClients,
        now_ms: Callable[[], int],
        now_for: Callable[[int], int],
        idle_ms: int,
    ) -> None:
        self._groups = groups
        self._clients = clients
        self._now_ms = now_ms
        self._now_for = now_for
        self._idle_ms = idle_ms
        self._gone: deque[tuple[str, str, str, str]] = deque()
        """Client id, group, parent and filter of each subscription whose client is gone."""

    def restore(self, now_ms: int) -> None:
        """Restore the subscriptions from before a restart. Their clients get some time to call again."""
        for group in self._groups:
            for client_id, parent in group.settings.lite:
                try:
                    client = self._clients.heard_from(client_id, now_ms)
                except Refused:  # There are more clients than the node looks after.
                    self._gone.append((client_id, group.name, parent, group.filter))
                else:
                    client.lite.setdefault((group.name, parent), {})[group.filter] = None

    def replace_all(
        self,
        client: ConnectedClient,
        name: str,
        parent: str,
        *,
        filters: dict[str, None],
        named: Iterable[str],
        start: Start | None,
    ) -> None:
        """Subscribe a client to some lite topics of a parent topic, and unsubscribe it from all others of that parent.

        Args:
            client: The subscriber.
            name: Name of its group.
            parent: The parent topic.
            filters: Filters of all lite topics that the client shall have.
            named: Those of `filters` that the request names.
            start: Where `named` are read from. None: a group continues, and a new one starts at the earliest message.

        Raises:
            Refused: LITE_SUBSCRIPTION_QUOTA_EXCEEDED.
            GroupUnknown, GroupInvalid, TopicInvalid, Overloaded, LimitExceeded, DiskFull: As `Groups.get_or_create`.
        """
        if len(filters) > LITE_SUBSCRIPTIONS_MAX or len(client.lite.keys() | {(name, parent)}) > LITE_SUBSCRIPTIONS_MAX:
            raise quota_exceeded()
        had = client.lite.setdefault((name, parent), {})
        asked = set(named)
        for topic_filter in filters:
            group = self._groups.get(name, topic_filter)
            is_new = group is None
            self._subscribe(group, client.id, name, parent, topic_filter, start)
            had[topic_filter] = None
            if start is not None and not is_new and topic_filter in asked:
                to = ResetTo(time_ms=start) if isinstance(start, int) else ResetTo(end=start)
                self._groups.reset(name, topic_filter, to)
                note_change(group=name, filter=topic_filter, to=start)
        for topic_filter in [each for each in had if each not in filters]:
            self._unsubscribe(client.id, name, parent, topic_filter, self._now_ms())
            del had[topic_filter]

    def groups_of(self, client: ConnectedClient, name: str, parent: str) -> list[ConsumerGroup]:
        """Return the groups of a client's lite topics."""
        found = (self._groups.get(name, topic_filter) for topic_filter in client.lite.get((name, parent), {}))
        return [group for group in found if group is not None]

    def client_gone(self, client: ConnectedClient) -> None:
        """Note that a client is gone. Its subscriptions end in later calls of `end_expired`."""
        for (name, parent), filters in client.lite.items():
            self._gone.extend((client.id, name, parent, topic_filter) for topic_filter in filters)

    def end_expired(self, now_ms: int) -> None:
        """End some subscriptions of clients that are gone, and some groups without subscribers. Called once a second."""
        with suppress(DiskFull):  # The next call tries again.
            for _ in range(min(len(self._gone), ENDED_PER_CHECK_MAX)):
                client_id, name, parent, topic_filter = self._gone[0]
                client = self._clients.get(client_id)
                if client is None or topic_filter not in client.lite.get((name, parent), {}):
                    self._unsubscribe(client_id, name, parent, topic_filter, now_ms + self._idle_ms)
                self._gone.popleft()
            over = [group for group in self._groups if self._is_over(group, now_ms)]
            for group in over[:ENDED_PER_CHECK_MAX]:
                self._groups.delete(group.name, group.filter, is_unused=True)

    def _is_over(self, group: ConsumerGroup, now_ms: int) -> bool:
        ends_ms = group.settings.lite_ends_ms or 0
        return 0 < ends_ms <= now_ms and ends_ms <= self._now_for(ends_ms - self._idle_ms) and not group.in_flight

    def _subscribe(
        self, group: ConsumerGroup | None, client_id: str, name: str, parent: str, topic_filter: str, start: Start | None
    ) -> None:
        """Add a client to the subscribers in the settings of a lite topic's group. Create the group if it does not exist."""
        subscriber = (client_id, parent)
        if group is None:
            self._groups.check_may_create(name, topic_filter)
            settings = ConsumerGroupSettings(lite=(subscriber,), lite_ends_ms=0)
            self._groups.add(name, topic_filter, start or "earliest", settings, causer_of_call())
            return
        settings = group.settings
        if subscriber in settings.lite:
            return
        if len(settings.lite) >= LITE_CLIENTS_MAX:
            raise Refused(
                Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
                f"{LITE_CLIENTS_MAX} clients of the group {name[:80]!r} subscribe to {topic_filter[:80]!r}, which is the limit",
            )
        ends_ms = 0 if settings.is_temporary else None
        self._groups.configure(group, replace(settings, shared=False, lite=(*settings.lite, subscriber), lite_ends_ms=ends_ms))

    def _unsubscribe(self, client_id: str, name: str, parent: str, topic_filter: str, ends_ms: int) -> None:
        """Remove a client from the subscribers of a lite topic. After the last one, the group ends at `ends_ms`."""
        group = self._groups.get(name, topic_filter)
        if group is None or (client_id, parent) not in group.settings.lite:
            return
        settings = group.settings
        remaining = tuple(subscriber for subscriber in settings.lite if subscriber != (client_id, parent))
        ends = settings.lite_ends_ms if remaining or settings.lite_ends_ms is None else max(ends_ms, 1)
        self._groups.configure(group, replace(settings, lite=remaining, lite_ends_ms=ends))


def quota_exceeded() -> Refused:
    """Return the error for a client with too many lite topics."""
    return Refused(
        Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
        f"a client may subscribe to {LITE_SUBSCRIPTIONS_MAX} lite topics of each of {LITE_SUBSCRIPTIONS_MAX} parent topics",
    )
