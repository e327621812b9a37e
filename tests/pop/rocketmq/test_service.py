"""`apache.rocketmq.v2.MessagingService` against a real node: statuses, leases, telemetry, access."""

from __future__ import annotations

import asyncio
import hmac
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from penstock import Client, Security, group_settings
from penstock.access.subject import Subject
from penstock.install import install_hint
from penstock.pop.errors import PopError
from penstock.pop.options import PopOptions
from penstock.pop.rocketmq import telemetry
from penstock.pop.rocketmq.names import encode
from penstock.pop.rocketmq.receiving import DEADLINE_MARGIN_MS, UNSTATED_MARGIN_MS, wait_ms_of
from penstock.pop.rocketmq.sending import MESSAGES_PER_SEND_MAX
from penstock.pop.rocketmq.settings import LITE_SUBSCRIPTIONS_MAX
from penstock.pop.rocketmq.status import Code
from penstock.pop.rocketmq.stubs import SERVICE, pb, service_pb
from penstock.store.files import Usage
from penstock.store.options import GIB, MIB, OptionInvalid, StoreOptions
from penstock.store.space.quotaoptions import QuotaLimitOptions, QuotaOptions
from tests.clients.rocketmq_processes import ClientFailed, ClientProcess, Kind
from tests.pop.rocketmq.calling import EOF, TYPE, Caller, commands, named, outgoing, receive_request, settings
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.waiting import PROCESS_S, WAIT_S_MAX

TYPES = pb.ClientType
ENDPOINTS = pb.Endpoints(scheme=pb.AddressScheme.IPv4, addresses=[pb.Address(host="127.0.0.1", port=1)])


@pytest.fixture
async def channel(node: Node) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(node.target) as opened:
        yield opened


@pytest.fixture
async def caller(channel: grpc.aio.Channel) -> Caller:
    return Caller(channel)


def bodies(messages: list[Any]) -> list[bytes]:
    return [message.body for message in messages]


def handles(messages: list[Any]) -> list[str]:
    return [message.system_properties.receipt_handle for message in messages]


# --- statuses -------------------------------------------------------------------------------------------------------


WRONG: list[tuple[str, Any, Code]] = [
    ("QueryRoute", service_pb.QueryRouteRequest(topic=named("a"), endpoints=ENDPOINTS), Code.OK),
    ("QueryRoute", service_pb.QueryRouteRequest(topic=named("a")), Code.ILLEGAL_ACCESS_POINT),
    ("QueryRoute", service_pb.QueryRouteRequest(topic=named("a/#/b"), endpoints=ENDPOINTS), Code.ILLEGAL_TOPIC),
    ("Heartbeat", service_pb.HeartbeatRequest(client_type=TYPES.PRODUCER), Code.OK),
    ("Heartbeat", service_pb.HeartbeatRequest(), Code.UNRECOGNIZED_CLIENT_TYPE),
    ("Heartbeat", service_pb.HeartbeatRequest(client_type=99), Code.UNRECOGNIZED_CLIENT_TYPE),
    (
        "Heartbeat",
        service_pb.HeartbeatRequest(client_type=TYPES.PUSH_CONSUMER, group=named("a/b")),
        Code.ILLEGAL_CONSUMER_GROUP,
    ),
    ("SendMessage", service_pb.SendMessageRequest(), Code.BAD_REQUEST),
    ("SendMessage", service_pb.SendMessageRequest(messages=[outgoing()] * (MESSAGES_PER_SEND_MAX + 1)), Code.BAD_REQUEST),
    ("SendMessage", service_pb.SendMessageRequest(messages=[outgoing(topic="a/+")]), Code.ILLEGAL_TOPIC),
    ("SendMessage", service_pb.SendMessageRequest(messages=[outgoing(topic="$SYS/x")]), Code.ILLEGAL_TOPIC),
    ("SendMessage", service_pb.SendMessageRequest(messages=[outgoing(bytes(5 << 20))]), Code.MESSAGE_BODY_TOO_LARGE),
    (
        "SendMessage",
        service_pb.SendMessageRequest(messages=[outgoing(kind=TYPE.DELAY, delivery_timestamp={"seconds": 10**11})]),
        Code.ILLEGAL_DELIVERY_TIME,
    ),
    (
        "SendMessage",
        service_pb.SendMessageRequest(messages=[outgoing(tag="t" * 70_000)]),
        Code.MESSAGE_PROPERTIES_TOO_LARGE,
    ),
    ("AckMessage", service_pb.AckMessageRequest(group=named(GROUP)), Code.BAD_REQUEST),
    (
        "AckMessage",
        service_pb.AckMessageRequest(entries=[service_pb.AckMessageEntry(receipt_handle="x")]),
        Code.ILLEGAL_CONSUMER_GROUP,
    ),
    (
        "ForwardMessageToDeadLetterQueue",
        service_pb.ForwardMessageToDeadLetterQueueRequest(group=named(GROUP), receipt_handle="x"),
        Code.INVALID_RECEIPT_HANDLE,
    ),
    ("EndTransaction", service_pb.EndTransactionRequest(transaction_id="x"), Code.INVALID_TRANSACTION_ID),
    ("RecallMessage", service_pb.RecallMessageRequest(recall_handle="x"), Code.INVALID_RECEIPT_HANDLE),
    (
        "QueryAssignment",
        service_pb.QueryAssignmentRequest(topic=named("a"), group=named("a/b"), endpoints=ENDPOINTS),
        Code.ILLEGAL_CONSUMER_GROUP,
    ),
    (
        "SyncLiteSubscription",
        service_pb.SyncLiteSubscriptionRequest(topic=named("a"), group=named(GROUP), lite_topic_set=["+"]),
        Code.ILLEGAL_LITE_TOPIC,
    ),
    (
        "SyncLiteSubscription",
        service_pb.SyncLiteSubscriptionRequest(
            topic=named("a"), group=named(GROUP), lite_topic_set=map(str, range(LITE_SUBSCRIPTIONS_MAX + 1))
        ),
        Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
    ),
    (
        "SyncLiteSubscription",
        service_pb.SyncLiteSubscriptionRequest(
            topic=named("a"), group=named(GROUP), lite_topic_set=["x"], offset_option=pb.OffsetOption(tail_n=3)
        ),
        Code.ILLEGAL_OFFSET,
    ),
    ("GetOffset", service_pb.GetOffsetRequest(), Code.ILLEGAL_CONSUMER_GROUP),
    ("QueryOffset", service_pb.QueryOffsetRequest(), Code.ILLEGAL_TOPIC),
]


