"""Containment of topic filters, against every topic of a small alphabet."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.topics import contains, matches

WORDS = ("a", "b", "$s")
OTHER = "x"
"""Stands for all words that no filter has."""
LEVELS_MAX = 5
TOPICS = ["/".join(levels) for count in range(1, LEVELS_MAX + 1) for levels in product((*WORDS, OTHER), repeat=count)]
"""Filters have up to three levels, so a topic with more tells `#` from any number of `+`."""


@st.composite
def filters(draw: st.DrawFn) -> str:
    """Filters of up to three levels of a small alphabet."""
    levels = draw(st.lists(st.sampled_from((*WORDS, "+")), max_size=3))
    if not levels or draw(st.booleans()):
        levels = [*levels[:2], "#"]
    return "/".join(levels)


def matched(topic_filter: str) -> set[str]:
    return {topic for topic in TOPICS if matches(topic_filter, topic)}


@given(filters(), filters())
def test_a_filter_contains_another_if_it_matches_all_of_its_topics(ours: str, theirs: str) -> None:
    assert contains(ours, theirs) == (matched(ours) >= matched(theirs))


@pytest.mark.parametrize(
    ("ours", "theirs", "does"),
    [
        ("b/+", "b/#", False),
        ("#", "$SYS/#", False),
        ("+/#", "$SYS/#", False),
        ("$SYS/#", "$SYS/broker/+", True),
        ("#", "#", True),
        ("+/#", "#", True),
        ("a/#", "a", True),
        ("a/#", "a/+/#", True),
        ("a/+/#", "a/#", False),
        ("a/+", "a/", True),
    ],
)
def test_containment_by_example(ours: str, theirs: str, does: bool) -> None:
    assert contains(ours, theirs) is does
