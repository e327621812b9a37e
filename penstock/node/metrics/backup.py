"""Metrics of backups."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.node.holding import Holding
from penstock.node.metrics.families import gauge


class BackupCollector(Collector):
    """When the last backup was made.

    Parameters:
        holding: of the node.
    """

    def __init__(self, holding: Holding) -> None:
        self._holding = holding

    def collect(self) -> Iterator[Metric]:
        yield gauge(
            "penstock_backup_last_success_timestamp_seconds",
            "When the last backup of the running node was complete, in seconds since 1970; 0 if there was none.",
            self._holding.last_backup_ms / 1000,
        )
