"""Consumers that don't read: memory stays bounded, and other clients are not disturbed."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios

import pytest

from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import PUBACK
from penstock.gateway.transport.listener import NOT_SENT_BYTES
from penstock.store.options import KIB, MIB
from tests.depth import DEPTH
from tests.gateway.brokers import StartBroker
from tests.gateway.wire import RECEIVE_BUFFER_BYTES, Broker, Client
from tests.waiting import until

BUFFER = 16 * KIB
BODY = 4 * KIB
MEMBERS = 40 * DEPTH


@pytest.mark.parametrize("qos", [0, 1])
async def test_subscribers_of_which_some_do_not_read_are_all_served(start_broker: StartBroker, qos: int) -> None:
    broker = await start_broker(send_buffer_bytes=BUFFER, segment_bytes=64 * MIB, inflight_max=65_535)
    clients: list[Client] = []
    slow: dict[str, Client] = {}
    for n in range(MEMBERS):
        name = f"{n}"
        client = await (broker.connect_5(name) if n % 2 else broker.connect(name))
        await client.subscribe(("a", qos))
        if n % 10 == 0 or n % 10 == 5:
            broker.limit_send_buffer(name)
            client.stop_reading()
            slow[name] = client
        else:
            clients.append(client)
    publisher = await broker.connect("publisher")
    count, batch = 120, 10
    peak = 0
    for first in range(0, count, batch):
        bodies = [b"%08d" % n + b"x" * BODY for n in range(first, first + batch)]
        await publisher.send(*(encode_publish(b"a", body, 1, packet_id=n) for n, body in enumerate(bodies, 1)))
        for _ in bodies:
            assert (await publisher.receive())[0] == PUBACK
        for client in clients:
            for n in range(first, first + batch):
                found = await client.receive()
                assert int(found[4][:8]) == n
        peak = max(peak, *(broker.unsent_bytes(name) for name in slow))
    # The buffer holds up to its high-water mark and the batch that exceeded the mark, whatever was published since.
    assert peak < BUFFER + (batch + 1) * (BODY + 64)
    for name in slow:
        (subscription,) = broker.connection(name).subscriptions.by_filter.values()
        assert not subscription.live
    assert await publisher.drained() == []

    async def catch_up(client: Client) -> None:
        client.go_on_reading()
        assert [int((await client.message()).body[:8]) for _ in range(count)] == list(range(count))

    await asyncio.gather(*(catch_up(client) for client in slow.values()))
    await until(lambda: all(one.live for name in slow for one in broker.connection(name).subscriptions.by_filter.values()))


def bytes_in_kernel(broker: Broker, client_id: str) -> int:
    """Return how many bytes for a client the kernel holds at the node's end, sent or not."""
    transport = broker.connection(client_id)._transport
    assert transport is not None
    found = fcntl.ioctl(transport.get_extra_info("socket"), termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(found, sys.byteorder)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what it holds for a socket")
async def test_the_kernel_buffers_little_for_a_client_that_does_not_read(start_broker: StartBroker) -> None:
    broker = await start_broker()
    client = await broker.connect("slow")
    await client.subscribe(("a", 0))
    client.stop_reading()
    publisher = await broker.connect("publisher")
    peak = 0
    for first in range(0, 2_000, 100):  # 8 MB. Without a bound the kernel would buffer 4 MB of them.
        await publisher.send(*(encode_publish(b"a", b"%08d" % n + b"x" * BODY) for n in range(first, first + 100)))
        await publisher.send(encode_publish(b"b", b"", 1, packet_id=1))
        assert (await publisher.receive())[0] == PUBACK
        peak = max(peak, bytes_in_kernel(broker, "slow"))
    assert NOT_SENT_BYTES <= peak <= 2 * NOT_SENT_BYTES + 2 * RECEIVE_BUFFER_BYTES
    client.go_on_reading()
    assert [int((await client.message()).body[:8]) for _ in range(2_000)] == list(range(2_000))