async def test_each_invalid_request_has_a_code_of_its_own(caller: Caller) -> None:
    for method, request, code in WRONG:
        answer = await caller.call(method, request)
        assert answer.status.code == code, (method, request, answer.status)
        assert answer.status.message or code is Code.OK, (method, request)


UNRECEIVABLE: list[tuple[dict[str, Any], Code]] = [
    ({"count": 0}, Code.BAD_REQUEST),
    ({"count": -1}, Code.BAD_REQUEST),
    ({"invisible_ms": 0}, Code.ILLEGAL_INVISIBLE_TIME),
    ({"invisible_ms": -1}, Code.ILLEGAL_INVISIBLE_TIME),
    ({"invisible_ms": 10**12}, Code.ILLEGAL_INVISIBLE_TIME),
    ({"wait_ms": -1}, Code.ILLEGAL_POLLING_TIME),
    ({"expression": "a ||"}, Code.ILLEGAL_FILTER_EXPRESSION),
    ({"expression": "a =", "sql": True}, Code.ILLEGAL_FILTER_EXPRESSION),
    ({"topic": "a/#/b"}, Code.ILLEGAL_TOPIC),
    ({"topic": f"$dlq/{GROUP}"}, Code.BAD_REQUEST),
    ({"group": ""}, Code.ILLEGAL_CONSUMER_GROUP),
    ({"attempt_id": "x" * 300}, Code.BAD_REQUEST),
]


async def test_an_invalid_receive_is_refused_and_creates_no_group(node: Node, caller: Caller) -> None:
    for wanted, code in UNRECEIVABLE:
        assert await caller.receive(**wanted) == (code, []), wanted
    assert list(node.core.groups) == []
    assert await caller.receive(wait_ms=0) == (Code.MESSAGE_NOT_FOUND, [])


async def test_a_call_without_a_client_id_is_refused(channel: grpc.aio.Channel) -> None:
    nobody = Caller(channel, "")
    assert (await nobody.send(outgoing())).status.code == Code.CLIENT_ID_REQUIRED
    assert await nobody.receive() == (Code.CLIENT_ID_REQUIRED, [])
    assert (await nobody.change("h", 1)).status.code == Code.CLIENT_ID_REQUIRED
    stream = nobody.telemetry()
    assert [command.status.code async for command in commands(stream)] == [Code.CLIENT_ID_REQUIRED]


async def test_an_invalid_message_of_a_batch_does_not_stop_the_others(node: Node, caller: Caller) -> None:
    answer = await caller.send(outgoing(b"1"), outgoing(b"2", topic="a/#"), outgoing(b"3"))
    assert [entry.status.code for entry in answer.entries] == [Code.OK, Code.ILLEGAL_TOPIC, Code.OK]
    assert answer.status.code == Code.MULTIPLE_RESULTS
    code, messages = await caller.receive()
    assert (code, bodies(messages)) == (Code.OK, [b"1", b"3"])
    assert [message.system_properties.message_id for message in messages] == [answer.entries[at].message_id for at in (0, 2)]


async def test_each_handle_of_a_batch_has_its_own_status(caller: Caller) -> None:
    await caller.send(*[outgoing(b"%d" % number) for number in range(3)])
    good, acked, replaced = handles((await caller.receive())[1])
    assert (await caller.ack(acked)).status.code == Code.OK
    changed = await caller.change(replaced, 20_000)
    assert (changed.status.code, changed.receipt_handle != replaced) == (Code.OK, True)
    answer = await caller.ack(good, acked, replaced, good, "00" * 30)
    assert answer.status.code == Code.MULTIPLE_RESULTS
    assert [entry.status.code for entry in answer.entries] == [Code.OK] + [Code.INVALID_RECEIPT_HANDLE] * 4
    reasons = [entry.status.message for entry in answer.entries]
    for reason, part in zip(reasons[1:], ("before", "newer receipt handle", "before", "not a receipt handle"), strict=True):
        assert part in reason
    assert (await caller.ack(changed.receipt_handle, group="other")).status.code == Code.INVALID_RECEIPT_HANDLE
    assert (await caller.ack(changed.receipt_handle)).status.code == Code.OK


async def test_a_refused_change_returns_the_old_handle(caller: Caller) -> None:
    await caller.send(outgoing())
    (handle,) = handles((await caller.receive())[1])
    for invisible_ms in (-1, 10**12):
        answer = await caller.change(handle, invisible_ms)
        assert (answer.status.code, answer.receipt_handle) == (Code.ILLEGAL_INVISIBLE_TIME, handle)
    assert (await caller.change("forged", 1)).receipt_handle == "forged"
    assert (await caller.ack(handle)).status.code == Code.OK


async def test_a_forwarded_message_is_read_as_a_dead_letter_that_names_its_origin(caller: Caller) -> None:
    await caller.send(outgoing(b"bad"))
    ((message,), (handle,)) = ((found := (await caller.receive(topic=FILTER))[1]), handles(found))
    request = service_pb.ForwardMessageToDeadLetterQueueRequest(group=named(GROUP), receipt_handle=handle)
    for _ in range(2):  # Clients repeat the call until they get OK.
        assert (await caller.call("ForwardMessageToDeadLetterQueue", request)).status.code == Code.OK
    request = receive_request(group="auditors")
    request.message_queue.topic.name = f"%DLQ%{GROUP}"
    dead = [response.message async for response in caller.stream("ReceiveMessage", request) if response.HasField("message")]
    assert bodies(dead) == [b"bad"]
    assert dead[0].topic.name == f"%DLQ%{GROUP}"
    letter = dead[0].system_properties.dead_letter_queue
    assert (letter.topic, letter.message_id) == (encode(TOPIC), message.system_properties.message_id)


