"""How the collectors make families of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from penstock.store.histogram import Histogram
from penstock.store.printable import printable


def label_of(value: str) -> str:
    """Return the value of a label. Different values stay different, because backslashes are doubled."""
    return printable(str(value).replace("\\", "\\\\"))


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a gauge with one sample."""
    return GaugeMetricFamily(name, text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    """Return a counter with one sample. The client library adds `_total` to its name."""
    return CounterMetricFamily(name, text, value=value)


def labelled_gauge(name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    """Return a gauge with a sample for each tuple of label values."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric([label_of(each) for each in key], value)
    return family


def labelled_counter(name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    """Return a counter with a sample for each tuple of label values."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric([label_of(each) for each in key], value)
    return family


def add_latencies(family: HistogramMetricFamily, labels: Sequence[str], latencies: Histogram) -> None:
    """Add a sample in seconds of a histogram in ms: each bucket with all that are below its bound, and the sum."""
    _add_buckets(family, labels, [ms / 1000 for ms in latencies.bounds], latencies.counts, latencies.sum / 1000)


def durations(name: str, text: str, found: Histogram) -> Metric:
    """Return a histogram of durations in seconds."""
    family = HistogramMetricFamily(name, text)
    _add_buckets(family, [], found.bounds, found.counts, found.sum)
    return family


def _add_buckets(
    family: HistogramMetricFamily, labels: Sequence[str], bounds_s: Sequence[float], counts: Sequence[int], sum_s: float
) -> None:
    bounds = [*map(floatToGoString, bounds_s), "+Inf"]
    family.add_metric([*map(label_of, labels)], list(zip(bounds, accumulate(counts), strict=True)), sum_s)
