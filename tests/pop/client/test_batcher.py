"""Gathering single items into few calls."""

from __future__ import annotations

import asyncio

import pytest

from penstock.pop.client.batcher import Batcher
from penstock.pop.errors import (
    ClientClosed,
    NodeUnavailable,
    Overloaded,
    PopError,
)


async def test_items_that_arrive_during_a_call_share_the_next_one_within_its_bounds() -> None:
    calls: list[list[int]] = []
    gate, started = asyncio.Event(), asyncio.Event()

    async def send(items: list[int]) -> list[int | PopError]:
        calls.append(items)
        started.set()
        await gate.wait()
        return [Overloaded("odd") if item % 2 else item * 10 for item in items]

    batcher: Batcher[int, int] = Batcher(send, count_max=3, size_max=100, size_of=lambda item: item)
    first = batcher.submit(2)
    await started.wait()
    rest = asyncio.create_task(batcher.submit_all([4, 5, 6, 8, 60, 60, 200, 1]))
    await asyncio.sleep(0)
    gate.set()
    assert await first == 20
    answers = await rest
    assert calls == [[2], [4, 5, 6], [8, 60], [60], [200], [1]]
    assert [str(answer) if isinstance(answer, PopError) else answer for answer in answers] == [
        40, "odd", 60, 80, 600, 600, 2000, "odd",
    ]  # fmt: skip


async def test_taken_items_are_answered_or_go_out_before_all_others() -> None:
    calls: list[list[int]] = []

    async def send(items: list[int]) -> list[int | PopError]:
        calls.append(items)
        return [item * 10 for item in items]

    batcher: Batcher[int, int] = Batcher(send, count_max=3)
    futures = [batcher.submit(item) for item in range(4)]
    taken = batcher.take()
    assert [item for item, _ in taken] == [0, 1, 2]
    batcher.answer(taken[:1], [7])
    error = Overloaded("full")
    batcher.answer(taken[1:2], [error])
    batcher.put_back(taken[2:])
    assert await asyncio.gather(*futures, return_exceptions=True) == [7, error, 20, 30]
    assert calls == [[2, 3]]
    assert batcher.take() == []
    late = batcher.submit(5)
    taken = batcher.take()
    await batcher.close(1)
    batcher.put_back(taken)
    with pytest.raises(NodeUnavailable, match="closed"):
        await late


async def test_held_items_wait_to_be_taken_and_go_out_when_the_hold_ends() -> None:
    calls: list[list[int]] = []

    async def send(items: list[int]) -> list[int | PopError]:
        calls.append(items)
        return [item * 10 for item in items]

    batcher: Batcher[int, int] = Batcher(send, count_max=3)
    batcher.hold(3600)
    taken, released = batcher.submit(1), batcher.submit(2)
    for _ in range(5):
        await asyncio.sleep(0)
    assert calls == []
    (first, _) = batcher.take()
    batcher.answer([first], [7])
    assert await taken == 7
    released = batcher.submit(3)
    batcher.release()
    assert await released == 30
    batcher.hold(0.001)
    assert await batcher.submit(4) == 40  # The hold ends by itself.
    batcher.hold(3600)
    flushed = batcher.submit(5)
    await batcher.flush(10)
    assert await flushed == 50
    assert calls == [[3], [4], [5]]


async def test_closing_fails_items_without_an_answer_and_accepts_no_more() -> None:
    async def never(items: list[int]) -> list[int | PopError]:
        await asyncio.Event().wait()
        return []

    batcher: Batcher[int, int] = Batcher(never, count_max=1)
    futures = [batcher.submit(1), batcher.submit(2)]
    await batcher.close(0.01)
    for future in futures:
        with pytest.raises(NodeUnavailable):
            await future
    with pytest.raises(ClientClosed):
        batcher.submit(3)
