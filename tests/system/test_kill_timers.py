"""Delayed messages through `kill -9` of the node while they fire: each is delivered once."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from penstock import Client, OutgoingMessage
from tests.system.processes import NodeProcess

MESSAGES = 100_000
BATCH = 10_000
TOPICS = 7
KILLS_MAX = 5
FIRE_MAX = 16
"""Few at once, so that firing takes long enough for several kills."""


@pytest.mark.timeout(120)
async def test_each_of_100_000_is_delivered_once_although_the_node_is_killed_while_they_fire(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(f"[timer]\nfire_max = {FIRE_MAX}\n")
    options = ["--config", str(config)]
    node = NodeProcess(tmp_path / "data").start(*options)
    target = node.addresses["pop"]
    options += ["--pop", target]
    dice = random.Random(20)
    deliver_at_ms = int(time.time() * 1000) + 10_000
    async with Client(target) as client:
        await client.groups.create("g", "due/#")
        for first in range(0, MESSAGES, BATCH):
            numbers = range(first, first + BATCH)
            await client.send_batch(
                OutgoingMessage(topic=f"due/{number % TOPICS}", body=b"%d" % number, deliver_at_ms=deliver_at_ms)
                for number in numbers
            )
        kills, pending = 0, MESSAGES
        while pending == MESSAGES:
            pending = (await client.timers.count()).pending
        while pending:
            await asyncio.to_thread(node.kill)
            kills += 1
            await asyncio.to_thread(node.start, *options)
            await asyncio.sleep(dice.uniform(0, 0.2))  # a kill at any time while they fire
            pending = (await client.timers.count()).pending if kills < KILLS_MAX else 0
        assert kills > 1, "all had fired before the node could be killed"
        found: dict[int, list[int]] = {}
        while messages := await client.pop("due/#", group="g", messages_max=1_000, wait_ms=2_000):
            for message in messages:
                found.setdefault(int(message.topic.removeprefix("due/")), []).append(int(message.body))
            await client.ack([message.handle for message in messages], group="g")
    node.close()
    assert found == {topic: list(range(topic, MESSAGES, TOPICS)) for topic in range(TOPICS)}
