"""Publishing: acknowledgement after the sync, QoS 2, limits, and bad packets that follow good ones."""

from __future__ import annotations

import pytest

from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.packets import PUBACK, PUBCOMP, PUBREC, PUBREL
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.transport.socket_transport import READ_BYTES, SocketTransport
from penstock.store.options import KIB
from penstock.store.record import COPY_BYTES, HEADER_BYTES
from tests.gateway.brokers import StartBroker
from tests.gateway.packet_cases import connect, subscribe
from tests.gateway.wire import BYE, CLEAN, PING, Broker, HeldSync, Message

# --- acknowledged means durable ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("qos", "ack"), [(1, PUBACK), (2, PUBREC)])
async def test_an_ack_waits_for_the_sync_of_its_message(broker: Broker, qos: int, ack: int) -> None:
    client = await broker.connect("pump")
    with HeldSync(broker) as held:
        await client.send(encode_publish(b"a", b"x", qos, packet_id=7))
        assert await client.drained() == []
        assert broker.stored() == [Message("a", b"x", qos)]
        assert broker.node.store.durable_position < broker.node.store.log.written
        held.release()
        assert await client.receive() == (ack, 7)
    assert broker.node.store.durable_position == broker.node.store.log.written


async def test_a_message_that_arrives_during_a_sync_waits_for_the_next_one(broker: Broker) -> None:
    client, other = await broker.connect("pump"), await broker.connect("other")
    with HeldSync(broker) as held:
        await client.send(encode_publish(b"a", b"1", 1, packet_id=1))
        assert await client.drained() == []
        await held.begun()
        syncs = broker.node.store.syncs
        await other.send(encode_publish(b"a", b"2", 1, packet_id=2))
        assert await other.drained() == []
        held.release()
        assert await client.receive() == (PUBACK, 1)
        assert await other.receive() == (PUBACK, 2)
    assert broker.node.store.syncs == syncs + 2


async def test_qos_0_waits_for_no_sync(broker: Broker) -> None:
    client = await broker.connect("pump")
    await client.subscribe(("a", 0))
    with HeldSync(broker):
        await client.publish("a", b"x")
        assert await client.message() == Message("a", b"x")
        await client.send(encode_publish(b"a", b"y", 1, packet_id=1))
        assert await client.messages() == [Message("a", b"y")]  # delivered, but not yet acknowledged to the publisher


async def test_async_flush_acknowledges_after_the_write(start_broker: StartBroker) -> None:
    broker = await start_broker(flush="async")
    client = await broker.connect("pump")
    with HeldSync(broker):
        await client.publish("a", b"x", 1)
        await client.publish("a", b"y", 2)
    assert broker.stored() == [Message("a", b"x", 1), Message("a", b"y", 2)]


async def test_acks_come_in_the_order_of_the_messages(broker: Broker) -> None:
    client = await broker.connect("pump")
    ids = [5, 3, 60_000, 1, 2, 999]
    with HeldSync(broker) as held:
        for packet_id in ids:  # each in a read of its own and, where possible, in a group commit of its own
            await client.send(encode_publish(b"a", b"", 1, packet_id=packet_id))
            assert await client.drained() == []
        held.release()
        assert [await client.receive() for _ in ids] == [(PUBACK, packet_id) for packet_id in ids]  # [MQTT-4.6.0-2]


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_client_that_sends_many_messages_at_once_and_awaits_acks_is_read_in_portions(broker: Broker, qos: int) -> None:
    client = await broker.connect("pump")
    count = 4000
    await client.send(*(encode_publish(b"a", b"%64d" % number, qos, packet_id=number * qos) for number in range(1, count + 1)))
    assert [await client.receive() for _ in range(count * qos)] == [(PUBACK, number) for number in range(1, count * qos + 1)]
    assert await client.drained() == []
    assert [int(message.body) for message in broker.stored()] == list(range(1, count + 1))
    transport = broker.connection("pump")._transport
    assert isinstance(transport, SocketTransport)
    assert (transport.read_bytes < READ_BYTES) == (qos == 1)
    for size in (10_000, 10_001, 10_002):  # a portion is a number of messages, so large messages allow full reads again
        await client.send(*(encode_publish(b"a", bytes(size), qos, packet_id=number * qos) for number in range(1, 41)))
        assert [await client.receive() for _ in range(40 * qos)] == [(PUBACK, number) for number in range(1, 40 * qos + 1)]
        assert await client.drained() == []
    assert transport.read_bytes == READ_BYTES


