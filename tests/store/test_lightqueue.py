from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.store.index.index import Index
from penstock.store.properties import Properties, encode_properties, tag_hash
from penstock.store.queues.lightqueue import (
    ENTRY,
    ENTRY_BYTES,
    ROW_ENTRIES,
    TRANSIENT,
    LightQueue,
    delete_entries,
    delete_transient_entries,
    entries_array,
    entries_key,
    pinned_key,
    queue_prefix,
)
from penstock.store.record import Flag, Kind
from penstock.store.store import Store
from tests.clock import ManualClock
from tests.depth import DEPTH
from tests.store.wiring import bodies, close, crash, durable_queue, entries, open_store, positions, publish

COMMITS = st.lists(st.integers(1, 6) | st.integers(10, 50), min_size=1, max_size=8)
"""The number of entries that each of several commits adds to a queue."""


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    opened = Index(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "data")
    yield opened
    close(opened)


def put(index: Index, queue: LightQueue, commits: list[int]) -> bytes:
    """Append entries to a queue in several commits, and return all of them as encoded bytes."""
    written = b""
    for count in commits:
        for _ in range(count):
            queue.pending += ENTRY.pack(queue.next_offset * 100, 50, queue.next_offset)
        batch = index.batch()
        written += queue.save(batch)
        index.write(batch)
    return written


def loaded(queue: LightQueue) -> LightQueue:
    """Return the queue as a new load from the index gives it."""
    return LightQueue(queue.id, queue.filter, queue.index, queue.open_offset, queue.open_row)


def row_offsets(queue: LightQueue) -> list[int]:
    return [int.from_bytes(key[5:], "big") for key, _ in queue.index.rows(queue_prefix(queue.id))]


