"""The table of a log's epochs, and where two logs agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.epochs import EpochTable


def test_a_table_knows_its_epochs() -> None:
    table = EpochTable().with_epoch(1, 0).with_epoch(3, 40).with_epoch(4, 70)
    assert list(table) == [(1, 0), (3, 40), (4, 70)]
    assert (table.last, EpochTable().last) == (4, 0)
    assert [table.at(position) for position in (0, 39, 40, 69, 70, 1_000)] == [1, 1, 3, 3, 4, 4]
    assert EpochTable([(2, 10)]).at(9) == 0
    assert table.cut_to(70) == EpochTable([(1, 0), (3, 40)])
    assert table.cut_to(71) == table
    assert table.cut_to(0) == EpochTable()


@pytest.mark.parametrize("epochs", [[(2, 0), (1, 5)], [(1, 5), (2, 5)], [(1, 5), (1, 9)], [(1, 5), (2, 4)]])
def test_epochs_and_positions_must_ascend(epochs: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="follows"):
        EpochTable(epochs)


@pytest.mark.parametrize(
    ("ours", "end", "theirs", "their_end", "agreed"),
    [
        ([(1, 0)], 50, [(1, 0)], 30, 30),
        ([(1, 0), (2, 40)], 60, [(1, 0)], 50, 40),
        ([(1, 0)], 50, [(1, 0), (2, 40)], 60, 40),
        ([(1, 0), (3, 40)], 60, [(1, 0), (2, 30)], 90, 30),
        ([(1, 0), (3, 40)], 60, [(1, 0), (3, 40), (4, 55)], 90, 55),
        ([(1, 0)], 50, [(2, 0)], 50, 0),
        ([], 0, [(1, 0)], 50, 0),
        ([], 0, [], 0, 0),
    ],
)
def test_logs_agree_up_to_the_end_of_the_last_epoch_that_both_have(
    ours: list[tuple[int, int]], end: int, theirs: list[tuple[int, int]], their_end: int, agreed: int
) -> None:
    assert EpochTable(ours).agreed_end(end, EpochTable(theirs), their_end) == agreed
    assert EpochTable(theirs).agreed_end(their_end, EpochTable(ours), end) == agreed


@st.composite
def forked_logs(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Return two logs, as the epoch of each record, and how far they are the same. Each epoch is begun in one of them."""
    lengths = st.integers(1, 4)
    log = [epoch for epoch in range(1, draw(st.integers(1, 4)) + 1) for _ in range(draw(lengths))]
    common = draw(st.integers(0, len(log)))
    next_epoch = log[-1] + 1
    mine, yours = log[:], log[:common]
    for number in range(draw(st.integers(0, 4))):
        target = mine if draw(st.booleans()) else yours
        target += [next_epoch + number] * draw(lengths)
    return mine, yours, common


def table_of(log: list[int]) -> EpochTable:
    return EpochTable({epoch: log.index(epoch) for epoch in log}.items())


@given(forked_logs())
def test_the_agreed_end_is_never_beyond_what_is_the_same(logs: tuple[list[int], list[int], int]) -> None:
    mine, yours, common = logs
    agreed = table_of(mine).agreed_end(len(mine), table_of(yours), len(yours))
    assert agreed == common
