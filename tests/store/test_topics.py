from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.store.errors import TopicInvalid
from penstock.store.topics import FilterTrie, check_filter, check_topic, first_level, is_wildcard, matches, overlap
from tests.depth import DEPTH

# --- the specification's own examples -------------------------------------------------------------------------------

MATCHES = [
    # MQTT 5.0, 4.7.1.2: the multi-level wildcard
    ("sport/tennis/player1/#", "sport/tennis/player1", True),
    ("sport/tennis/player1/#", "sport/tennis/player1/ranking", True),
    ("sport/tennis/player1/#", "sport/tennis/player1/score/wimbledon", True),
    ("sport/#", "sport", True),
    ("#", "sport/tennis", True),
    ("#", "/", True),
    ("sport/tennis/#", "sport/tennis", True),
    ("sport/tennis/#", "sport", False),
    ("sport/#", "sports", False),
    # MQTT 5.0, 4.7.1.3: the single-level wildcard
    ("sport/tennis/+", "sport/tennis/player1", True),
    ("sport/tennis/+", "sport/tennis/player2", True),
    ("sport/tennis/+", "sport/tennis/player1/ranking", False),
    ("sport/+", "sport", False),
    ("sport/+", "sport/", True),
    ("+", "sport", True),
    ("+/tennis/#", "sport/tennis", True),
    ("sport/+/player1", "sport/tennis/player1", True),
    ("+/+", "/finance", True),
    ("/+", "/finance", True),
    ("+", "/finance", False),
    # MQTT 5.0, 4.7.2: topics that begin with $
    ("#", "$SYS/monitor", False),
    ("+/monitor/Clients", "$SYS/monitor/Clients", False),
    ("$SYS/#", "$SYS/monitor/Clients", True),
    ("$SYS/#", "$SYS", True),
    ("$SYS/monitor/+", "$SYS/monitor/Clients", True),
    ("#", "$", False),
    ("+", "$", False),
    ("+/$SYS", "a/$SYS", True),
    ("a/#", "a/$SYS", True),
    # MQTT 5.0, 4.7.3: case, spaces, leading and trailing separators make different topics
    ("ACCOUNTS", "Accounts", False),
    ("Accounts payable", "Accounts payable", True),
    ("/finance", "finance", False),
    ("finance/", "finance", False),
    ("/", "/", True),
    ("+/+", "/", True),
    ("+/#", "/", True),
    ("/#", "/", True),
    ("/#", "a", False),
    # an empty level is a level
    ("a//b", "a//b", True),
    ("a/+/b", "a//b", True),
    ("a/b", "a//b", False),
    ("a/+/#", "a", False),
    ("a/+/#", "a/", True),
]


@pytest.mark.parametrize(("filter", "topic", "expected"), MATCHES)
def test_a_filter_matches_as_the_specification_says(filter: str, topic: str, expected: bool) -> None:
    trie: FilterTrie[str] = FilterTrie()
    trie.insert(check_filter(filter), filter)

    assert matches(filter, check_topic(topic.encode())) is expected
    assert trie.match(topic) == ([filter] if expected else [])


INVALID_TOPICS = [
    (b"", "empty"),  # [MQTT-4.7.3-1]
    (b"a\0b", "U+0000 at character 1"),  # [MQTT-4.7.3-2]
    (b"a/+/b", "wildcard '+'"),  # [MQTT-3.3.2-2]
    (b"a/b#", "wildcard '#'"),
    (b"a\xff", "not UTF-8 from byte 1"),  # [MQTT-1.5.4-1]
    (b"\xed\xa0\x80", "not UTF-8"),  # the surrogate U+D800
    (b"\xc0\x80", "not UTF-8"),  # U+0000 in an overlong form
    (b"a" * 65_536, "65536 bytes"),  # [MQTT-4.7.3-3]
    (b"/" * 128, "129 levels"),
]


@pytest.mark.parametrize(("topic", "reason"), INVALID_TOPICS)
def test_an_invalid_topic_is_refused_with_the_reason_and_a_short_excerpt(topic: bytes, reason: str) -> None:
    with pytest.raises(TopicInvalid) as refused:
        check_topic(topic)

    assert reason in str(refused.value)
    assert len(str(refused.value)) < 300


