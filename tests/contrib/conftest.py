"""Fixtures of the integrations' tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock import Client
from tests.pop.wiring import Node


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path / "data") as started:
        yield started


@pytest.fixture
async def client(node: Node) -> AsyncIterator[Client]:
    async with Client(node.target) as made:
        yield made
