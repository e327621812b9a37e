"""Clients that connect to a node that follows: it relays them to the leader."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from penstock import Client as PopClient
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import PUBACK, PUBLISH
from tests.cluster.etcdserver import free_port
from tests.gateway.certificates import Authority
from tests.gateway.packet_cases import connect, subscribe
from tests.gateway.wire import Client
from tests.system.clusternodes import ClusterNode, cluster_of_nodes

pytestmark = pytest.mark.nightly


async def mqtt(node: ClusterNode, client_id: bytes, *, clean: bool = True) -> Client:
    """Return an MQTT client that is connected to a node."""
    client = Client(*await asyncio.open_connection("127.0.0.1", node.ports["mqtt"]))
    await client.send(connect(2 if clean else 0, client_id))
    assert await client.receive()
    return client


async def metrics(node: ClusterNode) -> dict[str, float]:
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"http://127.0.0.1:{node.ports['admin']}/metrics")).text
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("penstock_replication"))
    return {name: float(value) for name, _, value in lines}


async def test_a_follower_serves_clients_of_mqtt_and_of_pop(tmp_path: Path) -> None:
    with cluster_of_nodes(tmp_path) as cluster:
        await cluster.in_sync(3)
        leader, (one, other) = await cluster.leader(), await cluster.followers()
        reader = await mqtt(one, b"reader")
        await reader.send(subscribe(1, (b"plant/#", 1)))
        assert await reader.receive()
        writer = await mqtt(other, b"writer")
        bodies = [b"%d" % number for number in range(500)]
        await writer.send(*(encode_publish(b"plant/1", body, 1, packet_id=number) for number, body in enumerate(bodies, 1)))
        for number in range(1, 501):
            assert await writer.receive() == (PUBACK, number)
        got = []
        for _ in bodies:
            packet = await reader.expect(PUBLISH)
            got.append(bytes(packet[-1]))
        assert sorted(got) == sorted(bodies)
        async with PopClient(f"127.0.0.1:{one.ports['pop']}") as pop:
            await pop.send("plant/2", b"by a follower")
            taken = set[bytes]()
            while len(taken) < 501:
                messages = await pop.pop("plant/#", group="audit", start="earliest", wait=1.0)
                taken |= {each.body for each in messages}
                await pop.ack([each.handle for each in messages], group="audit")
        assert b"by a follower" in taken
        counted = 'penstock_replication_relayed_connections{direction="%s"}'
        assert (await metrics(leader))[counted % "from_followers"] >= 2
        assert (await metrics(one))[counted % "to_leader"] >= 1
        seen = await metrics(leader)
        assert seen['penstock_replication_role{cluster="test",role="leading"}'] == 1
        assert seen["penstock_replication_in_sync"] == 3
        assert seen["penstock_replication_coordinator_reachable"] == 1
        assert len([name for name in seen if name.startswith("penstock_replication_follower_lag_bytes{")]) == 2
        assert (await one.state())["listen"]["mqtt"] == f"127.0.0.1:{one.ports['mqtt']}"


async def test_a_client_of_a_follower_goes_on_at_the_same_address_when_the_leader_dies(tmp_path: Path) -> None:
    with cluster_of_nodes(tmp_path) as cluster:
        await cluster.in_sync(3)
        leader, (follower, _) = await cluster.leader(), await cluster.followers()
        client = await mqtt(follower, b"device", clean=False)
        await client.send(subscribe(1, (b"plant/#", 1)))
        assert await client.receive()
        leader.kill()
        async with asyncio.timeout(20):
            while await client.receive():
                pass
            while True:  # as clients do: connect again, to the same address
                with suppress(OSError, AssertionError):
                    client = await mqtt(follower, b"device", clean=False)
                    break
                await asyncio.sleep(0.05)
        await client.send(encode_publish(b"plant/1", b"after", 1, packet_id=7))
        packets = [await client.receive(), await client.receive()]
        assert (PUBACK, 7) in packets
        assert any(packet[0] == PUBLISH for packet in packets), "the session and its subscription are still there"


async def test_replicas_and_clients_may_speak_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue_client("replica")
    ports = iter([free_port() for _ in range(3)])

    def more(_: str) -> str:
        return (
            f"certificate_file = {json.dumps(str(certificate))}\nkey_file = {json.dumps(str(key))}\n"
            f"ca_file = {json.dumps(str(authority.file))}\n"
            f'[[mqtt.listeners]]\nname = "tls"\nkind = "tls"\nlisten = "127.0.0.1:{next(ports)}"\n'
            f"certificate_file = {json.dumps(str(authority.certificate))}\nkey_file = {json.dumps(str(authority.key))}\n"
        )

    with cluster_of_nodes(tmp_path, more=more) as cluster:
        await cluster.in_sync(3)
        follower = (await cluster.followers())[0]
        port = int((await follower.state())["listen"]["mqtt.tls"].rpartition(":")[2])
        context = authority.context()
        streams = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
        assert isinstance(streams[1].get_extra_info("ssl_object"), ssl.SSLObject)
        client = Client(*streams)
        await client.send(connect(2, b"device"))
        assert await client.receive()
        await client.send(*(encode_publish(b"plant/1", b"x" * 10_000, 1, packet_id=number) for number in range(1, 101)))
        for number in range(1, 101):
            assert await client.receive() == (PUBACK, number)
        plain = await mqtt(follower, b"other")
        await plain.send(encode_publish(b"plant/1", b"plain", 1, packet_id=1))
        assert await plain.receive() == (PUBACK, 1)
        stranger = FrameSocket(*await asyncio.open_connection("127.0.0.1", (await cluster.leader()).ports["replication"]))
        assert await stranger.answer(b"\x10\x0c") == b"", "nobody without a certificate of a replica is heard"


class FrameSocket:
    """A connection to a listener for replicas."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def answer(self, data: bytes) -> bytes:
        """Send bytes, and return all that comes until the connection ends, without an alert of TLS."""
        self._writer.write(data)
        got = b""
        with suppress(ConnectionError):
            async with asyncio.timeout(20):
                got = await self._reader.read()
        self._writer.close()
        return b"" if got[:1] == b"\x15" else got
