"""Metrics of the node's file descriptors. `process_open_fds` of the process collector says how many are in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.node.descriptors import DescriptorShares
from penstock.node.metrics.families import counter, labelled_gauge


class DescriptorCollector(Collector):
    """Figures of the shares of file descriptors, and of the admin listener's connections.

    Parameters:
        shares: of the node.
        closed_early: returns how many connections of the admin listener made way for others.
    """

    def __init__(self, shares: DescriptorShares, closed_early: Callable[[], int]) -> None:
        self._shares = shares
        self._closed_early = closed_early

    def collect(self) -> Iterator[Metric]:
        shares = self._shares
        yield labelled_gauge(
            "penstock_descriptors",
            "File descriptors that a part may have.",
            ["part"],
            {("store",): shares.store, ("pop",): shares.pop, ("admin",): shares.admin, ("mqtt",): shares.mqtt},
        )
        yield counter(
            "penstock_admin_connections_closed_early",
            "Admin connections closed because too many were open.",
            self._closed_early(),
        )
