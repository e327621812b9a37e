"""A node whose disk is full, or the disk of its index alone: it goes on, starts, and loses nothing that it acknowledged."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import Client as PopClient
from penstock.pop.errors import PopError
from tests.bounds import write_bounds
from tests.smalldisk import SmallDisk, small_ext4, small_tmpfs
from tests.system.processes import NodeProcess
from tests.waiting import until

CONFIG = """
[store]
segment_bytes = 1048576

[tables]
enabled = "off"
"""


def level(node: NodeProcess) -> str:
    with urllib.request.urlopen(f"http://{node.addresses['admin']}/readyz", timeout=10) as answer:
        found: str = json.loads(answer.read())["store"]
    return found


async def until_level(node: NodeProcess, wanted: str) -> None:
    """Wait until the store of a node has a level."""
    async with asyncio.timeout(30):
        while await asyncio.to_thread(level, node) != wanted:  # noqa: ASYNC110 - another process tells of no event
            await asyncio.sleep(0.1)


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
    """A small disk for a data directory."""
    path = tmp_path / "disk"
    mounted = small_tmpfs(path) if request.param == "tmpfs" else small_ext4(path, tmp_path / "image")
    with mounted as found:
        yield found


async def send(client: PopClient, count: int, sent: list[bytes]) -> None:
    """Send messages until the node refuses one, at most `count`, and add those that it acknowledged to `sent`."""
    for _ in range(count):
        body = b"%d" % len(sent)
        try:
            await client.send("plant/1", body.ljust(2000, b"."))
        except PopError:
            return
        sent.append(body)


async def test_a_node_outlives_a_full_disk_of_the_index_alone(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(CONFIG)
    write_bounds(config, store__index_flush_ms=100)
    node = NodeProcess(tmp_path / "data")
    sent: list[bytes] = []
    with small_tmpfs(tmp_path / "data" / "index", "64m") as disk:
        try:
            node.start("--config", str(config))
            async with PopClient(node.addresses["pop"]) as client:
                await send(client, 50, sent)
                disk.fill()
                await send(client, 50, sent)
                await until_level(node, "exhausted")
                assert node.is_running(), node.log.read_text()[-2000:]
                disk.clear()
                await until_level(node, "open")
                await send(client, 50, sent)
                assert sent[-1] == b"%d" % (len(sent) - 1)
                assert len(sent) >= 100
                node.kill()
            node.start("--config", str(config))
            async with PopClient(node.addresses["pop"]) as client:
                popped = await client.pop("plant/#", group="g", messages_max=1000)
            assert [message.body.rstrip(b".") for message in popped] == sent
            disk.fill()
            assert node.stop() == 0, "what can't be flushed is replayed by the next start"
            disk.clear()
            node.start("--config", str(config))
        finally:
            node.close()


async def test_a_node_starts_without_a_free_byte_and_restores_its_ballast(tmp_path: Path, disk: SmallDisk) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(CONFIG)
    node = NodeProcess(disk.path / "data")
    node.log = tmp_path / "node.log"
    ballast = disk.path / "data" / "ballast"
    sent: list[bytes] = []
    try:
        node.start("--config", str(config))
        async with PopClient(node.addresses["pop"]) as client:
            await send(client, 300, sent)
            assert len(sent) == 300
            await until(lambda: ballast.exists() and ballast.stat().st_size)  # it is made, and then given its room
            disk.fill()
            await send(client, 300, sent)  # as many as find room in what the log has reserved
            await until_level(node, "exhausted")
            node.kill()
            disk.fill()
            assert disk.free() < 4096
            node.start("--config", str(config))
            assert "ballast.released" in node.log.read_text()
            disk.clear()
            await until_level(node, "open")
            await until(lambda: ballast.exists() and ballast.stat().st_size)
            async with PopClient(node.addresses["pop"]) as after:
                await send(after, 10, sent)
        async with PopClient(node.addresses["pop"]) as after:
            popped = await after.pop("plant/#", group="g", messages_max=1000)
        assert [message.body.rstrip(b".") for message in popped] == sent
        disk.fill()
        assert node.stop() == 0
    finally:
        node.close()
