"""Pops: a pop hands out visible messages, under one checkpoint record for all of them."""

from __future__ import annotations

from typing import NamedTuple

import orjson
import structlog

from penstock.pop.core.checkpoint import ATTEMPT_ID_BYTES_MAX, Checkpoint
from penstock.pop.core.deadletters import DEAD_LETTERS, Reason
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.poptraces import NO_PROPERTIES_LEN, PopTraces
from penstock.pop.core.records import GroupRecords
from penstock.pop.core.selection import Selection, select
from penstock.pop.core.state import PopState
from penstock.pop.errors import GroupUnknown, RequestInvalid
from penstock.store.bodies import REFERENCE
from penstock.store.errors import DiskFull, PositionUnknown, RecordUnreadable
from penstock.store.index.rowformats import KEEPER_MARK
from penstock.store.log.commitlog import dense_until
from penstock.store.properties import decode_properties
from penstock.store.record import (
    CRC_FROM,
    EXPIRED,
    KIND_AT,
    LARGE_BYTES,
    PROPS_LEN_AT,
    SIZE_AND_CRC,
    STORE_MS_AT,
    Kind,
    checksum,
    properties_of,
    store_ms_of,
)
from penstock.store.store import Store

logger = structlog.get_logger("pop")

_MESSAGE = int(Kind.MESSAGE)

BATCHES_MAX = 16
"""Batches of which all messages have expired, or can't be read, that one pop skips before it returns an empty one."""


class PopResult(NamedTuple):
    """The messages that a pop handed out.

    Parameters:
        checkpoint: the deliveries.
        records: the record of each delivery's message; None if it can't be read, or has expired, or its delivery is over.
        size: bytes of the records.
    """

    checkpoint: Checkpoint
    records: list[bytes | None]
    size: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, records: list[bytes | None]) -> PopResult:
        """Return the result with these deliveries and records."""
        return cls(checkpoint, records, sum(map(len, filter(None, records))))


