"""Delayed messages in buckets, with rows of few messages, against a dict of all that is pending."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.backup.comparison import compare_timers
from penstock.store.errors import IndexDamaged
from penstock.store.options import MINUTE_MS, StoreOptions
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import STEP_FIXED, Flag, Kind
from penstock.store.retention.retention import Retention
from penstock.timer import buckets, delayed, listing, window
from penstock.timer.delayed import Recalled
from penstock.timer.entries import PENDING_DTYPE, Entries
from penstock.timer.listing import TimerListing, TimerQuery
from penstock.timer.options import TimerOptions
from tests.depth import DEPTH
from tests.pop.wiring import Parts
from tests.store.wiring import copy_left

DAY_MS = 24 * 60 * MINUTE_MS
TOPICS = [f"plant/{number}/temperature" for number in range(5)]

delays = st.one_of(
    st.integers(0, 50),
    st.integers(0, 2 * MINUTE_MS),
    st.integers(0, 2 * 60 * MINUTE_MS),
    st.integers(0, 3 * DAY_MS),
    st.integers(0, 70 * DAY_MS),
)


class TimerMachine(RuleBasedStateMachine):
    """Delays, recalls, crashes, restarts and steps of the clock."""

    directory: Path
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).runs += 1
        self.home = self.directory / str(self.runs)
        self.home.mkdir()
        self.parts = Parts(
            self.home / "0", timer=TimerOptions(fire_max=4), store=StoreOptions(segment_bytes=1 << 16, retention_ms=0)
        )
        self.parts.group()
        self.crashes = 0
        self.pending: dict[int, int] = {}
        """Due time of each message that is pending, by position."""
        self.named: list[tuple[int, int]] = []
        """Position and due time of each message, as its handle says."""
        self.recalled: set[int] = set()
        self.fired: set[int] = set()
        self.window = (self.parts.clock.now_ms(), 0)

    @rule(delay_ms=delays, count=st.integers(1, 12), topic=st.sampled_from(TOPICS))
    def delay(self, delay_ms: int, count: int, topic: str) -> None:
        store = self.parts.store
        for number in range(count):
            due_ms = self.parts.clock.now_ms() + delay_ms + number
            encoded = encode_properties(Properties(deliver_at_ms=due_ms, tag="t" * (number % 2)))
            position = store.append_message(store.router.route(topic.encode()), b"x", encoded, 1 | Flag.DELAYED)
            self.pending[position] = due_ms
            self.named.append((position, due_ms))
        store.commit()

    @rule(data=st.data())
    @precondition(lambda self: self.named)
    def recall(self, data: st.DataObject) -> None:
        position, due_ms = data.draw(st.sampled_from(self.named))
        outcome = self.parts.delayed.recall(position, due_ms)
        if position in self.pending:
            assert outcome is Recalled.CANCELLED
            del self.pending[position]
            self.recalled.add(position)
        elif position in self.recalled:
            assert outcome is Recalled.ALREADY_CANCELLED
        else:
            assert outcome is Recalled.ALREADY_FIRED
        self.parts.store.commit()

    @rule(ms=delays)
    def advance(self, ms: int) -> None:
        self.parts.clock.advance(ms)  # type: ignore[attr-defined]
        self.settle()

    @rule(turns=st.integers(1, 5))
    def fire_some(self, turns: int) -> None:
        for _ in range(turns):
            self.parts.delayed.fire_due()
            self.parts.store.commit()
        self.take()

    @rule()
    def flush(self) -> None:
        self.parts.store.index.flush()

    @rule(keep_index=st.booleans(), commit=st.booleans())
    def crash(self, keep_index: bool, commit: bool) -> None:
        if not commit:
            self.parts.delayed.fire_due()  # decided, but the crash comes before the end of the turn
        self.crashes += 1
        self.parts = self.parts.after_crash(str(self.crashes), keep_index=keep_index)

    @rule()
    def begin_window(self) -> None:
        """From now on, the time of day is ahead of the node's time."""
        self.window = (self.parts.clock.now_ms(), self.parts.store.log.end)

    @rule(step_ms=st.integers(5_000, 40 * DAY_MS))
    def step(self, step_ms: int) -> None:
        self.note_step(step_ms)
        self.parts.store.commit()
        self.settle()

    def note_step(self, step_ms: int) -> None:
        (begin_ms, begin), store = self.window, self.parts.store
        end_ms = store.now_ms()
        store.append(Kind.CLOCK_STEPPED, STEP_FIXED.pack(begin_ms, begin, step_ms))
        for position, due_ms in self.pending.items():
            if position >= begin and end_ms < due_ms < begin_ms + step_ms:
                self.pending[position] += step_ms
        self.parts.clock.advance(step_ms)  # type: ignore[attr-defined]
        self.window = (self.parts.clock.now_ms(), store.log.end)

    @rule()
    def compare_with_a_rebuilt_index(self) -> None:
        self.crashes += 1
        self.parts = self.parts.after_crash(f"{self.crashes}", keep_index=True)
        self.crashes += 1
        again = self.parts.after_crash(f"{self.crashes}", keep_index=False)
        stored = Parts(self.parts.data_dir, self.parts.clock, timer=self.parts.options[1], store=self.parts.options[2])
        differences = list(compare_timers(stored.store.index, again.store.index, 0))
        stored.close()
        self.parts = again
        assert differences == []

    @rule(rows_max=st.integers(1, 9))
    def list_what_is_pending(self, rows_max: int) -> None:
        listing_of = TimerListing(self.parts.store, self.parts.delayed.buckets, self.parts.timer_keys)

        async def listed() -> list[tuple[int, int]]:
            page = await listing_of.page(TimerQuery(), rows_max=rows_max)
            found = page.timers
            while page.next_token:
                page = await listing_of.page(TimerQuery(), page.next_token, rows_max)
                found += page.timers
            return [(timer.due_ms, timer.position) for timer in found]

        assert asyncio.run(listed()) == sorted((due_ms, position) for position, due_ms in self.pending.items())

    @invariant()
    def what_is_pending_is_what_is_carried_forward(self) -> None:
        parts = self.parts
        assert len(parts.delayed) == len(self.pending)
        assert sorted(position for position, _ in parts.delayed.live(parts.store.log.end)) == sorted(self.pending)

    def settle(self) -> None:
        while self.parts.delayed.fire_due():
            self.parts.store.commit()
        self.take()
        now_ms = self.parts.clock.now_ms()
        assert not [position for position, due_ms in self.pending.items() if due_ms <= now_ms]
        minute = now_ms // MINUTE_MS
        ends = ((minute + 2) * MINUTE_MS, (minute + 61) * MINUTE_MS, (minute // 60 + 25) * 60 * MINUTE_MS)
        expected = [sum(due_ms < end_ms for due_ms in self.pending.values()) for end_ms in ends]
        assert [*self.parts.delayed.due_counts()] == expected

    def take(self) -> None:
        """Take what has come. It was due and pending, and is in order within its topic."""
        self.parts.store.commit()
        messages = self.parts.pop(1_000, 43_200_000)
        self.parts.ack(*(message.handle for message in messages))
        last: dict[str, tuple[int, int]] = {}
        for message in messages:
            due_ms = self.pending.pop(message.position)
            self.fired.add(message.position)
            assert due_ms <= self.parts.clock.now_ms()
            assert (due_ms, message.position) > last.get(message.topic, (-1, -1))
            last[message.topic] = (due_ms, message.position)

    def teardown(self) -> None:
        self.parts.clock.advance(200 * DAY_MS)  # type: ignore[attr-defined]
        self.settle()
        assert not self.pending
        self.parts.close()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TimerMachine:
    monkeypatch.setattr(buckets, "FRESH_MAX", 4)
    TimerMachine.directory = tmp_path
    return TimerMachine()


def test_a_step_of_the_clock_may_move_the_first_message_of_a_row_within_its_bucket(machine: TimerMachine) -> None:
    machine.delay(DAY_MS, 1, TOPICS[0])
    machine.delay(3 * DAY_MS, 3, TOPICS[0])
    machine.note_step(2 * DAY_MS)
    machine.delay(DAY_MS, 3, TOPICS[1])
    machine.what_is_pending_is_what_is_carried_forward()
    machine.teardown()


def test_two_steps_of_the_clock_in_one_commit_move_each_message_once(machine: TimerMachine) -> None:
    machine.delay(DAY_MS, 2, TOPICS[0])
    machine.delay(3 * DAY_MS, 3, TOPICS[0])
    machine.note_step(2 * DAY_MS)
    machine.window = (machine.parts.clock.now_ms() - 1, 0)
    machine.note_step(DAY_MS + 60_000)
    machine.parts.store.commit()
    machine.settle()
    machine.compare_with_a_rebuilt_index()
    machine.teardown()


def test_a_message_that_is_recalled_before_a_step_of_the_clock_in_one_commit_is_counted_nowhere(machine: TimerMachine) -> None:
    machine.delay(DAY_MS, 2, TOPICS[0])
    position, due_ms = machine.named[0]
    assert machine.parts.delayed.recall(position, due_ms) is Recalled.CANCELLED
    del machine.pending[position]
    machine.recalled.add(position)
    machine.note_step(2 * DAY_MS)
    machine.parts.store.commit()
    machine.compare_with_a_rebuilt_index()
    machine.settle()
    machine.teardown()


@pytest.mark.parametrize("seconds", [(5, 50), (50, 5)], ids=["the first of a row is moved", "the first of a row stays"])
def test_a_step_of_the_clock_while_a_minute_is_loaded_makes_nobody_wait(
    machine: TimerMachine, monkeypatch: pytest.MonkeyPatch, seconds: tuple[int, int]
) -> None:
    monkeypatch.setattr(delayed, "OPENED_MAX", 1)
    begin_ms = (machine.parts.clock.now_ms() // MINUTE_MS + 3) * MINUTE_MS
    for _ in range(4):
        machine.delay(begin_ms + seconds[0] * 1_000 - machine.parts.clock.now_ms(), 1, TOPICS[0])
        machine.delay(begin_ms + seconds[1] * 1_000 - machine.parts.clock.now_ms(), 3, TOPICS[0])
    machine.advance(begin_ms - 6_000 - machine.parts.clock.now_ms())
    machine.window = (machine.parts.clock.now_ms(), 0)
    machine.parts.clock.advance(3_000)  # type: ignore[attr-defined]
    machine.fire_some(1)
    assert machine.parts.delayed.in_memory < 16, "one row is loaded at a time"
    machine.note_step(20_000)
    machine.parts.store.commit()
    machine.advance(50_000)
    machine.teardown()


@pytest.mark.parametrize("forgets", [False, True])
def test_a_recalled_message_of_a_day_that_has_fired_in_part_stays_recalled_after_a_crash(
    machine: TimerMachine, forgets: bool
) -> None:
    parts = machine.parts
    begin_ms = (parts.clock.now_ms() // DAY_MS + 2) * DAY_MS
    for hour in (25, 26, 27, 28, 0, 1, 2, 240):
        machine.delay(begin_ms + hour * 3_600_000 - parts.clock.now_ms(), 1, TOPICS[hour == 25])
    position, due_ms = machine.named[0]
    assert parts.delayed.recall(position, due_ms) is Recalled.CANCELLED
    del machine.pending[position]
    machine.recalled.add(position)
    parts.store.commit()
    parts.clock.advance(70 * DAY_MS)  # type: ignore[attr-defined]
    machine.fire_some(1)
    assert len(machine.pending) == 3
    if forgets:
        parts.delayed.buckets.forget_recalled(parts.clock.now_ms())
        parts.store.append_message(parts.store.router.route(b"other"), b"x")
        parts.store.commit()
    machine.flush()
    machine.crash(keep_index=True, commit=True)
    machine.settle()
    machine.teardown()


def test_what_is_carried_forward_is_complete_although_buckets_are_opened_meanwhile(machine: TimerMachine) -> None:
    for days in range(1, 40):
        machine.delay(days * DAY_MS, 1, TOPICS[0])
    live = machine.parts.delayed.live(machine.parts.store.log.end)
    found = [next(live)[0]]
    machine.advance(DAY_MS // 2)
    assert sorted(found + [position for position, _ in live]) == sorted(machine.pending)
    machine.teardown()


def test_messages_of_other_topics_do_not_wait_for_a_flood(machine: TimerMachine) -> None:
    for _ in range(20):
        machine.delay(0, 12, TOPICS[0])
    flood = set(machine.pending)
    machine.delay(0, 1, TOPICS[1])
    machine.parts.clock.advance(100)  # type: ignore[attr-defined]
    while not machine.fired:
        machine.fire_some(1)
    assert len(flood & set(machine.pending)) > 200
    assert not set(machine.pending) - flood
    machine.teardown()


def test_a_crash_right_after_a_segment_has_ended_between_two_firings_of_a_turn_loses_nothing(
    machine: TimerMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, left = machine.parts, machine.home / "left"
    machine.delay(3 * MINUTE_MS, 8, TOPICS[0])
    machine.advance(3 * MINUTE_MS - 1_000)
    parts.clock.advance(2_000)  # type: ignore[attr-defined]

    def carry(retention: Retention, entries: object) -> None:
        end = parts.store.log.segments()[-1][0]
        while parts.store.log.segments()[-1][0] == end:
            parts.store.append_message(parts.store.router.route(b"other"), b"x" * 4_096)
        parts.store.index.flush()
        copy_left(parts.data_dir, left)

    parts.delayed.fire_due()
    monkeypatch.setattr(Retention, "carry_expiring", carry)
    parts.delayed.fire_due()
    monkeypatch.undo()
    after = Parts(left, parts.clock, timer=parts.options[1], store=parts.options[2])
    after.settle()
    assert {message.position for message in after.pop(1_000)} >= set(machine.pending)
    after.close()
    machine.settle()
    machine.teardown()


def test_a_row_that_can_not_be_decoded_lets_the_next_start_rebuild_the_index(machine: TimerMachine) -> None:
    machine.delay(3 * MINUTE_MS, 8, TOPICS[0])
    index = machine.parts.store.index
    key, value = next(iter(index.rows(buckets.CHUNK)))
    batch = index.batch()
    batch.put(key, value[:-1] + bytes([value[-1] ^ 1]))
    index.write(batch)
    with pytest.raises(IndexDamaged, match=f"row {key.hex()}.*the next start rebuilds it"):
        machine.advance(3 * MINUTE_MS)
    machine.crash(keep_index=True, commit=True)
    assert machine.parts.recovery.rebuilt
    machine.settle()
    machine.teardown()


@pytest.mark.slow
def test_whatever_happens_each_message_fires_once_and_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "FRESH_MAX", 7)
    monkeypatch.setattr(delayed, "OPENED_MAX", 3)
    monkeypatch.setattr(listing, "SELECTED_MAX", 12)
    monkeypatch.setattr(listing, "SCANNED_MAX", 15)
    monkeypatch.setattr(window, "OPENED_MAX", 9)
    monkeypatch.setattr(window, "SINGLE_MAX", 5)
    TimerMachine.directory = tmp_path
    case: Any = TimerMachine.TestCase
    case.settings = settings(
        max_examples=5 * DEPTH,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    case().runTest()


@given(
    offsets=st.lists(st.integers(0, 32 * DAY_MS - 1) | st.integers(0, 2 * 60 * MINUTE_MS), max_size=50),
    width=st.integers(1, 3),
    bucket=st.integers(0, 1_000),
    minute=st.integers(0, 60),
    hour=st.integers(0, 24),
)
def test_the_counts_of_a_bucket_say_how_many_are_due_before_a_minute_or_an_hour(
    offsets: list[int], width: int, bucket: int, minute: int, hour: int
) -> None:
    begin_ms = bucket * buckets.WIDTHS_MS[width]
    rows = np.zeros(len(offsets), dtype=PENDING_DTYPE)
    rows["due"] = [begin_ms + offset % buckets.WIDTHS_MS[width] for offset in offsets]
    total, *parts = buckets.counts_of(Entries(rows, [b"a"]), width, bucket).tolist()
    assert total == len(offsets)
    for end_ms in (minute * MINUTE_MS, hour * 60 * MINUTE_MS):
        before = sum(number for number, edge in zip(parts, buckets.EDGES_MS.tolist(), strict=False) if edge < end_ms)
        assert before == sum(due_ms < begin_ms + end_ms for due_ms in rows["due"].tolist())
