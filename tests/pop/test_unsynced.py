"""Room for messages that were handed out and wait for their sync: bounded for all and for each, and shared in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pop.core.polls import COUNTED_FROM, Unsynced
from penstock.pop.core.selection import RESPONSE_BYTES
from penstock.pop.options import PopOptions
from penstock.store.options import MIB
from penstock.store.space.causer import Causer
from tests.pop.unreading import Unreading
from tests.pop.wiring import FILTER, Node, Parts
from tests.waiting import WAIT_S_MAX, until

MALLORY, ALICE, BOB = (Causer.of(name, "192.0.2.1") for name in ("mallory", "alice", "bob"))


class Syncs:
    """A store of which the test says when what was stored is durable."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.next_turn: list[Callable[[], None]] = []

    def unsynced(self, all_max: int) -> Unsynced:
        """Return room for so many bytes."""
        return Unsynced(lambda callback: self.waiting.append(callback), lambda go: self.next_turn.append(go), all_max)

    def end_syncs(self) -> None:
        """Make all durable that was stored so far."""
        waiting, self.waiting = self.waiting, []
        for callback in waiting:
            callback()

    def sync(self) -> None:
        """Make all durable that was stored so far, and go on to the next turn of the loop."""
        self.end_syncs()
        next_turn, self.next_turn = self.next_turn, []
        for go in next_turn:
            go()


def test_calls_of_one_caller_wait_for_the_sync_and_those_of_others_do_not() -> None:
    syncs = Syncs()
    unsynced = syncs.unsynced(40 * MIB)
    assert unsynced.fits(MALLORY)
    for _ in range(4):
        assert unsynced.fits(MALLORY)
        unsynced.add(MALLORY, 3 * MIB)
    assert not unsynced.fits(MALLORY), "its share is a quarter"
    assert unsynced.fits(ALICE)
    assert unsynced.fits(None)
    went: list[str] = []
    unsynced.when_room(MALLORY, lambda: went.append("mallory"))
    unsynced.when_room(ALICE, lambda: went.append("alice"))
    assert went == ["alice"]
    syncs.sync()
    assert went == ["alice", "mallory"]
    assert unsynced.used == 0


def test_callers_that_wait_go_on_in_turn() -> None:
    syncs = Syncs()
    unsynced = syncs.unsynced(12 * MIB)
    for each in (MALLORY, ALICE, BOB, Causer.of("eve", "192.0.2.1")):
        unsynced.add(each, 3 * MIB)
    went: list[str] = []

    def go(caller: Causer) -> None:
        went.append(caller.user)
        unsynced.add(caller, 3 * MIB)

    for _ in range(3):
        unsynced.when_room(MALLORY, lambda: go(MALLORY))
    unsynced.when_room(ALICE, lambda: go(ALICE))
    unsynced.when_room(BOB, lambda: go(BOB))
    assert went == []
    syncs.sync()
    assert went == ["mallory", "alice", "bob"]
    syncs.sync()
    assert went == ["mallory", "alice", "bob", "mallory"]
    assert unsynced.used == 3 * MIB


def test_calls_go_on_once_in_the_next_turn_however_many_syncs_end_in_this_one() -> None:
    syncs = Syncs()
    unsynced = syncs.unsynced(12 * MIB)
    went: list[int] = []

    def go(number: int) -> None:
        went.append(number)
        unsynced.add(MALLORY, 3 * MIB)

    go(0)
    for number in range(1, 4):
        unsynced.when_room(MALLORY, lambda number=number: go(number))  # type: ignore[misc]
    for _ in range(3):
        syncs.end_syncs()
    assert went == [0]
    syncs.sync()
    assert went == [0, 1]


async def test_a_call_that_is_cancelled_gives_its_room_back() -> None:
    syncs = Syncs()
    unsynced = Unsynced(lambda callback: syncs.waiting.append(callback), asyncio.get_running_loop().call_soon, 12 * MIB)
    unsynced.add(MALLORY, 3 * MIB)
    entered: list[int] = []

    async def enter(number: int) -> None:
        async with unsynced.room(MALLORY):
            entered.append(number)

    calls = [asyncio.create_task(enter(number)) for number in range(4)]
    await asyncio.sleep(0)
    calls[0].cancel()  # before there is room
    await asyncio.sleep(0)
    syncs.sync()
    await asyncio.sleep(0)  # gives room to the second call, which has not run yet
    assert unsynced.used == RESPONSE_BYTES
    calls[1].cancel()
    await asyncio.wait(calls)
    assert entered == [2, 3]
    assert unsynced.used == 0
    assert unsynced.fits(MALLORY)


