"""Histograms, such as how long the disk takes for a sync, or how late timers fire."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np

DURATION_BOUNDS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the buckets for durations of the node's own work, in seconds."""

LATENCY_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 3_600_000)
"""Upper bounds of the buckets for what consumers or a due time wait for, in ms."""


class Histogram:
    """A histogram since the node started: a count for each bucket, and one for larger values.

    Parameters:
        bounds: upper bounds of the buckets, in ascending order, in the unit of the values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum: float = 0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value as often as `count` says."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def add_all(self, values: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Count each value of an array of integers."""
        found = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.counts = [count + more for count, more in zip(self.counts, found.tolist(), strict=True)]
        self.sum += int(values.sum())
