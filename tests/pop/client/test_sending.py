"""Sending with the asyncio client, against a real node."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest

from penstock import Client, OutgoingMessage
from penstock.pop.errors import (
    AlreadyFired,
    AlreadyRecalled,
    BatchFailed,
    InvalidDeliveryTime,
    InvalidHandle,
    InvalidTopic,
    MessageTooLarge,
)
from penstock.pop.proto import pop_pb2 as pb
from tests.pop.client.consuming import first_of
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node

LATE_MS = 600_000
"""Long enough that a busy machine stores the message before it is due."""


async def test_a_message_is_consumed_with_all_fields_that_were_sent(client: Client) -> None:
    sent = await client.send(TOPIC, b"21.5", properties={"unit": "°C"}, tag="reading", message_group="plant/1")
    (message,) = await first_of(client, 1)
    assert (message.topic, message.body, message.properties) == (TOPIC, b"21.5", {"unit": "°C"})
    assert (message.tag, message.message_group, message.attempt, message.group) == ("reading", "plant/1", 1, GROUP)
    assert (message.message_id, sent.recall_handle) == (sent.message_id, "")
    assert message.stored_ms <= time.time() * 1000 < message.visible_at_ms
    assert repr(message) == f"<Message {sent.message_id} '{TOPIC}', 4 bytes, attempt 1>"


async def test_messages_of_many_tasks_share_calls_and_keep_their_order(node: Node, client: Client) -> None:
    syncs = node.store.syncs
    sent = await asyncio.gather(*(client.send(TOPIC, b"%d" % n) for n in range(1_000)))
    assert node.store.syncs - syncs < 30
    assert [one.message_id for one in sent] == sorted(one.message_id for one in sent)
    got = await first_of(client, 1_000, batch=500, prefetch=1_000)
    assert [message.body for message in got] == [b"%d" % n for n in range(1_000)]


async def test_large_messages_sent_at_once_are_split_into_several_calls(client: Client) -> None:
    body = bytes(3 * 1024 * 1024)
    sent = await asyncio.gather(*(client.send(TOPIC, body) for _ in range(22)))  # 66 MiB; a node accepts 64 MiB a call.
    assert len({one.message_id for one in sent}) == 22


async def test_a_batch_is_one_call_with_a_receipt_for_each_message(client: Client) -> None:
    sent = await client.send_batch(OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(100))
    assert [one.message_id for one in sent] == sorted(one.message_id for one in sent)
    assert [message.body for message in await first_of(client, 100)] == [b"%d" % n for n in range(100)]
    assert await client.send_batch([]) == []


async def test_a_batch_names_its_refused_messages_and_stores_the_others(client: Client) -> None:
    messages = [OutgoingMessage(topic=topic) for topic in (TOPIC, "a/+", TOPIC, "$SYS/x")]
    with pytest.raises(BatchFailed, match=r"2 of 4 failed; number 1: .*wildcard") as raised:
        await client.send_batch(messages)
    assert {place: type(error) for place, error in raised.value.errors.items()} == {1: InvalidTopic, 3: InvalidTopic}
    stored = [message.message_id for message in await first_of(client, 2)]
    assert [result and result.message_id for result in raised.value.results] == [stored[0], None, stored[1], None]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"topic": "a/#"}, InvalidTopic),
        ({"topic": TOPIC, "body": bytes(5 * 1024 * 1024)}, MessageTooLarge),
        ({"topic": TOPIC, "deliver_at_ms": 2**62}, InvalidDeliveryTime),
        ({"topic": TOPIC, "delay": 5.0, "expire_after": timedelta(seconds=5)}, InvalidDeliveryTime),
        ({"topic": TOPIC, "deliver_at_ms": 1, "delay": 1.0}, ValueError),
    ],
)
async def test_a_refused_message_raises_and_the_client_stays_usable(
    client: Client, message: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await client.send(**message)  # type: ignore[arg-type]
    await client.send(TOPIC, b"good")
    assert [one.body for one in await first_of(client, 1)] == [b"good"]


async def test_a_refused_message_does_not_fail_other_messages_of_its_call(client: Client) -> None:
    answers = await asyncio.gather(client.send(TOPIC), client.send("a/+"), client.send(TOPIC), return_exceptions=True)
    assert [isinstance(answer, InvalidTopic) for answer in answers] == [False, True, False]


def test_a_delay_is_sent_as_a_delay_because_the_clock_of_the_sender_may_be_wrong() -> None:
    assert OutgoingMessage(topic=TOPIC, delay=0.005).encoded() == pb.Message(topic=TOPIC, delay_ms=5)


@pytest.mark.parametrize("how", ["delay", "deliver_at_ms"])
async def test_a_delayed_message_comes_when_it_is_due_unless_it_is_recalled_before(
    node: Node, client: Client, how: str
) -> None:
    now_ms = time.time_ns() // 1_000_000

    def when(delay_ms: int) -> dict[str, float]:
        return {"delay": delay_ms / 1000} if how == "delay" else {"deliver_at_ms": now_ms + delay_ms}

    late = await client.send(TOPIC, b"late", **when(LATE_MS))  # type: ignore[arg-type]
    never = await client.send(TOPIC, b"never", **when(2 * LATE_MS))  # type: ignore[arg-type]
    await client.recall(never.recall_handle)
    with pytest.raises(AlreadyRecalled):
        await client.recall(never.recall_handle)
    node.advance(LATE_MS // 2)
    assert await client.pop(FILTER, group=GROUP) == []
    node.advance(2 * LATE_MS)
    (message,) = await client.pop(FILTER, group=GROUP)
    assert message.body == b"late"
    with pytest.raises(AlreadyFired):
        await client.recall(late.recall_handle)
    with pytest.raises(InvalidHandle):
        await client.recall("00")
