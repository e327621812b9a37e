"""How late the event loop runs what is due: while one turn takes long, all clients wait."""

from __future__ import annotations

import asyncio
import time

from penstock.store.histogram import DURATION_BOUNDS_S, Histogram

PROBE_S = 0.2
"""Seconds between two probes. A turn that takes longer than this can't hide between them."""


class LoopLag:
    """Measures the event loop from within, by a timer that should fire at equal distances."""

    def __init__(self) -> None:
        self.lags = Histogram(DURATION_BOUNDS_S)
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measure this loop from now on."""
        # The loop's own time stands still within a turn, so it does not show how long the turn takes.
        self._due_s = time.monotonic() + PROBE_S
        self._timer = loop.call_later(PROBE_S, self._probe, loop)

    def stop(self) -> None:
        """Measure no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _probe(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lags.add(max(time.monotonic() - self._due_s, 0.0))
        self.start(loop)
