"""Schedules by the clients, on a real node whose clock the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest

from penstock import Client, MissedPolicy, ScheduleDescription, SyncClient
from penstock.pop.errors import Overloaded, RequestInvalid, ScheduleExists, ScheduleUnknown
from penstock.pop.grpc.scheduleservicer import PAGE_BYTES, ScheduleServicer
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2_grpc import ScheduleServiceStub
from penstock.timer.options import TimerOptions
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node

HOUR_MS = 3_600_000


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path / "data", timer=TimerOptions(schedules_max=3)) as started:
        yield started


@pytest.fixture
async def client(node: Node) -> AsyncIterator[Client]:
    async with Client(node.target) as made:
        yield made


async def test_a_schedule_is_described_as_it_was_created(node: Node, client: Client) -> None:
    start_ms = node.store.now_ms() + HOUR_MS
    made = await client.schedules.create(
        "report/acme",
        TOPIC,
        b"{{number}}",
        cron="0 2 * * MON",
        zone="Europe/Berlin",
        template=True,
        properties={"a": "b"},
        tag="t",
        message_group="g",
        content_type="text/plain",
        expire_after=0.005,
        start_ms=start_ms,
        end_ms=start_ms + 10**10,
        count=7,
        missed="latest",
        grace=0.009,
    )
    assert made == await client.schedules.describe("report/acme")
    schedule = made.schedule
    assert (schedule.name, schedule.topic, schedule.body, schedule.body_is_template) == (
        "report/acme",
        TOPIC,
        b"{{number}}",
        True,
    )
    assert (schedule.cron, schedule.zone, schedule.every) == ("0 2 * * MON", "Europe/Berlin", 0.0)
    assert (schedule.properties, schedule.tag, schedule.message_group) == ({"a": "b"}, "t", "g")
    assert (schedule.start_ms, schedule.end_ms, schedule.count, schedule.missed) == (start_ms, start_ms + 10**10, 7, "latest")
    assert (schedule.content_type, schedule.expire_after, schedule.grace) == ("text/plain", 0.005, 0.009)
    assert (made.next_ms, len(made.upcoming_ms)) == (made.upcoming_ms[0], 5)
    assert {b - a for a, b in zip(made.upcoming_ms, made.upcoming_ms[1:], strict=False)} <= {
        n * HOUR_MS for n in (167, 168, 169)
    }


async def test_a_schedule_is_paused_resumed_run_and_deleted(node: Node, client: Client) -> None:
    await client.groups.create(GROUP, FILTER)
    await client.schedules.create("s", TOPIC, b"x", every=HOUR_MS / 1000, start_ms=node.store.now_ms() + HOUR_MS)
    message_id = await client.schedules.run("s")
    (message,) = await client.pop(FILTER, group=GROUP, wait=60.0)
    assert (message.message_id, message.body, message.properties["schedule"]) == (message_id, b"x", "s")
    await message.ack()
    assert (await client.schedules.pause("s")).paused
    node.advance(2 * HOUR_MS)
    assert not (await client.schedules.resume("s")).paused
    node.advance(HOUR_MS)
    (message,) = await client.pop(FILTER, group=GROUP, wait=60.0)
    found = await client.schedules.describe("s")
    assert (found.sent, int(message.properties["occurrence-ms"])) == (2, found.last_ms)
    await message.ack()
    await client.schedules.delete("s")
    assert await client.schedules.list() == []
    node.advance(10 * HOUR_MS)
    assert await client.pop(FILTER, group=GROUP) == []


async def test_a_name_is_taken_until_its_schedule_is_replaced_or_deleted(client: Client) -> None:
    await client.schedules.create("s", TOPIC, every=1.0)
    with pytest.raises(ScheduleExists, match="'s'"):
        await client.schedules.create("s", TOPIC, every=2.0)
    replaced = await client.schedules.create("s", TOPIC, every=2.0, replace=True)
    assert (replaced.schedule.every, len(await client.schedules.list())) == (2.0, 1)
    await client.schedules.delete("s")
    for call in (
        client.schedules.describe,
        client.schedules.pause,
        client.schedules.resume,
        client.schedules.run,
        client.schedules.delete,
    ):
        with pytest.raises(ScheduleUnknown, match="'s'"):
            await call("s")


async def test_schedules_are_listed_by_name_in_pages(client: Client) -> None:
    for name in ("b/2", "a", "b/1"):
        await client.schedules.create(name, TOPIC, every=HOUR_MS / 1000)

    def names(found: list[ScheduleDescription]) -> list[str]:
        return [each.schedule.name for each in found]

    assert names(await client.schedules.list()) == ["a", "b/1", "b/2"]
    assert names(await client.schedules.list(prefix="b/")) == ["b/1", "b/2"]
    assert names(await client.schedules.list(limit=2)) == ["a", "b/1"]
    assert names(await client.schedules.list(after="b/1")) == ["b/2"]
    with pytest.raises(Overloaded, match=r"timer\.schedules_max"):
        await client.schedules.create("c", TOPIC, every=HOUR_MS / 1000)


async def test_a_page_of_large_schedules_is_short_and_the_clients_list_all_of_them(tmp_path: Path) -> None:
    async with Node(tmp_path / "data") as node, Client(node.target) as client:
        names = [f"{number:02}" for number in range(30)]
        for name in names:
            await client.schedules.create(name, TOPIC, bytes(60_000), every=HOUR_MS / 1000)
        async with grpc.aio.insecure_channel(node.target) as channel:
            page = await cast(Any, ScheduleServiceStub(channel)).ListSchedules(pb.ListSchedulesRequest(schedules_max=10_000))
        assert PAGE_BYTES < page.ByteSize() < PAGE_BYTES + 64 * 1024, "a small request gets a response of bounded size"
        assert [each.schedule.name for each in await client.schedules.list()] == names
        assert [each.schedule.name for each in await client.schedules.list(limit=25)] == names[:25]

        def listed() -> list[str]:
            with SyncClient(node.target) as blocking:
                return [each.schedule.name for each in blocking.schedules.list()]

        assert await asyncio.to_thread(listed) == names


async def test_calls_that_search_for_occurrences_leave_others_their_turns(node: Node, client: Client) -> None:
    await client.schedules.create("s", TOPIC, rrule="FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=29;BYDAY=SU")
    servicer, turns = ScheduleServicer(node.schedules, node.store), 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    never = pb.Schedule(name="t", topic=TOPIC, rrule="FREQ=YEARLY;BYWEEKNO=20;BYMONTH=12")
    calls = [servicer.DescribeSchedule(pb.ScheduleRequest(name="s")) for _ in range(5)]
    calls += [servicer.CreateSchedule(pb.CreateScheduleRequest(schedule=never)) for _ in range(5)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    other.cancel()
    assert len([answer for answer in answers if isinstance(answer, Exception)]) == 5, "that rule never occurs"
    assert turns >= len(calls)


async def test_a_schedule_that_is_not_valid_is_refused(client: Client) -> None:
    with pytest.raises(RequestInvalid, match="five fields"):
        await client.schedules.create("s", TOPIC, cron="* * *")
    with pytest.raises(RequestInvalid, match="topic"):
        await client.schedules.create("s", "a/+", every=1.0)
    with pytest.raises(RequestInvalid, match="properties"):
        await client.schedules.create("s", TOPIC, every=1.0, properties={str(n): "" for n in range(129)})
    with pytest.raises(ValueError, match="exactly one"):
        await client.schedules.create("s", TOPIC, every=1.0, rrule="FREQ=DAILY")
    perhaps: MissedPolicy = "perhaps"  # type: ignore[assignment]  # what a caller without a type checker may write
    with pytest.raises(ValueError, match="missed"):
        await client.schedules.create("s", TOPIC, every=1.0, missed=perhaps)


async def test_schedules_are_there_after_a_restart(tmp_path: Path) -> None:
    async with Node(tmp_path / "data") as node, Client(node.target) as client:
        made = await client.schedules.create("s", TOPIC, rrule="FREQ=DAILY", missed="all")
    async with Node(tmp_path / "data") as node, Client(node.target) as client:
        assert (await client.schedules.describe("s")).schedule == made.schedule


def use_synchronously(target: str) -> None:
    with SyncClient(target) as client:
        made = client.schedules.create("s", TOPIC, b"x", rrule="FREQ=WEEKLY", zone="Asia/Tokyo", missed="once")
        assert client.schedules.describe("s") == made
        assert [each.schedule for each in client.schedules.list(prefix="s")] == [made.schedule]
        assert client.schedules.pause("s").paused
        assert not client.schedules.resume("s").paused
        assert len(client.schedules.run("s")) == 16
        client.schedules.delete("s")
        with pytest.raises(ScheduleUnknown):
            client.schedules.delete("s")


async def test_the_client_for_threads_does_the_same(node: Node) -> None:
    await asyncio.to_thread(use_synchronously, node.target)