class Popper:
    """Hands out messages.

    Parameters:
        store: has the messages.
        state: has the checkpoints.
        records: appends the checkpoints, and counts what is handed out.
        traces: makes spans of it; None without tracing.
    """

    def __init__(self, store: Store, state: PopState, records: GroupRecords, traces: PopTraces | None = None) -> None:
        self._store = store
        self._state = state
        self._records = records
        self._counters = records.counters
        self._traces = traces
        self.is_draining = False
        """Whether nothing more is handed out, because the node is about to stop."""

    def pop(
        self, group: ConsumerGroup, messages_max: int, invisible_ms: int, attempt_id: str = "", in_order_max: int = 1
    ) -> PopResult | None:
        """Hand out up to `messages_max` visible messages of a group for `invisible_ms`; return None if there are none.

        A FIFO group hands out up to `in_order_max` messages of one message group, in order. The next ones follow when none of
        them is in flight any more.

        Return None also if the disk has no room for the checkpoint record, or the node drains: they stay visible. If the
        result has no records, the group may have more messages. There were `BATCHES_MAX` batches that nobody can get.

        A call with the attempt id of an earlier call gets the messages of that call whose deliveries are still open. A consumer
        that doesn't know whether a response was lost repeats its call like this. The caller must not respond before
        `Store.when_durable`: until then a crash can undo the checkpoint.

        Raises:
            GroupUnknown: the group was deleted.
        """
        if group.is_deleted:
            raise GroupUnknown(f"the group {group.name!r} on {group.filter!r} was deleted")
        if attempt_id:
            earlier = self._result_of_attempt(group, attempt_id)
            if earlier is not None:
                return earlier
        result = None
        for _ in range(0 if self.is_draining else BATCHES_MAX):
            result = self._pop_batch(group, messages_max, invisible_ms, attempt_id, in_order_max)
            if result is None or any(result.records):
                break
        return result

    def _pop_batch(
        self, group: ConsumerGroup, messages_max: int, invisible_ms: int, attempt_id: str, in_order_max: int
    ) -> PopResult | None:
        """Hand out one batch. The record of a message that no consumer can get any more is None."""
        room = min(messages_max, group.room)
        if room <= 0 or group.visible <= 0 or group.settings.paused:
            return None
        selection = select(group, room, self._state, self._store, self._store.read_intact, in_order_max)
        properties = selection.properties
        if not selection.entries:
            try:
                if selection.must_append:
                    self._records.append(Kind.POP_CHECKPOINT, group.id, group.name, properties=orjson.dumps(properties))
            except DiskFull:
                return None
            group.scanned = max(group.scanned, selection.scanned)
            return None
        if attempt_id:
            properties["attempt_id"] = attempt_id
        deadline_ms = self._store.now_ms() + invisible_ms
        try:
            position = self._records.append(
                Kind.POP_CHECKPOINT,
                group.id,
                group.name,
                selection.body(),
                deadline_ms=deadline_ms,
                flags=selection.level,
                properties=orjson.dumps(properties) if properties else b"",
            )
        except DiskFull:
            return None
        checkpoint = self._state.checkpoints.open[position]
        self._counters.handed_out += checkpoint.count
        records = self._read_selected(selection)
        if None in records:
            self._dead_letter_unreadable(group, checkpoint, [index for index, data in enumerate(records) if data is None])
        self._ack_expired(group, checkpoint, records)
        if self._traces is not None:
            self._traces.handed_out(group, checkpoint, records)
        return PopResult.of(checkpoint, records)

    def _read_selected(self, selection: Selection) -> list[bytes | None]:
        """Return the records of the selected messages. This is on the hot path; the checksum takes half of the time."""
        read_before, unpack, entries = selection.records, SIZE_AND_CRC.unpack_from, selection.entries
        records: list[bytes | None] = []
        until = 0
        if len(entries) > 1:
            (first, _, size, *_), (last, _, last_size, *_) = entries[0], entries[-1]
            until = dense_until((first, size), (last, last_size), len(entries))
        block, base = b"", 0
        for position, _, size, _, _, _ in entries:
            if position in read_before:
                records.append(read_before[position])
                continue
            at = position - base
            if at < 0 or at + size > len(block):
                try:
                    block, base, at = self._store.read_ahead(position, size, until), position, 0
                except PositionUnknown as error:
                    if isinstance(error, RecordUnreadable):
                        logger.error("message.unreadable", position=position, why=str(error))
                    records.append(None)
                    continue
            data = block[at : at + size]
            stated, crc = unpack(data)
            covered = data[CRC_FROM:] if size < LARGE_BYTES else memoryview(data)[CRC_FROM:]
            is_message = stated == size and data[KIND_AT] == _MESSAGE and checksum(covered) == crc
            records.append(data if is_message else None)
        return records

    def _dead_letter_unreadable(self, group: ConsumerGroup, checkpoint: Checkpoint, indexes: list[int]) -> None:
        """Dead-letter messages that can't be read any more, so that they don't stop the messages after them."""
        references = [REFERENCE.pack(checkpoint.position, index) for index in indexes]
        logger.error("message.unreadable", group=group.name, filter=group.filter, checkpoint=checkpoint.position)
        try:
            self._records.append_dead_letters(group, references, Reason.UNREADABLE)
        except DiskFull:
            return  # the deliveries stay open, and a pop finds their messages unreadable again when their time is over

    def _ack_expired(self, group: ConsumerGroup, checkpoint: Checkpoint, records: list[bytes | None]) -> None:
        """Acknowledge messages whose time to live (MQTT 5.0, 3.3.2.3.3) has passed, and remove their records from `records`.

        Dead letters don't expire: an operator must be able to see them. Nor do they after a redrive.
        """
        now_ms, now_for = self._store.now_ms(), self._store.now_for
        expired = [
            at
            for at, data in enumerate(records)
            if data is not None
            and data[PROPS_LEN_AT:STORE_MS_AT] != NO_PROPERTIES_LEN
            and 0 < (expires_at_ms := expires_at_ms_of(data)) <= now_ms
            and expires_at_ms <= now_for(store_ms_of(data))
        ]
        if group.filter.startswith(DEAD_LETTERS):
            return
        expired = [at for at in expired if checkpoint.entry(at).position not in group.redriven]
        if not expired:
            return
        for index in expired:
            records[index] = None
        try:
            references = [REFERENCE.pack(checkpoint.position, index) for index in expired]
            self._records.append_references(Kind.POP_ACK, group, references, flags=EXPIRED)
        except DiskFull:
            return  # the deliveries stay open, and a pop finds their messages expired again when their time is over
        self._counters.expired += len(expired)

    def _result_of_attempt(self, group: ConsumerGroup, attempt_id: str) -> PopResult | None:
        """Return the open deliveries of the earlier call with this attempt id; None if there are none."""
        checkpoint = self._state.checkpoints.open.get(group.attempt_ids.get(attempt_id, -1))
        if checkpoint is None or checkpoint.deadline_ms <= self._store.now_ms():
            return None
        open_indexes = set(checkpoint.open_indexes())
        records = [
            self._store.read_intact(entry.position, entry.size) if index in open_indexes else None
            for index, entry in enumerate(checkpoint.entries())
        ]
        return PopResult.of(checkpoint, records)


def check_attempt_id(attempt_id: str) -> str:
    """Return `attempt_id` if it is valid. The record of a checkpoint contains it, so its length is limited.

    Raises:
        RequestInvalid: it is too long, or begins with NUL.
    """
    if len(attempt_id.encode()) > ATTEMPT_ID_BYTES_MAX:
        raise RequestInvalid(f"attempt_id has more than {ATTEMPT_ID_BYTES_MAX} bytes")
    if attempt_id.startswith(KEEPER_MARK):
        raise RequestInvalid("attempt_id begins with the character NUL; begin it with another one")
    return attempt_id


def expires_at_ms_of(data: bytes) -> int:
    """Return when the message of a record expires, in ms since 1970; 0 for never. A body may be large, so it is not copied."""
    properties = properties_of(data)
    return decode_properties(properties).expires_at_ms if b'"expires_at_ms"' in properties else 0
