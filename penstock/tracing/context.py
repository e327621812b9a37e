"""The trace context of a message: the user properties `traceparent` and `tracestate`, by W3C Trace Context."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

TRACEPARENT_FORM: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C Trace Context, 3.2: version, trace id, span id and flags."""

TRACESTATE_CHARS_MAX: Final = 512
"""W3C Trace Context, 3.3.1.5: so much of a `tracestate` must be passed on. A longer one is left out."""

_SAMPLED: Final = 1
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16


class TraceContext(NamedTuple):
    """A span that others can name as their parent, in a trace that is sampled."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    state: str = ""
    """The `tracestate`, which the spans of the trace pass on."""


def sampled_context(user: Iterable[tuple[str, str]]) -> TraceContext | None:
    """Return the trace context in the user properties of a message; None if there is none, or its trace is not sampled.

    A `traceparent` that is not of the form, or that has the version `ff` or an id of zeros, is ignored, as the recommendation
    asks. If a name occurs more than once, its first value holds.
    """
    parent = state = ""
    for name, value in user:
        if name == TRACEPARENT:
            parent = parent or value
        elif name == TRACESTATE:
            state = state or value
    if not TRACEPARENT_FORM.fullmatch(parent):
        return None
    version, trace_id, span_id, flags = parent.split("-")
    if version == "ff" or trace_id == _NO_TRACE or span_id == _NO_SPAN or not int(flags, 16) & _SAMPLED:
        return None
    return TraceContext(trace_id, span_id, state if len(state) <= TRACESTATE_CHARS_MAX else "")
