"""Which messages are traced: the user properties `traceparent` and `tracestate`."""

from __future__ import annotations

import pytest

from penstock.tracing.context import TraceContext, sampled_context

TRACE, SPAN = "ab" * 16, "cd" * 8
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("user", "context"),
    [
        ([("traceparent", PARENT)], TraceContext(TRACE, SPAN)),
        ([("a", "b"), ("traceparent", PARENT), ("tracestate", "vendor=1")], TraceContext(TRACE, SPAN, "vendor=1")),
        ([("tracestate", "vendor=1"), ("traceparent", PARENT)], TraceContext(TRACE, SPAN, "vendor=1")),
        ([("traceparent", PARENT), ("traceparent", f"00-{'1' * 32}-{SPAN}-01")], TraceContext(TRACE, SPAN)),
        ([("traceparent", PARENT), ("tracestate", "x" * 513)], TraceContext(TRACE, SPAN)),
        ([("traceparent", f"00-{TRACE}-{SPAN}-03")], TraceContext(TRACE, SPAN)),
        ([("traceparent", f"cc-{TRACE}-{SPAN}-01")], TraceContext(TRACE, SPAN)),
    ],
)
def test_a_sampled_context_is_found(user: list[tuple[str, str]], context: TraceContext) -> None:
    assert sampled_context(user) == context


@pytest.mark.parametrize(
    "user",
    [
        [],
        [("tracestate", "vendor=1")],
        [("Traceparent", PARENT)],
        [("traceparent", f"00-{TRACE}-{SPAN}-00")],
        [("traceparent", f"00-{TRACE}-{SPAN}-02")],
        [("traceparent", f"ff-{TRACE}-{SPAN}-01")],
        [("traceparent", f"00-{'0' * 32}-{SPAN}-01")],
        [("traceparent", f"00-{TRACE}-{'0' * 16}-01")],
        [("traceparent", PARENT.upper())],
        [("traceparent", f"{PARENT}-x")],
        [("traceparent", f"{PARENT}\n")],
        [("traceparent", "")],
        [("traceparent", PARENT[:-1])],
    ],
)
def test_a_context_that_is_not_sampled_or_not_of_the_form_is_none(user: list[tuple[str, str]]) -> None:
    assert sampled_context(user) is None
