"""What a connected session has sent since its last full record, and what of it the client has acknowledged.

A full record of a session (`gateway.sessions.changes`) names each delivery under way. It costs time and space in proportion to
the client's window, so the journal writes it now and then. Between two of them it records acknowledgements with every commit,
in a form that is small whatever the window is: the first delivery of the last full record that is not acknowledged, and an
offset for each subscription, before which all deliveries are acknowledged. Acknowledgements that overtake an earlier one can't
be expressed that way. When there are many of those, the next commit has a full record instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from penstock.gateway.sessions.inflight import PACKET_ID_MAX, Slot

RUN_DELIVERIES_MAX: Final = 32_768
"""Deliveries of one run. A run must not take all packet ids, or nobody could tell which run a packet id is of."""

RUNS_MAX: Final = 1_024
"""Runs that a session keeps. With more of them, the next commit has a full record, after which there are none."""

OVERTAKING_DIVISOR: Final = 8
"""A session gets a full record when the acknowledgements that overtook an earlier one are more than its window divided by this.
So a client that acknowledges out of order costs a full record for many acknowledgements, and gets few deliveries again after a
kill."""

NOT_QUEUED: Final = -1
"""The number, in a run, of deliveries whose progress POP records: those of shared subscriptions."""


class Advance(NamedTuple):
    """What the client of a session has acknowledged since the session's last full record."""

    first: int
    """Packet id of the first delivery in the last full record that is not complete; 0 if all are."""
    floors: dict[int, int]
    """By number of a subscription: all deliveries before this offset are complete. Only those that have changed."""


class _Run:
    """Deliveries of one subscription with packet ids in a row, as far as no used one lay between them."""

    __slots__ = ("after", "before", "count", "end", "first", "is_dense", "number")

    def __init__(self, number: int, first: int, end: int, before: int, after: int, count: int, is_dense: bool) -> None:
        self.number = number
        self.first = first
        """Offset of the first message."""
        self.end = end
        """Offset after the last message."""
        self.before = before
        """The packet id that was assigned before those of the run."""
        self.after = after
        """The packet id that was assigned last."""
        self.count = count
        self.is_dense = is_dense
        """Whether each offset has a delivery, and each packet id is one of the run."""


class Unrecorded:
    """The deliveries of one session since its last full record."""

    __slots__ = ("_at", "_begun", "_passed", "_recorded", "_runs", "is_exact", "said")

    def __init__(self) -> None:
        self.reset(())

    def reset(self, recorded: Iterable[int]) -> None:
        """Begin anew after a full record, in which the deliveries with these packet ids are under way, in the order of
        sending."""
        self._recorded = tuple(recorded)
        self._at = 0
        """How many of those are complete, one after the other."""
        self._runs: list[_Run] = []
        self._begun = len(self._recorded)
        """Number of those deliveries, and of all that began since."""
        self._passed = 0
        """How many of these `advance` has said to be complete."""
        self.said = self._recorded[0] if self._recorded else 0
        """The `Advance.first` that was recorded last."""
        self.is_exact = True
        """False if only a full record can tell what is acknowledged."""

    def lose(self) -> None:
        """Have the next record be a full one."""
        self.is_exact = False
        self._runs.clear()

    def add(self, number: int, first: int, end: int, before: int, after: int, count: int) -> None:
        """Note deliveries that are sent now.

        Args:
            number: of the subscription, or `NOT_QUEUED`.
            first, end: the range of offsets that they are of, of which some may have no delivery.
            before, after: the packet ids that were assigned last, before and after these deliveries got theirs.
            count: their number.
        """
        self._begun += count
        if not self.is_exact:
            return
        runs = self._runs
        distance = (after - before) % PACKET_ID_MAX
        is_dense = distance == count == end - first
        if runs:
            last = runs[-1]
            if (
                last.end == first
                and last.number == number
                and last.after == before
                and is_dense
                and last.is_dense
                and last.count + count <= RUN_DELIVERIES_MAX
            ):
                last.end, last.after = end, after
                last.count += count
                return
        if len(runs) >= RUNS_MAX or distance < count:  # with such a distance they take all packet ids
            self.lose()
        else:
            runs.append(_Run(number, first, end, before, after, count, is_dense))

    def unsaid(self, under_way: int) -> int:
        """Return how many deliveries are complete that `advance` has not said to be so, when this many are under way."""
        return self._begun - under_way - self._passed

    def advance(self, slots: Mapping[int, Slot | None], recorded: Mapping[int, Slot | None], window: int) -> Advance | None:
        """Return what is acknowledged now, or None if that takes a full record. The floors count as recorded.

        Args:
            slots: the deliveries under way, in the order of sending.
            recorded: the same as of the last full record.
            window: how many deliveries may be under way.
        """
        if not self.is_exact:
            return None
        ids, at = self._recorded, self._at
        while at < len(ids) and not _is_under_way(ids[at], slots, recorded):
            at += 1
        self._passed += at - self._at
        self._at = at
        floors: dict[int, int] = {}
        if at == len(ids) and self._runs and not self._pass_runs(next(iter(slots), 0), floors):
            return None
        if self.unsaid(len(slots)) > window // OVERTAKING_DIVISOR:
            return None
        return Advance(ids[at] if at < len(ids) else 0, floors)

    def _pass_runs(self, oldest: int, floors: dict[int, int]) -> bool:
        """Forget what is before the oldest delivery under way, or everything if that is 0, and note how far that has got.

        Return False if the delivery is in no run.
        """
        runs = self._runs
        at = 0
        for run in runs:
            if oldest:
                passed = (oldest - run.before - 1) % PACKET_ID_MAX
                if passed < (run.after - run.before) % PACKET_ID_MAX:
                    if run.is_dense and passed:
                        run.first += passed
                        run.before = (run.before + passed - 1) % PACKET_ID_MAX + 1
                        run.count -= passed
                        self._passed += passed
                        if run.number != NOT_QUEUED:
                            floors[run.number] = run.first
                    break
            at += 1
            self._passed += run.count
            if run.number != NOT_QUEUED:
                floors[run.number] = run.end
        del runs[:at]
        return not oldest or bool(runs)


def _is_under_way(packet_id: int, slots: Mapping[int, Slot | None], recorded: Mapping[int, Slot | None]) -> bool:
    """Return whether a delivery of the last full record is under way, be it that its PUBREC has come since."""
    if packet_id not in slots:
        return False
    slot = slots[packet_id]
    return slot is None or slot is recorded.get(packet_id)
