"""The story of a message is what the test has done, wherever its records are: in the tables, in the tail, or in both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="the tables need the extra `tables`")


from penstock.cli.main import main
from penstock.pop.core.groups import ResetTo
from penstock.spark.errors import MessageUnknown, TablesInvalid
from penstock.spark.parquet.story import GroupStory, State, Story, read_story
from penstock.spark.parquet.writer import backfill
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import COPY_FIXED, Flag, Kind, encode
from penstock.timer.delayed import Recalled
from tests.parquet.sealing import STORE, seal
from tests.pop.wiring import GROUP, TOPIC, Parts
from tests.spark.log_writer import LogWriter


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = Parts(tmp_path / "data", store=STORE)
    yield made
    made.close()


class Reader:
    """Reads stories, each with a scratch directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0

    def __call__(self, data_dir: Path, position: int, group: str | None = None) -> Story:
        self._count += 1
        return read_story(data_dir, position, self._directory / f"scratch-{self._count}", group)


@pytest.fixture
def tell(tmp_path: Path) -> Reader:
    return Reader(tmp_path)


def events(group: GroupStory) -> list[tuple[Any, ...]]:
    return [(event.event, event.attempt, event.after_ms) for event in group.events]


def pending(group: GroupStory) -> tuple[Any, ...]:
    """Return the state of a message in a group, and since when and until when."""
    assert group.pending is not None
    return group.state, group.pending.attempt, group.pending.since_ms, group.pending.deadline_ms


def test_a_delivery_over_two_segments_and_the_tail_is_the_same_with_and_without_tables(parts: Parts, tell: Reader) -> None:
    parts.create()
    seal(parts)
    at_ms = parts.clock.now_ms()
    (message,) = parts.publish(b"21.5", properties=Properties(tag="red", keys=["a", "b"], message_group="press 1"))
    (popped,) = parts.pop(1, 10_000)
    parts.advance(2_000)
    parts.change(popped.handle, 5_000, nack=True)
    seal(parts)
    parts.advance(5_000)
    (again,) = parts.pop(1, 10_000)
    parts.advance(1_500)
    _, extended = parts.change(again.handle, 20_000)
    seal(parts)
    parts.ack(extended)
    without = tell(parts.data_dir, message)
    list(backfill(parts.data_dir))
    story = tell(parts.data_dir, message)
    assert without == story
    assert story.message is not None
    described = story.message
    assert (described.at_ms, described.topic, described.qos, described.body_bytes) == (at_ms, TOPIC, 1, 4)
    assert (described.tag, described.keys, described.message_group) == ("red", ["a", "b"], "press 1")
    (group,) = story.groups
    assert (group.group, group.state, group.pending) == (GROUP, State.ENDED, None)
    assert events(group) == [
        ("popped", 1, None),
        ("nacked", 1, 2_000),
        ("waited", 1, 7_000),
        ("popped", 2, None),
        ("extended", 2, 1_500),
        ("acked", 2, 1_500),
    ]
    deadlines = [None if event.deadline_ms is None else event.deadline_ms - at_ms for event in group.events]
    assert deadlines == [10_000, 7_000, None, 17_000, 28_500, None]
    assert (story.damages, story.start_position, story.end_position) == ([], 0, parts.store.log.end)


