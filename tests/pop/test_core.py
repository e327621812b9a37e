"""The core of POP on a real store, with a clock that the test moves."""

from __future__ import annotations

import gc
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pop.core.checkpoint import Checkpoint
from penstock.pop.core.deliveries import AckOutcome, VisibilityChange
from penstock.pop.core.selection import READ_AHEAD, RESPONSE_BYTES
from penstock.pop.errors import GroupInvalid, Overloaded, PopError
from penstock.pop.options import PopOptions
from penstock.store.errors import TopicInvalid
from penstock.store.options import KIB, MIB, StoreOptions
from penstock.timer.options import TimerOptions
from tests.depth import DEPTH
from tests.pop.wiring import FILTER, GROUP, TOPIC, Parts


def bodies_of(parts: Parts, messages_max: int = 100, invisible_ms: int = 10_000, **names: str) -> list[bytes]:
    return [message.body for message in parts.pop(messages_max, invisible_ms, **names)]


def tuned(tmp_path: Path, *, timer: TimerOptions | None = None, store: StoreOptions | None = None, **options: object) -> Parts:
    return Parts(tmp_path / "tuned", pop=PopOptions(**options), timer=timer, store=store)  # type: ignore[arg-type]


# --- visible and invisible --------------------------------------------------------------------------------------------


def test_a_message_handed_out_is_invisible_until_its_time_is_over(parts: Parts) -> None:
    parts.publish(b"a", b"b")
    assert [bodies_of(parts, 1) for _ in range(3)] == [[b"a"], [b"b"], []]
    parts.advance(9_999)
    assert bodies_of(parts) == []
    parts.advance(1)
    assert [(message.body, message.attempt) for message in parts.pop()] == [(b"a", 2), (b"b", 2)]


def test_a_pop_takes_no_more_than_it_asked_for(parts: Parts) -> None:
    parts.publish(*(b"%d" % n for n in range(5)))
    assert [bodies_of(parts, 2) for _ in range(4)] == [[b"0", b"1"], [b"2", b"3"], [b"4"], []]


@pytest.mark.parametrize("invisible_ms", [1, 59_999, 60_000, 60_001, 43_200_000])
def test_no_deadline_is_early_and_none_is_missed_however_far_it_is(parts: Parts, invisible_ms: int) -> None:
    parts.publish(b"a")
    assert len(parts.pop(1, invisible_ms)) == 1
    parts.advance(invisible_ms - 1)
    assert parts.pop() == []
    parts.advance(1)
    assert [message.attempt for message in parts.pop()] == [2]


def test_an_acknowledged_message_never_comes_back(parts: Parts) -> None:
    parts.publish(b"a", b"b", b"c")
    first, second, _ = parts.pop()
    assert parts.ack(first.handle, second.handle) == [AckOutcome.OK, AckOutcome.OK]
    parts.advance(10_000)
    assert bodies_of(parts) == [b"c"]
    parts.advance(43_200_000)
    assert bodies_of(parts) == [b"c"]


def test_a_closed_checkpoint_takes_no_memory_long_before_its_deadline(parts: Parts) -> None:
    invisible_ms = 43_200_000
    parts.publish(b"a")
    (message,) = parts.pop(1, invisible_ms)
    assert parts.core.checkpoints_open == 1
    assert len(_with_entries(parts, invisible_ms)) == 1
    parts.ack(message.handle)
    assert parts.core.checkpoints_open == 0
    assert _with_entries(parts, invisible_ms) == []
    parts.advance(invisible_ms)
    assert parts.core.counters.revived == 0


def _with_entries(parts: Parts, invisible_ms: int) -> list[Checkpoint]:
    """Return the checkpoints in memory that have entries and are due in so many ms."""
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, Checkpoint)]
    return [each for each in found if each.body and each.deadline_ms == parts.clock.now_ms() + invisible_ms]


