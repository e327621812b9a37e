"""A message that ends the processes of its consumers is the only dead letter, and no other message loses an attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pop.core.deliveries import AckOutcome, VisibilityChange
from penstock.pop.core.suspicion import ALONE, attempts_and_level, lowest, narrowed, returned, together_max
from penstock.store.properties import Properties
from penstock.store.record import LEVEL_MASK
from tests.pop.wiring import GROUP, Delivered, Parts

INVISIBLE_MS = 10_000
ATTEMPTS_MAX = 3
POISON = b"poison"


def test_a_level_fits_into_the_flags_of_a_record_however_many_messages_a_session_had() -> None:
    assert narrowed(0, 32_768) == LEVEL_MASK == narrowed(0, 65_535), "mqtt.inflight_max may be 65,535"


@given(count=st.integers(2, 16_384), lost=st.lists(st.integers(0, 16_384)))
def test_each_uncounted_return_at_least_halves_what_is_out_together(count: int, lost: list[int]) -> None:
    level, returns, out = 0, 0, count
    while level != ALONE:
        level, before = narrowed(level, out), out
        returns += 1
        assert together_max(level) < before
        assert attempts_and_level(returned(65_535, level)) == (65_535, level)
        assert lowest(level, 0) == lowest(0, level) == lowest(level, 14) == level
        out = max(together_max(level) - (lost.pop() if lost else 0), 2)
    assert returns <= log2(count) + 1


@dataclass(slots=True)
class Consumers:
    """Processes of one consumer, of which the next one starts where one has ended.

    Parameters:
        parts: the node.
        batch: messages that it pops at a time.
        pops: how many pops it has out.
        concurrency: messages that it has begun with at a time.
        extends: how many messages it keeps invisible for longer with one call, before it begins with any.
    """

    parts: Parts
    batch: int
    pops: int
    concurrency: int
    extends: int
    starts: int = 0
    handled: list[bytes] = field(default_factory=list)

    def run(self) -> bool:
        """Run a process until it ends. Return False if no message is left for it, and True if a message has ended it."""
        self.starts += 1
        held: list[Delivered] = []
        while True:
            for _ in range(self.pops):
                popped = self.parts.core.popper.pop(self.parts.group(), self.batch, INVISIBLE_MS, in_order_max=self.batch)
                self.parts.store.commit()
                held += self.parts.delivered(popped) if popped else []
            if not held:
                return False
            if self.extends:
                held = self._extended(held)
            begun, held = held[: self.concurrency], held[self.concurrency :]
            if any(message.body == POISON for message in begun):
                return True
            assert self.parts.ack(*(message.handle for message in begun)) == [AckOutcome.OK] * len(begun)
            self.handled += [message.body for message in begun]

    def _extended(self, held: list[Delivered]) -> list[Delivered]:
        changed = []
        for at in range(0, len(held), self.extends):
            changes = [VisibilityChange(each.handle, INVISIBLE_MS) for each in held[at : at + self.extends]]
            changed += self.parts.core.deliveries.change_invisible(GROUP, changes)
        self.parts.store.commit()
        return [each._replace(handle=handle) for each, (_, handle) in zip(held, changed, strict=True)]


@pytest.mark.parametrize("place", [0, 21])
@pytest.mark.parametrize("fifo", [False, True])
@pytest.mark.parametrize(
    ("batch", "pops", "concurrency", "extends"),
    [(32, 1, 1, 0), (256, 1, 16, 0), (8, 4, 16, 0), (256, 2, 16, 32), (32, 16, 16, 5), (32, 1, 16, 1)],
)
def test_a_message_that_ends_processes_is_the_only_dead_letter(
    parts: Parts, batch: int, pops: int, concurrency: int, extends: int, fifo: bool, place: int
) -> None:
    parts.create(fifo=fifo, attempts_max=ATTEMPTS_MAX)
    good = [b"%d" % number for number in range(31)]
    for body in (*good[:place], POISON, *good[place:]):
        parts.publish(body, properties=Properties(message_group="one") if fifo else None)
    consumers = Consumers(parts, batch, pops, concurrency, extends)
    while consumers.run():
        assert consumers.starts <= ATTEMPTS_MAX + 8
        parts.advance(INVISIBLE_MS)
    assert sorted(consumers.handled) == sorted(good)
    (letter,) = parts.dead_letters.list(GROUP)
    assert letter.attempts == ATTEMPTS_MAX
    if fifo and concurrency == 1:
        assert consumers.handled == good
    if concurrency == 1:
        assert parts.core.counters.uncounted < 32 * 6


@pytest.mark.parametrize("keep_index", [True, False])
@pytest.mark.parametrize("fifo", [False, True])
def test_a_restart_of_the_node_keeps_what_was_found_out(parts: Parts, fifo: bool, keep_index: bool) -> None:
    parts.create(fifo=fifo, attempts_max=ATTEMPTS_MAX)
    for number in range(8):
        parts.publish(b"%d" % number, properties=Properties(message_group="one") if fifo else None)
    rounds = []
    for name in ("a", "b", "c", "d", "e"):
        sizes, attempts = [], set()
        while (popped := parts.core.popper.pop(parts.group(), 100, INVISIBLE_MS, in_order_max=100)) is not None:
            sizes.append(popped.checkpoint.count)
            attempts |= {entry.attempt for entry in popped.checkpoint.entries()}
        rounds.append((sizes, attempts))
        parts.advance(INVISIBLE_MS)
        parts = parts.after_crash(name, keep_index=keep_index)
    if fifo:  # the others of the message group wait for the first ones
        assert rounds == [([8], {1}), ([4], {1}), ([2], {1}), ([1], {1}), ([1], {2})]
    else:
        assert rounds == [([8], {1}), ([4, 4], {1}), ([2, 2, 2, 2], {1}), ([1], {1}), ([1], {1})]
    parts.close()


def test_one_message_is_out_alone_at_a_time_and_what_is_new_does_not_wait_for_it(parts: Parts) -> None:
    parts.publish(b"1", b"2", b"3")
    assert len(parts.pop(2)) == 2
    parts.advance(INVISIBLE_MS)
    first, second = sorted(parts.pop(), key=lambda message: message.body)[0:1], parts.pop()
    assert [message.body for message in (*first, *second)] in ([b"1", b"3"], [b"3", b"1"])
    assert parts.pop() == []
    alone = next(message for message in (*first, *second) if message.body == b"1")
    parts.ack(alone.handle)
    (last,) = parts.pop()
    assert (last.body, last.attempt) == (b"2", 1)
    parts.change(last.handle, 0, nack=True)
    parts.settle()
    assert [message.attempt for message in parts.pop()] == [2]


def test_a_message_waits_alone_for_its_back_off_without_holding_up_the_others(parts: Parts) -> None:
    parts.create(backoff=(60_000,))
    parts.publish(b"1", b"2")
    parts.pop()
    parts.advance(INVISIBLE_MS)
    (first,) = parts.pop()
    assert parts.pop() == []
    parts.advance(INVISIBLE_MS)
    (second,) = parts.pop()
    assert {first.body, second.body} == {b"1", b"2"}
    assert second.attempt == 1
    parts.ack(second.handle)
    parts.advance(60_000)
    assert [(message.body, message.attempt) for message in parts.pop()] == [(first.body, 2)]


def test_what_a_consumer_returned_counts_though_it_returned_several(parts: Parts) -> None:
    parts.publish(b"1", b"2")
    changes = [VisibilityChange(message.handle, 1_000, nack=True) for message in parts.pop()]
    parts.core.deliveries.change_invisible(GROUP, changes)
    parts.advance(1_000)
    assert [(message.body, message.attempt) for message in parts.pop()] == [(b"1", 2), (b"2", 2)]


@pytest.mark.parametrize("keep_index", [None, True, False])
def test_a_message_whose_consumer_lives_on_holds_up_no_other(parts: Parts, keep_index: bool | None) -> None:
    parts.create(attempts_max=1)
    parts.publish(b"1", b"2")
    parts.pop()
    parts.advance(INVISIBLE_MS)
    (first,) = parts.pop()
    assert parts.change(first.handle, 2 * INVISIBLE_MS)[0] is AckOutcome.OK
    if keep_index is not None:
        parts = parts.after_crash("again", keep_index=keep_index)
    (second,) = parts.pop()
    assert {first.body, second.body} == {b"1", b"2"}
    parts.ack(second.handle)
    parts.advance(2 * INVISIBLE_MS)
    assert parts.group().dead_letter_count == 1, "it was out alone, so its attempt counts"
    parts.close()
