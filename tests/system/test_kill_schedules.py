"""Schedules through `kill -9` of the node: each occurrence is sent once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from penstock import Client
from tests.system.processes import NodeProcess

pytestmark = pytest.mark.nightly

SCHEDULES = 5
EVERY_MS = 100
KILLS = 4


async def test_each_occurrence_is_sent_once_although_the_node_is_killed_again_and_again(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path / "data").start()
    target = node.addresses["pop"]
    dice = random.Random(7)
    async with Client(target) as client:
        for number in range(SCHEDULES):
            await client.schedules.create(f"s{number}", f"beats/{number}", b"x", every=EVERY_MS / 1000, missed="all")
        for _ in range(KILLS):
            await asyncio.sleep(dice.uniform(0.1, 0.6))  # a kill at any time, also while some of them are sent
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start, "--pop", target)
        for number in range(SCHEDULES):
            await client.schedules.pause(f"s{number}")
        described = await client.schedules.list()
        found: dict[str, list[int]] = {}
        while messages := await client.pop("beats/#", group="g", messages_max=1_000, wait=0.2):
            for message in messages:
                found.setdefault(message.properties["schedule"], []).append(int(message.properties["occurrence-ms"]))
            await client.ack([message.handle for message in messages], group="g")
    node.close()
    for each in described:
        start_ms, last_ms = each.schedule.start_ms, each.last_ms
        expected = list(range(start_ms, last_ms + 1, EVERY_MS))
        assert found[each.schedule.name] == expected
        assert each.sent == len(expected) > KILLS