def test_many_deadlines_of_one_instant_come_in_portions_and_in_order(tmp_path: Path) -> None:
    parts = tuned(tmp_path, timer=TimerOptions(fire_max=4))
    parts.publish(*(b"%d" % number for number in range(30)))
    popped = [body for _ in range(30) for body in bodies_of(parts, 1)]
    parts.clock.advance(10_000)  # type: ignore[attr-defined]
    portions: list[int] = []
    while len(portions) < 8:
        parts.core.fire_due()
        portions.append(parts.core.counters.revived)
    assert portions == [4, 8, 12, 16, 20, 24, 28, 30]
    parts.settle()
    assert bodies_of(parts) == popped


# --- handles ----------------------------------------------------------------------------------------------------------


def test_a_handle_is_good_once(parts: Parts) -> None:
    parts.publish(b"a", b"b")
    first, second = parts.pop()
    assert parts.ack(first.handle, first.handle) == [AckOutcome.OK, AckOutcome.ALREADY_ACKED]
    assert parts.ack(first.handle) == [AckOutcome.ALREADY_ACKED]
    assert parts.ack(second.handle) == [AckOutcome.OK]  # the checkpoint is closed now
    assert parts.ack(first.handle, second.handle) == [AckOutcome.ALREADY_ACKED, AckOutcome.ALREADY_ACKED]
    assert parts.core.counters.acked == 2


def test_an_expired_handle_changes_nothing(parts: Parts) -> None:
    parts.publish(b"a")
    (stale,) = parts.pop()
    parts.clock.advance(10_000)  # type: ignore[attr-defined]
    assert parts.ack(stale.handle) == [
        AckOutcome.HANDLE_EXPIRED
    ]  # the handle expires at the deadline, even before the message is revived
    parts.settle()
    (again,) = parts.pop()
    assert parts.ack(stale.handle) == [AckOutcome.HANDLE_EXPIRED]
    assert parts.change(stale.handle, 60_000) == (AckOutcome.HANDLE_EXPIRED, stale.handle)
    assert parts.ack(again.handle) == [AckOutcome.OK]


def test_a_handle_of_another_group_is_refused_and_changes_nothing(parts: Parts) -> None:
    parts.publish(b"a")
    (ours,) = parts.pop()
    (theirs,) = parts.pop(group="audit")
    assert parts.ack(theirs.handle) == [AckOutcome.INVALID_HANDLE]
    assert parts.ack(ours.handle, group="nobody") == [AckOutcome.INVALID_HANDLE]
    assert parts.change(theirs.handle, 0) == (AckOutcome.INVALID_HANDLE, theirs.handle)
    assert parts.ack(theirs.handle, group="audit") == [AckOutcome.OK]


def test_a_forged_handle_is_refused_and_the_others_of_the_call_go_on(parts: Parts) -> None:
    parts.publish(b"a", b"b")
    first, second = parts.pop()
    forged = first.handle[:-1] + ("0" if first.handle[-1] != "0" else "1")
    assert parts.ack(forged, second.handle, "", "nonsense") == [
        AckOutcome.INVALID_HANDLE,
        AckOutcome.OK,
        AckOutcome.INVALID_HANDLE,
        AckOutcome.INVALID_HANDLE,
    ]
    assert parts.ack(first.handle) == [AckOutcome.OK]


def test_a_closed_checkpoint_does_not_keep_its_entries(parts: Parts) -> None:
    parts.publish(b"a")
    (message,) = parts.pop()
    (checkpoint,) = parts.core.checkpoints
    parts.ack(message.handle)
    settled = parts.core._state.checkpoints.closed.get(checkpoint)
    assert settled is not None
    assert settled.body == b""


# --- revival ----------------------------------------------------------------------------------------------------------


