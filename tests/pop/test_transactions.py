"""A transactional message is delivered once after a commit, and never without one. The node asks pending producers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.pop.core import transactions
from penstock.pop.core.transactions import EndOutcome, HalfMessage
from penstock.pop.options import PopOptions
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Flag
from tests.pop.wiring import TOPIC, Node, Parts
from tests.waiting import WAIT_S_MAX

RESTARTS = [None, True, False]
OPTIONS = PopOptions(transaction_check_ms=1_000, transaction_checks_max=3, transactions_max=5)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = Parts(tmp_path / "data", pop=OPTIONS)
    yield made
    made.close()


def store_half(parts: Parts, body: bytes, producer: str = "orders") -> int:
    properties = encode_properties(Properties(producer=producer))
    route = parts.store.router.route(TOPIC.encode())
    position = parts.store.append_message(route, body, properties, 1 | Flag.HALF)
    parts.store.commit()
    return position


def bodies(parts: Parts) -> list[bytes]:
    parts.settle_queues()
    return [message.body for message in parts.pop()]


def restarted(parts: Parts, keep_index: bool | None) -> Parts:
    return parts if keep_index is None else parts.after_crash("restarted", keep_index=keep_index)


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_a_half_message_is_seen_when_it_is_committed_and_not_before(parts: Parts, keep_index: bool | None) -> None:
    parts.group()
    position = store_half(parts, b"half")
    parts.publish(b"plain")
    parts = restarted(parts, keep_index)
    assert bodies(parts) == [b"plain"]
    assert parts.transactions.end(position, commit=True) is EndOutcome.OK
    parts.store.commit()
    assert bodies(parts) == [b"half"]
    parts.close()


@pytest.mark.parametrize("keep_index", RESTARTS)
@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_ends_once_and_says_how_it_ended(parts: Parts, keep_index: bool | None, commit: bool) -> None:
    parts.group()
    position = store_half(parts, b"half")
    parts.transactions.end(position, commit=commit)
    parts.store.commit()
    after = restarted(parts, keep_index)
    ended = EndOutcome.ALREADY_COMMITTED if commit else EndOutcome.ALREADY_ROLLED_BACK
    assert after.transactions.end(position, commit=True) is ended
    assert after.transactions.end(position, commit=False) is ended
    assert bodies(after) == ([b"half"] if commit else [])
    assert len(after.transactions) == 0
    after.close()


def test_a_transaction_that_never_was_is_unknown(parts: Parts) -> None:
    (position,) = parts.publish(b"plain")
    assert parts.transactions.end(position, commit=True) is EndOutcome.UNKNOWN_TRANSACTION


@pytest.mark.parametrize("start", ["before", "after"])
def test_a_committed_message_has_its_place_by_its_commit_in_queues_of_any_age(parts: Parts, start: str) -> None:
    if start == "before":
        parts.group(topic_filter="plant/+/temperature")
    position = store_half(parts, b"half")
    parts.publish(b"plain")
    parts.transactions.end(position, commit=True)
    parts.store.commit()
    parts.publish(b"later")
    messages = parts.pop(topic_filter="plant/+/temperature")
    assert [message.body for message in messages] == [b"plain", b"half", b"later"]


@pytest.mark.parametrize("keep_index", RESTARTS)
def test_a_producer_that_says_nothing_is_asked_a_bounded_number_of_times_then_it_is_rolled_back(
    parts: Parts, keep_index: bool | None
) -> None:
    position = store_half(parts, b"half")
    parts.advance(999)
    asked = parts.transactions.get(position)
    assert asked is not None
    assert asked.checks == 0
    parts.advance(1)
    after = restarted(parts, keep_index)
    for checks in (1, 2, 3):
        half = after.transactions.get(position)
        assert half is not None
        assert half.checks == checks
        after.advance(1_000)
    assert after.transactions.get(position) is None
    assert after.transactions.end(position, commit=True) is EndOutcome.ALREADY_ROLLED_BACK
    assert bodies(after) == []
    after.close()


def test_a_face_of_its_own_may_take_the_question(parts: Parts) -> None:
    taken = []

    def take(half: HalfMessage) -> bool:
        taken.append(half.position)
        return half.producer == "official"

    parts.transactions.on_check.append(take)
    ours, theirs = store_half(parts, b"a"), store_half(parts, b"b", "official")
    parts.advance(1_000)
    assert sorted(taken) == [ours, theirs]
    assert asyncio.run(_polled(parts, "official")) == []
    assert asyncio.run(_polled(parts, "orders")) == [ours]


async def _polled(parts: Parts, producer: str) -> list[int]:
    return [half.position for half in await parts.transactions.poll(producer, 10, 0)]


async def test_a_poll_looks_past_the_messages_that_it_may_not_have_and_leaves_them_to_others(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "SCANNED_MAX", 2)
    positions = [store_half(parts, b"%d" % number) for number in range(5)]
    parts.advance(1_000)
    found = await parts.transactions.poll("orders", 10, 0, lambda half: half.position == positions[4])
    assert [half.position for half in found] == [positions[4]]
    assert await parts.transactions.poll("orders", 10, 0, lambda _: False) == []
    left = [await _polled(parts, "orders") for _ in range(3)]
    assert sorted(position for found in left for position in found) == positions[:4]


async def test_a_poll_is_woken_by_the_question_and_each_goes_to_one(tmp_path: Path) -> None:
    async with Node(tmp_path / "data", pop=PopOptions(transaction_check_ms=100)) as node:
        polls = [asyncio.ensure_future(node.transactions.poll("orders", 1, 10_000)) for _ in range(2)]
        await asyncio.sleep(0)
        positions = {store_half(node, b"a"), store_half(node, b"b")}
        found = await asyncio.wait_for(asyncio.gather(*polls), WAIT_S_MAX)
        assert {half.position for halves in found for half in halves} == positions
        assert node.transactions.waiting == 0


async def test_a_poll_that_is_cancelled_leaves_the_question_to_the_next(parts: Parts) -> None:
    poll = asyncio.ensure_future(parts.transactions.poll("orders", 1, 10_000))
    await asyncio.sleep(0)
    poll.cancel()
    await asyncio.wait((poll,))
    position = store_half(parts, b"a")
    parts.advance(1_000)
    assert await _polled(parts, "orders") == [position]
    assert await _polled(parts, "orders") == []
    parts.advance(1_000)
    assert await _polled(parts, "orders") == [position]  # the node asks again


def test_pending_transactions_are_listed_and_bounded(parts: Parts) -> None:
    from penstock.store.errors import LimitExceeded

    positions = [store_half(parts, b"x") for _ in range(5)]
    assert [half.position for half in parts.transactions] == positions
    with pytest.raises(LimitExceeded, match="commit or roll back some"):
        parts.transactions.admit()
