"""Turns light-queue entries into PUBLISH packets: once for all who get them under the same terms.

Packets of one batch are one run of bytes. At QoS 1 and 2 each packet has a slot for a packet id, which is another one for
each client: a client copies the run and fills its slots.

What nobody may have any more (its time is over, its segment is gone) is left out here, on the way out: that is the one place
through which every delivery goes.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import NamedTuple

from gateway.codec import encode_publish, encode_publish_head
from gateway.fields import U16, write_varint
from gateway.message import to_wire
from gateway.packets import PUBLISH
from store.errors import PositionUnknown
from store.lightqueue import ENTRY
from store.record import HEADER, HEADER_BYTES, Flag, decode_properties
from store.store import Store

_SHORT_HEAD = Struct(">BBH")
"""Fixed header with a length of one byte, and the topic's length."""
SLOT = Struct(">H")
_QOS_MASK = int(Flag.QOS_MASK)
_RETAIN = int(Flag.RETAIN)


class Slot(NamedTuple):
    """Where a packet id goes, the QoS of its packet, and the record that the packet is made of: to send it again.

    `delivery` is that of a shared subscription: its id in POP, by which an ack is noted (`pop.checkpoint.delivery_id`).
    """

    offset: int
    qos: int
    position: int
    size: int
    delivery: int = 0


class Run(NamedTuple):
    """The packets of a batch, one behind the other."""

    data: bytes
    slots: list[Slot]
    messages: int
    publishers: frozenset[str] = frozenset()
    """The publishers of those messages that must not go back to them."""


class Terms(NamedTuple):
    """Under which terms a subscription gets its messages. Those with the same share one encoding."""

    qos: int
    is_v5: bool = False
    keeps_retain: bool = False
    """MQTT 5.0, retain as published."""
    identifiers: tuple[int, ...] = ()

    @property
    def key(self) -> int:
        """A number for these terms, where there is one identifier at most."""
        identifier = self.identifiers[0] if self.identifiers else 0
        return self.qos | self.is_v5 << 2 | self.keeps_retain << 3 | identifier << 4


