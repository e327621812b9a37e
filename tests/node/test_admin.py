"""The admin listener over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from penstock.access.control import AccessControl
from penstock.access.options import AccessControlOptions
from penstock.node import adminconnection, adminsockets
from penstock.node.admin import PATHS, Admin, NodeViews
from penstock.node.adminconnection import AdminConnection
from penstock.node.adminoptions import AdminOptions
from penstock.node.errors import AdminUnavailable
from penstock.store.errors import TopicInvalid
from penstock.store.options import HostPort
from tests.waiting import until

FREE = AdminOptions(listen=HostPort("127.0.0.1", 0))


def at(port: int) -> AdminOptions:
    return AdminOptions(listen=HostPort("127.0.0.1", port))


class Node:
    """The node that the admin listener asks. A test sets the answers."""

    def __init__(self, data_dir: Path) -> None:
        self.access = AccessControl(AccessControlOptions(), data_dir, lambda: 0)
        self.registry = CollectorRegistry()
        self.is_ready = False
        self.state: dict[str, Any] = {}
        self.admin = self.admin_at(FREE)

    def admin_at(self, options: AdminOptions, connections_max: int = 32) -> Admin:
        """Return a listener of this node."""
        views = NodeViews(self.registry, lambda: self.is_ready, lambda: self.state, self.timers)
        return Admin(options, self.access, views, connections_max=connections_max)

    async def timers(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        if "filter" in parameters:
            raise TopicInvalid("the filter is not valid")
        return {"timers": [], **parameters}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
async def client(node: Node) -> AsyncIterator[aiohttp.ClientSession]:
    port = await node.admin.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        yield session
    await node.admin.stop()


async def test_a_node_is_alive_before_it_is_ready(node: Node, client: aiohttp.ClientSession) -> None:
    async with client.get("/healthz") as response:
        assert (response.status, await response.json()) == (200, {"alive": True})
    async with client.get("/readyz") as response:
        assert (response.status, await response.json()) == (503, {"ready": False, "store": "open"})

    node.is_ready = True

    async with client.get("/readyz") as response:
        assert (response.status, await response.json()) == (200, {"ready": True, "store": "open"})


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [("*/*", "text/plain"), ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text")],
)
async def test_metrics_come_in_the_format_that_is_asked_for(
    node: Node, client: aiohttp.ClientSession, accept: str, content_type: str
) -> None:
    Counter("messages", "Messages stored.", registry=node.registry).inc(3)
    async with client.get("/metrics", headers={"Accept": accept}) as response:
        assert response.status == 200
        assert response.content_type == content_type
        assert "messages_total 3.0" in await response.text()


async def test_state_is_what_the_node_says_at_that_moment(node: Node, client: aiohttp.ClientSession) -> None:
    for committed in (1, 2):
        node.state = {"store": {"committed": committed}}
        async with client.get("/api/v1/state") as response:
            assert response.content_type == "application/json"
            assert response.headers["Cache-Control"] == "no-store"
            assert response.headers["Server"] == "penstock"
            assert await response.json() == {"store": {"committed": committed}}


async def test_the_index_lists_paths_that_exist(client: aiohttp.ClientSession) -> None:
    async with client.get("/") as response:
        index = await response.json()
    assert index == {"name": "penstock", "paths": PATHS}
    for path in index["paths"]:
        async with client.get(path) as response:
            assert response.status in (200, 503), path


async def test_nothing_can_be_changed_and_nothing_else_exists(client: aiohttp.ClientSession) -> None:
    async with client.post("/api/v1/state", json={}) as response:
        assert response.status == 405
    async with client.get("/api/v1/secrets") as response:
        assert response.status == 404


async def test_an_address_in_use_is_named_and_its_holder_goes_on(node: Node, client: aiohttp.ClientSession) -> None:
    assert client._base_url is not None
    port = client._base_url.port or 0
    second = node.admin_at(at(port))
    with pytest.raises(AdminUnavailable, match=rf"127\.0\.0\.1:{port}: .*in use.*admin\.listen"):
        await second.start()
    await second.stop()
    async with client.get("/healthz") as response:
        assert response.status == 200


async def test_after_stop_the_port_is_closed_and_can_be_opened_again(node: Node) -> None:
    port = await node.admin.start()
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/healthz"):
        await node.admin.stop()
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"http://127.0.0.1:{port}/healthz")
    again = node.admin_at(at(port))
    assert await again.start() == port
    await again.stop()


@pytest.mark.parametrize("said", [b"\xf0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\xf0: b\r\n\r\n"])
async def test_bytes_that_are_no_http_are_refused_and_not_logged_as_a_failure(
    node: Node, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", await node.admin.start())
    writer.write(said)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert (b"Server: penstock\r\n" in head, b"aiohttp" in head) == (True, False)
    assert "is no HTTP that the node reads" in json.loads(body)["error"]
    writer.close()
    await node.admin.stop()
    assert [record for record in caplog.records if record.exc_info] == []


async def test_pending_messages_are_shown_for_the_parameters_of_the_request(client: aiohttp.ClientSession) -> None:
    async with client.get("/api/v1/timers", params={"limit": "1"}) as response:
        assert await response.json() == {"timers": [], "limit": "1"}
    async with client.get("/api/v1/timers", params={"filter": "#/#"}) as response:
        assert (response.status, await response.json()) == (400, {"error": "the filter is not valid"})


# --- clients that don't read, or don't ask ------------------------------------------------------------------------------

ASK = b"GET /api/v1/state HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def ask_and_read_nothing(port: int) -> socket.socket:
    """Ask for the state over a new connection, which takes as much of the answer as the buffers of the system hold."""
    asking = socket.socket()
    asking.setblocking(False)
    await asyncio.get_running_loop().sock_connect(asking, ("127.0.0.1", port))
    asking.send(ASK)
    return asking


async def asked_for_much(node: Node, connections_max: int) -> tuple[Admin, list[AdminConnection], list[socket.socket]]:
    """Return a listener with connections of which nobody reads an answer larger than the buffers of the system."""
    node.state = {"text": "x" * 16_000_000}
    admin = node.admin_at(FREE, connections_max)
    port = await admin.start()
    connections, asking = [], []
    for _ in range(connections_max):
        asking.append(await ask_and_read_nothing(port))
        await until(lambda: admin._sockets is not None and any(c.writing_paused for c in admin._sockets._open))
        assert admin._sockets is not None
        connections.append(list(admin._sockets._open)[-1])
    return admin, connections, asking


async def test_a_connection_that_makes_way_holds_nothing_although_its_client_does_not_read(node: Node) -> None:
    admin, (connection,), asking = await asked_for_much(node, connections_max=1)
    assert admin._sockets is not None
    _, port = asking[0].getpeername()
    asking.append(await ask_and_read_nothing(port))
    await until(lambda: admin.closed_early == 1)
    await until(lambda: connection.has_ended)
    for each in asking:
        each.close()
    await admin.stop()


async def test_a_client_that_takes_nothing_of_its_answer_loses_its_connection(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adminsockets, "STALLED_S", 0.1)
    admin, (connection,), (asking,) = await asked_for_much(node, connections_max=1)
    await until(lambda: connection.has_ended)
    await admin.stop()
    asking.close()


async def test_a_client_that_reads_nothing_gets_no_more_requests_read(node: Node) -> None:
    admin, (connection,), (asking,) = await asked_for_much(node, connections_max=1)
    transport = connection._transport
    assert transport is not None
    asking.send(ASK)
    await until(lambda: connection._messages)
    assert not transport.is_reading()
    asking.close()
    await admin.stop()


async def test_a_request_that_never_ends_loses_its_connection(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adminconnection, "KEEP_ALIVE_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", await node.admin.start())
    writer.write(ASK[:-2])
    assert await reader.read() == b""
    writer.close()
    await node.admin.stop()
