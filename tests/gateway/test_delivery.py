"""Deliveries to many clients and to slow ones, the window of QoS 1 and 2, and the end of a client that lags."""

from __future__ import annotations

import asyncio

import pytest

from penstock.gateway.delivery import subscription
from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.packets import PINGRESP, PUBACK, PUBCOMP, PUBLISH, PUBREC, PUBREL
from penstock.store.options import KIB, MIB
from tests.gateway.brokers import StartBroker
from tests.gateway.wire import PING, Broker, Client, Message, message_of
from tests.waiting import until


async def flood(publisher: Client, count: int, body_bytes: int, *, topic: bytes = b"a", first: int = 0) -> None:
    """Publish messages whose bodies begin with their numbers, and return when the node has stored them."""
    for n in range(first, first + count):
        await publisher.send(encode_publish(topic, b"%08d" % n + b"x" * body_bytes, 1, packet_id=1))
    for _ in range(count):
        assert await publisher.receive() == (PUBACK, 1)


async def numbers(client: Client, count: int) -> list[int]:
    """Return the numbers of the next messages that `flood` published. Those of QoS 1 are acknowledged."""
    return [int((await client.message()).body[:8]) for _ in range(count)]


# --- many subscribers ---------------------------------------------------------------------------------------------------


async def test_many_subscribers_get_everything_once(broker: Broker) -> None:
    publisher = await broker.connect("publisher")
    subscribers = [await broker.connect(f"subscriber-{n}") for n in range(30)]
    for n, subscriber in enumerate(subscribers):
        await subscriber.subscribe(("a/+" if n % 2 else "a/b", n % 3))
    expected = [Message("a/b", b"%d" % n, n % 3) for n in range(50)]
    await publisher.send(
        *(encode_publish(b"a/b", one.body, one.qos, packet_id=one.qos and 1 + int(one.body)) for one in expected)
    )
    for n, subscriber in enumerate(subscribers):
        got = [message_of(await subscriber.expect(PUBLISH)) for _ in expected]
        assert got == [one._replace(qos=min(one.qos, n % 3)) for one in expected]
        assert await subscriber.drained() == []
    assert broker.node.gateway.counters.publishes_out == 1500


async def test_subscribers_of_one_filter_share_its_queue_and_its_fanout(broker: Broker) -> None:
    for n in range(10):
        client = await broker.connect(f"subscriber-{n}")
        await client.subscribe(("a/+", n % 3), ("b", 0))
    held = broker.held_resources()
    assert (held["fanouts"], held["watchers"], held["queues"]) == (2, 2, 2)


async def test_each_client_has_packet_ids_of_its_own(broker: Broker) -> None:
    one, two, publisher = [await broker.connect(name) for name in ("one", "two", "publisher")]
    await one.subscribe(("a", 1), ("b", 1))
    await two.subscribe(("b", 1))
    for topic in ("a", "a", "b"):
        await publisher.publish(topic, b"x", 1)
    assert [found[3] for found in await one.drained()] == [1, 2, 3]
    assert [found[3] for found in await two.drained()] == [1]


# --- a subscriber that doesn't read -------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_subscriber_that_does_not_read_costs_no_memory_and_disturbs_nobody(start_broker: StartBroker, qos: int) -> None:
    buffer_bytes = 32 * KIB
    broker = await start_broker(send_buffer_bytes=buffer_bytes, segment_bytes=64 * MIB, inflight_max=65_535)
    slow, fast, publisher = [await broker.connect(name) for name in ("slow", "fast", "publisher")]
    for client in (slow, fast):
        await client.subscribe(("a", qos))
    broker.limit_send_buffer("slow")
    slow.stop_reading()
    (subscribed,) = broker.connection("slow").subscriptions.by_filter.values()

    count, body_bytes = 300, 16 * KIB
    for first in range(0, count, 20):
        await flood(publisher, 20, body_bytes, first=first)
        assert await numbers(fast, 20) == list(range(first, first + 20))
        # The buffer holds up to its high-water mark, and the batch that exceeded the mark.
        assert broker.unsent_bytes("slow") < buffer_bytes + 20 * (body_bytes + 100)
    assert not subscribed.live
    assert subscribed.cursor < count // 2

    slow.go_on_reading()
    assert await numbers(slow, count) == list(range(count))
    assert await slow.drained() == await fast.drained() == []
    await until(lambda: subscribed.live)
    await flood(publisher, 1, 10, first=count)
    assert await numbers(slow, 1) == await numbers(fast, 1) == [count]


