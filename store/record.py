"""The definition of a CommitLog record, which writer, reader, recovery, Spark and tests all use.

A record is self-contained and little-endian:

    offset  field        type   meaning
    0       size         u32    bytes of the whole record, this field included
    4       crc          u32    CRC-32 (zlib) of everything after this field
    8       kind         u8     see `Kind`
    9       flags        u8     see `Flag`; meaningful for messages
    10      topic_len    u16    bytes of the topic
    12      props_len    u32    bytes of the properties (a JSON object, or nothing)
    16      store_ms     i64    time of storing, ms since 1970 UTC; never decreases along the log
    24      fixed        -      fields of the kind, `FIXED_BYTES[kind]` bytes
    ..      topic        bytes  UTF-8: the topic of a message, the filter of a queue, the group of a POP record
    ..      properties   bytes  JSON, orjson
    ..      body         bytes  up to the end of the record

The *position* of a record is the offset of its first byte in the whole log. It is the id of the record.

A POP checkpoint hands out several messages at once. Each *delivery* is identified by the position of the checkpoint and an
index. An entry takes 24 bytes, so `position + index` is unique in the whole log. That sum is the 64-bit key by which Spark
pairs deliveries with acknowledgements.
"""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

import numpy as np
import orjson
from fastcrc.crc32 import iso_hdlc

from penstock.store.errors import RecordCorrupt

RECORD_BYTES_MAX = 64 * 1024 * 1024
"""Maximum size of a record. A larger size field means damage, so a reader never allocates what a damaged field asks for."""

TOPIC_BYTES_MAX = 65_535
"""MQTT 5.0, 1.5.4: a UTF-8 string is at most 65,535 bytes."""


checksum = iso_hdlc
"""Return the CRC-32 (ISO/IEC 3309) of bytes, optionally continued from the checksum of the bytes before them. The result is the
same as that of `zlib.crc32`, which is slower."""

SEARCH_BYTES = 1024 * 1024
"""Bytes that `find_valid` examines in one step. This bounds its memory."""


class Kind(IntEnum):
    """The kinds of records. Their numbers are on disk, so a number must never be reused."""

    MESSAGE = 1
    QUEUE_DECLARED = 2
    QUEUE_DROPPED = 3
    POP_CHECKPOINT = 4
    POP_ACK = 5
    POP_INVISIBLE_CHANGED = 6
    POP_REVIVED = 7
    POP_DEAD_LETTER = 8
    GROUP_CREATED = 9
    GROUP_OFFSET_RESET = 10
    TIMER_FIRED = 11
    TIMER_CANCELLED = 12
    SESSION_OPENED = 13
    """A client has connected, and its session begins. `SESSION_SLOT` explains the six kinds of sessions."""
    SESSION_CLOSED = 14
    """A client has disconnected, or its session has ended."""
    SESSION_OFFSETS = 15
    """Progress of a session: its cursors and its packet ids in flight."""
    RETAINED_CLEARED = 16
    DAMAGED = 17
    """A range that `penstock repair` has quarantined. Nothing is applied. Later records keep their positions."""
    COPIED = 18
    """A whole older record, copied before its segment was dropped. Reads of the old position return this body."""
    QUEUE_BACKFILLED = 19
    """The backfill of a queue has ended. The record states the next offset, so that a rebuilt queue gets the same offsets."""
    GROUP_CHANGED = 20
    """All settings of a group, in the properties."""
    GROUP_DELETED = 21
    """A group is deleted. The record settles the deliveries in its body. If they don't fit, several records do."""
    TRANSACTION_COMMITTED = 22
    """Half messages become visible, and get their entries in queues now."""
    TRANSACTION_ROLLED_BACK = 23
    """Half messages are discarded, and never delivered."""
    TRANSACTION_CHECKED = 24
    """The producers of half messages are asked for the outcome once more."""
    SNAPSHOT = 25
    """Rows of a snapshot (`store.snapshot`). Such records are in separate files, never in the log."""
    DEAD_LETTER_REDRIVEN = 26
    """Dead letters return to their group as new messages."""
    SESSION_RESUMED = 27
    """A client has reconnected, and resumes its session."""
    SESSION_SUBSCRIBED = 28
    """A session has a new subscription, or has replaced one. The record also claims the queue of the filter."""
    SESSION_UNSUBSCRIBED = 29


