"""Retention drops old segments, keeps the records that somebody needs, and changes no offset and no id."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.cli.inspect_log import describe_record
from penstock.store.errors import LogCorrupt, PositionUnknown, SnapshotInvalid
from penstock.store.log.logreader import read_log
from penstock.store.options import HOUR_MS, KIB
from penstock.store.queues import backfill
from penstock.store.queues.lightqueue import ROW_ENTRIES
from penstock.store.record import Kind, Record, decode
from penstock.store.retention import trimming
from penstock.store.retention.retention import Blocker
from penstock.store.snapshots import snapshots as snapshots_module
from penstock.store.snapshots.snapshotreader import SnapshotReader, snapshot_path
from penstock.store.snapshots.snapshotwriter import snapshots
from penstock.store.store import Store
from tests.clock import ManualClock
from tests.store.keeper import Keeper
from tests.store.wiring import (
    NEVER_S,
    bodies,
    close,
    crash,
    durable_queue,
    fill,
    numbered_bodies,
    open_store,
    positions,
    publish,
    retain,
    work_on,
)

SEGMENT_BYTES = KIB
PER_SEGMENT = 8


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock, keeper: Keeper) -> Iterator[Store]:
    opened = reopened(tmp_path / "data", clock, keeper)
    yield opened
    close(opened)


def reopened(data_dir: Path, clock: ManualClock, keeper: Keeper | None = None, **options: int) -> Store:
    given: dict[str, Any] = {"segment_bytes": SEGMENT_BYTES, "retention_ms": HOUR_MS, **options}
    return open_store(data_dir, clock=clock, parts=[keeper] if keeper else [], **given)


def publish_segments(store: Store, count: int, topic: str = "plant/1", first: int = 0) -> list[int]:
    """Publish enough to fill `count` segments, let each have its snapshot, and return the positions."""
    published = []
    for number in range(count * PER_SEGMENT):
        published.append(publish(store, topic, f"{first + number}".rjust(96, ".")))
        work_on(store)
    store.commit()
    return published


def numbers(store: Store, topic_filter: str = "plant/#") -> list[int]:
    return [int(body.strip(".")) for body in bodies(store, durable_queue(store, topic_filter))]


# --- which segments are dropped -------------------------------------------------------------------------------------


def test_no_segment_is_dropped_before_its_retention_time(store: Store, clock: ManualClock) -> None:
    publish_segments(store, 5)
    clock.advance(HOUR_MS - 1)
    retain(store)
    assert store.log.start == 0
    assert numbers(store) == list(range(5 * PER_SEGMENT))


def test_a_segment_is_dropped_when_all_of_its_records_are_too_old(store: Store, clock: ManualClock) -> None:
    publish_segments(store, 3)
    clock.advance(HOUR_MS)
    publish_segments(store, 2, first=3 * PER_SEGMENT)
    retain(store)
    left = numbers(store)
    assert left == list(range(left[0], 5 * PER_SEGMENT))
    assert 2 * PER_SEGMENT <= left[0] <= 3 * PER_SEGMENT
    assert sorted(path.name for path in store.log.directory.iterdir())[0] == f"{store.log.start:020d}.log"
    assert store.retention.dropped_bytes == store.log.start


def test_the_oldest_segments_are_dropped_when_the_log_is_too_large(tmp_path: Path, clock: ManualClock) -> None:
    store = reopened(tmp_path / "data", clock, retention_ms=0, retention_bytes=4 * SEGMENT_BYTES)
    publish_segments(store, 12)
    retain(store)
    assert store.log.written - store.log.start <= 4 * SEGMENT_BYTES
    assert store.log.written - store.log.start > 2 * SEGMENT_BYTES
    assert numbers(store)[-1] == 12 * PER_SEGMENT - 1
    close(store)


def test_an_expiry_does_not_wait_for_a_moment_without_a_snapshot_under_way(tmp_path: Path, clock: ManualClock) -> None:
    """A busy log begins a segment, and with it a snapshot, more often than it is asked what must go."""
    store = reopened(tmp_path / "data", clock, retention_ms=0, retention_bytes=4 * SEGMENT_BYTES)
    publish_segments(store, 12)
    while not store.retention.busy:
        publish(store, "plant/1", "x" * 96)
        store.commit()
    store.retention.begin_due()
    assert not store.retention.is_behind
    work_on(store)
    assert store.log.written - store.log.start <= 5 * SEGMENT_BYTES
    close(store)


def test_without_bounds_nothing_is_dropped_and_no_snapshot_is_taken(tmp_path: Path, clock: ManualClock) -> None:
    store = reopened(tmp_path / "data", clock, retention_ms=0)
    publish_segments(store, 5)
    clock.advance(1000 * HOUR_MS)
    retain(store)
    assert store.log.start == 0
    assert snapshots(tmp_path / "data") == {}
    close(store)


def test_a_slow_log_starts_a_new_segment_by_age_so_that_it_expires_too(store: Store, clock: ManualClock) -> None:
    publish(store, "plant/1", "old")
    clock.advance(HOUR_MS // 2)
    retain(store)
    publish(store, "plant/1", "young")
    clock.advance(HOUR_MS // 2)
    retain(store)
    assert bodies(store, durable_queue(store, "plant/#")) == ["young"]


def test_entries_of_dropped_segments_are_trimmed_and_offsets_stay_the_same(store: Store, clock: ManualClock) -> None:
    publish_segments(store, 3)
    queue = durable_queue(store, "plant/#")
    before = numbered_bodies(store, queue)
    clock.advance(HOUR_MS)
    publish_segments(store, 1, first=3 * PER_SEGMENT)
    retain(store)
    assert queue.next_offset == 4 * PER_SEGMENT
    assert 0 < queue.first_offset() <= 3 * PER_SEGMENT
    assert store.retention.trimmed_entries == queue.first_offset()
    after = numbered_bodies(store, queue)
    assert {offset: body for offset, body in after.items() if offset in before}.items() <= before.items()
    first, entries = queue.read_from(0, 10_000)
    assert (first, len(entries) // 16) == (queue.first_offset(), queue.next_offset - first)


def test_a_queue_that_has_lost_all_entries_continues_at_its_offset(clock: ManualClock, tmp_path: Path) -> None:
    store = reopened(tmp_path / "data", clock)
    queue = store.queues.declare("quiet/#", "group:a")
    publish_segments(store, 2, topic="quiet/1")
    publish_segments(store, 2)
    clock.advance(HOUR_MS)
    publish_segments(store, 1)
    retain(store)
    assert queue.read_from(0, 100) == (queue.next_offset, b"")
    assert queue.first_offset() == queue.next_offset == 2 * PER_SEGMENT
    close(store)
    store = reopened(tmp_path / "data", clock)
    publish(store, "quiet/1", "again")
    store.commit()
    assert numbered_bodies(store, durable_queue(store, "quiet/#")) == {2 * PER_SEGMENT: "again"}
    close(store)


def test_a_queue_in_use_that_has_lost_all_entries_continues_at_its_offset(clock: ManualClock, tmp_path: Path) -> None:
    store = reopened(tmp_path / "data", clock)
    queue = store.queues.declare("quiet/#", "group:a")
    for number in range(5):
        publish(store, "quiet/1", str(number))
        store.commit()
    publish_segments(store, 3)
    clock.advance(HOUR_MS)
    publish_segments(store, 1)
    retain(store)
    assert queue.read_from(0, 100) == (5, b"")
    publish(store, "quiet/1", "again")
    store.commit()
    assert numbered_bodies(store, queue) == {5: "again"}
    close(store)
    store = reopened(tmp_path / "data", clock)
    publish(store, "quiet/1", "and again")
    store.commit()
    assert numbered_bodies(store, durable_queue(store, "quiet/#")) == {5: "again", 6: "and again"}
    close(store)


def test_many_short_queues_lose_dropped_entries_and_each_continues_at_its_offset(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_module, "SNAPSHOT_SPACING", 0)
    store = reopened(tmp_path / "data", clock)
    names = [f"quiet/{number}" for number in range(100)]
    for name in names:
        store.queues.declare(name, "a")
        publish(store, name, "old")
        store.commit()
    store.queues.declare(names[0], "b", "earliest")
    fill(store)
    publish_segments(store, 3)
    store.queues.declare("kept/1", "a")
    clock.advance(HOUR_MS)
    publish(store, "kept/1", "kept")
    publish_segments(store, 1)
    retain(store)
    assert store.retention.trimmed_entries > len(names)
    for reopen in (False, True):
        if reopen:
            close(store)
            store = reopened(tmp_path / "data", clock)
        found = [durable_queue(store, name) for name in names] + [durable_queue(store, names[0], "earliest")]
        assert {(queue.first_offset(), queue.next_offset) for queue in found} == {(1, 1)}
        assert numbered_bodies(store, durable_queue(store, "kept/1")) == {0: "kept"}
    publish(store, names[0], "new")
    store.commit()
    assert [numbered_bodies(store, queue) for queue in (found[0], found[-1])] == [{1: "new"}] * 2
    close(store)


def test_a_queue_with_a_needed_message_keeps_the_entry_of_that_message_alone(
    clock: ManualClock, keeper: Keeper, tmp_path: Path
) -> None:
    store = reopened(tmp_path / "data", clock, keeper)
    position = publish(store, "quiet/1", "needed")
    keeper.needed[position] = 24 + len("quiet/1") + len("needed")
    for number in range(ROW_ENTRIES + 3):
        publish(store, "quiet/1", str(number))
    publish_segments(store, 3)
    clock.advance(HOUR_MS)
    publish_segments(store, 1)
    retain(store)
    queue = durable_queue(store, "quiet/#")
    assert store.log.start > position
    assert positions(queue) == [position]
    assert (queue.first_offset(), queue.count_from(0), queue.count_from(1)) == (0, 1, 0)
    assert queue.next_offset == ROW_ENTRIES + 4
    publish(store, "quiet/1", "new")
    store.commit()
    assert list(numbered_bodies(store, queue).values()) == ["needed", "new"]
    close(store)
    store = reopened(tmp_path / "data", clock, keeper)
    queue = durable_queue(store, "quiet/#")
    assert numbered_bodies(store, queue) == {0: "needed", ROW_ENTRIES + 4: "new"}
    close(store)


@pytest.mark.parametrize(("limit", "value"), [("TRIM_ROWS", 3), ("TRIM_ENTRIES", 40)])
def test_a_long_queue_is_trimmed_in_several_slices(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(trimming, limit, value)
    publish_segments(store, 20)
    clock.advance(HOUR_MS)
    publish_segments(store, 1)
    retain(store)
    queue = durable_queue(store, "plant/#")
    assert queue.first_offset() > 2 * 3 * ROW_ENTRIES
    assert not store.is_expired(int.from_bytes(queue.read(queue.first_offset() + ROW_ENTRIES - 1, 1)[:8], "little"))


def test_transient_queues_are_trimmed_too(store: Store, clock: ManualClock) -> None:
    queue = store.queues.attach("plant/+", "connection:1")
    publish_segments(store, 5)
    clock.advance(HOUR_MS)
    publish_segments(store, 1)
    retain(store)
    assert queue.first_offset() == 2 * ROW_ENTRIES


# --- which records are kept -----------------------------------------------------------------------------------------


def test_a_needed_record_is_copied_forward_and_keeps_its_position(clock: ManualClock, keeper: Keeper, tmp_path: Path) -> None:
    store = reopened(tmp_path / "data", clock, keeper)
    position = publish_segments(store, 1)[2]
    keeper.needed[position] = size = 24 + len("plant/1") + 96
    data = store.read(position, size)
    for round_number in range(4):
        clock.advance(HOUR_MS)
        publish_segments(store, 3)
        retain(store)
        assert store.log.start > position
        assert store.read(position, size) == data, round_number
        assert not store.is_expired(position)
        assert store.copies.pinned_bytes == size
    close(store)
    store = reopened(tmp_path / "data", clock, keeper)
    assert store.read(position, size) == data
    assert decode(data, position=position).position == position
    close(store)


def test_a_copy_is_dropped_when_nobody_needs_it_any_more(store: Store, clock: ManualClock, keeper: Keeper) -> None:
    position = publish_segments(store, 1)[2]
    keeper.needed[position] = size = 24 + len("plant/1") + 96
    clock.advance(HOUR_MS)
    publish_segments(store, 3)
    retain(store)
    keeper.needed.clear()
    for _ in range(2):  # the copy is in the last segment that the first round drops, or after it
        clock.advance(HOUR_MS)
        publish_segments(store, 3)
        retain(store)
    assert store.copies.pinned_bytes == 0
    with pytest.raises(PositionUnknown):
        store.read(position, size)


def test_entries_of_records_copied_forward_are_not_trimmed(store: Store, clock: ManualClock, keeper: Keeper) -> None:
    position = publish_segments(store, 1)[2]
    keeper.needed[position] = 24 + len("plant/1") + 96
    clock.advance(HOUR_MS)
    publish_segments(store, 3, first=100)
    retain(store)
    assert numbers(store)[0] == 2
    assert 2 not in numbers(store)[1:]


def test_segments_stay_if_more_would_be_copied_forward_than_allowed(tmp_path: Path, clock: ManualClock, keeper: Keeper) -> None:
    store = reopened(tmp_path / "data", clock, keeper, copied_bytes_max=200)
    size = 24 + len("plant/1") + 96
    keeper.needed.update((position, size) for position in publish_segments(store, 1)[:3])
    clock.advance(HOUR_MS)
    publish_segments(store, 3)
    retain(store)
    assert store.log.start == 0
    assert store.retention.blocked_by is Blocker.COPIES
    assert store.copies.pinned_bytes <= 200
    close(store)


def test_a_damaged_record_is_not_copied_forward(store: Store, clock: ManualClock, keeper: Keeper, tmp_path: Path) -> None:
    position = publish_segments(store, 1)[2]
    keeper.needed[position] = size = 24 + len("plant/1") + 96
    with (tmp_path / "data" / "commitlog" / f"{0:020d}.log").open("r+b") as file:
        file.seek(position + 40)
        file.write(b"!")
    clock.advance(HOUR_MS)
    publish_segments(store, 3)
    retain(store)
    assert store.log.start > position
    with pytest.raises(PositionUnknown):
        store.read(position, size)


# --- the index when the log no longer has all that it was made from ---------------------------------------------------


@pytest.mark.parametrize("killed", [False, True])
def test_a_lost_index_is_rebuilt_from_snapshot_and_log(tmp_path: Path, clock: ManualClock, killed: bool) -> None:
    keeper = Keeper()
    store = reopened(tmp_path / "data", clock, keeper)
    keeper.needed[publish_segments(store, 1)[2]] = 24 + len("plant/1") + 96
    store.queues.declare("plant/+", "group:a", "earliest")
    store.queues.declare("office/#", "group:a")
    dropped = store.queues.declare("yard/+", "group:a")
    fill(store)
    publish_segments(store, 2, first=PER_SEGMENT)
    publish_segments(store, 1, topic="office/1")
    store.queues.drop(dropped, "group:a")
    clock.advance(HOUR_MS)
    publish_segments(store, 2, first=3 * PER_SEGMENT)
    retain(store)
    before = {queue.filter: (queue.id, sorted(queue.owners), numbered_bodies(store, queue)) for queue in store.queues}
    next_offsets = {queue.filter: queue.next_offset for queue in store.queues}
    pinned = store.copies.pinned_bytes
    assert store.log.start > 0
    assert pinned
    if killed:
        crash(store, tmp_path / "left")
    else:
        close(store)
        (tmp_path / "data").rename(tmp_path / "left")
    shutil.rmtree(tmp_path / "left" / "index")
    store = reopened(tmp_path / "left", clock, keeper)
    fill(store)
    assert all(position >= store.log.start for queue in store.queues for position in positions(queue)), (
        "replay must not bring back entries of dropped segments"
    )
    after = {queue.filter: (queue.id, sorted(queue.owners), numbered_bodies(store, queue)) for queue in store.queues}
    left = {name: (*row[:2], {at: body for at, body in row[2].items() if at in after[name][2]}) for name, row in before.items()}
    assert after == left
    assert {queue.filter: queue.next_offset for queue in store.queues} == next_offsets
    assert all(bodies(store, queue)[-1:] == list(before[queue.filter][2].values())[-1:] for queue in store.queues)
    assert store.copies.pinned_bytes == pinned
    assert store.read(*next(iter(keeper.needed.items())))
    close(store)


def test_a_rebuilt_queue_gets_its_offsets_back_though_the_log_has_lost_its_first_messages(
    tmp_path: Path, clock: ManualClock
) -> None:
    store = reopened(tmp_path / "data", clock)
    publish_segments(store, 3)
    clock.advance(HOUR_MS // 2)
    publish_segments(store, 2, first=3 * PER_SEGMENT)
    queue = store.queues.declare("plant/1", "group:a", "earliest")
    fill(store)
    publish(store, "plant/1", "last")
    store.commit()
    clock.advance(HOUR_MS // 2)
    publish_segments(store, 1, first=5 * PER_SEGMENT)
    retain(store)
    assert store.log.start > 0
    before = numbered_bodies(store, queue)
    close(store)
    shutil.rmtree(tmp_path / "data" / "index")
    store = reopened(tmp_path / "data", clock)
    fill(store)
    found = durable_queue(store, "plant/1", "earliest")
    assert numbered_bodies(store, found) == before
    assert found.next_offset == 6 * PER_SEGMENT + 1
    close(store)


def test_without_index_and_snapshot_the_start_is_refused_and_the_error_says_what_to_do(
    tmp_path: Path, clock: ManualClock
) -> None:
    store = reopened(tmp_path / "data", clock)
    publish_segments(store, 3)
    clock.advance(HOUR_MS)
    publish_segments(store, 2)
    retain(store)
    start = store.log.start
    close(store)
    shutil.rmtree(tmp_path / "data" / "index")
    for position in snapshots(tmp_path / "data"):
        path = snapshot_path(tmp_path / "data", position)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    with pytest.raises(LogCorrupt, match=f"begins at position {start}.*Restore that folder"):
        reopened(tmp_path / "data", clock)


def test_a_rebuild_skips_a_damaged_snapshot_for_a_later_one(tmp_path: Path, clock: ManualClock) -> None:
    store = reopened(tmp_path / "data", clock)
    publish_segments(store, 3)
    clock.advance(HOUR_MS)
    publish_segments(store, 4, first=3 * PER_SEGMENT)
    retain(store)
    before = numbered_bodies(store, durable_queue(store, "plant/#"))
    close(store)
    shutil.rmtree(tmp_path / "data" / "index")
    first, second, *_ = snapshots(tmp_path / "data")
    with snapshot_path(tmp_path / "data", first).open("r+b") as file:
        file.truncate(40)
    with capture_logs() as lines:
        store = reopened(tmp_path / "data", clock)
    (warned,) = [line for line in lines if line["event"] == "snapshot.later"]
    assert warned["log_level"] == "warning"
    assert warned["file"] == str(snapshot_path(tmp_path / "data", first))
    assert warned["begin"] == first
    assert warned["position"] == second
    assert store._agreement.skipped_bytes == second - first
    after = numbered_bodies(store, durable_queue(store, "plant/#"))
    assert after
    assert after.items() <= before.items()
    assert max(after) == max(before)
    assert store.index.covered() is not None
    assert second > first
    close(store)


def test_a_rebuild_skips_a_snapshot_that_has_the_name_of_another(tmp_path: Path, clock: ManualClock) -> None:
    """Else the rows of a later time would be taken for those at the position in its name, and records applied twice."""
    store = reopened(tmp_path / "data", clock)
    publish_segments(store, 3)
    clock.advance(HOUR_MS)
    publish_segments(store, 4, first=3 * PER_SEGMENT)
    retain(store)
    close(store)
    shutil.rmtree(tmp_path / "data" / "index")
    first, *_, last = snapshots(tmp_path / "data")
    snapshot_path(tmp_path / "data", last).rename(snapshot_path(tmp_path / "data", first))
    with pytest.raises(SnapshotInvalid, match=f"was made at position {last}, so it is in a wrong place"):
        SnapshotReader(tmp_path / "data", first)
    store = reopened(tmp_path / "data", clock)
    assert durable_queue(store, "plant/#").next_offset == 7 * PER_SEGMENT
    close(store)


def test_snapshots_that_have_each_others_names_get_their_own_at_the_start(tmp_path: Path, clock: ManualClock) -> None:
    """Else the oldest can't be used, and messages before the next one would be lost to sessions and groups."""
    store = reopened(tmp_path / "data", clock)
    publish_segments(store, 3)
    clock.advance(HOUR_MS)
    publish_segments(store, 4, first=3 * PER_SEGMENT)
    retain(store)
    before = numbered_bodies(store, durable_queue(store, "plant/#"))
    close(store)
    shutil.rmtree(tmp_path / "data" / "index")
    first, second, third, *_ = snapshots(tmp_path / "data")
    folder = snapshot_path(tmp_path / "data", first).parent
    names = [snapshot_path(tmp_path / "data", each).name for each in (first, second, third)]
    for name, other in zip(names, [*names[1:], names[0]], strict=True):
        (folder / name).rename(folder / f"{other}.moved")
    for name in names:
        (folder / f"{name}.moved").rename(folder / name)
    with capture_logs() as lines:
        store = reopened(tmp_path / "data", clock)
    renamed = {line["was"]: Path(line["file"]).name for line in lines if line["event"] == "snapshot.renamed"}
    assert renamed == dict(zip([*names[1:], names[0]], names, strict=True))
    assert "snapshot.later" not in [line["event"] for line in lines]
    assert store._agreement.skipped_bytes == 0
    assert numbered_bodies(store, durable_queue(store, "plant/#")) == before
    assert sorted(path.suffix for path in folder.iterdir()) == [".snap"] * len(list(folder.iterdir()))
    close(store)


