"""The drain: clients are refused and sent away, consumers finish what they have, and the node stops."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from penstock.cluster.options import ReplicationOptions
from penstock.gateway.options import GatewayOptions
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.node.adminoptions import AdminOptions
from penstock.node.config import Config
from penstock.node.draining import DrainState
from penstock.node.node import Node
from penstock.pop.client.client import Client
from penstock.pop.options import PopOptions
from penstock.store.options import HostPort
from tests.gateway.wire import Broker
from tests.waiting import until


async def test_a_drain_refuses_new_clients_sends_others_away_and_lets_consumers_finish(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await Broker(tmp_path / "data", {}).start()
    node = broker.node
    try:
        devices = [await broker.connect_5(f"device-{number}") for number in range(3)]
        await devices[0].subscribe(("$share/others/other/#", 1))
        async with Client(str(node.grpc)) as consumer, aiohttp.ClientSession(f"http://{node.admin}") as http:
            await consumer.send("plant/1", b"71.5")
            [message] = await consumer.pop("#", group="billing", wait=5)
            waiting = asyncio.create_task(consumer.pop("#", group="billing", wait=60))
            await until(lambda: node.pop.waiting == 2)  # the shared subscription waits, too
            drained = node.draining.begin(60.0)
            assert node.draining.begin(0.0) is drained, "a node drains once"
            assert [await device.disconnected() for device in devices] == [(ReasonCode.SERVER_SHUTTING_DOWN, [])] * 3
            assert await waiting == [], "whoever waits for a message hears at once that there is none"
            late = await broker.connect_5("late", accepted=False)
            assert (await late.connack())[0] == ReasonCode.SERVER_UNAVAILABLE
            async with http.get("/readyz") as response:
                assert response.status == 503
            await consumer.send("plant/1", b"72.0")
            assert await consumer.pop("#", group="billing", wait=60) == [], "nothing more is handed out"
            async with http.get("/api/v1/drain") as response:
                assert await response.json() == {"state": "draining", "clients": 0, "checkpoints": 1}
            await message.ack()
            await drained
            assert node.draining.state is DrainState.DRAINED
        assert caplog.records == [], "no callback of the loop has failed"
    finally:
        await broker.stop()


async def test_a_drain_ends_when_its_time_is_over(tmp_path: Path) -> None:
    broker = await Broker(tmp_path / "data", {}).start()
    try:
        async with Client(str(broker.node.grpc)) as consumer:
            await consumer.send("plant/1", b"71.5")
            await consumer.pop("#", group="billing", wait=5)
            await broker.node.draining.begin(0.1)
            assert broker.node.draining.deliveries == 1
    finally:
        await broker.stop()


async def test_a_follower_has_nobody_to_send_away(tmp_path: Path) -> None:
    free = HostPort("127.0.0.1", 0)
    config = Config(
        tmp_path,
        mqtt=GatewayOptions(listen=free),
        pop=PopOptions(listen=free),
        admin=AdminOptions(listen=free),
        replication=ReplicationOptions("drained", ("127.0.0.1:1",), listen=free),  # nobody is there, so it waits
    )
    node = Node(config)
    await node.start()
    try:
        await node.draining.begin(60.0)
        assert node.draining.state is DrainState.DRAINED
    finally:
        await node.stop()
