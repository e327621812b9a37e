"""The settings that a client gets, the expressions that it asks for, and the routes to the node."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.pop.core.settings import Backoff, ExponentialBackoff
from penstock.pop.errors import ExpressionInvalid
from penstock.pop.options import PopOptions
from penstock.pop.rocketmq.agents import Agent
from penstock.pop.rocketmq.names import encode
from penstock.pop.rocketmq.routes import MESSAGE_TYPES, endpoints_for, endpoints_of, message_types_for, queue_of
from penstock.pop.rocketmq.settings import (
    LITE_SUBSCRIPTIONS_MAX,
    RETRY_BACKOFF,
    consumer_policy,
    expression_of,
    merged,
    policy_of,
)
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import pb
from penstock.store.options import HostPort
from tests.pop.wiring import Parts

OPTIONS = PopOptions()
TYPES = pb.ClientType


def waits_of(policy: Any) -> list[int]:
    return [duration.ToMilliseconds() for duration in policy.customized_backoff.next]


JAVA = Agent("JAVA", (5, 2, 0))
PYTHON = Agent("PYTHON", (5, 1, 2))
NODE_JS = Agent("NODE_JS", (1, 0, 8))
LATER_NODE_JS = Agent("NODE_JS", (1, 0, 9))
STEPS = (100, 2_000)
GROWING = ExponentialBackoff(min_ms=100, max_ms=300)


@pytest.mark.parametrize(
    ("backoff", "fifo", "agent", "told"),
    [
        (None, False, JAVA, RETRY_BACKOFF),
        (None, False, NODE_JS, ExponentialBackoff(min_ms=1_000_000, max_ms=7_200_000_000)),
        (None, True, LATER_NODE_JS, RETRY_BACKOFF),
        (None, False, PYTHON, (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000)),
        (STEPS, False, JAVA, (0,)),
        (STEPS, True, JAVA, STEPS),
        (STEPS, True, PYTHON, STEPS),
        (STEPS, True, NODE_JS, ExponentialBackoff(min_ms=100_000, max_ms=2_000_000)),
        (STEPS, True, LATER_NODE_JS, ExponentialBackoff(min_ms=100, max_ms=2_000)),
        (GROWING, False, PYTHON, (0,)),
        (GROWING, False, NODE_JS, ExponentialBackoff(min_ms=0, max_ms=0)),
        (GROWING, True, JAVA, GROWING),
        (GROWING, True, PYTHON, (100, 200, 300, 300, 300, 300, 300)),
    ],
)
def test_a_failed_message_waits_either_in_the_consumer_or_at_the_node(
    parts: Parts, backoff: Backoff | None, fifo: bool, agent: Agent, told: Backoff
) -> None:
    group = parts.create(backoff=backoff, fifo=fifo, attempts_max=7)
    assert consumer_policy(group, OPTIONS, agent) == policy_of(told, 7)


def test_a_policy_has_the_form_of_its_back_off() -> None:
    assert waits_of(policy_of((100, 2_000), 3)) == [100, 2_000]
    exponential = policy_of(ExponentialBackoff(100, 5_000, 3.0), 3).exponential_backoff
    assert (exponential.initial.ToMilliseconds(), exponential.max.ToMilliseconds(), exponential.multiplier) == (100, 5_000, 3.0)
    assert policy_of((), 3).max_attempts == 3


def test_a_producer_keeps_its_settings_and_gets_the_limits() -> None:
    said = pb.Settings(client_type=TYPES.PRODUCER, publishing=pb.Publishing(topics=[pb.Resource(name="a")], max_body_size=1))
    answer = merged(said, (), OPTIONS)
    assert [topic.name for topic in answer.publishing.topics] == ["a"]
    assert (answer.client_type, answer.publishing.max_body_size) == (TYPES.PRODUCER, OPTIONS.message_bytes_max)
    assert answer.publishing.validate_message_type
    assert answer.backoff_policy.WhichOneof("strategy") == "exponential_backoff"
    assert not answer.metric.on
    assert not said.HasField("metric")


@pytest.mark.parametrize(
    ("client_type", "asked_ms", "told_ms"),
    [(TYPES.PUSH_CONSUMER, 0, 20_000), (TYPES.SIMPLE_CONSUMER, 5_000, 5_000), (TYPES.SIMPLE_CONSUMER, 10**8, 60_000)],
)
def test_a_consumer_gets_the_settings_of_its_group(parts: Parts, client_type: int, asked_ms: int, told_ms: int) -> None:
    said = pb.Settings(client_type=client_type, subscription=pb.Subscription(group=pb.Resource(name="billing")))
    if asked_ms:
        said.subscription.long_polling_timeout.FromMilliseconds(asked_ms)
    plain = merged(said, (), OPTIONS).subscription
    assert (plain.fifo, plain.receive_batch_size, plain.group.name) == (False, 32, "billing")
    assert plain.long_polling_timeout.ToMilliseconds() == told_ms
    assert plain.lite_subscription_quota == LITE_SUBSCRIPTIONS_MAX
    fifo = parts.create(fifo=True)
    assert merged(said, [fifo], OPTIONS).subscription.fifo


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (pb.FilterType.TAG, "*", ("*", "tag")),
        (pb.FilterType.TAG, "", ("*", "tag")),
        (pb.FilterType.FILTER_TYPE_UNSPECIFIED, "", ("*", "tag")),
        (pb.FilterType.TAG, "a || b", ("a || b", "tag")),
        (pb.FilterType.SQL, "a = 1", ("a = 1", "sql")),
    ],
)
def test_an_expression_has_the_form_of_a_group_s_settings(kind: int, text: str, expected: tuple[str, str]) -> None:
    assert expression_of(pb.FilterExpression(type=kind, expression=text)) == expected


def test_an_expression_with_a_syntax_error_is_refused() -> None:
    with pytest.raises(ExpressionInvalid):
        expression_of(pb.FilterExpression(type=pb.FilterType.SQL, expression="a ="))
    with pytest.raises(Refused) as refused:
        expression_of(pb.FilterExpression(type=9, expression="a"))
    assert refused.value.code is Code.ILLEGAL_FILTER_EXPRESSION


@pytest.mark.parametrize(
    ("host", "scheme"),
    [("127.0.0.1", "IPv4"), ("::1", "IPv6"), ("broker.example.org", "DOMAIN_NAME")],
)
def test_a_client_is_routed_to_the_address_by_which_it_came_or_to_the_advertised_one(host: str, scheme: str) -> None:
    came_by = endpoints_of(HostPort(host, 8081))
    assert pb.AddressScheme.Name(came_by.scheme) == scheme
    assert [(address.host, address.port) for address in endpoints_for(came_by, None).addresses] == [(host, 8081)]
    advertised = endpoints_for(came_by, HostPort("public", 443))
    assert [(address.host, address.port) for address in advertised.addresses] == [("public", 443)]


def test_a_client_that_names_no_access_point_is_refused() -> None:
    for endpoints in (pb.Endpoints(), pb.Endpoints(scheme=pb.AddressScheme.IPv4)):
        with pytest.raises(Refused) as refused:
            endpoints_for(endpoints, None)
        assert refused.value.code is Code.ILLEGAL_ACCESS_POINT


def test_filters_and_topics_of_the_node_are_read_only() -> None:
    for topic_filter, permission in (
        ("a/b", pb.Permission.READ_WRITE),
        ("a/+", pb.Permission.READ),
        ("$dlq/g", pb.Permission.READ),
    ):
        assert queue_of(pb.Resource(name=encode(topic_filter)), pb.Endpoints()).permission == permission


@pytest.mark.parametrize(
    ("language", "version", "unannounced"),
    [
        ("JAVA", "5.0.7", {"LITE", "PRIORITY"}),
        ("JAVA", "5.1.0", {"PRIORITY"}),
        ("JAVA", "5.2.0-SNAPSHOT", set()),
        ("JAVA", "10.0", set()),
        ("JAVA", "", {"LITE", "PRIORITY"}),
        ("PYTHON", "5.1.2", set()),
        ("HTTP", "1.0.8", set()),
        ("", "", set()),
    ],
)
def test_a_route_names_only_types_that_the_client_knows(language: str, version: str, unannounced: set[str]) -> None:
    announced = message_types_for(Agent.of(language, version))
    assert {pb.MessageType.Name(kind) for kind in MESSAGE_TYPES if kind not in announced} == unannounced


def test_a_producer_of_an_unknown_language_gets_settings() -> None:
    said = pb.Settings(client_type=TYPES.PRODUCER, publishing=pb.Publishing(), user_agent=pb.UA(version="x" * 10_000))
    said.user_agent.language = 99
    assert merged(said, (), OPTIONS).publishing.max_body_size
