"""A connection that has ended leaves nothing to the garbage collector, whose passes hold up everybody."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from penstock.gateway.protocol.encode import encode_publish
from tests.gateway.packet_cases_5 import connect_5, subscribe_5
from tests.gateway.wire import CLEAN, PING, Broker
from tests.waiting import until

CONNECTED = connect_5(CLEAN, b"c")

PUBLISHED = encode_publish(b"a/b", b"", 1, packet_id=1, properties=b"\0")

STREAMS = {
    "packet too large": b"\x10\xff\xff\xff\x7f" + bytes(100),
    "no CONNECT": PING,
    "malformed CONNECT": b"\x10\x02\x00\x09",
    "unknown protocol": connect_5(CLEAN, b"c").replace(b"MQTT\x05", b"MQTT\x09"),
    "malformed length": CONNECTED + b"\x30\xff\xff\xff\xff\xff",
    "reserved type": CONNECTED + b"\x00\x00",
    "second CONNECT": CONNECTED + CONNECTED,
    "invalid topic": CONNECTED + encode_publish(b"a/#", b"", properties=b"\0"),
    "invalid properties": CONNECTED + encode_publish(b"a", b"", properties=b"\x02\x99\x99"),
    "SUBSCRIBE without filters": CONNECTED + subscribe_5(1),
    "orderly": CONNECTED + subscribe_5(1, (b"a/#", 1)) + PUBLISHED + b"\xe0\x00",
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Let no garbage be collected."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_a_connection_that_the_server_ends_is_freed_at_once(broker: Broker, no_collector: None) -> None:
    for stream in STREAMS.values():
        client = await broker.dial_5()
        await until(lambda: bool(broker.node.gateway.connections))
        (left,) = map(weakref.ref, broker.node.gateway.connections)
        await client.send(stream)
        await until(lambda: not broker.node.gateway.connections)
        client.writer.close()
        await until(lambda left=left: left() is None)  # type: ignore[misc]
