from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from struct import Struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.store import housekeeping
from penstock.store.epochs import EpochTable
from penstock.store.errors import LogCorrupt, RecordTooLarge
from penstock.store.files import Usage
from penstock.store.index.index import Batch, Covered, Index, KeySpace
from penstock.store.log import logepochs
from penstock.store.log.commitlog import ALLOCATE_BYTES
from penstock.store.log.segment import Segment
from penstock.store.log.syncmark import Ending, SyncMark
from penstock.store.options import GIB, KIB, MIB
from penstock.store.part import Apply
from penstock.store.queues import backfill as backfill_module
from penstock.store.queues.lightqueue import ENTRY, ROW_ENTRIES, consecutive_entries
from penstock.store.record import EPOCH_FIXED, Flag, Kind, Record, encode
from penstock.store.recovery import recovery
from penstock.store.store import Store
from tests.clock import ManualClock
from tests.depth import DEPTH
from tests.store.losing import LosingFiles
from tests.store.wiring import (
    SEGMENT_BYTES,
    bodies,
    close,
    contents,
    crash,
    durable_queue,
    entries,
    fill,
    open_store,
    positions,
    publish,
)
from tests.waiting import WAIT_S_MAX, until


class Sessions:
    """A minimal part: it keeps the last body of each open session and of each retained topic."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.seen: list[Record] = []
        self._changed: set[bytes] = set()

    def applies(self) -> Mapping[Kind, Apply]:
        return {Kind.SESSION_OPENED: self._put, Kind.SESSION_CLOSED: self._delete, Kind.MESSAGE: self._put}

    def load(self, index: Index) -> None:
        self.rows = {key[1:]: value for key, value in index.rows(bytes(KeySpace.SESSION))}

    def save(self, batch: Batch) -> None:
        for name in self._changed:
            if name in self.rows:
                batch.put(KeySpace.SESSION + name, self.rows[name])
            else:
                batch.delete(KeySpace.SESSION + name)
        self._changed.clear()

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        yield from ()

    def _put(self, record: Record) -> None:
        self.seen.append(record)
        self.rows[record.topic] = record.body
        self._changed.add(record.topic)

    def _delete(self, record: Record) -> None:
        self.seen.append(record)
        self.rows.pop(record.topic, None)
        self._changed.add(record.topic)


def do_some_of_everything(store: Store) -> None:
    """Write queues, drops, a part's rows, and messages of every kind, in several commits and segments."""
    for number in range(30):
        publish(store, f"plant/{number % 4}/temp", f"{number}" + "." * 900, tag="t" if number % 3 else "")
        if number == 3:
            store.queues.declare("plant/+/temp", "group:a")
            store.queues.declare("plant/1/#", "group:a", "earliest")
        if number == 10:
            store.queues.declare("plant/+/temp", "group:b")
            dropped = store.queues.declare("plant/2/#", "group:b")
        if number == 20:
            store.queues.drop(dropped, "group:b")
            store.queues.declare("+/3/temp", "group:c", "earliest")
        store.append(Kind.SESSION_OPENED, topic=f"device{number % 5}".encode(), body=b"%d" % number)
        if number % 7 == 0:
            store.append(Kind.SESSION_CLOSED, topic=f"device{number % 5}".encode())
        if number % 6 == 0:
            publish(store, "office/lamp", f"{number}", flags=Flag.RETAIN)
            publish(store, "office/later", f"{number}", flags=Flag.DELAYED)
        if number % 4 == 0:
            store.commit()
            store.queues.backfill()
    fill(store)


def delete_index(data_dir: Path) -> None:
    shutil.rmtree(data_dir / "index")


@asynccontextmanager
async def started(store: Store, failures: list[OSError] | None = None) -> AsyncIterator[Store]:
    """Run `store` on the loop, and close it at the end. An exception that reaches the loop fails the test."""
    loop = asyncio.get_running_loop()
    unseen: list[object] = []
    loop.set_exception_handler(lambda _, context: unseen.append(context.get("exception", context)))
    store.start(loop, failures.append if failures is not None else lambda error: unseen.append(error))
    yield store
    if not store._closed:
        await store.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert unseen == []


class Gate:
    """Holds each fdatasync of a store until the test lets it pass."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        self._sync = store.log.sync
        self.ended = 0
        monkeypatch.setattr(store.log, "sync", self._held)

    def _held(self) -> None:
        self._begun.release()
        assert self._permits.acquire(timeout=WAIT_S_MAX)
        self._sync()
        self.ended += 1

    async def begun(self) -> None:
        """Return when the next sync has begun."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=WAIT_S_MAX)

    def has_begun(self, within_s: float) -> bool:
        """Return whether the next sync begins within a time in which the loop is blocked."""
        return self._begun.acquire(timeout=within_s)

    def open(self, count: int = 1) -> None:
        self._permits.release(count)


