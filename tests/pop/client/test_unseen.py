"""Messages that wait in a consumer whose loop is slow: none of them loses an attempt."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import Client, OutgoingMessage, SyncClient, group_settings
from penstock.pop.client import syncconsumer, unseen
from penstock.pop.client.unseen import UnseenMessages
from tests.pop.looptime import LoopTime
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.waiting import WAIT_S_MAX

# --- how many may wait -----------------------------------------------------------------------------------------------


def filled(count: int, *, held_max: int = 128, invisible_s: float = 60.0) -> UnseenMessages[int]:
    unseen: UnseenMessages[int] = UnseenMessages(held_max, invisible_s)
    unseen.add(range(count), 0.0)
    return unseen


@pytest.mark.parametrize(
    ("handling_s", "takers", "room"),
    [(0.0, 1, 128), (0.001, 1, 128), (4.0, 1, 7), (4.0, 8, 60), (4.0, 64, 128), (40.0, 1, 0), (40.0, 2, 1)],
)
def test_as_many_messages_may_wait_as_the_loop_takes_within_half_the_invisible_time(
    handling_s: float, takers: int, room: int
) -> None:
    unseen = filled(0)
    unseen.takers = takers
    unseen.handled(handling_s)
    assert unseen.room(0.0) == room


def test_a_loop_that_slows_down_counts_at_once_and_one_that_recovers_after_some_messages() -> None:
    unseen = filled(0)
    for _ in range(10):
        unseen.handled(0.01)
    unseen.handled(10.0)
    assert unseen.room(0.0) == 3
    for _ in range(40):
        unseen.handled(0.01)
    assert unseen.room(0.0) == 128


def test_a_loop_that_takes_nothing_seems_ever_slower() -> None:
    unseen = filled(20)
    unseen.take(0.0)
    assert unseen.surplus(1.0) == []
    assert unseen.surplus(4.0) == list(range(8, 20))
    assert [unseen.take(4.0) for _ in range(2)] == [1, 2]
    assert unseen.returned == 12


def test_a_message_is_returned_before_its_time_ends_and_not_given_to_the_loop_after_that() -> None:
    unseen = filled(1)
    unseen.take(0.0)
    unseen.add([1], 0.0)
    assert unseen.take(53.9) == 1
    unseen.add([2], 0.0)
    assert unseen.take(54.1) is None
    assert unseen.surplus(54.1) == [2]
    unseen.add([3], 0.0)
    assert unseen.surplus(60.1) == []
    assert (unseen.returned, unseen.expired, len(unseen)) == (1, 1, 0)


def test_messages_of_several_pops_are_taken_together_as_far_as_their_time_suffices() -> None:
    unseen = filled(3)
    unseen.add(range(3, 6), 50.0)
    assert unseen.take_all(50.0, 4) == [0, 1, 2, 3]
    assert len(unseen) == 2
    assert unseen.take_all(104.5, 4) == []  # They must go back.
    assert unseen.surplus(104.5) == [4, 5]
    unseen.add([6], 104.5)
    assert unseen.take_all(104.5, 4) == [6]
    assert unseen.take_all(104.5, 4) == []


def test_the_last_messages_go_back_if_too_many_wait_from_whichever_pop() -> None:
    unseen = filled(3)
    unseen.add(range(3, 20), 0.0)
    assert unseen.take(0.0) == 0
    unseen.handled(10.0)
    assert unseen.surplus(0.0) == list(range(4, 20))
    assert unseen.clear() == [1, 2, 3]
    assert (len(unseen), unseen.clear()) == (0, [])


@pytest.mark.parametrize(("handling_s", "room"), [(0.0, 2000), (0.0001, 2000), (0.001, 500), (0.1, 128), (1.0, 30)])
def test_more_messages_wait_only_if_the_loop_takes_them_within_half_a_second(handling_s: float, room: int) -> None:
    unseen: UnseenMessages[int] = UnseenMessages(128, 60.0, first_max=10, fast_max=2000)
    assert unseen.room(0.0) == 10
    unseen.handled(handling_s)
    assert unseen.room(0.0) == room


def test_a_slow_loop_gets_only_messages_that_it_can_finish() -> None:
    unseen = filled(1)
    unseen.handled(20.0)
    assert unseen.take(41.0) is None
    assert unseen.take(39.0) == 0


# --- at a real node --------------------------------------------------------------------------------------------------

INVISIBLE_MS = 600_000
SLOW_S = 250.0
"""How long the slow handlers take by the clients' time: less than half the invisible time, so that messages go back in time."""


@pytest.fixture
async def loop_time(monkeypatch: pytest.MonkeyPatch) -> LoopTime:
    """The clients' time. They look every 10 ms for messages to return."""
    monkeypatch.setattr(unseen, "CHECKS", INVISIBLE_MS // 10)
    return LoopTime()


@pytest.fixture
async def client(node: Node) -> AsyncIterator[Client]:
    """A client of a node whose group gets each message once. A message that loses its attempt is a dead letter."""
    node.create(attempts_max=1)
    async with Client(node.target) as made:
        await made.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % number) for number in range(30)])
        yield made


def came_back(node: Node) -> bool:
    return node.core.counters.revived > 0


async def assert_each_was_seen_once(node: Node, seen: list[tuple[bytes, int]]) -> None:
    await node.until(lambda: node.group().in_flight == 0)
    assert sorted(seen) == sorted((b"%d" % number, 1) for number in range(30))
    assert node.group().dead_letter_count == 0


