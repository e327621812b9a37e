"""Administration of groups and dead letters, against a real node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from penstock import Client, Exponential, GroupSettings, group_settings
from penstock.pop.errors import (
    GroupBusy,
    GroupExists,
    GroupUnknown,
    RequestInvalid,
)
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.waiting import WAIT_S_MAX

OPTIONS = PopOptions(transaction_check_ms=100, transaction_checks_max=1_000)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    started = Node(tmp_path / "data", pop=OPTIONS)
    await started.start()
    yield started
    await started.stop()


async def test_a_group_starts_at_a_given_time_however_it_is_created(node: Node, client: Client) -> None:
    await client.send(TOPIC, b"before")
    since_ms = node.store.now_ms() + 1
    await node.until(lambda: node.store.now_ms() > since_ms)
    await client.send(TOPIC, b"after")
    await client.groups.create("created", FILTER, start=since_ms)
    for group in ("created", "popped"):
        (message,) = await client.pop(FILTER, group=group, wait=60.0, start=since_ms)
        assert message.body == b"after"
    async with client.stream(FILTER, group="streamed", start=since_ms) as messages:
        assert (await anext(aiter(messages))).body == b"after"
    with pytest.raises(RequestInvalid, match="start_at_ms"):
        await client.pop(FILTER, group="never", start=-1)


GROWING = Exponential(0.1, timedelta(seconds=1))


async def test_a_group_is_created_described_changed_reset_paused_and_deleted(client: Client) -> None:
    settings = group_settings(attempts_max=3, backoff=GROWING, fifo=True, tags="a || b", in_flight_max=9)
    made = await client.groups.create(GROUP, FILTER, settings=settings)
    assert (made.settings.attempts_max, made.settings.fifo, made.settings.tags) == (3, True, "a || b")
    assert made.settings.backoff == Exponential(0.1, 1.0)
    assert (await client.groups.create(GROUP, FILTER, settings=settings)) == made
    with pytest.raises(GroupExists):
        await client.groups.create(GROUP, FILTER)
    (changed,) = await client.groups.update(GROUP, group_settings(backoff=(), attempts_max=0, sql="n > 1"))
    assert changed.settings.attempts_max == OPTIONS.attempts_max
    assert (changed.settings.backoff, changed.settings.tags, changed.settings.sql) == ((), None, "n > 1")
    await client.send(TOPIC, b"a", properties={"n": "2"})
    (message,) = await client.pop(FILTER, group=GROUP)
    with pytest.raises(GroupBusy):
        await client.groups.update(GROUP, group_settings(fifo=False))
    (reset,) = await client.groups.reset(GROUP, end="earliest")
    assert (reset.in_flight, reset.visible) == (0, 1)
    await client.groups.update(GROUP, group_settings(paused=True))
    assert await client.pop(FILTER, group=GROUP) == []
    await client.groups.update(GROUP, group_settings(paused=False))
    (again,) = await client.pop(FILTER, group=GROUP)
    assert (again.body, again.attempt, again.message_id) == (b"a", 1, message.message_id)
    await client.groups.reset(GROUP, message_id=message.message_id)
    assert len(await client.pop(FILTER, group=GROUP)) == 1
    await client.groups.reset(GROUP, time_ms=2**60)
    assert await client.pop(FILTER, group=GROUP) == []
    await client.groups.delete(GROUP)
    assert await client.groups.describe() == []
    with pytest.raises(GroupUnknown):
        await client.groups.describe(GROUP)


@pytest.mark.parametrize(
    "settings",
    [
        group_settings(attempts_max=-1),
        group_settings(invisible=timedelta(days=400)),
        group_settings(sql="a ="),
        group_settings(tags="||"),
        group_settings(backoff=Exponential(5, 1)),
    ],
)
async def test_invalid_settings_are_refused(client: Client, settings: GroupSettings) -> None:
    with pytest.raises(RequestInvalid):
        await client.groups.create(GROUP, FILTER, settings=settings)
    assert await client.groups.describe() == []


async def test_deleting_a_group_ends_its_polls(node: Node, client: Client) -> None:
    poll = asyncio.ensure_future(client.pop(FILTER, group=GROUP, wait=60.0))
    await node.until(lambda: node.core.waiting == 1)
    await client.groups.delete(GROUP)
    with pytest.raises(GroupUnknown, match="deleted"):
        await asyncio.wait_for(poll, WAIT_S_MAX)


async def test_dead_letters_are_listed_popped_with_their_origin_and_redriven(client: Client) -> None:
    await client.groups.create(GROUP, FILTER, settings=group_settings(attempts_max=1))
    sent = [await client.send(TOPIC, b"%d" % n) for n in range(3)]
    nacked, given_up, acked = await client.pop(FILTER, group=GROUP)
    await nacked.nack(reason="no tariff")
    await given_up.dead_letter()
    await acked.ack()
    (first,) = await client.pop(f"$dlq/{GROUP}", group="operators", messages_max=1, wait=60.0)
    letters = await client.dead_letters.of_group(GROUP)
    assert [(x.message_id, x.topic, x.group, x.filter, x.attempts) for x in letters] == [
        (sent[n].message_id, TOPIC, GROUP, FILTER, 1) for n in (0, 1)
    ]
    assert {x.reason for x in letters} == {pb.ATTEMPTS_EXHAUSTED, pb.FORWARDED}
    assert first.origin is not None
    assert (first.origin.group, first.origin.attempts) == (GROUP, 1)
    assert first.origin.message_id == first.message_id
    assert await client.dead_letters.of_group(GROUP, after=sent[0].message_id) == letters[1:]
    shown = await client.dead_letters.get(GROUP, sent[0].message_id)
    assert shown is not None
    assert (shown.body, shown.topic, shown.origin, shown.handle) == (b"0", TOPIC, letters[0], "")
    assert letters[0].detail == "no tariff"
    assert await client.dead_letters.get(GROUP, sent[2].message_id) is None
    assert await client.dead_letters.redrive(GROUP, [sent[1].message_id]) == 1
    assert await client.dead_letters.redrive(GROUP) == 1
    assert await client.dead_letters.redrive(GROUP) == 0
    back = await client.pop(FILTER, group=GROUP)
    assert sorted((message.body, message.attempt) for message in back) == [(b"0", 1), (b"1", 1)]
    for message in back:
        await message.nack(reason="é" * 2_000)  # the client cuts off what is too long
    assert [letter.detail for letter in await client.dead_letters.of_group(GROUP)] == ["é" * 1_000] * 2
    assert await client.dead_letters.purge(GROUP, [sent[0].message_id]) == 1
    assert await client.dead_letters.purge(GROUP) == 1
    assert await client.dead_letters.of_group(GROUP) == []
    for call in (client.dead_letters.redrive, client.dead_letters.purge):
        with pytest.raises(RequestInvalid, match="id"):
            await call(GROUP, ["nonsense"])
