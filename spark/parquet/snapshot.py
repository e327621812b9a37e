"""What was open where a log begins: the snapshot of the index there says it.

Retention drops a log only up to a position that has a snapshot, and keeps that snapshot as long as the log begins there. It has
the open deliveries of all groups, and the messages that came back and wait for their next delivery. Of these it does not say
everything that the log said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any, NamedTuple

import numpy as np
import orjson

from penstock.spark.parquet.chains import QUEUED, STAGE_DTYPE, UNKNOWN
from penstock.spark.parquet.settings import waits_of
from penstock.spark.records import CONTINUED, POPPED, WAITING, Array, return_ms
from penstock.store.bodies import CHECKPOINT_ENTRY_DTYPE
from penstock.store.errors import SnapshotInvalid
from penstock.store.index.rowformats import (
    ATTEMPT_BITS,
    CHECKPOINT_ROW,
    KEEPER_MARK,
    QUEUE_ENTRY_DTYPE,
    QUEUE_ROW,
    KeySpace,
    order_row,
)
from penstock.store.record import SURVIVED, Flag
from penstock.store.snapshots.snapshotreader import SnapshotReader

_CHECKPOINT, _GROUP, _NAME = bytes(KeySpace.CHECKPOINT), bytes(KeySpace.GROUP), bytes(KeySpace.NAME)
_ENTRIES, _PINNED = bytes(KeySpace.ENTRIES), bytes(KeySpace.PINNED)
_ORDER, _REDRIVEN = bytes(KeySpace.ORDER), bytes(KeySpace.REDRIVEN)
_INTERNAL = b"$"
"""What the filter of a queue begins with that has no messages of publishers, such as the retry queue of a group."""

_KEEPER = KEEPER_MARK.encode()
_NUMBERS = Struct(">IQ")
"""Group or queue, and message or offset, in a key after its first byte."""

_HEAD_DTYPE = np.dtype(
    [("position", "<i8"), ("group_id", "<i8"), ("at_ms", "<i8"), ("deadline_ms", "<i8"), ("stage", "<i4"), ("count", "<i8")]
)
_BACK_DTYPE = np.dtype([("group_id", "<i8"), ("message_position", "<i8"), ("attempt", "<i4"), ("is_new", "?")])
"""A message that came back. It is new if it had no attempt: then it may also be a dead letter that was redriven."""

_FLAGS_OF_WAITING = Flag.RETURNED | Flag.SUSPENDED


class OpenState(NamedTuple):
    """What is open at a position of the log."""

    open: Array
    """As `WriterState.open`. The first stage of a delivery that was extended or returned is not known, nor is its time: such a
    stage has its own key as `delivery_id`. One that was extended alone is `popped`."""
    queued: Array
    """As `WriterState.queued`. What is known is that the message had `attempt` attempts, and came back before the position.
    Messages that go back to a FIFO group uncounted, and as if for the first time, are left out."""
    group_names: dict[int, str]


def open_state(data_dir: Path, position: int) -> tuple[OpenState | None, str]:
    """Return what is open at a position of the log, as the snapshot there says, or None and the reason why it is not known.

    It holds the rows that it returns, those of one record of the snapshot, and the groups.
    """
    try:
        reader = SnapshotReader(data_dir, position)
        rows = _OpenRows()
        for block in reader.blocks():
            rows.add(block)
        if not rows.count:
            return None, f"the snapshot at position {position} is empty, because a repair has let the log begin anew there"
        return rows.state(position, reader.store_ms), ""
    except FileNotFoundError:
        return None, f"there is no snapshot at position {position}"
    except (SnapshotInvalid, OSError) as error:
        return None, str(error)
    except (StructError, ValueError, KeyError, TypeError) as error:
        return None, f"the snapshot at position {position} has a row that can't be read: {error!r}"


class _OpenRows:
    """Collects the rows that say what is open, in the order of a snapshot: the groups come before all entries of queues but
    those of open rows."""

    def __init__(self) -> None:
        self.count = 0
        self._stages: list[Array] = []
        self._names: dict[int, str] = {}
        self._waits: dict[int, Array] = {}
        """Back-off of the groups that have one of their own: its waits."""
        self._retries: dict[int, tuple[int, int]] = {}
        """Group and cursor of each retry queue, by the id of the queue."""
        self._open_rows: dict[int, tuple[int, bytes]] = {}
        """Offset and entries of the open row of each internal queue."""
        self._back: list[Array] = []
        self._redriven: list[tuple[int, int]] = []

    def add(self, rows: list[tuple[bytes, bytes]]) -> None:
        """Take the rows of one record."""
        self.count += len(rows)
        checkpoints: list[tuple[bytes, bytes]] = []
        parked: list[tuple[int, int, int, bool]] = []
        for key, value in rows:
            space = key[:1]
            if space == _CHECKPOINT:
                checkpoints.append((key, value))
            elif space == _NAME and key[1:2] == _INTERNAL:
                self._open_rows.update(_open_rows(value))
            elif space == _GROUP:
                self._add_group(int.from_bytes(key[1:], "big"), value)
            elif space in (_ENTRIES, _PINNED):
                queue_id, offset = _NUMBERS.unpack(key[1:])
                self._add_entries(queue_id, offset, value)
            elif space == _ORDER:
                group_id, message = _NUMBERS.unpack(key[1:])
                is_locked, _, _, _, attempts, level = order_row(value)
                if not is_locked and (attempts or level):  # others wait for their first delivery
                    parked.append((group_id, message, attempts, False))
            elif space == _REDRIVEN:
                self._redriven.append(_NUMBERS.unpack(key[1:]))
        if checkpoints:
            self._stages.append(_stages(checkpoints))
        self._back.append(np.array(parked, _BACK_DTYPE))

    def _add_group(self, group_id: int, value: bytes) -> None:
        if not group_id:
            return  # the damaged ranges
        row = orjson.loads(value)
        self._names[group_id] = row["name"]
        self._retries[row["retry"]] = (group_id, row["retry_cursor"])
        waits = waits_of(row.get("settings", {}).get("backoff"))
        if waits:
            self._waits[group_id] = np.array(waits, np.int64)
        self._add_entries(row["retry"], *self._open_rows.get(row["retry"], (0, b"")))

    def _add_entries(self, queue_id: int, offset: int, value: bytes) -> None:
        """Add the entries that a group has not taken from its retry queue."""
        group_id, cursor = self._retries.get(queue_id, (0, 0))
        if not group_id:
            return
        entries = np.frombuffer(value, QUEUE_ENTRY_DTYPE)[max(cursor - offset, 0) :]
        back = np.zeros(len(entries), _BACK_DTYPE)
        back["group_id"], back["message_position"] = group_id, entries["position"]
        back["attempt"], back["is_new"] = entries["aux"] & (1 << ATTEMPT_BITS) - 1, entries["aux"] == 0
        self._back.append(back)

    def state(self, position: int, store_ms: int) -> OpenState:
        """Return what is open, given where the snapshot was made and the time of the last record before."""
        stages = np.concatenate([np.empty(0, STAGE_DTYPE), *self._stages])
        for group_id, waits in self._waits.items():
            # A back-off that was raised after the pop holds, too.
            is_of = stages["group_id"] == group_id
            wait_ms = waits[np.minimum(stages["attempt"][is_of], len(waits)) - 1]
            stages["return_ms"][is_of] = np.maximum(stages["return_ms"][is_of], stages["deadline_ms"][is_of] + wait_ms)
        queued = _queued(self._came_back(), position, store_ms)
        groups = np.unique(np.concatenate([stages["group_id"], queued["group_id"]]))
        return OpenState(stages, queued, {group_id: self._names[group_id] for group_id in groups.tolist()})

    def _came_back(self) -> Array:
        """Return the messages that came back, without those that are redriven dead letters."""
        back = np.concatenate([np.empty(0, _BACK_DTYPE), *self._back])
        if self._redriven and back["is_new"].any():
            pairs = set(self._redriven)
            found = zip(back["group_id"].tolist(), back["message_position"].tolist(), strict=True)
            back = back[~(back["is_new"] & np.array([pair in pairs for pair in found], bool))]
        return back[np.lexsort((back["message_position"], back["group_id"]))]


def _open_rows(value: bytes) -> Iterator[tuple[int, tuple[int, bytes]]]:
    """Yield the id of each queue in the row of a filter, and offset and entries of its open row."""
    at = 0
    while at < len(value):
        queue_id, _, offset, count = QUEUE_ROW.unpack_from(value, at)
        at += QUEUE_ROW.size
        stop = at + count * QUEUE_ENTRY_DTYPE.itemsize
        yield queue_id, (offset, value[at:stop])
        at = stop


def _stages(rows: Iterable[tuple[bytes, bytes]]) -> Array:
    """Return the open stages of checkpoints, given their rows in the order of the keys."""
    heads: list[tuple[int, ...]] = []
    bits: list[Any] = []
    bodies: list[bytes] = []
    for key, row in rows:
        group_id, pop_ms, deadline_ms, flags, count, id_bytes = CHECKPOINT_ROW.unpack_from(row)
        sets_from, set_bytes = CHECKPOINT_ROW.size + id_bytes, (count + 7) // 8
        is_kept = row[CHECKPOINT_ROW.size : sets_from].startswith(_KEEPER)
        is_extended = flags & SURVIVED or is_kept
        stage = WAITING if flags & _FLAGS_OF_WAITING else CONTINUED if is_extended else POPPED
        heads.append((int.from_bytes(key[1:], "big"), group_id, pop_ms, deadline_ms, stage, count))
        bits.append(np.unpackbits(np.frombuffer(row, np.uint8, set_bytes, sets_from), count=count, bitorder="little"))
        bodies.append(row[sets_from + 3 * set_bytes :])
    head = np.array(heads, _HEAD_DTYPE)
    entries = np.frombuffer(b"".join(bodies), CHECKPOINT_ENTRY_DTYPE)
    counts = head["count"]
    owner = np.repeat(np.arange(len(head)), counts)
    if len(owner) != len(entries):
        raise ValueError(f"{len(entries)} entries of {len(owner)} deliveries")
    index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_open = np.concatenate(bits).astype(bool)
    owner, index, entry = owner[is_open], index[is_open], entries[is_open]
    stages = np.empty(len(owner), STAGE_DTYPE)
    for name in ("position", "group_id", "at_ms", "deadline_ms", "stage"):
        stages[name] = head[name][owner]
    stages["key"] = stages["delivery_id"] = stages["position"] + index
    stages["popped_ms"] = np.where(stages["stage"] == POPPED, stages["at_ms"], UNKNOWN)
    stages["return_ms"] = return_ms(stages["deadline_ms"], entry["backoff"])
    stages["message_position"], stages["attempt"], stages["source"] = entry["position"], entry["attempt"], entry["source"]
    return stages


def _queued(back: Array, position: int, store_ms: int) -> Array:
    """Return the stages of messages that came back. Their last stages ended at an unknown record before a position."""
    queued = np.empty(len(back), STAGE_DTYPE)
    queued["group_id"], queued["message_position"] = back["group_id"], back["message_position"]
    queued["attempt"] = np.maximum(back["attempt"], 1)
    queued["key"] = queued["delivery_id"] = queued["position"] = position - 1
    queued["at_ms"] = queued["deadline_ms"] = queued["return_ms"] = store_ms
    queued["popped_ms"], queued["stage"] = UNKNOWN, QUEUED
    queued["source"] = back["attempt"] > 1
    return queued
