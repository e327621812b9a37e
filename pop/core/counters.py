"""What POP counts, for the metrics and the state that a node shows."""

from __future__ import annotations

from bisect import bisect_left

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


class PopCounters:
    """What POP has done since the node started. Plain integers, which `penstock.node.metrics` reads."""

    __slots__ = (
        "acked",
        "dead_lettered",
        "expired",
        "handed_out",
        "refused",
        "revive_late_ms_max",
        "revive_lateness",
        "revived",
    )

    def __init__(self) -> None:
        self.handed_out = 0
        self.acked = 0
        self.revived = 0
        self.dead_lettered = 0
        self.expired = 0
        """Messages that no consumer got because their time to live had passed."""
        self.refused = 0
        """Pops that were refused because too many were waiting."""
        self.revive_late_ms_max = 0
        self.revive_lateness = Latencies()
        """How long after its deadline a message was revived or dead-lettered."""
