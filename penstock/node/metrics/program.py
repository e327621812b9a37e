"""Metrics of the node as a program: its version, and its event loop."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock import __version__
from penstock.node.metrics.families import durations, labelled_gauge
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
