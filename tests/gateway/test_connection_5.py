"""MQTT 5.0: CONNECT, CONNACK, DISCONNECT and negotiated limits. The docstring of a test names the clauses that it shows."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.packets import CONNACK, PINGRESP, PUBACK, PUBCOMP, PUBREC, PUBREL, SUBACK, UNSUBACK, Packet
from penstock.gateway.protocol.properties import Property, PropertyValues, write_properties
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.protocol.runs import split_runs
from penstock.store.options import KIB, MIB
from tests.gateway.brokers import StartBroker
from tests.gateway.moving_time import pass_time
from tests.gateway.packet_cases import connect, packet
from tests.gateway.packet_cases_5 import INVALID, NONE, connect_5, publish_5, subscribe_5, unsubscribe_5
from tests.gateway.wire import CLEAN, PING, WILL, Broker, HeldSync, Message

# --- CONNACK ----------------------------------------------------------------------------------------------------------


async def test_a_connack_states_the_limits_of_the_server(start_broker: StartBroker) -> None:
    """[MQTT-3.2.2-1], 3.2.2.3: the CONNACK leaves out limits that are the default."""
    broker = await start_broker(inflight_max=10, packet_bytes_max=2 * KIB, topic_alias_max=7)
    client = await broker.connect_5("pump")
    assert client.limits == {
        Property.RECEIVE_MAXIMUM: 10,
        Property.MAXIMUM_PACKET_SIZE: 2 * KIB,
        Property.TOPIC_ALIAS_MAXIMUM: 7,
        Property.SHARED_SUBSCRIPTION_AVAILABLE: 1,
    }
    assert not client.session_present


async def test_a_client_without_an_id_is_told_the_id_that_it_is_assigned(broker: Broker) -> None:
    """[MQTT-3.1.3-6], [MQTT-3.1.3-7]."""
    client = await broker.connect_5("")
    client_id = client.limits[Property.ASSIGNED_CLIENT_ID]
    assert list(broker.node.gateway.clients) == [client_id]


async def test_a_keep_alive_that_is_too_long_is_replaced(start_broker: StartBroker) -> None:
    """[MQTT-3.1.2-21]."""
    broker = await start_broker(keep_alive_s_max=30)
    for wished_s, told_s in ((0, 30), (31, 30), (65_535, 30), (30, None), (5, None)):
        client = await broker.connect_5("pump", keep_alive_s=wished_s)
        assert client.limits.get(Property.SERVER_KEEP_ALIVE_S) == told_s, wished_s
        pass_time(broker.node.gateway, (told_s or wished_s) * 1.5 + 1.1)
        assert await client.disconnected() == (ReasonCode.KEEP_ALIVE_TIMEOUT, []), wished_s  # [MQTT-3.1.2-22]


async def test_a_session_expiry_that_is_too_long_is_replaced(start_broker: StartBroker) -> None:
    """3.2.2.3.2."""
    broker = await start_broker(session_expiry_s_max=60)
    client = await broker.connect_5("pump", about={Property.SESSION_EXPIRY_S: 61})
    assert client.limits[Property.SESSION_EXPIRY_S] == 60
    again = await broker.connect_5("pump", about={Property.SESSION_EXPIRY_S: 60})
    assert Property.SESSION_EXPIRY_S not in again.limits


async def test_packets_may_follow_the_connect_at_once(broker: Broker) -> None:
    """3.1.4: a client need not wait for the CONNACK."""
    client = await broker.dial_5()
    await client.send(connect_5(CLEAN, b"pump"), subscribe_5(1, (b"a", 0)), publish_5(0x32, b"a", 7, NONE), PING)
    assert (await client.connack())[0] == 0
    assert await client.receive() == (SUBACK, 0, b"\0\1\0\0")
    assert sorted([await client.receive() for _ in range(3)]) == [
        (3, 0, b"a", 0, b"x"),
        (PUBACK, 7),
        (PINGRESP, 0, b""),
    ]


async def test_a_connect_may_be_cut_at_any_byte(broker: Broker) -> None:
    stream = connect_5(CLEAN, b"pump", about=write_properties({Property.RECEIVE_MAXIMUM: 5})) + subscribe_5(1, (b"a", 0))
    for cut in range(1, len(stream)):
        client = await broker.dial_5()
        await client.send(stream[:cut])
        await client.send(stream[cut:])
        assert (await client.connack())[0] == 0
        assert await client.receive() == (SUBACK, 0, b"\0\1\0\0")
        client.reset()


# --- refusals ---------------------------------------------------------------------------------------------------------


async def test_a_refused_connect_is_answered_with_its_reason(broker: Broker) -> None:
    """[MQTT-3.1.4-2], [MQTT-3.2.2-7], [MQTT-4.13.1-1]."""
    counts: Counter[ReasonCode] = Counter()
    for case in (case for case in INVALID if case.data[0] >> 4 == 1):
        client = await broker.dial_5()
        await client.send(case.data, PING)
        reason, found = await client.connack()
        assert reason == case.reason, case.name
        assert case.says in found[Property.REASON_STRING], case.name
        assert await client.ended() == [], case.name
        counts[case.reason] += 1
        assert broker.node.gateway.counters.closed_by_reason == counts, case.name


async def test_a_bad_packet_ends_the_connection_with_its_reason(broker: Broker) -> None:
    """[MQTT-4.13.1-1]."""
    counts: Counter[ReasonCode] = Counter()
    for case in (case for case in INVALID if case.data[0] >> 4 != 1):
        client = await broker.connect_5("bad")
        await client.send(case.data, PING)
        assert await client.disconnected() == (case.reason, []), case.name
        counts[case.reason] += 1
        assert broker.node.gateway.counters.closed_by_reason == counts, case.name
        assert broker.stored() == [], case.name


async def test_a_packet_that_is_not_allowed_ends_the_connection_with_its_reason(broker: Broker) -> None:
    for data, reason in (
        (connect_5(CLEAN, b"pump"), ReasonCode.PROTOCOL_ERROR),  # [MQTT-3.1.0-2]
        (connect(CLEAN, b"pump"), ReasonCode.PROTOCOL_ERROR),
        (b"\xf0\0", ReasonCode.PROTOCOL_ERROR),  # [MQTT-4.12.0-7]
        (b"\x30\xff\xff\xff\x7f", ReasonCode.PACKET_TOO_LARGE),  # [MQTT-3.2.2-15]
        (publish_5(0x30, b"", 0, NONE), ReasonCode.PROTOCOL_ERROR),  # 3.3.2.1
        (publish_5(0x30, b"a/#", 0, NONE), ReasonCode.TOPIC_NAME_INVALID),  # [MQTT-3.3.2-2]
        (publish_5(0x32, b"a\0", 1, NONE), ReasonCode.TOPIC_NAME_INVALID),  # [MQTT-1.5.4-2]
        (publish_5(0x30, b"a", 0, b"\2\x0b\1"), ReasonCode.PROTOCOL_ERROR),  # [MQTT-3.3.4-6]
        (publish_5(0x30, b"a", 0, b"\5\x08\0\2a#"), ReasonCode.PROTOCOL_ERROR),  # [MQTT-3.3.2-14]
    ):
        client = await broker.connect_5("pump")
        await client.send(data)
        assert await client.disconnected() == (reason, []), data
    assert broker.stored() == []


async def test_reason_strings_are_sent_only_to_clients_that_want_them(broker: Broker) -> None:
    """[MQTT-3.1.2-29]."""
    for wants in (1, 0):
        client = await broker.connect_5("pump", about={Property.REQUEST_PROBLEM_INFORMATION: wants})
        await client.send(publish_5(0x32, b"$SYS/x", 1, NONE))
        answer = await client.receive()
        assert answer == (PUBACK, 1, ReasonCode.TOPIC_NAME_INVALID)
        await client.send(b"\xf0\0")
        (farewell,) = await client.ended()
        assert farewell[2][0] == ReasonCode.PROTOCOL_ERROR
        assert (b"authentication method" in farewell[2]) == bool(wants)


async def test_one_client_more_than_the_limit_is_refused(start_broker: StartBroker) -> None:
    broker = await start_broker(connections_max=1)
    await broker.connect_5("one")
    two = await broker.dial_5()
    await two.send(connect_5(CLEAN, b"two"))
    assert (await two.connack())[0] == ReasonCode.QUOTA_EXCEEDED
    assert await two.ended() == []


async def test_a_client_whose_limit_is_below_the_connack_is_closed(broker: Broker) -> None:
    """[MQTT-3.1.2-24]; [MQTT-3.14.0-1]: the server sends no DISCONNECT either, although one would be small enough."""
    client = await broker.dial_5()
    await client.send(connect_5(CLEAN, b"pump", about=write_properties({Property.MAXIMUM_PACKET_SIZE: 10})))
    assert await client.ended() == []
    assert broker.closed(ReasonCode.PACKET_TOO_LARGE) == 1


# --- DISCONNECT -------------------------------------------------------------------------------------------------------


async def test_a_client_that_is_taken_over_is_told_so(broker: Broker) -> None:
    """[MQTT-3.1.4-3]."""
    old = await broker.connect_5("pump")
    new = await broker.connect("pump")  # the version of the new connection does not matter
    assert await old.disconnected() == (ReasonCode.SESSION_TAKEN_OVER, [])
    assert await new.drained() == []


async def test_clients_are_told_that_the_node_stops(broker: Broker) -> None:
    client = await broker.connect_5("pump")
    await broker.node.gateway.stop()
    assert await client.disconnected() == (ReasonCode.SERVER_SHUTTING_DOWN, [])


async def test_a_disconnect_is_the_last_packet_and_comes_after_the_acks(broker: Broker) -> None:
    """[MQTT-3.14.4-1]."""
    client = await broker.connect_5("pump")
    with HeldSync(broker) as held:
        await client.send(publish_5(0x32, b"a", 7, NONE), b"\xf0\0")
        held.release()
        assert await client.disconnected() == (ReasonCode.PROTOCOL_ERROR, [(PUBACK, 7)])


async def test_the_reason_of_a_disconnect_decides_whether_the_will_is_published(broker: Broker) -> None:
    """[MQTT-3.14.4-3], [MQTT-3.1.2-8], [MQTT-3.1.2-10]."""
    watcher = await broker.connect_5("watcher")
    await watcher.subscribe(("will", 0))
    for data, has_will in (
        (b"\xe0\0", False),
        (b"\xe0\1\0", False),
        (b"\xe0\2\0\0", False),
        (b"\xe0\1\4", True),
        (b"\xe0\1\x80", True),
    ):
        client = await broker.connect_5("pump", b"will", b"gone", flags=CLEAN | WILL)
        await client.send(data, PING)
        assert await client.ended() == [], data
        assert await watcher.messages() == ([Message("will", b"gone")] if has_will else []), data


async def test_a_disconnect_may_not_set_an_expiry_where_the_connect_set_none(broker: Broker) -> None:
    """3.14.2.2.2."""
    client = await broker.connect_5("pump")
    await client.send(packet(0xE0, b"\0" + write_properties({Property.SESSION_EXPIRY_S: 5})))
    assert await client.disconnected() == (ReasonCode.PROTOCOL_ERROR, [])


# --- receive maximum of the server ------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [0x32, 0x34])
async def test_exceeding_the_receive_maximum_ends_the_connection(start_broker: StartBroker, header: int) -> None:
    """[MQTT-3.3.4-9]: the server stores and acknowledges the messages up to the maximum."""
    broker = await start_broker(inflight_max=5)
    client = await broker.connect_5("pump")
    await client.send(*(publish_5(header, b"a", n, NONE) for n in range(1, 8)))
    reason, answers = await client.disconnected()
    assert reason == ReasonCode.RECEIVE_MAXIMUM_EXCEEDED
    assert answers == [(PUBACK if header == 0x32 else PUBREC, n) for n in range(1, 6)]
    assert len(broker.stored()) == 5


async def test_a_client_that_keeps_to_the_receive_maximum_stays_connected(start_broker: StartBroker) -> None:
    """[MQTT-4.9.0-1] to [MQTT-4.9.0-3], for the client as the sender."""
    broker = await start_broker(inflight_max=5)
    client = await broker.connect_5("pump")
    for n in range(1, 31, 5):
        await client.send(*(publish_5(0x32, b"a", m, NONE) for m in range(n, n + 5)), publish_5(0x30, b"a", 0, NONE))
        assert [await client.receive() for _ in range(5)] == [(PUBACK, m) for m in range(n, n + 5)]
    await client.send(*(publish_5(0x34, b"a", n, NONE) for n in range(1, 6)))
    assert [await client.receive() for _ in range(5)] == [(PUBREC, n) for n in range(1, 6)]
    await client.send(encode_acks(PUBREL, [3]))
    assert await client.receive() == (PUBCOMP, 3)
    await client.send(publish_5(0x34, b"a", 9, NONE), publish_5(0x3C, b"a", 9, NONE))  # the second repeats the first
    assert [await client.receive() for _ in range(2)] == [(PUBREC, 9)] * 2


# --- acks with reasons ------------------------------------------------------------------------------------------------


async def test_acks_with_an_unknown_packet_id_are_answered_with_that_reason(broker: Broker) -> None:
    """3.6.2.1, 3.7.2.1."""
    client = await broker.connect_5("pump")
    await client.send(encode_acks(PUBREL, [7]), encode_acks(PUBREC, [8]), encode_acks(PUBACK, [9]))
    assert await client.drained() == [
        (PUBCOMP, 7, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND),
        (PUBREL, 8, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND),
    ]


async def test_a_refusal_by_the_client_ends_the_delivery(broker: Broker) -> None:
    """[MQTT-4.4.0-2], 4.3.3: after a PUBREC of 0x80 or more the packet id is free."""
    client, publisher = await broker.connect_5("client"), await broker.connect_5("publisher")
    await client.subscribe(("a", 2))
    for n, (kind, qos) in enumerate([(PUBACK, 1), (PUBREC, 2)]):
        await publisher.publish("a", b"x", qos)
        packet_id = (await client.receive())[3]
        await client.send(packet(kind << 4, packet_id.to_bytes(2, "big") + b"\x97"))
        assert await client.drained() == []
        assert broker.connection("client").session.inflight.slots == {}
        assert broker.node.gateway.counters.deliveries_acked >= n


async def test_an_unsuback_says_which_subscriptions_existed(broker: Broker) -> None:
    """[MQTT-3.11.3-1]."""
    client = await broker.connect_5("pump")
    await client.subscribe(("a", 0), ("b/#", 1))
    await client.send(unsubscribe_5(9, b"a", b"never", b"b/#", b"a"))
    assert await client.receive() == (UNSUBACK, 0, b"\0\x09\0" + b"\0\x11\0\x11")


async def test_publishes_that_are_refused_leave_the_connection_open(broker: Broker) -> None:
    """3.4.2.1, 3.5.2.1, [MQTT-4.6.0-2]: the acks come in the order of the PUBLISHes."""
    client = await broker.connect_5("pump")
    topics = [b"a", b"$SYS/x", b"a", b"/" * 200, b"$delayed/x/a", b"a"]
    await client.send(*(publish_5(0x32, topic, n, NONE) for n, topic in enumerate(topics, 1)))
    await client.send(publish_5(0x34, b"$SYS/x", 7, NONE), publish_5(0x30, b"$SYS/x", 0, NONE))
    bad = ReasonCode.TOPIC_NAME_INVALID
    assert sorted([await client.receive() for _ in range(7)]) == [
        (PUBACK, 1),
        (PUBACK, 2, bad),
        (PUBACK, 3),
        (PUBACK, 4, bad),
        (PUBACK, 5, bad),
        (PUBACK, 6),
        (PUBREC, 7, bad),
    ]
    assert len(broker.stored()) == 3
    assert broker.connection("pump").session.received == set()
    assert broker.node.gateway.counters.publishes_refused == 5


async def test_short_runs_that_are_refused_cost_no_more_than_single_packets(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node splits the runs of a read together. Otherwise a client could hold up the node."""
    splits: list[int] = []

    def counted(packets: list[Packet]) -> list[Packet]:
        splits.append(len(packets))
        return split_runs(packets)

    monkeypatch.setattr("penstock.gateway.connection.incoming_publishes.split_runs", counted)
    client = await broker.connect_5("pump")
    topics = [b"$a", b"$a", b"$b", b"$b"] * 20
    before = broker.node.gateway.counters.packets_in
    await client.send(*(publish_5(0x32, topic, n, NONE) for n, topic in enumerate(topics, 1)))
    for n in range(1, len(topics) + 1):
        assert await client.receive() == (PUBACK, n, ReasonCode.TOPIC_NAME_INVALID)
    assert 0 < len(splits) < 10, "the node splits once per read, not once per run"
    assert broker.node.gateway.counters.packets_in - before == len(topics)


