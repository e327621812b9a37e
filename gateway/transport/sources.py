"""Sources of connections: how many each has open, and which ones are held off after too many errors.

A table of strikes counts errors by name. One of them has the sources, those of `strikes` have users and clients.
"""

from __future__ import annotations

from penstock.gateway.options import LimitOptions
from penstock.store.recent import RecentIds
from penstock.store.space.causer import EXEMPT


class StrikeCount:
    """The strikes of one name in the current window, and until when it is held off; 0 means that it is not."""

    __slots__ = ("count", "held_until_ms", "window_until_ms")

    def __init__(self, window_until_ms: int) -> None:
        self.count = 0
        self.window_until_ms = window_until_ms
        self.held_until_ms = 0


class StrikeTable:
    """Strikes by name. It remembers `LimitOptions.sources_max` names, those that were struck last.

    Parameters:
        options: the limits.
        strikes_max: strikes within a window after which a name is held off.
    """

    def __init__(self, options: LimitOptions, strikes_max: int) -> None:
        self._options = options
        self._strikes_max = strikes_max
        self._strikes: RecentIds[tuple[str, ...], StrikeCount] = RecentIds(options.sources_max)
        """The name whose last strike is oldest comes first."""

    def __len__(self) -> int:
        """Return the number of names whose strikes are remembered."""
        return len(self._strikes)

    def is_held(self, name: tuple[str, ...], now_ms: int) -> bool:
        """Return whether a name is held off."""
        strikes = self._strikes.get(name)
        return strikes is not None and strikes.held_until_ms > now_ms

    def is_struck(self, name: tuple[str, ...], now_ms: int) -> bool:
        """Return whether a name is in a window, or held off."""
        strikes = self._strikes.get(name)
        return strikes is not None and strikes.window_until_ms > now_ms

    def strike(self, name: tuple[str, ...], now_ms: int) -> bool:
        """Count a strike; return whether the name is held off from now on."""
        strikes = self._strikes.get(name)
        if strikes is None or strikes.window_until_ms <= now_ms:
            strikes = StrikeCount(now_ms + self._options.strike_window_ms)
        self._strikes.add(name, strikes)
        strikes.count += 1
        if strikes.count < self._strikes_max or strikes.held_until_ms > now_ms:
            return False
        strikes.held_until_ms = now_ms + self._options.hold_off_ms
        # Errors after the hold count from 0. Until then the window stays open; otherwise the next strike would end the hold.
        strikes.count = 0
        strikes.window_until_ms = strikes.held_until_ms
        return True


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
