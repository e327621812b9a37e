"""Connections of MQTT 3.1.1: CONNECT, takeover, keep alive, bad packets, and packets that are split over reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from penstock.gateway.connection.backpressure import PauseReason
from penstock.gateway.connection.open_connections import CONNECTIONS_PER_CLIENT_MAX
from penstock.gateway.connection.outbox import ANSWERS_BYTES_MAX
from penstock.gateway.protocol.encode import PINGRESP_BYTES, encode_acks, encode_publish
from penstock.gateway.protocol.errors import ConnectRefused, UnsupportedVersion
from penstock.gateway.protocol.packets import CONNACK, PINGRESP, PUBACK, PUBCOMP, PUBREC, PUBREL, SUBACK, UNSUBACK
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode
from penstock.gateway.transport import overtime
from penstock.store.options import KIB, MIB
from tests.clock import ManualClock
from tests.gateway.brokers import StartBroker
from tests.gateway.moving_time import pass_time
from tests.gateway.packet_cases import INVALID, connect, field, packet, subscribe, unsubscribe
from tests.gateway.wire import BYE, CLEAN, PING, WILL, WILL_RETAIN, Broker, Message
from tests.waiting import until

ACCEPTED = (CONNACK, 0, b"\0\0")
PONG = (PINGRESP, 0, b"")


@pytest.fixture
async def others(broker: Broker) -> AsyncIterator[None]:
    """Check at the end of the test that the node still serves another client."""
    other = await broker.connect("other")
    yield
    assert await other.drained() == []


# --- CONNECT ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("others")
async def test_a_first_packet_that_is_no_connect_closes_the_connection(broker: Broker) -> None:
    firsts = (
        PING,
        BYE,
        packet(0x30, field(b"a") + b"x"),
        packet(0x32, field(b"a") + b"\0\1x"),
        packet(0x32, field(b"a") + b"\0\1x") * 3,
        subscribe(1, (b"#", 0)),
        unsubscribe(1, b"#"),
        encode_acks(PUBACK, [1]),
        encode_acks(PUBREL, [1]),
    )
    for number, first in enumerate(firsts, 1):
        client = await broker.dial()
        await client.send(first, connect(CLEAN, b"late"))
        assert await client.ended() == [], first
        assert broker.closed(ReasonCode.PROTOCOL_ERROR) == number, first
    assert broker.stored() == []


async def test_a_second_connect_closes_the_connection_and_the_will_is_published(broker: Broker) -> None:
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("will", 0))
    client = await broker.connect("pump", b"will", b"gone", flags=CLEAN | WILL)
    await client.send(connect(CLEAN, b"pump"))
    assert await client.ended() == []
    assert await watcher.message() == Message("will", b"gone")
    assert broker.closed(ReasonCode.PROTOCOL_ERROR) == 1


async def test_a_connection_without_a_connect_in_time_is_closed(start_broker: StartBroker) -> None:
    broker = await start_broker(clock=ManualClock(), connect_timeout_ms=5000)
    silent, half = await broker.dial(), await broker.dial()
    packet = connect(CLEAN, b"half")[:-1]
    await half.send(packet)
    await until(lambda: len(broker.node.gateway.connections) == 2 and broker.listener("mqtt").bytes_in == len(packet))
    pass_time(broker.node.gateway, 4.9)
    assert len(broker.node.gateway.connections) == 2
    pass_time(broker.node.gateway, 1.2)  # the limit, and up to a second until the node notices
    assert await silent.ended() == []
    assert await half.ended() == []
    assert broker.closed(ReasonCode.KEEP_ALIVE_TIMEOUT) == 2


async def test_the_connect_timeout_does_not_apply_after_the_connect(broker: Broker) -> None:
    client = await broker.connect("pump")
    pass_time(broker.node.gateway, 3600)
    assert await client.drained() == []


@pytest.mark.usefixtures("others")
async def test_a_refused_connect_is_answered_with_its_reason_and_closed(broker: Broker) -> None:
    for case in INVALID:
        if not issubclass(case.error, ConnectRefused):
            continue
        client = await broker.dial()
        await client.send(case.data, PING)
        answers = await client.ended()
        if "6.0" in case.name:  # the answer has the format of 5.0
            ((kind, _, body),) = answers
            assert (kind, body[:2]) == (CONNACK, bytes((0, ReasonCode.UNSUPPORTED_PROTOCOL_VERSION))), case.name
        elif issubclass(case.error, UnsupportedVersion):
            assert answers == [(CONNACK, 0, bytes((0, ConnectCode.UNACCEPTABLE_PROTOCOL_VERSION)))], case.name
        else:
            assert answers == [(CONNACK, 0, bytes((0, ConnectCode.IDENTIFIER_REJECTED)))], case.name
        assert broker.node.gateway.clients.keys() == {"other"}, case.name


async def test_each_client_without_an_id_is_assigned_its_own(broker: Broker) -> None:
    one, two = await broker.connect(""), await broker.connect("")
    assert await one.drained() == await two.drained() == []
    assert len(broker.node.gateway.clients) == 2


async def test_packets_may_follow_the_connect_at_once(broker: Broker) -> None:
    client = await broker.dial()
    await client.send(connect(CLEAN, b"pump"), subscribe(1, (b"a", 0)), packet(0x32, field(b"a") + b"\0\7x"), PING)
    answers = [await client.receive() for _ in range(5)]
    assert answers[0] == ACCEPTED
    assert answers[1] == (SUBACK, 0, b"\0\1\0")
    # A turn that has taken long puts the PINGREQ off, so its answer may come after the delivery.
    assert sorted(answers[2:]) == [(3, 0, b"a", 0, b"x"), (PUBACK, 7), PONG]


async def test_one_client_more_than_the_limit_is_refused(start_broker: StartBroker) -> None:
    broker = await start_broker(connections_max=2)
    first, second = await broker.connect("first"), await broker.connect("second")
    refused = await broker.connect("third", accepted=False)
    assert await refused.ended() == [(CONNACK, 0, bytes((0, ConnectCode.SERVER_UNAVAILABLE)))]
    assert broker.closed(ReasonCode.QUOTA_EXCEEDED) == 1

    again = await broker.connect("first")  # a takeover needs no room
    assert await first.ended() == []
    second.reset()
    await until(lambda: len(broker.node.gateway.connections) == 1)
    await broker.connect("third")
    assert await again.drained() == []


async def test_sockets_that_send_no_connect_are_limited_too(start_broker: StartBroker) -> None:
    broker = await start_broker(connections_max=2)
    silent = [await broker.dial() for _ in range(2 * CONNECTIONS_PER_CLIENT_MAX)]
    await until(lambda: len(broker.node.gateway.connections) == len(silent))
    assert await (await broker.dial()).ended() == []
    assert broker.closed(ReasonCode.QUOTA_EXCEEDED) == 1
    await silent[0].send(connect(CLEAN, b"pump"))
    assert await silent[0].receive() == ACCEPTED


# --- takeover ---------------------------------------------------------------------------------------------------------


async def test_a_second_connection_of_a_client_id_takes_over(broker: Broker) -> None:
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("will", 1))
    old = await broker.connect("pump", b"will", b"gone", flags=CLEAN | WILL)
    await old.subscribe(("a/+", 1))
    new = await broker.connect("pump")
    assert await old.ended() == []
    assert await watcher.message() == Message("will", b"gone")
    assert broker.closed(ReasonCode.SESSION_TAKEN_OVER) == 1
    assert list(broker.node.gateway.clients) == ["watcher", "pump"]
    await watcher.publish("a/b", b"for the old subscription")
    assert await new.messages() == []  # a clean session begins without subscriptions [MQTT-3.1.2-6]


async def test_a_client_that_was_taken_over_does_not_end_its_successor(broker: Broker) -> None:
    clients = [await broker.connect("pump") for _ in range(5)]
    for old in clients[:-1]:
        await old.ended()
    assert await clients[-1].drained() == []
    assert len(broker.node.gateway.connections) == len(broker.node.gateway.clients) == 1


# --- PINGREQ, DISCONNECT and the end ----------------------------------------------------------------------------------


async def test_each_pingreq_is_answered(broker: Broker) -> None:
    client = await broker.connect("pump")
    await client.send(PING * 3)
    assert [await client.receive() for _ in range(3)] == [PONG] * 3


async def test_packets_after_a_disconnect_are_ignored(broker: Broker) -> None:
    client = await broker.connect("pump", b"will", b"gone", flags=CLEAN | WILL)
    await client.send(encode_publish(b"a", b"before"), BYE, encode_publish(b"a", b"behind"), PING, b"\xff\xff")
    assert await client.ended() == []
    assert broker.stored() == [Message("a", b"before")]
    assert broker.node.gateway.counters.closed_by_reason == {}


async def test_messages_published_before_a_disconnect_are_still_acknowledged(broker: Broker) -> None:
    client = await broker.connect("pump")
    await client.send(encode_publish(b"a", b"x", 1, packet_id=9), encode_publish(b"a", b"x", 2, packet_id=8), BYE)
    assert await client.ended() == [(PUBACK, 9), (PUBREC, 8)]


async def test_a_client_that_closes_its_sending_side_still_gets_its_acks(broker: Broker) -> None:
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("will", 0))
    client = await broker.connect("pump", b"will", b"gone", flags=CLEAN | WILL)
    await client.send(encode_publish(b"a", b"x", 1, packet_id=9))
    client.writer.write_eof()
    assert await client.ended() == [(PUBACK, 9)]
    assert await watcher.message() == Message("will", b"gone")


async def test_stopping_the_node_publishes_wills_and_closes_connections(broker: Broker) -> None:
    client = await broker.connect("pump", b"will", b"gone", flags=CLEAN | WILL | WILL_RETAIN)
    await broker.node.gateway.stop()
    assert await client.ended() == []
    assert broker.stored() == [Message("will", b"gone", retain=True)]


async def test_connections_that_ended_hold_no_resources(broker: Broker) -> None:
    ends = {"disconnect": BYE, "protocol error": b"\xf0\0", "reset": b""}
    for name, last in ends.items():
        client = await broker.connect(name, b"will", b"gone", flags=CLEAN | WILL, keep_alive_s=65_535)
        await client.subscribe(("a/#", 1), ("+/b", 2), ("a/b", 0))
        if last:
            await client.send(last)
            await client.ended()
        client.reset()
    await broker.dial()
    broker.clients[-1].reset()
    await until(lambda: not broker.node.gateway.connections)
    assert set(broker.held_resources().values()) == {0}


# --- keep alive -------------------------------------------------------------------------------------------------------


async def test_a_client_that_is_silent_for_longer_than_its_keep_alive_is_closed(broker: Broker) -> None:
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("will", 0))
    client = await broker.connect("pump", b"will", b"gone", flags=CLEAN | WILL, keep_alive_s=10)
    pass_time(broker.node.gateway, 14.9)
    assert await client.drained() == []
    pass_time(broker.node.gateway, 14.9)  # 29.8 s after the CONNECT, but the client pinged in between
    assert not broker.connection("pump")._is_closed
    pass_time(broker.node.gateway, 1.2)  # 16.1 s after the ping: 15 s, and up to one until the node notices
    assert await client.ended() == []
    assert broker.closed(ReasonCode.KEEP_ALIVE_TIMEOUT) == 1
    assert await watcher.message() == Message("will", b"gone")


async def test_a_keep_alive_of_0_allows_any_silence(broker: Broker) -> None:
    client = await broker.connect("pump", keep_alive_s=0)
    pass_time(broker.node.gateway, 100_000)
    assert await client.drained() == []


async def test_the_heartbeat_finds_a_silent_client_without_other_work(broker: Broker) -> None:
    client = await broker.connect("pump", keep_alive_s=60)
    broker.clock.advance(100_000)  # the next heartbeat notices the silence
    assert await client.ended() == []
    assert broker.closed(ReasonCode.KEEP_ALIVE_TIMEOUT) == 1


async def test_each_connection_is_on_the_wheel_only_once(broker: Broker) -> None:
    client = await broker.connect("pump", keep_alive_s=60)
    for _ in range(50):
        pass_time(broker.node.gateway, 7)
        await client.drained()
        assert broker.held_resources()["watched"] == 1


# --- packets that are refused -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("others")
async def test_a_bad_packet_closes_the_connection_and_is_counted(broker: Broker) -> None:
    counts: Counter[ReasonCode] = Counter()
    for case in INVALID:
        if issubclass(case.error, ConnectRefused):
            continue
        is_connect = case.data[:1] == b"\x10"
        client = await (broker.dial() if is_connect else broker.connect("bad"))
        await client.send(case.data, PING)
        assert await client.ended() == [], case.name
        counts[case.reason] += 1
        assert broker.node.gateway.counters.closed_by_reason == counts, case.name
        assert broker.stored() == [], case.name


@pytest.mark.usefixtures("others")
async def test_an_invalid_topic_closes_the_connection_without_an_ack(broker: Broker) -> None:
    topics = {
        "wildcard": b"a/+",
        "only a wildcard": b"#",
        "empty": b"",
        "U+0000": b"a\0b",
        "not UTF-8": b"a/\xff",
        "a surrogate": b"\xed\xa0\x80",
        "the node's": b"$SYS/x",
        "too long": b"a" * 4097,
        "too deep": b"/" * 128,
    }
    for number, (what, topic) in enumerate(topics.items(), 1):
        client = await broker.connect("bad")
        await client.send(encode_publish(topic, b"x", 1, packet_id=1))
        assert await client.ended() == [], what
        assert broker.closed(ReasonCode.TOPIC_NAME_INVALID) == number, what
    assert broker.stored() == []


@pytest.mark.usefixtures("others")
async def test_a_packet_over_the_limit_closes_the_connection_as_soon_as_its_size_is_known(broker: Broker) -> None:
    client = await broker.connect("bad")
    await client.send(b"\x30\xff\xff\xff\x7f")  # the header announces 256 MiB
    assert await client.ended() == []
    assert broker.closed(ReasonCode.PACKET_TOO_LARGE) == 1


async def test_a_packet_may_be_as_large_as_the_limit_and_no_larger(start_broker: StartBroker) -> None:
    broker = await start_broker(packet_bytes_max=2 * KIB)
    client = await broker.connect("pump")
    largest = encode_publish(b"a", b"x" * (2 * KIB - 8), 1, packet_id=1)
    assert len(largest) == 2 * KIB
    await client.send(largest)
    assert await client.receive() == (PUBACK, 1)
    await client.send(encode_publish(b"a", b"x" * (2 * KIB - 7), 1, packet_id=1))
    assert await client.ended() == []
    assert broker.closed(ReasonCode.PACKET_TOO_LARGE) == 1


async def test_acks_that_nothing_waits_for_are_tolerated(broker: Broker) -> None:
    client = await broker.connect("pump")
    await client.send(encode_acks(PUBACK, [1]), encode_acks(PUBCOMP, [2]), encode_acks(PUBREC, [3]), encode_acks(PUBREL, [4]))
    assert await client.drained() == [(PUBREL, 3), (PUBCOMP, 4)]
    assert broker.node.gateway.counters.deliveries_acked == 0


# --- packets that are split over reads --------------------------------------------------------------------------------

STREAM = [
    subscribe(1, (b"a/#", 0)),
    encode_publish(b"a/b", b"x" * 10, 1, packet_id=2),
    encode_publish(b"a/b", b"y" * 200, 2, packet_id=3),
    encode_acks(PUBREL, [3]),
    unsubscribe(4, b"a/#"),
    PING,
]
ANSWERS = {(SUBACK, 0, b"\0\1\0"), (PUBACK, 2), (PUBREC, 3), (PUBCOMP, 3), (UNSUBACK, 4), PONG}


@pytest.mark.parametrize("first_connect", [True, False], ids=["with the CONNECT", "without"])
async def test_a_stream_may_be_cut_at_any_byte(broker: Broker, first_connect: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overtime, "TURN_S", 60.0)  # Else a machine that is busy puts off the UNSUBSCRIBE.
    head = connect(CLEAN, b"cut") if first_connect else b""
    stream = head + b"".join(STREAM)
    # The bytes of a body are alike, so the test cuts only every seventh of them.
    cuts = [cut for cut in range(1, len(stream)) if cut % 7 == 0 or stream[cut - 2 : cut + 2] not in (b"xxxx", b"yyyy")]
    for cut in cuts:
        # The test feeds the server's end of a real connection, because the kernel decides how a socket splits a stream.
        known = set(broker.node.gateway.connections)
        client = await (broker.dial() if first_connect else broker.connect("cut"))
        await until(lambda known=known: bool(set(broker.node.gateway.connections) - known))  # type: ignore[misc]
        (connection,) = set(broker.node.gateway.connections) - known
        connection.data_received(stream[:cut])
        connection.data_received(stream[cut:])
        answers = {await client.receive() for _ in range(len(ANSWERS) + first_connect)}
        assert answers == (ANSWERS | {ACCEPTED} if first_connect else ANSWERS), cut
        client.reset()
    assert len(broker.stored()) == 2 * len(cuts)


async def test_a_stream_may_come_byte_by_byte(broker: Broker) -> None:
    client = await broker.connect("slow")
    for byte in b"".join(STREAM) * 3:
        broker.feed("slow", bytes((byte,)))
    assert {await client.receive() for _ in range(3 * len(ANSWERS))} == ANSWERS
    assert len(broker.stored()) == 6


async def test_a_packet_of_a_mebibyte_may_come_in_many_reads(broker: Broker) -> None:
    body = bytes(range(256)) * 4096
    large = encode_publish(b"a", body[:-9], 1, packet_id=1)
    assert len(large) == MIB
    client = await broker.connect("pump")
    stream = PING + large + PING + large[:-1]
    sizes = (1000, 65_536, 262_144, MIB)
    for piece_bytes in sizes:
        for at in range(0, len(stream), piece_bytes):
            broker.feed("pump", stream[at : at + piece_bytes])
        assert {await client.receive() for _ in range(3)} == {PONG, (PUBACK, 1)}, piece_bytes
        broker.feed("pump", large[-1:] + PING)
        assert {await client.receive() for _ in range(2)} == {PONG, (PUBACK, 1)}, piece_bytes
    assert broker.stored() == [Message("a", body[:-9], 1)] * 2 * len(sizes)


async def test_large_packets_arrive_over_a_socket(broker: Broker) -> None:
    client = await broker.connect("pump")
    body = b"x" * (MIB - 9)
    await client.send(*(encode_publish(b"a", body, 1, packet_id=n) for n in range(1, 6)))
    assert [await client.receive() for _ in range(5)] == [(PUBACK, n) for n in range(1, 6)]


async def test_thousands_of_packets_in_one_write_are_all_answered_in_order(broker: Broker) -> None:
    client = await broker.connect("pump")
    ids = range(1, 3001)
    await client.send(*(encode_publish(b"a/%d" % (n % 7), b"%d" % n, 1, packet_id=n) for n in ids))
    assert [await client.receive() for _ in ids] == [(PUBACK, n) for n in ids]
    assert [int(message.body) for message in broker.stored()] == list(ids)


# --- clients that do not read -----------------------------------------------------------------------------------------


async def test_a_client_that_does_not_read_its_answers_is_no_longer_read(start_broker: StartBroker) -> None:
    broker = await start_broker(send_buffer_bytes=4 * KIB)
    client = await broker.connect("flood")
    broker.limit_send_buffer("flood")
    client.stop_reading()
    connection = broker.connection("flood")
    pings = 0
    while not connection._paused_for & PauseReason.ANSWERS_UNREAD:
        if client.writer.transport.get_write_buffer_size() < 64 * KIB:
            client.writer.write(PING * 10_000)
            pings += 10_000
        await asyncio.sleep(0)
    assert not connection.outbox.writable
    # The server may handle one more read of the socket when the limit is reached.
    assert broker.unsent_bytes("flood") < 4 * KIB + ANSWERS_BYTES_MAX + 256 * KIB

    client.go_on_reading()
    assert await client.reader.readexactly(2 * pings) == PINGRESP_BYTES * pings
    assert await client.drained() == []
