"""A message becomes a dead letter exactly once, with reason and origin, and is redriven exactly once."""

from __future__ import annotations

import pytest

from penstock.pop.core.deadletters import Reason
from penstock.pop.core.deliveries import AckOutcome, VisibilityChange
from penstock.pop.core.settings import ExponentialBackoff
from penstock.pop.errors import RequestInvalid
from tests.pop.wiring import FILTER, GROUP, TOPIC, Parts

DLQ = f"$dlq/{GROUP}"
RESTARTS = [None, True, False]


def restarted(parts: Parts, keep_index: bool | None, name: str = "restarted") -> Parts:
    return parts if keep_index is None else parts.after_crash(name, keep_index=keep_index)


def bodies(parts: Parts, group: str = GROUP, topic_filter: str = FILTER) -> list[bytes]:
    return [message.body for message in parts.pop(group=group, topic_filter=topic_filter)]


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_a_dead_letter_tells_where_it_came_from_and_why(parts: Parts, keep_index: bool | None) -> None:
    parts.create(attempts_max=2)
    (first,) = parts.publish(b"exhausted")
    parts.pop(1)
    parts.advance(10_000)
    parts.pop(1)
    parts.advance(10_000)
    exhausted_ms = parts.clock.now_ms()
    (second,) = parts.publish(b"given up")
    (given_up,) = parts.pop(1)
    parts.advance(5_000)
    assert parts.core.deliveries.dead_letter(GROUP, [given_up.handle, given_up.handle]) == [
        AckOutcome.OK,
        AckOutcome.ALREADY_ACKED,
    ]
    assert parts.ack(given_up.handle) == [AckOutcome.HANDLE_EXPIRED]
    after = restarted(parts, keep_index)
    letters = after.dead_letters.list(GROUP)
    group = after.group()
    assert [(x.position, x.group_id, x.attempts, x.reason, x.failed_ms) for x in letters] == [
        (first, group.id, 2, Reason.ATTEMPTS_EXHAUSTED, exhausted_ms),
        (second, group.id, 1, Reason.FORWARDED, exhausted_ms + 5_000),
    ]
    assert group.dead_letter_count == 2
    dead = after.pop(group="operators", topic_filter=DLQ)
    assert [(message.position, message.topic, message.body, message.attempt) for message in dead] == [
        (first, TOPIC, b"exhausted", 1),
        (second, TOPIC, b"given up", 1),
    ]
    after.close()


def test_an_unreadable_message_is_a_dead_letter_that_says_so(parts: Parts) -> None:
    parts.group()
    damaged, intact = parts.publish(b"damaged", b"intact")
    parts.damage(damaged, intact - damaged)
    parts.pop()
    assert [(letter.position, letter.reason) for letter in parts.dead_letters.list(GROUP)] == [(damaged, Reason.UNREADABLE)]


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_a_dead_letter_goes_back_once_as_a_new_message(parts: Parts, keep_index: bool | None) -> None:
    parts.create(attempts_max=1)
    first, second = parts.publish(b"1", b"2")
    parts.fail()
    assert parts.dead_letters.redrive(GROUP, [second, 12345]) == 1
    parts.store.commit()
    after = restarted(parts, keep_index)
    assert after.dead_letters.redrive(GROUP, [second]) == 0
    assert [(message.body, message.attempt) for message in after.pop()] == [(b"2", 1)]
    assert after.pop() == []
    assert [letter.position for letter in after.dead_letters.list(GROUP)] == [first]
    assert (after.group().dead_letter_count, after.group().in_flight) == (1, 1)
    # The message may become a dead letter again, and be redriven again.
    after.advance(10_000)
    assert [letter.position for letter in after.dead_letters.list(GROUP)] == [first, second]
    assert after.dead_letters.redrive(GROUP) == 2
    assert after.dead_letters.redrive(GROUP) == 0
    after.store.commit()
    assert sorted(bodies(after)) == [b"1", b"2"]
    after.close()


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_purged_dead_letters_are_gone_and_their_messages_stay_in_the_log(parts: Parts, keep_index: bool | None) -> None:
    parts.create(attempts_max=1)
    first, second, third = parts.publish(b"1", b"2", b"3")
    parts.fail()
    assert parts.dead_letters.purge(GROUP, [second, 12345]) == 1
    parts.store.commit()
    after = restarted(parts, keep_index)
    assert after.dead_letters.purge(GROUP, [second]) == 0
    assert after.dead_letters.redrive(GROUP, [second]) == 0
    assert after.dead_letters.find(GROUP, second) is None
    assert [letter.position for letter in after.dead_letters.list(GROUP)] == [first, third]
    assert after.group().dead_letter_count == 2
    after.group("operators", DLQ)
    assert bodies(after, group="operators", topic_filter=DLQ) == [b"1", b"3"]
    assert after.dead_letters.purge(GROUP) == 2
    assert (after.dead_letters.list(GROUP), after.group().dead_letter_count) == ([], 0)
    assert [message.body for message in after.pop(group="another")] == [b"1", b"2", b"3"]
    after.close()


