"""The control socket, and the hold that `penstock backup` takes on it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock.gateway.options import GatewayOptions
from penstock.node import holding
from penstock.node.adminoptions import AdminOptions
from penstock.node.config import Config
from penstock.node.control import Control, Routes
from penstock.node.controladdress import HOLD, SOCKET
from penstock.node.controlclient import Request
from penstock.node.errors import ControlRefused, NodeNotRunning
from penstock.node.node import Node
from penstock.pop.options import PopOptions
from penstock.store.index.index import CHECKPOINT, Index
from penstock.store.options import KIB, HostPort, StoreOptions
from penstock.store.retention.retention import Blocker
from penstock.store.space.space import Level
from tests.store.wiring import open_store, publish
from tests.waiting import until

FREE = HostPort("127.0.0.1", 0)


@asynccontextmanager
async def control(data_dir: Path, routes: Routes) -> AsyncIterator[Control]:
    server = Control(data_dir, routes)
    await server.start()
    yield server
    await server.stop()


async def ask(data_dir: Path, method: str = "POST", path: str = "/v1/greeting") -> Any:
    """Send a request from another thread, as a command does from its process; return the first line of the response."""

    def work() -> Any:
        with Request(data_dir, method, path) as request:
            return request.line()

    return await asyncio.to_thread(work)


async def greet(_request: web.Request) -> web.Response:
    return web.Response(body=b'{"greeting":"hello"}\n')


async def refuse(_request: web.Request) -> web.Response:
    raise ControlRefused("not today")


ROUTES: Routes = {("POST", "/v1/greeting"): greet, ("POST", "/v1/refusal"): refuse}


@pytest.mark.parametrize("name", ["data", "d" * 100 + "/" + "e" * 100], ids=["short", "longer than an address"])
async def test_a_command_reaches_the_node(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    async with control(tmp_path / name, ROUTES):
        assert await ask(tmp_path / name) == {"greeting": "hello"}
    assert not (tmp_path / name / SOCKET).exists()


async def test_only_the_user_of_the_node_may_connect(tmp_path: Path) -> None:
    async with control(tmp_path, ROUTES):
        assert (tmp_path / SOCKET).stat().st_mode & 0o777 == 0o600


async def test_the_socket_of_a_killed_node_is_replaced(tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / SOCKET))
    stale.close()
    with pytest.raises(NodeNotRunning, match="no node listens"):
        await ask(tmp_path)
    async with control(tmp_path, ROUTES):
        assert await ask(tmp_path) == {"greeting": "hello"}


async def test_a_file_in_place_of_the_socket_is_left_alone_and_the_node_runs(tmp_path: Path) -> None:
    (tmp_path / SOCKET).write_text("not a socket")
    async with control(tmp_path, ROUTES):
        pass
    assert (tmp_path / SOCKET).read_text() == "not a socket"


async def test_a_refusal_and_an_unknown_request_say_why(tmp_path: Path) -> None:
    async with control(tmp_path, ROUTES):
        with pytest.raises(ControlRefused, match="not today"):
            await ask(tmp_path, path="/v1/refusal")
        with pytest.raises(ControlRefused, match="the node doesn't know POST /v1/nothing"):
            await ask(tmp_path, path="/v1/nothing")
        with pytest.raises(ControlRefused, match="doesn't know GET /v1/greeting"):
            await ask(tmp_path, method="GET")


# --- the hold ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node with small segments, of which retention keeps few."""
    config = Config(
        data_dir=tmp_path / "data",
        store=StoreOptions(segment_bytes=16 * KIB, retention_bytes=64 * KIB),
        mqtt=GatewayOptions(listen=FREE),
        pop=PopOptions(listen=FREE),
        admin=AdminOptions(listen=FREE),
    )
    node = Node(config)
    await node.start()
    yield node
    await node.stop()


def fill(node: Node, count: int = 500) -> None:
    for _ in range(count):
        publish(node.store, "plant/1/temperature", "x" * 200)
    node.store.commit()


