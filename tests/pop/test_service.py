"""The native services: every call and every bad input. The node must continue to work after each of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from penstock.pop.core.handle import BLOCK, Handles
from penstock.pop.core.sender import PROPERTIES_MAX, PROPERTY_BYTES_MAX
from penstock.pop.grpc.requests import HANDLES_MAX
from penstock.pop.grpc.sends import MESSAGES_PER_SEND_MAX
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.options import MIB, StoreOptions
from penstock.timer.options import TimerOptions
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node, stub_of

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import PopServiceAsyncStub

LONG_MS = 50_000


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def send(stub: PopServiceAsyncStub, *bodies: bytes, topic: str = TOPIC) -> list[pb.SendResult]:
    answer = await stub.Send(pb.SendRequest(messages=[pb.Message(topic=topic, body=body) for body in bodies]))
    assert {result.status.code for result in answer.results} <= {pb.OK}
    return list(answer.results)


async def pop(
    stub: PopServiceAsyncStub,
    *,
    group: str = GROUP,
    topic_filter: str = FILTER,
    messages_max: int = 0,
    invisible_ms: int = 0,
    wait_ms: int = LONG_MS,
) -> list[pb.PoppedMessage]:
    request = pb.PopRequest(
        group=group, filter=topic_filter, messages_max=messages_max, invisible_ms=invisible_ms, wait_ms=wait_ms
    )
    return list((await stub.Pop(request)).messages)


async def ack(stub: PopServiceAsyncStub, *handles: str, group: str = GROUP) -> list[int]:
    answer = await stub.Ack(pb.AckRequest(group=group, handles=handles))
    assert all(bool(status.detail) == (status.code != pb.OK) for status in answer.statuses)
    return [status.code for status in answer.statuses]


async def change(stub: PopServiceAsyncStub, handle: str, invisible_ms: int, *, suspend: bool = False) -> tuple[int, str]:
    wish = pb.InvisibleChange(handle=handle, invisible_ms=invisible_ms, suspend=suspend)
    (result,) = (await stub.ChangeInvisible(pb.ChangeInvisibleRequest(group=GROUP, changes=[wish]))).results
    return result.status.code, result.handle


async def recall(stub: PopServiceAsyncStub, *handles: str) -> list[int]:
    return [status.code for status in (await stub.Recall(pb.RecallRequest(recall_handles=handles))).statuses]


async def serves_on(stub: PopServiceAsyncStub) -> None:
    """Fail unless the node works as if nothing had happened."""
    await send(stub, b"alive", topic="alive/1")
    (message,) = await pop(stub, group="alive", topic_filter="alive/#")
    assert message.body == b"alive"
    assert await ack(stub, message.handle, group="alive") == [pb.OK]


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[PopServiceAsyncStub]:
    """A node with limits that a test can reach."""
    node = Node(
        tmp_path / "small",
        pop=PopOptions(message_bytes_max=2_000, groups_max=2, waiters_max=1, messages_max=3, wait_ms_max=20),
        timer=TimerOptions(pending_max=1, delay_ms_max=60_000),
        store=StoreOptions(segment_bytes=MIB, queues_max=6, topic_levels_max=8),
    )
    async with node, grpc.aio.insecure_channel(node.target) as channel:
        yield stub_of(channel)


# --- the normal case --------------------------------------------------------------------------------------------------


async def test_what_is_sent_is_popped_with_all_that_it_carries(stub: PopServiceAsyncStub) -> None:
    properties = {"unit": "°C", "empty": "", "": "no name", "x" * 1_000: "y" * PROPERTY_BYTES_MAX}
    message = pb.Message(topic=TOPIC, body=bytes(range(256)), properties=properties, tag="reading", message_group="plant/1")
    before_ms = now_ms()
    (sent,) = (await stub.Send(pb.SendRequest(messages=[message]))).results
    (popped,) = await pop(stub, invisible_ms=5_000)
    assert popped.message_id == sent.message_id
    assert (popped.topic, popped.body, dict(popped.properties)) == (TOPIC, bytes(range(256)), properties)
    assert (popped.tag, popped.message_group, popped.attempt, popped.queue_offset) == ("reading", "plant/1", 1, 0)
    assert before_ms <= popped.stored_ms <= now_ms()
    assert before_ms + 5_000 <= popped.visible_at_ms <= now_ms() + 5_000


async def test_an_empty_message_and_an_empty_pop_are_no_errors(stub: PopServiceAsyncStub) -> None:
    assert await pop(stub, wait_ms=0) == []
    await send(stub, b"")
    (popped,) = await pop(stub)
    assert (popped.body, dict(popped.properties), popped.tag) == (b"", {}, "")
    assert list((await stub.Send(pb.SendRequest())).results) == []
    assert await ack(stub) == []
    assert await recall(stub) == []


PLAIN = [pb.Message(topic=f"plant/{n // 3 % 2}", body=b"%d" % n * (1 + n // 20)) for n in range(40)]
"""Messages with topic and body only, which are stored together: runs of one topic and one length, and others."""


@pytest.mark.parametrize(
    "messages",
    [
        PLAIN,
        [pb.Message(topic="plant/1", body=b"%03d" % n) for n in range(300)],
        [pb.Message(topic="plant/1") for _ in range(9)],
        [*PLAIN, pb.Message(topic="plant/1", body=b"with more", tag="t")],
        [*PLAIN, pb.Message(topic="plant/1", body=b"with more", extras=pb.MessageExtras(content_type="text"))],
    ],
)
async def test_each_message_of_a_call_is_stored_in_order_under_the_id_that_is_answered(
    node: Node, stub: PopServiceAsyncStub, messages: list[pb.Message]
) -> None:
    results = (await stub.Send(pb.SendRequest(messages=messages))).results
    assert node.store.durable_position == node.store.log.end
    assert {result.status.code for result in results} == {pb.OK}
    popped = await pop(stub, messages_max=1_000, topic_filter="plant/#")
    assert [(each.message_id, each.topic, each.body, each.tag) for each in popped] == [
        (result.message_id, message.topic, message.body, message.tag) for result, message in zip(results, messages, strict=True)
    ]


async def test_messages_of_a_call_that_cannot_be_stored_are_named_and_the_others_are_stored(small: PopServiceAsyncStub) -> None:
    wrong = [pb.Message(topic="plant/+", body=b"x"), pb.Message(body=b"x"), pb.Message(topic="plant/0", body=bytes(2_001))]
    codes = [pb.INVALID_TOPIC, pb.INVALID_TOPIC, pb.MESSAGE_TOO_LARGE]
    for each, code in zip(wrong, codes, strict=True):
        results = (await small.Send(pb.SendRequest(messages=[*PLAIN, each, *PLAIN]))).results
        assert [result.status.code for result in results] == [pb.OK] * 40 + [code] + [pb.OK] * 40


async def test_an_unacknowledged_message_reaches_a_waiting_poll_at_its_deadline_and_not_before(
    node: Node, stub: PopServiceAsyncStub
) -> None:
    await send(stub, b"a")
    (first,) = await pop(stub, invisible_ms=60_000)
    poll = asyncio.ensure_future(pop(stub))
    await node.until(lambda: node.core.waiting == 1)
    node.advance(first.visible_at_ms - node.clock.now_ms() - 10_000)
    assert node.core.waiting == 1
    node.advance(10_000)
    (again,) = await poll
    assert (again.body, again.attempt) == (b"a", 2)


async def test_acknowledging_states_what_came_of_each_handle(node: Node, stub: PopServiceAsyncStub) -> None:
    await send(stub, b"a", b"b", b"c", b"d")
    a, b, c, d = await pop(stub)
    expiring = await change(stub, d.handle, 1_000)
    node.advance(1_000)
    await node.until(lambda: node.core.counters.revived == 1)
    forged = b.handle[:-2] + f"{int(b.handle[-2:], 16) ^ 1:02x}"
    handles = [a.handle, a.handle, forged, c.handle, d.handle, expiring[1], "", "zz", "é"]
    assert await ack(stub, *handles) == [
        pb.OK,
        pb.ALREADY_ACKED,
        pb.INVALID_HANDLE,
        pb.OK,
        pb.HANDLE_REPLACED,
        pb.HANDLE_EXPIRED,
        pb.INVALID_HANDLE,
        pb.INVALID_HANDLE,
        pb.INVALID_HANDLE,
    ]
    assert await ack(stub, b.handle, group="another") == [pb.INVALID_HANDLE]
    assert await ack(stub, b.handle, group="") == [pb.INVALID_HANDLE]
    assert await ack(stub, b.handle) == [pb.OK]


async def test_a_pop_acknowledges_what_it_names_by_the_same_call(node: Node, stub: PopServiceAsyncStub) -> None:
    await send(stub, b"0", b"1", b"2")
    first = await pop(stub, messages_max=2)
    request = pb.PopRequest(group=GROUP, filter=FILTER, acks=[message.handle for message in first])
    answer = await stub.Pop(request)
    assert [message.body for message in answer.messages] == [b"2"]
    assert list(answer.ack_statuses) == []  # empty, because all acknowledgements are OK
    assert node.store.durable_position == node.store.log.end
    assert (node.group().in_flight, node.core.counters.acked) == (1, 2)


async def test_a_pop_states_what_came_of_each_ack_and_goes_on(node: Node, stub: PopServiceAsyncStub) -> None:
    await send(stub, b"0", b"1", b"2", b"3", b"4", b"5")
    good, twice, before, replaced = (message.handle for message in await pop(stub, messages_max=4))
    (expired,) = await pop(stub, messages_max=1, invisible_ms=1_000)
    assert await ack(stub, before) == [pb.OK]
    code, newer = await change(stub, replaced, LONG_MS)
    assert code == pb.OK
    node.advance(1_000)
    await node.until(lambda: node.core.counters.revived == 1)
    acks = [good, "x", twice, twice, before, replaced, expired.handle, newer, good[:-2], ""]
    answer = await stub.Pop(pb.PopRequest(group=GROUP, filter=FILTER, messages_max=2, acks=acks))
    assert sorted(message.body for message in answer.messages) == [b"4", b"5"]
    assert [status.code for status in answer.ack_statuses] == [
        pb.OK,
        pb.INVALID_HANDLE,
        pb.OK,
        pb.ALREADY_ACKED,
        pb.ALREADY_ACKED,
        pb.HANDLE_REPLACED,
        pb.HANDLE_EXPIRED,
        pb.OK,
        pb.INVALID_HANDLE,
        pb.INVALID_HANDLE,
    ]
    assert all(bool(status.detail) == (status.code != pb.OK) for status in answer.ack_statuses)
    assert node.group().in_flight == 2


async def test_a_pop_that_acknowledges_does_not_wait_for_messages(
    node: Node, stub: PopServiceAsyncStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(stub, b"0")
    (message,) = await pop(stub)
    request = pb.PopRequest(group=GROUP, filter=FILTER, wait_ms=LONG_MS, acks=[message.handle])
    waits_ms: list[int] = []
    long_poll = node.core.polls.poll

    def noted(groups: Any, messages_max: int, invisible_ms: int, wait_ms: int, *more: Any) -> Any:
        waits_ms.append(wait_ms)
        return long_poll(groups, messages_max, invisible_ms, wait_ms, *more)

    monkeypatch.setattr(node.core.polls, "poll", noted)
    assert await stub.Pop(request) == pb.PopResponse()
    (status,) = (await stub.Pop(request)).ack_statuses
    assert status.code == pb.ALREADY_ACKED
    assert waits_ms == [0, 0]
    assert node.core.waiting == 0


async def test_a_pop_that_is_refused_acknowledges_nothing(node: Node, stub: PopServiceAsyncStub) -> None:
    await send(stub, b"0")
    (message,) = await pop(stub)
    for wrong in ({"messages_max": -1}, {"invisible_ms": -1}, {"wait_ms": -1}, {"start": 99}, {"filter": "a/#/b"}):
        fields = {"group": GROUP, "filter": FILTER, "acks": [message.handle], **wrong}
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Pop(pb.PopRequest(**fields))  # type: ignore[arg-type]
    assert node.group().in_flight == 1
    assert await ack(stub, message.handle) == [pb.OK]


async def test_what_a_pop_acknowledges_makes_room_for_what_it_takes(node: Node, stub: PopServiceAsyncStub) -> None:
    node.create(in_flight_max=2)
    await send(stub, b"0", b"1", b"2")
    first = await pop(stub, wait_ms=0)
    assert (len(first), len(await pop(stub, wait_ms=0))) == (2, 0)
    answer = await stub.Pop(pb.PopRequest(group=GROUP, filter=FILTER, acks=[first[1].handle]))
    assert [message.body for message in answer.messages] == [b"2"]


async def test_a_pop_with_acks_may_be_called_again_with_its_attempt_id(stub: PopServiceAsyncStub) -> None:
    await send(stub, b"0", b"1")
    (message,) = await pop(stub, messages_max=1)
    request = pb.PopRequest(group=GROUP, filter=FILTER, attempt_id="second", acks=[message.handle])
    answers = [await stub.Pop(request) for _ in range(2)]
    assert [[one.handle for one in answer.messages] for answer in answers] == [[answers[0].messages[0].handle]] * 2
    assert [[status.code for status in answer.ack_statuses] for answer in answers] == [[], [pb.ALREADY_ACKED]]


async def test_changes_of_invisible_time_extend_return_and_suspend(stub: PopServiceAsyncStub) -> None:
    await send(stub, b"extended", b"returned", b"suspended")
    extended, returned, suspended = await pop(stub)
    code, handle = await change(stub, extended.handle, 600_000)
    assert code == pb.OK
    assert handle != extended.handle
    assert (await change(stub, returned.handle, 0))[0] == pb.OK
    assert [(message.body, message.attempt) for message in await pop(stub)] == [(b"returned", 2)]
    assert (await change(stub, suspended.handle, 0, suspend=True))[0] == pb.OK
    assert [(message.body, message.attempt) for message in await pop(stub)] == [(b"suspended", 1)]
    assert await change(stub, extended.handle, 5) == (pb.HANDLE_REPLACED, extended.handle)
    assert await ack(stub, extended.handle, handle) == [pb.HANDLE_REPLACED, pb.OK]


async def test_a_delayed_message_comes_when_it_is_due_and_not_before(node: Node, stub: PopServiceAsyncStub) -> None:
    due_ms = now_ms() + 600_000
    message = pb.Message(topic=TOPIC, body=b"late", tag="t", properties={"a": "b"}, deliver_at_ms=due_ms)
    (sent,) = (await stub.Send(pb.SendRequest(messages=[message]))).results
    assert sent.recall_handle
    node.advance(300_000)
    assert await pop(stub, wait_ms=0) == []
    node.advance(300_000)
    (popped,) = await pop(stub)
    assert (popped.message_id, popped.body, popped.tag, dict(popped.properties)) == (sent.message_id, b"late", "t", {"a": "b"})
    assert await recall(stub, sent.recall_handle) == [pb.ALREADY_FIRED]


async def test_a_delivery_time_that_is_past_is_at_once_and_nothing_to_recall(stub: PopServiceAsyncStub) -> None:
    message = pb.Message(topic=TOPIC, body=b"a", deliver_at_ms=now_ms() - 1)
    (sent,) = (await stub.Send(pb.SendRequest(messages=[message]))).results
    assert sent.recall_handle == ""
    assert [popped.body for popped in await pop(stub, wait_ms=0)] == [b"a"]


async def test_a_recalled_message_is_never_delivered(node: Node, stub: PopServiceAsyncStub) -> None:
    messages = [pb.Message(topic=TOPIC, body=b"no", deliver_at_ms=now_ms() + 600_000), pb.Message(topic=TOPIC, body=b"yes")]
    messages.append(pb.Message(topic=TOPIC, body=b"after", deliver_at_ms=messages[0].deliver_at_ms + 1))
    results = (await stub.Send(pb.SendRequest(messages=messages))).results
    handle = results[0].recall_handle
    wrong = handle[:-1] + ("0" if handle[-1] != "0" else "1")
    assert await recall(stub, handle, handle, wrong, "", "x") == [
        pb.OK,
        pb.ALREADY_RECALLED,
        pb.INVALID_HANDLE,
        pb.INVALID_HANDLE,
        pb.INVALID_HANDLE,
    ]
    node.advance(601_000)
    assert node.delayed.fired == 1
    assert [popped.body for popped in await pop(stub)] == [b"yes", b"after"]
    unknown = node.handles.recall(2**40, now_ms())
    assert await recall(stub, unknown) == [pb.UNKNOWN_MESSAGE]


async def test_a_big_body_is_identical_after_a_retry(stub: PopServiceAsyncStub) -> None:
    body = bytes(range(256)) * 4 * 4_000  # 4,096,000 bytes: above gRPC's default maximum for a response
    await send(stub, body, topic="plant/big")
    (first,) = await pop(stub)
    await change(stub, first.handle, 0)
    (again,) = await pop(stub)
    assert again.attempt == 2
    assert again.body == body
    assert again.message_id == first.message_id


async def test_consumers_of_a_group_share_its_messages_and_none_comes_twice(stub: PopServiceAsyncStub) -> None:
    got: list[bytes] = []

    async def consume() -> None:
        while len(got) < 200:
            messages = await pop(stub, messages_max=7, wait_ms=200)
            got.extend(message.body for message in messages)
            assert set(await ack(stub, *(message.handle for message in messages))) <= {pb.OK}

    consumers = [asyncio.create_task(consume()) for _ in range(8)]
    sent = [b"%d" % n for n in range(200)]
    for at in range(0, 200, 50):
        await send(stub, *sent[at : at + 50])
    await asyncio.gather(*consumers)
    assert sorted(got) == sorted(sent)


async def test_a_group_may_start_with_what_comes_now(stub: PopServiceAsyncStub) -> None:
    await send(stub, b"before")
    request = pb.PopRequest(group="late", filter=FILTER, start=pb.LATEST)
    assert list((await stub.Pop(request)).messages) == []
    await send(stub, b"after")
    assert [message.body for message in (await stub.Pop(request)).messages] == [b"after"]


# --- calls that end early ---------------------------------------------------------------------------------------------


async def test_a_poll_that_its_consumer_cancels_leaves_the_message_to_another(node: Node, stub: PopServiceAsyncStub) -> None:
    call = stub.Pop(pb.PopRequest(group=GROUP, filter=FILTER, wait_ms=LONG_MS))
    await node.until(lambda: node.core.waiting == 1)
    call.cancel()
    await node.until(lambda: node.core.waiting == 0)
    await send(stub, b"a")
    (message,) = await pop(stub)
    assert (message.body, message.attempt) == (b"a", 1)


async def test_a_poll_whose_connection_ends_leaves_the_message_to_another(node: Node, stub: PopServiceAsyncStub) -> None:
    async with grpc.aio.insecure_channel(node.target) as channel:
        call = stub_of(channel).Pop(pb.PopRequest(group=GROUP, filter=FILTER, wait_ms=LONG_MS))
        await node.until(lambda: node.core.waiting == 1)
    await node.until(lambda: node.core.waiting == 0)
    assert call.cancelled()
    await send(stub, b"a")
    assert [(message.body, message.attempt) for message in await pop(stub)] == [(b"a", 1)]


async def test_a_poll_with_a_deadline_leaves_the_message_to_another(node: Node, stub: PopServiceAsyncStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Pop(pb.PopRequest(group=GROUP, filter=FILTER, wait_ms=LONG_MS), timeout=0.05)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await node.until(lambda: node.core.waiting == 0)
    await send(stub, b"a")
    assert [(message.body, message.attempt) for message in await pop(stub)] == [(b"a", 1)]


# --- bad messages: each has a status, and the others of the batch are stored ------------------------------------------


BAD: list[tuple[pb.Message, int]] = [
    (pb.Message(topic=""), pb.INVALID_TOPIC),
    (pb.Message(topic="a/+"), pb.INVALID_TOPIC),
    (pb.Message(topic="a/#"), pb.INVALID_TOPIC),
    (pb.Message(topic="a\0b"), pb.INVALID_TOPIC),
    (pb.Message(topic="x" * 70_000), pb.INVALID_TOPIC),
    (pb.Message(topic="/" * 10), pb.INVALID_TOPIC),
    (pb.Message(topic="$SYS/x"), pb.INVALID_TOPIC),
    (pb.Message(topic="$dlq/billing"), pb.INVALID_TOPIC),
    (pb.Message(topic="$retry/1"), pb.INVALID_TOPIC),
    (pb.Message(topic=TOPIC, body=bytes(2_001)), pb.MESSAGE_TOO_LARGE),
    (pb.Message(topic=TOPIC, properties={"a": "b" * 2_000}), pb.INVALID_PROPERTY),
    (pb.Message(topic=TOPIC, properties={"a": "b" * (PROPERTY_BYTES_MAX + 1)}), pb.INVALID_PROPERTY),
    (pb.Message(topic=TOPIC, properties={"é" * 40_000: ""}), pb.INVALID_PROPERTY),
    (pb.Message(topic=TOPIC, tag="t" * 65_536), pb.INVALID_PROPERTY),
    (pb.Message(topic=TOPIC, message_group="g" * 65_536), pb.INVALID_PROPERTY),
    (pb.Message(topic=TOPIC, properties={str(n): "" for n in range(PROPERTIES_MAX + 1)}), pb.INVALID_PROPERTY),
    (pb.Message(topic=TOPIC, deliver_at_ms=-1), pb.INVALID_DELIVERY_TIME),
    (pb.Message(topic=TOPIC, deliver_at_ms=-(2**63)), pb.INVALID_DELIVERY_TIME),
    (pb.Message(topic=TOPIC, deliver_at_ms=2**63 - 1), pb.INVALID_DELIVERY_TIME),
    (pb.Message(topic=TOPIC, deliver_at_ms=now_ms() + 3_600_000), pb.INVALID_DELIVERY_TIME),
    (pb.Message(topic=TOPIC, delay_ms=3_600_000), pb.INVALID_DELIVERY_TIME),
    (pb.Message(topic=TOPIC, delay_ms=-1), pb.INVALID_DELIVERY_TIME),
    (pb.Message(topic=TOPIC, delay_ms=2**63 - 1), pb.INVALID_DELIVERY_TIME),
    (pb.Message(topic=TOPIC, delay_ms=1, deliver_at_ms=now_ms() + 1_000), pb.INVALID_DELIVERY_TIME),
]


async def test_a_bad_message_is_refused_alone(small: PopServiceAsyncStub) -> None:
    for message, code in BAD:
        good = pb.Message(topic=TOPIC, body=b"good")
        answer = await small.Send(pb.SendRequest(messages=[good, message, good]))
        case = str(message)[:200]
        assert [result.status.code for result in answer.results] == [pb.OK, code, pb.OK], case
        assert answer.results[1].status.detail, case
        assert (answer.results[1].message_id, answer.results[1].recall_handle) == ("", ""), case
        popped = await pop(small)
        assert [each.body for each in popped] == [b"good", b"good"], case
        await ack(small, *(each.handle for each in popped))
    await serves_on(small)


async def test_a_message_as_large_as_allowed_is_stored(small: PopServiceAsyncStub) -> None:
    await small.Send(pb.SendRequest(messages=[pb.Message(topic=TOPIC, body=bytes(2_000), properties={"a": "b" * 1_900})]))
    assert [len(message.body) for message in await pop(small)] == [2_000]


async def test_more_delayed_messages_than_allowed_are_refused(small: PopServiceAsyncStub) -> None:
    delayed = pb.Message(topic=TOPIC, deliver_at_ms=now_ms() + 50_000)
    results = (await small.Send(pb.SendRequest(messages=[delayed, delayed]))).results
    assert [result.status.code for result in results] == [pb.OK, pb.TOO_MANY_TIMERS]
    assert "timer.pending_max" in results[1].status.detail
    assert await recall(small, results[0].recall_handle) == [pb.OK]
    (again,) = (await small.Send(pb.SendRequest(messages=[delayed]))).results
    assert again.status.code == pb.OK


async def test_a_topic_that_needs_one_queue_too_many_is_refused(small: PopServiceAsyncStub) -> None:
    messages = [pb.Message(topic=f"level{n}/x") for n in range(8)]
    results = (await small.Send(pb.SendRequest(messages=messages))).results
    assert [result.status.code for result in results] == [pb.OK] * 6 + [pb.TOO_MANY_QUEUES] * 2
    assert "store.queues_max" in results[7].status.detail
    await send(small, b"a", topic="level0/y")


# --- bad calls end with a gRPC status ---------------------------------------------------------------------------------


BAD_POPS: list[tuple[dict[str, object], str]] = [
    ({"group": ""}, "empty"),
    ({"group": "a/b"}, "characters"),
    ({"group": " a"}, "characters"),
    ({"group": "a\n"}, "characters"),
    ({"group": "x" * 256}, "255 bytes"),
    ({"filter": ""}, "filter"),
    ({"filter": "a/#/b"}, "filter"),
    ({"filter": "a+"}, "filter"),
    ({"filter": "a\0"}, "filter"),
    ({"filter": "/" * 100}, "filter"),
    ({"filter": "$SYS/#"}, r"\$dlq/GROUP"),
    ({"filter": f"$dlq/{GROUP}"}, "its own dead letters"),
    ({"messages_max": -1}, "messages_max"),
    ({"messages_max": -(2**31)}, "messages_max"),
    ({"invisible_ms": -1}, "invisible_ms"),
    ({"invisible_ms": 12 * 3_600_000 + 1}, "invisible_ms"),
    ({"invisible_ms": 2**63 - 1}, "invisible_ms"),
    ({"wait_ms": -1}, "wait_ms"),
    ({"wait_ms": -(2**63)}, "wait_ms"),
    ({"start": 7}, "start"),
]


async def test_a_bad_pop_is_refused_and_says_why(small: PopServiceAsyncStub) -> None:
    for fields, says in BAD_POPS:
        request = pb.PopRequest(**{"group": GROUP, "filter": FILTER, **fields})  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AioRpcError, match=says) as raised:
            await small.Pop(request)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT, fields
    await serves_on(small)


async def test_more_than_a_pop_may_have_is_cut_to_it(small: PopServiceAsyncStub) -> None:
    await send(small, *([b"x"] * 5))
    assert len(await pop(small, messages_max=2**31 - 1)) == 3
    assert len(await pop(small)) == 2
    assert await pop(small, wait_ms=2**63 - 1) == []  # the wait ends after wait_ms_max


async def test_one_group_too_many_is_refused(small: PopServiceAsyncStub) -> None:
    await pop(small, group="one")
    await pop(small, group="two")
    with pytest.raises(grpc.aio.AioRpcError, match=r"pop\.groups_max") as raised:
        await pop(small, group="three")
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await send(small, b"a")
    assert len(await pop(small, group="two")) == 1


async def test_one_waiting_poll_too_many_is_refused(node: Node, tmp_path: Path) -> None:
    crowded = Node(tmp_path / "crowded", pop=PopOptions(waiters_max=1))
    await crowded.start()
    async with grpc.aio.insecure_channel(crowded.target) as channel:
        stub = stub_of(channel)
        first = asyncio.ensure_future(pop(stub))
        await crowded.until(lambda: crowded.core.waiting == 1)
        with pytest.raises(grpc.aio.AioRpcError, match="are waiting on this node, which is the limit") as raised:
            await pop(stub)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await send(stub, b"a")
        assert len(await first) == 1
    await crowded.stop()


async def test_too_many_messages_or_handles_in_a_call_are_refused(stub: PopServiceAsyncStub) -> None:
    calls: list[Awaitable[object]] = [
        stub.Send(pb.SendRequest(messages=[pb.Message(topic=TOPIC)] * (MESSAGES_PER_SEND_MAX + 1))),
        stub.Ack(pb.AckRequest(group=GROUP, handles=["x"] * (HANDLES_MAX + 1))),
        stub.ChangeInvisible(pb.ChangeInvisibleRequest(group=GROUP, changes=[pb.InvisibleChange()] * (HANDLES_MAX + 1))),
        stub.Recall(pb.RecallRequest(recall_handles=["x"] * (HANDLES_MAX + 1))),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError, match="at most") as raised:
            await call
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await pop(stub, wait_ms=0) == []
    await serves_on(stub)


async def test_a_forged_handle_costs_no_more_codes_than_a_block_has(
    stub: PopServiceAsyncStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = [n.to_bytes(8, "little").hex() + "00" * 12 + "ffff" + "00" * 8 for n in range(500)]
    computed: list[int] = []
    codes = Handles._codes

    def counted(handles: Handles, name: bytes, count: int) -> bytes:
        computed.append(count)
        return codes(handles, name, count)

    monkeypatch.setattr(Handles, "_codes", counted)
    assert set(await ack(stub, *forged)) == {pb.INVALID_HANDLE}
    assert sum(computed) <= 2 * BLOCK * len(forged), "and not a code for each index up to the named one"


@pytest.mark.parametrize("invisible_ms", [-1, -(2**63), 12 * 3_600_000 + 1, 2**63 - 1])
async def test_a_bad_invisible_time_is_refused_and_the_handle_stays_good(stub: PopServiceAsyncStub, invisible_ms: int) -> None:
    await send(stub, b"a")
    (message,) = await pop(stub)
    assert await change(stub, message.handle, invisible_ms) == (pb.INVALID_INVISIBLE_TIME, message.handle)
    assert await ack(stub, message.handle) == [pb.OK]


# --- the listener -----------------------------------------------------------------------------------------------------


async def test_a_port_that_is_taken_is_an_error_that_says_what_to_do(node: Node, tmp_path: Path) -> None:
    second = Node(tmp_path / "second")
    with pytest.raises(OSError, match=f"127.0.0.1:{node.port}.*in use.*another"):
        await second.start(node.port)
    await second.stop()


async def test_handles_and_messages_outlive_a_restart(tmp_path: Path) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    async with grpc.aio.insecure_channel(node.target) as channel:
        await send(stub_of(channel), b"a", b"b")
        (message,) = await pop(stub_of(channel), messages_max=1)
    await node.stop()
    node = Node(tmp_path / "data")
    await node.start()
    async with grpc.aio.insecure_channel(node.target) as channel:
        assert await ack(stub_of(channel), message.handle) == [pb.OK]
        assert [other.body for other in await pop(stub_of(channel))] == [b"b"]
    await node.stop()
