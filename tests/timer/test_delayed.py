"""Delayed messages on a real store, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.store.errors import LimitExceeded
from penstock.store.histogram import LATENCY_BOUNDS_MS
from penstock.store.log.commitlog import CommitLog
from penstock.store.properties import Properties, encode_properties
from penstock.store.queues.latedispatches import Routing
from penstock.store.record import Flag, Kind
from penstock.store.store import Store
from penstock.timer import buckets
from penstock.timer.delayed import Recalled
from penstock.timer.entries import Entries
from penstock.timer.options import YEAR_MS, TimerOptions
from tests.clock import ManualClock
from tests.depth import DEPTH
from tests.pop.wiring import TOPIC, Parts
from tests.timer.faketimers import FakeTimers


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = Parts(tmp_path / "data")
    made.group()
    yield made
    made.close()


def delay(parts: Parts, body: bytes, delay_ms: int, *, topic: str = TOPIC, commit: bool = True) -> tuple[int, int]:
    """Store a message that is due in `delay_ms`; return its position and its due time."""
    due_ms = parts.clock.now_ms() + delay_ms
    route = parts.store.router.route(topic.encode())
    properties = encode_properties(Properties(deliver_at_ms=due_ms))
    position = parts.store.append_message(route, body, properties, 1 | Flag.DELAYED)
    if commit:
        parts.store.commit()
    return position, due_ms


def arrived(parts: Parts) -> list[bytes]:
    return [message.body for message in parts.pop(10_000)]


# --- firing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_ms", [1, 9, 10, 11, 59_999, 60_000, 60_001, 86_400_000, 10 * YEAR_MS])
def test_a_message_is_delivered_when_it_is_due_and_not_before(parts: Parts, delay_ms: int) -> None:
    position, due_ms = delay(parts, b"late", delay_ms)
    assert (len(parts.delayed), parts.delayed.due_ms(position)) == (1, due_ms)
    parts.advance(delay_ms - 1)
    assert arrived(parts) == []
    parts.advance(1)
    (message,) = parts.pop()
    assert (message.position, message.topic, message.body, message.attempt) == (position, TOPIC, b"late", 1)
    assert (len(parts.delayed), parts.delayed.due_ms(position), parts.delayed.fired) == (0, None, 1)


def test_messages_are_delivered_in_order_of_due_time_and_then_of_sending(parts: Parts) -> None:
    for name, delay_ms in (("c", 30), ("a", 10), ("b", 20), ("a2", 10), ("d", 90_000)):
        delay(parts, name.encode(), delay_ms)
    parts.advance(100_000)
    assert arrived(parts) == [b"a", b"a2", b"b", b"c", b"d"]


def test_a_message_due_in_the_turn_that_stores_it_is_not_lost(parts: Parts) -> None:
    delay(parts, b"now", 0, commit=False)
    assert not parts.delayed.fire_due()
    parts.store.commit()
    assert arrived(parts) == [b"now"]


def test_a_delayed_message_reaches_every_filter_that_exists_when_it_fires(parts: Parts) -> None:
    delay(parts, b"late", 1_000)
    parts.group("audit", "plant/+/temperature")
    parts.advance(1_000)
    assert [message.body for message in parts.pop(group="audit", topic_filter="plant/+/temperature")] == [b"late"]
    assert arrived(parts) == [b"late"]


def test_many_messages_due_at_the_same_time_fire_in_portions(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "paced", timer=TimerOptions(fire_max=7))
    parts.group()
    for n in range(20):
        delay(parts, b"%d" % n, 1_000)
    parts.clock.advance(1_000)  # type: ignore[attr-defined]
    fired = []
    more = True
    while more:
        more = parts.delayed.fire_due()
        fired.append(parts.delayed.fired)
        parts.store.commit()
    assert fired == [7, 14, 20]
    assert arrived(parts) == [b"%d" % n for n in range(20)]
    parts.close()


def test_a_damaged_message_stops_neither_the_others_nor_the_next_start(parts: Parts) -> None:
    delay(parts, b"before", 10)
    damaged, _ = delay(parts, b"damaged", 10)
    after, _ = delay(parts, b"after", 10)
    parts.damage(damaged, after - damaged)
    parts.advance(10)
    assert arrived(parts) == [b"before", b"after"]
    assert len(parts.delayed) == 0
    parts.advance(86_400_000)
    assert parts.delayed.fired == 3, "its consumers find the damage"


def test_a_message_whose_record_was_lost_fires_with_the_record_that_says_so(parts: Parts) -> None:
    """A repair has replaced the message, the root of its topic and who caused it by a record of kind DAMAGED."""
    store = parts.store
    damaged = store.append(Kind.DAMAGED, body=b"x" * 100)
    routing = Routing.of([(damaged + 10, 70, 0)], ["lost/topic"])
    about = routing.properties(now=store.now_ms(), late=[1], accounts=[4711])
    store.append(Kind.TIMER_FIRED, body=routing.body(), properties=about)
    store.commit()
    assert (parts.delayed.fired, len(parts.delayed)) == (1, 0)
    delay(parts, b"next", 10)
    parts.advance(10)
    assert arrived(parts) == [b"next"]


def test_firing_reads_no_record(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (b"a", b"b"):
        delay(parts, name, 1_000)
    parts.clock.advance(1_000)  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.delattr(Store, "read")
        patch.delattr(CommitLog, "record")
        parts.delayed.fire_due()
    parts.settle()
    assert arrived(parts) == [b"a", b"b"]


def test_a_leap_of_the_clock_sorts_no_message_of_a_month_into_a_row_of_its_own(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "FRESH_MAX", 1_000)
    for number in range(buckets.FRESH_MAX):
        delay(parts, b"%d" % number, (number * 7_919 % 30_000) * 86_400, commit=False)
    parts.store.commit()
    encode, encoded = Entries.encoded, list[int]()

    def counted(entries: Entries) -> bytes:
        encoded.append(len(entries))
        return encode(entries)

    monkeypatch.setattr(Entries, "encoded", counted)
    parts.advance(31 * 86_400_000)
    assert parts.delayed.fired == buckets.FRESH_MAX
    assert len(encoded) < 100


def test_messages_of_many_topics_come_in_order_of_due_time(parts: Parts) -> None:
    for number, delay_ms in enumerate((30, 10, 20, 10, 40)):
        delay(parts, b"%d" % number, delay_ms, topic=f"plant/{number % 2}/temperature")
    parts.advance(50)
    assert arrived(parts) == [b"1", b"3", b"2", b"0", b"4"]


def test_the_lateness_of_each_message_is_counted(parts: Parts) -> None:
    for delay_ms in (1_000, 1_000, 1_007, 1_010):
        delay(parts, b"a", delay_ms)
    parts.advance(1_010)
    lateness = parts.delayed.lateness
    assert lateness.sum == 10 + 10 + 3
    counted = dict(zip(LATENCY_BOUNDS_MS, lateness.counts, strict=False))
    assert {bound: count for bound, count in counted.items() if count} == {1: 1, 5: 1, 10: 2}


# --- recall ---------------------------------------------------------------------------------------------------------


def test_a_recalled_message_is_never_delivered(parts: Parts) -> None:
    kept = delay(parts, b"kept", 1_000)
    recalled = delay(parts, b"recalled", 1_000)
    assert parts.delayed.recall(*recalled) is Recalled.CANCELLED
    assert parts.delayed.recall(*recalled) is Recalled.ALREADY_CANCELLED
    assert (len(parts.delayed), parts.delayed.cancelled) == (1, 1)
    parts.advance(86_400_000)
    assert arrived(parts) == [b"kept"]
    assert parts.delayed.recall(*recalled) is Recalled.ALREADY_CANCELLED
    assert parts.delayed.recall(*kept) is Recalled.ALREADY_FIRED


def test_messages_are_recalled_together_with_one_record(parts: Parts) -> None:
    fired, *named = [delay(parts, b"%d" % number, delay_ms) for number, delay_ms in enumerate((5, 10, 10, 86_400_000, 10))]
    parts.advance(5)
    first, second, third, left = named
    kinds = [record.kind for record in parts.store.log.scan(0)]
    outcomes = parts.delayed.recall_all([first, fired, third, first, (10**9, 0), second])
    parts.store.commit()
    expected = ("CANCELLED", "ALREADY_FIRED", "CANCELLED", "ALREADY_CANCELLED", "UNKNOWN", "CANCELLED")
    assert [outcome.name for outcome in outcomes] == [*expected]
    assert [record.kind for record in parts.store.log.scan(0)] == [*kinds, Kind.TIMER_CANCELLED]
    assert (len(parts.delayed), parts.delayed.cancelled) == (1, 3)
    assert parts.delayed.recall_all([second, left]) == [Recalled.ALREADY_CANCELLED, Recalled.CANCELLED]
    assert parts.delayed.recall_all([]) == []


def test_a_message_can_be_recalled_until_it_has_fired(parts: Parts) -> None:
    message = delay(parts, b"a", 1_000)
    parts.clock.advance(5_000)  # type: ignore[attr-defined] # it is due, but nobody came to fire it
    assert parts.delayed.recall(*message) is Recalled.CANCELLED
    parts.settle()
    assert arrived(parts) == []


def test_a_message_that_was_never_delayed_is_unknown(parts: Parts) -> None:
    assert parts.delayed.recall(parts.store.log.end, parts.clock.now_ms()) is Recalled.UNKNOWN
    assert parts.delayed.recall(2**60, 0) is Recalled.UNKNOWN


@pytest.mark.parametrize("keep_index", [True, False])
def test_a_second_recall_gets_the_same_answer_after_a_restart(parts: Parts, keep_index: bool) -> None:
    recalled = delay(parts, b"recalled", 1_000)
    fired = delay(parts, b"fired", 1_000)
    parts.delayed.recall(*recalled)
    parts.advance(1_000)
    parts.store.index.flush()
    after = parts.after_crash("again", keep_index=keep_index)
    assert after.delayed.recall(*recalled) is Recalled.ALREADY_CANCELLED
    assert after.delayed.recall(*fired) is Recalled.ALREADY_FIRED
    after.close()


def test_after_a_firing_by_hand_on_a_clock_set_forward_new_messages_fire_at_their_time(parts: Parts) -> None:
    clock = parts.clock
    assert isinstance(clock, ManualClock)
    timers = FakeTimers(clock)
    parts.delayed.start(timers)  # type: ignore[arg-type] # it uses call_later only
    timers.run_until(clock.now_ms())
    delay(parts, b"old", 3_600_000)
    parts.advance(3_600_000)
    assert parts.delayed.fired == 1
    _, due_ms = delay(parts, b"new", 10)
    ((armed_ms, _),) = timers.waiting()
    assert armed_ms == due_ms
    timers.run_until(due_ms + 10)
    assert parts.delayed.fired == 2


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_messages_beyond_the_limit_of_pending_ones_are_refused(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "small", timer=TimerOptions(pending_max=2))
    parts.delayed.admit()
    first = delay(parts, b"a", 1_000)
    delay(parts, b"b", 2_000)
    with pytest.raises(LimitExceeded, match=r"timer\.pending_max"):
        parts.delayed.admit()
    parts.delayed.recall(*first)
    parts.delayed.admit()
    delay(parts, b"c", 2_000)
    with pytest.raises(LimitExceeded):
        parts.delayed.admit()
    parts.advance(2_000)
    parts.delayed.admit()
    parts.close()


def test_recalled_messages_take_no_memory_when_their_time_has_passed(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "FRESH_MAX", 8)
    for _ in range(100):
        parts.delayed.recall(*delay(parts, b"recalled", 60_000))
        parts.advance(60_000)
    assert parts.delayed.in_memory < 20


# --- restart --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [True, False])
@pytest.mark.parametrize("keep_index", [True, False])
@pytest.mark.parametrize("outage_ms", [0, 10_000_000])
def test_a_restart_before_messages_are_due_fires_each_once(
    parts: Parts, flushed: bool, keep_index: bool, outage_ms: int
) -> None:
    delay(parts, b"second", 2_000)
    delay(parts, b"first", 1_000)
    if flushed:
        parts.store.index.flush()
    recalled = delay(parts, b"recalled", 1_500)
    parts.delayed.recall(*recalled)
    parts.store.commit()
    after = parts.after_crash("again", keep_index=keep_index)
    assert len(after.delayed) == 2
    after.clock.advance(outage_ms)  # type: ignore[attr-defined]
    after.advance(999)
    assert arrived(after) == ([b"first", b"second"] if outage_ms else [])
    after.advance(2_000)
    assert arrived(after) == ([] if outage_ms else [b"first", b"second"])
    after.advance(59_000)
    returned = []
    while popped := after.pop():
        returned += [message.body for message in popped]
        after.ack(*(message.handle for message in popped))
    assert sorted(returned) == [b"first", b"second"]  # each returns once, and nothing fires a second time
    assert after.delayed.fired == 2
    after.close()


@pytest.mark.parametrize("flushed", ["before", "after", "never"])
@pytest.mark.parametrize("keep_index", [True, False])
def test_a_restart_does_not_fire_messages_again(parts: Parts, flushed: str, keep_index: bool) -> None:
    delay(parts, b"a", 1_000)
    if flushed == "before":
        parts.store.index.flush()
    parts.advance(1_000)
    if flushed == "after":
        parts.store.index.flush()
    after = parts.after_crash("again", keep_index=keep_index)
    assert len(after.delayed) == 0
    after.advance(86_400_000)
    assert arrived(after) == [b"a"]
    assert arrived(after) == []
    after.close()


def test_a_firing_that_was_not_written_is_repeated(parts: Parts) -> None:
    delay(parts, b"a", 1_000)
    parts.clock.advance(1_000)  # type: ignore[attr-defined]
    parts.delayed.fire_due()  # decided, but the crash comes before the end of the turn
    after = parts.after_crash("again")
    after.settle()
    assert arrived(after) == [b"a"]
    after.advance(1_000)
    assert after.delayed.fired == 1
    after.close()


def test_a_recall_that_was_not_written_has_no_effect(parts: Parts) -> None:
    message = delay(parts, b"a", 1_000)
    parts.delayed.recall(*message)
    after = parts.after_crash("again")
    after.advance(1_000)
    assert arrived(after) == [b"a"]
    after.close()


events = st.lists(
    st.one_of(
        st.tuples(st.just("delay"), st.integers(0, 130_000)),
        st.tuples(st.just("advance"), st.integers(0, 70_000)),
        st.tuples(st.just("recall"), st.integers(0, 20)),
        st.tuples(st.sampled_from(["flush", "crash", "crash without index"]), st.just(0)),
    ),
    max_size=25,
)


@pytest.mark.slow
@settings(max_examples=8 * DEPTH)
@given(steps=events)
def test_after_any_crashes_each_message_fires_once_unless_it_was_recalled(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    directory = tmp_path_factory.mktemp("delayed")
    parts = Parts(directory / "0")
    parts.group()
    stored: list[tuple[int, int]] = []
    recalled: set[int] = set()
    came: list[int] = []
    for at, (step, number) in enumerate([*steps, ("advance", 1_000_000)], 1):
        if step == "delay":
            stored.append(delay(parts, b"x", number))
        elif step == "advance":
            parts.advance(number)
        elif step == "recall" and number < len(stored):
            position, due_ms = stored[number]
            outcome = parts.delayed.recall(position, due_ms)
            parts.store.commit()
            assert (outcome is Recalled.CANCELLED) == (position not in recalled and position not in came)
            if outcome is Recalled.CANCELLED:
                recalled.add(position)
        elif step == "flush":
            parts.store.index.flush()
        elif step.startswith("crash"):
            parts = parts.after_crash(str(at), keep_index=step == "crash")
        parts.settle()
        now_ms = parts.clock.now_ms()
        messages = parts.pop(1_000, 43_200_000)
        parts.ack(*(message.handle for message in messages))
        came += [message.position for message in messages]
        assert sorted(came) == sorted(p for p, due_ms in stored if due_ms <= now_ms and p not in recalled)
    parts.close()
