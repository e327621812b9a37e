"""Spans of OpenTelemetry for what a client sends, receives and settles, by the semantic conventions for messaging.

The trace context is in two user properties of a message, `traceparent` and `tracestate` (W3C Trace Context). The node keeps
them with the message, so a consumer finds the publisher's context, whether that spoke MQTT 5.0, gRPC or RocketMQ's protocol.

`opentelemetry-api` is imported when a `Tracing` is made, and by nothing else. A client without a `Tracing` does none of this.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from penstock.install import install_hint
from penstock.pop.client.outgoing import SendReceipt
from penstock.pop.errors import PopError
from penstock.pop.proto import pop_pb2 as pb

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, TracerProvider

    from penstock.pop.client.received import ReceivedMessage

TRACEPARENT = "traceparent"
"""Name of the user property with the trace id and the span id of the publisher."""

TRACESTATE = "tracestate"
"""Name of the user property with what vendors add to it."""

LINKS_MAX = 128
"""Links of one span at most: as many as OpenTelemetry's SDK keeps by default. A receive may bring a thousand messages."""

CONTEXTS_MAX = 4_096
"""How many contexts of messages are remembered: each is needed for the spans of receiving, handling and settling a message."""


class Tracing:
    """Makes spans, and gives messages the trace context of who sends them: `Client(target, tracing=Tracing())`.

    One `Tracing` may serve many clients and a worker. It needs the extra `otel`. Without a tracer provider that exports, spans
    go nowhere, but the trace context that is current where a message is sent still goes with the message.

    Parameters:
        tracer_provider: Makes the tracer. By default the application's.

    Raises:
        ImportError: `opentelemetry-api` is not installed.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ImportError(f"tracing needs OpenTelemetry: {install_hint('otel')}") from error
        self._trace = trace
        self._tracer = trace.get_tracer("penstock", tracer_provider=tracer_provider)
        self._propagator = TraceContextTextMapPropagator()
        self._context = lru_cache(CONTEXTS_MAX)(self._parsed)

    # --- trace context ----------------------------------------------------------------------------------------------

    def context_of(self, properties: Mapping[str, str]) -> Context | None:
        """Return the trace context that the user properties of a message name; None if they name none."""
        if TRACEPARENT not in properties:
            return None
        return self._context(properties[TRACEPARENT], properties.get(TRACESTATE))

    def _parsed(self, traceparent: str, tracestate: str | None) -> Context | None:
        found = {TRACEPARENT: traceparent} | ({} if tracestate is None else {TRACESTATE: tracestate})
        context = self._propagator.extract(found)
        return context if self._trace.get_current_span(context).get_span_context().is_valid else None

    def links_to(self, messages: Iterable[Mapping[str, str]]) -> list[Link]:
        """Return a link to the publisher of each message that names one, `LINKS_MAX` at most.

        The messages are given by their user properties.
        """
        links: list[Link] = []
        for properties in messages:
            context = self.context_of(properties)
            if context is not None:
                links.append(self._trace.Link(self._trace.get_current_span(context).get_span_context()))
                if len(links) == LINKS_MAX:
                    break
        return links

    def _inject(self, span: Span, properties: MutableMapping[str, str]) -> None:
        self._propagator.inject(properties, self._trace.set_span_in_context(span))

    # --- spans ------------------------------------------------------------------------------------------------------

    @contextmanager
    def sending(self, messages: Sequence[pb.Message]) -> Iterator[Span]:
        """Make the span of a send that happens within, and give its context to the messages that have none.

        A message of a batch gets a span of its own, `create`, so that its consumers continue at the message, not at the batch.
        """
        if len(messages) == 1:
            with self._trace.use_span(self._begin_send(messages[0]), end_on_exit=True) as span:
                yield span
            return
        links = self.links_to(message.properties for message in messages)
        for message in messages:
            if TRACEPARENT not in message.properties:
                links.append(self._trace.Link(self._create(message)))
        attributes = _attributes("send", "send", "", **{"messaging.batch.message_count": len(messages)})
        kind = self._trace.SpanKind.CLIENT
        with self._tracer.start_as_current_span("send", kind=kind, attributes=attributes, links=links) as span:
            yield span

    def _begin_send(self, message: pb.Message) -> Span:
        span = self._tracer.start_span(
            f"send {message.topic}",
            kind=self._trace.SpanKind.PRODUCER,
            attributes=_attributes("send", "send", message.topic, **{"messaging.message.body.size": len(message.body)}),
            links=self.links_to([message.properties]),
        )
        if TRACEPARENT not in message.properties:
            self._inject(span, message.properties)
        return span

    def begin_send(self, message: pb.Message) -> Callable[[asyncio.Future[SendReceipt]], None]:
        """Begin the span of a send, and give its context to the message. Return what ends the span with the answer."""
        span = self._begin_send(message)

        def end(answer: asyncio.Future[SendReceipt]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                self.sent(span, answer.result())
            self._end(span, answer)

        return end

    def _end(self, span: Span, answer: asyncio.Future[Any]) -> None:
        error = None if answer.cancelled() else answer.exception()
        if error is None and not answer.cancelled() and isinstance(answer.result(), list):
            error = next((each for each in answer.result() if each is not None), None)
        if isinstance(error, PopError):
            span.record_exception(error)
            span.set_status(self._trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")
        span.end()

    def _create(self, message: pb.Message) -> Any:
        attributes = _attributes("create", "create", message.topic, **{"messaging.message.body.size": len(message.body)})
        name, kind = f"create {message.topic}", self._trace.SpanKind.PRODUCER
        with self._tracer.start_as_current_span(name, kind=kind, attributes=attributes) as span:
            self._inject(span, message.properties)
            return span.get_span_context()

    def sent(self, span: Span, receipt: SendReceipt) -> None:
        """Note in the span of a send which message it became."""
        span.set_attribute("messaging.message.id", receipt.message_id)

    def received(self, group: str, topic_filter: str, messages: Sequence[pb.PoppedMessage], began_ns: int) -> None:
        """Make the span of a receive that has ended, with a link to the publisher of each message. None came: no span.

        Args:
            group: Name of the group.
            topic_filter: Filter of the group.
            messages: What came.
            began_ns: When the receive began, in ns since 1970.
        """
        if not messages:
            return
        attributes = _attributes(
            "receive",
            "receive",
            topic_filter,
            **{"messaging.consumer.group.name": group, "messaging.batch.message_count": len(messages)},
        )
        links = self.links_to(message.properties for message in messages)
        self._tracer.start_span(
            f"receive {topic_filter}",
            kind=self._trace.SpanKind.CLIENT,
            attributes=attributes,
            links=links,
            start_time=began_ns,
        ).end()

    def _settle_span(self, operation: str, group: str, messages: Sequence[ReceivedMessage], count: int) -> Span:
        more: dict[str, Any] = {"messaging.consumer.group.name": group}
        topic = messages[0].topic if len(messages) == 1 else ""
        if len(messages) == 1:
            more["messaging.message.id"] = messages[0].message_id
        else:
            more["messaging.batch.message_count"] = count
        return self._tracer.start_span(
            f"{operation} {topic or group}",
            kind=self._trace.SpanKind.CLIENT,
            attributes=_attributes("settle", operation, topic, **more),
            links=self.links_to(message.properties for message in messages),
        )

    @contextmanager
    def settling(self, operation: str, group: str, *messages: ReceivedMessage, count: int = 1) -> Iterator[None]:
        """Make the span of a settlement that happens within.

        Args:
            operation: `ack`, `nack`, `suspend` or `dead_letter`.
            group: Name of the group.
            messages: What is settled; nothing if only the handles are known.
            count: Number of handles.
        """
        span = self._settle_span(operation, group, messages, count)
        with self._trace.use_span(span, end_on_exit=True):
            yield

    def settling_until(self, answer: asyncio.Future[Any], operation: str, group: str, *messages: ReceivedMessage) -> None:
        """Make the span of a settlement that ends when a future is done. The arguments are those of `settling`."""
        answer.add_done_callback(partial(self._end, self._settle_span(operation, group, messages, len(messages))))

    @contextmanager
    def processing(self, group: str, messages: Sequence[ReceivedMessage]) -> Iterator[Span]:
        """Make the span of a handler's work within: a child of the publisher's span. That of a batch has links instead."""
        found = [message.properties for message in messages]
        more: dict[str, Any] = {"messaging.consumer.group.name": group}
        topic = messages[0].topic
        if len(messages) == 1:
            more["messaging.message.id"] = messages[0].message_id
            more["messaging.message.delivery_attempt"] = messages[0].attempt
        else:
            more["messaging.batch.message_count"] = len(messages)
        with self._tracer.start_as_current_span(
            f"process {group}",
            context=self.context_of(found[0]) if len(messages) == 1 else None,
            kind=self._trace.SpanKind.CONSUMER,
            attributes=_attributes("process", "process", topic, **more),
            links=self.links_to(found),
        ) as span:
            yield span


def now_ns() -> int:
    """Return the time in ns since 1970, as spans have it."""
    return time.time_ns()


def _attributes(kind: str, name: str, destination: str, **more: Any) -> dict[str, Any]:
    found = {"messaging.system": "penstock", "messaging.operation.type": kind, "messaging.operation.name": name, **more}
    if destination:
        found["messaging.destination.name"] = destination
    return found
