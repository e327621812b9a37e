"""One client's connection: bytes come in, packets are handled, packets go out.

A socket read is decoded to its end in one loop; all PUBLISHes in it are appended in this turn and acknowledged with one
write when their group is durable. There is no task, no await and no object per message on this path.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, cast

from gateway import codec
from gateway.access import Guard, Undecided
from gateway.errors import ConnectRefused, ProtocolError
from gateway.packets import (
    CONNECT,
    DISCONNECT,
    MALFORMED,
    NAMES,
    PINGREQ,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBSCRIBE,
    UNSUBSCRIBE,
    Connect,
    parse_connect,
    parse_subscribe,
    parse_unsubscribe,
)
from gateway.reasons import SUBACK_FAILURE, ConnectCode, ReasonCode
from gateway.session import Session
from gateway.subscription import Subscription
from gateway.throttle import ANSWERS, UNDECIDED, Meter
from store.errors import LimitExceeded, StoreError, TopicInvalid
from store.lightqueue import LightQueue
from store.options import KIB
from store.record import Flag

if TYPE_CHECKING:
    from gateway.gateway import Gateway
    from gateway.peer import Peer
    from gateway.plugins import ClientSession, Verdict

_QOS_1 = 1 << 1
_QOS_2 = 2 << 1
_RETAIN = 1

RECORD_FLAGS = [(flags >> 1 & 3) | (int(Flag.RETAIN) if flags & _RETAIN else 0) for flags in range(16)]
"""The flags of a message's record, by the flags of its PUBLISH."""

_ACKS = frozenset((PUBACK, PUBREC, PUBCOMP))

CLOSE_FLUSH_S = 1.0
"""How long a connection that the server closes may take to send what was written before, and the acks that are due."""

