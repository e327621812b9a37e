"""The timer wheel: 10 ms slots for the minute under way, buckets of a minute for what is due later.

A hashed timing wheel (Varghese and Lauck, 1987) with one level in memory: scheduling is O(1), whatever is pending. What
lies beyond the minute under way waits in `Buckets`, unsorted, and is sorted once, as a whole, when its minute begins. All
that the wheel promises comes down to one sentence: `advance` returns the items that are due, ordered by due time and then
by order of scheduling, as a sorted list of all that is pending would.

There is no cancel. An owner that no longer wants an item (a checkpoint that was acknowledged, a message that was recalled)
skips it when it comes out. That costs O(1) per item and no index from items to slots, which would take more memory than
the items themselves; and almost every POP deadline is acknowledged before it is due.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable
from heapq import heappop, heappush
from operator import itemgetter, neg
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

T = TypeVar("T")

TICK_MS = 10
"""Width of a slot. Firing is never early and, by an owner that sleeps until `next_due_ms`, at most this late."""

SLOTS = 6_000
"""Slots of the wheel: at 10 ms a minute. A minute of ten million deadlines an hour is 167,000, sorted in 20 ms."""

_due: Callable[[tuple[int, Any]], int] = itemgetter(0)

NEVER_MS = 1 << 63
"""After every due time."""


class Buckets(Protocol[T]):
    """Where items wait whose minute has not begun. In memory here; files, for delays that must not take memory.

    A bucket is numbered by its due times: `due_ms // bucket_ms`.
    """

    def add(self, due_ms: int, item: T) -> None:
        """Put an item into the bucket of its due time."""
        ...

    def first(self) -> int | None:
        """Return the number of the earliest bucket that holds anything, or None."""
        ...

    def take(self, bucket: int) -> tuple[array[int], list[T]]:
        """Remove the first bucket and return its due times (an array of "q") and items, by due time, ties in order of adding.

        `bucket` is its number, as `first` told it.
        """
        ...

    def __len__(self) -> int:
        """Return how many items wait, in all buckets."""
        ...


class MemoryBuckets(Generic[T]):
    """Buckets in memory: 16 bytes an item, and the item itself.

    Parameters:
        bucket_ms: width of a bucket, in ms, at least 1. The wheel asks for `tick_ms * slots`.
    """

    __slots__ = ("_bucket_ms", "_numbers", "_pending", "_size")

    def __init__(self, bucket_ms: int) -> None:
        self._bucket_ms = bucket_ms
        # Parallel columns, not tuples: a tuple and its int would take 100 bytes an item, and the garbage collector's time.
        self._pending: dict[int, tuple[array[int], list[T]]] = {}
        self._numbers: list[int] = []
        self._size = 0

    def add(self, due_ms: int, item: T) -> None:
        number = due_ms // self._bucket_ms
        bucket = self._pending.get(number)
        if bucket is None:
            bucket = self._pending[number] = (array("q"), [])
            heappush(self._numbers, number)
        bucket[0].append(due_ms)
        bucket[1].append(item)
        self._size += 1

    def first(self) -> int | None:
        return self._numbers[0] if self._numbers else None

    def take(self, bucket: int) -> tuple[array[int], list[T]]:
        dues, items = self._pending.pop(bucket)
        number = heappop(self._numbers)
        assert number == bucket, (number, bucket)
        self._size -= len(items)
        column = np.frombuffer(dues, dtype=np.int64)
        if bool((column[1:] >= column[:-1]).all()):
            return dues, items  # as of a constant delay, or of a million that are due at one instant
        # Stable, so that ties keep their order.
        order = np.argsort(column, kind="stable")
        return array("q", column[order].tobytes()), list(map(items.__getitem__, order.tolist()))

    def __len__(self) -> int:
        return self._size


class TimerWheel(Generic[T]):
    """Items that come out when they are due. It has no clock: the caller tells the time.

    What is due after the bucket under way is in `_buckets`. What had been there when this bucket began is in `_run_*`,
    sorted. What was scheduled since is in `_slots`, except that the wheel stands on one open slot: that is in `_ready`, sorted,
    and what has been scheduled for it or for a time before it since it was opened is in `_late`. The next slot is opened when
    nothing of the open one is left, and the next bucket when nothing of this one is left.

    Parameters:
        now_ms: where the wheel starts. After an outage, the time up to which everything had fired: what became due since
            then is scheduled as cheaply as anything else, and fires late, in order.
        tick_ms: width of a slot, in ms, at least 1.
        slots: how many slots there are, at least 1; `tick_ms * slots` is the width of a bucket.
        buckets: where later items wait, of that width. In memory by default. What they hold already is pending.
    """

    __slots__ = (
        "_bucket_end",
        "_bucket_ms",
        "_buckets",
        "_late",
        "_occupied",
        "_ready",
        "_run_dues",
        "_run_items",
        "_sequence",
        "_size",
        "_slots",
        "_slots_n",
        "_tick",
        "_tick_ms",
    )

    def __init__(self, now_ms: int, *, tick_ms: int = TICK_MS, slots: int = SLOTS, buckets: Buckets[T] | None = None) -> None:
        if tick_ms < 1 or slots < 1:
            raise ValueError(f"tick_ms and slots must be at least 1, not {tick_ms} and {slots}")
        self._tick_ms = tick_ms
        self._slots_n = slots
        self._bucket_ms = tick_ms * slots
        self._buckets: Buckets[T] = MemoryBuckets(self._bucket_ms) if buckets is None else buckets
        self._slots: list[list[tuple[int, T]]] = [[] for _ in range(slots)]
        self._occupied: list[int] = []  # heap of the ticks whose slots hold anything: no empty slot is ever visited
        self._run_dues: array[int] = array("q")  # the bucket as it was loaded, latest first: used up from its end
        self._run_items: list[T] = []
        self._ready: list[tuple[int, T]] = []  # the open slot, latest first: used up from its end
        self._late: list[tuple[int, int, T]] = []  # heap of (due_ms, order of scheduling, item)
        self._sequence = 0
        self._size = 0  # of all but the buckets
        start = now_ms // self._bucket_ms
        first = self._buckets.first()
        self._stand_at(start if first is None else min(start, first))
        if first is not None and first <= start:
            self._load(first)

    def __len__(self) -> int:
        """Return how many items are pending."""
        return self._size + len(self._buckets)

    def schedule(self, due_ms: int, item: T) -> None:
        """Have `item` come out at `due_ms` (ms since 1970, within 64 bits), or at the next advance if that is past.

        O(1); O(log n) in the number of those that are scheduled for the slot that is open already, or before it.
        """
        tick = due_ms // self._tick_ms
        if tick >= self._bucket_end:
            self._buckets.add(due_ms, item)
            return
        self._size += 1
        if tick > self._tick:
            slot = self._slots[tick % self._slots_n]
            if not slot:
                heappush(self._occupied, tick)
            slot.append((due_ms, item))
        else:
            # A heap beside the sorted slot: a million that wait in an open slot need no sorting for each that joins them.
            self._sequence += 1
            heappush(self._late, (due_ms, self._sequence, item))

    def advance(self, now_ms: int, limit: int) -> list[T]:
        """Return the items that are due at `now_ms`, by due time, ties in order of scheduling; at most `limit` of them.

        The rest comes with the next call, ahead of what is due after it. A call costs O(items returned), and once a bucket
        its sorting; time over which nothing was due costs nothing, be it a year. When time goes back, only what is due
        even then (left by an earlier `limit`) is returned.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit}")
        fired: list[T] = []
        while True:
            # What is due in the next slot or after it has to wait until that slot is open and sorted.
            slot_ms = self._occupied[0] * self._tick_ms if self._occupied else NEVER_MS
            self._fire(min(now_ms + 1, slot_ms), limit - len(fired), fired)
            if len(fired) == limit or not (self._open() if slot_ms <= now_ms else self._turn(now_ms)):
                self._size -= len(fired)
                return fired

    def next_due_ms(self) -> int | None:
        """Return a time before which `advance` returns nothing, or None if nothing is pending.

        It is exact, or for what no advance has reached yet the beginning of its slot or bucket. Once `advance` has returned
        fewer than its limit, this lies ahead of the time that it was told.
        """
        if self._size:
            slot_ms = self._occupied[0] * self._tick_ms if self._occupied else NEVER_MS
            return min(*self._heads_ms(), slot_ms)
        bucket = self._buckets.first()
        return None if bucket is None else bucket * self._bucket_ms

    # --- firing ----------------------------------------------------------------------------------------------------

    def _heads_ms(self) -> tuple[int, int, int]:
        """Return when the first of each of `_run_items`, `_ready` and `_late` is due.

        On a tie that is also the order of scheduling: a bucket is loaded before any of its slots gets an item, and a slot is
        open before an item of it counts as late.
        """
        return (
            self._run_dues[-1] if self._run_dues else NEVER_MS,
            self._ready[-1][0] if self._ready else NEVER_MS,
            self._late[0][0] if self._late else NEVER_MS,
        )

    def _fire(self, bound_ms: int, room: int, fired: list[T]) -> None:
        """Move up to `room` items that are due before `bound_ms`, and in no slot that is yet to be opened, to `fired`."""
        dues, items, ready, late = self._run_dues, self._run_items, self._ready, self._late
        while room and (late or (ready and dues and dues[-1] <= ready[0][0])):
            run_ms, ready_ms, late_ms = self._heads_ms()
            if min(run_ms, ready_ms, late_ms) >= bound_ms:
                return
            if run_ms <= ready_ms and run_ms <= late_ms:
                dues.pop()
                fired.append(items.pop())
            elif ready_ms <= late_ms:
                fired.append(ready.pop()[1])
            else:
                fired.append(heappop(late)[2])
            room -= 1
        # Nothing left to merge, as nearly always: cut what is due off the ends, the slot before the run.
        if ready and room:
            cut = 0 if ready[0][0] < bound_ms else bisect_right(ready, -bound_ms, key=lambda entry: -entry[0])
            cut = max(cut, len(ready) - room)
            room -= len(ready) - cut
            fired.extend([item for _, item in reversed(ready[cut:])])
            del ready[cut:]
        if dues and room and not ready and dues[-1] < bound_ms:
            cut = max(bisect_right(dues, -bound_ms, key=neg), len(dues) - room)
            fired.extend(reversed(items[cut:]))
            del dues[cut:], items[cut:]

    def _open(self) -> bool:
        """Open the next slot that holds anything. Nothing of the open one is left: it was all due before the next begins."""
        assert not self._ready
        assert not self._late
        self._tick = heappop(self._occupied)
        index = self._tick % self._slots_n
        ready, self._slots[index] = self._slots[index], []
        ready.reverse()
        ready.sort(key=_due, reverse=True)  # latest first; a stable sort, so that ties stay in the order of the line above
        self._ready = ready
        return True

    # --- the bucket under way --------------------------------------------------------------------------------------

    def _turn(self, now_ms: int) -> bool:
        """Leave a bucket that is used up for the next one that holds anything, if its time has come, and say so."""
        if self._run_dues or self._ready or self._late or self._occupied:
            return False
        reached = now_ms // self._bucket_ms
        first = self._buckets.first()
        if first is not None and first <= reached:
            self._stand_at(first)
            self._load(first)
            return True
        if reached * self._slots_n >= self._bucket_end:
            self._stand_at(reached)
        return False

    def _stand_at(self, bucket: int) -> None:
        """Make `bucket` the one under way, with no slot of it open yet."""
        self._tick = bucket * self._slots_n - 1
        self._bucket_end = self._tick + 1 + self._slots_n

    def _load(self, bucket: int) -> None:
        """Take over what waited for the bucket under way."""
        dues, items = self._buckets.take(bucket)
        dues.reverse()
        items.reverse()
        self._run_dues, self._run_items = dues, items
        self._size += len(items)
