"""Messages that POP and the timer need outlive their segments. Messages that no group has popped are dropped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.pop.core.deliveries import AckOutcome
from penstock.pop.core.groups import ResetTo
from penstock.pop.options import PopOptions
from penstock.store.index.index import KeySpace
from penstock.store.options import HOUR_MS, KIB, MINUTE_MS, StoreOptions
from penstock.store.properties import Properties, encode_properties
from penstock.store.queues.lightqueue import LightQueue
from penstock.store.record import Flag
from penstock.store.recovery.repair import repair, survey
from penstock.timer.buckets import RECALLED
from penstock.timer.delayed import Recalled
from penstock.timer.schedule import ScheduleDefinition
from tests.pop.wiring import FILTER, GROUP, TOPIC, Parts
from tests.store.wiring import retain, work_on

SEGMENT_BYTES = 16 * KIB
FILLER = b"x" * 2000
STORE = StoreOptions(segment_bytes=SEGMENT_BYTES, retention_ms=HOUR_MS)
POP = PopOptions(attempts_max=3, invisible_ms_max=1000 * HOUR_MS, transaction_check_ms=24 * HOUR_MS)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = Parts(tmp_path / "data", store=STORE, pop=POP)
    yield made
    made.close()


def let_expire(parts: Parts) -> None:
    """Let an hour pass in which other messages arrive. All that was stored before is dropped."""
    end = parts.store.log.end
    parts.advance(HOUR_MS // 2)
    retain(parts.store)  # segments older than a quarter of an hour are sealed
    for _ in range(20):
        parts.publish(FILLER, topic="other/1")
        work_on(parts.store)  # takes the snapshot, if a segment began
    parts.advance(HOUR_MS // 2)
    retain(parts.store)
    assert parts.store.log.start > end - SEGMENT_BYTES


def reopened(parts: Parts, tmp_path: Path) -> Parts:
    """Return the parts of a start without the index, from snapshot and log alone."""
    parts.close()
    shutil.rmtree(tmp_path / "data" / "index")
    return Parts(tmp_path / "data", parts.clock, store=STORE, pop=POP)


def test_a_schedule_outlives_the_record_that_made_it(parts: Parts, tmp_path: Path) -> None:
    parts.group()
    daily = ScheduleDefinition(name="daily", topic=TOPIC, body=b"kept", every_ms=24 * HOUR_MS)
    made = parts.schedules.put(daily)
    parts.settle()
    assert [message.body for message in parts.pop()] == [b"kept"]
    let_expire(parts)
    let_expire(parts)
    assert parts.store.is_expired(made.id)
    again = reopened(parts, tmp_path)
    assert again.recovery.rebuilt
    assert again.schedules.get("daily") == made
    again.advance(made.state.next_ms - again.clock.now_ms())
    assert "kept" in [message.body.decode() for message in again.pop()]
    again.close()


def delay(parts: Parts, delay_ms: int, topic: str = TOPIC) -> tuple[int, int]:
    """Store a delayed message; return its position and when it is due."""
    due_ms = parts.clock.now_ms() + delay_ms
    encoded = encode_properties(Properties(deliver_at_ms=due_ms))
    position = parts.store.append_message(parts.store.router.route(topic.encode()), b"x" * 100, encoded, int(Flag.DELAYED))
    parts.store.commit()
    return position, due_ms


def test_a_recalled_message_stays_recalled_when_the_log_has_dropped_it(parts: Parts) -> None:
    parts.group()
    recalled = delay(parts, MINUTE_MS)
    assert parts.delayed.recall(*recalled) is Recalled.CANCELLED
    let_expire(parts)
    delay(parts, MINUTE_MS, "plant/3/temperature")
    parts.advance(2 * MINUTE_MS)
    let_expire(parts)
    assert parts.store.log.start > recalled[0]
    assert [*parts.delayed.live(parts.store.log.end)] == []
    parts.store.index.flush()
    again = parts.after_crash("again")
    assert [*again.delayed.live(again.store.log.end)] == []
    again.advance(MINUTE_MS)
    assert again.delayed.fired == 0
    assert [*again.store.index.rows(RECALLED)] == []
    again.close()


def test_a_pending_message_can_be_recalled_when_its_damaged_record_was_dropped(parts: Parts) -> None:
    position, due_ms = delay(parts, 24 * HOUR_MS)
    size = parts.delayed.size(position)
    assert size is not None
    parts.damage(position, size)
    let_expire(parts)
    let_expire(parts)
    assert parts.store.log.start > position
    assert parts.delayed.recall(position, due_ms) is Recalled.CANCELLED
    assert parts.delayed.recall(position, due_ms) is Recalled.ALREADY_CANCELLED
    parts.advance(24 * HOUR_MS)
    assert parts.delayed.fired == 0


@pytest.mark.parametrize("is_acked", [True, False])
def test_what_was_redriven_is_known_as_long_as_its_message(parts: Parts, is_acked: bool) -> None:
    parts.create(attempts_max=1)
    expires_at_ms = parts.clock.now_ms() + MINUTE_MS
    parts.publish(b"redriven", properties=Properties(expires_at_ms=expires_at_ms))
    (message,) = parts.pop()
    parts.core.deliveries.dead_letter(GROUP, [message.handle])
    parts.store.commit()
    parts.dead_letters.redrive(GROUP)
    parts.store.commit()
    if is_acked:
        parts.ack(*(message.handle for message in parts.pop()))
    for _ in range(3):  # The queue of dead letters keeps it for one more retention.
        let_expire(parts)
    assert len([*parts.store.index.rows(bytes(KeySpace.REDRIVEN))]) == (0 if is_acked else 1)
    assert [message.body for message in parts.pop()] == ([] if is_acked else [b"redriven"])


def test_messages_that_nobody_popped_are_dropped_and_the_next_are_handed_out(parts: Parts) -> None:
    parts.group()
    parts.publish(b"never taken")
    let_expire(parts)
    parts.publish(b"new")
    assert [message.body for message in parts.pop()] == [b"new"]
    assert parts.group().visible == 0


def test_the_index_says_what_the_log_says_of_a_group_that_has_passed_dropped_messages(parts: Parts, tmp_path: Path) -> None:
    parts.group()
    parts.publish(b"taken", b"never taken")
    (taken,) = parts.pop(1, invisible_ms=3 * HOUR_MS)
    let_expire(parts)
    assert parts.pop() == []
    assert parts.group().visible == 0
    parts.change(taken.handle, 0)
    parts.settle()
    (again,) = parts.pop()  # so the row of the group is written
    assert again.body == b"taken"
    parts.store.commit()
    stored = dict(parts.store.index.rows(bytes(KeySpace.GROUP)))
    parts = reopened(parts, tmp_path)
    parts.store.commit()
    assert dict(parts.store.index.rows(bytes(KeySpace.GROUP))) == stored
    parts.close()


def test_the_index_says_what_the_log_says_of_a_group_that_has_passed_unreadable_retries(parts: Parts, tmp_path: Path) -> None:
    group = parts.group()
    damaged, behind = parts.publish(b"damaged", b"behind it")
    first, second = parts.pop(2, invisible_ms=3 * HOUR_MS)
    parts.ack(second.handle)
    parts.change(first.handle, 0)
    parts.settle()
    assert group.visible_retries == 1
    parts.damage(damaged, behind - damaged)  # so retention can't carry it forward
    let_expire(parts)
    assert parts.pop() == []
    assert group.visible_retries == 0, "a poll that waits would look again and again"
    (new,) = parts.publish(b"new")
    (taken,) = parts.pop(1)  # so the row of the group is written
    parts.store.commit()
    stored = dict(parts.store.index.rows(bytes(KeySpace.GROUP)))
    parts = reopened(parts, tmp_path)
    parts.store.commit()
    assert dict(parts.store.index.rows(bytes(KeySpace.GROUP))) == stored
    assert parts.pop() == []
    parts.change(taken.handle, 0)
    parts.settle()
    assert [message.position for message in parts.pop()] == [new]
    assert parts.pop() == []
    parts.close()


@pytest.mark.parametrize("is_new", [True, False], ids=["a new group", "an old group"])
def test_on_a_repaired_log_a_group_that_passes_dropped_messages_gets_the_others_once(
    parts: Parts, tmp_path: Path, is_new: bool
) -> None:
    if not is_new:
        parts.group()
    first, second = parts.publish(b"damaged", b"dropped")
    parts.damage(first, second - first)
    parts.close()
    repair(tmp_path / "data", survey(tmp_path / "data").damages)
    mended = Parts(tmp_path / "data", parts.clock, store=STORE, pop=POP)
    let_expire(mended)
    mended.publish(b"1", b"2")
    assert [message.body for message in mended.pop(1)] == [b"1"]
    again = reopened(mended, tmp_path)
    assert [message.body for message in again.pop()] == [b"2"]
    assert again.pop() == []
    again.publish(b"3")
    assert [message.body for message in again.pop()] == [b"3"]
    again.close()


def test_entries_that_were_read_ahead_expire_as_any_others_do(parts: Parts) -> None:
    group = parts.group()
    parts.publish(*[b"old"] * 5)
    (taken,) = parts.pop(1, invisible_ms=3 * HOUR_MS)
    assert group.ahead[1]
    parts.ack(taken.handle)
    let_expire(parts)
    parts.publish(b"new")
    assert [message.body for message in parts.pop()] == [b"new"]
    assert parts.group().visible == 0


def test_a_group_gets_the_messages_that_others_keep_and_all_later_ones(parts: Parts) -> None:
    group = parts.group()
    parts.create("keeper", FILTER, invisible_ms=1000 * HOUR_MS)
    published = parts.publish(*[b"%d" % number for number in range(40)])
    taken = parts.pop(invisible_ms=1000 * HOUR_MS, group="keeper")
    kept = published[3::9]
    parts.ack(*[message.handle for message in taken if message.position not in kept], group="keeper")
    for _ in range(2):
        let_expire(parts)
    parts.publish(b"new", b"newer")
    assert (group.queue.first_offset(), group.queue.count_from(group.cursor)) == (3, 7)
    (snapshot,) = parts.snapshots([group])
    assert (snapshot.visible, snapshot.retries, snapshot.in_flight) == (7, 0, 0)
    assert [message.position for message in parts.pop(2)] == kept[:2], "a pop goes on over what is trimmed"
    assert parts.snapshots([group])[0].visible == 5
    assert [message.body for message in parts.pop(100)] == [b"21", b"30", b"39", b"new", b"newer"]
    assert group.visible == 0


def test_a_group_that_filters_passes_what_was_trimmed(parts: Parts) -> None:
    group = parts.create("rare", FILTER, expression="rare")
    parts.publish(*[b"x"] * 20)
    let_expire(parts)
    assert group.queue.count_from(0) == 0
    assert parts.pop(group="rare") == []
    assert group.scanned == group.queue.committed_offset, "or a waiting poll would scan for ever"
    assert parts.snapshots([group])[0].visible == 0


def test_the_backlog_of_a_group_without_consumers_does_not_count_what_was_trimmed(parts: Parts) -> None:
    group = parts.group()
    parts.publish(*[b"x"] * 100)
    assert parts.snapshots([group])[0].visible == 100
    let_expire(parts)
    snapshot = parts.snapshots([group])[0]
    assert (snapshot.visible, snapshot.oldest_ms) == (0, None)
    parts.publish(b"new")
    assert parts.snapshots([group])[0].visible == 1


def test_a_group_goes_to_a_time_before_a_message_that_fired_long_after_it_was_sent(parts: Parts) -> None:
    group = parts.group()
    due_ms = parts.clock.now_ms() + 5 * HOUR_MS
    route = parts.store.router.route(TOPIC.encode())
    parts.store.append_message(route, b"late", encode_properties(Properties(deliver_at_ms=due_ms)), Flag.DELAYED)
    parts.store.commit()
    for _ in range(4):
        let_expire(parts)
    since_ms = parts.clock.now_ms()
    parts.publish(b"before")
    parts.advance(HOUR_MS)
    parts.publish(b"after")
    parts.groups.reset(GROUP, FILTER, ResetTo(time_ms=since_ms))
    assert [message.body for message in parts.pop()] == [b"before", b"late", b"after"]
    assert group.visible == 0


def test_a_poll_that_comes_while_segments_are_being_dropped_gets_nothing_that_expires(parts: Parts) -> None:
    parts.group()
    parts.publish(*[FILLER] * 10)
    retain(parts.store)
    parts.advance(HOUR_MS // 2)
    retain(parts.store)
    parts.publish(*[b"y" * 2000] * 10)
    retain(parts.store)
    parts.advance(HOUR_MS // 2)
    parts.store.retention.begin_due()
    while parts.store.retention.expires_before == 0:
        assert parts.store.retention.busy
        parts.store.retention.step(0.0)
    boundary = parts.store.retention.expires_before
    taken = parts.pop(1000)
    assert taken
    assert all(message.position >= boundary for message in taken)


def test_a_message_in_flight_is_revived_after_its_segment_was_dropped(parts: Parts, tmp_path: Path) -> None:
    parts.group()
    (position,) = parts.publish(b"slow work")
    (message,) = parts.pop(invisible_ms=3 * HOUR_MS)
    let_expire(parts)
    assert parts.store.log.start > position
    parts = reopened(parts, tmp_path)
    parts.advance(2 * HOUR_MS)
    (again,) = parts.pop(invisible_ms=1000)
    assert (again.body, again.position, again.attempt) == (b"slow work", position, 2)
    assert parts.ack(message.handle, again.handle) == [AckOutcome.HANDLE_EXPIRED, AckOutcome.OK]
    parts.close()


def test_an_acknowledged_delivery_is_not_carried_forward(parts: Parts) -> None:
    parts.group()
    parts.publish(b"done")
    (message,) = parts.pop()
    parts.ack(message.handle)
    let_expire(parts)
    assert parts.store.copies.pinned_bytes == 0


def test_a_retry_that_waits_outlives_its_segment(parts: Parts, tmp_path: Path) -> None:
    parts.group()
    parts.publish(b"retry me")
    (message,) = parts.pop()
    parts.change(message.handle, 0)
    parts.settle()
    let_expire(parts)
    parts = reopened(parts, tmp_path)
    (again,) = parts.pop()
    assert (again.body, again.position) == (b"retry me", message.position)
    parts.close()


def test_a_dead_letter_is_kept_for_one_more_retention(parts: Parts) -> None:
    parts.group()
    parts.publish(b"poison")
    for _ in range(3):
        (message,) = parts.pop()
        parts.change(message.handle, 0)
        parts.settle()
    let_expire(parts)
    (dead,) = parts.pop(group="mourners", topic_filter="$dlq/billing")
    assert dead.body == b"poison"
    parts.ack(dead.handle, group="mourners")
    let_expire(parts)
    let_expire(parts)
    let_expire(parts)
    assert parts.store.copies.pinned_bytes == 0


def test_a_group_has_its_place_again_without_index_and_first_records(parts: Parts, tmp_path: Path) -> None:
    parts.group()
    parts.publish(*[b"%d" % number for number in range(10)])
    parts.ack(*[message.handle for message in parts.pop(4)])
    let_expire(parts)
    parts.publish(b"10", b"11")
    (message,) = parts.pop(1)
    assert message.body == b"10"
    parts = reopened(parts, tmp_path)
    assert [message.body for message in parts.pop()] == [b"11"]
    assert parts.group().in_flight == 2
    assert parts.ack(message.handle) == [AckOutcome.OK]
    parts.close()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_delayed_message_fires_long_after_its_segment_was_dropped(parts: Parts, tmp_path: Path, restarted: bool) -> None:
    parts.group()
    due_ms = parts.clock.now_ms() + 5 * HOUR_MS
    route = parts.store.router.route(TOPIC.encode())
    properties = encode_properties(Properties(tag="late", deliver_at_ms=due_ms))
    position = parts.store.append_message(route, b"at last", properties, Flag.DELAYED)
    parts.store.commit()
    for _ in range(4):
        let_expire(parts)
    assert parts.store.log.start > position
    assert len(parts.delayed) == 1
    if restarted:
        parts = reopened(parts, tmp_path)
    assert parts.pop() == []
    parts.advance(HOUR_MS)
    (message,) = parts.pop()
    assert (message.body, message.position) == (b"at last", position)
    parts.close()


def test_a_delayed_message_that_fires_shortly_before_its_segment_goes_is_kept(parts: Parts) -> None:
    parts.group()
    due_ms = parts.clock.now_ms() + HOUR_MS - 1000
    route = parts.store.router.route(TOPIC.encode())
    parts.store.append_message(route, b"late", encode_properties(Properties(deliver_at_ms=due_ms)), Flag.DELAYED)
    parts.store.commit()
    parts.publish(*[FILLER] * 20, topic="other/1")
    work_on(parts.store)
    parts.advance(HOUR_MS - 1000)
    assert parts.group(topic_filter=FILTER).visible == 1
    parts.publish(*[FILLER] * 20, topic="other/1")
    parts.advance(1000)
    retain(parts.store)
    assert parts.store.retention.dropped_segments
    assert [message.body for message in parts.pop()] == [b"late"]


def test_a_dead_letter_whose_message_was_dropped_is_neither_listed_nor_counted_nor_redriven(parts: Parts) -> None:
    parts.create("ledger", FILTER)
    parts.group("mourners", "$dlq/ledger")
    parts.publish(b"old")
    parts.core.deliveries.dead_letter("ledger", [parts.pop(group="ledger")[0].handle])
    parts.store.commit()
    let_expire(parts)
    assert len(parts.dead_letters.list("ledger")) == 1, "it is kept for one more retention"
    parts.publish(b"young")
    parts.core.deliveries.dead_letter("ledger", [parts.pop(1, group="ledger")[0].handle])
    parts.store.commit()
    for _ in range(3):
        let_expire(parts)
        if len(parts.dead_letters.list("ledger")) < 2:
            break
    (left,) = parts.dead_letters.list("ledger")
    assert parts.group("ledger").dead_letter_count == 1
    parts.dead_letters.redrive("ledger")
    parts.store.commit()
    assert [(message.body, message.position) for message in parts.pop(1, group="ledger")] == [(b"young", left.position)]
    for _ in range(3):
        let_expire(parts)
    assert (parts.dead_letters.list("ledger"), parts.group("ledger").dead_letter_count) == ([], 0)


@pytest.mark.parametrize("rebuilt", [False, True])
def test_groups_that_filter_or_order_go_on_where_they_were(parts: Parts, tmp_path: Path, rebuilt: bool) -> None:
    parts.create("ledger", FILTER, fifo=True, attempts_max=1)
    parts.create("rare", FILTER, expression="rare")
    for body in (b"a1", b"a2", b"a3"):
        parts.publish(body, properties=Properties([], "", "a"))
    (a1,) = parts.pop(1, 1000 * HOUR_MS, group="ledger")
    assert parts.pop(group="ledger") == []  # a2 and a3 are parked
    assert parts.pop(group="rare") == []
    let_expire(parts)
    if rebuilt:
        parts = reopened(parts, tmp_path)
    parts.publish(b"found", properties=Properties([], "rare"))
    assert [message.body for message in parts.pop(group="rare")] == [b"found"]
    parts.core.deliveries.dead_letter("ledger", [a1.handle])
    parts.store.commit()
    assert sorted(message.body for message in parts.pop(group="ledger")) == [b"a2", b"found"]
    assert [letter.position for letter in parts.dead_letters.list("ledger")] == [a1.position]
    assert parts.dead_letters.redrive("ledger") == 1
    parts.close()


@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_outlives_the_segment_of_its_half_message(
    parts: Parts, tmp_path: Path, rebuilt: bool, commit: bool
) -> None:
    parts.group()
    properties = encode_properties(Properties(producer="orders"))
    route = parts.store.router.route(TOPIC.encode())
    position = parts.store.append_message(route, b"half", properties, 1 | Flag.HALF)
    parts.store.commit()
    let_expire(parts)
    if rebuilt:
        parts = reopened(parts, tmp_path)
    parts.transactions.end(position, commit=commit)
    parts.store.commit()
    assert [message.body for message in parts.pop()] == ([b"half"] if commit else [])
    parts.close()


def test_a_long_backlog_of_dropped_messages_is_skipped_in_few_steps(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    parts.group()
    for _ in range(40):
        parts.publish(*[b"old"] * 250)
    retain(parts.store)
    parts.advance(HOUR_MS // 2)
    retain(parts.store)
    parts.publish(b"young")
    parts.advance(HOUR_MS // 2)
    parts.store.retention.begin_due()
    while parts.store.retention.expires_before == 0:
        assert parts.store.retention.busy
        parts.store.retention.step(0.0)
    reads = 0
    read_from = LightQueue.read_from

    def counted(queue: LightQueue, offset: int, count: int) -> tuple[int, bytes]:
        nonlocal reads
        reads += 1
        return read_from(queue, offset, count)

    monkeypatch.setattr(LightQueue, "read_from", counted)
    (message,) = parts.pop(1)
    assert message.position >= parts.store.retention.expires_before
    assert reads < 20