class Flag(IntFlag):
    """Flags of a message: the publisher's QoS in the two low bits, and bits for routing."""

    QOS_MASK = 0x03
    RETAIN = 0x04
    DELAYED = 0x08
    """The message is not routed when it is stored. A `TIMER_FIRED` record routes it."""
    SUSPENDED = 0x10
    """On POP_INVISIBLE_CHANGED: when the invisible time ends, the message returns without counting an attempt."""
    HALF = 0x20
    """Half of a transaction. It is not routed when it is stored. A `TRANSACTION_COMMITTED` record routes it."""
    SESSION = 0x40
    """The message changes the session that its properties name: it was received at QoS 2, or it is the session's will."""


UNROUTED = int(Flag.DELAYED | Flag.HALF)
"""Flags of a message that a later record routes."""

OBSERVED = int(Flag.RETAIN | Flag.DELAYED | Flag.HALF | Flag.SESSION)
"""Flags of a message that a part of the store must see, besides its queues."""

# --- the header, twice: for one record and for a million ------------------------------------------------------------

SIZE_AND_CRC = struct.Struct("<II")
HEADER_TAIL = struct.Struct("<BBHIq")
"""The header after the checksum, which covers it: kind, flags, topic_len, props_len, store_ms."""
HEADER = struct.Struct(SIZE_AND_CRC.format + HEADER_TAIL.format.removeprefix("<"))
HEADER_DTYPE = np.dtype(
    [
        ("size", "<u4"),
        ("crc", "<u4"),
        ("kind", "u1"),
        ("flags", "u1"),
        ("topic_len", "<u2"),
        ("props_len", "<u4"),
        ("store_ms", "<i8"),
    ]
)
HEADER_BYTES = HEADER.size
CRC_FROM = SIZE_AND_CRC.size
"""The checksum covers the record from this byte on: everything after the crc field."""
KIND_AT = 8
FLAGS_AT = 9
LENGTHS_AT = 10
PROPS_LEN_AT = 12
STORE_MS_AT = 16
"""Offsets of fields within a record."""
_SIZE = struct.Struct("<I")
_lengths = struct.Struct("<HI").unpack_from
_STORE_MS = struct.Struct("<q")

QUEUE_FIXED = struct.Struct("<I")
"""Fixed fields of QUEUE_DECLARED, QUEUE_DROPPED and QUEUE_BACKFILLED: queue id."""

COPY_FIXED = struct.Struct("<Q")
"""Fixed field of COPIED: position at which the record was stored first. It remains the id of the record."""
COPY_BYTES = HEADER_BYTES + COPY_FIXED.size
"""Bytes that a copy takes in addition to the record that it holds."""

POP_FIXED = struct.Struct("<IIq")
POP_FIXED_DTYPE = np.dtype([("group_id", "<u4"), ("epoch", "<u4"), ("deadline_ms", "<i8")])
"""Fixed fields of every POP and GROUP record. `deadline_ms` is when the invisible time of a checkpoint (or a change) ends, and
0 in other records."""

_POP_KINDS = (
    Kind.POP_CHECKPOINT,
    Kind.POP_ACK,
    Kind.POP_INVISIBLE_CHANGED,
    Kind.POP_REVIVED,
    Kind.POP_DEAD_LETTER,
    Kind.GROUP_CREATED,
    Kind.GROUP_OFFSET_RESET,
    Kind.GROUP_CHANGED,
    Kind.GROUP_DELETED,
    Kind.DEAD_LETTER_REDRIVEN,
)

FIXED_BYTES: list[int] = [0] * 256
"""Number of bytes of the fixed fields, by kind."""
for _kind in (Kind.QUEUE_DECLARED, Kind.QUEUE_DROPPED, Kind.QUEUE_BACKFILLED):
    FIXED_BYTES[_kind] = QUEUE_FIXED.size
FIXED_BYTES[Kind.COPIED] = COPY_FIXED.size
for _kind in _POP_KINDS:
    FIXED_BYTES[_kind] = POP_FIXED.size

# --- bodies that are arrays -----------------------------------------------------------------------------------------

