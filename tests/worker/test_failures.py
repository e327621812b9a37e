"""The worker of the guide survives what the guide says, and so do others: wrong tokens, full disks, a blocked event loop."""

from __future__ import annotations

import asyncio
import gc
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock import Client, GroupSettings, Message, Security, Worker, group_settings
from penstock.access.subject import Subject
from penstock.pop.errors import RequestInvalid
from penstock.store.files import Usage
from penstock.store.options import GIB, MIB, StoreOptions
from penstock.worker import runningconsumer
from tests.pop.looptime import LoopTime
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.system.processes import NodeProcess
from tests.waiting import WAIT_S_MAX, until
from tests.worker.accessfile import access_file
from tests.worker.relay import Relay
from tests.worker.running import counts, running, send

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "worker.md"


def worker_of_the_guide(target: str) -> ModuleType:
    """Return the first code of the guide as a module. Its back-off is shortened, for the test's sake."""
    found = re.search(r"^```python\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    code = found[1]
    assert len([line for line in code.splitlines() if line]) <= 10
    for shown, used in (
        ("127.0.0.1:8081", target),
        ("attempts_max=10", "attempts_max=10, backoff=(0.005,)"),
    ):
        assert shown in code
        code = code.replace(shown, used)
    module = ModuleType("billing")
    exec(compile(code, str(GUIDE), "exec"), module.__dict__)
    return module


async def test_the_ten_lines_of_the_guide_survive_their_handler_and_their_node(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path / "data")
    await asyncio.to_thread(node.start)
    loop_time = LoopTime()
    charged: list[tuple[str, Any]] = []
    calls: dict[str, int] = {}

    async def charge(meter: str, value: Any) -> object:
        calls[meter] = calls.get(meter, 0) + 1
        if meter == "raises" and calls[meter] < 3:
            raise LookupError("no such meter")
        if meter == "hangs" and calls[meter] < 2:
            loop_time.advance(61)
            await asyncio.sleep(3_600)
        charged.append((meter, value))
        return object()

    def meters() -> set[str]:
        return {meter for meter, _ in charged}

    try:
        async with Relay() as relay:
            relay.port = node.port("pop")
            billing = worker_of_the_guide(relay.target)
            billing.charge = charge  # type: ignore[attr-defined]
            async with running(billing.app), Client(relay.target) as client:

                async def reading(meter: str) -> None:
                    await client.send(TOPIC, b'{"meter": "%s", "value": 1}' % meter.encode())

                for meter in ("good", "raises", "hangs"):
                    await reading(meter)
                for body in (b"{{", b"[]", b'{"value": 1}'):
                    await client.send(TOPIC, body)
                await until(lambda: meters() == {"good", "raises", "hangs"})
                await until(lambda: counts(billing.app).dead_lettered == 2)
                reasons = {letter.detail.partition(":")[0] for letter in await client.dead_letters.of_group("billing")}
                assert {"the body of 2 bytes is not valid"} <= reasons

                await asyncio.to_thread(node.kill)
                await asyncio.to_thread(node.start)  # on another port
                assert relay.port != node.port("pop")
                relay.port = node.port("pop")
                await reading("after a kill and a move")
                await until(lambda: "after a kill and a move" in meters())

                await client.groups.delete("billing")
                await reading("after the group was deleted")
                await until(lambda: "after the group was deleted" in meters())
                await until(lambda: not billing.app.problems)
                assert counts(billing.app).timed_out >= 1
    finally:
        await asyncio.to_thread(node.close)


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_settings", [False, True])
async def test_a_worker_whose_token_is_wrong_says_so_and_goes_on_when_it_is_right(tmp_path: Path, with_settings: bool) -> None:
    path = access_file(tmp_path / "access.toml", "another")
    async with Node(tmp_path / "data", access=path) as node:
        worker = Worker(node.target, security=Security(token="s3cret"))
        release = asyncio.Event()
        seen: list[int] = []

        @worker.consumer(FILTER, group=GROUP, settings=group_settings(backoff=()) if with_settings else None)
        async def handle(message: Message) -> None:
            seen.append(message.attempt)
            if len(seen) == 1:
                await release.wait()
                raise LookupError

        async with running(worker) as task:
            await until(lambda: "token" in str(worker.problems))
            access_file(path, "s3cret")
            node.access.reload(Subject("test"))
            await until(lambda: node.core.waiting == 1 and not worker.problems)

            node.publish(b"x")
            await until(lambda: seen)
            access_file(path, "another")
            node.access.reload(Subject("test"))
            release.set()
            await until(lambda: worker.problems and counts(worker).failed == 1)
            assert not task.done(), "a message that can't be returned ends no worker"

            access_file(path, "s3cret")
            node.access.reload(Subject("test"))
            await until(lambda: not worker.problems)
            node.advance(31_000)  # It could not be returned, so it comes back at its deadline.
            await until(lambda: len(seen) == 2)
        assert seen == [1, 2]


# --- nodes that are not there ---------------------------------------------------------------------------------------


async def test_a_worker_without_its_node_says_so_at_once_and_stops_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker("127.0.0.1:1")

    @worker.consumer(FILTER, group=GROUP, settings=group_settings(attempts_max=3))
    async def handle(body: bytes) -> None:
        raise AssertionError("there is nothing to handle")

    task = asyncio.create_task(worker.run(handle_signals=False))
    await until(lambda: "the node at 127.0.0.1:1 can't be reached" in caplog.text)
    assert "the worker waits for it" in caplog.text, "it says so before a call fails"
    assert "start the node" in str(worker.problems)
    worker.stop()
    await task
    gc.collect()  # asyncio logs what nobody has retrieved.
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("with_settings", [False, True])
async def test_a_problem_that_stays_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, with_settings: bool
) -> None:
    caplog.set_level("INFO", "penstock.worker")
    async with Node(tmp_path / "data", access=access_file(tmp_path / "access.toml", "another")) as node:
        worker = Worker(node.target, security=Security(token="s3cret"))

        @worker.consumer(FILTER, group=GROUP, settings=group_settings(attempts_max=3) if with_settings else None)
        async def handle(body: bytes) -> None:
            raise AssertionError("there is nothing to handle")

        opened = 0
        consumer_open = runningconsumer.RunningConsumer.open

        async def counted_open(self: runningconsumer.RunningConsumer) -> None:
            nonlocal opened
            opened += 1
            await consumer_open(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runningconsumer.RunningConsumer, "open", counted_open)
            patch.setattr(runningconsumer, "CHECK_S_MAX", 0.01)
            patch.setattr(runningconsumer, "HEALTHY_S", 0.0)
            async with running(worker):
                await until(lambda: opened > 3)
        assert caplog.text.count("who calls") == 1
        assert "gets messages again" not in caplog.text, "the node has answered nothing"


