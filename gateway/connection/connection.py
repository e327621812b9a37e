"""One client's connection: bytes come in, packets are handled, packets go out.

A socket read is decoded to its end in one loop; all PUBLISHes in it are appended in this turn and acknowledged with one
write when their group is durable. There is no task, no await and no object per message on this path.

Clauses in brackets are those of MQTT 5.0; where MQTT 3.1.1 has one of another number, it stands behind it as 3.1.1:[...].
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

from penstock.gateway.auth.access import Guard, Undecided
from penstock.gateway.client_id import assign_client_id
from penstock.gateway.connection import subscribing
from penstock.gateway.connection.pausing import PauseReason
from penstock.gateway.connection.publishing import (
    KEPT_OVERHEAD_BYTES,
    QOS_1,
    QOS_2,
    RECORD_FLAGS,
    SESSION,
    Denial,
    PublishForbidden,
    Publishing,
    received_properties,
)
from penstock.gateway.connection.throttle import Meter
from penstock.gateway.delivery.aliases import TopicAliases
from penstock.gateway.delivery.client_subscriptions import ClientSubscriptions
from penstock.gateway.delivery.encoding import encode_redelivery
from penstock.gateway.delivery.outlet import LaggingSubscription
from penstock.gateway.protocol.connect import Connect, parse_connect, protocol_level, stated_packet_bytes_max
from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.disconnect import parse_disconnect
from penstock.gateway.protocol.encode import (
    PINGRESP_BYTES,
    encode_ack,
    encode_acks,
    encode_connack,
    encode_connack_5,
    encode_disconnect,
    encode_refusal,
)
from penstock.gateway.protocol.errors import ConnectRefused, ProtocolError
from penstock.gateway.protocol.fixed_header import FROM_CLIENT, FROM_CLIENT_5, packet_bytes
from penstock.gateway.protocol.packets import (
    AUTH,
    CONNECT,
    DISCONNECT,
    MALFORMED,
    NAMES,
    PINGREQ,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBLISH_RUN,
    PUBLISH_WITH,
    PUBREC,
    PUBREL,
    SUBSCRIBE,
    UNSUBSCRIBE,
    V5_0,
    Packet,
)
from penstock.gateway.protocol.properties import Property, PropertyValues
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode
from penstock.gateway.protocol.runs import count_packets, split_runs
from penstock.gateway.sessions.inflight import Slot
from penstock.gateway.sessions.session import Session
from penstock.gateway.transport.sockets import READ_BYTES, SocketTransport
from penstock.store.errors import DiskFull, StoreError, TopicInvalid
from penstock.store.lightqueue import ENTRY
from penstock.store.options import KIB

if TYPE_CHECKING:
    from penstock.gateway.auth.plugins import ClientSession, Verdict
    from penstock.gateway.gateway import Gateway
    from penstock.gateway.transport.peer import Peer

_ACKS = frozenset((PUBACK, PUBREC, PUBCOMP))

CLOSE_FLUSH_S = 1.0
"""How long a connection that the server closes may take to send what was written before, and the acks that are due."""

ANSWERS_BYTES_MAX = 64 * KIB
"""Bytes of answers (acks, PINGRESP) that may pile up behind a full send buffer before the client is no longer read."""

TURN_MESSAGES = 512
"""Of a client that waits for acks, about so many messages are handled in a turn, where it sends more at once. Then some are on
their way to the disk, and some are acknowledged, while others are handled: a window of 1,000 gets a fifth more through."""

REFUSED = 0x80
"""From here on a reason code says no."""


class Connection(asyncio.Protocol):
    """The server's end of one MQTT connection. Made by the listener.

    Parameters:
        gateway: the registry of clients, the options and the counters.
        peer: who is at the other end.
    """

    def __init__(self, gateway: Gateway, peer: Peer) -> None:
        self.gateway = gateway
        self.peer = peer
        self.listener = peer.listener
        self.permissions: Guard | None = None
        """What the plugins have said about this client and topics, where there are plugins for topics."""
        self.plugin_session: ClientSession | None = None
        self.verdict: tuple[ClientSession, Verdict | None] | None = None
        """What the plugins have said to the CONNECT that waits for it."""
        self.meter: Meter | None = None
        """Where there are limits to what the client may send."""
        self.store = gateway.store
        self.writable = True
        self.subscriptions: ClientSubscriptions
        """The client's subscriptions, once it is accepted."""
        self.lagging: dict[LaggingSubscription, None] = {}
        """The subscriptions that aren't live; the one that waits longest for its turn comes first."""
        self.keep_alive_s = 0.0
        self.received_s = 0.0
        self.wheel_slot = 0
        self.is_refused = False
        """Where the gateway's wheel holds this connection."""
        self.session: Session = Session("", 0)
        self.connected = False
        self._has_greeted = False
        """A CONNACK of success went out, so a DISCONNECT may [MQTT-3.14.0-1]."""
        self.level = 0
        """The protocol level of its CONNECT; 0 until that is known."""
        self.is_v5 = False
        self.packet_bytes_max: int | None = None
        """The largest packet that the client takes, where it has said so."""
        self.aliases: TopicAliases | None = None
        """The topic aliases that the server has given, where the client wants them."""
        self.side = FROM_CLIENT
        self._in_turns: SocketTransport | None = None
        """Its transport, where that is read at most once in a turn of the loop."""
        self._is_plain = False
        """Nothing is under way that a PUBLISH would have to wait for, or be looked at for: `PlainReads` may take it."""
        self._says_why = True
        """The client wants reason strings."""
        self.publishing = Publishing(self)
        self._unrecorded: list[tuple[int, int, bool]] = []
        """PUBRECs and PUBRELs of a session that lasts, which are recorded before they are answered: type and packet id, and
        whether it was expected."""
        self._waiting_runs = 0
        self._waiting_bytes = 0
        """PUBLISHes that go out when their packet ids are durable."""
        self._is_full = False
        """The transport's buffer is."""
        self.unacked = 0
        """PUBLISHes at QoS 1 whose ack waits until they are durable. Those at QoS 2 are in `Session.received`."""
        self._resend: list[int] = []
        """Packet ids of deliveries of an earlier connection, which go out again before anything else; the first comes last."""
        self._farewell = b""
        self._closed = False
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._collected: list[bytes] = []
        self._missing = 0
        self._answers_bytes = 0
        self._pump_scheduled = False
        self._unpaid_bytes = 0
        """What was received and is not in the account of `meter` yet."""
        self._paused_for = PauseReason(0)
        self._deferred: list[Packet] | None = None
        """The packets that wait for an answer of the plugins, in order. Empty for a CONNECT: that lies in `_late`."""
        self._late = b""
        """What was received while they wait: what the transport had read already."""

    # --- the socket -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._in_turns = transport if isinstance(transport, SocketTransport) else None
        self._transport.set_write_buffer_limits(high=self.gateway.options.send_buffer_bytes)
        self.received_s = self.gateway.clock.monotonic_s()
        self.peer.made(transport)
        self.gateway.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._is_plain = False
        self._transport = self._in_turns = None
        self._end()
        self.gateway.closed(self)

    def eof_received(self) -> bool:
        # A client that has sent all that it will may still wait for its acks: `close` sees to them, so not the transport.
        self.close("", ReasonCode.NORMAL_DISCONNECTION)
        return not self.listener.options.is_tls  # TLS has no half-closed connections

    def pause_writing(self) -> None:
        # Deliveries stop. Reading goes on, or a slow subscriber's pings would not be heard; see `_write` for its bound.
        self.writable = False
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._answers_bytes = 0
        if self._transport is not None and not self._closed:
            self.resume_reading(PauseReason.ANSWERS_UNREAD)
        self._write_on()

    def _write_on(self) -> None:
        """Deliver again, where nothing is in the way any more."""
        self.writable = not self._is_full and self._waiting_bytes < self.gateway.options.send_buffer_bytes
        if self.writable and self._transport is not None and not self._closed:
            self._pump()

    def pause_reading(self, reason: PauseReason) -> None:
        """Stop reading, for one of the reasons of `gateway.connection.throttle`."""
        self._paused_for |= reason
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self, reason: PauseReason) -> None:
        """Read on, unless there is another reason not to."""
        if self._paused_for & reason:
            self._paused_for &= ~reason
            self.received_s = self.gateway.clock.monotonic_s()  # it wasn't silent: it wasn't heard
            if not self._paused_for and self._transport is not None and not self._closed:
                self._transport.resume_reading()

    @property
    def is_unread(self) -> bool:
        """True while the server doesn't read, for reasons of its own."""
        return bool(self._paused_for & ~PauseReason.ANSWERS_UNREAD)

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        received = len(data)
        self.listener.bytes_in += received
        self.received_s = self.gateway.clock.monotonic_s()
        if self._is_plain and self.gateway.plain.take(self, data):
            return
        if self.meter is not None:
            self._unpaid_bytes += received
        if self._deferred is not None:
            self._late += data
        else:
            self._join(data)

    def _join(self, data: bytes) -> None:
        """Put a packet together that came in several reads, and go on with what is whole."""
        if self._missing:
            self._collected.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                if self.meter is not None:
                    self._pay(0)
                return
            data = b"".join(self._collected)
            self._collected.clear()
            self._missing = 0
            self._is_plain = self._may_be_plain()
            if self._is_plain and self.gateway.plain.take(self, data):
                return
        elif self._rest:
            data = self._rest + data
        packet_bytes_max = self.gateway.options.packet_bytes_max
        packets, used = decode(data, packet_bytes_max, self.side, self.connected)
        if packets and not self.connected:
            if not self._begin(packets[0], data):
                return
            if self.is_v5:  # what follows the CONNECT is of another version than was thought
                used = packet_bytes(data)
                packets, more = decode(data[used:], packet_bytes_max, self.side, True)
                used += more
            else:
                packets = packets[1:]
        count = count_packets(packets)
        self.gateway.counters.packets_in += count
        if used == len(data):
            self._rest = b""
        else:
            self._keep(data[used:], is_malformed=bool(packets) and packets[-1][0] == MALFORMED)
        self._handle_or_close(packets)
        self._is_plain = self._may_be_plain()
        self._fit_reads(len(data), count, bool(self.unacked))

    def go_on(self, data: bytes, used: int, count: int, is_acked: bool) -> None:
        """Go on behind a read of which `PlainReads` has taken `used` bytes, which were `count` PUBLISHes."""
        if used < len(data):
            self._keep(data[used:], is_malformed=False)
            self._is_plain = False
        self._fit_reads(len(data), count, is_acked)

    def _fit_reads(self, size: int, count: int, is_acked: bool) -> None:
        """Have about `TURN_MESSAGES` read in a turn where acks are due, going by a read of `size` bytes and `count` packets."""
        turns = self._in_turns
        if turns is not None and (count > TURN_MESSAGES or size >= turns.read_bytes):
            turns.limit_reads(size // count * TURN_MESSAGES if count and is_acked else READ_BYTES)

    def _may_be_plain(self) -> bool:
        """Return whether a PUBLISH that comes next needs nothing but to be stored."""
        return (
            self._in_turns is not None
            and self.connected
            and self.meter is None
            and self._deferred is None
            and not (self._rest or self._missing or self.publishing.kept or self.session.no_local)
        )

    def handle_late(self, packet: Packet) -> None:
        """Handle a PUBLISH that was taken for a plain one, and can't be stored like that."""
        if not self._closed:
            self._handle_or_close([packet])
            self._is_plain = self._may_be_plain()

    def _keep(self, rest: bytes, *, is_malformed: bool) -> None:
        """Keep the beginning of a packet. One that comes in many reads is collected, and joined once."""
        wanted = 0 if is_malformed else packet_bytes(rest)
        if wanted > len(rest):
            self._collected.append(rest)
            self._missing = wanted - len(rest)
            self._rest = b""
        else:
            self._rest = rest

    def _handle_or_close(self, packets: list[Packet]) -> None:
        """Handle packets; end the connection where they are wrong."""
        try:
            self._handle(packets)
        except ProtocolError as error:
            self.close(str(error), error.reason)
        except TopicInvalid as error:
            self.close(str(error), ReasonCode.TOPIC_NAME_INVALID)
        except StoreError as error:
            self.close(str(error), ReasonCode.QUOTA_EXCEEDED)

    def _pay(self, publishes: int) -> None:
        """Charge what was received, and the PUBLISHes in it that were stored."""
        assert self.meter is not None
        size, self._unpaid_bytes = self._unpaid_bytes, 0
        self.gateway.throttle.charge(self, self.meter, publishes, size)

    # --- what waits for the plugins ---------------------------------------------------------------------------------

    def _defer(self, packets: list[Packet], question: Undecided) -> None:
        """Keep packets until a question is answered. Nothing more is read, so they are one read at most."""
        self._deferred = packets
        self.pause_reading(PauseReason.AUTHORIZATION_PENDING)
        question.ask(self._decided)

    def _decided(self) -> None:
        """Go on with what was deferred."""
        packets, self._deferred = self._deferred, None
        if self._closed or packets is None:
            return
        if packets:
            self._handle_or_close(packets)
        if not self._is_waiting() and self._late:
            late, self._late = self._late, b""
            self._join(late)
            self.gateway.plain.flush()  # no turn of the sockets is under way
        if not self._is_waiting():
            self.resume_reading(PauseReason.AUTHORIZATION_PENDING)

    def _is_waiting(self) -> bool:
        """Return whether packets wait for the plugins, or nothing is waited for any more."""
        return self._deferred is not None or self._closed

    # --- packets ----------------------------------------------------------------------------------------------------

    def _handle(self, packets: list[Packet]) -> None:
        """Handle the packets of one read, in order. The hot path: PUBLISH costs about 2 us here, with the append."""
        store, session, guard, publishing = self.store, self.session, self.permissions, self.publishing
        if self.is_v5:
            packets = self._within_receive_maximum(packets)
            if session.no_local:
                packets = [
                    (PUBLISH_WITH, *packet[1:], b"") if packet[0] == PUBLISH else packet for packet in split_runs(packets)
                ]
        route_of, append = store.queues.route, store.append_message
        puback_ids, pubrec_ids = publishing.puback_ids, publishing.pubrec_ids
        publishes = 0
        left: Packet | None = None
        undecided: Undecided | None = None
        try:
            for at, packet in enumerate(packets):
                kind = packet[0]
                if kind == PUBLISH:
                    _, flags, topic, packet_id, body = packet
                    qos = flags & 6
                    if qos == QOS_2 and packet_id in session.received:
                        pubrec_ids.append(packet_id)  # a repetition [MQTT-4.3.3-10] 3.1.1:[MQTT-4.3.3-2]
                        continue
                    if publishing.kept and not self.is_v5:
                        publishing.keep(packet)  # those before it come first [MQTT-4.6.0-2]
                        continue
                    try:
                        if guard is not None and not guard.publish.get(topic) and not guard.may_publish(topic, packets):
                            raise PublishForbidden(topic)
                        if qos != QOS_2 or not session.lasts:
                            append(route_of(topic), body, b"", RECORD_FLAGS[flags])
                        else:  # by this very record a repetition is no new message, whatever becomes of the node
                            append(
                                route_of(topic), body, received_properties(session, packet_id), RECORD_FLAGS[flags] | SESSION
                            )
                    except StoreError as error:
                        publishes += publishing.otherwise(packet, error)
                        continue
                    publishes += 1
                    if qos == QOS_1:
                        puback_ids.append(packet_id)
                    elif qos == QOS_2:
                        session.received.add(packet_id)
                        pubrec_ids.append(packet_id)
                elif kind == PUBLISH_RUN:
                    if publishing.run(packet, packets):
                        publishes += len(packet[4])
                    else:  # one by one, as this loop goes on; those behind it too, or many short runs would cost a copy each
                        packets[at + 1 :] = split_runs(packets[at:])
                elif kind == PUBLISH_WITH:
                    publishes += publishing.with_properties(packet, packets)
                elif kind in _ACKS:
                    self._acked(kind, packet)
                elif kind == DISCONNECT:
                    left = packet
                    break  # nothing behind it counts
                else:
                    self._control(packet)
        except Undecided as question:
            undecided = question.with_traceback(None)  # which holds this frame
        finally:
            # Also where a packet was malformed: what came before it is stored, and is acknowledged.
            self.gateway.counters.publishes_in += publishes
            if publishes and store.log.end > self.gateway.backpressure.check_at:
                self.gateway.backpressure.apply(self)
            if self.meter is not None:
                self._pay(publishes)
            if puback_ids or pubrec_ids:
                self._acknowledge_when_durable(puback_ids, pubrec_ids)
            if session.lasts:
                self.gateway.journal.mark(session)
                if self._unrecorded:
                    self._record()
            if self.lagging or self._resend:
                self._pump()
        if undecided is not None:
            self._defer(packets[at:], undecided)
        if left is not None:
            self.gateway.traffic.packets_in[DISCONNECT] += 1
            self._left(left[2])

    def _within_receive_maximum(self, packets: list[Packet]) -> list[Packet]:
        """Return the packets up to the PUBLISH that is more than this server's receive maximum, and an error in its place."""
        received = self.session.received
        room = self.gateway.options.inflight_max - self.unacked - len(received)
        if count_packets(packets) <= room:  # almost always: nothing else is looked at
            return packets
        packets = split_runs(packets)
        known = set(received)
        for at, packet in enumerate(packets):
            if packet[0] in (PUBLISH, PUBLISH_WITH) and packet[3] and packet[3] not in known:
                if packet[1] & QOS_2:
                    known.add(packet[3])
                room -= 1
                if room < 0:  # [MQTT-3.3.4-9]
                    why = (
                        f"more than {self.gateway.options.inflight_max} PUBLISHes came unacknowledged: see the receive maximum"
                    )
                    return [*packets[:at], (MALFORMED, ProtocolError(why, ReasonCode.RECEIVE_MAXIMUM_EXCEEDED))]
        return packets

    def _acknowledge_when_durable(self, puback_ids: list[int], pubrec_ids: list[int]) -> None:
        publishing, when_durable = self.publishing, self.store.when_durable
        denied = publishing.take_denied()
        if puback_ids:
            self.unacked += len(puback_ids)
            publishing.puback_ids = []
            when_durable(partial(self._acknowledge, PUBACK, puback_ids, denied))
        if pubrec_ids:
            publishing.pubrec_ids = []
            when_durable(partial(self._acknowledge, PUBREC, pubrec_ids, denied))

    def _acknowledge(self, kind: int, packet_ids: list[int], denied: Mapping[int, Denial]) -> None:
        if kind == PUBACK:
            self.unacked -= len(packet_ids)
        if not denied:
            self._write(encode_acks(kind, packet_ids), len(packet_ids))
            return
        for packet_id in packet_ids:
            if packet_id not in denied:
                self._write(encode_acks(kind, [packet_id]))
            else:
                reason, why = denied[packet_id]
                self._write(self._explained(partial(encode_ack, kind, packet_id, reason), why))

    # --- a full disk ------------------------------------------------------------------------------------------------

    def retry_kept(self) -> None:
        """Go on with what was kept. What still can't be stored is kept again."""
        kept = self.publishing.kept
        self.publishing.drop_kept()
        if self._closed:
            return
        if self._deferred:  # what waits for the plugins came behind it
            self._deferred = kept + self._deferred
        else:
            self._handle_or_close(kept)
        if not self.publishing.keeps_too_much:
            self.resume_reading(PauseReason.DISK_FULL)

    def _acked(self, kind: int, packet: Packet) -> None:
        self.gateway.traffic.packets_in[kind] += 1
        packet_id = packet[1]
        is_refused = len(packet) > 2 and packet[2] >= REFUSED
        session = self.session
        slot = session.inflight.slots.get(packet_id)
        expected = session.inflight.acknowledge(kind, packet_id, is_refused=is_refused)
        if expected and slot is not None and slot.delivery:
            if is_refused:
                self.gateway.shared.settlements.dead_letter([slot.delivery])  # [MQTT-4.8.2-6]
            else:
                self.gateway.shared.settlements.acknowledge_soon(slot.delivery)
        if session.lasts and kind == PUBREC and not is_refused:
            self._unrecorded.append((PUBREC, packet_id, expected or packet_id in session.inflight.slots))
            return
        if kind == PUBREC and not is_refused:
            if expected or not self.is_v5 or packet_id in self.session.inflight.slots:
                self._write(encode_acks(PUBREL, [packet_id]))  # also the second time [MQTT-4.3.3-4]
            else:
                self._write(encode_ack(PUBREL, packet_id, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND))
        elif expected:
            # An ack that nothing waits for is let pass: after a reconnect a client may repeat one (4.4).
            self.gateway.counters.deliveries_acked += 1

    def _control(self, packet: Packet) -> None:
        kind = packet[0]
        if kind == MALFORMED:
            raise packet[1]
        self.gateway.traffic.packets_in[kind] += 1
        if kind == PUBREL:
            self._released(packet[1])
        elif kind == SUBSCRIBE:
            self._write_recorded(subscribing.subscribe(self, packet[2]))
            self._pump()
        elif kind == UNSUBSCRIBE:
            self._write_recorded(subscribing.unsubscribe(self, packet[2]))
        elif kind == PINGREQ:
            self._write(PINGRESP_BYTES)  # [MQTT-3.12.4-1]
        elif kind == CONNECT:
            raise ProtocolError("a second CONNECT came on one connection [MQTT-3.1.0-2]")
        elif kind == AUTH:
            raise ProtocolError("an AUTH came, and the CONNECT named no authentication method [MQTT-4.12.0-7]")
        else:
            raise ProtocolError(f"a {NAMES[kind]} is not for the server")

    def _released(self, packet_id: int) -> None:
        received = self.session.received
        if self.session.lasts:
            self._unrecorded.append((PUBREL, packet_id, packet_id in received))
            received.discard(packet_id)
            return
        if packet_id in received or not self.is_v5:
            received.discard(packet_id)
            self._write(encode_acks(PUBCOMP, [packet_id]))  # in 3.1.1 whether it was known or not (4.3.3)
        else:
            self._write(encode_ack(PUBCOMP, packet_id, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND))

    def _record(self) -> None:
        """Record the PUBRECs and PUBRELs of this read, and answer them when that is durable.

        Else the node could forget after a kill that a client has released a packet id, and send the message again as a new one;
        or take the next message under that packet id for a repetition.
        """
        unrecorded, self._unrecorded = self._unrecorded, []
        # before it: what a client has must go to nobody else, whatever becomes of the node
        self.gateway.shared.settlements.flush()
        if not self.session.lasts:  # the connection has ended: the client repeats them on another
            return
        released = [packet_id for kind, packet_id, _ in unrecorded if kind == PUBREL]
        try:
            self.gateway.journal.save(self.session, released)
        except DiskFull:  # they are handled once more when there is room
            self.session.received.update(packet_id for kind, packet_id, expected in unrecorded if kind == PUBREL and expected)
            self.publishing.keep_all([each[:2] for each in unrecorded], KEPT_OVERHEAD_BYTES * len(unrecorded))
            return
        self.store.when_durable(partial(self._answer_recorded, unrecorded))

    def _answer_recorded(self, recorded: list[tuple[int, int, bool]]) -> None:
        for kind, answer in ((PUBREC, PUBREL), (PUBREL, PUBCOMP)):
            known = [packet_id for each, packet_id, expected in recorded if each == kind and (expected or not self.is_v5)]
            if known:
                self._write(encode_acks(answer, known), len(known))
            for each, packet_id, expected in recorded if self.is_v5 else ():
                if each == kind and not expected:
                    self._write(encode_ack(answer, packet_id, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND))

    def _left(self, body: bytes) -> None:
        """Handle a DISCONNECT (3.14.4)."""
        wish = parse_disconnect(body)
        if wish.session_expiry_s is not None:
            if wish.session_expiry_s and not self.session.expiry_s:
                raise ProtocolError("a DISCONNECT makes a session last that the CONNECT did not (3.14.2.2.2)")
            self.session.expiry_s = min(wish.session_expiry_s, self.gateway.options.session_expiry_s_max)
        if wish.reason == ReasonCode.NORMAL_DISCONNECTION:
            self.session.has_will = False  # [MQTT-3.14.4-3]
        self.close("", ReasonCode.NORMAL_DISCONNECTION)

    # --- CONNECT ----------------------------------------------------------------------------------------------------

    def _begin(self, packet: Packet, data: bytes) -> bool:
        """Handle the first packet of a connection; return whether what follows it in `data` can be handled now."""
        try:
            self._first(packet)
        except Undecided as question:
            self._rest, self._late = b"", data  # it comes first once more
            self._defer([], question)
            return False
        except ProtocolError as error:
            self._refuse(error, packet)
            self.close(str(error), error.reason)
            return False
        return not self._closed

    def _first(self, packet: Packet) -> None:
        """Handle a CONNECT, which must come first [MQTT-3.1.0-1]. Raises ProtocolError, Undecided."""
        if packet[0] == MALFORMED:
            raise packet[1]
        if packet[0] != CONNECT:
            raise ProtocolError(f"the first packet is {NAMES[packet[0]]}, and must be CONNECT [MQTT-3.1.0-1]")
        store = self.store.options
        self.level = protocol_level(packet[2])
        wish = parse_connect(packet[2], topic_levels_max=store.topic_levels_max, topic_bytes_max=store.topic_bytes_max)
        if self.peer.is_over_rate:
            raise ConnectRefused(
                "more clients connect than the listener takes in a second: see connections_per_s",
                ConnectCode.SERVER_UNAVAILABLE,
                ReasonCode.CONNECTION_RATE_EXCEEDED,
            )
        self.gateway.access.admit(self, wish)
        self._accept(wish)
        self.gateway.traffic.packets_in[CONNECT] += 1
        self.gateway.counters.packets_in += 1

    def _refuse(self, error: ProtocolError, packet: Packet) -> None:
        """Answer a CONNECT that is refused, where its version has an answer [MQTT-3.1.4-2]."""
        if not self.level and not isinstance(error, ConnectRefused):
            return
        if self.level == V5_0:
            self.packet_bytes_max = stated_packet_bytes_max(packet[2])
        answer = self._explained(partial(encode_refusal, error, self.level), str(error))  # [MQTT-3.2.2-19]
        if answer:
            self._write(answer)

    def _accept(self, wish: Connect) -> None:
        gateway = self.gateway
        gateway.clients.check_room(wish.client_id)
        client_id = wish.client_id or assign_client_id()
        if wish.level == V5_0:
            self.is_v5 = True
            self.side = FROM_CLIENT_5
            self._says_why = wish.wants_problem_information
            self.packet_bytes_max = wish.packet_bytes_max
            alias_max = min(wish.topic_alias_max, gateway.options.topic_alias_max)
            self.aliases = TopicAliases(alias_max) if alias_max else None
        is_present = gateway.register(self, client_id, wish)
        self.subscriptions = ClientSubscriptions(self.session, self, gateway.deliveries)
        self.session.inflight.maximum = min(wish.receive_max, gateway.options.inflight_max)
        self.connected = True
        keep_alive_s = self._keep_alive_s(wish)
        self.keep_alive_s = keep_alive_s * 1.5  # [MQTT-3.1.2-22] 3.1.1:[MQTT-3.1.2-24]
        gateway.keep_alives.watch(self)
        if is_present:
            self._resume()
        self._write(self._connack(wish, is_present, keep_alive_s))  # before what is sent again: that takes a turn of the loop
        self._has_greeted = True

    def _keep_alive_s(self, wish: Connect) -> int:
        """Return the keep alive that holds: the client's, or in MQTT 5.0 the server's where that is shorter."""
        longest_s = self.gateway.options.keep_alive_s_max
        if self.is_v5 and longest_s and not 0 < wish.keep_alive_s <= longest_s:
            return longest_s
        return wish.keep_alive_s

    def _connack(self, wish: Connect, is_present: bool, keep_alive_s: int) -> bytes:
        if not self.is_v5:
            return encode_connack(is_present and wish.level > 3, ConnectCode.ACCEPTED)  # 3.1 has no such flag
        options = self.gateway.options
        found: PropertyValues = {
            Property.RECEIVE_MAXIMUM: options.inflight_max,
            Property.MAXIMUM_PACKET_SIZE: options.packet_bytes_max,
            Property.SHARED_SUBSCRIPTION_AVAILABLE: int(options.shared == "on"),
        }
        if options.topic_alias_max:
            found[Property.TOPIC_ALIAS_MAXIMUM] = options.topic_alias_max
        if not wish.client_id:  # [MQTT-3.1.3-7]
            found[Property.ASSIGNED_CLIENT_ID] = self.session.client_id
        if keep_alive_s != wish.keep_alive_s:  # [MQTT-3.1.2-21]
            found[Property.SERVER_KEEP_ALIVE_S] = keep_alive_s
        if self.session.expiry_s != wish.session_expiry_s:  # 3.2.2.3.2
            found[Property.SESSION_EXPIRY_S] = self.session.expiry_s
        return encode_connack_5(is_present, ReasonCode.SUCCESS, found)

    def _resume(self) -> None:
        """Go on with a session that was there: what was under way goes out again [MQTT-4.4.0-1], then what came meanwhile."""
        session = self.session
        self._resend = list(reversed(session.inflight.slots))
        self.subscriptions.restore()
        self.pump_soon()

    # --- deliveries -------------------------------------------------------------------------------------------------

    def pump_soon(self) -> None:
        """Go on with the subscriptions that lag, in the next turn of the loop."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self.gateway.loop.call_soon(self._pump_on)

    def _pump_on(self) -> None:
        self._pump_scheduled = False
        self._pump()

    def _pump(self) -> None:
        if self._resend:
            self._send_again()
        if self.gateway.options.session_queued_max and self.lagging:
            self.subscriptions.limit_backlog()
        for subscription in tuple(self.lagging):
            if not self.writable or self._resend:
                break
            self.lagging[subscription] = self.lagging.pop(subscription)  # to the end: they take turns
            subscription.pump()
        if self.connected and self.subscriptions.draining:
            self.subscriptions.release_drained()

    def _send_again(self) -> None:
        """Send what an earlier connection left unacknowledged, in its order, as far as there is room."""
        slots, waiting = self.session.inflight.slots, self._resend
        while waiting and self.writable and not self._closed:
            if len(slots) - len(waiting) >= self.session.inflight.maximum:
                return
            packet_id = waiting.pop()
            slot = slots.get(packet_id)
            if slot is None:
                if packet_id in slots:
                    self._write(encode_acks(PUBREL, [packet_id]))
                continue
            if self.permissions is not None:  # another user may have come with this client id
                admitted, passed = self.permissions.admit(ENTRY.pack(slot.position, slot.size, 0))
                if not passed:
                    waiting.append(packet_id)
                    return
                if not admitted:
                    self._drop(packet_id, slot)
                    continue
            data = encode_redelivery(self.store, slot, packet_id, self.subscriptions.redelivery_options(slot))
            if data is None or len(data) > (self.packet_bytes_max or len(data)):
                self._drop(packet_id, slot)
            else:
                self.send_publishes(data, 1)

    def _drop(self, packet_id: int, slot: Slot) -> None:
        """Give up a delivery that can't go out again."""
        del self.session.inflight.slots[packet_id]
        if slot.delivery:  # nobody else gets it [MQTT-4.8.2-4]
            self.gateway.shared.settlements.acknowledge([slot.delivery])

    # --- output and the end -----------------------------------------------------------------------------------------

    def send_publishes(self, data: bytes, count: int) -> None:
        """Send a run of PUBLISH packets, behind those that wait."""
        if self._waiting_runs:
            self.send_when_durable(data, count)
            return
        self.gateway.counters.publishes_out += count
        self.listener.bytes_out += len(data)
        if self._transport is not None:
            self._transport.write(data)

    def send_when_durable(self, data: bytes, count: int) -> None:
        """Send a run when all that was recorded so far is durable. More than the send buffer takes must not wait."""
        self._waiting_runs += 1
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= self.gateway.options.send_buffer_bytes:
            self.writable = False
        self.store.when_durable(partial(self._send_durable, data, count))

    def _send_durable(self, data: bytes, count: int) -> None:
        self.gateway.counters.publishes_out += count
        self.listener.bytes_out += len(data)
        if self._transport is not None:
            self._transport.write(data)
        self._waiting_runs -= 1
        self._waiting_bytes -= len(data)
        if not self.writable:
            self._write_on()

    def _write_recorded(self, data: bytes) -> None:
        """Send an answer; in a session that lasts when what it says is durable."""
        if self.session.lasts:
            self.store.when_durable(partial(self._write, data))
        else:
            self._write(data)

    def _explained(self, encode: Callable[[str], bytes], why: str) -> bytes:
        """Return a packet with its reason string, where the client wants such [MQTT-3.1.2-29] and takes a packet as large.

        See [MQTT-3.4.2-2], [MQTT-3.5.2-2], [MQTT-3.14.2-3].
        """
        data = encode(why if self._says_why else "")
        return data if len(data) <= (self.packet_bytes_max or len(data)) else encode("")

    def puback(self, data: bytes, count: int) -> None:
        """Send the PUBACKs of PUBLISHes that `PlainReads` has stored."""
        self.unacked -= count
        self._write(data, count)

    def _write(self, data: bytes, packets: int = 1) -> None:
        """Send answers, `packets` of one type. Who doesn't take them must not make the server write more."""
        transport, size = self._transport, len(data)
        if transport is None:
            return
        if self.packet_bytes_max is not None and packets == 1 and size > self.packet_bytes_max:  # [MQTT-3.1.2-24]
            self.close(f"an answer of {size} bytes is more than the client takes", ReasonCode.PACKET_TOO_LARGE)
            return
        self.listener.bytes_out += size
        self.gateway.traffic.packets_out[data[0] >> 4] += packets
        transport.write(data)
        if self._is_full:
            self._answers_bytes += size
            if self._answers_bytes > ANSWERS_BYTES_MAX:
                self.pause_reading(PauseReason.ANSWERS_UNREAD)

    def close(self, why: str, reason: ReasonCode) -> None:
        """End the connection: what was written goes out, then the acks that are due, and nothing more is read.

        In MQTT 5.0 a DISCONNECT with the reason comes last, unless the client is the one who left. `why` is for that, for the
        log and for the count by `reason`; empty if the client or the operator wants it so.
        """
        if self._closed:
            return
        self.gateway.plain.flush()  # what was taken of it comes before its end
        self._closed = True
        self._is_plain = False
        if why:
            self.gateway.refused(self, why, reason)
        if self._transport is not None:
            if self.is_v5 and self._has_greeted and reason != ReasonCode.NORMAL_DISCONNECTION:
                self._farewell = self._disconnect(why, reason)
            self._transport.pause_reading()
            self.store.when_durable(self._close_transport)
            self.gateway.loop.call_later(CLOSE_FLUSH_S, self._abort)
        self._end()

    def _disconnect(self, why: str, reason: ReasonCode) -> bytes:
        """Return the DISCONNECT with which the server closes [MQTT-4.13.1-1], as long as the client can take."""
        data = self._explained(partial(encode_disconnect, reason), why)
        return data if len(data) <= (self.packet_bytes_max or len(data)) else b""

    def _close_transport(self) -> None:
        if self._transport is not None:
            if self._farewell:
                self.listener.bytes_out += len(self._farewell)
                self.gateway.traffic.packets_out[DISCONNECT] += 1
                self._transport.write(self._farewell)
            self._transport.close()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        """Leave the session to the gateway, to end it or to keep it; once."""
        if not self.connected:
            return
        self.connected = False
        self.publishing.drop_kept()  # none of it was acknowledged
        self.subscriptions.stop()
        self.gateway.lifecycle.leave(self.session)
        self.subscriptions.close()
