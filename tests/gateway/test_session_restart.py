"""Sessions that outlive the node, when it stops and when it is killed."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import pytest

from penstock.gateway.delivery.backlog import common_length
from penstock.gateway.protocol.connect import Connect
from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.packets import (
    CONNACK,
    DUP,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    UNSUBACK,
    UNSUBSCRIBE,
)
from penstock.gateway.protocol.properties import Property, PropertyValues
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.sessions import journal
from penstock.gateway.sessions.acked import decode_acked
from penstock.gateway.sessions.rows import all_sessions
from penstock.node.node import Node
from penstock.store.index.index import Index
from penstock.store.log.recordscan import walk
from penstock.store.options import KIB, MIB
from penstock.store.record import HEADER, Kind, decode
from penstock.store.recovery.repair import repair, survey
from tests.depth import DEPTH
from tests.gateway.brokers import StartBroker
from tests.gateway.lasting_sessions import (
    ENDS,
    LASTS,
    begin,
    both_versions,
    both_versions_and_ends,
    each_end,
    end_node,
    leave,
    recorded,
    resume,
    stored,
)
from tests.gateway.moving_time import pass_time
from tests.gateway.packet_cases import connect, field, packet, subscribe
from tests.gateway.wire import CLEAN, WILL, Broker, Client, HeldSync, Message, message_of
from tests.waiting import until

# --- what waits, and what is under way ----------------------------------------------------------------------------------


@both_versions_and_ends
async def test_messages_for_a_client_that_is_away_survive_the_end_of_the_node(broker: Broker, version: int, end: str) -> None:
    """[MQTT-4.1.0-1], [MQTT-3.1.2-5], [MQTT-4.6.0-6]."""
    client, publisher = await begin(broker, "pump", version), await broker.connect("publisher")
    await client.subscribe(("a/+", 1), ("b", 2))
    await publisher.publish("a/1", b"before", 1)
    assert (await client.message()).body == b"before"
    await leave(client)
    for n in range(50):
        await publisher.publish(f"a/{n}", b"%d" % n, 1)
    await end_node(broker, end)
    publisher = await broker.connect("publisher")
    for n in range(50, 100):
        await publisher.publish(f"a/{n}", b"%d" % n, 1)
    again = await resume(broker, "pump", version)
    assert [int((await again.message()).body) for _ in range(100)] == list(range(100))
    await publisher.publish("b", b"live", 2)
    assert await again.message() == Message("b", b"live", 2)
    assert await again.drained() == []


@both_versions_and_ends
async def test_deliveries_under_way_are_sent_again_with_dup_and_their_packet_ids_in_order(
    broker: Broker, version: int, end: str
) -> None:
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
    await recorded(broker)
    await end_node(broker, end)
    publisher = await broker.connect("publisher")
    await publisher.publish("a", b"new", 2)
    again = await resume(broker, "pump", version)
    came = [await again.receive() for _ in range(5)]
    assert [(item[0], item[1] & DUP, item[3], item[4]) if item[0] == PUBLISH else item for item in came] == [
        (PUBLISH, DUP, ids[0], b"0"),
        (PUBREL, ids[3]),
        (PUBLISH, DUP, ids[4], b"4"),
        (PUBLISH, DUP, ids[5], b"5"),
        (PUBLISH, 0, came[-1][3], b"new"),
    ]
    assert came[-1][3] not in ids, "the packet ids must continue where they were"


async def test_after_a_kill_only_deliveries_without_a_recorded_acknowledgement_are_sent_again(broker: Broker) -> None:
    client, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    for n in range(6):
        await publisher.publish("a", b"%d" % n, 1)
        if n < 3:
            await client.message()
    await client.drained()
    await recorded(broker)
    for n in range(6, 9):
        await publisher.publish("a", b"%d" % n, 1)
    later = [message_of(await client.receive()).body for _ in range(3)]
    assert later == [b"6", b"7", b"8"]
    await broker.kill()
    again = await resume(broker, "pump", 5)
    came = [await again.receive() for _ in range(6)]
    assert [(item[1] & DUP, item[4]) for item in came[:3]] == [(DUP, b"3"), (DUP, b"4"), (DUP, b"5")]
    assert [item[4] for item in came[3:]] == later
    assert await again.drained() == []


def never(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make intervals of the journal so long that they never pass in a test."""
    for name in names:
        monkeypatch.setattr(journal, name, 3600.0)