def test_the_last_attempt_ends_among_the_dead_letters_once(tmp_path: Path) -> None:
    parts = tuned(tmp_path, attempts_max=3)
    (position,) = parts.publish(b"poison")
    attempts = []
    while messages := parts.pop():
        attempts += [message.attempt for message in messages]
        parts.advance(10_000)
    assert attempts == [1, 2, 3]
    dead = parts.pop(group="operators", topic_filter=f"$dlq/{GROUP}")
    assert [(message.position, message.body, message.topic, message.attempt) for message in dead] == [
        (position, b"poison", TOPIC, 1)
    ]
    parts.advance(43_200_000)
    assert parts.pop() == []
    assert parts.core.counters.dead_lettered == 1
    assert parts.group().in_flight == 0
    parts.close()


def test_ten_messages_that_fail_twice_each_are_twenty_retries_and_ten_successes(parts: Parts) -> None:
    parts.publish(*(b"%d" % n for n in range(10)))
    succeeded: list[bytes] = []
    retries = 0
    for _ in range(4):
        for message in parts.pop():
            if message.attempt == 3:
                assert parts.ack(message.handle) == [AckOutcome.OK]
                succeeded.append(message.body)
            else:
                parts.change(message.handle, 0)
                retries += 1
        parts.settle()
    assert sorted(succeeded) == [b"%d" % n for n in range(10)]
    assert (retries, parts.core.counters.revived) == (20, 20)


def test_a_failed_attempt_waits_for_its_back_off(tmp_path: Path) -> None:
    parts = tuned(tmp_path, retry_backoff_ms=(1_000, 5_000))
    parts.publish(b"a")
    for attempt, wait_ms in ((1, 1_000), (2, 5_000), (3, 5_000)):
        assert [message.attempt for message in parts.pop()] == [attempt]
        parts.advance(10_000 + wait_ms - 1)
        assert parts.pop() == []
        parts.advance(1)
    assert [message.attempt for message in parts.pop()] == [4]
    parts.close()


def test_a_nack_waits_for_the_back_off_too_and_its_handle_is_void_meanwhile(tmp_path: Path) -> None:
    parts = tuned(tmp_path, retry_backoff_ms=(1_000,))
    parts.publish(b"a")
    (message,) = parts.pop()
    outcome, handle = parts.change(message.handle, 0)
    assert outcome is AckOutcome.OK
    parts.advance(999)
    assert parts.pop() == []
    assert parts.ack(handle) == [AckOutcome.HANDLE_EXPIRED]
    parts.advance(1)
    assert [again.attempt for again in parts.pop()] == [2]
    parts.close()


def test_messages_due_at_one_instant_are_revived_in_portions_that_fit_into_segments(tmp_path: Path) -> None:
    parts = tuned(
        tmp_path,
        messages_max=1_000,
        timer=TimerOptions(fire_max=300),
        store=StoreOptions(segment_bytes=64 * KIB),
    )
    for _ in range(6):
        parts.publish(*([b"x"] * 1_000))
    handed_out = 0
    while messages := parts.pop(1_000):
        handed_out += len(messages)
    assert handed_out == 6_000
    parts.clock.advance(10_000)  # type: ignore[attr-defined]
    portions: list[int] = []
    more = True
    while more:
        before = parts.core.counters.revived
        more = parts.core.fire_due()
        portions.append(parts.core.counters.revived - before)
        parts.store.commit()
    assert sum(portions) == 6_000
    assert max(portions) <= 1_000 + 300  # a checkpoint is not split
    assert parts.group().visible_retries == 6_000
    parts.close()