async def test_a_client_that_has_too_much_of_something_is_told_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    limits = (QuotaLimitOptions(of="source", name="local", queues=4, delayed=1, transactions=1, groups=1),)
    async with (
        Node(tmp_path / "data", quotas=QuotaOptions(limits=limits)) as node,
        grpc.aio.insecure_channel(node.target) as channel,
    ):
        caller = Caller(channel)
        later = node.store.now_ms() + 60_000
        when = {"seconds": later // 1000}
        sent = await caller.send(*[outgoing(kind=TYPE.DELAY, delivery_timestamp=when) for _ in range(2)])
        assert [entry.status.code for entry in sent.entries] == [Code.OK, Code.TOO_MANY_REQUESTS]
        assert "quotas.limits" in sent.entries[1].status.message
        sent = await caller.send(*[outgoing(kind=TYPE.TRANSACTION) for _ in range(2)])
        assert [entry.status.code for entry in sent.entries] == [Code.OK, Code.TOO_MANY_REQUESTS]
        assert (await caller.send(outgoing(b"x"))).status.code == Code.OK
        assert bodies((await caller.receive())[1]) == [b"x"]
        assert (await caller.receive(group="another"))[0] == Code.TOO_MANY_REQUESTS
        assert [(await caller.send(outgoing(topic=f"level-{number}"))).status.code for number in range(3)] == [
            Code.OK,
            Code.TOO_MANY_REQUESTS,
            Code.TOO_MANY_REQUESTS,
        ]


async def test_a_body_of_the_stated_limit_is_stored_whatever_else_the_message_has(tmp_path: Path) -> None:
    limit = 10_000
    async with (
        Node(tmp_path / "data", pop=PopOptions(message_bytes_max=limit)) as node,
        grpc.aio.insecure_channel(node.target) as channel,
    ):
        caller = Caller(channel)
        sent = await caller.send(outgoing(bytes(limit), tag="t" * 100, keys=["k"]), outgoing(bytes(limit + 1)))
        assert [entry.status.code for entry in sent.entries] == [Code.OK, Code.MESSAGE_BODY_TOO_LARGE]
        assert f"{limit + 1} bytes" in sent.entries[1].status.message
        assert [len(body) for body in bodies((await caller.receive())[1])] == [limit]


async def test_copies_that_a_sender_s_retries_made_have_one_id(caller: Caller) -> None:
    sent = await caller.send(*[outgoing(b"1", message_id="01AB")] * 2)
    assert [entry.message_id for entry in sent.entries] == ["01AB"] * 2
    assert [message.system_properties.message_id for message in (await caller.receive())[1]] == ["01AB"] * 2


async def test_messages_of_one_receive_come_by_priority(caller: Caller) -> None:
    kinds = [outgoing(b"%d" % level, kind=TYPE.PRIORITY, priority=level) for level in (1, 3, 2, 3)]
    await caller.send(*kinds, outgoing(b"none"))
    found = (await caller.receive())[1]
    assert bodies(found) == [b"3", b"3", b"2", b"1", b"none"]
    assert found[0].system_properties.message_type == TYPE.PRIORITY


async def test_a_namespace_keeps_topics_and_groups_apart(caller: Caller) -> None:
    await caller.send(outgoing(b"outside"))
    inside = outgoing(b"inside")
    inside.topic.resource_namespace = "tenant"
    await caller.send(inside)
    request = receive_request()
    request.group.resource_namespace = request.message_queue.topic.resource_namespace = "tenant"
    found = [response.message async for response in caller.stream("ReceiveMessage", request) if response.HasField("message")]
    assert bodies(found) == [b"inside"]
    assert found[0].topic == inside.topic
    assert bodies((await caller.receive(topic=f"tenant/{TOPIC}", group="native"))[1]) == [b"inside"]


# --- receiving ------------------------------------------------------------------------------------------------------


async def test_a_response_has_status_messages_and_time_in_this_order(caller: Caller) -> None:
    await caller.send(outgoing(b"1"), outgoing(b"2"))
    found = [response.WhichOneof("content") async for response in caller.stream("ReceiveMessage", receive_request())]
    assert found == ["status", "message", "message", "delivery_timestamp"]


async def test_a_message_names_the_address_at_which_the_node_listens(node: Node, caller: Caller) -> None:
    await caller.send(outgoing())
    (message,) = (await caller.receive())[1]
    assert message.system_properties.store_host == node.target


async def test_a_cancelled_poll_takes_no_message(node: Node, caller: Caller) -> None:
    poll = caller.stream("ReceiveMessage", receive_request(wait_ms=60_000))
    asyncio.ensure_future(poll.read())  # noqa: RUF006 - it ends with the call
    await node.until(lambda: node.core.waiting == 1)
    poll.cancel()
    await node.until(lambda: node.core.waiting == 0)
    await caller.send(outgoing())
    code, messages = await caller.receive()
    assert (code, [message.system_properties.delivery_attempt for message in messages]) == (Code.OK, [1])


def test_a_poll_ends_before_the_deadline_of_its_call() -> None:
    stated, unstated = receive_request(wait_ms=30_000), receive_request()
    unstated.ClearField("long_polling_timeout")
    assert wait_ms_of(stated, 20.0, PopOptions()) == 20_000 - DEADLINE_MARGIN_MS
    assert wait_ms_of(unstated, 20.0, PopOptions()) == 20_000 - max(UNSTATED_MARGIN_MS, DEADLINE_MARGIN_MS)


async def test_a_poll_that_does_not_say_how_long_it_waits_waits(node: Node, caller: Caller) -> None:
    request = receive_request()
    request.ClearField("long_polling_timeout")
    call = caller.stream("ReceiveMessage", request)
    first = asyncio.ensure_future(call.read())
    await node.until(lambda: node.core.waiting == 1)
    await caller.send(outgoing())
    assert (await first).status.code == Code.OK


async def test_a_repeated_attempt_id_gets_the_same_messages(caller: Caller) -> None:
    await caller.send(outgoing(b"1"), outgoing(b"2"))
    for auto_renew in (False, True):
        first = (await caller.receive(count=1, attempt_id=f"a{auto_renew}", auto_renew=auto_renew))[1]
        again = (await caller.receive(count=1, attempt_id=f"a{auto_renew}", auto_renew=auto_renew))[1]
        assert handles(first) == handles(again) != []


async def test_if_pops_may_create_groups_a_consumer_may_change_the_expression(node: Node, caller: Caller) -> None:
    await caller.send(outgoing(b"a1", tag="a"), outgoing(b"b1", tag="b"))
    assert bodies((await caller.receive(expression="a"))[1]) == [b"a1"]
    await caller.send(outgoing(b"a2", tag="a"), outgoing(b"b2", tag="b"))
    assert bodies((await caller.receive(expression="b"))[1]) == [b"b2"]
    await caller.send(outgoing(b"a3", tag="a"))
    assert bodies((await caller.receive())[1]) == [b"a3"]
    assert len(list(node.core.groups)) == 1


async def test_consumers_of_a_group_that_ask_for_different_messages_are_told_and_lose_none(node: Node, caller: Caller) -> None:
    other = Caller(caller._channel, "c2")
    assert await caller.receive(expression="a", wait_ms=0) == (Code.MESSAGE_NOT_FOUND, [])
    await caller.send(outgoing(b"a1", tag="a"), outgoing(b"b1", tag="b"))
    (refused,) = [
        response.status async for response in other.stream("ReceiveMessage", receive_request(expression="b", wait_ms=0))
    ]
    assert refused.code == Code.ILLEGAL_FILTER_EXPRESSION
    assert "'b', 'c1' for 'a'" in refused.message
    assert (await other.receive(wait_ms=0))[0] == Code.ILLEGAL_FILTER_EXPRESSION
    assert bodies((await other.receive(expression="a"))[1]) == [b"a1"]
    for each in (caller, other):  # Both end, and consumers with another subscription replace them.
        await each.call("NotifyClientTermination", service_pb.NotifyClientTerminationRequest())
    assert node.rocketmq is not None
    clients = node.rocketmq.clients
    await node.until(lambda: len(clients) == 0)
    await caller.send(outgoing(b"b2", tag="b"))
    assert bodies((await Caller(caller._channel, "c3").receive(expression="b"))[1]) == [b"b2"]


async def test_the_only_consumer_of_a_group_may_follow_another_in_changing_the_expression(caller: Caller) -> None:
    other = Caller(caller._channel, "c2")
    for each in (caller, other):
        assert (await each.receive(expression="a", wait_ms=0))[0] == Code.MESSAGE_NOT_FOUND
    assert (await caller.receive(expression="b", wait_ms=0))[0] == Code.ILLEGAL_FILTER_EXPRESSION
    assert (await other.receive(expression="b", wait_ms=0))[0] == Code.MESSAGE_NOT_FOUND
    assert (await caller.receive(expression="b", wait_ms=0))[0] == Code.MESSAGE_NOT_FOUND


async def test_consumers_do_not_replace_the_filter_of_an_operator(node: Node, caller: Caller) -> None:
    async with Client(node.target) as native:
        await native.groups.create(GROUP, TOPIC, settings=group_settings(tags="a"))
        await caller.send(outgoing(b"a1", tag="a"), outgoing(b"b1", tag="b"))
        assert bodies((await caller.receive())[1]) == [b"a1"]
        assert (await caller.receive(expression="b"))[0] == Code.ILLEGAL_FILTER_EXPRESSION
        await caller.receive(group="other", expression="a", wait_ms=0)
        await native.groups.create("other", TOPIC, settings=group_settings(tags="a"))
        await native.groups.update("other", group_settings(tags="b"), topic_filter=TOPIC)
        assert bodies((await caller.receive(group="other", wait_ms=0))[1]) == []


async def test_if_pops_may_not_create_groups_consumers_must_ask_for_the_group_s_expression(tmp_path: Path) -> None:
    async with (
        Node(tmp_path / "data", pop=PopOptions(groups_auto_create=False)) as node,
        grpc.aio.insecure_channel(node.target) as channel,
        Client(node.target) as native,
    ):
        caller = Caller(channel)
        assert (await caller.receive())[0] == Code.CONSUMER_GROUP_NOT_FOUND
        await native.groups.create(GROUP, TOPIC, settings=group_settings(tags="a"))
        await caller.send(outgoing(b"a1", tag="a"), outgoing(b"b1", tag="b"))
        assert (await caller.receive(expression="b"))[0] == Code.ILLEGAL_FILTER_EXPRESSION
        assert bodies((await caller.receive())[1]) == [b"a1"]


# --- leases ---------------------------------------------------------------------------------------------------------


async def test_messages_of_a_client_that_vanished_come_back_as_another_attempt(node: Node, caller: Caller) -> None:
    assert node.rocketmq is not None
    await caller.send(outgoing(b"1"), outgoing(b"2"))
    (first, _) = (await caller.receive(auto_renew=True))[1]
    assert first.system_properties.invisible_duration.ToMilliseconds() > 3_600_000
    assert (await caller.ack(*handles([first]))).status.code == Code.OK
    client = node.rocketmq.clients.get("c1")
    assert client is not None
    client.heard_ms = 0  # The client was silent for too long.
    other = Caller(caller._channel, "c2")
    ((second,),) = [(await other.receive(auto_renew=True))[1]]
    assert (second.body, second.system_properties.delivery_attempt) == (b"2", 2)


async def test_messages_of_a_client_that_announced_its_end_come_back_uncounted(node: Node, caller: Caller) -> None:
    await caller.send(outgoing())
    assert len((await caller.receive(auto_renew=True))[1]) == 1
    answer = await caller.call("NotifyClientTermination", service_pb.NotifyClientTerminationRequest())
    assert answer.status.code == Code.OK
    (again,) = (await Caller(caller._channel, "c2").receive())[1]
    assert again.system_properties.delivery_attempt == 1


async def test_a_restarted_node_knows_the_holder_of_a_lease(tmp_path: Path) -> None:
    async with Node(tmp_path / "data") as node, grpc.aio.insecure_channel(node.target) as channel:
        caller = Caller(channel)
        await caller.send(outgoing(b"1"), outgoing(b"2"))
        first, _ = handles((await caller.receive(auto_renew=True))[1])
    async with Node(tmp_path / "data") as node:
        assert node.rocketmq is not None
        async with grpc.aio.insecure_channel(node.target) as channel:
            other = Caller(channel, "c2")
            assert (await other.ack(first)).status.code == Code.OK
            client = node.rocketmq.clients.get("c1")
            assert client is not None
            client.heard_ms = 0
            (second,) = (await other.receive())[1]
            assert (second.body, second.system_properties.delivery_attempt) == (b"2", 2)


async def test_on_a_full_disk_clients_get_an_error_and_leases_return_when_there_is_room(tmp_path: Path) -> None:
    async with Node(tmp_path / "data", store=StoreOptions(segment_bytes=MIB, reserve_bytes=GIB)) as node:
        assert node.rocketmq is not None
        async with grpc.aio.insecure_channel(node.target) as channel:
            caller = Caller(channel)
            await caller.send(outgoing())
            (handle,) = handles((await caller.receive(auto_renew=True))[1])
            free(node, 0)
            assert (await caller.send(outgoing())).status.code == Code.TOO_MANY_REQUESTS
            assert (await caller.ack(handle)).status.code == Code.TOO_MANY_REQUESTS
            client = node.rocketmq.clients.get("c1")
            assert client is not None
            client.heard_ms = 0
            await node.until(lambda: node.rocketmq is not None and node.rocketmq.clients.get("c1") not in (None, client))
            assert node.core.checkpoints_open == 1
            free(node, 10 * GIB)
            client = node.rocketmq.clients.get("c1")
            assert client is not None
            client.heard_ms = 0
            (again,) = (await Caller(channel, "c2").receive())[1]
            assert again.system_properties.delivery_attempt == 2


def free(node: Node, amount: int) -> None:
    """Set the number of free bytes of the disk."""
    node.store.space.probe = lambda: Usage(amount, 100 * GIB)
    node.store.measure_disk()


async def test_an_invalid_advertised_address_is_an_error_at_the_start(tmp_path: Path) -> None:
    node = Node(tmp_path / "data", pop=PopOptions(rocketmq_advertise="nowhere"))
    with pytest.raises(OptionInvalid, match=r"pop\.rocketmq_advertise is 'nowhere'"):
        await node.start()
    await node.stop()


# --- telemetry ------------------------------------------------------------------------------------------------------


async def test_settings_come_back_completed_and_invalid_ones_with_a_code(caller: Caller) -> None:
    stream = caller.telemetry()
    await stream.write(settings(TYPES.PRODUCER, publishing=pb.Publishing(topics=[named("a")])))
    answer = await stream.read()
    assert (answer.status.code, answer.settings.publishing.max_body_size) == (Code.OK, PopOptions().message_bytes_max)
    await stream.write(service_pb.TelemetryCommand(thread_stack_trace=service_pb.ThreadStackTrace(nonce="n")))
    await stream.write(settings(0))
    assert [command.status.code async for command in commands(stream)] == [Code.UNRECOGNIZED_CLIENT_TYPE]


async def test_a_flood_of_commands_is_read_no_faster_than_the_bound(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "COMMANDS_PER_S", 20.0)
    stream, count = caller.telemetry(), telemetry.COMMANDS_AT_ONCE + 10
    command = settings(TYPES.PRODUCER, publishing=pb.Publishing(topics=[named("a")]))
    flood = asyncio.create_task(write_all(stream, [command] * count))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for _ in range(count):
        assert (await asyncio.wait_for(stream.read(), WAIT_S_MAX)).status.code == Code.OK
    assert loop.time() - began_s >= 10 / telemetry.COMMANDS_PER_S
    await flood


async def write_all(stream: Any, requests: list[Any]) -> None:
    for request in requests:
        await stream.write(request)


async def test_an_invalid_subscription_is_accepted_and_its_receive_is_refused_with_the_reason(caller: Caller) -> None:
    wrong = [
        (pb.Subscription(group=named("a/b")), Code.ILLEGAL_CONSUMER_GROUP),
        (
            pb.Subscription(group=named(GROUP), subscriptions=[pb.SubscriptionEntry(topic=named("a/#/b"))]),
            Code.ILLEGAL_TOPIC,
        ),
        (
            pb.Subscription(
                group=named(GROUP),
                subscriptions=[pb.SubscriptionEntry(topic=named("a"), expression=pb.FilterExpression(expression="a ||"))],
            ),
            Code.ILLEGAL_FILTER_EXPRESSION,
        ),
    ]
    for subscription, code in wrong:
        stream = caller.telemetry()
        await stream.write(settings(TYPES.PUSH_CONSUMER, subscription=subscription))
        answer = await stream.read()
        assert (answer.status.code, answer.settings.subscription.receive_batch_size) == (Code.OK, 32)
        stream.cancel()
        request = receive_request()
        request.group.CopyFrom(subscription.group)
        for entry in subscription.subscriptions:
            request.message_queue.topic.CopyFrom(entry.topic)
            request.filter_expression.CopyFrom(entry.expression)
        (refused,) = [response.status async for response in caller.stream("ReceiveMessage", request)]
        assert (refused.code, bool(refused.message)) == (code, True)


async def test_consumers_of_a_fifo_group_learn_that_it_is_fifo(node: Node, caller: Caller) -> None:
    node.create(GROUP, TOPIC, fifo=True)
    entries = [pb.SubscriptionEntry(topic=named(TOPIC))]
    stream = caller.telemetry()
    await stream.write(settings(TYPES.PUSH_CONSUMER, subscription=pb.Subscription(group=named(GROUP), subscriptions=entries)))
    assert (await stream.read()).settings.subscription.fifo
    for group, queue_id in ((GROUP, 0), ("other", -1)):
        request = service_pb.QueryAssignmentRequest(topic=named(TOPIC), group=named(group), endpoints=ENDPOINTS)
        (assignment,) = (await caller.call("QueryAssignment", request)).assignments
        assert assignment.message_queue.id == queue_id


async def test_only_a_producer_of_the_topic_is_asked_for_an_outcome_as_soon_as_there_is_one(tmp_path: Path) -> None:
    async with (
        Node(tmp_path / "data", pop=PopOptions(transaction_check_ms=100)) as node,
        grpc.aio.insecure_channel(node.target) as channel,
    ):
        consumer = Caller(channel, "consumer").telemetry()
        await consumer.write(settings(TYPES.PUSH_CONSUMER, subscription=pb.Subscription(group=named(GROUP))))
        await consumer.read()
        others = Caller(channel, "others").telemetry()
        await others.write(settings(TYPES.PRODUCER, publishing=pb.Publishing(topics=[named("elsewhere")])))
        await others.read()
        sent = await Caller(channel, "gone").send(outgoing(b"half", kind=TYPE.TRANSACTION))
        await node.until(lambda: any(half.checks for half in node.transactions))
        producer = Caller(channel, "producer")
        stream = producer.telemetry()
        await stream.write(settings(TYPES.PRODUCER, publishing=pb.Publishing(topics=[named(TOPIC)])))
        found = [await stream.read(), await stream.read()]
        question = next(each for each in found if each.HasField("recover_orphaned_transaction_command"))
        asked = question.recover_orphaned_transaction_command
        assert (asked.message.body, asked.message.system_properties.message_type) == (b"half", TYPE.TRANSACTION)
        assert asked.transaction_id == sent.entries[0].transaction_id
        unknown = service_pb.EndTransactionRequest(transaction_id=asked.transaction_id)
        assert (await producer.call("EndTransaction", unknown)).status.code == Code.OK
        assert len(node.transactions) == 1
        for resolution, code in (("COMMIT", Code.OK), ("COMMIT", Code.OK), ("ROLLBACK", Code.PRECONDITION_FAILED)):
            end = service_pb.EndTransactionRequest(
                transaction_id=asked.transaction_id, resolution=pb.TransactionResolution.Value(resolution)
            )
            assert (await producer.call("EndTransaction", end)).status.code == code
        assert bodies((await producer.receive())[1]) == [b"half"]
        for stream in (consumer, others):
            stream.cancel()


async def test_a_half_message_is_asked_about_when_its_sender_says(node: Node, caller: Caller) -> None:
    await caller.send(outgoing(b"a", kind=TYPE.TRANSACTION, orphaned_transaction_recovery_duration={"seconds": 3}))
    await caller.send(outgoing(b"b", kind=TYPE.TRANSACTION))
    node.advance(4_000)
    assert [half.checks for half in node.transactions] == [1, 0]
    await node.store.durable()
    node.advance(PopOptions().transaction_check_ms - 3_000)
    assert [half.checks for half in node.transactions] == [1, 1]


async def test_open_streams_do_not_delay_the_stop_of_a_node(tmp_path: Path) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    async with grpc.aio.insecure_channel(node.target) as channel:
        stream = Caller(channel).telemetry()
        await stream.write(settings(TYPES.PRODUCER, publishing=pb.Publishing()))
        await stream.read()
        ended = asyncio.ensure_future(node.stop())
        assert await asyncio.wait_for(stream.read(), WAIT_S_MAX) is EOF
        await ended


# --- access ---------------------------------------------------------------------------------------------------------

FILE = """
[[principal]]
name = "billing"
access_key = "key"
access_secret = "s3cret"
write = ["plant/#"]
read = ["plant/#"]
consume = ["billing"]

[[principal]]
name = "auditor"
access_key = "other"
access_secret = "0ther"
"""


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Node]:
    (tmp_path / "access.toml").write_text(FILE)
    async with Node(tmp_path / "data", access=tmp_path / "access.toml") as started:
        yield started


