"""Consumers inside the node settle deliveries by ids, extend their deadlines, and create groups that end with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pop.core.checkpoint import delivery_id, delivery_of
from penstock.pop.core.deadletters import Reason
from penstock.pop.core.settings import DEFAULTS, ConsumerGroupSettings
from penstock.store.record import Kind
from tests.pop.wiring import FILTER, GROUP, Parts

INVISIBLE_MS = 10_000
SHARED = ConsumerGroupSettings(shared=True)


def take(parts: Parts, count: int = 100) -> list[int]:
    """Pop the visible messages, and return the ids of the deliveries."""
    taken = parts.core.popper.pop(parts.group(), count, INVISIBLE_MS)
    parts.store.commit()
    return [delivery_id(taken.checkpoint.position, index) for index in range(taken.checkpoint.count)] if taken else []


def settle(parts: Parts, kind: Kind, *deliveries: int) -> int:
    settled = parts.core.deliveries.settle(kind, deliveries)
    parts.store.commit()
    return settled


@given(st.integers(1, 2**48 - 1), st.integers(0, 2**16 - 1))
def test_an_id_names_one_delivery(checkpoint: int, index: int) -> None:
    delivery = delivery_id(checkpoint, index)
    assert 0 < delivery < 2**64
    assert delivery_of(delivery) == (checkpoint, index)


@pytest.mark.parametrize("is_after_crash", [False, True])
def test_deliveries_are_settled_by_their_ids(parts: Parts, is_after_crash: bool) -> None:
    parts.publish(*(b"%d" % n for n in range(6)))
    first, second = take(parts, 4), take(parts)
    if is_after_crash:
        parts = parts.after_crash("crashed")
    assert settle(parts, Kind.POP_ACK, first[0], second[1], first[2]) == 3
    assert settle(parts, Kind.POP_DEAD_LETTER, first[1]) == 1
    assert settle(parts, Kind.POP_REVIVED, second[0]) == 1
    assert (parts.group().in_flight, parts.group().dead_letter_count, parts.group().visible_retries) == (1, 1, 1)
    (letter,) = parts.dead_letters.list(GROUP)
    assert (letter.reason, letter.attempts) == (Reason.FORWARDED, 1)
    (back,) = parts.pop()
    assert (back.body, back.attempt) == (b"4", 1)  # the requeue is not counted as an attempt
    assert parts.core.deliveries.is_open(first[3])
    assert not parts.core.deliveries.is_open(first[0])
    parts.close()


def test_deliveries_that_are_over_are_skipped(parts: Parts) -> None:
    parts.publish(b"a", b"b")
    one, two = take(parts)
    assert settle(parts, Kind.POP_ACK, one, one) == 1
    for kind in (Kind.POP_ACK, Kind.POP_DEAD_LETTER, Kind.POP_REVIVED):
        assert settle(parts, kind, one, delivery_id(1), delivery_id(one >> 16, 9)) == 0
    parts.advance(INVISIBLE_MS)
    assert settle(parts, Kind.POP_ACK, two) == 0
    assert [(message.body, message.attempt) for message in parts.pop()] == [(b"b", 2)]
    parts.groups.delete(GROUP)
    assert settle(parts, Kind.POP_ACK, two) == 0


@pytest.mark.parametrize("is_after_crash", [False, True])
def test_failed_deliveries_wait_for_their_back_off_and_become_dead_letters_that_say_why(
    parts: Parts, is_after_crash: bool
) -> None:
    parts.create(attempts_max=2, backoff=(5_000,))
    parts.publish(b"a", b"b")
    first = take(parts)
    assert parts.core.deliveries.fail([first[0], first[0], first[1], delivery_id(1)], "too large") == 2
    parts.store.commit()
    assert not any(parts.core.deliveries.is_open(delivery) for delivery in first)
    if is_after_crash:
        parts = parts.after_crash("crashed")
    parts.advance(4_999)
    assert take(parts) == []
    parts.advance(1)
    second = take(parts)
    assert len(second) == 2
    assert parts.core.deliveries.fail(second[:1], "still too large") == 1
    assert parts.core.deliveries.fail(second[:1], "still too large") == 0
    parts.store.commit()
    if is_after_crash:
        parts = parts.after_crash("crashed again")
    (letter,) = parts.dead_letters.list(GROUP)
    assert (letter.reason, letter.attempts, letter.detail) == (Reason.ATTEMPTS_EXHAUSTED, 2, "still too large")
    assert parts.group().in_flight == 1
    parts.close()


def test_an_extended_delivery_stays_invisible_and_has_another_id(parts: Parts) -> None:
    parts.publish(b"a", b"b", b"c")
    one, two, three = take(parts)
    settle(parts, Kind.POP_ACK, two)
    long_ms = parts.options[0].invisible_ms_max * 10
    held = parts.core.deliveries.extend(parts.group(), [three, two, one], long_ms, "device")
    assert held[1] == two  # this delivery is over, so nothing is extended
    parts.advance(INVISIBLE_MS)
    assert parts.pop() == []
    assert not parts.core.deliveries.is_open(one)
    assert parts.core.deliveries.of_keeper("device") == [held[0], held[2]]
    parts = parts.after_crash("crashed")
    assert parts.core.deliveries.of_keeper("device") == [held[0], held[2]]
    parts.advance(long_ms - INVISIBLE_MS - 1)
    assert settle(parts, Kind.POP_ACK, held[0]) == 1
    assert parts.core.deliveries.of_keeper("device") == [held[2]]
    parts.advance(1)
    assert [(message.body, message.attempt) for message in parts.pop()] == [(b"a", 2)]
    assert parts.core.deliveries.of_keeper("device") == []
    parts.close()


# --- groups that end with their subscriptions -------------------------------------------------------------------------


def test_a_group_created_for_a_subscription_is_known_as_such_after_a_crash(parts: Parts) -> None:
    parts.core.groups.add(GROUP, FILTER, "latest", SHARED)
    parts.store.commit()
    parts = parts.after_crash("crashed")
    assert parts.groups.find(GROUP, FILTER)[0].settings == SHARED
    parts.close()


@pytest.mark.parametrize("by", ["consuming", "creating", "changing"])
def test_such_a_group_becomes_permanent_when_a_service_uses_it(tmp_path: Path, by: str) -> None:
    parts = Parts(tmp_path / "data")
    group = parts.core.groups.add(GROUP, FILTER, "latest", SHARED)
    if by == "consuming":
        assert parts.core.groups.get_or_create(GROUP, FILTER) is group
        assert group.settings == DEFAULTS
    elif by == "creating":
        wanted = ConsumerGroupSettings(attempts_max=3)
        assert parts.groups.create(GROUP, FILTER, "earliest", wanted) is group
        assert group.settings == wanted
    else:
        parts.groups.pause(GROUP)
        assert group.settings == ConsumerGroupSettings(
            paused=True, shared=True
        )  # a change of settings alone doesn't make the group permanent
    parts.close()
