"""The spans of messages that MQTT clients publish, get and acknowledge."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from penstock.gateway.protocol.properties import Property, PropertyValues
from penstock.store.recent import RecentIds
from penstock.store.store import Store
from penstock.tracing.context import TraceContext, sampled_context
from penstock.tracing.traces import NOT_STORED, AttributeValue, SpanKind, Traces, TraceSpan


class TracedMessage(NamedTuple):
    """A message of a batch whose trace is sampled."""

    context: TraceContext
    """The publisher's span."""
    topic: bytes
    position: int
    """Of its record."""
    body_bytes: int
    qos: int
    """Of the delivery."""


class _Unacked(NamedTuple):
    """A delivery that its client has not acknowledged yet."""

    context: TraceContext
    """The span of the delivery."""
    topic: bytes


class MqttTraces:
    """Makes the spans of messages whose traces are sampled. Only a node with `[tracing]` has one.

    Parameters:
        traces: Makes and keeps spans.
        store: Tells when a message is durable.
    """

    def __init__(self, traces: Traces, store: Store) -> None:
        self._traces = traces
        self._store = store
        self._unacked: RecentIds[tuple[str, int], _Unacked] = RecentIds(traces.options.open_max)
        """By client id, and by the position of the message."""

    def now_ns(self) -> int:
        """Return the time in ns since 1970."""
        return self._traces.now_ns()

    def published(
        self,
        found: PropertyValues,
        topic: bytes,
        body: bytes,
        qos: int,
        client_id: str,
        began_ns: int,
        position: int,
    ) -> None:
        """Make the span of a PUBLISH that was stored. At QoS 1 and 2 it ends when the message is durable.

        Args:
            found: The properties of the PUBLISH.
            topic, body, qos: Of the PUBLISH.
            client_id: Of the publisher.
            began_ns: When the node began to store the message.
            position: Of its record.
        """
        span = self._begin_publish(found, topic, body, client_id, began_ns, position)
        if span is None:
            return
        if qos:
            self._store.when_durable(partial(self._traces.end, span))
        else:
            self._traces.end(span)

    def refused(self, found: PropertyValues, topic: bytes, body: bytes, client_id: str, why: str) -> None:
        """Make the span of a PUBLISH that was refused. The arguments are those of `published`, and the reason."""
        span = self._begin_publish(found, topic, body, client_id, 0, NOT_STORED)
        if span is not None:
            self._traces.end(span, why)

    def _begin_publish(
        self, found: PropertyValues, topic: bytes, body: bytes, client_id: str, began_ns: int, position: int
    ) -> TraceSpan | None:
        context = sampled_context(found.get(Property.USER_PROPERTY, ()))
        if context is None:
            return None
        about: dict[str, AttributeValue] = {"messaging.client.id": client_id, "messaging.message.body.size": len(body)}
        return self._traces.begin(context, "publish", "send", SpanKind.SERVER, topic, position, about, began_ns=began_ns)

    def message(
        self, user: Sequence[tuple[str, str]], topic: bytes, position: int, body_bytes: int, qos: int
    ) -> TracedMessage | None:
        """Return what the deliveries of a message need; None if its trace is not sampled.

        Args:
            user: The user properties of the message.
            topic, position, body_bytes: Of the message.
            qos: Of the delivery.
        """
        context = sampled_context(user)
        return None if context is None else TracedMessage(context, topic, position, body_bytes, qos)

    def delivered(self, messages: Sequence[TracedMessage], client_id: str, topic_filter: str) -> None:
        """Make the spans of messages that were sent to a client."""
        for context, topic, position, body_bytes, qos in messages:
            about: dict[str, AttributeValue] = {
                "messaging.client.id": client_id,
                "messaging.destination.subscription.name": topic_filter,
                "messaging.message.body.size": body_bytes,
            }
            span = self._traces.begin(context, "deliver", "deliver", SpanKind.PRODUCER, topic, position, about)
            if span is not None:
                self._traces.end(span)
                if qos:
                    self._unacked.add((client_id, position), _Unacked(span.context, topic))

    def acknowledged(self, client_id: str, position: int, *, is_refused: bool) -> None:
        """Make the span of an acknowledgement: a PUBACK, or a PUBREC, which may refuse the message.

        POP makes that of a shared subscription, which this class knows nothing of.
        """
        unacked = self._unacked.take((client_id, position))
        if unacked is not None:
            operation = "reject" if is_refused else "ack"
            about: dict[str, AttributeValue] = {"messaging.client.id": client_id}
            span = self._traces.begin(unacked.context, operation, "settle", SpanKind.SERVER, unacked.topic, position, about)
            if span is not None:
                self._traces.end(span)
