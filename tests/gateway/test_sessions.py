"""Sessions that outlive their connections, in both versions, and delayed wills; without a restart of the node."""

from __future__ import annotations

import pytest

from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.packets import DUP, PUBACK, PUBCOMP, PUBLISH, PUBREC, PUBREL
from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.store.options import KIB
from tests.clock import AheadClock
from tests.gateway.brokers import StartBroker
from tests.gateway.lasting_sessions import LASTS, begin, both_versions, leave, resume
from tests.gateway.moving_time import pass_time
from tests.gateway.wire import BYE, CLEAN, WILL, Broker, Client5, Message, message_of
from tests.waiting import until


@both_versions
async def test_messages_for_a_client_that_is_away_wait_in_order(broker: Broker, version: int) -> None:
    """[MQTT-3.1.2-5], [MQTT-4.1.0-1], [MQTT-4.6.0-6]."""
    client, publisher = await begin(broker, "pump", version), await broker.connect("publisher")
    await client.subscribe(("a/+", 1), ("b", 2))
    await publisher.publish("a/1", b"before", 1)
    assert (await client.message()).body == b"before"
    await leave(client)
    for n in range(300):
        await publisher.send(encode_publish(b"a/%d" % n, b"%d" % n, 1, packet_id=1))
        assert await publisher.receive() == (PUBACK, 1)
    again = await resume(broker, "pump", version)
    assert [int((await again.message()).body) for _ in range(300)] == list(range(300))
    await publisher.publish("b", b"live", 2)
    assert await again.message() == Message("b", b"live", 2)


@both_versions
async def test_unacknowledged_deliveries_are_sent_again_with_dup_in_order(broker: Broker, version: int) -> None:
    """[MQTT-4.4.0-1], [MQTT-3.3.1-1], [MQTT-4.6.0-1]."""
    client, publisher = await begin(broker, "pump", version), await broker.connect("publisher")
    await client.subscribe(("a", 2))
    for n in range(6):
        await publisher.publish("a", b"%d" % n, 1 + n % 2)
    ids = [(await client.receive())[3] for _ in range(6)]
    await client.send(encode_acks(PUBACK, [ids[2]]), encode_acks(PUBREC, [ids[1], ids[3]]))
    assert [await client.receive() for _ in range(2)] == [(PUBREL, ids[1]), (PUBREL, ids[3])]
    await client.send(encode_acks(PUBCOMP, [ids[1]]))
    await client.drained()
    client.reset()
    await until(lambda: "pump" in broker.away())
    await publisher.publish("a", b"new", 1)
    again = await resume(broker, "pump", version)
    came = [await again.receive() for _ in range(5)]
    assert [(item[0], item[1] & DUP, item[3], item[4]) if item[0] == PUBLISH else item for item in came] == [
        (PUBLISH, DUP, ids[0], b"0"),
        (PUBREL, ids[3]),
        (PUBLISH, DUP, ids[4], b"4"),
        (PUBLISH, DUP, ids[5], b"5"),
        (PUBLISH, 0, came[-1][3], b"new"),
    ]
    assert came[-1][3] not in ids
    await again.send(encode_acks(PUBACK, [ids[0], ids[4], came[-1][3]]), encode_acks(PUBREC, [ids[5]]))
    assert await again.receive() == (PUBREL, ids[5])
    await again.send(encode_acks(PUBCOMP, [ids[3], ids[5]]))
    assert await again.drained() == []
    assert broker.connection("pump").session.inflight.slots == {}


@both_versions
async def test_a_qos_2_message_that_is_repeated_on_another_connection_is_stored_once(broker: Broker, version: int) -> None:
    """[MQTT-4.3.3-10]."""
    body = encode_publish(b"a", b"x", 2, packet_id=7, properties=b"\0" if version == 5 else b"")
    again_body = encode_publish(b"a", b"x", 2, packet_id=7, dup=True, properties=b"\0" if version == 5 else b"")
    client = await begin(broker, "pump", version)
    await client.send(body)
    assert await client.receive() == (PUBREC, 7)
    client.reset()
    await until(lambda: "pump" in broker.away())
    again = await resume(broker, "pump", version)
    await again.send(again_body)
    assert await again.receive() == (PUBREC, 7)
    await again.send(encode_acks(PUBREL, [7]))
    assert await again.receive() == (PUBCOMP, 7)
    assert broker.stored() == [Message("a", b"x", 2)]


@both_versions
async def test_another_message_with_a_packet_id_that_was_not_released_is_a_new_one(broker: Broker, version: int) -> None:
    """A client that has lost its state counts its packet ids from 1 again."""
    properties = b"\0" if version == 5 else b""
    client = await begin(broker, "pump", version)
    for packet_id in (7, 8):
        await client.send(encode_publish(b"a", b"%d" % packet_id, 2, packet_id=packet_id, properties=properties))
        assert await client.receive() == (PUBREC, packet_id)
    client.reset()
    await until(lambda: "pump" in broker.away())
    again = await resume(broker, "pump", version)
    for topic, body in ((b"a", b"new"), (b"b", b"8")):
        packet_id = 7 if topic == b"a" else 8
        for _ in range(2):
            await again.send(encode_publish(topic, body, 2, packet_id=packet_id, properties=properties))
            assert await again.receive() == (PUBREC, packet_id)
    await again.send(encode_acks(PUBREL, [7, 8]))
    assert [await again.receive(), await again.receive()] == [(PUBCOMP, 7), (PUBCOMP, 8)]
    wanted = [Message("a", b"7", 2), Message("a", b"8", 2), Message("a", b"new", 2), Message("b", b"8", 2)]
    assert broker.stored() == wanted


