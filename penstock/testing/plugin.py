"""Fixtures for pytest. Installed with Penstock, they need no configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from penstock.pop.client.syncclient import SyncClient
    from penstock.testing.nodethread import NodeInThread


@pytest.fixture
def penstock_node() -> Iterator[NodeInThread]:
    """A real node in a temporary directory, anew for each test. `penstock_node.target` is its address."""
    from penstock.testing import Node

    in_process = Node()  # says what is not installed, if something is not
    from penstock.testing.nodethread import NodeInThread

    with NodeInThread(in_process) as node:
        yield node


@pytest.fixture
def penstock_client(penstock_node: NodeInThread) -> Iterator[SyncClient]:
    """A `penstock.SyncClient` of `penstock_node`."""
    from penstock.pop.client.syncclient import SyncClient

    with SyncClient(penstock_node.target) as client:
        yield client
