"""The formats of the index's rows that are also read from snapshots, by readers that have no index.

The modules that own the rows say what they mean and use these definitions. Numbers in keys are big-endian, numbers in values
little-endian.
"""

from __future__ import annotations

from enum import Enum
from struct import Struct

import numpy as np

FORMAT = 18
"""Version of the key and value formats. A start brings an index of the version before to this one, with a function that knows
what has changed (`store.index.index.Upgrade`), and rebuilds an index of any other."""

FORMATS_READ = (FORMAT - 1, FORMAT)
"""The versions of snapshots that can be restored."""


class KeySpace(bytes, Enum):
    """First byte of a key, which tells whose rows these are."""

    META = b"M"
    QUEUE = b"N"
    NAME = b"F"
    WILDCARD = b"W"
    BACKFILL = b"L"
    PINNED = b"P"
    ENTRIES = b"Q"
    GROUP = b"G"
    CHECKPOINT = b"C"
    ORDER = b"O"
    DEAD = b"D"
    REDRIVEN = b"d"
    TRANSACTION = b"X"
    TIMER = b"T"
    TIMER_KEY = b"K"
    RETAINED = b"R"
    RETAINED_LEVEL = b"r"
    RETAINED_LATER = b"l"
    RETAINED_DUE = b"e"
    RETAINED_COUNT = b"n"
    SESSION = b"S"
    COPY = b"V"
    DISPATCH = b"E"
    SENT_ID = b"I"
    ACCOUNT = b"A"
    SCHEDULE = b"Y"


CHECKPOINT_ROW = Struct("<IQqBIB")
"""What a row of `pop.core.checkpoint` begins with: group id, time of the pop, deadline, flags, number of deliveries, and length
of the attempt id. The attempt id follows, the bit sets of the deliveries that are open, acknowledged and replaced, and the
entries (`bodies.CHECKPOINT_ENTRY`)."""

KEEPER_MARK = "\0"
"""First character of the attempt id of a checkpoint that a device keeps: what follows names the device. No call can give it."""

QUEUE_ROW = Struct("<IqQB")
"""What each queue of a row of `store.queues.catalogue` begins with: id, start, offset of the open row, and the number of its
entries, which follow."""

QUEUE_ENTRY = Struct("<QII")
QUEUE_ENTRY_DTYPE = np.dtype([("position", "<u8"), ("size", "<u4"), ("aux", "<u4")])
"""An entry of a light queue (`store.queues.lightqueue`): position and size of the record, and `aux`."""

ATTEMPT_BITS = 16
"""Bits of `aux` in a retry queue that hold the attempts that the message had. Those above hold its level."""

ORDER_ROW = Struct("<BIQIHB")
"""Value of a row of `pop.core.order`: locked, key, offset, size, attempts, level."""

_MISSING = {Struct("<BIQIH").size: b"\0", Struct("<BIQI").size: b"\0\0\0"}
"""What values of `ORDER_ROW` of earlier versions lack, by their size."""


def order_row(value: bytes) -> tuple[int, int, int, int, int, int]:
    """Return the fields of a value of `ORDER_ROW`."""
    return ORDER_ROW.unpack(value + _MISSING.get(len(value), b""))
