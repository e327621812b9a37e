"""A node with few file descriptors: floods of idle connections must not end it, nor keep clients out for good."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from penstock import Client as PopClient
from penstock.node.descriptors import LIMIT_MIN
from tests.gateway.packet_cases import connect
from tests.gateway.wire import CLEAN, Client
from tests.system.processes import NodeProcess

LIMIT = 1024
FLOOD = 1500


@pytest.fixture
def small(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node that may have 1,024 descriptors and no more."""
    process = NodeProcess(tmp_path / "data", descriptors=(LIMIT, LIMIT))
    yield process
    process.close()


@pytest.fixture(autouse=True)
def many_sockets() -> Iterator[None]:
    """Let this process open a flood of sockets."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < FLOOD * 2:
        pytest.skip(f"the hard limit of descriptors is {before[1]}, and a flood needs {FLOOD * 2}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@asynccontextmanager
async def device(node: NodeProcess, client_id: bytes) -> AsyncIterator[Client]:
    """Connect an MQTT client."""
    client = Client(*await asyncio.open_connection("127.0.0.1", node.port("mqtt")))
    await client.send(connect(CLEAN, client_id))
    assert (await client.receive())[0] == 2
    yield client
    client.writer.close()


@asynccontextmanager
async def flood(node: NodeProcess, listener: str) -> AsyncIterator[None]:
    """Keep `FLOOD` connections open that send no byte. The node may close them."""
    with ExitStack() as ends:

        def begin() -> None:
            for _ in range(FLOOD):
                ends.enter_context(socket.create_connection(("127.0.0.1", node.port(listener)), timeout=10))

        await asyncio.to_thread(begin)
        yield


async def publish_until_marked(node: NodeProcess, publisher: Client) -> int:
    """Publish at QoS 1 until the node has written the sync mark twice, for which it opens files; return how many messages."""
    mark, seen, sent = node.data_dir / "synced", set[bytes](), 0
    while len(seen) < 3:
        await publisher.publish("plant/1", str(sent).encode(), qos=1)
        sent += 1
        seen.add(mark.read_bytes())
        await asyncio.sleep(0.01)
    return sent


def metrics(node: NodeProcess) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{node.addresses['admin']}/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@pytest.mark.parametrize("listener", ["mqtt", "pop", "admin"])
async def test_a_node_outlives_a_flood_of_idle_connections(small: NodeProcess, listener: str) -> None:
    small.start()
    before = await asyncio.to_thread(metrics, small)
    async with device(small, b"before") as publisher, PopClient(small.addresses["pop"]) as consumer:
        await consumer.send("plant/1", b"0")
        await publisher.publish("plant/1", b"0", qos=1)
        async with flood(small, listener):
            sent = 1 + await publish_until_marked(small, publisher)
            assert small.is_running(), small.log.read_text()[-2000:]
            popped = await consumer.pop("plant/#", group="g", messages_max=1000)
            assert len(popped) == 1 + sent
            during = await asyncio.to_thread(metrics, small)
            assert during["process_open_fds"] < LIMIT - 100, "the store has a reserve"
            async with device(small, b"during") as another:
                await another.publish("plant/1", b"during", qos=1)
        async with device(small, b"after") as another, PopClient(small.addresses["pop"]) as fresh:
            await another.publish("plant/1", b"after", qos=1)
            assert len(await fresh.pop("plant/#", group="g", messages_max=1000)) == 2
    assert "store.failed" not in small.log.read_text()
    assert before["process_max_fds"] == LIMIT
    assert small.stop() == 0


def test_a_start_raises_the_soft_limit_to_the_hard_limit_and_logs_both(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path / "data", descriptors=(600, 2000))
    try:
        node.start()
        assert metrics(node)["process_max_fds"] == 2000
        assert re.search(r"descriptors.limit.*before=600.*hard=2000|before.*600.*2000", node.log.read_text())
        assert "mqtt.connections_max" in node.log.read_text(), "fewer descriptors than connections that the options allow"
    finally:
        node.close()


def test_a_limit_that_is_too_low_is_an_error_at_the_start_with_numbers(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path / "data", descriptors=(LIMIT_MIN - 1, LIMIT_MIN - 1))
    try:
        with pytest.raises(AssertionError):
            node.start()
        text = node.log.read_text()
        assert f"may have {LIMIT_MIN - 1} file descriptors" in text
        assert str(LIMIT_MIN) in text
        assert "Traceback" not in text
    finally:
        node.close()
