"""Reads that hold only plain PUBLISHes: the node stores those of one turn together, yet treats each as if it came alone."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Sequence

import pytest

from penstock.gateway import gateway as gateway_module
from penstock.gateway.connection import connection, publish_fast_path
from penstock.gateway.connection.connection import Connection
from penstock.gateway.connection.publish_fast_path import PublishFastPath
from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.fixed_header import Side
from penstock.gateway.protocol.packets import CONNACK, PUBACK, PUBREC
from penstock.gateway.protocol.plain import PlainPublishes, cut_plain
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.transport.socket_transport import SocketTransport
from penstock.store.options import GIB, KIB
from tests.gateway.brokers import StartBroker
from tests.gateway.disk_space import TOTAL, free
from tests.gateway.packet_cases import connect, subscribe
from tests.gateway.wire import CLEAN, Broker, Client, HeldSync, Message
from tests.waiting import until


class Bare:
    """A client that writes to its socket directly, so the data of several clients arrives before the node's next turn."""

    def __init__(self, end: socket.socket) -> None:
        self.send = end.send
        self.end = end
        self.client: Client

    @classmethod
    async def connect(cls, broker: Broker, client_id: str) -> Bare:
        bare = await cls.dial(broker)
        bare.send(connect(CLEAN, client_id.encode()))
        assert (await bare.client.receive())[0] == CONNACK
        return bare

    @classmethod
    async def dial(cls, broker: Broker) -> Bare:
        address = broker.listener("mqtt").address
        bare = cls(socket.create_connection((address.host, address.port)))
        bare.end.setblocking(False)
        bare.client = Client(*await asyncio.open_connection(sock=bare.end))
        broker.clients.append(bare.client)
        return bare


@pytest.fixture
async def five(broker: Broker) -> list[Bare]:
    """Five clients that have each published to a topic, so the node knows these topics."""
    clients = [await Bare.connect(broker, f"c{number}") for number in range(5)]
    for number, each in enumerate(clients):
        each.send(encode_publish(b"plant/%d" % number, b"known"))
        await each.client.drained()
    return clients


async def test_publishes_of_one_turn_share_a_sync_and_each_gets_an_ack_with_its_packet_id(
    broker: Broker, five: list[Bare]
) -> None:
    store, counters, traffic = broker.node.store, broker.node.gateway.counters, broker.node.gateway.traffic
    syncs, before = store.syncs, (counters.publishes_in, counters.packets_in, traffic.packets_out[PUBACK])
    for number, each in enumerate(five):
        each.send(encode_publish(b"plant/%d" % number, b"%d" % number * 60 * number, 1, packet_id=1000 + number))
    assert [await each.client.receive() for each in five] == [(PUBACK, 1000 + number) for number in range(5)]
    expected = [Message(f"plant/{number}", b"%d" % number * 60 * number, 1) for number in range(5)]
    assert sorted(broker.stored()[5:]) == expected
    assert store.syncs == syncs + 1
    assert (counters.publishes_in, counters.packets_in, traffic.packets_out[PUBACK]) == tuple(count + 5 for count in before)


async def test_no_publish_is_acknowledged_before_it_is_durable(broker: Broker, five: list[Bare]) -> None:
    with HeldSync(broker) as held:
        for number, each in enumerate(five):
            each.send(encode_publish(b"plant/%d" % number, b"", 1, packet_id=1))
        assert [await each.client.drained() for each in five] == [[]] * 5
        assert broker.node.store.durable_position < broker.node.store.log.written
        held.release()
        assert [await each.client.receive() for each in five] == [(PUBACK, 1)] * 5


async def test_a_subscriber_gets_the_messages_of_a_turn_in_the_order_of_arrival(broker: Broker, five: list[Bare]) -> None:
    subscriber = await broker.connect("subscriber")
    await subscriber.subscribe(("plant/#", 1))
    for count in range(3):
        for number in (3, 1, 4, 0, 2):
            five[number].send(encode_publish(b"plant/%d" % number, b"%d" % count, count % 2, packet_id=count % 2))
        for number in (3, 1, 4, 0, 2):
            assert await subscriber.message() == Message(f"plant/{number}", b"%d" % count, count % 2)


