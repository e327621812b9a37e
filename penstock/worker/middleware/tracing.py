"""Spans of OpenTelemetry for the calls of handlers."""

from __future__ import annotations

from typing import Any

from penstock.worker.context import CallNext, HandlerCall


class TraceCalls:
    """A middleware that makes a span of each call, by the semantic conventions for messaging (kind consumer, `process`).

    The parent is the span that the message's user properties `traceparent` and `tracestate` name (W3C Trace Context). Needs
    `opentelemetry-api`.

    Parameters:
        tracer_provider: Makes the tracer. By default the application's.
    """

    def __init__(self, tracer_provider: Any = None) -> None:
        from opentelemetry import trace
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = trace.get_tracer("penstock.worker", tracer_provider=tracer_provider)
        self._kind = SpanKind.CONSUMER
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, call: HandlerCall, call_next: CallNext) -> Any:
        message = call.message
        attributes = {
            "messaging.system": "penstock",
            "messaging.operation.type": "process",
            "messaging.operation.name": "process",
            "messaging.destination.name": message.topic,
            "messaging.consumer.group.name": call.group,
            "messaging.message.id": message.message_id,
        }
        if len(call.messages) > 1:
            attributes["messaging.batch.message_count"] = str(len(call.messages))
        parent = self._propagator.extract(message.properties)
        with self._tracer.start_as_current_span(
            f"process {call.group}", context=parent, kind=self._kind, attributes=attributes
        ):
            return await call_next(call)