# --- QoS 2 ------------------------------------------------------------------------------------------------------------


async def test_a_qos_2_message_that_is_repeated_is_stored_once(broker: Broker) -> None:
    subscriber, client = await broker.connect("subscriber"), await broker.connect("pump")
    await subscriber.subscribe(("a", 0))
    first = encode_publish(b"a", b"x", 2, packet_id=7)
    again = encode_publish(b"a", b"x", 2, packet_id=7, dup=True)
    await client.send(first, again)
    assert [await client.receive() for _ in range(2)] == [(PUBREC, 7)] * 2
    await client.send(again)
    assert await client.receive() == (PUBREC, 7)
    await client.send(encode_acks(PUBREL, [7]))
    assert await client.receive() == (PUBCOMP, 7)
    assert broker.stored() == [Message("a", b"x", 2)]
    assert await subscriber.messages() == [Message("a", b"x")]


async def test_a_repeated_message_is_not_acknowledged_before_the_original(broker: Broker) -> None:
    client = await broker.connect("pump")
    with HeldSync(broker) as held:
        await client.send(encode_publish(b"a", b"x", 2, packet_id=7))
        assert await client.drained() == []
        await client.send(encode_publish(b"a", b"x", 2, packet_id=7, dup=True))
        assert await client.drained() == []
        held.release()
        assert [await client.receive() for _ in range(2)] == [(PUBREC, 7)] * 2


async def test_a_released_packet_id_names_a_new_message(broker: Broker) -> None:
    client = await broker.connect("pump")
    for body in (b"1", b"2", b"2"):  # only the PUBREL in between makes the third one a new message
        await client.publish("a", body, 2, packet_id=7)
    message = encode_publish(b"a", b"3", 2, packet_id=7)
    await client.send(message, encode_acks(PUBREL, [7]), message, encode_acks(PUBREL, [7]))
    assert sorted([await client.receive() for _ in range(4)]) == [(PUBREC, 7)] * 2 + [(PUBCOMP, 7)] * 2
    assert [message.body for message in broker.stored()] == [b"1", b"2", b"2", b"3", b"3"]
    assert broker.connection("pump").session.received == set()


@pytest.mark.nightly
async def test_all_packet_ids_may_be_unreleased(broker: Broker) -> None:
    client = await broker.connect("pump")
    ids = range(1, 65_536)
    await client.send(*(encode_publish(b"a", b"", 2, packet_id=n) for n in ids))
    assert [await client.receive() for _ in ids] == [(PUBREC, n) for n in ids]
    await client.send(encode_acks(PUBREL, list(ids)))
    assert [await client.receive() for _ in ids] == [(PUBCOMP, n) for n in ids]
    assert len(broker.stored()) == 65_535


async def test_a_pubrel_with_an_unknown_packet_id_is_answered(broker: Broker) -> None:
    client = await broker.connect("pump")
    await client.send(encode_acks(PUBREL, [7, 7]))
    assert [await client.receive() for _ in range(2)] == [(PUBCOMP, 7)] * 2


async def test_each_client_has_packet_ids_of_its_own_when_it_publishes(broker: Broker) -> None:
    one, two = await broker.connect("one"), await broker.connect("two")
    for client in (one, two):
        await client.send(encode_publish(b"a", b"x", 2, packet_id=7))
        assert await client.receive() == (PUBREC, 7)
    assert len(broker.stored()) == 2


# --- limits and bad packets -------------------------------------------------------------------------------------------


async def test_a_record_over_the_limit_closes_the_connection_after_earlier_messages_are_acknowledged(
    start_broker: StartBroker,
) -> None:
    broker = await start_broker(segment_bytes=64 * KIB)
    client, other = await broker.connect("pump"), await broker.connect("other")
    await client.send(
        encode_publish(b"a", b"before", 1, packet_id=1),
        encode_publish(b"a", b"x" * 64 * KIB, 1, packet_id=2),
        encode_publish(b"a", b"behind", 1, packet_id=3),
    )
    assert await client.ended() == [(PUBACK, 1)]
    assert broker.closed(ReasonCode.QUOTA_EXCEEDED) == 1
    await other.publish("a", b"other", 2)
    assert [message.body for message in broker.stored()] == [b"before", b"other"]


