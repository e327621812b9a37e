"""A node for each test: on free ports, in a directory of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from argon2 import PasswordHasher

from penstock.access import passwords
from tests.clock import ManualClock
from tests.gateway import scripted_plugins
from tests.gateway.brokers import StartBroker
from tests.gateway.scripted_plugins import Script
from tests.gateway.stage import Stage
from tests.gateway.wire import Broker


@pytest.fixture(autouse=True)
def _cheap_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash passwords with little work and memory. A file that was written with other parameters is verified with those."""
    monkeypatch.setattr(passwords, "PasswordHasher", partial(PasswordHasher, time_cost=1, memory_cost=64))


@pytest.fixture
async def start_broker(tmp_path: Path) -> AsyncIterator[StartBroker]:
    """Start a node with options of the sections `[mqtt]` and `[store]`. Its clock stands still until the test moves it."""
    brokers: list[Broker] = []

    async def start(**options: Any) -> Broker:
        broker = await Broker(tmp_path / str(len(brokers)), {"clock": ManualClock()} | options).start()
        brokers.append(broker)
        return broker

    yield start
    for broker in brokers:
        await broker.stop()


@pytest.fixture
async def broker(start_broker: StartBroker) -> Broker:
    """A node with the default options."""
    return await start_broker()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    for far in stage.far:
        far.close()
    stage.sockets.close()


@pytest.fixture
def script() -> Iterator[Script]:
    script = scripted_plugins.new_script()
    yield script
    script.may_answer.set()
