"""What becomes of a client's PUBLISHes. A plain one is stored where it is handled, in `connection.py`; the others here.

Some are alike, and stored as a run; some have properties, are for later, are denied, or are kept until the disk has room.

Clauses in brackets are those of MQTT 5.0; where MQTT 3.1.1 has one of another number, it stands behind it as 3.1.1:[...].
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING
from weakref import ref

import orjson

from penstock.gateway.connection.pausing import PauseReason
from penstock.gateway.protocol.errors import ProtocolError
from penstock.gateway.protocol.message import to_stored
from penstock.gateway.protocol.packets import PUBLISH, Packet
from penstock.gateway.protocol.properties import Property, PropertyValues, check_response_topic, parse_properties
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.protocol.topics import DELAYED, parse_delayed
from penstock.store.errors import DiskFull, StoreError, TopicInvalid
from penstock.store.options import KIB
from penstock.store.record import HEADER_BYTES, TOPIC_BYTES_MAX, Flag, encode_properties
from penstock.store.topics import check_topic

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection
    from penstock.gateway.sessions.session import Session

QOS_1 = 1 << 1
QOS_2 = 2 << 1
"""The QoS in the flags of a PUBLISH."""

_RETAIN = 1

RECORD_FLAGS = [(flags >> 1 & 3) | (int(Flag.RETAIN) if flags & _RETAIN else 0) for flags in range(16)]
"""The flags of a message's record, by the flags of its PUBLISH."""

SESSION = int(Flag.SESSION)
"""The flag of a record by which a message at QoS 2 is known again."""

KEPT_BYTES_MAX = 64 * KIB
"""Bytes of PUBLISH packets that a connection keeps while the disk has no room for them. With more it is no longer read."""

KEPT_OVERHEAD_BYTES = 256
"""What a packet that is kept costs besides its topic and its body."""

Denial = tuple[ReasonCode, str]
"""Why one packet of MQTT 5.0 was refused, and in a sentence; the connection goes on."""

NONE_DENIED: Mapping[int, Denial] = MappingProxyType({})


class PublishForbidden(StoreError):
    """Raised when the plugins don't allow a message."""

    def __init__(self, topic: bytes) -> None:
        super().__init__(f"the client may not publish to {topic[:80]!r}")


class PayloadInvalid(StoreError):
    """Raised when a body is not of the format that its publisher says it is of."""


