"""Fixtures for the tests of POP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import pytest

from tests.pop.wiring import Node, Parts, stub_of

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import PopServiceAsyncStub


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = Parts(tmp_path / "data")
    yield made
    made.close()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path / "data") as started:
        yield started


@pytest.fixture
async def stub(node: Node) -> AsyncIterator[PopServiceAsyncStub]:
    async with grpc.aio.insecure_channel(node.target, options=[("grpc.max_receive_message_length", -1)]) as channel:
        yield stub_of(channel)
