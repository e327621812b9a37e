"""A message that is sent again with its deduplication id is stored once, whatever happens to the node meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.pop.client.client import Client
from penstock.pop.client.outgoing import OutgoingMessage
from penstock.pop.core.sender import Refusal, Sender, SendRefused, StoredMessage
from penstock.pop.errors import BatchFailed, DeduplicationIdReused, DeduplicationWindowPassed, InvalidProperty
from penstock.pop.options import PopOptions
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import decode, record_bytes
from tests.clock import ManualClock
from tests.pop.wiring import TOPIC, Node, Parts

RESTARTS = [None, True, False]
WINDOW_MS = 60_000
OPTIONS = PopOptions(deduplication_ms=WINDOW_MS, deduplication_topic_ids_max=3, deduplication_ids_max=5)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = Parts(tmp_path / "data", pop=OPTIONS)
    yield made
    made.close()


def send(parts: Parts, sent_id: str, body: bytes = b"x", *, topic: str = TOPIC, age_ms: int = 0) -> StoredMessage:
    parts_of_sender = (parts.handles, parts.delayed, parts.timer_keys, parts.transactions, parts.sent_ids)
    sender = Sender(parts.store, *parts_of_sender, parts.options[0])
    stored = sender.store_identified(topic.encode(), body, sent_id, age_ms=age_ms)
    parts.store.commit()
    return stored


@pytest.mark.parametrize("sent_id", ["a", 'with "quotes" and \\', "ü" * 128, "x" * 256, "ü" * 129, "x" * 257])
def test_the_quick_way_stores_what_the_other_stores_and_refuses_the_same(parts: Parts, sent_id: str) -> None:
    def stored(topic: str, *, is_quick: bool) -> tuple[Any, ...] | str:
        parts_of_sender = (parts.handles, parts.delayed, parts.timer_keys, parts.transactions, parts.sent_ids)
        sender = Sender(parts.store, *parts_of_sender, parts.options[0])
        try:
            if is_quick:
                position = sender.store_identified(topic.encode(), b"x", sent_id).position
            else:
                position = sender.store(topic.encode(), b"x", Properties(deduplication_id=sent_id)).position
        except SendRefused as error:
            return str(error)
        parts.store.commit()
        properties = encode_properties(Properties(deduplication_id=sent_id))
        data = parts.store.read_intact(position, record_bytes(topic.encode(), b"x", properties))
        assert data is not None
        record = decode(data, position=position)
        return record.flags, record.properties, record.body

    assert stored("plant/1", is_quick=True) == stored("plant/2", is_quick=False)


def restarted(parts: Parts, keep_index: bool | None) -> Parts:
    return parts if keep_index is None else parts.after_crash("restarted", keep_index=keep_index)


def refusal(parts: Parts, sent_id: str, body: bytes = b"x", *, topic: str = TOPIC, age_ms: int = 0) -> Refusal:
    with pytest.raises(SendRefused) as caught:
        send(parts, sent_id, body, topic=topic, age_ms=age_ms)
    return caught.value.refusal


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_a_repeated_message_is_stored_once_and_another_body_is_refused(parts: Parts, keep_index: bool | None) -> None:
    parts.group()
    first = send(parts, "a")
    other = send(parts, "a", topic="plant/other")
    assert first.position != other.position, "each topic has ids of its own"
    parts = restarted(parts, keep_index)
    again = send(parts, "a", age_ms=5)
    assert (again.position, again.is_repeated, first.is_repeated) == (first.position, True, False)
    assert refusal(parts, "a", b"another") is Refusal.DEDUPLICATION_ID_REUSED
    parts.settle_queues()
    assert [message.body for message in parts.pop() if message.topic == TOPIC] == [b"x"]
    parts.close()


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_an_id_is_remembered_for_its_time_and_then_nobody_may_repeat_it(parts: Parts, keep_index: bool | None) -> None:
    first = send(parts, "a")
    parts = restarted(parts, keep_index)
    assert isinstance(parts.clock, ManualClock)
    parts.advance(WINDOW_MS - 1)
    assert send(parts, "a", age_ms=WINDOW_MS - 1).position == first.position
    parts.advance(1)
    assert refusal(parts, "a", age_ms=WINDOW_MS) is Refusal.DEDUPLICATION_WINDOW_PASSED
    fresh = send(parts, "a")
    assert fresh.position != first.position, "a new message may have the id"
    assert send(parts, "a", age_ms=1).position == fresh.position
    parts.close()


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_a_repeated_message_is_refused_if_its_id_may_be_forgotten(parts: Parts, keep_index: bool | None) -> None:
    for number in range(4):
        send(parts, f"{number}")
        parts.advance(1_000)
    parts = restarted(parts, keep_index)
    assert len(parts.sent_ids) == 3
    assert send(parts, "1", age_ms=3_000).is_repeated
    assert refusal(parts, "0", age_ms=4_000) is Refusal.DEDUPLICATION_WINDOW_PASSED
    assert refusal(parts, "new", age_ms=3_000) is Refusal.DEDUPLICATION_WINDOW_PASSED
    assert not send(parts, "new", age_ms=2_000).is_repeated, "ids of that time are all remembered"
    parts.close()


def test_the_ids_of_all_topics_are_bounded(parts: Parts) -> None:
    for number in range(6):
        send(parts, "a", topic=f"plant/{number}")
        parts.advance(1_000)
    assert len(parts.sent_ids) == 5
    assert refusal(parts, "a", topic="plant/0", age_ms=6_000) is Refusal.DEDUPLICATION_WINDOW_PASSED
    assert send(parts, "a", topic="plant/1", age_ms=5_000).is_repeated
    parts.advance(WINDOW_MS)
    send(parts, "b")
    assert len(parts.sent_ids) == 1, "those whose time is over are forgotten"


@pytest.mark.asyncio
async def test_a_service_repeats_plain_delayed_and_half_messages(tmp_path: Path) -> None:
    async with Node(tmp_path / "data", pop=PopOptions(deduplication_ms=WINDOW_MS)) as node, Client(node.target) as client:
        first = await client.send(TOPIC, b"x", deduplication_id="a")
        again, fresh = await client.send_batch(
            [OutgoingMessage(topic=TOPIC, body=b"x", deduplication_id=each, deduplication_age=0.009) for each in ("a", "b")]
        )
        assert again == first._replace(repeated=True)
        assert not fresh.repeated
        with pytest.raises(DeduplicationIdReused, match=f"with another body, as message {first.message_id}"):
            await client.send(TOPIC, b"y", deduplication_id="a")
        late = OutgoingMessage(topic=TOPIC, deduplication_id="c", deduplication_age=WINDOW_MS / 1000)
        with pytest.raises(BatchFailed, match="it stores nothing now") as caught:
            await client.send_batch([late])
        assert isinstance(caught.value.errors[0], DeduplicationWindowPassed)
        with pytest.raises(InvalidProperty, match="more than 256 bytes"):
            await client.send(TOPIC, deduplication_id="i" * 257)
        with pytest.raises(InvalidProperty, match="response topic"):
            await client.send(TOPIC, response_topic="a/#")
        delayed = OutgoingMessage(topic=TOPIC, delay=60.0, deduplication_id="d")
        one, two = await client.send_batch([delayed, delayed])
        assert (one.recall_handle, one.message_id) == (two.recall_handle, two.message_id)
        await client.recall(two.recall_handle)
        half = OutgoingMessage(topic=TOPIC, body=b"half", producer="orders", deduplication_id="h")
        (_, repeated) = await client.send_batch([half, half])
        await client.transactions.end(repeated.transaction_handle, commit=True)
        assert len(await client.transactions.pending()) == 0
