"""The definition of a CommitLog record, which writer, reader, recovery, Spark and tests all use.

`store.bodies` defines the bodies that are not a payload, and `store.properties` defines the properties of a message.

A record is self-contained and little-endian:

    offset  field        type   meaning
    0       size         u32    bytes of the whole record, this field included
    4       crc          u32    CRC-32 (zlib) of everything after this field
    8       kind         u8     see `Kind`
    9       flags        u8     see `Flag`, and the constants after it; 0 for kinds without flags
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
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import repeat
from struct import Struct
from typing import NamedTuple

import numpy as np
from fastcrc.crc32 import iso_hdlc

from penstock.store.errors import RecordCorrupt

RECORD_BYTES_MAX = 64 * 1024 * 1024
"""Maximum size of a record. A larger size field means damage, so a reader never allocates what a damaged field asks for."""

TOPIC_BYTES_MAX = 65_535
"""MQTT 5.0, 1.5.4: a UTF-8 string is at most 65,535 bytes."""


checksum = iso_hdlc
"""Return the CRC-32 (ISO/IEC 3309) of bytes, optionally continued from the checksum of the bytes before them. The result is the
same as that of `zlib.crc32`, which is slower."""

LARGE_BYTES = 8_192
"""From this size on, code that is called often takes a view of a part of a record, because a copy would cost more."""


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
    """A client has connected, and its session begins. `store.bodies` explains the seven kinds of sessions."""
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
    """Rows of a snapshot (`store.snapshots.snapshotwriter`). Such records are in separate files, never in the log."""
    DEAD_LETTER_REDRIVEN = 26
    """Dead letters return to their group as new messages."""
    SESSION_RESUMED = 27
    """A client has reconnected, and resumes its session."""
    SESSION_SUBSCRIBED = 28
    """A session has a new subscription, or has replaced one. The record also claims the queue of the filter."""
    SESSION_UNSUBSCRIBED = 29
    CLOCK_STEPPED = 30
    """The node's clock is stepped forward after this record: see `store.clocksteps`."""
    SESSIONS_ACKED = 31
    """How far the clients of many sessions have acknowledged since the last SESSION_OFFSETS record of each."""
    SCHEDULE_PUT = 32
    """A schedule is created, or replaces the one of its name, which is the topic. `store.bodies` explains the three kinds."""
    SCHEDULE_MOVED = 33
    """A schedule is paused, resumed, or passes over occurrences. The messages of a schedule move it too (`Flag.SCHEDULED`)."""
    SCHEDULE_DELETED = 34
    EPOCH_BEGUN = 35
    """A leader of a replicated log begins its epoch: see `store.epochs`. It is the first record that this leader writes."""
    DEAD_LETTER_PURGED = 36
    """Dead letters are removed, because nobody needs them any more."""


class Flag(IntEnum):
    """Flags of a message: the publisher's QoS in the two low bits, and bits for routing.

    Combinations of them are ints. Operations on an `IntFlag` would run Python code several times for each message.
    """

    QOS_MASK = 0x03
    RETAIN = 0x04
    DELAYED = 0x08
    """The message is not routed when it is stored. A `TIMER_FIRED` record routes it."""
    SUSPENDED = 0x10
    """On POP_INVISIBLE_CHANGED: when the invisible time ends, the message returns without counting an attempt."""
    SCHEDULED = 0x10
    """On MESSAGE: it is an occurrence of the schedule that its properties name, and moves the schedule on."""
    HALF = 0x20
    """Half of a transaction. It is not routed when it is stored. A `TRANSACTION_COMMITTED` record routes it."""
    SESSION = 0x40
    """The message changes the session that its properties name: it was received at QoS 2, or it is the session's will."""
    RETURNED = 0x80
    """On POP_INVISIBLE_CHANGED: the consumer has returned the message, and nobody has it until the invisible time ends."""
    IDENTIFIED = 0x80
    """On MESSAGE: it has a deduplication id, which the node remembers."""


