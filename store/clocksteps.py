"""The steps of the node's clock: which stretches of time were left out, and what that means for what was stored before.

When a forward jump of the time of day is confirmed (`store.timekeeping`), the node's time is stepped. While the jump was
unconfirmed, the node's time went on undisturbed. What was set in that *window*, such as the expiry of a message, has not got
older by the step. Therefore a record of kind CLOCK_STEPPED says when the window began and how large the step is, and
applying it moves the deadlines that were set in the window: those of deliveries, and those of delayed messages. Times that are
inside of stored records can't be moved. For those `now_for` returns the time without the step.

Row of the index: key b"Msteps"; value for each step begin ms i64, begin position u64, end ms i64, step ms i64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from struct import Struct
from typing import NamedTuple

from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.part import Apply
from penstock.store.record import STEP_FIXED, Kind, Record

STEPS_REMEMBERED = 100
"""Steps that are remembered. What was stored in the window of an older one counts as older by that step."""

_KEY = KeySpace.META + b"steps"
_ROW = Struct("<qQqq")


class ClockStep(NamedTuple):
    """A step of the node's clock."""

    begin_ms: int
    """When the window before the step began."""
    begin: int
    """Position of the first record that was stored in the window."""
    end_ms: int
    """When the window ended: the node's time right before the step."""
    step_ms: int
    """By how much the node's time was moved forward."""

    def covers(self, set_ms: int) -> bool:
        """Return whether `set_ms` is in the window."""
        return self.begin_ms <= set_ms <= self.end_ms


def step_of(record: Record) -> ClockStep:
    """Return the step that a record of kind CLOCK_STEPPED states."""
    begin_ms, begin, step_ms = STEP_FIXED.unpack(record.fixed)
    return ClockStep(begin_ms, begin, record.store_ms, step_ms)


class ClockSteps:
    """The steps of the node's clock. A part of the store."""

    def __init__(self) -> None:
        self.known: list[ClockStep] = []
        """The last steps, oldest first. Nearly always there is none."""
        self._is_changed = False

    def now_for(self, set_ms: int, now_ms: int) -> int:
        """Return the time `now_ms` as it is for something that was set at `set_ms`: without a step whose window covers that."""
        for step in self.known:
            if step.covers(set_ms) and now_ms > step.end_ms:
                now_ms -= step.step_ms
        return now_ms

    # --- the part ---------------------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return {Kind.CLOCK_STEPPED: self._apply_stepped}

    def _apply_stepped(self, record: Record) -> None:
        self.known = [*self.known, step_of(record)][-STEPS_REMEMBERED:]
        self._is_changed = True

    def load(self, index: Index) -> None:
        self.known = [ClockStep(*found) for found in _ROW.iter_unpack(index.get(_KEY) or b"")]

    def save(self, batch: Batch) -> None:
        if self._is_changed:
            batch.put(_KEY, b"".join(_ROW.pack(*step) for step in self.known))
            self._is_changed = False

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        """Yield nothing: the row of the index has all that is needed."""
        yield from ()