CHECKPOINT_ENTRY = struct.Struct("<QQIHBB")
CHECKPOINT_ENTRY_DTYPE = np.dtype(
    [
        ("position", "<u8"),
        ("offset", "<u8"),
        ("size", "<u4"),
        ("attempt", "<u2"),
        ("source", "u1"),
        ("backoff", "u1"),
    ]
)
"""Body of POP_CHECKPOINT, one per message handed out: the message's position and size, its offset in the queue that it
came from (`source`: 0 the group's filter, 1 its retry queue), and which attempt this delivery is, from 1. `backoff` is 0, or
the message comes back up to 2**backoff ms after the deadline: see `backoff_code`.

The properties, JSON, are there where there is something to say beyond the entries: `attempt_id` of the call; and of a group
that doesn't take every message, `cursor` (offset up to which its queue was looked at), `keys` of the entries and `parked` (see
`pop.core.order`). Without entries the record only says that."""


def backoff_code(wait_ms: int) -> int:
    """Return the field `backoff` of an entry whose message waits for up to `wait_ms` more after its deadline.

    It is rounded up to a power of two, since readers of the log only need to know when a delivery is overdue.
    """
    return max(wait_ms - 1, 1).bit_length() if wait_ms > 0 else 0


REFERENCE = struct.Struct("<QI")
REFERENCE_DTYPE = np.dtype([("checkpoint", "<u8"), ("index", "<u4")])
"""Body of POP_ACK, POP_REVIVED, POP_DEAD_LETTER, GROUP_OFFSET_RESET and GROUP_DELETED: the deliveries that the record
settles."""

CHANGE_ENTRY = struct.Struct("<QIQQIHBB")
CHANGE_ENTRY_DTYPE = np.dtype([*REFERENCE_DTYPE.descr, *CHECKPOINT_ENTRY_DTYPE.descr])
"""Body of POP_INVISIBLE_CHANGED: the delivery that ends, and the delivery that replaces it under this record's position."""

TIMER_ENTRY = struct.Struct("<QI")
TIMER_ENTRY_DTYPE = np.dtype([("position", "<u8"), ("size", "<u4")])
"""Body of the kinds that name messages: TIMER_FIRED, TIMER_CANCELLED, TRANSACTION_* and DEAD_LETTER_REDRIVEN. Position and
size of each.

The properties of TIMER_FIRED and TRANSACTION_COMMITTED are a JSON list with `[topic, tag hash]` for each of them, so that who
replays the log can route them when their own records are gone. The topic is empty where a record could not be read: it is
routed nowhere.
"""

SESSION_COUNTS = struct.Struct("<HIIIII")
SESSION_CURSOR = struct.Struct("<IQ")
SESSION_PACKET_ID = struct.Struct("<H")
SESSION_SLOT = struct.Struct("<HBQIQ")
"""The records of sessions; the client id is their topic.

SESSION_OPENED and SESSION_RESUMED have in their properties `expiry_s` (how long the session lasts without its client) and,
where the client leaves a will, `will` with `topic`, `qos`, `retain` and `delay_s`. Its properties, as MQTT 5.0 encodes them,
and its body are the record's body. SESSION_CLOSED says `ends_ms` and `will_due_ms` (0: there is no will any more), or `ended`.
SESSION_SUBSCRIBED says `filter`, `number` (of the subscription in its session), `queue` (id), `options` (MQTT 5.0, 3.8.3.1),
`identifier`, `cursor` (offset in the queue), and where retained messages are to come `retained` (those that stand before this
position). SESSION_UNSUBSCRIBED says `filter`, and where others rely on that subscription `stop` (the offset up to which it
still sends) and `cuts` (pairs of number and offset; see `gateway.delivery.draining`); or `number`, of one that has left.

The body of SESSION_OFFSETS is what has changed since the record before: SESSION_COUNTS (the packet id that was given last, and
the lengths of five lists), then the lists. Cursors: SESSION_CURSOR (number of the subscription, offset). Packet ids, a
SESSION_PACKET_ID each: of deliveries that are done; of those whose PUBREC has come; of messages received at QoS 2 whose PUBREL
has come. Deliveries that are new, in the order of sending: SESSION_SLOT (packet id, QoS, position and size of the message,
delivery of a group or 0; QoS 0 where a PUBREC has come). The properties may say how far the retained messages have got:
`retained`, by number of the subscription the last topic, or null where all are out.
"""

