"""A disk whose free space a test decides."""

from __future__ import annotations

from penstock.store.options import GIB
from penstock.store.space import Usage
from tests.gateway.wire import Broker

TOTAL = 100 * GIB


def free(broker: Broker, amount: int) -> None:
    broker.node.store.space.probe = lambda: Usage(amount, TOTAL)
    broker.node.store.measure_disk()