async def test_messages_that_wait_behind_a_slow_one_lose_no_attempt(node: Node, client: Client, loop_time: LoopTime) -> None:
    """A handler of 4 s and the default batch made dead letters of 140 of 800 messages that no handler had seen."""
    seen = []
    async with client.consume(FILTER, group=GROUP, batch=10, prefetch=30, invisible=INVISIBLE_MS / 1000) as consumer:
        async for message in consumer:
            seen.append((message.body, message.attempt))
            if len(seen) == 1:
                loop_time.advance(SLOW_S)
                await node.until(lambda: came_back(node))
            await message.ack()
            if len(seen) == 30:
                break
        assert consumer.returned == node.core.counters.revived
        assert consumer.expired == 0
    await assert_each_was_seen_once(node, seen)


@pytest.mark.parametrize("give_back", [True, False])
async def test_messages_that_wait_on_a_stream_behind_a_slow_one_lose_no_attempt(
    node: Node, client: Client, loop_time: LoopTime, give_back: bool
) -> None:
    seen = []
    async with client.stream(FILTER, group=GROUP, credits=30, invisible=INVISIBLE_MS / 1000, give_back=give_back) as messages:
        async for message in messages:
            seen.append((message.body, message.attempt))
            if len(seen) == 1:
                loop_time.advance(SLOW_S)
                await node.until(lambda: came_back(node))
            message.ack()
            if len(seen) == 20:
                break
        assert 0 < messages.returned == node.core.counters.revived
    async with client.stream(FILTER, group=GROUP) as messages:
        async for message in messages:
            seen.append((message.body, message.attempt))
            message.ack()
            if len(seen) == 30:
                break
    await assert_each_was_seen_once(node, seen)


async def test_a_message_that_arrives_while_its_stream_closes_loses_no_attempt(node: Node, client: Client) -> None:
    """The acknowledgement that goes out at the end makes room, so the node delivers one more before it hears of the end."""
    async with client.stream(FILTER, group=GROUP, credits=1, give_back=False) as messages:
        async for message in messages:
            message.ack()
            break
    assert node.group().in_flight == 0


async def test_a_slow_stream_takes_credits_back_and_a_fast_one_gets_them_again(
    node: Node, client: Client, loop_time: LoopTime
) -> None:
    async with client.stream(FILTER, group=GROUP, credits=30, invisible=INVISIBLE_MS / 1000) as messages:
        stream = aiter(messages)
        first = await anext(stream)
        loop_time.advance(SLOW_S)
        await node.until(lambda: came_back(node))
        await node.until(lambda: node.group().in_flight < 15)
        first.ack()
        for number in range(29):
            await client.send(TOPIC, b"%d" % number)
            (await anext(stream)).ack()
        assert messages._credits > 15


@pytest.mark.parametrize("invisible_ms", [INVISIBLE_MS, 0])
async def test_messages_that_wait_in_a_thread_behind_a_slow_one_lose_no_attempt(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch, invisible_ms: int
) -> None:
    await client.groups.update(GROUP, group_settings(invisible=INVISIBLE_MS / 1000))
    monkeypatch.setattr(unseen, "CHECKS", INVISIBLE_MS // 10)
    ahead_s = 0.0
    times = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s, sleep=time.sleep)
    monkeypatch.setattr(syncconsumer, "time", times)
    returned = threading.Event()
    seen: list[tuple[bytes, int]] = []

    def consume() -> None:
        nonlocal ahead_s
        with SyncClient(node.target) as other:
            for message in other.consume(FILTER, group=GROUP, batch=30, invisible=invisible_ms / 1000):
                seen.append((message.body, message.attempt))
                if len(seen) == 1:
                    ahead_s = SLOW_S
                    returned.wait(WAIT_S_MAX)
                message.ack()
                if len(seen) == 30:
                    break

    thread = asyncio.create_task(asyncio.to_thread(consume))
    await node.until(lambda: came_back(node))
    returned.set()
    await thread
    await assert_each_was_seen_once(node, seen)


async def test_a_thread_that_leaves_its_loop_returns_the_rest_at_once(node: Node, client: Client) -> None:
    def consume() -> None:
        with SyncClient(node.target) as other:
            for message in other.consume(FILTER, group=GROUP, batch=30):
                message.ack()
                break

    await asyncio.to_thread(consume)
    rest = await client.pop(FILTER, group=GROUP, messages_max=100, wait=60.0)
    await node.until(lambda: node.group().in_flight == len(rest) == 29)
    assert {message.attempt for message in rest} == {1}


async def test_an_event_loop_that_is_blocked_for_too_long_is_reported(
    node: Node, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    loop_time = LoopTime()
    async with client.consume(FILTER, group=GROUP, batch=30, prefetch=30, invisible=INVISIBLE_MS / 1000) as consumer:
        async for _ in consumer:
            await node.until(lambda: node.group().in_flight == 30)
            loop_time.advance(601)  # No other task has a turn meanwhile.
            break
        consumer._surplus.return_surplus()
        assert consumer.expired > 0
    assert "something blocks the event loop" in caplog.text


@pytest.mark.parametrize("options", [{"batch": 0}, {"invisible": -1}, {"wait": -1}])
def test_numbers_out_of_bounds_are_refused_before_any_call(options: dict[str, Any]) -> None:
    with SyncClient("127.0.0.1:1") as client, pytest.raises(ValueError, match="use "):
        client.consume(FILTER, group=GROUP, **options)
