"""The job that does what is due of things that wait in rows of the index."""

from __future__ import annotations

from penstock.store.sliced import PAUSE_S
from penstock.timer.duejob import DueJob
from penstock.timer.ticker import RETRY_MS
from tests.clock import ManualClock
from tests.timer.faketimers import FakeTimers


class Bench:
    """A job on simulated timers, for things that are due at given times."""

    def __init__(self, *dues_ms: int) -> None:
        self.clock = ManualClock(1_000_000)
        self.timers = FakeTimers(self.clock)
        self.waiting = sorted(1_000_000 + due_ms for due_ms in dues_ms)
        self.done: list[tuple[int, int]] = []
        """When each thing was done, and when it was due."""
        self.slices = 0
        self.at_once = 1_000
        self.is_full = False
        self.held: set[int] = set()
        self.job = DueJob(
            self.clock.now_ms,
            self.clock,
            self._work,
            lambda after_ms: min((due_ms for due_ms in self.waiting if due_ms > after_ms), default=None),
        )

    def _work(self, until_s: float) -> bool:
        self.slices += 1
        due = [due_ms for due_ms in self.waiting if due_ms <= self.clock.now_ms()]
        for due_ms in () if self.is_full else [due_ms for due_ms in due if due_ms not in self.held][: self.at_once]:
            self.waiting.remove(due_ms)
            self.done.append((self.clock.now_ms() - 1_000_000, due_ms - 1_000_000))
        return not self.is_full and len(due) > self.at_once

    def start(self) -> None:
        self.job.start(self.timers)  # type: ignore[arg-type] # it uses call_later and call_soon only
        self.run(0)

    def add(self, due_ms: int) -> None:
        self.waiting.append(1_000_000 + due_ms)
        self.job.expect(1_000_000 + due_ms)

    def run(self, until_ms: int) -> int:
        return self.timers.run_until(1_000_000 + until_ms)


def test_each_thing_is_done_at_its_time_those_that_come_later_too() -> None:
    bench = Bench(2_140, 90_000)
    bench.start()
    bench.add(70)
    bench.add(2_139)
    bench.run(100_000)
    assert bench.done == [(70, 70), (2_139, 2_139), (2_140, 2_140), (90_000, 90_000)]


def test_what_was_due_before_the_start_is_done_at_the_start() -> None:
    bench = Bench(-5, -86_400_000)
    bench.start()
    assert bench.done == [(0, -86_400_000), (0, -5)]


def test_much_that_is_due_is_done_in_slices_with_pauses() -> None:
    bench = Bench(*[50] * 3_500)
    bench.start()
    bench.run(1_000)
    pause_ms = round(PAUSE_S * 1000)
    assert sorted({at_ms for at_ms, _ in bench.done}) == [50, 50 + pause_ms, 50 + 2 * pause_ms, 50 + 3 * pause_ms]


def test_what_has_no_room_is_tried_again_each_second_and_not_without_a_pause() -> None:
    bench = Bench(10)
    bench.start()
    bench.is_full = True
    bench.run(10 + 4 * RETRY_MS)
    assert bench.slices < 8
    bench.is_full = False
    bench.run(10 + 5 * RETRY_MS)
    assert bench.done == [(10 + 5 * RETRY_MS, 10)]


def test_what_has_to_wait_though_it_is_due_delays_nothing_else() -> None:
    bench = Bench(10, 2_345)
    bench.held = {1_000_010}
    bench.start()
    bench.run(2_999)
    assert bench.done == [(2_345, 2_345)]
    bench.held.clear()
    bench.run(2_999 + RETRY_MS)
    assert [due_ms for _, due_ms in bench.done] == [2_345, 10]


def test_nothing_is_armed_while_nothing_waits_and_nothing_is_done_after_the_stop() -> None:
    bench = Bench()
    bench.start()
    assert bench.timers.waiting() == []
    bench.add(10)
    bench.job.stop()
    bench.run(1_000)
    assert bench.done == []