async def test_a_subscription_made_in_the_same_turn_gets_the_messages_stored_after_it(broker: Broker, five: list[Bare]) -> None:
    five[0].send(encode_publish(b"plant/0", b"x", 1, packet_id=1))
    five[1].send(subscribe(9, (b"plant/+", 1), (b"plant/0", 0)))
    five[2].send(encode_publish(b"plant/2", b"y", 1, packet_id=2))
    assert await five[0].client.receive() == (PUBACK, 1)
    assert await five[2].client.receive() == (PUBACK, 2)
    found = [each for each in await five[1].client.messages() if each.body == b"y"]
    assert found == [Message("plant/2", b"y", 1)]


async def test_a_client_that_is_taken_over_in_the_same_turn_still_gets_its_ack(broker: Broker, five: list[Bare]) -> None:
    successor = await Bare.dial(broker)
    await until(lambda: len(broker.node.gateway.connections) == len(five) + 1)
    five[0].send(encode_publish(b"plant/0", b"last", 1, packet_id=7))
    successor.send(connect(CLEAN, b"c0"))
    assert await five[0].client.ended() == [(PUBACK, 7)]
    assert (await successor.client.receive())[0] == CONNACK
    assert broker.stored()[-1] == Message("plant/0", b"last", 1)


async def test_a_client_that_leaves_before_its_ack_does_not_disturb_others(broker: Broker, five: list[Bare]) -> None:
    with HeldSync(broker) as held:
        for number, each in enumerate(five):
            each.send(encode_publish(b"plant/%d" % number, b"", 1, packet_id=1))
        await five[4].client.drained()
        five[2].client.reset()
        await five[4].client.drained()
        held.release()
        assert [await each.client.receive() for each in (*five[:2], *five[3:])] == [(PUBACK, 1)] * 4