@both_versions
async def test_the_next_commit_records_what_was_acknowledged(
    broker: Broker, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    never(monkeypatch, "SAVE_S", "ACKS_SAVE_S")
    client, publisher = await begin(broker, "pump", version), await broker.connect("publisher")
    await client.subscribe(("a", 1), ("b", 1))
    for n in range(6):
        await publisher.publish("ab"[n % 2], b"%d" % n, 1)
    for _ in range(4):
        await client.message()
    await client.drained()
    await publisher.publish("other", b"x", 1)
    await broker.kill()
    again = await resume(broker, "pump", version)
    came = [await again.receive() for _ in range(2)]
    assert sorted((item[4], item[1] & DUP) for item in came) == [(b"4", DUP), (b"5", DUP)]
    assert await again.drained() == []
    for item in came:
        await again.send(encode_acks(PUBACK, [item[3]]))
    publisher = await broker.connect("publisher")
    await publisher.publish("a", b"new", 1)
    item = await again.receive()
    assert (item[4], item[1] & DUP) == (b"new", 0)


async def test_acknowledgements_are_recorded_soon_without_another_commit(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    never(monkeypatch, "SAVE_S")
    assert journal.ACKS_SAVE_S <= 0.02
    client, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    for n in range(3):
        await publisher.publish("a", b"%d" % n, 1)
    await client.message()
    await until(lambda: acked_records(broker) != [])
    await broker.kill()
    again = await resume(broker, "pump", 5)
    came = [await again.receive() for _ in range(2)]
    assert [(item[4], item[1] & DUP) for item in came] == [(b"1", DUP), (b"2", DUP)]
    assert await again.drained() == []


async def test_the_turn_in_which_many_acknowledgements_come_records_them(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    never(monkeypatch, "SAVE_S", "ACKS_SAVE_S")
    monkeypatch.setattr(journal, "ACKS_MAX", 5)
    about = LASTS | {Property.RECEIVE_MAXIMUM: 4}
    client, publisher = await broker.connect_5("pump", about=about), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    await leave(client)
    for n in range(20):
        await publisher.publish("a", b"%d" % n, 1)
    client = await broker.connect_5("pump", flags=0, about=about)
    for _ in range(10):
        await client.message()
    await until(lambda: acked_records(broker) != [])


async def test_one_record_has_the_acknowledgements_of_many_clients(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    never(monkeypatch, "SAVE_S", "ACKS_SAVE_S")
    clients = [await begin(broker, f"pump{n}", 5) for n in range(20)]
    publisher = await broker.connect("publisher")
    for client in clients:
        await client.subscribe(("a", 1))
    for n in range(3):
        await publisher.publish("a", b"%d" % n, 1)
    for client in clients:
        for _ in range(3):
            await client.message()
        await client.drained()
    await publisher.publish("other", b"x", 1)
    (body,) = acked_records(broker)
    found = decode_acked(body)
    assert [(entry.number, entry.floor) for entry in found.entries] == [(0, 3)] * 20
    await broker.kill()
    for n in range(20):
        assert await (await resume(broker, f"pump{n}", 5)).drained() == []


async def test_idle_subscribers_cost_nothing(broker: Broker) -> None:
    clients = [await begin(broker, f"pump{n}", 5) for n in range(3)]
    publisher = await broker.connect("publisher")
    for client in clients:
        await client.subscribe(("a", 1))
    await publisher.publish("a", b"x", 1)
    for client in clients:
        await client.message()
        await client.drained()
    await recorded(broker)
    await publisher.publish("other", b"x", 1)
    before = broker.node.store.log.end
    await publisher.publish("other", b"x", 1)
    for client in clients:
        await client.drained()
    (record,) = broker.node.store.log.scan(before)
    assert record.kind == Kind.MESSAGE


async def test_records_of_acknowledgements_are_forgotten_when_full_records_follow(broker: Broker) -> None:
    client, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    sessions = broker.node.gateway.lifecycle.sessions
    for n in range(3):
        for _ in range(5):
            await publisher.publish("a", b"%d" % n, 1)
            await client.message()
        await client.drained()
        await recorded(broker)
        assert len(list(sessions.acked_records())) <= 15, "those of earlier rounds are obsolete"
    assert len(acked_records(broker)) > len(list(sessions.acked_records()))


async def test_acknowledgements_that_overtake_others_are_recorded_too(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow handler of one message must not bring back all that others have handled meanwhile."""
    never(monkeypatch, "SAVE_S", "ACKS_SAVE_S")
    client, publisher = (
        await broker.connect_5("pump", about=LASTS | {Property.RECEIVE_MAXIMUM: 16}),
        await broker.connect("publisher"),
    )
    await client.subscribe(("a", 1))
    held = b""
    for n in range(100):
        await publisher.publish("a", b"%d" % n, 1)
        item = await client.receive()
        if n == 10:
            held = item[4]
        else:
            await client.send(encode_acks(PUBACK, [item[3]]))
    await client.drained()
    await publisher.publish("other", b"x", 1)
    await broker.kill()
    again = await resume(broker, "pump", 5)
    came = [item for item in await again.drained() if item[0] == PUBLISH]
    assert held in [item[4] for item in came]
    assert len(came) <= 1 + 16 // 8
    assert all(item[1] & DUP for item in came)


def acked_records(broker: Broker) -> list[bytes]:
    """Return the bodies of the SESSIONS_ACKED records in the log."""
    return [record.body for record in broker.node.store.log.scan(0) if record.kind == Kind.SESSIONS_ACKED]


async def test_a_hot_subscriber_costs_few_records(broker: Broker) -> None:
    about = LASTS | {Property.RECEIVE_MAXIMUM: 1}
    client, publisher = await broker.connect_5("pump", about=about), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    await recorded(broker)
    for n in range(200):
        await publisher.send(encode_publish(b"a", b"%d" % n, 1, packet_id=n + 1))
    assert [int((await client.message()).body) for _ in range(200)] == list(range(200))
    await client.drained()
    await recorded(broker)
    kinds = [record.kind for record in broker.node.store.log.scan(0)]
    assert 1 <= kinds.count(Kind.SESSION_OFFSETS) <= 20
    one = stored(broker, "pump")
    assert (one.inflight, one.subscriptions["a"].cursor) == ({}, 200)


async def test_a_record_has_only_what_has_changed(broker: Broker) -> None:
    client, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    for n in range(20):
        await publisher.publish("a", b"%d" % n, 1)
    session, recording, log = broker.connection("pump").session, broker.node.gateway.journal, broker.node.store.log
    recording.save(session)
    before = log.end
    recording.save(session)
    assert log.end == before
    await client.message()
    await client.drained()
    recording.save(session)
    broker.node.store.commit()
    full = [record for record in log.scan(before) if record.kind == Kind.SESSION_OFFSETS]
    assert 0 < sum(record.size for record in full) < 100, "the record has one packet id"
    assert list(stored(broker, "pump").inflight) == list(session.inflight.slots)


async def test_no_message_of_qos_0_is_sent_twice_after_a_kill(broker: Broker) -> None:
    """[MQTT-4.3.1-1]: the node doesn't know what it sent since the last record, so it sends none of that again."""
    client, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    away = await begin(broker, "away", 5)
    for one in (client, away):
        await one.subscribe(("a", 0))
    await leave(away)
    await recorded(broker)
    await publisher.publish("a", b"x", 1)
    assert await client.message() == Message("a", b"x")
    await broker.kill()
    assert await (await resume(broker, "pump", 5)).drained() == []
    assert await (await resume(broker, "away", 5)).messages() == [Message("a", b"x")]


async def test_a_qos_0_subscription_that_sends_for_one_of_qos_1_loses_nothing_in_a_kill(broker: Broker) -> None:
    """[MQTT-3.3.4-2]: of two overlapping subscriptions the older one sends, at the higher QoS."""
    client, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    await client.subscribe(("a/#", 0), ("a/+", 1))
    await recorded(broker)
    await publisher.publish("a/1", b"x", 1)
    assert message_of(await client.receive()) == Message("a/1", b"x", 1)
    await broker.kill()
    again = await resume(broker, "pump", 5)
    assert await again.message() == Message("a/1", b"x", 1)


# --- QoS 2: what must be durable before what ----------------------------------------------------------------------------


async def test_a_packet_id_is_durable_before_a_client_sees_it_at_qos_2(broker: Broker) -> None:
    """[MQTT-4.3.3-2]: otherwise the next node would send the message under another packet id."""
    client, other = await begin(broker, "pump", 5), await broker.connect("clean")
    for one in (client, other):
        await one.subscribe(("a", 2))
    publisher = await broker.connect("publisher")
    with HeldSync(broker) as disk:
        await publisher.send(encode_publish(b"a", b"x", 2, packet_id=1))
        assert (await other.receive())[4] == b"x", "a clean session needs no record, so nothing holds its delivery back"
        assert await client.drained() == []
        await publisher.send(encode_publish(b"a", b"later"))
        assert (await other.receive())[4] == b"later"
        assert await client.drained() == [], "the delivery waits behind the one that is not durable"
        disk.release()
        assert [(await client.receive())[4] for _ in range(2)] == [b"x", b"later"]


async def test_a_pubrec_is_durable_before_its_pubrel(broker: Broker) -> None:
    """Otherwise the next node would send the message again to a client that has received it."""
    client, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    await client.subscribe(("a", 2))
    await publisher.publish("a", b"x", 2)
    packet_id = (await client.receive())[3]
    with HeldSync(broker) as disk:
        await client.send(encode_acks(PUBREC, [packet_id]))
        assert await client.drained() == []
        await client.send(encode_acks(PUBREC, [packet_id]))
        assert await client.drained() == []
        disk.release()
        assert [await client.receive() for _ in range(2)] == [(PUBREL, packet_id)] * 2
    await broker.kill()
    assert await (await resume(broker, "pump", 5)).receive() == (PUBREL, packet_id)


@both_versions_and_ends
async def test_a_message_received_at_qos_2_is_stored_once_across_the_end_of_the_node(
    broker: Broker, version: int, end: str
) -> None:
    """[MQTT-4.3.3-10]."""
    properties = b"\0" if version == 5 else b""
    client = await begin(broker, "pump", version)
    await client.send(encode_publish(b"a", b"x", 2, packet_id=7, properties=properties))
    assert await client.receive() == (PUBREC, 7)
    await end_node(broker, end)
    again = await resume(broker, "pump", version)
    await again.send(encode_publish(b"a", b"x", 2, packet_id=7, dup=True, properties=properties))
    assert await again.receive() == (PUBREC, 7)
    await again.send(encode_acks(PUBREL, [7]))
    assert await again.receive() == (PUBCOMP, 7)
    assert broker.stored() == [Message("a", b"x", 2)]
    await end_node(broker, end)
    again = await resume(broker, "pump", version)
    await again.send(encode_publish(b"a", b"y", 2, packet_id=7, properties=properties))
    assert await again.receive() == (PUBREC, 7)
    assert [message.body for message in broker.stored()] == [b"x", b"y"], "the packet id must be free again"


@both_versions
async def test_a_pubrel_is_durable_before_its_pubcomp(broker: Broker, version: int) -> None:
    """Otherwise the next node would take the next message with this packet id for a repetition."""
    client = await begin(broker, "pump", version)
    await client.send(encode_publish(b"a", b"x", 2, packet_id=7, properties=b"\0" if version == 5 else b""))
    assert await client.receive() == (PUBREC, 7)
    with HeldSync(broker) as disk:
        await client.send(encode_acks(PUBREL, [7]))
        assert await client.drained() == []
        disk.release()
        assert await client.receive() == (PUBCOMP, 7)


async def test_messages_with_properties_and_delayed_ones_are_received_once_too(broker: Broker) -> None:
    found: PropertyValues = {Property.CONTENT_TYPE: "text"}
    client = await begin(broker, "pump", 5)
    packets = [
        encode_publish(b"a", b"x", 2, packet_id=1, properties=b"\7\3\0\4text"),
        encode_publish(b"$delayed/3600/b", b"y", 2, packet_id=2, properties=b"\0"),
    ]
    await client.send(*packets)
    told = [(PUBREC, 1), (PUBREC, 2, ReasonCode.SUCCESS)]  # a delayed message is answered with its recall handle
    assert [await client.receive() for _ in range(2)] == told
    await broker.kill()
    again = await resume(broker, "pump", 5)
    await again.send(*packets)
    assert [await again.receive() for _ in range(2)] == told
    assert [message.topic for message in broker.stored()] == ["a", "b"]
    watcher = await broker.connect_5("watcher")
    await watcher.subscribe(("c", 2))
    assert isinstance(again, type(watcher))
    await again.publish_with("c", b"z", found, 2, packet_id=3)
    assert await watcher.message_with() == (Message("c", b"z", 2), found), (
        "subscribers must not learn the publisher and its packet id"
    )


# --- subscriptions ------------------------------------------------------------------------------------------------------


@each_end
async def test_subscriptions_keep_their_options_and_ended_ones_stay_ended(broker: Broker, end: str) -> None:
    """3.8.3.1, [MQTT-3.3.4-3]."""
    client, publisher = await broker.connect_5("pump", about=LASTS), await broker.connect_5("publisher")
    await client.subscribe_with(("a/+", 1 | 8), identifier=5)
    await client.subscribe_with(("a/#", 2), identifier=6)
    await client.subscribe_with(("own", 1 | 4))
    await client.subscribe(("gone", 1), ("gone/#", 1))
    await client.send(packet(UNSUBSCRIBE << 4 | 2, b"\0\2\0" + field(b"gone") + field(b"gone/#")))
    await client.expect(UNSUBACK)
    await end_node(broker, end)
    publisher = await broker.connect_5("publisher")
    await publisher.publish_with("a/1", b"x", {}, 2, retain=True)
    await publisher.publish("gone", b"x", 1)
    again = await broker.connect_5("pump", flags=0, about=LASTS)
    message, found = await again.message_with()
    assert (message, found) == (Message("a/1", b"x", 2, retain=True), {Property.SUBSCRIPTION_IDENTIFIER: [5, 6]})
    await again.publish("own", b"mine", 1)
    await publisher.publish("own", b"yours", 1)
    assert await again.message() == Message("own", b"yours", 1)
    assert await again.drained() == []


async def test_a_subscription_is_durable_before_its_suback(broker: Broker) -> None:
    client = await begin(broker, "pump", 4)
    with HeldSync(broker) as disk:
        await client.send(subscribe(1, (b"a", 1)))
        assert await client.drained() == []
        disk.release()
        await client.expect(SUBACK)


@pytest.mark.parametrize(("end", "qos"), [("stop", 1), ("kill", 2)])
async def test_retained_messages_that_were_not_yet_sent_go_to_the_next_connection(broker: Broker, end: str, qos: int) -> None:
    publisher = await broker.connect("publisher")
    for n in range(6):
        await publisher.publish(f"state/{n}", b"%d" % n, 2, retain=True)
    client = await broker.connect_5("pump", about=LASTS | {Property.RECEIVE_MAXIMUM: 2})
    await client.subscribe(("state/+", qos))
    first = [await client.receive() for _ in range(2)]
    await recorded(broker)
    await end_node(broker, end)
    again = await resume(broker, "pump", 5)
    came = [await again.receive() for _ in range(6)]
    assert [(item[1] & DUP, item[4]) for item in came] == [(DUP, b"0"), (DUP, b"1"), *((0, b"%d" % n) for n in range(2, 6))]
    assert [item[3] for item in came[:2]] == [item[3] for item in first]
    assert await again.drained() == []


async def test_many_sessions_that_subscribe_to_one_filter_have_one_claim_on_its_queue(broker: Broker) -> None:
    clients = [await begin(broker, f"pump{n}", 5) for n in range(5)]
    for client in clients:
        await client.subscribe(("all", 1), ("plant/#", 1))
    queue = broker.node.store.queues.find("all")
    assert queue is not None
    assert queue.owners == {"sessions"}
    await broker.kill()
    for n in range(5):
        assert broker.node.store.queues.find("all") is not None
        await broker.connect_5(f"pump{n}")
    assert broker.node.store.queues.find("all") is None
    root = broker.node.store.queues.find("plant/#")
    assert root is not None
    assert root.owners == {"root"}


# --- how long they last -------------------------------------------------------------------------------------------------


@each_end
async def test_a_session_expires_whether_the_node_runs_or_not(broker: Broker, end: str) -> None:
    """[MQTT-3.1.2-23]."""
    client = await begin(broker, "pump", 5)
    await client.subscribe(("a", 1))
    await leave(client)
    await until(lambda: broker.away() == ["pump"])
    await end_node(broker, end)
    pass_time(broker.node.gateway, 30)  # not nearly 60: a restart takes time of its own
    assert broker.away() == ["pump"]
    await end_node(broker, end)
    pass_time(broker.node.gateway, 61)
    await until(lambda: broker.node.gateway.counters.sessions_expired == 1)
    assert set(broker.held_resources().values()) == {0}


async def test_a_client_that_returns_after_the_expiry_finds_nothing(broker: Broker) -> None:
    client = await begin(broker, "pump", 5)
    await client.subscribe(("a", 1))
    await leave(client)
    await broker.restart()
    gateway = broker.node.gateway
    pass_time(gateway, 1)
    broker.clock.advance(60_000)  # The heartbeat has not come yet.
    assert not (await broker.connect_5("pump", flags=0, about=LASTS)).session_present


async def test_a_client_that_was_connected_at_a_kill_counts_as_gone_since_then(broker: Broker) -> None:
    client = await begin(broker, "pump", 5)
    await client.subscribe(("a", 1))
    await broker.kill()
    await until(lambda: not stored(broker, "pump").connected)
    pass_time(broker.node.gateway, 58)
    assert broker.away() == ["pump"]
    pass_time(broker.node.gateway, 3)
    assert set(broker.held_resources().values()) == {0}


@pytest.mark.parametrize("end", [*ENDS, ""])
async def test_a_session_whose_expiry_becomes_0_ends_with_its_connection(broker: Broker, end: str) -> None:
    """3.1.2.11.2: a client may return with another expiry interval."""
    client, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    await leave(client)
    await publisher.publish("a", b"x", 1)
    again = await broker.connect_5("pump", flags=0)
    assert again.session_present
    assert await again.message() == Message("a", b"x", 1)
    await again.subscribe(("b", 1))
    if end:
        await end_node(broker, end)
    else:
        await leave(again)
        publisher.reset()
    await until(lambda: set(broker.held_resources().values()) == {0})


@each_end
async def test_a_clean_session_leaves_nothing_behind(broker: Broker, end: str) -> None:
    for client in (await broker.connect("old"), await broker.connect_5("new", flags=0)):
        await client.subscribe(("a", 1))
    await end_node(broker, end)
    assert set(broker.held_resources().values()) == {0}


@both_versions
async def test_a_clean_start_ends_a_session_of_an_earlier_node(broker: Broker, version: int) -> None:
    client = await begin(broker, "pump", version)
    await client.subscribe(("a", 1))
    await broker.kill()
    again = await (broker.connect_5("pump") if version == 5 else broker.connect("pump"))
    await leave(again)
    await until(lambda: not broker.node.gateway.connections)
    assert set(broker.held_resources().values()) == {0}


async def test_at_the_limit_a_session_is_refused_if_all_clients_are_connected(start_broker: StartBroker) -> None:
    broker = await start_broker(sessions_max=1)
    await begin(broker, "one", 5)
    new = await broker.connect_5("two", about=LASTS, accepted=False)
    assert (await new.connack())[0] == 0x97
    old = await broker.dial()
    await old.send(connect(0, b"three", keep_alive_s=0))
    assert await old.receive() == (CONNACK, 0, b"\0\3")
    await broker.connect_5("clean")


# --- bounds -------------------------------------------------------------------------------------------------------------


@both_versions
async def test_beyond_the_backlog_limit_the_oldest_messages_are_dropped(start_broker: StartBroker, version: int) -> None:
    broker = await start_broker(session_queued_max=10)
    client, publisher = await begin(broker, "pump", version), await broker.connect("publisher")
    await client.subscribe(("flood", 1), ("quiet", 1))
    await leave(client)
    for n in range(3):
        await publisher.publish("quiet", b"%d" % n, 1)
    for n in range(50):
        await publisher.publish("flood", b"%d" % n, 1)
    await broker.kill()
    again = await resume(broker, "pump", version)
    came = [await again.message() for _ in range(10)]
    assert sorted(int(message.body) for message in came if message.topic == "quiet") == [0, 1, 2]
    assert [int(message.body) for message in came if message.topic == "flood"] == list(range(43, 50))
    assert await again.drained() == []
    assert broker.node.gateway.counters.queued_dropped == 43


async def test_a_slow_connected_client_loses_its_oldest_messages_too(start_broker: StartBroker) -> None:
    broker = await start_broker(session_queued_max=10)
    client = await broker.connect_5("pump", about=LASTS | {Property.RECEIVE_MAXIMUM: 1})
    publisher = await broker.connect("publisher")
    await client.subscribe(("a", 1))
    for n in range(50):
        await publisher.publish("a", b"%d" % n, 1)
    assert [int((await client.message()).body) for _ in range(11)] == [0, *range(40, 50)]


async def test_messages_that_have_expired_do_not_displace_those_that_wait(start_broker: StartBroker) -> None:
    broker = await start_broker(session_queued_max=10, segment_bytes=MIB, retention_bytes=2 * MIB)
    client, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    await leave(client)
    await publisher.publish("a", b"kept because it is retained", 1, retain=True)
    for n in range(50):
        await publisher.publish("a", b"%d" % n, 1)
    old = broker.node.store.log.end
    for _ in range(100):
        await publisher.publish("b", b"x" * 64 * KIB, 1)
    await until(lambda: broker.node.store.retention.trimmed_entries > 50)
    assert broker.node.store.log.start > old
    for n in range(5):
        await publisher.publish("a", b"new %d" % n, 1)
    again = await resume(broker, "pump", 5)
    bodies = [(await again.message()).body for _ in range(6)]
    assert bodies == [b"kept because it is retained", *(b"new %d" % n for n in range(5))]
    assert broker.node.gateway.counters.queued_dropped == 0


@pytest.mark.parametrize(
    ("lengths", "total", "length"), [([3, 50], 10, 7), ([50, 50], 10, 5), ([5, 5], 10, 5), ([0, 20], 7, 7), ([9], 1, 1)]
)
def test_the_longest_queues_are_cut_to_one_length(lengths: list[int], total: int, length: int) -> None:
    assert common_length(lengths, total) == length
    assert sum(min(each, length) for each in lengths) <= total


async def test_sessions_of_clients_that_are_away_are_not_in_memory(broker: Broker) -> None:
    def counts() -> dict[str, int]:
        gc.collect()
        found = Counter(type(each).__name__ for each in gc.get_objects())
        return {kind: found[kind] for kind in KINDS}

    lifecycle, recording, store = broker.node.gateway.lifecycle, broker.node.gateway.journal, broker.node.store
    wish = Connect(5, "", False, 0, None, None, None, session_expiry_s=600)
    before = counts()
    for n in range(AWAY):
        session, _ = lifecycle.open(f"device-{n}", wish, 600)
        recording.record_subscription(session, f"device/{n}/orders", 1, 0, None)
        lifecycle.leave(session)
        if n % 100 == 0:
            await store.durable()
    await store.durable()
    del session
    assert len(lifecycle.sessions) == AWAY
    assert counts() == before
    await broker.kill()
    assert len(broker.node.gateway.lifecycle.sessions) == AWAY
    assert counts() == before
    client = await resume(broker, "device-77", 5)
    await client.publish("device/77/orders", b"go", 1)
    assert await client.message() == Message("device/77/orders", b"go", 1)


AWAY = 300 * DEPTH
KINDS = ("Session", "StoredSession", "StoredSubscription", "Subscription", "LightQueue")


async def test_records_that_a_session_needs_outlive_their_segments(start_broker: StartBroker) -> None:
    broker = await start_broker(segment_bytes=MIB, retention_bytes=2 * MIB)
    client, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    await with_will(broker, 3000, 3600)
    broker.connection("dies").outbox.abort()
    await client.subscribe(("a", 1))
    for n in range(3):
        await publisher.publish("a", b"%d" % n, 1)
    assert [message.body for message in await client.messages()] == [b"0", b"1", b"2"]
    await leave(client)
    await publisher.publish("a", b"expires", 1)
    old = broker.node.store.log.end
    for _ in range(100):
        await publisher.publish("b", b"x" * 64 * KIB, 1)
    await until(lambda: broker.node.store.log.start > old)
    await broker.kill()
    again = await resume(broker, "pump", 5)
    assert [message.body for message in await again.messages()] == [b"0", b"1", b"2"]
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("will", 1))
    pass_time(broker.node.gateway, 3100)
    assert await watcher.message() == Message("will", b"gone", 1)


def damage(broker: Broker, is_meant: Callable[[int, bytes], bool]) -> None:
    """Damage the first record, of those whose kind and body are meant, in the log of a node that has stopped."""
    with (broker.config.data_dir / "commitlog" / ("0" * 20 + ".log")).open("r+b") as file:
        log = file.read()
        found = (decode(log, at, position=at) for at in walk(log)[0])
        one = next(one for one in found if is_meant(one.kind, one.body))
        file.seek(one.position + HEADER.size)
        file.write(b"\xff")


async def repaired(broker: Broker, *, is_index_kept: bool = False) -> None:
    """Repair the log of a node that has stopped, and start the next node on it, with the index or without it."""
    data_dir = broker.config.data_dir
    if not is_index_kept:
        Index.destroy(data_dir)
    found = survey(data_dir).damages
    assert found
    repair(data_dir, found)
    broker.node = Node(broker.config)
    await broker.node.start()


@pytest.mark.parametrize(
    ("damaged", "is_index_kept"),
    [(Kind.MESSAGE, False), (Kind.SESSION_SUBSCRIBED, False), (Kind.SESSION_SUBSCRIBED, True), (Kind.SESSION_OPENED, False)],
)
async def test_no_new_message_is_missed_on_a_repaired_log(broker: Broker, damaged: Kind, is_index_kept: bool) -> None:
    for name in ("pump", "second"):
        client, publisher = await begin(broker, name, 5), await broker.connect("publisher")
        await client.subscribe(("a", 1))
        for n in range(3):
            await publisher.publish("a", b"%d" % n, 1)
            await client.message()
        await leave(client)
    await broker.stop()
    damage(broker, lambda kind, body: kind == damaged)
    await repaired(broker, is_index_kept=is_index_kept)
    publisher = await broker.connect("publisher")
    await publisher.publish("a", b"new", 1)
    for name in ("pump", "second"):
        client = await broker.connect_5(name, flags=0, about=LASTS)
        came = [message.body for message in await client.messages()]
        if name == "second":
            assert came == [b"new"]
        elif damaged is Kind.MESSAGE or is_index_kept:
            assert came == [b"0", b"1", b"2", b"new"], "the messages for the second session and the new one must come"
        else:
            assert came == [], "the damaged record is that of the session or of the subscription"


@pytest.mark.parametrize("damaged", [b"early", b"later"])
async def test_a_backlog_behind_a_damaged_message_is_not_passed_over(broker: Broker, damaged: bytes) -> None:
    """The queue that is built anew has fewer entries, so the offset in the record of the session is too high."""
    client = await broker.connect_5("pump", about=LASTS | {Property.RECEIVE_MAXIMUM: 2})
    publisher = await broker.connect("publisher")
    await client.subscribe(("a", 1))
    for body in (b"early", b"early too"):
        await publisher.publish("a", body, 1)
        assert (await client.message()).body == body
    for body in (b"0", b"1", b"later", b"2", b"3"):
        await publisher.publish("a", body, 1)
    assert len(await client.drained()) == 2
    await leave(client)
    await broker.stop()
    damage(broker, lambda kind, body: body == damaged)
    await repaired(broker)
    client = await broker.connect_5("pump", flags=0, about=LASTS)
    publisher = await broker.connect("publisher")
    await publisher.publish("a", b"new", 1)
    bodies = [message.body for message in await client.messages()]
    assert bodies == [each for each in (b"0", b"1", b"later", b"2", b"3", b"new") if each != damaged]


@both_versions
async def test_a_packet_id_from_before_a_damaged_range_does_not_turn_a_new_message_into_a_repetition(
    broker: Broker, version: int
) -> None:
    """The damaged record released the packet id, so the next message with it must not be acknowledged without being stored."""
    client = await begin(broker, "pump", version)
    await client.publish("a", b"1", 2)
    await leave(client)
    await broker.stop()
    damage(broker, lambda kind, body: kind == Kind.SESSION_OFFSETS)
    await repaired(broker)
    client = await resume(broker, "pump", version)
    await client.publish("a", b"2", 2)
    assert [message.body for message in broker.stored()] == [b"1", b"2"]


@both_versions
async def test_a_packet_id_from_after_a_damaged_range_is_still_known(broker: Broker, version: int) -> None:
    publisher, client = await broker.connect("publisher"), await begin(broker, "pump", version)
    await publisher.publish("a", b"damaged", 1)
    packets = [encode_publish(b"a", b"1", 2, dup=dup, packet_id=7, properties=b"\0"[: version == 5]) for dup in (False, True)]
    await client.send(packets[0])
    await client.expect(PUBREC)
    await leave(client)
    await broker.stop()
    damage(broker, lambda kind, body: body == b"damaged")
    await repaired(broker)
    client = await resume(broker, "pump", version)
    await client.send(packets[1])
    await client.expect(PUBREC)
    assert [message.body for message in broker.stored()] == [b"1"]


async def test_a_delivery_under_way_whose_message_was_damaged_is_not_sent_again(broker: Broker) -> None:
    """What a repair puts in the place of a record is whole, but it is no message."""
    client, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    await client.subscribe(("a", 1))
    await publisher.publish("a", b"damaged", 1)
    await client.expect(PUBLISH)
    await leave(client)
    await broker.stop()
    damage(broker, lambda kind, body: body == b"damaged")
    await repaired(broker)
    client, publisher = await resume(broker, "pump", 5), await broker.connect("publisher")
    await publisher.publish("a", b"next", 1)
    assert [message.body for message in await client.messages()] == [b"next"]


@pytest.mark.parametrize("options", [1, 1 | 1 << 2], ids=["shared packets", "packets of its own"])
async def test_a_delayed_message_that_was_damaged_after_it_had_fired_is_not_sent(broker: Broker, options: int) -> None:
    """The record by which it fired says where it is, so that it has an entry in the queue."""
    client, publisher = await begin(broker, "pump", 5), await broker.connect("publisher")
    await client.subscribe(("a", options))
    await leave(client)
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("a", 1))
    await publisher.publish("$delayed/1/a", b"damaged", 1)
    broker.clock.advance(1000)
    broker.fire_delayed()
    assert (await watcher.message()).body == b"damaged"
    await broker.stop()
    damage(broker, lambda kind, body: body == b"damaged")
    await repaired(broker)
    client, publisher = await resume(broker, "pump", 5), await broker.connect("publisher")
    await publisher.publish("a", b"next", 1)
    assert [message.body for message in await client.messages()] == [b"next"]


# --- wills --------------------------------------------------------------------------------------------------------------


async def with_will(broker: Broker, delay_s: int, expiry_s: int, client_id: str = "dies") -> Client:
    about: PropertyValues = {Property.SESSION_EXPIRY_S: expiry_s}
    will: PropertyValues = {Property.WILL_DELAY_S: delay_s, Property.CONTENT_TYPE: "text"}
    return await broker.connect_5(client_id, b"will", b"gone", flags=CLEAN | WILL | 1 << 3, about=about, will=will)


async def test_a_will_is_published_once_after_a_kill(broker: Broker) -> None:
    """[MQTT-3.1.2-8], 3.1.3.2.2: it waits for its delay, or for the end of the session if that comes first."""
    for delay_s, expiry_s in ((0, 0), (0, 60), (10, 0), (10, 60), (60, 20)):
        await with_will(broker, delay_s, expiry_s, f"{delay_s}, {expiry_s}")
    await broker.kill()
    watcher = await broker.connect_5("watcher")
    await watcher.subscribe(("will", 1))
    index = broker.node.store.index
    await until(lambda: not any(one.connected and one.client_id != "watcher" for one in all_sessions(index)))
    for waits_s, count in ((0, 3), (9, 3), (2.5, 4), (7, 4), (2.5, 5)):
        if waits_s:
            pass_time(broker.node.gateway, waits_s)
        await until(lambda count=count: len(broker.stored()) == count)  # type: ignore[misc]
        assert len(await watcher.drained()) <= count
    assert broker.stored() == [Message("will", b"gone", 1)] * 5
    await broker.kill()
    pass_time(broker.node.gateway, 120)
    assert broker.stored() == [Message("will", b"gone", 1)] * 5
    assert broker.held_resources()["sessions"] == 0


async def test_a_will_has_its_properties_and_no_others(broker: Broker) -> None:
    watcher = await broker.connect_5("watcher")
    await watcher.subscribe(("will", 1))
    client = await with_will(broker, 0, 0)
    client.reset()
    assert await watcher.message_with() == (Message("will", b"gone", 1), {Property.CONTENT_TYPE: "text"})


@each_end
async def test_a_stop_publishes_the_wills_of_connected_clients(broker: Broker, end: str) -> None:
    """3.14.4: a connection that the server closes ends without a DISCONNECT of the client."""
    await with_will(broker, 0, 60)
    await end_node(broker, end)
    await until(lambda: broker.stored() == [Message("will", b"gone", 1)])


async def test_a_withdrawn_will_is_not_published_after_a_kill(broker: Broker) -> None:
    """[MQTT-3.14.4-3]."""
    client = await with_will(broker, 0, 60)
    await leave(client)
    await until(lambda: "dies" in broker.away())
    await broker.kill()
    pass_time(broker.node.gateway, 120)
    assert broker.stored() == []


async def test_a_client_that_returns_in_time_after_a_kill_withdraws_its_will(broker: Broker) -> None:
    """[MQTT-3.1.3-9]."""
    await with_will(broker, 10, 60)
    await broker.kill()
    await leave(await broker.connect_5("dies", flags=0, about=LASTS))
    pass_time(broker.node.gateway, 120)
    assert broker.stored() == []
