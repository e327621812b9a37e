"""The spans of a node: what it stores, delivers and settles of messages whose publishers sample them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from penstock import Client, InvalidProperty
from penstock.gateway.protocol.encode import encode_ack
from penstock.gateway.protocol.packets import PUBACK, PUBLISH_WITH
from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2_grpc import PopServiceStub
from penstock.tracing.options import TracingOptions
from penstock.tracing.traces import SpanKind
from tests.gateway.wire import Broker, Client5
from tests.tracing.collector import Collector, Received, SilentCollector
from tests.waiting import until

TRACE, SPAN = "ab" * 16, "cd" * 8
TRACED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with Collector() as collector:
        yield collector


@pytest.fixture
async def broker(tmp_path: Path, collector: Collector) -> AsyncIterator[Broker]:
    broker = await Broker(tmp_path / "data", {"tracing": TracingOptions(collector.endpoint, interval_ms=10)}).start()
    yield broker
    await broker.stop()


async def publish(client: Client5, topic: str, about: dict[str, str], qos: int = 1, body: bytes = b"21.5") -> int:
    return await client.publish_with(topic, body, {Property.USER_PROPERTY: list(about.items())}, qos)


def is_child(span: Received, parent_id: str = SPAN) -> bool:
    return (span.trace_id, span.parent_id, span.state) == (TRACE, parent_id, "vendor=1")


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_message_over_mqtt_is_published_delivered_and_acknowledged(
    broker: Broker, collector: Collector, qos: int
) -> None:
    device, display = await broker.connect_5("device"), await broker.connect_5("display")
    await display.subscribe(("a/#", 2))
    await publish(device, "a/b", TRACED, qos)
    assert (await display.message()).qos == qos
    published, delivered = await collector.spans_of("publish a/b", "deliver a/b")
    assert is_child(published)
    assert is_child(delivered)
    assert (published.kind, delivered.kind) == (SpanKind.SERVER, SpanKind.PRODUCER)
    assert published.attributes["messaging.client.id"] == "device"
    assert published.attributes["messaging.message.body.size"] == 4
    assert delivered.attributes["messaging.client.id"] == "display"
    assert delivered.attributes["messaging.destination.subscription.name"] == "a/#"
    assert delivered.attributes["messaging.message.id"] == published.attributes["messaging.message.id"]
    if qos:
        (acked,) = await collector.spans_of("ack a/b")
        assert is_child(acked, delivered.span_id)
        assert acked.attributes["messaging.operation.type"] == "settle"
    assert len(collector.spans) == (3 if qos else 2)


async def test_a_client_that_lagged_or_has_packets_of_its_own_is_traced_too(broker: Broker, collector: Collector) -> None:
    device = await broker.connect_5("device")
    alone = await broker.connect_5("alone", about={Property.MAXIMUM_PACKET_SIZE: 10_000, Property.TOPIC_ALIAS_MAXIMUM: 5})
    await alone.subscribe(("a", 1))
    lasting = await broker.connect_5("lasts", about={Property.SESSION_EXPIRY_S: 1_000})
    await lasting.subscribe(("a", 1))
    lasting.reset()
    await until(lambda: "lasts" not in broker.node.gateway.clients)
    await publish(device, "a", TRACED)
    await alone.message()
    again = await broker.connect_5("lasts", flags=0, about={Property.SESSION_EXPIRY_S: 1_000})
    await again.message()
    await until(lambda: len([span for span in collector.spans if span.name == "ack a"]) == 2)
    clients = {span.attributes["messaging.client.id"] for span in collector.spans if span.name == "deliver a"}
    assert clients == {"alone", "lasts"}


async def test_the_group_of_a_shared_subscription_is_traced_once(broker: Broker, collector: Collector) -> None:
    device, member = await broker.connect_5("device"), await broker.connect_5("member")
    await member.subscribe(("$share/billing/a", 1))
    await publish(device, "a", TRACED)
    await member.message()
    delivered, acked = await collector.spans_of("deliver a", "ack a")
    assert is_child(acked, delivered.span_id)
    assert delivered.attributes["messaging.consumer.group.name"] == "billing"
    assert sorted(span.name for span in collector.spans) == ["ack a", "deliver a", "publish a"]


async def test_a_message_over_grpc_is_sent_handed_out_and_settled(broker: Broker, collector: Collector) -> None:
    async with Client(str(broker.node.grpc)) as client:
        receipt = await client.send("a", b"21.5", properties=TRACED)
        (message,) = await client.pop("a", group="billing", wait=5.0)
        sent, delivered = await collector.spans_of("publish a", "deliver a")
        assert is_child(sent)
        assert is_child(delivered)
        assert sent.attributes["messaging.message.id"] == receipt.message_id
        assert delivered.attributes["messaging.message.delivery_attempt"] == 1
        assert message.properties == TRACED  # consumers continue at the publisher, not at the node
        await message.extend(60)
        await message.ack()
        (acked,) = await collector.spans_of("ack a")
        assert is_child(acked, delivered.span_id)
        assert acked.attributes["messaging.consumer.group.name"] == "billing"
    assert len(collector.spans) == 3


async def test_a_message_of_a_rocketmq_client_is_traced_by_its_trace_context(broker: Broker, collector: Collector) -> None:
    pytest.importorskip("rocketmq", reason="rocketmq-python-client is not installed")
    from tests.pop.rocketmq.calling import Caller, outgoing

    async with grpc.aio.insecure_channel(str(broker.node.grpc)) as channel:
        await Caller(channel).send(outgoing(topic="a", trace_context=TRACED["traceparent"]))
    (published,) = await collector.spans_of("publish a")
    assert (published.trace_id, published.parent_id) == (TRACE, SPAN)


async def test_the_metadata_of_a_call_traces_its_messages(broker: Broker, collector: Collector) -> None:
    async with grpc.aio.insecure_channel(str(broker.node.grpc)) as channel:
        call = PopServiceStub(channel).Send
        await call(pb.SendRequest(messages=[pb.Message(topic="a", body=b"x")]), metadata=tuple(TRACED.items()))
    (published,) = await collector.spans_of("publish a")
    assert is_child(published)


async def test_what_does_not_end_with_an_ack_is_named(broker: Broker, collector: Collector) -> None:
    async with Client(str(broker.node.grpc)) as client:
        await client.send("a", b"x", properties=TRACED)
        (message,) = await client.pop("a", group="billing", wait=5.0)
        await message.nack()
        (message,) = await client.pop("a", group="billing", wait=5.0)
        await message.suspend()
        (message,) = await client.pop("a", group="billing", wait=5.0, invisible=0.001)
        (message,) = await client.pop("a", group="billing", wait=5.0)
        await message.dead_letter(reason="never")
        await collector.spans_of("nack a", "suspend a", "expire a", "dead_letter a")
    assert len([span for span in collector.spans if span.name == "deliver a"]) == 4


async def test_a_message_that_its_client_rejects_is_named_so(broker: Broker, collector: Collector) -> None:
    device, display = await broker.connect_5("device"), await broker.connect_5("display")
    await display.subscribe(("a", 1))
    await publish(device, "a", TRACED)
    packet_id = (await display.expect(PUBLISH_WITH))[3]
    await display.send(encode_ack(PUBACK, packet_id, ReasonCode.NOT_AUTHORIZED))
    delivered, rejected = await collector.spans_of("deliver a", "reject a")
    assert is_child(rejected, delivered.span_id)


async def test_a_publish_that_is_refused_has_a_span_with_the_reason(tmp_path: Path, collector: Collector) -> None:
    options = {"tracing": TracingOptions(collector.endpoint, interval_ms=10), "message_bytes_max": 10}
    broker = await Broker(tmp_path / "data", options).start()
    device = await broker.connect_5("device")
    assert await publish(device, "a", TRACED, body=b"x" * 11) == ReasonCode.QUOTA_EXCEEDED
    (refused,) = await collector.spans_of("publish a")
    assert "send 10 at most" in refused.error
    assert is_child(refused)
    await broker.stop()


async def test_a_refused_message_has_a_span_with_the_reason(broker: Broker, collector: Collector) -> None:
    async with Client(str(broker.node.grpc)) as client:
        with pytest.raises(InvalidProperty):
            await client.send("a", b"x", properties=TRACED | {f"p{number}": "" for number in range(127)})
    (refused,) = await collector.spans_of("publish a")
    assert "128 properties" in refused.error
    assert "messaging.message.id" not in refused.attributes


async def test_a_delivery_after_a_kill_is_traced_by_what_the_log_has(broker: Broker, collector: Collector) -> None:
    device = await broker.connect_5("device")
    await publish(device, "a", TRACED)
    await broker.kill()
    async with Client(str(broker.node.grpc)) as client:
        (message,) = await client.pop("a", group="billing", wait=5.0)
        await message.ack()
    delivered, _ = await collector.spans_of("deliver a", "ack a")
    assert is_child(delivered)


async def test_messages_that_nobody_samples_have_no_spans(broker: Broker, collector: Collector) -> None:
    device, display = await broker.connect_5("device"), await broker.connect_5("display")
    await display.subscribe(("a", 1))
    for about in ({}, {"other": "x"}, UNSAMPLED):
        await publish(device, "a", about)
        await display.message()
    async with Client(str(broker.node.grpc)) as client:
        messages = await client.pop("a", group="billing", wait=5.0)
        await client.ack([message.handle for message in messages], group="billing")
    await publish(device, "b", TRACED)
    await collector.spans_of("publish b")
    assert [span.name for span in collector.spans] == ["publish b"]


async def test_a_retained_message_is_traced_when_it_is_live_only(broker: Broker, collector: Collector) -> None:
    device = await broker.connect_5("device")
    await device.publish_with("a", b"x", {Property.USER_PROPERTY: list(TRACED.items())}, 1, retain=True)
    late = await broker.connect_5("late")
    await late.subscribe(("a", 1))
    assert (await late.message()).retain
    await publish(device, "b", TRACED)
    await collector.spans_of("publish a", "publish b")
    assert len(collector.spans) == 2


async def test_forgotten_deliveries_are_settled_without_a_span(tmp_path: Path, collector: Collector) -> None:
    tracing = TracingOptions(collector.endpoint, interval_ms=10, open_max=2)
    broker = await Broker(tmp_path / "data", {"tracing": tracing}).start()
    async with Client(str(broker.node.grpc)) as client:
        for _ in range(5):
            await client.send("a", b"x", properties=TRACED)
        messages = await client.pop("a", group="billing", wait=5.0)
        await client.ack([message.handle for message in messages], group="billing")
    await broker.stop()
    names = [span.name for span in collector.spans]
    assert (names.count("publish a"), names.count("deliver a"), names.count("ack a")) == (5, 5, 2)


async def test_a_collector_that_never_answers_disturbs_nobody(tmp_path: Path) -> None:
    async with SilentCollector() as collector:
        tracing = TracingOptions(collector.endpoint, interval_ms=10, queue_max=20, batch_max=20)
        broker = await Broker(tmp_path / "data", {"tracing": tracing}).start()
        device, display = await broker.connect_5("device"), await broker.connect_5("display")
        await display.subscribe(("a", 1))
        for _ in range(50):
            await publish(device, "a", TRACED)
            await display.message()
        await until(lambda: collector.connections)
        assert collector.connections == 1
        registry = broker.node.registry
        assert registry.get_sample_value("penstock_tracing_spans_waiting") == 20
        dropped = registry.get_sample_value("penstock_tracing_spans_dropped_total", {"reason": "queue"})
        assert dropped is not None
        assert dropped >= 100
        await broker.stop()


async def test_a_node_without_an_endpoint_has_nothing_of_tracing(tmp_path: Path) -> None:
    broker = await Broker(tmp_path / "data", {}).start()
    assert broker.node.registry.get_sample_value("penstock_tracing_spans_waiting") is None
    assert broker.node.gateway.fanouts.traces is None
    await broker.stop()
