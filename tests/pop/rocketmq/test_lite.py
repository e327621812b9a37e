"""Lite topics: their subscribers, also after a restart of the node, and the life of their groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from penstock import Client as PopClient
from penstock import group_settings
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.options import PopOptions
from penstock.pop.rocketmq import lite as lite_module
from penstock.pop.rocketmq import presence
from penstock.pop.rocketmq.status import Code
from penstock.pop.rocketmq.stubs import pb, service_pb
from penstock.store.files import Usage
from penstock.store.options import GIB, MIB, StoreOptions
from penstock.store.record import LAST_MEMBER_LEFT, Kind
from tests.pop.rocketmq.calling import TYPE, Caller, named, outgoing
from tests.pop.wiring import GROUP, Node
from tests.waiting import WAIT_S_MAX

TYPES = pb.ClientType


@pytest.fixture(autouse=True)
def _tidy_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "CHECK_S", 0.01)


@pytest.fixture
async def caller(node: Node) -> AsyncIterator[Caller]:
    async with grpc.aio.insecure_channel(node.target) as channel:
        yield Caller(channel)


@asynccontextmanager
async def calling(node: Node, client_id: str = "c1") -> AsyncIterator[Caller]:
    async with grpc.aio.insecure_channel(node.target) as channel:
        yield Caller(channel, client_id)


def handles(messages: list[Any]) -> list[str]:
    return [message.system_properties.receipt_handle for message in messages]


async def sync(caller: Caller, action: str, *lite: str, **more: Any) -> int:
    request = service_pb.SyncLiteSubscriptionRequest(
        action=pb.LiteSubscriptionAction.Value(action), topic=named("chat"), group=named(GROUP), lite_topic_set=lite, **more
    )
    return int((await caller.call("SyncLiteSubscription", request)).status.code)


async def lite_topics(caller: Caller, wait_ms: int = 0) -> list[str]:
    """Return the lite topics of all visible messages of a client, and acknowledge the messages."""
    found: list[str] = []
    while messages := (await caller.receive(topic="chat", wait_ms=0 if found else wait_ms))[1]:
        assert {message.topic.name for message in messages} == {"chat"}
        found += [message.system_properties.lite_topic for message in messages]
        await caller.ack(*handles(messages))
    return sorted(found)


def chat(*lite: str) -> list[Any]:
    return [outgoing(topic="chat", kind=TYPE.LITE, lite_topic=name) for name in lite]


async def test_a_client_gets_messages_of_the_lite_topics_that_it_subscribed_to(node: Node, caller: Caller) -> None:
    await caller.call("Heartbeat", service_pb.HeartbeatRequest(client_type=TYPES.LITE_SIMPLE_CONSUMER, group=named(GROUP)))
    assert await sync(caller, "PARTIAL_ADD", "a") == Code.OK
    assert await sync(caller, "PARTIAL_ADD", "b") == Code.OK
    node.settle_queues()
    await caller.send(*chat("a", "b", "c"))
    assert await lite_topics(caller) == ["a", "b"]
    assert await sync(caller, "PARTIAL_REMOVE", "a") == Code.OK
    await caller.send(*chat("a", "b"))
    assert await lite_topics(caller) == ["b"]
    await node.until(lambda: filters(node) == ["chat/b"])
    assert await sync(caller, "COMPLETE_ADD", "a") == Code.OK
    assert await lite_topics(caller, wait_ms=60_000) == ["a", "a"], "it is read from its first message again"
    assert await sync(caller, "COMPLETE_REMOVE") == Code.OK
    await caller.send(*chat("a", "b"))
    assert await lite_topics(caller) == []


async def test_subscribers_hear_that_the_group_of_their_lite_topic_was_deleted(node: Node, caller: Caller) -> None:
    stream = caller.telemetry()
    subscription = pb.Subscription(group=named(GROUP))
    settings = pb.Settings(client_type=TYPES.LITE_PUSH_CONSUMER, subscription=subscription)
    await stream.write(service_pb.TelemetryCommand(settings=settings))
    assert (await stream.read()).status.code == Code.OK
    await sync(caller, "COMPLETE_ADD", "a", "b")
    node.core.groups.delete(GROUP, "chat/a")
    notice = await asyncio.wait_for(stream.read(), WAIT_S_MAX)
    assert (notice.status.code, notice.notify_unsubscribe_lite_command.lite_topic) == (Code.OK, "a")
    assert await sync(caller, "PARTIAL_ADD", "c") == Code.OK
    assert filters(node) == ["chat/b", "chat/c"]
    stream.cancel()


async def test_a_waiting_poll_gets_the_first_message_of_any_lite_topic_even_a_new_one(node: Node, caller: Caller) -> None:
    await sync(caller, "PARTIAL_ADD", "a", "b")
    for name in ("a", "b", "a"):
        poll = asyncio.ensure_future(caller.receive(topic="chat", wait_ms=60_000))
        await node.until(lambda: node.core.waiting == 1)
        await caller.send(*chat(name))
        assert [message.system_properties.lite_topic for message in (await poll)[1]] == [name]
    assert node.core.waiting == 0
    assert [len(group.polls) for group in node.core.groups] == [0, 0]
    poll = asyncio.ensure_future(caller.receive(topic="chat", wait_ms=60_000))
    await node.until(lambda: node.core.waiting == 1)
    await sync(caller, "PARTIAL_ADD", "c")
    await caller.send(*chat("c"))
    assert [message.system_properties.lite_topic for message in (await poll)[1]] == ["c"]


async def test_two_lite_topics_in_one_turn_serve_a_waiting_poll_once(node: Node, caller: Caller) -> None:
    await sync(caller, "PARTIAL_ADD", "a", "b")
    poll = asyncio.ensure_future(caller.receive(topic="chat", wait_ms=60_000))
    await node.until(lambda: node.core.waiting == 1)
    await caller.send(*chat("a", "b"))
    assert len((await poll)[1]) == 1
    assert sum(group.in_flight for group in node.core.groups) == 1
    assert len((await caller.receive(topic="chat"))[1]) == 1


async def test_a_lite_topic_is_read_from_the_place_that_its_subscriber_names(caller: Caller) -> None:
    policies = pb.OffsetOption.Policy
    await caller.send(*chat("a"))
    for option, expected in (
        (pb.OffsetOption(policy=policies.MIN), ["a"]),
        (pb.OffsetOption(policy=policies.LAST), []),
        (pb.OffsetOption(timestamp=1), ["a"]),
        (pb.OffsetOption(policy=policies.MIN), ["a"]),
    ):
        assert await sync(caller, "PARTIAL_ADD", "a", offset_option=option) == Code.OK
        assert await lite_topics(caller, wait_ms=60_000 if expected else 0) == expected
    await caller.send(*chat("a"))
    await sync(caller, "PARTIAL_ADD", "a", offset_option=pb.OffsetOption(policy=policies.MAX))
    assert await lite_topics(caller) == []


async def test_all_lite_topics_of_a_parent_are_one_subscription(node: Node, caller: Caller) -> None:
    await caller.send(*chat("a", "b"))
    await sync(caller, "PARTIAL_ADD", "*")
    assert await lite_topics(caller, wait_ms=60_000) == ["a", "b"]


# --- restarts and ends ------------------------------------------------------------------------------------


def subscribers(group: ConsumerGroup) -> list[str]:
    return [client_id for client_id, _ in group.settings.lite]


def filters(node: Node) -> list[str]:
    return sorted(group.filter for group in node.core.groups)


async def restarted(node: Node, directory: Path, **options: Any) -> Node:
    await node.stop()
    return await started(directory, **options)


async def started(directory: Path, **options: Any) -> Node:
    node = Node(directory, pop=PopOptions(**options))
    await node.start()
    return node


async def end(caller: Caller) -> None:
    """Announce the end of a client."""
    await caller.call("NotifyClientTermination", service_pb.NotifyClientTerminationRequest(group=named(GROUP)))


async def test_after_a_restart_of_the_node_a_client_keeps_its_lite_topics(tmp_path: Path) -> None:
    node = await started(tmp_path / "data")
    async with calling(node) as caller:
        await sync(caller, "PARTIAL_ADD", "a", "b", "c/d", "e")
        await sync(caller, "PARTIAL_REMOVE", "e")
    node = await restarted(node, tmp_path / "data")
    try:
        async with calling(node) as caller, calling(node, "c2") as other:
            poll = asyncio.ensure_future(caller.receive(topic="chat", wait_ms=60_000))
            await node.until(lambda: node.core.waiting == 1)
            await other.send(*chat("b"))
            assert [message.system_properties.lite_topic for message in (await poll)[1]] == ["b"]
            await other.send(*chat("a", "c/d", "e"))
            assert await lite_topics(caller) == ["a", "c/d"]
            assert await lite_topics(other) == [], "it has subscribed to nothing"
            assert sorted(group.settings.lite for group in node.core.groups) == [(("c1", "chat"),)] * 3
    finally:
        await node.stop()


async def test_repeating_a_subscription_writes_no_record(node: Node, caller: Caller) -> None:
    await sync(caller, "COMPLETE_ADD", "a", "b")
    end = node.store.log.end
    await sync(caller, "COMPLETE_ADD", "b", "a")
    await sync(caller, "PARTIAL_ADD", "a")
    assert node.store.log.end == end


async def test_the_group_ends_when_the_last_client_unsubscribed_and_nothing_is_in_flight(node: Node, caller: Caller) -> None:
    async with calling(node, "c2") as other:
        for each in (caller, other):
            await sync(each, "PARTIAL_ADD", "a")
        node.settle_queues()
        await caller.send(*chat("a"))
        (message,) = (await caller.receive(topic="chat"))[1]
        await sync(caller, "COMPLETE_REMOVE")
        (group,) = node.core.groups
        assert subscribers(group) == ["c2"]
        await sync(other, "COMPLETE_REMOVE")
        assert subscribers(group) == []
        await sync(other, "PARTIAL_ADD", "b")
        await sync(other, "PARTIAL_REMOVE", "b")
        await node.until(lambda: filters(node) == ["chat/a"])  # The first client keeps its messages.
        answer = await caller.ack(*handles([message]))
        assert answer.status.code == Code.OK
        await node.until(lambda: filters(node) == [])
    node.store.commit()  # the group is gone before the record of its end is written
    deleted = [record.flags for record in node.store.log.scan(0) if record.kind == Kind.GROUP_DELETED]
    assert deleted == [LAST_MEMBER_LEFT, LAST_MEMBER_LEFT]


async def test_a_client_that_subscribes_again_before_the_end_continues_where_it_was(node: Node, caller: Caller) -> None:
    await sync(caller, "PARTIAL_ADD", "a")
    node.settle_queues()
    await caller.send(*chat("a"))
    (message,) = (await caller.receive(topic="chat"))[1]
    await sync(caller, "COMPLETE_REMOVE")
    await sync(caller, "PARTIAL_ADD", "a")
    await caller.ack(*handles([message]))
    await caller.send(*chat("a"))
    assert await lite_topics(caller) == ["a"]
    (group,) = node.core.groups
    assert group.settings.lite_ends_ms == 0


@pytest.mark.parametrize("how", ["ends", "falls silent"])
async def test_the_group_of_a_client_that_is_gone_is_kept_for_a_while(node: Node, caller: Caller, how: str) -> None:
    await sync(caller, "PARTIAL_ADD", "a")
    node.settle_queues()
    await caller.send(*chat("a"))
    assert await lite_topics(caller) == ["a"]
    assert node.rocketmq is not None
    if how == "ends":
        await end(caller)
    else:
        client = node.rocketmq.clients.get("c1")
        assert client is not None
        client.heard_ms = 0
    (group,) = node.core.groups
    await node.until(lambda: not subscribers(group))
    day_ms = PopOptions().lite_idle_ms
    assert 0 < (group.settings.lite_ends_ms or 0) - node.store.now_ms() <= day_ms
    async with calling(node, "its next life") as again:
        await again.send(*chat("a"))
        await sync(again, "PARTIAL_ADD", "a")
        assert await lite_topics(again) == ["a"], "only what came meanwhile"
        assert group.settings.lite_ends_ms == 0


async def test_the_group_of_a_client_that_is_gone_ends_also_after_a_restart(tmp_path: Path) -> None:
    node = await started(tmp_path / "data", lite_idle_ms=0)
    async with calling(node) as caller:
        await sync(caller, "PARTIAL_ADD", "a", "b")
        await end(caller)
        await node.until(lambda: filters(node) == [])
        await sync(caller, "PARTIAL_ADD", "c")
    node = await restarted(node, tmp_path / "data", lite_idle_ms=0)
    try:
        assert filters(node) == ["chat/c"]
        assert node.rocketmq is not None
        client = node.rocketmq.clients.get("c1")
        assert client is not None
        client.heard_ms = 0
        await node.until(lambda: filters(node) == [])
    finally:
        await node.stop()


async def test_a_group_that_services_use_outlives_its_lite_subscriptions(node: Node, caller: Caller) -> None:
    async with PopClient(node.target) as service:
        await service.groups.create(GROUP, "chat/operator's")
        await sync(caller, "PARTIAL_ADD", "operator's", "adopted", "used", "theirs")
        await service.groups.create(GROUP, "chat/adopted", settings=group_settings(attempts_max=3))
        await service.pop("chat/used", group=GROUP)
        await service.groups.create(GROUP, "chat/operator's")  # The group is still the one that was created.
        await caller.send(*chat("adopted"))
        assert await lite_topics(caller, wait_ms=60_000) == ["adopted"], "it has still subscribed"
        await sync(caller, "COMPLETE_REMOVE")
        await node.until(lambda: filters(node) == ["chat/adopted", "chat/operator's", "chat/used"])
        assert [group.settings.lite for group in node.core.groups] == [()] * 3


async def test_a_lite_topic_has_a_bounded_number_of_clients(
    caller: Caller, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lite_module, "LITE_CLIENTS_MAX", 1)
    await sync(caller, "PARTIAL_ADD", "a")
    async with calling(node, "c2") as other:
        assert await sync(other, "PARTIAL_ADD", "a") == Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED
    assert await sync(caller, "PARTIAL_ADD", "a") == Code.OK


async def test_on_a_full_disk_expired_groups_end_later(tmp_path: Path) -> None:
    async with (
        Node(
            tmp_path / "data", pop=PopOptions(lite_idle_ms=0), store=StoreOptions(segment_bytes=MIB, reserve_bytes=GIB)
        ) as node,
        calling(node) as caller,
    ):
        await sync(caller, "PARTIAL_ADD", "a")
        node.store.space.probe = lambda: Usage(0, 100 * GIB)
        node.store.measure_disk()
        assert await sync(caller, "COMPLETE_REMOVE") == Code.TOO_MANY_REQUESTS
        await end(caller)
        assert node.rocketmq is not None
        await node.until(lambda: node.rocketmq is not None and node.rocketmq.clients.get("c1") is None)
        assert filters(node) == ["chat/a"]
        node.store.space.probe = lambda: Usage(10 * GIB, 100 * GIB)
        node.store.measure_disk()
        await node.until(lambda: filters(node) == [])
