"""The PUBLISHes that a client sends, on their way to the log: the general path.

`IncomingPublishes.receive` is that way, from top to bottom: properties, repetition, permission, append, acknowledgement. Reads
that hold nothing but plain PUBLISHes do not come here but take a short cut, `publish_fast_path`.

Clauses in brackets are those of MQTT 5.0. Where MQTT 3.1.1 has a clause of another number, it follows as 3.1.1:[...].
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import Final

import orjson

from penstock.gateway.auth.pending import AuthorizationPending
from penstock.gateway.auth.permissions import Permissions
from penstock.gateway.connection.disk_full import PACKET_OVERHEAD_BYTES, KeptPackets
from penstock.gateway.connection.outbox import Outbox
from penstock.gateway.connection.services import ConnectionServices
from penstock.gateway.protocol.delays import RECALL_HANDLE, DeliveryTimeInvalid, due_of
from penstock.gateway.protocol.encode import encode_ack, encode_ack_with, encode_acks
from penstock.gateway.protocol.errors import ProtocolError
from penstock.gateway.protocol.message import to_stored
from penstock.gateway.protocol.packets import DUP, MALFORMED, PUBACK, PUBLISH, PUBLISH_RUN, PUBLISH_WITH, PUBREC, Packet
from penstock.gateway.protocol.properties import Property, PropertyValues, parse_properties
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.protocol.runs import split_runs
from penstock.gateway.protocol.topics import DELAYED, is_bridge_state
from penstock.gateway.sessions.session import Session
from penstock.store.errors import DiskFull, LimitExceeded, PositionUnknown, RecordCorrupt, StoreError, TopicInvalid
from penstock.store.properties import encode_properties
from penstock.store.record import HEADER_BYTES, TOPIC_BYTES_MAX, Flag, record_bytes
from penstock.store.space.causer import NODE
from penstock.store.topics import check_topic, excerpt

QOS_MASK: Final = 3 << 1
QOS_1: Final = 1 << 1
QOS_2: Final = 2 << 1
"""The QoS in the flags of a PUBLISH."""

RETAIN: Final = 1
"""The flag of a PUBLISH that is to be retained."""

NO_VALUES: Final[PropertyValues] = {}
"""The properties of a PUBLISH without any."""

RECORD_FLAGS: Final = [(flags >> 1 & 3) | (int(Flag.RETAIN) if flags & RETAIN else 0) for flags in range(16)]
"""The flags of a message's record, by the flags of its PUBLISH."""

SESSION: Final = int(Flag.SESSION)
"""The flag of a record that names session and packet id, so that a repetition at QoS 2 is recognised after a restart."""

SINGLE: Final = frozenset((PUBLISH, PUBLISH_WITH))
"""The types of packets that are one PUBLISH."""

PUBLISHES: Final = SINGLE | {PUBLISH_RUN}
"""The types of packets that `IncomingPublishes.receive` handles."""

AT_ONCE_MAX: Final = 64
"""Packets that `IncomingPublishes.receive` handles at once."""

REFUSED_AT_ONCE_MAX: Final = 8
"""Packets that `IncomingPublishes.receive` refuses at once. A refusal is logged and explained, and so costs about as much as
twenty messages that are stored."""

Denial = tuple[ReasonCode, str]
"""Why one PUBLISH of MQTT 5.0 was refused: the reason code, and a sentence. The connection stays open."""


class PublishForbidden(StoreError):
    """Raised when the rules or the plugins don't allow a message."""

    def __init__(self, topic: bytes) -> None:
        super().__init__(f"the client may not publish to {excerpt(topic)}")