async def test_redelivery_respects_the_receive_maximum_and_the_socket(start_broker: StartBroker) -> None:
    """[MQTT-3.3.4-7]."""
    broker = await start_broker(send_buffer_bytes=8 * KIB)
    client, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    for n in range(40):
        await publisher.publish("a", b"%02d" % n + b"x" * 4000, 1)
    assert len(await client.drained()) == 40
    client.reset()
    await until(lambda: "pump" in broker.away())
    again = await broker.connect_5("pump", flags=0, about=LASTS | {Property.RECEIVE_MAXIMUM: 3})
    assert [message.body[:2] for message in await again.messages()] == [b"00", b"01", b"02"]
    await again.send(encode_acks(PUBACK, [1, 2, 3]))
    await publisher.publish("a", b"40", 1)
    assert [(await again.message()).body[:2] for _ in range(38)] == [b"%02d" % n for n in range(3, 41)]
    assert await again.drained() == []


async def test_a_session_may_be_resumed_in_another_version(broker: Broker) -> None:
    client, publisher = await begin(broker, "pump", 4), await broker.connect("publisher")
    await client.subscribe(("a/#", 1), ("a/+", 1))
    await leave(client)
    for n, version in enumerate((5, 4, 5)):
        await publisher.publish("a/b", b"%d" % n, 1)
        client = await resume(broker, "pump", version)
        assert [message.body for message in await client.messages()] == [b"%d" % n] * (1 if version == 5 else 2)
        for packet_id in list(broker.connection("pump").session.inflight.slots):
            await client.send(encode_acks(PUBACK, [packet_id]))
        await leave(client)


@both_versions
async def test_a_clean_start_ends_the_session_that_was_there(broker: Broker, version: int) -> None:
    """[MQTT-3.1.2-4], [MQTT-3.2.2-2]."""
    client, publisher = await begin(broker, "pump", version), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    await leave(client)
    await publisher.publish("a", b"x", 1)
    clean = await (broker.connect_5("pump") if version == 5 else broker.connect("pump"))
    assert await clean.messages() == []
    await leave(clean)
    for end in (publisher,):
        end.reset()
    await until(lambda: not broker.node.gateway.connections)
    assert set(broker.held_resources().values()) == {0}


async def test_a_clean_session_ends_with_its_connection(broker: Broker) -> None:
    """[MQTT-3.1.2-6] of 3.1.1; session expiry 0 of 5.0 [MQTT-3.1.2-23]."""
    for end in (BYE, b""):
        for client in (await broker.connect("old"), await broker.connect_5("new", flags=0)):
            await client.subscribe(("a", 1))
            await client.send(end) if end else client.reset()
    await until(lambda: not broker.node.gateway.connections)
    assert set(broker.held_resources().values()) == {0}


async def test_a_session_ends_after_its_expiry_interval(broker: Broker) -> None:
    """[MQTT-3.1.2-23], [MQTT-4.1.0-2]."""
    client = await broker.connect_5("pump", about=LASTS)
    await client.subscribe(("a", 1))
    pass_time(broker.node.gateway, 120)  # The client is connected.
    await leave(client)
    await until(lambda: "pump" in broker.away())
    pass_time(broker.node.gateway, 59)
    assert broker.away() == ["pump"]
    pass_time(broker.node.gateway, 2.1)
    await until(lambda: not broker.node.gateway.connections)
    assert set(broker.held_resources().values()) == {0}
    assert broker.node.gateway.counters.sessions_expired == 1


async def test_a_client_that_returns_in_time_keeps_its_session(broker: Broker) -> None:
    client = await broker.connect_5("pump", about=LASTS)
    for _ in range(3):
        await leave(client)
        await until(lambda: "pump" in broker.away())
        pass_time(broker.node.gateway, 50)
        client = await resume(broker, "pump", 5)  # type: ignore[assignment]
    assert isinstance(client, Client5)
    assert await client.drained() == []


async def test_a_disconnect_may_change_how_long_the_session_lasts(broker: Broker) -> None:
    """3.14.2.2.2."""
    client = await broker.connect_5("pump", about=LASTS)
    await client.send(b"\xe0\x07\0\5\x11\0\0\0\0")
    await client.ended()
    await until(lambda: not broker.node.gateway.connections)
    assert broker.away() == []


async def test_a_takeover_resumes_the_session(broker: Broker) -> None:
    """[MQTT-3.1.4-3]."""
    old, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    await old.subscribe(("a", 1))
    new = await resume(broker, "pump", 5)
    assert isinstance(old, Client5)
    assert (await old.disconnected())[0] == ReasonCode.SESSION_TAKEN_OVER
    await publisher.publish("a", b"x", 1)
    assert await new.message() == Message("a", b"x", 1)


