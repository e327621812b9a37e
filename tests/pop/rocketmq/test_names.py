"""Names of the protocol, and the topics and groups that they mean."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pop.errors import GroupInvalid
from penstock.pop.rocketmq.names import (
    LITE_TOPIC_CHARS_MAX,
    dead_letters_group,
    encode,
    filter_of,
    group_of,
    lite_filter_of,
    lite_topic_of,
    outside,
    topic_of_message,
)
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import pb

CLIENTS_PATTERN = re.compile(r"[%a-zA-Z0-9_-]+")
"""Names that the official clients accept."""


def resource(name: str, namespace: str = "") -> object:
    return pb.Resource(name=name, resource_namespace=namespace)


@pytest.mark.parametrize(
    ("name", "topic_filter"),
    [
        ("orders", "orders"),
        ("plant%2F1%2Ftemp", "plant/1/temp"),
        ("plant%2f%2b%2Ftemp", "plant/+/temp"),
        ("plant%2F%23", "plant/#"),
        ("plant/1", "plant/1"),
        ("gr%C3%B6%C3%9Fe", "größe"),
        ("100%25", "100%"),
        ("%24dlq%2Fbilling", "$dlq/billing"),
        ("%DLQ%billing", "$dlq/billing"),
        ("%DLQ%rechnung%20s%C3%BCd", "$dlq/rechnung süd"),
    ],
)
def test_a_name_is_a_filter_percent_encoded(name: str, topic_filter: str) -> None:
    assert filter_of(resource(name)) == topic_filter


@pytest.mark.parametrize(
    "name", ["", "a%", "a%2", "a%zz", "%FF", "a%00b", "a%2F%23%2Fb", "a%2Bb", "x" * 70_000, "%41" * 66_000]
)
def test_a_name_of_no_valid_filter_is_an_illegal_topic(name: str) -> None:
    with pytest.raises(Refused) as refused:
        filter_of(resource(name))
    assert refused.value.code is Code.ILLEGAL_TOPIC


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0+#"), min_size=1, max_size=60))
def test_every_topic_has_a_name_that_clients_accept_and_that_means_the_topic(topic: str) -> None:
    name = encode(topic)
    assert CLIENTS_PATTERN.fullmatch(name)
    assert filter_of(resource(name)) == topic


def test_a_namespace_is_the_first_level_of_its_topics_and_a_prefix_of_its_groups() -> None:
    assert filter_of(resource("orders%2F%2B", "tenant")) == "tenant/orders/+"
    assert group_of(resource("billing", "tenant")) == "tenant:billing"
    for name in ("%DLQ%billing", "%24dlq%2Fbilling"):
        assert filter_of(resource(name, "tenant")) == "$dlq/tenant:billing"
        assert dead_letters_group(resource(name, "tenant")) == dead_letters_group(resource(name)) == "billing"
    assert dead_letters_group(resource("orders", "tenant")) == ""
    assert outside("tenant/orders/1", "tenant") == "orders/1"


@pytest.mark.parametrize(
    ("name", "namespace", "code"),
    [
        ("orders", "a/b", Code.BAD_REQUEST),
        ("orders", "+", Code.BAD_REQUEST),
        ("orders", "$SYS", Code.BAD_REQUEST),
        ("orders", "x" * 200, Code.BAD_REQUEST),
        ("", "tenant", Code.ILLEGAL_TOPIC),
        ("%24SYS%2Fx", "tenant", Code.ILLEGAL_TOPIC),
    ],
)
def test_a_namespace_that_no_level_can_be_and_names_outside_of_it_are_refused(name: str, namespace: str, code: Code) -> None:
    with pytest.raises(Refused) as refused:
        filter_of(resource(name, namespace))
    assert refused.value.code is code


def test_a_group_without_a_name_is_refused_in_a_namespace_too() -> None:
    with pytest.raises(GroupInvalid):
        group_of(resource("", "tenant"))


def test_the_name_of_a_group_is_percent_encoded_where_needed() -> None:
    assert group_of(resource("billing")) == "billing"
    assert group_of(resource(encode("rechnung süd.1"))) == "rechnung süd.1"
    for name in ("", "a%2Fb", "%24x", " "):
        with pytest.raises(GroupInvalid):
            group_of(resource(name))
    with pytest.raises(Refused) as refused:
        group_of(resource("a%"))
    assert refused.value.code is Code.ILLEGAL_CONSUMER_GROUP


def test_a_lite_topic_is_a_topic_below_its_parent() -> None:
    assert lite_filter_of("chat", "session-1") == "chat/session-1"
    assert lite_filter_of("chat", "*") == "chat/#"
    assert lite_topic_of("chat/eu", lite_filter_of("chat/eu", "a/b")) == "a/b"
    message = pb.Message(topic=resource("chat%2Feu"), system_properties=pb.SystemProperties(lite_topic="s1"))
    assert topic_of_message(message) == "chat/eu/s1"


@pytest.mark.parametrize(
    ("parent", "lite_topic", "code"),
    [
        ("chat", "", Code.ILLEGAL_LITE_TOPIC),
        ("chat", "a+", Code.ILLEGAL_LITE_TOPIC),
        ("chat", "#", Code.ILLEGAL_LITE_TOPIC),
        ("chat", "x" * (LITE_TOPIC_CHARS_MAX + 1), Code.ILLEGAL_LITE_TOPIC),
        ("chat/+", "a", Code.ILLEGAL_TOPIC),
        ("$dlq/x", "a", Code.ILLEGAL_TOPIC),
    ],
)
def test_an_invalid_lite_topic_is_refused(parent: str, lite_topic: str, code: Code) -> None:
    with pytest.raises(Refused) as refused:
        lite_filter_of(parent, lite_topic)
    assert refused.value.code is code


def test_a_message_to_all_lite_topics_is_refused() -> None:
    with pytest.raises(Refused) as refused:
        topic_of_message(pb.Message(topic=resource("chat"), system_properties=pb.SystemProperties(lite_topic="*")))
    assert refused.value.code is Code.ILLEGAL_LITE_TOPIC
