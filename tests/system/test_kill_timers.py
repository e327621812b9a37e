"""Delayed messages through `kill -9` of the node while they fire: each is delivered once."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from penstock import Client, OutgoingMessage
from tests.bounds import variable_of
from tests.system.processes import NodeProcess

pytestmark = pytest.mark.nightly

MESSAGES = 100_000
BATCH = 10_000
TOPICS = 7
KILLS_MAX = 5
FIRE_MAX = 16
"""Few at once, so that firing takes long enough for several kills."""


WAITS_S = (10, 40)
"""Seconds until the messages are due. The second one is for a machine that has much else to do."""


async def _store_delayed(client: Client, wait_s: int) -> bool:
    """Store all messages; return whether that was done before they were due."""
    deliver_at_ms = int(time.time() * 1000) + wait_s * 1000
    await client.groups.create("g", "due/#")
    for first in range(0, MESSAGES, BATCH):
        numbers = range(first, first + BATCH)
        await client.send_batch(
            OutgoingMessage(topic=f"due/{number % TOPICS}", body=b"%d" % number, deliver_at_ms=deliver_at_ms)
            for number in numbers
        )
    return time.time() * 1000 < deliver_at_ms


@pytest.mark.timeout(240)
async def test_each_of_100_000_is_delivered_once_although_the_node_is_killed_while_they_fire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*variable_of(timer__fire_max=FIRE_MAX).popitem())
    for wait_s in WAITS_S:
        options: list[str] = []
        node = NodeProcess(tmp_path / f"data-{wait_s}").start(*options)
        target = node.addresses["pop"]
        options += ["--pop", target]
        async with Client(target) as client:
            if await _store_delayed(client, wait_s):
                found = await _fire_and_kill(client, node, options)
                break
        node.close()
    else:
        pytest.fail(f"{MESSAGES} messages could not be stored in {WAITS_S[-1]} s")
    node.close()
    assert found == {topic: list(range(topic, MESSAGES, TOPICS)) for topic in range(TOPICS)}


async def _fire_and_kill(client: Client, node: NodeProcess, options: list[str]) -> dict[int, list[int]]:
    """Kill the node while the messages fire; return the numbers of what came, by topic."""
    dice = random.Random(20)
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
    while messages := await client.pop("due/#", group="g", messages_max=1_000, wait=2.0):
        for message in messages:
            found.setdefault(int(message.topic.removeprefix("due/")), []).append(int(message.body))
        await client.ack([message.handle for message in messages], group="g")
    return found
