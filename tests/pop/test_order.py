"""FIFO by message group: one message of each group is in flight, and the order holds across retries and crashes."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.pop.core import selection
from penstock.pop.core.deliveries import AckOutcome
from penstock.pop.core.groups import ResetTo
from penstock.pop.core.selection import RESPONSE_BYTES
from penstock.pop.core.suspicion import ALONE, narrowed, together_max
from penstock.pop.errors import GroupBusy
from penstock.store.options import MIB, StoreOptions
from penstock.store.properties import Properties
from penstock.store.store import Store
from tests.depth import DEPTH
from tests.pop.wiring import GROUP, Delivered, Node, Parts
from tests.waiting import until

RESTARTS = [None, True, False]


def restarted(parts: Parts, keep_index: bool | None) -> Parts:
    return parts if keep_index is None else parts.after_crash("restarted", keep_index=keep_index)


def publish(parts: Parts, *texts: str) -> None:
    """Publish messages to one topic. "a1" is message 1 of the message group a."""
    for text in texts:
        parts.publish(text.encode(), properties=Properties(message_group=text[0]))


def texts(messages: list[Delivered]) -> list[str]:
    return [message.body.decode() for message in messages]


def test_two_messages_of_a_message_group_are_never_out_at_a_time_and_others_go_on(parts: Parts) -> None:
    parts.create(fifo=True)
    publish(parts, "a1", "a2", "b1", "a3", "c1", "b2")
    first = parts.pop()
    assert texts(first) == ["a1", "b1", "c1"]
    assert parts.pop() == []
    parts.ack(first[0].handle)
    second = parts.pop()
    assert texts(second) == ["a2"]
    parts.ack(second[0].handle, first[1].handle)
    assert sorted(texts(parts.pop())) == ["a3", "b2"]


def test_the_topic_is_the_message_group_where_none_is_named(parts: Parts) -> None:
    parts.create(fifo=True)
    for topic in ("plant/1", "plant/1", "plant/2", "plant/2"):
        parts.publish(topic[-1].encode(), topic=topic)
    assert texts(parts.pop()) == ["1", "2"]
    assert parts.pop() == []


def test_a_topic_and_a_message_group_of_its_name_are_two(parts: Parts) -> None:
    parts.create(fifo=True)
    parts.publish(b"by topic", topic="plant/1")
    parts.publish(b"by name", topic="plant/2", properties=Properties(message_group="plant/1"))
    assert texts(parts.pop()) == ["by topic", "by name"]


@pytest.mark.parametrize("keep_index", RESTARTS)
@pytest.mark.parametrize("how", ["nack", "suspend", "expire", "extend and expire", "release"])
def test_a_failed_message_is_delivered_again_before_later_ones_of_its_message_group(
    parts: Parts, how: str, keep_index: bool | None
) -> None:
    """Of the sequence 1, 2 (fails), 3, 4 a consumer gets 1, 2, 2, 3, 4: it doesn't get 3 before 2 is acknowledged."""
    parts.create(fifo=True)
    publish(parts, "a1", "a2", "a3", "a4")
    seen = []
    failed = False
    while messages := parts.pop():
        assert len(messages) == 1
        seen += texts(messages)
        handle = messages[0].handle
        if seen[-1] == "a2" and not failed:
            failed = True
            if how in ("nack", "suspend"):
                parts.change(handle, 0, suspend=how == "suspend")
            elif how == "extend and expire":
                parts.change(handle, 20_000)
            elif how == "release":
                (checkpoint,) = parts.core.checkpoints.values()
                parts.core.deliveries.requeue(checkpoint)
            parts.store.commit()
            parts = restarted(parts, keep_index)
            parts.advance(20_000)
        else:
            assert parts.ack(handle) == [AckOutcome.OK]
    assert seen == ["a1", "a2", "a2", "a3", "a4"]
    parts.close()


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_a_back_off_holds_its_message_group_and_no_other(parts: Parts, keep_index: bool | None) -> None:
    parts.create(fifo=True, backoff=(5_000,))
    publish(parts, "a1", "a2", "b1")
    a1, b1 = parts.pop()
    parts.change(a1.handle, 0)
    parts.ack(b1.handle)
    after = restarted(parts, keep_index)
    publish(after, "b2")
    assert texts(after.pop()) == ["b2"]
    after.advance(4_999)
    assert after.pop() == []
    after.advance(1)
    assert [(message.body, message.attempt) for message in after.pop()] == [(b"a1", 2)]
    after.close()


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_a_dead_letter_lets_its_message_group_go_on(parts: Parts, keep_index: bool | None) -> None:
    parts.create(fifo=True, attempts_max=2)
    publish(parts, "a1", "a2")
    for attempt in (1, 2):
        assert [(message.body, message.attempt) for message in parts.pop()] == [(b"a1", attempt)]
        parts.advance(10_000)
    after = restarted(parts, keep_index)
    assert texts(after.pop()) == ["a2"]
    assert [letter.attempts for letter in after.dead_letters.list(GROUP)] == [2]
    after.close()


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_a_dead_letter_that_is_sent_back_comes_next_in_its_message_group_but_not_beside_it(
    parts: Parts, keep_index: bool | None
) -> None:
    parts.create(fifo=True, attempts_max=1)
    publish(parts, "a1", "a2", "a3", "a4")
    parts.pop()
    parts.advance(10_000)
    (a2,) = parts.pop()
    assert parts.pop() == []
    assert parts.dead_letters.redrive(GROUP) == 1
    parts.store.commit()
    assert parts.pop() == []
    after = restarted(parts, keep_index)
    after.ack(a2.handle)
    (a1,) = after.pop()
    assert (a1.body, a1.attempt) == (b"a1", 1)
    after.ack(a1.handle)
    assert texts(after.pop()) == ["a3"]
    after.close()