def test_it_tells_where_a_message_is_until_it_is_a_dead_letter(parts: Parts, tell: Reader) -> None:
    parts.create(attempts_max=3)
    (message,) = parts.publish(b"1")

    def group() -> GroupStory:
        (found,) = tell(parts.data_dir, message).groups
        return found

    begin_ms = parts.clock.now_ms()
    parts.pop(1, 10_000)
    list(backfill(parts.data_dir))
    assert pending(group()) == (State.IN_FLIGHT, 1, begin_ms, begin_ms + 10_000)
    seal(parts)
    parts.advance(10_000)
    assert pending(group()) == (State.QUEUED, 1, begin_ms + 10_000, None)
    list(backfill(parts.data_dir))
    parts.pop(1, 10_000)
    parts.advance(10_000)
    (last,) = parts.pop(1, 10_000)
    parts.change(last.handle, 7_000, suspend=True)
    assert pending(group()) == (State.WAITING, 3, begin_ms + 20_000, begin_ms + 27_000)
    parts.advance(7_000)
    parts.pop(1, 10_000)
    parts.advance(10_000)
    assert group().state is State.ENDED
    assert events(group()) == [
        ("popped", 1, None),
        ("timed_out", 1, 10_000),
        ("popped", 2, None),
        ("timed_out", 2, 10_000),
        ("popped", 3, None),
        ("suspended", 3, 0),
        ("waited", 3, 7_000),
        ("popped", 3, None),
        ("dead_lettered", 3, 10_000),
    ]
    assert group().events[-1].reason == "attempts_exhausted"
    parts.dead_letters.redrive(GROUP)
    parts.pop(1, 10_000)
    assert events(group())[-1] == ("popped", 1, None), "a message that is sent back has the same id"
    assert group().state is State.IN_FLIGHT


def test_each_group_has_its_own_part_in_the_order_of_the_first_deliveries(parts: Parts, tell: Reader) -> None:
    for name in ("alarms", "billing", "idle"):
        parts.create(name)
    (message, other) = parts.publish(b"1", b"2")
    for name in ("billing", "alarms"):
        (popped, _) = parts.pop(2, 60_000, group=name)
    parts.ack(popped.handle, group="alarms")
    story = tell(parts.data_dir, message)
    assert [(group.group, group.state) for group in story.groups] == [("billing", State.IN_FLIGHT), ("alarms", State.ENDED)]
    assert [group.state for group in tell(parts.data_dir, other).groups] == [State.IN_FLIGHT] * 2
    assert tell(parts.data_dir, message, "alarms").groups == [story.groups[1]]
    assert tell(parts.data_dir, message, "idle").groups == []


def test_a_group_that_is_reset_or_deleted_forgets_the_message(parts: Parts, tell: Reader) -> None:
    for name in ("reset", "deleted"):
        parts.create(name)
    (message,) = parts.publish(b"1")
    for name in ("reset", "deleted"):
        parts.pop(1, 10_000, group=name)
    parts.advance(10_000)
    seal(parts)
    list(backfill(parts.data_dir))
    parts.groups.reset("reset", "", ResetTo("latest"))
    parts.groups.delete("deleted")
    parts.store.commit()
    for group in tell(parts.data_dir, message).groups:
        assert events(group) == [("popped", 1, None), ("timed_out", 1, 10_000), (group.group, 1, None)]
        assert group.state is State.ENDED