BODY_DTYPE: dict[Kind, np.dtype[Any]] = {
    Kind.POP_CHECKPOINT: CHECKPOINT_ENTRY_DTYPE,
    Kind.POP_ACK: REFERENCE_DTYPE,
    Kind.POP_REVIVED: REFERENCE_DTYPE,
    Kind.POP_DEAD_LETTER: REFERENCE_DTYPE,
    Kind.POP_INVISIBLE_CHANGED: CHANGE_ENTRY_DTYPE,
    Kind.TIMER_FIRED: TIMER_ENTRY_DTYPE,
    Kind.TIMER_CANCELLED: TIMER_ENTRY_DTYPE,
    Kind.GROUP_OFFSET_RESET: REFERENCE_DTYPE,
    Kind.GROUP_DELETED: REFERENCE_DTYPE,
    Kind.TRANSACTION_COMMITTED: TIMER_ENTRY_DTYPE,
    Kind.TRANSACTION_ROLLED_BACK: TIMER_ENTRY_DTYPE,
    Kind.TRANSACTION_CHECKED: TIMER_ENTRY_DTYPE,
    Kind.DEAD_LETTER_REDRIVEN: TIMER_ENTRY_DTYPE,
}

for _struct, _dtype in (
    (HEADER, HEADER_DTYPE),
    (POP_FIXED, POP_FIXED_DTYPE),
    (CHECKPOINT_ENTRY, CHECKPOINT_ENTRY_DTYPE),
    (REFERENCE, REFERENCE_DTYPE),
    (CHANGE_ENTRY, CHANGE_ENTRY_DTYPE),
    (TIMER_ENTRY, TIMER_ENTRY_DTYPE),
):
    assert _struct.size == _dtype.itemsize, (_struct.format, _dtype)


class Record(NamedTuple):
    """A decoded record. It is for control paths; hot paths read the fields that they need in place."""

    position: int
    size: int
    kind: int
    flags: int
    store_ms: int
    fixed: bytes
    topic: bytes
    properties: bytes
    body: bytes


class Properties(NamedTuple):
    """The properties of a message.

    `user` is a list of pairs because MQTT 5.0 (3.3.2.3.7) lets a name appear more than once and keeps their order.
    """

    user: list[tuple[str, str]] = []  # noqa: RUF012 - never mutated: a NamedTuple default
    tag: str = ""
    message_group: str = ""
    deliver_at_ms: int = 0
    expires_at_ms: int = 0
    """When the message expires, in ms since 1970; 0 means never."""
    payload_format: int | None = None
    """As the publisher set it: 1 for UTF-8, 0 for any bytes."""
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    publisher: str = ""
    """Client id of the publisher, if one of its own subscriptions must not get the message (MQTT 5.0, no local)."""
    producer: str = ""
    """For half of a transaction: the producer to ask for the outcome."""
    keys: list[str] = []  # noqa: RUF012 - never mutated: a NamedTuple default
    """Business keys, such as the number of an order, by which operators search for messages."""
    born_host: str = ""
    """Host on which the message was created, as its producer says."""
    born_ms: int = 0
    """When the message was created, in ms since 1970 by its producer's clock; 0 if unknown."""
    session: str = ""
    """With `Flag.SESSION`: the client id of the session that the message changes."""
    packet_id: int = 0
    """With `Flag.SESSION`: the packet id with which the message was received; 0 for a will."""


NO_PROPERTIES = Properties()


def encode(
    kind: int,
    topic: bytes = b"",
    body: bytes = b"",
    *,
    store_ms: int,
    fixed: bytes = b"",
    properties: bytes = b"",
    flags: int = 0,
) -> bytes:
    """Return the bytes of a record.

    Args:
        kind: of `Kind`.
        topic: at most `TOPIC_BYTES_MAX` bytes.
        body: any bytes.
        store_ms: when the record is stored, in ms since 1970.
        fixed: the fixed fields of the kind, `FIXED_BYTES[kind]` bytes.
        properties: encoded properties, or nothing.
        flags: of `Flag`, combined.
    """
    assert len(fixed) == FIXED_BYTES[kind], (kind, len(fixed))
    size = HEADER_BYTES + len(fixed) + len(topic) + len(properties) + len(body)
    head = HEADER_TAIL.pack(kind, flags, len(topic), len(properties), store_ms)
    tail = b"".join((head, fixed, topic, properties, body))
    return SIZE_AND_CRC.pack(size, checksum(tail)) + tail


