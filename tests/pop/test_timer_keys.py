"""Delayed messages with keys, and messages that replace others, on a real store whose clock the test moves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.pop.core.sender import Refusal, Sender, SendRefused, StoredMessage, cancel_replaced
from penstock.store.errors import DiskFull
from penstock.store.log.segment import LOG_DIRECTORY
from penstock.store.log.syncmark import FILE as SYNCED
from penstock.store.properties import Properties
from penstock.timer.options import TimerOptions
from tests.clock import ManualClock
from tests.pop.wiring import TOPIC, Parts


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = Parts(tmp_path / "data", timer=TimerOptions(keys_max=3))
    made.group()
    yield made
    made.close()


def sender_of(parts: Parts) -> Sender:
    return Sender(
        parts.store, parts.handles, parts.delayed, parts.timer_keys, parts.transactions, parts.sent_ids, parts.options[0]
    )


def send(parts: Parts, body: bytes, delay_ms: int, key: str = "k", topic: str = TOPIC) -> StoredMessage:
    about = Properties(deliver_at_ms=parts.clock.now_ms() + delay_ms, timer_key=key)
    stored = sender_of(parts).store(topic.encode(), body, about)
    parts.store.commit()
    return stored


def arrived(parts: Parts) -> list[bytes]:
    found = parts.pop()
    parts.ack(*(message.handle for message in found))
    return [message.body for message in found]


def test_a_message_replaces_the_pending_one_of_its_topic_and_key(parts: Parts) -> None:
    first = send(parts, b"first", 1_000)
    send(parts, b"other topic", 1_000, topic="plant/2/temperature")
    send(parts, b"other key", 1_000, key="l")
    second = send(parts, b"second", 2_000)
    assert parts.timer_keys.find(TOPIC.encode(), "k") == second.position
    assert (len(parts.delayed), parts.delayed.due_ms(first.position)) == (3, None)
    parts.advance(1_000)
    assert sorted(arrived(parts)) == [b"other key", b"other topic"]
    parts.advance(1_000)
    assert arrived(parts) == [b"second"]
    assert (len(parts.timer_keys), parts.timer_keys.find(TOPIC.encode(), "k")) == (0, None)
    send(parts, b"third", 1)
    parts.advance(1)
    assert arrived(parts) == [b"third"]


def test_a_message_that_is_due_replaces_the_pending_one_too(parts: Parts) -> None:
    send(parts, b"late", 60_000)
    send(parts, b"now", -5)
    parts.advance(1)
    assert arrived(parts) == [b"now"]
    parts.advance(60_000)
    assert arrived(parts) == []


def test_a_recalled_message_frees_its_key(parts: Parts) -> None:
    stored = send(parts, b"x", 1_000)
    parts.delayed.recall(stored.position, parts.clock.now_ms() + 1_000)
    assert len(parts.timer_keys) == 0


def test_the_number_of_keys_is_bounded_and_replacing_needs_no_more(parts: Parts) -> None:
    for key in "abc":
        send(parts, b"x", 1_000, key=key)
    with pytest.raises(SendRefused, match=r"timer\.pending_max") as refused:
        send(parts, b"x", 1_000, key="d")
    assert refused.value.refusal is Refusal.TOO_MANY_TIMERS
    send(parts, b"y", 1_000, key="c")
    with pytest.raises(SendRefused, match="255 bytes"):
        send(parts, b"x", 1_000, key="x" * 256)


def test_a_rescheduled_message_is_delivered_at_its_new_time_only(parts: Parts) -> None:
    stored = send(parts, b"x", 1_000)
    now = parts.clock.now_ms()
    later = sender_of(parts).reschedule(stored.position, now + 5_000)
    assert later is not None
    assert parts.timer_keys.find(TOPIC.encode(), "k") == later.position
    parts.advance(4_999)
    assert arrived(parts) == []
    parts.advance(1)
    assert arrived(parts) == [b"x"]
    assert sender_of(parts).reschedule(later.position, now + 9_000) is None
    for wrong in (-1, now + 11 * 31_557_600_000):
        other = send(parts, b"y", 1_000)
        with pytest.raises(SendRefused, match="deliver_at_ms"):
            sender_of(parts).reschedule(other.position, wrong)
        assert parts.delayed.due_ms(other.position) is not None


@pytest.mark.parametrize("keep_index", [True, False])
def test_keys_survive_a_crash(parts: Parts, keep_index: bool) -> None:
    send(parts, b"gone", 500)
    kept = send(parts, b"kept", 1_000)
    after = parts.after_crash("later", keep_index=keep_index)
    assert (len(after.timer_keys), after.timer_keys.find(TOPIC.encode(), "k")) == (1, kept.position)
    after.advance(1_000)
    assert arrived(after) == [b"kept"]
    after.close()


def test_wherever_the_log_is_cut_one_message_of_a_key_is_delivered(tmp_path: Path) -> None:
    """A crash can keep the new message without the cancellation of the old one."""
    parts = Parts(tmp_path / "data")
    parts.group()
    for number in range(3):
        stored = send(parts, b"%d" % number, 1_000)
    sender_of(parts).reschedule(stored.position, parts.clock.now_ms() + 2_000)
    parts.store.commit()
    ends = [record.position + record.size for record in parts.store.log.scan(0)]
    firsts = [record.position + record.size for record in parts.store.log.scan(0) if record.body == b"0"]
    data_dir = parts.data_dir
    parts.close()
    cancels = 0
    for end in [each for each in ends if each >= firsts[0]]:
        cut = tmp_path / f"cut-{end}"
        shutil.copytree(data_dir, cut, ignore=shutil.ignore_patterns("index", SYNCED))
        (segment,) = (cut / LOG_DIRECTORY).iterdir()
        with segment.open("r+b") as file:
            file.truncate(end)
        again = Parts(cut, ManualClock())
        cancels += again.delayed.cancelled
        again.advance(3_000)
        assert len(arrived(again)) == 1, end
        assert (len(again.timer_keys), again.timer_keys.replaced) == (0, [])
        again.close()
    assert cancels > 0


def test_replaced_messages_are_cancelled_when_the_disk_has_room_also_after_a_relief_without_room() -> None:
    """A relief that finds no room must end: what it left is tried at the next one."""
    tried: list[int] = []

    class Full:
        def due_ms(self, position: int) -> int:
            return 1

        def recall(self, position: int, due_ms: int) -> None:
            tried.append(position)
            if len(tried) < 3:
                raise DiskFull("no room")

    keys, reliefs = SimpleNamespace(replaced=[7]), SimpleNamespace(on_relief=[])
    cancel_replaced(cast(Any, keys), cast(Any, Full()), cast(Any, reliefs))
    for _ in range(2):
        for relieved in reliefs.on_relief:
            relieved()
    assert tried == [7, 7, 7]
    assert len(reliefs.on_relief) == 1
