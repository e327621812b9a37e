"""The reconciliation once more, record by record with dictionaries, to compare with."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock.spark.reconciliation.summary import Outcome
from penstock.store.bodies import CHANGE_ENTRY, CHECKPOINT_ENTRY, REFERENCE
from penstock.store.record import POP_FIXED, Flag, Kind, Record

SETTLING = (
    Kind.POP_ACK,
    Kind.POP_REVIVED,
    Kind.POP_DEAD_LETTER,
    Kind.GROUP_OFFSET_RESET,
    Kind.POP_INVISIBLE_CHANGED,
)

_OF_KIND = {
    Kind.POP_REVIVED: Outcome.REVIVED,
    Kind.POP_DEAD_LETTER: Outcome.DEAD_LETTERED,
    Kind.GROUP_OFFSET_RESET: Outcome.VOIDED,
}

_FINAL = {
    Outcome.DEAD_LETTERED,
    Outcome.IN_FLIGHT,
    Outcome.LOST,
    Outcome.VOIDED,
}


class _Stage(NamedTuple):
    group_id: int
    at_ms: int
    popped_ms: int
    deadline_ms: int
    message: int
    attempt: int
    is_wait: bool


class _End(NamedTuple):
    group_id: int
    at_ms: int
    kind: Kind
    flags: int


class Model:
    """What a reconciliation of records must find. It knows no back-offs, no steps of the clock, and no damage.

    Parameters:
        groups: ids of the groups that the report has; None for all.
        has_topic: whether the report has messages of a topic; None for all topics. Orphans have no topic.

    Attributes:
        outcomes: outcome of each key that a report has, waits of returned messages included.
        waits: those of these keys that are waits.
        messages: outcome by group and message.
        latencies: times from pop to acknowledgement by group.
    """

    def __init__(
        self,
        records: Iterable[Record],
        *,
        as_of_ms: int,
        grace_ms: int,
        groups: set[int] | None = None,
        has_topic: Callable[[str], bool] | None = None,
    ) -> None:
        self._stages: dict[int, _Stage] = {}
        self._ends: defaultdict[int, list[_End]] = defaultdict(list)
        self._voids: dict[int, int] = {}
        topics: dict[int, str] = {}
        for each in records:
            if each.kind == Kind.MESSAGE:
                topics[each.position] = each.topic.decode()
            if each.kind in SETTLING:
                self._end(each)
            if each.kind in (Kind.POP_CHECKPOINT, Kind.POP_INVISIBLE_CHANGED):
                self._begin(each)
        orphans = [end for key, ends in self._ends.items() if key not in self._stages for end in ends]
        if groups is not None:
            self._stages = {key: stage for key, stage in self._stages.items() if stage.group_id in groups}
            orphans = [end for end in orphans if end.group_id in groups]
        if has_topic is not None:
            self._stages = {key: stage for key, stage in self._stages.items() if has_topic(topics[stage.message])}
            orphans = []
        self.outcomes: dict[int, Outcome] = {}
        self.waits: set[int] = set()
        self.messages: dict[tuple[int, int], Outcome] = {}
        self.latencies: defaultdict[int, list[int]] = defaultdict(list)
        self.attempts: Counter[tuple[int, int]] = Counter()
        self.duplicates = self.extensions = 0
        for key in self._stages:
            self._judge(key, as_of_ms, grace_ms)
        self._judge_messages()
        self.orphans = len(orphans)

    def group_of(self, key: int) -> int:
        """Return the group of a delivery."""
        return self._stages[key].group_id

    def _end(self, each: Record) -> None:
        group_id, _, _ = POP_FIXED.unpack(each.fixed)
        if each.kind == Kind.GROUP_OFFSET_RESET:
            self._voids[group_id] = each.position
        layout = CHANGE_ENTRY if each.kind == Kind.POP_INVISIBLE_CHANGED else REFERENCE
        for checkpoint, index, *_ in layout.iter_unpack(each.body):
            self._ends[checkpoint + index].append(_End(group_id, each.store_ms, Kind(each.kind), each.flags))

    def _begin(self, each: Record) -> None:
        group_id, _, deadline_ms = POP_FIXED.unpack(each.fixed)
        is_change = each.kind == Kind.POP_INVISIBLE_CHANGED
        layout, skip = (CHANGE_ENTRY, 2) if is_change else (CHECKPOINT_ENTRY, 0)
        for index, entry in enumerate(layout.iter_unpack(each.body)):
            message, _, _, attempt, _, _ = entry[skip:]
            before = self._stages[entry[0] + entry[1]] if is_change else None
            popped_ms = before.popped_ms if before else each.store_ms
            is_wait = is_change and each.flags & Flag.RETURNED != 0
            self._stages[each.position + index] = _Stage(
                group_id, each.store_ms, popped_ms, deadline_ms, message, attempt, is_wait
            )

    def _judge(self, key: int, as_of_ms: int, grace_ms: int) -> None:
        stage, ends = self._stages[key], self._ends.get(key, [])
        first, second = ends[:1], ends[1:]
        acks = sum(end.kind == Kind.POP_ACK for end in second)
        is_acked = bool(first) and first[0].kind == Kind.POP_ACK
        self.extensions += sum(end.kind == Kind.POP_INVISIBLE_CHANGED and not end.flags for end in ends)
        if acks < len(second) or (second and not is_acked):
            outcome = Outcome.CONFLICTING
        elif not first:
            is_open = stage.deadline_ms + grace_ms >= as_of_ms
            outcome = (Outcome.WAITING if stage.is_wait else Outcome.IN_FLIGHT) if is_open else Outcome.LOST
        elif (stage.is_wait and first[0].kind != Kind.POP_DEAD_LETTER) or (
            first[0].kind == Kind.POP_INVISIBLE_CHANGED and not first[0].flags
        ):
            return
        elif is_acked:
            outcome = Outcome.ACKED if first[0].at_ms <= stage.deadline_ms else Outcome.ACKED_LATE
        elif first[0].kind == Kind.POP_INVISIBLE_CHANGED:
            outcome = Outcome.SUSPENDED if first[0].flags & Flag.SUSPENDED else Outcome.NACKED
        else:
            outcome = _OF_KIND[first[0].kind]
        self.outcomes[key] = outcome
        self.duplicates += acks if is_acked else 0
        if stage.is_wait:
            self.waits.add(key)
            return
        self.attempts[stage.group_id, stage.attempt] += 1
        if outcome in (Outcome.ACKED, Outcome.ACKED_LATE):
            self.latencies[stage.group_id].append(first[0].at_ms - stage.popped_ms)

    def _judge_messages(self) -> None:
        found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for key in sorted(self.outcomes):
            stage = self._stages[key]
            found[stage.group_id, stage.message].append(key)
        for (group_id, message), keys in found.items():
            outcomes = {self.outcomes[key] for key in keys}
            last = self.outcomes[keys[-1]]
            is_void = self._voids.get(group_id, -1) > keys[-1]
            waiting = Outcome.VOIDED if is_void else Outcome.WAITING
            decided = [each for each in (Outcome.CONFLICTING, Outcome.ACKED, Outcome.ACKED_LATE) if each in outcomes]
            self.messages[group_id, message] = decided[0] if decided else last if last in _FINAL else waiting
