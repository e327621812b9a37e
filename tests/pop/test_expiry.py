"""No consumer gets a message whose time to live (MQTT 5.0, 3.3.2.3.3) has passed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.pop.core.checkpoint import delivery_id
from penstock.pop.core.deliveries import AckOutcome
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.groups import ResetTo
from penstock.pop.core.pops import BATCHES_MAX, PopResult
from penstock.pop.grpc.consumestream import ConsumeStream, StreamTerms
from penstock.store.index.rowformats import KeySpace
from penstock.store.properties import Properties
from penstock.store.record import CONSUMED, EXPIRED, Kind
from tests.pop.looptime import LoopTime
from tests.pop.wiring import FILTER, GROUP, Parts
from tests.waiting import WAIT_S_MAX, until


def publish(parts: Parts, *bodies: bytes, ttl_ms: int) -> None:
    parts.publish(*bodies, properties=Properties(expires_at_ms=parts.clock.now_ms() + ttl_ms))


def bodies(parts: Parts, messages_max: int = 100) -> list[bytes]:
    return [message.body for message in parts.pop(messages_max)]


@pytest.mark.parametrize("fifo", [False, True])
def test_an_expired_message_is_skipped_and_those_around_it_are_not(parts: Parts, fifo: bool) -> None:
    parts.create(fifo=fifo)
    parts.publish(b"before")
    publish(parts, b"short", ttl_ms=1_000)
    publish(parts, b"long", ttl_ms=60_000)
    parts.publish(b"behind")
    parts.advance(1_000)
    found: list[bytes] = []
    while messages := parts.pop():
        found += [message.body for message in messages]
        parts.ack(*(message.handle for message in messages))
    assert found == [b"before", b"long", b"behind"]
    assert parts.core.counters.expired == 1
    assert parts.group().in_flight == parts.group().visible == 0


def test_a_message_that_expires_while_it_is_out_does_not_come_back(parts: Parts) -> None:
    publish(parts, b"short", ttl_ms=20_000)
    assert [message.body for message in parts.pop(invisible_ms=10_000)] == [b"short"]
    parts.advance(10_000)
    assert [(message.body, message.attempt) for message in parts.pop(invisible_ms=10_000)] == [(b"short", 2)]
    parts.advance(10_000)
    assert bodies(parts) == []
    assert parts.group().in_flight == 0


def test_a_backlog_that_has_expired_hides_nothing_behind_it(parts: Parts) -> None:
    publish(parts, *([b"old"] * (BATCHES_MAX * 2)), ttl_ms=1_000)
    parts.publish(b"new")
    parts.advance(1_000)
    found = [bodies(parts, messages_max=1) for _ in range(4)]
    assert [body for each in found for body in each] == [b"new"]
    assert parts.core.counters.expired == BATCHES_MAX * 2


def test_the_record_of_an_acknowledgement_says_whether_a_consumer_or_the_node_gave_it(parts: Parts) -> None:
    publish(parts, b"short", ttl_ms=1_000)
    parts.publish(b"1", b"2", b"3", b"4")
    parts.advance(1_000)
    first, second, third, _ = parts.pop()
    parts.ack(first.handle, second.handle)
    parts.ack(third.handle, third.handle)  # the second time is too late, so the handles are judged one by one
    parts.core.deliveries.settle(Kind.POP_ACK, [delivery_id(checkpoint, 4) for checkpoint in parts.core.checkpoints])
    parts.store.commit()
    flags = [record.flags for record in parts.store.log.scan(0) if record.kind == Kind.POP_ACK]
    assert flags == [EXPIRED, CONSUMED, CONSUMED, CONSUMED]
    assert parts.group().in_flight == 0


@pytest.mark.parametrize("keep_index", [True, False])
def test_a_skipped_message_stays_skipped_after_a_crash(parts: Parts, keep_index: bool) -> None:
    publish(parts, b"short", ttl_ms=1_000)
    parts.publish(b"lasting")
    parts.advance(1_000)
    (lasting,) = parts.pop(invisible_ms=60_000)
    after = parts.after_crash("restarted", keep_index=keep_index)
    assert after.group().in_flight == 1
    after.advance(70_000)
    assert [message.position for message in after.pop()] == [lasting.position]


def test_a_dead_letter_outlives_its_time_to_live(tmp_path: Path, parts: Parts) -> None:
    parts.create(attempts_max=1)
    publish(parts, b"poison", ttl_ms=60_000)
    assert bodies(parts) == [b"poison"]
    parts.advance(30_000)
    parts.pop()
    parts.advance(60_000)
    assert [message.body for message in parts.pop(group="operators", topic_filter=f"$dlq/{GROUP}")] == [b"poison"]


async def test_a_stream_passes_over_a_backlog_that_has_expired_a_little_at_a_time(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "data")
    publish(parts, *([b"old"] * (BATCHES_MAX * 5)), ttl_ms=1_000)
    parts.publish(b"new")
    parts.advance(1_000)
    group = parts.group()
    parts.settle()
    parts.store.start(asyncio.get_running_loop(), lambda error: pytest.fail(str(error)))
    stream = ConsumeStream(parts.core, parts.store.when_durable, parts.handles, group, StreamTerms(8, 1, 60_000))
    stream.pop_more()
    assert parts.core.counters.expired == BATCHES_MAX, "others have their turn before the rest"
    async with asyncio.timeout(WAIT_S_MAX):
        await stream.wake.wait()
    assert parts.core.counters.expired == BATCHES_MAX * 5
    (taken,) = stream.outbox
    assert isinstance(taken, PopResult)
    assert [message.body for message in parts.delivered(taken)] == [b"new"]
    stream.end(give_back=True, is_broken=False)
    assert group.in_flight == 0
    await parts.store.close()


# --- polls ------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Parts]:
    """Parts that commit and serve polls by themselves, with a clock that the test moves."""
    parts = Parts(tmp_path / "data")
    loop = asyncio.get_running_loop()
    parts.store.start(loop, lambda error: pytest.fail(str(error)))
    parts.core.polls.start(loop)
    yield parts
    await parts.store.close()


def poll(parts: Parts, *groups: ConsumerGroup, wait_ms: int = 60_000) -> asyncio.Task[PopResult | None]:
    return asyncio.create_task(parts.core.polls.poll(groups or (parts.group(),), 1, 60_000, wait_ms))


async def found_by(parts: Parts, waiting: asyncio.Task[PopResult | None]) -> list[bytes]:
    async with asyncio.timeout(WAIT_S_MAX):
        result = await waiting
    assert result is not None
    return [message.body for message in parts.delivered(result)]


@pytest.mark.parametrize("wait_ms", [0, 60_000])
@pytest.mark.parametrize("fifo", [False, True])
async def test_a_poll_passes_over_a_backlog_that_has_expired_a_little_at_a_time(live: Parts, fifo: bool, wait_ms: int) -> None:
    live.create(fifo=fifo)
    publish(live, *([b"old"] * (BATCHES_MAX * 3)), ttl_ms=0)
    live.publish(b"new")
    waiting = poll(live, wait_ms=wait_ms)
    await asyncio.sleep(0)
    assert live.core.counters.expired == BATCHES_MAX, "others have their turn before the rest"
    assert await found_by(live, waiting) == [b"new"]
    assert live.core.counters.expired == BATCHES_MAX * 3


async def test_a_poll_that_waits_is_not_answered_with_messages_that_have_expired(live: Parts) -> None:
    waiting = poll(live)
    await until(lambda: live.core.waiting == 1)
    publish(live, *([b"old"] * (BATCHES_MAX * 3)), ttl_ms=0)
    await until(lambda: live.core.counters.expired == BATCHES_MAX * 3)
    assert not waiting.done()
    live.publish(b"new")
    assert await found_by(live, waiting) == [b"new"]


async def test_a_poll_ends_after_its_wait_also_in_the_middle_of_a_backlog_that_has_expired(live: Parts) -> None:
    time = LoopTime()
    publish(live, *([b"old"] * (BATCHES_MAX * 3)), ttl_ms=0)
    waiting = poll(live)
    await asyncio.sleep(0)
    time.advance(61.0)
    assert await waiting is None
    assert live.core.counters.expired < BATCHES_MAX * 3


async def test_a_backlog_of_one_group_that_has_expired_holds_up_no_other_group_of_a_poll(live: Parts) -> None:
    publish(live, *([b"old"] * (BATCHES_MAX * 3)), ttl_ms=0)
    live.publish(b"other", topic="other/1")
    other = live.group(topic_filter="other/#")
    assert await found_by(live, poll(live, live.group(), other)) == [b"other"]
    assert live.core.counters.expired == BATCHES_MAX


# --- dead letters and what was redriven -------------------------------------------------------------------------------


def fail(parts: Parts, attempts: int) -> None:
    """Let the attempts of the message `poison` fail, from the first one on."""
    for attempt in range(1, attempts + 1):
        assert [(message.body, message.attempt) for message in parts.pop()] == [(b"poison", attempt)]
        parts.advance(10_000)


@pytest.mark.parametrize("expires", ["before the redrive", "after the redrive"])
@pytest.mark.parametrize("fifo", [False, True])
@pytest.mark.parametrize("keep_index", [True, False])
def test_a_redriven_message_has_no_time_to_live(parts: Parts, keep_index: bool, fifo: bool, expires: str) -> None:
    parts.create(attempts_max=2, fifo=fifo)
    publish(parts, b"poison", ttl_ms=30_000)
    fail(parts, attempts=2)
    parts.advance(30_000 if expires == "before the redrive" else 9_000)
    assert parts.dead_letters.redrive(GROUP) == 1
    parts.store.commit()
    parts.advance(2_000)
    after = parts.after_crash("restarted", keep_index=keep_index)
    fail(after, attempts=1)
    again = after.after_crash("between attempts", keep_index=keep_index)
    assert [(message.body, message.attempt) for message in again.pop()] == [(b"poison", 2)]
    again.advance(10_000)
    assert again.dead_letters.redrive(GROUP) == 1
    again.store.commit()
    (message,) = again.pop()
    assert again.ack(message.handle) == [AckOutcome.OK]
    assert (again.pop(), again.group().in_flight, again.core.counters.expired) == ([], 0, 0)
    again.close()


def test_only_what_was_redriven_does_not_expire(parts: Parts) -> None:
    parts.create(attempts_max=2)
    parts.create("other", attempts_max=2)
    publish(parts, b"poison", ttl_ms=60_000)
    fail(parts, attempts=2)
    publish(parts, b"beside it", ttl_ms=5_000)
    parts.pop()
    parts.advance(60_000)
    parts.dead_letters.redrive(GROUP)
    assert bodies(parts) == [b"poison"]
    assert parts.pop(group="other") == []
    assert parts.core.counters.expired == 3


@pytest.mark.parametrize("keep_index", [True, False])
def test_a_reset_gives_what_was_redriven_its_time_to_live_again(parts: Parts, keep_index: bool) -> None:
    parts.create(attempts_max=1)
    publish(parts, b"poison", ttl_ms=30_000)
    fail(parts, attempts=1)
    parts.dead_letters.redrive(GROUP)
    parts.advance(60_000)
    parts.groups.reset(GROUP, FILTER, ResetTo(end="earliest"))
    assert bodies(parts) == []
    after = parts.after_crash("restarted", keep_index=keep_index)
    assert bodies(after) == []
    assert [*after.store.index.rows(bytes(KeySpace.REDRIVEN))] == []
    after.close()