def signature(key: str = "key", secret: str = "s3cret", stamp: str = "20260101T000000Z") -> tuple[tuple[str, str], ...]:
    signed = hmac.digest(secret.encode(), stamp.encode(), "sha1").hex()
    shown = f"MQv2-HMAC-SHA1 Credential={key}, SignedHeaders=x-mq-date-time, Signature={signed}"
    return (("x-mq-date-time", stamp), ("authorization", shown))


STRANGERS: list[tuple[tuple[str, str], ...]] = [
    (),
    signature(secret="wrong"),
    signature(key="none"),
    signature(key="", secret=""),
    (("x-mq-date-time", "20270101T000000Z"), signature()[1]),
    (signature()[1],),
    (("authorization", "MQv2-HMAC-SHA1 "),),
    (("authorization", "MQv2-HMAC-SHA1 Credential=key, Signature="),),
    (("authorization", "Bearer s3cret"),),
]


async def test_every_method_refuses_a_caller_without_a_principal(guarded: Node) -> None:
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        for metadata in STRANGERS:
            stranger = Caller(channel, "c1", *metadata)
            assert (await stranger.send(outgoing())).status.code == Code.UNAUTHORIZED, metadata
            assert await stranger.receive() == (Code.UNAUTHORIZED, [])
            heartbeat = service_pb.HeartbeatRequest(client_type=TYPES.PRODUCER)
            assert (await stranger.call("Heartbeat", heartbeat)).status.code == Code.UNAUTHORIZED
            stream = stranger.telemetry()
            assert [command.status.code async for command in commands(stream)] == [Code.UNAUTHORIZED]
    assert guarded.store.messages_stored == 0


