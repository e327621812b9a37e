"""Acknowledging and dead-lettering deliveries by their handles."""

from __future__ import annotations

from collections.abc import Callable

from penstock.pop.core.counters import PopCounters
from penstock.pop.core.deadletters import Reason, check_detail
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.handle import DELIVERY_DIGITS, Handles
from penstock.pop.core.judging import Judge
from penstock.pop.core.outcome import AckOutcome
from penstock.pop.core.records import REFERENCES_MAX, GroupRecords
from penstock.pop.core.state import PopState
from penstock.store.bodies import REFERENCE
from penstock.store.record import CONSUMED, Kind


class Acknowledger:
    """Ends deliveries whose handles consumers show.

    Parameters:
        state: has the checkpoints.
        records: appends what is decided.
        handles: reads handles.
        judge: decides about handles.
        serve: called with a group whose polls may get messages now.
        now_ms: tells the time, in ms since 1970.
        counters: counts acknowledgements.
    """

    def __init__(
        self,
        state: PopState,
        records: GroupRecords,
        handles: Handles,
        judge: Judge,
        serve: Callable[[ConsumerGroup], None],
        now_ms: Callable[[], int],
        counters: PopCounters,
    ) -> None:
        self._state = state
        self._records = records
        self._handles = handles
        self._judge = judge
        self._serve = serve
        self._now_ms = now_ms
        self._counters = counters

    def ack(self, name: str, handles: list[str]) -> list[AckOutcome]:
        """Acknowledge deliveries of the group `name`, and return an outcome for each handle, in order.

        The caller must not respond before `Store.when_durable`.

        Raises:
            DiskFull: the disk had no room for all records. Try again with all handles: those that were acknowledged get the
                outcome ALREADY_ACKED.
        """
        if self._ack_at_once(name, handles):
            return [AckOutcome.OK] * len(handles)
        outcomes, by_group = self._judge.outcomes(name, handles)
        for group_id, references in by_group.items():
            group = self._state.groups_by_id[group_id]
            self._records.append_references(Kind.POP_ACK, group, references, flags=CONSUMED)
            self._counters.acked += len(references)
            for reference in references:
                position = REFERENCE.unpack(reference)[0]
                checkpoint = self._state.checkpoints.get(position) or self._state.closed.get(position)
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
        group = self._state.groups_by_id.get(runs[0].group_id)
        if group is None or group.name != name:
            return False
        checkpoints, now_ms = self._state.checkpoints, self._now_ms()
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
        outcomes, by_group = self._judge.outcomes(name, handles)
        for group_id, references in by_group.items():
            group = self._state.groups_by_id[group_id]
            self._records.append_dead_letters(group, references, Reason.FORWARDED, detail)
            self._serve(group)
        return outcomes