async def test_where_a_deleted_group_begins_again_is_told(node: Node, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(node.target)

    @worker.consumer(FILTER, group=GROUP)
    async def handle(body: bytes) -> None:
        pass

    async with running(worker):
        await until(lambda: node.core.waiting == 1)
        await client.groups.delete(GROUP)
        await until(lambda: counts(worker).reconnects == 1)
    assert "a group that it creates begins with the earliest message" in caplog.text


# --- full disks and blocked loops ------------------------------------------------------------------------------------


async def test_a_worker_waits_for_a_node_whose_disk_is_full(tmp_path: Path) -> None:
    async with Node(tmp_path / "data", store=StoreOptions(segment_bytes=MIB, reserve_bytes=GIB)) as node:

        def free(amount: int) -> None:
            node.store.space.probe = lambda: Usage(amount, 100 * GIB)
            node.store.measure_disk()
            node.store.commit()

        worker = Worker(node.target)
        seen: list[bytes] = []

        @worker.consumer(FILTER, group=GROUP)
        async def handle(body: bytes) -> None:
            seen.append(body)

        node.publish(b"x")
        free(0)
        async with running(worker):
            await until(lambda: worker.problems and "reserve" in next(iter(worker.problems.values())))
            assert seen == []
            free(50 * GIB)
            await until(lambda: seen and not worker.problems)
        assert seen == [b"x"]


async def test_a_handler_that_blocks_the_event_loop_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runningconsumer, "CHECK_S_MAX", 0.01)
    loop_time = LoopTime()
    async with Node(tmp_path / "data") as node, Client(node.target) as client:
        worker = Worker(node.target)

        @worker.consumer(FILTER, group=GROUP)
        async def block(body: bytes) -> None:
            loop_time.advance(5)  # No other task has a turn meanwhile.

        await send(client, [b"x"])
        async with running(worker):
            await until(lambda: "blocked the event loop" in caplog.text)
        assert ".block await" in caplog.text


@pytest.mark.parametrize("settings", [None, group_settings(attempts_max=3)], ids=["without settings", "with settings"])
async def test_a_filter_that_is_not_valid_ends_the_worker_with_the_reason(node: Node, settings: GroupSettings | None) -> None:
    app = Worker(node.target)

    @app.consumer("plant/a+b", group=GROUP, settings=settings)
    async def handle(body: bytes) -> None:
        raise AssertionError("there is nothing to handle")

    with pytest.raises(RequestInvalid, match="a\\+b"):
        async with asyncio.timeout(WAIT_S_MAX):
            await app.run(handle_signals=False)