class Aliases:
    """The topic aliases that the server has given on one connection: MQTT 5.0, 3.3.2.3.4.

    The first topics that go out get one, and keep it: whoever asks for aliases is a device with few topics.

    Parameters:
        most: how many the client takes, at least 1.
    """

    __slots__ = ("_given", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._given: dict[bytes, int] = {}

    def of(self, topic: bytes) -> tuple[int, bool]:
        """Return the alias of a topic, 0 where there is none to give, and whether the client knows it already."""
        alias = self._given.get(topic)
        if alias is not None:
            return alias, True
        return (len(self._given) + 1 if len(self._given) < self._most else 0), False

    def give(self, topic: bytes, alias: int) -> None:
        """Note that a packet goes out that tells the client what an alias stands for."""
        self._given[topic] = alias

    def forget(self) -> None:
        """Give all of them anew: what a packet says of an alias goes before what the client was told."""
        self._given.clear()


Choose = Callable[[bytes, str], Terms | None]
"""Says under which terms one client gets a message, by its topic and publisher; None where it doesn't."""


Read = Callable[[int, int], bytes | None]
"""Reads a record by its position and size."""


def encode_run(store: Store, entries: bytes, terms: Terms, *, retain: bool = False, verify: bool = False) -> Run:
    """Return the packets for entries of a light queue, each at the lower of its own QoS and that of `terms` [MQTT-3.8.4-8].

    The hot path of delivery: about 1 us a message. `retain` is set where they answer a new subscription [MQTT-3.3.1-8].
    With `verify` each is checked against its checksum, and left out where it doesn't hold: for what was not written just now.
    """
    read = store.read_intact if verify else store.log.read
    if terms.is_v5:
        return _encode_5(store, entries, read, terms, retain)
    return _encode_4(store, entries, read, terms.qos, retain)


def _encode_4(store: Store, entries: bytes, read: Read, qos_max: int, retain: bool) -> Run:
    unpack, pack_head = HEADER.unpack_from, _SHORT_HEAD.pack
    flag = PUBLISH << 4 | int(retain)
    parts: list[bytes] = []
    add = parts.append
    slots: list[Slot] = []
    length = left_out = 0
    for position, size, _ in ENTRY.iter_unpack(entries):
        try:
            data = read(position, size)
        except PositionUnknown:  # carried forward, or expired
            data = store.read_intact(position, size)
        if data is None:
            left_out += 1
            continue
        _, _, _, flags, topic_len, props_len, _ = unpack(data)
        qos = min(flags & _QOS_MASK, qos_max)
        if not qos and not props_len and size < 126 + HEADER_BYTES:
            # Topic and body stand side by side in the record as they do in the packet.
            add(pack_head(flag, size - HEADER_BYTES + 2, topic_len))
            add(data[HEADER_BYTES:])
            length += size - HEADER_BYTES + 4
            continue
        topic_stop = HEADER_BYTES + topic_len
        if props_len:
            expires_at_ms = decode_properties(data[topic_stop : topic_stop + props_len]).expires_at_ms
            if expires_at_ms and expires_at_ms <= store.now_ms():
                left_out += 1
                continue
        body = data[topic_stop + props_len :]
        head = encode_publish_head(data[HEADER_BYTES:topic_stop], len(body), qos << 1 | retain)
        add(head)
        length += len(head)
        if qos:
            slots.append(Slot(length, qos, position, size))
            add(b"\0\0")
            length += 2
        add(body)
        length += len(body)
    return Run(b"".join(parts), slots, len(entries) // ENTRY.size - left_out)


def _encode_5(store: Store, entries: bytes, read: Read, terms: Terms, retain: bool) -> Run:
    unpack, pack_head = HEADER.unpack_from, _SHORT_HEAD.pack
    qos_max, _, keeps_retain, _ = terms
    identifiers = _identifiers(terms)
    bare = write_varint(len(identifiers)) + identifiers
    more = HEADER_BYTES - 2 - len(bare)
    """What a record without properties has more than its packet behind the fixed header, at QoS 0."""
    short = 128 + more
    now_ms = store.now_ms()
    parts: list[bytes] = []
    add = parts.append
    slots: list[Slot] = []
    publishers: set[str] = set()
    length = left_out = 0
    for position, size, _ in ENTRY.iter_unpack(entries):
        try:
            data = read(position, size)
        except PositionUnknown:  # carried forward, or expired
            data = store.read_intact(position, size)
        if data is None:
            left_out += 1
            continue
        _, _, _, flags, topic_len, props_len, _ = unpack(data)
        qos = min(flags & _QOS_MASK, qos_max)
        topic_stop = HEADER_BYTES + topic_len
        if not qos and not props_len and size < short:
            is_retained = retain or (keeps_retain and flags & _RETAIN)
            add(pack_head(PUBLISH << 4 | 1 if is_retained else PUBLISH << 4, size - more, topic_len))
            add(data[HEADER_BYTES:topic_stop])
            add(bare)
            add(data[topic_stop:])
            length += size - more + 2
            continue
        properties = bare
        if props_len:
            stored = decode_properties(data[topic_stop : topic_stop + props_len])
            if stored.expires_at_ms and stored.expires_at_ms <= now_ms:  # [MQTT-3.3.2-5]
                left_out += 1
                continue
            if stored.publisher:
                publishers.add(stored.publisher)
            raw = to_wire(stored, now_ms) + identifiers
            properties = write_varint(len(raw)) + raw
        is_retained = retain or (keeps_retain and flags & _RETAIN)
        rest = size - topic_stop - props_len + len(properties)
        flag = qos << 1 | (1 if is_retained else 0)
        remaining = topic_len + rest + (4 if qos else 2)
        if remaining < 128:
            head = pack_head(PUBLISH << 4 | flag, remaining, topic_len) + data[HEADER_BYTES:topic_stop]
        else:
            head = encode_publish_head(data[HEADER_BYTES:topic_stop], rest, flag)
        add(head)
        length += len(head)
        if qos:
            slots.append(Slot(length, qos, position, size))
            add(b"\0\0")
            length += 2
        add(properties)
        add(data[topic_stop + props_len :])
        length += rest
    return Run(b"".join(parts), slots, len(entries) // ENTRY.size - left_out, frozenset(publishers))


def encode_own(
    store: Store,
    entries: bytes,
    choose: Choose,
    *,
    packet_bytes_max: int,
    aliases: Aliases | None = None,
    retain: bool = False,
) -> tuple[Run, int]:
    """Return the packets of MQTT 5.0 that are one client's alone, and how many were left out because they are too large.

    For what can't be shared: topic aliases, messages that several of a client's subscriptions match, its own messages where it
    wants none, a limit of packet bytes. About 4 us a message.

    Args:
        store: where the messages are.
        entries: of a light queue.
        choose: the terms for a message.
        packet_bytes_max: the largest packet that the client takes; a larger one counts as sent [MQTT-3.1.2-25].
        aliases: of the connection, where the client wants them. The run must be sent: it tells the client of new ones.
        retain: as in `encode_run`.
    """
    now_ms = store.now_ms()
    parts: list[bytes] = []
    slots: list[Slot] = []
    length = messages = too_large = 0
    for position, size, _ in ENTRY.iter_unpack(entries):
        data = store.read_intact(position, size)
        if data is None:
            continue
        _, _, _, flags, topic_len, props_len, _ = HEADER.unpack_from(data)
        topic_stop = HEADER_BYTES + topic_len
        topic, body = data[HEADER_BYTES:topic_stop], data[topic_stop + props_len :]
        stored = decode_properties(data[topic_stop : topic_stop + props_len])
        terms = choose(topic, stored.publisher)
        if terms is None or (stored.expires_at_ms and stored.expires_at_ms <= now_ms):
            continue
        qos = min(flags & _QOS_MASK, terms.qos)
        raw = to_wire(stored, now_ms) + _identifiers(terms)
        alias, is_known = aliases.of(topic) if aliases is not None else (0, False)
        if alias:
            raw += b"\x23" + U16.pack(alias)
        properties = write_varint(len(raw)) + raw
        flag = qos << 1 | (1 if retain or (terms.keeps_retain and flags & _RETAIN) else 0)
        head = encode_publish_head(b"" if is_known else topic, len(properties) + len(body), flag)
        packet_bytes = len(head) + len(properties) + len(body) + (2 if qos else 0)
        if packet_bytes > packet_bytes_max:
            too_large += 1
            continue
        if aliases is not None and alias and not is_known:
            aliases.give(topic, alias)
        parts.append(head)
        if qos:
            slots.append(Slot(length + len(head), qos, position, size))
            parts.append(b"\0\0")
        parts += (properties, body)
        length += packet_bytes
        messages += 1
    return Run(b"".join(parts), slots, messages), too_large


def encode_again(store: Store, slot: Slot, packet_id: int, terms: Terms) -> bytes | None:
    """Return a delivery that goes out once more, with DUP [MQTT-3.3.1-1]; None where its message is gone."""
    data = store.read_intact(slot.position, slot.size)
    if data is None:
        return None
    _, _, _, _, topic_len, props_len, _ = HEADER.unpack_from(data)
    topic_stop = HEADER_BYTES + topic_len
    properties = b""
    if terms.is_v5:
        stored = decode_properties(data[topic_stop : topic_stop + props_len])
        raw = to_wire(stored, store.now_ms()) + _identifiers(terms)
        properties = write_varint(len(raw)) + raw
    topic, body = data[HEADER_BYTES:topic_stop], data[topic_stop + props_len :]
    return encode_publish(topic, body, slot.qos, dup=True, packet_id=packet_id, properties=properties)


def topic_of(store: Store, slot: Slot) -> bytes:
    """Return the topic of the message that a delivery is made of; nothing where it is gone."""
    data = store.read_intact(slot.position, slot.size)
    return b"" if data is None else data[HEADER_BYTES : HEADER_BYTES + HEADER.unpack_from(data)[4]]


def _identifiers(terms: Terms) -> bytes:
    return b"".join(b"\x0b" + write_varint(identifier) for identifier in terms.identifiers)
