"""Applying the records of deliveries: checkpoints, acknowledgements, changes of invisible time, revivals and dead letters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from penstock.pop.core.checkpoint import (
    FROM_QUEUE,
    FROM_RETRY,
    Checkpoint,
    CheckpointTable,
    Entry,
    entries_of,
    last_of,
    runs_of,
)
from penstock.pop.core.damages import DamagedRanges
from penstock.pop.core.deadletters import DEAD_LETTERS, DeadLetter, DeadLetterTable, Reason
from penstock.pop.core.group import ConsumerGroup, GroupTable
from penstock.pop.core.order import NO_KEY, Parked
from penstock.pop.core.suspicion import returned
from penstock.store.bodies import CHANGE_ENTRY, REFERENCE, TIMER_ENTRY
from penstock.store.index.rowformats import KEEPER_MARK
from penstock.store.part import Apply
from penstock.store.queues.queues import Queues
from penstock.store.record import LEVEL_MASK, POP_FIXED, Flag, Kind, Record


class DeliveryChanges:
    """Applies the records of deliveries.

    Parameters:
        groups: their cursors and counts are changed by the records.
        checkpoints: opened and closed by the records.
        dead_letters: added and removed by the records.
        damages: the damaged ranges of the log.
        queues: the light queues that get retries and dead letters.
    """

    def __init__(
        self,
        groups: GroupTable,
        checkpoints: CheckpointTable,
        dead_letters: DeadLetterTable,
        damages: DamagedRanges,
        queues: Queues,
    ) -> None:
        self._groups = groups
        self._checkpoints = checkpoints
        self._dead_letters = dead_letters
        self._damages = damages
        self._queues = queues

    def applies(self) -> Mapping[Kind, Apply]:
        """Return what applies each kind of record."""
        return {
            Kind.POP_CHECKPOINT: self._apply_checkpoint,
            Kind.POP_ACK: self._apply_ack,
            Kind.POP_INVISIBLE_CHANGED: self._apply_invisible_changed,
            Kind.POP_REVIVED: self._apply_revived,
            Kind.POP_DEAD_LETTER: self._apply_dead_letter,
            Kind.DEAD_LETTER_REDRIVEN: self._apply_redriven,
            Kind.DEAD_LETTER_PURGED: self._apply_purged,
        }

    def _apply_checkpoint(self, record: Record) -> None:
        group_id, _, deadline_ms = POP_FIXED.unpack(record.fixed)
        group = self._groups.of_record(record)
        if group is None:
            return
        noted = orjson.loads(record.properties) if record.properties else {}
        if self._damages or "cursor" in noted:
            self._apply_entries(group, list(entries_of(record.body)), noted)
        else:
            new, retry = last_of(record.body, FROM_QUEUE), last_of(record.body, FROM_RETRY)
            if new is not None:
                group.cursor = new.offset + 1
            if retry is not None:
                group.retry_cursor = retry.offset + 1
        group.scanned = max(group.scanned, group.cursor)
        self._groups.changed.add(group_id)
        if not record.body:
            return
        attempt_id = noted.get("attempt_id", "")
        checkpoint = Checkpoint(record.position, group_id, record.store_ms, deadline_ms, record.flags, record.body, attempt_id)
        group.in_flight += checkpoint.count
        self._checkpoints.add(checkpoint)
        if attempt_id:
            group.attempt_ids[attempt_id] = record.position

    def _apply_entries(self, group: ConsumerGroup, entries: list[Entry], noted: dict[str, Any]) -> None:
        """Move the cursors of a group whose record states them: a selective group, or any group after a repair."""
        new = [entry for entry in entries if entry.source != FROM_RETRY]
        retries = [entry for entry in entries if entry.source == FROM_RETRY]
        if self._damages:
            # A record from before the repair doesn't move the cursor, because nobody knows how many of the skipped messages
            # are gone. A record from after the repair takes it into account.
            is_stated = noted.get("mended", 0) == len(self._damages) and "cursor" in noted
            if is_stated:
                group.cursor = group.expected = noted["cursor"]
                group.frozen = False
            self._damages.advance(group, [] if is_stated or group.is_selective else new, retries)
        else:
            group.cursor = noted["cursor"]
            if retries:
                # Earlier versions put all messages of FIFO groups that returned into the retry queue.
                group.retry_cursor = min(retries[-1].offset + 1, group.retry.next_offset)
        order = group.order
        if order is not None:
            for offset, position, size, key in noted.get("parked", ()):
                order.park(Parked(offset, position, size, key))
            for entry, key in zip(entries, noted.get("keys", ()), strict=False):
                order.lock(entry.position, key)

    def _apply_invisible_changed(self, record: Record) -> None:
        group_id, _, deadline_ms = POP_FIXED.unpack(record.fixed)
        group = self._groups.of_record(record)
        if group is None:
            return
        for position, index, *_ in CHANGE_ENTRY.iter_unpack(record.body):
            checkpoint = self._checkpoints.open_delivery(record, position, index)
            if checkpoint is None:
                group.in_flight += 1  # the new delivery exists, whatever happened to the old one
                continue
            checkpoint.replaced |= 1 << index
            self._checkpoints.close(checkpoint, 1 << index)
        step = CHANGE_ENTRY.size
        body = b"".join(record.body[at + REFERENCE.size : at + step] for at in range(0, len(record.body), step))
        keeper = KEEPER_MARK + orjson.loads(record.properties)["keeper"] if record.properties else ""
        self._checkpoints.add(Checkpoint(record.position, group_id, record.store_ms, deadline_ms, record.flags, body, keeper))

    def _apply_ack(self, record: Record) -> None:
        group = self._groups.of_record(record)
        if group is None:
            return
        checkpoints = self._checkpoints
        for position, indexes in runs_of(record.body):
            checkpoint, mask = checkpoints.open.get(position), indexes.mask()
            if checkpoint is None or checkpoint.open & mask != mask:
                self._damages.skip(record, "delivery", position)  # deliveries that are open are acknowledged all the same
                if checkpoint is None:
                    continue
                mask &= checkpoint.open
                if not mask:
                    continue
            checkpoint.acked |= mask
            if group.order is not None:
                self._groups.changed.add(group.id)
                for message in checkpoint.positions(mask):
                    group.order.unlock(message)
            checkpoints.close(checkpoint, mask)
            group.in_flight -= mask.bit_count()

    def _apply_revived(self, record: Record) -> None:
        group = self._groups.of_record(record)
        if group is None:
            return
        uncounted, level = bool(record.flags & Flag.SUSPENDED), record.flags & LEVEL_MASK
        for position, index in REFERENCE.iter_unpack(record.body):
            checkpoint = self._checkpoints.open_delivery(record, position, index)
            if checkpoint is None:
                continue
            entry = checkpoint.entry(index)
            attempts = entry.attempt - 1 if uncounted or checkpoint.suspended else entry.attempt
            offset = entry.offset if entry.source == FROM_QUEUE else 0
            if group.order is None or not group.order.put_back(
                Parked(offset, entry.position, entry.size, NO_KEY, attempts, level)
            ):
                self._queues.append_to(group.retry, entry.position, entry.size, returned(attempts, level))
            self._checkpoints.close(checkpoint, 1 << index)
            group.in_flight -= 1
        if group.order is not None:
            self._groups.changed.add(group.id)

    def _apply_dead_letter(self, record: Record) -> None:
        group = self._groups.of_record(record)
        if group is None:
            return
        dead_letters = DEAD_LETTERS + group.name
        queue = self._queues.find(dead_letters)
        if queue is None:
            assert self._damages, record.position  # without a repair, every queue was declared
            queue = self._queues.restore(dead_letters, f"group:{group.id}", group.account)
        noted = orjson.loads(record.properties) if record.properties else {}
        reason, detail = noted.get("reason", Reason.ATTEMPTS_EXHAUSTED.name.lower()), noted.get("detail", "")
        for position, index in REFERENCE.iter_unpack(record.body):
            checkpoint = self._checkpoints.open_delivery(record, position, index)
            if checkpoint is None:
                continue
            entry = checkpoint.entry(index)
            offset = queue.next_offset
            self._queues.append_to(queue, entry.position, entry.size, entry.attempt)
            letter = DeadLetter(
                queue.id,
                entry.position,
                group.id,
                offset,
                entry.size,
                entry.attempt,
                Reason[reason.upper()],
                record.store_ms,
                detail,
            )
            self._dead_letters.add(letter)
            group.dead_letter_count += 1
            if group.order is not None:
                group.order.unlock(entry.position)
            self._checkpoints.close(checkpoint, 1 << index)
            group.in_flight -= 1
        self._groups.changed.add(group.id)

    def _apply_redriven(self, record: Record) -> None:
        group = self._groups.of_record(record)
        queue = self._queues.find(DEAD_LETTERS + group.name) if group is not None else None
        if group is None or queue is None:
            return
        keys = orjson.loads(record.properties)["keys"] if record.properties else []
        for number, (position, size) in enumerate(TIMER_ENTRY.iter_unpack(record.body)):
            self._dead_letters.remove((queue.id, position, group.id))
            group.dead_letter_count -= 1
            group.redriven.add(position)
            key = keys[number] if keys else NO_KEY
            if group.order is not None and key != NO_KEY:
                # The message goes before all parked messages of its message group, but not beside one that is in flight.
                group.order.park(Parked(0, position, size, key))
            else:
                self._queues.append_to(group.retry, position, size, 0)
        self._groups.changed.add(group.id)

    def _apply_purged(self, record: Record) -> None:
        group = self._groups.of_record(record)
        queue = self._queues.find(DEAD_LETTERS + group.name) if group is not None else None
        if group is None or queue is None:
            return
        for position, _ in TIMER_ENTRY.iter_unpack(record.body):
            self._dead_letters.remove((queue.id, position, group.id))
            group.dead_letter_count -= 1
        self._groups.changed.add(group.id)
