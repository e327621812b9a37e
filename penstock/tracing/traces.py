"""The spans that the node makes, from their beginning until the exporter takes them.

Only a message with a sampled trace context gets spans, so the publishers decide which traces exist. The node itself bounds the
number of spans in a second, and the number of those that wait for the collector.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Final

from penstock.tracing.context import TraceContext
from penstock.tracing.options import TracingOptions

NAME_CHARS_MAX: Final = 256
"""Characters of a topic that a span has in its name and its attributes. A topic may be far longer."""

ERROR_CHARS_MAX: Final = 1_024

NOT_STORED: Final = -1
"""Stands for the position of a message that was refused."""

AttributeValue = str | int


class SpanKind(IntEnum):
    """The kinds of a span: `Span.SpanKind` of OTLP."""

    INTERNAL = 1
    SERVER = 2
    PRODUCER = 4


class TraceSpan:
    """One span of the node.

    Parameters:
        parent: The span above it, which is in general one of the publisher.
        name: What the span is of: the operation and the topic.
        kind: See `SpanKind`.
        began_ns: When it began, in ns since 1970.
        attributes: By the semantic conventions for messaging.
    """

    __slots__ = ("attributes", "began_ns", "context", "ended_ns", "error", "kind", "name", "parent_id")

    def __init__(
        self, parent: TraceContext, name: str, kind: SpanKind, began_ns: int, attributes: dict[str, AttributeValue]
    ) -> None:
        self.context = TraceContext(parent.trace_id, f"{random.getrandbits(64) or 1:016x}", parent.state)
        self.parent_id = parent.span_id
        self.name = name
        self.kind = kind
        self.began_ns = began_ns
        self.ended_ns = 0
        self.attributes = attributes
        self.error = ""
        """Why the operation failed; empty if it did not."""


class Traces:
    """Makes spans, and keeps those that have ended until they are exported.

    Parameters:
        options: See `TracingOptions`.
        monotonic_s: Returns the monotonic time in seconds, by which the rate is bounded.
        time_ns: Returns the time in ns since 1970, as spans have it.
    """

    def __init__(
        self, options: TracingOptions, monotonic_s: Callable[[], float], time_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.options = options
        self.now_ns = time_ns
        self._monotonic_s = monotonic_s
        self._second = 0
        self._begun = 0
        """Spans that were begun in that second."""
        self.ended: deque[TraceSpan] = deque()
        """The spans that wait for the exporter, the oldest first."""
        self.arrived = asyncio.Event()
        """Set while spans wait."""
        self.over_rate = 0
        """Spans that were not made, because there were too many in the second."""
        self.over_queue = 0
        """Spans that were dropped, because too many waited for the exporter."""

    def begin(
        self,
        parent: TraceContext,
        operation: str,
        operation_type: str,
        kind: SpanKind,
        topic: bytes,
        position: int,
        about: Mapping[str, AttributeValue],
        *,
        began_ns: int = 0,
    ) -> TraceSpan | None:
        """Begin a span about a message; return None if there were too many in this second.

        Args:
            parent: The span above it.
            operation: What happens, such as `publish`: the attribute `messaging.operation.name`.
            operation_type: The attribute `messaging.operation.type`.
            kind: See `SpanKind`.
            topic: Of the message.
            position: Of its record, which is its id; or `NOT_STORED`.
            about: More attributes. Those with an empty value are left out.
            began_ns: When the span began; 0 for now.
        """
        second = int(self._monotonic_s())
        if second != self._second:
            self._second, self._begun = second, 0
        if self._begun >= self.options.spans_per_s_max:
            self.over_rate += 1
            return None
        self._begun += 1
        shown = topic[: 4 * NAME_CHARS_MAX].decode("utf-8", "ignore")[:NAME_CHARS_MAX]
        found: dict[str, AttributeValue] = {
            "messaging.system": "penstock",
            "messaging.operation.name": operation,
            "messaging.operation.type": operation_type,
            "messaging.destination.name": shown,
        }
        if position != NOT_STORED:
            found["messaging.message.id"] = f"{position:016x}"
        for name, value in about.items():
            if value != "":
                found[name] = value[:NAME_CHARS_MAX] if isinstance(value, str) else value
        return TraceSpan(parent, f"{operation} {shown}", kind, began_ns or self.now_ns(), found)

    def end(self, span: TraceSpan, error: str = "") -> None:
        """End a span, and keep it for the exporter. `error` says why the operation failed."""
        if len(self.ended) >= self.options.queue_max:
            self.over_queue += 1
            return
        span.ended_ns = max(self.now_ns(), span.began_ns)
        span.error = error[:ERROR_CHARS_MAX]
        self.ended.append(span)
        self.arrived.set()
