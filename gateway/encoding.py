"""Turns light-queue entries into PUBLISH packets: once for all who get them under the same terms.

Packets of one batch are one run of bytes. At QoS 1 and 2 each packet has a slot for a packet id, which is another one for
each client: a client copies the run and fills its slots.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from gateway.codec import encode_publish_head
from gateway.packets import PUBLISH
from store.errors import PositionUnknown
from store.lightqueue import ENTRY
from store.record import HEADER, HEADER_BYTES, Flag
from store.store import Store

_SHORT_HEAD = Struct(">BBH")
"""Fixed header with a length of one byte, and the topic's length."""
SLOT = Struct(">H")
_QOS_MASK = int(Flag.QOS_MASK)


class Slot(NamedTuple):
    """Where a packet id goes, and the QoS of its packet."""

    offset: int
    qos: int


class Run(NamedTuple):
    """The packets of a batch, one behind the other."""

    data: bytes
    slots: list[Slot]
    messages: int


def encode_run(store: Store, entries: bytes, qos_max: int, *, retain: bool = False, verify: bool = False) -> Run:
    """Return the packets for entries of a light queue, each at the lower of its own QoS and `qos_max` [MQTT-3.8.4-6].

    Entries whose messages are expired are left out.

    The hot path of delivery: about 1 us a message. `retain` is set where they answer a new subscription [MQTT-3.3.1-8].
    With `verify` each is checked against its checksum, and left out where it doesn't hold: for what was not written just now.
    """
    read = store.read_intact if verify else store.log.read
    unpack, pack_head = HEADER.unpack_from, _SHORT_HEAD.pack
    flag = PUBLISH << 4 | int(retain)
    parts: list[bytes] = []
    add = parts.append
    slots: list[Slot] = []
    length = messages = 0
    for position, size, _ in ENTRY.iter_unpack(entries):
        try:
            data = read(position, size)
        except PositionUnknown:  # carried forward, or expired
            data = store.read_intact(position, size)
        if data is None:
            continue
        messages += 1
        _, _, _, flags, topic_len, props_len, _ = unpack(data)
        qos = min(flags & _QOS_MASK, qos_max)
        if not qos and not props_len and size < 126 + HEADER_BYTES:
            # Topic and body stand side by side in the record as they do in the packet.
            add(pack_head(flag, size - HEADER_BYTES + 2, topic_len))
            add(data[HEADER_BYTES:])
            length += size - HEADER_BYTES + 4
            continue
        topic_stop = HEADER_BYTES + topic_len
        body = data[topic_stop + props_len :]
        head = encode_publish_head(data[HEADER_BYTES:topic_stop], len(body), qos << 1 | retain)
        add(head)
        length += len(head)
        if qos:
            slots.append(Slot(length, qos))
            add(b"\0\0")
            length += 2
        add(body)
        length += len(body)
    return Run(b"".join(parts), slots, messages)
