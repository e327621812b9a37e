"""TLS and plain text on the one port of the gRPC listener."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from penstock.pop.access.caller import address_of
from penstock.pop.front import Front
from penstock.pop.grpc.calls import Context
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.options import MIB, HostPort, OptionInvalid
from tests.pop.wiring import TOPIC, Node, stub_of

BOTH = PopOptions(tls_optional=True)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path / "data", pop=BOTH) as started:
        yield started


def certificate_of(node: Node) -> bytes:
    return ssl.get_server_certificate(("127.0.0.1", node.port)).encode()


async def channels(node: Node) -> dict[str, grpc.aio.Channel]:
    """Return a channel with TLS, and one without, to the same port."""
    roots = await asyncio.to_thread(certificate_of, node)
    options = [("grpc.ssl_target_name_override", "localhost"), ("grpc.max_receive_message_length", -1)]
    return {
        "tls": grpc.aio.secure_channel(node.target, grpc.ssl_channel_credentials(roots), options),
        "plain": grpc.aio.insecure_channel(node.target, options[1:]),
    }


async def send(channel: grpc.aio.Channel, *bodies: bytes) -> None:
    answer = await stub_of(channel).Send(
        pb.SendRequest(messages=[pb.Message(topic=TOPIC, body=body) for body in bodies]), wait_for_ready=True
    )
    assert [result.status.code for result in answer.results] == [pb.OK] * len(bodies)


async def pop(channel: grpc.aio.Channel, group: str) -> list[bytes]:
    popped = await stub_of(channel).Pop(pb.PopRequest(filter=TOPIC, group=group, messages_max=100, wait_ms=60_000))
    return [message.body for message in popped.messages]


async def test_clients_with_tls_and_without_use_one_port(node: Node) -> None:
    for kind, channel in (await channels(node)).items():
        async with channel:
            await send(channel, kind.encode())
            assert (await pop(channel, kind))[-1] == kind.encode()


async def test_bodies_larger_than_any_buffer_pass_in_both_directions(node: Node) -> None:
    large = [os.urandom(3 * MIB) for _ in range(2)]
    for kind, channel in (await channels(node)).items():
        async with channel:
            await asyncio.gather(*(send(channel, body) for body in large))
            found: list[bytes] = []
            while len(found) < len(large):
                found += await pop(channel, kind)
            assert sorted(found[: len(large)]) == sorted(large)


async def test_calls_are_known_by_the_address_of_their_client(tmp_path: Path) -> None:
    (tmp_path / "access.toml").write_text('[[principal]]\nname = "a"\naccess_key = "k"\naccess_secret = "s"\n')
    audit = tmp_path / "audit.jsonl"
    async with Node(tmp_path / "data", pop=BOTH, access=tmp_path / "access.toml", audit=audit) as node:
        for channel in (await channels(node)).values():
            async with channel:
                with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                    await pop(channel, "billing")
    refused = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [note["address"] for note in refused if note["event"] == "refused"] == ["127.0.0.1"] * 2


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("unix-abstract:penstock-0f:10.0.0.7:4711", "10.0.0.7"),
        ("unix-abstract:penstock-0f:2001:db8::1:4711", "2001:db8::1"),
        ("unix:", ""),
    ],
)
def test_the_address_is_in_the_name_of_the_socket(peer: str, address: str) -> None:
    class CallContext:
        def peer(self) -> str:
            return peer

    assert address_of(cast(Context, CallContext())) == address


async def test_the_process_is_started_again_when_it_dies(node: Node) -> None:
    front: Any = node._server._front if node._server is not None else None
    killed = front._process
    killed.send_signal(signal.SIGKILL)
    await node.until(lambda: front._process is not killed)
    async with grpc.aio.insecure_channel(node.target) as channel:
        await send(channel, b"after")
        assert await pop(channel, "billing") == [b"after"]


async def test_the_process_ends_with_the_node_and_leaves_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path / "data", pop=BOTH)
    await node.start()
    front: Any = node._server._front if node._server is not None else None
    async with grpc.aio.insecure_channel(node.target) as channel:
        await send(channel, b"a")
        await node.stop()
    assert front._process.poll() == 0
    assert not os.path.exists(front._directory)  # noqa: ASYNC240 - once, in a test
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", node.port), 5)


async def test_connections_that_send_nothing_or_are_too_many_are_closed() -> None:
    front = Front(HostPort("127.0.0.1", 0), connections_max=2, silent_ms=300)
    port = await front.start()
    try:

        def outcome() -> list[bytes]:
            ends = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(3)]
            try:
                return [end.recv(1) for end in ends]  # the end of the connection
            finally:
                for end in ends:
                    end.close()

        assert await asyncio.to_thread(outcome) == [b""] * 3
    finally:
        await front.stop()


async def test_a_port_in_use_is_an_error_that_names_it(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pop.front.BIND_TRIES", 2)
    other = Node(tmp_path / "other", pop=BOTH)
    with pytest.raises(OSError, match=f"can't listen on 127.0.0.1:{node.port}"):
        await other.start(node.port)
    await other.stop()


async def test_plain_text_beside_required_certificates_is_refused(tmp_path: Path) -> None:
    node = Node(tmp_path / "data", pop=PopOptions(tls_optional=True, client_ca_file="ca.pem"))
    with pytest.raises(OptionInvalid, match="client_ca_file"):
        await node.start()
    await node.stop()
