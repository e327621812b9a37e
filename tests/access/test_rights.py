"""Decisions: the compiled rules against a list of rules that is read from its beginning, and what filters may and may not."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.access.actions import ACTIONS, ADMIN, CONSUME, POP, PUBLISH, RECEIVE, SUBSCRIBE, actions_of
from penstock.access.policy import AccessPolicy, Grants, Principal, Role
from penstock.access.rule import Rule, Who
from penstock.access.subject import Subject
from penstock.store.topics import matches

WORDS = ("a", "b", "$s", "alice")
TOPICS = ["/".join(levels) for count in range(1, 5) for levels in product((*WORDS, "x"), repeat=count)]
SUBJECTS = (Subject("alice", client_id="b"), Subject("bob", frozenset({"staff"}), "b"), Subject("", client_id="alice"))
WHO = (Who(), Who(users=("alice",)), Who(users=("al*",)), Who(roles=("staff",)), Who(clients=("b",)), Who(name="bob"))


@st.composite
def rule_filters(draw: st.DrawFn) -> str:
    levels = draw(st.lists(st.sampled_from((*WORDS, "+", "%u", "%c")), max_size=3))
    if not levels or draw(st.booleans()):
        levels = [*levels[:2], "#"]
    return "/".join(levels)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    return Rule(
        "",
        draw(st.booleans()),
        draw(st.sampled_from(((SUBSCRIBE,), (RECEIVE,), (SUBSCRIBE, RECEIVE), (PUBLISH,)))),
        draw(st.sampled_from(WHO)),
        tuple(draw(st.lists(rule_filters(), min_size=1, max_size=2))),
    )


def written_for(subject: Subject, topic_filter: str) -> str | None:
    """Return the filter of a rule with the names of a subject in it; None if that can't be."""
    levels = topic_filter.split("/")
    for number, level in enumerate(levels):
        if level in ("%u", "%c"):
            levels[number] = subject.user if level == "%u" else subject.client_id
            if not levels[number]:
                return None
    return "/".join(levels)


def read_from_the_beginning(listed: list[Rule], subject: Subject, action: str, topic: str) -> bool:
    """Decide on a topic as the guide says: the first rule that applies decides."""
    for rule in listed:
        if action in rule.actions and rule.who.applies_to(subject):
            for topic_filter in rule.topics:
                written = written_for(subject, topic_filter)
                if written is not None and matches(written, topic):
                    return rule.is_allowing
    return False


@given(st.lists(rules(), max_size=8), st.sampled_from(SUBJECTS), st.sampled_from((PUBLISH, SUBSCRIBE, RECEIVE)))
def test_the_first_rule_that_applies_to_a_topic_decides(listed: list[Rule], subject: Subject, action: str) -> None:
    rights = AccessPolicy(listed).rights_of(subject)
    for topic in TOPICS[:: 1 + len(listed)]:
        assert rights.may(action, topic) is read_from_the_beginning(listed, subject, action, topic), topic


@given(st.lists(rules(), max_size=8), st.sampled_from(SUBJECTS), rule_filters())
def test_a_filter_is_allowed_only_if_each_topic_that_it_matches_is(listed: list[Rule], subject: Subject, asked: str) -> None:
    asked = asked.replace("%u", "+").replace("%c", "b")
    if AccessPolicy(listed).rights_of(subject).may(SUBSCRIBE, asked):
        refused = [
            topic
            for topic in TOPICS
            if matches(asked, topic) and not read_from_the_beginning(listed, subject, SUBSCRIBE, topic)
        ]
        assert refused == []


@given(st.lists(rules(), max_size=6), st.sampled_from(SUBJECTS), rule_filters(), st.integers(0, 5))
def test_a_filter_that_one_rule_allows_and_none_before_it_denies_in_part_is_allowed(
    listed: list[Rule], subject: Subject, asked: str, at: int
) -> None:
    asked = asked.replace("%u", "b").replace("%c", "+")
    allowing = Rule("", True, (SUBSCRIBE,), Who(), (asked,))
    before = [rule for rule in listed[:at] if rule.is_allowing]
    assert AccessPolicy([*before, allowing, *listed]).rights_of(subject).may(SUBSCRIBE, asked)


def allow(*topics: str, action: str = "read", **who: tuple[str, ...]) -> Rule:
    return Rule("allow", True, actions_of([action]), Who(**who), topics)  # type: ignore[arg-type]


