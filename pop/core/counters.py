"""What POP counts, for the metrics and the state that a node shows."""

from __future__ import annotations

from penstock.store.histogram import LATENCY_BOUNDS_MS, Histogram


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
        "uncounted",
    )

    def __init__(self) -> None:
        self.handed_out = 0
        self.acked = 0
        self.revived = 0
        self.uncounted = 0
        """Messages that were revived without losing an attempt, because others were out with them: `pop.core.suspicion`."""
        self.dead_lettered = 0
        self.expired = 0
        """Messages that no consumer got because their time to live had passed."""
        self.refused = 0
        """Pops that were refused because too many were waiting."""
        self.revive_late_ms_max = 0
        self.revive_lateness = Histogram(LATENCY_BOUNDS_MS)
        """How long after its deadline a message was revived or dead-lettered."""