async def test_a_subscriber_that_reads_again_during_the_flood_gets_everything_in_order(start_broker: StartBroker) -> None:
    broker = await start_broker(send_buffer_bytes=16 * KIB)
    slow, publisher = await broker.connect("slow"), await broker.connect("publisher")
    await slow.subscribe(("a", 0))
    broker.limit_send_buffer("slow")
    got: list[int] = []
    for first in range(0, 1000, 100):
        slow.stop_reading()
        await flood(publisher, 100, 4 * KIB, first=first)
        slow.go_on_reading()
        got += await numbers(slow, 60)
    got += await numbers(slow, 400)
    assert got == list(range(1000))
    assert await slow.drained() == []


async def test_the_node_still_reads_a_lagging_subscriber(start_broker: StartBroker) -> None:
    broker = await start_broker(send_buffer_bytes=16 * KIB)
    slow, publisher = await broker.connect("slow"), await broker.connect("publisher")
    await slow.subscribe(("a", 0))
    broker.limit_send_buffer("slow")
    slow.stop_reading()
    await flood(publisher, 50, 16 * KIB)
    connection = broker.connection("slow")
    assert not connection.outbox.writable
    heard_s = connection.received_s
    broker.clock.advance(1000)
    slow.writer.write(PING + encode_publish(b"b", b"from a slow one"))
    await until(lambda: connection.received_s > heard_s)
    assert broker.stored()[-1] == Message("b", b"from a slow one")
    slow.go_on_reading()
    await slow.expect(PINGRESP)
    assert await numbers(slow, 50) == list(range(50))


async def test_subscriptions_of_a_slow_client_take_turns(start_broker: StartBroker) -> None:
    broker = await start_broker(send_buffer_bytes=16 * KIB)
    slow, publisher = await broker.connect("slow"), await broker.connect("publisher")
    await slow.subscribe(("a", 0), ("b", 0), ("c", 0))
    broker.limit_send_buffer("slow")
    slow.stop_reading()
    for topic in (b"a", b"b", b"c"):
        await flood(publisher, 150, 16 * KIB, topic=topic)
    slow.go_on_reading()
    got = [await slow.message() for _ in range(450)]
    last = {message.topic: at for at, message in enumerate(got)}
    assert min(last.values()) > 200  # No subscription was served to its end before the others.
    for name in ("a", "b", "c"):
        assert [int(message.body[:8]) for message in got if message.topic == name] == list(range(150))


async def test_a_step_of_large_messages_is_bounded_by_bytes(start_broker: StartBroker) -> None:
    broker = await start_broker(send_buffer_bytes=64 * KIB, segment_bytes=64 * MIB)
    publisher = await broker.connect("publisher")
    for n in range(20):
        await publisher.publish(f"a/{n}", b"x" * (MIB - 100), 1, retain=True)
    slow = await broker.connect("slow")
    broker.limit_send_buffer("slow")
    slow.stop_reading()
    await slow.send(b"\x82\x08\0\1\0\3a/#\0")
    await until(lambda: bool(broker.connection("slow").subscriptions))
    assert 0 < broker.unsent_bytes("slow") < 2 * MIB
    slow.go_on_reading()
    assert [len(message_of(await slow.expect(PUBLISH)).body) for _ in range(20)] == [MIB - 100] * 20


