"""Middlewares: those that come with the worker, and those of an application."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from penstock import (
    CallNext,
    Client,
    Deduplicate,
    HandlerCall,
    LimitRate,
    LogCalls,
    MeasureCalls,
    Reject,
    RetryCalls,
    TraceCalls,
    Worker,
    group_settings,
)
from penstock.pop.client.message import Message
from penstock.pop.proto import pop_pb2 as pb
from tests.pop.wiring import FILTER, GROUP, Node
from tests.waiting import until
from tests.worker.running import counts, running, send


def call_of(*ids: str, **fields: Any) -> HandlerCall:
    """Return a call of a handler with messages of these ids."""
    messages = [Message(pb.PoppedMessage(message_id=each, topic="plant/1", attempt=1, **fields), None) for each in ids]  # type: ignore[arg-type]
    return HandlerCall(messages, [each.encode() for each in ids], "bill", "billing")


class Handled:
    """A handler that notes the ids of its messages, and fails as often as a test says."""

    def __init__(self, *errors: Exception) -> None:
        self.ids: list[str] = []
        self.errors = list(errors)

    async def __call__(self, call: HandlerCall) -> str:
        self.ids += [message.message_id for message in call.messages]
        if self.errors:
            raise self.errors.pop(0)
        return "done"


async def test_middlewares_surround_a_handler_those_of_the_worker_outside(node: Node, client: Client) -> None:
    seen: list[str] = []

    def noting(name: str) -> Any:
        async def middleware(call: HandlerCall, following: CallNext) -> Any:
            seen.append(f"{name} {call.handler.rpartition('.')[2]} {call.group}")
            result = await following(call)
            seen.append(name)
            return result

        return middleware

    worker = Worker(node.target, middleware=[noting("outer"), noting("inner")])

    @worker.consumer(FILTER, group=GROUP, middleware=[noting("own")])
    async def bill(body: bytes) -> None:
        seen.append("handler")

    await send(client, [b"x"])
    async with running(worker):
        await until(lambda: counts(worker).handled == 1)
    begins = [f"{name} bill {GROUP}" for name in ("outer", "inner", "own")]
    assert seen == [*begins, "handler", "own", "inner", "outer"]


async def test_what_a_middleware_raises_has_the_effect_of_the_handler_s_exceptions(node: Node, client: Client) -> None:
    async def refuse(call: HandlerCall, call_next: CallNext) -> Any:
        raise Reject("not on a Monday")

    worker = Worker(node.target, middleware=[refuse])

    @worker.consumer(FILTER, group=GROUP, settings=group_settings(backoff=()))
    async def handle(body: bytes) -> None:
        raise AssertionError

    await send(client, [b"x"])
    async with running(worker):
        await until(lambda: counts(worker).dead_lettered == 1)


async def test_calls_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    middleware = LogCalls()
    assert await middleware(call_of("1"), Handled()) == "done"
    with pytest.raises(LookupError):
        await middleware(call_of("1"), Handled(LookupError("no such meter")))
    first, second = caplog.messages
    assert first.startswith("bill of 1 from 'plant/1', attempt 1 took ")
    assert second.endswith("LookupError: no such meter")


async def test_calls_are_measured() -> None:
    registry = CollectorRegistry()
    middleware = MeasureCalls(registry)
    await middleware(call_of("1", "2"), Handled())
    with pytest.raises(LookupError):
        await middleware(call_of("3"), Handled(LookupError()))
    shown = generate_latest(registry).decode()
    labels = 'group="billing",handler="bill"'
    assert f'penstock_worker_messages_total{{{labels},outcome="ok"}} 2.0' in shown
    assert f'penstock_worker_messages_total{{{labels},outcome="LookupError"}} 1.0' in shown
    assert f"penstock_worker_call_seconds_count{{{labels}}} 2.0" in shown


async def test_a_span_has_the_parent_that_the_message_names() -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traced = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    await TraceCalls(provider)(call_of("1", properties=traced), Handled())
    (span,) = exporter.get_finished_spans()
    assert span.parent is not None
    assert span.attributes is not None
    assert (span.name, span.parent.span_id) == ("process billing", int("cd" * 8, 16))
    assert span.attributes["messaging.destination.name"] == "plant/1"


async def test_a_failed_call_is_repeated_but_not_a_rejected_message() -> None:
    middleware = RetryCalls(2, delay=0)
    handled = Handled(LookupError(), LookupError())
    assert await middleware(call_of("1"), handled) == "done"
    assert len(handled.ids) == 3
    with pytest.raises(LookupError):
        await middleware(call_of("1"), Handled(*(LookupError() for _ in range(3))))
    rejected = Handled(Reject("no"))
    with pytest.raises(Reject):
        await middleware(call_of("1"), rejected)
    assert len(rejected.ids) == 1


async def test_calls_wait_for_the_rate_after_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []

    async def sleep(seconds: float) -> None:
        slept_s.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    middleware, handled = LimitRate(0.01, burst=3), Handled()
    for number in range(6):
        await middleware(call_of(str(number)), handled)
    assert [round(seconds, -1) for seconds in slept_s] == [100, 200, 300], "three at once, and then one every 100 s"
    assert len(handled.ids) == 6


async def test_repetitions_are_dropped_and_failures_are_not_remembered() -> None:
    middleware = Deduplicate(60, key=lambda message: message.message_id if message.message_id != "none" else "")
    handled = Handled()
    assert await middleware(call_of("1", "1", "2"), handled) == "done"
    assert await middleware(call_of("2", "3"), handled) == "done"
    assert await middleware(call_of("1"), handled) is None
    assert handled.ids == ["1", "2", "3"]
    await middleware(call_of("none", "none"), handled)
    assert handled.ids[3:] == ["none", "none"], "an empty key is no repetition"
    failing = Handled(LookupError())
    with pytest.raises(LookupError):
        await middleware(call_of("4"), failing)
    await middleware(call_of("4"), failing)
    assert failing.ids == ["4", "4"]


async def test_the_number_of_remembered_keys_is_bounded() -> None:
    middleware, handled = Deduplicate(60, keys_max=2), Handled()
    for each in ("1", "2", "3", "3", "1"):
        await middleware(call_of(each), handled)
    assert handled.ids == ["1", "2", "3", "1"]


@pytest.mark.parametrize(("kind", "arguments"), [(RetryCalls, (0,)), (LimitRate, (0,)), (Deduplicate, (0,))])
def test_numbers_out_of_bounds_are_refused(kind: Any, arguments: tuple[int]) -> None:
    with pytest.raises(ValueError, match=r"use |must be"):
        kind(*arguments)
