"""Spans on their way to a collector that takes, refuses, fails, or never answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.store.options import OptionInvalid
from penstock.tracing.context import TraceContext
from penstock.tracing.exporter import SpanExporter
from penstock.tracing.options import TracingOptions
from penstock.tracing.traces import NAME_CHARS_MAX, SpanKind, Traces
from tests.tracing.collector import Collector, SilentCollector
from tests.waiting import until

PARENT = TraceContext("ab" * 16, "cd" * 8, "vendor=1")


def traces_to(endpoint: str, monotonic_s: Callable[[], float] = lambda: 0.0, **options: int) -> Traces:
    return Traces(TracingOptions(endpoint, **{"interval_ms": 1, **options}), monotonic_s)


def make_spans(traces: Traces, count: int, topic: bytes = b"a/b") -> None:
    for number in range(count):
        span = traces.begin(PARENT, "publish", "send", SpanKind.SERVER, topic, number, {"messaging.client.id": "device"})
        if span is not None:
            traces.end(span)


async def test_spans_arrive_as_the_protocol_defines_them() -> None:
    async with Collector() as collector:
        traces = traces_to(collector.endpoint)
        exporter = SpanExporter(traces, "1.2")
        exporter.start()
        failed = traces.begin(PARENT, "publish", "send", SpanKind.SERVER, b"a", -1, {}, began_ns=1)
        assert failed is not None
        traces.end(failed, "no room")
        make_spans(traces, 1)
        error, span = await collector.spans_of("publish a", "publish a/b")
        assert (span.trace_id, span.parent_id, span.state, span.kind) == (*PARENT[:2], "vendor=1", SpanKind.SERVER)
        assert len(span.span_id) == 16
        assert span.span_id != span.parent_id != error.span_id != span.span_id
        assert 0 < span.began_ns <= span.ended_ns
        assert span.attributes == {
            "messaging.system": "penstock",
            "messaging.operation.name": "publish",
            "messaging.operation.type": "send",
            "messaging.destination.name": "a/b",
            "messaging.message.id": f"{0:016x}",
            "messaging.client.id": "device",
        }
        assert (span.resource["service.name"], span.resource["service.version"]) == ("penstock", "1.2")
        assert (error.error, error.began_ns) == ("no room", 1)
        assert "messaging.message.id" not in error.attributes
        await exporter.stop()
    assert (exporter.exported, exporter.refused, exporter.failures) == (2, 0, 0)


async def test_the_last_spans_are_sent_when_the_node_stops() -> None:
    async with Collector() as collector:
        traces = traces_to(collector.endpoint, interval_ms=60_000, batch_max=2)
        exporter = SpanExporter(traces, "1")
        exporter.start()
        make_spans(traces, 5)
        await exporter.stop()
        assert len(collector.spans) == 5
        assert collector.requests == 3


async def test_a_busy_collector_gets_the_spans_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tracing.exporter.RETRY_S", 0.001)
    async with Collector(503, 429) as collector:
        traces = traces_to(collector.endpoint)
        exporter = SpanExporter(traces, "1")
        exporter.start()
        make_spans(traces, 3)
        await until(lambda: exporter.exported == 3)
        assert (len(collector.spans), exporter.failures, exporter.refused) == (3, 2, 0)
        await exporter.stop()


async def test_what_a_collector_refuses_is_counted_and_not_sent_again() -> None:
    async with Collector(400) as collector:
        traces = traces_to(collector.endpoint)
        exporter = SpanExporter(traces, "1")
        exporter.start()
        make_spans(traces, 3)
        await until(lambda: exporter.refused == 3)
        collector.answer = b'{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too old"}}'
        make_spans(traces, 5)
        await until(lambda: exporter.exported == 3)
        assert (exporter.refused, exporter.failures, collector.requests) == (5, 0, 2)
        await exporter.stop()


async def test_spans_for_a_collector_that_never_answers_are_bounded_and_the_rest_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.tracing.exporter.RETRY_S", 0.001)
    async with SilentCollector() as collector:
        traces = traces_to(collector.endpoint, timeout_ms=50, queue_max=10, batch_max=10)
        exporter = SpanExporter(traces, "1")
        exporter.start()
        make_spans(traces, 25)
        await until(lambda: exporter.failures >= 2)
        assert (len(traces.ended), traces.over_queue, exporter.exported) == (10, 15, 0)
        await exporter.stop()


async def test_a_stop_does_not_try_again_what_has_just_failed() -> None:
    async with Collector(503, 503, 503) as collector:
        traces = traces_to(collector.endpoint)
        exporter = SpanExporter(traces, "1")
        exporter.start()
        make_spans(traces, 1)
        await until(lambda: exporter.failures)
        await exporter.stop()
        assert collector.requests == 1


async def test_a_stop_waits_a_moment_for_a_collector_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tracing.exporter.STOP_S_MAX", 0.05)
    async with SilentCollector() as collector:
        traces = traces_to(collector.endpoint)
        exporter = SpanExporter(traces, "1")
        exporter.start()
        make_spans(traces, 1)
        await until(lambda: collector.connections)
        await exporter.stop()
        assert len(traces.ended) == 1


async def test_spans_wait_for_a_collector_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> None:
    monkeypatch.setattr("penstock.tracing.exporter.RETRY_S", 0.001)
    traces = traces_to(f"http://127.0.0.1:{unused_tcp_port}/v1/traces")
    exporter = SpanExporter(traces, "1")
    exporter.start()
    make_spans(traces, 2)
    await until(lambda: exporter.failures >= 2)
    assert len(traces.ended) == 2
    await exporter.stop()


def test_the_spans_of_a_second_are_bounded() -> None:
    now_s = 5.0
    traces = traces_to("http://localhost", lambda: now_s, spans_per_s_max=10)
    make_spans(traces, 15)
    assert (len(traces.ended), traces.over_rate) == (10, 5)
    now_s = 6.0
    make_spans(traces, 15)
    assert (len(traces.ended), traces.over_rate) == (20, 10)


def test_a_span_has_the_beginning_of_a_long_topic() -> None:
    traces = traces_to("http://localhost")
    make_spans(traces, 1, topic="ü".encode() * 30_000)
    (span,) = traces.ended
    assert span.attributes["messaging.destination.name"] == "ü" * NAME_CHARS_MAX


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://a/", "http://", "http://a:b/", "http://[::1/", "http://a:0/"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(OptionInvalid, match=r"tracing\.endpoint is .* but must be an http or https URL"):
        TracingOptions(endpoint).check("tracing")
