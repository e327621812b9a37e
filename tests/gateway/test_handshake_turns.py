"""Handshakes that become ready at once go on a few in each turn of the loop."""

from __future__ import annotations

import asyncio

from penstock.gateway.transport.turns import Turns
from tests.waiting import until


async def test_few_go_on_in_each_turn_in_the_order_in_which_they_came() -> None:
    turns = Turns(3)
    came: list[int] = []
    at_turn: list[int] = []

    async def step(number: int) -> None:
        await turns.wait()
        came.append(number)

    tasks = [asyncio.create_task(step(number)) for number in range(20)]
    while not all(task.done() for task in tasks):
        before = len(came)
        await asyncio.sleep(0)
        at_turn.append(len(came) - before)
    assert came == list(range(20))
    assert max(at_turn) == 3
    assert not len(turns)


async def test_those_that_are_cancelled_take_no_turn() -> None:
    turns = Turns(1)
    came: list[int] = []

    async def step(number: int) -> None:
        await turns.wait()
        came.append(number)

    tasks = [asyncio.create_task(step(number)) for number in range(10)]
    await asyncio.sleep(0)
    for task in tasks[1:9]:
        task.cancel()
    await until(lambda: len(came) == 2)
    assert came == [0, 9]
    assert not len(turns)


async def test_a_quiet_listener_waits_for_nothing() -> None:
    turns = Turns(1)
    for _ in range(3):
        waited = turns.wait()
        try:
            waited.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("nobody else was there, and it waited")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
