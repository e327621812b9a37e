"""Metrics of the node's own spans."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.node.metrics.families import counter, gauge, labelled_counter
from penstock.tracing.exporter import SpanExporter


class TracingCollector(Collector):
    """Figures of a node that makes spans.

    Parameters:
        exporter: Exports the spans.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter

    def collect(self) -> Iterator[Metric]:
        exporter, traces = self._exporter, self._exporter.traces
        yield counter("penstock_tracing_spans_exported", "Spans that the collector took.", exporter.exported)
        yield gauge("penstock_tracing_spans_waiting", "Spans that wait for the collector.", len(traces.ended))
        yield labelled_counter(
            "penstock_tracing_spans_dropped",
            "Spans lost: too many in a second (rate), too many waiting (queue), or refused.",
            ["reason"],
            {("rate",): traces.over_rate, ("queue",): traces.over_queue, ("refused",): exporter.refused},
        )
        yield counter(
            "penstock_tracing_export_failures",
            "Exports without an answer, or with one that says to try again.",
            exporter.failures,
        )
