"""Sources of connections: how many each has open, and which ones are held off after too many errors."""

from __future__ import annotations

from penstock.gateway.options import LimitOptions
from penstock.gateway.strike_table import StrikeTable
from penstock.store.space.causer import EXEMPT


class Sources:
    """All sources with connections or strikes.

    Parameters:
        options: the limits.
    """

    def __init__(self, options: LimitOptions) -> None:
        self._options = options
        self._open: dict[str, int] = {}
        self._strikes = StrikeTable(options, options.strikes_max)

    def __len__(self) -> int:
        """Return the number of sources whose strikes are remembered."""
        return len(self._strikes)

    def refusal(self, source: str, now_ms: int) -> str:
        """Return why a source may open no more connections, as a word for the metrics; empty if it may."""
        if source == EXEMPT:
            return ""
        if self._strikes.is_held((source,), now_ms):
            return "held_off"
        most = self._options.source_connections_max
        return "source_connections" if most and self._open.get(source, 0) >= most else ""

    def opened(self, source: str) -> None:
        """Count a connection of a source."""
        if source != EXEMPT:
            self._open[source] = self._open.get(source, 0) + 1

    def closed(self, source: str) -> None:
        """Stop counting a connection of a source."""
        if source != EXEMPT:
            left = self._open[source] - 1
            if left:
                self._open[source] = left
            else:
                del self._open[source]

    def strike(self, source: str, now_ms: int) -> bool:
        """Count an error of a source; return whether the source is held off from now on."""
        if source == EXEMPT or not self._options.strikes_max:
            return False
        return self._strikes.strike((source,), now_ms)
