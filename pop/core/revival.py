"""Revival: what happens to messages whose invisible time is over before they were acknowledged.

If it is known which message was at fault, the attempt counts, and the message waits for its back-off. Otherwise all return at
once and uncounted: see `pop.core.suspicion`.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.pop.backoff import backoff_ms, jittered_ms
from penstock.pop.core.checkpoint import Checkpoint
from penstock.pop.core.counters import PopCounters
from penstock.pop.core.deadletters import Reason
from penstock.pop.core.deadlines import Deadlines
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.records import GroupRecords
from penstock.pop.core.state import PopState
from penstock.pop.core.suspicion import ALONE
from penstock.store.bodies import REFERENCE
from penstock.store.record import Kind


class Revival:
    """Revives messages into the retry queue of their group as a new attempt, or dead-letters them after the last attempt.

    Parameters:
        state: has the groups.
        records: appends what is decided.
        deadlines: calls again for checkpoints of which some messages must wait for their back-off.
        serve: called with a group whose polls may get messages now.
        now_ms: tells the time, in ms since 1970.
        counters: counts revived messages.
        batch_max: deliveries that one call revives or dead-letters, so that other work of the loop has its turn.
    """

    def __init__(
        self,
        state: PopState,
        records: GroupRecords,
        deadlines: Deadlines,
        serve: Callable[[ConsumerGroup], None],
        now_ms: Callable[[], int],
        counters: PopCounters,
        batch_max: int,
    ) -> None:
        self._state = state
        self._records = records
        self._deadlines = deadlines
        self._serve = serve
        self._now_ms = now_ms
        self._counters = counters
        self._batch_max = batch_max

    def revive(self, checkpoints: list[Checkpoint]) -> None:
        """Revive or dead-letter the messages of checkpoints whose deadline has passed.

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
        room = self._batch_max
        for checkpoint in checkpoints:
            group = self._state.groups_by_id[checkpoint.group_id]
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
            self._records.append_references(Kind.POP_REVIVED, self._state.groups_by_id[group_id], references, flags=level)
            self._counters.revived += len(references)
        for (group_id, level), references in uncounted.items():
            self._records.append_requeued(self._state.groups_by_id[group_id], references, level)
            self._counters.uncounted += len(references)
        for group_id in {group_id for group_id, _ in (*revived, *uncounted)}:
            group = self._state.groups_by_id[group_id]
            if group.order is not None:
                self._serve(group)  # its messages return to their message groups, and to no queue that polls watch
        for group_id, references in dead.items():
            group = self._state.groups_by_id[group_id]
            self._records.append_dead_letters(group, references, Reason.ATTEMPTS_EXHAUSTED)
            self._serve(group)  # the group has room below its in-flight limit again
        # This comes last: if the disk is full, `Deadlines` calls again with all checkpoints by itself.
        for due_ms, checkpoint in later:
            self._deadlines.schedule(due_ms, checkpoint)
        relieved: dict[int, ConsumerGroup] = {}
        for due_ms, checkpoint in later:
            if due_ms > now_ms and not checkpoint.waits:
                self._state.let_wait(checkpoint)
                relieved[checkpoint.group_id] = self._state.groups_by_id[checkpoint.group_id]
        for group in relieved.values():
            self._serve(group)  # nobody has these messages any more, so the group has room below its in-flight limit
        self._counters.revive_late_ms_max = max(self._counters.revive_late_ms_max, 0, *late_ms)
        for each_ms in late_ms:
            self._counters.revive_lateness.add(each_ms, 1)