INVALID_FILTERS = [
    ("", "empty"),
    ("a\0b", "U+0000"),
    ("sport/tennis#", "'#' inside of the level 'tennis#'"),  # MQTT 5.0, 4.7.1.2
    ("sport/tennis/#/ranking", "'#' before its last level"),  # MQTT 5.0, 4.7.1.2
    ("#/#", "'#' before its last level"),
    ("sport+", "'+' inside of the level 'sport+'"),  # MQTT 5.0, 4.7.1.3
    ("+a/b", "'+' inside"),
    ("a/++", "'+' inside"),
    ("+#", "'+' inside"),
    ("##", "'#' inside"),
    ("\ud800", "can't be written as UTF-8"),
    ("\u00e9" * 32_768, "65536 bytes"),
    ("+/" * 128, "129 levels"),
]


@pytest.mark.parametrize(("filter", "reason"), INVALID_FILTERS)
def test_an_invalid_filter_is_refused_with_the_reason_and_a_short_excerpt(filter: str, reason: str) -> None:
    with pytest.raises(TopicInvalid) as refused:
        check_filter(filter)

    assert reason in str(refused.value)
    assert len(str(refused.value)) < 300


def test_bounds_are_inclusive_and_configurable() -> None:
    assert check_topic(b"a/b/c", levels_max=3, bytes_max=5) == "a/b/c"
    assert check_filter("a/+/#", levels_max=3, bytes_max=5) == "a/+/#"
    with pytest.raises(TopicInvalid, match="use 2 at most"):
        check_topic(b"a/b/c", levels_max=2)
    with pytest.raises(TopicInvalid, match="shorten it to 4 at most"):
        check_filter("a/+/#", bytes_max=4)


def test_a_byte_order_mark_is_kept() -> None:
    assert check_topic("\ufeffa".encode()) == "\ufeffa"  # [MQTT-1.5.4-3]


def test_the_first_level_ends_at_the_first_separator() -> None:
    assert [first_level(topic) for topic in ("sensors/1/t", "sensors", "/sensors", "/")] == ["sensors", "sensors", "", ""]


def test_only_plus_and_hash_are_wildcards() -> None:
    assert [is_wildcard(filter) for filter in ("a/+", "#", "a", "$SYS/x", "*")] == [True, True, False, False, False]


# --- the trie -------------------------------------------------------------------------------------------------------


def test_a_value_is_replaced_and_removed_by_its_filter() -> None:
    trie: FilterTrie[int | None] = FilterTrie()
    for value, filter in enumerate(("a", "a/+", "a/#", "#", "+", "a/+/#")):
        trie.insert(filter, value)
    trie.insert("a/#", None)

    assert len(trie) == 6
    assert trie.get("a/+/#") == 5
    assert trie.get("b/#") is None
    assert "a/#" in trie
    assert "a/b" not in trie
    assert trie.remove("a/#") is None
    assert trie.remove("a") == 0
    assert dict(trie) == {"a/+": 1, "#": 3, "+": 4, "a/+/#": 5}


@pytest.mark.parametrize("filter", ["b", "a/+", "a/b/#", "a/b/+", "+", "x/y/#"])
def test_removing_an_absent_filter_raises_and_changes_nothing(filter: str) -> None:
    trie: FilterTrie[int] = FilterTrie()
    trie.insert("a/#", 1)
    trie.insert("a/b/+/c", 2)

    with pytest.raises(KeyError):
        trie.remove(filter)

    assert dict(trie) == {"a/#": 1, "a/b/+/c": 2}


def test_no_node_outlives_its_filters() -> None:
    trie: FilterTrie[int] = FilterTrie()
    filters = [f"site/{site}/+/{device}/#" for site in range(20) for device in range(20)]
    for filter in filters:
        trie.insert(filter, 0)
    for filter in filters:
        trie.remove(filter)

    assert len(trie) == 0
    assert trie._root.is_empty()


def test_filters_that_do_not_match_do_not_make_a_match_slower() -> None:
    def lines(trie: FilterTrie[int]) -> int:
        """Return the number of lines that a match runs."""
        count = 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        traced = sys.gettrace()
        sys.settrace(trace)
        try:
            found = trie.match("site/7/pump/3")
        finally:
            sys.settrace(traced)
        assert found == [7]
        return count

    small: FilterTrie[int] = FilterTrie()
    large: FilterTrie[int] = FilterTrie()
    small.insert("site/7/+/3", 7)
    for site in range(500):
        large.insert(f"site/{site}/+/3", site)

    assert 0 < lines(large) == lines(small)


