"""Metrics of the node as a program: its version, and its event loop."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock import __version__
from penstock.node.descriptors import DescriptorShares
from penstock.node.metrics.families import counter, durations, labelled_gauge
from penstock.store.histogram import Histogram


class ProgramCollector(Collector):
    """Figures of the program.

    Parameters:
        lags: of the event loop.
    """

    def __init__(self, lags: Histogram) -> None:
        self._lags = lags

    def collect(self) -> Iterator[Metric]:
        yield labelled_gauge(
            "penstock_build_info",
            "Always 1.",
            ["version", "python"],
            {(__version__, platform.python_version()): 1},
        )
        yield durations(
            "penstock_loop_lag_seconds",
            "Delay of the event loop, for which all clients wait.",
            self._lags,
        )


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
