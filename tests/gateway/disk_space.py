"""A disk on which the test decides how much space is free."""

from __future__ import annotations

from penstock.store.files import Usage
from penstock.store.options import GIB
from tests.gateway.wire import Broker

TOTAL = 100 * GIB
"""Size of the disk in bytes."""


def free(broker: Broker, amount: int) -> None:
    """Let the node measure a disk with `amount` free bytes."""
    broker.node.store.space.probe = lambda: Usage(amount, TOTAL)
    broker.node.store.measure_disk()