def test_a_match_in_a_deep_trie_visits_each_node_at_most_once() -> None:
    trie: FilterTrie[int] = FilterTrie()
    filters = ["/".join("+" if bits >> level & 1 else "a" for level in range(10)) for bits in range(1024)]
    for value, filter in enumerate(filters):
        trie.insert(filter, value)
    trie.insert("/".join(["+"] * 127 + ["#"]), -1)

    assert sorted(trie.match("/".join("a" * 10))) == list(range(1024))
    assert trie.match("/".join("a" * 128)) == [-1]


WORDS = st.sampled_from(["", "a", "b", "$", "$SYS"])
TOPICS = st.lists(WORDS, min_size=1, max_size=5).map("/".join).filter(bool)
FILTERS = (
    st.tuples(st.lists(st.one_of(WORDS, st.just("+")), max_size=4), st.sampled_from([[], ["#"], ["+"], ["a"]]))
    .map(lambda parts: "/".join(parts[0] + parts[1]))
    .filter(bool)
)


@given(st.lists(FILTERS, max_size=30), st.lists(TOPICS, min_size=1, max_size=10), st.data())
def test_the_trie_agrees_with_the_definition_of_a_match(filters: list[str], topics: list[str], data: st.DataObject) -> None:
    trie: FilterTrie[str] = FilterTrie()
    for filter in filters:
        trie.insert(check_filter(filter), filter)
    kept = set(filters)
    for filter in data.draw(st.sets(st.sampled_from(sorted(kept))) if kept else st.just(set())):
        assert trie.remove(filter) == filter
        kept.remove(filter)

    assert len(trie) == len(kept)
    assert dict(trie) == {filter: filter for filter in kept}
    for topic in topics:
        assert sorted(trie.match(topic)) == sorted(filter for filter in kept if matches(filter, topic))


class TrieAgainstDict(RuleBasedStateMachine):
    """After inserts, replacements and removals in any order, the trie holds the same as a dict, and has no superfluous node."""

    def __init__(self) -> None:
        super().__init__()
        self.trie: FilterTrie[int] = FilterTrie()
        self.model: dict[str, int] = {}

    @rule(filter=FILTERS, value=st.integers(0, 3))
    def insert(self, filter: str, value: int) -> None:
        self.trie.insert(filter, value)
        self.model[filter] = value

    @rule(filter=FILTERS)
    def remove(self, filter: str) -> None:
        if filter in self.model:
            assert self.trie.remove(filter) == self.model.pop(filter)
        else:
            with pytest.raises(KeyError):
                self.trie.remove(filter)

    @rule(topic=TOPICS)
    def match(self, topic: str) -> None:
        expected = sorted(value for filter, value in self.model.items() if matches(filter, topic))
        assert sorted(self.trie.match(topic)) == expected

    @invariant()
    def holds_the_same(self) -> None:
        assert dict(self.trie) == self.model
        assert len(self.trie) == len(self.model)
        assert bool(self.model.keys() - {f for f in self.model if not is_wildcard(f)}) != self.trie._root.is_empty()


TestTrieAgainstDict = TrieAgainstDict.TestCase
TestTrieAgainstDict.settings = settings(max_examples=15 * DEPTH, stateful_step_count=30)


@given(st.binary(max_size=40))
def test_any_bytes_are_either_a_valid_topic_or_refused(raw: bytes) -> None:
    try:
        topic = check_topic(raw)
    except TopicInvalid:
        return
    assert topic.encode() == raw
    assert check_filter(topic) == topic
    assert matches(topic, topic)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a/b", "a/b", True),
        ("a/b", "a/c", False),
        ("a/+", "a/b", True),
        ("a/+", "+/b", True),
        ("a/+", "b/+", False),
        ("a/#", "a", True),
        ("a/#", "+", True),
        ("a/#", "a/b/c/+", True),
        ("a/b/#", "a", False),
        ("a/b/#", "a/+", True),
        ("#", "a/b", True),
        ("#", "$SYS/a", False),
        ("+/a", "$SYS/a", False),
        ("$SYS/#", "$SYS/+/a", True),
        ("a/+", "a", False),
        ("/+", "+/a", True),
    ],
)
def test_two_filters_overlap_if_a_topic_matches_both(one: str, other: str, expected: bool) -> None:
    assert overlap(one, other) is overlap(other, one) is expected


@given(FILTERS, FILTERS, st.lists(TOPICS, max_size=20))
def test_filters_that_match_a_topic_both_overlap(one: str, other: str, topics: list[str]) -> None:
    for topic in topics:
        if matches(one, topic) and matches(other, topic):
            assert overlap(one, other)