async def test_on_a_full_disk_a_publish_waits_or_is_dropped_according_to_its_qos(start_broker: StartBroker) -> None:
    broker = await start_broker(reserve_bytes=GIB)
    clients = [await Bare.connect(broker, f"c{number}") for number in range(3)]
    clients[0].send(encode_publish(b"plant/0", b"known"))
    await clients[0].client.drained()
    free(broker, GIB // 2)
    for number, each in enumerate(clients):
        each.send(encode_publish(b"plant/0", b"%d" % number, number > 0, packet_id=number))
    assert [await each.client.drained() for each in clients] == [[]] * 3
    clients[1].send(encode_publish(b"plant/0", b"behind", 1, packet_id=9))
    assert await clients[1].client.drained() == []
    free(broker, TOTAL)
    assert [await clients[1].client.receive() for _ in range(2)] == [(PUBACK, 1), (PUBACK, 9)]
    assert await clients[2].client.receive() == (PUBACK, 2)
    assert sorted(message.body for message in broker.stored()) == [b"1", b"2", b"behind", b"known"]
    assert broker.node.gateway.counters.publishes_dropped == 1
    clients[1].send(encode_publish(b"plant/0", b"after", 1, packet_id=10))
    assert await clients[1].client.receive() == (PUBACK, 10)


async def test_a_publish_waits_behind_earlier_ones_of_its_client_that_still_wait_for_room(start_broker: StartBroker) -> None:
    broker = await start_broker(reserve_bytes=GIB)
    client = await broker.connect("c")
    await client.publish("plant/0", b"known", 1)
    free(broker, GIB // 2)
    await client.send(encode_publish(b"plant/0", b"1", 1, packet_id=1))
    await until(lambda: bool(broker.connection("c").kept_packets.packets))
    broker.node.store.space.on_relief.clear()  # the node does not hear yet that there is room
    free(broker, TOTAL)
    await client.send(encode_publish(b"plant/0", b"2", 1, packet_id=2))
    await until(lambda: len(broker.connection("c").kept_packets.packets) == 2)
    broker.node.gateway._relieved()
    assert [await client.receive() for _ in range(2)] == [(PUBACK, 1), (PUBACK, 2)]
    assert [message.body for message in broker.stored()] == [b"known", b"1", b"2"]


async def test_bytes_in_a_body_that_look_like_a_publish_are_part_of_the_body(broker: Broker, five: list[Bare]) -> None:
    inner = encode_publish(b"plant/1", b"inner", 1, packet_id=5)
    outer = encode_publish(b"plant/0", b"12345678" + inner, 1, packet_id=6)
    cuts = {2, 9, 12, 20, len(outer) - len(inner)}
    for start in cuts:
        five[0].send(outer[:start])
        assert not await five[1].client.drained()  # the node completes a turn of its loop
        five[0].send(outer[start:])
        assert await five[0].client.receive() == (PUBACK, 6)
    assert broker.stored()[5:] == [Message("plant/0", b"12345678" + inner, 1)] * len(cuts)


async def test_publishes_continue_in_the_next_segment_when_one_is_full(start_broker: StartBroker) -> None:
    broker = await start_broker(segment_bytes=64 * KIB)
    clients = [await Bare.connect(broker, f"c{number}") for number in range(5)]
    for packet_id in range(1, 60):
        for number, each in enumerate(clients):
            each.send(encode_publish(b"plant/%d" % number, b"%d" % packet_id * 500, 1, packet_id=packet_id))
        assert [await each.client.receive() for each in clients] == [(PUBACK, packet_id)] * 5
    assert len(broker.node.store.log.segments()) > 2
    for number in range(5):
        bodies = [message.body for message in broker.stored() if message.topic == f"plant/{number}"]
        assert bodies == [b"%d" % packet_id * 500 for packet_id in range(1, 60)]


async def test_exceeding_the_receive_maximum_ends_a_client_of_5_even_if_each_publish_came_alone(
    start_broker: StartBroker,
) -> None:
    broker = await start_broker(inflight_max=3)
    client = await broker.connect_5("c")
    await client.publish("a", b"known")
    with HeldSync(broker) as held:
        for packet_id in range(1, 4):
            await client.send(encode_publish(b"a", b"", 1, packet_id=packet_id, properties=b"\0"))
            assert await client.drained() == []
        await client.send(encode_publish(b"a", b"", 1, packet_id=4, properties=b"\0"))
        await until(lambda: broker.closed(ReasonCode.RECEIVE_MAXIMUM_EXCEEDED) == 1)
        held.release()
        assert await client.disconnected() == (
            ReasonCode.RECEIVE_MAXIMUM_EXCEEDED,
            [(PUBACK, packet_id) for packet_id in range(1, 4)],
        )


async def test_a_system_without_epoll_uses_the_transports_of_the_event_loop(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "HAS_TURNS", False)
    broker = await start_broker()
    client = await broker.connect("c")
    assert not isinstance(broker.connection("c")._transport, SocketTransport)
    await client.subscribe(("plant/#", 1))
    for number in range(1, 4):
        await client.send(encode_publish(b"plant/0", b"%d" % number, 1, packet_id=number))
        assert await client.expect(PUBACK) == (PUBACK, number)
    assert [await client.message() for _ in range(3)] == [Message("plant/0", b"%d" % number, 1) for number in range(1, 4)]


async def test_acknowledged_messages_survive_a_kill(broker: Broker, five: list[Bare]) -> None:
    for number, each in enumerate(five):
        each.send(encode_publish(b"plant/%d" % number, b"kept", 1, packet_id=1))
    assert [await each.client.receive() for each in five] == [(PUBACK, 1)] * 5
    await broker.kill()
    assert sorted(broker.stored())[1::2] == [Message(f"plant/{number}", b"known") for number in range(5)]
    assert sorted(broker.stored())[::2] == [Message(f"plant/{number}", b"kept", 1) for number in range(5)]


@pytest.mark.parametrize("first", [0, 1, 2])
async def test_publishes_keep_their_place_among_the_other_packets_of_a_client(
    broker: Broker, five: list[Bare], first: int
) -> None:
    expected = []
    for step in range(first, first + 12):
        qos = step % 3
        data = encode_publish(b"plant/0", b"%d" % step, qos, packet_id=step + 1 if qos else 0)
        five[0].send(data if step % 4 else data + encode_publish(b"plant/0", b"with %d" % step))
        expected += [b"%d" % step] if step % 4 else [b"%d" % step, b"with %d" % step]
        if qos:
            assert await five[0].client.receive() == ((PUBACK, PUBREC)[qos - 1], step + 1)
        else:
            await five[0].client.drained()
        if qos == 2:
            five[0].send(encode_acks(6, [step + 1]))
            await five[0].client.receive()
    assert [message.body for message in broker.stored()[5:]] == expected


# --- several PUBLISHes in a read --------------------------------------------------------------------------------------


def several(topic: bytes, bodies: Sequence[bytes], qos: int, first: int = 1, properties: bytes = b"") -> bytes:
    """Return PUBLISHes to one topic, with packet ids from `first` on."""
    return b"".join(
        encode_publish(topic, body, qos, packet_id=number if qos else 0, properties=properties)
        for number, body in enumerate(bodies, first)
    )


def numbered(count: int, mark: str = "") -> list[bytes]:
    """Return `count` different bodies of the same length."""
    return [f"{mark}{number:06}".encode() for number in range(count)]


def stored_of(broker: Broker, topic: str) -> list[bytes]:
    """Return the bodies stored under a topic, without that of the fixture."""
    return [message.body for message in broker.stored() if message.topic == topic and message.body != b"known"]


async def until_stored(broker: Broker, count: int) -> None:
    await until(lambda: broker.node.store.messages_stored == count)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Count the reads that the fast path took (True) and those that it left to the general path (False)."""
    seen: Counter[bool] = Counter()
    take = PublishFastPath.take

    def cutting(data: bytes, side: Side, packet_bytes_max: int) -> PlainPublishes | None:
        publishes = cut_plain(data, side, packet_bytes_max)
        seen[False] += publishes is None
        return publishes

    def taking(self: PublishFastPath, publisher: Connection, publishes: PlainPublishes, data: bytes) -> bool:
        is_taken = take(self, publisher, publishes, data)
        seen[is_taken] += 1
        return is_taken

    monkeypatch.setattr(connection, "cut_plain", cutting)
    monkeypatch.setattr(PublishFastPath, "take", taking)
    return seen


@pytest.mark.parametrize("qos", [0, 1])
async def test_runs_of_several_clients_in_one_turn_are_each_stored_in_order_and_acknowledged(
    broker: Broker, five: list[Bare], qos: int, seen: Counter[bool]
) -> None:
    store, counters, count = broker.node.store, broker.node.gateway.counters, sum(range(20, 25))
    syncs, before = store.syncs, (counters.publishes_in, counters.packets_in)
    seen.clear()
    for number, each in enumerate(five):
        each.send(several(b"plant/%d" % number, numbered(20 + number, str(number)), qos, 100 * number + 1))
    await until_stored(broker, 5 + count)
    assert (counters.publishes_in, counters.packets_in) == (before[0] + count, before[1] + count)
    assert seen == {True: 5, False: 0}
    for number, each in enumerate(five):
        expected = [(PUBACK, 100 * number + 1 + at) for at in range(20 + number)] if qos else []
        assert [await each.client.receive() for _ in expected] == expected
        assert await each.client.drained() == []
        assert stored_of(broker, f"plant/{number}") == numbered(20 + number, str(number))
    if qos:
        assert store.syncs == syncs + 1


@pytest.mark.parametrize(("qos", "version"), [(0, 4), (1, 5)])
async def test_a_run_that_is_cut_at_any_byte_is_stored_whole_and_in_order(
    broker: Broker, qos: int, version: int, seen: Counter[bool]
) -> None:
    client = await (broker.connect("c") if version == 4 else broker.connect_5("c"))
    await client.publish("plant/0", b"known", 1)
    bodies = numbered(40)
    data = several(b"plant/0", bodies, qos, properties=b"\0" if version == 5 else b"")
    stride = len(data) // len(bodies)
    expected = [b"known"]
    for cut in (*range(4 * stride, 5 * stride + 1), len(data) - 1):
        seen.clear()
        await client.send(data[:cut])
        await until(lambda: sum(seen.values()) == 1)
        await client.send(data[cut:])
        if qos:
            assert [await client.receive() for _ in bodies] == [(PUBACK, number) for number in range(1, 41)]
        expected += bodies
        await until_stored(broker, len(expected))
        assert [message.body for message in broker.stored()] == expected, cut
        assert seen[False] == 0, cut


@pytest.mark.parametrize("is_at_once", [True, False])
async def test_other_publishes_of_a_client_keep_their_place_between_its_runs(
    broker: Broker, five: list[Bare], is_at_once: bool
) -> None:
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("plant/#", 1))
    others = encode_publish(b"plant/0", b"longer", 1, packet_id=6) + encode_publish(b"plant/1", b"other")
    pieces = [several(b"plant/0", numbered(5), 1), others, several(b"plant/0", numbered(5), 1, 7)]
    for data in [b"".join(pieces)] if is_at_once else pieces:
        five[0].send(data)
    got = [(await watcher.message()).body for _ in range(12)]
    assert got == [*numbered(5), b"longer", b"other", *numbered(5)]
    assert [await five[0].client.receive() for _ in range(11)] == [(PUBACK, number) for number in range(1, 12)]


async def test_on_a_full_disk_runs_wait_whole_and_in_order(start_broker: StartBroker) -> None:
    broker = await start_broker(reserve_bytes=GIB)
    clients = [await Bare.connect(broker, f"c{number}") for number in range(3)]
    clients[0].send(encode_publish(b"plant/0", b"known") + encode_publish(b"plant/1", b"known"))
    await clients[0].client.drained()
    free(broker, GIB // 2)
    clients[0].send(several(b"plant/0", numbered(30), 0))
    clients[1].send(several(b"plant/0", numbered(30), 1))
    clients[2].send(several(b"plant/1", numbered(30), 1))
    assert [await each.client.drained() for each in clients] == [[]] * 3
    free(broker, TOTAL)
    for each in clients[1:]:
        assert [await each.client.receive() for _ in range(30)] == [(PUBACK, number) for number in range(1, 31)]
    assert stored_of(broker, "plant/0") == stored_of(broker, "plant/1") == numbered(30)
    assert broker.node.gateway.counters.publishes_dropped == 30


async def test_a_run_over_the_receive_maximum_ends_a_client_of_5_and_not_one_of_3(start_broker: StartBroker) -> None:
    broker = await start_broker(inflight_max=10)
    old, new = await broker.connect("old"), await broker.connect_5("new")
    for client in (old, new):
        await client.publish("a", b"known")
    for count in (10, 11):
        await old.send(several(b"a", numbered(count), 1))
        assert [await old.receive() for _ in range(count)] == [(PUBACK, number) for number in range(1, count + 1)]
    await new.send(several(b"a", numbered(10), 1, properties=b"\0"))
    assert [await new.receive() for _ in range(10)] == [(PUBACK, number) for number in range(1, 11)]
    await new.send(several(b"a", numbered(11), 1, properties=b"\0"))
    assert await new.disconnected() == (ReasonCode.RECEIVE_MAXIMUM_EXCEEDED, [(PUBACK, number) for number in range(1, 11)])


async def test_a_turn_that_collects_more_than_the_limit_stores_before_its_end(
    broker: Broker, five: list[Bare], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_fast_path, "_COLLECTED_BYTES", 1000)
    for number, each in enumerate(five):
        each.send(several(b"plant/%d" % number, numbered(50), 1))
    for number, each in enumerate(five):
        assert [await each.client.receive() for _ in range(50)] == [(PUBACK, at) for at in range(1, 51)]
        assert stored_of(broker, f"plant/{number}") == numbered(50)


async def test_runs_continue_in_the_next_segment_when_one_is_full(start_broker: StartBroker) -> None:
    broker = await start_broker(segment_bytes=64 * KIB)
    client = await broker.connect("c")
    await client.publish("a", b"known", 1)
    bodies = [b"%06d" % number * 20 for number in range(1200)]
    for start in range(0, 1200, 40):
        await client.send(several(b"a", bodies[start : start + 40], 1))
        assert [await client.receive() for _ in range(40)] == [(PUBACK, number) for number in range(1, 41)]
    assert len(broker.node.store.log.segments()) > 2
    assert stored_of(broker, "a") == bodies