async def test_a_message_may_fill_a_segment_and_roll_the_log(start_broker: StartBroker) -> None:
    broker = await start_broker(segment_bytes=64 * KIB)
    client = await broker.connect("pump")
    await client.subscribe(("a", 0))
    largest = 64 * KIB - COPY_BYTES - HEADER_BYTES - len("a")
    for _ in range(3):
        await client.publish("a", b"x" * largest, 1)
    assert [len((await client.message()).body) for _ in range(3)] == [largest] * 3


async def test_a_new_first_level_is_refused_at_the_limit_of_queues(start_broker: StartBroker) -> None:
    broker = await start_broker(queues_max=2)
    client = await broker.connect("pump")
    await client.publish("a", b"1", 1)
    await client.publish("b", b"2", 1)
    await client.send(encode_publish(b"c", b"3", 1, packet_id=1))
    assert await client.ended() == []
    assert broker.closed(ReasonCode.QUOTA_EXCEEDED) == 1
    again = await broker.connect("pump")
    await again.publish("a/new/topic", b"4", 1)
    assert [message.body for message in broker.stored()] == [b"1", b"2", b"4"]


@pytest.mark.parametrize(
    "bad",
    [b"\x36\4\0\1a\0", b"\x30\xff\xff\xff\xff\1", encode_publish(b"a/#", b"x"), connect(CLEAN, b"a"), subscribe(0, (b"a", 0))],
    ids=["malformed", "too large", "wildcard", "second CONNECT", "packet id 0"],
)
async def test_messages_before_a_bad_packet_in_one_read_are_stored_and_acknowledged(broker: Broker, bad: bytes) -> None:
    subscriber = await broker.connect("subscriber")
    await subscriber.subscribe(("a", 1))
    good = [encode_publish(b"a", b"%d" % n, 1 + n % 2, packet_id=n) for n in range(1, 5)]
    for is_held in (False, True):
        client = await broker.connect("pump")
        with HeldSync(broker) as held:
            if not is_held:
                held.release()
            await client.send(*good, bad, encode_publish(b"a", b"behind", 1, packet_id=9), PING)
            assert [message.body for message in [await subscriber.message() for _ in range(4)]] == [b"1", b"2", b"3", b"4"]
            held.release()
            assert sorted(await client.ended()) == [(PUBACK, 2), (PUBACK, 4), (PUBREC, 1), (PUBREC, 3)], is_held
    assert [message.body for message in broker.stored()] == [b"1", b"2", b"3", b"4"] * 2


async def test_a_client_that_leaves_before_its_ack_does_not_disturb_others(broker: Broker) -> None:
    client, other = await broker.connect("pump"), await broker.connect("other")
    with HeldSync(broker) as held:
        await client.send(encode_publish(b"a", b"x", 1, packet_id=1))
        assert await client.drained() == []
        client.reset()
        await other.send(encode_publish(b"a", b"y", 1, packet_id=2), BYE)
        held.release()
        assert await other.ended() == [(PUBACK, 2)]
    assert [message.body for message in broker.stored()] == [b"x", b"y"]


async def test_a_close_waits_for_a_sync_no_longer_than_its_limit(broker: Broker) -> None:
    client = await broker.connect("pump")
    with HeldSync(broker):
        await client.send(encode_publish(b"a", b"x", 1, packet_id=1), BYE)
        assert await client.ended() == []
    assert broker.stored() == [Message("a", b"x", 1)]


async def test_acknowledged_messages_survive_a_restart(broker: Broker) -> None:
    client = await broker.connect("pump")
    for n in range(20):
        await client.publish(f"plant/{n}", b"x" * n, n % 3)
    before = broker.stored()
    await broker.restart()
    assert broker.stored() == before
    assert len(before) == 20


async def test_publishes_are_counted(broker: Broker) -> None:
    client = await broker.connect("pump")
    await client.subscribe(("a/#", 1), ("a/b", 0))
    await client.send(*(encode_publish(b"a/b", b"", n % 3, packet_id=n if n % 3 else 0) for n in range(1, 10)))
    for _ in range(18):
        while (await client.receive())[0] != 3:
            pass
    counters = broker.node.gateway.counters
    assert (counters.publishes_in, counters.publishes_out) == (9, 18)
