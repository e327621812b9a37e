"""The window of messages that are due soon, against a sorted list."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.record import checksum
from penstock.timer import window
from penstock.timer.entries import LANES, PENDING_DTYPE, Entries
from penstock.timer.window import DueWindow

TOPICS = [b"plant/%d" % number for number in range(4)]

Message = tuple[int, int, bytes]
"""Due time, position and topic."""

batches = st.lists(st.tuples(st.integers(0, 400), st.sampled_from(TOPICS)), min_size=1, max_size=40)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["one by one", "at once"]), batches),
        st.tuples(st.just("take"), st.tuples(st.integers(0, 100), st.integers(1, 30))),
        st.tuples(st.just("put back"), st.tuples(st.integers(0, 100), st.integers(1, 30))),
        st.tuples(st.just("step"), st.tuples(st.integers(0, 300), st.integers(0, 300))),
    ),
    max_size=25,
)


def entries_of(found: list[Message]) -> Entries:
    rows = [(due_ms, position, 0, 1, 0, TOPICS.index(topic)) for due_ms, position, topic in found]
    return Entries(np.array(rows, dtype=PENDING_DTYPE), TOPICS)


def messages_in(entries: Entries) -> list[Message]:
    return [(due_ms, position, entries.topics[topic]) for due_ms, position, _, _, _, topic in entries.rows.tolist()]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "OPENED_MAX", 8)
    monkeypatch.setattr(window, "SINGLE_MAX", 5)


@given(steps=steps)
def test_messages_come_when_they_are_due_and_each_lane_in_order(steps: list[tuple[str, Any]]) -> None:
    held, pending, now_ms, positions = DueWindow(), set[Message](), 0, count()
    last: dict[int, Message] = {}
    for step, what in [*steps, ("take", (1_000, 10_000))]:
        if step in ("one by one", "at once"):
            found = [(now_ms + delay_ms, next(positions), topic) for delay_ms, topic in what]
            pending.update(found)
            if step == "at once":
                held.add_all(entries_of(found))
            else:
                for due_ms, position, topic in found:
                    held.add(due_ms, position, 0, 1, 0, topic)
        elif step == "step":
            begin_ms, position = what
            begin_ms += now_ms + 1
            moved = {message for message in pending if begin_ms <= message[0] < begin_ms + 50 and message[1] >= position}
            assert set(messages_in(held.take_where(begin_ms, begin_ms + 50, position))) == moved
            pending -= moved
        else:
            more_ms, limit = what
            now_ms += more_ms
            while True:
                is_due = [message for message in pending if message[0] <= now_ms]
                taken = held.take(now_ms, limit)
                found = messages_in(taken)
                assert found == sorted(found)
                assert len(found) <= limit
                assert bool(found) == bool(is_due)
                if step == "put back":
                    held.put_back(taken)
                    break
                assert set(found) <= set(is_due)
                pending.difference_update(found)
                for message in found:
                    lane = checksum(message[2]) % LANES
                    assert message > last.get(lane, (-1, -1, b""))
                    last[lane] = message
                if not found:
                    break
        assert len(held) == len(pending)
        first = held.next_due_ms()
        assert (first is None) == (not pending)
        assert first is None or first == min(pending)[0]


def test_a_message_of_another_topic_comes_soon_although_a_flood_is_due_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "OPENED_MAX", 1_000)
    held = DueWindow()
    for start in range(0, 5_000, 500):
        held.add_all(entries_of([(1, position, TOPICS[0]) for position in range(start, start + 500)]))
    held.add_all(entries_of([(2, 5_000, TOPICS[1])]))
    turns = 0
    while (2, 5_000, TOPICS[1]) not in messages_in(held.take(10, 100)):
        turns += 1
    assert turns < 10
