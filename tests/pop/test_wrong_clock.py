"""Deliveries and delayed messages while the machine's time of day is wrong, and after a jump was confirmed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.pop.core.deliveries import AckOutcome
from penstock.store.clock import MS_NS
from penstock.store.options import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Flag
from tests.clock import START_MS, Machine
from tests.pop.wiring import TOPIC, Parts

CONFIRM_MS = 10 * MINUTE_MS
"""The default of `ClockOptions.confirm_ms`."""


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def parts(tmp_path: Path, machine: Machine) -> Iterator[Parts]:
    opened = Parts(tmp_path / "data", machine.clock())
    opened.group()
    yield opened
    opened.close()


def elapse(machine: Machine, parts: Parts, ms: int) -> None:
    """Let time pass, with a check each second, or every ten seconds of a long time, and do what becomes due."""
    step_ms = SECOND_MS if ms <= MINUTE_MS else 10 * SECOND_MS
    steps, rest = divmod(ms, step_ms)
    for each in (*(step_ms for _ in range(steps)), rest):
        machine.elapse(each)
        parts.store.timekeeping.check()
        parts.settle()


def delay(parts: Parts, body: bytes, due_ms: int) -> int:
    """Store a message that is due at `due_ms`."""
    route = parts.store.router.route(TOPIC.encode())
    properties = encode_properties(Properties(deliver_at_ms=due_ms))
    position = parts.store.append_message(route, body, properties, 1 | Flag.DELAYED)
    parts.store.commit()
    return position


def popped(parts: Parts, invisible_ms: int = 30_000) -> list[tuple[bytes, int]]:
    """Pop from the group; return body and attempt of each message."""
    taken = parts.pop(32, invisible_ms)
    return [(one.body, one.attempt) for one in taken]


@pytest.mark.parametrize("wall_ms", [30 * DAY_MS, -HOUR_MS, -30 * DAY_MS])
@pytest.mark.parametrize("returns", [True, False])
def test_an_invisible_time_ends_when_it_has_elapsed_whatever_the_time_of_day(
    parts: Parts, machine: Machine, wall_ms: int, returns: bool
) -> None:
    parts.publish(b"one")
    assert popped(parts) == [(b"one", 1)]
    machine.set_wall(wall_ms)
    elapse(machine, parts, 5 * SECOND_MS)
    if returns:
        machine.set_wall(-wall_ms)
    elapse(machine, parts, 24 * SECOND_MS)
    assert popped(parts) == []
    elapse(machine, parts, 2 * SECOND_MS)
    assert popped(parts) == [(b"one", 2)]


@pytest.mark.parametrize("wall_ms", [30 * DAY_MS, -HOUR_MS])
def test_a_delay_of_ten_seconds_takes_ten_seconds_whatever_the_time_of_day(
    parts: Parts, machine: Machine, wall_ms: int
) -> None:
    machine.set_wall(wall_ms)
    elapse(machine, parts, SECOND_MS)
    delay(parts, b"later", parts.store.now_ms() + 10 * SECOND_MS)
    elapse(machine, parts, 9 * SECOND_MS)
    assert popped(parts) == []
    elapse(machine, parts, 2 * SECOND_MS)
    assert popped(parts) == [(b"later", 1)]


def test_no_timer_fires_in_an_unconfirmed_jump_also_across_a_restart(tmp_path: Path, parts: Parts, machine: Machine) -> None:
    delay(parts, b"tomorrow", parts.store.now_ms() + DAY_MS)
    parts.publish(b"one")
    assert popped(parts, HOUR_MS) == [(b"one", 1)]
    machine.set_wall(30 * DAY_MS)
    elapse(machine, parts, 5 * SECOND_MS)
    parts.store.timekeeping.close()
    parts.close()
    again = Parts(tmp_path / "data", machine.clock())
    elapse(machine, again, 5 * SECOND_MS)
    assert popped(again) == []
    machine.set_wall(-30 * DAY_MS)
    elapse(machine, again, HOUR_MS)
    assert popped(again, DAY_MS) == [(b"one", 2)]
    again.close()


def test_an_invisible_time_that_was_set_in_the_window_is_not_over_with_the_step(parts: Parts, machine: Machine) -> None:
    parts.publish(b"before", b"within")
    (before,) = parts.pop(1, HOUR_MS)
    elapse(machine, parts, 5 * SECOND_MS)
    machine.set_wall(30 * DAY_MS)
    elapse(machine, parts, 5 * SECOND_MS)
    (within,) = parts.pop(1, HOUR_MS)
    elapse(machine, parts, CONFIRM_MS)
    assert parts.store.timekeeping.steps == 1
    assert popped(parts) == [(b"before", 2)], "by the confirmed time it was invisible for thirty days"
    elapse(machine, parts, 59 * MINUTE_MS - CONFIRM_MS)
    assert parts.ack(within.handle) == [AckOutcome.OK]
    assert parts.ack(before.handle) != [AckOutcome.OK]


def test_a_moved_deadline_is_the_same_after_a_crash(parts: Parts, machine: Machine) -> None:
    parts.publish(b"one")
    machine.set_wall(30 * DAY_MS)
    elapse(machine, parts, SECOND_MS)
    parts.pop(1, HOUR_MS)
    parts.store.index.flush()
    elapse(machine, parts, CONFIRM_MS)
    deadlines = [checkpoint.deadline_ms for checkpoint in parts.core.checkpoints.values()]
    assert deadlines == [START_MS + SECOND_MS + HOUR_MS + 30 * DAY_MS]
    for name, keep_index in (("replayed", True), ("rebuilt", False)):
        again = parts.after_crash(name, keep_index=keep_index)
        assert [checkpoint.deadline_ms for checkpoint in again.core.checkpoints.values()] == deadlines
        again.close()


def test_a_delay_that_was_set_in_the_window_is_not_over_with_the_step_but_a_time_of_day_is(
    parts: Parts, machine: Machine
) -> None:
    delay(parts, b"before", parts.store.now_ms() + DAY_MS)
    elapse(machine, parts, 5 * SECOND_MS)
    machine.set_wall(30 * DAY_MS)
    elapse(machine, parts, 5 * SECOND_MS)
    delay(parts, b"in an hour", parts.store.now_ms() + HOUR_MS)
    delay(parts, b"by a right clock", machine.wall_ns // MS_NS + MINUTE_MS)
    elapse(machine, parts, CONFIRM_MS)
    assert sorted(popped(parts, DAY_MS)) == [(b"before", 1), (b"by a right clock", 1)]
    elapse(machine, parts, HOUR_MS - CONFIRM_MS - 10 * SECOND_MS)
    assert popped(parts) == []
    elapse(machine, parts, 20 * SECOND_MS)
    assert popped(parts) == [(b"in an hour", 1)]


def test_a_moved_delay_is_the_same_after_a_crash(parts: Parts, machine: Machine) -> None:
    machine.set_wall(30 * DAY_MS)
    elapse(machine, parts, SECOND_MS)
    position = delay(parts, b"in an hour", parts.store.now_ms() + HOUR_MS)
    parts.store.index.flush()
    elapse(machine, parts, CONFIRM_MS)
    due_ms = parts.delayed.due_ms(position)
    assert due_ms == START_MS + SECOND_MS + HOUR_MS + 30 * DAY_MS
    for name, keep_index in (("replayed", True), ("rebuilt", False)):
        again = parts.after_crash(name, keep_index=keep_index)
        assert again.delayed.due_ms(position) == due_ms
        again.close()


def test_a_message_that_was_stored_in_the_window_does_not_expire_with_the_step(parts: Parts, machine: Machine) -> None:
    now_ms = parts.store.now_ms()
    parts.publish(b"before", properties=Properties(expires_at_ms=now_ms + HOUR_MS))
    elapse(machine, parts, 5 * SECOND_MS)
    machine.set_wall(30 * DAY_MS)
    elapse(machine, parts, 5 * SECOND_MS)
    now_ms = parts.store.now_ms()
    parts.publish(b"an hour", properties=Properties(expires_at_ms=now_ms + HOUR_MS))
    parts.publish(b"five minutes", properties=Properties(expires_at_ms=now_ms + 5 * MINUTE_MS))
    elapse(machine, parts, CONFIRM_MS)
    assert popped(parts) == [(b"an hour", 1)]
    assert parts.core.counters.expired == 2


def test_deadlines_that_had_passed_before_the_step_are_not_moved(parts: Parts, machine: Machine) -> None:
    parts.create("slow", "plant/#", backoff=(20 * MINUTE_MS,))
    machine.set_wall(DAY_MS)
    elapse(machine, parts, SECOND_MS)
    parts.publish(b"one")
    parts.pop(1, MINUTE_MS, group="slow")
    elapse(machine, parts, CONFIRM_MS + SECOND_MS)
    assert parts.store.timekeeping.steps == 1
    assert [one.attempt for one in parts.pop(1, group="slow")] == [2]
