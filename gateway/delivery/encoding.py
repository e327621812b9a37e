"""Encodes light-queue entries as PUBLISH packets, once for all subscriptions with the same delivery options.

The packets of a batch are one string of bytes. At QoS 1 and 2 each packet has a slot for its packet id, which differs from
client to client: a subscription copies the batch and fills the slots with packet ids of its own.

Every delivery is encoded here, so this is where messages are left out that have expired or whose segment is gone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Sequence
from struct import Struct
from typing import Final, NamedTuple

from penstock.gateway.delivery.aliases import TopicAliases
from penstock.gateway.delivery.mqtttraces import MqttTraces, TracedMessage
from penstock.gateway.protocol.encode import encode_publish, encode_publish_head
from penstock.gateway.protocol.fields import U16, write_varint
from penstock.gateway.protocol.message import to_wire
from penstock.gateway.protocol.packets import DUP, PUBLISH
from penstock.gateway.sessions.inflight import Slot
from penstock.store.errors import PositionUnknown
from penstock.store.log.commitlog import dense_until
from penstock.store.properties import decode_properties
from penstock.store.queues.lightqueue import ENTRY, ENTRY_BYTES
from penstock.store.record import (
    FLAGS_AT,
    HEADER,
    HEADER_BYTES,
    KIND_AT,
    STORE_MS_AT,
    Flag,
    Kind,
    is_intact,
    split,
    store_ms_of,
    topic_of,
)
from penstock.store.store import Store


class DeliveryOptions(NamedTuple):
    """How a subscription gets its messages. Subscriptions with equal options share one encoding of each batch."""

    qos: int
    """The maximum QoS granted: a message is delivered at the lower of this and its own."""
    is_v5: bool = False
    """Whether packets are those of MQTT 5.0."""
    keeps_retain: bool = False
    """The option Retain As Published (MQTT 5.0, 3.8.3.1)."""
    identifiers: tuple[int, ...] = ()
    """Subscription identifiers to put into each packet."""

    @property
    def key(self) -> int:
        """A number that is the same for equal options, provided that there is at most one identifier."""
        identifier = self.identifiers[0] if self.identifiers else 0
        return self.qos | self.is_v5 << 2 | self.keeps_retain << 3 | identifier << 4


_SHORT_HEAD = Struct(">BBH")
"""A fixed header whose length takes one byte, and the length of the topic."""
SLOT = Struct(">H")
"""A packet id."""
_TIME_BYTES = HEADER_BYTES - STORE_MS_AT
"""Bytes of a record's header from the store time on. Before it are the flags and the lengths of topic and properties."""
_QOS_MASK = int(Flag.QOS_MASK)
_RETAIN = int(Flag.RETAIN)
_DAMAGED = int(Kind.DAMAGED)

EVERY_POSITION = 1 << 63
"""No record has this position or a later one."""


NOBODY: Final = frozenset[str]()
"""The `publishers` of a batch that may go to every client: of nearly all batches."""


class EncodedBatch(NamedTuple):
    """The PUBLISH packets of a batch."""

    data: bytes
    """The packets, one after the other."""
    slots: list[Slot]
    """The places of the packet ids, in order; one for each packet of QoS 1 or 2."""
    messages: int
    """Number of packets."""
    publishers: frozenset[str] = NOBODY
    """Client ids of publishers that have a subscription with No Local, and so may not get the batch as it is."""
    traced: Sequence[TracedMessage] = ()
    """The messages whose traces are sampled. Without tracing there are none."""
    stride: int = 0
    """Bytes from each slot to the next one, if these are the same for all slots of many; otherwise 0."""
    too_large: Sequence[int] = ()
    """Places, among the entries, of the messages that were left out because they exceed the client's maximum packet size."""
    expired: Sequence[int] = ()
    """Positions of the messages that were left out because they have expired."""

    def filled(self, packet_ids: Sequence[int]) -> bytes:
        """Return the packets with these packet ids in the slots."""
        data, slots = bytearray(self.data), self.slots
        if self.stride:
            packed = struct.pack(f">{len(slots)}H", *packet_ids)
            first, last = slots[0].offset, slots[-1].offset
            data[first : last + 1 : self.stride] = packed[::2]
            data[first + 1 : last + 2 : self.stride] = packed[1::2]
        else:
            for slot, packet_id in zip(slots, packet_ids, strict=True):
                SLOT.pack_into(data, slot.offset, packet_id)
        return bytes(data)


