"""Fixtures of the clients' tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock import Client
from tests.pop.wiring import Node


@pytest.fixture
async def client(node: Node) -> AsyncIterator[Client]:
    async with Client(node.target) as made:
        yield made
