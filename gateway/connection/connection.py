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
from penstock.gateway.connection.backpressure import PauseReason
from penstock.gateway.connection.disk_full import KeptPackets
from penstock.gateway.connection.inbox import TURN_MESSAGES, Inbox
from penstock.gateway.connection.incoming_acks import ACKS, IncomingAcks, TracedAcks
from penstock.gateway.connection.incoming_publishes import PUBLISHES, IncomingPublishes
from penstock.gateway.connection.outbox import Outbox
from penstock.gateway.connection.services import ConnectionServices
from penstock.gateway.connection.subscribing import Answering
from penstock.gateway.connection.throttle import Meter
from penstock.gateway.delivery.client_subscriptions import ClientSubscriptions
from penstock.gateway.protocol.decode import count_packets, decode
from penstock.gateway.protocol.disconnect import parse_disconnect
from penstock.gateway.protocol.encode import PINGRESP_BYTES
from penstock.gateway.protocol.errors import ProtocolError
from penstock.gateway.protocol.fixed_header import FROM_CLIENT, FROM_CLIENT_5
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
from penstock.gateway.protocol.plain import cut_plain
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.sessions.session import Session
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.socket_transport import READ_BYTES_MIN, SocketTransport
from penstock.gateway.transport.strikes import NO_CLAIM
from penstock.store.errors import StoreError, TopicInvalid
from penstock.store.options import KIB

if TYPE_CHECKING:  # amqtt takes 0.1 s to import
    from penstock.gateway.auth.client_session import ClientSession

LATE_BYTES_MAX: Final = 16 * KIB
"""Bytes that a client may send after its CONNECT before the plugins have let it in. After that the server stops reading."""

LONG_READ_BYTES: Final = 2 * KIB
"""Bytes of a read from which on it may have to wait for a later turn. The packets of most clients are fewer."""

PIECE_BYTES: Final = 32 * KIB
"""Bytes of a read in which the packets begin that are decoded at once. A read may hold 130,000 packets of two bytes."""

LONG_PACKETS: Final = 64
"""Packets of a read after which the connection looks whether the turn is over. The answers to longer reads take one write."""

LOST_REASONS: Final = (ReasonCode.NORMAL_DISCONNECTION, ReasonCode.KEEP_ALIVE_TIMEOUT, ReasonCode.SESSION_TAKEN_OVER)
"""Why a connection ends whose client may have ended, if the client has sent no DISCONNECT."""

DEFERRED: Final = int(PauseReason.AUTHORIZATION_PENDING | PauseReason.TURN_OVER)
"""The reasons not to read while packets are deferred."""


