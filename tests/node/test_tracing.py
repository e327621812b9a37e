"""The trace context of a publisher goes through the log to consumers of every protocol."""

from __future__ import annotations

from pathlib import Path

from penstock import Client
from penstock.gateway.protocol.properties import Property
from tests.gateway.wire import Broker

TRACED = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "vendor=1"}


async def test_a_trace_goes_from_mqtt_to_pop_and_back_and_survives_a_crash(tmp_path: Path) -> None:
    broker = await Broker(tmp_path / "data", {}).start()
    device = await broker.connect_5("device")
    assert await device.publish_with("a", b"21.5", {Property.USER_PROPERTY: list(TRACED.items())}, qos=1) == 0
    await broker.kill()
    display = await broker.connect_5("display")
    await display.subscribe(("b", 1))
    async with Client(str(broker.node.grpc)) as client:
        (message,) = await client.pop("a", group="billing", wait=5.0)
        assert message.properties == TRACED
        await client.send("b", b"x", properties=message.properties)
    shown, about = await display.message_with()
    assert (shown.body, dict(about[Property.USER_PROPERTY])) == (b"x", TRACED)
    await broker.stop()