STRIDE_SLOTS_MIN: Final = 4
"""Slots of a batch from which on they are filled with two calls, if they are equally far from each other."""

ChooseOptions = Callable[[bytes, str], DeliveryOptions | None]
"""Returns how one client gets a message of a topic from a publisher; None if the client doesn't get the message."""


def encode_batch(
    store: Store,
    entries: bytes,
    options: DeliveryOptions,
    *,
    retain: bool = False,
    dup: bool = False,
    verify_before: int = 0,
    traces: MqttTraces | None = None,
    lasting: Container[int] = (),
) -> EncodedBatch:
    """Return the packets for light-queue entries, each at the lower of the message's QoS and the granted one [MQTT-3.8.4-8].

    The hot path of delivery: see the row `fanout` of `bench mqtt`. It is one function because a call for each message would
    cost as much as the encoding itself.

    Args:
        store: has the messages.
        entries: of a light queue.
        options: how the messages are delivered.
        retain: the messages are retained ones that answer a new subscription [MQTT-3.3.1-8].
        dup: a node that was killed may have sent the messages, so those at QoS 1 get the DUP flag [MQTT-3.3.1-1]. One at QoS 2
            is recorded before it is sent, so it can't have been sent.
        verify_before: position before which each record is checked against its checksum, and left out if that is wrong or a
            repair has set the record aside. Those that were written just now need no check.
        traces: finds the messages whose traces are sampled; None without tracing.
        lasting: positions of messages that don't expire, whatever their publishers said.
    """
    unpack, pack_head = HEADER.unpack_from, _SHORT_HEAD.pack
    qos_max, is_v5, keeps_retain, _ = options
    identifiers = _identifiers(options) if options.identifiers else b""
    bare = b"" if not is_v5 else write_varint(len(identifiers)) + identifiers if identifiers else b"\0"
    """The properties in the packet of a message that has none itself."""
    more = HEADER_BYTES - 2 - len(bare)
    """Bytes by which a record without properties is longer than its packet after the fixed header, at QoS 0."""
    parts: list[bytes] = []
    add = parts.append
    slots: list[Slot] = []
    publishers: list[str] = []
    traced: list[TracedMessage] = []
    expired: list[int] = []
    length = left_out = 0
    data: bytes | None = b""
    base = 0
    ahead_until = _dense_until(entries) if len(entries) > ENTRY_BYTES else 0
    plain, plain_topic_len = b"", 0
    """In the header of a record without properties that is sent at QoS 0: its flags, and the lengths of topic and
    properties."""
    heads: dict[int, bytes] = {}
    """Heads of the packets of such records, by the size of the record."""
    for position, size, _ in ENTRY.iter_unpack(entries):
        at = position - base
        if not data or at < 0 or at + size > len(data):
            data, base, at = _read(store, position, size, ahead_until), position, 0
        stop = at + size
        if data is None or (position < verify_before and (data[at + KIND_AT] == _DAMAGED or not is_intact(data, at, size))):
            data = store.read_intact(position, size) if data else None  # It logs what is wrong.
            if data is None:
                left_out += 1
                continue
            base, at, stop = position, 0, size
        body_from = at + HEADER_BYTES
        if plain and data[at + FLAGS_AT : body_from - _TIME_BYTES] == plain and (head := heads.get(size)):
            add(head)
            if bare:
                topic_stop = body_from + plain_topic_len
                add(data[body_from:topic_stop])
                add(bare)
                body_from = topic_stop
            add(data[body_from:stop])
            length += size - more + 2
            continue
        _, _, _, flags, topic_len, props_len, store_ms = unpack(data, at)
        qos = min(flags & _QOS_MASK, qos_max)
        is_retained = retain or (keeps_retain and flags & _RETAIN)
        topic_stop = body_from + topic_len
        body_from = topic_stop + props_len
        properties = bare
        if props_len:
            stored, now_ms = decode_properties(data[topic_stop:body_from]), store.now_for(store_ms)
            if stored.expires_at_ms and position in lasting:
                stored = stored._replace(expires_at_ms=0)
            if stored.expires_at_ms and stored.expires_at_ms <= now_ms:  # [MQTT-3.3.2-5]
                expired.append(position)
                continue
            if traces is not None and stored.user:
                topic = data[topic_stop - topic_len : topic_stop]
                if (found := traces.message(stored.user, topic, position, stop - body_from, qos)) is not None:
                    traced.append(found)
            if is_v5:
                if stored.publisher:
                    publishers.append(stored.publisher)
                raw = to_wire(stored, now_ms) + identifiers
                properties = write_varint(len(raw)) + raw
        flag = qos << 1 | (1 if is_retained else 0)
        if dup and qos == 1:
            flag |= DUP
        topic = data[topic_stop - topic_len : topic_stop]
        rest = stop - body_from + len(properties)
        remaining = topic_len + rest + (4 if qos else 2)
        if remaining < 128:
            head = pack_head(PUBLISH << 4 | flag, remaining, topic_len)
            if ahead_until and not qos and not props_len:
                shape = data[at + FLAGS_AT : at + HEADER_BYTES - _TIME_BYTES]
                if shape != plain:
                    plain, plain_topic_len = shape, topic_len
                    heads.clear()
                heads[size] = head
            head += topic
        else:
            head = encode_publish_head(topic, rest, flag)
        add(head)
        length += len(head)
        if qos:
            slots.append(Slot(length, qos, position, size))
            add(b"\0\0")
            length += 2
        add(properties)
        add(data[body_from:stop])
        length += rest
    return EncodedBatch(
        b"".join(parts),
        slots,
        len(entries) // ENTRY_BYTES - left_out - len(expired),
        frozenset(publishers) if publishers else NOBODY,
        traced or (),
        _stride_of(slots) if len(slots) >= STRIDE_SLOTS_MIN else 0,
        expired=expired or (),
    )


