"""Streams of the admin API of a node: messages as they are stored, and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import pytest

from penstock.node import adminsockets, messagetail
from penstock.node.api import streaming, streams
from penstock.node.api.messagereader import MessageRead, MessageReader
from penstock.node.api.operation import ApiCall
from penstock.node.api.streams import StreamOperations, TailedMessage, TailQuery, TailState
from penstock.node.messagetail import MessageTail
from penstock.node.recordheads import PIECE_BYTES
from tests.gateway.wire import Broker
from tests.node.adminapi import Api, api, audited, broker
from tests.waiting import until

__all__ = ["api", "broker"]

TIMEOUT_S = 10.0


class Reader:
    """Reads the lines of a stream."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def line(self) -> dict[str, Any] | None:
        """Return the next line; None if the stream has ended."""
        async with asyncio.timeout(TIMEOUT_S):
            data = await self.response.content.readline()
        line: dict[str, Any] | None = json.loads(data) if data else None
        return line

    async def messages(self, count: int) -> list[dict[str, Any]]:
        """Return the next messages, without the lines between them."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            line = await self.line()
            assert line is not None
            if line["type"] == "message":
                found.append(line)
        return found


@asynccontextmanager
async def stream(broker: Broker, path: str, role: str = "operator", **parameters: str | int) -> AsyncIterator[Reader]:
    async with (
        aiohttp.ClientSession(
            f"http://{broker.node.admin}", headers={"Authorization": f"Bearer {role}"} if role else {}
        ) as session,
        session.get(f"/api/v1/streams/{path}", params=parameters) as response,
    ):
        assert response.status == HTTPStatus.OK, await response.text()
        yield Reader(response)


async def test_a_tail_shows_the_messages_of_a_filter(broker: Broker) -> None:
    client = await broker.connect("device")
    await client.publish("plant/1/state", b"before", 1)
    async with stream(broker, "messages", filter="plant/+/state", body_bytes=4) as reader:
        assert reader.response.content_type == "application/x-ndjson"
        first = await reader.line()
        assert first is not None
        assert (first["type"], first["left_out"], first["skipped_bytes"]) == ("state", 0, 0)
        for topic, body in (("plant/1/state", b"on"), ("plant/1/other", b"x"), ("plant/2/state", b"x" * 2 * PIECE_BYTES)):
            await client.publish(topic, body, 1)
        small, large = await reader.messages(2)
        assert (small["topic"], b64decode(small["body_base64"]), small["cut"]) == ("plant/1/state", b"on", False)
        assert (large["topic"], b64decode(large["body_base64"]), large["cut"]) == ("plant/2/state", b"xxxx", True)
        assert (large["body_bytes"], large["qos"]) == (2 * PIECE_BYTES, 1)


async def test_a_tail_counts_what_it_does_not_show(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await broker.connect("device")
    store = broker.node.store
    tail = MessageTail(store, "plant/#")
    for number in range(3):
        await client.publish("plant", b"%d" % number, 1)
    assert len(tail.look()) == 3
    assert tail.is_at_end
    assert tail.look() == []
    monkeypatch.setattr(messagetail, "BEHIND_BYTES_MAX", 100)
    before = store.committed_position
    await client.publish("plant", b"x" * 200, 1)
    assert tail.look() == []
    assert tail.is_at_end
    assert tail.skipped_bytes == store.committed_position - before
    operations = StreamOperations(store, MessageReader(store), broker.node.registry, broker.node._totaller.prepare)
    monkeypatch.setattr(messagetail, "BEHIND_BYTES_MAX", 10_000)
    monkeypatch.setattr(streams, "LOSS_S", 0.0)
    lines = await operations.messages(ApiCall(None, {}, TailQuery(per_s=1), None))  # type: ignore[arg-type]  # nobody asks for it
    assert isinstance(await anext(lines), TailState)
    for _ in range(3):
        await client.publish("plant", b"x", 1)
    shown, state = await anext(lines), await anext(lines)
    assert isinstance(shown, TailedMessage)
    assert isinstance(state, TailState)
    assert state.left_out == 2


async def test_a_tail_counts_what_it_can_not_read(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    store = broker.node.store
    reader = MessageReader(store)
    monkeypatch.setattr(streams, "LOSS_S", 0.0)
    operations = StreamOperations(store, reader, broker.node.registry, broker.node._totaller.prepare)
    lines = await operations.messages(ApiCall(None, {}, TailQuery(), None))  # type: ignore[arg-type]  # nobody asks for it
    assert isinstance(await anext(lines), TailState)
    monkeypatch.setattr(reader, "read", AsyncMock(return_value=None))  # as for a damaged record
    client = await broker.connect("device")
    await client.publish("plant", b"x", 1)
    state = await anext(lines)
    assert isinstance(state, TailState)
    assert state.left_out == 1
    tail = MessageTail(store, "#")
    tail._position -= 7
    monkeypatch.setattr(type(store.log), "start", property(lambda log: log.written))  # retention has deleted the rest
    assert tail.look() == []
    assert tail.skipped_bytes == 7


async def test_metrics_come_again_and_again(broker: Broker) -> None:
    await broker.connect("device")
    async with stream(
        broker, "metrics", "viewer", interval_ms=500, names="penstock_mqtt_connections,penstock_build_info"
    ) as reader:
        first, second = await reader.line(), await reader.line()
        assert first is not None
        assert second is not None
        values = {sample["name"]: sample for sample in first["samples"]}
        assert values["penstock_mqtt_connections"]["value"] == 1
        assert values["penstock_build_info"]["labels"]["version"]
        assert all(name.startswith(("penstock_mqtt_connections", "penstock_build_info")) for name in values)
        assert second["time_ms"] > first["time_ms"]
        assert not first["cut"]


async def test_streams_have_a_bound_of_their_own(broker: Broker, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker.node.api.streams, "_streams_max", 1)
    operator = api("operator")
    async with stream(broker, "messages") as reader:
        await reader.line()
        status, why = await operator.refused("GET", "/streams/metrics")
        assert (status, "streams already" in why) == (429, True)
        await operator.ok("GET", "/clients")
    await until(lambda: not broker.node.api.streams._tasks)  # the place is free when the caller has hung up
    for path, role, expected in (
        ("/streams/messages", "viewer", 403),
        ("/streams/messages?filter=a%23", "operator", 400),
        ("/streams/messages?per_s=0", "operator", 400),
        ("/streams/metrics?interval_ms=1", "viewer", 400),
    ):
        assert (await api(role).refused("GET", path))[0] == expected, path
    async with stream(broker, "metrics") as reader:
        await reader.line()
        broker.node.api.streams.close()
        assert await reader.line() is None
    status, why = await operator.refused("GET", "/streams/metrics")
    assert (status, "the node stops" in why) == (503, True)


async def test_head_gets_no_lines_of_a_stream(broker: Broker, api: Api) -> None:
    host, port = broker.node.admin.host, broker.node.admin.port
    reader, writer = await asyncio.open_connection(host, port)
    head = f"Host: {host}\r\nAuthorization: Bearer operator\r\n\r\n"
    writer.write(f"HEAD /api/v1/streams/messages HTTP/1.1\r\n{head}GET /healthz HTTP/1.1\r\n{head}".encode())
    async with asyncio.timeout(TIMEOUT_S):
        answers = [await reader.readuntil(b"\r\n\r\n") for _ in range(2)]
    writer.close()
    assert [answer.split(b"\r\n")[0] for answer in answers] == [b"HTTP/1.1 200 OK"] * 2
    assert [b"application/x-ndjson" in answer for answer in answers] == [True, False]
    assert await api("operator").status("HEAD", "/streams/messages?per_s=0") == 400


async def test_a_stream_makes_way_for_no_other_connection(broker: Broker, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adminsockets, "BUSY_S", 0.0)
    async with stream(broker, "metrics", interval_ms=500) as reader:
        await reader.line()
        sockets = broker.node._admin._sockets
        assert sockets is not None
        monkeypatch.setattr(sockets, "_connections_max", 2)
        idle = [await asyncio.open_connection(broker.node.admin.host, broker.node.admin.port) for _ in range(4)]
        await api("viewer").ok("GET", "/clients")
        assert sockets.closed_early >= 3
        assert await reader.line() is not None
        for _, writer in idle:
            writer.close()


async def test_a_stream_ends_when_its_caller_is_banned(broker: Broker, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "CHECK_S", 0.0)
    monkeypatch.setattr(streams, "STATE_S", 0.0)
    async with stream(broker, "messages") as reader:
        await reader.line()
        await api("admin").ok("POST", "/access/bans", {"kind": "user", "name": "operator"})
        while await reader.line() is not None:
            pass
    assert any(line["event"] == "refused" and line["user"] == "operator" for line in audited(broker))


async def test_a_caller_that_hangs_up_is_no_error_of_the_node(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = await broker.connect("device")
    async with stream(broker, "messages") as reader:
        await reader.line()
        ((connection, task),) = broker.node.api.streams._tasks.items()
        assert task is not None
        line_of = streams._tailed

        def lose_connection(message: MessageRead, body_bytes: int) -> TailedMessage:
            """The connection breaks just before a line is written to it."""
            assert connection.transport is not None
            connection.transport.abort()
            return line_of(message, body_bytes)

        monkeypatch.setattr(streams, "_tailed", lose_connection)
        await client.publish("plant", b"x", 1)
        await asyncio.wait([task], timeout=TIMEOUT_S)
    assert task.done()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_the_stop_of_a_node_ends_its_streams(tmp_path: Path) -> None:
    broker = await Broker(tmp_path, {}).start()
    async with stream(broker, "metrics", "", interval_ms=30_000) as reader:
        await reader.line()
        async with asyncio.timeout(TIMEOUT_S):
            await broker.stop()
        assert await reader.line() is None
