"""Indexes as rows of bytes give the same results as integers."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pop.core.checkpoint import Indexes, runs_of
from penstock.store.bodies import REFERENCE
from tests.depth import DEPTH

indexes = st.integers(0, 2**16 - 1)
runs = st.builds(
    lambda first, count: list(range(first, min(first + count, 2**16))), st.integers(0, 2**16 - 1), st.integers(1, 600)
)
some = st.one_of(runs, st.lists(indexes, min_size=1, max_size=40), st.permutations(range(20)))


def rows(numbers: list[int]) -> Indexes:
    return Indexes(bytes(number & 0xFF for number in numbers), bytes(number >> 8 for number in numbers))


@given(some)
def test_each_is_there_in_order(numbers: list[int]) -> None:
    found = rows(numbers)
    assert list(found.each()) == numbers
    assert found.number == len(numbers)


@given(some)
def test_the_mask_has_the_bit_of_each(numbers: list[int]) -> None:
    expected = 0
    for number in numbers:
        expected |= 1 << number
    assert rows(numbers).mask() == expected


@given(st.integers(1, 2**16))
def test_those_below_a_count_are_a_range(count: int) -> None:
    assert Indexes.below(count).each() == range(count)


@settings(max_examples=15 * DEPTH)
@given(st.integers(0, 2**64 - 1), some)
def test_references_are_as_the_record_has_them(checkpoint: int, numbers: list[int]) -> None:
    assert rows(numbers).references(checkpoint) == b"".join(REFERENCE.pack(checkpoint, number) for number in numbers)


# These positions share bytes with each other and with indexes. A run must end with its position.
positions = st.one_of(st.sampled_from([0, 1, 256, 2**32, 2**32 + 1, 2**63]), st.integers(0, 2**64 - 1))


@settings(max_examples=15 * DEPTH)
@given(st.lists(st.tuples(positions, indexes), max_size=60))
def test_runs_are_what_follows_each_other_with_one_position(named: list[tuple[int, int]]) -> None:
    found = runs_of(b"".join(REFERENCE.pack(*each) for each in named))
    expected = [(position, [index for _, index in run]) for position, run in groupby(named, key=lambda each: each[0])]
    assert [(position, list(indexes.each())) for position, indexes in found] == expected
