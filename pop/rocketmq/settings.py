"""The settings of a client: what the client stated, completed by the settings of the node and of the client's group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.pop.core.expression import ExpressionType, compile_expression
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.settings import BACKOFF_STEPS_MAX, Backoff, ExponentialBackoff
from penstock.pop.options import PopOptions
from penstock.pop.rocketmq.agents import Agent
from penstock.pop.rocketmq.names import LITE_TOPIC_CHARS_MAX
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import pb

RECEIVE_BATCH = 32
LONG_POLLING_MS = 20_000
"""How long push consumers wait for a message. `PopOptions.wait_ms_max` bounds it."""

LITE_SUBSCRIPTIONS_MAX = 1_000
"""Maximum number of lite topics of one client and parent. Each poll of the client waits in the groups of all of them."""

SEND_ATTEMPTS = 3
SEND_BACKOFF = ExponentialBackoff(min_ms=10, max_ms=1_000)
"""Number of tries of a producer, and the waits between them. RocketMQ's proxy gives the same."""

RETRY_BACKOFF = ExponentialBackoff(min_ms=1_000, max_ms=7_200_000)
"""Back-off for consumers of a group without one. Otherwise a consumer that fails at once would use up all attempts at once."""

_NO_WAIT: Backoff = (0,)

NODE_READS_SECONDS_AS_MS = (1, 0, 8)
"""Last known version of the Node client that takes the seconds of a back-off for milliseconds."""


def merged(settings: Any, groups: Sequence[ConsumerGroup], options: PopOptions) -> Any:
    """Return the settings that a client shall follow.

    Args:
        settings: The settings that the client stated.
        groups: The client's group on each topic that it subscribes to, as far as the group exists. Empty for a producer.
        options: Options of the node.
    """
    agent = _agent_of(settings.user_agent)
    answer = pb.Settings()
    answer.CopyFrom(settings)
    answer.metric.CopyFrom(pb.Metric(on=False))
    if settings.HasField("subscription"):
        fifo = any(group.settings.fifo for group in groups)
        policy = consumer_policy(groups[0] if groups else None, options, agent)
        answer.backoff_policy.CopyFrom(policy)
        subscription = answer.subscription
        subscription.fifo = fifo
        subscription.receive_batch_size = min(RECEIVE_BATCH, options.messages_max)
        wait_ms = min(LONG_POLLING_MS, options.wait_ms_max)
        if settings.client_type == pb.ClientType.SIMPLE_CONSUMER and subscription.HasField("long_polling_timeout"):
            wait_ms = min(subscription.long_polling_timeout.ToMilliseconds(), options.wait_ms_max)
        subscription.long_polling_timeout.FromMilliseconds(max(wait_ms, 1_000))  # Clients count in whole seconds.
        subscription.lite_subscription_quota = LITE_SUBSCRIPTIONS_MAX
        subscription.max_lite_topic_size = LITE_TOPIC_CHARS_MAX
    else:
        answer.backoff_policy.CopyFrom(policy_of(_in_units_of(agent, SEND_BACKOFF), SEND_ATTEMPTS))
        answer.publishing.max_body_size = options.message_bytes_max
        answer.publishing.validate_message_type = True
    return answer


def consumer_policy(group: ConsumerGroup | None, options: PopOptions, agent: Agent) -> Any:
    """Return how long a push consumer keeps a failed message before it returns the message.

    The node itself applies the back-off of a group, so its consumers return a failed message at once. A FIFO consumer repeats
    an attempt without the node, so it gets the back-off.
    """
    backoff: Backoff = options.retry_backoff_ms if group is None else group.backoff
    attempts_max = options.attempts_max if group is None else group.attempts_max
    if not backoff:
        backoff = RETRY_BACKOFF
    elif group is None or not group.settings.fifo:
        backoff = _NO_WAIT
    return policy_of(_readable(backoff, attempts_max, agent), attempts_max)


def _readable(backoff: Backoff, attempts_max: int, agent: Agent) -> Backoff:
    """Return a back-off in the form that a client can read.

    The Python client (5.1.2) reads only lists. The Node client (1.0.8) reads only exponential back-offs. Without one, its FIFO
    consumer makes a dead letter of a message after the first failure.
    """
    if agent.language == "PYTHON" and isinstance(backoff, ExponentialBackoff):
        return tuple(backoff.wait_ms(attempt) for attempt in range(1, min(attempts_max, BACKOFF_STEPS_MAX) + 1))
    if agent.language == "NODE_JS":
        if not isinstance(backoff, ExponentialBackoff):
            backoff = ExponentialBackoff(min(backoff), max(backoff))
        return _in_units_of(agent, backoff)
    return backoff


def _in_units_of(agent: Agent, backoff: ExponentialBackoff) -> ExponentialBackoff:
    """Return a back-off in the units that a client takes it for."""
    if agent.language != "NODE_JS" or agent.version > NODE_READS_SECONDS_AS_MS:
        return backoff
    return replace(backoff, min_ms=1_000 * backoff.min_ms, max_ms=1_000 * backoff.max_ms)


def _agent_of(user_agent: Any) -> Agent:
    known = user_agent.language in pb.Language.values()
    return Agent.of(pb.Language.Name(user_agent.language) if known else "", user_agent.version)


def policy_of(backoff: Backoff, attempts_max: int) -> Any:
    """Return a back-off as the protocol writes it."""
    policy = pb.RetryPolicy(max_attempts=attempts_max)
    if isinstance(backoff, ExponentialBackoff):
        rule = policy.exponential_backoff
        rule.initial.FromMilliseconds(backoff.min_ms)
        rule.max.FromMilliseconds(backoff.max_ms)
        rule.multiplier = backoff.factor
    else:
        for wait_ms in backoff:
            policy.customized_backoff.next.add().FromMilliseconds(wait_ms)
    return policy


def expression_of(wanted: Any) -> tuple[str, ExpressionType]:
    """Return the filter on delivery of a `FilterExpression`, in the form of a group's settings.

    Raises:
        Refused: ILLEGAL_FILTER_EXPRESSION if the type is unknown.
        ExpressionInvalid: The expression has a syntax error.
    """
    text: str = wanted.expression.strip()
    if wanted.type == pb.FilterType.SQL:
        compile_expression(text, "sql")
        return text, "sql"
    if wanted.type not in (pb.FilterType.TAG, pb.FilterType.FILTER_TYPE_UNSPECIFIED):
        raise Refused(Code.ILLEGAL_FILTER_EXPRESSION, f"the expression has the unknown type {wanted.type}: use TAG or SQL")
    return (text, "tag") if compile_expression(text, "tag") is not None else ("*", "tag")
