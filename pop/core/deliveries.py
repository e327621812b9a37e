"""Deliveries: acknowledging them, moving their deadlines, dead-lettering them, and returning their messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson

from penstock.pop.core.checkpoint import INDEX_BITS, INDEX_MASK, Checkpoint, delivery_id, delivery_of
from penstock.pop.core.deadletters import Reason, check_detail
from penstock.pop.core.handle import DELIVERY_DIGITS, Delivery, Handles
from penstock.pop.core.records import REFERENCES_MAX, GroupRecords
from penstock.pop.core.settings import backoff_ms, jittered_ms
from penstock.pop.core.suspicion import ALONE, narrowed
from penstock.store.bodies import CHANGE_ENTRY, REFERENCE
from penstock.store.errors import DiskFull
from penstock.store.record import CONSUMED, Flag, Kind

if TYPE_CHECKING:
    from penstock.pop.core.group import ConsumerGroup
    from penstock.pop.core.state import PopState

FAILED_MAX: Final = 4096
"""Failed deliveries in one record, which has 160 KiB then and fits into any segment."""


class AckOutcome(Enum):
    """Outcome of an ack, a dead-lettering or a change of invisible time. The names are those of the API's codes."""

    OK = "done"
    INVALID_HANDLE = "this is not a handle that this node gave to this group"
    HANDLE_EXPIRED = (
        "the delivery is over: its invisible time has passed, and the message becomes, or became, visible again as a new "
        "attempt; or its group was reset or deleted"
    )
    ALREADY_ACKED = "the delivery was acknowledged before"
    HANDLE_REPLACED = "a change of invisible time gave a newer handle: use that one"
    INVALID_INVISIBLE_TIME = "the invisible time must be at least 0 ms and at most 12 hours"


class VisibilityChange(NamedTuple):
    """A request to move the deadline of a delivery.

    Parameters:
        handle: names the delivery.
        invisible_ms: from now to the new deadline; 0 makes the message visible at once (nack).
        suspend: the return of the message at the new deadline doesn't count as an attempt.
        nack: the consumer returns the message, and has it no more. `suspend` and an invisible time of 0 say so, too.
        detail: of a nack: why the attempt failed, in the consumer's words; up to `DETAIL_BYTES_MAX` bytes.
    """

    handle: str
    invisible_ms: int
    suspend: bool = False
    nack: bool = False
    detail: str = ""

    @property
    def returns(self) -> bool:
        """True if the consumer has the message no more: it waits for the deadline alone."""
        return self.nack or self.suspend or self.invisible_ms == 0


