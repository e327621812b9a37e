"""Responses whose callers do not read them: they have a bounded number of bytes, and others are served."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection
from itertools import count
from pathlib import Path

import pytest

from penstock import Client
from penstock.pop.core.polls import Unsynced
from penstock.pop.grpc import responsebytes
from penstock.pop.grpc.consumestream import UNSENT_BYTES_MAX, ConsumeStream, StreamTerms
from penstock.pop.grpc.peersockets import shut_down
from penstock.pop.grpc.responsebytes import ResponseBytes
from penstock.pop.options import PopOptions
from penstock.store.options import MIB
from penstock.store.space.causer import Causer
from tests.pop.unreading import Unreading
from tests.pop.wiring import FILTER, TOPIC, Node, Parts
from tests.waiting import WAIT_S_MAX, until


@pytest.mark.nightly
async def test_connections_that_come_again_and_again_and_read_nothing_harm_nobody(tmp_path: Path) -> None:
    async with Node(tmp_path / "data", pop=PopOptions(responses_bytes_max=16 * MIB)) as node:
        assert node._server is not None
        responses, most, numbers = node._server.responses, 0, count()

        async def flood(topic: str) -> None:
            nonlocal most
            while True:
                unreading = await Unreading.to(node.port)
                for _ in range(6):
                    unreading.consume(f"flood-{next(numbers)}", topic)
                    unreading.pop(f"flood-{next(numbers)}", topic, wait_ms=60_000)
                    unreading.pop(f"flood-{next(numbers)}", topic, wait_ms=60_000)
                await node.until(lambda: node.core.waiting >= 18)
                for _ in range(3):
                    node.publish(bytes(900_000), topic=topic)
                most = max(most, responses.used)
                await unreading.ended()
                unreading.close()

        async with asyncio.timeout(WAIT_S_MAX):
            floods = [asyncio.create_task(flood(f"flood/{number}")) for number in range(3)]
            await until(lambda: responses.ended >= 6)
            for each in floods:
                each.cancel()
            await asyncio.wait(floods)
        assert most <= 16 * MIB + 3 * MIB


def publish(node: Parts, count: int) -> None:
    for _ in range(count):
        node.publish(bytes(900_000))


@pytest.mark.parametrize("tls_optional", [False, True], ids=["direct", "behind the front"])
async def test_a_caller_that_reads_no_responses_loses_its_connection_and_others_are_served(
    tmp_path: Path, tls_optional: bool
) -> None:
    pop = PopOptions(responses_bytes_max=16 * MIB, tls_optional=tls_optional)
    async with Node(tmp_path / "data", pop=pop) as node:
        publish(node, 3)
        assert node._server is not None
        responses = node._server.responses
        unreading = await Unreading.to(node.port)
        for number in range(6):
            unreading.pop(f"unread-{number}", FILTER)
        await node.until(lambda: responses.used > 15 * MIB)
        async with Client(node.target) as client:
            assert len(await client.pop(FILTER, group="honest", messages_max=3)) == 3  # there is no room for them besides
            async with asyncio.timeout(WAIT_S_MAX):
                await unreading.ended()
            assert len(await client.pop(FILTER, group="honest-2", messages_max=3)) == 3
        assert responses.ended == 1
        await node.until(lambda: responses.used == 0)
        unreading.close()


async def test_whoever_has_most_unread_loses_the_connection_with_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responsebytes, "HOLD_S", 0.01)
    closed: list[set[str]] = []
    is_closed = asyncio.Event()

    async def close(peers: Collection[str]) -> None:
        closed.append(set(peers))
        await is_closed.wait()

    unsynced = Unsynced(lambda _: None, lambda _: None, 100)
    responses = ResponseBytes(100, close, unsynced)
    much, little = Causer.of("much", "192.0.2.1"), Causer.of("little", "192.0.2.1")
    responses.add(much, "old", 30)
    small = responses.add(little, "honest", 20)
    responses.add(much, "old", 5)
    responses.add(much, "new", 40)
    responses.add(little, "honest", 10)  # more than there is room for
    await until(lambda: closed)
    assert closed == [{"old"}]
    assert not unsynced.fits(much), "it gets nothing for a while after its connection was closed"
    assert unsynced.fits(little)
    is_closed.set()
    await until(lambda: unsynced.fits(much))
    assert (responses.used, responses.ended) == (20 + 40 + 10, 1)
    responses.remove(small)
    responses.remove(small)
    assert responses.used == 50


@pytest.mark.parametrize(("host", "begin"), [("127.0.0.1", "ipv4:127.0.0.1:"), ("::1", "ipv6:[::1]:")])
async def test_only_the_connections_of_a_peer_to_the_listener_are_shut_down(host: str, begin: str) -> None:
    def connected(listening: socket.socket) -> tuple[socket.socket, socket.socket]:
        client = socket.create_connection(listening.getsockname()[:2])
        return client, listening.accept()[0]

    def listen() -> socket.socket:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)

    with listen() as ours, listen() as other:
        port = ours.getsockname()[1]
        pairs = [connected(ours), connected(ours), connected(other)]
        clients = [client for client, _ in pairs]
        peers = [f"{begin}{client.getsockname()[1]}".replace("[", "%5B").replace("]", "%5D") for client in clients]
        files = len(os.listdir("/proc/self/fd"))
        assert await shut_down([peers[0], peers[2], "ipv4:192.0.2.1:1"], port) == 1
        assert len(os.listdir("/proc/self/fd")) == files
        assert clients[0].recv(1) == b""
        for client in clients[1:]:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(1)
        for connection in (each for pair in pairs for each in pair):
            connection.close()


async def test_a_stream_pops_no_more_than_its_client_reads(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "data")
    publish(parts, 12)
    group = parts.group()
    parts.store.start(asyncio.get_running_loop(), lambda error: pytest.fail(str(error)))
    stream = ConsumeStream(parts.core, parts.store.when_durable, parts.handles, group, StreamTerms(1_000, 1, 60_000))
    stream.pop_more()
    async with asyncio.timeout(WAIT_S_MAX):
        while len(stream.outbox) < 4:
            await stream.wake.wait()
            stream.wake.clear()
        assert group.in_flight == 4, "the first that exceed the bound are the last"
        while group.in_flight < 12:
            if stream.outbox:
                stream.sent()
            await asyncio.sleep(0)
    stream.end(give_back=True, is_broken=False)
    await parts.store.close()


async def test_a_stream_reads_no_requests_while_its_client_does_not_read_the_reports(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "data")
    parts.store.start(asyncio.get_running_loop(), lambda error: pytest.fail(str(error)))
    stream = ConsumeStream(parts.core, parts.store.when_durable, parts.handles, parts.group(), StreamTerms(1, 1, 60_000))
    reports = 0
    async with asyncio.timeout(WAIT_S_MAX):
        while True:
            stream.ack(["forged"] * 1_000, [])
            reports += 1
            assert reports < UNSENT_BYTES_MAX // 10_000, "no end of them"
            waiting = asyncio.create_task(stream.has_room())
            await asyncio.sleep(0)
            if not waiting.done():
                break
        await until(lambda: len(stream.outbox) == reports)
        stream.sent()
        await waiting
    stream.end(give_back=True, is_broken=False)
    await parts.store.close()


async def test_a_message_of_a_topic_is_read_by_a_client_of_a_stream_that_was_full(tmp_path: Path) -> None:
    async with Node(tmp_path / "data") as node, Client(node.target) as client:
        publish(node, 12)
        seen = 0
        async with asyncio.timeout(WAIT_S_MAX), client.stream(FILTER, group="slow") as messages:
            async for message in messages:
                assert message.topic == TOPIC
                message.ack()
                seen += 1
                if seen == 12:
                    break