async def test_a_long_backlog_is_sent_in_many_turns_of_the_loop(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "PUMP_STEPS", 1)
    monkeypatch.setattr(subscription, "PUMP_ENTRIES", 10)
    publisher, client = await broker.connect("publisher"), await broker.connect("client")
    packets = [encode_publish(b"a/%03d" % n, b"%d" % n, 1, packet_id=n + 1, retain=True) for n in range(500)]
    await publisher.send(*packets)
    await publisher.drained()
    await client.subscribe(("a/#", 0), ("+/+", 1))
    got = [await client.message() for _ in range(1000)]
    for qos in (0, 1):
        assert [int(message.body) for message in got if message.qos == qos] == list(range(500))
    assert await client.drained() == []
    assert not broker.connection("client").outbox.lagging


# --- the in-flight window -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_live", [True, False], ids=["one by one", "in one batch"])
async def test_without_acknowledgements_exactly_the_window_is_sent_and_each_acknowledgement_frees_one(
    start_broker: StartBroker, is_live: bool
) -> None:
    broker = await start_broker(inflight_max=10)
    client, publisher = await broker.connect("client"), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    packets = [encode_publish(b"a", b"%d" % n, 1, packet_id=1) for n in range(100)]
    for packet in packets if is_live else [b"".join(packets)]:
        await publisher.send(packet)
        await publisher.drained()
    got = await client.drained()
    assert [item[4] for item in got] == [b"%d" % n for n in range(10)]
    assert await client.drained() == []
    for expected in range(10, 20):
        await client.send(encode_acks(PUBACK, [got[expected - 10][3]]))
        assert [item[4] for item in await client.drained()] == [b"%d" % expected]


async def test_the_window_is_shared_by_the_subscriptions_of_a_session(start_broker: StartBroker) -> None:
    broker = await start_broker(inflight_max=10)
    client, publisher = await broker.connect("client"), await broker.connect("publisher")
    await client.subscribe(("a", 1), ("b", 2), ("c", 0))
    for topic in ("a", "b", "c"):
        await publisher.send(*(encode_publish(topic.encode(), b"", 2, packet_id=n) for n in range(1, 21)))
        await publisher.drained()
        await publisher.send(encode_acks(PUBREL, list(range(1, 21))))
        await publisher.drained()
    got = await client.messages()
    assert sum(message.qos > 0 for message in got) == 10
    assert sum(message.qos == 0 for message in got) == 20  # These wait for no acknowledgement.


async def test_messages_beyond_the_window_are_sent_in_order_as_it_moves(start_broker: StartBroker) -> None:
    broker = await start_broker(inflight_max=3)
    client, publisher = await broker.connect("client"), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    await flood(publisher, 200, 10)
    assert await numbers(client, 200) == list(range(200))
    await flood(publisher, 1, 10, first=200)
    assert await numbers(client, 1) == [200]
    assert broker.node.gateway.counters.deliveries_acked >= 200
    assert (await client.drained(), broker.connection("client").session.inflight.slots) == ([], {})


async def test_acknowledgements_out_of_order_make_room_too(start_broker: StartBroker) -> None:
    broker = await start_broker(inflight_max=4)
    client, publisher = await broker.connect("client"), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    await flood(publisher, 8, 1)
    first = [found[3] for found in await client.drained()]
    assert first == [1, 2, 3, 4]
    await client.send(encode_acks(PUBACK, [4, 2]))
    assert [found[3] for found in await client.drained()] == [5, 6]


# --- QoS 2 out ----------------------------------------------------------------------------------------------------------


async def test_a_qos_2_delivery_goes_through_its_four_packets(broker: Broker) -> None:
    client, publisher = await broker.connect("client"), await broker.connect("publisher")
    await client.subscribe(("a", 2))
    await publisher.publish("a", b"x", 2)
    kind, flags, topic, packet_id, body = await client.receive()
    assert (kind, flags, topic, body) == (PUBLISH, 2 << 1, b"a", b"x")
    session = broker.connection("client").session
    assert [slot.qos for slot in session.inflight.slots.values() if slot] == [2]
    await client.send(encode_acks(PUBREC, [packet_id, packet_id]))  # The second one is a repetition.
    assert [await client.receive() for _ in range(2)] == [(PUBREL, packet_id)] * 2
    assert session.inflight.slots == {packet_id: None}
    await client.send(encode_acks(PUBCOMP, [packet_id]))
    assert await client.drained() == []
    assert session.inflight.slots == {}
    assert broker.node.gateway.counters.deliveries_acked == 1