# --- live and recovery ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [False, True])
def test_a_part_sees_the_same_records_live_and_in_recovery(tmp_path: Path, flushed: bool) -> None:
    live = Sessions()
    store = open_store(tmp_path / "data", parts=[live])
    do_some_of_everything(store)
    if flushed:
        store.index.flush()
    before = contents(store)
    crash(store, tmp_path / "left")

    recovered = Sessions()
    store = open_store(tmp_path / "left", parts=[recovered])
    assert live.rows
    assert recovered.rows == live.rows
    assert recovered.seen == ([] if flushed else live.seen)
    fill(store)
    assert contents(store) == before
    close(store)


def test_a_part_gets_only_retained_and_delayed_messages(tmp_path: Path) -> None:
    part = Sessions()
    store = open_store(tmp_path / "data", parts=[part])
    publish(store, "plant/1", "plain")
    publish(store, "plant/1", "retained", flags=Flag.RETAIN)
    publish(store, "plant/1", "delayed", flags=Flag.DELAYED)
    store.commit()
    root = durable_queue(store, "plant/#")
    assert [record.body for record in part.seen] == [b"retained", b"delayed"]
    assert bodies(store, root) == ["plain", "retained"], "a delayed message is routed when it is due"
    close(store)


def test_a_deleted_index_is_rebuilt_with_the_same_contents(tmp_path: Path) -> None:
    live = Sessions()
    store = open_store(tmp_path / "data", parts=[live])
    do_some_of_everything(store)
    before = contents(store)
    close(store)
    delete_index(tmp_path / "data")

    rebuilt = Sessions()
    store = Store(tmp_path / "data", store.options, ManualClock())
    store.add_part(rebuilt)
    recovery = store.recover()
    assert recovery.rebuilt
    assert recovery.replayed == sum(1 for _ in store.log.scan(0))
    fill(store)
    assert recovery.torn_bytes == 0
    assert contents(store) == before
    assert rebuilt.rows == live.rows
    close(store)


@pytest.mark.parametrize("replay_bytes", [1, 700, 6_400])
def test_recovery_saves_its_progress_in_several_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replay_bytes: int
) -> None:
    store = open_store(tmp_path / "data", parts=[Sessions()])
    do_some_of_everything(store)
    before = contents(store)
    close(store)
    delete_index(tmp_path / "data")
    monkeypatch.setattr(recovery, "REPLAY_BYTES", replay_bytes)
    store = open_store(tmp_path / "data", parts=[Sessions()])
    fill(store)
    assert contents(store) == before
    close(store)


