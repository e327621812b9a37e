"""SyncLiteSubscription, and the poll of a client on all of its lite topics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.access.actions import POP
from penstock.pop.access.caller import causer_of_call, check_permitted_throughout
from penstock.pop.core.core import PopCore
from penstock.pop.core.groups import Groups
from penstock.pop.core.pops import PopResult
from penstock.pop.errors import GroupUnknown
from penstock.pop.rocketmq.answering import status
from penstock.pop.rocketmq.clients import ConnectedClient
from penstock.pop.rocketmq.lite import LiteSubscriptions, quota_exceeded
from penstock.pop.rocketmq.names import filter_of, group_of, lite_filter_of
from penstock.pop.rocketmq.settings import LITE_SUBSCRIPTIONS_MAX
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import pb, service_pb
from penstock.store.queues.lightqueue import Start

POLL_SLICE_MS = 500
"""A waiting poll checks this often whether the client's lite topics have changed."""


class LiteTopics:
    """Serves SyncLiteSubscription, and polls the lite topics of a client.

    Parameters:
        subscriptions: The lite subscriptions of all clients.
        core: Hands out messages.
        groups: Those on the filters of lite topics among them.
        durable: Returns when all that was stored is durable.
    """

    def __init__(
        self,
        subscriptions: LiteSubscriptions,
        core: PopCore,
        groups: Groups,
        durable: Callable[[], Awaitable[None]],
    ) -> None:
        self._subscriptions = subscriptions
        self._core = core
        self._groups = groups
        self._durable = durable

    async def SyncLiteSubscription(self, request: Any, client: ConnectedClient) -> Any:
        actions = pb.LiteSubscriptionAction
        name, parent = group_of(request.group), filter_of(request.topic)
        if len(request.lite_topic_set) > LITE_SUBSCRIPTIONS_MAX:
            raise quota_exceeded()
        named = dict.fromkeys(lite_filter_of(parent, lite_topic) for lite_topic in request.lite_topic_set)
        had = client.lite.get((name, parent), {})
        if request.action == actions.PARTIAL_ADD:
            filters = had | named
        elif request.action == actions.COMPLETE_ADD:
            filters = named
        elif request.action == actions.PARTIAL_REMOVE:
            filters = {topic_filter: None for topic_filter in had if topic_filter not in named}
        else:
            filters = {}
        self._subscriptions.replace_all(client, name, parent, filters=filters, named=named, start=_start_of(request))
        await self._durable()
        return service_pb.SyncLiteSubscriptionResponse(status=status())

    def serves(self, client: ConnectedClient, name: str, parent: str) -> bool:
        """Return whether a poll of a client on `parent` is for its lite topics.

        Since the node's start a client may have told neither its type nor its lite topics. Then the groups tell.
        """
        if (name, parent) in client.lite:
            return True
        types = pb.ClientType
        if client.client_type:
            return client.client_type in (types.LITE_PUSH_CONSUMER, types.LITE_SIMPLE_CONSUMER)
        if self._groups.get(name, parent) is not None:
            return False
        return any(group.name == name and group.filter.startswith(f"{parent}/") for group in self._groups)

    async def poll(
        self, client: ConnectedClient, name: str, parent: str, count: int, invisible_ms: int, wait_ms: int, attempt_id: str
    ) -> PopResult | None:
        """Return up to `count` messages of one of the client's lite topics, or None. Each poll starts at another lite topic.

        Raises:
            AccessDenied: the caller may not read one of the lite topics.
            Overloaded: as `LongPolls.poll`.
        """
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + wait_ms / 1000
        while True:
            for lite_filter in client.lite.get((name, parent), ()):  # They may have changed since the last slice.
                check_permitted_throughout(POP, lite_filter)
            groups = self._subscriptions.groups_of(client, name, parent)
            remaining_ms = max(int((ends_s - loop.time()) * 1000), 0)
            if groups:
                client.turn = (client.turn + 1) % len(groups)
                groups = groups[client.turn :] + groups[: client.turn]
            try:
                slice_ms = min(remaining_ms, POLL_SLICE_MS)
                popped = await self._core.polls.poll(groups, count, invisible_ms, slice_ms, attempt_id, caller=causer_of_call())
            except GroupUnknown:
                continue  # A group was deleted while the poll waited. Poll the others.
            if popped is not None or remaining_ms <= 0:
                return popped
            if not groups:
                await asyncio.sleep(min(remaining_ms, POLL_SLICE_MS) / 1000)


def _start_of(request: Any) -> Start | None:
    """Return where the lite topics of a request are read from; None to continue where their groups are."""
    option = request.offset_option
    kind = option.WhichOneof("offset_type") if request.HasField("offset_option") else None
    if kind is None or (kind == "policy" and option.policy == pb.OffsetOption.Policy.LAST):
        return None
    if kind == "policy":
        return "latest" if option.policy == pb.OffsetOption.Policy.MAX else "earliest"
    if kind == "timestamp" and option.timestamp > 0:
        return int(option.timestamp)
    raise Refused(
        Code.ILLEGAL_OFFSET, f"the offset option {kind} is not supported, or is not above 0: use policy, or timestamp in ms"
    )
