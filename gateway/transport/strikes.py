"""Strikes: what counts against a client, a user, or the source of a connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from penstock.gateway.counters import Traffic
from penstock.gateway.logbook import Logbook
from penstock.gateway.options import LimitOptions
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.sources import Sources, StrikeTable
from penstock.store.space.causer import EXEMPT

CLIENT_SHARE: Final = 10
"""The part of `strikes_max` after which a client is held off: a tenth. A source that guesses passwords under many names has ten
times `strikes_max` guesses in a window, and a device that repeats its error can't use up the strikes of its source."""

NAME_CHARS_MAX: Final = 128
"""Characters of a name that are compared. MQTT allows 65,535 bytes."""


class Claim(NamedTuple):
    """The names that a CONNECT states. Nobody has vouched for them."""

    user: str = ""
    client_id: str = ""

    @classmethod
    def of(cls, user: str | None, client_id: str) -> Claim:
        """Return the names, cut to `NAME_CHARS_MAX`."""
        return cls((user or "")[:NAME_CHARS_MAX], client_id[:NAME_CHARS_MAX])


NO_CLAIM: Final = Claim()
"""The claim of a connection that has sent no CONNECT."""


class Strikes:
    """Counts strikes. Who has too many is refused for a while.

    A strike counts against the client: its names, and its user if somebody vouches for that, else its source. The first strike
    of a client in a window also counts against that user or source, so that nobody gains by inventing names.

    Parameters:
        sources: remembers the strikes of each source.
        traffic: counts who begins to be refused.
        logbook: names them.
        now_ms: returns a monotonic time in ms.
        options: the limits.
    """

    def __init__(
        self, sources: Sources, traffic: Traffic, logbook: Logbook, now_ms: Callable[[], int], options: LimitOptions
    ) -> None:
        self._sources = sources
        self._traffic = traffic
        self._logbook = logbook
        self._now_ms = now_ms
        self._options = options
        self._users = StrikeTable(options, options.strikes_max)
        self.clients = StrikeTable(options, max(options.strikes_max // CLIENT_SHARE, 1))
        """The strikes of clients."""

    def add(self, peer: Peer, user: str = "", claim: Claim = NO_CLAIM) -> None:
        """Count a strike: a peer did what no client should.

        Args:
            peer: the other end of the connection.
            user: its user name; empty if nobody vouches for one.
            claim: the names in its CONNECT; empty if it has sent none.
        """
        now_ms, source = self._now_ms(), peer.source
        if source == EXEMPT or not self._options.strikes_max:
            return
        if user or any(claim):
            client = _client(source, user, claim)
            is_first = not self.clients.is_struck(client, now_ms)
            if self.clients.strike(client, now_ms):
                self._note("client.held_off", client=claim.client_id, user=user or claim.user, source=source)
            if not is_first:
                return
        if user:
            if self._users.strike((user,), now_ms):
                self._note("user.held_off", user=user)
        elif self._sources.strike(source, now_ms):
            self._note("source.held_off", source=source)

    def is_held(self, peer: Peer, user: str, claim: Claim) -> bool:
        """Return whether a client that connects is held off. The arguments are those of `add`."""
        now_ms = self._now_ms()
        if peer.source == EXEMPT:
            return False
        return self.clients.is_held(_client(peer.source, user, claim), now_ms) or self._users.is_held((user,), now_ms)

    def _note(self, event: str, **names: str) -> None:
        self._traffic.held_off += 1
        self._logbook.note(event, **names, for_ms=self._options.hold_off_ms)


def _client(source: str, user: str, claim: Claim) -> tuple[str, ...]:
    """Return the name of a client among those of its user, or of its source if nobody vouches for a user."""
    return (user, claim.client_id) if user else (source, *claim)