def decode(buffer: bytes | memoryview, offset: int = 0, *, position: int = 0, verify: bool = True) -> Record:
    """Decode the record at `offset` of `buffer`, which is at `position` of the log.

    Raises:
        RecordCorrupt: the bytes are not a whole record, or (with `verify`) the checksum does not match.
    """
    end = len(buffer)
    if offset + HEADER_BYTES > end:
        raise RecordCorrupt(position, f"only {end - offset} bytes are left, but a header takes {HEADER_BYTES}")
    size, crc, kind, flags, topic_len, props_len, store_ms = HEADER.unpack_from(buffer, offset)
    fixed_from = offset + HEADER_BYTES
    topic_from = fixed_from + FIXED_BYTES[kind]
    props_from = topic_from + topic_len
    body_from = props_from + props_len
    stop = offset + size
    if size > RECORD_BYTES_MAX or body_from > stop or stop > end:
        raise RecordCorrupt(position, f"its size field says {size} bytes, which is impossible")
    if verify and checksum(buffer[offset + CRC_FROM : stop]) != crc:
        raise RecordCorrupt(position, "its checksum does not match")
    return Record(
        position,
        size,
        kind,
        flags,
        store_ms,
        bytes(buffer[fixed_from:topic_from]),
        bytes(buffer[topic_from:props_from]),
        bytes(buffer[props_from:body_from]),
        bytes(buffer[body_from:stop]),
    )


# --- fields of one message --------------------------------------------------------------------------------------------
#
# `data` is the record of a MESSAGE, which has no fixed fields. These functions don't check it: see `is_intact`.


def topic_of(data: bytes) -> bytes:
    """Return the topic of a message's record."""
    return data[HEADER_BYTES : HEADER_BYTES + _lengths(data, LENGTHS_AT)[0]]


def properties_of(data: bytes) -> bytes:
    """Return the encoded properties of a message's record, see `decode_properties`; empty where it has none."""
    topic_len, props_len = _lengths(data, LENGTHS_AT)
    topic_stop = HEADER_BYTES + topic_len
    return data[topic_stop : topic_stop + props_len]