async def test_a_qos_2_delivery_takes_its_place_in_the_window_until_it_is_complete(start_broker: StartBroker) -> None:
    broker = await start_broker(inflight_max=1)
    client, publisher = await broker.connect("client"), await broker.connect("publisher")
    await client.subscribe(("a", 2))
    for body in (b"1", b"2"):
        await publisher.publish("a", body, 2)
    (first,) = await client.drained()
    await client.send(encode_acks(PUBREC, [first[3]]))
    assert await client.drained() == [(PUBREL, first[3])]
    await client.send(encode_acks(PUBCOMP, [first[3]]))
    assert [found[4] for found in await client.drained()] == [b"2"]


# --- the end of one that lags ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("end", ["reset", "disconnect", "unsubscribe", "takeover"])
async def test_a_connection_that_ends_while_it_lags_leaves_nothing_behind(start_broker: StartBroker, end: str) -> None:
    broker = await start_broker(send_buffer_bytes=16 * KIB, inflight_max=100)
    slow, publisher = await broker.connect("slow"), await broker.connect("publisher")
    await flood(publisher, 5, 10, topic=b"retained")
    await slow.subscribe(("a", 0), ("a/#", 1), ("+", 2))
    broker.limit_send_buffer("slow")
    slow.stop_reading()
    await flood(publisher, 100, 16 * KIB)
    connection = broker.connection("slow")
    assert len(connection.outbox.lagging) == 3
    if end == "reset":
        slow.reset()
    elif end == "disconnect":
        slow.writer.write(b"\xe0\0")
    elif end == "takeover":
        await (await broker.connect("slow")).drained()
    else:
        slow.writer.write(b"\xa2\x0d\0\1\0\1a\0\3a/#\0\1+")
    await until(lambda: not connection.subscriptions)
    assert not connection.outbox.lagging
    await flood(publisher, 5, 10)
    held = broker.held_resources()
    assert (held["fanouts"], held["watchers"], held["queues"]) == (0, 0, 0)
    if end != "unsubscribe":
        await until(lambda: connection not in broker.node.gateway.connections)


@pytest.mark.slow
async def test_a_closed_connection_that_does_not_read_is_aborted(start_broker: StartBroker) -> None:
    broker = await start_broker(send_buffer_bytes=16 * KIB)
    slow, publisher = await broker.connect("slow"), await broker.connect("publisher")
    await slow.subscribe(("a", 0))
    broker.limit_send_buffer("slow")
    slow.stop_reading()
    await flood(publisher, 50, 16 * KIB)
    slow.writer.write_eof()  # The client hangs up, but its end of the socket stays open and full.
    await until(lambda: "slow" not in broker.node.gateway.clients)
    assert broker.held_resources()["connections"] == 1


async def test_clients_that_come_and_go_while_messages_flow_leave_nothing_behind(broker: Broker) -> None:
    publisher, steady = await broker.connect("publisher"), await broker.connect("steady")
    await steady.subscribe(("a/#", 1))

    async def come_and_go(name: str) -> None:
        for n in range(20):
            client = await broker.connect(name)
            await client.subscribe(("a/#", n % 3), (f"a/{n}", 0), ("+/b", 1))
            client.reset() if n % 2 else await client.send(b"\xe0\0")

    async def publish() -> None:
        for n in range(300):
            await publisher.send(encode_publish(b"a/b", b"%08d" % n))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for n in range(5):
            group.create_task(come_and_go(f"guest-{n}"))
        group.create_task(publish())
    assert await numbers(steady, 300) == list(range(300))
    await until(lambda: len(broker.node.gateway.connections) == 2)
    await steady.unsubscribe("a/#")
    for client in (publisher, steady):
        client.reset()
    await until(lambda: not broker.node.gateway.connections)
    assert set(broker.held_resources().values()) == {0}
