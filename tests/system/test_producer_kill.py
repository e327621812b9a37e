"""A producer goes on through `kill -9` of the node, and nothing is lost or stored twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock import Client, OutgoingMessage
from tests.system.processes import NodeProcess

pytestmark = pytest.mark.nightly

MESSAGES = 6_000
KILLS = 2


async def test_a_producer_sends_each_message_once_although_the_node_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = NodeProcess(tmp_path / "data").start()
    target = node.addresses["pop"]
    async with Client(target) as client, client.producer(batch_max=100, buffer_max=300) as producer:
        for number in range(MESSAGES):
            answer = await producer.post(OutgoingMessage(topic=f"orders/{number % 7}", body=b"%d" % number))
            if number % (MESSAGES // (KILLS + 1)) == MESSAGES // (KILLS + 1) - 1 and number < MESSAGES - 1:
                await asyncio.to_thread(node.kill)
                await asyncio.to_thread(node.start, "--pop", target)
        await producer.flush()
        assert answer.result().message_id
        found: dict[str, list[int]] = {}
        while messages := await client.pop("orders/#", group="orders", messages_max=1_000, wait=0.2):
            for message in messages:
                found.setdefault(message.topic, []).append(int(message.body))
            await client.ack([message.handle for message in messages], group="orders")
    node.close()
    assert caplog.text.count("messages again in") >= KILLS, "calls were under way when the node died"
    assert found == {f"orders/{rest}": list(range(rest, MESSAGES, 7)) for rest in range(7)}