def test_a_damaged_message_does_not_hold_its_message_group(parts: Parts) -> None:
    parts.create(fifo=True)
    positions = [parts.publish(text, properties=Properties(message_group="a"))[0] for text in (b"a1", b"a2", b"a3")]
    parts.damage(positions[1], positions[2] - positions[1])
    (first,) = parts.pop()
    parts.ack(first.handle)
    assert texts(parts.pop()) == ["a3"]


def test_the_waiting_messages_of_a_busy_message_group_are_inspected_once(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    parts.create(fifo=True)
    publish(parts, *(f"a{n}" for n in range(300)))
    parts.pop(1)
    parts.pop(1)
    reads: list[int] = []
    read = Store.read

    def counted(store: Store, position: int, size: int) -> bytes:
        reads.append(position)
        return read(store, position, size)

    monkeypatch.setattr(Store, "read", counted)
    for number in range(20):
        publish(parts, f"b{number}")
        (message,) = parts.pop(1)
        parts.ack(message.handle)
    assert len(reads) <= 60


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_what_is_parked_is_bounded_and_the_rest_follows(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, keep_index: bool | None
) -> None:
    monkeypatch.setattr(selection, "PARKED_MAX", 10)
    group = parts.create(fifo=True)
    publish(parts, *(f"a{n}" for n in range(30)), "b0")
    (first,) = parts.pop()
    parts.pop()
    assert group.order is not None
    assert group.order.parked == 10
    parts = restarted(parts, keep_index)
    seen = ["a0"]
    parts.ack(first.handle)
    while messages := parts.pop():
        seen += texts(messages)
        parts.ack(*(message.handle for message in messages))
    assert [text for text in seen if text[0] == "a"] == [f"a{n}" for n in range(30)]
    assert "b0" in seen
    parts.close()


def test_large_messages_that_fill_an_answer_stay_in_order(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "large", store=StoreOptions(segment_bytes=64 * MIB))
    parts.create(fifo=True)
    for number in range(12):
        body = b"%d" % number + bytes(RESPONSE_BYTES // 2)
        parts.publish(body, properties=Properties(message_group="abc"[number % 3]))
    seen: dict[int, list[int]] = defaultdict(list)
    while messages := parts.pop():
        for message in messages:
            number = int(message.body.rstrip(b"\0"))
            seen[number % 3].append(number)
        parts.ack(*(message.handle for message in messages))
    assert seen == {key: list(range(key, 12, 3)) for key in range(3)}
    parts.close()


def test_fifo_changes_only_while_no_message_is_in_flight(parts: Parts) -> None:
    from dataclasses import replace

    parts.create()
    publish(parts, "a1", "a2")
    messages = parts.pop()
    with pytest.raises(GroupBusy, match="in flight"):
        parts.groups.update(GROUP, "", lambda old: replace(old, fifo=True))
    parts.ack(*(message.handle for message in messages))
    parts.groups.update(GROUP, "", lambda old: replace(old, fifo=True))
    publish(parts, "a3", "a4", "a5")
    (a3,) = parts.pop()
    parts.ack(a3.handle)
    parts.groups.reset(GROUP, "", ResetTo(end="latest"))
    parts.groups.update(GROUP, "", lambda old: replace(old, fifo=False))
    publish(parts, "a6", "a7")
    assert texts(parts.pop()) == ["a6", "a7"]


# --- several messages of one message group under one pop ---------------------------------------------------------------


def batch(parts: Parts, messages_max: int = 100, in_order_max: int = 100) -> list[Delivered]:
    """Pop as a consumer that processes several messages of a message group in order."""
    taken = parts.core.popper.pop(parts.group(), messages_max, 10_000, in_order_max=in_order_max)
    parts.store.commit()
    return parts.delivered(taken) if taken else []


def test_a_pop_may_take_several_messages_of_a_message_group_in_order(parts: Parts) -> None:
    parts.create(fifo=True)
    publish(parts, "a1", "b1", "a2", "a3", "b2", "a4", "a5")
    assert texts(batch(parts, in_order_max=3)) == ["a1", "b1", "a2", "a3", "b2"]
    assert batch(parts) == []


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_the_next_batch_of_a_message_group_waits_for_all_messages_of_the_first(parts: Parts, keep_index: bool | None) -> None:
    parts.create(fifo=True)
    publish(parts, *(f"a{n}" for n in range(7)))
    first = batch(parts, in_order_max=3)
    assert batch(parts) == []
    parts.ack(first[0].handle, first[2].handle)
    parts = restarted(parts, keep_index)
    assert batch(parts) == []
    publish(parts, "a7")
    parts.ack(first[1].handle)
    assert texts(batch(parts, 2)) == ["a3", "a4"]
    parts.close()


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_what_follows_a_failed_message_returns_and_comes_after_it_and_its_attempt_is_not_counted(
    parts: Parts, keep_index: bool | None
) -> None:
    parts.create(fifo=True, backoff=(5_000,))
    publish(parts, "a1", "a2", "a3", "a4", "a5")
    a1, a2, a3, a4 = batch(parts, in_order_max=4)
    parts.ack(a1.handle)
    parts.change(a2.handle, 0)
    parts.change(a4.handle, 0, suspend=True)
    parts.change(a3.handle, 0, suspend=True)
    parts.settle()
    parts = restarted(parts, keep_index)
    assert batch(parts) == [], "the failed message waits for its back-off, and the others for it"
    parts.advance(5_000)
    assert [(message.body, message.attempt) for message in batch(parts)] == [
        (b"a2", 2),
        (b"a3", 1),
        (b"a4", 1),
        (b"a5", 1),
    ]
    parts.close()


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_a_batch_that_expires_comes_back_in_order_and_only_the_message_that_was_out_alone_loses_attempts(
    parts: Parts, keep_index: bool | None
) -> None:
    parts.create(fifo=True, attempts_max=2)
    publish(parts, "a1", "a2", "a3")
    batch(parts, in_order_max=2)
    parts.advance(10_000)
    parts = restarted(parts, keep_index)
    for attempt in (1, 2):
        assert [(message.body, message.attempt) for message in batch(parts)] == [(b"a1", attempt)]
        parts.advance(10_000)
    (a2,) = batch(parts)
    assert (a2.body, a2.attempt) == (b"a2", 1)
    parts.ack(a2.handle)
    assert [(message.body, message.attempt) for message in batch(parts)] == [(b"a3", 1)]
    assert parts.group().dead_letter_count == 1
    parts.close()


async def test_a_waiting_poll_gets_a_message_of_a_fifo_group_that_returns(node: Node) -> None:
    group = node.create(fifo=True)
    node.publish(b"a1")
    taken = node.core.popper.pop(group, 1, 60_000)
    assert taken is not None
    waiting = asyncio.create_task(node.core.polls.poll((group,), 1, 60_000, 30_000))
    await until(lambda: node.core.waiting == 1)
    node.core.deliveries.requeue(taken.checkpoint)
    result = await waiting
    assert result is not None
    assert result.checkpoint.entry(0).attempt == 1


# --- against a model --------------------------------------------------------------------------------------------------

steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from("abcd")),
        st.tuples(st.just("pop"), st.tuples(st.integers(1, 6), st.integers(1, 3))),
        st.tuples(st.just("ack"), st.integers(0, 9)),
        st.tuples(st.just("nack"), st.integers(0, 9)),
        st.tuples(st.just("advance"), st.sampled_from([1, 5_000, 10_000])),
        st.tuples(st.just("crash"), st.booleans()),
        st.tuples(st.just("redrive"), st.just(0)),
    ),
    max_size=60,
)


