"""The checkpoints, and their rows in the index.

Rows of the index: key b"C", position of the checkpoint u64 big-endian, value `Checkpoint.row`.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct

from penstock.pop.core.checkpoint import Checkpoint
from penstock.pop.core.damages import DamagedRanges
from penstock.pop.core.deadlines import Deadlines
from penstock.pop.core.group import ConsumerGroup
from penstock.store.clocksteps import ClockStep
from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.recent import RecentIds
from penstock.store.record import Record

CLOSED_REMEMBERED = 50_000
"""Closed checkpoints that are remembered, so that their handles get an exact answer (acknowledged, replaced). The handles of
older ones get the answer "expired"."""

_CHECKPOINT_KEY = Struct(">cQ")


class CheckpointTable:
    """The open checkpoints, and the last closed ones. Only applying a record changes it.

    Parameters:
        deadlines: gets each checkpoint that opens, and forgets each that closes.
        groups: by id.
        damages: the damaged ranges of the log.
    """

    def __init__(self, deadlines: Deadlines, groups: Mapping[int, ConsumerGroup], damages: DamagedRanges) -> None:
        self._deadlines = deadlines
        self._groups = groups
        self._damages = damages
        self.open: dict[int, Checkpoint] = {}
        """Checkpoints with open deliveries, by position."""
        self.closed: RecentIds[int, Checkpoint] = RecentIds(CLOSED_REMEMBERED)
        """The last checkpoints that were closed, without their entries."""
        self.kept: dict[str, set[int]] = {}
        """Positions of the open checkpoints that devices keep, by keeper."""
        self._changed: set[int] = set()
        self._new: set[int] = set()
        """Positions of the checkpoints that have no row yet."""

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a new checkpoint."""
        self.open[checkpoint.position] = checkpoint
        self._changed.add(checkpoint.position)
        self._new.add(checkpoint.position)
        self._deadlines.schedule(checkpoint.deadline_ms, checkpoint)
        if checkpoint.waits:
            self._groups[checkpoint.group_id].delayed += checkpoint.open.bit_count()
        elif checkpoint.is_exclusive:
            self._groups[checkpoint.group_id].alone += 1
        if checkpoint.keeper:
            self.kept.setdefault(checkpoint.keeper, set()).add(checkpoint.position)

    def open_delivery(self, record: Record, position: int, index: int) -> Checkpoint | None:
        """Return the checkpoint of a delivery that a record ends. Return None, and log it, if damage has destroyed it."""
        checkpoint = self.open.get(position)
        if checkpoint is not None and checkpoint.open >> index & 1:
            return checkpoint
        self._damages.skip(record, "delivery", f"{position}:{index}")
        return None

    def close(self, checkpoint: Checkpoint, mask: int) -> None:
        """Close the deliveries of a bit set. The checkpoint closes with its last delivery, and its deadline is forgotten."""
        assert checkpoint.open & mask == mask, (checkpoint.position, mask)
        checkpoint.open ^= mask
        self._changed.add(checkpoint.position)
        if checkpoint.waits:
            self._groups[checkpoint.group_id].delayed -= mask.bit_count()
        if not checkpoint.open:
            del self.open[checkpoint.position]
            if checkpoint.keeper:
                kept = self.kept[checkpoint.keeper]
                kept.discard(checkpoint.position)
                if not kept:
                    del self.kept[checkpoint.keeper]
            elif checkpoint.attempt_id:
                attempt_ids = self._groups[checkpoint.group_id].attempt_ids
                if attempt_ids.get(checkpoint.attempt_id) == checkpoint.position:
                    del attempt_ids[checkpoint.attempt_id]
            if checkpoint.is_exclusive:
                self._groups[checkpoint.group_id].alone -= 1
            self._deadlines.forget(checkpoint)
            self.closed.add(checkpoint.position, checkpoint.without_entries())

    def let_wait(self, checkpoint: Checkpoint) -> None:
        """Note that the open deliveries of a checkpoint wait for their back-off: their consumer's time is over.

        No record says so. After the next start their deadline passes again, and this is called again.
        """
        if not checkpoint.waits:
            group = self._groups[checkpoint.group_id]
            group.delayed += checkpoint.open.bit_count()
            group.alone -= checkpoint.is_exclusive
            checkpoint.waits = True

    def move_deadlines(self, step: ClockStep) -> None:
        """Move the deadlines that were set in the window of a step of the clock: their invisible times are not over sooner."""
        for checkpoint in self.open.values():
            if step.covers(checkpoint.pop_ms) and checkpoint.deadline_ms > step.end_ms:
                self._deadlines.forget(checkpoint)
                checkpoint.deadline_ms += step.step_ms
                self._deadlines.schedule(checkpoint.deadline_ms, checkpoint)
                self._changed.add(checkpoint.position)

    def load(self, index: Index) -> None:
        """Read all rows. The groups must have been loaded before."""
        for key, value in index.rows(bytes(KeySpace.CHECKPOINT)):
            checkpoint = Checkpoint.from_row(_CHECKPOINT_KEY.unpack(key)[1], value)
            self.add(checkpoint)
            group = self._groups[checkpoint.group_id]
            group.in_flight += checkpoint.open.bit_count()
            if checkpoint.attempt_id and not checkpoint.keeper:
                group.attempt_ids[checkpoint.attempt_id] = checkpoint.position
        self._changed.clear()
        self._new.clear()

    def save(self, batch: Batch) -> None:
        """Put all rows that changed since the last call into `batch`."""
        for position in self._changed:
            checkpoint = self.open.get(position)
            if checkpoint is not None:
                batch.put(_CHECKPOINT_KEY.pack(KeySpace.CHECKPOINT, position), checkpoint.row())
            elif position not in self._new:
                batch.delete(_CHECKPOINT_KEY.pack(KeySpace.CHECKPOINT, position))
        self._changed.clear()
        self._new.clear()
