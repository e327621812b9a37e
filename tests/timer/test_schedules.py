"""Schedules on a real store, with a clock that the test moves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.store.errors import LimitExceeded, TopicInvalid
from penstock.store.log.segment import LOG_DIRECTORY
from penstock.store.log.syncmark import FILE as SYNCED
from penstock.store.options import KIB, SECOND_MS, StoreOptions
from penstock.store.properties import decode_properties
from penstock.store.record import Flag, Kind, Record
from penstock.timer.errors import RecurrenceInvalid
from penstock.timer.options import TimerOptions
from penstock.timer.schedule import GRACE_MS, SCHEDULE_BYTES_MAX, Missed, ScheduleDefinition
from penstock.timer.schedules import OCCURRENCES_AT_ONCE_MAX, Schedule
from tests.clock import ManualClock
from tests.depth import DEPTH
from tests.pop.wiring import TOPIC, Parts

HOUR_MS = 3_600 * SECOND_MS


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = Parts(tmp_path / "data")
    made.group()
    yield made
    made.close()


def put(parts: Parts, name: str = "s", **fields: Any) -> Schedule:
    """Create a schedule that occurs each minute, unless `fields` have another rule."""
    if not fields.keys() & {"every_ms", "cron", "rrule"}:
        fields["every_ms"] = 60 * SECOND_MS
    schedule = parts.schedules.put(ScheduleDefinition(**{"name": name, "topic": TOPIC, "body": b"x", **fields}))
    parts.store.commit()
    return schedule


def arrived(parts: Parts) -> list[bytes]:
    found = []
    while messages := parts.pop(1_000):
        found += [message.body for message in messages]
        parts.ack(*(message.handle for message in messages))
    return found


def sent_by(parts: Parts) -> list[tuple[str, int, int]]:
    """Return the messages of schedules in the log: name, time of the occurrence, and when the message was stored."""
    found = []
    for record in parts.store.log.scan(0):
        if record.kind == Kind.MESSAGE and record.flags & Flag.SCHEDULED:
            about = dict(decode_properties(record.properties).user)
            found.append((about["schedule"], int(about["occurrence-ms"]), record.store_ms))
    return found


def occurrences(parts: Parts, name: str = "s") -> list[int]:
    return [occurrence for of, occurrence, _ in sent_by(parts) if of == name]


def record_at(parts: Parts, position: int) -> Record:
    return parts.store.log.record(position)


# --- occurrences --------------------------------------------------------------------------------------------------------


def test_a_schedule_sends_at_its_start_and_then_every_so_many_ms(parts: Parts) -> None:
    start = parts.clock.now_ms()
    schedule = put(parts, every_ms=250, start_ms=start + 1_000)
    parts.advance(999)
    assert arrived(parts) == []
    parts.advance(1)
    assert arrived(parts) == [b"x"]
    for _ in range(10):
        parts.advance(250)
    assert occurrences(parts) == [start + 1_000 + 250 * n for n in range(11)]
    assert all(occurrence == stored for _, occurrence, stored in sent_by(parts))
    assert (schedule.state.sent, schedule.state.last_ms, schedule.state.next_ms) == (11, start + 3_500, start + 3_750)


def test_a_message_has_what_the_schedule_says_and_names_its_occurrence(parts: Parts) -> None:
    put(
        parts,
        properties=[("unit", "C")],
        tag="hot",
        message_group="g",
        content_type="text/plain",
        expire_after_ms=5_000,
        is_template=True,
        body=b"{{schedule}} {{number}} {{occurrence}} {{occurrence:%d.%m.%Y}} {{occurrence_ms}} {not} {{schedule}}",
        cron="0 0 * * *",
        zone="Europe/Berlin",
    )  # fmt: skip
    parts.advance(2_800_000)
    (message,) = parts.pop()
    record = record_at(parts, message.position)
    about = decode_properties(record.properties)
    ms = 1_700_002_800_000  # 15 November 2023, midnight in Berlin
    assert message.body.decode() == f"s 1 2023-11-15T00:00:00+01:00 15.11.2023 {ms} {{not}} s"
    assert about.user == [("unit", "C"), ("schedule", "s"), ("occurrence-ms", str(ms))]
    assert (about.tag, about.message_group, about.content_type) == ("hot", "g", "text/plain")
    assert about.expires_at_ms == record.store_ms + 5_000
    assert (record.flags & Flag.QOS_MASK, message.topic) == (1, TOPIC)


def test_a_body_that_is_no_template_is_sent_as_it_is(parts: Parts) -> None:
    put(parts, body=b"\xff{{occurrence}}{{x}}")
    parts.advance(60_000)
    assert arrived(parts) == [b"\xff{{occurrence}}{{x}}"] * 2  # one at once, and one after a minute


def test_a_schedule_ends_at_its_end_or_after_its_count(parts: Parts) -> None:
    start = parts.clock.now_ms()
    by_end = put(parts, "end", end_ms=start + 120_000)
    by_count = put(parts, "count", count=2)
    by_rule = put(parts, "rule", rrule="FREQ=DAILY;COUNT=2", start_ms=start)
    for _ in range(6):
        parts.advance(60_000)
    parts.advance(24 * HOUR_MS)
    assert occurrences(parts, "end") == [start, start + 60_000, start + 120_000]
    assert occurrences(parts, "count") == [start, start + 60_000]
    assert len(occurrences(parts, "rule")) == 1, "the second was missed by some minutes"
    assert [each.state.next_ms for each in (by_end, by_count, by_rule)] == [0, 0, 0]
    assert len(parts.schedules) == 3, "they stay until they are deleted"


def test_each_occurrence_of_a_day_with_25_hours_is_sent_once(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "data", ManualClock(1_792_879_200_000))  # 25 October 2026, midnight in Berlin
    put(parts, "hourly", cron="*/30 * * * *", zone="Europe/Berlin")
    put(parts, "nightly", cron="30 2 * * *", zone="Europe/Berlin")
    parts.settle()
    for _ in range(26 * 6):
        parts.advance(10 * 60_000)
    assert len(occurrences(parts, "hourly")) == 53
    assert len(set(occurrences(parts, "hourly"))) == 53
    assert occurrences(parts, "nightly") == [1_792_879_200_000 + 9_000_000], "at the first of the two"
    parts.close()


# --- missed occurrences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missed", "expected"), [("skip", [10]), ("once", [1, 10]), ("latest", [9, 10]), ("all", [*range(1, 11)])]
)
@pytest.mark.parametrize("is_down", [True, False])
def test_missed_occurrences_are_sent_as_the_schedule_says(
    tmp_path: Path, missed: Missed, expected: list[int], is_down: bool
) -> None:
    """Ten minutes go by in which the node is down or held up. The ninth occurrence is late by 5 ms more than the grace."""
    parts = Parts(tmp_path / "data")
    start = parts.clock.now_ms()
    put(parts, missed=missed)
    parts.settle()
    if is_down:
        parts = parts.after_crash("later")
    parts.advance(600_005)
    assert [(occurrence - start) // 60_000 for occurrence in occurrences(parts)] == [0, *expected]
    assert parts.schedules.missed == 1
    parts.close()


def test_an_occurrence_counts_as_missed_after_the_grace(parts: Parts) -> None:
    for name, grace_ms in (("short", 1_000), ("long", 10_000)):
        put(parts, name, every_ms=HOUR_MS, grace_ms=grace_ms, start_ms=parts.clock.now_ms() + 1)
    parts.advance(5_000)
    assert [name for name, _, _ in sent_by(parts)] == ["long"]


def test_a_schedule_that_catches_up_leaves_others_their_turn(parts: Parts) -> None:
    put(parts, "busy", every_ms=1_000, missed="all")
    parts.settle()
    put(parts, "other", every_ms=HOUR_MS, start_ms=parts.clock.now_ms() + HOUR_MS)
    parts.clock.advance(HOUR_MS)  # type: ignore[attr-defined]
    assert parts.schedules.fire_due()
    parts.store.commit()
    assert len(occurrences(parts, "busy")) == 1 + OCCURRENCES_AT_ONCE_MAX
    parts.settle()
    names = [name for name, _, _ in sent_by(parts)]
    assert names.count("busy") == 3_601
    assert names.index("other") < 1 + 3 * OCCURRENCES_AT_ONCE_MAX
    assert occurrences(parts, "busy") == sorted(set(occurrences(parts, "busy")))


def test_years_of_missed_occurrences_are_passed_over_at_once(parts: Parts) -> None:
    for missed in ("skip", "once", "latest"):
        put(parts, missed, cron="* * * * *", missed=missed)
    put(parts, "fast", every_ms=100, count=5)
    parts.settle()
    parts.advance(3 * 365 * 24 * HOUR_MS)
    assert [len(occurrences(parts, name)) for name in ("skip", "once", "latest")] == [1, 2, 2]


# --- pause, resume, run, replace, delete --------------------------------------------------------------------------------


def test_a_paused_schedule_sends_nothing_and_resumes_with_what_comes_next(parts: Parts) -> None:
    start = parts.clock.now_ms()
    schedule = put(parts)
    parts.settle()
    parts.schedules.pause(schedule)
    parts.schedules.pause(schedule)
    for _ in range(5):
        parts.advance(60_000)
    parts.advance(1)
    assert (occurrences(parts), schedule.state.is_paused) == ([start], True)
    parts.schedules.resume(schedule)
    parts.schedules.resume(schedule)
    parts.advance(59_999)
    assert occurrences(parts) == [start, start + 360_000]
    assert sum(record.kind == Kind.SCHEDULE_MOVED for record in parts.store.log.scan(0)) == 2


def test_a_pause_and_its_end_in_the_moment_of_an_occurrence_do_not_send_it_again(parts: Parts) -> None:
    start = parts.clock.now_ms()
    schedule = put(parts)
    parts.settle()
    parts.schedules.pause(schedule)
    parts.schedules.resume(schedule)
    parts.settle()
    assert occurrences(parts) == [start]
    parts.advance(60_000)
    assert occurrences(parts) == [start, start + 60_000]


def test_a_run_sends_one_more_message_and_moves_nothing(parts: Parts) -> None:
    start = parts.clock.now_ms()
    schedule = put(parts, count=2, start_ms=start + 60_000)
    parts.schedules.pause(schedule)
    parts.advance(5)
    parts.schedules.run(schedule)
    parts.schedules.resume(schedule)
    for _ in range(5):
        parts.advance(60_000)
    assert occurrences(parts) == [start + 5, start + 60_000, start + 120_000]
    assert (schedule.state.sent, schedule.state.counted) == (3, 2)


def test_a_replaced_schedule_begins_anew_in_one_step(parts: Parts) -> None:
    first = put(parts, every_ms=60_000)
    parts.settle()
    start = parts.clock.now_ms()
    second = put(parts, every_ms=7_000, start_ms=start + 7_000)
    assert (len(parts.schedules), parts.schedules.get("s")) == (1, second)
    assert first.id != second.id
    parts.advance(7_000)
    parts.advance(7_000)
    assert occurrences(parts)[1:] == [start + 7_000, start + 14_000]


def test_a_deleted_schedule_sends_nothing_more_and_its_name_is_free(parts: Parts) -> None:
    schedule = put(parts)
    parts.settle()
    parts.schedules.delete(schedule)
    parts.advance(HOUR_MS)
    assert (len(parts.schedules), parts.schedules.get("s"), len(occurrences(parts))) == (0, None, 1)
    put(parts)
    parts.settle()
    assert len(occurrences(parts)) == 2


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": ""}, "name"),
        ({"name": " x"}, "name"),
        ({"name": "x" * 256}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"every_ms": 1_000, "cron": "* * * * *"}, "every_ms and cron"),
        ({"every_ms": 0}, "no rule"),
        ({"every_ms": 99}, "; use 100 to "),
        ({"every_ms": -1}, "; use 100 to "),
        ({"every_ms": 2**62}, "every_ms"),
        ({"cron": "* * *"}, "five fields"),
        ({"cron": "* * * * *", "zone": "Mars/Olympus"}, "time zone"),
        ({"rrule": "FREQ=NEVER"}, "FREQ"),
        ({"rrule": "FREQ=YEARLY;COUNT=1000", "start_ms": 1}, "COUNT, and start_ms is 1, more than ten years ago"),
        ({"start_ms": -1}, "start_ms"),
        ({"end_ms": 2**62}, "end_ms"),
        ({"start_ms": 2_000_000_000_000, "end_ms": 1_999_999_999_999}, "before it starts"),
        ({"end_ms": 5}, "before it starts"),
        ({"start_ms": 5, "end_ms": 6}, "no occurrence"),
        ({"rrule": "FREQ=DAILY;UNTIL=20200101T000000Z"}, "no occurrence"),
        ({"count": -1}, "count"),
        ({"grace_ms": -1}, "grace_ms"),
        ({"expire_after_ms": -1}, "expire_after_ms"),
        ({"missed": "perhaps"}, "missed"),
        ({"is_template": True, "body": b"{{nothing}}"}, "placeholder"),
        ({"is_template": True, "body": b"{{number:%d}}"}, "placeholder"),
        ({"is_template": True, "body": b"{{occurrence:" + b"%c" * 40 + b"}}"}, "format"),
        ({"is_template": True, "body": b"\xff"}, "UTF-8"),
        ({"body": bytes(SCHEDULE_BYTES_MAX)}, "bytes"),
    ],
)
def test_a_schedule_that_can_not_be_carried_out_is_refused(parts: Parts, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RecurrenceInvalid, match=says):
        put(parts, **fields)
    assert (len(parts.schedules), parts.store.messages_stored) == (0, 0)


def test_a_topic_that_nobody_can_publish_to_is_refused(parts: Parts) -> None:
    with pytest.raises(TopicInvalid):
        put(parts, topic="plant/+")


def test_the_number_and_the_bytes_of_schedules_are_bounded(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "data", timer=TimerOptions(schedules_max=2, schedules_bytes_max=10_000))
    put(parts, "a")
    put(parts, "b")
    with pytest.raises(LimitExceeded, match=r"timer\.schedules_max"):
        put(parts, "c")
    put(parts, "b", every_ms=5_000)
    with pytest.raises(LimitExceeded, match=r"timer\.schedules_max"):
        put(parts, "b", body=bytes(9_500))
    parts = parts.after_crash("later")
    with pytest.raises(LimitExceeded, match=r"timer\.schedules_max"):
        put(parts, "c")
    kept = parts.schedules.get("a")
    assert kept is not None
    parts.schedules.delete(kept)
    put(parts, "c")
    parts.close()


def test_an_occurrence_that_can_not_be_stored_is_noted_and_the_schedule_goes_on(tmp_path: Path) -> None:
    """The name of the schedule makes the filled template larger than a segment."""
    parts = Parts(tmp_path / "data", store=StoreOptions(segment_bytes=16 * KIB))
    schedule = put(parts, "n" * 255, is_template=True, body=b"{{schedule}}" * 500, start_ms=parts.clock.now_ms() + 1)
    parts.advance(1)
    assert (parts.schedules.failed, schedule.state.sent) == (1, 0)
    assert "segment" in schedule.state.error
    assert schedule.state.next_ms == parts.clock.now_ms() + 60_000
    parts.close()


# --- crashes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_index", [True, False])
def test_schedules_survive_a_crash_as_they_were(tmp_path: Path, keep_index: bool) -> None:
    parts = Parts(tmp_path / "data")
    put(parts, "every", properties=[("a", "b"), ("a", "c")], body=b"\xff")
    put(parts, "cron", cron="0 6 * * *", zone="Asia/Tokyo", missed="all")
    put(parts, "gone")
    paused = put(parts, "paused", rrule="FREQ=DAILY;COUNT=5", end_ms=parts.clock.now_ms() + 10**9)
    for _ in range(5):
        parts.advance(60_000)
    parts.schedules.pause(paused)
    gone = parts.schedules.get("gone")
    assert gone is not None
    parts.schedules.delete(gone)
    parts.settle()
    before = {name: parts.schedules.get(name) for name in parts.schedules.names}
    after = parts.after_crash("later", keep_index=keep_index)
    assert {name: after.schedules.get(name) for name in after.schedules.names} == before
    sent = occurrences(after, "every")
    after.advance(60_000)
    assert occurrences(after, "every") == [*sent, sent[-1] + 60_000]
    after.close()


@pytest.mark.parametrize("missed", ["all", "once", "latest", "skip"])
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_wherever_the_log_is_cut_each_occurrence_is_sent_once(tmp_path: Path, missed: Missed, every: int) -> None:
    """A crash can keep any beginning of the log, also one that ends within a commit."""
    parts = Parts(tmp_path / "data")
    start = parts.clock.now_ms()
    put(parts, "a", every_ms=1_000, missed=missed, grace_ms=3_000)
    put(parts, "b", every_ms=1_000, missed=missed, grace_ms=3_000)
    for _ in range(3):
        parts.advance(1_000)
    parts.advance(20_000)
    expected = {name: occurrences(parts, name) for name in ("a", "b")}
    ends = [record.position for record in parts.store.log.scan(0)][1:]
    clock, data_dir = parts.clock, parts.data_dir
    parts.close()
    assert isinstance(clock, ManualClock)
    for end in ends[::every]:
        cut = tmp_path / f"cut-{end}"
        shutil.copytree(data_dir, cut, ignore=shutil.ignore_patterns("index", SYNCED))
        (segment,) = (cut / LOG_DIRECTORY).iterdir()
        with segment.open("r+b") as file:
            file.truncate(end)
        again = Parts(cut, ManualClock(clock.now_ms()))
        again.settle()
        for name in ("a", "b"):
            found = occurrences(again, name)
            assert found == sorted(set(found)), (end, name)
            if missed == "all" and again.schedules.get(name) is not None:
                assert found == expected[name], (end, name)
        again.close()
        shutil.rmtree(cut)
    assert expected["a"][0] == start


@settings(max_examples=10 * DEPTH)
@given(data=st.data())
def test_whatever_happens_occurrences_are_sent_in_order_and_none_twice(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("machine")
    parts = Parts(root / "0")
    rules: list[dict[str, Any]] = [{"every_ms": 700}, {"cron": "*/2 * * * *"}, {"rrule": "FREQ=DAILY;BYHOUR=22,23"}]
    missed = data.draw(st.sampled_from(["skip", "once", "all", "latest"]))
    for number, rule in enumerate(rules):
        put(parts, str(number), missed=missed, grace_ms=data.draw(st.sampled_from([500, GRACE_MS])), **rule)
    sizes: dict[str, int] = {}
    for step in range(data.draw(st.integers(1, 8))):
        act = data.draw(st.sampled_from(["pass", "pass", "crash", "rebuild", "pause", "resume", "run", "hold up"]))
        name = str(data.draw(st.integers(0, 2)))
        schedule = parts.schedules.get(name)
        assert schedule is not None
        if act == "pass":
            for _ in range(data.draw(st.integers(1, 10))):
                parts.advance(data.draw(st.sampled_from([1, 350, 700, 5_000])))
        elif act == "hold up":
            parts.advance(data.draw(st.integers(1, 400_000)))
        elif act in ("crash", "rebuild"):
            parts = parts.after_crash(str(step + 1), keep_index=act == "crash")
        elif act == "pause":
            parts.schedules.pause(schedule)
        elif act == "resume":
            parts.schedules.resume(schedule)
        else:
            parts.schedules.run(schedule)
            sizes[name] = sizes.get(name, 0) + 1
        parts.store.commit()
    parts.settle()
    for number in range(3):
        schedule = parts.schedules.get(str(number))
        assert schedule is not None
        found = occurrences(parts, str(number))
        assert schedule.state.sent == len(found)
        assert schedule.state.counted == len(found) - sizes.get(str(number), 0)
        regular = [each for each in found if schedule.definition.first_from(each, 0) == each]
        assert regular == sorted(regular)
        if not sizes.get(str(number)):
            assert found == sorted(set(found))
        if schedule.state.next_ms and not schedule.state.is_paused:
            assert schedule.state.next_ms > parts.clock.now_ms()
    parts.close()
