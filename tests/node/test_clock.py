"""What a node shows of its clock: the control socket, the state document and the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from penstock.node.controladdress import CLOCK
from penstock.node.controlclient import Request
from penstock.node.errors import ControlRefused
from penstock.store.options import DAY_MS, HOUR_MS
from tests.clock import AheadClock
from tests.gateway.wire import Broker


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    broker = await Broker(tmp_path, {}).start()
    yield broker
    await broker.stop()


async def ask(broker: Broker, method: str = "GET", query: str = "") -> dict[str, Any]:
    def work() -> dict[str, Any]:
        with Request(broker.config.data_dir, method, CLOCK + query) as request:
            return request.line()

    return await asyncio.to_thread(work)


def jump(broker: Broker, ms: int) -> None:
    assert isinstance(broker.clock, AheadClock)
    broker.clock.set_wall(ms)
    broker.node.store.timekeeping.check()


def metrics(broker: Broker) -> dict[str, float]:
    lines = generate_latest(broker.node.registry).decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if line.startswith("penstock_clock_"))}


async def test_a_jump_shows_in_the_state_in_the_metrics_and_on_the_control_socket(broker: Broker) -> None:
    shown = await ask(broker)
    assert (shown["confirmed"], shown["jumps"]) == (True, 0)
    assert abs(shown["time_of_day_ahead_ms"]) < 1_000
    jump(broker, DAY_MS)
    shown = await ask(broker)
    assert not shown["confirmed"]
    assert shown["jumps"] == 1
    assert 0 < shown["confirmed_in_ms"] <= broker.config.clock.confirm_ms
    assert abs(shown["time_of_day_ahead_ms"] - DAY_MS) < 1_000
    assert broker.node.state()["clock"]["confirmed"] is False
    found = metrics(broker)
    assert found["penstock_clock_unconfirmed"] == 1
    assert found["penstock_clock_jumps_total"] == 1
    assert round(found["penstock_clock_offset_seconds"]) == DAY_MS // 1000


async def test_an_accepted_jump_is_stepped(broker: Broker) -> None:
    jump(broker, DAY_MS)
    shown = await ask(broker, "POST", f"?offset_ms={DAY_MS}")
    assert shown["confirmed"]
    assert shown["steps"] == 1
    assert abs(shown["time_of_day_ahead_ms"]) < 1_000
    assert metrics(broker)["penstock_clock_steps_total"] == 1


async def test_an_accepted_jump_back_slows_the_clock(broker: Broker) -> None:
    jump(broker, -HOUR_MS)
    shown = await ask(broker, "POST", f"?offset_ms={-HOUR_MS}")
    assert shown["confirmed"]
    assert shown["slowed"]
    assert shown["steps"] == 0


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("", "offset_ms is ''"),
        ("?offset_ms=1e3", "offset_ms is '1e3'"),
        ("?offset_ms=--1", "offset_ms is '--1'"),
        ("?offset_ms=0", "look again with `penstock clock`"),
    ],
)
async def test_what_is_not_the_jump_is_refused(broker: Broker, query: str, why: str) -> None:
    jump(broker, DAY_MS)
    with pytest.raises(ControlRefused) as raised:
        await ask(broker, "POST", query)
    assert why in str(raised.value)
    assert not broker.node.store.timekeeping.is_confirmed