def test_nothing_is_dropped_because_of_a_snapshot_that_was_damaged_before_the_start(tmp_path: Path, clock: ManualClock) -> None:
    """Whoever rebuilds the index later would need it: without it, what is between it and the next one is out of reach."""
    store = reopened(tmp_path / "data", clock)
    publish_segments(store, 4)
    close(store)
    *whole, damaged = [position for position in snapshots(tmp_path / "data") if position]
    with snapshot_path(tmp_path / "data", damaged).open("r+b") as file:
        file.truncate(90)
    clock.advance(HOUR_MS)
    store = reopened(tmp_path / "data", clock)
    publish_segments(store, 1, first=4 * PER_SEGMENT)
    retain(store)
    assert damaged not in store.retention.snapshots
    assert store.log.start == 0
    retain(store)
    assert store.log.start == whole[-1]
    queue = durable_queue(store, "plant/#")
    fill(store)
    before = numbered_bodies(store, queue)
    close(store)
    shutil.rmtree(tmp_path / "data" / "index")
    store = reopened(tmp_path / "data", clock)
    assert numbered_bodies(store, durable_queue(store, "plant/#")) == before
    close(store)


def test_a_drop_waits_for_a_backfill_that_reads_its_segment(store: Store, clock: ManualClock) -> None:
    publish_segments(store, 3)
    clock.advance(HOUR_MS)
    publish_segments(store, 1, first=3 * PER_SEGMENT)
    queue = store.queues.declare("plant/1", "group:a", "earliest")
    store.commit()
    store.retention.begin_due()
    assert store.retention.busy
    for _ in range(3):
        store.retention.step(0.0)
    assert store.log.start == 0
    fill(store)
    retain(store)
    assert store.log.start > 0
    assert queue.next_offset == 4 * PER_SEGMENT


