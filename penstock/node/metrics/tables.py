"""Metrics of the Parquet tables."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.node.metrics.families import counter, gauge
from penstock.node.tablewriting import TableWriting


class TablesCollector(Collector):
    """Figures of a node that writes tables."""

    def __init__(self, writing: TableWriting) -> None:
        self._writing = writing

    def collect(self) -> Iterator[Metric]:
        writing = self._writing
        yield gauge("penstock_tables_lag_bytes", "Bytes of sealed segments that the tables lack.", writing.lag_bytes)
        yield gauge("penstock_tables_lag_segments", "Sealed segments that the tables lack.", writing.lag_segments)
        yield counter("penstock_tables_failures", "Failed runs of the writer of the tables.", writing.failures)
        yield counter(
            "penstock_tables_dropped_bytes",
            "Bytes deleted before the tables had them.",
            writing.dropped_bytes,
        )
