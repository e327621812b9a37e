"""The broker for taskiq: taskiq's own behaviour on a real node, and no attempt lost of a task that has not begun."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from taskiq import (
    Context,
    InMemoryBroker,
    SimpleRetryMiddleware,
    SmartRetryMiddleware,
    TaskiqDepends,
    TaskiqEvents,
    TaskiqState,
)
from taskiq.acks import AcknowledgeType
from taskiq.exceptions import SendTaskError
from taskiq.kicker import AsyncKicker
from taskiq.receiver import Receiver

from penstock import Client, Message, group_settings
from penstock.contrib.taskiq import PenstockSchedules, PenstockTasks
from penstock.pop.errors import ClientClosed, InvalidHandle
from penstock.worker import runningconsumer
from tests.pop.looptime import LoopTime
from tests.pop.wiring import Node
from tests.system.processes import ROOT, NodeProcess
from tests.waiting import PROCESS_S, WAIT_S_MAX, until

TASKS = "tasks"


def broker_of(target: str, **options: Any) -> PenstockTasks:
    """Return a broker that keeps results in memory, as taskiq's own tests do."""
    return PenstockTasks(target, **options).with_result_backend(InMemoryBroker().result_backend)


@pytest.fixture
async def broker(node: Node) -> AsyncIterator[PenstockTasks]:
    made = broker_of(node.target, settings=group_settings(backoff=()))
    yield made
    await made.shutdown()


@asynccontextmanager
async def working(broker: PenstockTasks, **options: Any) -> AsyncIterator[asyncio.Event]:
    """Run a receiver of taskiq, as its worker does. It stops at the end, or when the event is set."""
    broker.is_worker_process = True
    finish = asyncio.Event()
    with ThreadPoolExecutor(4) as executor:
        options = {"max_async_tasks": 4, **options}
        receiver = Receiver(broker, executor, run_startup=True, **options)
        listening = asyncio.create_task(receiver.listen(finish))
        try:
            await until(lambda: broker._client is not None or listening.done())
            yield finish
        finally:
            finish.set()
            await asyncio.wait_for(listening, WAIT_S_MAX)


async def test_a_task_runs_and_its_result_comes_back(node: Node, broker: PenstockTasks) -> None:
    @broker.task
    async def twice(number: int) -> int:
        return number * 2

    @broker.task
    def plain(number: int) -> int:
        return number + 1

    async with working(broker):
        first, second = await twice.kiq(21), await plain.kiq(1)
        assert (await first.wait_result(timeout=WAIT_S_MAX)).return_value == 42
        assert (await second.wait_result(timeout=WAIT_S_MAX)).return_value == 2
        await until(lambda: node.core.counters.acked == 2)


async def test_hooks_run_at_startup_and_shutdown(node: Node) -> None:
    broker = broker_of(node.target)
    seen: list[str] = []

    @broker.on_event(TaskiqEvents.WORKER_STARTUP)
    def start(_: TaskiqState) -> None:
        seen.append("start")

    @broker.on_event(TaskiqEvents.WORKER_SHUTDOWN)
    async def end(_: TaskiqState) -> None:
        seen.append("end")

    @broker.on_event(TaskiqEvents.CLIENT_STARTUP)
    def never(_: TaskiqState) -> None:
        seen.append("never")

    with pytest.raises(ClientClosed, match="has not started"):
        _ = broker.client
    async with working(broker):
        pass
    await broker.shutdown()
    await broker.shutdown()
    assert seen == ["start", "end", "end"]


async def test_a_delayed_task_comes_at_its_time(node: Node, broker: PenstockTasks) -> None:
    ran: list[int] = []

    @broker.task
    async def note(number: int) -> None:
        ran.append(number)

    async with working(broker):
        await note.kicker().with_labels(delay=3_600).kiq(1)
        await note.kiq(2)
        await until(lambda: node.core.counters.acked == 1)
        node.advance(3_590_000)
        await note.kiq(3)
        await until(lambda: node.core.counters.acked == 2)
        assert ran == [2, 3]
        node.advance(20_000)
        await until(lambda: ran == [2, 3, 1])
        with pytest.raises(SendTaskError) as raised:
            await note.kicker().with_labels(delay="soon").kiq(4)
        assert "use a number of seconds" in str(raised.value.__cause__)


