"""Lite subscriptions: which clients have subscribed to which lite topics, each a group's filter below a parent topic.

Who has subscribed stands in the settings of the lite topic's group, so it holds across restarts of the node: a client that goes
on polling gets what is there, whether it has synchronised its lite topics again or not. A group that a lite subscription made
ends when nobody has subscribed to it any more: as soon as nothing of it is out where the last one has unsubscribed, and after
`pop.lite_idle_ms` where that one ended or fell silent, for it may be back, and finds then where it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from penstock.pop.core.admin import GroupAdmin, ResetTo
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.settings import LITE_CLIENTS_MAX, GroupSettings
from penstock.pop.rocketmq.clients import Client, Clients
from penstock.pop.rocketmq.settings import LITE_SUBSCRIPTIONS_MAX
from penstock.pop.rocketmq.status import Code, Refused
from penstock.store.errors import DiskFull
from penstock.store.lightqueue import Start

ENDED_AT_A_TIME = 200
"""Subscriptions of clients that are gone, and groups that nobody has subscribed to, that are ended in one turn of the loop."""


class LiteSubscriptions:
    """The lite subscriptions of a node.

    Parameters:
        admin: makes and deletes groups.
        clients: those that are there. Their `lite` is kept here.
    """

    def __init__(self, admin: GroupAdmin, clients: Clients) -> None:
        self._admin = admin
        self._core = admin.core
        self._clients = clients
        self._gone: deque[tuple[str, str, str, str]] = deque()
        """Client id, group, parent and filter of subscriptions whose clients are gone."""

    def start(self, now_ms: int) -> None:
        """Take up what was there when the node ended. The clients have some time to come back."""
        for group in self._core:
            for client_id, parent in group.settings.lite:
                try:
                    client = self._clients.seen(client_id, now_ms)
                except Refused:  # more than are looked after
                    self._gone.append((client_id, group.name, parent, group.filter))
                else:
                    client.lite.setdefault((group.name, parent), {})[group.filter] = None

    def sync(
        self, client: Client, name: str, parent: str, *, has: dict[str, None], named: Iterable[str], start: Start | None
    ) -> None:
        """Let a client have subscribed to some lite topics of a parent, and to no others.

        Args:
            client: who says so.
            name: of its group.
            parent: the parent topic.
            has: filters of all its lite topics there.
            named: those of them that the call is about.
            start: from where on these are to be read; None for where the group is, or from the earliest message.

        Raises:
            Refused: LITE_SUBSCRIPTION_QUOTA_EXCEEDED.
            GroupUnknown, GroupInvalid, TopicInvalid, Overloaded, LimitExceeded, DiskFull: as `PopCore.group` raises them.
        """
        if len(has) > LITE_SUBSCRIPTIONS_MAX or len(client.lite.keys() | {(name, parent)}) > LITE_SUBSCRIPTIONS_MAX:
            raise too_many()
        had = client.lite.setdefault((name, parent), {})
        asked = set(named)
        for topic_filter in has:
            group = self._core.state.groups.get((name, topic_filter))
            is_new = group is None
            self._hold(group, client.id, name, parent, topic_filter, start)
            had[topic_filter] = None
            if start is not None and not is_new and topic_filter in asked:
                to = ResetTo(time_ms=start) if isinstance(start, int) else ResetTo(end=start)
                self._admin.reset(name, topic_filter, to)
        for topic_filter in [each for each in had if each not in has]:
            self._release(client.id, name, parent, topic_filter, self._core.store.now_ms())
            del had[topic_filter]

    def groups(self, client: Client, name: str, parent: str) -> list[ConsumerGroup]:
        """Return the groups of a client's lite topics."""
        found = (self._core.state.groups.get((name, topic_filter)) for topic_filter in client.lite.get((name, parent), {}))
        return [group for group in found if group is not None]

    def left(self, client: Client) -> None:
        """Note that a client is gone."""
        for (name, parent), filters in client.lite.items():
            self._gone.extend((client.id, name, parent, topic_filter) for topic_filter in filters)

    def tidy(self, now_ms: int) -> None:
        """End what is over, some of it. Called once a second."""
        with suppress(DiskFull):  # the next time
            for _ in range(min(len(self._gone), ENDED_AT_A_TIME)):
                client_id, name, parent, topic_filter = self._gone[0]
                client = self._clients.get(client_id)
                if client is None or topic_filter not in client.lite.get((name, parent), {}):
                    self._release(client_id, name, parent, topic_filter, now_ms + self._core.options.lite_idle_ms)
                self._gone.popleft()
            over = [group for group in self._core if 0 < (group.settings.lite_ends_ms or 0) <= now_ms and not group.in_flight]
            for group in over[:ENDED_AT_A_TIME]:
                self._admin.delete(group.name, group.filter)

    def _hold(
        self, group: ConsumerGroup | None, client_id: str, name: str, parent: str, topic_filter: str, start: Start | None
    ) -> None:
        """Note in the group of a lite topic that a client has subscribed to it; make the group where it is new."""
        holder = (client_id, parent)
        if group is None:
            self._core.groups.check_may_create(name, topic_filter)
            self._core.groups.create(name, topic_filter, start or "earliest", GroupSettings(lite=(holder,), lite_ends_ms=0))
            return
        settings = group.settings
        if holder in settings.lite:
            return
        if len(settings.lite) >= LITE_CLIENTS_MAX:
            raise Refused(
                Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
                f"{LITE_CLIENTS_MAX} clients of the group {name[:80]!r} have {topic_filter[:80]!r}, as many as may",
            )
        ends_ms = 0 if settings.is_temporary else None
        self._core.groups.configure(group, replace(settings, shared=False, lite=(*settings.lite, holder), lite_ends_ms=ends_ms))

    def _release(self, client_id: str, name: str, parent: str, topic_filter: str, ends_ms: int) -> None:
        """Note that a client has no longer subscribed to a lite topic; if that was the last one, when its group ends."""
        group = self._core.state.groups.get((name, topic_filter))
        if group is None or (client_id, parent) not in group.settings.lite:
            return
        settings = group.settings
        left = tuple(holder for holder in settings.lite if holder != (client_id, parent))
        ends = settings.lite_ends_ms if left or settings.lite_ends_ms is None else max(ends_ms, 1)
        self._core.groups.configure(group, replace(settings, lite=left, lite_ends_ms=ends))


def too_many() -> Refused:
    """Return the error for a client with too many lite topics."""
    return Refused(
        Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
        f"a client may subscribe to {LITE_SUBSCRIPTIONS_MAX} lite topics of a parent, of as many parents",
    )