async def test_an_ack_says_that_a_quota_is_exceeded(start_broker: StartBroker) -> None:
    broker = await start_broker(queues_max=1)
    client = await broker.connect_5("pump")
    assert await client.publish_with("a", b"x", qos=1) == 0
    assert await client.publish_with("b", b"x", qos=1) == ReasonCode.QUOTA_EXCEEDED
    assert await client.publish_with("b", b"x", qos=2) == ReasonCode.QUOTA_EXCEEDED
    assert await client.publish_with("a", b"x", qos=2) == 0


async def test_a_limit_on_payloads_counts_nothing_else(start_broker: StartBroker) -> None:
    broker = await start_broker(topic_bytes_max=65_535)
    topic = "/".join(["x" * 500] * 128)
    client = await broker.connect_5("five")
    about: PropertyValues = {Property.USER_PROPERTY: [("key", "v" * 1000)] * 50}
    assert await client.publish_with(topic, bytes(MIB), about, qos=1) == 0
    assert await client.publish_with("a", bytes(MIB), qos=2) == 0
    for qos in (1, 2):
        assert await client.publish_with("a", bytes(MIB + 1), about, qos=qos) == ReasonCode.QUOTA_EXCEEDED
    older = await broker.connect("four")
    await older.publish("a", bytes(MIB), 1)
    await older.send(encode_publish(b"a", bytes(MIB + 1), 1, packet_id=1))
    assert await older.ended() == []
    assert [message.topic for message in broker.stored()] == [topic, "a", "a"]


