"""Changing the invisible time of deliveries: each moves to a new checkpoint, with a new deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import orjson

from penstock.pop.core.checkpoint import Checkpoint, delivery_id, delivery_of
from penstock.pop.core.deadletters import Reason, check_detail
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.handle import Delivery, Handles
from penstock.pop.core.judging import Judge
from penstock.pop.core.outcome import AckOutcome, VisibilityChange
from penstock.pop.core.records import GroupRecords
from penstock.pop.core.state import PopState
from penstock.pop.core.suspicion import ALONE
from penstock.store.bodies import CHANGE_ENTRY, REFERENCE
from penstock.store.record import Flag, Kind

FAILED_MAX: Final = 4096
"""Failed deliveries in one record, which has 160 KiB then and fits into any segment."""


class Visibility:
    """Changes the invisible time of deliveries.

    Parameters:
        state: has the checkpoints.
        records: appends what is decided.
        handles: reads and makes handles.
        judge: decides about handles.
        serve: called with a group whose polls may get messages now.
        now_ms: tells the time, in ms since 1970.
        invisible_ms_max: longest invisible time that a consumer may ask for.
    """

    def __init__(
        self,
        state: PopState,
        records: GroupRecords,
        handles: Handles,
        judge: Judge,
        serve: Callable[[ConsumerGroup], None],
        now_ms: Callable[[], int],
        invisible_ms_max: int,
    ) -> None:
        self._state = state
        self._records = records
        self._handles = handles
        self._judge = judge
        self._serve = serve
        self._now_ms = now_ms
        self._invisible_ms_max = invisible_ms_max

    def change_invisible(self, name: str, changes: list[VisibilityChange]) -> list[tuple[AckOutcome, str]]:
        """Move the deadlines of deliveries of the group `name`; return the outcome and the new handle of each, in order.

        The old handle is void. If the outcome is not OK, the old handle is returned. A nack of the last attempt makes the
        message a dead letter at once, and its old handle is returned. The caller must not respond before
        `Store.when_durable`.

        Raises:
            RequestInvalid: a `detail` is too long.
            DiskFull: the disk had no room for all records.
        """
        for change in changes:
            check_detail(change.detail)
        outcomes: list[tuple[AckOutcome, str]] = []
        by_record: dict[tuple[int, int, int], list[tuple[int, Delivery]]] = {}
        dead: dict[tuple[int, str], list[bytes]] = {}
        named: set[tuple[int, int]] = set()
        deliveries = self._handles.read_deliveries([change.handle for change in changes])
        for at, (change, delivery) in enumerate(zip(changes, deliveries, strict=True)):
            outcome = self._judge.outcome(name, delivery, named)
            if outcome is AckOutcome.OK and not 0 <= change.invisible_ms <= self._invisible_ms_max:
                outcome = AckOutcome.INVALID_INVISIBLE_TIME
            outcomes.append((outcome, change.handle))
            if outcome is AckOutcome.OK:
                assert delivery is not None
                named.add((delivery.checkpoint, delivery.index))
                if change.nack and not change.suspend and self._is_last_attempt(delivery):
                    reference = REFERENCE.pack(delivery.checkpoint, delivery.index)
                    dead.setdefault((delivery.group_id, change.detail), []).append(reference)
                    continue
                flags = (Flag.RETURNED if change.returns else 0) | (Flag.SUSPENDED if change.suspend else 0)
                if not flags:  # A consumer that returns a message has survived it.
                    flags = self._state.checkpoints[delivery.checkpoint].flags_of_extension
                key = (delivery.group_id, change.invisible_ms, flags)
                by_record.setdefault(key, []).append((at, delivery))
        for (group_id, detail), references in dead.items():
            group = self._state.groups_by_id[group_id]
            self._records.append_dead_letters(group, references, Reason.ATTEMPTS_EXHAUSTED, detail)
            self._serve(group)
        for (group_id, invisible_ms, flags), changed in by_record.items():
            pairs = [(delivery.checkpoint, delivery.index) for _, delivery in changed]
            checkpoint = self._append_change(group_id, invisible_ms, flags, pairs)
            fresh = self._handles.deliveries(checkpoint.position, checkpoint.pop_ms, group_id, checkpoint.count)
            for (at, _), handle in zip(changed, fresh, strict=True):
                outcomes[at] = (AckOutcome.OK, handle)
            if checkpoint.waits or checkpoint.level == ALONE:
                self._serve(self._state.groups_by_id[group_id])  # what waits doesn't count against the in-flight limit
        return outcomes

    def _is_last_attempt(self, delivery: Delivery) -> bool:
        attempt = self._state.checkpoints[delivery.checkpoint].entry(delivery.index).attempt
        return attempt >= self._state.groups_by_id[delivery.group_id].attempts_max

    def extend(self, group: ConsumerGroup, deliveries: list[int], invisible_ms: int, keeper: str) -> list[int]:
        """Move the deadlines of deliveries, given by their ids, to `invisible_ms` from now; return their new ids.

        This is for consumers inside the node, and `invisible_ms` has no maximum. Deliveries that are over keep their ids.
        `kept_by` finds the others by their keeper, which is 1 to 254 characters.

        Raises:
            DiskFull: the disk has no room for the record; the old ids and deadlines hold.
        """
        checkpoints = self._state.checkpoints
        moved = {}
        for delivery in deliveries:
            position, index = delivery_of(delivery)
            checkpoint = checkpoints.get(position)
            if checkpoint is not None and checkpoint.open >> index & 1:
                moved[delivery] = position, index
        if not moved:
            return deliveries
        alone = group.alone
        checkpoint = self._append_change(group.id, invisible_ms, 0, list(moved.values()), keeper)
        if group.alone < alone:
            self._serve(group)  # what a device keeps is not out alone any more (`pop.core.suspicion`)
        first = delivery_id(checkpoint.position)
        fresh = dict(zip(moved, range(first, first + len(moved)), strict=True))
        return [fresh.get(delivery, delivery) for delivery in deliveries]

    def kept_by(self, keeper: str) -> list[int]:
        """Return the ids of the open deliveries that `extend` has moved for a keeper."""
        found = []
        for position in sorted(self._state.by_keeper.get(keeper, ())):
            found += [delivery_id(position, index) for index in self._state.checkpoints[position].open_indexes()]
        return found

    def fail(self, deliveries: Iterable[int], detail: str) -> int:
        """End deliveries, given by their ids, as failed attempts; return how many were still open.

        Each message waits for its back-off. After its last attempt it becomes a dead letter with `detail`, at once. This is for
        consumers inside the node. Deliveries that are over are skipped.

        Args:
            deliveries: their ids.
            detail: why they failed; up to `DETAIL_BYTES_MAX` bytes.

        Raises:
            DiskFull: the disk had no room for all records. Try again with all deliveries.
        """
        state, now_ms = self._state, self._now_ms()
        again: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """By group and level: one that was out alone stays alone."""
        dead: dict[int, list[bytes]] = {}
        for delivery in dict.fromkeys(deliveries):
            position, index = delivery_of(delivery)
            checkpoint = state.checkpoints.get(position)
            if checkpoint is None or not checkpoint.open >> index & 1 or now_ms >= checkpoint.deadline_ms:
                continue
            group_id = checkpoint.group_id
            if checkpoint.entry(index).attempt >= state.groups_by_id[group_id].attempts_max:
                dead.setdefault(group_id, []).append(REFERENCE.pack(position, index))
            else:
                level = ALONE if checkpoint.level == ALONE else 0
                again.setdefault((group_id, level), []).append((position, index))
        for group_id, references in dead.items():
            self._records.append_dead_letters(state.groups_by_id[group_id], references, Reason.ATTEMPTS_EXHAUSTED, detail)
        for (group_id, level), pairs in again.items():
            for at in range(0, len(pairs), FAILED_MAX):
                self._append_change(group_id, 0, Flag.RETURNED | level, pairs[at : at + FAILED_MAX])
        for group_id in {group_id for group_id, _ in again} | dead.keys():
            self._serve(state.groups_by_id[group_id])  # the group has room below its in-flight limit again
        return sum(map(len, dead.values())) + sum(map(len, again.values()))

    def _append_change(
        self, group_id: int, invisible_ms: int, flags: int, deliveries: list[tuple[int, int]], keeper: str = ""
    ) -> Checkpoint:
        """Append the record that moves open deliveries; return their new checkpoint, which has them in the same order."""
        entries = []
        for position, index in deliveries:
            entries.append(CHANGE_ENTRY.pack(position, index, *self._state.checkpoints[position].entry(index)))
        position = self._records.append(
            Kind.POP_INVISIBLE_CHANGED,
            group_id,
            self._state.groups_by_id[group_id].name,
            b"".join(entries),
            deadline_ms=self._now_ms() + invisible_ms,
            flags=flags,
            properties=orjson.dumps({"keeper": keeper}) if keeper else b"",
        )
        return self._state.checkpoints[position]