async def test_a_caller_that_signs_has_the_rights_of_the_access_file(guarded: Node) -> None:
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        caller = Caller(channel, "c1", *signature())
        assert (await caller.send(outgoing())).status.code == Code.OK
        code, messages = await caller.receive()
        assert (code, len(messages)) == (Code.OK, 1)
        assert (await caller.ack(*handles(messages))).status.code == Code.OK
        refused = await caller.send(outgoing(), outgoing(topic="secret/x"))
        assert (refused.status.code, "billing may not send 'secret/x'" in refused.status.message) == (Code.FORBIDDEN, True)
        lite = outgoing(topic="secret", kind=TYPE.LITE, lite_topic="x")
        assert (await caller.send(lite)).status.code == Code.FORBIDDEN
        assert (await caller.send(outgoing(topic="a/#"))).status.code == Code.FORBIDDEN
        assert await caller.receive(group="others") == (Code.FORBIDDEN, [])
        assert (await caller.ack("x", group="others")).status.code == Code.FORBIDDEN
        assert (await caller.ack("x", group="a/b")).status.code == Code.ILLEGAL_CONSUMER_GROUP
        stream = caller.telemetry()
        await stream.write(settings(TYPES.PRODUCER, publishing=pb.Publishing(topics=[named("plant/1")])))
        assert (await stream.read()).status.code == Code.OK
        both = pb.Publishing(topics=[named("secret/x"), named("a/#/b"), named("plant/1")])
        await stream.write(settings(TYPES.PRODUCER, publishing=both))
        assert (await stream.read()).status.code == Code.OK
        assert guarded.rocketmq is not None
        assert guarded.rocketmq.clients.publisher_of("secret/x", 0) is None
        assert guarded.rocketmq.clients.publisher_of("plant/1", 0) is not None
        stream.cancel()
    assert guarded.store.messages_stored == 1