def test_after_an_orderly_end_there_is_nothing_to_replay(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    do_some_of_everything(store)
    close(store)
    store = Store(tmp_path / "data", store.options, ManualClock())
    assert store.recover()[:3] == (0, 0, False)
    close(store)


@pytest.mark.parametrize("cut_off", [1, 30, 5_000])
@pytest.mark.parametrize("interrupted", [False, True])
def test_an_index_that_is_ahead_of_the_log_is_rebuilt(tmp_path: Path, cut_off: int, interrupted: bool) -> None:
    store = open_store(tmp_path / "data", segment_bytes=1024 * 1024)
    do_some_of_everything(store)
    end = store.log.end
    close(store)
    (segment,) = (tmp_path / "data" / "commitlog").iterdir()
    os.truncate(segment, end - cut_off)
    (tmp_path / "data" / "synced").unlink()  # without the mark, the store can't know that this was durable
    if interrupted:  # as after a start that was killed once it had extended the file to its capacity again
        os.truncate(segment, 1024 * 1024)
    store = Store(tmp_path / "data", store.options, ManualClock())
    recovery = store.recover()
    assert recovery.rebuilt
    assert end - cut_off - 2000 < store.log.end <= end - cut_off
    fill(store)
    for queue in store.queues:
        assert len(bodies(store, queue)) == queue.committed_offset
    before = contents(store)
    position = publish(store, "plant/1/temp", "new")
    close(store)

    store = Store(tmp_path / "data", store.options, ManualClock())
    assert not store.recover().rebuilt
    root = durable_queue(store, "plant/#")
    assert positions(root)[-1] == position
    assert list(entries(root).values())[:-1] == list(before["plant/#", "latest"][1].values())
    close(store)


def test_a_log_without_its_beginning_is_refused_if_no_index_or_snapshot_covers_it(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    publish(store, "plant/1", "a")
    store.commit()
    store.index.flush()
    crash(store, tmp_path / "left")
    log = tmp_path / "left" / "commitlog"
    shutil.rmtree(log)
    log.mkdir()
    (log / f"{SEGMENT_BYTES:020d}.log").touch()
    (tmp_path / "left" / "synced").unlink()  # it says where the log began
    with pytest.raises(LogCorrupt, match=f"begins at position {SEGMENT_BYTES}, and nothing tells"):
        open_store(tmp_path / "left")


def test_an_index_of_another_format_is_rebuilt(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    do_some_of_everything(store)
    before = contents(store)
    batch = store.index.batch()
    batch.put(b"Mcovered", Struct("<IQQ").pack(77, 0, 0))
    batch.put(KeySpace.QUEUE + b"\0\0\0\1", b"not what this version writes")
    store.index.write(batch)
    store.index.flush()
    crash(store, tmp_path / "left")
    store = open_store(tmp_path / "left")
    fill(store)
    assert contents(store) == before
    close(store)


def test_a_start_completes_the_deletion_of_an_index_that_a_killed_start_began(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    do_some_of_everything(store)
    before = contents(store)
    close(store)
    (tmp_path / "data" / "index").rename(tmp_path / "data" / "index.discarded")
    (tmp_path / "data" / "index.discarded" / "CURRENT").unlink()
    store = open_store(tmp_path / "data")
    fill(store)
    assert contents(store) == before
    close(store)
    Index.destroy(tmp_path / "data")
    assert not list((tmp_path / "data").glob("index*"))


# --- runs -----------------------------------------------------------------------------------------------------------


RUN = st.tuples(
    st.sampled_from(["plant/1", "plant/2", "site/x"]),
    st.integers(0, 2),
    st.integers(0, 40).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1))
    | st.builds(lambda body, count: [body] * count, st.binary(max_size=9), st.integers(1, 70)),
)


@settings(max_examples=8 * DEPTH)
@given(st.lists(st.lists(RUN, max_size=6), max_size=3))
def test_runs_are_stored_like_single_messages(calls: list[list[tuple[str, int, list[bytes]]]]) -> None:
    logs = []
    for in_runs in (True, False):
        with tempfile.TemporaryDirectory() as data_dir:
            store = open_store(Path(data_dir), segment_bytes=MIB)
            store.queues.declare("plant/+", "group:g")
            routes = {topic: store.router.route(topic.encode()) for topic in ("plant/1", "plant/2", "site/x")}
            for number, runs in enumerate(calls):
                if in_runs:
                    assert store.append_runs([(routes[topic], bodies, qos) for topic, qos, bodies in runs], MIB // 4)
                else:
                    for topic, qos, bodies in runs:
                        for body in bodies:
                            store.append_message(store.router.route(topic.encode()), body, b"", qos)
                store.queues.declare("plant/1", f"group:{number}")  # this outdates the routes with the first run
            store.commit()
            logs.append((list(store.log.scan(0)), contents(store), store.messages_stored))
            close(store)
    assert logs[0] == logs[1]


def test_a_run_that_may_not_fit_is_refused_as_a_whole(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data", segment_bytes=MIB, reserve_bytes=GIB)
    route = store.router.route(b"plant/1")
    run = [(route, [b"x" * 1000] * 3, 0)]
    assert store.append_runs(run, 4 * KIB)
    end = store.log.end
    assert not store.append_runs(run, MIB), "the segment has less room left"
    assert not store.append_runs(run, 2 * MIB), "a record may not be as large"
    store.space.probe = lambda: Usage(GIB // 2, 100 * GIB)
    store.space.measure()
    assert not store.append_runs(run, 4 * KIB), "the disk is full"
    assert store.log.end == end
    store.commit()
    assert len(positions(durable_queue(store, "plant/#"))) == 3
    close(store)


def test_runs_allocate_disk_space_as_they_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "data", segment_bytes=64 * MIB)
    run = [(store.router.route(b"plant/1"), [b"x" * 1000] * 1000, 0)]
    for _ in range(3 * ALLOCATE_BYTES // MIB):
        assert store.append_runs(run, 2 * MIB)
        store.commit()
    stored = store.messages_stored

    def allocate(segment: Segment, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "allocate", allocate)
        while store.append_runs(run, 2 * MIB):
            stored += 1000
            assert store.log.end < 5 * ALLOCATE_BYTES
    store.commit()
    store.measure_disk()
    assert store.append_runs(run, 2 * MIB), "the disk has room again, so the store must accept the run"
    store.commit()
    assert len(list(store.log.scan(0))) - 1 == store.messages_stored == stored + 1000
    close(store)


@given(st.integers(0, 1 << 60), st.lists(st.tuples(st.integers(1, 1 << 26), st.integers(1, 40)), max_size=5))
@example(1 << 60, [(1 << 26, 500)])
@example(7, [(60 + number, 1) for number in range(100)])
def test_the_entries_of_consecutive_records_have_adjoining_positions(position: int, runs: list[tuple[int, int]]) -> None:
    entries, end = consecutive_entries(position, [size for size, _ in runs], [count for _, count in runs])
    sizes = [size for size, count in runs for _ in range(count)]
    expected = [(position + sum(sizes[:number]), size, 0) for number, size in enumerate(sizes)]
    assert list(ENTRY.iter_unpack(entries)) == expected
    assert end == position + sum(sizes)


# --- covered and durable --------------------------------------------------------------------------------------------


def test_each_commit_records_in_the_index_how_far_it_covers_the_log(tmp_path: Path) -> None:
    clock = ManualClock()
    store = open_store(tmp_path / "data", clock=clock)
    assert store.index.covered() == Covered(0, 0, 0)
    publish(store, "plant/1")
    store.commit()
    first = store.log.written
    assert store.index.covered() == Covered(first, 0, clock.now_ms())
    crash(store, tmp_path / "left")
    store = open_store(tmp_path / "left", clock=clock)
    assert store.durable_position == first, "recovery has synced what it found"
    assert store.index.covered() == Covered(first, first, clock.now_ms())
    close(store)


async def test_the_durable_position_follows_the_syncs(tmp_path: Path) -> None:
    async with started(open_store(tmp_path / "data")) as store:
        publish(store, "plant/1")
        assert store.durable_position == 0
        await store.durable()
        assert store.durable_position == store.log.written == store.log.end
        assert store.syncs == 1
        publish(store, "plant/1")
        await store.durable()
        covered = store.index.covered()
        assert covered is not None
        assert covered.durable < covered.position == store.log.written
    store = open_store(tmp_path / "data")
    covered = store.index.covered()
    assert covered is not None
    assert covered.durable == covered.position == store.log.end
    close(store)


# --- replication ----------------------------------------------------------------------------------------------------


async def test_with_replication_callbacks_wait_until_somebody_says_what_is_committed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    loop, failures, synced = asyncio.get_running_loop(), list[OSError](), list[int]()
    store.start(loop, failures.append, lambda: synced.append(store.durable_position))
    fired: list[str] = []
    publish(store, "plant/1", "a")
    store.when_durable(lambda: fired.append("a"))
    await until(lambda: synced)
    first = store.durable_position
    assert (fired, store.committed_position, first) == ([], 0, store.log.written)
    publish(store, "plant/1", "b")
    store.when_durable(lambda: fired.append("b"))
    await until(lambda: store.durable_position == store.log.end > first)
    store.commit_to(first - 1)
    assert fired == []
    store.commit_to(first)
    assert (fired, store.is_committed(first), store.is_committed(first + 1)) == (["a"], True, False)
    store.commit_to(first - 1)
    assert store.committed_position == first, "what is committed stays so"
    store.commit_to(store.log.end)
    assert fired == ["a", "b"]
    publish(store, "plant/1", "c")
    store.when_durable(lambda: fired.append("c"))
    await store.close()
    assert (fired, failures) == (["a", "b"], []), "an orderly end commits nothing that others do not have"


def test_the_epochs_of_a_log_survive_a_restart_and_a_rebuilt_index(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    publish(store, "plant/1", "before the first epoch")
    begins = []
    for number in (1, 2, 5):
        begins.append((number, store.append(Kind.EPOCH_BEGUN, EPOCH_FIXED.pack(number, 0xA))))
        publish(store, "plant/1", str(number))
    store.commit()
    assert store.epochs.table == EpochTable(begins)
    close(store)
    store = open_store(tmp_path / "data")
    assert store.epochs.table == EpochTable(begins)
    close(store)
    Index.destroy(tmp_path / "data")
    store = open_store(tmp_path / "data")
    assert store.epochs.table == EpochTable(begins)
    close(store)


def test_a_log_remembers_its_last_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logepochs, "EPOCHS_REMEMBERED", 3)
    store = open_store(tmp_path / "data")
    begins = [(number, store.append(Kind.EPOCH_BEGUN, EPOCH_FIXED.pack(number, 0xA))) for number in range(1, 6)]
    store.commit()
    assert store.epochs.table == EpochTable(begins[-3:])
    close(store)


# --- when_durable ---------------------------------------------------------------------------------------------------


async def test_callbacks_fire_in_order_and_only_after_the_sync_of_their_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "data")
    gate = Gate(store, monkeypatch)
    fired: list[tuple[str, int]] = []
    async with started(store):
        publish(store, "plant/1", "a")
        store.when_durable(lambda: fired.append(("a1", gate.ended)))
        publish(store, "plant/1", "b")
        store.when_durable(lambda: fired.append(("b1", gate.ended)))
        store.when_durable(lambda: fired.append(("b2", gate.ended)))
        await gate.begun()
        root = durable_queue(store, "plant/#")
        assert bodies(store, root) == ["a", "b"], "a written message can be read before it is durable"
        publish(store, "plant/1", "c")
        store.when_durable(lambda: fired.append(("c1", gate.ended)))
        await until(lambda: store.log.written == store.log.end)
        publish(store, "plant/1", "d")
        store.when_durable(lambda: fired.append(("d1", gate.ended)))
        await until(lambda: store.log.written == store.log.end)
        assert fired == []
        gate.open()
        await gate.begun()
        assert fired == [("a1", 1), ("b1", 1), ("b2", 1)]
        gate.open()
        await until(lambda: len(fired) == 5)
        assert fired[3:] == [("c1", 2), ("d1", 2)], "all that arrives during a sync makes one group"
        assert store.syncs == 2
        gate.open(9)


async def test_the_next_sync_runs_while_callbacks_of_the_last_one_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "data")
    gate = Gate(store, monkeypatch)
    begun: list[bool] = []
    async with started(store):
        publish(store, "plant/1", "a")
        store.when_durable(lambda: begun.append(gate.has_begun(within_s=WAIT_S_MAX)))
        await gate.begun()
        publish(store, "plant/1", "b")
        store.when_durable(lambda: begun.append(gate.has_begun(within_s=0)))
        await until(lambda: store.log.written == store.log.end)
        gate.open(9)
        await until(lambda: len(begun) == 2)
    assert begun == [True, False]


async def test_a_sync_runs_while_the_index_is_written_and_callbacks_wait_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "data")
    gate = Gate(store, monkeypatch)
    seen: list[bool | str] = []
    write = store.index.write

    def written(batch: Batch) -> None:
        if not seen:
            seen.append(gate.has_begun(within_s=WAIT_S_MAX))
            gate.open(9)
        write(batch)
        seen.append("written")

    async with started(store):
        with monkeypatch.context() as patch:
            patch.setattr(store.index, "write", written)
            publish(store, "plant/1", "a")
            store.when_durable(lambda: seen.append("told"))
            await until(lambda: "told" in seen)
    assert seen[:2] == [True, "written"]


async def test_a_callback_is_called_even_if_everything_is_durable_already(tmp_path: Path) -> None:
    async with started(open_store(tmp_path / "data")) as store:
        await store.durable()
        assert store.syncs == 0
        publish(store, "plant/1")
        await store.durable()
        await store.durable()
        assert store.syncs == 1


async def test_a_callback_registered_in_a_callback_is_called_after_those_registered_before(tmp_path: Path) -> None:
    async with started(open_store(tmp_path / "data")) as store:
        fired: list[str] = []

        def again() -> None:
            fired.append("a")
            store.when_durable(lambda: fired.append("again"))
            assert fired == ["a"], "a callback must not run inside another one"

        publish(store, "plant/1")
        store.when_durable(again)
        store.when_durable(lambda: fired.append("b"))
        await until(lambda: len(fired) == 3)
        assert fired == ["a", "b", "again"]
        assert store.syncs == 1


async def test_a_callback_may_append_and_wait_again(tmp_path: Path) -> None:
    async with started(open_store(tmp_path / "data")) as store:
        done = asyncio.Event()

        def again(left: int) -> None:
            if not left:
                done.set()
                return
            publish(store, "plant/1", str(left))
            store.when_durable(lambda: again(left - 1))

        again(5)
        async with asyncio.timeout(WAIT_S_MAX):
            await done.wait()
        root = durable_queue(store, "plant/#")
        assert bodies(store, root) == ["5", "4", "3", "2", "1"]


def _unexpected(error: OSError) -> None:
    raise error


async def test_callbacks_that_append_and_wait_again_share_one_sync_per_round(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    rounds = [0] * 10

    def answered(who: int) -> None:
        rounds[who] += 1
        if rounds[who] < 20:
            publish(store, "plant/1", str(who))
            store.when_durable(lambda: answered(who))

    async with started(store):
        for who in range(len(rounds)):
            publish(store, "plant/1", str(who))
            store.when_durable(lambda who=who: answered(who))  # type: ignore[misc]
        await until(lambda: rounds == [20] * 10)
        assert store.syncs <= 22, "the store must not sync before the awaited messages are written"


async def test_a_callback_that_raises_does_not_hold_up_others(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    loop = asyncio.get_running_loop()
    store.start(loop, _unexpected)
    raised: list[object] = []
    loop.set_exception_handler(lambda _, context: raised.append(context.get("exception")))
    error = RuntimeError("a defect in a callback")

    def defective() -> None:
        raise error

    publish(store, "plant/1")
    store.when_durable(defective)
    store.when_durable(defective)
    async with asyncio.timeout(WAIT_S_MAX):
        await store.durable()
    assert raised
    assert all(each is error for each in raised)
    await store.close()


async def test_a_cancelled_waiter_does_not_affect_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "data")
    gate = Gate(store, monkeypatch)
    async with started(store):
        publish(store, "plant/1")
        cancelled, patient = asyncio.create_task(store.durable()), asyncio.create_task(store.durable())
        await gate.begun()
        cancelled.cancel()
        gate.open(9)
        await patient
        assert cancelled.cancelled()


async def test_housekeeping_between_an_append_and_its_commit_delays_no_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "INTERVAL_S", 3_600.0)  # it runs only when the test calls it
    async with started(open_store(tmp_path / "data")) as store:
        publish(store, "plant/1", "qos 0")
        await until(lambda: store.log.written == store.log.end)
        publish(store, "plant/1", "qos 1")
        answered = asyncio.Event()
        store.when_durable(answered.set)
        assert store._housekeeping is not None
        store._housekeeping.turn()
        async with asyncio.timeout(WAIT_S_MAX):
            await answered.wait()


async def test_messages_that_nobody_waits_for_become_durable_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "INTERVAL_S", 0.005)
    async with started(open_store(tmp_path / "data")) as store:
        publish(store, "plant/1")
        await until(lambda: store.durable_position == store.log.end > 0)


async def test_a_turn_of_the_loop_makes_one_write_and_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(open_store(tmp_path / "data")) as store:
        writes: list[int] = []
        pwrite = os.pwrite

        def counted(fd: int, data: bytes, offset: int) -> int:
            writes.append(len(data))
            return pwrite(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", counted)
        for number in range(ROW_ENTRIES):
            publish(store, "plant/1", str(number))
        await store.durable()
        assert writes == [store.log.end]
        root = durable_queue(store, "plant/#")
        assert len(list(store.index.rows(KeySpace.ENTRIES + root.id.to_bytes(4, "big")))) == 1


async def test_early_commits_leave_one_call_for_the_next_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a call for each, what the callbacks of one sync append would be committed in the same turn, again and again."""
    async with started(open_store(tmp_path / "data")) as store:
        calls: list[int] = []
        end_turn = Store.end_turn

        def counted(store: Store) -> None:
            calls.append(store.log.end)
            end_turn(store)

        monkeypatch.setattr(Store, "end_turn", counted)
        for number in range(5):
            publish(store, "plant/1", str(number))
            store.commit()
        publish(store, "plant/1", "5")
        end = store.log.end
        await store.durable()
        assert calls == [end]


async def test_what_is_appended_before_a_commit_is_written_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(open_store(tmp_path / "data")) as store:
        waiting: list[str] = []

        def append_waiting() -> None:
            while waiting:
                publish(store, "plant/1", waiting.pop())

        store.before_commit = append_waiting
        writes: list[int] = []
        write = store.log.write

        def counted() -> None:
            writes.append(store.log.end - store.log.written)
            write()

        monkeypatch.setattr(store.log, "write", counted)
        publish(store, "plant/1", "first")
        waiting.append("second")
        await store.durable()
        await asyncio.sleep(0)
        assert [size for size in writes if size] == [store.log.end]
        assert bodies(store, durable_queue(store, "plant/#")) == ["first", "second"]


async def test_an_error_of_what_is_appended_before_a_commit_ends_the_store(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    failures: list[OSError] = []
    store.start(asyncio.get_running_loop(), failures.append)

    def fail() -> None:
        raise OSError(errno.EIO, "the segment can't be synced")

    store.before_commit = fail
    publish(store, "plant/1", "a")
    await until(lambda: failures != [])
    assert failures[0].errno == errno.EIO
    await store.close()


async def test_with_async_flush_callbacks_do_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "data", flush="async")
    gate = Gate(store, monkeypatch)
    written: list[int] = []
    async with started(store):
        position = publish(store, "plant/1", "a")
        store.when_durable(lambda: written.append(store.log.written))
        assert written == []
        await store.durable()
        assert written == [store.log.end]
        assert store.log.record(position).body == b"a"
        assert (store.durable_position, gate.ended) == (0, 0)
        gate.open(9)


# --- failures -------------------------------------------------------------------------------------------------------


async def test_after_a_failed_sync_no_callback_is_called_and_the_sync_is_not_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "data")
    failures: list[OSError] = []
    fired: list[str] = []
    async with started(store, failures):
        publish(store, "plant/1", "before")
        await store.durable()
        tried: list[int] = []

        def broken(fd: int) -> None:
            tried.append(fd)
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fdatasync", broken)
        publish(store, "plant/1", "a")
        store.when_durable(lambda: fired.append("a"))
        await until(lambda: failures)
        publish(store, "plant/1", "b")
        store.when_durable(lambda: fired.append("b"))
        assert store._housekeeping is not None
        store._housekeeping.turn()
        for _ in range(3):
            await asyncio.sleep(0)
        await store.close()
    assert [failure.errno for failure in failures] == [errno.EIO]
    assert len(tried) == 1
    assert fired == []


async def test_after_a_failed_last_sync_no_callback_is_called_even_if_another_sync_would_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "data")
    failures: list[OSError] = []
    fired: list[str] = []
    sync, results = store.log.sync, [OSError(errno.EIO, "Input/output error")]

    def broken_once() -> None:
        if results:
            raise results.pop()
        sync()

    async with started(store, failures):
        monkeypatch.setattr(store.log, "sync", broken_once)
        publish(store, "plant/1", "a")
        store.when_durable(lambda: fired.append("a"))
        with pytest.raises(OSError, match="Input/output"):
            await store.close()
        assert [failure.errno for failure in failures] == [errno.EIO]
    assert fired == []


async def test_a_close_whose_sync_fails_tells_the_next_start_so(tmp_path: Path) -> None:
    files = LosingFiles()
    store = open_store(tmp_path / "data", files=files)
    failures: list[OSError] = []
    async with started(store, failures):
        publish(store, "plant/1", "durable")
        await store.durable()
        durable = store.durable_position
        publish(store, "plant/1", "lost")
        files.fails = True
        with pytest.raises(OSError, match="Input/output"):
            await store.close()
        mark = SyncMark(tmp_path / "data").read()
        assert [failure.errno for failure in failures] == [errno.EIO]
        assert mark is not None
        assert (mark.ending, mark.position) == (Ending.FAILED, durable)


@pytest.mark.parametrize("flush", ["sync", "async"])
async def test_after_a_failed_write_nothing_is_committed_and_no_callback_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str
) -> None:
    store = open_store(tmp_path / "data", flush=flush)
    failures: list[OSError] = []
    fired: list[str] = []

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with started(store, failures):
        publish(store, "plant/1", "before")
        await store.durable()
        end = store.log.end
        monkeypatch.setattr(os, "pwrite", full)
        publish(store, "plant/1", "a")
        store.when_durable(lambda: fired.append("a"))
        await until(lambda: failures)
        monkeypatch.undo()
        publish(store, "plant/1", "b")  # at a position that the log will never reach
        store.when_durable(lambda: fired.append("b"))
        for _ in range(5):
            await asyncio.sleep(0)
        root = durable_queue(store, "plant/#")
        assert store.log.written == end
        await store.close()
    assert [failure.errno for failure in failures] == [errno.ENOSPC]
    assert fired == []
    store = open_store(tmp_path / "data")
    root = durable_queue(store, "plant/#")
    assert bodies(store, root) == ["before"]
    close(store)


async def test_an_index_that_cannot_be_written_ends_the_store(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    failures: list[OSError] = []
    async with started(store, failures):
        publish(store, "plant/1", "a")
        await store.durable()
        delete_index(tmp_path / "data")
        with pytest.raises(Exception, match="No such file"):
            store.index.flush()
        publish(store, "plant/1", "b")
        await until(lambda: failures)
        assert "can't be written" in str(failures[0])
        await store.close()
    store = open_store(tmp_path / "data")
    root = durable_queue(store, "plant/#")
    assert bodies(store, root) == ["a", "b"], "the log has both messages, so recovery finds them"
    close(store)


def test_without_a_loop_a_failed_commit_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "data")

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    publish(store, "plant/1")
    with pytest.raises(OSError, match="No space"):
        store.commit()
    monkeypatch.undo()
    store.retention.close()
    store.index.close()
    store.log.close()


def test_a_message_that_is_too_large_is_refused_and_the_store_continues(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    publish(store, "plant/1", "a")
    with pytest.raises(RecordTooLarge):
        publish(store, "plant/1", "x" * SEGMENT_BYTES)
    publish(store, "plant/1", "b")
    store.commit()
    root = durable_queue(store, "plant/#")
    assert bodies(store, root) == ["a", "b"]
    assert store.messages_stored == 2
    close(store)


# --- the end --------------------------------------------------------------------------------------------------------


async def test_close_calls_the_callbacks_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "data")
    gate = Gate(store, monkeypatch)
    fired: list[str] = []
    async with started(store):
        publish(store, "plant/1", "a")
        store.when_durable(lambda: fired.append("a"))
        await gate.begun()
        publish(store, "plant/1", "b")
        store.when_durable(lambda: fired.append("b"))
        gate.open(9)
        await store.close()
        assert fired == ["a", "b"]
    store = Store(tmp_path / "data", store.options, ManualClock())
    assert store.recover()[:3] == (0, 0, False)
    root = durable_queue(store, "plant/#")
    assert bodies(store, root) == ["a", "b"]
    close(store)


async def test_close_in_the_turn_of_an_append_saves_the_message_and_leaves_nothing_running(tmp_path: Path) -> None:
    async with started(open_store(tmp_path / "data")) as store:
        publish(store, "plant/1", "a")
        store.queues.declare("plant/+", "group:a", "earliest")
        await store.close()
    store = open_store(tmp_path / "data")
    fill(store)
    queue = durable_queue(store, "plant/+", "earliest")
    assert bodies(store, queue) == ["a"]
    close(store)


async def test_a_message_that_a_callback_appends_during_close_is_stored_once(tmp_path: Path) -> None:
    async with started(open_store(tmp_path / "data")) as store:

        def answer() -> None:
            publish(store, "plant/1", "b")

        publish(store, "plant/1", "a")
        store.when_durable(answer)
        await store.close()
    store = open_store(tmp_path / "data")
    root = durable_queue(store, "plant/#")
    assert bodies(store, root) == ["a", "b"]
    close(store)


# --- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "crash", "delete the index"])
def test_the_store_time_never_decreases_even_if_the_clock_does(tmp_path: Path, how: str) -> None:
    clock = ManualClock()
    store = open_store(tmp_path / "data", clock=clock)
    first_ms = clock.now_ms()
    for step in (0, 10, -5_000, 1, 6_000, -1):
        clock.advance(step)
        publish(store, "plant/1")
        store.commit()
    last_ms = store.now_ms()
    assert last_ms == first_ms + 1_011
    clock.advance(-60_000)
    if how == "crash":
        crash(store, tmp_path / "left")
    else:
        close(store)
    data_dir = tmp_path / ("left" if how == "crash" else "data")
    if how == "delete the index":
        delete_index(data_dir)
    store = open_store(data_dir, clock=clock)
    assert store.now_ms() == last_ms
    publish(store, "plant/1")
    store.commit()
    times = [found.store_ms for found in store.log.scan(0)]
    assert times == sorted(times)
    assert times[-1] == last_ms
    close(store)


def test_all_records_of_a_turn_have_the_same_time(tmp_path: Path) -> None:
    clock = ManualClock()
    store = open_store(tmp_path / "data", clock=clock)
    now_ms = clock.now_ms()
    publish(store, "plant/1")
    clock.advance(50)
    publish(store, "plant/1")
    assert store.now_ms() == now_ms
    store.commit()
    assert store.now_ms() == now_ms + 50
    assert {found.store_ms for found in store.log.scan(0)} == {now_ms}
    close(store)


# --- housekeeping ---------------------------------------------------------------------------------------------------


async def test_the_index_is_flushed_from_time_to_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "INTERVAL_S", 0.005)
    store = open_store(tmp_path / "data", index_flush_ms=1)
    flushed = threading.Event()
    flush = store.index.flush

    def noted() -> None:
        flush()
        flushed.set()

    monkeypatch.setattr(store.index, "flush", noted)
    async with started(store):
        publish(store, "plant/1", "a")
        await until(flushed.is_set)
        shutil.copytree(tmp_path / "data", tmp_path / "left")
    store = Store(tmp_path / "left", store.options, ManualClock())
    assert store.recover().replayed == 0
    root = durable_queue(store, "plant/#")
    assert bodies(store, root) == ["a"]
    close(store)


async def test_a_new_queue_is_backfilled_between_other_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfill_module, "SLICE_BYTES", 10_000)
    async with started(open_store(tmp_path / "data", segment_bytes=1024 * 1024)) as store:
        for number in range(5_000):
            publish(store, f"plant/{number % 2}", str(number))
        queue = store.queues.declare("plant/1", "group:a", "earliest")
        number, turns = 5_000, 0
        while queue.committed_offset < number // 2:
            assert turns < 1_000, "the backfill does not end"
            for _ in range(500 if turns < 20 else 0):  # more than one slice of the backfill handles
                publish(store, f"plant/{number % 2}", str(number))
                number += 1
            await asyncio.sleep(0)
            turns += 1
        assert turns > 2
        assert bodies(store, queue) == [str(each) for each in range(1, number, 2)]


async def test_a_failed_write_ends_a_backfill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfill_module, "SLICE_BYTES", 1_000)
    store = open_store(tmp_path / "data", segment_bytes=1024 * 1024)
    failures: list[OSError] = []

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with started(store, failures):
        for number in range(1_000):
            publish(store, "plant/1", str(number))
        queue = store.queues.declare("plant/1", "group:a", "earliest")
        await until(lambda: queue.committed_offset)
        monkeypatch.setattr(os, "pwrite", full)
        publish(store, "plant/1", "lost")
        await until(lambda: failures)
        filled = queue.committed_offset
        for _ in range(5):
            await asyncio.sleep(0)
        assert queue.committed_offset == filled < 1_000


def test_records_of_unknown_kinds_are_skipped(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    data = encode(200, b"of a later version", b"?", store_ms=store.clock.now_ms())
    store.log.add(data[:8], data[8:], len(data))
    publish(store, "plant/1", "a")
    store.commit()
    crash(store, tmp_path / "left")
    store = open_store(tmp_path / "left")
    root = durable_queue(store, "plant/#")
    assert bodies(store, root) == ["a"]
    close(store)