async def test_the_node_keeps_schedules_that_have_a_time(node: Node, broker: PenstockTasks) -> None:
    ran: list[int] = []
    schedules = PenstockSchedules(broker)

    @broker.task
    async def note(number: int) -> None:
        ran.append(number)

    def now() -> datetime:
        return datetime.fromtimestamp(node.store.now_ms() / 1000, UTC)

    async with working(broker):
        await note.schedule_by_time(schedules, now() + timedelta(hours=2), 2)
        cancelled = await note.schedule_by_time(schedules, now() + timedelta(hours=1), 1)
        await cancelled.unschedule()
        await cancelled.unschedule()
        with pytest.raises(ValueError, match="takes a time only"):
            await note.schedule_by_cron(schedules, "* * * * *", 3)
        with pytest.raises(ValueError, match="no time zone"):
            await note.schedule_by_time(schedules, datetime(2100, 1, 1), 3)
        with pytest.raises(InvalidHandle):
            await schedules.delete_schedule("nothing")
        assert await schedules.get_schedules() == []
        node.advance(3_700_000)
        assert ran == []
        node.advance(3_700_000)
        await until(lambda: ran == [2])


async def test_a_task_that_raises_is_acknowledged_and_its_error_is_the_result(node: Node, broker: PenstockTasks) -> None:
    @broker.task
    async def fail() -> None:
        raise LookupError("no such customer")

    async with working(broker):
        result = await (await fail.kiq()).wait_result(timeout=WAIT_S_MAX)
        assert isinstance(result.error, LookupError)
        await until(lambda: node.core.counters.acked == 1)


@pytest.mark.parametrize("middleware", [SimpleRetryMiddleware(), SmartRetryMiddleware(default_delay=3_600)])
async def test_taskiq_s_retries_send_the_task_again(node: Node, broker: PenstockTasks, middleware: Any) -> None:
    ran: list[int] = []
    broker.add_middlewares(middleware)

    @broker.task(retry_on_error=True, max_retries=3)
    async def fail_once() -> int:
        ran.append(len(ran))
        if len(ran) == 1:
            raise LookupError
        return 42

    async with working(broker):
        task = await fail_once.kiq()
        await until(lambda: node.core.counters.acked >= 1)
        if isinstance(middleware, SmartRetryMiddleware):
            assert ran == [0]
            node.advance(3_601_000)
        assert (await task.wait_result(timeout=WAIT_S_MAX)).return_value == 42
    assert ran == [0, 1]


async def test_a_task_that_hangs_ends_by_its_timeout(node: Node, broker: PenstockTasks) -> None:
    cancelled: list[bool] = []

    @broker.task(timeout=0.1)
    async def hang() -> None:
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async with working(broker):
        result = await (await hang.kiq()).wait_result(timeout=WAIT_S_MAX)
        assert isinstance(result.error, TimeoutError)
        await until(lambda: node.core.counters.acked == 1)
    assert cancelled == [True]


async def test_a_task_is_extended_while_it_runs_or_waits_to_run(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runningconsumer, "CHECK_S_MAX", 0.01)
    loop_time = LoopTime()
    broker = broker_of(node.target, invisible=600)
    began: list[int] = []
    release = asyncio.Event()

    @broker.task
    async def note(number: int) -> None:
        began.append(number)
        await release.wait()

    async with working(broker, max_async_tasks=1, max_prefetch=5):
        for number in range(6):
            await note.kiq(number)
        await until(lambda: node.group(TASKS, TASKS).in_flight == 6)
        handles = {held.message.handle for listener in broker._listeners for held in listener._held}

        def extended() -> bool:
            now = {held.message.handle for listener in broker._listeners for held in listener._held}
            return len(now) == 6 and not now & handles

        loop_time.advance(301)
        await until(extended)
        handles |= {held.message.handle for listener in broker._listeners for held in listener._held}
        loop_time.advance(301)
        await until(extended)
        release.set()
        await until(lambda: node.core.counters.acked == 6)
    await broker.shutdown()
    assert began == list(range(6)), "none came twice"


