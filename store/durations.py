"""Histograms of durations in seconds, such as how long the disk takes for a sync."""

from __future__ import annotations

from bisect import bisect_left

DURATION_BOUNDS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the buckets of a histogram, in seconds."""


class Durations:
    """A histogram of durations since the node started: a count for each bucket, and one for longer durations."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(DURATION_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(DURATION_BOUNDS_S, duration_s)] += 1
        self.sum_s += duration_s