SURVIVED = 0x40
"""Flag of POP_INVISIBLE_CHANGED: the consumer of a message that was out alone has extended it, so it has not ended by then."""

LEVEL_MASK = 0x0F
"""Flags of POP_CHECKPOINT, POP_INVISIBLE_CHANGED and POP_REVIVED: the level of the deliveries, see `pop.core.suspicion`."""

CONSUMED, EXPIRED = 0x01, 0x02
"""Flags of POP_ACK: consumers have acknowledged the messages that they got; or the node has, because the messages had expired
before. Records of earlier versions have neither."""

BY_OPERATOR, LAST_MEMBER_LEFT = 0x01, 0x02
"""Flags of GROUP_DELETED: an operator has deleted the group; or the node has, because a subscription had created it and the
last one has ended. Records of earlier versions have neither."""

UNROUTED = int(Flag.DELAYED | Flag.HALF)
"""Flags of a message that a later record routes."""

OBSERVED = int(Flag.RETAIN | Flag.DELAYED | Flag.HALF | Flag.SESSION | Flag.IDENTIFIED | Flag.SCHEDULED)
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

STEP_FIXED = struct.Struct("<qQq")
"""Fixed fields of CLOCK_STEPPED: when the window before the step began, in ms since 1970; the end of the log at that time; and
the step in ms."""

EPOCH_FIXED = struct.Struct("<QQ")
"""Fixed fields of EPOCH_BEGUN: number of the epoch, and id of the replica that leads it."""

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
    Kind.DEAD_LETTER_PURGED,
)

FIXED_BYTES: list[int] = [0] * 256
"""Number of bytes of the fixed fields, by kind."""
for _kind in (Kind.QUEUE_DECLARED, Kind.QUEUE_DROPPED, Kind.QUEUE_BACKFILLED):
    FIXED_BYTES[_kind] = QUEUE_FIXED.size
FIXED_BYTES[Kind.COPIED] = COPY_FIXED.size
FIXED_BYTES[Kind.CLOCK_STEPPED] = STEP_FIXED.size
FIXED_BYTES[Kind.EPOCH_BEGUN] = EPOCH_FIXED.size
for _kind in _POP_KINDS:
    FIXED_BYTES[_kind] = POP_FIXED.size

for _struct, _dtype in ((HEADER, HEADER_DTYPE), (POP_FIXED, POP_FIXED_DTYPE)):
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


def record_bytes(topic: bytes, body: bytes, properties: bytes = b"") -> int:
    """Return the size of the record of a message."""
    return HEADER_BYTES + len(topic) + len(properties) + len(body)


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
    """Return the encoded properties of a message's record, empty if it has none; see `store.properties`."""
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
    covered = (data if size < LARGE_BYTES else memoryview(data))[at + CRC_FROM : at + size]
    return bool(stated == size and checksum(covered) == crc)


PACKED_MAX = 64
"""Maximum number of records that one call packs."""


def alike_records(size: int, beginning: bytes, bodies: Sequence[bytes]) -> list[bytes]:
    """Return records of `size` bytes that differ only in their bodies, in order, as a few pieces of bytes.

    Args:
        size: of each record, header included.
        beginning: what each record has between its checksum and its body.
        bodies: all of one length.
    """
    crc, shape = checksum(beginning), (len(beginning), len(bodies[0]))
    pieces = []
    for at in range(0, len(bodies), PACKED_MAX):
        some = bodies[at : at + PACKED_MAX]
        fields = [size, 0, beginning, b""] * len(some)
        fields[1::4] = map(checksum, some, repeat(crc))
        fields[3::4] = some
        pieces.append(_packer(len(some), shape).pack(*fields))
    return pieces


@lru_cache(maxsize=256)
def _packer(count: int, shape: tuple[int, int]) -> Struct:
    """Return what packs `count` records, each given by its size, its checksum, and two pieces of the lengths in `shape`."""
    return Struct("<" + f"{SIZE_AND_CRC.format.removeprefix('<')}{shape[0]}s{shape[1]}s" * count)
