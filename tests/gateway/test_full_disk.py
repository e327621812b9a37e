"""MQTT on a full disk: the node acknowledges only what it has stored, loses nothing above QoS 0, and still serves consumers."""

from __future__ import annotations

import aiohttp
import pytest
from prometheus_client import generate_latest

from penstock.gateway.connection import disk_full
from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.packets import CONNACK, DUP, PUBACK, PUBCOMP, PUBLISH, PUBREC, PUBREL, SUBACK
from penstock.gateway.protocol.properties import Property, PropertyValues
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.sessions import journal
from penstock.store.files import Usage
from penstock.store.options import GIB
from tests.gateway import scripted_plugins
from tests.gateway.brokers import StartBroker
from tests.gateway.disk_space import TOTAL, free
from tests.gateway.lasting_sessions import ENDS, LASTS, end_node, leave, recorded
from tests.gateway.logins import plugins
from tests.gateway.moving_time import pass_time
from tests.gateway.packet_cases import subscribe
from tests.gateway.wire import BYE, CLEAN, PING, WILL, Broker, Message
from tests.waiting import until


@pytest.fixture
async def full(start_broker: StartBroker) -> Broker:
    """A node with one stored message, whose disk has then fallen below its reserve."""
    broker = await start_broker(reserve_bytes=GIB)
    client = await broker.connect("first")
    await client.publish("plant/1", b"before", 1)
    await client.send(BYE)
    free(broker, GIB // 2)
    return broker


async def test_publishes_are_acknowledged_in_order_when_there_is_room_again(full: Broker) -> None:
    client = await full.connect("publisher")
    await client.send(*(encode_publish(b"plant/1", b"%d" % number, 1, packet_id=number) for number in range(1, 6)))
    await client.send(encode_publish(b"plant/1", b"6", 2, packet_id=6))
    assert await client.drained() == []
    assert full.stored() == [Message("plant/1", b"before", 1)]
    free(full, TOTAL)
    assert [await client.receive() for _ in range(6)] == [*((PUBACK, number) for number in range(1, 6)), (PUBREC, 6)]
    assert [message.body for message in full.stored()] == [b"before", b"1", b"2", b"3", b"4", b"5", b"6"]
    assert full.node.gateway.backlog.kept_bytes == 0


async def test_a_publish_at_qos_0_is_dropped_and_counted(full: Broker) -> None:
    client = await full.connect("publisher")
    await client.publish("plant/1", b"gone")
    await client.drained()
    free(full, TOTAL)
    await client.publish("plant/1", b"after", 1)
    assert [message.body for message in full.stored()] == [b"before", b"after"]
    assert full.node.gateway.counters.publishes_dropped == 1


async def test_a_client_whose_publish_waits_can_still_subscribe(full: Broker) -> None:
    client = await full.connect("both")
    await client.send(encode_publish(b"plant/1", b"held", 1, packet_id=1))
    assert await client.subscribe(("plant/#", 1)) == [1]
    assert await client.drained() == []
    free(full, TOTAL)
    assert await client.expect(PUBACK) == (PUBACK, 1)
    assert await client.message() == Message("plant/1", b"held", 1)


async def test_a_client_that_exceeds_its_backlog_is_not_read_and_not_closed_as_silent(
    full: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_full, "CONNECTION_BYTES_MAX", 4000)
    client = await full.connect("publisher", keep_alive_s=1)
    connection = full.connection("publisher")
    count = 2000
    packets = [encode_publish(b"plant/1", b"%d" % number + b"x" * 1000, 1, packet_id=number) for number in range(1, count)]
    client.writer.write(b"".join(packets))
    await until(lambda: connection.is_unread)
    assert len(connection.kept_packets.packets) < count // 2
    gateway = full.node.gateway
    later = gateway.clock.monotonic_s() + 60
    gateway.keep_alives.check(connection, later)
    assert connection.connected
    free(full, TOTAL)
    for number in range(1, count):
        assert await client.receive() == (PUBACK, number)
    assert [int(message.body.rstrip(b"x")) for message in full.stored()[1:]] == list(range(1, count))
    assert await client.drained() == []
    gateway.keep_alives.check(connection, later)
    assert not connection.connected, "the node reads the client again, so its silence counts"


async def test_the_backlog_of_all_connections_together_is_bounded(full: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_full, "ALL_BYTES_MAX", 2000)
    clients = [await full.connect(f"publisher{number}") for number in range(4)]
    for client in clients:
        await client.send(encode_publish(b"plant/1", b"x" * 1000, 1, packet_id=1))
    await until(lambda: sum(full.connection(f"publisher{number}").is_unread for number in range(4)) == 4)
    free(full, TOTAL)
    for client in clients:
        assert await client.receive() == (PUBACK, 1)


async def test_the_backlog_of_a_client_that_leaves_is_dropped(full: Broker) -> None:
    for leaves in (BYE, b""):
        client = await full.connect("publisher")
        await client.send(encode_publish(b"plant/1", b"held", 1, packet_id=1), PING)
        await until(lambda: full.node.gateway.backlog.kept_bytes > 0)
        if leaves:
            await client.send(leaves)
        else:
            client.reset()
        await until(lambda: full.node.gateway.backlog.kept_bytes == 0)
    free(full, TOTAL)
    assert [message.body for message in full.stored()] == [b"before"]


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_will_waits_for_room(start_broker: StartBroker, qos: int) -> None:
    broker = await start_broker(reserve_bytes=GIB)
    client = await broker.connect("dies", b"plant/will", b"gone", flags=CLEAN | WILL | qos << 3)
    free(broker, GIB // 2)
    client.reset()
    await until(lambda: not broker.node.gateway.clients)
    assert broker.stored() == []
    free(broker, TOTAL)
    await until(lambda: [message.body for message in broker.stored()] == [b"gone"])
    pass_time(broker.node.gateway, 5)
    assert len(broker.stored()) == 1
    assert broker.held_resources()["sessions"] == 0


async def test_new_sessions_and_wills_are_refused_while_existing_sessions_continue(start_broker: StartBroker) -> None:
    broker = await start_broker(reserve_bytes=GIB)
    client, publisher = await broker.connect_5("pump", about=LASTS), await broker.connect("publisher")
    await client.subscribe(("a", 2))
    await leave(client)
    for n in range(3):
        await publisher.publish("a", b"%d" % n, 2)
    free(broker, GIB // 2)
    again = await broker.connect_5("pump", flags=0, about=LASTS)
    assert again.session_present
    assert [(await again.message()).body for _ in range(3)] == [b"0", b"1", b"2"]
    assert await again.subscribe(("b", 1)) == [ReasonCode.QUOTA_EXCEEDED]
    await leave(again)
    new = await broker.connect_5("new", about=LASTS, accepted=False)
    assert (await new.connack())[0] == ReasonCode.QUOTA_EXCEEDED
    will = await broker.connect("will", b"t", b"gone", flags=CLEAN | WILL, accepted=False)
    assert await will.receive() == (CONNACK, 0, b"\0\3")
    clean = await broker.connect_5("pump", accepted=True)
    assert not clean.session_present
    assert broker.held_resources()["sessions"] == 0, "the store records the end of a session even now"


async def test_on_an_exhausted_disk_qos_2_waits_and_no_message_is_lost_or_duplicated(start_broker: StartBroker) -> None:
    broker = await start_broker(reserve_bytes=GIB)
    client, publisher = await broker.connect_5("pump", about=LASTS), await broker.connect("publisher")
    await client.subscribe(("a", 2), ("b", 1))
    await publisher.publish("a", b"0", 2)
    packet_id = (await client.receive())[3]
    await client.send(encode_publish(b"c", b"x", 2, packet_id=7, properties=b"\0"))
    assert await client.receive() == (PUBREC, 7)
    await publisher.send(encode_publish(b"a", b"1", 2, packet_id=1), encode_publish(b"b", b"2", 1, packet_id=2))
    broker.node.store.space.probe = lambda: Usage(GIB // 100, TOTAL)
    broker.node.store.measure_disk()
    await client.send(encode_acks(PUBREC, [packet_id]), encode_acks(PUBREL, [7]))
    await client.drained()
    free(broker, TOTAL)
    came = [await client.receive() for _ in range(4)]
    assert {item[:2] for item in came if item[0] != PUBLISH} == {(PUBREL, packet_id), (PUBCOMP, 7)}
    assert sorted(item[4] for item in came if item[0] == PUBLISH) == [b"1", b"2"]
    assert await client.drained() == []


async def test_acks_that_arrive_on_an_exhausted_disk_are_recorded_later(start_broker: StartBroker) -> None:
    broker = await start_broker(reserve_bytes=GIB)
    client, publisher = await broker.connect_5("pump", about=LASTS), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    await publisher.publish("a", b"0", 1)
    broker.node.store.space.probe = lambda: Usage(GIB // 100, TOTAL)
    broker.node.store.measure_disk()
    assert (await client.message()).body == b"0"
    await client.drained()
    broker.node.gateway.journal._job._run_slice()
    await leave(client)
    free(broker, TOTAL)
    again = await broker.connect_5("pump", flags=0, about=LASTS)
    assert again.session_present
    await again.drained()


@pytest.mark.parametrize("end", ["", *ENDS])
async def test_what_a_client_got_before_it_left_an_exhausted_disk_comes_again_with_dup_or_not_at_all(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(journal, "SAVE_S", 3_600)
    monkeypatch.setattr(journal, "ACKS_SAVE_S", 3_600)
    broker = await start_broker(reserve_bytes=GIB)
    client, publisher = await broker.connect_5("pump", about=LASTS), await broker.connect("publisher")
    await client.subscribe(("a", 1), ("b", 0))
    await client.drained()
    await publisher.publish("a", b"1", 1)
    await publisher.publish("b", b"0", 1)
    assert sorted([(await client.receive())[4], (await client.receive())[4]]) == [b"0", b"1"]
    broker.node.store.space.probe = lambda: Usage(GIB // 100, TOTAL)
    broker.node.store.measure_disk()
    client.reset()
    await until(lambda: "pump" not in broker.node.gateway.clients)
    free(broker, TOTAL)
    if end:
        await end_node(broker, end)
        publisher = await broker.connect("publisher")
    await publisher.publish("a", b"2", 1)
    again = await broker.connect_5("pump", flags=0, about=LASTS)
    assert again.session_present
    came = await again.drained()
    assert [(item[4], bool(item[1] & DUP)) for item in came] == [(b"1", True), (b"2", False)]


async def test_a_client_whose_acks_can_not_be_recorded_gets_a_window_and_waits_for_room(start_broker: StartBroker) -> None:
    broker = await start_broker(reserve_bytes=GIB, inflight_max=8)
    client, publisher = await broker.connect_5("pump", about=LASTS), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    for number in range(60):
        await publisher.publish("a", b"%d" % number, 1)
    await recorded(broker)
    free(broker, GIB // 100)
    came: list[bytes] = []

    async def take_all() -> None:
        while found := await client.drained():
            came.extend(packet[4] for packet in found)
            await client.send(encode_acks(PUBACK, [packet[3] for packet in found]))

    await take_all()
    assert 8 < len(came) <= 24, "a node that is killed now would send the rest without DUP"
    free(broker, TOTAL)
    await take_all()
    assert came == [b"%d" % number for number in range(60)]


async def test_a_waiting_message_that_is_repeated_at_qos_2_is_stored_once(full: Broker) -> None:
    client = await full.connect("publisher")
    await client.send(*(encode_publish(b"plant/1", b"held", 2, packet_id=1, dup=dup) for dup in (False, True)))
    assert await client.drained() == []
    free(full, TOTAL)
    assert [await client.receive() for _ in range(2)] == [(PUBREC, 1)] * 2
    assert [message.body for message in full.stored()] == [b"before", b"held"]


@pytest.mark.parametrize("about", [{}, {Property.CONTENT_TYPE: "text"}], ids=["plain", "with properties"])
async def test_a_client_of_5_is_told_at_once_that_there_is_no_room(full: Broker, about: PropertyValues) -> None:
    client = await full.connect_5("publisher")
    for qos in (1, 2):
        assert await client.publish_with("plant/1", b"refused", about, qos) == ReasonCode.QUOTA_EXCEEDED
    await client.publish_with("plant/1", b"dropped", about)
    await client.drained()
    assert full.node.gateway.counters.publishes_dropped == 1
    free(full, TOTAL)
    assert await client.publish_with("plant/1", b"after", about, 2) == 0
    assert [message.body for message in full.stored()] == [b"before", b"after"]


async def test_a_delayed_message_waits_for_room_and_keeps_its_place(full: Broker) -> None:
    client = await full.connect("publisher")
    for packet_id, topic in enumerate((b"plant/1", b"$delayed/3600/plant/2", b"plant/3"), 1):
        await client.send(encode_publish(topic, b"held", 1, packet_id=packet_id))
    assert await client.drained() == []
    free(full, TOTAL)
    assert [await client.receive() for _ in range(3)] == [(PUBACK, number) for number in (1, 2, 3)]
    assert [message.topic for message in full.stored()[1:]] == ["plant/1", "plant/2", "plant/3"]
    assert len(full.node.delayed) == 1


@pytest.mark.parametrize("relief_first", [True, False])
async def test_publishes_that_wait_for_plugins_come_after_those_that_wait_for_room(
    start_broker: StartBroker, relief_first: bool
) -> None:
    script = scripted_plugins.new_script()
    broker = await start_broker(reserve_bytes=GIB, access=plugins("Topics"))
    client = await broker.connect("publisher")
    await client.publish("known", b"0", 1)
    free(broker, GIB // 2)
    await client.send(encode_publish(b"known", b"1", 1, packet_id=1))
    assert await client.drained() == []
    script.may_answer.clear()
    await client.send(subscribe(9, (b"f", 0)), encode_publish(b"known", b"2", 1, packet_id=2))
    await until(lambda: ("subscribe", "f") in script.asked)
    guard = broker.connection("publisher").permissions
    assert guard is not None
    guard.forget()  # so the publish that waits for room must then wait for the plugins, too
    if relief_first:
        free(broker, TOTAL)
        script.may_answer.set()
    else:
        script.may_answer.set()
        await client.expect(SUBACK)
        free(broker, TOTAL)
    assert [await client.expect(PUBACK) for _ in range(2)] == [(PUBACK, 1), (PUBACK, 2)]
    assert [message.body for message in broker.stored()] == [b"0", b"1", b"2"]
    assert broker.node.gateway.backlog.kept_bytes == 0


async def test_metrics_readiness_and_state_report_the_full_disk(full: Broker) -> None:
    client = await full.connect("publisher")
    await client.send(encode_publish(b"plant/1", b"held", 1, packet_id=1))
    await client.drained()
    metrics = generate_latest(full.node.registry).decode()
    assert f"penstock_disk_free_bytes {GIB // 2:.8e}" in metrics
    assert "penstock_store_read_only 1.0" in metrics
    assert "penstock_store_exhausted 0.0" in metrics
    assert 'penstock_store_refused_total{kind="message",level="read_only"} 1.0' in metrics
    disk = full.node.state()["disk"]
    assert (disk["store"], disk["free"], disk["reserve"]) == ("read_only", GIB // 2, GIB)
    assert disk["held_bytes"] > 0
    async with aiohttp.ClientSession() as session, session.get(f"http://{full.node.admin}/readyz") as response:
        assert (response.status, await response.json()) == (200, {"ready": True, "store": "read_only"})


@pytest.mark.parametrize("left", [GIB // 2, GIB // 8], ids=["read-only", "exhausted"])
async def test_members_of_a_shared_subscription_continue_as_far_as_there_is_room(start_broker: StartBroker, left: int) -> None:
    broker = await start_broker(reserve_bytes=GIB)
    one, publisher = await broker.connect("one"), await broker.connect("publisher")
    assert await one.subscribe(("$share/g/a", 1)) == [1]
    await publisher.publish("a", b"x", 1)
    found = await one.expect(PUBLISH)
    free(broker, left)
    two = await broker.connect_5("two")
    assert await two.subscribe(("$share/g/a", 1), ("$share/g/b", 1)) == [1, ReasonCode.QUOTA_EXCEEDED]
    await one.send(encode_acks(PUBACK, [found[3]]))
    await one.drained()
    (group,) = broker.node.pop.groups
    assert group.in_flight == (1 if left < GIB // 4 else 0)
    free(broker, TOTAL)
    assert group.in_flight == 0
    await publisher.publish("a", b"y", 1)
    await until(lambda: group.in_flight == 1)
