"""The ticker, which advances the wheel as time passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from penstock.timer.alarm import SLEEP_MS_MAX
from penstock.timer.ticker import Ticker
from tests.clock import ManualClock
from tests.timer.faketimers import FakeTimers


class Bench:
    """A ticker on simulated timers, with a list of the fired items and their times."""

    def __init__(self, fire_max: int = 100) -> None:
        self.clock = ManualClock(1_000_000)
        self.timers = FakeTimers(self.clock)
        self.fired: list[tuple[int, str]] = []
        self.on_fire: Callable[[str], None] = lambda item: None
        self.ticker: Ticker[str] = Ticker(self.clock.now_ms, self._fire, fire_max=fire_max)

    def start(self) -> None:
        self.ticker.start(self.timers)  # type: ignore[arg-type] # it uses call_later only
        self.run(0)

    def _fire(self, items: list[str]) -> None:
        for item in items:
            self.fired.append((self.clock.now_ms() - 1_000_000, item))
            self.on_fire(item)

    def schedule(self, due_ms: int, item: str) -> None:
        self.ticker.schedule(1_000_000 + due_ms, item)

    def run(self, until_ms: int) -> int:
        return self.timers.run_until(1_000_000 + until_ms)


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.start()
    return made


def test_each_item_fires_at_its_time(bench: Bench) -> None:
    for due_ms in (500, 25, 90_000, 3, 25):
        bench.schedule(due_ms, str(due_ms))
    bench.run(100_000)
    assert bench.fired == [(3, "3"), (25, "25"), (25, "25"), (500, "500"), (90_000, "90000")]
    assert len(bench.ticker) == 0


def test_items_due_before_the_start_fire_at_the_start_in_order() -> None:
    bench = Bench()
    for due_ms in (-10, -86_400_000, -500, 40):
        bench.schedule(due_ms, str(due_ms))
    bench.start()
    bench.run(1_000)
    assert bench.fired == [(0, "-86400000"), (0, "-500"), (0, "-10"), (40, "40")]


def test_an_item_scheduled_while_others_fire_does_not_delay_items_that_wait(bench: Bench) -> None:
    bench.on_fire = lambda item: bench.schedule(30_000, "far") if item == "first" else None
    bench.schedule(10, "first")
    bench.schedule(50, "near")
    bench.run(60_000)
    assert bench.fired == [(10, "first"), (50, "near"), (30_000, "far")]


def test_an_item_scheduled_while_others_fire_may_be_due_at_once(bench: Bench) -> None:
    bench.on_fire = lambda item: bench.schedule(5, "at once") if item == "first" else None
    bench.schedule(10, "first")
    bench.run(20)
    assert bench.fired[0] == (10, "first")
    assert bench.fired[1][1] == "at once"
    assert bench.fired[1][0] <= 11


def test_no_more_items_fire_at_a_time_than_allowed_and_other_work_runs_in_between() -> None:
    bench = Bench(fire_max=10)
    bench.start()
    portions: list[int] = []
    fire = bench.ticker._fire

    def fire_portion(items: list[str]) -> None:
        portions.append(len(items))
        fire(items)

    bench.ticker._fire = fire_portion
    for n in range(95):
        bench.schedule(50, str(n))
    runs = bench.run(50)
    assert portions == [10] * 9 + [5]
    assert runs >= 10  # one timer for each portion, so the loop was free between them
    assert [item for _, item in bench.fired] == [str(n) for n in range(95)]
    assert {when for when, _ in bench.fired} == {50}


def test_without_pending_items_no_timer_is_armed(bench: Bench) -> None:
    assert bench.timers.waiting() == []
    bench.schedule(10, "a")
    assert len(bench.timers.waiting()) == 1
    bench.run(20)
    assert bench.timers.waiting() == []


def test_a_thousand_items_arm_one_timer(bench: Bench) -> None:
    for n in range(1_000):
        bench.schedule(1_000 + n, str(n))
    assert len(bench.timers.waiting()) == 1


def test_a_clock_that_was_set_forward_is_noticed_in_time(bench: Bench) -> None:
    bench.schedule(7_200_000, "a")
    ((armed_ms, _),) = bench.timers.waiting()
    assert armed_ms == 1_000_000 + SLEEP_MS_MAX
    bench.clock.advance(7_200_000 - 30_000)  # the loop's timer does not notice this
    ran = bench.timers.run_until(bench.clock.now_ms() + 60_000)
    assert [item for _, item in bench.fired] == ["a"]
    assert 7_200_000 <= bench.fired[0][0] <= 7_200_000 + 30_000
    assert ran < 10


def test_a_clock_that_was_set_back_fires_nothing_early(bench: Bench) -> None:
    bench.schedule(1_000, "a")
    bench.clock.advance(-500)
    bench.timers.run_until(1_000_000 + 999)
    assert bench.fired == []
    bench.run(1_000)
    assert bench.fired == [(1_000, "a")]


def test_a_stopped_ticker_fires_nothing_by_itself(bench: Bench) -> None:
    bench.schedule(10, "a")
    bench.ticker.stop()
    bench.run(1_000)
    assert bench.fired == []
    bench.schedule(20, "b")
    assert bench.timers.waiting() == []
    assert not bench.ticker.fire_due()
    assert [item for _, item in bench.fired] == ["a", "b"]


def test_a_ticker_may_be_stopped_while_it_fires(bench: Bench) -> None:
    bench.on_fire = lambda item: bench.ticker.stop()
    bench.schedule(10, "a")
    bench.schedule(20, "b")
    bench.run(1_000)
    assert bench.fired == [(10, "a")]


def test_a_manual_firing_returns_whether_more_items_are_due() -> None:
    bench = Bench(fire_max=2)
    for n in range(3):
        bench.schedule(10, str(n))
    bench.schedule(500, "later")
    bench.clock.advance(10)
    assert [bench.ticker.fire_due(), bench.ticker.fire_due(), bench.ticker.fire_due()] == [True, False, False]
    assert len(bench.fired) == 3


def test_a_manual_firing_reports_items_that_became_due_meanwhile() -> None:
    bench = Bench()
    bench.on_fire = lambda item: bench.schedule(0, "again") if item == "a" else None
    bench.schedule(0, "a")
    assert [bench.ticker.fire_due(), bench.ticker.fire_due()] == [True, False]
    assert [item for _, item in bench.fired] == ["a", "again"]


@pytest.mark.parametrize("others", [(), (7_200_000,)])
def test_after_a_manual_firing_on_a_clock_set_forward_new_items_fire_at_their_time(
    bench: Bench, others: tuple[int, ...]
) -> None:
    for due_ms in (3_600_000, *others):
        bench.schedule(due_ms, str(due_ms))
    bench.clock.advance(3_600_000)
    assert not bench.ticker.fire_due()
    bench.schedule(3_600_010, "new")
    ((armed_ms, _),) = bench.timers.waiting()
    assert armed_ms == 1_000_000 + 3_600_010
    bench.run(3_600_020)
    assert [item for _, item in bench.fired] == ["3600000", "new"]


async def test_on_a_real_loop_no_item_fires_early_and_all_fire_soon() -> None:
    def now_ms() -> int:
        return time.time_ns() // 1_000_000

    late_ms: list[int] = []
    done = asyncio.Event()

    def fire(dues_ms: list[int]) -> None:
        late_ms.extend(now_ms() - due_ms for due_ms in dues_ms)
        if len(late_ms) == 100:
            done.set()

    ticker: Ticker[int] = Ticker(now_ms, fire, fire_max=1_000)
    ticker.start(asyncio.get_running_loop())
    began_ms = now_ms()
    for n in range(100):
        ticker.schedule(began_ms + n * 3, began_ms + n * 3)
    await done.wait()
    ticker.stop()
    assert min(late_ms) >= 0
    assert sorted(late_ms)[90] < 1_000  # without a wake-up of its own an item would be up to SLEEP_MS_MAX late
