"""The timer wheel, tested against a sorted list, which has the same behaviour."""

from __future__ import annotations

from bisect import bisect_right, insort
from operator import itemgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.timer import wheel as wheels
from penstock.timer.wheel import MemoryBuckets, TimerWheel
from tests.depth import DEPTH

START_MS = 1_700_000_000_000
YEAR_MS = 365 * 24 * 3600 * 1000


class SortedList:
    """The model: all pending items by due time, those of equal time in the order of scheduling."""

    def __init__(self) -> None:
        self.pending: list[tuple[int, int]] = []

    def schedule(self, due_ms: int, item: int) -> None:
        insort(self.pending, (due_ms, item), key=itemgetter(0))

    def advance(self, now_ms: int, limit: int) -> list[int]:
        cut = min(limit, bisect_right(self.pending, now_ms, key=itemgetter(0)))
        fired, self.pending = self.pending[:cut], self.pending[cut:]
        return [item for _, item in fired]


# In small wheels, items meet the edges of slots and buckets within a few steps. The distances cover all of them.
distances_ms = st.one_of(
    st.integers(-30, 30),
    st.integers(-300, 300),
    st.integers(-5_000, 5_000),
    st.sampled_from([0, 9, 10, 11, 79, 80, 81, YEAR_MS]),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("schedule"), distances_ms, st.integers(1, 4)),
        st.tuples(st.just("advance"), distances_ms, st.sampled_from([1, 2, 3, 1_000])),
    ),
    max_size=80,
)


@settings(max_examples=60 * DEPTH)
@given(steps=steps, tick_ms=st.sampled_from([1, 7, 10]), slots=st.sampled_from([1, 3, 8]), start_ms=st.integers(0, 200))
def test_the_wheel_behaves_like_a_sorted_list_of_pending_items(
    steps: list[tuple[str, int, int]], tick_ms: int, slots: int, start_ms: int
) -> None:
    wheel: TimerWheel[int] = TimerWheel(start_ms, tick_ms=tick_ms, slots=slots)
    model = SortedList()
    now_ms, scheduled = start_ms, 0
    for step, distance_ms, n in steps:
        if step == "schedule":
            for _ in range(n):
                wheel.schedule(now_ms + distance_ms, scheduled)
                model.schedule(now_ms + distance_ms, scheduled)
                scheduled += 1
        else:
            now_ms += distance_ms
            fired = wheel.advance(now_ms, n)
            assert fired == model.advance(now_ms, n)
            next_ms = wheel.next_due_ms()
            assert next_ms is None or len(fired) == n or next_ms > now_ms
        assert len(wheel) == len(model.pending)
        next_ms = wheel.next_due_ms()
        assert (next_ms is None) == (not model.pending)
        assert next_ms is None or next_ms <= model.pending[0][0]
    assert wheel.advance(now_ms + 2 * YEAR_MS, 10_000) == model.advance(now_ms + 2 * YEAR_MS, 10_000)
    assert len(wheel) == 0


@given(dues_ms=st.lists(st.integers(0, 2_000), max_size=60), start_ms=st.integers(0, 500))
def test_an_owner_that_sleeps_until_next_due_fires_each_item_at_its_time(dues_ms: list[int], start_ms: int) -> None:
    wheel: TimerWheel[int] = TimerWheel(start_ms, slots=8)
    for due_ms in dues_ms:
        wheel.schedule(due_ms, due_ms)
    now_ms = start_ms
    while (next_ms := wheel.next_due_ms()) is not None:
        now_ms = max(now_ms, next_ms)
        for due_ms in wheel.advance(now_ms, 1_000):
            assert now_ms == max(due_ms, start_ms)


@pytest.mark.parametrize(
    ("due_ms", "early_ms", "on_time_ms"),
    [
        (START_MS + 1, START_MS, START_MS + 1),
        (START_MS + 15, START_MS + 14, START_MS + 15),
        (START_MS + 59_999, START_MS + 59_998, START_MS + 59_999),
        (START_MS + 60_000, START_MS + 59_999, START_MS + 60_000),
        (START_MS + 3_600_003, START_MS + 3_600_002, START_MS + 3_600_003),
        (START_MS + 10 * YEAR_MS, START_MS + 10 * YEAR_MS - 1, START_MS + 10 * YEAR_MS),
    ],
)
def test_an_item_fires_at_its_millisecond_and_not_before(due_ms: int, early_ms: int, on_time_ms: int) -> None:
    wheel: TimerWheel[str] = TimerWheel(START_MS)
    wheel.schedule(due_ms, "x")
    assert wheel.advance(early_ms, 10) == []
    assert wheel.advance(on_time_ms, 10) == ["x"]
    assert wheel.next_due_ms() is None