async def take(node: Node) -> tuple[Request, dict[str, Any]]:
    def work() -> tuple[Request, dict[str, Any]]:
        request = Request(node.config.data_dir, "POST", HOLD)
        return request, request.line()

    return await asyncio.to_thread(work)


def is_held(node: Node) -> bool:
    return node.store.retention.is_held


async def test_a_hold_names_a_durable_state_whose_index_covers_no_more(node: Node, tmp_path: Path) -> None:
    fill(node)
    request, hold = await take(node)
    fill(node)
    with request:
        assert hold["segments"][0][0] == hold["start"]
        assert hold["segments"][-1][1] == hold["durable"] <= node.store.durable_position
        assert 0 < covered_by(node.config.data_dir / CHECKPOINT, tmp_path / "copy") <= hold["durable"]


def covered_by(checkpoint: Path, directory: Path) -> int:
    """Return up to where a copy of an index covers the log."""
    directory.mkdir()
    checkpoint.rename(directory / "index")
    index = Index(directory, read_only=True)
    covered = index.covered()
    index.close()
    assert covered is not None
    return covered.position


async def test_retention_deletes_nothing_while_the_hold_lasts(node: Node) -> None:
    fill(node)
    request, hold = await take(node)
    with request:
        fill(node, 2_000)
        await until(lambda: node.store.retention.is_held_back)
        assert node.store.retention.blocked_by is Blocker.BACKUP
        assert node.store.log.start == hold["start"]
        assert await ask(node.config.data_dir, "GET", f"{HOLD}?id={hold['id']}") == {}
    await until(lambda: node.store.log.start > hold["start"])
    assert not is_held(node)


async def test_the_hold_ends_with_the_connection(node: Node) -> None:
    request, hold = await take(node)
    assert is_held(node)
    request.close()
    await until(lambda: not is_held(node))
    await until(lambda: not (node.config.data_dir / CHECKPOINT).exists())
    with pytest.raises(ControlRefused, match="did not hold its files all the time"):
        await ask(node.config.data_dir, "GET", f"{HOLD}?id={hold['id']}")


async def test_a_second_hold_is_refused_until_the_first_has_ended(node: Node) -> None:
    request, _ = await take(node)
    with request, pytest.raises(ControlRefused, match="another backup of this node is running"):
        await take(node)
    await until(lambda: not is_held(node))
    again, _ = await take(node)
    again.close()


async def test_the_hold_ends_after_its_longest_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "HOLD_S_MAX", 0.0)
    monkeypatch.setattr(holding, "CHECK_S", 0.01)
    request, hold = await take(node)
    with request:
        ended = await asyncio.to_thread(request.line)
        assert "retention must delete segments" in ended["ended"]
        with pytest.raises(ControlRefused, match="longer than 0 hours"):
            await ask(node.config.data_dir, "GET", f"{HOLD}?id={hold['id']}")
    assert not is_held(node)


async def test_the_hold_ends_when_a_full_disk_needs_what_it_holds(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "CHECK_S", 0.01)
    request, _ = await take(node)
    with request:
        node.store.space.level = Level.READ_ONLY
        node.store.retention.is_held_back = True
        assert "the disk is nearly full" in (await asyncio.to_thread(request.line))["ended"]
    assert not is_held(node)


async def test_a_node_that_stops_ends_the_hold_and_says_so(node: Node) -> None:
    request, _ = await take(node)
    with request:
        stopping = asyncio.create_task(node._holding.stop())
        assert (await asyncio.to_thread(request.line))["ended"] == "the node was stopped"
        await stopping


def test_a_start_deletes_the_copy_of_the_index_that_a_killed_node_has_left(tmp_path: Path) -> None:
    left = tmp_path / CHECKPOINT
    left.mkdir()
    (left / "CURRENT").write_text("left")
    open_store(tmp_path).abandon()
    assert not left.exists()
