"""Counts and logs the connections that the server closes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.gateway.counters import GatewayCounters
from penstock.gateway.logbook import Logbook
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.traffic import Traffic
from penstock.gateway.transport.peer import Peer

STRIKES: Final = frozenset(
    (
        ReasonCode.MALFORMED_PACKET,
        ReasonCode.PROTOCOL_ERROR,
        ReasonCode.PACKET_TOO_LARGE,
        ReasonCode.BAD_USER_NAME_OR_PASSWORD,
        ReasonCode.NOT_AUTHORIZED,
        ReasonCode.BAD_AUTHENTICATION_METHOD,
    )
)
"""Reasons for closing a connection that count as a strike against its source."""


class CloseLog:
    """Counts and logs the connections that the server closes for a reason.

    Parameters:
        counters, traffic: count them by reason.
        logbook: names them.
        strike: counts a strike against the source of a peer.
    """

    def __init__(self, counters: GatewayCounters, traffic: Traffic, logbook: Logbook, strike: Callable[[Peer], None]) -> None:
        self._counters = counters
        self._traffic = traffic
        self._logbook = logbook
        self._strike = strike

    def note(self, client_id: str, peer: Peer, why: str, reason: ReasonCode) -> None:
        """Note a connection that the server closes. The client id is empty if no CONNECT was accepted."""
        by_reason, listener = self._counters.closed_by_reason, peer.listener.name
        by_reason[reason] = by_reason.get(reason, 0) + 1
        self._traffic.connection_closed(listener, reason)
        if reason in STRIKES:
            self._strike(peer)
        self._logbook.note(
            "connection.closed", client=client_id, peer=str(peer), listener=listener, reason=reason.name, why=why
        )
