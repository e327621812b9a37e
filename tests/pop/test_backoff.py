"""The back-off after a failed attempt: the node's default, its random part, and the limits of the messages that wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pop.core.settings import ExponentialBackoff, jittered_ms
from penstock.pop.options import PopOptions
from tests.pop.wiring import Parts

RESTARTS = [None, True, False]
HOUR_MS = 3_600_000


def restarted(parts: Parts, keep_index: bool | None) -> Parts:
    return parts if keep_index is None else parts.after_crash("restarted", keep_index=keep_index)


def bodies(parts: Parts, count: int = 100) -> list[bytes]:
    return [message.body for message in parts.pop(count)]


def test_by_default_an_outage_of_twenty_minutes_costs_no_message_its_attempts(tmp_path: Path) -> None:
    """A consumer that returns each message at once used up 16 attempts in 0.08 s before there was a default back-off."""
    parts = Parts(tmp_path / "data", waits_by_default=True)
    parts.publish(b"a")
    for _ in range(600):
        parts.fail()
        parts.advance(2_000)
    assert parts.group().dead_letter_count == 0
    parts.close()


def test_by_default_messages_that_failed_together_return_apart(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "data", waits_by_default=True)
    parts.publish(*(b"%d" % number for number in range(100)))
    parts.fail()
    found = []
    for _ in range(10):
        parts.advance(100)
        found.append(len(parts.pop()))
    assert sum(found) == 100
    assert found[:7] == [0] * 7
    assert min(found[7:]) > 0
    parts.close()


def test_the_waits_of_a_list_that_a_group_sets_are_exact_and_those_of_a_rule_are_spread(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "data", waits_by_default=True)
    for name, backoff in (("listed", (1_000,)), ("ruled", ExponentialBackoff(1_000, 1_000))):
        parts.create(name, backoff=backoff)
    parts.publish(*(b"%d" % number for number in range(20)))
    for name in ("listed", "ruled"):
        for message in parts.pop(group=name):
            parts.change(message.handle, 0, group=name)
    parts.advance(990)
    assert parts.pop(group="listed") == []
    assert parts.pop(group="ruled") != []
    parts.advance(10)
    assert len(parts.pop(group="listed")) == 20
    parts.close()


@pytest.mark.parametrize("jitter", [0.0, 0.25, 1.0])
def test_a_random_part_shortens_a_wait_by_up_to_its_share(jitter: float) -> None:
    waits = [jittered_ms(10_000, jitter, seed * 4_096) for seed in range(1_000)]
    assert 10_000 * (1 - jitter) <= min(waits) <= 10_000 * (1 - jitter) + 100
    assert 9_900 < max(waits) <= 10_000
    assert waits == [jittered_ms(10_000, jitter, seed * 4_096) for seed in range(1_000)]


@pytest.mark.parametrize("how", ["nack", "suspend", "back-off after a nack", "back-off after the deadline"])
@pytest.mark.parametrize("keep_index", RESTARTS)
def test_messages_that_wait_to_return_do_not_stop_their_group(parts: Parts, how: str, keep_index: bool | None) -> None:
    """Ten messages were returned for an hour. A group with room for ten gets all others."""
    parts.create(in_flight_max=10, backoff=(HOUR_MS,) if "back-off" in how else ())
    parts.publish(*(b"%d" % number for number in range(30)))
    if how == "back-off after the deadline":
        while parts.pop(1):
            pass
        parts.advance(10_000)
    else:
        for message in parts.pop():
            delay_ms = 0 if "back-off" in how else HOUR_MS
            parts.change(message.handle, delay_ms, suspend=how == "suspend", nack=how == "nack")
    parts = restarted(parts, keep_index)
    parts.settle()
    second = parts.pop()
    assert [message.body for message in second] == [b"%d" % number for number in range(10, 20)]
    assert parts.pop() == [], "messages that a consumer has still count"
    (found,) = parts.snapshots([parts.group()])
    assert (found.in_flight, found.delayed) == (20, 10)
    parts.ack(*(message.handle for message in second))
    assert len(parts.pop()) == 10
    parts.close()


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_what_a_consumer_extends_still_counts(parts: Parts, keep_index: bool | None) -> None:
    parts.create(in_flight_max=2)
    parts.publish(b"1", b"2", b"3")
    for message in parts.pop():
        parts.change(message.handle, HOUR_MS)
    parts = restarted(parts, keep_index)
    assert parts.pop() == []
    parts.close()


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_messages_that_wait_have_a_limit_of_their_own(tmp_path: Path, keep_index: bool | None) -> None:
    parts = Parts(tmp_path / "data", pop=PopOptions(delayed_max=3))
    parts.publish(*(b"%d" % number for number in range(8)))
    parts.fail(3, HOUR_MS)
    parts = restarted(parts, keep_index)
    assert bodies(parts) == []
    parts.advance(HOUR_MS)
    assert sorted(bodies(parts)) == [b"%d" % number for number in range(8)]
    assert parts.group().delayed == 0
    parts.close()