class Connection(asyncio.Protocol):
    """The server's end of one MQTT connection.

    Parameters:
        peer: the other end.
        services: the parts of the gateway that all connections share.
    """

    __slots__ = (
        "__weakref__",
        "_acks",
        "_fast_path",
        "_has_left",
        "_inbox",
        "_is_closed",
        "_is_plain",
        "_listener",
        "_now_s",
        "_paused_for",
        "_publishes",
        "_services",
        "_transport",
        "_unanswered_s",
        "_uncharged_bytes",
        "_uncharged_messages",
        "bytes_in",
        "candidate",
        "claim",
        "closed_for",
        "connected",
        "connected_ms",
        "credential",
        "identity",
        "is_v5",
        "keep_alive_s",
        "kept_packets",
        "level",
        "messages_in",
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

    def __init__(self, peer: Peer, services: ConnectionServices) -> None:
        options, listener = services.options, peer.listener
        self.peer = peer
        self._services = services
        self._inbox = Inbox(min(options.connect_bytes_max, options.packet_bytes_max))
        self.outbox = outbox = Outbox(
            services.store,
            services.counters,
            services.traffic,
            listener,
            send_buffer_bytes=options.send_buffer_bytes,
            queued_max=options.session_queued_max,
            overtime=services.overtime,
        )
        self.kept_packets = kept_packets = KeptPackets(services.backlog)
        """The packets that wait for a disk with room."""
        self.meter = services.throttle.meter(listener.messages, listener.bytes)
        """The rate limits of this connection, if it has any."""
        self._publishes = IncomingPublishes(services, outbox, kept_packets)
        self._acks = (IncomingAcks if services.traces is None else TracedAcks)(services, outbox, kept_packets)
        self._fast_path = services.fast_path
        self._now_s = services.now_s
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
        self.connected_ms = 0
        """When the CONNECT was accepted, in ms since 1970."""
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
        # What has come:
        self.bytes_in = 0
        """Bytes that were received."""
        self.messages_in = 0
        """Messages of the client that were stored."""
        # Reading and the end:
        self._is_plain = False
        """No PUBLISH that comes next would have to wait for anything: `PublishFastPath` may take it."""
        self._paused_for = 0
        """Why the connection is not read: bits of `PauseReason`. An int, because operations on flags are slow."""
        self._uncharged_bytes = 0
        """Bytes received that are not yet charged to `meter`."""
        self._uncharged_messages = 0
        """Messages stored that are not yet charged to `meter`."""
        self._is_closed = False
        self._has_left = False
        """Whether the client has sent a DISCONNECT."""
        self.closed_for: ReasonCode | None = None
        """Why the server closed the connection; None if the client ended it."""

    # --- the socket -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._inbox.open(transport if isinstance(transport, SocketTransport) else None)
        self.outbox.open(self, self._transport, self._services.loop)
        self.kept_packets.open(self)
        self.received_s = self._now_s()
        self.peer.made(transport)
        self._services.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self._is_plain = False
        self._transport = None
        self._inbox.open(None)
        self.outbox.lost()
        self._end(f"the connection was lost: {exc}" if exc else "the connection was lost", ReasonCode.NORMAL_DISCONNECTION)
        self._services.connections.remove(self)

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
        self._services.loop.call_later(delay_s, callback)

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
    def paused_for(self) -> PauseReason:
        """Why the connection is not read; no reason while it is."""
        return PauseReason(self._paused_for)

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
        self.bytes_in += received
        self.received_s = self._now_s()
        inbox = self._inbox
        if inbox.has_begun and inbox.deferred is None:
            data = inbox.join(data)
        if self._is_plain and data:
            publishes = cut_plain(data, self.side, self._fast_path.packet_bytes_max)
            if publishes is not None and self._fast_path.take(self, publishes, data):
                return
        if self.meter is not None:
            self._uncharged_bytes += received
        if inbox.deferred is not None:
            inbox.late += data
            if len(inbox.late) > LATE_BYTES_MAX:
                self.pause_reading(PauseReason.AUTHORIZATION_PENDING)
        elif (received >= LONG_READ_BYTES or not self.connected) and self._services.overtime.is_over():
            # A CONNECT costs as much as many messages, and a fleet may come back within one turn.
            inbox.late = data
            self._wait_for_turn([])
        else:
            self._handle_all([], data)

    def _handle_all(self, packets: list[Packet], data: bytes = b"") -> None:
        """Handle packets and then those in `data`, in order, until all are handled or the rest has to wait.

        Everything that the client sends comes through this loop, except what the fast path takes. A round handles the packets
        that begin in one piece of `data`.
        """
        inbox, counters = self._inbox, self._services.counters
        while not self._is_closed:
            if not self.connected and data:
                data = self._connect(data)
            if data:
                packets, used = decode(
                    data, inbox.packet_bytes_max, self.side, True, self._services.options.user_properties_max, PIECE_BYTES
                )
                if used >= PIECE_BYTES:
                    inbox.late = data[used:]
                elif used < len(data) and not (packets and packets[-1][0] == MALFORMED):
                    inbox.begin(data[used:])
            count = count_packets(packets)
            if data:
                counters.packets_in += count
            if packets:
                try:
                    self._handle(packets, count)
                except (ProtocolError, StoreError) as error:
                    error.__traceback__ = None  # It holds this frame, which may hold the error: only a collection frees that.
                    self.close(str(error), _reason_of(error))
            if data and (len(data) >= READ_BYTES_MIN or count > TURN_MESSAGES):
                inbox.pace(len(data), count, is_acked=bool(self.outbox.unacked))
            if inbox.deferred is not None or not inbox.late:
                break
            if self._services.overtime.is_over():
                self._wait_for_turn([])
                break
            packets, data = [], inbox.take_late()
        if self.meter is not None:
            self._charge(self.meter)
        self._is_plain = (
            self.connected
            and inbox.deferred is None
            and inbox.turns is not None
            and self.meter is None
            and not self.kept_packets.packets
            and not self.session.no_local
        )

    def note_answer(self, size: int) -> None:
        self.outbox.note_answer(size)

    def _connect(self, data: bytes) -> bytes:
        """Handle the first packet of a connection; return what follows it in `data` and can be handled now."""
        inbox, handshake = self._inbox, self._services.handshake
        packets, used = decode(data, inbox.packet_bytes_max, self.side, until=1)
        if not packets:
            inbox.begin(data)
            return b""
        try:
            handshake.accept(self, packets[0])
        except AuthorizationPending as question:
            inbox.deferred, inbox.late = [], data
            # We read on, because otherwise we would not notice that the client has gone.
            self._paused_for |= int(PauseReason.AUTHORIZATION_PENDING)
            question.ask(self._authorized)
            return b""
        except ProtocolError as error:
            error.__traceback__ = None  # see `_handle_all`
            handshake.refuse(self, error, packets[0], data)
            self.close(str(error), error.reason)
            return b""
        return b"" if self._is_closed else data[used:]

    def begin(self, subscriptions: ClientSubscriptions) -> None:
        """Serve a client: its CONNECT was accepted, and its session is in `session`."""
        session, permissions, is_v5 = self.session, self.permissions, self.outbox.is_v5
        self.subscriptions = subscriptions
        self.is_v5 = is_v5
        self.side = FROM_CLIENT_5 if is_v5 else FROM_CLIENT
        self._inbox.packet_bytes_max = self._services.options.packet_bytes_max
        self.outbox.permissions = permissions
        self.outbox.begin(subscriptions)
        self._publishes.begin(session, permissions, is_v5=is_v5)
        self._acks.begin(session, is_v5=is_v5)
        self.connected_ms = self._services.store.now_ms()
        self.connected = True

    def continue_read(self, data: bytes, used: int, count: int, *, is_acked: bool) -> None:
        """Go on after a read of which the fast path has taken the first `used` bytes, which were `count` PUBLISHes."""
        if used < len(data):
            self._inbox.begin(data[used:])
        self._inbox.pace(len(data), count, is_acked=is_acked)

    def receive_late(self, packet: Packet) -> None:
        """Handle a PUBLISH on the general path that the fast path has taken and could not store."""
        self._handle_all([packet])

    def _charge(self, meter: Meter) -> None:
        """Charge the bytes received to the meter, and the messages of them that were stored."""
        size, self._uncharged_bytes = self._uncharged_bytes, 0
        messages, self._uncharged_messages = self._uncharged_messages, 0
        self._services.throttle.charge(self, meter, messages, size)

    # --- packets ----------------------------------------------------------------------------------------------------

    def _handle(self, packets: list[Packet], count: int) -> None:
        """Handle packets in order, and defer those that have to wait. A run has several packets: all have `count`.

        Raises:
            ProtocolError, StoreError: the connection has to close.
        """
        services, publishes, outbox, session = self._services, self._publishes, self.outbox, self.session
        if self.is_v5:
            room = services.options.inflight_max - outbox.unacked - len(session.received)
            if count > room or session.no_local:
                packets = publishes.admit(packets, count, room)
        at = 0
        farewell: Packet | None = None
        pending: AuthorizationPending | None = None
        has_published = False
        look_at = LONG_PACKETS
        if len(packets) > LONG_PACKETS:
            outbox.gather()
        try:
            while at < len(packets):
                if at >= look_at:
                    look_at = at + LONG_PACKETS
                    if services.overtime.is_over():
                        break
                packet = packets[at]
                kind = packet[0]
                if kind in PUBLISHES:
                    has_published = True
                    begun, at = at, publishes.receive(packets, at)
                    if at - begun < LONG_PACKETS:
                        look_at = at  # It has ended for a reason, which may have cost time.
                    continue
                if kind in ACKS:
                    services.traffic.packets_in[kind] += 1
                    self._acks.acknowledged(packet)
                elif kind == PUBACK_RUN:
                    services.traffic.packets_in[PUBACK] += len(packet[1])
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
            at = publishes.stopped_at if packets[at][0] in PUBLISHES else at
        finally:
            # Also if a packet is malformed: the messages before it are stored, and are acknowledged.
            if has_published:
                stored = publishes.finish_read()
                self._uncharged_messages += stored
                self.messages_in += stored
                if stored and services.store.log.end > services.backpressure.check_at:
                    services.backpressure.apply(self)
            if session.lasts:
                self._acks.finish_read()
            if len(packets) > LONG_PACKETS:
                outbox.send_gathered()
            if outbox.lagging or outbox.redelivery is not None:
                outbox.pump()
        if pending is not None:
            self._inbox.deferred = packets[at:]
            self.pause_reading(PauseReason.AUTHORIZATION_PENDING)
            pending.ask(self._authorized)
        elif farewell is not None:
            services.traffic.packets_in[DISCONNECT] += 1
            self._disconnected(farewell[2])
        elif at < len(packets) and not self._is_closed:
            self._wait_for_turn(packets[at:])

    def _control(self, packet: Packet) -> Packet | None:
        """Handle a packet that is neither a PUBLISH nor an ack. Return what a later turn must go on with, or None."""
        kind, packets_in = packet[0], self._services.traffic.packets_in
        if kind == MALFORMED:
            raise packet[1]
        if kind in (SUBSCRIBE, UNSUBSCRIBE):
            return self._change_subscriptions(packet)
        if kind == PING_RUN:
            packets_in[PINGREQ] += packet[1]
            self.outbox.send(PINGRESP_BYTES * packet[1], packet[1])
            return None
        packets_in[kind] += 1
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
        services = self._services
        if isinstance(request, bytes):
            services.traffic.packets_in[kind] += 1
            if kind == SUBSCRIBE:
                request = services.subscribing.subscribe(self.subscriptions, self.permissions, request)
            else:
                request = services.subscribing.unsubscribe(self.subscriptions, request)
        answering: Answering = request
        try:
            next(answering)
            while not services.overtime.is_over():
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
        options, session = self._services.options, self.session
        request = parse_disconnect(body, options.user_properties_max)
        if request.session_expiry_s is not None:
            if request.session_expiry_s and not session.expiry_s:
                raise ProtocolError("a DISCONNECT makes a session last that the CONNECT did not (3.14.2.2.2)")
            session.expiry_s = min(request.session_expiry_s, options.session_expiry_s_max)
        self._has_left = True
        if request.reason == ReasonCode.NORMAL_DISCONNECTION:
            session.has_will = False  # [MQTT-3.14.4-3]
        self.close("", ReasonCode.NORMAL_DISCONNECTION, left="the client has sent a DISCONNECT")

    # --- what waits -------------------------------------------------------------------------------------------------

    def _wait_for_turn(self, packets: list[Packet]) -> None:
        """Handle packets, and what was received after them, in a later turn; read nothing before."""
        self._inbox.deferred = packets
        self.pause_reading(PauseReason.TURN_OVER)
        self._services.overtime.add(self._handle_deferred)

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
        if waited_s < self._services.options.access.unanswered_ms / 1000:
            self.call_later(retry_s(waited_s), self._handle_deferred)
        else:
            self.close(
                f"the plugins have given no answer about a packet for {waited_s:.0f} s",
                ReasonCode.SERVER_BUSY,
            )

    def _handle_deferred(self) -> None:
        """Handle the packets that have waited for the plugins, or for their turn, and then what was received meanwhile."""
        inbox = self._inbox
        self._paused_for &= ~DEFERRED
        packets, inbox.deferred = inbox.deferred, None
        if self._is_closed or packets is None:
            return
        self._handle_all(packets, b"" if packets else inbox.take_late())
        if inbox.deferred is None and not self._is_closed:
            self._read_on()

    def retry_kept(self) -> None:
        """Handle the packets that were kept while the disk was full. Those that still find no room are kept again."""
        packets = self.kept_packets.clear()
        if self._is_closed:
            return
        if self._inbox.deferred:  # these packets came later
            self._inbox.deferred = packets + self._inbox.deferred
        else:
            self._handle_all(packets)
        if not self.kept_packets.is_full:
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
        recheck = authorizer.recheck(self, self.session.client_id, list(self.subscriptions.by_filter))
        if not recheck.may_have_will:
            self.session.has_will = False
        self.subscriptions.withdraw(recheck.refused)
        if recheck.why:
            self.close(recheck.why, ReasonCode.ADMINISTRATIVE_ACTION)

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
            self._services.close_log.note(self.user, self.claim, self.peer, why, reason, self.session.client_id)
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
        self._services.close_log.left(self.user, self.session.client_id, self.peer, why, reason)
        self.outbox.end()
        self.kept_packets.clear()  # nothing of it was acknowledged
        self.subscriptions.stop(is_lost=not self._has_left and reason in LOST_REASONS)
        self._services.lifecycle.leave(self.session)
        self.subscriptions.close()


def _reason_of(error: ProtocolError | StoreError) -> ReasonCode:
    """Return the reason code with which a connection closes because of an error."""
    if isinstance(error, ProtocolError):
        return error.reason
    return ReasonCode.TOPIC_NAME_INVALID if isinstance(error, TopicInvalid) else ReasonCode.QUOTA_EXCEEDED
