"""Pending delayed messages by the clients, on a real node whose clock the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Client, SyncClient
from penstock.pop.errors import AlreadyFired, AlreadyRecalled, InvalidHandle, RequestInvalid, UnknownMessage
from penstock.pop.grpc import timerservicer
from penstock.store.log.segment import LOG_DIRECTORY
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Flag
from penstock.store.space.causer import Causer
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node

HOUR_MS = 3_600_000


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path / "data") as started:
        yield started


@pytest.fixture
async def client(node: Node) -> AsyncIterator[Client]:
    async with Client(node.target) as made:
        yield made


async def test_a_pending_message_is_found_by_its_handle_and_by_its_key(client: Client) -> None:
    sent = await client.send(TOPIC, b"x", delay=HOUR_MS / 1000, timer_key="order/7")
    found = await client.timers.find(sent.recall_handle)
    assert found == await client.timers.find(topic=TOPIC, key="order/7")
    assert (found.recall_handle, found.message_id, found.topic, found.key) == (
        sent.recall_handle,
        sent.message_id,
        TOPIC,
        "order/7",
    )
    plain = await client.send(TOPIC, b"x", delay=HOUR_MS / 1000)
    assert (await client.timers.find(plain.recall_handle)).key == ""
    with pytest.raises(UnknownMessage, match="order/8"):
        await client.timers.find(topic=TOPIC, key="order/8")
    with pytest.raises(InvalidHandle):
        await client.timers.find("00")
    for names in ({}, {"topic": TOPIC}, {"recall_handle": "00", "topic": TOPIC, "key": "k"}):
        with pytest.raises(ValueError, match="topic and a key"):
            await client.timers.find(**names)


async def test_a_message_replaces_the_one_of_its_key_and_is_cancelled_by_it(node: Node, client: Client) -> None:
    await client.groups.create(GROUP, FILTER)
    first = await client.send(TOPIC, b"first", delay=HOUR_MS / 1000, timer_key="k")
    await client.send(TOPIC, b"second", delay=2 * HOUR_MS / 1000, timer_key="k")
    with pytest.raises(AlreadyRecalled):
        await client.recall(first.recall_handle)
    await client.timers.cancel(topic=TOPIC, key="k")
    with pytest.raises(UnknownMessage):
        await client.timers.cancel(topic=TOPIC, key="k")
    node.advance(3 * HOUR_MS)
    assert await client.pop(FILTER, group=GROUP) == []


async def test_a_message_is_rescheduled(node: Node, client: Client) -> None:
    await client.groups.create(GROUP, FILTER)
    sent = await client.send(TOPIC, b"x", delay=HOUR_MS / 1000, properties={"a": "b"}, tag="t")
    moved = await client.timers.reschedule(sent.recall_handle, delay=3 * HOUR_MS / 1000)
    with pytest.raises(AlreadyRecalled):
        await client.timers.reschedule(sent.recall_handle, delay=HOUR_MS / 1000)
    node.advance(2 * HOUR_MS)
    assert await client.pop(FILTER, group=GROUP) == []
    with pytest.raises(RequestInvalid, match="deliver_at_ms"):
        await client.timers.reschedule(moved.recall_handle, deliver_at_ms=2**60)
    at_once = await client.timers.reschedule(moved.recall_handle, deliver_at_ms=1)
    node.advance(5)
    (message,) = await client.pop(FILTER, group=GROUP, wait=60.0)
    assert (message.body, message.message_id, message.tag) == (b"x", at_once.message_id, "t")
    assert message.properties == {"a": "b"}
    with pytest.raises(AlreadyFired):
        await client.timers.cancel(at_once.recall_handle)


async def test_a_message_whose_record_is_damaged_is_not_moved_and_stays_pending(
    tmp_path: Path, node: Node, client: Client
) -> None:
    sent = await client.send(TOPIC, b"x" * 100, delay=HOUR_MS / 1000, timer_key="k")
    (segment,) = (tmp_path / "data" / LOG_DIRECTORY).iterdir()
    with segment.open("r+b") as log:
        log.seek(segment.read_bytes().index(b"x" * 100))
        log.write(b"y")
    named: list[dict[str, Any]] = [{"recall_handle": sent.recall_handle}, {"topic": TOPIC, "key": "k"}]
    for names in named:
        with pytest.raises(UnknownMessage, match="damaged"):
            await client.timers.reschedule(**names, delay=2 * HOUR_MS / 1000)
        with pytest.raises(UnknownMessage, match="damaged"):
            await client.timers.find(**names)
    await client.timers.cancel(sent.recall_handle)
    with pytest.raises(AlreadyRecalled):
        await client.timers.cancel(sent.recall_handle)


async def test_a_message_whose_record_is_damaged_can_be_replaced(tmp_path: Path, node: Node, client: Client) -> None:
    sent = await client.send(TOPIC, b"x" * 100, delay=HOUR_MS / 1000, timer_key="k")
    (segment,) = (tmp_path / "data" / LOG_DIRECTORY).iterdir()
    with segment.open("r+b") as log:
        log.seek(segment.read_bytes().index(b"x" * 100))
        log.write(b"y")
    await client.send(TOPIC, b"new", delay=HOUR_MS / 1000, timer_key="k")
    with pytest.raises(AlreadyRecalled):
        await client.timers.cancel(sent.recall_handle)


def use_synchronously(target: str) -> None:
    with SyncClient(target) as client:
        sent = client.send(TOPIC, b"x", delay=HOUR_MS / 1000, timer_key="k")
        assert client.timers.find(topic=TOPIC, key="k").recall_handle == sent.recall_handle
        assert [timer.recall_handle for timer in client.timers.list().timers] == [sent.recall_handle]
        assert client.timers.count().pending == 1
        moved = client.timers.reschedule(topic=TOPIC, key="k", delay=2 * HOUR_MS / 1000)
        client.timers.cancel(moved.recall_handle)
        with pytest.raises(AlreadyRecalled):
            client.timers.cancel(moved.recall_handle)


async def test_the_client_for_threads_does_the_same(node: Node) -> None:
    await asyncio.to_thread(use_synchronously, node.target)


async def test_pending_messages_are_listed_page_by_page_in_order_of_delivery(node: Node, client: Client) -> None:
    sent = [await client.send(f"plant/{number % 2}/x", b"x" * 10, delay=HOUR_MS * (20 - number) / 1000) for number in range(20)]
    keyed = await client.send("orders/7/timeout", b"x", delay=HOUR_MS / 2000, timer_key="7")
    everything = (await client.timers.list()).timers
    assert [timer.message_id for timer in everything] == [each.message_id for each in (keyed, *reversed(sent))]
    assert everything[0] == await client.timers.find(keyed.recall_handle)
    assert everything[0].source == "local"
    assert everything[0].size > 0
    first = await client.timers.list("plant/0/+", limit=3)
    assert [timer.message_id for timer in first.timers] == [each.message_id for each in sent[18:13:-2]]
    await client.timers.cancel(first.timers[0].recall_handle)
    rest = await client.timers.list("plant/0/+", page_token=first.next_page_token)
    assert [timer.message_id for timer in rest.timers] == [each.message_id for each in sent[12::-2]]
    assert rest.next_page_token == ""
    begin_ms = everything[5].deliver_at_ms
    between = await client.timers.list(from_ms=begin_ms, before_ms=begin_ms + 3 * HOUR_MS // 2)
    assert between.timers[0].message_id == everything[5].message_id
    assert len(between.timers) == 2
    assert [timer.key for timer in (await client.timers.list(key="7")).timers] == ["7"]
    node.advance(HOUR_MS)
    assert keyed.message_id not in [timer.message_id for timer in (await client.timers.list()).timers]


async def test_pending_messages_are_counted(node: Node, client: Client) -> None:
    assert (await client.timers.count()).next_ms == 0
    for delay_ms in (30_000, 30 * 60_000, 12 * HOUR_MS, 12 * HOUR_MS, 100 * HOUR_MS):
        last = await client.send(TOPIC, b"x", delay=delay_ms / 1000)
    found = await client.timers.count()
    assert (found.pending, found.due_minute, found.due_hour, found.due_day) == (5, 1, 2, 4)
    node.advance(24 * HOUR_MS)
    found = await client.timers.count()
    assert (found.pending, found.due_day) == (1, 0)
    assert found.next_ms == (await client.timers.find(last.recall_handle)).deliver_at_ms


async def test_a_listing_that_is_not_valid_is_refused(client: Client) -> None:
    wrong: list[dict[str, Any]] = [{"filter": "a/#/b"}, {"from_ms": -1}, {"page_token": "x"}]
    for arguments in wrong:
        with pytest.raises(RequestInvalid):
            await client.timers.list(**arguments)
    with pytest.raises(ValueError, match="at least 1"):
        await client.timers.list(limit=0)


async def test_all_pending_messages_of_a_client_are_cancelled_in_one_call(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timerservicer, "ROWS_DEFAULT", 3)  # a page
    monkeypatch.setattr(timerservicer, "CANCELLED_AT_ONCE", 2)
    await client.groups.create(GROUP, FILTER)
    store, eve = node.store, Causer.of("", "10.0.0.1", "eve")
    for number in range(8):
        about = Properties(deliver_at_ms=node.clock.now_ms() + HOUR_MS + number, by=eve.row())
        store.append_message(store.router.route(TOPIC.encode()), b"of eve", encode_properties(about), 1 | Flag.DELAYED)
    store.commit()
    kept = await client.send(TOPIC, b"of another", delay=HOUR_MS / 1000)
    assert len((await client.timers.list(client_id="eve")).timers) == 8
    assert await client.timers.cancel_all("nobody/#", client_id="eve") == 0
    assert await client.timers.cancel_all("#", client_id="eve") == 8
    assert [timer.message_id for timer in (await client.timers.list()).timers] == [kept.message_id]
    node.advance(2 * HOUR_MS)
    assert [message.body for message in await client.pop(FILTER, group=GROUP)] == [b"of another"]
    with pytest.raises(RequestInvalid, match="a/#/b"):
        await client.timers.cancel_all("a/#/b")
