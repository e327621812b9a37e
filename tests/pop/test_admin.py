"""Operators create, change, reset, pause and delete groups, on a real store with a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.pop.core.deliveries import AckOutcome
from penstock.pop.core.groups import ResetTo
from penstock.pop.core.settings import ConsumerGroupSettings, ExponentialBackoff
from penstock.pop.errors import ExpressionInvalid, GroupBusy, GroupExists, GroupUnknown, RequestInvalid
from penstock.pop.options import PopOptions
from penstock.store.bodies import REFERENCE, backoff_code
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import BY_OPERATOR, Flag, Kind
from tests.pop.wiring import FILTER, GROUP, TOPIC, Parts

RESTARTS = [None, True, False]
"""No restart, a restart that keeps the index, and one that rebuilds it."""


def restarted(parts: Parts, keep_index: bool | None) -> Parts:
    return parts if keep_index is None else parts.after_crash("restarted", keep_index=keep_index)


def bodies(parts: Parts, messages_max: int = 100) -> list[bytes]:
    return [message.body for message in parts.pop(messages_max)]


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_settings_last(parts: Parts, keep_index: bool | None) -> None:
    all_settings = {
        "default": ConsumerGroupSettings(),
        "numbers": ConsumerGroupSettings(attempts_max=3, invisible_ms=5_000, in_flight_max=7, fifo=True, paused=True),
        "none": ConsumerGroupSettings(backoff=()),
        "steps": ConsumerGroupSettings(backoff=(1_000, 5_000)),
        "growing": ConsumerGroupSettings(backoff=ExponentialBackoff(100, 60_000, 1.5), expression="a || b"),
        "sql": ConsumerGroupSettings(expression="age > 3", expression_type="sql"),
    }
    for name, settings in all_settings.items():
        parts.groups.create(name, FILTER, "earliest", settings)
    parts.settle_queues()
    after = restarted(parts, keep_index)
    assert {name: after.group(name).settings for name in all_settings} == all_settings
    after.close()


def test_a_setting_out_of_bounds_is_refused_and_creates_nothing(parts: Parts) -> None:
    wrong: list[tuple[dict, str]] = [
        ({"attempts_max": 0}, "attempts_max"),
        ({"attempts_max": 65_536}, "attempts_max"),
        ({"invisible_ms": 0}, "invisible_ms"),
        ({"invisible_ms": 2**62}, "invisible_ms"),
        ({"in_flight_max": -1}, "in_flight_max"),
        ({"backoff": (-1,)}, "backoff"),
        ({"backoff": (1,) * 65}, "backoff"),
        ({"backoff": ExponentialBackoff(10, 5)}, "backoff.max_ms"),
        ({"backoff": ExponentialBackoff(10, 50, 0.5)}, "backoff.factor"),
        ({"backoff": ExponentialBackoff(10, 50, float("nan"))}, "backoff.factor"),
        ({"expression": "a || "}, "empty tag"),
        ({"expression": "a >", "expression_type": "sql"}, "character 4"),
        ({"expression": "x" * 9_000}, "bytes"),
    ]
    for settings, what in wrong:
        with pytest.raises(RequestInvalid, match=what):
            parts.create(**settings)
        assert list(parts.core.groups) == [], settings
    parts.create()
    for settings, what in wrong:
        with pytest.raises(RequestInvalid, match=what):
            parts.groups.update(GROUP, FILTER, lambda old: replace(old, **settings))  # noqa: B023 - called at once
        assert parts.group().settings == ConsumerGroupSettings(), settings


def test_an_expression_that_is_wrong_names_the_character(parts: Parts) -> None:
    with pytest.raises(ExpressionInvalid, match="character 7"):
        parts.create(expression="a = 1 ; DROP", expression_type="sql")


def test_a_group_is_created_once_and_again_only_with_the_same_settings(parts: Parts) -> None:
    group = parts.create(attempts_max=3)
    assert parts.create(attempts_max=3) is group
    with pytest.raises(GroupExists):
        parts.create(attempts_max=4)


def test_a_change_holds_for_each_filter_of_the_group_or_for_one(parts: Parts) -> None:
    first, second = parts.create(topic_filter="plant/+"), parts.create(topic_filter="plant/#")
    parts.groups.update(GROUP, "", lambda old: replace(old, attempts_max=5))
    assert (first.attempts_max, second.attempts_max) == (5, 5)
    parts.groups.update(GROUP, "plant/+", lambda old: replace(old, attempts_max=6))
    assert (first.attempts_max, second.attempts_max) == (6, 5)


@pytest.mark.parametrize("topic_filter", ["", "nowhere/#"])
def test_a_group_that_does_not_exist_is_told_so(parts: Parts, topic_filter: str) -> None:
    admin = parts.groups
    for call in (
        lambda: admin.find("nobody", topic_filter),
        lambda: admin.pause("nobody", topic_filter),
        lambda: admin.reset("nobody", topic_filter, ResetTo(end="latest")),
        lambda: admin.delete("nobody", topic_filter),
    ):
        with pytest.raises(GroupUnknown, match="nobody"):
            call()
    assert list(parts.core.groups) == []


def test_a_pop_creates_no_group_where_that_is_off(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "strict", pop=PopOptions(groups_auto_create=False))
    with pytest.raises(GroupUnknown, match="groups_auto_create"):
        parts.group()
    parts.create()
    assert parts.pop() == []
    parts.close()


@pytest.mark.parametrize(
    ("backoff", "waits_ms"),
    [((), [0, 0, 0]), ((500, 2_000), [500, 2_000, 2_000]), (ExponentialBackoff(1_000, 3_000), [1_000, 2_000, 3_000])],
)
def test_a_group_s_own_back_off_holds(parts: Parts, backoff: object, waits_ms: list[int]) -> None:
    parts.create(backoff=backoff)
    parts.publish(b"a")
    for attempt, wait_ms in enumerate(waits_ms, start=1):
        assert [message.attempt for message in parts.pop()] == [attempt]
        (checkpoint,) = parts.core.checkpoints.values()
        assert checkpoint.entry(0).backoff == backoff_code(wait_ms), "a reconciliation must know how long it may be away"
        parts.advance(10_000 + wait_ms - 1)
        assert parts.pop() == []
        parts.advance(1)
    assert [message.attempt for message in parts.pop()] == [len(waits_ms) + 1]


def test_a_back_off_grows_without_end_only_to_its_maximum() -> None:
    assert ExponentialBackoff(1_000, 60_000, 100.0).wait_ms(65_535) == 60_000


# --- pause ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_a_paused_group_gets_nothing_and_can_acknowledge_messages_in_flight(parts: Parts, keep_index: bool | None) -> None:
    parts.publish(b"a", b"b", b"c")
    acked, expires = parts.pop(2)
    parts.groups.pause(GROUP)
    parts.store.commit()
    after = restarted(parts, keep_index)
    assert after.pop() == []
    assert after.ack(acked.handle) == [AckOutcome.OK]
    after.advance(10_000)
    assert after.ack(expires.handle) == [AckOutcome.HANDLE_EXPIRED]
    assert after.pop() == []
    after.groups.resume(GROUP)
    assert sorted(bodies(after)) == [b"b", b"c"]
    after.close()


# --- reset ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_index", RESTARTS)
@pytest.mark.parametrize("fifo", [False, True])
def test_a_reset_to_earliest_gives_everything_again_and_voids_old_handles(
    parts: Parts, keep_index: bool | None, fifo: bool
) -> None:
    parts.create(fifo=fifo)
    for number in range(5):
        parts.publish(b"%d" % number, topic=f"plant/{number}/t")
    acked, out, back, *_ = parts.pop()
    parts.ack(acked.handle)
    parts.change(back.handle, 0)
    parts.settle()
    parts.groups.reset(GROUP, FILTER, ResetTo(end="earliest"))
    parts.store.commit()
    assert parts.group().in_flight == 0
    after = restarted(parts, keep_index)
    assert after.ack(out.handle) == [AckOutcome.HANDLE_EXPIRED]
    assert after.change(out.handle, 60_000)[0] is AckOutcome.HANDLE_EXPIRED
    again = after.pop()
    assert [(message.body, message.attempt) for message in again] == [(b"%d" % n, 1) for n in range(5)]
    assert after.ack(*(message.handle for message in again)) == [AckOutcome.OK] * 5
    after.advance(43_200_000)
    assert after.pop() == []
    assert after.core.checkpoints_open == 0
    after.close()


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_an_offset_is_reset_back_and_forward(parts: Parts, keep_index: bool | None) -> None:
    parts.group()
    stamps, positions = [], []
    for number in range(6):
        stamps.append(parts.clock.now_ms())
        positions += parts.publish(b"%d" % number)
        parts.advance(1_000)
    for to, first in (
        (ResetTo(time_ms=stamps[4]), 4),
        (ResetTo(time_ms=stamps[4] - 1), 4),
        (ResetTo(position=positions[2]), 2),
        (ResetTo(position=positions[2] + 1), 3),
        (ResetTo(time_ms=0), 0),
        (ResetTo(time_ms=2**60), 6),
        (ResetTo(position=2**60), 6),
        (ResetTo(end="latest"), 6),
        (ResetTo(end="earliest"), 0),
    ):
        parts.groups.reset(GROUP, FILTER, to)
        parts.store.commit()
        assert bodies(parts) == [b"%d" % number for number in range(first, 6)], to
    parts.groups.reset(GROUP, FILTER, ResetTo(position=positions[5]))
    parts.store.commit()
    after = restarted(parts, keep_index)
    after.publish(b"new")
    assert bodies(after) == [b"5", b"new"]
    after.close()


def test_a_reset_to_a_time_or_a_position_skips_nothing_among_messages_that_came_late(parts: Parts) -> None:
    parts.group()
    route = parts.store.router.route(TOPIC.encode())
    half = encode_properties(Properties(producer="orders"))
    halves = [parts.store.append_message(route, b"half %d" % n, half, 1 | Flag.HALF) for n in range(2)]
    due_ms = parts.clock.now_ms() + 3_500
    late = encode_properties(Properties(deliver_at_ms=due_ms))
    parts.store.append_message(route, b"late", late, 1 | Flag.DELAYED)
    stamps, came = [], []
    for number in range(7):
        parts.advance(1_000)
        came += [b"late"] if number == 3 else []
        stamps.append((parts.clock.now_ms(), parts.store.log.end, len(came)))
        if number in (3, 5):
            came.append(b"half %d" % (number == 5))
            parts.transactions.end(halves[number == 5], commit=True)
            parts.store.commit()
        came.append(b"%d" % number)
        parts.publish(came[-1])
    for time_ms, position, first in stamps:
        for to in (ResetTo(time_ms=time_ms), ResetTo(position=position)):
            parts.groups.reset(GROUP, FILTER, to)
            parts.store.commit()
            got = bodies(parts)
            # Messages that were committed or fired just before may come too.
            assert got[-len(came[first:]) :] == came[first:], to
            assert [body for body in got if body.isdigit()] == [body for body in came[first:] if body.isdigit()], to


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_a_group_begins_at_a_time(parts: Parts, keep_index: bool | None) -> None:
    topic_filters = (FILTER, "plant/+/temperature", "plant/1/temperature")
    for number in range(6):
        parts.advance(1_000)
        parts.publish(b"%d" % number)
    for topic_filter in topic_filters:
        parts.create(topic_filter=topic_filter, start=parts.clock.now_ms() - 1_500)
    after = restarted(parts, keep_index)
    after.publish(b"new")
    for topic_filter in topic_filters:
        assert [message.body for message in after.pop(topic_filter=topic_filter)] == [b"4", b"5", b"new"], topic_filter
    after.close()


def test_what_came_back_is_forgotten_by_a_reset(parts: Parts) -> None:
    parts.publish(b"a")
    parts.pop()
    parts.advance(10_000)
    assert parts.group().visible_retries == 1
    parts.groups.reset(GROUP, FILTER, ResetTo(end="latest"))
    parts.store.commit()
    assert parts.pop() == []


def test_a_reset_names_each_delivery_that_it_voids_so_that_a_reconciliation_finds_none_lost(parts: Parts) -> None:
    parts.publish(b"a", b"b", b"c")
    parts.ack(parts.pop(2)[0].handle)
    parts.pop(1)
    out = {(position, index) for position, checkpoint in parts.core.checkpoints.items() for index in checkpoint.open_indexes()}
    parts.groups.reset(GROUP, FILTER, ResetTo(end="latest"))
    parts.store.commit()
    resets = [record for record in parts.store.log.scan(0) if record.kind == Kind.GROUP_OFFSET_RESET]
    assert len(out) == 2
    assert {reference for record in resets for reference in REFERENCE.iter_unpack(record.body)} == out


def test_a_reset_of_more_than_fits_into_one_record_voids_all(parts: Parts) -> None:
    for _ in range(20):
        parts.publish(*([b"x"] * 1_000))
    while parts.pop(1_000):
        pass
    assert parts.group().in_flight == 20_000
    parts.groups.reset(GROUP, FILTER, ResetTo(end="latest"))
    parts.store.commit()
    assert (parts.group().in_flight, parts.core.checkpoints_open, parts.pop()) == (0, 0, [])


@pytest.mark.parametrize("to", [ResetTo(), ResetTo(end="latest", position=1), ResetTo(time_ms=-1), ResetTo(position=-5)])
def test_a_reset_to_no_place_is_refused(parts: Parts, to: ResetTo) -> None:
    parts.group()
    with pytest.raises(RequestInvalid):
        parts.groups.reset(GROUP, FILTER, to)


def test_a_reset_waits_for_the_filling_of_its_queue(parts: Parts) -> None:
    parts.publish(b"a", topic="plant/1")
    parts.core.groups.get_or_create(GROUP, "plant/+")
    with pytest.raises(GroupBusy, match="filled"):
        parts.groups.reset(GROUP, "plant/+", ResetTo(end="latest"))
    parts.settle_queues()
    parts.groups.reset(GROUP, "plant/+", ResetTo(end="latest"))


# --- delete -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_a_deleted_group_loses_its_queues_and_a_new_one_of_that_name_begins_anew(parts: Parts, keep_index: bool | None) -> None:
    parts.create(topic_filter="plant/+/temperature", attempts_max=1)
    queues = {queue.filter for queue in parts.store.queues}
    parts.publish(b"dead", b"out", b"waits")
    parts.pop(1, topic_filter="plant/+/temperature")
    parts.advance(10_000)
    (out,) = parts.pop(1, topic_filter="plant/+/temperature")
    end = parts.store.log.end
    parts.groups.delete(GROUP)
    parts.store.commit()
    # With two records, a crash could leave the first one alone, and a queue that is never dropped.
    assert [(record.kind, record.flags) for record in parts.store.log.scan(end)] == [(Kind.GROUP_DELETED, BY_OPERATOR)]
    after = restarted(parts, keep_index)
    assert list(after.core.groups) == []
    assert after.core.checkpoints_open == 0
    assert {queue.filter for queue in after.store.queues} == queues - {"plant/+/temperature", "$retry/1"} | {"plant/#"}
    assert after.ack(out.handle) == [AckOutcome.INVALID_HANDLE]
    after.advance(43_200_000)
    group = after.create(topic_filter="plant/+/temperature")
    assert (group.id, group.settings) == (2, ConsumerGroupSettings())
    again = after.pop(topic_filter="plant/+/temperature")
    assert [(message.body, message.attempt) for message in again] == [(b"dead", 1), (b"out", 1), (b"waits", 1)]
    assert after.ack(out.handle) == [AckOutcome.INVALID_HANDLE]
    assert after.dead_letters.list(GROUP) == []
    after.close()


def test_dead_letters_that_another_group_consumes_outlive_their_group(parts: Parts) -> None:
    parts.create(attempts_max=1)
    parts.publish(b"dead")
    parts.pop()
    parts.group("operators", f"$dlq/{GROUP}")
    parts.advance(10_000)
    parts.groups.delete(GROUP)
    parts.store.commit()
    assert [message.body for message in parts.pop(group="operators", topic_filter=f"$dlq/{GROUP}")] == [b"dead"]


# --- in flight --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_a_group_s_in_flight_limit_is_exact_after_a_restart(parts: Parts, keep_index: bool | None) -> None:
    parts.create(in_flight_max=3)
    parts.publish(*(b"%d" % n for n in range(10)))
    first = parts.pop()
    assert len(first) == 3
    parts.ack(first[0].handle)
    after = restarted(parts, keep_index)
    assert bodies(after) == [b"3"]
    assert bodies(after) == []
    after.close()


def test_a_snapshot_shows_the_backlog_of_a_group(parts: Parts) -> None:
    parts.create(attempts_max=2, backoff=(5_000,))
    parts.publish(b"dead", b"fails", b"out", b"waits")
    parts.advance(1_000)
    dead, fails, _ = parts.pop(3, 60_000)
    parts.core.deliveries.dead_letter(GROUP, [dead.handle])
    parts.advance(10_000)
    parts.change(fails.handle, 0)
    parts.advance(1_000)
    (found,) = parts.snapshots([parts.group()])
    assert (found.visible, found.in_flight, found.delayed, found.dead) == (1, 2, 1, 1)
    assert (found.oldest_ms, found.oldest_in_flight_ms) == (12_000, 11_000)