@pytest.mark.nightly
async def test_tasks_beyond_what_taskiq_asks_for_stay_with_other_workers(node: Node, client: Client) -> None:
    release = asyncio.Event()
    ran: dict[str, set[int]] = {"busy": set(), "idle": set()}
    # The busy worker returns what waits at half the invisible time, so that must be well below the time that `until` waits.
    brokers = {name: broker_of(node.target, invisible=4.0) for name in ran}
    for name, broker in brokers.items():

        @broker.task(task_name="note")
        async def note(number: int, name: str = name) -> None:
            ran[name].add(number)
            await release.wait()

    async with working(brokers["busy"], max_async_tasks=1), working(brokers["idle"], max_async_tasks=20):
        for number in range(10):
            await brokers["busy"].find_task("note").kiq(number)  # type: ignore[union-attr]
        await until(lambda: ran["busy"] | ran["idle"] == set(range(10)))
        assert len(ran["busy"]) <= 1
        release.set()
        await until(lambda: node.core.counters.acked == 10)
    for broker in brokers.values():
        await broker.shutdown()


@pytest.mark.parametrize("when", [AcknowledgeType.WHEN_RECEIVED, AcknowledgeType.WHEN_EXECUTED, AcknowledgeType.MANUAL])
async def test_tasks_are_acknowledged_when_taskiq_says_so(node: Node, broker: PenstockTasks, when: AcknowledgeType) -> None:
    acked: list[int] = []

    @broker.task(ack_type=when.value)
    async def note(context: Context = TaskiqDepends()) -> None:  # noqa: B008 - taskiq's way
        if when is AcknowledgeType.MANUAL:
            await context.ack()
            await context.ack()
        acked.append(node.core.counters.acked)

    async with working(broker):
        await note.kiq()
        await until(lambda: acked and node.core.counters.acked == 1)
    assert acked == [0 if when is AcknowledgeType.WHEN_EXECUTED else 1]


async def test_tasks_of_one_message_group_run_one_after_the_other(node: Node) -> None:
    broker = broker_of(node.target, settings=group_settings(fifo=True))
    running: set[str] = set()
    ran: list[tuple[str, int]] = []

    @broker.task
    async def note(key: str, number: int) -> None:
        assert key not in running
        running.add(key)
        await asyncio.sleep(0.002)
        running.discard(key)
        ran.append((key, number))

    async with working(broker, max_async_tasks=8):
        for number in range(10):
            for key in "ab":
                await note.kicker().with_labels(message_group=key).kiq(key, number)
        await until(lambda: len(ran) == 20)
    await broker.shutdown()
    for key in "ab":
        assert [number for name, number in ran if name == key] == list(range(10))


async def test_a_stop_finishes_what_runs_and_returns_the_rest_uncounted(node: Node, client: Client) -> None:
    broker = broker_of(node.target)
    began, release = asyncio.Event(), asyncio.Event()
    ran: list[int] = []

    @broker.task
    async def note(number: int) -> None:
        began.set()
        await release.wait()
        ran.append(number)

    async with working(broker, max_async_tasks=2) as finish:
        for number in range(50):
            await note.kiq(number)
        await began.wait()
        finish.set()
        await until(lambda: node.group(TASKS, TASKS).in_flight <= 2)
        release.set()
    await broker.shutdown()
    assert 1 <= len(ran) <= 2
    rest = await client.pop(TASKS, group=TASKS, messages_max=100)
    assert len(rest) == 50 - len(ran)
    assert {message.attempt for message in rest} == {1}


