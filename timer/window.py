"""The delayed messages of the minutes under way: in runs by due time, and those that are due in lanes that take turns."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Final, NamedTuple

import numpy as np

from penstock.store.record import checksum
from penstock.timer.entries import LANES, PENDING_DTYPE, Column, Entries, joined

Row = tuple[int, int, int, int, int, int]
"""One message, as in `PENDING_DTYPE`."""

SINGLE_MAX: Final = 4_096
"""Number of messages that came one by one and become a run. A message of a run takes a fifth of the memory."""

OPENED_MAX: Final = 16_384
"""Number of due messages that are looked at in one turn, about. Later ones wait in their runs."""


class _DueRun(NamedTuple):
    """Messages by due time and then by position."""

    due_ms: int
    """When the first of them is due."""
    number: int
    """Differs for each run, so that they can be compared."""
    dues: Column
    """The due times, in a piece of memory that is searched fast."""
    rows: Column


class DueWindow:
    """Holds messages that are due soon, and returns them when they are due.

    The messages of one lane come out by due time and then by position. As long as no more is due than the caller takes, so do
    all of them together. When more is due, the lanes take turns.
    """

    def __init__(self) -> None:
        self._runs: list[_DueRun] = []
        """Heap of the runs."""
        self._runs_n = 0
        """Number of runs that there have been."""
        self._singles: list[Row] = []
        """Heap of the messages that came one by one since the last run of them."""
        self._lanes: list[deque[Column]] = [deque() for _ in range(LANES)]
        """Messages that are due and that an earlier call has left."""
        self._left = 0
        """Number of these messages."""
        self._first = 0
        """The lane that begins."""
        self._numbers: dict[bytes, int] = {}
        self._topics: list[bytes] = []
        self._topic_lanes: list[int] = []
        self._size = 0

    def __len__(self) -> int:
        """Return how many messages it holds, with those that were recalled since they came."""
        return self._size

    def add(self, due_ms: int, position: int, account: int, size: int, tag: int, topic: bytes) -> None:
        """Add a message that is not due yet, or is due just now."""
        self._size += 1
        heappush(self._singles, (due_ms, position, account, size, tag, self._number(topic)))
        if len(self._singles) >= SINGLE_MAX:
            heappush(self._runs, self._run(np.array(sorted(self._singles), dtype=PENDING_DTYPE)))
            self._singles.clear()

    def add_all(self, found: Entries) -> None:
        """Add messages. None of them may precede in its lane a message that has come out."""
        if not len(found):
            return
        own = np.array([self._number(topic) for topic in found.topics], dtype="<u4")
        rows = _in_order(found.rows)
        rows["topic"] = own[rows["topic"]]
        heappush(self._runs, self._run(rows))
        self._size += len(rows)

    def _run(self, rows: Column) -> _DueRun:
        self._runs_n += 1
        return _DueRun(int(rows["due"][0]), self._runs_n, np.ascontiguousarray(rows["due"]), rows)

    def _number(self, topic: bytes) -> int:
        number = self._numbers.get(topic)
        if number is None:
            number = self._numbers[topic] = len(self._topics)
            self._topics.append(topic)
            self._topic_lanes.append(checksum(topic) % LANES)
        return number

    def next_due_ms(self) -> int | None:
        """Return when the next message is due, in ms since 1970; None if there is none."""
        if self._left:
            return min(int(lane[0]["due"][0]) for lane in self._lanes if lane)
        found = [heap[0][0] for heap in (self._runs, self._singles) if heap]
        return min(found, default=None)

    def take(self, now_ms: int, limit: int) -> Entries:
        """Remove and return up to `limit` messages that are due at `now_ms`, by due time and then by position."""
        due = self._open(now_ms)
        if self._left or len(due) > limit:
            self._wait_in_lanes(due)
            due = self._share(limit)
        self._size -= len(due)
        found = Entries(due, self._topics).taken(slice(None))
        if not self._size:
            self._numbers, self._topics, self._topic_lanes = {}, [], []
        return found

    def put_back(self, taken: Entries) -> None:
        """Take back messages that `take` has just returned."""
        self._size += len(taken)
        own = np.array([self._number(topic) for topic in taken.topics], dtype="<u4")
        rows = taken.rows.copy()
        rows["topic"] = own[rows["topic"]]
        lanes = taken.lanes
        for lane in np.unique(lanes).tolist():
            self._lanes[lane].appendleft(rows[lanes == lane])
        self._left += len(rows)

    def take_where(self, due_from_ms: int, due_before_ms: int, position_from: int) -> Entries:
        """Remove and return the messages in a range of due times, not yet due, with positions from one on."""
        rows = joined([np.array(self._singles, dtype=PENDING_DTYPE), *(run.rows for run in self._runs)])
        dues = rows["due"]
        is_in = (dues >= due_from_ms) & (dues < due_before_ms) & (rows["position"] >= position_from)
        if is_in.any():
            self._singles.clear()
            self._runs.clear()
            if not is_in.all():
                self._runs.append(self._run(_in_order(rows[~is_in])))
        rows = rows[is_in]
        self._size -= len(rows)
        return Entries(rows, self._topics).taken(slice(None))

    # --- what is due ------------------------------------------------------------------------------------------------

    def _open(self, now_ms: int) -> Column:
        """Remove and return messages that are due, by due time and then by position: the first ones, about `OPENED_MAX`."""
        singles: list[Row] = []
        while self._singles and self._singles[0][0] <= now_ms:
            singles.append(heappop(self._singles))
        rows = np.array(singles, dtype=PENDING_DTYPE)
        if not self._runs or self._runs[0].due_ms > now_ms:
            return rows
        runs = [self._run(rows)] if singles else []
        while self._runs and self._runs[0].due_ms <= now_ms:
            runs.append(heappop(self._runs))
        stops = [int(run.dues.searchsorted(now_ms, "right")) for run in runs]
        if sum(stops) > OPENED_MAX:
            stops = _first_stops(runs, stops)
        for run, stop in zip(runs, stops, strict=True):
            if stop < len(run.rows):
                heappush(self._runs, _DueRun(int(run.dues[stop]), run.number, run.dues[stop:], run.rows[stop:]))
        if len(runs) == 1:
            return runs[0].rows[: stops[0]]
        return _in_order(joined([run.rows[:stop] for run, stop in zip(runs, stops, strict=True)]))

    def _wait_in_lanes(self, due: Column) -> None:
        lanes = np.array(self._topic_lanes, dtype=np.intp)[due["topic"]]
        order = np.argsort(lanes, kind="stable")
        stops = np.cumsum(np.bincount(lanes, minlength=LANES)).tolist()
        start = 0
        for lane, stop in enumerate(stops):
            if stop > start:
                self._lanes[lane].append(due[order[start:stop]])
            start = stop
        self._left += len(due)

    def _share(self, limit: int) -> Column:
        """Remove and return up to `limit` of the messages that wait, the same number of each lane where it has so many."""
        found: list[Column] = []
        room = min(limit, self._left)
        self._left -= room
        while room:
            self._first = (self._first + 1) % LANES
            waiting = [lane for lane in self._lanes[self._first :] + self._lanes[: self._first] if lane]
            share = max(room // len(waiting), 1)
            for lane in waiting:
                of_lane = min(share, room)
                room -= of_lane
                while of_lane and lane:
                    piece = lane.popleft()
                    if len(piece) > of_lane:
                        lane.appendleft(piece[of_lane:])
                        piece = piece[:of_lane]
                    found.append(piece)
                    of_lane -= len(piece)
                room += of_lane
        return _in_order(joined(found))


def _in_order(rows: Column) -> Column:
    """Return messages by due time and then by position."""
    return rows[np.lexsort((rows["position"], rows["due"]))]


def _first_stops(runs: list[_DueRun], stops: list[int]) -> list[int]:
    """Return how many messages of each run are among the first `OPENED_MAX` of those before `stops`, or somewhat more."""
    step = sum(stops) // OPENED_MAX + 1
    samples = np.concatenate([run.rows[:stop:step][["due", "position"]] for run, stop in zip(runs, stops, strict=True)])
    order = np.lexsort((samples["position"], samples["due"]))
    due_ms, position = samples[order[OPENED_MAX // step]].tolist()
    found = []
    for run, most in zip(runs, stops, strict=True):
        begin, end = run.dues.searchsorted(due_ms), run.dues.searchsorted(due_ms, "right")
        stop = begin + run.rows["position"][begin:end].searchsorted(position, "right")
        found.append(min(int(stop), most))
    return found
