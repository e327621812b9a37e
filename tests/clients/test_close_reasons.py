"""Real clients that are disconnected in the middle of sending learn why."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.gateway.protocol.reasons import ReasonCode
from penstock.store.options import KIB, MIB
from tests.clients.mqtt_drivers import DRIVERS, Driver, MqttJs
from tests.gateway.wire import ANSWER_S_MAX, Broker

CLIENTS = 3


async def reason_after(client: Driver, port: int, client_id: str, body: bytes, count: int) -> int:
    """Connect, publish `count` messages at once, and return the reason with which the node disconnects the client."""
    assert (await client.connect(port, client_id)).code == 0
    publishing = [asyncio.create_task(client.publish("a", body)) for _ in range(count)]
    async with asyncio.timeout(ANSWER_S_MAX):
        reason = await client.disconnected()
    for task in publishing:
        task.cancel()
    return reason


@pytest.mark.slow
@pytest.mark.parametrize("make", [pytest.param("MQTT.js", marks=pytest.mark.nightly), "paho-mqtt"])
async def test_a_client_that_sends_a_packet_that_is_too_large_learns_it(tmp_path: Path, make: str) -> None:
    DRIVERS[make].skip_where_missing()
    broker = await Broker(tmp_path / "data", {"packet_bytes_max": 16 * KIB}).start()
    clients: list[Driver] = [DRIVERS[make](5) for _ in range(CLIENTS)]
    reasons = [
        await reason_after(client, broker.node.mqtt.port, f"c{number}", bytes(MIB), 1) for number, client in enumerate(clients)
    ]
    for client in clients:
        await client.close()
    await broker.stop()
    assert reasons == [ReasonCode.PACKET_TOO_LARGE] * CLIENTS


@pytest.mark.nightly
async def test_mqttjs_learns_that_it_has_sent_more_than_the_receive_maximum(tmp_path: Path) -> None:
    MqttJs.skip_where_missing()
    broker = await Broker(tmp_path / "data", {"inflight_max": 10}).start()
    clients = [MqttJs(5) for _ in range(CLIENTS)]
    reasons = [
        await reason_after(client, broker.node.mqtt.port, f"c{number}", bytes(KIB), 2000)
        for number, client in enumerate(clients)
    ]
    for client in clients:
        await client.close()
    await broker.stop()
    assert reasons == [ReasonCode.RECEIVE_MAXIMUM_EXCEEDED] * CLIENTS