OTHERS = pb.MessageQueue(topic=named("hr/#"))
NOT_READABLE: list[tuple[str, Any]] = [
    ("ReceiveMessage", receive_request(topic="hr/#", wait_ms=0)),
    ("ReceiveMessage", receive_request(topic="#", wait_ms=0)),
    ("PullMessage", service_pb.PullMessageRequest(group=named(GROUP), message_queue=OTHERS, batch_size=1)),
    ("QueryOffset", service_pb.QueryOffsetRequest(message_queue=OTHERS, query_offset_policy=pb.QueryOffsetPolicy.END)),
    ("GetOffset", service_pb.GetOffsetRequest(group=named(GROUP), message_queue=OTHERS)),
    ("UpdateOffset", service_pb.UpdateOffsetRequest(group=named(GROUP), message_queue=OTHERS)),
    (
        "SyncLiteSubscription",
        service_pb.SyncLiteSubscriptionRequest(
            action=pb.LiteSubscriptionAction.PARTIAL_ADD, topic=named("hr"), group=named(GROUP), lite_topic_set=["1"]
        ),
    ),
]


async def code_of(caller: Caller, method: str, request: Any) -> int:
    """Return the status code of the first response to a request."""
    if SERVICE.methods_by_name[method].server_streaming:
        return int((await anext(aiter(caller.stream(method, request)))).status.code)
    return int((await caller.call(method, request)).status.code)


