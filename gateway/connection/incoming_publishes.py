"""The PUBLISHes that a client sends, on their way to the log: the general path.

`IncomingPublishes.receive` is that way, from top to bottom: properties, repetition, permission, append, acknowledgement. Reads
that hold nothing but plain PUBLISHes do not come here but take a short cut, `publish_fast_path`.

Clauses in brackets are those of MQTT 5.0. Where MQTT 3.1.1 has a clause of another number, it follows as 3.1.1:[...].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from types import MappingProxyType
from typing import Final

import orjson

from penstock.gateway.auth.permissions import Permissions
from penstock.gateway.connection.disk_full import PACKET_OVERHEAD_BYTES, KeptPackets
from penstock.gateway.connection.outbox import Outbox
from penstock.gateway.counters import GatewayCounters
from penstock.gateway.delivery.mqtttraces import MqttTraces
from penstock.gateway.delivery.retained_messages import RetainedMessages
from penstock.gateway.options import GatewayOptions
from penstock.gateway.protocol.delays import RECALL_HANDLE, DeliveryTimeInvalid, due_of
from penstock.gateway.protocol.encode import encode_ack, encode_ack_with, encode_acks
from penstock.gateway.protocol.errors import ProtocolError
from penstock.gateway.protocol.message import to_stored
from penstock.gateway.protocol.packets import DUP, MALFORMED, PUBACK, PUBLISH, PUBLISH_RUN, PUBLISH_WITH, PUBREC, Packet
from penstock.gateway.protocol.properties import Property, PropertyValues, check_response_topic, parse_properties
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.protocol.runs import count_packets, split_runs
from penstock.gateway.protocol.topics import DELAYED, is_bridge_state
from penstock.gateway.sessions.session import Session
from penstock.pop.core.handle import Handles
from penstock.store.errors import DiskFull, LimitExceeded, PositionUnknown, RecordCorrupt, StoreError, TopicInvalid
from penstock.store.properties import encode_properties
from penstock.store.record import HEADER_BYTES, TOPIC_BYTES_MAX, Flag, record_bytes
from penstock.store.space.causer import NODE
from penstock.store.store import Store
from penstock.store.topics import check_topic, excerpt
from penstock.timer.delayed import DelayedMessages

QOS_MASK: Final = 3 << 1
QOS_1: Final = 1 << 1
QOS_2: Final = 2 << 1
"""The QoS in the flags of a PUBLISH."""

RETAIN: Final = 1
"""The flag of a PUBLISH that is to be retained."""

NOT_PLAIN: Final = QOS_2 | RETAIN
"""Flags of a PUBLISH whose record may need more than its topic and its body."""

NO_VALUES: Final[PropertyValues] = {}
"""The properties of a PUBLISH without any."""

RECORD_FLAGS: Final = [(flags >> 1 & 3) | (int(Flag.RETAIN) if flags & RETAIN else 0) for flags in range(16)]
"""The flags of a message's record, by the flags of its PUBLISH."""

SESSION: Final = int(Flag.SESSION)
"""The flag of a record that names session and packet id, so that a repetition at QoS 2 is recognised after a restart."""

PUBLISHES: Final = frozenset((PUBLISH, PUBLISH_RUN, PUBLISH_WITH))
"""The types of packets that `IncomingPublishes.receive` handles."""

AT_ONCE_MAX: Final = 64
"""Packets that `IncomingPublishes.receive` handles at once."""

REFUSED_AT_ONCE_MAX: Final = 8
"""Packets that `IncomingPublishes.receive` refuses at once. A refusal is logged and explained, and so costs about as much as
twenty messages that are stored."""

Denial = tuple[ReasonCode, str]
"""Why one PUBLISH of MQTT 5.0 was refused: the reason code, and a sentence. The connection stays open."""

NONE_DENIED: Final[Mapping[int, Denial]] = MappingProxyType({})
NO_HANDLES: Final[Mapping[int, str]] = MappingProxyType({})