def test_a_delayed_message_that_was_recalled_and_one_that_expired(
    parts: Parts, tell: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    parts.create()
    route = parts.store.router.route(TOPIC.encode())

    def delayed(delay_ms: int) -> tuple[int, int]:
        due_ms = parts.clock.now_ms() + delay_ms
        encoded = encode_properties(Properties(deliver_at_ms=due_ms))
        position = parts.store.append_message(route, b"", encoded, 1 | Flag.DELAYED)
        parts.store.commit()
        return position, due_ms

    recalled, fired, later = delayed(60_000), delayed(1_000), delayed(90_000)
    (expired,) = parts.publish(b"1", properties=Properties(expires_at_ms=parts.clock.now_ms() + 500))
    assert parts.delayed.recall(*recalled) is Recalled.CANCELLED
    parts.advance(1_000)
    parts.pop()

    def shown(position: int) -> str:
        assert main(["story", str(position), "--data-dir", str(parts.data_dir)]) == 0
        return capsys.readouterr().out

    assert "delayed until 2023-11-14T22:14:20.000+00:00: it was recalled or replaced\n" in shown(recalled[0])
    assert "No group has popped the message.\n" in shown(recalled[0])
    assert "delayed until 2023-11-14T22:13:21.000+00:00: it fired\n" in shown(fired[0])
    assert "No group has popped the message. It was not due by then.\n" in shown(later[0])
    (group,) = tell(parts.data_dir, expired).groups
    assert (group.state, events(group)) == (State.ENDED, [("popped", 1, None), ("expired", 1, 0)])
    assert "expires at 2023-11-14T22:13:20.500+00:00\n" in shown(expired)


# --- logs of which a test knows every byte ----------------------------------------------------------------------------


def log_of_four() -> tuple[LogWriter, list[int], list[int]]:
    """Return a log of four segments, their positions and those of their messages, one in each."""
    log = LogWriter(start=1_000)
    bases, messages = [], []
    for number in range(4):
        bases.append(log.end)
        messages.append(log.message(f"a/{number}"))
        log.message("filler")
        if number < 3:
            log.roll()
    return log, bases, messages


def test_an_id_without_a_message_is_told_where_it_lies(tmp_path: Path, tell: Reader) -> None:
    log, bases, messages = log_of_four()
    directory = log.save(tmp_path)
    saved = {path: path.read_bytes() for path in sorted(directory.iterdir())}
    first, second, third, fourth = saved
    third.unlink()
    fourth.unlink()
    list(backfill(tmp_path))  # the first segment; the second is not sealed yet
    first.unlink()
    second.unlink()
    for path in (third, fourth):
        path.write_bytes(saved[path])
    covered = f"The tables and the log cover the positions from 1000 to {log.end}"
    for position, reason in (
        (999, "and position 999 is before them. Retention had dropped it before it was in the tables."),
        (log.end, f"and position {log.end} is after them. The id is of another node, or the log has lost its end."),
        (messages[1], f"but position {messages[1]} is in a gap, from {bases[1]} to {bases[2]}: retention had dropped it "),
        (messages[0] + 1, f"but no message begins at position {messages[0] + 1}."),
        (messages[3] + 1, f"but no message begins at position {messages[3] + 1}."),
    ):
        with pytest.raises(MessageUnknown) as raised:
            tell(tmp_path, position)
        assert str(raised.value).startswith(f"There is no message {position:016x}. {covered}, {reason}")
    story = tell(tmp_path, messages[0])
    assert [(each.position, each.until_position, each.cause) for each in story.damages] == [(bases[1], bases[2], "dropped")]
    assert tell(tmp_path, messages[2]).damages == []


def test_a_message_whose_first_place_is_gone_is_known_from_its_copy(tmp_path: Path, tell: Reader) -> None:
    log = LogWriter(start=10_000)
    log.message("filler")
    log.roll()
    copied = encode(Kind.MESSAGE, b"a/1", b"21.5", store_ms=500, flags=1)
    copied_at = log.add(Kind.COPIED, body=copied, fixed=COPY_FIXED.pack(64))
    key = log.checkpoint(7, GROUP, [64], deadline_ms=5_000)
    log.message("filler")
    log.roll()
    log.ack(7, GROUP, [(key, 0)])
    log.save(tmp_path)
    without = tell(tmp_path, 64)
    list(backfill(tmp_path))
    story = tell(tmp_path, 64)
    assert without == story
    assert story.message is not None
    assert (story.message.topic, story.message.at_ms, story.message.copied_at) == ("a/1", 500, copied_at)
    assert events(story.groups[0]) == [("popped", 1, None), ("acked", 1, 0)]
    assert [(each.position, each.until_position) for each in story.damages] == [(0, 10_000)]


def test_ends_that_nothing_names_and_repeated_ones_are_in_the_story(tmp_path: Path, tell: Reader) -> None:
    log = LogWriter(start=1_000)
    message = 64  # its record is gone, and so is the checkpoint at 500
    changed = log.change(7, GROUP, [((500, 0), message)], deadline_ms=9_000)
    log.ack(7, GROUP, [(changed, 0)])
    log.roll()
    log.ack(7, GROUP, [(changed, 0)])
    log.roll()
    log.message("filler")
    log.save(tmp_path)
    list(backfill(tmp_path))
    story = tell(tmp_path, message)
    assert story.message is None
    (group,) = story.groups
    found = [(event.event, event.deadline_ms, event.repeated, event.delivery_id) for event in group.events]
    assert found == [("extended", 9_000, False, 500), ("acked", None, False, 500), ("acked", None, True, 500)]
    assert group.state is State.ENDED


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_lines_or_json(parts: Parts, capsys: pytest.CaptureFixture[str]) -> None:
    parts.create()
    (message,) = parts.publish(b"21.5")
    (popped,) = parts.pop(1, 10_000)
    parts.advance(2_345)
    parts.ack(popped.handle)
    parts.close()
    arguments = ["story", f"{message:016x}", "--data-dir", str(parts.data_dir)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"Message {message:016x} at position {message}",
        f"2023-11-14T22:13:20.000+00:00  published to {TOPIC} at QoS 1, 4 bytes",
        "",
        f"Group {GROUP}: acked",
        "2023-11-14T22:13:20.000+00:00  attempt 1: popped, until 2023-11-14T22:13:30.000+00:00",
        "2023-11-14T22:13:22.345+00:00  attempt 1: acknowledged after 2.3 s",
        "",
        f"The log ends at position {parts.store.log.end}, with a record of 2023-11-14T22:13:22.345+00:00.",
    ]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [*found] == ["message_id", "position", "message", "groups", "damages", "start_position", "end_position", "end_ms"]
    assert (found["message_id"], found["message"]["topic"], found["message"]["body_bytes"]) == (f"{message:016x}", TOPIC, 4)
    (group,) = found["groups"]
    assert list(group) == ["group_id", "group", "state", "pending", "events"]
    assert [event["event"] for event in group["events"]] == ["popped", "acked"]
    assert list(group["events"][0]) == [
        *("at_ms", "position", "event", "delivery_id", "attempt", "after_ms", "deadline_ms", "return_ms"),
        *("counted", "reason", "repeated"),
    ]
    assert main([*arguments[:1], str(message + 1), *arguments[2:]]) == 1
    assert "no message begins at position" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["story", "abc"])
    assert "'abc' is no position: give a number, or the id of a message" in capsys.readouterr().err


