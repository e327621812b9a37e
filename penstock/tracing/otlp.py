"""OTLP: spans as the JSON of an `ExportTraceServiceRequest` (OpenTelemetry Protocol 1.x, JSON Protobuf Encoding)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

from penstock.tracing.traces import AttributeValue, TraceSpan

CONTENT_TYPE: Final = "application/json"

_ERROR: Final = 2
"""`Status.StatusCode.STATUS_CODE_ERROR`."""


def encode_spans(spans: Iterable[TraceSpan], resource: Mapping[str, AttributeValue], version: str) -> bytes:
    """Return the body of a request with spans.

    Args:
        spans: That have ended.
        resource: Attributes of the resource: who made the spans.
        version: Of the code that made them.
    """
    scope = {"scope": {"name": "penstock", "version": version}, "spans": [_span(span) for span in spans]}
    return orjson.dumps({"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]})


def _span(span: TraceSpan) -> dict[str, Any]:
    trace_id, span_id, state = span.context
    found: dict[str, Any] = {
        "traceId": trace_id,
        "spanId": span_id,
        "parentSpanId": span.parent_id,
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": str(span.began_ns),
        "endTimeUnixNano": str(span.ended_ns),
        "attributes": _attributes(span.attributes),
    }
    if state:
        found["traceState"] = state
    if span.error:
        found["status"] = {"code": _ERROR, "message": span.error}
    return found


def _attributes(attributes: Mapping[str, AttributeValue]) -> list[dict[str, Any]]:
    return [
        {"key": name, "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}}
        for name, value in attributes.items()
    ]
