"""`penstock.testing` and the fixtures for pytest, as applications use them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import structlog

from penstock import Client, SyncClient, Worker, group_settings
from penstock.node.config import Config
from penstock.pop.options import PopOptions
from penstock.testing import Node
from penstock.testing.nodethread import NodeInThread
from tests.system.processes import ROOT
from tests.waiting import PROCESS_S, until
from tests.worker.running import counts, running


async def test_a_node_runs_in_the_process_of_a_test() -> None:
    structlog.reset_defaults()
    async with Node() as node, Client(node.target) as client:
        await client.send("plant/1", b"x")
        (message,) = await client.pop("plant/#", group="billing")
        await message.ack()
    assert not structlog.is_configured(), "the application's own logging is as it was"


async def test_the_clock_of_a_node_is_set_ahead_and_all_that_is_due_has_happened() -> None:
    async with Node() as node, Client(node.target) as client:
        await client.groups.create("billing", "plant/#", settings=group_settings(backoff=(60,)))
        await client.send("plant/1", b"now")
        await client.send("plant/1", b"later", delay=3_600.0)
        (message,) = await client.pop("plant/#", group="billing")
        await message.nack()
        assert await client.pop("plant/#", group="billing") == []
        await node.advance(61)
        assert [again.attempt for again in await client.pop("plant/#", group="billing")] == [2]
        await node.advance(timedelta(hours=1))
        assert b"later" in [found.body for found in await client.pop("plant/#", group="billing")]
        with pytest.raises(ValueError, match="duration is -1 seconds: use 0 or more"):
            await node.advance(-1)


async def test_a_node_takes_options_and_a_directory_that_stays(tmp_path: Path) -> None:
    config = Config(pop=PopOptions(groups_auto_create=False))
    for _ in range(2):
        async with Node(tmp_path / "data", config=config) as node, Client(node.target) as client:
            await client.groups.create("billing", "plant/#")
            await client.send("plant/1", b"x")
    async with Node(tmp_path / "data", config=config) as node, Client(node.target) as client:
        assert len(await client.pop("plant/#", group="billing")) == 2


async def test_a_worker_is_tested_with_a_node() -> None:
    async with Node() as node, Client(node.target) as client:
        worker = Worker(node.target)

        @worker.consumer("plant/#", group="billing")
        async def handle(body: bytes) -> None: ...

        await client.send("plant/1", b"x")
        async with running(worker):
            await until(lambda: counts(worker).handled == 1)


def test_the_fixtures_serve_tests_that_are_no_coroutines(penstock_node: NodeInThread, penstock_client: SyncClient) -> None:
    penstock_client.send("plant/1", b"x", delay=60.0)
    assert penstock_client.pop("plant/#", group="billing") == []
    penstock_node.advance(61)
    (message,) = penstock_client.pop("plant/#", group="billing", wait=5.0)
    message.ack()


async def test_the_fixtures_serve_coroutines_too(penstock_node: NodeInThread) -> None:
    async with Client(penstock_node.target) as client:
        await asyncio.gather(*(client.send("plant/1", b"x") for _ in range(100)))
        assert len(await client.pop("plant/#", group="billing", messages_max=100)) == 100


def test_the_plugin_loads_nothing_of_the_node_before_a_test_uses_it() -> None:
    program = "import sys, penstock.testing.plugin; print(sorted(m for m in sys.modules if m.startswith('penstock.')))"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=PROCESS_S
    )
    assert "penstock.node" not in ended.stdout
