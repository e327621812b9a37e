"""Retention leaves no more entries in light queues than the log and its copies have records."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.store.index.index import KeySpace
from penstock.store.options import HOUR_MS, KIB
from penstock.store.queues.lightqueue import ENTRY_BYTES, ROW_ENTRIES, LightQueue
from penstock.store.record import HEADER_BYTES
from penstock.store.store import Store
from tests.clock import ManualClock
from tests.store.keeper import Keeper
from tests.store.wiring import close, copy_left, durable_queue, entries, numbered_bodies, open_store, publish, retain, work_on

TOPICS = [f"plant/{number}/{what}" for number in range(10) for what in ("temperature", "pressure")]
FILTERS = ["plant/#", "plant/+/temperature", "plant/3/+", "plant/7/pressure", "#"]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock, keeper: Keeper) -> Iterator[Store]:
    made = opened(tmp_path / "data", clock, keeper)
    for topic_filter in FILTERS:
        made.queues.declare(topic_filter, "session:1")
    made.queues.attach("+/+/pressure", "connection:1")
    yield made
    close(made)


def opened(data_dir: Path, clock: ManualClock, keeper: Keeper) -> Store:
    return open_store(data_dir, clock=clock, parts=[keeper], segment_bytes=4 * KIB, retention_ms=HOUR_MS)


def let_pass(store: Store, clock: ManualClock, hours: int = 1, messages: int = 140) -> list[int]:
    """Publish messages in each of some hours, and drop what is older than one. Return the positions of the messages."""
    published = []
    for _ in range(hours):
        for number in range(messages):
            clock.advance(HOUR_MS // messages)
            published.append(publish(store, TOPICS[number % len(TOPICS)], str(number)))
            if number % 7 == 0:
                store.commit()
            work_on(store)
        retain(store)
    return published


def size_of(store: Store, position: int) -> int:
    return store.log.record(position).size


def queues_of(store: Store) -> list[LightQueue]:
    return [queue for queue in store.queues if not queue.filter.startswith("$")]


def rows_of(store: Store, space: KeySpace) -> int:
    return sum(1 for _ in store.index.rows(bytes(space)))


def check_bound(store: Store, keeper: Keeper) -> None:
    """Check that a queue has the entries of all records that can be read, and at most one row more."""
    for queue in queues_of(store):
        found = {offset: position for offset, (position, _, _) in entries(queue).items()}
        gone = [offset for offset, position in found.items() if position < store.log.start and position not in keeper.needed]
        assert len(gone) < ROW_ENTRIES, (queue.filter, len(found), "one row that has a record of the log may stay")
        assert queue.count_from(0) == len(found)
        assert all(first < second for first, second in pairwise(found.values()))


def test_a_message_that_is_kept_for_ever_keeps_no_other_entry(store: Store, clock: ManualClock, keeper: Keeper) -> None:
    first = let_pass(store, clock, messages=40)[3]
    keeper.needed[first] = size_of(store, first)
    counts = []
    for _ in range(5):
        let_pass(store, clock)
        check_bound(store, keeper)
        counts.append(sum(queue.count_from(0) for queue in queues_of(store)))
    assert max(counts[2:]) <= min(counts[2:]) * 1.2, "what stays doesn't grow with time"
    reached = [queue for queue in queues_of(store) if first in [position for position, _, _ in entries(queue).values()]]
    assert {queue.filter for queue in reached} == {"plant/#", "#", "+/+/pressure"}, "each queue that has the message"
    assert {next(iter(numbered_bodies(store, queue).values())) for queue in reached} == {"3"}


def test_entries_of_messages_kept_here_and_there_stay_and_no_others(
    store: Store, clock: ManualClock, keeper: Keeper, tmp_path: Path
) -> None:
    draw = random.Random(17)
    for _ in range(4):
        for position in draw.sample(let_pass(store, clock), 12):
            keeper.needed[position] = size_of(store, position)
    let_pass(store, clock)
    check_bound(store, keeper)
    root = durable_queue(store, "plant/#")
    left = [position for position, _, _ in entries(root).values()]
    assert set(keeper.needed) <= set(left)
    assert root.count_from(root.first_offset() + 1) == len(left) - 1
    store.index.flush()
    copy_left(store.data_dir, tmp_path / "left")
    again = opened(tmp_path / "left", clock, keeper)
    assert [position for position, _, _ in entries(durable_queue(again, "plant/#")).values()] == left
    assert durable_queue(again, "plant/#").count_from(0) == len(left)
    close(again)


def test_entries_go_when_their_message_is_needed_no_longer(store: Store, clock: ManualClock, keeper: Keeper) -> None:
    kept = let_pass(store, clock)[::9]
    keeper.needed.update((position, size_of(store, position)) for position in kept)
    let_pass(store, clock, 2)
    pinned = rows_of(store, KeySpace.PINNED)
    assert pinned > len(kept)
    for position in kept[::2]:
        del keeper.needed[position]
    let_pass(store, clock, 3)
    check_bound(store, keeper)
    assert 0 < rows_of(store, KeySpace.PINNED) < pinned
    keeper.needed.clear()
    let_pass(store, clock, 3)
    check_bound(store, keeper)
    assert (rows_of(store, KeySpace.PINNED), rows_of(store, KeySpace.COPY)) == (0, 0)


def test_a_row_with_many_needed_messages_is_left_in_one_piece_for_each_run(
    store: Store, clock: ManualClock, keeper: Keeper
) -> None:
    queue = durable_queue(store, "plant/3/+")
    published = [publish(store, "plant/3/a", str(number)) for number in range(100)]
    store.commit()
    for number in [*range(10, 40), 50, 52, *range(90, 100)]:
        keeper.needed[published[number]] = size_of(store, published[number])
    let_pass(store, clock, 2, messages=300)
    rows = [
        (int.from_bytes(key[5:], "big"), len(value) // ENTRY_BYTES)
        for key, value in store.index.rows(KeySpace.PINNED + queue.id.to_bytes(4, "big"))
    ]
    assert rows == [(10, 30), (50, 1), (52, 1), (90, 6), (96, 4)], "the last row was the open one"
    assert [queue.read_from(offset, 99)[0] for offset in (0, 12, 40, 51, 53)] == [10, 12, 50, 52, 90]
    assert len(queue.read_from(90, 99)[1]) // ENTRY_BYTES >= 10


def test_a_time_is_found_between_entries_that_stay_and_entries_that_went(
    store: Store, clock: ManualClock, keeper: Keeper
) -> None:
    queue = durable_queue(store, "plant/7/pressure")
    old = publish(store, "plant/7/pressure", "old")
    for _ in range(50):
        publish(store, "plant/7/pressure", "gone")
    store.commit()
    keeper.needed[old] = size_of(store, old)
    for number in range(300):
        clock.advance(HOUR_MS // 100)
        publish(store, "plant/1/a", str(number))
        work_on(store)
    retain(store)
    assert [offset for offset, _ in numbered_bodies(store, queue).items()] == [0]
    assert queue.offset_at(clock.now_ms(), store.copies) <= queue.committed_offset
    assert queue.read_from(1, 9) == (queue.committed_offset, b"")
    publish(store, "plant/7/pressure", "new")
    store.commit()
    assert queue.read_from(queue.offset_at(clock.now_ms(), store.copies), 9)[0] == 51
    assert size_of(store, store.log.start) > HEADER_BYTES
