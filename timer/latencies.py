"""Histograms of times in ms, such as how late timers fire."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np

LATENCY_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 3_600_000)
"""Upper bounds of the buckets of a histogram, in ms."""


class Latencies:
    """A histogram of times in ms since the node started: a count for each bucket, and one for longer times."""

    __slots__ = ("counts", "sum_ms")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_MS) + 1)
        self.sum_ms = 0

    def add(self, latency_ms: int, count: int) -> None:
        """Count `latency_ms` as often as `count` says."""
        self.counts[bisect_left(LATENCY_BOUNDS_MS, latency_ms)] += count
        self.sum_ms += latency_ms * count

    def add_all(self, latencies_ms: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Count each time of an array of integers."""
        found = np.bincount(np.searchsorted(LATENCY_BOUNDS_MS, latencies_ms), minlength=len(self.counts))
        self.counts = [count + more for count, more in zip(self.counts, found.tolist(), strict=True)]
        self.sum_ms += int(latencies_ms.sum())