def _stride_of(slots: list[Slot]) -> int:
    """Return the bytes from each slot to the next one; 0 if these differ."""
    offsets = [slot.offset for slot in slots]
    stride = offsets[1] - offsets[0]
    return stride if offsets == list(range(offsets[0], offsets[-1] + 1, stride)) else 0


def _dense_until(entries: bytes) -> int:
    """Return the position up to which the log may be read at once for all entries; 0 if each record is read by itself."""
    first, size, _ = ENTRY.unpack_from(entries)
    last, last_size, _ = ENTRY.unpack_from(entries, len(entries) - ENTRY_BYTES)
    return dense_until((first, size), (last, last_size), len(entries) // ENTRY_BYTES)


def _read(store: Store, position: int, size: int, until: int) -> bytes | None:
    """Return the bytes of a record and of those after it up to `until`; None if the record may not be delivered any more."""
    try:
        return store.log.read_ahead(position, size, until)
    except PositionUnknown:  # Retention has copied the record to another place, or dropped it.
        return store.read_intact(position, size)


def encode_for_client(
    store: Store,
    entries: bytes,
    choose: ChooseOptions,
    *,
    packet_bytes_max: int,
    aliases: TopicAliases | None = None,
    retain: bool = False,
    dup: bool = False,
    traces: MqttTraces | None = None,
    lasting: Container[int] = (),
) -> EncodedBatch:
    """Return packets that are for one client alone.

    For packets of MQTT 5.0 that can't be shared: with topic aliases, with a maximum packet size, of messages that several of
    the client's subscriptions match, and where the client's own messages are excluded. It costs several times as much a message
    as `encode_batch`. In MQTT 3.1.1 draining subscriptions use it, and overlapping ones if `mqtt.overlapping` says "once".

    Args:
        store: has the messages.
        entries: of a light queue.
        choose: returns how the client gets a message.
        packet_bytes_max: the client's maximum packet size. A message that needs a larger packet is left out.
        aliases: of the connection, if the client accepts any. The batch must be sent, because it tells the client of new ones.
            A message that fits only without an alias has none.
        retain, dup, traces, lasting: as in `encode_batch`.
    """
    parts: list[bytes] = []
    slots: list[Slot] = []
    traced: list[TracedMessage] = []
    too_large: list[int] = []
    expired: list[int] = []
    length = messages = 0
    for place, (position, size, _) in enumerate(ENTRY.iter_unpack(entries)):
        data = store.read_intact(position, size)
        if data is None:
            continue
        flags = data[FLAGS_AT]
        topic, encoded, body = split(data)
        stored, now_ms = decode_properties(encoded), store.now_for(store_ms_of(data))
        if stored.expires_at_ms and position in lasting:
            stored = stored._replace(expires_at_ms=0)
        if stored.expires_at_ms and stored.expires_at_ms <= now_ms:
            expired.append(position)
            continue
        options = choose(topic, stored.publisher)
        if options is None:
            continue
        qos = min(flags & _QOS_MASK, options.qos)
        raw = to_wire(stored, now_ms) + _identifiers(options)
        flag = qos << 1 | (1 if retain or (options.keeps_retain and flags & _RETAIN) else 0)
        if dup and qos == 1:
            flag |= DUP
        alias, is_known = aliases.lookup(topic) if aliases is not None else (0, False)
        while True:
            fields = raw + b"\x23" + U16.pack(alias) if alias else raw
            properties = write_varint(len(fields)) + fields if options.is_v5 else b""
            head = encode_publish_head(b"" if alias and is_known else topic, len(properties) + len(body), flag)
            packet_bytes = len(head) + len(properties) + len(body) + (2 if qos else 0)
            if not alias or packet_bytes <= packet_bytes_max:
                break
            alias = 0
        if packet_bytes > packet_bytes_max:
            too_large.append(place)
            continue
        if aliases is not None and alias and not is_known:
            aliases.assign(topic, alias)
        if traces is not None and (found := traces.message(stored.user, topic, position, len(body), qos)) is not None:
            traced.append(found)
        parts.append(head)
        if qos:
            slots.append(Slot(length + len(head), qos, position, size))
            parts.append(b"\0\0")
        parts += (properties, body)
        length += packet_bytes
        messages += 1
    return EncodedBatch(b"".join(parts), slots, messages, traced=traced or (), too_large=too_large or (), expired=expired or ())


def encode_redelivery(
    store: Store, slot: Slot, packet_id: int, options: DeliveryOptions, *, lasting: Container[int] = ()
) -> bytes | None:
    """Return the packet of a delivery that is sent once more, with DUP [MQTT-3.3.1-1]; None if its message is gone.

    `lasting` as in `encode_batch`.
    """
    data = store.read_intact(slot.position, slot.size)
    if data is None:
        return None
    topic, encoded, body = split(data)
    properties = b""
    if options.is_v5:
        stored = decode_properties(encoded)
        if stored.expires_at_ms and slot.position in lasting:
            stored = stored._replace(expires_at_ms=0)
        raw = to_wire(stored, store.now_for(store_ms_of(data))) + _identifiers(options)
        properties = write_varint(len(raw)) + raw
    return encode_publish(topic, body, slot.qos, dup=True, packet_id=packet_id, properties=properties)


def slot_topic(store: Store, slot: Slot) -> bytes:
    """Return the topic of the message that a slot refers to; empty if the message is gone."""
    data = store.read_intact(slot.position, slot.size)
    return b"" if data is None else topic_of(data)


def _identifiers(options: DeliveryOptions) -> bytes:
    return b"".join(b"\x0b" + write_varint(identifier) for identifier in options.identifiers)