async def test_a_run_and_a_will_are_held_to_the_limit_on_payloads(start_broker: StartBroker) -> None:
    broker = await start_broker(message_bytes_max=KIB)
    client = await broker.connect_5("five")
    sizes = [KIB, KIB, KIB + 1, KIB + 1, 1]
    await client.send(b"".join(publish_5(0x32, b"a", 1 + number, NONE, bytes(size)) for number, size in enumerate(sizes)))
    codes = [packet[2] if len(packet) > 2 else 0 for packet in [await client.expect(PUBACK) for _ in sizes]]
    assert codes == [0, 0, ReasonCode.QUOTA_EXCEEDED, ReasonCode.QUOTA_EXCEEDED, 0]
    dies = await broker.dial_5()
    await dies.send(connect_5(CLEAN | WILL, b"dies", b"a", bytes(KIB + 1)))
    assert (await dies.connack())[0] == ReasonCode.QUOTA_EXCEEDED


# --- along with other versions ----------------------------------------------------------------------------------------


async def test_mqtt_3_1_is_served_as_3_1_1_is(broker: Broker) -> None:
    client = await broker.dial()
    await client.send(connect(CLEAN, b"old", name=b"MQIsdp", level=3))
    assert await client.receive() == (CONNACK, 0, b"\0\0")
    assert await client.subscribe(("a", 1)) == [1]
    await client.publish("a", b"x", 1)
    assert await client.message() == Message("a", b"x", 1)


async def test_clients_of_all_versions_get_each_others_messages(broker: Broker) -> None:
    old, new = await broker.connect("old"), await broker.connect_5("new")
    for client in (old, new):
        await client.subscribe(("a/+", 2))
    for qos in (0, 1, 2):
        await old.publish("a/old", b"x" * 200, qos)
        await new.publish("a/new", b"x" * 200, qos)
    for client in (old, new):
        got = [await client.message() for _ in range(6)]
        assert sorted(got) == sorted(Message(f"a/{name}", b"x" * 200, qos) for name in ("old", "new") for qos in (0, 1, 2))