A_MESSAGE_GROUP_AFTER_ONE_THAT_WAITS_FOR_ITS_TURN_ALONE: list[tuple[str, object]] = [
    *(("publish", "a"), ("publish", "b"), ("pop", (2, 1)), ("advance", 5_000)),
    *(("publish", "c"), ("pop", (1, 1)), ("advance", 5_000)),
    *(("pop", (1, 1)), ("advance", 5_000), ("pop", (1, 1))),
]


@settings(max_examples=10 * DEPTH)
@given(steps=steps)
@example(steps=[("publish", "a"), ("publish", "a"), ("pop", (1, 1)), ("nack", 0), ("pop", (2, 2))])
@example(steps=A_MESSAGE_GROUP_AFTER_ONE_THAT_WAITS_FOR_ITS_TURN_ALONE)
def test_order_holds_whatever_happens(steps: list[tuple[str, object]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        parts = Parts(Path(directory) / "0")
        parts.create(fifo=True, attempts_max=2)
        waiting: dict[str, list[str]] = defaultdict(list)
        sent_back: set[str] = set()
        out: dict[str, tuple[str, int, int, int]] = {}  # text, deadline, number of the pop, and level, by handle
        dead: list[str] = []
        attempts: dict[str, int] = defaultdict(int)
        levels: dict[str, int] = defaultdict(int)

        def wait(text: str) -> None:
            waiting[text[0]].append(text)
            waiting[text[0]].sort(key=lambda text: (text not in sent_back, int(text[1:])))

        def expire() -> None:
            due = {handle: each for handle, each in out.items() if each[1] <= parts.clock.now_ms()}
            together = Counter(pop for _, _, pop, _ in due.values())
            for handle, (text, _, pop, level) in due.items():
                del out[handle]
                if together[pop] > 1:
                    attempts[text] -= 1
                    levels[text] = narrowed(level, together[pop])
                else:
                    levels[text] = ALONE if level else 0
                if together[pop] == 1 and attempts[text] >= 2:
                    dead.append(text)
                else:
                    wait(text)

        for number, (step, value) in enumerate(steps):
            if step == "publish":
                text = f"{value}{number}"
                publish(parts, text)
                wait(text)
            elif step == "pop":
                assert isinstance(value, tuple)
                messages_max, in_order_max = value
                busy = {text[0] for text, *_ in out.values()}
                is_alone_out = any(level == ALONE for *_, level in out.values())
                free = [key for key in "abcd" if key not in busy and waiting[key]]
                free = [key for key in free if levels[waiting[key][0]] != ALONE or not is_alone_out]
                messages = batch(parts, messages_max, in_order_max)
                found = [message.body.decode() for message in messages]
                assert len(found) <= messages_max
                # A pop that scans new messages beside retries may leave some room unused, but not all of it.
                assert bool(found) is bool(free)
                assert {text[0] for text in found} <= set(free)
                assert max((sum(text[0] == key for text in found) for key in "abcd"), default=0) <= in_order_max
                level = min((levels[text] for text in found if levels[text]), default=0)
                assert not level or len(found) <= together_max(level)
                for message, text in zip(messages, found, strict=True):
                    assert text == waiting[text[0]].pop(0)
                    attempts[text] += 1
                    assert message.attempt == attempts[text]
                    out[message.handle] = (text, parts.clock.now_ms() + 10_000, number, level)
            elif step in ("ack", "nack") and out:
                handle = sorted(out)[int(str(value)) % len(out)]
                if step == "ack":
                    assert parts.ack(handle) == [AckOutcome.OK]
                    del out[handle]
                else:
                    assert parts.change(handle, 0)[0] is AckOutcome.OK
                    out[handle] = (out[handle][0], 0, number, 0)
                    parts.settle()
                    expire()
            elif step == "advance":
                parts.advance(int(str(value)))
                expire()
            elif step == "crash":
                parts = parts.after_crash(str(number + 1), keep_index=bool(value))
            elif step == "redrive":
                assert parts.dead_letters.redrive(GROUP) == len(dead)
                parts.store.commit()
                for text in dead:
                    attempts[text] = levels[text] = 0
                    sent_back.add(text)
                    wait(text)
                dead.clear()
        parts.close()
