"""The acks that a client sends: PUBACK, PUBREC and PUBCOMP for what it was delivered, PUBREL for what it has published (4.3).

Clauses in brackets are those of MQTT 5.0. Where MQTT 3.1.1 has a clause of another number, it follows as 3.1.1:[...].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from penstock.gateway.connection.disk_full import PACKET_OVERHEAD_BYTES, KeptPackets
from penstock.gateway.connection.outbox import Outbox
from penstock.gateway.connection.services import ConnectionServices
from penstock.gateway.protocol.encode import encode_ack, encode_acks
from penstock.gateway.protocol.packets import PUBACK, PUBCOMP, PUBREC, PUBREL, Packet
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.sessions.session import Session
from penstock.store.errors import DiskFull

ACKS: Final = frozenset((PUBACK, PUBREC, PUBCOMP))
"""The acks of deliveries, which `IncomingAcks.acknowledged` handles."""

FAILURE_MIN: Final = 0x80
"""Reason codes from 0x80 up are failures (2.4)."""


class _Unanswered(NamedTuple):
    """A PUBREC or PUBREL that must be recorded before it is answered."""

    kind: int
    packet_id: int
    is_expected: bool


class IncomingAcks:
    """Handles the acks of one connection.

    In a session that lasts, a PUBREC or PUBREL is recorded before it is answered. Otherwise the node could forget after a crash
    that a client has released a packet id: it would send the message again as a new one, or take the next message under that
    packet id for a repetition.

    Parameters:
        services: the parts of the gateway that all connections share.
        outbox: sends the answers.
        kept_packets: keeps what finds no room on the disk.
    """

    __slots__ = (
        "_counters",
        "_is_v5",
        "_journal",
        "_kept_packets",
        "_outbox",
        "_session",
        "_settlements",
        "_store",
        "_unanswered",
    )

    def __init__(self, services: ConnectionServices, outbox: Outbox, kept_packets: KeptPackets) -> None:
        self._store = services.store
        self._counters = services.counters
        self._journal = services.journal
        self._settlements = services.settlements
        self._outbox = outbox
        self._kept_packets = kept_packets
        self._session: Session
        self._is_v5 = False
        self._unanswered: list[_Unanswered] = []

    def begin(self, session: Session, *, is_v5: bool) -> None:
        """Serve a session: the CONNECT was accepted."""
        self._session = session
        self._is_v5 = is_v5

    def acknowledged(self, packet: Packet) -> None:
        """Handle a PUBACK, PUBREC or PUBCOMP."""
        kind, packet_id = packet[0], packet[1]
        is_refused = len(packet) > 2 and packet[2] >= FAILURE_MIN
        session = self._session
        slot = session.inflight.slots.get(packet_id)
        is_expected = session.inflight.acknowledge(kind, packet_id, is_refused=is_refused)
        if is_expected and slot is not None and slot.delivery:
            if is_refused:
                self._settlements.dead_letter([slot.delivery])  # [MQTT-4.8.2-6]
            else:
                self._settlements.acknowledge_soon(slot.delivery)
        if kind == PUBREC and not is_refused:
            is_known = is_expected or packet_id in session.inflight.slots
            if session.lasts:
                self._unanswered.append(_Unanswered(PUBREC, packet_id, is_known))
            elif is_known or not self._is_v5:
                self._outbox.send(encode_acks(PUBREL, [packet_id]))  # also the second time [MQTT-4.3.3-4]
            else:
                self._outbox.send(encode_ack(PUBREL, packet_id, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND))
        elif is_expected:
            # An unexpected ack is ignored: a client may repeat one after a reconnect (4.4).
            self._counters.deliveries_acked += 1

    def acknowledged_run(self, packet_ids: Sequence[int]) -> None:
        """Handle PUBACKs without reason codes."""
        expected, deliveries = self._session.inflight.acknowledge_run(packet_ids)
        for delivery in deliveries:
            self._settlements.acknowledge_soon(delivery)
        self._counters.deliveries_acked += expected

    def released(self, packet_id: int) -> None:
        """Handle a PUBREL."""
        received = self._session.received
        is_known = packet_id in received
        received.discard(packet_id)
        if self._session.lasts:
            self._unanswered.append(_Unanswered(PUBREL, packet_id, is_known))
        elif is_known or not self._is_v5:
            self._outbox.send(encode_acks(PUBCOMP, [packet_id]))  # in 3.1.1 whether it was known or not (4.3.3)
        else:
            self._outbox.send(encode_ack(PUBCOMP, packet_id, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND))

    def finish_read(self) -> None:
        """Record what the read has changed in a session that lasts, and answer its PUBRECs and PUBRELs when that is durable."""
        session = self._session
        if session.lasts:
            if session.unrecorded.unsaid(len(session.inflight.slots)):
                self._journal.mark_acked(session)
            else:
                self._journal.mark(session)
            if self._unanswered:
                self._record()

    def _record(self) -> None:
        unanswered, self._unanswered = self._unanswered, []
        self._settlements.flush()  # first: what this client has must go to no other, even after a crash
        session = self._session
        if not session.lasts:  # the connection has ended: the client repeats them on another one
            return
        released = [each.packet_id for each in unanswered if each.kind == PUBREL]
        try:
            self._journal.save(session, released)
        except DiskFull:  # they are handled again when there is room
            session.received.update(each.packet_id for each in unanswered if each.kind == PUBREL and each.is_expected)
            self._kept_packets.add([each[:2] for each in unanswered], PACKET_OVERHEAD_BYTES * len(unanswered))
            return
        self._store.when_durable(partial(self._answer, unanswered))

    def _answer(self, recorded: list[_Unanswered]) -> None:
        for kind, answer in ((PUBREC, PUBREL), (PUBREL, PUBCOMP)):
            of_kind = [each for each in recorded if each.kind == kind]
            known = [each.packet_id for each in of_kind if each.is_expected or not self._is_v5]
            if known:
                self._outbox.send(encode_acks(answer, known), len(known))
            for each in of_kind if self._is_v5 else ():
                if not each.is_expected:
                    self._outbox.send(encode_ack(answer, each.packet_id, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND))


class TracedAcks(IncomingAcks):
    """Handles the acks of one connection, and makes spans of them.

    A connection of a node without tracing has `IncomingAcks`, which look at each ack without asking for traces. The parameters
    are those of `IncomingAcks`.
    """

    __slots__ = ("_traces",)

    def __init__(self, services: ConnectionServices, outbox: Outbox, kept_packets: KeptPackets) -> None:
        super().__init__(services, outbox, kept_packets)
        assert services.traces is not None, "the node has tracing"
        self._traces = services.traces

    def acknowledged_run(self, packet_ids: Sequence[int]) -> None:
        for packet_id in packet_ids:
            self.acknowledged((PUBACK, packet_id))

    def acknowledged(self, packet: Packet) -> None:
        packet_id, slots = packet[1], self._session.inflight.slots
        slot = slots.get(packet_id)
        super().acknowledged(packet)
        if slot is not None and slots.get(packet_id) is not slot:  # An unexpected ack leaves the slot where it was.
            is_refused = len(packet) > 2 and packet[2] >= FAILURE_MIN
            self._traces.acknowledged(self._session.client_id, slot.position, is_refused=is_refused)
