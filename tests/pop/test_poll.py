"""Long polls: calls wait for the first message, the oldest gets it, and a call that ends early loses no message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.pop.core.pops import PopResult
from penstock.pop.errors import Overloaded
from penstock.pop.options import PopOptions
from tests.pop.wiring import GROUP, Parts

LONG_MS = 60_000


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Parts]:
    """Parts that commit by themselves, with a clock that the test moves."""
    parts = Parts(tmp_path / "data", pop=PopOptions(waiters_max=3, in_flight_max=4, attempts_max=2))
    parts.store.start(asyncio.get_running_loop(), lambda error: pytest.fail(str(error)))
    yield parts
    await parts.store.close()


def wait_for_message(parts: Parts, messages_max: int = 10, wait_ms: int = LONG_MS) -> asyncio.Task[PopResult | None]:
    return asyncio.create_task(parts.core.polls.poll((parts.group(),), messages_max, 10_000, wait_ms))


async def is_waiting(parts: Parts, polls: int = 1) -> None:
    while parts.core.waiting < polls:  # noqa: ASYNC110 - the core has no event for this
        await asyncio.sleep(0)


async def bodies(parts: Parts, poll: asyncio.Task[PopResult | None]) -> list[bytes]:
    taken = await poll
    assert taken is not None
    return [message.body for message in parts.delivered(taken)]


async def test_a_poll_does_not_wait_for_what_is_there(live: Parts) -> None:
    live.publish(b"a")
    assert await bodies(live, wait_for_message(live)) == [b"a"]


async def test_a_poll_wakes_when_a_message_arrives(live: Parts) -> None:
    poll = wait_for_message(live)
    await is_waiting(live)
    live.publish(b"a")
    assert await bodies(live, poll) == [b"a"]
    assert live.core.waiting == 0


async def test_a_poll_wakes_when_a_message_is_revived(live: Parts) -> None:
    live.publish(b"a")
    assert len(live.pop()) == 1
    poll = wait_for_message(live)
    await is_waiting(live)
    live.clock.advance(10_000)  # type: ignore[attr-defined]
    live.core.fire_due()
    assert await bodies(live, poll) == [b"a"]


async def test_a_poll_wakes_when_a_message_is_released(live: Parts) -> None:
    live.publish(b"a")
    taken = live.core.popper.pop(live.group(), 10, 10_000)
    assert taken is not None
    poll = wait_for_message(live)
    await is_waiting(live)
    live.core.deliveries.requeue(taken.checkpoint)
    assert await bodies(live, poll) == [b"a"]


async def test_a_poll_at_the_in_flight_limit_wakes_when_there_is_room(live: Parts) -> None:
    live.publish(b"0", b"1", b"2", b"3", b"4")
    messages = live.pop()
    assert len(messages) == 4
    poll = wait_for_message(live)
    await is_waiting(live)
    live.ack(messages[0].handle)
    assert await bodies(live, poll) == [b"4"]


async def test_a_poll_at_the_in_flight_limit_wakes_when_dead_letters_make_room(live: Parts) -> None:
    live.publish(b"0", b"1", b"2", b"3")
    live.fail()
    assert [message.attempt for _ in range(4) for message in live.pop(1)] == [2, 2, 2, 2]
    live.publish(b"new")
    poll = wait_for_message(live)
    await is_waiting(live)
    live.clock.advance(10_000)  # type: ignore[attr-defined]
    live.core.fire_due()
    assert await bodies(live, poll) == [b"new"]


async def test_a_poll_ends_empty_after_its_time(live: Parts) -> None:
    assert await live.core.polls.poll((live.group(),), 10, 10_000, 1) is None
    assert live.core.waiting == 0
    live.publish(b"a")
    await live.store.durable()
    assert [message.body for message in live.pop()] == [b"a"]


async def test_polls_are_served_in_the_order_of_their_coming_and_each_message_goes_to_one(live: Parts) -> None:
    polls = []
    for n in range(3):
        polls.append(wait_for_message(live, 1))
        await is_waiting(live, n + 1)
    live.publish(b"a", b"b", b"c")
    assert [await bodies(live, poll) for poll in polls] == [[b"a"], [b"b"], [b"c"]]


async def test_a_cancelled_poll_takes_nothing(live: Parts) -> None:
    poll = wait_for_message(live)
    await is_waiting(live)
    poll.cancel()
    await asyncio.wait((poll,))
    assert live.core.waiting == 0
    live.publish(b"a")
    await live.store.durable()
    assert [(message.body, message.attempt) for message in live.pop()] == [(b"a", 1)]


async def test_a_poll_that_is_cancelled_when_it_was_served_returns_what_it_got(live: Parts) -> None:
    polls = [wait_for_message(live), wait_for_message(live)]
    await is_waiting(live, 2)
    live.publish(b"a")  # this commits, which serves the first poll
    assert live.group().in_flight == 1
    polls[0].cancel()
    taken = await polls[1]
    assert polls[0].cancelled()
    assert taken is not None
    assert [(message.body, message.attempt) for message in live.delivered(taken)] == [(b"a", 1)]
    assert live.core.counters.dead_lettered == 0


@pytest.mark.parametrize("turns", range(6))
async def test_a_poll_cancelled_at_any_turn_loses_nothing(live: Parts, turns: int) -> None:
    poll = wait_for_message(live)
    await is_waiting(live)
    live.publish(b"a")
    for _ in range(turns):
        await asyncio.sleep(0)
    poll.cancel()
    await asyncio.wait((poll,))
    if poll.cancelled():
        await live.store.durable()
        assert [(message.body, message.attempt) for message in live.pop()] == [(b"a", 1)]
    else:
        assert await bodies(live, poll) == [b"a"]
        assert live.pop() == []


async def test_one_poll_too_many_is_refused_and_the_others_wait_on(live: Parts) -> None:
    polls = [wait_for_message(live, 1) for _ in range(3)]
    await is_waiting(live, 3)
    with pytest.raises(Overloaded, match="are waiting on this node, which is the limit"):
        await live.core.polls.poll((live.group(),), 1, 10_000, LONG_MS)
    assert live.core.counters.refused == 1
    live.publish(b"a", b"b", b"c")
    assert [await bodies(live, poll) for poll in polls] == [[b"a"], [b"b"], [b"c"]]
    assert await live.core.polls.poll((live.group(),), 1, 10_000, 1) is None


async def test_a_poll_of_one_group_is_not_woken_by_another(live: Parts) -> None:
    poll = wait_for_message(live)
    await is_waiting(live)
    live.publish(b"a", topic="other/1")
    live.group("audit")
    await live.store.durable()
    assert not poll.done()
    live.publish(b"b")
    assert await bodies(live, poll) == [b"b"]
    assert [message.body for message in live.pop(group="audit")] == [b"b"]
    assert live.pop(group=GROUP) == []
