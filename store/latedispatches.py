"""Messages that get into queues after they were stored: delayed ones that fired, and half messages that were committed.

Such a message lives as long as one that is published when it is dispatched, though its record may be in a segment that goes
sooner. So an expiry carries it forward if the record that dispatched it stays. It does so once: the copy is after that record,
and so is everything that can drop the copy.

A row for each record that dispatches messages tells an expiry what it must look at. The record itself names the messages, so a
million of them cost no memory, and few rows. Rows of the index: key b"E", first position of the oldest message u64, position of
the record u64, both big-endian; value size of the record u32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from struct import Struct

import numpy as np
import structlog

from penstock.store.bodies import TIMER_ENTRY_DTYPE
from penstock.store.commitlog import CommitLog
from penstock.store.errors import PositionUnknown, RecordCorrupt
from penstock.store.index import Batch, Index, KeySpace
from penstock.store.part import Apply
from penstock.store.record import Kind, Record
from penstock.store.routing import Routing
from penstock.store.sliced import Steps

logger = structlog.get_logger("store")

_KEY = Struct(">cQQ")
_ROW = Struct("<I")
_PREFIX = bytes(KeySpace.DISPATCH)

ROWS_AT_ONCE = 64
"""Rows that a walk reads at once. Between two reads it holds no iterator, which would keep deleted rows."""

KINDS = (Kind.TIMER_FIRED, Kind.TRANSACTION_COMMITTED)
"""The kinds of records that dispatch earlier messages."""

Late = tuple[int, int, int]
"""First position and size of a record, and the position from which on a copy of it is late enough."""


class LateDispatches:
    """The records of the log that have dispatched earlier messages. It is a part of the store.

    Parameters:
        log: has the records.
        index: has a row for each of them.
    """

    def __init__(self, log: CommitLog, index: Index) -> None:
        self._log = log
        self._index = index
        self._changed: dict[bytes, bytes | None] = {}

    def expiring(self, before: int) -> Iterator[Late | None]:
        """Yield the messages that would go with what is before `before`, though they were dispatched after that.

        A record is read when its oldest message goes. All its messages from earlier segments are yielded then, because an
        expiry would have to copy each of them before it reaches the record. No later expiry reads the record again. None is a
        pause, in which other work may run.
        """
        for rows in self._rows_before(before):
            for key, value in rows:
                position = _KEY.unpack(key)[2]
                if position >= before:
                    yield from self._messages_of(position, _ROW.unpack(value)[0])
                    self._changed[key] = None
            yield None

    def _messages_of(self, position: int, size: int) -> Iterator[Late]:
        """Yield the messages that a record has dispatched, except those that are in its own segment."""
        try:
            record = self._log.record(position, size)
        except (PositionUnknown, RecordCorrupt) as error:
            logger.error("record.unreadable", position=position, error=str(error))
            return
        if record.kind not in KINDS:
            return  # `penstock repair` has put a record of kind DAMAGED in its place
        base = self._log.segment_at(position).base
        for message, message_size, topic, _ in Routing.from_record(record).messages():
            if message < base and topic:
                yield message, message_size, base

    def forget_before(self, position: int) -> Steps:
        """Forget the records before `position`, where the log begins."""
        for rows in self._rows_before(position):
            batch = self._index.batch()
            for key, _ in rows:
                if _KEY.unpack(key)[2] < position:
                    batch.delete(key)
            self._index.write(batch)
            yield False

    def _rows_before(self, position: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield the saved rows of records whose oldest message is before `position`, some at a time."""
        start = b""
        while rows := list(islice(self._index.rows(_PREFIX, start), ROWS_AT_ONCE)):
            found = [row for row in rows if _KEY.unpack(row[0])[1] < position]
            if found:
                yield found
            if len(found) < len(rows):
                return
            start = rows[-1][0][1:] + b"\0"

    # --- the part ---------------------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return dict.fromkeys(KINDS, self._apply)

    def _apply(self, record: Record) -> None:
        positions = np.frombuffer(record.body, dtype=TIMER_ENTRY_DTYPE)["position"]
        if len(positions):
            key = _KEY.pack(KeySpace.DISPATCH, int(positions.min()), record.position)
            self._changed[key] = _ROW.pack(record.size)

    def load(self, index: Index) -> None:
        """Do nothing: the rows are read when an expiry needs them."""

    def save(self, batch: Batch) -> None:
        for key, row in self._changed.items():
            if row is None:
                batch.delete(key)
            else:
                batch.put(key, row)
        self._changed.clear()

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        """Yield nothing: `expiring` names the messages before consumers miss them, and this would be too late."""
        yield from ()
