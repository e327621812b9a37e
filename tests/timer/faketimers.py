"""Timers of an event loop that a test runs."""

from __future__ import annotations

from collections.abc import Callable

from tests.clock import ManualClock


class FakeTimers:
    """The part of an event loop that alarms and sliced jobs use, with a clock that the test moves."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.armed: list[tuple[int, FakeTimer]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(callback)
        self.armed.append((self.clock.now_ms() + round(delay_s * 1000), timer))
        return timer

    def call_soon(self, callback: Callable[[], None]) -> FakeTimer:
        return self.call_later(0, callback)

    def waiting(self) -> list[tuple[int, FakeTimer]]:
        return sorted(((due_ms, timer) for due_ms, timer in self.armed if not timer.cancelled), key=lambda item: item[0])

    def run_until(self, now_ms: int) -> int:
        """Advance the time from timer to timer; return the number of timers that ran."""
        ran = 0
        while (waiting := self.waiting()) and waiting[0][0] <= now_ms:
            due_ms, timer = waiting[0]
            self.clock.advance(max(due_ms - self.clock.now_ms(), 0))
            timer.cancelled = True
            timer.callback()
            ran += 1
        self.clock.advance(now_ms - self.clock.now_ms())
        return ran


class FakeTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