def deny(*topics: str, action: str = "read", **who: tuple[str, ...]) -> Rule:
    return Rule("deny", False, actions_of([action]), Who(**who), topics)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("listed", "asked", "may"),
    [
        ([allow("b/+")], "b/#", False),
        ([allow("#")], "$SYS/#", False),
        ([allow("#", "$SYS/#")], "$SYS/#", True),
        ([allow("orders/#")], "hr/#", False),
        ([deny("hr/#"), allow("#")], "#", False),
        ([deny("hr/#"), allow("#")], "orders/#", True),
        ([allow("hr/#"), deny("hr/#"), allow("#")], "#", True),  # what is denied was allowed before
        ([allow("hr/a"), deny("hr/#"), allow("#")], "#", False),
        ([allow("#"), deny("hr/#")], "#", True),
        ([allow("a/+"), allow("a/+/#"), allow("a")], "a/#", False),  # no single rule contains it
        ([allow("dev/%u/#")], "dev/alice/#", True),
        ([allow("dev/%u/#")], "dev/+/#", False),
        ([allow("dev/n-%c")], "dev/n-c7", True),
        ([deny("dev/%u/secret"), allow("dev/#")], "dev/+/secret", False),
        ([deny("dev/%u/secret"), allow("dev/#")], "dev/bob/#", True),
    ],
)
def test_filters_by_example(listed: list[Rule], asked: str, may: bool) -> None:
    found = AccessPolicy(listed).rights_of(Subject("alice", client_id="c7"))
    assert found.may(POP, asked) is may
    assert found.may(SUBSCRIBE, asked) is may


def test_a_client_may_subscribe_to_more_than_it_may_receive() -> None:
    listed = [allow("user1/#", action="receive"), deny("#", action="receive"), allow("#", action="subscribe")]
    found = AccessPolicy(listed).rights_of(Subject("ann"))
    assert found.may(SUBSCRIBE, "#")
    assert [found.may(RECEIVE, topic) for topic in ("user1/a", "user2/a")] == [True, False]
    assert [found.covers(RECEIVE, each).is_allowed for each in ("user1/+", "#")] == [True, False]


@pytest.mark.parametrize("user", ["", "+", "#", "a/b", "a+"])
def test_a_name_with_wildcards_in_it_opens_nothing(user: str) -> None:
    found = AccessPolicy([allow("dev/%u/#")]).rights_of(Subject(user))
    for asked in ("dev/+/#", "dev/#", "dev//#", "dev/a/b/#", f"dev/{user}/#"):
        assert not found.may(SUBSCRIBE, asked)


def test_a_user_name_can_t_open_the_node_s_own_topics() -> None:
    found = AccessPolicy([allow("%u/#")]).rights_of(Subject("$SYS"))
    assert not found.may(SUBSCRIBE, "$SYS/#")
    assert not found.may(RECEIVE, "$SYS/broker/uptime")


def test_a_filter_that_touches_a_thousand_denied_parts_is_denied_in_time() -> None:
    exceptions = [allow(f"a/{number}/x") for number in range(1000)] + [deny(f"a/{number}/x") for number in range(1000)]
    found = AccessPolicy([*exceptions, allow("#")]).rights_of(Subject("alice"))
    assert not found.may(SUBSCRIBE, "a/#")
    assert found.may(SUBSCRIBE, "b/#")


@pytest.mark.parametrize(
    ("subject", "may"),
    [
        (Subject("alice", address="10.1.2.3"), True),
        (Subject("alice", address="11.1.2.3"), False),
        (Subject("alice"), False),
        (Subject("", address="10.1.2.3"), False),
    ],
)
def test_all_conditions_of_a_rule_must_hold(subject: Subject, may: bool) -> None:
    from ipaddress import ip_network

    who = Who(users=("*",), addresses=(ip_network("10.0.0.0/8"),))
    assert AccessPolicy([Rule("", True, ACTIONS, who, ("#",))]).rights_of(subject).may(PUBLISH, "a") is may


def test_principals_and_roles_allow_after_the_rules() -> None:
    policy = AccessPolicy(
        [deny("orders/secret", action="all")],
        [Principal("billing", roles=("auditors",), grants=Grants(read=("orders/+",), consume=("billing",), admin=("b*",)))],
        [
            Role("auditors", grants=Grants(consume=("audit-*",))),
            Role("edges", users=("edge-*",), grants=Grants(write=("e/%u",))),
        ],
    )
    billing = policy.rights_of(Subject("billing"))
    assert billing.may(POP, "orders/1")
    assert not billing.may(POP, "orders/secret")
    assert not billing.may(POP, "orders/+")
    assert [billing.may(CONSUME, group) for group in ("billing", "audit-1", "x", "")] == [True, True, False, False]
    assert [billing.may(ADMIN, group) for group in ("billing", "audit-1", "")] == [True, False, False]
    edge = policy.rights_of(Subject("edge-1"))
    assert [edge.may(PUBLISH, topic) for topic in ("e/edge-1", "e/edge-2")] == [True, False]
    assert not policy.rights_of(Subject("")).may(PUBLISH, "e/edge-1")


def test_all_groups_need_a_right_to_all_and_no_denial_of_any() -> None:
    everything = Rule("", True, (ADMIN,), groups=("*",))
    denied = Rule("", False, (ADMIN,), groups=("x",))
    assert AccessPolicy([everything]).rights_of(Subject("a")).may(ADMIN, "")
    assert not AccessPolicy([denied, everything]).rights_of(Subject("a")).may(ADMIN, "")


def test_what_nothing_applies_to_can_be_allowed() -> None:
    found = AccessPolicy([deny("hr/#")], allows_unmatched=True).rights_of(Subject("a"))
    assert found.may(SUBSCRIBE, "orders/#")
    assert not found.may(SUBSCRIBE, "#")
    assert found.may(CONSUME, "")