class Publishing:
    """The PUBLISHes of one connection, as far as there is more to do than to append them.

    Parameters:
        connection: whose they are.
    """

    __slots__ = ("_gateway", "_kept_bytes", "_of", "_store", "denied", "kept", "puback_ids", "pubrec_ids", "topics")

    def __init__(self, connection: Connection) -> None:
        self._of = ref(connection)  # no circle: what a connection held goes with it, not when the collector has a look
        self._gateway = connection.gateway
        self._store = connection.store
        self.topics: dict[int, bytes] = {}
        """The topics for which the client has given an alias."""
        self.puback_ids: list[int] = []
        self.pubrec_ids: list[int] = []
        """Of the PUBLISHes of the read that is handled now: what is to be answered once they are durable."""
        self.denied: dict[int, Denial] = {}
        """Those of them that were refused, by packet id."""
        self.kept: list[Packet] = []
        """PUBLISHes that wait for a disk with room, in order."""
        self._kept_bytes = 0

    @property
    def _connection(self) -> Connection:
        connection = self._of()
        assert connection is not None, "it has this part of it to itself"
        return connection

    def take_denied(self) -> Mapping[int, Denial]:
        """Return what was refused of this read, and forget it."""
        if not self.denied:
            return NONE_DENIED
        denied, self.denied = self.denied, {}
        return denied

    # --- storing ----------------------------------------------------------------------------------------------------

    def run(self, run: Packet, packets: list[Packet]) -> bool:
        """Store PUBLISHes that are alike, and note what they are to be answered; return False where each is a case of its own.

        `packets` are those that came with them. Raises Undecided.
        """
        _, flags, topic, packet_ids, bodies = run
        guard = self._connection.permissions
        if self.kept or (guard is not None and not guard.may_publish(topic, packets)):
            return False
        try:
            size = sum(map(len, bodies)) + len(bodies) * (HEADER_BYTES + len(topic))
            route = self._store.queues.route(topic)
            runs = [(route, [*alike], RECORD_FLAGS[flags]) for _, alike in groupby(bodies, len)]
            is_stored = self._store.append_runs(runs, size)
        except StoreError:
            return False
        if is_stored:
            self.puback_ids += packet_ids
        return is_stored

    def with_properties(self, packet: Packet, packets: list[Packet]) -> bool:
        """Store a PUBLISH that has properties; return whether it was stored, and note what it is to be answered.

        `packets` are those that came with it. Raises Undecided.
        """
        _, flags, topic, packet_id, body, raw = packet
        found = parse_properties(raw, PUBLISH)
        if Property.SUBSCRIPTION_IDENTIFIER in found:
            raise ProtocolError("a PUBLISH to the server has a subscription identifier [MQTT-3.3.4-6]")
        check_response_topic(found)
        topic = self._topic_of(topic, found)
        if flags & 6 == QOS_2 and packet_id in self._connection.session.received:
            self.pubrec_ids.append(packet_id)
            return False
        guard = self._connection.permissions
        try:
            if guard is not None and not guard.may_publish(topic, packets):
                raise PublishForbidden(topic)
            self._append(flags, topic, body, found, packet_id)
        except StoreError as error:
            self._deny(topic, packet_id, error)
            self._answer(flags, packet_id)
            return False
        self._answer(flags, packet_id)
        return True

    def otherwise(self, packet: Packet, error: StoreError) -> bool:
        """Handle a plain PUBLISH that can't be appended as it is; return whether it was stored, and note what it is answered.

        On a full disk one of MQTT 3.1.1 is kept. Raises StoreError where it is refused and the client can't be told so.
        """
        _, flags, topic, packet_id, body = packet
        is_stored = False
        if isinstance(error, TopicInvalid) and topic.startswith(DELAYED):
            try:
                self._append(flags, topic, body, {}, packet_id)
                is_stored = True
            except StoreError as refused:
                error = refused
        if not is_stored:
            if isinstance(error, DiskFull) and not self._connection.is_v5:
                self.keep(packet)
                return False
            self._deny(topic, packet_id, error)
        self._answer(flags, packet_id)
        return is_stored

    def _answer(self, flags: int, packet_id: int) -> None:
        """Note that a PUBLISH is to be acknowledged, stored or denied."""
        qos = flags & 6
        if qos == QOS_1:
            self.puback_ids.append(packet_id)
        elif qos == QOS_2:
            self.pubrec_ids.append(packet_id)
            if packet_id not in self.denied:
                self._connection.session.received.add(packet_id)

    def _append(self, flags: int, topic: bytes, body: bytes, found: PropertyValues, packet_id: int) -> None:
        """Store a message off the hot path. Raises StoreError."""
        gateway, store = self._gateway, self._store
        due_ms = 0
        if topic.startswith(DELAYED):
            topic, due_ms = parse_delayed(topic, store.now_ms(), gateway.delay_ms_max)
            if due_ms:
                gateway.delayed.check_room()
        if gateway.options.check_payload_format and found.get(Property.PAYLOAD_FORMAT) == 1:
            _check_utf_8(body)
        session, now_ms = self._connection.session, store.now_ms()
        publisher = session.client_id if session.no_local else ""
        record_flags = RECORD_FLAGS[flags] | (Flag.DELAYED if due_ms else 0)
        if flags & 6 == QOS_2 and session.lasts:
            record_flags |= SESSION
            about = to_stored(
                found, now_ms, publisher=publisher, deliver_at_ms=due_ms, session=session.client_id, packet_id=packet_id
            )
        else:
            about = to_stored(found, now_ms, publisher=publisher, deliver_at_ms=due_ms)
        store.append_message(store.queues.route(topic), body, encode_properties(about), record_flags)

    def _topic_of(self, topic: bytes, found: PropertyValues) -> bytes:
        """Return the topic of a PUBLISH, which an alias may stand for (3.3.2.3.4)."""
        alias = found.get(Property.TOPIC_ALIAS)
        if alias is None:
            if not topic:
                raise ProtocolError("a PUBLISH has neither a topic nor an alias (3.3.2.1)")
            return topic
        if alias > self._gateway.options.topic_alias_max:  # [MQTT-3.3.2-9]
            raise ProtocolError(
                f"the topic alias is {alias}; use {self._gateway.options.topic_alias_max} at most",
                ReasonCode.TOPIC_ALIAS_INVALID,
            )
        if topic:
            self.topics[alias] = topic
            return topic
        known = self.topics.get(alias)
        if known is None:
            raise ProtocolError(f"the topic alias {alias} stands for nothing yet (3.3.2.3.4)")
        return known

    # --- refusing ---------------------------------------------------------------------------------------------------

    def _deny(self, topic: bytes, packet_id: int, error: StoreError) -> None:
        """Note that a PUBLISH was refused, for its ack to say so.

        MQTT 3.1.1 has no way to. Where the plugins forbid the message it is acknowledged as if it were stored [MQTT-3.3.5-2],
        or the connection is closed, as `mqtt.access.denied_publish` says. Everything else raises the error.
        """
        if not self._connection.is_v5:
            if not isinstance(error, PublishForbidden):
                raise error
            if self._gateway.options.access.denied_publish == "close":
                raise ProtocolError(str(error), ReasonCode.NOT_AUTHORIZED)
        reason = ReasonCode.QUOTA_EXCEEDED
        if isinstance(error, PublishForbidden):
            reason = ReasonCode.NOT_AUTHORIZED
        elif isinstance(error, PayloadInvalid):
            reason = ReasonCode.PAYLOAD_FORMAT_INVALID
        elif isinstance(error, TopicInvalid):
            check_topic(topic, levels_max=TOPIC_BYTES_MAX + 1)  # raises where it is no topic at all: that is no denial
            reason = ReasonCode.TOPIC_NAME_INVALID
        if isinstance(error, DiskFull) and not packet_id:
            self._gateway.counters.publishes_dropped += 1
            return
        self._gateway.counters.publishes_refused += 1
        if packet_id and self._connection.is_v5:
            self.denied[packet_id] = (reason, str(error))

    # --- a full disk ------------------------------------------------------------------------------------------------

    def keep(self, packet: Packet) -> None:
        """Keep a PUBLISH of MQTT 3.1.1 that can't be stored now. It is neither lost nor acknowledged; one of QoS 0 is dropped.

        Everything else that the client sends is served, its pings and acks among it, until it has sent more than is kept. Then
        it is not read any more. So devices with a small window stay connected through a full disk.
        """
        _, flags, topic, _, body = packet
        if not flags & 6:
            self._gateway.counters.publishes_dropped += 1
            return
        self.keep_all([packet], len(topic) + len(body) + KEPT_OVERHEAD_BYTES)

    def keep_all(self, packets: list[Packet], size: int) -> None:
        """Keep packets, whatever they are, that take `size` bytes together."""
        self.kept += packets
        self._kept_bytes += size
        self._gateway.backlog.add(self._connection, size)
        if self.keeps_too_much:
            self._connection.pause_reading(PauseReason.DISK_FULL)

    @property
    def keeps_too_much(self) -> bool:
        """True where so much is kept that nothing more is to be read."""
        return self._kept_bytes > KEPT_BYTES_MAX or (self._kept_bytes > 0 and self._gateway.backlog.is_full)

    def drop_kept(self) -> None:
        """Forget what is kept: it is handled anew, or its client is gone. None of it was acknowledged."""
        self._gateway.backlog.remove(self._connection, self._kept_bytes)
        self.kept, self._kept_bytes = [], 0


def received_properties(session: Session, packet_id: int) -> bytes:
    """Return the properties of a plain message that a session has received at QoS 2."""
    return orjson.dumps({"session": session.client_id, "packet_id": packet_id})


def _check_utf_8(body: bytes) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise PayloadInvalid(f"the body is not UTF-8 from byte {error.start} on, as its payload format says") from error