async def test_a_group_gives_nobody_the_topics_that_the_caller_may_not_read(guarded: Node) -> None:
    guarded.publish(b"secret", topic="hr/1")
    guarded.create("operators", "hr/#")
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        for method, request in NOT_READABLE:
            assert await code_of(Caller(channel, "c1", *signature()), method, request) == Code.FORBIDDEN, (method, request)
            assert [group.name for group in guarded.core.groups] == ["operators"], (method, request)


async def test_only_who_may_send_to_its_topic_recalls_a_message_or_ends_a_transaction(guarded: Node) -> None:
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        sender, other = Caller(channel, "c1", *signature()), Caller(channel, "c2", *signature("other", "0ther"))
        later = {"seconds": guarded.store.now_ms() // 1000 + 600}
        sent = await sender.send(outgoing(kind=TYPE.DELAY, delivery_timestamp=later))
        recall = service_pb.RecallMessageRequest(topic=named(TOPIC), recall_handle=sent.entries[0].recall_handle)
        sent = await sender.send(outgoing(kind=TYPE.TRANSACTION))
        end = service_pb.EndTransactionRequest(
            topic=named(TOPIC),
            message_id=sent.entries[0].message_id,
            transaction_id=sent.entries[0].transaction_id,
            resolution=pb.TransactionResolution.COMMIT,
        )
        for method, request in (("RecallMessage", recall), ("EndTransaction", end)):
            for caller, code in ((other, Code.FORBIDDEN), (sender, Code.OK)):
                assert await code_of(caller, method, request) == code, method


PULL = service_pb.PullMessageRequest(group=named(GROUP), message_queue=pb.MessageQueue(topic=named("plant/#")), batch_size=1)
PULL.long_polling_timeout.FromMilliseconds(60_000)
WAITING: dict[str, tuple[str, Any]] = {
    "receive": ("ReceiveMessage", receive_request(topic="plant/#", wait_ms=60_000)),
    "receive-lite": ("ReceiveMessage", receive_request(topic="plant", wait_ms=60_000)),
    "pull": ("PullMessage", PULL),
}


@pytest.mark.parametrize("name", WAITING)
async def test_a_call_that_waits_ends_when_its_caller_may_no_longer_read(guarded: Node, tmp_path: Path, name: str) -> None:
    method, request = WAITING[name]
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        caller = Caller(channel, "c1", *signature())
        if name == "receive-lite":
            lite = service_pb.SyncLiteSubscriptionRequest(
                action=pb.LiteSubscriptionAction.PARTIAL_ADD, topic=named("plant"), group=named(GROUP), lite_topic_set=["1"]
            )
            assert await code_of(caller, "SyncLiteSubscription", lite) == Code.OK
        waiting = asyncio.create_task(code_of(caller, method, request))
        groups = guarded.core.groups
        await guarded.until(lambda: any(group.polls or len(group.queue.watchers) == 2 for group in groups))
        (tmp_path / "access.toml").write_text(FILE.replace('read = ["plant/#"]', 'read = ["other/#"]'))
        guarded.access.reload(Subject("a test"))
        guarded.publish(b"secret", topic="plant/1")
        assert await asyncio.wait_for(waiting, WAIT_S_MAX) == Code.FORBIDDEN
        assert not any(group.polls for group in groups)


async def test_a_producer_that_may_no_longer_send_is_shown_no_half_message(guarded: Node, tmp_path: Path) -> None:
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        caller = Caller(channel, "c1", *signature())
        await caller.send(outgoing(b"half", kind=TYPE.TRANSACTION))
        stream = caller.telemetry()
        await stream.write(settings(TYPES.PRODUCER, publishing=pb.Publishing()))
        await stream.read()
        assert guarded.rocketmq is not None
        clients = guarded.rocketmq.clients
        assert clients.publisher_of(TOPIC, 0) is not None
        (tmp_path / "access.toml").write_text(FILE.replace('write = ["plant/#"]', "write = []"))
        guarded.access.reload(Subject("a test"))
        assert clients.publisher_of(TOPIC, 0) is None
        stream.cancel()


async def test_a_region_and_a_service_after_the_access_key_are_left_out(guarded: Node) -> None:
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        for key in ("key//Rocketmq", "key/eu-1/Rocketmq"):
            assert (await Caller(channel, "c1", *signature(key)).send(outgoing())).status.code == Code.OK
        for key in ("/key", "other/key", "//"):
            assert (await Caller(channel, "c1", *signature(key)).send(outgoing())).status.code == Code.UNAUTHORIZED


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["python", "node", "go"])
async def test_the_node_accepts_the_signatures_of_the_official_clients(guarded: Node, tmp_path: Path, kind: Kind) -> None:
    def use() -> None:
        client = ClientProcess(kind, guarded.target, tmp_path, "key", "s3cret")
        try:
            client.do("producer", topics=["plant"])
            client.do("simple", group="billing", topics={"plant": "*"})
            client.do("send", topic="plant", body="signed")
            assert [message["body"] for message in client.receive()] == ["signed"]
        finally:
            client.close()
        if kind == "go":  # It tries again for ever.
            return
        stranger = ClientProcess(kind, guarded.target, tmp_path, "key", "wrong")
        try:
            stranger.do("producer", topics=[])
            with pytest.raises(ClientFailed, match=r"route|access key"):
                stranger.do("send", topic="plant", body="forged")
        finally:
            stranger.close()

    await asyncio.to_thread(use)
    assert guarded.store.messages_stored == 1


