"""A client whose node can't be reached says why, and what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock import Client, Security, SyncClient
from penstock.pop.client import unreached
from penstock.pop.errors import NodeUnavailable
from penstock.pop.options import PopOptions
from tests.gateway.certificates import Authority
from tests.pop.wiring import TOPIC, Node
from tests.waiting import WAIT_S_MAX

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def _has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine has time to find out why the node can't be reached."""
    monkeypatch.setattr(unreached, "REACH_S", WAIT_S_MAX)


def test_a_connection_that_the_node_has_closed_says_what_to_do() -> None:
    assert unreached.explained("Stream removed (Socket closed)").endswith("; check that it runs, and try again")


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[str]:
    """Run a server that is no node, and return its target."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def told(target: str, security: Security) -> str:
    """Return what clients of both kinds say; it must be the same."""
    said = []
    async with Client(target, security=security, timeout=0.3, close_timeout=0.1) as client:
        for check in (client.check_reachable(), client.send(TOPIC), client.groups.describe()):
            with pytest.raises(NodeUnavailable) as raised:
                await check
            said.append(str(raised.value))

    def blocking() -> None:
        with SyncClient(target, security=security, timeout=0.3) as other:
            for check in (other.check_reachable, lambda: other.send(TOPIC)):
                with pytest.raises(NodeUnavailable) as raised:
                    check()
                said.append(str(raised.value))

    await asyncio.to_thread(blocking)
    assert all(f"the node at {target} can't be reached: " in each for each in said), said
    return said[0]


async def test_a_port_at_which_nothing_listens_is_named() -> None:
    async with listening(lambda *_: asyncio.sleep(0)) as target:
        pass
    assert "Connection refused: nothing listens there: start the node" in await told(target, Security())


async def test_an_address_of_something_else_is_named() -> None:
    async def answer_as_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with listening(answer_as_http) as target:
        assert "does not speak gRPC there, or only over TLS" in await told(target, Security())


async def test_tls_to_a_node_without_it_is_named(node: Node) -> None:
    assert "it does not speak TLS there" in await told(node.target, Security(tls=True))


async def test_a_certificate_that_is_not_trusted_is_named(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    options = PopOptions(certificate_file=str(authority.certificate), key_file=str(authority.key))
    async with Node(tmp_path / "data", pop=options) as node:
        found = await told(node.target, Security(root_certificates=other.file.read_bytes()))
        assert "its certificate is not trusted: give the roots" in found
        assert "can't be reached" in await told(node.target, Security())


async def test_a_node_that_is_only_slow_is_told_apart(node: Node, client: Client) -> None:
    late = grpc.aio.AioRpcError(
        grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(), "Deadline Exceeded", None
    )

    async def answer_late(*_: object, **__: object) -> None:
        raise late

    stub: Any = client._stub
    stub.Pop = answer_late
    with pytest.raises(NodeUnavailable, match=f"the node at {node.target} did not answer in time, though it can be reached"):
        await client.pop("a", group="g")


@pytest.mark.nightly
async def test_a_slow_network_has_time_for_a_connection(node: Node) -> None:
    """With half a second to connect at first, one connection suffices where the round trip takes 0.4 s."""
    accepted = 0

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        await asyncio.sleep(0.4)
        there = await asyncio.open_connection("127.0.0.1", node.port)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async with listening(relay) as target, Client(target) as client:
        await client.send(TOPIC)
        assert accepted == 1