class GroupDeliveries:
    """The deliveries of all groups.

    Consumers outside of the node name deliveries by their handles. Consumers inside the node have no handles, and name them by
    their ids (`pop.core.checkpoint.delivery_id`).

    Parameters:
        state: has the checkpoints.
        records: appends what is decided.
        handles: reads and makes handles.
        serve: called with a group whose polls may get messages now.
        now_ms: tells the time, in ms since 1970.
        invisible_ms_max: longest invisible time that a consumer may ask for.
        revive_max: deliveries that one call of `revive` ends, so that other work of the loop has its turn.
    """

    def __init__(
        self,
        state: PopState,
        records: GroupRecords,
        handles: Handles,
        serve: Callable[[ConsumerGroup], None],
        now_ms: Callable[[], int],
        invisible_ms_max: int,
        revive_max: int,
    ) -> None:
        self._state = state
        self._records = records
        self._counters = records.counters
        self._handles = handles
        self._serve = serve
        self._now_ms = now_ms
        self._invisible_ms_max = invisible_ms_max
        self._revive_max = revive_max

    # --- by handles ---------------------------------------------------------------------------------------------------

    def ack(self, name: str, handles: list[str]) -> list[AckOutcome]:
        """Acknowledge deliveries of the group `name`, and return an outcome for each handle, in order.

        The caller must not respond before `Store.when_durable`.

        Raises:
            DiskFull: the disk had no room for all records. Try again with all handles: those that were acknowledged get the
                outcome ALREADY_ACKED.
        """
        if self._ack_at_once(name, handles):
            return [AckOutcome.OK] * len(handles)
        outcomes, by_group = self._outcomes(name, handles)
        for group_id, references in by_group.items():
            group = self._state.groups.by_id[group_id]
            self._records.append_references(Kind.POP_ACK, group, references, flags=CONSUMED)
            self._counters.acked += len(references)
            for reference in references:
                position = REFERENCE.unpack(reference)[0]
                checkpoint = self._state.checkpoints.open.get(position) or self._state.checkpoints.closed.get(position)
                if checkpoint is not None:
                    group.latency.add(self._now_ms() - checkpoint.pop_ms, 1)
            self._serve(group)
        return outcomes

    def _ack_at_once(self, name: str, handles: list[str]) -> bool:
        """Acknowledge handles that are all genuine, open, of one group, and named once; else do nothing and return False.

        This is the hot path: it handles a checkpoint's deliveries together, not one by one.
        """
        if len(handles) > REFERENCES_MAX or set(map(len, handles)) != {DELIVERY_DIGITS}:
            return False
        runs = self._handles.read_joined("".join(handles))
        if runs is None or len({run.checkpoint for run in runs}) != len(runs):  # a checkpoint in two places
            return False
        group = self._state.groups.by_id.get(runs[0].group_id)
        if group is None or group.name != name:
            return False
        checkpoints, now_ms = self._state.checkpoints.open, self._now_ms()
        for position, pop_ms, group_id, indexes in runs:
            checkpoint, mask = checkpoints.get(position), indexes.mask()
            if checkpoint is None or checkpoint.pop_ms != pop_ms or group_id != group.id or now_ms >= checkpoint.deadline_ms:
                return False
            if checkpoint.open & mask != mask or mask.bit_count() != indexes.number:
                return False
        body = b"".join([run.indexes.references(run.checkpoint) for run in runs])
        self._records.append(Kind.POP_ACK, group.id, group.name, body, flags=CONSUMED)
        for run in runs:
            group.latency.add(now_ms - run.pop_ms, run.indexes.number)
        self._counters.acked += len(handles)
        self._serve(group)
        return True

    def dead_letter(self, name: str, handles: list[str], detail: str = "") -> list[AckOutcome]:
        """Put messages into the dead letters of the group `name`, because their consumer knows that it will never succeed.

        Return an outcome for each handle, in order. The caller must not respond before `Store.when_durable`.

        Args:
            name: of the group.
            handles: name the deliveries.
            detail: why, in the consumer's words; up to `deadletters.DETAIL_BYTES_MAX` bytes.

        Raises:
            RequestInvalid: `detail` is too long.
            DiskFull: the disk had no room for all records.
        """
        check_detail(detail)
        outcomes, by_group = self._outcomes(name, handles)
        for group_id, references in by_group.items():
            group = self._state.groups.by_id[group_id]
            self._records.append_dead_letters(group, references, Reason.FORWARDED, detail)
            self._serve(group)
        return outcomes

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
            outcome = self._outcome(name, delivery, named)
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
                    flags = self._state.checkpoints.open[delivery.checkpoint].flags_of_extension
                key = (delivery.group_id, change.invisible_ms, flags)
                by_record.setdefault(key, []).append((at, delivery))
        for (group_id, detail), references in dead.items():
            group = self._state.groups.by_id[group_id]
            self._records.append_dead_letters(group, references, Reason.ATTEMPTS_EXHAUSTED, detail)
            self._serve(group)
        for (group_id, invisible_ms, flags), changed in by_record.items():
            pairs = [(delivery.checkpoint, delivery.index) for _, delivery in changed]
            checkpoint = self._append_change(group_id, invisible_ms, flags, pairs)
            fresh = self._handles.deliveries(checkpoint.position, checkpoint.pop_ms, group_id, checkpoint.count)
            for (at, _), handle in zip(changed, fresh, strict=True):
                outcomes[at] = (AckOutcome.OK, handle)
            if checkpoint.waits or checkpoint.level == ALONE:
                self._serve(self._state.groups.by_id[group_id])  # what waits doesn't count against the in-flight limit
        return outcomes

    def _is_last_attempt(self, delivery: Delivery) -> bool:
        attempt = self._state.checkpoints.open[delivery.checkpoint].entry(delivery.index).attempt
        return attempt >= self._state.groups.by_id[delivery.group_id].attempts_max

    def _outcomes(self, name: str, handles: list[str]) -> tuple[list[AckOutcome], dict[int, list[bytes]]]:
        """Return the outcome of each handle, and by group id the references of the deliveries that may be ended."""
        outcomes = []
        references: dict[int, list[bytes]] = {}
        named: set[tuple[int, int]] = set()
        for delivery in self._handles.read_deliveries(handles):
            outcome = self._outcome(name, delivery, named)
            outcomes.append(outcome)
            if outcome is AckOutcome.OK:
                assert delivery is not None
                named.add((delivery.checkpoint, delivery.index))
                references.setdefault(delivery.group_id, []).append(REFERENCE.pack(delivery.checkpoint, delivery.index))
        return outcomes, references

    def _outcome(self, name: str, delivery: Delivery | None, named_before: set[tuple[int, int]]) -> AckOutcome:
        """Return OK if the group `name` may still end a delivery, and else why not.

        Args:
            name: of the group.
            delivery: that the handle names; None if the handle is not genuine.
            named_before: checkpoint and index of the deliveries that earlier handles of the same call name.
        """
        if delivery is None:
            return AckOutcome.INVALID_HANDLE
        group = self._state.groups.by_id.get(delivery.group_id)
        if group is None or group.name != name:
            return AckOutcome.INVALID_HANDLE
        position, bit = delivery.checkpoint, 1 << delivery.index
        checkpoint = self._state.checkpoints.open.get(position) or self._state.checkpoints.closed.get(position)
        if checkpoint is None or checkpoint.pop_ms != delivery.pop_ms:
            return AckOutcome.HANDLE_EXPIRED
        if checkpoint.acked & bit or (position, delivery.index) in named_before:
            return AckOutcome.ALREADY_ACKED
        if checkpoint.replaced & bit:
            return AckOutcome.HANDLE_REPLACED
        if not checkpoint.open & bit or self._now_ms() >= checkpoint.deadline_ms:
            return AckOutcome.HANDLE_EXPIRED
        return AckOutcome.OK

    # --- by ids -------------------------------------------------------------------------------------------------------

    def settle(self, kind: Kind, deliveries: Iterable[int], detail: str = "", *, suspects: int = 0) -> int:
        """Settle deliveries by their ids (`pop.core.checkpoint.delivery_id`); return how many were still open.

        Args:
            kind: POP_ACK acknowledges them; POP_DEAD_LETTER dead-letters them; POP_REVIVED requeues them: their messages are
                visible at once, which doesn't count as an attempt.
            deliveries: their ids. Deliveries that are over are skipped.
            detail: of dead letters: why they are; up to `DETAIL_BYTES_MAX` bytes.
            suspects: how many messages their consumer had when it was lost, if one of those that are requeued may have ended
                it; then fewer go out together the next time (`pop.core.suspicion`). 0 if none is suspected.

        Raises:
            DiskFull: the disk had no room for all records. Try again with all deliveries.
        """
        now_ms, checkpoints, pack = self._now_ms(), self._state.checkpoints.open, REFERENCE.pack
        by_group: dict[tuple[int, int], list[bytes]] = {}
        last, open_bits = -1, 0
        references: list[bytes] = []
        for delivery in dict.fromkeys(deliveries):
            position, index = delivery >> INDEX_BITS, delivery & INDEX_MASK
            if position != last:
                last = position
                checkpoint = checkpoints.get(position)
                open_bits = 0
                if checkpoint is not None and now_ms < checkpoint.deadline_ms:
                    open_bits = checkpoint.open
                    level = checkpoint.level if kind is Kind.POP_REVIVED else 0
                    level = narrowed(level, suspects) if suspects else level
                    references = by_group.setdefault((checkpoint.group_id, level), [])
            if open_bits >> index & 1:
                references.append(pack(position, index))
        for (group_id, level), references in by_group.items():
            group = self._state.groups.by_id[group_id]
            if not references:
                continue
            if kind is Kind.POP_DEAD_LETTER:
                self._records.append_dead_letters(group, references, Reason.FORWARDED, detail)
            elif kind is Kind.POP_REVIVED:
                self._records.append_requeued(group, references, level)
                self._counters.uncounted += len(references) if suspects else 0
            else:
                assert kind is Kind.POP_ACK, kind
                for position, count in Counter(REFERENCE.unpack(reference)[0] for reference in references).items():
                    group.latency.add(now_ms - checkpoints[position].pop_ms, count)
                self._records.append_references(kind, group, references, flags=CONSUMED)
                self._counters.acked += len(references)
            self._serve(group)
        return sum(map(len, by_group.values()))

    def is_open(self, delivery: int) -> bool:
        """Return whether a delivery, given by its id, can still be settled."""
        position, index = delivery_of(delivery)
        checkpoint = self._state.checkpoints.open.get(position)
        return checkpoint is not None and bool(checkpoint.open >> index & 1) and self._now_ms() < checkpoint.deadline_ms

    def extend(self, group: ConsumerGroup, deliveries: list[int], invisible_ms: int, keeper: str) -> list[int]:
        """Move the deadlines of deliveries, given by their ids, to `invisible_ms` from now; return their new ids.

        This is for consumers inside the node, and `invisible_ms` has no maximum. Deliveries that are over keep their ids.
        `of_keeper` finds the others by their keeper, which is 1 to 254 characters.

        Raises:
            DiskFull: the disk has no room for the record; the old ids and deadlines hold.
        """
        checkpoints = self._state.checkpoints.open
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

    def of_keeper(self, keeper: str) -> list[int]:
        """Return the ids of the open deliveries that `extend` has moved for a keeper."""
        positions = sorted(self._state.checkpoints.by_keeper.get(keeper, ()))
        checkpoints = [self._state.checkpoints.open[position] for position in positions]
        return [delivery_id(each.position, index) for each in checkpoints for index in each.open_indexes()]

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
            checkpoint = state.checkpoints.open.get(position)
            if checkpoint is None or not checkpoint.open >> index & 1 or now_ms >= checkpoint.deadline_ms:
                continue
            group_id = checkpoint.group_id
            if checkpoint.entry(index).attempt >= state.groups.by_id[group_id].attempts_max:
                dead.setdefault(group_id, []).append(REFERENCE.pack(position, index))
            else:
                level = ALONE if checkpoint.level == ALONE else 0
                again.setdefault((group_id, level), []).append((position, index))
        for group_id, references in dead.items():
            self._records.append_dead_letters(state.groups.by_id[group_id], references, Reason.ATTEMPTS_EXHAUSTED, detail)
        for (group_id, level), pairs in again.items():
            for at in range(0, len(pairs), FAILED_MAX):
                self._append_change(group_id, 0, Flag.RETURNED | level, pairs[at : at + FAILED_MAX])
        for group_id in {group_id for group_id, _ in again} | dead.keys():
            self._serve(state.groups.by_id[group_id])  # the group has room below its in-flight limit again
        return sum(map(len, dead.values())) + sum(map(len, again.values()))

    def _append_change(
        self, group_id: int, invisible_ms: int, flags: int, deliveries: list[tuple[int, int]], keeper: str = ""
    ) -> Checkpoint:
        """Append the record that moves open deliveries; return their new checkpoint, which has them in the same order."""
        entries = []
        for position, index in deliveries:
            entries.append(CHANGE_ENTRY.pack(position, index, *self._state.checkpoints.open[position].entry(index)))
        position = self._records.append(
            Kind.POP_INVISIBLE_CHANGED,
            group_id,
            self._state.groups.by_id[group_id].name,
            b"".join(entries),
            deadline_ms=self._now_ms() + invisible_ms,
            flags=flags,
            properties=orjson.dumps({"keeper": keeper}) if keeper else b"",
        )
        return self._state.checkpoints.open[position]

    # --- by checkpoints -----------------------------------------------------------------------------------------------

    def requeue(self, checkpoint: Checkpoint, *, suspected: bool = False) -> None:
        """Make the messages of open deliveries visible at once, because their consumer is gone or has never got them.

        This doesn't count as an attempt. If they are suspected to have ended their consumer, they return with a lower level
        (`pop.core.suspicion`). One that was out alone stays out until its time is over, and then its attempt counts. If the
        disk is full, the messages become visible when their invisible time is over.
        """
        references = [REFERENCE.pack(checkpoint.position, index) for index in checkpoint.open_indexes()]
        if not references or (suspected and checkpoint.level == ALONE):
            return
        group = self._state.groups.by_id[checkpoint.group_id]
        level = checkpoint.narrowed_level if suspected else checkpoint.level
        try:
            self._records.append_requeued(group, references, level)
        except DiskFull:
            return
        self._counters.uncounted += len(references) if suspected else 0
        self._serve(group)

    def revive(self, checkpoints: list[Checkpoint]) -> None:
        """Revive or dead-letter the messages of checkpoints whose deadline has passed.

        If it is known which message was at fault, the attempt counts. The message waits for its back-off, and then it is in the
        retry queue of its group; after the last attempt it becomes a dead letter. Otherwise all return at once and uncounted:
        see `pop.core.suspicion`.

        Raises:
            DiskFull: the disk had no room for all records. `Deadlines` calls again with the same checkpoints.
        """
        now_ms = self._now_ms()
        revived: dict[tuple[int, int], list[bytes]] = {}
        """References by group and level."""
        uncounted: dict[tuple[int, int], list[bytes]] = {}
        dead: dict[int, list[bytes]] = {}
        later: list[tuple[int, Checkpoint]] = []
        late_ms: list[int] = []
        room = self._revive_max
        for checkpoint in checkpoints:
            group = self._state.groups.by_id[checkpoint.group_id]
            if room <= 0:  # the others are still due, and are in the next call
                later.append((checkpoint.deadline_ms, checkpoint))
                continue
            room -= checkpoint.open.bit_count()
            again_ms = 0
            if not (checkpoint.suspended or checkpoint.blames_one):
                pack = REFERENCE.pack
                references = uncounted.setdefault((checkpoint.group_id, checkpoint.narrowed_level), [])
                references += [pack(checkpoint.position, index) for index in checkpoint.open_indexes()]
                late_ms += [now_ms - checkpoint.deadline_ms] * checkpoint.open.bit_count()
                continue
            for index in checkpoint.open_indexes():
                position, _, _, attempt, _, _ = checkpoint.entry(index)
                counts = not checkpoint.suspended
                is_last = counts and attempt >= group.attempts_max
                due_ms = checkpoint.deadline_ms
                if counts and not is_last:
                    due_ms += jittered_ms(backoff_ms(group.backoff, attempt), group.jitter, position ^ attempt)
                if due_ms > now_ms:
                    again_ms = min(again_ms or due_ms, due_ms)
                    continue
                reference = REFERENCE.pack(checkpoint.position, index)
                if is_last:
                    dead.setdefault(checkpoint.group_id, []).append(reference)
                else:
                    level = ALONE if counts and checkpoint.level else 0
                    revived.setdefault((checkpoint.group_id, level), []).append(reference)
                late_ms.append(now_ms - due_ms)
            if again_ms:
                later.append((again_ms, checkpoint))
        for (group_id, level), references in revived.items():
            self._records.append_references(Kind.POP_REVIVED, self._state.groups.by_id[group_id], references, flags=level)
            self._counters.revived += len(references)
        for (group_id, level), references in uncounted.items():
            self._records.append_requeued(self._state.groups.by_id[group_id], references, level)
            self._counters.uncounted += len(references)
        for group_id in {group_id for group_id, _ in (*revived, *uncounted)}:
            group = self._state.groups.by_id[group_id]
            if group.order is not None:
                self._serve(group)  # its messages return to their message groups, and to no queue that polls watch
        for group_id, references in dead.items():
            group = self._state.groups.by_id[group_id]
            self._records.append_dead_letters(group, references, Reason.ATTEMPTS_EXHAUSTED)
            self._serve(group)  # the group has room below its in-flight limit again
        # This comes last: if the disk is full, `Deadlines` calls again with all checkpoints by itself.
        for due_ms, checkpoint in later:
            self._state.checkpoints.deadlines.schedule(due_ms, checkpoint)
        relieved: dict[int, ConsumerGroup] = {}
        for due_ms, checkpoint in later:
            if due_ms > now_ms and not checkpoint.waits:
                self._state.checkpoints.let_wait(checkpoint)
                relieved[checkpoint.group_id] = self._state.groups.by_id[checkpoint.group_id]
        for group in relieved.values():
            self._serve(group)  # nobody has these messages any more, so the group has room below its in-flight limit
        self._counters.revive_late_ms_max = max(self._counters.revive_late_ms_max, 0, *late_ms)
        for lateness_ms in late_ms:
            self._counters.revive_lateness.add(lateness_ms, 1)