def test_a_nack_of_the_last_attempt_is_a_dead_letter_with_its_reason_at_once(parts: Parts) -> None:
    parts.create(attempts_max=2, backoff=ExponentialBackoff(60_000, 60_000, 1.0))
    parts.publish(b"1", b"2")
    for attempt in (1, 2):
        messages = parts.pop()
        assert [message.attempt for message in messages] == [attempt] * 2
        for message, reason in zip(messages, ("no tariff", "é" * 1_000), strict=True):
            change = VisibilityChange(message.handle, 5_000, nack=True, detail=reason)
            assert parts.core.deliveries.change_invisible(GROUP, [change])[0][0] is AckOutcome.OK
        parts.advance(65_000)
    assert [(letter.reason, letter.attempts, letter.detail) for letter in parts.dead_letters.list(GROUP)] == [
        (Reason.ATTEMPTS_EXHAUSTED, 2, "no tariff"),
        (Reason.ATTEMPTS_EXHAUSTED, 2, "é" * 1_000),
    ]
    assert parts.group().in_flight == 0
    with pytest.raises(RequestInvalid, match="2002 bytes"):
        parts.core.deliveries.change_invisible(GROUP, [VisibilityChange("", 0, nack=True, detail="é" * 1_001)])


def test_what_was_sent_back_is_not_popped_from_the_dead_letters_any_more(parts: Parts) -> None:
    parts.create(attempts_max=1)
    first, _ = parts.publish(b"1", b"2")
    parts.fail()
    parts.group("operators", DLQ)
    parts.dead_letters.redrive(GROUP, [first])
    parts.store.commit()
    assert bodies(parts, group="operators", topic_filter=DLQ) == [b"2"]
    parts.pop()
    parts.advance(10_000)  # dead again: the queue has the message twice, and one of the two was redriven
    assert sorted(bodies(parts, group="operators", topic_filter=DLQ)) == [b"1", b"2"]  # the second became visible again too


def test_a_group_with_two_filters_gets_its_dead_letters_back_where_they_came_from(parts: Parts) -> None:
    parts.create(attempts_max=1)
    parts.create(topic_filter=TOPIC, attempts_max=1)
    (position,) = parts.publish(b"a")
    parts.pop()
    parts.pop(topic_filter=TOPIC)
    parts.advance(10_000)
    assert len(parts.dead_letters.list(GROUP)) == 2
    assert parts.dead_letters.redrive(GROUP, [position]) == 2
    parts.store.commit()
    assert bodies(parts) == [b"a"]
    assert bodies(parts, topic_filter=TOPIC) == [b"a"]
    assert bodies(parts, topic_filter=FILTER) == []


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_dead_letters_are_listed_page_by_page(parts: Parts, limit: int) -> None:
    parts.create(attempts_max=1)
    positions = parts.publish(*(b"%d" % n for n in range(5)))
    parts.fail()
    listed: list[int] = []
    while page := parts.dead_letters.list(GROUP, listed[-1] + 1 if listed else 0, limit):
        listed += [letter.position for letter in page]
    assert listed == positions


def test_a_group_without_dead_letters_has_none_to_list_or_to_send_back(parts: Parts) -> None:
    parts.group()
    assert parts.dead_letters.list(GROUP) == []
    assert parts.dead_letters.redrive(GROUP) == 0
    assert parts.dead_letters.redrive("nobody") == 0


# --- attempt ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_index", RESTARTS)
@pytest.mark.parametrize("fifo", [False, True])
def test_the_same_attempt_id_gets_the_same_messages_while_they_are_in_flight(
    parts: Parts, keep_index: bool | None, fifo: bool
) -> None:
    parts.create(fifo=fifo)
    for number in range(6):
        parts.publish(b"%d" % number, topic=f"plant/{number}")
    first = parts.pop(3, attempt_id="call 1")
    parts.store.commit()
    after = restarted(parts, keep_index)
    assert after.pop(3, attempt_id="call 1") == first
    assert after.group().in_flight == 3
    assert [message.body for message in after.pop(2, attempt_id="call 2")] == [b"3", b"4"]
    after.ack(first[1].handle)
    assert after.pop(3, attempt_id="call 1") == [first[0], first[2]]
    after.ack(first[0].handle, first[2].handle)
    assert [message.body for message in after.pop(3, attempt_id="call 1")] == [b"5"]
    after.close()


def test_an_attempt_id_whose_messages_have_expired_gets_new_ones(parts: Parts) -> None:
    parts.publish(b"a")
    (first,) = parts.pop(attempt_id="x")
    parts.advance(9_999)
    assert parts.pop(attempt_id="x") == [first]
    parts.advance(1)
    assert [message.attempt for message in parts.pop(attempt_id="x")] == [2]


def test_attempt_ids_take_no_memory_after_their_messages_are_acknowledged(parts: Parts) -> None:
    group = parts.group()
    for number in range(50):
        parts.publish(b"a")
        (message,) = parts.pop(attempt_id=str(number))
        assert len(group.attempt_ids) == 1
        parts.ack(message.handle)
    assert not group.attempt_ids


def test_an_attempt_id_is_of_one_group(parts: Parts) -> None:
    parts.publish(b"a")
    (ours,) = parts.pop(attempt_id="x")
    (theirs,) = parts.pop(attempt_id="x", group="audit")
    assert ours.handle != theirs.handle
