"""A bounded memory of recent ids, which says which id it forgets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.store.recent import RecentIds


@given(limit=st.integers(1, 4), added=st.lists(st.tuples(st.integers(0, 6), st.text(max_size=1))))
def test_the_last_ids_are_remembered_and_the_oldest_is_forgotten(limit: int, added: list[tuple[int, str]]) -> None:
    recent: RecentIds[int, str] = RecentIds(limit)
    expected: list[tuple[int, str]] = []
    for key, value in added:
        expected = [pair for pair in expected if pair[0] != key] + [(key, value)]
        forgotten = expected.pop(0)[0] if len(expected) > limit else None
        assert recent.add(key, value) == forgotten
        assert len(recent) == len(expected)
    assert [recent.get(key) for key, _ in expected] == [value for _, value in expected]
    known = {key for key, _ in expected}
    assert all((key in recent) == (key in known) for key in range(7))
    assert all(recent.get(key) is None for key in range(7) if key not in known)
