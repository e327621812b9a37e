"""The timer wheel: slots of 10 ms for the current minute, and buckets of a minute for items that are due later.

It is a hashed timing wheel (Varghese and Lauck, 1987) with one level in memory, so scheduling is O(1) however many items are
pending. Items that are due after the current minute wait in buckets, unsorted, and each bucket is sorted once, when its
minute begins. The wheel guarantees this: `advance` returns the due items by due time and then by order of scheduling,
exactly as a sorted list of all pending items would.

There is no cancel. An owner that no longer wants an item (a checkpoint that was acknowledged, a message that was recalled)
skips the item when it comes out. That costs O(1) per item. Cancelling would need an index from items to slots, which would take
more memory than the items themselves, and almost every POP deadline is acknowledged before it is due.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable
from heapq import heappop, heappush
from operator import itemgetter, neg
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")

TICK_MS = 10
"""Width of a slot in ms. Items never come out early, and at most this late if the owner sleeps until `next_due_ms`."""

SLOTS = 6_000
"""Number of slots, which with slots of 10 ms is a minute. Ten million deadlines an hour are 167,000 in one minute."""

_due: Callable[[tuple[int, Any]], int] = itemgetter(0)

NEVER_MS = 1 << 63
"""A time after every due time."""


class MemoryBuckets(Generic[T]):
    """The items whose minute has not begun, in memory. They take 16 bytes per item, besides the item itself.

    The number of a bucket is `due_ms // bucket_ms` of its items.

    Parameters:
        bucket_ms: width of a bucket in ms, at least 1.
    """

    __slots__ = ("_bucket_ms", "_numbers", "_pending", "_size")

    def __init__(self, bucket_ms: int) -> None:
        self._bucket_ms = bucket_ms
        # Two parallel columns. A tuple with its int would take 100 bytes per item, and time of the garbage collector.
        self._pending: dict[int, tuple[array[int], list[T]]] = {}
        self._numbers: list[int] = []
        self._size = 0

    def add(self, due_ms: int, item: T) -> None:
        """Put an item into the bucket for its due time."""
        number = due_ms // self._bucket_ms
        bucket = self._pending.get(number)
        if bucket is None:
            bucket = self._pending[number] = (array("q"), [])
            heappush(self._numbers, number)
        bucket[0].append(due_ms)
        bucket[1].append(item)
        self._size += 1

    def first(self) -> int | None:
        """Return the number of the earliest bucket that holds an item, or None."""
        return self._numbers[0] if self._numbers else None

    def take(self, bucket: int) -> tuple[array[int], list[T]]:
        """Remove the first bucket, whose number `first` returned. Return its due times and its items.

        They are in the order of due times, and then of adding.
        """
        dues, items = self._pending.pop(bucket)
        number = heappop(self._numbers)
        assert number == bucket, (number, bucket)
        self._size -= len(items)
        column = np.frombuffer(dues, dtype=np.int64)
        if bool((column[1:] >= column[:-1]).all()):
            return dues, items  # as with a constant delay, or many items that are due at one instant
        # The sort must be stable, so that items of one due time keep their order.
        order = np.argsort(column, kind="stable")
        return array("q", column[order].tobytes()), list(map(items.__getitem__, order.tolist()))

    def __len__(self) -> int:
        return self._size


class TimerWheel(Generic[T]):
    """Holds items until they are due. It has no clock of its own: the caller passes the time.

    Items that are due after the current bucket are in `_buckets`. Items that were there when the current bucket began are in
    `_run_*`, sorted. Items that were scheduled since are in `_slots`. One slot is open: its items are in `_ready`, sorted, and
    items that were scheduled for it, or for an earlier time, after it was opened are in `_late`. The next slot is opened
    when the open one is used up, and the next bucket begins when the current one is used up.

    Parameters:
        now_ms: where the wheel starts, in ms since 1970. After an outage this is the time up to which everything had fired.
            Items that became due since then are scheduled as cheaply as others, and come out late, in order.
        tick_ms: width of a slot in ms, at least 1.
        slots: number of slots, at least 1. `tick_ms * slots` is the width of a bucket.
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

    def __init__(self, now_ms: int, *, tick_ms: int = TICK_MS, slots: int = SLOTS) -> None:
        if tick_ms < 1 or slots < 1:
            raise ValueError(f"tick_ms is {tick_ms} and slots is {slots}, but both must be at least 1")
        self._tick_ms = tick_ms
        self._slots_n = slots
        self._bucket_ms = tick_ms * slots
        self._buckets: MemoryBuckets[T] = MemoryBuckets(self._bucket_ms)
        self._slots: dict[int, list[tuple[int, T]]] = {}  # by tick; only slots that hold items
        self._occupied: list[int] = []  # heap of those ticks, so that no empty slot is visited
        self._run_dues: array[int] = array("q")  # the current bucket as it was loaded, latest first: used up from the end
        self._run_items: list[T] = []
        self._ready: list[tuple[int, T]] = []  # the open slot, latest first: used up from the end
        self._late: list[tuple[int, int, T]] = []  # heap of (due_ms, order of scheduling, item)
        self._sequence = 0
        self._size = 0  # of everything but `_buckets`
        self._stand_at(now_ms // self._bucket_ms)

    def __len__(self) -> int:
        """Return the number of pending items."""
        return self._size + len(self._buckets)

    def schedule(self, due_ms: int, item: T) -> None:
        """Make `item` come out at `due_ms` (ms since 1970, within 64 bits), or at the next `advance` if that is past.

        O(1). For the slot that is open, or an earlier time, it is O(log n) in the number of items scheduled so.
        """
        tick = due_ms // self._tick_ms
        if tick >= self._bucket_end:
            self._buckets.add(due_ms, item)
            return
        self._size += 1
        if tick > self._tick:
            slot = self._slots.get(tick)
            if slot is None:
                heappush(self._occupied, tick)
                self._slots[tick] = [(due_ms, item)]
            else:
                slot.append((due_ms, item))
        else:
            # A heap beside the sorted slot, so that an item that joins a full open slot does not cause another sort.
            self._sequence += 1
            heappush(self._late, (due_ms, self._sequence, item))

    def advance(self, now_ms: int, limit: int) -> list[T]:
        """Return at most `limit` items that are due at `now_ms`, by due time and then by order of scheduling.

        The next call returns the rest before items that are due later. A call costs O(items returned), and once per bucket the
        sorting of the bucket. Time in which nothing was due costs nothing, however long it is. When time goes back, only items
        are returned that are due even then, which an earlier `limit` has left.
        """
        if limit < 1:
            raise ValueError(f"limit is {limit}, but must be at least 1")
        fired: list[T] = []
        while True:
            # Items that are due in the next slot, or after it, wait until that slot is opened and sorted.
            slot_ms = self._occupied[0] * self._tick_ms if self._occupied else NEVER_MS
            self._fire(min(now_ms + 1, slot_ms), limit - len(fired), fired)
            if len(fired) == limit or not (self._open() if slot_ms <= now_ms else self._turn(now_ms)):
                self._size -= len(fired)
                return fired

    def next_due_ms(self) -> int | None:
        """Return a time before which `advance` returns nothing, in ms since 1970; None if nothing is pending.

        The time is exact, or the beginning of a slot or bucket that no `advance` has reached yet. After an `advance` that has
        returned fewer items than its limit, it is later than the time that `advance` got.
        """
        if self._size:
            slot_ms = self._occupied[0] * self._tick_ms if self._occupied else NEVER_MS
            return min(*self._heads_ms(), slot_ms)
        bucket = self._buckets.first()
        return None if bucket is None else bucket * self._bucket_ms

    # --- firing ----------------------------------------------------------------------------------------------------

    def _heads_ms(self) -> tuple[int, int, int]:
        """Return when the first items of `_run_items`, `_ready` and `_late` are due.

        If two are due at the same time, this is also their order of scheduling: a bucket is loaded before any of its slots gets
        an item, and a slot is opened before an item counts as late for it.
        """
        return (
            self._run_dues[-1] if self._run_dues else NEVER_MS,
            self._ready[-1][0] if self._ready else NEVER_MS,
            self._late[0][0] if self._late else NEVER_MS,
        )

    def _fire(self, bound_ms: int, room: int, fired: list[T]) -> None:
        """Move up to `room` items to `fired` that are due before `bound_ms` and not in a slot that is still to be opened."""
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
        # Nearly always there is nothing to merge, and due items can be cut off the ends: first of the slot, then of the run.
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
        """Open the next slot that holds items. The open slot is used up: its items were all due before the next slot begins."""
        assert not self._ready
        assert not self._late
        self._tick = heappop(self._occupied)
        ready = self._slots.pop(self._tick)
        ready.reverse()
        ready.sort(key=_due, reverse=True)  # latest first; the sort is stable, so ties keep the order of the line above
        self._ready = ready
        return True

    # --- the current bucket ----------------------------------------------------------------------------------------

    def _turn(self, now_ms: int) -> bool:
        """If the current bucket is used up, go to the next one that holds items if its time has come; return whether it has."""
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
        """Make `bucket` the current one. None of its slots is open yet."""
        self._tick = bucket * self._slots_n - 1
        self._bucket_end = self._tick + 1 + self._slots_n

    def _load(self, bucket: int) -> None:
        """Take over the items that waited for the current bucket."""
        dues, items = self._buckets.take(bucket)
        dues.reverse()
        items.reverse()
        self._run_dues, self._run_items = dues, items
        self._size += len(items)