ANSWERS_BYTES_MAX = 64 * KIB
"""Bytes of answers (acks, PINGRESP) that may pile up behind a full send buffer before the client is no longer read."""


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
        self.guard: Guard | None = None
        """What the plugins have said about this client and topics, where there are plugins for topics."""
        self.plugin_session: ClientSession | None = None
        self.verdict: tuple[ClientSession, Verdict | None] | None = None
        """What the plugins have said to the CONNECT that waits for it."""
        self.meter: Meter | None = None
        """Where there are limits to what the client may send."""
        self.store = gateway.store
        self.writable = True
        self.lagging: dict[Subscription, None] = {}
        """The subscriptions that aren't live; the one that waits longest for its turn comes first."""
        self.keep_alive_s = 0.0
        self.received_s = 0.0
        self.wheel_slot = 0
        """Where the gateway's keep-alive wheel holds this connection."""
        self.session: Session = Session("", 0, None)
        self.connected = False
        self.level = 0
        """The protocol level of its CONNECT."""
        self._closed = False
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._collected: list[bytes] = []
        self._missing = 0
        self._answers_bytes = 0
        self._pump_scheduled = False
        self._holds = 0
        """Why the connection isn't read: see `gateway.throttle`."""
        self._held: list[codec.Packet] | None = None
        """The packets that wait for an answer of the plugins, in order."""
        self._late = b""
        """What was received while they wait: what the transport had read already."""

    # --- the socket -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self.gateway.options.send_buffer_bytes)
        self.received_s = self.gateway.loop.time()
        self.peer.made(transport)
        self.gateway.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._transport = None
        self._end()
        self.gateway.closed(self)

    def eof_received(self) -> bool:
        # A client that has sent all that it will may still wait for its acks: `close` sees to them, so not the transport.
        self.close("", ReasonCode.UNSPECIFIED_ERROR)
        return not self.peer.listener.options.is_tls  # TLS has no half-closed connections

    def pause_writing(self) -> None:
        # Deliveries stop. Reading goes on, or a slow subscriber's pings would not be heard; see `_write` for its bound.
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self._answers_bytes = 0
        if self._transport is not None and not self._closed:
            self.release_reading(ANSWERS)
            self._pump()

    def hold_reading(self, why: int) -> None:
        """Stop reading, for one of the reasons of `gateway.throttle`."""
        self._holds |= why
        if self._transport is not None:
            self._transport.pause_reading()

    def release_reading(self, why: int) -> None:
        """Read on, unless there is another reason not to."""
        if self._holds & why:
            self._holds &= ~why
            self.received_s = self.gateway.loop.time()  # it wasn't silent: it wasn't heard
            if not self._holds and self._transport is not None and not self._closed:
                self._transport.resume_reading()

    @property
    def is_unheard(self) -> bool:
        """True while the server doesn't read, for reasons of its own."""
        return bool(self._holds & ~ANSWERS)

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        if self._held is not None:
            self._late += data
            return
        received = len(data)
        self.listener.bytes_in += received
        self.received_s = self.gateway.loop.time()
        if self._missing:
            self._collected.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return
            data = b"".join(self._collected)
            self._collected.clear()
            self._missing = 0
        elif self._rest:
            data = self._rest + data
        packets, used = codec.decode(data, self.gateway.options.packet_bytes_max)
        self._rest = rest = data[used:]
        wanted = codec.packet_bytes(rest) if rest and (not packets or packets[-1][0] != MALFORMED) else 0
        if wanted > len(rest):  # a packet in many reads is collected, and joined once
            self._collected.append(rest)
            self._missing = wanted - len(rest)
            self._rest = b""
        if self.meter is None:
            self._handle_or_close(packets)
        else:
            before = self.gateway.counters.publishes_in
            self._handle_or_close(packets)
            self.gateway.throttle.settle(self, self.gateway.counters.publishes_in - before, received)

    def _handle_or_close(self, packets: list[codec.Packet]) -> None:
        """Handle packets; end the connection where they are wrong."""
        try:
            self._handle(packets)
        except ConnectRefused as error:
            self._write(codec.encode_refusal(error))
            self.close(str(error), error.reason)
        except ProtocolError as error:
            self.close(str(error), error.reason)
        except TopicInvalid as error:
            self.close(str(error), ReasonCode.TOPIC_NAME_INVALID)
        except StoreError as error:
            self.close(str(error), ReasonCode.QUOTA_EXCEEDED)

    # --- what waits for the plugins ---------------------------------------------------------------------------------

    def _hold(self, packets: list[codec.Packet], first: codec.Packet, question: Undecided) -> None:
        """Keep packets from `first` on until a question is answered. Nothing more is read, so they are one read at most."""
        at = next(number for number, packet in enumerate(packets) if packet is first)
        self._held = packets[at:]
        self.hold_reading(UNDECIDED)
        question.ask(self._decided)

    def _decided(self) -> None:
        """Go on with the packets that were held."""
        packets, self._held = self._held, None
        if self._closed or packets is None:
            return
        self._handle_or_close(packets)
        if not self._is_waiting() and self._late:
            late, self._late = self._late, b""
            self.data_received(late)
        if not self._is_waiting():
            self.release_reading(UNDECIDED)

    def _is_waiting(self) -> bool:
        """Return whether packets wait for the plugins, or nothing is waited for any more."""
        return self._held is not None or self._closed

    # --- packets ----------------------------------------------------------------------------------------------------

    def _handle(self, packets: list[codec.Packet]) -> None:
        """Handle the packets of one read, in order. The hot path: PUBLISH costs about 2 us here, with the append."""
        if not self.connected:
            if not packets:
                return
            try:
                self._first(packets)
            except Undecided as question:
                self._hold(packets, packets[0], question)
                return
            packets = packets[1:]
        guard = self.guard
        store = self.store
        route_of, append = store.queues.route, store.append_message
        puback_ids: list[int] = []
        pubrec_ids: list[int] = []
        publishes = 0
        has_left = False
        try:
            for packet in packets:
                kind = packet[0]
                if kind == PUBLISH:
                    _, flags, topic, packet_id, body = packet
                    qos = flags & 6
                    if qos == _QOS_2 and packet_id in self.session.received:
                        pubrec_ids.append(packet_id)  # a repetition [MQTT-4.3.3-2]
                        continue
                    # Where it may not, it is acknowledged and dropped: MQTT 3.1.1 has no other answer [MQTT-3.3.5-2].
                    if guard is None or guard.publish.get(topic) or guard.may_publish(topic, packets):
                        append(route_of(topic), body, b"", RECORD_FLAGS[flags])
                        publishes += 1
                    if qos == _QOS_1:
                        puback_ids.append(packet_id)
                    elif qos == _QOS_2:
                        self.session.received.add(packet_id)
                        pubrec_ids.append(packet_id)
                elif kind in _ACKS:
                    self._acked(kind, packet[1])
                elif kind == DISCONNECT:
                    has_left = True
                    break  # nothing behind it counts
                else:
                    self._control(packet)
        except Undecided as question:
            self._hold(packets, packet, question)
        finally:
            # Also where a packet was malformed: what came before it is stored, and is acknowledged.
            self.gateway.counters.publishes_in += publishes
            if publishes and store.log.end > self.gateway.pressure.check_at:
                self.gateway.pressure.apply(self)
            if puback_ids:
                store.when_durable(partial(self._acknowledge, PUBACK, puback_ids))
            if pubrec_ids:
                store.when_durable(partial(self._acknowledge, PUBREC, pubrec_ids))
            if self.lagging:
                self._pump()
        if has_left:
            self.session.will = None  # [MQTT-3.14.4-3]
            self.close("", ReasonCode.NORMAL_DISCONNECTION)

    def _acknowledge(self, kind: int, packet_ids: list[int]) -> None:
        self._write(codec.encode_acks(kind, packet_ids), len(packet_ids))

    def _acked(self, kind: int, packet_id: int) -> None:
        self.gateway.traffic.packets_in[kind] += 1
        # An ack that nothing waits for is let pass: after a reconnect a client may repeat one (4.4).
        expected = self.session.acked(kind, packet_id)
        if kind == PUBREC:
            self._write(codec.encode_acks(PUBREL, [packet_id]))  # also the second time [MQTT-4.3.3-1]
        elif expected:
            self.gateway.counters.deliveries_acked += 1

    def _control(self, packet: codec.Packet) -> None:
        kind = packet[0]
        if kind == MALFORMED:
            raise packet[1]
        self.gateway.traffic.packets_in[kind] += 1
        if kind == PUBREL:
            self.session.received.discard(packet[1])
            self._write(codec.encode_acks(PUBCOMP, [packet[1]]))  # whether it was known or not (4.3.3)
        elif kind == SUBSCRIBE:
            self._subscribe(packet[2])
        elif kind == UNSUBSCRIBE:
            self._unsubscribe(packet[2])
        elif kind == PINGREQ:
            self._write(codec.PINGRESP_BYTES)  # [MQTT-3.12.4-1]
        elif kind == CONNECT:
            raise ProtocolError("a second CONNECT came on one connection [MQTT-3.1.0-2]")
        else:
            raise ProtocolError(f"a {NAMES[kind]} is not for the server")

    def _first(self, packets: list[codec.Packet]) -> None:
        """Handle the first packet of a connection, which must be CONNECT [MQTT-3.1.0-1]."""
        packet = packets[0]
        if packet[0] == MALFORMED:
            raise packet[1]
        if packet[0] != CONNECT:
            raise ProtocolError(f"the first packet is {NAMES[packet[0]]}, and must be CONNECT [MQTT-3.1.0-1]")
        store = self.store.options
        wish = parse_connect(packet[2], topic_levels_max=store.topic_levels_max, topic_bytes_max=store.topic_bytes_max)
        self.gateway.access.admit(self, wish)  # may raise Undecided: then this is the first packet once more
        self.gateway.traffic.packets_in[CONNECT] += 1
        self._accept(wish)

    def _accept(self, wish: Connect) -> None:
        gateway = self.gateway
        gateway.check_room(wish.client_id)
        self.session = Session(wish.client_id or gateway.assign_client_id(), gateway.options.inflight_max, wish.will)
        self.level = wish.level
        gateway.register(self)
        self.connected = True
        self.keep_alive_s = wish.keep_alive_s * 1.5  # [MQTT-3.1.2-24]
        gateway.watch(self)
        self._write(codec.encode_connack(False, ConnectCode.ACCEPTED))

    # --- subscriptions ----------------------------------------------------------------------------------------------

    def _subscribe(self, body: bytes) -> None:
        wish = parse_subscribe(body)
        # What this turn has stored is no part of the subscription: committed now, it is read as retained or not at all.
        self.store.commit()
        # A packet can hold a quarter of a million filters, all the same one. More than a session may have are not looked at.
        asked_max = self.gateway.options.subscriptions_max
        asked = wish.filters[:asked_max]
        allowed = self.guard.may_subscribe([topic_filter for topic_filter, _ in asked]) if self.guard is not None else None
        granted = [
            self._add(topic_filter, qos) if allowed is None or allowed[topic_filter] else self._deny(topic_filter)
            for topic_filter, qos in asked
        ]
        granted += [SUBACK_FAILURE] * (len(wish.filters) - len(granted))
        self._write(codec.encode_suback(wish.packet_id, granted))
        self._pump()

    def _add(self, topic_filter: str, qos: int) -> int:
        """Add a subscription, in place of one to the same filter [MQTT-3.8.4-3]; return what the SUBACK says of it."""
        gateway, subscriptions = self.gateway, self.session.subscriptions
        old = subscriptions.get(topic_filter)
        try:
            # A replaced one keeps its queue, and its place there: by now another queue may serve this filter.
            queue = self._attach(topic_filter) if old is None else old.queue
        except StoreError as error:
            gateway.counters.subscriptions_refused += 1
            gateway.logbook.note(
                "subscription.refused", client=self.session.client_id, filter=topic_filter[:80], why=str(error)
            )
            return SUBACK_FAILURE
        retained = gateway.retained.matching(topic_filter, before=self.store.log.end)
        subscription = Subscription(self, queue, qos, retained)
        if old is not None:
            self._leave_shared_path(old)
            subscription.cursor = old.cursor  # nothing is missed while it is replaced
        subscriptions[topic_filter] = subscription
        self.lagging[subscription] = None
        gateway.fanout(queue).add(subscription)
        return qos

    def _deny(self, topic_filter: str) -> int:
        self.gateway.counters.subscriptions_refused += 1
        self.gateway.logbook.note(
            "subscription.refused", client=self.session.client_id, filter=topic_filter[:80], why="the plugins don't allow it"
        )
        return SUBACK_FAILURE

    def _attach(self, topic_filter: str) -> LightQueue:
        """Return the light queue of a filter. Raises TopicInvalid, LimitExceeded."""
        count = len(self.session.subscriptions)
        if count >= self.gateway.options.subscriptions_max:
            raise LimitExceeded(f"{count} subscriptions in one session: see mqtt.subscriptions_max")
        if topic_filter.startswith("$share/"):
            raise TopicInvalid("shared subscriptions are not served over MQTT 3.1.1 here; use a POP group")
        return self.store.queues.attach(topic_filter, self.owner)

    def _unsubscribe(self, body: bytes) -> None:
        wish = parse_unsubscribe(body)
        for topic_filter in wish.filters:
            subscription = self.session.subscriptions.pop(topic_filter, None)
            if subscription is not None:
                self._remove(subscription)
        self._write(codec.encode_unsuback(wish.packet_id))  # also where there was none [MQTT-3.10.4-5]

    def _leave_shared_path(self, subscription: Subscription) -> None:
        subscription.live = False
        self.lagging.pop(subscription, None)
        self.gateway.leave_fanout(subscription)

    def _remove(self, subscription: Subscription) -> None:
        self._leave_shared_path(subscription)
        self.store.queues.detach(subscription.queue, self.owner)

    @property
    def owner(self) -> str:
        """What this connection is called among the owners of a light queue."""
        return f"connection:{id(self)}"

    def pump_soon(self) -> None:
        """Go on with the subscriptions that lag, in the next turn of the loop."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self.gateway.loop.call_soon(self._pump_on)

    def _pump_on(self) -> None:
        self._pump_scheduled = False
        self._pump()

    def _pump(self) -> None:
        for subscription in tuple(self.lagging):
            if not self.writable:
                return
            self.lagging[subscription] = self.lagging.pop(subscription)  # to the end: they take turns
            subscription.pump()

    # --- output and the end -----------------------------------------------------------------------------------------

    def send_publishes(self, data: bytes, count: int) -> None:
        """Send a run of PUBLISH packets."""
        self.gateway.counters.publishes_out += count
        self.listener.bytes_out += len(data)
        if self._transport is not None:
            self._transport.write(data)

    def _write(self, data: bytes, count: int = 1) -> None:
        """Send answers, `count` packets of one type. Who doesn't take them must not make the server write more."""
        if self._transport is None:
            return
        self._transport.write(data)
        self.listener.bytes_out += len(data)
        self.gateway.traffic.packets_out[data[0] >> 4] += count
        if not self.writable:
            self._answers_bytes += len(data)
            if self._answers_bytes > ANSWERS_BYTES_MAX:
                self.hold_reading(ANSWERS)

    def close(self, why: str, reason: ReasonCode) -> None:
        """End the connection: what was written goes out, then the acks that are due, and nothing more is read.

        `why` is for the log and the count by `reason`; empty if the client or the operator wants it so.
        """
        if self._closed:
            return
        self._closed = True
        if why:
            self.gateway.refused(self, why, reason)
        if self._transport is not None:
            self._transport.pause_reading()
            self.store.when_durable(self._close_transport)
            self.gateway.loop.call_later(CLOSE_FLUSH_S, self._abort)
        self._end()

    def _close_transport(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        """Give up everything that the session holds, and publish its will; once."""
        if not self.connected:
            return
        self.connected = False
        for subscription in self.session.subscriptions.values():
            self._remove(subscription)
        self.session.subscriptions.clear()
        will, self.session.will = self.session.will, None
        if will is not None:
            self.gateway.publish_will(will)