def first_key(queue: LightQueue) -> bytes:
    return next(key for key, _ in queue.index.rows(b"Q" + queue.id.to_bytes(4, "big")))


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("commits", "expected"),
    [
        ([5], {}),
        ([1, 3, 2], {}),
        ([15], {}),
        ([16], {0: 16}),
        ([15, 1], {0: 16}),
        ([15, 2], {0: 16}),
        ([1] * 18, {0: 16}),
        ([1] * 32, {0: 16, 16: 16}),
        ([100], {0: 96}),
        ([48, 32], {0: 48, 48: 32}),
        ([10, 48], {0: 48}),
        ([10, 48, 1, 70], {0: 48, 48: 80}),
    ],
)
def test_a_row_begins_at_a_multiple_of_sixteen_and_has_all_committed_entries(
    store: Store, commits: list[int], expected: dict[int, int]
) -> None:
    for count in commits:
        for number in range(count):
            publish(store, f"plant/{number}")
        store.commit()
    queue = durable_queue(store, "plant/#")
    rows = list(store.index.rows(b"Q" + queue.id.to_bytes(4, "big")))
    assert {int.from_bytes(key[5:], "big"): len(value) // ENTRY_BYTES for key, value in rows} == expected
    assert {len(key) for key, _ in rows} <= {13}
    assert len(queue.open_row) // ENTRY_BYTES == sum(commits) % ROW_ENTRIES
    assert len(positions(queue)) == queue.committed_offset == sum(commits)


def test_a_reloaded_queue_appends_to_its_open_row(index: Index) -> None:
    written, queue = b"", LightQueue(1, "a/#", index)
    for count in (3, 4, 20, 5, 1):
        written += put(index, queue, [count])
        queue = loaded(queue)
    assert queue.read(0, 99) == written
    assert row_offsets(queue) == [0, 16]


def test_a_queue_that_begins_anywhere_has_rows_from_the_next_multiple_on(index: Index) -> None:
    queue = LightQueue(1, "a/#", index, 37)
    written = put(index, queue, [1] * 30)
    assert row_offsets(queue) == [37, 48]
    assert [queue.read(37 + at, 1) for at in range(30)] == [written[at * 16 : at * 16 + 16] for at in range(30)]
    assert queue.read_from(0, 99) == (37, written)


def test_an_entry_has_position_size_and_tag(store: Store) -> None:
    positions = [publish(store, "plant/1", "a"), publish(store, "plant/1", "bb", tag="alarm")]
    store.commit()
    queue = durable_queue(store, "plant/#")
    entries = entries_array(queue.read(0, 10))
    assert entries["position"].tolist() == positions
    assert entries["aux"].tolist() == [0, tag_hash("alarm")]
    assert entries["size"].tolist() == [store.log.record(position).size for position in positions]


def test_pending_entries_cannot_be_read_before_the_commit(store: Store) -> None:
    publish(store, "plant/1", "a")
    store.commit()
    queue = durable_queue(store, "plant/#")
    publish(store, "plant/1", "b")
    publish(store, "plant/1", "c")
    assert (queue.committed_offset, queue.next_offset) == (1, 3)
    assert bodies(store, queue) == ["a"]
    assert queue.read(1, 5) == b""
    store.commit()
    assert (queue.committed_offset, queue.next_offset) == (3, 3)
    assert bodies(store, queue) == ["a", "b", "c"]


@settings(max_examples=8 * DEPTH)
@given(rows=COMMITS, data=st.data())
def test_a_read_may_begin_and_end_anywhere_in_any_row(
    rows: list[int], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    index = Index(tmp_path_factory.mktemp("rows"))
    neighbours = [LightQueue(queue_id, "n/#", index, 0) for queue_id in (6, 8)]
    queue = LightQueue(7, "q/#", index, 0)
    for neighbour in neighbours:
        put(index, neighbour, [3, 3])
    written = put(index, queue, rows)
    total = sum(rows)
    for _ in range(10):
        offset, count = data.draw(st.integers(0, total + 2)), data.draw(st.integers(0, total + 2))
        assert queue.read(offset, count) == written[offset * ENTRY_BYTES : (offset + count) * ENTRY_BYTES]
    assert queue.first_offset() == 0
    assert loaded(queue).committed_offset == queue.committed_offset == total
    index.close()


def test_a_queue_without_entries_begins_where_it_ends(index: Index) -> None:
    put(index, LightQueue(1, "a/#", index, 0), [2])
    put(index, LightQueue(3, "c/#", index, 0), [2])
    queue = LightQueue(2, "b/#", index, 17)
    assert queue.first_offset() == queue.committed_offset == 17
    assert queue.read(0, 5) == b""
    assert queue.read_from(0, 5) == (17, b"")


def test_the_first_offset_moves_past_removed_entries(index: Index) -> None:
    queue = LightQueue(1, "a/#", index, 0)
    written = put(index, queue, [2, 16, 1])
    batch = index.batch()
    batch.delete(first_key(queue))
    index.write(batch)
    assert queue.first_offset() == 16
    assert queue.read(16, 9) == written[16 * ENTRY_BYTES :]


def test_deleting_a_queues_entries_keeps_those_of_other_queues(index: Index) -> None:
    queues = [LightQueue(queue_id, "a/#", index, 0) for queue_id in (1, 2, 255, 256, TRANSIENT - 1, TRANSIENT, 2**32 - 1)]
    for queue in queues:
        put(index, queue, [16, 20])
    batch = index.batch()
    delete_entries(batch, index, 255)
    index.write(batch)
    assert [len(row_offsets(queue)) for queue in queues] == [2, 2, 0, 2, 2, 2, 2]
    batch = index.batch()
    delete_entries(batch, index, 2**32 - 1)
    index.write(batch)
    delete_transient_entries(index)
    assert [len(row_offsets(queue)) for queue in queues] == [2, 2, 0, 2, 2, 0, 0]


def test_offsets_continue_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    first = [publish(store, "plant/1", "a"), publish(store, "plant/1", "b")]
    close(store)
    store = open_store(tmp_path / "data")
    queue = durable_queue(store, "plant/#")
    assert (queue.committed_offset, queue.next_offset) == (2, 2)
    second = publish(store, "plant/1", "c")
    store.commit()
    assert positions(queue) == [*first, second]
    assert positions(queue, 2) == [second]
    close(store)


@settings(max_examples=5 * DEPTH)
@given(rows=COMMITS, trimmed=st.integers(0, 7), data=st.data())
def test_a_trimmed_queue_has_its_pinned_entries_and_all_later_ones_at_their_offsets(
    rows: list[int], trimmed: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    index = Index(tmp_path_factory.mktemp("rows"))
    neighbours = [LightQueue(queue_id, "n/#", index, 0) for queue_id in (6, 8)]
    queue = LightQueue(7, "q/#", index, 0)
    for count in rows:
        put(index, queue, [count])
        put(index, data.draw(st.sampled_from(neighbours)), [2])
        if data.draw(st.booleans()):
            index.flush()  # several files, which reads select by their bloom filters
    offsets = [*row_offsets(queue), queue.open_offset]
    dense = offsets[min(trimmed, len(offsets) - 1)]
    if trimmed > len(offsets):
        dense = queue.committed_offset
        queue.begin_row()
    pinned = data.draw(st.sets(st.integers(0, dense - 1))) if dense else set()
    trim(index, queue, dense, pinned)
    put(index, queue, [1])  # committed, but not in a file yet
    queue.pending += ENTRY.pack(1, 2, 3)  # and not committed
    left = {*pinned, *range(dense, queue.committed_offset)}
    for offset in range(queue.committed_offset + 2):
        after = sorted(each for each in left if each >= offset)
        assert queue.count_from(offset) == len(after)
        assert [queue.offset_after(offset, count + 1) - 1 for count in range(len(after))] == after
        count = data.draw(st.integers(0, len(left) + 1))
        found, run = queue.read_from(offset, count)
        assert [number for _, _, number in ENTRY.iter_unpack(run)] == [found + at for at in range(len(run) // ENTRY_BYTES)]
        assert len(run) // ENTRY_BYTES <= count
        if run:
            assert found == after[0], "the next entry that is left"
        assert bool(run) == bool(after and count)
    assert list(entries(queue)) == sorted(left)
    assert (queue.first_offset(), queue.dense_offset()) == (min(left), dense)
    index.close()


def trim(index: Index, queue: LightQueue, dense: int, pinned: set[int]) -> None:
    """Delete the rows before an offset, and pin some of their entries, as trimming does."""
    batch = index.batch()
    for offset in pinned:
        batch.put(pinned_key(queue.id, offset), ENTRY.pack(offset * 100, 50, offset))
    batch.delete_range(queue_prefix(queue.id), entries_key(queue.id, dense))
    index.write(batch)


def test_a_queue_whose_pinned_entries_are_adjacent_is_read_in_one_piece(index: Index) -> None:
    queue = LightQueue(1, "a/#", index)
    written = put(index, queue, [60])
    trim(index, queue, 48, {3, 10, 11, 12, 40})
    assert queue.read_from(5, 9) == (10, written[10 * ENTRY_BYTES : 13 * ENTRY_BYTES])
    assert queue.read_from(11, 1) == (11, written[11 * ENTRY_BYTES : 12 * ENTRY_BYTES])
    assert queue.read_from(41, 99) == (48, written[48 * ENTRY_BYTES :])


def test_deleting_a_queues_entries_deletes_the_pinned_ones(index: Index) -> None:
    queues = [LightQueue(queue_id, "a/#", index) for queue_id in (254, 255, TRANSIENT - 1, TRANSIENT + 1)]
    for queue in queues:
        put(index, queue, [32])
        trim(index, queue, 32, {1, 30})
    batch = index.batch()
    delete_entries(batch, index, 255)
    index.write(batch)
    assert [queue.count_from(0) for queue in queues] == [2, 0, 2, 2]
    delete_transient_entries(index)
    assert [queue.count_from(0) for queue in queues] == [2, 0, 2, 0]


# --- offsets by time ------------------------------------------------------------------------------------------------


@settings(max_examples=8 * DEPTH)
@given(steps=st.lists(st.integers(0, 3), min_size=1, max_size=30), data=st.data())
def test_the_offset_at_a_time_is_that_of_the_first_message_stored_then_or_later(
    steps: list[int], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    clock = ManualClock(1_000)
    store = open_store(tmp_path_factory.mktemp("time") / "data", clock=clock, segment_bytes=512)
    times = []
    for step in steps:
        clock.advance(step)
        publish(store, "plant/1")
        times.append(clock.now_ms())
        if data.draw(st.booleans()):
            store.commit()
    store.commit()
    times = [found.store_ms for found in store.log.scan(0) if found.kind == Kind.MESSAGE]
    queue = durable_queue(store, "plant/#")
    for store_ms in (0, *range(998, clock.now_ms() + 3)):
        assert queue.offset_at(store_ms, store.copies) == sum(each < store_ms for each in times)
    close(store)


def test_the_offset_at_a_time_uses_the_due_time_of_a_delayed_message(tmp_path: Path) -> None:
    clock = ManualClock(1_000)
    store = open_store(tmp_path / "data", clock=clock)
    delayed = store.append_message(
        store.router.route(b"plant/1"), b"d", encode_properties(Properties(deliver_at_ms=1_500)), Flag.DELAYED
    )
    size = store.log.end - delayed
    for now_ms in (1_100, 1_400, 1_600):
        store.commit()
        clock.advance(now_ms - clock.now_ms())
        if now_ms == 1_600:
            store.queues.dispatch(store.router.route(b"plant/1"), delayed, size, 0)
        publish(store, "plant/1", str(now_ms))
    store.commit()
    queue = durable_queue(store, "plant/#")
    assert bodies(store, queue) == ["1100", "1400", "d", "1600"]
    assert [queue.offset_at(at, store.copies) for at in (1_000, 1_200, 1_500, 1_501, 1_601)] == [0, 1, 2, 3, 4]
    close(store)


# --- transient queues -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orderly", [True, False])
def test_transient_queues_and_their_entries_end_with_the_process(tmp_path: Path, orderly: bool) -> None:
    store = open_store(tmp_path / "data")
    queue = store.queues.attach("plant/+", "connection:1")
    assert queue.transient
    for number in range(20):
        publish(store, "plant/1", str(number))
    store.commit()
    assert len(bodies(store, queue)) == 20
    store.index.flush()
    if orderly:
        close(store)
    else:
        crash(store, tmp_path / "left")
    store = open_store(tmp_path / ("data" if orderly else "left"))
    assert [queue.filter for queue in store.queues] == ["plant/#"]
    assert list(store.index.rows(queue_prefix(TRANSIENT))) == []
    again = store.queues.attach("other/+", "connection:2")
    assert again.id == queue.id, "ids of transient queues are reused, so no rows may remain under them"
    assert again.read(0, 10) == b""
    close(store)


# --- watchers -------------------------------------------------------------------------------------------------------


def test_watchers_are_told_of_committed_entries_once_they_can_be_read(store: Store) -> None:
    told: list[tuple[str, int, bytes]] = []

    def watch(queue: LightQueue, offset: int, entries: bytes) -> None:
        assert queue.read(offset, 100) == entries
        told.append((queue.filter, offset, entries))

    publish(store, "plant/1", "a")
    store.commit()
    root, exact = durable_queue(store, "plant/#"), store.queues.attach("plant/1", "connection:1")
    root.watchers.append(watch)
    exact.watchers.append(watch)
    store.commit()
    assert told == []
    publish(store, "plant/1", "b")
    publish(store, "plant/2", "c")
    store.commit()
    assert sorted(told) == [("plant/#", 1, root.read(1, 2)), ("plant/1", 0, exact.read(0, 1))]
