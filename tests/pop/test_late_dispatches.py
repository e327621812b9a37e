"""What fires, is committed, comes back or is redriven lives as long as what is published at that moment."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.backup.comparison import compare, settle
from penstock.pop.options import PopOptions
from penstock.store.index.index import KeySpace
from penstock.store.options import HOUR_MS, KIB, MINUTE_MS, StoreOptions
from penstock.store.properties import Properties, encode_properties
from penstock.store.queues.lightqueue import ENTRY_DTYPE
from penstock.store.record import Flag
from penstock.timer.schedule import ScheduleDefinition
from tests.pop.wiring import FILTER, GROUP, TOPIC, Parts
from tests.store.wiring import copy_left, retain, work_on

SEGMENT_BYTES = 16 * KIB
RETENTION_SEGMENTS = 4
BY_BYTES = StoreOptions(segment_bytes=SEGMENT_BYTES, retention_ms=0, retention_bytes=RETENTION_SEGMENTS * SEGMENT_BYTES)
BY_AGE = StoreOptions(segment_bytes=SEGMENT_BYTES, retention_ms=HOUR_MS)
POP = PopOptions(attempts_max=2, invisible_ms_max=1000 * HOUR_MS, transaction_check_ms=1000 * HOUR_MS)
PLAIN = [b"plain %d" % number for number in range(3)]
LATE = [b"late %d" % number for number in range(3)]


@pytest.fixture
def parts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Parts]:
    """The parts of a store with retention by bytes, if a test does not ask for another."""
    made = Parts(tmp_path / "data", store=getattr(request, "param", BY_BYTES), pop=POP)
    yield made
    made.close()


def let_segments_pass(parts: Parts, count: int) -> None:
    """Fill segments with messages that no group wants, and let a quarter of the retention pass with each."""
    for _ in range(count):
        for _ in range(8):
            parts.publish(b"x" * 2000, topic="other/1")
            work_on(parts.store)
        if parts.store.options.retention_ms:
            parts.advance(HOUR_MS // RETENTION_SEGMENTS)
        retain(parts.store)


def store_unrouted(parts: Parts, flag: Flag, properties: Properties) -> list[int]:
    route = parts.store.router.route(TOPIC.encode())
    encoded = encode_properties(properties)
    positions = [parts.store.append_message(route, body, encoded, 1 | flag) for body in LATE]
    parts.store.commit()
    return positions


Dispatch = Callable[[], None]
StoreLate = Callable[[Parts, int], Dispatch]


def delayed(parts: Parts, delay_ms: int) -> Dispatch:
    """Store delayed messages; return what lets them fire."""
    due_ms = parts.clock.now_ms() + delay_ms
    store_unrouted(parts, Flag.DELAYED, Properties(deliver_at_ms=due_ms))
    return lambda: parts.advance(max(due_ms - parts.clock.now_ms(), 0))


def halves(parts: Parts, _delay_ms: int) -> Dispatch:
    """Store half messages; return what commits them."""
    positions = store_unrouted(parts, Flag.HALF, Properties(producer="orders"))

    def commit() -> None:
        for position in positions:
            parts.transactions.end(position, commit=True)
        parts.store.commit()

    return commit


@pytest.fixture(params=[delayed, halves])
def store_late(request: pytest.FixtureRequest) -> StoreLate:
    found: StoreLate = request.param
    return found


def popped(parts: Parts, group: str = GROUP) -> list[bytes]:
    return [message.body for message in parts.pop(group=group)]


@pytest.mark.parametrize(
    ("parts", "before", "after"), [(BY_BYTES, 3, 2), (BY_AGE, 1, 3)], indirect=["parts"], ids=["by bytes", "by age"]
)
def test_a_late_message_lives_as_long_as_one_that_is_published_then(
    parts: Parts, store_late: StoreLate, before: int, after: int
) -> None:
    parts.group()
    dispatch = store_late(parts, before * HOUR_MS // RETENTION_SEGMENTS + MINUTE_MS)
    let_segments_pass(parts, before)
    dispatch()
    parts.publish(*PLAIN)
    let_segments_pass(parts, after)
    assert parts.store.retention.dropped_segments
    assert popped(parts) == LATE + PLAIN


@pytest.mark.parametrize("parts", [BY_BYTES, BY_AGE], indirect=True, ids=["by bytes", "by age"])
def test_a_late_message_is_there_until_those_that_were_published_then_are_gone(parts: Parts, store_late: StoreLate) -> None:
    group = parts.group()
    dispatch = store_late(parts, 2 * HOUR_MS)
    let_segments_pass(parts, 6)
    dispatch()
    plain = parts.publish(*PLAIN)
    copied_bytes = []
    for _ in range(20):
        let_segments_pass(parts, 1)
        copied_bytes.append(parts.store.retention.copied_bytes)
        entries = np.frombuffer(group.queue.read(0, 100), dtype=ENTRY_DTYPE)["position"].tolist()
        there = [position for position in entries if not parts.store.is_expired(position)]
        assert not set(plain) & set(there) or len(there) == 2 * len(plain)
        if not there:
            break
    assert popped(parts) == []
    assert parts.store.copies.pinned_bytes == 0
    assert len(set(copied_bytes)) <= 2, "each message is copied once at most after its dispatch"
    let_segments_pass(parts, 1)
    assert [*parts.store.index.rows(bytes(KeySpace.DISPATCH))] == []


@pytest.mark.parametrize("keep_index", [True, False])
def test_a_late_message_lives_as_long_also_after_a_crash(parts: Parts, store_late: StoreLate, keep_index: bool) -> None:
    parts.group()
    dispatch = store_late(parts, 50 * MINUTE_MS)
    let_segments_pass(parts, 3)
    dispatch()
    parts.publish(*PLAIN)
    let_segments_pass(parts, 1)
    again = parts.after_crash("first", keep_index=keep_index)
    let_segments_pass(again, 1)
    assert again.store.retention.dropped_segments
    last = again.after_crash("second", keep_index=keep_index)
    assert popped(last) == LATE + PLAIN
    last.close()


def test_an_index_that_is_built_anew_differs_only_in_what_an_expiry_has_looked_at(parts: Parts) -> None:
    parts.group()
    dispatch = delayed(parts, 50 * MINUTE_MS)
    let_segments_pass(parts, 3)
    dispatch()
    let_segments_pass(parts, 2)
    assert parts.store.copies.pinned_bytes
    stored = parts.after_crash("stored")
    delayed(stored, MINUTE_MS)()
    stored.store.index.flush()
    copy_left(stored.data_dir, stored.data_dir.with_name("rebuilt"))
    shutil.rmtree(stored.data_dir.with_name("rebuilt") / "index")
    rebuilt = Parts(stored.data_dir.with_name("rebuilt"), stored.clock, pop=POP, store=stored.options[2])
    assert rebuilt.recovery.rebuilt
    for each in (stored, rebuilt):
        settle(each.store)
    assert list(compare(stored.store, rebuilt.store, lambda _: None)) == []
    assert [*stored.store.index.rows(bytes(KeySpace.DISPATCH))]
    batch = stored.store.index.batch()
    batch.put(bytes(KeySpace.DISPATCH) + bytes(16), bytes(4))
    stored.store.index.write(batch)
    (difference,) = compare(stored.store, rebuilt.store, lambda _: None)
    assert str(difference).startswith(
        "oldest message at position 0, dispatched by the record at position 0 should not be there"
    )
    stored.close()
    rebuilt.close()


def test_consumers_get_late_messages_while_the_expiry_that_carries_them_forward_goes_on(
    parts: Parts, store_late: StoreLate, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = parts.group()
    dispatch = store_late(parts, 50 * MINUTE_MS)
    let_segments_pass(parts, 3)
    dispatch()
    parts.publish(*PLAIN)
    entries = np.frombuffer(group.queue.read(0, 100), dtype=ENTRY_DTYPE)["position"].tolist()
    step = type(parts.store.retention).step

    def step_and_look(retention: object, until_s: float) -> bool:
        more = step(parts.store.retention, 0.0)
        assert [position for position in entries if parts.store.is_expired(position)] == []
        return more

    monkeypatch.setattr(type(parts.store.retention), "step", step_and_look)
    let_segments_pass(parts, 2)
    monkeypatch.undo()
    assert popped(parts) == LATE + PLAIN


def test_what_is_dispatched_while_an_expiry_goes_on_is_carried_forward(
    parts: Parts, store_late: StoreLate, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.group()
    dispatch = store_late(parts, 1000 * HOUR_MS)
    step = type(parts.store.retention).step
    dispatched: list[int] = []

    def dispatch_and_step(retention: object, until_s: float) -> bool:
        expires_before = parts.store.retention.expires_before
        more = step(parts.store.retention, 0.0)
        if expires_before < parts.store.retention.expires_before and not dispatched:
            dispatched.append(expires_before)
            dispatch()
        return more

    monkeypatch.setattr(type(parts.store.retention), "step", dispatch_and_step)
    while not dispatched:
        let_segments_pass(parts, 1)
    monkeypatch.undo()
    let_segments_pass(parts, 2)
    assert popped(parts) == LATE


def test_the_messages_of_one_firing_are_all_kept_wherever_they_are(parts: Parts) -> None:
    parts.group()
    began_ms = parts.clock.now_ms()
    for _ in range(3):
        delayed(parts, 50 * MINUTE_MS - (parts.clock.now_ms() - began_ms))
        let_segments_pass(parts, 1)
    parts.advance(50 * MINUTE_MS - (parts.clock.now_ms() - began_ms))
    parts.publish(*PLAIN)
    for _ in range(2):
        let_segments_pass(parts, 1)
    assert popped(parts) == LATE * 3 + PLAIN


def test_an_occurrence_of_a_schedule_lives_as_long_as_any_message(parts: Parts) -> None:
    parts.group()
    start_ms = parts.clock.now_ms() + 3 * HOUR_MS
    daily = ScheduleDefinition(name="daily", topic=TOPIC, body=b"planned", start_ms=start_ms, every_ms=24 * HOUR_MS)
    parts.schedules.put(daily)
    let_segments_pass(parts, 6)
    parts.advance(start_ms - parts.clock.now_ms())
    parts.publish(*PLAIN)
    let_segments_pass(parts, 2)
    assert popped(parts) == [b"planned", *PLAIN]


def test_a_message_that_returns_from_a_long_back_off_waits_as_long_as_its_group_needs_it(parts: Parts) -> None:
    parts.create(backoff=(5 * HOUR_MS,))
    parts.publish(*LATE)
    parts.fail()
    let_segments_pass(parts, 6)
    parts.advance(6 * HOUR_MS)
    parts.publish(*PLAIN)
    let_segments_pass(parts, 2)
    assert sorted(popped(parts)) == sorted(LATE + PLAIN)


def dead_letters(parts: Parts) -> None:
    """Let messages be dead letters of the group `failing` long after they were stored."""
    parts.create("failing", FILTER, attempts_max=1)
    parts.publish(*LATE)
    parts.fail(delay_ms=2 * HOUR_MS, group="failing")
    let_segments_pass(parts, 6)
    parts.advance(2 * HOUR_MS)
    assert parts.dead_letters.list("failing")


def test_a_redriven_dead_letter_lives_as_long_as_one_that_is_published_then(parts: Parts) -> None:
    dead_letters(parts)
    assert parts.dead_letters.redrive("failing") == len(LATE)
    parts.publish(*PLAIN)
    let_segments_pass(parts, 2)
    assert sorted(popped(parts, "failing")) == sorted(LATE + PLAIN)


def test_a_dead_letter_of_an_old_message_is_kept_for_one_retention(parts: Parts) -> None:
    parts.group("mourners", "$dlq/failing")
    dead_letters(parts)
    let_segments_pass(parts, 2)
    assert len(parts.dead_letters.list("failing")) == len(LATE)
    assert parts.dead_letters.redrive("failing") == len(LATE)
    assert popped(parts, "failing") == LATE
