"""kill -9 under a shared subscription: each message that was acknowledged to its publisher reaches a member."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from random import Random

import pytest

from penstock import Client as PopClient
from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.packets import PUBACK, PUBLISH
from tests.gateway.packet_cases import connect
from tests.gateway.wire import ANSWER_S_MAX, Client
from tests.system.processes import NodeProcess

pytestmark = pytest.mark.nightly

ROUNDS = int(os.environ.get("PENSTOCK_KILL_ROUNDS", "3"))
MEMBERS = 3
WINDOW = 100
ACK_TIMEOUT_MS = 300


async def client_of(node: NodeProcess, client_id: str) -> Client:
    client = Client(*await asyncio.open_connection("127.0.0.1", node.port("mqtt")))
    await client.send(connect(2, client_id.encode()))
    assert await client.receive()
    return client


async def publish_until_killed(node: NodeProcess, first: int, acked: set[int]) -> int:
    """Publish numbered messages and note which were acknowledged, until the connection ends; return the next number."""
    client = await client_of(node, "publisher")
    number = first
    while True:
        sent = range(number, number + WINDOW)
        number += WINDOW
        with suppress(ConnectionError):
            await client.send(*(encode_publish(b"kill/%d" % (n % 7), b"%d" % n, 1, packet_id=1 + n % WINDOW) for n in sent))
        for n in sent:
            packet = await client.receive()
            if not packet:
                return number
            assert packet == (PUBACK, 1 + n % WINDOW)
            acked.add(n)


async def share_until_killed(node: NodeProcess, name: str, got: set[int], chance: Random) -> None:
    """Share a subscription and acknowledge most messages until the connection ends."""
    client = await client_of(node, name)
    with suppress(ConnectionError):
        assert await client.subscribe(("$share/g/kill/#", 1)) == [1]
        while packet := await client.receive():
            if packet[0] == PUBLISH and chance.random() < 0.98:
                got.add(int(packet[4]))
                await client.send(encode_acks(PUBACK, [packet[3]]))


async def test_members_get_all_that_was_acknowledged(node: NodeProcess) -> None:
    chance = Random(7)
    config = node.data_dir.with_suffix(".toml")
    config.write_text(f'[mqtt]\nshare_ack_timeout = "{ACK_TIMEOUT_MS}ms"\n')
    node.start("--config", str(config))
    async with PopClient(node.addresses["pop"]) as pop:
        await pop.groups.create("g", "kill/#")
    acked: set[int] = set()
    got: set[int] = set()
    number = 0
    for _ in range(ROUNDS):
        sharing = [asyncio.create_task(share_until_killed(node, f"member-{n}", got, chance)) for n in range(MEMBERS)]
        publishing = asyncio.create_task(publish_until_killed(node, number, acked))
        await asyncio.sleep(chance.uniform(0.2, 1.0))
        node.kill()
        number = await publishing
        await asyncio.gather(*sharing)
        node.start("--config", str(config))
    sharing = [asyncio.create_task(share_until_killed(node, f"member-{n}", got, chance)) for n in range(MEMBERS)]
    async with asyncio.timeout(ANSWER_S_MAX):
        while not acked <= got:  # noqa: ASYNC110 - filled by the tasks
            await asyncio.sleep(0.01)
    for task in sharing:
        task.cancel()
    await asyncio.gather(*sharing, return_exceptions=True)
    assert len(acked) > WINDOW
    assert max(got) < number