def test_the_lines_are_bounded_whatever_the_message_has_been_through(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = LogWriter()
    message = log.message("a/1")
    for number in range(300):
        key = log.checkpoint(number, f"group {number}", [message], deadline_ms=9_000)
        for _ in range(200 if number == 0 else 0):
            key = log.change(number, "group 0", [((key, 0), message)], deadline_ms=9_000)
        if number % 2:
            log.ack(number, f"group {number}", [(key, 0)])
    log.now_ms = 10_000
    log.message("filler")
    log.save(tmp_path)
    arguments = ["story", str(message), "--data-dir", str(tmp_path)]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 200
    overdue = "until 1970-01-01T00:00:09.000+00:00, and overdue: it was to be back by 1970-01-01T00:00:09.000+00:00"
    assert f"Group group 2: in flight, attempt 1, {overdue}" in lines
    assert [line.strip() for line in lines if "more" in line] == [
        "161 more events; --json prints them",
        "280 more groups: 140 in flight, 140 ended. --group prints one of them, and --json all.",
    ]
    assert "The message has not ended for group 20, group 22, group 24," in "\n".join(lines)
    assert main([*arguments, "--group", "group 299"]) == 0
    assert "Group group 299: acked" in capsys.readouterr().out


def test_a_damaged_file_is_an_error_that_says_so(tmp_path: Path, tell: Reader) -> None:
    log, _, messages = log_of_four()
    log.save(tmp_path)
    list(backfill(tmp_path))
    (tmp_path / "tables" / "deliveries" / "date=1970-01-01" / f"{1_000:020d}.parquet").write_bytes(b"PAR1")
    with pytest.raises(TablesInvalid, match="is damaged"):
        tell(tmp_path, messages[0])
