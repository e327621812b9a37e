"""One client's connection: bytes come in, packets are dispatched, and the connection ends.

A socket read is decoded to its end in one loop. All PUBLISHes in it are appended in this turn, and acknowledged with one write
when their group is durable. There is no task, no await and no object for each message on this way.

Clauses in brackets are those of MQTT 5.0. Where MQTT 3.1.1 has a clause of another number, it follows as 3.1.1:[...].
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, cast

from penstock.access.identity import ProvenIdentity
from penstock.gateway.auth.authorizer import Authorizer
from penstock.gateway.auth.candidate import Candidate
from penstock.gateway.auth.pending import AuthorizationPending, retry_s
from penstock.gateway.auth.permissions import Permissions
from penstock.gateway.auth.verified import Credential
from penstock.gateway.connection.backpressure import Backpressure
from penstock.gateway.connection.close_log import CloseLog
from penstock.gateway.connection.disk_full import KeptPackets
from penstock.gateway.connection.handshake import Handshake
from penstock.gateway.connection.inbox import Inbox
from penstock.gateway.connection.incoming_acks import ACKS, IncomingAcks
from penstock.gateway.connection.incoming_publishes import PUBLISHES, IncomingPublishes
from penstock.gateway.connection.open_connections import OpenConnections
from penstock.gateway.connection.outbox import Outbox
from penstock.gateway.connection.pausing import PauseReason
from penstock.gateway.connection.publish_fast_path import PublishFastPath
from penstock.gateway.connection.subscribing import Answering, Subscribing
from penstock.gateway.connection.throttle import Meter, Throttle
from penstock.gateway.counters import GatewayCounters
from penstock.gateway.delivery.client_subscriptions import ClientSubscriptions
from penstock.gateway.options import GatewayOptions
from penstock.gateway.overtime import Overtime
from penstock.gateway.protocol.disconnect import parse_disconnect
from penstock.gateway.protocol.encode import PINGRESP_BYTES
from penstock.gateway.protocol.errors import ProtocolError
from penstock.gateway.protocol.fixed_header import FROM_CLIENT, FROM_CLIENT_5, packet_bytes
from penstock.gateway.protocol.packets import (
    AUTH,
    CONNECT,
    DISCONNECT,
    MALFORMED,
    NAMES,
    PING_RUN,
    PINGREQ,
    PUBACK,
    PUBACK_RUN,
    PUBREL,
    SUBSCRIBE,
    UNSUBSCRIBE,
    Packet,
)
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.protocol.runs import count_packets
from penstock.gateway.sessions.lifecycle import SessionLifecycle
from penstock.gateway.sessions.session import Session
from penstock.gateway.strikes import NO_CLAIM
from penstock.gateway.traffic import Traffic
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.socket_transport import SocketTransport
from penstock.gateway.transport.websocket import AnsweringProtocol
from penstock.store.errors import StoreError, TopicInvalid
from penstock.store.options import KIB
from penstock.store.store import Store

if TYPE_CHECKING:  # amqtt takes 0.1 s to import
    from penstock.gateway.auth.client_session import ClientSession

LATE_BYTES_MAX: Final = 16 * KIB
"""Bytes that a client may send after its CONNECT before the plugins have let it in. After that the server stops reading."""


LONG_READ_BYTES: Final = 2 * KIB
"""Bytes of a read from which on it may have to wait for a later turn. The packets of most clients are fewer."""

LONG_PACKETS: Final = 64
"""Packets of a read after which the connection looks whether the turn is over. The answers to longer reads take one write."""

LOST_REASONS: Final = (ReasonCode.NORMAL_DISCONNECTION, ReasonCode.KEEP_ALIVE_TIMEOUT, ReasonCode.SESSION_TAKEN_OVER)
"""Why a connection ends whose client may have ended, if the client has sent no DISCONNECT."""

DEFERRED: Final = int(PauseReason.AUTHORIZATION_PENDING | PauseReason.TURN_OVER)
"""The reasons not to read while packets are deferred."""


class Connection(AnsweringProtocol):
    """The server's end of one MQTT connection.

    Parameters:
        peer: the other end.
        inbox: cuts what is received into packets.
        outbox: writes what is sent.
        kept: keeps packets while the disk is full.
        publishes, acks: handle these packets of the client.
        handshake, subscribing: handle these packets of all clients.
        fast_path: takes reads that are nothing but plain PUBLISHes.
        store: where messages go.
        open_connections: all connections, this one among them while it is open.
        lifecycle: is told when the client leaves its session.
        backpressure, throttle: pause reading.
        overtime: bounds what is handled in one turn of the loop.
        meter: the rate limits of this connection, if it has any.
        close_log: notes why the server closes the connection.
        counters, traffic: count packets.
        now_s: returns the monotonic time in seconds.
        loop: the event loop.
        options: see `GatewayOptions`.
        unanswered_s_max: seconds for which a packet waits for the plugins: see `AccessOptions.unanswered_ms`.
    """

    __slots__ = (
        "__weakref__",
        "_acks",
        "_backpressure",
        "_close_log",
        "_counters",
        "_fast_path",
        "_handshake",
        "_has_left",
        "_inbox",
        "_is_closed",
        "_is_plain",
        "_lifecycle",
        "_listener",
        "_loop",
        "_now_s",
        "_open_connections",
        "_options",
        "_overtime",
        "_paused_for",
        "_publishes",
        "_store",
        "_subscribing",
        "_throttle",
        "_traffic",
        "_transport",
        "_unanswered_s",
        "_unanswered_s_max",
        "_uncharged_bytes",
        "candidate",
        "claim",
        "closed_for",
        "connected",
        "credential",
        "identity",
        "is_v5",
        "keep_alive_s",
        "kept",
        "level",
        "meter",
        "outbox",
        "peer",
        "permissions",
        "plugin_session",
        "received_s",
        "session",
        "side",
        "subscriptions",
        "user",
        "wheel_slot",
    )

    def __init__(
        self,
        peer: Peer,
        inbox: Inbox,
        outbox: Outbox,
        kept: KeptPackets,
        publishes: IncomingPublishes,
        acks: IncomingAcks,
        *,
        handshake: Handshake[Connection],
        subscribing: Subscribing,
        fast_path: PublishFastPath,
        store: Store,
        open_connections: OpenConnections[Connection],
        lifecycle: SessionLifecycle,
        backpressure: Backpressure,
        throttle: Throttle,
        overtime: Overtime,
        meter: Meter | None,
        close_log: CloseLog,
        counters: GatewayCounters,
        traffic: Traffic,
        now_s: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
        options: GatewayOptions,
        unanswered_s_max: float,
    ) -> None:
        self.peer = peer
        self.outbox = outbox
        self.kept = kept
        self.meter = meter
        self._inbox = inbox
        self._publishes = publishes
        self._acks = acks
        self._handshake = handshake
        self._subscribing = subscribing
        self._fast_path = fast_path
        self._store = store
        self._open_connections = open_connections
        self._lifecycle = lifecycle
        self._backpressure = backpressure
        self._throttle = throttle
        self._overtime = overtime
        self._close_log = close_log
        self._counters = counters
        self._traffic = traffic
        self._now_s = now_s
        self._loop = loop
        self._options = options
        self._unanswered_s_max = unanswered_s_max
        self._listener = peer.listener
        self._transport: asyncio.Transport | None = None
        # What the CONNECT says:
        self.level = 0
        """The protocol level of the CONNECT; 0 until it is known."""
        self.is_v5 = False
        self.side = FROM_CLIENT
        """The packets that may come."""
        self.claim = NO_CLAIM
        """The names in the CONNECT."""
        self.connected = False
        """The CONNECT was accepted, and the connection has not ended."""
        self.session = Session("", 0)
        """The session of the client. Before the CONNECT it is an empty one."""
        self.subscriptions: ClientSubscriptions
        """The subscriptions of the client, once its CONNECT was accepted."""
        # What the plugins say, if there are any:
        self.plugin_session: ClientSession | None = None
        """The client as the plugins see it."""
        self.candidate: Candidate | None = None
        """The CONNECT while it is authenticated."""
        self.identity: ProvenIdentity | None = None
        """Who the client is, if a password file or a token has proved it."""
        self.credential: Credential | None = None
        """The credentials with which the client was accepted, if they are remembered."""
        self.user = ""
        """The user name, if somebody vouches for it."""
        self.permissions: Permissions | None = None
        """What the client may do with topics, if there are plugins for topics."""
        self._unanswered_s: float | None = None
        """When the plugins first gave no answer about a packet that waits, in monotonic seconds; None if none waits so."""
        # Keep alive:
        self.keep_alive_s = 0.0
        """Seconds of silence after which the connection is closed; 0 for no limit."""
        self.received_s = 0.0
        """Monotonic seconds of the last read, or of the moment in which reading resumed."""
        self.wheel_slot = 0
        """Where the keep-alive wheel has this connection."""
        # Reading and the end:
        self._is_plain = False
        """No PUBLISH that comes next would have to wait for anything: `PublishFastPath` may take it."""
        self._paused_for = 0
        """Why the connection is not read: bits of `PauseReason`. An int, because operations on flags are slow."""
        self._uncharged_bytes = 0
        """Bytes received that are not yet charged to `meter`."""
        self._is_closed = False
        self._has_left = False
        """Whether the client has sent a DISCONNECT."""
        self.closed_for: ReasonCode | None = None
        """Why the server closed the connection; None if the client ended it."""

    # --- the socket -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._inbox.open(transport if isinstance(transport, SocketTransport) else None)
        self.outbox.open(self, self._transport, self._loop)
        self.kept.open(self)
        self.received_s = self._now_s()
        self.peer.made(transport)
        self._open_connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self._is_plain = False
        self._transport = None
        self._inbox.open(None)
        self.outbox.lost()
        self._end(f"the connection was lost: {exc}" if exc else "the connection was lost", ReasonCode.NORMAL_DISCONNECTION)
        self._open_connections.remove(self)

    def eof_received(self) -> bool:
        # A client that has sent everything may still wait for its acks. `close` sends them, so the transport must not close.
        self.close("", ReasonCode.NORMAL_DISCONNECTION, left="the client has closed the connection without a DISCONNECT")
        return not self._listener.options.is_tls  # TLS has no half-closed connections

    def pause_writing(self) -> None:
        self.outbox.pause_writing()

    def resume_writing(self) -> None:
        self.outbox.resume_writing()

    def pump_soon(self) -> None:
        """Go on with the client's deliveries, in the next turn of the loop."""
        self.outbox.pump_soon()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call a function after `delay_s` seconds."""
        self._loop.call_later(delay_s, callback)

    def pause_reading(self, reason: PauseReason) -> None:
        """Stop reading for a reason."""
        self._paused_for |= int(reason)
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self, reason: PauseReason) -> None:
        """Withdraw a reason; read again if no other is left."""
        if self._paused_for & int(reason):
            self._paused_for &= ~int(reason)
            self._read_on()

    def _read_on(self) -> None:
        """Read again, unless a reason is left not to."""
        self.received_s = self._now_s()  # the server did not look meanwhile, so this does not count as silence
        if not self._paused_for and self._transport is not None and not self._is_closed:
            self._transport.resume_reading()

    @property
    def is_unread(self) -> bool:
        """True while the server does not read the connection for reasons of its own."""
        return bool(self._paused_for & ~int(PauseReason.ANSWERS_UNREAD))

    # --- reads ------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_closed:
            return
        received = len(data)
        self._listener.bytes_in += received
        self.received_s = self._now_s()
        if self._is_plain and self._fast_path.take(self, data):
            return
        if self.meter is not None:
            self._uncharged_bytes += received
        inbox = self._inbox
        if inbox.deferred is not None:
            inbox.late += data
            if len(inbox.late) > LATE_BYTES_MAX:
                self.pause_reading(PauseReason.AUTHORIZATION_PENDING)
        elif (received >= LONG_READ_BYTES or not self.connected) and self._overtime.is_over():
            # A CONNECT costs as much as many messages, and a fleet may come back within one turn.
            inbox.late = data
            self._wait_for_turn([])
        else:
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        """Handle the packets that are whole with a read, or as many as this turn has time for."""
        inbox = self._inbox
        self._receive_piece(data)
        while inbox.late and inbox.deferred is None and not self._is_closed:
            if self._overtime.is_over():
                self._wait_for_turn([])
            else:
                self._receive_piece(inbox.take_late())

    def _receive_piece(self, data: bytes) -> None:
        """Handle the packets in the first piece of what was received."""
        inbox = self._inbox
        if inbox.is_collecting:
            data = inbox.collect(data)
            if not data:
                if self.meter is not None:
                    self._charge(0)
                return
            self._is_plain = self._may_be_plain()
            if self._is_plain and self._fast_path.take(self, data):
                return
        elif inbox.rest:
            data = inbox.rest + data
        packets = inbox.decode(data, self.side, runs=self.connected)
        if not self.connected:
            if not packets:
                if self.meter is not None:
                    self._charge(0)
                return
            if not self._connect(packets[0], data):
                return
            data = data[packet_bytes(data) :]
            packets = inbox.decode_again(data, self.side)
        count = count_packets(packets)
        self._counters.packets_in += count
        self._handle_or_close(packets)
        self._is_plain = self._may_be_plain()
        inbox.pace(len(data), count, is_acked=bool(self.outbox.unacked))

    def note_answer(self, size: int) -> None:
        self.outbox.note_answer(size)

    def _connect(self, packet: Packet, data: bytes) -> bool:
        """Handle the first packet of a connection; return whether what follows it in `data` can be handled now."""
        try:
            self._handshake.accept(self, packet)
        except AuthorizationPending as question:
            self._inbox.defer_connect(data)
            # We read on, because otherwise we would not notice that the client has gone.
            self._paused_for |= int(PauseReason.AUTHORIZATION_PENDING)
            question.ask(self._authorized)
            return False
        except ProtocolError as error:
            error.__traceback__ = None  # It holds this frame, which may hold the error: memory for the garbage collector.
            self._handshake.refuse(self, error, packet, data)
            self.close(str(error), error.reason)
            return False
        return not self._is_closed

    def begin(self, subscriptions: ClientSubscriptions) -> None:
        """Serve a client: its CONNECT was accepted, and its session is in `session`."""
        session, permissions, is_v5 = self.session, self.permissions, self.outbox.is_v5
        self.subscriptions = subscriptions
        self.is_v5 = is_v5
        self.side = FROM_CLIENT_5 if is_v5 else FROM_CLIENT
        self._inbox.packet_bytes_max = self._options.packet_bytes_max
        self.outbox.permissions = permissions
        self.outbox.begin(subscriptions)
        self._publishes.begin(session, permissions, is_v5=is_v5)
        self._acks.begin(session, is_v5=is_v5)
        self.connected = True

    def _may_be_plain(self) -> bool:
        """Return whether a PUBLISH that comes next needs nothing but to be stored."""
        return self._inbox.is_idle and self.connected and self.meter is None and not self.kept and not self.session.no_local

    def continue_read(self, data: bytes, used: int, count: int, *, is_acked: bool) -> None:
        """Go on after a read of which the fast path has taken the first `used` bytes, which were `count` PUBLISHes."""
        if used < len(data):
            self._inbox.keep(data[used:])
            self._is_plain = False
        self._inbox.pace(len(data), count, is_acked=is_acked)

    def receive_late(self, packet: Packet) -> None:
        """Handle a PUBLISH on the general path that the fast path has taken and could not store."""
        if not self._is_closed:
            self._handle_or_close([packet])
            self._is_plain = self._may_be_plain()

    def _charge(self, publishes: int) -> None:
        """Charge the bytes received to the meter, and the messages of them that were stored."""
        assert self.meter is not None
        size, self._uncharged_bytes = self._uncharged_bytes, 0
        self._throttle.charge(self, self.meter, publishes, size)

    # --- packets ----------------------------------------------------------------------------------------------------

    def _handle_or_close(self, packets: list[Packet]) -> None:
        """Handle packets; close the connection if they are wrong."""
        try:
            self._handle(packets)
        except ProtocolError as error:
            error.__traceback__ = None  # see `_connect`
            self.close(str(error), error.reason)
        except TopicInvalid as error:
            self.close(str(error), ReasonCode.TOPIC_NAME_INVALID)
        except StoreError as error:
            self.close(str(error), ReasonCode.QUOTA_EXCEEDED)

    def _handle(self, packets: list[Packet]) -> None:
        """Handle the packets of one read, in order."""
        publishes, outbox = self._publishes, self.outbox
        if self.is_v5:
            packets = publishes.admit(packets)
        at = 0
        farewell: Packet | None = None
        pending: AuthorizationPending | None = None
        look_at = LONG_PACKETS
        if len(packets) > LONG_PACKETS:
            outbox.gather()
        try:
            while at < len(packets):
                if at >= look_at:
                    look_at = at + LONG_PACKETS
                    if self._overtime.is_over():
                        break
                packet = packets[at]
                kind = packet[0]
                if kind in PUBLISHES:
                    begun, at = at, publishes.receive(packets, at)
                    if at - begun < LONG_PACKETS:
                        look_at = at  # It has ended for a reason, which may have cost time.
                    continue
                if kind in ACKS:
                    self._traffic.packets_in[kind] += 1
                    self._acks.acknowledged(packet)
                elif kind == PUBACK_RUN:
                    self._traffic.packets_in[PUBACK] += len(packet[1])
                    self._acks.acknowledged_run(packet[1])
                elif kind == DISCONNECT:
                    farewell = packet
                    break  # what follows it is ignored
                elif (rest := self._control(packet)) is not None:
                    packets[at] = rest
                    break
                at += 1
        except AuthorizationPending as question:
            pending = question.with_traceback(None)  # the traceback holds this frame
        finally:
            # Also if a packet is malformed: the messages before it are stored, and are acknowledged.
            stored = publishes.finish_read()
            if stored and self._store.log.end > self._backpressure.check_at:
                self._backpressure.apply(self)
            if self.meter is not None:
                self._charge(stored)
            self._acks.finish_read()
            outbox.send_gathered()
            if outbox.lagging or outbox.redelivery is not None:
                outbox.pump()
        if pending is not None:
            at = publishes.stopped_at if packets[at][0] in PUBLISHES else at
            self._inbox.defer(packets[at:])
            self._wait_for(pending)
        elif farewell is not None:
            self._traffic.packets_in[DISCONNECT] += 1
            self._disconnected(farewell[2])
        elif at < len(packets) and not self._is_closed:
            self._wait_for_turn(packets[at:])

    def _control(self, packet: Packet) -> Packet | None:
        """Handle a packet that is neither a PUBLISH nor an ack. Return what a later turn must go on with, or None."""
        kind = packet[0]
        if kind == MALFORMED:
            raise packet[1]
        if kind in (SUBSCRIBE, UNSUBSCRIBE):
            return self._change_subscriptions(packet)
        if kind == PING_RUN:
            self._traffic.packets_in[PINGREQ] += packet[1]
            self.outbox.send(PINGRESP_BYTES * packet[1], packet[1])
            return None
        self._traffic.packets_in[kind] += 1
        if kind == PUBREL:
            self._acks.released(packet[1])
        elif kind == PINGREQ:
            self.outbox.send(PINGRESP_BYTES)  # [MQTT-3.12.4-1]
        elif kind == CONNECT:
            raise ProtocolError("a second CONNECT came on one connection [MQTT-3.1.0-2]")
        elif kind == AUTH:
            raise ProtocolError("an AUTH came, and the CONNECT named no authentication method [MQTT-4.12.0-7]")
        else:
            raise ProtocolError(f"a {NAMES[kind]} is not for the server")
        return None

    def _change_subscriptions(self, packet: Packet) -> Packet | None:
        """Handle a SUBSCRIBE or UNSUBSCRIBE as far as this turn has time. Return what a later turn must go on with, or None."""
        if not self.connected:  # the connection was closed in the course of this read
            return None
        kind, flags, request = packet
        if isinstance(request, bytes):
            self._traffic.packets_in[kind] += 1
            if kind == SUBSCRIBE:
                request = self._subscribing.subscribe(self.subscriptions, self.permissions, request)
            else:
                request = self._subscribing.unsubscribe(self.subscriptions, request)
        answering: Answering = request
        try:
            next(answering)
            while not self._overtime.is_over():
                next(answering)
        except StopIteration as end:
            self._answer(end.value)
            if kind == SUBSCRIBE:
                self.outbox.pump()
            return None
        return kind, flags, answering

    def _answer(self, data: bytes) -> None:
        """Send a SUBACK or UNSUBACK; in a session that lasts, when what it says is durable."""
        if self.session.lasts:
            self.outbox.send_when_recorded(data)
        else:
            self.outbox.send(data)

    def _disconnected(self, body: bytes) -> None:
        """Handle a DISCONNECT (3.14.4)."""
        wish = parse_disconnect(body, self._options.user_properties_max)
        session = self.session
        if wish.session_expiry_s is not None:
            if wish.session_expiry_s and not session.expiry_s:
                raise ProtocolError("a DISCONNECT makes a session last that the CONNECT did not (3.14.2.2.2)")
            session.expiry_s = min(wish.session_expiry_s, self._options.session_expiry_s_max)
        self._has_left = True
        if wish.reason == ReasonCode.NORMAL_DISCONNECTION:
            session.has_will = False  # [MQTT-3.14.4-3]
        self.close("", ReasonCode.NORMAL_DISCONNECTION, left="the client has sent a DISCONNECT")

    # --- what waits -------------------------------------------------------------------------------------------------

    def _wait_for_turn(self, packets: list[Packet]) -> None:
        """Handle packets, and what was received after them, in a later turn; read nothing before."""
        self._inbox.defer(packets)
        self.pause_reading(PauseReason.TURN_OVER)
        self._overtime.add(self._handle_deferred)

    def _wait_for(self, question: AuthorizationPending) -> None:
        """Ask the plugins; read nothing before they have answered."""
        self.pause_reading(PauseReason.AUTHORIZATION_PENDING)
        question.ask(self._authorized)

    def _authorized(self, is_answered: bool) -> None:
        """Go on with the packets that have waited for the plugins; without an answer ask again, or close in the end."""
        if is_answered or self._is_closed:
            self._unanswered_s = None
            self._handle_deferred()
            return
        now_s = self._now_s()
        if self._unanswered_s is None:
            self._unanswered_s = now_s
        waited_s = now_s - self._unanswered_s
        if waited_s < self._unanswered_s_max:
            self.call_later(retry_s(waited_s), self._handle_deferred)
        else:
            self.close(
                f"the plugins have given no answer about a packet for {waited_s:.0f} s",
                ReasonCode.SERVER_BUSY,
            )

    def _handle_deferred(self) -> None:
        """Handle the packets that have waited for the plugins, or for their turn."""
        inbox = self._inbox
        self._paused_for &= ~DEFERRED
        packets = inbox.take_deferred()
        if self._is_closed or packets is None:
            return
        if packets:
            self._handle_or_close(packets)
        if not self._is_waiting() and inbox.late:
            late = inbox.take_late()
            if not (self._may_be_plain() and self._fast_path.take(self, late)):
                self._receive(late)
            self._fast_path.flush()  # no turn of the sockets is under way, which would do it
        if not self._is_waiting():
            self._read_on()

    def _is_waiting(self) -> bool:
        """Return whether packets wait, or need not wait any more because the connection is closed."""
        return self._inbox.deferred is not None or self._is_closed

    def retry_kept(self) -> None:
        """Handle the packets that were kept while the disk was full. Those that still find no room are kept again."""
        kept = self.kept.clear()
        if self._is_closed:
            return
        if self._inbox.deferred:  # these packets came later
            self._inbox.deferred = kept + self._inbox.deferred
        else:
            self._handle_or_close(kept)
        if not self.kept.is_full:
            self.resume_reading(PauseReason.DISK_FULL)

    # --- access control ---------------------------------------------------------------------------------------------

    def held_filters(self) -> list[str]:
        """Return the filters of the client's subscriptions."""
        return list(self.subscriptions.by_filter) if self.connected else []

    def withdraw(self, filters: Sequence[str], why: str) -> None:
        """End subscriptions that the client may no longer have, and close the connection: MQTT has no other way to tell it."""
        held = [each for each in filters if each in self.subscriptions.by_filter] if self.connected else []
        if held:
            self.subscriptions.withdraw(held)
            self.close(why, ReasonCode.ADMINISTRATIVE_ACTION)

    def recheck(self, authorizer: Authorizer) -> None:
        """Look again at what the client may do, because access control has changed; end what it may do no more.

        A client that loses a subscription is disconnected, too: MQTT has no other way to tell it.
        """
        if not self.connected:
            return
        found = authorizer.recheck(self, self.session.client_id, list(self.subscriptions.by_filter))
        if not found.may_have_will:
            self.session.has_will = False
        self.subscriptions.withdraw(found.refused)
        if found.why:
            self.close(found.why, ReasonCode.ADMINISTRATIVE_ACTION)

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self, why: str, reason: ReasonCode, *, left: str = "") -> None:
        """Close the connection: what was written goes out, then the acks that are due, and nothing more is read.

        In MQTT 5.0 a DISCONNECT with the reason comes last, unless the client has left by itself.

        Args:
            why: a sentence for the client and the log. Empty if the client or the operator wants the end: then it is neither
                logged nor counted.
            reason: what is counted, and what the DISCONNECT says.
            left: a sentence for the audit log if `why` is empty.
        """
        if self._is_closed:
            return
        self._fast_path.flush()  # what it has taken of this connection came before the end
        self._is_closed = True
        self._is_plain = False
        if why:
            self.closed_for = reason
            self._close_log.note(self.user, self.claim, self.peer, why, reason, self.session.client_id)
        if self._transport is not None:
            self._transport.pause_reading()
            self.outbox.close(why, reason)
        self._end(why or left, reason)

    def drop(self, why: str, reason: ReasonCode) -> None:
        """Close the connection at once, whatever is still to be sent. `why` and `reason` are those of `close`."""
        self.outbox.abort()
        self.close(why, reason)

    def _end(self, why: str, reason: ReasonCode) -> None:
        """Leave the session, once: it is kept, or ends. The arguments are those of `CloseLog.left`."""
        if not self.connected:
            return
        self.connected = False
        self._close_log.left(self.user, self.session.client_id, self.peer, why, reason)
        self.outbox.end()
        self.kept.clear()  # nothing of it was acknowledged
        self.subscriptions.stop(is_lost=not self._has_left and reason in LOST_REASONS)
        self._lifecycle.leave(self.session)
        self.subscriptions.close()
