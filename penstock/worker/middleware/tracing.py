"""Spans of OpenTelemetry for the calls of handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.pop.client.tracing import Tracing
from penstock.worker.context import CallNext, HandlerCall

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


class TraceCalls:
    """A middleware that makes a span of each call, by the semantic conventions for messaging (kind consumer, `process`).

    The parent is the span that the message's user properties `traceparent` and `tracestate` name (W3C Trace Context). The span
    of a batch has a link to each instead. Needs the extra `otel`. `Worker(tracing=...)` adds this middleware by itself.

    Parameters:
        tracer_provider: Makes the tracer. By default the application's.
        tracing: Makes the spans in its place.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None, *, tracing: Tracing | None = None) -> None:
        self._tracing = tracing or Tracing(tracer_provider)

    async def __call__(self, call: HandlerCall, call_next: CallNext) -> Any:
        with self._tracing.processing(call.group, call.messages):
            return await call_next(call)