async def test_bans_and_kicks_hold_without_an_access_file(tmp_path: Path) -> None:
    async with Node(tmp_path / "data") as node, grpc.aio.insecure_channel(node.target) as channel:
        caller, other = Caller(channel, "c1"), Caller(channel, "c2")
        stream, others = caller.telemetry(), other.telemetry()
        for each in (stream, others):
            await each.write(settings(TYPES.PRODUCER, publishing=pb.Publishing(topics=[named("plant/1")])))
            assert (await each.read()).status.code == Code.OK
        assert node.kick("client", "c1") == 1
        assert [command.status.code async for command in commands(stream)][-1:] == [Code.TOO_MANY_REQUESTS]
        assert (await caller.send(outgoing())).status.code == Code.OK
        await node.access.ban("client", "c1", for_ms=0, why="", by=Subject("test"))
        refused = await caller.send(outgoing())
        assert (refused.status.code, "client c1 is banned" in refused.status.message) == (Code.FORBIDDEN, True)
        assert (await other.send(outgoing())).status.code == Code.OK
        await node.access.ban("address", "127.0.0.1", for_ms=0, why="", by=Subject("test"))
        assert [command.status.code async for command in commands(others)][-1:] == [Code.FORBIDDEN]
        assert (await other.send(outgoing())).status.code == Code.FORBIDDEN
    assert node.store.messages_stored == 2


async def test_a_principal_can_t_end_the_client_of_another_one(guarded: Node) -> None:
    assert guarded.rocketmq is not None
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        caller = Caller(channel, "c1", *signature())
        await caller.send(outgoing())
        leased = (await caller.receive(auto_renew=True))[1]
        other = Caller(channel, "c1", *signature("other", "0ther"))
        end = service_pb.NotifyClientTerminationRequest()
        assert (await other.call("NotifyClientTermination", end)).status.code == Code.OK
        assert len(guarded.rocketmq.clients) == 2
        await guarded.until(lambda: guarded.rocketmq is not None and len(guarded.rocketmq.clients) == 1)
        assert (await caller.ack(*handles(leased))).status.code == Code.OK


async def test_an_access_key_does_not_work_with_another_principal_s_token(guarded: Node) -> None:
    async with Client(guarded.target, security=Security(token="s3cret")) as client:
        with pytest.raises(PopError, match="token"):
            await client.send(TOPIC, b"a")


# --- without the extra ----------------------------------------------------------------------------------------------

WITHOUT = """
import sys
sys.modules["rocketmq"] = None
from penstock.pop.server import rocketmq_service
assert rocketmq_service(*[None] * 7) is None
"""


def test_a_node_without_the_extra_logs_how_to_install_it_and_runs() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True, timeout=PROCESS_S)
    assert install_hint("rocketmq") in ended.stdout + ended.stderr


WITHOUT_CLIENT = """
import sys
from penstock.pop.rocketmq.stubs import pb
loaded = [name for name in sys.modules if name.startswith(("rocketmq.v5", "opentelemetry"))]
assert not loaded and "rocketmq" not in sys.modules, loaded
import rocketmq
from rocketmq.grpc_protocol import definition_pb2
assert rocketmq.Producer and definition_pb2 is pb
"""


@pytest.mark.nightly
def test_the_stubs_load_without_the_client_which_can_be_imported_later(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", WITHOUT_CLIENT], check=True, timeout=PROCESS_S, env={"HOME": str(tmp_path), "PATH": ""}
    )


def test_the_service_is_that_of_the_protocol() -> None:
    assert SERVICE.full_name == "apache.rocketmq.v2.MessagingService"