def split(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return topic, encoded properties and body of a message's record."""
    topic_len, props_len = _lengths(data, LENGTHS_AT)
    topic_stop = HEADER_BYTES + topic_len
    body_from = topic_stop + props_len
    return data[HEADER_BYTES:topic_stop], data[topic_stop:body_from], data[body_from:]


def store_ms_of(data: bytes | memoryview) -> int:
    """Return when a record was stored, in ms since 1970. `data` may be its header alone; the record may be of any kind."""
    return int(_STORE_MS.unpack_from(data, STORE_MS_AT)[0])


def size_of(data: bytes | memoryview, at: int = 0) -> int:
    """Return the size that the record at offset `at` states, in bytes. It can be anything up to 2**32 - 1."""
    return int(_SIZE.unpack_from(data, at)[0])


def is_intact(data: bytes, at: int = 0, size: int | None = None) -> bool:
    """Return whether the record at offset `at` of `data` has the size and the checksum that it states.

    `size` is the size that it should have. By default it must end where `data` ends.
    """
    if size is None:
        size = len(data) - at
    if size < HEADER_BYTES:
        return False
    stated, crc = SIZE_AND_CRC.unpack_from(data, at)
    return bool(stated == size and checksum(data[at + CRC_FROM : at + size]) == crc)


def walk(buffer: bytes | memoryview, offset: int = 0, end: int | None = None) -> tuple[list[int], int]:
    """Return the offsets of the whole records from `offset` to `end`, and the offset after the last one.

    It only follows the size fields; `valid_until` verifies checksums. It stops at the zeros after the last record of an open
    segment, at an impossible size, and at a record that `end` cuts off.
    """
    end = len(buffer) if end is None else end
    offsets: list[int] = []
    add = offsets.append
    unpack = _SIZE.unpack_from
    last = end - HEADER_BYTES
    while offset <= last:
        size = unpack(buffer, offset)[0]
        if size < HEADER_BYTES or size > RECORD_BYTES_MAX or offset + size > end:
            break
        add(offset)
        offset += size
    return offsets, offset


def valid_until(buffer: bytes | memoryview, offset: int = 0, end: int | None = None) -> int:
    """Return the offset after the last of the valid records that follow each other from `offset` on. It reads all bytes."""
    end = len(buffer) if end is None else end
    unpack = HEADER.unpack_from
    last = end - HEADER_BYTES
    while offset <= last:
        size, crc, kind, _, topic_len, props_len, _ = unpack(buffer, offset)
        stop = offset + size
        fields = HEADER_BYTES + FIXED_BYTES[kind] + topic_len + props_len
        if not fields <= size <= RECORD_BYTES_MAX or stop > end or checksum(buffer[offset + CRC_FROM : stop]) != crc:
            break
        offset = stop
    return offset


def find_valid(buffer: bytes | memoryview, offset: int, last: int, end: int) -> int | None:
    """Return the offset of the first valid record that starts from `offset` to `last` and ends before `end`, or None.

    This tells a damaged record from the torn tail of a log. It examines every byte, since the size field may be damaged.
    With numpy it first rules out bytes that can't be a header: a header has a known kind, a size within bounds, and a time
    of 48 bits.
    """
    last = min(last, end - HEADER_BYTES)
    for start in range(offset, last + 1, SEARCH_BYTES):
        count = min(SEARCH_BYTES, last + 1 - start)
        raw = np.frombuffer(buffer[start : start + count + HEADER_BYTES - 1], dtype=np.uint8)
        size_top, kind, time_top = raw[3 : 3 + count], raw[8 : 8 + count], raw[22 : 22 + count] | raw[23 : 23 + count]
        plausible = (size_top <= RECORD_BYTES_MAX >> 24) & (kind >= min(Kind)) & (kind <= max(Kind)) & (time_top == 0)
        for at in (np.flatnonzero(plausible) + start).tolist():
            size = int.from_bytes(buffer[at : at + 4], "little")
            if size and valid_until(buffer, at, min(at + size, end)) == at + size:
                return int(at)
    return None


def next_valid(buffer: bytes | memoryview, damaged: int, last: int, end: int) -> int | None:
    """Return the offset of the first valid record after the damaged one at `damaged`, or None. It starts at `last` at most.

    If the size field of the damaged record leads to a valid record, that is the one. A search could find bytes inside of
    its body that only look like a record, which a publisher may have put there. But if its checksum, which does not cover
    the size, says that it ends where the search finds a record, then only the size field is damaged, and the search is
    right.
    """
    found = find_valid(buffer, damaged + HEADER_BYTES, last, end)
    if damaged + HEADER_BYTES <= end:
        size, crc = SIZE_AND_CRC.unpack_from(buffer, damaged)
        if found is not None and checksum(buffer[damaged + CRC_FROM : found]) == crc:
            return found
        following = damaged + size
        plausible = HEADER_BYTES <= following - damaged <= RECORD_BYTES_MAX
        if plausible and following == end:
            return None  # the damaged record is the last one
        if plausible and find_valid(buffer, following, following, end) == following:
            return int(following)
    return found


def headers(buffer: bytes | memoryview, offsets: list[int]) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the headers at `offsets` of `buffer` as an array of `HEADER_DTYPE`, one row per record."""
    raw = np.frombuffer(buffer, dtype=np.uint8)
    rows = raw[np.asarray(offsets, dtype=np.int64)[:, None] + np.arange(HEADER_BYTES)]
    found: np.ndarray[Any, np.dtype[Any]] = rows.reshape(-1).view(HEADER_DTYPE)
    return found


def encode_properties(properties: Properties) -> bytes:
    """Return the JSON of `properties`; empty bytes if there are none, as in most messages."""
    if properties == NO_PROPERTIES:
        return b""
    fields: dict[str, Any] = {
        name: value
        for name, value, default in zip(Properties._fields, properties, NO_PROPERTIES, strict=True)
        if value != default
    }
    if properties.correlation_data is not None:
        fields["correlation_data"] = b64encode(properties.correlation_data).decode()
    return orjson.dumps(fields)


def decode_properties(data: bytes) -> Properties:
    """Return the properties in `data`: the inverse of `encode_properties`. Unknown names are dropped."""
    if not data:
        return NO_PROPERTIES
    fields: dict[str, Any] = orjson.loads(data)
    correlation_data = fields.get("correlation_data")
    return Properties(
        [(name, value) for name, value in fields.get("user", ())],
        fields.get("tag", ""),
        fields.get("message_group", ""),
        fields.get("deliver_at_ms", 0),
        fields.get("expires_at_ms", 0),
        fields.get("payload_format"),
        fields.get("content_type"),
        fields.get("response_topic"),
        None if correlation_data is None else b64decode(correlation_data),
        fields.get("publisher", ""),
        fields.get("producer", ""),
        fields.get("keys", []),
        fields.get("born_host", ""),
        fields.get("born_ms", 0),
        fields.get("session", ""),
        fields.get("packet_id", 0),
    )


def tag_hash(tag: str) -> int:
    """Return the 32-bit hash of a tag for a light-queue entry; 0 means no tag."""
    return checksum(tag.encode()) if tag else 0
