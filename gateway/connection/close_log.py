"""Counts and logs the connections that the server closes, and writes into the audit log which clients are gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.access.audit import Audit
from penstock.access.subject import Subject
from penstock.gateway.counters import GatewayCounters, Traffic
from penstock.gateway.logbook import Logbook
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.strikes import Claim

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
"""Reasons for closing a connection that count as a strike."""


class CloseLog:
    """Counts and logs the connections that the server closes for a reason, and notes the end of every client.

    Parameters:
        counters, traffic: count them by reason.
        logbook: names them.
        strike: counts a strike: see `Strikes.add`.
        audit: names the clients that were connected.
    """

    def __init__(
        self,
        counters: GatewayCounters,
        traffic: Traffic,
        logbook: Logbook,
        strike: Callable[[Peer, str, Claim], None],
        audit: Audit,
    ) -> None:
        self._audit = audit
        self._counters = counters
        self._traffic = traffic
        self._logbook = logbook
        self._strike = strike

    def note(self, user: str, claim: Claim, peer: Peer, why: str, reason: ReasonCode, client_id: str) -> None:
        """Note a connection that the server closes.

        Args:
            user: the user name; empty if nobody vouched for one.
            claim: the names in the CONNECT; empty if none could be read.
            peer: the other end.
            why: a sentence.
            reason: what is counted.
            client_id: the client id; empty if no CONNECT was accepted.
        """
        by_reason, listener = self._counters.closed_by_reason, peer.listener.name
        by_reason[reason] = by_reason.get(reason, 0) + 1
        self._traffic.connection_closed(listener, reason)
        if reason in STRIKES:
            self._strike(peer, user, claim)
        client = client_id or claim.client_id
        self._logbook.note("connection.closed", client=client, peer=str(peer), listener=listener, reason=reason.name, why=why)

    def left(self, user: str, client_id: str, peer: Peer, why: str, reason: ReasonCode) -> None:
        """Write into the audit log that a client whose CONNECT was accepted is no longer connected.

        Args:
            user: its user name; empty if nobody vouched for one.
            client_id: its client id.
            peer: the other end of its connection.
            why: a sentence. Empty if `reason` says all.
            reason: why the server closed the connection. The line leaves out those that are no failures.
        """
        name = reason.name if reason.is_failure else ""
        subject = Subject(user, client_id=client_id, address=peer.host)
        self._audit.note("disconnected", subject, listener=peer.listener.name, reason=name, why=why)
