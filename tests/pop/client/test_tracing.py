"""Spans of OpenTelemetry, and the trace context that a message carries, against a real node."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from penstock import Client, HandleExpired, Message, OutgoingMessage, SyncClient, Tracing, Worker
from penstock.install import install_hint
from penstock.pop.client.message import ack_together
from penstock.pop.client.tracing import LINKS_MAX
from penstock.pop.errors import InvalidTopic, StatusError
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2_grpc import PopServiceStub
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node

TRACE, PARENT = "ab" * 16, "cd" * 8
TRACED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


class Spans:
    """The spans that have ended, and the `Tracing` that makes them."""

    def __init__(self) -> None:
        self._exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        names = [span.name for span in self._exporter.get_finished_spans()]
        assert names.count(name) == 1, names
        return self.named(name)[0]


def linked(span: ReadableSpan) -> set[int]:
    """Return the ids of the spans to which a span has links."""
    return {link.context.span_id for link in span.links}


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def about(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    return span.attributes.get(f"messaging.{name}")


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
async def client(node: Node, spans: Spans) -> AsyncIterator[Client]:
    async with Client(node.target, tracing=spans.tracing) as made:
        yield made


async def test_a_message_is_followed_from_send_to_ack(client: Client, spans: Spans) -> None:
    receipt = await client.send(TOPIC, b"21.5", properties={"unit": "C"})
    (message,) = await client.pop(FILTER, group=GROUP, wait=60.0)
    await message.ack()
    send, receive, ack = spans.one(f"send {TOPIC}"), spans.one(f"receive {FILTER}"), spans.one(f"ack {TOPIC}")
    assert (send.kind, receive.kind, ack.kind) == (SpanKind.PRODUCER, SpanKind.CLIENT, SpanKind.CLIENT)
    assert linked(receive) == linked(ack) == {id_of(send)}
    assert message.properties["traceparent"].split("-")[2] == f"{id_of(send):016x}"
    assert message.properties["unit"] == "C"
    for span, operation in ((send, "send"), (receive, "receive"), (ack, "settle")):
        assert (about(span, "system"), about(span, "operation.type")) == ("penstock", operation)
    assert about(send, "message.id") == about(ack, "message.id") == receipt.message_id
    assert (about(send, "destination.name"), about(send, "message.body.size")) == (TOPIC, 4)
    assert (about(receive, "consumer.group.name"), about(receive, "batch.message_count")) == (GROUP, 1)


async def test_a_batch_has_a_span_for_each_message_and_links_to_them(client: Client, spans: Spans) -> None:
    await client.send_batch(OutgoingMessage(topic=TOPIC, body=b"%d" % number) for number in range(3))
    created = {id_of(span) for span in spans.named(f"create {TOPIC}")}
    assert len(created) == 3
    assert linked(spans.one("send")) == created
    messages: list[Message] = []
    while len(messages) < 3:
        messages += await client.pop(FILTER, group=GROUP, wait=60.0)
    await client.ack([message.handle for message in messages], group=GROUP)
    assert set().union(*map(linked, spans.named(f"receive {FILTER}"))) == created
    assert about(spans.one(f"ack {GROUP}"), "batch.message_count") == 3


async def test_a_context_that_a_message_has_already_is_kept(client: Client, spans: Spans) -> None:
    await client.send(TOPIC, b"x", properties=TRACED)
    (message,) = await client.pop(FILTER, group=GROUP, wait=60.0)
    assert message.properties == TRACED
    assert linked(spans.one(f"send {TOPIC}")) == {int(PARENT, 16)}


async def test_failures_are_in_the_spans(client: Client, spans: Spans) -> None:
    with pytest.raises(InvalidTopic):
        await client.send("a/#", b"x")
    assert spans.one("send a/#").status.status_code == StatusCode.ERROR
    await client.send(TOPIC, b"x")
    (message,) = await client.pop(FILTER, group=GROUP, wait=60.0, invisible=0.001)
    (again,) = await client.pop(FILTER, group=GROUP, wait=60.0)
    with pytest.raises((HandleExpired, StatusError)):
        await message.ack()
    failed = spans.one(f"ack {TOPIC}")
    assert failed.status.status_code == StatusCode.ERROR
    await again.nack()
    assert spans.one(f"nack {TOPIC}").status.status_code == StatusCode.UNSET


async def test_a_worker_continues_the_trace_of_the_sender(node: Node, client: Client, spans: Spans) -> None:
    await client.send(TOPIC, b"x")
    worker = Worker(node.target, tracing=spans.tracing)

    @worker.consumer(FILTER, group=GROUP)
    async def handle(body: bytes) -> None:
        await client.send("answers", body)
        worker.stop()

    await worker.run(handle_signals=False)
    send, process, answer = spans.one(f"send {TOPIC}"), spans.one(f"process {GROUP}"), spans.one("send answers")
    assert process.parent is not None
    assert answer.parent is not None
    assert (process.parent.span_id, answer.parent.span_id) == (id_of(send), id_of(process))
    assert (process.kind, about(process, "message.delivery_attempt")) == (SpanKind.CONSUMER, 1)
    assert linked(spans.one(f"ack {TOPIC}")) == linked(spans.one(f"receive {FILTER}")) == {id_of(send)}


async def test_messages_that_are_acknowledged_together_have_one_span_with_their_links(client: Client, spans: Spans) -> None:
    for number in range(3):
        await client.send(TOPIC, b"%d" % number)
    messages: list[Message] = []
    while len(messages) < 3:
        messages += await client.pop(FILTER, group=GROUP, wait=60.0)
    await messages[0].nack()
    await ack_together(messages)
    ack = spans.one(f"ack {GROUP}")
    assert linked(ack) == {id_of(span) for span in spans.named(f"send {TOPIC}")}
    assert about(ack, "batch.message_count") == 3
    assert ack.status.status_code == StatusCode.ERROR, "one of them was returned before"
    assert "HandleReplaced" in str(ack.status.description)


def test_a_span_has_as_many_links_as_the_sdk_keeps_and_each_context_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tracing = Tracing()
    contexts = [{"traceparent": f"00-{TRACE}-{number:016x}-01"} for number in range(1, 1_000)]
    links = tracing.links_to(contexts)
    assert [link.context.span_id for link in links] == list(range(1, LINKS_MAX + 1))
    monkeypatch.setattr(tracing, "_propagator", None)  # Its use would fail.
    assert [link.context for link in tracing.links_to(contexts)] == [link.context for link in links]


async def test_consumers_and_streams_make_spans_too(client: Client, spans: Spans) -> None:
    await client.send(TOPIC, b"x")
    async with client.consume(FILTER, group=GROUP) as messages:
        async for message in messages:
            await message.nack()
            break
    async with client.stream(FILTER, group="other") as stream:
        async for again in stream:
            again.ack()
            break
    receives = spans.named(f"receive {FILTER}")
    assert {about(span, "consumer.group.name") for span in receives} == {GROUP, "other"}
    assert all(linked(span) == {id_of(spans.one(f"send {TOPIC}"))} for span in receives)
    assert linked(spans.one(f"nack {TOPIC}")) == linked(spans.one(f"ack {TOPIC}")) == {id_of(spans.one(f"send {TOPIC}"))}


async def test_the_context_in_metadata_of_a_call_goes_with_its_messages(node: Node, client: Client, spans: Spans) -> None:
    """As the instrumentation of gRPC sends it, by a client that knows nothing of traces."""
    async with grpc.aio.insecure_channel(node.target) as channel:
        stub = PopServiceStub(channel)
        bare, own = pb.Message(topic=TOPIC), pb.Message(topic=TOPIC, properties={"traceparent": "own"})
        await stub.Send(pb.SendRequest(messages=[bare, own]), metadata=tuple(TRACED.items()))
        await stub.Send(pb.SendRequest(messages=[bare]), metadata=(("traceparent", "no such form"),))
    got: list[Message] = []
    while len(got) < 3:
        got += await client.pop(FILTER, group=GROUP, wait=60.0)
    assert [message.properties for message in got] == [TRACED, {"traceparent": "own"}, {}]


async def test_a_producer_makes_the_span_of_each_message(client: Client, spans: Spans) -> None:
    async with client.producer() as producer:
        receipts = [await (await producer.post(OutgoingMessage(topic=TOPIC, body=b"%d" % n))) for n in range(3)]
        with pytest.raises(InvalidTopic):
            await producer.send("a/#")
    assert [about(span, "message.id") for span in spans.named(f"send {TOPIC}")] == [each.message_id for each in receipts]
    assert spans.one("send a/#").status.status_code == StatusCode.ERROR


async def test_threads_make_the_same_spans(node: Node, spans: Spans) -> None:
    def use() -> None:
        with SyncClient(node.target, tracing=spans.tracing) as client:
            client.send(TOPIC, b"x")
            (message,) = client.pop(FILTER, group=GROUP, wait=60.0)
            message.ack()

    await asyncio.to_thread(use)
    assert linked(spans.one(f"receive {FILTER}")) == linked(spans.one(f"ack {TOPIC}")) == {id_of(spans.one(f"send {TOPIC}"))}


def test_clients_without_tracing_do_not_import_opentelemetry() -> None:
    program = (
        "import sys, penstock; penstock.Client, penstock.Worker, penstock.Tracing; assert 'opentelemetry' not in sys.modules\n"
        "sys.modules['opentelemetry'] = None\n"
        "try: penstock.Tracing()\nexcept ImportError as error: print(error)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == f"tracing needs OpenTelemetry: {install_hint('otel')}\n"