async def test_a_call_that_is_cancelled_in_the_turn_of_its_sync_leaves_nothing_behind() -> None:
    syncs = Syncs()
    unsynced = Unsynced(lambda callback: syncs.waiting.append(callback), asyncio.get_running_loop().call_soon, 12 * MIB)
    unsynced.add(MALLORY, 3 * MIB)

    async def enter() -> None:
        async with unsynced.room(MALLORY):
            raise AssertionError("it was cancelled")

    call = asyncio.create_task(enter())
    await asyncio.sleep(0)
    call.cancel()
    syncs.sync()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert unsynced.used == 0
    assert unsynced.fits(MALLORY)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3 * MIB), st.booleans()), max_size=60))
def test_what_is_held_is_bounded_and_each_call_goes_on(calls: list[tuple[int, int, bool]]) -> None:
    syncs = Syncs()
    unsynced = syncs.unsynced(16 * MIB)
    held = [0] * 4
    went: list[int] = []

    def go(caller: int, size: int) -> None:
        assert held[caller] < 4 * MIB
        assert sum(held) < 16 * MIB
        went.append(caller)
        if size >= COUNTED_FROM:
            held[caller] += size

            def synced() -> None:
                held[caller] -= size

            syncs.waiting.append(synced)
        unsynced.add(str(caller), size)

    for caller, size, does_sync in calls:
        if unsynced.fits(str(caller)):
            go(caller, size)
        else:
            unsynced.when_room(str(caller), lambda caller=caller, size=size: go(caller, size))  # type: ignore[misc]
        if does_sync:
            syncs.sync()
        assert unsynced.used == sum(held)
    while syncs.waiting:
        syncs.sync()
    assert sorted(went) == sorted(caller for caller, _, _ in calls)
    assert unsynced.used == 0


def publish(node: Parts, count: int) -> None:
    for _ in range(count):
        node.publish(bytes(900_000))


@pytest.mark.parametrize("kind", ["polls that wait", "pops"])
async def test_one_commit_does_not_bring_the_messages_of_all_calls_into_memory(tmp_path: Path, kind: str) -> None:
    async with Node(tmp_path / "data", pop=PopOptions(responses_bytes_max=32 * MIB)) as node:
        core, caller, most = node.core, MALLORY, 0

        def when_durable(callback: Callable[[], None]) -> None:
            nonlocal most
            most = max(most, core.unsynced.used)
            node.store.when_durable(callback)

        core.unsynced._when_durable = when_durable
        if kind == "pops":
            publish(node, 3)
        groups = [node.group(f"flood-{number}") for number in range(60)]
        polls = [asyncio.create_task(core.polls.poll((each,), 3, 60_000, 20_000, caller=caller)) for each in groups]
        if kind == "polls that wait":
            await until(lambda: core.waiting == 60)
            publish(node, 3)
        honest = asyncio.create_task(core.polls.poll((node.group("honest"),), 3, 60_000, 20_000, caller=ALICE))
        taken = await asyncio.gather(*polls, honest)
        assert sum(len(each.records) for each in taken if each is not None) >= 60
        # The flood's share, its last batch and the room that was kept for it, and the batch of the other caller.
        assert 0 < most <= 2 * MIB + 3 * RESPONSE_BYTES
        await until(lambda: core.unsynced.used == 0)


async def test_what_streams_keep_for_callers_that_do_not_read_is_bounded(tmp_path: Path) -> None:
    async with Node(tmp_path / "data", pop=PopOptions(responses_bytes_max=16 * MIB)) as node:
        publish(node, 4)
        assert node._server is not None
        responses = node._server.responses
        unreading = await Unreading.to(node.port)
        for number in range(4):
            unreading.consume(f"unread-{number}", FILTER)
        await until(lambda: responses.used > 12 * MIB)  # each stream holds four messages
        for number in range(4, 8):
            unreading.consume(f"unread-{number}", FILTER)
        async with asyncio.timeout(WAIT_S_MAX):
            await unreading.ended()
        assert responses.ended == 1
        await until(lambda: responses.used == 0)
        unreading.close()
