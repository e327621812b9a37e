"""The node's clock: it goes on by the time since boot, and is slewed and stepped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.clock import MS_NS, SystemClock
from penstock.store.options import HOUR_MS
from tests.clock import START_MS, Machine


def test_a_clock_begins_with_the_time_of_day_and_goes_on_by_the_time_since_boot() -> None:
    machine = Machine()
    clock = machine.clock()
    assert clock.now_ms() == START_MS
    machine.set_wall(30 * 24 * HOUR_MS)
    assert clock.now_ms() == START_MS
    machine.elapse(1_500)
    machine.set_wall(-60 * 24 * HOUR_MS)
    assert clock.now_ms() == START_MS + 1_500
    assert clock.monotonic_s() == 1.5


@pytest.mark.parametrize(
    ("slew_ms", "after_10_s"), [(500, 500), (1_000, 1_000), (5_000, 1_000), (-500, -500), (-5_000, -1_000)]
)
def test_a_slew_moves_the_time_by_at_most_a_tenth_of_what_elapses_and_then_ends(slew_ms: int, after_10_s: int) -> None:
    machine = Machine()
    clock = machine.clock()
    clock.slew(slew_ms * MS_NS)
    machine.elapse(10_000)
    assert clock.now_ms() == START_MS + 10_000 + after_10_s
    machine.elapse(HOUR_MS)
    assert clock.now_ms() == START_MS + 10_000 + HOUR_MS + slew_ms


def test_a_slew_replaces_the_one_before_it_and_keeps_what_that_has_moved() -> None:
    machine = Machine()
    clock = machine.clock()
    clock.slew(5_000 * MS_NS)
    machine.elapse(1_000)
    clock.slew(0)
    machine.elapse(1_000)
    assert clock.now_ms() == START_MS + 2_100


def test_a_step_moves_the_time_at_once_and_ends_a_slew() -> None:
    machine = Machine()
    clock = machine.clock()
    clock.slew(-5_000 * MS_NS)
    machine.elapse(1_000)
    clock.step(HOUR_MS * MS_NS)
    assert clock.now_ms() == START_MS + 900 + HOUR_MS
    machine.elapse(1_000)
    assert clock.now_ms() == START_MS + 1_900 + HOUR_MS


def test_a_reading_is_repeated_when_the_process_was_paused_between_the_two_times() -> None:
    boot = iter([0, 0, 0, 10 * MS_NS, 20 * MS_NS, 20 * MS_NS, 20 * MS_NS])
    clock = SystemClock(boot_ns=lambda: next(boot), wall_ns=lambda: START_MS * MS_NS)
    assert clock.read().boot_ns == 20 * MS_NS


def test_the_machines_own_clock_goes_forward_with_the_time_of_day() -> None:
    clock = SystemClock()
    first, second = clock.read(), clock.read()
    assert second.boot_ns >= first.boot_ns
    assert abs(second.wall_ns - second.now_ns) < 1_000 * MS_NS
    assert abs(clock.now_ms() - second.wall_ns // MS_NS) < 1_000


ACTIONS = st.one_of(
    st.tuples(st.just("elapse"), st.integers(0, 100 * HOUR_MS * MS_NS)),
    st.tuples(st.just("elapse"), st.integers(0, 5_000 * MS_NS)),
    st.tuples(st.just("slew"), st.integers(-HOUR_MS * MS_NS, HOUR_MS * MS_NS)),
)


@given(st.lists(ACTIONS, max_size=30))
def test_slewed_time_never_goes_back_and_advances_by_nine_to_eleven_tenths(actions: list[tuple[str, int]]) -> None:
    machine = Machine()
    clock = machine.clock()
    for action, ns in actions:
        before = clock.read()
        if action == "slew":
            clock.slew(ns)
            assert clock.read().now_ns == before.now_ns
            continue
        machine.boot_ns += ns
        advanced = clock.read().now_ns - before.now_ns
        assert 0.9 * ns - 2 <= advanced <= 1.1 * ns + 2
