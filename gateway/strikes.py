"""Strikes: what counts against the source of a connection."""

from __future__ import annotations

from collections.abc import Callable

from penstock.gateway.logbook import Logbook
from penstock.gateway.traffic import Traffic
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.sources import Sources


class Strikes:
    """Counts strikes against sources. A source with too many is refused for a while.

    Parameters:
        sources: remembers the strikes of each source.
        traffic: counts the sources that begin to be refused.
        logbook: names them.
        now_ms: returns a monotonic time in ms.
        hold_off_ms: see `LimitOptions.hold_off_ms`.
    """

    def __init__(
        self, sources: Sources, traffic: Traffic, logbook: Logbook, now_ms: Callable[[], int], *, hold_off_ms: int
    ) -> None:
        self._sources = sources
        self._traffic = traffic
        self._logbook = logbook
        self._now_ms = now_ms
        self._hold_off_ms = hold_off_ms

    def add(self, peer: Peer) -> None:
        """Count a strike: a peer did what no client should."""
        if self._sources.strike(peer.source, self._now_ms()):
            self._traffic.held_off += 1
            self._logbook.note("source.held_off", source=peer.source, for_ms=self._hold_off_ms)