@pytest.mark.nightly
def test_more_revived_at_once_than_a_segment_holds_references_of(tmp_path: Path) -> None:
    parts = tuned(
        tmp_path,
        messages_max=1_000,
        timer=TimerOptions(fire_max=1_000_000),
        store=StoreOptions(segment_bytes=MIB // 4),
    )
    for _ in range(23):
        parts.publish(*([b"x"] * 1_000))
        parts.pop(1_000)
    parts.advance(10_000)  # 23,000 references are 270 KiB
    assert parts.group().visible_retries == 23_000
    parts.close()


# --- change of invisible time -----------------------------------------------------------------------------------------


def test_a_nack_returns_the_message_at_once_as_a_failed_attempt(parts: Parts) -> None:
    parts.publish(b"a", b"b")
    first, second = parts.pop()
    assert parts.change(second.handle, 0)[0] is AckOutcome.OK
    parts.settle()
    assert [(message.body, message.attempt) for message in parts.pop()] == [(b"b", 2)]
    assert parts.ack(first.handle) == [AckOutcome.OK]


@pytest.mark.parametrize("invisible_ms", [1, 600_000])
def test_a_new_deadline_counts_from_the_change_and_is_no_attempt(parts: Parts, invisible_ms: int) -> None:
    parts.publish(b"a")
    (message,) = parts.pop()
    parts.advance(4_000)
    assert parts.change(message.handle, invisible_ms)[0] is AckOutcome.OK
    parts.advance(invisible_ms - 1)
    assert parts.pop() == []
    parts.advance(1)
    assert [again.attempt for again in parts.pop()] == [2]


def test_a_change_voids_the_old_handle_and_the_new_one_acknowledges(parts: Parts) -> None:
    parts.publish(b"a")
    (message,) = parts.pop()
    _, second = parts.change(message.handle, 20_000)
    _, third = parts.change(second, 30_000)
    assert len({message.handle, second, third}) == 3
    assert parts.ack(message.handle, second) == [AckOutcome.HANDLE_REPLACED, AckOutcome.HANDLE_REPLACED]
    assert parts.change(message.handle, 0) == (AckOutcome.HANDLE_REPLACED, message.handle)
    parts.advance(29_999)
    assert parts.ack(third) == [AckOutcome.OK]
    parts.advance(43_200_000)
    assert parts.pop() == []


@pytest.mark.parametrize(("first_ms", "second_ms"), [(0, 0), (5_000, 0), (0, 60_000)])
def test_two_changes_of_one_delivery_in_one_call_are_one(parts: Parts, first_ms: int, second_ms: int) -> None:
    parts.publish(b"a")
    (message,) = parts.pop()
    changes = [VisibilityChange(message.handle, first_ms), VisibilityChange(message.handle, second_ms)]
    (first, _), (second, handle) = parts.core.deliveries.change_invisible(GROUP, changes)
    assert first is AckOutcome.OK
    assert (second is not AckOutcome.OK, handle) == (True, message.handle)


@pytest.mark.parametrize("invisible_ms", [-1, 12 * 3_600_000 + 1])
def test_an_invisible_time_out_of_bounds_is_refused_and_the_handle_stays_good(parts: Parts, invisible_ms: int) -> None:
    parts.publish(b"a")
    (message,) = parts.pop()
    assert parts.change(message.handle, invisible_ms) == (AckOutcome.INVALID_INVISIBLE_TIME, message.handle)
    assert parts.ack(message.handle) == [AckOutcome.OK]


@pytest.mark.parametrize("delay_ms", [0, 500])
def test_suspending_is_not_counted_as_an_attempt(tmp_path: Path, delay_ms: int) -> None:
    parts = tuned(tmp_path, attempts_max=2)
    parts.publish(b"a")
    for _ in range(10):
        (message,) = parts.pop()
        assert message.attempt == 1
        assert parts.change(message.handle, delay_ms, suspend=True)[0] is AckOutcome.OK
        if delay_ms:
            parts.advance(delay_ms - 1)
            assert parts.pop() == []
        parts.advance(1)
    assert parts.core.counters.dead_lettered == 0
    parts.close()


def test_a_failed_attempt_counts_after_a_suspension(tmp_path: Path) -> None:
    parts = tuned(tmp_path, attempts_max=2)
    parts.publish(b"a")
    parts.change(parts.pop()[0].handle, 0)
    parts.settle()
    parts.change(parts.pop()[0].handle, 0, suspend=True)
    parts.settle()
    (message,) = parts.pop()
    assert message.attempt == 2
    parts.advance(10_000)
    assert parts.pop() == []
    assert parts.core.counters.dead_lettered == 1
    parts.close()


# --- groups -----------------------------------------------------------------------------------------------------------


def test_each_message_goes_to_each_group(parts: Parts) -> None:
    parts.publish(b"a")
    (billing,) = parts.pop()
    (audit,) = parts.pop(group="audit")
    assert parts.ack(billing.handle) == [AckOutcome.OK]
    parts.advance(10_000)
    assert [(message.body, message.attempt) for message in parts.pop(group="audit")] == [(audit.body, 2)]
    assert parts.pop() == []


def test_a_group_has_a_cursor_for_each_of_its_filters_and_may_acknowledge_all_in_one_call(parts: Parts) -> None:
    parts.publish(b"a")
    parts.publish(b"b", topic="plant/2/pressure")
    (temperature,) = parts.pop(topic_filter="plant/+/temperature")
    (pressure,) = parts.pop(topic_filter="plant/2/#")
    assert (temperature.body, pressure.body) == (b"a", b"b")
    assert parts.ack(temperature.handle, pressure.handle) == [AckOutcome.OK, AckOutcome.OK]


def test_a_group_that_starts_at_earliest_gets_all_that_the_log_has(parts: Parts) -> None:
    before = [b"%d" % n for n in range(1_000)]
    parts.publish(*before)
    parts.publish(b"other", topic="plant/1/pressure")
    parts.group(topic_filter="plant/+/temperature")
    parts.publish(b"after")
    assert bodies_of(parts, 16_384, topic_filter="plant/+/temperature") == [*before, b"after"]


@pytest.mark.parametrize("topic_filter", [FILTER, "plant/+/temperature", TOPIC])
def test_a_group_that_starts_at_latest_gets_what_comes_after_it(parts: Parts, topic_filter: str) -> None:
    parts.publish(b"before")
    parts.group("late", topic_filter, "latest")
    parts.publish(b"after")
    assert bodies_of(parts, group="late", topic_filter=topic_filter) == [b"after"]


def test_where_a_group_starts_is_decided_once(parts: Parts) -> None:
    parts.publish(b"a")
    parts.group(start="earliest")
    assert parts.core.groups.get_or_create(GROUP, FILTER, "latest") is parts.group()
    assert bodies_of(parts) == [b"a"]


def test_a_group_may_not_be_called_anything(parts: Parts) -> None:
    for name in ("", " ", "a b ", "a/b", "a#", "+", "$dlq", "a\n", "a\0b", "x" * 256, "é" * 128):
        with pytest.raises(GroupInvalid):
            parts.core.groups.get_or_create(name, FILTER)
        assert list(parts.core.groups) == [], name


def test_a_group_may_not_pop_what_is_no_filter(parts: Parts) -> None:
    for topic_filter in ("", "a/#/b", "a+/b", "a\0b", "#/", "x" * 5_000, "/" * 200):
        with pytest.raises(TopicInvalid):
            parts.core.groups.get_or_create(GROUP, topic_filter)
        assert list(parts.core.groups) == [], topic_filter


def test_a_group_may_pop_the_dead_letters_of_another_group_and_nothing_else_of_the_nodes(parts: Parts) -> None:
    for topic_filter in ("$SYS/#", "$retry/1", "$dlq/", "$dlq/#", "$dlq/a/b", "$dlq", f"$dlq/{GROUP}"):
        with pytest.raises(PopError):
            parts.core.groups.get_or_create(GROUP, topic_filter)
        assert list(parts.core.groups) == [], topic_filter


def test_more_groups_than_allowed_are_refused_and_those_that_exist_go_on(tmp_path: Path) -> None:
    parts = tuned(tmp_path, groups_max=2)
    parts.publish(b"a")
    parts.group("one")
    parts.group("two")
    with pytest.raises(Overloaded, match=r"pop\.groups_max"):
        parts.core.groups.get_or_create("three", FILTER)
    assert bodies_of(parts, group="two") == [b"a"]
    parts.close()


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_at_the_in_flight_limit_a_group_gets_nothing_until_it_acknowledges(tmp_path: Path) -> None:
    parts = tuned(tmp_path, in_flight_max=3)
    parts.publish(*(b"%d" % n for n in range(5)))
    first = parts.pop()
    assert [message.body for message in first] == [b"0", b"1", b"2"]
    assert parts.pop() == []
    parts.ack(first[0].handle)
    assert bodies_of(parts) == [b"3"]
    parts.change(first[1].handle, 0)
    assert bodies_of(parts) == [b"4"], "a message that was returned counts no more"
    parts.settle()
    assert parts.pop() == []
    assert parts.group().in_flight == 3
    parts.close()


@pytest.mark.parametrize("room", [1, 2, 3, 10])
def test_retries_and_new_messages_are_served_in_turn(parts: Parts, room: int) -> None:
    parts.publish(*([b"retry"] * 30))
    parts.fail()
    parts.publish(*([b"new"] * 30))
    served = [message.body for _ in range(20 // room) for message in parts.pop(room)]
    assert abs(served.count(b"new") - served.count(b"retry")) <= 1
    rest = bodies_of(parts, 1_000)
    assert (served + rest).count(b"new") == 30
    assert (served + rest).count(b"retry") == 30


def test_large_new_messages_do_not_starve_retries(tmp_path: Path) -> None:
    parts = tuned(tmp_path, store=StoreOptions(segment_bytes=64 * MIB))
    parts.publish(b"retry")
    parts.pop()
    parts.advance(10_000)
    parts.publish(*([bytes(MIB)] * 12))
    served = [bodies_of(parts, 8) for _ in range(2)]
    assert b"retry" in served[0] + served[1]
    parts.close()


def test_a_pop_stops_at_the_bytes_of_an_answer_but_takes_one_message_of_any_size(tmp_path: Path) -> None:
    parts = tuned(tmp_path, store=StoreOptions(segment_bytes=64 * MIB))
    large = bytes(RESPONSE_BYTES * 2)
    parts.publish(b"small", large, *([bytes(MIB - 100)] * 7))
    sizes = [[len(body) for body in bodies_of(parts)] for _ in range(6)]
    assert sizes == [[5], [len(large)], [MIB - 100] * 3, [MIB - 100] * 3, [MIB - 100], []]
    parts.close()


def test_a_record_that_cannot_be_read_does_not_stop_the_others(parts: Parts) -> None:
    positions = parts.publish(b"a", b"damaged", b"c")
    parts.damage(positions[1], positions[2] - positions[1])
    first, last = parts.pop()
    assert (first.body, last.body) == (b"a", b"c")
    assert parts.group().in_flight == 2
    assert parts.ack(first.handle, last.handle) == [AckOutcome.OK, AckOutcome.OK]
    parts.advance(43_200_000)
    assert parts.pop() == []
    assert parts.core.counters.dead_lettered == 1


def test_no_two_options_make_a_pop_hand_out_nothing_and_count_it(parts: Parts) -> None:
    group = parts.group()
    assert parts.core.popper.pop(group, 100, 1_000) is None
    parts.publish(b"a")
    assert parts.core.popper.pop(group, 0, 1_000) is None
    assert parts.core.checkpoints_open == 0


# --- requeue ----------------------------------------------------------------------------------------------------------


def test_what_is_released_is_visible_at_once_and_is_no_attempt(parts: Parts) -> None:
    parts.publish(b"a", b"b")
    taken = parts.core.popper.pop(parts.group(), 10, 10_000)
    assert taken is not None
    first, second = parts.delivered(taken)
    parts.ack(first.handle)
    parts.core.deliveries.requeue(taken.checkpoint)
    parts.core.deliveries.requeue(taken.checkpoint)
    parts.store.commit()
    assert [(message.body, message.attempt) for message in parts.pop()] == [(b"b", 1)]
    assert parts.ack(second.handle) == [AckOutcome.HANDLE_EXPIRED]


# --- restart ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_index", [True, False])
@pytest.mark.parametrize("flushed", [True, False])
def test_a_restart_keeps_what_is_in_flight_acknowledged_extended_and_dead(
    tmp_path: Path, keep_index: bool, flushed: bool
) -> None:
    parts = tuned(tmp_path, attempts_max=2)
    parts.publish(b"dead", b"acked", b"extended", b"open")
    dead, acked, extended, _ = parts.pop()
    parts.change(dead.handle, 0)
    parts.settle()
    parts.change(parts.pop()[0].handle, 0)
    parts.settle()
    parts.publish(b"new")
    parts.ack(acked.handle)
    if flushed:
        parts.store.index.flush()
    _, handle = parts.change(extended.handle, 50_000)
    after = parts.after_crash("again", keep_index=keep_index)
    group = after.group()
    assert group.in_flight == 2
    assert after.core.checkpoints_open == 2
    assert bodies_of(after) == [b"new"]
    after.advance(10_000)
    assert [(message.body, message.attempt) for message in after.pop()] == [(b"open", 2), (b"new", 2)]
    assert after.ack(acked.handle)[0] in (
        AckOutcome.ALREADY_ACKED,
        AckOutcome.HANDLE_EXPIRED,
    )  # a closed checkpoint may be forgotten
    assert after.ack(handle) == [AckOutcome.OK]
    assert bodies_of(after, group="operators", topic_filter=f"$dlq/{GROUP}") == [b"dead"]
    after.close()


def test_what_became_due_while_nobody_ran_is_revived_at_the_start(parts: Parts, tmp_path: Path) -> None:
    parts.publish(b"a")
    parts.pop()
    after = parts.after_crash("again")
    after.advance(86_400_000)
    assert [message.attempt for message in after.pop()] == [2]
    after.close()


def test_a_handle_of_a_checkpoint_that_a_crash_cut_off_does_not_name_its_successor(parts: Parts, tmp_path: Path) -> None:
    parts.publish(b"a", b"b")
    parts.group()
    before = parts.store.log.written
    (lost,) = parts.pop(1)
    length = parts.store.log.written - before
    after = parts.after_crash("again", keep_index=False)
    after.close()
    (after.data_dir / "synced").unlink()  # as if the node had not stopped in order
    # The crash destroyed the checkpoint, which may happen before the consumer gets a response.
    segment = next((after.data_dir / "commitlog").iterdir())
    data = segment.read_bytes()
    segment.write_bytes(data[:before] + bytes(length) + data[before + length :])
    parts.clock.advance(5)  # type: ignore[attr-defined]
    cut = Parts(after.data_dir, parts.clock)
    (successor,) = cut.pop(1)
    assert (successor.position, cut.store.log.written) == (lost.position, before + length)
    assert cut.ack(lost.handle) == [AckOutcome.HANDLE_EXPIRED]
    assert cut.ack(successor.handle) == [AckOutcome.OK]
    cut.close()


@settings(max_examples=10 * DEPTH)
@given(st.lists(st.tuples(st.integers(0, READ_AHEAD), st.integers(0, READ_AHEAD)), max_size=6))
def test_whatever_the_sizes_of_batches_each_message_is_handed_out_once_in_order(steps: list[tuple[int, int]]) -> None:
    with TemporaryDirectory() as directory:
        parts = Parts(Path(directory) / "data")
        group = parts.group()
        bodies = [b"%d" % n for n in range(sum(come for come, _ in steps))]
        taken: list[bytes] = []
        published = 0
        for come, room in steps:
            parts.publish(*bodies[published : published + come])
            published += come
            taken += [message.body for message in parts.pop(room)]
            assert group.cursor == len(taken)
        assert group.in_flight == len(taken)
        taken += [message.body for message in parts.pop(len(bodies))]
        assert taken == bodies
        assert group.ahead == (0, b"")  # no entries are kept if no poll waits for them
        parts.close()