async def test_tasks_that_run_too_long_at_a_stop_go_back_uncounted(node: Node, client: Client) -> None:
    broker = broker_of(node.target)
    began = asyncio.Event()

    @broker.task
    async def hang() -> None:
        began.set()
        await asyncio.sleep(3_600)

    listening = asyncio.create_task(Receiver(broker, max_async_tasks=1, max_prefetch=3).listen(asyncio.Event()))
    await until(lambda: broker._client is not None)
    for _ in range(4):
        await hang.kiq()
    await until(lambda: began.is_set() and node.group(TASKS, TASKS).in_flight == 4)
    listening.cancel()
    await asyncio.wait((listening,))
    await broker.shutdown()
    rest: list[Message] = []
    async with asyncio.timeout(WAIT_S_MAX):
        while len(rest) < 4:
            rest += await client.pop(TASKS, group=TASKS, messages_max=100, wait=60.0)
    assert [message.attempt for message in rest] == [1] * 4


@pytest.mark.nightly
async def test_a_worker_goes_on_when_its_node_was_killed(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path / "data")
    await asyncio.to_thread(node.start)
    port = node.port("pop")
    broker = broker_of(f"127.0.0.1:{port}", invisible=1.0)
    ran: set[int] = set()

    @broker.task
    async def note(number: int) -> None:
        await asyncio.sleep(0.001)
        ran.add(number)

    try:
        async with working(broker, max_async_tasks=8):
            kicking = asyncio.gather(*(note.kiq(number) for number in range(200)))
            await until(lambda: len(ran) > 30)
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start, "--pop", f"127.0.0.1:{port}")
            await kicking
            await until(lambda: ran == set(range(200)))
            await broker.client.groups.delete(TASKS)
            await note.kiq(200)
            await until(lambda: 200 in ran)
            await until(lambda: not broker.problems)
    finally:
        await broker.shutdown()
        await asyncio.to_thread(node.close)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_tasks_of_a_worker_process_that_ends_are_run_by_the_next(tmp_path: Path, number: int) -> None:
    node = NodeProcess(tmp_path / "data")
    await asyncio.to_thread(node.start)
    target, log = f"127.0.0.1:{node.port('pop')}", tmp_path / "tasks.log"
    log.touch()
    environment = {**os.environ, "PENSTOCK_TARGET": target, "TASKS_LOG": str(log)}
    environment["TASKS_INVISIBLE"] = "2" if number == signal.SIGKILL else "3600"  # SIGTERM returns them at once.
    command = [sys.executable, "-m", "taskiq", "worker", "tests.contrib.taskiqapp:broker", "--workers", "1"]
    command += ["--max-async-tasks", "2", "--wait-tasks-timeout", "1"]

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "worker.log").open("ab") as output:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True)

    def lines(kind: str) -> list[int]:
        return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith(kind)]

    worker = await asyncio.to_thread(start)
    try:
        sender = broker_of(target)
        await sender.startup()
        kicker: AsyncKicker[Any, Any] = AsyncKicker("tests.contrib.taskiqapp:note", sender, {})
        for each in range(2):
            await kicker.kiq(each, 3_600.0)
        await until(lambda: sorted(lines("began")) == [0, 1])
        for each in range(2, 6):
            await kicker.kiq(each, 0.0)
        if number == signal.SIGKILL:
            os.killpg(worker.pid, signal.SIGKILL)
        else:
            worker.terminate()
        await asyncio.to_thread(worker.wait, PROCESS_S)
        worker = await asyncio.to_thread(start)
        await until(lambda: sorted(each for each in lines("began") if each < 2) == [0, 0, 1, 1])
        await sender.shutdown()
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        await asyncio.to_thread(worker.wait, PROCESS_S)
        await asyncio.to_thread(node.close)
