"""A store whose log a leader writes: what it applies, cuts, keeps across an end, and does when it leads itself."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.pop.core.settings import ConsumerGroupSettings
from penstock.store.errors import IndexAhead, PositionUnknown
from penstock.store.index.index import OWN_KEYS, KeySpace
from penstock.store.options import KIB, StoreOptions
from penstock.store.properties import Properties
from penstock.store.record import Kind
from penstock.store.store import Store
from tests.clock import ManualClock
from tests.pop.wiring import Parts
from tests.store.replicating import Stretch, stretches
from tests.store.wiring import bodies, contents, durable_queue, retain
from tests.waiting import until

SEGMENT_BYTES = 16 * KIB
OPTIONS = StoreOptions(segment_bytes=SEGMENT_BYTES, sync_in="thread")


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Parts]:
    """A store with groups, deliveries, delayed messages, dead letters and queues that were backfilled."""
    parts = Parts(tmp_path / "leader", ManualClock(), store=OPTIONS)
    work(parts, 0)
    yield parts
    parts.close()


def work(parts: Parts, first: int) -> None:
    """Do some of everything that a service does."""
    parts.create(f"billing-{first}", "plant/#", attempts_max=2)
    for number in range(first, first + 40):
        parts.publish(b"%d" % number + b"." * 500, topic=f"plant/{number % 3}", properties=Properties(tag=f"t{number % 2}"))
        for delivered in parts.pop(3, group=f"billing-{first}", topic_filter="plant/#"):
            if number % 3:
                parts.ack(delivered.handle, group=f"billing-{first}")
            else:
                parts.change(delivered.handle, 0, nack=True, group=f"billing-{first}")
        if number % 10 == 0:
            parts.group(f"late-{number}", f"plant/{number % 3}")
        parts.advance(700)
    parts.settle()


def rows(store: Store) -> dict[bytes, bytes]:
    """Return the rows of an index, but those of queues' entries and those that say something about this very index.

    Commits cut entries into rows, so the rows of a leader and of its follower end at other offsets.
    """
    own = (KeySpace.ENTRIES, KeySpace.QUEUE, KeySpace.META)
    return {key: value for key, value in store.index.rows(b"") if key not in OWN_KEYS and not key.startswith(own)}


@asynccontextmanager
async def following(data_dir: Path, options: StoreOptions = OPTIONS) -> AsyncIterator[Parts]:
    """Open a store that follows, on the running loop."""
    parts = Parts(data_dir, ManualClock(), store=options, is_following=True)
    failures: list[OSError] = []
    parts.store.start(asyncio.get_running_loop(), failures.append, lambda: None)
    try:
        yield parts
    finally:
        await parts.store.close()
        assert failures == []


async def take(store: Store, found: Stretch) -> None:
    """Write what the leader has sent, and wait until it is durable."""
    if found.begins_segment:
        store.begin_segment()
    store.put(found.position, found.data)
    await until(lambda: store.durable_position == store.log.end)


async def follow(store: Store, leader: Store, records: int = 7) -> None:
    """Take and apply everything that the leader has."""
    for found in stretches(leader.log, store.log.end, records):
        await take(store, found)
        while not store.apply_to(store.log.end, lambda: True):
            pass
        await asyncio.sleep(0)


async def test_a_follower_has_the_leader_s_log_and_index(leader: Parts, tmp_path: Path) -> None:
    async with following(tmp_path / "follower") as follower:
        await follow(follower.store, leader.store)
        await until(lambda: not follower.store.queues.backfill(applied=follower.store.applied))
        follower.store._save(follower.store.applied)
        assert follower.store.log.segments() == leader.store.log.segments()
        assert contents(follower.store) == contents(leader.store)
        assert rows(follower.store) == rows(leader.store)
        assert follower.store.log.end == leader.store.log.end, "it has appended nothing"


async def test_a_follower_applies_only_what_is_committed(leader: Parts, tmp_path: Path) -> None:
    async with following(tmp_path / "follower") as follower:
        store = follower.store
        sent = list(stretches(leader.store.log, 0, 5))
        for found in sent[:6]:
            await take(store, found)
        assert store.applied == 0
        assert not store.apply_to(sent[3].position, lambda: True) or store.applied == sent[3].position
        while not store.apply_to(sent[3].position, lambda: True):
            pass
        assert store.applied == sent[3].position < store.log.end
        covered = store.index.covered()
        assert covered is not None
        assert covered.position == sent[3].position
        assert not store.apply_to(sent[8].position, lambda: False), "the log does not have it yet"
        assert store.applied == store.log.end
        with pytest.raises(AssertionError):
            store.put(sent[8].position, sent[8].data)


@pytest.mark.parametrize("is_orderly", [True, False])
async def test_a_follower_goes_on_after_an_end(leader: Parts, tmp_path: Path, is_orderly: bool) -> None:
    directory = tmp_path / "follower"
    sent = list(stretches(leader.store.log, 0, 5))
    async with following(directory) as follower:
        for found in sent[: len(sent) // 2]:
            await take(follower.store, found)
        follower.store.apply_to(sent[len(sent) // 4].position, lambda: False)
        applied, end = follower.store.applied, follower.store.log.end
        if not is_orderly:
            directory = shutil.copytree(directory, tmp_path / "left")
    async with following(directory) as follower:
        assert follower.store.log.end == end
        assert follower.store.applied <= applied
        await follow(follower.store, leader.store)
        assert contents(follower.store) == contents(leader.store)


async def test_a_follower_that_leads_applies_the_rest_and_appends(leader: Parts, tmp_path: Path) -> None:
    async with following(tmp_path / "follower") as follower:
        store = follower.store
        await follow(store, leader.store)
        work(leader, 100)
        for found in stretches(leader.store.log, store.log.end, 50):
            await take(store, found)
        assert store.applied < store.log.end
        before = store.log.end
        store.catch_up()
        assert (store.applied, store.replaying) == (before, False)
        follower.settle_queues()
        work(follower, 200)
        assert store.log.end > before
        work(leader, 200)
        assert sorted(bodies(store, durable_queue(store, "plant/#"))) == sorted(
            bodies(leader.store, durable_queue(leader.store, "plant/#"))
        )


async def test_what_was_not_applied_is_cut_off_and_replaced(leader: Parts, tmp_path: Path) -> None:
    async with following(tmp_path / "follower") as follower:
        store = follower.store
        sent = list(stretches(leader.store.log, 0, 5))
        for found in sent[:12]:
            await take(store, found)
        store.apply_to(sent[3].position, lambda: False)
        store.cut_to(sent[5].position)
        assert (store.log.end, store.durable_position) == (sent[5].position, sent[5].position)
        store.cut_to(sent[8].position)
        assert store.log.end == sent[5].position, "the log ends before that"
        await follow(store, leader.store)
        assert contents(store) == contents(leader.store)


async def test_a_sync_that_was_asked_for_before_a_cut_says_nothing_of_what_comes_after(leader: Parts, tmp_path: Path) -> None:
    async with following(tmp_path / "follower") as follower:
        store = follower.store
        sent = list(stretches(leader.store.log, 0, 5))
        for found in sent[:12]:
            if found.begins_segment:
                store.begin_segment()
            store.put(found.position, found.data)
        store.cut_to(sent[2].position)
        assert store.durable_position == sent[2].position
        await until(lambda: store.syncs >= 1)
        assert store.durable_position == sent[2].position
        await follow(store, leader.store)


async def test_an_index_that_is_ahead_of_a_cut_is_built_anew_from_a_snapshot(leader: Parts, tmp_path: Path) -> None:
    async with following(tmp_path / "follower") as follower:
        store = follower.store
        await follow(store, leader.store)
        await until(lambda: not store.retention.step(float("inf")))
        assert store.retention.snapshots, "a follower takes snapshots where segments begin"
        sent = list(stretches(leader.store.log, 0, 5))
        cut = sent[-3].position
        with pytest.raises(IndexAhead, match=f"the log was cut at position {cut}"):
            store.cut_to(cut)
    async with following(tmp_path / "follower") as follower:
        assert follower.store.log.end == cut
        assert follower.store.applied in {*follower.store.retention.snapshots, 0}
        await follow(follower.store, leader.store)
        assert contents(follower.store) == contents(leader.store)
        assert rows(follower.store) == rows(leader.store)


async def test_a_follower_can_t_be_cut_before_its_log_begins(leader: Parts, tmp_path: Path) -> None:
    async with following(tmp_path / "follower") as follower:
        store = follower.store
        await follow(store, leader.store)
        await until(lambda: not store.retention.step(float("inf")))
        store.log.drop_before(store.retention.snapshots[0])
        with pytest.raises(PositionUnknown, match="can't be cut at 0"):
            store.cut_to(0)


async def test_a_queue_is_filled_on_a_follower_and_goes_live_by_the_leader_s_record(leader: Parts, tmp_path: Path) -> None:
    leader.groups.create("slow", "+/1", "earliest", ConsumerGroupSettings())
    leader.store.commit()
    position = leader.store.log.end
    queue = durable_queue(leader.store, "+/1", "earliest")
    async with following(tmp_path / "follower") as follower:
        store = follower.store
        await follow(store, leader.store)
        await until(lambda: not store.queues.backfill(applied=store.applied))
        found = durable_queue(store, "+/1", "earliest")
        assert store.queues.is_backfilling(found), "the leader has not said that it has ended"
        count = found.next_offset
        assert count > 0
        leader.settle_queues()
        assert [each.kind for each in leader.store.log.scan(position)] == [Kind.QUEUE_BACKFILLED]
        leader.publish(b"live", topic="plant/1")
        await follow(store, leader.store, 1)
        await until(lambda: not store.queues.is_backfilling(found))
        assert found.next_offset == queue.next_offset == count + 1
        assert bodies(store, found) == bodies(leader.store, queue)


async def test_a_follower_drops_what_the_leader_has_dropped_and_keeps_what_is_needed(tmp_path: Path) -> None:
    options = replace(OPTIONS, retention_bytes=2 * SEGMENT_BYTES)
    leader = Parts(tmp_path / "leader", ManualClock(), store=options)
    leader.create("slow", "keep/#")
    leader.publish(b"needed", topic="keep/1")
    (taken,) = leader.pop(1, 3_600_000, group="slow", topic_filter="keep/#")
    async with following(tmp_path / "follower", options) as follower:
        store = follower.store
        for first in range(0, 200, 40):
            work(leader, first)
            await follow(store, leader.store)
            retain(leader.store)
            await follow(store, leader.store)
        start = leader.store.log.start
        assert start > 0
        store.retention.follow(start, leader.store.log.end + 1)
        store.retention.begin_following()
        assert store.log.start == 0, "the copies are not applied yet"
        store.retention._needed = leader.store.log.end
        await until(lambda: not store.retention.step(float("inf")))  # completes the snapshots
        store.retention.needed_from = lambda: 0
        assert not store.retention.begin_following(), "the tables have nothing"
        store.retention.needed_from = lambda: store.log.end
        store.retention.begin_following()
        await until(lambda: not store.retention.step(float("inf")))
        assert 0 < store.log.start <= start
        assert store.log.start in store.retention.snapshots
        assert store.log.end == leader.store.log.end, "it has appended nothing"
        copy = store.copies.where(taken.position)
        assert copy is not None
        assert copy >= store.log.start
        assert store.log.record(copy).body.endswith(b"needed"), "its consumer may still return it"
    leader.close()
