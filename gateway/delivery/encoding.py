"""Turns light-queue entries into PUBLISH packets: once for all who get them under the same terms.

Packets of one batch are one run of bytes. At QoS 1 and 2 each packet has a slot for a packet id, which is another one for
each client: a client copies the run and fills its slots.

What nobody may have any more (its time is over, its segment is gone) is left out here, on the way out: that is the one place
through which every delivery goes.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final, NamedTuple

from penstock.gateway.protocol.codec import encode_publish, encode_publish_head
from penstock.gateway.protocol.fields import U16, write_varint
from penstock.gateway.protocol.message import to_wire
from penstock.gateway.protocol.packets import PUBLISH
from penstock.store.commitlog import dense_until
from penstock.store.errors import PositionUnknown
from penstock.store.lightqueue import ENTRY, ENTRY_BYTES
from penstock.store.record import (
    FLAGS_AT,
    HEADER,
    HEADER_BYTES,
    STORE_MS_AT,
    Flag,
    decode_properties,
    is_intact,
    split,
    topic_of,
)
from penstock.store.store import Store

_SHORT_HEAD = Struct(">BBH")
"""Fixed header with a length of one byte, and the topic's length."""
SLOT = Struct(">H")
_TIME_BYTES = HEADER_BYTES - STORE_MS_AT
"""In the header of a record: flags, the topic's length and that of the properties stand between the kind and the time."""
_QOS_MASK = int(Flag.QOS_MASK)
_RETAIN = int(Flag.RETAIN)


class Slot(NamedTuple):
    """Where a packet id goes, the QoS of its packet, and the record that the packet is made of: to send it again.

    `delivery` is that of a shared subscription: its id in POP, by which an ack is noted (`pop.core.checkpoint.delivery_id`).
    """

    offset: int
    qos: int
    position: int
    size: int
    delivery: int = 0


NOBODY: Final = frozenset[str]()
"""The publishers of a run that may go to everybody: nearly always."""


class Run(NamedTuple):
    """The packets of a batch, one behind the other."""

    data: bytes
    slots: list[Slot]
    messages: int
    publishers: frozenset[str] = NOBODY
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


def encode_run(store: Store, entries: bytes, terms: Terms, *, retain: bool = False, verify: bool = False) -> Run:
    """Return the packets for entries of a light queue, each at the lower of its own QoS and that of `terms` [MQTT-3.8.4-8].

    The hot path of delivery: 0.4 us a message at QoS 0, 1 us at QoS 1 and 2, where the messages of a queue stand side by side
    in the log. `retain` is set where they answer a new subscription [MQTT-3.3.1-8]. With `verify` each is checked against its
    checksum, and left out where it doesn't hold: for what was not written just now.
    """
    unpack, pack_head = HEADER.unpack_from, _SHORT_HEAD.pack
    qos_max, is_v5, keeps_retain, _ = terms
    identifiers = _identifiers(terms) if terms.identifiers else b""
    bare = b"" if not is_v5 else write_varint(len(identifiers)) + identifiers if identifiers else b"\0"
    """The properties of a message that has none itself."""
    more = HEADER_BYTES - 2 - len(bare)
    """What a record without properties has more than its packet behind the fixed header, at QoS 0."""
    parts: list[bytes] = []
    add = parts.append
    slots: list[Slot] = []
    publishers: list[str] = []
    length = left_out = 0
    data: bytes | None = b""
    base = 0
    ahead_until = _dense_until(entries) if len(entries) > ENTRY_BYTES else 0
    plain, plain_topic_len = b"", 0
    """What stands in a record that goes out as it is, at QoS 0: its flags, and the lengths of its topic and properties."""
    heads: dict[int, bytes] = {}
    """Heads of the packets of such records, by their size."""
    for position, size, _ in ENTRY.iter_unpack(entries):
        at = position - base
        if not data or at < 0 or at + size > len(data):
            data, base, at = _read(store, position, size, ahead_until), position, 0
        stop = at + size
        if data is None or (verify and not is_intact(data, at, size)):
            data = store.read_intact(position, size) if data else None  # which tells what is wrong
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
        _, _, _, flags, topic_len, props_len, _ = unpack(data, at)
        qos = min(flags & _QOS_MASK, qos_max)
        is_retained = retain or (keeps_retain and flags & _RETAIN)
        topic_stop = body_from + topic_len
        body_from = topic_stop + props_len
        properties = bare
        if props_len:
            stored, now_ms = decode_properties(data[topic_stop:body_from]), store.now_ms()
            if stored.expires_at_ms and stored.expires_at_ms <= now_ms:  # [MQTT-3.3.2-5]
                left_out += 1
                continue
            if is_v5:
                if stored.publisher:
                    publishers.append(stored.publisher)
                raw = to_wire(stored, now_ms) + identifiers
                properties = write_varint(len(raw)) + raw
        flag = qos << 1 | (1 if is_retained else 0)
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
    return Run(b"".join(parts), slots, len(entries) // ENTRY_BYTES - left_out, frozenset(publishers) if publishers else NOBODY)


def _dense_until(entries: bytes) -> int:
    """Return up to where the log may be read at once for the records of `entries`; 0 where each is read by itself."""
    first, size, _ = ENTRY.unpack_from(entries)
    last, last_size, _ = ENTRY.unpack_from(entries, len(entries) - ENTRY_BYTES)
    return dense_until((first, size), (last, last_size), len(entries) // ENTRY_BYTES)


def _read(store: Store, position: int, size: int, until: int) -> bytes | None:
    """Return the bytes of a record, and of those behind it up to `until`; None where nobody may have it any more."""
    try:
        return store.log.read_ahead(position, size, until)
    except PositionUnknown:  # it was carried forward, or expired
        return store.read_intact(position, size)


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
    wants none, a limit of packet bytes. About 4 us a message. For a client of MQTT 3.1.1: what `leaving` sends.

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
        flags = data[FLAGS_AT]
        topic, encoded, body = split(data)
        stored = decode_properties(encoded)
        terms = choose(topic, stored.publisher)
        if terms is None or (stored.expires_at_ms and stored.expires_at_ms <= now_ms):
            continue
        qos = min(flags & _QOS_MASK, terms.qos)
        raw = to_wire(stored, now_ms) + _identifiers(terms)
        alias, is_known = aliases.of(topic) if aliases is not None else (0, False)
        if alias:
            raw += b"\x23" + U16.pack(alias)
        properties = write_varint(len(raw)) + raw if terms.is_v5 else b""
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
    topic, encoded, body = split(data)
    properties = b""
    if terms.is_v5:
        stored = decode_properties(encoded)
        raw = to_wire(stored, store.now_ms()) + _identifiers(terms)
        properties = write_varint(len(raw)) + raw
    return encode_publish(topic, body, slot.qos, dup=True, packet_id=packet_id, properties=properties)


def slot_topic(store: Store, slot: Slot) -> bytes:
    """Return the topic of the message that a delivery is made of; nothing where it is gone."""
    data = store.read_intact(slot.position, slot.size)
    return b"" if data is None else topic_of(data)


def _identifiers(terms: Terms) -> bytes:
    return b"".join(b"\x0b" + write_varint(identifier) for identifier in terms.identifiers)