def test_a_backfill_does_not_add_expired_messages_to_a_new_queue(store: Store, clock: ManualClock) -> None:
    publish_segments(store, 3)
    clock.advance(HOUR_MS)
    publish_segments(store, 1, first=3 * PER_SEGMENT)
    store.retention.begin_due()
    store.retention.step(0.0)
    queue = store.queues.declare("plant/1", "group:a", "earliest")
    fill(store)
    retain(store)
    assert queue.first_offset() == 0
    assert [int(body.strip(".")) for body in bodies(store, queue)] == numbers(store)


def test_a_queue_that_is_filled_again_while_a_snapshot_is_taken_keeps_its_offsets(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of its first filling is before the snapshot, so only that of the second tells the offsets."""
    monkeypatch.setattr(backfill, "SLICE_BYTES", 400)
    store = reopened(tmp_path / "data", clock)
    store.queues.declare("plant/1", "group:a", "earliest")
    fill(store)
    publish_segments(store, 3)
    close(store)
    for folder in ("index", "snapshots"):
        shutil.rmtree(tmp_path / "data" / folder)
    store = reopened(tmp_path / "data", clock)
    for _ in range(3):
        assert store.queues.backfill()
        store.commit()
    publish_segments(store, 1, first=3 * PER_SEGMENT)
    while not store.retention.snapshots:  # a thread makes it durable
        store.retention.step(NEVER_S)
    taken = store.retention.snapshots
    fill(store)
    clock.advance(HOUR_MS)
    publish(store, "plant/1", "the last")
    retain(store)
    queue = durable_queue(store, "plant/1", "earliest")
    before = numbered_bodies(store, queue)
    assert store.log.start in taken, "a snapshot from before the queue was full"
    assert queue.next_offset == 4 * PER_SEGMENT + 1
    close(store)
    shutil.rmtree(tmp_path / "data" / "index")
    store = reopened(tmp_path / "data", clock)
    fill(store)
    assert numbered_bodies(store, durable_queue(store, "plant/1", "earliest")) == before
    close(store)


def test_a_half_written_snapshot_is_ignored(tmp_path: Path, clock: ManualClock) -> None:
    store = reopened(tmp_path / "data", clock)
    for number in range(2 * PER_SEGMENT):
        publish(store, "plant/1", str(number).rjust(96, "."))
    store.commit()
    assert store.retention.busy
    crash(store, tmp_path / "left")
    assert list((tmp_path / "left" / "snapshots").glob("*.partial"))
    assert snapshots(tmp_path / "left") == {}
    store = reopened(tmp_path / "left", clock)
    assert not list((tmp_path / "left" / "snapshots").glob("*.partial"))
    close(store)


def test_a_copied_record_is_recognised_by_its_kind(store: Store, clock: ManualClock, keeper: Keeper) -> None:
    position = publish_segments(store, 1)[2]
    keeper.needed[position] = size = 24 + len("plant/1") + 96
    clock.advance(HOUR_MS)
    publish_segments(store, 3)
    retain(store)
    copies: list[Record] = [found for found in store.log.scan(store.log.start) if found.kind == Kind.COPIED]
    assert [int.from_bytes(found.fixed, "little") for found in copies] == [position]
    assert copies[0].body == store.read(position, size)


def test_records_that_retention_appends_can_be_inspected(
    store: Store, clock: ManualClock, keeper: Keeper, tmp_path: Path
) -> None:
    position = publish_segments(store, 1)[2]
    keeper.needed[position] = 24 + len("plant/1") + 96
    store.queues.declare("plant/+", "group:a", "earliest")
    fill(store)
    clock.advance(HOUR_MS)
    publish_segments(store, 3)
    store.queues.declare("+/1", "group:a", "earliest")
    retain(store)
    rows = [describe_record(found) for found in read_log(tmp_path / "data")]
    (copied,) = [row for row in rows if row["kind"] == "copied"]
    assert (copied["copy_of"]["position"], copied["copy_of"]["topic"]) == (position, "plant/1")
    assert copied["copy_of"]["body"].endswith("2")
    assert [row["queue_id"] for row in rows if row["kind"] == "queue_backfilled"][-1:] == [3]