class IncomingPublishes:
    """Stores the PUBLISHes of one connection, and acknowledges them.

    Parameters:
        services: the parts of the gateway that all connections share.
        outbox: sends the acks.
        kept_packets: keeps what finds no room on the disk.
    """

    __slots__ = (
        "_append",
        "_bytes_max",
        "_denied",
        "_is_v5",
        "_kept_packets",
        "_options",
        "_outbox",
        "_permissions",
        "_puback_ids",
        "_pubrec_ids",
        "_recall_handles",
        "_refused",
        "_route",
        "_services",
        "_session",
        "_store",
        "_stored",
        "aliases",
        "stopped_at",
    )

    def __init__(self, services: ConnectionServices, outbox: Outbox, kept_packets: KeptPackets) -> None:
        self._services = services
        self._store = services.store
        self._append = services.store.append_message
        self._route = services.store.router.route
        self._options = services.options
        self._bytes_max = services.options.message_bytes_max
        self._outbox = outbox
        self._kept_packets = kept_packets
        self._session: Session
        self._permissions: Permissions | None = None
        self._is_v5 = False
        self.aliases: dict[int, bytes] = {}
        """The topics for which the client has given an alias."""
        # Of the PUBLISHes of the read that is handled now:
        self.stopped_at = 0
        """The index of the packet for which the plugins have to be asked."""
        self._stored = 0
        self._refused = 0
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
        receive, refused_max = self._receive_one, self._refused + REFUSED_AT_ONCE_MAX
        stop = min(start + AT_ONCE_MAX, len(packets))
        at = start
        try:
            for at in range(start, stop):
                packet = packets[at]
                kind = packet[0]
                if kind in SINGLE:
                    receive(packet, packets)
                    if self._refused == refused_max:
                        return at + 1
                elif kind != PUBLISH_RUN:
                    return at
                elif not self._append_run(packet, packets):
                    # One by one, and those after them too: many short runs would cost a copy of the list each.
                    packets[at:] = split_runs(packets[at:])
                    return at
        except AuthorizationPending:
            self.stopped_at = at
            raise
        return stop

    def _receive_one(self, packet: Packet, packets: list[Packet]) -> None:
        """Handle one PUBLISH of a read: store it, refuse it, or keep it until the disk has room. Raises as `receive` does."""
        values: PropertyValues | None = None
        if packet[0] == PUBLISH:
            _, flags, topic, packet_id, body = packet
        else:
            _, flags, topic, packet_id, body, raw = packet
            values = parse_properties(raw, PUBLISH, self._options.user_properties_max)
            if Property.SUBSCRIPTION_IDENTIFIER in values:
                raise ProtocolError("a PUBLISH to the server has a subscription identifier [MQTT-3.3.4-6]")
            if not topic or Property.TOPIC_ALIAS in values:
                topic = self._resolve_alias(topic, values)
        qos, session, permissions = flags & QOS_MASK, self._session, self._permissions
        if qos == QOS_2 and packet_id in session.received and self._is_repetition(flags, topic, packet_id, body):
            self._pubrec_ids.append(packet_id)  # [MQTT-4.3.3-10] 3.1.1:[MQTT-4.3.3-2]
            self._tell_handle_again(packet_id)
            return
        if self._kept_packets.packets and not self._is_v5:
            self._keep(packet)  # the messages before it come first [MQTT-4.6.0-2]
            return
        try:
            if permissions is not None and not (permissions.publish.get(topic) or permissions.may_publish(topic, packets)):
                raise PublishForbidden(topic)
            if len(body) > self._bytes_max:
                raise LimitExceeded(
                    f"the payload for {excerpt(topic)} has {len(body)} bytes; send {self._bytes_max} at most: see "
                    "mqtt.message_bytes_max"
                )
            if values is not None or flags & RETAIN:
                self._append_with(flags, topic, body, values, packet_id)
            elif qos == QOS_2 and session.lasts:  # this very record tells a repetition from a new message, even after a crash
                properties = orjson.dumps({"session": session.client_id, "packet_id": packet_id})
                self._append(self._route(topic, session.causer), body, properties, RECORD_FLAGS[flags] | SESSION)
            else:
                self._append(self._route(topic, session.causer), body, b"", RECORD_FLAGS[flags])
            self._stored += 1
        except StoreError as error:
            if values is None and isinstance(error, TopicInvalid) and topic.startswith(DELAYED):  # it has no route as it is
                self._receive_one((PUBLISH_WITH, flags, topic, packet_id, body, b""), packets)
                return
            if isinstance(error, DiskFull) and not self._is_v5:
                self._keep(packet)
                return
            if is_bridge_state(topic):
                _check_name(topic)
            else:
                self._refuse(topic, packet_id, body, values, error)
        if qos == QOS_1:
            self._puback_ids.append(packet_id)
        elif qos == QOS_2:
            self._pubrec_ids.append(packet_id)
            if packet_id not in self._denied:
                session.received.add(packet_id)

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
        due_ms = self._services.delayed.due_ms(position) if position is not None and self._is_v5 else None
        if position is not None and due_ms is not None:
            self._recall_handles[packet_id] = self._services.handles.recall(position, due_ms)

    def _append_run(self, run: Packet, packets: list[Packet]) -> bool:
        """Store PUBLISHes that differ in packet ids and bodies only; return False if each must be looked at by itself."""
        _, flags, topic, packet_ids, bodies = run
        permissions = self._permissions
        if self._kept_packets.packets or (permissions is not None and not permissions.may_publish(topic, packets)):
            return False
        try:
            size = sum(map(len, bodies))
            if size > self._options.message_bytes_max < max(map(len, bodies)):
                return False
            size += len(bodies) * (HEADER_BYTES + len(topic))
            route = self._route(topic, self._session.causer)
            if not self._store.append_runs([(route, [*alike], RECORD_FLAGS[flags]) for _, alike in groupby(bodies, len)], size):
                return False
        except StoreError:
            return False
        self._puback_ids += packet_ids
        self._stored += len(bodies)
        return True

    def _append_with(self, flags: int, name: bytes, body: bytes, values: PropertyValues | None, packet_id: int) -> None:
        """Store a message that has properties, or is delayed or retained. Raises StoreError.

        Args:
            flags: of the PUBLISH.
            name: the topic of the PUBLISH, which may say when the message is due.
            body: the payload.
            values: the properties; None without any. With tracing, a message that has them gets a span.
            packet_id: of the PUBLISH.
        """
        store, services, session, traces = self._store, self._services, self._session, self._services.traces
        began_ns = traces.now_ns() if traces is not None else 0
        topic, due_ms = name, 0
        if values or name.startswith(DELAYED):
            topic, due_ms = due_of(name, values or NO_VALUES, store.now_ms, services.delay_ms_max)
        route = self._route(topic, session.causer)
        is_retained = flags & RETAIN and body
        is_charged = due_ms or is_retained
        causer = store.ledger.with_tenant(session.causer, route.name) if is_charged else NODE
        names_session = flags & QOS_MASK == QOS_2 and session.lasts
        properties = to_stored(
            values or NO_VALUES,
            store.now_ms,
            publisher=session.client_id if session.no_local else "",
            deliver_at_ms=due_ms,
            session=session.client_id if names_session else "",
            packet_id=packet_id if names_session else 0,
            by=causer.row(),
        )
        encoded = encode_properties(properties)
        if is_charged:
            size = record_bytes(topic, body, encoded)
            if due_ms:
                services.delayed.admit(causer, size, route.name)
            if is_retained:
                services.retained.admit(topic, size, causer, is_delayed=due_ms > 0)
        record_flags = RECORD_FLAGS[flags] | (Flag.DELAYED if due_ms else 0) | (SESSION if names_session else 0)
        position = self._append(route, body, encoded, record_flags)
        if due_ms and packet_id and self._is_v5:
            self._recall_handles[packet_id] = services.handles.recall(position, due_ms)
        if traces is not None and values is not None:
            traces.published(values, name, body, flags & QOS_MASK, session.client_id, began_ns, position)

    # --- properties -------------------------------------------------------------------------------------------------

    def _resolve_alias(self, topic: bytes, values: PropertyValues) -> bytes:
        """Return the topic of a PUBLISH, which an alias may stand for (3.3.2.3.4). Raises ProtocolError."""
        alias = values.get(Property.TOPIC_ALIAS)
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
        if alias not in self.aliases:
            raise ProtocolError(f"the topic alias {alias} stands for no topic yet (3.3.2.3.4)")
        return self.aliases[alias]

    # --- limits -----------------------------------------------------------------------------------------------------

    def admit(self, packets: list[Packet], count: int, room: int) -> list[Packet]:
        """Return the packets of a read of MQTT 5.0 that are to be handled.

        They end at the PUBLISH that exceeds the receive maximum, if there is one, with an error in its place. In a session with
        subscriptions that want no messages of its own (No Local), each message is to name its publisher: so each PUBLISH
        becomes one with properties.

        Args:
            packets: the packets of the read.
            count: how many they are, with those of runs.
            room: how many more PUBLISHes the client may leave unacknowledged.
        """
        packets = split_runs(packets)
        if count > room:
            packets = self._within_receive_maximum(packets, room)
        if self._session.no_local:
            packets = [(PUBLISH_WITH, *packet[1:], b"") if packet[0] == PUBLISH else packet for packet in packets]
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
            self._kept_packets.add([packet], len(topic) + len(body) + PACKET_OVERHEAD_BYTES)
        else:
            self._services.counters.publishes_dropped += 1

    def _refuse(self, topic: bytes, packet_id: int, body: bytes, values: PropertyValues | None, error: StoreError) -> None:
        """Refuse a PUBLISH, whose ack then says so.

        MQTT 3.1.1 has no such ack. If the plugins forbid the message, it is acknowledged as if it were stored [MQTT-3.3.5-2],
        or the connection is closed, as `mqtt.access.denied_publish` says.

        Raises:
            StoreError: the client cannot be told: `error` itself.
            ProtocolError: the connection has to close because of `mqtt.access.denied_publish`.
        """
        self._refused += 1
        if values and self._services.traces is not None:
            self._services.traces.refused(values, topic, body, self._session.client_id, str(error))
        if not self._is_v5:
            if not isinstance(error, PublishForbidden):
                raise error
            if self._options.access.denied_publish == "close":
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
            self._services.counters.publishes_dropped += 1
            return
        self._services.counters.publishes_refused += 1
        if packet_id and self._is_v5:
            self._denied[packet_id] = (reason, str(error))

    # --- acknowledging ----------------------------------------------------------------------------------------------

    def finish_read(self) -> int:
        """Acknowledge the PUBLISHes of this read when they are durable; return how many were stored."""
        stored, self._stored = self._stored, 0
        self._services.counters.publishes_in += stored
        puback_ids, pubrec_ids = self._puback_ids, self._pubrec_ids
        outbox, denied, handles = self._outbox, self._denied, self._recall_handles
        if denied or handles:
            self._denied, self._recall_handles = {}, {}
        if puback_ids:
            self._puback_ids = []
            outbox.unacked += len(puback_ids)
            if denied or handles:
                self._store.when_durable(partial(self._explain_acks, PUBACK, puback_ids, denied, handles))
            else:
                self._store.when_durable(partial(outbox.send_pubacks, encode_acks(PUBACK, puback_ids), len(puback_ids)))
        if pubrec_ids:
            self._pubrec_ids = []
            if denied or handles:
                self._store.when_durable(partial(self._explain_acks, PUBREC, pubrec_ids, denied, handles))
            else:
                self._store.when_durable(partial(outbox.send, encode_acks(PUBREC, pubrec_ids), len(pubrec_ids)))
        return stored

    def _explain_acks(self, kind: int, packet_ids: list[int], denied: dict[int, Denial], handles: dict[int, str]) -> None:
        """Send acks of which some say why a message was refused, or have the recall handle of a delayed message."""
        outbox = self._outbox
        if kind == PUBACK:
            outbox.unacked -= len(packet_ids)
        for packet_id in packet_ids:
            if packet_id in denied:
                reason, why = denied[packet_id]
                outbox.send(outbox.explained(partial(encode_ack, kind, packet_id, reason), why))
            else:
                tell = partial(encode_ack_with, kind, packet_id, RECALL_HANDLE)
                outbox.send(outbox.explained(tell, handles.get(packet_id, "")))


def _check_name(topic: bytes) -> None:
    """Raise TopicInvalid, which closes the connection, if the topic of a PUBLISH is no topic at all."""
    check_topic(topic, levels_max=TOPIC_BYTES_MAX + 1)