def test_items_due_in_the_past_fire_at_the_next_advance_in_due_order() -> None:
    wheel: TimerWheel[str] = TimerWheel(START_MS)
    wheel.schedule(START_MS - 5, "later")
    wheel.schedule(START_MS - YEAR_MS, "earlier")
    assert wheel.next_due_ms() == START_MS - YEAR_MS
    assert wheel.advance(START_MS, 10) == ["earlier", "later"]


def test_an_item_scheduled_late_fires_before_waiting_items_that_are_due_later() -> None:
    wheel: TimerWheel[str] = TimerWheel(START_MS)
    for name in "abc":
        wheel.schedule(START_MS + 20, name)
    assert wheel.advance(START_MS + 25, 1) == ["a"]
    wheel.schedule(START_MS + 20, "equal")
    wheel.schedule(START_MS + 10, "overtakes")
    assert wheel.advance(START_MS + 25, 2) == ["overtakes", "b"]
    assert wheel.advance(START_MS + 25, 2) == ["c", "equal"]


def test_items_due_during_an_outage_fire_afterwards_in_due_order_and_in_portions() -> None:
    wheel: TimerWheel[int] = TimerWheel(START_MS)
    for minute in reversed(range(300)):
        wheel.schedule(START_MS + minute * 60_000, minute)
    fired: list[int] = []
    while batch := wheel.advance(START_MS + YEAR_MS, 7):
        assert len(batch) <= 7
        fired += batch
    assert fired == list(range(300))


def test_a_clock_that_goes_back_fires_nothing_and_breaks_nothing() -> None:
    wheel: TimerWheel[str] = TimerWheel(START_MS)
    assert wheel.advance(START_MS + 600_000, 10) == []
    assert wheel.advance(START_MS, 10) == []
    wheel.schedule(START_MS + 50, "x")
    assert wheel.advance(START_MS + 49, 10) == []
    assert wheel.advance(START_MS + 50, 10) == ["x"]


def test_items_in_buckets_count_as_pending() -> None:
    wheel: TimerWheel[str] = TimerWheel(START_MS)
    wheel.schedule(START_MS + 61_000, "second")
    wheel.schedule(START_MS + 1_000, "first")
    wheel.schedule(START_MS + 61_000, "third")
    assert len(wheel) == 3
    assert wheel.advance(START_MS + YEAR_MS, 10) == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("loaded_ms", "slot_ms", "late_ms", "fired"),
    [
        (155, 155, 155, ["loaded", "slot", "late"]),
        (155, 155, None, ["loaded", "slot"]),
        (155, 156, 151, ["late", "loaded", "slot"]),
        (156, 155, 155, ["slot", "late", "loaded"]),
        (190, 155, None, ["slot", "loaded"]),
        (155, 190, None, ["loaded", "slot"]),
        (190, 170, 120, ["late", "slot", "loaded"]),
    ],
)
def test_bucket_slot_and_late_items_fire_in_one_order(
    loaded_ms: int, slot_ms: int, late_ms: int | None, fired: list[str]
) -> None:
    wheel: TimerWheel[str] = TimerWheel(0, slots=10)
    wheel.schedule(loaded_ms, "loaded")
    wheel.schedule(100, "begins the bucket of 100 to 199 ms")
    assert len(wheel.advance(100, 10)) == 1
    wheel.schedule(slot_ms, "slot")
    assert wheel.advance(150, 10) == []
    if late_ms is not None:
        wheel.schedule(late_ms, "late")
    assert wheel.advance(199, 10) == fired


def test_the_cost_of_an_advance_depends_on_the_items_and_not_on_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    class Counted(MemoryBuckets[int]):
        def first(self) -> int | None:
            nonlocal asked
            asked += 1
            return super().first()

    monkeypatch.setattr(wheels, "MemoryBuckets", Counted)
    wheel: TimerWheel[int] = TimerWheel(START_MS)
    for year in range(1, 101):
        wheel.schedule(START_MS + year * YEAR_MS, year)
    assert wheel.advance(START_MS + 100 * YEAR_MS, 1_000) == list(range(1, 101))
    assert 100 <= asked < 500, "100 years are 3e11 ticks and 5e7 buckets"


@pytest.mark.parametrize(("tick_ms", "slots"), [(0, 6_000), (10, 0)])
def test_a_wheel_without_ticks_or_slots_is_refused(tick_ms: int, slots: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TimerWheel(START_MS, tick_ms=tick_ms, slots=slots)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        TimerWheel[int](START_MS).advance(START_MS, 0)