class PublishForbidden(StoreError):
    """Raised when the rules or the plugins don't allow a message."""

    def __init__(self, topic: bytes) -> None:
        super().__init__(f"the client may not publish to {excerpt(topic)}")


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """What the options say about incoming PUBLISHes; one object for all connections."""

    inflight_max: int
    """See `GatewayOptions.inflight_max`: the receive maximum of the server."""
    message_bytes_max: int
    """See `GatewayOptions.message_bytes_max`."""
    topic_alias_max: int
    """See `GatewayOptions.topic_alias_max`."""
    closes_denied: bool
    """See `AccessOptions.denied_publish`."""
    delay_ms_max: int
    """See `TimerOptions.delay_ms_max`."""
    user_properties_max: int
    """See `GatewayOptions.user_properties_max`."""

    @classmethod
    def of(cls, options: GatewayOptions, delay_ms_max: int) -> PublishOptions:
        """Return what the section `[mqtt]` and the longest delay say."""
        return cls(
            inflight_max=options.inflight_max,
            message_bytes_max=options.message_bytes_max,
            topic_alias_max=options.topic_alias_max,
            closes_denied=options.access.denied_publish == "close",
            delay_ms_max=delay_ms_max,
            user_properties_max=options.user_properties_max,
        )


class IncomingPublishes:
    """Stores the PUBLISHes of one connection, and acknowledges them.

    Parameters:
        store: where messages go.
        delayed, retained: the delayed and the retained messages, of which there is a limited number.
        handles: makes the handles that cancel delayed messages.
        counters: count what is stored, refused and dropped.
        outbox: sends the acks.
        kept: keeps what finds no room on the disk.
        options: see `PublishOptions`.
        traces: makes spans of PUBLISHes; None without tracing.
    """

    __slots__ = (
        "_at",
        "_counters",
        "_delayed",
        "_denied",
        "_handles",
        "_is_v5",
        "_kept",
        "_options",
        "_outbox",
        "_permissions",
        "_puback_ids",
        "_pubrec_ids",
        "_recall_handles",
        "_retained",
        "_session",
        "_store",
        "_stored",
        "_traces",
        "aliases",
    )

    def __init__(
        self,
        store: Store,
        delayed: DelayedMessages,
        retained: RetainedMessages,
        handles: Handles,
        counters: GatewayCounters,
        outbox: Outbox,
        kept: KeptPackets,
        options: PublishOptions,
        traces: MqttTraces | None = None,
    ) -> None:
        self._store = store
        self._delayed = delayed
        self._retained = retained
        self._handles = handles
        self._counters = counters
        self._outbox = outbox
        self._kept = kept
        self._options = options
        self._traces = traces
        self._session: Session
        self._permissions: Permissions | None = None
        self._is_v5 = False
        self.aliases: dict[int, bytes] = {}
        """The topics for which the client has given an alias."""
        # Of the PUBLISHes of the read that is handled now:
        self._stored = 0
        self._at = 0
        self._puback_ids: list[int] = []
        self._pubrec_ids: list[int] = []
        self._denied: dict[int, Denial] = {}
        self._recall_handles: dict[int, str] = {}
        """The handles of the delayed messages of MQTT 5.0, by packet id."""

    def begin(self, session: Session, permissions: Permissions | None, *, is_v5: bool) -> None:
        """Serve a session: the CONNECT was accepted."""
        self._session = session
        self._permissions = permissions
        self._is_v5 = is_v5

    # --- the way of a PUBLISH ---------------------------------------------------------------------------------------

    def receive(self, packets: list[Packet], start: int) -> int:
        """Handle the PUBLISHes of a read from `packets[start]` on; return the index of the first packet to be handled next.

        That is a packet of another type, the end, a PUBLISH that has been replaced in the list by others, or the one after
        `AT_ONCE_MAX` that were handled or `REFUSED_AT_ONCE_MAX` that were refused.

        Raises:
            AuthorizationPending: the plugins have to be asked first; `stopped_at` says about which packet.
            ProtocolError, StoreError: the connection has to close.
        """
        store, session, permissions = self._store, self._session, self._permissions
        route_of, append, received, causer = store.router.route, store.append_message, session.received, session.causer
        puback_ids, pubrec_ids, kept = self._puback_ids, self._pubrec_ids, self._kept
        bytes_max = self._options.message_bytes_max
        at, stored, refused = start, 0, 0
        try:
            for at, packet in enumerate(islice(packets, start, start + AT_ONCE_MAX), start):
                kind = packet[0]
                if kind == PUBLISH:
                    _, flags, topic, packet_id, body = packet
                    found = None
                elif kind == PUBLISH_RUN:
                    if not self._append_run(packet, packets):
                        # One by one, and those after them too: many short runs would cost a copy of the list each.
                        packets[at:] = split_runs(packets[at:])
                        return at
                    stored += len(packet[4])
                    continue
                elif kind == PUBLISH_WITH:
                    _, flags, topic, packet_id, body, raw = packet
                    found = self._parse(raw)
                    topic = self._resolve_alias(topic, found)
                else:
                    return at
                qos = flags & QOS_MASK
                if qos == QOS_2 and packet_id in received and self._is_repetition(flags, topic, packet_id, body):
                    pubrec_ids.append(packet_id)  # [MQTT-4.3.3-10] 3.1.1:[MQTT-4.3.3-2]
                    self._tell_handle_again(packet_id)
                    continue
                if kept and not self._is_v5:
                    self._keep(packet)  # the messages before it come first [MQTT-4.6.0-2]
                    continue
                try:
                    if permissions is not None and not (
                        permissions.publish.get(topic) or permissions.may_publish(topic, packets)
                    ):
                        raise PublishForbidden(topic)
                    if len(body) > bytes_max:
                        raise LimitExceeded(
                            f"the payload for {excerpt(topic)} has {len(body)} bytes; send {bytes_max} at most: see "
                            "mqtt.message_bytes_max"
                        )
                    if found is not None:
                        if self._traces is None:
                            self._append_with(flags, topic, body, found, packet_id)
                        else:
                            self._append_traced(self._traces, flags, topic, body, found, packet_id)
                    elif not flags & NOT_PLAIN:
                        append(route_of(topic, causer), body, b"", RECORD_FLAGS[flags])
                    elif flags & RETAIN:
                        self._append_with(flags, topic, body, NO_VALUES, packet_id)
                    elif not session.lasts:
                        append(route_of(topic, causer), body, b"", RECORD_FLAGS[flags])
                    else:  # this very record tells a repetition from a new message, even after a crash
                        append(route_of(topic, causer), body, _received_as(session, packet_id), RECORD_FLAGS[flags] | SESSION)
                    stored += 1
                except StoreError as error:
                    if found is None and isinstance(error, TopicInvalid) and topic.startswith(DELAYED):
                        packets[at] = (PUBLISH_WITH, flags, topic, packet_id, body, b"")
                        return at
                    if isinstance(error, DiskFull) and not self._is_v5:
                        self._keep(packet)
                        continue
                    if is_bridge_state(topic):
                        _check_name(topic)
                    else:
                        if self._traces is not None and found:
                            self._traces.refused(found, topic, body, session.client_id, str(error))
                        self._deny(topic, packet_id, error)
                        refused += 1
                if qos == QOS_1:
                    puback_ids.append(packet_id)
                elif qos == QOS_2:
                    pubrec_ids.append(packet_id)
                    if packet_id not in self._denied:
                        received.add(packet_id)
                if refused == REFUSED_AT_ONCE_MAX:
                    return at + 1
            return min(start + AT_ONCE_MAX, len(packets))
        finally:
            self._stored += stored
            self._at = at

    @property
    def stopped_at(self) -> int:
        """The index of the packet at which `receive` has ended."""
        return self._at

    def _is_repetition(self, flags: int, topic: bytes, packet_id: int, body: bytes) -> bool:
        """Return whether a message at QoS 2 with a packet id that was not released is the one that was received with it.

        A client that has lost its state, or whose release a damaged disk has lost, uses the packet id for another message. To
        acknowledge that one as a repetition would be to lose it.
        """
        stored = self._session.stored
        position = stored.received.get(packet_id) if stored is not None else None
        if position is None:
            return True
        try:
            was = self._store.log.record(position)
        except RecordCorrupt:
            return False  # nobody can get that one any more, and the client still has it
        except PositionUnknown:  # it has expired
            return bool(flags & DUP)  # [MQTT-3.3.1-1]
        return was.body == body and (was.topic == topic or topic.startswith(DELAYED))

    def _tell_handle_again(self, packet_id: int) -> None:
        """Let the PUBREC of a repeated message have its recall handle, if the message is still pending."""
        stored = self._session.stored
        position = stored.received.get(packet_id) if stored is not None else None
        due_ms = self._delayed.due_ms(position) if position is not None and self._is_v5 else None
        if position is not None and due_ms is not None:
            self._recall_handles[packet_id] = self._handles.recall(position, due_ms)

    def _append_run(self, run: Packet, packets: list[Packet]) -> bool:
        """Store PUBLISHes that differ in packet ids and bodies only; return False if each must be looked at by itself."""
        _, flags, topic, packet_ids, bodies = run
        permissions = self._permissions
        if self._kept or (permissions is not None and not permissions.may_publish(topic, packets)):
            return False
        try:
            size = sum(map(len, bodies))
            if size > self._options.message_bytes_max < max(map(len, bodies)):
                return False
            size += len(bodies) * (HEADER_BYTES + len(topic))
            route = self._store.router.route(topic, self._session.causer)
            if not self._store.append_runs([(route, [*alike], RECORD_FLAGS[flags]) for _, alike in groupby(bodies, len)], size):
                return False
        except StoreError:
            return False
        self._puback_ids += packet_ids
        return True

    def _append_traced(
        self, traces: MqttTraces, flags: int, topic: bytes, body: bytes, found: PropertyValues, packet_id: int
    ) -> None:
        """Do what `_append_with` does, and make a span of it."""
        began_ns = traces.now_ns()
        position = self._append_with(flags, topic, body, found, packet_id)
        traces.published(found, topic, body, flags & QOS_MASK, self._session.client_id, began_ns, position)

    def _append_with(self, flags: int, topic: bytes, body: bytes, found: PropertyValues, packet_id: int) -> int:
        """Store a message that has properties, or is delayed or retained; return its position. Raises StoreError."""
        store, options, session = self._store, self._options, self._session
        now_ms, due_ms = store.now_ms(), 0
        if found or topic.startswith(DELAYED):
            topic, due_ms = due_of(topic, found, now_ms, options.delay_ms_max)
        route = store.router.route(topic, session.causer)
        is_retained = flags & RETAIN and body
        is_charged = due_ms or is_retained
        causer = store.ledger.with_tenant(session.causer, route.name) if is_charged else NODE
        by = causer.row()
        publisher = session.client_id if session.no_local else ""
        record_flags = RECORD_FLAGS[flags] | (Flag.DELAYED if due_ms else 0)
        if flags & QOS_MASK == QOS_2 and session.lasts:
            record_flags |= SESSION
            about = to_stored(
                found, now_ms, publisher=publisher, deliver_at_ms=due_ms, session=session.client_id, packet_id=packet_id, by=by
            )
        else:
            about = to_stored(found, now_ms, publisher=publisher, deliver_at_ms=due_ms, by=by)
        encoded = encode_properties(about)
        if is_charged:
            size = record_bytes(topic, body, encoded)
            if due_ms:
                self._delayed.admit(causer, size, route.name)
            if is_retained:
                self._retained.admit(topic, size, causer, is_delayed=due_ms > 0)
        position = store.append_message(route, body, encoded, record_flags)
        if due_ms and packet_id and self._is_v5:
            self._recall_handles[packet_id] = self._handles.recall(position, due_ms)
        return position

    # --- properties -------------------------------------------------------------------------------------------------

    def _parse(self, raw: bytes) -> PropertyValues:
        """Return the properties of a PUBLISH. Raises ProtocolError."""
        found = parse_properties(raw, PUBLISH, self._options.user_properties_max)
        if Property.SUBSCRIPTION_IDENTIFIER in found:
            raise ProtocolError("a PUBLISH to the server has a subscription identifier [MQTT-3.3.4-6]")
        check_response_topic(found)
        return found

    def _resolve_alias(self, topic: bytes, found: PropertyValues) -> bytes:
        """Return the topic of a PUBLISH, which an alias may stand for (3.3.2.3.4). Raises ProtocolError."""
        alias = found.get(Property.TOPIC_ALIAS)
        if alias is None:
            if not topic:
                raise ProtocolError("a PUBLISH has neither a topic nor an alias (3.3.2.1)")
            return topic
        if alias > self._options.topic_alias_max:  # [MQTT-3.3.2-9]
            raise ProtocolError(
                f"the topic alias is {alias}; use {self._options.topic_alias_max} at most", ReasonCode.TOPIC_ALIAS_INVALID
            )
        if topic:
            self.aliases[alias] = topic
            return topic
        known = self.aliases.get(alias)
        if known is None:
            raise ProtocolError(f"the topic alias {alias} stands for no topic yet (3.3.2.3.4)")
        return known

    # --- limits -----------------------------------------------------------------------------------------------------

    def admit(self, packets: list[Packet]) -> list[Packet]:
        """Return the packets of a read of MQTT 5.0 that are to be handled.

        They end at the PUBLISH that exceeds the receive maximum, if there is one, with an error in its place. In a session with
        subscriptions that want no messages of its own (No Local), each message is to name its publisher: so each PUBLISH
        becomes one with properties.
        """
        received = self._session.received
        room = self._options.inflight_max - self._outbox.unacked - len(received)
        if count_packets(packets) > room:
            packets = self._within_receive_maximum(split_runs(packets), room)
        if self._session.no_local:
            packets = [(PUBLISH_WITH, *packet[1:], b"") if packet[0] == PUBLISH else packet for packet in split_runs(packets)]
        return packets

    def _within_receive_maximum(self, packets: list[Packet], room: int) -> list[Packet]:
        known = set(self._session.received)
        for at, packet in enumerate(packets):
            if packet[0] in (PUBLISH, PUBLISH_WITH) and packet[3] and packet[3] not in known:
                if packet[1] & QOS_2:
                    known.add(packet[3])
                room -= 1
                if room < 0:  # [MQTT-3.3.4-9]
                    why = (
                        f"the client has more than {self._options.inflight_max} unacknowledged PUBLISHes, which is the receive "
                        "maximum of the server"
                    )
                    return [*packets[:at], (MALFORMED, ProtocolError(why, ReasonCode.RECEIVE_MAXIMUM_EXCEEDED))]
        return packets

    # --- refusing ---------------------------------------------------------------------------------------------------

    def _keep(self, packet: Packet) -> None:
        """Keep a PUBLISH of MQTT 3.1.1 until the disk has room; drop one of QoS 0."""
        _, flags, topic, _, body = packet[:5]
        if flags & QOS_MASK:
            self._kept.add([packet], len(topic) + len(body) + PACKET_OVERHEAD_BYTES)
        else:
            self._counters.publishes_dropped += 1

    def _deny(self, topic: bytes, packet_id: int, error: StoreError) -> None:
        """Note that a PUBLISH was refused, so that its ack says so.

        MQTT 3.1.1 has no such ack. If the plugins forbid the message, it is acknowledged as if it were stored [MQTT-3.3.5-2],
        or the connection is closed, as `mqtt.access.denied_publish` says.

        Raises:
            StoreError: the client cannot be told: `error` itself.
            ProtocolError: the connection has to close because of `mqtt.access.denied_publish`.
        """
        if not self._is_v5:
            if not isinstance(error, PublishForbidden):
                raise error
            if self._options.closes_denied:
                raise ProtocolError(str(error), ReasonCode.NOT_AUTHORIZED)
        reason = ReasonCode.QUOTA_EXCEEDED
        if isinstance(error, PublishForbidden):
            reason = ReasonCode.NOT_AUTHORIZED
        elif isinstance(error, DeliveryTimeInvalid):
            reason = ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
        elif isinstance(error, TopicInvalid):
            _check_name(topic)
            reason = ReasonCode.TOPIC_NAME_INVALID
        if isinstance(error, DiskFull) and not packet_id:
            self._counters.publishes_dropped += 1
            return
        self._counters.publishes_refused += 1
        if packet_id and self._is_v5:
            self._denied[packet_id] = (reason, str(error))

    # --- acknowledging ----------------------------------------------------------------------------------------------

    def finish_read(self) -> int:
        """Acknowledge the PUBLISHes of this read when they are durable; return how many were stored."""
        stored, self._stored = self._stored, 0
        self._counters.publishes_in += stored
        puback_ids, pubrec_ids = self._puback_ids, self._pubrec_ids
        if puback_ids or pubrec_ids:
            denied: Mapping[int, Denial] = NONE_DENIED
            if self._denied:
                denied, self._denied = self._denied, {}
            handles: Mapping[int, str] = NO_HANDLES
            if self._recall_handles:
                handles, self._recall_handles = self._recall_handles, {}
            if puback_ids:
                self._puback_ids = []
                self._outbox.unacked += len(puback_ids)
                self._store.when_durable(partial(self._acknowledge, PUBACK, puback_ids, denied, handles))
            if pubrec_ids:
                self._pubrec_ids = []
                self._store.when_durable(partial(self._acknowledge, PUBREC, pubrec_ids, denied, handles))
        return stored

    def _acknowledge(self, kind: int, packet_ids: list[int], denied: Mapping[int, Denial], handles: Mapping[int, str]) -> None:
        outbox = self._outbox
        if kind == PUBACK:
            outbox.unacked -= len(packet_ids)
        if not denied and not handles:
            outbox.send(encode_acks(kind, packet_ids), len(packet_ids))
            return
        for packet_id in packet_ids:
            if packet_id in denied:
                reason, why = denied[packet_id]
                outbox.send(outbox.explained(partial(encode_ack, kind, packet_id, reason), why))
            else:
                tell = partial(encode_ack_with, kind, packet_id, RECALL_HANDLE)
                outbox.send(outbox.explained(tell, handles.get(packet_id, "")))


def _received_as(session: Session, packet_id: int) -> bytes:
    """Return the properties of a plain message that a session has received at QoS 2."""
    return orjson.dumps({"session": session.client_id, "packet_id": packet_id})


def _check_name(topic: bytes) -> None:
    """Raise TopicInvalid, which closes the connection, if the topic of a PUBLISH is no topic at all."""
    check_topic(topic, levels_max=TOPIC_BYTES_MAX + 1)
