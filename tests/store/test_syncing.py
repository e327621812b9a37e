"""Syncs in a process or on a thread: callbacks wait until the disk has the data, and a failed sync is final."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from penstock.store.log.groupcommit import ASKED_MAX
from penstock.store.log.syncing import SyncProcess
from penstock.store.options import KIB
from penstock.store.queues.lightqueue import ENTRY
from penstock.store.store import Store
from tests.store.wiring import bodies, close, durable_queue, open_store, publish
from tests.waiting import WAIT_S_MAX, until

SCRIPT = """
import asyncio, sys
from pathlib import Path
from penstock.store.clock import SystemClock
from penstock.store.options import StoreOptions
from penstock.store.store import Store

async def main():
    store = Store(Path(sys.argv[1]), StoreOptions(segment_bytes=65536), SystemClock())
    store.recover()
    store.start(asyncio.get_running_loop(), lambda error: None)
    store.append_message(store.router.route(b"plant/1"), b"x")
    await store.durable()
    print(store._group._sync.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""

both = pytest.mark.parametrize("sync_in", ["process", "thread"])


@asynccontextmanager
async def started(data_dir: Path, sync_in: str = "process") -> AsyncIterator[tuple[Store, list[OSError]]]:
    """Run a store on the loop; yield the store and the list of failures that it reports."""
    store, failures = open_store(data_dir, sync_in=sync_in, segment_bytes=64 * KIB), list[OSError]()
    store.start(asyncio.get_running_loop(), failures.append)
    try:
        yield store, failures
    finally:
        if not store._closed:
            await store.close()


def process_of(store: Store) -> SyncProcess:
    assert store._group is not None
    assert isinstance(store._group._sync, SyncProcess)
    return store._group._sync


@contextmanager
def held_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Let no sync end until the yielded function is called."""
    assert store._group is not None
    if isinstance(store._group._sync, SyncProcess):
        pid = store._group._sync.pid
        os.kill(pid, signal.SIGSTOP)
        yield lambda: os.kill(pid, signal.SIGCONT)
        return
    allowed, sync = threading.Event(), store.log.sync

    def held() -> None:
        assert allowed.wait(WAIT_S_MAX)
        sync()

    with monkeypatch.context() as patch:
        patch.setattr(store.log, "sync", held)
        yield allowed.set


async def turns() -> None:
    """Let the loop run for so many turns that it would have called a callback that is due."""
    for _ in range(20):
        await asyncio.sleep(0)


async def stop(pid: int) -> None:
    """Stop a process, and wait until it is."""
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: state_of(pid) == "T")


def state_of(pid: int) -> str:
    """Return the state of a process as in `ps`, or "gone" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


@both
async def test_callbacks_are_called_in_order_once_the_disk_has_their_records_over_many_segments(
    tmp_path: Path, sync_in: str
) -> None:
    async with started(tmp_path, sync_in) as (store, failures):
        told: list[int] = []
        for number in range(400):
            publish(store, "plant/1", f"{number}" + "." * 1000)
            store.when_durable(lambda number=number: told.append(number))  # type: ignore[misc]
            if number % 7 == 0:
                await asyncio.sleep(0)
        await until(lambda: len(told) == 400)
        assert told == list(range(400))
        assert len(store.log.segments()) > 3
        assert store.durable_position == store.log.written
        assert store.syncs > 1
        assert failures == []
    store = open_store(tmp_path, segment_bytes=64 * KIB)
    assert [int(body.rstrip(".")) for body in bodies(store, durable_queue(store, "plant/#"))] == list(range(400))
    close(store)


async def test_no_callback_is_called_while_the_sync_process_is_stopped(tmp_path: Path) -> None:
    async with started(tmp_path) as (store, failures):
        publish(store, "plant/1", "first")
        await store.durable()
        pid = process_of(store).pid
        await stop(pid)
        told: list[str] = []
        publish(store, "plant/1", "second")
        store.when_durable(lambda: told.append("second"))
        await turns()
        assert told == []
        assert store.durable_position < store.log.written
        os.kill(pid, signal.SIGCONT)
        await until(lambda: told == ["second"])
        assert failures == []


@both
async def test_the_end_of_a_turn_notices_a_finished_sync_and_calls_each_callback_once(tmp_path: Path, sync_in: str) -> None:
    async with started(tmp_path, sync_in) as (store, failures):
        told: list[int] = []
        for number in range(20):
            publish(store, "plant/1", f"{number}")
            store.when_durable(lambda number=number: told.append(number))  # type: ignore[misc]
            store.end_turn()
            until_s = time.monotonic() + WAIT_S_MAX
            while len(told) <= number and time.monotonic() < until_s:  # the loop is blocked meanwhile
                time.sleep(0.0005)  # noqa: ASYNC251 - that it does nothing is what this is about
                store.end_turn()
            assert told == list(range(number + 1))
            if number % 3 == 0:
                await asyncio.sleep(0.001)  # now the loop runs
        assert store.syncs == 20
        assert failures == []


async def test_a_sync_process_that_is_killed_while_nobody_waits_ends_the_store(tmp_path: Path) -> None:
    async with started(tmp_path) as (store, failures):
        publish(store, "plant/1", "first")
        await store.durable()
        os.kill(process_of(store).pid, signal.SIGKILL)
        await until(lambda: failures)
        assert "has ended" in str(failures[0])


async def test_a_sync_process_that_is_killed_ends_the_store_and_no_further_callback_is_called(tmp_path: Path) -> None:
    async with started(tmp_path) as (store, failures):
        publish(store, "plant/1", "first")
        await store.durable()
        told: list[str] = []
        os.kill(process_of(store).pid, signal.SIGKILL)
        publish(store, "plant/1", "second")
        store.when_durable(lambda: told.append("second"))
        await until(lambda: failures)
        assert "the process that syncs the log has ended" in str(failures[0])
        with pytest.raises(OSError, match="has ended"):
            store.log.sync()
        publish(store, "plant/1", "third")
        store.when_durable(lambda: told.append("third"))
        await turns()
        assert told == []
        assert len(failures) == 1


async def test_a_disk_error_in_the_sync_process_is_reported_with_its_errno_and_is_final(tmp_path: Path) -> None:
    async with started(tmp_path) as (store, failures):
        told: list[str] = []
        publish(store, "plant/1", "first")
        store.commit()
        reading, writing = os.pipe()  # a pipe can't be synced: EINVAL
        kept = os.dup(store.log.open_segment.sync_file.fileno())
        os.dup2(writing, store.log.open_segment.sync_file.fileno())
        store.when_durable(lambda: told.append("first"))
        await until(lambda: failures)
        os.dup2(kept, store.log.open_segment.sync_file.fileno())
        assert [failure.errno for failure in failures] == [errno.EINVAL]
        for descriptor in (reading, writing, kept):
            os.close(descriptor)
        publish(store, "plant/1", "after")
        store.when_durable(lambda: told.append("after"))
        await turns()
        assert told == []
        assert len(failures) == 1


async def test_closing_the_store_raises_the_error_of_the_sync_under_way(tmp_path: Path) -> None:
    async with started(tmp_path) as (store, failures):
        publish(store, "plant/1", "first")
        await store.durable()
        sync = process_of(store)
        await stop(sync.pid)
        publish(store, "plant/1", "second")
        store.when_durable(lambda: None)
        store.commit()
        os.kill(sync.pid, signal.SIGKILL)
        with pytest.raises(OSError, match="has ended"):
            await store.close()
        await until(lambda: failures)
        assert state_of(sync.pid) == "gone"


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_the_sync_process_ignores_signals_that_ask_it_to_end_and_ends_with_the_node(
    tmp_path: Path, asked: signal.Signals
) -> None:
    async with started(tmp_path) as (store, failures):
        publish(store, "plant/1", "first")
        await store.durable()  # the process has started
        os.kill(process_of(store).pid, asked)
        publish(store, "plant/1", "second")
        await store.durable()
        assert failures == []
        pid = process_of(store).pid
    assert state_of(pid) == "gone"


async def test_the_sync_process_inherits_no_descriptor_except_the_segment(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w"):
        async with started(tmp_path / "data") as (store, _):
            publish(store, "plant/1", "first")
            await store.durable()
            of_process = f"/proc/{process_of(store).pid}/fd"
            opened = [os.readlink(f"{of_process}/{number}") for number in os.listdir(of_process) if int(number) > 2]
            assert sorted(name.partition(":")[0] for name in opened if not name.startswith("/")) == ["socket"]
            assert [name for name in opened if name.startswith("/")] == [str(store.log.open_segment.path)]


def test_the_sync_process_ends_when_the_node_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    node = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    assert node.stdout is not None
    pid = int(node.stdout.readline())
    assert state_of(pid) in "SR"
    node.kill()
    node.wait()
    node.stdout.close()
    asyncio.run(until(lambda: state_of(pid) in ("gone", "Z")))
    store = open_store(tmp_path, segment_bytes=64 * KIB)
    assert bodies(store, durable_queue(store, "plant/#")) == ["x"]
    close(store)


async def test_the_error_says_what_to_do_if_no_sync_process_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    store = open_store(tmp_path / "data", sync_in="process")
    with pytest.raises(OSError, match=r"let the machine run more processes"):
        store.start(asyncio.get_running_loop(), lambda error: None)
    close(store)


@both
async def test_one_sync_makes_all_requests_of_the_time_of_the_previous_sync_durable(
    tmp_path: Path, sync_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tmp_path, sync_in) as (store, failures):
        publish(store, "plant/1", "first")
        await store.durable()
        before = store.syncs
        told: list[int] = []
        with held_back(store, monkeypatch) as go_on:
            for number in range(ASKED_MAX + 20):
                publish(store, "plant/1", f"{number}")
                store.when_durable(lambda number=number: told.append(number))  # type: ignore[misc]
                store.end_turn()
            await turns()
            assert told == []
            go_on()
            await until(lambda: len(told) == ASKED_MAX + 20)
        assert told == list(range(ASKED_MAX + 20))
        assert store.syncs <= before + 3, "the first sync, one for the requests during it, and one for the rest"
        assert store.durable_position == store.log.written
        assert failures == []


async def test_writes_wait_for_the_next_answer_while_the_sync_process_accepts_no_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tmp_path) as (store, failures):
        publish(store, "plant/1", "first")
        await store.durable()
        sync, told = process_of(store), list[int]()
        with held_back(store, monkeypatch) as go_on:
            sync._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the system raises this to a few KiB
            for number in range(ASKED_MAX):
                publish(store, "plant/1", f"{number}")
                store.when_durable(lambda number=number: told.append(number))  # type: ignore[misc]
                store.end_turn()
            assert 0 < sync._asked < ASKED_MAX
            go_on()
            await until(lambda: len(told) == ASKED_MAX)
        assert told == list(range(ASKED_MAX))
        assert sync._asked == 0
        assert failures == []


async def test_no_sync_succeeds_after_a_failed_one(tmp_path: Path) -> None:
    async with started(tmp_path) as (store, failures):
        publish(store, "plant/1", "first")
        await store.durable()
        sync, told = process_of(store), list[int]()
        await stop(sync.pid)
        reading, writing = os.pipe()  # a pipe can't be synced: EINVAL
        kept = os.dup(store.log.open_segment.sync_file.fileno())
        for number in range(3):
            publish(store, "plant/1", f"{number}")
            store.when_durable(lambda number=number: told.append(number))  # type: ignore[misc]
            store.end_turn()
        os.dup2(writing, store.log.open_segment.sync_file.fileno())
        sync._segment = None  # The next request passes the segment's descriptor, now the pipe, to the process.
        sync.begin()
        os.dup2(kept, store.log.open_segment.sync_file.fileno())
        sync.begin()  # this sync would succeed
        os.kill(sync.pid, signal.SIGCONT)
        await until(lambda: failures)
        assert [failure.errno for failure in failures] == [errno.EINVAL]
        await turns()
        store.end_turn()
        assert told == []
        await until(lambda: state_of(sync.pid) in ("Z", "gone"))
        for descriptor in (reading, writing, kept):
            os.close(descriptor)


@both
async def test_messages_that_callbacks_append_at_the_end_of_a_turn_are_committed_with_it(tmp_path: Path, sync_in: str) -> None:
    async with started(tmp_path, sync_in) as (store, failures):
        answers: list[int] = []

        def answer() -> None:
            answers.append(publish(store, "plant/1", "answer"))

        until_s = time.monotonic() + WAIT_S_MAX
        while len(answers) < 20 and time.monotonic() < until_s:  # the loop is blocked meanwhile
            publish(store, "plant/1", "asked")
            store.when_durable(answer)
            store.end_turn()
            covered = store.index.covered()
            assert covered is not None
            assert covered.position == store.log.written, "the index must cover all that is written"
            found = durable_queue(store, "plant/#").read(0, 10_000)
            assert [position for position, _, _ in ENTRY.iter_unpack(found) if position >= covered.position] == []
            time.sleep(0.0005)  # noqa: ASYNC251
        assert len(answers) >= 20
        assert failures == []