async def test_at_the_limit_a_new_session_displaces_the_one_that_expires_first(start_broker: StartBroker) -> None:
    broker = await start_broker(sessions_max=2)
    for name in ("one", "two", "three"):
        client = await broker.connect_5(name, about=LASTS)
        await leave(client)
        await until(lambda name=name: name in broker.away())  # type: ignore[misc]
    assert broker.away() == ["three", "two"]


async def test_a_session_of_a_client_that_is_away_holds_no_messages(broker: Broker) -> None:
    client, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    await leave(client)
    await until(lambda: "pump" in broker.away())
    for n in range(1, 500):
        await publisher.send(encode_publish(b"a", b"x" * KIB, 1, packet_id=n))
    await publisher.drained()
    held = broker.held_resources()
    assert (held["fanouts"], held["watchers"], held["subscriptions"], held["sessions in memory"]) == (0, 0, 0, 0)


# --- wills that wait ------------------------------------------------------------------------------------------------------


async def dying(broker: Broker, delay_s: int, expiry_s: int) -> Client5:
    """Return a client with a will whose connection has broken."""
    client = await broker.connect_5(
        "pump",
        b"will",
        b"gone",
        flags=CLEAN | WILL,
        about={Property.SESSION_EXPIRY_S: expiry_s},
        will={Property.WILL_DELAY_S: delay_s},
    )
    client.reset()
    await until(lambda: "pump" not in broker.node.gateway.clients)
    return client


async def test_a_will_waits_for_its_delay_or_for_the_end_of_the_session(broker: Broker) -> None:
    """[MQTT-3.1.2-8], 3.1.3.2.2."""
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("will", 0))
    for delay_s, expiry_s, waits_s in ((10, 60, 10), (60, 10, 10), (10, 0, 0), (0, 60, 0)):
        await dying(broker, delay_s, expiry_s)
        if waits_s:
            pass_time(broker.node.gateway, waits_s - 1)
            assert await watcher.messages() == [], (delay_s, expiry_s)
            pass_time(broker.node.gateway, 2.1)
        assert await watcher.messages() == [Message("will", b"gone")], (delay_s, expiry_s)
        pass_time(broker.node.gateway, 120)
        assert await watcher.messages() == [], (delay_s, expiry_s)


async def test_a_will_a_session_and_a_retained_message_end_without_a_beat(start_broker: StartBroker) -> None:
    broker = await start_broker(clock=AheadClock())
    gateway = broker.node.gateway
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("will", 0))
    publisher = await broker.connect_5("publisher")
    assert await publisher.publish_with("a", b"kept", {Property.MESSAGE_EXPIRY_S: 1}, 1, retain=True) == 0
    await dying(broker, 1, 2)
    gateway.heartbeat.stop()
    await watcher.receive()
    await until(lambda: len(broker.node.retained) == 0)
    await until(lambda: len(broker.node.sessions) == 0)


async def test_a_delayed_will_is_not_published_if_the_client_returns_in_time(broker: Broker) -> None:
    """[MQTT-3.1.3-9]."""
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("will", 0))
    await dying(broker, 10, 60)
    client = await resume(broker, "pump", 5)
    pass_time(broker.node.gateway, 30)
    await leave(client)
    pass_time(broker.node.gateway, 120)
    assert await watcher.messages() == []


@pytest.mark.parametrize(("flags", "comes"), [(CLEAN, True), (0, False)])
async def test_a_takeover_that_ends_the_session_publishes_its_delayed_will(broker: Broker, flags: int, comes: bool) -> None:
    """[MQTT-3.1.4-3], 3.1.3.2.2."""
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("will", 0))
    await broker.connect_5("pump", b"will", b"gone", flags=CLEAN | WILL, about=LASTS, will={Property.WILL_DELAY_S: 10})
    await broker.connect_5("pump", flags=flags, about=LASTS)
    assert await watcher.messages() == ([Message("will", b"gone")] if comes else [])


async def test_a_delayed_will_outlives_a_stop_of_the_node(broker: Broker) -> None:
    """3.1.3.2.2: the delay goes on as long as the session does."""
    await dying(broker, 10, 60)
    await broker.restart()
    assert broker.stored() == []
    pass_time(broker.node.gateway, 11)
    await until(lambda: broker.stored() == [Message("will", b"gone")])  # it is published in slices
    await broker.restart()
    pass_time(broker.node.gateway, 11)
    assert broker.stored() == [Message("will", b"gone")]


async def test_messages_of_a_client_that_left_reach_the_clients_that_stay(broker: Broker) -> None:
    client, other = await begin(broker, "pump", 4), await broker.connect("other")
    for one in (client, other):
        await one.subscribe(("a/+", 1))
    await leave(client)
    await other.publish("a/1", b"x", 1)
    assert message_of(await other.expect(PUBLISH)) == Message("a/1", b"x", 1)
    again = await resume(broker, "pump", 4)
    assert await again.message() == Message("a/1", b"x", 1)
