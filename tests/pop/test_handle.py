"""A handle names exactly one delivery, and nobody can make one up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pop.core.handle import BLOCK, DELIVERY_DIGITS, RECALL_DIGITS, SECRET_BYTES, Delivery, Handles, load_secret
from tests.depth import DEPTH

HANDLES = Handles(b"s" * SECRET_BYTES)
OTHERS = Handles(b"t" * SECRET_BYTES)

u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


@given(checkpoint=u64, pop_ms=u64, group_id=u32, count=st.integers(1, 3 * BLOCK), data=st.data())
def test_each_handle_names_its_delivery_in_any_order(
    checkpoint: int, pop_ms: int, group_id: int, count: int, data: st.DataObject
) -> None:
    handles = HANDLES.deliveries(checkpoint, pop_ms, group_id, count)
    assert len(set(handles)) == count
    order = data.draw(st.permutations(range(count)))
    named = HANDLES.read_deliveries([handles[index] for index in order])
    assert named == [Delivery(checkpoint, pop_ms, group_id, index) for index in order]


pops = st.tuples(u64, u64, u32)


@settings(max_examples=10 * DEPTH)
@given(st.lists(st.tuples(pops, st.lists(u16, min_size=1, max_size=2 * BLOCK)), min_size=1, max_size=5))
def test_handles_that_are_read_joined_name_what_each_names(named: list[tuple[tuple[int, int, int], list[int]]]) -> None:
    handles = []
    for (checkpoint, pop_ms, group_id), indexes in named:
        made = HANDLES.deliveries(checkpoint, pop_ms, group_id, max(indexes) + 1)
        handles += [made[index] for index in indexes]
    runs = HANDLES.read_joined("".join(handles))
    assert runs is not None
    found = [Delivery(run.checkpoint, run.pop_ms, run.group_id, index) for run in runs for index in run.indexes.each()]
    assert found == HANDLES.read_deliveries(handles)


@given(place=st.integers(0, 4), at=st.integers(0, DELIVERY_DIGITS - 1), by=st.integers(1, 15))
def test_handles_that_are_read_joined_are_refused_with_any_digit_of_any_of_them_altered(place: int, at: int, by: int) -> None:
    handles = HANDLES.deliveries(4711, 1_700_000_000_000, 7, 5)
    handle = handles[place]
    handles[place] = handle[:at] + f"{int(handle[at], 16) ^ by:x}" + handle[at + 1 :]
    assert HANDLES.read_joined("".join(handles)) is None


def test_handles_that_are_read_joined_are_refused_where_the_last_is_truncated() -> None:
    joined = "".join(HANDLES.deliveries(1, 2, 3, 3))
    for cut in range(1, 3 * DELIVERY_DIGITS):
        assert (HANDLES.read_joined(joined[:cut]) is None) == (cut % DELIVERY_DIGITS > 0), cut


@given(at=st.integers(0, DELIVERY_DIGITS - 1), by=st.integers(1, 15), index=st.sampled_from([0, 1, BLOCK - 1, BLOCK, 200]))
def test_a_delivery_handle_with_any_digit_altered_is_refused(at: int, by: int, index: int) -> None:
    handle = HANDLES.deliveries(4711, 1_700_000_000_000, 7, 201)[index]
    altered = handle[:at] + f"{int(handle[at], 16) ^ by:x}" + handle[at + 1 :]
    assert HANDLES.read_deliveries([altered, handle]) == [None, Delivery(4711, 1_700_000_000_000, 7, index)]


@given(at=st.integers(0, RECALL_DIGITS - 1), by=st.integers(1, 15))
def test_a_recall_handle_with_any_digit_altered_is_refused(at: int, by: int) -> None:
    handle = HANDLES.recall(4711, 1_700_000_000_000)
    assert HANDLES.read_recall(handle) == (4711, 1_700_000_000_000)
    assert HANDLES.read_recall(handle[:at] + f"{int(handle[at], 16) ^ by:x}" + handle[at + 1 :]) is None


@given(text=st.one_of(st.text(max_size=130), st.text("0123456789abcdef", min_size=40, max_size=64)))
def test_what_is_no_handle_is_refused(text: str) -> None:
    assert HANDLES.read_deliveries([text]) == [None]
    assert HANDLES.read_recall(text) is None


@given(checkpoint=u64, pop_ms=u64, group_id=u32, index=u16)
def test_a_handle_without_the_secret_is_refused_whatever_it_names(
    checkpoint: int, pop_ms: int, group_id: int, index: int
) -> None:
    name = Delivery(checkpoint, pop_ms, group_id, index)
    forged = name.checkpoint.to_bytes(8, "little") + name.pop_ms.to_bytes(8, "little")
    forged += name.group_id.to_bytes(4, "little") + index.to_bytes(2, "little") + bytes(8)
    assert HANDLES.read_deliveries([forged.hex()]) == [None]


@pytest.mark.parametrize("cut", [0, 1, 2, 16, DELIVERY_DIGITS - 2, DELIVERY_DIGITS - 1])
def test_a_truncated_handle_is_refused(cut: int) -> None:
    handle = HANDLES.deliveries(1, 2, 3, 1)[0]
    assert HANDLES.read_deliveries([handle[:cut]]) == [None]
    assert HANDLES.read_recall(HANDLES.recall(1, 2)[:cut][: RECALL_DIGITS - 1]) is None


@pytest.mark.parametrize("alter", [lambda h: h + "00", lambda h: " " + h, lambda h: h[:2] + " " + h[2:], lambda h: h + "\0"])
def test_a_handle_with_more_than_its_digits_is_refused(alter) -> None:  # type: ignore[no-untyped-def]
    assert HANDLES.read_deliveries([alter(HANDLES.deliveries(1, 2, 3, 1)[0])]) == [None]
    assert HANDLES.read_recall(alter(HANDLES.recall(1, 2))) is None


def test_another_secret_makes_other_handles() -> None:
    assert HANDLES.read_deliveries(OTHERS.deliveries(1, 2, 3, 2)) == [None, None]
    assert HANDLES.read_recall(OTHERS.recall(1, 2)) is None


def test_one_kind_of_handle_is_not_the_other() -> None:
    assert HANDLES.read_recall(HANDLES.deliveries(1, 2, 0, 1)[0]) is None
    assert HANDLES.read_deliveries([HANDLES.recall(1, 2)]) == [None]


def test_the_secret_is_made_once_and_is_private(tmp_path: Path) -> None:
    secret = load_secret(tmp_path)
    assert len(secret) == SECRET_BYTES
    assert load_secret(tmp_path) == secret
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_damaged_secret_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ValueError, match="or run `penstock repair`, which makes a new one"):
        load_secret(tmp_path)
